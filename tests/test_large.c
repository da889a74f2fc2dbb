/* Tests tensors of more than 2^31 elements.  For every operator, the last batch element or row of a call must have the
 * same bits as in a call on its own.  All other elements are NaN, so that a read of another element shows.
 *
 *     test_gpu_large [--short] [--elements COUNT] [DTYPE...]
 *
 * DTYPE: bf16 or f32; both if none is given.  --elements: tensors of more than COUNT elements instead; test_large_emu,
 * the program for the emulation, uses this.  --short: for racecheck and initcheck, which would take hours for the whole
 * batch.  The call then has only the first and the last batch element, at their places in the whole batch.  The program
 * does not fill memory, so that initcheck finds reads of unwritten memory.
 *
 * The program prints every call with its memory.  It skips calls that exceed the GPU's memory, prints this, and then
 * ends with exit code 77.  The test fails if a call fits into the GPU's memory, but not into the free part, or if an
 * operator has no case. */
#include "test_kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const machine_mode plain = {"plain", 0, 0, 0, 0, 0};
static const double GIB = 1073741824;
static int is_short, left_out;
static int64_t least_elements = (int64_t)1 << 31;

/* A call on the whole batch, or on its last batch element alone. */
enum { MOST_BLOCKS = 40 };
typedef struct call {
    const test_case *c;
    gt_pass pass;
    test_args args, filled;
    gt_dims dims;
    char *blocks[MOST_BLOCKS]; /* allocations of the call */
    int count;
} call;

static void set_pointer(test_args *args, size_t offset, const void *p) { memcpy((char *)args + offset, &p, sizeof p); }

static char *pointer_of(const test_args *args, size_t offset) {
    char *p;
    memcpy(&p, (const char *)args + offset, sizeof p);
    return p;
}

