/* Which values a tile has when: reductions divide its work into phases. */
#include "encoder.h"

namespace magjit_dvm {

/* ---- phases ---- */

namespace {

/* What a value costs to make again, in passes over a block. */
ENCODER int cost_of(const Node &node)
{
    if (node.kind == NODE_load) {
        return 0;
    }
    if (node.kind != NODE_compute) {
        return node.kind == NODE_scan ? 4 : 1;
    }
    switch (node.op) {
    case OP_exp: case OP_log: case OP_tanh: case OP_sigmoid: case OP_erf: case OP_gelu:
    case OP_gelu_tanh: case OP_gelu_slope: case OP_gelu_tanh_slope: case OP_silu:
    case OP_silu_slope: case OP_pow: case OP_sin: case OP_cos: case OP_div:
    case OP_log1p: case OP_expm1: case OP_exp2: case OP_sqrt: case OP_rsqrt:
        return 4;
    default: return 1;
    }
}

} // namespace

bool Encoder::in_step(int n, int phase) const
{
    const Value &value = values[n];
    if (reduces(n)) {
        return value.phases && value.avail == phase + 1;
    }
    return value.phases >> phase & 1 && !in_tile(n) && !is_number(n) &&
           !(value.kept && value.tile_slot >= 0);
}

/* Of a sum of (x − mean)² along rows, the sum that the mean is the quotient of: one instruction makes
 * both, and reads x once. Otherwise -1. */
int Encoder::sum_of_squares_of(int n) const
{
    auto is = [&](int m, NodeKind kind, uint16_t op) {
        return m >= 0 && program.nodes[m].kind == kind && program.nodes[m].op == op;
    };
    const Node *nodes = program.nodes.data();
    const Node &node = nodes[n];
    int square = node.args[0];
    if (code.header.reduces != REDUCES_columns || node.dtype != DT_f32 ||
        !is(square, NODE_compute, OP_mul) || nodes[square].args[0] != nodes[square].args[1]) {
        return -1;
    }
    int away = nodes[square].args[0];
    if (!is(away, NODE_compute, OP_sub) || !is(nodes[away].args[1], NODE_compute, OP_div)) {
        return -1;
    }
    const Node &mean = nodes[nodes[away].args[1]];
    int sum = mean.args[0], count = mean.args[1];
    bool fits = is(sum, NODE_reduce, OP_sum) && nodes[sum].mask == node.mask &&
                nodes[sum].args[0] == nodes[away].args[0] && nodes[count].kind == NODE_numel &&
                nodes[count].mask == node.mask && !values[sum].in_moments;
    return fits ? sum : -1;
}

void Encoder::levels()
{
    n_phases = 1;
    for (int n = 0; n < n_nodes(); n++) {
        const Node &node = program.nodes[n];
        int at = 0, cost = cost_of(node);
        costly |= node.kind == NODE_compute && cost > 1 && !in_tile(n);
        values[n].in_moments = false;
        for (int16_t arg : node.args) {
            if (arg >= 0) {
                at = std::max<int>(at, values[arg].avail);
                cost += in_tile(arg) ? 0 : values[arg].cost;
            }
        }
        int sum = values[n].sum = (int16_t)(reduces(n) && node.op == OP_sum ? sum_of_squares_of(n) : -1);
        if (sum >= 0) {
            values[sum].in_moments = true;
            at = values[sum].avail - 1;
        }
        values[n].avail = (int8_t)(at + reduces(n));
        values[n].cost = (int16_t)std::min(cost, 1000);
        n_phases = std::max(n_phases, values[n].avail + 1);
        values[n].phases = 0;
        values[n].kept = false;
    }
    if (n_phases > MAX_PHASES) {
        overflow = "reductions follow one another too often";
        return;
    }
    for (const Output &out : program.outputs) {
        values[out.node].phases |= (uint8_t)(1u << values[out.node].avail);
    }
    /* What a tile would keep from phase to phase, an element. */
    int64_t reduced_elements = 1;
    for (int i = 0; i < n_dims; i++) {
        if (dim_section[i] == SECTION_reduced) {
            reduced_elements *= dim_size[i];
        }
    }
    for (int n = n_nodes() - 1; n >= 0; n--) {
        const Node &node = program.nodes[n];
        uint8_t at = values[n].phases;
        if (reduces(n)) {
            at = (uint8_t)(at ? 1u << (values[n].avail - 1) : 0);
        } else if (in_tile(n)) {
            at = (uint8_t)(at ? 1u << values[n].avail : 0);
        }
        bool several = (at & (at - 1)) != 0;
        if (several && !in_tile(n) && !is_number(n) && values[n].cost >= 3 &&
            (values[n].has & (row_mask | col_mask | inner_mask)) == (row_mask | col_mask | inner_mask)) {
            int64_t with = kept_units + bytes(node.dtype);
            if (with * reduced_elements <= machine.local_bytes / 2) {
                values[n].kept = true;
                kept_units = with;
                at = (uint8_t)(at & -at);
            }
        }
        if (values[n].sum >= 0) {
            values[values[n].sum].phases |= at;
        }
        for (int16_t arg : node.args) {
            if (arg >= 0 && values[n].sum < 0) {
                values[arg].phases |= at;
            }
        }
        if (reduces(n) || in_tile(n)) {
            values[n].phases = (uint8_t)(values[n].phases ? 1u << values[n].avail : 0);
        }
    }
}

} // namespace magjit_dvm
