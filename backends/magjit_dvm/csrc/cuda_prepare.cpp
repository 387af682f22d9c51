/* What a program says whatever its sizes are, and the numbers of words. */
#include "cuda_encoder.h"

#include <algorithm>

namespace magjit_dvm::cuda {

Words words;

namespace {

/* Numbers of operators by name; `failed` once one is missing. */
struct Names {
    PyObject *numbers;
    bool failed = false;

    void find(uint8_t &place, const char *format, const char *part = "")
    {
        PyObject *name = failed ? nullptr : PyUnicode_FromFormat(format, part);
        PyObject *number = name ? PyDict_GetItemWithError(numbers, name) : nullptr;
        long value = number ? PyLong_AsLong(number) : -1;
        if (!failed && (value < 0 || value > 255)) {
            failed = true;
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_ValueError, "no operator %U", name);
            }
        }
        Py_XDECREF(name);
        place = (uint8_t)value;
    }
};

const char *const LOADS[N_LOADED] = {"32", "f16", "bf16", "u8", "i64", "i64f", "i64s"};
const char *const REDUCTIONS[N_REDUCTIONS] = {"f.sum", "f.prod", "f.max",
                                              "f.min", "i.max",  "i.min", "i.sum"};

void find_tables(Names &names, Words &found)
{
    static const char *const ways[N_WAYS] = {"lt.s.%s", "lt.u.%s", "lt.v.%s", "lt.b.%s", "lt.e.%s"};
    static const char *const stores[N_STORES] = {"st.g.%s", "st.u.%s", "st.e.%s"};
    for (int what = 0; what < N_LOADED; what++) {
        for (int way = 0; way < N_WAYS; way++) {
            if (what < N_NARROW || way == WAY_staged || way == WAY_each) {
                names.find(found.load[way][what], ways[way], LOADS[what]);
            }
        }
        if (what < N_NARROW || what == LOADED_i64s) {
            names.find(found.table[what], "at.%s", LOADS[what]);
        }
    }
    for (int what = 0; what < N_STORED; what++) {
        for (int store = 0; store < N_STORES; store++) {
            if (what < N_NARROW || store != STORE_shifted) {
                names.find(found.store[store][what], stores[store], LOADS[what]);
            }
        }
        names.find(found.row_store[what], "s.st.%s", LOADS[what]);
    }
    for (int what = 0; what < 3; what++) {
        names.find(found.load_a[what], "la.s.%s", LOADS[what]);
        names.find(found.row_load[what], "s.ld.%s", LOADS[what]);
        names.find(found.row_table[what], "s.at.%s", LOADS[what]);
        names.find(found.load_few[WAY_row - N_WAYS][what], "lt.row.%s", LOADS[what]);
        names.find(found.load_few[WAY_columns - N_WAYS][what], "lt.c.%s", LOADS[what]);
        names.find(found.load_few[WAY_near - N_WAYS][what], "lt.n.%s", LOADS[what]);
        names.find(found.load_few[WAY_transposed - N_WAYS][what], "lt.t.%s", LOADS[what]);
        names.find(found.store_near[what], "st.n.%s", LOADS[what]);
    }
    for (int k = 0; k < N_REDUCTIONS; k++) {
        names.find(found.reduce[k], "red.%s", REDUCTIONS[k]);
        names.find(found.finish[k], "fin.%s", REDUCTIONS[k]);
        names.find(found.row_reduce[k], "row.%s", REDUCTIONS[k]);
    }
    names.find(found.reduce_online, "red.f.softmax");
    names.find(found.finish_online, "fin.f.softmax");
    for (int bank : {BANK_t, BANK_a}) {
        const char *letter = bank == BANK_a ? "a" : "t";
        names.find(found.row[bank], "l%s.r", letter);
        names.find(found.scratch[bank], "l%s.scratch", letter);
    }
}

