#define _DEFAULT_SOURCE /* TIOCGWINSZ */
#define _DARWIN_C_SOURCE
#include "hybrid_screen.h"
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { WIDTH = 80, LEAST_WIDTH = 40 };

/* ---- the terminal --------------------------------------------------------------------------- */

/* Asks the terminal for its width.  If the terminal does not tell its width, 80 columns are assumed. */
static void ask_width(hy_screen *s) {
    struct winsize size;
    if (!s->is_terminal) return;
    int known = !ioctl(fileno(s->out), TIOCGWINSZ, &size) && size.ws_col > 0;
    s->columns = known ? size.ws_col : WIDTH;
}

void hy_screen_open(hy_screen *s, FILE *out) {
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    *s = (hy_screen){.out = out, .is_terminal = isatty(fileno(out)), .columns = WIDTH};
    s->is_live = s->is_terminal && term && *term && strcmp(term, "dumb");
    s->has_colour = s->is_live && !(no_color && *no_color);
    ask_width(s);
}

const char *hy_screen_colour(const hy_screen *s, hy_colour colour) {
    static const char *const escapes[] = {"\033[32m", "\033[33m", "\033[31m"};
    return s->has_colour ? escapes[colour] : "";
}

const char *hy_screen_plain(const hy_screen *s) { return s->has_colour ? "\033[0m" : ""; }

/* ---- text ----------------------------------------------------------------------------------- */

int hy_screen_width(const hy_screen *s) {
    return s->columns > WIDTH ? WIDTH : s->columns < LEAST_WIDTH ? LEAST_WIDTH : s->columns;
}

/* Returns the number of columns that the first `bytes` bytes of a UTF-8 text take. */
static int columns_of(const char *text, size_t bytes) {
    int columns = 0;
    for (size_t i = 0; i < bytes; i++) columns += (text[i] & 0xc0) != 0x80;
    return columns;
}

