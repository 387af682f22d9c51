/* What an operator was encoded as is kept: a call whose arguments lie in memory as those of earlier ones
 * did has its program already, but for addresses.
 *
 *     key := machine, (address modulo 16, sizes, strides of a tensor | a number)...
 *
 * Arguments that come once leave no more than a hash. */
#ifndef MAGJIT_DVM_MEMO_H
#define MAGJIT_DVM_MEMO_H

#include <cstring>
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
    /* Whether there is something for a key: its head is written first, which says how long what rest()
     * gives, an array of parts, is. */
    template <typename Rest> bool find(const MemoKey &key, MemoPart head, Rest rest) const
    {
        const char *from = kept_for(key);
        if (!from) {
            return false;
        }
        unpack(from, head);
        for (const MemoPart &part : rest()) {
            unpack(from, part);
        }
        return true;
    }
    /* What was encoded for a key that was not found: it is kept if the key has come before, and there is
     * memory. */
    template <typename Rest> void keep(const MemoKey &key, MemoPart head, Rest rest)
    {
        if (!has_come_before(key)) {
            return;
        }
        const auto parts = rest();
        size_t size = head.size;
        for (const MemoPart &part : parts) {
            size += part.size;
        }
        char *to = room_for(key, size);
        if (!to) {
            return;
        }
        pack(to, head);
        for (const MemoPart &part : parts) {
            pack(to, part);
        }
    }
    int count() const;

private:
    struct Place {
        uint64_t hash; /* of the key that came last */
        int n;
        std::unique_ptr<uint64_t[]> key; /* none before it has come twice */
        std::unique_ptr<char[]> kept;
    };
    Place places[8] = {}; /* by the first three bits of hashes */

    const char *kept_for(const MemoKey &key) const;
    bool has_come_before(const MemoKey &key); /* noted, if not */
    char *room_for(const MemoKey &key, size_t size);

    static void unpack(const char *&from, MemoPart part)
    {
        memcpy(part.begin, from, part.size);
        from += part.size;
    }
    static void pack(char *&to, MemoPart part)
    {
        memcpy(to, part.begin, part.size);
        to += part.size;
    }
};

} // namespace magjit_dvm

#endif
