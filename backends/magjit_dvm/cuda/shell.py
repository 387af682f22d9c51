"""The interpreter kernel around its inner loop: who does what, and who waits for whom.

One block runs on a multiprocessor.  Its last warp, the producer, draws tiles and copies their parts
of contiguous tensors into a ring of stages in shared memory (bulk copies); the others compute.

- ``full[s]``: the producer says of each copy how many bytes will come, and then arrives; consumers
  wait for it.
- ``empty[s]``: each consuming warp arrives when it has read the stage; the producer waits for it.

A barrier's phase is its parity: turn ``k`` of stage ``s`` is phase ``k`` of both, so that the
producer's first wait, for the phase before the first, passes at once.  Consumers read stages and
never write them: no fence between generic and bulk accesses is due but the barriers themselves.

From sm_90 on a launch may begin before the one in front of it in its stream has ended: it reads its
program, sets up barriers and, where no tiles are drawn, finds out what to copy.  The producer then
waits (``griddepcontrol.wait``), and with it the consumers, who do nothing before the first stage is
full.

A row in chunks is in several stages, with those of other rows beside it.  Where the ring keeps it,
consumers go back to its first stage for the next pass, whose phase they have waited for; they say
that they have read a stage in the last pass, so that the producer copies each chunk once.

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

Gradients of a norm's weights may be added up by warps of their own, *adders*, between those that
compute rows and the producer (``adders.py``).  They wait for the same stages and say that they have
read them; what they have added up they write themselves, and nobody waits for that.

A stack is a launch of several images (``csrc/cuda_stacks.cpp``): which one a block runs, and which
of its blocks it is, is all that its kernel asks more.
"""

from __future__ import annotations

