/* The encoder for NVIDIA GPUs: a fused operator and its arguments to the words of one launch. It does
 * what cuda/encode.py does in the same order, bit by bit:
 * cuda_prepare.cpp what the program alone says; cuda_shapes.cpp sizes and places in memory;
 * cuda_tiling.cpp squares for what lies in memory otherwise than results;
 * cuda_plan.cpp how a launch divides its work, cuda_anew.cpp once words are known, cuda_machine.cpp where
 * it has places; cuda_values.cpp what values are, and numbers;
 * cuda_ranges.cpp which int64 32 bits hold; cuda_tables.cpp positions, and what is looked up at them;
 * cuda_weights.cpp vectors that all rows share; cuda_batches.cpp what is done for many rows at once;
 * cuda_sums.cpp sums across rows; cuda_adders.cpp warps that add them up; cuda_rows.cpp words of row
 * values; cuda_loads.cpp words that load; cuda_tiles.cpp words that compute tiles; cuda_encode.cpp passes,
 * and what is done with tiles; cuda_image.cpp the kernel's parameter. */
#ifndef MAGJIT_DVM_CUDA_ENCODER_H
#define MAGJIT_DVM_CUDA_ENCODER_H

#include <vector>

#include "cuda_words.h"

namespace magjit_dvm::cuda {

/* ---- a program, whatever its sizes ---- */

struct Fact {
    bool number, load, floating;
    bool constant_is_float;
    bool shorter;    /* by its short function */
    uint8_t input;   /* of a load */
    uint8_t loaded;  /* what it makes of elements; N_LOADED: there is no word */
    uint8_t stored;  /* how the value is stored; of int64, see Encoder::stored */
    uint8_t n_casts; /* what a cast does to registers */
    uint8_t casts[2];
    uint32_t varies; /* a load or a table: the dimensions of its input */
};

struct Prepared {
    const Program *program;
    std::vector<Fact> facts;
    std::vector<uint8_t> loads; /* inputs that are loaded, in order */
    std::vector<uint8_t> reads; /* those, and tables */
    bool reduces;               /* some node does */
    bool has_positions;         /* along dimensions, or tables */
    bool draws;                 /* random numbers */
};

/* `floats`: of each node, whether its number is a float. */
Prepared prepare(const Program &program, const char *floats);

/* ---- one call ---- */

struct Argument {
    uint64_t data;
    const int64_t *sizes, *strides;
    int64_t integer;
    double number;
    bool fits;     /* a tensor: of the program's dtype and rank */
    bool floating; /* a number: a float */
};

struct Device {
    int64_t multiprocessors, shared_bytes, widest;
};

enum Verdict : uint8_t {
    ENCODED,
    NOTHING, /* to compute */
    REFUSED, /* there are no words; see reason */
    LEFT     /* to the encoder in Python */
};

struct Patch { /* as words.py packs it */
    uint32_t at, argument;
    int64_t offset;
};
static_assert(sizeof(Patch) == 16, "as words.py packs it");

struct Sum { /* its argument; its dtype, as cuda/parts.py counts */
    int argument;
    uint32_t what;
};

struct Encoded {
    Verdict verdict;
    const char *reason;
    char text[96]; /* where a reason is not a literal */
    Shape layouts[MAX_OUTPUTS];
    int each;
    int64_t elements; /* of the whole */
    int64_t blocks, threads, shared_bytes;
    bool draws; /* blocks draw tiles from a counter: see Image.draws of words.py */
    Form form;  /* of the kernel that runs it by itself */
    bool few_rows; /* and long, encoded or refused: steps are faster, see cuda_split.cpp */
    int n_sums; /* across rows, of parts that a second kernel adds up */
    Sum sums[MOST_SUMS];
    int64_t parts_rows, parts_cols; /* of each sum, a row for each block */
    int n_bytes, n_patches;
    Patch patches[MAX_STAGED + MOST_WORDS + 3];
    alignas(16) char image[IMAGE_BYTES];
};

/* Words and layouts for these arguments; nothing is allocated. */
void encode(const Prepared &prepared, const Argument *given, const Device &machine,
            Encoded &encoded);

/* ---- its parts ---- */

struct Where { /* a descriptor's number, its argument, bytes from there */
    int descriptor, argument;
    int64_t offset;
};

struct Word {
    uint8_t first, second, x, y;
    bool described, staged; /* w1 is a descriptor's number, or is where a stage has the operand */
    bool kept;              /* w1, and w2 of `affine`, are numbers of vectors in shared memory */
    int16_t pointer;        /* an argument, or −1 */
    uint32_t w1, w2, w3;
    int64_t offset;

