#include "hybrid_generate.h"
#include "hybrid_log.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- printing ------------------------------------------------------------------------------ */

/* Length of the UTF-8 sequence at the first byte, 0 if it is not one that can be shown. */
static int utf8_length(const uint8_t *bytes, int size) {
    uint8_t first = bytes[0];
    int length = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (length == 1) return (first >= 32 && first != 127) || first == '\n' || first == '\t';
    if (!length || first > 0xf4 || length > size) return 0;
    for (int k = 1; k < length; k++)
        if ((bytes[k] & 0xc0) != 0x80) return 0;
    if (first == 0xc2 && bytes[1] < 0xa0) return 0;  /* control characters */
    if (first == 0xe0 && bytes[1] < 0xa0) return 0;  /* too long a form */
    if (first == 0xed && bytes[1] >= 0xa0) return 0; /* surrogates */
    if (first == 0xf0 && bytes[1] < 0x90) return 0;
    if (first == 0xf4 && bytes[1] >= 0x90) return 0;
    return length;
}

/* Whether the pending bytes may be the beginning of a sequence that is not whole yet. */
static int is_beginning(const hy_printer *p) {
    uint8_t first = p->pending[0];
    int length = first < 0xc2 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 1;
    if (p->count >= length) return 0;
    for (int k = 1; k < p->count; k++)
        if ((p->pending[k] & 0xc0) != 0x80) return 0;
    return 1;
}

/* Prints the first character, or byte, that is pending. */
static void print_one(hy_printer *p) {
    int length = utf8_length(p->pending, p->count);
    if (length)
        fwrite(p->pending, 1, (size_t)length, p->out);
    else
        fprintf(p->out, "\\x%02x", p->pending[0]);
    length += !length;
    p->count -= length;
    memmove(p->pending, p->pending + length, (size_t)p->count);
}

gt_status hy_print_byte(hy_printer *p, uint8_t byte) {
    if (p->raw) {
        fputc(byte, p->out);
    } else {
        p->pending[p->count++] = byte;
        while (p->count && !is_beginning(p)) print_one(p);
    }
    return ferror(p->out) ? hy_flush(p->out, "standard output") : GT_OK;
}

void hy_print_rest(hy_printer *p) {
    while (p->count) print_one(p);
}

/* ---- drawing ------------------------------------------------------------------------------- */

typedef struct candidate {
    double logit;
    int token;
} candidate;

/* The likelier first; of equals the first. */
static int compare_candidates(const void *x, const void *y) {
    const candidate *a = x, *b = y;
    if (a->logit != b->logit) return a->logit < b->logit ? 1 : -1;
    return (a->token > b->token) - (a->token < b->token);
}

/* Sets the weights of all but the k likeliest to 0; -1: no memory. */
static int leave_likeliest(const double *logits, int vocab, int64_t k, double *weight) {
    candidate *list = malloc((size_t)vocab * sizeof *list);
    if (!list) return -1;
    for (int v = 0; v < vocab; v++) list[v] = (candidate){logits[v], v};
    qsort(list, (size_t)vocab, sizeof *list, compare_candidates);
    for (int64_t i = k; i < vocab; i++) weight[list[i].token] = 0;
    free(list);
    return 0;
}

int32_t hy_draw(const double *logits, int vocab, double temperature, int64_t top_k, uint64_t *random) {
    int best = 0;
    double sum = 0, u = hy_uniform(random);
    for (int v = 1; v < vocab; v++)
        if (logits[v] > logits[best]) best = v;
    if (temperature == 0) return best;
    double *weight = malloc((size_t)vocab * sizeof *weight);
    if (!weight) return -1;
    for (int v = 0; v < vocab; v++) weight[v] = exp((logits[v] - logits[best]) / temperature);
    if (top_k && leave_likeliest(logits, vocab, top_k, weight)) {
        free(weight);
        return -1;
    }
    for (int v = 0; v < vocab; v++) sum += weight[v];
    for (int v = 0; v < vocab; v++) {
        u -= weight[v] / sum;
        if (u >= 0) continue;
        best = v;
        break;
    }
    free(weight);
    return best;
}

/* A token as text: its byte, its number and a space, or what ends a document. */
static gt_status print_token(hy_printer *printer, const hy_text *vocabulary, int32_t token) {
    gt_status status = GT_OK;
    if (vocabulary->is_numbers) {
        fprintf(printer->out, "%d ", (int)token);
        return ferror(printer->out) ? hy_flush(printer->out, "standard output") : GT_OK;
    }
    if (token != vocabulary->end_symbol) return hy_print_byte(printer, vocabulary->byte_of[token]);
    for (const char *at = vocabulary->end_text; *at && status == GT_OK; at++)
        status = hy_print_byte(printer, (uint8_t)*at);
    return status;
}

/* ---- both ---------------------------------------------------------------------------------- */

enum { UNTIMED = 2 }; /* steps: the first call of a device loads its kernels, and the second one is recorded */

