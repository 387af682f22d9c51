"""Backends compile from descriptions alone and compute what eager computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from magjit.plugin import BackendContext

from .graphs import compile_for


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_inference(backend: str) -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    with torch.no_grad():
        compiled = compile_for(backend, lambda x, w: F.linear(x, w).relu(), [x, weight], static=[1])
        (out,) = compiled(x, weight)
    torch.testing.assert_close(out, F.linear(x, weight).relu())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_batch_norm_counts_once_and_trains(backend: str) -> None:
    def program(x, weight, bias, mean, var, count):
        count.add_(1)
        return F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5).relu().sum()

    def state() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [
            torch.randn(6, 4, requires_grad=True),
            torch.nn.Parameter(torch.randn(4)),
            torch.nn.Parameter(torch.randn(4)),
            torch.zeros(4),
            torch.ones(4),
            torch.tensor(0),
        ]

    ours, theirs = state(), state()
    compiled = compile_for(backend, program, ours, static=[1, 2, 3, 4, 5])
    assert int(ours[5]) == 0, "compiling ran the graph"
    for _ in range(2):
        (loss,) = compiled(*ours)
        loss.backward()
        expected = program(*theirs)
        expected.backward()
        torch.testing.assert_close(loss, expected)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other)
        torch.testing.assert_close(mine.grad, other.grad)


def test_static_inputs_reach_aot_autograd() -> None:
    context = BackendContext()
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    compile_for("aot_eager", lambda x, w: F.linear(x, w), [x, weight], static=[1], context=context)
    assert context.static_inputs == (1,)
    assert context.tracing_context.fw_metadata.static_input_indices == [1]
