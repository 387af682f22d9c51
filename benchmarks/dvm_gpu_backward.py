"""Gradients of norms and softmax on a GPU: bandwidth beside a copy, eager mode and Inductor.

    python benchmarks/dvm_gpu_backward.py --widths 1024 4096

Measured as `dvm_gpu.py` does. What has to move is the gradient that comes, what the forward pass
has kept of the size of its input, and the gradient that goes: three tensors. Gradients are compared
with eager mode's in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

import dvm_gpu
import dvm_gpu_cases
import magjit
from dvm_peers import another
from harness import Benchmark, Row, argument_parser

_TENSORS = 3
_TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""Of the largest element, at most."""


def cases(widths: Sequence[int]) -> Iterator[dvm_gpu_cases.Case]:
    """Programs, with vectors of weights that have gradients, too, or without."""
    plain = (
        dvm_gpu_cases.layer_norm,
        dvm_gpu_cases.rms_norm,
        dvm_gpu_cases.softmax,
        dvm_gpu_cases.log_softmax,
    )
    for width in widths:
        for function in plain:
            name = f"{function.__name__} {width}"
            yield dvm_gpu_cases.Case("backward", name, function, dvm_gpu_cases.rows(width))
        weighted = dvm_gpu_cases.rows(width, vectors=2)
        name = f"layer_norm {width}, weights"
        yield dvm_gpu_cases.Case("backward", name, dvm_gpu_cases.layer_norm_weights, weighted)
        weighted = dvm_gpu_cases.rows(width, vectors=1)
        name = f"rms_norm {width}, weight"
        yield dvm_gpu_cases.Case("backward", name, dvm_gpu_cases.rms_norm_weight, weighted)


def backward(function: Callable[..., Tensor], given: Sequence[Tensor], dy: Tensor) -> Any:
    """A call that computes the gradients of ``given``; the forward pass is over."""
    y = function(*given)
    return lambda: torch.autograd.grad(y, given, dy, retain_graph=True)


def wrong(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether a gradient is farther from one in float32 than its share of the largest element."""
    pairs = zip(found, wanted, strict=True)
    return any(
        bool((one.float() - other).abs().max() > _TOLERANCES[one.dtype] * other.abs().max())
        for one, other in pairs
    )


def measure(
    benchmark: Benchmark, case: dvm_gpu_cases.Case, dtype: torch.dtype, options: argparse.Namespace
) -> None:
    """Fractions of a copy's bandwidth."""
    given = [one.requires_grad_() for one in case.make(dvm_gpu._SIZES[options.size], dtype)]
    dy = torch.randn_like(given[0])
    name = f"gpu: {case.name}, backward, {str(dtype).removeprefix('torch.')}, {options.size}"
    torch._dynamo.reset()
    compiled = magjit.compile(case.function, backend="dvm")
    compiled(*given)
    functions: dict[str, Callable[..., Tensor]] = {"magjit": compiled, "eager": case.function}
    functions["static"] = torch.compile(another(case.function, "static"), dynamic=False)
    runs = {one: backward(function, given, dy) for one, function in functions.items()}
    wide = [one.detach().float().requires_grad_() for one in given]
    wanted = backward(case.function, wide, dy.float())()
    note = "magjit: not eager's result in float32" if wrong(runs["magjit"](), wanted) else ""
    del wide, wanted
    values = dvm_gpu.fractions(runs, dvm_gpu.moved(given[:1]) * _TENSORS, options.turns)
    benchmark.add(Row.of(name, "fraction of copy bandwidth", "", values, note))


def part_backward(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """All rows that are asked for."""
    torch._functorch.config.donated_buffer = False  # a graph that is kept keeps its memory
    for dtype in options.dtypes:
        for case in cases(options.widths):
            measure(benchmark, case, dvm_gpu._DTYPES[dtype], options)
            benchmark.write()


def chosen(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What to run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--widths", nargs="+", type=int, default=[1024, 4096, 512, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", choices=dvm_gpu._DTYPES, default=["float16"])
    parser.add_argument("--size", choices=dvm_gpu._SIZES, default="256 MB")
    parser.add_argument("--turns", type=int, default=15)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return dvm_gpu.run_alone(chosen(arguments), part_backward)


if __name__ == "__main__":
    sys.exit(main())
