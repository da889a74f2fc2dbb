/* gt/base/bulk.cuh - for kernels: copies between global and shared memory that one thread starts (TMA).
 *
 * These primitives need compute capability 9.0; on older devices they trap.  All are collective (W of device.cuh): all
 * lanes of a warp make a call together, with the same arguments, and lane 0 acts.
 *
 * | primitive                              | semantics (PTX)                                                     |
 * |----------------------------------------|---------------------------------------------------------------------|
 * | bulk_load(addr, source, bytes, barrier)| cp.async.bulk, global to shared; addr, source and bytes are         |
 * |                                        | multiples of 16.  mbarrier_arrive_expect tells the mbarrier the     |
 * |                                        | bytes.  Its current phase completes when they are there and all     |
 * |                                        | threads have arrived                                                |
 * | bulk_store(target, addr, bytes)        | cp.async.bulk, shared to global, into the warp's open group         |
 * | bulk_commit()                          | closes the warp's group of stores                                   |
 * | bulk_wait_read<N>()                    | waits until all but the N latest groups have read shared memory     |
 * | bulk_wait<N>()                         | waits until all but the N latest groups have written global memory. |
 * |                                        | A warp that stores calls one of these two before the block ends     |
 *
 * | tile_load(addr, map, x, y, z, barrier) | cp.async.bulk.tensor.3d: loads a box of a tensor, like bulk_load.   |
 * |                                        | The box starts at element x, y, z, which may be negative.  The      |
 * |                                        | barrier expects the bytes of the whole box.  Elements outside the   |
 * |                                        | tensor arrive as zeros                                              |
 * | tile_store(map, x, y, z, addr)         | stores a box, like bulk_store.  Elements past the tensor's end are  |
 * |                                        | not stored.  x, y, z may not be negative                            |
 *
 * In loads and stores, the offset of x in bytes must be a multiple of 16.  Another x, or a store with a negative
 * coordinate, raises an illegal-instruction error.  Tests on an H200 showed these two rules; the PTX ISA does not state
 * them.
 *
 * make_tensor_map (host) describes the tensor and its boxes in a TensorMap.  A kernel gets the map in its
 * GT_GRID_CONSTANT parameters.
 * A swizzled box has rows of 128, 64 or 32 bytes.  They form a panel of wgmma.cuh in shared memory, at a multiple of 8
 * rows.
 * A box without swizzle has rows of any multiple of 16 bytes, one after the other, at a multiple of 128 bytes.
 *
 * The copies belong to the asynchronous proxy.  A copy may touch shared memory that the kernel itself has written (sts,
 * stmatrix, cp_async, mbarrier_init).  Before such a copy the writing warp calls fence_async_proxy, and then a barrier
 * follows.  Loaded data needs no fence: a warp waits for the mbarrier of the load, then reads the data by lds or as a
 * tile of wgmma.
 */
#ifndef GT_BASE_BULK_CUH
#define GT_BASE_BULK_CUH

#include "launch.cuh"

#ifndef GT_EMU
#include <cuda.h>
#endif

namespace gt {

/* The shape of a tensor (one matrix or a stack of matrices) and of its boxes.  All numbers count elements.  Elements
 * along index 0 (x) are adjacent in memory. */
struct TensorShape {
    int64_t size[3];
    int64_t stride[2]; /* strides of index 1 (y) and index 2 (z): multiples of 16 bytes */
    int box[3];        /* up to 256 each; along index 0 a multiple of 16 bytes */
    bool swizzled;
};

/* Returns whether make_tensor_map accepts a tensor.  The rules are the same on a GPU and in the emulation. */
template <class T>
static inline bool is_tensor(const T* data, const TensorShape& s) {
    bool good = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    for (int i = 0; i < 3; i++)
        good = good && s.size[i] > 0 && s.size[i] <= 0xffffffff && s.box[i] > 0 && s.box[i] <= 256;
    for (int64_t stride : s.stride) {
        const int64_t bytes = stride * (int64_t)sizeof(T);
        good = good && bytes >= 0 && bytes % 16 == 0 && bytes < (int64_t)1 << 40;
    }
    const int row = s.box[0] * (int)sizeof(T);
    return good && row % 16 == 0 && (!s.swizzled || row == 128 || row == 64 || row == 32);
}

#ifndef GT_EMU

GT_DEV void bulk_load(uint32_t addr, const void* source, uint32_t bytes, uint32_t barrier) {
#if GT_SM90
    if (lane_id() == 0)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(addr),
            "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
            : "memory");
#else
    __trap();
#endif
}

GT_DEV void bulk_store(void* target, uint32_t addr, uint32_t bytes) {
#if GT_SM90
    if (lane_id() == 0)
        asm volatile(
            "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(target)),
            "r"(addr), "r"(bytes)
            : "memory");
#else
    __trap();
#endif
}