    void set_place(const Where &where)
    {
        described = true;
        w1 = (uint32_t)where.descriptor;
        pointer = (int16_t)where.argument;
        offset = where.offset;
    }
};

struct Operand {
    int64_t strides[MAX_PARTS]; /* bytes */
    int64_t offset;
    int32_t bound, step; /* of a table: its positions, the bytes between them */
    int16_t argument;
    uint8_t low, size; /* of the address modulo 16; bytes an element */
};

struct Stage {
    int16_t argument;
    uint8_t size;
    int64_t at;
    int32_t period; /* of what rows have one of, or all: the rows after which it comes again, or 0 */
};

constexpr int64_t LANES_OF_WARP = 32;

struct Image {
    int64_t each = 32, warps = 1, group = 1, lanes = LANES_OF_WARP, stages = 1, stage_bytes = 0;
    int64_t cols = 1, rows = 1, elements = 1, chunks = 1, tiles = 1, blocks = 1;
    bool by_rows = false;
    int n_first = 0, n_rest = 0, n_inputs = 0, n_words = 0, n_descriptors = 0, n_described = 0;
    uint32_t epilogue = NO_WORD, prologue = NO_WORD, tail = NO_WORD;
    int batched = 0; /* row registers that a batch has of each row */
    int numbers = 0, accumulators = 0, scratch = 0, weights = 0, sums = 0;
    int64_t adders = 0; /* warps, beside those that compute */
    int64_t fixed = 0, shift = 0; /* of tiles beside sums: see cuda/words.py */
    bool once = false;            /* rows are read once, if in chunks: see cuda/words.py */
    int64_t row_bytes = 0;        /* of rows in chunks, in a stage */
    bool keeps = false;           /* stages keep such rows until their last pass */
    int row_inputs = 0; /* the last of the inputs: they have an element for a row */
    int repeats = 0;    /* those before them, whole rows of which come again */
    int64_t barriers_at = 0, rows_at = 0, partials_at = 0, scratch_at = 0, ring_at = 0;
    int64_t weights_at = 0;
    int64_t shared_bytes = 0;
    uint16_t first[MAX_NODES + 2], rest[MAX_NODES + 2];
    Stage inputs[MAX_STAGED];
    Word words[MOST_WORDS + 2];
    struct {
        uint16_t at; /* of its first size */
        uint8_t n;
        int32_t bound, step, cols; /* of a table; cols where a position's elements are a row */
    } descriptors[MAX_DESCRIBED];
    struct {
        int32_t size, stride; /* bytes */
    } described[MAX_DESCRIBED];

    int64_t slice() const { return lanes * each; } /* elements of a warp, or of a row that it has */
    int64_t rows_of_tile() const { return warps * LANES_OF_WARP / (group * lanes); }
    int64_t weight_bytes() const { return 128 * each * group; } /* of a vector that is kept */
    int64_t program_bytes() const { return 16 * (n_words + n_descriptors + n_described); }
};

/* Of some dtype: one of floats is exact in a double, one of ints in 64 bits. */
struct Number {
    bool floating, known; /* not known: torch has to say */
    double real;
    int64_t integer;
};

/* Of an int64: what a register may have. */
struct Range {
    int64_t low, high;
    bool exact; /* it is the number itself, not the nearest int32 */
    bool between() const { return low > INT32_MIN && high < INT32_MAX; }
};

/* Of rsqrt(given / number + number). */
struct Scaled {
    int given, quotient, total;
};

/* Of the sum of x: (x − mean) · rsqrt(squares / columns + number). */
struct Normalized {
    int mean, squares, again, root, product;
    bool same; /* the difference that is squared is the one that is multiplied */
    int number;
};

/* Of the largest of x: exp(x − largest) · (1 / sum). */
struct Softmax {
    int total, inverse, product;
};

/* (x − mean) · root; of x · root, the mean is −1. */
struct Standardized {
    int x, mean, root;
};

/* (G − sum(G) · share − X · sum(G · X) · share) · root, X being normalized. */
struct NormBackward {
    int result, gradient, normalized;
    Standardized norm;
    uint32_t share;
    int n_folded, folded[4]; /* each share of a sum and that sum */
};

constexpr uint32_t NO_SLOT = ~0u; /* where a word adds to one sum alone */
constexpr uint32_t NONE = 255;    /* in the place of an input or a sum that there is not */
constexpr int64_t MOST_EACH = 32; /* R of a launch that keeps sums across rows in scratch memory */

/* Of a sum across rows: a tile times a norm; no tile where it is none. */
struct Product {
    int tile, normalized;
    Standardized norm;
};

/* Of a norm's gradients whose sums are added up: the dtype's number among those of columns, −1 where
 * they are something else; places of G and x in a stage; 8 bits each of the inputs that have mean and
 * root, and of the two sums. */
struct NormOfSums {
    int what = -1;
    uint8_t gradient = 0, x = 0;
    uint32_t inputs = 0, sums = 0;
};

struct Encoder {
    const Prepared &prepared;
    const Program &program;
    const Fact *facts;
    const Argument *given;
    const Device &machine;
    Encoded &encoded;
    Image image;

