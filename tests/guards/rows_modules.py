"""State of torch modules: parameters, buffers, hooks, flags, sub-modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..twin import Scene, call
from .table import HIT, RECAPTURED, RIGHT, new_table

ROWS = new_table()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop, self.norm = nn.Dropout(0.0), nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("maybe", torch.ones(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.unread = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).relu()) + self.shift
        if self.maybe is not None:
            x = x + self.maybe
        for layer in self.layers:
            x = layer(x)
        for layer in self.named.values():
            x = layer(x)
        return self.norm(self.drop(x))


def fresh() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def batch() -> Any:
    return call(torch.randn(3, 4))


def other_state(net: Net) -> dict[str, torch.Tensor]:
    return {k: v * 0.5 if v.is_floating_point() else v for k, v in net.state_dict().items()}


@torch.no_grad()
def halve(t: torch.Tensor) -> None:
    t.mul_(0.5)


def zero_weight(layer: nn.Linear) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(layer.weight))


def plus_one(*seen: Any) -> Any:
    """A hook: adds one to the last thing that it is given."""
    last = seen[-1]
    return tuple(item + 1 for item in last) if isinstance(last, tuple) else last + 1


def half_args(scene: Scene) -> None:
    scene.fn.half()
    scene.args = lambda: call(torch.randn(3, 4).half())


def double_args(scene: Scene) -> None:
    scene.fn.to(torch.float64)
    scene.args = lambda: call(torch.randn(3, 4, dtype=torch.float64))


def unread(net: Net) -> None:
    net.unread += 1


# name -> (change, what it leads to)
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parameter values by load state dict": (lambda n: n.load_state_dict(other_state(n)), HIT),
    "parameter values in place": (lambda n: halve(n.first.weight), HIT),
    "buffer values in place": (lambda n: halve(n.shift), HIT),
    "parameter data assigned": (lambda n: setattr(n.first.weight, "data", torch.zeros(4, 4)), HIT),
    "parameter data of another layout": (
        lambda n: setattr(n.first.weight, "data", torch.randn(4, 4).t()),
        RIGHT,
    ),
    "parameter replaced": (lambda n: setattr(n.first, "weight", zero_weight(n.first)), RIGHT),
    "parameter shared with another layer": (
        lambda n: setattr(n.second, "weight", n.first.weight),
        RIGHT,
    ),
    "parameter removed": (lambda n: n.first.register_parameter("bias", None), RECAPTURED),
    "parameter frozen": (lambda n: n.requires_grad_(False), RECAPTURED),
    "load state dict with assign": (
        lambda n: n.load_state_dict(other_state(n), assign=True),
        RIGHT,
    ),
    "buffer replaced": (lambda n: setattr(n, "shift", torch.zeros(4)), RIGHT),
    "buffer replaced by none": (lambda n: setattr(n, "maybe", None), RECAPTURED),
    "buffer of another shape": (lambda n: setattr(n, "shift", torch.zeros(1)), RECAPTURED),
    "sub module replaced": (lambda n: setattr(n, "drop", nn.ReLU()), RECAPTURED),
    "sub module replaced by one of its class": (
        lambda n: setattr(n, "first", nn.Linear(4, 4, bias=False)),
        RECAPTURED,
    ),
    "module list appended": (lambda n: n.layers.append(nn.ReLU()), RECAPTURED),
    "module list item replaced": (lambda n: put(n.layers, 1, nn.ReLU()), RECAPTURED),
    "module dict entry added": (lambda n: put(n.named, "b", nn.ReLU()), RECAPTURED),
    "training of the whole": (lambda n: n.train(), RECAPTURED),
    "training of a sub module": (lambda n: n.norm.train(), RECAPTURED),
    "batch norm momentum": (lambda n: (n.norm.train(), setattr(n.norm, "eps", 0.5)), RECAPTURED),
    "batch norm statistics dropped": (
        lambda n: setattr(n.norm, "running_mean", None) or setattr(n.norm, "running_var", None),
        RECAPTURED,
    ),
    "dropout p": (lambda n: (n.drop.train(), setattr(n.drop, "p", 1.0)), RECAPTURED),
    "forward hook": (lambda n: n.first.register_forward_hook(plus_one), RECAPTURED),
    "forward pre hook": (lambda n: n.first.register_forward_pre_hook(plus_one), RECAPTURED),
    "forward hook on the root": (lambda n: n.register_forward_hook(plus_one), RECAPTURED),
    "forward put on the instance": (
        lambda n: setattr(n.first, "forward", lambda x: x * 2),
        RECAPTURED,
    ),
    "forward put on the root": (lambda n: setattr(n, "forward", lambda x: x * 2), RECAPTURED),
    "module attribute of a sub module": (lambda n: setattr(n.norm, "eps", 0.5), RECAPTURED),
    "parametrization registered": (
        lambda n: nn.utils.parametrize.register_parametrization(n.first, "weight", nn.Tanh()),
        RECAPTURED,
    ),
    "parameter moved to meta": (lambda n: n.to("meta"), RIGHT),
}


def put(container: Any, key: Any, item: Any) -> None:
    container[key] = item


def net_scene(change: Callable[[Any], Any]) -> Scene:
    def apply(scene: Scene) -> None:
        torch.manual_seed(5)
        change(scene.fn)

    return Scene(fresh(), args=batch, change=apply, unrelated=lambda s: unread(s.fn))


for row_name, (mutate, leads_to) in CHANGES.items():
    ROWS.add(row_name, functools.partial(net_scene, mutate), after=leads_to)


@ROWS.row()
def module_to_float64() -> Scene:
    return Scene(fresh(), args=batch, change=double_args, unrelated=lambda s: unread(s.fn))


@ROWS.row(silent=True)
def one_parameter_frozen() -> Scene:
    """The outputs are the same: only the backward graph is another one."""
    return net_scene(lambda n: n.norm.weight.requires_grad_(False))


@ROWS.row()
def module_half() -> Scene:
    return Scene(fresh(), args=batch, change=half_args, unrelated=lambda s: unread(s.fn))


@ROWS.row()
def global_forward_hook() -> Scene:
    def change(scene: Scene) -> None:
        drop_global_hooks()
        nn.modules.module.register_module_forward_hook(plus_one)

    return Scene(fresh(), args=batch, change=change)


@ROWS.row()
def global_forward_pre_hook() -> Scene:
    def change(scene: Scene) -> None:
        drop_global_hooks()
        nn.modules.module.register_module_forward_pre_hook(plus_one)

    return Scene(fresh(), args=batch, change=change)


def drop_global_hooks() -> None:
    nn.modules.module._global_forward_hooks.clear()
    nn.modules.module._global_forward_pre_hooks.clear()


@ROWS.row()
def hook_removed() -> Scene:
    net = fresh()
    handle = net.first.register_forward_hook(plus_one)
    return Scene(net, args=batch, change=lambda s: handle.remove())


@ROWS.row()
def forward_replaced_on_the_class() -> Scene:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    return Scene(Scale(), change=lambda s: setattr(Scale, "forward", lambda self, x: x * 3))


@ROWS.row()
def tensor_attribute_that_is_no_buffer() -> Scene:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = [torch.ones(4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift[0]

    return Scene(
        Shift(), args=batch, change=lambda s: put(s.fn.shift, 0, torch.ones(3, 4).double())
    )


@ROWS.row()
def attribute_of_a_tensor() -> Scene:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.weight.scale = 2.0  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.weight.scale

    return Scene(Scale(), args=batch, change=lambda s: setattr(s.fn.weight, "scale", 3.0))


@ROWS.row()
def grad_field_of_a_parameter() -> Scene:
    weight = nn.Parameter(torch.ones(4))

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if weight.grad is None else 3.0)

    return Scene(program, args=batch, change=lambda s: setattr(weight, "grad", torch.ones(4)))


@ROWS.row()
def modules_on_two_paths() -> Scene:
    net = fresh()

    def program(x: torch.Tensor) -> torch.Tensor:
        return net.first(x) + (net.second(x) if net.first is not net.second else 0)

    return Scene(
        program,
        args=batch,
        change=lambda s: setattr(net, "second", net.first),
        unrelated=lambda s: unread(net),
    )
