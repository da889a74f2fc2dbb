#include "hybrid_generate.h"
#include "hybrid_log.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- printing ------------------------------------------------------------------------------ */

/* Returns the length of the UTF-8 character at the start of `bytes`; 0 if it is invalid or not printable. */
static int utf8_length(const uint8_t *bytes, int size) {
    uint8_t first = bytes[0];
    int length = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (length == 1) return (first >= 32 && first != 127) || first == '\n' || first == '\t';
    if (!length || first > 0xf4 || length > size) return 0;
    for (int k = 1; k < length; k++)
        if ((bytes[k] & 0xc0) != 0x80) return 0;
    if (first == 0xc2 && bytes[1] < 0xa0) return 0;  /* control characters */
    if (first == 0xe0 && bytes[1] < 0xa0) return 0;  /* overlong form */
    if (first == 0xed && bytes[1] >= 0xa0) return 0; /* surrogates */
    if (first == 0xf0 && bytes[1] < 0x90) return 0;
    if (first == 0xf4 && bytes[1] >= 0x90) return 0;
    return length;
}

/* Returns whether the pending bytes may be the beginning of an incomplete UTF-8 character. */
static int is_beginning(const hy_printer *p) {
    uint8_t first = p->pending[0];
    int length = first < 0xc2 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 1;
    if (p->count >= length) return 0;
    for (int k = 1; k < p->count; k++)
        if ((p->pending[k] & 0xc0) != 0x80) return 0;
    return 1;
}

/* Prints the first pending character, or the first pending byte if it begins no character. */
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

/* Orders candidates by falling logit; if two logits are equal, the smaller token comes first. */
static int compare_candidates(const void *x, const void *y) {
    const candidate *a = x, *b = y;
    if (a->logit != b->logit) return a->logit < b->logit ? 1 : -1;
    return (a->token > b->token) - (a->token < b->token);
}

/* Implements top-k and top-p.  Top-k keeps the weights of the k likeliest tokens (k = 0: of all tokens).  From these,
 * top-p keeps as few of the likeliest as have a sum of at least p times the sum of all weights.  The other weights
 * become 0.  Returns -1 if memory is short. */
static int leave_likeliest(const double *logits, int vocab, int64_t k, double p, double *weight) {
    candidate *list = malloc((size_t)vocab * sizeof *list);
    if (!list) return -1;
    double sum = 0, reached = 0;
    for (int v = 0; v < vocab; v++) list[v] = (candidate){logits[v], v};
    qsort(list, (size_t)vocab, sizeof *list, compare_candidates);
    for (int64_t i = 0; i < vocab; i++) {
        if (k && i >= k) weight[list[i].token] = 0;
        sum += weight[list[i].token];
    }
    for (int64_t i = 0; i < vocab && p > 0 && p < 1; i++) {
        const double own = weight[list[i].token];
        if (reached >= p * sum) weight[list[i].token] = 0;
        reached += own;
    }
    free(list);
    return 0;
}

