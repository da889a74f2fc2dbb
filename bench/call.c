/* bench/call.c - one call of the bench (bench_call of bench.h): its arrays in a machine's memory, and the check of its
 * outputs.  For a large call the check compares samples. */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- sizes ----------------------------------------------------------------------------------- */

static void fail(const char *what, gt_status status) {
    fprintf(stderr, "%s: %s: %s\n", what, gt_status_string(status), gt_last_error());
    exit(2);
}

static void *allocate(size_t bytes) {
    void *p = malloc(bytes > 0 ? bytes : 1);
    if (p) return p;
    fprintf(stderr, "out of memory (%zu bytes)\n", bytes);
    exit(2);
}

gt_dtype bench_dtype(const bench_call *c) { return test_dtype_of(&c->row, &c->op->tensors[0]); }

/* Sets c->shape to text such as "B8 T512 ... name". */
static void describe_shape(bench_call *c) {
    size_t used = 0;
    for (const gt_size *s = c->op->sizes; s->letter; s++)
        used += (size_t)snprintf(c->shape + used, sizeof c->shape - used, "%s%s%lld", used ? " " : "", s->name,
                                 (long long)c->dims.n[s->letter - 'A']);
    snprintf(c->shape + used, sizeof c->shape - used, "%s%s", *c->row.name ? " " : "", c->row.name);
}

static void set_pointer(test_args *args, size_t offset, const void *p) { memcpy((char *)args + offset, &p, sizeof p); }

void bench_open(bench_call *c, const bench_machine *machine, const test_case *row, gt_dtype dtype, gt_pass pass,
                int is_inference) {
    gt_status status;
    memset(c, 0, sizeof *c);
    c->machine = machine;
    c->functions = test_op_of(row->op);
    c->op = c->functions->table();
    c->row = *row;
    test_set_dtype(&c->row, dtype, GT_DTYPE_DEFAULT);
    c->pass = pass;
    c->is_inference = is_inference;
    c->args = c->row.args;
    if (c->functions->handle) set_pointer(&c->args, c->functions->handle, machine->cublaslt);
    status = gt_prepare(c->op, GT_QUERY, GT_HOST, &c->args, &c->filled, &c->dims);
    if (status != GT_OK) fail(row->op, status);
    describe_shape(c);
}

gt_status bench_ask(const bench_call *c, gt_workspace *need) {
    memset(need, 0, sizeof *need);
    return c->machine->has_saved ? c->op->calls.workspace(&c->args, need) : GT_OK;
}

/* ---- arrays ---------------------------------------------------------------------------------- */

static int is_updated(const gt_tensor *t, gt_pass pass) { return gt_use(t, pass) == 's'; }

/* Returns whether ssd's backward reads y of forward: if the row asks for that, or if the call has dz and `saved`. */
static int reads_y(const bench_call *c) {
    const size_t offset = c->functions->reads_y;
    int i = test_find(c->op, "dz"), is_asked;
    if (!offset) return 0;
    memcpy(&is_asked, (const char *)&c->row.args + offset, sizeof is_asked);
    return is_asked || (c->machine->has_saved && i >= 0 && !test_is_absent(&c->row, &c->op->tensors[i]));
}

/* Returns whether backward reads y of forward: as reads_y() says, or for the gradient of a gain of a mixed call. */
static int reads_outputs(const bench_call *c) {
    const int i = test_find(c->op, "dgain_ssm");
    return reads_y(c) || (i >= 0 && !test_is_absent(&c->row, &c->op->tensors[i]));
}

static gt_view view_of(const bench_call *c, const gt_tensor *t) { return gt_view_of(c->op, t, &c->filled, &c->dims); }

/* Snapshots and conv_snapshots are outputs of forward, but no row asks for them. */
static int is_snapshot(const gt_tensor *t) { return strstr(t->name, "snapshots") != NULL; }

static int is_used(const bench_call *c, const gt_tensor *t) {
    if (is_snapshot(t)) return 0;
    if (c->pass == GT_BACKWARD && gt_use(t, GT_FORWARD) == 'O') return gt_use(t, c->pass) != '-' && reads_outputs(c);
    int is_required = strchr("IOs", gt_use(t, c->pass)) != NULL && strcmp(t->name, "state_scale");
    return gt_use(t, c->pass) != '-' && (is_required || !test_is_absent(&c->row, t));
}

