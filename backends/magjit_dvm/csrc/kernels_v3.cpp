/* The kernels for x86-64-v3. */
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "bytecode.h"

#pragma GCC target("avx2,fma,f16c,bmi,bmi2")

/* The compiler does not define __FMA__ and its like for a target of a pragma. */
#define MAGJIT_DVM_FMA
#define MJ_LEVEL "x86-64-v3"
#define MJ_NAME kernels_v3

using namespace magjit_dvm;

#include "kernels.inc"
