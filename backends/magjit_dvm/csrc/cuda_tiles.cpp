/* Tiles, computed in A when they are asked for, with T for the other operand: see cuda/tiles.py. */
#include "cuda_encoder.h"

#include <algorithm>

namespace magjit_dvm::cuda {

/* Whether one word brings a value into A or T. */
bool Encoder::available(int n) const
{
    n = canonical[n];
    return facts[n].number || in_row(n) || facts[n].load || slot[n] >= 0;
}

/* Whether a tile has been computed and is still there. */
bool Encoder::is_made(int n) const
{
    n = canonical[n];
    return held == n || slot[n] >= 0;
}

/* One use of a value is behind it. */
void Encoder::done_with(int n)
{
    n = canonical[n];
    if (--left[n] <= 0 && slot[n] >= 0) {
        free_slots[n_free++] = slot[n];
        slot[n] = -1;
        int16_t *end = saved + n_saved--;
        std::copy(std::find(saved, end, n) + 1, end, std::find(saved, end, n));
    }
}

/* Keep A in scratch memory as the value `n`. */
void Encoder::save(int n)
{
    if (stopped() || slot[n] >= 0) {
        return leave();
    }
    int16_t at = n_free ? free_slots[--n_free] : (int16_t)image.scratch;
    image.scratch = std::max(image.scratch, at + 1);
    slot[n] = at;
    saved[n_saved++] = (int16_t)n;
    put(words.save).w1 = (uint32_t)(at * 128 * image.each);
}

/* A waits for another tile to be computed, even if it could be made again. */
void Encoder::keep(int n)
{
    if (!stopped() && is_made_again(n) && !available(n)) {
        save(n);
    }
}

/* Before A changes: save what it holds if it has more uses left than these. */
void Encoder::give_up(int more)
{
    if (held >= 0 && left[held] > more && !available(held) && !is_made_again(held)) {
        save(held);
    }
    held = -1;
}

/* The value into A. */
void Encoder::generate(int n)
{
    n = canonical[n];
    if (stopped() || held == n) {
        return;
    }
    if (available(n)) {
        give_up();
        bring(n, BANK_a, words.nop);
    } else {
        compute(n);
    }
    held = n;
    add_up(n);
}

/* A ← the node's operator of its operands. */
void Encoder::compute(int n)
{
    const Node &node = program.nodes[n];
    if (stopped()) {
        return;
    }
    bool copies = node.kind == NODE_compute && node.op == OP_copy;
    if (node.kind == NODE_broadcast || copies || node.kind == NODE_cast) {
        generate(node.args[0]);
        give_up(1);
        for (int k = 0; k < facts[n].n_casts; k++) {
            uint8_t op = facts[n].casts[k];
            put(op).w2 = op == words.low_bits ? 255 : 0;
        }
        done_with(node.args[0]);
    } else if (node.kind == NODE_index) {
        look_up(n);
    } else if (node.kind == NODE_scan) {
        run_along(n);
    } else if (node.kind == NODE_compute && node.op == OP_select) {
        compute_select(node);
    } else if (node.kind == NODE_compute) {
        compute_operator(n);
    } else {
        leave();
    }
}

/* A ← each element of a row with all before it. */
void Encoder::run_along(int n)
{
    const Node &node = program.nodes[n];
    Registers kind = facts[node.args[0]].floating ? REGISTERS_f : REGISTERS_i;
    uint8_t word = words.row_running[node.op == OP_cumprod][kind];
    if (!word) {
        DType dtype = program.nodes[node.args[0]].dtype;
        return refuse("no words for ", OPS[node.op].name, " of ", dtype);
    }
    if (image.chunks > 1) {
        return refuse("running results of a long row");
    }
    generate(node.args[0]);
    give_up(1);
    put(word);
    done_with(node.args[0]);
}

void Encoder::compute_operator(int n)
{
    const Node &node = program.nodes[n];
    Registers kind = facts[node.args[0]].floating ? REGISTERS_f : REGISTERS_i;
    const Operators &op = words.of[node.op][kind];
    if (!op.plain) {
        DType dtype = program.nodes[node.args[0]].dtype;
        return refuse("no words for ", OPS[node.op].name, " of ", dtype);
    }
    if (op.binary) {
        compute_binary(op, node.args[0], node.args[1]);
    } else if (node.op == OP_exp && is_difference(node.args[0]) && !is_made(node.args[0])) {
        const int16_t *args = program.nodes[canonical[node.args[0]]].args;
        Operators exp = words.of[OP_sub_exp][REGISTERS_f];
        if (below_largest(args[0], args[1]) || facts[n].shorter) {
            exp.plain = words.sub_exp_small;
            exp.immediate = words.sub_exp_small_number;
        }
        compute_binary(exp, args[0], args[1]);
        done_with(node.args[0]);
    } else {
        generate(node.args[0]);
        give_up(1);
        bool turns = node.op == OP_bitwise_not && node.dtype == DT_bool;
        put(turns              ? words.logical_not
            : facts[n].shorter ? words.shorter[node.op]
                               : op.plain);
        done_with(node.args[0]);
    }
    if (words.wraps[node.op] && node.dtype == DT_u8) {
        put(words.low_bits).w2 = 255;
    }
}

void Encoder::compute_binary(const Operators &op, int left_arg, int right_arg)
{
    int x = canonical[left_arg], y = canonical[right_arg];
    int product = scaled_by_row(op, x, y);
    if (product >= 0) {
        bool subtracts = op.plain == words.of[OP_sub][REGISTERS_f].plain;
        add_scaled(subtracts, product == x ? y : x, product);
    } else if (x == y) {
        generate(x);
        give_up(2);
        put(words.keep);
        put(op.plain);
    } else if (available(y) && !(held == y && available(x))) {
        generate(x);
        give_up(1);
        apply(op.plain, op.immediate, y);
    } else if (generate(y), available(x)) { /* perhaps since A gave it up */
        give_up(1);
        if (op.reversed) {
            apply(op.reversed, op.reversed_immediate, x);
        } else {
            bring(x, BANK_t, words.swap);
            put(op.plain);
        }
    } else {
        keep(y);
        generate(x);
        give_up(1);
        apply(op.plain, op.immediate, y);
    }
    done_with(x);
    done_with(y);
}

/* Of x + y or x − y, the operand that is a tile times a row value, made for this; or −1. */
int Encoder::scaled_by_row(const Operators &op, int x, int y) const
{
    bool adds = op.plain == words.of[OP_add][REGISTERS_f].plain;
    if ((!adds && op.plain != words.of[OP_sub][REGISTERS_f].plain) || x == y) {
        return -1;
    }
    for (int n : {y, x}) {
        bool may_be = n == y || adds;
        if (!may_be || !computes(n, OP_mul) || uses[n] != 1 || in_row(n) || is_made(n)) {
            continue;
        }
        int tile, row;
        find_factors(n, tile, row);
        bool by_row = in_row(row) && !facts[row].number && !in_row(tile);
        if (by_row && !facts[tile].number && available(tile)) {
            return n;
        }
    }
    return -1;
}

/* A ← x ± tile · row value. */
void Encoder::add_scaled(bool subtracts, int x, int product)
{
    int tile, row;
    find_factors(product, tile, row);
    generate(x);
    give_up(1);
    if (row_register[row] < 0) {
        return leave();
    }
    bring(tile, BANK_t, subtracts ? words.sub_scaled : words.add_scaled, row_register[row]);
    done_with(tile);
    done_with(row);
}

/* A ← op(A, number); with the word before, where that has been a product or a sign. It would not be the
 * word before if anything else were done with what it leaves in A. */
void Encoder::put_immediate(uint8_t op, uint32_t number)
{
    constexpr uint32_t SIGN = 1u << 31;
    const Operators &mul = words.of[OP_mul][REGISTERS_f], &sub = words.of[OP_sub][REGISTERS_f];
    const Word *last = image.n_words ? &image.words[image.n_words - 1] : nullptr;
    bool turned = op == sub.reversed_immediate, subtracts = op == sub.immediate;
    bool adds = op == words.of[OP_add][REGISTERS_f].immediate || subtracts || turned;
    if (last && last->first == words.of[OP_neg][REGISTERS_f].plain && op == mul.immediate) {
        image.n_words--;
        number ^= SIGN;
    } else if (last && last->first == mul.immediate && adds) {
        uint32_t factor = last->w2 ^ (turned ? SIGN : 0);
        image.n_words--;
        Word &word = put(words.multiply_add);
        word.w2 = factor;
        word.w3 = number ^ (subtracts ? SIGN : 0);
        return;
    }
    put(op).w2 = number;
}

/* A ← op(A, y), y being available. */
void Encoder::apply(Code plain, uint8_t immediate, int y)
{
    if (immediate && facts[y].number) {
        put_immediate(immediate, bits(y));
    } else if (immediate && in_row(y) && slot[y] < 0) {
        if (row_register[y] < 0) {
            return leave();
        }
        put(words.scalar_row, immediate).y = (uint8_t)row_register[y];
    } else {
        bring(y, BANK_t, plain);
    }
}

/* The mask is made last: what the operands need may have masks of its own. */
void Encoder::compute_select(const Node &node)
{
    int condition = canonical[node.args[0]];
    int yes = canonical[node.args[1]], no = canonical[node.args[2]];
    for (int one : {yes, no}) {
        if (!available(one)) {
            generate(one);
            keep(one);
            give_up();
        }
    }
    generate(condition);
    put(words.mask);
    give_up(1);
    bring(yes, BANK_a, words.nop);
    bring(no, BANK_t, words.select);
    for (int one : {condition, yes, no}) {
        done_with(one);
    }
}

} // namespace magjit_dvm::cuda
