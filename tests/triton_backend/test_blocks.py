"""The benchmark's blocks: results, strides, caches and gradients of eager mode, less memory."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.triton_backend.running import compiled, run_beside_eager, watched
from vt_blocks import BLOCKS


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", BLOCKS)
def test_inference(name: str, batch: int) -> None:
    block = BLOCKS[name].build(batch, "cpu")
    run_beside_eager(block.module, block.arguments, tolerance=1e-5)


@pytest.mark.parametrize("objective", ["memory"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_objective_memory(name: str, objective: str) -> None:
    block = BLOCKS[name].build(2, "cpu")
    options = {"objective": objective}
    run_beside_eager(block.module, block.arguments, tolerance=1e-5, options=options)


@pytest.mark.parametrize("name", BLOCKS)
def test_training(name: str) -> None:
    block = BLOCKS[name].build(2, "cpu")
    results = []
    for ours in (False, True):
        module = copy.deepcopy(block.module).train().requires_grad_(True)
        call = compiled(module) if ours else module
        for _ in range(2):
            given, *rest = (one.clone() for one in block.arguments)
            given.requires_grad_(True)
            module.zero_grad()
            made = call(given, *rest)
            made.square().mean().backward()
        grads = {key: one.grad for key, one in module.named_parameters()}
        results.append([made.detach(), given.grad, *grads.values(), *(r.detach() for r in rest)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


EXPECTED_COPIES = {
    "Llama-3-8B decode": 2,  # half of the turned queries and keys
    "Gemma-2-9B decode": 2,
    "QKV prefill": 3,  # and the values into their cache
    "YOLOv11n C3k2": 0,
    "ShuffleNet unit": 1,  # the shuffle itself
}


@pytest.mark.parametrize("name", EXPECTED_COPIES)
def test_copies_that_are_left(name: str) -> None:
    block = BLOCKS[name].build(2, "cpu")
    call = compiled(block.module)
    with torch.no_grad(), watched() as graphs:
        call(*block.arguments)
        call(*block.arguments)
    assert len(graphs[0].meta["copies"]) == EXPECTED_COPIES[name], graphs[0].meta["copies"]