int32_t hy_draw(const double *logits, int vocab, double temperature, int64_t top_k, double top_p, uint64_t *random) {
    int best = 0;
    double sum = 0, u = hy_uniform(random);
    for (int v = 1; v < vocab; v++)
        if (logits[v] > logits[best]) best = v;
    if (temperature == 0) return best;
    double *weight = malloc((size_t)vocab * sizeof *weight);
    if (!weight) return -1;
    for (int v = 0; v < vocab; v++) weight[v] = exp((logits[v] - logits[best]) / temperature);
    if ((top_k || (top_p > 0 && top_p < 1)) && leave_likeliest(logits, vocab, top_k, top_p, weight)) {
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

/* Prints a token.  It prints the token's byte, or its text in the table, or its number and a space, or the separator
 * of documents. */
static gt_status print_token(hy_printer *printer, const hy_text *vocabulary, int32_t token) {
    gt_status status = GT_OK;
    const hy_table *table = &vocabulary->table;
    for (int64_t i = table->start ? table->start[token] : 0; table->start && i < table->start[token + 1]; i++)
        if ((status = hy_print_byte(printer, table->bytes[i])) != GT_OK) return status;
    if (table->start) return GT_OK;
    if (vocabulary->is_numbers) {
        fprintf(printer->out, "%d ", (int)token);
        return ferror(printer->out) ? hy_flush(printer->out, "standard output") : GT_OK;
    }
    if (token != vocabulary->end_symbol) return hy_print_byte(printer, vocabulary->byte_of[token]);
    for (const char *at = vocabulary->end_text; *at && status == GT_OK; at++)
        status = hy_print_byte(printer, (uint8_t)*at);
    return status;
}

/* ---- generation ---------------------------------------------------------------------------- */

enum { UNTIMED = 2 }; /* number of steps that are not timed: the first loads the kernels, the second is recorded */

/* A prompt of `length` tokens, and the tokens that were drawn after it. */
typedef struct generation {
    hy_model *model;
    const hy_text *vocabulary;
    const hy_sampling *sampling;
    hy_printer *printer;
    int samples, length;
    double *logits;   /* [samples, vocab] */
    int32_t *prompt;  /* [samples, length], the same tokens for each sample */
    int32_t *drawn;   /* [count, samples] */
    uint64_t *random; /* [samples] states of the random generators */
    uint8_t *seen;    /* [samples, vocab] 1: the token has occurred; NULL: no penalty */
    int32_t *stop;    /* [stops] the stop text, in units: bytes of a text, or tokens that are numbers */
    int64_t stops;
    int32_t *tail;      /* [samples, stops] the last units of each sample; -1 in places before its first unit */
    int64_t *length_of; /* [samples] number of tokens when the sample ended; -1: it has not ended */
} generation;

/* Appends a unit to the tail of sample b.  Returns 1 if the sample now ends with the stop text. */
static int reaches_stop(const generation *g, int b, int32_t unit) {
    int32_t *tail = g->tail + b * g->stops;
    memmove(tail, tail + 1, (size_t)(g->stops - 1) * sizeof *tail);
    tail[g->stops - 1] = unit;
    return !memcmp(tail, g->stop, (size_t)g->stops * sizeof *tail);
}

/* Stores a token that was drawn for sample b. */
static void note_token(const generation *g, int b, int32_t token, int64_t place) {
    const hy_text *x = g->vocabulary;
    int ends = 0;
    if (g->seen) g->seen[(int64_t)b * x->vocab + token] = 1;
    if (!g->stops || g->length_of[b] >= 0) return;
    if (x->is_numbers && !x->table.start) {
        ends = reaches_stop(g, b, token);
    } else if (x->table.start) {
        for (int64_t i = x->table.start[token]; i < x->table.start[token + 1]; i++)
            ends |= reaches_stop(g, b, x->table.bytes[i]);
    } else if (token != x->end_symbol) {
        ends = reaches_stop(g, b, x->byte_of[token]);
    } else {
        for (const char *at = x->end_text; *at; at++) ends |= reaches_stop(g, b, (uint8_t)*at);
    }
    if (ends) g->length_of[b] = place + 1;
}

static int all_ended(const generation *g) {
    for (int b = 0; b < g->samples; b++)
        if (g->length_of[b] < 0) return 0;
    return 1;
}

static void penalise(const generation *g, int b) {
    const int vocab = g->vocabulary->vocab;
    double *logits = g->logits + (int64_t)b * vocab;
    const uint8_t *seen = g->seen + (int64_t)b * vocab;
    for (int v = 0; v < vocab; v++)
        if (seen[v]) logits[v] = logits[v] > 0 ? logits[v] / g->sampling->penalty : logits[v] * g->sampling->penalty;
}

static gt_status print_tokens(const generation *g, const int32_t *token, int64_t count, int64_t step) {
    gt_status status = GT_OK;
    for (int64_t i = 0; i < count && status == GT_OK; i++)
        status = print_token(g->printer, g->vocabulary, token[i * step]);
    return status;
}

/* Draws a token for each sample. */
static gt_status draw(const generation *g, int32_t *token) {
    const hy_sampling *s = g->sampling;
    const int vocab = g->vocabulary->vocab;
#ifdef _OPENMP
#pragma omp parallel for if (g->samples * (int64_t)vocab > 20000)
#endif
    for (int b = 0; b < g->samples; b++) {
        if (g->seen) penalise(g, b);
        token[b] = hy_draw(g->logits + (int64_t)b * vocab, vocab, s->temperature, s->top_k, s->top_p, &g->random[b]);
    }
    for (int b = 0; b < g->samples; b++) {
        if (token[b] < 0) return hy_fail(GT_ERROR_MEMORY, "no memory to draw from %d tokens", vocab);
        if (!isfinite(g->logits[(int64_t)b * vocab + token[b]]))
            return hy_fail(GT_ERROR_VALUE, "the model's predictions are not finite");
    }
    return GT_OK;
}

/* Draws all tokens after the prompt.  On entry g->logits holds the logits after the prompt's last token. */
static gt_status go_on(const generation *g, hy_pace *pace) {
    const int64_t count = g->sampling->count;
    int64_t done = 0; /* tokens drawn for each sample */
    double start = 0;
    gt_status status = GT_OK;
    for (int64_t i = 0; i < count && status == GT_OK; i++) {
        int32_t *token = g->drawn + i * g->samples;
        done = i + 1;
        if (i == UNTIMED) start = hy_now();
        status = draw(g, token);
        if (status == GT_OK && g->printer && g->samples == 1) status = print_tokens(g, token, 1, 1);
        if (status == GT_OK && g->printer && g->samples == 1 && g->printer->streams)
            status = hy_flush(g->printer->out, "standard output");
        for (int b = 0; b < g->samples && status == GT_OK; b++) note_token(g, b, token[b], i);
        if (status == GT_OK && all_ended(g)) break;
        if (status == GT_OK && i + 1 < count) status = hy_model_feed(g->model, token, 1, g->logits);
    }
    if (done > UNTIMED + 1) *pace = (hy_pace){done - 1 - UNTIMED, hy_now() - start};
    return status;
}

/* Encodes the prompt, and copies it for each sample. */
static gt_status read_prompt(generation *g) {
    gt_status status = hy_text_encode(g->vocabulary, g->sampling->prompt, g->prompt, &g->length, 0);
    if (status == GT_OK && g->length == 0) g->prompt[g->length++] = g->sampling->first;
    for (int i = 0; i < g->length * (status == GT_OK); i++)
        for (int b = 0; b < g->samples && g->seen; b++) g->seen[(int64_t)b * g->vocabulary->vocab + g->prompt[i]] = 1;
    for (int b = 1; b < g->samples && status == GT_OK; b++)
        memcpy(g->prompt + b * g->length, g->prompt, (size_t)g->length * sizeof *g->prompt);
    return status;
}

static gt_status print_samples(const generation *g) {
    gt_status status = GT_OK;
    for (int b = 0; b < g->samples && status == GT_OK; b++) {
        fprintf(g->printer->out, "==> sample %d of %d <==\n", b + 1, g->samples);
        status = print_tokens(g, g->prompt, g->length, 1);
        if (status == GT_OK)
            status =
                print_tokens(g, g->drawn + b, g->length_of[b] < 0 ? g->sampling->count : g->length_of[b], g->samples);
        hy_print_rest(g->printer);
        fputc('\n', g->printer->out);
    }
    return status;
}

/* Encodes the stop text. */
static gt_status read_stop(generation *g) {
    const char *stop = g->sampling->stop ? g->sampling->stop : "";
    const hy_text *x = g->vocabulary;
    int count = 0;
    gt_status status = GT_OK;
    if (x->is_numbers && !x->table.start) {
        status = hy_text_encode(x, stop, g->stop, &count, 0);
        if (status != GT_OK) return hy_fail(status, "stop: %s", hy_last_error());
    } else {
        for (; stop[count]; count++) g->stop[count] = (uint8_t)stop[count];
    }
    g->stops = count;
    for (int64_t i = 0; i < g->samples * g->stops; i++) g->tail[i] = -1;
    for (int b = 0; b < g->samples; b++) g->length_of[b] = -1;
    return GT_OK;
}

static gt_status generate(generation *g, hy_pace *pace) {
    for (int b = 0; b < g->samples; b++) g->random[b] = g->sampling->seed + (uint64_t)b;
    gt_status status = read_stop(g);
    if (status == GT_OK) status = read_prompt(g);
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
    const size_t drawn = (size_t)s->count + 1, stops = (s->stop ? strlen(s->stop) : 0) + 1;
    const int has_penalty = s->penalty > 0 && s->penalty != 1;
    generation g = {model, vocabulary, s, printer, (int)samples, .prompt = malloc(samples * room * sizeof *g.prompt)};
    hy_pace unused;
    g.logits = malloc(samples * (size_t)vocabulary->vocab * sizeof *g.logits);
    g.drawn = malloc(samples * drawn * sizeof *g.drawn);
    g.random = malloc(samples * sizeof *g.random);
    g.seen = has_penalty ? calloc(samples, (size_t)vocabulary->vocab) : NULL;
    g.stop = malloc(stops * sizeof *g.stop);
    g.tail = malloc(samples * stops * sizeof *g.tail);
    g.length_of = malloc(samples * sizeof *g.length_of);
    if (!pace) pace = &unused;
    *pace = (hy_pace){0, 0};
    gt_status status =
        g.logits && g.prompt && g.drawn && g.random && g.stop && g.tail && g.length_of && (g.seen || !has_penalty)
            ? generate(&g, pace)
            : hy_fail(GT_ERROR_MEMORY, "no memory for %zu samples of %zu tokens", samples, drawn);
    free(g.logits);
    free(g.prompt);
    free(g.drawn);
    free(g.random);
    free(g.seen), free(g.stop), free(g.tail), free(g.length_of);
    return status;
}
