/* The text of hybrid_train: loads it, finds its vocabulary and documents, and cuts batches from it.
 *
 * A text consists of bytes or of numbers.  In a text of bytes the vocabulary is the set of bytes that occur, and a
 * token is the index of its byte.  In a text of numbers the files hold the tokens themselves.
 *
 * By default the first nine tenths of the text are for training, and the last tenth is held out.  A text of tracks
 * (pieces of equal length) holds out the end of each track.  Instead, other files can be the held-out text.
 *
 * A window is `length` consecutive tokens that the model predicts.  The inputs of a window are the tokens one place
 * earlier. */
#ifndef HYBRID_DATA_H
#define HYBRID_DATA_H

#include "hybrid_files.h"

/* Describes what the files hold.  A comment begins with "bytes:" or "numbers:" if only one kind of text uses the
 * field. */
typedef struct hy_source {
    const char *separator; /* bytes: the string that ends a document; "": blank lines (two or more) or a form feed */
    int end_symbol;        /* bytes: 1: the separator becomes one token, the last of the vocabulary */
    int width;             /* bytes of a little-endian number in the files: 2 or 4; 0: the files hold bytes of text */
    int64_t vocab;         /* numbers: size of the vocabulary; 0: the largest number + 1 */
    int64_t end_token;     /* numbers: the token that ends a document; -1: the text is one document */
    int64_t tracks;        /* number of tracks; each holds out its end.  0: the end of the text is held out */
    int64_t held_out;      /* held-out share in millionths; 0: a tenth */
    int64_t map_from;      /* smallest total size in bytes of files that are mapped into memory; 0: HY_MAP_FROM */
    int sum;               /* 1: compute the SHA-256 for hy_text_sum */
} hy_source;

enum { HY_VOCAB_MAX = 1 << 20, HY_MAP_FROM = 1 << 28 };

typedef struct hy_text {
    void *token;   /* [size] tokens of `width` bytes each, read by hy_token; NULL: the tokens lie in mapped files */
    int width;     /* bytes of a token: 1, 2 or 4.  Mapped files: bytes of a number, or 0 if the files hold bytes */
    hy_span *span; /* [spans] the files, if they are mapped */
    int64_t spans;
    int64_t size, train;        /* number of all tokens, and of the tokens for training, in all pieces together */
    int64_t pieces;             /* number of pieces of equal length, each with a training and a held-out part */
    int64_t piece, piece_train; /* tokens in a piece; its first piece_train tokens are for training */
    int64_t skipped;            /* held-out tokens of a piece that are not predicted, since no token precedes them:
                                   1 if other files are held out, else 0 */
    hy_table table;             /* texts of numbers: the bytes that each token stands for, if --table gave them */
    int vocab;
    int is_numbers;       /* 1: a text of numbers, 0: of bytes */
    int end_symbol;       /* bytes: the token that ends a document, -1: none */
    char end_text[1024];  /* the separator that end_symbol stands for */
    uint8_t byte_of[256]; /* byte of each token, in rising order */
    int token_of[256];    /* token of each byte, -1 for a byte that does not occur */
    int64_t *document;    /* [documents + 1] index of each document's first token, then `size` */
    int64_t documents;
    int64_t ends;            /* how often the files contain the separator, or the end token */
    double entropy_train;    /* entropy of the training part's token frequencies, in nats per token */
    double entropy_held_out; /* loss of a unigram model on the held-out part, in nats per token; the model takes
                                the counts of the training part, each plus 1 */
    char sum[65];            /* SHA-256 of the text, if hy_source.sum asked for it */
} hy_text;

int32_t hy_mapped_token(const hy_text *text, int64_t i);

static inline int32_t hy_token(const hy_text *text, int64_t i) {
    if (!text->token) return hy_mapped_token(text, i);
    return text->width == 1   ? ((const uint8_t *)text->token)[i]
           : text->width == 2 ? ((const uint16_t *)text->token)[i]
                              : ((const int32_t *)text->token)[i];
}

/* Reads the files of `paths`, in order, as one text.  If `other` is not NULL, its files are the held-out text, and
 * `paths` may be empty.  The end of a file ends a document.  If this function or one below fails, hy_last_error()
 * has the reason. */
