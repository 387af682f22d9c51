/* Which int64 words can compute with: those that 32 bits hold. See cuda/long_ranges.py. */
#include <algorithm>
#include <cstdlib>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int64_t LEAST = -((int64_t)1 << 31), MOST = ((int64_t)1 << 31) - 1;

bool compares(int op) { return op >= OP_eq && op <= OP_ge; }

/* The result is the nearest int32 if the operands are. */
bool keeps_nearest(int op)
{
    return op == OP_copy || op == OP_relu || op == OP_sign || op == OP_minimum ||
           op == OP_maximum || op == OP_select;
}

int64_t sign(int64_t value) { return (value > 0) - (value < 0); }

int64_t trunc_of(int64_t a, int64_t b) { return a / b; }
int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
int64_t left_of(int64_t a, int64_t b) { return a * ((int64_t)1 << b); }
int64_t right_of(int64_t a, int64_t b) { return a >> b; }

/* Of a function that is largest and least at the ends of its operands. */
void of_ends(int64_t (*function)(int64_t, int64_t), const Range &a, const Range &b, int64_t &low,
             int64_t &high)
{
    int64_t found[4] = {function(a.low, b.low), function(a.low, b.high), function(a.high, b.low),
                        function(a.high, b.high)};
    low = *std::min_element(found, found + 4);
    high = *std::max_element(found, found + 4);
}

/* The least and the largest result of these operands; whether there are words for it. */
bool ends(int op, const Range &a, const Range &b, int64_t &low, int64_t &high)
{
    int64_t products[4] = {a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high};
    switch (op) {
    case OP_copy:
        low = a.low, high = a.high;
        return true;
    case OP_relu:
        low = std::max<int64_t>(a.low, 0), high = std::max<int64_t>(a.high, 0);
        return true;
    case OP_sign:
        low = sign(a.low), high = sign(a.high);
        return true;
    case OP_minimum:
        low = std::min(a.low, b.low), high = std::min(a.high, b.high);
        return true;
    case OP_maximum:
        low = std::max(a.low, b.low), high = std::max(a.high, b.high);
        return true;
    case OP_select:
        low = std::min(a.low, b.low), high = std::max(a.high, b.high);
        return true;
    case OP_neg:
        low = -a.high, high = -a.low;
        return true;
    case OP_abs:
        low = a.low <= 0 && a.high >= 0 ? 0 : std::min(std::abs(a.low), std::abs(a.high));
        high = std::max(std::abs(a.low), std::abs(a.high));
        return true;
    case OP_add:
        low = a.low + b.low, high = a.high + b.high;
        return true;
    case OP_sub:
        low = a.low - b.high, high = a.high - b.low;
        return true;
    case OP_mul:
        low = *std::min_element(products, products + 4);
        high = *std::max_element(products, products + 4);
        return true;
    case OP_floor_div:
    case OP_trunc_div:
        if (b.low <= 0 && b.high >= 0) {
            return false;
        }
        of_ends(op == OP_floor_div ? floor_of : trunc_of, a, b, low, high);
        return true;
    case OP_remainder:
        low = std::min<int64_t>(b.low + 1, 0), high = std::max<int64_t>(b.high - 1, 0);
        return b.low > 0 || b.high < 0;
    case OP_fmod: {
        int64_t most = std::max(std::abs(b.low), std::abs(b.high)) - 1;
        low = std::max(std::min<int64_t>(a.low, 0), -most);
        high = std::min(std::max<int64_t>(a.high, 0), most);
        return b.low > 0 || b.high < 0;
    }
    case OP_shift_left:
    case OP_shift_right:
        if (b.low < 0 || b.high >= 32) {
            return false;
        }
        of_ends(op == OP_shift_left ? left_of : right_of, a, b, low, high);
        return true;
    case OP_bitwise_and:
    case OP_bitwise_or:
    case OP_bitwise_xor:
    case OP_bitwise_not:
        low = LEAST, high = MOST;
        if (op == OP_bitwise_and && (a.low >= 0 || b.low >= 0)) {
            low = 0;
            high = std::min(a.low >= 0 ? a.high : MOST, b.low >= 0 ? b.high : MOST);
        } else if (op != OP_bitwise_and && op != OP_bitwise_not && a.low >= 0 && b.low >= 0) {
            int64_t largest = std::max(a.high, b.high);
            low = 0;
            high = largest ? ((int64_t)1 << (64 - __builtin_clzll((uint64_t)largest))) - 1 : 0;
        }
        return true;
    default:
        return false;
    }
}

} // namespace

Range Encoder::not_held()
{
    refuse("an int64 that may need more than 32 bits");
    return {0, 0, true};
}

/* Whether an int64 is a float that is converted as it is stored. */
bool Encoder::is_from_float(int n) const
{
    const Node &node = program.nodes[n];
    return node.kind == NODE_cast && !facts[n].number && facts[node.args[0]].floating;
}

