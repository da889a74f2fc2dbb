/* The interface between test_kernels.c and the machine that runs the kernels.  There are two machines: a GPU
 * (kernels_gpu.cu), and the emulation on the CPU (kernels_emu.cpp).  Each program is linked with one of them. */
#ifndef TEST_KERNELS_H
#define TEST_KERNELS_H

#include "gt_test.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How to make a call.  With all fields 0, the call is made in the plain way: once, on the default stream, without
 * `saved`. */
typedef struct machine_mode {
    const char *name;
    uint64_t schedule; /* in the emulation: seed for the order in which warps run */
    int gives_saved;   /* the caller gives `saved`: forward fills it and backward reads it */
    int copies;        /* number of copies of the call that run at the same time, each on its own stream; 0: 1 */
    /* the call is recorded as a CUDA graph; its replays get new data and other lengths of sequences */
    int is_captured;
    int has_pending_error; /* the caller has a pending CUDA error */
} machine_mode;

/* Passes that run one after the other on one stream. */
typedef struct machine_job {
    gt_status (*pass[2])(const void *args, gt_stream stream);
    test_args args[2];
    int passes;
    char *block; /* the tensors of the last pass in machine memory */
    size_t bytes;
    char *sequences[2]; /* cu_seqlens and seq_count of packed sequences, inside `block` */
    int64_t sequence_counts[2];
} machine_job;

/* Starts the machine.  Returns 0, or an exit code for the program: 77 (skipped) if this computer lacks the machine. */
int machine_start(void);

/* Switches to another device, such as "sm_75".  Returns 0 if the machine does not have this device. */
int machine_choose(const char *device);

/* Prints statistics of the launched kernels, if the machine has any. */
void machine_report(void);

/* Whether the machine launched a kernel whose name contains `kernel`.  Also returns 1 if the machine does not know, or
 * if its device may be too old for the kernel. */
int machine_launched(const char *kernel);

/* Returns the number of thread blocks that have run so far; 0 if the machine does not count them. */
int64_t machine_blocks(void);

/* Allocates machine memory, aligned to 256 bytes.  With is_filled, the memory holds 0xff bytes, which are NaN in every
 * float dtype, and may be a part of a larger allocation.  Otherwise the memory is an allocation of its own. */
char *machine_allocate(size_t bytes, int is_filled);
void machine_release(char *memory);
/* Copies between machine memory and host memory, in either direction. */
void machine_copy(void *to, const void *from, size_t bytes);
/* Fills machine memory with 0xff bytes. */
void machine_poison(char *memory, size_t bytes);
/* Returns the free bytes of the machine's memory.  *total receives its size in bytes. */
size_t machine_memory(size_t *total);

/* The cuBLASLt handle for rmsnorm_linear, in a build with GT_WITH_CUBLASLT; else NULL. */
void *machine_cublaslt(void);

/* Runs all jobs and waits for them.  Returns the first status that is not GT_OK. */
gt_status machine_run(machine_job *jobs, int count, const machine_mode *mode);

/* All ways to make calls except the plain one.  They must give the bits of the plain way.  Ends with name NULL. */
extern const machine_mode machine_modes[];

/* 1: the machine is slow, so tests take only small cases. */
extern const int machine_is_slow;

#ifdef __cplusplus
}
#endif
#endif
