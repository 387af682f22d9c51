/* The bytecode compiler (DVM, §4.2) of one instance, in the order in which it works:
 * shapes.cpp sizes, dimensions and blocks; phases.cpp what is made when; merges.cpp what is made
 * together; emit.cpp slots and instructions; tiles.cpp tiles and places in local memory. */
#ifndef MAGJIT_DVM_ENCODER_H
#define MAGJIT_DVM_ENCODER_H

#include <algorithm>

#include "program.h"

/* Less code to fetch: vectors and unrolled loops would save nothing here. Nor do tables, each of which
 * is a miss of its own. */
#pragma GCC optimize("O2", "no-tree-vectorize", "no-jump-tables", "no-tree-switch-conversion")

namespace magjit_dvm {

enum Section : uint8_t { SECTION_outer, SECTION_reduced, SECTION_inner };

struct Operand {
    int64_t stride[MAX_DIMS]; /* bytes, of the group's dimensions; 0 where it has none */
};

/* What is known of a node's value. All of it together: encoding is bound by cache misses. */
struct Value {
    uint32_t has; /* the dimensions that it has */
    int16_t cost; /* of making it again */
    bool steps; /* whether the steps of the phase at hand make it */
    int8_t avail; /* the phase from which on it can be had */
    uint8_t phases; /* of a step's value: the phases that need it */
    bool kept;
    bool stores;   /* it is an output */
    bool absorbed; /* by the instruction of its only user */
    bool leads;    /* absorbed, but as an instruction of its own, right before that of its user */
    bool in_moments; /* a sum that the instruction of the squares around its mean makes as well */
    int16_t tile_slot; /* of values of the tile, constants and kept values */
    int16_t accumulator, step_slot;
    int16_t uses;
    uint16_t merged; /* the instruction that it and an operand of it became */
    int16_t merged_args[3];
    int16_t sum; /* of squares around a mean: the sum that the mean is of, or -1 */
};
static_assert(sizeof(Value) <= 32, "two to a cache line");

/* Four bits for each dtype: a number in the code, where a table would be a miss. */
inline constexpr uint64_t packed_bytes()
{
    uint64_t packed = 0;
    for (int dtype = 0; dtype < N_DTYPES; dtype++) {
        packed |= (uint64_t)DTYPE_BYTES[dtype] << (4 * dtype);
    }
    return packed;
}
inline constexpr uint64_t PACKED_BYTES = packed_bytes();

/* The encoder's code lies in one piece, so that it can be fetched as one: see fetch_encoder. */
#define ENCODER __attribute__((section("magjit_encoder")))

struct Encoder {
    const Program &program;
    const Given *given;
    const Machine &machine;
    Code &code;
    const Window &window;

    int64_t size[MAX_DIMS];
    uint32_t active = 0;  /* dimensions of a size other than 1 */
    uint32_t reduced = 0; /* of those, the ones that reductions go over */

    /* The shape after dimensions have been ordered and merged. */
    int n_dims = 0;
    int64_t dim_size[MAX_DIMS];
    uint32_t dim_mask[MAX_DIMS]; /* the group's dimensions that it is made of */
    int dim_last[MAX_DIMS];      /* the innermost of them, whose stride it has */
    Section dim_section[MAX_DIMS];
    int row = -1, col = -1; /* of the merged dimensions */
    uint32_t row_mask = 0, col_mask = 0, inner_mask = 0;

    int n_phases = 0;
    bool costly = false; /* some element takes a function that is not quick */

    uint16_t first_slot[MAX_PHASES + 1];
    int64_t phase_units[MAX_PHASES], phase_moved[MAX_PHASES];
    uint32_t words = 0;
    int64_t tile_units = 0;  /* local bytes for each element of the tile's dimension */
    int64_t kept_units = 0;  /* local bytes for each element of a tile */
    int64_t step_units = 0;  /* local bytes for each element of a step of this phase */
    int64_t moved_units = 0; /* bytes an element that it reads or writes in place */

    Encoder(const Program &p, const Given *g, const Machine &m, Code &c, const Window &w)
        : program(p), given(g), machine(m), code(c), window(w)
    {
    }

