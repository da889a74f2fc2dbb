/* gt/emu/primitives.h - bodies of the primitives that gt/base/device.cuh describes, and launches. */
#ifndef GT_EMU_PRIMITIVES_H
#define GT_EMU_PRIMITIVES_H

#include "bulk.h"
#include "warpgroup.h"

namespace gt {

inline int thread_id() { return emu::machine.thread; }
inline int lane_id() { return emu::machine.thread % 32; }
inline int warp_id() { return emu::machine.thread / 32; }
inline int block_threads() { return emu::machine.launch.threads; }
inline int block_x() { return (int)emu::machine.block[0]; }
inline int block_y() { return (int)emu::machine.block[1]; }
inline int block_z() { return (int)emu::machine.block[2]; }
inline int grid_x() { return (int)emu::machine.launch.grid[0]; }
inline int grid_y() { return (int)emu::machine.launch.grid[1]; }
inline int grid_z() { return (int)emu::machine.launch.grid[2]; }

inline uint32_t smem_base() { return emu::SMEM_BASE; }

template <class T>
T lds(uint32_t addr, emu::Site site = emu::Site::here()) {
    static_assert(std::is_trivially_copyable<T>::value, "lds moves plain data");
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,
                  "lds moves 2, 4, 8 or 16 bytes");
    T value;
    emu::machine.load(&value, addr, sizeof(T), site);
    return value;
}

template <class T>
void sts(uint32_t addr, T value, emu::Site site = emu::Site::here()) {
    static_assert(std::is_trivially_copyable<T>::value, "sts moves plain data");
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,
                  "sts moves 2, 4, 8 or 16 bytes");
    emu::machine.store(&value, addr, sizeof(T), site);
}

template <class T>
T ldg(const void* source, emu::Site site = emu::Site::here()) {
    emu::machine.check_global(source, sizeof(T), site);
    emu::machine.touch_global(false, source, sizeof(T), site);
    T value;
    memcpy(&value, source, sizeof value);
    return value;
}

template <class T>
void stg(void* target, T value, emu::Site site = emu::Site::here()) {
    emu::machine.check_global(target, sizeof(T), site);
    emu::machine.touch_global(true, target, sizeof(T), site);
    memcpy(target, &value, sizeof value);
}

/* Reads the address, so that AddressSanitizer finds an address outside of a tensor. */
inline void prefetch(const void* source, emu::Site site = emu::Site::here()) {
    emu::machine.touch_global(false, source, 1, site);
    (void)*static_cast<const volatile char*>(source);
}

template <int BYTES>
void cp_async(uint32_t addr, const void* source, int copied = BYTES, emu::Site site = emu::Site::here()) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
    emu::machine.copy(addr, source, BYTES, copied, site);
}
inline void cp_async_stream(uint32_t addr, const void* source, int copied, emu::Site site = emu::Site::here()) {
    emu::machine.copy(addr, source, 16, copied, site);
}

template <class T>
T* global_pointer(void* pointer) {
    return static_cast<T*>(pointer);
}

inline void wait_for_chain() { emu::machine.wait_for_chain(); }
inline void release_chain() { emu::machine.release_chain(); }

inline void cp_async_commit() { emu::machine.commit_copies(); }

template <int N>
void cp_async_wait() {
    emu::machine.wait_copies(N);
}

inline void sync_warp(emu::Site site = emu::Site::here()) {
    char nothing = 0;
    emu::machine.meet(emu::Op::SYNC_WARP, site, nothing, [](char**) {});
}
inline void bar_sync(int id, int threads, emu::Site site = emu::Site::here()) { emu::barrier(id, threads, site); }
inline void sync_threads(emu::Site site = emu::Site::here()) { emu::barrier(0, emu::machine.launch.threads, site); }

