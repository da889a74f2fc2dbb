/* gt/base/device.cuh - the primitives of kernels.
 *
 * Every kernel of this library uses only the primitives below and plain C++.  So the same source runs on a GPU and,
 * with GT_EMU defined, on the CPU.  For a GPU this file implements the primitives in PTX.  For the CPU an ordinary C++
 * compiler is enough, and gt/emu/ implements the primitives; it also checks for races, bounds, alignment and barrier
 * use.  The rules that make this possible:
 *
 *   - Kernels touch shared memory only through the primitives, by 32-bit shared address.
 *   - Shared memory is dynamic only (no static __shared__), carved up by offsets from smem_base(), the one base
 *     address.  It starts with undefined contents.
 *   - No PTX, no intrinsic and no threadIdx-like variable outside gt/base/ (most of them are here).
 *   - A kernel takes one trivially copyable struct of parameters by value.  A block is a whole number of warps.  No
 *     thread returns while others of its warp still call collective primitives.
 *   - Collective primitives (marked W below) are executed by all 32 lanes of a warp together.
 *
 *   struct ScaleParams { const float* x; float* y; float factor; int n; };
 *
 *   GT_KERNEL(128, 1) scale_kernel(const GT_GRID_CONSTANT ScaleParams p) {
 *       const int i = block_x() * block_threads() + thread_id();
 *       const uint32_t address = smem_base() + 4 * thread_id();
 *       sts<float>(address, i < p.n ? p.x[i] : 0.0f);
 *       sync_threads();
 *       if (i < p.n) p.y[i] = p.factor * lds<float>(address);
 *   }
 *
 *   cudaError_t error = gt::launch(scale_kernel, {blocks}, 128, 128 * 4, stream, params);
 *
 * CONTENTS
 *   indices        thread_id lane_id warp_id block_x.. grid_x.. block_threads
 *   shared memory  smem_base lds sts cp_async cp_async_commit cp_async_wait ldmatrix_x1.. (W)
 *                  stmatrix_x4.. (W)
 *   global memory  ldg stg global_pointer prefetch
 *   ordering       sync_warp (W) sync_threads bar_sync (W) mbarrier_init mbarrier_inval mbarrier_arrive (W)
 *                  mbarrier_arrive_warp (W) mbarrier_arrive_expect (W)
 *                  mbarrier_arrive_expect_warp (W) cp_async_arrive (W) mbarrier_wait (W) wait_for_chain
 *                  release_chain
 *   warp           shfl_xor shfl_up shfl_down shfl_idx movmatrix_trans (W); warp.cuh has warp_sum warp_any
 *   tensor cores   mma_bf16 mma_f16 mma<T> mma_tf32 (W)
 *   warpgroups     wgmma_operand wgmma_tf32 wgmma_fence wgmma_commit wgmma_wait
 *                  fence_async_proxy give_registers take_registers (all W); wgmma.cuh has products of
 *                  16 bits and tiles, bulk.cuh the copies of the asynchronous proxy
 *
 * Compiles for sm_75 and newer.  On sm_75 a plain copy replaces cp.async, integer arithmetic replaces conversions, and
 * two half-size mma replace the f16 mma; mma_bf16, mma_tf32 and mbarriers trap.  The primitives of warpgroups need
 * sm_90a (GT_SM90A).  stmatrix and mbarrier_arrive_expect need sm_90.  They trap on older devices. */
#ifndef GT_BASE_DEVICE_CUH
#define GT_BASE_DEVICE_CUH

#include "number.cuh"
#ifdef GT_EMU
#include "../emu/emu.h"
#endif

