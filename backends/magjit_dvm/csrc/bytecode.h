/* The format of bytecode programs (DVM, Figure 7), shared by the encoder, the virtual machine, the
 * verifier and the printer.
 *
 *   program   = header slot* phase* constant*
 *   phase     = prologue step                   each a run of instructions
 *   insn      = op dtype length shape aux dst a b c
 *
 * A slot says where a value is: in global memory (an input or an output, read or written in place),
 * or in the thread's local memory. A tile walks its phases in order; within a phase the step code
 * runs for one block of the tile after another, so that a block stays in the first-level cache. */
#ifndef MAGJIT_DVM_BYTECODE_H
#define MAGJIT_DVM_BYTECODE_H

#include <cstdint>
#include <cstring>
#include <limits>

namespace magjit_dvm {

enum DType : uint8_t {
#define MJ_DTYPE(NAME, CODE, CTYPE, BYTES) DT_##NAME = CODE,
#include "instructions.inc"
#undef MJ_DTYPE
    N_DTYPES
};

enum Op : uint16_t {
#define MJ_OP(NAME, NUMBER, KIND, TO_BOOL) OP_##NAME = NUMBER,
#include "instructions.inc"
#undef MJ_OP
    N_OPS
};

enum OpKind : uint8_t {
    KIND_memory,
    KIND_unary,
    KIND_binary,
    KIND_ternary,
    KIND_reduce,
    KIND_reduce2,
    KIND_reduce3,
    KIND_scan
};

/* Whether it adds to accumulators. */
inline constexpr bool accumulates(OpKind kind) { return kind >= KIND_reduce && kind <= KIND_reduce3; }

struct OpInfo {
    const char *name;
    OpKind kind;
    bool to_bool;
};

inline constexpr OpInfo OPS[] = {
#define MJ_OP(NAME, NUMBER, KIND, TO_BOOL) {#NAME, KIND_##KIND, TO_BOOL},
#include "instructions.inc"
#undef MJ_OP
};

/* Bytes of a row that are written past the caches at once. */
inline constexpr int64_t SHORTEST_STREAM = 1024;

inline constexpr int DTYPE_BYTES[] = {
#define MJ_DTYPE(NAME, CODE, CTYPE, BYTES) BYTES,
#include "instructions.inc"
#undef MJ_DTYPE
};

inline constexpr const char *DTYPE_NAMES[] = {
#define MJ_DTYPE(NAME, CODE, CTYPE, BYTES) #NAME,
#include "instructions.inc"
#undef MJ_DTYPE
};

enum : int { MAX_DIMS = 8, MAX_SLOTS = 400, MAX_PHASES = 8, MAX_ARGS = 96, MAX_CONSTANTS = 96 };

/* Where a value is while a block runs. */
struct State {
    char *p;
    int64_t rs; /* bytes from row to row */
    int64_t cs; /* 1: columns lie side by side, 0: all columns are one element */
};

/* The block of an instruction: that of the step, one row or column of it, or the tile's own
 * dimension (in prologues). */
enum : uint8_t { SHAPE_ROWS = 1, SHAPE_COLS = 2, SHAPE_TILE = 4 };

/* Read in place among the words of a program. */
struct __attribute__((may_alias)) Insn {
    uint16_t op;
    uint8_t dtype;  /* of the operands; of a cast, of the result */
    uint8_t length; /* in words of 8 bytes */
    uint8_t shape;
    uint8_t aux; /* cast: dtype of the operand; index_load: of the positions */
    uint16_t dst, a, b, c; /* slots */
    uint16_t unused;
};
static_assert(sizeof(Insn) == 16, "two words");
enum { INSN_WORDS = 2, NO_SLOT = 0xffff };

enum SlotKind : uint8_t {
    SLOT_global,   /* in an argument's memory */
    SLOT_step,     /* a block in local memory */
    SLOT_tile,     /* one element for each row (or column) of the tile, in local memory */
    SLOT_kept,     /* the whole of a tile, in local memory: made in one phase, read in later ones */
    SLOT_constant, /* one element of the program's own */
    N_SLOT_KINDS
};

/* Which dimension of a tile is reduced. */
enum Reduces : uint8_t { REDUCES_nothing, REDUCES_columns, REDUCES_rows, N_REDUCES };

struct Slot {
    uint8_t kind;
    uint8_t dtype;
    uint8_t shape;     /* the extents that the value has: SHAPE_* */
    uint8_t argument;  /* of SLOT_global */
    uint32_t local;    /* offset in local memory, number of a constant */
    int64_t row, col;  /* strides in bytes, of SLOT_global; the others are in Code::outer */
};

struct Phase {
    uint32_t prologue, step, end;  /* words from the beginning of the code */
    int64_t step_rows, step_cols;
};

/* DVM's code header: kernel type, code size and number of tiles, and how tiles cover the shape. */
struct Header {
    uint32_t magic;
    uint8_t reduces; /* the kernel type: Reduces */
    uint8_t flat;    /* blocks are ranges of the flattened shape */
    uint8_t n_outer; /* dimensions that tiles enumerate */
    uint8_t n_inner; /* reduced dimensions that steps enumerate */
    uint16_t n_slots, n_phases, n_constants, n_arguments;
    uint16_t n_inputs; /* of the arguments, the first ones: they are only read */
    uint32_t code_words;
    uint32_t local_bytes;
    int64_t tiles;
    int64_t outer[MAX_DIMS]; /* sizes: n_outer, then n_inner of them */
    int64_t rows, cols;      /* the two dimensions of blocks */
    int64_t tile_rows, tile_cols;
    int64_t elements; /* of the whole iteration space */
    Phase phases[MAX_PHASES];

