/* Contains the kernels for the emulation (GT_EMU).  The build compiles this file once per part, with
 * -DGT_WKV6_IMPLEMENTATION, ... . */
#include "../../gt_kernels.h"
