/* Text from a model: drawing its bytes, and printing them. */
#ifndef HYBRID_GENERATE_H
#define HYBRID_GENERATE_H

#include "hybrid_data.h"
#include "hybrid_model.h"
#include <stdio.h>

/* Prints text byte by byte, so that it can be read as it is made; of tokens that are numbers, those. */
typedef struct hy_printer {
    FILE *out;
    int raw;            /* 1: bytes as they are; 0: \xNN for bytes that a terminal should not get */
    int streams;        /* 1: every token goes out when it is drawn */
    uint8_t pending[4]; /* bytes of a character that is not whole yet */
    int count;
} hy_printer;

/* Fails if the stream does.  The reason of a failure, here and below, is in hy_last_error(). */
gt_status hy_print_byte(hy_printer *printer, uint8_t byte);
/* Prints what is pending. */
void hy_print_rest(hy_printer *printer);

typedef struct hy_sampling {
    const char *prompt; /* of every sample */
    int32_t first;      /* the token to start from if the prompt is empty */
    int64_t count;      /* bytes to draw for each sample */
    double temperature; /* 0: always the likeliest */
    int64_t top_k;      /* draw from so many of the likeliest; 0: from all */
    double top_p;       /* and from the fewest of them with this probability together; 0 or 1: from all */
    double
        penalty; /* divides the logits above 0 of tokens that are there already, multiplies those below; 0 or 1: no */
    const char *stop; /* a sample ends behind this text, or list of tokens; NULL or "": at `count` */
    uint64_t seed;    /* of the first sample; the next ones have seed + 1, seed + 2, ... */
} hy_sampling;

/* How fast tokens came.  The first two steps are left out, since a device records the second one. */
typedef struct hy_pace {
    int64_t steps; /* that were timed: tokens of each sample; 0: there were too few */
    double seconds;
} hy_pace;

/* A token drawn from softmax(logits / temperature) over the top_k likeliest, and of these over the fewest that have the
 * probability top_p together; of equals the first; -1: no memory. */
int32_t hy_draw(const double *logits, int vocab, double temperature, int64_t top_k, double top_p, uint64_t *random);

/* Draws as many samples as the model decodes at once.  Prints the prompt and its continuation: a single sample as it is
 * drawn; several samples at the end, each below a line with its number.  printer NULL:
 * nothing is printed.  pace may be NULL.  The model's decoding sequences are used up. */
gt_status hy_generate(hy_model *model, const hy_text *vocabulary, const hy_sampling *sampling, hy_printer *printer,
                      hy_pace *pace);

#endif
