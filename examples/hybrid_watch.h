/* The GPU of a run as NVML reports it: utilisation, temperature, power and memory.  NVML comes with the driver and is
 * loaded at run time, so that no build needs it. */
#ifndef HYBRID_WATCH_H
#define HYBRID_WATCH_H

#include "hybrid_ops.h"

enum { HY_TOO_HOT = 80 }; /* degrees Celsius */

/* Readings of the whole GPU, including other processes; NAN: NVML does not report the number. */
typedef struct hy_gpu {
    double percent; /* share of the time in which a kernel ran */
    double celsius, watts, mib;
} hy_gpu;

typedef struct hy_gpu_watch {
    const struct hy_nvml *nvml; /* NULL: nothing is watched */
    void *device;
    hy_gpu now;         /* the latest reading, at most a second old */
    hy_gpu mean, most;  /* over all readings */
    double read_at;     /* time of the latest reading in seconds of hy_now; 0: none yet */
    long long known[4]; /* number of readings of each of the four numbers */
    int is_hot;         /* 1: the GPU was over HY_TOO_HOT and has not cooled to 5 degrees below it since */
} hy_gpu_watch;

/* Watches the GPU with this PCI address, as cudaDeviceGetPCIBusId gives it.  Fails if NVML cannot be loaded or does not
 * know the GPU; the message starts with "watch: ". */
gt_status hy_watch_open(hy_gpu_watch *watch, const char *pci);
/* Reads the numbers again if the latest are a second old.  Returns 1 if the temperature has risen over HY_TOO_HOT since
 * the previous call.  A number that NVML does not report becomes NAN; that is no error. */
int hy_watch_read(hy_gpu_watch *watch);
void hy_watch_close(hy_gpu_watch *watch);

#endif
