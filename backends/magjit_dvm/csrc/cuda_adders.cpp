/* Warps that add up sums across rows, beside those that compute rows: see cuda/adders.py. */
#include <algorithm>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

/* The input that has a row register's numbers of 32 bits; NONE where it comes from elsewhere. */
uint32_t Encoder::input_of_register(int number) const
{
    for (int k = 0; k < image.n_words; k++) {
        const Word &word = image.words[k];
        if (word.first == words.row_in && word.x == number && !word.y) {
            return (uint32_t)stage_of(word.pointer);
        }
    }
    return NONE;
}

/* Of a norm's gradients that `adds` adds to sums, behind loads of G and x, what is where; without a
 * dtype if it is not all that is added, or not all in stages. */
NormOfSums Encoder::norm_of_sums(const Word &gradient, const Word &x, const Word &adds) const
{
    NormOfSums found;
    int what = 0;
    while (what < N_OF_COLUMNS && gradient.first != words.load_a[what]) {
        what++;
    }
    bool both = adds.w2 != NO_SLOT, all = image.sums == 1 + both && image.scratch == image.sums;
    bool loads = what < N_OF_COLUMNS && x.first == words.load[WAY_staged][what] &&
                 gradient.second == words.nop && x.second == words.nop;
    if (!all || !loads || image.chunks > 1) {
        return found;
    }
    uint32_t mean = adds.w3 ? input_of_register(adds.x) : NONE, root = input_of_register(adds.y);
    if (root == NONE || (adds.w3 && mean == NONE)) {
        return found;
    }
    uint32_t slot = (uint32_t)(128 * image.each), beside = both ? adds.w2 / slot : NONE;
    found.what = what;
    found.gradient = (uint8_t)stage_of(gradient.pointer);
    found.x = (uint8_t)stage_of(x.pointer);
    found.inputs = mean | root << 8;
    found.sums = adds.w1 / slot | beside << 8;
    return found;
}

/* Where a norm's gradients are added to sums, if nothing else is; −1 without them. `adds` is what
 * adders run. */
int Encoder::find_added_rows(Word &adds) const
{
    const Word *end = image.words + image.n_words;
    auto is_sum = [](const Word &one) {
        return one.first == words.add_up || one.first == words.add_up_norm;
    };
    const Word *sum = std::find_if(image.words, end, is_sum);
    int at = (int)(sum - image.words);
    if (std::count_if(image.words, end, is_sum) != 1 || sum->first != words.add_up_norm || at < 2) {
        return -1;
    }
    bool known = std::all_of(image.words, end, [sum](const Word &one) {
        return &one == sum || (words.uses[one.first] & words.uses[one.second] & OF_ADDING);
    });
    NormOfSums norm = norm_of_sums(sum[-2], sum[-1], *sum);
    if (!known || norm.what < 0) {
        return -1;
    }
    adds = {words.add_rows, words.nop, norm.gradient, norm.x, false, false, false, -1, 0, 0, 0, 0};
    adds.w1 = norm.inputs;
    adds.w3 = norm.sums | (uint32_t)norm.what << 16;
    return at;
}

/* Has adders, if sums are a norm's gradients and rows are wide enough that it pays. */
void Encoder::give_to_adders()
{
    Word adds;
    int at = image.sums ? find_added_rows(adds) : -1;
    if (at < 0) {
        return;
    }
    adds.w2 = (uint32_t)arrange_beside_adders();
    if (!adds.w2) {
        return;
    }
    std::copy(image.words + at + 1, image.words + image.n_words, image.words + at - 1);
    image.n_words -= 2;
    image.scratch = 0;
    image.n_rest = 1;
    image.rest[0] = (uint16_t)image.n_words;
    image.words[image.n_words++] = adds;
    put(words.end);
}

} // namespace magjit_dvm::cuda
