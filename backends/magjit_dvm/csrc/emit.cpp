/* Slots and instructions of one instance. */
#include "encoder.h"

namespace magjit_dvm {

/* ---- slots and instructions ---- */

int Encoder::new_slot(SlotKind kind, DType dtype, uint8_t shape)
{
    Header &h = code.header;
    if (h.n_slots >= MAX_SLOTS) {
        overflow = "too many values";
        return 0;
    }
    Slot &slot = code.slots[h.n_slots];
    slot.kind = kind;
    slot.dtype = dtype;
    slot.shape = shape;
    slot.argument = 0;
    slot.local = 0;
    slot.row = slot.col = 0;
    for (int i = 0; i < h.n_outer + h.n_inner; i++) {
        code.outer[h.n_slots][i] = 0;
    }
    return h.n_slots++;
}

int Encoder::global_slot(int op, int argument, DType dtype, uint8_t shape, bool tile_level)
{
    int s = new_slot(SLOT_global, dtype, shape);
    Slot &slot = code.slots[s];
    const Header &h = code.header;
    slot.argument = (uint8_t)argument;
    if (h.flat) {
        bool contiguous = true;
        int64_t expected = bytes(dtype);
        for (int i = n_dims - 1; i >= 0; i--) {
            code.outer[s][i] = stride_along(op, i);
            contiguous &= code.outer[s][i] == expected;
            expected *= dim_size[i];
        }
        slot.col = contiguous ? bytes(dtype) : 0;
        slot.row = contiguous ? 0 : 1; /* marks a copy; rows are not moved along */
        return s;
    }
    int at = 0, inner = h.n_outer;
    for (int i = 0; i < n_dims; i++) {
        if (i == row || i == col) {
            continue;
        }
        int k = dim_section[i] == SECTION_reduced ? inner++ : at++;
        code.outer[s][k] = stride_along(op, i);
    }
    slot.row = stride_along(op, row);
    slot.col = stride_along(op, col);
    if (tile_level) {
        /* The tile's own dimension lies along the columns of a prologue's block. */
        slot.col = h.reduces == REDUCES_columns ? slot.row : slot.col;
        slot.row = 0;
    }
    return s;
}

/* Whether kernels can read the slot as it is. */
bool Encoder::direct(const Slot &slot) const
{
    if (code.header.flat) {
        return slot.row == 0;
    }
    return slot.col == 0 || slot.col == bytes((DType)slot.dtype);
}

void Encoder::put(uint16_t op, DType dtype, uint8_t shape, int dst, int a, int b, int c,
                  uint8_t aux)
{
    if (words + INSN_WORDS > 8 * MAX_SLOTS) {
        overflow = "too many instructions";
        return;
    }
    Insn insn{op, dtype, INSN_WORDS, shape, aux, (uint16_t)dst, (uint16_t)a, (uint16_t)b,
              (uint16_t)c, 0};
    memcpy(&code.words[words], &insn, sizeof(insn));
    words += INSN_WORDS;
}

int Encoder::constant(int n)
{
    if (values[n].tile_slot >= 0) {
        return values[n].tile_slot;
    }
    const Node &node = program.nodes[n];
    double number = node.number;
    int64_t integer = node.integer;
    bool is_int = node.dtype >= DT_i64 && node.dtype <= DT_bool;
    if (node.kind == NODE_scalar) {
        const Given &g = given[node.aux];
        bool from_int = program.inputs[node.aux].kind == INPUT_int;
        number = from_int ? (double)g.integer : g.number;
        integer = from_int ? g.integer : (int64_t)g.number;
    } else if (node.kind == NODE_numel) {
        integer = 1;
        for (int d = 0; d < program.rank; d++) {
            integer *= node.mask >> d & 1 ? size[d] : 1;
        }
        number = (double)integer;
    }
    Header &h = code.header;
    if (h.n_constants >= MAX_CONSTANTS) {
        overflow = "too many constants";
        return 0;
    }
    uint64_t bits = 0;
    if (is_int) {
        bits = (uint64_t)(node.dtype == DT_bool ? integer != 0 : integer);
    } else if (node.dtype == DT_f64) {
        memcpy(&bits, &number, 8);
    } else {
        float narrow = (float)number;
        memcpy(&bits, &narrow, 4);
    }
    int s = new_slot(SLOT_constant, node.dtype, 0);
    code.slots[s].local = h.n_constants;
    code.constants[h.n_constants++] = bits;
    return values[n].tile_slot = (int16_t)s;
}

/* A block of local memory, from the free ones if one fits. */
int Encoder::step_buffer(int n)
{
    DType dtype = program.nodes[n].dtype;
    int s = new_slot(SLOT_step, dtype, shape_of(n));
    int want = bytes(dtype);
    for (int i = n_free - 1; i >= 0; i--) {
        if (free_blocks[i].bytes == want) {
            code.slots[s].local = (uint32_t)free_blocks[i].offset;
            free_blocks[i] = free_blocks[--n_free];
            return s;
        }
    }
    code.slots[s].local = (uint32_t)step_units;
    step_units += want;
    return s;
}

void Encoder::release(int n)
{
    int s = values[n].step_slot;
    if (s >= 0 && code.slots[s].kind == SLOT_step) {
        free_blocks[n_free].offset = code.slots[s].local;
        free_blocks[n_free++].bytes = bytes((DType)code.slots[s].dtype);
    }
}

/* ---- the values of a tile: prologues ---- */

int Encoder::value_in_tile(int n)
{
    if (is_number(n)) {
        return constant(n);
    }
    if (values[n].tile_slot < 0) {
        overflow = "a value of the tile is read before it is made";
        return 0;
    }
    return values[n].tile_slot;
}

int Encoder::tile_buffer(DType dtype)
{
    int s = new_slot(SLOT_tile, dtype, SHAPE_TILE);
    code.slots[s].local = (uint32_t)tile_units;
    tile_units += bytes(dtype);
    return s;
}

/* The instruction of a node that computes; false where the node is of another kind. */
bool Encoder::put_node(int n, uint8_t shape, int dst, const int *args)
{
    const Node &node = program.nodes[n];
    auto of = [&](int k) { return program.nodes[node.args[k]].dtype; };
    switch (node.kind) {
    case NODE_compute:
        put(node.op, of(node.op == OP_select), shape, dst, args[0], args[1], args[2]);
        return true;
    case NODE_cast:
        put(OP_cast, node.dtype, shape, dst, args[0], NO_SLOT, NO_SLOT, of(0));
        return true;
    case NODE_broadcast:
    case NODE_scan:
    case NODE_reduce: put(OP_copy, node.dtype, shape, dst, args[0]); return true;
    default: return false;
    }
}

const char *Encoder::emit_tile_node(int n)
{
    const Node &node = program.nodes[n];
    if (node.kind == NODE_load) {
        int from = global_slot(node.aux, node.aux, node.dtype, SHAPE_TILE, true);
        int s = tile_buffer(node.dtype);
        put(OP_view_load, node.dtype, SHAPE_TILE, s, from);
        values[n].tile_slot = (int16_t)s;
        return nullptr;
    }
    if (reduces(n)) {
        int acc = values[n].accumulator;
        DType from = (DType)code.slots[acc].dtype;
        if (from == node.dtype) {
            values[n].tile_slot = (int16_t)acc;
        } else {
            int s = tile_buffer(node.dtype);
            put(OP_finish, node.dtype, SHAPE_TILE, s, acc, NO_SLOT, NO_SLOT, from);
            values[n].tile_slot = (int16_t)s;
        }
        return nullptr;
    }
    int s = tile_buffer(node.dtype), args[3] = {NO_SLOT, NO_SLOT, NO_SLOT};
    for (int k = 0; k < 3; k++) {
        if (node.args[k] >= 0) {
            args[k] = value_in_tile(node.args[k]);
        }
    }
    values[n].tile_slot = (int16_t)s;
    if (node.kind == NODE_index) {
        put_index_load(n, SHAPE_TILE, s, args[0]);
        return nullptr;
    }
    if (node.kind == NODE_iota) {
        put_iota(n, SHAPE_TILE, s);
        return nullptr;
    }
    return put_node(n, SHAPE_TILE, s, args) ? nullptr : "this value cannot be had for a whole tile";
}

/* ---- the values of a step ---- */

/* The slot to read a value from in a step; binds it on first use. */
int Encoder::value_in_step(int n)
{
    if (is_number(n)) {
        return constant(n);
    }
    if (values[n].step_slot >= 0) {
        return values[n].step_slot;
    }
    if (values[n].tile_slot >= 0) { /* of the tile, or kept by an earlier phase */
        moved_units += values[n].kept ? bytes(program.nodes[n].dtype) : 0;
        put(OP_load, program.nodes[n].dtype, code.slots[values[n].tile_slot].shape, values[n].tile_slot,
            values[n].tile_slot);
        return values[n].step_slot = values[n].tile_slot;
    }
    overflow = "a value is read before it is made";
    return 0;
}

void Encoder::put_index_load(int n, uint8_t shape, int dst, int positions)
{
    const Node &node = program.nodes[n];
    const Input &table = program.inputs[node.aux];
    int from = global_slot(node.aux, node.aux, table.dtype, shape, shape & SHAPE_TILE);
    int64_t stride = 0, rows = 0;
    for (int k = 0; k < table.ndim; k++) {
        if (table.dims[k] == DIM_indexed) {
            stride = given[node.aux].strides[k] * bytes(table.dtype);
            rows = given[node.aux].sizes[k];
        }
    }
    Header &h = code.header;
    if (h.n_constants + 2 > MAX_CONSTANTS) {
        overflow = "too many constants";
        return;
    }
    put(OP_index_load, node.dtype, shape, dst, from, positions, h.n_constants,
        program.nodes[node.args[0]].dtype);
    code.constants[h.n_constants++] = (uint64_t)stride;
    code.constants[h.n_constants++] = (uint64_t)rows;
}

/* aux: 0 the dimension has size 1, 1 that of rows, 2 that of columns, 3 on: those enumerated. */
void Encoder::put_iota(int n, uint8_t shape, int dst)
{
    int dim = program.nodes[n].aux;
    bool along_row = row >= 0 && (dim_mask[row] >> dim & 1);
    bool along_col = col >= 0 && (dim_mask[col] >> dim & 1);
    int which = along_row ? 1 : along_col ? 2 : 0;
    for (int i = 0, at = 0, in = code.header.n_outer; which == 0 && i < n_dims; i++) {
        if (i == row || i == col) {
            continue;
        }
        int k = dim_section[i] == SECTION_reduced ? in++ : at++;
        if (dim_mask[i] >> dim & 1) {
            which = 3 + k;
        }
    }
    put(OP_iota, DT_i64, shape, dst, NO_SLOT, NO_SLOT, NO_SLOT, (uint8_t)which);
}

const char *Encoder::emit_step_node(int n, int phase)
{
    const Node &node = program.nodes[n];
    uint8_t shape = shape_of(n);
    if (node.kind == NODE_load) {
        int from = global_slot(node.aux, node.aux, node.dtype, shape, false);
        if (direct(code.slots[from])) {
            put(OP_load, node.dtype, shape, from, from);
            values[n].step_slot = (int16_t)from;
            /* What all rows share takes its place once. */
            moved_units += shape & SHAPE_ROWS || row < 0 ? bytes(node.dtype) : 0;
        } else {
            int s = step_buffer(n);
            put(OP_view_load, node.dtype, shape, s, from);
            values[n].step_slot = (int16_t)s;
        }
        return nullptr;
    }
    if (node.kind == NODE_iota) {
        int s = step_buffer(n);
        put_iota(n, shape, s);
        values[n].step_slot = (int16_t)s;
        return nullptr;
    }
    const int16_t *operands = values[n].merged ? values[n].merged_args : node.args;
    int args[3] = {NO_SLOT, NO_SLOT, NO_SLOT}, first_args[3] = {NO_SLOT, NO_SLOT, NO_SLOT};
    /* Operands that are used for the last time, each once; those of the first of a pair before those of
     * the second, which may read them again. */
    int dying[6], n_dying = 0;
    int first = values[n].merged && values[operands[0]].leads ? operands[0] : -1;
    auto take = [&](const int16_t *from, int *to) {
        for (int k = 0; k < 3; k++) {
            if (from[k] >= 0 && from[k] != first) {
                to[k] = value_in_step(from[k]);
            }
        }
        for (int k = 0; k < 3; k++) {
            if (from[k] >= 0 && --values[from[k]].uses == 0) {
                dying[n_dying++] = from[k];
            }
        }
    };
    if (first >= 0) {
        take(values[first].merged_args, first_args);
    }
    int n_first = n_dying;
    take(operands, args);
    if (reduces(n)) {
        int acc = values[n].accumulator;
        if (acc != placed) {
            put(OP_load, (DType)code.slots[acc].dtype, SHAPE_TILE, acc, acc);
        }
        int sum = values[n].sum < 0 ? acc : values[values[n].sum].accumulator;
        for (int s : {sum, acc + 1}) {
            if (sum != acc) { /* accumulators as well: the sum, and the number of elements */
                put(OP_load, DT_f64, SHAPE_TILE, s, s);
            }
        }
        put(values[n].merged ? values[n].merged : node.op, node.dtype, SHAPE_ROWS | SHAPE_COLS, acc,
            args[0], sum == acc ? args[1] : sum, sum == acc ? NO_SLOT : acc + 1);
        for (int k = 0; k < n_dying; k++) {
            release(dying[k]);
        }
        return nullptr;
    }
    /* The result may take the place of an operand of the same extents; that of a pair is written before
     * the second reads its operands. */
    for (int k = 0; k < (first < 0 ? n_dying : n_first); k++) {
        if (shape_of(dying[k]) == shape && node.kind != NODE_index &&
            bytes(program.nodes[dying[k]].dtype) == bytes(node.dtype)) {
            release(dying[k]);
            dying[k] = -1;
        }
    }
    int which = -1, s;
    if (values[n].kept) {
        s = new_slot(SLOT_kept, node.dtype, SHAPE_ROWS | SHAPE_COLS);
        code.slots[s].local = (uint32_t)kept_units; /* made an offset by place() */
        kept_units += bytes(node.dtype);
        moved_units += bytes(node.dtype);
        put(OP_load, node.dtype, SHAPE_ROWS | SHAPE_COLS, s, s);
        values[n].tile_slot = (int16_t)s;
    } else {
        s = values[n].avail == phase ? output_slot(n, false, true, &which) : -1;
        if (s >= 0) {
            put(OP_store, node.dtype, shape, s, s);
        } else {
            s = step_buffer(n);
        }
    }
    values[n].step_slot = (int16_t)s;
    if (first >= 0) {
        put(values[first].merged, node.dtype, shape, s, first_args[0], first_args[1], first_args[2]);
        args[0] = s;
    }
    if (values[n].merged) {
        put(values[n].merged, node.dtype, shape, s, args[0], args[1], args[2]);
    } else if (node.kind == NODE_index) {
        put_index_load(n, shape, s, args[0]);
    } else if (scans(n)) {
        int acc = values[n].accumulator;
        put(OP_load, (DType)code.slots[acc].dtype, SHAPE_TILE, acc, acc);
        put(node.op, node.dtype, shape, s, args[0], acc);
    } else if (!put_node(n, shape, s, args)) {
        return "this value cannot be made in a step";
    }
    for (int k = 0; k < n_dying; k++) {
        if (dying[k] >= 0) {
            release(dying[k]);
        }
    }
    if (values[n].avail == phase || values[n].kept) {
        store_outputs(n, s, which, false);
    }
    return nullptr;
}

/* Whether a result is written past the caches: from local memory, whole lines at once. */
bool Encoder::passes_by(int n, const Slot &slot) const
{
    const Header &h = code.header;
    int64_t run = h.flat ? h.elements : h.cols;
    return code.streams && values[n].has == active && slot.col == bytes((DType)slot.dtype) &&
           run * slot.col >= SHORTEST_STREAM;
}

/* The slot of the first output of a value, or -1; with direct_only, if kernels can write it. */
int Encoder::output_slot(int n, bool tile_level, bool direct_only, int *which)
{
    for (size_t o = 0; o < program.outputs.size(); o++) {
        if (program.outputs[o].node != n || (int)o <= *which) {
            continue;
        }
        DType dtype = program.nodes[n].dtype;
        uint8_t shape = shape_of(n);
        int s = global_slot(n_inputs() + (int)o, n_inputs() + (int)o, dtype, shape, tile_level);
        const Slot &slot = code.slots[s];
        bool writable = code.header.flat ? slot.row == 0
                                         : slot.col == bytes(dtype) || !(shape & SHAPE_COLS);
        if (direct_only && (!writable || passes_by(n, slot))) {
            code.header.n_slots--;
            return -1;
        }
        *which = (int)o;
        moved_units += bytes(dtype);
        return s;
    }
    return -1;
}

/* Copy a value to those of its outputs that it was not written to in place. */
void Encoder::store_outputs(int n, int from, int done, bool tile_level)
{
    int which = -1, s;
    while ((s = output_slot(n, tile_level, false, &which)) >= 0) {
        if (which == done) {
            code.header.n_slots--;
            continue;
        }
        put(OP_view_store, program.nodes[n].dtype, tile_level ? (uint8_t)SHAPE_TILE : shape_of(n), s,
            from);
    }
}

const char *Encoder::emit()
{
    Header &h = code.header;
    for (int n = 0; n < n_nodes(); n++) {
        values[n].tile_slot = -1;
        values[n].stores = false;
    }
    for (const Output &out : program.outputs) {
        values[out.node].stores = true;
    }
    kept_units = 0;
    for (int phase = 0; phase < n_phases; phase++) {
        if (const char *error = emit_phase(phase)) {
            return error;
        }
    }
    first_slot[n_phases] = h.n_slots;
    h.n_phases = (uint16_t)n_phases;
    h.code_words = words;
    return overflow;
}

const char *Encoder::emit_phase(int phase)
{
    Header &h = code.header;
    h.phases[phase].prologue = words;
    first_slot[phase] = h.n_slots;
    n_stepping = 0;
    for (int n = 0; n < n_nodes(); n++) {
        Value &value = values[n];
        value.step_slot = -1;
        value.uses = 0;
        value.merged = 0;
        value.absorbed = value.leads = false;
        value.steps = in_step(n, phase);
        if (value.steps) {
            stepping[n_stepping++] = (uint8_t)n;
        }
        if (!(value.phases >> phase & 1) || value.avail != phase || !in_tile(n) || is_number(n)) {
            continue;
        }
        if (const char *error = emit_tile_node(n)) {
            return error;
        }
        store_outputs(n, value.tile_slot, -1, true);
    }
    for (int i = 0; i < n_stepping; i++) {
        int n = stepping[i];
        const Node &node = program.nodes[n];
        bool sums = reduces(n);
        if (sums || scans(n)) {
            DType as = accumulator_of(node.op, node.dtype);
            int op = node.op == OP_cumsum ? (int)OP_sum : node.op == OP_cumprod ? (int)OP_prod : node.op;
            int acc = tile_buffer(as);
            values[n].accumulator = (int16_t)acc;
            put(OP_fill, as, SHAPE_TILE, acc, NO_SLOT, NO_SLOT, NO_SLOT, (uint8_t)op);
            if (sums && values[n].sum >= 0) { /* the number of elements, in the next slot */
                put(OP_fill, as, SHAPE_TILE, tile_buffer(as), NO_SLOT, NO_SLOT, NO_SLOT, OP_sum);
            }
        }
        if (values[n].in_moments) {
            continue;
        }
        for (int16_t arg : program.nodes[values[n].sum < 0 ? n : values[n].sum].args) {
            if (arg >= 0) {
                values[arg].uses++;
            }
        }
    }
    plan_merges(phase);
    h.phases[phase].step = words;
    step_units = moved_units = 0;
    n_free = 0;
    placed = -1;
    for (int i = 0; i < n_stepping; i++) {
        int n = stepping[i];
        if (values[n].absorbed) {
            continue;
        }
        place_sum_of(i);
        if (const char *error = emit_step_node(n, phase)) {
            return error;
        }
        NodeKind kind = program.nodes[n].kind;
        if ((kind == NODE_load || kind == NODE_iota) && values[n].avail == phase) {
            store_outputs(n, values[n].step_slot, -1, false);
        }
        if (overflow) {
            return overflow;
        }
    }
    h.phases[phase].end = words;
    phase_units[phase] = step_units;
    phase_moved[phase] = moved_units;
    return nullptr;
}

} // namespace magjit_dvm
