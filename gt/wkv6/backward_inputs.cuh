/* gt/wkv6/backward_inputs.cuh - the first half of the kernel that computes the gradients of a chunk.  backward.cuh
 * explains the kernel and its symbols.  This file has the compile-time traits, the layout of shared memory, the copies
 * of inputs, and the factors R, K, E. */
#ifndef GT_WKV6_BACKWARD_INPUTS_CUH
#define GT_WKV6_BACKWARD_INPUTS_CUH

#include "../base/tile.cuh"
#include "pass.cuh"

namespace gt {
namespace wkv6 {

/* ---- parameters, and how the kernel is compiled ------------------------------------------------------------- */

enum { OF_R, OF_K, OF_W, OF_V, OF_DY, OF_DR, OF_DK, OF_DW, OF_DV, TENSORS };

struct BackwardParams {
    struct Tensor {
        void* data;
        gt_stride stride; /* tokens are less than 2^31 bytes apart */
        int element;      /* bytes */
    } tensors[TENSORS];
    Divider heads, H; /* dividers by B*H and by H */
    int chunk_slots;
    bool G_in_outputs; /* see TensorParams::G_rows */
    Sequences sequences;
    bool raw;                /* decay = exp(-exp(w)) */
    float scale, log2_scale; /* scale of y: see backward.cuh */
    /* Whether the first blocks process the last chunk of every sequence.  Its G is 0, so these blocks do not wait for
     * the reverse state pass.  They run beside that pass, on multiprocessors that the pass leaves free.  All other
     * blocks wait. */
    bool last_first;
    const float* u;
    const void* S_checkpoints; /* [B,H,chunk slots,N,V] */
    const void* G_checkpoints; /* [B,H,chunk slots,N,V].  With G_in_outputs: [sequences,H,N,V], for the last chunk of
                                * a sequence if its G is not in outputs */
    const float* rowsums;      /* bf16 only: [B,H,chunk slots,SUMS,ROWSUM_PARTS,N], see StatePart::store_rowsums() */
    float* du;                 /* [B,chunk slots,H,N] or NULL */
    const float* G_inverse;    /* f16 only: [B,H,chunk slots,G_PARTS,N], RowScale::inverse of each part of a row of G */
};

static inline BackwardParams tensor_chunks_of(const gt_wkv6_args& a) {
    BackwardParams p = {};
    const int size = size_of(a.dtype), w_size = size_of(a.w_dtype);
    const BackwardParams::Tensor tensors[] = {{const_cast<void*>(a.r), a.r_stride, size},
                                              {const_cast<void*>(a.k), a.k_stride, size},
                                              {const_cast<void*>(a.w), a.w_stride, w_size},
                                              {const_cast<void*>(a.v), a.v_stride, size},
                                              {const_cast<void*>(a.dy), a.dy_stride, size},
                                              {a.dr, a.dr_stride, size},
                                              {a.dk, a.dk_stride, size},
                                              {a.dw, a.dw_stride, w_size},
                                              {a.dv, a.dv_stride, size}}; /* OF_R to OF_DV */
    for (int i = 0; i < TENSORS; i++) p.tensors[i] = tensors[i];
    p.heads = divide_by((int)(a.B > 0 ? a.B * a.H : 1)), p.H = divide_by((int)a.H);
    p.chunk_slots = (int)chunk_slots_of(a);
    p.sequences = sequences_of(a);
    p.raw = a.decay == GT_DECAY_RAW;
    p.scale = a.scale, p.log2_scale = log2f(a.scale);
    p.u = a.u;
    return p;
}

/* CHANNELS_ is the number of channels in a slice.  N = 128 has slices of 128, 64 or 32 channels: see slice_channels()
 * in path.cuh. */
template <class T_, class W_, int N_, int CHANNELS_ = N_>
struct BackwardTraits {
    using T = T_;
    using W = W_;
    using State = StateOf<T>;
    using Gradient = GradientOf<T>;
    static constexpr bool TF32X3 = std::is_same<T, float>::value; /* fp32: three tf32 products for each one */
    static constexpr bool ROUNDED = std::is_same<T, f16>::value;  /* round_states() rounds S from fp32 to f16 */
    static constexpr bool KEEPS_BF16 = std::is_same<State, bf16>::value;
    static constexpr int SIZE = sizeof(T); /* bytes of an element of v, dy, S or G */
    static constexpr int N = N_, CHANNELS = CHANNELS_;
    static constexpr int SLICES = N / CHANNELS, GROUPS = CHANNELS / 16;
    /* With more than two slices, G of the second slice would not lie in dk. */
    static constexpr bool G_IN_OUTPUTS = G_FITS_OUTPUTS<T, N> && SLICES <= 2;
    /* Rows of S or G that one copy_state() copies; G of these rows lies in one output. */
    static constexpr int STATE_ROWS = CHANNELS < 64 ? CHANNELS : 64;
    static constexpr int TILES = CHANNELS / 8, VALUE_TILES = N / 8;
    static constexpr int THREADS = 2 * 32 * SUB_CHUNKS;
    static constexpr bool PAIRED = !TF32X3 && N > 32; /* where pairing warps is faster: see makes_dv() */
    static_assert(!PAIRED || SUB_CHUNKS == 4, "sub_chunk_of_warp()");
    /* Blocks per multiprocessor.  Three blocks would make the f16 kernel spill. */
    static constexpr int BLOCKS = N == 128 ? 1 : N == 32 && sizeof(State) == 2 ? 3 : 2;
    /* Outside the products a thread has 2 channels of PART tokens, and a warp has half of a slice's channels of a
     * sub-chunk. */
    static constexpr int LANES = CHANNELS / 4, SUB_CHUNK_PARTS = 32 / LANES, PART = SUB_CHUNK / SUB_CHUNK_PARTS;
    static constexpr int FP32_ROWS = 4 * CHECKPOINT * CHANNELS;
    static constexpr int PER_SUB_CHUNK = 4 * SUB_CHUNKS * CHANNELS; /* bytes of an fp32 array [SUB_CHUNKS,CHANNELS] */
    /* Offsets in bytes. */
    static constexpr int R = 0, K = R + FP32_ROWS;
    static constexpr int RAW_ROWS = 2 * CHECKPOINT * CHANNELS; /* r, k or w as loaded, 16 bits; fp32 has no room */
    static constexpr int RAW_R = K + FP32_ROWS, RAW_K = RAW_R + (TF32X3 ? 0 : RAW_ROWS);
    static constexpr int RAW_W = RAW_K + (TF32X3 ? 0 : RAW_ROWS);
    static constexpr int VALUES = RAW_W + (sizeof(W) == 2 ? RAW_ROWS : 0);
    static constexpr int DY = VALUES + SIZE * CHECKPOINT * N;
    static constexpr int S = DY + SIZE * CHECKPOINT * N, G = TF32X3 ? S : S + SIZE * CHANNELS * N;
    static constexpr int STATES_END = G + SIZE * CHANNELS * N;
    /* X and Z are stored after the products, over v, dy, S and G, or with N = 128 over S and G alone. */
    static constexpr int X = N == 128 ? S : VALUES, Z = X + FP32_ROWS;
    static constexpr int E = STATES_END > Z + FP32_ROWS ? STATES_END : Z + FP32_ROWS;
    static constexpr int GROWTH = E + PER_SUB_CHUNK;     /* 2^c_16 */
    static constexpr int FIRST = GROWTH + PER_SUB_CHUNK; /* sum_i R_i (S dy_i) */
    static constexpr int DU = FIRST + PER_SUB_CHUNK;
    static constexpr int G_PARTS = StatesTraits<T, W, N>::PARTS; /* parts of a row of G in the reverse state pass */
    static constexpr int ROWSUM_PARTS = KEEPS_BF16 ? G_PARTS : 1;
    static constexpr int SUB_CHUNK_SUMS = DU + PER_SUB_CHUNK; /* sums of dg over sub-chunks */
    static constexpr int SUMS = KEEPS_BF16 ? REVERSE_SUMS : 1, SUM_PARTS = SUMS * ROWSUM_PARTS;
    static constexpr int ROWSUM = SUB_CHUNK_SUMS + PER_SUB_CHUNK, U = ROWSUM + 4 * SUM_PARTS * N;
    static constexpr int BONUS = U + 4 * N;             /* [64,2] */
    static constexpr int NEAR = BONUS + 8 * CHECKPOINT; /* [64+1]: C_tt, C_(t,t-1) */
    static constexpr int S_SCALE = NEAR + 8 * (CHECKPOINT + 2), G_SCALE = S_SCALE + (ROUNDED ? 4 * CHANNELS : 0);
    static constexpr int ADDRESSES = G_SCALE + (ROUNDED ? 4 * CHANNELS : 0); /* where the chunk begins in each tensor */
    static constexpr int TOKENS = ADDRESSES + 8 * TENSORS, DU_ROW = TOKENS + 4, STRONG_DECAY = DU_ROW + 4;
    static constexpr int FLAGS_END = STRONG_DECAY + 4 * 2 * SUB_CHUNKS;
    /* Products C of pairs of sub-chunks.  fp32 stores all 10 pairs.  16-bit types store only the 4 pairs of a sub-chunk
     * with itself, and only on the strong-decay path. */
    static constexpr int C_FRAGMENTS = TF32X3 ? FLAGS_END : RAW_R;
    static constexpr int C_END = TF32X3 ? C_FRAGMENTS + 10 * 4 * SUB_CHUNK * SUB_CHUNK : FLAGS_END;
    static constexpr int S_READ = C_END, G_HERE = S_READ + 8; /* mbarriers with one phase per slice */
    /* The block's index of work lies here, since no register is left for it. */
    static constexpr int WORK = G_HERE + 8;
    static constexpr bool KEEPS_WORK = BLOCKS == 3;
    /* LARGE: one block fills its multiprocessor.  No other block works while this block waits, but a thread has 255
     * registers.  So a thread can keep the operands TwoTerms and SubChunkRows in registers (backward_products.cuh).
     * SUMS_A: the kernel also sums A of two sub-chunks over all slices before it multiplies A by dy. */
    static constexpr bool LARGE = N == 128 && KEEPS_BF16, SUMS_A = LARGE && SLICES > 1;
    static constexpr int KEPT_A = WORK + 16, SMEM = KEPT_A + (SUMS_A ? 6 * 4 * SUB_CHUNK * SUB_CHUNK : 0);
    static_assert(KEPT_A % 16 == 0, "read by 16 bytes");
    static_assert(STRONG_DECAY % 16 == 0 && NEAR % 16 == 0 && DU % 16 == 0, "read by 16 bytes");
    /* Limits of is_strong(), for raw decays; h is -log2 of a token's decay.  A strong token has h > STRONG.  The
     * sub-chunk is strong if the h of all other tokens add up to less than STRONG_SHARE of the largest h. */
    static constexpr float STRONG = TF32X3 ? 5.0f : 8.0f, STRONG_SHARE = TF32X3 ? 1.0f / 8 : 1.0f / 64;
    /* On the strong-decay path two other arrays take the place of 2^c_16 and of the sums of dg, which that path does
     * not use. */
    static constexpr int STRONG_DECAY_ENDS = SUB_CHUNK_SUMS, STRONG_DECAY_BEGINS = GROWTH;
    static_assert(SUB_CHUNKS >= 3 && (TF32X3 || VALUES - RAW_R >= 4 * SUB_CHUNKS * SUB_CHUNK * SUB_CHUNK),
                  "room for the strong-decay path");
    static constexpr uint32_t MINUS_INFINITIES = std::is_same<W, bf16>::value ? 0xff80ff80u : 0xfc00fc00u;
    static_assert(CHANNELS < 128 || LARGE, "G and the strong-decay path of others are by slices");
    static_assert(SMEM <= (CHANNELS == 128 ? HOPPER_KB
                           : SLICES == 2   ? AMPERE_KB
                                           : LEAST_KB) *
                              1024,
                  "as slice_channels() has it");
};

template <class C>
struct BackwardBlock {
    uint32_t smem;
    int index;     /* index of the chunk in [B,H,chunk slots] */
    int G_index;   /* index of the chunk's G in G_checkpoints; negative: G is in outputs */
    int sub_chunk; /* the warp's sub-chunk in the products */
    int slice0;    /* first channel of the slice */
    int g, j;      /* lane / 4, lane % 4 */

