/* test_emu.cpp - tests of the emulator (gt/emu).  Runs the primitives of gt/base on it, and checks the results.  Also
 * runs kernels with planted faults, and checks that the emulator finds these faults.
 *
 *   g++ -std=c++17 -O2 -Wall -Wextra -DGT_EMU -I. tests/test_emu.cpp -o test_emu
 */
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <chrono>
#include <string>
#include <vector>

#include "gt/base/reduce.cuh"

using namespace gt;

template <class T>
using Array = std::vector<T>;

/* ---- checks ---------------------------------------------------------------------------------- */

static int passed = 0, failed = 0;

__attribute__((format(printf, 2, 3))) static void check(bool good, const char* format, ...) {
    (good ? passed : failed)++;
    printf("%s  ", good ? "ok  " : "FAIL");
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
}

static void check_clean(const char* what) {
    check(emu::faults() == 0, "%s: no faults", what);
    for (const std::string& message : emu::messages()) printf("      %s\n", message.c_str());
    emu::reset();
}

/* Checks that the emulator found the planted fault, and that the message names the kernel. */
static void check_caught(const char* what, emu::Fault kind, const char* kernel) {
    std::string found = "no such fault";
    for (const std::string& message : emu::messages()) {
        const bool is_kind = message.find(std::string(": ") + emu::fault_name(kind) + ": ") != std::string::npos;
        if (is_kind && message.find(kernel) != std::string::npos) {
            found = message;
            break;
        }
    }
    check(emu::faults(kind) > 0 && found != "no such fault", "%s: %s", what, found.c_str());
    emu::reset();
}

static uint64_t random_state = 1;

static uint32_t random_bits() {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

/* A small integer.  Products and sums of such numbers are exact in every format. */
static float random_integer() { return (float)(int)(random_bits() % 17) - 8.0f; }

static bool same(float a, float b) { return as_uint(a) == as_uint(b) || (a != a && b != b); }

/* ---- numbers --------------------------------------------------------------------------------- */

/* The value of a 16-bit number, computed from the definition of its format. */
static double format_value(uint32_t bits, int mantissa_bits) {
    const int exponent_bits = 15 - mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = (int)bits & ((1 << mantissa_bits) - 1);
    double value;
    if (exponent == (1 << exponent_bits) - 1) {
        value = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
        value = ldexp(mantissa, 1 - bias - mantissa_bits);
    } else {
        value = ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    }
    return bits >> 15 ? -value : value;
}

template <class T>
struct Format;
template <>
struct Format<bf16> {
    static constexpr int MANTISSA = 7;
    static constexpr uint32_t INFINITE = 0x7f80;
    static float widen(uint32_t bits) { return bf16_to_f32((uint16_t)bits); }
    static uint32_t narrow(float value) { return f32_to_bf16(value); }
};
template <>
struct Format<f16> {
    static constexpr int MANTISSA = 10;
    static constexpr uint32_t INFINITE = 0x7c00;
    static float widen(uint32_t bits) { return f16_to_f32((uint16_t)bits); }
    static uint32_t narrow(float value) { return f32_to_f16(value); }
};

template <class T>
static void test_format(const char* name) {
    using F = Format<T>;
    int wide_errors = 0, round_trip_errors = 0, tie_errors = 0, near_errors = 0, pair_errors = 0;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const float value = F::widen(bits);
        const bool is_nan = (bits & 0x7fff) > F::INFINITE;
        wide_errors += !same(value, (float)format_value(bits, F::MANTISSA));
        round_trip_errors += F::narrow(value) != (is_nan ? 0x7fffu : bits);

        const uint32_t pair = Element<T>::pack(value, 1.0f);
        const uint32_t swapped = Element<T>::pack(1.0f, value);
        pair_errors += !same(Element<T>::lo(pair), value) || Element<T>::hi(pair) != 1.0f;
        pair_errors += !same(Element<T>::hi(swapped), value) || Element<T>::lo(swapped) != 1.0f;

        /* A number in the middle between two neighbours must round to the even one.  A number just before or after the
         * middle must round to the nearer one.  Above the largest number, the next multiple of the unit serves as
         * neighbour. */
        if ((bits & 0x7fff) >= F::INFINITE) continue;
        const double here = format_value(bits, F::MANTISSA);
        double next = format_value(bits + 1, F::MANTISSA);
        if ((bits & 0x7fff) == F::INFINITE - 1) next = 2 * here - format_value(bits - 1, F::MANTISSA);
        const float middle = (float)((here + next) / 2);
        if ((double)middle != (here + next) / 2) continue; /* fp32 cannot hold the middle */
        tie_errors += F::narrow(middle) != bits + (bits & 1);
        near_errors += F::narrow(nextafterf(middle, (float)here)) != bits;
        near_errors += F::narrow(nextafterf(middle, (float)(2 * next))) != bits + 1;
    }
    check(wide_errors == 0, "%s to f32, all 65536 patterns", name);
    check(round_trip_errors == 0, "%s from f32 and back, all patterns, NaN stays NaN", name);
    check(tie_errors == 0 && near_errors == 0, "%s rounds to nearest even around all midpoints", name);
    check(pair_errors == 0, "%s pairs pack and unpack", name);
    check(F::narrow(INFINITY) == F::INFINITE && F::narrow(-INFINITY) == (F::INFINITE | 0x8000) &&
              F::narrow(3.4e38f) == (F::MANTISSA == 10 ? F::INFINITE : 0x7f80u),
          "%s overflows to infinity", name);
}

static void test_tf32() {
    int errors = 0;
    for (int i = 0; i < 1000000; i++) {
        const float value = as_float(random_bits());
        const float rounded = round_tf32(value);
        if (!(fabsf(value) < 1e38f)) continue;
        int exponent;
        frexp(value, &exponent);
        const double unit = ldexp(1.0, (exponent < -125 ? -125 : exponent) - 11);
        const double expected = nearbyint((double)value / unit) * unit; /* to even */
        errors += (double)rounded != expected;
    }
    check(errors == 0, "round_tf32 rounds to 10 bits, ties to even");
    check(isnan(round_tf32(NAN)) && isnan(round_tf32(as_float(0x7fffffff))) && isinf(round_tf32(INFINITY)),
          "round_tf32 of NaN and infinity");
    check(as_uint(NAN) == 0x7fffffff && as_uint(-NAN) == 0x7fffffff, "as_uint has the NaN of a GPU's arithmetic");
}

static void test_elements() {
    float wide[2] = {0, 0};
    bf16 brain[2] = {{0}, {0}};
    f16 half[2] = {{0}, {0}};
    Element<float>::store(wide, 1, 1.1f);
    Element<bf16>::store(brain, 1, 1.1f);
    Element<f16>::store(half, 1, 1.1f);
    check(Element<float>::load(wide, 1) == 1.1f && Element<bf16>::load(brain, 1) == 1.1015625f &&
              Element<f16>::load(half, 1) == 1.099609375f && brain[0].bits == 0 && half[0].bits == 0,
          "Element loads and stores");
}

/* ---- functions ------------------------------------------------------------------------------- */

/* The largest relative error over arguments whose true value is a normal number.  A NaN counts as an infinite error. */
template <class Function, class Truth>
static double worst_error(float lo, float hi, Function function, Truth truth) {
    double worst = 0;
    const auto probe = [&](float x) {
        if (!(x >= lo && x <= hi)) return;
        const double expected = truth((double)x), got = function(x);
        if (!(fabs(expected) >= 0x1p-126 && fabs(expected) <= 3.4e38)) return;
        const double error = fabs(got - expected) / fabs(expected);
        if (!(error <= worst)) worst = error == error ? error : INFINITY;
    };
    for (uint32_t step = 0; step < 0x7f800000u; step += 8191) { /* arguments of all magnitudes */
        probe(as_float(step));
        probe(-as_float(step));
    }
    for (int i = 0; i <= 200000; i++) probe(lo + (hi - lo) * (float)i / 200000.0f);
    for (int i = 0; i <= 200000; i++) probe(-2.0f + 4.0f * (float)i / 200000.0f);
    return worst;
}

#define CHECK_FUNCTION(function, lo, hi, bound, truth)                                                                 \
    do {                                                                                                               \
        const double error = worst_error(                                                                              \
            lo, hi, [](float x) { return (double)function(x); }, [](double x) { return (double)(truth); });            \
        check(error <= (bound), #function " on [%g, %g]: error %.2e, bound %.2e", (double)(lo), (double)(hi), error,   \
              (double)(bound));                                                                                        \
    } while (0)

