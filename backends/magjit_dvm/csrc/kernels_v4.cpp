/* The kernels for x86-64-v4. */
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "bytecode.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,f16c,bmi,bmi2,prefer-vector-width=512")

/* The compiler does not define __FMA__ and its like for a target of a pragma. */
#define MAGJIT_DVM_FMA
#define MAGJIT_DVM_AVX512
#define MJ_LEVEL "x86-64-v4"
#define MJ_NAME kernels_v4

using namespace magjit_dvm;

#include "kernels.inc"
