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

/* Where a norm's gradients are added to sums, if nothing else is; −1 without them. `adds` is what
 * adders run. */
int Encoder::find_added_rows(Word &adds) const
{
    const Word *end = image.words + image.n_words;
    auto is_sum = [](const Word &one) {
        return one.first == words.add_up || one.first == words.add_up_norm;
    };
    const Word *sum = std::find_if(image.words, end, is_sum);
    if (std::count_if(image.words, end, is_sum) != 1 || sum->first != words.add_up_norm ||
        image.scratch != image.sums) {
        return -1;
    }
    int at = (int)(sum - image.words);
    bool both = sum->w2 != NO_SLOT;
    if (at < 2 || image.sums != 1 + both || image.chunks > 1) {
        return -1;
    }
    const Word &gradient = sum[-2], &x = sum[-1];
    int what = 0;
    while (what < N_OF_COLUMNS && gradient.first != words.load_a[what]) {
        what++;
    }
    if (what == N_OF_COLUMNS || x.first != words.load[WAY_staged][what] ||
        gradient.second != words.nop || x.second != words.nop) {
        return -1;
    }
    bool known = std::all_of(image.words, end, [sum](const Word &one) {
        return &one == sum || (words.uses[one.first] & words.uses[one.second] & OF_ADDING);
    });
    uint32_t mean = sum->w3 ? input_of_register(sum->x) : NONE, root = input_of_register(sum->y);
    if (!known || root == NONE || (sum->w3 && mean == NONE)) {
        return -1;
    }
    uint32_t slot = (uint32_t)(128 * image.each), beside = both ? sum->w2 / slot : NONE;
    adds = {words.add_rows, words.nop, 0, 0, false, false, false, -1, 0, 0, 0, 0};
    adds.x = (uint8_t)stage_of(gradient.pointer);
    adds.y = (uint8_t)stage_of(x.pointer);
    adds.w1 = mean | root << 8;
    adds.w3 = sum->w1 / slot | beside << 8 | (uint32_t)what << 16;
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