inline void mbarrier_init(uint32_t addr, int threads, emu::Site site = emu::Site::here()) {
    emu::machine.init_mbarrier(addr, threads, site);
}
inline void mbarrier_inval(uint32_t addr, emu::Site site = emu::Site::here()) { emu::machine.end_mbarrier(addr, site); }
inline void mbarrier_arrive(uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::mbarrier(emu::Op::MBARRIER_ARRIVE, addr, 0, site);
}
inline void mbarrier_arrive_warp(uint32_t addr, emu::Site site = emu::Site::here()) { mbarrier_arrive(addr, site); }
inline void mbarrier_arrive_expect(uint32_t addr, uint32_t bytes, emu::Site site = emu::Site::here()) {
    emu::mbarrier(emu::Op::MBARRIER_EXPECT, addr, (int)bytes, site);
}
inline void mbarrier_arrive_expect_warp(uint32_t addr, uint32_t bytes, emu::Site site = emu::Site::here()) {
    mbarrier_arrive_expect(addr, bytes, site);
}
inline void cp_async_arrive(uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::mbarrier(emu::Op::COPIES_ARRIVE, addr, 0, site);
}
inline void mbarrier_wait(uint32_t addr, int parity, emu::Site site = emu::Site::here()) {
    emu::mbarrier(emu::Op::MBARRIER_WAIT, addr, parity, site);
}

template <class T>
T shfl_xor(T value, int mask, emu::Site site = emu::Site::here()) {
    return emu::shuffle(value, mask, site, [](int lane, int m) { return (lane ^ m) & 31; });
}
template <class T>
T shfl_up(T value, int distance, emu::Site site = emu::Site::here()) {
    return emu::shuffle(value, distance, site, [](int lane, int d) { return lane >= d ? lane - d : lane; });
}
template <class T>
T shfl_down(T value, int distance, emu::Site site = emu::Site::here()) {
    return emu::shuffle(value, distance, site, [](int lane, int d) { return lane + d < 32 ? lane + d : lane; });
}
template <class T>
T shfl_idx(T value, int lane, emu::Site site = emu::Site::here()) {
    return emu::shuffle(value, lane, site, [](int, int from) { return from & 31; });
}

inline void ldmatrix_x1(uint32_t& r, uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(1, false, &r, addr, site);
}
inline void ldmatrix_x1_trans(uint32_t& r, uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(1, true, &r, addr, site);
}
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(2, false, r, addr, site);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(2, true, r, addr, site);
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(4, false, r, addr, site);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::load_matrices(4, true, r, addr, site);
}

inline void stmatrix_x4(uint32_t addr, const uint32_t (&r)[4], emu::Site site = emu::Site::here()) {
    emu::store_matrices(false, r, addr, site);
}
inline void stmatrix_x4_trans(uint32_t addr, const uint32_t (&r)[4], emu::Site site = emu::Site::here()) {
    emu::store_matrices(true, r, addr, site);
}

inline uint32_t movmatrix_trans(uint32_t r, emu::Site site = emu::Site::here()) {
    emu::Shuffle mine = {r, 0, 0};
    emu::machine.meet(emu::Op::MOVMATRIX, site, mine, [](emu::Shuffle** lanes) {
        uint16_t matrix[8][8];
        for (int lane = 0; lane < 32; lane++) {
            matrix[lane / 4][2 * (lane % 4)] = (uint16_t)lanes[lane]->value;
            matrix[lane / 4][2 * (lane % 4) + 1] = (uint16_t)(lanes[lane]->value >> 16);
        }
        for (int lane = 0; lane < 32; lane++) {
            lanes[lane]->result = emu::matrix_pair(matrix, lane, true);
        }
    });
    return mine.result;
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     emu::Site site = emu::Site::here()) {
    emu::Mma16 mine = {c, a, {b0, b1}};
    emu::machine.meet(emu::Op::MMA, site, mine, [site](emu::Mma16** lanes) {
        emu::machine.need_sm80("mma_bf16", site);
        emu::machine.stats().mma++;
        emu::perform_mma16(lanes, emu::decode_bf16);
    });
}

inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                    emu::Site site = emu::Site::here()) {
    emu::Mma16 mine = {c, a, {b0, b1}};
    emu::machine.meet(emu::Op::MMA, site, mine, [](emu::Mma16** lanes) {
        emu::machine.stats().mma++;
        emu::perform_mma16(lanes, emu::decode_f16);
    });
}