static double seconds(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void must(gt_status status) {
    if (status == GT_OK) return;
    printf("FAILED: %s\n", gt_last_error());
    exit(1);
}

static char *host_memory(size_t bytes) {
    char *p = malloc(bytes);
    if (p) return p;
    printf("FAILED: out of memory\n");
    exit(1);
}

/* Whether the call gives the tensor.  It gives activations and parameters, but neither states, nor snapshots, nor sums
 * over the batch. */
static int is_used(const call *k, const gt_tensor *t) {
    return t->use[k->pass] != '-' && t->use[k->pass] != 'g' && t->kind != 'i' && !strchr("SQRU", t->shape[0]);
}

/* The letter of the size that is made large: B (batch elements) or M (rows). */
static char batch_letter(const test_case *c) {
    for (const gt_size *size = test_table(c)->sizes; size->letter; size++)
        if (size->letter == 'B') return 'B';
    return 'M';
}

static int has_batch(const gt_tensor *t) { return t->shape[0] == 'B' || t->shape[0] == 'M'; }

static gt_view view_of(const call *k, const gt_tensor *t) {
    return gt_view_of(test_table(k->c), t, &k->filled, &k->dims);
}

/* The number of bytes from the start of the tensor's first element to the end of its last. */
static size_t bytes_of(const call *k, const gt_tensor *t) {
    const gt_view v = view_of(k, t);
    int64_t bytes = v.element;
    for (int i = 0; i < v.rank; i++) bytes += (v.size[i] - 1) * v.stride[i];
    return (size_t)bytes;
}

/* The number of elements of the largest activation. */
static int64_t most_elements(const call *k) {
    int64_t most = 0;
    for (const gt_tensor *t = test_table(k->c)->tensors; t->name; t++)
        if (is_used(k, t) && has_batch(t) && view_of(k, t).count > most) most = view_of(k, t).count;
    return most;
}

/* Fills the last batch element with random values.  With --short, the first batch element gets the same values.  A
 * parameter is filled as a whole. */
static void fill(const call *k, const gt_tensor *t, char *memory) {
    const gt_view v = view_of(k, t);
    const int64_t count = v.count / (has_batch(t) ? k->dims.n[batch_letter(k->c) - 'A'] : 1);
    const size_t bytes = (size_t)(count * v.element);
    char *host = host_memory(bytes);
    test_random random = {(uint64_t)t->offset};
    test_map map;
    const test_fill f = test_fill_of(k->c, t, &map);
    for (int64_t i = 0; i < count; i++) {
        double value = f.mean + f.spread * test_normal(&random);
        if (map != TEST_AS_IS) value = map == TEST_EXP ? exp(value) : -exp(value);
        const float x = (float)value;
        const uint16_t bits = gt_f32_to_bf16(x);
        memcpy(host + i * v.element, v.element == 4 ? (const void *)&x : (const void *)&bits, (size_t)v.element);
    }
    machine_copy(memory + bytes_of(k, t) - bytes, host, bytes);
    if (is_short) machine_copy(memory, host, bytes);
    free(host);
}

static void prepare(call *k) { must(gt_prepare(test_table(k->c), GT_QUERY, GT_HOST, &k->args, &k->filled, &k->dims)); }

static void size_call(call *k, int64_t batch) {
    test_case c = *k->c;
    test_set_size(&c, batch_letter(&c), batch);
    k->args = c.args;
    prepare(k);
}

/* Sets the strides of a batch of two.  Its elements lie where the first and the last element of a batch of `batch`
 * lie. */
static void move_apart(call *two, const call *one, int64_t batch) {
    for (const gt_tensor *t = test_table(two->c)->tensors; t->name; t++) {
        if (!has_batch(t) || !t->stride_offset || test_is_state(t)) continue;
        const gt_stride s = {view_of(one, t).count * (batch - 1), 0, 0};
        memcpy((char *)&two->args + t->stride_offset, &s, batch_letter(two->c) == 'M' ? sizeof(int64_t) : sizeof s);
    }
    prepare(two);
}

static size_t workspace_bytes(const call *k) {
    gt_workspace need;
    must(test_table(k->c)->calls.workspace(&k->args, &need));
    return k->pass == GT_FORWARD ? need.forward : need.backward;
}

/* Allocates memory for a tensor or a workspace, and fills it with NaN.  Does not fill it with --short. */
static char *take(call *k, size_t bytes) {
    if (k->count == MOST_BLOCKS) {
        printf("FAILED: more than %d tensors\n", (int)MOST_BLOCKS);
        exit(1);
    }
    /* an allocation of its own, so that sanitizers find accesses beyond its end */
    char *memory = k->blocks[k->count++] = machine_allocate(bytes, 0);
    if (!is_short) machine_poison(memory, bytes);
    return memory;
}

static void run(call *k) {
    const gt_op *op = test_table(k->c);
    const size_t bytes = workspace_bytes(k);
    machine_job job = {0};
    if (bytes) set_pointer(&k->args, op->fields.workspace, take(k, bytes));
    memcpy((char *)&k->args + op->fields.workspace_bytes, &bytes, sizeof bytes);
    job.pass[0] = op->calls.pass[k->pass];
    job.args[0] = k->args;
    job.passes = 1;
    must(machine_run(&job, 1, &plain));
}

static void release(call *k) {
    for (int i = 0; i < k->count; i++) machine_release(k->blocks[i]);
    k->count = 0;
}

/* Whether the call fits into the GPU's free memory.  If the GPU is too small, the call is skipped; if only the free
 * memory is too small, the test fails. */
static int fits(const call *all, const call *one, size_t *need) {
    size_t total;
    const size_t available = machine_memory(&total);
    *need = workspace_bytes(all) + workspace_bytes(one);
    for (const gt_tensor *t = test_table(all->c)->tensors; t->name; t++)
        if (is_used(all, t)) *need += bytes_of(all, t) + (test_is_input(t, all->pass) ? 0 : bytes_of(one, t));
    const double rest = 1.5 * GIB; /* for the driver, and for rounding up allocations */
    if ((double)*need + rest <= (double)available) return 1;
    if ((double)*need + rest > 0.98 * (double)total) {
        left_out++;
        printf("SKIP: %s: takes %.1f GiB, and this GPU has %.1f\n", test_describe(all->c, all->pass),
               (double)*need / GIB, (double)total / GIB);
    } else {
        test_check(0, "%s: takes %.1f GiB of %.1f, but only %.1f are free", test_describe(all->c, all->pass),
                   (double)*need / GIB, (double)total / GIB, (double)available / GIB);
    }
    return 0;
}

static int has_nan(const char *bytes, size_t count, int64_t element) {
    for (size_t i = 0; i + (size_t)element <= count; i += (size_t)element) {
        uint16_t high; /* the upper 16 bits with sign and exponent: a whole bf16, or the upper half of an fp32 */
        memcpy(&high, bytes + i + element - 2, 2);
        if ((high & 0x7f80) == 0x7f80 && (high & 0x7f)) return 1;
    }
    return 0;
}

static void compare(const call *all, const call *one, const gt_tensor *t) {
    const size_t bytes = bytes_of(one, t);
    char *a = host_memory(bytes), *b = host_memory(bytes);
    machine_copy(a, pointer_of(&all->args, t->offset) + bytes_of(all, t) - bytes, bytes);
    machine_copy(b, pointer_of(&one->args, t->offset), bytes);
    const int is_nan = has_nan(a, bytes, view_of(one, t).element);
    test_check(!memcmp(a, b, bytes) && !is_nan, "%s: %s of the last one: %s", test_describe(all->c, all->pass), t->name,
               is_nan ? "NaN" : "not what it is alone");
    free(a);
    free(b);
}

static void check_case(const test_case *c, gt_pass pass) {
    const gt_op *op = test_table(c);
    const double started = seconds();
    call all = {.c = c, .pass = pass}, one = all;
    size_call(&one, 1);
    const int64_t batch = least_elements / most_elements(&one) + 1;
    size_call(&all, is_short ? 2 : batch);
    if (is_short) move_apart(&all, &one, batch);
    size_t need;
    if (!fits(&all, &one, &need)) return;
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        if (!is_used(&all, t)) continue;
        char *memory = take(&all, bytes_of(&all, t)), *last = memory + bytes_of(&all, t) - bytes_of(&one, t);
        const int is_input = test_is_input(t, pass);
        if (is_input) fill(&all, t, memory);
        set_pointer(&all.args, t->offset, memory);
        set_pointer(&one.args, t->offset, is_input ? last : take(&one, bytes_of(&one, t)));
    }
    run(&all);
    run(&one);
    for (const gt_tensor *t = op->tensors; t->name; t++)
        if (is_used(&all, t) && test_is_output(t, pass)) compare(&all, &one, t);
    release(&all);
    release(&one);
    printf("     %s: %lld of %c, %lld elements, %.1f GiB, %.1f s\n", test_describe(c, pass), (long long)batch,
           batch_letter(c), (long long)(batch * most_elements(&one)), (double)need / GIB, seconds() - started);
}

