/* test_hopper_emu.cpp - test_hopper.cu, emulated on the CPU. */
#include "test_hopper.cu"
