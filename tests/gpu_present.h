/* Tells whether this computer has an NVIDIA GPU.  If it has one, no test may be skipped. */
#ifndef GPU_PRESENT_H
#define GPU_PRESENT_H

#include <unistd.h>

/* Looks for the driver's control node.  A container without a GPU lacks the node, even if its host has a GPU. */
static inline int gpu_is_present(void) { return access("/dev/nvidiactl", F_OK) == 0; }

#endif
