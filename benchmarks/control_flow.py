"""Programs whose control flow depends on data, beside torch.compile of the whole and of a part.

LSTM       ten layers written as Python loops, hidden 256, over sequences of changing length
BlockDrop  a residual network that skips blocks where a policy network says so
decoding   greedy decoding with a cache that grows; stops at an end token

With the backend `dvm`, which is MagJIT's own, the peers have Inductor. A mode after a comma is
everybody's.

Each compiler runs in a process of its own that has compiled another function before; the order
alternates. `cell` is torch.compile of the part that is repeated: the cell, the block, the layer.
Every result is compared with eager's.

captures              runs of the front end that made a graph
control_flow_total_s  seconds of all calls, first calls included
control_flow_ms       median over the calls, once all have been seen
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import magjit
from agreement import differences
from compilers import compile_without_limit, disable_caches, warm_up
from harness import Benchmark, add_medians, argument_parser, measured_within, run_cases

CALLS = 20
ROUNDS = 1
WARM_UP = (3, 5, 4)
"""Lengths of another function's input, compiled before: lengths change here, too."""
TOLERANCE = (2e-3, 2e-3)
COMPILERS = ("magjit", "torch.compile", "cell", "eager")
BACKENDS = ("eager", "inductor", "dvm", "dvm, reduce-overhead")


class Cell(nn.Module):
    """An LSTM cell in basic operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        i, f, g, o = (self.given(x) + self.kept(h)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class LoopedLSTM(nn.Module):
    """Layers and time steps as loops."""

    def __init__(self, width: int = 256, layers: int = 10) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Cell(width) for _ in range(layers))
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = x.new_zeros(x.shape[1], self.width)
        h, c = [zeros] * len(self.parts), [zeros] * len(self.parts)
        y = zeros
        for t in range(x.shape[0]):
            y = x[t]
            for k, cell in enumerate(self.parts):
                h[k], c[k] = cell(y, h[k], c[k])
                y = h[k]
        return y


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](self.first(x)).relu()
        kept: torch.Tensor = (x + self.norms[1](self.second(y))).relu()
        return kept


class BlockDrop(nn.Module):
    """Wu et al., "BlockDrop: Dynamic Inference Paths in Residual Networks"."""

    def __init__(self, channels: int = 32, depth: int = 18) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.policy = nn.Linear(3, depth)
        self.parts = nn.ModuleList(Block(channels) for _ in range(depth))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = self.policy(x.mean((2, 3)) * 50).mean(0) > 0
        y = self.stem(x)
        for k, block in enumerate(self.parts):
            if keep[k]:
                y = block(y)
        scores: torch.Tensor = self.head(y.mean((2, 3)))
        return scores


class Layer(nn.Module):
    """Attention over what was kept so far, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.heads = heads

    def forward(
        self, x: torch.Tensor, kept: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        batch, length, width = x.shape
        mixed = self.project(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=kept is None)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x)))), (k, v)


class Decoder(nn.Module):
    """Greedy decoding, as a user would write it."""

    def __init__(self, width: int = 128, depth: int = 4, words: int = 100) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(256, width)
        self.parts = nn.ModuleList(Layer(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, words)
        self.most = 24

    def forward(self, prompt: torch.Tensor) -> list[int]:
        tokens: list[int] = []
        kept: list[Any] = [None] * len(self.parts)
        given, place = prompt, 0
        while len(tokens) < self.most:
            places = torch.arange(place, place + given.shape[1], device=given.device)
            x = self.words(given) + self.places(places)
            place += given.shape[1]
            for k, layer in enumerate(self.parts):
                x, kept[k] = layer(x, kept[k])
            best = self.head(x[:, -1]).argmax(-1)
            token = int(best.item())
            if token == 0:
                break
            tokens.append(token)
            given = best[:, None]
        return tokens


def lstm_inputs(chosen: random.Random) -> torch.Tensor:
    return torch.randn(chosen.randint(8, 24), 4, 256)


def image_inputs(chosen: random.Random) -> torch.Tensor:
    return torch.randn(1, 3, 16, 16) + torch.randn(1, 3, 1, 1)


def prompt_inputs(chosen: random.Random) -> torch.Tensor:
    return torch.randint(1, 100, (1, 7))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[random.Random], torch.Tensor]]] = {
    "LSTM": (LoopedLSTM, lstm_inputs),
    "BlockDrop": (BlockDrop, image_inputs),
    "decoding": (Decoder, prompt_inputs),
}


