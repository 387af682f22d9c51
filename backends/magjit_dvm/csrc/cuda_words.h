/* The words of cuda/words.py, whose numbers Python hands over, and what images have room for. */
#ifndef MAGJIT_DVM_CUDA_WORDS_H
#define MAGJIT_DVM_CUDA_WORDS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "program.h"

namespace magjit_dvm::cuda {

enum : int {
    FORM = 38, /* as in words.py: of another, this encoder makes nothing */
    HEADER_BYTES = 352,
    IMAGE_BYTES = 4096,
    COUNTER_AT = 144,
    INPUTS_AT = 152,
    OF_ROWS = 256, /* added to the size of an element of which a row has one */
    WHOLE_ROWS = 128, /* added to both where rows have all their columns of it */
    PERIOD_SHIFT = 9, /* beside that: after how many rows such elements come again */
    PARTS_AT = 344,
    MAX_STAGED = 12,
    MAX_PASSES = 4,
    MAX_REGISTERS = 16,
    MAX_ACCUMULATORS = 16,
    MOST_SUMS = 8,
    MOST_WORDS = 224,   /* before the last of them */
    MAX_DESCRIBED = 256, /* sizes and descriptors: more do not fit an image */
    FOURS = 4, /* what shares have their threads times, see philox.py */
    SQUARE_PARTS = 6,    /* dimensions that take the place of two, see cuda/tiling.py */
    MAX_PARTS = MAX_DIMS + SQUARE_PARTS
};
enum : int { LEAST_TILES = 4 }; /* of a block, from which on it keeps vectors, and adders pay */
enum : uint32_t { NO_WORD = 0xffffffffu };

enum Loaded : uint8_t {
    LOADED_32,
    LOADED_f16,
    LOADED_bf16,
    LOADED_u8,
    LOADED_i64,
    LOADED_i64f,
    LOADED_i64s,
    N_LOADED
};
enum : int { N_STORED = LOADED_i64s, N_REDUCTIONS = 7 }; /* stores make all but the last */
enum : int { N_NARROW = LOADED_u8 + 1 }; /* all words that load know these */
enum : int { N_OF_COLUMNS = LOADED_bf16 + 1 }; /* loads of what all rows share, and of squares */
enum Way : uint8_t {
    WAY_staged,
    WAY_shifted,
    WAY_four,
    WAY_broadcast,
    WAY_each,
    N_WAYS,
    WAY_columns = N_WAYS, /* these know the first three of what is loaded */
    WAY_near,
    WAY_transposed,
    WAY_row, /* of a table */
    N_ALL_WAYS
};
enum Store : uint8_t { STORE_aligned, STORE_shifted, STORE_each, N_STORES };
enum Bank : uint8_t { BANK_t, BANK_a };
enum Registers : uint8_t { REGISTERS_f, REGISTERS_i };

/* Of an operator on tiles: its number, or BY and its place among those that `by` does. */
using Code = uint16_t;
constexpr Code BY = 256;

/* An instruction on one kind of registers: numbers of operators, 0 where there is none. */
struct Operators {
    Code plain, reversed;                  /* A ← A op T, A ← T op A */
    uint8_t immediate, reversed_immediate; /* A ← A op F0, A ← F0 op A */
    bool binary;
    int8_t reduction; /* its number, or −1 */
};

/* Of kernels, as in cuda/forms.py: of one image, several, one that has sums across rows, one that has no
 * rows, one whose rows are in no chunks, one with warps that add up sums, one of norms and softmaxes,
 * one of norms' gradients, one of squares, three with eight, four, and two rows a warp, one of rows in
 * chunks, two of rows' results in batches, the second of rows in chunks. */
enum Form : int {
    ALONE,
    STACKED,
    SUMMING,
    FLAT,
    WHOLE,
    ADDING,
    NORMS,
    GRADIENTS,
    SQUARES,
    EIGHTH,
    QUARTER,
    HALF,
    CHUNKED,
    BATCHED,
    READ_ONCE,
    N_FORMS
};

/* What an operator is good for, beside what its name says. */
enum Use : uint16_t {
    OF_ROW_REGISTERS = 1, /* s.by and sk.by do it */
    OF_FLAT = 2,          /* the kernel of programs without rows has it: see cuda/forms.py */
    OF_WHOLE = 4,         /* that of rows in no chunks has it */
    OF_ADDING = 8,        /* that with adders has it */
    OF_NORMS = 16,        /* that of norms and softmaxes has it */
    OF_ROWS_REDUCED = 32, /* it reduces a row, or runs along it */
    OF_SQUARES = 64,      /* the kernel of squares has it */
    STORES = 128,         /* it writes a tile */
    OF_SEVERAL = 256,     /* the kernel with several rows a warp has it */
    OF_CHUNKED = 512,     /* that of rows in chunks has it */
    OF_BATCHED = 1024,    /* those of rows' results in batches have it */
    OF_READ_ONCE = 2048
};

struct Words {
    bool ready;
    uint8_t end, nop, by, swap, keep, take, mask, select, save, add_up;
    uint8_t add_scaled, sub_scaled; /* A ← A ± T · S[y] */
    uint8_t multiply_add;           /* A ← A · F0 + F1 */
    uint8_t number, row[2], scratch[2]; /* of each bank */
    uint8_t scalar_row;                    /* lk.r */
    uint8_t load[N_WAYS][N_LOADED], load_a[3]; /* 0: there is none */
    uint8_t position, column, row_position;   /* along a dimension, that of columns */
    uint8_t draw;
    uint8_t table[N_LOADED], row_table[N_OF_COLUMNS]; /* what is looked up */
    uint8_t store[N_STORES][N_STORED];
    uint8_t load_few[N_ALL_WAYS - N_WAYS][N_OF_COLUMNS], store_near[N_OF_COLUMNS];
    uint8_t ask_near, ask_transposed;
    uint8_t kept, affine, scale; /* vectors in shared memory */
    uint8_t reduce[N_REDUCTIONS], finish[N_REDUCTIONS];
    uint8_t reduce_online, finish_online; /* the largest with the sum of exponentials */
    uint8_t row_reduce[N_REDUCTIONS], row_squares, row_stat; /* of a row in one stage */
    uint8_t row_norm, row_softmax, row_back, add_up_norm, add_rows, norm_back;
    uint8_t row_running[2][2]; /* sums and products, of each kind of registers; 0: none */
    uint8_t by_row, by_row_number, and_ints; /* s.by and sk.by; i.bitwise_and */
    uint16_t uses[256];                      /* of each operator, see Use */
    uint8_t scaled_rsqrt, sub_exp_small, sub_exp_small_number;
    uint8_t row_number, row_take, row_in, row_load[N_LOADED], row_store[N_STORED];
    uint8_t to_half, to_bfloat, to_int, to_byte, to_bool, int_to_float, int_to_bool, low_bits;
    uint8_t logical_not;
    Operators of[N_OPS][2];
    uint8_t scalar[N_OPS]; /* on row registers */
    uint8_t scalar_number[N_OPS], number_scalar[N_OPS]; /* and a number; a number and those */
    bool wraps[N_OPS];     /* its results may leave 8 bits */
    uint8_t shorter[N_OPS]; /* functions for results that are rounded to 16 bits; 0: none */
};
extern Words words;

/* cuda_words(numbers, rows, limits, by_row): see cuda/native.py. */
PyObject *py_cuda_words(PyObject *, PyObject *args);

} // namespace magjit_dvm::cuda

#endif
