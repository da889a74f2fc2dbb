/* gt/xla/handlers.h - XLA FFI handlers of all operators (plain C).  One function reads a call frame by an operator's
 * table.  Each operator, pass and platform has a thin handler that calls this function.
 *
 * A call names its buffers.  Attribute "operands" has one name for each operand, in order: a tensor of the argument
 * struct.  Attribute "results" does the same for the results.  Names are separated by spaces.  Sizes, dtypes and flags
 * that follow from the buffers' shapes need no attribute.  docs/xla.md is the page for users. */
#ifndef GT_XLA_HANDLERS_H
#define GT_XLA_HANDLERS_H

#include <stdio.h>
#include <string.h>

#include "api.h"
#include "attributes.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GT_XLA_MAX_TENSORS = 64 }; /* limit for one operator; wkv_ssm has 48 */

/* A call that is being read.  The arrays have an element for each tensor of the operator's table. */
typedef struct gt_xla_reading {
    const gt_xla_operator *xla;
    const gt_op *op;
    gt_pass pass;
    const gt_xla_buffer *operand[GT_XLA_MAX_TENSORS], *result[GT_XLA_MAX_TENSORS];
    union {
        gt_wkv6_args wkv6;
        gt_ssd_args ssd;
        gt_selective_scan_args selective_scan;
        gt_conv1d_args conv1d;
        gt_conv_ssd_args conv_ssd;
        gt_wkv_ssm_args wkv_ssm;
        gt_rmsnorm_linear_args rmsnorm_linear;
        gt_norm_mix_args norm_mix;
        gt_norm_gate_args norm_gate;
        gt_add_norm_args add_norm;
    } args;
} gt_xla_reading;

static void *gt_xla_field(gt_xla_reading *r, size_t offset) { return (char *)&r->args + offset; }

static int gt_xla_is(const gt_xla_text *text, const char *name) {
    return strlen(name) == text->size && !memcmp(name, text->data, text->size);
}

static gt_status gt_xla_bad(const gt_xla_text *name, const char *why) {
    return gt_fail(GT_ERROR_VALUE, "%.*s %s", (int)name->size, name->data, why);
}

/* ---- attributes ---- */

/* Reads an integer or flag.  Returns 0 if the scalar is neither. */
static int gt_xla_number(const gt_xla_scalar *s, double *number, int64_t *integer) {
#define GT_XLA_READ(type)                                                                                              \
    do {                                                                                                               \
        type value;                                                                                                    \
        memcpy(&value, s->value, sizeof value);                                                                        \
        *number = (double)value;                                                                                       \
        *integer = (int64_t)value;                                                                                     \
        return 1;                                                                                                      \
    } while (0)
    switch (s->dtype) {
    case GT_XLA_PRED:
    case GT_XLA_U8: GT_XLA_READ(uint8_t);
    case GT_XLA_S8: GT_XLA_READ(int8_t);
    case GT_XLA_S16: GT_XLA_READ(int16_t);
    case GT_XLA_U16: GT_XLA_READ(uint16_t);
    case GT_XLA_S32: GT_XLA_READ(int32_t);
    case GT_XLA_U32: GT_XLA_READ(uint32_t);
    case GT_XLA_S64: GT_XLA_READ(int64_t);
    }
#undef GT_XLA_READ
    return 0;
}

/* Reads a floating-point number.  Returns 0 if the scalar is none. */
static int gt_xla_real(const gt_xla_scalar *s, double *number) {
    float value;
    if (s->dtype == GT_XLA_F64) {
        memcpy(number, s->value, sizeof *number);
        return 1;
    }
    if (s->dtype != GT_XLA_F32) return 0;
    memcpy(&value, s->value, sizeof value);
    *number = (double)value;
    return 1;
}