    GT_METHOD int tokens() const { return lds<int>(smem + C::TOKENS); } /* tokens of the chunk */

    /* In the products one warp computes dv of a sub-chunk, and another warp computes X and Z of that sub-chunk.  dv
     * takes longest for the first sub-chunk and shortest for the last.  PAIRED: warps w and w + 4 share a scheduler and
     * its instruction cache.  So both run the same code, and their times balance: one has sub-chunk 0 or 1, the other 3
     * or 2. */
    GT_METHOD static bool makes_dv() { return C::PAIRED ? warp_id() & 2 : warp_id() < SUB_CHUNKS; }
    GT_METHOD static int sub_chunk_of_warp() {
        if (!C::PAIRED) return warp_id() % SUB_CHUNKS;
        return warp_id() < 4 ? warp_id() & 1 : 3 - (warp_id() & 1);
    }
};

/* ---- the chunk of a block, and where its tensors lie -------------------------------------------------------- */

/* The chunk at an index of work.  chunk.sequence < 0 means that there is no chunk. */
struct ChunkCoordinates {
    int b, h, slot;
    int index;     /* index of the chunk in [B,H,chunk slots] */
    int G_index;   /* index of the chunk's G in G_checkpoints; negative: G is in outputs */
    bool is_early; /* see BackwardParams::last_first */
    gt_chunk chunk;

