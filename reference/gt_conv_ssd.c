/* reference/gt_conv_ssd.c - conv_ssd on the CPU, the twin of the kernels in gt/fused/conv_ssd_*.  It calls the twin of
 * conv1d, then the twin of ssd.  c = conv1d(xBC; weight, bias, conv_state_in) with SiLU, rounded to dtype.  x, Bm and
 * Cm are slices of the rows of c.
 *
 *     y = ssd(x, Bm, Cm, dt, z; A, Dskip, dt_bias, state_in)
 *
 * Backward computes c again.  Then ssd computes the gradient dc, and from dc conv1d computes dxBC, dweight and dbias.
 *
 * Activations of any dtype are copied to packed arrays of `real` (gt_ref.h).  Even the double build rounds c to the
 * values that kernels store, so that comparisons show the errors of ssd, not the rounding of c.  dc is not rounded. */
#include "gt_ref.h"

#include "gt/fused/conv_ssd.h"

gt_status GT_REF(conv1d_forward)(const gt_conv1d_args *args);
gt_status GT_REF(conv1d_backward)(const gt_conv1d_args *args);
gt_status GT_REF(ssd_forward)(const gt_ssd_args *args);
gt_status GT_REF(ssd_backward)(const gt_ssd_args *args);
gt_status GT_REF(conv1d_step)(const gt_conv1d_args *args);
gt_status GT_REF(ssd_step)(const gt_ssd_args *args);

/* ---- copies ---------------------------------------------------------------------------------- */

/* A tensor [B,T,H,n] of the caller: an input or an output. */
typedef struct conv_ssd_tensor {
    const void *in; /* NULL for an output */
    void *out;
    gt_dtype dtype;
    gt_stride at;
    int64_t B, T, H, n;
} conv_ssd_tensor;

static int64_t conv_ssd_count(const conv_ssd_tensor *x) {
    return x->B && x->T ? gt_times(gt_times(x->B, x->T), gt_times(x->H, x->n)) : 0;
}

/* Sets *copy to a packed copy of an input, or to room for an output.  Leaves *copy unchanged if the tensor is absent or
 * empty.  The caller frees *copy. */
static gt_status conv_ssd_copy(real **copy, const conv_ssd_tensor *x) {
    const int64_t count = conv_ssd_count(x), rows = count ? x->B * x->T * x->H : 0;
    gt_status status;
    if ((!x->in && !x->out) || !count) return GT_OK;
    if ((status = ref_scratch(copy, count)) != GT_OK || !x->in) return status;
    real *to = *copy;
    GT_PARALLEL_FOR
    for (int64_t row = 0; row < rows; row++)
        ref_load_row(to + row * x->n, x->in, x->dtype, ref_at(x->at, row / x->H / x->T, row / x->H % x->T, row % x->H),
                     x->n);
    return GT_OK;
}

static void conv_ssd_copy_back(const real *copy, const conv_ssd_tensor *x) {
    const int64_t rows = copy ? x->B * x->T * x->H : 0;
    GT_PARALLEL_FOR
    for (int64_t row = 0; row < rows; row++)
        ref_store_row(x->out, x->dtype, ref_at(x->at, row / x->H / x->T, row / x->H % x->T, row % x->H),
                      copy + row * x->n, x->n);
}

/* ---- the two calls --------------------------------------------------------------------------- */

enum { XBC, DT, Z, DY, Y, DXBC, DDT, DZ, TENSORS };

typedef struct conv_ssd_call {
    gt_conv_ssd_args a; /* the caller's arguments, with copies of the activations in one dtype */
    conv_ssd_tensor tensor[TENSORS];
    real *copy[TENSORS];
    real *c, *dc, *slices; /* [B,T,D].  ssd writes its part of dc to `slices` */
    int has_tokens;
    gt_conv1d_args conv;
    gt_ssd_args ssd;
} conv_ssd_call;

static conv_ssd_tensor conv_ssd_tensor_of(const gt_conv_ssd_args *a, const void *in, void *out, gt_dtype dtype,
                                          gt_stride at, int64_t H, int64_t n) {
    const conv_ssd_tensor x = {in, out, dtype, at, a->B, a->T, H, n};
    return x;
}

