"""Global state of torch, and metadata and aliasing of tensor arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

import magjit

from ..twin import Call, Scene, call
from .table import HIT, RECAPTURED, RIGHT, new_table

ROWS = new_table()

WEIGHT = torch.nn.Parameter(torch.ones(4, 4))


class Doubling(TorchFunctionMode):
    """Doubles what torch.sin returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class Tagged(torch.Tensor):
    pass


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ WEIGHT.to(x.dtype)


def of_free_size(n: int) -> torch.Tensor:
    made = torch.randn(n, 4)
    magjit.mark_dynamic(made, 0)
    return made


# name -> (program, change, what it leads to, silent)
GLOBALS: dict[str, tuple[Callable[..., Any], Callable[[Scene], Any], str, bool]] = {
    "grad mode": (product, lambda s: torch.no_grad(), RECAPTURED, False),
    "grad mode read": (
        lambda x: x * (2 if torch.is_grad_enabled() else 3),
        lambda s: torch.no_grad(),
        RECAPTURED,
        False,
    ),
    "inference mode": (product, lambda s: torch.inference_mode(), RIGHT, False),
    "autocast on": (product, lambda s: torch.autocast("cpu", torch.bfloat16), RECAPTURED, False),
    "autocast read": (
        lambda x: x * (2 if torch.is_autocast_enabled("cpu") else 3),
        lambda s: torch.autocast("cpu", torch.bfloat16),
        RECAPTURED,
        False,
    ),
    "default dtype": (
        lambda x: x + torch.ones(4),
        lambda s: torch.set_default_dtype(torch.float64),
        RECAPTURED,
        False,
    ),
    "default device": (lambda x: (x, torch.ones(4)), lambda s: torch.device("meta"), RIGHT, False),
    "deterministic flag read": (
        lambda x: x * (2 if torch.are_deterministic_algorithms_enabled() else 3),
        lambda s: torch.use_deterministic_algorithms(True),
        RECAPTURED,
        False,
    ),
    "deterministic flag": (
        product,
        lambda s: torch.use_deterministic_algorithms(True),
        RECAPTURED,
        True,
    ),
    "thread count read": (
        lambda x: x * torch.get_num_threads(),
        lambda s: torch.set_num_threads(3),
        RECAPTURED,
        False,
    ),
    "thread count": (product, lambda s: torch.set_num_threads(3), RECAPTURED, True),
    "matmul precision read": (
        lambda x: x * len(torch.get_float32_matmul_precision()),
        lambda s: torch.set_float32_matmul_precision("medium"),
        RECAPTURED,
        False,
    ),
    "matmul precision": (
        product,
        lambda s: torch.set_float32_matmul_precision("medium"),
        RECAPTURED,
        True,
    ),
    "torch function mode": (lambda x: torch.sin(x), lambda s: Doubling(), RIGHT, False),
    "torch function replaced on its module": (
        lambda x: PATCHED.sin(x),
        lambda s: contextlib.nullcontext(setattr(PATCHED, "sin", torch.cos)),
        RECAPTURED,
        False,
    ),
    "torch seed": (lambda x: x + torch.rand(4), lambda s: reseed(s), HIT, False),
}


class PATCHED:
    sin = torch.sin


def reseed(scene: Scene) -> None:
    def args() -> Call:
        torch.rand(7)
        return call(torch.zeros(3, 4))

    scene.args = args


def global_scene(program: Callable[..., Any], change: Callable[[Scene], Any]) -> Scene:
    PATCHED.sin = torch.sin
    return Scene(
        functools.wraps(program)(lambda x: program(x)),
        args=lambda: call(torch.zeros(3, 4) + torch.randn(1)),
        change=change,
    )


for row_name, (read, mutate, leads_to, silent) in GLOBALS.items():
    ROWS.add(row_name, functools.partial(global_scene, read, mutate), after=leads_to, silent=silent)


@ROWS.row()
def autocast_dtype() -> Scene:
    scene = global_scene(product, lambda s: torch.autocast("cpu", torch.float16))
    scene.context = lambda: torch.autocast("cpu", torch.bfloat16)
    return scene


@ROWS.row()
def autocast_off() -> Scene:
    scene = global_scene(product, lambda s: contextlib.nullcontext())
    scene.context = lambda: torch.autocast("cpu", torch.bfloat16)
    return scene


# --- metadata of tensor arguments -----------------------------------------------------------


