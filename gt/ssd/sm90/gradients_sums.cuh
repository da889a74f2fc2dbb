/* gt/ssd/sm90/gradients_sums.cuh - ssd backward of a chunk on compute capability 9.0 (gradients.cuh): which rows a
 * warp has, how tiles become operands of wgmma, and dC and dB, which two warpgroups sum over the heads, each one:
 *     a step     make_left()     dy pre or x Delta suf as f16, 64 x 64 in registers, from the stage
 *                add_left()      sum += left h or left G, the right operand in the stage
 *                store_E()       E_t = <pre_t dy_t, h C_t>, by the warpgroup that has C h^T (PAIRS_MAKE_E), to the sums in
 *                                memory, of which chunk_times_kernel makes da
 *     the end    add_W()         sum += W B or W^T C, of what the pairs' warpgroup has left
 *                store_share()   rows to memory */
#ifndef GT_SSD_SM90_GRADIENTS_SUMS_CUH
#define GT_SSD_SM90_GRADIENTS_SUMS_CUH

#include "gradients_block.cuh"

namespace gt {
namespace ssd {

/* ---- rows of a warp, operands ----------------------------------------------------------------------------------- */

/* Of a warp in its warpgroup: rows 16 warp ... of every product; of a lane, rows row and row + 8, of every 8 columns
 * 2 j, 2 j + 1. */
struct WarpRows {
    int warp, g, j, row;
    uint32_t address0;
    GT_METHOD explicit WarpRows(int warp_of_block) {
        const int lane = lane_id();
        warp = warp_of_block % 4;
        g = lane / 4;
        j = lane % 4;
        row = 16 * warp + g;
        address0 = panel_at<128>(16 * warp + lane % 16, lane / 16);
    }
    /* the lane's address for ldmatrix_x4 or stmatrix_x4 of the warp's rows, pieces 0 and 1 of a panel; of 2 i, 2 i + 1
     * it is this ^ 32 i.  Made where it is needed: kept over the steps, all of them would take too many registers */
    GT_METHOD uint32_t addresses(uint32_t panel) const { return (uint32_t)made_here((int)panel) + address0; }
};

template <class C>
GT_DEV uint64_t rows_operand(uint32_t tile) { /* elements of a row along k */
    return wgmma_tile<128, Major::K>(tile, C::PANEL);
}

template <class C>
GT_DEV uint64_t columns_operand(uint32_t tile) { /* rows along k */
    return wgmma_tile<128, Major::MN>(tile, C::PANEL);
}

template <class C>
GT_DEV uint64_t along_row(uint64_t operand, int k) { /* k: in 16 */
    return wgmma_step(operand, k_bytes<128, Major::K>(16 * k, C::PANEL));
}

template <class C>
GT_DEV uint64_t down_rows(uint64_t operand, int k) {
    return wgmma_step(operand, k_bytes<128, Major::MN>(16 * k, C::PANEL));
}

/* c = left right^T over all N columns of two tiles of 64 rows. */
template <class C>
GT_DEV void multiply_rows(float (&c)[8][4], uint32_t left, uint32_t right) {
    const uint64_t a = rows_operand<C>(left), b = rows_operand<C>(right);
    GT_UNROLL
    for (int k = 0; k < C::N / 16; k++) wgmma<f16>(c, along_row<C>(a, k), along_row<C>(b, k), k > 0);
}

/* Dskip, where it is one number of a head; else 0.  Launches that leave their share of dx have none.  With powers it is in
 * the stage. */
template <class C>
GT_DEV float skip_of_head(const ChunkGradientParams& p, const HopperBlock<C>& me, int step) {
    if constexpr (C::M_HAS_POWER) return p.in.Dskip ? me.value(me.factor(step, C::Tokens::SKIP)) : 0.0f;
    return p.in.Dskip && !p.in.skip_per_channel ? p.in.Dskip[me.head(p, step)] : 0.0f;
}

/* Waits until all that prepare brings of a step is there, and hands over to the asynchronous proxy what cp_async has
 * written. */
template <class C>
GT_DEV void wait_for_rows(const HopperBlock<C>& me, int step) {
    mbarrier_wait(me.smem + C::FULL + 8 * me.stage_of(step), me.parity_of(step));
    if (!me.by_maps) fence_async_proxy(); /* it waits for the step before's sums on their way to memory, too */
}

/* out[row], out[row + 8] <- sums over the quad. */
GT_DEV void store_row_sums(const WarpRows& at, float (&x)[2], float* out) {
    reduce_scatter<2, 4, 1>(x, at.j);
    if (at.j % 2 == 0) out[at.row + 4 * at.j] = x[0];
}
GT_DEV void store_row_sums(const WarpRows& at, float (&x)[2], uint32_t out) { /* in shared memory */
    reduce_scatter<2, 4, 1>(x, at.j);
    if (at.j % 2 == 0) sts<float>(out + 4 * (at.row + 4 * at.j), x[0]);
}

/* E_t = <pre dy_t, h C_t>. */
template <class C>
GT_DEV void store_E(const HopperBlock<C>& me, const WarpRows& at, int step, const float (&Ch)[8][4]) {
    using E = Element<typename C::D>;
    float sums[2] = {}, odd[2] = {};
    const uint32_t addresses = at.addresses(me.stage(step) + C::DY);
    const float4 inverses = lds<float4>(me.address(C::STATE_INVERSES + 8 * (me.stage_of(step))));
    const float c[2] = {me.value(me.inverses(C::C_INVERSE) + at.row), me.value(me.inverses(C::C_INVERSE) + at.row + 8)};
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        uint32_t dy[4];
        ldmatrix_x4(dy, addresses ^ 32 * k);
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float *y = Ch[2 * k + i / 2] + i % 2 * 2, f = part_of(inverses, k) * c[i % 2];
            sums[i % 2] = fma_rn(E::lo(dy[i]), y[0] * f, sums[i % 2]);
            odd[i % 2] = fma_rn(E::hi(dy[i]), y[1] * f, odd[i % 2]);
        }
    }
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int t = at.row + 8 * e;
        sums[e] = (sums[e] + odd[e]) * me.value(me.factor(step, C::Tokens::PRE) + t);
    }
    store_row_sums(at, sums, me.step_sums(step) + ChunkSums::E);
}

