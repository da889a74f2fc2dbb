/* gt/fused/wkv_ssm_mix.cuh - dy of both branches in backward of a mixed call of wkv_ssm.
 *
 * Without gains and their gradients both dy are dmixed itself (share_dmixed).  No kernel runs, and dy takes no memory.
 * Otherwise unmix_kernel is the first kernel of backward.  For every token and channel it computes
 *     dy_wkv = gain_wkv dmixed       dgain_wkv = sum over tokens of y_wkv dmixed
 *     dy_ssm = gain_ssm dmixed       dgain_ssm = sum over tokens of y_ssm dmixed
 * Then backward of wkv6 and ssd read dy_wkv and dy_ssm, packed in workspace and rounded to the call's dtype.
 *
 * tile: a thread has COUNT adjacent channels, the elements of 16 bytes (COUNT = 1 if rows are not aligned).  `lanes`
 * threads have a token's channels, or BLOCK COUNT of them; a block has BLOCK / lanes tokens at a time.
 * grid: tiles of channels * groups of tokens.  Block i of a tile takes the tokens of group i.
 * registers: both gains, both sums, and the loaded elements of one token.
 * shared: 2 COUNT floats a thread, to add the tokens of a block.
 * bytes: dmixed, dy_wkv and dy_ssm once; y_wkv and y_ssm once if the gradient of their gains is wanted.  Each group
 * stores up to 8 bytes a channel of partial sums.
 * Order of sums: the tokens of a thread, the tokens of a block, then the groups (reduce_rows).  So results repeat. */
#ifndef GT_FUSED_WKV_SSM_MIX_CUH
#define GT_FUSED_WKV_SSM_MIX_CUH

#include "../recurrence/sequences.cuh"
#include "wkv_ssm.h"

namespace gt {
namespace wkv_ssm {

constexpr int UNMIX_BLOCK = 256;

/* A branch: its y, its gain, and what the kernel computes for it. */
struct UnmixBranch {
    const void* y; /* NULL: no gradient of the gain */
    gt_stride stride;
    const float* gain;
    void* dy;
    float* dgain;    /* partial sums [groups, channels], or NULL */
    Divider by_size; /* size of a head */
};

struct UnmixParams {
    Sequences sequences;
    const void* dmixed;
    gt_stride stride;
    UnmixBranch branch[2]; /* wkv6, ssd */
    int64_t channels, tiles, groups;
    int lanes; /* a power of 2 */
};

/* Returns the offset of channel c of a token. */
GT_DEV int64_t channel_offset(const gt_stride& stride, const Divider& by_size, int64_t b, int64_t t, int c) {
    int inside;
    const int head = divide(c, by_size, &inside);
    return offset_of(stride, b, t, head) + inside;
}

template <class T, int COUNT>
GT_KERNEL(UNMIX_BLOCK, 3)
unmix_kernel(const GT_GRID_CONSTANT UnmixParams p) {
    using Some = Vec<T, COUNT>;
    const int tile = block_x() % (int)p.tiles, lane = thread_id() % p.lanes, row = thread_id() / p.lanes;
    const int64_t group = block_x() / p.tiles, rows = UNMIX_BLOCK / p.lanes;
    const int64_t channel = ((int64_t)tile * p.lanes + lane) * COUNT;
    const bool exists = channel < p.channels;
    const int c = exists ? (int)channel : 0;
    const int64_t T_used = used_tokens(p.sequences), tokens = p.sequences.B * T_used;
    /* Offsets in a token, and the first token */
    const int64_t at = channel_offset(p.stride, p.branch[0].by_size, 0, 0, c);
    int64_t y_at[2];
    float gain[2][COUNT], sum[2][COUNT] = {};
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const UnmixBranch& x = p.branch[i];
        y_at[i] = channel_offset(x.stride, x.by_size, 0, 0, c);
        GT_UNROLL
        for (int e = 0; e < COUNT; e++) gain[i][e] = x.gain ? x.gain[c + e] : 1.0f;
    }
    for (int64_t token = group * rows + row; exists && token < tokens; token += p.groups * rows) {
        const int64_t b = p.sequences.B == 1 ? 0 : token / T_used, t = token - b * T_used;
        const Some d = ldg<Some>(static_cast<const T*>(p.dmixed) + offset_of(p.stride, b, t, 0) + at);
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            const UnmixBranch& x = p.branch[i];
            float dy[COUNT];
            GT_UNROLL
            for (int e = 0; e < COUNT; e++) dy[e] = gain[i][e] * d.get(e);
            Some packed;
            packed.set(dy);
            stg<Some>(static_cast<T*>(x.dy) + (b * p.sequences.T + t) * p.channels + c, packed);
            if (!x.y) continue;
            const Some y = ldg<Some>(static_cast<const T*>(x.y) + offset_of(x.stride, b, t, 0) + y_at[i]);
            GT_UNROLL
            for (int e = 0; e < COUNT; e++) sum[i][e] = fma_rn(y.get(e), d.get(e), sum[i][e]);
        }
    }
    /* Add up the block's tokens, one branch after the other. */
    const uint32_t sums = smem_base();
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        GT_UNROLL
        for (int e = 0; e < COUNT; e++) sts<float>(sums + 4 * ((COUNT * i + e) * UNMIX_BLOCK + thread_id()), sum[i][e]);
    }
    sync_threads();
    if (row != 0 || !exists) return;
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        if (!p.branch[i].dgain) continue;
        GT_UNROLL
        for (int e = 0; e < COUNT; e++) {
            float all = 0.0f;
            for (int r = 0; r < (int)rows; r++)
                all += lds<float>(sums + 4 * ((COUNT * i + e) * UNMIX_BLOCK + r * p.lanes + lane));
            p.branch[i].dgain[group * p.channels + c + e] = all;
        }
    }
}

