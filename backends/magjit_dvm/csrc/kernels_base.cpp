/* The kernels for x86-64 as every such machine has it. */
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "bytecode.h"

#define MJ_LEVEL "x86-64"
#define MJ_NAME kernels_base

using namespace magjit_dvm;

#include "kernels.inc"
