"""Groups of operators around products, and whole models, for macro_kernels.py.

Times are of the device: the queue is full before a call begins, so that the host's time does not
count, and the second-level cache holds no operand. Peers take turns; medians over rounds.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import magjit
from agreement import differences
from harness import Benchmark, Row, no_collection

Call = Callable[[Any], Any]

DEVICE = "cuda"
GROUP_TOLERANCE, MODEL_TOLERANCE = (3e-2, 3e-2), (8e-2, 8e-2)
_FLUSHED = 96 * 2**20


# -- groups ---------------------------------------------------------------------------------------


class BiasGelu(nn.Module):
    """BERT-large's first feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x))


class BiasRelu(nn.Module):
    """OPT 1.3B's first feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2048, 8192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.up(x))


class Residual(nn.Module):
    """Llama 8B's output projection of attention, and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4096, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(x)
        return x + out


class SwiGLU(nn.Module):
    """Qwen 0.5B's gated feed-forward layer, up to the product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(896, 4864, bias=False)
        self.up = nn.Linear(896, 4864, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up: torch.Tensor = self.up(x)
        return F.silu(self.gate(x)) * up


class RotaryQKV(nn.Module):
    """Llama 8B's projections, queries and keys turned by their positions."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4096, 4096, bias=False)
        self.k = nn.Linear(4096, 1024, bias=False)
        self.v = nn.Linear(4096, 1024, bias=False)
        powers = torch.arange(0, 128, 2).float() / 128
        angles = torch.outer(torch.arange(16384).float(), 500000.0**-powers)
        turns = torch.cat([angles, angles], -1)
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        heads = x.view(rows, -1, 128)
        swapped = torch.cat([-heads[..., 64:], heads[..., :64]], -1)
        cos, sin = self.cos[:rows, None], self.sin[:rows, None]
        return heads * cos + swapped * sin

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.turned(self.q(x)), self.turned(self.k(x)), self.v(x)


class RowStatistics(nn.Module):
    """Scores of 8192 classes, with each row's greatest one and sum of exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(1024, 8192, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.classes(x)
        most = scores.amax(-1, keepdim=True)
        return scores, most, (scores - most).float().exp().sum(-1)


GROUPS: dict[str, tuple[type[nn.Module], int]] = {
    "bias, GELU": (BiasGelu, 1024),
    "bias, ReLU": (BiasRelu, 2048),
    "residual": (Residual, 4096),
    "SwiGLU": (SwiGLU, 896),
    "QKV, rotary": (RotaryQKV, 4096),
    "row statistics": (RowStatistics, 1024),
}
FAMILIES = ("linear_bias", "linear_gelu", "linear_relu", "linear_residual", "swiglu")
FAMILIES_OF_MODELS = ("linear_gelu_tanh", "linear_bias_residual")


# -- models ---------------------------------------------------------------------------------------


class Resized(nn.Module):
    """A vision transformer whose positions are resized to the image's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x, interpolate_pos_encoding=True).last_hidden_state


