/* Implements hybrid_train --eval MODEL --score FILE: asks a model questions, and counts the right answers.
 *
 * FILE is CSV with the heading length,depth,first,prompt,answer, as tools/needle.py writes it.  Each row describes a
 * question.  The question's prompt has `prompt` tokens and begins at token `first` of the text; an answer of
 * `answer` tokens follows.  The model's answer is right if each token is the likeliest one after the prompt and the
 * answer's earlier tokens.  Length and depth only group the questions. */
#include "hybrid_trainer.h"
#include <stdlib.h>
#include <string.h>

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        gt_status status_ = (call);                                                                                    \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)

enum { COLUMNS = 5 };
static const char *const columns[COLUMNS] = {"length", "depth", "first", "prompt", "answer"};

typedef struct question {
    int64_t length, depth, first, prompt, answer;
} question;

typedef struct group {
    int64_t length, depth, asked, right;
} group;

typedef struct score {
    question *question;
    group *group; /* groups in the order of their first questions; the array has room for one per question */
    int64_t questions, groups;
} score;

/* ---- the file -------------------------------------------------------------------------------- */

/* Reads the numbers of a line.  Fails unless the line has five numbers from 0 to 1e15. */
static gt_status parse_line(const char *line, int64_t number, const char *path, question *q) {
    int64_t *const value[COLUMNS] = {&q->length, &q->depth, &q->first, &q->prompt, &q->answer};
    const char *next = line;
    for (int i = 0; i < COLUMNS; i++) {
        char *end;
        const double x = *next >= '0' && *next <= '9' ? strtod(next, &end) : -1;
        if (x < 0 || x > 1e15 || x != (double)(int64_t)x || *end != (i < COLUMNS - 1 ? ',' : 0))
            return hy_fail(GT_ERROR_VALUE, "score: %.300s, line %lld: %s: '%.40s' is not a whole number", path,
                           (long long)number, columns[i], next);
        *value[i] = (int64_t)x;
        next = end + 1;
    }
    return GT_OK;
}

static gt_status check_question(const hy_text *text, int64_t number, const char *path, const question *q) {
    if (q->prompt < 1 || q->answer < 1 || q->prompt > INT32_MAX)
        return hy_fail(GT_ERROR_VALUE,
                       "score: %.300s, line %lld: prompt = %lld, answer = %lld: both must be at least 1", path,
                       (long long)number, (long long)q->prompt, (long long)q->answer);
    if (q->first + q->prompt + q->answer > text->size)
        return hy_fail(GT_ERROR_VALUE,
                       "score: %.300s, line %lld: the question ends at token %lld, but the text has %lld", path,
                       (long long)number, (long long)(q->first + q->prompt + q->answer), (long long)text->size);
    return GT_OK;
}

static gt_status read_lines(score *s, char *lines, const hy_text *text, const char *path) {
    static const char heading[] = "length,depth,first,prompt,answer";
    int64_t number = 0;
    for (char *line = lines, *end; *line; line = end) {
        end = line + strcspn(line, "\n");
        if (*end) *end++ = 0;
        line[strcspn(line, "\r")] = 0;
        if (number++ == 0) {
            if (strcmp(line, heading) != 0)
                return hy_fail(GT_ERROR_VALUE, "score: %.300s: the first line must be %s", path, heading);
            continue;
        }
        question *q = &s->question[s->questions];
        TRY(parse_line(line, number, path, q));
        TRY(check_question(text, number, path, q));
        s->questions++;
    }
    return s->questions ? GT_OK : hy_fail(GT_ERROR_VALUE, "score: %.300s has no questions", path);
}

static gt_status read_questions(score *s, const hy_text *text, const char *path) {
    hy_span file;
    gt_status status = hy_span_load(&file, path, 0);
    if (status != GT_OK) return hy_fail(status, "score: %s", hy_last_error());
    char *lines = calloc((size_t)file.size + 1, 1);
    int64_t most = 1;
    for (int64_t i = 0; i < file.size; i++) most += file.bytes[i] == '\n';
    s->question = calloc((size_t)most, sizeof *s->question);
    s->group = calloc((size_t)most, sizeof *s->group);
    if (!lines || !s->question || !s->group) status = hy_fail(GT_ERROR_MEMORY, "score: no memory");
    if (status == GT_OK && memchr(file.bytes, 0, (size_t)file.size))
        status = hy_fail(GT_ERROR_VALUE, "score: %.300s contains a NUL byte", path);
    if (status == GT_OK) {
        memcpy(lines, file.bytes, (size_t)file.size);
        status = read_lines(s, lines, text, path);
    }
    free(lines);
    hy_span_free(&file);
    return status;
}

