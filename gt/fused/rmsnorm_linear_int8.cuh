/* gt/fused/rmsnorm_linear_int8.cuh - the step of rmsnorm_linear: y of at most 64 rows, from an int8 weight.
 * gt_fused.cuh and rmsnorm_linear.cuh define the letters.
 *     y[m][o] = weight_scale[o] sum_d q[o][d] n[m][d] + bias[o]          q = weight_int8
 *
 * step_tensor_kernel multiplies on tensor cores: mma m16n8k16, with 16 outputs as rows and 8 rows of x as columns.  So
 * 1 row costs as many products as 8 rows.  The kernel reads every q once.  q is exact in bf16 and in f16.  n is rounded
 * to the type of x, as in forward; n of fp32 is in three parts (rmsnorm_linear_parts.cuh).
 *
 * A unit is 16 outputs.  A block has up to 8 units and goes on to further groups of units if O is large.  A warp has
 * one unit and one of `parts` parts of D: part i takes the steps i, i + parts, ...  A step is 64 columns: lane 4g + j
 * takes the columns 16j ... 16j + 15 of the outputs g and g + 8, 16 bytes each.  The order of columns within a product
 * is free, so these bytes are the lane's operands of four products.  n lies in shared memory in the same order.
 *
 *   grid      one block per multiprocessor, or fewer
 *   block     16 warps for up to 16 rows, otherwise 8 warps
 *   weights   each thread has its own ring of 32-byte stages, filled by cp.async.  No thread reads another's stages, so
 *             the ring needs no barrier.  Its loads start before the norm and run through all later phases.
 *   in flight 16 warps x 8 stages x 1 KB = 128 KB a multiprocessor; an H200 delivers about 36 KB in a microsecond
 *   shared    ring 128 KB; partial sums 10 KB (8 rows), 20 KB (16, 32), 40 KB (64); the rest holds a slab of n: as many
 *             steps as fit
 *   issue     a warp's step is 1024 weights.  For 8 rows of bf16 the loop has 113 instructions: 56 of them convert q, 7
 *             load, 4 multiply, and the rest fill the ring.  D = 4096, O = 14336 has 434 steps per multiprocessor.
 *             They take 12,300 issue slots of each of 4 schedulers.  Loading the weights takes 14 microseconds; in that
 *             time a scheduler has 25,000 slots
 *   bytes     q once; x once or twice per block, from the L2: 132 blocks x 128 KB x 2 = 34 MB for 16 rows of bf16 with
 *             D = 4096
 *   sums      a lane's columns in order, then the parts in order, so sums are deterministic.  The last bits of a row
 *             depend on M, because M sets the number of parts and the number of warps that sum a row for its norm
 *
 * step_any_kernel takes any size, dtype and alignment on fp32 units. */
#ifndef GT_FUSED_RMSNORM_LINEAR_INT8_CUH
#define GT_FUSED_RMSNORM_LINEAR_INT8_CUH

#include "rmsnorm_linear_rows.cuh"

namespace gt {
namespace rmsnorm_linear {

struct StepParams {
    Input in; /* in.moments is NULL */
    const int8_t* weight;
    const float *scale, *bias; /* bias may be NULL */
    void* y;
    int64_t y_stride;
    int64_t O;
    /* step_tensor_kernel alone */
    int units, parts, groups; /* units of a group, parts of D, number of groups */
    int steps, slab_steps;    /* steps of D, and of a slab */
    int stages;               /* stages of the ring: 8 or 4 */
    int row_warps;            /* warps that compute the moments of a row together, a power of two */
};

constexpr int STEP_UNITS = 8;                       /* most units of a group */
constexpr int STEP_OUTPUTS = 16, STEP_COLUMNS = 64; /* outputs of a unit, columns of a step */
constexpr int SUM_PITCH = STEP_OUTPUTS + 4; /* floats between rows of partial sums: a warp's stores use all banks */

/* Sizes of a block for 8 * TILES rows.  Shared memory holds, in this order:
 *     warps' sums [WARPS], moments [ROWS], partial sums [WARPS][ROWS][SUM_PITCH], ring, n [PARTS][ROWS][slab]
 * A row of n ends with 16 unused bytes, so that 8 lanes that load fragments of two rows use all banks. */
template <class T_, int TILES_>
struct StepTraits {
    using T = T_;
    static constexpr int TILES = TILES_, ROWS = 8 * TILES, WARPS = TILES <= 2 ? 16 : 8, THREADS = 32 * WARPS;
    static constexpr int MOMENTS = 4 * WARPS, SUMS = MOMENTS + 16 * ROWS, RING = SUMS + 4 * WARPS * ROWS * SUM_PITCH;
    static constexpr int STAGE = 32 * THREADS;

