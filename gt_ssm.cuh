/* gt_ssm.cuh - Mamba-2 state space duality (ssd) and the Mamba-1 selective scan.
 *
 * THE OPERATORS (one batch element; a head with state h [P,N], or a channel with P = 1 and x = u)
 *     v = dt + dt_bias        Delta = softplus(v) if asked, clamped if asked        a_t = Delta_t A
 *     h_t = exp(a_t) h_{t-1} + Delta_t x_t Bm_t^T
 *     y_t = (h_t Cm_t + Dskip . x_t) . silu(z_t)                     read after the update
 * In ssd A is one number per head, so a_t is too; in the scan it is one per channel and state.
 *
 * SSD IN LEAVES OF 16 TOKENS.  With h the state before the leaf, G the gradient of the state after it,
 * dy without the gate, and sums of a within the leaf
 *     pre_t = exp(sum_{m<=t} a_m)    suf_s = exp(sum_{m>s} a_m)    L_ts = exp(sum_{s<m<=t} a_m), s <= t
 *     S_ts = <C_t, B_s> L_ts         R_ts = <dy_t, x_s> L_ts       E = exp(sum a)
 * everything is a few small products:
 *     y_t  = pre_t h C_t + sum_{s<=t} S_ts Delta_s x_s
 *     U_s  = suf_s G B_s + sum_{t>=s} S_ts dy_t              dx_s = Delta_s U_s + Dskip . dy_s
 *     dC_t = pre_t dy_t^T h + sum_{s<=t} Delta_s R_ts B_s        (summed over the heads of a group)
 *     dB_s = Delta_s (suf_s x_s^T G + sum_{t>=s} R_ts C_t)       (likewise)
 *     h <- E h + sum_s Delta_s suf_s x_s B_s^T               G <- E G + sum_t pre_t dy_t C_t^T
 * With the shares that cross the borders of the leaf and those within it
 *     e_t = <C_t, pre_t dy_t^T h>    f_s = <B_s, suf_s x_s^T G>    c_ts = <C_t, B_s> L_ts <dy_t, x_s>
 *     dDelta_s = f_s + sum_{t>=s} c_ts + A da_s              dA = sum Delta da
 *     da_k = E <G, h> + sum_{t>=k} e_t + sum_{s<k} Delta_s f_s + sum_{t>=k>s} Delta_s c_ts
 *
 * THE SCAN goes token by token, one state element after another in registers; backward, with
 * g = G + dy_t C_t:
 *     dC_t = sum_d dy_t h_t      dB_t = sum_d Delta u g      du = Delta <g, B> + Dskip dy
 *     da = g exp(a) h_{t-1}      dDelta = u <g, B> + <A, da>      G <- exp(a) g
 *
 * NUMERICAL HAZARDS, and what is done about them
 *   - exp(c_t - c_s) of running sums c overflows above the diagonal and loses small decays behind
 *     large ones.  Every exponent is a sum of the a it spans, formed by additions alone, and the upper
 *     triangle is never computed from them.
 *   - da as row sums minus column sums is noise under strong decay.  The form above only adds.
 *   - exp(a) near 1: fp32 cannot hold 1 - exp(a), which a long accumulation shows.  States are scaled
 *     as h + expm1(a) h unless the decay is strong (scale_of_log below).
 *   - log(1 + exp(v)) is 0 for v < -17 while its slope is not: softplus goes by log1p.
 *   - Delta, its slope and the limits come from one function, so both passes agree on every limit.
 *   - A > 0: exp may overflow while the state is 0; decays are kept finite.
 *
 * This file: what describes the operators (plain C, shared with the stubs and the CPU twins), the
 * kernels, the launchers, the C functions. */
#ifndef GT_SSM_CUH
#define GT_SSM_CUH

#include "gt/base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the operators' tables ------------------------------------------------------------------- */

/* Groups share Bm and Cm evenly between the heads (or channels) that `field` counts. */
static gt_status gt_ssm_resolve_groups(int64_t *G, const char *field, int64_t heads,
                                       gt_dims *dims) {
    gt_status status;
    if (*G == 0) *G = 1;
    dims->n['G' - 'A'] = *G;
    if ((status = gt_check_range(GT_ERROR_SIZE, "G", *G, 1, GT_MAX_SIZE))) return status;
    if (heads % *G)
        return gt_fail(GT_ERROR_SIZE, "G = %lld: must divide %s = %lld", (long long)*G, field,
                       (long long)heads);
    return GT_OK;
}

/* dz without the gate that it is the gradient of; no elements, no gate needed */
static gt_status gt_ssm_check_gate(const void *z, const void *dz, gt_pass pass,
                                   const gt_dims *dims) {
    if (pass != GT_BACKWARD || !dz || z || !dims->n['B' - 'A'] || !dims->n['T' - 'A']) return GT_OK;
    return gt_fail(GT_ERROR_NULL, "z is NULL: dz needs it");
}

static gt_status gt_ssd_check_limits(const gt_ssd_args *a) {
    if (!a->dt_limit) return GT_OK;
    if (a->dt_min != a->dt_min || a->dt_max != a->dt_max)
        return gt_fail(GT_ERROR_VALUE, "%s is NaN", a->dt_min != a->dt_min ? "dt_min" : "dt_max");
    if (a->dt_min > a->dt_max)
        return gt_fail(GT_ERROR_VALUE, "dt_min = %g: must not be above dt_max = %g",
                       (double)a->dt_min, (double)a->dt_max);
    return GT_OK;
}

static gt_status gt_ssd_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_ssd_args *a = (gt_ssd_args *)filled;
    gt_recurrence f = {a->B, a->T, a->segments, a->seq_capacity, a->slot_capacity,
                       a->state_in_shared, a->state_in, a->state_out,
                       a->cu_seqlens, a->seq_count, a->slots};
    gt_status status;
    dims->n['K' - 'A'] = a->Dskip_per_channel ? a->P : 1; /* columns of Dskip */
    if ((status = gt_ssm_resolve_groups(&a->G, "H", a->H, dims)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "softplus", a->softplus, 0, 1)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "dt_limit", a->dt_limit, 0, 1)) ||
        (status =
             gt_check_range(GT_ERROR_VALUE, "Dskip_per_channel", a->Dskip_per_channel, 0, 1)) ||
        (status = gt_ssd_check_limits(a)) || (status = gt_resolve_recurrent(&f, pass, dims)) ||
        (status = gt_ssm_check_gate(a->z, a->dz, pass, dims)))
        return status;
    if (pass == GT_STEP) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

#define GT_AT(field) offsetof(gt_ssd_args, field)
GT_API const gt_op *gt_op_ssd(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0}, {'T', "T", GT_AT(T), 0},
                                    {'H', "H", GT_AT(H), 1}, {'P', "P", GT_AT(P), 1},
                                    {'N', "N", GT_AT(N), 1}, {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"x", GT_AT(x), GT_AT(x_stride), "BTHP", 'x', "III", NULL},
        {"dt", GT_AT(dt), GT_AT(dt_stride), "BTH", 'w', "III", NULL},
        {"A", GT_AT(A), 0, "H", 'f', "III", NULL},
        {"Bm", GT_AT(Bm), GT_AT(Bm_stride), "BTGN", 'x', "III", NULL},
        {"Cm", GT_AT(Cm), GT_AT(Cm_stride), "BTGN", 'x', "III", NULL},
        {"Dskip", GT_AT(Dskip), 0, "HK", 'f', "iii", NULL},
        {"z", GT_AT(z), GT_AT(z_stride), "BTHP", 'x', "iii", NULL},
        {"dt_bias", GT_AT(dt_bias), 0, "H", 'f', "iii", NULL},
        {"state_in", GT_AT(state_in), 0, "SHPN", 'f', "ii-", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "BTHP", 'x', "O-O", NULL},
        {"state_out", GT_AT(state_out), 0, "QHPN", 'f', "o-s", "state_in"},
        {"slots", GT_AT(slots), 0, "B", 'i', "--i", NULL},
        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTHP", 'x', "-I-", NULL},
        {"dstate_out", GT_AT(dstate_out), 0, "QHPN", 'f', "-i-", NULL},
        {"dx", GT_AT(dx), GT_AT(dx_stride), "BTHP", 'x', "-o-", NULL},
        {"ddt", GT_AT(ddt), GT_AT(ddt_stride), "BTH", 'w', "-o-", NULL},
        {"dBm", GT_AT(dBm), GT_AT(dBm_stride), "BTGN", 'x', "-o-", NULL},
        {"dCm", GT_AT(dCm), GT_AT(dCm_stride), "BTGN", 'x', "-o-", NULL},
        {"dz", GT_AT(dz), GT_AT(dz_stride), "BTHP", 'x', "-o-", NULL},
        {"dA", GT_AT(dA), 0, "H", 'f', "-g-", NULL},
        {"dDskip", GT_AT(dDskip), 0, "HK", 'f', "-g-", NULL},
        {"ddt_bias", GT_AT(ddt_bias), 0, "H", 'f', "-g-", NULL},
        {"dstate_in", GT_AT(dstate_in), 0, "SHPN", 'f', "-o-", "dstate_out"},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"ssd",      sizeof(gt_ssd_args), GT_AT(dtype), GT_AT(dt_dtype),
                             "dt_dtype", GT_AT(accumulate),   sizes,        tensors,
                             gt_ssd_resolve};
    return &op;
}
#undef GT_AT

static gt_status gt_selective_scan_resolve(void *filled, gt_pass pass, gt_dims *dims) {
    gt_selective_scan_args *a = (gt_selective_scan_args *)filled;
    gt_recurrence f = {a->B, a->T, a->segments, a->seq_capacity, a->slot_capacity,
                       a->state_in_shared, a->state_in, a->state_out,
                       a->cu_seqlens, a->seq_count, a->slots};
    gt_status status;
    if ((status = gt_ssm_resolve_groups(&a->G, "D", a->D, dims)) ||
        (status = gt_check_range(GT_ERROR_VALUE, "softplus", a->softplus, 0, 1)) ||
        (status = gt_resolve_recurrent(&f, pass, dims)) ||
        (status = gt_ssm_check_gate(a->z, a->dz, pass, dims)))
        return status;
    if (pass == GT_STEP) a->slot_capacity = dims->n['Q' - 'A'];
    return GT_OK;
}

#define GT_AT(field) offsetof(gt_selective_scan_args, field)
GT_API const gt_op *gt_op_selective_scan(void) {
    static const gt_size sizes[] = {{'B', "B", GT_AT(B), 0},
                                    {'T', "T", GT_AT(T), 0},
                                    {'D', "D", GT_AT(D), 1},
                                    {'N', "N", GT_AT(N), 1},
                                    {0, NULL, 0, 0}};
    static const gt_tensor tensors[] = {
        {"u", GT_AT(u), GT_AT(u_stride), "BTD", 'x', "III", NULL},
        {"dt", GT_AT(dt), GT_AT(dt_stride), "BTD", 'w', "III", NULL},
        {"A", GT_AT(A), 0, "DN", 'f', "III", NULL},
        {"Bm", GT_AT(Bm), GT_AT(Bm_stride), "BTGN", 'x', "III", NULL},
        {"Cm", GT_AT(Cm), GT_AT(Cm_stride), "BTGN", 'x', "III", NULL},
        {"Dskip", GT_AT(Dskip), 0, "D", 'f', "iii", NULL},
        {"z", GT_AT(z), GT_AT(z_stride), "BTD", 'x', "iii", NULL},
        {"dt_bias", GT_AT(dt_bias), 0, "D", 'f', "iii", NULL},
        {"state_in", GT_AT(state_in), 0, "SDN", 'f', "ii-", NULL},
        {"y", GT_AT(y), GT_AT(y_stride), "BTD", 'x', "O-O", NULL},
        {"state_out", GT_AT(state_out), 0, "QDN", 'f', "o-s", "state_in"},
        {"slots", GT_AT(slots), 0, "B", 'i', "--i", NULL},
        {"dy", GT_AT(dy), GT_AT(dy_stride), "BTD", 'x', "-I-", NULL},
        {"dstate_out", GT_AT(dstate_out), 0, "QDN", 'f', "-i-", NULL},
        {"du", GT_AT(du), GT_AT(du_stride), "BTD", 'x', "-o-", NULL},
        {"ddt", GT_AT(ddt), GT_AT(ddt_stride), "BTD", 'w', "-o-", NULL},
        {"dBm", GT_AT(dBm), GT_AT(dBm_stride), "BTGN", 'x', "-o-", NULL},
        {"dCm", GT_AT(dCm), GT_AT(dCm_stride), "BTGN", 'x', "-o-", NULL},
        {"dz", GT_AT(dz), GT_AT(dz_stride), "BTD", 'x', "-o-", NULL},
        {"dA", GT_AT(dA), 0, "DN", 'f', "-g-", NULL},
        {"dDskip", GT_AT(dDskip), 0, "D", 'f', "-g-", NULL},
        {"ddt_bias", GT_AT(ddt_bias), 0, "D", 'f', "-g-", NULL},
        {"dstate_in", GT_AT(dstate_in), 0, "SDN", 'f', "-o-", "dstate_out"},
        {NULL, 0, 0, NULL, 0, NULL, NULL}};
    static const gt_op op = {"selective_scan",        sizeof(gt_selective_scan_args),
                             GT_AT(dtype),            GT_AT(dt_dtype),
                             "dt_dtype",              GT_AT(accumulate),
                             sizes,                   tensors,
                             gt_selective_scan_resolve};
    return &op;
}
#undef GT_AT

#ifdef __cplusplus
} /* extern "C": kernels follow */
#endif

#if defined(__CUDACC__) || defined(GT_EMU)

#include "gt/base/reduce.cuh"

#include <float.h>

