/* Sizes of one instance, the order of its dimensions, and the blocks of its tiles. */
#include "encoder.h"

namespace magjit_dvm {

/* ---- shapes ---- */

void Encoder::clear(int64_t *of_dims, int64_t value)
{
    for (int d = 0; d < MAX_DIMS; d++) {
        of_dims[d] = value;
    }
}

const char *Encoder::sizes()
{
    clear(size, -1);
    for (int i = 0; i < n_inputs(); i++) {
        const Input &in = program.inputs[i];
        for (int k = 0; k < in.ndim; k++) {
            int d = in.dims[k];
            int64_t n = in.kind == INPUT_tensor ? given[i].sizes[k] : given[i].integer;
            if (n < 0) {
                return "a negative size";
            }
            if (d >= 0) {
                /* Nor does a 1 with another size: what the program takes for equal may be tensors
                   that eager broadcasts, where sizes are known only when the program runs. */
                if (size[d] >= 0 && size[d] != n) {
                    return "sizes do not agree";
                }
                size[d] = n;
            } else if (d == DIM_one && n != 1) {
                return "a size is not 1";
            }
        }
    }
    code.empty = false;
    for (int d = 0; d < program.rank; d++) {
        if (size[d] < 0) {
            size[d] = 1;
        }
        if (size[d] != 1) {
            active |= 1u << d;
        }
        code.empty |= size[d] == 0;
    }
    return nullptr;
}

const char *Encoder::masks()
{
    for (int n = 0; n < n_nodes(); n++) {
        const Node &node = program.nodes[n];
        uint32_t mask = 0;
        switch (node.kind) {
        case NODE_load:
        case NODE_index: {
            const Input &in = program.inputs[node.aux];
            for (int k = 0; k < in.ndim; k++) {
                if (in.dims[k] >= 0 && given[node.aux].sizes[k] != 1) {
                    mask |= 1u << in.dims[k];
                }
            }
            if (node.kind == NODE_index) {
                mask |= values[node.args[0]].has;
            }
            break;
        }
        case NODE_iota: mask = 1u << node.aux; break;
        case NODE_draw: return "numbers that only GPUs draw";
        case NODE_scan:
        case NODE_reduce: {
            uint32_t over = node.mask & active;
            if ((values[node.args[0]].has & over) != over) {
                return "a reduction over a dimension that is broadcast";
            }
            if (over) {
                if (reduced && reduced != over) {
                    return "reductions over different dimensions";
                }
                reduced = over;
            }
            mask = values[node.args[0]].has & ~(node.kind == NODE_scan ? 0 : over);
            break;
        }
        case NODE_broadcast: mask = values[node.args[0]].has | node.mask; break;
        case NODE_compute:
        case NODE_cast:
            for (int16_t arg : node.args) {
                mask |= arg >= 0 ? values[arg].has : 0;
            }
            break;
        default: break;
        }
        values[n].has = mask & active;
    }
    /* A reduction that came before another one of other dimensions saw `reduced` incomplete. */
    for (const Node &node : program.nodes) {
        bool orders = node.kind == NODE_reduce || node.kind == NODE_scan;
        if (orders && (node.mask & active) && (node.mask & active) != reduced) {
            return "reductions over different dimensions";
        }
    }
    return nullptr;
}

const char *Encoder::strides()
{
    for (int i = 0; i < n_inputs(); i++) {
        const Input &in = program.inputs[i];
        clear(operand[i].stride, 0);
        for (int k = 0; in.kind == INPUT_tensor && k < in.ndim; k++) {
            if (in.dims[k] >= 0 && given[i].sizes[k] != 1) {
                operand[i].stride[in.dims[k]] += given[i].strides[k] * bytes(in.dtype);
            }
        }
    }
    for (int o = 0; o < (int)program.outputs.size(); o++) {
        if (const char *error = place_output(o)) {
            return error;
        }
    }
    return nullptr;
}

/* The shape of a result, or of the whole that an output is part of; its strides and offset. */
const char *Encoder::place_output(int o)
{
    const Output &out = program.outputs[o];
    const Given *whole = out.whole >= 0 ? &given[out.whole] : nullptr;
    Shape &shape = code.outputs[o];
    Operand &op = operand[n_inputs() + o];
    clear(op.stride, 0);
    int64_t stride = 1, item = bytes(program.nodes[out.node].dtype);
    shape.offset = 0;
    for (int j = out.ndim - 1; j >= 0; j--) {
        int k = out.order[j], d = out.dims[k];
        bool there = d >= 0 && (values[out.node].has >> d & 1 || size[d] == 1);
        int64_t own = there ? window.total_of(d, size[d]) : 1;
        shape.sizes[k] = own;
        shape.strides[k] = whole ? whole->strides[k] : stride;
        int64_t along = shape.strides[k] * item;
        if (k == out.along && out.offset >= 0) {
            int64_t at = given[out.offset].integer;
            int total = out.into < 0 ? out.total : program.outputs[out.into].total;
            shape.sizes[k] = whole ? whole->sizes[k] : given[total].integer;
            if (at < 0 || at > shape.sizes[k] - own) {
                return "a part beyond its whole";
            }
            shape.offset += at * along;
        } else if (k == out.along) {
            shape.sizes[k] = own * out.parts;
            shape.offset += out.part * own * along;
        } else if (whole && whole->sizes[k] != (there ? size[d] : 1)) {
            return "a whole of another size";
        }
        if (there && (!whole || k == out.along)) {
            shape.offset += window.first_of(d) * along; /* of others, the whole is a part, too */
        }
        if (d >= 0 && own != 1) {
            op.stride[d] = along;
        }
        stride *= std::max<int64_t>(shape.sizes[k], 1);
    }
    return nullptr;
}

/* ---- order and merging of dimensions ---- */

void Encoder::order()
{
    /* The order in memory of what moves most: the first output, or input, with all dimensions. */
    const Operand *like = nullptr;
    for (size_t o = 0; o < program.outputs.size() && !like && !reduced; o++) {
        if (values[program.outputs[o].node].has == active) {
            like = &operand[n_inputs() + o];
        }
    }
    for (int n = 0; n < n_nodes() && !like; n++) {
        if (program.nodes[n].kind == NODE_load && values[n].has == active) {
            like = &operand[program.nodes[n].aux];
        }
    }
    int dims[MAX_DIMS], n = 0;
    for (int d = 0; d < program.rank; d++) {
        if (active >> d & 1) {
            dims[n++] = d;
        }
    }
    if (like) {
        for (int i = 1; i < n; i++) {
            for (int j = i; j > 0; j--) {
                int64_t before = std::abs(like->stride[dims[j - 1]]);
                int64_t after = std::abs(like->stride[dims[j]]);
                if (before == 0 || after == 0 || before >= after) {
                    break;
                }
                std::swap(dims[j - 1], dims[j]);
            }
        }
    }
    int sorted[MAX_DIMS], k = 0;
    Section sections[MAX_DIMS];
    int last = -1; /* the last reduced dimension */
    for (int i = 0; i < n; i++) {
        if (reduced >> dims[i] & 1) {
            last = i;
        }
    }
    for (int i = 0; i < n; i++) {
        if (!(reduced >> dims[i] & 1) && (i < last || !reduced)) {
            sections[k] = SECTION_outer;
            sorted[k++] = dims[i];
        }
    }
    for (int i = 0; i < n; i++) {
        if (reduced >> dims[i] & 1) {
            sections[k] = SECTION_reduced;
            sorted[k++] = dims[i];
        }
    }
    for (int i = last + 1; reduced && i < n; i++) {
        sections[k] = SECTION_inner;
        sorted[k++] = dims[i];
    }
    merge(sorted, sections, k);
}

bool Encoder::mergeable(int outer, int inner) const
{
    int n_operands = n_inputs() + (int)program.outputs.size();
    for (int i = 0; i < n_operands; i++) {
        if (operand[i].stride[outer] != operand[i].stride[inner] * size[inner]) {
            return false;
        }
    }
    for (int n = 0; n < n_nodes(); n++) {
        if ((values[n].has >> outer & 1) != (values[n].has >> inner & 1)) {
            return false;
        }
        if (program.nodes[n].kind == NODE_iota &&
            (program.nodes[n].aux == outer || program.nodes[n].aux == inner)) {
            return false;
        }
    }
    return true;
}

void Encoder::merge(const int *dims, const Section *sections, int n)
{
    for (int i = 0; i < n; i++) {
        int d = dims[i];
        int at = n_dims - 1;
        if (at >= 0 && dim_section[at] == sections[i] && mergeable(dim_last[at], d)) {
            dim_size[at] *= size[d];
            dim_mask[at] |= 1u << d;
            dim_last[at] = d;
        } else {
            dim_size[n_dims] = size[d];
            dim_mask[n_dims] = 1u << d;
            dim_last[n_dims] = d;
            dim_section[n_dims++] = sections[i];
        }
    }
}

/* Which two dimensions blocks have, which ones tiles enumerate, which ones steps. */
void Encoder::geometry()
{
    Header &h = code.header;
    int outer[MAX_DIMS], inner[MAX_DIMS], n_outer = 0, n_inner = 0;
    h.reduces = REDUCES_nothing;
    h.flat = 0;
    if (reduced) {
        h.reduces = n_dims && dim_section[n_dims - 1] == SECTION_inner ? REDUCES_rows
                                                                       : REDUCES_columns;
    }
    int last[3] = {-1, -1, -1};
    for (int i = 0; i < n_dims; i++) {
        last[dim_section[i]] = i;
    }
    if (h.reduces == REDUCES_nothing) {
        col = n_dims - 1;
        row = n_dims - 2;
        bool whole = true;
        for (const Output &out : program.outputs) {
            whole &= values[out.node].has == active;
        }
        for (const Node &node : program.nodes) {
            whole &= node.kind != NODE_iota && node.kind != NODE_index;
        }
        /* Short rows of broadcast operands: copy those to whole blocks instead. */
        if (n_dims > 1 && dim_size[col] < 32 && whole) {
            h.flat = 1;
        }
    } else if (h.reduces == REDUCES_columns) {
        col = last[SECTION_reduced];
        row = last[SECTION_outer];
    } else {
        col = last[SECTION_inner];
        row = last[SECTION_reduced];
    }
    h.elements = 1;
    for (int i = 0; i < n_dims; i++) {
        h.elements *= dim_size[i];
        if (i == row || i == col) {
            continue;
        }
        if (dim_section[i] == SECTION_reduced) {
            inner[n_inner++] = i;
            inner_mask |= dim_mask[i];
        } else {
            outer[n_outer++] = i;
        }
    }
    h.rows = row < 0 ? 1 : dim_size[row];
    h.cols = col < 0 ? 1 : dim_size[col];
    row_mask = row < 0 ? 0 : dim_mask[row];
    col_mask = col < 0 ? 0 : dim_mask[col];
    if (h.flat) {
        /* Slots have the strides of all dimensions; see flat_strides in vm.cpp. */
        h.n_outer = (uint8_t)n_dims;
        h.n_inner = 0;
        for (int i = 0; i < n_dims; i++) {
            h.outer[i] = dim_size[i];
        }
        h.rows = 1;
        h.cols = h.elements;
        return;
    }
    h.n_outer = (uint8_t)n_outer;
    h.n_inner = (uint8_t)n_inner;
    for (int i = 0; i < n_outer; i++) {
        h.outer[i] = dim_size[outer[i]];
    }
    for (int i = 0; i < n_inner; i++) {
        h.outer[n_outer + i] = dim_size[inner[i]];
    }
}

uint8_t Encoder::shape_of(int n) const
{
    if (is_number(n)) {
        return 0;
    }
    if (code.header.flat) {
        return SHAPE_COLS;
    }
    if (in_tile(n)) {
        return SHAPE_TILE;
    }
    /* Dimensions that steps enumerate leave the block's shape alone. */
    return (values[n].has & row_mask ? SHAPE_ROWS : 0) | (values[n].has & col_mask ? SHAPE_COLS : 0);
}

} // namespace magjit_dvm
