/* How many warps compute, by R, and what sizes are rounded to. */
#ifndef MAGJIT_DVM_CUDA_SIZES_H
#define MAGJIT_DVM_CUDA_SIZES_H

#include <cstdint>

namespace magjit_dvm::cuda {

constexpr int64_t STAGES = 3; /* of a ring */

/* Warps that compute, besides the one that feeds them: what registers allow. */
inline int64_t most_warps(int64_t each) { return each == 64 ? 11 : each >= 24 ? 15 : 19; }

/* The same of kernels that are small: that with adders, which count, and that of norms. */
inline int64_t most_warps_of_small(int64_t each) { return each == 64 ? 11 : each >= 24 ? 19 : 27; }
inline int64_t most_warps_of_norms(int64_t each)
{
    return each >= 24 ? most_warps_of_small(each) : 0;
}

constexpr int64_t MOST_NARROW = 480; /* columns of rows that share warps */

inline int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t rounded(int64_t at, int64_t to = 128) { return quotient_up(at, to) * to; }

} // namespace magjit_dvm::cuda

#endif