namespace gt {
namespace ssm {

/* ---- what both operators share ----------------------------------------------------------------- */

constexpr int CHECKPOINT = 128; /* tokens between the states that forward leaves for backward */
constexpr int MAX_SIZE = 256;   /* of P and N */

GT_HD int64_t checkpoints_of(int64_t T) { return (T + CHECKPOINT - 1) / CHECKPOINT; }

GT_DEV int64_t at(gt_stride s, int64_t b, int64_t t, int64_t h) {
    return b * s.b + t * s.t + h * s.h;
}

/* How dt becomes Delta; one for all passes. */
struct DeltaRule {
    int softplus, limited;
    float min, max;
};

struct Delta {
    float value, slope; /* slope: derivative by dt */
};

GT_DEV Delta delta_of(const DeltaRule& rule, float v) {
    Delta d = {v, 1.0f};
    if (rule.softplus) {
        d.value = softplus(v);
        d.slope = sigmoid(v);
    }
    if (rule.limited && (d.value < rule.min || d.value > rule.max)) {
        d.value = d.value < rule.min ? rule.min : rule.max;
        d.slope = 0.0f;
    }
    return d;
}

/* Derivative of silu. */
GT_DEV float dsilu(float z) { return silu_derivative(z, sigmoid(z)); }

/* What is made of a decay, kept finite: a state of zero stays zero under any growth. */
GT_DEV float finite(float value) {
    return value > FLT_MAX ? FLT_MAX : value < -FLT_MAX ? -FLT_MAX : value;
}

/* How a state that decays by exp(a) is scaled: h <- keep * h + factor * h.  Near 1 the small part of
 * the decay is factor = expm1(a), which keeps its relative accuracy; keep = 1.  Else keep = 0; such a
 * decay is not carried far, so that exp_fast is accurate enough. */
struct Scale {
    float keep, factor;
};

GT_DEV Scale scale_of_log(float a) {
    Scale s;
    const bool near_one = a > -0.69f && a < 0.05f;
    s.keep = near_one ? 1.0f : 0.0f;
    s.factor = near_one ? expm1_neg(a) : finite(exp_fast(a));
    return s;
}

GT_DEV float rescale(float keep, float factor, float state, float added) {
    return fma_rn(keep, state, fma_rn(factor, state, added));
}

/* Sums V values over LANES lanes, STRIDE apart, of which the caller is number `lane`.  Afterwards it
 * holds V / LANES of the sums, number lane * (V / LANES) first, in v[0..]; with more lanes than values
 * LANES / V neighbours hold the same one.  The order of the additions is fixed. */
template <int V, int LANES, int STRIDE>
GT_DEV void reduce_scatter(float (&v)[V], int lane) {
    int width = V;
    GT_UNROLL
    for (int mask = LANES / 2; mask >= 1; mask >>= 1) {
        if (width == 1) {
            v[0] += shfl_xor(v[0], mask * STRIDE);
        } else {
            const bool upper = lane & mask;
            width /= 2;
            GT_UNROLL
            for (int i = 0; i < V / 2; i++) {
                if (i >= width) continue;
                const float mine = upper ? v[i + width] : v[i];
                const float other = upper ? v[i] : v[i + width];
                v[i] = mine + shfl_xor(other, mask * STRIDE);
            }
        }
    }
}

/* WIDTH neighbouring floats in shared memory. */
template <int WIDTH>
GT_DEV void load_vector(float (&v)[WIDTH], uint32_t cell) {
    if constexpr (WIDTH % 4 == 0) {
        GT_UNROLL
        for (int i = 0; i < WIDTH; i += 4) {
            const float4 x = lds<float4>(cell + 4 * i);
            v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w;
        }
    } else if constexpr (WIDTH == 2) {
        const float2 x = lds<float2>(cell);
        v[0] = x.x, v[1] = x.y;
    } else {
        v[0] = lds<float>(cell);
    }
}

/* A block of rows (tokens) and columns of an activation tensor. */
struct Rows {
    const void* data;
    gt_dtype dtype;
    int64_t start, pitch, step; /* in elements: of the first, from row to row, column to column */
    int rows, columns;          /* that exist; the rest counts as 0 */

    /* the same without its first `skipped` rows */
    GT_METHOD Rows after(int skipped) const {
        Rows rest = *this;
        rest.start += skipped * pitch;
        rest.rows -= skipped;
        return rest;
    }
};

/* Such a block of ROWS x WIDTH in the registers of THREADS threads: all loads are issued before the
 * first is waited for.  Thread i holds elements i, i + THREADS, ... in row order. */
template <int ROWS, int WIDTH, int THREADS>
struct Tile {
    static constexpr int SIZE = ROWS * WIDTH, COUNT = (SIZE + THREADS - 1) / THREADS;
    uint32_t bits[COUNT] = {}; /* as in memory, converted when used */
    gt_dtype dtype = GT_F32;

    GT_DEV int index(int k) { return thread_id() + k * THREADS; }
    GT_DEV int row(int k) { return index(k) / WIDTH; }
    GT_DEV int column(int k) { return index(k) % WIDTH; }

    template <class Bits>
    GT_METHOD void load_bits(const Rows& from) {
        const Bits* data = static_cast<const Bits*>(from.data) + from.start;
        if constexpr (THREADS % WIDTH == 0) { /* a thread stays in its column */
            if (column(0) >= from.columns) return;
            data += row(0) * from.pitch + column(0) * from.step;
            const int64_t stride = THREADS / WIDTH * from.pitch;
            GT_UNROLL
            for (int k = 0; k < COUNT; k++) {
                if (row(k) < from.rows) bits[k] = ldg<Bits>(data);
                data += stride;
            }
        } else {
            GT_UNROLL
            for (int k = 0; k < COUNT; k++)
                if (row(k) < from.rows && column(k) < from.columns)
                    bits[k] = ldg<Bits>(data + row(k) * from.pitch + column(k) * from.step);
        }
    }

    GT_METHOD void load(const Rows& from) {
        dtype = from.dtype;
        if (dtype == GT_F32)
            load_bits<uint32_t>(from);
        else
            load_bits<uint16_t>(from);
    }

    GT_METHOD float value(int k) const {
        if (dtype == GT_BF16) return unpack_bf16_lo(bits[k]);
        return dtype == GT_F16 ? unpack_f16_lo(bits[k]) : as_float(bits[k]);
    }

    GT_METHOD void store(uint32_t shared) const {
        GT_UNROLL
        for (int k = 0; k < COUNT; k++)
            if (index(k) < SIZE) sts<float>(shared + 4 * index(k), value(k));
    }
};

/* Copies ROWS x WIDTH to shared memory, at most 8 values a thread at a time. */
template <int ROWS, int WIDTH, int THREADS>
GT_DEV void stage(uint32_t shared, const Rows& from) {
    constexpr int BATCH = 8 * THREADS / WIDTH < ROWS ? 8 * THREADS / WIDTH : ROWS;
    static_assert(ROWS % BATCH == 0, "whole batches");
    GT_NO_UNROLL
    for (int row = 0; row < ROWS; row += BATCH) {
        Tile<BATCH, WIDTH, THREADS> tile;
        tile.load(from.after(row));
        tile.store(shared + 4 * row * WIDTH);
    }
}

/* ---- sums over a group ----------------------------------------------------------------------------
 * out[b,t,g,n] = sum over the parts of in[b,t,g,part,n], parts ascending: dBm and dCm from what each
 * head, or tile of channels, left.
 * grid ceil(B*T*G*N/256), block 256, an output a thread; reads 4 bytes a part, writes the output.
 * One thread adds all parts of an output in order: deterministic.  No shared memory. */
struct GroupSumParams {
    const float* in;
    void* out;
    gt_dtype dtype;
    gt_stride out_at;
    int64_t B, T, G, parts;
    int N;
};

GT_KERNEL(256, 1) group_sum_kernel(const GT_GRID_CONSTANT GroupSumParams p) {
    const int64_t i = (int64_t)block_x() * 256 + thread_id();
    if (i >= p.B * p.T * p.G * p.N) return;
    const int64_t n = i % p.N, row = i / p.N;
    const int64_t g = row % p.G, t = row / p.G % p.T, b = row / p.G / p.T;
    const float* in = p.in + row * p.parts * p.N + n;
    float sum = 0.0f;
    for (int64_t part = 0; part < p.parts; part++) sum += in[part * p.N];
    store_as(p.out, p.dtype, at(p.out_at, b, t, g) + n, sum);
}

static inline gt_status group_sum(const char* name, const GroupSumParams& p, gt_stream stream) {
    return run(name, group_sum_kernel, (p.B * p.T * p.G * p.N + 255) / 256, 256, 0, stream, p);
}

} /* namespace ssm */

/* ==== ssd =========================================================================================== */

namespace ssd {

using namespace ssm;

/* ---- sizes ------------------------------------------------------------------------------------------ */

constexpr int LEAF = 16;   /* tokens handled together */
constexpr int LEAVES = CHECKPOINT / LEAF;
constexpr int TILE_P = 64; /* rows of the state in a block */
constexpr int PITCH = LEAF + 1; /* of a matrix of token pairs in shared memory */

/* A block holds 64 rows p of a state and all its columns n in registers: lane = (p lane 0..7, n lane
 * 0..3) of a warp has rows 4 lane + 0..3 and 32 + 4 lane + 0..3, and RN columns from
 * (4 warp + n lane) RN on.  So 4 WARPS n lanes hold WIDTH columns: sums over p stay in a warp, sums
 * over n end in shared memory.  Offsets are in floats. */
template <int RN_, int WARPS_>
struct Traits {
    static constexpr int RN = RN_, WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int WIDTH = 4 * WARPS * RN;
    static constexpr int ROUND = 32 / WARPS; /* tokens whose sums over n are collected at a time */
    static constexpr int X = 0;                           /* [16][64] */
    static constexpr int B = X + LEAF * TILE_P;           /* [16][WIDTH] */
    static constexpr int C = B + LEAF * WIDTH;            /* [16][WIDTH] */
    static constexpr int PARTS = C + LEAF * WIDTH;        /* [WARPS][ROUND][64] */
    static constexpr int S = PARTS + WARPS * ROUND * TILE_P; /* [16][PITCH], S_ts */
    static constexpr int DELTA = S + LEAF * PITCH;        /* [16]; then a, pre, suf, Delta suf */
    static constexpr int LOG = DELTA + LEAF, PRE = LOG + LEAF, SUF = PRE + LEAF;
    static constexpr int WEIGHT = SUF + LEAF;
    static constexpr int SCALE = WEIGHT + LEAF;           /* keep, factor, E */
    static constexpr int PLACE = SCALE + 4;               /* see Place::remember */
    static constexpr int GATE = PLACE + 4;                /* [16][64], made of z */
    static constexpr int FORWARD_END = GATE + LEAF * TILE_P;
    static constexpr int DY = FORWARD_END;                /* [16][64] */
    static constexpr int R = DY + LEAF * TILE_P;          /* [16][PITCH], Delta_s R_ts */
    static constexpr int PAIR = R + LEAF * PITCH;         /* [16][PITCH], c_ts */
    static constexpr int BEFORE = PAIR + LEAF * PITCH;    /* [16][PITCH], sum_{s<k} Delta_s c_ts */
    static constexpr int E_PARTS = BEFORE + LEAF * PITCH; /* [WARPS][16], e_t; f_s; <G,h> */
    static constexpr int F_PARTS = E_PARTS + WARPS * LEAF, Z_PARTS = F_PARTS + WARPS * LEAF;
    static constexpr int BACKWARD_END = Z_PARTS + WARPS;
    static_assert(DY % 4 == 0, "its rows are read in 16-byte pieces");
    static_assert(4 * BACKWARD_END <= 64 * 1024, "fits every architecture");
};

/* One argument struct, prepared, as every kernel sees it. */
struct Problem {
    int64_t B, T, H, G;
    int P, N;
    gt_dtype dtype, dt_dtype;
    DeltaRule rule;
    int skip_per_channel;
    const void *x, *dt, *Bm, *Cm, *z, *dy;
    const float *A, *Dskip, *dt_bias;
    gt_stride x_at, dt_at, Bm_at, Cm_at, z_at, dy_at;
    int tiles; /* of 64 rows of P */
};

/* ---- device helpers ---------------------------------------------------------------------------------- */

/* Where a block and a thread stand. */
template <class C>
struct Place {
    uint32_t smem;
    int b, h, g, tile;
    int p0, rows;           /* first row of the block's tile, and how many exist */
    int p_lane, n_lane, n0; /* n_lane counts over the block; n0 is the first column */

