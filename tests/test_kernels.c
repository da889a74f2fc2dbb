/* Compares the kernels with the double twins on the same rounded inputs, and checks properties that hold for any
 * numbers.  There are two programs: on a GPU (kernels_gpu.cu), and in the emulation on the CPU (kernels_emu.cpp).
 *
 *     test_kernels_... [--device NAME] [--mode NAME] [--short] [--once] [--few] [--exact] [--steps] [--less]
 *                  [OP ...]
 *
 *   --device NAME  the emulated device: sm_75, sm_80, sm_86 or sm_90
 *   --mode NAME    checks only one way to make calls, such as "captured in a graph": the results must have the bits of
 *                  the plain way.  The first calls of the process are made in this way.  "all": checks all ways
 *   --less         the build lacks some kernels (GT_WITHOUT_...), so the test does not require their launches
 *   --short        fewer cases, for sanitizers
 *   --once         makes each call once, in every size and with every dtype, for slow sanitizers.  With --short, some
 *                  sizes run without some dtypes
 *   --few          for a test that runs often: as --once, but not with every combination of size, kernel and dtype.
 *                  Checks of a property take one in five of the smallest cases.  With --short, no properties are
 *                  checked and, without --exact, the largest sizes do not run
 *   --steps        only the checks of the step kernels
 *   --exact        gives every tensor its own allocation and fills no memory in advance, so that a sanitizer finds
 *                  accesses outside of tensors and reads of unwritten memory
 */
#include "test_kernels.h"
#include "gt_invariants.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static int is_short, is_once, is_few, is_exact, is_steps, is_less;
/* checks take one in `one_in` of the tables' cases, from case `turn` on; `turn` advances from check to check */
static int one_in = 1, turn;

/* The context of a runner of kernels: how it makes calls, and a copy of `saved` after the last call. */
typedef struct run_context {
    machine_mode mode;
    char *saved;
    size_t saved_bytes;
} run_context;

/* ---- memory of one call ---------------------------------------------------------------------- */

enum { GUARD = 256, MAX_BUFFERS = TEST_TENSORS + 8, MAX_COPIES = 2 };

/* A piece of the host's block of tensors (host), its allocation in machine memory (memory), and the piece's place in
 * this allocation (image).  For scratch memory, host is NULL. */
typedef struct buffer {
    char *host, *memory, *image;
    size_t bytes;
} buffer;

typedef struct call {
    machine_job job;
    buffer of[MAX_BUFFERS];
    int buffers, saved; /* saved: index of the buffer for `saved`; 0: none */
} call;

static void put_pointer(void *args, size_t offset, const void *p) { memcpy((char *)args + offset, &p, sizeof p); }
static void put_int(void *args, size_t offset, int x) { memcpy((char *)args + offset, &x, sizeof x); }

/* The number of bytes from the start of a tensor's first element to the end of its last.  The call of v is prepared. */
static size_t extent(const gt_view *v) {
    int64_t bytes = v->count ? v->element : 0;
    for (int i = 0; i < v->rank && v->count; i++) bytes += (v->size[i] - 1) * v->stride[i];
    return (size_t)bytes;
}

/* Copies a piece to machine memory, with the same alignment as in the host's block. */
static void upload(call *k, const gt_op *op, void *args, char *block, char *from, size_t bytes) {
    buffer *b = &k->of[k->buffers++];
    size_t shift = (size_t)(from - block) % GUARD;
    b->host = from;
    b->bytes = bytes;
    b->memory = machine_allocate(shift + bytes, !is_exact);
    b->image = b->memory + shift;
    machine_copy(b->image, from, bytes);
    test_relocate(op, args, from, bytes, b->image);
}

/* Copies each tensor of the pass to its own allocation.  Tensors that overlap, such as columns of one buffer, share
 * one. */
static gt_status upload_pieces(call *k, const gt_op *op, gt_pass pass, void *args, char *block) {
    test_args filled;
    gt_dims dims;
    char *start[TEST_TENSORS], *end[TEST_TENSORS];
    int n = 0;
    gt_status status = gt_prepare(op, pass, GT_DEVICE, args, &filled, &dims);
    if (status != GT_OK) return status;
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        gt_view v = gt_view_of(op, t, &filled, &dims);
        char *from = v.data, *to = v.data + extent(&v);
        if (gt_use(t, pass) == '-' || from == NULL || from == to) continue;
        for (int i = 0; i < n; i++) { /* merges the new piece with all pieces that it overlaps */
            if (to <= start[i] || end[i] <= from) continue;
            from = from < start[i] ? from : start[i];
            to = to > end[i] ? to : end[i];
            n--;
            start[i] = start[n], end[i] = end[n];
            i = -1;
        }
        start[n] = from, end[n++] = to;
    }
    for (int i = 0; i < n; i++) upload(k, op, args, block, start[i], (size_t)(end[i] - start[i]));
    return GT_OK;
}

/* Allocates machine memory with an odd address.  Guards before and after it show writes outside.  NULL for 0 bytes. */
static char *scratch(call *k, size_t bytes) {
    buffer *b = &k->of[k->buffers];
    size_t guard = is_exact ? 0 : GUARD;
    if (bytes == 0) return NULL;
    k->buffers++;
    b->bytes = bytes;
    b->memory = machine_allocate(2 * guard + 1 + bytes, !is_exact);
    b->image = b->memory + guard + 1;
    return b->image;
}

static int is_guard_intact(const buffer *b) {
    unsigned char guard[2 * GUARD + 1];
    int ok = 1;
    if (b->host || is_exact) return 1;
    machine_copy(guard, b->memory, GUARD + 1);
    machine_copy(guard + GUARD + 1, b->image + b->bytes, GUARD);
    for (size_t i = 0; i < sizeof guard; i++) ok &= guard[i] == 0xff;
    return ok;
}

/* Copies a buffer's tensors to the host.  With is_same, only compares them with the host's copy. */
static int download(const buffer *b, int is_same) {
    char *host;
    int ok;
    if (!b->host) return 1;
    if (!is_same) return machine_copy(b->host, b->image, b->bytes), 1;
    host = (char *)malloc(b->bytes);
    if (!host) exit(2);
    machine_copy(host, b->image, b->bytes);
    ok = !memcmp(host, b->host, b->bytes);
    free(host);
    return ok;
}

/* ---- one call -------------------------------------------------------------------------------- */

/* Gives the pass a workspace of exactly the size that the query asks for. */
static gt_status give_workspace(call *k, const test_op *op, gt_pass pass, test_args *args) {
    gt_workspace need;
    gt_status status = op->table()->calls.workspace(args, &need);
    size_t bytes;
    if (status != GT_OK) return status;
    bytes = test_workspace_of(&need, pass);
    put_pointer(args, op->table()->fields.workspace, scratch(k, bytes));
    memcpy((char *)args + op->table()->fields.workspace_bytes, &bytes, sizeof bytes);
    return GT_OK;
}

/* Whether backward of an operator can take something from forward: `saved`, or an output. */
static int can_read_forward(const test_op *op) { return op->table()->fields.saved || op->reads_y; }

static gt_status give_saved(call *k, const test_op *op, test_args *args) {
    gt_workspace need;
    gt_status status = op->table()->calls.workspace(args, &need);
    if (status != GT_OK || !op->table()->fields.saved) return status;
    if (need.saved) k->saved = k->buffers;
    put_pointer(args, op->table()->fields.saved, scratch(k, need.saved));
    memcpy((char *)args + op->table()->fields.saved_bytes, &need.saved, sizeof need.saved);
    return GT_OK;
}

/* Changes *args, a copy of a backward call, into the forward call that fills `saved`.  Forward's required outputs go to
 * scratch memory, and backward reads y from this memory. */