void hy_print_wrapped(FILE *out, const char *text, int column, int indent, int width) {
    int at = column, is_first = 1; /* is_first: the next word is the first of its line */
    while (*text) {
        size_t bytes = strcspn(text, " ");
        int columns = columns_of(text, bytes);
        if (!is_first && at + 1 + columns > width) {
            fprintf(out, "\n%*s", indent, "");
            at = indent;
            is_first = 1;
        }
        at += columns + !is_first;
        fprintf(out, "%s%.*s", is_first ? "" : " ", (int)bytes, text);
        is_first = 0;
        text += bytes;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

void hy_make_plain(char *text) {
    unsigned char *at = (unsigned char *)text;
    for (; *at; at++)
        if (*at < 32 || *at == 127)
            *at = '?';
        else if (at[0] == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0)
            at[0] = at[1] = '?';
}

void hy_screen_entry(const hy_screen *s, int indent, const char *label, const char *format, ...) {
    char text[4096];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    hy_make_plain(text);
    fprintf(s->out, "%-*s", indent, label);
    hy_print_wrapped(s->out, text, indent, indent, hy_screen_width(s));
}

/* ---- numbers as text ------------------------------------------------------------------------ */

hy_number hy_duration(double seconds) {
    hy_number out;
    long long s = seconds > 0 ? (long long)(fmin(seconds, 1e15) + 0.5) : 0;
    if (s >= 3600)
        snprintf(out.text, sizeof out.text, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(out.text, sizeof out.text, "%lld:%02lld", s / 60, s % 60);
    return out;
}

hy_number hy_short_number(double x) {
    static const char units[] = " kMGT";
    hy_number out;
    int unit = 0;
    if (!(fabs(x) >= 9999.5)) {
        snprintf(out.text, sizeof out.text, "%.0f", x);
        return out;
    }
    while (fabs(x) >= 999.5 && unit < 4) x /= 1000, unit++;
    snprintf(out.text, sizeof out.text, "%.*f%c", fabs(x) < 9.995 ? 2 : fabs(x) < 99.95 ? 1 : 0, x, units[unit]);
    return out;
}

/* ---- progress ------------------------------------------------------------------------------- */

enum { STEP, LOSS, HELD_OUT, GRAD, RATIO, SPEED, MEMORY, LEFT, FIELDS };

static const struct {
    const char *name;
    int width; /* in columns, without the two spaces before the field */
} fields[FIELDS] = {[STEP] = {"step", 4}, [LOSS] = {"loss", 7},   [HELD_OUT] = {"held-out", 8}, [GRAD] = {"grad", 6},
                    [RATIO] = {"R/M", 5}, [SPEED] = {"tok/s", 6}, [MEMORY] = {"MiB", 6},        [LEFT] = {"eta", 8}};
static const int by_importance[FIELDS] = {STEP, LOSS, HELD_OUT, LEFT, SPEED, MEMORY, GRAD, RATIO};

/* Returns whether to show the total number of steps next to the step.  A narrow terminal has no room for the total. */
static int has_total(const hy_screen *s) { return s->columns >= 60; }

/* Returns the width of a field.  The step's field is as wide as the last step needs. */
static int field_width(const hy_screen *s, int field, const hy_screen_row *p) {
    char text[64];
    int width = fields[field].width;
    if (field != STEP) return width;
    int length = snprintf(text, sizeof text, "%lld", (long long)p->steps);
    if (has_total(s)) length = 2 * length + 1;
    return length > width ? length : width;
}

/* Returns the fields that fit on the terminal, one bit each, and one more bit for has_total.  The last column stays
 * free, because some terminals wrap a line that reaches it. */
static unsigned fields_that_fit(const hy_screen *s, const hy_screen_row *p) {
    unsigned set = has_total(s) ? 1u << FIELDS : 0;
    int length = 0;
    for (int i = 0; i < FIELDS; i++) {
        length += field_width(s, by_importance[i], p) + 2 * (i > 0);
        if (length > s->columns - 1 && i > 0) break;
        set |= 1u << by_importance[i];
    }
    return set;
}

/* Formats the time left, in at most eight characters. */
static hy_number time_left(double seconds) {
    hy_number out = hy_duration(seconds);
    double hours = floor(fmax(seconds, 0) / 3600), days = floor(hours / 24);
    if (days >= 100)
        snprintf(out.text, sizeof out.text, "%.0fd", fmin(days, 9999999));
    else if (hours >= 100)
        snprintf(out.text, sizeof out.text, "%.0fd %02.0fh", days, hours - 24 * days);
    return out;
}

static hy_number field_text(const hy_screen *s, int field, const hy_screen_row *p) {
    const double numbers[FIELDS] = {
        [LOSS] = p->loss, [HELD_OUT] = p->held_out, [GRAD] = p->grad_norm, [RATIO] = p->ratio};
    hy_number out;
    double x = numbers[field];
    if (field == SPEED) return hy_short_number(p->tokens_per_s);
    if (field == LEFT) return time_left(p->seconds_left);
    if (field == STEP && !has_total(s))
        snprintf(out.text, sizeof out.text, "%lld", (long long)p->step);
    else if (field == STEP)
        snprintf(out.text, sizeof out.text, "%lld/%lld", (long long)p->step, (long long)p->steps);
    else if (field == MEMORY)
        snprintf(out.text, sizeof out.text, "%.0f", p->memory_mib);
    else if ((field == HELD_OUT || field == RATIO) && isnan(x))
        snprintf(out.text, sizeof out.text, "-");
    else if (field == LOSS || field == HELD_OUT)
        snprintf(out.text, sizeof out.text, fabs(x) < 100 ? "%.4f" : "%.3g", x);
    else
        snprintf(out.text, sizeof out.text, fabs(x) < 100 ? "%.2f" : "%.3g", x);
    return out;
}

/* Makes a line with the fields of the heading: either their names or their current values.  Returns its length. */
static int make_line(const hy_screen *s, const hy_screen_row *p, int is_heading, char *line, size_t size) {
    int used = 0;
    for (int field = 0; field < FIELDS; field++) {
        if (!(s->heading & 1u << field)) continue;
        hy_number number = field_text(s, field, p);
        used += snprintf(line + used, size - (size_t)used, "%s%*s", used ? "  " : "", field_width(s, field, p),
                         is_heading ? fields[field].name : number.text);
    }
    if (used > s->columns - 1 && s->is_terminal) { /* a number is wider than its field */
        used = s->columns > 1 ? s->columns - 1 : 0;
        line[used] = 0;
    }
    return used;
}

/* Prints a line.  On a live screen it replaces the current line and clears the rest of it. */
static void put_line(const hy_screen *s, const char *line) {
    fprintf(s->out, "%s%s%s", s->is_live ? "\r" : "", line, s->is_live ? "\033[K" : "");
}

void hy_screen_progress(hy_screen *s, const hy_screen_row *p, int stays) {
    char line[FIELDS * 40];
    ask_width(s);
    /* A terminal that became narrower may have wrapped the current line, so that line stays as it is. */
    if (s->length > s->columns - 1) fputc('\n', s->out), s->length = 0;
    unsigned set = fields_that_fit(s, p);
    if (set != s->heading) {
        s->heading = set;
        make_line(s, p, 1, line, sizeof line);
        put_line(s, line);
        fputc('\n', s->out);
    }
    s->length = make_line(s, p, 0, line, sizeof line);
    put_line(s, line);
    if (stays || !s->is_live) fputc('\n', s->out), s->length = 0;
}

void hy_screen_status(hy_screen *s, const char *text) {
    char line[FIELDS * 40];
    ask_width(s);
    if (s->length > s->columns - 1) fputc('\n', s->out), s->length = 0;
    const int room = s->is_terminal ? s->columns - 1 : (int)sizeof line - 1;
    s->length = snprintf(line, sizeof line, "%.*s", room > 0 ? room : 0, text);
    put_line(s, line);
    if (!s->is_live) fputc('\n', s->out), s->length = 0;
}

void hy_screen_leave(hy_screen *s) {
    if (s->length) fputc('\n', s->out);
    s->length = 0;
    s->heading = 0;
}