static gt_status gt_xla_set_attribute(gt_xla_reading *r, const gt_xla_text *name, int type, const void *value) {
    const gt_xla_attribute *a = r->xla->attributes;
    const gt_xla_scalar *scalar = (const gt_xla_scalar *)value;
    double number = 0;
    int64_t integer = 0;
    while (a->name && !gt_xla_is(name, a->name)) a++;
    if (!a->name) return gt_xla_bad(name, "is not an attribute of this call");
    if (type != GT_XLA_SCALAR) return gt_xla_bad(name, "must be a number");
    if (a->kind == 'f') {
        float field;
        if (!gt_xla_real(scalar, &number) && !gt_xla_number(scalar, &number, &integer))
            return gt_xla_bad(name, "must be a number");
        field = (float)number;
        memcpy(gt_xla_field(r, a->offset), &field, sizeof field);
        return GT_OK;
    }
    if (!gt_xla_number(scalar, &number, &integer)) return gt_xla_bad(name, "must be an integer or a flag");
    if (a->kind == 'l') {
        memcpy(gt_xla_field(r, a->offset), &integer, sizeof integer);
    } else {
        const int field = (int)integer;
        if ((int64_t)field != integer) return gt_xla_bad(name, "is out of range");
        memcpy(gt_xla_field(r, a->offset), &field, sizeof field);
    }
    return GT_OK;
}

/* Sets the fields of all attributes.  The lists "operands" and "results" go to names[0] and names[1]. */
static gt_status gt_xla_set_attributes(gt_xla_reading *r, const gt_xla_attributes *all, gt_xla_text names[2]) {
    static const char *const lists[2] = {"operands", "results"};
    for (int64_t i = 0; i < all->count; i++) {
        int list = 0;
        gt_status status;
        while (list < 2 && !gt_xla_is(all->names[i], lists[list])) list++;
        if (list == 2) {
            status = gt_xla_set_attribute(r, all->names[i], all->types[i], all->values[i]);
            if (status != GT_OK) return status;
        } else {
            if (all->types[i] != GT_XLA_STRING) return gt_xla_bad(all->names[i], "must be a string of names");
            names[list] = *(const gt_xla_text *)all->values[i];
        }
    }
    for (int list = 0; list < 2; list++)
        if (!names[list].data) return gt_fail(GT_ERROR_VALUE, "attribute %s is missing", lists[list]);
    return GT_OK;
}

/* ---- buffers ---- */

/* Returns the address of the size or flag that a letter of a shape stands for, or NULL.  *kind gets its kind, as in
 * gt_xla_attribute. */
static void *gt_xla_letter(gt_xla_reading *r, char letter, char *kind) {
    *kind = 'l';
    for (const gt_size *s = r->op->sizes; s->letter; s++)
        if (s->letter == letter) return gt_xla_field(r, s->offset);
    for (const gt_xla_attribute *a = r->xla->attributes; a->name; a++) {
        if (a->letter != letter) continue;
        *kind = a->kind;
        return gt_xla_field(r, a->offset);
    }
    return NULL;
}

/* Returns the letters of a tensor's shape for a buffer with `rank` indices.  A shared state lacks the first index.  A
 * Dskip with one element for each head lacks the last. */
static gt_xla_text gt_xla_letters(const gt_tensor *t, int64_t rank) {
    gt_xla_text letters;
    letters.data = t->shape;
    letters.size = strlen(t->shape);
    if (rank != (int64_t)letters.size - 1) return letters;
    if (t->shape[0] == 'S') letters.data++, letters.size--;
    if (letters.data[letters.size - 1] == 'K' || letters.data[letters.size - 1] == 'k') letters.size--;
    return letters;
}

/* Sets the sizes and flags that follow from the shape of one buffer.  A size that is already known stays.
 * gt_xla_check_shape later compares it with the shape. */
