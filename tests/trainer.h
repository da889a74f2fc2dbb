/* Shared by the tests of the program hybrid_train: checks, a folder for their files, and runs of the program. */
#ifndef TRAINER_H
#define TRAINER_H

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

extern char program[4096]; /* path of hybrid_train */
extern char folder[64];    /* the folder for files; the current directory while the tests run */

#define CHECK(condition) check((condition) != 0, __FILE__, __LINE__, #condition)
int check(int ok, const char *file, int line, const char *condition);
/* Runs a test.  If the environment has GT_TEST_CASE, only tests whose names contain its text run. */
void run_case(const char *name, void (*test)(void));

/* Makes and enters a new folder with greek.txt and short_greek.txt.  Returns 0, or the exit status of a wrong command
 * line.  end_tests removes the folder and returns the exit status. */
int begin_tests(const char *path_of_program);
int end_tests(void);

const char *write_file(const char *name, const void *bytes, size_t size);
const char *write_string(const char *name, const char *text);
/* Reads a whole file as a string; the caller frees it. */
char *read_string(const char *path);

enum { ARGUMENTS_MAX = 96 };
/* Splits a command line at its spaces; argv ends with NULL. */
int split(char *line, char **argv);

/* Starts `hybrid_train LINE`; its output goes to the file out.txt. */
pid_t start_program(const char *line);
/* Returns the exit status of the program, or 128 + the signal that ended it. */
int wait_for(pid_t child);
/* Runs the program and returns its exit status.  *out receives its output, which the caller frees. */
int run_program(char **out, const char *format, ...);
/* Whether the program exits with `status` and prints both texts; if not, shows its output. */
int says(int status, const char *line, const char *text1, const char *text2);

/* A small model, and the texts in the folder, which use another alphabet and bytes over 127. */
#define TINY "--device cpu --model HY --hidden 32 --layers 2 --batch 4 --seq 32 "
#define TINY_GREEK TINY "--data greek.txt "

/* The number after "held-out loss " in the last line; NAN if the last line has none. */
double final_loss(const char *out);
/* The held-out unigram entropy that the start table prints. */
double unigram(const char *out);
/* The columns of a CSV log that do not depend on time; *rows: how many rows the log has. */
char *numbers_of(const char *path, int *rows);
/* Waits, at most a minute, until the file has `lines` lines. */
int wait_for_lines(const char *path, int lines);

#endif