static void test_functions() {
    CHECK_FUNCTION(ex2_approx, -126, 128, 0x1p-22, exp2(x));
    CHECK_FUNCTION(rcp_approx, 1e-37f, 1e37f, 0x1p-23, 1 / x);
    CHECK_FUNCTION(rsqrt_approx, 1e-37f, 1e37f, 0x1p-22, 1 / sqrt(x));
    CHECK_FUNCTION(exp_fast, -1, 1, 3e-7, exp(x));
    CHECK_FUNCTION(exp_fast, -87, 88, 5.5e-6, exp(x));
    CHECK_FUNCTION(exp_accurate, -87.3f, 88.7f, 3.6e-7, exp(x));
    CHECK_FUNCTION(expm1_neg, -1e30f, 0, 4e-7, expm1(x));
    CHECK_FUNCTION(log1p_unit, 0, 1, 4e-7, log1p(x));
    CHECK_FUNCTION(softplus, -87, 1e30f, 6e-7, x > 50 ? x : log1p(exp(x)));
    CHECK_FUNCTION(sigmoid, -87, 1e30f, 6e-7, 1 / (1 + exp(-x)));
    CHECK_FUNCTION(silu, -87, 1e30f, 7e-7, x / (1 + exp(-x)));
    CHECK_FUNCTION(softplus_fast, -1, 1e30f, 1.2e-6, x > 50 ? x : log1p(exp(x)));
    CHECK_FUNCTION(softplus_fast, -87, 0, 6e-6, log1p(exp(x)));
    CHECK_FUNCTION(sigmoid_fast, -1, 1e30f, 3.6e-7, 1 / (1 + exp(-x)));
    CHECK_FUNCTION(sigmoid_fast, -87, 0, 5.6e-6, 1 / (1 + exp(-x)));
    CHECK_FUNCTION(silu_fast, -1, 1e30f, 4.6e-7, x / (1 + exp(-x)));
    CHECK_FUNCTION(silu_fast, -87, 0, 5.7e-6, x / (1 + exp(-x)));

    check(exp_accurate(89.0f) == INFINITY && exp_accurate(-200.0f) == 0.0f && exp_accurate(INFINITY) == INFINITY &&
              exp_accurate(-INFINITY) == 0.0f && exp_accurate(0.0f) == 1.0f && isnan(exp_accurate(NAN)) &&
              exp_fast(-INFINITY) == 0.0f,
          "exp at the ends");
    check(expm1_neg(0.0f) == 0.0f && expm1_neg(-INFINITY) == -1.0f && expm1_neg(-1e-30f) == -1e-30f &&
              isnan(expm1_neg(NAN)),
          "expm1_neg at the ends");
    check(softplus(-INFINITY) == 0.0f && softplus(INFINITY) == INFINITY && softplus(200.0f) == 200.0f &&
              softplus(-200.0f) == 0.0f && isnan(softplus(NAN)),
          "softplus at the ends");
    check(sigmoid(-INFINITY) == 0.0f && sigmoid(INFINITY) == 1.0f && sigmoid(0.0f) == 0.5f && silu(-1e30f) == 0.0f &&
              silu(1e30f) == 1e30f && silu(0.0f) == 0.0f && isnan(sigmoid(NAN)) && isnan(silu(NAN)),
          "sigmoid and silu at the ends");
}

/* ---- primitives ------------------------------------------------------------------------------ */

struct IndexParams {
    int* out; /* [blocks][threads][8] */
};

GT_KERNEL(64, 1) index_kernel(const GT_GRID_CONSTANT IndexParams p) {
    const int block = (block_z() * grid_y() + block_y()) * grid_x() + block_x();
    int* out = p.out + (block * block_threads() + thread_id()) * 8;
    out[0] = thread_id();
    out[1] = lane_id() + 32 * warp_id();
    out[2] = block_x();
    out[3] = block_y();
    out[4] = block_z();
    out[5] = grid_x();
    out[6] = grid_y();
    out[7] = grid_z();
}

static void test_indices() {
    const int gx = 3, gy = 2, gz = 2, threads = 64;
    Array<int> out(gx * gy * gz * threads * 8, -1);
    launch(index_kernel, {gx, gy, gz}, threads, 0, nullptr, IndexParams{out.data()});
    int errors = 0;
    for (int i = 0; i < gx * gy * gz * threads; i++) {
        const int thread = i % threads, block = i / threads;
        const int expected[8] = {thread, thread, block % gx, block / gx % gy, block / gx / gy, gx, gy, gz};
        errors += memcmp(expected, &out[i * 8], sizeof expected) != 0;
    }
    check(errors == 0, "indices");
    check_clean("indices");
}

struct CountParams {
    int* blocks;
};

GT_KERNEL(32, 1) count_kernel(const GT_GRID_CONSTANT CountParams p) {
    if (thread_id() == 0) p.blocks[block_x() % 2]++;
}

static void test_launch() {
    const IndexParams none = {nullptr};
    check(launch(index_kernel, {0}, 64, 0, nullptr, none) == cudaErrorInvalidConfiguration &&
              launch(index_kernel, {1}, 1056, 0, nullptr, none) == cudaErrorInvalidConfiguration &&
              launch(index_kernel, {1, 65536}, 64, 0, nullptr, none) == cudaErrorInvalidConfiguration &&
              launch(index_kernel, {1}, 64, 300000, nullptr, none) == cudaErrorInvalidValue,
          "launch refuses impossible configurations");
    int blocks[2] = {0, 0};
    launch(count_kernel, {70000}, 32, 0, nullptr, CountParams{blocks});
    check(blocks[0] == 35000 && blocks[1] == 35000, "70000 blocks in x");
    check_clean("launch");
}

struct WidthParams {
    const uint32_t* in; /* [threads][4] */
    uint32_t* out;      /* [7][threads][4] */
};

template <class T>
GT_DEV void round_trip(const WidthParams& p, int which) {
    const uint32_t cell = smem_base() + (uint32_t)(thread_id() * sizeof(T));
    T value;
    memcpy(&value, p.in + 4 * thread_id(), sizeof value);
    sts<T>(cell, value);
    sync_threads();
    value = lds<T>(cell ^ (uint32_t)sizeof(T)); /* the value of the next thread */
    sync_threads();
    memcpy(p.out + (which * block_threads() + thread_id()) * 4, &value, sizeof value);
}

GT_KERNEL(64, 1) width_kernel(const GT_GRID_CONSTANT WidthParams p) {
    round_trip<uint16_t>(p, 0);
    round_trip<float>(p, 1);
    round_trip<uint32_t>(p, 2);
    round_trip<float2>(p, 3);
    round_trip<uint2>(p, 4);
    round_trip<float4>(p, 5);
    round_trip<uint4>(p, 6);
    const uint4 value = ldg<uint4>(p.in + 4 * thread_id());
    stg<uint4>(p.out + (7 * block_threads() + thread_id()) * 4, value);
}

static void test_widths() {
    const int threads = 64, widths[7] = {2, 4, 4, 8, 8, 16, 16};
    Array<uint32_t> in(threads * 4), out(8 * threads * 4);
    for (uint32_t& word : in) word = random_bits();
    launch(width_kernel, {1}, threads, threads * 16, nullptr, WidthParams{in.data(), out.data()});
    int errors = 0;
    for (int which = 0; which < 7; which++) {
        for (int i = 0; i < threads; i++) {
            errors += memcmp(&out[(which * threads + i) * 4], &in[(i ^ 1) * 4], widths[which]) != 0;
        }
    }
    errors += memcmp(&out[7 * threads * 4], in.data(), threads * 16) != 0;
    check(errors == 0, "lds and sts of seven types, ldg and stg");
    check_clean("lds, sts");
}

struct CopyParams {
    const uint16_t* in; /* [threads][8] */
    uint16_t* out;      /* [3][9][threads][8] */
};

template <int BYTES>
GT_DEV void copy_all_lengths(const CopyParams& p, int which) {
    const uint32_t cell = smem_base() + (uint32_t)(thread_id() * 16);
    for (int n = 0; n <= BYTES / 2; n++) {
        sts<uint4>(cell, uint4{~0u, ~0u, ~0u, ~0u});
        cp_async<BYTES>(cell, p.in + 8 * thread_id(), 2 * n);
        cp_async_commit();
        cp_async_wait<0>();
        const uint4 value = lds<uint4>(cell);
        stg<uint4>(p.out + (((which * 9 + n) * block_threads()) + thread_id()) * 8, value);
    }
}

GT_KERNEL(32, 1) copy_kernel(const GT_GRID_CONSTANT CopyParams p) {
    copy_all_lengths<4>(p, 0);
    copy_all_lengths<8>(p, 1);
    copy_all_lengths<16>(p, 2);
}

