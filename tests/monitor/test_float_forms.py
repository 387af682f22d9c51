"""Operators on floats, written with tensors in their place: every bit is as with the float."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from magjit.monitor.float_forms import _between, float_form  # noqa: E402

Program = Callable[..., Any]
T = torch.Tensor

VALUES = (0.1, -2.7, 1 / 3, 1e-40, 1e300, math.inf, -math.inf, math.nan, -0.0, 0.0, 1.0, 2.0)
MORE = (65504.1, 3.3e-8, 0.5, 0.7)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-310, 1e-40, -1e-40, 1.0, -3.5)


def tensor(seed: int, dtype: torch.dtype, count: int | None) -> T:
    """Numbers of all magnitudes and edges; without dimensions where there is no count."""
    made = torch.Generator().manual_seed(seed)
    size = count or 1
    exponents = torch.randn(size, generator=made, dtype=torch.float64) * 8
    values = torch.randn(size, generator=made, dtype=torch.float64) * exponents.exp()
    if size > len(EDGES):
        values[torch.randperm(size, generator=made)[: len(EDGES)]] = torch.tensor(
            EDGES, dtype=torch.float64
        )
    values = values.to(dtype) if dtype.is_floating_point else (values.clamp(-5, 5)).to(dtype)
    return values if count is not None else values[0].clone()


# An operator, and how it is called with x, y, z and a number.
CALLS: dict[str, tuple[Any, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "add": (torch.add, lambda x, y, z, a: ((x, a), {})),
    "add_": (T.add_, lambda x, y, z, a: ((x, a), {})),
    "radd": (T.__radd__, lambda x, y, z, a: ((x, a), {})),
    "sub": (T.sub, lambda x, y, z, a: ((x, a), {})),
    "rsub": (T.__rsub__, lambda x, y, z, a: ((x, a), {})),
    "mul": (T.__mul__, lambda x, y, z, a: ((x, a), {})),
    "imul": (T.__imul__, lambda x, y, z, a: ((x, a), {})),
    "div": (torch.div, lambda x, y, z, a: ((x, a), {})),
    "div_": (T.div_, lambda x, y, z, a: ((x, a), {})),
    "rdiv": (T.__rdiv__, lambda x, y, z, a: ((x, a), {})),
    "rpow": (T.__rpow__, lambda x, y, z, a: ((x, a), {})),
    "add alpha": (torch.add, lambda x, y, z, a: ((x, y), {"alpha": a})),
    "add_ alpha": (T.add_, lambda x, y, z, a: ((x, y), {"alpha": a})),
    "sub alpha": (T.sub, lambda x, y, z, a: ((x, y), {"alpha": a})),
    "sub_ alpha": (T.sub_, lambda x, y, z, a: ((x, y), {"alpha": a})),
    "addcmul": (torch.addcmul, lambda x, y, z, a: ((x, y, z), {"value": a})),
    "addcmul_": (T.addcmul_, lambda x, y, z, a: ((x, y, z), {"value": a})),
    "addcdiv": (T.addcdiv, lambda x, y, z, a: ((x, y, z), {"value": a})),
    "addcdiv_": (T.addcdiv_, lambda x, y, z, a: ((x, y, z), {"value": a})),
    "lerp": (torch.lerp, lambda x, y, z, a: ((x, y, a), {})),
    "lerp_": (T.lerp_, lambda x, y, z, a: ((x, y, a), {})),
    "where": (torch.where, lambda x, y, z, a: ((y > 0, x, a), {})),
    "where first": (torch.where, lambda x, y, z, a: ((y > 0, a, x), {})),
    "where method": (T.where, lambda x, y, z, a: ((x, y > 0, a), {})),
    "masked_fill": (T.masked_fill, lambda x, y, z, a: ((x, y > 0, a), {})),
    "fill_": (T.fill_, lambda x, y, z, a: ((x, a), {})),
    "clamp": (torch.clamp, lambda x, y, z, a: ((x, a), {})),
    "clamp both": (T.clamp, lambda x, y, z, a: ((x,), {"min": a, "max": 0.5})),
    "clamp twice": (T.clamp_, lambda x, y, z, a: ((x, a, a), {})),
    "clamp_min": (torch.clamp_min, lambda x, y, z, a: ((x, a), {})),
    "clamp_max_": (T.clamp_max_, lambda x, y, z, a: ((x, a), {})),
    "full": (torch.full, lambda x, y, z, a: (((2, 3), a), {"dtype": x.dtype})),
    "full_like": (torch.full_like, lambda x, y, z, a: ((x, a), {})),
    "new_full": (T.new_full, lambda x, y, z, a: ((x, (3,), a), {})),
    "tensor": (torch.tensor, lambda x, y, z, a: ((a,), {"dtype": x.dtype})),
    **{
        name: (getattr(T, name), lambda x, y, z, a: ((x, a), {}))
        for name in ("eq", "ne", "__lt__", "le", "gt", "__ge__")
    },
}
_HALF_ONLY_CONSTANT = {"add alpha", "add_ alpha", "sub alpha", "sub_ alpha"} | {
    name for name in CALLS if name.startswith(("addc", "lerp"))
}
_OF_INTS = {"add", "radd", "sub", "rsub", "mul", "div", "eq", "ne", "__lt__", "le", "gt", "__ge__"}


def same_bits(one: T, other: T) -> bool:
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    signs = torch.signbit(one) == torch.signbit(other)
    return bool((((one == other) & signs) | (one.isnan() & other.isnan())).all())


def with_tensors(func: Any, args: Any, kwargs: Any, value: float) -> Any:
    """What the form of an operator gives, or NotImplemented where the float is a constant."""
    form = float_form(func, args, kwargs, lambda given: given is value)
    if form is None or not form.suits(value):
        return NotImplemented
    t = torch.tensor(value, dtype=form.dtype)
    args = tuple(t if one is value else one for one in args)
    kwargs = {key: t if one is value else one for key, one in kwargs.items()}
    if form.function is not None:
        return form.function(*args, **kwargs)
    if func.__name__ in ("__rsub__", "__rpow__"):  # the graph has these the other way round
        return t - args[0] if func.__name__ == "__rsub__" else t ** args[0]
    return func(*args, **kwargs)


def outcomes(
    name: str, dtype: torch.dtype, device: str = "cpu"
) -> Iterator[tuple[float, Any, Any]]:
    func, arguments = CALLS[name]
    for seed, count in enumerate((1003, 7, 1, None)):
        for value in (*VALUES, *MORE):
            ours, theirs = (
                [tensor(seed + 10 * k, dtype, count).to(device) for k in range(3)] for _ in range(2)
            )
            number = float.__mul__(value, 1.0)  # an object of its own
            args, kwargs = arguments(*ours, number)
            made = with_tensors(func, args, kwargs, number)
            args, kwargs = arguments(*theirs, value)
            try:
                expected = func(*args, **kwargs)
            except RuntimeError:
                expected = None
            yield value, made, expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_every_bit(name: str, dtype: torch.dtype) -> None:
    taken = 0
    for value, made, expected in outcomes(name, dtype):
        if made is NotImplemented:
            continue
        taken += 1
        assert expected is not None, f"eager refuses {value}"
        assert same_bits(made, expected), f"{value}: {made} instead of {expected}"
    half_constant = dtype in DTYPES[2:] and name in _HALF_ONLY_CONSTANT
    assert (taken == 0) == half_constant


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Within the type's tolerance: a kernel may round once where two round twice."""
    for value, made, expected in outcomes(name, dtype, "cuda"):
        if made is not NotImplemented:
            assert expected is not None, f"eager refuses {value}"
            assert (made.device, made.dtype) == (expected.device, expected.dtype)
            torch.testing.assert_close(
                made, expected, equal_nan=True, msg=lambda m: f"{value}: {m}"
            )


