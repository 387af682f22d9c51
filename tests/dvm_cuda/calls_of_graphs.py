"""Graphs of a GPU's, whole: the schedule's calls, each launch run by the simulator as it is made.

Run as a program with the path of the driver, as ``calls_in_steps.py``.  What is ATen's runs on the
CPU.  No group may go operator by operator.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import magjit_dvm.cuda.launch as launching
from magjit.plugin.writes import write_early, write_late
from magjit_dvm import batch_norms
from magjit_dvm.cuda.simulate import run_image
from magjit_dvm.fuser import fuse
from magjit_dvm.lowering import decompositions
from magjit_dvm.schedule import Schedule
from magjit_dvm.simplify import simplify
from tests.dvm_cuda.calls_in_steps import (
    add_memory,
    between,
    call_anew,
    each_launch,
    given,
    kept_image,
    launches,
)
from tests.dvm_cuda.calls_of_stacks import images
from tests.dvm_cuda.with_driver import KEPT, OnCpu, run_all

aten = torch.ops.aten
_OF_STACKS = 4000


def _launched() -> None:
    """Run what the driver has kept: one image, or those of a stack."""
    found = images() if KEPT[1] >= _OF_STACKS else [(kept_image(), KEPT[2])]
    launches.append((len(found), KEPT[2]))
    for image, blocks in found:
        add_memory(image)
        run_image(image, KEPT[1] % 1000, KEPT[4], given, list(between.values()), blocks)


run_launched = ctypes.CFUNCTYPE(None)(_launched)


def schedule_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Schedule:
    """What is made of a function of fake tensors, traced on the CPU, as if it were on a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph: GraphModule = make_fx(function)(*map(torch.empty, shapes))
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        graph.recompile()
        on_gpu = (torch.empty(shape, device="cuda") for shape in shapes)
        graph = make_fx(graph, decompositions())(*on_gpu)
    graph.graph.eliminate_dead_code()
    simplify(graph.graph)
    write_late(graph.graph, fusing=True)
    write_early(graph.graph, fusing=True)
    return Schedule(graph, fuse(graph.graph))


def check(
    function: Callable[..., Any], *shapes: tuple[int, ...], launched: int = 0, images: int = 0
) -> None:
    """The third call of a graph, and how many launches it has, or images: small ones share them."""
    schedule = schedule_of(function, *shapes)
    for name, fused in schedule.programs():
        assert isinstance(fused, OnCpu), name
        assert fused.home == 0
    torch.manual_seed(0)
    arguments = [torch.randn(shape) for shape in shapes]
    with each_launch(run_launched):
        for _ in range(3):
            found = call_anew(schedule.call, arguments)
    assert launched in (0, len(launches)), launches
    assert images in (0, sum(of_launch for of_launch, _ in launches)), launches
    for made, wanted in zip(found, function(*arguments), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)


def reordered(x: torch.Tensor) -> Any:
    return (torch.cat([x[..., k::2, m::2] for m in range(2) for k in range(2)], 1),)


def beside_places(x: torch.Tensor) -> Any:
    """Where each pixel is: of no tensor."""
    batch, _, height, width = x.shape
    rows = torch.arange(height, device=x.device, dtype=x.dtype).view(1, 1, -1, 1) / height
    columns = torch.arange(width, device=x.device, dtype=x.dtype).view(1, 1, 1, -1) / width
    places = [one.expand(batch, 1, height, width) * 2 - 1 for one in (rows, columns)]
    return (torch.cat([x * 2, *places], 1),)


def test_parts_that_nobody_computes() -> None:
    """They are copied by groups without nodes, which are the GPU's all the same."""
    for shape in ((4, 4, 4, 4), (2, 8, 16, 16)):
        check(reordered, shape, launched=2)
        check(beside_places, shape, launched=2)
    for function in (
        lambda x: (torch.cat([x, x * 2], 1),),
        lambda x: (torch.cat([x * 2, x], 1),),
        lambda x: (torch.stack([x, x.exp(), x[:1].expand(x.shape)], 0),),
    ):
        check(function, (3, 5, 7, 9), launched=1)


def test_images_in_other_sizes() -> None:
    """Positions are computed on the GPU, from nothing but sizes."""

    def nearest(x: torch.Tensor) -> Any:
        y = F.adaptive_avg_pool2d(x, 4)
        return (torch.cat([F.interpolate(y, size=(8, 8), mode="nearest") + 1, x], 1),)

    pools = torch.__version__ >= "2.12"  # in another launch: before, torch takes pooling apart
    check(nearest, (2, 3, 8, 8), launched=1 + pools)


