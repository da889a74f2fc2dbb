/* Whether this computer has an NVIDIA GPU: with one, no test may be skipped. */
#ifndef GPU_PRESENT_H
#define GPU_PRESENT_H

#include <unistd.h>

/* The driver's control node, which a container without a GPU lacks, whatever its host has. */
static inline int gpu_is_present(void) { return access("/dev/nvidiactl", F_OK) == 0; }

#endif