namespace gt {

/* ---- tensor core fragments ------------------------------------------------------------------- */

/* The registers of a lane in a product C[16][8] += A[16][K] B[K][8], with g = lane / 4 and j = lane % 4:
 *
 *   m16n8k16, 16-bit operands (mma_bf16, mma_f16).  A register holds two elements, the lower index in the lower half:
 *     | a[0]            | a[1]              | a[2]              | a[3]                |
 *     | A[g][2j,2j+1]   | A[g+8][2j,2j+1]   | A[g][2j+8,2j+9]   | A[g+8][2j+8,2j+9]   |
 *     | b0              | b1                |
 *     | B[2j,2j+1][g]   | B[2j+8,2j+9][g]   |
 *
 *   m16n8k8, tf32 operands (mma_tf32):
 *     | a[0]            | a[1]              | a[2]              | a[3]                |
 *     | A[g][j]         | A[g+8][j]         | A[g][j+4]         | A[g+8][j+4]         |
 *     | b0              | b1                |
 *     | B[j][g]         | B[j+4][g]         |
 *
 *   both, fp32 accumulators:
 *     | c[0]            | c[1]              | c[2]              | c[3]                |
 *     | C[g][2j]        | C[g][2j+1]        | C[g+8][2j]        | C[g+8][2j+1]        |
 *
 * ldmatrix reads matrices of 8 rows of 8 16-bit elements.  A row is 16 bytes and has its own 16-byte aligned address.
 * Lane 8m + i gives the address of row i of matrix m.  Lanes beyond the last matrix may give any value.  Register m
 * receives
 *
 *     ldmatrix          M_m[g][2j,2j+1]            ldmatrix ..._trans          M_m[2j,2j+1][g]
 *
 * So x4 loads the fragment of A, stored by rows, with M_0 = A[0..7][0..7], M_1 = A[8..15][0..7],
 * M_2 = A[0..7][8..15], M_3 = A[8..15][8..15].
 * For a fragment of B, the two matrices are the two halves of k.  x2_trans loads B stored as B[k][n], and x2 loads B
 * stored as B^T[n][k].
 * movmatrix_trans turns a register that holds M[g][2j,2j+1] into M[2j,2j+1][g].  stmatrix stores four matrices from
 * registers, in the order in which ldmatrix_x4 loads them.
 *
 * | primitive                                  | PTX                                              |
 * |--------------------------------------------|--------------------------------------------------|
 * | mma_bf16(c, a, b0, b1)                     | mma.sync.aligned.m16n8k16.row.col.f32.bf16...    |
 * | mma_f16(c, a, b0, b1)                      | mma.sync.aligned.m16n8k16.row.col.f32.f16...     |
 * | mma<T>(c, a, b0, b1)                       | one of these, for T = bf16, f16                  |
 * | mma_tf32(c, a, b0, b1)                     | mma.sync.aligned.m16n8k8.row.col.f32.tf32...     |
 * | ldmatrix_x1(r, addr), _x2, _x4; ..._trans  | ldmatrix.sync.aligned.m8n8.x1[.trans].shared.b16 |
 * | stmatrix_x4(addr, r), stmatrix_x4_trans    | stmatrix.sync.aligned.m8n8.x4[.trans].shared.b16 |
 * | movmatrix_trans(r)                         | movmatrix.sync.aligned.m8n8.trans.b16            |
 *
 * A warpgroup is warps 4 i ... 4 i + 3 of a block.  Its warps multiply together: C[64][128] += A[64][8] B[8][128], in
 * tf32.  Warp w has rows 16 (w % 4) ... 16 (w % 4) + 15 of A and C, in the registers of mma_tf32: c[i] holds columns 8i
 * ... 8i + 7.
 * B lies in shared memory as B^T[n][k], in blocks of 8 rows of 4 elements.  A row is 16 bytes.  A block is 128 adjacent
 * bytes at a multiple of 16.  The block with the next 4 values of k is k_bytes further, the block with the next 8
 * values of n is n_bytes further.  Both distances are multiples of 16.
 *
 * | primitive                              | PTX                                                  |
 * |----------------------------------------|------------------------------------------------------|
 * | wgmma_operand(addr, k_bytes, n_bytes)  | a matrix descriptor without swizzle                  |
 * | wgmma_tf32(c, a, b)                    | wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 |
 * | wgmma_fence(), wgmma_commit()          | wgmma.fence, wgmma.commit_group                      |
 * | wgmma_wait<N>()                        | wgmma.wait_group: waits for all but N latest groups  |
 * | fence_async_proxy()                    | fence.proxy.async.shared::cta                        |
 * | give_registers<N>(), take_registers<N>() | setmaxnreg.dec, .inc: from now on the warpgroup's    |
 * |                                        | threads have N registers each, a multiple of 8 from  |
 * |                                        | 24 to 256.  take_registers waits until other warps   |
 * |                                        | have given enough registers                          |
 *
 * wgmma_tf32 only starts the product.  Until a wgmma_wait ends the product's group, no thread may write B, or access c
 * and a.  Only further products may use the same c.  Call wgmma_fence after the last access to c and a, before the
 * product.  A thread that has written B calls fence_async_proxy; then a barrier follows, then the product.
 */

/* ---- memory, ordering and warp primitives ---------------------------------------------------- */

/* | primitive                          | semantics (PTX)                                          |
 * |------------------------------------|----------------------------------------------------------|
 * | smem_base()                        | shared address of the dynamic shared memory, a multiple  |
 * |                                    | of 128                                                   |
 * | lds<T>(addr), sts<T>(addr, v)      | ld.shared, st.shared; T trivially copyable of 2, 4, 8 or |
 * |                                    | 16 bytes; addr aligned to sizeof(T)                      |
 * | ldg<T>(p), stg<T>(p, v)            | ld.global, st.global of a vector; p aligned to sizeof(T) |
 * | prefetch(p)                        | prefetch.global.L2: a hint to load the line at p to L2;  |
 * |                                    | p points into a tensor                                   |
 * | cp_async<BYTES>(addr, p, n)        | cp.async of 4, 8 or 16 bytes, global to shared: copies n |
 * |                                    | bytes (even, 0 to BYTES, default all) and zero-fills the |
 * |                                    | rest; addr and p aligned to BYTES, even where n is 0     |
 * | cp_async_stream(addr, p, n)        | cp_async<16> from a large array that is read once        |
 * | cp_async_commit()                  | closes the calling thread's group of copies              |
 * | cp_async_wait<N>()                 | waits until at most the N latest groups of the calling   |
 * |                                    | thread are in flight; other threads see the data only    |
 * |                                    | after a barrier that follows                             |
 * | sync_warp()                        | bar.warp.sync: orders memory between the lanes of a warp |
 * | sync_threads()                     | bar.sync 0 for the whole block                           |
 * | bar_sync(id, n)                    | bar.sync: waits until n threads, in whole warps, have    |
 * |                                    | reached barrier id (0 to 15; sync_threads uses 0)        |
 * | mbarrier_init(addr, n)             | mbarrier.init: makes a barrier, of 8 aligned bytes, at   |
 * |                                    | which n threads arrive, in whole warps.  A sync_threads  |
 * |                                    | must follow.  The phases have parities 0, 1, 0 ...       |
 * | mbarrier_inval(addr)               | mbarrier.inval: ends the barrier, so that mbarrier_init  |
 * |                                    | may make another.  Call sync_threads before, after the   |
 * |                                    | last use of the barrier                                  |
 * | mbarrier_arrive(addr)              | mbarrier.arrive: the n-th thread completes the phase and |
 * |                                    | begins the next.  Each thread of the warp arrives.  One  |
 * |                                    | arrival after sync_warp would do, but racecheck would    |
 * |                                    | then report hazards that do not exist                    |
 * | mbarrier_arrive_warp(addr)         | the same; from 9.0 on one lane arrives for all 32.  For  |
 * |                                    | data that racecheck does not see: operands of products   |
 * | mbarrier_arrive_expect(addr, b)    | mbarrier_arrive; the phase also waits until b more bytes |
 * |                                    | of bulk copies (bulk.cuh) have arrived                   |
 * | mbarrier_arrive_expect_warp(addr,  | the same; one lane arrives for all 32                    |
 * |     b)                             |                                                          |
 * | cp_async_arrive(addr)              | cp.async.mbarrier.arrive.noinc: each thread arrives when |
 * |                                    | all cp_async that it has issued are complete             |
 * | mbarrier_wait(addr, parity)        | mbarrier.try_wait.parity: waits until the latest phase   |
 * |                                    | of that parity is complete.  Before the first phase, a   |
 * |                                    | wait for parity 1 returns at once                        |
 * | wait_for_chain()                   | griddepcontrol: waits until the kernels before this one  |
 * |                                    | in its Chain are complete and their writes are visible.  |
 * |                                    | Then blocks of the next kernel may start.  No effect     |
 * |                                    | before sm_90, or if no kernel runs ahead (launch.cuh)    |
 * | release_chain()                    | lets blocks of the next kernel start, without waiting    |
 * | shfl_xor(v, mask), shfl_idx(v, l)  | value of lane (lane ^ mask), of lane l                   |
 * | shfl_up(v, d), shfl_down(v, d)     | value of lane - d, lane + d; own value past the ends     |
 * | warp_sum(v)                        | sum over the warp, the same bits in every lane           |
 * | warp_any(c)                        | true in every lane if c holds in any lane                |
 *
 * Only sync_warp and the barriers order the memory accesses of different lanes.  An arrival at an mbarrier orders the
 * thread's earlier accesses before later accesses of the threads that wait for that phase. */

#ifndef GT_EMU

GT_DEV int thread_id() { return (int)threadIdx.x; }
GT_DEV int lane_id() { return (int)(threadIdx.x & 31); }
GT_DEV int warp_id() { return (int)(threadIdx.x >> 5); }
GT_DEV int block_threads() { return (int)blockDim.x; }
GT_DEV int block_x() { return (int)blockIdx.x; }
GT_DEV int block_y() { return (int)blockIdx.y; }
GT_DEV int block_z() { return (int)blockIdx.z; }
GT_DEV int grid_x() { return (int)gridDim.x; }
GT_DEV int grid_y() { return (int)gridDim.y; }
GT_DEV int grid_z() { return (int)gridDim.z; }

GT_DEV uint32_t smem_base() {
    extern __shared__ __align__(128) unsigned char gt_dynamic_smem[];
    return (uint32_t)__cvta_generic_to_shared(gt_dynamic_smem);
}

template <class T>
GT_DEV T lds(uint32_t addr) {
    static_assert(std::is_trivially_copyable<T>::value, "lds moves plain data");
    T value;
    if constexpr (sizeof(T) == 2) {
        uint16_t bits;
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(addr) : "memory");
        memcpy(&value, &bits, sizeof value);
    } else if constexpr (sizeof(T) == 4) {
        uint32_t bits;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(addr) : "memory");
        memcpy(&value, &bits, sizeof value);
    } else if constexpr (sizeof(T) == 8) {
        uint32_t bits[2];
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(bits[0]), "=r"(bits[1]) : "r"(addr) : "memory");
        memcpy(&value, bits, sizeof value);
    } else {
        static_assert(sizeof(T) == 16, "lds moves 2, 4, 8 or 16 bytes");
        uint32_t bits[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                     : "r"(addr)
                     : "memory");
        memcpy(&value, bits, sizeof value);
    }
    return value;
}

