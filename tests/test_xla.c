/* test_xla.c - tests the handlers for XLA.  The test calls them as XLA does, with a call frame of its own, and compares
 * the results with the twin's.  It also tests metadata, errors and registration. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gt/xla/api.h"
#include "gt_kernels.h"

static int failures, checks;
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        checks++;                                                                                                      \
        if (!(condition)) failures++, printf("FAIL: line %d: %s\n", __LINE__, #condition);                             \
    } while (0)

/* ---- a host ---- */

struct gt_xla_error {
    char text[512];
    int code;
};

static int streams, registered, destroyed, host_minor = 3;
static const char *refused_name = "";

static gt_xla_error *host_error_create(gt_xla_error_create *args) {
    gt_xla_error *error = malloc(sizeof *error);
    if (!error) abort();
    snprintf(error->text, sizeof error->text, "%s", args->message);
    error->code = args->code;
    return error;
}

static void host_error_message(gt_xla_error_message *args) { args->message = args->error->text; }

static void host_error_destroy(gt_xla_error_destroy *args) {
    destroyed++;
    free(args->error);
}

static gt_xla_error *host_stream_get(gt_xla_stream_get *args) {
    streams++;
    args->stream = NULL;
    return NULL;
}

static gt_xla_error *host_register(gt_xla_handler_register *args) {
    gt_xla_error_create create = {sizeof create, NULL, "no such platform here", GT_XLA_INVALID_ARGUMENT};
    CHECK(args->execute && !args->instantiate && !args->prepare && !args->initialize);
    const uint32_t is_cuda = args->platform.size == 4 && !memcmp(args->platform.data, "CUDA", 4);
    if (host_minor >= 4)
        CHECK(args->traits == is_cuda && !args->next.record);
    else
        CHECK(args->next.traits == is_cuda && args->struct_size == offsetof(gt_xla_handler_register, next) + 4);
    if (strlen(refused_name) == args->name.size && !memcmp(refused_name, args->name.data, args->name.size))
        return host_error_create(&create);
    registered++;
    return NULL;
}

static gt_xla_api api = {sizeof(gt_xla_api),
                         NULL,
                         {sizeof(gt_xla_version), NULL, 0, 3},
                         NULL,
                         host_error_create,
                         host_error_message,
                         host_error_destroy,
                         host_register,
                         host_stream_get};

static gt_xla_function find(const char *name, const char *platform) {
    for (const gt_xla_handler *h = gt_xla_handlers(); h->name; h++)
        if (!strcmp(h->name, name) && !strcmp(h->platform, platform)) return h->call;
    printf("FAIL: no handler %s, %s\n", name, platform);
    exit(1);
}

/* ---- call frames ---- */

enum { MOST = 32 };

typedef struct call {
    gt_xla_buffer operand[MOST], result[MOST];
    int64_t sizes[2 * MOST][4];
    int types[MOST];
    void *operands[MOST], *results[MOST];
    int n_operands, n_results, n_attributes;
    gt_xla_text names[MOST], texts[MOST];
    gt_xla_scalar scalars[MOST];
    gt_xla_text *name_of[MOST];
    void *values[MOST];
    int value_types[MOST];
    char operand_names[256], result_names[256];
} call;

/* Describes a buffer.  shape: up to four sizes, separated by spaces.  `sizes` receives them. */
static void describe(gt_xla_buffer *b, int64_t *sizes, int dtype, void *data, const char *shape) {
    char *end = NULL;
    memset(b, 0, sizeof *b);
    b->dtype = dtype;
    b->data = data;
    b->sizes = sizes;
    for (const char *at = shape; b->rank < 4; at = end) {
        const long long size = strtoll(at, &end, 10);
        if (end == at) break;
        sizes[b->rank++] = size;
    }
}

static void operand(call *c, const char *name, int dtype, const void *data, const char *shape) {
    const int i = c->n_operands++;
    describe(&c->operand[i], c->sizes[i], dtype, (void *)data, shape);
    c->operands[i] = &c->operand[i];
    strcat(strcat(c->operand_names, name), " ");
}

static void result(call *c, const char *name, int dtype, void *data, const char *shape) {
    const int i = c->n_results++;
    describe(&c->result[i], c->sizes[MOST + i], dtype, data, shape);
    c->results[i] = &c->result[i];
    strcat(strcat(c->result_names, name), " ");
}

static void attribute(call *c, const char *name, int type, int dtype, const void *value) {
    const int i = c->n_attributes++;
    c->names[i].data = name, c->names[i].size = strlen(name);
    c->name_of[i] = &c->names[i];
    c->value_types[i] = type;
    if (type == GT_XLA_STRING) {
        c->texts[i].data = value, c->texts[i].size = strlen(value);
        c->values[i] = &c->texts[i];
    } else {
        c->scalars[i].dtype = dtype, c->scalars[i].value = (void *)value;
        c->values[i] = &c->scalars[i];
    }
}