/* Returns whether the call must read or write the array.  Of other arrays it only checks the pointers. */
static int is_moved(const bench_call *c, const gt_tensor *t) {
    const char *unread = c->functions->unread_with_y;
    return is_used(c, t) && !(c->pass == GT_BACKWARD && unread && reads_y(c) && test_is_word_of(unread, t->name));
}

static size_t view_bytes(const gt_view *v) {
    int64_t bytes = v->element;
    for (int i = 0; i < v->rank; i++) bytes += (v->size[i] - 1) * v->stride[i];
    return v->count > 0 ? (size_t)bytes : 0;
}

double bench_array_bytes(const bench_call *c) {
    double bytes = 0;
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        gt_view v = view_of(c, t);
        if (is_used(c, t)) bytes += (double)view_bytes(&v) * (is_updated(t, c->pass) ? 2 : 1);
    }
    return bytes;
}

double bench_compulsory_bytes(const bench_call *c) {
    double bytes = 0;
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        gt_view v = view_of(c, t);
        if (is_moved(c, t)) bytes += (double)v.count * v.element * (is_updated(t, c->pass) ? 2 : 1);
    }
    return bytes;
}

/* Returns the distribution of a tensor's elements, as in a model.  Tensors that the operator does not list are
 * normal(0, 1). */
static bench_draw draw_of(const bench_call *c, const gt_tensor *t) {
    for (const test_bench_draw *d = c->functions->bench_draws; d && d->tensors; d++)
        if (test_is_word_of(d->tensors, t->name)) return d->how;
    return (bench_draw){0, 0, 1};
}

/* Fills in cu_seqlens or seq_count of a packed row. */
static void fill_sequences(const bench_call *c, const gt_tensor *t, int32_t *values) {
    if (!strcmp(t->name, "seq_count")) {
        values[0] = (int32_t)c->row.packed.count;
        return;
    }
    values[0] = 0;
    for (int64_t s = 0; s < c->row.packed.count; s++) values[s + 1] = values[s] + (int32_t)c->row.packed.lengths[s];
}

/* Fills an int8 array with uniform numbers. */
static void fill_int8(const bench_call *c, const gt_tensor *t, void *data, size_t bytes) {
    test_random r = {(uint64_t)t->offset};
    char *values = allocate(bytes);
    for (size_t i = 0; i < bytes; i++) values[i] = (char)(test_next(&r) >> 56);
    c->machine->copy(data, values, bytes);
    free(values);
}

static void allocate_array(bench_call *c, int i) {
    const bench_machine *m = c->machine;
    const gt_tensor *t = &c->op->tensors[i];
    gt_view v = view_of(c, t);
    size_t bytes = view_bytes(&v);
    void *data = m->allocate(bytes);
    if (t->kind == 'i') {
        int32_t *values = allocate(bytes);
        fill_sequences(c, t, values);
        m->copy(data, values, bytes);
        free(values);
    } else if (t->kind == 'b' && test_is_input(t, c->pass)) {
        fill_int8(c, t, data, bytes);
    } else if (test_is_input(t, c->pass)) /* also fills gaps between rows */
        m->fill(data, test_dtype_of(&c->row, t), (int64_t)bytes / v.element, draw_of(c, t), (uint64_t)t->offset);
    if (is_updated(t, c->pass)) {
        c->before[i] = m->allocate(bytes);
        m->copy(c->before[i], data, bytes);
    }
    set_pointer(&c->args, t->offset, data);
    set_pointer(&c->filled, t->offset, data);
}

/* Allocates scratch memory.  Sets the field at `offset` to the memory, and the field at `bytes_offset` to its size. */
static void *allocate_scratch(bench_call *c, test_args *args, size_t offset, size_t bytes_offset, size_t bytes) {
    void *memory = bytes ? c->machine->allocate(bytes) : NULL;
    set_pointer(args, offset, memory);
    memcpy((char *)args + bytes_offset, &bytes, sizeof bytes);
    return memory;
}

/* Runs forward on the inputs of a backward call.  Forward fills `saved`, and y if backward reads y.  The other outputs
 * of forward go to separate memory. */
