"""The interpreter kernel's entry: the producer's loop, and that of the warps that compute.

See ``shell.py`` for what they do and who waits for whom.
"""

from __future__ import annotations

__all__ = ["ENTRY", "OF_CHAINS", "OF_ONE", "OF_STACK"]

ENTRY = r"""
extern "C" __global__ void __launch_bounds__({threads}, 1)
{name}({parameter})
{{
    constexpr u32 LANES = {lanes}, SLICE = LANES * {each}; /* lanes of a row, a warp's part of it */
{image}    const Head &h = image.h;
    const u32 lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), W = h.warps;
    const u32 P = W + adders_of(h); /* the producer */
    const u32 base = shared_address(mj_shared), S = h.stages;
    const u32 full = base + h.barriers_at, beyond = full + A_STAGE * S, ring = base + h.ring_at;
#ifdef MJ_SUMS
    const u32 places_at = beyond; /* of the sums that are written before it */
#endif

#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    /* The program, by a generic address: the constant bank would serve one lane after another. */
    const Quad *program = {program};
    asm volatile("" : "+l"(program));
    asm volatile("" ::"l"(mj_powers)); /* named in PTX alone, a compiler would drop it */
    for (u32 i = threadIdx.x; i < h.program_bytes / 16; i += {threads_there}) {{
        ((Quad *)mj_shared)[i] = program[i];
    }}
    const u32 each_rows = 128 * (1 + h.numbers + 2 * h.accumulators);
    const u32 G = h.group, chunks = chunks_of_row(h), by_rows = rows_of_tile(h);
    const bool in_rows = UNLESS_ROWS(by_rows != 0, true);
    const u32 group_of_warp = in_rows ? quotient(warp, G) : 0;
    if (warp < W && in_rows) {{
        /* Where the row's warps leave their parts of a reduction; it turns with each. */
        *(u32 *)(mj_shared + h.rows_at + warp * each_rows + 4 * lane) =
            base + h.partials_at + 512 * group_of_warp;
#ifdef MJ_BATCHES
        if (tail_of(h)) {{
            const u32 rowfile = base + h.rows_at + warp * each_rows + 128 + 4 * lane;
            set_shared(rows_there(h, rowfile), 0);
        }}
#endif
    }}
    if (warp == P && lane == 0) {{
#pragma unroll 1
        for (u32 s = 0; s < S; s++) {{
            barrier_init(full + A_STAGE * s, FULL_ARRIVALS);
            barrier_init(full + A_STAGE * s + EMPTY, P * EMPTY_ARRIVALS);
        }}
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }}
    if (warp != P) {{
        all_meet(P); /* the producer comes here once its first tile is on its way */
    }}

    const u32 width = in_rows ? G * SLICE : W * SLICE; /* elements of a stage, of a row's chunk */
    u32 s = 0, phase = 0;

    if (warp == P) {{
        u32 *counter = (u32 *)h.counter;
        if (counter) {{ /* else once it is known what the first copy is of */
            wait_for_launch();
        }}
        u32 t = {block}, next = 0;
#ifdef MJ_SUMS
        u32 asked = {block};
        const u32 shift = h.sums >> 8 & 255, fixed = h.sums ? h.fixed : {blocks};
        u32 place = {block};
#endif
        bool others_wait = true;
        __syncwarp();
        while (t < h.tiles) {{
            const u32 turns = chunks > 1 ? (h.fixed & KEEPS ? 1 : passes_of(h)) * chunks : 1;
#pragma unroll 1
            for (u32 k = 0, c = 0; k < turns; k++) {{
                barrier_wait(full + A_STAGE * s + EMPTY, phase ^ 1);
                u64 e = (u64)t * width, left;
                u32 most = width, rows = 1;
                if (!in_rows) {{
                    left = h.elements - e;
                }} else if (chunks > 1) {{
                    const u64 row = (u64)t * by_rows;
                    rows = h.rows - row < by_rows ? (u32)(h.rows - row) : by_rows;
                    e = row * h.cols + (u64)c * width;
                    left = h.cols - c * width;
                }} else {{
                    most = by_rows * h.cols;
                    e = (u64)t * most;
                    left = h.elements - e;
                }}
                const u32 count = left < most ? (u32)left : most;
                if (lane == 0) {{
                    const u64 row = (u64)t * by_rows;
                    u32 there = count;
                    if (in_rows && chunks == 1) {{
                        there = h.rows - row < by_rows ? (u32)(h.rows - row) : by_rows;
                    }}
#ifdef MJ_SUMS
                    const u32 now = t < fixed ? {block} : {blocks} + ((t - fixed) >> shift);
                    there |= h.sums && now != place ? WRITES : 0;
                    set_shared(places_at + 4 * s, place);
                    place = now;
#endif
                    set_quad(full + A_STAGE * s + TILE,
                             Quad{{(u32)e, (u32)(e >> 32), there, (u32)row}});
                }}
                feed(h, full + A_STAGE * s, ring + s * h.stage_bytes, e, count, t, lane,
                    others_wait && !counter, UNLESS_WHOLE(rows, 1));
                if (others_wait) {{
                    others_wait = false;
                    all_meet(P);
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
        if (has_one_tile(h, {blocks})) {{
            {leave}
        }}
        if (others_wait) {{
            all_meet(P);
        }}
        barrier_wait(full + A_STAGE * s + EMPTY, phase ^ 1);
        if (lane == 0) {{
            set_quad(full + A_STAGE * s + TILE, Quad{{0, 0, 0, 0}});
#ifdef MJ_SUMS
            set_shared(places_at + 4 * s, {block} < h.tiles ? place : NO_TILE);
#endif
        }}
        __syncwarp();
        if (FULL_ARRIVALS > 1) {{
            barrier_arrive(full + A_STAGE * s);
        }}
        if (lane == 0) {{
            barrier_arrive(full + A_STAGE * s);
        }}
        /* All of this block's draws are behind it; the last block's are behind all. */
        if (counter && lane == 0) {{
            __threadfence();
            if (atomicAdd(counter + 1, 1) == {blocks} - 1) {{
                counter[0] = 0;
                counter[1] = 0;
            }}
        }}
        if (t != NO_TILE) {{ /* always: code with no way on would be put at the end, far away */
            {leave}
        }}
    }}

#ifdef MJ_ADDERS
    if (warp >= W) {{
        add_rows_{each}(h, warp - W, lane, full, {blocks});
        {leave}
    }}
#endif
#ifdef MJ_SEVERAL
    const u32 group = warp * (32 / LANES) + lane / LANES, first = warp * (32 / LANES), member = 0;
#else
    const u32 group = group_of_warp, first = group, member = in_rows ? warp - group * G : 0;
#endif
    const u32 own = (in_rows ? member : warp) * SLICE; /* the warp's first column */
    const bool whole_rows = in_rows && chunks == 1;
    const bool owner = lane % LANES == 0 && own == 0;
    u32 scratch = base + h.scratch_at + warp * h.scratch_bytes + 16 * lane;
    /* What all tiles ask for is in registers: ptxas would load it from constant memory each time.
     * Of what a stage has, rows or elements, those from `mine` on are the warp's. */
    const u32 rowfile =
        kept(UNLESS_FLAT(base + h.rows_at + warp * each_rows + 128, 0) + 4 * lane);
    u32 facts = kept(G | member << 8 | group << 16 | h.numbers << 24 | (owner ? OWNS : 0));
    const u32 local = kept(own + 4 * (lane % LANES) + (whole_rows ? group * h.cols : 0));
    const u32 mine = kept(whole_rows ? group : own), every = whole_rows ? SLICE : 1;
    const u32 columns = h.cols > own ? h.cols - own : 0;
    const u32 most = kept(whole_rows && columns < SLICE ? columns : SLICE);
    const u32 first_word = kept(base + 16 * h.first[0]);
    /* A stage is the address of its barrier, whose lowest bit is the phase, the next one whether
     * its tile is the last, and of its memory; a turn is a pass and a chunk of it. */
    u32 barrier = full | (has_one_tile(h, {blocks}) ? LAST : 0), turn = 0, row = 0;
    u32 stage = ring + group * bytes_of_row(h); /* what it has of the warp's row */
#ifdef MJ_OWN_SUMS
    for (u32 i = lane; i < (h.sums & 255) * 8 * {each}; i += 32) {{ /* what only this warp uses */
        *(Quad *)(mj_shared + h.scratch_at + warp * h.scratch_bytes + 16 * i) = Quad{{0, 0, 0, 0}};
    }}
#endif
    __syncwarp();
    if (UNLESS_FLAT(h.prologue, NO_TILE) != NO_TILE) {{
        turn = PROLOGUE * A_PASS;
        scratch = base + h.scratch_at + W * h.scratch_bytes + 4 * member * SLICE + 16 * lane;
        wait_for_launch();
    }}
#ifdef MJ_OWN_SUMS
next_tile:
#endif
#pragma unroll 1
    for (;;) {{
        u64 start;
        u32 there, word = first_word;
        bool runs;
#ifdef MJ_GRADIENTS
        if (turn == 0) {{
            back_rows_{each}(h, group, member, lane, full, base, {blocks});
            {leave}
        }}
#endif
        if (turn < passes_of(h) * A_PASS) {{ /* else the epilogue or the prologue, of no stage */
            barrier_wait(barrier & ~3u, barrier & 1);
            Quad tile = get_quad((barrier & ~3u) + TILE);
#ifdef MJ_ADDERS
            tile.z &= ~WRITES; /* adders' */
#endif
            if (turn == 0 && (int)tile.z <= 0) {{ /* no tile, or sums are to be written before */
#ifdef MJ_BATCHES
                if (tail_of(h) && get_shared(rows_there(h, rowfile))) {{ /* a few are left */
                    turn = TAIL * A_PASS;
                    continue;
                }}
#endif
                break;
            }}
            start = tile.x | (u64)tile.y << 32;
            row = tile.w + group;
#ifdef MJ_SEVERAL
            there = most;
            runs = first < tile.z;
            facts = (facts & ~(OWNS | ABSENT)) | (mine >= tile.z ? ABSENT : owner ? OWNS : 0);
            row = mine < tile.z ? row : tile.w; /* where something is */
#else
            there = tile.z - mine;
            runs = mine < tile.z;
            there = there * every < most ? there * every : most;
#endif
            if (chunks > 1) {{
                const u32 pass = turn / A_PASS, later = turn % A_PASS != 0;
                there = runs ? there : 0;
                runs = row < h.rows;
                start += (u64)group * h.cols;
                word = base + 16 * (later ? h.rest[pass] : h.first[pass]);
                facts = (facts & ~LATER) | later * LATER;
            }}
            if (!in_rows && start != 0) {{
                facts &= ~OWNS;
            }}
        }} else {{
            const bool prologue = turn == PROLOGUE * A_PASS;
            start = (u64)(row - (whole_rows ? group : 0)) * h.cols;
            there = columns < SLICE ? columns : SLICE;
            runs = prologue ? first == 0 : row < h.rows;
            word = base + 16 * (prologue ? h.prologue : epilogue_of(h));
            facts &= ~LATER;
#ifdef MJ_BATCHES
            if (turn == TAIL * A_PASS) {{
                word = base + 16 * tail_of(h);
                facts &= ~OWNS;
                facts |= take_from_batch(h, rowfile, row) ? OWNS : 0;
                runs = true;
            }}
#endif
        }}
        if (runs) {{
            run_words_{each}(word, stage, local, start + local, there, rowfile, facts, row,
                scratch);
        }}
        /* So that what was found of it takes no registers meanwhile. */
        turn = UNLESS_FLAT(kept(turn), 0);
        if (barrier & LAST && turn == 0) {{
            break;
        }}
        if (turn >= passes_of(h) * A_PASS) {{
            if (turn == PROLOGUE * A_PASS) {{
                scratch = base + h.scratch_at + warp * h.scratch_bytes + 16 * lane;
                asm volatile("bar.sync 15, %0;" ::"r"(32 * W) : "memory");
            }}
#ifdef MJ_BATCHES
            if (turn == TAIL * A_PASS) {{
                facts = (facts & ~OWNS) | ((rowfile & 124) == 0 ? OWNS : 0);
            }} else if (turn != PROLOGUE * A_PASS && runs && batches(h, facts)) {{
                turn = add_to_batch(h, rowfile, row);
                continue;
            }}
#endif
            turn = 0;
            continue;
        }}
        __syncwarp();
        const bool stays = chunks > 1 && h.fixed & KEEPS && turn / A_PASS + 1 < passes_of(h);
        if (!stays && (EMPTY_ARRIVALS > 1 || (rowfile & 124) == 0)) {{ /* tells the lane */
            barrier_arrive((barrier & ~3u) + EMPTY);
        }}
        barrier += A_STAGE;
        stage += h.stage_bytes;
        if ((barrier & ~3u) == beyond) {{
            barrier = full | ((barrier & 1) ^ 1);
            stage = ring + group * bytes_of_row(h);
        }}
        if (chunks == 1) {{
            turn = epilogue_of(h) != NO_TILE && row < h.rows ? passes_of(h) * A_PASS : 0;
#ifdef MJ_BATCHES
            if (row < h.rows && batches(h, facts)) {{
                turn = add_to_batch(h, rowfile, row);
            }}
#endif
        }} else if (turn % A_PASS + 1 < chunks) {{
            turn++;
        }} else {{
            if (stays) {{ /* back to where the row begins: at most once around the ring */
                const u32 back = A_STAGE * chunks;
                barrier -= back;
                if ((barrier & ~3u) < full) {{
                    barrier = (barrier + (beyond - full)) ^ 1;
                }}
                stage = ring + group * bytes_of_row(h) +
                    ((barrier & ~3u) - full) / A_STAGE * h.stage_bytes;
            }}
            turn = (turn / A_PASS + 1) * A_PASS;
            turn = turn == passes_of(h) * A_PASS && epilogue_of(h) == NO_TILE ? 0 : turn;
        }}
    }}
#ifdef MJ_OWN_SUMS
    const u32 number = ((barrier & ~3u) - full) / A_STAGE;
    const u32 tile_at = (barrier & ~3u) + TILE + 8, place = get_shared(places_at + 4 * number);
    const u32 left = get_shared(tile_at);
    if (h.sums && place != NO_TILE) {{ /* of rows that are in no chunks */
        write_sums(h, place, {blocks}, SLICE, tile_at);
        if (left != 0) {{
            goto next_tile;
        }}
    }}
#endif
{close}}}
"""

