/* What the values of a fused operator are on the GPU, and the bits of its numbers. */
#include <algorithm>
#include <cmath>

#include "cuda_encoder.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int64_t OF_A_WARP = 1024, OF_FEW_WARPS = 4096; /* columns */

double to_half(float value)
{
    double magnitude = std::fabs((double)value);
    if (magnitude >= 65520.0) {
        return std::copysign((double)INFINITY, value);
    }
    int exponent;
    std::frexp(magnitude, &exponent);
    int last = std::max(exponent - 11, -24); /* the exponent of the last place */
    return std::ldexp(std::nearbyint(std::ldexp((double)value, -last)), last);
}

double to_bfloat(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    memcpy(&value, &bits, 4);
    return value;
}

Number as_float(Number from, DType to)
{
    float value = from.floating ? (float)from.real : (float)from.integer;
    from.floating = true;
    if (to == DT_f32) {
        from.real = value;
    } else {
        from.known &= !std::isnan(value);
        from.real = to == DT_f16 ? to_half(value) : to_bfloat(value);
    }
    return from;
}

/* What torch makes of a number in another dtype. */
Number converted(Number from, DType to)
{
    if (to == DT_f32 || to == DT_f16 || to == DT_bf16) {
        return as_float(from, to);
    }
    if (to == DT_bool) {
        from.integer = from.floating ? from.real != 0 : from.integer != 0;
        from.floating = false;
        return from;
    }
    if (from.floating) {
        from.known &= std::fabs(from.real) < 2147483648.0; /* beyond, and for NaN, machines differ */
        from.integer = from.known ? (int64_t)from.real : 0;
        from.floating = false;
    }
    from.integer = to == DT_i32  ? (int64_t)(int32_t)from.integer
                   : to == DT_u8 ? (int64_t)(uint8_t)from.integer
                                 : from.integer;
    return from;
}

} // namespace

/* Aliases, passes and uses. */
void Encoder::survey()
{
    std::fill(uses, uses + n_nodes(), 0);
    for (int n = 0; n < n_nodes(); n++) {
        int of = alias_of(n);
        canonical[n] = (int16_t)(of < 0 ? n : of);
        row_register[n] = accumulator[n] = -1;
        online[n] = slot[n] = -1;
        ranged[n] = emitted[n] = given_away[n] = false;
    }
    find_phases();
    check_longs();
    for (int n = 0; n < n_nodes(); n++) {
        if (canonical[n] == n && !facts[n].number && !facts[n].load) {
            for (int arg : program.nodes[n].args) {
                if (arg >= 0) {
                    uses[canonical[arg]]++;
                }
            }
        }
    }
    for (const Output &out : program.outputs) {
        uses[canonical[out.node]]++;
    }
    std::fill(folded, folded + MAX_NODES, false);
    for (int n = 0; n < n_nodes(); n++) {
        Scaled parts;
        bool is_rsqrt = computes(n, OP_rsqrt);
        if (is_rsqrt && find_scaled(n, parts)) {
            folded[parts.quotient] = folded[parts.total] = true;
        }
    }
    std::copy(uses, uses + n_nodes(), left);
}

/* How many reductions come before each value. */
void Encoder::find_phases()
{
    for (int n = 0; n < n_nodes(); n++) {
        const Node &node = program.nodes[n];
        int before = 0;
        for (int arg : node.args) {
            before = arg >= 0 ? std::max<int>(before, phase[arg]) : before;
        }
        bool reduces = node.kind == NODE_reduce && node.mask & active && node.aux != ACROSS;
        phase[n] = comes_with_largest(n) ? phase[online[n]] : (uint8_t)(before + reduces);
    }
}

/* Sums of exponentials that are found with the largest, and phases with them: of rows in one stage,
 * those whose exponentials nothing else asks for; not of rows of a few warps that have results of tiles,
 * which wait little for one another and have more to compute so. */
void Encoder::find_online()
{
    bool few = image.cols > OF_A_WARP && image.cols <= OF_FEW_WARPS;
    if (!chunked && few && has_tiles()) {
        return;
    }
    bool any = false;
    for (int n = 0; n < n_nodes(); n++) {
        int total = sum_beyond(n);
        if (total >= 0 && (chunked || uses[power_of(total)] == 1)) {
            online[n] = (int16_t)total;
            online[total] = (int16_t)n;
            any = true;
        }
    }
    if (any) {
        find_phases();
    }
}