static gt_status run_forward(bench_call *c) {
    const test_op *f = c->functions;
    const bench_machine *m = c->machine;
    void *outputs[TEST_TENSORS] = {0}, *workspace;
    test_args args = c->args;
    gt_workspace need;
    gt_status status = bench_ask(c, &need);
    if (status != GT_OK) return status;
    workspace = allocate_scratch(c, &args, c->op->fields.workspace, c->op->fields.workspace_bytes, need.forward);
    for (int i = 0; c->op->tensors[i].name; i++) {
        const gt_tensor *t = &c->op->tensors[i];
        gt_view v = view_of(c, t);
        if (gt_use(t, GT_FORWARD) != 'O' || is_snapshot(t) || is_used(c, t)) continue;
        outputs[i] = m->allocate(view_bytes(&v));
        set_pointer(&args, t->offset, outputs[i]);
    }
    status = m->run(f, GT_FORWARD, &args);
    for (int i = 0; i < TEST_TENSORS; i++)
        if (outputs[i]) m->release(outputs[i]);
    if (workspace) m->release(workspace);
    return status;
}

static gt_status allocate_saved_and_workspace(bench_call *c) {
    gt_workspace need;
    size_t bytes;
    gt_status status = bench_ask(c, &need);
    if (status != GT_OK) return status;
    if (c->machine->has_saved && c->op->fields.saved && need.saved && c->pass <= GT_BACKWARD && !c->is_inference) {
        c->saved = allocate_scratch(c, &c->args, c->op->fields.saved, c->op->fields.saved_bytes, need.saved);
        c->machine->poison(c->saved, need.saved);
        c->scratch_bytes = need.saved;
        if (c->pass == GT_BACKWARD && reads_y(c)) {
            const int yes = 1;
            memcpy((char *)&c->args + c->functions->reads_y, &yes, sizeof yes);
        }
    }
    if (c->pass == GT_BACKWARD && (c->saved || reads_outputs(c)) && (status = run_forward(c)) != GT_OK) return status;
    if (!c->machine->has_saved) return GT_OK;
    if ((status = bench_ask(c, &need)) != GT_OK) return status; /* with `saved`, the call may need fewer bytes */
    bytes = test_workspace_of(&need, c->pass);
    c->workspace = allocate_scratch(c, &c->args, c->op->fields.workspace, c->op->fields.workspace_bytes, bytes);
    c->scratch_bytes += bytes;
    return GT_OK;
}

gt_status bench_allocate(bench_call *c) {
    for (int i = 0; c->op->tensors[i].name; i++)
        if (is_used(c, &c->op->tensors[i])) allocate_array(c, i);
    return allocate_saved_and_workspace(c);
}

void bench_close(bench_call *c) {
    for (int i = 0; c->op->tensors[i].name; i++) {
        void *data = view_of(c, &c->op->tensors[i]).data;
        if (data) c->machine->release(data);
        if (c->before[i]) c->machine->release(c->before[i]);
    }
    if (c->saved) c->machine->release(c->saved);
    if (c->workspace) c->machine->release(c->workspace);
}

void bench_restore(bench_call *c) {
    for (int i = 0; c->op->tensors[i].name; i++) {
        gt_view v = view_of(c, &c->op->tensors[i]);
        if (c->before[i]) c->machine->copy(v.data, c->before[i], view_bytes(&v));
    }
}

void bench_poison(bench_call *c) {
    gt_workspace need;
    for (const gt_tensor *t = c->op->tensors; t->name; t++) {
        gt_view v = view_of(c, t);
        if (v.data && test_is_output(t, c->pass) && !is_updated(t, c->pass)) c->machine->poison(v.data, view_bytes(&v));
    }
    if (!c->saved || c->pass != GT_FORWARD || bench_ask(c, &need) != GT_OK) return;
    c->machine->poison(c->saved, need.saved);
}

/* ---- the sample that is compared ------------------------------------------------------------- */

/* For a large call the double reference runs on samples.  A sample has only some positions along some of the call's
 * indices (test_bench_cut).  The bench compares outputs that have all of these indices.  Small calls, joins, and
 * operators without cuts are compared whole.  Packed calls are never compared whole.  The columns N of a state do not
 * depend on each other, so two columns are enough to check sums over heads or channels.  No cut can show dgamma of a
 * large rmsnorm_linear, so dgamma has a check of its own. */