    GT_METHOD explicit Place(const Problem& in) {
        smem = smem_base();
        tile = block_x() % in.tiles;
        const int head = block_x() / in.tiles, heads = (int)in.H; /* no more than blocks */
        b = head / heads;
        h = head % heads;
        g = h / (heads / (int)in.G);
        p0 = tile * TILE_P;
        rows = in.P - p0 < TILE_P ? in.P - p0 : TILE_P;
        p_lane = lane_id() % 8;
        n_lane = 4 * warp_id() + lane_id() / 8;
        n0 = n_lane * C::RN;
    }
    GT_METHOD uint32_t cell(int offset) const { return smem + 4 * offset; }
    GT_METHOD float value(int offset) const { return lds<float>(cell(offset)); }
    /* Between the two b, h and g lie in shared memory, and so nothing that is made of them (the first
     * address of every tensor, 64 bits each) is kept in registers from leaf to leaf. */
    GT_METHOD void remember() const {
        if (thread_id() == 0) {
            sts<int>(cell(C::PLACE), b);
            sts<int>(cell(C::PLACE + 1), h);
            sts<int>(cell(C::PLACE + 2), g);
        }
        sync_threads();
    }
    GT_METHOD void recall() {
        b = lds<int>(cell(C::PLACE));
        h = lds<int>(cell(C::PLACE + 1));
        g = lds<int>(cell(C::PLACE + 2));
    }
    /* row of the tile that is number i of the thread's 8 */
    GT_METHOD int row(int i) const { return 4 * p_lane + i + (i < 4 ? 0 : 28); }
    /* the thread's 8 rows of a vector of 64 */
    GT_METHOD void load_p(float (&v)[8], int offset) const {
        const float4 a = lds<float4>(cell(offset + 4 * p_lane));
        const float4 b4 = lds<float4>(cell(offset + 32 + 4 * p_lane));
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b4.x, v[5] = b4.y, v[6] = b4.z, v[7] = b4.w;
    }
    /* the thread's columns of a vector of WIDTH */
    GT_METHOD void load_n(float (&v)[C::RN], int offset) const {
        load_vector(v, cell(offset + n0));
    }
};

GT_DEV int tokens_from(const Problem& in, int64_t first) {
    return (int)(in.T - first < LEAF ? in.T - first : LEAF);
}

template <class C>
GT_DEV Rows head_rows(const Problem& in, const Place<C>& s, const void* data, gt_stride stride,
                      int64_t first) {
    return {data, in.dtype, at(stride, s.b, first, s.h) + s.p0, stride.t, 1,
            tokens_from(in, first), s.rows};
}

template <class C>
GT_DEV Rows group_rows(const Problem& in, const Place<C>& s, const void* data, gt_stride stride,
                       int64_t first) {
    return {data, in.dtype, at(stride, s.b, first, s.g), stride.t, 1, tokens_from(in, first), in.N};
}

/* Delta and everything made of a, by the first warp; tokens beyond the sequence have Delta = 0. */
template <class C>
GT_DEV void stage_decays(const Problem& in, const Place<C>& s, int64_t first) {
    if (warp_id() != 0) return;
    const int lane = lane_id();
    float delta = 0.0f;
    if (lane < tokens_from(in, first)) {
        const float bias = in.dt_bias ? in.dt_bias[s.h] : 0.0f;
        const float dt = load_as(in.dt, in.dt_dtype, at(in.dt_at, s.b, first + lane, s.h));
        delta = delta_of(in.rule, dt + bias).value;
    }
    const float a = delta * in.A[s.h];
    float before = a, after = a; /* sums up to and from this token, a = 0 beyond lane 15 */
    GT_UNROLL
    for (int d = 1; d < LEAF; d *= 2) {
        const float left = shfl_up(before, d), right = shfl_down(after, d);
        before += lane >= d ? left : 0.0f;
        after += lane + d < LEAF ? right : 0.0f;
    }
    const float all = shfl_idx(before, LEAF - 1);
    after = shfl_down(after, 1);
    if (lane < LEAF) {
        const float suf = finite(exp_accurate(after));
        sts<float>(s.cell(C::DELTA + lane), delta);
        sts<float>(s.cell(C::LOG + lane), a);
        sts<float>(s.cell(C::PRE + lane), finite(exp_accurate(before)));
        sts<float>(s.cell(C::SUF + lane), suf);
        sts<float>(s.cell(C::WEIGHT + lane), finite(delta * suf));
    }
    if (lane == 0) {
        const Scale scale = scale_of_log(all);
        sts<float>(s.cell(C::SCALE), scale.keep);
        sts<float>(s.cell(C::SCALE + 1), scale.factor);
        sts<float>(s.cell(C::SCALE + 2), finite(exp_accurate(all)));
    }
}

GT_DEV float dot4(float4 a, float4 b, float sum) {
    sum = fma_rn(a.x, b.x, sum);
    sum = fma_rn(a.y, b.y, sum);
    sum = fma_rn(a.z, b.z, sum);
    return fma_rn(a.w, b.w, sum);
}

/* Products of all pairs of rows t of `left` and s of `right`, K values each, a multiple of 4, by warps
 * 0 to 3: a thread makes t = 4 warp + 0..3, s = 4 (lane / 8) + 0..3 over an eighth of the values, and
 * keeps two of the sums: t = 4 warp + lane % 8 / 2, s = 4 (lane / 8) + 2 (lane % 2) + 0, 1. */
template <class C>
GT_DEV void pair_products(const Place<C>& s, int left, int right, int K, float (&pair)[2]) {
    const int t0 = 4 * warp_id(), s0 = lane_id() / 8 * 4;
    float sum[16] = {};
    GT_NO_UNROLL
    for (int k = lane_id() % 8 * 4; k < K; k += 32) {
        float4 b[4];
        GT_UNROLL
        for (int j = 0; j < 4; j++) b[j] = lds<float4>(s.cell(right + (s0 + j) * K + k));
        GT_UNROLL
        for (int i = 0; i < 4; i++) {
            const float4 a = lds<float4>(s.cell(left + (t0 + i) * K + k));
            GT_UNROLL
            for (int j = 0; j < 4; j++) sum[4 * i + j] = dot4(a, b[j], sum[4 * i + j]);
        }
    }
    reduce_scatter<16, 8, 1>(sum, lane_id() % 8);
    pair[0] = sum[0];
    pair[1] = sum[1];
}

/* L_ts */
template <class C>
GT_DEV float pair_decay(const Place<C>& s, int t, int from) {
    float sum = 0.0f;
    for (int k = from + 1; k <= t; k++) sum += s.value(C::LOG + k);
    return finite(exp_accurate(sum));
}

/* Sum of `value` over the lanes before this one, in the order of s, of the 8 that share a t in
 * stage_pairs. */
GT_DEV float sum_before(float value) {
    const int order = lane_id() / 8 * 2 + lane_id() % 2;
    GT_UNROLL
    for (int d = 1; d < 8; d *= 2) {
        const int from = order >= d ? order - d : 0;
        const float left = shfl_idx(value, from / 2 * 8 + (lane_id() & 6) + from % 2);
        value += order >= d ? left : 0.0f;
    }
    const int from = order > 0 ? order - 1 : 0;
    const float before = shfl_idx(value, from / 2 * 8 + (lane_id() & 6) + from % 2);
    return order > 0 ? before : 0.0f;
}

/* Fills S and, if backward, R, PAIR and BEFORE. */
template <class C, bool BACKWARD>
GT_DEV void stage_pairs(const Place<C>& s) {
    if (warp_id() >= 4) return;
    const int t = 4 * warp_id() + lane_id() % 8 / 2, s0 = lane_id() / 8 * 4 + lane_id() % 2 * 2;
    float CB[2], dyx[2] = {0.0f, 0.0f}, weighted[2] = {0.0f, 0.0f};
    pair_products(s, C::C, C::B, C::WIDTH, CB);
    if constexpr (BACKWARD) pair_products(s, C::DY, C::X, TILE_P, dyx);
    GT_UNROLL
    for (int i = 0; i < 2; i++) {
        const int from = s0 + i, pair = t * PITCH + from;
        const float L = from <= t ? pair_decay(s, t, from) : 0.0f;
        const float S = from <= t ? finite(CB[i] * L) : 0.0f;
        sts<float>(s.cell(C::S + pair), S);
        if constexpr (BACKWARD) {
            const float delta = s.value(C::DELTA + from);
            const float c = from <= t ? finite(dyx[i] * S) : 0.0f;
            sts<float>(s.cell(C::R + pair), from <= t ? finite(dyx[i] * L * delta) : 0.0f);
            sts<float>(s.cell(C::PAIR + pair), c);
            weighted[i] = delta * c;
        }
    }
    if constexpr (BACKWARD) {
        const float before = sum_before(weighted[0] + weighted[1]);
        sts<float>(s.cell(C::BEFORE + t * PITCH + s0), before);
        sts<float>(s.cell(C::BEFORE + t * PITCH + s0 + 1), before + weighted[0]);
    }
}

/* A matrix of token pairs in shared memory, or its transpose: element [i][j]. */
struct Pairs {
    int offset, row, column;
};

/* PARTS <- for ROUND tokens t from `first`, per p: scale_t sum_n state[p][n] vector_t[n]
 * + sum_j pairs[t][j] v_j[p], in WARPS parts.  v_j belongs to n lane j < 16. */
template <class C>
GT_DEV void sum_over_n(const Place<C>& s, const float (&state)[8][C::RN], int first, int tokens,
                       int vector, int scale, Pairs pairs, const float (&v)[8]) {
    const int end = first + C::ROUND < tokens ? first + C::ROUND : tokens;
    GT_NO_UNROLL
    for (int t = first; t < end; t++) {
        float x[C::RN], sum[8];
        s.load_n(x, vector + t * C::WIDTH);
        const float factor = s.value(scale + t);
        const float pair =
            s.value(pairs.offset + t * pairs.row + s.n_lane % LEAF * pairs.column);
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            float inner = 0.0f;
            GT_UNROLL
            for (int n = 0; n < C::RN; n++) inner = fma_rn(state[i][n], x[n], inner);
            sum[i] = fma_rn(pair, v[i], inner * factor);
        }
        const int lane = lane_id() / 8;
        reduce_scatter<8, 4, 8>(sum, lane);
        const int part = (warp_id() * C::ROUND + t - first) * TILE_P;
        sts<float2>(s.cell(C::PARTS + part + s.row(2 * lane)), float2{sum[0], sum[1]});
    }
}

/* The sum of the parts for token first + i / 64 and row i % 64. */
template <class C>
GT_DEV float sum_parts(const Place<C>& s, int i) {
    float sum = 0.0f;
    GT_UNROLL
    for (int w = 0; w < C::WARPS; w++) sum += s.value(C::PARTS + w * C::ROUND * TILE_P + i);
    return sum;
}

/* v_j for sum_over_n: row j of `rows`, times value j of `weights` if that is not negative. */
template <class C>
GT_DEV void load_pair_rows(const Place<C>& s, int rows, int weights, float (&v)[8]) {
    const int j = s.n_lane % LEAF;
    s.load_p(v, rows + j * TILE_P);
    const float weight = weights >= 0 ? s.value(weights + j) : 1.0f;
    GT_UNROLL
    for (int i = 0; i < 8; i++) v[i] = s.n_lane < LEAF ? v[i] * weight : 0.0f;
}

/* state <- E . state + sum_t weight_t left_t right_t^T */
template <class C>
GT_DEV void update_state(const Place<C>& s, float (&state)[8][C::RN], int tokens, int left,
                         int weights, int right) {
    const float keep = s.value(C::SCALE), factor = s.value(C::SCALE + 1);
    GT_UNROLL
    for (int i = 0; i < 8; i++)
        GT_UNROLL
        for (int n = 0; n < C::RN; n++) state[i][n] = rescale(keep, factor, state[i][n], 0.0f);
    GT_NO_UNROLL
    for (int t = 0; t < tokens; t++) {
        float a[8], b[C::RN];
        s.load_p(a, left + t * TILE_P);
        s.load_n(b, right + t * C::WIDTH);
        const float weight = s.value(weights + t);
        GT_UNROLL
        for (int i = 0; i < 8; i++) {
            a[i] *= weight;
            GT_UNROLL
            for (int n = 0; n < C::RN; n++) state[i][n] = fma_rn(a[i], b[n], state[i][n]);
        }
    }
}

/* Copies the thread's elements of a state [P,N] in global memory; outside is 0, and so is NULL. */
template <class C>
GT_DEV void load_state(const Problem& in, const Place<C>& s, const float* from,
                       float (&state)[8][C::RN]) {
    if (from) from += (s.p0 + s.row(0)) * in.N + s.n0;
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        GT_UNROLL
        for (int n = 0; n < C::RN; n++)
            state[i][n] = from && s.row(i) < s.rows && s.n0 + n < in.N ? from[n] : 0.0f;
        if (from) from += i == 3 ? 29 * in.N : in.N;
    }
}

template <class C>
GT_DEV void store_state(const Problem& in, const Place<C>& s, float* to,
                        const float (&state)[8][C::RN]) {
    to += (s.p0 + s.row(0)) * in.N + s.n0;
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        GT_UNROLL
        for (int n = 0; n < C::RN; n++)
            if (s.row(i) < s.rows && s.n0 + n < in.N) to[n] = state[i][n];
        to += i == 3 ? 29 * in.N : in.N;
    }
}

/* Where the head's state begins in a tensor [B,H,P,N]. */
template <class C>
GT_DEV int64_t state_of(const Problem& in, const Place<C>& s) {
    return (s.b * in.H + s.h) * in.P * in.N;
}

template <class C>
GT_DEV float skip_of(const Problem& in, const Place<C>& s, int row) {
    if (!in.Dskip || row >= s.rows) return 0.0f;
    return in.Dskip[in.skip_per_channel ? (int64_t)s.h * in.P + s.p0 + row : s.h];
}

/* ---- forward, any size --------------------------------------------------------------------------------
 * grid B*H*tiles, block 128 (256 for N > 128).  A block owns 64 rows of one head's state for the whole
 * sequence and walks it a leaf at a time.
 * registers: 8 RN state values a thread, fp32 (64 at N = 128).
 * shared: x, B, C, z, S_ts, the decays, the sums over n: 20 KB at N = 16, 34 KB at N = 128, 50 KB
 *     at N = 256.
 * arithmetic per token and head: 2 P N multiply-adds on the state, 16 N + 16 P within the leaf, and
 * 3 P N / (4 RN) lane shuffles to sum over n.
 * bytes per token and head, bf16: x, y (z) 2 P each, B and C 4 N from L2, checkpoints P N / 32.
 * Every sum has one fixed order: deterministic. */
struct ForwardParams {
    Problem in;
    void* y; /* NULL: only states are wanted */
    gt_stride y_at;
    const float* state_in;
    float *state_out, *checkpoints; /* checkpoints [B,H,ceil(T/128),P,N] */
    int state_in_shared, is_step;
    const int32_t* slots;
    int64_t slot_capacity;
};

/* y of the ROUND tokens whose sums lie in PARTS. */
template <class C>
GT_DEV void finish_y(const ForwardParams& p, const Place<C>& s, int64_t first, int round, int tokens,
                     bool skipped) {
    const Problem& in = p.in;
    GT_NO_UNROLL
    for (int i = thread_id(); i < C::ROUND * TILE_P; i += C::THREADS) {
        const int t = round + i / TILE_P, row = i % TILE_P, cell = t * TILE_P + row;
        if (t >= tokens || row >= s.rows) continue;
        float y = fma_rn(skip_of(in, s, row), s.value(C::X + cell), sum_parts(s, i));
        if (in.z) y *= s.value(C::GATE + cell);
        store_as(p.y, in.dtype, at(p.y_at, s.b, first + t, s.h) + s.p0 + row, skipped ? 0.0f : y);
    }
}

/* silu(z) */
template <class C>
GT_DEV void stage_gate(const Problem& in, const Place<C>& s, int64_t first) {
    using Part = Tile<LEAF / 2, TILE_P, C::THREADS>;
    GT_NO_UNROLL
    for (int row = 0; row < LEAF; row += LEAF / 2) {
        Part z;
        z.load(head_rows(in, s, in.z, in.z_at, first).after(row));
        GT_UNROLL
        for (int k = 0; k < Part::COUNT; k++)
            sts<float>(s.cell(C::GATE + row * TILE_P + Part::index(k)), silu(z.value(k)));
    }
}

