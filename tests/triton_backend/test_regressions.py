"""Programs that were once wrong, beside eager mode: values, strides, inputs, several calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import magjit
from tests.triton_backend.running import check, compiled, run_beside_eager, watched

aten = torch.ops.aten


def gelu_into_a_part(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([F.gelu(x), y.sin()], 1)


def unsafe_chunks(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a = x + 1
    return torch.unsafe_chunk(a, 2)[0], a.exp()


def unsafe_splits(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, b = x + 1, y + 1
    one = torch.unsafe_split(a, 2)[1]
    other = torch.unsafe_split_with_sizes(b, [1, 3])[1]
    return one, a.exp(), other, b.exp()


def unsafe_view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a = x.softmax(1)
    b = aten._unsafe_view(a, [16])
    return b, a.sigmoid()


def bits(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a = x + 1
    return a.view(torch.int32), a.exp()


def written_by_index(x: Tensor, y: Tensor) -> Tensor:
    i = torch.tensor([2, 0])
    x[:, i] = x[:, i] * 2 + 1
    return x.sum()


def shifted_right(x: Tensor, y: Tensor) -> Tensor:
    x[..., 1:] = x[..., :-1].clone()
    return x.sum()


def shifted_left(x: Tensor, y: Tensor) -> Tensor:
    x[:-1] = x[1:].clone()
    x[-1] = y[0]
    return x * 2


def shifted_twice(x: Tensor, y: Tensor) -> Tensor:
    x[1:] = x[:-1].clone()
    x[:, 1:] = x[:, :-1].clone()
    return x.sum(0)


def transposed_in_place(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(x.t().contiguous())
    return x + y


def copied_by_index(x: Tensor, y: Tensor) -> Tensor:
    i = torch.tensor([2, 3])
    x.index_copy_(0, i, x[1:3].clone())
    return x + y


def put_by_index(x: Tensor, y: Tensor) -> Tensor:
    i = torch.tensor([2, 3])
    x[i] = x[1:3].clone()
    return x + y


def scattered(x: Tensor, y: Tensor) -> Tensor:
    i = torch.tensor([[1, 1, 1, 1], [2, 2, 2, 2]])
    x.scatter_(0, i, x[:2].clone())
    return x + y


def part_kept_by_another(x: Tensor, y: Tensor) -> Tensor:
    kept = x.as_strided((2, 2), (4, 1), 1).clone()
    x[:2] = y[:2]
    return kept @ kept.t()


def bits_kept(x: Tensor, y: Tensor) -> Tensor:
    kept = x.view(torch.int32).t().clone()
    x[:2] = y[:2]
    return kept * 2


def written_to_another(x: Tensor, y: Tensor) -> Tensor:
    torch.permute_copy(x, (1, 0), out=y)
    x.add_(1)
    return x.sum()


def narrowed_to_another(x: Tensor, y: Tensor) -> Tensor:
    torch.narrow_copy(x, 0, 0, 4, out=y)
    x.mul_(2)
    return x.sum()


def swapped(x: Tensor, y: Tensor) -> Tensor:
    old = x.t().contiguous()
    x.copy_(y.t())
    y.copy_(old)
    return x @ y


def swapped_by_views(x: Tensor, y: Tensor) -> Tensor:
    old = x.flip(0)
    x.copy_(y.flip(1))
    y.copy_(old)
    return x @ y


def on_the_diagonal(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([torch.diag_embed(x.exp()), torch.diag_embed(y, 0)], 1)


def above_the_diagonal(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed(x.t().exp(), 1).transpose(0, 1).contiguous() * 2


def cropped_and_padded(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([F.pad(x.exp(), (1, -1, 2, 0), value=3.0), F.pad(y.t(), (-1, 1))])


def one_result_twice(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    values, _ = torch.sort(x)
    other = values.view(4, 4)
    return other.exp(), values.sin(), values.cos()


PROGRAMS: list[Callable[..., Any]] = [
    gelu_into_a_part,
    unsafe_chunks,
    unsafe_splits,
    unsafe_view,
    bits,
    written_by_index,
    shifted_right,
    shifted_left,
    shifted_twice,
    transposed_in_place,
    copied_by_index,
    put_by_index,
    scattered,
    bits_kept,
    written_to_another,
    narrowed_to_another,
    swapped,
    swapped_by_views,
    on_the_diagonal,
    above_the_diagonal,
    cropped_and_padded,
    one_result_twice,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_as_in_eager_mode(program: Callable[..., Any]) -> None:
    arguments = torch.randn(4, 4), torch.randn(4, 4)
    for graph in run_beside_eager(program, arguments, tolerance=1e-6):
        graph.graph.lint()


def test_a_change_beside_as_strided_runs_as_it_is() -> None:
    compiled = magjit.compile(part_kept_by_another, backend="triton")
    for _ in range(2):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        eager = x.clone()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, y), part_kept_by_another(eager, y))
        assert torch.equal(x, eager)


def run_shapes(
    function: Callable[..., Any], calls: Sequence[Sequence[Tensor]], **options: Any
) -> None:
    """Every call is the one program's, whatever the shapes."""
    call = compiled(function, **options)
    with torch.no_grad(), watched() as graphs:
        for arguments in calls:
            eager, ours = ([one.clone() for one in arguments] for _ in range(2))
            check(function(*eager), call(*ours), 1e-6)
            check(eager, ours, 1e-6)
    assert graphs, "the backend did not compile the graph"
    for graph in graphs:
        graph.graph.lint()