static const double WHOLE = 1 << 28; /* small: the product of the call's sizes is at most this */

/* A sample: for each index, positions first ... first + n - 1. */
typedef struct sample {
    const char *letters;                            /* the indices that are cut */
    int64_t first['z' - 'A' + 1], n['z' - 'A' + 1]; /* indexed by letter, as gt_dims */
} sample;

static void cut(sample *p, char letter, int64_t first, int64_t n) {
    p->first[letter - 'A'] = first;
    p->n[letter - 'A'] = n;
}

static sample whole_call(const bench_call *c) {
    sample p = {.letters = ""};
    memcpy(p.n, c->dims.n, sizeof p.n);
    return p;
}

/* Cuts out the last packed sequence.  The reference computes it as a call of one sequence. */
static void cut_sequence(const bench_call *c, sample *p) {
    const int64_t count = c->row.packed.count;
    int64_t first = 0;
    for (int64_t s = 0; s + 1 < count; s++) first += c->row.packed.lengths[s];
    cut(p, 'T', first, c->row.packed.lengths[count - 1]);
}

/* Makes a sample of the last `count` positions along each of the letters, but one position along B.  The last positions
 * have the largest offsets. */
static sample make_sample(const bench_call *c, const char *letters, int64_t count) {
    sample p = whole_call(c);
    p.letters = letters;
    for (const char *l = letters; *l; l++) {
        int64_t size = p.n[*l - 'A'], groups = p.n['G' - 'A'], n = *l == 'B' ? 1 : count;
        if (n > size) n = size;
        if (groups && strchr("HD", *l)) { /* positions within one group of heads or channels */
            if (n > size / groups) n = size / groups;
            cut(&p, 'G', groups - 1, 1);
        }
        if (*l == 'B' && p.n['S' - 'A'] == size) cut(&p, 'S', size - n, n);
        if (*l == 'B') cut(&p, 'Q', size - n, n);
        cut(&p, *l, size - n, n);
    }
    if (test_is_packed(&c->row)) cut_sequence(c, &p);
    return p;
}

static int has_letters(const bench_call *c, const gt_tensor *t, const char *letters) {
    for (; *letters; letters++)
        if (test_axis(&c->row, t, *letters) < 0) return 0;
    return 1;
}

/* Returns the elements of a tensor that belong to the sample. */
static bench_region region_of(const bench_call *c, const sample *p, const gt_tensor *t) {
    gt_view v = view_of(c, t);
    bench_region r = {.dtype = test_dtype_of(&c->row, t), .rank = (int)strlen(t->shape)};
    for (int k = 0, index = 0; k < r.rank; k++) {
        int letter = t->shape[k] - 'A';
        r.size[k] = p->n[letter];
        if (c->dims.n[letter] > 1) r.stride[k] = v.stride[index++];
        r.offset += p->first[letter] * r.stride[k];
    }
    return r;
}

static int64_t sample_count(const bench_call *c, const sample *p, const gt_tensor *t) {
    bench_region r = region_of(c, p, t);
    return bench_count(&r);
}

/* Does the work of gather() for packed int8 rows.  Copies the whole array to the host first. */
static double *gather_int8(const bench_call *c, const gt_tensor *t, const void *data, const bench_region *r) {
    const gt_view v = view_of(c, t);
    const int64_t count = bench_count(r), columns = r->size[r->rank - 1];
    double *values = allocate((size_t)count * sizeof *values);
    int8_t *all = allocate(view_bytes(&v));
    c->machine->copy(all, data, view_bytes(&v));
    for (int64_t i = 0; i < count; i++)
        values[i] = all[r->offset + i % columns + (r->rank > 1 ? i / columns * r->stride[0] : 0)];
    free(all);
    return values;
}

/* Copies the sample's elements of one array to packed doubles. */
static double *gather(const bench_call *c, const sample *p, const gt_tensor *t, const void *data) {
    bench_region r = region_of(c, p, t);
    int64_t count = bench_count(&r);
    if (t->kind == 'b') return gather_int8(c, t, data, &r);
    float *floats = allocate((size_t)count * sizeof *floats);
    double *values = allocate((size_t)count * sizeof *values);
    c->machine->gather(floats, data, &r);
    for (int64_t i = 0; i < count; i++) values[i] = floats[i];
    free(floats);
    return values;
}