static void test_cp_async() {
    const int threads = 32;
    Array<uint32_t> in(threads * 4), out(3 * 9 * threads * 4);
    for (uint32_t& word : in) word = random_bits() | 0x00010001u;
    launch(copy_kernel, {1}, threads, threads * 16, nullptr,
           CopyParams{reinterpret_cast<uint16_t*>(in.data()), reinterpret_cast<uint16_t*>(out.data())});
    int errors = 0;
    for (int which = 0; which < 3; which++) {
        const int bytes = 4 << which;
        for (int n = 0; n <= bytes / 2; n++) {
            for (int i = 0; i < threads; i++) {
                uint8_t expected[16];
                memset(expected, 0xff, 16);
                memset(expected, 0, bytes);
                memcpy(expected, &in[i * 4], 2 * n);
                errors += memcmp(expected, &out[((which * 9 + n) * threads + i) * 4], 16) != 0;
            }
        }
    }
    check(errors == 0, "cp_async of 4, 8, 16 bytes with zero fill");
    check_clean("cp_async");
}

struct ShuffleParams {
    const float* in; /* [32] */
    float* out;      /* [6][32] */
};

GT_KERNEL(32, 1) shuffle_kernel(const GT_GRID_CONSTANT ShuffleParams p) {
    const int lane = lane_id();
    const float value = p.in[lane];
    p.out[lane] = shfl_xor(value, 5);
    p.out[32 + lane] = shfl_up(value, 3);
    p.out[64 + lane] = shfl_down(value, 7);
    p.out[96 + lane] = shfl_idx(value, (lane * 7 + 3) % 32);
    p.out[128 + lane] = as_float(shfl_idx(as_uint(value), 9));
    p.out[160 + lane] = warp_sum(value);
}

static void test_shuffles() {
    Array<float> in(32), out(6 * 32);
    for (float& x : in) x = (float)random_bits() * 0x1p-31f - 1.0f;
    launch(shuffle_kernel, {1}, 32, 0, nullptr, ShuffleParams{in.data(), out.data()});
    Array<float> sums = in;
    for (int mask = 16; mask > 0; mask >>= 1) {
        const Array<float> before = sums;
        for (int i = 0; i < 32; i++) sums[i] = before[i] + before[i ^ mask];
    }
    int errors = 0;
    for (int i = 0; i < 32; i++) {
        errors += !same(out[i], in[i ^ 5]);
        errors += !same(out[32 + i], in[i >= 3 ? i - 3 : i]);
        errors += !same(out[64 + i], in[i + 7 < 32 ? i + 7 : i]);
        errors += !same(out[96 + i], in[(i * 7 + 3) % 32]);
        errors += !same(out[128 + i], in[9]);
        errors += !same(out[160 + i], sums[0]);
    }
    check(errors == 0, "shuffles and warp_sum");
    check_clean("shuffles");
}

struct MatrixParams {
    const uint32_t* in; /* [4][8][8] 16-bit elements */
    uint32_t* out;      /* [15][32] registers */
};

GT_KERNEL(32, 1) matrix_kernel(const GT_GRID_CONSTANT MatrixParams p) {
    const int lane = lane_id();
    sts<uint4>(smem_base() + 16 * lane, ldg<uint4>(p.in + 4 * lane));
    sync_warp();
    /* Every lane passes its row, although ldmatrix_x1 and _x2 use the addresses of only 8 and 16 lanes. */
    const uint32_t row = smem_base() + 16 * lane;
    uint32_t one, two[2], four[4];
    uint32_t* out = p.out + lane;
    ldmatrix_x1(one, lane < 8 ? row : 7u);
    out[0] = one;
    ldmatrix_x2(two, lane < 16 ? row : 7u);
    for (int i = 0; i < 2; i++) out[32 * (1 + i)] = two[i];
    ldmatrix_x4(four, row);
    for (int i = 0; i < 4; i++) out[32 * (3 + i)] = four[i];
    ldmatrix_x1_trans(one, lane < 8 ? row : 7u);
    out[32 * 7] = one;
    ldmatrix_x2_trans(two, lane < 16 ? row : 7u);
    for (int i = 0; i < 2; i++) out[32 * (8 + i)] = two[i];
    ldmatrix_x4_trans(four, row);
    for (int i = 0; i < 4; i++) out[32 * (10 + i)] = four[i];
    out[32 * 14] = movmatrix_trans(out[32 * 3]);
}

static void test_matrices() {
    Array<uint32_t> in(4 * 32), out(15 * 32);
    for (uint32_t& word : in) word = random_bits();
    launch(matrix_kernel, {1}, 32, 512, nullptr, MatrixParams{in.data(), out.data()});
    uint16_t m[4][8][8];
    memcpy(m, in.data(), sizeof m);
    int errors = 0;
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, j = lane % 4;
        const int matrices[15] = {0, 0, 1, 0, 1, 2, 3, 0, 0, 1, 0, 1, 2, 3, 0};
        for (int i = 0; i < 15; i++) {
            const uint16_t(*matrix)[8] = m[matrices[i]];
            const bool transposed = i >= 7;
            const uint32_t lo = transposed ? matrix[2 * j][g] : matrix[g][2 * j];
            const uint32_t hi = transposed ? matrix[2 * j + 1][g] : matrix[g][2 * j + 1];
            errors += out[32 * i + lane] != (lo | hi << 16);
        }
    }
    check(errors == 0, "ldmatrix x1, x2, x4, transposed or not, and movmatrix_trans");
    check_clean("ldmatrix");
}

struct MmaParams {
    const float *a, *b, *c; /* [16][16], [16][8], [16][8] */
    float* out;             /* [3][16][8] */
};

template <class T>
GT_DEV void product16(const MmaParams& p, float* out) {
    const int g = lane_id() / 4, j = lane_id() % 4;
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; i++) {
        const float* element = p.a + (g + 8 * (i % 2)) * 16 + 2 * j + 8 * (i / 2);
        a[i] = Element<T>::pack(element[0], element[1]);
    }
    for (int i = 0; i < 2; i++) {
        const float* element = p.b + (2 * j + 8 * i) * 8 + g;
        b[i] = Element<T>::pack(element[0], element[8]);
    }
    float c[4];
    for (int i = 0; i < 4; i++) c[i] = p.c[(g + 8 * (i / 2)) * 8 + 2 * j + i % 2];
    mma<T>(c, a, b[0], b[1]);
    for (int i = 0; i < 4; i++) out[(g + 8 * (i / 2)) * 8 + 2 * j + i % 2] = c[i];
}

/* Computes the same product in two steps of k = 8. */
GT_DEV void product8(const MmaParams& p, float* out) {
    const int g = lane_id() / 4, j = lane_id() % 4;
    float c[4];
    for (int i = 0; i < 4; i++) c[i] = p.c[(g + 8 * (i / 2)) * 8 + 2 * j + i % 2];
    for (int k = 0; k < 16; k += 8) {
        float a[4], b[2];
        for (int i = 0; i < 4; i++) a[i] = p.a[(g + 8 * (i % 2)) * 16 + k + j + 4 * (i / 2)];
        for (int i = 0; i < 2; i++) b[i] = p.b[(k + j + 4 * i) * 8 + g];
        mma_tf32(c, a, b[0], b[1]);
    }
    for (int i = 0; i < 4; i++) out[(g + 8 * (i / 2)) * 8 + 2 * j + i % 2] = c[i];
}

GT_KERNEL(32, 1) mma_kernel(const GT_GRID_CONSTANT MmaParams p) {
    product16<bf16>(p, p.out);
    product16<f16>(p, p.out + 128);
    product8(p, p.out + 256);
}

static void test_mma() {
    Array<float> a(256), b(128), c(128), out(3 * 128), expected(128);
    for (float& x : a) x = random_integer();
    for (float& x : b) x = random_integer();
    for (float& x : c) x = random_integer();
    launch(mma_kernel, {1}, 32, 0, nullptr, MmaParams{a.data(), b.data(), c.data(), out.data()});
    for (int row = 0; row < 16; row++) {
        for (int col = 0; col < 8; col++) {
            float sum = c[row * 8 + col];
            for (int k = 0; k < 16; k++) sum += a[row * 16 + k] * b[k * 8 + col];
            expected[row * 8 + col] = sum;
        }
    }
    const char* const names[3] = {"mma_bf16", "mma_f16", "mma_tf32"};
    for (int which = 0; which < 3; which++) {
        int errors = 0;
        for (int i = 0; i < 128; i++) errors += !same(out[which * 128 + i], expected[i]);
        check(errors == 0, "%s", names[which]);
    }
    check_clean("mma");
}

/* ---- a pipeline, sound or with one fault planted --------------------------------------------- */

