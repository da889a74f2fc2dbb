/* The interface of the two machines that run the kernels for test_kernels.c: a GPU (kernels_gpu.cu), or the emulation
 * on the CPU (kernels_emu.cpp).  Each program is linked with one machine. */
#ifndef TEST_KERNELS_H
#define TEST_KERNELS_H

#include "gt_test.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How to make a call.  All fields 0 is the plain way: once, on the default stream, without `saved`. */
typedef struct machine_mode {
    const char *name;
    uint64_t schedule;     /* emulation: chooses the order in which warps run */
    int gives_saved;       /* backward reads forward's `saved` */
    int copies;            /* copies of the call that run at once, each on its own stream; 0 = 1 */
    int is_captured;       /* the call is recorded into a graph; replays of the graph get new data and other lengths */
    int has_pending_error; /* an earlier error of the caller is still pending in CUDA */
} machine_mode;

/* Passes that run one after the other on one stream. */
typedef struct machine_job {
    gt_status (*pass[2])(const void *args, gt_stream stream);
    test_args args[2];
    int passes;
    char *block; /* machine memory of the last pass's tensors */
    size_t bytes;
    char *sequences[2]; /* in `block`: cu_seqlens and seq_count of packed sequences */
    int64_t sequence_counts[2];
} machine_job;

/* Returns 0, or the exit code of the program: 77 = skipped, because this computer lacks the machine. */
int machine_start(void);

/* Switches to another device, such as "sm_75".  Returns 0 if the machine cannot. */
int machine_choose(const char *device);

/* Prints how often the machine launched each kernel. */
void machine_report(void);

/* Whether kernels were launched whose names contain `kernel`.  Returns 1 if the machine does not know, or if the device
 * may be too old for these kernels. */
int machine_launched(const char *kernel);

/* The number of blocks that have run so far; 0 if the machine does not count blocks. */
int64_t machine_blocks(void);

/* Machine memory, aligned to 256 bytes.  With is_filled it holds NaN in every dtype; otherwise it is a separate
 * allocation. */
char *machine_allocate(size_t bytes, int is_filled);
void machine_release(char *memory);
/* Copies between the machine's memory and the host's, in either direction. */
void machine_copy(void *to, const void *from, size_t bytes);
/* Fills machine memory with NaN in every dtype. */
void machine_poison(char *memory, size_t bytes);
/* Free bytes of the machine; *total: all its bytes. */
size_t machine_memory(size_t *total);

/* The handle for rmsnorm_linear: of cuBLASLt in a build with GT_WITH_CUBLASLT, else NULL. */
void *machine_cublaslt(void);

/* Runs all jobs to their end; returns the first status that is not GT_OK. */
gt_status machine_run(machine_job *jobs, int count, const machine_mode *mode);

/* All other ways to make calls.  They must give the bits of the plain way.  The last entry has name NULL. */
extern const machine_mode machine_modes[];

/* 1: small cases only. */
extern const int machine_is_slow;

#ifdef __cplusplus
}
#endif
#endif
