"""The strides that real kernels give to dimensions of size 1, beside those that are computed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from magjit_triton.strides import UNSURE, correct_strides

aten = torch.ops.aten

UNARY = [aten.sigmoid.default, aten.relu.default, aten.log.default, aten.isnan.default]
UNARY += [aten.clone.default, aten.flip.default, aten.relu6.default, aten.gelu.default]
BINARY = [aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.lt.Tensor]
BINARY += [aten.threshold_backward.default, aten.tanh_backward.default, aten.logical_and.default]
WITH_NUMBER = [aten.add.Tensor, aten.mul.Scalar, aten.ge.Scalar, aten.rsub.Scalar]
WITH_NUMBER += [aten.clamp_min.default, aten.pow.Tensor_Scalar, aten.remainder.Scalar]


def strided(random_: random.Random, shape: list[int]) -> Tensor:
    """A tensor of any order of dimensions, some with gaps and some repeated."""
    order = random_.sample(range(len(shape)), len(shape))
    room = [shape[k] + random_.choice([0, 0, 0, 1]) for k in order]
    made = torch.rand(room) + 0.5
    for k, dim in enumerate(order):
        made = made.narrow(k, 0, shape[dim])
    made = made.permute([order.index(k) for k in range(len(shape))])
    if random_.random() < 0.2:
        made = made.narrow(random_.randrange(len(shape)), 0, 1).expand(shape)
    return made


def call(random_: random.Random) -> tuple[Any, list[Any]]:
    shape = [random_.choice([1, 1, 2, 3]) for _ in range(random_.randint(2, 5))]
    kind = random_.random()
    if kind < 0.4:
        target = random_.choice(UNARY)
        more = [[random_.randrange(len(shape))]] if target is aten.flip.default else []
        return target, [strided(random_, shape), *more]
    if kind < 0.6:
        return random_.choice(WITH_NUMBER), [strided(random_, shape), 2]
    if kind < 0.7:
        mask = strided(random_, shape) > 1
        return aten.masked_fill.Scalar, [strided(random_, shape), mask, 2.0]
    other = [size if random_.random() < 0.8 else 1 for size in shape]
    target = random_.choice(BINARY)
    pair = [strided(random_, shape), strided(random_, other[random_.choice([0, 0, 1]) :])]
    return target, [*pair, 0.0] if target is aten.threshold_backward.default else pair


def as_graph(target: Any, arguments: list[Any]) -> GraphModule:
    graph = Graph()
    nodes = []
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in arguments]
        for fake in fakes:
            node = fake
            if isinstance(fake, Tensor):
                node = graph.placeholder(f"p{len(nodes)}")
                node.meta["val"] = fake
            nodes.append(node)
        made = graph.call_function(target, tuple(nodes))
        made.meta["val"] = target(*fakes)
    graph.output(made)
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("seed", range(20))
def test_as_real_kernels_give_them(seed: int) -> None:
    random_ = random.Random(seed)
    for _ in range(40):
        target, arguments = call(random_)
        gm = as_graph(target, arguments)
        correct_strides(gm)
        (made,) = (node for node in gm.graph.nodes if node.op == "call_function")
        real = target(*arguments)
        assert UNSURE not in made.meta
        text = f"{target} of {[getattr(one, 'stride', str)() for one in arguments]}"
        assert made.meta["val"].stride() == real.stride(), text


def test_what_is_not_known_is_marked() -> None:
    x = torch.rand(2, 1, 3).transpose(0, 2)
    for given, marked in ((x, True), (x.contiguous(), False)):
        gm = as_graph(aten.cumsum.default, [given, 0])
        correct_strides(gm)
        (made,) = (node for node in gm.graph.nodes if node.op == "call_function")
        assert (UNSURE in made.meta) == marked