    GT_METHOD int tokens() const { return (int)(chunk.last - chunk.first); }
};

template <class C>
GT_DEV ChunkCoordinates find_chunk(const BackwardParams& p, int work) {
    ChunkCoordinates at;
    int head; /* b * H + h */
    at.slot = divide(work, p.heads, &head);
    at.is_early = C::KEEPS_BF16 && p.last_first && at.slot == 0;
    if (C::KEEPS_BF16 && p.last_first) at.slot = (at.slot ? at.slot : p.chunk_slots) - 1;
    at.b = divide(head, p.H, &at.h);
    at.index = head * p.chunk_slots + at.slot;
    at.chunk = chunk_at(p.sequences, CHECKPOINT, at.slot);
    at.G_index = at.index;
    if (p.G_in_outputs) { /* b or sequence is 0, so their sum is the index of the sequence */
        const int sequence = at.b + (int)at.chunk.sequence;
        at.G_index = at.tokens() == CHECKPOINT ? -1 : sequence * p.H.divisor + at.h;
    }
    return at;
}

/* Returns whether packed sequences have a chunk slot at this index of work. */
GT_DEV bool has_chunk(const BackwardParams& p, int64_t work) {
    return work < (int64_t)p.heads.divisor * used_slots(p.sequences, CHECKPOINT);
}

/* One warp stores three things: the address of the chunk's first token in every tensor, the number of tokens, and the
 * chunk's row of p.du.  Later phases load these values from shared memory, because registers are short. */
template <class C>
GT_DEV void store_addresses(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkCoordinates& here) {
    const int i = lane_id();
    if (i == TENSORS) {
        sts<int>(me.smem + C::TOKENS, here.tokens());
        sts<int>(me.smem + C::DU_ROW, (here.b * p.chunk_slots + here.slot) * p.H.divisor + here.h);
    }
    if (i >= TENSORS) return;
    const BackwardParams::Tensor& x = p.tensors[i];
    sts<char*>(me.smem + C::ADDRESSES + 8 * i,
               static_cast<char*>(x.data) + offset_of(x.stride, here.b, here.chunk.first, here.h) * x.element);
}

/* Returns the address of token t of the chunk in a tensor. */
template <class T, class C>
GT_DEV T* row_of(const BackwardParams& p, const BackwardBlock<C>& me, int tensor, int t) {
    const int bytes = (int)p.tensors[tensor].stride.t * (int)sizeof(T);
    return global_pointer<T>(lds<char*>(me.smem + C::ADDRESSES + 8 * tensor) + (int64_t)t * bytes);
}

/* The same, for use before all threads can read the stored addresses. */
template <class T>
GT_DEV T* global_row(const BackwardParams& p, const ChunkCoordinates& here, int tensor, int t) {
    const BackwardParams::Tensor& x = p.tensors[tensor];
    return static_cast<T*>(x.data) + offset_of(x.stride, here.b, here.chunk.first + t, here.h);
}

/* Consecutive rows of one slice of a state, `pitch` elements apart. */
template <class State>
struct SliceRows {
    const State* data;
    int pitch;
};

template <class State, class C>
GT_DEV SliceRows<State> checkpoint_rows(const BackwardBlock<C>& me, const void* states, int index, int row = 0) {
    return {static_cast<const State*>(states) + ((int64_t)index * C::N + me.slice0 + row) * C::N, C::N};
}

/* Returns the rows of G of the chunk.  output(tensor) returns the chunk's first row in an output. */
template <class C, class Output>
GT_DEV SliceRows<typename C::Gradient> G_rows(const BackwardParams& p, const BackwardBlock<C>& me, Output&& output,
                                              int row = 0) {
    if (!C::G_IN_OUTPUTS || me.G_index >= 0)
        return checkpoint_rows<typename C::Gradient>(me, p.G_checkpoints, me.G_index, row);
    const int tensor = me.slice0 + row + C::STATE_ROWS < C::N ? OF_DK : OF_DV;
    return {output(tensor), (int)p.tensors[tensor].stride.t};
}

/* Returns the rows of G of the chunk, for use after store_addresses(). */
template <class C>
GT_DEV SliceRows<typename C::Gradient> G_rows(const BackwardParams& p, const BackwardBlock<C>& me) {
    return G_rows<C>(p, me, [&](int tensor) { return row_of<typename C::Gradient>(p, me, tensor, 0); });
}

/* ---- fragments of R, K, X, Z and of raw inputs ------------------------------------------------------------------ */

/* Offset in bytes of an element within a fragment (16 bytes): operand_in_cell() for R and K, sum_in_cell() for X and
 * Z. */
template <class C>
GT_DEV int operand_in_cell(int token, int channel) {
    return 4 * (C::TF32X3 ? 2 * (channel % 2) + token % 2 : 2 * (token % 2) + channel % 2);
}

GT_DEV int sum_in_cell(int token, int channel) { return 4 * (2 * (channel % 2) + token % 2); }

/* raw_rows() returns the address of r, k or w of the slice in shared memory.  no_token() returns the bits that a pair
 * of channels has for tokens beyond the sequence: no input and no decay. */
template <class C>
GT_DEV uint32_t raw_rows(const BackwardBlock<C>& me, int tensor) {
    return me.smem + (tensor == OF_R ? C::RAW_R : tensor == OF_K ? C::RAW_K : C::RAW_W);
}

template <class C>
GT_DEV uint32_t no_token(const BackwardParams& p, int tensor) {
    return tensor == OF_W && p.raw ? C::MINUS_INFINITIES : 0;
}

/* ---- the channels of a thread ------------------------------------------------------------------------------- */

/* The elements of a slice that a thread processes outside the products: 2 channels of PART consecutive tokens.  These
 * tokens are a part of a sub-chunk. */
template <class C>
struct ChannelPart {
    int sub_chunk, part, t0; /* part: index of the part in its sub-chunk; t0: the part's first token in the chunk */
    int channel;             /* the first of the two channels, in the slice */