enum class Plant {
    NOTHING,
    WAIT_TOO_LAX,      /* cp_async_wait allows one group too many in flight, and so does not wait for the tile in use */
    NO_LOADED_BARRIER, /* no barrier before producers read each other's copies */
    NO_INIT,           /* mbarriers are used without initialisation */
    UNORDERED_INIT,    /* no barrier after the initialisation of the mbarriers */
    NO_FULL_ARRIVE,    /* producers never announce the tiles that the consumer waits for */
    NO_EMPTY_WAIT,     /* producers overwrite tiles that the consumer may still read */
    NO_EMPTY_ARRIVE,   /* the consumer never frees a tile */
    EARLY_EMPTY,       /* the consumer frees a tile before it has read it */
    WRONG_PARITY,      /* the consumer waits for the wrong phase, the one before the tile's */
    FULL_TOO_SMALL,    /* the expected count is too small: one of two producers completes a phase */
    FULL_TOO_LARGE,    /* the expected count is too large: more threads than ever arrive */
    TWO_ARRIVALS,      /* producers arrive twice for a tile */
    LEFTOVER_ARRIVAL,  /* one arrival too many at the end */
};

struct PipelineParams {
    const float* in; /* [tiles][64][4] */
    float* out;      /* [tiles][32] */
    int tiles;
    Plant plant;
};

/* Two producer warps load tiles of 64 float4 into a ring of three stages.  They reverse the rows of a tile, double the
 * numbers, and write them to one of two buffers.  A consumer warp reads the buffers.  Each buffer has a full and an
 * empty mbarrier. */
struct Pipeline {
    static constexpr int PRODUCERS = 64, THREADS = 96, RING = 3, TILE_BYTES = 64 * 16;
    static constexpr int BUFFERS = RING * TILE_BYTES;
    /* offsets of the two mbarriers; the second buffer's are 8 bytes later */
    static constexpr int FULL = BUFFERS + 2 * TILE_BYTES, EMPTY = FULL + 16;
    static constexpr int SMEM_BYTES = EMPTY + 16;
    static constexpr int LOADED = 1; /* named barrier of the producers */
};

GT_DEV void load_tile(const PipelineParams& p, int tile) {
    if (tile < p.tiles) {
        cp_async<16>(smem_base() + (tile % Pipeline::RING) * Pipeline::TILE_BYTES + 16 * thread_id(),
                     p.in + (tile * 64 + thread_id()) * 4);
    }
    cp_async_commit();
}

GT_DEV void produce(const PipelineParams& p) {
    const int me = thread_id();
    for (int tile = 0; tile < 2; tile++) load_tile(p, tile);
    for (int tile = 0; tile < p.tiles; tile++) {
        if (p.plant == Plant::WAIT_TOO_LAX) {
            cp_async_wait<2>();
        } else {
            cp_async_wait<1>();
        }
        if (p.plant != Plant::NO_LOADED_BARRIER) bar_sync(Pipeline::LOADED, Pipeline::PRODUCERS);
        load_tile(p, tile + 2);
        const uint32_t slot = smem_base() + (tile % Pipeline::RING) * Pipeline::TILE_BYTES;
        const float4 v = lds<float4>(slot + 16 * (63 - me));
        if (p.plant != Plant::NO_EMPTY_WAIT)
            mbarrier_wait(smem_base() + Pipeline::EMPTY + 8 * (tile % 2), (tile / 2 + 1) % 2);
        sts<float4>(smem_base() + Pipeline::BUFFERS + tile % 2 * Pipeline::TILE_BYTES + 16 * me,
                    float4{2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w});
        const uint32_t full = smem_base() + Pipeline::FULL + 8 * (tile % 2);
        if (p.plant != Plant::NO_FULL_ARRIVE) mbarrier_arrive(full);
        if (p.plant == Plant::TWO_ARRIVALS) mbarrier_arrive(full);
    }
    if (p.plant == Plant::LEFTOVER_ARRIVAL && warp_id() == 0) mbarrier_arrive(smem_base() + Pipeline::FULL);
}

GT_DEV void consume(const PipelineParams& p) {
    for (int tile = 0; tile < p.tiles; tile++) {
        const int parity = (tile / 2 + (p.plant == Plant::WRONG_PARITY)) % 2;
        mbarrier_wait(smem_base() + Pipeline::FULL + 8 * (tile % 2), parity);
        const uint32_t buffer = smem_base() + Pipeline::BUFFERS + tile % 2 * Pipeline::TILE_BYTES;
        const uint32_t empty = smem_base() + Pipeline::EMPTY + 8 * (tile % 2);
        const float4 v = lds<float4>(buffer + 16 * lane_id());
        if (p.plant == Plant::EARLY_EMPTY) mbarrier_arrive(empty);
        const float4 w = lds<float4>(buffer + 16 * (lane_id() + 32));
        p.out[tile * 32 + lane_id()] = v.x + v.y + v.z + v.w + w.x + w.y + w.z + w.w;
        if (p.plant != Plant::EARLY_EMPTY && p.plant != Plant::NO_EMPTY_ARRIVE) mbarrier_arrive(empty);
    }
}

GT_KERNEL(Pipeline::THREADS, 1) pipeline_kernel(const GT_GRID_CONSTANT PipelineParams p) {
    if (thread_id() < 2 && p.plant != Plant::NO_INIT) { /* one thread for each buffer */
        const uint32_t buffer = smem_base() + 8 * thread_id();
        const int wrong = p.plant == Plant::FULL_TOO_SMALL ? -32 : p.plant == Plant::FULL_TOO_LARGE ? 32 : 0;
        mbarrier_init(buffer + Pipeline::FULL, Pipeline::PRODUCERS + wrong);
        mbarrier_init(buffer + Pipeline::EMPTY, Pipeline::THREADS - Pipeline::PRODUCERS);
    }
    if (p.plant != Plant::UNORDERED_INIT) sync_threads();
    if (thread_id() < Pipeline::PRODUCERS) {
        produce(p);
    } else {
        consume(p);
    }
}

/* Runs the pipeline.  Returns whether the results are right. */
static bool run_pipeline(Plant plant) {
    const int tiles = 9;
    Array<float> in(tiles * 256), out(tiles * 32, NAN);
    for (float& x : in) x = random_integer();
    launch(pipeline_kernel, {2}, Pipeline::THREADS, Pipeline::SMEM_BYTES, nullptr,
           PipelineParams{in.data(), out.data(), tiles, plant});
    for (int i = 0; i < tiles * 32; i++) {
        const int tile = i / 32, lane = i % 32;
        float sum = 0;
        for (int k = 0; k < 4; k++) {
            sum += 2 * in[(tile * 64 + 63 - lane) * 4 + k] + 2 * in[(tile * 64 + 31 - lane) * 4 + k];
        }
        if (!same(out[i], sum)) return false;
    }
    return true;
}

static void test_pipeline() {
    bool right = true;
    for (int seed = 1; seed <= 64; seed++) {
        emu::set_seed(seed);
        right = run_pipeline(Plant::NOTHING) && right;
    }
    check(right, "sound pipeline: right results under 64 schedules");
    check_clean("sound pipeline");

    /* With some plants, the schedule of the warps decides which of two faults the emulator finds. */
    const struct {
        Plant plant;
        emu::Fault fault, or_fault;
        const char* name;
    } cases[] = {
        {Plant::WAIT_TOO_LAX, emu::Fault::IN_FLIGHT, emu::Fault::IN_FLIGHT, "cp_async_wait off by one"},
        {Plant::NO_LOADED_BARRIER, emu::Fault::RACE, emu::Fault::IN_FLIGHT, "missing barrier between loads and reads"},
        {Plant::NO_INIT, emu::Fault::BARRIER, emu::Fault::BARRIER, "no mbarrier_init"},
        {Plant::UNORDERED_INIT, emu::Fault::RACE, emu::Fault::BARRIER, "missing barrier after mbarrier_init"},
        {Plant::NO_FULL_ARRIVE, emu::Fault::DEADLOCK, emu::Fault::DEADLOCK, "missing arrive"},
        {Plant::NO_EMPTY_WAIT, emu::Fault::RACE, emu::Fault::BARRIER, "missing wait before reuse"},
        {Plant::NO_EMPTY_ARRIVE, emu::Fault::DEADLOCK, emu::Fault::DEADLOCK, "buffer never given back"},
        {Plant::EARLY_EMPTY, emu::Fault::RACE, emu::Fault::RACE, "arrive before the last read"},
        {Plant::WRONG_PARITY, emu::Fault::RACE, emu::Fault::DEADLOCK, "wrong parity"},
        {Plant::FULL_TOO_SMALL, emu::Fault::RACE, emu::Fault::DEADLOCK, "count too small"},
        {Plant::FULL_TOO_LARGE, emu::Fault::DEADLOCK, emu::Fault::DEADLOCK, "count too large"},
        {Plant::TWO_ARRIVALS, emu::Fault::BARRIER, emu::Fault::BARRIER, "two arrivals for one"},
        {Plant::LEFTOVER_ARRIVAL, emu::Fault::BARRIER, emu::Fault::BARRIER, "arrival left over"},
    };
    for (const auto& c : cases) {
        for (int seed = 1; seed <= 8; seed++) {
            emu::set_seed(seed);
            run_pipeline(c.plant);
            check_caught(c.name, emu::faults(c.fault) ? c.fault : c.or_fault, "pipeline_kernel");
        }
    }
}

