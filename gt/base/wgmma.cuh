/* gt/base/wgmma.cuh - for kernels: warpgroup products (wgmma) with 16-bit operands, and the tiles that they read from
 * shared memory.
 *
 * Products need compute capability 9.0 (sm_90a); elsewhere they trap.  device.cuh has the instructions that order
 * products: wgmma_fence, wgmma_commit, wgmma_wait, fence_async_proxy.  W marks primitives that all lanes of a warp
 * execute together.
 *
 * PRODUCTS.  The 4 warps of a warpgroup compute C[64][N] += A[64][16] B[16][N] of f16 or bf16, with sums in fp32, for N
 * = 8 ... 256 in steps of 8.  Warp w (of 4) has rows 16w ... 16w + 15 of C, and of A if A comes from registers.  The
 * registers are laid out as in mma<T>: c[i] holds columns 8i ... 8i + 7.  So a later product can use C as its operand
 * a: c[2i] and c[2i + 1], rounded to 16 bits and packed in pairs, are its k = 16i ... 16i + 15.
 *
 * | primitive (W)                                       | A from         | PTX: wgmma.mma_async.sync.aligned...     |
 * |-----------------------------------------------------|----------------|------------------------------------------|
 * | wgmma<T, MAJOR_B>(c, a, b, accumulates)             | uint32_t a[4]  | m64nNk16.f32.T.T, imm-trans-b            |
 * | wgmma<T, MAJOR_A, MAJOR_B>(c, a, b, accumulates)    | uint64_t a     | the same, imm-trans-a                    |
 * | wgmma_pin(c)                                        |                | none: see below                          |
 * | wgmma_clear(c)                                      |                | none: c = 0, before a fence              |
 *
 * c is float[N / 8][4].  a and b are operands, made by wgmma_tile.  accumulates is true by default.  If it is false,
 * the product overwrites c, which need not be initialised.
 * wgmma only starts a product.  Until a wgmma_wait has ended the product's group, no thread may write the tiles or
 * access a or c.  Only further products of the same shape may use the same c.
 * Call wgmma_fence after the last access to c and a, and before the first product that follows.
 * The compiler does not know that a product ends later than it starts.  wgmma_pin(c) after the wait stops the compiler
 * from moving uses of c before the wait.  wgmma_pin(c) before the fence stops it from moving writes of c past the
 * fence.
 *
 *     wgmma_fence();
 *     for (int k = 0; k < 64; k += 16)
 *         wgmma<T>(c, wgmma_step(a, k_bytes<128, Major::K>(k)), wgmma_step(b, k_bytes<128, Major::K>(k)), k > 0);
 *     wgmma_commit();
 *     wgmma_wait<0>();
 *     wgmma_pin(c);
 *
 * TILES.  A matrix lies in shared memory as panels.  A panel has rows of ROW = 128, 64, 32 or 16 bytes, one after the
 * other.  A row has pieces of 16 bytes, each with 8 adjacent elements.  The place of a piece in its row depends on the
 * row.  So piece p of 8 adjacent rows lies in different banks, and so do 8 adjacent pieces of one row.
 *
 *     piece p of row r of a panel is at   r ROW + 16 (p ^ (r / (128 / ROW)) % (ROW / 16))       (panel_at<ROW>)
 *
 * This is the hardware's swizzle of 128, 64 or 32 bytes; with ROW = 16 there is no swizzle.  A panel starts at a
 * multiple of 8 ROW bytes; with ROW = 16, at a multiple of 16.  The major decides the contents of a row:
 *
 *     Major::K    A row is one index m of A or n of B; its elements run along k.  A panel has ROW / 2 values of k.  The
 *                 next panel, panel_bytes further on, continues along k.  One product reads 16 values of k, from one
 *                 panel (with ROW = 16, from two).
 *     Major::MN   The transposed matrix: a row is one k; its elements run along m or n.  A panel has ROW / 2 values of
 *                 m or n.  The next panel, panel_bytes further on, continues along m or n.  One product reads all
 *                 panels.
 *
 * | function                                | gives                                                                |
 * |-----------------------------------------|----------------------------------------------------------------------|
 * | smem_base_of_tiles()                    | smem_base(), at a multiple of 1024: kernels with tiles use this one  |
 * | panel_at<ROW>(row, piece)               | bytes from the start of a panel, piece < ROW / 16                    |
 * | tile_at<ROW>(row, piece, panel_bytes)   | the same over panels: piece counts through all panels of the matrix  |
 * | wgmma_tile<ROW, MAJOR>(addr, bytes)     | operand a or b: a matrix whose first panel starts at addr, and the   |
 * |                                         | next panel `bytes` (panel_bytes) further on                          |
 * | wgmma_step(operand, bytes)              | the operand that starts `bytes` further on, in steps of:             |
 * | k_bytes<ROW, MAJOR>(k, panel_bytes)     | from k 0 to k, a multiple of 16 (Major::K with ROW = 16: of 8)       |
 * | mn_bytes<ROW, MAJOR>(i, panel_bytes)    | from m or n 0 to i, a multiple of 8.  Major::MN: a product that      |
 * |                                         | starts inside a panel must end in it                                 |
 *
 * To step along both axes, add k_bytes and mn_bytes.
 *
 * Bits of an operand (matrix descriptor in the PTX ISA):
 *     0-13    start address / 16
 *     16-29   leading byte offset / 16
 *     32-45   stride byte offset / 16
 *     49-51   base offset: 0, since panels are aligned
 *     62-63   swizzle: 0 none, 1 for 128 bytes, 2 for 64, 3 for 32
 * With a swizzle the stride offset is 8 ROW bytes, from 8 rows to the next 8 rows.  The leading offset is panel_bytes;
 * the hardware ignores it for Major::K.
 * Without a swizzle a matrix consists of blocks of 8 rows by 16 bytes, 128 adjacent bytes each.  The leading offset
 * leads to the next block along k, the stride offset to the next block along m or n.  With Major::K they are
 * panel_bytes and 128; with Major::MN, 128 and panel_bytes. */
