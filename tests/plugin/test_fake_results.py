"""Remembered results of operators on fake tensors are those that torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from magjit.plugin.fake_results import FakeResults

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Counted:
    """A mode, a memory for it, and how often torch was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.results = FakeResults(self.mode)
        self.asked = 0
        dispatch = FakeTensorMode.dispatch

        def counted(mode: FakeTensorMode, *args: Any) -> Any:
            self.asked += 1
            return dispatch(mode, *args)

        monkeypatch.setattr(FakeTensorMode, "dispatch", counted)

    def fake(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.mode.from_tensor(torch.zeros(size, dtype=dtype), static_shapes=True)

    def asks(self, func: Any, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
        """The result, and whether torch was asked for it."""
        before = self.asked
        with self.mode:
            result = self.results.call(func, args, kwargs)
        return result, self.asked > before


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


OPERATORS: dict[str, Callable[[Counted], Call]] = {
    "add": lambda c: (aten.add.Tensor, (c.fake(2, 3), c.fake(3)), {"alpha": 2}),
    "promotes": lambda c: (aten.add.Tensor, (c.fake(2, dtype=torch.int32), 1.5), {}),
    "several": lambda c: (
        aten.native_layer_norm.default,
        (c.fake(4, 8), [8], None, None, 1e-5),
        {},
    ),
    "list": lambda c: (aten.cat.default, ([c.fake(2, 3), c.fake(1, 3)],), {}),
    "transposed": lambda c: (aten.exp.default, (c.fake(2, 3).t(),), {}),
    "another dtype": lambda c: (
        aten.sum.dim_IntList,
        (c.fake(2, 3), [1]),
        {"dtype": torch.float64},
    ),
    "random": lambda c: (aten.bernoulli.p, (c.fake(2, 3), 0.5), {}),
    "nothing": lambda c: (aten.mm.default, (c.fake(0, 3), c.fake(3, 2)), {}),
}


def layout(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [layout(one) for one in value]
    return (value.shape, value.stride(), value.dtype, value.device, value.storage_offset())


@pytest.mark.parametrize("name", OPERATORS)
def test_the_second_result_is_like_the_first(counted: Counted, name: str) -> None:
    with counted.mode:
        func, args, kwargs = OPERATORS[name](counted)
    first, asked = counted.asks(func, *args, **kwargs)
    assert asked
    with counted.mode:
        func, args, kwargs = OPERATORS[name](counted)
    second, asked = counted.asks(func, *args, **kwargs)
    assert not asked
    assert layout(first) == layout(second)
    assert type(second) is type(first)
    parts = second if isinstance(second, tuple) else (second,)
    memory = {one.untyped_storage()._cdata for one in parts}
    assert len(memory) == len(parts) and all(type(one) is FakeTensor for one in parts)
    assert memory.isdisjoint(
        one.untyped_storage()._cdata for one in (first if isinstance(first, tuple) else (first,))
    )


def test_equal_numbers_of_other_types_are_others(counted: Counted) -> None:
    x = counted.fake(2, dtype=torch.bool)
    dtypes = []
    for number in (1, True, 1.0, 1 + 0j, 0.0, -0.0):
        result, asked = counted.asks(aten.add.Tensor, x, number)
        assert asked, number
        dtypes.append(result.dtype)
    assert dtypes[:4] == [torch.int64, torch.bool, torch.float32, torch.complex64]


@pytest.mark.parametrize("change", ["size", "stride", "dtype", "argument"])
def test_other_operands_are_others(counted: Counted, change: str) -> None:
    counted.asks(aten.sum.dim_IntList, counted.fake(4, 4), [0])
    with counted.mode:
        args: dict[str, tuple[Any, ...]] = {
            "size": (counted.fake(4, 5), [0]),
            "stride": (counted.fake(4, 4).t(), [0]),
            "dtype": (counted.fake(4, 4, dtype=torch.float64), [0]),
            "argument": (counted.fake(4, 4), [1]),
        }
    assert counted.asks(aten.sum.dim_IntList, *args[change])[1]


def test_views_are_views(counted: Counted) -> None:
    x = counted.fake(4, 4)
    for _ in range(2):
        result, asked = counted.asks(aten.select.int, x, 0, 1)
        assert asked and result.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_numbers_that_torch_knows_are_kept(counted: Counted) -> None:
    for _ in range(2):
        with counted.mode:
            known = torch.tensor(3.0)
        result, _ = counted.asks(aten.clone.default, known)
        assert known.constant is not None
        with counted.mode:
            assert result.item() == 3.0


def test_results_of_data_are_new_symbols(counted: Counted) -> None:
    x = counted.fake(4)
    sizes = [counted.asks(aten.nonzero.default, x)[0].shape[0] for _ in range(2)]
    assert sizes[0].node.expr != sizes[1].node.expr or x.nonzero_memo is not None
    assert counted.asks(aten.nonzero.default, counted.fake(4))[1]


def test_nothing_is_remembered_once_metadata_may_have_changed(counted: Counted) -> None:
    x = counted.fake(2, 3)
    assert counted.asks(aten.exp.default, x)[1] and not counted.asks(aten.exp.default, x)[1]
    counted.asks(aten.t_.default, x)
    assert counted.asks(aten.exp.default, x)[0].shape == (3, 2)


def test_symbols_are_operands(counted: Counted) -> None:
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    x = counted.mode.from_tensor(torch.zeros(5, 7), symbolic_context=context)
    result, asked = counted.asks(aten.cumsum.default, x, 0)
    assert asked and result.shape == x.shape
    result, _ = counted.asks(aten.cumsum.default, x, 0)
    assert result.shape == x.shape
    counted.asks(aten.exp.default, x)  # the dtype of its result is known from now on
    result, asked = counted.asks(aten.exp.default, x)
    assert not asked and result.shape == x.shape
    weight = counted.fake(2, 2)
    counted.asks(aten.add.Tensor, weight, x.shape[0])
    assert not counted.asks(aten.add.Tensor, weight, x.shape[0])[1]
    assert counted.asks(aten.add.Tensor, weight, x.shape[1])[1]


def test_what_may_keep_its_operands_memory_is_asked_again(counted: Counted) -> None:
    """``reshape`` is a view or a copy, which its schema says; a channels-last result has holes."""
    x = counted.fake(2, 3)
    for _ in range(2):
        assert counted.asks(aten._to_copy.default, x, dtype=torch.float64)[0].dtype is torch.float64
        assert counted.asks(aten.reshape.default, x, [6])[1]