    GT_HD int pitch(int slab_steps) { return 2 * STEP_COLUMNS * slab_steps + 16; }
    GT_HD int bytes(int stages, int slab_steps) { return RING + stages * STAGE + PARTS<T> * ROWS * pitch(slab_steps); }
};

/* ---- moments --------------------------------------------------------------------------------- */

/* A row of x that `count` warps sum together.  This warp is number `index`.  slots: address of the warps' sums. */
template <class T>
struct WarpsRow {
    const T* x;
    int D, index, count, barrier;
    uint32_t slots;

    template <class Function>
    GT_METHOD float sum(Function f) {
        const int step = 256 * count;
        float sum = 0.0f;
        for (int first = 256 * index + 8 * lane_id(); first < D; first += PIECES * step) {
            Vec<T, 8> v[PIECES];
            GT_UNROLL
            for (int i = 0; i < PIECES; i++)
                if (first + i * step < D) v[i] = load_piece(x + first + i * step);
            GT_UNROLL
            for (int i = 0; i < PIECES; i++) {
                if (first + i * step >= D) break;
                GT_UNROLL
                for (int e = 0; e < 8; e++) sum += f(v[i].get(e));
            }
        }
        sum = warp_sum(sum);
        if (count == 1) return sum;
        if (lane_id() == 0) sts(slots + 4 * index, sum);
        bar_sync(barrier, 32 * count);
        float total = 0.0f;
        for (int i = 0; i < count; i++) total += lds<float>(slots + 4 * i);
        bar_sync(barrier, 32 * count);
        return total;
    }
};

template <class C>
GT_DEV void step_moments(const StepParams& p, uint32_t smem) {
    using T = typename C::T;
    const int count = p.row_warps, set = warp_id() / count;
    for (int m = set; m < (int)p.in.M; m += C::WARPS / count) {
        WarpsRow<T> row = {static_cast<const T*>(p.in.x) + m * p.in.stride,
                           (int)p.in.D,
                           warp_id() % count,
                           count,
                           1 + set,
                           smem + 4 * set * count};
        const Moments s = moments_of(row, p.in);
        if (warp_id() % count == 0 && lane_id() == 0) sts(smem + C::MOMENTS + 16 * m, s);
    }
}

/* ---- n --------------------------------------------------------------------------------------- */

/* Writes a slab of n, from column `first` on, to shared memory.  A thread takes 8 columns of 4 rows at a time, whose
 * loads are in flight together.  Rows from M on, and columns from D on, are 0.  Within 4 columns the order is 0, 2, 1,
 * 3, because int8_pairs returns the weights in this order. */
template <class C>
GT_DEV void step_normalise(const StepParams& p, uint32_t smem, int first) {
    using T = typename C::T;
    using Part = PartOf<T>;
    const Input& in = p.in;
    const int pieces = STEP_COLUMNS / 8 * p.slab_steps, pitch = C::pitch(p.slab_steps), D = (int)in.D;
    const uint32_t to = smem + C::RING + p.stages * C::STAGE;
    GT_NO_UNROLL
    for (int i = thread_id(); i < pieces * C::ROWS / 4; i += C::THREADS) {
        const int piece = i % pieces, m0 = i / pieces * 4, d = first + 8 * piece;
        const int rows = d < D ? (int)in.M - m0 : 0;
        Vec<T, 8> v[4] = {};
        float gamma[8], beta[8];
        GT_UNROLL
        for (int r = 0; r < 4; r++)
            if (r < rows) v[r] = load_piece(static_cast<const T*>(in.x) + (m0 + r) * in.stride + d);
        load_8(gamma, rows > 0 ? in.gamma : nullptr, d, 1.0f);
        load_8(beta, rows > 0 ? in.beta : nullptr, d, 0.0f);
        GT_UNROLL
        for (int r = 0; r < 4; r++) {
            float n[8] = {};
            if (r < rows) {
                const Moments s = lds<Moments>(smem + C::MOMENTS + 16 * (m0 + r));
                GT_UNROLL
                for (int e = 0; e < 8; e++) {
                    const int at = (e & 4) | (e & 1) << 1 | (e & 2) >> 1;
                    n[at] = fma_rn(xhat_of(s, v[r].get(e)), gamma[e], beta[e]);
                }
            }
            for_parts<T>(n, [&](int part, const Vec<Part, 8>& values) {
                sts(to + (part * C::ROWS + m0 + r) * pitch + 16 * piece, values);
            });
        }
    }
}

/* ---- weights --------------------------------------------------------------------------------- */

struct alignas(16) StepWords {
    uint32_t w[4];
};

/* A thread's ring of weights.  The next fetch() loads `step` of `group` into `stage`. */
template <class C>
struct WeightRing {
    const StepParams& p;
    uint32_t stages; /* address of this thread's bytes of stage 0 */
    int unit, part, group, step, stage;
    const int8_t *first, *second; /* the lane's columns of step 0, of the outputs g and g + 8; NULL: no such output */

