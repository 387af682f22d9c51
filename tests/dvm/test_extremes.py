"""Places of largest and smallest elements, and norms, against eager: ties, NaN, every layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import magjit
from magjit_dvm.backend import schedules
from magjit_dvm.instructions import DType, dtype_of
from tests.dvm.checking import in_turn
from tests.dvm.random_graphs import FLOATS, INTS
from tests.dvm.test_instructions import LAYOUTS, SETTINGS, machine

DTYPES = (*FLOATS, *INTS)
SHAPES = ((1, 7), (5, 1), (3, 5), (70, 40), (3, 1300), (1300, 3), (4, 5, 6), (2, 33, 40))


KINDS = ("cache", "small")


@pytest.fixture(params=KINDS, autouse=True)
def settings(request: pytest.FixtureRequest) -> Iterator[None]:
    with machine(SETTINGS[request.param]):
        yield


def run(function: Callable[..., Any], *args: Any, fused: bool = True) -> Any:
    before = set(schedules())
    with torch.no_grad():
        result = magjit.compile(function, backend="dvm")(*args)
    (made,) = set(schedules()) - before
    reasons = [str(one) for one in made.fusion.reasons.values()]
    assert not fused or (made.fusion.groups and not reasons), reasons
    return result


def places(given: torch.Tensor, dim: int | None, keepdim: bool) -> tuple[torch.Tensor, ...]:
    found = [given.argmax(dim, keepdim), given.argmin(dim, keepdim)]
    if dim is not None:
        found += [*given.max(dim, keepdim), *given.min(dim, keepdim)]
    return tuple(found)


# An odd number of dtypes, so that each of them is on both machines.
PLACES = list(itertools.product(SHAPES, DTYPES))


@pytest.mark.parametrize(
    ("shape", "dtype", "settings"),
    in_turn(KINDS, PLACES, (f"{shape}-{dtype}" for shape, dtype in PLACES)),
    indirect=["settings"],
)
def test_places(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Few different values, so that there are ties everywhere."""
    own = dtype_of(dtype)
    assert own is not None
    for number, dim in enumerate((None, *range(len(shape)), -1)):
        given = LAYOUTS[number % len(LAYOUTS)](own, shape, number)
        given = given if number % 2 else given.round() if own in FLOATS else given % 4
        wanted = places(given, dim, bool(number % 2))
        fused = dim is not None and shape[dim] != 1
        got = run(places, given, dim, bool(number % 2), fused=fused)
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


FLOATS = (DType.F32, DType.F64, DType.F16, DType.BF16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [0, 1, None])
def test_special_values(dim: int | None, dtype: torch.dtype) -> None:
    """NaN, infinities and both zeros, at every place and alone, also whole rows of them."""
    made = torch.Generator().manual_seed(3)
    some = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0], dtype=dtype)
    for shape in ((6, 6), (9, 300), (300, 9)):
        given = some[torch.randint(0, 6, shape, generator=made)]
        given[:6] = some[:, None]
        given[6:9] = torch.where(given[6:9].isnan(), torch.tensor(1.0, dtype=dtype), given[6:9])
        for one, other in zip(
            run(places, given, dim, False), places(given, dim, False), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_of_bools() -> None:
    given = torch.rand(40, 30) > 0.9

    def both(x: Any) -> Any:
        return (*x.max(1), *x.min(0), x.logical_not().any(1), x.sum(1))

    for one, other in zip(run(both, given, fused=False), both(given), strict=True):
        assert torch.equal(one, other)


def test_half_precision_is_rounded_first() -> None:
    """Elements that are equal in half precision are so in single too: the first one counts."""

    def place(x: Any) -> Any:
        return (x * 1.001).argmax(1)

    given = torch.randint(900, 1100, (200, 64)).half()
    assert torch.equal(run(place, given), place(given))


def test_nothing_to_choose_from() -> None:
    def place(x: Any) -> Any:
        return (x * 2).argmax(1)

    compiled = magjit.compile(place, backend="dvm")
    assert compiled(torch.zeros(0, 3)).shape == (0,)
    with pytest.raises(IndexError, match="non-zero size"):
        compiled(torch.zeros(3, 0))


NORMS = list(
    itertools.product(
        [0, 1, 2, 3, 0.5, -1, math.inf, -math.inf],
        [torch.float32, torch.float64, torch.bfloat16],
    )
)


@pytest.mark.parametrize(
    ("order", "dtype", "settings"),
    in_turn(KINDS, NORMS, (f"{order}-{dtype}" for order, dtype in NORMS)),
    indirect=["settings"],
)
def test_norms(order: float, dtype: torch.dtype) -> None:
    def norms(x: Any, dim: Any, keepdim: bool) -> Any:
        return torch.linalg.vector_norm(x * 1, order, dim, keepdim)

    for number, (shape, dim) in enumerate(itertools.product(SHAPES[2::2], (None, 0, -1, (0, 1)))):
        own = dtype_of(dtype)
        assert own is not None
        given = LAYOUTS[number % 4](own, shape, number)
        got = run(norms, given, dim, bool(number % 2))
        torch.testing.assert_close(got, norms(given, dim, bool(number % 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32])
def test_logarithms_of_sums_of_exponentials(dtype: torch.dtype) -> None:
    """Of rows with infinities and NaN, of no element, of one."""

    def sums(x: Any, dim: Any, keepdim: bool) -> Any:
        return torch.logsumexp(x, dim, keepdim) * 1

    for shape, dim in (
        ((40, 5), 1),
        ((40, 5), (0, 1)),
        ((3, 4, 6), (0, 2)),
        ((7, 1), 1),
        ((3, 0), 1),
    ):
        x = torch.randint(-9, 9, shape).to(dtype)
        if dtype.is_floating_point and x.numel() > 9:
            x[0], x[1, 0] = -torch.inf, torch.inf
            x[2] = torch.nan if shape[1] > 4 else torch.finfo(dtype).min
        for keepdim in (False, True):
            got, want = run(sums, x, dim, keepdim), sums(x, dim, keepdim)
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, equal_nan=True)


def test_counts() -> None:
    def counts(x: Any) -> Any:
        return x.count_nonzero(1), (x > 0).any(1), x.all(1)

    for dtype in DTYPES:
        given = torch.randint(0, 3, (40, 5)).to(dtype)
        for one, other in zip(run(counts, given), counts(given), strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
