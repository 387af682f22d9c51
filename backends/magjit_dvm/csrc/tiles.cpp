/* Tiles by Algorithm 1 (DVM, §4.2), and places in local memory. */
#include <new>
#include <type_traits>

#include "encoder.h"

namespace magjit_dvm {

/* ---- tiles: Algorithm 1 ---- */

namespace {

/* The tile size along a dimension of n for the least work of the busiest core: ⌈tiles/N⌉·(L + 2),
 * rounded up to the width of the hardware where the limit allows. */
ENCODER int64_t hardware_align_div(int64_t n, int64_t limit, int64_t rest, int64_t others, int cores,
                           int64_t align)
{
    limit = std::max<int64_t>(1, std::min(limit, n));
    int64_t best = limit, least = std::numeric_limits<int64_t>::max();
    int64_t fewest = (n + limit - 1) / limit;
    for (int64_t count = fewest; count <= std::min(n, fewest + 2 * cores); count++) {
        int64_t tile = (n + count - 1) / count;
        int64_t all = others * ((n + tile - 1) / tile);
        int64_t work = (all + cores - 1) / cores * (tile * rest + 2);
        if (work < least) {
            least = work;
            best = tile;
        }
    }
    int64_t aligned = (best + align - 1) / align * align;
    return aligned <= limit ? aligned : std::min(best, n);
}

/* Parts of nearly equal size, of about `step` elements: no short last step. */
ENCODER int64_t even(int64_t n, int64_t step)
{
    int64_t parts = std::max<int64_t>(1, (n + step / 2) / step);
    int64_t part = ((n + parts - 1) / parts + 63) / 64 * 64;
    return std::min(n, part);
}

} // namespace

/* Results that would drive everything else out of the caches, and be driven out themselves before
 * anybody reads them, are not worth to be fetched into them first. */
bool Encoder::results_are_large() const
{
    const Header &h = code.header;
    int64_t size = 0, run = h.flat ? h.elements : h.cols;
    for (const Output &out : program.outputs) {
        int64_t item = bytes(program.nodes[out.node].dtype);
        size += values[out.node].has == active && run * item >= SHORTEST_STREAM ? item : 0;
    }
    return size * h.elements >= machine.cached_bytes / 2;
}

void Encoder::tiles()
{
    Header &h = code.header;
    int64_t grain = machine.grain;
    for (const Output &out : program.outputs) {
        if (costly && values[out.node].has == active) {
            grain = machine.grain / 2; /* measured: exponentials and the like pay sooner */
            break;
        }
    }
    int cores = code.cores = h.elements < grain ? 1 : machine.threads;
    int64_t units = 1, steps[MAX_PHASES], step = 0, moved = 0;
    for (int p = 0; p < n_phases; p++) {
        moved = std::max(moved, phase_moved[p]);
    }
    moved *= h.elements;
    bool far = moved > machine.cached_bytes;
    /* With more than that, memory is the bound by itself, and asking sooner only disturbs it; so
     * is it where results need not be fetched before they are written. */
    code.ahead = far && !code.streams && moved <= 3 * machine.cached_bytes && h.reduces == REDUCES_columns &&
                 !h.n_inner && n_phases > 1;
    /* Kernels like long steps; memory likes short ones, which ask it for something more evenly. */
    int64_t eighths = code.ahead ? 5 : far && !reduced ? 3 : 8;
    int64_t step_bytes = machine.step_bytes * eighths / 8;
    int64_t local_bytes = code.ahead ? machine.local_bytes / 8 : machine.local_bytes;
    for (int p = 0; p < n_phases; p++) {
        /* A step's blocks stay in the first-level cache. */
        int64_t now = std::max<int64_t>(1, phase_units[p] + phase_moved[p]);
        steps[p] = std::clamp<int64_t>(step_bytes / now / 64 * 64, 256, 8192);
        units = std::max(units, now);
        step = std::max(step, steps[p]);
    }
    int64_t limit = std::max<int64_t>(step, local_bytes / units);
    int64_t outer = 1, inner = h.inner_steps();
    for (int i = 0; i < h.n_outer && !h.flat; i++) {
        outer *= h.outer[i];
    }
    int64_t share = (h.elements + cores - 1) / cores;
    if (h.reduces == REDUCES_nothing) {
        limit = std::min(limit, share);
        if (h.cols > limit || h.rows == 1) {
            h.tile_rows = 1;
            h.tile_cols = hardware_align_div(h.cols, limit, 1, outer * h.rows, cores, 64);
        } else {
            h.tile_cols = h.cols;
            h.tile_rows = hardware_align_div(h.rows, limit / h.cols, h.cols, outer, cores, 1);
        }
    } else if (h.reduces == REDUCES_columns) {
        int64_t length = h.cols * inner;
        int64_t most = std::max<int64_t>(1, std::min(limit, share) / length);
        if (kept_units) {
            most = std::min(most, std::max<int64_t>(
                                      1, machine.local_bytes / 2 / (kept_units * length)));
        }
        h.tile_cols = h.cols;
        h.tile_rows = hardware_align_div(h.rows, std::min<int64_t>(most, 1024), length, outer,
                                         cores, 1);
    } else {
        int64_t length = h.rows * inner;
        /* Whole cache lines of columns, so that rows are read in runs. */
        int64_t most = std::max<int64_t>(128, std::min(limit, share) / std::max<int64_t>(length, 1));
        most = std::min<int64_t>(most, 1024);
        if (kept_units) {
            most = std::min(most, std::max<int64_t>(
                                      16, machine.local_bytes / 2 / (kept_units * length)));
        }
        h.tile_rows = h.rows;
        h.tile_cols = hardware_align_div(h.cols, most, length, outer, cores, 16);
    }
    for (int p = 0; p < n_phases; p++) {
        Phase &phase = h.phases[p];
        phase.step_cols = even(h.tile_cols, steps[p]);
        phase.step_rows = std::max<int64_t>(1, std::min(h.tile_rows, steps[p] / phase.step_cols));
    }
    h.tiles = outer * ((h.rows + h.tile_rows - 1) / h.tile_rows) *
              ((h.cols + h.tile_cols - 1) / h.tile_cols);
}

/* Offsets in local memory: units become bytes now that tiles and steps have sizes. */
void Encoder::place()
{
    Header &h = code.header;
    auto aligned = [](int64_t n) { return (n + 63) / 64 * 64; };
    int64_t along = aligned(h.reduces == REDUCES_columns ? h.tile_rows : h.tile_cols);
    int64_t whole = aligned(h.tile_rows * h.tile_cols * h.inner_steps());
    int64_t step[MAX_PHASES], tile_at = 0;
    for (int p = 0; p < n_phases; p++) {
        step[p] = aligned(h.phases[p].step_rows * h.phases[p].step_cols);
        tile_at = std::max(tile_at, phase_units[p] * step[p]);
    }
    int64_t kept_at = tile_at + tile_units * along;
    for (int s = 0, p = 0; s < h.n_slots; s++) {
        while (p + 1 < n_phases && s >= first_slot[p + 1]) {
            p++;
        }
        Slot &slot = code.slots[s];
        switch (slot.kind) {
        case SLOT_step: slot.local = (uint32_t)(slot.local * step[p]); break;
        case SLOT_tile: slot.local = (uint32_t)(tile_at + slot.local * along); break;
        case SLOT_kept: slot.local = (uint32_t)(kept_at + slot.local * whole); break;
        default: break;
        }
    }
    int64_t bytes = kept_at + kept_units * whole;
    if (bytes > (int64_t)1 << 30) {
        overflow = "a tile needs too much local memory";
        return;
    }
    h.local_bytes = (uint32_t)bytes;
}

const char *Encoder::run()
{
    Header &h = code.header;
    h.magic = MAGIC;
    h.n_slots = h.n_constants = h.n_phases = 0;
    h.code_words = 0;
    h.tiles = 0;
    code.ahead = code.streams = false;
    h.n_outer = h.n_inner = 0;
    h.n_inputs = (uint16_t)n_inputs();
    h.n_arguments = (uint16_t)(n_inputs() + program.outputs.size());
    if (const char *error = sizes()) {
        return error;
    }
    if (const char *error = masks()) {
        return error;
    }
    if (const char *error = strides()) {
        return error;
    }
    for (const Output &out : program.outputs) {
        uint32_t mask = values[out.node].has;
        bool all = (mask & reduced) == reduced, none = !(mask & reduced);
        if ((mask & ~reduced) != (active & ~reduced) || !(all || none)) {
            return "an output lacks a dimension";
        }
    }
    if (code.empty) {
        for (int d = 0; d < program.rank; d++) {
            if (size[d] == 0 && reduced >> d & 1) {
                return "a reduction over nothing";
            }
        }
        return nullptr;
    }
    order();
    geometry();
    levels();
    if (overflow) {
        return overflow;
    }
    code.streams = results_are_large();
    if (const char *error = emit()) {
        return error;
    }
    tiles();
    place();
    return overflow;
}

/* The section's ends, by the linker. */
extern "C" const char __start_magjit_encoder[], __stop_magjit_encoder[];

void fetch_encoder(const Program &program)
{
    fetch_lines(__start_magjit_encoder, __stop_magjit_encoder - __start_magjit_encoder, 128);
    if (const Encoder *encoder = (const Encoder *)thread_memory(FOR_encoder, sizeof(Encoder))) {
        fetch_lines(encoder, (const char *)encoder->free_blocks - (const char *)encoder + 256);
        fetch_lines(encoder->values, program.nodes.size() * sizeof(Value));
        fetch_lines(encoder->operand,
                    (program.inputs.size() + program.outputs.size()) * sizeof(Operand));
    }
}

ENCODER const char *encode(const Program &program, const Given *given, const Machine &machine,
                           Code &code, const Window &window)
{
    static_assert(std::is_trivially_destructible_v<Encoder>, "its memory is only reused");
    void *memory = thread_memory(FOR_encoder, sizeof(Encoder));
    if (!memory) {
        return "no memory";
    }
    return (new (memory) Encoder(program, given, machine, code, window))->run();
}

} // namespace magjit_dvm
