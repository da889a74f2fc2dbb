/* Compiles the CPU twins (reference functions) for the trainer.  They have the same sources as the gt_ref_...
 * functions, but use an exp that compilers can vectorise.  The build compiles this file once for each instruction
 * set; the functions' names begin with hy_base_ or hy_avx2_. */
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
