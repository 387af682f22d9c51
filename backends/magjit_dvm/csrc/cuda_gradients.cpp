/* Gradients of norms whose sums across rows the same warps add up: see cuda/gradients.py. */
#include <algorithm>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int ROW_WORDS = 8; /* behind those that read row values, where there are weights */

bool same_norm(const Word &one, const Word &other)
{
    return one.x == other.x && one.y == other.y && one.w3 == other.w3;
}

} // namespace

/* Where a row's words begin, if they are those of a norm's gradients and nothing else; −1 if not.
 * `whole` is the one for all of them. */
int Encoder::find_gradients(Word &whole) const
{
    const Word *end = image.words + image.n_words;
    const Word *rows = std::find_if(image.words, end,
                                    [](const Word &one) { return one.first != words.row_in; });
    if (end - rows != ROW_WORDS) {
        return -1;
    }
    const Word &gradient = rows[0], &x = rows[1], &adds = rows[2], &weight = rows[3];
    const Word &again = rows[4], &back = rows[5];
    NormOfSums norm = norm_of_sums(gradient, x, adds);
    if (norm.what < 0) {
        return -1;
    }
    const int first[ROW_WORDS] = {
        gradient.first, x.first,        words.add_up_norm,
        weight.first,   x.first,        words.row_back,
        words.store[STORE_aligned][norm.what], words.end};
    uint8_t mul = words.of[OP_mul][REGISTERS_f].plain;
    for (int k = 0; k < ROW_WORDS; k++) {
        if (rows[k].first != first[k] || rows[k].second != (k == 3 ? mul : words.nop)) {
            return -1;
        }
    }
    const uint8_t *loads = words.load_few[WAY_columns - N_WAYS];
    bool weighted = std::find(loads, loads + N_OF_COLUMNS, weight.first) != loads + N_OF_COLUMNS;
    if (!weighted || again.pointer != x.pointer || !same_norm(adds, back)) {
        return -1;
    }
    whole = {words.norm_back, words.nop, norm.gradient, norm.x, false, false, false, -1, 0, 0, 0, 0};
    whole.w1 = norm.inputs | norm.sums << 16;
    whole.w2 = back.w2;
    whole.w3 = (uint32_t)norm.what;
    return (int)(rows - image.words);
}

/* Has one word for all, if that is what the words are; whether it is so. */
bool Encoder::give_to_gradients()
{
    Word whole;
    int at = image.sums ? find_gradients(whole) : -1;
    if (at < 0 || !arrange_gradients()) {
        return false;
    }
    const Word weight = image.words[at + 3], store = image.words[at + 6];
    image.n_words = 0;
    for (const Word &word : {whole, store, weight}) {
        image.words[image.n_words++] = word;
    }
    put(words.end);
    image.n_first = 1;
    image.first[0] = 0;
    image.n_rest = 0;
    return true;
}

} // namespace magjit_dvm::cuda