static gt_status make_forward(call *k, const gt_op *op, test_args *args, test_args *backward) {
    test_args filled;
    gt_dims dims;
    gt_status status;
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        char use = t->use[GT_FORWARD];
        if ((t->use[GT_BACKWARD] != '-' && use != 'O' && use != 'o') || use == '-') continue;
        put_pointer(args, t->offset, NULL);
        if (use == 'I') return gt_fail(GT_ERROR_VALUE, "backward does not read %s", t->name);
    }
    status = gt_prepare(op, GT_QUERY, GT_DEVICE, args, &filled, &dims);
    for (const gt_tensor *t = op->tensors; status == GT_OK && t->name; t++) {
        gt_view v = gt_view_of(op, t, &filled, &dims);
        if (t->use[GT_FORWARD] == 'O') {
            char *p = machine_allocate(extent(&v) + 1, !is_exact);
            k->of[k->buffers++].memory = p;
            put_pointer(args, t->offset, p);
            /* if reads_y is set, backward reads this y */
            if (t->use[GT_BACKWARD] == 'i') put_pointer(backward, t->offset, p);
        }
    }
    return status;
}

static void add_pass(call *k, const test_op *op, gt_pass pass, const test_args *args) {
    k->job.pass[k->job.passes] = op->table()->calls.pass[pass];
    k->job.args[k->job.passes++] = *args;
}

/* Tells the machine where cu_seqlens and seq_count of a call lie, so that replays of a graph can change them. */
static void note_sequences(call *k, const test_op *op, const test_args *args) {
    static const char *const names[] = {"cu_seqlens", "seq_count"};
    const gt_op *table = op->table();
    int64_t capacity = 0;
    if (op->table()->fields.seq_capacity)
        memcpy(&capacity, (const char *)args + op->table()->fields.seq_capacity, sizeof capacity);
    for (int i = 0; i < 2 && capacity; i++) {
        size_t offset = table->tensors[test_find(table, names[i])].offset;
        memcpy(&k->job.sequences[i], (const char *)args + offset, sizeof(char *));
        if (k->job.sequences[i]) k->job.sequence_counts[i] = i ? 1 : capacity + 1;
    }
}

static gt_status open_call(call *k, const test_op *op, gt_pass pass, const void *args, char *block, size_t bytes,
                           const machine_mode *mode) {
    const gt_op *table = op->table();
    test_args mine = {{0}}, forward;
    gt_status status = GT_OK;
    memset(k, 0, sizeof *k);
    memcpy(&mine, args, table->args_bytes);
    if (op->handle) put_pointer(&mine, op->handle, machine_cublaslt());
    if (is_exact) {
        status = upload_pieces(k, table, pass, &mine, block);
    } else {
        upload(k, table, &mine, block, block, bytes);
        k->job.block = k->of[0].image;
        k->job.bytes = bytes;
        note_sequences(k, op, &mine);
    }
    if (status == GT_OK && mode->gives_saved && can_read_forward(op) && pass <= GT_BACKWARD) {
        if (op->reads_y && pass == GT_BACKWARD) put_int(&mine, op->reads_y, 1);
        status = give_saved(k, op, &mine);
        forward = mine;
        if (status == GT_OK && pass == GT_BACKWARD && (status = make_forward(k, table, &forward, &mine)) == GT_OK &&
            (status = give_workspace(k, op, GT_FORWARD, &forward)) == GT_OK)
            add_pass(k, op, GT_FORWARD, &forward);
    }
    if (status == GT_OK && (status = give_workspace(k, op, pass, &mine)) == GT_OK) add_pass(k, op, pass, &mine);
    return status;
}

/* Keeps a copy of `saved`, unless the memory was not filled in advance: bytes that no kernel writes would then differ
 * from run to run. */
static void keep_saved(run_context *r, const call *k) {
    const buffer *b = &k->of[k->saved];
    free(r->saved);
    r->saved = NULL;
    r->saved_bytes = k->saved && !is_exact ? b->bytes : 0;
    if (!r->saved_bytes) return;
    r->saved = (char *)malloc(r->saved_bytes);
    if (!r->saved) exit(2);
    machine_copy(r->saved, b->image, r->saved_bytes);
}

/* Moves the copy of `saved` from the runner to *host.  Returns its length in bytes. */
static size_t take_saved(const test_runner *runner, char **host) {
    run_context *r = (run_context *)runner->context;
    *host = r->saved;
    r->saved = NULL;
    return r->saved_bytes;
}

/* Checks that `saved` after the last call has the same bits as `host`. */
static void check_same_saved(const test_runner *runner, const test_case *c, gt_pass pass, const char *what,
                             const char *host, size_t bytes) {
    const run_context *r = (const run_context *)runner->context;
    if (!bytes) return;
    test_check(r->saved && r->saved_bytes == bytes && !memcmp(r->saved, host, bytes),
               "%s: the bits in saved differ: %s", test_describe(c, pass), what);
}

static gt_status run_kernels(const test_runner *r, const test_op *op, gt_pass pass, const void *args, char *memory,
                             size_t bytes) {
    run_context *context = (run_context *)r->context;
    const machine_mode *mode = &context->mode;
    static call k[MAX_COPIES];
    machine_job jobs[MAX_COPIES];
    int copies = mode->copies ? mode->copies : 1, is_same = 1, is_intact = 1;
    gt_status status = GT_OK;
    for (int i = 0; i < copies; i++) {
        gt_status opened = open_call(&k[i], op, pass, args, memory, bytes, mode);
        if (status == GT_OK) status = opened;
        jobs[i] = k[i].job;
    }
    if (status == GT_OK) status = machine_run(jobs, copies, mode);
    if (status == GT_OK) keep_saved(context, &k[0]);
    for (int i = 0; i < copies; i++) {
        for (int j = 0; j < k[i].buffers; j++) {
            buffer *b = &k[i].of[j];
            if (status == GT_OK && b->image) {
                is_same &= download(b, i > 0);
                is_intact &= is_guard_intact(b);
            }
            machine_release(b->memory);
        }
    }
    if (!is_same) return gt_fail(GT_ERROR_CUDA, "two calls at once gave different bits");
    if (!is_intact) return gt_fail(GT_ERROR_CUDA, "wrote beyond saved or workspace");
    return status;
}

/* ---- runners --------------------------------------------------------------------------------- */

/* The runners for an operator's checks, one for each way to make calls. */
typedef struct tester {
    const test_op *op;
    run_context plain_context, saved_context, other_context;
    test_runner plain, with_saved, other; /* other: the runner of mode_agrees */
    const test_property *property;        /* the property of test_op.properties that is being checked */
} tester;

static test_runner make_runner(const test_op *op, run_context *context, machine_mode mode) {
    test_runner r = {.name = "the kernel", .run = run_kernels, .context = context, .tolerance = op->kernels};
    r.reads_y = mode.gives_saved;
    context->mode = mode;
    return r;
}

static void start_tester(tester *t, const test_op *op) {
    memset(t, 0, sizeof *t);
    t->op = op;
    t->plain = make_runner(op, &t->plain_context, (machine_mode){"plain", 1, 0, 0, 0, 0});
    t->with_saved = make_runner(op, &t->saved_context, (machine_mode){"saved", 1, 1, 0, 0, 0});
}

/* How far two results may differ from each other if each is within the tolerance of the truth. */
static double twice(const test_case *c) {
    gt_dtype dtype;
    memcpy(&dtype, (const char *)&c->args + test_table(c)->dtype_offset, sizeof dtype);
    return 2 * test_op_of(c->op)->kernels.activations[dtype];
}

static int has_saved(const test_case *c) { return can_read_forward(test_op_of(c->op)); }

static void set_segments(test_case *c, int64_t segments) {
    size_t offset = test_table(c)->fields.segments;
    if (offset) memcpy((char *)&c->args + offset, &segments, sizeof segments);
}

/* ---- checks of one case ---------------------------------------------------------------------- */

typedef void check_case(tester *t, const test_case *c);

/* Checks that the pass agrees with the double twin, and that a second run gives the same bits, also those of
 * `saved`. */