def compiled_by(compiler: str, model: Any, backend: str, mode: str | None) -> Callable[..., Any]:
    """The model as a compiler has it; ``cell`` compiles its parts."""
    if compiler == "cell":
        for k, part in enumerate(model.parts):
            model.parts[k] = torch.compile(part, backend=backend, mode=mode)
    if compiler in ("cell", "eager"):
        same: Callable[..., Any] = model
        return same
    whole: Callable[..., Any] = magjit.compile if compiler == "magjit" else torch.compile
    compiled: Callable[..., Any] = whole(model, backend=backend, mode=mode)
    return compiled


def timed(call: Callable[..., Any], given: torch.Tensor) -> tuple[Any, float]:
    """The result and its seconds; what a CUDA graph has made before may be written over."""
    torch.compiler.cudagraph_mark_step_begin()
    start = time.perf_counter()
    result = call(given)
    if given.device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def measure(compiler: str, backend: str, mode: str, name: str, device: str) -> dict[str, Any]:
    """All metrics of one compiler; for a process that has compiled nothing yet."""
    torch.manual_seed(0)
    make, make_input = CASES[name]
    model = make().eval().to(device)
    chosen = random.Random(1)
    calls = [make_input(chosen).to(device) for _ in range(CALLS)]
    expected = [model(call) for call in calls]
    own = "magjit" if compiler == "magjit" else "torch.compile"
    warm_up(own, backend, device, mode=mode or None, sizes=WARM_UP)
    compiled = compiled_by(compiler, model, backend, mode or None)
    notes, taken = [], []
    for position, (call, wanted) in enumerate(zip(calls, expected, strict=True)):
        result, spent = timed(compiled, call)
        taken.append(spent)
        if isinstance(wanted, list):
            notes += [f"call {position}: other tokens"] if result != wanted else []
        else:
            found = differences(wanted, result, tolerance=TOLERANCE)
            notes += [f"call {position}: {difference}" for difference in found]
    runs = [statistics.median(timed(compiled, call)[1] for call in calls) for _ in range(3)]
    made = {
        "control_flow_total_s": sum(taken),
        "control_flow_ms": statistics.median(runs) * 1e3,
        "notes": notes[:3],
    }
    if compiler == "magjit":
        made["captures"] = magjit.stats(compiled).captures
    return made


def measure_case(benchmark: Benchmark, name: str, backend: str, options: Any) -> None:
    """One row a metric, medians over rounds."""
    found: dict[str, list[dict[str, Any]]] = {compiler: [] for compiler in COMPILERS}
    own, _, mode = backend.partition(", ")
    for turn in range(options.rounds):
        turned = COMPILERS[turn % 4 :] + COMPILERS[: turn % 4]
        for compiler in turned:
            given = "inductor" if own == "dvm" and compiler != "magjit" else own
            arguments = (compiler, given, mode, name, options.device)
            run = measured_within(options.seconds, __file__, "--one", *arguments)
            found[compiler].append(run)
    metrics = (
        ("captures", "count"),
        ("control_flow_total_s", "s"),
        ("control_flow_ms", "ms"),
    )
    add_medians(benchmark, f"{name}, {backend}", found, metrics, "control_flow_total_s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all measurements, or, as a child, one of them."""
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=["eager", "inductor"], metavar="NAME"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, help="what one compiler may take for a case")
    parser.add_argument("--one", nargs=5, metavar="ARG", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)
    disable_caches()
    compile_without_limit()
    with torch.no_grad():
        if options.one:
            json.dump(measure(*options.one), sys.stdout)
            return
        run_cases(options, options.cases, measure_case)


if __name__ == "__main__":
    main()