/* ---- the reference on a sample --------------------------------------------------------------- */

static double *array_of(const test_args *args, const gt_tensor *t) {
    double *p;
    memcpy(&p, (const char *)args + t->offset, sizeof p);
    return p;
}

/* Returns whether the output can be computed from the sample.  In a packed call an output without an index T is a sum
 * over all tokens; a sample has only one sequence. */
static int is_compared(const bench_call *c, const sample *p, const gt_tensor *t) {
    return is_used(c, t) && test_is_output(t, c->pass) && has_letters(c, t, p->letters) &&
           (!test_is_packed(&c->row) || has_letters(c, t, "T"));
}

static int sets_decay(const gt_tensor *t) {
    return test_is(t, "w") || test_is(t, "A") || !strncmp(test_plain_name(t), "dt", 2);
}

/* Makes arguments for the double twin: sizes and inputs of the sample, and arrays for the outputs to compare.
 * has_magnitudes: replaces inputs by their magnitudes, except inputs that set the decay. */
static void sample_arguments(const bench_call *c, const sample *p, int has_magnitudes, test_args *args) {
    test_case row = c->row;
    for (const gt_size *s = c->op->sizes; s->letter; s++) test_set_size(&row, s->letter, p->n[s->letter - 'A']);
    test_set_sequences(&row, 0, 0);
    for (const test_field *f = c->functions->fields; f->name; f++) /* the sample may have fewer groups than the call */
        if (f->kind == 'g' && p->n[f->name[0] - 'A'] > 0)
            memcpy((char *)&row.args + f->offset, &p->n[f->name[0] - 'A'], sizeof(int64_t));
    *args = row.args;
    for (int i = 0; c->op->tensors[i].name; i++) {
        const gt_tensor *t = &c->op->tensors[i];
        int64_t count = sample_count(c, p, t);
        double *values = NULL;
        if (t->stride_offset) /* a stride of 0 means packed */
            memset((char *)args + t->stride_offset, 0, t->shape[0] == 'M' ? sizeof(int64_t) : sizeof(gt_stride));
        if (!is_used(c, t) || t->kind == 'i') continue;
        if (test_is_input(t, c->pass))
            values = gather(c, p, t, c->before[i] ? c->before[i] : view_of(c, t).data);
        else if (is_compared(c, p, t) || gt_use(t, c->pass) == 'O')
            values = test_array(count, NAN);
        if (has_magnitudes && test_is_input(t, c->pass) && !sets_decay(t))
            for (int64_t k = 0; k < count; k++) values[k] = fabs(values[k]);
        set_pointer(args, t->offset, values);
    }
}

static void free_arguments(const bench_call *c, const test_args *args) {
    for (const gt_tensor *t = c->op->tensors; t->name; t++) free(array_of(args, t));
}

/* Makes the arguments of batch element b from the arguments of a sample.  Outputs without a batch index go to new
 * arrays, which own->of gets. */
static void element_arguments(const bench_call *c, const sample *p, const test_args *args, int64_t b,
                              test_args *element, test_values *own) {
    static const int64_t one = 1;
    *element = *args;
    memset(own, 0, sizeof *own);
    for (const gt_size *s = c->op->sizes; s->letter; s++)
        if (s->letter == 'B') memcpy((char *)element + s->offset, &one, sizeof one);
    for (int i = 0; c->op->tensors[i].name; i++) {
        const gt_tensor *t = &c->op->tensors[i];
        int64_t count = sample_count(c, p, t);
        double *values = array_of(args, t);
        if (!values) continue;
        if (test_axis(&c->row, t, 'B') == 0)
            values += b * (count / p->n['B' - 'A']);
        else if (test_is_output(t, c->pass))
            values = own->of[i] = test_array(count, NAN);
        set_pointer(element, t->offset, values);
    }
}

/* Joins run whole: the first index of their tensors is the piece, not the batch element. */
static int is_join(const bench_call *c) { return c->pass >= GT_JOIN; }

