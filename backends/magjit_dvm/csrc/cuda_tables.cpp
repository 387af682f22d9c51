/* Positions along dimensions, and what is looked up at positions: see cuda/rows.py and cuda/columns.py. */
#include <algorithm>

#include "cuda_encoder.h"
#include "cuda_sizes.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int64_t LEAST_ROW = 64; /* columns from which on what shares a position, or a vector, is a row */
constexpr int64_t LEAST_OF_VECTORS = 32, MOST_OF_VECTOR = 8192, FEW_ELEMENTS = 1 << 17; /* see cuda/columns.py */
constexpr int64_t LEAST_OF_NUMBERS = 16, LONG_OF_NUMBERS = 16384, FEW_OF_NUMBERS = 1 << 20;
constexpr int64_t FEW_OF_NARROW = 1 << 22;

/* Whether some R leaves at most a tenth of the lanes of such rows without elements. */
bool fill_lanes(int64_t cols)
{
    constexpr int64_t OF_WARPS = 512;
    for (int64_t one : {64, 96, 128, 192, 256, 384, 512, 768, 1024}) {
        int64_t lanes = (cols + one - 1) / one * one;
        if (one >= std::min(cols, OF_WARPS) && 10 * cols >= 9 * lanes) {
            return true;
        }
    }
    return false;
}

} // namespace

/* Along which int64 of memory, and what tables are looked up at, varies. */
uint32_t Encoder::dims_of_positions() const
{
    uint32_t found = 0;
    for (int n = 0; n < n_nodes(); n++) {
        const Node &node = program.nodes[n];
        found |= node.kind == NODE_load && node.dtype == DT_i64 ? has[n] : 0;
        found |= node.kind == NODE_index ? has[node.args[0]] : 0;
    }
    return found;
}

/* Without reductions, what shares a position, or an int64, is a row if it lies side by side. */
void Encoder::rows_of_positions()
{
    const Operand *like = whole_output();
    if (reduced || !like || !prepared.has_positions) {
        return;
    }
    uint32_t found = 0, at = dims_of_positions(), lines = 0;
    for (const Node &node : program.nodes) {
        lines |= node.kind == NODE_iota ? 1u << node.aux : 0;
    }
    int64_t bytes = like->size;
    while (!(found & lines)) { /* with positions along them, the innermost alone are columns */
        int inner = dim_inside(bytes / like->size, *like);
        if (inner < 0 || (at | found | (found ? lines : 0)) >> inner & 1) {
            break;
        }
        found |= 1u << inner;
        multiply(bytes, size[inner]);
    }
    if (found != active && bytes >= LEAST_ROW * like->size) {
        reduced = found;
    }
}

/* Whether an operand lies in memory along these dimensions as results do. */
bool Encoder::is_along(const Operand &one, uint32_t dims, const Operand &like) const
{
    for (int d = 0; d < program.rank; d++) {
        if (dims >> d & 1 && one.strides[d] != like.strides[d] / like.size * one.size) {
            return false;
        }
    }
    return true;
}

/* The dimension whose elements are so many apart in results; -1 without one. */
int Encoder::dim_inside(int64_t elements, const Operand &like) const
{
    int found = -1;
    for (int d = 0; d < program.rank; d++) {
        found = active >> d & 1 && like.strides[d] == like.size * elements ? d : found;
    }
    return found;
}

/* How many elements there are, up to so many. */
int64_t Encoder::elements_up_to(int64_t most) const
{
    int64_t elements = 1;
    for (int d = 0; d < program.rank; d++) {
        elements = std::min(elements, most) * size[d];
    }
    return std::min(elements, most);
}

/* How many vectors of these columns come by four. */
int Encoder::vectors_along(uint32_t columns, const Operand &like) const
{
    int vectors = 0;
    for (uint8_t number : prepared.loads) {
        const Operand &one = inputs[number];
        bool known = (one.size == 2 || one.size == 4) && one.low % (4 * one.size) == 0;
        for (int n = 0; n < n_nodes() && known; n++) {
            if (program.nodes[n].kind == NODE_load && program.nodes[n].aux == number &&
                has[n] == columns) {
                vectors += is_along(one, columns, like);
                break;
            }
        }
    }
    return vectors;
}