static void check_pass(const test_runner *r, const test_case *c, gt_pass pass, const test_values *in,
                       const test_values *truth, const test_values *magnitudes) {
    test_values got, again;
    if (test_run(r, c, pass, in, TEST_ALL, &got)) {
        char *saved;
        size_t bytes = take_saved(r, &saved);
        test_compare(r, c, pass, &got, truth, magnitudes);
        if (!is_once) {
            test_run(r, c, pass, in, TEST_ALL, &again);
            test_same(r, c, pass, "second run", &again, &got, 0);
            check_same_saved(r, c, pass, "second run", saved, bytes);
            test_free(&again);
        }
        free(saved);
    }
    test_free(&got);
}

static void check_truth(tester *t, const test_case *c, int is_plain, int is_saved) {
    for (int pass = GT_FORWARD; pass < GT_PASSES; pass++) {
        test_values in, truth, magnitudes = {{NULL}};
        if (!test_has_pass(c, (gt_pass)pass)) continue;
        test_inputs(c, (gt_pass)pass, &in);
        test_run(&test_truth, c, (gt_pass)pass, &in, TEST_ALL, &truth);
        if (pass == GT_BACKWARD) test_magnitudes(c, &in, &magnitudes);
        if (is_plain) check_pass(&t->plain, c, (gt_pass)pass, &in, &truth, &magnitudes);
        if (is_saved) check_pass(&t->with_saved, c, (gt_pass)pass, &in, &truth, &magnitudes);
        test_free(&in), test_free(&truth), test_free(&magnitudes);
    }
}

static void truth_holds(tester *t, const test_case *c) { check_truth(t, c, 1, has_saved(c)); }
/* Checks a case against the double twin.  Every second case has `saved`, and each case has another schedule of
 * warps. */
static void truth_holds_by_turns(tester *t, const test_case *c) {
    int is_saved = has_saved(c) && c->seed / 7 % 2;
    t->plain_context.mode.schedule = t->saved_context.mode.schedule = c->seed + 1;
    check_truth(t, c, !is_saved, is_saved);
}
static void layouts_agree(tester *t, const test_case *c) { test_layouts_agree(&t->plain, c, 1); }
static void in_place_agrees(tester *t, const test_case *c) { test_in_place_agrees(&t->plain, c, 1); }
static void alone_agrees(tester *t, const test_case *c) { test_alone_agrees(&t->plain, c, twice(c)); }
static void null_agrees(tester *t, const test_case *c) { test_null_agrees(&t->plain, c, twice(c)); }
static void shared_agrees(tester *t, const test_case *c) { test_shared_agrees(&t->plain, c, twice(c)); }
static void step_agrees(tester *t, const test_case *c) { test_step_agrees(&t->plain, c, twice(c)); }
static void property_holds(tester *t, const test_case *c) { t->property->check(&t->plain, c, twice(c)); }

static void accumulate_adds(tester *t, const test_case *c) {
    test_case add = *c;
    test_set_flag(&add, test_table(c)->accumulate_offset, 1);
    truth_holds_by_turns(t, &add);
}

static void pieces_agree(tester *t, const test_case *c) {
    static const int64_t counts[] = {1, 2, 3, 8};
    for (int i = is_few ? 2 : 0; i < (is_few ? 3 : 4); i++) test_pieces_agree(&t->plain, c, counts[i]);
}

/* Checks that, with one segment, forward in two calls that are cut at a multiple of 128 tokens has the bits of one
 * call. */
static void prefill_splits(tester *t, const test_case *c) {
    test_case one = *c;
    set_segments(&one, 1);
    for (int64_t at = 128; at < test_get_size(c, 'T'); at += 128) test_prefill_splits(&t->plain, &one, at);
}

static void time_splits(tester *t, const test_case *c) {
    int64_t T = test_get_size(c, 'T');
    test_time_splits(&t->plain, c, T / 2, twice(c));
    if (T > 64) test_time_splits(&t->plain, c, 64, twice(c));
}

/* Checks pools of states.  Each call takes the next kind of pool. */
static void pools_agree(tester *t, const test_case *c) {
    static int kind;
    test_pools_agree(&t->plain, c, kind++);
}

static void small_states_agree(tester *t, const test_case *c) {
    static int kind;
    test_small_states_agree(&t->plain, c, kind += 5);
}

/* Checks batch elements and packed sequences alone.  With a fixed number of segments, their results must have the bits
 * of the whole call.  Operators over rows may tile the rows in another way, so their bits may differ. */
static void batch_splits(tester *t, const test_case *c) {
    test_case fixed = *c;
    for (int64_t segments = 1; segments <= (test_is_packed(c) ? 2 : 1); segments++) {
        set_segments(&fixed, segments);
        test_batch_splits(&t->plain, &fixed, test_is_over_time(test_op_of(c->op)) ? 0 : twice(c));
    }
}

/* Checks where a NaN or infinity spreads.  Half of the cases have `saved`, and in half of them decays may underflow to
 * 0. For all chunk lengths that gt_kernels.h names, token 57 lies in the second half of its chunk, and token 25 in the
 * first half. */
static void nonfinite_stays(tester *t, const test_case *drawn) {
    test_case c = *drawn;
    const int is_saved = has_saved(&c) && c.seed / 2 % 2, may_vanish = c.seed / 4 % 2;
    /* the first token of the longest sequence of sweep_packed */
    const int64_t T = test_get_size(&c, 'T'), first = test_is_packed(&c) ? 66 : 0;
    const int64_t at[2] = {T < 64 ? T / 2 : first + 57, T < 64 ? T / 2 : first + 25};
    if (t->op->set_regime) t->op->set_regime(&c, (int)(may_vanish ? c.seed % 4 : 2));
    test_nonfinite_stays(is_saved ? &t->with_saved : &t->plain, &c, at, 1, !is_few, may_vanish);
}

/* Gives the call a workspace, and then a `saved`, that is one byte too small.  The library must refuse both calls and
 * write nothing. */
static gt_status run_with_less(const test_runner *r, const test_op *op, gt_pass pass, const void *args, char *memory,
                               size_t bytes) {
    test_args less;
    gt_workspace need;
    int reserved = 0;
    gt_status status = op->table()->calls.workspace(args, &need);
    size_t pass_bytes;
    (void)r, (void)memory, (void)bytes;
    if (status != GT_OK) return status;
    pass_bytes = test_workspace_of(&need, pass);
    memcpy(&less, args, op->table()->args_bytes);
    if (pass_bytes) {
        pass_bytes--;
        put_pointer(&less, op->table()->fields.workspace, &reserved);
        memcpy((char *)&less + op->table()->fields.workspace_bytes, &pass_bytes, sizeof(size_t));
        status = op->table()->calls.pass[pass](&less, NULL);
        if (status != GT_ERROR_WORKSPACE)
            return gt_fail(GT_ERROR_VALUE, "workspace of %zu bytes: status %d", pass_bytes, (int)status);
    }
    if (need.saved && pass <= GT_BACKWARD) {
        need.saved--;
        put_pointer(&less, op->table()->fields.saved, &reserved);
        memcpy((char *)&less + op->table()->fields.saved_bytes, &need.saved, sizeof need.saved);
        status = op->table()->calls.pass[pass](&less, NULL);
        if (status != GT_ERROR_SAVED)
            return gt_fail(GT_ERROR_VALUE, "saved of %zu bytes: status %d", need.saved, (int)status);
    }
    return GT_OK;
}

static void refuses_less(tester *t, const test_case *c) {
    const test_runner r = {"the kernel", run_with_less, NULL, 0, {{0}, {0}, {0}, {0}, 0}, 0};
    (void)t;
    for (int pass = GT_FORWARD; pass < GT_PASSES; pass++) {
        test_values in, out;
        if (!test_has_pass(c, (gt_pass)pass)) continue;
        test_inputs(c, (gt_pass)pass, &in);
        test_check(test_run(&r, c, (gt_pass)pass, &in, TEST_ALL, &out), "%s: accepts less memory than it needs",
                   test_describe(c, (gt_pass)pass));
        test_free(&in), test_free(&out);
    }
}

/* ---- other ways to make a call --------------------------------------------------------------- */

