"""Fused operators on a GPU: bandwidth beside a copy, eager mode and Inductor, and host time.

    python benchmarks/dvm_gpu.py --programs norms special --dtypes float16 --sizes "256 MB"

A call is timed between two events behind a kernel that sleeps until the host has queued it, after
128 MB of something else have been written, so that neither the host nor the L2 cache takes part.
All entrants take turns; a figure is the median over turns of bytes that have to move, by time, as a
fraction of what `copy_` of as many bytes reaches. `--seconds` starts no case after so long: the
first ones are those that matter most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import magjit
from compilers import compile_without_limit
from dvm_peers import another, host_time, percentile
from harness import Benchmark, Row, argument_parser

_CALLS = 2000
_FLUSHED = 160 << 20
_SIZES = {
    "100 KB": 100 << 10,
    "16 MB": 16 << 20,
    "64 MB": 64 << 20,
    "256 MB": 256 << 20,
    "1 GB": 1 << 30,
}
_WIDTHS = (1024, 4096, 2048, 512, 8192, 16384, 768)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}
_PEERS = ("eager", "static", "dynamic")
_CYCLES = 2000
"""Of the GPU's clock, a microsecond, at most."""

Entrant = tuple[str, Callable[[], Any]]
Make = Callable[[int, torch.dtype], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """A program, and how its arguments of so many bytes are made."""

    group: str
    name: str
    function: Callable[..., Tensor]
    make: Make


def why_not() -> str:
    """The reason if there is no GPU to measure on; empty if there is one."""
    if not torch.cuda.is_available():
        return "--device cuda: torch sees no NVIDIA GPU here; --device cpu measures the CPU"
    return ""


# -- programs --


def chain(operators: int) -> Callable[[Tensor], Tensor]:
    """So many cheap operators."""

    def run(x: Tensor) -> Tensor:
        for k in range(operators):
            x = (x * 1.01, x + 0.5, x.relu(), -x)[k % 4]
        return x

    return run


def mixed(x: Tensor) -> Tensor:
    """Six special functions among six cheap ones."""
    x = (x * 0.5).sigmoid() + 0.5
    x = (x.log() * 1.5).exp() + 0.25
    return ((x.rsqrt() * 1.25).tanh() - 0.5).exp() * 2


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def layer_norm_weights(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def rms_norm_weight(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x + y, x.shape[-1:], weight)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def softmax_gradient(dy: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)  # type: ignore[no-any-return]


def embedding_norm(table: Tensor, ids: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(ids, table), table.shape[-1:])


def losses(x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(x, classes, reduction="none")


def causal_softmax(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[-1], device=x.device)
    below = places[None, :] <= places[: x.shape[-2], None]
    return x.masked_fill(~below, float("-inf")).softmax(-1)


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return (x * 0.125 + mask).softmax(-1)


def biased_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def gate(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x * y + z


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def largest(x: Tensor) -> Tensor:
    return x.abs().amax()


def distance(x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x - y)
    return found


def standardized(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:])


# -- arguments --


def line(count: int, offset: int = 0) -> Make:
    """Tensors of one dimension, from an element on."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        n = size // dtype.itemsize
        return [_drawn((n + offset,), dtype)[offset:] for _ in range(count)]

    return make


def rows(width: int, count: int = 1, vectors: int = 0) -> Make:
    """Tensors of rows, then vectors of a row's length."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        shape = (max(size // dtype.itemsize // width, 1), width)
        made = [_drawn(shape, dtype) for _ in range(count)]
        return made + [_drawn((width,), dtype) for _ in range(vectors)]

    return make


def square(how: str) -> Make:
    """Two matrices, of which the second is seen otherwise."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        n = int((size // dtype.itemsize) ** 0.5) // 64 * 64
        x = _drawn((n, n), dtype)
        other = {
            "transposed": lambda: _drawn((n, n), dtype).t(),
            "a row": lambda: _drawn((n,), dtype),
            "a column": lambda: _drawn((n, 1), dtype),
            "a part": lambda: _drawn((n, 3 * n), dtype)[:, n : 2 * n],
        }
        return [x, other[how]()]

    return make


def looked_up(width: int) -> Make:
    """A table, and as many positions in random order as it has rows."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        table = rows(width)(size, dtype)[0]
        return [table, torch.randperm(len(table), device="cuda")]

    return make


def scores(classes: int) -> Make:
    """Of classes, and the right one of each row."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        given = rows(classes)(size, dtype)[0]
        return [given, torch.randint(0, classes, (len(given),), device="cuda")]

    return make


def shares(width: int) -> Make:
    """Of anything, and of rows whose sum is 1."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        dy, x = rows(width, 2)(size, dtype)
        return [dy, x.softmax(-1)]

    return make


def squares(width: int) -> Make:
    """Matrices, one behind another."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        count = max(size // dtype.itemsize // width**2, 1)
        return [_drawn((count, width, width), dtype)]

    return make


def few(count: int) -> Make:
    """A tensor of so many rows."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        return [_drawn((count, size // dtype.itemsize // count), dtype)]

    return make


def _drawn(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def cases() -> Iterator[Case]:
    """All programs, those that matter most first."""
    for width in _WIDTHS:
        for norm in (layer_norm, rms_norm, softmax):
            yield Case("norms", f"{norm.__name__} {width}", norm, rows(width))
    for count in (4, 12, 1, 2, 8):
        yield Case("chains", f"{count} operators", chain(count), line(1))
    for width in (1024, 4096, 8192):
        for name, function, made in (
            ("layer_norm {}, weights", layer_norm_weights, rows(width, vectors=2)),
            ("rms_norm {}, weight", rms_norm_weight, rows(width, vectors=1)),
            ("add, rms_norm {}, weight", add_rms_norm, rows(width, 2, 1)),
            ("log_softmax {}", log_softmax, rows(width)),
        ):
            yield Case("weights", name.format(width), function, made)
    for width in (64, 96, 128, 256):
        name, weighted = f"rms_norm {width}, weight", rows(width, vectors=1)
        yield Case("narrow", name, rms_norm_weight, weighted)
    for width in (96, 384):
        name, weighted = f"layer_norm {width}, weights", rows(width, vectors=2)
        yield Case("narrow", name, layer_norm_weights, weighted)
    for width in (32, 49, 64, 197):
        yield Case("narrow", f"softmax {width}", softmax, rows(width))
    yield Case("narrow", "softmax 197, with a mask", masked_softmax, rows(197, vectors=1))
    for width in (32_000, 50_257, 128_256):
        yield Case("long", f"softmax {width}", softmax, rows(width))
    yield Case("long", "log_softmax 32000", log_softmax, rows(32_000))
    yield Case("long", "rms_norm 32768, weight", rms_norm_weight, rows(32_768, vectors=1))
    yield Case("long", "gradient of softmax 32000", softmax_gradient, shares(32_000))
    yield Case("long", "losses of 128256 classes", losses, scores(128_256))
    yield Case("inputs", "add", add, line(2))
    yield Case("inputs", "silu(x) * y", gate, line(2))
    yield Case("inputs", "x * y + z", multiply_add, line(3))
    for special in (torch.exp, torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.log, torch.sin):
        yield Case("special", f"{special.__name__} of a product", _of_product(special), line(1))
    yield Case("special", "6 special, 6 cheap", mixed, line(1))
    for width in (768, 4096):
        yield Case("tables", f"embedding, layer_norm {width}", embedding_norm, looked_up(width))
    for classes in (1024, 32_000):
        yield Case("tables", f"losses of {classes} classes", losses, scores(classes))
    yield Case("tables", "softmax 1024 below the diagonal", causal_softmax, squares(1024))
    yield Case("reductions", "mse_loss", F.mse_loss, line(2))
    yield Case("reductions", "largest absolute value", largest, line(1))
    yield Case("reductions", "the norm of x - y", distance, line(2))
    yield Case("reductions", "log_softmax of 4 rows", log_softmax, few(4))
    yield Case("reductions", "layer_norm of 8 rows", standardized, few(8))
    for how in ("transposed", "a row", "a column", "a part"):
        yield Case("views", f"add, {how}", add, square(how))
    yield Case("offsets", "4 operators, from element 1", chain(4), line(1, 1))
    yield Case("offsets", "add, from element 3", add, line(2, 3))
    yield Case("offsets", "layer_norm 1023", layer_norm, rows(1023))
    yield Case("offsets", "softmax 4095", softmax, rows(4095))
    yield Case("offsets", "layer_norm 1023, weights", layer_norm_weights, rows(1023, vectors=2))
    yield Case("offsets", "gelu(x + bias) 1023", biased_gelu, rows(1023, vectors=1))


def _of_product(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What is fused with something: an elementwise operator alone is ATen's."""

    def run(x: Tensor) -> Tensor:
        return function(x * 0.75)

    return run


GROUPS = tuple(dict.fromkeys(one.group for one in cases()))


# -- measurement --


def microseconds(runs: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Of the GPU, a call of each, in the median of some turns; each turn begins with another."""
    longest = max(_host_time(run) for run in runs.values())
    flushed = torch.empty(_FLUSHED, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {one: [] for one in runs}
    for turn in range(turns):
        for name, run in rotated(list(runs.items()), turn):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.zero_()
            torch.cuda._sleep(int(_CYCLES * (2 * longest + 20)))
            start.record()
            run()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    return {
        name: percentile([start.elapsed_time(end) * 1e3 for start, end in pairs], 0.5)
        for name, pairs in events.items()
    }


def rotated(entrants: list[Entrant], turn: int) -> list[Entrant]:
    """In the order of this turn."""
    first = turn % len(entrants)
    return entrants[first:] + entrants[:first]


def _host_time(run: Callable[[], Any]) -> float:
    """Microseconds until a call returns, at most of a few, once it is warm."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        times.append(host_time(run))
    torch.cuda.synchronize()
    return max(times)


def replayed(
    case: Case, compiled: Callable[..., Tensor], given: Sequence[Tensor]
) -> tuple[Tensor, str]:
    """What a compiled program computes, and what is wrong with it; empty if nothing is.

    The result of the first call would be eager mode's own: the run that MagJIT watches.
    """
    compiled(*given)
    before = magjit.stats(compiled).replays
    found = compiled(*given)
    if magjit.stats(compiled).replays == before:
        return found, "magjit: runs eagerly"
    wide = [one.float() if one.is_floating_point() else one for one in given]
    wrong = not agrees(found, case.function(*wide))
    return found, "magjit: not eager's result in float32" if wrong else ""


def agrees(found: Tensor, wanted: Tensor) -> bool:
    """Whether a result is near one in float32, or what that is rounded to where it is too large.

    Beside its own share each element may be off by that of the largest, if that is below 1.
    """
    tolerance, rounded = _TOLERANCES[found.dtype], wanted.to(found.dtype)
    largest = float(wanted[wanted.isfinite()].abs().max())
    wanted = torch.where(rounded.isfinite(), wanted, rounded.float())
    beside = tolerance * min(largest, 1.0)
    return torch.allclose(found.float(), wanted, tolerance, beside, equal_nan=True)


def moved(tensors: Sequence[Tensor]) -> int:
    """Bytes of memory that tensors are of."""
    return sum(one.numel() * one.element_size() for one in tensors)


def peers(case: Case, given: list[Tensor], names: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """What takes turns with MagJIT; Inductor is asked for code of its own for each case."""
    runs: dict[str, Callable[[], Any]] = {}
    for peer in names:
        function: Callable[..., Any] = case.function
        if peer != "eager":
            torch._dynamo.reset()
            function = torch.compile(another(function, peer), dynamic=peer == "dynamic")
        runs[peer] = lambda function=function: function(*given)  # type: ignore[misc]
    return runs


def fractions(runs: dict[str, Callable[[], Any]], work: int, turns: int) -> dict[str, float]:
    """Of the bandwidth of a copy that moves ``work`` bytes, which is what each run has to move."""
    source = torch.empty(work // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    taken = microseconds({"copy": lambda: target.copy_(source), **runs}, turns)
    return {one: taken["copy"] / taken[one] for one in runs}


def measure(
    benchmark: Benchmark, case: Case, dtype: torch.dtype, size: str, options: argparse.Namespace
) -> None:
    """Fractions of a copy's bandwidth, and host time where that is what counts."""
    given = case.make(_SIZES[size], dtype)
    name = f"gpu: {case.name}, {str(dtype).removeprefix('torch.')}, {size}"
    compiled = magjit.compile(case.function, backend="dvm")
    found, note = replayed(case, compiled, given)
    runs = {"magjit": lambda: compiled(*given), **peers(case, given, options.peers)}
    work = moved([*given, found])
    del found
    values = fractions(runs, work, options.turns)
    benchmark.add(Row.of(name, "fraction of copy bandwidth", "", values, note))
    if size == "100 KB":
        times = {one: host_times(run) for one, run in runs.items()}
        for share, text in ((0.5, "median"), (0.99, "99th percentile")):
            shown = {which: percentile(list_of, share) for which, list_of in times.items()}
            benchmark.add(Row.of(name, f"host time, {text}", "us", shown))


def host_times(run: Callable[[], Any]) -> list[float]:
    """Microseconds of each of many calls, none of which waits for the GPU."""
    for _ in range(20):
        run()
    times = []
    for number in range(_CALLS):
        if number % 100 == 0:
            torch.cuda.synchronize()
        times.append(host_time(run))
    return times


# -- what is run --


def part_gpu(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """All that is asked for, until time is up; a table of it so far is shown when a group ends."""
    until = time.monotonic() + options.seconds
    for dtype in options.dtypes:
        for size in options.sizes:
            for case in cases():
                if case.group not in options.programs:
                    continue
                if options.only and not any(text in case.name for text in options.only):
                    continue
                if options.widths and not {*case.name.split()} & {*map(str, options.widths)}:
                    continue
                if time.monotonic() > until:
                    print(f"time is up before {case.name}, {dtype}, {size}", file=sys.stderr)
                    return
                measure(benchmark, case, _DTYPES[dtype], size, options)


def chosen(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What to run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--programs", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES))
    parser.add_argument("--sizes", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument("--widths", nargs="+", type=int, help="only programs of these")
    parser.add_argument("--only", nargs="+", help="only programs whose names have one of these")
    parser.add_argument("--peers", nargs="*", choices=_PEERS, default=list(_PEERS))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after so long")
    return parser.parse_args(arguments)


def quick() -> argparse.Namespace:
    """The essentials."""
    return chosen(["--dtypes", "float16", "--sizes", "256 MB", "--peers", "eager"])


def run_alone(
    options: argparse.Namespace, part: Callable[[Benchmark, argparse.Namespace], None]
) -> int:
    """A part as a program of its own: its table, and the exit status."""
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    compile_without_limit()
    benchmark = Benchmark.start(options)
    part(benchmark, options)
    benchmark.finish()
    return int(any("magjit" in row.note for row in benchmark.rows))


def main(arguments: Sequence[str] | None = None) -> int:
    with torch.no_grad():
        return run_alone(chosen(arguments), part_gpu)


if __name__ == "__main__":
    sys.exit(main())