/* Makes the call and returns the code of its error, or 0.  `text` receives the message of the error, or "". */
static int run(call *c, const char *name, const char *platform, char text[512]) {
    gt_xla_frame frame;
    gt_xla_error *error;
    int code = 0;
    memset(&frame, 0, sizeof frame);
    attribute(c, "operands", GT_XLA_STRING, 0, c->operand_names);
    attribute(c, "results", GT_XLA_STRING, 0, c->result_names);
    for (int i = 0; i < MOST; i++) c->types[i] = GT_XLA_BUFFER;
    frame.api = &api;
    frame.stage = GT_XLA_EXECUTE;
    frame.operands.count = c->n_operands, frame.operands.types = c->types, frame.operands.buffers = c->operands;
    frame.results.count = c->n_results, frame.results.types = c->types, frame.results.buffers = c->results;
    frame.attributes.count = c->n_attributes, frame.attributes.types = c->value_types;
    frame.attributes.names = c->name_of, frame.attributes.values = c->values;
    error = find(name, platform)(&frame);
    text[0] = 0;
    if (error) {
        snprintf(text, 512, "%s", error->text);
        code = error->code;
        free(error);
    }
    return code;
}

/* ---- the selective scan, as docs/xla.md has it ---- */

enum { B = 2, T = 5, D = 6, N = 3, G = 2, BTD = B * T * D, BTGN = B * T * G * N, DN = D * N, BDN = B * D * N };

static float u[BTD], dt[BTD], A[DN], Bm[BTGN], Cm[BTGN], Dskip[D], z[BTD], dy[BTD], state_in[BDN];

static void fill(float *x, int count, float scale, float offset) {
    static unsigned random = 1;
    for (int i = 0; i < count; i++) {
        random = random * 1664525u + 1013904223u;
        x[i] = offset + scale * ((float)(random >> 8) / 8388608.0f - 1);
    }
}

static gt_selective_scan_args inputs(void) {
    gt_selective_scan_args a = {.B = B, .T = T, .D = D, .N = N, .G = G, .softplus = 1, .segments = 1};
    a.u = u, a.dt = dt, a.A = A, a.Bm = Bm, a.Cm = Cm, a.Dskip = Dskip, a.z = z;
    return a;
}

static void put_inputs(call *c, int with_state) {
    static const int64_t segments = 1;
    static const int32_t softplus = 1;
    memset(c, 0, sizeof *c);
    operand(c, "u", GT_XLA_F32, u, "2 5 6");
    operand(c, "dt", GT_XLA_F32, dt, "2 5 6");
    operand(c, "A", GT_XLA_F32, A, "6 3");
    operand(c, "Bm", GT_XLA_F32, Bm, "2 5 2 3");
    operand(c, "Cm", GT_XLA_F32, Cm, "2 5 2 3");
    operand(c, "Dskip", GT_XLA_F32, Dskip, "6");
    operand(c, "z", GT_XLA_F32, z, "2 5 6");
    if (with_state) operand(c, "state_in", GT_XLA_F32, state_in, "2 6 3");
    attribute(c, "softplus", GT_XLA_SCALAR, GT_XLA_S32, &softplus);
    attribute(c, "segments", GT_XLA_SCALAR, GT_XLA_S64, &segments);
}

static void test_scan(void) {
    static float y[BTD], y2[BTD], state[BDN], state2[BDN], du[BTD], du2[BTD], dA[DN], dA2[DN], dB[BTGN], dB2[BTGN];
    static float dstate[BDN], dstate2[BDN];
    char text[512];
    call c;
    gt_selective_scan_args a = inputs();
    a.state_in = state_in, a.y = y2, a.state_out = state2;
    CHECK(gt_ref_selective_scan_forward(&a) == GT_OK);
    put_inputs(&c, 1);
    result(&c, "y", GT_XLA_F32, y, "2 5 6");
    result(&c, "state_out", GT_XLA_F32, state, "2 6 3");
    result(&c, "saved", GT_XLA_U8, NULL, "0");
    result(&c, "workspace", GT_XLA_U8, NULL, "0");
    CHECK(run(&c, "gt_xla_selective_scan_forward", "Host", text) == 0);
    CHECK(!strcmp(text, ""));
    CHECK(!memcmp(y, y2, sizeof y) && !memcmp(state, state2, sizeof state) && y[BTD - 1] != 0);

    a.dy = dy, a.du = du2, a.dA = dA2, a.dBm = dB2, a.dstate_in = dstate2;
    CHECK(gt_ref_selective_scan_backward(&a) == GT_OK);
    put_inputs(&c, 1);
    operand(&c, "dy", GT_XLA_F32, dy, "2 5 6");
    operand(&c, "saved", GT_XLA_U8, NULL, "0");
    result(&c, "dA", GT_XLA_F32, dA, "6 3"); /* results may be in any order */
    result(&c, "du", GT_XLA_F32, du, "2 5 6");
    result(&c, "dBm", GT_XLA_F32, dB, "2 5 2 3");
    result(&c, "dstate_in", GT_XLA_F32, dstate, "2 6 3");
    CHECK(run(&c, "gt_xla_selective_scan_backward", "Host", text) == 0);
    CHECK(!memcmp(du, du2, sizeof du) && !memcmp(dA, dA2, sizeof dA) && !memcmp(dB, dB2, sizeof dB));
    CHECK(!memcmp(dstate, dstate2, sizeof dstate) && du[0] != 0);

    /* in a step, the state is an operand and a result in the same memory; here it is a pool with one row for each batch
     * element */
    static const int32_t slots[B] = {1, 0};
    a = inputs();
    memcpy(state2, state_in, sizeof state2);
    memcpy(state, state_in, sizeof state);
    a.y = y2, a.state_out = state2, a.slots = slots, a.slot_capacity = B, a.segments = 0;
    CHECK(gt_ref_selective_scan_step(&a) == GT_OK);
    put_inputs(&c, 0);
    c.n_attributes = 1; /* drops the attribute `segments`, which a step does not take */
    operand(&c, "state_out", GT_XLA_F32, state, "2 6 3");
    operand(&c, "slots", GT_XLA_S32, slots, "2");
    result(&c, "y", GT_XLA_F32, y, "2 5 6");
    result(&c, "state_out", GT_XLA_F32, state, "2 6 3");
    CHECK(run(&c, "gt_xla_selective_scan_step", "Host", text) == 0);
    CHECK(!memcmp(y, y2, sizeof y) && !memcmp(state, state2, sizeof state));
    c.n_attributes = 1, c.result[1].data = state2;
    CHECK(run(&c, "gt_xla_selective_scan_step", "Host", text) == GT_XLA_INVALID_ARGUMENT);
    CHECK(strstr(text, "state_out is updated in place"));

    /* a state without the batch index is shared by the whole batch */
    a = inputs();
    a.state_in = state_in, a.state_in_shared = 1, a.y = y2;
    CHECK(gt_ref_selective_scan_forward(&a) == GT_OK);
    put_inputs(&c, 0);
    operand(&c, "state_in", GT_XLA_F32, state_in, "6 3");
    result(&c, "y", GT_XLA_F32, y, "2 5 6");
    CHECK(run(&c, "gt_xla_selective_scan_forward", "Host", text) == 0);
    CHECK(!memcmp(y, y2, sizeof y));
}

/* Tests packed sequences whose states are rows of a pool.  conv1d updates the pool in place. */
static void test_pool(void) {
    static const int32_t bounds[] = {0, 3, 5}, slots[] = {3, 1}, zero[] = {0, 1};
    static float weight[D * 2], y[BTD], y2[BTD], pool[4 * D], pool2[4 * D];
    gt_conv1d_args a = {.B = 1, .T = T, .D = D, .W = 2, .seq_capacity = 2, .slot_capacity = 4};
    char text[512];
    fill(weight, D * 2, 1, 0), fill(pool, 4 * D, 1, 0);
    memcpy(pool2, pool, sizeof pool);
    a.x = u, a.weight = weight, a.y = y2, a.state_in = a.state_out = pool2;
    a.cu_seqlens = bounds, a.slots = slots, a.starts_zero = zero;
    CHECK(gt_ref_conv1d_forward(&a) == GT_OK);
    for (int is_aliased = 1; is_aliased >= 0; is_aliased--) {
        call c;
        memset(&c, 0, sizeof c);
        operand(&c, "x", GT_XLA_F32, u, "1 5 6");
        operand(&c, "weight", GT_XLA_F32, weight, "6 2");
        operand(&c, "state_in", GT_XLA_F32, is_aliased ? pool : pool2, "4 6 1");
        operand(&c, "cu_seqlens", GT_XLA_S32, bounds, "3");
        operand(&c, "slots", GT_XLA_S32, slots, "2");
        operand(&c, "starts_zero", GT_XLA_S32, zero, "2");
        result(&c, "y", GT_XLA_F32, y, "1 5 6");
        result(&c, "state_out", GT_XLA_F32, pool, "4 6 1");
        CHECK(run(&c, "gt_xla_conv1d_forward", "Host", text) == (is_aliased ? 0 : GT_XLA_INVALID_ARGUMENT));
        CHECK(is_aliased || strstr(text, "state_out is updated in place: with slots, state_in must be an operand"));
        CHECK(!memcmp(y, y2, T * D * sizeof *y) && !memcmp(pool, pool2, sizeof pool) && y[T * D - 1] != 0);
    }
}

/* Tests snapshots in bf16 of ssd, whose number the buffer must have. */
static void test_snapshots(void) {
    enum { LONG = 260, H = 2, P = 3, ROWS = LONG / 128, STATE = H * P * N };
    static float x[LONG * H * P], dt[LONG * H], A[H], BC[LONG * N], y[LONG * H * P], y2[LONG * H * P];
    static uint16_t kept[ROWS * STATE], kept2[ROWS * STATE];
    static const int64_t every = 128;
    gt_ssd_args a = {.B = 1, .T = LONG, .H = H, .P = P, .N = N, .snapshot_every = every, .snapshot_dtype = GT_BF16};
    char text[512];
    fill(x, LONG * H * P, 1, 0), fill(dt, LONG * H, 0.1f, 0.2f), fill(A, H, 0.1f, -0.5f), fill(BC, LONG * N, 1, 0);
    a.x = x, a.dt = dt, a.A = A, a.Bm = a.Cm = BC, a.y = y2, a.snapshots = kept2;
    CHECK(gt_ref_ssd_forward(&a) == GT_OK);
    for (int is_right = 1; is_right >= 0; is_right--) {
        call c;
        memset(&c, 0, sizeof c);
        operand(&c, "x", GT_XLA_F32, x, "1 260 2 3");
        operand(&c, "dt", GT_XLA_F32, dt, "1 260 2");
        operand(&c, "A", GT_XLA_F32, A, "2");
        operand(&c, "Bm", GT_XLA_F32, BC, "1 260 1 3");
        operand(&c, "Cm", GT_XLA_F32, BC, "1 260 1 3");
        result(&c, "y", GT_XLA_F32, y, "1 260 2 3");
        result(&c, "snapshots", GT_XLA_BF16, kept, is_right ? "2 2 3 3" : "3 2 3 3");
        attribute(&c, "snapshot_every", GT_XLA_SCALAR, GT_XLA_S64, &every);
        CHECK(run(&c, "gt_xla_ssd_forward", "Host", text) == (is_right ? 0 : GT_XLA_INVALID_ARGUMENT));
        CHECK(is_right || strstr(text, "index 0 of snapshots has 3 elements: must be 2"));
        CHECK(!memcmp(y, y2, sizeof y) && !memcmp(kept, kept2, sizeof kept) && kept[ROWS * STATE - 1]);
    }
}

/* Inputs of mixed calls of wkv_ssm.  wkv6 has 2 heads of 3 channels, ssd has 3 heads of 2. */
enum { MIX_T = 4, MIX_W = 6, MIX_TW = MIX_T * MIX_W };
static struct {
    float r[MIX_TW], k[MIX_TW], w[MIX_TW], v[MIX_TW], x[MIX_TW], dt[MIX_T * 3], A[3], BC[MIX_T * 3], residual[MIX_TW],
        dmixed[MIX_TW], gain_wkv[MIX_W], gain_ssm[MIX_W];
} mix;

static gt_wkv_ssm_args mixed_args(void) {
    gt_wkv_ssm_args a = {.B = 1, .T = MIX_T, .wkv6 = {.H = 2, .N = 3}, .ssd = {.H = 3, .P = 2, .N = 3}};
    fill(mix.r, MIX_TW, 1, 0), fill(mix.k, MIX_TW, 1, 0), fill(mix.w, MIX_TW, 1, -1), fill(mix.v, MIX_TW, 1, 0);
    fill(mix.x, MIX_TW, 1, 0), fill(mix.dt, MIX_T * 3, 0.1f, 0.2f), fill(mix.A, 3, 0.1f, -0.5f);
    fill(mix.BC, MIX_T * 3, 1, 0), fill(mix.residual, MIX_TW, 1, 0), fill(mix.dmixed, MIX_TW, 1, 0);
    fill(mix.gain_wkv, MIX_W, 1, 1), fill(mix.gain_ssm, MIX_W, 1, 1);
    a.wkv6.r = mix.r, a.wkv6.k = mix.k, a.wkv6.w = mix.w, a.wkv6.v = mix.v;
    a.ssd.x = mix.x, a.ssd.dt = mix.dt, a.ssd.A = mix.A, a.ssd.Bm = a.ssd.Cm = mix.BC;
    a.gain_wkv = mix.gain_wkv, a.gain_ssm = mix.gain_ssm;
    return a;
}

static void put_mixed(call *c) {
    memset(c, 0, sizeof *c);
    operand(c, "wkv6.r", GT_XLA_F32, mix.r, "1 4 2 3");
    operand(c, "wkv6.k", GT_XLA_F32, mix.k, "1 4 2 3");
    operand(c, "wkv6.w", GT_XLA_F32, mix.w, "1 4 2 3");
    operand(c, "wkv6.v", GT_XLA_F32, mix.v, "1 4 2 3");
    operand(c, "ssd.x", GT_XLA_F32, mix.x, "1 4 3 2");
    operand(c, "ssd.dt", GT_XLA_F32, mix.dt, "1 4 3");
    operand(c, "ssd.A", GT_XLA_F32, mix.A, "3");
    operand(c, "ssd.Bm", GT_XLA_F32, mix.BC, "1 4 1 3");
    operand(c, "ssd.Cm", GT_XLA_F32, mix.BC, "1 4 1 3");
    operand(c, "gain_wkv", GT_XLA_F32, mix.gain_wkv, "2 3");
    operand(c, "gain_ssm", GT_XLA_F32, mix.gain_ssm, "3 2");
}

/* Forward, step and backward of mixed calls give the bits of the twins. */
static void test_mixed(void) {
    static float y[2][MIX_TW], wkv_y[2][MIX_TW], ssd_y[2][MIX_TW], wkv_state[2][18], ssd_state[2][18], dr[2][MIX_TW],
        dx[2][MIX_TW], dgain_wkv[2][MIX_W], dgain_ssm[2][MIX_W];
    char text[512];
    call c;
    for (int is_step = 0; is_step < 2; is_step++) { /* wkv6.y is an optional result */
        gt_wkv_ssm_args a = mixed_args();
        a.residual = mix.residual, a.mixed = y[1], a.ssd.y = ssd_y[1], a.wkv6.y = is_step ? NULL : wkv_y[1];
        a.wkv6.state_out = wkv_state[1], a.ssd.state_out = ssd_state[1];
        CHECK((is_step ? gt_ref_wkv_ssm_step : gt_ref_wkv_ssm_forward)(&a) == GT_OK);
        put_mixed(&c);
        operand(&c, "residual", GT_XLA_F32, mix.residual, "1 4 2 3");
        if (is_step) operand(&c, "wkv6.state_out", GT_XLA_F32, wkv_state[0], "1 2 3 3");
        if (is_step) operand(&c, "ssd.state_out", GT_XLA_F32, ssd_state[0], "1 3 2 3");
        result(&c, "mixed", GT_XLA_F32, y[0], "1 4 2 3");
        if (!is_step) result(&c, "wkv6.y", GT_XLA_F32, wkv_y[0], "1 4 2 3");
        result(&c, "ssd.y", GT_XLA_F32, ssd_y[0], "1 4 3 2");
        result(&c, "wkv6.state_out", GT_XLA_F32, wkv_state[0], "1 2 3 3");
        result(&c, "ssd.state_out", GT_XLA_F32, ssd_state[0], "1 3 2 3");
        CHECK(run(&c, is_step ? "gt_xla_wkv_ssm_step" : "gt_xla_wkv_ssm_forward", "Host", text) == 0);
        CHECK(!strcmp(text, ""));
        CHECK(!memcmp(y[0], y[1], sizeof y[0]) && y[0][MIX_TW - 1] != 0);
        CHECK(!memcmp(ssd_y[0], ssd_y[1], sizeof ssd_y[0]) && ssd_y[0][MIX_TW - 1] != 0);
        CHECK(!memcmp(wkv_y[0], wkv_y[1], sizeof wkv_y[0]) && !memcmp(wkv_state[0], wkv_state[1], sizeof wkv_state[0]));
        CHECK(!memcmp(ssd_state[0], ssd_state[1], sizeof ssd_state[0]) && ssd_state[0][17] != 0);
        if (is_step) continue;
        a = mixed_args();
        a.dmixed = mix.dmixed, a.wkv6.y = wkv_y[1], a.ssd.y = ssd_y[1];
        a.wkv6.dr = dr[1], a.ssd.dx = dx[1], a.dgain_wkv = dgain_wkv[1], a.dgain_ssm = dgain_ssm[1];
        CHECK(gt_ref_wkv_ssm_backward(&a) == GT_OK);
        put_mixed(&c);
        operand(&c, "dmixed", GT_XLA_F32, mix.dmixed, "1 4 2 3");
        operand(&c, "wkv6.y", GT_XLA_F32, wkv_y[0], "1 4 2 3");
        operand(&c, "ssd.y", GT_XLA_F32, ssd_y[0], "1 4 3 2");
        result(&c, "wkv6.dr", GT_XLA_F32, dr[0], "1 4 2 3");
        result(&c, "ssd.dx", GT_XLA_F32, dx[0], "1 4 3 2");
        result(&c, "dgain_wkv", GT_XLA_F32, dgain_wkv[0], "2 3");
        result(&c, "dgain_ssm", GT_XLA_F32, dgain_ssm[0], "3 2");
        CHECK(run(&c, "gt_xla_wkv_ssm_backward", "Host", text) == 0);
        CHECK(!memcmp(dr[0], dr[1], sizeof dr[0]) && !memcmp(dx[0], dx[1], sizeof dx[0]) && dx[0][MIX_TW - 1] != 0);
        CHECK(!memcmp(dgain_wkv[0], dgain_wkv[1], sizeof dgain_wkv[0]) && dgain_wkv[0][MIX_W - 1] != 0);
        CHECK(!memcmp(dgain_ssm[0], dgain_ssm[1], sizeof dgain_ssm[0]) && dgain_ssm[0][MIX_W - 1] != 0);
    }
    put_mixed(&c); /* without ssd.y, which the call needs */
    result(&c, "mixed", GT_XLA_F32, y[0], "1 4 2 3");
    CHECK(run(&c, "gt_xla_wkv_ssm_forward", "Host", text) == GT_XLA_INVALID_ARGUMENT);
    CHECK(strstr(text, "ssd.y is NULL"));
    put_mixed(&c);
    result(&c, "mixed", GT_XLA_F32, y[0], "1 4 2 3");
    result(&c, "ssd.y", GT_XLA_F32, ssd_y[0], "1 4 3 2");
    operand(&c, "residual", GT_XLA_F32, mix.residual, "1 3 2 3");
    CHECK(run(&c, "gt_xla_wkv_ssm_forward", "Host", text) == GT_XLA_INVALID_ARGUMENT);
    CHECK(strstr(text, "index 1 of residual has 3 elements: must be 4"));
}

/* Only a call with the sum, or with its gradient, is a mixed one.  Others refuse the fields of mixed calls. */
static void test_fields_of_mixed_calls(void) {
    static const char *const fields[][3] = {{"forward", "dmixed", "result"},    {"step", "dgain_wkv", "operand"},
                                            {"forward", "residual", "operand"}, {"forward", "gain_wkv", "operand"},
                                            {"step", "gain_ssm", "operand"},    {"backward", "mixed", "operand"},
                                            {"backward", "gain_wkv", "operand"}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        char text[512], name[64], expected[128];
        call c;
        memset(&c, 0, sizeof c);
        if (strcmp(fields[i][2], "result"))
            operand(&c, fields[i][1], GT_XLA_F32, u, "2 5 2 3");
        else
            result(&c, fields[i][1], GT_XLA_F32, u, "2 5 2 3");
        snprintf(name, sizeof name, "gt_xla_wkv_ssm_%s", fields[i][0]);
        snprintf(expected, sizeof expected, "%s is not %s %s of this call", fields[i][1],
                 fields[i][2][0] == 'o' ? "an" : "a", fields[i][2]);
        CHECK(run(&c, name, "Host", text) == GT_XLA_INVALID_ARGUMENT);
        CHECK(strstr(text, expected));
    }
}

/* Tests conv_ssd with states of two 16-bit types, whose buffers set the two dtypes.  A step takes only fp32. */
static void test_two_states(void) {
    enum { LONG = 3, H = 2, P = 3, W = 3, CHANNELS = H * P + 2 * N, CONV = CHANNELS * (W - 1), STATE = H * P * N };
    static float xBC[LONG * CHANNELS], dt[LONG * H], weight[CHANNELS * W], A[H], y[LONG * H * P], y2[LONG * H * P];
    static uint16_t conv_in[CONV], conv[CONV], conv2[CONV], in[STATE], state[STATE], state2[STATE];
    static const int64_t n = N;
    gt_conv_ssd_args a = {.B = 1, .T = LONG, .H = H, .P = P, .N = N, .W = W, .state_dtype = GT_F16};
    char text[512];
    call c;
    fill(xBC, LONG * CHANNELS, 1, 0), fill(dt, LONG * H, 0.1f, 0.2f), fill(weight, CHANNELS * W, 1, 0);
    fill(A, H, 0.1f, -0.5f);
    for (int i = 0; i < CONV; i++) conv_in[i] = gt_f32_to_bf16(u[i]);
    for (int i = 0; i < STATE; i++) in[i] = gt_f32_to_f16(u[i]);
    a.conv_state_dtype = GT_BF16;
    a.xBC = xBC, a.dt = dt, a.weight = weight, a.A = A, a.y = y2;
    a.conv_state_in = (const float *)(const void *)conv_in, a.state_in = (const float *)(const void *)in;
    a.conv_state_out = (float *)(void *)conv2, a.state_out = (float *)(void *)state2;
    CHECK(gt_ref_conv_ssd_forward(&a) == GT_OK);
    for (int is_step = 0; is_step < 2; is_step++) {
        memset(&c, 0, sizeof c);
        operand(&c, "xBC", GT_XLA_F32, xBC, "1 3 12");
        operand(&c, "dt", GT_XLA_F32, dt, "1 3 2");
        operand(&c, "weight", GT_XLA_F32, weight, "12 3");
        operand(&c, "A", GT_XLA_F32, A, "2");
        operand(&c, is_step ? "conv_state_out" : "conv_state_in", GT_XLA_BF16, is_step ? conv : conv_in, "1 12 2");
        operand(&c, is_step ? "state_out" : "state_in", GT_XLA_F16, is_step ? state : in, "1 2 3 3");
        result(&c, "y", GT_XLA_F32, y, "1 3 2 3");
        result(&c, "conv_state_out", GT_XLA_BF16, conv, "1 12 2");
        result(&c, "state_out", GT_XLA_F16, state, "1 2 3 3");
        attribute(&c, "N", GT_XLA_SCALAR, GT_XLA_S64, &n);
        CHECK(run(&c, is_step ? "gt_xla_conv_ssd_step" : "gt_xla_conv_ssd_forward", "Host", text) ==
              (is_step ? GT_XLA_INVALID_ARGUMENT : 0));
        CHECK(!is_step || strstr(text, "state_dtype = 3: must be 0 or GT_F32; only forward takes 16 bits"));
        CHECK(!memcmp(y, y2, sizeof y) && !memcmp(conv, conv2, sizeof conv) && !memcmp(state, state2, sizeof state));
        CHECK(y[0] != 0 && conv[CONV - 1] && state[STATE - 1]);
    }
}

/* Tests add_norm in bf16 with its sum in fp32.  With an operand "sum", backward reads forward's sum. */
static void test_sum(void) {
    enum { M = B * T, MD = M * D };
    static uint16_t x[MD], dy16[MD], y[MD], y2[MD], dx[MD], dx2[MD];
    static float sum[MD], sum2[MD], dsum[MD], dresidual[MD], dresidual2[MD], dgamma[D], dgamma2[D];
    static const int32_t layer = GT_NORM_LAYER;
    static const float eps = 1e-3f;
    char text[512];
    gt_add_norm_args a = {.M = M, .D = D, .dtype = GT_BF16, .sum_dtype = GT_F32, .norm = GT_NORM_LAYER, .eps = eps};
    call c;
    fill(dsum, MD, 1, 0);
    for (int i = 0; i < MD; i++) x[i] = gt_f32_to_bf16(u[i]), dy16[i] = gt_f32_to_bf16(dy[i]);
    a.x = x, a.residual = z, a.gamma = Dskip, a.y = y2, a.sum = sum2;
    CHECK(gt_ref_add_norm_forward(&a) == GT_OK);
#define PUT_INPUTS()                                                                                                   \
    do {                                                                                                               \
        memset(&c, 0, sizeof c);                                                                                       \
        operand(&c, "x", GT_XLA_BF16, x, "10 6");                                                                      \
        operand(&c, "residual", GT_XLA_F32, z, "10 6");                                                                \
        operand(&c, "gamma", GT_XLA_F32, Dskip, "6");                                                                  \
        attribute(&c, "norm", GT_XLA_SCALAR, GT_XLA_S32, &layer);                                                      \
        attribute(&c, "eps", GT_XLA_SCALAR, GT_XLA_F32, &eps);                                                         \
    } while (0)
    PUT_INPUTS();
    result(&c, "y", GT_XLA_BF16, y, "10 6");
    result(&c, "sum", GT_XLA_F32, sum, "10 6");
    CHECK(run(&c, "gt_xla_add_norm_forward", "Host", text) == 0);
    CHECK(!strcmp(text, ""));
    CHECK(!memcmp(y, y2, sizeof y) && !memcmp(sum, sum2, sizeof sum) && sum[MD - 1] != 0);

    a.dy = dy16, a.dsum = dsum, a.dx = dx2, a.dresidual = dresidual2, a.dgamma = dgamma2;
    fill(sum, MD, 1, 0); /* another sum than x + residual, so that the gradients show whether backward reads it */
    for (int reads_sum = 0; reads_sum < 2; reads_sum++) {
        a.reads_sum = reads_sum, a.sum = sum;
        CHECK(gt_ref_add_norm_backward(&a) == GT_OK);
        PUT_INPUTS();
        operand(&c, "dy", GT_XLA_BF16, dy16, "10 6");
        operand(&c, "dsum", GT_XLA_F32, dsum, "10 6");
        if (reads_sum) operand(&c, "sum", GT_XLA_F32, sum, "10 6");
        result(&c, "dx", GT_XLA_BF16, dx, "10 6");
        result(&c, "dresidual", GT_XLA_F32, dresidual, "10 6");
        result(&c, "dgamma", GT_XLA_F32, dgamma, "6");
        CHECK(run(&c, "gt_xla_add_norm_backward", "Host", text) == 0);
        CHECK(!memcmp(dx, dx2, sizeof dx) && !memcmp(dresidual, dresidual2, sizeof dresidual));
        CHECK(!memcmp(dgamma, dgamma2, sizeof dgamma) && dgamma[0] != 0);
    }

    PUT_INPUTS();
    result(&c, "y", GT_XLA_BF16, y, "10 6");
    result(&c, "sum", GT_XLA_BF16, x, "10 6");
    CHECK(run(&c, "gt_xla_add_norm_forward", "Host", text) == GT_XLA_INVALID_ARGUMENT);
    CHECK(strstr(text, "sum has another dtype"));
#undef PUT_INPUTS
}

/* ---- bad calls ---- */

static void expect(call *c, const char *part) {
    char text[512];
    const int code = run(c, "gt_xla_selective_scan_forward", "Host", text);
    CHECK(code == GT_XLA_INVALID_ARGUMENT);
    CHECK(strstr(text, "gt_ref_selective_scan_forward: "));
    if (!strstr(text, part)) failures++, printf("FAIL: \"%s\" is not in \"%s\"\n", part, text);
}

static void test_errors(void) {
    static float y[BTD];
    static const float half = 0.5f;
    static const int64_t large = (int64_t)1 << 40;
    call c;
#define BAD(part, ...)                                                                                                 \
    do {                                                                                                               \
        put_inputs(&c, 1);                                                                                             \
        result(&c, "y", GT_XLA_F32, y, "2 5 6");                                                                       \
        __VA_ARGS__;                                                                                                   \
        expect(&c, part);                                                                                              \
    } while (0)
    BAD("no is not an operand of this call", operand(&c, "no", GT_XLA_F32, u, "2 5 6"));
    BAD("dy is not an operand", operand(&c, "dy", GT_XLA_F32, dy, "2 5 6"));
    BAD("du is not a result", result(&c, "du", GT_XLA_F32, y, "2 5 6"));
    BAD("u is named twice", operand(&c, "u", GT_XLA_F32, u, "2 5 6"));
    BAD("must name the 8 operands of the call", strcat(c.operand_names, "dt_bias"));
    BAD("must name the 8 operands of the call", c.operand_names[0] = 0);
    BAD("u has rank 2: must be 3, as [BTD]", c.operand[0].rank = 2);
    BAD("index 1 of dt has 4 elements: must be 5 (T of [BTD])", c.sizes[1][1] = 4);
    BAD("index 0 of A has 5 elements: must be 6 (D of [DN])", c.sizes[2][0] = 5);
    BAD("index 0 of y has 3 elements", c.sizes[MOST][0] = 3);
    BAD("index 0 of state_in has 1 elements", c.sizes[7][0] = 1);
    BAD("G = 4", c.sizes[3][2] = c.sizes[4][2] = 4);
    BAD("A must be float32", c.operand[2].dtype = GT_XLA_BF16);
    BAD("z has another dtype", c.operand[6].dtype = GT_XLA_F16);
    BAD("u must be float32, bfloat16 or float16", c.operand[0].dtype = GT_XLA_F64);
    BAD("workspace must be uint8", result(&c, "workspace", GT_XLA_F32, y, "8"));
    BAD("no is not an attribute", attribute(&c, "no", GT_XLA_SCALAR, GT_XLA_S64, &large));
    BAD("softplus must be an integer", attribute(&c, "softplus", GT_XLA_SCALAR, GT_XLA_F32, &half));
    BAD("softplus must be a number", attribute(&c, "softplus", GT_XLA_STRING, 0, "yes"));
    BAD("softplus is out of range", attribute(&c, "softplus", GT_XLA_SCALAR, GT_XLA_S64, &large));
    BAD("results must be a string", attribute(&c, "results", GT_XLA_SCALAR, GT_XLA_S64, &large));
    BAD("y is NULL", c.result[0].data = NULL);
    put_inputs(&c, 0);
    expect(&c, "y is NULL");
#undef BAD
}

/* ---- metadata and registration ---- */

static void test_metadata(void) {
    for (const gt_xla_handler *h = gt_xla_handlers(); h->name; h++) {
        struct {
            gt_xla_metadata known;
            uint64_t later[4];
        } metadata;
        gt_xla_metadata_query query = {{sizeof query, GT_XLA_METADATA, NULL}, &metadata.known};
        gt_xla_extension other = {sizeof other, 77, &query.base};
        gt_xla_frame frame;
        memset(&frame, 0, sizeof frame); /* frame.api is NULL */
        memset(&metadata, 0x5a, sizeof metadata);
        frame.stage = GT_XLA_EXECUTE;
        frame.extensions = &other;
        CHECK(h->call(&frame) == NULL);
        CHECK(metadata.known.version.major == 0 && metadata.known.version.minor == 1);
        CHECK(metadata.known.traits == (uint32_t)!strcmp(h->platform, "CUDA"));
        for (int i = 0; i < 4; i++) CHECK(metadata.later[i] == 0x5a5a5a5a5a5a5a5au);
        frame.extensions = NULL;
        for (frame.stage = 0; frame.stage < GT_XLA_EXECUTE; frame.stage++) CHECK(h->call(&frame) == NULL);
    }
}

static void test_register(void) {
    int count = 0;
    for (const gt_xla_handler *h = gt_xla_handlers(); h->name; h++) {
        count++;
        for (const gt_xla_handler *o = gt_xla_handlers(); o < h; o++)
            CHECK(o->call != h->call && (strcmp(o->name, h->name) || strcmp(o->platform, h->platform)));
    }
    CHECK(count == 2 * (11 * 2 + 7));
    CHECK(gt_xla_register(&api) == GT_OK && registered == count);
    api.version.minor = host_minor = 4;
    CHECK(gt_xla_register(&api) == GT_OK && registered == 2 * count);
    CHECK(gt_xla_register(NULL) == GT_ERROR_NULL);
    CHECK(!strcmp(gt_last_error(), "gt_xla_register: api is NULL"));
    refused_name = "gt_xla_ssd_step";
    CHECK(gt_xla_register(&api) == GT_ERROR_UNSUPPORTED && destroyed == 1);
    CHECK(!strcmp(gt_last_error(), "gt_xla_register: gt_xla_ssd_step, Host: no such platform here"));
}

/* The CUDA handler must ask for the stream.  Without a device it must return the library's error. */
static void test_device(void) {
    static float y[BTD];
    char text[512];
    call c;
    if (gt_device_supported(-1) == GT_OK) return; /* a GPU's kernels cannot read this test's host memory */
    put_inputs(&c, 1);
    result(&c, "y", GT_XLA_F32, y, "2 5 6");
    CHECK(run(&c, "gt_xla_selective_scan_forward", "CUDA", text) != 0 && streams == 1);
    CHECK(!strncmp(text, "gt_selective_scan_forward: ", 27));
}

int main(void) {
    fill(u, BTD, 1, 0), fill(dt, BTD, 1, 0), fill(A, DN, 0.5f, -1), fill(Bm, BTGN, 1, 0), fill(Cm, BTGN, 1, 0);
    fill(Dskip, D, 1, 0), fill(z, BTD, 1, 0), fill(dy, BTD, 1, 0), fill(state_in, BDN, 1, 0);
    test_scan();
    test_pool();
    test_snapshots();
    test_mixed();
    test_fields_of_mixed_calls();
    test_two_states();
    test_sum();
    test_errors();
    test_metadata();
    test_register();
    test_device();
    printf("%d checks, %d failures\n", checks, failures);
    return failures > 0;
}