void find_singles(Names &names, Words &found)
{
    names.find(found.end, "end");
    names.find(found.number, "lt.k");
    names.find(found.position, "lt.e.at");
    names.find(found.column, "lt.col.at");
    names.find(found.draw, "lt.draw.f");
    names.find(found.row_position, "s.ld.at");
    names.find(found.row_load[LOADED_i64s], "s.ld.i64s");
    names.find(found.nop, "nop");
    names.find(found.by, "by");
    names.find(found.swap, "swap");
    names.find(found.keep, "keep");
    names.find(found.take, "take");
    names.find(found.mask, "mask");
    names.find(found.select, "select");
    names.find(found.save, "save");
    names.find(found.add_up, "acc");
    names.find(found.add_up_norm, "acc.norm");
    names.find(found.add_rows, "add.rows");
    names.find(found.norm_back, "norm.back");
    names.find(found.add_scaled, "mad.r");
    names.find(found.multiply_add, "fk.mad");
    names.find(found.sub_scaled, "nmad.r");
    names.find(found.row_in, "s.in");
    names.find(found.by_row, "s.by");
    names.find(found.by_row_number, "sk.by");
    names.find(found.and_ints, "i.bitwise_and");
    names.find(found.scalar_row, "lk.r");
    names.find(found.ask_near, "pf.n");
    names.find(found.ask_transposed, "pf.t");
    names.find(found.row_number, "s.k");
    names.find(found.row_take, "s.take");
    names.find(found.to_half, "f.to_half");
    names.find(found.to_bfloat, "f.to_bfloat");
    names.find(found.to_int, "f.to_int");
    names.find(found.to_byte, "f.to_byte");
    names.find(found.to_bool, "f.to_bool");
    names.find(found.int_to_float, "i.to_float");
    names.find(found.int_to_bool, "i.to_bool");
    names.find(found.low_bits, "ik.bitwise_and");
    names.find(found.logical_not, "i.logical_not");
    names.find(found.row_squares, "row.f.squares");
    names.find(found.row_stat, "row.f.stat");
    names.find(found.row_norm, "row.f.norm");
    names.find(found.kept, "lt.w");
    names.find(found.affine, "w.affine");
    names.find(found.scale, "w.scale");
    names.find(found.row_softmax, "row.f.softmax");
    names.find(found.row_back, "row.f.back");
    names.find(found.row_running[0][REGISTERS_f], "row.f.cumsum");
    names.find(found.row_running[0][REGISTERS_i], "row.i.cumsum");
    names.find(found.row_running[1][REGISTERS_f], "row.f.cumprod");
    names.find(found.scaled_rsqrt, "sk.scaled_rsqrt");
    names.find(found.sub_exp_small, "f.sub_exp_small");
    names.find(found.sub_exp_small_number, "fk.sub_exp_small");
}

bool read_row(PyObject *row, int op, Words &found)
{
    int of[2][6], scalar[3], wraps, shorter;
    if (!PyArg_ParseTuple(row, "(iiiiii)(iiiiii)iiiii:row", &of[0][0], &of[0][1], &of[0][2], &of[0][3],
                          &of[0][4], &of[0][5], &of[1][0], &of[1][1], &of[1][2], &of[1][3],
                          &of[1][4], &of[1][5], &scalar[0], &scalar[1], &scalar[2], &wraps,
                          &shorter)) {
        return false;
    }
    auto is_number = [](int one) { return one >= 0 && one <= 255; };
    auto is_code = [](int one) { return one >= 0 && one < 2 * BY; };
    for (int kind : {REGISTERS_f, REGISTERS_i}) {
        const int *given = of[kind];
        if (!is_code(given[0]) || !is_number(given[1]) || !is_code(given[2]) ||
            !is_number(given[3]) || given[5] < -1 ||
            given[5] >= N_REDUCTIONS || !std::all_of(scalar, scalar + 3, is_number) ||
            !is_number(shorter)) {
            PyErr_SetString(PyExc_ValueError, "an operator of no number");
            return false;
        }
        found.of[op][kind] = {(Code)given[0],    (Code)given[2], (uint8_t)given[1],
                              (uint8_t)given[3], given[4] != 0,  (int8_t)given[5]};
    }
    found.scalar[op] = (uint8_t)scalar[0];
    found.scalar_number[op] = (uint8_t)scalar[1];
    found.number_scalar[op] = (uint8_t)scalar[2];
    found.wraps[op] = wraps != 0;
    found.shorter[op] = (uint8_t)shorter;
    return true;
}

