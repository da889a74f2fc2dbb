/* gt/wkv6/path.cuh - why a call of wkv6 takes the kernels for any size: for gt_wkv6_path. */
#ifndef GT_WKV6_PATH_CUH
#define GT_WKV6_PATH_CUH

#include "../base/built.cuh"
#include "../base/path.cuh"

namespace gt {
namespace wkv6 {

/* Whether rows of a tensor start at multiples of `bytes`, and neighbours in time are less than 2^24 elements apart. */
struct PathRows {
    const char* name;
    const void* data;
    gt_stride stride;
    gt_dtype dtype;
    int bytes;

    const char* fault() const {
        const int n = bytes / (dtype == GT_F32 ? 4 : 2);
        if ((uintptr_t)data % (uintptr_t)bytes || stride.b % n || stride.t % n || stride.h % n) return "aligned";
        return stride.t < (int64_t)1 << 24 ? nullptr : "near";
    }
};

static inline bool path_takes(const KernelList& kernels, const char* name) {
    for (int i = 0; i < kernels.count; i++)
        if (!strcmp(kernels.names[i], name)) return true;
    return false;
}

/* The conditions of kernels on tensor cores, in the order in which a caller can mend them last. */
static inline const char* why_any_size(const gt_wkv6_args& a, gt_pass pass, const Device& device, char (&room)[128]) {
    const gt_dtype dtype = a.dtype;
    const int size = dtype == GT_F32 ? 4 : 2, w_size = a.w_dtype == GT_F32 ? 4 : 2;
    const bool back = pass == GT_BACKWARD;
    const PathRows rows[] = {{"r", a.r, a.r_stride, dtype, 16},
                             {"k", a.k, a.k_stride, dtype, 16},
                             {"w", a.w, a.w_stride, a.w_dtype, 16},
                             {"v", a.v, a.v_stride, dtype, 16},
                             {"y", back ? nullptr : a.y, back ? gt_stride{} : a.y_stride, dtype, 16},
                             {"dy", back ? a.dy : nullptr, back ? a.dy_stride : gt_stride{}, dtype, 16},
                             {"dr", back ? a.dr : nullptr, back ? a.dr_stride : gt_stride{}, dtype, 8},
                             {"dk", back ? a.dk : nullptr, back ? a.dk_stride : gt_stride{}, dtype, 8},
                             {"dw", back ? a.dw : nullptr, back ? a.dw_stride : gt_stride{}, a.w_dtype, 2 * w_size},
                             {"dv", back ? a.dv : nullptr, back ? a.dv_stride : gt_stride{}, dtype, 2 * size}};
    const struct {
        const char* name;
        const void* data;
    } whole[] = {{"u", back ? a.u : nullptr}, {"state_out", back ? nullptr : a.state_out},
                 {"dstate_in", back ? a.dstate_in : nullptr}};
    if (pass == GT_STEP) return nullptr; /* has no others */
    if (device.compute_capability < 80) return "any-size kernels: the device is older than sm_80";
    if (a.N != a.V) return "any-size kernels: N and V differ";
    if (a.N != 32 && a.N != 64 && a.N != 128) return "any-size kernels: N is not 32, 64 or 128";
    if (!is_built(dtype)) return "any-size kernels: this build has no others for the dtype";
    if (!is_built_head(a.N)) return "any-size kernels: this build has no others for N";
    if (a.T >= INT32_MAX / 2) return "any-size kernels: T is 2^30 or more";
    for (const PathRows& x : rows) {
        const char* fault = x.fault();
        if (fault && !strcmp(fault, "aligned"))
            snprintf(room, sizeof room, "any-size kernels: rows of %s are not aligned to %d bytes", x.name, x.bytes);
        else if (fault)
            snprintf(room, sizeof room, "any-size kernels: rows of %s are 2^24 elements apart", x.name);
        if (fault) return room;
    }
    for (const auto& x : whole) {
        if ((uintptr_t)x.data % 16 == 0) continue;
        snprintf(room, sizeof room, "any-size kernels: %s is not aligned to 16 bytes", x.name);
        return room;
    }
    return "any-size kernels: a block may have too little shared memory";
}

static inline const char* why_not_faster(const gt_wkv6_args& a, gt_pass pass, const KernelList& kernels,
                                         const Device& device, char (&room)[128]) {
    return path_takes(kernels, "wkv6 token_kernel") ? why_any_size(a, pass, device, room) : nullptr;
}

} /* namespace wkv6 */
} /* namespace gt */

#endif
