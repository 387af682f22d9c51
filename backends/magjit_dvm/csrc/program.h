/* A fused operator before it knows its shapes (the rgraph of DVM, Figure 6), and the encoder. */
#ifndef MAGJIT_DVM_PROGRAM_H
#define MAGJIT_DVM_PROGRAM_H

#include <string>
#include <vector>

#include "bytecode.h"

namespace magjit_dvm {

enum InputKind : uint8_t { INPUT_tensor, INPUT_int, INPUT_float };

enum : int8_t { DIM_one = -1, DIM_indexed = -2 };

struct Input {
    InputKind kind;
    DType dtype;
    int8_t ndim;
    int8_t dims[MAX_DIMS]; /* of each dimension: the group's, DIM_one or DIM_indexed; of an int: the
                              one that it is the size of, if any */
};

enum NodeKind : uint8_t {
    NODE_load,      /* aux: input */
    NODE_constant,  /* value */
    NODE_scalar,    /* aux: input, a number */
    NODE_numel,     /* mask: product of these sizes */
    NODE_iota,      /* aux: dimension */
    NODE_index,     /* args[0]: positions; aux: input, the table */
    NODE_compute,   /* op; aux: ROUNDED or -1 */
    NODE_cast,
    NODE_reduce,    /* op, mask; aux: ACROSS or -1 */
    NODE_broadcast, /* mask */
    NODE_scan,      /* op, mask: one dimension */
    NODE_draw,      /* aux: the first of DRAWN inputs; integer: dimensions in order */
    N_NODE_KINDS
};

/* Of what is computed: rounded to 16 bits at once, in the program that a result is taken from. Of a sum:
 * over all that other reductions keep, and only stored. */
enum : int16_t { ROUNDED = 1, ACROSS = 2 };
enum : int { DRAWN = 3 }; /* ints that each call passes for what is drawn */

struct Node {
    NodeKind kind;
    DType dtype; /* of the result */
    uint16_t op;
    int16_t args[3];
    int16_t aux;
    uint32_t mask;
    double number;
    int64_t integer;
};

struct Output {
    int16_t node;
    int8_t ndim;
    int8_t dims[MAX_DIMS]; /* the group's dimensions, or DIM_one */
    int8_t order[MAX_DIMS]; /* positions in dims from the outermost in memory inwards */
    /* Equal parts of one result lie side by side along a dimension of it. The first output of them
     * stands for the whole, the others name it. */
    int16_t into = -1;
    int8_t along = -1;
    int16_t part = 0, parts = 1;
    /* Parts of any sizes have an offset instead, an input. The whole is an input that is written, or
     * the first output of its parts in this program, which has its size along the dimension. */
    int16_t whole = -1, total = -1, offset = -1;
    bool allocated() const { return into < 0 && whole < 0; }
};

struct Program {
    int rank;
    std::vector<Input> inputs;
    std::vector<Node> nodes;
    std::vector<Output> outputs;
    /* An error message, or nothing. */
    std::string verify() const;
};

enum : int { MAX_NODES = 224, MAX_INPUTS = 64, MAX_OUTPUTS = 32 };

/* An input of one call. */
struct Given {
    char *data;
    const int64_t *sizes, *strides;
    int64_t integer;
    double number;
};

struct Shape {
    int64_t sizes[MAX_DIMS], strides[MAX_DIMS]; /* strides in elements */
    int64_t offset;                             /* of what is written within it, in bytes */
};

/* A part of a fused operator's work: of up to two loops, the range that one call computes. Its results
 * are written to their places within the whole. */
struct Window {
    int n = 0;
    int loop[2];
    int64_t first[2], count[2], total[2];
    __attribute__((always_inline)) int64_t total_of(int d, int64_t size) const
    {
        for (int i = 0; i < n; i++) {
            if (loop[i] == d) {
                return total[i];
            }
        }
        return size;
    }
    __attribute__((always_inline)) int64_t first_of(int d) const
    {
        for (int i = 0; i < n; i++) {
            if (loop[i] == d) {
                return first[i];
            }
        }
        return 0;
    }
};

struct Code {
    Header header;
    Slot slots[MAX_SLOTS];
    /* Strides in bytes of the dimensions that tiles enumerate, then of those that steps do. Apart from
     * the slots, since most programs have no such dimensions: encoding is bound by cache misses. */
    int64_t outer[MAX_SLOTS][MAX_DIMS];
    uint64_t constants[MAX_CONSTANTS];
    uint64_t words[8 * MAX_SLOTS];
    Shape outputs[MAX_OUTPUTS];
    bool empty; /* nothing to compute: some size is 0 */
    int cores;  /* that are worth while */
    bool ahead; /* whether memory is asked for before it is wanted */
    bool streams; /* whether large results pass by the caches */
};

struct Machine {
    int threads;
    int64_t local_bytes; /* of a core: what a tile may take */
    int64_t step_bytes;  /* what a step's blocks may take */
    int64_t grain;       /* elements below which a second core does not pay */
    int64_t cached_bytes; /* a program that moves more does not find them in the caches */
};

/* Memory that the calling thread keeps for its next program, on huge pages where the kernel has them:
 * encoding is short enough to be bound by walks through page tables. */
enum Purpose { FOR_code, FOR_encoder };
void *thread_memory(Purpose purpose, size_t bytes);

/* Ask for cache lines, all at once. A call of it would be dropped, since it changes nothing. */
__attribute__((always_inline)) inline void fetch_lines(const void *first, size_t bytes,
                                                       size_t step = 64)
{
    for (size_t at = 0; at < bytes; at += step) {
        __builtin_prefetch((const char *)first + at);
    }
}

/* Bring the encoder's own code and its working memory into the caches. */
void fetch_encoder(const Program &program);

/* Shapes, tiles and bytecode of one instance; nothing is allocated. Returns an error message (a
 * literal) or nullptr. Arguments of the code are the program's inputs, then its outputs. */
const char *encode(const Program &program, const Given *given, const Machine &machine, Code &code,
                   const Window &window = {});

/* What is wrong with a program of bytecode, or nullptr. extents: bytes before and after each
 * argument's address that belong to it. */
struct Extent {
    int64_t low, high;
};
const char *verify(const Code &code, const Extent *extents, int n_arguments);

/* Runs the tiles of a program on its cores: 0, or what went wrong. */
enum : int { OUT_OF_BOUNDS = 1, NO_MEMORY = 2, ZERO_DIVISOR = 4 };
int execute(const Code &code, char *const *arguments);

/* A program that is ready to run. */
struct Ready {
    const Code *code;
    char *const *arguments;
};

/* Runs programs that do not depend on one another (DVM, Figure 9): in space, each core taking an even
 * share of all their work, and in time, one core taking several of them in turn. */
enum : int { MAX_STACK = 8 };
int execute_stacked(const Ready *stack, int n, int cores);

/* Calls body(data, core, cores) on each of so many cores. */
void on_cores(int cores, void (*body)(void *, int64_t core, int64_t cores), void *data);

/* Looks up torch's OpenMP runtime; its threads belong to the process that calls this. */
void find_runtime();

const Kernels &kernels();

} // namespace magjit_dvm

#endif
