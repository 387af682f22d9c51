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
