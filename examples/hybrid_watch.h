/* The GPU of a run as NVML reports it: utilisation, temperature, power and memory.  NVML comes with the driver and is
 * loaded at run time, so that no build needs it. */
#ifndef HYBRID_WATCH_H
#define HYBRID_WATCH_H

#include "hybrid_ops.h"

enum { HY_TOO_HOT = 80 }; /* degrees Celsius */

/* Readings of the whole GPU, other processes included; NAN: NVML does not tell. */
typedef struct hy_gpu {
    double percent; /* of the time, a kernel ran */
    double celsius, watts, mib;
} hy_gpu;

typedef struct hy_gpu_watch {
    const struct hy_nvml *nvml; /* NULL: nothing is watched */
    void *device;
    hy_gpu now;         /* the latest reading, at most a second old */
    hy_gpu mean, most;  /* over all readings */
    double read_at;     /* in seconds of hy_now; 0: not yet */
    long long known[4]; /* how many readings of each number there are */
    int is_hot;         /* 1: it was over HY_TOO_HOT, and not 5 degrees under it since */
} hy_gpu_watch;

/* Watches the GPU at that place on the PCI bus, as cudaDeviceGetPCIBusId names it.  Fails if NVML cannot be loaded or
 * does not know the GPU; the message starts with "watch: ". */
gt_status hy_watch_open(hy_gpu_watch *watch, const char *pci);
/* Reads the numbers anew if the latest are a second old.  Returns 1 if the temperature has risen over HY_TOO_HOT since
 * the call before.  A number that NVML does not tell is NAN, and no error. */
int hy_watch_read(hy_gpu_watch *watch);
void hy_watch_close(hy_gpu_watch *watch);

#endif
