/* What is done with the numbers of a row once all of it has been read, for a batch of rows at once: see
 * cuda/batches.py. */
#include <algorithm>

#include "cuda_encoder.h"
#include "cuda_sizes.h"

namespace magjit_dvm::cuda {

namespace {

constexpr int64_t LEAST_ROWS = 32; /* of a multiprocessor */
constexpr int LEAST_WORDS = 3;     /* of a tail */

} // namespace

/* Which row values are for results alone, if all of these are numbers of rows. */
void Encoder::find_batches()
{
    std::fill(late, late + n_nodes(), false);
    bool many = image.rows >= LEAST_ROWS * machine.multiprocessors;
    if (!reduced || !many || image.cols <= MOST_NARROW || image.sums || has_tiles()) {
        return;
    }
    bool early[MAX_NODES] = {}; /* tiles are made of it */
    for (int n = n_nodes() - 1; n >= 0; n--) {
        const Node &node = program.nodes[n];
        bool used = canonical[n] == n && uses[n] && !facts[n].load && node.kind != NODE_reduce;
        if (used && (early[n] || !in_row(n))) {
            for (int arg : node.args) {
                if (arg >= 0) {
                    early[canonical[arg]] = true;
                }
            }
        }
    }
    int count = n_outputs();
    for (int n = 0; n < n_nodes(); n++) {
        late[n] = is_row_value(n) && !early[n] && program.nodes[n].kind != NODE_reduce;
        count += late[n];
    }
    batches = count >= LEAST_WORDS;
    for (int n = 0; n < n_nodes() && batches; n++) {
        batches = !late[n] || is_of_any_row(n);
    }
    if (!batches) {
        std::fill(late, late + n_nodes(), false);
    }
}

/* Whether a row value is made by words on row registers, whichever row a lane has. */
bool Encoder::is_of_any_row(int n) const
{
    const Node &node = program.nodes[n];
    if (node.kind == NODE_iota || node.kind == NODE_draw) {
        return node.kind == NODE_iota;
    }
    if (facts[n].load) {
        return facts[n].loaded < N_OF_COLUMNS || facts[n].loaded == LOADED_i64s;
    }
    if (node.kind == NODE_index) {
        return facts[n].loaded < N_OF_COLUMNS;
    }
    if (node.kind == NODE_cast) {
        return facts[n].n_casts == 1;
    }
    uint8_t first, second;
    bool wraps = words.wraps[node.op] && node.dtype == DT_u8;
    return node.kind == NODE_compute && !wraps && scalar_word(n, false, false, first, second);
}

/* Whether tails alone load an input. */
bool Encoder::is_late_input(int number) const
{
    bool found = false;
    for (int n = 0; n < n_nodes(); n++) {
        NodeKind kind = program.nodes[n].kind;
        bool known = facts[n].load && (kind == NODE_load || kind == NODE_cast);
        if (known && uses[n] && facts[n].input == number) {
            if (!late[n]) {
                return false;
            }
            found = true;
        }
    }
    return found;
}

/* What is left to do with a row's numbers, as a tail if there are registers for it. */
void Encoder::emit_late()
{
    int waiting = image.numbers;
    if (is_known() && image.n_first == 1 && has_registers()) {
        put(words.end);
        image.tail = (uint32_t)image.n_words;
        image.batched = waiting;
        for (int n = 0; n < n_nodes(); n++) {
            row_register[n] = (int8_t)(row_register[n] + (row_register[n] >= 0 ? waiting : 0));
        }
        image.numbers = 2 * waiting + 2;
    }
    for (int n = 0; n < n_nodes() && !stopped(); n++) {
        if (late[n]) {
            emit_row_value(n);
        }
    }
}

/* Whether a kernel has all words up to here, and rows of this R. */
bool Encoder::is_known() const
{
    int found = uses_of_all(true);
    if (image.chunks > 1) {
        return image.once && found & OF_READ_ONCE;
    }
    return image.each >= 16 && found & OF_BATCHED;
}

/* Whether a batch has row registers for what a tail makes. */
bool Encoder::has_registers() const
{
    bool made[MAX_NODES], known[MAX_NODES];
    for (int n = 0; n < n_nodes(); n++) {
        known[n] = row_register[n] >= 0;
        made[n] = emitted[n] || (known[n] && !facts[n].number);
    }
    int taken = 2 * image.numbers + 2, over = 0;
    for (int n = 0; n < n_nodes(); n++) {
        if (!late[n]) {
            continue;
        }
        uint8_t first, second;
        bool within = number_word(n, first, second);
        for (int arg : program.nodes[n].args) {
            if (arg >= 0 && facts[arg].number && !known[arg] && !within) {
                known[arg] = true;
                taken++;
            }
        }
        taken++;
        if (taken - over > MAX_REGISTERS) {
            return false;
        }
        made[n] = true;
        over = 0;
        for (int one = 0; one < n_nodes(); one++) {
            over += made[one] && is_over(one, made);
        }
    }
    return true;
}

} // namespace magjit_dvm::cuda
