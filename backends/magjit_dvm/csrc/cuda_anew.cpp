/* How a launch divides its work anew once its words are known: for the kernels that are made for them. */
#include <algorithm>
#include <iterator>

#include "cuda_encoder.h"
#include "cuda_sizes.h"

namespace magjit_dvm::cuda {

namespace {

/* Of narrow rows up to so many columns, R, and how many lanes of a warp each has. */
struct {
    int64_t cols, lanes, each;
} constexpr OF_NARROW_ROWS[] = {{32, 4, 8},   {64, 4, 16},  {96, 4, 24},   {128, 8, 16},
                                {192, 8, 24}, {256, 8, 32}, {384, 16, 24}, {480, 16, 32}};
constexpr int64_t LEAST_OF_NARROW = 2; /* tiles of a block */

/* Of rows up to so many columns, R, and how many times four columns a lane of an adder has. */
struct {
    int64_t cols, each, quads;
} constexpr BESIDE_ADDERS[] = {{256, 8, 1},   {512, 16, 1},  {768, 24, 1}, {1024, 32, 2},
                               {2048, 64, 4}, {4096, 64, 8}, {8192, 32, 8}};

/* Of the kernel of norms' gradients, R and its warps: rows have the first R that they fit with. Row
 * registers, and one more, are where a warp's sums meet those of others. */
struct {
    int64_t each, warps;
} constexpr OF_GRADIENTS[] = {{16, 19}, {36, 15}};
constexpr int MEETING = 7;
constexpr int64_t OF_ROW = 16; /* the most warps of a row there */
constexpr int64_t WARPS_OF_SQUARES = 19;

/* Of rows in chunks, R, how many a block has at most, and the most bytes of those that are read again:
 * where something is looked up, of columns that do not come by four, and of those that do. */
struct {
    int64_t each, rows, near_bytes;
} constexpr OF_CHUNKS[] = {{32, 2, 32 << 20}, {24, 3, 40 << 20}, {64, 2, 32 << 20}};
constexpr int64_t LEAST_OF_CHUNKS = 3; /* tiles of a block, from which on it has several such rows */
constexpr int64_t FEW = 12; /* warps, below which those of the kernel of norms serve vectors better */

} // namespace

/* Divides rows that fit a block anew, beside warps that add up sums across them: how many times four
 * columns a lane of those has; 0 where it would not pay. */
int64_t Encoder::arrange_beside_adders()
{
    for (const auto &[cols, widest, quads] : BESIDE_ADDERS) {
        if (image.cols > cols) {
            continue;
        }
        int64_t each = std::min(widest, machine.widest), adders = quotient_up(image.cols, 128 * quads);
        if (!divide_anew(each, most_warps_of_small(each) - adders)) {
            return 0;
        }
        image.adders = adders;
        return quads;
    }
    return 0;
}

/* Divides rows of norms' gradients anew, among warps whose lanes keep sums of own columns; whether it
 * pays, and there is room for two stages. */
bool Encoder::arrange_gradients()
{
    int64_t each = 0, most = 0;
    for (const auto &one : OF_GRADIENTS) {
        if (!each && image.cols <= 32 * one.each * std::min(one.warps, OF_ROW)) {
            each = one.each;
            most = one.warps;
        }
    }
    if (!each) {
        return false;
    }
    int64_t lanes = rounded(image.cols, 32 * each);
    if (image.cols <= std::end(BESIDE_ADDERS)[-1].cols && 8 * image.cols < 7 * lanes) {
        return false;
    }
    const int64_t before[] = {image.each, image.group, image.warps};
    const int numbers = image.numbers, scratch = image.scratch;
    image.numbers = MEETING;
    image.scratch = 0;
    if (divide_anew(each, most)) {
        while (!has_room(1) && image.warps > image.group) {
            shrink();
        }
        if (image.weights) {
            image.weights = 0;
            return true;
        }
    }
    image.each = before[0];
    image.group = before[1];
    image.warps = before[2];
    image.numbers = numbers;
    image.scratch = scratch;
    count();
    return false;
}

/* Whether warps, not memory, are what rows wait for: with several reductions, or several numbers of
 * rows, or several vectors where there are few warps. */
bool Encoder::computes_much(int64_t reductions) const
{
    const uint8_t *loads = words.load_few[WAY_columns - N_WAYS];
    int vector = -1;
    bool vectors = false;
    for (const Word *word = image.words; word != image.words + image.n_words; word++) {
        if (std::find(loads, loads + N_OF_COLUMNS, word->first) != loads + N_OF_COLUMNS) {
            vectors |= vector >= 0 && vector != word->pointer;
            vector = word->pointer;
        }
    }
    return reductions > 1 || image.row_inputs > 1 || (vectors && image.warps <= FEW);
}

/* Divides norms and squares anew, among the warps that their kernels have registers for. A block has to
 * have several tiles; if not, the launch may share the kernel of stacks. */
void Encoder::arrange_anew()
{
    if (arrange_several()) {
        return;
    }
    Form found = form();
    if (found == NORMS || found == BATCHED) {
        arrange_norms();
    } else if (found == SQUARES) {
        int64_t slices = LEAST_TILES * WARPS_OF_SQUARES * machine.multiprocessors;
        if (image.elements >= slices * image.slice()) {
            image.warps = WARPS_OF_SQUARES;
            count();
        }
    } else if (found == CHUNKED || found == READ_ONCE) {
        arrange_chunks();
    }
}

/* Divides rows in chunks anew, into as few as their kernel has warps for. A block has several rows, so
 * that one is computed while the warps of another meet. What passes read again is in the L2 cache, where
 * no stage keeps it. */
void Encoder::arrange_chunks()
{
    if (image.once) {
        return arrange_once(most_warps_of_small);
    }
    const auto &found = OF_CHUNKS[prepared.has_positions ? 0 : image.cols % 4 ? 1 : 2];
    int64_t each = std::min(found.each, machine.widest), rows = found.rows;
    scale_scratch(each);
    image.each = each;
    int64_t together = 0;
    for (int k = 0; k < image.n_inputs - image.row_inputs; k++) {
        together += image.inputs[k].size;
    }
    int64_t again = image.n_first > 1 ? machine.multiprocessors * image.cols * together : 0;
    int64_t near = again ? found.near_bytes / again : rows;
    int64_t many = image.rows / (LEAST_OF_CHUNKS * machine.multiprocessors);
    rows = std::max<int64_t>(1, std::min({rows, near, many}));
    int64_t warps = most_warps_of_small(each) / rows;
    int64_t chunks = std::max<int64_t>(2, quotient_up(image.cols, warps * image.slice()));
    image.group = quotient_up(image.cols, chunks * image.slice());
    image.warps = rows * image.group;
    count();
}

/* Places in scratch memory, of which words have R times a number. */
void Encoder::scale_scratch(int64_t each)
{
    for (Word *word = image.words; word != image.words + image.n_words; word++) {
        uint8_t first = word->first;
        if (first == words.scratch[0] || first == words.scratch[1] || first == words.save) {
            word->w1 = (uint32_t)(word->w1 / image.each * each);
        }
    }
}

/* Gives rows that leave lanes without elements a part of a warp each; whether that is so. */
bool Encoder::arrange_several()
{
    int64_t each = 0, lanes = LANES_OF_WARP;
    for (const auto &one : OF_NARROW_ROWS) {
        if (!each && image.cols <= one.cols) {
            each = one.each;
            lanes = one.lanes;
        }
    }
    bool around = image.epilogue != NO_WORD || prepared.has_positions || prepared.draws || image.sums;
    if (!image.by_rows || image.chunks > 1 || !each || around) {
        return false;
    }
    Form found = form();
    if ((found != NORMS && found != WHOLE) || !(uses_of_all() & OF_SEVERAL)) {
        return false;
    }
    int64_t rows = most_warps(each) * (LANES_OF_WARP / lanes);
    if (image.rows < LEAST_OF_NARROW * rows * machine.multiprocessors) {
        return false;
    }
    scale_scratch(each);
    image.each = each;
    image.group = 1;
    image.lanes = lanes;
    image.warps = most_warps(each);
    count();
    return true;
}

/* How many words are of a use. */
int64_t Encoder::count_of(Use use) const
{
    return std::count_if(image.words, image.words + image.n_words,
                         [&](const Word &word) { return (words.uses[word.first] & use) != 0; });
}

/* Rows that are wide and reduced, or of which much is computed, or nothing written. Words are as they
 * were: where nothing is in scratch memory, none of them tells R. Where no tiles are written, or nothing
 * is reduced, wide rows are faster with R = 64. */
void Encoder::arrange_norms()
{
    int n_tiles = image.n_inputs - image.row_inputs;
    int64_t stores = count_of(STORES), reductions = count_of(OF_ROWS_REDUCED);
    if (image.each < 32 || !n_tiles || image.scratch) {
        return;
    }
    int64_t together = 0;
    for (int k = 0; k < n_tiles; k++) {
        together += image.inputs[k].size;
    }
    int64_t wanted = quotient_up(image.rows, machine.multiprocessors);
    int64_t each = 0;
    if (image.each > 32 && stores && reductions) {
        each = each_for_rows(wanted, together, most_warps_of_norms);
    } else if (image.each == 32 && (!stores || computes_much(reductions))) {
        each = 32;
    }
    if (each) {
        divide_anew(each, most_warps_of_norms(each));
    }
}

/* Divides rows among so many warps, where each block then has several tiles; whether that is so. */
bool Encoder::divide_anew(int64_t each, int64_t most)
{
    int64_t group = quotient_up(image.cols, 32 * each), rows = most / group;
    if (image.rows < LEAST_TILES * rows * machine.multiprocessors) {
        return false;
    }
    image.each = each;
    image.group = group;
    image.warps = rows * group;
    count();
    return true;
}

} // namespace magjit_dvm::cuda