template <int RN, int WARPS>
GT_KERNEL(32 * WARPS, WARPS > 4 ? 1 : RN == 8 ? 4 : 3)
forward_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    using C = Traits<RN, WARPS>;
    const Problem& in = p.in;
    const Place<C> s(in);
    const int64_t PN = (int64_t)in.P * in.N, chunks = checkpoints_of(in.T);
    const int64_t row = p.is_step && p.slots ? p.slots[s.b] : s.b;
    const bool skipped = p.is_step && (row < 0 || row >= p.slot_capacity);

    float state[8][RN];
    const int64_t row_in = p.state_in_shared ? 0 : row;
    load_state(in, s, p.state_in && !skipped ? p.state_in + (row_in * in.H + s.h) * PN : nullptr,
               state);
    for (int64_t first = 0; first < in.T; first += LEAF) {
        if (p.checkpoints && first % CHECKPOINT == 0) {
            const int64_t checkpoint = (s.b * in.H + s.h) * chunks + first / CHECKPOINT;
            store_state(in, s, p.checkpoints + checkpoint * PN, state);
        }
        const int tokens = tokens_from(in, first);
        stage_decays(in, s, first);
        stage<LEAF, TILE_P, C::THREADS>(s.cell(C::X), head_rows(in, s, in.x, in.x_at, first));
        stage<LEAF, C::WIDTH, C::THREADS>(s.cell(C::B), group_rows(in, s, in.Bm, in.Bm_at, first));
        if (p.y) {
            stage<LEAF, C::WIDTH, C::THREADS>(s.cell(C::C),
                                              group_rows(in, s, in.Cm, in.Cm_at, first));
            if (in.z) stage_gate(in, s, first);
        }
        sync_threads();
        if (p.y) {
            stage_pairs<C, false>(s);
            sync_threads();
            float v[8];
            load_pair_rows(s, C::X, C::DELTA, v);
            GT_NO_UNROLL
            for (int round = 0; round < tokens; round += C::ROUND) {
                sum_over_n(s, state, round, tokens, C::C, C::PRE, {C::S, PITCH, 1}, v);
                sync_threads();
                finish_y(p, s, first, round, tokens, skipped);
                if (round + C::ROUND < tokens) sync_threads();
            }
        }
        update_state(s, state, tokens, C::X, C::WEIGHT, C::B);
        sync_threads();
    }
    if (p.state_out && !skipped) store_state(in, s, p.state_out + (row * in.H + s.h) * PN, state);
}

/* ---- backward, any size, part 1: everything but the sums over heads, batch and time --------------------
 * grid B*H*tiles, block 128 (256 for N > 128).  A block owns 64 rows of one head's state and of its
 * gradient, and walks the sequence backwards, one checkpoint (8 leaves) at a time: it rolls the state
 * h forward through the leaves, parks the state before each in a scratch of its own (global, small
 * enough to stay mostly in L2), then walks back through them with G.
 * registers: G, 8 RN values a thread, fp32, for the whole sequence, and h of the leaf at hand: 128 at
 * N = 128.
 * shared: as forward, and dy, R, c, the shares of e and f: 42 KB at N = 128, 58 KB at N = 256.
 * arithmetic per token and head: 5 P N multiply-adds on the states (roll, dC, dB, U, G), 6 P N with
 * dz, and 48 N + 48 P within the leaf.
 * bytes per token and head, bf16, P = 64, N = 128: x twice, dy, dx 2 P each, B twice and C 6 N from L2,
 * checkpoints P N / 32, parked states P N / 4 twice, shares of dB and dC 8 N: about 5.8 KB.
 * Sums over p, n and t are in fixed order: deterministic. */
struct SweepParams {
    Problem in;
    const float *checkpoints, *dstate_out;
    float* scratch; /* [B,H,tiles,8,64,WIDTH] */
    float* dstate_in;
    void *dx, *dz;
    gt_stride dx_at, dz_at;
    float *dB, *dC;      /* [B,T,G,H/G*tiles,N] or NULL */
    float *ddelta, *da;  /* [tiles,B,T,H]; ddelta without A da */
    float* dskip;        /* rows of sums over 128 tokens: [..,H,P] or, per head, [..,H]; or NULL */
};

/* For all 16 tokens t: out[t][n] = scale_t sum_p state[p][n] vector_t[p] + sum_j pairs[t][j] row_j[n],
 * to global memory unless NULL; and sums [warp][t] <- <state^T vector_t, other_t>, not scaled. */
template <class C>
GT_DEV void sum_over_p(const SweepParams& p, const Place<C>& s, const float (&state)[8][C::RN],
                       int64_t first, int vector, int scale, int other, int sums, Pairs pairs,
                       int rows, float* out) {
    constexpr int RN = C::RN, TOKENS = 8 / RN;         /* whose sums are reduced together */
    constexpr int GROUP = TOKENS < 2 ? 2 : TOKENS; /* whose inner products are */
    const Problem& in = p.in;
    const int heads = (int)(in.H / in.G), parts = heads * in.tiles;
    const int part = s.h % heads * in.tiles + s.tile;
    const int tokens = tokens_from(in, first);
    float row0[RN], row1[RN];
    s.load_n(row0, rows + s.p_lane * C::WIDTH);
    s.load_n(row1, rows + (s.p_lane + 8) * C::WIDTH);
    GT_NO_UNROLL
    for (int t0 = 0; t0 < LEAF; t0 += GROUP) {
        float inner[GROUP];
        GT_UNROLL
        for (int i = 0; i < GROUP; i += TOKENS) {
            float v[8];
            GT_UNROLL
            for (int j = 0; j < TOKENS; j++) {
                const int t = t0 + i + j;
                float x[8], y[RN], sum[RN] = {};
                s.load_p(x, vector + t * TILE_P);
                const float factor = s.value(scale + t);
                const int pair = pairs.offset + t * pairs.row + s.p_lane * pairs.column;
                const float pair0 = s.value(pair), pair1 = s.value(pair + 8 * pairs.column);
                GT_UNROLL
                for (int k = 0; k < 8; k++)
                    GT_UNROLL
                    for (int n = 0; n < RN; n++) sum[n] = fma_rn(x[k], state[k][n], sum[n]);
                s.load_n(y, other + t * C::WIDTH);
                inner[i + j] = 0.0f;
                GT_UNROLL
                for (int n = 0; n < RN; n++) {
                    inner[i + j] = fma_rn(sum[n], y[n], inner[i + j]);
                    v[j * RN + n] =
                        fma_rn(pair0, row0[n], fma_rn(pair1, row1[n], sum[n] * factor));
                }
            }
            reduce_scatter<8, 8, 1>(v, s.p_lane);
            const int t = t0 + i + s.p_lane / RN, n = s.n0 + s.p_lane % RN;
            if (out && t < tokens && n < in.N)
                out[(((s.b * in.T + first + t) * in.G + s.g) * parts + part) * in.N + n] = v[0];
        }
        reduce_scatter<GROUP, 32, 1>(inner, lane_id());
        if (lane_id() % (32 / GROUP) == 0)
            sts<float>(s.cell(sums + warp_id() * LEAF + t0 + lane_id() / (32 / GROUP)), inner[0]);
    }
}

/* dy without the gate to DY, and what y has to be multiplied by for dz to GATE. */
template <class C>
GT_DEV void stage_dy(const Problem& in, const Place<C>& s, int64_t first) {
    using Part = Tile<LEAF / 2, TILE_P, C::THREADS>;
    GT_NO_UNROLL
    for (int row = 0; row < LEAF; row += LEAF / 2) {
        Part dy, z;
        dy.load(head_rows(in, s, in.dy, in.dy_at, first).after(row));
        if (in.z) z.load(head_rows(in, s, in.z, in.z_at, first).after(row));
        GT_UNROLL
        for (int k = 0; k < Part::COUNT; k++) {
            const int cell = row * TILE_P + Part::index(k);
            const float dout = dy.value(k);
            sts<float>(s.cell(C::DY + cell), in.z ? dout * silu(z.value(k)) : dout);
            if (in.z) sts<float>(s.cell(C::GATE + cell), dout * dsilu(z.value(k)));
        }
    }
}

/* All that the way back through a leaf needs. */
template <class C>
GT_DEV void stage_leaf(const Problem& in, const Place<C>& s, int64_t first) {
    stage_decays(in, s, first);
    stage_dy(in, s, first);
    stage<LEAF, TILE_P, C::THREADS>(s.cell(C::X), head_rows(in, s, in.x, in.x_at, first));
    stage<LEAF, C::WIDTH, C::THREADS>(s.cell(C::B), group_rows(in, s, in.Bm, in.Bm_at, first));
    stage<LEAF, C::WIDTH, C::THREADS>(s.cell(C::C), group_rows(in, s, in.Cm, in.Cm_at, first));
    sync_threads();
}

/* Where a block parks the state before a leaf of the checkpoint at hand. */
template <class C>
GT_DEV float4* parked_state(const SweepParams& p, const Place<C>& s, int leaf) {
    const int64_t block = (s.b * p.in.H + s.h) * p.in.tiles + s.tile;
    constexpr int PARKED = 2 * C::RN * C::THREADS; /* float4 of a state */
    return reinterpret_cast<float4*>(p.scratch) + (block * LEAVES + leaf) * PARKED;
}

/* Rolls h from a checkpoint through its leaves and parks what it is before each. */
template <class C>
GT_DEV void park_states(const SweepParams& p, Place<C>& s, int64_t chunk, int leaves) {
    const Problem& in = p.in;
    const int64_t chunks = checkpoints_of(in.T), head = s.b * in.H + s.h;
    float state[8][C::RN];
    load_state(in, s, p.checkpoints + (head * chunks + chunk) * in.P * in.N, state);
    for (int leaf = 0; leaf < leaves; leaf++) {
        GT_UNROLL
        for (int i = 0; i < 2 * C::RN; i++) {
            const int e = 4 * i;
            const float4 four = {
                state[e / C::RN][e % C::RN], state[(e + 1) / C::RN][(e + 1) % C::RN],
                state[(e + 2) / C::RN][(e + 2) % C::RN], state[(e + 3) / C::RN][(e + 3) % C::RN]};
            stg<float4>(parked_state(p, s, leaf) + i * C::THREADS + thread_id(), four);
        }
        if (leaf + 1 == leaves) break;
        const int64_t first = chunk * CHECKPOINT + leaf * LEAF;
        s.recall();
        stage_decays(in, s, first);
        stage<LEAF, TILE_P, C::THREADS>(s.cell(C::X), head_rows(in, s, in.x, in.x_at, first));
        stage<LEAF, C::WIDTH, C::THREADS>(s.cell(C::B), group_rows(in, s, in.Bm, in.Bm_at, first));
        sync_threads();
        update_state(s, state, LEAF, C::X, C::WEIGHT, C::B);
        sync_threads();
    }
}

/* dz of the ROUND tokens whose y lie in PARTS. */
template <class C>
GT_DEV void finish_dz(const SweepParams& p, const Place<C>& s, int64_t first, int round,
                      int tokens) {
    const Problem& in = p.in;
    GT_NO_UNROLL
    for (int i = thread_id(); i < C::ROUND * TILE_P; i += C::THREADS) {
        const int t = round + i / TILE_P, row = i % TILE_P, cell = t * TILE_P + row;
        if (t >= tokens || row >= s.rows) continue;
        const float y = fma_rn(skip_of(in, s, row), s.value(C::X + cell), sum_parts(s, i));
        store_as(p.dz, in.dtype, at(p.dz_at, s.b, first + t, s.h) + s.p0 + row,
                 y * s.value(C::GATE + cell));
    }
}

/* What needs h: dC, e, <G, h> and dz. */
template <class C>
GT_DEV void leaf_with_state(const SweepParams& p, const Place<C>& s, int64_t first,
                            const float4* parked, const float (&G)[8][C::RN]) {
    constexpr int RN = C::RN;
    const Problem& in = p.in;
    const int tokens = tokens_from(in, first);
    float h[8][RN], Gh = 0.0f;
    GT_UNROLL
    for (int i = 0; i < 2 * RN; i++) {
        const float4 four = ldg<float4>(parked + i * C::THREADS + thread_id());
        const float values[4] = {four.x, four.y, four.z, four.w};
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            const int k = (4 * i + e) / RN, n = (4 * i + e) % RN;
            h[k][n] = values[e];
            Gh = fma_rn(G[k][n], h[k][n], Gh);
        }
    }
    Gh = warp_sum(Gh);
    if (lane_id() == 0) sts<float>(s.cell(C::Z_PARTS + warp_id()), Gh);
    sum_over_p(p, s, h, first, C::DY, C::PRE, C::C, C::E_PARTS, {C::R, PITCH, 1}, C::B, p.dC);
    if (!p.dz) return;
    float v[8];
    load_pair_rows(s, C::X, C::DELTA, v);
    GT_NO_UNROLL
    for (int round = 0; round < tokens; round += C::ROUND) {
        sum_over_n(s, h, round, tokens, C::C, C::PRE, {C::S, PITCH, 1}, v);
        sync_threads();
        finish_dz(p, s, first, round, tokens);
        sync_threads();
    }
}

/* da and the direct part of dDelta, by sums alone: 8 lanes a token k share the tokens t. */
template <class C>
GT_DEV void leaf_delta(const SweepParams& p, const Place<C>& s, int64_t first) {
    if (warp_id() >= 4) return;
    const Problem& in = p.in;
    const int k = thread_id() / 8, j = thread_id() % 8;
    float da = 0.0f, direct = 0.0f, f = 0.0f;
    for (int t = j; t < LEAF; t += 8) {
        float e = 0.0f;
        f = 0.0f;
        for (int w = 0; w < C::WARPS; w++) {
            e += s.value(C::E_PARTS + w * LEAF + t);
            f += s.value(C::F_PARTS + w * LEAF + t);
        }
        if (t == k) direct = fma_rn(s.value(C::SUF + t), f, direct);
        direct += s.value(C::PAIR + t * PITCH + k); /* 0 for t < k */
        if (t < k) da = fma_rn(s.value(C::WEIGHT + t), f, da);
        if (t >= k) da += fma_rn(s.value(C::PRE + t), e, s.value(C::BEFORE + t * PITCH + k));
    }
    for (int mask = 1; mask < 8; mask <<= 1) {
        da += shfl_xor(da, mask);
        direct += shfl_xor(direct, mask);
    }
    float Gh = 0.0f;
    for (int w = 0; w < C::WARPS; w++) Gh += s.value(C::Z_PARTS + w);
    da = fma_rn(s.value(C::SCALE + 2), Gh, da);
    if (j == 0 && k < tokens_from(in, first)) {
        const int64_t to = ((s.tile * in.B + s.b) * in.T + first + k) * in.H + s.h;
        p.da[to] = da;
        p.ddelta[to] = direct;
    }
}

