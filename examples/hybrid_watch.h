/* Watches the GPU of a run: utilisation, temperature, power and memory, as NVML reports them.  NVML comes with the
 * driver, and the program loads it at run time, so no build needs it. */
#ifndef HYBRID_WATCH_H
#define HYBRID_WATCH_H

#include "hybrid_ops.h"

enum { HY_TOO_HOT = 80 }; /* degrees Celsius */

/* One reading of the whole GPU, including other processes.  NAN: NVML does not report this number. */
typedef struct hy_gpu {
    double percent; /* per cent of the time in which a kernel ran */
    double celsius, watts, mib;
} hy_gpu;

typedef struct hy_gpu_watch {
    const struct hy_nvml *nvml; /* NULL: nothing is watched */
    void *device;
    hy_gpu now;         /* the latest reading, at most a second old */
    hy_gpu mean, most;  /* mean and largest value of all readings */
    double read_at;     /* time of the latest reading in seconds of hy_now; 0: none yet */
    long long known[4]; /* number of readings of each of the four numbers */
    int is_hot;         /* 1: the GPU was hotter than HY_TOO_HOT, and has not cooled down by 5 degrees since */
} hy_gpu_watch;

/* Starts to watch the GPU with the PCI address `pci`, in the form of cudaDeviceGetPCIBusId.  Fails if NVML cannot be
 * loaded or does not know the GPU; the message starts with "watch: ". */
gt_status hy_watch_open(hy_gpu_watch *watch, const char *pci);
/* Reads the numbers again if the latest reading is at least a second old.  Returns 1 if the temperature has risen
 * above HY_TOO_HOT since the previous call.  A number that NVML does not report becomes NAN, which is no error. */
int hy_watch_read(hy_gpu_watch *watch);
void hy_watch_close(hy_gpu_watch *watch);

#endif
