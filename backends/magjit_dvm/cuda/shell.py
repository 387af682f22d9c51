"""The interpreter kernel around its inner loop: who does what, and who waits for whom.

One block runs on a multiprocessor.  Its last warp, the producer, draws tiles and copies their parts
of contiguous tensors into a ring of stages in shared memory (bulk copies); the others compute.

- ``full[s]``: the producer arrives once, with the bytes that will come; consumers wait for it.
- ``empty[s]``: each consuming warp arrives when it has read the stage; the producer waits for it.

A barrier's phase is its parity: turn ``k`` of stage ``s`` is phase ``k`` of both, so that the
producer's first wait, for the phase before the first, passes at once.  Consumers read stages and
never write them: no fence between generic and bulk accesses is due but the barriers themselves.

From sm_90 on a launch may begin before the one in front of it in its stream has ended: it reads its
program and sets up barriers meanwhile.  The producer then waits (``griddepcontrol.wait``), and with
it the consumers, who do nothing before the first stage is full.

Before its first tile a block may keep vectors that all rows share (``weights.py``): the first
row's warps run the prologue, whose scratch memory all of them read from then on.  Sums that its
warps keep in scratch memory over its tiles it adds up and writes in the end (``sums.py``).

Block b begins with tile b, whose parts are on their way before the program has been read.  Other
tiles come from a counter in global memory, the next one asked for while a tile is fed; the last
block to find no more sets it back, so that the next launch in the stream finds zeros.  Without a
counter, block b takes tiles b, b + blocks, and so on.

Beside sums across rows, block b has most of its tiles for certain: b, b + blocks, and so on.  What
it draws are runs of the others, and what a block has added up is written before each run and after
it, to a place of the block's or of the run's: whoever draws a run, its sums are the same.

A stack is a launch of several images (``csrc/cuda_stacks.cpp``): which one a block runs, and which
of its blocks it is, is all that its kernel asks more.
"""

from __future__ import annotations

__all__ = ["ENTRY", "OF_ONE", "OF_STACK", "SHELL"]

SHELL = r"""
typedef unsigned u32;
typedef unsigned long long u64;
#define DEV static __device__ __forceinline__

struct In { u64 ptr; u32 size, at; };
struct Head {
    u32 n_words, program_bytes, n_in, stages;
    u32 stage_bytes, warps, group, cols;
    u32 chunks, tiles, by_rows, passes;
    u32 epilogue;
    u32 first[4];
    u32 rest[4];
    u32 numbers, accumulators, barriers_at, rows_at;
    u32 partials_at, scratch_at, ring_at, scratch_bytes, prologue, sums, fixed;
    u64 elements, rows, counter;
    In in[12];
    u64 parts;
};
struct __align__(16) Quad { u32 x, y, z, w; };
struct __align__(16) Image { Head h; Quad program[(4096 - 352) / 16]; };
static_assert(sizeof(Head) == 352 && sizeof(Image) == 4096, "as words.py packs it");
struct __align__(16) Stack { u32 end[8], at[8]; Quad images[(4096 - 64) / 16]; };
static_assert(sizeof(Stack) == 4096, "as cuda_stacks.cpp packs it");

DEV u32 shared_address(const void *p)
{
    u64 a;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(a) : "l"(p));
    return (u32)a;
}
DEV void barrier_init(u32 a, u32 count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(a), "r"(count) : "memory");
}
DEV void barrier_arrive(u32 a)
{
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(a)
                 : "memory");
}
#if __CUDA_ARCH__ >= 900
DEV void barrier_arrive_expecting(u32 a, u32 bytes)
{
    asm volatile("{ .reg .b64 state; "
                 "mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(a), "r"(bytes)
                 : "memory");
}
DEV void barrier_wait(u32 a, u32 phase)
{
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(a), "r"(phase) : "memory");
    } while (!done);
}
DEV void bulk_copy(u32 to, u64 from, u32 bytes, u32 barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#else
DEV void barrier_wait(u32 a, u32 phase)
{
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(a), "r"(phase) : "memory");
    } while (!done);
}
#endif

/* What a stage has of an input, and where that begins: elements [e, e + count) of one that is
 * contiguous, the rows of tile t, `rows` of them at most, of one that has an element for each row.
 * It is copied from the 16-byte boundary below to the one above: what is beyond the tensor shares
 * 16 aligned bytes with an element of it. */
#define OF_ROWS 256u
struct Piece { u64 from; u32 bytes; };
DEV Piece piece_of(const Head &h, u32 i, u64 e, u32 count, u32 t, u32 rows)
{
    u32 size = h.in[i].size;
    if (size & OF_ROWS) {
        size -= OF_ROWS;
        e = (u64)t * rows;
        count = h.rows - e < rows ? (u32)(h.rows - e) : rows;
    }
    const u64 low = h.in[i].ptr + e * size, high = low + (u64)count * size;
    return {low & ~15ull, (u32)(((high + 15) & ~15ull) - (low & ~15ull))};
}
DEV void feed(const Head &h, u32 barrier, u32 stage, u64 e, u32 count, u32 t, u32 rows, u32 lane)
{
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
        u32 bytes = 0;
#pragma unroll 1
        for (u32 i = 0; i < h.n_in; i++) {
            bytes += piece_of(h, i, e, count, t, rows).bytes;
        }
        barrier_arrive_expecting(barrier, bytes);
#pragma unroll 1
        for (u32 i = 0; i < h.n_in; i++) {
            const Piece one = piece_of(h, i, e, count, t, rows);
            bulk_copy(stage + h.in[i].at, one.from, one.bytes, barrier);
        }
    }
#else
#pragma unroll 1
    for (u32 i = 0; i < h.n_in; i++) {
        const Piece one = piece_of(h, i, e, count, t, rows);
        const u32 to = stage + h.in[i].at;
        for (u32 k = lane; k < one.bytes / 16; k += 32) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16 * k),
                         "l"(one.from + 16 * (u64)k) : "memory");
        }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier)
                 : "memory");
    if (lane == 0) {
        barrier_arrive(barrier); /* for what it wrote itself */
    }
#endif
}
#if __CUDA_ARCH__ >= 900
#define FULL_ARRIVALS 1
#else
#define FULL_ARRIVALS 33
#endif
/* Checked kernels have each lane say that it has read a stage: a checker of races does not see that
 * __syncwarp() has the other lanes' reads before lane 0 says so for all. */
#ifdef MJ_CHECKED
#define EMPTY_ARRIVALS 32
#else
#define EMPTY_ARRIVALS 1
#endif
#define NO_TILE 0xffffffffu
#define WRITES 0x80000000u /* added to a tile before which sums are written */
#define PROLOGUE 0xffffu /* in the place of a pass */

/* All of the block's shared memory, so that it begins at a multiple of 256. */
extern __shared__ __align__(1024) unsigned char mj_shared[];

/* From several places: with a number of threads, which __syncthreads() has not. */
DEV void all_meet(u32 warps)
{
    asm volatile("barrier.sync 14, %0;" ::"r"(32 * (warps + 1)) : "memory");
}
"""

