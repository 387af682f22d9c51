"""Results that follow from expressions are those that torch finds, and ask for no guard."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from magjit.plugin.fake_layouts import expression
from magjit.plugin.symbolic_results import symbolic_result, symbolic_view
from tests.dvm.opinfo import first_samples

aten = torch.ops.aten

SHARES = 16
NAMES = sorted({one.name for one in op_db})


class Fakes:
    """Fake tensors; equal sizes from 2 on are one symbol."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)

    def of(self, real: torch.Tensor) -> FakeTensor:
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * real.dim())
        made = self.mode.from_tensor(real, symbolic_context=context)
        assert isinstance(made, FakeTensor)
        return made

    def new(self, *size: int, dtype: torch.dtype = torch.float32) -> FakeTensor:
        return self.of(torch.zeros(size, dtype=dtype))


class Unlike(AssertionError):
    """A result that is not torch's; torch has assertions of its own."""


def same(one: Any, other: Any) -> bool:
    """Whether expressions are equal: as they are, or of some numbers for their symbols."""
    apart = sympy.expand(expression(one) - expression(other))
    numbers = [2, 7, 11, 24]
    return apart == 0 or all(apart.subs(dict.fromkeys(apart.free_symbols, n)) == 0 for n in numbers)


def check_alike(found: FakeTensor, wanted: torch.Tensor) -> None:
    steps = zip(found.size(), found.stride(), wanted.stride(), strict=True)
    alike = (
        found.dim() == wanted.dim()
        and all(map(same, found.size(), wanted.size()))
        # The stride of one element is nobody's.
        and all(expression(size) == 1 or same(one, other) for size, one, other in steps)
        and same(found.storage_offset(), wanted.storage_offset())
        and same(found.untyped_storage().nbytes(), wanted.untyped_storage().nbytes())
        and (found.dtype, found.device) == (wanted.dtype, wanted.device)
        and found.is_contiguous() == wanted.is_contiguous()
    )
    if not alike:
        raise Unlike(f"{found} {found.stride()} instead of {wanted} {wanted.stride()}")


class Compared(TorchDispatchMode):
    """Asks both; counts what has been found without torch."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self.fakes = fakes
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = None
        plain = not func._schema.is_mutable and func.namespace == "aten"
        by_data = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
        if plain and by_data.isdisjoint(func.tags):
            guards = len(self.fakes.env.guards)
            views = func in (aten.view.default, aten._unsafe_view.default)
            asked = symbolic_view if views else symbolic_result
            try:
                found = asked(self.fakes.mode, func, args, *(() if views else (kwargs,)))
            except Exception as problem:
                raise Unlike(f"an error for {func}") from problem
            if len(self.fakes.env.guards) > guards:
                raise Unlike(f"a guard of {func}")
        wanted = func(*args, **kwargs)
        if found is not None:
            self.count += 1
            check_alike(found, wanted)
        return wanted


def samples(name: str) -> Iterator[Any]:
    for one in op_db:
        for dtype in (torch.float32, torch.int64):
            if one.name == name and dtype in one.supported_dtypes("cpu"):
                yield from first_samples(one, dtype, 4)


def compare_operator(name: str) -> int:
    """How many results of an operator's samples have been compared."""
    function = next(one.op for one in op_db if one.name == name)
    count = 0
    for sample in samples(name):
        fakes = Fakes()
        operands = (sample.input, sample.args, sample.kwargs)
        first, args, kwargs = tree_map_only(torch.Tensor, fakes.of, operands)
        with fakes.mode, Compared(fakes) as compared:
            try:
                function(first, *args, **kwargs)
            except Unlike:
                raise
            except Exception:  # of torch itself: many operators do not know symbolic sizes
                continue
        count += compared.count
    return count


@pytest.mark.parametrize(
    "share",
    [one if one == 0 else pytest.param(one, marks=pytest.mark.slow) for one in range(SHARES)],
)
def test_operators_of_torch(share: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = {name: compare_operator(name) for name in NAMES[share::SHARES]}
    assert sum(map(bool, counts.values())) > 8, counts


def result(fakes: Fakes, func: Any, *args: Any, **kwargs: Any) -> FakeTensor | None:
    """Compared with torch's, if there is one."""
    guards = len(fakes.env.guards)
    found = symbolic_result(fakes.mode, func, args, kwargs)
    assert len(fakes.env.guards) == guards
    if found is not None:
        with fakes.mode:
            check_alike(found, func(*args, **kwargs))
    return found


def test_shapes() -> None:
    fakes = Fakes()
    x, row, column = fakes.new(3, 5, 8), fakes.new(8), fakes.new(3, 5, 1)
    ten = fakes.new(10)
    for other in (x, row, column, fakes.new(1, 5, 8), fakes.new(), 2.5, True):
        assert result(fakes, aten.mul.Tensor, x, other) is not None
        if isinstance(other, FakeTensor):
            assert result(fakes, aten.mul.Tensor, other, x) is not None
    assert result(fakes, aten.add.Tensor, x, row, alpha=2) is not None
    assert result(fakes, aten.mul.Tensor, row, column) is None  # a shape that none of them has
    assert result(fakes, aten.mul.Tensor, x.transpose(0, 1), 2.0) is None
    assert result(fakes, aten.mul.Tensor, x[:, 1:], 2.0) is None
    assert result(fakes, aten.sum.default, x) is None
    assert result(fakes, aten.mul.Tensor, row, ten) is None  # perhaps they are the same


def test_dtypes() -> None:
    fakes = Fakes()
    whole, half = fakes.new(3, 5, dtype=torch.int32), fakes.new(3, 5, dtype=torch.float16)
    one = fakes.new(dtype=torch.float64)
    for operands in ((whole, 1), (whole, 1.5), (whole, half), (half, one), (whole, one)):
        found = result(fakes, aten.add.Tensor, *operands)
        assert found is not None
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            found = result(fakes, aten.add.Tensor, whole, 1.5)
            assert found is not None and found.dtype is dtype
    finally:
        torch.set_default_dtype(before)


def test_views_share_memory() -> None:
    fakes = Fakes()
    x = fakes.new(3, 5, 8)
    batch, length, width = x.size()
    for sizes in ([batch * length, width], [batch, length, 1, width], [batch * length * width]):
        found = symbolic_view(fakes.mode, aten.view.default, (x, sizes))
        assert found is not None
        with fakes.mode:
            check_alike(found, aten.view.default(x, sizes))
        assert found.untyped_storage()._cdata == x.untyped_storage()._cdata
        new = symbolic_view(fakes.mode, aten._unsafe_view.default, (x, sizes))
        assert new is not None
        assert new.untyped_storage()._cdata != x.untyped_storage()._cdata
    part = x[1:]
    found = symbolic_view(fakes.mode, aten.view.default, (part, [(batch - 1) * length, width]))
    assert found is not None and same(found.storage_offset(), length * width)
    for base, sizes in ((x, [batch, -1]), (x, [batch, 40]), (x.transpose(0, 1), [15, 8])):
        assert symbolic_view(fakes.mode, aten.view.default, (base, sizes)) is None


def test_what_is_more_than_its_elements_is_torchs() -> None:
    fakes = Fakes()
    x = fakes.of(torch.zeros(3, 5, requires_grad=True))
    assert symbolic_result(fakes.mode, aten.exp.default, (x,), {}) is None
    y = fakes.of(torch.zeros(3, 5, dtype=torch.complex64).conj())
    assert symbolic_result(fakes.mode, aten.exp.default, (y,), {}) is None
    assert symbolic_view(fakes.mode, aten.view.default, (x, [x.shape[1], x.shape[0]])) is None
