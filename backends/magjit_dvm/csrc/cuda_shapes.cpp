/* Sizes of one instance: which elements there are, and where operands have them. */
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int64_t MOST_BITS = (int64_t)1 << 31;

const char *const KIND_NAMES[N_NODE_KINDS] = {"load",    "constant", "scalar", "numel",
                                              "iota",    "index",    "compute", "cast",
                                              "reduce",  "broadcast", "scan",   "draw"};

} // namespace

void Encoder::refuse(const char *reason)
{
    if (!stopped()) {
        encoded.verdict = REFUSED;
        encoded.reason = reason;
    }
}

/* "WHAT NAME BETWEEN DTYPE". */
void Encoder::refuse(const char *what, const char *name, const char *between, DType dtype)
{
    if (!stopped()) {
        snprintf(encoded.text, sizeof(encoded.text), "%s%s%s%s", what, name, between,
                 DTYPE_NAMES[dtype]);
        refuse(encoded.text);
    }
}

void Encoder::leave()
{
    if (!stopped()) {
        encoded.verdict = LEFT;
    }
}

void Encoder::multiply(int64_t &by, int64_t factor)
{
    if (__builtin_mul_overflow(by, factor, &by)) {
        leave();
    }
}

void Encoder::lay_out()
{
    sizes();
    if (stopped()) {
        return;
    }
    for (int d = 0; d < program.rank; d++) {
        active |= size[d] != 1 ? 1u << d : 0;
        empty |= size[d] == 0;
    }
    masks();
    for (int i = 0; i < n_inputs() && !stopped(); i++) {
        if (program.inputs[i].kind == INPUT_tensor) {
            input(i);
        }
    }
    for (int o = 0; o < n_outputs() && !stopped(); o++) {
        place(o);
    }
    if (!stopped()) {
        rows_of_positions();
        rows_of_vectors();
        rows_of_numbers();
        order();
        check_draws();
    }
}

void Encoder::sizes()
{
    std::fill(size, size + MAX_PARTS, -1);
    for (int i = 0; i < n_inputs(); i++) {
        const Input &in = program.inputs[i];
        const Argument &value = given[i];
        bool tensor = in.kind == INPUT_tensor;
        if (tensor && !value.fits) {
            return refuse("a tensor of another dtype or rank");
        }
        if (!tensor && in.ndim && value.floating) {
            return leave();
        }
        for (int k = 0; k < in.ndim; k++) {
            int d = in.dims[k];
            int64_t n = tensor ? value.sizes[k] : value.integer;
            if (n < 0) {
                return refuse("a negative size");
            }
            if (d >= 0 && n != 1) {
                if (size[d] != -1 && size[d] != n) {
                    return refuse("sizes do not agree");
                }
                size[d] = n;
            } else if (d == DIM_one && n != 1) {
                return refuse("a size is not 1");
            }
        }
    }
    for (int64_t &n : size) {
        n = n < 0 ? 1 : n;
    }
}

void Encoder::masks()
{
    for (int n = 0; n < n_nodes() && !stopped(); n++) {
        const Node &node = program.nodes[n];
        if (node.dtype == DT_f64) {
            refuse("no words for ", KIND_NAMES[node.kind], " of ", node.dtype);
        } else if (node.kind == NODE_reduce || node.kind == NODE_scan) {
            reduces(n);
        }
        has[n] = present(n);
    }
    if (rows_summed && !stopped()) {
        uint32_t columns = active & ~rows_summed;
        if ((reduced && reduced != columns) || !columns) {
            return refuse("sums across rows of other columns");
        }
        reduced = columns;
    }
}

/* The dimensions of a size other than 1 that a value varies along. */
uint32_t Encoder::present(int n) const
{
    const Node &node = program.nodes[n];
    uint32_t dims = 0;
    for (int arg : node.args) {
        dims |= arg >= 0 ? has[arg] : 0;
    }
    switch (node.kind) {
    case NODE_load:
    case NODE_index: {
        const Input &in = program.inputs[node.aux];
        uint32_t own = facts[n].varies & active;
        for (int k = 0; k < in.ndim; k++) {
            if (in.dims[k] >= 0 && given[node.aux].sizes[k] == 1) {
                own &= ~(1u << in.dims[k]);
            }
        }
        return own | dims;
    }
    case NODE_iota:
        return 1u << node.aux & active;
    case NODE_reduce:
        return dims & ~node.mask;
    case NODE_draw:
        return node.mask & active;
    case NODE_broadcast:
        return dims | (node.mask & active);
    default:
        return dims;
    }
}