    GT_METHOD void set_addresses() {
        sub_chunk = warp_id() / 2;
        part = lane_id() / C::LANES;
        t0 = SUB_CHUNK * sub_chunk + C::PART * part;
        channel = warp_id() % 2 * (C::CHANNELS / 2) + lane_id() % C::LANES * 2;
    }

    using Decays = Pair<typename C::W>[C::PART];

    /* Loads w of the part.  Tokens beyond the sequence get a value that means no decay. */
    GT_METHOD void load(const BackwardParams& p, const BackwardBlock<C>& me, Decays& w) const {
        using W = typename C::W;
        if constexpr (sizeof(W) == 2) {
            GT_UNROLL
            for (int i = 0; i < C::PART; i++)
                w[i] = lds<Pair<W>>(raw_rows(me, OF_W) + raw_offset<C::CHANNELS>(t0 + i, channel));
        } else {
            load_rows(p, row_of<W>(p, me, OF_W, t0) + me.slice0 + channel, me.tokens() - t0, w);
        }
    }

    /* Loads fp32 w.  row: w of the part's first token.  left: how many tokens exist from there on. */
    GT_METHOD void load_rows(const BackwardParams& p, const float* row, int left, Decays& w) const {
        GT_UNROLL
        for (int i = 0; i < C::PART; i++) {
            w[i].value.x = w[i].value.y = p.raw ? -INFINITY : 0.0f;
            if (i < left) w[i] = ldg<Pair<float>>(row);
            row += (int)p.tensors[OF_W].stride.t;
        }
    }

