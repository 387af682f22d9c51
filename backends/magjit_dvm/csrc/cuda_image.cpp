/* The kernel's parameter of a launch, as cuda/words.py packs it. */
#include <algorithm>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

namespace {

/* n // size is (mulhi(n, magic) + n) >> shift for n below 2^31. */
void find_divisor(uint32_t size, uint32_t &magic, uint32_t &shift)
{
    shift = size > 1 ? 32 - (uint32_t)__builtin_clz(size - 1) : 0;
    magic = (uint32_t)((((uint64_t)1 << 32) * (((uint64_t)1 << shift) - size)) / size + 1);
}

} // namespace

void Encoder::pack()
{
    int64_t n_bytes = HEADER_BYTES + image.program_bytes();
    const int64_t widest[] = {image.cols, image.chunks, image.shared_bytes, image.stage_bytes,
                              image.scratch * 128 * image.each};
    if (*std::max_element(std::begin(widest), std::end(widest)) > (int64_t)UINT32_MAX) {
        return leave();
    }
    encoded.n_bytes = (int)n_bytes;
    encoded.n_patches = 0;
    encoded.each = (int)image.each;
    encoded.elements = image.elements;
    encoded.blocks = image.blocks;
    encoded.threads = 32 * (image.warps + image.adders + 1);
    encoded.shared_bytes = image.shared_bytes;
    encoded.draws = image.tiles > (image.sums ? image.fixed : image.blocks);
    encoded.form = form();
    pack_header();
    pack_words();
}

Form Encoder::form() const
{
    if (image.sums) {
        bool whole = image.words[image.first[0]].first == words.norm_back;
        return whole ? GRADIENTS : image.adders ? ADDING : SUMMING;
    }
    if (image.tail != NO_WORD) {
        return image.chunks > 1 ? READ_ONCE : BATCHED;
    }
    if (image.chunks > 1) {
        return uses_of_all(true) & OF_CHUNKED ? CHUNKED : ALONE;
    }
    int uses = uses_of_all();
    if (image.by_rows && image.lanes < LANES_OF_WARP) {
        return image.lanes == 4 ? EIGHTH : image.lanes == 8 ? QUARTER : HALF;
    }
    if (image.by_rows) {
        bool norms = uses_of_all(true) & OF_NORMS && image.cols % 4 == 0;
        return norms ? NORMS : uses & OF_WHOLE ? WHOLE : ALONE;
    }
    bool around = image.epilogue != NO_WORD || image.prologue != NO_WORD;
    if (around) {
        return ALONE;
    }
    return uses & OF_FLAT ? FLAT : uses & OF_SQUARES ? SQUARES : ALONE;
}

/* What all operators of its words are good for; `but_rows`: but those that are done to row registers, which
 * have cases of their own. */
int Encoder::uses_of_all(bool but_rows) const
{
    int found = ~0;
    for (const Word *word = image.words; word != image.words + image.n_words; word++) {
        bool of_rows = word->first == words.by_row || word->first == words.by_row_number;
        /* Whose second is a number of another table. */
        bool other = word->first == words.by || (but_rows && of_rows);
        found &= words.uses[word->first] & (other ? ~0 : words.uses[word->second]);
    }
    return found;
}

