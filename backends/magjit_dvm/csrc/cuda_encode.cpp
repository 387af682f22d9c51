/* Words of one instance, as cuda/encode.py makes them in the same order. */
#include "cuda_encoder.h"

#include <algorithm>

namespace magjit_dvm::cuda {

void Encoder::run()
{
    lay_out();
    if (stopped()) {
        return;
    }
    if (empty) {
        if (over_nothing()) {
            return refuse("a reduction over nothing");
        }
        encoded.verdict = NOTHING;
        return;
    }
    in_squares();
    survey();
    if (!stopped()) {
        find_sums();
    }
    if (!stopped()) {
        image.once = prepared.reduces && is_read_once();
        find_batches();
        arrange();
    }
    if (chunked && image.sums) {
        refuse("sums across long rows");
    }
    if (!image.sums && !stopped()) {
        find_online();
    }
    if (chunked && !stopped()) {
        look_up_late();
    }
    if (!stopped()) {
        emit();
    }
    if (!stopped()) {
        if (!give_to_gradients()) {
            give_to_adders();
            if (image.sums && image.each > MOST_EACH && !image.adders) {
                refuse("sums across rows that a block has no room for");
            }
        }
        arrange_anew();
        keep_weights();
        fit();
    }
    if (!stopped()) {
        place_parts();
        pack();
    }
}

/* A new word. Once something has stopped, one that nobody reads. */
Word &Encoder::put(Code first, uint8_t second)
{
    if (first >= BY) {
        second = (uint8_t)(first - BY);
        first = words.by;
    }
    if (image.n_words > MOST_WORDS) {
        refuse("too many words");
    }
    Word &word = image.words[stopped() ? MOST_WORDS + 1 : image.n_words++];
    word = {(uint8_t)first, second, 0, 0, false, false, false, -1, 0, 0, 0, 0};
    return word;
}

/* ---- passes ---- */

bool Encoder::is_reduced(int n) const
{
    return program.nodes[n].kind == NODE_reduce && canonical[n] == n && uses[n] && !goes_across(n) &&
           !comes_with_largest(n);
}

int Encoder::count_passes() const
{
    int passes = 0;
    for (const Output &out : program.outputs) {
        if (!in_row(out.node)) {
            passes = std::max(passes, phase[out.node] + 1);
        }
    }
    for (int n = 0; n < n_nodes(); n++) {
        if (is_reduced(n)) {
            passes = std::max<int>(passes, phase[n]);
        }
    }
    return passes;
}

void Encoder::emit()
{
    int passes = count_passes();
    for (int p = 0; p <= passes && !stopped(); p++) {
        if (p == passes && p && chunked) {
            put(words.end);
            image.epilogue = (uint32_t)image.n_words;
        } else if (p < passes && (p == 0 || chunked)) {
            if (p) {
                put(words.end);
            }
            image.first[image.n_first++] = (uint16_t)image.n_words;
        }
        if (chunked) {
            forget(p);
        }
        if (each_of_squares && p == 0) {
            ask_ahead();
        }
        emit_pass(p, passes);
    }
    if (!passes) {
        image.n_first = image.n_rest = 1;
        image.first[0] = image.rest[0] = 0;
    } else if (chunked && image.epilogue == (uint32_t)image.n_words) {
        image.n_words--; /* nothing is left to do */
        image.epilogue = NO_WORD;
    }
    put(words.end);
}

/* Squares of all operands but the first are on their way to the L2 cache meanwhile. */
void Encoder::ask_ahead()
{
    for (size_t k = 1; k < prepared.loads.size() && !stopped(); k++) {
        int number = prepared.loads[k];
        const Operand &one = inputs[number];
        if (stage_of(number) >= 0 || !(is_near(one) || is_transposed(one))) {
            continue;
        }
        Where where{};
        Way way = way_of(number, where);
        put(way == WAY_near ? words.ask_near : words.ask_transposed).set_place(where);
    }
}

void Encoder::emit_pass(int pass, int passes)
{
    for (int n = 0; n < n_nodes() && !stopped(); n++) {
        if (phase[n] == pass && is_row_value(n) && !late[n]) {
            emit_row_value(n);
        }
    }
    if (batches && pass == passes && !stopped()) {
        emit_late();
    }
    for (int o = 0; o < n_outputs() && !stopped(); o++) {
        int n = program.outputs[o].node;
        if (in_row(n) && (batches ? passes : phase[n]) == pass) {
            store_row(o);
        }
    }
    if (pass == passes) {
        return;
    }
    if (pass == 0 || chunked) {
        image.rest[image.n_rest++] = (uint16_t)image.n_words;
        held = -1; /* a row's later chunks begin here */
    }
    for (int n = 0; n < n_nodes() && !stopped(); n++) {
        if (is_reduced(n) && phase[n] == pass + 1 && row_register[n] < 0 && !folded[n]) {
            emit_reduce(n);
        }
    }
    for (int o = 0; o < n_outputs() && !stopped(); o++) {
        int n = program.outputs[o].node;
        if (!in_row(n) && phase[n] == pass) {
            goes_across(n) ? sum_tile(o) : store_tile(o);
        }
    }
}

/* Scratch memory and counts do not outlive a pass over chunks: all is computed again. */
void Encoder::forget(int pass)
{
    for (int k = 0; k < n_saved; k++) {
        free_slots[n_free++] = slot[saved[k]];
        slot[saved[k]] = -1;
    }
    n_saved = 0;
    std::fill(left, left + n_nodes(), 0);
    for (int n = 0; n < n_nodes(); n++) {
        if (is_reduced(n) && phase[n] == pass + 1) {
            count_uses(program.nodes[n].args[0]);
        }
    }
    for (const Output &out : program.outputs) {
        if (!in_row(out.node) && phase[out.node] == pass) {
            count_uses(out.node);
        }
    }
    held = -1;
}

/* One more use of a value in this pass, and of what it is computed from if it is the first. */
void Encoder::count_uses(int n)
{
    n = canonical[n];
    if (left[n]++ || in_row(n) || facts[n].number || facts[n].load) {
        return;
    }
    for (int arg : program.nodes[n].args) {
        if (arg >= 0) {
            count_uses(arg);
        }
    }
}

/* One use less, and if it was the last of what the value would have been computed from. */
void Encoder::uncount(int n)
{
    n = canonical[n];
    if (--left[n] || in_row(n) || facts[n].number || facts[n].load) {
        return;
    }
    for (int arg : program.nodes[n].args) {
        if (arg >= 0) {
            uncount(arg);
        }
    }
}

/* ---- tiles ---- */

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

/* ---- what is done with tiles ---- */

void Encoder::emit_reduce(int n)
{
    int arg = program.nodes[n].args[0];
    bool with_sum = online[n] >= 0;
    if (!chunked && !with_sum) {
        return reduce_row(n);
    }
    if (image.accumulators == MAX_ACCUMULATORS) {
        return refuse("too many reductions");
    }
    generate(arg);
    accumulator[n] = (int8_t)image.accumulators++;
    int which = with_sum ? 0 : reduction(n);
    Word &word = put(with_sum ? words.reduce_online : words.reduce[std::max(which, 0)]);
    word.x = (uint8_t)accumulator[n];
    if (!chunked) {
        uncount(power_of(online[n]));
        emit_row_value(n);
    }
    done_with(arg);
}

/* Of a row in one stage: statistics in one word, or squares, or what it is. */
void Encoder::reduce_row(int n)
{
    int arg = program.nodes[n].args[0];
    Normalized parts;
    if (find_normalized(n, parts)) {
        return normalize(n, parts);
    }
    NormBackward back;
    if (!stopped() && is_in_norm_backward(n, back)) {
        return put_norm_backward(back);
    }
    Softmax soft;
    if (!stopped() && find_softmax(n, soft)) {
        generate(arg);
        give_up(2);
        put(words.row_softmax);
        done_with(arg);
        done_with(arg);
        folded[n] = folded[soft.total] = folded[soft.inverse] = true;
        held = soft.product;
        return;
    }
    int squares = squares_about_mean(n), of = squared(arg), which = reduction(n);
    if (stopped()) {
        return;
    }
    if (squares >= 0) {
        generate(arg);
        int x = new_register(n), y = new_register(squares);
        float inverse = (float)(1.0 / (double)image.cols);
        Word &word = put(words.row_stat);
        word.x = (uint8_t)x;
        word.y = (uint8_t)y;
        word.w1 = (uint32_t)image.cols;
        memcpy(&word.w2, &inverse, 4);
        /* What the sum of squares is of is not computed for it. */
        int square = program.nodes[squares].args[0], away = squared(square);
        for (int one : {square, away, away}) {
            done_with(one);
        }
    } else if (of >= 0 && which == words.of[OP_sum][REGISTERS_f].reduction) {
        generate(of);
        int x = new_register(n);
        put(words.row_squares).x = (uint8_t)x;
        done_with(of);
        done_with(of);
    } else {
        generate(arg);
        int x = new_register(n);
        put(words.row_reduce[which]).x = (uint8_t)x;
    }
    done_with(arg);
}

/* A ← the row normalized: statistics and what is made of them in one word. */
void Encoder::normalize(int n, const Normalized &parts)
{
    int arg = program.nodes[n].args[0];
    int asked = parts.same ? 2 : 3; /* the sum, and each difference */
    generate(arg);
    give_up(asked);
    int x = new_register(parts.mean), y = new_register(parts.root);
    uint32_t number = bits(parts.number);
    float inverse = (float)(1.0 / (double)image.cols);
    Word &word = put(words.row_norm);
    word.x = (uint8_t)x;
    word.y = (uint8_t)y;
    word.w1 = (uint32_t)image.cols;
    memcpy(&word.w2, &inverse, 4);
    word.w3 = number;
    for (int k = 0; k < asked; k++) {
        done_with(arg);
    }
    folded[n] = folded[parts.squares] = true;
    held = parts.product;
}

void Encoder::store_tile(int o)
{
    int n = program.outputs[o].node;
    const Operand &one = outputs[o];
    generate(n);
    bool aligned = by_four() && one.low % std::min(4 * one.size, 16) == 0;
    if (contiguous(one) && (aligned || one.size < 8)) {
        Word &word = put(words.store[aligned ? STORE_aligned : STORE_shifted][stored(n)]);
        word.pointer = one.argument;
        word.offset = one.offset;
    } else {
        Where where = viewed(one, dims_in_order, n_order, each_of_squares != 0);
        int what = stored(n);
        Word &word = put(each_of_squares ? words.store_near[what] : words.store[STORE_each][what]);
        word.set_place(where);
        word.y = !each_of_squares && !stopped() && in_fours(one, where);
    }
    done_with(n);
}

} // namespace magjit_dvm::cuda