    /* Computes h, -log2 of the decays.  c: the sum of h from the sub-chunk's start to the part's start.  total: the sum
     * of h over the sub-chunk. */
    GT_METHOD void decays(const BackwardParams& p, const Decays& w, float (&h)[C::PART][2], float (&c)[2],
                          float (&total)[2]) const {
        if (p.raw) { /* this branch costs little, since all lanes take the same side */
            GT_UNROLL
            for (int i = 0; i < C::PART; i++) {
                h[i][0] = bits_of_raw(w[i].lo());
                h[i][1] = bits_of_raw(w[i].hi());
            }
        } else {
            GT_UNROLL
            for (int i = 0; i < C::PART; i++) h[i][0] = -w[i].lo() * LOG2_E, h[i][1] = -w[i].hi() * LOG2_E;
        }
        float sum[2] = {h[0][0], h[0][1]};
        GT_UNROLL
        for (int i = 1; i < C::PART; i++) sum[0] += h[i][0], sum[1] += h[i][1];
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            if constexpr (C::SUB_CHUNK_PARTS == 1) {
                total[e] = sum[e];
                c[e] = 0.0f;
            } else if constexpr (C::SUB_CHUNK_PARTS == 2) {
                const float other = shfl_xor(sum[e], 16);
                total[e] = sum[e] + other;
                c[e] = part ? other : 0.0f;
            } else {
                c[e] = scan_quads(sum[e], part, &total[e]);
            }
        }
    }

    /* Returns the limit of c_16.  For raw decays is_strong() always returns false below this limit, so most sub-chunks
     * can skip is_strong(). */
    GT_METHOD static float limit(const BackwardParams& p) { return p.raw ? C::STRONG : STRONG_DECAY_LIMIT; }

    /* Returns whether a sub-chunk takes the strong-decay path because of its raw decays.  A token that decays far more
     * than the others has a large h.  dg is a difference of sums, and the large h would multiply its rounding error. */
    GT_METHOD bool is_strong(const float (&h)[C::PART][2], const float (&total)[2]) const {
        bool strong = false;
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            float most = 0.0f, others = 0.0f;
            GT_UNROLL
            for (int i = 0; i < C::PART; i++) {
                most = fmaxf(most, h[i][e]);
                others += h[i][e] > C::STRONG ? 0.0f : h[i][e];
            }
            for (int lane = C::LANES; lane < 32; lane *= 2) {
                most = fmaxf(most, shfl_xor(most, lane));
                others += shfl_xor(others, lane);
            }
            strong |= !(total[e] < STRONG_DECAY_LIMIT) || (most > C::STRONG && others < most * C::STRONG_SHARE);
        }
        return strong;
    }
};

/* r and k of a part, read from shared memory (16 bits).  finish_part() also needs k of the token before the part, and r
 * of the token after it. */
template <class C, bool TF32X3 = C::TF32X3>
struct RawPart {
    using Raw = Pair<typename C::T>;
    const ChannelPart<C>& own;
    uint32_t r_rows, k_rows;

    GT_METHOD RawPart(const BackwardParams&, const BackwardBlock<C>& me, const ChannelPart<C>& own_)
        : own(own_), r_rows(raw_rows(me, OF_R)), k_rows(raw_rows(me, OF_K)) {}
    GT_METHOD Raw load(uint32_t rows, int t) const { return lds<Raw>(rows + raw_offset<C::CHANNELS>(t, own.channel)); }
    GT_METHOD Raw r(int i) const {
        if (i < C::PART || own.t0 + i < CHECKPOINT) return load(r_rows, own.t0 + i);
        return {};
    }
    GT_METHOD Raw k(int i) const {
        if (i >= 0 || own.t0 > 0) return load(k_rows, own.t0 + i);
        return {};
    }
};

/* r and k of a part in registers, loaded from global memory (fp32). */
template <class C>
struct RawPart<C, true> {
    using Raw = Pair<float>;
    Raw rs[C::PART + 1], ks[C::PART + 1];

    GT_METHOD RawPart(const BackwardParams& p, const BackwardBlock<C>& me, const ChannelPart<C>& own)
        : RawPart(p, own, me.tokens() - own.t0, row_of<float>(p, me, OF_R, own.t0) + me.slice0 + own.channel,
                  row_of<float>(p, me, OF_K, own.t0) + me.slice0 + own.channel) {}

    /* r_row, k_row: r and k of the part's first token.  left: how many tokens exist from there on. */
    GT_METHOD RawPart(const BackwardParams& p, const ChannelPart<C>& own, int left, const float* r_row,
                      const float* k_row) {
        ks[0].value = rs[C::PART].value = {0.0f, 0.0f};
        if (own.t0 > 0 && left >= 0) ks[0] = ldg<Raw>(k_row - (int)p.tensors[OF_K].stride.t);
        GT_UNROLL
        for (int i = 0; i < C::PART; i++) {
            rs[i].value = ks[i + 1].value = {0.0f, 0.0f};
            if (i < left) rs[i] = ldg<Raw>(r_row), ks[i + 1] = ldg<Raw>(k_row);
            r_row += (int)p.tensors[OF_R].stride.t;
            k_row += (int)p.tensors[OF_K].stride.t;
        }
        if (C::PART < left && own.t0 + C::PART < CHECKPOINT) rs[C::PART] = ldg<Raw>(r_row);
    }
    GT_METHOD Raw r(int i) const { return rs[i]; }
    GT_METHOD Raw k(int i) const { return ks[i + 1]; }
};

/* ---- copies of the inputs ----------------------------------------------------------------------------------- */

/* LANES lanes copy COUNT 16-bit elements of every token to shared memory.  `lane` is the caller's index among them.
 * Every 8 elements, from element `first` on, go to address(token, first).  `from` points to the lane's elements of its
 * first token, which is lane / (COUNT / 8).  Pairs of elements beyond the sequence become `none`. */
