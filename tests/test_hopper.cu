/* test_hopper.cu - tests the comments of gt/base/wgmma.cuh and bulk.cuh about the hardware.  Compares every layout of a
 * tile, and every shape of a product, with sums on the host.  nvcc compiles this file for a GPU.  A C++ compiler with
 * GT_EMU compiles it for the emulation, so the test also shows that the emulation behaves as the hardware.
 *
 *     test_hopper [--verbose]
 *
 * The numbers are small integers, so every sum is exact in any order. */
#include "gt/base/bulk.cuh"
#include "gt/base/wgmma.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gpu_present.h"
#include "gt/base/launch.cuh"

using namespace gt;

static int passed = 0, failed = 0;
static bool is_verbose = false;

static void check(bool good, const std::string& what) {
    (good ? passed : failed)++;
    if (!good || is_verbose) printf("%s  %s\n", good ? "ok  " : "FAIL", what.c_str());
#ifdef GT_EMU
    if (emu::faults()) failed++;
    for (const std::string& message : emu::messages()) printf("FAIL  %s: %s\n", what.c_str(), message.c_str());
    emu::reset();
#endif
}

static uint32_t random_bits() {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

/* Converts a small integer to the format T. */
template <class T>
static T number(int value) {
    const float x = (float)value;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t half = (uint16_t)(bits >> 16);
    /* shifts the exponent from bfloat16's bias to that of f16, which has 10 mantissa bits */
    if (std::is_same<T, f16>::value && value != 0)
        half = (uint16_t)((bits >> 16 & 0x8000) | ((bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 1023));
    T result;
    memcpy(&result, &half, 2);
    return result;
}

/* ---- memory that host and device see ------------------------------------------------------------------------- */

#ifdef GT_EMU

template <class T>
using Shared = std::vector<T>;

static const char* finish() { return nullptr; }

#else

template <class T>
class Shared {
  public:
    explicit Shared(size_t count) : count_(count) {
        const cudaError_t status = cudaMallocManaged(&data_, count * sizeof(T));
        if (status != cudaSuccess) { /* cudaMallocManaged also reports a failure of an earlier kernel */
            printf("FAIL: no memory: %s\n", cudaGetErrorString(status));
            exit(1);
        }
        memset(static_cast<void*>(data_), 0, count * sizeof(T));
    }
    ~Shared() { cudaFree(data_); }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;

    T* data() { return data_; }
    T* begin() { return data_; }
    T* end() { return data_ + count_; }
    T& operator[](size_t i) { return data_[i]; }
    size_t size() const { return count_; }

  private:
    T* data_;
    size_t count_;
};

static const char* finish() {
    const cudaError_t error = cudaDeviceSynchronize();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

#endif

/* ---- products ------------------------------------------------------------------------------------------------ */

/* where wgmma reads A from: registers, or a tile in shared memory with this major */
enum Source { REGISTERS, K_MAJOR, MN_MAJOR };

constexpr int DEPTH = 64;

/* One warpgroup multiplies 64 rows of A by N rows of B^T; both have DEPTH columns.  `a` holds A by rows, for A in
 * registers.  `image` holds the bytes of the tiles in shared memory, as the host has laid them out. */
template <class T>
struct ProductParams {
    const T* a; /* [64][DEPTH] */
    const uint4* image;
    float* c; /* [64][N] */
    int image_bytes, a_row_bytes, b_row_bytes;
    uint32_t a_panel, b_panel, b_at; /* bytes from panel to panel of A and of B; offset of B in the image */
    uint32_t a_step[DEPTH / 16], b_step[DEPTH / 16];
};

template <Major MAJOR>
GT_DEV uint64_t operand_of(int row_bytes, uint32_t addr, uint32_t panel) {
    if (row_bytes == 128) return wgmma_tile<128, MAJOR>(addr, panel);
    if (row_bytes == 64) return wgmma_tile<64, MAJOR>(addr, panel);
    if (row_bytes == 32) return wgmma_tile<32, MAJOR>(addr, panel);
    return wgmma_tile<16, MAJOR>(addr, panel);
}

template <class T, int TILES, Source A, Major B>
GT_KERNEL(128, 1)
product_kernel(const GT_GRID_CONSTANT ProductParams<T> p) {
#if GT_SM90A
    constexpr int N = 8 * TILES;
    constexpr Major A_MAJOR = A == MN_MAJOR ? Major::MN : Major::K;
    const uint32_t smem = smem_base_of_tiles();
    for (int i = 16 * thread_id(); i < p.image_bytes; i += 16 * 128) sts<uint4>(smem + i, p.image[i / 16]);
    fence_async_proxy();
    sync_threads();

    const int g = lane_id() / 4, j = lane_id() % 4;
    uint32_t a[DEPTH / 16][4] = {};
    uint64_t left[DEPTH / 16], right[DEPTH / 16];
    GT_UNROLL
    for (int k = 0; k < DEPTH / 16; k++) {
        const T* rows = p.a + (16 * warp_id() + g) * DEPTH + 16 * k + 2 * j;
        GT_UNROLL
        for (int i = 0; A == REGISTERS && i < 4; i++) a[k][i] = ldg<uint32_t>(rows + i % 2 * 8 * DEPTH + i / 2 * 8);
        left[k] = wgmma_step(operand_of<A_MAJOR>(p.a_row_bytes, smem, p.a_panel), p.a_step[k]);
        right[k] = wgmma_step(operand_of<B>(p.b_row_bytes, smem + p.b_at, p.b_panel), p.b_step[k]);
    }
    float c[TILES][4];
    wgmma_fence();
    GT_UNROLL
    for (int k = 0; k < DEPTH / 16; k++) {
        if constexpr (A == REGISTERS) {
            wgmma<T, B>(c, a[k], right[k], k > 0);
        } else {
            wgmma<T, A_MAJOR, B>(c, left[k], right[k], k > 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(c);
    float* out = p.c + (16 * warp_id() + g) * N + 2 * j;
    GT_UNROLL
    for (int i = 0; i < TILES; i++) {
        GT_UNROLL
        for (int e = 0; e < 4; e++) out[e / 2 * 8 * N + 8 * i + e % 2] = c[i][e];
    }
#else
    (void)p;
    __trap();
#endif
}

struct Tile {
    /* rows: in the tile; the product reads rows from `first` on; gap: between panels, in patterns of 8 rows */
    int rows, first, row_bytes, gap;
};

static const char* const major_names[] = {"registers", "K-major", "MN-major"};

/* panel_of: bytes from one panel to the next.  bytes_of: bytes of all panels of a tile.  is_mn: the tile is
 * MN-major. */
static uint32_t panel_of(const Tile& t, bool is_mn) {
    return (uint32_t)(((is_mn ? DEPTH : t.rows) + 8 * t.gap) * t.row_bytes);
}
static uint32_t bytes_of(const Tile& t, bool is_mn) {
    const int bytes = 2 * (is_mn ? t.rows : DEPTH);
    return (uint32_t)((bytes + t.row_bytes - 1) / t.row_bytes) * panel_of(t, is_mn);
}

/* Offsets in a tile, as gt/base computes them.  at: of one element.  step: of the operand that starts at (mn, k). */
template <int ROW, Major MAJOR>
struct Asked {
    static uint32_t at(int mn, int k, uint32_t panel) {
        const int row = MAJOR == Major::K ? mn : k, element = MAJOR == Major::K ? k : mn;
        return tile_at<ROW>(row, element / 8, panel) + 2 * (uint32_t)(element % 8);
    }
    static uint32_t step(int mn, int k, uint32_t panel) {
        return mn_bytes<ROW, MAJOR>(mn, panel) + k_bytes<ROW, MAJOR>(k, panel);
    }
};

template <int ROW, Major MAJOR>
static void lay_out(const Tile& t, const std::vector<uint16_t>& values, uint8_t* image, uint32_t* steps) {
    const uint32_t panel = panel_of(t, MAJOR == Major::MN);
    for (int i = 0; i < t.rows; i++)
        for (int k = 0; k < DEPTH; k++)
            memcpy(image + Asked<ROW, MAJOR>::at(i, k, panel), &values[(size_t)(i * DEPTH + k)], 2);
    for (int k = 0; k < DEPTH; k += 16) steps[k / 16] = Asked<ROW, MAJOR>::step(t.first, k, panel);
}

template <Major MAJOR>
static void lay_out(const Tile& t, const std::vector<uint16_t>& values, uint8_t* image, uint32_t* steps) {
    if (t.row_bytes == 128) lay_out<128, MAJOR>(t, values, image, steps);
    if (t.row_bytes == 64) lay_out<64, MAJOR>(t, values, image, steps);
    if (t.row_bytes == 32) lay_out<32, MAJOR>(t, values, image, steps);
    if (t.row_bytes == 16) lay_out<16, MAJOR>(t, values, image, steps);
}

struct Matrix {
    std::vector<int> values;
    std::vector<uint16_t> bits;

    template <class T>
    static Matrix random(int rows) {
        Matrix m;
        for (int i = 0; i < rows * DEPTH; i++) {
            m.values.push_back((int)(random_bits() % 17) - 8);
            m.bits.push_back(number<T>(m.values.back()).bits);
        }
        return m;
    }
};

template <class T, int TILES, Source A, Major B>
static void multiply(const Tile& left, const Tile& right) {
    constexpr int N = 8 * TILES;
    const bool b_is_mn = B == Major::MN, a_is_mn = A == MN_MAJOR;
    const Matrix a = Matrix::random<T>(left.rows), b = Matrix::random<T>(right.rows);
    const uint32_t a_bytes = A == REGISTERS ? 0 : (bytes_of(left, a_is_mn) + 1023) / 1024 * 1024;
    const uint32_t bytes = a_bytes + bytes_of(right, b_is_mn);
    Shared<uint4> image(bytes / 16);
    Shared<T> rows((size_t)(64 * DEPTH));
    Shared<float> c(64 * N);
    ProductParams<T> p = {};
    p.a = rows.data();
    p.image = image.data();
    p.c = c.data();
    p.image_bytes = (int)bytes;
    p.a_row_bytes = left.row_bytes;
    p.b_row_bytes = right.row_bytes;
    p.a_panel = panel_of(left, a_is_mn);
    p.b_panel = panel_of(right, b_is_mn);
    p.b_at = a_bytes;
    uint8_t* image_bytes = reinterpret_cast<uint8_t*>(image.data());
    /* a product that reads bytes between the panels gets a wrong result: 0x7f7f is a large number or a NaN */
    memset(image_bytes, 0x7f, bytes);
    if (A == REGISTERS) memcpy(static_cast<void*>(rows.data()), &a.bits[(size_t)(left.first * DEPTH)], 64 * DEPTH * 2);
    if (A == K_MAJOR) lay_out<Major::K>(left, a.bits, image_bytes, p.a_step);
    if (A == MN_MAJOR) lay_out<Major::MN>(left, a.bits, image_bytes, p.a_step);
    lay_out<B>(right, b.bits, image_bytes + a_bytes, p.b_step);
    const std::string name = std::string(std::is_same<T, f16>::value ? "f16" : "bf16") + " n" + std::to_string(N) +
                             ", A: " + major_names[A] + ", rows of " + std::to_string(left.row_bytes) + " from " +
                             std::to_string(left.first) + ", gap " + std::to_string(left.gap) +
                             ", B: " + major_names[b_is_mn ? 2 : 1] + ", rows of " + std::to_string(right.row_bytes) +
                             " from " + std::to_string(right.first) + ", gap " + std::to_string(right.gap);
    const cudaError_t error = launch(product_kernel<T, TILES, A, B>, {1}, 128, bytes, nullptr, p);
    const char* trouble = error == cudaSuccess ? finish() : cudaGetErrorString(error);
    if (trouble) {
        check(false, name + ": " + trouble);
        return;
    }
    int wrong = 0;
    for (int m = 0; m < 64; m++) {
        for (int n = 0; n < N; n++) {
            int sum = 0;
            for (int k = 0; k < DEPTH; k++)
                sum += a.values[(size_t)((left.first + m) * DEPTH + k)] *
                       b.values[(size_t)((right.first + n) * DEPTH + k)];
            wrong += c[(size_t)(m * N + n)] != (float)sum;
        }
    }
    check(wrong == 0, name + (wrong ? ": " + std::to_string(wrong) + " of " + std::to_string(64 * N) : ""));
}

/* Tests all layouts of B, for A from one source. */
template <class T, int TILES, Source A>
static void multiply_all(const Tile& left) {
    constexpr int N = 8 * TILES;
    for (int row_bytes = 16; row_bytes <= 128; row_bytes *= 2) {
        multiply<T, TILES, A, Major::K>(left, {N, 0, row_bytes, 0});
        multiply<T, TILES, A, Major::K>(left, {N + 24, 16, row_bytes, 1});
        multiply<T, TILES, A, Major::MN>(left, {N, 0, row_bytes, 0});
        /* rows m or n of the tile in one panel */
        const int panel = row_bytes / 2;
        multiply<T, TILES, A, Major::MN>(left, {N + 2 * panel, panel, row_bytes, 1}); /* B starts at the second panel */
        /* B starts inside a panel */
        if (N + 8 <= panel) multiply<T, TILES, A, Major::MN>(left, {panel + N, panel - N, row_bytes, 1});
    }
}

template <class T, int TILES>
static void multiply_all() {
    multiply_all<T, TILES, REGISTERS>({64, 0, 128, 0});
    for (int row_bytes = 16; row_bytes <= 128; row_bytes *= 2) {
        /* A is the second half of its tile or a whole tile, in every layout; B has the usual layout */
        multiply<T, TILES, K_MAJOR, Major::K>({128, 64, row_bytes, 1}, {8 * TILES, 0, 128, 0});
        multiply<T, TILES, K_MAJOR, Major::MN>({64, 0, row_bytes, 0}, {8 * TILES, 0, 128, 0});
        multiply<T, TILES, MN_MAJOR, Major::K>({128, 64, row_bytes, 1}, {8 * TILES, 0, 128, 0});
        multiply<T, TILES, MN_MAJOR, Major::MN>({64, 0, row_bytes, 0}, {8 * TILES, 0, 128, 0});
    }
}

/* Tests products with every number of columns. */
template <int TILES>
static void multiply_shapes() {
    multiply<f16, TILES, REGISTERS, Major::K>({64, 0, 128, 0}, {8 * TILES, 0, 128, 0});
    multiply<bf16, TILES, K_MAJOR, Major::MN>({64, 0, 128, 0}, {8 * TILES, 0, 128, 0});
    if constexpr (TILES > 1) multiply_shapes<TILES - 1>();
}

/* ---- a relay: loads, products, a store ----------------------------------------------------------------------- */

/* Faults that the test plants in the last round or after it, for the emulation to find.  On a GPU only NOTHING runs. */
enum class Slip {
    NOTHING,
    NO_INIT_FENCE,      /* no proxy fence after the initialisation of the mbarriers */
    NO_FULL_WAIT,       /* the consumer does not wait for its tiles */
    NO_EMPTY_WAIT,      /* producers do not wait for free tiles */
    NO_COPIES_ARRIVE,   /* no thread waits for the copies of cp_async */
    TOO_FEW_BYTES,      /* the mbarrier expects fewer bytes than the loads bring */
    TOO_MANY_BYTES,     /* the mbarrier expects more bytes than the loads bring */
    TWO_PHASES_BYTES,   /* the mbarrier does not expect the bytes of one of the four loads */
    ODD_LOAD,           /* the length of a load is no multiple of 16 bytes */
    NO_PROXY_FENCE,     /* no proxy fence between the copies of cp_async and the products */
    EARLY_PROXY_FENCE,  /* this proxy fence comes before the wait for the copies */
    NO_REUSE_FENCE,     /* no proxy fence between the consumer's write to a tile and the next load into it */
    NO_WGMMA_FENCE,     /* no wgmma_fence before the products */
    EARLY_A,            /* registers of A change while products are in flight */
    EARLY_C,            /* accumulators change while products are in flight */
    MIXED_SHAPES,       /* a product of another shape uses accumulators in flight */
    SHIFTED_TILE,       /* the tile starts in the middle of a swizzle pattern */
    LEAVES_PANEL,       /* an operand reaches past the end of its rows */
    WRONG_ROW,          /* the operand has rows of 64 bytes, so the product reads wrong numbers */
    WRONG_MAJOR,        /* the operand is MN-major, so the product reads wrong numbers */
    NO_STORE_FENCE,     /* no proxy fence before the store */
    NO_STORE_BARRIER,   /* no barrier between the other warps' writes and the store */
    NO_STORE_WAIT,      /* no wait for the store before the kernel ends */
    TOO_MANY_REGISTERS, /* the warps take more registers than the block has */
    ONE_WARP_GIVES      /* only one warp of a warpgroup gives its registers back */
};

constexpr int RELAY_ROUNDS = 5, RELAY_BUFFERS = 2, RELAY_TILE = 64 * 128; /* RELAY_TILE: bytes */

/* Computes C[64][64], the sum of A_r B_r over all rounds r.  All tiles are K-major with rows of 128 bytes.  A comes as
 * images of tiles, and B as rows of k.  With A in registers, the result is C^T, and warp 6 executes the proxy fence for
 * B. Otherwise the consumers execute this fence. */
struct RelayParams {
    const uint8_t* a; /* [rounds] images */
    const f16* b;     /* [rounds][n][k] */
    uint8_t* c;       /* image of a tile in f16: C, or C^T with A in registers */
    Slip slip;
};

/* The planted fault.  On a GPU it is a constant, so that no branches lie between the products. */
[[maybe_unused]] GT_DEV Slip slip_of(const RelayParams& p) {
#ifdef GT_EMU
    return p.slip;
#else
    (void)p;
    return Slip::NOTHING;
#endif
}

struct RelayMemory {
    static constexpr int A = 0, B = RELAY_TILE, BUFFER = 2 * RELAY_TILE, C = RELAY_BUFFERS * BUFFER;
    static constexpr int FULL = C + RELAY_TILE, EMPTY = FULL + 8 * RELAY_BUFFERS;
    static constexpr int LANDED = EMPTY + 8 * RELAY_BUFFERS, BYTES = LANDED + 8 * RELAY_BUFFERS;
};

/* Warp 4 loads A by bulk copies, and warp 5 copies B by cp_async.  With A in registers, warp 6 executes the proxy fence
 * for B. */
template <bool A_IN_REGISTERS>
GT_DEV void relay_producers(const RelayParams& p, uint32_t smem) {
    using M = RelayMemory;
    for (int r = 0; r < RELAY_ROUNDS; r++) {
        const auto has = [&](Slip slip) { return r == RELAY_ROUNDS - 1 && slip_of(p) == slip; };
        const uint32_t buffer = smem + r % RELAY_BUFFERS * M::BUFFER;
        const uint32_t full = smem + M::FULL + 8 * (r % RELAY_BUFFERS), empty = full + M::EMPTY - M::FULL;
        if (warp_id() != 6 && !has(Slip::NO_EMPTY_WAIT)) mbarrier_wait(empty, (r / RELAY_BUFFERS + 1) % 2);
        if (warp_id() == 4) {
            const int wrong = has(Slip::TOO_FEW_BYTES)      ? -16
                              : has(Slip::TOO_MANY_BYTES)   ? 16
                              : has(Slip::TWO_PHASES_BYTES) ? -RELAY_TILE / 4
                                                            : 0;
            mbarrier_arrive_expect(full, (uint32_t)(RELAY_TILE + wrong));
            for (int i = 0; i < RELAY_TILE; i += RELAY_TILE / 4) {
                const int odd = has(Slip::ODD_LOAD) ? 8 : 0;
                bulk_load(buffer + M::A + i, p.a + r * RELAY_TILE + i, (uint32_t)(RELAY_TILE / 4 - odd), full);
            }
        } else if (warp_id() == 5) {
            for (int i = lane_id(); i < RELAY_TILE / 16; i += 32)
                cp_async<16>(buffer + M::B + panel_at<128>(i / 8, i % 8), p.b + r * 64 * 64 + 8 * i);
            const uint32_t landed = full + M::LANDED - M::FULL;
            if (!has(Slip::NO_COPIES_ARRIVE)) cp_async_arrive(A_IN_REGISTERS ? landed : full);
        } else if (A_IN_REGISTERS && warp_id() == 6) {
            if (has(Slip::EARLY_PROXY_FENCE)) fence_async_proxy();
            mbarrier_wait(full + M::LANDED - M::FULL, r / RELAY_BUFFERS % 2);
            if (!has(Slip::EARLY_PROXY_FENCE)) fence_async_proxy();
            mbarrier_arrive(full);
        }
    }
}

template <bool A_IN_REGISTERS>
GT_DEV void relay_consumers(const RelayParams& p, uint32_t smem) {
    using M = RelayMemory;
    float c[8][4];
    uint32_t a[4][4] = {};
    const int row = 16 * warp_id() + lane_id() % 16; /* the lane's row in a tile, for ldmatrix and stmatrix */
    for (int r = 0; r < RELAY_ROUNDS; r++) {
        const auto has = [&](Slip slip) { return r == RELAY_ROUNDS - 1 && slip_of(p) == slip; };
        const uint32_t buffer = smem + r % RELAY_BUFFERS * M::BUFFER;
        const uint32_t full = smem + M::FULL + 8 * (r % RELAY_BUFFERS), empty = full + M::EMPTY - M::FULL;
        if (!has(Slip::NO_FULL_WAIT)) mbarrier_wait(full, r / RELAY_BUFFERS % 2);
        if (!A_IN_REGISTERS && !has(Slip::NO_PROXY_FENCE)) fence_async_proxy();
        GT_UNROLL
        for (int k = 0; k < 4; k++)
            if (A_IN_REGISTERS) ldmatrix_x4(a[k], buffer + M::A + panel_at<128>(row, 2 * k + lane_id() / 16));
        uint64_t left = wgmma_tile<128, Major::K>(buffer + M::A), right = wgmma_tile<128, Major::K>(buffer + M::B);
        if (has(Slip::SHIFTED_TILE)) right = wgmma_tile<128, Major::K>(buffer + M::B + 128);
        if (has(Slip::LEAVES_PANEL)) right = wgmma_step(right, 16);
        if (has(Slip::WRONG_ROW)) right = wgmma_tile<64, Major::K>(buffer + M::B);
        wgmma_pin(c);
        if (!has(Slip::NO_WGMMA_FENCE)) wgmma_fence();
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            uint64_t b = wgmma_step(right, k_bytes<128, Major::K>(16 * k));
            if (has(Slip::WRONG_ROW)) b = wgmma_step(right, k_bytes<64, Major::K>(16 * k, RELAY_TILE / 2));
            if constexpr (A_IN_REGISTERS) {
                wgmma<f16>(c, a[k], b, r + k > 0);
            } else if (has(Slip::WRONG_MAJOR)) {
#ifdef GT_EMU
                const uint64_t step = k_bytes<128, Major::MN>(16 * k);
                wgmma<f16, Major::K, Major::MN>(c, wgmma_step(left, 32 * k), wgmma_step(right, step));
#endif
            } else {
                wgmma<f16>(c, wgmma_step(left, k_bytes<128, Major::K>(16 * k)), b, r + k > 0);
            }
        }
#ifdef GT_EMU
        if (has(Slip::MIXED_SHAPES)) wgmma<f16>(reinterpret_cast<float(&)[4][4]>(c), left, right);
#endif
        wgmma_commit();
#ifdef GT_EMU
        if (has(Slip::EARLY_A)) a[3][1]++;
        if (has(Slip::EARLY_C)) c[5][1] = 1.0f;
#endif
        wgmma_wait<0>();
        wgmma_pin(c);
        if (slip_of(p) == Slip::NO_REUSE_FENCE && r < RELAY_ROUNDS - RELAY_BUFFERS)
            sts<uint32_t>(buffer + M::A + 4 * thread_id(), 0);
        mbarrier_arrive(empty);
    }
    GT_UNROLL
    for (int i = 0; i < 8; i += 2) {
        const uint32_t pairs[4] = {pack_f16(c[i][0], c[i][1]), pack_f16(c[i][2], c[i][3]),
                                   pack_f16(c[i + 1][0], c[i + 1][1]), pack_f16(c[i + 1][2], c[i + 1][3])};
        if (A_IN_REGISTERS) {
            const int column = 8 * (i + lane_id() / 16) + lane_id() % 8;
            stmatrix_x4_trans(smem + M::C + panel_at<128>(column, 2 * warp_id() + lane_id() / 8 % 2), pairs);
        } else {
            stmatrix_x4(smem + M::C + panel_at<128>(row, i + lane_id() / 16), pairs);
        }
    }
    if (slip_of(p) != Slip::NO_STORE_FENCE) fence_async_proxy();
    if (slip_of(p) != Slip::NO_STORE_BARRIER) bar_sync(1, 128);
    if (warp_id() == 0) {
        bulk_store(p.c, smem + M::C, RELAY_TILE);
        bulk_commit();
        if (slip_of(p) != Slip::NO_STORE_WAIT) bulk_wait<0>();
    }
}

template <bool A_IN_REGISTERS>
GT_KERNEL(GT_SM90A ? 256 : 32, 1)
relay_kernel(const GT_GRID_CONSTANT RelayParams p) {
#if GT_SM90A
    using M = RelayMemory;
    const uint32_t smem = smem_base_of_tiles();
    if (thread_id() < RELAY_BUFFERS) {
        mbarrier_init(smem + M::FULL + 8 * thread_id(), 64);
        mbarrier_init(smem + M::EMPTY + 8 * thread_id(), 128);
        mbarrier_init(smem + M::LANDED + 8 * thread_id(), 32);
    }
    if (slip_of(p) != Slip::NO_INIT_FENCE) fence_async_proxy();
    sync_threads();
#ifdef GT_EMU
    if (warp_id() >= 8) { /* only TOO_MANY_REGISTERS launches these warps */
        take_registers<240>();
        return;
    }
#endif
    if (warp_id() < 4) {
        take_registers<240>();
        relay_consumers<A_IN_REGISTERS>(p, smem);
    } else {
#ifdef GT_EMU
        if (slip_of(p) == Slip::TOO_MANY_REGISTERS) {
            give_registers<80>();
        } else if (slip_of(p) != Slip::ONE_WARP_GIVES || warp_id() == 4) {
            give_registers<24>();
        }
#else
        give_registers<24>();
#endif
        relay_producers<A_IN_REGISTERS>(p, smem);
    }
#else
    (void)p;
    __trap();
#endif
}

/* Runs the relay.  Returns a text about the error, or an empty string. */
static std::string run_relay(bool a_in_registers, Slip slip) {
    std::vector<int> sums(64 * 64);
    Shared<uint8_t> a(RELAY_ROUNDS * RELAY_TILE), c(RELAY_TILE);
    Shared<f16> b(RELAY_ROUNDS * 64 * 64);
    for (int r = 0; r < RELAY_ROUNDS; r++) {
        const Matrix left = Matrix::random<f16>(64), right = Matrix::random<f16>(64);
        uint32_t steps[4];
        lay_out<Major::K>({64, 0, 128, 0}, left.bits, &a[(size_t)(r * RELAY_TILE)], steps);
        memcpy(static_cast<void*>(&b[(size_t)(r * 64 * 64)]), right.bits.data(), RELAY_TILE);
        for (int i = 0; i < 64 * 64; i++)
            for (int k = 0; k < 64; k++)
                sums[(size_t)i] += left.values[(size_t)(i / 64 * 64 + k)] * right.values[(size_t)(i % 64 * 64 + k)];
    }
    const RelayParams p = {a.data(), b.data(), c.data(), slip};
    const cudaError_t error = launch(a_in_registers ? relay_kernel<true> : relay_kernel<false>, {2},
                                     slip == Slip::TOO_MANY_REGISTERS ? 384 : 256, RelayMemory::BYTES, nullptr, p);
    const char* trouble = error == cudaSuccess ? finish() : cudaGetErrorString(error);
    if (trouble) return trouble;
    int wrong = 0;
    for (int i = 0; i < 64 * 64; i++) {
        uint16_t bits;
        const int row = a_in_registers ? i % 64 : i / 64, column = a_in_registers ? i / 64 : i % 64;
        memcpy(&bits, &c[panel_at<128>(row, column / 8) + 2 * (column % 8)], 2);
        wrong += bits != f32_to_f16((float)sums[(size_t)i]);
    }
    return wrong ? std::to_string(wrong) + " wrong" : "";
}

static void test_relay() {
    for (int a_in_registers = 0; a_in_registers < 2; a_in_registers++) {
#ifdef GT_EMU
        for (int seed = 1; seed <= 16; seed++) {
            emu::set_seed((uint64_t)seed);
#endif
            const std::string wrong = run_relay(a_in_registers, Slip::NOTHING);
            check(wrong.empty(), std::string("relay, A in ") + (a_in_registers ? "registers " : "memory ") + wrong);
#ifdef GT_EMU
        }
#endif
    }
}

#ifdef GT_EMU

static void test_faults() {
    const emu::Fault WRONG_NUMBERS = emu::Fault::COUNT;
    const struct {
        Slip slip;
        emu::Fault fault;
        const char* name;
        emu::Fault or_fault = emu::Fault::COUNT; /* a fault that the emulation finds instead under some schedules */
    } cases[] = {
        {Slip::NO_INIT_FENCE, emu::Fault::PROXY, "mbarriers not handed over"},
        {Slip::NO_FULL_WAIT, emu::Fault::IN_FLIGHT, "tiles not waited for", emu::Fault::BARRIER},
        {Slip::NO_EMPTY_WAIT, emu::Fault::BARRIER, "a tile loaded too early", emu::Fault::RACE},
        {Slip::NO_COPIES_ARRIVE, emu::Fault::DEADLOCK, "no cp_async_arrive"},
        {Slip::TOO_FEW_BYTES, emu::Fault::BARRIER, "too few bytes expected"},
        {Slip::TOO_MANY_BYTES, emu::Fault::DEADLOCK, "too many bytes expected"},
        {Slip::TWO_PHASES_BYTES, emu::Fault::IN_FLIGHT, "a load not expected", emu::Fault::BARRIER},
        {Slip::ODD_LOAD, emu::Fault::ALIGNMENT, "a load of odd length"},
        {Slip::NO_PROXY_FENCE, emu::Fault::PROXY, "no fence_async_proxy after cp_async"},
        {Slip::EARLY_PROXY_FENCE, emu::Fault::PROXY, "fence_async_proxy too early, between the two"},
        {Slip::NO_REUSE_FENCE, emu::Fault::PROXY, "no fence_async_proxy before a load"},
        {Slip::NO_WGMMA_FENCE, emu::Fault::WGMMA, "no wgmma_fence"},
        {Slip::EARLY_A, emu::Fault::WGMMA, "A written in flight"},
        {Slip::EARLY_C, emu::Fault::WGMMA, "sums written in flight"},
        {Slip::MIXED_SHAPES, emu::Fault::WGMMA, "sums in flight in another shape"},
        {Slip::SHIFTED_TILE, emu::Fault::ALIGNMENT, "a tile that is not aligned"},
        {Slip::LEAVES_PANEL, emu::Fault::WGMMA, "an operand that leaves its panel"},
        {Slip::WRONG_ROW, WRONG_NUMBERS, "an operand of other rows"},
        {Slip::WRONG_MAJOR, WRONG_NUMBERS, "an operand of the other major"},
        {Slip::NO_STORE_FENCE, emu::Fault::PROXY, "no fence_async_proxy before a store"},
        {Slip::NO_STORE_BARRIER, emu::Fault::RACE, "no barrier before a store"},
        {Slip::NO_STORE_WAIT, emu::Fault::COPY, "a store not waited for"},
        {Slip::TOO_MANY_REGISTERS, emu::Fault::DEADLOCK, "more registers than there are"},
        {Slip::ONE_WARP_GIVES, emu::Fault::WGMMA, "a warp gives registers, the others do not"},
    };
    for (const auto& c : cases) {
        for (int seed = 1; seed <= 4; seed++) {
            emu::set_seed((uint64_t)seed);
            const std::string wrong = run_relay(c.slip == Slip::EARLY_A || c.slip == Slip::EARLY_PROXY_FENCE, c.slip);
            const bool is_there = c.fault != WRONG_NUMBERS && emu::faults(c.fault) > 0;
            const bool is_other = c.or_fault != WRONG_NUMBERS && emu::faults(c.or_fault) > 0;
            const bool caught = is_there || is_other || (c.fault == WRONG_NUMBERS && !wrong.empty() && !emu::faults());
            std::string message = c.name;
            for (const std::string& m : emu::messages()) message += "\n          " + m;
            emu::reset();
            check(caught, message);
        }
    }
    const emu::Device usual = emu::device;
    emu::device.capability_major = 8;
    run_relay(false, Slip::NOTHING);
    const bool caught = emu::faults(emu::Fault::UNSUPPORTED) > 0;
    emu::reset();
    emu::device = usual;
    check(caught, "on sm_80");
}

#endif

/* ---- boxes of tensors ---------------------------------------------------------------------------------------- */

/* Loads a box of a tensor into shared memory, copies its bytes to `image`, and stores the box to another tensor. */
struct BoxParams {
    TensorMap from, to;
    uint4* image;
    int bytes, at[3], to_at[3];
    /* planted faults: bytes by which the box is misaligned, and bytes that are missing from the expected number */
    uint32_t shift, fewer;
};

GT_KERNEL(32, 1) box_kernel(const GT_GRID_CONSTANT BoxParams p) {
#if GT_SM90A
    const uint32_t smem = smem_base_of_tiles(), barrier = smem, box = smem + 1024 + p.shift;
    if (thread_id() == 0) mbarrier_init(barrier, 32);
    fence_async_proxy();
    sync_threads();
    mbarrier_arrive_expect(barrier, (uint32_t)p.bytes - p.fewer);
    tile_load(box, p.from, p.at[0], p.at[1], p.at[2], barrier);
    mbarrier_wait(barrier, 0);
    for (int i = 16 * thread_id(); i < p.bytes; i += 16 * 32) stg<uint4>(p.image + i / 16, lds<uint4>(box + i));
    tile_store(p.to, p.to_at[0], p.to_at[1], p.to_at[2], box);
    bulk_commit();
    bulk_wait_read<0>();
    bulk_wait<0>();
#else
    (void)p;
    __trap();
#endif
}

struct Box {
    int size[3], pitch, box[3], at[3];
    bool swizzled;
};

/* Loads and stores one box, and checks `image` and the stored tensor.  A box that begins before the start of its tensor
 * is stored from the start on, unless `stored_before` is set.  Returns a text about the error, or an empty string. */
template <class T>
static std::string run_box(const Box& b, uint32_t shift = 0, uint32_t fewer = 0, bool stored_before = false) {
    const int64_t pitch = b.pitch, plane = pitch * (b.size[1] + 1);
    const size_t count = (size_t)(plane * b.size[2]);
    Shared<T> from(count), to(count);
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = random_bits() | 1; /* never 0, which stands for elements outside the tensor */
        memcpy(static_cast<void*>(&from[i]), &bits, sizeof(T));
        memset(static_cast<void*>(&to[i]), 0, sizeof(T));
    }
    const TensorShape shape = {
        {b.size[0], b.size[1], b.size[2]}, {pitch, plane}, {b.box[0], b.box[1], b.box[2]}, b.swizzled};
    BoxParams p = {};
    p.bytes = b.box[0] * b.box[1] * b.box[2] * (int)sizeof(T);
    Shared<uint4> image((size_t)p.bytes / 16);
    p.image = image.data();
    std::copy(b.at, b.at + 3, p.at);
    for (int d = 0; d < 3; d++) p.to_at[d] = stored_before ? b.at[d] : std::max(b.at[d], 0);
    p.shift = shift;
    p.fewer = fewer;
    cudaError_t error = make_tensor_map(&p.from, from.data(), shape);
    if (error == cudaSuccess) error = make_tensor_map(&p.to, to.data(), shape);
    if (error == cudaSuccess) error = launch(box_kernel, {1}, 32, 2048 + (size_t)p.bytes, nullptr, p);
    const char* trouble = error == cudaSuccess ? finish() : cudaGetErrorString(error);
    if (trouble) return trouble;

    const int row_bytes = b.box[0] * (int)sizeof(T);
    std::vector<T> expected(count);
    memset(static_cast<void*>(expected.data()), 0, count * sizeof(T));
    int wrong = 0;
    for (int z = 0; z < b.box[2]; z++) {
        for (int y = 0; y < b.box[1]; y++) {
            for (int x = 0; x < b.box[0]; x++) {
                const int i[3] = {b.at[0] + x, b.at[1] + y, b.at[2] + z};
                const int to_i[3] = {p.to_at[0] + x, p.to_at[1] + y, p.to_at[2] + z};
                bool is_there = true, is_stored = true;
                for (int d = 0; d < 3; d++) {
                    is_there = is_there && i[d] >= 0 && i[d] < b.size[d];
                    is_stored = is_stored && to_i[d] >= 0 && to_i[d] < b.size[d];
                }
                T value;
                memset(static_cast<void*>(&value), 0, sizeof value);
                if (is_there) value = from[(size_t)(i[2] * plane + i[1] * pitch + i[0])];
                if (is_stored) expected[(size_t)(to_i[2] * plane + to_i[1] * pitch + to_i[0])] = value;
                const int row = z * b.box[1] + y, byte = x * (int)sizeof(T), piece = byte / 16;
                uint32_t place = (uint32_t)(row * row_bytes + byte);
                if (b.swizzled)
                    place = byte % 16 + (row_bytes == 128  ? panel_at<128>(row, piece)
                                         : row_bytes == 64 ? panel_at<64>(row, piece)
                                                           : panel_at<32>(row, piece));
                wrong += memcmp(reinterpret_cast<const char*>(image.data()) + place, &value, sizeof(T)) != 0;
            }
        }
    }
    const bool stored = memcmp(static_cast<const void*>(to.data()), expected.data(), count * sizeof(T)) == 0;
    return (wrong ? std::to_string(wrong) + " wrong, " : std::string()) + (stored ? "" : "stored wrong");
}

/* Tests boxes in f16, bf16 and fp32.  Every box begins at a multiple of 16 bytes in its rows. */
static void test_boxes() {
    const struct {
        const char* name;
        Box box;
    } cases[] = {
        {"128-byte rows", {{200, 100, 1}, 208, {64, 64, 1}, {64, 16, 0}, true}},
        {"128-byte rows over the edges", {{200, 100, 1}, 200, {64, 64, 1}, {160, 60, 0}, true}},
        {"128-byte rows from before the start", {{200, 100, 1}, 200, {64, 16, 1}, {-8, -3, 0}, true}},
        {"64-byte rows of a stack", {{96, 20, 6}, 104, {32, 8, 4}, {40, 5, 1}, true}},
        {"32-byte rows beyond a stack", {{48, 40, 3}, 48, {16, 24, 2}, {8, 9, 2}, true}},
        {"plain rows", {{300, 30, 2}, 304, {120, 10, 2}, {56, 7, 0}, false}},
        {"plain rows of 16 bytes", {{64, 64, 1}, 64, {8, 64, 1}, {24, 1, 0}, false}},
    };
    for (const auto& c : cases) {
        const std::string f16_wrong = run_box<f16>(c.box), bf16_wrong = run_box<bf16>(c.box);
        check(f16_wrong.empty(), std::string("box of f16, ") + c.name + ": " + f16_wrong);
        check(bf16_wrong.empty(), std::string("box of bf16, ") + c.name + ": " + bf16_wrong);
        Box half = c.box; /* a box of half as many elements has the same bytes in fp32 */
        half.box[0] /= 2;
        if (half.box[0] % 4 == 0) {
            const std::string wrong = run_box<float>(half);
            check(wrong.empty(), std::string("box of fp32, ") + c.name + ": " + wrong);
        }
    }
#ifdef GT_EMU
    const auto faults = [&](emu::Fault fault, uint32_t shift, uint32_t fewer, int x = 64, int y = 16, int z = 0) {
        Box box = cases[0].box;
        box.at[0] = x, box.at[1] = y, box.at[2] = z;
        run_box<f16>(box, shift, fewer, true);
        const bool caught = emu::faults(fault) > 0;
        emu::reset();
        return caught;
    };
    check(faults(emu::Fault::ALIGNMENT, 128, 0), "a box that is not aligned");
    check(faults(emu::Fault::BARRIER, 0, 16), "too few bytes expected of a box");
    check(faults(emu::Fault::ALIGNMENT, 0, 0, 68), "a box from the middle of 16 bytes on");
    check(faults(emu::Fault::ALIGNMENT, 0, 0, -4), "a box from the middle of 16 bytes on, before the start");
    check(faults(emu::Fault::BOUNDS, 0, 0, -8), "a box stored from before the start of rows");
    check(faults(emu::Fault::BOUNDS, 0, 0, 64, -1), "a box stored from before the first row");
    check(faults(emu::Fault::BOUNDS, 0, 0, 64, 16, -1), "a box stored from before the first matrix");
    TensorMap map;
    const TensorShape odd = {{64, 64, 1}, {65, 0}, {64, 8, 1}, true};
    const f16* nothing = nullptr;
    check(make_tensor_map(&map, nothing, odd) == cudaErrorInvalidValue, "rows that are no multiple of 16 bytes");
#endif
}

int main(int count, char** arguments) {
    is_verbose = count > 1 && strcmp(arguments[1], "--verbose") == 0;
#ifndef GT_EMU
    /* most threads of a block; 32 if the kernel is a stub, because the build has no code for compute capability 9.0 */
    int most = 0;
    const cudaError_t error =
        ask_most_threads(reinterpret_cast<const void*>(product_kernel<f16, 8, REGISTERS, Major::K>), &most);
    if (error != cudaSuccess && gpu_is_present()) {
        printf("FAIL: %s\n", cudaGetErrorString(error));
        return 1;
    }
    if (error != cudaSuccess || most < 128) {
        printf("SKIP: no GPU of compute capability 9.0, or not compiled for it\n");
        return 77;
    }
#endif
    multiply_shapes<32>();
    multiply_all<bf16, 1>();
    multiply_all<f16, 4>();
    multiply_all<bf16, 8>();
    multiply_all<f16, 12>();
    multiply_all<f16, 16>();
    multiply_all<bf16, 32>();
    test_relay();
    test_boxes();
#ifdef GT_EMU
    test_faults();
#endif
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
