"""Kernels of sums of channels that lie side by side: see ``channel_sums.py``."""

from __future__ import annotations

__all__ = [
    "CHANNELS",
    "CHANNELS_NAMES",
    "COLUMNS",
    "LOADED",
    "MOST_BLOCKS",
    "MOST_GROUPS",
    "THREADS",
    "channels_source",
]

CHANNELS = 2
"""What stands for these kernels in the place of R; the form says which of them."""
CHANNELS_NAMES = (
    "mj_dvm_channel_moments",
    "mj_dvm_channel_moments_end",
    "mj_dvm_channel_gradients",
    "mj_dvm_channel_gradients_end",
)
THREADS, MOST_GROUPS = 512, 64
"""Of a block; and the most columns that it has, in groups of 16 bytes."""
MOST_BLOCKS, COLUMNS = 1088, 8
"""Of blocks, of the first launch, that have the same columns; of columns that one of the second has
all of: 64 threads add each up."""
LOADED = (4, 2)
"""Rows that a thread of both kernels has under way at once."""

_COMMON = r"""
typedef unsigned u32;
typedef unsigned long long u64;
#define DEV static __device__ __forceinline__
#define NO_COLUMN 0xffffffffu

/* A matrix of `rows` by `cols`; a block has `groups` columns of 16 bytes, and steps of
 * `rows_of_step` rows, a thread one row of each. So many `across` have the same rows. `parts` has
 * two lines of columns for each block of a column's. */
struct Channels {
    u64 x, g, y, mean, parts;
    u32 rows, cols, groups, rows_of_step, across, what;
};
/* Of the second launch; `whats`, of float32 and so on: a byte for weight, bias, and running
 * statistics. Gradients have a mean where x is not about it. */
struct End {
    u64 parts, weight, bias, old_mean, old_var, mean, root;
    u64 scale, shift, slope, new_mean, new_var, of_weight, of_bias;
    u32 rows, cols, blocks, rows_of_step, whats;
    u32 full, rest; /* steps of all blocks; rows beyond them */
    float momentum, eps;
    u32 unused;
};
static_assert(sizeof(Channels) == 64 && sizeof(End) == 152, "as channel_sums.py packs them");

DEV void wait_for_launch()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void let_next_begin()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEV float from_half(u32 bits)
{
    float value;
    asm("{ .reg .b16 h, r; mov.b32 {h, r}, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
    return value;
}
DEV float one_of(u64 from, u32 what, u32 i)
{
    if (what == 0) {
        return ((const float *)from)[i];
    }
    const u32 bits = ((const unsigned short *)from)[i];
    return what == 1 ? from_half(bits) : __uint_as_float(bits << 16);
}
DEV void set_one(u64 to, u32 what, u32 i, float value)
{
    if (what == 0) {
        ((float *)to)[i] = value;
        return;
    }
    unsigned short half;
    if (what == 1) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    } else {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    }
    ((unsigned short *)to)[i] = half;
}

struct __align__(16) Quad { u32 w[4]; };
template <u32 WHAT> struct Of { static constexpr u32 N = WHAT ? 8 : 4; }; /* elements of 16 bytes */
DEV Quad quad_at(u64 from)
{
    Quad q;
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.w[0]), "=r"(q.w[1]), "=r"(q.w[2]), "=r"(q.w[3]) : "l"(from));
    return q;
}
template <u32 WHAT> DEV float element(const Quad &q, u32 i)
{
    if constexpr (WHAT == 0) {
        return __uint_as_float(q.w[i]);
    } else if constexpr (WHAT == 1) {
        return from_half(i & 1 ? q.w[i / 2] >> 16 : q.w[i / 2] & 0xffff);
    } else {
        return __uint_as_float(i & 1 ? q.w[i / 2] & 0xffff0000u : q.w[i / 2] << 16);
    }
}

/* What threads leave for one another: of each of their columns two numbers, and of each row one. */
struct Room { float first[512 * 8], second[512 * 8], counts[512]; };

/* Where a thread is: its columns, its row of a step, and whether it has any. */
struct Place {
    u32 group, row, first; /* of the block's columns; of a step's rows; the first column of all */
    bool is_there;
    u32 block, whole; /* among those of its columns; the column that the thread adds up, if any */
    u32 from, step; /* rows */
};
template <u32 N> DEV Place place_of(const Channels &c)
{
    const u32 group = threadIdx.x % c.groups, row = threadIdx.x / c.groups;
    const u32 block = blockIdx.x / c.across, before = N * c.groups * (blockIdx.x % c.across);
    const u32 first = before + N * group, whole = before + threadIdx.x;
    return {
        group, row, first, row < c.rows_of_step && first < c.cols, block,
        threadIdx.x < N * c.groups && whole < c.cols ? whole : NO_COLUMN,
        block * c.rows_of_step + row, gridDim.x / c.across * c.rows_of_step,
    };
}
/* The sum of a column over a step's rows, of what threads have left in shared memory. */
template <u32 N> DEV float down(const float *of, const Channels &c, u32 column)
{
    float sum = 0;
#pragma unroll 8
    for (u32 r = 0; r < c.rows_of_step; r++) {
        sum += of[r * c.groups * N + column];
    }
    return sum;
}

/* Of each column, the mean and the squares about it of a block's rows. Each thread has both about
 * its first row; then they are joined (Chan, Golub and LeVeque 1983). */
template <u32 WHAT, u32 LOADS> DEV void moments(const Channels &c, Room &room)
{
    constexpr u32 N = Of<WHAT>::N;
    float *const means = room.first, *const squares = room.second, *const counts = room.counts;
    const Place at = place_of<N>(c);
    const u64 row_bytes = (u64)c.cols * (WHAT ? 2 : 4);
    float shift[N], sum[N], square[N];
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        shift[i] = sum[i] = square[i] = 0;
    }
    u32 count = 0;
    wait_for_launch();
    if (at.is_there) {
        const u64 from = c.x + at.first * (WHAT ? 2 : 4);
#pragma unroll 1
        for (u32 row = at.from; row < c.rows; row += LOADS * at.step) {
            Quad q[LOADS];
            const u32 end = row + (LOADS - 1) * at.step;
#pragma unroll
            for (u32 k = 0; k < LOADS; k++) { /* beyond the last row, the first of these again */
                const u32 one = row + k * at.step;
                q[k] = quad_at(from + (end < c.rows || one < c.rows ? one : row) * row_bytes);
            }
            if (count == 0) {
#pragma unroll
                for (u32 i = 0; i < N; i++) {
                    shift[i] = element<WHAT>(q[0], i);
                }
            }
#pragma unroll
            for (u32 k = 0; k < LOADS; k++) {
                if (end < c.rows || row + k * at.step < c.rows) {
                    count++;
#pragma unroll
                    for (u32 i = 0; i < N; i++) {
                        const float d = element<WHAT>(q[k], i) - shift[i];
                        sum[i] += d;
                        square[i] += d * d;
                    }
                }
            }
        }
    }
    let_next_begin();
    const float share = count ? 1.0f / count : 0;
    const u32 own = (at.row * c.groups + at.group) * N;
    if (at.row < c.rows_of_step) {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            means[own + i] = shift[i] + sum[i] * share;
            squares[own + i] = square[i] - sum[i] * (sum[i] * share);
        }
        if (at.group == 0) {
            counts[at.row] = count;
        }
    }
    __syncthreads();
    const u32 column = threadIdx.x, wide = c.groups * N;
    if (at.whole == NO_COLUMN) {
        return;
    }
    float total = 0, mean = 0;
#pragma unroll 4
    for (u32 r = 0; r < c.rows_of_step; r++) {
        total += counts[r];
        mean += counts[r] * (means[r * wide + column] - means[column]);
    }
    mean = means[column] + (total > 0 ? mean / total : 0);
    float about = 0;
#pragma unroll 4
    for (u32 r = 0; r < c.rows_of_step; r++) {
        const float apart = means[r * wide + column] - mean;
        about += squares[r * wide + column] + counts[r] * apart * apart;
    }
    float *to = (float *)c.parts + (u64)2 * at.block * c.cols + at.whole;
    to[0] = mean;
    to[c.cols] = about;
}

/* Of each column, the sum of g and that of g · (x − mean); where y is 0 or less, g counts as 0. */
template <u32 WHAT, bool MASKED, u32 LOADS> DEV void gradients(const Channels &c, Room &room)
{
    constexpr u32 N = Of<WHAT>::N;
    float *const of_g = room.first, *const of_x = room.second;
    const Place at = place_of<N>(c);
    const u64 row_bytes = (u64)c.cols * (WHAT ? 2 : 4);
    float mean[N], plain[N], along[N];
    wait_for_launch();
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        mean[i] = at.is_there ? ((const float *)c.mean)[at.first + i] : 0;
        plain[i] = along[i] = 0;
    }
    if (at.is_there) {
        const u64 offset = at.first * (WHAT ? 2 : 4);
        const auto add = [&](const Quad &g, const Quad &x, const Quad &y) {
#pragma unroll
            for (u32 i = 0; i < N; i++) {
                float one = element<WHAT>(g, i);
                if (MASKED) {
                    one = element<WHAT>(y, i) <= 0 ? 0 : one;
                }
                plain[i] += one;
                along[i] += one * (element<WHAT>(x, i) - mean[i]);
            }
        };
#pragma unroll 1
        for (u32 row = at.from; row < c.rows; row += LOADS * at.step) {
            Quad g[LOADS], x[LOADS], y[LOADS];
            const u32 end = row + (LOADS - 1) * at.step;
#pragma unroll
            for (u32 k = 0; k < LOADS; k++) { /* beyond the last row, the first of these again */
                const u32 one = row + k * at.step;
                const u32 there = end < c.rows || one < c.rows ? one : row;
                const u64 from = offset + there * row_bytes;
                g[k] = quad_at(c.g + from);
                x[k] = quad_at(c.x + from);
                if (MASKED) {
                    y[k] = quad_at(c.y + from);
                }
            }
#pragma unroll
            for (u32 k = 0; k < LOADS; k++) {
                if (end < c.rows || row + k * at.step < c.rows) {
                    add(g[k], x[k], y[k]);
                }
            }
        }
    }
    let_next_begin();
    const u32 own = (at.row * c.groups + at.group) * N;
    if (at.row < c.rows_of_step) {
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            of_g[own + i] = plain[i];
            of_x[own + i] = along[i];
        }
    }
    __syncthreads();
    if (at.whole == NO_COLUMN) {
        return;
    }
    float *to = (float *)c.parts + (u64)2 * at.block * c.cols + at.whole;
    to[0] = down<N>(of_g, c, threadIdx.x);
    to[c.cols] = down<N>(of_x, c, threadIdx.x);
}

/* How many rows a block has had; none where there is no such block. */
DEV float rows_of(const End &e, u32 block)
{
    const u32 before = block * e.rows_of_step, more = e.rest > before ? e.rest - before : 0;
    const u32 rows = e.full * e.rows_of_step + (more < e.rows_of_step ? more : e.rows_of_step);
    return block < e.blocks ? (float)rows : 0;
}
/* A block has 8 columns, each of which 64 threads add up; all of them have the sum. */
DEV float over_blocks(float value, float (&room)[16][8])
{
    const u32 column = threadIdx.x & 7, warp = threadIdx.x / 32;
    value += __shfl_xor_sync(~0u, value, 8);
    value += __shfl_xor_sync(~0u, value, 16);
    __syncthreads();
    if ((threadIdx.x & 31) < 8) {
        room[warp][column] = value;
    }
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (u32 k = 0; k < 16; k++) {
        sum += room[k][column];
    }
    return sum;
}
/* Of a column, both lines of each 64th block from the thread's own on. */
struct Ends { float first[MOST_EACH], second[MOST_EACH]; };
DEV Ends ends_of(const End &e, u32 column, u32 part)
{
    Ends of;
    const float *from = (const float *)e.parts + (column < e.cols ? column : 0);
#pragma unroll
    for (u32 k = 0; k < MOST_EACH; k++) {
        const u32 block = part + 64 * k;
        const float *at = from + 2ull * e.cols * (block < e.blocks ? block : 0);
        of.first[k] = at[0];
        of.second[k] = at[e.cols];
    }
    return of;
}

"""

