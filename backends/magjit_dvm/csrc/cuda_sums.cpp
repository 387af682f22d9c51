/* Sums across rows, a tile of scratch memory each over all tiles of a warp: see cuda/sums.py. */
#include <algorithm>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

/* Whether a value is a sum across rows. */
bool Encoder::goes_across(int n) const
{
    const Node &node = program.nodes[canonical[n]];
    return node.kind == NODE_reduce && node.aux == ACROSS && node.mask & active;
}

/* The number of its dtype for the kernel that adds up parts; −1 of another dtype. */
int Encoder::summed_as(int n) const
{
    DType dtype = program.nodes[n].dtype;
    return dtype == DT_f32 ? 0 : dtype == DT_f16 ? 1 : dtype == DT_bf16 ? 2 : -1;
}

/* Whether a tile is computed anew rather than saved: there is little room beside sums. It is one of a
 * stage and a row value or number. */
bool Encoder::is_made_again(int n) const
{
    const Node &node = program.nodes[n];
    if (!image.sums || node.kind != NODE_compute || node.args[1] < 0 || node.args[2] >= 0) {
        return false;
    }
    int loads = 0, others = 0;
    for (int arg : {node.args[0], node.args[1]}) {
        int one = canonical[arg];
        loads += facts[one].load && !in_row(one);
        others += facts[one].number || in_row(one);
    }
    return loads == 1 && others == 1;
}

/* Gives each its slot. */
void Encoder::find_sums()
{
    for (int n = 0; n < n_nodes(); n++) {
        for (int arg : program.nodes[n].args) {
            if (canonical[n] == n && arg >= 0 && goes_across(arg)) {
                return refuse("a sum across rows that is computed with");
            }
        }
    }
    for (int o = 0; o < n_outputs() && !stopped(); o++) {
        const Output &out = program.outputs[o];
        if (!goes_across(out.node)) {
            continue;
        }
        if (!contiguous(outputs[o], reduced)) {
            return refuse("a sum across rows that lies otherwise");
        }
        if (!out.allocated() || out.along >= 0 || summed_as(out.node) < 0) {
            return refuse("a sum across rows that is part of another result");
        }
        if (image.sums == MOST_SUMS) {
            return refuse("too many sums across rows");
        }
        for (int before = 0; before < o; before++) {
            if (canonical[program.outputs[before].node] == canonical[out.node]) {
                left[summed(o)] = ++uses[summed(o)]; /* a result more of the same sum */
                break;
            }
        }
        pending[image.sums] = (int16_t)summed(o);
        encoded.sums[image.sums++] = {n_inputs() + o, (uint32_t)summed_as(out.node)};
    }
    image.scratch = image.sums;
    if (!stopped()) {
        find_products();
    }
}

/* The value that an output is the sum of. */
int Encoder::summed(int o) const
{
    return canonical[program.nodes[canonical[program.outputs[o].node]].args[0]];
}

/* A has a value: it is added to the sums that it belongs to, if that is not done yet. */
void Encoder::add_up(int n)
{
    bool products = has_products(n);
    uint32_t joined = NO_SLOT; /* of the last of them, where a word adds to two */
    for (int k = image.sums - 1; k >= 0 && products && joined == NO_SLOT; k--) {
        if (pending[k] == n) {
            joined = (uint32_t)(k * 128 * image.each);
            pending[k] = -1;
        }
    }
    for (int k = 0; k < image.sums; k++) {
        if (pending[k] == n) {
            put(words.add_up).w1 = (uint32_t)(k * 128 * image.each);
            done_with(n);
            pending[k] = -1;
        }
    }
    if (joined != NO_SLOT) {
        done_with(n);
    }
    add_up_products(n, joined);
}

/* A tile more of a sum, unless it has been computed before. */
void Encoder::sum_tile(int o)
{
    int n = summed(o);
    int16_t *end = pending + image.sums, *place = std::find(pending, end, n);
    if (place != end && products[place - pending].tile >= 0) {
        generate(products[place - pending].tile);
    }
    if (std::find(pending, end, n) != end) {
        generate(n);
        add_up(n);
    }
}

/* Which tiles are drawn, so that no block waits long for another; how many runs of them. */
int64_t Encoder::share_out()
{
    constexpr int64_t SHARE = 8, RUNS = 3, ROWS = 12;
    image.fixed = image.tiles;
    int64_t many = image.tiles / image.blocks, rows = image.warps / image.group;
    int64_t drawn = many / SHARE;
    int64_t least = std::max({drawn / RUNS, (ROWS * image.sums + rows - 1) / rows, (int64_t)1});
    int64_t shift = least > 1 ? 64 - __builtin_clzll((uint64_t)(least - 1)) : 0;
    if (drawn >= (int64_t)2 << shift) {
        image.fixed = image.blocks * (many - drawn);
        image.shift = shift;
    }
    int64_t run = (int64_t)1 << image.shift;
    return (image.tiles - image.fixed + run - 1) / run;
}

/* What is left to add up, now that the number of blocks is known. */
void Encoder::place_parts()
{
    encoded.n_sums = image.sums;
    encoded.parts_rows = image.blocks + (image.sums ? share_out() : 0);
    encoded.parts_cols = image.cols;
}

} // namespace magjit_dvm::cuda
