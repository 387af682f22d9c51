"""Convolutional networks in training on a GPU: dvm beside torch.compile (Inductor) and eager mode.

    python benchmarks/dvm_gpu_training.py --json benchmarks/results/dvm_gpu_training.json

forward_us   a batch norm in training, with running statistics, and its ReLU
step_us      the same and its gradients
step_ms      forward and backward of a ResNet-50 in float16 autocast, by batch size

Norms behind a full queue, with the cache flushed; the network until the GPU is done.  Medians of
turns; Inductor compiles for these sizes alone, not counted.  Results and gradients of norms are
compared with eager's, of the network the losses over three steps of SGD.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import magjit
from agreement import differences
from compilers import compile_without_limit
from dvm_gpu import microseconds
from dvm_gpu_models import steady
from harness import Benchmark, Row, argument_parser
from models import ResNet

IMAGES = (
    (32, 64, 112, 112),
    (128, 64, 56, 56),
    (32, 256, 56, 56),
    (128, 256, 56, 56),
    (128, 512, 28, 28),
    (32, 512, 28, 28),
    (128, 1024, 14, 14),
    (128, 2048, 7, 7),
)
BATCHES = (4, 32, 128)
TURNS = 15
CHECKED = 3
TOLERANCE = {torch.float16: (1e-2, 1e-2), torch.bfloat16: (6e-2, 6e-2), torch.float32: (1e-5, 1e-5)}


def compiled(model: nn.Module, name: str) -> Callable[..., Tensor]:
    if name == "eager":
        return model
    if name == "magjit":
        made: Callable[..., Tensor] = magjit.compile(model, backend="dvm")
        return made
    return torch.compile(model, dynamic=False)


# -- batch norms --


def norm(channels: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU()).cuda().train()


def measure_norm(
    benchmark: Benchmark, shape: tuple[int, ...], dtype: torch.dtype, peers: Sequence[str]
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, device="cuda") * 2 + 1).to(dtype)
    dy = torch.randn_like(x)
    forward: dict[str, Callable[[], object]] = {}
    step: dict[str, Callable[[], object]] = {}
    results: dict[str, list[Tensor]] = {}
    for name in ("magjit", *peers):
        model = norm(shape[1])
        call = compiled(model, name)
        given = x.clone().requires_grad_()

        def forwards(call: Callable[..., Tensor] = call) -> None:
            with torch.no_grad():
                call(x)

        def steps(call: Callable[..., Tensor] = call, given: Tensor = given) -> Tensor:
            given.grad = None
            result = call(given)
            result.backward(dy)
            return result

        for _ in range(CHECKED):
            forwards()
            result = steps()
        assert given.grad is not None
        results[name] = [result.detach(), given.grad, *model.buffers()]
        forward[name], step[name] = forwards, steps
    apart = differences(results["eager"], results["magjit"], tolerance=TOLERANCE[dtype])
    note = "; ".join(f"magjit: {one}" for one in islice(apart, 2))
    case = f"batch norm, ReLU: {' x '.join(map(str, shape))} {str(dtype)[6:]}"
    for metric, runs in (("forward_us", forward), ("step_us", step)):
        benchmark.add(Row.of(case, metric, "us", microseconds(runs, TURNS), note))


# -- a network --


def measure_network(benchmark: Benchmark, batch: int, peers: Sequence[str]) -> None:
    runs: dict[str, Callable[[Tensor], object]] = {}
    losses: dict[str, list[float]] = {}
    for name in ("magjit", *peers):
        torch.manual_seed(0)
        model = ResNet((3, 4, 6, 3)).cuda().train()
        images = torch.randn(batch, 3, 224, 224, device="cuda")
        wanted = torch.arange(batch, device="cuda") % 10
        call = compiled(model, name)

        def step(
            x: Tensor,
            call: Callable[..., Tensor] = call,
            model: nn.Module = model,
            wanted: Tensor = wanted,
        ) -> Tensor:
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(call(x), wanted)
            loss.backward()
            return loss

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses[name] = []
        for _ in range(CHECKED):
            losses[name].append(step(images).item())
            optimizer.step()
        runs[name] = step
    pairs = zip(losses["eager"], losses["magjit"], strict=True)
    apart = max(abs(ours - theirs) / abs(theirs) for theirs, ours in pairs)
    note = "" if apart < 2e-2 else f"magjit: losses are {apart:.2g} apart"
    found = steady(runs, [images])
    benchmark.add(Row.of(f"ResNet-50, training, {batch} images", "step_ms", "ms", found, note))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--peers", nargs="*", default=["eager", "inductor"], help="beside dvm")
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES, help="of the network")
    parser.add_argument("--dtypes", nargs="*", default=["float16", "bfloat16"], help="of norms")
    options: argparse.Namespace = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 2
    os.environ["MAGJIT_DVM_WAIT"] = "1"  # kernels are compiled before what is measured
    benchmark = Benchmark.start(options)
    compile_without_limit()
    torch.backends.cudnn.benchmark = True
    for name in options.dtypes:
        for shape in IMAGES:
            measure_norm(benchmark, shape, getattr(torch, name), options.peers)
            benchmark.write(quiet=True)
    for batch in options.batches:
        torch._dynamo.reset()
        measure_network(benchmark, batch, options.peers)
        benchmark.write(quiet=True)
    benchmark.finish()
    return int(any("magjit" in row.note for row in benchmark.rows))


if __name__ == "__main__":
    sys.exit(main())