static void mode_agrees(tester *t, const test_case *c) {
    const machine_mode *mode = &t->other_context.mode;
    for (int pass = GT_FORWARD; pass < GT_PASSES; pass++) {
        test_values in, a, b;
        char *saved;
        size_t bytes;
        if (!test_has_pass(c, (gt_pass)pass)) continue;
        test_inputs(c, (gt_pass)pass, &in);
        test_run(&t->other, c, (gt_pass)pass, &in, TEST_ALL, &a);
        bytes = take_saved(&t->other, &saved);
        test_runner *usual = mode->gives_saved ? &t->with_saved : &t->plain;
        test_run(usual, c, (gt_pass)pass, &in, TEST_ALL, &b);
        test_same(&t->other, c, (gt_pass)pass, mode->name, &a, &b, 0);
        /* the test replays a graph with other lengths first, so some bytes of `saved` come from that replay */
        if (!mode->is_captured) check_same_saved(usual, c, (gt_pass)pass, mode->name, saved, bytes);
        test_free(&in), test_free(&a), test_free(&b), free(saved);
    }
}

/* ---- difference quotients -------------------------------------------------------------------- */

/* The difference of the loss <y, dy> + <state_out, dstate_out> between the outputs *a and *b. */
static double loss_difference(const test_case *c, const test_values *dout, const test_values *a, const test_values *b) {
    const gt_op *op = test_table(c);
    double sum = 0;
    for (int i = 0; op->tensors[i].name; i++) {
        int k = test_gradient_of(op, i);
        int64_t count = test_count(c, GT_FORWARD, &op->tensors[i]);
        if (!a->of[i] || k < 0 || !dout->of[k]) continue;
        for (int64_t j = 0; j < count; j++) sum += dout->of[k][j] * (a->of[i][j] - b->of[i][j]);
    }
    return sum;
}

/* Checks the kernels' gradients against the kernels' forward, without the twins: the derivative of the loss along
 * one random direction through all inputs.  Forward at four points gives a difference quotient with an error of
 * order h^4. */
static void difference_agrees(tester *t, const test_case *drawn) {
    const double h = 5e-3;
    const gt_op *op = test_table(drawn);
    test_case fp32 = *drawn, *c = &fp32;
    test_values in, back, gradient, moved, out[4];
    double along = 0, squares = 0, quotient;
    if (c->no_difference) return;
    test_set_dtype(c, GT_F32, GT_DTYPE_DEFAULT);
    test_inputs(c, GT_FORWARD, &in);
    test_inputs(c, GT_BACKWARD, &back);
    test_run(&t->with_saved, c, GT_BACKWARD, &back, TEST_ALL, &gradient);
    for (int point = 0; point < 4; point++) {
        double step = h * (point < 2 ? point - 2 : point - 1);
        test_random r = {test_seed(c) + 1};
        test_copy(c, GT_FORWARD, &in, &moved);
        for (int i = 0; op->tensors[i].name; i++) {
            int k = test_gradient_of(op, i);
            int64_t count = test_count(c, GT_FORWARD, &op->tensors[i]);
            const double *g = k < 0 ? NULL : gradient.of[k] ? gradient.of[k] : back.of[k];
            if (!moved.of[i] || !g || !test_is_input(&op->tensors[i], GT_FORWARD)) continue;
            for (int64_t j = 0; j < count; j++) {
                double x = in.of[i][j], d = test_normal(&r) * (fabs(x) > 1 ? fabs(x) : 1);
                if (!isfinite(x)) continue;
                moved.of[i][j] = test_round(x + step * d, GT_F32);
                if (point) continue;
                along += g[j] * d;
                squares += g[j] * d * g[j] * d;
            }
        }
        test_run(&t->plain, c, GT_FORWARD, &moved, TEST_ALL, &out[point]);
        test_free(&moved);
    }
    quotient =
        (8 * loss_difference(c, &back, &out[2], &out[1]) - loss_difference(c, &back, &out[3], &out[0])) / (12 * h);
    test_check(fabs(quotient - along) <= 5e-3 * (fabs(along) + sqrt(squares)),
               "%s: the gradient along a random direction is %.6g, but the difference quotient is %.6g, of a typical "
               "size of %.3g",
               test_describe(c, GT_BACKWARD), along, quotient, sqrt(squares));
    for (int point = 0; point < 4; point++) test_free(&out[point]);
    test_free(&in), test_free(&back), test_free(&gradient);
}

/* ---- cases ----------------------------------------------------------------------------------- */

static const gt_dtype dtypes[][2] = {
    /* dtypes of activations, and of w or dt; 0: the same */
    {GT_F32, 0},
    {GT_BF16, 0},
    {GT_BF16, GT_F32},
    {GT_F16, 0},
    {GT_F16, GT_F32}};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

static int set_dtypes(test_case *c, int d) {
    if (dtypes[d][1] && !test_table(c)->companion_offset) return 0;
    test_set_dtype(c, dtypes[d][0], dtypes[d][1]);
    return 1;
}

/* Sets the n-th of the combinations of dtypes that the operator takes, modulo their number. */
static void set_next_dtypes(test_case *c, int n) {
    int valid = test_table(c)->companion_offset ? DTYPES : 3, d = -1;
    for (n %= valid; n >= 0; n--)
        while (!set_dtypes(c, ++d)) continue;
}

static int for_table(tester *t, const test_case *table, test_level level, int d, int n, check_case *check) {
    for (const test_case *at = table; at && at->op; at++) {
        test_case c = *at;
        if (c.level > level || (at - table + turn) % one_in) continue;
        if (d < 0)
            set_next_dtypes(&c, n++);
        else if (!set_dtypes(&c, d))
            continue;
        check(t, &c);
    }
    return n;
}

/* Runs a check on the operator's plain and packed cases up to a level, with the d-th dtypes.  d = -1: each case takes
 * the next dtypes. */
static void for_cases(tester *t, test_level level, int d, check_case *check) {
    const test_op *op = t->op;
    int n = for_table(t, op->cases, level, d, 0, check);
    for_table(t, op->packed, level, d, n, check);
    turn++;
}

static void for_all_dtypes(tester *t, test_level level, check_case *check) {
    for (int d = 0; d < DTYPES; d++) for_cases(t, level, d, check);
}

static void for_drawn(tester *t, uint64_t count, int64_t most, check_case *check) {
    const test_op *op = t->op;
    for (uint64_t seed = 1; seed <= count; seed++) {
        test_case c;
        test_draw_case(op, seed, most, &c);
        set_next_dtypes(&c, (int)seed);
        check(t, &c);
        if (!test_takes_packed(op)) continue;
        test_draw_packed(op, seed, most, &c);
        set_next_dtypes(&c, (int)seed);
        check(t, &c);
    }
}

/* A rough count of the products in a call: elements of the states times tokens, or the product of all sizes. */
static double work(const test_case *c) {
    double product = 1, states = 0;
    for (const gt_tensor *t = test_table(c)->tensors; t->name; t++)
        if (test_is(t, "state_out")) states += (double)test_count(c, GT_FORWARD, t);
    if (test_is_over_time(test_op_of(c->op))) return (double)test_get_size(c, 'T') * states;
    for (const gt_size *s = test_table(c)->sizes; s->letter; s++) product *= (double)test_get_size(c, s->letter);
    return product;
}

/* Skips cases of much work.  The emulation also runs cases of level TEST_SMALL, because conv1d's kernels for long rows
 * need them.  The other operators' cases of this level mostly take too long there. */
static void small_states_agree_fast(tester *t, const test_case *c) {
    if (work(c) <= (is_few ? 1e5 : 1e6)) small_states_agree(t, c);
}

static const test_layout layouts[] = {TEST_PACKED, TEST_PACKED,  TEST_SHIFTED, TEST_PACKED,
                                      TEST_SLICES, TEST_ALIGNED, TEST_GAPS,    TEST_TIME_LAST};
static const int64_t rows[] = {0, 644, 902, 386}; /* values of test_case.row */

/* With --few, calls with more than FEW_WORK products have at most 66 tokens: a chunk of 64 and a part of the next
 * chunk. */