ENTRY = r"""
extern "C" __global__ void __launch_bounds__({threads}, 1)
{name}({parameter})
{{
    constexpr u32 SLICE = 32 * {each};
{image}    const Head &h = image.h;
    const u32 lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), W = h.warps;
    const u32 base = shared_address(mj_shared), S = h.stages;
    const u32 full = base + h.barriers_at, empty = full + 8 * S, ring = base + h.ring_at;
    volatile u32 *const tile_of = (volatile u32 *)(mj_shared + h.barriers_at + 16 * S);
#ifdef MJ_SUMS
    volatile u32 *const place_of = tile_of + S; /* of the sums that are written before that tile */
#endif

#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    /* The program, by a generic address: the constant bank would serve one lane after another. */
    const Quad *program = image.program;
    asm volatile("" : "+l"(program));
    asm volatile("" ::"l"(mj_powers)); /* named in PTX alone, a compiler would drop it */
    for (u32 i = threadIdx.x; i < h.program_bytes / 16; i += {threads_there}) {{
        ((Quad *)mj_shared)[i] = program[i];
    }}
    const u32 each_rows = 128 * (1 + h.numbers + 2 * h.accumulators);
    if (warp < W) {{
        /* Where the row's warps leave their parts of a reduction; it turns with each. */
        *(u32 *)(mj_shared + h.rows_at + warp * each_rows + 4 * lane) =
            base + h.partials_at + 512 * (warp / h.group);
    }}
    if (warp == W && lane == 0) {{
        for (u32 s = 0; s < S; s++) {{
            barrier_init(full + 8 * s, FULL_ARRIVALS);
            barrier_init(empty + 8 * s, W * EMPTY_ARRIVALS);
        }}
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }}
    if (warp != W) {{
        all_meet(W); /* the producer comes here once its first tile is on its way */
    }}

    const u32 G = h.group, chunks = h.chunks, tile_rows = h.by_rows ? W / G : 1;
    const u32 width = h.by_rows ? G * SLICE : W * SLICE; /* elements of a stage, of a row's chunk */
    u32 s = 0, phase = 0;

    if (warp == W) {{
#if __CUDA_ARCH__ >= 900
        asm volatile("griddepcontrol.wait;" ::: "memory"); /* what came before, and all it wrote */
#endif
        u32 *counter = (u32 *)h.counter;
        u32 t = {block}, next = 0;
#ifdef MJ_SUMS
        u32 asked = {block};
        const u32 shift = h.sums >> 8, fixed = h.sums ? h.fixed : {blocks};
        u32 place = {block};
#endif
        bool others_wait = true;
        __syncwarp();
        while (t < h.tiles) {{
            const u32 turns = chunks > 1 ? h.passes * chunks : 1;
#pragma unroll 1
            for (u32 k = 0, c = 0; k < turns; k++) {{
                barrier_wait(empty + 8 * s, phase ^ 1);
                u64 e = (u64)t * width, left;
                u32 most = width;
                if (!h.by_rows) {{
                    left = h.elements - e;
                }} else if (chunks > 1) {{
                    e = (u64)t * h.cols + (u64)c * width;
                    left = h.cols - c * width;
                }} else {{
                    e = (u64)t * tile_rows * h.cols;
                    most = tile_rows * h.cols;
                    left = h.elements - e;
                }}
                if (lane == 0) {{
#ifdef MJ_SUMS
                    const u32 now = t < fixed ? {block} : {blocks} + ((t - fixed) >> shift);
                    tile_of[s] = h.sums && now != place ? t | WRITES : t;
                    place_of[s] = place;
                    place = now;
#else
                    tile_of[s] = t;
#endif
                }}
                const u32 count = left < most ? (u32)left : most;
                feed(h, full + 8 * s, ring + s * h.stage_bytes, e, count, t, tile_rows, lane);
                if (others_wait) {{
                    others_wait = false;
                    all_meet(W);
#ifdef MJ_SUMS
                    if (lane == 0) {{
                        next = counter ? atomicAdd(counter, 1) : asked;
                    }}
#else
                    if (counter && lane == 0) {{
                        next = {blocks} + atomicAdd(counter, 1);
                    }}
#endif
                }}
                if (++s == S) {{
                    s = 0;
                    phase ^= 1;
                }}
                if (++c == chunks) {{
                    c = 0;
                }}
            }}
#ifdef MJ_SUMS
            if (t < fixed && fixed - t > {blocks}) {{
                t += {blocks};
            }} else if (t >= fixed && (t + 1 - fixed) & ((1u << shift) - 1)) {{
                t++;
            }} else {{
                t = fixed + (__shfl_sync(~0u, next, 0) << shift);
                asked += {blocks};
                if (lane == 0 && t < h.tiles) {{
                    next = counter ? atomicAdd(counter, 1) : asked;
                }}
            }}
#else
            if (counter) {{
                t = __shfl_sync(~0u, next, 0);
                if (lane == 0 && t < h.tiles) {{
                    next = {blocks} + atomicAdd(counter, 1);
                }}
            }} else {{
                t += {blocks};
            }}
#endif
        }}
        if (others_wait) {{
            all_meet(W);
        }}
        barrier_wait(empty + 8 * s, phase ^ 1);
        if (lane == 0) {{
            tile_of[s] = NO_TILE;
#ifdef MJ_SUMS
            place_of[s] = {block} < h.tiles ? place : NO_TILE;
#endif
        }}
        __syncwarp();
        if (FULL_ARRIVALS > 1) {{
            barrier_arrive(full + 8 * s);
        }}
        if (lane == 0) {{
            barrier_arrive(full + 8 * s);
        }}
        /* All of this block's draws are behind it; the last block's are behind all. */
        if (counter && lane == 0) {{
            __threadfence();
            if (atomicAdd(counter + 1, 1) == {blocks} - 1) {{
                counter[0] = 0;
                counter[1] = 0;
            }}
        }}
        return;
    }}

    const u32 group = warp / G, member = warp - group * G;
    const u32 rowfile = base + h.rows_at + warp * each_rows + 128 + 4 * lane;
    const u32 warp_group = G | member << 8 | group << 16 | h.numbers << 24;
    u32 scratch = base + h.scratch_at + warp * h.scratch_bytes + 16 * lane;
    u32 pass = 0, chunk = 0, t = 0;
#ifdef MJ_SUMS
    for (u32 i = lane; i < (h.sums & 255) * 8 * {each}; i += 32) {{ /* what only this warp uses */
        *(Quad *)(mj_shared + h.scratch_at + warp * h.scratch_bytes + 16 * i) = Quad{{0, 0, 0, 0}};
    }}
#endif
    __syncwarp();
    if (h.prologue != NO_TILE) {{
        pass = PROLOGUE;
        scratch = base + h.scratch_at + W * h.scratch_bytes + 4 * member * SLICE + 16 * lane;
#if __CUDA_ARCH__ >= 900
        asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    }}
#ifdef MJ_SUMS
next_tile:
#endif
#pragma unroll 1
    for (;;) {{
        const bool last = pass == h.passes; /* the epilogue: no stage */
        if (!last && pass != PROLOGUE) {{
            barrier_wait(full + 8 * s, phase);
            if (pass == 0 && chunk == 0) {{
                t = __shfl_sync(~0u, tile_of[s], 0);
#ifdef MJ_SUMS
                if (t >= WRITES) {{ /* or NO_TILE */
#else
                if (t == NO_TILE) {{
#endif
                    break;
                }}
            }}
        }}
        u64 start, row = 0; /* the stage's first element in the whole */
        u32 local, there;
        if (!h.by_rows) {{
            start = (u64)t * width;
            local = warp * SLICE;
            const u64 left = h.elements - start;
            there = left <= local ? 0 : left - local < SLICE ? (u32)(left - local) : SLICE;
        }} else {{
            row = (u64)t * tile_rows + group;
            const u32 column = chunk * width + member * SLICE;
            start = chunks > 1 ? (u64)t * h.cols + (u64)chunk * width
                               : (u64)t * tile_rows * h.cols;
            local = (chunks > 1 ? 0 : group * h.cols) + member * SLICE;
            there = row >= h.rows || column >= h.cols ? 0
                    : h.cols - column < SLICE         ? h.cols - column
                                                      : SLICE;
        }}
        const bool runs = h.by_rows ? row < h.rows : there != 0;
        if (pass == PROLOGUE ? group == 0 : runs) {{
            const u32 word = pass == PROLOGUE ? h.prologue
                             : last           ? h.epilogue
                             : chunk          ? h.rest[pass]
                                              : h.first[pass];
            const bool owner = lane == 0 && member == 0 && (h.by_rows || start + local == 0);
            run_words_{each}(base + 16 * word, ring + s * h.stage_bytes, local + 4 * lane,
                start + local + 4 * lane, there, rowfile,
                warp_group | (chunk != 0) << 30 | (u32)owner << 31, (u32)row, scratch);
        }}
        if (pass == PROLOGUE) {{
            pass = 0;
            scratch = base + h.scratch_at + warp * h.scratch_bytes + 16 * lane;
            asm volatile("bar.sync 15, %0;" ::"r"(32 * W) : "memory");
            continue;
        }}
        if (last) {{
            pass = 0;
            continue;
        }}
        __syncwarp();
        if (EMPTY_ARRIVALS > 1 || lane == 0) {{
            barrier_arrive(empty + 8 * s);
        }}
        if (++s == S) {{
            s = 0;
            phase ^= 1;
        }}
        if (chunks == 1) {{
            pass = h.epilogue != NO_TILE ? h.passes : 0;
        }} else if (++chunk == chunks) {{
            chunk = 0;
            if (++pass == h.passes && h.epilogue == NO_TILE) {{
                pass = 0;
            }}
        }}
    }}
#ifdef MJ_SUMS
    const u32 place = place_of[s];
    if (h.sums && place != NO_TILE) {{ /* of rows that are in no chunks */
        write_sums(h, place, {blocks}, SLICE, tile_of + s);
        if (t != NO_TILE) {{
            goto next_tile;
        }}
    }}
#endif
}}
"""

OF_ONE = {
    "parameter": "const __grid_constant__ Image image",
    "image": "",
    "block": "blockIdx.x",
    "blocks": "gridDim.x",
    "threads_there": "blockDim.x",
}
"""How a kernel begins whose parameter is one image."""

OF_STACK = {
    "parameter": "const __grid_constant__ Stack stack",
    "image": """\
    u32 which = 0;
#pragma unroll 1
    while (blockIdx.x >= stack.end[which]) {
        which++;
    }
    const u32 before = which ? stack.end[which - 1] : 0;
    const u32 block = blockIdx.x - before, blocks = stack.end[which] - before;
    const Image &image = *(const Image *)((const unsigned char *)&stack + stack.at[which]);
    if (threadIdx.x >= 32 * (image.h.warps + 1)) {
        return; /* another image has more warps */
    }
""",
    "block": "block",
    "blocks": "blocks",
    "threads_there": "(32 * (W + 1))",
}
"""How one begins whose parameter is several: each has blocks of its own, one after another."""