template <int COUNT, int LANES, class Address>
GT_DEV void copy_rows(int lane, const uint16_t* from, int stride, int tokens, uint32_t none, const Address& address) {
    constexpr int PIECES = COUNT / 8, ROWS = LANES / PIECES;
    const int row = lane / PIECES, first = lane % PIECES * 8, step = ROWS * stride;
    if (tokens == CHECKPOINT) { /* unconditional copies cost fewer instructions */
        GT_UNROLL
        for (int i = 0; i < CHECKPOINT; i += ROWS) {
            cp_async<16>(address(row | i, first), from);
            from += step;
        }
        return;
    }
    for (int t = row; t < CHECKPOINT; t += ROWS) {
        const uint32_t to = address(t, first);
        if (t < tokens) {
            cp_async<16>(to, from);
        } else {
            sts<uint4>(to, {none, none, none, none});
        }
        from += step;
    }
}

/* Two warps copy COUNT elements of every token of a tensor, from `column` on.  `lane` is the caller's index among the
 * 64 lanes. */
template <int COUNT, class Address>
GT_DEV void copy_tensor(int lane, const BackwardParams& p, const ChunkCoordinates& here, int tensor, int column,
                        uint32_t none, const Address& address) {
    constexpr int PIECES = COUNT / 8;
    const BackwardParams::Tensor& x = p.tensors[tensor];
    const int64_t first =
        offset_of(x.stride, here.b, here.chunk.first + lane / PIECES, here.h) + column + lane % PIECES * 8;
    copy_rows<COUNT, 64>(lane, static_cast<const uint16_t*>(x.data) + first, (int)x.stride.t, here.tokens(), none,
                         address);
}

/* Two warps copy STATE_ROWS rows of a bf16 state to the rows at `to`, or clear these rows. */
template <class C>
GT_DEV void copy_state(int lane, const BackwardBlock<C>& me, const SliceRows<bf16>& rows, int to,
                       bool is_zero = false) {
    constexpr int PIECES = C::N / 8, ROWS = 64 / PIECES;
    const int row = lane / PIECES, piece = lane % PIECES;
    const bf16* from = rows.data + row * (int64_t)rows.pitch + 8 * piece;
    GT_UNROLL
    for (int i = 0; i < C::STATE_ROWS; i += ROWS) {
        cp_async<16>(me.smem + to + row_piece<C::N>(row | i, piece), from, is_zero ? 0 : 16);
        from += ROWS * (int64_t)rows.pitch;
    }
}

/* A warp copies v or dy of half of the chunk's tokens (fp32).  Tokens beyond the sequence become 0. */
template <class C>
GT_DEV void copy_half_rows(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkCoordinates& here,
                           int tensor, int half, int to) {
    constexpr int PIECES = C::N / 4, ROWS = 32 / PIECES;
    const BackwardParams::Tensor& x = p.tensors[tensor];
    const int piece = lane_id() % PIECES, first = CHECKPOINT / 2 * half + lane_id() / PIECES;
    const int left = here.tokens() - first;
    const float* from =
        static_cast<const float*>(x.data) + offset_of(x.stride, here.b, here.chunk.first + first, here.h) + 4 * piece;
    GT_UNROLL
    for (int i = 0; i < CHECKPOINT / 2; i += ROWS) {
        cp_async<16>(me.smem + to + fp32_piece<C::N>(first + i, piece), from, i < left ? 16 : 0);
        from += ROWS * (int)x.stride.t;
    }
}

/* A warp copies rows first ... last - 1 of a slice of an fp32 state to shared memory, to the place that holds first S
 * and then G. */
template <class C>
GT_DEV void copy_state_rows(const BackwardBlock<C>& me, const SliceRows<float>& rows, int first, int last) {
    constexpr int PIECES = C::N / 4, ROWS = 32 / PIECES;
    const int piece = lane_id() % PIECES;
    for (int row = first + lane_id() / PIECES; row < last; row += ROWS)
        cp_async<16>(me.smem + C::S + fp32_piece<C::N>(row, piece), rows.data + row * (int64_t)rows.pitch + 4 * piece);
}

/* A warp copies u of a slice; with LARGE it copies u of all slices. */
template <class C>
GT_DEV void copy_u(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkCoordinates& here) {
    GT_UNROLL
    for (int i = 0; i < (C::LARGE ? C::N : C::CHANNELS) / 32; i++) {
        const int n = me.slice0 + 32 * i + lane_id();
        if (p.u) {
            cp_async<4>(me.smem + C::U + 4 * n, p.u + here.h * C::N + n);
        } else {
            sts<float>(me.smem + C::U + 4 * n, 0.0f);
        }
    }
}

/* A warp copies the row sums that the reverse state pass stored, in parts (bf16 only).  f16 computes rowsum(S . G) in
 * round_states(), fp32 in StateRows (backward_fp32.cuh). */
template <class C>
GT_DEV void copy_rowsums(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkCoordinates& here) {
    constexpr int COUNT = C::LARGE ? C::N : C::CHANNELS;
    const float* sums = p.rowsums + (int64_t)here.index * C::SUM_PARTS * C::N + me.slice0;
    GT_UNROLL
    for (int i = 0; i < C::SUM_PARTS * COUNT; i += 4 * 32) {
        const int at = i + 4 * lane_id(), part = at / COUNT, offset = part * C::N + at % COUNT;
        if (part < C::SUM_PARTS)
            cp_async<16>(me.smem + C::ROWSUM + 4 * (me.slice0 + offset), sums + offset, here.is_early ? 0 : 16);
    }
}