static gt_status gt_xla_set_sizes(gt_xla_reading *r, const gt_tensor *t, const gt_xla_buffer *b) {
    const gt_xla_text letters = gt_xla_letters(t, b->rank);
    const int is_shared = letters.data != t->shape;
    if (b->rank != (int64_t)letters.size)
        return gt_fail(GT_ERROR_SIZE, "%s has rank %lld: must be %d, as [%s]", t->name, (long long)b->rank,
                       (int)letters.size, t->shape);
    if (is_shared) memcpy(gt_xla_field(r, r->op->fields.state_in_shared), &is_shared, sizeof is_shared);
    for (size_t i = 0; i < letters.size; i++) {
        const char letter = letters.data[i];
        const int64_t size = b->sizes[i] - (letter == 'C'); /* the number of sequences is one less than the length of
                                                             * cu_seqlens */
        const int is_set = 1;
        int64_t known;
        char kind = 'l';
        void *field = letter == 'C' ? gt_xla_field(r, r->op->fields.seq_capacity) : gt_xla_letter(r, letter, &kind);
        if (!field) continue;
        if (kind == 'i') {
            memcpy(field, &is_set, sizeof is_set);
            continue;
        }
        memcpy(&known, field, sizeof known);
        if (known == 0) memcpy(field, &size, sizeof size);
    }
    return GT_OK;
}

static gt_dtype gt_xla_dtype(int dtype) {
    return dtype == GT_XLA_F32    ? GT_F32
           : dtype == GT_XLA_BF16 ? GT_BF16
           : dtype == GT_XLA_F16  ? GT_F16
                                  : GT_DTYPE_DEFAULT;
}

static gt_status gt_xla_set_dtype(gt_xla_reading *r, const gt_tensor *t, const gt_xla_buffer *b) {
    const gt_dtype dtype = gt_xla_dtype(b->dtype);
    gt_dtype known;
    void *field;
    if (t->kind == 'i') return b->dtype == GT_XLA_S32 ? GT_OK : gt_fail(GT_ERROR_DTYPE, "%s must be int32", t->name);
    if (t->kind == 'f') return dtype == GT_F32 ? GT_OK : gt_fail(GT_ERROR_DTYPE, "%s must be float32", t->name);
    if (dtype == GT_DTYPE_DEFAULT) return gt_fail(GT_ERROR_DTYPE, "%s must be float32, bfloat16 or float16", t->name);
    field = gt_xla_field(r, gt_dtype_field(r->op, t));
    memcpy(&known, field, sizeof known);
    if (known != GT_DTYPE_DEFAULT && known != dtype)
        return gt_fail(GT_ERROR_DTYPE, "%s has another dtype than the tensors before it", t->name);
    memcpy(field, &dtype, sizeof dtype);
    return GT_OK;
}

static int gt_xla_is_output(char use) { return use == 'O' || use == 'o' || use == 'g' || use == 's'; }
static int gt_xla_is_input(char use) { return use == 'I' || use == 'i' || use == 's'; }

/* Sets the address and the size of `saved` or of the workspace. */
static gt_status gt_xla_set_memory(gt_xla_reading *r, const gt_xla_text *name, const gt_xla_buffer *b, size_t pointer,
                                   size_t bytes) {
    size_t size = 1;
    if (b->dtype != GT_XLA_U8) return gt_xla_bad(name, "must be uint8");
    for (int64_t i = 0; i < b->rank; i++) size *= (size_t)b->sizes[i];
    memcpy(gt_xla_field(r, pointer), &b->data, sizeof b->data);
    memcpy(gt_xla_field(r, bytes), &size, sizeof size);
    return GT_OK;
}

