/* Prints each kernel's launches, as block size and dynamic shared memory, for check_resources.sh.  No GPU is needed, as
 * no kernel runs (fake_cudart.c).  So tensors need no memory.
 *
 *     launches CAPABILITY     a compute capability, such as 90
 *
 * The calls have the sizes of the operators' tests and of the bench, in every dtype, with and without `saved`.
 * Variants add other alignments, snapshots, pools and 16-bit states. */
#include "launches.h"
#include "gt_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The variant of a call.  A case may refuse the last three. */
typedef enum variant { PLAIN, SAVED, READS_Y, SMALL_STATES, SNAPSHOTS, POOLS, VARIANTS } variant;

/* Where arrays lie: packed; one element after an aligned address; with the time as the last index. */
typedef enum place { ALIGNED, SHIFTED, TIME_LAST, PLACES } place;

static void put(void *args, size_t offset, const void *from, size_t bytes) {
    if (offset) memcpy((char *)args + offset, from, bytes);
}

static void put_address(void *args, size_t offset, uintptr_t address) { put(args, offset, &address, sizeof address); }

/* Gives tensor i an address that belongs to no other tensor.  No kernel runs, so nothing reads or writes there. */
static void put_tensor(const gt_op *op, void *args, int i, size_t shift) {
    if (i >= 0) put_address(args, op->tensors[i].offset, ((uintptr_t)(i + 1) << 44) + shift);
}

/* Gives a tensor [B,T,...] strides with which the time is the last index. */
static void put_time_last(const gt_tensor *t, void *args, int64_t T, int64_t last) {
    const int is_4d = strlen(t->shape) == 4;
    gt_stride4 stride = {.t = 1, .h = is_4d ? T * last : T, .n = T};
    if (strncmp(t->shape, "BT", 2) || (is_4d && t->kind != 'X')) return;
    put(args, t->stride_offset, &stride, (size_t)gt_stride_count(t) * sizeof(int64_t));
}

/* Gives a call all tensors of its case, except snapshots and the fields of pools in forward. */
static void put_tensors(const test_case *c, gt_pass pass, place where, test_args *args) {
    const gt_op *op = test_table(c);
    const int64_t T = test_is_over_time(test_op_of(c->op)) ? test_get_size(c, 'T') : 0;
    for (int i = 0; op->tensors[i].name; i++) {
        const gt_tensor *t = &op->tensors[i];
        const int of_pool = !strcmp(t->name, "slots") || !strcmp(t->name, "starts_zero");
        const gt_dtype dtype = test_dtype_of(c, t);
        const size_t element = dtype == GT_BF16 || dtype == GT_F16 ? 2 : 4;
        int64_t size[4];
        const int rank = test_shape(c, pass, t, size);
        if (gt_use(t, pass) == '-' || test_is_absent(c, t) || !test_count(c, pass, t)) continue;
        if (t->kind == 'n' || (of_pool && pass != GT_STEP)) continue;
        if (pass == GT_BACKWARD && !strcmp(t->name, "y")) continue;
        put_tensor(op, args, i, where == SHIFTED ? element : 0);
        if (where == TIME_LAST && T) put_time_last(t, args, T, size[rank - 1]);
    }
}

