"""Whole models, inference and training: the triton backend beside eager and torch.compile.

BERT, ResNet-101, DenseNet-121, a vision transformer and Llama layers, each compiled anew and
compared with eager before all take turns. Training is forward and backward, without an optimizer.

call_ms        median of a call, or of forward and backward; of the device where it is a GPU
compile_s      from `compile` to the end of the second call; of torch.compile without caches
apart          largest difference of results, or of gradients, from eager's, relative to the largest
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import magjit
from compilers import disable_caches
from dvm_networks import VisionTransformer
from harness import Benchmark, Row, Task, argument_parser
from models import MODELS as EXAMPLES
from virtual_tensors import ROUNDS, synchronize, times_of

Example = tuple[nn.Module, tuple[Any, ...]]

COMPILERS = ("eager", "magjit", "torch.compile")
MODES = ("default", "reduce-overhead")
# Parts of a whole, not of each element: small gradients are sums of large ones.
TOLERANCE = {"cpu": 2e-3, "cuda": 2e-2}


# -- models ---------------------------------------------------------------------------------------


def vision(size: str) -> Example:
    if size == "full":
        return VisionTransformer(224, 16, 768, 12, 12), (torch.randn(1, 3, 224, 224),)
    return VisionTransformer(32, 8, 64, 4, 4), (torch.randn(1, 3, 32, 32),)


def llama(size: str) -> Example:
    """A decoder with grouped queries, its widths Llama-3.2-1B's, of random weights."""
    import transformers

    widths = (2048, 4, 32, 8, 8192, 512) if size == "full" else (64, 2, 4, 2, 176, 32)
    hidden, layers, heads, groups, inner, length = widths
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        use_cache=False,
    )
    return transformers.LlamaModel(config), (torch.randint(0, 1000, (1, length)),)


MODELS: dict[str, Callable[[Any], Example]] = {
    "BERT": EXAMPLES["BERT"],
    "ResNet-101": EXAMPLES["ResNet-101"],
    "DenseNet-121": EXAMPLES["DenseNet-121"],
    "ViT": vision,
    "Llama": llama,
}


def built(name: str, size: str, batch: int, device: str) -> Example:
    """A model of always the same weights, and the arguments of a call."""
    torch.manual_seed(0)
    model, arguments = MODELS[name](size)

    def repeated(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        parts = [value.roll(turn, -1) for turn in range(batch)]
        return torch.cat(parts).to(device)

    return model.to(device), tree_map(repeated, arguments)


def tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a result."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
        return
    items = output if isinstance(output, list | tuple) else vars(output).values()
    for one in output.values() if isinstance(output, dict) else items:
        if one is not None and not isinstance(one, str | int | float):
            yield from tensors(one)


# -- one contestant -------------------------------------------------------------------------------


@dataclass(slots=True)
class Contestant:
    """A model as one compiler has it.

    Attributes:
        step: a call; in training its backward, too.
        found: results, or gradients, after the last call.
    """

    step: Task
    found: Callable[[], list[Tensor]]
    compile_s: float


def contestant(compiler: str, mode: str, training: bool, example: Example) -> Contestant:
    """A model compiled anew and called twice."""
    original, arguments = example
    model = copy.deepcopy(original).train(training)
    for module in model.modules():  # Dropout draws other numbers under torch.compile.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    start = time.perf_counter()
    call: Callable[..., Any] = model
    if compiler == "magjit":
        call = magjit.compile(model, backend="triton", mode=mode)
    elif compiler == "torch.compile":
        call = torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)
    results: list[Tensor] = []

    def infer() -> None:
        with torch.no_grad():
            results[:] = tensors(call(*arguments))

    def train() -> None:
        model.zero_grad()
        parts = [one for one in tensors(call(*arguments)) if one.requires_grad]
        torch.stack([one.float().square().mean() for one in parts]).sum().backward()

    def gradients() -> list[Tensor]:
        return [one.grad for one in model.parameters() if one.grad is not None]

    step = train if training else infer
    for _ in range(2):
        step()
    synchronize(arguments[0].device.type)
    taken = time.perf_counter() - start
    return Contestant(step, gradients if training else lambda: results, taken)