/* Without reductions, the vectors of columns make rows of these. */
void Encoder::rows_of_vectors()
{
    const Operand *like = whole_output();
    if (reduced || !like || prepared.has_positions || prepared.draws) {
        return;
    }
    bool functions = false; /* that have a short form */
    for (const Node &node : program.nodes) {
        functions |= node.kind == NODE_compute && words.shorter[node.op];
    }
    uint32_t found = 0;
    for (int64_t cols = 1; cols <= MOST_OF_VECTOR;) {
        int inner = dim_inside(cols, *like);
        uint32_t next = inner < 0 ? active : found | 1u << inner;
        if (next == active) {
            return;
        }
        found = next;
        multiply(cols, size[inner]);
        bool wide = cols >= LEAST_OF_VECTORS && cols <= MOST_OF_VECTOR;
        int vectors = wide ? vectors_along(found, *like) : 0;
        bool fill = cols % 4 || (functions && fill_lanes(cols));
        bool alone = vectors == 1 && cols >= LEAST_ROW && fill;
        bool together = vectors > 1 && (cols >= LEAST_ROW || cols % 4 == 0);
        if (alone || together) {
            bool several = vectors > 1 && cols > MOST_NARROW;
            int64_t few = cols % 4 ? FEW_ELEMENTS : several ? FEW_OF_NUMBERS : FEW_OF_NARROW;
            bool fits = elements_up_to(few) == few && (cols % 4 || has_such_rows(found, *like));
            reduced = fits ? found : 0;
            return;
        }
    }
}

/* Without reductions, what has several numbers for the same elements that lie side by side makes rows of
 * these; and what has one, where columns do not come by four. Only where all else lies in this order. */
void Encoder::rows_of_numbers()
{
    const Operand *like = whole_output();
    if (reduced || !like || prepared.has_positions || prepared.draws) {
        return;
    }
    uint32_t found = 0;
    int64_t cols = 0;
    uint64_t numbers = 0; /* inputs that are of rows */
    for (int n = 0; n < n_nodes(); n++) {
        const Node &node = program.nodes[n];
        if (node.kind != NODE_load || !has[n] || has[n] == active) {
            continue;
        }
        uint32_t run = 0;
        int64_t length = 1;
        for (int d; (d = dim_inside(length, *like)) >= 0 && !((has[n] | run) >> d & 1);) {
            run |= 1u << d;
            multiply(length, size[d]);
        }
        if (run) {
            numbers |= (uint64_t)1 << node.aux;
            if (!found || length < cols) {
                found = run;
                cols = length;
            }
        }
    }
    int count = __builtin_popcountll(numbers);
    int64_t few = cols <= MOST_NARROW ? FEW_OF_NARROW : FEW_OF_NUMBERS;
    bool several = count > 1 || (count == 1 && cols % 4);
    if (several && cols >= LEAST_OF_NUMBERS && elements_up_to(few) == few &&
        (cols <= LONG_OF_NUMBERS || fill_blocks(found)) && has_such_rows(found, *like)) {
        reduced = found;
    }
}

/* Whether three of four blocks have a row of these columns, also when the last ones are taken. */
bool Encoder::fill_blocks(uint32_t columns) const
{
    int64_t blocks = machine.multiprocessors, rows = 1;
    for (int d = 0; d < program.rank && rows < 3 * blocks; d++) {
        rows *= columns >> d & 1 ? 1 : size[d];
    }
    return 4 * rows >= 3 * ((rows + blocks - 1) / blocks * blocks);
}