enum { FEW_TOKENS = 66, FEW_WORK = 2000000 };

/* Runs the check on every size with every number of tokens or rows in `times`, each with `count` combinations of
 * dtypes.  Decays, layout, segments and dtypes change from case to case. */
static void sweep(tester *t, const int64_t *times, double most_work, int count, check_case *check) {
    const test_op *op = t->op;
    int n = 0;
    for (const test_case *size = op->sizes; size->op; size++) {
        for (const int64_t *time = times; *time >= 0; time++) {
            test_case c = *size;
            test_set_size(&c, test_is_over_time(op) ? 'T' : 'M', *time);
            if (test_is_over_time(op)) test_set_size(&c, 'B', *time > 129 ? 1 : 2);
            if (work(&c) > most_work) continue;
            if (is_few && test_is_over_time(op) && *time > FEW_TOKENS && work(&c) > FEW_WORK)
                test_set_size(&c, 'T', FEW_TOKENS);
            for (int i = 0; i < count; i++, n++) {
                c.seed = (uint64_t)n;
                c.layout = layouts[n % 8];
                c.row = rows[n / 8 % 4];
                c.in_place = n / 8 % 2;
                if (op->set_regime) op->set_regime(&c, n / DTYPES);
                set_segments(&c, n % 7);
                set_next_dtypes(&c, is_few ? n + n / DTYPES : n);
                check(t, &c);
            }
        }
    }
}

/* Runs a check on every size with the d-th dtypes.  Arrays are aligned, as the fast kernels need them, and the tokens
 * are divided into two segments. */
static void for_sizes(tester *t, int64_t time, double most_work, int d, check_case *check) {
    const test_op *op = t->op;
    for (const test_case *size = op->sizes; size->op; size++) {
        test_case c = *size;
        if (!set_dtypes(&c, d)) continue;
        test_set_size(&c, test_is_over_time(op) ? 'T' : 'M', time);
        if (test_is_over_time(op)) test_set_size(&c, 'B', 1);
        set_segments(&c, 2);
        if (work(&c) <= most_work) check(t, &c);
    }
}

/* Runs the check on packed sequences in every size.  Layout, decays, segments and dtypes change from case to case. */
static void sweep_packed(tester *t, double most_work, int count, check_case *check) {
    const test_op *op = t->op;
    static const int64_t lengths[] = {0, 65, 1, 0, 130, 17};
    int n = 0;
    for (const test_case *size = op->sizes; size->op && test_takes_packed(op); size++) {
        test_case c = *size;
        test_set_size(&c, 'B', 1);
        test_set_size(&c, 'T', 213 + n % 2 * 5);
        if (work(&c) > most_work) continue;
        test_set_sequences(&c, 6, 6 + n % 3);
        c.packed.lengths = lengths;
        for (int i = 0; i < count; i++, n++) {
            c.seed = (uint64_t)n;
            c.layout = layouts[n % 8];
            if (op->set_regime) op->set_regime(&c, n);
            set_segments(&c, n % 4);
            set_next_dtypes(&c, n + 1);
            check(t, &c);
        }
    }
}

/* Checks states of 16 bits in kernels for tensor cores that read the states of a convolution themselves.  Cases of a
 * small level do not reach these kernels. */
static void check_conv_states(tester *t) {
    static const int64_t lengths[] = {2, 17, 1, 46};
    static const int kinds[] = {5, 7, 12, 14, 22, 3}; /* three kinds of pools, and both kinds of rounding */
    for (int n = 0; n < (is_few ? 4 : 12); n++) {
        test_case c = t->op->sizes[1]; /* see conv_ssd.c */
        test_set_size(&c, 'B', n % 2 ? 2 : 1);
        test_set_size(&c, 'T', 66);
        test_set_sequences(&c, n % 2 ? 0 : 4, n % 2 ? 0 : 4);
        if (n % 2 == 0) c.packed.lengths = lengths;
        c.seed = (uint64_t)n;
        test_set_dtype(&c, GT_BF16, GT_DTYPE_DEFAULT);
        test_small_states_agree(&t->plain, &c, kinds[(n + n / 6) % 6]);
    }
}

/* Checks pools in every size, with few tokens so that all sizes run.  One sequence starts from zero, and one sequence
 * has no row. */
static void sweep_pools(tester *t, double most_work, int count) {
    const test_op *op = t->op;
    static const int64_t lengths[] = {2, 17, 1, 66};
    int n = 0;
    for (const test_case *size = op->sizes; size->op && test_takes_packed(op); size++) {
        test_case c = *size;
        test_set_size(&c, 'B', 1);
        test_set_size(&c, 'T', 88);
        test_set_sequences(&c, 4, 4 + n % 2);
        c.packed.lengths = lengths;
        if (work(&c) > most_work) continue;
        for (int i = 0; i < count; i++, n++) {
            c.seed = (uint64_t)n;
            c.layout = layouts[n % 8];
            set_segments(&c, n % 3);
            set_next_dtypes(&c, n);
            pools_agree(t, &c);
        }
    }
}

/* Runs `check` on the cases of level TEST_LARGE. */
static void for_large(tester *t, check_case *check) {
    const test_op *op = t->op;
    const test_case *const tables[] = {op->cases, op->packed};
    for (int i = 0; i < 2; i++) {
        for (const test_case *at = tables[i]; at && at->op; at++) {
            test_case c = *at;
            if (c.level < TEST_LARGE) continue;
            c.seed = (uint64_t)(at - tables[i]);
            set_next_dtypes(&c, (int)c.seed);
            check(t, &c);
        }
    }
}

/* Runs `check` on the cases `many`, with one thread: the double twins would wake their threads for each of 70,000 batch
 * elements. */
static void for_many(tester *t, check_case *check) {
    const test_op *op = t->op;
#ifdef _OPENMP
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
#endif
    for (const test_case *c = op->many; c->op; c++) check(t, c);
#ifdef _OPENMP
    omp_set_num_threads(threads);
#endif
}

/* ---- all checks of an operator --------------------------------------------------------------- */

static const int64_t times[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 129, -1};
static const int64_t long_times[] = {1000, -1};
static const int64_t mode_times[] = {33, -1};
static const int64_t once_times[] = {2, 33, -1};
static const int64_t few_mode_times[] = {17, -1};
static const int64_t few_times[] = {65, -1};
static const int64_t few_more_times[] = {130, -1};
static const int64_t fewest_more_times[] = {FEW_TOKENS, -1};
static const int64_t until_launched_times[] = {130, 520, 530, -1};
static const int64_t piece_times[] = {211, -1};
static const int64_t spoilt_times[] = {5, 110, -1}; /* few enough tokens for a step; more tokens than one chunk */

/* The name of the first kernel in test_op.launched that was not launched, or NULL. */
static const char *not_launched(const test_op *op) {
    const int has_handle = op->handle && machine_cublaslt(); /* cuBLASLt replaces some of the listed kernels */
    for (const char *const *kernel = op->launched; kernel && *kernel && !has_handle; kernel++)
        if (!machine_launched(*kernel)) return *kernel;
    return NULL;
}

/* Checks a case, unless all kernels of test_op.launched were launched before.  Every second case suits kernels that
 * need aligned arrays and a single segment. */
static void truth_until_launched(tester *t, const test_case *c) {
    test_case mine = *c;
    if (!not_launched(t->op)) return;
    if (c->seed % 2) set_segments(&mine, 1), mine.layout = TEST_PACKED;
    truth_holds(t, &mine);
}

/* Runs the cases test_op.launching, each for a kernel that serves only one shape.  Skips cases whose kernel was
 * launched before. */
static void check_launching(tester *t) {
    for (const test_case *c = t->op->launching; c && c->op && !is_exact; c++) {
        test_values in, truth, magnitudes = {{NULL}};
        if (machine_launched(c->name)) continue;
        test_inputs(c, GT_FORWARD, &in);
        test_run(&test_truth, c, GT_FORWARD, &in, TEST_ALL, &truth);
        check_pass(&t->with_saved, c, GT_FORWARD, &in, &truth, &magnitudes);
        test_free(&in), test_free(&truth);
        test_check(is_less || machine_launched(c->name), "%s was not launched", c->name);
    }
}