def apart(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference relative to the largest number; infinite where they do not match."""
    if len(ones) != len(others) or not ones:
        return float("inf")
    worst = 0.0
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape:
            return float("inf")
        largest = max(float(other.abs().max()), 1e-3)
        worst = max(worst, float((one - other).abs().max()) / largest)
    return worst


def measure(
    benchmark: Benchmark, name: str, training: bool, batch: int, options: argparse.Namespace
) -> None:
    """The rows of one model."""
    device: str = options.device
    example = built(name, options.size, batch, device)
    found: dict[str, Contestant] = {}
    notes: list[str] = []
    torch._dynamo.reset()  # once: it would drop the modes before, too
    for compiler in COMPILERS:
        for mode in ("default",) if compiler == "eager" else options.modes:
            key = compiler if compiler == "eager" else f"{compiler} {mode}"
            try:
                found[key] = contestant(compiler, mode, training, example)
            except Exception as error:
                notes.append(f"{key}: {type(error).__name__}: {str(error)[:200]}")
    expected = [one.detach().clone() for one in found["eager"].found()]
    distance: dict[str, float] = {}
    for key, one in found.items():
        one.step()
        distance[key] = apart([part.detach() for part in one.found()], expected)
        if not distance[key] <= TOLERANCE[device]:
            notes.append(f"{key}: not eager's results")
    times = times_of({key: one.step for key, one in found.items()}, device, options.rounds)
    add_rows(
        benchmark,
        f"{name}, {'training' if training else 'inference'}, batch {batch}",
        times,
        {key: one.compile_s for key, one in found.items()},
        distance,
        notes,
    )


def add_rows(
    benchmark: Benchmark,
    case: str,
    times: Mapping[str, float],
    compile_s: Mapping[str, float],
    distance: Mapping[str, float],
    notes: Sequence[str],
) -> None:
    """Rows of each compiler's best mode."""
    best: dict[str, str] = {}
    for compiler in COMPILERS:
        modes = [key for key in times if key.partition(" ")[0] == compiler]
        if modes:
            best[compiler] = min(modes, key=times.__getitem__)
    chosen = ", ".join(key for key in best.values() if key != "eager")
    note = "; ".join([chosen, *notes])

    def values(of: Mapping[str, float]) -> dict[str, float]:
        return {compiler: of[key] for compiler, key in best.items()}

    benchmark.add(Row.of(case, "call_ms", "ms", values(times), note))
    compiled = {name: one for name, one in values(compile_s).items() if name != "eager"}
    benchmark.add(Row.of(case, "compile_s", "s", compiled))
    benchmark.add(Row.of(case, "apart", "relative", values(distance)))


# -- the whole ------------------------------------------------------------------------------------


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=available)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--parts", nargs="+", choices=("inference", "training"))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--size", choices=("small", "full"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    options.modes = options.modes or list(MODES if options.device == "cuda" else MODES[:1])
    options.size = options.size or ("full" if options.device == "cuda" else "small")
    options.parts = options.parts or ["inference", "training"]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the models; 1 when something of MagJIT's failed or was not eager's."""
    options = parsed(arguments)
    disable_caches()
    benchmark = Benchmark.start(options)
    for name in options.models:
        for part in options.parts:
            for batch in options.batches:
                benchmark.console.print(f"{name}, {part}, batch {batch} …")
                measure(benchmark, name, part == "training", batch, options)
                benchmark.write()
                magjit.reset()
    benchmark.finish()
    sys.stdout.flush()
    return int(any("magjit default: " in row.note for row in benchmark.rows))


if __name__ == "__main__":
    raise SystemExit(main())
