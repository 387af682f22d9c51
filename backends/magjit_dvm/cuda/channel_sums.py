"""Sums of channels that lie side by side: what batch norms ask of images in channels-last memory.

A matrix of a row for each position and a column for each channel is read once, as memory has it: a
thread has 16 bytes of columns and keeps their sums over its rows in registers; a block joins its
threads' and writes them, as *parts*; a second, small launch joins the blocks' and makes of them
what an elementwise operator needs for each channel.  Which rows a thread has depends on nothing but
the sizes and the GPU: sums of the same are the same to the last bit.

The interpreter adds up across rows as well (``sums.py``), beside what a group computes, in shared
memory, which would be what these sums wait for: nothing is computed here but them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from magjit_dvm.cuda.channel_code import (
    CHANNELS,
    COLUMNS,
    LOADED,
    MOST_BLOCKS,
    MOST_GROUPS,
    THREADS,
)
from magjit_dvm.cuda.launch import gpu
from magjit_dvm.cuda.parts import WHAT
from magjit_dvm.instructions import DType
from magjit_dvm.vm import cuda_pair

__all__ = ["Gradients", "Moments"]

_WHAT = {one.torch: number for one, number in WHAT.items()}
_CODES = {one.torch: one.code for one in WHAT}
_BLOCKS = 2
"""Of a multiprocessor, side by side."""
_MOST_ROWS = 1 << 31
_SIZES, _END_SIZES, _NUMBERS = "<6I", "<4I", "<3I2fI"
"""What the kernels are told behind addresses."""
_MOST_KNOWN = 64
"""Sizes that a place in a program remembers."""

_Pair = Sequence[Tensor | None]
"""Of a mean and a variance."""


@dataclass(frozen=True, slots=True)
class _Division:
    """How sums of tensors of some sizes are divided among blocks.

    Attributes:
        plan: of both launches, see ``cuda_pair``.
        rest: full steps of all blocks, and rows beyond them.
        around: dtype and shape of what channels have one number of, beside x.
    """

    plan: tuple[Any, ...]
    rest: tuple[int, int]
    around: tuple[int, ...]


class _Sums:
    """The two launches of a place in a program.

    Attributes:
        form: of the first kernel, see ``CHANNELS_NAMES``; the second's is the next one.
    """

    form: int

    def __init__(self) -> None:
        self._known: dict[Any, _Division] = {}

    def division(self, x: Tensor) -> _Division | None:
        """None where there are no kernels (yet), or rows do not begin with 16 aligned bytes."""
        key = x.shape, x.stride(), x.dtype, x.device
        found = self._known.get(key)
        if found is None:
            found = self._divided(x)
            if found is not None:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = found
        return found if x.data_ptr() % 16 == 0 else None

    def _divided(self, x: Tensor) -> _Division | None:
        channels, of_group = x.shape[1], 16 // x.itemsize
        count = x.numel() // channels
        if not 0 < count < _MOST_ROWS or channels % of_group or not _is_last(x):
            return None
        one = gpu(x.device.index)
        kernels = [one.function(CHANNELS, False, self.form + k, waits=False) for k in range(2)]
        if not all(kernels):
            return None
        together = channels // of_group
        across = -(-together // MOST_GROUPS)
        groups = -(-together // across)
        rows = THREADS // groups
        most = min(-(-_BLOCKS * one.machine.multiprocessors // across), MOST_BLOCKS)
        blocks = min(most, -(-count // (rows * LOADED[self.form // 2])))
        plan = (
            *(one.index, *kernels, blocks * across, -(-channels // COLUMNS), THREADS),
            2 * blocks * channels,
            struct.pack(_SIZES, count, channels, groups, rows, across, _WHAT[x.dtype]),
            struct.pack(_END_SIZES, count, channels, blocks, rows),
        )
        around = DType.F32.code, 1, channels, *[1] * (x.dim() - 2)
        return _Division(plan, divmod(count, blocks * rows), around)


class Moments(_Sums):
    """Means and deviations of channels."""

    form = 0

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: _Pair,
        updated: _Pair,
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, ...] | None:
        """Mean and inverse deviation (channels), scale and shift (1, channels, 1, …), of float32.

        Nothing where no kernel is there, or none for such a tensor.

        Args:
            x: (images, channels, …), of float32, float16 or bfloat16.
            weight, bias: (channels), if there are any.
            running, updated: statistics, and where new ones are written, if there are any.
        """
        division = self.division(x)
        alike = running[0] is None or running[1] is None or running[0].dtype == running[1].dtype
        if division is None or not alike or not _are_vectors(weight, bias, *running, *updated):
            return None
        whats = _what(weight) | _what(bias) << 8 | _what(running[0]) << 16
        numbers = struct.pack(_NUMBERS, whats, *division.rest, momentum, eps, 0)
        given = x, None, None, None
        ending = weight, bias, *running, 0, 1, 2, 3, None, *updated, None, None
        plain = DType.F32.code, x.shape[1]
        shapes = plain, plain, division.around, division.around
        return cuda_pair(division.plan, given, ending, numbers, shapes)


class Gradients(_Sums):
    """Gradients of weight and bias, and what that of x is made of."""

    form = 2

    def __call__(
        self, dy: Tensor, y: Tensor | None, x: Tensor, weight: Any, mean: Tensor, root: Tensor
    ) -> tuple[Tensor, ...] | None:
        """Gradients of weight and bias; scale, slope and shift (1, channels, 1, …) of float32.

        The gradient of x is dy · scale + x · slope + shift where x has 16 bits; of float32, whose
        rounding might tell, (x − mean) · slope takes the place of x · slope.

        Args:
            y: where it is 0 or less, dy counts as 0.
            mean, root: (channels) of float32: mean and inverse deviation of x.
        """
        division = self.division(x)
        if division is None or not _is_alike(dy, x) or not (y is None or _is_alike(y, x)):
            return None
        if not _are_vectors(weight, mean, root):
            return None
        dtype = x.dtype if weight is None else weight.dtype
        numbers = struct.pack(_NUMBERS, _WHAT[dtype], *division.rest, 0.0, 0.0, 0)
        about = mean if x.itemsize == 2 else None
        ending = weight, None, None, None, about, root, 2, 4, 3, None, None, 0, 1
        plain = _CODES[dtype], x.shape[1]
        shapes = plain, plain, division.around, division.around, division.around
        return cuda_pair(division.plan, (x, dy, y, mean), ending, numbers, shapes)


def _is_last(x: Tensor) -> bool:
    """Whether channels lie side by side, and nothing between positions."""
    stride = x.shape[1]
    for d in (*range(x.dim() - 1, 1, -1), 0):
        if x.shape[d] != 1 and x.stride(d) != stride:
            return False
        stride *= x.shape[d]
    return x.stride(1) == 1


def _is_alike(one: Tensor, x: Tensor) -> bool:
    """Whether a tensor lies as another does, but for sizes of 1."""
    same = one.dtype is x.dtype and one.device == x.device and one.shape == x.shape
    return same and one.data_ptr() % 16 == 0 and (one.stride() == x.stride() or _is_last(one))


def _are_vectors(*given: Tensor | None) -> bool:
    """Whether all have an element after another, of dtypes that kernels know."""
    known = (one for one in given if one is not None)
    return all(one.dtype in _WHAT and one.is_contiguous() for one in known)


def _what(one: Tensor | None) -> int:
    return 0 if one is None else _WHAT[one.dtype]
