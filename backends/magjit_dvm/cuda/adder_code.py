"""The code of warps that add up sums across rows: see ``adders.py``."""

from __future__ import annotations

__all__ = ["BESIDE_ADDERS", "OF_STAGE", "adding"]

BESIDE_ADDERS = (
    *((256, 8, 1), (512, 16, 1), (768, 24, 1), (1024, 32, 2)),
    *((2048, 64, 4), (4096, 64, 8), (8192, 32, 8)),
)
"""Of rows up to so many columns, R, and how many times four columns a lane of an adder has: the
best that an H200 was seen to have."""

OF_STAGE = r"""
struct __align__(8) Pair { u32 x, y; };
/* Four elements of a stage, of float32, float16 or bfloat16. */
template <u32 WHAT> DEV void four_of(const unsigned char *at, float (&to)[4])
{
    if constexpr (WHAT == 0) {
        const Quad q = *(const Quad *)at;
        to[0] = __uint_as_float(q.x);
        to[1] = __uint_as_float(q.y);
        to[2] = __uint_as_float(q.z);
        to[3] = __uint_as_float(q.w);
    } else {
        const Pair q = *(const Pair *)at;
        if constexpr (WHAT == 1) {
            asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
                : "=f"(to[0]), "=f"(to[1]) : "r"(q.x));
            asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
                : "=f"(to[2]), "=f"(to[3]) : "r"(q.y));
        } else {
            to[0] = __uint_as_float(q.x << 16);
            to[1] = __uint_as_float(q.x & 0xffff0000u);
            to[2] = __uint_as_float(q.y << 16);
            to[3] = __uint_as_float(q.y & 0xffff0000u);
        }
    }
}
/* Where the stage has the tile's part of an input, in shared memory. */
DEV u32 place_of(const Head &h, u32 stage, u32 i, u64 e)
{
    return stage + h.in[i].at + ((u32)(h.in[i].ptr + e * (h.in[i].size & 255)) & 15);
}
DEV const unsigned char *part_of(const Head &h, u32 stage, u32 i, u64 e)
{
    return mj_shared + place_of(h, stage, i, e);
}
"""
"""Behind ``SHELL`` of ``shell.py``: what compiled code reads of a stage."""

_CODE = r"""
/* Rows of a tile, from a lane's first column on, of which so many are there. */
struct Rows {{
    const unsigned char *g, *x;
    const float *mean, *root;
    u32 count, bytes;
    bool centered;
    int there;
}};
/* Of N times four columns of all rows: G · X and G. */
template <u32 N, u32 WHAT>
DEV void add_tile(float (&products)[N][4], float (&plain)[N][4], const Rows &rows)
{{
    const unsigned char *g = rows.g, *x = rows.x;
#pragma unroll {unrolled}
    for (u32 r = 0; r < rows.count; r++) {{
        const float m = rows.centered ? rows.mean[r] : 0, s = rows.root[r];
#pragma unroll
        for (u32 n = 0; n < N; n++) {{
            if ((int)(128 * n) < rows.there) {{
                float of_g[4], of_x[4];
                four_of<WHAT>(g + n * (WHAT ? 256 : 512), of_g);
                four_of<WHAT>(x + n * (WHAT ? 256 : 512), of_x);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {{
                    products[n][i] += of_g[i] * ((of_x[i] - m) * s);
                    plain[n][i] += of_g[i];
                }}
            }}
        }}
        g += rows.bytes;
        x += rows.bytes;
    }}
}}
template <u32 N> DEV void add_all(const Head &h, const Quad word, u32 number, u32 lane, u32 full,
                                  u32 blocks)
{{
    const u32 gradient = word.x >> 16 & 15, x = word.x >> 20 & 15, what = word.w >> 16;
    const u32 means = word.y & 255, roots = word.y >> 8;
    const u32 own = 128 * N * number + 4 * lane, cols = h.cols, size = what ? 2 : 4;
    const u32 S = h.stages, places_at = full + A_STAGE * S, shift = h.sums >> 8 & 255;
    const u32 places = blocks + (h.tiles > h.fixed ? ((h.tiles - h.fixed - 1) >> shift) + 1 : 0);
    const int there = (int)cols - (int)own;
    float products[N][4], plain[N][4];
    u32 s = 0, phase = 0;
    bool anew = true;
#pragma unroll 1
    for (;;) {{
        const u32 barrier = full + A_STAGE * s, stage = h.ring_at + s * h.stage_bytes;
        barrier_wait(barrier, phase);
        const Quad tile = get_quad(barrier + TILE);
        const u32 count = tile.z & ~WRITES;
        if ((int)tile.z <= 0) {{ /* no tile, or sums are to be written before */
            const u32 place = get_shared(places_at + 4 * s);
            if (place != NO_TILE) {{
#pragma unroll
                for (u32 k = 0; k < 2; k++) {{
                    const u32 sum = word.w >> 8 * k & 255;
                    if (sum != 255) {{
                        float *to = (float *)h.parts + ((u64)sum * places + place) * cols + own;
#pragma unroll
                        for (u32 n = 0; n < N; n++) {{
                            if ((int)(128 * n) < there) {{
                                const float *of = k ? plain[n] : products[n];
                                *(Quad *)(to + 128 * n) =
                                    Quad{{__float_as_uint(of[0]), __float_as_uint(of[1]),
                                         __float_as_uint(of[2]), __float_as_uint(of[3])}};
                            }}
                        }}
                    }}
                }}
            }}
            if (count == 0) {{
                return;
            }}
            anew = true;
        }}
        if (anew) {{
            anew = false;
#pragma unroll
            for (u32 n = 0; n < N; n++) {{
#pragma unroll
                for (u32 i = 0; i < 4; i++) {{
                    products[n][i] = plain[n][i] = 0;
                }}
            }}
        }}
        const u64 e = tile.x | (u64)tile.y << 32;
        const Rows rows = {{
            part_of(h, stage, gradient, e) + own * size,
            part_of(h, stage, x, e) + own * size,
            (const float *)part_of(h, stage, means != 255 ? means : roots, tile.w),
            (const float *)part_of(h, stage, roots, tile.w),
            count, size * cols, means != 255, there,
        }};
        if (what == 0) {{
            add_tile<N, 0>(products, plain, rows);
        }} else if (what == 1) {{
            add_tile<N, 1>(products, plain, rows);
        }} else {{
            add_tile<N, 2>(products, plain, rows);
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
DEV void add_rows_{each}(const Head &h, u32 number, u32 lane, u32 full, u32 blocks)
{{
    const Quad word = ((const Quad *)mj_shared)[h.rest[0]];
{choice}
}}
"""

_UNROLLED = {8: 4, 16: 4, 24: 2, 32: 2, 64: 1}
"""Of R, the rows that are under way at once."""


def adding(each: int) -> str:
    """The code of adders beside a kernel of R, which is in front of its entry."""
    choice = "\n".join(
        f"    if (word.z == {n}) {{\n"
        f"        add_all<{n}>(h, word, number, lane, full, blocks);\n        return;\n    }}"
        for n in _quads_beside(each)
    )
    return _CODE.format(each=each, choice=choice, unrolled=_UNROLLED[each])


def _quads_beside(each: int) -> list[int]:
    """How many times four columns a lane of an adder may have beside rows with this R."""
    widest = {each, 64} if each == 32 else {each}  # where R is at most 32
    return sorted({quads for _, one, quads in BESIDE_ADDERS if one in widest})