/* ---- dC and dB -------------------------------------------------------------------------------------------------- */

/* dC (0) or dB (1), rows times a power of two each. */
template <class C>
struct StateShare {
    float sum[C::N / 8][4], power[2];
    GT_METHOD StateShare() {
        GT_UNROLL
        for (int n = 0; n < C::N / 8; n++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) sum[n][e] = 0.0f;
        }
        power[0] = power[1] = 0x1p100f;
    }
};

/* The left operand of a product of the warpgroup's rows of a panel; the pairs that a lane has of a product, too. */
GT_DEV void load_left(uint32_t tile, const WarpRows& at, uint32_t (&a)[4][4]) {
    const uint32_t addresses = at.addresses(tile);
    GT_UNROLL
    for (int k = 0; k < 4; k++) ldmatrix_x4(a[k], addresses ^ 32 * k);
}

/* The pairs of a panel's rows as fp32. */
template <class T>
GT_DEV void widen(const uint32_t (&a)[4][4], float (&x)[4][8]) {
    using E = Element<T>;
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        GT_UNROLL
        for (int i = 0; i < 4; i++) x[k][2 * i] = E::lo(a[k][i]), x[k][2 * i + 1] = E::hi(a[k][i]);
    }
}

/* The largest magnitude of rows t and t + 8 among the lane's pairs. */
template <class T>
GT_DEV void magnitudes_of(const uint32_t (&a)[4][4], float (&most)[2]) {
    using E = Element<T>;
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        uint32_t pairs = 0;
        GT_UNROLL
        for (int k = 0; k < 4; k++) pairs = larger_magnitudes<T>(larger_magnitudes<T>(pairs, a[k][e]), a[k][2 + e]);
        most[e] = fmaxf(E::lo(pairs), E::hi(pairs));
    }
}

/* A step's left operand: dy times pre (0), or x times Delta suf (1), times what undoes the state's powers and the row's
 * power.  Where these are of two types, the rest is one code all the same. */