    bool crowded;         /* whole rows do not fit shared memory: they come in chunks */
    bool is_crowded = false; /* so it has turned out */

    Encoder(const Prepared &p, const Argument *g, const Device &m, Encoded &e, bool in_chunks)
        : prepared(p), program(*p.program), facts(p.facts.data()), given(g), machine(m), encoded(e),
          crowded(in_chunks)
    {
    }

    void run();
    int n_nodes() const { return (int)program.nodes.size(); }
    int n_inputs() const { return (int)program.inputs.size(); }
    int n_outputs() const { return (int)program.outputs.size(); }

    /* The first of these decides; what comes after it is not looked at. */
    bool stopped() const { return encoded.verdict != ENCODED; }
    void refuse(const char *reason);
    void refuse(const char *what, const char *name, const char *between, DType dtype);
    void leave();
    void multiply(int64_t &by, int64_t factor); /* leaves what overflows */

    /* cuda_shapes.cpp */
    void lay_out();
    void sizes();
    void masks();
    uint32_t present(int n) const;
    void reduces(int n);
    void input(int i);
    void place(int o);
    void order();
    bool contiguous(const Operand &one, uint32_t along = ~0u) const;
    int describe(const Operand &one, const int8_t *dims, int n, bool apart, int cols);
    int add_described(const int64_t *sizes, const int64_t *strides, int count, int32_t bound,
                      int32_t step, int32_t cols);
    void check_draws();
    Where placed_draw(const Node &node);
    bool over_nothing() const;

    /* cuda_tables.cpp */
    void rows_of_positions();
    int vectors_along(uint32_t columns, const Operand &like) const;
    void rows_of_vectors();
    void rows_of_numbers();
    bool fill_blocks(uint32_t columns) const;
    const Operand *whole_output() const;
    bool has_such_rows(uint32_t columns, const Operand &like) const;
    bool is_along(const Operand &one, uint32_t dims, const Operand &like) const;
    int dim_inside(int64_t elements, const Operand &like) const;
    int64_t elements_up_to(int64_t most) const;
    uint32_t dims_of_positions() const;
    bool has_rows(const Operand &one) const;
    Operand line(int d) const;
    void look_up(int n);
    void look_up_row_value(int n);

    /* cuda_ranges.cpp */
    void check_longs();
    void check_long(int n);
    void check_cast(int n);
    void check_test(const Node &node);
    Range range(int n);
    Range find_range(int n);
    Range reduced_range(const Node &node);
    Range computed_range(const Node &node);
    Range not_held();
    bool is_from_float(int n) const;

    /* cuda_tiling.cpp */
    void in_squares();
    bool is_near(const Operand &one) const;
    bool is_transposed(const Operand &one) const;
    bool in_steps(const Operand &one, const int8_t *dims, int n, int64_t step) const;
    int down_of(const Operand &one, int64_t lanes_rows) const;
    void divide_squares(int down, int across);