/* dx of the ROUND tokens whose U lie in PARTS; returns this thread's <dy, x>, all of one row p. */
template <class C>
GT_DEV float finish_dx(const SweepParams& p, const Place<C>& s, int64_t first, int round,
                       int tokens) {
    const Problem& in = p.in;
    float dskip = 0.0f;
    GT_NO_UNROLL
    for (int i = thread_id(); i < C::ROUND * TILE_P; i += C::THREADS) {
        const int t = round + i / TILE_P, row = i % TILE_P, cell = t * TILE_P + row;
        if (t >= tokens || row >= s.rows) continue;
        const float dy = s.value(C::DY + cell), U = sum_parts(s, i);
        dskip = fma_rn(dy, s.value(C::X + cell), dskip);
        if (p.dx)
            store_as(p.dx, in.dtype, at(p.dx_at, s.b, first + t, s.h) + s.p0 + row,
                     fma_rn(s.value(C::DELTA + t), U, skip_of(in, s, row) * dy));
    }
    return dskip;
}

/* Leaves a checkpoint's share of dDskip: per channel the threads' own sums, per head the warps'. */
template <class C>
GT_DEV void store_dskip(const SweepParams& p, const Place<C>& s, int64_t chunk, float dskip) {
    const Problem& in = p.in;
    const int64_t part = s.b * checkpoints_of(in.T) + chunk;
    if (in.skip_per_channel) {
        const int row = thread_id() % TILE_P;
        const int64_t to = part * (C::THREADS / TILE_P) + thread_id() / TILE_P;
        if (row < s.rows) p.dskip[(to * in.H + s.h) * in.P + s.p0 + row] = dskip;
    } else {
        dskip = warp_sum(dskip);
        const int64_t to = (part * in.tiles + s.tile) * C::WARPS + warp_id();
        if (lane_id() == 0) p.dskip[to * in.H + s.h] = dskip;
    }
}

template <int RN, int WARPS>
GT_KERNEL(32 * WARPS, 8 / WARPS) backward_sweep_kernel(const GT_GRID_CONSTANT SweepParams p) {
    using C = Traits<RN, WARPS>;
    const Problem& in = p.in;
    Place<C> s(in);
    float G[8][RN], v[8];
    load_state(in, s, p.dstate_out ? p.dstate_out + state_of(in, s) : nullptr, G);
    s.remember();
    for (int64_t chunk = checkpoints_of(in.T) - 1; chunk >= 0; chunk--) {
        const int64_t start = chunk * CHECKPOINT;
        const int64_t left = in.T - start < CHECKPOINT ? in.T - start : CHECKPOINT;
        const int leaves = (int)((left + LEAF - 1) / LEAF);
        float dskip = 0.0f;
        park_states(p, s, chunk, leaves);
        for (int leaf = leaves - 1; leaf >= 0; leaf--) {
            const int64_t first = start + leaf * LEAF;
            const int tokens = tokens_from(in, first);
            s.recall();
            stage_leaf(in, s, first);
            stage_pairs<C, true>(s);
            sync_threads();
            leaf_with_state(p, s, first, parked_state(p, s, leaf), G);
            sum_over_p(p, s, G, first, C::X, C::WEIGHT, C::B, C::F_PARTS, {C::R, 1, PITCH}, C::C,
                       p.dB);
            load_pair_rows(s, C::DY, -1, v);
            GT_NO_UNROLL
            for (int round = 0; round < tokens; round += C::ROUND) {
                sum_over_n(s, G, round, tokens, C::B, C::SUF, {C::S, 1, PITCH}, v);
                sync_threads();
                if (round == 0) leaf_delta(p, s, first);
                dskip += finish_dx(p, s, first, round, tokens);
                if (round + C::ROUND < tokens) sync_threads();
            }
            update_state(s, G, tokens, C::DY, C::PRE, C::C);
            sync_threads();
        }
        if (p.dskip) store_dskip(p, s, chunk, dskip);
    }
    if (p.dstate_in) store_state(in, s, p.dstate_in + state_of(in, s), G);
}

/* ---- backward, part 2: ddt, and the shares of dA and ddt_bias --------------------------------------------
 * grid B*chunks*ceil(H/32), block 256: 128 tokens of 32 heads, a head a lane; warp w takes tokens w,
 * w + 8, ... in order, and the warps' sums are added in order.
 * registers: the head's parameters and two sums.
 * shared: 2 KB.  bytes per token and head: dt, ddt, and 8 a tile of P.  Deterministic. */
struct DeltaParams {
    Problem in;
    const float *ddelta, *da;
    void* ddt;
    gt_stride ddt_at;
    float *dA, *dbias; /* rows [B*chunks,H] or NULL */
};

GT_KERNEL(256, 1) backward_delta_kernel(const GT_GRID_CONSTANT DeltaParams p) {
    const Problem& in = p.in;
    const int64_t lanes = (in.H + 31) / 32, chunks = checkpoints_of(in.T);
    const int64_t h = block_x() % lanes * 32 + lane_id(), row = block_x() / lanes;
    const int64_t b = row / chunks, start = row % chunks * CHECKPOINT;
    const int64_t end = start + CHECKPOINT < in.T ? start + CHECKPOINT : in.T;
    float dA = 0.0f, dbias = 0.0f;
    for (int64_t t = start + warp_id(); h < in.H && t < end; t += 8) {
        float direct = 0.0f, da = 0.0f;
        for (int64_t tile = 0; tile < in.tiles; tile++) {
            const int64_t from = ((tile * in.B + b) * in.T + t) * in.H + h;
            direct += p.ddelta[from];
            da += p.da[from];
        }
        const float bias = in.dt_bias ? in.dt_bias[h] : 0.0f;
        const Delta delta =
            delta_of(in.rule, load_as(in.dt, in.dt_dtype, at(in.dt_at, b, t, h)) + bias);
        /* the slope first: the sum without it may overflow */
        float ddt = fma_rn(delta.slope * in.A[h], da, delta.slope * direct);
        if (delta.slope == 0.0f) ddt = 0.0f;
        if (p.ddt) store_as(p.ddt, in.dt_dtype, at(p.ddt_at, b, t, h), ddt);
        dA = fma_rn(delta.value, da, dA);
        dbias += ddt;
    }
    const uint32_t cells = smem_base();
    sts<float2>(cells + 8 * thread_id(), float2{dA, dbias});
    sync_threads();
    if (warp_id() != 0 || h >= in.H) return;
    dA = dbias = 0.0f;
    for (int w = 0; w < 8; w++) {
        const float2 sum = lds<float2>(cells + 8 * (32 * w + lane_id()));
        dA += sum.x;
        dbias += sum.y;
    }
    if (p.dA) p.dA[row * in.H + h] = dA;
    if (p.dbias) p.dbias[row * in.H + h] = dbias;
}

/* ---- launchers -------------------------------------------------------------------------------------------- */

static inline Problem problem_of(const gt_ssd_args& a) {
    Problem in = {};
    in.B = a.B, in.T = a.T, in.H = a.H, in.G = a.G;
    in.P = (int)a.P, in.N = (int)a.N;
    in.dtype = a.dtype, in.dt_dtype = a.dt_dtype;
    in.rule = {a.softplus, a.dt_limit, a.dt_min, a.dt_max};
    in.skip_per_channel = a.Dskip_per_channel;
    in.x = a.x, in.dt = a.dt, in.Bm = a.Bm, in.Cm = a.Cm, in.z = a.z, in.dy = a.dy;
    in.A = a.A, in.Dskip = a.Dskip, in.dt_bias = a.dt_bias;
    in.x_at = a.x_stride, in.dt_at = a.dt_stride, in.Bm_at = a.Bm_stride, in.Cm_at = a.Cm_stride;
    in.z_at = a.z_stride, in.dy_at = a.dy_stride;
    in.tiles = ((int)a.P + TILE_P - 1) / TILE_P;
    return in;
}

template <int RN, int WARPS>
static gt_status launch_forward_with(const ForwardParams& p, gt_stream stream) {
    using C = Traits<RN, WARPS>;
    return run("ssd forward_kernel", forward_kernel<RN, WARPS>, p.in.B * p.in.H * p.in.tiles,
               C::THREADS, 4 * C::FORWARD_END, stream, p);
}

static inline gt_status launch_forward(const ForwardParams& p, gt_stream stream) {
    if (p.in.N <= 16) return launch_forward_with<1, 4>(p, stream);
    if (p.in.N <= 32) return launch_forward_with<2, 4>(p, stream);
    if (p.in.N <= 64) return launch_forward_with<4, 4>(p, stream);
    if (p.in.N <= 128) return launch_forward_with<8, 4>(p, stream);
    return launch_forward_with<8, 8>(p, stream);
}

template <int RN, int WARPS>
static gt_status launch_sweep_with(const SweepParams& p, gt_stream stream) {
    using C = Traits<RN, WARPS>;
    return run("ssd backward_sweep_kernel", backward_sweep_kernel<RN, WARPS>,
               p.in.B * p.in.H * p.in.tiles, C::THREADS, 4 * C::BACKWARD_END, stream, p);
}

static inline gt_status launch_sweep(const SweepParams& p, gt_stream stream) {
    if (p.in.N <= 16) return launch_sweep_with<1, 4>(p, stream);
    if (p.in.N <= 32) return launch_sweep_with<2, 4>(p, stream);
    if (p.in.N <= 64) return launch_sweep_with<4, 4>(p, stream);
    if (p.in.N <= 128) return launch_sweep_with<8, 4>(p, stream);
    return launch_sweep_with<8, 8>(p, stream);
}

/* What the sweep's variant for this N fixes. */
static inline int64_t sweep_width(int64_t N) {
    return N <= 16 ? 16 : N <= 32 ? 32 : N <= 64 ? 64 : N <= 128 ? 128 : 256;
}
static inline int64_t sweep_warps(int64_t N) { return N <= 128 ? 4 : 8; }

static inline int64_t checkpoint_count(const gt_ssd_args& a) {
    return a.B * a.H * checkpoints_of(a.T) * a.P * a.N;
}

/* The pieces of backward's workspace. */
struct BackwardPlan {
    SweepParams sweep;
    DeltaParams delta;
    float *checkpoints, *dstate_sum;
    int64_t dskip_rows;
    size_t bytes;
};

static inline BackwardPlan plan_backward(const gt_ssd_args& a) {
    BackwardPlan plan = {};
    SweepParams& s = plan.sweep;
    DeltaParams& d = plan.delta;
    Arena arena(a.workspace);
    s.in = d.in = problem_of(a);
    const int64_t tiles = s.in.tiles, tokens = a.B * a.T * a.H, rows = a.B * checkpoints_of(a.T);
    if (!a.saved) plan.checkpoints = arena.take<float>(checkpoint_count(a));
    s.scratch = arena.take<float>(a.B * a.H * tiles * LEAVES * TILE_P * sweep_width(a.N));
    if (a.dBm) s.dB = arena.take<float>(tokens * tiles * a.N);
    if (a.dCm) s.dC = arena.take<float>(tokens * tiles * a.N);
    s.ddelta = arena.take<float>(tokens * tiles);
    s.da = arena.take<float>(tokens * tiles);
    if (a.dA) d.dA = arena.take<float>(rows * a.H);
    if (a.ddt_bias) d.dbias = arena.take<float>(rows * a.H);
    plan.dskip_rows = rows * sweep_warps(a.N);
    if (a.Dskip_per_channel)
        plan.dskip_rows /= 2; /* 64 threads a row */
    else
        plan.dskip_rows *= tiles;
    if (a.dDskip)
        s.dskip = arena.take<float>(plan.dskip_rows * a.H * (a.Dskip_per_channel ? a.P : 1));
    if (a.dstate_in && a.state_in_shared)
        plan.dstate_sum = arena.take<float>(a.B * a.H * a.P * a.N);
    plan.bytes = arena.bytes();
    return plan;
}

static inline gt_status recompute_checkpoints(const gt_ssd_args& a, BackwardPlan& plan,
                                              gt_stream stream) {
    ForwardParams f = {};
    f.in = plan.sweep.in;
    f.state_in = a.state_in;
    f.state_in_shared = a.state_in_shared;
    f.checkpoints = plan.checkpoints;
    plan.sweep.checkpoints = plan.checkpoints;
    return launch_forward(f, stream);
}

static inline gt_status sum_heads(const gt_ssd_args& a, const char* name, const float* shares,
                                  void* out, gt_stride out_at, gt_stream stream) {
    if (!out) return GT_OK;
    const int64_t parts = a.H / a.G * ((a.P + TILE_P - 1) / TILE_P);
    return group_sum(name, {shares, out, a.dtype, out_at, a.B, a.T, a.G, parts, (int)a.N}, stream);
}

static inline gt_status launch_backward(const gt_ssd_args& a, BackwardPlan& plan, gt_stream stream) {
    SweepParams& s = plan.sweep;
    DeltaParams& d = plan.delta;
    const int64_t rows = a.B * checkpoints_of(a.T), state = a.H * a.P * a.N;
    const bool shared = a.dstate_in && a.state_in_shared;
    gt_status status;
    size_t bytes;
    s.checkpoints = floats_in(a.saved, checkpoint_count(a), &bytes);
    if (!a.saved && (status = recompute_checkpoints(a, plan, stream)) != GT_OK) return status;
    s.dstate_out = a.dstate_out;
    s.dstate_in = shared ? plan.dstate_sum : a.dstate_in;
    s.dx = a.dx, s.dz = a.dz;
    s.dx_at = a.dx_stride, s.dz_at = a.dz_stride;
    d.ddelta = s.ddelta, d.da = s.da;
    d.ddt = a.ddt, d.ddt_at = a.ddt_stride;
    if ((status = launch_sweep(s, stream)) != GT_OK ||
        (status = sum_heads(a, "ssd dBm", s.dB, a.dBm, a.dBm_stride, stream)) != GT_OK ||
        (status = sum_heads(a, "ssd dCm", s.dC, a.dCm, a.dCm_stride, stream)) != GT_OK ||
        (status = run("ssd backward_delta_kernel", backward_delta_kernel, rows * ((a.H + 31) / 32),
                      256, 2048, stream, d)) != GT_OK)
        return status;
    if (a.dA && (status = reduce_rows(d.dA, a.dA, rows, a.H, a.accumulate, stream)) != GT_OK)
        return status;
    if (a.ddt_bias &&
        (status = reduce_rows(d.dbias, a.ddt_bias, rows, a.H, a.accumulate, stream)) != GT_OK)
        return status;
    if (a.dDskip && (status = reduce_rows(s.dskip, a.dDskip, plan.dskip_rows,
                                          a.H * (a.Dskip_per_channel ? a.P : 1), a.accumulate,
                                          stream)) != GT_OK)
        return status;
    return shared ? reduce_rows(plan.dstate_sum, a.dstate_in, a.B, state, a.accumulate, stream)
                  : GT_OK;
}

