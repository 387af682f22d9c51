"""The library's way to compute a family: what a product costs where no macro-kernel is chosen.

A product alone is the library's kernel.  What follows a product is in the library's kernel where it
has one for it, else one generated kernel of element by element work, as without macro-kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch._guards import tracing

from magjit_triton.codegen.compiler import Program, compile_graph
from magjit_triton.codegen.kernel import Kernel
from magjit_triton.codegen.runtime import Launcher, interpreting
from magjit_triton.macro.families import FAMILIES, MacroFamily, Template, traced
from magjit_triton.measuring import quietly

__all__ = ["GeneralProgram", "library_way"]

Way = Callable[..., torch.Tensor]

_SIZES = {"batch": 4, "m": 48, "n": 272, "k": 640}
"""Different from each other, so that no symbol stands for two."""
_MOST_ROWS, _ELEMENTS = 4112, 2**24
"""Of the operands that what follows a product is compiled with: blocks suit many rows."""


class GeneralProgram(Program):
    """One variant of a kernel for all sizes: a call with other sizes compiles nothing."""

    def launcher(self, kernel: Kernel) -> Launcher:
        """What starts a kernel."""
        return Launcher(kernel, general=True)


def _relu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch._addmm_activation(b, x, w.t())


def _gelu_tanh(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch._addmm_activation(b, x, w.t(), use_gelu=True)


_OWN: dict[str, Way] = {"linear_relu": _relu, "linear_gelu_tanh": _gelu_tanh}
_FOLLOWED = ("linear_gelu", "linear_residual", "linear_bias_residual", "swiglu")


_MOST_ERROR = 4e-5


def library_way(family: MacroFamily, device: str, n: int) -> Way:
    """A function of the operands of a family of the table; all that it needs is compiled.

    Args:
        device: type of the operands' device.
        n: columns of the weight; a number, so that whole vectors of the result are moved.
    """
    template = family.template
    assert template is not None
    if device != "cuda" and not interpreting():
        return template.function
    if family.name in _OWN and _is_own(family.name, device):
        return _OWN[family.name]
    if family.name in (*_OWN, *_FOLLOWED):
        return _way(family.name, family.family.dtype, device, n)
    return template.function


@cache
def _is_own(name: str, device: str) -> bool:
    """Whether the library's own kernel has the family's formula."""
    # A program is being compiled: of fakes, and with the user's random numbers.
    with quietly(), tracing(None):
        # Which formula it has is a matter of device and version; the two of GELU are further apart
        # than this.
        exact = FAMILIES[name].arguments(_SIZES, torch.float32, device)
        expected, found = FAMILIES[name].function(*exact), _OWN[name](*exact)
        return bool((found - expected).abs().max() <= _MOST_ERROR * expected.abs().max())


@cache
def _way(name: str, dtype: torch.dtype, device: str, n: int) -> Way:
    template = FAMILIES[name]
    rows = _SIZES["m"]
    if device == "cuda":
        rows = max(rows, min(_MOST_ROWS, _ELEMENTS // n)) | 1  # No other size is odd.
    with quietly(), tracing(None):
        arguments = template.arguments({**_SIZES, "m": rows, "n": n}, dtype, device)
        run = _compiled(template, arguments, n)
        run(*arguments)
    return run


def _compiled(template: Template, arguments: Sequence[torch.Tensor], n: int) -> Way:
    """A program of the family's function for any number of rows, without macro-kernels."""

    def function(*given: torch.Tensor) -> list[torch.Tensor]:
        return [template.function(*given)]

    graph = traced(function, arguments, template.shapes, {"n": n})
    made = compile_graph(graph, arguments, writing=GeneralProgram)

    def run(*given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = made(*given)[0]
        return found

    return run