/* Runs the double twin on a sample, with batch elements in parallel.  Then adds up outputs without a batch index over
 * the batch elements. */
static void run_truth(const bench_call *c, const sample *p, test_args *args) {
    gt_status (*twin)(const void *args) = c->functions->twin64[c->pass];
    int64_t batch = p->n['B' - 'A'];
    gt_status status = GT_OK;
    test_values *own;
    if (batch <= 1 || c->pass == GT_STEP || is_join(c)) {
        if ((status = twin(args)) != GT_OK) fail(c->row.op, status);
        return;
    }
    own = allocate((size_t)batch * sizeof *own);
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic)
#endif
    for (int64_t b = 0; b < batch; b++) {
        test_args element;
        element_arguments(c, p, args, b, &element, &own[b]);
        gt_status answer = twin(&element);
        if (answer != GT_OK) {
#ifdef _OPENMP
#pragma omp critical
#endif
            status = answer;
        }
    }
    if (status != GT_OK) fail(c->row.op, status);
    for (int i = 0; c->op->tensors[i].name; i++) {
        const gt_tensor *t = &c->op->tensors[i];
        double *sum = array_of(args, t);
        for (int64_t b = 0; b < batch && own[0].of[i]; b++)
            for (int64_t k = 0; k < sample_count(c, p, t); k++) sum[k] = (b ? sum[k] : 0) + own[b].of[i][k];
    }
    for (int64_t b = 0; b < batch; b++) test_free(&own[b]);
    free(own);
}

/* ---- comparing ------------------------------------------------------------------------------- */

static double tolerance_of(const bench_call *c, const gt_tensor *t) {
    static const double by_dtype[] = {[GT_F32] = 1e-5, [GT_BF16] = 3e-3, [GT_F16] = 1e-3};
    if (test_dtype_of(&c->row, t) == GT_INT8) return 2e-2; /* rounding alone: 0.29 / 40, if a number is 40 */
    return by_dtype[c->machine->is_mixed ? bench_dtype(c) : test_dtype_of(&c->row, t)];
}

/* Returns the error relative to the truth.  If magnitudes are given, it is relative to truth plus magnitudes. */
static double relative_error(const double *got, const double *truth, const double *magnitudes, int64_t count) {
    double difference = 0, size = 0, terms = 0;
    for (int64_t i = 0; i < count; i++) {
        difference += (got[i] - truth[i]) * (got[i] - truth[i]);
        size += truth[i] * truth[i];
        if (magnitudes) terms += magnitudes[i] * magnitudes[i];
    }
    return difference == 0 ? 0 : sqrt(difference) / (sqrt(size) + sqrt(terms));
}

/* Returns the error relative to the magnitude of the terms.  Terms of a sum over many tokens may cancel, so an error
 * that is large beside the sum may be small beside its terms. */
static double error_by_terms(const bench_call *c, const sample *p, const gt_tensor *t, const double *got,
                             const double *truth) {
    test_args args;
    double error;
    sample_arguments(c, p, 1, &args);
    run_truth(c, p, &args);
    error = relative_error(got, truth, array_of(&args, t), sample_count(c, p, t));
    free_arguments(c, &args);
    return error;
}

/* Returns whether an output's error is within its tolerance.  *worst keeps the largest error so far; NaN stays. */
static int judge(bench_call *c, const gt_tensor *t, double error, double *worst) {
    if (!isnan(*worst) && !(error <= *worst)) *worst = error;
    if (error <= tolerance_of(c, t)) return 1;
    snprintf(c->complaint, sizeof c->complaint, "%s is wrong, relative error %.2e", t->name, error);
    return 0;
}

static int check_output(bench_call *c, const sample *p, const gt_tensor *t, const double *truth, double *worst) {
    double *got = gather(c, p, t, view_of(c, t).data);
    double error = relative_error(got, truth, NULL, sample_count(c, p, t));
    if (error > tolerance_of(c, t) && gt_use(t, c->pass) == 'g') error = error_by_terms(c, p, t, got, truth);
    free(got);
    return judge(c, t, error, worst);
}