def test_batch_norms() -> None:
    def normed(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        norm = aten._native_batch_norm_legit_functional.default
        out, *others = norm(x, *rest, True, 0.1, 1e-5)
        return torch.cat([out.relu(), x], 1), *others

    for shape in ((4, 6, 5, 5), (5, 3, 70, 90)):
        check(normed, shape, *[shape[1:2]] * 4, launched=1)


in_parts = mock.patch.multiple(batch_norms, _ONE_LAUNCH=0, _LONG=0, LEAST_IMAGE=17)
"""Batch norms as if all were of many images, each of many elements."""


@in_parts
def test_batch_norms_in_parts() -> None:
    """Means of images, then of channels, then what is elementwise."""

    def normed(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        norm = aten._native_batch_norm_legit_functional.default
        out, *others = norm(x * 2, *rest, True, 0.1, 1e-5)
        return out.relu(), *others

    for shape in ((4, 6, 5, 8), (3, 5, 9, 7), (40, 3, 33), (2, 3, 2, 5, 6)):
        check(normed, shape, *[shape[1:2]] * 4, images=3)


@in_parts
def test_gradients_of_batch_norms_in_parts() -> None:
    def gradients(dy: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        weight, mean, root = rest
        backward = aten.native_batch_norm_backward.default
        passed = aten.threshold_backward.default(dy, x, 0)
        kept = mean, root, True, 1e-5, [True] * 3
        return backward(passed, x, weight, None, None, *kept)

    def of_bias(dy: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        kept = *rest, True, 1e-5, [True, False, True]
        dx, _, bias = aten.native_batch_norm_backward.default(dy, x, None, None, None, *kept)
        return dx, bias

    for shape in ((4, 6, 5, 8), (3, 5, 9, 7), (40, 3, 33)):
        check(gradients, shape, shape, *[shape[1:2]] * 3, images=3)
        check(of_bias, shape, shape, *[shape[1:2]] * 2, images=5)


def check_writes(
    schedule: Schedule, function: Callable[..., Any], *shapes: tuple[int, ...], written: int
) -> None:
    """Calls after one another leave results and inputs as the function does."""
    mine = list(map(torch.randn, shapes))
    theirs = [one.clone() for one in mine]
    with each_launch(run_launched):
        for _ in range(3):
            found, wanted = call_anew(schedule.call, mine, written), function(*theirs)
            torch.testing.assert_close(tuple(found), wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_inputs_that_are_written_in_part() -> None:
    """What waits to be launched with others reads old values before they are gone."""

    def cached(w: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Any:
        old, others = w.relu(), [one.exp() for one in w.unbind(0)]
        part = w.narrow(1, 2, x.shape[1]) + x
        new = aten.slice_scatter.default(w, part, 1, 2, 2 + x.shape[1])
        read = new.sin()
        kept = aten.select_scatter.default(v, x.sum(1) + v.select(1, 1), 1, 1)
        w.copy_(new)
        v.copy_(kept)
        return old + read, others[0] + read[0], read * torch.stack(others)

    for shape in ((4, 6, 8), (3, 40, 7)):
        part = shape[0], 3, shape[2]
        schedule = schedule_of(cached, shape, shape, part)
        assert "scatter" not in schedule.source
        check_writes(schedule, cached, shape, shape, part, written=2)


def test_inputs_that_are_stored_in() -> None:
    """In launches with others, but not with what reads what was there, nor with another's part."""

    def kept(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
        old = a.t().exp()
        more = a.mul(0.9).add(x)
        part = b.slice_scatter(x.narrow(1, 0, 3) * 2, 1, 0, 3)
        parts = part.slice_scatter(x.narrow(1, 2, 3).sin(), 1, 2, 5)
        found = old.t() * x.cos()
        a.copy_(more)
        b.copy_(parts)
        return found, x.relu()

    for shape in ((5, 8), (300, 290)):
        schedule = schedule_of(kept, shape, shape, shape)
        assert sum(len(group.stores) for group in schedule.fusion.groups) == 3
        assert "copy_" not in schedule.source and "run_stacked" in schedule.source
        check_writes(schedule, kept, shape, shape, shape, written=2)


if __name__ == "__main__":
    with (
        mock.patch.object(launching, "DeviceFused", OnCpu),
        mock.patch.dict(os.environ, MAGJIT_DVM_CUDA="1"),
    ):
        run_all(dict(globals()))
