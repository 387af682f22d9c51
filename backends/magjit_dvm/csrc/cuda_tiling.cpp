/* Squares of two dimensions, for operands that lie in memory across one another: see cuda/tiling.py. */
#include <algorithm>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int64_t DOWN = 64, ACROSS = 32; /* rows and columns of a stack */
constexpr int64_t LEAST = 1 << 16;        /* elements from which on squares are worth it */

bool known(const Operand &one) { return one.size == 2 || one.size == 4; }

} // namespace

/* Divide the space into squares, if an operand asks for it and the sizes allow it. */
void Encoder::in_squares()
{
    if (reduced || n_order < 2 || image.rows < LEAST || n_outputs() == 0 ||
        prepared.has_positions || prepared.draws) {
        return;
    }
    int across = dims_in_order[n_order - 1], widest = 2, down = -1;
    for (int number : prepared.loads) {
        if (!known(inputs[number])) {
            return;
        }
        widest = std::max<int>(widest, inputs[number].size);
    }
    for (int o = 0; o < n_outputs(); o++) {
        if (!known(outputs[o])) {
            return;
        }
        widest = std::max<int>(widest, outputs[o].size);
    }
    if (size[across] % ACROSS) {
        return;
    }
    for (int o = 0; o < n_outputs(); o++) {
        if (!is_near(outputs[o])) {
            return;
        }
    }
    int64_t each = 64 / widest;
    for (size_t k = 0; k < prepared.loads.size() && down < 0; k++) {
        down = down_of(inputs[prepared.loads[k]], each / 4);
    }
    if (down >= 0) {
        each_of_squares = each;
        divide_squares(down, across);
    }
}

/* Whether four elements of a row are side by side, and aligned. */
bool Encoder::is_near(const Operand &one) const
{
    int inner = dims_in_order[n_order - 1];
    return one.strides[inner] == one.size && in_steps(one, dims_in_order, n_order - 1, 4 * one.size);
}

/* Whether what a lane has of a column is side by side, and aligned. */
bool Encoder::is_transposed(const Operand &one) const
{
    int within = dims_in_order[n_order - 3];
    int64_t step = each_of_squares / 4 * one.size;
    return one.strides[within] == one.size &&
           in_steps(one, dims_in_order, n_order - SQUARE_PARTS, step) &&
           in_steps(one, dims_in_order + n_order - 1, 1, step);
}

/* Whether addresses are multiples of so many bytes wherever one is along these dimensions. */
bool Encoder::in_steps(const Operand &one, const int8_t *dims, int n, int64_t step) const
{
    step = std::min<int64_t>(step, 16);
    bool found = one.low % step == 0;
    for (int k = 0; k < n; k++) {
        found &= one.strides[dims[k]] % step == 0;
    }
    return found;
}

/* The dimension along which an operand lies in memory, across the results; −1 without one. */
int Encoder::down_of(const Operand &one, int64_t lanes_rows) const
{
    int64_t inner = one.strides[dims_in_order[n_order - 1]];
    for (int k = 0; k < n_order - 1; k++) {
        int d = dims_in_order[k];
        bool lies = one.strides[d] == one.size && size[d] % DOWN == 0;
        if (lies && inner != 0 && inner != one.size &&
            in_steps(one, dims_in_order, k, lanes_rows * one.size) &&
            in_steps(one, dims_in_order + k + 1, n_order - k - 1, lanes_rows * one.size)) {
            return d;
        }
    }
    return -1;
}

/* Dimensions for parts of two; the two keep their sizes, which numbers of elements ask for. */
void Encoder::divide_squares(int down, int across)
{
    int64_t rows = each_of_squares / 4; /* of a lane */
    const struct {
        int of;
        int64_t size, step; /* in elements of that dimension */
    } parts[SQUARE_PARTS] = {
        {down, size[down] / DOWN, DOWN},
        {across, size[across] / ACROSS, ACROSS},
        {down, DOWN / (4 * rows), 4 * rows},
        {down, rows, 1},
        {down, 4, rows},
        {across, ACROSS, 1},
    };
    int8_t *end = std::remove(dims_in_order, dims_in_order + n_order, (int8_t)down);
    end = std::remove(dims_in_order, end, (int8_t)across);
    n_order = (int)(end - dims_in_order);
    for (int k = 0; k < SQUARE_PARTS; k++) {
        int d = program.rank + k;
        dims_in_order[n_order++] = (int8_t)d;
        size[d] = parts[k].size;
        auto add = [&](Operand &one) {
            int64_t stride = one.strides[parts[k].of];
            multiply(stride, parts[k].step);
            one.strides[d] = stride;
        };
        for (int i = 0; i < n_inputs(); i++) {
            if (program.inputs[i].kind == INPUT_tensor) {
                add(inputs[i]);
            }
        }
        std::for_each(outputs, outputs + n_outputs(), add);
    }
    n_kept = n_order;
}

} // namespace magjit_dvm::cuda
