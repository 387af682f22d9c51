/* What an operator was encoded as is kept: a call whose arguments lie in memory as those of earlier ones
 * did has its program already, but for addresses.
 *
 *     key := machine, (address modulo 16, sizes, strides of a tensor | a number)...
 *
 * Arguments that come once leave no more than a hash. */
#ifndef MAGJIT_DVM_MEMO_H
#define MAGJIT_DVM_MEMO_H

#include <initializer_list>
#include <memory>

#include "program.h"

namespace magjit_dvm {

/* All that encoding asks of the arguments of a call. */
struct MemoKey {
    int n = 0;
    uint64_t hash = 0;
    uint64_t words[8 + MAX_INPUTS * (2 * MAX_DIMS + 2)];

    void add(uint64_t word)
    {
        words[n++] = word;
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    void add(int64_t word) { add((uint64_t)word); }
    void add(double number);
    void add(const Input &in, const int64_t *sizes, const int64_t *strides)
    {
        for (int k = 0; k < in.ndim; k++) {
            add(sizes[k]);
            add(strides[k]);
        }
    }
};

/* A part of what is kept, and how long it is. */
struct MemoPart {
    void *begin;
    size_t size;
};

class Memo {
public:
    /* What is kept for a key, or NULL. */
    const char *find(const MemoKey &key) const;
    /* Whether what has been encoded now is to be kept: its key has come before. Else it is noted. */
    bool notes(const MemoKey &key);
    /* If there is memory. */
    void keep(const MemoKey &key, std::initializer_list<MemoPart> parts);
    int count() const;

private:
    struct Place {
        uint64_t hash; /* of the key that came last */
        int n;
        std::unique_ptr<uint64_t[]> key; /* none before it has come twice */
        std::unique_ptr<char[]> kept;
    };
    Place places[8] = {};

    static size_t place_of(const MemoKey &key) { return key.hash >> 61; }
};

/* Copies the next part out of what is kept. */
inline void unpack(const char *&from, MemoPart part)
{
    __builtin_memcpy(part.begin, from, part.size);
    from += part.size;
}

} // namespace magjit_dvm

#endif
