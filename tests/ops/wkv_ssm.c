/* wkv_ssm: test cases, and rows of the bench.  wkv6.c and ssd.c test the mathematics.  These cases test that each of
 * the two operators gives the results of a separate call.  Mixed calls have a second table, so they are a test_op of
 * their own, at the end of this file. */
#include "formula.h"
#include "gt/fused/wkv_ssm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

TEST_TWINS_OVER_TIME(wkv_ssm)

/* ---- arguments ------------------------------------------------------------------------------- */

static const test_field fields[] = {TEST_FIELD(wkv_ssm, wkv6.V, 'v'),
                                    TEST_FIELD(wkv_ssm, wkv6.decay, 'i'),
                                    TEST_FLOAT(wkv_ssm, wkv6.scale, 0.3),
                                    TEST_DIVISOR(wkv_ssm, ssd.G, 'h'),
                                    TEST_FIELD(wkv_ssm, ssd.softplus, 'i'),
                                    TEST_FIELD(wkv_ssm, ssd.dt_limit, 'i'),
                                    TEST_FLOAT(wkv_ssm, ssd.dt_min, 0.2),
                                    TEST_FLOAT(wkv_ssm, ssd.dt_max, 0.6),
                                    TEST_FIELD(wkv_ssm, ssd.Dskip_per_channel, 'i'),
                                    TEST_FIELD(wkv_ssm, state_in_shared, 'i'),
                                    TEST_FIELD(wkv_ssm, segments, 's'),
                                    {NULL, 0, 0, 0, 0}};

/* The caller must leave some fields of the inner structs wkv6 and ssd unset: fields that the outer struct also has, and
 * fields for features that wkv_ssm lacks. */
