"""Functions of 16-bit floats over all 65,536 numbers of a dtype, by their PTX in NumPy.

The GPU's 2^x, log2 and 1 / x are taken as good as PTX's documents say, and as bad: results 2^-22
above and below the exact ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from magjit_dvm.cuda import ptx
from magjit_dvm.cuda.encode import encode
from magjit_dvm.cuda.functions import elementwise, tables
from magjit_dvm.cuda.short_functions import LARGEST, SHORT
from magjit_dvm.fuser import fuse
from magjit_dvm.instructions import DType
from magjit_dvm.lowering import decompositions
from magjit_dvm.program import Program
from tests.dvm.checking import cast, compute, load, output, tensor
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.checking import BIG, check_words
from tests.dvm_cuda.test_encoder import values

Array = Any
_ERROR = 2.0**-22
_OFF = 2.0**-17
"""Of a result, at most: a 32nd of what rounding to float16 may be."""
_ABSOLUTE = {"gelu": 2.0**-31, "gelu_tanh": 2.0**-119, "silu": 2.0**-119}
"""Beside it; 2^-126 if not here."""


def numbers(dtype: torch.dtype) -> Array:
    """All of a dtype, as float32."""
    all_of = np.arange(1 << 16, dtype=np.uint16)
    if dtype is torch.float16:
        with np.errstate(invalid="ignore"):
            return all_of.view(np.float16).astype(np.float32)
    return (all_of.astype(np.uint32) << 16).view(np.float32)


def exact(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "gelu":
        return x * 0.5 * torch.special.erfc(-x / math.sqrt(2))
    if name == "gelu_tanh":
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    if name == "silu":
        return x * torch.sigmoid(x)
    function: Callable[[torch.Tensor], torch.Tensor] = getattr(torch, name)
    return function(x)


def off(opcode: str, by: float) -> Callable[[Array], Array]:
    """An approximation of PTX's that is always off by so much."""
    plain = ptx._PLAIN[opcode]

    def apply(a: Array) -> Array:
        y = plain(a).astype(np.float64)
        near_one = (a > 0.5) & (a < 2) if opcode == "lg2" else np.zeros(a.shape, bool)
        return np.where(near_one, y + by, y * (1 + by)).astype(np.float32)

    return apply


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("by", [-_ERROR, 0.0, _ERROR], ids=["below", "nearest", "above"])
@pytest.mark.parametrize("name", SHORT)
def test_every_number(
    name: str, by: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = f"{name}_short"
    if by:
        for opcode in ("ex2", "lg2", "rcp"):
            monkeypatch.setitem(ptx._PLAIN, opcode, off(opcode, by))
    a = numbers(dtype)
    words = {"a": a.view(np.uint32), "t": a.view(np.uint32)}
    found = ptx.evaluate(elementwise(short, "f").lines, words, tables())["a"]
    got = torch.from_numpy(found.view(np.float32))
    with np.errstate(invalid="ignore"):
        wanted = exact(name, torch.from_numpy(a.astype(np.float64)))
    asked = torch.from_numpy(a).abs() < LARGEST.get(short, math.inf)
    asked |= ~torch.from_numpy(a).isfinite()
    got, wanted = got[asked], wanted[asked]
    assert torch.equal(got.isnan(), wanted.isnan())
    absolute = _ABSOLUTE.get(name, 2.0**-126)
    known = wanted.isfinite() & (wanted.abs() < torch.finfo(torch.float32).max)
    error, size = (got.double() - wanted).abs()[known], wanted.abs()[known]
    assert bool((error <= _OFF * size + absolute).all()), float((error / size).max())
    # Rounded once more, at most one number beside the nearest.
    ours, nearest = got.to(dtype)[known], wanted.to(dtype)[known]
    step = (place(ours) - place(nearest)).abs()[(size > 2**9 * absolute) & nearest.isfinite()]
    assert int(step.max()) <= 1 and float((step > 0).float().mean()) < 0.03
    zeros = wanted == 0
    if name != "gelu":
        assert torch.equal(got[zeros].signbit(), wanted[zeros].signbit())


def place(x: torch.Tensor) -> torch.Tensor:
    """Numbers of 16 bits in their order."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def rounded(name: str, dtype: DType, *after: str) -> Program:
    """A function of a product, and what becomes of it until it is rounded to a dtype."""
    nodes = [load(0, dtype)]
    nodes += [cast(DType.F32, 0)] * (dtype is not DType.F32)
    x = len(nodes) - 1
    nodes += [compute("mul", DType.F32, x, x), compute(name, DType.F32, x + 1)]
    for op in after:
        of = len(nodes) - 1
        binary = op in ("add", "mul")
        nodes.append(compute(op, DType.F32, of, *[x] * binary))
    nodes += [cast(dtype, len(nodes) - 1)] * (dtype is not DType.F32)
    return Program(1, (tensor(dtype, 0),), tuple(nodes), (output(len(nodes) - 1, 0),))


def operators(program: Program, x: torch.Tensor) -> list[str]:
    """Of the words of a call, checked."""
    image = check_words(program, [x])
    assert image is not None
    return [one for word in image.words for one in (word.first, word.second)]


@pytest.mark.parametrize("name", SHORT)
def test_what_is_rounded_to_16_bits_is_short(name: str) -> None:
    """Both encoders agree."""
    for dtype in (DType.F32, DType.F16, DType.BF16):
        x = values(dtype, 300).abs() + 0.125
        wanted = name if dtype is DType.F32 else f"{name}_short"
        for after in ((), ("mul",), ("neg", "mul", "relu")):
            assert f"f.{wanted}" in operators(rounded(name, dtype, *after), x)
        assert f"f.{name}" in operators(rounded(name, dtype, "add"), x), "a sum may cancel"
        many = ("neg", "neg", "neg", "neg")
        assert f"f.{name}" in operators(rounded(name, dtype, *many), x), "too many"


_ONE_BY_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("name", SHORT)
def test_what_eager_mode_rounds_is_short(name: str) -> None:
    """In a program of half precision, whatever becomes of it; not where that is asked for wider."""
    function = _ONE_BY_ONE.get(name) or getattr(torch, name)

    def words(dtype: torch.dtype, program: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
        x = torch.rand(300).to(dtype)
        (group,) = fuse(make_fx(program, decompositions(), "fake")(x).graph).groups
        assert check_encoders(group.program, [x], BIG) != "left"
        image = encode(group.program, [x], BIG).image
        assert image is not None
        return [one for word in image.words for one in (word.first, word.second)]

    for dtype in (torch.float16, torch.bfloat16):
        assert f"f.{name}_short" in words(dtype, lambda x: function(x * 2) + x)
        assert f"f.{name}" in words(dtype, lambda x: function(x.float() * 2) + x)
    assert f"f.{name}" in words(torch.float32, lambda x: function(x * 2) + x)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_large_angles(name: str) -> None:
    """A tile with one goes to the function itself."""
    x = values(DType.BF16, 5000)
    x[17], x[4000], x[4999] = 3e30, -float("inf"), float("nan")
    assert f"f.{name}_short" in operators(rounded(name, DType.BF16), x)


def test_a_difference_has_a_short_exponential() -> None:
    nodes = (load(0, DType.F16), cast(DType.F32, 0), load(1, DType.F16), cast(DType.F32, 2))
    nodes = (*nodes, compute("sub", DType.F32, 1, 3), compute("exp", DType.F32, 4))
    inputs = tensor(DType.F16, 0), tensor(DType.F16, 0)
    program = Program(1, inputs, (*nodes, cast(DType.F16, 5)), (output(6, 0),))
    image = check_words(program, [values(DType.F16, 300, seed=k) for k in range(2)])
    assert image is not None and "f.sub_exp_small" in [word.second for word in image.words]