/* ---- dispatch and checks ------------------------------------------------------------------------------------ */

/* Prepares the arguments and checks what only the GPU limits. */
static inline gt_status prepare(gt_pass pass, const gt_ssd_args* args, gt_ssd_args* a) {
    gt_dims dims;
    Device device;
    gt_status status = gt_prepare(gt_op_ssd(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK) return status;
    if (a->P > MAX_SIZE)
        return gt_fail(GT_ERROR_UNSUPPORTED, "P = %lld: at most %d", (long long)a->P, MAX_SIZE);
    if (a->N > MAX_SIZE)
        return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: at most %d", (long long)a->N, MAX_SIZE);
    return current_device(&device);
}

static inline gt_status forward(const gt_ssd_args& a, bool is_step, gt_stream stream) {
    ForwardParams p = {};
    p.in = problem_of(a);
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_in = is_step ? a.state_out : a.state_in;
    p.state_out = a.state_out;
    size_t bytes;
    p.checkpoints = is_step ? nullptr : floats_in(a.saved, checkpoint_count(a), &bytes);
    p.state_in_shared = a.state_in_shared;
    p.is_step = is_step;
    p.slots = a.slots;
    p.slot_capacity = a.slot_capacity;
    return launch_forward(p, stream);
}

} /* namespace ssd */

/* ==== selective_scan ================================================================================ */

namespace scan {

using namespace ssm;

/* ---- sizes ------------------------------------------------------------------------------------------ */

constexpr int THREADS = 128;

/* A channel is held by LANES neighbouring lanes, STATES state elements each: lane l has
 * l STATES .. l STATES + STATES - 1.  A block has CHANNELS channels of one group.  Offsets in floats. */
template <int LANES_, int STATES_>
struct Traits {
    static constexpr int LANES = LANES_, STATES = STATES_;
    static constexpr int CHANNELS = THREADS / LANES, WIDTH = LANES * STATES;
    /* forward: tokens staged together */
    static constexpr int TILE = WIDTH <= 64 ? 32 : 16;
    static constexpr int F_U = 0;                             /* [TILE][CHANNELS] */
    static constexpr int F_DELTA = F_U + TILE * CHANNELS;     /* likewise */
    static constexpr int F_Y = F_DELTA + TILE * CHANNELS;     /* likewise */
    static constexpr int F_B = F_Y + TILE * CHANNELS;         /* [TILE][WIDTH] */
    static constexpr int F_C = F_B + TILE * WIDTH;            /* likewise */
    static constexpr int FORWARD_END = F_C + TILE * WIDTH;
    /* backward: tokens between parked states, staged together */
    static constexpr int LEAF = WIDTH <= 32 ? 16 : 512 / WIDTH;
    static constexpr int LEAVES = CHECKPOINT / LEAF;
    static constexpr int CELLS = LEAF * CHANNELS;
    static constexpr int U = 0, DELTA = U + CELLS, SLOPE = DELTA + CELLS, DY = SLOPE + CELLS;
    static constexpr int SUMS = DY + CELLS; /* <g,B>, <A,da>, <h,C>: [3][LEAF][CHANNELS] */
    static constexpr int B = SUMS + 3 * CELLS;                /* [LEAF][WIDTH] */
    static constexpr int C = B + LEAF * WIDTH;                /* likewise */
    static constexpr int STATE = C + LEAF * WIDTH;            /* [LEAF][STATES/4][THREADS] float4 */
    static constexpr int SHARES = STATE + LEAF * STATES * THREADS; /* [4 warps][LEAF][2 WIDTH] */
    static constexpr int BACKWARD_END = SHARES + 4 * LEAF * 2 * WIDTH;
    static_assert(STATES % 4 == 0 && F_B % 4 == 0 && B % 4 == 0, "16-byte pieces");
    static_assert(4 * FORWARD_END <= 64 * 1024, "fits every architecture");
    static_assert(4 * BACKWARD_END <= 64 * 1024, "fits every architecture");
};

/* One argument struct, prepared, as every kernel sees it. */
struct Problem {
    int64_t B, T, D, G;
    int N;
    gt_dtype dtype, dt_dtype;
    DeltaRule rule;
    const void *u, *dt, *Bm, *Cm, *z, *dy;
    const float *A, *Dskip, *dt_bias;
    gt_stride u_at, dt_at, Bm_at, Cm_at, z_at, dy_at;
    int64_t tiles; /* of channels, in a group */
};

/* ---- device helpers ---------------------------------------------------------------------------------- */

/* Where a block and a thread stand. */
template <class C>
struct Place {
    uint32_t smem;
    int64_t b, g, tile, d0; /* d0: the block's first channel */
    int channels;           /* that exist */
    int channel, lane;      /* the thread's, and its place among the channel's lanes */

    GT_METHOD explicit Place(const Problem& in) {
        const int64_t per_group = in.D / in.G;
        smem = smem_base();
        tile = block_x() % in.tiles;
        g = block_x() / in.tiles % in.G;
        b = block_x() / in.tiles / in.G;
        d0 = g * per_group + tile * C::CHANNELS;
        const int64_t left = per_group - tile * C::CHANNELS;
        channels = (int)(left < C::CHANNELS ? left : C::CHANNELS);
        channel = thread_id() / C::LANES;
        lane = thread_id() % C::LANES;
    }
    GT_METHOD uint32_t cell(int offset) const { return smem + 4 * offset; }
    GT_METHOD float value(int offset) const { return lds<float>(cell(offset)); }
    GT_METHOD bool has_state(const Problem& in, int i) const {
        return channel < channels && lane * C::STATES + i < in.N;
    }
    /* offset of the thread's state element i within [D,N] */
    GT_METHOD int64_t state_at(const Problem& in, int i) const {
        return (d0 + channel) * in.N + lane * C::STATES + i;
    }
};

template <class C>
GT_DEV Rows channel_rows(const Problem& in, const Place<C>& s, const void* data, gt_stride stride,
                         int64_t first, int tokens) {
    return {data, in.dtype, at(stride, s.b, first, s.d0), stride.t, stride.h, tokens, s.channels};
}

template <class C>
GT_DEV Rows dt_rows(const Problem& in, const Place<C>& s, int64_t first, int tokens) {
    Rows rows = channel_rows(in, s, in.dt, in.dt_at, first, tokens);
    rows.dtype = in.dt_dtype;
    return rows;
}

template <class C>
GT_DEV Rows group_rows(const Problem& in, const Place<C>& s, const void* data, gt_stride stride,
                       int64_t first, int tokens) {
    return {data, in.dtype, at(stride, s.b, first, s.g), stride.t, 1, tokens, in.N};
}

/* Delta of loaded tokens, and its slope if that is wanted; both 0 for what does not exist. */
template <bool SLOPE, class C, class Part>
GT_DEV void store_delta(const Problem& in, const Place<C>& s, const Part& dt, int tokens, int value,
                        int slope) {
    GT_UNROLL
    for (int k = 0; k < Part::COUNT; k++) {
        const int i = Part::index(k);
        const bool inside = Part::row(k) < tokens && Part::column(k) < s.channels;
        Delta delta = {0.0f, 0.0f};
        if (inside) {
            const float bias = in.dt_bias ? in.dt_bias[s.d0 + Part::column(k)] : 0.0f;
            delta = delta_of(in.rule, dt.value(k) + bias);
        }
        if (i >= Part::SIZE) continue;
        sts<float>(s.cell(value + i), delta.value);
        if constexpr (SLOPE) sts<float>(s.cell(slope + i), delta.slope);
    }
}

/* The thread's elements of a state [D,N] or a row of A; outside is 0, and so is NULL. */
template <class C>
GT_DEV void load_state(const Problem& in, const Place<C>& s, const float* from,
                       float (&state)[C::STATES]) {
    GT_UNROLL
    for (int i = 0; i < C::STATES; i++)
        state[i] = from && s.has_state(in, i) ? from[s.state_at(in, i)] : 0.0f;
}

template <class C>
GT_DEV void store_state(const Problem& in, const Place<C>& s, float* to,
                        const float (&state)[C::STATES]) {
    GT_UNROLL
    for (int i = 0; i < C::STATES; i++)
        if (s.has_state(in, i)) to[s.state_at(in, i)] = state[i];
}

/* h <- exp(Delta A) h + Delta u B */
template <int STATES>
GT_DEV void advance(float (&h)[STATES], const float (&A)[STATES], const float (&B)[STATES],
                    float delta, float u) {
    GT_UNROLL
    for (int i = 0; i < STATES; i++) {
        const Scale scale = scale_of_log(delta * A[i]);
        h[i] = rescale(scale.keep, scale.factor, h[i], delta * u * B[i]);
    }
}

/* ---- forward, any size: token by token ----------------------------------------------------------------
 * grid B*G*ceil(D/G/CHANNELS), block 128.  A block owns CHANNELS = 128 / LANES channels of one group
 * for the whole sequence, 32 at N <= 16; tokens are staged 32 at a time (16 for N > 64).
 * registers: STATES state values and as many of A a thread, fp32.
 * shared: u, Delta, y [TILE][CHANNELS], B, C [TILE][N]: 16 KB at N = 16.
 * arithmetic per token and state: about 20 instructions, one of them ex2; y is summed over the lanes
 * of a channel for 4 tokens at once, in fixed order: deterministic.
 * bytes per token and channel, bf16: u, dt, (z,) y 2 each, B and C 4 N / CHANNELS, checkpoints N / 32. */
struct ForwardParams {
    Problem in;
    void* y; /* NULL: only states are wanted */
    gt_stride y_at;
    const float* state_in;
    float *state_out, *checkpoints; /* checkpoints [B,ceil(T/128),D,N] */
    int state_in_shared, is_step;
    const int32_t* slots;
    int64_t slot_capacity;
};

/* y of the staged tokens, from what the token loop left in Y. */
template <class C>
GT_DEV void finish_y(const ForwardParams& p, const Place<C>& s, int64_t first, int tokens,
                     bool skipped) {
    using Part = Tile<C::TILE, C::CHANNELS, THREADS>;
    const Problem& in = p.in;
    Part z;
    if (in.z) z.load(channel_rows(in, s, in.z, in.z_at, first, tokens));
    GT_UNROLL
    for (int k = 0; k < Part::COUNT; k++) {
        const int t = Part::row(k), c = Part::column(k);
        if (t >= tokens || c >= s.channels) continue;
        const float skip = in.Dskip ? in.Dskip[s.d0 + c] : 0.0f;
        float y = fma_rn(skip, s.value(C::F_U + Part::index(k)), s.value(C::F_Y + Part::index(k)));
        if (in.z) y *= silu(z.value(k));
        store_as(p.y, in.dtype, at(p.y_at, s.b, first + t, s.d0 + c), skipped ? 0.0f : y);
    }
}

template <int LANES, int STATES>
GT_KERNEL(128, 2) forward_kernel(const GT_GRID_CONSTANT ForwardParams p) {
    using C = Traits<LANES, STATES>;
    const Problem& in = p.in;
    const Place<C> s(in);
    const int64_t DN = in.D * in.N, chunks = checkpoints_of(in.T);
    const int64_t row = p.is_step && p.slots ? p.slots[s.b] : s.b;
    const bool skipped = p.is_step && (row < 0 || row >= p.slot_capacity);

    float h[STATES], A[STATES];
    const int64_t row_in = p.state_in_shared ? 0 : row;
    load_state(in, s, p.state_in && !skipped ? p.state_in + row_in * DN : nullptr, h);
    load_state(in, s, in.A, A);
    for (int64_t first = 0; first < in.T; first += C::TILE) {
        if (p.checkpoints && first % CHECKPOINT == 0)
            store_state(in, s, p.checkpoints + (s.b * chunks + first / CHECKPOINT) * DN, h);
        const int tokens = (int)(in.T - first < C::TILE ? in.T - first : C::TILE);
        Tile<C::TILE, C::CHANNELS, THREADS> u, dt; /* loads in flight while B and C are staged */
        u.load(channel_rows(in, s, in.u, in.u_at, first, tokens));
        dt.load(dt_rows(in, s, first, tokens));
        stage<C::TILE, C::WIDTH, THREADS>(s.cell(C::F_B),
                                          group_rows(in, s, in.Bm, in.Bm_at, first, tokens));
        if (p.y)
            stage<C::TILE, C::WIDTH, THREADS>(s.cell(C::F_C),
                                              group_rows(in, s, in.Cm, in.Cm_at, first, tokens));
        u.store(s.cell(C::F_U));
        store_delta<false>(in, s, dt, tokens, C::F_DELTA, 0);
        sync_threads();
        for (int t0 = 0; t0 < tokens; t0 += 4) { /* beyond the sequence Delta = 0 changes nothing */
            float y[4];
            GT_UNROLL
            for (int j = 0; j < 4; j++) {
                const int cell = (t0 + j) * C::CHANNELS + s.channel;
                const int vector = (t0 + j) * C::WIDTH + s.lane * STATES;
                float B[STATES], Cm[STATES];
                load_vector(B, s.cell(C::F_B + vector));
                advance(h, A, B, s.value(C::F_DELTA + cell), s.value(C::F_U + cell));
                y[j] = 0.0f;
                if (!p.y) continue;
                load_vector(Cm, s.cell(C::F_C + vector));
                GT_UNROLL
                for (int i = 0; i < STATES; i++) y[j] = fma_rn(h[i], Cm[i], y[j]);
            }
            if (!p.y) continue;
            reduce_scatter<4, LANES, 1>(y, s.lane);
            const int t = t0 + s.lane / (LANES / 4);
            if (s.lane % (LANES / 4) == 0)
                sts<float>(s.cell(C::F_Y + t * C::CHANNELS + s.channel), y[0]);
        }
        sync_threads();
        if (p.y) finish_y(p, s, first, tokens, skipped);
        sync_threads();
    }
    if (p.state_out && !skipped) store_state(in, s, p.state_out + row * DN, h);
}

/* ---- backward, any size ----------------------------------------------------------------------------------
 * grid and block as forward.  A block walks the sequence backwards, one checkpoint at a time: it rolls
 * h forward through the leaves of LEAF tokens, parks the state before each in a scratch of its own
 * (global, small enough to stay in L2), then goes back through them; in each it first rolls h through
 * the tokens once more, keeping the state before every token in shared memory.
 * registers: h, A, G and the sum for dA, STATES values each.
 * shared: u, Delta, its slope, dy and three sums [LEAF][CHANNELS], B, C, the states [LEAF][STATES] of
 * every thread, the warps' shares of dB and dC: 56 KB at N = 16.
 * arithmetic per token and state: about 75 instructions, three of them ex2.
 * bytes per token and channel, bf16: u, dt twice, dy, (z,) du, ddt (, dz) 2 each, B and C 6 N / CHANNELS,
 * shares of dB and dC 8 N / CHANNELS.
 * All sums are in fixed order: deterministic. */
struct BackwardParams {
    Problem in;
    const float *checkpoints, *dstate_out;
    float* scratch; /* [blocks,LEAVES,STATES/4,128] float4 */
    float* dstate_in;
    void *du, *ddt, *dz;
    gt_stride du_at, ddt_at, dz_at;
    float *dB, *dC;        /* [B,T,G,tiles,N] or NULL */
    float *dA;             /* [B,D,N] or NULL */
    float *dskip, *dbias;  /* [B,128/CHANNELS,D] or NULL */
};

/* What a thread sums for the parameters over the whole sequence. */
template <int STATES>
struct ParameterSums {
    float dA[STATES] = {}, dskip = 0.0f, dbias = 0.0f;
};

/* Moves STATES values of every thread as float4. */
template <int STATES>
GT_DEV void park(float4* to, const float (&h)[STATES]) {
    GT_UNROLL
    for (int i = 0; i < STATES; i += 4)
        stg<float4>(to + i / 4 * THREADS + thread_id(), float4{h[i], h[i + 1], h[i + 2], h[i + 3]});
}

template <int STATES>
GT_DEV void unpark(const float4* from, float (&h)[STATES]) {
    GT_UNROLL
    for (int i = 0; i < STATES; i += 4) {
        const float4 v = ldg<float4>(from + i / 4 * THREADS + thread_id());
        h[i] = v.x, h[i + 1] = v.y, h[i + 2] = v.z, h[i + 3] = v.w;
    }
}

/* Shared cell of the thread's state elements 4 i .. 4 i + 3 before token t of the leaf. */
template <class C>
GT_DEV uint32_t state_cell(const Place<C>& s, int t, int i) {
    return s.cell(C::STATE + ((t * C::STATES / 4 + i) * THREADS + thread_id()) * 4);
}

/* u, Delta and B of a leaf; if BACKWARD also the slope, C, and dy without the gate.  The loads of
 * channels are in flight while B and C are staged. */
template <bool BACKWARD, class C>
GT_DEV void stage_leaf(const Problem& in, const Place<C>& s, int64_t first, int tokens) {
    using Part = Tile<C::LEAF, C::CHANNELS, THREADS>;
    Part u, dt, dy, z;
    u.load(channel_rows(in, s, in.u, in.u_at, first, tokens));
    dt.load(dt_rows(in, s, first, tokens));
    if constexpr (BACKWARD) {
        dy.load(channel_rows(in, s, in.dy, in.dy_at, first, tokens));
        if (in.z) z.load(channel_rows(in, s, in.z, in.z_at, first, tokens));
        stage<C::LEAF, C::WIDTH, THREADS>(s.cell(C::C),
                                          group_rows(in, s, in.Cm, in.Cm_at, first, tokens));
    }
    stage<C::LEAF, C::WIDTH, THREADS>(s.cell(C::B),
                                      group_rows(in, s, in.Bm, in.Bm_at, first, tokens));
    u.store(s.cell(C::U));
    store_delta<BACKWARD>(in, s, dt, tokens, C::DELTA, C::SLOPE);
    if constexpr (BACKWARD) {
        GT_UNROLL
        for (int k = 0; k < Part::COUNT; k++) {
            const float dout = dy.value(k);
            if (Part::index(k) < Part::SIZE)
                sts<float>(s.cell(C::DY + Part::index(k)), in.z ? dout * silu(z.value(k)) : dout);
        }
    }
}

/* Rolls h through the staged leaf; keeps the state before every token if asked. */
template <class C, bool KEEP>
GT_DEV void roll_leaf(const Place<C>& s, const float (&A)[C::STATES], float (&h)[C::STATES]) {
    for (int t = 0; t < C::LEAF; t++) {
        if constexpr (KEEP) {
            GT_UNROLL
            for (int i = 0; i < C::STATES; i += 4)
                sts<float4>(state_cell(s, t, i / 4), float4{h[i], h[i + 1], h[i + 2], h[i + 3]});
        }
        const int cell = t * C::CHANNELS + s.channel;
        float B[C::STATES];
        load_vector(B, s.cell(C::B + t * C::WIDTH + s.lane * C::STATES));
        advance(h, A, B, s.value(C::DELTA + cell), s.value(C::U + cell));
    }
}

/* One token backwards: G from after it to before it, its sums over n to SUMS, the warp's shares of dB
 * and dC to SHARES, the gradient of A added to dA. */
template <class C>
GT_DEV void token_backward(const Place<C>& s, const float (&A)[C::STATES], int t,
                           float (&G)[C::STATES], float (&dA)[C::STATES]) {
    constexpr int STATES = C::STATES, HELD = C::WIDTH / 16; /* shares that end in one lane */
    const int cell = t * C::CHANNELS + s.channel, vector = t * C::WIDTH + s.lane * STATES;
    const float delta = s.value(C::DELTA + cell), dy = s.value(C::DY + cell);
    const float w = delta * s.value(C::U + cell);
    float shares[2 * STATES], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f}; /* <g,B>, <A,da>, <h,C> */
    GT_UNROLL
    for (int i = 0; i < STATES; i += 4) {
        float B[4], Cm[4], before[4];
        load_vector(B, s.cell(C::B + vector + i));
        load_vector(Cm, s.cell(C::C + vector + i));
        load_vector(before, state_cell(s, t, i / 4));
        GT_UNROLL
        for (int e = 0; e < 4; e++) {
            const Scale scale = scale_of_log(delta * A[i + e]);
            const float kept = rescale(scale.keep, scale.factor, before[e], 0.0f);
            const float h = fma_rn(w, B[e], kept), g = fma_rn(dy, Cm[e], G[i + e]), da = g * kept;
            sums[0] = fma_rn(g, B[e], sums[0]);
            sums[1] = fma_rn(A[i + e], da, sums[1]);
            sums[2] = fma_rn(h, Cm[e], sums[2]);
            dA[i + e] = fma_rn(delta, da, dA[i + e]);
            shares[i + e] = w * g;
            shares[STATES + i + e] = dy * h;
            G[i + e] = rescale(scale.keep, scale.factor, g, 0.0f);
        }
    }
    reduce_scatter<4, C::LANES, 1>(sums, s.lane);
    const int which = s.lane / (C::LANES / 4);
    if (which < 3 && s.lane % (C::LANES / 4) == 0)
        sts<float>(s.cell(C::SUMS + which * C::CELLS + cell), sums[0]);
    const int neighbour = lane_id() / C::LANES;
    reduce_scatter<2 * STATES, 32 / C::LANES, C::LANES>(shares, neighbour);
    GT_UNROLL
    for (int i = 0; i < HELD; i++) {
        const int value = neighbour * HELD + i;
        const int n = s.lane * STATES + value % STATES;
        const int to = (warp_id() * C::LEAF + t) * 2 * C::WIDTH + value / STATES * C::WIDTH + n;
        sts<float>(s.cell(C::SHARES + to), shares[i]);
    }
}