#define BAD_IN(part, type)                                                                                             \
    BAD(wkv_ssm, part.B, 'l', 2, GT_ERROR_VALUE, #part ".B is set"),                                                   \
        BAD(wkv_ssm, part.T, 'l', 3, GT_ERROR_VALUE, #part ".T is set"),                                               \
        BAD(wkv_ssm, part.dtype, 'i', GT_F32, GT_ERROR_VALUE, #part ".dtype is set"),                                  \
        BAD(wkv_ssm, part.state_in_shared, 'i', 1, GT_ERROR_VALUE, #part ".state_in_shared is set"),                   \
        BAD(wkv_ssm, part.accumulate, 'i', 1, GT_ERROR_VALUE, #part ".accumulate is set"),                             \
        BAD(wkv_ssm, part.segments, 'l', 1, GT_ERROR_VALUE, #part ".segments is set"),                                 \
        BAD(wkv_ssm, part.seq_capacity, 'l', 1, GT_ERROR_VALUE, #part ".seq_capacity is set"),                         \
        BAD(wkv_ssm, part.saved_bytes, 'l', 1, GT_ERROR_VALUE, #part ".saved_bytes is set"),                           \
        BAD(wkv_ssm, part.workspace_bytes, 'l', 1, GT_ERROR_VALUE, #part ".workspace_bytes is set"),                   \
        BAD(wkv_ssm, part.slot_capacity, 'l', 1, GT_ERROR_VALUE, #part ".slot_capacity is set"),                       \
        BAD(wkv_ssm, part.pieces, 'l', 1, GT_ERROR_VALUE, #part ".pieces is set"),                                     \
        BAD(wkv_ssm, part.cu_seqlens, 'l', 64, GT_ERROR_VALUE, #part ".cu_seqlens is set"),                            \
        BAD(wkv_ssm, part.seq_count, 'l', 64, GT_ERROR_VALUE, #part ".seq_count is set"),                              \
        BAD(wkv_ssm, part.saved, 'l', 64, GT_ERROR_VALUE, #part ".saved is set"),                                      \
        BAD(wkv_ssm, part.workspace, 'l', 64, GT_ERROR_VALUE, #part ".workspace is set"),                              \
        BAD(wkv_ssm, part.slots, 'l', 64, GT_ERROR_VALUE, #part ".slots is set"),                                      \
        BAD(wkv_ssm, part.tokens, 'l', 64, GT_ERROR_VALUE, #part ".tokens is set"),                                    \
        BAD(wkv_ssm, part.commit, 'l', 64, GT_ERROR_VALUE, #part ".commit is set"),                                    \
        BAD(wkv_ssm, part.decay_out, 'l', 64, GT_ERROR_VALUE, #part ".decay_out is set"),                              \
        BAD(wkv_ssm, part.piece_states, 'l', 64, GT_ERROR_VALUE, #part ".piece_states is set"),                        \
        BAD(wkv_ssm, part.piece_decays, 'l', 64, GT_ERROR_VALUE, #part ".piece_decays is set"),                        \
        BAD(wkv_ssm, part.piece_starts, 'l', 64, GT_ERROR_VALUE, #part ".piece_starts is set"),                        \
        BAD(wkv_ssm, part.state_scale, 'l', 64, GT_ERROR_VALUE, #part ".state_scale is set"),                          \
        BAD(wkv_ssm, part.snapshots, 'l', 64, GT_ERROR_VALUE, #part ".snapshots is set"),                              \
        BAD(wkv_ssm, part.snapshot_every, 'l', 128, GT_ERROR_VALUE, #part ".snapshot_every is set"),                   \
        BAD(wkv_ssm, part.snapshot_dtype, 'i', 1, GT_ERROR_VALUE, #part ".snapshot_dtype is set"),                     \
        BAD(wkv_ssm, part.state_scale_stride, 'l', 64, GT_ERROR_VALUE, #part ".state_scale_stride is set"),            \
        BAD(wkv_ssm, part.state_dtype, 'i', 1, GT_ERROR_VALUE, #part ".state_dtype is set"),                           \
        BAD(wkv_ssm, part.parameter_dtype, 'i', 2, GT_ERROR_VALUE, #part ".parameter_dtype is set")

static const test_bad_value bad_values[] = {BAD_IN(wkv6, wkv6),
                                            BAD_IN(ssd, ssd),
                                            BAD_SIZE(wkv_ssm, wkv6.V),
                                            BAD_SWITCH(wkv_ssm, wkv6.decay, 2),
                                            BAD(wkv_ssm, wkv6.scale, 'f', -1, GT_ERROR_VALUE, "wkv6.scale = -1"),
                                            BAD_SIZE(wkv_ssm, ssd.G),
                                            BAD_DIVISOR(wkv_ssm, ssd.G, 3),
                                            BAD_SWITCH(wkv_ssm, ssd.softplus, 2),
                                            BAD_SWITCH(wkv_ssm, ssd.dt_limit, 2),
                                            BAD_SWITCH(wkv_ssm, ssd.Dskip_per_channel, 2),
                                            BAD(wkv_ssm, segments, 'l', -1, GT_ERROR_VALUE, "segments = -1"),
                                            {NULL, GT_OK, {{0, 0, 0}}}};

/* ---- how inputs are drawn -------------------------------------------------------------------- */

static void set_fill(const test_case *c, const gt_tensor *t, test_fill *f, test_map *map) {
    if (test_is(t, "w")) {
        f->mean = -3;
        if (c->args.wkv_ssm.wkv6.decay == GT_DECAY_LOG) *map = TEST_NEGATIVE_EXP;
    } else if (!strncmp(t->name, "ssd.", 4)) {
        test_fill_ssm(c->args.wkv_ssm.ssd.softplus, t, f, map);
    }
}

/* Combines every regime of wkv6's decays with every regime of ssd's decays. */
static void set_regime(test_case *c, int n) {
    static const test_fill w[] = {
        {"wkv6.w", -3, 1, 0, 0}, {"wkv6.w", 1.5, 1, 0, 0}, {"wkv6.w", -10, 1, 0, 0}, {"wkv6.w", -3, 1, 200, 0.1}};
    static const test_fill A[] = {
        {"ssd.A", 0, 0.5, 0, 0}, {"ssd.A", 3, 0.5, 0, 0}, {"ssd.A", -8, 1, 0, 0}, {"ssd.A", 0, 0.5, -10000, 0.5}};
    c->fill[0] = w[n % 4];
    c->fill[1] = A[(n + n / 4) % 4];
    if (c->args.wkv_ssm.wkv6.decay == GT_DECAY_LOG && c->fill[0].share > 0) c->fill[0].special = -INFINITY;
}

/* ---- cases ----------------------------------------------------------------------------------- */

/* OF(...) puts the fields of an inner struct in brackets, so that they are one macro argument. */
#define OF(...) (__VA_ARGS__)
#define FIELDS(...) __VA_ARGS__
#define BOTH(w, s, ...) .op = "wkv_ssm", .args.wkv_ssm = {.wkv6 = {FIELDS w}, .ssd = {FIELDS s}, __VA_ARGS__}
#define PACKED(w, s, ...) BOTH(w, s, .B = 1, __VA_ARGS__)
#undef NO_STATES
#define NO_STATES                                                                                                      \
    "wkv6.state_in wkv6.state_out wkv6.dstate_in wkv6.dstate_out ssd.state_in ssd.state_out ssd.dstate_in "            \
    "ssd.dstate_out"
#define NO_GATE "ssd.z ssd.dz"

static const test_case cases[] = {
    {BOTH(OF(.H = 1, .N = 1), OF(.H = 1, .P = 1, .N = 1), .B = 1, .T = 1), .name = "one number each"},
    {BOTH(OF(.H = 2, .N = 3), OF(.H = 2, .P = 2, .N = 3, .softplus = 1), .B = 2, .T = 3), .name = "both"},
    {BOTH(OF(.H = 1, .N = 2, .V = 3, .decay = GT_DECAY_LOG, .scale = 0.5f), OF(.H = 4, .P = 1, .N = 2, .G = 2), .B = 2,
          .T = 4),
     .name = "log decay, wide values, two groups"},
    {BOTH(OF(.H = 2, .N = 2), OF(.H = 2, .P = 3, .N = 2, .softplus = 1, .Dskip_per_channel = 1), .B = 3, .T = 2,
          .state_in_shared = 1),
     .name = "shared states"},
    {BOTH(OF(.H = 1, .N = 2), OF(.H = 2, .P = 2, .N = 2), .B = 2, .T = 3), .name = "nothing optional",
     .absent = "wkv6.u ssd.Dskip ssd.dt_bias " NO_GATE " " NO_STATES},
    {BOTH(OF(.H = 1, .N = 3), OF(.H = 2, .P = 2, .N = 2, .softplus = 1), .B = 2, .T = 3), .name = "only states of wkv6",
     .absent = "ssd.state_in ssd.state_out ssd.dstate_in ssd.dstate_out"},
    {BOTH(OF(.H = 1, .N = 3), OF(.H = 2, .P = 2, .N = 2, .softplus = 1), .B = 2, .T = 3), .name = "only states of ssd",
     .absent = "wkv6.state_in wkv6.state_out wkv6.dstate_in wkv6.dstate_out"},
    {BOTH(OF(.H = 1, .N = 3), OF(.H = 2, .P = 2, .N = 2), .B = 2, .T = 5), .name = "decays of zero",
     .fill = {{"wkv6.w", -3, 1, 200, 0.3}, {"ssd.A", 0, 0.5, -10000, 0.5}}},
    {BOTH(OF(.H = 2, .N = 3), OF(.H = 2, .P = 2, .N = 3), .B = 2, .T = 0), .name = "no time"},
    {BOTH(OF(.H = 2, .N = 3), OF(.H = 2, .P = 2, .N = 3), .B = 2, .T = 0, .state_in_shared = 1),
     .name = "no time, shared states"},
    {BOTH(OF(.H = 2, .N = 64), OF(.H = 2, .P = 64, .N = 64), .B = 0, .T = 70), .name = "no batch"},
    {BOTH(OF(.H = 2, .N = 4, .V = 3), OF(.H = 3, .P = 3, .N = 4, .G = 3, .softplus = 1), .B = 2, .T = 70),
     .name = "two chunks", .level = TEST_SMALL},
    {BOTH(OF(.H = 1, .N = 3), OF(.H = 2, .P = 2, .N = 3), .B = 1, .T = 140, .segments = 2), .name = "two segments",
     .level = TEST_SMALL},
    {BOTH(OF(.H = 2, .N = 32), OF(.H = 2, .P = 64, .N = 64, .softplus = 1), .B = 2, .T = 65),
     .name = "32 beside 64 by 64", .level = TEST_MEDIUM, .absent = NO_GATE},
    {BOTH(OF(.H = 1, .N = 64), OF(.H = 4, .P = 64, .N = 128, .softplus = 1), .B = 1, .T = 150),
     .name = "64 beside 64 by 128", .level = TEST_MEDIUM, .absent = NO_GATE},
    {BOTH(OF(.H = 2, .N = 64), OF(.H = 2, .P = 64, .N = 64), .B = 1, .T = 100), .name = "slices of 902",
     .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 902},
    {BOTH(OF(.H = 2, .N = 60, .V = 100), OF(.H = 2, .P = 20, .N = 36), .B = 1, .T = 70), .name = "any sizes, gaps",
     .level = TEST_MEDIUM, .layout = TEST_GAPS},
    {BOTH(OF(.H = 4, .N = 32), OF(.H = 4, .P = 64, .N = 64, .softplus = 1), .B = 8, .T = 256), .name = "a trainer's",
     .level = TEST_LARGE, .absent = NO_GATE},
    {BOTH(OF(.H = 8, .N = 64), OF(.H = 16, .P = 64, .N = 128, .softplus = 1), .B = 1, .T = 1030), .name = "long",
     .level = TEST_LARGE},
    {.op = NULL}};

static const test_case packed[] = {
    {PACKED(OF(.H = 2, .N = 3), OF(.H = 2, .P = 2, .N = 3), .T = 6, .seq_capacity = 3), .name = "three",
     LENGTHS(3, 1, 2)},
    {PACKED(OF(.H = 1, .N = 2), OF(.H = 2, .P = 1, .N = 2, .softplus = 1), .T = 6, .seq_capacity = 7),
     .name = "empty ones, below the capacities", LENGTHS(0, 2, 0, 1, 2)},
    {PACKED(OF(.H = 1, .N = 2), OF(.H = 2, .P = 2, .N = 2), .T = 4, .seq_capacity = 4), .name = "all in use",
     .absent = "seq_count", LENGTHS(1, 0, 2, 1)},
    {PACKED(OF(.H = 1, .N = 2), OF(.H = 2, .P = 2, .N = 2), .T = 3, .seq_capacity = 2), .name = "none",
     .packed = {0, NULL}},
    {PACKED(OF(.H = 1, .N = 2), OF(.H = 2, .P = 2, .N = 2), .T = 0, .seq_capacity = 2), .name = "no tokens",
     LENGTHS(0, 0)},
    {PACKED(OF(.H = 1, .N = 2), OF(.H = 1, .P = 2, .N = 2), .T = 5, .seq_capacity = 4, .state_in_shared = 1),
     .name = "shared states", LENGTHS(2, 0, 2)},
    {PACKED(OF(.H = 1, .N = 3), OF(.H = 2, .P = 2, .N = 3, .softplus = 1), .T = 205, .seq_capacity = 6),
     .name = "around chunks", .level = TEST_SMALL, LENGTHS(63, 1, 64, 0, 65)},
    {PACKED(OF(.H = 2, .N = 32), OF(.H = 2, .P = 64, .N = 64, .softplus = 1), .T = 260, .seq_capacity = 9),
     .name = "32 beside 64 by 64", .level = TEST_MEDIUM, .absent = NO_GATE, LENGTHS(1, 15, 0, 63, 0, 129)},
    {.op = NULL}};

/* The first sizes are those of hybrid models.  In the others, one operator, both or neither lacks kernels on tensor
 * cores. */
static const test_case sizes[] = {
    {BOTH(OF(.H = 2, .N = 32), OF(.H = 4, .P = 64, .N = 64, .softplus = 1)), .name = "sweep", .absent = NO_GATE},
    {BOTH(OF(.H = 1, .N = 64), OF(.H = 2, .P = 64, .N = 64, .softplus = 1)), .name = "sweep"},
    {BOTH(OF(.H = 3, .N = 32), OF(.H = 2, .P = 64, .N = 128, .softplus = 1, .Dskip_per_channel = 1)), .name = "sweep"},
    {BOTH(OF(.H = 1, .N = 64, .decay = GT_DECAY_LOG), OF(.H = 3, .P = 64, .N = 128, .softplus = 1)), .name = "sweep",
     .absent = NO_GATE},
    {BOTH(OF(.H = 1, .N = 16), OF(.H = 2, .P = 64, .N = 64, .softplus = 1), .state_in_shared = 1), .name = "sweep",
     .absent = NO_GATE},
    {BOTH(OF(.H = 2, .N = 32), OF(.H = 2, .P = 20, .N = 36)), .name = "sweep"},
    {BOTH(OF(.H = 1, .N = 20, .V = 12), OF(.H = 2, .P = 12, .N = 20, .softplus = 1)), .name = "sweep"},
    {.op = NULL}};

/* Sizes for steps.  The step kernels of each operator are tested in wkv6.c and ssd.c. */
static const test_case steps[] = {
    {BOTH(OF(.H = 2, .N = 8, .V = 12), OF(.H = 4, .P = 8, .N = 16, .G = 2, .softplus = 1), .B = 4), .name = "steps"},
    {BOTH(OF(.H = 3, .N = 64), OF(.H = 2, .P = 64, .N = 128, .softplus = 1), .B = 3), .name = "steps"},
    {BOTH(OF(.H = 1, .N = 31, .decay = GT_DECAY_LOG), OF(.H = 3, .P = 5, .N = 33), .B = 2), .name = "steps",
     .absent = NO_GATE},
    {.op = NULL}};

static const test_case spoilt[] = {
    {BOTH(OF(.H = 1, .N = 32), OF(.H = 2, .P = 16, .N = 16, .softplus = 1), .dtype = GT_BF16), .name = "spoilt"},
    {.op = NULL}};

static const test_case many[] = {
    {BOTH(OF(.H = 1, .N = 2), OF(.H = 1, .P = 2, .N = 2), .B = 70000, .T = 2), .name = "many"},
    {BOTH(OF(.H = 70000, .N = 2), OF(.H = 70000, .P = 2, .N = 2, .G = 70000), .B = 1, .T = 2), .name = "many"},
    {.op = NULL}};

static const test_case sums[] = {
    {BOTH(OF(.H = 1, .N = 2), OF(.H = 1, .P = 2, .N = 2, .softplus = 1), .B = 1, .T = 500000), .name = "long",
     .fill = {{"wkv6.r", 0.5, 1, 0, 0}, {"wkv6.dy", 0.5, 1, 0, 0}, {"ssd.x", 0.5, 1, 0, 0}, {"ssd.dy", 0.5, 1, 0, 0}}},
    {.op = NULL}};

static void draw(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", NO_GATE " wkv6.u", "wkv6.state_in ssd.state_in ssd.dt_bias",
                                         ("ssd.Dskip " NO_STATES)};
    gt_wkv_ssm_args *a = &c->args.wkv_ssm;
    a->wkv6.H = 1 + test_pick(r, 3);
    a->wkv6.N = 1 + test_pick(r, most);
    a->wkv6.V = test_pick(r, most + 1);
    a->wkv6.decay = (gt_decay)test_pick(r, 2);
    a->ssd.G = 1 + test_pick(r, 3);
    a->ssd.H = a->ssd.G * (1 + test_pick(r, 2));
    a->ssd.P = 1 + test_pick(r, most);
    a->ssd.N = 1 + test_pick(r, most);
    a->ssd.softplus = (int)test_pick(r, 2);
    a->ssd.Dskip_per_channel = (int)test_pick(r, 2);
    a->state_in_shared = (int)test_pick(r, 2);
    c->absent = test_pick_absent(r, absent);
}

/* ---- properties of only this operator ---------------------------------------------------------- */

/* Copies those words of `names` that have the prefix `prefix` or no prefix at all, without the prefix. */
static void cut_names(const char *names, const char *prefix, char *to, size_t bytes) {
    size_t n = 0;
    to[0] = 0;
    while (names && *names) {
        const size_t length = strcspn(names, " "), skipped = strlen(prefix);
        const int is_ours = !strncmp(names, prefix, skipped), is_shared = !memchr(names, '.', length);
        if (length && (is_ours || is_shared) && n + length + 2 < bytes) {
            const size_t from = is_ours ? skipped : 0;
            memcpy(to + n, names + from, length - from);
            n += length - from;
            to[n++] = ' ', to[n] = 0;
        }
        names += length + (names[length] == ' ');
    }
}

/* Makes the call of one of the two operators from a case. */
static test_case one_of(const test_case *c, int is_ssd, char *absent, size_t bytes) {
    const gt_wkv_ssm_args *a = &c->args.wkv_ssm;
    test_case one = {.op = is_ssd ? "ssd" : "wkv6", .name = c->name, .seed = c->seed, .level = c->level};
    cut_names(c->absent, is_ssd ? "ssd." : "wkv6.", absent, bytes);
    one.absent = absent;
    one.packed = c->packed;
    one.drafts = c->drafts;
    if (is_ssd) {
        one.args.ssd = a->ssd;
    } else {
        one.args.wkv6 = a->wkv6;
    }
    gt_dtype dtype = a->dtype, companion = is_ssd ? a->ssd.dt_dtype : a->wkv6.w_dtype;
    test_set_size(&one, 'B', a->B), test_set_size(&one, 'T', a->T);
    test_set_dtype(&one, dtype, companion);
    test_set_flag(&one, test_table(&one)->fields.state_in_shared, a->state_in_shared);
    memcpy((char *)&one.args + test_table(&one)->fields.segments, &a->segments, sizeof a->segments);
    memcpy((char *)&one.args + test_table(&one)->fields.seq_capacity, &a->seq_capacity, sizeof a->seq_capacity);
    test_set_slots(&one, a->slot_capacity);
    return one;
}

/* The index of `t`, a tensor of one operator's table, in the table of wkv_ssm. */
static int place_in(const gt_op *both, const gt_tensor *t, int is_ssd) {
    char name[64];
    snprintf(name, sizeof name, "%s%s", is_ssd ? "ssd." : "wkv6.", t->name);
    const int at = test_find(both, name);
    return at >= 0 ? at : test_find(both, t->name);
}

/* Makes *to point to the arrays of one operator's tensors.  *from still owns the arrays. */
static void take_part(const test_case *c, const test_case *one, int is_ssd, const test_values *from, test_values *to) {
    memset(to, 0, sizeof *to);
    for (int i = 0; test_table(one)->tensors[i].name; i++) {
        const int at = place_in(test_table(c), &test_table(one)->tensors[i], is_ssd);
        if (at >= 0) to->of[i] = from->of[at];
    }
}

/* With equal numbers of segments, each operator gives the bits of a separate call. */
static void parts_agree(const test_runner *r, const test_case *c, double tolerance) {
    (void)tolerance;
    for (int64_t segments = 1; segments <= 3; segments += 2) {
        test_case both = *c;
        both.layout = TEST_PACKED;
        both.in_place = 0;
        both.args.wkv_ssm.segments = segments;
        both.args.wkv_ssm.accumulate = 0;
        for (int pass = GT_FORWARD; pass <= GT_BACKWARD; pass++) {
            test_values in, out;
            test_inputs(&both, (gt_pass)pass, &in);
            test_run(r, &both, (gt_pass)pass, &in, TEST_ALL, &out);
            for (int is_ssd = 0; is_ssd < 2; is_ssd++) {
                char absent[256];
                const test_case one = one_of(&both, is_ssd, absent, sizeof absent);
                test_values part_in, part_out, alone;
                take_part(&both, &one, is_ssd, &in, &part_in);
                take_part(&both, &one, is_ssd, &out, &part_out);
                test_run(r, &one, (gt_pass)pass, &part_in, TEST_ALL, &alone);
                test_same(r, &one, (gt_pass)pass, "in a call of both", &part_out, &alone, 0);
                test_free(&alone);
            }
            test_free(&in), test_free(&out);
        }
    }
}

/* A step gives the bits of separate steps of the two operators. */
static void step_parts_agree(const test_runner *r, const test_case *c) {
    test_values in, out;
    test_inputs(c, GT_STEP, &in);
    test_run(r, c, GT_STEP, &in, TEST_ALL, &out);
    for (int is_ssd = 0; is_ssd < 2; is_ssd++) {
        char absent[256];
        const test_case one = one_of(c, is_ssd, absent, sizeof absent);
        test_values part_in, part_out, alone;
        take_part(c, &one, is_ssd, &in, &part_in);
        take_part(c, &one, is_ssd, &out, &part_out);
        test_run(r, &one, GT_STEP, &part_in, TEST_ALL, &alone);
        test_same(r, &one, GT_STEP, "in a step of both", &part_out, &alone, 0);
        test_free(&alone);
    }
    test_free(&in), test_free(&out);
}

/* ---- formulas, by the two operators' own ------------------------------------------------------- */

static double part_formula(const formula *f, const char *tensor, int64_t i, int64_t j, int64_t k, int64_t l) {
    const int is_ssd = !strncmp(tensor, "ssd.", 4);
    char absent[256];
    const test_case one = one_of(f->c, is_ssd, absent, sizeof absent);
    const test_formula *o = test_op_of(one.op)->formulas;
    test_values in;
    const formula part = {&one, &in};
    take_part(f->c, &one, is_ssd, f->in, &in);
    while (strcmp(o->tensor, strchr(tensor, '.') + 1)) o++;
    return o->of(&part, i, j, k, l);
}

#define PART_FORMULA(name, tensor)                                                                                     \
    static double name(const formula *f, int64_t i, int64_t j, int64_t k, int64_t l) {                                 \
        return part_formula(f, tensor, i, j, k, l);                                                                    \
    }
PART_FORMULA(wkv6_y, "wkv6.y")
PART_FORMULA(wkv6_state_out, "wkv6.state_out")
PART_FORMULA(ssd_y, "ssd.y")
PART_FORMULA(ssd_state_out, "ssd.state_out")
static const test_formula formulas[] = {{"wkv6.y", wkv6_y},
                                        {"wkv6.state_out", wkv6_state_out},
                                        {"ssd.y", ssd_y},
                                        {"ssd.state_out", ssd_state_out},
                                        {NULL, NULL}};

static const test_property properties[] = {{"each has the bits of a call of its own", TEST_MEDIUM, parts_agree},
                                           {NULL, TEST_TINY, NULL}};

/* Numbers of tokens beyond the chunks of the tensor-core kernels, and the kernels that calls with these times must
 * launch. */
static const int64_t more_times[] = {130, 300, -1};
static const char *const launched[] = {"wkv6::forward_tensor_kernel",
                                       "wkv6::states_tensor_kernel",
                                       "wkv6::backward_tensor_kernel",
                                       "ssd::forward_hopper_kernel",
                                       "ssd::states_hopper_kernel",
                                       "chunk_gradient_hopper_kernel",
                                       NULL};

/* ---- rows of the bench ----------------------------------------------------------------------- */

#define ROW(types, w, s, ...)                                                                                          \
    { {BOTH(w, s, __VA_ARGS__), .name = "", .absent = NO_GATE " " NO_STATES}, types }

/* A step, in the shapes in which the bench times wkv6 and ssd alone. */
#define STEP_ROW(batch)                                                                                                \
    {                                                                                                                  \
        {BOTH(OF(.H = 32, .N = 64), OF(.H = 128, .P = 64, .N = 128, .G = 8, .softplus = 1), .T = 1, batch),            \
         .name = "G8", .absent = NO_GATE},                                                                             \
            TEST_BF16                                                                                                  \
    }

static const test_bench_row host_rows[] = {
    ROW(TEST_F32 | TEST_BF16, OF(.H = 4, .N = 32), OF(.H = 4, .P = 64, .N = 64, .softplus = 1), .B = 8, .T = 256),
    {{.op = NULL}, 0}};
static const test_bench_row gpu_rows[] = {
    ROW(TEST_BF16, OF(.H = 4, .N = 32), OF(.H = 4, .P = 64, .N = 64, .softplus = 1), .B = 64, .T = 256),
    ROW(TEST_BF16, OF(.H = 32, .N = 64), OF(.H = 64, .P = 64, .N = 128, .softplus = 1), .B = 8, .T = 4096),
    /* the shape of the long row of mixed calls, whose sum has the bytes of norm_mix with M32768 D2048 */
    ROW(TEST_BF16, OF(.H = 32, .N = 64), OF(.H = 32, .P = 64, .N = 128, .softplus = 1), .B = 8, .T = 4096),
    STEP_ROW(.B = 1),
    STEP_ROW(.B = 64),
    {{.op = NULL}, 0}};
static const test_bench_draw draws[] = {{"wkv6.w", {0, -6, 1}},
                                        {"wkv6.r wkv6.k wkv6.v wkv6.u", {0, 0, 0.5f}},
                                        {"ssd.A", {1, -8.5f, 7.5f}},
                                        {"ssd.dt", {0, 0, 0.5f}},
                                        {"ssd.dt_bias", {0, -4, 0.2f}},
                                        {"ssd.Dskip", {0, 1, 0.3f}},
                                        {NULL, {0, 0, 0}}};
static const test_bench_cut cuts[] = {{"B", 1}, {NULL, 0}};

/* ---- the operator ---------------------------------------------------------------------------- */

const test_op test_op_wkv_ssm = {
    TEST_OVER_TIME(wkv_ssm),
    .reads_y = AT(wkv_ssm, ssd.reads_y),
    .optional_size = {AT(wkv_ssm, ssd.G), 2},
    /* ssd's x, z, y and their gradients have more than 2^31 elements.  wkv6's tensors have a fifth of that, so that the
     * call fits into 139 GiB; the case of wkv6 itself has larger tensors. */
    .large = {BOTH(OF(.H = 1, .N = 64), OF(.H = 5, .P = 64, .N = 64, .softplus = 1), .B = 1, .T = 130, .segments = 1)},
    .set_fill = set_fill,
    .set_regime = set_regime,
    .reach = {64, 64},
    .spoilt = spoilt,
    .bounds_pairs = 1,
    /* each tolerance is the larger one of wkv6 and ssd */
    .kernels = {{0, 1e-5, 3e-3, 1e-3}, {0, 1e-5, 5e-4, 5e-4}, {0, 1e-5, 3e-3, 1e-3}, {0, 1e-5, 1e-3, 1e-3}, 1},
    .properties = properties,
    .steps = steps,
    .check_step = step_parts_agree,
    .more_times = more_times,
    .launched = launched,
    .bench_draws = draws,
    .bench_cuts = cuts,
};

/* ---- mixed calls ----------------------------------------------------------------------------- */

#define MIX(w, s, ...) .op = "wkv_ssm_mixed", .args.wkv_ssm = {.wkv6 = {FIELDS w}, .ssd = {FIELDS s}, __VA_ARGS__}
#define MIX_PACKED(w, s, ...) MIX(w, s, .B = 1, __VA_ARGS__)
#define NO_GAINS "gain_wkv gain_ssm dgain_wkv dgain_ssm"
#define NO_WKV_Y "wkv6.y dgain_wkv"

static const test_bad_value mixed_bad_values[] = {
    BAD(wkv_ssm, ssd.P, 'l', 5, GT_ERROR_SIZE, "wkv6.H = 4, wkv6.V = 3, ssd.H = 4, ssd.P = 5: H V must equal H P"),
    BAD(wkv_ssm, wkv6.V, 'l', 4, GT_ERROR_SIZE, "wkv6.V = 4"),
    BAD(wkv_ssm, wkv6.H, 'l', 3, GT_ERROR_SIZE, "wkv6.H = 3"),
    BAD(wkv_ssm, ssd.H, 'l', 2, GT_ERROR_SIZE, "ssd.H = 2"),
    BAD(wkv_ssm, wkv6.scale, 'f', -1, GT_ERROR_VALUE, "wkv6.scale = -1"),
    BAD(wkv_ssm, segments, 'l', -1, GT_ERROR_VALUE, "segments = -1"),
    {NULL, GT_OK, {{0, 0, 0}}}};

static const test_case mixed_cases[] = {
    {MIX(OF(.H = 1, .N = 1), OF(.H = 1, .P = 1, .N = 1), .B = 1, .T = 1), .name = "one number each"},
    {MIX(OF(.H = 2, .N = 3), OF(.H = 3, .P = 2, .N = 3, .softplus = 1), .B = 2, .T = 3), .name = "heads differ"},
    {MIX(OF(.H = 1, .N = 2, .V = 4, .decay = GT_DECAY_LOG, .scale = 0.5f), OF(.H = 2, .P = 2, .N = 2, .G = 2), .B = 2,
         .T = 4),
     .name = "log decay, wide values, two groups"},
    {MIX(OF(.H = 2, .N = 3), OF(.H = 2, .P = 3, .N = 2, .softplus = 1, .Dskip_per_channel = 1), .B = 3, .T = 2,
         .state_in_shared = 1),
     .name = "shared states"},
    {MIX(OF(.H = 1, .N = 2), OF(.H = 2, .P = 1, .N = 2), .B = 2, .T = 3), .name = "nothing optional",
     .absent = "wkv6.u ssd.Dskip ssd.dt_bias residual " NO_GAINS " " NO_WKV_Y " " NO_GATE " " NO_STATES},
    {MIX(OF(.H = 2, .N = 2), OF(.H = 2, .P = 2, .N = 2), .B = 2, .T = 3), .name = "no gains", .absent = NO_GAINS},
    {MIX(OF(.H = 2, .N = 4), OF(.H = 4, .P = 2, .N = 2), .B = 2, .T = 3), .name = "no gains, heads differ",
     .absent = NO_GAINS},
    {MIX(OF(.H = 2, .N = 4), OF(.H = 1, .P = 8, .N = 2), .B = 2, .T = 3), .name = "no gains, gaps between heads",
     .absent = NO_GAINS, .layout = TEST_GAPS},
    {MIX(OF(.H = 2, .N = 2), OF(.H = 2, .P = 2, .N = 2), .B = 2, .T = 3), .name = "gradients of gains that are 1",
     .absent = "gain_wkv gain_ssm"},
    {MIX(OF(.H = 2, .N = 2), OF(.H = 2, .P = 2, .N = 2), .B = 2, .T = 3), .name = "no y of wkv6, no residual",
     .absent = "residual " NO_WKV_Y},
    {MIX(OF(.H = 2, .N = 2), OF(.H = 2, .P = 2, .N = 2), .B = 2, .T = 3), .name = "gains of 0",
     .fill = {{"gain_wkv", 1, 0.3, 0, 0.5}, {"gain_ssm", 1, 0.3, 0, 0.5}}},
    {MIX(OF(.H = 2, .N = 3), OF(.H = 2, .P = 3, .N = 3), .B = 2, .T = 0), .name = "no time"},
    {MIX(OF(.H = 1, .N = 64), OF(.H = 1, .P = 64, .N = 64), .B = 0, .T = 70), .name = "no batch"},
    {MIX(OF(.H = 2, .N = 4, .V = 3), OF(.H = 3, .P = 2, .N = 4, .G = 3, .softplus = 1), .B = 2, .T = 70),
     .name = "two chunks", .level = TEST_SMALL},
    {MIX(OF(.H = 1, .N = 4), OF(.H = 2, .P = 2, .N = 3), .B = 1, .T = 140, .segments = 2), .name = "two segments",
     .level = TEST_SMALL},
    {MIX(OF(.H = 2, .N = 32), OF(.H = 1, .P = 64, .N = 64, .softplus = 1), .B = 2, .T = 65),
     .name = "32 beside 64 by 64", .level = TEST_MEDIUM, .absent = NO_GATE},
    {MIX(OF(.H = 1, .N = 64), OF(.H = 1, .P = 64, .N = 64, .softplus = 1), .B = 1, .T = 150, .segments = 2),
     .name = "64 beside 64 by 64, two segments", .level = TEST_MEDIUM, .absent = NO_GATE " " NO_WKV_Y},
    {MIX(OF(.H = 2, .N = 64), OF(.H = 2, .P = 64, .N = 64), .B = 1, .T = 100), .name = "slices of 902",
     .level = TEST_MEDIUM, .layout = TEST_SLICES, .row = 902},
    {MIX(OF(.H = 2, .N = 60, .V = 100), OF(.H = 10, .P = 20, .N = 36), .B = 1, .T = 70), .name = "any sizes, gaps",
     .level = TEST_MEDIUM, .layout = TEST_GAPS},
    {MIX(OF(.H = 4, .N = 32), OF(.H = 2, .P = 64, .N = 64, .softplus = 1), .B = 8, .T = 256), .name = "a trainer's",
     .level = TEST_LARGE, .absent = NO_GATE},
    {MIX(OF(.H = 8, .N = 128), OF(.H = 16, .P = 64, .N = 128, .softplus = 1), .B = 1, .T = 1030), .name = "long",
     .level = TEST_LARGE},
    {.op = NULL}};

static const test_case mixed_packed[] = {
    {MIX_PACKED(OF(.H = 2, .N = 3), OF(.H = 3, .P = 2, .N = 3), .T = 6, .seq_capacity = 3), .name = "three",
     LENGTHS(3, 1, 2)},
    {MIX_PACKED(OF(.H = 1, .N = 2), OF(.H = 2, .P = 1, .N = 2, .softplus = 1), .T = 6, .seq_capacity = 7),
     .name = "empty ones, below the capacities", LENGTHS(0, 2, 0, 1, 2)},
    {MIX_PACKED(OF(.H = 1, .N = 2), OF(.H = 1, .P = 2, .N = 2), .T = 3, .seq_capacity = 2), .name = "none",
     .packed = {0, NULL}},
    {MIX_PACKED(OF(.H = 1, .N = 2), OF(.H = 1, .P = 2, .N = 2), .T = 0, .seq_capacity = 2), .name = "no tokens",
     LENGTHS(0, 0)},
    {MIX_PACKED(OF(.H = 1, .N = 4), OF(.H = 2, .P = 2, .N = 3, .softplus = 1), .T = 205, .seq_capacity = 6),
     .name = "around chunks", .level = TEST_SMALL, LENGTHS(63, 1, 64, 0, 65)},
    {MIX_PACKED(OF(.H = 2, .N = 32), OF(.H = 1, .P = 64, .N = 64, .softplus = 1), .T = 260, .seq_capacity = 9),
     .name = "32 beside 64 by 64", .level = TEST_MEDIUM, .absent = NO_GATE, LENGTHS(1, 15, 0, 63, 0, 129)},
    {.op = NULL}};

/* In the last sizes wkv6 lacks kernels on tensor cores.  P = 20 is no multiple of 8, so forward of wkv6 takes kernels
 * for any size, although N = V = 32 would suit tensor cores. */
static const test_case mixed_sizes[] = {
    {MIX(OF(.H = 2, .N = 32), OF(.H = 1, .P = 64, .N = 64, .softplus = 1)), .name = "sweep", .absent = NO_GATE},
    {MIX(OF(.H = 1, .N = 64), OF(.H = 1, .P = 64, .N = 64, .softplus = 1)), .name = "sweep", .absent = "residual"},
    {MIX(OF(.H = 2, .N = 64), OF(.H = 2, .P = 64, .N = 64, .softplus = 1)), .name = "sweep",
     .absent = NO_GATE " " NO_GAINS},
    {MIX(OF(.H = 1, .N = 128, .decay = GT_DECAY_LOG, .scale = 0.5f), OF(.H = 2, .P = 64, .N = 64, .softplus = 1)),
     .name = "sweep", .absent = NO_GATE " " NO_WKV_Y},
    {MIX(OF(.H = 1, .N = 16), OF(.H = 2, .P = 8, .N = 64, .softplus = 1), .state_in_shared = 1), .name = "sweep",
     .absent = NO_GATE " gain_wkv"},
    {MIX(OF(.H = 5, .N = 32), OF(.H = 8, .P = 20, .N = 36)), .name = "sweep", .absent = NO_GATE},
    {MIX(OF(.H = 1, .N = 20, .V = 12), OF(.H = 3, .P = 4, .N = 20, .softplus = 1)), .name = "sweep"},
    {.op = NULL}};

static const char *const mixed_launched[] = {"wkv6::forward_mixed_kernel",   "wkv6::states_tensor_kernel",
                                             "wkv6::backward_tensor_kernel", "ssd::forward_hopper_kernel",
                                             "ssd::states_hopper_kernel",    "chunk_gradient_hopper_kernel",
                                             "wkv_ssm::unmix_kernel",        NULL};

static const test_case mixed_steps[] = {
    {MIX(OF(.H = 4, .N = 8, .V = 12), OF(.H = 6, .P = 8, .N = 16, .G = 2, .softplus = 1), .B = 4), .name = "steps"},
    {MIX(OF(.H = 2, .N = 64), OF(.H = 2, .P = 64, .N = 128, .softplus = 1), .B = 3), .name = "steps",
     .absent = NO_WKV_Y},
    {MIX(OF(.H = 1, .N = 30, .decay = GT_DECAY_LOG), OF(.H = 6, .P = 5, .N = 33), .B = 2), .name = "steps",
     .absent = NO_GATE " residual " NO_GAINS},
    {.op = NULL}};

static const test_case mixed_spoilt[] = {
    {MIX(OF(.H = 1, .N = 32), OF(.H = 2, .P = 16, .N = 16, .softplus = 1), .dtype = GT_BF16), .name = "spoilt"},
    {.op = NULL}};

static const test_case mixed_many[] = {
    {MIX(OF(.H = 1, .N = 2), OF(.H = 1, .P = 2, .N = 2), .B = 70000, .T = 2), .name = "many"}, {.op = NULL}};

static const test_case mixed_sums[] = {
    {MIX(OF(.H = 1, .N = 2), OF(.H = 1, .P = 2, .N = 2, .softplus = 1), .B = 1, .T = 500000), .name = "long",
     .fill = {{"wkv6.r", 0.5, 1, 0, 0}, {"dmixed", 0.5, 1, 0, 0}, {"ssd.x", 0.5, 1, 0, 0}}},
    {.op = NULL}};

/* Makes the widths of the branches equal, as a mixed call needs them. */
static void fit_widths(test_args *args) {
    gt_wkv_ssm_args *a = &args->wkv_ssm;
    const int64_t V = a->wkv6.V ? a->wkv6.V : a->wkv6.N;
    a->ssd.P = V;
    if (a->wkv6.H <= 1 << 20 && V <= 1 << 20 && a->wkv6.H * V % a->ssd.H == 0)
        a->ssd.P = a->wkv6.H * V / a->ssd.H;
    else
        a->wkv6.H = a->ssd.H;
}

static const gt_op *mixed_table_of(const test_args *args, gt_pass pass) {
    return gt_op_of_wkv_ssm(&args->wkv_ssm, pass);
}

static void draw_mixed(test_random *r, int64_t most, test_case *c) {
    static const char *const absent[] = {"", NO_GATE " wkv6.u residual", "wkv6.state_in ssd.state_in " NO_WKV_Y,
                                         ("gain_wkv " NO_STATES)};
    draw(r, most, c);
    fit_widths(&c->args);
    c->absent = test_pick_absent(r, absent);
}

/* Backward reads the y of forward. */
static void take_y_of_forward(const test_case *c, test_values *in) {
    static const char *const names[] = {"wkv6.y", "ssd.y"};
    test_values forward, out;
    if (!*test_array_of(in, c, "dmixed")) return; /* not backward */
    test_inputs(c, GT_FORWARD, &forward);
    test_run(&test_truth, c, GT_FORWARD, &forward, TEST_ALL, &out);
    for (int i = 0; i < 2; i++) {
        const gt_tensor *t = test_tensor_of(c, names[i]);
        const gt_dtype dtype = test_dtype_of(c, t);
        double *to = *test_array_of(in, c, names[i]), *from = *test_array_of(&out, c, names[i]);
        for (int64_t j = 0; to && from && j < test_count(c, GT_BACKWARD, t); j++)
            to[j] = dtype == GT_F32 ? from[j] : test_round(from[j], dtype);
    }
    test_free(&forward), test_free(&out);
}

static double mixed_formula(const formula *f, int64_t i, int64_t j, int64_t k, int64_t l) {
    const gt_wkv_ssm_args *a = &f->c->args.wkv_ssm;
    const int64_t c = k * (a->wkv6.V ? a->wkv6.V : a->wkv6.N) + l, h = c / a->ssd.P, p = c % a->ssd.P;
    if (formula_sequence_of_token(f, i, j).row < 0) return 0;
    return formula_value(f, "residual", i, j, k, l) + formula_value(f, "gain_wkv", k, l, 0, 0) * wkv6_y(f, i, j, k, l) +
           formula_value(f, "gain_ssm", h, p, 0, 0) * ssd_y(f, i, j, h, p);
}
static const test_formula mixed_formulas[] = {{"mixed", mixed_formula},           {"wkv6.y", wkv6_y},
                                              {"wkv6.state_out", wkv6_state_out}, {"ssd.y", ssd_y},
                                              {"ssd.state_out", ssd_state_out},   {NULL, NULL}};

/* Returns dy of a branch: its gain times dmixed, rounded as the kernels round it.  NULL without dmixed. */
static double *dy_of(const test_case *c, test_values *in, const char *gain) {
    const gt_wkv_ssm_args *a = &c->args.wkv_ssm;
    const double *d = *test_array_of(in, c, "dmixed"), *by = *test_array_of(in, c, gain);
    const int64_t count = test_count(c, GT_BACKWARD, test_tensor_of(c, "dmixed"));
    const int64_t channels = a->wkv6.H * (a->wkv6.V ? a->wkv6.V : a->wkv6.N);
    double *dy = d ? test_array(count, 0) : NULL;
    for (int64_t i = 0; d && i < count; i++)
        dy[i] = test_round(by ? (float)by[i % channels] * (float)d[i] : d[i], a->dtype ? a->dtype : GT_F32);
    return dy;
}

/* The magnitudes of the terms of dw of wkv6.  dw[n] sums the terms d G[n,j] S[n,j] over columns j.  S is a state, G is
 * the gradient of a state, and d is the derivative of the decay.  Kernels round S and G to 16 bits, once in a chunk of
 * tokens.  These errors are independent from column to column, so the magnitude is the root of the sum of squares.
 * Columns of states do not mix.  So dw of a call with only column j is the term of column j.  A GPU measured an error
 * of 1.05 limits without the terms; plain wkv6 has a similar error in the same case. */
static double *mixed_terms(const test_case *c, gt_pass pass, const gt_tensor *t) {
    char absent[256];
    if (pass != GT_BACKWARD || strcmp(t->name, "wkv6.dw")) return NULL;
    test_case one = one_of(c, 0, absent, sizeof absent);
    test_values in, part, column, out;
    const gt_op *op = test_table(&one);
    const int dw = test_find(op, "dw");
    const int64_t count = test_count(c, pass, t), V = one.args.wkv6.V ? one.args.wkv6.V : one.args.wkv6.N;
    double *const terms = test_array(count, 0);
    test_inputs(c, pass, &in);
    take_part(c, &one, 0, &in, &part);
    double *const dy = *test_array_of(&part, &one, "dy") = dy_of(c, &in, "gain_wkv");
    for (int64_t j = 0; j < V; j++) {
        one.args.wkv6.V = V;
        test_copy(&one, pass, &part, &column);
        for (int i = 0; op->tensors[i].name; i++) {
            const int64_t rows = test_count(&one, pass, &op->tensors[i]) / V;
            if (!column.of[i] || !strchr(op->tensors[i].shape, 'V')) continue;
            for (int64_t row = 0; row < rows; row++) column.of[i][row] = column.of[i][row * V + j];
        }
        one.args.wkv6.V = 1;
        test_run(&test_truth, &one, pass, &column, (uint64_t)1 << dw, &out);
        for (int64_t i = 0; i < count; i++) terms[i] += out.of[dw][i] * out.of[dw][i];
        test_free(&column), test_free(&out);
    }
    for (int64_t i = 0; i < count; i++) terms[i] = sqrt(terms[i]);
    test_free(&in), free(dy);
    return terms;
}

/* Forward: y and the states have the bits of a call that does not mix.  Backward: the gradients of both operators have
 * the bits of a call that gets the rounded products of gains and dmixed as dy. */
static void rest_agrees(const test_runner *r, const test_case *c, double tolerance) {
    test_case plain = *c;
    (void)tolerance;
    plain.op = "wkv_ssm";
    plain.layout = TEST_PACKED, plain.in_place = 0;
    test_case other = plain;
    other.op = c->op;
    for (int pass = GT_FORWARD; pass <= GT_BACKWARD; pass++) {
        test_values in, mixed, part = {{NULL}}, alone, same = {{NULL}};
        plain.absent = pass == GT_FORWARD ? "" : c->absent; /* forward must write y of wkv6 */
        test_inputs(&other, (gt_pass)pass, &in);
        test_run(r, &other, (gt_pass)pass, &in, TEST_ALL, &mixed);
        for (int i = 0; test_table(&plain)->tensors[i].name; i++) {
            const int at = test_find(test_table(&other), test_table(&plain)->tensors[i].name);
            if (at >= 0) part.of[i] = in.of[at], same.of[i] = mixed.of[at];
        }
        double *const wkv_dy = dy_of(&other, &in, "gain_wkv"), *const ssm_dy = dy_of(&other, &in, "gain_ssm");
        *test_array_of(&part, &plain, "wkv6.dy") = wkv_dy;
        *test_array_of(&part, &plain, "ssd.dy") = ssm_dy;
        test_run(r, &plain, (gt_pass)pass, &part, TEST_ALL, &alone);
        test_same(r, &plain, (gt_pass)pass, "in a mixed call", &same, &alone, 0);
        test_free(&in), test_free(&mixed), test_free(&alone);
        free(wkv_dy), free(ssm_dy);
    }
}

static const test_property mixed_properties[] = {
    {"the branches have the bits of a call that does not mix", TEST_MEDIUM, rest_agrees}, {NULL, TEST_TINY, NULL}};

#define MIX_ROW(w, s, ...)                                                                                             \
    { {MIX(w, s, __VA_ARGS__), .name = "", .absent = NO_GATE " " NO_STATES}, TEST_BF16 }
static const test_bench_row mixed_host_rows[] = {
    MIX_ROW(OF(.H = 8, .N = 32), OF(.H = 4, .P = 64, .N = 64, .softplus = 1), .B = 8, .T = 256), {{.op = NULL}, 0}};
static const test_bench_row mixed_gpu_rows[] = {
    MIX_ROW(OF(.H = 8, .N = 32), OF(.H = 4, .P = 64, .N = 64, .softplus = 1), .B = 64, .T = 256),
    MIX_ROW(OF(.H = 32, .N = 64), OF(.H = 32, .P = 64, .N = 128, .softplus = 1), .B = 8, .T = 4096),
    {{MIX(OF(.H = 32, .N = 64), OF(.H = 32, .P = 64, .N = 128, .softplus = 1), .B = 8, .T = 4096),
      .name = "no y of wkv6", .absent = NO_GATE " " NO_STATES " " NO_WKV_Y},
     TEST_BF16},
    {{.op = NULL}, 0}};

const test_op test_op_wkv_ssm_mixed = {
    .name = "wkv_ssm_mixed",
    .table = gt_op_wkv_ssm_mixed,
    .args_size = gt_wkv_ssm_args_size,
    .args_bytes = sizeof(gt_wkv_ssm_args),
    .fields = fields,
    .bad_values = mixed_bad_values,
    .cases = mixed_cases,
    .packed = mixed_packed,
    .sizes = mixed_sizes,
    .many = mixed_many,
    .sums = mixed_sums,
    .draw = draw_mixed,
    .fit = fit_widths,
    .table_of = mixed_table_of,
    .formulas = mixed_formulas,
    .host_rows = mixed_host_rows,
    .gpu_rows = mixed_gpu_rows,
    .twin = {wkv_ssm_forward, wkv_ssm_backward, wkv_ssm_step},
    .twin64 = {wkv_ssm_forward64, wkv_ssm_backward64, wkv_ssm_step64},
    .reads_y = AT(wkv_ssm, ssd.reads_y),
    .optional_size = {AT(wkv_ssm, ssd.G), 2},
    .large = {MIX(OF(.H = 5, .N = 64), OF(.H = 5, .P = 64, .N = 64, .softplus = 1), .B = 1, .T = 130, .segments = 1)},
    .set_fill = set_fill,
    .set_regime = set_regime,
    .settle = take_y_of_forward,
    .reach = {64, 64},
    .spoilt = mixed_spoilt,
    .bounds_pairs = 1,
    .kernels = {{0, 1e-5, 3e-3, 1e-3}, {0, 1e-5, 5e-4, 5e-4}, {0, 1e-5, 3e-3, 1e-3}, {0, 1e-5, 1e-3, 1e-3}, 1},
    /* as in wkv6.c, whose kernels compute these outputs */
    .differences = {[GT_FORWARD] = "wkv6.state_out", [GT_BACKWARD] = "wkv6.dstate_in wkv6.dw"},
    .terms = mixed_terms,
    .properties = mixed_properties,
    .steps = mixed_steps,
    .more_times = more_times,
    .launched = mixed_launched,
    .bench_draws = draws,
    .bench_cuts = cuts,
};