static gt_status gt_xla_set_buffer(gt_xla_reading *r, int is_result, const gt_xla_text *name, const gt_xla_buffer *b) {
    const gt_fields *f = &r->op->fields;
    const gt_tensor *t = r->op->tensors;
    const gt_xla_buffer **place;
    gt_status status;
    char use, kind;
    if (f->saved && gt_xla_is(name, "saved") && is_result == (r->pass == GT_FORWARD) && r->pass != GT_STEP)
        return gt_xla_set_memory(r, name, b, f->saved, f->saved_bytes);
    if (is_result && gt_xla_is(name, "workspace"))
        return gt_xla_set_memory(r, name, b, f->workspace, f->workspace_bytes);
    while (t->name && !gt_xla_is(name, t->name)) t++;
    use = t->name ? gt_use(t, r->pass) : '-';
    if (is_result ? !gt_xla_is_output(use) : !gt_xla_is_input(use))
        return gt_xla_bad(name, is_result ? "is not a result of this call" : "is not an operand of this call");
    place = (is_result ? r->result : r->operand) + (t - r->op->tensors);
    if (*place) return gt_xla_bad(name, "is named twice");
    *place = b;
    if (use == 's' && is_result) {
        const gt_xla_buffer *operand = r->operand[t - r->op->tensors];
        if (!operand || operand->data != b->data)
            return gt_xla_bad(name, "is updated in place: it must also be an operand, aliased with this result");
    }
    if ((status = gt_xla_set_dtype(r, t, b)) != GT_OK || (status = gt_xla_set_sizes(r, t, b)) != GT_OK) return status;
    if (use == 'i' && t->use[GT_FORWARD] == 'O') { /* y or sum, which backward may read */
        const int is_set = 1;
        memcpy(gt_xla_letter(r, 'y', &kind), &is_set, sizeof is_set);
    }
    memcpy(gt_xla_field(r, t->offset), &b->data, sizeof b->data);
    return GT_OK;
}

static gt_status gt_xla_set_buffers(gt_xla_reading *r, int is_result, gt_xla_text names, const gt_xla_buffers *all) {
    const char *at = names.data, *const end = names.data + names.size;
    const char *const what = is_result ? "result" : "operand";
    int64_t count = 0;
    for (;;) {
        gt_xla_text name;
        gt_status status;
        while (at < end && *at == ' ') at++;
        if (at == end) break;
        name.data = at;
        while (at < end && *at != ' ') at++;
        name.size = (size_t)(at - name.data);
        if (count == all->count)
            return gt_fail(GT_ERROR_VALUE, "%ss = \"%.*s\": must name the %lld %ss of the call", what, (int)names.size,
                           names.data, (long long)count, what);
        if (all->types[count] != GT_XLA_BUFFER) return gt_xla_bad(&name, "must be a buffer");
        status = gt_xla_set_buffer(r, is_result, &name, (const gt_xla_buffer *)all->buffers[count]);
        if (status != GT_OK) return status;
        count++;
    }
    if (count == all->count) return GT_OK;
    return gt_fail(GT_ERROR_VALUE, "%ss = \"%.*s\": must name the %lld %ss of the call", what, (int)names.size,
                   names.data, (long long)all->count, what);
}

/* Returns the operand for a tensor, or NULL. */
static const gt_xla_buffer *gt_xla_operand(const gt_xla_reading *r, const char *name) {
    int i = 0;
    while (strcmp(r->op->tensors[i].name, name)) i++;
    return r->operand[i];
}

/* Sets slot_capacity.  With slots, final states are pools: their rows are slots, not batch elements or sequences.  Rows
 * that the call does not write keep their states.  So in forward the pool must also be an operand, at the same
 * address. */
static gt_status gt_xla_set_pool(gt_xla_reading *r) {
    for (const gt_tensor *t = r->op->tensors; t->name; t++) {
        const gt_xla_buffer *const pool = r->result[t - r->op->tensors];
        if (!pool || t->shape[0] != 'Q') continue;
        if (r->pass == GT_FORWARD) {
            const gt_xla_buffer *const before = gt_xla_operand(r, t->may_equal);
            if (!before || before->data != pool->data)
                return gt_fail(GT_ERROR_VALUE,
                               "%s is updated in place: with slots, %s must be an operand that is aliased with it",
                               t->name, t->may_equal);
        }
        memcpy(gt_xla_field(r, r->op->fields.slot_capacity), &pool->sizes[0], sizeof(int64_t));
    }
    return GT_OK;
}

