/* gt/recurrence/step_states.cuh - loads and stores of states and parameters in step kernels.  In memory they are fp32,
 * a 16-bit type or, for states only, int8; the call chooses.
 *
 * The dtype of parameters, and of states of 16 or 32 bits, is known only at run time.  Kernels branch on the dtype: all
 * lanes take the same branch, and the branch costs less than one more instance of every kernel.  Kernels with int8
 * states are separate instances, because they use registers differently.  Arithmetic is in fp32.  A store rounds to
 * nearest or, with a seed, at random (rounding.h). */
#ifndef GT_RECURRENCE_STEP_STATES_CUH
#define GT_RECURRENCE_STEP_STATES_CUH

#include "../base/device.cuh"
#include "rounding.h"

namespace gt {

/* load_bits() loads the bits of one element; value_of_bits() converts them.  Only the conversion waits for the load. */
GT_DEV uint32_t load_bits(const void* data, gt_dtype dtype, int64_t at) {
    if (dtype == GT_F32) return ldg<uint32_t>(static_cast<const float*>(data) + at);
    return ldg<uint16_t>(static_cast<const bf16*>(data) + at);
}

GT_DEV float value_of_bits(uint32_t bits, gt_dtype dtype) {
    if (dtype == GT_BF16) return unpack_bf16_lo(bits);
    return dtype == GT_F16 ? unpack_f16_lo(bits) : as_float(bits);
}

/* Returns element `at` of an array, or 0 if the array is NULL. */
GT_DEV float load_parameter(const void* data, gt_dtype dtype, int64_t at) {
    return data ? value_of_bits(load_bits(data, dtype, at), dtype) : 0.0f;
}

/* Loads four adjacent floats of a state or of A.  valid: how many of them exist; with VECTORS, either all four or none.
 * Missing numbers become `none`. */
template <bool VECTORS>
GT_DEV void load_four(float* x, const float* from, int valid, float none = 0.0f) {
    if constexpr (VECTORS) {
        float4 v = {none, none, none, none};
        if (valid > 0) v = ldg<float4>(from);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
        GT_UNROLL
        for (int i = 0; i < 4; i++) x[i] = i < valid ? from[i] : none;
    }
}

template <bool VECTORS>
GT_DEV void store_four(float* to, const float* x, int valid) {
    if constexpr (VECTORS) {
        if (valid > 0) stg<float4>(to, float4{x[0], x[1], x[2], x[3]});
    } else {
        GT_UNROLL
        for (int i = 0; i < 4; i++)
            if (i < valid) to[i] = x[i];
    }
}

/* A state in memory.  at: the index of the state's first element in the array `data`. */
struct StepState {
    void* data;
    gt_dtype dtype;
    int64_t at;
    GT_METHOD float* fp32() const { return static_cast<float*>(data) + at; }
    GT_METHOD bf16* half() const { return static_cast<bf16*>(data) + at; } /* for bf16 and f16 alike */
};

/* A piece is four adjacent numbers of a state.  A lane has PIECES pieces; where(i) describes piece i of the calling
 * lane. */
struct StatePiece {
    int offset; /* from the start of the state */
    int valid;  /* how many of the four numbers exist */
    int group;  /* number of the piece's group (rounding.h), counted from first_group of store_step_state() */
};

/* How a call rounds its states: see rounding.h. */
struct StepRounding {
    const int32_t *seed, *steps; /* NULL: round to nearest */
};

template <class Args>
static inline StepRounding step_rounding_of(const Args& a) {
    return {a.rounding_seed, a.rounding_steps};
}

/* Converts four numbers of a 16-bit state to fp32. */
GT_DEV void unpack_four(float* x, uint2 bits, gt_dtype dtype) {
    const bool is_bf16 = dtype == GT_BF16;
    x[0] = is_bf16 ? unpack_bf16_lo(bits.x) : unpack_f16_lo(bits.x);
    x[1] = is_bf16 ? unpack_bf16_hi(bits.x) : unpack_f16_hi(bits.x);
    x[2] = is_bf16 ? unpack_bf16_lo(bits.y) : unpack_f16_lo(bits.y);
    x[3] = is_bf16 ? unpack_bf16_hi(bits.y) : unpack_f16_hi(bits.y);
}

template <bool VECTORS, int PIECES, class Where>
GT_DEV void load_step_state(float* x, const StepState& state, const Where& where) {
    if (state.dtype == GT_F32) {
        GT_UNROLL
        for (int i = 0; i < PIECES; i++) {
            const StatePiece piece = where(i);
            load_four<VECTORS>(x + 4 * i, state.fp32() + piece.offset, piece.valid);
        }
        return;
    }
    uint2 bits[PIECES]; /* all loads are in flight before the first conversion */
    GT_UNROLL
    for (int i = 0; i < PIECES; i++) {
        const StatePiece piece = where(i);
        const bf16* from = state.half() + piece.offset;
        bits[i] = {0, 0};
        if constexpr (VECTORS) {
            if (piece.valid > 0) bits[i] = ldg<uint2>(from);
        } else {
            if (piece.valid > 0) bits[i].x = from[0].bits;
            if (piece.valid > 1) bits[i].x |= (uint32_t)from[1].bits << 16;
            if (piece.valid > 2) bits[i].y = from[2].bits;
            if (piece.valid > 3) bits[i].y |= (uint32_t)from[3].bits << 16;
        }
    }
    GT_UNROLL
    for (int i = 0; i < PIECES; i++) unpack_four(x + 4 * i, bits[i], state.dtype);
}

/* ---- a state that is copied to shared memory ahead of its use ---------------------------------------------------- */

/* Bytes of shared memory for the pieces of a warp: 16 for each piece. */
template <int PIECES>
constexpr uint32_t AHEAD_BYTES = 32 * 16 * PIECES;

/* Starts to copy a lane's pieces to the warp's shared memory at `to`.  After cp_async_wait a lane reads only its own
 * pieces, so no barrier is needed.  Pieces that do not exist become 0. */
template <int PIECES, class Where>
GT_DEV void fetch_step_state(uint32_t to, const StepState& state, const Where& where) {
    GT_UNROLL
    for (int i = 0; i < PIECES; i++) {
        const StatePiece piece = where(i);
        const bool exists = piece.valid > 0;
        const int offset = exists ? piece.offset : 0;
        const uint32_t at = to + (uint32_t)(512 * i + 16 * lane_id());
        if (state.dtype == GT_F32)
            cp_async<16>(at, state.fp32() + offset, exists ? 16 : 0);
        else
            cp_async<8>(at, state.half() + offset, exists ? 8 : 0);
    }
}

template <int PIECES>
GT_DEV void read_step_state(float* x, uint32_t from, gt_dtype dtype) {
    GT_UNROLL
    for (int i = 0; i < PIECES; i++) {
        const uint32_t at = from + (uint32_t)(512 * i + 16 * lane_id());
        if (dtype == GT_F32) {
            const float4 v = lds<float4>(at);
            x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
        } else {
            unpack_four(x + 4 * i, lds<uint2>(at), dtype);
        }
    }
}

/* Rounds four numbers to 16 bits at random.  group: the number of their group in the state of batch element b. */
GT_DEV uint2 pack_at_random(const StepRounding& rounding, int64_t b, int64_t group, const float* of, gt_dtype dtype) {
    const gt_random r = gt_random_of_group(rounding.seed, rounding.steps[b], group);
    uint32_t bits[4];
    GT_UNROLL
    for (int i = 0; i < 4; i++) bits[i] = gt_round_to_half(as_uint(of[i]), r.word[i], dtype);
    return {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
}

/* Stores the lane's pieces.  first_group: the number that StatePiece::group counts from, in the state of batch element
 * b. */
template <bool VECTORS, int PIECES, class Where>
GT_DEV void store_step_state(const StepState& state, const float* x, const Where& where, const StepRounding& rounding,
                             int64_t b, int64_t first_group) {
    if (state.dtype == GT_F32) {
        GT_UNROLL
        for (int i = 0; i < PIECES; i++) {
            const StatePiece piece = where(i);
            store_four<VECTORS>(state.fp32() + piece.offset, x + 4 * i, piece.valid);
        }
        return;
    }
    const bool is_bf16 = state.dtype == GT_BF16;
    GT_UNROLL
    for (int i = 0; i < PIECES; i++) {
        const StatePiece piece = where(i);
        bf16* to = state.half() + piece.offset;
        const float* of = x + 4 * i;
        uint2 bits;
        if (rounding.seed)
            bits = pack_at_random(rounding, b, first_group + piece.group, of, state.dtype);
        else if (is_bf16)
            bits = {pack_bf16(of[0], of[1]), pack_bf16(of[2], of[3])};
        else
            bits = {pack_f16(of[0], of[1]), pack_f16(of[2], of[3])};
        if constexpr (VECTORS) {
            if (piece.valid > 0) stg<uint2>(to, bits);
        } else {
            if (piece.valid > 0) to[0].bits = (uint16_t)bits.x;
            if (piece.valid > 1) to[1].bits = (uint16_t)(bits.x >> 16);
            if (piece.valid > 2) to[2].bits = (uint16_t)bits.y;
            if (piece.valid > 3) to[3].bits = (uint16_t)(bits.y >> 16);
        }
    }
}

/* ---- states of int8 ---------------------------------------------------------------------------------------------- */

/* An int8 state in memory, and its scales.  at, scale_at: the indices of their first elements in `data` and `scale`. */
struct Int8State {
    int8_t* data;
    float* scale;
    int64_t at, scale_at;
};

/* A lane's word of a row: four adjacent numbers.  where(i) describes the word of the lane's row i:
 *     offset   of the word, from the start of the state.
 *     valid    how many of its numbers exist.
 *     scale    the number of the row's scale.
 *     group    the number of the word's group (rounding.h), counted from first_group. */
struct Int8Row {
    int offset, valid, scale, group;
};

GT_DEV uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
    return __byte_perm(low, high, selector);
#else
    const uint64_t bytes = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) result |= (uint32_t)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
#endif
}

