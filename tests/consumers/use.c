/* This program calls two operators.  It compiles as C99, as C++11 and as any newer standard. */
#include "gt_kernels.h"
#include "gt_kernels.h"

#ifdef __cplusplus
static gt_status forward(void) {
    gt_wkv6_args args = gt_wkv6_args();
    args.B = 1, args.H = 1, args.N = 2;
    return gt_wkv6_forward(&args, 0);
}
#else
static gt_status forward(void) {
    gt_wkv6_args args = {.B = 1, .H = 1, .N = 2};
    return gt_wkv6_forward(&args, 0);
}
#endif

/* This typedef repeats the type of the CUDA Toolkit, which this program does not include. */
typedef struct CUstream_st *cudaStream_t;
static gt_status on_stream(cudaStream_t stream) { return gt_ssd_step(0, stream); }

int main(void) {
    if (gt_version() != GT_VERSION) return 1;
    if (forward() != GT_ERROR_NO_CUDA || on_stream(0) != GT_ERROR_NO_CUDA) return 2;
    return gt_last_error()[0] ? 0 : 3;
}

/* The implementation may follow its use, and a program may include each header again. */
#ifdef WITH_IMPLEMENTATION
#define GT_KERNELS_IMPLEMENTATION
#include "gt_kernels.h"
#include "gt_kernels.h"
#endif