/* Compares the shape of a buffer with the sizes of the call. */
static gt_status gt_xla_check_shape(const gt_tensor *t, const gt_xla_buffer *b, const gt_dims *dims) {
    const gt_xla_text letters = gt_xla_letters(t, b->rank);
    for (size_t i = 0; i < letters.size; i++) {
        const int64_t size = dims->n[letters.data[i] - 'A'];
        if (b->sizes[i] != size)
            return gt_fail(GT_ERROR_SIZE, "index %d of %s has %lld elements: must be %lld (%c of [%s])", (int)i,
                           t->name, (long long)b->sizes[i], (long long)size, letters.data[i], t->shape);
    }
    return GT_OK;
}

static gt_status gt_xla_check_shapes(gt_xla_reading *r) {
    const gt_tensor *t = r->op->tensors;
    gt_xla_reading filled = *r; /* a copy, because resolve fills in defaults */
    gt_dims dims;
    gt_status status;
    memset(&dims, 0, sizeof dims);
    for (const gt_size *s = r->op->sizes; s->letter; s++)
        memcpy(&dims.n[s->letter - 'A'], gt_xla_field(r, s->offset), sizeof(int64_t));
    if ((status = r->op->resolve(&filled.args, r->pass, &dims)) != GT_OK) return status;
    for (int i = 0; t[i].name; i++) {
        if (r->operand[i] && (status = gt_xla_check_shape(&t[i], r->operand[i], &dims)) != GT_OK) return status;
        if (r->result[i] && (status = gt_xla_check_shape(&t[i], r->result[i], &dims)) != GT_OK) return status;
    }
    return GT_OK;
}

/* Returns whether a list of names has `name`. */
static int gt_xla_has(const gt_xla_text *names, const char *name) {
    const char *at = names->data, *const end = names->data + names->size;
    while (at < end) {
        gt_xla_text one;
        one.data = at;
        while (at < end && *at != ' ') at++;
        one.size = (size_t)(at - one.data);
        if (gt_xla_is(&one, name)) return 1;
        while (at < end && *at == ' ') at++;
    }
    return 0;
}

/* Returns whether the call is a mixed call of wkv_ssm, which has a table of its own (gt/fused/wkv_ssm.h).
 * names: operands, results. */
static int gt_xla_mixes(const gt_xla_reading *r, const gt_xla_text names[2]) {
    return r->op == gt_op_wkv_ssm() && (gt_xla_has(&names[1], "mixed") || gt_xla_has(&names[0], "dmixed") ||
                                        gt_xla_has(&names[1], "dgain_wkv") || gt_xla_has(&names[1], "dgain_ssm"));
}

static gt_status gt_xla_read(gt_xla_reading *r, const gt_xla_frame *frame) {
    gt_xla_text names[2] = {{NULL, 0}, {NULL, 0}};
    gt_status status = gt_xla_set_attributes(r, &frame->attributes, names);
    if (status == GT_OK && gt_xla_mixes(r, names)) r->op = gt_op_wkv_ssm_mixed();
    if (status != GT_OK || (status = gt_xla_set_buffers(r, 0, names[0], &frame->operands)) != GT_OK ||
        (status = gt_xla_set_buffers(r, 1, names[1], &frame->results)) != GT_OK)
        return status;
    if (r->op->fields.slot_capacity && gt_xla_operand(r, "slots") && (status = gt_xla_set_pool(r)) != GT_OK)
        return status;
    return gt_xla_check_shapes(r);
}

/* ---- handlers ---- */

