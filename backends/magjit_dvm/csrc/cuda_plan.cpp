/* How a launch divides its work: R, warps, stages, blocks, and places in shared memory. */
#include <algorithm>
#include <utility>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int64_t STAGES = 3, MOST_STAGES = 6, UNDER_WAY = 96 << 10, DRAWING = 16;
constexpr int64_t LEAST_PERIOD = 128, MOST_PERIOD = (int64_t)1 << (32 - PERIOD_SHIFT);
constexpr int64_t STAGES_OF_ROWS = 2, UNDER_WAY_OF_ROWS = 80 << 10, ENOUGH = 12 << 10;
constexpr int64_t SMALL = 1 << 17, LONG = 1 << 16, NARROW = 16; /* see cuda/plan.py */
constexpr int64_t LARGE = 1 << 24;

/* Of narrow rows up to so many columns, R, and how many lanes of a warp each has. */
struct {
    int64_t cols, lanes, each;
} constexpr OF_NARROW_ROWS[] = {{32, 4, 8},   {64, 4, 16},  {96, 4, 24},   {128, 8, 16},
                                {192, 8, 24}, {256, 8, 32}, {384, 16, 24}, {480, 16, 32}};
constexpr int64_t LEAST_OF_NARROW = 2; /* tiles of a block */

/* Warps that compute, besides the one that feeds them: what registers allow. */
int64_t most_warps(int64_t each) { return each == 64 ? 11 : each >= 24 ? 15 : 19; }

/* Of rows up to so many columns, R, and how many times four columns a lane of an adder has. */
struct {
    int64_t cols, each, quads;
} constexpr BESIDE_ADDERS[] = {{256, 8, 1},   {512, 16, 1},  {768, 24, 1}, {1024, 32, 2},
                               {2048, 64, 4}, {4096, 64, 8}, {8192, 32, 8}};

/* The same of kernels that are small: that with adders, which count, and that of norms. */
int64_t most_warps_of_small(int64_t each) { return each == 64 ? 11 : each >= 24 ? 19 : 27; }
int64_t most_warps_of_norms(int64_t each) { return each >= 24 ? most_warps_of_small(each) : 0; }

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
/* Of rows that are read once, in chunks: R, and the fewest warps of one, of so many columns, of more, of
 * columns that do not come by four; and how many rows a block has at least, if they would fit one. */
constexpr int64_t EACH_OF_ONCE = 32, NEAR = 8192, LEAST_OF_ONCE = 4;
constexpr int64_t OF_ONCE[] = {1, 2, 3};
constexpr int64_t FEW = 12; /* warps, below which those of the kernel of norms serve vectors better */

int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t rounded(int64_t at, int64_t to = 128) { return quotient_up(at, to) * to; }

} // namespace

/* How the space is divided. A tensor whose elements are in the order of the space comes through the
 * stages. */
void Encoder::arrange()
{
    image.by_rows = reduced != 0;
    int64_t widest = 0, together = 0;
    for (int number : prepared.loads) {
        const Operand &one = inputs[number];
        if (active && varies_throughout(one) && contiguous(one) && image.n_inputs < MAX_STAGED) {
            image.inputs[image.n_inputs++] = {(int16_t)number, one.size, 0, 0};
            widest = std::max<int64_t>(widest, one.size);
            together += one.size;
        }
    }
    image.stages = image.n_inputs ? STAGES : 2;
    if (prepared.reduces) {
        refuse_slow();
    }
    if (!stopped()) {
        divide(image.n_inputs ? widest : 4, together);
    }
    chunked = image.chunks > 1;
    bool by_stages = image.n_inputs && image.by_rows && !stopped();
    for (int number : prepared.loads) {
        int64_t period = by_stages && image.n_inputs < MAX_STAGED ? period_of(number) : -1;
        if (period >= 0) {
            image.inputs[image.n_inputs++] = {(int16_t)number, inputs[number].size, 0,
                                              (int32_t)period};
            image.row_inputs++;
        }
    }
}

/* 0 of a tensor with 32 bits or 64 for each row, side by side in their order; -1 of others. Of what is
 * the same for some outer dimensions, the rows after which it comes again. A tensor that is expanded
 * along the columns has columns for the program: it is loaded as a tile. */