_KERNELS = (
    r"""
extern "C" __global__ void __launch_bounds__(512, 2) mj_dvm_channel_moments(
    const __grid_constant__ Channels c)
{
    __shared__ Room room;
    if (c.what == 0) {
        moments<0, AT_ONCE>(c, room);
    } else if (c.what == 1) {
        moments<1, AT_ONCE>(c, room);
    } else {
        moments<2, AT_ONCE>(c, room);
    }
}
""",
    r"""
extern "C" __global__ void __launch_bounds__(512) mj_dvm_channel_moments_end(
    const __grid_constant__ End e)
{
    __shared__ float room[16][8];
    const u32 column = 8 * blockIdx.x + (threadIdx.x & 7), part = threadIdx.x / 8;
    const u32 own = column < e.cols ? column : 0, of_running = e.whats >> 16;
    /* What was there before the first launch, which has waited for those in front of it. */
    const float weight = e.weight ? one_of(e.weight, e.whats & 255, own) : 1;
    const float bias = e.bias ? one_of(e.bias, e.whats >> 8 & 255, own) : 0;
    const float old_mean = e.new_mean ? one_of(e.old_mean, of_running, own) : 0;
    const float old_var = e.new_var ? one_of(e.old_var, of_running, own) : 0;
    wait_for_launch();
    let_next_begin();
    const Ends of = ends_of(e, column, part);
    /* Means are added up about one of them. */
    const float near = ((const float *)e.parts)[own];
    float mean = 0, about = 0;
#pragma unroll
    for (u32 k = 0; k < MOST_EACH; k++) {
        mean += rows_of(e, part + 64 * k) * (of.first[k] - near);
    }
    mean = near + over_blocks(mean, room) / (float)e.rows;
#pragma unroll
    for (u32 k = 0; k < MOST_EACH; k++) {
        const float d = of.first[k] - mean, rows = rows_of(e, part + 64 * k);
        about += rows > 0 ? of.second[k] + rows * d * d : 0;
    }
    about = over_blocks(about, room);
    if (part || column >= e.cols) {
        return;
    }
    const float var = about / (float)e.rows, root = rsqrtf(var + e.eps);
    ((float *)e.mean)[column] = mean;
    ((float *)e.root)[column] = root;
    ((float *)e.scale)[column] = root * weight;
    ((float *)e.shift)[column] = bias - mean * (root * weight);
    if (e.new_mean) {
        const float now = e.momentum * mean + (1 - e.momentum) * old_mean;
        set_one(e.new_mean, of_running, column, now);
    }
    if (e.new_var) {
        const float unbiased = about / (float)(e.rows - 1);
        const float now = e.momentum * unbiased + (1 - e.momentum) * old_var;
        set_one(e.new_var, of_running, column, now);
    }
}
""",
    r"""
extern "C" __global__ void __launch_bounds__(512, 2) mj_dvm_channel_gradients(
    const __grid_constant__ Channels c)
{
    __shared__ Room room;
    if (c.what == 0) {
        c.y ? gradients<0, true, AT_ONCE>(c, room) : gradients<0, false, AT_ONCE>(c, room);
    } else if (c.what == 1) {
        c.y ? gradients<1, true, AT_ONCE>(c, room) : gradients<1, false, AT_ONCE>(c, room);
    } else {
        c.y ? gradients<2, true, AT_ONCE>(c, room) : gradients<2, false, AT_ONCE>(c, room);
    }
}
""",
    r"""
extern "C" __global__ void __launch_bounds__(512) mj_dvm_channel_gradients_end(
    const __grid_constant__ End e)
{
    __shared__ float room[16][8];
    const u32 column = 8 * blockIdx.x + (threadIdx.x & 7), part = threadIdx.x / 8;
    const u32 own = column < e.cols ? column : 0, of_weight = e.whats & 255;
    /* What was there before the first launch, which has waited for those in front of it. */
    const float weight = e.weight ? one_of(e.weight, of_weight, own) : 1;
    const float root = ((const float *)e.root)[own];
    const float mean = e.mean ? ((const float *)e.mean)[own] : 0;
    wait_for_launch();
    let_next_begin();
    const Ends of = ends_of(e, column, part);
    float total = 0, along = 0;
#pragma unroll
    for (u32 k = 0; k < MOST_EACH; k++) {
        const bool is_there = part + 64 * k < e.blocks;
        total += is_there ? of.first[k] : 0;
        along += is_there ? of.second[k] : 0;
    }
    total = over_blocks(total, room);
    along = over_blocks(along, room);
    if (part || column >= e.cols) {
        return;
    }
    const float share = 1.0f / (float)e.rows, scale = root * weight;
    ((float *)e.scale)[column] = scale;
    const float slope = along * (-share * root * root * scale), shift = total * (-share * scale);
    ((float *)e.slope)[column] = slope;
    ((float *)e.shift)[column] = shift - mean * slope;
    set_one(e.of_weight, of_weight, column, along * root);
    set_one(e.of_bias, of_weight, column, total);
}
""",
)
"""In the order of their names."""


def channels_source(which: int) -> str:
    """CUDA C++ of one of the kernels, for NVRTC or nvcc; includes nothing."""
    defined = {"AT_ONCE": LOADED[which // 2], "MOST_EACH": MOST_BLOCKS // 64}
    lines = (f"#define {name} {number}\n" for name, number in defined.items())
    return "".join(lines) + _COMMON + _KERNELS[which]