/* Checks the numbers of tokens or rows in test_op.more_times, and that the kernels of test_op.launched were launched.
 * With --few, runs every size once, and then small sizes with every dtype until all these kernels were launched.  With
 * --less, no kernel must be launched, so small sizes run in bf16, aligned as the fast kernels need it. */
static void check_more_times(tester *t) {
    const test_op *op = t->op;
    const double most_work = machine_is_slow ? 6e6 : 2e7;
    if (!op->more_times) return;
    if (!is_few) sweep(t, op->more_times, most_work, 1, truth_holds_by_turns);
    if (is_few && (!is_short || is_exact)) sweep(t, few_more_times, most_work, 1, truth_holds_by_turns);
    if (is_few && is_short && !is_exact) sweep(t, fewest_more_times, FEW_WORK, 1, truth_holds_by_turns);
    if (is_few && is_less) for_sizes(t, 70, 1.5e6, 1, truth_holds); /* in bf16 */
    if (!is_less) {
        sweep(t, until_launched_times, 3e5, DTYPES, truth_until_launched);
        const char *kernel = not_launched(op);
        test_check(!kernel, "%s was not launched", kernel);
    }
    check_launching(t);
    test_group(op->name, "more times");
}

static void rounding_agrees(tester *t, const test_case *c) {
    test_case exact = *c;
    t->op->exact.set(&exact);
    test_rounding_agrees(&t->plain, &exact, t->op->exact.zero, t->op->exact.one);
}

/* Checks a step against the double twin.  Also checks that each batch element alone, with its tokens in one or several
 * steps, gives the same bits. */
static void check_step(tester *t, const test_case *c, int n) {
    test_values in, truth;
    t->plain_context.mode.schedule = (uint64_t)n + 1;
    test_inputs(c, GT_STEP, &in);
    test_run(&test_truth, c, GT_STEP, &in, TEST_ALL, &truth);
    check_pass(&t->plain, c, GT_STEP, &in, &truth, NULL);
    test_free(&in), test_free(&truth);
    /* each step rounds a 16-bit state, so several steps differ from one step of all tokens */
    const size_t of_state = test_table(c)->of_steps.state;
    const int is_rounded = of_state && test_get_flag(c, of_state) > GT_F32;
    test_step_is_alone(&t->plain, c, n % 3 || is_rounded ? 16 : 1 + n % 4);
    if (t->op->check_step) t->op->check_step(&t->plain, c);
    if (t->op->exact.zero) rounding_agrees(t, c);
    if (n % 3 == 0 && !is_rounded) test_server_agrees(&t->plain, c, is_few ? 8 : 16);
}

/* Sets the dtypes of state and parameters.  The state is fp32 in every second case, or in every fourth if it can be
 * int8. The parameters are fp32 in two of three cases. */
static void set_dtypes_of_steps(test_case *c, int n) {
    const gt_step_dtypes *of = &test_table(c)->of_steps;
    if (of->state && of->passes != GT_STATES_OF_FORWARD)
        test_set_flag(c, of->state, n % 2 ? GT_BF16 + n / 2 % 2 : n % 4 ? GT_F32 : GT_DTYPE_DEFAULT);
    if (of->scale && n % 4 >= 2) test_set_flag(c, of->state, GT_INT8);
    if (of->parameter) test_set_flag(c, of->parameter, n % 3 ? GT_DTYPE_DEFAULT : GT_BF16 + n / 3 % 2);
}

static gt_status quantize(const void *args, gt_stream stream) {
    return gt_quantize_states((const gt_int8_states_args *)args, stream);
}
static gt_status dequantize(const void *args, gt_stream stream) {
    return gt_dequantize_states((const gt_int8_states_args *)args, stream);
}

/* The arrays of one conversion of states, and their lengths. */
enum { INT8_STATES = 3 * 6 * 300, INT8_SCALES = 5 * 40, INT8_BYTES = 5 * 2000 };
typedef struct int8_memory {
    float state[INT8_STATES], scale[INT8_SCALES];
    int32_t slots[4];
    int8_t int8[INT8_BYTES];
} int8_memory;

static void use_memory(gt_int8_states_args *a, int8_memory *m, int has_slots) {
    a->state = m->state, a->scale = m->scale, a->int8 = m->int8, a->slots = has_slots ? m->slots : NULL;
}

/* Converts states to int8 and back, by the kernel and by the twin.  All memory must have the same bits, including gaps
 * and skipped rows; only a NaN may have any bits. */
static void check_int8_states(void) {
    static const int64_t sizes[][3] = {{6, 128, 0}, {3, 100, 64}, {5, 1, 0}, {2, 257, 64}, {4, 3, 2}};
    static int8_memory memory[2]; /* of the kernel and of the twin */
    char *const place = machine_allocate(sizeof memory[0], 1);
    test_random r = {3};
    for (int i = 0; i < 10; i++) {
        gt_int8_states_args a = {.B = 3, .rows = sizes[i / 2][0], .columns = sizes[i / 2][1], .group = sizes[i / 2][2]};
        const int64_t groups = a.group ? (a.columns + a.group - 1) / a.group : 1;
        if (i % 2) a.slot_capacity = 5, a.int8_stride = a.rows * a.columns + 3, a.scale_stride = a.rows * groups + 1;
        memset(memory, 77, sizeof memory);
        for (int64_t k = 0; k < a.B * a.rows * a.columns; k++) memory[0].state[k] = (float)test_normal(&r);
        /* a row whose numbers are so small that its scale is 0 */
        for (int64_t k = 0; k < a.columns; k++) memory[0].state[k] = k ? 0x1p-101f : 0;
        memory[0].state[2 * a.columns - 1] = INFINITY;
        memory[0].slots[0] = 4, memory[0].slots[1] = -1, memory[0].slots[2] = 1;
        memory[1] = memory[0];
        for (int back = 0; back < 2; back++) {
            machine_job job = {.pass = {back ? dequantize : quantize}, .passes = 1};
            gt_int8_states_args twin = a;
            use_memory(&twin, &memory[1], i % 2);
            use_memory(&a, (int8_memory *)(void *)place, i % 2);
            memcpy(&job.args[0], &a, sizeof a);
            machine_copy(place, &memory[0], sizeof memory[0]);
            const gt_status status = machine_run(&job, 1, &machine_modes[0]);
            test_check(status == GT_OK, "conversion %d of states: %s", i, gt_last_error());
            machine_copy(&memory[0], place, sizeof memory[0]);
            const gt_status expected = (back ? gt_ref_dequantize_states : gt_ref_quantize_states)(&twin);
            test_check(expected == GT_OK, "twin's conversion %d of states: %s", i, gt_last_error());
            int same = !memcmp(memory[0].int8, memory[1].int8, sizeof memory[0].int8);
            for (int k = 0; k < INT8_SCALES; k++)
                same &= memory[0].scale[k] == memory[1].scale[k] ||
                        (isnan(memory[0].scale[k]) && isnan(memory[1].scale[k]));
            for (int k = 0; k < INT8_STATES; k++)
                same &= memory[0].state[k] == memory[1].state[k] ||
                        (isnan(memory[0].state[k]) && isnan(memory[1].state[k]));
            test_check(same, "conversion %d of states %s int8: other bits than the twin", i, back ? "from" : "to");
            const int64_t first = i % 2 ? 4 * (a.rows * groups + 1) : 0;
            test_check(memory[1].scale[first] == 0 && isnan(memory[1].scale[first + 2 * groups - 1]),
                       "conversion %d: the row near 0 is not 0, or infinity is not NaN", i);
            if (back) continue;
            for (int m = 0; m < 2; m++) memset(memory[m].state, 0, sizeof memory[m].state);
        }
        /* back from int8, the numbers must be in the range of the original normal numbers */
        for (int64_t k = 2 * a.columns; k < a.rows * a.columns; k++)
            test_check(fabsf(memory[1].state[k]) < 6, "conversion %d: a number is %g: must be below 6", i,
                       (double)memory[1].state[k]);
    }
    machine_release(place);
    test_group("int8", "states converted to int8 and back");
}

