/* Generates text: draws tokens from a model and prints them. */
#ifndef HYBRID_GENERATE_H
#define HYBRID_GENERATE_H

#include "hybrid_data.h"
#include "hybrid_model.h"
#include <stdio.h>

/* Prints a text byte by byte while it is generated.  Tokens without bytes are printed as numbers. */
typedef struct hy_printer {
    FILE *out;
    int raw;            /* 1: prints bytes as they are; 0: prints \xNN for bytes that a terminal should not get */
    int streams;        /* 1: flushes after every token */
    uint8_t pending[4]; /* first bytes of an incomplete UTF-8 character */
    int count;
} hy_printer;

/* Prints one byte.  Fails if the stream fails.  If this function or one below fails, hy_last_error() has the reason. */
gt_status hy_print_byte(hy_printer *printer, uint8_t byte);
/* Prints the pending bytes. */
void hy_print_rest(hy_printer *printer);

typedef struct hy_sampling {
    const char *prompt; /* start of every sample */
    int32_t first;      /* the token to start from if the prompt is empty */
    int64_t count;      /* bytes to draw for each sample */
    double temperature; /* 0: always takes the likeliest token */
    int64_t top_k;      /* draws from the top_k likeliest tokens; 0: from all */
    double top_p;   /* narrows the top_k tokens to the fewest with a probability of at least top_p in all; 0, 1: off */
    double penalty; /* divides positive logits of tokens that occurred, multiplies negative ones; 0, 1: off */
    const char *stop; /* a sample ends after this text or list of tokens; NULL or "": only after `count` */
    uint64_t seed;    /* seed of the first sample; the next samples have seed + 1, seed + 2, ... */
} hy_sampling;

/* The speed of decoding.  The first two steps are not timed, because a device loads kernels in the first and records
 * a graph in the second. */
typedef struct hy_pace {
    int64_t steps; /* number of timed steps, each of one token per sample; 0: too few steps to time any */
    double seconds;
} hy_pace;

/* Draws a token from softmax(logits / temperature), restricted to some tokens.  First only the top_k likeliest
 * tokens stay, then the fewest of these that together have probability top_p.  If two logits are equal, the first
 * token counts as likelier.  Returns -1 if memory is short. */
int32_t hy_draw(const double *logits, int vocab, double temperature, int64_t top_k, double top_p, uint64_t *random);

/* Draws as many samples as the model decodes at once, and prints the prompt and its continuation.  A single sample
 * appears while it is drawn.  Several samples appear at the end, each below a line with its number.  printer = NULL
 * prints nothing; pace may be NULL.  The function overwrites the model's decoding states. */
gt_status hy_generate(hy_model *model, const hy_text *vocabulary, const hy_sampling *sampling, hy_printer *printer,
                      hy_pace *pace);

#endif
