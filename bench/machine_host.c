/* bench/machine_host.c - the bench's machine that runs the CPU twins on this computer. */
#define _POSIX_C_SOURCE 200809L
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static void *allocate(size_t bytes) {
    void *p = malloc(bytes > 0 ? bytes : 1);
    if (p) return p;
    fprintf(stderr, "out of memory (%zu bytes)\n", bytes);
    exit(2);
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void describe(char *text, size_t bytes) {
    char line[256], name[128] = "unknown CPU";
    int threads = 1;
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) || !colon) continue;
        colon[strcspn(colon, "\n")] = 0;
        snprintf(name, sizeof name, "%s", colon + 2);
        break;
    }
    if (f) fclose(f);
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
    snprintf(text, bytes, "%s, %d threads", name, threads);
}

static double copy_bandwidth(void) {
    enum { RUNS = 7, PARTS = 64 };
    const size_t part = (size_t)1 << 20;
    char *from = allocate(PARTS * part), *to = allocate(PARTS * part);
    double ms[RUNS];
    memset(from, 1, PARTS * part);
    memset(to, 0, PARTS * part);
    for (int run = 0; run < RUNS; run++) {
        double start = now_ms();
#ifdef _OPENMP
#pragma omp parallel for
#endif
        for (size_t i = 0; i < PARTS; i++) memcpy(to + i * part, from + i * part, part);
        ms[run] = now_ms() - start;
    }
    free(from);
    free(to);
    bench_median(ms, RUNS);
    return 2.0 * PARTS * (double)part / ms[0]; /* the shortest time, because other programs may also run */
}

static size_t available(void) { return SIZE_MAX; }

static void store(char *at, gt_dtype dtype, float value) {
    uint16_t half = dtype == GT_BF16 ? gt_f32_to_bf16(value) : gt_f32_to_f16(value);
    if (dtype == GT_F32)
        memcpy(at, &value, sizeof value);
    else if (dtype == GT_INT8)
        *(int8_t *)at = bench_integer(value);
    else
        memcpy(at, &half, sizeof half);
}

static float load(const char *at, gt_dtype dtype) {
    float f;
    uint16_t half;
    if (dtype == GT_F32) {
        memcpy(&f, at, sizeof f);
        return f;
    }
    if (dtype == GT_INT8) return *(const int8_t *)at;
    memcpy(&half, at, sizeof half);
    return dtype == GT_BF16 ? gt_bf16_to_f32(half) : gt_f16_to_f32(half);
}

static void fill(void *array, gt_dtype dtype, int64_t count, bench_draw how, uint64_t seed) {
    const int64_t element = gt_dtype_bytes(dtype);
    for (int64_t i = 0; i < count; i++) store((char *)array + i * element, dtype, bench_number(how, seed, i));
}

static void poison(void *memory, size_t bytes) { memset(memory, 0xff, bytes); }

static void copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

static void gather(float *host, const void *array, const bench_region *region) {
    int64_t count = bench_count(region);
    for (int64_t i = 0; i < count; i++) host[i] = load((const char *)array + bench_offset(region, i), region->dtype);
}

static gt_status run(const test_op *op, gt_pass pass, const void *args) { return op->twin[pass](args); }

static gt_status time_run(const test_op *op, gt_pass pass, const void *args, double *ms) {
    double start = now_ms();
    gt_status status = run(op, pass, args);
    *ms = now_ms() - start;
    return status;
}

const bench_machine bench_host = {
    .impl = "ref",
    .warm_ups = 1,
    .least_runs = 1,
    .budget_ms = 300,
    .describe = describe,
    .copy_bandwidth = copy_bandwidth,
    .available = available,
    .allocate = allocate,
    .release = free,
    .fill = fill,
    .poison = poison,
    .copy = copy,
    .gather = gather,
    .run = run,
    .time = time_run,
};

#ifndef BENCH_GPU
const bench_machine *bench_gpu(const char *impl, const char **reason) {
    (void)impl;
    *reason = "built without CUDA";
    return NULL;
}

const bench_machine *bench_products(void) { return NULL; }
const bench_machine *bench_two_streams(void) { return NULL; }
#endif
