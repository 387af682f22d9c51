/* What operators were encoded as: see memo.h. */
#include "memo.h"

#include <algorithm>
#include <new>

namespace magjit_dvm {

void MemoKey::add(double number)
{
    uint64_t bits; /* what is equal may differ: zeros, and NaN is not */
    memcpy(&bits, &number, sizeof(bits));
    add(bits);
}

const char *Memo::kept_for(const MemoKey &key) const
{
    const Place &place = places[key.hash >> 61];
    bool same = place.hash == key.hash && place.kept && place.n == key.n &&
                std::equal(key.words, key.words + key.n, place.key.get());
    return same ? place.kept.get() : nullptr;
}

bool Memo::has_come_before(const MemoKey &key)
{
    Place &place = places[key.hash >> 61];
    if (place.hash == key.hash) {
        return true;
    }
    place.hash = key.hash;
    place.key.reset();
    place.kept.reset();
    return false;
}

char *Memo::room_for(const MemoKey &key, size_t size)
{
    Place &place = places[key.hash >> 61];
    place.n = key.n;
    place.key.reset(new (std::nothrow) uint64_t[(size_t)key.n]);
    place.kept.reset(place.key ? new (std::nothrow) char[size] : nullptr);
    if (place.kept) {
        std::copy_n(key.words, key.n, place.key.get());
    }
    return place.kept.get();
}

int Memo::count() const
{
    auto is_kept = [](const Place &one) { return one.kept != nullptr; };
    return (int)std::count_if(std::begin(places), std::end(places), is_kept);
}

} // namespace magjit_dvm