    /* cuda_plan.cpp */
    void arrange();
    bool varies_throughout(const Operand &one) const;
    int64_t repeats_of(const Operand &one) const;
    uint32_t rows_along(const Operand &one, int64_t &period) const;
    int64_t period_of(int number) const;
    void refuse_slow();
    void divide(int64_t widest, int64_t together);
    using MostWarps = int64_t(int64_t each); /* in a block */
    int64_t each_for_rows(int64_t wanted, int64_t together, MostWarps most) const;
    void arrange_once(MostWarps most);
    /* cuda_anew.cpp */
    int64_t arrange_beside_adders();
    bool arrange_gradients();
    bool computes_much(int64_t reductions) const;
    void arrange_anew();
    bool arrange_several();
    int64_t count_of(Use use) const;
    void arrange_norms();
    void arrange_chunks();
    void scale_scratch(int64_t each);
    bool divide_anew(int64_t each, int64_t most);
    /* cuda_machine.cpp */
    void count();
    bool may_shrink() const;
    void shrink();
    void measure(int64_t program_bytes);
    bool has_room(int weights);
    int64_t wanted_stages();
    bool keeps_rows();
    void fit();

    /* cuda_batches.cpp */
    void find_batches();
    bool is_of_any_row(int n) const;
    bool is_late_input(int number) const;
    void emit_late();
    bool is_known() const;
    bool has_registers() const;

    /* cuda_weights.cpp */
    bool make_room(int weights);
    void keep_weights();
    int weight_of(const Word &word, const Word *known, int n) const;
    int normalize_once(int n_words);

    /* cuda_adders.cpp */
    uint32_t input_of_register(int number) const;
    NormOfSums norm_of_sums(const Word &gradient, const Word &x, const Word &adds) const;
    int find_added_rows(Word &adds) const;
    void give_to_adders();

    /* cuda_gradients.cpp */
    int find_gradients(Word &whole) const;
    bool give_to_gradients();

    /* cuda_sums.cpp */
    bool goes_across(int n) const;
    int summed_as(int n) const;
    bool is_made_again(int n) const;
    void find_sums();
    int summed(int o) const;
    void add_up(int n);
    void sum_tile(int o);
    void place_parts();
    int64_t share_out();

    /* cuda_backwards.cpp */
    void find_factors(int n, int &tile, int &row) const;
    bool is_early(int n) const;
    bool find_standardized(int n, Standardized &found) const;
    bool is_made_for_one(int n, int op) const;
    bool share_of_sum(int n, int &total, uint32_t &share);
    bool find_norm_backward(int result, NormBackward &found);
    bool is_in_norm_backward(int n, NormBackward &found);
    Word &put_with_norm(uint8_t operation, const Standardized &norm);
    void put_norm_backward(const NormBackward &back);
    void find_products();
    bool has_products(int n) const;
    void add_up_products(int n, uint32_t joined);

    /* cuda_values.cpp */
    void survey();
    void find_phases();
    void find_online();
    int power_of(int total) const { return canonical[program.nodes[total].args[0]]; }
    bool has_tiles() const;
    bool is_read_once() const;
    void look_up_late();
    int sum_beyond(int n) const;
    bool comes_with_largest(int n) const { return online[n] >= 0 && online[n] < n; }
    int alias_of(int n) const;
    bool in_row(int n) const { return !(has[n] & (reduced ? reduced : ~0u)); }
    bool is_row_value(int n) const
    {
        return in_row(n) && canonical[n] == n && !folded[n] && !facts[n].number && uses[n] > 0;
    }
    int reduction(int n);
    bool is_difference(int n) const;
    bool below_largest(int n, int row) const;
    bool find_scaled(int n, Scaled &found) const;
    int squared(int n) const;
    int squares_about_mean(int n);
    bool find_normalized(int n, Normalized &found);
    bool find_softmax(int n, Softmax &found) const;
    bool computes(int n, int op) const;
    bool is_deviation(int root, int squares, int &number);
    bool is_mean(int mean, int total);
    int stored(int n) const;
    uint32_t bits(int n);
    uint32_t inverse_bits(int n);
    Number number(int n);

