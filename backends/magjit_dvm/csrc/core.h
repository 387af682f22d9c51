/* One core of the virtual machine: what it walks through, and its part of the tiles. */
#ifndef MAGJIT_DVM_CORE_H
#define MAGJIT_DVM_CORE_H

#include "program.h"

namespace magjit_dvm {

/* Memory that will be wanted, block after block, each row after row: see ahead.cpp. */
struct Ahead {
    enum : int { MOST = 8, ELEMENTS = 1024 };
    struct Block {
        const char *row;
        int64_t stride, rows, width; /* in bytes, but for rows */
        int64_t done;                /* bytes of the row */
        bool output;
    } blocks[MOST];
    int n = 0, at = 0;
    int64_t each_row = 0; /* bytes to ask for with each row that a kernel computes */

    bool waits() const { return at < n; }
    void some(int64_t bytes);
};

struct Core {
    const Code &code;
    const Header &h;
    const Kernels &k;
    char *const *arguments;
    char *local;
    State state[MAX_SLOTS];
    char *base[MAX_SLOTS]; /* of global slots, at the tile's outer indices */
    int64_t tile_row, tile_col, tile_rows, tile_cols;
    int64_t row, col, rows, cols; /* of the step */
    int64_t inner_index = 0;      /* the step's place among the dimensions that steps enumerate */
    int64_t index[MAX_DIMS];      /* of those that tiles and steps enumerate */
    Ahead ahead;
    bool more_tiles = false;
    int status = 0;               /* bits: see execute */

    /* Cores that share the reduced dimension of each tile, and which of them this one is. */
    int part = 0, parts = 1;
    char *const *locals = nullptr; /* local memory of each */
    void (*barrier)() = nullptr;

    Core(const Code &c, char *const *args, char *memory)
        : code(c), h(c.header), k(kernels()), arguments(args), local(memory)
    {
        for (int s = 0; s < h.n_slots; s++) {
            const Slot &slot = code.slots[s];
            state[s] = {nullptr, 0, 0};
            base[s] = nullptr;
            if (slot.kind == SLOT_constant) {
                state[s].p = (char *)&code.constants[slot.local];
            } else if (slot.kind != SLOT_global) {
                state[s].p = local + slot.local;
            }
        }
    }

    int64_t tile_length() const
    {
        return h.reduces == REDUCES_columns ? tile_rows : tile_cols;
    }

    void run(int64_t first, int64_t last);
    void run_tile();
    void run_steps(const Phase &phase);
    bool reduces_in(const Phase &phase) const;
    void join(const Phase &phase);
    void join_moments(const Insn &insn);
    void look_ahead(int p);
    void run_by_rows(Kernel kernel, const Insn &insn, const State *const *operands, int64_t n_rows,
                     int64_t n_cols);
    int run_rows(const Insn &first, const Insn *second);
    void run_block(uint32_t from, uint32_t to);
    void enter_prologue();
    void enter_step();
    void bind(int s);
    char *at_step(const Slot &slot, int s) const;
    char *block_of(const Slot &slot, int s, bool tile) const;
    void memory(const Insn &insn);
    bool turn(const Insn &insn, State *turned) const;
    void flat_view(int s, char *block, bool load);
    void index_load(const Insn &insn, int64_t n_rows, int64_t n_cols);
};

} // namespace magjit_dvm

#endif
