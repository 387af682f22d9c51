/* What must hold of programs before they are used; verify.cpp has what must hold of bytecode. */
#include "program.h"

namespace magjit_dvm {

namespace {

int operands_of(const Node &node)
{
    switch (node.kind) {
    case NODE_compute: return OPS[node.op].kind - KIND_memory;
    case NODE_cast:
    case NODE_reduce:
    case NODE_broadcast:
    case NODE_scan:
    case NODE_index: return 1;
    default: return 0;
    }
}

/* What is wrong with a node that draws; empty if nothing is. */
std::string check_draw(const Program &program, const Node &node)
{
    uint32_t order = 0;
    for (int64_t packed = node.integer; packed > 0; packed >>= 4) {
        int d = (int)(packed & 15) - 1;
        if (d < 0 || order >> d & 1) {
            return "numbers that are drawn along a dimension twice";
        }
        order |= 1u << d;
    }
    bool there = node.aux >= 0 && node.aux + DRAWN <= (int)program.inputs.size();
    for (int k = 0; there && k < DRAWN; k++) {
        there = program.inputs[node.aux + k].kind == INPUT_int;
    }
    bool fits = there && order == node.mask && node.dtype == DT_f32;
    return fits ? "" : "numbers that are drawn without ints that say which";
}

std::string check_node(const Program &program, size_t n)
{
    const Node &node = program.nodes[n];
    int wanted = operands_of(node);
    for (int k = 0; k < 3; k++) {
        if (k < wanted ? node.args[k] < 0 || node.args[k] >= (int)n : node.args[k] >= 0) {
            return "operands come before their node";
        }
    }
    if (node.mask >> program.rank) {
        return "a mask of dimensions that are not there";
    }
    const Kernels &k = kernels();
    auto of = [&](int arg) { return program.nodes[node.args[arg]].dtype; };
    switch (node.kind) {
    case NODE_load:
    case NODE_scalar:
    case NODE_index: {
        if (node.aux < 0 || node.aux >= (int)program.inputs.size()) {
            return "an input that is not there";
        }
        const Input &in = program.inputs[node.aux];
        if ((in.kind == INPUT_tensor) == (node.kind == NODE_scalar)) {
            return "an input of another kind";
        }
        if (node.kind == NODE_scalar && (node.dtype == DT_f16 || node.dtype == DT_bf16)) {
            return "a number of half precision";
        }
        if (node.kind != NODE_scalar && in.dtype != node.dtype) {
            return "an input of another dtype";
        }
        int indexed = 0;
        for (int d = 0; d < in.ndim; d++) {
            indexed += in.dims[d] == DIM_indexed;
        }
        if (indexed != (node.kind == NODE_index)) {
            return "a table has one indexed dimension, other inputs none";
        }
        if (node.kind == NODE_index && of(0) != DT_i64 && of(0) != DT_i32) {
            return "positions are ints";
        }
        break;
    }
    case NODE_constant:
    case NODE_numel:
        if (node.dtype == DT_f16 || node.dtype == DT_bf16) {
            return "a number of half precision";
        }
        break;
    case NODE_iota:
        if (node.aux < 0 || node.aux >= program.rank || node.dtype != DT_i64) {
            return "positions along a dimension that is not there";
        }
        break;
    case NODE_draw: return check_draw(program, node);
    case NODE_compute: {
        OpKind kind = OPS[node.op].kind;
        if (kind != KIND_unary && kind != KIND_binary && kind != KIND_ternary) {
            return "not an instruction that computes";
        }
        bool select = node.op == OP_select;
        DType dtype = of(select ? 1 : 0);
        if (select ? of(0) != DT_bool || of(2) != dtype
                   : (kind >= KIND_binary && of(1) != dtype) ||
                         (kind == KIND_ternary && of(2) != dtype)) {
            return "operands of different dtypes";
        }
        if (node.op == OP_cast || !k.op[node.op][dtype]) {
            return std::string(OPS[node.op].name) + " is not there for " + DTYPE_NAMES[dtype];
        }
        if (node.dtype != (OPS[node.op].to_bool ? DT_bool : dtype)) {
            return "a result of another dtype";
        }
        break;
    }
    case NODE_reduce:
        if (OPS[node.op].kind != KIND_reduce || !k.op[node.op][of(0)] || node.dtype != of(0)) {
            return "not a reduction of this dtype";
        }
        break;
    case NODE_scan:
        if (OPS[node.op].kind != KIND_scan || !k.op[node.op][of(0)] || node.dtype != of(0) ||
            !node.mask || node.mask & (node.mask - 1)) {
            return "no scan of this dtype along one dimension";
        }
        break;
    case NODE_broadcast:
        if (node.dtype != of(0)) {
            return "a result of another dtype";
        }
        break;
    default: break;
    }
    return "";
}

/* Whether two outputs are parts of one whole, or could be: but for the dimension along which they lie. */
bool alike(const Program &program, const Output &out, const Output &whole)
{
    bool fine = out.along == whole.along && out.ndim == whole.ndim &&
                std::equal(out.order, out.order + out.ndim, whole.order) &&
                program.nodes[out.node].dtype == program.nodes[whole.node].dtype;
    for (int k = 0; fine && k < out.ndim; k++) {
        fine = out.dims[k] == whole.dims[k] || (out.offset >= 0 && k == out.along);
    }
    return fine;
}

/* A part of any size has a place in an input that nothing reads, or in an output before it. */
std::string check_placed(const Program &program, size_t o)
{
    const Output &out = program.outputs[o];
    auto is_int = [&](int input) {
        return input < (int)program.inputs.size() &&
               program.inputs[input].kind == INPUT_int && program.inputs[input].ndim == 0;
    };
    if (out.along < 0 || out.along >= out.ndim || out.parts != 1 || !is_int(out.offset) ||
        (out.into >= 0) + (out.whole >= 0) + (out.total >= 0) != 1) {
        return "a part without a place";
    }
    if (out.total >= 0) {
        return is_int(out.total) ? "" : "a whole without a size";
    }
    if (out.into >= 0) {
        bool before = out.into < (int)o && program.outputs[out.into].total >= 0;
        return before && alike(program, out, program.outputs[out.into]) ? ""
                                                                        : "parts that are not alike";
    }
    if (out.whole >= (int)program.inputs.size()) {
        return "an input that is not there";
    }
    const Input &in = program.inputs[out.whole];
    bool fine = in.kind == INPUT_tensor && in.dtype == program.nodes[out.node].dtype &&
                in.ndim == out.ndim;
    for (int k = 0; fine && k < out.ndim; k++) {
        fine = in.dims[k] == (k == out.along ? (int)DIM_indexed : out.dims[k]);
    }
    for (const Node &node : program.nodes) {
        fine &= !((node.kind == NODE_load || node.kind == NODE_index) && node.aux == out.whole);
    }
    return fine ? "" : "a whole of another kind";
}

/* Each whole has all of its parts, once, of one shape and dtype. */
std::string check_parts(const Program &program)
{
    const std::vector<Output> &outputs = program.outputs;
    for (size_t o = 0; o < outputs.size(); o++) {
        const Output &out = outputs[o], &whole = outputs[out.into < 0 ? o : (size_t)out.into];
        bool first = out.into < 0;
        if (out.offset >= 0) {
            std::string error = check_placed(program, o);
            if (!error.empty()) {
                return error;
            }
            continue;
        }
        if (out.whole >= 0 || out.total >= 0 || out.into >= (int)o || whole.offset >= 0 ||
            whole.into >= 0 || first != (out.part == 0) ||
            (out.parts == 1) != (out.along < 0) || out.along >= out.ndim) {
            return "an output that is no part of a whole";
        }
        if (out.parts != whole.parts || !alike(program, out, whole)) {
            return "parts that are not alike";
        }
        uint64_t seen = 1;
        for (size_t p = 0; first && p < outputs.size(); p++) {
            if (outputs[p].into == (int)o) {
                if (seen >> outputs[p].part & 1) {
                    return "a part of a whole twice";
                }
                seen |= (uint64_t)1 << outputs[p].part;
            }
        }
        if (first && seen != ((uint64_t)1 << out.parts) - 1) {
            return "a whole lacks a part";
        }
    }
    return "";
}

} // namespace

std::string Program::verify() const
{
    if (inputs.size() > MAX_INPUTS || nodes.size() > MAX_NODES || outputs.size() > MAX_OUTPUTS ||
        nodes.empty() || outputs.empty()) {
        return "a program has 1 to 224 nodes, at most 64 inputs and 1 to 32 outputs";
    }
    for (const Input &in : inputs) {
        uint32_t seen = 0;
        if (in.kind != INPUT_tensor &&
            in.ndim > (in.kind == INPUT_int && in.dims[0] >= 0 ? 1 : 0)) {
            return "a number that has dimensions";
        }
        for (int k = 0; k < in.ndim; k++) {
            if (in.dims[k] >= 0) {
                if (seen >> in.dims[k] & 1) {
                    return "an input has a dimension twice";
                }
                seen |= 1u << in.dims[k];
            }
        }
    }
    for (size_t n = 0; n < nodes.size(); n++) {
        std::string error = check_node(*this, n);
        if (!error.empty()) {
            return "node " + std::to_string(n) + ": " + error;
        }
    }
    for (const Output &out : outputs) {
        if (out.node < 0 || out.node >= (int)nodes.size()) {
            return "an output of a node that is not there";
        }
        NodeKind kind = nodes[out.node].kind;
        if (kind == NODE_constant || kind == NODE_scalar || kind == NODE_numel) {
            return "an output that is a number";
        }
        uint32_t seen = 0, ordered = 0;
        for (int k = 0; k < out.ndim; k++) {
            if (out.dims[k] >= 0) {
                if (seen >> out.dims[k] & 1) {
                    return "an output has a dimension twice";
                }
                seen |= 1u << out.dims[k];
            }
            ordered |= 1u << out.order[k];
        }
        if (ordered != (1u << out.ndim) - 1) {
            return "the order of an output names each dimension once";
        }
    }
    return check_parts(*this);
}

} // namespace magjit_dvm
