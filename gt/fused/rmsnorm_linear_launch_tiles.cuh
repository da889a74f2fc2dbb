/* gt/fused/rmsnorm_linear_launch_tiles.cuh - rmsnorm_linear: launches of the kernels for rows of whole 16-byte
 * pieces. */
#ifndef GT_FUSED_RMSNORM_LINEAR_LAUNCH_TILES_CUH
#define GT_FUSED_RMSNORM_LINEAR_LAUNCH_TILES_CUH

#include "rmsnorm_linear_cublaslt.cuh"
#include "rmsnorm_linear_launch_any.cuh"
#include "rmsnorm_linear_launch_sm90.cuh"
#include "rmsnorm_linear_rows.cuh"

namespace gt {
namespace rmsnorm_linear {

/* ---- rmsnorm_linear: which calls, and their workspace ----------------------------------------- */

constexpr int64_t MOST_SLICES = 256, MOST_OF_TILES = 1 << 30; /* MOST_OF_TILES: bounds M, D, O, and tiles */

/* is_split: activations are fp32, so tensor cores need them in parts (rmsnorm_linear_parts.cuh).  uses_parts: kernels
 * for compute capability 9.0 multiply the parts.  Neither answer depends on M, so a row has the same bits in every
 * batch. */
static inline bool is_split(const gt_rmsnorm_linear_args& a) { return a.dtype == GT_F32; }
static inline bool uses_parts(const gt_rmsnorm_linear_args& a, const Device& device) {
    return is_split(a) && a.D >= 32 && a.O >= 32 && has_hopper_kernels(GT_F32, device);
}

/* Returns whether kernels for rows of whole, aligned 16-byte pieces can serve the call.  NULL counts as aligned. */
static inline bool has_pieces(const gt_rmsnorm_linear_args& a, const Device& device) {
    const int64_t size = size_of(a.dtype);
    if (is_split(a) ? !uses_parts(a, device) : device.compute_capability < 80 || !uses_tensor_cores(a, device))
        return false;
    if (a.x_stride > MOST_STRIDE || a.dy_stride > MOST_STRIDE) return false;
    if (a.D % 8 || a.O % 8 || a.M > MOST_OF_TILES || a.D > MOST_OF_TILES || a.O > MOST_OF_TILES) return false;
    const int64_t m = ceil_div(a.M, 128), d = ceil_div(a.D, 128), o = ceil_div(a.O, 128);
    return m * (d > o ? d : o) <= MOST_OF_TILES && o * d <= MOST_OF_TILES / MOST_SLICES &&
           is_aligned(a.x, a.x_stride, size, 16) && is_aligned(a.weight, 0, 4, 16) && is_aligned(a.gamma, 0, 4, 16) &&
           is_aligned(a.beta, 0, 4, 16);
}

static inline bool forward_uses_tiles(const gt_rmsnorm_linear_args& a, const Device& device) {
    return has_pieces(a, device) && is_aligned(a.y, a.y_stride, size_of(a.dtype), 16);
}

static inline bool backward_uses_tiles(const gt_rmsnorm_linear_args& a, const Device& device) {
    const int64_t size = size_of(a.dtype);
    return has_pieces(a, device) && is_aligned(a.dy, a.dy_stride, size, 16) &&
           is_aligned(a.dx, a.dx_stride, size, 16) && is_aligned(a.dweight, 0, 4, 16);
}

/* Returns whether the caller's cuBLASLt handle computes products of 16-bit operands.  The launches make two exceptions.
 * With a bias, cuBLASLt would round y before it adds the bias.  dn in fp16 may need a power of two for each 64 columns,
 * which cuBLASLt cannot apply. */
static inline bool has_handle(const gt_rmsnorm_linear_args& a) { return HAS_CUBLASLT && a.cublaslt && !is_split(a); }

/* The kernels of a pass. */
enum class Form {
    ANY,   /* any size, dtype and alignment */
    TILES, /* products of tiles, and row kernels before and after them */
    /* WHOLE_ROWS: one forward kernel computes y from x, and one backward kernel dx from dy.  The other kernels are the
     * same as for TILES. */
    WHOLE_ROWS
};

struct Choice {
    Form forward, backward;
};

static inline Choice choose(const gt_rmsnorm_linear_args& a, const Device& device) {
    const bool is_whole = !is_split(a) && !has_handle(a) && has_hopper_kernels(a.dtype, device);
    Choice c = {Form::ANY, Form::ANY};
    if (forward_uses_tiles(a, device)) c.forward = is_whole && fits_whole_rows(a) ? Form::WHOLE_ROWS : Form::TILES;
    if (backward_uses_tiles(a, device))
        c.backward = is_whole && fits_whole_dx(a, device) ? Form::WHOLE_ROWS : Form::TILES;
    return c;
}

/* Number of parts of an operand. */
static inline int64_t parts_of(const gt_rmsnorm_linear_args& a) { return is_split(a) ? PARTS<float> : 1; }

struct ForwardPlan {
    Form form;
    Moments* moments;
    void* n;         /* TILES: [M,D] in 16 bits, or its three parts */
    bf16* weight;    /* parts of the weight, or NULL */
    void* workspace; /* workspace of the handle's product */
    size_t bytes;
};

static inline ForwardPlan plan_forward(const gt_rmsnorm_linear_args& a, const Choice& choice) {
    ForwardPlan plan = {};
    plan.form = choice.forward;
    Arena arena(a.workspace);
    if (!a.saved) plan.moments = arena.take<Moments>(a.M);
    if (plan.form == Form::TILES) {
        plan.n = arena.take<uint16_t>(parts_of(a) * a.M * a.D);
        if (is_split(a)) plan.weight = arena.take<bf16>(3 * a.O * a.D);
        if (has_handle(a)) plan.workspace = arena.take<char>(HANDLE_BYTES);
    }
    plan.bytes = arena.bytes();
    return plan;
}

/* Returns TileTraits' ACROSS for a product [M,N]: 4 for wide tiles, if these give every multiprocessor work; otherwise
 * 2. */
static inline int warps_across(int64_t M, int64_t N, const Device& device) {
    return N > 128 && ceil_div(M, 128) * ceil_div(N, 256) >= device.multiprocessors ? 4 : 2;
}

/* warps_across() for dweight, where slices of M give every multiprocessor work. */
static inline int warps_across_dweight(const gt_rmsnorm_linear_args& a) { return a.D > 128 ? 4 : 2; }

/* Number of blocks that are resident at once, for an ACROSS of `across`. */
static inline int64_t resident_blocks(int across, const Device& device) {
    return (across == 4 ? 1 : 2) * device.multiprocessors;
}

/* Chooses the rows of x and dy in a slice of dweight.  Estimated clocks: a row of a tile takes 33, by wgmma 10 or 16,
 * in parts 48.  A tile takes 1500 to start and end.  The sums of a slice are written and read, 8 bytes a value at 2400
 * bytes a clock.  finish_kernel waits 1500 for every SLICES_AT_ONCE slices. */
static inline int64_t dweight_slice(const gt_rmsnorm_linear_args& a, const Device& device) {
    const bool is_hopper = device.compute_capability == 90;
    const int across = is_split(a) ? 2 : warps_across_dweight(a), unit = is_split(a) ? 128 : is_hopper ? 64 : TILE_K;
    const int64_t tiles = ceil_div(a.O, 128) * ceil_div(a.D, 64 * across);
    const int64_t resident = is_hopper ? device.multiprocessors : resident_blocks(across, device);
    const double row = is_split(a) ? 48 : is_hopper ? (double)hopper_step(64 * across) / 64 : 33;
    int64_t best = ceil_div(a.M, unit) * unit;
    double least = INFINITY;
    for (int64_t slices = 1; slices <= MOST_SLICES && slices <= ceil_div(a.M, 128); slices++) {
        const int64_t slice = ceil_div(ceil_div(a.M, slices), unit) * unit, count = ceil_div(a.M, slice);
        const double time = (double)ceil_div(tiles * count, resident) * (row * (double)slice + 1500) +
                            (double)count * (double)a.O * (double)a.D * 8 / 2400 +
                            (double)ceil_div(count, SLICES_AT_ONCE) * 1500;
        if (time < least) least = time, best = slice;
    }
    return best;
}

/* Workspace of a backward pass, and how its sums over the rows are cut. */
struct BackwardTiles {
    Form form;
    Moments* moments;
    void* rows;                          /* [M,D]: first dn, later xhat in 16 bits */
    void* xhat;                          /* xhat, or its parts */
    bf16 *dy, *weight;                   /* parts of dy and of the weight, or NULL */
    float* scales;                       /* scales of dn in fp16 */
    float *g, *dbias;                    /* g: [slices,O,D]; dbias: [O] */
    float *dbias_parts, *dgamma, *dbeta; /* partial sums; the slowest index is the block */
    int64_t slice, slices;               /* rows in a slice of G; number of slices */
    int64_t rows_of_block, blocks;       /* dbias: rows of a block; number of blocks */
    int64_t finisher_rows, finishers;    /* finish_kernel: rows of a warp; number of blocks along O */
    void* workspace;                     /* workspace of the handle's products */
    bool wants_g, wants_dbias;
    size_t bytes;
};

static inline BackwardTiles plan_backward_tiles(const gt_rmsnorm_linear_args& a, const Choice& choice,
                                                const Device& device) {
    BackwardTiles plan = {};
    plan.form = choice.backward;
    Arena arena(a.workspace);
    plan.wants_g = a.dweight || a.dgamma;
    plan.wants_dbias = a.dbias || a.dbeta || (a.dweight && a.beta);
    plan.slice = has_handle(a) ? ceil_div(a.M, 64) * 64 : dweight_slice(a, device);
    plan.slices = a.M ? ceil_div(a.M, plan.slice) : 0;
    plan.rows_of_block = part_of(a.M, 4 * device.multiprocessors, ROW_WARPS * AT_ONCE);
    plan.blocks = a.M ? ceil_div(a.M, plan.rows_of_block) : 0;
    plan.finisher_rows = ceil_div(a.O, 128 * ROW_WARPS); /* at most 128 blocks, because reduce_rows reads each block's
                                                          * sums */
    plan.finishers = ceil_div(a.O, plan.finisher_rows * ROW_WARPS);
    if (!a.saved) plan.moments = arena.take<Moments>(a.M);
    if (is_split(a)) {
        if (a.dx) plan.rows = arena.take<float>(a.M * a.D);
        if (a.dx) plan.weight = arena.take<bf16>(3 * a.O * a.D);
        if (plan.wants_g) plan.xhat = arena.take<bf16>(3 * a.M * a.D);
        if (a.dx || plan.wants_g) plan.dy = arena.take<bf16>(3 * a.M * a.O);
    } else if (a.dx || plan.wants_g) {
        plan.rows = plan.xhat = arena.take<uint16_t>(a.M * a.D);
    }
    if (a.dx && a.dtype == GT_F16) plan.scales = arena.take<float>(a.M * ceil_div(a.D, 64));
    if (plan.wants_g) plan.g = arena.take<float>(plan.slices * a.O * a.D);
    if (plan.wants_dbias) {
        plan.dbias = arena.take<float>(a.O);
        plan.dbias_parts = arena.take<float>(plan.blocks * a.O);
    }
    if (a.dgamma) plan.dgamma = arena.take<float>(plan.finishers * a.D);
    if (a.dbeta) plan.dbeta = arena.take<float>(plan.finishers * a.D);
    if (has_handle(a)) plan.workspace = arena.take<char>(HANDLE_BYTES);
    plan.bytes = arena.bytes();
    return plan;
}

/* ---- rmsnorm_linear: launches of the products -------------------------------------------------- */

template <class C>
static gt_status launch_product_tiles(TilesParams p, int64_t slices, const Device& device, Chain& chain) {
    p.tiles_m = (int)ceil_div(p.M, C::BM);
    p.tiles_n = (int)ceil_div(p.N, C::BN);
    p.tiles = (int)(p.tiles_m * slices) * p.tiles_n;
    p.group = 8;
    const int64_t resident = resident_blocks(C::BN / 64, device);
    return run("rmsnorm_linear tiles_kernel", tiles_kernel<C>, p.tiles < resident ? p.tiles : resident, C::THREADS,
               C::SMEM, chain, p);
}

template <class T, Product P>
static gt_status launch_tiles_of(const TilesParams& p, int across, int64_t slices, const Device& device, Chain& chain) {
    if constexpr (is_built_for<T>()) {
        const gt_dtype dtype = PARTS<T> == 3 ? GT_F32 : std::is_same<T, bf16>::value ? GT_BF16 : GT_F16;
        if (PARTS<T> == 3 || has_hopper_kernels(dtype, device))
            return launch_hopper_tiles<T, P>(p, slices, device, chain);
        if constexpr (PARTS<T> == 1) {
            if (across == 4) return launch_product_tiles<TileTraits<T, P, 4>>(p, slices, device, chain);
            return launch_product_tiles<TileTraits<T, P, 2>>(p, slices, device, chain);
        }
    }
    return GT_OK; /* not reached, since uses_tensor_cores is false */
}

/* Launches the product in the call's dtype.  `workspace` is for the caller's handle, or NULL if the handle is not
 * used. */
template <Product P>
static gt_status launch_tiles(const gt_rmsnorm_linear_args& a, const TilesParams& p, int across, int64_t slices,
                              void* workspace, const Device& device, Chain& chain) {
    bool is_done = false;
    if (workspace && slices == 1) {
        const HandleProduct h = {
            a.cublaslt, workspace, a.dtype, P == DWEIGHT ? GT_F32 : a.dtype, P, p.a, p.b, p.out, p.out_stride,
            p.M,        p.N,       p.K};
        const gt_status status = multiply(h, chain.stream, &is_done);
        if (status != GT_OK || is_done) return status;
    }
    if (is_split(a)) return launch_tiles_of<float, P>(p, across, slices, device, chain);
    if (a.dtype == GT_BF16) return launch_tiles_of<bf16, P>(p, across, slices, device, chain);
    return launch_tiles_of<f16, P>(p, across, slices, device, chain);
}

/* Return the caller's operand, or its parts if it has parts. */
static inline Matrix weight_of(const gt_rmsnorm_linear_args& a, const bf16* parts) {
    return {parts ? parts : a.weight, a.D, (int)a.O, (int)a.D};
}
static inline Matrix dy_of(const gt_rmsnorm_linear_args& a, const bf16* parts) {
    return {parts ? parts : a.dy, parts ? a.O : a.dy_stride, (int)a.M, (int)a.O};
}

/* Launches y = n weight^T + bias. */
static inline gt_status launch_output_tiles(const gt_rmsnorm_linear_args& a, const ForwardPlan& plan,
                                            const Device& device, Chain& chain) {
    TilesParams p = {};
    p.a = {plan.n, a.D, (int)a.M, (int)a.D};
    p.b = weight_of(a, plan.weight);
    p.out = a.y, p.out_stride = a.y_stride;
    p.bias = a.bias;
    p.M = (int)a.M, p.N = (int)a.O, p.K = (int)a.D;
    p.slice = p.K;
    return launch_tiles<OUTPUT>(a, p, warps_across(a.M, a.O, device), 1, a.bias ? nullptr : plan.workspace, device,
                                chain);
}

/* Returns the product dn = dy weight. */
static inline TilesParams dnorm_tiles(const gt_rmsnorm_linear_args& a, const BackwardTiles& plan) {
    TilesParams p = {};
    p.a = dy_of(a, plan.dy);
    p.b = weight_of(a, plan.weight);
    p.out = plan.rows, p.out_stride = a.D;
    p.scales = plan.scales;
    p.M = (int)a.M, p.N = (int)a.D, p.K = (int)a.O;
    p.slice = p.K;
    return p;
}

static inline gt_status launch_dnorm_tiles(const gt_rmsnorm_linear_args& a, const BackwardTiles& plan,
                                           const Device& device, Chain& chain) {
    const TilesParams p = dnorm_tiles(a, plan);
    return launch_tiles<DNORM>(a, p, warps_across(a.M, a.D, device), 1, plan.scales ? nullptr : plan.workspace, device,
                               chain);
}

/* Launches G = dy^T xhat. */
static inline gt_status launch_g_tiles(const gt_rmsnorm_linear_args& a, const BackwardTiles& plan, const Device& device,
                                       Chain& chain) {
    TilesParams p = {};
    p.a = dy_of(a, plan.dy);
    p.b = {plan.xhat, a.D, (int)a.M, (int)a.D};
    p.out = plan.g, p.out_stride = a.D;
    p.M = (int)a.O, p.N = (int)a.D, p.K = (int)a.M;
    p.slice = (int)plan.slice;
    return launch_tiles<DWEIGHT>(a, p, warps_across_dweight(a), plan.slices, plan.workspace, device, chain);
}

/* ---- rmsnorm_linear: launches around them ------------------------------------------------------ */

/* Runs `kernel` compiled for the call's type. */
#define GT_RUN_OF(T, kernel, blocks, smem, p)                                                                          \
    run("rmsnorm_linear " #kernel, kernel<T>, blocks, 32 * ROW_WARPS, smem, chain, p)
#define GT_RUN_TYPE(kernel, blocks, smem, p)                                                                           \
    (a.dtype == GT_F32    ? GT_RUN_OF(float, kernel, blocks, smem, p)                                                  \
     : a.dtype == GT_BF16 ? GT_RUN_OF(bf16, kernel, blocks, smem, p)                                                   \
                          : GT_RUN_OF(f16, kernel, blocks, smem, p))

/* Splits a matrix into its parts.  Does nothing if `parts` is NULL. */
static inline gt_status launch_split(const void* x, int64_t stride, int64_t rows, int64_t columns, bf16* parts,
                                     Chain& chain) {
    if (!parts) return GT_OK;
    const SplitParams p = {static_cast<const float*>(x), stride, rows, (int)columns, parts};
    return run("rmsnorm_linear hopper_split_kernel", hopper_split_kernel, ceil_div(rows, ROW_WARPS), 32 * ROW_WARPS, 0,
               chain, p);
}

static inline gt_status launch_forward_tiles(const gt_rmsnorm_linear_args& a, const Input& in, const ForwardPlan& plan,
                                             const Device& device, gt_stream stream) {
    Chain chain = {stream};
    if (plan.form == Form::WHOLE_ROWS) return launch_whole_rows(a, in, device, chain);
    const NormaliseParams p = {in, 0, plan.n};
    gt_status status = launch_split(a.weight, a.D, a.O, a.D, plan.weight, chain);
    if (status == GT_OK) status = GT_RUN_TYPE(normalise_kernel, ceil_div(a.M, ROW_WARPS), 0, p);
    return status != GT_OK ? status : launch_output_tiles(a, plan, device, chain);
}

/* Computes dn, then dx and xhat from dn.  If dx is not wanted, computes only xhat. */
static inline gt_status launch_rows(const gt_rmsnorm_linear_args& a, Input in, const BackwardTiles& plan, bool is_saved,
                                    const Device& device, Chain& chain) {
    if (!a.dx) {
        in.gamma = in.beta = nullptr;
        const NormaliseParams p = {in, is_saved, plan.xhat};
        return GT_RUN_TYPE(normalise_kernel, ceil_div(a.M, ROW_WARPS), 0, p);
    }
    gt_status status = GT_OK;
    if (!is_saved)
        status = run("rmsnorm_linear moments_kernel", moments_kernel, ceil_div(a.M, ROW_WARPS), 32 * ROW_WARPS, 0,
                     chain, in);
    const GradientParams p = {in, plan.rows, plan.xhat, plan.scales, a.dx, a.dx_stride, plan.wants_g};
    if (status == GT_OK && plan.form == Form::WHOLE_ROWS)
        return launch_hopper_dx(dnorm_tiles(a, plan), p, device, chain);
    if (status == GT_OK) status = launch_dnorm_tiles(a, plan, device, chain);
    if (status != GT_OK) return status;
    return GT_RUN_TYPE(gradient_kernel, ceil_div(a.M, ROW_WARPS), 0, p);
}

/* Sums dy over its rows.  The sums go to the workspace, and if dbias is wanted also to the gradient. */
static inline gt_status launch_dbias_tiles(const gt_rmsnorm_linear_args& a, const Input& in, const BackwardTiles& plan,
                                           Chain& chain) {
    ColumnParams p = {};
    p.v = a.dy;
    p.dtype = a.dtype;
    p.stride = a.dy_stride, p.columns = a.O;
    p.in = in;
    p.sums = plan.dbias_parts;
    p.tiles = ceil_div(p.columns, 32);
    p.rows = plan.rows_of_block;
    gt_status status = run("rmsnorm_linear column_kernel", column_kernel, p.tiles * plan.blocks, 32 * ROW_WARPS,
                           2 * 4 * 32 * ROW_WARPS, chain, p);
    if (status == GT_OK) status = reduce_rows(plan.dbias_parts, plan.dbias, plan.blocks, a.O, 0, chain);
    if (status != GT_OK || !a.dbias) return status;
    return reduce_rows(plan.dbias_parts, a.dbias, plan.blocks, a.O, a.accumulate, chain);
}

static inline gt_status launch_finish(const gt_rmsnorm_linear_args& a, const BackwardTiles& plan, Chain& chain) {
    FinishParams p = {};
    p.parts = plan.g, p.slices = plan.wants_g ? plan.slices : 0;
    p.weight = a.weight;
    p.gamma = a.gamma, p.beta = a.beta;
    p.dbias = plan.dbias;
    p.dweight = a.dweight;
    p.dgamma = plan.dgamma, p.dbeta = plan.dbeta;
    p.O = (int)a.O, p.D = (int)a.D, p.accumulate = a.accumulate;
    p.rows = (int)plan.finisher_rows;
    gt_status status = GT_RUN_TYPE(finish_kernel, ceil_div(a.D, 128) * plan.finishers, 2 * 16 * 32 * ROW_WARPS, p);
    if (status == GT_OK && a.dgamma)
        status = reduce_rows(plan.dgamma, a.dgamma, plan.finishers, a.D, a.accumulate, chain);
    if (status == GT_OK && a.dbeta) status = reduce_rows(plan.dbeta, a.dbeta, plan.finishers, a.D, a.accumulate, chain);
    return status;
}

static inline gt_status launch_backward_tiles(const gt_rmsnorm_linear_args& a, const BackwardTiles& plan,
                                              Moments* saved, const Device& device, gt_stream stream) {
    Chain chain = {stream};
    const Input in = input_of(a, saved ? saved : plan.moments);
    gt_status status = GT_OK;
    if (plan.wants_dbias) status = launch_dbias_tiles(a, in, plan, chain);
    if (status == GT_OK) status = launch_split(a.dy, a.dy_stride, a.M, a.O, plan.dy, chain);
    if (status == GT_OK) status = launch_split(a.weight, a.D, a.O, a.D, plan.weight, chain);
    if (status == GT_OK && (plan.rows || plan.xhat)) status = launch_rows(a, in, plan, saved, device, chain);
    if (status == GT_OK && plan.wants_g) status = launch_g_tiles(a, plan, device, chain);
    if (status == GT_OK && (plan.wants_g || a.dbeta)) status = launch_finish(a, plan, chain);
    return status;
}

#undef GT_RUN_TYPE
#undef GT_RUN_OF

} /* namespace rmsnorm_linear */
} /* namespace gt */

#endif