static gt_xla_error *gt_xla_fail(const gt_xla_api *api, gt_status status) {
    gt_xla_error_create create = {GT_XLA_SIZE(gt_xla_error_create, code), NULL, NULL, GT_XLA_INTERNAL};
    const int hundreds = (int)status / 100;
    create.message = gt_last_error();
    create.code = hundreds == 1   ? GT_XLA_INVALID_ARGUMENT
                  : hundreds == 2 ? GT_XLA_UNIMPLEMENTED
                  : hundreds == 3 ? GT_XLA_RESOURCE_EXHAUSTED
                                  : GT_XLA_INTERNAL;
    return api->error_create(&create);
}

/* Answers a query for the handler's metadata.  Returns 0 if the frame is a call.  The frame of a query has no api. */
static int gt_xla_answers(const gt_xla_frame *frame, gt_target target) {
    for (gt_xla_extension *e = frame->extensions; e; e = e->next) {
        if (e->type != GT_XLA_METADATA) continue;
        gt_xla_metadata *m = ((gt_xla_metadata_query *)e)->metadata;
        m->version.major = GT_XLA_MAJOR;
        m->version.minor = GT_XLA_MINOR;
        m->traits = target == GT_DEVICE ? GT_XLA_COMMAND_BUFFERS : 0;
        return 1;
    }
    return 0;
}

static gt_xla_error *gt_xla_handle(const gt_xla_frame *frame, const gt_xla_operator *xla, gt_pass pass,
                                   gt_target target) {
    gt_xla_reading r;
    gt_status status;
    if (gt_xla_answers(frame, target) || frame->stage != GT_XLA_EXECUTE) return NULL;
    memset(&r, 0, sizeof r);
    r.xla = xla;
    r.op = xla->op();
    r.pass = pass;
    gt_enter(target, r.op->name, pass);
    if ((status = gt_xla_read(&r, frame)) != GT_OK) return gt_xla_fail(frame->api, status);
    if (target == GT_HOST) {
        status = xla->twin[pass](&r.args);
    } else {
        gt_xla_stream_get get = {GT_XLA_SIZE(gt_xla_stream_get, stream), NULL, NULL, NULL};
        gt_xla_error *error;
        get.context = frame->context;
        if ((error = frame->api->stream_get(&get))) return error;
        status = r.op->calls.pass[pass](&r.args, (gt_stream)get.stream);
    }
    return status == GT_OK ? NULL : gt_xla_fail(frame->api, status);
}

#define GT_XLA_EACH(X)                                                                                                 \
    X(wkv6, forward, GT_FORWARD)                                                                                       \
    X(wkv6, backward, GT_BACKWARD)                                                                                     \
    X(wkv6, step, GT_STEP)                                                                                             \
    X(ssd, forward, GT_FORWARD)                                                                                        \
    X(ssd, backward, GT_BACKWARD)                                                                                      \
    X(ssd, step, GT_STEP)                                                                                              \
    X(selective_scan, forward, GT_FORWARD)                                                                             \
    X(selective_scan, backward, GT_BACKWARD)                                                                           \
    X(selective_scan, step, GT_STEP)                                                                                   \
    X(conv1d, forward, GT_FORWARD)                                                                                     \
    X(conv1d, backward, GT_BACKWARD)                                                                                   \
    X(conv1d, step, GT_STEP)                                                                                           \
    X(conv_ssd, forward, GT_FORWARD)                                                                                   \
    X(conv_ssd, backward, GT_BACKWARD)                                                                                 \
    X(conv_ssd, step, GT_STEP)                                                                                         \
    X(wkv4, forward, GT_FORWARD)                                                                                       \
    X(wkv4, backward, GT_BACKWARD)                                                                                     \
    X(wkv4, step, GT_STEP)                                                                                             \
    X(wkv_ssm, forward, GT_FORWARD)                                                                                    \
    X(wkv_ssm, backward, GT_BACKWARD)                                                                                  \
    X(wkv_ssm, step, GT_STEP)                                                                                          \
    X(rmsnorm_linear, forward, GT_FORWARD)                                                                             \
    X(rmsnorm_linear, backward, GT_BACKWARD)                                                                           \
    X(norm_mix, forward, GT_FORWARD)                                                                                   \
    X(norm_mix, backward, GT_BACKWARD)                                                                                 \
    X(norm_gate, forward, GT_FORWARD)                                                                                  \
    X(norm_gate, backward, GT_BACKWARD)                                                                                \
    X(add_norm, forward, GT_FORWARD)                                                                                   \
    X(add_norm, backward, GT_BACKWARD)

