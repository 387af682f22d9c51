"""A table of made-up times: the analytic model, with a ruggedness of its own for each cut."""

from __future__ import annotations

import hashlib
import math

import torch

from magjit_triton.codegen.matmul.configuration import Configuration, Work
from magjit_triton.macro.device import DEVICES
from magjit_triton.macro.heuristics import analytic, default_occupancy
from magjit_triton.macro.space import Space
from magjit_triton.macro.tuning import Table
from magjit_triton.macro.waves import Model

DEVICE = DEVICES["h200"]
WORK = Work(torch.float16)
SHAPES = tuple((1, m, 4096, 4096) for m in (1, 16, 64, 200, 512, 1500, 4096, 16384))


def rugged(cut: Configuration, share: float) -> float:
    digest = hashlib.sha256(str(cut).encode()).digest()
    return 1 + share * digest[0] / 255


def synthetic(space: Space, share: float = 0.15) -> Table:
    times = {}
    for cut in space.legal:
        one = analytic(cut, WORK, DEVICE, default_occupancy(cut, WORK, DEVICE))
        model = Model([one], None, multiprocessors=132, bandwidth=DEVICE.bandwidth)
        row = [model.seconds(0, *shape) * rugged(cut, share) for shape in SHAPES]
        if cut.stages == 4 and cut.block_n == 256 and cut.warps == 4:
            row = [math.inf] * len(SHAPES)  # as if registers were spilled
        times[cut] = row
    library = [5e-6 + 2.0 * m * n * k / 6e14 for _, m, n, k in SHAPES]
    return Table(space, SHAPES, times, library, {"device": DEVICE.name})
