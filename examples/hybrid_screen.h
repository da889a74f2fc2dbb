/* The screen of hybrid_train.  It prints tables that fit 80 columns, and a progress table that fits the terminal.
 * The progress table refreshes its last line in place. */
#ifndef HYBRID_SCREEN_H
#define HYBRID_SCREEN_H

#include <stdint.h>
#include <stdio.h>

typedef struct hy_screen {
    FILE *out;
    int is_terminal;
    int is_live;      /* 1: the terminal knows escape sequences, so the last line can be refreshed in place */
    int has_colour;   /* 1: is_live is 1 and NO_COLOR is not set */
    int columns;      /* latest known width of the terminal; 80 without a terminal */
    unsigned heading; /* bit i: the heading of the table shows field i; 0: no heading yet */
    int length;       /* length of the current line, which has no line end yet; 0: there is no such line */
} hy_screen;

void hy_screen_open(hy_screen *screen, FILE *out);

/* Returns the number of columns that a text may use: the width of the terminal, but at most 80. */
int hy_screen_width(const hy_screen *screen);

/* Prints a text, starting at column `column` (counted from 0), and wraps lines at spaces before column `width`.  The
 * lines after the first are indented by `indent`.  Ends the last line. */
void hy_print_wrapped(FILE *out, const char *text, int column, int indent, int width);

/* Replaces control characters by '?', including those that UTF-8 encodes in two bytes.  Names and texts may come
 * from a model file, and a terminal would execute its escape sequences. */
void hy_make_plain(char *text);

/* Prints an entry of a table: the label, and the text starting at column `indent`. */
#ifdef __GNUC__
__attribute__((format(printf, 4, 5)))
#endif
void hy_screen_entry(const hy_screen *screen, int indent, const char *label, const char *format,
                     ...);

/* Escape sequences that begin and end coloured text; "" without colour. */
typedef enum hy_colour { HY_GREEN, HY_YELLOW, HY_RED } hy_colour;
const char *hy_screen_colour(const hy_screen *screen, hy_colour colour);
const char *hy_screen_plain(const hy_screen *screen);

/* ---- progress ------------------------------------------------------------------------------- */

typedef struct hy_screen_row {
    int64_t step, steps;
    double loss, held_out;   /* held_out: NAN if not measured */
    double grad_norm, ratio; /* ratio: NAN if the model has only one branch */
    double tokens_per_s, memory_mib, seconds_left;
} hy_screen_row;

/* Shows a row of the progress table.  With stays = 1 the row remains; otherwise the next row replaces it.  Without a
 * live screen every row remains.
 *
 * Prints the heading first at the start, after hy_screen_leave, and when the width of the terminal changes the
 * fields. */
void hy_screen_progress(hy_screen *screen, const hy_screen_row *row, int stays);

/* Shows a text in place of the current row, cut to the width of the terminal.  The next row replaces the text.
 * Without a live screen the text is a separate line. */
void hy_screen_status(hy_screen *screen, const char *text);

/* Ends the current line and the table; call it before printing other text. */
void hy_screen_leave(hy_screen *screen);

/* ---- numbers as text ------------------------------------------------------------------------ */

typedef struct hy_number {
    char text[32];
} hy_number;

hy_number hy_duration(double seconds); /* 1:02:03 or 2:03 */
hy_number hy_short_number(double x);   /* 1234, 12.3k, 1.23M */

#endif