int64_t Encoder::period_of(int number) const
{
    const Operand &one = inputs[number];
    for (int n = 0; n < n_nodes(); n++) {
        const Node &node = program.nodes[n];
        if (node.kind == NODE_load && node.aux == number && has[n] & reduced) {
            return -1;
        }
    }
    if (one.size < 4 || image.rows <= 1) {
        return -1;
    }
    if (contiguous(one, ~reduced)) {
        return 0;
    }
    uint32_t along = 0;
    int64_t period = 1;
    for (int k = 0; k < n_kept; k++) {
        int d = dims_in_order[k];
        if (one.strides[d]) {
            along |= 1u << d;
            period *= size[d];
        } else if (along) {
            return -1;
        }
    }
    int64_t bytes = period * one.size;
    bool fits = one.low == 0 && bytes % 16 == 0 && bytes >= LEAST_PERIOD && period < MOST_PERIOD;
    return fits && along && contiguous(one, along) ? period : -1;
}

/* Whether an operand has other elements along each dimension. */
bool Encoder::varies_throughout(const Operand &one) const
{
    for (int k = 0; k < n_order; k++) {
        if (!one.strides[dims_in_order[k]]) {
            return false;
        }
    }
    return true;
}

/* What ATen does better: large reductions along columns, and of few long rows. */
void Encoder::refuse_slow()
{
    if (!image.by_rows || image.elements <= SMALL) {
        return;
    }
    int inner = dims_in_order[n_order - 1];
    bool along = image.n_inputs > 0, whole = false, apart = false;
    for (int number : prepared.reads) {
        whole |= varies_throughout(inputs[number]);
    }
    for (int number : prepared.reads) {
        const Operand &one = inputs[number];
        along |= one.strides[inner] == one.size && (!whole || varies_throughout(one));
        apart |= varies_throughout(one) && !contiguous(one);
    }
    if (!along) {
        return refuse("a large reduction along columns");
    }
    if (image.cols <= NARROW) {
        return refuse("a reduction of narrow rows");
    }
    if (image.cols >= LONG && image.rows * 4 < machine.multiprocessors) {
        encoded.few_rows = true;
        return refuse("a reduction of few long rows");
    }
    /* In steps each block has something to do; they read nothing more, but are more launches. Rows
     * that lie in parts (channels of images) come to a block slowly: of these, more are few. */
    int64_t few = apart ? 4 * machine.multiprocessors : machine.multiprocessors / 2;
    encoded.few_rows = image.cols >= LONG && image.rows <= few && image.elements >= LARGE;
}

void Encoder::divide(int64_t widest, int64_t together)
{
    int64_t most = widest >= 4 || together > 8 ? 16 : 32;
    most = prepared.draws ? std::min(most, DRAWING) : most;
    int64_t least = prepared.has_positions ? 16 : 8;
    most = std::max(least, std::min(most, machine.widest));
    if (!image.by_rows) {
        most = together > 2 ? std::min<int64_t>(most, 16) : most;
        image.each = each_of_squares ? each_of_squares : most;
        while (!each_of_squares && image.each > least &&
               image.elements < 32 * image.each * machine.multiprocessors) {
            image.each /= 2;
        }
        int64_t slices = quotient_up(image.elements, image.slice());
        int64_t wanted = quotient_up(slices, machine.multiprocessors);
        image.group = 1;
        image.warps = std::max<int64_t>(1, std::min(most_warps(image.each), wanted));
    } else {
        int64_t wanted = quotient_up(image.rows, machine.multiprocessors);
        int64_t found = each_for_rows(wanted, together, most_warps);
        bool many = wanted >= LEAST_OF_ONCE || !found;
        if (image.once && many && image.cols > LANES_OF_WARP * EACH_OF_ONCE) {
            return arrange_once(most_warps);
        }
        image.each = found ? found : most;
        if (image.sums && image.cols > most_warps(image.each) * image.slice()) {
            image.each = machine.widest; /* words may turn out to have a kernel of their own */
        }
        int64_t warps = most_warps(image.each), slice = image.slice();
        int64_t chunks = quotient_up(image.cols, warps * slice);
        image.group = quotient_up(image.cols, chunks * slice); /* as much in each of them */
        image.warps = image.group * std::max<int64_t>(1, std::min(warps / image.group, wanted));
    }
    count();
}