def affine(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def flat(x: torch.Tensor) -> Any:
    """Returns what depends on layout too: strides and whether a view was possible."""
    return x.reshape(-1) * 2, x.stride(), x.is_contiguous()


def float_like(x: torch.Tensor) -> torch.Tensor:
    return x.abs() * 2


def moved(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(3, 4, device=x.device) * x


def conj_view() -> torch.Tensor:
    return torch.randn(3, 4, dtype=torch.complex64).conj()


def at_offset() -> torch.Tensor:
    return torch.randn(13)[1:].view(3, 4)


def plain() -> torch.Tensor:
    return torch.randn(3, 4)


# name -> (program, argument before, argument after, what it leads to)
METADATA: dict[str, tuple[Callable[..., Any], Callable[[], Any], Callable[[], Any], str]] = {
    "dtype": (affine, plain, lambda: plain().double(), RECAPTURED),
    "shape": (affine, plain, lambda: torch.randn(2, 4), RECAPTURED),
    "rank": (affine, plain, lambda: torch.randn(2, 3, 4), RECAPTURED),
    "size of one dimension": (
        lambda x: x * x.shape[0],
        plain,
        lambda: torch.randn(5, 4),
        RECAPTURED,
    ),
    "broadcast size of one": (
        lambda x: x + torch.ones(3, 4),
        plain,
        lambda: torch.randn(1, 4),
        RECAPTURED,
    ),
    "free size that decides": (
        lambda x: x * (2 if x.shape[0] > 4 else 3),
        lambda: of_free_size(3),
        lambda: of_free_size(5),
        RECAPTURED,
    ),
    "free size that decides nothing": (
        lambda x: x * (2 if x.shape[0] > 4 else 3),
        lambda: of_free_size(3),
        lambda: of_free_size(4),
        HIT,
    ),
    "strides": (flat, plain, lambda: torch.randn(4, 3).t(), RECAPTURED),
    "channels last": (
        flat,
        lambda: torch.randn(2, 3, 4, 4),
        lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        RECAPTURED,
    ),
    "expanded": (flat, plain, lambda: torch.randn(1, 4).expand(3, 4), RECAPTURED),
    "storage offset read": (lambda x: x * (x.storage_offset() + 2), plain, at_offset, RECAPTURED),
    "device": (moved, plain, lambda: torch.randn(3, 4, device="meta"), RIGHT),
    "requires grad": (affine, plain, lambda: plain().requires_grad_(), RECAPTURED),
    "leaf read": (
        lambda x: x * (2 if x.is_leaf else 3),
        lambda: plain().requires_grad_(),
        lambda: plain().requires_grad_() * 1,
        RECAPTURED,
    ),
    "sparse layout": (float_like, plain, lambda: plain().to_sparse(), RIGHT),
    "conjugate bit": (
        lambda x: x.is_conj() + x.real,
        lambda: conj_view().resolve_conj(),
        conj_view,
        RECAPTURED,
    ),
    "complex dtype": (affine, plain, lambda: plain().to(torch.complex64), RECAPTURED),
    "subclass": (affine, plain, lambda: plain().as_subclass(Tagged), RIGHT),
    "parameter": (
        lambda x: x * (2 if isinstance(x, torch.nn.Parameter) else 3),
        plain,
        lambda: torch.nn.Parameter(plain(), requires_grad=False),
        RECAPTURED,
    ),
    "zero dimensions": (affine, plain, lambda: torch.tensor(2.0), RECAPTURED),
    "empty": (lambda x: x.sum(0), plain, lambda: torch.randn(0, 4), RECAPTURED),
    "number instead of tensor": (affine, plain, lambda: 2.0, RECAPTURED),
    "none instead of tensor": (
        lambda x: torch.ones(2) if x is None else x * 2,
        plain,
        lambda: None,
        RECAPTURED,
    ),
    "numpy array instead of tensor": (affine, plain, lambda: np.ones((3, 4), np.float32), RIGHT),
    "data dependent value": (
        lambda x: x * 2 if x.sum().item() > 0 else x * 3,
        lambda: plain().abs(),
        lambda: -plain().abs(),
        RIGHT,
    ),
    "inference tensor": (
        lambda x: x * (2 if x.is_inference() else 3),
        plain,
        lambda: inference_tensor(),
        RIGHT,
    ),
}


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3, 4)


def metadata_scene(program: Any, before: Any, after: Any) -> Scene:
    def change(scene: Scene) -> None:
        scene.args = lambda: call(after())

    return Scene(
        functools.wraps(program)(lambda x: program(x)), args=lambda: call(before()), change=change
    )


for row_name, (*entry, leads_to) in METADATA.items():
    ROWS.add(f"tensor {row_name}", functools.partial(metadata_scene, *entry), after=leads_to)
