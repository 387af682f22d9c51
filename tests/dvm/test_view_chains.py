"""Views inside a schedule: the machine's strides are torch's, and nobody outside sees one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

import magjit
from magjit_dvm.backend import schedules
from magjit_dvm.view_chains import ViewChain, in_chains
from magjit_dvm.vm import Views

aten = torch.ops.aten
GIVEN = 1 << 61


def refuse(*_: Any) -> Tensor:
    raise AssertionError("left to torch")


def place(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset(), x.data_ptr(), x.dtype


# -- chains of drawn operators --------------------------------------------------------------------


def drawn_view(chosen: random.Random, x: Tensor) -> list[int] | None:
    """Sizes that x can be viewed as."""
    whole = x.numel()
    for _ in range(20):
        sizes, left = [], whole
        for _ in range(chosen.randint(0, 3)):
            divisors = [k for k in range(1, left + 1) if left % k == 0]
            sizes.append(chosen.choice(divisors))
            left //= sizes[-1]
        sizes.insert(chosen.randint(0, len(sizes)), left)
        try:
            x.view(sizes)
        except RuntimeError:
            continue
        if chosen.random() < 0.3:
            sizes[chosen.randrange(len(sizes))] = -1
        return sizes
    return None


def drawn_node(chosen: random.Random, x: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """A view and what else it takes."""
    rank = x.dim()
    dim = chosen.randint(-rank, rank - 1) if rank else 0
    match chosen.randrange(9):
        case 0 | 1:
            sizes = drawn_view(chosen, x)
            return sizes and (aten.view.default, (sizes,))
        case 2:
            return aten.permute.default, (chosen.sample(range(rank), rank),)
        case 3 if rank > 1:
            return aten.transpose.int, (dim, chosen.randrange(rank))
        case 4 if rank < 6:
            return aten.unsqueeze.default, (chosen.randint(-rank - 1, rank),)
        case 5 if rank and x.shape[dim] == 1:
            return aten.squeeze.dim, (dim,)
        case 6 if rank and x.shape[dim] > 1:
            return aten.select.int, (dim, chosen.randint(-x.shape[dim], x.shape[dim] - 1))
        case 7 if rank:
            first, last = chosen.choice([None, 0, 1, -1]), chosen.choice([None, 2, -1, 2**63 - 1])
            made = (dim, first, last, chosen.choice([1, 1, 2]))
            return (aten.slice.Tensor, made) if aten.slice.Tensor(x, *made).numel() else None
        case 8:
            sizes = [
                chosen.choice([-1, size]) if size != 1 else chosen.choice([1, 3])
                for size in x.shape
            ]
            more = [chosen.choice([1, 2]) for _ in range(chosen.randint(0, 1))]
            return aten.expand.default, (more + sizes,)
    return None


def traced(x: Tensor, views: list[tuple[Any, tuple[Any, ...]]]) -> GraphModule:
    """Views of an input, and their sum."""
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    for target, args in views:
        before = node.meta["val"]
        node = graph.call_function(target, (node, *args))
        node.meta["val"] = target(before, *args)
    graph.output((graph.call_function(aten.sin.default, (node,)),))
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("seed", range(300))
def test_chains_are_torchs(seed: int) -> None:
    chosen = random.Random(seed)
    sizes = [chosen.choice([1, 2, 3, 4, 6]) for _ in range(chosen.randint(1, 4))]
    x = torch.randn([2 * size for size in sizes])[tuple(slice(0, size) for size in sizes)]
    x = x.permute(chosen.sample(range(len(sizes)), len(sizes)))
    if chosen.random() < 0.5:
        x = x.contiguous()
    views, expected = [], x
    for _ in range(chosen.randint(1, 8)):
        if one := drawn_node(chosen, expected):
            views.append(one)
            expected = one[0](expected, *one[1])
    gm = traced(x, views)
    steps = in_chains(list(gm.graph.nodes))
    assert len(steps) == (4 if views else 3)
    for chain in (one for one in steps if isinstance(one, ViewChain)):
        assert place(chain.compiled(gm)(x)) == place(expected)
        assert place(chain.by_torch(gm)(x)) == place(expected)


# -- calls ----------------------------------------------------------------------------------------


def test_numbers_of_a_call() -> None:
    split = Views(((0, (GIVEN, GIVEN + 1, 4)), (1, (1, 0, 2))), 2, refuse)
    for rows, columns in ((3, 5), (1, 7)):
        x = torch.randn(rows * columns, 4)
        assert place(split(x, rows, columns)) == place(x.view(rows, columns, 4).permute(1, 0, 2))


def test_what_it_makes_is_no_view() -> None:
    x = torch.nn.Parameter(torch.randn(3, 4))
    made = Views(((1, (1, 0)),), 0, refuse)(x)
    assert made._base is None and not made.requires_grad and type(made) is Tensor
    assert made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("operators", "given", "x"),
    [
        (((0, (5, 2)),), (), torch.randn(3, 4)),
        (((0, (-1, 5)),), (), torch.randn(3, 4)),
        (((0, (12,)),), (), torch.randn(4, 3).t()),
        (((1, (0, 1, 2)),), (), torch.randn(3, 4)),
        (((2, (2, 4)),), (), torch.randn(3, 4)),
        (((2, (4,)),), (), torch.randn(3, 4)),
        (((5, (0, 3)),), (), torch.randn(3, 4)),
        (((5, (2, 0)),), (), torch.randn(3, 4)),
        (((6, (0, 0, 2, 0)),), (), torch.randn(3, 4)),
        (((0, (GIVEN,)),), (2**70,), torch.randn(12)),
        (((0, (GIVEN,)),), (None,), torch.randn(12)),
        (((0, (0, 4)),), (), torch.randn(4, 0)),
        (((1, (1, 0)),), (3,), torch.randn(3, 4)),
        (((1, (1, 0)),), (), torch.randn(3, 4).to_sparse()),
        (((1, (1, 0)),), (), torch.randn(3, 4).as_subclass(type("T", (Tensor,), {}))),
        (((1, (1, 0)),), (), "no tensor"),
    ],
)
def test_what_is_left_to_torch(operators: Any, given: Any, x: Any) -> None:
    seen = []
    views = Views(operators, len(given) if given != (3,) else 0, lambda *args: seen.append(args))
    views(x, *given)
    assert seen and seen[0][0] is x and seen[0][1:] == given


def test_memory_that_means_something_else() -> None:
    x = torch._neg_view(torch.randn(3, 4))
    made = Views(((1, (1, 0)),), 0, refuse)(x)
    assert made.is_neg() and torch.equal(made, x.t())
    x = torch.randn(3, 4, dtype=torch.complex64).conj()
    made = Views(((1, (1, 0)),), 0, refuse)(x)
    assert made.is_conj() and torch.equal(made, x.t())


@pytest.mark.parametrize(
    "operators",
    [
        ((7, ()),),
        ((-1, ()),),
        ((1, (0, 0)),),
        ((1, (0, 2)),),
        ((3, (-1,)),),
        ((3, (0, 1)),),
        ((5, (0,)),),
        ((0, (GIVEN + 1,)),),
        ((0, tuple(range(17))),),
        ((3, (16,)),),
    ],
)
def test_operators_that_are_none(operators: Any) -> None:
    with pytest.raises(ValueError, match="other numbers than it has"):
        Views(operators, 1, refuse)


def test_arguments_that_are_none() -> None:
    with pytest.raises(TypeError):
        Views([], 0, refuse)
    with pytest.raises(TypeError):
        Views((3,), 0, refuse)
    with pytest.raises(ValueError, match="fewer"):
        Views((), -1, refuse)


# -- in programs ----------------------------------------------------------------------------------


def heads(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight
    rows, width = y.shape
    q = y.view(rows, 4, width // 4).transpose(0, 1)
    return torch.bmm(q, q.transpose(1, 2))


def source_of(compiled: Any, *args: Any) -> str:
    """Of the schedule that a first call makes."""
    before = set(schedules())
    with torch.no_grad():
        compiled(*args)
    (schedule,) = set(schedules()) - before
    return schedule.source


@pytest.mark.parametrize("dynamic", [True, False])
def test_views_of_a_program_are_chains(dynamic: bool) -> None:
    compiled = magjit.compile(heads, backend="dvm", dynamic=dynamic)
    x, weight = torch.randn(5, 8), torch.randn(8, 16)
    source = source_of(compiled, x, weight)
    assert source.count("view_as") == 2
    for rows in (5, 6, 1):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, weight), heads(x, weight))


def test_results_stay_views() -> None:
    """What the caller gets is a view of its input, with its version."""

    def viewed(x: Tensor) -> tuple[Tensor, Tensor]:
        turned = x.t().unsqueeze(0)
        return turned, turned.sin() + 1

    compiled = magjit.compile(viewed, backend="dvm")
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            turned, _ = compiled(x)
            assert turned._base is x
            before = x._version
            turned.add_(1)
            assert x._version == before + 1


def test_a_view_that_an_operator_writes_is_torchs() -> None:
    def written(x: Tensor) -> Tensor:
        y = x.sin()
        y.t()[0].copy_(x[:, 1])
        return y @ y.t()

    compiled = magjit.compile(written, backend="dvm")
    x = torch.randn(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), written(x))


def test_training_is_as_before() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16, requires_grad=True)
    layer(x).square().sum().backward()
    expected = [x.grad, *(one.grad for one in layer.parameters())]
    x.grad = None
    layer.zero_grad()
    compiled = magjit.compile(layer, backend="dvm")
    for _ in range(2):
        x.grad = None
        layer.zero_grad()
        compiled(x).square().sum().backward()
        found = [x.grad, *(one.grad for one in layer.parameters())]
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
