/* Which instructions become one, and which run as one. */
#include "encoder.h"

namespace magjit_dvm {

/* ---- two instructions in one pass ---- */

/* Whether m is made in this step for `used` operands of one node, and for nothing else. */
bool Encoder::made_for_one(int m, int phase, int used) const
{
    const Value &value = values[m];
    return value.steps && value.uses == used && !value.kept && !value.absorbed &&
           !(value.stores && value.avail == phase);
}

/* Whether m is computed for n alone and may be computed along with it. */
bool Encoder::absorbs(int m, int n, int phase, int used) const
{
    if (m < 0) {
        return false;
    }
    const Node &node = program.nodes[m];
    uint8_t shape = program.nodes[n].kind == NODE_reduce ? (uint8_t)(SHAPE_ROWS | SHAPE_COLS)
                                                         : shape_of(n);
    return node.kind == NODE_compute && node.dtype == DT_f32 && made_for_one(m, phase, used) &&
           !values[m].merged && shape_of(m) == shape;
}

/* Whether m has the positions along columns, for a comparison with one position a row alone. */
bool Encoder::names_columns(int m, int position, int phase) const
{
    const Node &node = program.nodes[m];
    return node.kind == NODE_iota && col_mask >> node.aux & 1 &&
           !(values[position].has & col_mask) && made_for_one(m, phase, 1);
}

void Encoder::merge_nodes(int n, int m, uint16_t op, int a, int b, int c)
{
    values[n].merged = op;
    values[n].merged_args[0] = (int16_t)a;
    values[n].merged_args[1] = (int16_t)b;
    values[n].merged_args[2] = (int16_t)c;
    values[m].absorbed = true;
}

void Encoder::plan_merges(int phase)
{
    /* (add, sub, mul) by (add, sub, rsub, mul), in this order. */
    static_assert(OP_sub_add == OP_add_add + 4 && OP_mul_mul == OP_add_add + 11);
    auto sign = [](int op) { return op == OP_add ? 0 : op == OP_sub ? 1 : op == OP_mul ? 2 : -1; };
    for (int i = 0; i < n_stepping; i++) {
        int n = stepping[i];
        const Node &node = program.nodes[n];
        int a = node.args[0], b = node.args[1];
        if (node.kind == NODE_compute && node.op == OP_eq) {
            for (int k = 0; k < 2; k++) {
                if (names_columns(node.args[k], node.args[1 - k], phase)) {
                    merge_nodes(n, node.args[k], OP_one_hot, node.args[1 - k], -1, -1);
                    break;
                }
            }
        }
        if (node.dtype != DT_f32) {
            continue;
        }
        if (node.kind == NODE_reduce) {
            if (!reduces(n) || node.op != OP_sum ||
                code.header.reduces != REDUCES_columns || values[n].in_moments) {
                continue;
            }
            if (int sum = values[n].sum; sum >= 0) {
                merge_nodes(n, sum, OP_moments, program.nodes[sum].args[0], -1, -1);
                continue;
            }
            const Node &from = program.nodes[a];
            const int16_t *args = values[a].merged_args;
            if (values[a].merged == OP_sub_square && made_for_one(a, phase, 1) &&
                shape_of(a) == (SHAPE_ROWS | SHAPE_COLS)) {
                merge_nodes(n, a, OP_sum_sub_square, args[0], args[1], -1);
            } else if (from.op == OP_mul && absorbs(a, n, phase, 1)) {
                merge_nodes(n, a, OP_sum_mul, from.args[0], from.args[1], -1);
            }
            continue;
        }
        if (node.kind != NODE_compute) {
            continue;
        }
        if (node.op == OP_exp && program.nodes[a].op == OP_sub && absorbs(a, n, phase, 1)) {
            merge_nodes(n, a, OP_sub_exp, program.nodes[a].args[0], program.nodes[a].args[1], -1);
            continue;
        }
        if (node.op == OP_mul && a == b && program.nodes[a].op == OP_sub &&
            absorbs(a, n, phase, 2)) {
            merge_nodes(n, a, OP_sub_square, program.nodes[a].args[0], program.nodes[a].args[1],
                        -1);
            continue;
        }
        int second = sign(node.op);
        for (int k = 0; k < 2 && second >= 0; k++) {
            int m = node.args[k];
            int first = m >= 0 && program.nodes[m].kind == NODE_compute ? sign(program.nodes[m].op)
                                                                       : -1;
            if (first >= 0 && absorbs(m, n, phase, 1)) {
                int column = second == 0 ? 0 : second == 2 ? 3 : k == 0 ? 1 : 2;
                merge_nodes(n, m, (uint16_t)(OP_add_add + 4 * first + column), program.nodes[m].args[0],
                            program.nodes[m].args[1], node.args[1 - k]);
                break;
            }
        }
    }
    for (int i = 0; i < n_stepping; i++) {
        plan_pair(stepping[i], phase);
    }
}

/* A difference times a factor, as norms have it, before a product, a sum or both: the two instructions
 * follow one another, the second in place, and cores run both in one pass over the block. */
void Encoder::plan_pair(int n, int phase)
{
    const Node &node = program.nodes[n];
    Value &value = values[n];
    bool alone = !value.merged && node.kind == NODE_compute && (node.op == OP_mul || node.op == OP_add);
    if (node.dtype != DT_f32 || value.absorbed || !(alone || value.merged == OP_mul_add)) {
        return;
    }
    const int16_t *args = alone ? node.args : value.merged_args;
    for (int k = 0; k < 2; k++) {
        int m = args[k], other = args[1 - k], added = args[2];
        if (m != other && m != added && values[m].merged == OP_sub_mul && made_for_one(m, phase, 1) &&
            shape_of(m) == shape_of(n) && !code.header.flat) {
            merge_nodes(n, m, alone ? node.op : value.merged, m, other, added);
            values[m].leads = true;
            return;
        }
    }
}

/* Before an exponential whose sum follows, where the sum goes: with nothing between the two, cores run
 * both in one pass. */
void Encoder::place_sum_of(int i)
{
    int next = i + 1;
    while (next < n_stepping && values[stepping[next]].absorbed) {
        next++;
    }
    if (values[stepping[i]].merged != OP_sub_exp || next >= n_stepping) {
        return;
    }
    int n = stepping[next];
    const Node &node = program.nodes[n];
    if (reduces(n) && node.op == OP_sum && !values[n].merged && values[n].sum < 0 &&
        node.args[0] == stepping[i]) {
        placed = values[n].accumulator;
        DType as = (DType)code.slots[placed].dtype;
        put(OP_load, as, SHAPE_TILE, placed, placed);
    }
}

} // namespace magjit_dvm