/* Returns one part of a row sum for one channel of the slice, or for two channels as a float2. */
template <class Word, class C>
GT_DEV Word rowsum_part(const BackwardBlock<C>& me, int part, int channel) {
    return lds<Word>(me.smem + C::ROWSUM + 4 * (part * C::N + me.slice0 + channel));
}

/* Starts to copy the inputs of a slice (16 bits); two warps copy a tensor.  The first group of copies is r, k, w and u;
 * the second group is all other inputs.  S, G and the row sums come from earlier kernels of the chain. */
template <class C>
GT_DEV void copy_inputs(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkCoordinates& here) {
    const int warp = warp_id(), tensor = warp / 2, lane = 32 * (warp % 2) + lane_id();
    const bool is_first = me.slice0 == 0, wants_u_and_rowsums = is_first || !C::LARGE;
    if (tensor <= (sizeof(typename C::W) == 2 ? OF_W : OF_K)) {
        const uint32_t to = raw_rows(me, tensor);
        copy_tensor<C::CHANNELS>(lane, p, here, tensor, me.slice0, no_token<C>(p, tensor),
                                 [=](int t, int n) { return to + raw_offset<C::CHANNELS>(t, n); });
    }
    if (warp == 6 && wants_u_and_rowsums) copy_u<C>(p, me, here);
    if (warp == 7 && is_first) store_addresses<C>(p, me, here);
    cp_async_commit();
    if (tensor < 2) {
        const uint32_t to = me.smem + (tensor ? C::DY : C::VALUES);
        if (is_first)
            copy_tensor<C::N>(lane, p, here, tensor ? OF_DY : OF_V, 0, 0,
                              [=](int t, int v) { return to + row_piece<C::N>(t, v / 8); });
    } else {
        if constexpr (C::KEEPS_BF16) {
            if (!here.is_early) wait_for_chain();
            const auto output = [&](int i) { return global_row<bf16>(p, here, i, 0); };
            GT_UNROLL
            for (int row = 0; row < C::CHANNELS; row += C::STATE_ROWS) {
                const int to = 2 * C::N * row;
                if (tensor == 2) {
                    copy_state<C>(lane, me, checkpoint_rows<bf16>(me, p.S_checkpoints, me.index, row), C::S + to);
                } else {
                    copy_state<C>(lane, me, G_rows<C>(p, me, output, row), C::G + to, here.is_early);
                }
            }
        }
        if (C::KEEPS_BF16 && warp == 7 && wants_u_and_rowsums && p.tensors[OF_DW].data) copy_rowsums<C>(p, me, here);
    }
    cp_async_commit();
}

/* Starts to copy the inputs of a slice (fp32), except r, k and w, which are loaded to registers.  The function waits
 * only for u; later phases wait for the other copies. */
template <class C>
GT_DEV void copy_fp32_inputs(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkCoordinates& here) {
    const int warp = warp_id();
    if (warp < 4 && me.slice0 == 0)
        copy_half_rows<C>(p, me, here, warp / 2 ? OF_DY : OF_V, warp % 2, warp / 2 ? C::DY : C::VALUES);
    if (warp >= 4 && warp < 7)
        copy_state_rows<C>(me, checkpoint_rows<float>(me, p.S_checkpoints, me.index), C::CHANNELS * (warp - 4) / 3,
                           C::CHANNELS * (warp - 3) / 3);
    if (warp == 7) {
        copy_u<C>(p, me, here);
        if (me.slice0 == 0) store_addresses<C>(p, me, here);
    }
    cp_async_commit();
    if (warp == 7) cp_async_wait<0>();
}

/* f16: loads a slice of S and G to shared memory, as rows of f16 with one power of two each.  S is converted from fp32.
 * In global memory the parts of a row of G have different powers of two; here all parts get the same one.  The function
 * also stores the inverse factors and rowsum(S . G).  All threads take part, and issue all loads before the first
 * use. */