/* Checks the step kernels.  Layout, slots and dtypes change from case to case.  With --few, every size runs once with
 * 1, 5 and 16 tokens.  Otherwise every size runs three times with each number in step_times, and one of the three runs
 * has packed arrays. */
static void check_steps(tester *t) {
    static const int64_t step_times[] = {1, 5, 16, 2, 4, 15, 3};
    const test_op *op = t->op;
    int n = 0;
    for (const test_case *size = op->steps; size && size->op; size++) {
        for (int i = 0; i < (is_few ? 3 : 21); i++, n++) {
            test_case c = *size;
            test_set_size(&c, 'T', step_times[is_few ? i : i / 3]);
            c.seed = (uint64_t)n;
            c.layout = n % 3 ? layouts[n / 3 % 8] : TEST_PACKED;
            c.row = rows[n / 8 % 4];
            if (op->set_regime) op->set_regime(&c, n);
            if (n % 2) test_set_slots(&c, test_get_size(&c, 'B') + 2);
            c.drafts = n / 2 % 4;
            if (n % 5 == 2 && test_find(test_table(&c), "places") >= 0) c.drafts |= TEST_PLACES;
            set_next_dtypes(&c, n + n / DTYPES);
            set_dtypes_of_steps(&c, n + n / 4);
            check_step(t, &c, n);
        }
    }
    for (const char *const *kernel = op->step_kernels; kernel && *kernel && !is_few; kernel++)
        test_check(machine_launched(*kernel), "%s was not launched", *kernel);
    if (op->steps) test_group(op->name, "kernels of steps");
    if (!strcmp(op->name, "ssd")) check_int8_states();
}

/* Checks all ways to make calls, or only the way with the name `only`, unless this is NULL. */
static void check_modes(tester *t, const char *only) {
    const test_op *op = t->op;
    for (const machine_mode *mode = machine_modes; mode->name; mode++) {
        if (is_exact || (only && strcmp(only, mode->name))) continue;
        t->other = make_runner(op, &t->other_context, *mode);
        if (!mode->schedule) t->other_context.mode.schedule = 1;
        if (machine_is_slow || is_short)
            for_cases(t, is_few ? TEST_TINY : TEST_SMALL, -1, mode_agrees);
        else
            for_all_dtypes(t, TEST_MEDIUM, mode_agrees);
        sweep(t, is_few ? few_mode_times : mode_times, is_few ? 1e5 : 2e6, 1, mode_agrees);
        test_group(op->name, mode->name);
    }
}

/* Runs fewer cases, for the slow emulation and for sanitizers. */
static void check_briefly(tester *t) {
    const test_op *op = t->op;
    for_cases(t, TEST_SMALL, -1, truth_holds);
    test_group(op->name, "against the truth");
    sweep(t, times, machine_is_slow && is_exact ? 1e6 : 5e6, 1, truth_holds_by_turns);
    sweep_packed(t, 5e6, 1, truth_holds_by_turns);
    test_group(op->name, "sizes and times");
    check_more_times(t);
    for_drawn(t, 10, 20, truth_holds_by_turns);
    test_group(op->name, "random cases against the truth");
    for_cases(t, TEST_TINY, -1, layouts_agree);
    for_cases(t, TEST_SMALL, -1, in_place_agrees);
    test_group(op->name, "layouts and places");
    for_cases(t, TEST_TINY, -1, accumulate_adds);
    test_group(op->name, "accumulate");
}

static void check_fully(tester *t) {
    const test_op *op = t->op;
    for_all_dtypes(t, TEST_MEDIUM, truth_holds);
    test_group(op->name, "against the truth");
    for_large(t, truth_holds_by_turns);
    for_many(t, truth_holds_by_turns);
    test_group(op->name, "large, and more than 65535 of each index");
    sweep(t, times, 5e6, 3, truth_holds_by_turns);
    sweep(t, long_times, 2e7, 1, truth_holds_by_turns);
    sweep_packed(t, 2e7, 2 * DTYPES, truth_holds_by_turns);
    test_group(op->name, "sizes, times, decays and layouts");
    for_drawn(t, 200, 40, truth_holds_by_turns);
    test_group(op->name, "random cases against the truth");
    for_all_dtypes(t, TEST_MEDIUM, layouts_agree);
    test_group(op->name, "every layout");
    for_all_dtypes(t, TEST_MEDIUM, in_place_agrees);
    test_group(op->name, "in place");
    for_cases(t, TEST_MEDIUM, -1, alone_agrees);
    test_group(op->name, "each output asked for alone");
    for_all_dtypes(t, TEST_SMALL, accumulate_adds);
    for_cases(t, TEST_MEDIUM, -1, accumulate_adds);
    test_group(op->name, "accumulate adds");
    for_cases(t, TEST_SMALL, 0, difference_agrees);
    for_drawn(t, 20, 10, difference_agrees);
    for_sizes(t, 70, 5e6, 0, difference_agrees);
    test_group(op->name, "difference quotients");
}

/* Puts a NaN or infinity into the last token of the second chunk in forward, and into the first token in backward.
 * With these sizes the kernels spoil the whole chunk.  So the check fails if the documented chunk is too short, or if a
 * kernel spoils a token beyond the chunk. */
static void check_spoilt_chunks(tester *t) {
    const int64_t at[2] = {2 * t->op->reach[0] - 1, 0};
    for (const test_case *of = t->op->spoilt; of && of->op; of++) {
        test_case c = *of;
        c.seed = 1 + (uint64_t)(of - t->op->spoilt);
        test_set_size(&c, 'B', 1);
        test_set_size(&c, 'T', 129);
        if (t->op->set_regime) t->op->set_regime(&c, 2);
        test_nonfinite_stays(has_saved(&c) && c.seed % 2 ? &t->with_saved : &t->plain, &c, at, 1, 1, 0);
    }
    if (t->op->spoilt) test_group(t->op->name, "a NaN or infinity spoils its chunk, and no more");
}

static void check_nonfinite(tester *t) {
    /* operators that scan token by token, which are slow in the emulation */
    const int is_scan = test_is_over_time(t->op) && !t->op->reach[0];
    const double most_work = is_few ? (is_scan ? 5e4 : 2e5) : machine_is_slow ? 1e6 : 8e6;
    sweep(t, spoilt_times, most_work, is_few ? 1 : DTYPES, nonfinite_stays);
    sweep_packed(t, most_work, is_few ? 1 : DTYPES, nonfinite_stays);
    test_group(t->op->name, "a NaN or infinity stays in its chunk");
}

static void check_prefill(tester *t) {
    const double most_work = is_few ? 4e6 : machine_is_slow ? 2e7 : 2e8;
    int n = 0;
    for (const test_case *size = t->op->sizes; size->op; size++) {
        for (int i = 0; i < (is_few ? 1 : DTYPES); i++, n++) {
            test_case c = *size;
            c.seed = (uint64_t)n;
            c.layout = layouts[n % 8];
            test_set_size(&c, 'B', machine_is_slow ? 1 : 2);
            test_set_size(&c, 'T', machine_is_slow ? 160 : 400);
            if (t->op->set_regime) t->op->set_regime(&c, n / DTYPES);
            set_next_dtypes(&c, n);
            if (work(&c) <= most_work) prefill_splits(t, &c);
        }
    }
    test_group(t->op->name, "a prefill in pieces of 128 tokens has the bits of one call");
}

