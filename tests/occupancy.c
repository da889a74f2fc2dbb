/* Prints occupancies as cuda_occupancy.h of the CUDA Toolkit computes them, for check_occupancy.sh.  A line has the
 * architecture, registers of a thread, threads and bytes of shared memory of a block, barriers of a block, and then the
 * number of blocks that fit and the resources that allow no more blocks. */
#include <cuda_occupancy.h>
#include <stdio.h>

typedef struct cudaOccDeviceProp device;

/* From the CUDA Programming Guide: compute capability, threads and KB of shared memory of a multiprocessor, KB of a
 * block, KB reserved for each block. */
static const int devices[][6] = {{7, 5, 1024, 64, 64, 0},  {8, 0, 2048, 164, 163, 1}, {8, 6, 1536, 100, 99, 1},
                                 {8, 9, 1536, 100, 99, 1}, {9, 0, 2048, 228, 227, 1}, {10, 0, 2048, 228, 227, 1},
                                 {12, 0, 1536, 100, 99, 1}};

static void print(const device *d, int registers, int threads, int bytes, int barriers) {
    cudaOccFuncAttributes f = {.maxThreadsPerBlock = 1024, .numRegs = registers, .numBlockBarriers = barriers};
    cudaOccDeviceState state = {.cacheConfig = CACHE_PREFER_SHARED, .carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED};
    cudaOccResult result;
    const char *comma = "";
    f.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    f.maxDynamicSharedSizeBytes = d->sharedMemPerBlockOptin;
    /* an older file does not know newer devices */
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, d, &f, &state, threads, (size_t)bytes) != CUDA_OCC_SUCCESS)
        return;
    printf("%d %d %d %d %d %d ", 10 * d->computeMajor + d->computeMinor, registers, threads, bytes, barriers,
           result.activeBlocksPerMultiprocessor);
    /* limitingFactors also has resources that would allow more blocks than the barriers do */
    const struct {
        int blocks;
        const char *name;
    } limits[] = {{result.blockLimitWarps, "warps"},
                  {result.blockLimitRegs, "registers"},
                  {result.blockLimitSharedMem, "shared memory"},
                  {result.blockLimitBlocks, "blocks"},
                  {result.blockLimitBarriers, "barriers"}};
    for (unsigned i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        if (limits[i].blocks != result.activeBlocksPerMultiprocessor) continue;
        printf("%s%s", comma, limits[i].name);
        comma = ", ";
    }
    printf("\n");
}

int main(void) {
    static const int bytes[] = {0,     1,     1024,  4096,  9999,   16384,  33000,
                                49152, 65536, 74752, 98304, 100000, 115712, 232448};
    static const int barriers[] = {0, 1, 3, 16};
    for (unsigned i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        const int *of = devices[i];
        const device d = {.computeMajor = of[0],
                          .computeMinor = of[1],
                          .maxThreadsPerBlock = 1024,
                          .maxThreadsPerMultiprocessor = of[2],
                          .regsPerBlock = 65536,
                          .regsPerMultiprocessor = 65536,
                          .warpSize = 32,
                          .sharedMemPerBlock = 48 << 10,
                          .sharedMemPerMultiprocessor = (size_t)of[3] << 10,
                          .numSms = 4,
                          .sharedMemPerBlockOptin = (size_t)of[4] << 10,
                          .reservedSharedMemPerBlock = (size_t)of[5] << 10};
        for (int registers = 16; registers <= 255; registers += registers < 250 ? 8 : 5)
            for (int threads = 32; threads <= 1024; threads += threads < 256 ? 32 : 128)
                for (unsigned b = 0; b < sizeof bytes / sizeof bytes[0]; b++)
                    print(&d, registers, threads, bytes[b], barriers[(b + (unsigned)registers / 8) % 4]);
    }
    return 0;
}