Loaded what_of(DType dtype)
{
    switch (dtype) {
    case DT_f16:
        return LOADED_f16;
    case DT_bf16:
        return LOADED_bf16;
    case DT_u8:
    case DT_bool:
        return LOADED_u8;
    case DT_i64:
        return LOADED_i64;
    default:
        return LOADED_32;
    }
}

bool is_floating(DType dtype) { return dtype == DT_f32 || dtype == DT_f16 || dtype == DT_bf16; }

bool is_longer(DType dtype) { return dtype == DT_i32 || dtype == DT_i64; }

void find_casts(Fact &fact, DType to, DType of, bool only_stored)
{
    auto add = [&](uint8_t op) { fact.casts[fact.n_casts++] = op; };
    if (to == of || to == DT_i64 || (to == DT_i32 && of == DT_i64)) {
        return;
    }
    bool halves = (to == DT_f16 || to == DT_bf16) && !only_stored;
    uint8_t half = to == DT_f16 ? words.to_half : words.to_bfloat;
    if (is_floating(of)) {
        if (to == DT_i32 || to == DT_u8 || to == DT_bool) {
            add(to == DT_i32 ? words.to_int : to == DT_u8 ? words.to_byte : words.to_bool);
        } else if (halves) {
            add(half);
        }
    } else if (is_floating(to)) {
        add(words.int_to_float);
        if (halves && is_longer(of)) { /* 8 bits are exact */
            add(half);
        }
    } else if (to == DT_bool) {
        add(words.int_to_bool);
    } else if (to == DT_u8 && is_longer(of)) {
        add(words.low_bits);
    }
}

Fact fact_of(const Prepared &prepared, int n, bool only_stored)
{
    const Program &program = *prepared.program;
    const Node &node = program.nodes[n];
    Fact fact{};
    fact.floating = is_floating(node.dtype);
    fact.stored = what_of(node.dtype);
    fact.number = node.kind == NODE_constant || node.kind == NODE_scalar || node.kind == NODE_numel;
    if (node.kind == NODE_load || node.kind == NODE_index) {
        fact.load = node.kind == NODE_load;
        fact.input = (uint8_t)node.aux;
        fact.loaded = node.dtype == DT_i64 ? LOADED_i64s : what_of(node.dtype);
        const Input &in = program.inputs[node.aux];
        for (int k = 0; k < in.ndim; k++) {
            fact.varies |= in.dims[k] >= 0 ? 1u << in.dims[k] : 0;
        }
    }
    fact.load |= node.kind == NODE_iota || node.kind == NODE_draw;
    if (node.kind == NODE_cast) {
        const Node &inner = program.nodes[node.args[0]];
        fact.number = prepared.facts[node.args[0]].number;
        fact.load = inner.kind == NODE_load && inner.dtype == DT_i64 &&
                    (node.dtype == DT_f32 || node.dtype == DT_i32);
        if (fact.load) {
            fact.input = (uint8_t)inner.aux;
            fact.loaded = node.dtype == DT_f32 ? LOADED_i64f : LOADED_i64;
        }
        find_casts(fact, node.dtype, inner.dtype, only_stored);
    }
    return fact;
}

enum : int { LONGEST = 3 };

bool keeps_relative(const Node &node)
{
    switch (node.op) {
    case OP_mul:
    case OP_div:
    case OP_neg:
    case OP_abs:
    case OP_relu:
    case OP_maximum:
    case OP_minimum:
    case OP_reciprocal:
    case OP_sqrt:
    case OP_rsqrt:
    case OP_copy:
        return node.kind == NODE_compute;
    default:
        return false;
    }
}

