/* Row values: what is one number for a row is computed in row registers. */
#include <algorithm>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

void Encoder::emit_row_value(int n)
{
    if (row_register[n] < 0) {
        find_row_value(n);
    }
    emitted[n] = true;
}

void Encoder::find_row_value(int n)
{
    const Node &node = program.nodes[n];
    if (node.kind == NODE_iota) {
        int x = new_register(n);
        Where where = row_view(line(node.aux));
        Word &word = put(words.row_position);
        word.x = (uint8_t)x;
        word.set_place(where);
    } else if (facts[n].load) {
        load_row_value(n);
    } else if (node.kind == NODE_index && facts[n].loaded < N_OF_COLUMNS) {
        look_up_row_value(n);
    } else if (online[n] >= 0) {
        if (accumulator[n] < 0) {
            return leave();
        }
        int x = new_register(n), total = new_register(online[n]);
        Word &word = put(words.finish_online);
        word.x = (uint8_t)x;
        word.y = (uint8_t)accumulator[n];
        word.w1 = (uint32_t)total;
    } else if (node.kind == NODE_reduce) {
        int which = reduction(n);
        if (stopped() || accumulator[n] < 0) {
            return leave();
        }
        int x = new_register(n);
        Word &word = put(words.finish[which]);
        word.x = (uint8_t)x;
        word.y = (uint8_t)accumulator[n];
    } else if (!by_scalar_word(n)) {
        compute(n);
        int x = new_register(n);
        put(words.row_take).x = (uint8_t)x;
        held = -1;
    }
}

void Encoder::load_row_value(int n)
{
    int what = facts[n].loaded, number = facts[n].input;
    if (stage_of(number) >= 0) {
        int x = new_register(n);
        Word &word = put(words.row_in);
        word.x = (uint8_t)x;
        word.y = what == LOADED_i64s ? 1 : what == LOADED_i64f ? 2 : what == LOADED_i64 ? 3 : 0;
        word.pointer = (int16_t)number;
        word.staged = true;
    } else if (words.row_load[what]) {
        int x = new_register(n);
        Where where = row_view(inputs[number]);
        Word &word = put(words.row_load[what]);
        word.x = (uint8_t)x;
        word.set_place(where);
    } else {
        give_up();
        Where where = viewed(inputs[number], dims_in_order, n_order);
        put(words.load[WAY_each][what], words.take).set_place(where);
        int x = new_register(n);
        put(words.row_take).x = (uint8_t)x;
    }
}

/* One word on row registers, where there is one. */
bool Encoder::by_scalar_word(int n)
{
    const Node &node = program.nodes[n];
    if (node.kind == NODE_cast) {
        return cast_by_scalar_word(n);
    }
    if (node.kind != NODE_compute || (words.wraps[node.op] && node.dtype == DT_u8)) {
        return false;
    }
    Scaled parts;
    if (node.op == OP_rsqrt && find_scaled(n, parts)) {
        put_scaled_rsqrt(n, parts);
        return true;
    }
    if (node.args[1] >= 0 && node.args[2] < 0 && with_number(n)) {
        return true;
    }
    uint8_t first, second;
    if (!scalar_word(n, false, false, first, second)) {
        return false;
    }
    int registers[3] = {0, 0, 0}, count = 0;
    for (int arg : node.args) {
        if (arg >= 0) {
            registers[count++] = register_of(arg);
        }
    }
    int x = new_register(n);
    Word &word = put(first, second);
    word.x = (uint8_t)x;
    word.y = (uint8_t)registers[0];
    word.w1 = (uint32_t)registers[1];
    word.w2 = (uint32_t)registers[2];
    return true;
}

/* The operators of a word on row registers, or on one and a number; whether there is one. */
bool Encoder::scalar_word(int n, bool number, bool turned, uint8_t &first, uint8_t &second) const
{
    const Node &node = program.nodes[n];
    bool floating = facts[node.args[0]].floating;
    const Operators &op = words.of[node.op][floating ? REGISTERS_f : REGISTERS_i];
    first = !floating || (turned && !number) ? 0
            : !number                        ? words.scalar[node.op]
            : turned                         ? words.number_scalar[node.op]
                                             : words.scalar_number[node.op];
    second = words.nop;
    if (first) {
        return true;
    }
    first = number ? words.by_row_number : words.by_row;
    Code code = node.op == OP_select ? words.select : turned ? op.reversed : op.plain;
    if (node.op == OP_bitwise_not && node.dtype == DT_bool) {
        code = words.logical_not;
    }
    second = (uint8_t)code;
    return code && code < BY && words.uses[second] & OF_ROW_REGISTERS;
}

/* A cast that is one operator. */
bool Encoder::cast_by_scalar_word(int n)
{
    if (facts[n].n_casts != 1) {
        return false;
    }
    uint8_t op = facts[n].casts[0];
    int y = register_of(program.nodes[n].args[0]);
    int x = new_register(n);
    bool low = op == words.low_bits;
    Word &word = put(low ? words.by_row_number : words.by_row, low ? words.and_ints : op);
    word.x = (uint8_t)x;
    word.y = (uint8_t)y;
    word.w2 = low ? 255 : 0;
    return true;
}

