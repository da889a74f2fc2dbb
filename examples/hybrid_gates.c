#include "hybrid_gates.h"
#include <math.h>
#include <stdarg.h>
#include <string.h>

/* PASS if pass holds, else WARN if warn holds, else FAIL; so a NaN in the conditions fails. */
static hy_gate judge(const char *name, int pass, int warn, const char *bounds, const char *format,
                     ...) {
    hy_gate gate = {name, pass ? HY_PASS : warn ? HY_WARN : HY_FAIL, "", bounds};
    va_list list;
    va_start(list, format);
    vsnprintf(gate.value, sizeof gate.value, format, list);
    va_end(list);
    return gate;
}

static int within(double x, double low, double high) {
    return x >= low && x <= high;
}

/* ---- G0 ------------------------------------------------------------------------------------- */

/* Memory of the backend: zeros to read, room to write, and what operators ask for. */
typedef struct scratch {
    void *in, *out, *workspace;
    size_t workspace_bytes;
} scratch;
enum { SCRATCH = 1 << 16 }; /* bytes of in and of out; more than any tensor below */

static gt_status grow_workspace(hy_backend *b, scratch *s, size_t bytes) {
    if (bytes <= s->workspace_bytes) return GT_OK;
    b->release(b, s->workspace);
    s->workspace = NULL;
    s->workspace_bytes = bytes;
    return b->alloc(b, &s->workspace, bytes);
}

/* Runs the forward pass of one operator on a few zeros. */
#define TRY(op, ...)                                                                               \
    static gt_status try_##op(hy_backend *b, scratch *s) {                                         \
        gt_##op##_args a = {.dtype = b->dtype, __VA_ARGS__};                                       \
        gt_workspace need = {0, 0, 0, 0};                                                          \
        gt_status status = b->op##_workspace(b, &a, &need);                                        \
        if (status == GT_OK) status = grow_workspace(b, s, need.forward);                          \
        a.workspace = s->workspace;                                                                \
        a.workspace_bytes = s->workspace_bytes;                                                    \
        return status == GT_OK ? b->op##_forward(b, &a) : status;                                  \
    }
TRY(wkv6, .B = 1, .T = 2, .H = 1, .N = 16, .r = s->in, .k = s->in, .v = s->in, .w = s->in,
    .y = s->out)
TRY(ssd, .B = 1, .T = 2, .H = 1, .P = 16, .N = 16, .x = s->in, .dt = s->in, .A = s->in, .Bm = s->in,
    .Cm = s->in, .y = s->out)
TRY(conv1d, .B = 1, .T = 2, .D = 16, .W = 4, .x = s->in, .weight = s->in, .y = s->out)
TRY(rmsnorm_linear, .M = 2, .D = 16, .O = 16, .x = s->in, .weight = s->in, .y = s->out)
TRY(norm_mix, .M = 2, .D = 16, .a = s->in, .b = s->in, .y = s->out)
TRY(norm_gate, .M = 2, .D = 16, .x = s->in, .y = s->out)
#undef TRY

hy_gate hy_gate_operators(hy_backend *b) {
    static gt_status (*const operators[])(hy_backend *, scratch *) = {
        try_wkv6, try_ssd, try_conv1d, try_rmsnorm_linear, try_norm_mix, try_norm_gate};
    enum { COUNT = sizeof operators / sizeof operators[0] };
    scratch s = {NULL, NULL, NULL, 0};
    int good = 0;
    if (b->alloc(b, &s.in, SCRATCH) == GT_OK && b->alloc(b, &s.out, SCRATCH) == GT_OK &&
        b->zero(b, s.in, SCRATCH) == GT_OK)
        for (int i = 0; i < COUNT; i++)
            good += operators[i](b, &s) == GT_OK && b->synchronize(b) == GT_OK;
    b->release(b, s.in);
    b->release(b, s.out);
    b->release(b, s.workspace);
    return judge("G0", good == COUNT, 0, "all", "%d of %d operators run on %s", good, (int)COUNT,
                 b->name);
}

/* ---- G1 to G4 ------------------------------------------------------------------------------- */

hy_gate hy_gate_forward(const hy_probe *p, int64_t counted, int64_t targets) {
    int finite = p->finite && isfinite(p->loss);
    return judge("G1", finite && counted == targets, 0, "finite, all targets",
                 "forward %s, %lld of %lld targets", finite ? "finite" : "not finite",
                 (long long)counted, (long long)targets);
}

hy_gate hy_gate_entropy(double entropy, int vocab) {
    double top = log(vocab), relative = entropy / top;
    int absolute = within(top, 2, 5);
    return judge("G2", relative >= 0.9 && (!absolute || within(entropy, 2, 5)),
                 relative >= 0.5 && (!absolute || within(entropy, 1, 8)),
                 absolute ? "2 to 5, >0.9 ln V (FAIL <1, >8, <0.5 ln V)"
                          : ">0.9 ln V (FAIL <0.5 ln V)",
                 "entropy %.3f nats, %.3f ln %d", entropy, relative, vocab);
}

hy_gate hy_gate_training(int64_t steps, double first_loss, double loss, double norm) {
    int falls = loss < first_loss;
    return judge("G3", falls && within(norm, 0.5, 1.5), falls && norm <= 5,
                 "falls, 0.5 to 1.5 (FAIL rises, >5)",
                 "loss %.3f to %.3f in %lld steps, gradient %.2f", first_loss, loss,
                 (long long)steps, norm);
}

hy_gate hy_gate_states(const hy_probe *p) {
    int moves = p->state_cosine[0] < 0.99 && p->state_cosine[1] < 0.99;
    int differs = p->activation_variance > 1e-6;
    return judge("G3.5", moves && differs, moves || differs, "<0.99, >1e-6 (FAIL neither)",
                 "cosine RWKV %.3f, Mamba %.3f, variance %.2g", p->state_cosine[0],
                 p->state_cosine[1], p->activation_variance);
}

hy_gate hy_gate_balance(double ratio) {
    return judge("G4", within(ratio, 0.3, 3), within(ratio, 0.1, 10), "0.3 to 3 (FAIL <0.1, >10)",
                 "RWKV / Mamba gradient %.3f", ratio);
}

void hy_gates_print(const hy_screen *s, const hy_gate *gates, int count) {
    enum { INDENT = 14, VALUE = 48 };
    static const char *const verdicts[] = {"PASS", "WARN", "FAIL"};
    static const hy_colour colours[] = {HY_GREEN, HY_YELLOW, HY_RED};
    int fits = 1;
    for (int i = 0; i < count; i++)
        fits &= INDENT + VALUE + 2 + (int)strlen(gates[i].bounds) <= s->columns;
    for (const hy_gate *g = gates; g < gates + count; g++) {
        fprintf(s->out, "  %s%s%s  %-4s  ", hy_screen_colour(s, colours[g->verdict]),
                verdicts[g->verdict], hy_screen_plain(s), g->name);
        if (fits) {
            fprintf(s->out, "%-*s  %s\n", VALUE, g->value, g->bounds);
        } else {
            hy_print_wrapped(s->out, g->value, INDENT, INDENT, hy_screen_width(s));
            fprintf(s->out, "%*s", INDENT, "");
            hy_print_wrapped(s->out, g->bounds, INDENT, INDENT, hy_screen_width(s));
        }
    }
}