/* ---- launch ------------------------------------------------------------------------------------------------------ */

/* A planned unmix_kernel. */
struct Unmix {
    UnmixParams params;
    gt_dtype dtype;
    bool is_aligned;
    RowSums sums; /* of dgain_wkv and dgain_ssm */
    size_t bytes;

    gt_status run_on(gt_stream stream) const;
};

/* Returns whether a vector of `count` elements of a row is aligned, for every token and head of `size` channels. */
static inline bool is_aligned_row(const void* data, const gt_stride& s, int64_t size, int64_t count) {
    return (uintptr_t)data % 16 == 0 && size % count == 0 && s.b % count == 0 && s.t % count == 0 && s.h % count == 0;
}

/* How the kernel cuts a call, if a thread has `each` channels. */
struct UnmixShape {
    int lanes = 1;
    int64_t tiles, groups;

    UnmixShape(int64_t channels, int64_t rows, int64_t each, const Device& device) {
        while (lanes < UNMIX_BLOCK && lanes * each < channels) lanes *= 2;
        tiles = (channels + lanes * each - 1) / (lanes * each);
        const int64_t room = 3 * (int64_t)device.multiprocessors / tiles, most = room > 1 ? room : 1;
        const int64_t all = (rows * lanes + UNMIX_BLOCK - 1) / UNMIX_BLOCK;
        groups = all < most ? all : most;
    }
};

/* If both dy are dmixed itself, sets dy of the inner structs and returns true.  Returns false if a gain or its gradient
 * is given.  Also returns false if the sizes of heads differ and dmixed's heads have gaps between them: then no stride
 * of ssd's dy describes dmixed. */
static inline bool share_dmixed(gt_wkv_ssm_args* a) {
    if (a->gain_wkv || a->gain_ssm || a->dgain_wkv || a->dgain_ssm) return false;
    gt_stride stride = a->dmixed_stride;
    if (a->ssd.P != a->wkv6.V) {
        if (a->wkv6.H != 1 && stride.h != a->wkv6.V) return false;
        stride.h = a->ssd.P;
    }
    a->wkv6.dy = a->ssd.dy = a->dmixed;
    a->wkv6.dy_stride = a->dmixed_stride;
    a->ssd.dy_stride = stride;
    return true;
}

/* Plans the kernel.  Sets dy of the inner structs: memory in the workspace, from a->workspace on. */
static inline Unmix plan_unmix(gt_wkv_ssm_args* a, const Device& device) {
    Unmix plan = {};
    UnmixParams& p = plan.params;
    Arena arena(a->workspace);
    const int64_t count = a->dtype == GT_F32 ? 4 : 8, bytes = gt_dtype_bytes(a->dtype);
    const void* const wkv_y = a->dgain_wkv ? a->wkv6.y : nullptr;
    const void* const ssm_y = a->dgain_ssm ? a->ssd.y : nullptr;
    plan.dtype = a->dtype;
    p.sequences = sequences_of(*a);
    p.dmixed = a->dmixed, p.stride = a->dmixed_stride;
    p.channels = a->wkv6.H * a->wkv6.V;
    plan.is_aligned = is_aligned_row(p.dmixed, p.stride, a->wkv6.V, count) && a->ssd.P % count == 0 &&
                      (!wkv_y || is_aligned_row(wkv_y, a->wkv6.y_stride, a->wkv6.V, count)) &&
                      (!ssm_y || is_aligned_row(ssm_y, a->ssd.y_stride, a->ssd.P, count));
    const int64_t rows = a->B * a->T;
    const UnmixShape shape(p.channels, rows, plan.is_aligned ? count : 1, device);
    const UnmixShape other(p.channels, rows, plan.is_aligned ? 1 : count, device);
    p.lanes = shape.lanes, p.tiles = shape.tiles, p.groups = shape.groups;
    const int64_t most = shape.groups > other.groups ? shape.groups : other.groups; /* as a query must answer */
    p.branch[0] = {wkv_y, a->wkv6.y_stride, a->gain_wkv, nullptr, nullptr, divide_by((int)a->wkv6.V)};
    p.branch[1] = {ssm_y, a->ssd.y_stride, a->gain_ssm, nullptr, nullptr, divide_by((int)a->ssd.P)};
    for (UnmixBranch& x : p.branch) x.dy = arena.take<char>(rows * p.channels * bytes);
    float* const out[2] = {a->dgain_wkv, a->dgain_ssm};
    for (int i = 0; i < 2; i++) {
        if (!out[i]) continue;
        p.branch[i].dgain = arena.take<float>(most * p.channels);
        plan.sums.add(p.branch[i].dgain, out[i], p.groups, p.channels);
    }
    plan.bytes = arena.bytes();
    a->wkv6.dy = p.branch[0].dy, a->ssd.dy = p.branch[1].dy;
    a->wkv6.dy_stride = a->ssd.dy_stride = {0, 0, 0};
    return plan;
}

inline gt_status Unmix::run_on(gt_stream stream) const {
    const auto launch = [&](auto element) {
        using T = decltype(element);
        constexpr int COUNT = 16 / (int)sizeof(T);
        return run("wkv_ssm unmix_kernel", is_aligned ? unmix_kernel<T, COUNT> : unmix_kernel<T, 1>,
                   params.tiles * params.groups, UNMIX_BLOCK, (size_t)(8 * (is_aligned ? COUNT : 1) * UNMIX_BLOCK),
                   stream, params);
    };
    if (params.groups == 0) return GT_OK;
    if (dtype == GT_BF16) return launch(bf16());
    if (dtype == GT_F16) return launch(f16());
    return launch(float());
}

} /* namespace wkv_ssm */
} /* namespace gt */

#endif