/* Checks one operator with its case test_op.large.  This program chooses the batch. */
static void check_operator(const test_op *op, gt_dtype dtype) {
    test_case c = op->large;
    if (!c.op) return; /* main reports the missing case */
    c.name = "large";
    test_set_dtype(&c, dtype, GT_DTYPE_DEFAULT);
    check_case(&c, GT_FORWARD);
    check_case(&c, GT_BACKWARD);
}

static int usage(const char *program) {
    fprintf(stderr, "usage: %s [--short] [--elements COUNT] [bf16] [f32]\n", program);
    return 2;
}

int main(int argc, char **argv) {
    int dtypes[GT_F16 + 1] = {0}, any = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--short"))
            is_short = 1;
        else if (!strcmp(argv[i], "--elements") && i + 1 < argc && atoll(argv[i + 1]) > 0)
            least_elements = atoll(argv[++i]);
        else if (!strcmp(argv[i], "bf16"))
            dtypes[GT_BF16] = any = 1;
        else if (!strcmp(argv[i], "f32"))
            dtypes[GT_F32] = any = 1;
        else
            return usage(argv[0]);
    }
    if (!any) dtypes[GT_BF16] = dtypes[GT_F32] = 1;
    const int status = machine_start();
    if (status) return status;
    for (int i = 0; test_ops[i]; i++) {
        test_check(test_ops[i]->large.op != NULL, "%s has no case with a large tensor", test_ops[i]->table()->name);
        if (dtypes[GT_BF16]) check_operator(test_ops[i], GT_BF16);
        if (dtypes[GT_F32]) check_operator(test_ops[i], GT_F32);
        test_group(test_ops[i]->table()->name, "tensors of many elements");
    }
    const int failed = test_finish();
    if (left_out) printf("SKIP: %d calls left out: this GPU has too little memory\n", left_out);
    return failed ? failed : left_out ? 77 : 0;
}