/* du, ddt and dz of a leaf, from SUMS. */
template <class C>
GT_DEV void finish_channels(const BackwardParams& p, const Place<C>& s, int64_t first, int tokens,
                            ParameterSums<C::STATES>& sums) {
    using Part = Tile<C::LEAF, C::CHANNELS, THREADS>;
    const Problem& in = p.in;
    Part z, dout;
    if (p.dz) {
        z.load(channel_rows(in, s, in.z, in.z_at, first, tokens));
        dout.load(channel_rows(in, s, in.dy, in.dy_at, first, tokens));
    }
    float dskip = 0.0f, dbias = 0.0f;
    GT_UNROLL
    for (int k = 0; k < Part::COUNT; k++) {
        const int t = Part::row(k), c = Part::column(k), i = Part::index(k);
        if (t >= tokens || c >= s.channels) continue;
        const int64_t d = s.d0 + c;
        const float skip = in.Dskip ? in.Dskip[d] : 0.0f;
        const float u = s.value(C::U + i), dy = s.value(C::DY + i), delta = s.value(C::DELTA + i);
        const float gB = s.value(C::SUMS + i), slope = s.value(C::SLOPE + i);
        /* the slope first: the sum without it may overflow */
        float ddt = fma_rn(slope, s.value(C::SUMS + C::CELLS + i), slope * u * gB);
        if (slope == 0.0f) ddt = 0.0f;
        dskip = fma_rn(dy, u, dskip);
        dbias += ddt;
        if (p.du)
            store_as(p.du, in.dtype, at(p.du_at, s.b, first + t, d), fma_rn(delta, gB, skip * dy));
        if (p.ddt) store_as(p.ddt, in.dt_dtype, at(p.ddt_at, s.b, first + t, d), ddt);
        if (p.dz)
            store_as(p.dz, in.dtype, at(p.dz_at, s.b, first + t, d),
                     dout.value(k) * fma_rn(skip, u, s.value(C::SUMS + 2 * C::CELLS + i)) *
                         dsilu(z.value(k)));
    }
    sums.dskip += dskip;
    sums.dbias += dbias;
}

/* The block's shares of dB and dC for a leaf: the sums over its warps. */
template <class C>
GT_DEV void finish_group(const BackwardParams& p, const Place<C>& s, int64_t first, int tokens) {
    const Problem& in = p.in;
    for (int i = thread_id(); i < tokens * 2 * C::WIDTH; i += THREADS) {
        const int t = i / (2 * C::WIDTH), n = i % C::WIDTH;
        float* out = i % (2 * C::WIDTH) < C::WIDTH ? p.dB : p.dC;
        if (!out || n >= in.N) continue;
        float sum = 0.0f;
        for (int w = 0; w < 4; w++) sum += s.value(C::SHARES + w * C::LEAF * 2 * C::WIDTH + i);
        out[(((s.b * in.T + first + t) * in.G + s.g) * in.tiles + s.tile) * in.N + n] = sum;
    }
}

template <class C>
GT_DEV void store_parameters(const BackwardParams& p, const Place<C>& s,
                             const ParameterSums<C::STATES>& sums) {
    const Problem& in = p.in;
    if (p.dA) store_state(in, s, p.dA + s.b * in.D * in.N, sums.dA);
    const int c = thread_id() % C::CHANNELS, part = thread_id() / C::CHANNELS;
    if (c >= s.channels) return;
    const int64_t to = (s.b * C::LANES + part) * in.D + s.d0 + c;
    if (p.dskip) p.dskip[to] = sums.dskip;
    if (p.dbias) p.dbias[to] = sums.dbias;
}

template <int LANES, int STATES>
GT_KERNEL(128, 2) backward_kernel(const GT_GRID_CONSTANT BackwardParams p) {
    using C = Traits<LANES, STATES>;
    const Problem& in = p.in;
    const Place<C> s(in);
    const int64_t DN = in.D * in.N, chunks = checkpoints_of(in.T);
    constexpr int PARKED = STATES / 4 * THREADS; /* float4 of a state */
    float4* parked = reinterpret_cast<float4*>(p.scratch) + (int64_t)block_x() * C::LEAVES * PARKED;

    float A[STATES], G[STATES], h[STATES];
    ParameterSums<STATES> sums;
    load_state(in, s, in.A, A);
    load_state(in, s, p.dstate_out ? p.dstate_out + s.b * DN : nullptr, G);
    for (int64_t chunk = chunks - 1; chunk >= 0; chunk--) {
        const int64_t start = chunk * CHECKPOINT;
        const int64_t left = in.T - start < CHECKPOINT ? in.T - start : CHECKPOINT;
        const int leaves = (int)((left + C::LEAF - 1) / C::LEAF);
        float dA[STATES] = {};
        load_state(in, s, p.checkpoints + (s.b * chunks + chunk) * DN, h);
        for (int leaf = 0; leaf < leaves; leaf++) { /* forwards: h before each leaf */
            park(parked + leaf * PARKED, h);
            if (leaf + 1 == leaves) break;
            stage_leaf<false>(in, s, start + leaf * C::LEAF, C::LEAF);
            sync_threads();
            roll_leaf<C, false>(s, A, h);
            sync_threads();
        }
        for (int leaf = leaves - 1; leaf >= 0; leaf--) { /* backwards: G after each leaf */
            const int64_t first = start + leaf * C::LEAF;
            const int tokens = (int)(in.T - first < C::LEAF ? in.T - first : C::LEAF);
            stage_leaf<true>(in, s, first, tokens);
            unpark(parked + leaf * PARKED, h);
            sync_threads();
            roll_leaf<C, true>(s, A, h);
            for (int t = C::LEAF - 1; t >= 0; t--) token_backward(s, A, t, G, dA);
            sync_threads();
            finish_channels(p, s, first, tokens, sums);
            finish_group(p, s, first, tokens);
            sync_threads();
        }
        GT_UNROLL
        for (int i = 0; i < STATES; i++) sums.dA[i] += dA[i];
    }
    store_parameters(p, s, sums);
    if (p.dstate_in) store_state(in, s, p.dstate_in + s.b * DN, G);
}

/* ---- launchers -------------------------------------------------------------------------------------------- */

