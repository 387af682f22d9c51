/* Vectors that all rows share, kept in shared memory: see cuda/weights.py. */
#include <algorithm>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int MOST = 4;

} // namespace

/* The number of the vector that a word loads; n of one that is not known, -1 of another word. */
int Encoder::weight_of(const Word &word, const Word *known, int n) const
{
    const uint8_t *loads = words.load_few[WAY_columns - N_WAYS];
    if (std::find(loads, loads + N_OF_COLUMNS, word.first) == loads + N_OF_COLUMNS) {
        return -1;
    }
    for (int k = 0; k < n; k++) {
        if (known[k].first == word.first && known[k].pointer == word.pointer &&
            known[k].offset == word.offset) {
            return k;
        }
    }
    return n;
}

/* Whether vectors are kept, in the place of up to half of the rows where none is reduced; so it is of
 * sums across rows. */
bool Encoder::make_room(int n)
{
    int64_t rows = image.warps / image.group;
    bool gives = image.sums || !count_of(OF_ROWS_REDUCED);
    while (!has_room(n)) {
        if (!gives || 2 * (image.warps / image.group - 1) < rows) {
            return false;
        }
        shrink();
        if (stopped()) {
            return false;
        }
    }
    return true;
}

/* T as `acc.norm` leaves it, for a gradient behind it; how many words there are then. */
int Encoder::normalize_once(int n_words)
{
    constexpr uint32_t READY = 2;
    uint8_t mul = words.of[OP_mul][REGISTERS_f].plain;
    for (int k = 0; k + 5 <= n_words; k++) {
        Word *at = image.words + k;
        const Word &load = at[0], &adds = at[1], &scales = at[2], &again = at[3], &back = at[4];
        bool same_load = load.first == again.first && load.second == again.second &&
                         load.y == again.y && load.w1 == again.w1 &&
                         load.pointer == again.pointer && load.offset == again.offset;
        bool same_norm = adds.x == back.x && adds.y == back.y && adds.w3 == back.w3;
        if (adds.first == words.add_up_norm && scales.first == words.kept &&
            scales.second == mul && back.first == words.row_back && same_load && same_norm) {
            at[2].first = words.scale;
            at[2].second = words.nop;
            at[3] = back;
            at[3].w3 |= READY;
            std::copy(at + 5, image.words + n_words, at + 4);
            return n_words - 1;
        }
    }
    return n_words;
}

/* Words for what is kept in the place of loads, if there is room, and the prologue. */
void Encoder::keep_weights()
{
    if (!image.by_rows || image.chunks > 1 || image.tiles < LEAST_TILES * image.blocks) {
        return;
    }
    Word known[MOST];
    int n = 0;
    for (int k = 0; k < image.n_words; k++) {
        int number = weight_of(image.words[k], known, n);
        if (number == n) {
            if (n == MOST) {
                return;
            }
            known[n++] = image.words[k];
        }
    }
    if (!n || !make_room(n)) {
        return;
    }
    uint8_t mul = words.of[OP_mul][REGISTERS_f].plain, add = words.of[OP_add][REGISTERS_f].plain;
    uint16_t moved[MOST_WORDS + 2];
    int made = 0;
    for (int k = 0; k < image.n_words; k++) {
        Word word = image.words[k];
        moved[k] = (uint16_t)made;
        int number = weight_of(word, known, n);
        Word *before = made ? &image.words[made - 1] : nullptr;
        if (number >= 0 && before && before->first == words.kept && before->second == mul &&
            word.second == add) {
            before->first = words.affine;
            before->second = words.nop;
            before->w2 = (uint32_t)number;
            continue;
        }
        if (number >= 0) {
            word = {words.kept, word.second, 0,     word.y, false, false,
                    true,       -1,          (uint32_t)number, 0,      0,     0};
        }
        image.words[made++] = word;
    }
    made = normalize_once(made);
    for (int k = 0; k < image.n_first; k++) {
        image.first[k] = moved[image.first[k]];
    }
    for (int k = 0; k < image.n_rest; k++) {
        image.rest[k] = moved[image.rest[k]];
    }
    image.n_words = made;
    image.prologue = (uint32_t)made;
    for (int k = 0; k < n; k++) {
        Word &load = image.words[image.n_words++] = known[k];
        load.second = words.take;
        Word &save = image.words[image.n_words++];
        save = {words.save, words.nop, 0, 0, false, false, false, -1, 0, 0, 0, 0};
        save.w1 = (uint32_t)(k * image.weight_bytes());
    }
    put(words.end);
}

} // namespace magjit_dvm::cuda