#ifndef GT_BASE_WGMMA_CUH
#define GT_BASE_WGMMA_CUH

#include "tile.cuh"

namespace gt {

/* ---- tiles --------------------------------------------------------------------------------------------------- */

enum class Major { K, MN };

template <int ROW, Major MAJOR>
GT_HD uint32_t k_bytes(int k, uint32_t panel_bytes = 0) {
    return MAJOR == Major::MN ? (uint32_t)(k * ROW) : (uint32_t)(2 * k / ROW) * panel_bytes + (uint32_t)(2 * k % ROW);
}

template <int ROW, Major MAJOR>
GT_HD uint32_t mn_bytes(int i, uint32_t panel_bytes = 0) {
    return MAJOR == Major::K ? (uint32_t)(i * ROW) : (uint32_t)(2 * i / ROW) * panel_bytes + (uint32_t)(2 * i % ROW);
}

template <int ROW, Major MAJOR>
GT_DEV uint64_t wgmma_tile(uint32_t addr, uint32_t panel_bytes = 0) {
    static_assert(ROW == 128 || ROW == 64 || ROW == 32 || ROW == 16, "bytes of a row of a panel");
    constexpr uint64_t SWIZZLE = ROW == 128 ? 1 : ROW == 64 ? 2 : ROW == 32 ? 3 : 0;
    const bool swapped = ROW == 16 && MAJOR == Major::MN;
    const uint32_t leading = swapped ? 8 * ROW : panel_bytes, stride = swapped ? panel_bytes : 8 * ROW;
    return wgmma_operand(addr, leading, stride) | SWIZZLE << 62;
}

GT_DEV uint64_t wgmma_step(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }

/* ---- products ------------------------------------------------------------------------------------------------ */

/* Before CUDA 13, ptxas serialises all products of some kernels if the first product of a loop overwrites c.  For these
 * compilers such a kernel clears c before the loop, and the first product adds to zeros.  Tests define
 * GT_ADDS_TO_ZEROS, so that emulated kernels do the same. */
#if defined(GT_ADDS_TO_ZEROS) || (defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 13)
constexpr bool ADDS_TO_ZEROS = true;
#else
constexpr bool ADDS_TO_ZEROS = false;
#endif

#ifndef GT_EMU

GT_DEV uint32_t smem_base_of_tiles() {
    extern __shared__ __align__(1024) unsigned char gt_dynamic_smem_of_tiles[];
    return (uint32_t)__cvta_generic_to_shared(gt_dynamic_smem_of_tiles);
}

template <int TILES>
GT_DEV void wgmma_pin(float (&c)[TILES][4]) {
    GT_UNROLL
    for (int i = 0; i < TILES; i++)
        asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}

#if GT_SM90A

/* GT_NUMBERS_i: the PTX operand numbers of i tiles of 8 columns.  GT_TILES_i: the asm operands of these tiles. */
#define GT_NUMBERS_1 "%0, %1, %2, %3"
#define GT_NUMBERS_2 GT_NUMBERS_1 ", %4, %5, %6, %7"
#define GT_NUMBERS_3 GT_NUMBERS_2 ", %8, %9, %10, %11"
#define GT_NUMBERS_4 GT_NUMBERS_3 ", %12, %13, %14, %15"
#define GT_NUMBERS_5 GT_NUMBERS_4 ", %16, %17, %18, %19"
#define GT_NUMBERS_6 GT_NUMBERS_5 ", %20, %21, %22, %23"
#define GT_NUMBERS_7 GT_NUMBERS_6 ", %24, %25, %26, %27"
#define GT_NUMBERS_8 GT_NUMBERS_7 ", %28, %29, %30, %31"
#define GT_NUMBERS_9 GT_NUMBERS_8 ", %32, %33, %34, %35"
#define GT_NUMBERS_10 GT_NUMBERS_9 ", %36, %37, %38, %39"
#define GT_NUMBERS_11 GT_NUMBERS_10 ", %40, %41, %42, %43"
#define GT_NUMBERS_12 GT_NUMBERS_11 ", %44, %45, %46, %47"
#define GT_NUMBERS_13 GT_NUMBERS_12 ", %48, %49, %50, %51"
#define GT_NUMBERS_14 GT_NUMBERS_13 ", %52, %53, %54, %55"
#define GT_NUMBERS_15 GT_NUMBERS_14 ", %56, %57, %58, %59"
#define GT_NUMBERS_16 GT_NUMBERS_15 ", %60, %61, %62, %63"
#define GT_NUMBERS_17 GT_NUMBERS_16 ", %64, %65, %66, %67"
#define GT_NUMBERS_18 GT_NUMBERS_17 ", %68, %69, %70, %71"
#define GT_NUMBERS_19 GT_NUMBERS_18 ", %72, %73, %74, %75"
#define GT_NUMBERS_20 GT_NUMBERS_19 ", %76, %77, %78, %79"
#define GT_NUMBERS_21 GT_NUMBERS_20 ", %80, %81, %82, %83"
#define GT_NUMBERS_22 GT_NUMBERS_21 ", %84, %85, %86, %87"
#define GT_NUMBERS_23 GT_NUMBERS_22 ", %88, %89, %90, %91"
#define GT_NUMBERS_24 GT_NUMBERS_23 ", %92, %93, %94, %95"
#define GT_NUMBERS_25 GT_NUMBERS_24 ", %96, %97, %98, %99"
#define GT_NUMBERS_26 GT_NUMBERS_25 ", %100, %101, %102, %103"
#define GT_NUMBERS_27 GT_NUMBERS_26 ", %104, %105, %106, %107"
#define GT_NUMBERS_28 GT_NUMBERS_27 ", %108, %109, %110, %111"
#define GT_NUMBERS_29 GT_NUMBERS_28 ", %112, %113, %114, %115"
#define GT_NUMBERS_30 GT_NUMBERS_29 ", %116, %117, %118, %119"
#define GT_NUMBERS_31 GT_NUMBERS_30 ", %120, %121, %122, %123"
#define GT_NUMBERS_32 GT_NUMBERS_31 ", %124, %125, %126, %127"
#define GT_TILE(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define GT_TILES_1 GT_TILE(0)
#define GT_TILES_2 GT_TILES_1, GT_TILE(1)
#define GT_TILES_3 GT_TILES_2, GT_TILE(2)
#define GT_TILES_4 GT_TILES_3, GT_TILE(3)
#define GT_TILES_5 GT_TILES_4, GT_TILE(4)
#define GT_TILES_6 GT_TILES_5, GT_TILE(5)
#define GT_TILES_7 GT_TILES_6, GT_TILE(6)
#define GT_TILES_8 GT_TILES_7, GT_TILE(7)
#define GT_TILES_9 GT_TILES_8, GT_TILE(8)
#define GT_TILES_10 GT_TILES_9, GT_TILE(9)
#define GT_TILES_11 GT_TILES_10, GT_TILE(10)
#define GT_TILES_12 GT_TILES_11, GT_TILE(11)
#define GT_TILES_13 GT_TILES_12, GT_TILE(12)
#define GT_TILES_14 GT_TILES_13, GT_TILE(13)
#define GT_TILES_15 GT_TILES_14, GT_TILE(14)
#define GT_TILES_16 GT_TILES_15, GT_TILE(15)
#define GT_TILES_17 GT_TILES_16, GT_TILE(16)
#define GT_TILES_18 GT_TILES_17, GT_TILE(17)
#define GT_TILES_19 GT_TILES_18, GT_TILE(18)
#define GT_TILES_20 GT_TILES_19, GT_TILE(19)
#define GT_TILES_21 GT_TILES_20, GT_TILE(20)
#define GT_TILES_22 GT_TILES_21, GT_TILE(21)
#define GT_TILES_23 GT_TILES_22, GT_TILE(22)
#define GT_TILES_24 GT_TILES_23, GT_TILE(23)
#define GT_TILES_25 GT_TILES_24, GT_TILE(24)
#define GT_TILES_26 GT_TILES_25, GT_TILE(25)
#define GT_TILES_27 GT_TILES_26, GT_TILE(26)
#define GT_TILES_28 GT_TILES_27, GT_TILE(27)
#define GT_TILES_29 GT_TILES_28, GT_TILE(28)
#define GT_TILES_30 GT_TILES_29, GT_TILE(29)
#define GT_TILES_31 GT_TILES_30, GT_TILE(30)
#define GT_TILES_32 GT_TILES_31, GT_TILE(31)

/* The PTX of one shape.  o0, o1, ... are the numbers of the asm operands that follow the registers of C. */
#define GT_WGMMA_REGISTERS(TYPE, TILES, N, o0, o1, o2, o3, o4, o5, o6)                                                 \
    asm volatile("{ .reg .pred accumulates;\n"                                                                         \
                 "setp.ne.b32 accumulates, %" #o5 ", 0;\n"                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" GT_NUMBERS_##TILES               \
                 "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", accumulates, 1, 1, %" #o6 "; }"               \
                 : GT_TILES_##TILES                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulates), "n"(B_IS_MN))

#define GT_WGMMA_SHARED(TYPE, TILES, N, o0, o1, o2, o3, o4)                                                            \
    asm volatile("{ .reg .pred accumulates;\n"                                                                         \
                 "setp.ne.b32 accumulates, %" #o2 ", 0;\n"                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" GT_NUMBERS_##TILES               \
                 "}, %" #o0 ", %" #o1 ", accumulates, 1, 1, %" #o3 ", %" #o4 "; }"                                     \
                 : GT_TILES_##TILES                                                                                    \
                 : "l"(a), "l"(b), "r"((int)accumulates), "n"(A_IS_MN), "n"(B_IS_MN))

/* The products of one shape: 64 rows by 8 TILES columns. */
template <int TILES>
struct Wgmma;

#define GT_WGMMA_SHAPE(TILES, N, o0, o1, o2, o3, o4, o5, o6)                                                           \
    template <>                                                                                                        \
    struct Wgmma<TILES> {                                                                                              \
        template <bool IS_BF16, int B_IS_MN>                                                                           \
        GT_DEV void start(float (&c)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulates) {                \
            if constexpr (IS_BF16) {                                                                                   \
                GT_WGMMA_REGISTERS("bf16", TILES, N, o0, o1, o2, o3, o4, o5, o6);                                      \
            } else {                                                                                                   \
                GT_WGMMA_REGISTERS("f16", TILES, N, o0, o1, o2, o3, o4, o5, o6);                                       \
            }                                                                                                          \
        }                                                                                                              \
        template <bool IS_BF16, int A_IS_MN, int B_IS_MN>                                                              \
        GT_DEV void start(float (&c)[TILES][4], uint64_t a, uint64_t b, bool accumulates) {                            \
            if constexpr (IS_BF16) {                                                                                   \
                GT_WGMMA_SHARED("bf16", TILES, N, o0, o1, o2, o3, o4);                                                 \
            } else {                                                                                                   \
                GT_WGMMA_SHARED("f16", TILES, N, o0, o1, o2, o3, o4);                                                  \
            }                                                                                                          \
        }                                                                                                              \
    };

GT_WGMMA_SHAPE(1, 8, 4, 5, 6, 7, 8, 9, 10)
GT_WGMMA_SHAPE(2, 16, 8, 9, 10, 11, 12, 13, 14)
GT_WGMMA_SHAPE(3, 24, 12, 13, 14, 15, 16, 17, 18)
GT_WGMMA_SHAPE(4, 32, 16, 17, 18, 19, 20, 21, 22)
GT_WGMMA_SHAPE(5, 40, 20, 21, 22, 23, 24, 25, 26)
GT_WGMMA_SHAPE(6, 48, 24, 25, 26, 27, 28, 29, 30)
GT_WGMMA_SHAPE(7, 56, 28, 29, 30, 31, 32, 33, 34)
GT_WGMMA_SHAPE(8, 64, 32, 33, 34, 35, 36, 37, 38)
GT_WGMMA_SHAPE(9, 72, 36, 37, 38, 39, 40, 41, 42)
GT_WGMMA_SHAPE(10, 80, 40, 41, 42, 43, 44, 45, 46)
GT_WGMMA_SHAPE(11, 88, 44, 45, 46, 47, 48, 49, 50)
GT_WGMMA_SHAPE(12, 96, 48, 49, 50, 51, 52, 53, 54)
GT_WGMMA_SHAPE(13, 104, 52, 53, 54, 55, 56, 57, 58)
GT_WGMMA_SHAPE(14, 112, 56, 57, 58, 59, 60, 61, 62)
GT_WGMMA_SHAPE(15, 120, 60, 61, 62, 63, 64, 65, 66)
GT_WGMMA_SHAPE(16, 128, 64, 65, 66, 67, 68, 69, 70)
GT_WGMMA_SHAPE(17, 136, 68, 69, 70, 71, 72, 73, 74)
GT_WGMMA_SHAPE(18, 144, 72, 73, 74, 75, 76, 77, 78)
GT_WGMMA_SHAPE(19, 152, 76, 77, 78, 79, 80, 81, 82)
GT_WGMMA_SHAPE(20, 160, 80, 81, 82, 83, 84, 85, 86)
GT_WGMMA_SHAPE(21, 168, 84, 85, 86, 87, 88, 89, 90)
GT_WGMMA_SHAPE(22, 176, 88, 89, 90, 91, 92, 93, 94)
GT_WGMMA_SHAPE(23, 184, 92, 93, 94, 95, 96, 97, 98)
GT_WGMMA_SHAPE(24, 192, 96, 97, 98, 99, 100, 101, 102)
GT_WGMMA_SHAPE(25, 200, 100, 101, 102, 103, 104, 105, 106)
GT_WGMMA_SHAPE(26, 208, 104, 105, 106, 107, 108, 109, 110)
GT_WGMMA_SHAPE(27, 216, 108, 109, 110, 111, 112, 113, 114)
GT_WGMMA_SHAPE(28, 224, 112, 113, 114, 115, 116, 117, 118)
GT_WGMMA_SHAPE(29, 232, 116, 117, 118, 119, 120, 121, 122)
GT_WGMMA_SHAPE(30, 240, 120, 121, 122, 123, 124, 125, 126)
GT_WGMMA_SHAPE(31, 248, 124, 125, 126, 127, 128, 129, 130)
GT_WGMMA_SHAPE(32, 256, 128, 129, 130, 131, 132, 133, 134)

#undef GT_WGMMA_SHAPE
#undef GT_WGMMA_SHARED
#undef GT_WGMMA_REGISTERS
#undef GT_TILE
#endif /* GT_SM90A */

template <class T, Major MAJOR_B = Major::K, int TILES>
GT_DEV void wgmma(float (&c)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulates = true) {
    static_assert(std::is_same<T, bf16>::value || std::is_same<T, f16>::value, "16-bit operands");
#if GT_SM90A
    Wgmma<TILES>::template start<std::is_same<T, bf16>::value, MAJOR_B == Major::MN>(c, a, b, accumulates);
#else
    __trap();
#endif
}

template <class T, Major MAJOR_A = Major::K, Major MAJOR_B = Major::K, int TILES>
GT_DEV void wgmma(float (&c)[TILES][4], uint64_t a, uint64_t b, bool accumulates = true) {
    static_assert(std::is_same<T, bf16>::value || std::is_same<T, f16>::value, "16-bit operands");
#if GT_SM90A
    Wgmma<TILES>::template start<std::is_same<T, bf16>::value, MAJOR_A == Major::MN, MAJOR_B == Major::MN>(c, a, b,
                                                                                                           accumulates);
#else
    __trap();
#endif
}

#else /* GT_EMU */

GT_DEV uint32_t smem_base_of_tiles() { return smem_base(); }

template <int TILES>
void wgmma_pin(float (&)[TILES][4]) {}

template <class T>
constexpr emu::Format wgmma_format() {
    static_assert(std::is_same<T, bf16>::value || std::is_same<T, f16>::value, "16-bit operands");
    return std::is_same<T, bf16>::value ? emu::Format::BF16 : emu::Format::F16;
}

template <class T, Major MAJOR_B = Major::K, int TILES>
void wgmma(float (&c)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool accumulates = true,
           emu::Site site = emu::Site::here()) {
    static_assert(TILES <= 32, "up to 256 columns");
    const emu::Wgmma what = {wgmma_format<T>(), 8 * TILES, accumulates, false, false, MAJOR_B == Major::MN, 0, b};
    emu::start_product({what, c, a}, site);
}

template <class T, Major MAJOR_A = Major::K, Major MAJOR_B = Major::K, int TILES>
void wgmma(float (&c)[TILES][4], uint64_t a, uint64_t b, bool accumulates = true, emu::Site site = emu::Site::here()) {
    static_assert(TILES <= 32, "up to 256 columns");
    const emu::Wgmma what = {
        wgmma_format<T>(), 8 * TILES, accumulates, true, MAJOR_A == Major::MN, MAJOR_B == Major::MN, a, b};
    emu::start_product({what, c, nullptr}, site);
}

#endif /* GT_EMU */

template <int TILES>
GT_DEV void wgmma_clear(float (&c)[TILES][4]) {
    GT_UNROLL
    for (int i = 0; i < TILES; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
    wgmma_pin(c);
}

} /* namespace gt */

#endif