/* ---- warpgroups, sound or with one fault planted --------------------------------------------- */

enum class Slip {
    NOTHING,
    NO_FENCE,          /* no fence before the first product of a round */
    LATE_A,            /* A changes after the fence */
    LATE_C,            /* accumulators change after the fence */
    EARLY_READ,        /* the kernel reads accumulators while products write them */
    EARLY_WRITE,       /* the kernel writes accumulators while products write them */
    EARLY_A,           /* the kernel writes registers of A while products read them */
    LAX_WAIT,          /* the wait allows one group in flight */
    NO_COMMIT,         /* no commit: the products are in no group */
    NO_WAIT,           /* the last wait is missing */
    C_AS_A,            /* a product takes accumulators as A while other products write them */
    READER_FENCES,     /* no fault: the threads execute the proxy fence after the barrier, not before */
    NO_PROXY_FENCE,    /* no proxy fence for B */
    LATE_PROXY_FENCE,  /* one warp lacks the proxy fence; the others execute it after the barrier */
    EARLY_PROXY_FENCE, /* the proxy fence comes before the last write of B */
    EARLY_REUSE,       /* B is overwritten before the wait */
    ONE_WARP_LESS,     /* a warp skips a product */
    OTHER_OPERAND,     /* a warp passes another address of B */
    HALF_GROUP,        /* the block has 2 warps, but a warpgroup needs 4 */
    SWIZZLE,
    OUT_OF_BOUNDS
};

struct WarpgroupParams {
    const float *a, *b, *c; /* [groups][64][16], [ROUNDS][16][128], [groups][64][128] */
    float* out;             /* [groups][64][128] */
    int k_bytes, n_bytes;
    Slip slip;
};

constexpr int ROUNDS = 3, TILES = 16, COLUMNS = 8 * TILES;

GT_DEV float* warpgroup_cell(float* c, int tile, int i) {
    const int row = 16 * warp_id() + lane_id() / 4 + 8 * (i / 2); /* row in A and C of all warpgroups */
    return c + row * COLUMNS + 8 * tile + 2 * (lane_id() % 4) + i % 2;
}

/* Computes C[64][128] += A[64][16] B[16][128] in every round, by two products.  Each warpgroup has its own rows of A
 * and C. */
GT_KERNEL(256, 1) warpgroup_kernel(const GT_GRID_CONSTANT WarpgroupParams p) {
    float c[TILES][4], a[2][4];
    for (int x = 0; x < 4 * TILES; x++) c[x / 4][x % 4] = *warpgroup_cell(const_cast<float*>(p.c), x / 4, x % 4);
    for (int x = 0; x < 8; x++) {
        const int row = 16 * warp_id() + lane_id() / 4 + 8 * (x % 2);
        a[x / 4][x % 4] = p.a[16 * row + 8 * (x / 4) + lane_id() % 4 + x / 2 % 2 * 4];
    }
    const uint32_t smem = smem_base() + 16;
    for (int round = 0; round < ROUNDS; round++) {
        const bool slips = round == ROUNDS - 1;
        const auto has = [&](Slip slip) { return slips && p.slip == slip; };
        const auto write_b = [&] {
            for (int x = thread_id(); x < 4 * COLUMNS; x += block_threads()) {
                const int n = x % COLUMNS, k = x / COLUMNS * 4; /* a thread copies 4 neighbours along k */
                const float* from = p.b + (16 * round + k) * COLUMNS + n;
                sts<float4>(smem + k / 4 * p.k_bytes + n / 8 * p.n_bytes + n % 8 * 16,
                            float4{from[0], from[COLUMNS], from[2 * COLUMNS], from[3 * COLUMNS]});
            }
        };
        if (has(Slip::EARLY_PROXY_FENCE)) fence_async_proxy();
        write_b();
        if (!has(Slip::EARLY_PROXY_FENCE) && !has(Slip::NO_PROXY_FENCE) && !has(Slip::LATE_PROXY_FENCE) &&
            p.slip != Slip::READER_FENCES)
            fence_async_proxy();
        sync_threads();
        if (p.slip == Slip::READER_FENCES || (has(Slip::LATE_PROXY_FENCE) && warp_id() > 0)) fence_async_proxy();
        if (!has(Slip::NO_FENCE)) wgmma_fence();
        if (has(Slip::LATE_A)) a[1][2] += 1.0f;
        if (has(Slip::LATE_C)) c[TILES - 1][3] += 1.0f;
        for (int k = 0; k < 2; k++) {
            uint64_t b = wgmma_operand(smem + 2 * k * p.k_bytes, p.k_bytes, p.n_bytes);
            if (has(Slip::OTHER_OPERAND) && warp_id() == 2) b += 1;
            if (has(Slip::SWIZZLE)) b |= 1ull << 62;
            if (has(Slip::OUT_OF_BOUNDS)) b += (uint64_t)k << 40;
            if (k == 1 && has(Slip::ONE_WARP_LESS) && warp_id() == 3) continue;
            wgmma_tf32(c, k == 1 && has(Slip::C_AS_A) ? c[0] : a[k], b);
        }
        if (!has(Slip::NO_COMMIT)) wgmma_commit();
        if (has(Slip::EARLY_READ)) p.out[0] = c[0][0];
        if (has(Slip::EARLY_WRITE)) c[1][1] = 0.0f;
        if (has(Slip::EARLY_A)) a[0][0] = 0.0f;
        if (has(Slip::EARLY_REUSE)) {
            sync_threads();
            write_b();
            fence_async_proxy();
            sync_threads();
        }
        if (has(Slip::LAX_WAIT)) {
            wgmma_wait<1>();
        } else if (!has(Slip::NO_WAIT)) {
            wgmma_wait<0>();
        }
        sync_threads();
    }
    if (p.slip == Slip::EARLY_READ) return;
    for (int x = 0; x < 4 * TILES; x++) *warpgroup_cell(p.out, x / 4, x % 4) = c[x / 4][x % 4];
}

/* Runs the kernel with `groups` warpgroups.  Returns whether the results are right. */
static bool run_warpgroups(int groups, int n_bytes, int k_pad, Slip slip) {
    const int k_bytes = TILES * n_bytes + k_pad;
    Array<float> a(groups * 64 * 16), b(ROUNDS * 16 * COLUMNS), c(groups * 64 * COLUMNS);
    Array<float> out(c.size(), NAN);
    for (float& x : a) x = random_integer();
    /* adds a bit that tf32 lacks, so the tensor core must drop it */
    for (float& x : b) x = random_integer() * (1 + 0x1p-12f);
    for (float& x : c) x = random_integer();
    launch(warpgroup_kernel, {2}, slip == Slip::HALF_GROUP ? 64u : (unsigned)(128 * groups),
           (size_t)(16 + 3 * k_bytes + TILES * n_bytes), nullptr,
           WarpgroupParams{a.data(), b.data(), c.data(), out.data(), k_bytes, n_bytes, slip});
    if (slip == Slip::EARLY_READ) return same(out[0], NAN);
    for (size_t i = 0; i < c.size(); i++) {
        float sum = c[i];
        for (int k = 0; k < ROUNDS * 16; k++)
            sum += a[i / COLUMNS * 16 + k % 16] * roundf(b[k * COLUMNS + i % COLUMNS]);
        if (!same(out[i], sum)) return false;
    }
    return true;
}

