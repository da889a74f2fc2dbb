/* gt/ssd/plan_backward_sm90.cuh - what the kernel for chunks of ssd's backward on compute capability 9.0 is given.  No
 * launches: conv_ssd, which has a form of that kernel of its own, includes this and not launch.cuh. */
#ifndef GT_SSD_PLAN_BACKWARD_SM90_CUH
#define GT_SSD_PLAN_BACKWARD_SM90_CUH

#include "backward_sm90.cuh"
#include "plan_sm90.cuh"

namespace gt {
namespace ssd {

/* What conv_ssd needs of a plan of backward, which begins with it. */
struct HopperChunks {
    TokenParams tokens;
    bool is_taken;   /* by the kernels for 9.0 */
    bool reads_rows; /* x is read by other kernels, too: they make h or dz */
};

/* Blocks of the kernels by token. */
static inline int64_t token_blocks(const TokenParams& tokens, const Device& device) {
    const int64_t places = tokens.rows * ((tokens.chunk.in.H + TOKEN_WARPS - 1) / TOKEN_WARPS);
    const int64_t room = (int64_t)TOKEN_BLOCKS * device.multiprocessors;
    return places < room ? places : room;
}

/* What the chunks' kernel is given for a slab of columns, and its blocks: none where there are no tensors. */
static inline gt_status plan_hopper_chunks(const ChunkGradientParams& all, const TokenParams& tokens, int slab,
                                           const Device& device, HopperGradientParams* p, int64_t* blocks) {
    const int64_t pairs = all.in.sequences.B * all.slots * all.in.G, places = 2 * pairs, room = device.multiprocessors;
    const bool in_twos = all.in.dy_inverses && all.in.dy == all.dx;
    const int64_t most = in_twos ? pairs : places;
    *blocks = most < room ? most : room;
    if (*blocks == 0) return GT_OK;
    if (places > INT32_MAX - 2 * room) return gt_fail(GT_ERROR_SIZE, "ssd: %lld chunks", (long long)places);
    static_cast<ChunkGradientParams&>(*p) = all;
    p->has_h = p->h.values != nullptr, p->has_G = p->G.values != nullptr;
    p->clears = slabs(p->in.N) > 1;
    p->in_twos = in_twos;
    p->heads = (int)(p->in.H / p->in.G), p->steps = p->heads * p->in.tiles;
    const int64_t steps = slab * tokens.rows * p->in.H * p->in.tiles;
    p->tokens = tokens.tokens;
    p->sums = tokens.sums + steps * chunk_sums(p->in);
    p->inverses = tokens.inverses + steps * 8;
    gt_status status = map_states(&p->h_map, p->h, p->in, p->slots, TILE_P);
    if (status == GT_OK) status = map_states(&p->G_map, p->G, p->in, p->slots, TILE_P);
    if (status != GT_OK) return status;
    p->has_rows =
        map_rows(&p->x_map, p->in.x, p->in.x_stride, p->in) && map_rows(&p->dy_map, p->in.dy, p->in.dy_stride, p->in);
    if (!p->has_rows) p->x_map = p->dy_map = p->h_map; /* not read */
    return GT_OK;
}

} /* namespace ssd */
} /* namespace gt */

#endif
