"""Linear layers of float16 and bfloat16 with what follows them, on a GPU.

    python benchmarks/products.py --json F

Each layer, alone and with an activation or a residual after it, as backend triton compiles it, with
the library's product instead of one of ours, by torch.compile, and eagerly.  Results are compared
with eager's, within what two orders of summation may differ by.

run_ms    milliseconds of a call, many behind one another: of the device, or of the host where that
          takes longer to ask for a product than the device computes; peers library, torch.compile,
          eager
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import magjit
from harness import Benchmark, Row, Task, argument_parser
from virtual_tensors import device_times

ROUNDS = 7
SHAPES = (  # m, n, k
    (8192, 6144, 4096),
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (4096, 4096, 4096),
    (2048, 4096, 1024),
    (4096, 3072, 768),
    (4096, 768, 3072),
    (1000, 3000, 1000),
    (512, 6144, 4096),
)
FOLLOWS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "alone": lambda x, w, b, y: F.linear(x, w),
    "bias, GELU": lambda x, w, b, y: F.gelu(F.linear(x, w, b)),
    "residual": lambda x, w, b, y: y + F.linear(x, w),
}


def arguments_of(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, w, b, y of one size; results are about 1."""
    m, n, k = shape
    torch.manual_seed(0)
    given = [torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n), torch.randn(m, n)]
    return [one.to(device, dtype) for one in given]


def entrants(function: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """The ways to run a function."""
    torch._dynamo.reset()
    return {
        "magjit": magjit.compile(function, backend="triton"),
        "library": magjit.compile(function, backend="triton", options={"matmul": "library"}),
        "torch.compile": torch.compile(function, dynamic=False),
        "eager": function,
    }


def measure(
    benchmark: Benchmark, shape: tuple[int, int, int], name: str, dtype: torch.dtype, rounds: int
) -> bool:
    """Whether all results agree with eager's."""
    function, arguments = FOLLOWS[name], arguments_of(shape, dtype, "cuda")
    expected = function(*arguments)
    tasks: dict[str, Task] = {}
    agree = True
    for entrant, call in entrants(function).items():
        for _ in range(3):
            found = call(*arguments)
        near = 4 * torch.finfo(dtype).eps
        agree &= torch.allclose(found.float(), expected.float(), rtol=near, atol=near)
        tasks[entrant] = partial(call, *arguments)
    times = device_times(tasks, rounds)
    case = f"{' x '.join(map(str, shape))}, {name}, {str(dtype).removeprefix('torch.')}"
    ours = times.pop("magjit")
    benchmark.add(Row(case, "run_ms", "ms", ours, times, "" if agree else "a result differs"))
    benchmark.write(quiet=True)
    return agree


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=("float16", "bfloat16"), default=None)
    parser.add_argument("--shapes", nargs="+", metavar="MxNxK", help="instead of all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    try:
        options.shapes = [tuple(map(int, one.split("x"))) for one in options.shapes or ()] or SHAPES
        if any(len(one) != 3 or min(one) < 1 for one in options.shapes):
            raise ValueError
    except ValueError:
        parser.error("a shape is three positive numbers, such as 8192x4096x4096")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; 1 where a result differs."""
    options = parsed(arguments)
    benchmark = Benchmark.start(options)
    agree = True
    with torch.no_grad():
        for label in options.dtypes or ("bfloat16",):
            for shape in options.shapes:
                for name in FOLLOWS:
                    agree &= measure(benchmark, shape, name, getattr(torch, label), options.rounds)
    benchmark.finish()
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