/* ---- questions ------------------------------------------------------------------------------- */

static int32_t likeliest(const double *logits, int vocab) {
    int32_t best = 0;
    for (int32_t v = 1; v < vocab; v++)
        if (logits[v] > logits[best]) best = v;
    return best;
}

/* Asks a question.  `tokens` has room for the prompt and the answer, `logits` for the vocabulary. */
static gt_status ask(const trainer *t, const question *q, int32_t *tokens, double *logits, int *is_right) {
    for (int64_t i = 0; i < q->prompt + q->answer; i++) tokens[i] = hy_token(&t->text, q->first + i);
    *is_right = 1;
    TRY(hy_model_reset(t->model));
    TRY(hy_model_feed(t->model, tokens, (int)q->prompt, logits));
    for (int64_t i = 0; i < q->answer && *is_right; i++) {
        const int32_t *answer = &tokens[q->prompt + i];
        *is_right = likeliest(logits, t->text.vocab) == *answer;
        if (*is_right && i + 1 < q->answer) TRY(hy_model_feed(t->model, answer, 1, logits));
    }
    return GT_OK;
}

static void count(score *s, const question *q, int is_right) {
    int64_t g = 0;
    while (g < s->groups && (s->group[g].length != q->length || s->group[g].depth != q->depth)) g++;
    if (g == s->groups) s->group[s->groups++] = (group){q->length, q->depth, 0, 0};
    s->group[g].asked++;
    s->group[g].right += is_right;
}

static gt_status ask_all(trainer *t, score *s) {
    int64_t longest = 0;
    int is_right;
    for (int64_t i = 0; i < s->questions; i++) {
        const int64_t size = s->question[i].prompt + s->question[i].answer;
        if (size > longest) longest = size;
    }
    int32_t *tokens = malloc((size_t)longest * sizeof *tokens);
    double *logits = malloc((size_t)t->text.vocab * sizeof *logits);
    gt_status status = tokens && logits ? GT_OK : hy_fail(GT_ERROR_MEMORY, "score: no memory");
    for (int64_t i = 0; i < s->questions && status == GT_OK && !hy_interrupted(t); i++) {
        status = ask(t, &s->question[i], tokens, logits, &is_right);
        if (status == GT_OK) count(s, &s->question[i], is_right);
        hy_alive("a question was answered");
    }
    free(tokens);
    free(logits);
    return status;
}

/* ---- the report ------------------------------------------------------------------------------ */

static double share(const group *g) { return (double)g->right / (double)g->asked; }

/* Prints the shares of right answers, in per cent.  The table has a line for each length, and a column for each
 * depth of the first length. */
static void print_table(const score *s) {
    printf("right answers, %%\n%10s", "length");
    for (int64_t g = 0; g < s->groups && s->group[g].length == s->group[0].length; g++)
        printf("  depth %-3lld", (long long)s->group[g].depth);
    for (int64_t g = 0; g < s->groups; g++) {
        if (!g || s->group[g].length != s->group[g - 1].length) printf("\n%10lld", (long long)s->group[g].length);
        printf("  %9.1f", 100 * share(&s->group[g]));
    }
    puts("\n");
}

static void print_rows(const score *s) {
    puts("length,depth,asked,right,share");
    for (int64_t g = 0; g < s->groups; g++)
        printf("%lld,%lld,%lld,%lld,%.4f\n", (long long)s->group[g].length, (long long)s->group[g].depth,
               (long long)s->group[g].asked, (long long)s->group[g].right, share(&s->group[g]));
}

gt_status hy_print_score(trainer *t) {
    score s = {NULL, NULL, 0, 0};
    if (t->ranks.size > 1)
        return hy_fail(GT_ERROR_VALUE, "score: runs in one process, but there are %d ranks; start it without mpirun",
                       t->ranks.size);
    hy_catch_signals(t);
    gt_status status = read_questions(&s, &t->text, t->options.score);
    if (status == GT_OK) status = ask_all(t, &s);
    if (status == GT_OK) {
        if (hy_interrupted(t)) puts("interrupted");
        if (s.groups) print_table(&s);
        print_rows(&s);
        status = hy_flush_report();
    }
    free(s.question);
    free(s.group);
    return status;
}
