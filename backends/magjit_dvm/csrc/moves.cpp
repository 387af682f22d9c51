/* Where values are, and the instructions that move them. */
#include <emmintrin.h>

#include <algorithm>
#include <cstdlib>

#include "core.h"

namespace magjit_dvm {

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

namespace {

/* Whole lines past the caches: they need not be fetched before they are written. */
void stream(char *to, const char *from, int64_t n)
{
    int64_t head = std::min<int64_t>(n, -(intptr_t)to & 63);
    memcpy(to, from, (size_t)head);
    int64_t i = head;
    for (; i + 64 <= n; i += 64) {
        __m128i line[4];
        memcpy(line, from + i, 64);
        for (int k = 0; k < 4; k++) {
            _mm_stream_si128((__m128i *)(to + i) + k, line[k]);
        }
    }
    memcpy(to + i, from + i, (size_t)(n - i));
}

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

} // namespace

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

namespace {

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

} // namespace

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

namespace {

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

} // namespace

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
        if (!load && tile && part > 0) {
            break; /* the same as the first of the team writes */
        }
        int s = load ? insn.a : insn.dst;
        const Slot &slot = code.slots[s];
        const State &block = state[load ? insn.dst : insn.a];
        if (!load && !tile && code.streams && slot.col == size && n_cols * size >= SHORTEST_STREAM &&
            block.cs) {
            char *to = at_step(slot, s);
            for (int64_t r = 0; r < n_rows; r++) {
                stream(to + r * slot.row, block.p + r * block.rs, n_cols * size);
            }
            break;
        }
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

} // namespace magjit_dvm
