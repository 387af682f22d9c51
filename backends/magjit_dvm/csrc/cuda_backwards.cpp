/* Patterns of norms' backwards, and words for them: see cuda/backwards.py. */
#include <algorithm>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

/* The operands of a product, that of a row behind the other. */
void Encoder::find_factors(int n, int &tile, int &row) const
{
    tile = canonical[program.nodes[n].args[0]];
    row = canonical[program.nodes[n].args[1]];
    if (in_row(tile)) {
        std::swap(tile, row);
    }
}

bool Encoder::is_early(int n) const
{
    return in_row(n) && !facts[n].number && phase[n] == 0;
}

/* What a tile is the norm of, if row values make it that no reduction comes before. */
bool Encoder::find_standardized(int n, Standardized &found) const
{
    if (!computes(n, OP_mul) || in_row(n) || !facts[n].floating) {
        return false;
    }
    int tile;
    find_factors(n, tile, found.root);
    if (!is_early(found.root)) {
        return false;
    }
    auto is_loaded = [this](int one) {
        return program.nodes[one].kind == NODE_load && !in_row(one);
    };
    found.x = tile;
    found.mean = -1;
    if (is_loaded(tile)) {
        return true;
    }
    if (!computes(tile, OP_sub)) {
        return false;
    }
    found.x = canonical[program.nodes[tile].args[0]];
    found.mean = canonical[program.nodes[tile].args[1]];
    return is_loaded(found.x) && is_early(found.mean);
}

bool Encoder::is_made_for_one(int n, int op) const
{
    return computes(n, op) && uses[n] == 1 && facts[n].floating;
}

/* Of a sum of a row times a number, or divided by one, that sum and the factor by bits. */
bool Encoder::share_of_sum(int n, int &total, uint32_t &share)
{
    bool divides = computes(n, OP_div);
    if ((!divides && !computes(n, OP_mul)) || uses[n] != 1 || !in_row(n)) {
        return false;
    }
    total = canonical[program.nodes[n].args[0]];
    int by = canonical[program.nodes[n].args[1]];
    if (!divides && facts[total].number) {
        std::swap(total, by);
    }
    const Node &of = program.nodes[total];
    bool sums = of.kind == NODE_reduce && of.op == OP_sum && of.aux != ACROSS;
    if (!sums || uses[total] != 1 || !facts[by].number || !facts[n].floating) {
        return false;
    }
    share = divides ? inverse_bits(by) : bits(by);
    return !stopped();
}

/* What (G − sum(G) / N − X · sum(G · X) / N) · root is made of. */
bool Encoder::find_norm_backward(int result, NormBackward &found)
{
    int inner;
    find_factors(result, inner, found.norm.root);
    int root = found.norm.root;
    if (!is_early(root) || !is_made_for_one(inner, OP_sub)) {
        return false;
    }
    int rest = canonical[program.nodes[inner].args[0]];
    int taken = canonical[program.nodes[inner].args[1]];
    if (!is_made_for_one(taken, OP_mul) || in_row(taken)) {
        return false;
    }
    find_factors(taken, found.normalized, found.folded[0]);
    if (!find_standardized(found.normalized, found.norm) || found.norm.root != root) {
        return false;
    }
    int n = 1;
    if (found.norm.mean >= 0) {
        if (!is_made_for_one(rest, OP_sub)) {
            return false;
        }
        found.folded[2] = canonical[program.nodes[rest].args[1]];
        rest = canonical[program.nodes[rest].args[0]];
        n = 2;
    }
    uint32_t shares[2];
    int summed[2];
    for (int k = 0; k < n; k++) {
        int &total = found.folded[2 * k + 1];
        if (!share_of_sum(found.folded[2 * k], total, shares[k])) {
            return false;
        }
        summed[k] = canonical[program.nodes[total].args[0]];
    }
    bool same = n == 1 || (summed[1] == rest && shares[1] == shares[0]);
    if (!same || in_row(rest) || !is_made_for_one(summed[0], OP_mul)) {
        return false;
    }
    int left = canonical[program.nodes[summed[0]].args[0]];
    int right = canonical[program.nodes[summed[0]].args[1]];
    int norm = found.normalized;
    bool of_both = (left == rest && right == norm) || (left == norm && right == rest);
    found.result = result;
    found.gradient = rest;
    found.share = shares[0];
    found.n_folded = 2 * n;
    return of_both && rest != norm;
}