/* Changes the arguments of a call for a variant.  Returns 0 if the call does not take the variant. */
static int vary(const test_op *of, gt_pass pass, variant v, test_args *args) {
    const gt_op *op = of->table();
    const int on = 1, bf16 = GT_BF16;
    const int64_t every = GT_SNAPSHOT_TOKENS;
    const size_t bytes = (size_t)1 << 44;
    int64_t sequences = 0;
    if (op->fields.seq_capacity) memcpy(&sequences, (char *)args + op->fields.seq_capacity, sizeof sequences);
    switch (v) {
    case PLAIN: return 1;
    case READS_Y:
        if (!of->reads_y || pass != GT_BACKWARD) return 0;
        put(args, of->reads_y, &on, sizeof on);
        put_tensor(op, args, test_find(op, "y"), 0);
        /* fall through */
    case SAVED:
        if (!op->fields.saved || pass > GT_BACKWARD) return 0;
        put_address(args, op->fields.saved, (uintptr_t)1 << 52);
        put(args, op->fields.saved_bytes, &bytes, sizeof bytes);
        return 1;
    case SMALL_STATES:
        if (op->of_steps.passes == GT_STATES_OF_STEP || !op->of_steps.state || pass != GT_FORWARD) return 0;
        put(args, op->of_steps.state, &bf16, sizeof bf16);
        if (op->of_steps.conv_state) put(args, op->of_steps.conv_state, &bf16, sizeof bf16);
        return 1;
    case SNAPSHOTS:
        if (!op->of_steps.snapshot || pass != GT_FORWARD) return 0;
        put(args, op->of_steps.snapshot_every, &every, sizeof every);
        put(args, op->of_steps.snapshot, &bf16, sizeof bf16);
        put_tensor(op, args, test_find(op, "snapshots"), 0);
        put_tensor(op, args, test_find(op, "conv_snapshots"), 0);
        return 1;
    case POOLS:
        if (!sequences || pass != GT_FORWARD || test_find(op, "starts_zero") < 0) return 0;
        put_tensor(op, args, test_find(op, "slots"), 0);
        put(args, op->fields.slot_capacity, &sequences, sizeof sequences);
        return 1;
    case VARIANTS: break;
    }
    return 0;
}

/* Clears the fields that only a step takes, as far as they are set in a case of the tests or the bench. */
static void clear_step(const gt_op *op, test_args *args) {
    const int64_t none = 0;
    const int dtype = GT_DTYPE_DEFAULT;
    put(args, op->fields.slot_capacity, &none, sizeof none);
    put(args, op->of_steps.state, &dtype, sizeof dtype);
    if (op->of_steps.conv_state) put(args, op->of_steps.conv_state, &dtype, sizeof dtype);
    put(args, op->of_steps.parameter, &dtype, sizeof dtype);
}

static void launch_pass(const test_case *given, gt_pass pass) {
    const test_op *of = test_op_of(given->op);
    const gt_op *op = of->table();
    const size_t enough = (size_t)1 << 46;
    test_case c = *given;
    if (!test_has_pass(&c, pass)) return;
    if (pass != GT_STEP) clear_step(op, &c.args);
    for (place where = ALIGNED; where < PLACES; where++) {
        test_args placed = c.args;
        put_tensors(&c, pass, where, &placed);
        put_address(&placed, op->fields.workspace, (uintptr_t)1 << 53);
        put(&placed, op->fields.workspace_bytes, &enough, sizeof enough);
        for (variant v = PLAIN; v < VARIANTS; v++) {
            test_args args = placed;
            if (!vary(of, pass, v, &args)) continue;
            const gt_status status = op->calls.pass[pass](&args, NULL);
            test_check(status == GT_OK || v > READS_Y, "%s: %s", test_describe(&c, pass), gt_last_error());
        }
    }
}

/* Makes the calls of one pass, or of all passes (GT_PASSES), in every dtype. */
static void launch_dtypes_of(const test_case *c, gt_pass only) {
    static const gt_dtype dtypes[][2] = {{GT_F32, 0}, {GT_BF16, 0}, {GT_BF16, GT_F32}, {GT_F16, 0}, {GT_F16, GT_F32}};
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        test_case of = *c;
        if (dtypes[i][1] && !test_table(c)->companion_offset) continue;
        test_set_dtype(&of, dtypes[i][0], dtypes[i][1]);
        for (int pass = GT_FORWARD; pass < GT_PASSES; pass++)
            if (only == GT_PASSES || pass == (int)only) launch_pass(&of, (gt_pass)pass);
    }
}

static void launch_dtypes(const test_case *c) { launch_dtypes_of(c, GT_PASSES); }