def padded_by_sizes(x: Tensor) -> Tensor:
    return F.pad(x.exp(), (0, 0, x.shape[0], 1))


def padded_and_read(x: Tensor) -> Tensor:
    n = x.shape[0]
    padded = F.pad(x.exp(), (n, n), value=2.0)
    return torch.cat([padded, padded.sin()]).view(2, n, -1) + x.new_ones(n, 1).expand(n, 1)


def padded_by_a_difference(x: Tensor) -> Tensor:
    return torch.cat([F.pad(x.exp(), (0, 0, 0, x.shape[0] - 4)), x.sin()])


PADDINGS: list[Callable[..., Any]] = [padded_by_sizes, padded_and_read, padded_by_a_difference]


@pytest.mark.parametrize("function", PADDINGS, ids=lambda one: one.__name__)
def test_paddings_of_symbolic_sizes(function: Callable[..., Any]) -> None:
    calls = [(torch.randn(n, 6),) for n in (5, 7, 9, 3, 5)]
    run_shapes(function, calls, dynamic=True)


def test_nothing_is_written_before_an_operator_that_raises() -> None:
    def function(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
        w = y * 2
        z = y[i]
        x.copy_(w)
        return z + 1

    call = compiled(function)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad():
        call(x.clone(), y, torch.tensor([1, 2]))
        kept = x.clone()
        with pytest.raises(IndexError):
            call(x, y, torch.tensor([1, 9]))
    assert torch.equal(x, kept)


def test_one_part_under_two_names() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        v = x.exp()
        a, b = v.chunk(2, 1)[0], v.chunk(2, 1)[0]
        return a + a, b

    call = compiled(function)
    with watched() as graphs:
        for _ in range(3):
            eager = torch.randn(4, 4, requires_grad=True)
            ours = eager.detach().clone().requires_grad_()
            expected, actual = function(eager), call(ours)
            check([one.detach() for one in expected], [one.detach() for one in actual], 1e-6)
            sum(one.sum() for one in expected).backward()
            sum(one.sum() for one in actual).backward()
            check(eager.grad, ours.grad, 1e-6)
    assert graphs, "the backend did not compile the graph"


def test_a_scalar_reversed() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        index = torch.tensor([0])
        return (
            x.flip(0) + 1,
            x.flip([]) * 2,
            x.index_select(0, index[0]).exp(),
            x.gather(0, index[0]).sin(),
            x.transpose(0, -1) + 2,
            x.squeeze(0).cos(),
            x.unfold(0, 1, 1).exp(),
            x.expand(0).sin(),
            x.repeat_interleave(3) + 1,
        )

    run_beside_eager(function, (torch.randn(()),))


def test_repeated_batches_that_no_view_gives() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b[:, None].expand(2, 3, 4, 5).reshape(6, 4, 5))

    a, b = torch.randn(2, 4, 6).permute(2, 0, 1), torch.randn(2, 4, 5)
    call = compiled(function)
    with torch.no_grad(), watched() as graphs:
        actual = call(a, b)
        torch.testing.assert_close(actual, function(a, b))
    assert graphs, "the backend did not compile the graph"


def sizes_of_one_reversed(x: Tensor) -> tuple[Tensor, ...]:
    y = x.mT
    return torch.maximum(y.flip(2), y.relu()), y.flip(1), y.flip(1).mT.exp(), y > 0


def copied_onto_itself(x: Tensor) -> tuple[Tensor, ...]:
    stacked = torch.stack([x])
    rolled = stacked.roll(-2, 1)
    x.narrow(1, 0, 1).copy_(stacked.flatten()[0])
    return x * 1, rolled


SMALL: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
    (sizes_of_one_reversed, (2, 4, 2, 1)),
    (copied_onto_itself, (1, 1)),
]


@pytest.mark.parametrize(("function", "shape"), SMALL, ids=lambda one: getattr(one, "__name__", ""))
def test_dimensions_of_size_one(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    run_beside_eager(function, (torch.randn(shape),))