template <class T>
GT_DEV void sts(uint32_t addr, T value) {
    static_assert(std::is_trivially_copyable<T>::value, "sts moves plain data");
    if constexpr (sizeof(T) == 2) {
        uint16_t bits;
        memcpy(&bits, &value, sizeof value);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(addr), "h"(bits) : "memory");
    } else if constexpr (sizeof(T) == 4) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof value);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(bits) : "memory");
    } else if constexpr (sizeof(T) == 8) {
        uint32_t bits[2];
        memcpy(bits, &value, sizeof value);
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(addr), "r"(bits[0]), "r"(bits[1]) : "memory");
    } else {
        static_assert(sizeof(T) == 16, "sts moves 2, 4, 8 or 16 bytes");
        uint32_t bits[4];
        memcpy(bits, &value, sizeof value);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(bits[0]), "r"(bits[1]), "r"(bits[2]),
                     "r"(bits[3])
                     : "memory");
    }
}

template <class T>
GT_DEV T ldg(const void* source) {
    return *static_cast<const T*>(source);
}

template <class T>
GT_DEV void stg(void* target, T value) {
    if constexpr (sizeof(T) == 16) { /* the compiler might split it into four stores */
        uint32_t bits[4];
        memcpy(bits, &value, sizeof value);
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(bits[0]),
                     "r"(bits[1]), "r"(bits[2]), "r"(bits[3])
                     : "memory");
    } else {
        *static_cast<T*>(target) = value;
    }
}