GT_DEV void bulk_commit() {
#if GT_SM90
    if (lane_id() == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
    __trap();
#endif
}

template <int N>
GT_DEV void bulk_wait_read() {
#if GT_SM90
    if (lane_id() == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#else
    __trap();
#endif
}

template <int N>
GT_DEV void bulk_wait() {
#if GT_SM90
    if (lane_id() == 0) asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
#else
    __trap();
#endif
}

struct TensorMap {
    CUtensorMap map;
};

GT_DEV void tile_load(uint32_t addr, const TensorMap& map, int x, int y, int z, uint32_t barrier) {
#if GT_SM90
    if (lane_id() == 0)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(addr),
                     "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
                     : "memory");
#else
    __trap();
#endif
}

GT_DEV void tile_store(const TensorMap& map, int x, int y, int z, uint32_t addr) {
#if GT_SM90
    if (lane_id() == 0)
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
                     "r"(x), "r"(y), "r"(z), "r"(addr)
                     : "memory");
#else
    __trap();
#endif
}

/* The driver's cuTensorMapEncodeTiled. */
typedef CUresult (*EncodeTensorMap)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static inline cudaError_t find_encode(EncodeTensorMap* encode) {
    static std::atomic<void*> known{nullptr};
    void* function;
    const cudaError_t error = find_in_driver("cuTensorMapEncodeTiled", 12000, known, &function);
    if (error == cudaSuccess) memcpy(encode, &function, sizeof function);
    return error;
}

template <class T>
static inline cudaError_t make_tensor_map(TensorMap* map, const T* data, const TensorShape& s) {
    static_assert(std::is_same<T, float>::value || std::is_same<T, bf16>::value || std::is_same<T, f16>::value,
                  "elements of tensors");
    if (!is_tensor(data, s)) return cudaErrorInvalidValue;
    EncodeTensorMap encode;
    const cudaError_t error = find_encode(&encode);
    if (error != cudaSuccess) return error;
    const CUtensorMapDataType type = std::is_same<T, float>::value  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : std::is_same<T, bf16>::value ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                    : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    cuuint64_t sizes[3], strides[2];
    cuuint32_t box[3];
    const cuuint32_t steps[3] = {1, 1, 1};
    for (int i = 0; i < 3; i++) sizes[i] = (cuuint64_t)s.size[i];
    for (int i = 0; i < 3; i++) box[i] = (cuuint32_t)s.box[i];
    for (int i = 0; i < 2; i++) strides[i] = (cuuint64_t)s.stride[i] * sizeof(T);
    const size_t row = (size_t)s.box[0] * sizeof(T);
    const CUtensorMapSwizzle swizzle = !s.swizzled  ? CU_TENSOR_MAP_SWIZZLE_NONE
                                       : row == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : row == 64  ? CU_TENSOR_MAP_SWIZZLE_64B
                                                    : CU_TENSOR_MAP_SWIZZLE_32B;
    const CUresult result =
        encode(&map->map, type, 3, const_cast<T*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

#else /* GT_EMU */

typedef emu::TensorMap TensorMap;

template <class T>
cudaError_t make_tensor_map(TensorMap* map, const T* data, const TensorShape& s) {
    if (!is_tensor(data, s)) return cudaErrorInvalidValue;
    *map = {};
    map->data = reinterpret_cast<char*>(const_cast<T*>(data));
    map->element = sizeof(T);
    map->swizzled = s.swizzled;
    for (int i = 0; i < 3; i++) map->size[i] = s.size[i], map->box[i] = s.box[i];
    map->stride[0] = sizeof(T);
    for (int i = 0; i < 2; i++) map->stride[i + 1] = s.stride[i] * (int64_t)sizeof(T);
    return cudaSuccess;
}

GT_DEV void tile_load(uint32_t addr, const TensorMap& map, int x, int y, int z, uint32_t barrier,
                      emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_LOAD, {map.data, addr, map.box_bytes(), barrier, &map, {x, y, z}}, site,
              [site](const emu::BulkCall& c) {
                  emu::machine.start_load(c.addr, {c.map, c.at}, c.bytes, c.barrier, site);
              });
}

GT_DEV void tile_store(const TensorMap& map, int x, int y, int z, uint32_t addr, emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_STORE, {map.data, addr, map.box_bytes(), 0, &map, {x, y, z}}, site,
              [site](const emu::BulkCall& c) {
                  emu::machine.start_store({c.map, c.at}, c.addr, c.bytes, site);
              });
}

GT_DEV void bulk_load(uint32_t addr, const void* source, uint32_t bytes, uint32_t barrier,
                      emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_LOAD, {source, addr, bytes, barrier, nullptr, {}}, site, [site](const emu::BulkCall& c) {
        emu::machine.start_load(c.addr, emu::BulkSide(c.global), c.bytes, c.barrier, site);
    });
}

GT_DEV void bulk_store(void* target, uint32_t addr, uint32_t bytes, emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_STORE, {target, addr, bytes, 0, nullptr, {}}, site, [site](const emu::BulkCall& c) {
        emu::machine.start_store(emu::BulkSide(c.global), c.addr, c.bytes, site);
    });
}

GT_DEV void bulk_commit(emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_COMMIT, {}, site, [](const emu::BulkCall&) { emu::machine.commit_stores(); });
}

template <int N>
void bulk_wait_read(emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_WAIT, {}, site, [](const emu::BulkCall&) { emu::machine.wait_stores(N); });
}

template <int N>
void bulk_wait(emu::Site site = emu::Site::here()) {
    emu::bulk(emu::Op::BULK_WAIT, {}, site, [](const emu::BulkCall&) { emu::machine.wait_stores(N); });
}

#endif /* GT_EMU */

} /* namespace gt */

#endif