@pytest.mark.parametrize("low", [None, -1.0, 0.5, 3.0])
@pytest.mark.parametrize("high", [None, 0.5, 2.0])
def test_bounds_away_from_the_cpu(low: float | None, high: float | None) -> None:
    """Values and gradients, also of elements that are equal to a bound, and of NaN."""
    found = []
    for clamp in (_between, torch.clamp):
        x = torch.tensor([*EDGES, 0.5, 2.0, 3.0, -1.0], requires_grad=True)
        if clamp is torch.clamp:
            y = x.clone() if low is high is None else torch.clamp(x, low, high)
        else:
            y = _between(x, *(None if b is None else torch.tensor(b) for b in (low, high))).clone()
        y.sum().backward()
        found.append((y.detach(), x.grad))
    for ours, theirs in zip(*found, strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_whole_numbers(name: str, dtype: torch.dtype, default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    taken = 0
    try:
        for value, made, expected in outcomes(name, dtype) if name not in _MAKE else ():
            if made is NotImplemented or expected is None:
                continue
            taken += 1
            assert same_bits(made, expected), f"{value}: {made} instead of {expected}"
    finally:
        torch.set_default_dtype(before)
    if dtype is not torch.bool:
        assert (taken > 0) == (name in _OF_INTS)


_MAKE = {"full", "full_like", "new_full", "tensor"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_powers_are_near(dtype: torch.dtype) -> None:
    x = tensor(1, dtype, 1003)
    for value in (0.1, -2.7, 1 / 3, 4.5, math.inf, -math.inf):
        made = with_tensors(torch.pow, (x, value), {}, value)
        torch.testing.assert_close(made, x**value, equal_nan=True)


@pytest.mark.parametrize("value", [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 3.0, math.nan])
def test_powers_that_torch_computes_otherwise(value: float) -> None:
    assert with_tensors(torch.pow, (torch.ones(3), value), {}, value) is NotImplemented


X = torch.ones(3)


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (torch.add, (X, 0.25), {"alpha": 2}),
        (torch.add, (X, X.double()), {"alpha": 0.25}),
        (torch.add, (X, X), {"alpha": 0.25, "out": X.clone()}),
        (torch.div, (X, 0.25), {"rounding_mode": "floor"}),
        (torch.mul, (X.to(torch.complex64), 0.25), {}),
        (torch.mul, (X.to_sparse(), 0.25), {}),
        (T.mul_, (X.int(), 0.25), {}),
        (torch.where, (X > 0, 0.25, 0.5), {}),
        (torch.where, (X > 0, X.int(), 0.25), {}),
        (T.masked_fill, (X.int(), X > 0, 0.25), {}),
        (torch.full, ((3,), 0.25), {"dtype": torch.int32}),
        (torch.full, ((3,), 0.25), {"requires_grad": True}),
        (torch.nn.functional.leaky_relu, (X, 0.25), {}),
        (torch.floor_divide, (X, 0.25), {}),
        (torch.clamp, (X, X, 0.25), {}),
        (torch.lerp, (X, X.double(), 0.25), {}),
    ],
)
def test_constants(func: Any, args: Any, kwargs: Any) -> None:
    assert with_tensors(func, args, kwargs, 0.25) is NotImplemented


def test_autocast_leaves_what_it_may_convert() -> None:
    value = float("0.25")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert with_tensors(torch.pow, (X, value), {}, value) is NotImplemented
        assert with_tensors(T.__rdiv__, (X, value), {}, value) is NotImplemented
        assert with_tensors(torch.add, (X, X), {"alpha": value}, value) is NotImplemented
        assert same_bits(with_tensors(torch.mul, (X, value), {}, value), X * value)