/* Whether results vary along rows. */
bool Encoder::has_tiles() const
{
    for (const Output &out : program.outputs) {
        if (!in_row(out.node)) {
            return true;
        }
    }
    return false;
}

/* Whether rows in chunks are read once, for a loss or the like: no result has tiles. */
bool Encoder::is_read_once() const
{
    if (has_tiles()) {
        return false;
    }
    uint64_t totals[(MAX_NODES + 63) / 64] = {};
    bool any = false;
    for (int n = 0; n < n_nodes(); n++) {
        int total = sum_beyond(n);
        if (total >= 0) {
            totals[total / 64] |= (uint64_t)1 << total % 64;
            any = true;
        }
    }
    for (int n = 0; n < n_nodes() && any; n++) {
        const Node &node = program.nodes[n];
        bool reduces = node.kind == NODE_reduce || node.kind == NODE_scan;
        bool total = totals[n / 64] >> n % 64 & 1;
        if (reduces && uses[n] && canonical[n] == n && phase[n] != 1 && !total) {
            return false;
        }
    }
    return any;
}

/* What is looked up of a row in chunks is so when it is asked for: it may be an element of the row, which
 * then is in a cache. */
void Encoder::look_up_late()
{
    for (int n = 0; n < n_nodes(); n++) {
        bool late = program.nodes[n].kind == NODE_index && in_row(n);
        for (const Output &out : program.outputs) {
            late &= canonical[out.node] != n;
        }
        int first = MAX_NODES;
        for (int k = 0; k < n_nodes() && late; k++) {
            bool asks = false;
            for (int arg : program.nodes[k].args) {
                asks |= arg >= 0 && canonical[arg] == n;
            }
            first = asks && canonical[k] == k ? std::min<int>(first, phase[k]) : first;
        }
        phase[n] = late && first < MAX_NODES ? (uint8_t)first : phase[n];
    }
}

/* Of the largest of x, if a node is that, the sum of exp(x − largest); −1 without one. */
int Encoder::sum_beyond(int n) const
{
    const Node &largest = program.nodes[n];
    bool is_largest = largest.kind == NODE_reduce && largest.op == OP_max && facts[n].floating;
    if (!is_largest || canonical[n] != n || !uses[n]) {
        return -1;
    }
    int x = canonical[program.nodes[n].args[0]];
    for (int total = 0; total < n_nodes(); total++) {
        const Node &node = program.nodes[total];
        if (node.kind != NODE_reduce || node.op != OP_sum || node.aux == ACROSS ||
            canonical[total] != total || !uses[total]) {
            continue;
        }
        int power = power_of(total);
        int away = computes(power, OP_exp) ? canonical[program.nodes[power].args[0]] : -1;
        if (away >= 0 && computes(away, OP_sub)) {
            const int16_t *args = program.nodes[away].args;
            if (canonical[args[0]] == x && canonical[args[1]] == n) {
                return total;
            }
        }
    }
    return -1;
}

/* The value that a node is the same as, in registers; −1 if it is one of its own. */
int Encoder::alias_of(int n) const
{
    const Node &node = program.nodes[n];
    if (facts[n].number || facts[n].load || node.args[0] < 0) {
        return -1;
    }
    int of = canonical[node.args[0]];
    bool over = node.kind == NODE_reduce || node.kind == NODE_scan;
    if (over && !(node.mask & active)) {
        return of; /* over a size of 1 */
    }
    if (node.kind == NODE_broadcast || (node.kind == NODE_compute && node.op == OP_copy)) {
        return in_row(n) == in_row(of) && !facts[of].number ? of : -1;
    }
    if (node.kind == NODE_cast && !facts[n].n_casts) {
        return facts[of].number ? -1 : of;
    }
    return -1;
}

/* The number of a reduction, −1 where there is none. */
int Encoder::reduction(int n)
{
    const Node &node = program.nodes[n];
    Registers kind = facts[node.args[0]].floating ? REGISTERS_f : REGISTERS_i;
    int found = words.of[node.op][kind].reduction;
    if (found < 0) {
        refuse("no words for ", OPS[node.op].name, " of ", program.nodes[node.args[0]].dtype);
    }
    return found;
}

/* ---- patterns ---- */

/* Whether a value is a difference of floats that is used once, or as cheaply made again: of a tensor and
 * a row value. */