/* The sizes of the tests with some times or rows: in one segment and in several, packed and not packed. */
static void launch_sizes(const test_op *op) {
    static const int64_t times[][2] = {{1, 1}, {40, 1}, {1000, 1}, {1000, 3}, {1000, 0}}; /* and segments */
    for (const test_case *size = op->sizes; size->op; size++) {
        for (int i = 0; i < 5; i++) {
            test_case c = *size;
            test_set_size(&c, test_is_over_time(op) ? 'T' : 'M', times[i][0]);
            if (test_is_over_time(op)) test_set_size(&c, 'B', 2);
            put(&c.args, op->table()->fields.segments, &times[i][1], sizeof times[i][1]);
            launch_dtypes(&c);
            if (i < 2 || !test_takes_packed(op)) continue;
            test_set_size(&c, 'B', 1);
            test_set_sequences(&c, 6, 6);
            launch_dtypes(&c);
        }
    }
}

/* Steps, with states and parameters of every dtype. */
static void launch_steps(const test_op *op) {
    const gt_step_dtypes *of = &op->table()->of_steps;
    const int has_types = of->state && of->passes != GT_STATES_OF_FORWARD;
    static const int64_t times[] = {1, 2, 4, 5, 16};
    for (const test_case *size = op->steps; size && size->op; size++) {
        for (int i = 0; i < 40; i++) {
            test_case c = *size;
            test_set_size(&c, 'T', times[i % 5]);
            if (i / 5 % 2) test_set_slots(&c, test_get_size(&c, 'B') + 2);
            if (has_types) test_set_flag(&c, of->state, i / 10 ? GT_F32 + i / 10 - 1 : GT_DTYPE_DEFAULT);
            if (of->scale && i / 10 == 1) test_set_flag(&c, of->state, GT_INT8);
            if (of->parameter) test_set_flag(&c, of->parameter, i / 10 ? GT_DTYPE_DEFAULT : GT_BF16);
            launch_dtypes_of(&c, GT_STEP);
            c.drafts = TEST_ROUNDING;
            if (has_types && test_get_flag(&c, of->state) > GT_F32) launch_dtypes_of(&c, GT_STEP);
        }
    }
}

static void launch_table(const test_case *table) {
    for (const test_case *c = table; c && c->op; c++) launch_dtypes(c);
}

static void launch_operator(const test_op *op) {
    launch_table(op->cases);
    launch_table(op->packed);
    launch_table(op->launching);
    for (const test_bench_row *row = op->gpu_rows; row->c.op; row++) {
        const int is_step = test_is_over_time(op) && test_get_size(&row->c, 'T') <= 16;
        launch_dtypes_of(&row->c, is_step ? GT_STEP : GT_PASSES);
    }
    launch_sizes(op);
    launch_steps(op);
}

/* Conversions of states to int8 and back. */
static void launch_conversions(void) {
    char *const memory = (char *)((uintptr_t)1 << 50);
    for (int64_t columns = 1; columns <= 256; columns *= 2) {
        const gt_int8_states_args a = {.B = 2,
                                       .rows = 64,
                                       .columns = columns,
                                       .state = (float *)memory,
                                       .int8 = memory + (1 << 20),
                                       .scale = (float *)memory + (1 << 20)};
        test_check(gt_quantize_states(&a, NULL) == GT_OK && gt_dequantize_states(&a, NULL) == GT_OK, "conversion: %s",
                   gt_last_error());
    }
}

int main(int argc, char **argv) {
    /* few multiprocessors, which small calls fill, and as many as an H100 has */
    static const int multiprocessors[] = {4, 132};
    for (int i = 0; i < 2; i++) {
        if (argc != 2 || !fake_device(atoi(argv[1]), multiprocessors[i])) {
            fprintf(stderr, "usage: launches CAPABILITY, such as 90\n");
            return 2;
        }
        for (int k = 0; test_ops[k]; k++) launch_operator(test_ops[k]);
        launch_conversions();
    }
    fake_print_launches();
    return test_finish();
}
