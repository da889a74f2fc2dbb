/* Tensors of more than 2^31 elements: the last batch element of a call, or the last row, gives the bits that it gives
 * alone.  All others hold NaN, which shows if any of them is read for it.  What the GPU has no
 * memory for is left out.
 *
 *     test_gpu_large [--short]
 *
 * --short, for racecheck and initcheck, which take hours for the whole batch: the first and the last element
 * where they are, and nothing between; what nobody wrote is left for initcheck to find. */
#include "test_kernels.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

static const machine_mode plain = {"plain", 0, 0, 0, 0, 0};
static bool is_short;

/* A call on the whole batch, or on its last element alone. */
struct Call {
    const test_case *c;
    gt_pass pass;
    test_args args, filled;
    gt_dims dims;
    std::vector<char *> memory;
};

static void set_pointer(test_args *args, size_t offset, const void *p) { memcpy((char *)args + offset, &p, sizeof p); }

static void must(gt_status status) {
    if (status == GT_OK) return;
    printf("FAILED: %s\n", gt_last_error());
    exit(1);
}

/* Parameters and activations; states and the sums over the batch are left out. */
static bool is_used(const Call &k, const gt_tensor *t) {
    return t->use[k.pass] != '-' && t->use[k.pass] != 'g' && t->kind != 'i' && t->shape[0] != 'S' && t->shape[0] != 'Q';
}

/* What there is much of: batch elements, or rows. */
static char batch_letter(const test_case *c) {
    for (const gt_size *size = test_table(c)->sizes; size->letter; size++)
        if (size->letter == 'B') return 'B';
    return 'M';
}

static bool has_batch(const gt_tensor *t) { return t->shape[0] == 'B' || t->shape[0] == 'M'; }

/* From its first element to the end of its last. */
static size_t bytes_of(const Call &k, const gt_tensor *t) {
    const gt_view v = gt_view_of(test_table(k.c), t, &k.filled, &k.dims);
    int64_t bytes = v.element;
    for (int i = 0; i < v.rank; i++) bytes += (v.size[i] - 1) * v.stride[i];
    return (size_t)bytes;
}

/* Random values in the last batch element (short: the same in the first), or in all of a parameter. */
static void fill(const Call &k, const gt_tensor *t, char *memory) {
    const gt_view v = gt_view_of(test_table(k.c), t, &k.filled, &k.dims);
    const int64_t count = v.count / (has_batch(t) ? k.dims.n[batch_letter(k.c) - 'A'] : 1);
    std::vector<char> host((size_t)(count * v.element));
    test_random random = {(uint64_t)t->offset};
    test_map map;
    const test_fill f = test_fill_of(k.c, t, &map);
    for (int64_t i = 0; i < count; i++) {
        const float x = (float)(f.mean + f.spread * test_normal(&random));
        const uint16_t bits = gt_f32_to_bf16(x);
        memcpy(&host[(size_t)(i * v.element)], v.element == 4 ? (void *)&x : (void *)&bits, (size_t)v.element);
    }
    machine_copy(memory + bytes_of(k, t) - host.size(), host.data(), host.size());
    if (is_short) machine_copy(memory, host.data(), host.size());
}

static void prepare(Call *k) { must(gt_prepare(test_table(k->c), GT_QUERY, GT_HOST, &k->args, &k->filled, &k->dims)); }

static void size_call(Call *k, int64_t batch) {
    test_case c = *k->c;
    test_set_size(&c, batch_letter(&c), batch);
    k->args = c.args;
    prepare(k);
}

/* A batch of two, as far from each other as the first and the last of `batch`. */
static void move_apart(Call *two, const Call &one, int64_t batch) {
    for (const gt_tensor *t = test_table(two->c)->tensors; t->name; t++) {
        if (!has_batch(t) || !t->stride_offset) continue;
        const gt_view v = gt_view_of(test_table(one.c), t, &one.filled, &one.dims);
        const gt_stride s = {v.count * (batch - 1), 0, 0};
        memcpy((char *)&two->args + t->stride_offset, &s, batch_letter(two->c) == 'M' ? sizeof(int64_t) : sizeof s);
    }
    prepare(two);
}

static size_t workspace_bytes(const Call &k) {
    gt_workspace need;
    must(test_table(k.c)->calls.workspace(&k.args, &need));
    return k.pass == GT_FORWARD ? need.forward : need.backward;
}

/* Memory of a tensor or workspace, NaN (short: as it comes). */
static char *take(Call *k, size_t bytes) {
    k->memory.push_back(machine_allocate(bytes, 0)); /* of just that size */
    if (!is_short) cudaMemset(k->memory.back(), 0xff, bytes);
    return k->memory.back();
}

