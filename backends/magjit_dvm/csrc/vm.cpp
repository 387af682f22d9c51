/* The virtual machine (DVM, Algorithm 2): each core decodes the bytecode for its share of tiles. */
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "divisors.h"
#include "program.h"

namespace magjit_dvm {

const Kernels &kernels()
{
    static const Kernels &chosen = [&]() -> const Kernels & {
        const char *wanted = std::getenv("MAGJIT_DVM_LEVEL"); /* for tests of the lower ones */
        int most = wanted ? std::atoi(wanted) : 4;
        if (most >= 4 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512cd")) {
            return kernels_v4();
        }
        if (most >= 3 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
            __builtin_cpu_supports("bmi2")) {
            return kernels_v3();
        }
        return kernels_base();
    }();
    return chosen;
}

namespace {

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
    int status = 0;               /* bits: see execute */

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

/* ---- addresses ---- */

char *Core::at_step(const Slot &slot, int s) const
{
    char *p = base[s];
    if (h.flat) {
        return p + col * slot.col;
    }
    p += row * slot.row + col * slot.col;
    for (int i = h.n_outer; i < h.n_outer + h.n_inner; i++) {
        p += index[i] * code.outer[s][i];
    }
    return p;
}

/* A block of the step, or the tile's own dimension. */
char *Core::block_of(const Slot &slot, int s, bool tile) const
{
    int64_t first = h.reduces == REDUCES_columns ? tile_row : tile_col;
    return tile ? base[s] + first * slot.col : at_step(slot, s);
}

/* Where the values of a slot are for this step. */
void Core::bind(int s)
{
    const Slot &slot = code.slots[s];
    State &st = state[s];
    int64_t size = DTYPE_BYTES[slot.dtype];
    switch (slot.kind) {
    case SLOT_global:
        st.p = at_step(slot, s);
        st.rs = h.flat ? 0 : slot.row;
        st.cs = slot.col == size;
        break;
    case SLOT_tile:
        if (h.reduces == REDUCES_columns) {
            st = {local + slot.local + (row - tile_row) * size, size, 0};
        } else {
            st = {local + slot.local + (col - tile_col) * size, 0, 1};
        }
        break;
    case SLOT_kept:
        if (h.reduces == REDUCES_columns) {
            int64_t length = h.inner_steps() * h.cols;
            st = {local + slot.local +
                      ((row - tile_row) * length + inner_index * h.cols + col) * size,
                  length * size, 1};
        } else {
            st = {local + slot.local +
                      ((inner_index * h.rows + row) * tile_cols + (col - tile_col)) * size,
                  tile_cols * size, 1};
        }
        break;
    default: break;
    }
}

void Core::enter_prologue()
{
    for (int s = 0; s < h.n_slots; s++) {
        if (code.slots[s].kind == SLOT_tile) {
            state[s] = {local + code.slots[s].local, 0, 1};
        }
    }
}

/* Blocks of local memory are as wide as the step. */
void Core::enter_step()
{
    for (int s = 0; s < h.n_slots; s++) {
        const Slot &slot = code.slots[s];
        if (slot.kind == SLOT_step) {
            int64_t size = DTYPE_BYTES[slot.dtype];
            bool wide = slot.shape & SHAPE_COLS;
            state[s].rs = slot.shape & SHAPE_ROWS ? (wide ? cols * size : size) : 0;
            state[s].cs = wide;
        }
    }
}

/* ---- memory instructions ---- */

template <class T>
void copy_view(char *global, int64_t row, int64_t col, char *block, int64_t rs, int64_t cs,
               int64_t rows, int64_t cols, bool load)
{
    /* The inner loop goes along the smaller stride of the view. */
    bool swap = rows > 1 && std::abs(row) < std::abs(col);
    int64_t n = swap ? cols : rows, m = swap ? rows : cols;
    int64_t g_out = swap ? col : row, g_in = swap ? row : col;
    int64_t b_out = swap ? cs : rs, b_in = swap ? rs : cs;
    for (int64_t i = 0; i < n; i++) {
        char *g = global + i * g_out, *b = block + i * b_out;
        if (load && g_in == (int64_t)sizeof(T) && b_in == (int64_t)sizeof(T)) {
            memcpy(b, g, (size_t)m * sizeof(T));
        } else if (!load && g_in == (int64_t)sizeof(T) && b_in == (int64_t)sizeof(T)) {
            memcpy(g, b, (size_t)m * sizeof(T));
        } else if (load) {
            for (int64_t j = 0; j < m; j++) {
                *(T *)(b + j * b_in) = *(const T *)(g + j * g_in);
            }
        } else {
            for (int64_t j = 0; j < m; j++) {
                *(T *)(g + j * g_in) = *(const T *)(b + j * b_in);
            }
        }
    }
}

void copy_bytes(int size, char *global, int64_t row, int64_t col, char *block, int64_t rs,
                int64_t cs, int64_t rows, int64_t cols, bool load)
{
    switch (size) {
    case 1: return copy_view<uint8_t>(global, row, col, block, rs, cs, rows, cols, load);
    case 2: return copy_view<uint16_t>(global, row, col, block, rs, cs, rows, cols, load);
    case 4: return copy_view<uint32_t>(global, row, col, block, rs, cs, rows, cols, load);
    default: return copy_view<uint64_t>(global, row, col, block, rs, cs, rows, cols, load);
    }
}

/* A range of the flattened shape, by an odometer over its dimensions: in runs of the last two. */
void Core::flat_view(int s, char *block, bool load)
{
    const Slot &slot = code.slots[s];
    const int64_t *stride = code.outer[s];
    int n = h.n_outer, size = DTYPE_BYTES[slot.dtype];
    int64_t at[MAX_DIMS], rest = col, left = cols;
    char *global = arguments[slot.argument];
    for (int i = n - 1; i >= 0; i--) {
        at[i] = rest % h.outer[i];
        rest /= h.outer[i];
        global += at[i] * stride[i];
    }
    int64_t inner = h.outer[n - 1], inner_stride = stride[n - 1];
    while (left > 0) {
        int64_t rows_now = 1, cols_now = std::min(left, inner - at[n - 1]);
        if (at[n - 1] == 0 && cols_now == inner) {
            rows_now = std::min(left / inner, h.outer[n - 2] - at[n - 2]);
        }
        copy_bytes(size, global, stride[n - 2], inner_stride, block, cols_now * size, size,
                   rows_now, cols_now, load);
        int64_t done = rows_now * cols_now;
        block += done * size;
        left -= done;
        at[n - 1] += cols_now;
        global += cols_now * inner_stride;
        if (at[n - 1] == inner) {
            global -= inner * inner_stride;
            at[n - 1] = 0;
            at[n - 2] += rows_now;
            global += rows_now * stride[n - 2];
            for (int i = n - 2; i > 0 && at[i] == h.outer[i]; i--) {
                global -= at[i] * stride[i];
                at[i] = 0;
                at[i - 1]++;
                global += stride[i - 1];
            }
        }
    }
}

/* Elements at positions; false if one is out of bounds. */
template <class T, class I>
bool copy_elements(const char *table, int64_t col, int64_t stride, int64_t limit, const I *at,
                   char *to, int64_t n)
{
    T *out = (T *)to;
    for (int64_t i = 0; i < n; i++) {
        if (at[i] < 0 || at[i] >= limit) {
            return false;
        }
        out[i] = *(const T *)(table + i * col + at[i] * stride);
    }
    return true;
}

template <class I>
bool copy_rows(int size, const char *table, int64_t row, int64_t col, int64_t stride, int64_t limit,
               const State &positions, const State &to, int64_t rows, int64_t cols)
{
    auto *elements = size == 8   ? copy_elements<uint64_t, I>
                     : size == 4 ? copy_elements<uint32_t, I>
                     : size == 2 ? copy_elements<uint16_t, I>
                                 : copy_elements<uint8_t, I>;
    for (int64_t r = 0; r < rows; r++) {
        const I *at = (const I *)(positions.p + r * positions.rs);
        const char *from = table + r * row;
        char *out = to.p + r * to.rs;
        if (!positions.cs) {
            int64_t i = at[0];
            if (i < 0 || i >= limit) {
                return false;
            }
            copy_bytes(size, (char *)from + i * stride, 0, col, out, 0, size, 1, cols, true);
            continue;
        }
        if (!elements(from, col, stride, limit, at, out, cols)) {
            return false;
        }
    }
    return true;
}

void Core::index_load(const Insn &insn, int64_t n_rows, int64_t n_cols)
{
    const Slot &slot = code.slots[insn.a];
    int64_t stride = (int64_t)code.constants[insn.c], limit = (int64_t)code.constants[insn.c + 1];
    const char *table = block_of(slot, insn.a, insn.shape & SHAPE_TILE);
    int size = DTYPE_BYTES[insn.dtype];
    const State &at = state[insn.b], &to = state[insn.dst];
    auto *copy = insn.aux == DT_i32 ? copy_rows<int32_t> : copy_rows<int64_t>;
    bool fine = copy(size, table, slot.row, slot.col, stride, limit, at, to, n_rows, n_cols);
    status |= fine ? 0 : OUT_OF_BOUNDS;
}

uint64_t identity_of(int op, int dtype)
{
    uint64_t bits = 0;
    auto put = [&](auto value) { memcpy(&bits, &value, sizeof(value)); };
    bool largest = op == OP_min;
    if (op == OP_sum || op == OP_prod) {
        int one = op == OP_prod;
        switch (dtype) {
        case DT_f64: put((double)one); break;
        case DT_f32: put((float)one); break;
        default: put((int64_t)one);
        }
        return bits;
    }
    switch (dtype) {
    case DT_f32: put(largest ? std::numeric_limits<float>::infinity()
                             : -std::numeric_limits<float>::infinity()); break;
    case DT_f64: put(largest ? std::numeric_limits<double>::infinity()
                             : -std::numeric_limits<double>::infinity()); break;
    case DT_i64: put(largest ? std::numeric_limits<int64_t>::max()
                             : std::numeric_limits<int64_t>::lowest()); break;
    case DT_i32: put(largest ? std::numeric_limits<int32_t>::max()
                             : std::numeric_limits<int32_t>::lowest()); break;
    case DT_u8: put((uint8_t)(largest ? 255 : 0)); break;
    default: put((uint8_t)(largest ? 1 : 0));
    }
    return bits;
}

void Core::memory(const Insn &insn)
{
    bool tile = insn.shape & SHAPE_TILE;
    int64_t n_rows = !tile && insn.shape & SHAPE_ROWS ? rows : 1;
    int64_t n_cols = tile ? tile_length() : insn.shape & SHAPE_COLS ? cols : 1;
    int size = DTYPE_BYTES[insn.dtype];
    switch (insn.op) {
    case OP_load:
    case OP_store: bind(insn.dst); break;
    case OP_view_load:
    case OP_view_store: {
        bool load = insn.op == OP_view_load;
        int s = load ? insn.a : insn.dst;
        const Slot &slot = code.slots[s];
        const State &block = state[load ? insn.dst : insn.a];
        if (h.flat) {
            flat_view(s, block.p, load);
            break;
        }
        copy_bytes(size, block_of(slot, s, tile), slot.row, slot.col, block.p, block.rs,
                   block.cs * size, n_rows, n_cols, load);
        break;
    }
    case OP_index_load: index_load(insn, n_rows, n_cols); break;
    case OP_iota: {
        const State &to = state[insn.dst];
        /* The tile's own dimension lies along the columns of a prologue's block. */
        bool by_column = tile ? insn.aux == 1 || insn.aux == 2 : insn.aux == 2;
        bool by_row = !tile && insn.aux == 1;
        int64_t first = tile              ? (h.reduces == REDUCES_columns ? tile_row : tile_col)
                        : insn.aux == 1 ? row
                                        : col;
        first = by_row || by_column ? first : insn.aux ? index[insn.aux - 3] : 0;
        for (int64_t r = 0; r < n_rows; r++) {
            int64_t *out = (int64_t *)(to.p + r * to.rs), start = first + by_row * r;
            for (int64_t c = 0; c < n_cols; c++) {
                out[c] = start + by_column * c;
            }
        }
        break;
    }
    case OP_one_hot: {
        const State &to = state[insn.dst], &at = state[insn.a];
        for (int64_t r = 0; r < n_rows; r++) {
            int64_t place = *(const int64_t *)(at.p + r * at.rs);
            memset(to.p + r * to.rs, 0, (size_t)n_cols);
            if (place >= col && place < col + n_cols) {
                to.p[r * to.rs + place - col] = 1;
            }
        }
        break;
    }
    case OP_fill: {
        uint64_t bits = identity_of(insn.aux, insn.dtype);
        State one{(char *)&bits, 0, 0};
        k.op[OP_copy][insn.dtype](state[insn.dst], one, one, one, 1, n_cols);
        break;
    }
    case OP_finish: {
        const State &from = state[insn.a];
        k.cast[insn.aux][insn.dtype](state[insn.dst], from, from, from, 1, n_cols);
        break;
    }
    default: break;
    }
}

/* ---- decoding ---- */

/* One column is a row, where its elements follow one another: the operands seen so. */
bool Core::turn(const Insn &insn, State *turned) const
{
    int64_t size = DTYPE_BYTES[insn.dtype];
    uint16_t slots[4] = {insn.dst, insn.a, insn.b, insn.c};
    for (int k = 0; k < 4; k++) {
        if (slots[k] == NO_SLOT) {
            turned[k] = turned[1];
            continue;
        }
        const State &s = state[slots[k]];
        bool own = k == 0 || (k == 1 && (insn.op == OP_cast || insn.op == OP_select));
        int64_t step = own ? DTYPE_BYTES[code.slots[slots[k]].dtype] : size;
        if (s.rs != step && s.rs != 0) {
            return false;
        }
        turned[k] = {s.p, 0, s.rs == step};
    }
    return true;
}

void Core::run_block(uint32_t from, uint32_t to)
{
    const uint64_t *words = code.words;
    for (uint32_t at = from; at < to;) {
        const Insn &insn = *(const Insn *)&words[at];
        at += insn.length;
        OpKind kind = OPS[insn.op].kind;
        if (kind == KIND_memory) {
            memory(insn);
            continue;
        }
        bool tile = insn.shape & SHAPE_TILE;
        int64_t n_rows = !tile && insn.shape & SHAPE_ROWS ? rows : 1;
        int64_t n_cols = tile ? tile_length() : insn.shape & SHAPE_COLS ? cols : 1;
        /* By reference: a copy would read with one wide load what `bind` has just written in parts,
         * which the processor cannot forward. */
        const State *d = &state[insn.dst], *a = &state[insn.a];
        const State *b = insn.b == NO_SLOT ? a : &state[insn.b];
        const State *c = insn.c == NO_SLOT ? a : &state[insn.c];
        State turned[4];
        if (n_cols == 1 && n_rows > 1 && kind < KIND_reduce && turn(insn, turned)) {
            d = &turned[0], a = &turned[1], b = &turned[2], c = &turned[3];
            std::swap(n_rows, n_cols);
        }
        Kernel kernel = insn.op == OP_cast ? k.cast[insn.aux][insn.dtype]
                        : kind == KIND_reduce && h.reduces == REDUCES_rows
                            ? k.along_rows[insn.op][insn.dtype]
                            : k.op[insn.op][insn.dtype];
        if (divides(insn) && any_zero(insn.dtype, *b, n_rows, n_cols)) {
            status |= ZERO_DIVISOR; /* kernels themselves survive it */
        }
        kernel(*d, *a, *b, *c, n_rows, n_cols);
    }
}

void Core::run_steps(const Phase &phase)
{
    if (phase.step == phase.end) {
        return;
    }
    int64_t inner = h.inner_steps();
    int64_t last_cols = -1;
    for (row = tile_row; row < tile_row + tile_rows; row += phase.step_rows) {
        rows = std::min(phase.step_rows, tile_row + tile_rows - row);
        for (inner_index = 0; inner_index < inner; inner_index++) {
            int64_t rest = inner_index;
            for (int i = h.n_outer + h.n_inner - 1; i >= h.n_outer; i--) {
                index[i] = rest % h.outer[i];
                rest /= h.outer[i];
            }
            for (col = tile_col; col < tile_col + tile_cols; col += phase.step_cols) {
                cols = std::min(phase.step_cols, tile_col + tile_cols - col);
                if (cols != last_cols) {
                    enter_step();
                    last_cols = cols;
                }
                run_block(phase.step, phase.end);
            }
        }
    }
}

void Core::run_tile()
{
    for (int p = 0; p < h.n_phases; p++) {
        const Phase &phase = h.phases[p];
        if (phase.prologue != phase.step) {
            enter_prologue();
            run_block(phase.prologue, phase.step);
        }
        run_steps(phase);
    }
}

void Core::run(int64_t first, int64_t last)
{
    int64_t row_tiles = (h.rows + h.tile_rows - 1) / h.tile_rows;
    int64_t col_tiles = (h.cols + h.tile_cols - 1) / h.tile_cols;
    for (int64_t tile = first; tile < last; tile++) {
        int64_t rest = tile;
        tile_col = rest % col_tiles * h.tile_cols;
        rest /= col_tiles;
        tile_row = rest % row_tiles * h.tile_rows;
        rest /= row_tiles;
        for (int i = h.n_outer - 1; i >= 0 && !h.flat; i--) {
            index[i] = rest % h.outer[i];
            rest /= h.outer[i];
        }
        tile_rows = std::min(h.tile_rows, h.rows - tile_row);
        tile_cols = std::min(h.tile_cols, h.cols - tile_col);
        row = tile_row;
        col = tile_col;
        inner_index = 0;
        for (int i = h.n_outer; i < h.n_outer + h.n_inner; i++) {
            index[i] = 0;
        }
        for (int s = 0; s < h.n_slots; s++) {
            const Slot &slot = code.slots[s];
            if (slot.kind == SLOT_global) {
                char *p = arguments[slot.argument];
                for (int i = 0; i < h.n_outer && !h.flat; i++) {
                    p += index[i] * code.outer[s][i];
                }
                base[s] = p;
            }
        }
        run_tile();
    }
}

/* ---- cores ---- */

/* Local memory of the calling thread, kept for its next program. */
struct Local {
    char *memory = nullptr;
    size_t size = 0;
    char *at_least(size_t want)
    {
        if (want > size) {
            std::free(memory);
            size = (want + 4095) / 4096 * 4096;
            memory = (char *)std::aligned_alloc(4096, size);
            if (!memory) {
                size = 0;
            }
        }
        return memory;
    }
    ~Local() { std::free(memory); }
};
thread_local Local local_memory;

struct Arena {
    char *memory = nullptr;
    ~Arena() { std::free(memory); }
};
thread_local Arena arena;

/* torch's own OpenMP runtime, by name: another one would mean another pool of threads. */
struct Runtime {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = nullptr;
    int (*thread_number)() = nullptr;
    int (*thread_count)() = nullptr;
    int (*in_parallel)() = nullptr;
    pid_t process = 0;
    Runtime()
    {
        void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
        auto find = [&](const char *name) {
            void *found = library ? dlsym(library, name) : nullptr;
            return found ? found : dlsym(RTLD_DEFAULT, name);
        };
        parallel = (decltype(parallel))find("GOMP_parallel");
        thread_number = (decltype(thread_number))find("omp_get_thread_num");
        thread_count = (decltype(thread_count))find("omp_get_num_threads");
        in_parallel = (decltype(in_parallel))find("omp_in_parallel");
        process = getpid();
    }
    bool usable() const
    {
        /* The pool's threads do not live on in a forked child. */
        return parallel && thread_number && thread_count && in_parallel && process == getpid() &&
               !in_parallel();
    }
};

const Runtime &runtime()
{
    static const Runtime found;
    return found;
}

struct Job {
    const Code &code;
    char *const *arguments;
    int status; /* bits: see execute */
};

void run_share(Job &job, int64_t core, int64_t cores)
{
    const Header &h = job.code.header;
    int64_t share = (h.tiles + cores - 1) / cores;
    int64_t first = std::min(h.tiles, share * core), last = std::min(h.tiles, first + share);
    if (first >= last) {
        return;
    }
    char *memory = local_memory.at_least(h.local_bytes + 64);
    if (!memory) {
        __atomic_fetch_or(&job.status, NO_MEMORY, __ATOMIC_RELAXED);
        return;
    }
    Core machine(job.code, job.arguments, memory);
    machine.run(first, last);
    if (machine.status) {
        __atomic_fetch_or(&job.status, machine.status, __ATOMIC_RELAXED);
    }
}

void run_on_core(void *data)
{
    run_share(*(Job *)data, runtime().thread_number(), runtime().thread_count());
}

} // namespace

void find_runtime() { (void)runtime(); }

void *thread_memory(Purpose purpose, size_t bytes)
{
    constexpr size_t HUGE_PAGE = (size_t)2 << 20, SHARE = HUGE_PAGE / 2;
    if (!arena.memory) {
        arena.memory = (char *)std::aligned_alloc(HUGE_PAGE, HUGE_PAGE);
        if (!arena.memory) {
            return nullptr;
        }
        (void)madvise(arena.memory, HUGE_PAGE, MADV_HUGEPAGE);
    }
    return bytes <= SHARE ? arena.memory + (purpose == FOR_code ? 0 : SHARE) : nullptr;
}

int execute(const Code &code, char *const *arguments)
{
    Job job{code, arguments, 0};
    int64_t cores = std::min<int64_t>(code.cores, code.header.tiles);
    if (cores > 1 && runtime().usable()) {
        runtime().parallel(run_on_core, &job, (unsigned)cores, 0);
    } else {
        run_share(job, 0, 1);
    }
    return job.status;
}

} // namespace magjit_dvm