#define GT_XLA_DEFINE(op, name, pass)                                                                                  \
    static void *gt_xla_host_##op##_##name(void *frame) {                                                              \
        return gt_xla_handle((const gt_xla_frame *)frame, &gt_xla_##op, pass, GT_HOST);                                \
    }                                                                                                                  \
    static void *gt_xla_cuda_##op##_##name(void *frame) {                                                              \
        return gt_xla_handle((const gt_xla_frame *)frame, &gt_xla_##op, pass, GT_DEVICE);                              \
    }
GT_XLA_EACH(GT_XLA_DEFINE)
#undef GT_XLA_DEFINE

GT_API const gt_xla_handler *gt_xla_handlers(void) {
#define GT_XLA_LIST(op, name, pass)                                                                                    \
    {"gt_xla_" #op "_" #name, "Host", gt_xla_host_##op##_##name},                                                      \
        {"gt_xla_" #op "_" #name, "CUDA", gt_xla_cuda_##op##_##name},
    static const gt_xla_handler handlers[] = {GT_XLA_EACH(GT_XLA_LIST){NULL, NULL, NULL}};
#undef GT_XLA_LIST
    return handlers;
}
#undef GT_XLA_EACH

/* Reports the error with which XLA refused a handler, and frees the error. */
static gt_status gt_xla_refused(const gt_xla_api *api, const gt_xla_handler *handler, gt_xla_error *error) {
    gt_xla_error_message get = {GT_XLA_SIZE(gt_xla_error_message, code), NULL, NULL, NULL, 0};
    gt_xla_error_destroy destroy = {GT_XLA_SIZE(gt_xla_error_destroy, error), NULL, NULL};
    gt_status status;
    get.error = destroy.error = error;
    api->error_message(&get);
    status = gt_fail(GT_ERROR_UNSUPPORTED, "%s, %s: %s", handler->name, handler->platform, get.message);
    api->error_destroy(&destroy);
    return status;
}

GT_API gt_status gt_xla_register(const void *ffi_api) {
    const gt_xla_api *api = (const gt_xla_api *)ffi_api;
    int has_record;
    gt_enter(GT_DEVICE, "xla", GT_REGISTER);
    if (!api) return gt_fail(GT_ERROR_NULL, "api is NULL");
    has_record = api->version.major > 0 || api->version.minor >= 4;
    for (const gt_xla_handler *h = gt_xla_handlers(); h->name; h++) {
        const uint32_t traits = strcmp(h->platform, "CUDA") ? 0 : GT_XLA_COMMAND_BUFFERS;
        gt_xla_handler_register args;
        gt_xla_error *error;
        memset(&args, 0, sizeof args);
        args.name.data = h->name, args.name.size = strlen(h->name);
        args.platform.data = h->platform, args.platform.size = strlen(h->platform);
        memcpy(&args.execute, &h->call, sizeof args.execute);
        if (has_record) {
            args.struct_size = GT_XLA_SIZE(gt_xla_handler_register, traits);
            args.traits = traits;
        } else {
            args.struct_size = GT_XLA_SIZE(gt_xla_handler_register, next.traits);
            args.next.traits = traits;
        }
        if ((error = api->handler_register(&args))) return gt_xla_refused(api, h, error);
    }
    return GT_OK;
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif
