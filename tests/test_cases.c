#include "gt_test.h"
#include "ref64.h"
#include <math.h>
#include <string.h>

/* ---- operators ------------------------------------------------------------------------------- */

#define PASS(op, pass)                                                                                                 \
    static gt_status op##_##pass(const void *args) { return gt_ref_##op##_##pass((const gt_##op##_args *)args); }      \
    static gt_status op##_##pass##64(const void *args) {                                                               \
        return gt_ref64_##op##_##pass((const gt_##op##_args *)args);                                                   \
    }                                                                                                                  \
    static gt_status op##_##pass##_device(const void *args, gt_stream stream) {                                        \
        return gt_##op##_##pass((const gt_##op##_args *)args, stream);                                                 \
    }

#define WORKSPACE(op)                                                                                                  \
    static gt_status op##_need(const void *args, gt_workspace *need) {                                                 \
        return gt_##op##_workspace((const gt_##op##_args *)args, need);                                                \
    }

#define RECURRENT(op) PASS(op, forward) PASS(op, backward) PASS(op, step) WORKSPACE(op)
#define ROWWISE(op) PASS(op, forward) PASS(op, backward) WORKSPACE(op)

RECURRENT(wkv6)
RECURRENT(ssd)
RECURRENT(selective_scan)
RECURRENT(conv1d)
ROWWISE(rmsnorm_linear)
ROWWISE(norm_mix)
ROWWISE(norm_gate)

