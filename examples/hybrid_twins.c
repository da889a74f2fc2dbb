/* The CPU twins as the trainer runs them: the same sources as gt_ref_..., with an exp that
 * compilers vectorise, compiled for one instruction set as hy_base_... or hy_avx2_.... */
#include "hybrid_isa.h"
#include "hybrid_math.h"

#define GT_REF(name) HY_TWIN(name)
#define GT_REF_EXP hy_exp
#include "../reference/gt_wkv6.c"
#include "../reference/gt_ssm.c"
#include "../reference/gt_conv1d.c"
#include "../reference/gt_conv_ssd.c"
#include "../reference/gt_wkv_ssm.c"
#include "../reference/gt_fused.c"