    /* cuda_encode.cpp, cuda_tiles.cpp, cuda_loads.cpp, and cuda_rows.cpp of row values */
    Word &put(Code first, uint8_t second);
    Word &put(Code first) { return put(first, words.nop); }
    void emit();
    void emit_pass(int pass, int passes);
    void ask_ahead();
    int count_passes() const;
    bool is_reduced(int n) const;
    void forget(int pass);
    void count_uses(int n);
    void uncount(int n);
    void emit_row_value(int n);
    void find_row_value(int n);
    void load_row_value(int n);
    bool by_scalar_word(int n);
    bool with_number(int n);
    bool number_word(int n, uint8_t &first, uint8_t &second) const;
    bool cast_by_scalar_word(int n);
    bool scalar_word(int n, bool number, bool turned, uint8_t &first, uint8_t &second) const;
    void put_scaled_rsqrt(int n, const Scaled &parts);
    int register_of(int n);
    void find_number(int n);
    int new_register(int n);
    bool is_over(int n, const bool *made) const;
    Where row_view(const Operand &one, int cols = 0);
    Where viewed(const Operand &one, const int8_t *dims, int n, bool apart = false, int cols = 0);
    void store_row(int o);
    bool available(int n) const, is_made(int n) const;
    void bring(int n, Bank bank, Code operation, int y = 0);
    void bring_load(int n, Bank bank, uint8_t second, int y = 0);
    Way way_of(int number, Where &where);
    bool by_four() const { return !image.by_rows || image.cols % 4 == 0; } /* no row ends within four elements */
    bool in_fours(const Operand &one, const Where &where) const;
    bool of_columns(const Operand &one) const;
    void give_up(int more = 0);
    void keep(int n);
    void done_with(int n);
    void save(int n);
    void generate(int n);
    void compute(int n);
    void compute_operator(int n);
    void run_along(int n);
    void compute_binary(const Operators &op, int left, int right);
    int scaled_by_row(const Operators &op, int x, int y) const;
    void add_scaled(bool subtracts, int x, int product);
    void apply(Code plain, uint8_t immediate, int y);
    void put_immediate(uint8_t op, uint32_t number);
    void compute_select(const Node &node);
    void emit_reduce(int n);
    void reduce_row(int n);
    void normalize(int n, const Normalized &parts);
    void store_tile(int o);
    int stage_of(int number) const;

    /* cuda_image.cpp */
    void pack();
    Form form() const;
    int uses_of_all(bool but_rows = false) const; /* of the operators */
    void pack_header();
    void pack_words();

    int64_t size[MAX_PARTS];
    int64_t each_of_squares = 0; /* R, where the space is divided into squares; otherwise 0 */
    uint32_t active = 0, reduced = 0; /* dimensions of a size other than 1; those reduced */
    uint32_t rows_summed = 0;         /* those that sums go across */
    int n_order = 0, n_kept = 0;
    int8_t dims_in_order[MAX_PARTS]; /* active ones from the outermost inwards: kept, then reduced */
    bool empty = false, chunked = false;
    Operand inputs[MAX_INPUTS], outputs[MAX_OUTPUTS];

    uint32_t has[MAX_NODES];
    Range ranges[MAX_NODES]; /* of int64, where it is known */
    bool ranged[MAX_NODES];
    int16_t canonical[MAX_NODES];
    uint8_t phase[MAX_NODES]; /* reductions before it */
    int16_t online[MAX_NODES]; /* of the largest of a row, the sum that is found with it; of that sum,
                                * the largest; −1: none */
    int32_t uses[MAX_NODES], left[MAX_NODES];
    int8_t row_register[MAX_NODES], accumulator[MAX_NODES]; /* −1: none */
    int16_t slot[MAX_NODES];                                /* in scratch memory; −1: not saved */
    Product products[MOST_SUMS];
    int16_t pending[MOST_SUMS]; /* of each sum, what it is of; −1 once that has been added */
    bool folded[MAX_NODES]; /* row values that are part of another's word */
    bool emitted[MAX_NODES], given_away[MAX_NODES]; /* found; of which others have the registers */
    bool batches = false;    /* whether there may be a tail */
    bool late[MAX_NODES];    /* row values that it makes */
    int held = -1;                                          /* the value that A has; −1: none */
    int n_saved = 0, n_free = 0;
    int16_t saved[MAX_NODES], free_slots[MOST_WORDS + 2]; /* in the order of saving, of freeing */
};

} // namespace magjit_dvm::cuda

#endif
