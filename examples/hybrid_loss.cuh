/* The kernels at the end of a step: cross_entropy, the norm of the gradient, AdamW.  A block has 8 warps
 * (hybrid_machine.cuh). */
#ifndef HYBRID_LOSS_CUH
#define HYBRID_LOSS_CUH

#include "hybrid_machine.cuh"

namespace hy {

/* ---- cross_entropy --------------------------------------------------------------------------- */

struct CrossEntropyParams {
    int64_t M, V;
    const int32_t* target;
    void* logits;
    float *lse, *loss, *entropy, *total;
    const float* scale;
};

/* Returns the largest value of the warp; NaN if any value is NaN. */
GT_DEV float warp_max(float value) {
    GT_UNROLL
    for (int mask = 16; mask > 0; mask >>= 1) {
        const float other = shfl_xor(value, mask);
        if (!(value >= other)) value = value != value ? value : other;
    }
    return value;
}

/* The grid has ceil(M/8) blocks, with one warp per row; a warp reads its row twice. */
template <class T>
GT_KERNEL(THREADS, 1)
cross_entropy_forward_kernel(const GT_GRID_CONSTANT CrossEntropyParams p) {
    const int64_t row = row_of_warp();
    if (row >= p.M) return;
    const T* z = static_cast<const T*>(p.logits) + row * p.V;
    float largest = Element<T>::load(z, 0), sum = 0.0f, weighted = 0.0f;
    for (int64_t v = lane_id(); v < p.V; v += 32) {
        const float x = Element<T>::load(z, v);
        if (!(largest >= x)) largest = largest != largest ? largest : x;
    }
    largest = warp_max(largest);
    for (int64_t v = lane_id(); v < p.V; v += 32) {
        float x = Element<T>::load(z, v) - largest;
        x = x < -87.0f ? -87.0f : x; /* exp(-87) adds nothing to 1, and an infinite x would make x * e NaN */
        const float e = exp_accurate(x);
        sum += e;
        weighted += e * x;
    }
    sum = warp_sum(sum);
    weighted = warp_sum(weighted);
    if (lane_id() != 0) return;
    const int32_t target = p.target[row];
    const float lse = largest + logf(sum);
    p.lse[row] = lse;
    p.loss[row] = target < 0 ? 0.0f : lse - Element<T>::load(z, target);
    p.entropy[row] = target < 0 ? 0.0f : logf(sum) - weighted / sum;
}

/* One block adds up the results of all rows. */
GT_KERNEL(THREADS, 1) cross_entropy_total_kernel(const GT_GRID_CONSTANT CrossEntropyParams p) {
    double loss = 0.0, counted = 0.0, entropy = 0.0;
    GT_UNROLL
    for (int64_t row = thread_id(); row < p.M; row += THREADS) {
        loss += p.loss[row];
        counted += p.target[row] >= 0;
        entropy += p.entropy[row];
    }
    loss = block_sum(loss);
    counted = block_sum(counted);
    entropy = block_sum(entropy);
    if (thread_id() != 0) return;
    p.total[0] = (float)loss;
    p.total[1] = (float)counted;
    p.total[2] = (float)entropy;
}

/* The grid has ceil(M/8) blocks, with one warp per row. */
template <class T>
GT_KERNEL(THREADS, 1)
cross_entropy_backward_kernel(const GT_GRID_CONSTANT CrossEntropyParams p) {
    const int64_t row = row_of_warp();
    if (row >= p.M) return;
    T* z = static_cast<T*>(p.logits) + row * p.V;
    const int32_t target = p.target[row];
    const float counted = p.total[1], lse = p.lse[row];
    const float scale = (p.scale ? p.scale[0] : 1.0f) / (counted > 1.0f ? counted : 1.0f);
    for (int64_t v = lane_id(); v < p.V; v += 32) {
        const float softmax = exp_accurate(Element<T>::load(z, v) - lse);
        const float gradient = target < 0 ? 0.0f : (softmax - (v == target)) * scale;
        Element<T>::store(z, v, gradient);
    }
}

static CrossEntropyParams cross_entropy_params(const hy_cross_entropy_args* a) {
    return {a->M, a->V, a->target, a->logits, a->lse, a->loss, a->entropy, a->total, a->scale};
}

static gt_status cross_entropy_forward(hy_backend* be, const hy_cross_entropy_args* a) {
    const Machine& m = machine(be);
    const CrossEntropyParams p = cross_entropy_params(a);
    const gt_status status = with_layout(a->dtype, false, [&](auto l) {
        return enqueue(m, "cross_entropy", cross_entropy_forward_kernel<typename decltype(l)::T>, ceil_div(a->M, WARPS),
                       1, 0, p);
    });
    if (status != GT_OK) return status;
    return enqueue(m, "cross_entropy", cross_entropy_total_kernel, 1, 1, 8 * THREADS, p);
}

static gt_status cross_entropy_backward(hy_backend* be, const hy_cross_entropy_args* a) {
    return with_layout(a->dtype, false, [&](auto l) {
        return enqueue(machine(be), "cross_entropy", cross_entropy_backward_kernel<typename decltype(l)::T>,
                       ceil_div(a->M, WARPS), 1, 0, cross_entropy_params(a));
    });
}

/* ---- gradient norm and AdamW ----------------------------------------------------------------- */

struct GradNormParams {
    hy_segments segments;
    const float *grad, *control;
    double *slices, *partial;
    float* norm;
    int64_t slices_each; /* number of slices into which each segment is cut */
};

/* Computes slices[s][k], the sum of squares of slice k of segment s.  The grid has count * slices_each blocks, where
 * count is the number of segments. */
GT_KERNEL(THREADS, 1) squares_kernel(const GT_GRID_CONSTANT GradNormParams p) {
    const int64_t s = block_x() / p.slices_each, k = block_x() % p.slices_each;
    const int64_t start = p.segments.start[s], end = p.segments.start[s + 1];
    const int64_t length = (end - start + p.slices_each - 1) / p.slices_each;
    const int64_t first = start + k * length, last = first + length < end ? first + length : end;
    double sum = 0.0;
    GT_UNROLL
    for (int64_t i = first + thread_id(); i < last; i += THREADS) sum += (double)p.grad[i] * (double)p.grad[i];
    sum = block_sum(sum);
    if (thread_id() == 0) p.slices[block_x()] = sum;
}

/* One block adds up the slices of each segment, then the segments of each parameter group, both in order. */
GT_KERNEL(THREADS, 1) grad_norm_kernel(const GT_GRID_CONSTANT GradNormParams p) {
    for (int64_t s = thread_id(); s < p.segments.count; s += THREADS) {
        double sum = 0.0;
        for (int64_t k = 0; k < p.slices_each; k++) sum += p.slices[s * p.slices_each + k];
        p.partial[s] = sum;
    }
    sync_threads();
    const double scale = p.control[HY_LOSS_SCALE];
    const int group = thread_id();
    if (group < HY_GROUPS) {
        double sum = 0.0;
        for (int64_t s = 0; s < p.segments.count; s++)
            if (p.segments.group[s] == group) sum += p.partial[s];
        p.norm[group] = (float)(sqrt(sum) / scale);
        sts<double>(smem_base() + 8 * group, sum);
    }
    sync_threads();
    if (thread_id() != 0) return;
    double all = 0.0;
    for (int g = 0; g < HY_GROUPS; g++) all += lds<double>(smem_base() + 8 * g);
    p.norm[HY_GROUPS] = (float)(sqrt(all) / scale);
}

static gt_status grad_norm(hy_backend* be, const hy_grad_norm_args* a) {
    const Machine& m = machine(be);
    int64_t slices;
    gt_status status = count_parts(m, "grad_norm", 16, 2 * a->segments.count, &slices);
    if (status != GT_OK) return status;
    double* pieces = reinterpret_cast<double*>(m.sums);
    const GradNormParams p = {a->segments, a->grad, a->control, pieces, a->partial, a->norm, slices};
    status = enqueue(m, "grad_norm", squares_kernel, a->segments.count * slices, 1, 8 * THREADS, p);
    if (status != GT_OK) return status;
    return enqueue(m, "grad_norm", grad_norm_kernel, 1, 1, 8 * HY_GROUPS, p);
}

struct AdamwParams {
    hy_segments segments;
    const float *control, *norm, *grad;
    float *w, *m, *v;
    void* copy;
};

constexpr int ADAMW_BLOCKS = 1024;

/* The grid has a fixed number of blocks, because only device memory holds the number of elements.  Each block takes
 * an equal share of the elements.  The kernel reads 16 bytes per parameter, and writes 12 bytes and the 16-bit copy. */
template <class T>
GT_KERNEL(THREADS, 1)
adamw_kernel(const GT_GRID_CONSTANT AdamwParams p) {
    const float norm = p.norm[HY_GROUPS], max_norm = p.control[HY_MAX_NORM];
    if (!(norm <= 3.402823466e38f)) return;
    float scale = 1.0f / p.control[HY_LOSS_SCALE];
    if (max_norm > 0.0f && norm > max_norm) scale *= max_norm / norm;
    const float lr = p.control[HY_LR], c1 = p.control[HY_CORRECTION1];
    const float c2 = p.control[HY_CORRECTION2], eps = p.control[HY_EPS];
    const float beta1 = p.control[HY_BETA1], beta2 = p.control[HY_BETA2];
    const float shrink = lr * p.control[HY_WEIGHT_DECAY];
    const int64_t* start = p.segments.start;
    const int64_t n = start[p.segments.count];
    const int64_t share = (n + grid_x() * THREADS - 1) / (grid_x() * THREADS) * THREADS;
    const int64_t first = block_x() * share + thread_id();
    const int64_t last = block_x() * share + share < n ? block_x() * share + share : n;
    int64_t s = 0, beyond = p.segments.count; /* invariant: start[s] <= first < start[beyond] */
    while (first < last && beyond - s > 1) {
        const int64_t middle = (s + beyond) / 2;
        if (start[middle] <= first)
            s = middle;
        else
            beyond = middle;
    }
    for (int64_t i = first; i < last; i += THREADS) {
        while (i >= start[s + 1]) s++;
        const float g = p.grad[i] * scale;
        const float m = beta1 * p.m[i] + (1.0f - beta1) * g;
        const float v = beta2 * p.v[i] + (1.0f - beta2) * g * g;
        float w = p.w[i];
        w -= lr * (m * c1 / (sqrtf(v * c2) + eps)) + shrink * p.segments.decay[s] * w;
        p.m[i] = m;
        p.v[i] = v;
        p.w[i] = w;
        if (p.copy) Element<T>::store(static_cast<T*>(p.copy), i, w);
    }
}

static gt_status adamw(hy_backend* be, const hy_adamw_args* a) {
    const AdamwParams p = {a->segments, a->control, a->norm, a->grad, a->w, a->m, a->v, a->copy};
    return with_layout(a->copy ? a->copy_dtype : GT_F32, false, [&](auto l) {
        return enqueue(machine(be), "adamw", adamw_kernel<typename decltype(l)::T>, ADAMW_BLOCKS, 1, 0, p);
    });
}

} /* namespace hy */

#endif