    GT_METHOD WeightRing(const StepParams& params, uint32_t at, int its_unit, int its_part)
        : p(params), stages(at), unit(its_unit), part(its_part), group(block_x()), step(its_part), stage(0) {
        find_outputs();
    }
    GT_METHOD void find_outputs() {
        const int64_t o = ((int64_t)group * p.units + unit) * STEP_OUTPUTS + lane_id() / 4;
        first = o < p.O ? p.weight + o * p.in.D + 16 * (lane_id() % 4) : nullptr;
        second = o + 8 < p.O ? first + 8 * p.in.D : nullptr;
    }
    GT_METHOD void fetch() {
        if (group < p.groups) {
            const uint32_t to = stages + stage * C::STAGE;
            const int column = STEP_COLUMNS * step;
            const bool exists = column + 16 * (lane_id() % 4) < (int)p.in.D;
            fetch_piece(to, first, column, exists);
            fetch_piece(to + 16 * C::THREADS, second, column, exists);
            step += p.parts;
            if (step >= p.steps) {
                step = part, group += grid_x();
                find_outputs();
            }
        }
        cp_async_commit();
        stage = stage + 1 == p.stages ? 0 : stage + 1;
    }
    GT_METHOD void fetch_piece(uint32_t to, const int8_t* of_output, int column, bool exists) {
        const bool is_there = exists && of_output;
        cp_async_stream(to, is_there ? of_output + column : p.weight, is_there ? 16 : 0);
    }