gt_status hy_text_load(hy_text *text, const hy_paths *paths, const hy_paths *other, const hy_source *source);
/* Reads a text from memory. */
gt_status hy_text_read(hy_text *text, const void *bytes, int64_t size, const hy_source *source);
/* Makes a text of bytes whose last tenth is held out. */
gt_status hy_text_from_bytes(hy_text *text, const void *bytes, int64_t size, const char *separator);
void hy_text_free(hy_text *text);

/* Loads the table of a text of numbers from a file.  Fails if the table has fewer tokens than the vocabulary. */
gt_status hy_text_table(hy_text *text, const char *path);
/* Returns the number of bytes that a token stands for; 0: not known. */
int64_t hy_token_bytes(const hy_text *text, int32_t token);

/* Changes the vocabulary size of a text of numbers.  Fails if the text has a larger number. */
gt_status hy_text_resize(hy_text *text, int vocab);
/* Changes the vocabulary of a text of bytes to `count` bytes in rising order.  Fails if the text has a byte that is not
 * among them; the error names the byte. */
gt_status hy_text_recode(hy_text *text, const uint8_t *bytes, int count);
/* Makes a text that has a vocabulary but no tokens, for calls of hy_text_encode. */
void hy_text_vocabulary(hy_text *text, const uint8_t *bytes, int count, int has_end);

/* Fails if the text is too short for one window of training. */
gt_status hy_text_fits(const hy_text *text, int64_t length);

/* Encodes a string as *count tokens; `token` must have room for strlen(string) tokens.  Fails if a byte of the
 * string is not in the vocabulary.  For a text of numbers the string is a list of numbers, separated by spaces or
 * commas.  With of_model = 1 the error message says that the vocabulary is a model's. */
gt_status hy_text_encode(const hy_text *text, const char *string, int32_t *token, int *count, int of_model);

typedef struct hy_batch {
    int64_t rows, length;
    int64_t first, all;      /* the whole batch of all ranks has `all` rows, and this rank's rows begin at row `first`.
                                0 and `rows` unless hy_batch_share was called */
    int32_t *input, *target; /* [rows, length]; a target of -1 is not counted */
    int32_t *keep;           /* [rows] 1: the row continues from its previous states; 0: it starts from zero states */
    int64_t targets;         /* number of counted targets in these rows */
    int64_t all_targets;     /* number of counted targets in all rows of the whole batch */
} hy_batch;

gt_status hy_batch_create(hy_batch *batch, int64_t rows, int64_t length);
void hy_batch_free(hy_batch *batch);
/* Sets `first` and `all`, so that the batch is this rank's part of a whole batch of ranks * rows rows. */
void hy_batch_share(hy_batch *batch, int rank, int ranks);

/* The random generator splitmix64. */
static inline uint64_t hy_random(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
/* A random number, uniform in [0, 1). */
static inline double hy_uniform(uint64_t *state) { return (double)(hy_random(state) >> 11) / 9007199254740992.0; }

/* Fills the batch with independent windows at random places of the training part. */
void hy_batch_random(hy_batch *batch, const hy_text *text, uint64_t *random);

/* The training part, cut into one track of equal length per row.  If the text already consists of tracks, it must
 * have one per row, and these are used.  Each row reads its track in order, again and again.  A window ends early at
 * the end of a document or of its track, and the next window starts from zero states.  So no state passes from one
 * document to another. */
typedef struct hy_tracks {
    int64_t rows;
    int64_t *first;    /* [rows] index of the first token that each track predicts ... */
    int64_t *end;      /* [rows] ... and the end of its training part */
    int64_t *next;     /* [rows] index of the token that each track predicts next */
    int64_t *document; /* [rows] the document of that token */
} hy_tracks;

gt_status hy_tracks_create(hy_tracks *tracks, const hy_text *text, int64_t rows);
void hy_tracks_free(hy_tracks *tracks);
/* Updates `document` after the caller has set `next`.  Returns 0 if an entry of `next` lies outside its track. */
int hy_tracks_moved(hy_tracks *tracks, const hy_text *text);
void hy_batch_tracks(hy_batch *batch, const hy_text *text, hy_tracks *tracks);

/* Returns the total number of tokens that hy_batch_held_out predicts. */
int64_t hy_held_out_tokens(const hy_text *text);

/* Fills the batch with the next held-out windows, in order.  *next is the index of the next window; the caller sets
 * it to 0 before the first call.  The windows predict each held-out token exactly once; the last window may be
 * shorter.  Returns 0 when no window is left. */
int hy_batch_held_out(hy_batch *batch, const hy_text *text, int64_t *next);

#endif