static void check_snapshots(tester *t) {
    const double most_work = is_few ? 4e6 : machine_is_slow ? 2e7 : 2e8;
    int n = 0;
    for (const test_case *size = t->op->sizes; size->op; size++) {
        for (int i = 0; i < (is_few ? 1 : 4); i++, n++) {
            test_case c = *size;
            c.seed = (uint64_t)n;
            c.layout = layouts[n / 3 % 8];
            test_suit_snapshots(&c, n % 2 ? 0 : machine_is_slow ? 1 : 2);
            if (t->op->set_regime) t->op->set_regime(&c, n / 4);
            set_next_dtypes(&c, n / 2 + n);
            if (work(&c) > most_work) continue;
            test_snapshots_agree(&t->plain, &c, n % 12, 0);
            if (n % 2) continue;
            set_segments(&c, 2 + n / 2 % 2);
            test_snapshots_agree(&t->plain, &c, 0, twice(&c));
        }
    }
    test_group(t->op->name, "snapshots are states of prefixes");
}

static void check_properties(tester *t) {
    const test_op *op = t->op;
    const test_level level = machine_is_slow || is_short ? TEST_TINY : TEST_MEDIUM;
    for_cases(t, level, -1, null_agrees);
    test_group(op->name, "NULL is the constant stated");
    for_cases(t, level, -1, batch_splits);
    if (!is_few) sweep_packed(t, machine_is_slow ? 1.5e6 : 2e7, machine_is_slow ? 1 : 3, batch_splits);
    test_group(op->name, "batch elements and packed sequences one by one");
    check_nonfinite(t);
    for_all_dtypes(t, level, refuses_less);
    test_group(op->name, "too little workspace or saved");
    if (test_is_over_time(op)) {
        for_cases(t, level, -1, shared_agrees);
        test_group(op->name, "a shared state is one for each");
        if (op->has_exact_prefill) check_prefill(t);
        if (op->table()->of_steps.snapshot) check_snapshots(t);
        for_cases(t, level, -1, time_splits);
        test_group(op->name, "the time cut in two");
        for_cases(t, level, -1, pools_agree);
        sweep_pools(t, is_few ? 2e6 : 2e7, is_few ? 1 : DTYPES);
        test_group(op->name, "states in pools");
        if (op->table()->of_steps.passes != GT_STATES_OF_STEP) {
            for_cases(t, level, -1, small_states_agree);
            if (machine_is_slow) for_cases(t, TEST_SMALL, -1, small_states_agree_fast);
            if (op->table()->of_steps.conv_state) check_conv_states(t);
            test_group(op->name, "forward with states of 16 bits");
        }
    }
    if (op->twin[GT_STEP] && test_is_over_time(op)) {
        check_steps(t);
        for_cases(t, level, -1, step_agrees);
        for_cases(t, TEST_SMALL, 0, step_agrees);
        test_group(op->name, "a step is a forward");
    }
    if (op->table()->fields.pieces) {
        for_cases(t, level, -1, pieces_agree);
        sweep(t, piece_times, is_few ? 2e5 : machine_is_slow ? 2e6 : 2e7, machine_is_slow ? 1 : 3, pieces_agree);
        test_group(op->name, "a sequence in pieces");
    }
    for (t->property = op->properties; t->property && t->property->what; t->property++) {
        for_cases(t, level < t->property->level ? level : t->property->level, -1, property_holds);
        for (int d = 0; d < 3 && !test_is_over_time(op); d++) for_sizes(t, 33, 3e7, d, property_holds);
        test_group(op->name, t->property->what);
    }
}

/* Runs every kernel with every dtype, and with times that take all paths between its chunks. */
static void check_once(tester *t) {
    const test_op *op = t->op;
    const double most_work = machine_is_slow ? 2e6 : 5e6;
    sweep(t, once_times, most_work, 1, truth_holds_by_turns);
    sweep_packed(t, most_work, 1, truth_holds_by_turns);
    test_group(op->name, "every size");
    check_more_times(t);
    if (op->table()->fields.pieces) {
        sweep(t, piece_times, most_work, 1, pieces_agree);
        test_group(op->name, "a sequence in pieces");
    }
    if (is_short) return;
    for (int d = 0; d < DTYPES; d++)
        for_sizes(t, machine_is_slow ? 17 : 130, machine_is_slow ? 1e6 : 1.4e7, d, truth_holds);
    test_group(op->name, "every size and dtype");
}

/* Runs every kernel, size, pass and dtype at least once. */
static void check_few(tester *t) {
    const test_op *op = t->op;
    for_cases(t, TEST_TINY, -1, truth_holds_by_turns);
    test_group(op->name, "against the truth");
    if (!op->more_times || !test_is_over_time(op)) sweep(t, few_times, 5e6, 1, truth_holds_by_turns);
    sweep_packed(t, 3e5, 1, truth_holds_by_turns);
    test_group(op->name, "every size");
    check_more_times(t);
    if (is_short) return;
    one_in = 5;
    for_cases(t, TEST_TINY, -1, layouts_agree);
    for_cases(t, TEST_TINY, -1, in_place_agrees);
    test_group(op->name, "layouts and places");
    for_cases(t, TEST_TINY, -1, accumulate_adds);
    test_group(op->name, "accumulate");
    check_properties(t);
    check_modes(t, NULL);
    one_in = 1;
}

static void check_operator(tester *t) {
    if (!is_exact) check_spoilt_chunks(t);
    if (is_few) {
        check_few(t);
        return;
    }
    if (is_once) {
        check_once(t);
        return;
    }
    if (machine_is_slow || is_short)
        check_briefly(t);
    else
        check_fully(t);
    check_properties(t);
    check_modes(t, NULL);
}

/* Checks that gt_OP_path names the product of cuBLASLt if the caller gives a handle.  The pointers of the call are not
 * valid, so gt_OP_path must not run the product. */
static void check_path_with_handle(const test_op *op) {
    test_case c = op->sizes[0];
    char text[1024];
    void *handle = machine_cublaslt();
    if (!handle || !op->handle) return;
    test_set_size(&c, 'M', 256);
    test_set_dtype(&c, GT_BF16, GT_DTYPE_DEFAULT);
    put_pointer(&c.args, op->handle, handle);
    const gt_status status = op->table()->calls.path(&c.args, text, sizeof text);
    test_check(status == GT_OK && strstr(text, "cublasLtMatmul"), "%s with a handle: '%s' (%d)", op->name, text,
               status);
    test_group(op->name, "path with a handle");
}

int main(int argc, char **argv) {
    const char *mode = NULL;
    int first, status = machine_start();
    if (status) return status;
    for (first = 1; first < argc && !strncmp(argv[first], "--", 2); first++) {
        if (!strcmp(argv[first], "--short")) {
            is_short = 1;
        } else if (!strcmp(argv[first], "--once")) {
            is_once = 1;
        } else if (!strcmp(argv[first], "--few")) {
            is_few = is_once = 1;
        } else if (!strcmp(argv[first], "--exact")) {
            is_exact = 1;
        } else if (!strcmp(argv[first], "--steps")) {
            is_steps = 1;
        } else if (!strcmp(argv[first], "--less")) {
            is_less = 1;
        } else if (!strcmp(argv[first], "--mode") && first + 1 < argc) {
            mode = argv[++first];
        } else if (!strcmp(argv[first], "--device") && first + 1 < argc) {
            if (machine_choose(argv[++first])) continue;
            fprintf(stderr, "no device %s here\n", argv[first]);
            return 2;
        } else {
            fprintf(stderr, "unknown option %s\n", argv[first]);
            return 2;
        }
    }
    for (int i = first; i < argc; i++) {
        if (test_op_of(argv[i])) continue;
        fprintf(stderr, "unknown operator %s\n", argv[i]);
        return 2;
    }
    for (int i = 0; test_ops[i]; i++) {
        const test_op *op = test_ops[i];
        int is_asked = first == argc;
        for (int k = first; k < argc; k++) is_asked |= !strcmp(argv[k], op->name);
        if (!is_asked) continue;
        tester t;
        start_tester(&t, op);
        if (is_steps) {
            check_steps(&t);
            continue;
        }
        check_path_with_handle(op);
        if (mode)
            check_modes(&t, strcmp(mode, "all") ? mode : NULL);
        else
            check_operator(&t);
        free(t.plain_context.saved), free(t.saved_context.saved), free(t.other_context.saved);
    }
    machine_report();
    return test_finish();
}
