/* The text of hybrid_train: loading, vocabulary, documents, and the batches cut from it.
 *
 * The vocabulary is the set of bytes that occur; a token is the number of its byte.  The first nine
 * tenths of the text are for training, the rest is held out.  A window predicts the `length` tokens
 * from some position on; its inputs are the same tokens one place earlier. */
#ifndef HYBRID_DATA_H
#define HYBRID_DATA_H

#include "gt_kernels.h"

typedef struct hy_text {
    uint8_t *token;       /* [size] */
    int64_t size, train;  /* tokens in all; those before `train` are for training */
    int vocab;            /* number of different bytes */
    uint8_t byte_of[256]; /* [vocab] in rising order */
    int token_of[256];    /* -1 for a byte that does not occur */
    int64_t *document;    /* [documents + 1] first token of each document, then size */
    int64_t documents;
    double entropy_train;    /* nats per token of the training part under its own frequencies */
    double entropy_held_out; /* of the held-out part, frequencies from training (each count + 1) */
} hy_text;

/* Most bytes that are read from a pipe or a device; a regular file may be longer. */
#define HY_STREAM_MAX ((size_t)1 << 30)

/* Reads a file.  separator: what ends a document; "" = two or more blank lines, or a form feed.
 * The reason of a failure, here and below, is in hy_last_error(). */
gt_status hy_text_load(hy_text *text, const char *path, const char *separator);
/* The same from memory. */
gt_status hy_text_from_bytes(hy_text *text, const void *bytes, int64_t size, const char *separator);
void hy_text_free(hy_text *text);

/* Gives the text another vocabulary, `count` bytes in rising order; fails, naming the byte, if one
 * of the text is not among them. */
gt_status hy_text_recode(hy_text *text, const uint8_t *bytes, int count);
/* A text of which only the vocabulary is known: fit for hy_text_encode. */
void hy_text_vocabulary(hy_text *text, const uint8_t *bytes, int count);

/* Fails if the text is too short for one window of training. */
gt_status hy_text_fits(const hy_text *text, int64_t length);

/* Tokens of a string, token[strlen(string)]; fails if it has a byte that the text has not.
 * of_model: the vocabulary is a model's, for the message. */
gt_status hy_text_encode(const hy_text *text, const char *string, int32_t *token, int of_model);

typedef struct hy_batch {
    int64_t rows, length;
    int32_t *input, *target; /* [rows, length]; a target of -1 is not counted */
    int32_t *keep;           /* [rows] 1: goes on with the row's states, 0: starts from zero states */
    int64_t targets;         /* how many are counted */
} hy_batch;

gt_status hy_batch_create(hy_batch *batch, int64_t rows, int64_t length);
void hy_batch_free(hy_batch *batch);

/* splitmix64 */
static inline uint64_t hy_random(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
/* Uniform in [0, 1). */
static inline double hy_uniform(uint64_t *state) { return (double)(hy_random(state) >> 11) / 9007199254740992.0; }

/* Independent windows at random places of the training part. */
void hy_batch_random(hy_batch *batch, const hy_text *text, uint64_t *random);

/* Tracks: the training part cut into one equal piece per row, each read in order, over and over.  A
 * window ends early at the end of a document or of its track, and the next one starts from a zero
 * state; so no state crosses a document end. */
typedef struct hy_tracks {
    int64_t rows;
    int64_t *first;    /* [rows + 1] first token predicted by each track */
    int64_t *next;     /* [rows] next one */
    int64_t *document; /* [rows] the document that it belongs to */
} hy_tracks;

gt_status hy_tracks_create(hy_tracks *tracks, const hy_text *text, int64_t rows);
void hy_tracks_free(hy_tracks *tracks);
/* After `next` was set from outside; 0 if it is in no track. */
int hy_tracks_moved(hy_tracks *tracks, const hy_text *text);
void hy_batch_tracks(hy_batch *batch, const hy_text *text, hy_tracks *tracks);

/* Held-out windows in order, from *next on (0 at first): each held-out token is predicted exactly
 * once, the last window may be shorter.  Returns 0 when none is left. */
int hy_batch_held_out(hy_batch *batch, const hy_text *text, int64_t *next);

#endif
