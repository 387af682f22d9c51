"""The code of warps that compute gradients of norms whole: see ``gradients.py``."""

from __future__ import annotations

__all__ = ["gradients"]

_CODE = r"""
/* What a lane has of a row, and where it is. */
struct Row {{
    u32 g, x, weight; /* in shared memory, of the lane's first column */
    float mean, root;
    int there, there_of_warp; /* columns of the row from the lane's first on, and the warp's */
}};
struct Four {{ float g[4], x[4], w[4]; }};
/* Of a lane's n-th four columns; where they are not FULL, zeros beyond the row's end: stages and
 * vectors that are kept have something there. */
template <u32 WHAT, bool FULL> DEV Four four_of_row(const Row &row, u32 n)
{{
    Four f;
    four_of<WHAT>(mj_shared + row.g + n * (WHAT ? 256 : 512), f.g);
    four_of<WHAT>(mj_shared + row.x + n * (WHAT ? 256 : 512), f.x);
    four_of<0>(mj_shared + row.weight + 512 * n, f.w);
    if (!FULL) {{
        const bool is_there = (int)(128 * n) < row.there;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {{
            f.g[i] = is_there ? f.g[i] : 0;
            f.x[i] = is_there ? f.x[i] : row.mean;
            f.w[i] = is_there ? f.w[i] : 0;
        }}
    }}
    return f;
}}
DEV u32 half_pair(float low, float high)
{{
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}}
DEV u32 bfloat_pair(float low, float high)
{{
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}}
template <u32 WHAT> DEV void store_four(u64 to, const float (&of)[4])
{{
    if constexpr (WHAT == 0) {{
        asm volatile("st.global.v4.f32 [%0], {{%1, %2, %3, %4}};"
                     ::"l"(to), "f"(of[0]), "f"(of[1]), "f"(of[2]), "f"(of[3]));
    }} else if constexpr (WHAT == 1) {{
        asm volatile("st.global.v2.b32 [%0], {{%1, %2}};"
                     ::"l"(to), "r"(half_pair(of[0], of[1])), "r"(half_pair(of[2], of[3])));
    }} else {{
        asm volatile("st.global.v2.b32 [%0], {{%1, %2}};"
                     ::"l"(to), "r"(bfloat_pair(of[0], of[1])), "r"(bfloat_pair(of[2], of[3])));
    }}
}}
/* Two sums over all lanes of a warp, or over each 16 of them. */
template <u32 APART> DEV void sum_of_lanes(float &a, float &b)
{{
#pragma unroll
    for (u32 by = APART; by; by /= 2) {{
        a += __shfl_xor_sync(~0u, a, by);
        b += __shfl_xor_sync(~0u, b, by);
    }}
}}
/* A row: its gradient to memory, and G · X, and G if it is asked for, to a lane's sums. Of 16 bits,
 * X is x · root less mean · root, whose rounding is as large as that of the mean. */
template <u32 N, u32 WHAT, bool BOTH, bool FULL>
DEV void back_row(float (&products)[N][4], float (&plain)[N][4], const Row &row, u64 to, u32 words,
                  u32 partials, u32 group, u32 member, u32 G, u32 lane)
{{
    const float away = -row.mean * row.root;
    float of_g = 0, of_x = 0;
#pragma unroll
    for (u32 n = 0; n < N; n++) {{
        if (!FULL && (int)(128 * n) >= row.there_of_warp) {{
            break;
        }}
        const Four f = four_of_row<WHAT, FULL>(row, n);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {{
            const float x = WHAT ? f.x[i] * row.root + away : (f.x[i] - row.mean) * row.root;
            const float g = f.g[i] * f.w[i];
            of_g += g;
            of_x += g * x;
            products[n][i] += f.g[i] * x;
            if (BOTH) {{
                plain[n][i] += f.g[i];
            }}
        }}
    }}
    sum_of_lanes<16>(of_g, of_x);
    if (G > 1) {{
        if (lane == 0) {{
            asm volatile("st.volatile.shared.v2.f32 [%0], {{%1, %2}};"
                         ::"r"(partials + 8 * member), "f"(of_g), "f"(of_x) : "memory");
        }}
        asm volatile("barrier.sync %0, %1;" ::"r"(group + 1), "r"(32 * G) : "memory");
        of_g = of_x = 0;
        if ((lane & 15) < G) {{
            asm volatile("ld.volatile.shared.v2.f32 {{%0, %1}}, [%2];"
                         : "=f"(of_g), "=f"(of_x) : "r"(partials + 8 * (lane & 15)) : "memory");
        }}
        sum_of_lanes<8>(of_g, of_x);
    }}
    const Quad word = get_quad(words);
    const bool centered = (word.y & 255) != 255;
    of_g = centered ? of_g * __uint_as_float(word.z) : 0;
    of_x *= __uint_as_float(word.z);
    const float of_row = row.root * of_x * row.root;
    const float beside = -(of_g + away * of_x) * row.root;
    asm volatile("" ::: "memory"); /* all is loaded again: registers are for sums */
#pragma unroll
    for (u32 n = 0; n < N; n++) {{
        if (!FULL && (int)(128 * n) >= row.there_of_warp) {{
            break;
        }}
        const Four f = four_of_row<WHAT, FULL>(row, n);
        float back[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {{
            const float g = f.g[i] * f.w[i];
            if (WHAT) {{
                back[i] = g * row.root + (beside - f.x[i] * of_row);
            }} else {{
                back[i] = (g - of_g - (f.x[i] - row.mean) * row.root * of_x) * row.root;
            }}
        }}
        if (FULL || (int)(128 * n) < row.there) {{
            store_four<WHAT>(to + n * (WHAT ? 256 : 512), back);
        }}
    }}
}}
template <u32 N> DEV void clear(float (&sums)[N][4])
{{
#pragma unroll
    for (u32 n = 0; n < N; n++) {{
#pragma unroll
        for (u32 i = 0; i < 4; i++) {{
            sums[n][i] = 0;
        }}
    }}
}}
/* What lanes have added up, to a row of the parts. Where a tile has several rows, their warps meet
 * in shared memory: in each turn with four columns of each lane, in two places by turns. */
template <u32 N, bool BOTH>
DEV void write_own(const Head &h, float (&products)[N][4], float (&plain)[N][4], u32 sums,
                   u32 place, u32 blocks, u32 group, u32 member, u32 lane, u32 base)
{{
    const u32 G = h.group, rows = h.warps / G, cols = h.cols, own = 128 * N * member + 4 * lane;
    const u32 shift = h.sums >> 8 & 255, a_turn = 512 * h.warps;
    const u32 places = blocks + (h.tiles > h.fixed ? ((h.tiles - h.fixed - 1) >> shift) + 1 : 0);
    const u32 at = base + h.rows_at + 512 * member + 16 * lane;
    const int there = (int)cols - (int)own;
    u32 who = 0; /* the row whose warps add up a turn */
#pragma unroll
    for (u32 k = 0; k < 1 + BOTH; k++) {{
        const u32 sum = sums >> 8 * k & 255;
        float *to = (float *)h.parts + ((u64)sum * places + place) * cols + own;
#pragma unroll
        for (u32 n = 0; n < N; n++) {{
            float *of = k ? plain[n] : products[n];
            Quad q = {{__float_as_uint(of[0]), __float_as_uint(of[1]), __float_as_uint(of[2]),
                      __float_as_uint(of[3])}};
            const u32 turn = N * k + n, now = at + (turn & 1) * a_turn;
            bool writes = (int)(128 * n) < there;
            if (rows > 1) {{
                set_quad(now + group * 512 * G, q);
                asm volatile("barrier.sync 15, %0;" ::"r"(32 * h.warps) : "memory");
                writes = writes && who == group;
                who = who + 1 == rows ? 0 : who + 1;
                if (writes) {{
                    float total[4] = {{0, 0, 0, 0}};
#pragma unroll 4
                    for (u32 r = 0; r < rows; r++) {{
                        const Quad one = get_quad(now + r * 512 * G);
                        total[0] += __uint_as_float(one.x);
                        total[1] += __uint_as_float(one.y);
                        total[2] += __uint_as_float(one.z);
                        total[3] += __uint_as_float(one.w);
                    }}
                    q = {{__float_as_uint(total[0]), __float_as_uint(total[1]),
                         __float_as_uint(total[2]), __float_as_uint(total[3])}};
                }}
            }}
            if (writes) {{
                *(Quad *)(to + 128 * n) = q;
            }}
        }}
    }}
    if (rows > 1) {{ /* the next ones have these places from the first turn on */
        asm volatile("barrier.sync 15, %0;" ::"r"(32 * h.warps) : "memory");
    }}
}}
/* All tiles of a block. The words are read again for each row: registers are for sums. */
template <u32 N, u32 WHAT, bool BOTH>
DEV void back_all(const Head &h, u32 group, u32 member, u32 lane, u32 full, u32 base, u32 blocks)
{{
    const u32 S = h.stages, words = base + 16 * h.first[0];
    float products[N][4], plain[N][4];
    u32 s = 0, phase = 0, turn = 0;
    clear(products);
    clear(plain);
#pragma unroll 1
    for (;;) {{
        const u32 barrier = full + A_STAGE * s;
        barrier_wait(barrier, phase);
        const Quad tile = get_quad(barrier + TILE), word = get_quad(words);
        if ((int)tile.z <= 0) {{ /* no tile, or sums are to be written before */
            const u32 place = get_shared(full + A_STAGE * S + 4 * s);
            if (place != NO_TILE) {{
                write_own<N, BOTH>(h, products, plain, word.y >> 16, place, blocks, group, member,
                                   lane, base);
            }}
            if (!(tile.z & ~WRITES)) {{
                return;
            }}
            clear(products);
            clear(plain);
        }}
        if (group < (tile.z & ~WRITES)) {{
            const u32 of_g = word.x >> 16 & 15, of_x = word.x >> 20 & 15;
            const u32 means = word.y & 255, roots = word.y >> 8 & 255;
            const u32 stage = h.ring_at + s * h.stage_bytes, own = 128 * N * member + 4 * lane;
            const u64 e = tile.x | (u64)tile.y << 32;
            const u32 first = group * h.cols + own, size = WHAT ? 2 : 4;
            const Quad store = get_quad(words + 16);
            const Row row = {{
                place_of(h, stage, of_g, e) + first * size,
                place_of(h, stage, of_x, e) + first * size,
                get_shared(words + 36) + 4 * own,
                means != 255 ? ((const float *)part_of(h, stage, means, tile.w))[group] : 0,
                ((const float *)part_of(h, stage, roots, tile.w))[group],
                (int)h.cols - (int)own, (int)h.cols - (int)(128 * N * member),
            }};
            const u64 to = (store.z | (u64)store.w << 32) + (e + first) * size;
            const u32 partials = base + h.partials_at + 512 * group + 256 * turn;
            if (128 * N * (member + 1) <= h.cols) {{
                back_row<N, WHAT, BOTH, true>(products, plain, row, to, words, partials, group,
                                              member, h.group, lane);
            }} else {{
                back_row<N, WHAT, BOTH, false>(products, plain, row, to, words, partials, group,
                                               member, h.group, lane);
            }}
            turn ^= 1;
        }}
        __syncwarp();
        if (EMPTY_ARRIVALS > 1 || lane == 0) {{
            barrier_arrive(barrier + EMPTY);
        }}
        if (++s == S) {{
            s = 0;
            phase ^= 1;
        }}
    }}
}}
template <u32 N, u32 WHAT>
DEV void back_any(const Head &h, bool both, u32 group, u32 member, u32 lane, u32 full, u32 base,
                  u32 blocks)
{{
    if (both) {{
        back_all<N, WHAT, true>(h, group, member, lane, full, base, blocks);
    }} else {{
        back_all<N, WHAT, false>(h, group, member, lane, full, base, blocks);
    }}
}}
DEV void back_rows_{each}(const Head &h, u32 group, u32 member, u32 lane, u32 full, u32 base,
                          u32 blocks)
{{
    const Quad word = get_quad(base + 16 * h.first[0]);
    const bool both = word.y >> 24 != 255;
    if (word.w == 0) {{
        back_any<{quads}, 0>(h, both, group, member, lane, full, base, blocks);
    }} else if (word.w == 1) {{
        back_any<{quads}, 1>(h, both, group, member, lane, full, base, blocks);
    }} else {{
        back_any<{quads}, 2>(h, both, group, member, lane, full, base, blocks);
    }}
}}
"""


def gradients(each: int) -> str:
    """The code of a kernel of R, which is in front of its entry."""
    return _CODE.format(each=each, quads=each // 4)