#define AT(op, field) offsetof(gt_##op##_args, field)
#define RECURRENT_OP(op, segments, saved, saved_bytes)                                                                 \
    {                                                                                                                  \
        gt_op_##op, {op##_forward, op##_backward, op##_step}, {op##_forward64, op##_backward64, op##_step64},          \
            {op##_forward_device, op##_backward_device, op##_step_device}, op##_need, AT(op, state_in_shared),         \
            AT(op, slot_capacity), AT(op, seq_capacity), segments, saved, saved_bytes, AT(op, workspace),              \
            AT(op, workspace_bytes)                                                                                    \
    }
#define ROWWISE_OP(op, saved, saved_bytes)                                                                             \
    {                                                                                                                  \
        gt_op_##op, {op##_forward, op##_backward, NULL}, {op##_forward64, op##_backward64, NULL},                      \
            {op##_forward_device, op##_backward_device, NULL}, op##_need, 0, 0, 0, 0, saved, saved_bytes,              \
            AT(op, workspace), AT(op, workspace_bytes)                                                                 \
    }

const char *const test_op_names[] = {"wkv6",           "ssd",      "selective_scan", "conv1d",
                                     "rmsnorm_linear", "norm_mix", "norm_gate",      NULL};

static const test_op ops[] = {
    RECURRENT_OP(wkv6, AT(wkv6, segments), AT(wkv6, saved), AT(wkv6, saved_bytes)),
    RECURRENT_OP(ssd, AT(ssd, segments), AT(ssd, saved), AT(ssd, saved_bytes)),
    RECURRENT_OP(selective_scan, AT(selective_scan, segments), AT(selective_scan, saved),
                 AT(selective_scan, saved_bytes)),
    RECURRENT_OP(conv1d, 0, 0, 0),
    ROWWISE_OP(rmsnorm_linear, AT(rmsnorm_linear, saved), AT(rmsnorm_linear, saved_bytes)),
    ROWWISE_OP(norm_mix, 0, 0),
    ROWWISE_OP(norm_gate, 0, 0),
};

const test_op *test_op_of(const char *name) {
    for (int i = 0; test_op_names[i]; i++)
        if (!strcmp(test_op_names[i], name)) return &ops[i];
    return NULL;
}

/* ---- how inputs are drawn -------------------------------------------------------------------- */

static int is(const char *a, const char *b) { return !strcmp(a, b); }

double test_constant(const char *op, const char *tensor) {
    static const char *const none[] = {"z", "slots", "cu_seqlens", "seq_count"};
    (void)op;
    if (is(tensor, "gamma") || is(tensor, "gain_a") || is(tensor, "gain_b")) return 1;
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        if (is(tensor, none[i])) return NAN;
    return 0;
}

/* Means and spreads of a trained model, roughly; A, dt and the log decay by their logarithms. */
test_fill test_fill_of(const test_case *c, const gt_tensor *t, test_map *map) {
    test_fill f = {t->name, test_constant(c->op, t->name) == 1, 1, 0, 0};
    int softplus =
        is(c->op, "ssd") ? c->args.ssd.softplus : is(c->op, "selective_scan") && c->args.selective_scan.softplus;
    *map = TEST_AS_IS;
    if (f.mean == 1) f.spread = 0.3;
    if (is(c->op, "wkv6") && is(t->name, "w")) {
        f.mean = -3;
        if (c->args.wkv6.decay == GT_DECAY_LOG) *map = TEST_NEGATIVE_EXP;
    } else if (is(t->name, "A")) {
        f.spread = 0.5;
        *map = TEST_NEGATIVE_EXP;
    } else if (is(t->name, "dt") || is(t->name, "dt_bias")) {
        f.mean = is(t->name, "dt") ? (softplus ? -1 : -2) : softplus ? 0 : -3;
        f.spread = 0.7;
        if (!softplus) *map = TEST_EXP;
    } else if (t->shape[0] == 'M') {
        f.mean = 0.3; /* for LayerNorm to take away */
    }
    for (size_t i = 0; i < sizeof c->fill / sizeof c->fill[0]; i++)
        if (c->fill[i].tensor && is(c->fill[i].tensor, t->name)) f = c->fill[i];
    return f;
}

/* ---- cases ----------------------------------------------------------------------------------- */

#define WKV6(...) .op = "wkv6", .args.wkv6 = {__VA_ARGS__}
#define SSD(...) .op = "ssd", .args.ssd = {__VA_ARGS__}
#define SCAN(...) .op = "selective_scan", .args.selective_scan = {__VA_ARGS__}
#define CONV1D(...) .op = "conv1d", .args.conv1d = {__VA_ARGS__}
#define LINEAR(...) .op = "rmsnorm_linear", .args.rmsnorm_linear = {__VA_ARGS__}
#define MIX(...) .op = "norm_mix", .args.norm_mix = {__VA_ARGS__}
#define GATE(...) .op = "norm_gate", .args.norm_gate = {__VA_ARGS__}
#define NO_STATES "state_in state_out dstate_in dstate_out"

#define LIMITS .dt_limit = 1, .dt_min = 0.1875f, .dt_max = 0.375f

const test_case test_case_table[] = {
    /* wkv6 */
    {WKV6(.B = 1, .T = 1, .H = 1, .N = 1), .name = "one number"},
    {WKV6(.B = 2, .T = 3, .H = 2, .N = 3), .name = "raw decay"},
    {WKV6(.B = 2, .T = 3, .H = 2, .N = 3, .decay = GT_DECAY_LOG), .name = "log decay"},
    {WKV6(.B = 2, .T = 4, .H = 1, .N = 2, .V = 3), .name = "wide values"},
    {WKV6(.B = 2, .T = 4, .H = 2, .N = 3, .scale = 0.57735027f), .name = "scaled"},
    {WKV6(.B = 2, .T = 3, .H = 1, .N = 2, .V = 3, .scale = 3, .decay = GT_DECAY_LOG, .state_in_shared = 1),
     .name = "scaled up, shared state"},
    {WKV6(.B = 1, .T = 4, .H = 2, .N = 3, .V = 1, .decay = GT_DECAY_LOG), .name = "narrow values"},
    {WKV6(.B = 3, .T = 2, .H = 2, .N = 2, .state_in_shared = 1), .name = "shared state"},
    {WKV6(.B = 2, .T = 3, .H = 1, .N = 2), .name = "no u, no states", .absent = "u " NO_STATES},
    {WKV6(.B = 2, .T = 3, .H = 1, .N = 2), .name = "zero u and state", .absent = "u state_in"},
    {WKV6(.B = 2, .T = 3, .H = 2, .N = 2), .name = "final state only", .fill = {{"dy", 0, 0, 0, 0}}},
    {WKV6(.B = 2, .T = 4, .H = 1, .N = 3), .name = "strong decay", .fill = {{"w", 1.5, 1, 0, 0}}},
    {WKV6(.B = 2, .T = 4, .H = 1, .N = 3), .name = "hardly any decay", .fill = {{"w", -10, 1, 0, 0}}},
    {WKV6(.B = 2, .T = 5, .H = 1, .N = 3), .name = "zero decays", .fill = {{"w", -3, 1, 200, 0.3}}},
    {WKV6(.B = 2, .T = 5, .H = 1, .N = 3, .decay = GT_DECAY_LOG), .name = "zero log decays",
     .fill = {{"w", -3, 1, -INFINITY, 0.3}}},
    {WKV6(.B = 2, .T = 0, .H = 2, .N = 3), .name = "no time"},
    {WKV6(.B = 2, .T = 0, .H = 2, .N = 3, .state_in_shared = 1), .name = "no time, shared state"},
    {WKV6(.B = 0, .T = 3, .H = 2, .N = 3), .name = "no batch"},
    {WKV6(.B = 0, .T = 70, .H = 2, .N = 64), .name = "no batch, a size of tensor cores"},
    {WKV6(.B = 0, .T = 3, .H = 2, .N = 3, .state_in_shared = 1), .name = "no batch, shared state"},
    {WKV6(.B = 2, .T = 70, .H = 2, .N = 4, .V = 3), .name = "two chunks", .level = TEST_SMALL},
    {WKV6(.B = 2, .T = 130, .H = 1, .N = 3, .decay = GT_DECAY_LOG, .state_in_shared = 1),
     .name = "three chunks, shared state", .level = TEST_SMALL},
    {WKV6(.B = 1, .T = 70, .H = 2, .N = 4), .name = "two chunks, zero decays", .level = TEST_SMALL,
     .fill = {{"w", -3, 1, 200, 0.1}}},
    {WKV6(.B = 6, .T = 16, .H = 2, .N = 4, .V = 6, .slot_capacity = 9), .name = "slots", .level = TEST_SMALL},
    {WKV6(.B = 2, .T = 65, .H = 2, .N = 64), .name = "64", .level = TEST_MEDIUM},
    {WKV6(.B = 2, .T = 33, .H = 2, .N = 64, .decay = GT_DECAY_LOG), .name = "64, slices of 644", .level = TEST_MEDIUM,
     .layout = TEST_SLICES, .row = 644},
    {WKV6(.B = 1, .T = 129, .H = 3, .N = 16, .V = 40), .name = "16 by 40, strong decay", .level = TEST_MEDIUM,
     .fill = {{"w", 1.5, 1, 0, 0}}},
    {WKV6(.B = 1, .T = 100, .H = 1, .N = 60, .V = 100), .name = "60 by 100, shared state", .level = TEST_MEDIUM,
     .layout = TEST_GAPS},
    {WKV6(.B = 1, .T = 17, .H = 1, .N = 128), .name = "128", .level = TEST_MEDIUM},
    {WKV6(.B = 1, .T = 150, .H = 3, .N = 32, .scale = 0.17677669f), .name = "32, scaled", .level = TEST_MEDIUM},
    {WKV6(.B = 1, .T = 150, .H = 2, .N = 64, .scale = 0.3f, .segments = 2), .name = "64, scaled, hard resets",
     .level = TEST_MEDIUM, .fill = {{"w", -3, 1, 3, 0.02}}},
    /* dstate_out as large as what dy makes of G: docs/performance.md, dw of single heads, has the case without that */
    {WKV6(.B = 1, .T = 81, .H = 1, .N = 128, .scale = 0.08838835f), .name = "128, scaled", .level = TEST_MEDIUM,
     .fill = {{"dstate_out", 0, 0.08838835, 0, 0}}},
    {WKV6(.B = 1, .T = 81, .H = 1, .N = 40, .V = 24, .scale = 5), .name = "40 by 24, scaled up", .level = TEST_MEDIUM},
    {WKV6(.B = 1, .T = 300, .H = 2, .N = 16), .name = "hard resets", .level = TEST_MEDIUM,
     .fill = {{"w", -9, 0.5, 5, 0.03}}},
    {WKV6(.B = 1, .T = 300, .H = 1, .N = 32), .name = "fast beside slow", .level = TEST_MEDIUM,
     .fill = {{"w", -6, 0.5, 4, 0.5}}},
    {WKV6(.B = 1, .T = 500, .H = 1, .N = 16), .name = "large states, hardly any decay", .level = TEST_MEDIUM,
     .fill = {{"w", -12, 1, 0, 0}, {"k", 2, 4, 0, 0}, {"v", 2, 4, 0, 0}}},
    {WKV6(.B = 2, .T = 1000, .H = 4, .N = 64), .name = "64, long", .level = TEST_LARGE},
    {WKV6(.B = 1, .T = 500, .H = 2, .N = 128, .V = 64), .name = "128 by 64", .level = TEST_LARGE},
    {WKV6(.B = 1, .T = 4099, .H = 1, .N = 64), .name = "64, one long sequence", .level = TEST_LARGE},

    /* ssd */
    {SSD(.B = 1, .T = 1, .H = 1, .P = 1, .N = 1), .name = "one number"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 3, .softplus = 1), .name = "softplus"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 3, .N = 2), .name = "no softplus"},
    /* some below, some above the limits, all well away from them */
    {SSD(.B = 2, .T = 4, .H = 4, .P = 2, .N = 1, .softplus = 1, LIMITS), .name = "softplus, limits",
     .fill = {{"dt", -1.2, 0.05, -4, 0.4}, {"dt_bias", 0, 0.05, 3, 0.4}}},
    {SSD(.B = 2, .T = 4, .H = 4, .P = 1, .N = 2, LIMITS), .name = "limits",
     .fill = {{"dt", -1.4, 0.05, 0.02, 0.4}, {"dt_bias", -5, 0.1, 0.5, 0.4}}},
    {SSD(.B = 2, .T = 3, .H = 4, .P = 2, .N = 2, .G = 2, .softplus = 1), .name = "two groups"},
    {SSD(.B = 2, .T = 2, .H = 3, .P = 2, .N = 2, .G = 3), .name = "a group per head"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 3, .N = 2, .softplus = 1, .Dskip_per_channel = 1), .name = "skip per channel"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 2, .softplus = 1), .name = "no gate", .absent = "z dz"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 2), .name = "nothing optional",
     .absent = "z dz Dskip dt_bias " NO_STATES},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 2), .name = "zero skip, bias and state",
     .absent = "Dskip dt_bias state_in"},
    {SSD(.B = 3, .T = 2, .H = 2, .P = 2, .N = 2, .softplus = 1, .state_in_shared = 1), .name = "shared state"},
    {SSD(.B = 2, .T = 3, .H = 2, .P = 2, .N = 2), .name = "final state only", .fill = {{"dy", 0, 0, 0, 0}}},
    {SSD(.B = 2, .T = 4, .H = 2, .P = 2, .N = 2), .name = "A and dt of zero", .absent = "dt_bias",
     .fill = {{"A", 0, 0.5, 0, 0.5}, {"dt", -2, 0.7, 0, 0.4}}},
    {SSD(.B = 2, .T = 4, .H = 4, .P = 2, .N = 2), .name = "decay to zero", .fill = {{"A", 0, 0.5, -10000, 0.5}}},
    {SSD(.B = 2, .T = 4, .H = 4, .P = 2, .N = 2), .name = "growing states", .fill = {{"A", 0, 0.5, 0.75, 0.5}}},
    {SSD(.B = 2, .T = 4, .H = 2, .P = 2, .N = 2), .name = "closed gates", .fill = {{"z", 0, 1, -INFINITY, 0.2}}},
    {SSD(.B = 2, .T = 0, .H = 2, .P = 2, .N = 3), .name = "no time"},
    {SSD(.B = 2, .T = 0, .H = 2, .P = 2, .N = 3, .state_in_shared = 1), .name = "no time, shared state"},
    {SSD(.B = 0, .T = 3, .H = 2, .P = 2, .N = 3), .name = "no batch"},
    {SSD(.B = 2, .T = 70, .H = 4, .P = 2, .N = 3, .G = 2, .softplus = 1), .name = "two chunks", .level = TEST_SMALL},
    {SSD(.B = 2, .T = 130, .H = 2, .P = 2, .N = 2, .softplus = 1, .Dskip_per_channel = 1, .state_in_shared = 1),
     .name = "three chunks, shared state", .level = TEST_SMALL, .absent = "z dz"},
    {SSD(.B = 6, .T = 16, .H = 2, .P = 4, .N = 6, .softplus = 1, .slot_capacity = 9), .name = "slots",
     .level = TEST_SMALL},
    {SSD(.B = 3, .T = 5, .H = 4, .P = 3, .N = 5, .G = 2, .softplus = 1, LIMITS), .name = "limits, two groups",
     .level = TEST_SMALL, .no_difference = 1},
    {SSD(.B = 2, .T = 70, .H = 2, .P = 3, .N = 4, .softplus = 1), .name = "far ends of softplus", .level = TEST_SMALL,
     .no_difference = 1, .fill = {{"dt", 0, 15, 120, 0.1}, {"dt_bias", 0, 5, 0, 0}, {"A", -2, 1, 0, 0}}},
    {SSD(.B = 2, .T = 40, .H = 2, .P = 3, .N = 4, LIMITS), .name = "at the limits", .level = TEST_SMALL,
     .no_difference = 1, .absent = "dt_bias", .fill = {{"dt", -1.5, 0.7, 0.375, 0.5}}},
    {SSD(.B = 2, .T = 65, .H = 2, .P = 64, .N = 64, .softplus = 1), .name = "64 by 64", .level = TEST_MEDIUM},
    {SSD(.B = 1, .T = 70, .H = 2, .P = 64, .N = 128, .softplus = 1, .Dskip_per_channel = 1),
     .name = "64 by 128, slices of 902", .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 902},
    {SSD(.B = 1, .T = 100, .H = 3, .P = 80, .N = 16, .G = 3, .softplus = 1), .name = "80 by 16", .level = TEST_MEDIUM,
     .layout = TEST_GAPS},
    {SSD(.B = 1, .T = 300, .H = 2, .P = 16, .N = 16), .name = "fast beside slow", .level = TEST_MEDIUM,
     .fill = {{"dt", -8, 0.5, 8, 0.05}}},
    {SSD(.B = 1, .T = 400, .H = 2, .P = 8, .N = 16, .segments = 3), .name = "a sum of logarithms beyond fp32",
     .level = TEST_MEDIUM, .fill = {{"A", 0, 0, -1e37, 1}}},
    {SSD(.B = 1, .T = 200, .H = 2, .P = 8, .N = 16, .softplus = 1), .name = "states that grow all the time",
     .level = TEST_MEDIUM, .fill = {{"A", 0, 0, 0.03, 1}}},
    {SSD(.B = 1, .T = 500, .H = 2, .P = 8, .N = 16, .softplus = 1), .name = "large states", .level = TEST_MEDIUM,
     .fill = {{"A", -8, 1, 0, 0}, {"x", 1, 2, 0, 0}, {"Bm", 1, 2, 0, 0}}},
    {SSD(.B = 2, .T = 1000, .H = 4, .P = 64, .N = 128, .softplus = 1), .name = "64 by 128, long", .level = TEST_LARGE},
    {SSD(.B = 1, .T = 500, .H = 8, .P = 128, .N = 64, .G = 2, .softplus = 1, LIMITS), .name = "128 by 64, two groups",
     .level = TEST_LARGE},
    {SSD(.B = 1, .T = 4099, .H = 2, .P = 64, .N = 64, .softplus = 1), .name = "64 by 64, one long sequence",
     .level = TEST_LARGE},

    /* selective_scan */
    {SCAN(.B = 1, .T = 1, .D = 1, .N = 1), .name = "one number"},
    {SCAN(.B = 2, .T = 3, .D = 2, .N = 3, .softplus = 1), .name = "softplus"},
    {SCAN(.B = 2, .T = 3, .D = 3, .N = 2), .name = "no softplus"},
    {SCAN(.B = 2, .T = 3, .D = 4, .N = 2, .G = 2, .softplus = 1), .name = "two groups"},
    {SCAN(.B = 2, .T = 3, .D = 3, .N = 2, .G = 3), .name = "a group per channel"},
    {SCAN(.B = 2, .T = 3, .D = 2, .N = 2, .softplus = 1), .name = "no gate", .absent = "z dz"},
    {SCAN(.B = 2, .T = 3, .D = 2, .N = 2), .name = "nothing optional", .absent = "z dz Dskip dt_bias " NO_STATES},
    {SCAN(.B = 2, .T = 3, .D = 2, .N = 2), .name = "zero skip, bias and state", .absent = "Dskip dt_bias state_in"},
    {SCAN(.B = 3, .T = 2, .D = 3, .N = 2, .softplus = 1, .state_in_shared = 1), .name = "shared state"},
    {SCAN(.B = 2, .T = 3, .D = 2, .N = 2), .name = "final state only", .fill = {{"dy", 0, 0, 0, 0}}},
    {SCAN(.B = 2, .T = 4, .D = 3, .N = 2), .name = "A and dt of zero", .absent = "dt_bias",
     .fill = {{"A", 0, 0.5, 0, 0.5}, {"dt", -2, 0.7, 0, 0.4}}},
    {SCAN(.B = 2, .T = 4, .D = 3, .N = 2), .name = "decay to zero", .fill = {{"A", 0, 0.5, -10000, 0.5}}},
    {SCAN(.B = 2, .T = 4, .D = 3, .N = 2), .name = "growing states", .fill = {{"A", 0, 0.5, 0.75, 0.5}}},
    {SCAN(.B = 2, .T = 4, .D = 3, .N = 2), .name = "negative Delta", .absent = "dt_bias", .seed = 1,
     .fill = {{"dt", -1, 0.7, -0.5, 0.5}}},
    {SCAN(.B = 2, .T = 4, .D = 2, .N = 2), .name = "closed gates", .fill = {{"z", 0, 1, -INFINITY, 0.2}}},
    {SCAN(.B = 2, .T = 0, .D = 2, .N = 3), .name = "no time"},
    {SCAN(.B = 2, .T = 0, .D = 2, .N = 3, .state_in_shared = 1), .name = "no time, shared state"},
    {SCAN(.B = 0, .T = 3, .D = 2, .N = 3), .name = "no batch"},
    {SCAN(.B = 2, .T = 70, .D = 4, .N = 3, .G = 2, .softplus = 1), .name = "two chunks", .level = TEST_SMALL},
    {SCAN(.B = 2, .T = 130, .D = 2, .N = 4, .state_in_shared = 1), .name = "three chunks, shared state",
     .level = TEST_SMALL, .absent = "z dz"},
    {SCAN(.B = 6, .T = 16, .D = 6, .N = 4, .softplus = 1, .slot_capacity = 9), .name = "slots", .level = TEST_SMALL},
    {SCAN(.B = 2, .T = 70, .D = 5, .N = 4, .softplus = 1), .name = "far ends of softplus", .level = TEST_SMALL,
     .no_difference = 1, .fill = {{"dt", 0, 15, 120, 0.1}, {"dt_bias", 0, 5, 0, 0}, {"A", -2, 1, 0, 0}}},
    {SCAN(.B = 2, .T = 65, .D = 64, .N = 16, .softplus = 1), .name = "64 by 16", .level = TEST_MEDIUM},
    {SCAN(.B = 1, .T = 70, .D = 90, .N = 8, .softplus = 1), .name = "90 by 8, slices of 386", .level = TEST_MEDIUM,
     .layout = TEST_SLICES, .row = 386},
    {SCAN(.B = 2, .T = 33, .D = 40, .N = 64, .G = 4, .softplus = 1), .name = "40 by 64, time last",
     .level = TEST_MEDIUM, .layout = TEST_TIME_LAST},
    {SCAN(.B = 1, .T = 300, .D = 33, .N = 3), .name = "fast beside slow", .level = TEST_MEDIUM, .layout = TEST_GAPS,
     .fill = {{"dt", -8, 0.5, 8, 0.05}}},
    {SCAN(.B = 1, .T = 500, .D = 16, .N = 16, .softplus = 1), .name = "large states", .level = TEST_MEDIUM,
     .fill = {{"A", -8, 1, 0, 0}, {"u", 1, 2, 0, 0}, {"Bm", 1, 2, 0, 0}}},
    {SCAN(.B = 1, .T = 100, .D = 20, .N = 8), .name = "growth by e^40 in 64 tokens", .level = TEST_MEDIUM,
     .absent = ("dt_bias " NO_STATES),
     .fill = {{"A", 0, 0, 1.25, 1}, {"dt", -0.6931472, 0, 0, 0}, {"u", 0, 1e-16, 0, 0}, {"dy", 0, 1e-16, 0, 0}}},
    {SCAN(.B = 1, .T = 20, .D = 3, .N = 20), .name = "growth by e^100 in a token", .level = TEST_MEDIUM,
     .absent = ("dt_bias " NO_STATES), .seed = 3,
     .fill = {{"A", 0, 0, 1, 1}, {"dt", -4, 0.5, 100, 0.04}, {"u", 0, 1e-25, 0, 0}, {"dy", 0, 1e-22, 0, 0}}},
    {SCAN(.B = 1, .T = 400, .D = 20, .N = 8, .segments = 3), .name = "a sum of logarithms beyond fp32",
     .level = TEST_MEDIUM, .fill = {{"A", 0, 0, -1e37, 1}}},
    {SCAN(.B = 1, .T = 200, .D = 20, .N = 8, .softplus = 1), .name = "states that grow all the time",
     .level = TEST_MEDIUM, .fill = {{"A", 0, 0, 0.03, 1}}},
    {SCAN(.B = 2, .T = 1000, .D = 300, .N = 16, .softplus = 1), .name = "300 by 16, long", .level = TEST_LARGE},
    {SCAN(.B = 1, .T = 4099, .D = 64, .N = 16, .softplus = 1), .name = "64 by 16, one long sequence",
     .level = TEST_LARGE},

    /* conv1d */
    {CONV1D(.B = 1, .T = 1, .D = 1, .W = 2), .name = "one number"},
    {CONV1D(.B = 2, .T = 5, .D = 3, .W = 2), .name = "width 2"},
    {CONV1D(.B = 2, .T = 5, .D = 3, .W = 3), .name = "width 3"},
    {CONV1D(.B = 2, .T = 5, .D = 3, .W = 4), .name = "width 4"},
    {CONV1D(.B = 2, .T = 5, .D = 2, .W = 2, .activation = GT_ACT_SILU), .name = "width 2, SiLU"},
    {CONV1D(.B = 2, .T = 6, .D = 2, .W = 3, .activation = GT_ACT_SILU), .name = "width 3, SiLU"},
    {CONV1D(.B = 2, .T = 7, .D = 2, .W = 4, .activation = GT_ACT_SILU), .name = "width 4, SiLU"},
    {CONV1D(.B = 2, .T = 1, .D = 2, .W = 4, .activation = GT_ACT_SILU), .name = "one token"},
    {CONV1D(.B = 2, .T = 2, .D = 2, .W = 4), .name = "two tokens"},
    {CONV1D(.B = 2, .T = 3, .D = 2, .W = 4), .name = "three tokens"},
    {CONV1D(.B = 2, .T = 5, .D = 2, .W = 4), .name = "nothing optional", .absent = "bias " NO_STATES},
    {CONV1D(.B = 2, .T = 5, .D = 2, .W = 4, .activation = GT_ACT_SILU), .name = "zero bias and state",
     .absent = "bias state_in"},
    {CONV1D(.B = 3, .T = 5, .D = 2, .W = 4, .activation = GT_ACT_SILU, .state_in_shared = 1), .name = "shared state"},
    {CONV1D(.B = 3, .T = 1, .D = 2, .W = 4, .state_in_shared = 1), .name = "one token, shared state"},
    {CONV1D(.B = 2, .T = 0, .D = 2, .W = 3), .name = "no time"},
    {CONV1D(.B = 2, .T = 0, .D = 2, .W = 3, .state_in_shared = 1), .name = "no time, shared state"},
    {CONV1D(.B = 0, .T = 3, .D = 2, .W = 3), .name = "no batch"},
    {CONV1D(.B = 2, .T = 70, .D = 5, .W = 4, .activation = GT_ACT_SILU), .name = "70 tokens", .level = TEST_SMALL},
    {CONV1D(.B = 6, .T = 16, .D = 5, .W = 4, .activation = GT_ACT_SILU, .slot_capacity = 9), .name = "slots",
     .level = TEST_SMALL},
    {CONV1D(.B = 4, .T = 2, .D = 5, .W = 4, .slot_capacity = 5), .name = "slots, two tokens", .level = TEST_SMALL},
    {CONV1D(.B = 2, .T = 65, .D = 256, .W = 4, .activation = GT_ACT_SILU), .name = "256 channels",
     .level = TEST_MEDIUM},
    {CONV1D(.B = 2, .T = 129, .D = 161, .W = 4, .activation = GT_ACT_SILU), .name = "161 channels, slices of 644",
     .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 644},
    {CONV1D(.B = 2, .T = 300, .D = 33, .W = 3), .name = "33 channels, time last", .level = TEST_MEDIUM,
     .layout = TEST_TIME_LAST},
    {CONV1D(.B = 2, .T = 8, .D = 3, .W = 4), .name = "8 tokens, time last", .layout = TEST_TIME_LAST},
    {CONV1D(.B = 3, .T = 40, .D = 5, .W = 3, .activation = GT_ACT_SILU, .state_in_shared = 1),
     .name = "40 tokens, time last", .level = TEST_SMALL, .layout = TEST_TIME_LAST},
    {CONV1D(.B = 2, .T = 1320, .D = 3, .W = 4, .activation = GT_ACT_SILU), .name = "whole rows of 1320, time last",
     .level = TEST_MEDIUM, .layout = TEST_TIME_LAST},
    {CONV1D(.B = 1, .T = 10240, .D = 2, .W = 2), .name = "whole rows of 10240, time last", .level = TEST_MEDIUM,
     .layout = TEST_TIME_LAST},
    {CONV1D(.B = 2, .T = 530, .D = 264, .W = 4, .activation = GT_ACT_SILU), .name = "264 channels",
     .level = TEST_MEDIUM},
    {CONV1D(.B = 2, .T = 257, .D = 3, .W = 2, .activation = GT_ACT_SILU), .name = "large inputs", .level = TEST_MEDIUM,
     .layout = TEST_GAPS, .fill = {{"x", 0, 100, 0, 0}}},
    {CONV1D(.B = 2, .T = 4099, .D = 768, .W = 4, .activation = GT_ACT_SILU), .name = "768 channels",
     .level = TEST_LARGE},

    /* rmsnorm_linear */
    {LINEAR(.M = 1, .D = 2, .O = 1), .name = "two numbers"},
    {LINEAR(.M = 3, .D = 4, .O = 3), .name = "rms"},
    {LINEAR(.M = 3, .D = 4, .O = 3, .norm = GT_NORM_LAYER), .name = "layer"},
    {LINEAR(.M = 2, .D = 3, .O = 5, .norm = GT_NORM_LAYER, .eps = 0.1f), .name = "large eps"},
    {LINEAR(.M = 2, .D = 5, .O = 2), .name = "nothing optional", .absent = "gamma beta bias"},
    {LINEAR(.M = 2, .D = 5, .O = 2, .norm = GT_NORM_LAYER), .name = "layer, nothing optional",
     .absent = "gamma beta bias"},
    {LINEAR(.M = 2, .D = 3, .O = 2, .eps = 1e-3f), .name = "small inputs", .fill = {{"x", 0, 0.01, 0, 0}}},
    {LINEAR(.M = 0, .D = 3, .O = 2), .name = "no rows"},
    {LINEAR(.M = 40, .D = 17, .O = 9, .norm = GT_NORM_LAYER), .name = "40 rows", .level = TEST_SMALL},
    {LINEAR(.M = 33, .D = 32, .O = 40), .name = "32 to 40", .level = TEST_SMALL},
    {LINEAR(.M = 300, .D = 264, .O = 520, .norm = GT_NORM_LAYER), .name = "264 to 520", .level = TEST_SMALL},
    {LINEAR(.M = 40, .D = 64, .O = 64), .name = "dn below fp16", .level = TEST_SMALL,
     .fill = {{"dy", 0, 1e-3, 0, 0}, {"weight", 0, 1e-3, 0, 0}, {"gamma", 100, 10, 0, 0}}},
    {LINEAR(.M = 129, .D = 72, .O = 136), .name = "72 to 136", .level = TEST_SMALL},
    {LINEAR(.M = 260, .D = 136, .O = 264), .name = "136 to 264", .level = TEST_SMALL,
     .absent = "beta dbeta bias dbias"},
    {LINEAR(.M = 40, .D = 40, .O = 32, .eps = 1e-14f), .name = "mean square below 2^-40", .level = TEST_SMALL,
     .no_difference = 1, .fill = {{"x", 0, 2e-7, 0, 0}, {"dy", 0, 1e-5, 0, 0}}},
    {LINEAR(.M = 150, .D = 136, .O = 72), .name = "136 to 72", .level = TEST_SMALL},
    {LINEAR(.M = 300, .D = 72, .O = 264), .name = "72 to 264", .level = TEST_SMALL, .absent = "beta dbeta bias dbias"},
    {LINEAR(.M = 9, .D = 32, .O = 1096), .name = "32 to 1096", .level = TEST_SMALL},
    {LINEAR(.M = 9, .D = 40, .O = 2104), .name = "40 to 2104", .level = TEST_SMALL},
    {LINEAR(.M = 40, .D = 64, .O = 64), .name = "dn beyond fp16", .level = TEST_SMALL,
     .fill = {{"dy", 0, 1000, 0, 0}, {"weight", 0, 100, 0, 0}, {"x", 0, 10000, 0, 0}}},
    {LINEAR(.M = 65, .D = 128, .O = 200), .name = "128 to 200", .level = TEST_MEDIUM},
    {LINEAR(.M = 33, .D = 386, .O = 65, .norm = GT_NORM_LAYER), .name = "386 to 65, slices", .level = TEST_MEDIUM,
     .layout = TEST_SLICES, .row = 386},
    {LINEAR(.M = 300, .D = 61, .O = 64, .norm = GT_NORM_LAYER), .name = "61 to 64", .level = TEST_MEDIUM,
     .layout = TEST_GAPS},
    {LINEAR(.M = 9, .D = 64, .O = 32, .norm = GT_NORM_LAYER), .name = "equal numbers in a row", .level = TEST_MEDIUM,
     .fill = {{"x", 2, 0, 0, 0}}},
    {LINEAR(.M = 9, .D = 64, .O = 32, .norm = GT_NORM_LAYER), .name = "far from zero", .level = TEST_MEDIUM,
     .fill = {{"x", 50, 1, 0, 0}}},
    {LINEAR(.M = 9, .D = 64, .O = 32), .name = "large inputs", .level = TEST_MEDIUM, .fill = {{"x", 0, 10000, 0, 0}}},
    {LINEAR(.M = 9, .D = 64, .O = 32), .name = "small inputs, below eps", .level = TEST_MEDIUM,
     .fill = {{"x", 0, 1e-3, 0, 0}}},
    {LINEAR(.M = 1000, .D = 512, .O = 1500), .name = "512 to 1500", .level = TEST_LARGE},

    /* norm_mix */
    {MIX(.M = 1, .D = 2), .name = "two numbers"},
    {MIX(.M = 3, .D = 4), .name = "whole rows"},
    {MIX(.M = 3, .D = 6, .H = 3, .eps = 0.01f), .name = "three slices"},
    {MIX(.M = 2, .D = 3, .H = 3, .eps = 0.1f), .name = "slices of one"},
    {MIX(.M = 2, .D = 6, .H = 2), .name = "nothing optional", .absent = "gain_a gain_b residual"},
    {MIX(.M = 2, .D = 3), .name = "one gain", .absent = "gain_b"},
    {MIX(.M = 0, .D = 3), .name = "no rows"},
    {MIX(.M = 70, .D = 12, .H = 2), .name = "70 rows", .level = TEST_SMALL},
    {MIX(.M = 65, .D = 256, .H = 4), .name = "256", .level = TEST_MEDIUM},
    {MIX(.M = 33, .D = 193), .name = "193, slices of 644", .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 644},
    {MIX(.M = 300, .D = 60, .H = 5), .name = "60", .level = TEST_MEDIUM, .layout = TEST_GAPS},
    {MIX(.M = 9, .D = 48, .H = 24), .name = "slices of two", .level = TEST_MEDIUM},
    {MIX(.M = 9, .D = 64), .name = "large inputs", .level = TEST_MEDIUM,
     .fill = {{"a", 0, 10000, 0, 0}, {"b", 0, 1e-3, 0, 0}}},
    {MIX(.M = 5000, .D = 512, .H = 8), .name = "512", .level = TEST_LARGE},

    /* norm_gate */
    {GATE(.M = 1, .D = 2), .name = "two numbers"},
    {GATE(.M = 3, .D = 4), .name = "rms"},
    {GATE(.M = 3, .D = 4, .norm = GT_NORM_LAYER), .name = "layer"},
    {GATE(.M = 3, .D = 4, .gate_first = 1), .name = "gate, then rms"},
    {GATE(.M = 3, .D = 4, .gate_first = 1, .norm = GT_NORM_LAYER), .name = "gate, then layer"},
    {GATE(.M = 2, .D = 6, .H = 2, .norm = GT_NORM_LAYER, .eps = 64e-5f), .name = "two slices, layer"},
    {GATE(.M = 2, .D = 6, .H = 3, .gate_first = 1), .name = "three slices, gate first"},
    {GATE(.M = 2, .D = 3, .H = 3, .gate_first = 1, .eps = 0.1f), .name = "slices of one"},
    {GATE(.M = 3, .D = 4), .name = "no gate", .absent = "z dz"},
    {GATE(.M = 3, .D = 4, .gate_first = 1, .norm = GT_NORM_LAYER), .name = "nothing optional",
     .absent = "z dz gamma beta"},
    {GATE(.M = 3, .D = 4), .name = "closed gates", .fill = {{"z", 0, 1, -INFINITY, 0.2}}},
    {GATE(.M = 3, .D = 4, .gate_first = 1), .name = "closed gates first", .fill = {{"z", 0, 1, -INFINITY, 0.2}}},
    {GATE(.M = 2, .D = 4), .name = "no gamma, no beta", .absent = "gamma beta"},
    {GATE(.M = 0, .D = 3), .name = "no rows"},
    {GATE(.M = 70, .D = 12, .H = 2, .norm = GT_NORM_LAYER), .name = "70 rows", .level = TEST_SMALL},
    {GATE(.M = 70, .D = 12, .gate_first = 1), .name = "70 rows, gate first", .level = TEST_SMALL},
    {GATE(.M = 65, .D = 256, .H = 4, .norm = GT_NORM_LAYER, .eps = 64e-5f), .name = "256", .level = TEST_MEDIUM},
    {GATE(.M = 33, .D = 193, .gate_first = 1), .name = "193, slices of 644", .level = TEST_MEDIUM,
     .layout = TEST_SLICES, .row = 644},
    {GATE(.M = 300, .D = 60, .H = 5, .gate_first = 1, .norm = GT_NORM_LAYER), .name = "60", .level = TEST_MEDIUM,
     .layout = TEST_GAPS},
    {GATE(.M = 9, .D = 48, .H = 24, .norm = GT_NORM_LAYER), .name = "slices of two", .level = TEST_MEDIUM},
    {GATE(.M = 9, .D = 64), .name = "large inputs, closed and open gates", .level = TEST_MEDIUM,
     .fill = {{"x", 0, 1000, 0, 0}, {"z", 0, 30, 0, 0}}},
    {GATE(.M = 9, .D = 64, .norm = GT_NORM_LAYER), .name = "equal numbers in a row", .level = TEST_MEDIUM,
     .fill = {{"x", 2, 0, 0, 0}}},
    {GATE(.M = 5000, .D = 512, .H = 8, .norm = GT_NORM_LAYER), .name = "512", .level = TEST_LARGE},

    {.op = NULL}};