    /* Waits for the oldest stage and reads it.  The next fetch() fills this stage again. */
    GT_METHOD void wait(StepWords (&q)[2]) {
        if (p.stages == 8)
            cp_async_wait<7>();
        else
            cp_async_wait<3>();
        GT_UNROLL
        for (int half = 0; half < 2; half++)
            q[half] = lds<StepWords>(stages + stage * C::STAGE + half * 16 * C::THREADS);
    }
};

/* Adds the products of one step to `sums`: 16 outputs, 64 columns, all rows.  n: address of the lane's columns of row
 * g. */
template <class C>
GT_DEV void step_products(float (&sums)[C::TILES][4], const StepWords (&q)[2], uint32_t n, int pitch) {
    using Part = PartOf<typename C::T>;
    GT_UNROLL
    for (int half = 0; half < 2; half++) { /* two words of q, 16 bytes of n */
        uint32_t a[2][4];
        GT_UNROLL
        for (int i = 0; i < 2; i++) {
            int8_pairs<Part>(q[0].w[2 * half + i], a[i][0], a[i][2]);
            int8_pairs<Part>(q[1].w[2 * half + i], a[i][1], a[i][3]);
        }
        GT_UNROLL
        for (int tile = 0; tile < C::TILES; tile++) {
            GT_UNROLL
            for (int part = 0; part < PARTS<typename C::T>; part++) {
                const auto b = lds<StepWords>(n + (part * C::ROWS + 8 * tile) * pitch + 16 * half);
                mma<Part>(sums[tile], a[0], b.w[0], b.w[1]);
                mma<Part>(sums[tile], a[1], b.w[2], b.w[3]);
            }
        }
    }
}

/* Stores y of a group from the partial sums in shared memory. */
template <class C>
GT_DEV void step_store(const StepParams& p, uint32_t smem, int group) {
    using T = typename C::T;
    const int outputs = STEP_OUTPUTS * p.units;
    GT_NO_UNROLL
    for (int i = thread_id(); i < outputs * (int)p.in.M; i += C::THREADS) {
        const int m = i / outputs, at = i % outputs;
        const int64_t o = (int64_t)group * outputs + at;
        if (o >= p.O) continue;
        float sum = 0.0f;
        for (int part = 0; part < p.parts; part++) {
            const int warp = part * p.units + at / STEP_OUTPUTS;
            sum += lds<float>(smem + C::SUMS + 4 * ((warp * C::ROWS + m) * SUM_PITCH + at % STEP_OUTPUTS));
        }
        const float y = fma_rn(sum, p.scale[o], p.bias ? p.bias[o] : 0.0f);
        Element<T>::store(static_cast<T*>(p.y), m * p.y_stride + o, y);
    }
}

template <class C>
GT_KERNEL(C::THREADS, 1)
step_tensor_kernel(const GT_GRID_CONSTANT StepParams p) {
#if GT_SM80_KERNELS
    const uint32_t smem = smem_base();
    const int unit = warp_id() % p.units, part = warp_id() / p.units, pitch = C::pitch(p.slab_steps);
    const bool works = part < p.parts;
    WeightRing<C> ring(p, smem + C::RING + 16 * thread_id(), unit, part);
    for (int i = 0; i < p.stages && works; i++) ring.fetch();
    step_moments<C>(p, smem);
    const uint32_t n = smem + C::RING + p.stages * C::STAGE + lane_id() / 4 * pitch + lane_id() % 4 * 32;
    const bool is_whole = p.slab_steps >= p.steps; /* n of all columns stays in shared memory */
    for (int group = block_x(); group < p.groups; group += grid_x()) {
        float sums[C::TILES][4] = {};
        int step = part;
        for (int first = 0; first < p.steps; first += p.slab_steps) {
            if (group == block_x() || !is_whole) {
                sync_threads(); /* all moments are stored, and no warp still reads the previous slab */
                step_normalise<C>(p, smem, STEP_COLUMNS * first);
                sync_threads();
            }
            const int end = first + p.slab_steps < p.steps ? first + p.slab_steps : p.steps;
            GT_NO_UNROLL
            for (; works && step < end; step += p.parts) {
                StepWords q[2];
                ring.wait(q);
                step_products<C>(sums, q, n + 2 * STEP_COLUMNS * (step - first), pitch);
                ring.fetch();
            }
        }
        if (works) {
            const int g = lane_id() / 4, j = lane_id() % 4;
            GT_UNROLL
            for (int i = 0; i < 4 * C::TILES; i++) {
                const int m = i / 4 * 8 + 2 * j + i % 2, o = g + i % 4 / 2 * 8;
                sts(smem + C::SUMS + 4 * ((warp_id() * C::ROWS + m) * SUM_PITCH + o), sums[i / 4][i % 4]);
            }
        }
        sync_threads();
        step_store<C>(p, smem, group);
        if (group + grid_x() < p.groups) sync_threads();
    }
#endif
}

/* ---- any size -------------------------------------------------------------------------------- */

/* grid: up to ceil(O/8).  Block: 256; a warp computes one output, then further ones.  Each block computes the moments
 * of all rows.
 * bytes: q once for each 8 rows; all reads but the first hit the L1 cache.  registers: 8 sums.  shared memory: 16 bytes
 * a row.
 * A lane sums its columns in order, then a butterfly adds the lanes, so sums are deterministic. */
GT_KERNEL(32 * ROW_WARPS, 1) step_any_kernel(const GT_GRID_CONSTANT StepParams p) {
    const Input& in = p.in;
    const uint32_t smem = smem_base();
    for (int m = warp_id(); m < (int)in.M; m += ROW_WARPS) {
        AnyRow row = {in, m};
        const Moments s = moments_of(row, in);
        if (lane_id() == 0) sts(smem + 16 * m, s);
    }
    sync_threads();
    for (int64_t o = (int64_t)block_x() * ROW_WARPS + warp_id(); o < p.O; o += (int64_t)grid_x() * ROW_WARPS) {
        const int8_t* weight = p.weight + o * in.D;
        for (int m0 = 0; m0 < (int)in.M; m0 += AT_ONCE) {
            float sums[AT_ONCE] = {};
            for (int64_t d = lane_id(); d < in.D; d += 32) {
                const float q = (float)weight[d], gamma = in.gamma ? in.gamma[d] : 1.0f,
                            beta = in.beta ? in.beta[d] : 0.0f;
                float x[AT_ONCE];
                load_column(x, in.x, in.dtype, m0 * in.stride + d, in.stride, in.M - m0);
                GT_UNROLL
                for (int r = 0; r < AT_ONCE; r++) {
                    if (m0 + r >= in.M) continue;
                    const Moments s = lds<Moments>(smem + 16 * (m0 + r));
                    sums[r] = fma_rn(q, fma_rn(xhat_of(s, x[r]), gamma, beta), sums[r]);
                }
            }
            GT_UNROLL
            for (int r = 0; r < AT_ONCE; r++) {
                const float sum = warp_sum(sums[r]);
                if (lane_id() != 0 || m0 + r >= in.M) continue;
                const float y = fma_rn(sum, p.scale[o], p.bias ? p.bias[o] : 0.0f);
                store_as(p.y, in.dtype, (m0 + r) * p.y_stride + o, y);
            }
        }
    }
}

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