/* Whether rows of these columns have room for their values, and words; and lie side by side. */
bool Encoder::has_such_rows(uint32_t columns, const Operand &like) const
{
    int values = 0;
    for (int n = 0; n < n_nodes(); n++) {
        const Node &node = program.nodes[n];
        values += has[n] && !(has[n] & columns);
        if (node.kind == NODE_compute) {
            Registers kind = facts[node.args[0]].floating ? REGISTERS_f : REGISTERS_i;
            if (words.of[node.op][kind].plain >= BY) {
                return false;
            }
        }
        if (node.kind == NODE_load) {
            const Operand &one = inputs[node.aux];
            bool whole = one.size < 8 && is_along(one, columns, like);
            if (has[n] == active ? !whole : one.size == 1) {
                return false;
            }
        }
    }
    for (int o = 0; o < n_outputs(); o++) {
        bool full = has[program.outputs[o].node] == active && outputs[o].size < 8;
        if (!full || !is_along(outputs[o], columns, like)) {
            return false;
        }
    }
    return values <= MAX_REGISTERS;
}

/* Of no argument: the address of an element is its position along a dimension. */
Operand Encoder::line(int d) const
{
    Operand one{};
    one.strides[d] = 1;
    one.argument = -1;
    one.size = 1;
    return one;
}

/* Whether columns of a table are side by side, and each row begins with four of them. */
bool Encoder::has_rows(const Operand &one) const
{
    int64_t four = std::min(4 * one.size, 16), expected = one.size;
    bool known = one.size == 2 || one.size == 4;
    if (!known || image.cols % 4 || one.low % four || one.step % four) {
        return false;
    }
    for (int k = n_order; k-- > 0;) {
        int d = dims_in_order[k];
        if (k < n_kept ? one.strides[d] % four != 0 : one.strides[d] != expected) {
            return false;
        }
        expected *= k < n_kept ? 1 : size[d];
    }
    return true;
}

/* What is drawn is drawn in the order of the space. */
void Encoder::check_draws()
{
    for (const Node &node : program.nodes) {
        if (node.kind != NODE_draw) {
            continue;
        }
        int k = 0;
        bool same = true;
        for (int64_t packed = node.integer; packed > 0; packed >>= 4) {
            int d = (int)(packed & 15) - 1;
            if (active >> d & 1) {
                same = same && k < n_order && dims_in_order[k++] == d;
            }
        }
        if (!same || k != n_order) {
            return refuse("numbers that are drawn in another order");
        }
    }
}

/* What says which numbers are drawn. */
Where Encoder::placed_draw(const Node &node)
{
    const Argument *one = given + node.aux;
    int64_t seed = one[0].integer, place = one[1].integer, shares = one[2].integer;
    int64_t threads = shares / FOURS, fours = shares % FOURS;
    if (one[0].floating || one[1].floating || one[2].floating) {
        leave();
        return {};
    }
    bool known = place >= 0 && place < (int64_t)1 << 31 && threads > 0 &&
                 threads < (int64_t)1 << 31 && (fours == 1 || fours == 2);
    if (!known || image.elements >= (int64_t)1 << 31) {
        refuse("numbers that are drawn in another way");
        return {};
    }
    int described = add_described(&threads, &fours, 1, (int32_t)(uint64_t)seed,
                                  (int32_t)(seed >> 32), (int32_t)place);
    return {described, -1, 0};
}

/* One element for a row. */
void Encoder::look_up_row_value(int n)
{
    const Node &node = program.nodes[n];
    int y = register_of(node.args[0]);
    Where where = row_view(inputs[node.aux]);
    int x = new_register(n);
    Word &word = put(words.row_table[facts[n].loaded]);
    word.x = (uint8_t)x;
    word.y = (uint8_t)y;
    word.set_place(where);
}

/* A ← elements of a table: rows of it where all columns share a position, else each. */
void Encoder::look_up(int n)
{
    const Node &node = program.nodes[n];
    const Operand &one = inputs[node.aux];
    int position = node.args[0], what = facts[n].loaded;
    if (reduced && in_row(position) && has_rows(one)) {
        int y = register_of(position);
        Where where = row_view(one, (int)image.cols);
        give_up();
        Word &word = put(words.load_few[WAY_row - N_WAYS][what], words.take);
        word.y = (uint8_t)y;
        word.set_place(where);
    } else {
        generate(position);
        give_up(1);
        put(words.table[what]).set_place(viewed(one, dims_in_order, n_order));
    }
    done_with(position);
}

} // namespace magjit_dvm::cuda