inline void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1, emu::Site site = emu::Site::here()) {
    emu::Mma8 mine = {c, a, {b0, b1}};
    emu::machine.meet(emu::Op::MMA, site, mine, [site](emu::Mma8** lanes) {
        emu::machine.need_sm80("mma_tf32", site);
        emu::machine.stats().mma++;
        emu::perform_mma_tf32(lanes);
    });
}

inline uint64_t wgmma_operand(uint32_t addr, uint32_t k_bytes, uint32_t n_bytes, emu::Site site = emu::Site::here()) {
    if ((addr | k_bytes | n_bytes) % 16 != 0) emu::machine.report(emu::Fault::ALIGNMENT, site, "an operand of wgmma");
    return (uint64_t)(addr >> 4) | (uint64_t)(k_bytes >> 4) << 16 | (uint64_t)(n_bytes >> 4) << 32;
}

inline void wgmma_tf32(float (&c)[16][4], const float (&a)[4], uint64_t b, emu::Site site = emu::Site::here()) {
    const emu::Wgmma what = {emu::Format::TF32, 128, true, false, false, false, 0, b};
    emu::start_product({what, c, a}, site);
}

inline void wgmma_fence(emu::Site site = emu::Site::here()) {
    char nothing = 0;
    emu::machine.meet(emu::Op::WGMMA_FENCE, site, nothing, [site](char**) { emu::machine.fence_registers(site); });
}
inline void wgmma_commit(emu::Site site = emu::Site::here()) {
    char nothing = 0;
    emu::machine.meet(emu::Op::WGMMA_COMMIT, site, nothing, [site](char**) { emu::machine.commit_products(site); });
}
template <int N>
void wgmma_wait(emu::Site site = emu::Site::here()) {
    char nothing = 0;
    emu::machine.meet(emu::Op::WGMMA_WAIT, site, nothing, [site](char**) { emu::machine.wait_products(N, site); });
}
inline void fence_async_proxy(emu::Site site = emu::Site::here()) {
    char nothing = 0;
    emu::machine.meet(emu::Op::FENCE_PROXY, site, nothing, [site](char**) { emu::machine.fence_proxy(site); });
}

template <int N>
void give_registers(emu::Site site = emu::Site::here()) {
    static_assert(N >= 24 && N <= 256 && N % 8 == 0, "registers of a thread");
    char nothing = 0;
    emu::machine.meet(emu::Op::REGISTERS, site, nothing,
                      [site](char**) { emu::machine.set_registers(N, false, site); });
}
template <int N>
void take_registers(emu::Site site = emu::Site::here()) {
    static_assert(N >= 24 && N <= 256 && N % 8 == 0, "registers of a thread");
    char nothing = 0;
    emu::machine.meet(emu::Op::REGISTERS, site, nothing, [site](char**) { emu::machine.set_registers(N, true, site); });
}

struct Grid {
    unsigned x, y = 1, z = 1;
};

template <class Params>
cudaError_t launch(void (*kernel)(Params), Grid grid, unsigned threads, size_t smem_bytes, cudaStream_t /*stream*/,
                   const Params& params, bool follows = false, emu::Site site = emu::Site::here()) {
    static_assert(std::is_trivially_copyable<Params>::value, "parameters are copied bit by bit");
    const bool fits = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= 0x7fffffffu && grid.y <= 65535 &&
                      grid.z <= 65535 && threads > 0 && threads <= (unsigned)emu::MAX_THREADS;
    if (!fits || threads % emu::LANES != 0) return cudaErrorInvalidConfiguration;
    if (smem_bytes > (size_t)emu::device.smem_per_block) return cudaErrorInvalidValue;
    emu::Launch what = {};
    what.kernel = reinterpret_cast<const void*>(kernel);
    what.params = &params;
    what.call = [](const void* function, const void* p) {
        reinterpret_cast<void (*)(Params)>(const_cast<void*>(function))(*static_cast<const Params*>(p));
    };
    what.grid[0] = grid.x;
    what.grid[1] = grid.y;
    what.grid[2] = grid.z;
    what.threads = (int)threads;
    what.warps = (int)(threads / emu::LANES);
    what.smem_bytes = (uint32_t)smem_bytes;
    what.follows = follows;
    what.site = site;
    emu::machine.run(what);
    return cudaSuccess;
}

} /* namespace gt */

#endif
