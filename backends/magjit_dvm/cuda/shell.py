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
    u32 chunks, tiles, by_rows, passes; /* by_rows: how many a tile has */
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
DEV u32 get_shared(u32 a)
{
    u32 value;
    asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(value) : "r"(a) : "memory");
    return value;
}
DEV Quad get_quad(u32 a)
{
    Quad q;
    asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "r"(a) : "memory");
    return q;
}
DEV void set_quad(u32 a, Quad q)
{
    asm volatile("st.volatile.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 ::"r"(a), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w) : "memory");
}
DEV u32 kept(u32 value) /* in a register */
{
    asm volatile("" : "+r"(value));
    return value;
}
DEV void set_shared(u32 a, u32 value)
{
    asm volatile("st.volatile.shared.b32 [%0], %1;" ::"r"(a), "r"(value) : "memory");
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
 * contiguous, the rows of tile t of one that has an element for each row.
 * It is copied from the 16-byte boundary below to the one above: what is beyond the tensor shares
 * 16 aligned bytes with an element of it. */
#define OF_ROWS 256u
struct Piece { u64 from; u32 bytes; };
DEV Piece piece_of(const Head &h, u32 i, u64 e, u32 count, u32 t)
{
    u32 size = h.in[i].size;
    if (size & OF_ROWS) {
        size -= OF_ROWS;
        e = (u64)t * h.by_rows;
        count = h.rows - e < h.by_rows ? (u32)(h.rows - e) : h.by_rows;
    }
    const u64 low = h.in[i].ptr + e * size, high = low + (u64)count * size;
    return {low & ~15ull, (u32)(((high + 15) & ~15ull) - (low & ~15ull))};
}
DEV void feed(const Head &h, u32 barrier, u32 stage, u64 e, u32 count, u32 t, u32 lane)
{
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
        u32 bytes = 0;
#pragma unroll 1
        for (u32 i = 0; i < h.n_in; i++) {
            bytes += piece_of(h, i, e, count, t).bytes;
        }
        barrier_arrive_expecting(barrier, bytes);
#pragma unroll 1
        for (u32 i = 0; i < h.n_in; i++) {
            const Piece one = piece_of(h, i, e, count, t);
            bulk_copy(stage + h.in[i].at, one.from, one.bytes, barrier);
        }
    }
#else
#pragma unroll 1
    for (u32 i = 0; i < h.n_in; i++) {
        const Piece one = piece_of(h, i, e, count, t);
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
#define WRITES 0x80000000u /* added to the count of a tile before which sums are written */
#define A_PASS 0x1000000u /* beside the chunk: 2^24 of them are more than a row has */
#define PROLOGUE 0xffu /* in the place of a pass */
#define LATER 0x40000000u /* of a warp: the chunk is not a row's first */
#define OWNS 0x80000000u  /* the lane stores what there is one of for a row */

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
    /* Of a stage: the first of its elements in the whole (64 bits), how many elements it has, or
     * rows where those are whole, and its first row; 0 elements: there is none. */
    const u32 tiles_at = empty + 8 * S;
#ifdef MJ_SUMS
    const u32 places_at = tiles_at + 16 * S; /* of the sums that are written before it */
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

    const u32 G = h.group, chunks = h.chunks;
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
                    most = h.by_rows * h.cols;
                    e = (u64)t * most;
                    left = h.elements - e;
                }}
                const u32 count = left < most ? (u32)left : most;
                if (lane == 0) {{
                    const u64 row = (u64)t * h.by_rows;
                    u32 there = count;
                    if (h.by_rows && chunks == 1) {{
                        there = h.rows - row < h.by_rows ? (u32)(h.rows - row) : h.by_rows;
                    }}
#ifdef MJ_SUMS
                    const u32 now = t < fixed ? {block} : {blocks} + ((t - fixed) >> shift);
                    there |= h.sums && now != place ? WRITES : 0;
                    set_shared(places_at + 4 * s, place);
                    place = now;
#endif
                    set_quad(tiles_at + 16 * s, Quad{{(u32)e, (u32)(e >> 32), there, (u32)row}});
                }}
                feed(h, full + 8 * s, ring + s * h.stage_bytes, e, count, t, lane);
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
            set_quad(tiles_at + 16 * s, Quad{{0, 0, 0, 0}});
#ifdef MJ_SUMS
            set_shared(places_at + 4 * s, {block} < h.tiles ? place : NO_TILE);
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

    const u32 member = warp % G, group = h.by_rows ? warp / G : 0;
    const u32 own = (h.by_rows ? member : warp) * SLICE; /* the warp's first column */
    const bool whole_rows = h.by_rows && chunks == 1;
    const bool owner = lane == 0 && own == 0;
    u32 scratch = base + h.scratch_at + warp * h.scratch_bytes + 16 * lane;
    /* What all tiles ask for is in registers: ptxas would load it from constant memory each time.
     * Of what a stage has, rows or elements, those from `mine` on are the warp's. */
    const u32 rowfile = kept(base + h.rows_at + warp * each_rows + 128 + 4 * lane);
    u32 facts = kept(G | member << 8 | group << 16 | h.numbers << 24 | (owner ? OWNS : 0));
    const u32 local = kept(own + 4 * lane + (whole_rows ? group * h.cols : 0));
    const u32 mine = kept(whole_rows ? group : own), every = whole_rows ? SLICE : 1;
    const u32 columns = h.cols > own ? h.cols - own : 0;
    const u32 most = kept(whole_rows && columns < SLICE ? columns : SLICE);
    const u32 first_word = kept(base + 16 * h.first[0]);
    /* A stage is the address of its barrier, whose lowest bit is the phase, and of its memory; a turn
     * is a pass and a chunk of it. */
    u32 barrier = full, stage = ring, turn = 0, row = 0;
#ifdef MJ_SUMS
    for (u32 i = lane; i < (h.sums & 255) * 8 * {each}; i += 32) {{ /* what only this warp uses */
        *(Quad *)(mj_shared + h.scratch_at + warp * h.scratch_bytes + 16 * i) = Quad{{0, 0, 0, 0}};
    }}
#endif
    __syncwarp();
    if (h.prologue != NO_TILE) {{
        turn = PROLOGUE * A_PASS;
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
        u64 start;
        u32 there, word = first_word;
        bool runs;
        if (turn < h.passes * A_PASS) {{ /* else the epilogue or the prologue, of no stage */
            barrier_wait(barrier & ~1u, barrier & 1);
            const Quad tile = get_quad(tiles_at + 2 * ((barrier & ~1u) - full));
            if (turn == 0 && (int)tile.z <= 0) {{ /* no tile, or sums are to be written before */
                break;
            }}
            start = tile.x | (u64)tile.y << 32;
            row = tile.w + group;
            there = tile.z - mine;
            runs = mine < tile.z;
            there = there * every < most ? there * every : most;
            if (chunks > 1) {{
                const u32 pass = turn / A_PASS, later = turn % A_PASS != 0;
                there = runs ? there : 0;
                runs = true;
                word = base + 16 * (later ? h.rest[pass] : h.first[pass]);
                facts = (facts & ~LATER) | later * LATER;
            }}
            if (!h.by_rows && start != 0) {{
                facts &= ~OWNS;
            }}
        }} else {{
            const bool prologue = turn == PROLOGUE * A_PASS;
            start = (u64)(row - (whole_rows ? group : 0)) * h.cols;
            there = columns < SLICE ? columns : SLICE;
            runs = !prologue || group == 0;
            word = base + 16 * (prologue ? h.prologue : h.epilogue);
            facts &= ~LATER;
        }}
        if (runs) {{
            run_words_{each}(word, stage, local, start + local, there, rowfile, facts, row, scratch);
        }}
        turn = kept(turn); /* so that nothing of it is */
        if (turn >= h.passes * A_PASS) {{
            if (turn == PROLOGUE * A_PASS) {{
                scratch = base + h.scratch_at + warp * h.scratch_bytes + 16 * lane;
                asm volatile("bar.sync 15, %0;" ::"r"(32 * W) : "memory");
            }}
            turn = 0;
            continue;
        }}
        __syncwarp();
        if (EMPTY_ARRIVALS > 1 || lane == 0) {{
            barrier_arrive((barrier & ~1u) + 8 * S);
        }}
        barrier += 8;
        stage += h.stage_bytes;
        if ((barrier & ~1u) == empty) {{
            barrier = full | ((barrier & 1) ^ 1);
            stage = ring;
        }}
        if (chunks == 1) {{
            turn = h.epilogue != NO_TILE && row < h.rows ? h.passes * A_PASS : 0;
        }} else if (turn % A_PASS + 1 < chunks) {{
            turn++;
        }} else {{
            turn = (turn / A_PASS + 1) * A_PASS;
            turn = turn == h.passes * A_PASS && h.epilogue == NO_TILE ? 0 : turn;
        }}
    }}
#ifdef MJ_SUMS
    const u32 number = ((barrier & ~1u) - full) / 8;
    const u32 tile_at = tiles_at + 16 * number + 8, place = get_shared(places_at + 4 * number);
    const u32 left = get_shared(tile_at);
    if (h.sums && place != NO_TILE) {{ /* of rows that are in no chunks */
        write_sums(h, place, {blocks}, SLICE, tile_at);
        if (left != 0) {{
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
