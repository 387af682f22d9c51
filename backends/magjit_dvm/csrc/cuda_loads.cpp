/* Words that bring values into A or T, and how tensors are loaded. */
#include "cuda_encoder.h"

#include <algorithm>

namespace magjit_dvm::cuda {

/* An available value into A or T; then `second`, which may work with row register y. */
void Encoder::bring(int n, Bank bank, Code operation, int y)
{
    n = canonical[n];
    uint8_t second = operation < BY ? (uint8_t)operation : words.nop;
    if (operation >= BY) {
        bring(n, bank, words.nop, y);
        put(operation);
    } else if (facts[n].number) {
        uint32_t value = bits(n);
        put(words.number, bank == BANK_a ? words.take : second).w2 = value;
    } else if (slot[n] >= 0) {
        Word &word = put(words.scratch[bank], second);
        word.y = (uint8_t)y;
        word.w1 = (uint32_t)(slot[n] * 128 * image.each);
    } else if (in_row(n)) {
        if (row_register[n] < 0) {
            return leave();
        }
        put(words.row[bank], second).y = (uint8_t)row_register[n];
    } else if (facts[n].load) {
        bring_load(n, bank, second, y);
    } else {
        leave();
    }
}

void Encoder::bring_load(int n, Bank bank, uint8_t second, int y)
{
    int what = facts[n].loaded, number = facts[n].input;
    Where where{};
    if (program.nodes[n].kind == NODE_iota) {
        bool column = reduced == 1u << program.nodes[n].aux;
        if (!column) {
            where = viewed(line(program.nodes[n].aux), dims_in_order, n_order);
        }
        Word &word = put(column ? words.column : words.position, bank == BANK_a ? words.take : second);
        word.y = (uint8_t)y;
        if (column) {
            word.w1 = (uint32_t)image.cols;
        } else {
            word.set_place(where);
        }
        return;
    }
    if (program.nodes[n].kind == NODE_draw) {
        where = placed_draw(program.nodes[n]);
        Word &word = put(words.draw, bank == BANK_a ? words.take : second);
        word.y = (uint8_t)y;
        word.set_place(where);
        return;
    }
    Way way = way_of(number, where);
    bool direct = bank == BANK_a && way == WAY_staged && what <= LOADED_bf16;
    if (bank == BANK_a && !direct) {
        second = words.take;
    }
    if (way >= N_WAYS) {
        Word &word = put(words.load_few[way - N_WAYS][what], second);
        word.y = (uint8_t)y;
        word.set_place(where);
        word.described = way != WAY_columns; /* the number of columns instead */
        return;
    }
    Word &word = put(direct ? words.load_a[what] : words.load[way][what], second);
    word.y = (uint8_t)y;
    word.set_place(where);
    if (way == WAY_staged || way == WAY_shifted) {
        word.described = false;
        word.staged = true;
    }
}

int Encoder::stage_of(int number) const
{
    for (int k = 0; k < image.n_inputs; k++) {
        if (image.inputs[k].argument == number) {
            return k;
        }
    }
    return -1;
}

/* Whether four elements of the space, side by side, are so in memory, and aligned. */
bool Encoder::in_fours(const Operand &one, const Where &where) const
{
    const auto &found = image.descriptors[where.descriptor];
    const auto *dims = image.described + found.at;
    int four = std::min(4 * one.size, 16);
    bool fits = by_four() && one.size < 8 && one.low % four == 0 && found.n &&
                dims[0].size % 4 == 0 && dims[0].stride == one.size;
    for (int k = 1; k < found.n; k++) {
        fits &= dims[k].stride % four == 0;
    }
    return fits;
}

/* How a tensor's tile is loaded, and from where. */
Way Encoder::way_of(int number, Where &where)
{
    const Operand &one = inputs[number];
    int four = std::min(4 * one.size, 16);
    if (stage_of(number) >= 0) {
        where = {0, number, 0};
        return one.size == 8 || (by_four() && one.low % four == 0) ? WAY_staged : WAY_shifted;
    }
    if (of_columns(one)) {
        where = {(int)image.cols, one.argument, one.offset};
        return WAY_columns;
    }
    if (each_of_squares && (is_near(one) || is_transposed(one))) {
        where = viewed(one, dims_in_order, n_order, true);
        return is_near(one) ? WAY_near : WAY_transposed;
    }
    where = viewed(one, dims_in_order, n_order);
    if (stopped()) {
        return WAY_each;
    }
    const auto &found = image.descriptors[where.descriptor];
    const auto &inner = image.described[found.at];
    if (!found.n) {
        leave();
        return WAY_each;
    }
    if (by_four() && inner.size % 4 == 0 && one.size < 8 && inner.stride == 0) {
        return WAY_broadcast;
    }
    if (in_fours(one, where)) {
        return WAY_four;
    }
    return WAY_each;
}

/* Whether an operand is the same in all rows, and lies in memory as their columns do. */
bool Encoder::of_columns(const Operand &one) const
{
    bool known = one.size == 2 || one.size == 4;
    if (!reduced || !known || one.low % (4 * one.size)) {
        return false;
    }
    return contiguous(one, reduced);
}

} // namespace magjit_dvm::cuda