template <class C>
GT_DEV void round_states(const BackwardParams& p, const BackwardBlock<C>& me, const ChunkCoordinates& here) {
    /* LANES: lanes of a row.  COUNT: elements of a part of a row that a lane has. */
    constexpr int LANES = C::THREADS / C::CHANNELS, PARTS = C::G_PARTS, COUNT = C::N / PARTS / LANES;
    const int n = thread_id() / LANES, lane = thread_id() % LANES;
    const float* S_from = checkpoint_rows<float>(me, p.S_checkpoints, me.index, n).data + COUNT * lane;
    const auto output = [&](int i) { return global_row<f16>(p, here, i, 0); };
    const SliceRows<f16> rows = G_rows<C>(p, me, output);
    const f16* G_from = rows.data + n * (int64_t)rows.pitch + COUNT * lane;
    const float* inverse_from = p.G_inverse + (int64_t)here.index * (PARTS * C::N) + me.slice0 + n;
    Vec<float, 4> S[PARTS][COUNT / 4];
    Vec<f16, COUNT> G[PARTS];
    float inverse[PARTS], largest = 0.0f, G_largest = 0.0f, sum = 0.0f;
    GT_UNROLL
    for (int i = 0; i < PARTS; i++) {
        GT_UNROLL
        for (int e = 0; e < COUNT; e += 4) S[i][e / 4] = ldg<Vec<float, 4>>(S_from + COUNT * LANES * i + e);
        G[i] = ldg<Vec<f16, COUNT>>(G_from + COUNT * LANES * i);
        inverse[i] = ldg<float>(inverse_from + C::N * i);
    }
    GT_UNROLL
    for (int i = 0; i < PARTS; i++) {
        G_largest = fmaxf(G_largest, inverse[i]);
        GT_UNROLL
        for (int e = 0; e < COUNT; e++) {
            const float x = S[i][e / 4].get(e % 4);
            largest = fmaxf(largest, fabsf(x));
            sum = fma_rn(x, G[i].get(e) * inverse[i], sum);
        }
    }
    GT_UNROLL
    for (int mask = 1; mask < LANES; mask <<= 1) {
        largest = fmaxf(largest, shfl_xor(largest, mask));
        sum += shfl_xor(sum, mask);
    }
    const RowScale row_scale = row_scale_f16(largest);
    const float G_scale = as_float((254u << 23) - as_uint(G_largest)); /* 1 / G_largest */
    if (lane == 0) {
        sts<float>(me.smem + C::S_SCALE + 4 * n, row_scale.inverse);
        sts<float>(me.smem + C::G_SCALE + 4 * n, G_largest);
        sts<float>(me.smem + C::ROWSUM + 4 * (me.slice0 + n), sum);
    }
    GT_UNROLL
    for (int i = 0; i < PARTS; i++) {
        const int column = COUNT * (lane + LANES * i);
        const uint32_t address = me.smem + row_piece<C::N>(n, column / 8) + 2 * (column % 8);
        const float by = inverse[i] * G_scale;
        float scaled[COUNT], united[COUNT];
        GT_UNROLL
        for (int e = 0; e < COUNT; e++)
            scaled[e] = S[i][e / 4].get(e % 4) * row_scale.scale, united[e] = G[i].get(e) * by;
        Vec<f16, COUNT> rounded;
        rounded.set(scaled);
        sts<Vec<f16, COUNT>>(address + C::S, rounded);
        rounded.set(united);
        sts<Vec<f16, COUNT>>(address + C::G, rounded);
    }
}

/* ---- R, K, E and the bonus ---------------------------------------------------------------------------------- */

/* Converts an element of R or K to the stored form.  With 16-bit inputs the element is rounded to tf32.  dg subtracts
 * terms of R and K that tensor cores have added, so both must use the same values. */
template <class C>
GT_DEV float chunk_operand(float x) {
    return C::TF32X3 ? x : round_tf32(x);
}

/* Computes R, K, E, the growth 2^c_16 and the bonus of the thread's part of a slice. */
template <class C>
GT_DEV void prepare_part(const BackwardParams& p, const BackwardBlock<C>& me, const ChannelPart<C>& own,
                         const RawPart<C>& raw, const typename ChannelPart<C>::Decays& w) {
    using Raw = Pair<typename C::T>;
    float h[C::PART][2], c[2], total[2], bonus[C::PART];
    float2 u = lds<float2>(me.smem + C::U + 4 * (me.slice0 + own.channel));
    u = {p.scale * u.x, p.scale * u.y};
    own.decays(p, w, h, c, total);
    bool strong = warp_any(!(fabsf(total[0]) < own.limit(p) && fabsf(total[1]) < own.limit(p)));
    if (strong && p.raw) strong = warp_any(own.is_strong(h, total)); /* the exact test, which few sub-chunks need */
    if (lane_id() == 0) sts<uint32_t>(me.smem + C::STRONG_DECAY + 4 * warp_id(), strong);
    float R[4], K[4]; /* a fragment */
    const float end[2] = {total[0] - p.log2_scale, total[1] - p.log2_scale};
    c[0] -= p.log2_scale, c[1] -= p.log2_scale;
    GT_UNROLL
    for (int i = 0; i < C::PART; i++) {
        const Raw r = raw.r(i), k = raw.k(i);
        const float r_[2] = {r.lo(), r.hi()}, k_[2] = {k.lo(), k.hi()};
        GT_UNROLL
        for (int e = 0; e < 2; e++) {
            const int in_cell = C::TF32X3 ? 2 * e + i % 2 : 2 * (i % 2) + e;
            R[in_cell] = chunk_operand<C>(r_[e] * ex2_approx(-c[e]));
            c[e] += h[i][e];
            K[in_cell] = chunk_operand<C>(k_[e] * ex2_approx(c[e] - end[e]));
        }
        bonus[i] = fma_rn(r_[1], k_[1] * u.y, r_[0] * (k_[0] * u.x));
        if (i % 2 == 0) continue;
        const uint32_t address = me.smem + fragment_of<C::CHANNELS>((own.t0 + i) / 2, own.channel);
        sts<float4>(address + C::R, {R[0], R[1], R[2], R[3]});
        sts<float4>(address + C::K, {K[0], K[1], K[2], K[3]});
    }
    const uint32_t scales = me.smem + 4 * (own.sub_chunk * C::CHANNELS + own.channel);
    if (own.part == 0) sts<float2>(scales + C::E, {sub_chunk_decay(total[0]), sub_chunk_decay(total[1])});
    if (own.part == C::SUB_CHUNK_PARTS - 1)
        sts<float2>(scales + C::GROWTH, {ex2_approx(total[0]), ex2_approx(total[1])});
    if constexpr (C::PART == 16) halve_sums<8>(bonus, 16);
    if constexpr (C::PART >= 8) halve_sums<4>(bonus, 8);
    halve_sums<2>(bonus, 4);
    halve_sums<1>(bonus, 2);
    const float sum = bonus[0] + shfl_xor(bonus[0], 1);
    if (lane_id() % 2 == 0)
        sts<float>(me.smem + C::BONUS + 8 * (own.t0 + lane_id() / 2 % C::PART) + 4 * (warp_id() % 2), sum);
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
