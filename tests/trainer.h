/* Shared by the tests of the program hybrid_train: checks, a temporary folder for files, and runs of the program. */
#ifndef TRAINER_H
#define TRAINER_H

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

extern char program[4096]; /* path of the program hybrid_train */
extern char folder[64];    /* the temporary folder, which is the current directory while tests run */

#define CHECK(condition) check((condition) != 0, __FILE__, __LINE__, #condition)
int check(int ok, const char *file, int line, const char *condition);
/* Runs a test and prints its name and result.  If the environment variable GT_TEST_CASE is set, only tests whose names
 * contain its text run. */
void run_case(const char *name, void (*test)(void));

/* Makes and enters a new folder with the texts greek.txt and short_greek.txt.  Returns 0, or an exit status if the
 * program cannot be used.  end_tests removes the folder, and returns the exit status of the tests. */
int begin_tests(const char *path_of_program);
int end_tests(void);

const char *write_file(const char *name, const void *bytes, size_t size);
const char *write_string(const char *name, const char *text);
/* Reads a whole file as a string, which the caller frees. */
char *read_string(const char *path);

enum { ARGUMENTS_MAX = 96 };
/* Splits a command line at its spaces.  argv ends with NULL.  Returns the number of words. */
int split(char *line, char **argv);

/* Starts `hybrid_train LINE`.  Its output goes to the file out.txt. */
pid_t start_program(const char *line);
/* Waits for the program.  Returns its exit status, or 128 + the number of the signal that ended it. */
int wait_for(pid_t child);
/* Runs the program and returns its exit status.  *out receives its output, which the caller frees. */
int run_program(char **out, const char *format, ...);
/* Whether the program exits with `status` and prints both texts.  If not, shows its output. */
int says(int status, const char *line, const char *text1, const char *text2);

/* Options for a small model, and for the same model on greek.txt, which has another alphabet and bytes above 127. */
#define TINY "--device cpu --model HY --hidden 32 --layers 2 --batch 4 --seq 32 "
#define TINY_GREEK TINY "--data greek.txt "

/* The number after "held-out loss " in the last line of the output; NAN if the last line has none. */
double final_loss(const char *out);
/* The unigram entropy of the held-out part, which the table at the start prints. */
double unigram(const char *out);
/* The columns of a CSV log that do not depend on time.  *rows: the number of rows of the log. */
char *numbers_of(const char *path, int *rows);
/* Waits until the file has `lines` lines, but at most a minute.  Returns whether it has them. */
int wait_for_lines(const char *path, int lines);

#endif
