/* The text of hybrid_train: loading, vocabulary, documents, and the batches cut from it.
 *
 * The vocabulary is the set of bytes that occur; a token is the number of its byte.  Or a file holds the
 * tokens themselves, as numbers.  The first nine tenths of the text are for training, unless said otherwise, the rest
 * is
 * held out; or the same of each of some tracks of equal length; or other files are held out.  A window predicts the
 * `length` tokens from
 * some position on; its inputs are the same tokens one place earlier. */
#ifndef HYBRID_DATA_H
#define HYBRID_DATA_H

#include "hybrid_files.h"

/* What the files hold. */
typedef struct hy_source {
    const char *separator; /* of bytes: what ends a document; "" = two or more blank lines, or a form feed */
    int end_symbol;        /* of bytes: 1: what ends a document is one token of its own, the last of the vocabulary */
    int width;             /* bytes of a number, 2 or 4, little-endian; 0 = the file holds text */
    int64_t vocab;         /* of numbers: how many tokens there are, 0 = as many as the largest asks for */
    int64_t end_token;     /* of numbers: the last one of a document, -1 = there is one document */
    int64_t tracks;        /* 0: the end of the text is held out, else the end of each of so many tracks */
    int64_t held_out;      /* how much, in millionths; 0 = a tenth */
    int64_t map_from;      /* files of so many bytes together are mapped; 0 = HY_MAP_FROM */
    int sum;               /* 1: hy_text_sum will be wanted */
} hy_source;

enum { HY_VOCAB_MAX = 1 << 20, HY_MAP_FROM = 1 << 28 };

typedef struct hy_text {
    void *token;   /* [size] of `width` bytes each: see hy_token; NULL: the tokens lie in mapped files */
    int width;     /* 1, 2 or 4; mapped files: the width of their numbers, 0: they hold bytes */
    hy_span *span; /* [spans] the mapped files */
    int64_t spans;
    int64_t size, train;        /* all tokens, and the tokens for training; all pieces together */
    int64_t pieces;             /* that are cut alike, one after the other: 1, or the tracks of hy_source */
    int64_t piece, piece_train; /* tokens of each, and how many of them, the first ones, are for training */
    int64_t skipped;            /* held-out tokens of each that nothing of their own file comes before: 1 with another
                                   file, else 0 */
    hy_table table;             /* of numbers: what they stand for */
    int vocab;
    int is_numbers;       /* 1: the file holds the tokens, there are no bytes */
    int end_symbol;       /* of bytes: the token that ends a document, -1 = none */
    char end_text[1024];  /* what it stands for */
    uint8_t byte_of[256]; /* the bytes in rising order */
    int token_of[256];    /* -1 for a byte that does not occur */
    int64_t *document;    /* [documents + 1] first token of each document, then size */
    int64_t documents;
    int64_t ends;            /* how often the file has a separator, or the end token */
    double entropy_train;    /* nats per token of the training part under its own frequencies */
    double entropy_held_out; /* of the held-out part, frequencies from training (each count + 1) */
    char sum[65];            /* SHA-256 of the file, if it was wanted */
} hy_text;

int32_t hy_mapped_token(const hy_text *text, int64_t i);

static inline int32_t hy_token(const hy_text *text, int64_t i) {
    if (!text->token) return hy_mapped_token(text, i);
    return text->width == 1   ? ((const uint8_t *)text->token)[i]
           : text->width == 2 ? ((const uint16_t *)text->token)[i]
                              : ((const int32_t *)text->token)[i];
}

/* Reads files, one after the other.  With `other` files these are held out, whole, and nothing else is; then there
 * may be
 * no first ones.  A document ends where a file ends.  The reason of a failure, here and below, is in hy_last_error().
 * */
gt_status hy_text_load(hy_text *text, const hy_paths *paths, const hy_paths *other, const hy_source *source);
/* The same from memory. */
gt_status hy_text_read(hy_text *text, const void *bytes, int64_t size, const hy_source *source);
/* A text of bytes whose last tenth is held out. */
gt_status hy_text_from_bytes(hy_text *text, const void *bytes, int64_t size, const char *separator);
void hy_text_free(hy_text *text);

/* Gives a text of numbers the table of a file; fails if it has fewer tokens than the vocabulary. */
gt_status hy_text_table(hy_text *text, const char *path);
/* Bytes that a token stands for; 0: that is not known. */
int64_t hy_token_bytes(const hy_text *text, int32_t token);

/* Gives a text of numbers another size of vocabulary; fails if it has larger ones. */
gt_status hy_text_resize(hy_text *text, int vocab);
/* Gives a text of bytes another vocabulary, `count` bytes in rising order; fails, naming the byte, if one
 * of the text is not among them. */
gt_status hy_text_recode(hy_text *text, const uint8_t *bytes, int count);
/* A text that has a vocabulary and no tokens: fit for hy_text_encode. */
void hy_text_vocabulary(hy_text *text, const uint8_t *bytes, int count, int has_end);

/* Fails if the text is too short for one window of training. */
gt_status hy_text_fits(const hy_text *text, int64_t length);

/* Tokens of a string, token[strlen(string)], *count of them; fails if it has a byte that the text has not.
 * A text of numbers takes a list of them with spaces or commas between.  of_model: the vocabulary is a model's, for
 * the message. */
gt_status hy_text_encode(const hy_text *text, const char *string, int32_t *token, int *count, int of_model);

typedef struct hy_batch {
    int64_t rows, length;
    int64_t first, all;      /* it is the rows from `first` on of a batch of `all` rows, of which other ranks have the
                                others: 0 and rows, unless hy_batch_share says otherwise */
    int32_t *input, *target; /* [rows, length]; a target of -1 is not counted */
    int32_t *keep;           /* [rows] 1: goes on with the row's states, 0: starts from zero states */
    int64_t targets;         /* how many are counted ... */
    int64_t all_targets;     /* ... of `all` rows */
} hy_batch;

gt_status hy_batch_create(hy_batch *batch, int64_t rows, int64_t length);
void hy_batch_free(hy_batch *batch);
/* From now on it is the share of this rank in a batch of ranks times its rows. */
void hy_batch_share(hy_batch *batch, int rank, int ranks);

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

/* Tracks: the training part cut into one equal piece per row, or the text's own if it has as many, each
 * read in order, over and over.  A
 * window ends early at the end of a document or of its track, and the next one starts from a zero
 * state; so no state crosses a document end. */
typedef struct hy_tracks {
    int64_t rows;
    int64_t *first;    /* [rows] first token predicted by each track ... */
    int64_t *end;      /* [rows] ... and the end of its training part */
    int64_t *next;     /* [rows] next one */
    int64_t *document; /* [rows] the document that it belongs to */
} hy_tracks;

gt_status hy_tracks_create(hy_tracks *tracks, const hy_text *text, int64_t rows);
void hy_tracks_free(hy_tracks *tracks);
/* After `next` was set from outside; 0 if it is in no track. */
int hy_tracks_moved(hy_tracks *tracks, const hy_text *text);
void hy_batch_tracks(hy_batch *batch, const hy_text *text, hy_tracks *tracks);

/* Tokens that hy_batch_held_out predicts in all. */
int64_t hy_held_out_tokens(const hy_text *text);

/* Held-out windows in order, from *next on (0 at first): each held-out token is predicted exactly
 * once, the last window may be shorter.  Returns 0 when none is left. */
int hy_batch_held_out(hy_batch *batch, const hy_text *text, int64_t *next);

#endif