/* That 32 bits hold each int64, where that matters. */
void Encoder::check_longs()
{
    for (int n = 0; n < n_nodes() && !stopped(); n++) {
        if (!facts[n].number) {
            check_long(n);
        }
    }
    for (int o = 0; o < n_outputs() && !stopped(); o++) {
        int n = program.outputs[o].node;
        if (program.nodes[n].dtype == DT_i64 && !is_from_float(n) && !range(n).exact) {
            not_held();
        }
    }
}

void Encoder::check_long(int n)
{
    const Node &node = program.nodes[n];
    DType of = node.args[0] >= 0 ? program.nodes[node.args[0]].dtype : node.dtype;
    if (node.kind == NODE_index) {
        range(node.args[0]);
    } else if (node.kind == NODE_cast) {
        check_cast(n);
    } else if (node.kind == NODE_broadcast && node.dtype == DT_i64) {
        range(n);
    } else if ((node.kind == NODE_reduce || node.kind == NODE_scan) && node.dtype == DT_i64) {
        range(n);
    } else if (node.kind == NODE_compute && node.dtype == DT_i64) {
        range(n);
    } else if (node.kind == NODE_compute && of == DT_i64) {
        check_test(node);
    }
}

/* Loads are converted as they are read; of other int64, all but a test wants the number. */
void Encoder::check_cast(int n)
{
    const Node &node = program.nodes[n];
    DType to = node.dtype;
    if (program.nodes[node.args[0]].dtype != DT_i64 || to == DT_i64 || facts[n].load) {
        return;
    }
    if (!range(node.args[0]).exact && to != DT_bool) {
        not_held();
    }
}

/* A result that is bool. */
void Encoder::check_test(const Node &node)
{
    bool exact = true, between = false;
    for (int arg : node.args) {
        if (arg >= 0) {
            Range one = range(arg);
            exact &= one.exact;
            between |= one.between();
        }
    }
    if (compares(node.op) ? !exact && !between : node.op != OP_logical_not) {
        not_held();
    }
}

/* What a register has of an int64. */
Range Encoder::range(int n)
{
    if (!ranged[n]) {
        ranges[n] = find_range(n);
        ranged[n] = true;
    }
    return ranges[n];
}

Range Encoder::find_range(int n)
{
    const Node &node = program.nodes[n];
    if (facts[n].number) {
        int64_t value = number(n).integer;
        return value > LEAST && value < MOST ? Range{value, value, true} : not_held();
    }
    switch (node.kind) {
    case NODE_iota:
        return {0, std::max<int64_t>(size[node.aux] - 1, 0), true};
    case NODE_load:
    case NODE_index:
        return {LEAST, MOST, false};
    case NODE_broadcast:
        return range(node.args[0]);
    case NODE_compute:
        return computed_range(node);
    case NODE_reduce:
    case NODE_scan:
        return reduced_range(node);
    case NODE_cast:
        switch (program.nodes[node.args[0]].dtype) {
        case DT_i64:
            return range(node.args[0]);
        case DT_i32:
            return {LEAST, MOST, true};
        case DT_u8:
            return {0, 255, true};
        case DT_bool:
            return {0, 1, true};
        default:
            return not_held(); /* a float may be beyond 32 bits */
        }
    default:
        return not_held();
    }
}

/* Of a sum, whatever comes between: 32 bits of it are right. What running sums begin with may be
 * nearer to 0 than what they end with, or farther. */
Range Encoder::reduced_range(const Node &node)
{
    Range one = range(node.args[0]);
    if (node.op == OP_max || node.op == OP_min) {
        return one;
    }
    __int128 count = 1;
    for (int d = 0; d < program.rank; d++) {
        count *= node.mask >> d & 1 && count < MOST ? size[d] : 1;
    }
    __int128 low = std::min<__int128>(one.low, one.low * count);
    __int128 high = std::max<__int128>(one.high, one.high * count);
    bool adds = node.op == OP_sum || node.op == OP_cumsum;
    bool held = adds && one.exact && low >= LEAST && high <= MOST;
    return held ? Range{(int64_t)low, (int64_t)high, true} : not_held();
}

Range Encoder::computed_range(const Node &node)
{
    const int16_t *args = node.args + (node.op == OP_select);
    Range a = range(args[0]);
    Range b = args[1] < 0 ? a : range(args[1]);
    bool exact = a.exact && b.exact;
    int64_t low = 0, high = 0;
    bool known = ends(node.op, a, b, low, high);
    if (keeps_nearest(node.op)) {
        return {low, high, exact || Range{low, high, exact}.between()};
    }
    return exact && known && low >= LEAST && high <= MOST ? Range{low, high, true} : not_held();
}

} // namespace magjit_dvm::cuda