static inline Problem problem_of(const gt_selective_scan_args& a) {
    Problem in = {};
    in.B = a.B, in.T = a.T, in.D = a.D, in.G = a.G;
    in.N = (int)a.N;
    in.dtype = a.dtype, in.dt_dtype = a.dt_dtype;
    in.rule.softplus = a.softplus;
    in.u = a.u, in.dt = a.dt, in.Bm = a.Bm, in.Cm = a.Cm, in.z = a.z, in.dy = a.dy;
    in.A = a.A, in.Dskip = a.Dskip, in.dt_bias = a.dt_bias;
    in.u_at = a.u_stride, in.dt_at = a.dt_stride, in.Bm_at = a.Bm_stride, in.Cm_at = a.Cm_stride;
    in.z_at = a.z_stride, in.dy_at = a.dy_stride;
    return in;
}

/* The variant that handles N, and what it fixes. */
struct Variant {
    int64_t lanes, states, leaves, tiles;
};

template <class C>
static inline Variant variant_with(const gt_selective_scan_args& a) {
    return {C::LANES, C::STATES, C::LEAVES, (a.D / a.G + C::CHANNELS - 1) / C::CHANNELS};
}

static inline Variant variant_of(const gt_selective_scan_args& a) {
    if (a.N <= 16) return variant_with<Traits<4, 4>>(a);
    if (a.N <= 32) return variant_with<Traits<8, 4>>(a);
    if (a.N <= 64) return variant_with<Traits<16, 4>>(a);
    if (a.N <= 128) return variant_with<Traits<16, 8>>(a);
    return variant_with<Traits<32, 8>>(a);
}

template <int LANES, int STATES>
static gt_status launch_forward_with(const ForwardParams& p, gt_stream stream) {
    return run("selective_scan forward_kernel", forward_kernel<LANES, STATES>,
               p.in.B * p.in.G * p.in.tiles, THREADS, 4 * Traits<LANES, STATES>::FORWARD_END,
               stream, p);
}

static inline gt_status launch_forward(const ForwardParams& p, gt_stream stream) {
    if (p.in.N <= 16) return launch_forward_with<4, 4>(p, stream);
    if (p.in.N <= 32) return launch_forward_with<8, 4>(p, stream);
    if (p.in.N <= 64) return launch_forward_with<16, 4>(p, stream);
    if (p.in.N <= 128) return launch_forward_with<16, 8>(p, stream);
    return launch_forward_with<32, 8>(p, stream);
}

template <int LANES, int STATES>
static gt_status launch_backward_with(const BackwardParams& p, gt_stream stream) {
    return run("selective_scan backward_kernel", backward_kernel<LANES, STATES>,
               p.in.B * p.in.G * p.in.tiles, THREADS, 4 * Traits<LANES, STATES>::BACKWARD_END,
               stream, p);
}

static inline gt_status launch_backward_kernel(const BackwardParams& p, gt_stream stream) {
    if (p.in.N <= 16) return launch_backward_with<4, 4>(p, stream);
    if (p.in.N <= 32) return launch_backward_with<8, 4>(p, stream);
    if (p.in.N <= 64) return launch_backward_with<16, 4>(p, stream);
    if (p.in.N <= 128) return launch_backward_with<16, 8>(p, stream);
    return launch_backward_with<32, 8>(p, stream);
}

static inline int64_t checkpoint_count(const gt_selective_scan_args& a) {
    return a.B * checkpoints_of(a.T) * a.D * a.N;
}

/* The pieces of backward's workspace. */
struct BackwardPlan {
    BackwardParams params;
    float *checkpoints, *dstate_sum;
    int64_t rows; /* of dskip and dbias */
    size_t bytes;
};

static inline BackwardPlan plan_backward(const gt_selective_scan_args& a) {
    BackwardPlan plan = {};
    BackwardParams& p = plan.params;
    Arena arena(a.workspace);
    const Variant v = variant_of(a);
    const int64_t blocks = a.B * a.G * v.tiles;
    p.in = problem_of(a);
    p.in.tiles = v.tiles;
    plan.rows = a.B * v.lanes;
    if (!a.saved) plan.checkpoints = arena.take<float>(checkpoint_count(a));
    p.scratch = arena.take<float>(blocks * v.leaves * v.states * THREADS);
    if (a.dBm) p.dB = arena.take<float>(blocks * a.T * a.N);
    if (a.dCm) p.dC = arena.take<float>(blocks * a.T * a.N);
    if (a.dA) p.dA = arena.take<float>(a.B * a.D * a.N);
    if (a.dDskip) p.dskip = arena.take<float>(plan.rows * a.D);
    if (a.ddt_bias) p.dbias = arena.take<float>(plan.rows * a.D);
    if (a.dstate_in && a.state_in_shared) plan.dstate_sum = arena.take<float>(a.B * a.D * a.N);
    plan.bytes = arena.bytes();
    return plan;
}

static inline gt_status recompute_checkpoints(const gt_selective_scan_args& a, BackwardPlan& plan,
                                              gt_stream stream) {
    ForwardParams f = {};
    f.in = plan.params.in;
    f.state_in = a.state_in;
    f.state_in_shared = a.state_in_shared;
    f.checkpoints = plan.checkpoints;
    plan.params.checkpoints = plan.checkpoints;
    return launch_forward(f, stream);
}

static inline gt_status sum_tiles(const gt_selective_scan_args& a, const char* name, int64_t tiles,
                                  const float* shares, void* out, gt_stride out_at,
                                  gt_stream stream) {
    if (!out) return GT_OK;
    return group_sum(name, {shares, out, a.dtype, out_at, a.B, a.T, a.G, tiles, (int)a.N}, stream);
}

static inline gt_status launch_backward(const gt_selective_scan_args& a, BackwardPlan& plan,
                                        gt_stream stream) {
    BackwardParams& p = plan.params;
    const bool shared = a.dstate_in && a.state_in_shared;
    gt_status status;
    size_t bytes;
    p.checkpoints = floats_in(a.saved, checkpoint_count(a), &bytes);
    if (!a.saved && (status = recompute_checkpoints(a, plan, stream)) != GT_OK) return status;
    p.dstate_out = a.dstate_out;
    p.dstate_in = shared ? plan.dstate_sum : a.dstate_in;
    p.du = a.du, p.ddt = a.ddt, p.dz = a.dz;
    p.du_at = a.du_stride, p.ddt_at = a.ddt_stride, p.dz_at = a.dz_stride;
    if ((status = launch_backward_kernel(p, stream)) != GT_OK ||
        (status = sum_tiles(a, "selective_scan dBm", p.in.tiles, p.dB, a.dBm, a.dBm_stride,
                            stream)) != GT_OK ||
        (status = sum_tiles(a, "selective_scan dCm", p.in.tiles, p.dC, a.dCm, a.dCm_stride,
                            stream)) != GT_OK)
        return status;
    if (a.dA && (status = reduce_rows(p.dA, a.dA, a.B, a.D * a.N, a.accumulate, stream)) != GT_OK)
        return status;
    if (a.dDskip &&
        (status = reduce_rows(p.dskip, a.dDskip, plan.rows, a.D, a.accumulate, stream)) != GT_OK)
        return status;
    if (a.ddt_bias &&
        (status = reduce_rows(p.dbias, a.ddt_bias, plan.rows, a.D, a.accumulate, stream)) != GT_OK)
        return status;
    return shared ? reduce_rows(plan.dstate_sum, a.dstate_in, a.B, a.D * a.N, a.accumulate, stream)
                  : GT_OK;
}

/* ---- dispatch and checks ------------------------------------------------------------------------------------ */

/* Prepares the arguments and checks what only the GPU limits. */
static inline gt_status prepare(gt_pass pass, const gt_selective_scan_args* args,
                                gt_selective_scan_args* a) {
    gt_dims dims;
    Device device;
    gt_status status = gt_prepare(gt_op_selective_scan(), pass, GT_DEVICE, args, a, &dims);
    if (status != GT_OK) return status;
    if (a->N > MAX_SIZE)
        return gt_fail(GT_ERROR_UNSUPPORTED, "N = %lld: at most %d", (long long)a->N, MAX_SIZE);
    return current_device(&device);
}

static inline gt_status forward(const gt_selective_scan_args& a, bool is_step, gt_stream stream) {
    ForwardParams p = {};
    p.in = problem_of(a);
    p.in.tiles = variant_of(a).tiles;
    p.y = a.y;
    p.y_at = a.y_stride;
    p.state_in = is_step ? a.state_out : a.state_in;
    p.state_out = a.state_out;
    size_t bytes;
    p.checkpoints = is_step ? nullptr : floats_in(a.saved, checkpoint_count(a), &bytes);
    p.state_in_shared = a.state_in_shared;
    p.is_step = is_step;
    p.slots = a.slots;
    p.slot_capacity = a.slot_capacity;
    return launch_forward(p, stream);
}

} /* namespace scan */
} /* namespace gt */

/* ==== the C functions ================================================================================= */

extern "C" {

GT_API gt_status gt_ssd_forward(const gt_ssd_args* args, gt_stream stream) {
    gt_ssd_args a;
    gt_status status = gt::ssd::prepare(GT_FORWARD, args, &a);
    if (status != GT_OK) return status;
    size_t saved;
    gt::floats_in(a.saved, gt::ssd::checkpoint_count(a), &saved);
    if ((status = gt::check_saved(a.saved, a.saved_bytes, saved)) != GT_OK) return status;
    return gt::ssd::forward(a, false, stream);
}

GT_API gt_status gt_ssd_step(const gt_ssd_args* args, gt_stream stream) {
    gt_ssd_args a;
    const gt_status status = gt::ssd::prepare(GT_STEP, args, &a);
    return status != GT_OK ? status : gt::ssd::forward(a, true, stream);
}

GT_API gt_status gt_ssd_backward(const gt_ssd_args* args, gt_stream stream) {
    gt_ssd_args a;
    gt_status status = gt::ssd::prepare(GT_BACKWARD, args, &a);
    if (status != GT_OK) return status;
    gt::ssd::BackwardPlan plan = gt::ssd::plan_backward(a);
    size_t saved;
    gt::floats_in(a.saved, gt::ssd::checkpoint_count(a), &saved);
    if ((status = gt::check_saved(a.saved, a.saved_bytes, saved)) != GT_OK ||
        (status = gt::check_workspace(a.workspace, a.workspace_bytes, plan.bytes)) != GT_OK)
        return status;
    return gt::ssd::launch_backward(a, plan, stream);
}

GT_API gt_status gt_ssd_workspace(const gt_ssd_args* args, gt_workspace* need) {
    gt_ssd_args a;
    gt_status status = gt::ssd::prepare(GT_QUERY, args, &a);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0};
    a.workspace = nullptr;
    sizes.backward = gt::ssd::plan_backward(a).bytes;
    gt::floats_in(nullptr, gt::ssd::checkpoint_count(a), &sizes.saved);
    *need = sizes;
    return GT_OK;
}

GT_API gt_status gt_selective_scan_forward(const gt_selective_scan_args* args, gt_stream stream) {
    gt_selective_scan_args a;
    gt_status status = gt::scan::prepare(GT_FORWARD, args, &a);
    if (status != GT_OK) return status;
    size_t saved;
    gt::floats_in(a.saved, gt::scan::checkpoint_count(a), &saved);
    if ((status = gt::check_saved(a.saved, a.saved_bytes, saved)) != GT_OK) return status;
    return gt::scan::forward(a, false, stream);
}

GT_API gt_status gt_selective_scan_step(const gt_selective_scan_args* args, gt_stream stream) {
    gt_selective_scan_args a;
    const gt_status status = gt::scan::prepare(GT_STEP, args, &a);
    return status != GT_OK ? status : gt::scan::forward(a, true, stream);
}

GT_API gt_status gt_selective_scan_backward(const gt_selective_scan_args* args, gt_stream stream) {
    gt_selective_scan_args a;
    gt_status status = gt::scan::prepare(GT_BACKWARD, args, &a);
    if (status != GT_OK) return status;
    gt::scan::BackwardPlan plan = gt::scan::plan_backward(a);
    size_t saved;
    gt::floats_in(a.saved, gt::scan::checkpoint_count(a), &saved);
    if ((status = gt::check_saved(a.saved, a.saved_bytes, saved)) != GT_OK ||
        (status = gt::check_workspace(a.workspace, a.workspace_bytes, plan.bytes)) != GT_OK)
        return status;
    return gt::scan::launch_backward(a, plan, stream);
}

GT_API gt_status gt_selective_scan_workspace(const gt_selective_scan_args* args,
                                             gt_workspace* need) {
    gt_selective_scan_args a;
    gt_status status = gt::scan::prepare(GT_QUERY, args, &a);
    if (status != GT_OK) return status;
    if (!need) return gt_fail(GT_ERROR_NULL, "need is NULL");
    gt_workspace sizes = {0, 0, 0, 0};
    a.workspace = nullptr;
    sizes.backward = gt::scan::plan_backward(a).bytes;
    gt::floats_in(nullptr, gt::scan::checkpoint_count(a), &sizes.saved);
    *need = sizes;
    return GT_OK;
}

} /* extern "C" */

#else

/* ---- stubs: this file was compiled without nvcc --------------------------------------------------- */

#ifdef __cplusplus
extern "C" {
#endif

GT_API gt_status gt_ssd_forward(const gt_ssd_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_ssd(), GT_FORWARD);
}
GT_API gt_status gt_ssd_backward(const gt_ssd_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_ssd(), GT_BACKWARD);
}
GT_API gt_status gt_ssd_step(const gt_ssd_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_ssd(), GT_STEP);
}
GT_API gt_status gt_ssd_workspace(const gt_ssd_args *args, gt_workspace *need) {
    (void)args, (void)need;
    return gt_no_cuda(gt_op_ssd(), GT_QUERY);
}

GT_API gt_status gt_selective_scan_forward(const gt_selective_scan_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_selective_scan(), GT_FORWARD);
}
GT_API gt_status gt_selective_scan_backward(const gt_selective_scan_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_selective_scan(), GT_BACKWARD);
}
GT_API gt_status gt_selective_scan_step(const gt_selective_scan_args *args, gt_stream stream) {
    (void)args, (void)stream;
    return gt_no_cuda(gt_op_selective_scan(), GT_STEP);
}
GT_API gt_status gt_selective_scan_workspace(const gt_selective_scan_args *args,
                                             gt_workspace *need) {
    (void)args, (void)need;
    return gt_no_cuda(gt_op_selective_scan(), GT_QUERY);
}

#ifdef __cplusplus
}
#endif

#endif /* kernels or stubs */

#include "gt_kernels.h" /* the rest of the implementation, if this file is to hold it */

#endif /* GT_SSM_CUH */