static void test_warpgroups() {
    bool right = true;
    for (int seed = 1; seed <= 16; seed++) {
        emu::set_seed(seed);
        right = run_warpgroups(1, 128, 0, Slip::NOTHING) && right;
        right = run_warpgroups(2, 144, 16, Slip::NOTHING) && right;
        right = run_warpgroups(1, 144, 16, Slip::READER_FENCES) && right;
        right = run_warpgroups(2, 128, 48, Slip::NOTHING) && right;
    }
    check(right, "wgmma: right results");
    check(emu::stats().worst_ways <= 8, "wgmma operands: %d ways", emu::stats().worst_ways);
    check_clean("wgmma");

    const struct {
        Slip slip;
        emu::Fault fault;
        const char* name;
    } cases[] = {
        {Slip::NO_FENCE, emu::Fault::WGMMA, "no wgmma_fence"},
        {Slip::LATE_A, emu::Fault::WGMMA, "A changed after wgmma_fence"},
        {Slip::LATE_C, emu::Fault::WGMMA, "accumulator changed after wgmma_fence"},
        {Slip::EARLY_WRITE, emu::Fault::WGMMA, "accumulator written in flight"},
        {Slip::EARLY_A, emu::Fault::WGMMA, "A written in flight"},
        {Slip::LAX_WAIT, emu::Fault::WGMMA, "wgmma_wait off by one"},
        {Slip::NO_COMMIT, emu::Fault::WGMMA, "products never committed"},
        {Slip::NO_WAIT, emu::Fault::WGMMA, "products never waited for"},
        {Slip::C_AS_A, emu::Fault::WGMMA, "accumulators in flight as A"},
        {Slip::NO_PROXY_FENCE, emu::Fault::PROXY, "no fence_async_proxy"},
        {Slip::LATE_PROXY_FENCE, emu::Fault::PROXY, "fence_async_proxy too late, of others"},
        {Slip::EARLY_PROXY_FENCE, emu::Fault::PROXY, "fence_async_proxy before the write"},
        {Slip::EARLY_REUSE, emu::Fault::RACE, "operand overwritten in flight"},
        {Slip::ONE_WARP_LESS, emu::Fault::WGMMA, "a warp skips a product"},
        {Slip::OTHER_OPERAND, emu::Fault::WGMMA, "a warp has another operand"},
        {Slip::HALF_GROUP, emu::Fault::WGMMA, "half a warpgroup"},
        {Slip::SWIZZLE, emu::Fault::UNSUPPORTED, "swizzled operand"},
        {Slip::OUT_OF_BOUNDS, emu::Fault::BOUNDS, "operand out of bounds"},
    };
    for (const auto& c : cases) {
        for (int seed = 1; seed <= 4; seed++) {
            emu::set_seed(seed);
            run_warpgroups(1, 128, 0, c.slip);
            check_caught(c.name, c.fault, "warpgroup_kernel");
        }
    }
    check(run_warpgroups(1, 128, 0, Slip::EARLY_READ), "accumulator read in flight is NaN");
    check_clean("accumulator read in flight");

    const emu::Device usual = emu::device;
    emu::device.capability_major = 8;
    run_warpgroups(1, 128, 0, Slip::NOTHING);
    check_caught("wgmma on sm_80", emu::Fault::UNSUPPORTED, "warpgroup_kernel");
    emu::device = usual;
}

/* ---- small planted faults -------------------------------------------------------------------- */

struct NoParams {
    float* sink;
};

GT_DEV uint32_t my_word() { return smem_base() + 4 * thread_id(); }

GT_KERNEL(64, 1) warp_race_kernel(const GT_GRID_CONSTANT NoParams) {
    sts<float>(my_word(), 1.0f);
    sync_warp();
    lds<float>(my_word() ^ 128); /* reads the other warp's word without a sync_threads before */
}

GT_KERNEL(64, 1) write_race_kernel(const GT_GRID_CONSTANT NoParams) {
    sts<uint16_t>(smem_base() + 2 * lane_id(), (uint16_t)warp_id());
}

GT_KERNEL(32, 1) lane_race_kernel(const GT_GRID_CONSTANT NoParams) {
    sts<float>(my_word(), 1.0f);
    lds<float>(my_word() ^ 4); /* reads another lane's word without a sync_warp before */
}

GT_KERNEL(32, 1) lane_reuse_kernel(const GT_GRID_CONSTANT NoParams) {
    sts<float>(my_word(), 1.0f);
    sync_warp();
    const float value = lds<float>(my_word() ^ 4);
    sts<float>(my_word(), value); /* another lane may still read this word: no sync_warp before */
}

/* Only a shuffle lies between the write of one lane and the read of another.  This works if lanes run in lockstep, but
 * the PTX memory model does not promise this order. */
GT_KERNEL(32, 1) shuffle_order_kernel(const GT_GRID_CONSTANT NoParams) {
    sts<float>(my_word(), 1.0f);
    const int other = shfl_xor(lane_id(), 1);
    lds<float>(smem_base() + 4 * other);
}

GT_KERNEL(32, 1) matrix_order_kernel(const GT_GRID_CONSTANT NoParams) {
    sts<uint4>(smem_base() + 16 * lane_id(), uint4{0, 0, 0, 0});
    uint32_t r[4];
    ldmatrix_x4(r, smem_base() + 16 * lane_id());
}

GT_KERNEL(32, 1) uninitialised_kernel(const GT_GRID_CONSTANT NoParams) {
    if (block_x() == 0) sts<float>(my_word(), 1.0f);
    sync_warp();
    lds<float>(my_word()); /* the second block must not find the words of the first */
}

GT_KERNEL(32, 1) bounds_kernel(const GT_GRID_CONSTANT NoParams) { sts<float>(my_word() + 4, 1.0f); }

GT_KERNEL(32, 1) no_base_kernel(const GT_GRID_CONSTANT NoParams) { sts<float>((uint32_t)(4 * thread_id()), 1.0f); }

GT_KERNEL(32, 1) matrix_bounds_kernel(const GT_GRID_CONSTANT NoParams) {
    uint32_t r;
    ldmatrix_x1(r, smem_base() + 16 * lane_id() + 256);
}

GT_KERNEL(32, 1) misaligned_kernel(const GT_GRID_CONSTANT NoParams) {
    sts<float2>(smem_base() + 8 * thread_id() + 4, float2{1.0f, 2.0f});
}

GT_KERNEL(32, 1) misaligned_global_kernel(const GT_GRID_CONSTANT NoParams p) { ldg<float2>(p.sink + 1); }

GT_KERNEL(32, 1) skipping_lane_kernel(const GT_GRID_CONSTANT NoParams) {
    if (lane_id() == 7) return;
    warp_sum(1.0f);
}

GT_KERNEL(32, 1) other_collective_kernel(const GT_GRID_CONSTANT NoParams) {
    if (lane_id() < 16) {
        warp_sum(1.0f);
    } else {
        sync_warp();
    }
}

GT_KERNEL(32, 1) divergent_barrier_kernel(const GT_GRID_CONSTANT NoParams) {
    if (lane_id() < 16) {
        bar_sync(1, 32);
    } else {
        bar_sync(1, 32);
    }
}

GT_KERNEL(32, 1) barrier_id_kernel(const GT_GRID_CONSTANT NoParams) { bar_sync(1 + lane_id() / 16, 32); }

GT_KERNEL(64, 1) partial_warp_kernel(const GT_GRID_CONSTANT NoParams) { bar_sync(1, 48); }

GT_KERNEL(96, 1) barrier_count_kernel(const GT_GRID_CONSTANT NoParams) {
    if (warp_id() < 2) bar_sync(1, warp_id() == 0 ? 64 : 96);
}

GT_KERNEL(64, 1) barrier_alone_kernel(const GT_GRID_CONSTANT NoParams) {
    if (warp_id() == 0) bar_sync(1, 64);
}

GT_KERNEL(32, 1) too_few_kernel(const GT_GRID_CONSTANT NoParams) { bar_sync(1, 64); }

GT_DEV void init_one_mbarrier(int threads) {
    if (thread_id() == 0) mbarrier_init(smem_base() + 256, threads);
    sync_threads();
}

GT_KERNEL(64, 1) mbarrier_half_warp_kernel(const GT_GRID_CONSTANT NoParams) { init_one_mbarrier(48); }

GT_KERNEL(32, 1) mbarrier_misaligned_kernel(const GT_GRID_CONSTANT NoParams) {
    mbarrier_init(smem_base() + 8 * thread_id() + 4, 32);
}

GT_KERNEL(32, 1) mbarrier_twice_kernel(const GT_GRID_CONSTANT NoParams) {
    init_one_mbarrier(32);
    init_one_mbarrier(32);
}

GT_KERNEL(32, 1) mbarrier_ended_twice_kernel(const GT_GRID_CONSTANT NoParams) {
    init_one_mbarrier(32);
    if (thread_id() == 0) mbarrier_inval(smem_base() + 256);
    if (thread_id() == 0) mbarrier_inval(smem_base() + 256);
}

/* No fault: mbarrier_inval ends the first barrier before the second begins at the same address. */
GT_KERNEL(32, 1) mbarrier_again_kernel(const GT_GRID_CONSTANT NoParams) {
    init_one_mbarrier(32);
    if (thread_id() == 0) mbarrier_inval(smem_base() + 256);
    sync_threads();
    init_one_mbarrier(32);
    mbarrier_arrive(smem_base() + 256);
    mbarrier_wait(smem_base() + 256, 0);
}