bool Encoder::is_difference(int n) const
{
    n = canonical[n];
    const Node &node = program.nodes[n];
    if (node.kind != NODE_compute || node.op != OP_sub || !facts[n].floating) {
        return false;
    }
    int minuend = canonical[node.args[0]], subtrahend = canonical[node.args[1]];
    return uses[n] == 1 || (facts[minuend].load && in_row(subtrahend) && !in_row(n));
}

/* Whether `row` is the largest of `n`, and tiles are stored in 16 bits alone. */
bool Encoder::below_largest(int n, int row) const
{
    const Node &node = program.nodes[canonical[row]];
    if (node.kind != NODE_reduce || node.op != OP_max) {
        return false;
    }
    bool halves = true;
    for (const Output &out : program.outputs) {
        DType dtype = program.nodes[out.node].dtype;
        halves &= in_row(out.node) || dtype == DT_f16 || dtype == DT_bf16;
    }
    return halves && canonical[node.args[0]] == canonical[n];
}

/* Whether a value is rsqrt(given / number + number). */
bool Encoder::find_scaled(int n, Scaled &found) const
{
    found.total = canonical[program.nodes[n].args[0]];
    const Node &node = program.nodes[found.total];
    if (node.kind != NODE_compute || node.op != OP_add || !in_row(n) ||
        !facts[node.args[1]].number) {
        return false;
    }
    found.quotient = canonical[node.args[0]];
    const Node &divided = program.nodes[found.quotient];
    if (divided.kind != NODE_compute || divided.op != OP_div || uses[found.total] != 1 ||
        uses[found.quotient] != 1) {
        return false;
    }
    found.given = canonical[divided.args[0]];
    return !facts[found.given].number && facts[divided.args[1]].number && facts[n].floating;
}

/* What a value that is used once is the square of, a float tile; −1 if it is none. */
int Encoder::squared(int n) const
{
    n = canonical[n];
    const Node &node = program.nodes[n];
    bool product = node.kind == NODE_compute && node.op == OP_mul && facts[n].floating;
    if (!product || uses[n] != 1 || in_row(n)) {
        return -1;
    }
    int of = canonical[node.args[0]];
    return of == canonical[node.args[1]] ? of : -1;
}

/* The sum of squares about the mean that is found from the sum `n`; −1 without one. */
int Encoder::squares_about_mean(int n)
{
    int sum = words.of[OP_sum][REGISTERS_f].reduction;
    if (reduction(n) != sum) {
        return -1;
    }
    int arg = canonical[program.nodes[n].args[0]];
    for (int other = 0; other < n_nodes(); other++) {
        const Node &node = program.nodes[other];
        bool sums = node.kind == NODE_reduce && node.op == OP_sum && uses[other];
        int away = sums && canonical[other] == other ? squared(node.args[0]) : -1;
        if (away < 0 || program.nodes[away].kind != NODE_compute ||
            program.nodes[away].op != OP_sub) {
            continue;
        }
        const int16_t *args = program.nodes[away].args;
        if (canonical[args[0]] == arg && is_mean(canonical[args[1]], n)) {
            return other;
        }
    }
    return -1;
}

/* Whether a node is what this instruction computes. */
bool Encoder::computes(int n, int op) const
{
    return program.nodes[n].kind == NODE_compute && program.nodes[n].op == op;
}

/* The parts of a normalized row, where nothing else asks for what comes between. */
bool Encoder::find_normalized(int n, Normalized &found)
{
    found.squares = squares_about_mean(n);
    if (found.squares < 0 || uses[n] != 1 || uses[found.squares] != 1) {
        return false;
    }
    int away = squared(program.nodes[found.squares].args[0]);
    int x = canonical[program.nodes[away].args[0]];
    found.mean = canonical[program.nodes[away].args[1]];
    for (int product = 0; product < n_nodes(); product++) {
        const Node &node = program.nodes[product];
        if (!computes(product, OP_mul) || canonical[product] != product || in_row(product)) {
            continue;
        }
        found.again = canonical[node.args[0]];
        found.root = canonical[node.args[1]];
        if (!computes(found.root, OP_rsqrt)) {
            std::swap(found.again, found.root);
        }
        if (!computes(found.root, OP_rsqrt) || !computes(found.again, OP_sub)) {
            continue;
        }
        const int16_t *args = program.nodes[found.again].args;
        if (canonical[args[0]] != x || canonical[args[1]] != found.mean) {
            continue;
        }
        found.product = product;
        found.same = found.again == away;
        bool alone = uses[away] == 2 + found.same && uses[found.again] == 1 + 2 * found.same;
        if (alone && uses[product] && is_deviation(found.root, found.squares, found.number)) {
            return true;
        }
    }
    return false;
}