/* ---- packed sequences ------------------------------------------------------------------------ */

#define PACKED(...) .args.wkv6 = {.B = 1, __VA_ARGS__}, .op = "wkv6"
#define PACKED_SSD(...) .args.ssd = {.B = 1, __VA_ARGS__}, .op = "ssd"
#define PACKED_SCAN(...) .args.selective_scan = {.B = 1, __VA_ARGS__}, .op = "selective_scan"
#define SILU .activation = GT_ACT_SILU
#define PACKED_CONV1D(...) .args.conv1d = {.B = 1, __VA_ARGS__}, .op = "conv1d"
#define LENGTHS(...) .packed = {sizeof(int64_t[]){__VA_ARGS__} / sizeof(int64_t), (const int64_t[]){__VA_ARGS__}}
#define RANDOM_LENGTHS(count) .packed = {count, NULL}

const test_case test_packed_cases[] = {
    {PACKED(.T = 6, .H = 2, .N = 3, .seq_capacity = 3), .name = "three", LENGTHS(3, 1, 2)},
    {PACKED(.T = 5, .H = 1, .N = 2, .seq_capacity = 1), .name = "one", LENGTHS(5)},
    {PACKED(.T = 5, .H = 2, .N = 3, .V = 2, .seq_capacity = 7, .decay = GT_DECAY_LOG), .name = "empty ones",
     LENGTHS(0, 2, 0, 0, 1, 2, 0)},
    {PACKED(.T = 6, .H = 2, .N = 2, .seq_capacity = 5), .name = "below the capacities", LENGTHS(2, 0, 2)},
    {PACKED(.T = 4, .H = 2, .N = 2, .seq_capacity = 4), .name = "all in use", .absent = "seq_count",
     LENGTHS(1, 0, 2, 1)},
    {PACKED(.T = 4, .H = 1, .N = 2, .V = 3, .seq_capacity = 3), .name = "room for tokens", .absent = "seq_count",
     LENGTHS(1, 1, 0)},
    {PACKED(.T = 3, .H = 2, .N = 2, .seq_capacity = 2), .name = "none", .packed = {0, NULL}},
    {PACKED(.T = 0, .H = 2, .N = 2, .seq_capacity = 2), .name = "no tokens", LENGTHS(0, 0)},
    {PACKED(.T = 5, .H = 1, .N = 3, .seq_capacity = 3), .name = "no u, no states", .absent = "u " NO_STATES,
     LENGTHS(2, 3)},
    {PACKED(.T = 5, .H = 2, .N = 2, .seq_capacity = 4, .state_in_shared = 1), .name = "shared state", LENGTHS(2, 0, 2)},
    {PACKED(.T = 3, .H = 2, .N = 2, .seq_capacity = 2, .state_in_shared = 1), .name = "none, shared state",
     .packed = {0, NULL}},
    {PACKED(.T = 6, .H = 1, .N = 3, .seq_capacity = 2), .name = "zero decays", LENGTHS(3, 3),
     .fill = {{"w", -3, 1, 200, 0.3}}},
    {PACKED(.T = 205, .H = 2, .N = 3, .V = 2, .seq_capacity = 6), .name = "around chunks", .level = TEST_SMALL,
     LENGTHS(63, 1, 64, 0, 65)},
    {PACKED(.T = 300, .H = 1, .N = 4, .seq_capacity = 3, .state_in_shared = 1),
     .name = "around more chunks, shared state", .level = TEST_SMALL, LENGTHS(129, 1, 128)},
    {PACKED(.T = 90, .H = 2, .N = 2, .seq_capacity = 40), .name = "many", .level = TEST_SMALL, RANDOM_LENGTHS(37)},
    {PACKED(.T = 260, .H = 2, .N = 64, .seq_capacity = 12), .name = "64", .level = TEST_MEDIUM,
     LENGTHS(1, 15, 0, 16, 17, 63, 0, 0, 64, 65)},
    {PACKED(.T = 500, .H = 1, .N = 16, .V = 40, .seq_capacity = 300, .decay = GT_DECAY_LOG),
     .name = "16 by 40, hundreds", .level = TEST_MEDIUM, .layout = TEST_GAPS, RANDOM_LENGTHS(299)},
    {PACKED(.T = 400, .H = 2, .N = 32, .seq_capacity = 9), .name = "32, hard resets, slices of 331",
     .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 331, .fill = {{"w", -9, 0.5, 5, 0.03}}, RANDOM_LENGTHS(8)},
    {PACKED(.T = 6000, .H = 2, .N = 64, .seq_capacity = 300), .name = "64, hundreds", .level = TEST_LARGE,
     RANDOM_LENGTHS(290)},
    {PACKED(.T = 3000, .H = 1, .N = 128, .seq_capacity = 5), .name = "128, long beside short", .level = TEST_LARGE,
     LENGTHS(1, 2047, 16, 900)},

    {PACKED_SSD(.T = 6, .H = 2, .P = 2, .N = 3, .seq_capacity = 3), .name = "three", LENGTHS(3, 1, 2)},
    {PACKED_SSD(.T = 5, .H = 4, .P = 1, .N = 2, .G = 2, .seq_capacity = 7, .softplus = 1), .name = "empty ones",
     LENGTHS(0, 2, 0, 0, 1, 2, 0)},
    {PACKED_SSD(.T = 6, .H = 2, .P = 2, .N = 2, .seq_capacity = 5, .Dskip_per_channel = 1),
     .name = "below the capacities", LENGTHS(2, 0, 2)},
    {PACKED_SSD(.T = 4, .H = 2, .P = 2, .N = 2, .seq_capacity = 4, .softplus = 1, LIMITS), .name = "all in use",
     .absent = "seq_count", LENGTHS(1, 0, 2, 1)},
    {PACKED_SSD(.T = 4, .H = 1, .P = 2, .N = 3, .seq_capacity = 3), .name = "room for tokens",
     .absent = "seq_count z dz", LENGTHS(1, 1, 0)},
    {PACKED_SSD(.T = 3, .H = 2, .P = 2, .N = 2, .seq_capacity = 2), .name = "none", .packed = {0, NULL}},
    {PACKED_SSD(.T = 0, .H = 2, .P = 2, .N = 2, .seq_capacity = 2), .name = "no tokens", LENGTHS(0, 0)},
    {PACKED_SSD(.T = 5, .H = 1, .P = 2, .N = 3, .seq_capacity = 3, .softplus = 1), .name = "no states",
     .absent = "Dskip " NO_STATES, LENGTHS(2, 3)},
    {PACKED_SSD(.T = 5, .H = 2, .P = 2, .N = 2, .seq_capacity = 4, .state_in_shared = 1), .name = "shared state",
     LENGTHS(2, 0, 2)},
    {PACKED_SSD(.T = 3, .H = 2, .P = 2, .N = 2, .seq_capacity = 2, .state_in_shared = 1), .name = "none, shared state",
     .packed = {0, NULL}},
    {PACKED_SSD(.T = 205, .H = 2, .P = 2, .N = 3, .seq_capacity = 6, .softplus = 1), .name = "around chunks",
     .level = TEST_SMALL, LENGTHS(63, 1, 64, 0, 65)},
    {PACKED_SSD(.T = 300, .H = 1, .P = 4, .N = 3, .seq_capacity = 3, .state_in_shared = 1, .softplus = 1),
     .name = "around more chunks, shared state", .level = TEST_SMALL, LENGTHS(129, 1, 128)},
    {PACKED_SSD(.T = 90, .H = 2, .P = 2, .N = 2, .seq_capacity = 40, .softplus = 1), .name = "many",
     .level = TEST_SMALL, RANDOM_LENGTHS(37)},
    {PACKED_SSD(.T = 420, .H = 2, .P = 64, .N = 32, .seq_capacity = 12, .softplus = 1), .name = "64 by 32",
     .level = TEST_MEDIUM, LENGTHS(1, 15, 0, 16, 17, 63, 0, 0, 128, 129)},
    {PACKED_SSD(.T = 500, .H = 2, .P = 24, .N = 40, .G = 2, .seq_capacity = 300, .softplus = 1),
     .name = "24 by 40, hundreds", .level = TEST_MEDIUM, .layout = TEST_GAPS, RANDOM_LENGTHS(299)},
    {PACKED_SSD(.T = 2000, .H = 2, .P = 64, .N = 64, .seq_capacity = 60, .softplus = 1), .name = "64, dozens",
     .level = TEST_LARGE, RANDOM_LENGTHS(50)},
    {PACKED_SSD(.T = 3000, .H = 1, .P = 64, .N = 128, .seq_capacity = 5, .softplus = 1),
     .name = "128, long beside short", .level = TEST_LARGE, LENGTHS(1, 2047, 16, 900)},

    {PACKED_SCAN(.T = 6, .D = 2, .N = 3, .seq_capacity = 3), .name = "three", LENGTHS(3, 1, 2)},
    {PACKED_SCAN(.T = 5, .D = 4, .N = 2, .G = 2, .seq_capacity = 7, .softplus = 1), .name = "empty ones",
     LENGTHS(0, 2, 0, 0, 1, 2, 0)},
    {PACKED_SCAN(.T = 6, .D = 3, .N = 2, .seq_capacity = 5), .name = "below the capacities", LENGTHS(2, 0, 2)},
    {PACKED_SCAN(.T = 4, .D = 2, .N = 2, .seq_capacity = 3, .softplus = 1), .name = "room for tokens",
     .absent = "seq_count z dz", LENGTHS(1, 1, 0)},
    {PACKED_SCAN(.T = 3, .D = 2, .N = 2, .seq_capacity = 2), .name = "none", .packed = {0, NULL}},
    {PACKED_SCAN(.T = 0, .D = 2, .N = 2, .seq_capacity = 2), .name = "no tokens", LENGTHS(0, 0)},
    {PACKED_SCAN(.T = 5, .D = 2, .N = 2, .seq_capacity = 4, .state_in_shared = 1), .name = "shared state",
     LENGTHS(2, 0, 2)},
    {PACKED_SCAN(.T = 3, .D = 2, .N = 2, .seq_capacity = 2, .state_in_shared = 1), .name = "none, shared state",
     .packed = {0, NULL}},
    {PACKED_SCAN(.T = 300, .D = 4, .N = 3, .seq_capacity = 4, .softplus = 1), .name = "around chunks",
     .level = TEST_SMALL, LENGTHS(129, 1, 0, 128)},
    {PACKED_SCAN(.T = 90, .D = 3, .N = 2, .seq_capacity = 40, .softplus = 1), .name = "many", .level = TEST_SMALL,
     RANDOM_LENGTHS(37)},
    {PACKED_SCAN(.T = 420, .D = 40, .N = 16, .seq_capacity = 12, .softplus = 1), .name = "40 channels",
     .level = TEST_MEDIUM, LENGTHS(1, 15, 0, 16, 17, 63, 0, 0, 128, 129)},
    {PACKED_SCAN(.T = 500, .D = 34, .N = 20, .G = 2, .seq_capacity = 300, .softplus = 1), .name = "20 states, hundreds",
     .level = TEST_MEDIUM, .layout = TEST_GAPS, RANDOM_LENGTHS(299)},
    {PACKED_SCAN(.T = 3000, .D = 64, .N = 16, .seq_capacity = 5, .softplus = 1), .name = "16, long beside short",
     .level = TEST_LARGE, LENGTHS(1, 2047, 16, 900)},

    {PACKED_CONV1D(.T = 6, .D = 3, .W = 2, .seq_capacity = 3), .name = "three, width 2", LENGTHS(3, 1, 2)},
    {PACKED_CONV1D(.T = 6, .D = 2, .W = 3, .seq_capacity = 3, SILU), .name = "three, width 3", LENGTHS(2, 1, 3)},
    {PACKED_CONV1D(.T = 9, .D = 2, .W = 4, .seq_capacity = 3, SILU), .name = "three, width 4", LENGTHS(4, 2, 3)},
    {PACKED_CONV1D(.T = 5, .D = 1, .W = 3, .seq_capacity = 1), .name = "one", LENGTHS(5)},
    {PACKED_CONV1D(.T = 5, .D = 2, .W = 4, .seq_capacity = 7, SILU), .name = "empty ones",
     LENGTHS(0, 2, 0, 0, 1, 2, 0)},
    {PACKED_CONV1D(.T = 6, .D = 2, .W = 3, .seq_capacity = 5), .name = "below the capacities", LENGTHS(2, 0, 2)},
    {PACKED_CONV1D(.T = 4, .D = 2, .W = 2, .seq_capacity = 4, SILU), .name = "all in use", .absent = "seq_count",
     LENGTHS(1, 0, 2, 1)},
    {PACKED_CONV1D(.T = 4, .D = 3, .W = 4, .seq_capacity = 3, SILU), .name = "room for tokens", .absent = "seq_count",
     LENGTHS(1, 1, 0)},
    {PACKED_CONV1D(.T = 3, .D = 2, .W = 4, .seq_capacity = 2), .name = "none", .packed = {0, NULL}},
    {PACKED_CONV1D(.T = 0, .D = 2, .W = 3, .seq_capacity = 2), .name = "no tokens", LENGTHS(0, 0)},
    {PACKED_CONV1D(.T = 6, .D = 3, .W = 4, .seq_capacity = 3, SILU), .name = "no bias, no states",
     .absent = "bias " NO_STATES, LENGTHS(1, 4)},
    {PACKED_CONV1D(.T = 6, .D = 2, .W = 3, .seq_capacity = 3), .name = "zero bias and state", .absent = "bias state_in",
     LENGTHS(1, 0, 4)},
    {PACKED_CONV1D(.T = 7, .D = 2, .W = 4, .seq_capacity = 5, SILU, .state_in_shared = 1), .name = "shared state",
     LENGTHS(2, 0, 4, 1)},
    {PACKED_CONV1D(.T = 3, .D = 2, .W = 3, .seq_capacity = 2, .state_in_shared = 1), .name = "none, shared state",
     .packed = {0, NULL}},
    {PACKED_CONV1D(.T = 16, .D = 2, .W = 2, .seq_capacity = 7, SILU), .name = "0 to 5 tokens, width 2",
     .level = TEST_SMALL, LENGTHS(5, 0, 1, 3, 2, 4, 0)},
    {PACKED_CONV1D(.T = 18, .D = 3, .W = 3, .seq_capacity = 8, SILU), .name = "0 to 5 tokens, width 3",
     .level = TEST_SMALL, LENGTHS(0, 4, 2, 1, 0, 3, 5)},
    {PACKED_CONV1D(.T = 15, .D = 2, .W = 4, .seq_capacity = 6, SILU), .name = "0 to 5 tokens, width 4",
     .level = TEST_SMALL, LENGTHS(0, 1, 2, 3, 4, 5)},
    {PACKED_CONV1D(.T = 80, .D = 4, .W = 4, .seq_capacity = 9, SILU, .state_in_shared = 1), .name = "around runs",
     .level = TEST_SMALL, LENGTHS(7, 1, 8, 0, 9, 14, 2, 30)},
    {PACKED_CONV1D(.T = 90, .D = 3, .W = 3, .seq_capacity = 40, SILU), .name = "many", .level = TEST_SMALL,
     RANDOM_LENGTHS(37)},
    {PACKED_CONV1D(.T = 420, .D = 72, .W = 4, .seq_capacity = 12, SILU), .name = "72 channels", .level = TEST_MEDIUM,
     LENGTHS(1, 15, 0, 16, 17, 63, 0, 0, 128, 129)},
    {PACKED_CONV1D(.T = 500, .D = 34, .W = 3, .seq_capacity = 300, SILU), .name = "34 channels, hundreds",
     .level = TEST_MEDIUM, .layout = TEST_GAPS, RANDOM_LENGTHS(299)},
    {PACKED_CONV1D(.T = 400, .D = 161, .W = 4, .seq_capacity = 9, SILU), .name = "161 channels, slices of 644",
     .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 644, RANDOM_LENGTHS(8)},
    {PACKED_CONV1D(.T = 300, .D = 33, .W = 2, .seq_capacity = 90), .name = "33 channels, time last",
     .level = TEST_MEDIUM, .layout = TEST_TIME_LAST, RANDOM_LENGTHS(80)},
    {PACKED_CONV1D(.T = 1104, .D = 40, .W = 4, .seq_capacity = 9, SILU), .name = "around units, time last",
     .level = TEST_MEDIUM, .layout = TEST_TIME_LAST, LENGTHS(256, 0, 1, 7, 500, 64, 2, 262)},
    {PACKED_CONV1D(.T = 1104, .D = 136, .W = 4, .seq_capacity = 9, SILU), .name = "around units", .level = TEST_MEDIUM,
     LENGTHS(256, 0, 1, 7, 500, 64, 2, 262)},
    {PACKED_CONV1D(.T = 2000, .D = 5, .W = 4, .seq_capacity = 1500, SILU, .state_in_shared = 1),
     .name = "thousands, shared state", .level = TEST_MEDIUM, RANDOM_LENGTHS(1400)},
    {PACKED_CONV1D(.T = 3000, .D = 768, .W = 4, .seq_capacity = 5, SILU), .name = "768, long beside short",
     .level = TEST_LARGE, LENGTHS(1, 2047, 16, 900)},

    {.op = NULL}};

