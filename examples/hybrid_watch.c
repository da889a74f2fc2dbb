#define _XOPEN_SOURCE 700
#include "hybrid_watch.h"
#include "hybrid_log.h"
#include <dlfcn.h>
#include <math.h>
#include <string.h>

typedef struct nvml_percent {
    unsigned gpu, memory;
} nvml_percent;

typedef struct nvml_bytes {
    unsigned long long total, free, used;
} nvml_bytes;

/* The NVML functions that this file calls, as NVIDIA's NVML API Reference Guide declares them.  They return 0 on
 * success. */
struct hy_nvml {
    int (*init)(void);
    int (*shutdown)(void);
    const char *(*error)(int);
    int (*find)(const char *pci, void **device);
    int (*utilization)(void *device, nvml_percent *percent);
    int (*temperature)(void *device, int sensor, unsigned *celsius); /* sensor 0 is the GPU */
    int (*power)(void *device, unsigned *milliwatts);
    int (*memory)(void *device, nvml_bytes *bytes);
};

static const char library_name[] = "libnvidia-ml.so.1";

/* Finds a function of the library.  Returns 0 if the library has no such function. */
static int find(void *library, const char *name, void *function) {
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found); /* ISO C has no cast from an object pointer to a function pointer */
    return found != NULL;
}

gt_status hy_watch_open(hy_gpu_watch *watch, const char *pci) {
    static struct hy_nvml nvml;
    *watch = (hy_gpu_watch){.nvml = NULL};
    void *library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL); /* stays loaded, like CUDA's libraries */
    if (!library) return hy_fail(GT_ERROR_UNSUPPORTED, "watch: %s", dlerror());
    if (!find(library, "nvmlInit_v2", &nvml.init) || !find(library, "nvmlShutdown", &nvml.shutdown) ||
        !find(library, "nvmlErrorString", &nvml.error) ||
        !find(library, "nvmlDeviceGetHandleByPciBusId_v2", &nvml.find) ||
        !find(library, "nvmlDeviceGetUtilizationRates", &nvml.utilization) ||
        !find(library, "nvmlDeviceGetTemperature", &nvml.temperature) ||
        !find(library, "nvmlDeviceGetPowerUsage", &nvml.power) ||
        !find(library, "nvmlDeviceGetMemoryInfo", &nvml.memory))
        return hy_fail(GT_ERROR_UNSUPPORTED, "watch: %s: %s", library_name, dlerror());
    int error = nvml.init();
    if (error) return hy_fail(GT_ERROR_UNSUPPORTED, "watch: nvmlInit_v2: %s", nvml.error(error));
    error = nvml.find(pci, &watch->device);
    if (error) {
        nvml.shutdown();
        return hy_fail(GT_ERROR_UNSUPPORTED, "watch: the GPU at %s: %s", pci, nvml.error(error));
    }
    watch->nvml = &nvml;
    return GT_OK;
}

/* Adds number i of a reading to its mean and to its largest value. */
static void add(hy_gpu_watch *w, int i, double now, double *mean, double *most) {
    if (isnan(now)) return;
    *mean += (now - *mean) / (double)++w->known[i];
    if (w->known[i] == 1 || now > *most) *most = now;
}

int hy_watch_read(hy_gpu_watch *w) {
    const struct hy_nvml *nvml = w->nvml;
    const double time = hy_now();
    nvml_percent percent;
    nvml_bytes bytes;
    unsigned celsius, milliwatts;
    if (!nvml || (w->read_at > 0 && time - w->read_at < 1)) return 0;
    w->read_at = time;
    w->now.percent = nvml->utilization(w->device, &percent) ? NAN : (double)percent.gpu;
    w->now.celsius = nvml->temperature(w->device, 0, &celsius) ? NAN : (double)celsius;
    w->now.watts = nvml->power(w->device, &milliwatts) ? NAN : 1e-3 * (double)milliwatts;
    w->now.mib = nvml->memory(w->device, &bytes) ? NAN : (double)bytes.used / (1024.0 * 1024.0);
    add(w, 0, w->now.percent, &w->mean.percent, &w->most.percent);
    add(w, 1, w->now.celsius, &w->mean.celsius, &w->most.celsius);
    add(w, 2, w->now.watts, &w->mean.watts, &w->most.watts);
    add(w, 3, w->now.mib, &w->mean.mib, &w->most.mib);
    const int was_hot = w->is_hot;
    if (w->now.celsius > HY_TOO_HOT) w->is_hot = 1;
    if (w->now.celsius <= HY_TOO_HOT - 5) w->is_hot = 0;
    return w->is_hot && !was_hot;
}

void hy_watch_close(hy_gpu_watch *watch) {
    if (watch->nvml) watch->nvml->shutdown();
    watch->nvml = NULL;
}
