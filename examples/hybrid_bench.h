/* The measurements of hybrid_train --bench: speed and memory of a model, pass by pass, as CSV. */
#ifndef HYBRID_BENCH_H
#define HYBRID_BENCH_H

#include "hybrid_config.h"
#include "hybrid_data.h"
#include "hybrid_model.h"

typedef struct hy_bench {
    hy_backend *backend;
    const hy_config *config;
    const hy_text *text;
    hy_options options; /* batch and seq change from row to row */
    uint64_t *random;   /* state of the generator that places windows */
    /* Makes a model of options.batch windows of options.seq tokens; the reason if it does not fit is for people. */
    gt_status (*create)(struct hy_bench *bench, const hy_config *config, hy_model **model, hy_plan *plan);
    void *trainer;     /* for create */
    hy_backend *cpu;   /* NULL: no comparison with the CPU */
    double copy_speed; /* of bench_generate, set by hy_bench_run; bytes per second */
} hy_bench;

/* Prints a line of facts, the heading, and the rows of all lengths and batches to standard output. */
gt_status hy_bench_run(hy_bench *bench);

/* Bytes per second that the backend reads and writes as it copies memory: the best of several runs. */
gt_status hy_copy_speed(hy_backend *backend, double *bytes_per_s);

/* MiB of the process at its largest. */
double hy_peak_of_process(void);

#endif
