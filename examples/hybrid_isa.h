/* Names of functions that are compiled once per instruction set: the build defines HY_ISA as base or avx2. */
#ifndef HYBRID_ISA_H
#define HYBRID_ISA_H

#ifndef HY_ISA
#define HY_ISA base
#endif

#define HY_JOIN2(a, b, c) a##b##c
#define HY_JOIN(a, b, c) HY_JOIN2(a, b, c)

#define HY_BACKEND_CPU HY_JOIN(hy_backend_cpu_, HY_ISA, )
#define HY_TWIN(name) HY_JOIN(hy_, HY_ISA, _##name)

#endif