void Encoder::reduces(int n)
{
    const Node &node = program.nodes[n];
    uint32_t over = node.mask & active;
    if (over & ~has[node.args[0]]) {
        return refuse("a reduction over a dimension that is broadcast");
    }
    if (node.aux == ACROSS) {
        if (over && rows_summed && rows_summed != over) {
            return refuse("sums across different rows");
        }
        rows_summed = over ? over : rows_summed;
        return;
    }
    if (over && reduced && reduced != over) {
        return refuse("reductions over different dimensions");
    }
    reduced = over ? over : reduced;
}

void Encoder::input(int i)
{
    const Input &in = program.inputs[i];
    const Argument &value = given[i];
    Operand &one = inputs[i];
    int item = DTYPE_BYTES[in.dtype];
    int64_t bound = 0, step = 0;
    std::fill(one.strides, one.strides + MAX_DIMS, 0);
    for (int k = 0; k < in.ndim; k++) {
        int d = in.dims[k];
        if (d >= 0 && value.sizes[k] != 1) {
            int64_t stride = value.strides[k];
            multiply(stride, item);
            one.strides[d] += stride;
        }
        if (d == DIM_indexed) {
            bound = value.sizes[k];
            step = value.strides[k];
            multiply(step, item);
        }
    }
    if (bound >= MOST_BITS || step >= MOST_BITS || step <= -MOST_BITS) {
        return refuse("a table of more than 31 bits");
    }
    one.bound = (int32_t)bound;
    one.step = (int32_t)step;
    if (value.data % (unsigned)item) {
        return refuse("an element that is not aligned");
    }
    one.offset = 0;
    one.argument = (int16_t)i;
    one.low = (uint8_t)(value.data % 16);
    one.size = (uint8_t)item;
}

/* The shape of a result, or of the whole that an output is part of, and where it lies. */
void Encoder::place(int o)
{
    const Output &out = program.outputs[o];
    const Argument *whole = out.whole >= 0 ? &given[out.whole] : nullptr;
    int item = DTYPE_BYTES[program.nodes[out.node].dtype];
    Shape &layout = encoded.layouts[o];
    Operand &one = outputs[o];
    std::fill(one.strides, one.strides + MAX_DIMS, 0);
    int64_t stride = 1, offset = 0;
    for (int at = out.ndim; at-- > 0 && !stopped();) {
        int k = out.order[at], d = out.dims[k];
        bool there = d >= 0 && (has[out.node] >> d & 1 || size[d] == 1);
        if (d >= 0 && !there) {
            return refuse("an output lacks a dimension");
        }
        int64_t own = there ? size[d] : 1;
        layout.sizes[k] = own;
        layout.strides[k] = whole ? whole->strides[k] : stride;
        int64_t step = layout.strides[k];
        multiply(step, item);
        if (k == out.along && out.offset >= 0) {
            int total = out.into < 0 ? out.total : program.outputs[out.into].total;
            const Argument &begins = given[out.offset];
            if (begins.floating || (!whole && given[total].floating)) {
                return leave();
            }
            int64_t first = begins.integer;
            layout.sizes[k] = whole ? whole->sizes[k] : given[total].integer;
            if (first < 0 || first > layout.sizes[k] - own) {
                return refuse("a part beyond its whole");
            }
            multiply(first, step);
            offset += first;
        } else if (k == out.along) {
            multiply(layout.sizes[k], out.parts);
            int64_t before = out.part;
            multiply(before, own);
            multiply(before, step);
            offset += before;
        } else if (whole && whole->sizes[k] != own) {
            return refuse("a whole of another size");
        }
        if (d >= 0 && own != 1) {
            one.strides[d] = step;
        }
        multiply(stride, std::max<int64_t>(layout.sizes[k], 1));
    }
    one.offset = offset;
    one.bound = one.step = 0;
    one.argument = (int16_t)(whole ? out.whole : n_inputs() + (out.into < 0 ? o : out.into));
    one.low = (uint8_t)(((whole ? whole->data : 0) + (uint64_t)offset) % 16);
    one.size = (uint8_t)item;
}

/* The first output that has all dimensions. */
const Operand *Encoder::whole_output() const
{
    for (int o = 0; o < n_outputs(); o++) {
        if (has[program.outputs[o].node] == active) {
            return &outputs[o];
        }
    }
    return nullptr;
}