void Encoder::pack_header()
{
    uint32_t passes[2 * MAX_PASSES] = {};
    std::copy(image.first, image.first + image.n_first, passes);
    std::copy(image.rest, image.rest + std::min<int>(image.n_rest, MAX_PASSES),
              passes + MAX_PASSES);
    if (image.tail != NO_WORD) { /* where a fourth pass would be */
        passes[MAX_PASSES - 1] = image.tail;
        passes[2 * MAX_PASSES - 1] = (uint32_t)image.batched;
    }
    const int64_t fields[32] = {image.n_words,
                                image.program_bytes(),
                                image.n_inputs,
                                image.stages,
                                image.stage_bytes,
                                image.warps,
                                image.group,
                                image.cols,
                                image.chunks,
                                image.tiles,
                                image.by_rows ? image.rows_of_tile() : 0,
                                image.n_first,
                                image.epilogue,
                                passes[0],
                                passes[1],
                                passes[2],
                                passes[3],
                                passes[4],
                                passes[5],
                                passes[6],
                                passes[7],
                                image.numbers,
                                image.accumulators,
                                image.barriers_at,
                                image.rows_at,
                                image.partials_at,
                                image.scratch_at,
                                image.ring_at,
                                image.scratch * 128 * image.each,
                                image.prologue,
                                image.sums | image.shift << 8 | image.adders << 16,
                                image.fixed | image.row_bytes | image.keeps};
    memset(encoded.image, 0, HEADER_BYTES);
    char *to = encoded.image;
    for (int64_t field : fields) {
        uint32_t value = (uint32_t)field;
        memcpy(to, &value, 4);
        to += 4;
    }
    memcpy(to, &image.elements, 8);
    memcpy(to + 8, &image.rows, 8);
    for (int k = 0; k < image.n_inputs; k++) {
        const Stage &stage = image.inputs[k];
        bool has_rows = k >= image.n_inputs - image.row_inputs;
        bool repeats = !has_rows && k >= image.n_inputs - image.row_inputs - image.repeats;
        uint32_t what = has_rows ? OF_ROWS : repeats ? OF_ROWS | WHOLE_ROWS : 0;
        uint32_t of_rows = what ? what | (uint32_t)stage.period << PERIOD_SHIFT : 0;
        uint32_t place[2] = {stage.size | of_rows, (uint32_t)stage.at};
        memcpy(encoded.image + INPUTS_AT + 16 * k + 8, place, 8);
        encoded.patches[encoded.n_patches++] = {(uint32_t)(INPUTS_AT + 16 * k),
                                                (uint32_t)stage.argument, 0};
    }
}

void Encoder::pack_words()
{
    int at = HEADER_BYTES;
    for (int k = 0; k < image.n_words; k++, at += 16) {
        const Word &word = image.words[k];
        uint32_t behind = k + 1 < image.n_words ? image.words[k + 1].first : words.end;
        uint32_t head = word.first | (uint32_t)word.second << 8 | (uint32_t)word.x << 16 |
                        (uint32_t)word.y << 20 | behind << 24;
        uint32_t w1 = word.w1, w2 = word.w2;
        if (word.described) {
            w1 = 16 * (uint32_t)(image.n_words + (int)w1 + image.descriptors[w1].at);
        } else if (word.staged) {
            w1 = (uint32_t)image.inputs[stage_of(word.pointer)].at;
        } else if (word.kept) {
            w1 = (uint32_t)(image.weights_at + w1 * image.weight_bytes());
            w2 = word.first == words.affine
                     ? (uint32_t)(image.weights_at + w2 * image.weight_bytes())
                     : w2;
        }
        uint32_t packed[4] = {head, w1, w2, word.w3};
        memcpy(encoded.image + at, packed, 16);
        if (word.pointer >= 0) {
            encoded.patches[encoded.n_patches++] = {(uint32_t)(at + 8), (uint32_t)word.pointer,
                                                    word.offset};
        }
    }
    if (image.sums) {
        encoded.patches[encoded.n_patches++] = {PARTS_AT, (uint32_t)(n_inputs() + n_outputs()), 0};
    }
    for (int k = 0; k < image.n_descriptors; k++) {
        const auto &one = image.descriptors[k];
        uint32_t packed[4] = {one.n, (uint32_t)one.bound, (uint32_t)one.step, (uint32_t)one.cols};
        memcpy(encoded.image + at, packed, 16);
        at += 16;
        for (int j = one.at; j < one.at + one.n; j++, at += 16) {
            packed[0] = (uint32_t)image.described[j].size;
            packed[3] = (uint32_t)image.described[j].stride;
            find_divisor(packed[0], packed[1], packed[2]);
            memcpy(encoded.image + at, packed, 16);
        }
    }
}

/* Rows that turn out not to fit shared memory whole come in chunks. */
void encode(const Prepared &prepared, const Argument *given, const Device &machine,
            Encoded &encoded)
{
    bool again = false;
    do {
        encoded.verdict = ENCODED;
        encoded.reason = nullptr;
        encoded.few_rows = false;
        Encoder one(prepared, given, machine, encoded, again);
        one.run();
        again = one.is_crowded;
    } while (again);
}

} // namespace magjit_dvm::cuda