OF_ONE = {
    "parameter": "const __grid_constant__ Image image",
    "image": "",
    "leave": "return;",
    "close": "",
    "program": "image.program",
    "block": "blockIdx.x",
    "blocks": "gridDim.x",
    "threads_there": "blockDim.x",
}
"""How a kernel begins and ends whose parameter is one image."""

_WHICH = """\
    u32 which = 0;
#pragma unroll 1
    while (blockIdx.x >= stack.end[which]) {
        which++;
    }
    const u32 before = which ? stack.end[which - 1] : 0;
    const u32 block = blockIdx.x - before, blocks = stack.end[which] - before;
"""
_IMAGE = """\
    const Image &image = *(const Image *)((const unsigned char *)&stack + stack.at[which]);
"""

OF_STACK = {
    "parameter": "const __grid_constant__ Stack stack",
    "image": f"""\
{_WHICH}{_IMAGE}\
    if (threadIdx.x >= 32 * (image.h.warps + 1)) {{
        return; /* another image has more warps */
    }}
""",
    "leave": "return;",
    "close": "",
    "program": "image.program",
    "block": "block",
    "blocks": "blocks",
    "threads_there": "(32 * (W + 1))",
}
"""How one does whose parameter is several: each has blocks of its own, one after another."""

OF_CHAINS = OF_STACK | {
    "image": f"""\
{_WHICH}\
    u32 last = which;
    while (last < 7 && stack.end[last + 1] == stack.end[which]) {{
        last++;
    }}
    /* All programs of a chain are brought here once, while the launch in front may still run. */
    u32 room;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(room));
    const Quad *brought = (const Quad *)(mj_shared + room - sizeof(Stack));
    const bool chained = last != which;
    if (chained) {{
        const Image &end = *(const Image *)((const unsigned char *)&stack + stack.at[last]);
        const u32 bytes = stack.at[last] + sizeof(Head) + end.h.program_bytes;
        const Quad *all = (const Quad *)&stack;
        asm volatile("" : "+l"(all));
        for (u32 i = threadIdx.x; i < bytes / 16; i += blockDim.x) {{
            ((Quad *)brought)[i] = all[i];
        }}
        __syncthreads();
    }}
#pragma unroll 1
    for (;;) {{
{_IMAGE}\
    if (threadIdx.x < 32 * (image.h.warps + 1)) {{
""",
    "leave": "goto done;",
    "program": "chained ? brought + (stack.at[which] + sizeof(Head)) / 16 : image.program",
    "close": """\
    }
done:
    if (which == last) {
        return;
    }
    which++;
    /* All of the block have run this image. What it has written the next one may copy; and where
     * its barriers are, there may be anything then. */
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
    __syncthreads();
    for (u32 i = threadIdx.x; i < 2 * image.h.stages; i += blockDim.x) {
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];"
                     ::"r"(shared_address(mj_shared) + image.h.barriers_at + A_STAGE * (i / 2) +
                        EMPTY * (i % 2)) : "memory");
    }
    __syncthreads();
    }
""",
}
"""How one does that may also have images with the same blocks: one that ends with the same block as
the one before runs behind it, in these.  The loop costs registers, which only R = 8 has."""
