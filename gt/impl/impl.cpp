/* The implementing file of the emulated kernels.  The build compiles it with -DGT_EMU once per part, with
 * -DGT_WKV6_IMPLEMENTATION, ... . */
#include "../../gt_kernels.h"