/* A prompt of `length` tokens and what is drawn after it. */
typedef struct generation {
    hy_model *model;
    const hy_text *vocabulary;
    const hy_sampling *sampling;
    hy_printer *printer;
    int samples, length;
    double *logits;   /* [samples, vocab] */
    int32_t *prompt;  /* [samples, length], the same for each */
    int32_t *drawn;   /* [count, samples] */
    uint64_t *random; /* [samples] */
} generation;

static gt_status print_tokens(const generation *g, const int32_t *token, int64_t count, int64_t step) {
    gt_status status = GT_OK;
    for (int64_t i = 0; i < count && status == GT_OK; i++)
        status = print_token(g->printer, g->vocabulary, token[i * step]);
    return status;
}

/* Draws a token of each sample. */
static gt_status draw(const generation *g, int32_t *token) {
    const hy_sampling *s = g->sampling;
    const int vocab = g->vocabulary->vocab;
#ifdef _OPENMP
#pragma omp parallel for if (g->samples * (int64_t)vocab > 20000)
#endif
    for (int b = 0; b < g->samples; b++)
        token[b] = hy_draw(g->logits + (int64_t)b * vocab, vocab, s->temperature, s->top_k, &g->random[b]);
    for (int b = 0; b < g->samples; b++) {
        if (token[b] < 0) return hy_fail(GT_ERROR_MEMORY, "no memory to draw from %d tokens", vocab);
        if (!isfinite(g->logits[(int64_t)b * vocab + token[b]]))
            return hy_fail(GT_ERROR_VALUE, "the model's predictions are not finite");
    }
    return GT_OK;
}

/* Draws after the prompt, whose logits are given. */
static gt_status go_on(const generation *g, hy_pace *pace) {
    const int64_t count = g->sampling->count;
    double start = 0;
    gt_status status = GT_OK;
    for (int64_t i = 0; i < count && status == GT_OK; i++) {
        int32_t *token = g->drawn + i * g->samples;
        if (i == UNTIMED) start = hy_now();
        status = draw(g, token);
        if (status == GT_OK && g->printer && g->samples == 1) status = print_tokens(g, token, 1, 1);
        if (status == GT_OK && i + 1 < count) status = hy_model_feed(g->model, token, 1, g->logits);
    }
    if (count > UNTIMED + 1) *pace = (hy_pace){count - 1 - UNTIMED, hy_now() - start};
    return status;
}

/* Encodes the prompt, once for each sample. */
static gt_status read_prompt(generation *g) {
    gt_status status = hy_text_encode(g->vocabulary, g->sampling->prompt, g->prompt, &g->length, 0);
    if (status == GT_OK && g->length == 0) g->prompt[g->length++] = g->sampling->first;
    for (int b = 1; b < g->samples && status == GT_OK; b++)
        memcpy(g->prompt + b * g->length, g->prompt, (size_t)g->length * sizeof *g->prompt);
    return status;
}

static gt_status print_samples(const generation *g) {
    gt_status status = GT_OK;
    for (int b = 0; b < g->samples && status == GT_OK; b++) {
        fprintf(g->printer->out, "==> sample %d of %d <==\n", b + 1, g->samples);
        status = print_tokens(g, g->prompt, g->length, 1);
        if (status == GT_OK) status = print_tokens(g, g->drawn + b, g->sampling->count, g->samples);
        hy_print_rest(g->printer);
        fputc('\n', g->printer->out);
    }
    return status;
}

static gt_status generate(generation *g, hy_pace *pace) {
    for (int b = 0; b < g->samples; b++) g->random[b] = g->sampling->seed + (uint64_t)b;
    gt_status status = read_prompt(g);
    if (status == GT_OK) status = hy_model_reset(g->model);
    if (status == GT_OK) status = hy_model_feed(g->model, g->prompt, g->length, g->logits);
    if (status == GT_OK && g->printer && g->samples == 1) status = print_tokens(g, g->prompt, g->length, 1);
    if (status == GT_OK) status = go_on(g, pace);
    if (!g->printer) return status;
    if (status == GT_OK && g->samples > 1) status = print_samples(g);
    hy_print_rest(g->printer);
    return status;
}

gt_status hy_generate(hy_model *model, const hy_text *vocabulary, const hy_sampling *s, hy_printer *printer,
                      hy_pace *pace) {
    const size_t samples = (size_t)hy_model_config(model)->samples, room = strlen(s->prompt) + 1;
    const size_t drawn = (size_t)s->count + 1;
    generation g = {model, vocabulary, s, printer, (int)samples, .prompt = malloc(samples * room * sizeof *g.prompt)};
    hy_pace unused;
    g.logits = malloc(samples * (size_t)vocabulary->vocab * sizeof *g.logits);
    g.drawn = malloc(samples * drawn * sizeof *g.drawn);
    g.random = malloc(samples * sizeof *g.random);
    if (!pace) pace = &unused;
    *pace = (hy_pace){0, 0};
    gt_status status = g.logits && g.prompt && g.drawn && g.random
                           ? generate(&g, pace)
                           : hy_fail(GT_ERROR_MEMORY, "no memory for %zu samples of %zu tokens", samples, drawn);
    free(g.logits);
    free(g.prompt);
    free(g.drawn);
    free(g.random);
    return status;
}
