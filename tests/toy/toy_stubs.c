#include "toy.cuh" /* stubs */
