/* gt/xla/attributes.h - the fields of an argument struct that an XLA call sets by attributes (plain C).  The lists also
 * hold fields that follow from shapes of buffers, but are not in the operator's table of sizes. */
#ifndef GT_XLA_ATTRIBUTES_H
#define GT_XLA_ATTRIBUTES_H

#include "../base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A field.  kind: 'i' int or enum, 'l' int64_t, 'f' float.  letter: 0, or a letter of the shapes in the operator's
 * table.  A buffer whose shape has this letter sets the field: kind 'l' to the size of that index, kind 'i' to 1.
 * Letter 'y' marks a flag (reads_y, reads_sum) that is set if backward gets a result of forward as an operand. */
typedef struct gt_xla_attribute {
    const char *name;
    size_t offset;
    char kind, letter;
} gt_xla_attribute;

typedef struct gt_xla_operator {
    const gt_op *(*op)(void);
    const gt_xla_attribute *attributes;               /* ends with name NULL */
    gt_status (*twin[GT_STEP + 1])(const void *args); /* indexed by gt_pass */
} gt_xla_operator;

/* An example is GT_XLA_AT(ssd, G, 'l', 'G').  A field of an inner struct is written as in the tables: ssd.G. */
#define GT_XLA_AT(op, field, kind, letter)                                                                             \
    { #field, offsetof(gt_##op##_args, field), kind, letter }
#define GT_XLA_END                                                                                                     \
    { NULL, 0, 0, 0 }
#define GT_XLA_TWIN(op, pass)                                                                                          \
    static gt_status gt_xla_twin_##op##_##pass(const void *args) {                                                     \
        return gt_ref_##op##_##pass((const gt_##op##_args *)args);                                                     \
    }
#define GT_XLA_OPERATOR(op, step, ...)                                                                                 \
    GT_XLA_TWIN(op, forward)                                                                                           \
    GT_XLA_TWIN(op, backward)                                                                                          \
    static const gt_xla_attribute gt_xla_attributes_of_##op[] = {__VA_ARGS__, GT_XLA_END};                             \
    static const gt_xla_operator gt_xla_##op = {                                                                       \
        gt_op_##op, gt_xla_attributes_of_##op, {gt_xla_twin_##op##_forward, gt_xla_twin_##op##_backward, step}};

GT_XLA_TWIN(wkv6, step)
GT_XLA_OPERATOR(wkv6, gt_xla_twin_wkv6_step, GT_XLA_AT(wkv6, V, 'l', 'V'), GT_XLA_AT(wkv6, decay, 'i', 0),
                GT_XLA_AT(wkv6, scale, 'f', 0), GT_XLA_AT(wkv6, segments, 'l', 0),
                GT_XLA_AT(wkv6, snapshot_every, 'l', 0))

GT_XLA_TWIN(wkv4, step)
GT_XLA_OPERATOR(wkv4, gt_xla_twin_wkv4_step, GT_XLA_AT(wkv4, decay, 'i', 0), GT_XLA_AT(wkv4, segments, 'l', 0))

GT_XLA_TWIN(ssd, step)
GT_XLA_OPERATOR(ssd, gt_xla_twin_ssd_step, GT_XLA_AT(ssd, G, 'l', 'G'), GT_XLA_AT(ssd, softplus, 'i', 0),
                GT_XLA_AT(ssd, dt_limit, 'i', 0), GT_XLA_AT(ssd, dt_min, 'f', 0), GT_XLA_AT(ssd, dt_max, 'f', 0),
                GT_XLA_AT(ssd, Dskip_per_channel, 'i', 'K'), GT_XLA_AT(ssd, reads_y, 'i', 'y'),
                GT_XLA_AT(ssd, segments, 'l', 0), GT_XLA_AT(ssd, snapshot_every, 'l', 0))

GT_XLA_TWIN(selective_scan, step)
GT_XLA_OPERATOR(selective_scan, gt_xla_twin_selective_scan_step, GT_XLA_AT(selective_scan, G, 'l', 'G'),
                GT_XLA_AT(selective_scan, softplus, 'i', 0), GT_XLA_AT(selective_scan, segments, 'l', 0))

GT_XLA_TWIN(conv1d, step)
GT_XLA_OPERATOR(conv1d, gt_xla_twin_conv1d_step, GT_XLA_AT(conv1d, activation, 'i', 0))

GT_XLA_TWIN(conv_ssd, step)
GT_XLA_OPERATOR(conv_ssd, gt_xla_twin_conv_ssd_step, GT_XLA_AT(conv_ssd, N, 'l', 'N'), GT_XLA_AT(conv_ssd, G, 'l', 0),
                GT_XLA_AT(conv_ssd, softplus, 'i', 0), GT_XLA_AT(conv_ssd, dt_limit, 'i', 0),
                GT_XLA_AT(conv_ssd, dt_min, 'f', 0), GT_XLA_AT(conv_ssd, dt_max, 'f', 0),
                GT_XLA_AT(conv_ssd, Dskip_per_channel, 'i', 'K'), GT_XLA_AT(conv_ssd, reads_y, 'i', 'y'),
                GT_XLA_AT(conv_ssd, segments, 'l', 0), GT_XLA_AT(conv_ssd, snapshot_every, 'l', 0))

GT_XLA_TWIN(wkv_ssm, step)
GT_XLA_OPERATOR(wkv_ssm, gt_xla_twin_wkv_ssm_step, GT_XLA_AT(wkv_ssm, wkv6.V, 'l', 'V'),
                GT_XLA_AT(wkv_ssm, wkv6.decay, 'i', 0), GT_XLA_AT(wkv_ssm, wkv6.scale, 'f', 0),
                GT_XLA_AT(wkv_ssm, ssd.G, 'l', 'g'), GT_XLA_AT(wkv_ssm, ssd.softplus, 'i', 0),
                GT_XLA_AT(wkv_ssm, ssd.dt_limit, 'i', 0), GT_XLA_AT(wkv_ssm, ssd.dt_min, 'f', 0),
                GT_XLA_AT(wkv_ssm, ssd.dt_max, 'f', 0), GT_XLA_AT(wkv_ssm, ssd.Dskip_per_channel, 'i', 'k'),
                GT_XLA_AT(wkv_ssm, ssd.reads_y, 'i', 'y'), GT_XLA_AT(wkv_ssm, segments, 'l', 0))

GT_XLA_OPERATOR(rmsnorm_linear, NULL, GT_XLA_AT(rmsnorm_linear, norm, 'i', 0), GT_XLA_AT(rmsnorm_linear, eps, 'f', 0))
GT_XLA_OPERATOR(norm_mix, NULL, GT_XLA_AT(norm_mix, H, 'l', 0), GT_XLA_AT(norm_mix, eps, 'f', 0))
GT_XLA_OPERATOR(norm_gate, NULL, GT_XLA_AT(norm_gate, norm, 'i', 0), GT_XLA_AT(norm_gate, gate_first, 'i', 0),
                GT_XLA_AT(norm_gate, H, 'l', 0), GT_XLA_AT(norm_gate, eps, 'f', 0))
GT_XLA_OPERATOR(add_norm, NULL, GT_XLA_AT(add_norm, norm, 'i', 0), GT_XLA_AT(add_norm, eps, 'f', 0),
                GT_XLA_AT(add_norm, reads_sum, 'i', 'y'))

#undef GT_XLA_OPERATOR
#undef GT_XLA_TWIN
#undef GT_XLA_END
#undef GT_XLA_AT

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