/* Makes the copies, and lets the arguments point to them. */
static gt_status conv_ssd_take(conv_ssd_call *k, gt_pass pass) {
    gt_conv_ssd_args *a = &k->a;
    const int64_t D = gt_conv_ssd_channels(a);
    const int is_backward = pass == GT_BACKWARD;
    const gt_stride packed = {0, 0, 0};
    gt_status status = GT_OK;
    k->tensor[XBC] = conv_ssd_tensor_of(a, a->xBC, NULL, a->dtype, a->xBC_stride, D, 1);
    k->tensor[DT] = conv_ssd_tensor_of(a, a->dt, NULL, a->dt_dtype, a->dt_stride, a->H, 1);
    k->tensor[Z] = conv_ssd_tensor_of(a, a->z, NULL, a->dtype, a->z_stride, a->H, a->P);
    k->tensor[DY] = conv_ssd_tensor_of(a, is_backward ? a->dy : NULL, NULL, a->dtype, a->dy_stride, a->H, a->P);
    k->tensor[Y] = conv_ssd_tensor_of(a, NULL, is_backward ? NULL : a->y, a->dtype, a->y_stride, a->H, a->P);
    k->tensor[DXBC] = conv_ssd_tensor_of(a, NULL, is_backward ? a->dxBC : NULL, a->dtype, a->dxBC_stride, D, 1);
    k->tensor[DDT] = conv_ssd_tensor_of(a, NULL, is_backward ? a->ddt : NULL, a->dt_dtype, a->ddt_stride, a->H, 1);
    k->tensor[DZ] = conv_ssd_tensor_of(a, NULL, is_backward ? a->dz : NULL, a->dtype, a->dz_stride, a->H, a->P);
    for (int i = 0; i < TENSORS && status == GT_OK; i++) status = conv_ssd_copy(&k->copy[i], &k->tensor[i]);
    a->xBC = k->copy[XBC], a->dt = k->copy[DT], a->z = k->copy[Z], a->dy = k->copy[DY], a->y = k->copy[Y];
    a->dxBC = k->copy[DXBC], a->ddt = k->copy[DDT], a->dz = k->copy[DZ];
    a->dtype = a->dt_dtype = GT_F32;
    a->xBC_stride = a->dt_stride = a->z_stride = a->dy_stride = a->y_stride = packed;
    a->dxBC_stride = a->ddt_stride = a->dz_stride = packed;
    return status;
}

/* Gives dx, dBm and dCm separate arrays instead of slices of dc.  The checks of arguments count in floats; in the
 * double build slices of one row would seem to overlap. */
static void conv_ssd_split(conv_ssd_call *k) {
    gt_ssd_args *s = &k->ssd;
    const gt_stride packed = {0, 0, 0};
    const int64_t rows = s->B * s->T;
    s->dx = k->slices;
    s->dBm = (real *)s->dx + rows * s->H * s->P;
    s->dCm = (real *)s->dBm + rows * s->G * s->N;
    s->dx_stride = s->dBm_stride = s->dCm_stride = packed;
}

static void conv_ssd_join(const conv_ssd_call *k) {
    const gt_ssd_args *s = &k->ssd;
    const int64_t x = s->H * s->P, B = s->G * s->N, rows = s->B * s->T;
    GT_PARALLEL_FOR
    for (int64_t row = 0; row < rows; row++) {
        real *to = k->dc + row * k->conv.D;
        memcpy(to, (const real *)s->dx + row * x, (size_t)x * sizeof(real));
        memcpy(to + x, (const real *)s->dBm + row * B, (size_t)B * sizeof(real));
        memcpy(to + x + B, (const real *)s->dCm + row * B, (size_t)B * sizeof(real));
    }
}

static gt_status conv_ssd_begin(gt_pass pass, const gt_conv_ssd_args *args, conv_ssd_call *k) {
    gt_dims dims;
    ref_sequences all;
    memset(k, 0, sizeof *k);
    gt_status status = gt_prepare(gt_op_conv_ssd(), pass, GT_HOST, args, &k->a, &dims);
    if (status != GT_OK) return status;
    const gt_conv_ssd_args *a = &k->a;
    status = ref_find_sequences(a->B, a->T, a->cu_seqlens, a->seq_count, a->seq_capacity, &all);
    if (status != GT_OK) return status;
    k->has_tokens = a->B > 0 && a->T > 0;
    const int wants_dc = k->has_tokens && pass == GT_BACKWARD && gt_conv_ssd_wants_dc(a);
    const int64_t count = k->has_tokens ? gt_times(a->B * a->T, gt_conv_ssd_channels(a)) : 0;
    status = conv_ssd_take(k, pass);
    if (status == GT_OK && k->has_tokens) status = ref_scratch(&k->c, count);
    if (status == GT_OK && wants_dc) status = ref_scratch(&k->dc, count);
    if (status == GT_OK && wants_dc) status = ref_scratch(&k->slices, count);
    k->conv = gt_conv_ssd_conv(a, k->c, k->dc);
    k->ssd = gt_conv_ssd_ssd(a, k->c, NULL, (int64_t)sizeof(real));
    if (k->slices) conv_ssd_split(k);
    return status;
}

