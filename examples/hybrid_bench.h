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
    hy_options options; /* the benchmark sets batch and seq anew for every row of its output */
    uint64_t *random;   /* state of the random generator that places windows */
    /* Makes a model for options.batch windows of options.seq tokens.  If memory is short, hy_last_error() says how
     * much is missing. */
    gt_status (*create)(struct hy_bench *bench, const hy_config *config, hy_model **model, hy_plan *plan);
    void *trainer;     /* used by create */
    hy_backend *cpu;   /* NULL: no comparison with the CPU */
    double copy_speed; /* bytes per second, set by hy_bench_run for bench_generate */
} hy_bench;

/* Runs the benchmark.  Prints to standard output a line about the machine, the heading, and one row for each length
 * and batch. */
gt_status hy_bench_run(hy_bench *bench);

/* Measures memory bandwidth with copies inside memory.  Counts the bytes read and the bytes written, and takes the
 * fastest of several copies. */
gt_status hy_copy_speed(hy_backend *backend, double *bytes_per_s);

/* The largest memory use of the process so far, in MiB. */
double hy_peak_of_process(void);

#endif
