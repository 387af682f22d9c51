"""Fake results that stand for several: right for each, however the run goes on with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import magjit
from magjit.plugin.inputs import InputDescriber, TensorInput, make_shape_env
from magjit.shape_memo import MetadataMemo
from tests.twin import differ

SIZES = (4, 7, 5, 3, 9)


def repeated_layers(x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.nn.functional.layer_norm(x.transpose(0, 1).contiguous().transpose(0, 1), (6,))
        x = torch.nn.functional.gelu(x @ x.t() @ x)
    return x


def turned_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    one, other = x + 1, x + 1
    one.t_()
    return one.sum(0), other.sum(0)


def first_of_two_turned(x: Tensor) -> tuple[Tensor, Tensor]:
    one = x + 1
    one.t_()
    other = x + 1
    return one.sum(0), other.sum(0)


def square_turned(x: Tensor) -> tuple[Tensor, ...]:
    products = [x @ x.t() for _ in range(3)]
    grown = [one.unsqueeze(0) for one in products]
    products[1].unsqueeze_(2)
    grown[2].squeeze_(0)
    return tuple(one.sum(-1) for one in (*products, *grown))


def different_masks(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[x > 0].sum(), x[x > 1].sum()


def types_of_numbers(x: Tensor) -> tuple[Tensor, ...]:
    n = x.long()
    return n * 2, n * 2.0, n * True, n.clamp(0), n.clamp(0.0), n + 0.0, n + -0.0


def keyword_and_position(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(0), x.sum(dim=0), x.sum(0, keepdim=True), x.sum(0, True), x.sum(1), x.sum((0, 1))


def precisions(x: Tensor) -> tuple[Tensor, ...]:
    before = x @ x.t()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = x @ x.t()
    return before, inside, x @ x.t()


def sizes_go_on(x: Tensor) -> Tensor:
    parts = [torch.cat([x, x]) for _ in range(3)]
    return sum(part.reshape(part.shape[0] // 2, 2, 6).mean(1) for part in parts)


def in_place_values(x: Tensor) -> tuple[Tensor, Tensor]:
    one, other = x * 2, x * 2
    one.add_(1)
    one[0] = 5
    return one, other


PROGRAMS: list[Callable[..., Any]] = [
    repeated_layers,
    turned_in_place,
    first_of_two_turned,
    square_turned,
    different_masks,
    types_of_numbers,
    keyword_and_position,
    precisions,
    sizes_go_on,
    in_place_values,
]
FREE = {repeated_layers, first_of_two_turned, types_of_numbers, keyword_and_position, precisions}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_programs_are_as_in_eager_mode(program: Callable[..., Any]) -> None:
    compiled = magjit.compile(program, backend="eager")
    for n in SIZES:
        x = torch.randn(n, 6)
        found = differ(program(x), compiled(x))
        assert not found, f"{n}: {found}"
    if program in FREE:
        assert magjit.stats(compiled).captures == 2


@pytest.fixture
def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=make_shape_env())


def test_a_result_is_found_by_what_counts_of_its_operands(fake_mode) -> None:
    memo = MetadataMemo()
    with fake_mode:
        a, b, c = torch.randn(2, 3), torch.randn(2, 3), torch.randn(3, 2).t()
        made = torch.add(a, b)
    key = memo.key(torch.add, (a, b), {})
    memo.keep(key, made, (a, b))
    assert memo.find(memo.key(torch.add, (b, a), {})) is made
    others: list[Any] = [
        memo.key(torch.add, (a, c), {}),
        memo.key(torch.add, (a, b), {"alpha": 2}),
        memo.key(torch.sub, (a, b), {}),
        memo.key(torch.add, (a, b.requires_grad_()), {}),
    ]
    assert None not in others
    assert all(memo.find(other) is None for other in others)


def test_state_of_torch_counts(fake_mode) -> None:
    memo = MetadataMemo()
    with fake_mode:
        n = torch.ones(3, dtype=torch.long)
    key = memo.key(torch.div, (n, 2), {})
    torch.set_default_dtype(torch.float64)
    try:
        assert memo.key(torch.div, (n, 2), {}) != key
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu"):
        assert memo.key(torch.div, (n, 2), {}) != key
    assert memo.key(torch.div, (n, 2), {}) == key


def test_functions_of_more_than_metadata_are_not_remembered(fake_mode) -> None:
    memo = MetadataMemo()
    with fake_mode:
        x = torch.randn(2, 3)
    assert memo.key(torch.nonzero, (x,), {}) is None
    assert memo.key(torch.add, (x, x), {"out": x}) is None
    assert memo.key(torch.Tensor.t_, (x,), {}) is None
    assert memo.key(torch.add, (x, torch.ones(3)), {}) is None


def test_what_changes_in_place_is_noticed(fake_mode) -> None:
    memo = MetadataMemo()
    with fake_mode:
        x = torch.randn(2, 3)
        made = torch.add(x, x)
    key = memo.key(torch.add, (x, x), {})
    memo.keep(key, made, (x, x))
    changed = memo.watched((made,))
    with fake_mode:
        made.t_()
    assert not changed()  # it stood for one tensor only
    assert memo.find(key) is None
    with fake_mode:
        made = torch.add(x, x)
    memo.keep(key, made, (x, x))
    assert memo.find(key) is made
    changed = memo.watched([made])
    with fake_mode:
        made.add_(1)
    assert not changed()
    changed = memo.watched({"self": made})
    with fake_mode:
        made.t_()
    assert changed()


def test_inputs_of_equal_metadata_are_one() -> None:
    memo, describer = MetadataMemo(), InputDescriber()

    def key(value: Tensor, **marks: Any) -> Any:
        given = describer.describe(value, **marks)
        assert isinstance(given, TensorInput)
        return memo.input_key(given)

    x = torch.randn(4, 5)
    assert key(x) == key(torch.randn(4, 5)) is not None
    parameter = torch.nn.Parameter(torch.randn(4, 5))
    different = [x.double(), torch.randn(5, 4).t().clone(), parameter, torch.randn(4, 6)]
    assert all(key(one) != key(x) for one in different)
    assert key(x, dynamic=True) is None
    assert key(x.t()) is None
    assert key(x, static=True, dynamic=True) is not None
