/* Memory that is wanted next, asked for while kernels compute.
 *
 * A tile with reductions is read in its first phase, written in its last one, and computed on in
 * between: without this a core waits for memory, then computes, then waits again. */
#include <algorithm>

#include "core.h"

namespace magjit_dvm {

namespace {

constexpr int64_t LINE = 64;

/* PREFETCHW is in all processors of x86-64 but for the first ones, where it does nothing; the
 * compiler makes one only of levels that say so. */
void ask(const char *at, int64_t bytes, bool to_write)
{
    const char *end = at + bytes;
    if (to_write) {
        for (; at < end; at += LINE) {
            asm volatile("prefetchw %0" : : "m"(*at));
        }
    } else {
        for (; at < end; at += LINE) {
            asm volatile("prefetcht1 %0" : : "m"(*at));
        }
    }
}

} // namespace

/* What to ask for during a phase: while the last one computes, the next tile's inputs; while the one
 * before it does, the tile's outputs. */
void Core::look_ahead(int p)
{
    ahead.n = ahead.at = 0;
    bool last = p == h.n_phases - 1;
    if (!code.ahead || p < h.n_phases - 2 || (last && !more_tiles)) {
        return;
    }
    int64_t first = last ? tile_row + tile_rows : tile_row;
    int64_t n = std::min(tile_rows, h.rows - first), total = 0;
    for (int s = 0; s < h.n_slots && n > 0 && ahead.n < Ahead::MOST; s++) {
        const Slot &slot = code.slots[s];
        bool output = slot.argument >= h.n_inputs;
        if (output && code.streams) {
            continue; /* it is not wanted in the caches */
        }
        if (slot.kind != SLOT_global || output == last || !slot.row ||
            slot.col != DTYPE_BYTES[slot.dtype]) {
            continue;
        }
        Ahead::Block block{base[s] + first * slot.row, slot.row, n, h.cols * slot.col, 0, output};
        bool known = false; /* phases have slots of their own for the same argument */
        for (int k = 0; k < ahead.n; k++) {
            known |= ahead.blocks[k].row == block.row;
        }
        if (!known) {
            ahead.blocks[ahead.n++] = block;
            total += n * block.width;
        }
    }
    int64_t kernels = 0;
    for (uint32_t at = h.phases[p].step; at < h.phases[p].end; at += INSN_WORDS) {
        kernels += OPS[((const Insn *)&code.words[at])->op].kind != KIND_memory;
    }
    int64_t calls = std::max<int64_t>(1, kernels * tile_rows);
    ahead.each_row = (total / calls + LINE) / LINE * LINE;
}

/* So many bytes more. */
void Ahead::some(int64_t bytes)
{
    while (bytes > 0 && at < n) {
        Block &block = blocks[at];
        int64_t now = std::min(bytes, block.width - block.done);
        ask(block.row + block.done, now, block.output);
        bytes -= now;
        block.done += now;
        if (block.done == block.width) {
            block.done = 0;
            block.row += block.stride;
            at += --block.rows == 0;
        }
    }
}

/* A kernel by a few rows at a time: memory takes only so many requests at once. */
void Core::run_by_rows(Kernel kernel, const Insn &insn, const State *const *operands,
                       int64_t n_rows, int64_t n_cols)
{
    State s[4] = {*operands[0], *operands[1], *operands[2], *operands[3]};
    if (accumulates(OPS[insn.op].kind)) {
        s[0].rs = DTYPE_BYTES[code.slots[insn.dst].dtype];
    }
    int64_t piece = std::max<int64_t>(1, Ahead::ELEMENTS / std::max<int64_t>(1, n_cols));
    for (int64_t r = 0; r < n_rows; r += piece) {
        int64_t n = std::min(piece, n_rows - r);
        ahead.some(n * ahead.each_row);
        kernel(s[0], s[1], s[2], s[3], n, n_cols);
        for (State &one : s) {
            one.p += n * one.rs;
        }
    }
}

} // namespace magjit_dvm
