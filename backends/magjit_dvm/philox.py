"""Random numbers as torch's dropout draws them on GPUs.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
section 4.3): a block of four numbers is a function of a key, which is the seed, and a counter.
``fused_dropout_kernel_vec`` of ATen, whose threads take ``4 * fours`` elements at a time, gives
thread t the counters whose upper half is t, from the generator's offset on::

    chunk   = element // (4 * fours)
    thread  = chunk % threads
    counter = place + chunk // threads * fours + element // 4 % fours,  thread
    number  = block(seed, counter)[element % 4]

A number is made uniform in (0, 1] as cuRAND does: times 2^-32, and 2^-33 more, rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FACTORS", "FOURS", "ROUNDS", "WEYL", "uniforms"]

FACTORS, WEYL, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
FOURS = 4
"""What an int of shares has its threads times, so that it says ``fours``, 1 or 2, as well."""
_LOW = np.uint64(0xFFFFFFFF)


def uniforms(
    elements: npt.NDArray[Any], seed: int, place: int, shares: int
) -> npt.NDArray[np.float32]:
    """The numbers of these elements of a tensor.

    Args:
        elements: their places in it, of one dimension.
        seed: of the generator; 64 bits, signed or not.
        place: the first counter: a fourth of the generator's offset.
        shares: ``threads * FOURS + fours``.
    """
    threads, fours = divmod(shares, FOURS)
    chunk, within = np.divmod(elements.astype(np.int64), 4 * fours)
    turn, thread = np.divmod(chunk, threads)
    counter = (place + turn * fours + within // 4).astype(np.uint64)
    block = _block(counter, thread.astype(np.uint64), seed % (1 << 64))
    chosen = np.choose(within % 4, block)
    # One rounding of the product and the sum, as a fused multiply-add has it.
    wide = chosen.astype(np.float32).astype(np.float64)
    return (wide * 2.0**-32 + 2.0**-33).astype(np.float32)


def _block(
    counter: npt.NDArray[np.uint64], thread: npt.NDArray[np.uint64], seed: int
) -> list[npt.NDArray[np.uint64]]:
    high = np.uint64(32)
    x, y, z, w = counter & _LOW, counter >> high, thread & _LOW, thread >> high
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(ROUNDS):
        first, second = np.uint64(FACTORS[0]) * x, np.uint64(FACTORS[1]) * z
        x, y, z, w = (
            (second >> high) ^ y ^ np.uint64(keys[0]),
            second & _LOW,
            (first >> high) ^ w ^ np.uint64(keys[1]),
            first & _LOW,
        )
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, WEYL, strict=True)]
    return [x, y, z, w]