namespace {

/* The inverse of a float that is a power of two, by bits; 0 of any other. */
uint32_t exact_inverse(uint32_t bits)
{
    uint32_t exponent = bits >> 23 & 255;
    bool exact = !(bits & 0x7fffff) && exponent >= 1 && exponent <= 253;
    return exact ? (bits & 0x80000000u) | (254 - exponent) << 23 : 0;
}

} // namespace

/* rsqrt(given / number + number) in one word, by the quotient's inverse. */
void Encoder::put_scaled_rsqrt(int n, const Scaled &parts)
{
    uint32_t inverse = inverse_bits(program.nodes[parts.quotient].args[1]);
    int y = register_of(parts.given);
    uint32_t added = bits(program.nodes[parts.total].args[1]);
    int x = new_register(n);
    Word &word = put(words.scaled_rsqrt);
    word.x = (uint8_t)x;
    word.y = (uint8_t)y;
    word.w2 = inverse;
    word.w3 = added;
}

/* The operators of a word on a row register and a number; whether there is one. */
bool Encoder::number_word(int n, uint8_t &first, uint8_t &second) const
{
    const Node &node = program.nodes[n];
    if (node.kind != NODE_compute || node.args[1] < 0 || node.args[2] >= 0) {
        return false;
    }
    bool turned = facts[node.args[0]].number;
    return turned != facts[node.args[1]].number && scalar_word(n, true, turned, first, second);
}

/* One word on a row register and a number. */
bool Encoder::with_number(int n)
{
    const Node &node = program.nodes[n];
    uint8_t op, by;
    if (!number_word(n, op, by)) {
        return false;
    }
    bool first = facts[node.args[0]].number;
    int y = register_of(node.args[first]);
    uint32_t value = bits(node.args[!first]);
    bool divides = op == words.scalar_number[OP_div];
    uint32_t inverse = divides ? exact_inverse(value) : 0;
    if (inverse) {
        op = words.scalar_number[OP_mul];
        value = inverse;
    }
    int x = new_register(n);
    Word &word = put(op, by);
    word.x = (uint8_t)x;
    word.y = (uint8_t)y;
    word.w2 = value;
    return true;
}

/* The row register of a row value, or a new one with a number. */
int Encoder::register_of(int n)
{
    n = canonical[n];
    if (row_register[n] < 0) {
        if (!facts[n].number) {
            leave();
            return 0;
        }
        find_number(n);
    }
    if (given_away[n]) {
        refuse("too many values of a row");
    }
    return std::max<int>(row_register[n], 0);
}

/* A row register with a number: one that has it already, or a new one. */
void Encoder::find_number(int n)
{
    uint32_t value = bits(n);
    const Word *end = image.words + image.n_words;
    const Word *known = image.words + (image.tail == NO_WORD ? 0 : image.tail);
    while (known < end && (known->first != words.row_number || known->w2 != value)) {
        known++;
    }
    if (known < end) {
        row_register[n] = (int8_t)known->x;
        return;
    }
    int x = new_register(n);
    Word &word = put(words.row_number);
    word.x = (uint8_t)x;
    word.w2 = value;
}

/* One that is free, or else that of a row value which nobody asks for any more. */
int Encoder::new_register(int n)
{
    if (image.numbers < MAX_REGISTERS) {
        row_register[n] = (int8_t)image.numbers++;
        return row_register[n];
    }
    for (int over = 0; over < n_nodes(); over++) {
        if (row_register[over] >= 0 && is_over(over, emitted)) {
            given_away[over] = true;
            row_register[n] = row_register[over];
            return row_register[n];
        }
    }
    refuse("too many values of a row");
    return 0;
}

/* Whether row values alone have asked for a row value, and all have been found. */
bool Encoder::is_over(int n, const bool *made) const
{
    if (given_away[n] || facts[n].number) {
        return false;
    }
    for (const Output &out : program.outputs) {
        if (canonical[out.node] == n) {
            return false;
        }
    }
    bool asked = false;
    for (int user = 0; user < n_nodes(); user++) {
        for (int arg : program.nodes[user].args) {
            if (arg >= 0 && canonical[arg] == n && canonical[user] != n) {
                if (!made[canonical[user]]) {
                    return false;
                }
                asked = true;
            }
        }
    }
    return asked;
}

/* Where a row's element of an operand is, or that of its first column. */
Where Encoder::row_view(const Operand &one, int cols)
{
    return viewed(one, dims_in_order, reduced ? n_kept : 0, false, cols);
}

Where Encoder::viewed(const Operand &one, const int8_t *dims, int n, bool apart, int cols)
{
    return {describe(one, dims, n, apart, cols), one.argument, one.offset};
}

void Encoder::store_row(int o)
{
    int n = program.outputs[o].node;
    int y = register_of(n);
    Where where = row_view(outputs[o]);
    Word &word = put(words.row_store[stored(n)]);
    word.y = (uint8_t)y;
    word.set_place(where);
}

} // namespace magjit_dvm::cuda
