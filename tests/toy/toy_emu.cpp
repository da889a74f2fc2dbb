#include "toy.cuh" /* the kernels, emulated */
