/* test_hopper_emu.cpp - test_hopper.cu in the emulation on the CPU. */
#include "test_hopper.cu"
