/* The interface between launches.c and fake_cudart.c. */
#ifndef LAUNCHES_H
#define LAUNCHES_H

#ifdef __cplusplus
extern "C" {
#endif

/* Chooses the device that the fake CUDA runtime pretends to have: its compute capability, such as 90, and its number of
 * multiprocessors.  Returns 0 if the capability is unknown. */
int fake_device(int capability, int multiprocessors);

/* Prints every different launch so far: the kernel's mangled name, threads, bytes of dynamic shared memory. */
void fake_print_launches(void);

#ifdef __cplusplus
}
#endif
#endif
