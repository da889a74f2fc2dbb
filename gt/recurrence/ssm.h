/* gt/recurrence/ssm.h - checks of arguments that ssd and selective_scan share (plain C). */
#ifndef GT_RECURRENCE_SSM_H
#define GT_RECURRENCE_SSM_H

#include "../base/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets and checks G, the number of groups of Bm and Cm.  All groups serve the same number of heads (or channels).
 * `field` is the name of the field that has the number of heads. */
static gt_status gt_ssm_resolve_groups(int64_t *G, const char *field, int64_t heads, gt_dims *dims) {
    gt_status status;
    if (*G == 0) *G = 1;
    dims->n['G' - 'A'] = *G;
    if ((status = gt_check_range(GT_ERROR_SIZE, "G", *G, 1, GT_MAX_SIZE))) return status;
    if (heads % *G)
        return gt_fail(GT_ERROR_SIZE, "G = %lld: must divide %s = %lld", (long long)*G, field, (long long)heads);
    return GT_OK;
}

/* Checks the limits dt_min and dt_max of Delta, the time step that the operator makes from dt. */
static inline gt_status gt_ssm_check_limits(int dt_limit, float dt_min, float dt_max) {
    const gt_status status = gt_check_range(GT_ERROR_VALUE, "dt_limit", dt_limit, 0, 1);
    if (status != GT_OK || !dt_limit) return status;
    if (dt_min != dt_min || dt_max != dt_max)
        return gt_fail(GT_ERROR_VALUE, "%s is NaN", dt_min != dt_min ? "dt_min" : "dt_max");
    if (dt_min > dt_max)
        return gt_fail(GT_ERROR_VALUE, "dt_min = %g: must not be above dt_max = %g", (double)dt_min, (double)dt_max);
    return GT_OK;
}

/* Refuses dz without z, since dz is the gradient of the gate z.  A call without tokens needs no gate. */
static gt_status gt_ssm_check_gate(const void *z, const void *dz, gt_pass pass, const gt_dims *dims) {
    if (pass != GT_BACKWARD || !dz || z || !dims->n['B' - 'A'] || !dims->n['T' - 'A']) return GT_OK;
    return gt_fail(GT_ERROR_NULL, "z is NULL, but dz is set");
}

/* Sets y of a backward call to NULL if the call does not read y, so that callers may pass any value. */
static gt_status gt_ssm_resolve_y(int reads_y, void **y, gt_pass pass) {
    if (pass == GT_BACKWARD && !reads_y) *y = NULL;
    return gt_check_range(GT_ERROR_VALUE, "reads_y", reads_y, 0, 1);
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