GT_DEV void prefetch(const void* source) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(source)));
}

template <int BYTES>
GT_DEV void cp_async(uint32_t addr, const void* source, int copied = BYTES) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
#if GT_SM80
    const size_t global = __cvta_generic_to_global(source);
    if constexpr (BYTES == 16) { /* .cg keeps the stream out of the first-level cache */
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(addr), "l"(global), "r"(copied) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(addr), "l"(global), "n"(BYTES), "r"(copied)
                     : "memory");
    }
#else
    const uint32_t* words = static_cast<const uint32_t*>(source);
    GT_UNROLL
    for (int i = 0; i < BYTES / 4; i++) {
        uint32_t word = 0;
        if (copied >= 4 * i + 4) {
            word = words[i];
        } else if (copied >= 4 * i + 2) {
            word = reinterpret_cast<const uint16_t*>(words)[2 * i];
        }
        sts<uint32_t>(addr + 4 * i, word);
    }
#endif
}

/* Copies 16 bytes of a large array that a kernel reads once.  The L2 cache then fetches all 256 bytes around them, so
 * memory reads whole pages although adjacent pieces of a row belong to different lanes or come later. */
GT_DEV void cp_async_stream(uint32_t addr, const void* source, int copied) {
#if GT_SM80
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(addr),
                 "l"(__cvta_generic_to_global(source)), "r"(copied)
                 : "memory");