/* Returns the larger of a and |b|, or NaN if one of them is NaN.  a is not negative. */
GT_DEV float larger_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(fabsf(b)));
    return most;
#else
    return a > fabsf(b) || a != a ? a : fabsf(b);
#endif
}

/* Returns a * b, rounded.  The compiler cannot fuse this product with an addition, so the CPU twin gets the same
 * bits. */
GT_DEV float product_alone(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

/* Converts four int8 numbers to fp32 and multiplies them by a scale.  The byte number + 128 becomes the low byte of the
 * float 2^23; subtracting 2^23 + 128 gives the number exactly.  This avoids slow conversion instructions. */
GT_DEV void unpack_int8(float* x, uint32_t word, float scale) {
    const uint32_t positive = word ^ 0x80808080u; /* integer + 128 */
    GT_UNROLL
    for (uint32_t i = 0; i < 4; i++)
        x[i] = product_alone(as_float(permute_bytes(positive, 0x4b000000u, 0x7440u | i)) - (0x1p23f + 128.0f), scale);
}

/* Rounds four numbers of a row to int8.  random: NULL means to nearest.  The numbers must be finite. */
GT_DEV uint32_t pack_finite_int8(const float* x, float inverse, const gt_random* random) {
    uint32_t q[4];
    GT_UNROLL
    for (int i = 0; i < 4; i++) {
        if (random) {
            const uint32_t magnitude = gt_round_to_int8(as_uint(product_alone(x[i], inverse)), random->word[i]);
            q[i] = x[i] < 0.0f ? 0u - magnitude : magnitude;
        } else {
            q[i] = as_uint(fma_rn(x[i], inverse, GT_INT8_NEAREST));
        }
    }
    return permute_bytes(permute_bytes(q[0], q[1], 0x0040), permute_bytes(q[2], q[3], 0x0040), 0x5410);
}

/* The same for any numbers. */
GT_DEV uint32_t pack_int8(const float* x, float inverse, const gt_random* random) {
    const uint32_t word = pack_finite_int8(x, inverse, random);
    return inverse > 0.0f ? word : 0;
}

/* Loads a word of an int8 state.  valid: how many of its numbers exist, with VECTORS all or none; missing numbers
 * become 0. */
template <bool VECTORS>
GT_DEV uint32_t load_int8_word(const int8_t* from, int valid) {
    uint32_t word = 0;
    if constexpr (VECTORS) {
        if (valid > 0) word = ldg<uint32_t>(from);
    } else {
        GT_UNROLL
        for (int c = 0; c < 4; c++)
            if (c < valid) word |= (uint32_t)(uint8_t)from[c] << 8 * c;
    }
    return word;
}

template <bool VECTORS>
GT_DEV void store_int8_word(int8_t* to, uint32_t word, int valid) {
    if constexpr (VECTORS) {
        if (valid > 0) stg<uint32_t>(to, word);
    } else {
        GT_UNROLL
        for (int c = 0; c < 4; c++)
            if (c < valid) to[c] = (int8_t)(word >> 8 * c);
    }
}

template <bool VECTORS, int ROWS, class Where>
GT_DEV void load_int8_state(float* x, const Int8State& state, const Where& where) {
    uint32_t words[ROWS]; /* all loads are in flight before the first conversion */
    float scale[ROWS];
    GT_UNROLL
    for (int i = 0; i < ROWS; i++) {
        const Int8Row row = where(i);
        scale[i] = row.valid > 0 ? ldg<float>(state.scale + state.scale_at + row.scale) : 0.0f;
        words[i] = load_int8_word<VECTORS>(state.data + state.at + row.offset, row.valid);
    }
    GT_UNROLL
    for (int i = 0; i < ROWS; i++) unpack_int8(x + 4 * i, words[i], scale[i]);
}

/* Stores rows that LANES adjacent lanes share.  lane: the caller's index among these lanes. */
template <bool VECTORS, int ROWS, int LANES, class Where>
GT_DEV void store_int8_state(const Int8State& state, const float* x, const Where& where, int lane,
                             const StepRounding& rounding, int64_t b, int64_t first_group) {
    float most[ROWS];
    GT_UNROLL
    for (int i = 0; i < ROWS; i++) {
        most[i] = 0.0f;
        GT_UNROLL
        for (int c = 0; c < 4; c++) most[i] = larger_or_nan(most[i], x[4 * i + c]);
    }
    GT_UNROLL
    for (int mask = LANES / 2; mask > 0; mask >>= 1) {
        GT_UNROLL
        for (int i = 0; i < ROWS; i++) most[i] = larger_or_nan(most[i], shfl_xor(most[i], mask));
    }
    GT_UNROLL
    for (int i = 0; i < ROWS; i++) {
        const Int8Row row = where(i);
        const gt_row_scale scale = gt_scale_of_row(most[i]);
        uint32_t word;
        if (rounding.seed) {
            const gt_random r = gt_random_of_group(rounding.seed, rounding.steps[b], first_group + row.group);
            word = pack_int8(x + 4 * i, scale.inverse, &r);
        } else {
            word = pack_int8(x + 4 * i, scale.inverse, nullptr);
        }
        if (lane == 0 && row.valid > 0) state.scale[state.scale_at + row.scale] = scale.scale;
        store_int8_word<VECTORS>(state.data + state.at + row.offset, word, row.valid);
    }
}

/* ---- host ---- */

/* Replaces the default 0 by GT_F32.  gt_prepare does so, too; this function serves structs that did not pass through
 * it. */
static inline gt_dtype dtype_or_fp32(gt_dtype dtype) { return dtype == GT_DTYPE_DEFAULT ? GT_F32 : dtype; }

/* Returns whether one instruction can load each group of four adjacent numbers of a packed array. */
static inline bool has_aligned_fours(const void* data, gt_dtype dtype) {
    return (uintptr_t)data % (uintptr_t)(4 * gt_dtype_bytes(dtype)) == 0;
}

} /* namespace gt */

#endif
