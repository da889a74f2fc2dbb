/* gt/emu/fibers.h - every emulated thread is a fiber with its own stack. */
#ifndef GT_EMU_FIBERS_H
#define GT_EMU_FIBERS_H

#include "interface.h"

namespace emu {

constexpr int LANES = 32;
constexpr int MAX_WARPS = 32;
constexpr int MAX_THREADS = LANES * MAX_WARPS;
constexpr int BARRIERS = 16;
constexpr int MAX_MESSAGES = 64;
constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr uint32_t SMEM_BASE = 1024; /* not 0, so that a forgotten base address is out of bounds */
constexpr size_t STACK_BYTES = 256 * 1024;
constexpr size_t GUARD_BYTES = 4096;
constexpr size_t MAX_COLOUR = 16384; /* at most this many bytes at the top of a stack stay free */

[[noreturn]] inline void internal_error(const char* text) {
    fprintf(stderr, "emu: internal error: %s\n", text);
    abort();
}

inline int lowest_bit(uint32_t mask) { return __builtin_ctz(mask); }

#ifndef EMU_UCONTEXT
/* Saves the callee-saved registers and the stack pointer, and continues on the other stack. */
__attribute__((naked, noinline)) inline void switch_stack(void** /*save*/, void* /*load*/) {
    __asm__("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
            "movq %rsp, (%rdi)\n"
            "movq %rsi, %rsp\n"
            "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
            "ret\n");
}
#endif

struct Fiber {
#ifdef EMU_UCONTEXT
    ucontext_t context;
#else
    void* stack_pointer = nullptr;
#endif
    char* stack = nullptr; /* lowest address; null for the host's own stack */
    size_t stack_bytes = 0;
    void* fake_stack = nullptr; /* used by AddressSanitizer */
#ifdef EMU_ASAN
    const void* bottom = nullptr; /* bounds of the stack, in AddressSanitizer's form */
    size_t bottom_bytes = 0;
#endif

    /* Prepares the fiber to run `entry` from its beginning.  `entry` never returns. */
    void start(void (*entry)(), int index, bool abandoned) {
        if (!stack) allocate();
#ifdef EMU_ASAN
        /* Clears red zones of frames that never returned.  These are all frames of an abandoned kernel; otherwise they
         * are the outermost frames. */
        const size_t stale = abandoned ? stack_bytes : MAX_COLOUR + 4096;
        __asan_unpoison_memory_region(stack + stack_bytes - stale, stale);
        bottom = stack;
        bottom_bytes = stack_bytes;
        fake_stack = nullptr;
#else
        (void)abandoned;
#endif
        /* Shifts each stack, because frames at the same depth of different stacks would compete for the same cache
         * sets. */
        const size_t colour = (size_t)index * 13 * 64 % MAX_COLOUR;
        const size_t usable = stack_bytes - colour;
#ifdef EMU_UCONTEXT
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = usable;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
#else
        void** top = reinterpret_cast<void**>(stack + usable);
        *--top = nullptr; /* return address of entry; aligns the stack as a call does */
        *--top = reinterpret_cast<void*>(entry);
        for (int i = 0; i < 6; i++) *--top = nullptr;
        stack_pointer = top;
#endif
    }

  private:
    void allocate() {
        stack_bytes = STACK_BYTES;
        void* memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) internal_error("no memory for fiber stacks");
        if (mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) internal_error("mprotect failed");
        stack = static_cast<char*>(memory) + GUARD_BYTES;
    }
};

inline void switch_fiber(Fiber& from, Fiber& to, bool from_ends) {
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.fake_stack, to.bottom, to.bottom_bytes);
#else
    (void)from_ends;
#endif
#ifdef EMU_UCONTEXT
    swapcontext(&from.context, &to.context);
#else
    switch_stack(&from.stack_pointer, to.stack_pointer);
#endif
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

} /* namespace emu */

#endif