    /* How often steps go over their part of a tile: the sizes that they enumerate. */
    __attribute__((always_inline)) int64_t inner_steps() const
    {
        int64_t n = 1;
        for (int i = n_outer; i < n_outer + n_inner; i++) {
            n *= outer[i];
        }
        return n;
    }
};
enum : uint32_t { MAGIC = 0x6d766431u };

/* Those of two operands and more, and scans, are the last ones. */
inline constexpr bool last_ones_add()
{
    for (int op = 0; op < N_OPS; op++) {
        if ((OPS[op].kind >= KIND_reduce2) != (op >= OP_sum_mul)) {
            return false;
        }
    }
    return true;
}
static_assert(last_ones_add());

/* What a reduction or a scan adds up in from step to step. */
inline constexpr DType accumulator_of(uint16_t op, DType dtype)
{
    bool adds = op == OP_sum || op == OP_prod || op >= OP_sum_mul;
    return adds && dtype == DT_f32 ? DT_f64 : dtype;
}

/* What differs from level to level of x86-64: the kernels. */
using Kernel = void (*)(const State &d, const State &a, const State &b, const State &c,
                        int64_t rows, int64_t cols);

/* One or two instructions in one pass over a block of rows, some of whose operands are one
 * element a row: the first one's d, a and b, then what they have beyond. Below so many rows lies one that
 * the same core writes. False, and nothing is done, for operands that it is not made for. */
using RowKernel = bool (*)(const State &d, const State &a, const State &b, const State &c,
                           const State &e, const State &f, int64_t rows, int64_t cols, int64_t more);

/* A product of few rows with a matrix whose rows are what a result is the sum of, plus a bias. */
struct FewRows {
    float *out;
    const float *x, *w, *bias; /* bias: or NULL */
    int64_t rows, width, depth;
    int64_t x_stride, w_stride; /* in elements */
};

/* Convolutions of images in frames of zeros: see small_images.inc. */
struct SmallImages {
    float *out;
    const float *x, *w, *bias; /* bias: or NULL */
    int64_t images, channels, outputs;
    int64_t height, width; /* of a result */
    int64_t kernel_height, kernel_width;
    int64_t pitch, plane; /* elements from row to row of a frame, and from frame to frame */
};

struct Kernels {
    const char *level;
    void (*few_rows)(const FewRows &job, int64_t first, int64_t last); /* columns of out; or NULL */
    int64_t most_rows;                                                 /* that it takes */
    /* Outputs of one image; or NULL. Frames have room for whole blocks of so many rows and columns. */
    void (*small_images)(const SmallImages &job, int64_t image, int64_t first, int64_t last);
    int64_t image_rows, image_columns;
    int64_t image_work; /* measured: products above which what torch calls is faster */
    Kernel op[N_OPS][N_DTYPES];
    Kernel along_rows[N_OPS][N_DTYPES]; /* reductions and scans over the rows of a block */
    Kernel cast[N_DTYPES][N_DTYPES];    /* [from][to] */
    RowKernel mul_rows, mul_mul_rows;       /* of float32 */
    /* The second one's result in place of the first's. */
    RowKernel sub_mul_mul, sub_mul_add, sub_mul_mul_add;
    RowKernel sub_exp_sum;                  /* c: where the sums are; or NULL */
};

extern const Kernels &kernels_base();
extern const Kernels &kernels_v3();
extern const Kernels &kernels_v4();

} // namespace magjit_dvm

#endif
