/* What must hold of bytecode before it is used. */
#include <algorithm>

#include "program.h"

namespace magjit_dvm {

namespace {

constexpr int64_t MOST = (int64_t)1 << 56;

/* a·b, or MOST where that is more. */
int64_t times(int64_t a, int64_t b)
{
    __int128 product = (__int128)a * b;
    return product > MOST ? MOST : product < -MOST ? -MOST : (int64_t)product;
}

struct Checker {
    const Code &code;
    const Header &h;
    const Extent *extents;
    int n_arguments;
    int64_t inner = 1;

    Checker(const Code &c, const Extent *e, int n)
        : code(c), h(c.header), extents(e), n_arguments(n)
    {
    }

    const char *header();
    const char *slot(const Slot &s);
    const char *global(const Slot &s, bool tile_level);
    const char *step_slots(const Insn &insn, const Phase &phase);
    const char *bindings(const Insn &insn, bool prologue);
    const char *table(const Insn &insn);
    const char *insn(const Insn &insn, bool prologue);
    const char *run();

    bool bound[MAX_SLOTS]; /* slots that the step has been given an address for */
};

const char *Checker::header()
{
    if (h.magic != MAGIC) {
        return "not a program";
    }
    if (h.reduces >= N_REDUCES || h.flat > 1 || (h.flat && h.reduces)) {
        return "an unknown kernel type";
    }
    if (h.n_outer + h.n_inner > MAX_DIMS || h.n_slots > MAX_SLOTS || h.n_phases > MAX_PHASES ||
        h.n_constants > MAX_CONSTANTS || h.code_words > 8 * MAX_SLOTS ||
        h.n_arguments > n_arguments || h.n_inputs > h.n_arguments || (h.flat && (h.n_outer < 2 || h.n_inner))) {
        return "too many of something";
    }
    int64_t outer = 1;
    for (int i = 0; i < h.n_outer + h.n_inner; i++) {
        if (h.outer[i] < 1 || h.outer[i] > MOST) {
            return "a size below 1";
        }
        (i < h.n_outer ? outer : inner) = times(i < h.n_outer ? outer : inner, h.outer[i]);
    }
    for (int64_t n : {h.rows, h.cols, h.tile_rows, h.tile_cols}) {
        if (n < 1 || n >= MOST) {
            return "a size below 1";
        }
    }
    if (h.tile_rows > h.rows || h.tile_cols > h.cols) {
        return "a tile larger than the whole";
    }
    if ((h.reduces == REDUCES_columns && h.tile_cols != h.cols) ||
        (h.reduces == REDUCES_rows && h.tile_rows != h.rows)) {
        return "a tile has a reduced dimension in part";
    }
    if (h.flat && (outer != h.cols || h.rows != 1)) {
        return "a flattened shape of another size";
    }
    int64_t tiles = times((h.rows + h.tile_rows - 1) / h.tile_rows,
                          (h.cols + h.tile_cols - 1) / h.tile_cols);
    tiles = h.flat ? tiles : times(tiles, outer);
    if (tiles != h.tiles || tiles >= MOST) {
        return "another number of tiles";
    }
    uint32_t at = 0;
    for (int p = 0; p < h.n_phases; p++) {
        const Phase &phase = h.phases[p];
        if (phase.prologue != at || phase.step < at || phase.end < phase.step ||
            phase.end > h.code_words || (phase.step | phase.end) % INSN_WORDS) {
            return "phases do not follow one another";
        }
        if (phase.step_rows < 1 || phase.step_cols < 1 || phase.step_rows > h.tile_rows ||
            phase.step_cols > h.tile_cols) {
            return "a step larger than its tile";
        }
        at = phase.end;
    }
    return at == h.code_words ? nullptr : "code outside of the phases";
}

/* All that a slot can address lies within its argument. */
const char *Checker::global(const Slot &s, bool tile_level)
{
    const int64_t *outer = code.outer[&s - code.slots];
    if (s.argument >= h.n_arguments) {
        return "an argument that is not there";
    }
    int64_t low = 0, high = DTYPE_BYTES[s.dtype];
    auto along = [&](int64_t stride, int64_t n) {
        (stride < 0 ? low : high) += times(stride, n - 1);
    };
    if (h.flat) {
        /* Kernels go along the columns, copies along the dimensions. */
        for (int i = 0; i < h.n_outer; i++) {
            along(outer[i], h.outer[i]);
        }
        if (s.row == 0) {
            int64_t whole = times(s.col, h.cols - 1);
            low = std::min(low, whole);
            high = std::max(high, whole + DTYPE_BYTES[s.dtype]);
        }
    } else {
        for (int i = 0; i < h.n_outer + h.n_inner; i++) {
            along(outer[i], h.outer[i]);
        }
        if (tile_level) {
            along(s.col, h.reduces == REDUCES_columns ? h.rows : h.cols);
        } else {
            along(s.row, h.rows);
            along(s.col, h.cols);
        }
    }
    const Extent &e = extents[s.argument];
    return low < e.low || high > e.high ? "an address outside of its argument" : nullptr;
}

const char *Checker::slot(const Slot &s)
{
    if (s.kind >= N_SLOT_KINDS || s.dtype >= N_DTYPES) {
        return "a slot of an unknown kind";
    }
    int64_t size = DTYPE_BYTES[s.dtype], count = 0;
    switch (s.kind) {
    case SLOT_constant: return s.local < h.n_constants ? nullptr : "a constant that is not there";
    case SLOT_global: return global(s, s.shape & SHAPE_TILE);
    case SLOT_step: count = 0; break; /* as large as the steps that use it: see step_slots */
    case SLOT_tile: count = h.reduces == REDUCES_columns ? h.tile_rows : h.tile_cols; break;
    default: count = times(times(h.tile_rows, h.tile_cols), inner);
    }
    if (s.kind == SLOT_tile && !h.reduces) {
        return "a value of the tile in a program without reductions";
    }
    return times(count, size) + s.local <= h.local_bytes ? nullptr : "outside of local memory";
}

const char *Checker::insn(const Insn &insn, bool prologue)
{
    if (insn.op >= N_OPS || insn.dtype >= N_DTYPES || insn.length != INSN_WORDS ||
        insn.shape > (SHAPE_ROWS | SHAPE_COLS | SHAPE_TILE)) {
        return "an unknown instruction";
    }
    bool tile = insn.shape & SHAPE_TILE;
    OpKind kind = OPS[insn.op].kind;
    auto at = [&](uint16_t s) { return s < h.n_slots ? &code.slots[s] : nullptr; };
    const Slot *d = at(insn.dst), *a = at(insn.a);
    bool binds = insn.op == OP_load || insn.op == OP_store;
    if (prologue ? !tile : tile && !binds) {
        return "a block of the tile in a step, or of a step in a prologue";
    }
    /* What kernels may write, and in which shape. */
    if (!d || d->kind == SLOT_constant) {
        return "no place for a result";
    }
    auto fits = [&](const Slot *s) {
        /* A block must not have more rows or columns than its place. */
        return s && (s->kind == SLOT_constant || s->kind == SLOT_kept ||
                     (tile ? s->kind == SLOT_tile
                           : s->kind == SLOT_tile || !(s->shape & SHAPE_TILE)));
    };
    auto reads = [&](uint16_t number, int dtype) {
        const Slot *s = at(number);
        return fits(s) && s->dtype == dtype;
    };
    if (binds) {
        return prologue               ? "an address of a step in a prologue"
               : d->kind == SLOT_step ? "an address for what has one"
                                      : nullptr;
    }
    if (kind == KIND_memory) {
        switch (insn.op) {
        case OP_view_load:
            return a && a->kind == SLOT_global && a->dtype == insn.dtype &&
                           bool(a->shape & SHAPE_TILE) == tile && fits(d) &&
                           d->dtype == insn.dtype && d->kind != SLOT_global
                       ? nullptr
                       : "a view that cannot be loaded";
        case OP_view_store:
            return d->kind == SLOT_global && d->dtype == insn.dtype &&
                           bool(d->shape & SHAPE_TILE) == tile && reads(insn.a, insn.dtype)
                       ? nullptr
                       : "a view that cannot be stored";
        case OP_index_load:
            return !h.flat && a && a->kind == SLOT_global && a->dtype == insn.dtype &&
                           bool(a->shape & SHAPE_TILE) == tile && fits(d) && d->dtype == insn.dtype && insn.c + 1 < h.n_constants &&
                           (insn.aux == DT_i64 || insn.aux == DT_i32) && reads(insn.b, insn.aux)
                       ? nullptr
                       : "a table that cannot be read";
        case OP_iota:
            return d->dtype == DT_i64 && fits(d) &&
                           insn.aux < 3 + h.n_outer + h.n_inner
                       ? nullptr
                       : "no positions of this kind";
        case OP_one_hot:
            return !tile && !h.flat && d->dtype == DT_bool && insn.dtype == DT_bool && fits(d) &&
                           insn.shape & SHAPE_COLS && reads(insn.a, DT_i64)
                       ? nullptr
                       : "no positions of this kind";
        case OP_fill:
            return tile && d->kind == SLOT_tile && d->dtype == insn.dtype && insn.aux < N_OPS &&
                           OPS[insn.aux].kind == KIND_reduce
                       ? nullptr
                       : "no accumulator";
        default:
            return tile && d->kind == SLOT_tile && d->dtype == insn.dtype &&
                           insn.aux < N_DTYPES && reads(insn.a, insn.aux)
                       ? nullptr
                       : "no accumulator";
        }
    }
    const Kernels &k = kernels();
    if (insn.op == OP_cast) {
        return insn.aux < N_DTYPES && k.cast[insn.aux][insn.dtype] && fits(d) &&
                       d->dtype == insn.dtype && reads(insn.a, insn.aux)
                   ? nullptr
                   : "a cast of other dtypes";
    }
    if (!k.op[insn.op][insn.dtype]) {
        return "an instruction that is not there for its dtype";
    }
    if (kind == KIND_reduce) {
        return !tile && h.reduces && d->kind == SLOT_tile &&
                       d->dtype == accumulator_of(insn.op, (DType)insn.dtype) &&
                       reads(insn.a, insn.dtype)
                   ? nullptr
                   : "no accumulator";
    }
    if (kind == KIND_reduce2 || kind == KIND_reduce3) {
        DType as = accumulator_of(insn.op, (DType)insn.dtype);
        auto adds = [&](uint16_t s) { return at(s) && at(s)->kind == SLOT_tile && at(s)->dtype == as; };
        return !tile && h.reduces == REDUCES_columns && adds(insn.dst) && reads(insn.a, insn.dtype) &&
                       (kind == KIND_reduce2 ? reads(insn.b, insn.dtype) : adds(insn.b) && adds(insn.c))
                   ? nullptr
                   : "no accumulator";
    }
    if (kind == KIND_scan) {
        const Slot *b = at(insn.b);
        return !tile && h.reduces && fits(d) && d->kind != SLOT_tile && d->dtype == insn.dtype &&
                       reads(insn.a, insn.dtype) && b && b->kind == SLOT_tile &&
                       b->dtype == accumulator_of(insn.op, (DType)insn.dtype)
                   ? nullptr
                   : "no accumulator";
    }
    int first = insn.op == OP_select ? (int)DT_bool : insn.dtype;
    bool fine = fits(d) && d->dtype == (OPS[insn.op].to_bool ? (int)DT_bool : insn.dtype) &&
                reads(insn.a, first);
    fine = fine && (kind < KIND_binary || reads(insn.b, insn.dtype));
    fine = fine && (kind < KIND_ternary || reads(insn.c, insn.dtype));
    return fine ? nullptr : "operands of other dtypes or shapes";
}

/* Slots that move from step to step have an address only once they are bound in that step, and only
 * outputs are written. */
const char *Checker::bindings(const Insn &insn, bool prologue)
{
    OpKind kind = OPS[insn.op].kind;
    const Slot &d = code.slots[insn.dst];
    bool binds = insn.op == OP_load || insn.op == OP_store;
    if (d.kind == SLOT_global && d.argument < h.n_inputs && insn.op != OP_load) {
        return "an input is written";
    }
    if (binds) {
        bound[insn.dst] = true;
        return nullptr;
    }
    auto placed = [&](uint16_t s) {
        if (s >= h.n_slots || prologue) {
            return s >= h.n_slots || code.slots[s].kind != SLOT_global;
        }
        SlotKind at = (SlotKind)code.slots[s].kind;
        return at == SLOT_step || at == SLOT_constant || bound[s];
    };
    if (insn.op == OP_view_load) {
        return placed(insn.dst) ? nullptr : "a slot without an address";
    }
    if (insn.op == OP_view_store) {
        return placed(insn.a) ? nullptr : "a slot without an address";
    }
    if (insn.op == OP_index_load) {
        return placed(insn.dst) && placed(insn.b) ? table(insn) : "a slot without an address";
    }
    if (insn.op == OP_iota || insn.op == OP_fill) {
        return placed(insn.dst) ? nullptr : "a slot without an address";
    }
    if (!placed(insn.dst) || !placed(insn.a) || (kind >= KIND_binary && !placed(insn.b)) ||
        !placed(insn.c)) {
        return "a slot without an address";
    }
    if (!prologue && d.kind == SLOT_tile && !accumulates(kind)) {
        return "a value of the tile is written in a step";
    }
    if (d.kind == SLOT_global && insn.shape & SHAPE_COLS &&
        (d.col != DTYPE_BYTES[d.dtype] || (h.flat && d.row))) {
        return "a result that is not contiguous";
    }
    return nullptr;
}

/* The rows of a table that positions can name. */
const char *Checker::table(const Insn &insn)
{
    int64_t stride = (int64_t)code.constants[insn.c], rows = (int64_t)code.constants[insn.c + 1];
    if (rows < 0 || rows >= MOST || stride <= -MOST || stride >= MOST) {
        return "a table of another size";
    }
    if (rows == 0) {
        return nullptr; /* every position is out of range */
    }
    Slot s = code.slots[insn.a];
    const int64_t *outer = code.outer[insn.a];
    int64_t low = 0, high = DTYPE_BYTES[s.dtype];
    auto along = [&](int64_t by, int64_t n) { (by < 0 ? low : high) += times(by, n - 1); };
    for (int i = 0; i < h.n_outer + h.n_inner; i++) {
        along(outer[i], h.outer[i]);
    }
    if (s.shape & SHAPE_TILE) {
        along(s.col, h.reduces == REDUCES_columns ? h.rows : h.cols);
    } else {
        along(s.row, h.rows);
        along(s.col, h.cols);
    }
    along(stride, rows);
    const Extent &e = extents[s.argument];
    return low < e.low || high > e.high ? "an address outside of its argument" : nullptr;
}

/* The blocks of local memory that an instruction touches hold a step of its phase. */
const char *Checker::step_slots(const Insn &insn, const Phase &phase)
{
    int64_t count = times(phase.step_rows, phase.step_cols);
    for (uint16_t s : {insn.dst, insn.a, insn.b, insn.c}) {
        if (s < h.n_slots && code.slots[s].kind == SLOT_step) {
            const Slot &slot = code.slots[s];
            if (times(count, DTYPE_BYTES[slot.dtype]) + slot.local > h.local_bytes) {
                return "a block outside of local memory";
            }
        }
    }
    return nullptr;
}

const char *Checker::run()
{
    if (const char *error = header()) {
        return error;
    }
    for (int s = 0; s < h.n_slots; s++) {
        if (const char *error = slot(code.slots[s])) {
            return error;
        }
    }
    for (int p = 0; p < h.n_phases; p++) {
        const Phase &phase = h.phases[p];
        std::fill(bound, bound + MAX_SLOTS, false);
        for (uint32_t at = phase.prologue; at < phase.end; at += INSN_WORDS) {
            Insn one;
            memcpy(&one, &code.words[at], sizeof(one));
            const char *error = insn(one, at < phase.step);
            if (error || (error = bindings(one, at < phase.step)) ||
                (error = step_slots(one, phase))) {
                return error;
            }
        }
    }
    return nullptr;
}

} // namespace

const char *verify(const Code &code, const Extent *extents, int n_arguments)
{
    return Checker(code, extents, n_arguments).run();
}

} // namespace magjit_dvm
