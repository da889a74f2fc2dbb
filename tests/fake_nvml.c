/* A fake libnvidia-ml.so.1 for the trainer's tests.  It knows one GPU, at 0000:0A:00.0, which has no power sensor.
 * HY_NVML="CELSIUS" sets the GPU's temperature.  With HY_NVML="no driver" the library cannot be initialised. */
#include <stdlib.h>
#include <string.h>

static const char *setting(void) {
    const char *text = getenv("HY_NVML");
    return text ? text : "60";
}

int nvmlInit_v2(void) { return strcmp(setting(), "no driver") ? 0 : 9; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error == 9 ? "Driver Not Loaded" : "Not Found"; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **device) {
    *device = NULL;
    return !strcmp(pci, "0000:0A:00.0") && strcmp(setting(), "no GPU") ? 0 : 6;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned *percent) {
    (void)device;
    percent[0] = 93, percent[1] = 41;
    return 0;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
    (void)device;
    *celsius = (unsigned)atoi(setting());
    return sensor ? 2 : 0;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    (void)device, (void)milliwatts;
    return 3;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *bytes) {
    (void)device;
    bytes[0] = 80ULL << 30, bytes[1] = 70ULL << 30, bytes[2] = 10ULL << 30;
    return 0;
}
