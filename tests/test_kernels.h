/* The two machines that test_kernels.c runs the kernels on: a GPU (kernels_gpu.cu), and the
 * emulation on the CPU (kernels_emu.cpp).  A program is linked with one of them. */
#ifndef TEST_KERNELS_H
#define TEST_KERNELS_H

#include "gt_test.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How calls are made.  All zero is the plain way: once, on the default stream, nothing saved. */
typedef struct machine_mode {
    const char *name;
    uint64_t schedule;     /* emulation: the order in which warps run */
    int gives_saved;       /* backward reads forward's `saved` */
    int copies;            /* number of copies of the call at once, each on its own stream; 0 = 1 */
    int is_captured;       /* recorded into a graph, which is replayed on fresh data and other lengths */
    int has_pending_error; /* an error of the caller is pending */
} machine_mode;

/* Passes that run one after the other on a stream. */
typedef struct machine_job {
    gt_status (*pass[2])(const void *args, gt_stream stream);
    test_args args[2];
    int passes;
    char *block; /* machine memory of the last pass's tensors */
    size_t bytes;
    char *sequences[2]; /* in it, cu_seqlens and seq_count of packed sequences */
    int64_t sequence_counts[2];
} machine_job;

/* 0, or the exit code of the program: 77 = skipped, this computer has no such machine. */
int machine_start(void);

/* Continues as another device, such as "sm_75"; 0 if the machine cannot. */
int machine_choose(const char *device);

/* Prints the machine's counts of each kernel. */
void machine_report(void);

/* Whether kernels whose names contain this have been launched; 1 if the machine
 * does not know, or may be too old for them. */
int machine_launched(const char *kernel);

/* Blocks that have run so far; 0 if the machine does not count them. */
int64_t machine_blocks(void);

/* Machine memory, aligned to 256 bytes.  If is_filled, it holds NaN in every dtype; else it is a separate
 * allocation. */
char *machine_allocate(size_t bytes, int is_filled);
void machine_release(char *memory);
/* Copies between machine memory and the host's. */
void machine_copy(void *to, const void *from, size_t bytes);
/* Makes machine memory NaN in every dtype. */
void machine_poison(char *memory, size_t bytes);
/* Free bytes; *total: all bytes of the machine. */
size_t machine_memory(size_t *total);

/* The handle that rmsnorm_linear is given: of cuBLASLt with GT_WITH_CUBLASLT, else NULL. */
void *machine_cublaslt(void);

/* Runs all jobs to their end; returns the first status that is not GT_OK. */
gt_status machine_run(machine_job *jobs, int count, const machine_mode *mode);

/* The other ways to make calls, which must give the same bits; ends with name NULL. */
extern const machine_mode machine_modes[];

/* 1: small cases only. */
extern const int machine_is_slow;

#ifdef __cplusplus
}
#endif
#endif