/* Whether all that becomes of a float32 is rounded to 16 bits soon: see cuda/support.py. */
bool in_halves(const Program &program, int n, int longest = LONGEST)
{
    bool used = false;
    for (const Output &out : program.outputs) {
        if (out.node == n) {
            return false;
        }
    }
    for (int k = n + 1; k < (int)program.nodes.size(); k++) {
        const Node &node = program.nodes[k];
        if (std::find(node.args, node.args + 3, n) == node.args + 3) {
            continue;
        }
        used = true;
        if (node.kind == NODE_cast) {
            if (node.dtype != DT_f16 && node.dtype != DT_bf16) {
                return false;
            }
        } else if ((node.kind != NODE_broadcast && !keeps_relative(node)) ||
                   node.dtype != DT_f32 || longest == 0 || !in_halves(program, k, longest - 1)) {
            return false;
        }
    }
    return used;
}

} // namespace

PyObject *py_cuda_words(PyObject *, PyObject *args)
{
    PyObject *numbers, *rows;
    constexpr int expected[] = {FORM,       HEADER_BYTES, IMAGE_BYTES,   COUNTER_AT,       INPUTS_AT,
                                MAX_STAGED, MAX_PASSES,   MAX_REGISTERS, MAX_ACCUMULATORS, MOST_WORDS,
                                PARTS_AT,   MOST_SUMS};
    int limits[12];
    Py_buffer uses;
    if (!PyArg_ParseTuple(args, "O!O!(iiiiiiiiiiii)y*:cuda_words", &PyDict_Type, &numbers,
                          &PyList_Type, &rows, &limits[0], &limits[1], &limits[2], &limits[3],
                          &limits[4], &limits[5], &limits[6], &limits[7], &limits[8], &limits[9],
                          &limits[10], &limits[11], &uses)) {
        return nullptr;
    }
    Words found{};
    memcpy(found.uses, uses.buf, std::min<size_t>((size_t)uses.len, sizeof found.uses));
    PyBuffer_Release(&uses);
    if (!std::equal(limits, limits + 12, expected)) {
        PyErr_SetString(PyExc_ValueError, "an image of another form");
        return nullptr;
    }
    if (PyList_GET_SIZE(rows) != N_OPS) {
        PyErr_SetString(PyExc_ValueError, "a row for each instruction");
        return nullptr;
    }
    Names names{numbers};
    find_tables(names, found);
    find_singles(names, found);
    for (int op = 0; op < N_OPS && !names.failed; op++) {
        names.failed = !read_row(PyList_GET_ITEM(rows, op), op, found);
    }
    if (names.failed) {
        return nullptr;
    }
    found.ready = true;
    words = found;
    Py_RETURN_NONE;
}

Prepared prepare(const Program &program, const char *floats)
{
    Prepared prepared{&program, {}, {}, {}, false, false};
    int n_nodes = (int)program.nodes.size();
    std::vector<bool> used((size_t)n_nodes);
    bool loaded[MAX_INPUTS] = {}, read[MAX_INPUTS] = {};
    for (const Node &node : program.nodes) {
        for (int arg : node.args) {
            if (arg >= 0) {
                used[arg] = true;
            }
        }
        if (node.kind == NODE_load || node.kind == NODE_index) {
            loaded[node.aux] |= node.kind == NODE_load;
            read[node.aux] = true;
        }
        prepared.reduces |= node.kind == NODE_reduce || node.kind == NODE_scan;
        prepared.has_positions |= node.kind == NODE_iota || node.kind == NODE_index;
        prepared.draws |= node.kind == NODE_draw;
    }
    for (int n = 0; n < n_nodes; n++) {
        prepared.facts.push_back(fact_of(prepared, n, !used[n]));
        prepared.facts[n].constant_is_float = floats[n] != 0;
        bool unary = program.nodes[n].kind == NODE_compute && words.shorter[program.nodes[n].op];
        bool short_ones = program.nodes[n].aux == ROUNDED || in_halves(program, n);
        prepared.facts[n].shorter = unary && prepared.facts[n].floating && short_ones;
    }
    for (size_t i = 0; i < program.inputs.size(); i++) {
        if (loaded[i]) {
            prepared.loads.push_back((uint8_t)i);
        }
        if (read[i]) {
            prepared.reads.push_back((uint8_t)i);
        }
    }
    return prepared;
}

} // namespace magjit_dvm::cuda