static void run(Call *k) {
    const gt_op *op = test_table(k->c);
    const size_t bytes = workspace_bytes(*k);
    machine_job job = {};
    if (bytes) set_pointer(&k->args, op->fields.workspace, take(k, bytes));
    memcpy((char *)&k->args + op->fields.workspace_bytes, &bytes, sizeof bytes);
    job.pass[0] = op->calls.pass[k->pass];
    job.args[0] = k->args;
    job.passes = 1;
    must(machine_run(&job, 1, &plain));
}

static void release(Call *k) {
    for (char *memory : k->memory) machine_release(memory);
    k->memory.clear();
}

static bool fits(const Call &k) {
    size_t need = workspace_bytes(k), available, total;
    for (const gt_tensor *t = test_table(k.c)->tensors; t->name; t++)
        if (is_used(k, t)) need += bytes_of(k, t);
    cudaMemGetInfo(&available, &total);
    if (need + ((size_t)1 << 30) <= available) return true;
    printf("%s takes %.1f GiB, more than this GPU has free\n", test_describe(k.c, k.pass), (double)need * 0x1p-30);
    return false;
}

/* Returns whether there was memory for it. */
static bool check_case(const test_case *c, gt_pass pass) {
    const gt_op *op = test_table(c);
    const int64_t batch = test_get_size(c, batch_letter(c));
    Call all = {c, pass, {}, {}, {}, {}}, one = all;
    size_call(&all, is_short ? 2 : batch);
    size_call(&one, 1);
    if (is_short) move_apart(&all, one, batch);
    if (!fits(all)) return false;
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        if (!is_used(all, t)) continue;
        char *memory = take(&all, bytes_of(all, t));
        char *last = memory + bytes_of(all, t) - bytes_of(one, t);
        const bool is_input = test_is_input(t, pass);
        if (is_input) fill(all, t, memory);
        set_pointer(&all.args, t->offset, memory);
        set_pointer(&one.args, t->offset, is_input ? last : take(&one, bytes_of(one, t)));
    }
    run(&all);
    run(&one);
    for (const gt_tensor *t = op->tensors; t->name; t++) {
        if (!is_used(all, t) || !test_is_output(t, pass)) continue;
        const size_t bytes = bytes_of(one, t);
        std::vector<char> a(bytes), b(bytes);
        char *from_all, *from_one;
        size_t nan = 0;
        memcpy(&from_all, (char *)&all.args + t->offset, sizeof from_all);
        memcpy(&from_one, (char *)&one.args + t->offset, sizeof from_one);
        machine_copy(a.data(), from_all + bytes_of(all, t) - bytes, bytes);
        machine_copy(b.data(), from_one, bytes);
        for (size_t i = 0; i < bytes; i += 2) nan += (a[i + 1] & 0x7f) == 0x7f && (a[i] & 0x80);
        test_check(a == b && nan == 0, "%s: %s of the last one: %s", test_describe(c, pass), t->name,
                   nan ? "NaN" : "not what it is alone");
    }
    release(&all);
    release(&one);
    return true;
}

int main(int argc, char **argv) {
    test_case wkv6 = {}, conv1d = {}, linear = {}, mix = {}, gate = {};
    bool any = false;
    is_short = argc == 2 && !strcmp(argv[1], "--short");
    if (argc > 1 + is_short) {
        fprintf(stderr, "usage: %s [--short]\n", argv[0]);
        return 2;
    }
    const int status = machine_start();
    if (status) return status;
    wkv6.op = "wkv6";
    wkv6.args.wkv6.B = 4100;
    wkv6.args.wkv6.T = 512;
    wkv6.args.wkv6.H = 16;
    wkv6.args.wkv6.N = 64;
    wkv6.args.wkv6.segments = 1;
    conv1d.op = "conv1d";
    conv1d.args.conv1d.B = 1030;
    conv1d.args.conv1d.T = 2048;
    conv1d.args.conv1d.D = 1024;
    conv1d.args.conv1d.W = 4;
    conv1d.args.conv1d.activation = GT_ACT_SILU;
    linear.op = "rmsnorm_linear";
    linear.args.rmsnorm_linear.M = 4200000;
    linear.args.rmsnorm_linear.D = linear.args.rmsnorm_linear.O = 512;
    mix.op = "norm_mix";
    mix.args.norm_mix.M = 4200000;
    mix.args.norm_mix.D = 512;
    gate.op = "norm_gate";
    gate.args.norm_gate.M = 4200000;
    gate.args.norm_gate.D = 512;
    for (test_case *c : {&wkv6, &conv1d, &linear, &mix, &gate}) {
        c->name = "large";
        test_set_dtype(c, GT_BF16, GT_DTYPE_DEFAULT);
        any |= check_case(c, GT_FORWARD);
        any |= check_case(c, GT_BACKWARD);
        test_group(c->op, "more than 2^31 elements");
    }
    return any ? test_finish() : 0;
}