/* The parts of a softmax that is stored in 16 bits, where nothing else asks for what comes between. */
bool Encoder::find_softmax(int n, Softmax &found) const
{
    int x = canonical[program.nodes[n].args[0]];
    if (uses[n] != 1 || !below_largest(x, n) || !facts[x].floating) {
        return false;
    }
    for (int product = 0; product < n_nodes(); product++) {
        const Node &node = program.nodes[product];
        if (!computes(product, OP_mul) || canonical[product] != product || in_row(product)) {
            continue;
        }
        int power = canonical[node.args[0]], inverse = canonical[node.args[1]];
        if (!computes(power, OP_exp)) {
            std::swap(power, inverse);
        }
        if (!computes(power, OP_exp) || !computes(inverse, OP_reciprocal)) {
            continue;
        }
        int away = canonical[program.nodes[power].args[0]];
        int total = canonical[program.nodes[inverse].args[0]];
        const Node &sum = program.nodes[total];
        if (!computes(away, OP_sub) || sum.kind != NODE_reduce || sum.op != OP_sum) {
            continue;
        }
        const int16_t *args = program.nodes[away].args;
        if (canonical[args[0]] != x || canonical[args[1]] != n || canonical[sum.args[0]] != power) {
            continue;
        }
        if (uses[away] == 1 && uses[power] == 2 && uses[total] == 1 && uses[inverse] == 1 &&
            uses[product]) {
            found = {total, inverse, product};
            return true;
        }
    }
    return false;
}

/* Whether a value is rsqrt(squares / columns + number). */
bool Encoder::is_deviation(int root, int squares, int &number)
{
    Scaled parts;
    if (!find_scaled(root, parts) || parts.given != squares) {
        return false;
    }
    number = program.nodes[parts.total].args[1];
    float cols = (float)image.cols;
    uint32_t expected;
    memcpy(&expected, &cols, 4);
    return bits(program.nodes[parts.quotient].args[1]) == expected;
}

/* Whether a value is a sum divided by the row's length. */
bool Encoder::is_mean(int mean, int total)
{
    const Node &node = program.nodes[mean];
    if (node.kind != NODE_compute || node.op != OP_div || canonical[node.args[0]] != total ||
        !facts[node.args[1]].number) {
        return false;
    }
    float cols = (float)image.cols;
    uint32_t expected;
    memcpy(&expected, &cols, 4);
    return bits(node.args[1]) == expected;
}

/* How a value is stored. */
int Encoder::stored(int n) const
{
    if (program.nodes[n].dtype == DT_i64) {
        return is_from_float(n) ? LOADED_i64f : LOADED_i64;
    }
    return facts[n].stored;
}

/* A number as its node has it. */
Number Encoder::number(int n)
{
    DType chain[MAX_NODES];
    int casts = 0, at = n;
    while (program.nodes[at].kind == NODE_cast) {
        chain[casts++] = program.nodes[at].dtype;
        at = program.nodes[at].args[0];
    }
    const Node &node = program.nodes[at];
    Number number = {false, true, 0, 0};
    if (node.kind == NODE_scalar) {
        const Argument &value = given[node.aux];
        number = {value.floating, true, value.number, value.integer};
    } else if (node.kind == NODE_numel) {
        number.integer = 1;
        for (int d = 0; d < program.rank; d++) {
            number.integer *= node.mask >> d & 1 ? size[d] : 1;
        }
    } else {
        number = {facts[at].constant_is_float, true, node.number, node.integer};
    }
    number = converted(number, node.dtype);
    while (casts > 0) {
        number = converted(number, chain[--casts]);
    }
    if (!number.known) {
        leave();
    }
    return number;
}

/* The same in the register of its dtype. */
uint32_t Encoder::bits(int n)
{
    Number one = number(n);
    uint32_t found = (uint32_t)one.integer;
    if (one.floating) {
        float value = (float)one.real;
        memcpy(&found, &value, 4);
    }
    return found;
}

/* What a division by a number multiplies with. */
uint32_t Encoder::inverse_bits(int n)
{
    uint32_t found = bits(n);
    float by;
    memcpy(&by, &found, 4);
    if (by != by) {
        leave();
    }
    float inverse = by != 0 ? (float)(1.0 / (double)by) : __builtin_inff();
    memcpy(&found, &inverse, 4);
    return found;
}

} // namespace magjit_dvm::cuda