static gt_status conv_ssd_end(conv_ssd_call *k, gt_status status) {
    for (int i = 0; i < TENSORS; i++) {
        if (status == GT_OK && k->tensor[i].out) conv_ssd_copy_back(k->copy[i], &k->tensor[i]);
        free(k->copy[i]);
    }
    free(k->c);
    free(k->dc);
    free(k->slices);
    return status;
}

/* Computes c, rounded to dtype. */
static gt_status conv_ssd_convolve(conv_ssd_call *k, gt_pass pass, const gt_conv1d_args *conv) {
    const gt_status status = pass == GT_STEP ? GT_REF(conv1d_step)(conv) : GT_REF(conv1d_forward)(conv);
    const gt_dtype dtype = k->tensor[XBC].dtype;
    const int64_t D = conv->D, rows = status == GT_OK && k->c && dtype != GT_F32 ? conv->B * conv->T : 0;
    GT_PARALLEL_FOR
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row * D; i < (row + 1) * D; i++) k->c[i] = ref_rounded(k->c[i], dtype);
    return status;
}

/* Returns whether conv1d is called.  Without tokens D may exceed the limit of conv1d, and then there are no states. */
static int conv_ssd_has_conv(const conv_ssd_call *k) { return k->has_tokens || k->conv.D <= GT_MAX_SIZE; }

/* Stores the states of the convolution after every snapshot_every tokens: the last W - 1 inputs, oldest first. */
static void conv_ssd_keep_inputs(const conv_ssd_call *k) {
    const gt_conv_ssd_args *a = &k->a;
    const int64_t every = a->snapshot_every, D = k->conv.D, J = a->W - 1;
    ref_sequences all;
    if (!a->conv_snapshots || !k->has_tokens) return;
    if (ref_find_sequences(a->B, a->T, a->cu_seqlens, a->seq_count, a->seq_capacity, &all) != GT_OK) return;
    ref_use_pool(&all, a->slots, a->starts_zero, a->slot_capacity);
    for (int64_t s = 0; s < all.count; s++) {
        const ref_sequence q = ref_sequence_at(&all, s);
        for (int64_t t = q.first + every; q.row >= 0 && t <= q.last; t += every) {
            const int64_t row = ref_snapshot_row(every, a->T, q.b, q.first, t);
            for (int64_t i = 0; i < D * J; i++)
                ref_store(a->conv_snapshots, a->conv_state_dtype, row * D * J + i,
                          k->copy[XBC][(q.b * a->T + t - J + i % J) * D + i / J]);
        }
    }
}

gt_status GT_REF(conv_ssd_forward)(const gt_conv_ssd_args *args) {
    conv_ssd_call k;
    gt_status status = conv_ssd_begin(GT_FORWARD, args, &k);
    if (status == GT_OK && conv_ssd_has_conv(&k)) status = conv_ssd_convolve(&k, GT_FORWARD, &k.conv);
    if (status == GT_OK) status = GT_REF(ssd_forward)(&k.ssd);
    if (status == GT_OK) conv_ssd_keep_inputs(&k);
    return conv_ssd_end(&k, status);
}

gt_status GT_REF(conv_ssd_backward)(const gt_conv_ssd_args *args) {
    conv_ssd_call k;
    gt_status status = conv_ssd_begin(GT_BACKWARD, args, &k);
    if (status == GT_OK && k.has_tokens) {
        gt_conv1d_args again = k.conv;
        again.state_out = NULL;
        status = conv_ssd_convolve(&k, GT_BACKWARD, &again);
    }
    if (status == GT_OK) status = GT_REF(ssd_backward)(&k.ssd);
    if (status == GT_OK && k.dc) conv_ssd_join(&k);
    if (status == GT_OK && conv_ssd_has_conv(&k) && (k.dc || !k.has_tokens)) status = GT_REF(conv1d_backward)(&k.conv);
    return conv_ssd_end(&k, status);
}

/* Without tokens both states stay as they are. */
gt_status GT_REF(conv_ssd_step)(const gt_conv_ssd_args *args) {
    conv_ssd_call k;
    gt_status status = conv_ssd_begin(GT_STEP, args, &k);
    if (status == GT_OK && k.has_tokens) status = conv_ssd_convolve(&k, GT_STEP, &k.conv);
    if (status == GT_OK && k.has_tokens) status = GT_REF(ssd_step)(&k.ssd);
    return conv_ssd_end(&k, status);
}