#else
    cp_async<16>(addr, source, copied);
#endif
}

/* Tells the compiler that a pointer, although it was loaded from shared memory, points to global memory. */
template <class T>
GT_DEV T* global_pointer(void* pointer) {
    __builtin_assume(__isGlobal(pointer));
    return static_cast<T*>(pointer);
}

GT_DEV void cp_async_commit() {
#if GT_SM80
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N>
GT_DEV void cp_async_wait() {
#if GT_SM80
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

GT_DEV void sync_warp() { __syncwarp(); }
GT_DEV void sync_threads() { __syncthreads(); }

GT_DEV void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

GT_DEV void mbarrier_init(uint32_t addr, int threads) {
#if GT_SM80
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(addr), "r"(threads) : "memory");
#else
    __trap();
#endif
}

GT_DEV void mbarrier_inval(uint32_t addr) {
#if GT_SM80
    asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(addr) : "memory");
#else
    __trap();
#endif
}

GT_DEV void mbarrier_arrive(uint32_t addr) {
#if GT_SM80
    asm volatile("{ .reg .b64 state;\n"
                 "mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(addr)
                 : "memory");
#else
    __trap();
#endif
}

GT_DEV void mbarrier_arrive_warp(uint32_t addr) {
#if GT_SM90
    __syncwarp();
    if (lane_id() == 0)
        asm volatile("{ .reg .b64 state;\n"
                     "mbarrier.arrive.shared.b64 state, [%0], 32; }" ::"r"(addr)
                     : "memory");
#else
    mbarrier_arrive(addr);
#endif
}

GT_DEV void cp_async_arrive(uint32_t addr) {
#if GT_SM80
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(addr) : "memory");
#else
    __trap();
#endif
}

GT_DEV void mbarrier_arrive_expect(uint32_t addr, uint32_t bytes) {
#if GT_SM90
    if (lane_id() == 0) {
        asm volatile("{ .reg .b64 state;\n"
                     "mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(addr),
                     "r"(bytes)
                     : "memory");
    } else {
        mbarrier_arrive(addr);
    }
#else
    __trap();
#endif
}

GT_DEV void mbarrier_arrive_expect_warp(uint32_t addr, uint32_t bytes) {
#if GT_SM90
    __syncwarp();
    if (lane_id() == 0)
        asm volatile("{ .reg .b64 state;\n"
                     "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n"
                     "mbarrier.arrive.shared.b64 state, [%0], 32; }" ::"r"(addr),
                     "r"(bytes)
                     : "memory");
#else
    __trap();
#endif
}

#if GT_SM90
#define GT_MBARRIER_WAIT "mbarrier.try_wait.parity" /* sleeps a while */
#else
#define GT_MBARRIER_WAIT "mbarrier.test_wait.parity"
#endif

GT_DEV void mbarrier_wait(uint32_t addr, int parity) {
#if GT_SM80
    asm volatile("{ .reg .pred complete;\n"
                 "AGAIN: " GT_MBARRIER_WAIT ".shared.b64 complete, [%0], %1;\n"
                 "@!complete bra AGAIN; }" ::"r"(addr),
                 "r"(parity)
                 : "memory");
#else
    __trap();
#endif
}

