/* The virtual machine (DVM, Algorithm 2): a core decodes the bytecode for its share of tiles. */
#include <emmintrin.h>

#include <algorithm>

#include "core.h"
#include "divisors.h"

namespace magjit_dvm {

namespace {

/* What a loop goes through. */
struct Range {
    int64_t first, last;
    void take(int64_t part, int64_t parts, int64_t align)
    {
        int64_t each = ((last - first + parts - 1) / parts + align - 1) / align * align;
        first = std::min(last, first + part * each);
        last = std::min(last, first + each);
    }
};

} // namespace

/* ---- decoding ---- */

/* One column is a row, where its elements follow one another: the operands seen so. */
bool Core::turn(const Insn &insn, State *turned) const
{
    int64_t size = DTYPE_BYTES[insn.dtype];
    uint16_t slots[4] = {insn.dst, insn.a, insn.b, insn.c};
    for (int k = 0; k < 4; k++) {
        if (slots[k] == NO_SLOT) {
            turned[k] = turned[1];
            continue;
        }
        const State &s = state[slots[k]];
        bool own = k == 0 || (k == 1 && (insn.op == OP_cast || insn.op == OP_select));
        int64_t step = own ? DTYPE_BYTES[code.slots[slots[k]].dtype] : size;
        if (s.rs != step && s.rs != 0) {
            return false;
        }
        turned[k] = {s.p, 0, s.rs == step};
    }
    return true;
}

/* How many instructions have been run, from one on that has a kernel for rows: itself, or with the next
 * one, which takes its result. These are a difference times a factor and what follows in its place, or an
 * exponential and its sum. */
int Core::run_rows(const Insn &first, const Insn *second)
{
    if (first.dtype != DT_f32 || first.shape != (SHAPE_ROWS | SHAPE_COLS) || cols == 1 ||
        ahead.waits()) {
        return 0;
    }
    const State &d = state[first.dst], &a = state[first.a], &b = state[first.b];
    /* Below the last row of the last tile may be another core's; below a part of one is not what comes next. */
    bool ends = cols < tile_cols || (row + rows == tile_row + tile_rows && !more_tiles);
    int64_t more = code.slots[first.dst].kind == SLOT_global ? rows - ends : 0;
    if (first.op == OP_mul) {
        return k.mul_rows(d, a, b, b, b, b, rows, cols, more);
    }
    if (first.op == OP_mul_mul) {
        return k.mul_mul_rows(d, a, b, state[first.c], b, b, rows, cols, more);
    }
    if (!second || second->dtype != DT_f32 || second->shape != first.shape || second->a != first.dst) {
        return 0;
    }
    if (first.op == OP_sub_exp) {
        return second->op == OP_sum && h.reduces == REDUCES_columns && k.sub_exp_sum &&
                       k.sub_exp_sum(d, a, b, state[second->dst], b, b, rows, cols, more)
                   ? 2
                   : 0;
    }
    RowKernel kernel = second->op == OP_mul       ? k.sub_mul_mul
                       : second->op == OP_add     ? k.sub_mul_add
                       : second->op == OP_mul_add ? k.sub_mul_mul_add
                                                  : nullptr;
    uint16_t last = second->op == OP_mul_add ? second->c : second->b;
    if (!kernel || second->dst != first.dst || second->b == first.dst || last == first.dst) {
        return 0;
    }
    return kernel(d, a, b, state[first.c], state[second->b], state[last], rows, cols, more) ? 2 : 0;
}

void Core::run_block(uint32_t from, uint32_t to)
{
    const uint64_t *words = code.words;
    for (uint32_t at = from; at < to;) {
        const Insn &insn = *(const Insn *)&words[at];
        at += insn.length;
        OpKind kind = OPS[insn.op].kind;
        if (kind == KIND_memory) {
            memory(insn);
            continue;
        }
        if (insn.op == OP_sub_mul || insn.op == OP_sub_exp || insn.op == OP_mul ||
            insn.op == OP_mul_mul) {
            if (int done = run_rows(insn, at < to ? (const Insn *)&words[at] : nullptr)) {
                at += INSN_WORDS * (uint32_t)(done - 1);
                continue;
            }
        }
        bool tile = insn.shape & SHAPE_TILE;
        int64_t n_rows = !tile && insn.shape & SHAPE_ROWS ? rows : 1;
        int64_t n_cols = tile ? tile_length() : insn.shape & SHAPE_COLS ? cols : 1;
        /* By reference: a copy would read with one wide load what `bind` has just written in parts,
         * which the processor cannot forward. */
        const State *d = &state[insn.dst], *a = &state[insn.a];
        const State *b = insn.b == NO_SLOT ? a : &state[insn.b];
        const State *c = insn.c == NO_SLOT ? a : &state[insn.c];
        State turned[4];
        if (n_cols == 1 && n_rows > 1 && kind < KIND_reduce && turn(insn, turned)) {
            d = &turned[0], a = &turned[1], b = &turned[2], c = &turned[3];
            std::swap(n_rows, n_cols);
        }
        Kernel kernel = insn.op == OP_cast ? k.cast[insn.aux][insn.dtype]
                        : (kind == KIND_reduce || kind == KIND_scan) && h.reduces == REDUCES_rows
                            ? k.along_rows[insn.op][insn.dtype]
                            : k.op[insn.op][insn.dtype];
        if (divides(insn) && any_zero(insn.dtype, *b, n_rows, n_cols)) {
            status |= ZERO_DIVISOR; /* kernels themselves survive it */
        }
        if (n_rows > 1 && ahead.waits()) {
            const State *operands[4] = {d, a, b, c};
            run_by_rows(kernel, insn, operands, n_rows, n_cols);
        } else {
            kernel(*d, *a, *b, *c, n_rows, n_cols);
        }
    }
}

bool Core::reduces_in(const Phase &phase) const
{
    for (uint32_t at = phase.step; at < phase.end; at += INSN_WORDS) {
        if (accumulates(OPS[((const Insn *)&code.words[at])->op].kind)) {
            return true;
        }
    }
    return false;
}

/* Elements of two parts of a row have the squares of both parts, and those of their means' distance. */
void Core::join_moments(const Insn &insn)
{
    auto of = [&](int core, uint16_t slot) { return (double *)(locals[core] + code.slots[slot].local); };
    double *squares = of(part, insn.dst), *sum = of(part, insn.b), *count = of(part, insn.c);
    for (int other = 0; other < parts; other++) {
        if (other == part) {
            continue;
        }
        double *q = of(other, insn.dst), *s = of(other, insn.b), *n = of(other, insn.c);
        for (int64_t i = 0; i < tile_length(); i++) {
            if (n[i] && count[i]) {
                double away = s[i] / n[i] - sum[i] / count[i];
                squares[i] += away * away * (count[i] / (count[i] + n[i]) * n[i]);
            }
            squares[i] += q[i];
            sum[i] += s[i];
            count[i] += n[i];
        }
    }
    for (int other = 0; other < parts; other++) {
        for (uint16_t slot : {insn.dst, insn.b, insn.c}) {
            if (other != part) {
                memcpy(of(other, slot), of(part, slot), (size_t)tile_length() * sizeof(double));
            }
        }
    }
}

/* What the team has added up becomes one, for all of it. */
void Core::join(const Phase &phase)
{
    barrier();
    for (uint32_t at = phase.step; part == 0 && at < phase.end; at += INSN_WORDS) {
        const Insn &insn = *(const Insn *)&code.words[at];
        if (!accumulates(OPS[insn.op].kind)) {
            continue;
        }
        if (insn.op == OP_moments) {
            join_moments(insn);
            continue;
        }
        const Slot &slot = code.slots[insn.dst];
        int op = insn.op == OP_prod  ? OP_mul
                 : insn.op == OP_max ? OP_maximum
                 : insn.op == OP_min ? OP_minimum
                                     : OP_add;
        State mine{local + slot.local, 0, 1};
        for (int other = 1; other < parts; other++) {
            State theirs{locals[other] + slot.local, 0, 1};
            k.op[op][slot.dtype](mine, mine, theirs, theirs, 1, tile_length());
        }
        for (int other = 1; other < parts; other++) {
            memcpy(locals[other] + slot.local, mine.p,
                   (size_t)(tile_length() * DTYPE_BYTES[slot.dtype]));
        }
    }
    barrier();
}

void Core::run_steps(const Phase &phase)
{
    if (phase.step == phase.end) {
        return;
    }
    Range along_rows{tile_row, tile_row + tile_rows}, along_cols{tile_col, tile_col + tile_cols};
    Range inner{0, h.inner_steps()};
    if (parts > 1) {
        bool by_columns = h.reduces == REDUCES_columns;
        Range &reduced = inner.last >= parts ? inner : by_columns ? along_cols : along_rows;
        reduced.take(part, parts, &reduced == &along_cols ? 64 : 1);
    }
    int64_t last_cols = -1;
    for (row = along_rows.first; row < along_rows.last; row += phase.step_rows) {
        rows = std::min(phase.step_rows, along_rows.last - row);
        for (inner_index = inner.first; inner_index < inner.last; inner_index++) {
            int64_t rest = inner_index;
            for (int i = h.n_outer + h.n_inner - 1; i >= h.n_outer; i--) {
                index[i] = rest % h.outer[i];
                rest /= h.outer[i];
            }
            for (col = along_cols.first; col < along_cols.last; col += phase.step_cols) {
                cols = std::min(phase.step_cols, along_cols.last - col);
                if (cols != last_cols) {
                    enter_step();
                    last_cols = cols;
                }
                run_block(phase.step, phase.end);
            }
        }
    }
}

void Core::run_tile()
{
    for (int p = 0; p < h.n_phases; p++) {
        const Phase &phase = h.phases[p];
        if (phase.prologue != phase.step) {
            enter_prologue();
            run_block(phase.prologue, phase.step);
        }
        look_ahead(p);
        run_steps(phase);
        if (parts > 1 && reduces_in(phase)) {
            join(phase);
        }
    }
}

void Core::run(int64_t first, int64_t last)
{
    int64_t row_tiles = (h.rows + h.tile_rows - 1) / h.tile_rows;
    int64_t col_tiles = (h.cols + h.tile_cols - 1) / h.tile_cols;
    for (int64_t tile = first; tile < last; tile++) {
        int64_t rest = tile;
        tile_col = rest % col_tiles * h.tile_cols;
        rest /= col_tiles;
        tile_row = rest % row_tiles * h.tile_rows;
        rest /= row_tiles;
        for (int i = h.n_outer - 1; i >= 0 && !h.flat; i--) {
            index[i] = rest % h.outer[i];
            rest /= h.outer[i];
        }
        tile_rows = std::min(h.tile_rows, h.rows - tile_row);
        tile_cols = std::min(h.tile_cols, h.cols - tile_col);
        row = tile_row;
        col = tile_col;
        inner_index = 0;
        for (int i = h.n_outer; i < h.n_outer + h.n_inner; i++) {
            index[i] = 0;
        }
        for (int s = 0; s < h.n_slots; s++) {
            const Slot &slot = code.slots[s];
            if (slot.kind == SLOT_global) {
                char *p = arguments[slot.argument];
                for (int i = 0; i < h.n_outer && !h.flat; i++) {
                    p += index[i] * code.outer[s][i];
                }
                base[s] = p;
            }
        }
        more_tiles = tile + 1 < last;
        run_tile();
    }
    if (code.streams) {
        _mm_sfence(); /* before anybody hears that it is done */
    }
}

} // namespace magjit_dvm
