"""The kernel that adds up parts of sums across rows: see ``sums.py``."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from magjit_dvm.instructions import DType

__all__ = [
    "COLUMNS",
    "MOST_EACH",
    "MOST_SUMS",
    "SUMS",
    "SUMS_NAME",
    "SUMS_SOURCE",
    "THREADS",
    "WHAT",
    "WRITE_SUMS",
    "Parts",
]

MOST_SUMS, MOST_EACH = 8, 32
"""Of a launch; and the largest R of one that has any."""
SUMS, SUMS_NAME = 1, "mj_dvm_sums_1"
"""Of the second kernel: what stands for it in the place of R, and its name."""
COLUMNS, THREADS = 8, 512
"""Of a block of the second kernel, which adds up the sums of all operators of a stack."""
WHAT = {DType.F32: 0, DType.F16: 1, DType.BF16: 2}

WRITE_SUMS = r"""
/* What all warps have added up goes to a row of the parts; they begin anew with the tile. Outside
 * of the loop over tiles this takes no registers of words; a call would take the uniform ones. */
DEV void write_sums(const Head &h, u32 place, u32 blocks, u32 slice, u32 tile_at)
{
    const u32 W = h.warps, G = h.group, cols = h.cols, bytes = G * h.scratch_bytes;
    const u32 rows = W / G, count = (h.sums & 255) * cols, shift = h.sums >> 8 & 255;
    const u32 places = blocks + (h.tiles > h.fixed ? ((h.tiles - h.fixed - 1) >> shift) + 1 : 0);
    asm volatile("bar.sync 15, %0;" ::"r"(32 * W) : "memory");
#pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += 32 * W) {
        const u32 number = i / cols, column = i - number * cols, part = column / slice;
        unsigned char *at = mj_shared + h.scratch_at + part * h.scratch_bytes +
            4 * (number * slice + column % slice);
        float sum = 0;
#pragma unroll 4
        for (u32 r = 0; r < rows; r++) {
            sum += *(float *)(at + r * bytes);
            *(float *)(at + r * bytes) = 0;
        }
        ((float *)h.parts)[((u64)number * places + place) * cols + column] = sum;
    }
    if (threadIdx.x == 0) {
        set_shared(tile_at, get_shared(tile_at) - WRITES);
    }
    asm volatile("bar.sync 15, %0;" ::"r"(32 * W) : "memory");
}
"""
"""Of the first kernel: behind ``SHELL`` of ``shell.py``."""

SUMS_SOURCE = r"""
typedef unsigned u32;
typedef unsigned long long u64;

struct Sum { u64 parts, to; u32 rows, cols, what, end; };
struct Sums { Sum of[64]; };

/* A block adds up 8 columns of one sum, as many as 32 bytes have; a warp takes 4 rows at once, and
 * each 16th of such. Sums have blocks of their own, one after another. */
extern "C" __global__ void __launch_bounds__(512, 2)
mj_dvm_sums_1(const __grid_constant__ Sums s)
{
    __shared__ float added[16][8];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 number = 0;
#pragma unroll 1
    while (blockIdx.x >= s.of[number].end) {
        number++;
    }
    const Sum &one = s.of[number];
    const u32 first = 8 * (blockIdx.x - (number ? s.of[number - 1].end : 0));
    const u32 column = first + (lane & 7);
    const u32 rows = one.rows, cols = one.cols;
    const float *const part = (const float *)one.parts + column;
    float sum = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (column < cols) {
#pragma unroll 8
        for (u32 row = 4 * warp + lane / 8; row < rows; row += 64) {
            sum += part[(u64)row * cols];
        }
    }
    sum += __shfl_xor_sync(~0u, sum, 8);
    sum += __shfl_xor_sync(~0u, sum, 16);
    if (lane < 8) {
        added[warp][lane] = sum;
    }
    __syncthreads();
    if (warp >= 4) {
        return;
    }
    sum = added[lane & 15][2 * warp + lane / 16]; /* half a warp has a column now */
    for (u32 apart = 8; apart; apart /= 2) {
        sum += __shfl_xor_sync(~0u, sum, apart);
    }
    const u32 own = first + 2 * warp + lane / 16;
    if (lane & 15 || own >= cols) {
        return;
    }
    if (one.what == 0) {
        ((float *)one.to)[own] = sum;
    } else {
        unsigned short half;
        if (one.what == 1) {
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(sum));
        } else {
            asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(sum));
        }
        ((unsigned short *)one.to)[own] = half;
    }
}
"""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the second kernel of a call adds up.

    Attributes:
        results: of each sum, the argument that it is stored to, and its dtype (``WHAT``).
        rows, cols: of each sum's parts: a row for each block.
        argument: the number of the memory of parts, behind all others.
    """

    results: tuple[tuple[int, int], ...]
    rows: int
    cols: int
    argument: int

    @property
    def count(self) -> int:
        """Float32 numbers of all parts."""
        return len(self.results) * self.rows * self.cols

    @property
    def blocks(self) -> int:
        """Of the second launch."""
        return len(self.results) * -(-self.cols // COLUMNS)

    def pack(self, address: int, addresses: list[int]) -> bytes:
        """The second kernel's parameter, given where parts and arguments are."""
        packed, across = b"", -(-self.cols // COLUMNS)
        for number, (argument, what) in enumerate(self.results):
            at = address + 4 * number * self.rows * self.cols
            end = (number + 1) * across
            packed += struct.pack("<QQ4I", at, addresses[argument], self.rows, self.cols, what, end)
        return packed

    def added(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """What the second kernel computes, but for the order in which it adds up."""
        rows = parts.view(len(self.results), self.rows, self.cols).numpy()
        dtypes = {number: dtype for dtype, number in WHAT.items()}
        return [
            torch.from_numpy(row.sum(0, dtype=np.float64)).to(dtypes[what].torch)
            for row, (_, what) in zip(rows, self.results, strict=True)
        ]
