/* Division of ints by 0: an error that the machine looks for before a kernel divides. */
#ifndef MAGJIT_DVM_DIVISORS_H
#define MAGJIT_DVM_DIVISORS_H

#include "bytecode.h"

namespace magjit_dvm {

/* Whether a divisor of 0 is an error. */
inline bool divides(const Insn &insn)
{
    return insn.dtype >= DT_i64 && insn.dtype <= DT_u8 &&
           (insn.op == OP_floor_div || insn.op == OP_trunc_div || insn.op == OP_remainder ||
            insn.op == OP_fmod);
}

template <class T>
bool has_zero(const State &s, int64_t rows, int64_t cols)
{
    bool found = false;
    for (int64_t r = 0; r < rows; r++) {
        const T *in = (const T *)(s.p + r * s.rs);
        for (int64_t i = 0; i < (s.cs ? cols : 1); i++) {
            found |= in[i] == 0;
        }
    }
    return found;
}

inline bool any_zero(uint8_t dtype, const State &s, int64_t rows, int64_t cols)
{
    return dtype == DT_i64   ? has_zero<int64_t>(s, rows, cols)
           : dtype == DT_i32 ? has_zero<int32_t>(s, rows, cols)
                             : has_zero<uint8_t>(s, rows, cols);
}

} // namespace magjit_dvm

#endif