class Encoded(nn.Module):
    """A text encoder's last states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens).last_hidden_state


LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
MODELS = ("BERT-large", "ALBERT-large", "ViT-base")
SHAPES_OF_MODELS, IMAGES = 25, 32


def model_of(name: str) -> nn.Module:
    """A model at its published size, with random weights."""
    import transformers

    torch.manual_seed(0)
    if name == "BERT-large":
        config = transformers.BertConfig(**LARGE)
        return Encoded(transformers.BertModel(config, add_pooling_layer=False))
    if name == "ALBERT-large":
        config = transformers.AlbertConfig(**LARGE, embedding_size=128)
        return Encoded(transformers.AlbertModel(config, add_pooling_layer=False))
    vit = transformers.ViTModel(transformers.ViTConfig(), add_pooling_layer=False)
    return Resized(vit)


def inputs_of(name: str, seed: int, count: int) -> list[torch.Tensor]:
    """Batches of 32: sequences of 1 to 512 tokens, or images of 32 to 384 pixels a side."""
    chosen, found = random.Random(seed), []
    for _ in range(count):
        if name.startswith("ViT"):
            side = chosen.randint(32, 384)
            image = torch.randn(IMAGES, 3, side, side, device=DEVICE, dtype=torch.float16)
            found.append(image)
        else:
            found.append(torch.randint(0, 30000, (IMAGES, chosen.randint(1, 512)), device=DEVICE))
    return found


# -- measuring ------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[str]]:
    """The kernels that Triton is asked to compile meanwhile in this process, by name."""
    from triton import knobs

    found: list[str] = []

    def heard(*, src: Any, **_: Any) -> None:
        found.append(str(src.name))

    before, knobs.compilation.listener = knobs.compilation.listener, heard
    try:
        yield found
    finally:
        knobs.compilation.listener = before


@dataclass
class DeviceTimer:
    """Seconds of the device.

    Attributes:
        ahead_s: how long the device is kept busy while the host prepares a call.
    """

    ahead_s: float
    _cache: torch.Tensor = field(init=False)
    _cycles: int = field(init=False)

    def __post_init__(self) -> None:
        self._cache = torch.empty(_FLUSHED // 4, dtype=torch.int32, device="cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        torch.cuda._sleep(1000)
        begin.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        torch.cuda.synchronize()
        self._cycles = round(self.ahead_s * 10_000_000 / (begin.elapsed_time(end) * 1e-3))

    def medians(self, calls: dict[str, Call], value: Any, rounds: int) -> dict[str, float]:
        """Of each peer, in turns."""
        times: dict[str, list[Any]] = {name: [] for name in calls}
        names = list(calls)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
                self._cache.zero_()
                torch.cuda._sleep(self._cycles)
                begin.record()
                calls[name](value)
                end.record()
                torch.cuda.synchronize()
                times[name].append(begin.elapsed_time(end) * 1e-3)
        return {name: statistics.median(found) for name, found in times.items()}


def peers_of(model: nn.Module, peers: Sequence[str], mode: str | None) -> dict[str, Call]:
    """The model by MagJIT, in eager mode, and by torch.compile."""
    torch._dynamo.reset()
    ours = magjit.compile(model, backend="triton", dynamic=True, options={"matmul": "macro"})
    calls: dict[str, Call] = {"magjit": ours, "eager": model}
    if "torch.compile" in peers:
        calls["torch.compile"] = torch.compile(model, dynamic=True, mode=mode)
    return calls


def first_calls(
    calls: dict[str, Call], inputs: Sequence[Any], tolerance: tuple[float, float]
) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Each peer's seconds for all inputs and for the first two; what differs from eager mode.

    MagJIT's notes name also what was compiled after the second call.
    """
    totals, starts, notes = {}, {}, []
    for name, call in calls.items():
        with no_collection(), counted() as compiled:
            begin = time.perf_counter()
            for position, value in enumerate(inputs):
                call(value)
                if position == 1:
                    torch.cuda.synchronize()
                    starts[name] = time.perf_counter() - begin
                    compiled.clear()
            torch.cuda.synchronize()
            totals[name] = time.perf_counter() - begin
        if name == "magjit" and compiled:
            notes.append(f"magjit: compiled later: {', '.join(compiled)}")
        if name == "magjit":
            captures = magjit.stats(call).captures
            notes += [f"captures {captures}, compiled after call 2: {len(compiled)}"]
            notes += ["magjit: runs eagerly"] * (captures == 0)
    for value in inputs[:: max(1, len(inputs) // 5)]:
        expected = tree_leaves(calls["eager"](value))
        for name, call in calls.items():
            found = differences(expected, tree_leaves(call(value)), tolerance=tolerance)
            notes += [f"{name}: {text}" for text in found]
    return totals, starts, notes


def add_ratios(
    benchmark: Benchmark, case: str, times: Sequence[dict[str, float]], note: str
) -> None:
    """The sum of the times, and each peer's time over MagJIT's as a geometric mean."""
    names = list(times[0])
    sums = {name: 1e3 * sum(one[name] for one in times) for name in names}
    benchmark.add(Row.of(case, "kernel_ms", "ms", sums, note))
    for name in names:
        if name != "magjit":
            logarithms = [math.log(one[name] / one["magjit"]) for one in times]
            mean = math.exp(statistics.fmean(logarithms))
            note = f"least {math.exp(min(logarithms)):.3f}"
            benchmark.add(Row(case, f"speedup over {name}", "×", mean, note=note))


def measure_groups(
    benchmark: Benchmark, names: Sequence[str], dtype: str, peers: Sequence[str], count: int
) -> None:
    """Every group on random numbers of rows; the first one is one that suits all."""
    timer = DeviceTimer(4e-4)
    every = []
    numbers = random.Random(7)
    rows = [2048, 1024, *(max(2, round(16384 ** numbers.random())) for _ in range(count - 2))]
    for name in names:
        make, width = GROUPS[name]
        torch.manual_seed(0)
        kind: torch.dtype = getattr(torch, dtype)
        model = make().to(DEVICE, kind).eval()
        inputs = [torch.randn(m, width, device=DEVICE, dtype=kind) for m in rows]
        calls = peers_of(model, peers, "max-autotune-no-cudagraphs")
        totals, _, notes = first_calls(calls, inputs, GROUP_TOLERANCE)
        times = [timer.medians(calls, value, 7) for value in inputs]
        every += times
        add_ratios(benchmark, f"{name}, {dtype}", times, "; ".join(notes))
        benchmark.add(Row.of(f"{name}, {dtype}", "total_s", "s", totals))
        benchmark.write()
    if len(names) == len(GROUPS):
        add_ratios(benchmark, f"all groups, {dtype}", every, "")


def measure_models(
    benchmark: Benchmark, names: Sequence[str], peers: Sequence[str], count: int
) -> None:
    """Every model on random shapes, in float16."""
    timer = DeviceTimer(1.2e-2)
    for name in names:
        model = model_of(name).to(DEVICE, torch.float16).eval()
        inputs = inputs_of(name, 11, count)
        calls = peers_of(model, peers, None)
        totals, starts, notes = first_calls(calls, inputs, MODEL_TOLERANCE)
        times = [timer.medians(calls, value, 3) for value in inputs]
        add_ratios(benchmark, name, times, "; ".join(notes))
        benchmark.add(Row.of(name, "total_s", "s", totals))
        benchmark.add(Row.of(name, "first_calls_s", "s", starts, "the first two calls"))
        benchmark.write()
