"""Random chains of movement operators: equal to eager, and no copy where strides say it all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.triton_backend.chains import Chain
from tests.triton_backend.running import run_beside_eager


def strides_of(chain: Chain) -> tuple[int, ...] | None:
    """The strides of the chain's end over the first product, found by numbering its elements."""
    first = chain.x @ chain.w
    numbers = chain.moved(torch.arange(first.numel()).reshape(first.shape).float()).long()
    strides = []
    for k, size in enumerate(numbers.shape):
        steps = numbers.diff(dim=k) if size > 1 else torch.zeros(1, dtype=torch.long)
        if not torch.equal(steps, steps.flatten()[0].expand_as(steps)):
            return None
        strides.append(int(steps.flatten()[0]))
    return tuple(strides) if min(strides) >= 0 else None


def seeds(first: int) -> list[Any]:
    """Two hundred, of which all but the first forty are slow."""
    return [pytest.param(first + k, marks=[] if k < 40 else pytest.mark.slow) for k in range(200)]


@pytest.mark.parametrize("seed", seeds(0))
def test_any_chain(seed: int) -> None:
    chain = Chain(seed)
    run_beside_eager(chain, (chain.x, chain.w, chain.v), tolerance=1e-5)


@pytest.mark.parametrize("seed", seeds(1000))
def test_no_copy_is_left_where_the_chain_has_strides(seed: int) -> None:
    chain = Chain(seed, affine_only=True)
    (graph,) = run_beside_eager(chain, (chain.x, chain.w, chain.v), tolerance=1e-5)
    if strides_of(chain) is not None:
        assert not graph.meta["copies"], f"{chain}\n{graph.graph}"


def test_many_chains_have_strides() -> None:
    with_strides = [strides_of(Chain(seed, affine_only=True)) for seed in range(1000, 1200)]
    assert sum(one is not None for one in with_strides) > 60
