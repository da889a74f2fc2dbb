/* The implementing file of this build, compiled with nvcc: kernels.  The build compiles it once per
 * part, with -DGT_CORE_IMPLEMENTATION, -DGT_WKV6_IMPLEMENTATION, ... . */
#include "../../gt_kernels.h"