template <class C>
GT_DEV void make_left(const HopperBlock<C>& me, const WarpRows& at, int step, int which, StateShare<C>& share,
                      uint32_t (&a)[4][4]) {
    load_left(me.stage(step) + (which ? C::X : C::DY), at, a);
    const float4 inverses = lds<float4>(me.address(C::STATE_INVERSES + 8 * (me.stage_of(step)) + 4 * which));
    const float largest = largest_of(inverses);
    float x[4][8], most[2], decay[2], bound[2];
    if (std::is_same<typename C::T, typename C::D>::value || which) {
        magnitudes_of<typename C::T>(a, most);
        widen<typename C::T>(a, x);
    } else { /* gate_kernel's powers: no more than that */
        widen<typename C::D>(a, x);
        most[0] = most[1] = 0x1p14f;
    }
    bool grows = false;
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const int t = at.row + 8 * e;
        decay[e] = me.value(me.factor(step, which ? C::Tokens::WEIGHTS : C::Tokens::PRE) + t);
        most[e] = fmaxf(most[e], shfl_xor(most[e], 1));
        most[e] = fmaxf(most[e], shfl_xor(most[e], 2));
        const float magnitude = most[e] * fabsf(decay[e]) * largest; /* Delta may be below 0 */
        /* power times largest is finite, of zeros too; and times decay, which growth makes more than 1 */
        bound[e] = fmaxf(magnitude, fmaxf(fabsf(decay[e]), 1.0f) * largest * 0x1p-85f);
        grows |= !(bound[e] * share.power[e] <= 0x1p15f);
    }
    if (warp_any(grows)) { /* with room for eight times as much */
        wgmma_pin(share.sum);
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            if (bound[e] * share.power[e] <= 0x1p15f) continue;
            const float next = power_of(8.0f * bound[e]).value, ratio = next * inverse_of(share.power[e]);
            share.power[e] = next;
            GT_UNROLL
            for (int n = 0; n < C::N / 8; n++) share.sum[n][2 * e] *= ratio, share.sum[n][2 * e + 1] *= ratio;
        }
        wgmma_pin(share.sum);
    }
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float f = decay[i % 2] * (share.power[i % 2] * part_of(inverses, k));
            a[k][i] = pack_f16(x[k][2 * i] * f, x[k][2 * i + 1] * f);
        }
    }
}

/* Starts dC += left h or dB += left G. */
template <class C>
GT_DEV void add_left(const HopperBlock<C>& me, int step, int which, StateShare<C>& share, const uint32_t (&a)[4][4]) {
    const uint64_t state = columns_operand<C>(me.stage(step) + (which ? C::G : C::H));
    GT_UNROLL
    for (int k = 0; k < 4; k++) wgmma<f16, Major::MN>(share.sum, a[k], down_rows<C>(state, k));
}

/* The powers of the sums are now those that they keep to the end of the place: W is made with them. */
template <class C>
GT_DEV void hand_powers_on(const HopperBlock<C>& me, const WarpRows& at, int which, const StateShare<C>& share) {
    if (at.j == 0) {
        sts<float>(me.address(C::POWER + CHUNK * which + at.row), share.power[0]);
        sts<float>(me.address(C::POWER + CHUNK * which + at.row + 8), share.power[1]);
    }
    mbarrier_arrive(me.smem + C::SHARES_MADE);
}