__all__ = ["SHELL"]

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
    u32 partials_at, scratch_at, ring_at, scratch_bytes, prologue, sums;
    u32 fixed; /* of rows in chunks, the bytes of one in a stage; and KEEPS */
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
DEV void barrier_expect(u32 a, u32 bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(a), "r"(bytes)
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
/* `keep`: the upper half of a policy of the L2 cache. */
DEV void bulk_copy(u32 to, u64 from, u32 bytes, u32 barrier, u32 keep)
{
    asm volatile("{ .reg .b64 policy; mov.b64 policy, {0, %4}; "
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], policy; }"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "r"(keep) : "memory");
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

#define NO_TILE 0xffffffffu
#define KEEPS 1u /* beside the bytes of a row: stages keep it until its last pass */
/* What is known when a kernel is compiled: where rows are in no chunks, where there are rows, and
 * where there are none and nothing is kept. */
#ifdef MJ_WHOLE
#define UNLESS_WHOLE(value, whole) (whole)
#else
#define UNLESS_WHOLE(value, whole) (value)
#endif
#ifdef MJ_ROWS
#define UNLESS_ROWS(value, rows) (rows)
#else
#define UNLESS_ROWS(value, rows) (value)
#endif
#ifdef MJ_FLAT
#define UNLESS_FLAT(value, flat) (flat)
#else
#define UNLESS_FLAT(value, flat) (value)
#endif
DEV u32 rows_of_tile(const Head &h)
{
    return UNLESS_FLAT(h.by_rows, 0);
}
DEV u32 chunks_of_row(const Head &h)
{
    return UNLESS_WHOLE(h.chunks, 1);
}
DEV u32 bytes_of_row(const Head &h) /* in a stage, of rows in chunks */
{
    return chunks_of_row(h) > 1 ? h.fixed & ~KEEPS : 0;
}
DEV u32 adders_of(const Head &h)
{
#ifdef MJ_ADDERS
    return h.sums >> 16;
#else
    return 0;
#endif
}
DEV u32 passes_of(const Head &h)
{
#ifdef MJ_BATCHES /* of rows in chunks, those that are read once */
    return 1;
#else
    return UNLESS_WHOLE(h.passes, 1);
#endif
}
DEV u32 epilogue_of(const Head &h)
{
    return UNLESS_FLAT(h.epilogue, NO_TILE);
}
/* The word that is done for a batch of rows at once, or 0: where a fourth pass would be. */
DEV u32 tail_of(const Head &h)
{
#ifdef MJ_BATCHES
    return h.first[3];
#else
    return 0;
#endif
}
/* What a stage has of an input, and where that begins: elements [e, e + count) of one that is
 * contiguous, the rows of tile t of one that has an element for each row, or whose rows come again.
 * It is copied from the 16-byte boundary below to the one above: what is beyond the tensor shares
 * 16 aligned bytes with an element of it. */
#define OF_ROWS 256u
#define WHOLE_ROWS 128u
#define PERIOD_SHIFT 9
struct Piece { u64 from; u32 bytes; };
DEV Piece piece_of(const Head &h, u32 i, u64 e, u32 count)
{
    const u32 size = h.in[i].size & (WHOLE_ROWS - 1);
    const u64 low = h.in[i].ptr + e * size, high = low + (u64)count * size;
    return {low & ~15ull, (u32)(((high + 15) & ~15ull) - (low & ~15ull))};
}
DEV bool is_of_rows(const Head &h, u32 i)
{
    return UNLESS_FLAT(h.in[i].size & OF_ROWS, 0) != 0;
}
/* Of the rows of tile t, from the first or so many left on: what is side by side. A piece ends with
 * a period, where 16 aligned bytes do as well. */
DEV Piece piece_of_rows(const Head &h, u32 i, u32 t, u32 &left)
{
    const u32 rows = rows_of_tile(h), period = h.in[i].size >> PERIOD_SHIFT;
    u32 first = 0;
    if (left == 0) {
        first = t * rows;
        left = h.rows - first < rows ? (u32)(h.rows - first) : rows;
        first = period ? first % period : first;
    }
    const u32 count = period && left > period - first ? period - first : left;
    const u32 each = h.in[i].size & WHOLE_ROWS ? h.cols : 1;
    left -= count;
    return piece_of(h, i, (u64)first * each, count * each);
}
/* For the launch in front, and all it wrote. */
DEV void wait_for_launch()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* What the L2 cache does with what is copied: of large tensors, it drops that last. Then what is
 * written leaves at once, in the order in which it came. */
#define NORMAL 0x10000000u
#define DROPPED_LAST 0x14f00000u
/* Four times what a cache has. */
#if __CUDA_ARCH__ >= 1000
#define MANY_BYTES 500000000u
#else
#define MANY_BYTES 240000000u
#endif
DEV u32 keep_of(const Head &h)
{
    return h.elements * (h.in[0].size & 255) < MANY_BYTES ? NORMAL : DROPPED_LAST;
}
/* `rows`: whose chunks a stage has, one behind another; otherwise 1. */
DEV void feed(const Head &h, u32 barrier, u32 stage, u64 e, u32 count, u32 t, u32 lane, bool waits,
    u32 rows)
{
#if __CUDA_ARCH__ >= 900
    if (lane < rows) { /* a lane for each: one alone would take longer than what is copied */
        e += (u64)lane * h.cols;
        stage += lane * bytes_of_row(h);
        Piece one = piece_of(h, 0, e, count);
        asm volatile("" : "+l"(one.from), "+r"(one.bytes)); /* found before it is waited for */
        if (waits) {
            wait_for_launch();
        }
        u32 i = 0;
        const u32 keep = keep_of(h);
#pragma unroll 1
        while (i < h.n_in) {
            barrier_expect(barrier, one.bytes);
            bulk_copy(stage + h.in[i].at, one.from, one.bytes, barrier, keep);
            i++;
            if (i == h.n_in || is_of_rows(h, i)) {
                break;
            }
            one = piece_of(h, i, e, count);
        }
#pragma unroll 1
        for (u32 to = 0, left = 0; i < h.n_in; i += left == 0) {
            to = left ? to : stage + h.in[i].at;
            one = piece_of_rows(h, i, t, left);
            barrier_expect(barrier, one.bytes);
            bulk_copy(to, one.from, one.bytes, barrier, keep);
            to += one.bytes;
        }
    }
    __syncwarp();
    if (lane == 0) {
        barrier_arrive(barrier);
    }
#else
#pragma unroll 1
    for (u32 i = 0, before = 0, left = 0; i < h.n_in;) {
        const bool of_rows = is_of_rows(h, i);
        const Piece one = of_rows ? piece_of_rows(h, i, t, left) : piece_of(h, i, e, count);
        const u32 to = stage + h.in[i].at + before;
        for (u32 k = lane; k < one.bytes / 16; k += 32) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16 * k),
                         "l"(one.from + 16 * (u64)k) : "memory");
        }
        before = left ? before + one.bytes : 0;
        i += left == 0;
        if (i == h.n_in && --rows) {
            i = 0;
            e += h.cols;
            stage += bytes_of_row(h);
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
/* Of a stage, side by side: its barriers, full and empty; 16 bytes that tell the first of its
 * elements in the whole (64 bits), how many elements it has, or rows where those are whole, and its
 * first row. Of 0 elements, there is none. */
#define A_STAGE 32
#define EMPTY 8
#define TILE 16
#define WRITES 0x80000000u /* added to the count of a tile before which sums are written */
#define LAST 2u /* of a warp, beside a barrier's phase: its first tile is its last */
/* Whether a block has one tile, neither more nor none, and nobody waits for another. */
DEV bool has_one_tile(const Head &h, u32 blocks)
{
    const bool once = chunks_of_row(h) == 1 && epilogue_of(h) == NO_TILE && tail_of(h) == 0;
    return !h.counter && once && !UNLESS_FLAT(h.sums, 0) && h.tiles == blocks;
}
#define A_PASS 0x1000000u /* beside the chunk: 2^24 of them are more than a row has */
#define PROLOGUE 0xffu /* in the place of a pass */
#define TAIL 0xfeu     /* the same */
#define LATER 0x40000000u /* of a warp: the chunk is not a row's first */
#define MEMBER 0xff00u    /* a warp's number among those of its row */
#define OWNS 0x80000000u  /* the lane stores what there is one of for a row */
#define ABSENT 0x20000000u /* of a lane, where a warp has several rows: there is none for it */

#ifdef MJ_BATCHES
/* Row registers of a batch, see batches.py: those of the lane's row come behind those of the row
 * that is read now, then its number, then how many rows there are, in all lanes. */
DEV u32 rows_there(const Head &h, u32 rowfile)
{
    return rowfile + 128 * (2 * kept(h.rest[3]) + 1);
}
DEV bool batches(const Head &h, u32 facts)
{
    return tail_of(h) && (facts & MEMBER) == 0;
}
/* A row's numbers wait in the next lane; the turn that comes then. */
DEV u32 add_to_batch(const Head &h, u32 rowfile, u32 row)
{
    const u32 waiting = kept(h.rest[3]), to = rowfile + 128 * waiting;
    const u32 at = to + 128 * (waiting + 1), n = get_shared(at);
    if ((rowfile & 124) == 4 * n) { /* tells the lane */
        const u32 first = get_shared(rowfile), second = get_shared(rowfile + 128);
        set_shared(to, first);
        set_shared(to + 128, second); /* of one, where the row's number comes then */
#pragma unroll 1
        for (u32 k = 2; k < waiting; k++) {
            set_shared(to + 128 * k, get_shared(rowfile + 128 * k));
        }
        set_shared(at - 128, row);
    }
    set_shared(at, n + 1);
    return n + 1 == 32 ? TAIL * A_PASS : 0;
}
/* The lane's row, whose numbers are there; whether there is one: if not, it has another's. */
DEV bool take_from_batch(const Head &h, u32 rowfile, u32 &row)
{
    const u32 waiting = kept(h.rest[3]), at = rows_there(h, rowfile), lane = rowfile & 124;
    const bool there = lane < 4 * get_shared(at);
    __syncwarp();
#pragma unroll 1
    for (u32 k = waiting; k < 2 * waiting + 1; k++) {
        const u32 other = rowfile + 128 * k - lane;
        row = get_shared(there ? other + lane : other);
        __syncwarp();
        set_shared(other + lane, row);
    }
    set_shared(at, 0);
    return there;
}
#endif

/* Of numbers below 64: a division would be twenty instructions, and as many lines of cold code. */
DEV u32 quotient(u32 a, u32 b)
{
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"((float)b));
    return (u32)(((float)a + 0.5f) * inverse);
}
/* All of the block's shared memory, so that it begins at a multiple of 256. */
extern __shared__ __align__(1024) unsigned char mj_shared[];

/* From several places: with a number of threads, which __syncthreads() has not. */
DEV void all_meet(u32 warps)
{
    asm volatile("barrier.sync 14, %0;" ::"r"(32 * (warps + 1)) : "memory");
}
"""
