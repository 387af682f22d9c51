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
    case OP_gelu_tanh: case OP_silu: case OP_pow: case OP_sin: case OP_cos: case OP_div:
    case OP_log1p: case OP_expm1: case OP_exp2: case OP_sqrt: case OP_rsqrt:
        return 4;
    default: return 1;
    }
}

} // namespace

void Encoder::levels()
{
    n_phases = 1;
    for (int n = 0; n < n_nodes(); n++) {
        const Node &node = program.nodes[n];
        int at = 0;
        values[n].cost = cost_of(node);
        for (int16_t arg : node.args) {
            if (arg >= 0) {
                at = std::max<int>(at, values[arg].avail);
                values[n].cost += in_tile(arg) ? 0 : values[arg].cost;
            }
        }
        values[n].avail = (int8_t)(at + reduces(n));
        values[n].cost = std::min(values[n].cost, 1000);
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
        for (int16_t arg : node.args) {
            if (arg >= 0) {
                values[arg].phases |= at;
            }
        }
        if (reduces(n) || in_tile(n)) {
            values[n].phases = (uint8_t)(values[n].phases ? 1u << values[n].avail : 0);
        }
    }
}

} // namespace magjit_dvm
