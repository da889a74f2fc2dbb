/* The implementing file of this build, compiled without nvcc: stubs.  The build compiles it once per
 * part, with -DGT_CORE_IMPLEMENTATION, -DGT_WKV6_IMPLEMENTATION, ... . */
#include "../../gt_kernels.h"