static int check_sample(bench_call *c, const sample *p, double *worst) {
    test_args args;
    int ok = 1, outputs = 0;
    for (const gt_tensor *t = c->op->tensors; t->name; t++) outputs += is_compared(c, p, t);
    if (!outputs) return 1;
    sample_arguments(c, p, 0, &args);
    run_truth(c, p, &args);
    for (const gt_tensor *t = c->op->tensors; t->name; t++)
        if (is_compared(c, p, t)) ok &= check_output(c, p, t, array_of(&args, t), worst);
    free_arguments(c, &args);
    return ok;
}

/* ---- dgamma of a large rmsnorm_linear: some columns, of all rows ------------------------------ */

enum { GAINS = 4, ROWS = 256 }; /* number of columns; rows that are fetched at a time */

static double *gather_named(const bench_call *c, const sample *p, const char *name) {
    const gt_tensor *t = &c->op->tensors[test_find(c->op, name)];
    return gather(c, p, t, view_of(c, t).data);
}

/* Adds the terms of one row, x [D] and dy [O], to the last GAINS columns of dgamma, and their magnitudes. */
static void add_gains(const gt_rmsnorm_linear_args *a, const double *x, const double *dy, const double *weight,
                      double *gains, double *magnitudes) {
    double mean = 0, square = 0;
    for (int64_t d = 0; d < a->D; d++) mean += x[d] / (double)a->D;
    if (a->norm == GT_NORM_RMS) mean = 0;
    for (int64_t d = 0; d < a->D; d++) square += (x[d] - mean) * (x[d] - mean) / (double)a->D;
    for (int j = 0; j < GAINS; j++) {
        double dn = 0, xhat = (x[a->D - GAINS + j] - mean) / sqrt(square + (double)a->eps);
        for (int64_t o = 0; o < a->O; o++) dn += dy[o] * weight[o * GAINS + j];
        gains[j] += dn * xhat;
        magnitudes[j] += fabs(dn * xhat);
    }
}

static int check_gains(bench_call *c, double *worst) {
    const gt_rmsnorm_linear_args *a = (const gt_rmsnorm_linear_args *)&c->filled;
    const gt_tensor *t = &c->op->tensors[test_find(c->op, "dgamma")];
    if (c->pass != GT_BACKWARD || !is_used(c, t)) return 1;
    double truth[GAINS] = {0}, magnitudes[GAINS] = {0};
    sample columns = whole_call(c), rows = whole_call(c);
    cut(&columns, 'D', a->D - GAINS, GAINS);
    double *weight = gather_named(c, &columns, "weight");
    for (int64_t first = 0; first < a->M; first += ROWS) {
        int64_t count = a->M - first < ROWS ? a->M - first : ROWS;
        cut(&rows, 'M', first, count);
        double *x = gather_named(c, &rows, "x"), *dy = gather_named(c, &rows, "dy");
        for (int64_t i = 0; i < count; i++) add_gains(a, x + i * a->D, dy + i * a->O, weight, truth, magnitudes);
        free(x);
        free(dy);
    }
    double *got = gather_named(c, &columns, "dgamma");
    double error = relative_error(got, truth, NULL, GAINS);
    if (error > tolerance_of(c, t)) error = relative_error(got, truth, magnitudes, GAINS);
    free(weight);
    free(got);
    return judge(c, t, error, worst);
}

/* ---- the check of a call --------------------------------------------------------------------- */

int bench_check(bench_call *c, double *worst) {
    double work = 1;
    int ok = 1, samples = 0, is_cut;
    *worst = 0;
    for (const gt_size *s = c->op->sizes; s->letter; s++) work *= (double)c->dims.n[s->letter - 'A'];
    is_cut = !is_join(c) && (work > WHOLE || test_is_packed(&c->row));
    for (const test_bench_cut *cut = c->functions->bench_cuts; is_cut && cut && cut->letters; cut++) {
        const char *letters = cut->letters;
        if (test_is_packed(&c->row) && !strcmp(letters, "NB")) letters = "N"; /* packed calls have one batch element */
        sample p = make_sample(c, letters, cut->count);
        ok &= check_sample(c, &p, worst);
        samples++;
    }
    if (samples && !strcmp(c->row.op, "rmsnorm_linear")) ok &= check_gains(c, worst);
    if (samples) return ok;
    sample p = whole_call(c);
    return check_sample(c, &p, worst);
}
