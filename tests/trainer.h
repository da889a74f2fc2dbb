/* What the tests of the program hybrid_train share: checks, files in a folder of their own, and
 * runs of the program. */
#ifndef TRAINER_H
#define TRAINER_H

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

extern char program[4096]; /* path of hybrid_train */
extern char folder[64];    /* for files; the current directory while the tests run */

#define CHECK(condition) check((condition) != 0, __FILE__, __LINE__, #condition)
int check(int ok, const char *file, int line, const char *condition);
/* With GT_TEST_CASE in the environment only the cases whose names hold that text. */
void run_case(const char *name, void (*test)(void));

/* Enters a new folder, which gets greek.txt and short_greek.txt; 0, or the exit status of a wrong
 * command line.  end_tests removes the folder and returns the exit status. */
int begin_tests(const char *path_of_program);
int end_tests(void);

const char *write_file(const char *name, const void *bytes, size_t size);
const char *write_string(const char *name, const char *text);
/* The whole file as a string; the caller frees it. */
char *read_string(const char *path);

enum { ARGUMENTS_MAX = 96 };
/* Splits a command line at its spaces; argv ends with NULL. */
int split(char *line, char **argv);

/* Starts `hybrid_train LINE` with its output in the file out.txt. */
pid_t start_program(const char *line);
/* Exit status, or 128 + the signal that ended it. */
int wait_for(pid_t child);
/* Runs it; *out gets what it printed, for the caller to free. */
int run_program(char **out, const char *format, ...);
/* It exits with `status` and says both texts; else shows what it said. */
int says(int status, const char *line, const char *text1, const char *text2);

/* A small model, and the texts in the folder: another alphabet, bytes over 127. */
#define TINY "--device cpu --model HY --hidden 32 --layers 2 --batch 4 --seq 32 "
#define TINY_GREEK TINY "--data greek.txt "

/* The number after the last line's "held-out loss "; NAN if the last line is not that. */
double final_loss(const char *out);
/* The held-out unigram entropy that the start table prints. */
double unigram(const char *out);
/* The columns of a CSV log that do not depend on time, and how many rows it has. */
char *numbers_of(const char *path, int *rows);
/* Waits, at most a minute, until the file has so many lines. */
int wait_for_lines(const char *path, int lines);

#endif
