"""Backwards of norms as the GPU has them: gradients as autograd's, in words without scratch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from magjit_dvm.cuda.encode import Machine
from magjit_dvm.fuser import fuse
from magjit_dvm.groups import FusedGroup
from magjit_dvm.lowering import decompositions
from magjit_dvm.norms_backward import layer_norm_backward, rms_norm_backward
from magjit_dvm.program import ACROSS, NodeKind
from tests.dvm_cuda.checking import check_words

aten = torch.ops.aten

SHAPES = (((5, 64), 1), ((3, 4, 33), 1), ((2, 3, 4, 5), 2), ((7,), 1))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made, dtype=torch.float64)


def statistics(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean, 1 / deviation, and 1 / root of the mean square of rows of ``count`` dimensions."""
    over = list(range(x.dim() - count, x.dim()))
    mean = x.mean(over, keepdim=True)
    rstd = (x.var(over, correction=0, keepdim=True) + 1e-5).rsqrt()
    return mean, rstd, (x.square().mean(over, keepdim=True) + 1e-5).rsqrt()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_layer_norm(shape: tuple[int, ...], count: int, weighted: bool) -> None:
    x, dy, row = drawn(*shape) + 3, drawn(*shape, seed=1), shape[len(shape) - count :]
    weight = drawn(*row, seed=2) if weighted else None
    y = torch.nn.functional.layer_norm(x.requires_grad_(), row, weight, None)
    (wanted,) = torch.autograd.grad(y, [x], dy)
    mean, rstd, _ = statistics(x, count)
    with torch.no_grad():
        found = layer_norm_backward(dy, x, row, mean, rstd, weight, None, [True, False, False])
    assert found[1:] == (None, None)
    torch.testing.assert_close(found[0], wanted)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_rms_norm(shape: tuple[int, ...], count: int, weighted: bool) -> None:
    x, dy, row = drawn(*shape) + 1, drawn(*shape, seed=1), shape[len(shape) - count :]
    weight = drawn(*row, seed=2) if weighted else None
    y = torch.nn.functional.rms_norm(x.requires_grad_(), row, weight, 1e-5)
    (wanted,) = torch.autograd.grad(y, [x], dy)
    _, _, rstd = statistics(x, count)
    with torch.no_grad():
        found, nothing = rms_norm_backward(dy, x, row, rstd, weight, [True, False])
    assert nothing is None
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("shape", "count"), [((6, 300), 1), ((2, 3, 5, 60), 2), ((1, 256), 1)])
def test_gradients_of_weights(shape: tuple[int, ...], count: int) -> None:
    x, dy, row = drawn(*shape) + 1, drawn(*shape, seed=1), shape[len(shape) - count :]
    weight, bias = (drawn(*row, seed=k).requires_grad_() for k in (2, 3))
    mean, rstd, root = statistics(x, count)
    y = torch.nn.functional.layer_norm(x.requires_grad_(), row, weight, bias)
    wanted = torch.autograd.grad(y, [x, weight, bias], dy)
    with torch.no_grad():
        for mask in ([True, True, True], [True, True, False], [True, False, True]):
            found = layer_norm_backward(dy, x, row, mean, rstd, weight, bias, mask)
            for one, other, asked in zip(found, wanted, mask, strict=True):
                if asked:
                    torch.testing.assert_close(one, other)
                else:
                    assert one is None
    y = torch.nn.functional.rms_norm(x, row, weight, 1e-5)
    wanted = torch.autograd.grad(y, [x, weight], dy)
    with torch.no_grad():
        found = rms_norm_backward(dy, x, row, root, weight, [True, True])
    torch.testing.assert_close(found, wanted)