/* T is float, int32_t or uint32_t. */
template <class T>
GT_DEV T shfl_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
GT_DEV T shfl_up(T value, int distance) {
    return __shfl_up_sync(0xffffffffu, value, distance);
}
template <class T>
GT_DEV T shfl_down(T value, int distance) {
    return __shfl_down_sync(0xffffffffu, value, distance);
}
template <class T>
GT_DEV T shfl_idx(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

GT_DEV void ldmatrix_x1(uint32_t& r, uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(addr) : "memory");
}

GT_DEV void ldmatrix_x1_trans(uint32_t& r, uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(addr) : "memory");
}

GT_DEV void ldmatrix_x2(uint32_t (&r)[2], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(addr)
                 : "memory");
}

GT_DEV void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(addr)
                 : "memory");
}

GT_DEV void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

GT_DEV void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

GT_DEV void stmatrix_x4(uint32_t addr, const uint32_t (&r)[4]) {
#if GT_SM90
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    __trap();
#endif
}

GT_DEV void stmatrix_x4_trans(uint32_t addr, const uint32_t (&r)[4]) {
#if GT_SM90
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    __trap();
#endif
}

GT_DEV uint32_t movmatrix_trans(uint32_t r) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
    return transposed;
}

GT_DEV void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if GT_SM80
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    __trap();
#endif
}

GT_DEV void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if GT_SM80
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

GT_DEV void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
#if GT_SM80
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(as_uint(a[0])), "r"(as_uint(a[1])), "r"(as_uint(a[2])), "r"(as_uint(a[3])), "r"(as_uint(b0)),
                   "r"(as_uint(b1)));
#else
    __trap();
#endif
}

GT_DEV uint64_t wgmma_operand(uint32_t addr, uint32_t k_bytes, uint32_t n_bytes) {
    return (uint64_t)(addr >> 4) | (uint64_t)(k_bytes >> 4) << 16 | (uint64_t)(n_bytes >> 4) << 32;
}

GT_DEV void wgmma_fence() {
#if GT_SM90A
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
    __trap();
#endif
}

GT_DEV void wgmma_commit() {
#if GT_SM90A
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
    __trap();
#endif
}

template <int N>
GT_DEV void wgmma_wait() {
#if GT_SM90A
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#else
    __trap();
#endif
}

GT_DEV void fence_async_proxy() {
#if GT_SM90A
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    __trap();
#endif
}

template <int N>
GT_DEV void give_registers() {
    static_assert(N >= 24 && N <= 256 && N % 8 == 0, "registers of a thread");
#if GT_SM90A
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#else
    __trap();
#endif
}

template <int N>
GT_DEV void take_registers() {
    static_assert(N >= 24 && N <= 256 && N % 8 == 0, "registers of a thread");
#if GT_SM90A
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#else
    __trap();
#endif
}

GT_DEV void wgmma_tf32(float (&c)[16][4], const float (&a)[4], uint64_t b) {
#if GT_SM90A
#define GT_TILE(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1;"
                 : GT_TILE(0), GT_TILE(1), GT_TILE(2), GT_TILE(3), GT_TILE(4), GT_TILE(5), GT_TILE(6), GT_TILE(7),
                   GT_TILE(8), GT_TILE(9), GT_TILE(10), GT_TILE(11), GT_TILE(12), GT_TILE(13), GT_TILE(14), GT_TILE(15)
                 : "r"(as_uint(a[0])), "r"(as_uint(a[1])), "r"(as_uint(a[2])), "r"(as_uint(a[3])), "l"(b));
#undef GT_TILE
#else
    __trap();
#endif
}

GT_DEV void wait_for_chain() {
#if GT_SM90
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

GT_DEV void release_chain() {
#if GT_SM90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif /* GT_EMU */

template <class T>
GT_DEV void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    static_assert(std::is_same<T, bf16>::value || std::is_same<T, f16>::value, "16-bit operands");
    if constexpr (std::is_same<T, bf16>::value) {
        mma_bf16(c, a, b0, b1);
    } else {
        mma_f16(c, a, b0, b1);
    }
}

} /* namespace gt */

#endif