/* ---- random cases ---------------------------------------------------------------------------- */

static int64_t pick(test_random *r, int64_t n) { return (int64_t)(test_next(r) % (uint64_t)n); }

static const char *pick_absent(test_random *r, const char *const list[4]) { return list[pick(r, 4)]; }

static void draw_wkv6(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "u", "state_in", ("u " NO_STATES)};
    gt_wkv6_args *a = &c->args.wkv6;
    a->H = 1 + pick(r, 3);
    a->N = 1 + pick(r, most);
    a->V = pick(r, most + 1);
    a->decay = (gt_decay)pick(r, 2);
    a->state_in_shared = (int)pick(r, 2);
    c->absent = pick_absent(r, absent);
    a->scale = pick(r, 2) ? (float)(0.25 + test_uniform(r)) : 0;
}

static const char *const ssm_absent[] = {"", "z dz", "state_in dt_bias", ("Dskip " NO_STATES)};

static void draw_ssd(test_random *r, int64_t most, test_case *c) {
    gt_ssd_args *a = &c->args.ssd;
    a->G = 1 + pick(r, 3);
    a->H = a->G * (1 + pick(r, 3));
    a->P = 1 + pick(r, most);
    a->N = 1 + pick(r, most);
    a->softplus = (int)pick(r, 2);
    a->Dskip_per_channel = (int)pick(r, 2);
    a->state_in_shared = (int)pick(r, 2);
    c->absent = pick_absent(r, ssm_absent);
}

