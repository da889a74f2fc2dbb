#define GT_REAL double
#include "ref64.h"
#include "../reference/gt_wkv6.c"
#include "../reference/gt_ssm.c"
#include "../reference/gt_conv1d.c"
#include "../reference/gt_fused.c"