/* What one of its sums is part of, where nothing else asks for what comes between. */
bool Encoder::is_in_norm_backward(int n, NormBackward &found)
{
    if (program.nodes[n].op != OP_sum) {
        return false;
    }
    for (int result = 0; result < n_nodes() && !stopped(); result++) {
        if (!computes(result, OP_mul) || canonical[result] != result || !uses[result] ||
            !find_norm_backward(result, found)) {
            continue;
        }
        int *end = found.folded + found.n_folded;
        if (std::find(found.folded, end, n) != end) {
            return true;
        }
    }
    return false;
}

/* T ← x; the word behind normalizes it. */
Word &Encoder::put_with_norm(uint8_t operation, const Standardized &norm)
{
    bring(norm.x, BANK_t, words.nop);
    bool centered = norm.mean >= 0;
    int mean = centered ? row_register[norm.mean] : 0;
    if (mean < 0 || row_register[norm.root] < 0) {
        leave();
    }
    Word &word = put(operation);
    word.x = (uint8_t)mean;
    word.y = (uint8_t)row_register[norm.root];
    word.w3 = centered;
    return word;
}

/* A ← the gradient of a norm's input: both reductions and what is made of them. */
void Encoder::put_norm_backward(const NormBackward &back)
{
    int asked = back.norm.mean >= 0 ? 3 : 2;
    generate(back.gradient);
    give_up(asked);
    put_with_norm(words.row_back, back.norm).w2 = back.share;
    for (int k = 0; k < asked; k++) {
        done_with(back.gradient);
    }
    for (int k = 0; k < 2; k++) {
        done_with(back.normalized);
    }
    for (int k = 0; k < back.n_folded; k++) {
        folded[back.folded[k]] = true;
    }
    held = back.result;
}

/* Which sums across rows are of a tile times a norm. */
void Encoder::find_products()
{
    for (int k = 0; k < image.sums; k++) {
        Product &one = products[k];
        int n = pending[k];
        one.tile = -1;
        if (!computes(n, OP_mul) || uses[n] != 1) {
            continue;
        }
        int left_arg = canonical[program.nodes[n].args[0]];
        int right_arg = canonical[program.nodes[n].args[1]];
        for (bool turned : {false, true}) {
            int tile = turned ? right_arg : left_arg;
            one.normalized = turned ? left_arg : right_arg;
            if (find_standardized(one.normalized, one.norm) && tile != one.normalized &&
                !in_row(tile)) {
                one.tile = tile;
                break;
            }
        }
    }
}

/* Whether a tile has products with norms that are not added to their sums yet. */
bool Encoder::has_products(int n) const
{
    for (int k = 0; k < image.sums; k++) {
        if (products[k].tile == n && pending[k] >= 0) {
            return true;
        }
    }
    return false;
}

/* A has a tile: its products with norms are added to their sums, the tile itself to the one at
 * `joined`, if there is one. */
void Encoder::add_up_products(int n, uint32_t joined)
{
    for (int k = 0; k < image.sums; k++) {
        if (products[k].tile != n || pending[k] < 0) {
            continue;
        }
        int product = pending[k];
        pending[k] = -1;
        Word &word = put_with_norm(words.add_up_norm, products[k].norm);
        word.w1 = (uint32_t)(k * 128 * image.each);
        word.w2 = joined;
        joined = NO_SLOT;
        for (int one : {product, products[k].normalized, n}) {
            done_with(one);
        }
    }
}

} // namespace magjit_dvm::cuda
