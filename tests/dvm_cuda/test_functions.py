"""What the GPU's instructions compute, element by element, by their PTX in NumPy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import magjit_dvm
from magjit_dvm.cuda.coefficients import COEFFICIENTS
from magjit_dvm.cuda.functions import FLOATS, INTS, elementwise, is_binary, tables
from magjit_dvm.cuda.ptx import evaluate
from magjit_dvm.instructions import INSTRUCTIONS

_ROWS = {one.name: one for one in INSTRUCTIONS}
_ULPS = {"tanh": 3, "gelu": 16, "sigmoid": 3, "silu": 3, "sub_square": 2}
"""Of the largest error, beyond which something is wrong; 2.5 if not here."""
_ABSOLUTE = {"gelu": 1e-7, "gelu_tanh": 1e-6, "sigmoid": 2e-38, "silu": 2e-36, "sub_exp": 2e-38}
_ABSOLUTE |= dict.fromkeys(("gelu_slope", "gelu_tanh_slope", "silu_slope"), 2.0**-22)
"""Where results vanish: what is flushed or cancels."""


def samples() -> np.ndarray:
    made = np.random.default_rng(0)
    special = [0.0, -0.0, 1, -1, 0.5, 2.5, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, -3e38]
    special += [88.7, 89, -87.3, -88, -103, -104, 2.0**29, 1e10, -3e20, 1e-8, 16777216, 1e9]
    parts = [
        np.array(special),
        made.standard_normal(6000),
        made.standard_normal(6000) * 20,
        np.exp(made.uniform(-80, 80, 6000)),
        -np.exp(made.uniform(-80, 80, 6000)),
    ]
    return np.concatenate(parts).astype(np.float32)


def computed(name: str, kind: str, a: np.ndarray, t: np.ndarray) -> torch.Tensor:
    operands = {"a": a.view(np.uint32), "t": t.view(np.uint32)}
    return torch.from_numpy(evaluate(elementwise(name, kind).lines, operands, tables())["a"])


@pytest.mark.parametrize("name", [name for name in FLOATS if name in _ROWS])
def test_float_functions_are_of_single_precision(name: str) -> None:
    a = samples()
    t = np.random.default_rng(1).permutation(a)
    if name == "pow":
        whole = np.clip(np.nan_to_num(np.rint(t)), -9, 9)
        t = np.where(np.arange(len(t)) % 2, whole, np.clip(t, -30, 30)).astype(np.float32)
    x, y = torch.from_numpy(a), torch.from_numpy(t)
    reference = _ROWS[name].reference
    assert reference is not None
    narrow = reference(x, y) if is_binary(name, "f") else reference(x)
    raw = computed(name, "f", a, t)
    if narrow.dtype is torch.bool:
        assert torch.equal(raw.view(torch.int32) != 0, narrow)
        return
    got = raw.view(torch.float32)
    if name == "sub_exp":  # the difference is rounded first
        exact = (x - y).double().exp()
    elif name == "sub_square":
        exact = (x - y).double().square()
    else:
        exact = reference(x.double(), y.double()) if is_binary(name, "f") else reference(x.double())
    nearest = exact.float()
    same = (got == nearest) | (got == narrow) | (got.isnan() & nearest.isnan())
    error = (got.double() - exact).abs()
    scale = exact.abs().clamp(min=2.0**-126) * 2.0**-24 * 2
    fine = same | (error <= _ULPS.get(name, 2.5) * scale) | (error <= _ABSOLUTE.get(name, 0.0))
    assert bool(fine.all()), (name, x[~fine][:5], got[~fine][:5], exact[~fine][:5])


def test_small_exponentials_are_good_relative_to_1() -> None:
    """And to their own 16 bits."""
    t = np.concatenate([np.linspace(0, 90, 50001), [np.inf]]).astype(np.float32)
    got = computed("sub_exp_small", "f", np.zeros_like(t), t).view(torch.float32).double()
    exact = torch.from_numpy(-t).double().exp()
    assert float((got - exact).abs().max()) <= 2.0**-24
    assert float(((got - exact).abs() / exact)[exact > 1.2e-38].max()) <= 2.0**-16
    of_nan = computed("sub_exp_small", "f", t[:1] * np.nan, t[:1]).view(torch.float32)
    assert bool(of_nan.isnan().all())


@pytest.mark.parametrize("name", [name for name in INTS if name in _ROWS])
def test_int_functions_are_exact(name: str) -> None:
    made = np.random.default_rng(0)
    a = made.integers(-(2**31), 2**31, 4000).astype(np.int32)
    a[:2000] %= 40
    t = made.permutation(a)
    if name.startswith("shift"):
        t = made.integers(0, 32, 4000).astype(np.int32)
    elif name.endswith(("div", "mod", "remainder")):
        t[t == 0] = 5
    x, y = torch.from_numpy(a), torch.from_numpy(t)
    reference = _ROWS[name].reference
    assert reference is not None
    wanted = reference(x, y) if is_binary(name, "i") else reference(x)
    assert torch.equal(computed(name, "i", a, t).view(torch.int32), wanted.int())


def test_halves_are_rounded_as_torch_rounds() -> None:
    a = samples()
    for name, dtype in (("to_half", torch.float16), ("to_bfloat", torch.bfloat16)):
        got = computed(name, "f", a, a).view(torch.float32)
        wanted = torch.from_numpy(a).to(dtype).float()
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0)), name


def test_coefficients_are_those_of_the_other_device() -> None:
    source = Path(magjit_dvm.__file__).parent / "csrc" / "functions.inc"
    if not source.is_file():
        pytest.skip("an installation without sources")
    found = re.findall(r"constexpr \w+ f_(\w+)_c\[\] = \{(.*?)\};", source.read_text(), re.S)
    theirs = {
        name: tuple(float.fromhex(one.strip().rstrip("f")) for one in text.split(","))
        for name, text in found
    }
    assert COEFFICIENTS
    for name, numbers in COEFFICIENTS.items():
        assert numbers == theirs[name], name


def test_powers_of_two_modulo_two_pi() -> None:
    (table,) = tables().values()
    assert np.all(table[::2] < 6.2831855) and np.all(np.abs(table[1::2]) < 2.0**-22)
    assert np.isclose(table[0] + table[1], 64 % (2 * np.pi), rtol=0, atol=1e-13)
