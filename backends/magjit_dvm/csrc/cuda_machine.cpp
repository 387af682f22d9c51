/* Tiles, stages, and places in shared memory, for so many warps: what a GPU has room for. */
#include <algorithm>

#include "cuda_encoder.h"
#include "cuda_sizes.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int64_t MOST_STAGES = 6, UNDER_WAY = 96 << 10; /* see cuda/machine.py */
constexpr int64_t STAGES_OF_ROWS = 2, UNDER_WAY_OF_ROWS = 80 << 10;

} // namespace

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
            is_crowded = image.by_rows && image.chunks == 1 && !image.sums;
            return refuse("values of a row that shared memory has no room for");
        }
        shrink();
    }
}

} // namespace magjit_dvm::cuda