static void draw_selective_scan(test_random *r, int64_t most, test_case *c) {
    gt_selective_scan_args *a = &c->args.selective_scan;
    a->G = 1 + pick(r, 3);
    a->D = a->G * (1 + pick(r, most));
    a->N = 1 + pick(r, most);
    a->softplus = (int)pick(r, 2);
    a->state_in_shared = (int)pick(r, 2);
    c->absent = pick_absent(r, ssm_absent);
}

static void draw_conv1d(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "bias", "state_in", NO_STATES};
    gt_conv1d_args *a = &c->args.conv1d;
    a->D = 1 + pick(r, 2 * most);
    a->W = 2 + pick(r, 3);
    a->activation = (gt_activation)pick(r, 2);
    a->state_in_shared = (int)pick(r, 2);
    c->absent = pick_absent(r, absent);
}

static void draw_rmsnorm_linear(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "gamma", "beta bias", "gamma beta bias"};
    gt_rmsnorm_linear_args *a = &c->args.rmsnorm_linear;
    a->D = 3 + pick(r, 2 * most);
    a->O = 1 + pick(r, 2 * most);
    a->eps = 0.01f;
    a->norm = (gt_norm)pick(r, 2);
    c->absent = pick_absent(r, absent);
}

static void draw_norm_mix(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "gain_a", "residual", "gain_a gain_b residual"};
    gt_norm_mix_args *a = &c->args.norm_mix;
    a->eps = 0.01f;
    a->H = 1 + pick(r, 3);
    a->D = a->H * (3 + pick(r, most));
    c->absent = pick_absent(r, absent);
}

