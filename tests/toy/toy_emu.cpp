#include "toy.cuh" /* compiles the kernels for the emulation */
