/* How a launch divides its work before its words are known: R, warps and chunks. */
#include <algorithm>
#include <utility>

#include "cuda_encoder.h"
#include "cuda_sizes.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int64_t DRAWING = 16, ENOUGH = 12 << 10, FILLED = 4;
constexpr int64_t LEAST_REPEAT = 32, LEAST_PERIOD = 128, MOST_PERIOD = (int64_t)1 << (32 - PERIOD_SHIFT);
constexpr int64_t SMALL = 1 << 17, LONG = 1 << 16, NARROW = 16; /* see cuda/plan.py */
constexpr int64_t LARGE = 1 << 24;

/* Of rows that are read once, in chunks: R, and the fewest warps of one, of so many columns, of more, of
 * columns that do not come by four; and how many rows a block has at least, if they would fit one. */
constexpr int64_t EACH_OF_ONCE = 32, NEAR = 8192, LEAST_OF_ONCE = 4;
constexpr int64_t OF_ONCE[] = {1, 2, 3};

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
    for (int number : prepared.loads) {
        const Operand &one = inputs[number];
        bool again = image.n_inputs > image.repeats && image.by_rows && !image.sums &&
                     image.n_inputs < MAX_STAGED && stage_of(number) < 0;
        int64_t period = again ? repeats_of(one) : 0;
        if (period) {
            image.inputs[image.n_inputs++] = {(int16_t)number, one.size, 0, (int32_t)period};
            image.repeats++;
            widest = std::max<int64_t>(widest, one.size);
            together += one.size;
        }
    }
    if (!stopped()) {
        divide(image.n_inputs ? widest : 4, together);
    }
    chunked = image.chunks > 1;
    if (chunked) { /* these are copied as others are, or not at all */
        image.n_inputs -= image.repeats;
        image.repeats = 0;
    }
    bool by_stages = image.n_inputs && image.by_rows && !stopped();
    for (int number : prepared.loads) {
        bool staged = by_stages && image.n_inputs < MAX_STAGED && !(batches && is_late_input(number));
        int64_t period = staged ? period_of(number) : -1;
        if (period >= 0) {
            image.inputs[image.n_inputs++] = {(int16_t)number, inputs[number].size, 0,
                                              (int32_t)period};
            image.row_inputs++;
        }
    }
}

/* Of a tensor that is the same for outer dimensions, the rows after which it comes again. 0 where they
 * are few, or do not begin and end with 16 aligned bytes; and of other tensors. */
int64_t Encoder::repeats_of(const Operand &one) const
{
    int64_t period;
    uint32_t along = rows_along(one, period);
    for (int k = n_kept; k < n_order; k++) {
        if (!one.strides[dims_in_order[k]]) {
            return 0;
        }
    }
    bool fits = one.low == 0 && period * image.cols * one.size % 16 == 0 &&
                period >= LEAST_REPEAT && period < std::min(MOST_PERIOD, image.rows);
    return fits && contiguous(one, along | reduced) ? period : 0;
}

/* The inner dimensions of rows, if it is these, along which an operand varies; the rows that they have.
 * None, and 0, of one that varies along others. */
uint32_t Encoder::rows_along(const Operand &one, int64_t &period) const
{
    uint32_t along = 0;
    period = 1;
    for (int k = 0; k < n_kept; k++) {
        int d = dims_in_order[k];
        if (one.strides[d]) {
            along |= 1u << d;
            period *= size[d];
        } else if (along) {
            period = 0;
            return 0;
        }
    }
    return along;
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
    int64_t period;
    uint32_t along = rows_along(one, period);
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
    if (!image.by_rows || image.elements <= (image.cols > LONG ? LONG : SMALL)) {
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
        int64_t found = crowded ? 0 : each_for_rows(wanted, together, most_warps);
        bool many = wanted >= LEAST_OF_ONCE || !found;
        if (image.once && many && image.cols > LANES_OF_WARP * EACH_OF_ONCE) {
            return arrange_once(most_warps);
        }
        image.each = found ? found : most;
        if (image.sums && image.cols > most_warps(image.each) * image.slice()) {
            image.each = machine.widest; /* words may turn out to have a kernel of their own */
        }
        int64_t warps = most_warps(image.each), slice = image.slice();
        int64_t chunks = std::max<int64_t>(quotient_up(image.cols, warps * slice), 1 + crowded);
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
    int64_t found = 0, fewest = INT64_MAX; /* lanes that R has, but the smallest */
    for (int64_t each : {16, 24, 32, 64}) {
        int64_t lanes = quotient_up(image.cols, 32 * each) * each;
        fewest = each <= widest ? std::min(fewest, lanes) : fewest;
    }
    for (int64_t each : {8, 16, 24, 32, 64}) {
        if (each > widest || (positions && each != 16 && each != 32)) {
            continue;
        }
        int64_t group = quotient_up(image.cols, 32 * each);
        if (!prepared.reduces && each > 8 && FILLED * group * each > (FILLED + 1) * fewest) {
            continue;
        }
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

} // namespace magjit_dvm::cuda
