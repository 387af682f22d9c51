"""Convolutional networks in training on a GPU: dvm beside torch.compile (Inductor) and eager mode.

    python benchmarks/dvm_gpu_training.py --json benchmarks/results/dvm_gpu_training.json

forward_us   a batch norm in training, with running statistics, and its ReLU
step_us      the same and its gradients
step_ms      forward and backward of a ResNet-50 and a U-Net in float16 autocast, by batch size
call_ms      a ResNet-50 in float16, without gradients

Norms behind a full queue, with the cache flushed; networks until the GPU is done.  Medians of
turns; Inductor compiles for these sizes alone, not counted; `eager-last` is eager mode with model
and images in channels-last memory.  Results and gradients of norms are compared with eager's, of
networks the losses over three steps of SGD, or the results.
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
from dvm_networks import UNet
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
LAST = "eager-last"
TURNS = 15
CHECKED = 3
TOLERANCE = {torch.float16: (1e-2, 1e-2), torch.bfloat16: (6e-2, 6e-2), torch.float32: (1e-5, 1e-5)}


def compiled(model: nn.Module, name: str) -> Callable[..., Tensor]:
    if name in ("eager", LAST):
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


# -- networks --


def resnet() -> nn.Module:
    return ResNet((3, 4, 6, 3))


def unet() -> nn.Module:
    return UNet(64, 4)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "ResNet-50": (resnet, 224, (4, 32, 128)),
    "U-Net": (unet, 256, (8,)),
}
"""What makes each, the images' side, and how many of them."""


def made(network: str, name: str) -> nn.Module:
    """A contestant's copy of a network."""
    torch.manual_seed(0)
    model = NETWORKS[network][0]().cuda()
    return model.to(memory_format=torch.channels_last) if name == LAST else model  # type: ignore[call-overload]


def images(network: str, batch: int, name: str) -> Tensor:
    torch.manual_seed(1)
    side = NETWORKS[network][1]
    x = torch.randn(batch, 3, side, side, device="cuda")
    return x.contiguous(memory_format=torch.channels_last) if name == LAST else x


def loss_of(results: Tensor) -> Tensor:
    """Of classes, or of numbers for each pixel."""
    if results.dim() == 2:
        wanted = torch.arange(len(results), device="cuda") % 10
        return F.cross_entropy(results, wanted)
    return results.float().square().mean()


def measure_training(benchmark: Benchmark, network: str, batch: int, peers: Sequence[str]) -> None:
    runs: dict[str, Callable[[Tensor], object]] = {}
    losses: dict[str, list[float]] = {}
    for name in ("magjit", *peers):
        model = made(network, name).train()
        x = images(network, batch, name)
        call = compiled(model, name)

        def step(
            _: Tensor,
            call: Callable[..., Tensor] = call,
            model: nn.Module = model,
            x: Tensor = x,
        ) -> Tensor:
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(call(x))
            loss.backward()
            return loss

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses[name] = []
        for _ in range(CHECKED):
            losses[name].append(step(x).item())
            optimizer.step()
        runs[name] = step
    pairs = zip(losses["eager"], losses["magjit"], strict=True)
    apart = max(abs(ours - theirs) / abs(theirs) for theirs, ours in pairs)
    note = "" if apart < 2e-2 else f"magjit: losses are {apart:.2g} apart"
    found = steady(runs, [images(network, batch, "eager")])
    benchmark.add(Row.of(f"{network}, training, {batch} images", "step_ms", "ms", found, note))


def measure_inference(benchmark: Benchmark, batch: int, peers: Sequence[str]) -> None:
    runs: dict[str, Callable[[Tensor], Tensor]] = {}
    for name in ("magjit", *peers):
        model = made("ResNet-50", name).eval().half()
        call, x = compiled(model, name), images("ResNet-50", batch, name).half()

        def run(_: Tensor, call: Callable[..., Tensor] = call, x: Tensor = x) -> Tensor:
            with torch.no_grad():
                return call(x)

        runs[name] = run
    x = images("ResNet-50", batch, "eager")
    results = {name: [run(x) for _ in range(CHECKED)][-1] for name, run in runs.items()}
    apart = differences(results["eager"], results["magjit"], tolerance=TOLERANCE[torch.float16])
    note = "; ".join(f"magjit: {one}" for one in islice(apart, 2))
    case = f"ResNet-50, float16, {batch} image{'s' * (batch > 1)}"
    benchmark.add(Row.of(case, "call_ms", "ms", steady(runs, [x]), note))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    peers = ["eager", LAST, "inductor"]
    parser.add_argument("--peers", nargs="*", default=peers, help="beside dvm")
    parser.add_argument("--networks", nargs="*", default=[*NETWORKS], help="ResNet-50, U-Net")
    parser.add_argument("--batches", nargs="*", type=int, help="of networks in training")
    parser.add_argument("--inference", nargs="*", type=int, default=(1, 32), help="images")
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
            alike = [one for one in options.peers if one != LAST]
            measure_norm(benchmark, shape, getattr(torch, name), alike)
            benchmark.write(quiet=True)
    for network in options.networks:
        for batch in options.batches or NETWORKS[network][2]:
            torch._dynamo.reset()
            measure_training(benchmark, network, batch, options.peers)
            benchmark.write(quiet=True)
    for batch in options.inference:
        torch._dynamo.reset()
        measure_inference(benchmark, batch, options.peers)
        benchmark.write(quiet=True)
    benchmark.finish()
    return int(any("magjit" in row.note for row in benchmark.rows))


if __name__ == "__main__":
    sys.exit(main())