/* Divides rows that are read once: in chunks, as many in a block as it has warps for. */
void Encoder::arrange_once(MostWarps most_warps)
{
    image.each = EACH_OF_ONCE;
    int64_t most = most_warps(image.each), halves = quotient_up(image.cols, 2 * image.slice());
    int64_t least = OF_ONCE[image.cols % 4 ? 2 : image.cols > NEAR ? 1 : 0];
    int64_t wanted = quotient_up(image.rows, machine.multiprocessors);
    int64_t tiles = quotient_up(wanted, most / std::min(least, halves));
    int64_t rows = quotient_up(wanted, tiles);
    image.group = std::min(most / rows, halves);
    image.warps = rows * image.group;
    count();
}

/* R for rows that fit a block's warps, and shared memory with two tiles saved; 0 without one: the most
 * elements under way at once, up to what is enough, and as far as there is room for two stages of them,
 * and for their sums across rows; of equals the fewest lanes without elements, then the most warps,
 * which is what counts beside sums. */
int64_t Encoder::each_for_rows(int64_t wanted, int64_t together, MostWarps most) const
{
    int64_t kept = image.sums + (image.sums > 0); /* and a tile that waits */
    int64_t a_column = together + std::max<int64_t>(8, 4 * kept);
    if (image.cols > machine.shared_bytes || image.cols * a_column > machine.shared_bytes) {
        return 0;
    }
    int64_t elements_of = 16 * std::max<int64_t>(together + 2 * kept, 1);
    int64_t room = machine.shared_bytes * 7 / elements_of;
    room = kept && 2 * image.cols > room ? image.cols : room;
    bool positions = prepared.has_positions;
    int64_t widest = kept || positions ? std::min<int64_t>(machine.widest, 32) : machine.widest;
    widest = prepared.draws ? DRAWING : widest;
    std::pair<int64_t, int64_t> best = {0, 0};
    int64_t found = 0;
    for (int64_t each : {8, 16, 24, 32, 64}) {
        if (each > widest || (positions && each != 16 && each != 32)) {
            continue;
        }
        int64_t group = quotient_up(image.cols, 32 * each);
        int64_t rows = std::min(most(each) / group, wanted);
        std::pair<int64_t, int64_t> score = {std::min({rows * image.cols, room, ENOUGH}),
                                             -group * each};
        if (rows && score > best) {
            best = score;
            found = each;
        }
    }
    return found;
}

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
    if (found == NORMS) {
        arrange_norms();
    } else if (found == SQUARES) {
        int64_t slices = LEAST_TILES * WARPS_OF_SQUARES * machine.multiprocessors;
        if (image.elements >= slices * image.slice()) {
            image.warps = WARPS_OF_SQUARES;
            count();
        }
    } else if (found == CHUNKED) {
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

/* Rows that are wide and reduced, or of which much is computed, or nothing written. Words are as they
 * were: where nothing is in scratch memory, none of them tells R. Where no tiles are written, or nothing
 * is reduced, wide rows are faster with R = 64. */
void Encoder::arrange_norms()
{
    int n_tiles = image.n_inputs - image.row_inputs;
    auto count_of = [&](uint8_t use) {
        return std::count_if(image.words, image.words + image.n_words, [&](const Word &word) {
            return (words.uses[word.first] & use) != 0;
        });
    };
    int64_t stores = count_of(STORES), reductions = count_of(OF_ROWS_REDUCED);
    if (image.each < 32 || !n_tiles || image.scratch || prepared.has_positions) {
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

/* Chunks, tiles and blocks for these warps. */
void Encoder::count()
{
    if (image.by_rows) {
        image.chunks = quotient_up(image.cols, image.group * image.slice());
        image.tiles = quotient_up(image.rows, image.rows_of_tile());
    } else {
        image.tiles = quotient_up(image.elements, image.warps * image.slice());
    }
    if (image.tiles >= (int64_t)1 << 31) {
        refuse("too many tiles");
    }
    image.blocks = std::min(image.tiles, machine.multiprocessors);
}

/* Whether there may be fewer warps. */
bool Encoder::may_shrink() const
{
    return image.warps > image.group || (image.chunks > 1 && image.group > 1);
}

/* Fewer warps. */
void Encoder::shrink()
{
    if (image.warps > image.group) {
        image.warps -= image.group;
    } else {
        image.warps = --image.group;
    }
    count();
}

/* Places in shared memory for these warps and stages. */
void Encoder::measure(int64_t program_bytes)
{
    int64_t width = image.warps * image.slice(), reach = width;
    if (image.chunks > 1) {
        reach = width = image.group * image.slice(); /* of each row */
    } else if (image.by_rows) {
        /* Loads read whole slices: of the last row of a tile, beyond the stage. */
        width = image.rows_of_tile() * image.cols;
        reach = (image.rows_of_tile() - 1) * image.cols + image.group * image.slice();
    }
    int64_t at = 0, seen = 0;
    for (int k = 0; k < image.n_inputs; k++) {
        Stage &stage = image.inputs[k];
        stage.at = at;
        bool of_rows = k >= image.n_inputs - image.row_inputs;
        seen = of_rows ? seen : std::max(seen, at + reach * stage.size + 48);
        /* To 16-byte boundaries, and what unaligned loads see. */
        at = rounded(at + (of_rows ? image.rows_of_tile() : width) * stage.size + 48);
    }
    image.row_bytes = image.chunks > 1 ? at : 0;
    int64_t apart = image.row_bytes * (image.rows_of_tile() - 1);
    image.stage_bytes = apart + at;
    image.barriers_at = rounded(program_bytes + 32);
    image.rows_at = rounded(image.barriers_at + 36 * image.stages);
    int64_t registers = 128 * (1 + image.numbers + 2 * image.accumulators);
    image.partials_at = rounded(image.rows_at + image.warps * registers, 512);
    image.scratch_at = image.partials_at + 512 * (image.warps / image.group);
    image.weights_at = image.scratch_at + image.warps * image.scratch * 128 * image.each;
    image.ring_at = rounded(image.weights_at + image.weights * image.weight_bytes());
    int64_t last = image.ring_at + (image.stages - 1) * image.stage_bytes;
    image.shared_bytes = rounded(last + apart + std::max(at, seen));
}

/* Whether so many vectors are kept beside two stages, as they are from then on if so. */
bool Encoder::has_room(int weights)
{
    int64_t stages = image.stages, program_bytes = image.program_bytes() + 16 * (2 * weights + 1);
    image.stages = std::min<int64_t>(stages, 2);
    image.weights = weights;
    measure(program_bytes);
    bool fits = image.shared_bytes <= machine.shared_bytes &&
                HEADER_BYTES + program_bytes <= IMAGE_BYTES &&
                image.n_words + 2 * weights + 1 <= MOST_WORDS;
    image.stages = stages;
    image.weights = fits ? weights : 0;
    return fits;
}

/* Of a ring; where nothing comes through one, what a block has for its places. */
int64_t Encoder::wanted_stages()
{
    if (!image.n_inputs) {
        return 2;
    }
    measure(image.program_bytes());
    if (image.keeps) {
        return 2 * image.chunks; /* the next row on its way */
    }
    int64_t most = std::min(MOST_STAGES, image.tiles / image.blocks * image.chunks);
    bool of_rows = image.by_rows && image.rows_of_tile() > 1 && image.chunks == 1 && !image.sums;
    int64_t under_way = of_rows ? UNDER_WAY_OF_ROWS : UNDER_WAY;
    return std::max(of_rows ? STAGES_OF_ROWS : STAGES,
                    std::min(most, quotient_up(under_way, image.stage_bytes)));
}

/* Whether stages have room for a whole row, where several passes would read it. */
bool Encoder::keeps_rows()
{
    if (image.chunks == 1 || image.n_first == 1 || !image.n_inputs) {
        return false;
    }
    image.stages = image.chunks;
    measure(image.program_bytes());
    return image.shared_bytes <= machine.shared_bytes;
}

/* Two stages, then fewer warps, then one stage, until everything fits into shared memory. */
void Encoder::fit()
{
    if (HEADER_BYTES + image.program_bytes() > IMAGE_BYTES) {
        return refuse("too many words");
    }
    if (image.n_first > MAX_PASSES) {
        return refuse("too many passes over long rows");
    }
    while (!stopped()) {
        image.keeps = keeps_rows();
        int64_t fewest = image.keeps ? image.chunks : may_shrink() ? 2 : 1;
        for (int64_t stages = wanted_stages(); stages >= fewest; stages--) {
            image.stages = stages;
            measure(image.program_bytes());
            if (image.shared_bytes <= machine.shared_bytes) {
                return;
            }
        }
        if (!may_shrink()) {
            return refuse("values of a row that shared memory has no room for");
        }
        shrink();
    }
}

} // namespace magjit_dvm::cuda