static void draw_norm_gate(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", "z dz", "gamma", "z dz gamma beta"};
    gt_norm_gate_args *a = &c->args.norm_gate;
    a->H = 1 + pick(r, 3);
    a->D = a->H * (3 + pick(r, most));
    a->norm = (gt_norm)pick(r, 2);
    a->gate_first = (int)pick(r, 2);
    a->eps = 0.01f;
    c->absent = pick_absent(r, absent);
}

void test_draw_case(const char *op, uint64_t seed, int64_t most, test_case *c) {
    static void (*const draw[])(test_random * r, int64_t most, test_case * c) = {
        draw_wkv6, draw_ssd, draw_selective_scan, draw_conv1d, draw_rmsnorm_linear, draw_norm_mix, draw_norm_gate};
    test_random r = {seed};
    memset(c, 0, sizeof *c);
    c->op = op;
    c->name = "drawn";
    c->seed = seed;
    c->layout = (test_layout)pick(&r, TEST_SLICES + 1);
    c->in_place = (int)pick(&r, 2);
    draw[test_op_of(op) - ops](&r, most, c);
    if (test_op_of(op)->twin[GT_STEP]) {
        test_set_size(c, 'B', 1 + pick(&r, 3));
        test_set_size(c, 'T', pick(&r, 2 * most + 1));
    } else {
        test_set_size(c, 'M', 1 + pick(&r, 2 * most));
    }
}

void test_draw_packed(const char *op, uint64_t seed, int64_t most, test_case *c) {
    test_random r = {seed};
    int64_t count = pick(&r, 6), unused = pick(&r, 3);
    test_draw_case(op, seed, most, c);
    c->name = "drawn, packed";
    test_set_size(c, 'B', 1);
    test_set_size(c, 'T', pick(&r, 4 * most + 1));
    test_set_sequences(c, count, count + unused ? count + unused : 1);
    if (count && !unused && !*c->absent) c->absent = "seq_count";
}