/* The order in memory of what moves most: the first output, or input, with all dimensions. */
void Encoder::order()
{
    const Operand *like = reduced ? nullptr : whole_output();
    for (int n = 0; n < n_nodes() && !like; n++) {
        bool full = program.nodes[n].kind == NODE_load && has[n] == active;
        like = full ? &inputs[program.nodes[n].aux] : nullptr;
    }
    int dims[MAX_DIMS], n_dims = 0;
    for (int d = 0; d < program.rank; d++) {
        if (active >> d & 1) {
            dims[n_dims++] = d;
        }
    }
    for (int i = 1; like && i < n_dims; i++) {
        for (int j = i; j > 0; j--) {
            int64_t before = std::abs(like->strides[dims[j - 1]]);
            int64_t after = std::abs(like->strides[dims[j]]);
            if (before == 0 || after == 0 || before >= after) {
                break;
            }
            std::swap(dims[j - 1], dims[j]);
        }
    }
    for (bool wanted : {false, true}) {
        for (int k = 0; k < n_dims; k++) {
            if ((reduced >> dims[k] & 1) == wanted) {
                dims_in_order[n_order++] = (int8_t)dims[k];
                if (!empty) {
                    multiply(wanted ? image.cols : image.rows, size[dims[k]]);
                }
            }
        }
        n_kept = wanted ? n_kept : n_order;
    }
    image.elements = image.rows;
    multiply(image.elements, image.cols);
}

/* Whether the operand's elements are in the order of the space; `along` are dimensions that it has, and
 * along all others it is the same. */
bool Encoder::contiguous(const Operand &one, uint32_t along) const
{
    int64_t expected = one.size;
    for (int k = n_order; k-- > 0;) {
        int d = dims_in_order[k];
        bool inside = along >> d & 1;
        if (one.strides[d] != (inside ? expected : 0)) {
            return false;
        }
        expected *= inside ? size[d] : 1;
    }
    return true;
}

/* The number of a descriptor: size and stride of each of `dims`, innermost first, neighbours in memory
 * as one if not apart; of a table what its positions are, too. */
int Encoder::describe(const Operand &one, const int8_t *dims, int n, bool apart, int cols)
{
    int64_t sizes[MAX_PARTS], strides[MAX_PARTS];
    int count = 0;
    for (int k = n; k-- > 0;) {
        int64_t own = size[dims[k]], stride = one.strides[dims[k]];
        if (count && !apart && stride == (__int128)strides[count - 1] * sizes[count - 1]) {
            if (__builtin_mul_overflow(sizes[count - 1], own, &sizes[count - 1])) {
                sizes[count - 1] = INT64_MAX;
            }
        } else {
            sizes[count] = own;
            strides[count++] = stride;
        }
    }
    for (int k = 0; k < count; k++) {
        if (sizes[k] >= MOST_BITS || strides[k] >= MOST_BITS || strides[k] <= -MOST_BITS) {
            refuse("a view of more than 31 bits");
        }
    }
    if (image.elements >= MOST_BITS) {
        refuse("a view of more than 31 bits");
    }
    return add_described(sizes, strides, count, one.bound, one.step, cols);
}

/* The number of a descriptor, made once. */
int Encoder::add_described(const int64_t *sizes, const int64_t *strides, int count, int32_t bound,
                           int32_t step, int32_t cols)
{
    for (int k = 0; k < image.n_descriptors; k++) {
        const auto *known = image.described + image.descriptors[k].at;
        const auto &head = image.descriptors[k];
        bool same = head.n == count && head.bound == bound && head.step == step && head.cols == cols;
        for (int j = 0; j < count && same; j++) {
            same = known[j].size == sizes[j] && known[j].stride == strides[j];
        }
        if (same) {
            return k;
        }
    }
    if (image.n_descriptors == MAX_DESCRIBED || image.n_described + count > MAX_DESCRIBED) {
        leave();
    }
    if (stopped()) {
        return 0;
    }
    image.descriptors[image.n_descriptors] = {(uint16_t)image.n_described, (uint8_t)count, bound,
                                              step, cols};
    for (int k = 0; k < count; k++) {
        image.described[image.n_described++] = {(int32_t)sizes[k], (int32_t)strides[k]};
    }
    return image.n_descriptors++;
}

bool Encoder::over_nothing() const
{
    for (const Node &node : program.nodes) {
        for (int d = 0; d < program.rank && node.kind == NODE_reduce; d++) {
            if (node.mask >> d & 1 && size[d] == 0) {
                return true;
            }
        }
    }
    return false;
}

} // namespace magjit_dvm::cuda
