"""Bytecode that is kept: calls whose arguments lie in memory as those of earlier ones did."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from magjit_dvm.instructions import DType
from magjit_dvm.program import Input, InputKind, Node, NodeKind, Program
from tests.dvm.checking import SMALL, compute, load, machine, output, reduce, tensor

F32, F64, I64 = DType.F32, DType.F64, DType.I64


def scaled(kind: InputKind = InputKind.FLOAT) -> Any:
    inputs = tensor(F32, 0, 1), Input(kind, F32)
    nodes = (load(0, F32), Node(NodeKind.SCALAR, F32, aux=1), compute("mul", F32, 0, 1))
    return Program(2, inputs, nodes, (output(2, 0, 1),)).compiled()


def means() -> Any:
    nodes = (load(0, F32), reduce("sum", F32, 0, 1))
    return Program(2, (tensor(F32, 0, 1),), nodes, (output(1, 0),)).compiled()


def test_each_kind_of_arguments_has_its_own() -> None:
    """Kinds differ in a size, a stride, a number; of floats and of ints alike."""
    whole = torch.randn(4000)
    views = [
        whole[:360].view(9, 40),
        whole[:360].view(18, 20),
        whole[1:361].view(9, 40),
        whole[:360].view(40, 9).t(),
        whole[:450].view(9, 50)[:, :40],
        whole[:40].expand(9, 40),
        whole[:9, None].expand(9, 40),
        whole[:40].view(1, 40),
        whole[:0].view(0, 40),
    ]
    for fused, numbers in (
        (scaled(), (2.5, 2.25, 0.0, -0.0, 2, float("inf"))),
        (scaled(InputKind.INT), (2, 3, 0, -3, 1 << 40)),
    ):
        for turn in range(4):
            for x in views if turn % 2 else reversed(views):
                for number in numbers:
                    for _ in range(3):
                        made = fused(x, number)
                    wanted = x * number
                    assert torch.equal(made.isnan(), wanted.isnan())
                    assert torch.equal(made.nan_to_num(), wanted.nan_to_num())
                    assert torch.equal(made.signbit(), wanted.signbit())
        assert 1 < fused.kept() <= 8


def test_what_comes_once_is_not_kept() -> None:
    fused = means()
    for n in range(1, 200):
        fused(torch.ones(2, n))
    assert fused.kept() == 0
    for _ in range(2):
        fused(torch.ones(2, 3))
    assert fused.kept() == 1
    assert fused.encode(torch.ones(2, 3)) == means().encode(torch.ones(2, 3))


def test_other_threads_and_other_machines_have_other_bytecode() -> None:
    fused, x = means(), torch.randn(300, 2000)
    wanted, before = x.sum(1), torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            for _ in range(3):
                torch.testing.assert_close(fused(x), wanted)
    finally:
        torch.set_num_threads(before)
    kept = fused.kept()
    with machine(SMALL):
        for _ in range(3):
            torch.testing.assert_close(fused(x), wanted)
    assert fused.kept() > kept or kept == 2


def test_what_is_refused_is_refused_again() -> None:
    fallback: list[Any] = []
    inputs = tensor(F32, 0), tensor(F32, 0)
    nodes = (load(0, F32), load(1, F32), compute("add", F32, 0, 1))
    program = Program(1, inputs, nodes, (output(2, 0),))
    fused = program.compiled(lambda *given: fallback.append(given))
    for _ in range(4):
        assert fused(torch.ones(3), torch.ones(4)) is None
        assert fused(torch.ones(3).double(), torch.ones(3)) is None
        assert torch.equal(fused(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))
    assert len(fallback) == 8 and fused.kept() == 1


@pytest.mark.parametrize("large", [False, True])
def test_threads_share_an_operator(large: bool) -> None:
    """Large ones run beside one another, while others keep and forget."""
    fused, wrong = scaled(), list[str]()
    shapes = [(400 * (1 + 99 * large) + k, 7) for k in range(12)]

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60 if large else 400):
            k = int(torch.randint(len(shapes), (), generator=generator))
            x = torch.full(shapes[k], float(seed))
            for _ in range(3):
                made = fused(x, 0.5)
                if made.shape != x.shape or not bool((made == seed / 2).all()):
                    wrong.append(f"{seed}: {shapes[k]}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong
