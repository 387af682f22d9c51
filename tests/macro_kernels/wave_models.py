"""Cost models with made-up numbers that could have been measured."""

from __future__ import annotations

import random
from dataclasses import replace

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.waves import Affine, Candidate, Library, Model, Wave


def affine(random_: random.Random, scale: float) -> Affine:
    return Affine(scale * random_.uniform(1e-6, 6e-6), scale * random_.uniform(1e-7, 9e-7))


def candidate(random_: random.Random) -> Candidate:
    split = random_.choice((1, 1, 1, 2, 4, 8))
    cut = Configuration(
        random_.choice((16, 32, 64, 128, 256)),
        random_.choice((16, 32, 64, 128, 256)),
        random_.choice((16, 32, 64, 128)),
        split_k=split,
        programs=random_.choice((0, 132)) if split == 1 else 0,
    )
    lone = affine(random_, 0.5)
    single = Affine(lone.fixed * 1.2, lone.per_step * 1.3)
    occupancy = random_.randint(1, 6)
    full = Affine(single.fixed, single.per_step * occupancy * 0.7)
    steady = Affine(full.fixed * 0.4, full.per_step)
    sums = (2e-6, 1e-12) if split > 1 else (0.0, 0.0)
    return Candidate(cut, occupancy, Wave(lone, single, full, steady), *sums)


def library(random_: random.Random) -> Library:
    m = tuple(sorted(random_.sample([2**one for one in range(15)], random_.randint(1, 15))))
    n = tuple(sorted(random_.sample([2**one for one in range(6, 15)], random_.randint(1, 6))))
    k = tuple(sorted(random_.sample([2**one for one in range(6, 15)], random_.randint(1, 6))))
    seconds = [
        4e-6 * random_.uniform(0.8, 1.5) + 2.0 * i * j * o / 6e14 for i in m for j in n for o in k
    ]
    return Library(m, n, k, tuple(seconds))


def residuals(random_: random.Random, table: Library) -> tuple[float, ...]:
    return tuple(random_.gauss(0.0, 0.3) for _ in table.points)


def model(
    seed: int,
    candidates: int = 24,
    corrected: bool = False,
    hedges: tuple[float, float] = (0.0, 0.0),
) -> Model:
    """Of every fifth seed without a library; where it is corrected, some candidates are not."""
    random_ = random.Random(seed)
    made = [candidate(random_) for _ in range(candidates)]
    table = None if seed % 5 == 4 else library(random_)
    if corrected and table is not None:
        measured = random.Random(-1 - seed)
        made = [
            replace(one, residuals=residuals(measured, table)) if number % 7 else one
            for number, one in enumerate(made)
        ]
    return Model(
        made,
        table,
        multiprocessors=random_.choice((1, 84, 108, 132)),
        bandwidth=random_.uniform(1e12, 5e12),
        products=random_.choice((1, 1, 2)),
        itemsize=random_.choice((2, 4)),
        unit=random_.choice((16, 64, 128)),
        hedge=hedges[0],
        hedge_between=hedges[1],
    )
