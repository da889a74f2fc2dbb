/* The machine of test_kernels.h by emulation: runs the kernels on the CPU, with host memory as device memory. */
#include "gt/emu/emu.h"

#include "test_kernels.h"

#include <stdio.h>

#include <map>
#include <new>
#include <string>

const int machine_is_slow = 1;

const machine_mode machine_modes[] = {
    {"another schedule of warps", 2, 0, 0, 0, 0}, {"a third schedule", 3, 1, 0, 0, 0}, {}};

int machine_start(void) { return 0; }

int machine_choose(const char *name) {
    static const struct {
        const char *name;
        emu::Device device;
    } devices[] = {{"sm_75", {4, 7, 5, 64 * 1024, 64 * 1024}},
                   {"sm_80", {4, 8, 0, 164 * 1024, 163 * 1024}},
                   {"sm_86", {4, 8, 6, 100 * 1024, 99 * 1024}},
                   {"sm_90", {4, 9, 0, 228 * 1024, 227 * 1024}}};
    for (const auto &known : devices) {
        if (strcmp(known.name, name)) continue;
        emu::device = known.device;
        return 1;
    }
    return 0;
}

/* Prints the bank conflicts of each kernel template, summed over its instances. */
void machine_report(void) {
    std::map<std::string, emu::KernelTraffic> kernels;
    for (const emu::KernelTraffic &k : emu::kernels()) {
        std::string name = emu::symbol_name(k.kernel);
        name = name.substr(0, name.find('<'));
        const size_t start = name.find("gt::");
        if (start != std::string::npos) name = name.substr(start + 4);
        kernels[name].wavefronts += k.wavefronts;
        kernels[name].ideal += k.ideal;
    }
    for (const auto &k : kernels)
        if (k.second.ideal)
            printf("     shared memory: %-34s %10llu wavefronts, ideal %10llu\n", k.first.c_str(),
                   (unsigned long long)k.second.wavefronts, (unsigned long long)k.second.ideal);
}

int machine_launched(const char *kernel) {
    /* kernels that the emulated device lacks, or replaces by others, count as launched */
    const bool is_hopper = emu::device.capability_major == 9;
    const bool needs_hopper = strstr(kernel, "hopper") || strstr(kernel, "conv_ssd::") ||
                              strstr(kernel, "forward_maps_kernel") || !strcmp(kernel, "chunk_factors_kernel") ||
                              !strcmp(kernel, "chunk_times_kernel") || !strcmp(kernel, "ssd::gate_kernel") ||
                              !strcmp(kernel, "gate_lost_kernel");
    if (emu::device.capability_major < 8 || (needs_hopper && !is_hopper)) return 1;
    const bool gives_way = !strcmp(kernel, "chunk_gradient_kernel") || !strcmp(kernel, "ssd::states_tensor_kernel");
    if (gives_way && is_hopper) return 1;
    for (const emu::KernelTraffic &k : emu::kernels())
        if (emu::symbol_name(k.kernel).find(kernel) != std::string::npos) return 1;
    return 0;
}

int64_t machine_blocks(void) { return (int64_t)emu::stats().blocks; }

char *machine_allocate(size_t bytes, int is_filled) {
    void *memory = operator new(bytes, std::align_val_t(256));
    if (is_filled) machine_poison(static_cast<char *>(memory), bytes);
    return static_cast<char *>(memory);
}

void machine_release(char *memory) { operator delete(memory, std::align_val_t(256)); }

void machine_copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

void machine_poison(char *memory, size_t bytes) { memset(memory, 0xff, bytes); }

size_t machine_memory(size_t *total) { return *total = (size_t)1 << 40; }

void *machine_cublaslt(void) {
#ifdef GT_WITH_CUBLASLT
    static char handle; /* emulated_cublaslt/cublasLt.h ignores the contents of a handle */
    return &handle;
#else
    return nullptr;
#endif
}

gt_status machine_run(machine_job *jobs, int count, const machine_mode *mode) {
    gt_status status = GT_OK;
    emu::set_seed(mode->schedule);
    for (int i = 0; i < count; i++)
        for (int k = 0; k < jobs[i].passes && status == GT_OK; k++) status = jobs[i].pass[k](&jobs[i].args[k], nullptr);
    if (emu::faults()) {
        for (const std::string &message : emu::messages()) printf("%s\n", message.c_str());
        status = gt_fail(GT_ERROR_CUDA, "%llu faults in the emulation, the first: %s",
                         (unsigned long long)emu::faults(), emu::messages()[0].c_str());
        emu::reset();
    }
    return status;
}