GT_KERNEL(32, 1) mbarrier_overwritten_kernel(const GT_GRID_CONSTANT NoParams) {
    init_one_mbarrier(32);
    if (thread_id() == 0) sts<float>(smem_base() + 256, 1.0f);
    sync_threads();
    mbarrier_arrive(smem_base() + 256);
}

/* An arrival alone does not order the lanes of its warp.  Only a wait that observes the phase does. */
GT_KERNEL(32, 1) mbarrier_lanes_kernel(const GT_GRID_CONSTANT NoParams) {
    init_one_mbarrier(32);
    sts<float>(my_word(), 1.0f);
    mbarrier_arrive(smem_base() + 256);
    lds<float>(my_word() ^ 4);
}

GT_KERNEL(32, 1) mbarrier_lanes_reuse_kernel(const GT_GRID_CONSTANT NoParams) {
    init_one_mbarrier(32);
    sts<float>(my_word(), 1.0f);
    sync_warp();
    lds<float>(my_word() ^ 4);
    mbarrier_arrive(smem_base() + 256);
    const float value = lds<float>(my_word());
    sts<float>(my_word(), value); /* nothing orders the other lane's read before this write */
}

GT_KERNEL(32, 1) mbarrier_round_kernel(const GT_GRID_CONSTANT NoParams) {
    init_one_mbarrier(32);
    sts<float>(my_word(), 1.0f);
    mbarrier_arrive(smem_base() + 256);
    mbarrier_wait(smem_base() + 256, 0);
    const float value = lds<float>(my_word() ^ 4);
    mbarrier_arrive(smem_base() + 256);
    mbarrier_wait(smem_base() + 256, 1);
    sts<float>(my_word(), value);
}

/* An arrival releases the writes before it, but not the writes after it. */
GT_KERNEL(64, 1) mbarrier_late_write_kernel(const GT_GRID_CONSTANT NoParams) {
    init_one_mbarrier(32);
    if (warp_id() == 0) {
        mbarrier_arrive(smem_base() + 256);
        sts<float>(my_word(), 1.0f);
    } else {
        mbarrier_wait(smem_base() + 256, 0);
        lds<float>(my_word() ^ 128);
    }
}

GT_KERNEL(32, 1) early_read_kernel(const GT_GRID_CONSTANT NoParams p) {
    cp_async<16>(smem_base() + 16 * thread_id(), p.sink);
    cp_async_commit();
    lds<float4>(smem_base() + 16 * thread_id());
    cp_async_wait<0>();
}

GT_KERNEL(32, 1) uncommitted_kernel(const GT_GRID_CONSTANT NoParams p) {
    cp_async<16>(smem_base() + 16 * thread_id(), p.sink);
    cp_async_wait<0>();
}

GT_KERNEL(32, 1) odd_copy_kernel(const GT_GRID_CONSTANT NoParams p) {
    cp_async<4>(my_word(), p.sink, 3);
    cp_async_commit();
    cp_async_wait<0>();
}

static void test_faults() {
    Array<float4> sink(16);
    const struct {
        void (*kernel)(NoParams);
        const char* kernel_name;
        int threads;
        emu::Fault fault;
        const char* name;
    } cases[] = {
        {warp_race_kernel, "warp_race", 64, emu::Fault::RACE, "race between warps"},
        {write_race_kernel, "write_race", 64, emu::Fault::RACE, "two warps write a cell"},
        {lane_race_kernel, "lane_race", 32, emu::Fault::RACE, "missing sync_warp before a read"},
        {lane_reuse_kernel, "lane_reuse", 32, emu::Fault::RACE, "missing sync_warp before a write"},
        {uninitialised_kernel, "uninitialised", 32, emu::Fault::UNINITIALISED, "uninitialised read"},
        {bounds_kernel, "bounds", 32, emu::Fault::BOUNDS, "shared write out of bounds"},
        {no_base_kernel, "no_base", 32, emu::Fault::BOUNDS, "forgotten smem_base"},
        {matrix_bounds_kernel, "matrix_bounds", 32, emu::Fault::BOUNDS, "ldmatrix out of bounds"},
        {misaligned_kernel, "misaligned", 32, emu::Fault::ALIGNMENT, "misaligned shared vector"},
        {misaligned_global_kernel, "misaligned_global", 32, emu::Fault::ALIGNMENT, "misaligned global vector"},
        {skipping_lane_kernel, "skipping_lane", 32, emu::Fault::DIVERGENCE, "lane skips a shuffle"},
        {other_collective_kernel, "other_collective", 32, emu::Fault::DIVERGENCE, "lanes at different collectives"},
        {divergent_barrier_kernel, "divergent_barrier", 32, emu::Fault::DIVERGENCE,
         "lanes at different barrier instructions"},
        {barrier_id_kernel, "barrier_id", 32, emu::Fault::BARRIER, "lanes at different barriers"},
        {partial_warp_kernel, "partial_warp", 64, emu::Fault::BARRIER, "barrier for half a warp"},
        {barrier_count_kernel, "barrier_count", 96, emu::Fault::BARRIER, "two counts of a barrier"},
        {barrier_alone_kernel, "barrier_alone", 64, emu::Fault::DEADLOCK, "half a barrier"},
        {too_few_kernel, "too_few", 32, emu::Fault::BARRIER, "barrier for more than the block"},
        {mbarrier_half_warp_kernel, "mbarrier_half_warp", 64, emu::Fault::BARRIER, "mbarrier for half a warp"},
        {mbarrier_misaligned_kernel, "mbarrier_misaligned", 32, emu::Fault::ALIGNMENT, "misaligned mbarrier"},
        {mbarrier_twice_kernel, "mbarrier_twice", 32, emu::Fault::BARRIER, "second mbarrier_init of a barrier"},
        {mbarrier_ended_twice_kernel, "mbarrier_ended_twice", 32, emu::Fault::BARRIER, "second mbarrier_inval"},
        {mbarrier_overwritten_kernel, "mbarrier_overwritten", 32, emu::Fault::BARRIER, "overwritten mbarrier"},
        {mbarrier_lanes_kernel, "mbarrier_lanes", 32, emu::Fault::RACE, "arrive between lanes of a warp"},
        {mbarrier_lanes_reuse_kernel, "mbarrier_lanes_reuse", 32, emu::Fault::RACE,
         "arrive between a read and a write of other lanes"},
        {mbarrier_late_write_kernel, "mbarrier_late_write", 64, emu::Fault::RACE, "write after an arrive"},
        {early_read_kernel, "early_read", 32, emu::Fault::IN_FLIGHT, "read before cp_async_wait"},
        {uncommitted_kernel, "uncommitted", 32, emu::Fault::COPY, "copy never committed"},
        {odd_copy_kernel, "odd_copy", 32, emu::Fault::COPY, "cp_async of 3 bytes"},
    };
    for (const auto& c : cases) {
        const size_t smem = c.fault == emu::Fault::BOUNDS ? 128 : 512;
        launch(c.kernel, {2}, (unsigned)c.threads, smem, nullptr, NoParams{reinterpret_cast<float*>(sink.data())});
        check_caught(c.name, c.fault, c.kernel_name);
    }
    launch(mbarrier_round_kernel, {2}, 32, 512, nullptr, NoParams{nullptr});
    check_clean("arrive and wait of one warp");
    launch(mbarrier_again_kernel, {2}, 32, 512, nullptr, NoParams{nullptr});
    check_clean("a barrier where one was ended");
}

/* Tests devices that lack the kernel's instructions or have too little shared memory. */
static void test_devices() {
    const emu::Device usual = emu::device;
    emu::device.capability_major = 7;
    emu::device.capability_minor = 5;
    emu::device.smem_per_block = 64 * 1024;
    launch(mbarrier_round_kernel, {1}, 32, 512, nullptr, NoParams{nullptr});
    check_caught("mbarrier on sm_75", emu::Fault::UNSUPPORTED, "mbarrier_round");
    Array<float> a(256), b(128), c(128), out(3 * 128);
    launch(mma_kernel, {1}, 32, 0, nullptr, MmaParams{a.data(), b.data(), c.data(), out.data()});
    check(emu::faults() == 3, "mma_bf16 and two mma_tf32 on sm_75: %d faults", (int)emu::faults());
    check_caught("mma on sm_75", emu::Fault::UNSUPPORTED, "mma_kernel");
    check(launch(count_kernel, {1}, 32, 64 * 1024 + 1, nullptr, CountParams{nullptr}) == cudaErrorInvalidValue,
          "launch refuses more shared memory than the device has");
    emu::device = usual;
    check_clean("devices");
}