def test_what_is_left_to_aten() -> None:
    """Gradients of weights alone, of a single row, of columns that do not come by four; nothing."""
    x, row, every = drawn(4, 8), drawn(4, 1), [True, True, True]
    for mask in ([False, True, True], [False, False, True]):
        assert layer_norm_backward(x, x, [8], row, row, None, x[0], mask) is NotImplemented
    assert rms_norm_backward(x, x, [8], row, None, [False, True]) is NotImplemented
    empty = drawn(0, 300)
    assert rms_norm_backward(empty, empty, [300], row[:0], None, [True, False]) is NotImplemented
    odd = drawn(2, 302)
    assert layer_norm_backward(odd, odd, [302], row, row, None, None, every) is NotImplemented
    assert rms_norm_backward(odd, odd, [302], row, None, [True, True]) is NotImplemented
    one = drawn(300)
    assert layer_norm_backward(one, one, [300], one[:1], one[:1], one, one, every) is NotImplemented


@pytest.mark.parametrize("columns", [8, 20_000])
def test_gradients_of_weights_without_room(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ATen's; that of the input is words as if it had been asked for alone."""
    monkeypatch.setenv("MAGJIT_DVM_CUDA", "1")
    x, dy, weight, bias = (drawn(4, columns), drawn(4, columns, seed=1), *drawn(2, columns, seed=2))
    mean, rstd, root = statistics(x, 1)

    def of_layer_norm(dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
        given = dy, x, [columns], mean, rstd, weight, bias, [True, True, True]
        return aten.native_layer_norm_backward.default(*given)

    given = [dy, x, mean, rstd, weight, bias]
    wanted = of_layer_norm(*given)
    found = layer_norm_backward(*given[:2], [columns], *given[2:], [True, True, True])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    (group,) = groups_of(of_layer_norm, [one.float() for one in given])
    (made,) = group.outputs
    assert len(group.arguments) == 5, "without the bias"
    assert made.meta["val"].shape == x.shape

    def of_rms_norm(dy: Any, x: Any, rstd: Any, weight: Any) -> Any:
        given = dy, x, [columns], rstd, weight, [True, True]
        return aten._fused_rms_norm_backward.default(*given)

    (group,) = groups_of(of_rms_norm, [one.float() for one in (dy, x, root, weight)])
    assert len(group.outputs) == 1 and len(group.arguments) == 4


def groups_of(function: Callable[..., Any], given: Sequence[Any]) -> list[FusedGroup]:
    """Of a backward on a GPU."""
    with FakeTensorMode():
        fake = [torch.empty(one.shape, dtype=one.dtype, device="cuda") for one in given]
        graph = make_fx(function, decompositions())(*fake).graph
    return fuse(graph).groups


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_all_gradients_are_one_group(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGJIT_DVM_CUDA", "1")
    x, dy = (drawn(30, 300, seed=k).to(dtype) for k in range(2))
    weight, bias = (drawn(300, seed=k).to(dtype) for k in (2, 3))
    mean, rstd, root = (one.float() for one in statistics(x.double(), 1))
    layer, rms = aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default

    def of_layer_norm(dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
        return layer(dy, x, [300], mean, rstd, weight, bias, [True, True, True])

    def of_rms_norm(dy: Any, x: Any, rstd: Any, weight: Any) -> Any:
        return rms(dy, x, [300], rstd, weight, [True, True])

    for function, given, sums in (
        (of_layer_norm, [dy, x, mean, rstd, weight, bias], 2),
        (of_rms_norm, [dy, x, root, weight], 1),
    ):
        (group,) = groups_of(function, given)
        names = {"dy_1": dy, "x_1": x, "mean_1": mean, "weight_1": weight}
        names["rstd_1"] = rstd if sums == 2 else root
        assert group.program is not None
        arguments = [names[str(one)] for one in group.arguments]
        image = check_words(group.program, arguments, Machine(multiprocessors=2))
        assert image is not None and image.parts is not None
        assert len(image.parts.results) == sums and image.scratch == sums


def test_sums_that_are_computed_with_are_groups_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAGJIT_DVM_CUDA", "1")

    def scaled(x: Any) -> Any:
        y = x.exp()
        total = y.sum(0) * 0.5
        return y * 2, total, total.sin()

    def spread(x: Any) -> Any:
        y = x.exp()
        return y / y.sum(0)

    x = torch.empty(30, 300)
    first, second = groups_of(scaled, [x])
    assert first.program is not None and second.program is not None
    assert sum(node.aux == ACROSS for node in first.program.nodes) == 1
    assert all(node.kind is not NodeKind.REDUCE for node in second.program.nodes)
    (whole,) = groups_of(spread, [x])
    assert whole.program is not None
    assert all(node.aux != ACROSS for node in whole.program.nodes)


def test_sums_of_an_input_join_what_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever stands first; a sum alone is ATen's."""
    monkeypatch.setenv("MAGJIT_DVM_CUDA", "1")

    def before(x: Any) -> Any:
        total = x.sum([0, 1])
        return total, (x * 2).exp()

    def after(x: Any) -> Any:
        y = (x * 2).exp()
        return y, x.sum([0, 1], keepdim=True)

    for function in (before, after):
        (group,) = groups_of(function, [torch.empty(5, 6, 300)])
        assert len(group.outputs) == 2
    assert not groups_of(lambda x: x.sum(0), [torch.empty(30, 300)])


def words_of(function: Callable[..., Any], given: Sequence[torch.Tensor]) -> list[str]:
    """Of the one group that a function is, checked against the reference."""
    graph = make_fx(function, decompositions(), "fake")(*given).graph
    (group,) = fuse(graph).groups
    places = [node for node in graph.nodes if node.op == "placeholder"]
    by_node = dict(zip(places, given, strict=True))
    image = check_words(group.program, [by_node[one] for one in group.arguments])
    assert image is not None
    return [one for word in image.words for one in (word.first, word.second) if one != "nop"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_tile_waits(dtype: torch.dtype) -> None:
    x, dy = (drawn(6, 512, seed=k).to(dtype) for k in range(2))
    mean, rstd, _ = (one.float() for one in statistics(x.double(), 1))

    def of_layer_norm(dy: Any, x: Any, mean: Any, rstd: Any) -> Any:
        return layer_norm_backward(dy, x, [512], mean, rstd, None, None, [True, False, False])[0]

    def of_rms_norm(dy: Any, x: Any, rstd: Any) -> Any:
        return rms_norm_backward(dy, x, [512], rstd, None, [True, False])[0]

    def of_softmax(dy: Any, y: Any) -> Any:
        return aten._softmax_backward_data.default(dy, y, 1, dtype)

    y = x.softmax(1)
    for function, given in (
        (of_layer_norm, [dy, x, mean, rstd]),
        (of_rms_norm, [dy, x, rstd]),
        (of_softmax, [dy, y]),
    ):
        found = words_of(function, given)
        assert not {"save", "la.scratch", "lt.scratch"} & {*found}, found
        assert 1 <= sum(one.startswith("row.") for one in found) <= 2


def test_what_is_no_sum_across_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a single element, of ints, over all or the last dimensions, of few or odd columns."""
    monkeypatch.setenv("MAGJIT_DVM_CUDA", "1")
    wide, ints = torch.empty(30, 300), torch.empty(30, 300, dtype=torch.int32)
    for function, given in (
        (lambda x: (x.exp() + 1, x.exp().sum(0)), torch.empty(())),
        (lambda x: (x * 2 + 1, (x * 2).sum(0)), ints),
        (lambda x: (x.exp() + 1, x.exp().sum([0, 1])), wide),
        (lambda x: (x.exp() + 1, x.exp().sum(1)), wide),
        (lambda x: (x.exp() + 1, x.exp().sum(0)), torch.empty(30, 20)),
        (lambda x: (x.exp() + 1, x.exp().sum(0)), torch.empty(30, 301)),
    ):
        for group in groups_of(function, [given]):
            assert group.program is not None
            assert all(node.aux != ACROSS for node in group.program.nodes if node.op == "sum")
    (group,) = groups_of(lambda x: (x * 2 + 1, (x * 2).sum(0, dtype=torch.float32)), [ints])
    assert group.program is not None
    assert check_words(group.program, [torch.arange(9000, dtype=torch.int32).view(30, 300)])
