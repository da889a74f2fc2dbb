/* The list of operators for tests that are built with the toy operator alone: see toy.h. */
#include "toy.h"

#define TEST_OPERATORS(X) X(toy)
