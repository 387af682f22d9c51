/* What operators were encoded as: see memo.h. */
#include "memo.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace magjit_dvm {

void MemoKey::add(double number)
{
    uint64_t bits; /* what is equal may differ: zeros, and NaN is not */
    memcpy(&bits, &number, sizeof(bits));
    add(bits);
}

const char *Memo::find(const MemoKey &key) const
{
    const Place &place = places[place_of(key)];
    bool same = place.hash == key.hash && place.kept && place.n == key.n &&
                std::equal(key.words, key.words + key.n, place.key.get());
    return same ? place.kept.get() : nullptr;
}

bool Memo::notes(const MemoKey &key)
{
    Place &place = places[place_of(key)];
    if (place.hash == key.hash) {
        return true;
    }
    place.hash = key.hash;
    place.key.reset();
    place.kept.reset();
    return false;
}

void Memo::keep(const MemoKey &key, std::initializer_list<MemoPart> parts)
{
    Place &place = places[place_of(key)];
    size_t size = 0;
    for (const MemoPart &part : parts) {
        size += part.size;
    }
    place.n = key.n;
    place.key.reset(new (std::nothrow) uint64_t[(size_t)key.n]);
    place.kept.reset(place.key ? new (std::nothrow) char[size] : nullptr);
    if (!place.kept) {
        return;
    }
    std::copy_n(key.words, key.n, place.key.get());
    char *to = place.kept.get();
    for (const MemoPart &part : parts) {
        to = std::copy_n((const char *)part.begin, part.size, to);
    }
}

int Memo::count() const
{
    auto is_kept = [](const Place &one) { return one.kept != nullptr; };
    return (int)std::count_if(std::begin(places), std::end(places), is_kept);
}

} // namespace magjit_dvm