/* Adds W B to dC, or W^T C to dB. */
template <class C>
GT_DEV void add_W(const HopperBlock<C>& me, const WarpRows& at, int which, StateShare<C>& share, float (&inverse)[2]) {
    if (which)
        mbarrier_wait(me.smem + C::W_FULL, me.number % 2);
    else
        mbarrier_wait(me.M_full(me.steps), me.buffer_parity(me.steps));
    const float most = power_of(largest_of(lds<float4>(me.address(C::W_MOST)))).value;
    wgmma_pin(share.sum);
    GT_UNROLL
    for (int e = 0; e < 2; e++) {
        const float own = share.power[e];
        const float power = !which ? me.value(C::POWER + at.row + 8 * e) : own < most ? own : most;
        const float ratio = power * inverse_of(own);
        inverse[e] = inverse_of(power);
        GT_UNROLL
        for (int n = 0; n < C::N / 8; n++) share.sum[n][2 * e] *= ratio, share.sum[n][2 * e + 1] *= ratio;
    }
    wgmma_pin(share.sum);
    wgmma_fence();
    const uint32_t W = me.M(me.steps);
    const uint64_t right = columns_operand<C>(me.tile_of(which ? C::C : C::B));
    if (which) {
        const uint64_t left = columns_operand<C>(W + C::PANEL);
        GT_UNROLL
        for (int k = 0; k < 4; k++)
            wgmma<f16, Major::MN, Major::MN>(share.sum, down_rows<C>(left, k), down_rows<C>(right, k));
    } else {
        const uint64_t left = rows_operand<C>(W);
        GT_UNROLL
        for (int k = 0; k < 4; k++)
            wgmma<f16, Major::K, Major::MN>(share.sum, along_row<C>(left, k), down_rows<C>(right, k));
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(share.sum);
    if (C::GROUPS > 1) mbarrier_arrive(me.groups(C::GROUPS_EMPTY));
}

/* The warp's rows of 64 columns, through a panel in rows of 16 bytes.  to: row 0; rows, columns: that there are. */
template <class T>
GT_DEV void store_panel(const WarpRows& at, uint32_t panel, const float (*x)[4], uint16_t* to, int64_t pitch, int rows,
                        int columns) {
    const uint32_t addresses = at.addresses(panel);
    const int lane = here(); /* addresses kept over the steps would not fit into registers */
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        uint32_t words[4];
        GT_UNROLL
        for (int n = 0; n < 4; n++) {
            const float* pair = x[2 * i + n / 2] + n % 2 * 2;
            words[n] = Element<T>::pack(pair[0], pair[1]);
        }
        stmatrix_x4(addresses ^ 32 * i, words);
    }
    sync_warp();
    const int row0 = 16 * at.warp + lane / 8, piece = lane % 8;
    const uint32_t first = panel + panel_at<128>(row0, piece);
    uint4 values[4];
    GT_UNROLL
    for (int i = 0; i < 4; i++) values[i] = lds<uint4>((first ^ (uint32_t)(i % 2 * 64)) + 512 * i);
    to += row0 * pitch + 8 * piece;
    const int left = 8 * piece < columns ? rows - row0 : 0;
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        if (4 * i < left) stg<uint4>(to, values[i]);
        to += 4 * pitch;
    }
    sync_warp(); /* before the next */
}

/* The rows of dC, through OUT, or of dB, through the panel of W that no warp reads any more, which then has the zeros
 * that M wants there. */
template <class C>
GT_DEV void store_share(const ChunkGradientParams& p, const HopperBlock<C>& me, const WarpRows& at, int which,
                        StateShare<C>& share, const float (&inverse)[2]) {
    const uint32_t W = me.M(me.steps);
    bar_sync(which ? MADE_BARRIER : INPUTS_BARRIER, C::GROUP); /* W and B or C are read */
    if (!which) mbarrier_arrive(me.M_empty(me.steps));
    if (void* const out = which ? p.dBm : p.dCm) {
        const gt_stride& stride = which ? p.dBm_stride : p.dCm_stride;
        uint16_t* const to = static_cast<uint16_t*>(out) + gt::offset_of(stride, me.b, me.first, me.g);
        GT_UNROLL
        for (int n = 0; n < C::N / 8; n++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) share.sum[n][e] *= inverse[e / 2];
        }
        GT_UNROLL
        for (int i = 0; i < C::PANELS; i++)
            store_panel<typename C::T>(at, which ? W + C::PANEL : me.smem + C::OUT, share.sum + 8 * i, to + 64 * i,
                                       stride.t, me.tokens, p.in.columns - 64 * i);
    }
    if (!which) return;
    if constexpr (C::M_TERMS > 1) {
        GT_UNROLL
        for (int i = 0; i < 4; i++) sts<uint4>(W + C::PANEL + 2048 * at.warp + 512 * i + 16 * lane_id(), {0, 0, 0, 0});
        fence_async_proxy();
    }
    mbarrier_arrive(me.smem + C::W_EMPTY);
}

} /* namespace ssd */
} /* namespace gt */

#endif
