/* Contains the implementation in a build with nvcc: the kernels.  The build compiles this file once per part, with
 * -DGT_CORE_IMPLEMENTATION, -DGT_WKV6_IMPLEMENTATION, ... . */
#include "../../gt_kernels.h"