static void test_strict_order() {
    const NoParams none = {nullptr};
    launch(shuffle_order_kernel, {1}, 32, 128, nullptr, none);
    check_caught("order by a shuffle alone", emu::Fault::RACE, "shuffle_order");
    launch(matrix_order_kernel, {1}, 32, 512, nullptr, none);
    check_caught("ldmatrix without sync_warp", emu::Fault::RACE, "matrix_order");
    emu::set_strict(false);
    launch(lane_race_kernel, {1}, 32, 128, nullptr, none);
    check_caught("not strict, no collective", emu::Fault::RACE, "lane_race");
    launch(shuffle_order_kernel, {1}, 32, 128, nullptr, none);
    launch(matrix_order_kernel, {1}, 32, 512, nullptr, none);
    check_clean("not strict, order by a collective");
    emu::set_strict(true);
}

/* ---- bank conflicts -------------------------------------------------------------------------- */

struct StrideParams {
    int stride; /* distance between lanes, in words */
};

GT_KERNEL(32, 1) stride_kernel(const GT_GRID_CONSTANT StrideParams p) {
    sts<uint32_t>(smem_base() + 4 * p.stride * lane_id(), 0u);
}

GT_KERNEL(32, 1) wide_stride_kernel(const GT_GRID_CONSTANT StrideParams p) {
    sts<uint4>(smem_base() + 4 * p.stride * lane_id(), uint4{0, 0, 0, 0});
}

GT_KERNEL(32, 1) divergent_stride_kernel(const GT_GRID_CONSTANT StrideParams p) {
    if (lane_id() >= 16) sts<uint32_t>(smem_base() + 4 * lane_id(), 0u);
    sts<uint32_t>(smem_base() + 1024 + 4 * p.stride * lane_id(), 0u);
}

GT_KERNEL(32, 1) row_stride_kernel(const GT_GRID_CONSTANT StrideParams p) {
    for (int i = 0; i < 4; i++) {
        sts<uint32_t>(smem_base() + 4 * (p.stride * (lane_id() / 4) + 4 * i + lane_id() % 4), 0u);
    }
    sync_warp();
    uint32_t r;
    ldmatrix_x1(r, smem_base() + 4 * p.stride * (lane_id() % 8));
}

static void check_ways(const char* what, void (*kernel)(StrideParams), int stride, int ways, uint64_t wavefronts) {
    launch(kernel, {1}, 32, 32768, nullptr, StrideParams{stride});
    const emu::Stats s = emu::stats();
    check(s.worst_ways == ways && s.wavefronts == wavefronts && emu::faults() == 0,
          "%s, stride %d words: %d ways, %d wavefronts, average %.2f", what, stride, s.worst_ways, (int)s.wavefronts,
          s.average_ways());
    emu::reset();
}

static void test_bank_conflicts() {
    check_ways("4-byte stores", stride_kernel, 1, 1, 1);
    check_ways("4-byte stores", stride_kernel, 8, 8, 8);
    check_ways("4-byte stores", stride_kernel, 9, 1, 1);
    check_ways("4-byte stores", stride_kernel, 32, 32, 32);
    check_ways("16-byte stores", wide_stride_kernel, 4, 1, 4);
    check_ways("16-byte stores", wide_stride_kernel, 32, 8, 32);
    check_ways("divergent stores", divergent_stride_kernel, 8, 8, 9);
    check_ways("ldmatrix", row_stride_kernel, 32, 8, 4 * 8 + 8);
    check_ways("ldmatrix", row_stride_kernel, 36, 1, 4 + 1);

    launch(stride_kernel, {3}, 32, 32768, nullptr, StrideParams{8});
    const std::vector<emu::Traffic> lines = emu::traffic();
    check(lines.size() == 1 && lines[0].instructions == 3 && lines[0].wavefronts == 24 && lines[0].worst_ways == 8 &&
              lines[0].store && lines[0].bytes == 4 && strcmp(lines[0].site.name(), "test_emu.cpp") == 0,
          "traffic per source line");
    launch(wide_stride_kernel, {1}, 32, 32768, nullptr, StrideParams{4});
    launch(stride_kernel, {1}, 32, 32768, nullptr, StrideParams{1});
    const std::vector<emu::KernelTraffic> kernels = emu::kernels();
    check(kernels.size() == 2 && kernels[0].wavefronts == 25 && kernels[0].ideal == 4 && kernels[1].wavefronts == 4 &&
              kernels[1].ideal == 4 &&
              emu::symbol_name(kernels[1].kernel).find("wide_stride_kernel") != std::string::npos,
          "traffic per kernel");
    emu::reset();
}

/* ---- chains ---------------------------------------------------------------------------------- */

/* early: what the block does before its wait.  0: nothing; 1 and 2: reads; 3: writes; 4: it neither accesses memory nor
 * waits. */
struct ChainParams {
    float* data;
    int early;
};

/* Starts a chain (dependent launches): reads the first half of the data, and writes the second half. */
GT_KERNEL(32, 1) chain_kernel(const GT_GRID_CONSTANT ChainParams p) {
    wait_for_chain();
    stg<float>(p.data + 32 + thread_id(), ldg<float>(p.data + thread_id()));
}

GT_KERNEL(32, 1) chained_kernel(const GT_GRID_CONSTANT ChainParams p) {
    if (p.early == 1) ldg<float>(p.data + 32 + thread_id());
    if (p.early == 2) cp_async<4>(my_word(), p.data + 32 + thread_id());
    if (p.early == 3) stg<float>(p.data + thread_id(), 0.0f);
    if (p.early == 4) return;
    wait_for_chain();
    cp_async_commit();
    cp_async_wait<0>();
    stg<float>(p.data + thread_id(), ldg<float>(p.data + 32 + thread_id()));
}

/* A kernel that, before its wait, reads data that the chain only reads, and writes other data.  Both are allowed. */
GT_KERNEL(32, 1) beside_kernel(const GT_GRID_CONSTANT ChainParams p) {
    stg<float>(p.data + 64 + thread_id(), ldg<float>(p.data + thread_id()));
    wait_for_chain();
}

/* A kernel that accesses no memory.  It releases the next kernel before its wait (early) or after it. */
GT_KERNEL(32, 1) releasing_kernel(const GT_GRID_CONSTANT ChainParams p) {
    if (!p.early) wait_for_chain();
    release_chain();
    wait_for_chain();
}

static void test_chain() {
    std::vector<float> data(96, 1.0f);
    const auto run_after = [&](void (*kernel)(ChainParams), int early, bool follows) {
        const ChainParams p = {data.data(), early};
        check(gt::launch(chain_kernel, {1}, 32, 0, nullptr, p) == cudaSuccess &&
                  gt::launch(kernel, {1}, 32, 128, nullptr, p, follows) == cudaSuccess,
              "two kernels");
    };
    run_after(chained_kernel, 0, true);
    run_after(beside_kernel, 0, true);
    for (int early = 1; early <= 4; early++) run_after(chained_kernel, early, false);
    check_clean("a chain that waits, and kernels that are in none");
    static const char* const whats[] = {"reads early", "copies early", "writes early", "never waits"};
    for (int early = 1; early <= 4; early++) {
        run_after(chained_kernel, early, true);
        check_caught(whats[early - 1], emu::Fault::CHAIN, "chained_kernel");
    }
    /* if the second kernel releases the third before its own wait, the first kernel may still run when the third
     * starts */
    const auto run_third = [&](int released_early) {
        run_after(releasing_kernel, released_early, true);
        const ChainParams p = {data.data(), 1};
        check(gt::launch(chained_kernel, {1}, 32, 128, nullptr, p, true) == cudaSuccess, "a third kernel");
    };
    run_third(0);
    check_clean("a third kernel, released after a wait");
    run_third(1);
    check_caught("reads early, released early", emu::Fault::CHAIN, "chained_kernel");
}

/* ---- speed ----------------------------------------------------------------------------------- */

static void report_speed() {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    for (int i = 0; i < 20; i++) run_pipeline(Plant::NOTHING);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const emu::Stats s = emu::stats();
    printf("      %.0f warp-wide shared accesses, %.0f switches in %.3f s\n", (double)s.instructions,
           (double)s.switches, seconds);
    check_clean("speed");
}

int main() {
    test_format<bf16>("bf16");
    test_format<f16>("f16");
    test_tf32();
    test_elements();
    test_functions();
    test_indices();
    test_launch();
    test_widths();
    test_cp_async();
    test_shuffles();
    test_matrices();
    test_mma();
    test_pipeline();
    test_warpgroups();
    test_faults();
    test_devices();
    test_strict_order();
    test_bank_conflicts();
    test_chain();
    report_speed();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
