/* The screen of hybrid_train: tables that fit 80 columns, and a table of progress that fits the
 * terminal, whose last line is refreshed in place. */
#ifndef HYBRID_SCREEN_H
#define HYBRID_SCREEN_H

#include <stdint.h>
#include <stdio.h>

typedef struct hy_screen {
    FILE *out;
    int is_terminal;
    int is_live;      /* a terminal that knows escapes: the last line is refreshed in place */
    int has_colour;   /* is_live, unless NO_COLOR is set */
    int columns;      /* of the terminal as it was last asked; else 80 */
    unsigned heading; /* columns in the heading of the table, a bit each; 0: it has none yet */
    int length;       /* of the line that stands without an end; 0: none does */
} hy_screen;

void hy_screen_open(hy_screen *screen, FILE *out);

/* The last column that a text may use: the width of the terminal, at most 80. */
int hy_screen_width(const hy_screen *screen);

/* Prints a text whose first letter is in column `column`, counted from 0, up to column `width`:
 * wrapped at spaces, further lines indented by `indent`.  Ends the line. */
void hy_print_wrapped(FILE *out, const char *text, int column, int indent, int width);

/* Puts '?' in the place of control characters, also in UTF-8: names and texts may come from a model file, and
 * a terminal would obey them. */
void hy_make_plain(char *text);

/* An entry of a table: the label, and the text from column `indent` on. */
#ifdef __GNUC__
__attribute__((format(printf, 4, 5)))
#endif
void hy_screen_entry(const hy_screen *screen, int indent, const char *label, const char *format,
                     ...);

/* Begins and ends coloured text: escapes, or "". */
typedef enum hy_colour { HY_GREEN, HY_YELLOW, HY_RED } hy_colour;
const char *hy_screen_colour(const hy_screen *screen, hy_colour colour);
const char *hy_screen_plain(const hy_screen *screen);

/* ---- progress ------------------------------------------------------------------------------- */

typedef struct hy_screen_row {
    int64_t step, steps;
    double loss, held_out;   /* held_out: NAN if there is none */
    double grad_norm, ratio; /* ratio: NAN if the model has one branch alone */
    double tokens_per_s, memory_mib, seconds_left;
} hy_screen_row;

/* Shows a row of the table in place of the one before, unless that one stays.  `stays`: it is a
 * line of its own; without a live screen every row is.  A heading comes first where it is due: at
 * the start, when the terminal's width asks for other fields, and after hy_screen_leave. */
void hy_screen_progress(hy_screen *screen, const hy_screen_row *row, int stays);

/* Shows a text in place of the row, cut to the terminal; the next row replaces it.  Without a live screen it is a
 * line of
 * its own. */
void hy_screen_status(hy_screen *screen, const char *text);

/* Something else will be printed: ends the line, and the table. */
void hy_screen_leave(hy_screen *screen);

/* ---- numbers as text ------------------------------------------------------------------------ */

typedef struct hy_number {
    char text[32];
} hy_number;

hy_number hy_duration(double seconds); /* 1:02:03 or 2:03 */
hy_number hy_short_number(double x);   /* 1234, 12.3k, 1.23M */

#endif
