/* The bytecode compiler (DVM, §4.2) of one instance, in the order in which it works:
 * shapes.cpp sizes, dimensions and blocks; phases.cpp what is made when; emit.cpp slots and
 * instructions; tiles.cpp tiles and places in local memory. */
#ifndef MAGJIT_DVM_ENCODER_H
#define MAGJIT_DVM_ENCODER_H

#include <algorithm>

#include "program.h"

namespace magjit_dvm {

enum Section : uint8_t { SECTION_outer, SECTION_reduced, SECTION_inner };

struct Operand {
    int64_t stride[MAX_DIMS]; /* bytes, of the group's dimensions; 0 where it has none */
};

/* The first function of the encoder's code; `encode` is the last. */
void encoder_begins();

struct Encoder {
    const Program &program;
    const Given *given;
    const Machine &machine;
    Code &code;
    const Window &window;

    int64_t size[MAX_DIMS];
    uint32_t active = 0;  /* dimensions of a size other than 1 */
    uint32_t reduced = 0; /* of those, the ones that reductions go over */
    uint32_t has[MAX_NODES]; /* dimensions of each node's value */
    Operand operand[MAX_INPUTS + MAX_OUTPUTS];

    /* The shape after dimensions have been ordered and merged. */
    int n_dims = 0;
    int64_t dim_size[MAX_DIMS];
    uint32_t dim_mask[MAX_DIMS]; /* the group's dimensions that it is made of */
    int dim_last[MAX_DIMS];      /* the innermost of them, whose stride it has */
    Section dim_section[MAX_DIMS];
    int row = -1, col = -1; /* of the merged dimensions */
    uint32_t row_mask = 0, col_mask = 0, inner_mask = 0;

    int8_t avail[MAX_NODES]; /* the phase from which on a value can be had */
    uint8_t phases[MAX_NODES]; /* of a step's value: the phases that need it */
    bool kept[MAX_NODES];
    int n_phases = 0;

    int16_t tile_slot[MAX_NODES]; /* of values of the tile, constants and kept values */
    int16_t accumulator[MAX_NODES];
    int16_t step_slot[MAX_NODES];
    uint16_t merged[MAX_NODES];       /* the instruction that a node and an operand of it became */
    int16_t merged_args[MAX_NODES][3];
    bool absorbed[MAX_NODES];         /* such operands */
    bool stores[MAX_NODES];           /* nodes that are outputs */
    uint16_t first_slot[MAX_PHASES + 1];
    int64_t phase_units[MAX_PHASES], phase_moved[MAX_PHASES];
    int uses[MAX_NODES];
    uint32_t words = 0;
    int64_t tile_units = 0;  /* local bytes for each element of the tile's dimension */
    int64_t kept_units = 0;  /* local bytes for each element of a tile */
    int64_t step_units = 0;  /* local bytes for each element of a step of this phase */
    int64_t moved_units = 0; /* bytes an element that it reads or writes in place */

    Encoder(const Program &p, const Given *g, const Machine &m, Code &c, const Window &w)
        : program(p), given(g), machine(m), code(c), window(w)
    {
    }

    const char *run();
    const char *sizes();
    const char *masks();
    void strides();
    void order();
    void merge(const int *dims, const Section *sections, int n);
    bool mergeable(int outer, int inner) const;
    void geometry();
    void levels();
    const char *emit();
    const char *emit_phase(int phase);
    void tiles();
    void place();

    int n_inputs() const { return (int)program.inputs.size(); }
    int n_nodes() const { return (int)program.nodes.size(); }
    bool in_tile(int n) const { return reduced && !(has[n] & reduced); }
    bool is_number(int n) const
    {
        NodeKind kind = program.nodes[n].kind;
        return kind == NODE_constant || kind == NODE_scalar || kind == NODE_numel;
    }
    int bytes(DType dtype) const { return DTYPE_BYTES[dtype]; }
    /* Whether a node reduces in this instance, rather than over sizes of 1. */
    bool reduces(int n) const
    {
        return program.nodes[n].kind == NODE_reduce && (program.nodes[n].mask & active);
    }
    uint8_t shape_of(int n) const;
    int64_t stride_along(int op, int dim) const
    {
        return dim < 0 ? 0 : operand[op].stride[dim_last[dim]];
    }

    int new_slot(SlotKind kind, DType dtype, uint8_t shape);
    int global_slot(int op, int argument, DType dtype, uint8_t shape, bool tile_level);
    bool in_step(int n, int phase) const;
    bool reduces_in(int n, int phase) const;
    void plan_merges(int phase);
    bool absorbs(int m, int n, int phase, int used) const;
    bool names_columns(int m, int position, int phase) const;
    void merge_nodes(int n, int m, uint16_t op, int a, int b, int c);
    int step_buffer(int n);
    void release(int n);
    void put(uint16_t op, DType dtype, uint8_t shape, int dst, int a = NO_SLOT, int b = NO_SLOT,
             int c = NO_SLOT, uint8_t aux = 0);
    bool direct(const Slot &slot) const;
    int constant(int n);
    int value_in_step(int n);
    int value_in_tile(int n);
    int tile_buffer(DType dtype);
    bool put_node(int n, uint8_t shape, int dst, const int *args);
    void put_index_load(int n, uint8_t shape, int dst, int positions);
    void put_iota(int n, uint8_t shape, int dst);
    const char *emit_tile_node(int n);
    const char *emit_step_node(int n, int phase);
    int output_slot(int n, bool tile_level, bool direct_only, int *which);
    void store_outputs(int n, int from, int done, bool tile_level);
    const char *overflow = nullptr;

    /* Free blocks of local memory in a step: offset in units and size in units. */
    int n_free = 0;
    struct {
        int64_t offset;
        int bytes;
    } free_blocks[MAX_SLOTS];
};

} // namespace magjit_dvm

#endif