    ENCODER const char *run();
    ENCODER const char *sizes();
    ENCODER const char *masks();
    ENCODER const char *strides();
    ENCODER const char *place_output(int o);
    ENCODER void order();
    ENCODER void merge(const int *dims, const Section *sections, int n);
    ENCODER bool mergeable(int outer, int inner) const;
    ENCODER void geometry();
    ENCODER int sum_of_squares_of(int n) const;
    ENCODER void levels();
    ENCODER const char *emit();
    ENCODER const char *emit_phase(int phase);
    ENCODER void tiles();
    ENCODER void place();

    int n_inputs() const { return (int)program.inputs.size(); }
    int n_nodes() const { return (int)program.nodes.size(); }
    bool in_tile(int n) const { return reduced && !(values[n].has & reduced); }
    bool is_number(int n) const
    {
        NodeKind kind = program.nodes[n].kind;
        return kind == NODE_constant || kind == NODE_scalar || kind == NODE_numel;
    }
    int bytes(DType dtype) const { return (int)(PACKED_BYTES >> (4 * dtype) & 15); }
    /* Whether a node reduces in this instance, rather than over sizes of 1. */
    bool reduces(int n) const
    {
        return program.nodes[n].kind == NODE_reduce && (program.nodes[n].mask & active);
    }
    bool scans(int n) const
    {
        return program.nodes[n].kind == NODE_scan && (program.nodes[n].mask & active);
    }
    ENCODER uint8_t shape_of(int n) const;
    int64_t stride_along(int op, int dim) const
    {
        return dim < 0 ? 0 : operand[op].stride[dim_last[dim]];
    }

    ENCODER int new_slot(SlotKind kind, DType dtype, uint8_t shape);
    ENCODER int global_slot(int op, int argument, DType dtype, uint8_t shape, bool tile_level);
    ENCODER bool in_step(int n, int phase) const;
    ENCODER void plan_merges(int phase);
    ENCODER void plan_pair(int n, int phase);
    ENCODER void place_sum_of(int i);
    ENCODER bool made_for_one(int m, int phase, int used) const;
    ENCODER bool absorbs(int m, int n, int phase, int used) const;
    ENCODER static void clear(int64_t *of_dims, int64_t value);
    ENCODER bool names_columns(int m, int position, int phase) const;
    ENCODER void merge_nodes(int n, int m, uint16_t op, int a, int b, int c);
    ENCODER int step_buffer(int n);
    ENCODER void release(int n);
    ENCODER void put(uint16_t op, DType dtype, uint8_t shape, int dst, int a = NO_SLOT,
                     int b = NO_SLOT, int c = NO_SLOT, uint8_t aux = 0);
    ENCODER bool direct(const Slot &slot) const;
    ENCODER int constant(int n);
    ENCODER int value_in_step(int n);
    ENCODER int value_in_tile(int n);
    ENCODER int tile_buffer(DType dtype);
    ENCODER bool put_node(int n, uint8_t shape, int dst, const int *args);
    ENCODER void put_index_load(int n, uint8_t shape, int dst, int positions);
    ENCODER void put_iota(int n, uint8_t shape, int dst);
    ENCODER const char *emit_tile_node(int n);
    ENCODER const char *emit_step_node(int n, int phase);
    ENCODER int output_slot(int n, bool tile_level, bool direct_only, int *which);
    ENCODER bool results_are_large() const;
    ENCODER bool passes_by(int n, const Slot &slot) const;
    ENCODER void store_outputs(int n, int from, int done, bool tile_level);
    const char *overflow = nullptr;

    /* Free blocks of local memory in a step: offset in units and size in units. */
    int n_free = 0;
    struct {
        int64_t offset;
        int bytes;
    } free_blocks[MAX_SLOTS];

    /* The accumulator that has its address in this step before its instruction needs it, or -1. */
    int placed = -1;

    /* The nodes that the steps of the phase at hand make. */
    int n_stepping = 0;
    uint8_t stepping[MAX_NODES];
    static_assert(MAX_NODES <= 256, "their numbers are bytes");

    alignas(64) Value values[MAX_NODES];
    Operand operand[MAX_INPUTS + MAX_OUTPUTS];
};

} // namespace magjit_dvm

#endif
