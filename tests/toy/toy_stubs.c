#include "toy.cuh" /* without a CUDA compiler, toy.cuh defines only stubs */
