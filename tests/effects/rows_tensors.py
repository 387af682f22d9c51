"""Side effects on tensors, parameters, buffers and autograd state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..twin import Scene, call
from .table import new_table

ROWS = new_table()


def out_argument(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.add(x, 1, out=y)


def grown_out(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.add(x, 1, out=torch.empty(0)), y


def through_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    view = x.view(-1)
    view[2:5].zero_()
    return x + y


def masked(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[x > 0] = 7.0
    return x + y


def in_order(x: torch.Tensor, y: torch.Tensor) -> Any:
    before = x.clone()
    x.mul_(2)
    middle = x + 1
    x.add_(y)
    return before, middle, x


def data_assigned(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.data = y * 2
    return x + 1


def swapped(x: torch.Tensor, y: torch.Tensor) -> Any:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return x - y


def intermediate(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x + y
    z.mul_(2)
    z[0] = 1
    return z, z[0]


def operator_forms(x: torch.Tensor, y: torch.Tensor) -> Any:
    x += y
    x *= 2
    x -= 1
    x /= 3
    return x


def resized(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.unsqueeze_(0), y.t_()


# name -> program over two float tensors of shape (3, 4)
IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "argument added to": lambda x, y: x.add_(y),
    "argument by operators": operator_forms,
    "argument item set": lambda x, y: (x.__setitem__(0, y[0]), x * 2)[1],
    "argument slice set": lambda x, y: (x.__setitem__((slice(1), 2), 5.0), y * 2)[1],
    "argument masked": masked,
    "argument through a view": through_view,
    "argument in steps": in_order,
    "argument zeroed and returned": lambda x, y: (x.zero_(), x),
    "argument copied into": lambda x, y: (x.copy_(y), None)[1],
    "arguments swapped": swapped,
    "argument data assigned": data_assigned,
    "argument transposed in place": resized,
    "intermediate": intermediate,
    "out argument": out_argument,
    "out argument grown": grown_out,
    "index put": lambda x, y: x.index_put_((torch.tensor([0, 2]),), y[:2]),
    "scatter": lambda x, y: x.scatter_(1, torch.zeros(3, 1, dtype=torch.long), y),
    "fill by a function": lambda x, y: nn.init.constant_(x, 3.0),
    "relu in place": lambda x, y: nn.functional.relu(x, inplace=True),
    "foreach": lambda x, y: (torch._foreach_add_([x, y], 1), x + y)[1],
    "attribute of a tensor": lambda x, y: (setattr(x, "note", y + 1), x + 1)[1],
}
DATA = {"argument data assigned"}


def two_tensors() -> Any:
    return call(torch.randn(3, 4), torch.randn(3, 4))


def in_place(program: Callable[..., Any]) -> Scene:
    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        return program(x, y)

    return Scene(run, args=two_tensors)


for row_name, program in IN_PLACE.items():
    ROWS.add(f"in place {row_name}", functools.partial(in_place, program), split=row_name in DATA)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.update(x)
        return x * self.weight

    def update(self, x: torch.Tensor) -> None:
        raise NotImplementedError


def updated_in_place(self: Any, x: torch.Tensor) -> None:
    self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    self.steps += 1


def reassigned(self: Any, x: torch.Tensor) -> None:
    self.mean = self.mean * 0.9 + x.detach().mean(0)


def copied(self: Any, x: torch.Tensor) -> None:
    self.mean.copy_(x.detach().mean(0))
    self.steps.fill_(3)


def stored(self: Any, x: torch.Tensor) -> None:
    self.kept = x * self.weight


def registered(self: Any, x: torch.Tensor) -> None:
    self.register_buffer("late", x.detach() * 2)


def weight_changed(self: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        self.weight.add_(1)


def data_changed(self: Any, x: torch.Tensor) -> None:
    self.weight.data.mul_(0.5)


def view_kept(self: Any, x: torch.Tensor) -> None:
    self.kept = self.mean[1:]
    self.mean.add_(1)


def list_of_states(self: Any, x: torch.Tensor) -> None:
    self.kept = [x.detach(), self.mean, self.mean + 1]


# name -> (what forward does to the module's state, may each call be captured anew)
MODULES: dict[str, tuple[Callable[[Any, torch.Tensor], None], bool]] = {
    "buffer updated in place": (updated_in_place, True),
    "buffer assigned": (reassigned, True),
    "buffer copied into": (copied, True),
    "intermediate kept on self": (stored, True),
    "buffer registered in forward": (registered, False),
    "parameter changed under no grad": (weight_changed, True),
    "parameter data changed": (data_changed, True),
    "view of a buffer kept": (view_kept, True),
    "states kept in a list": (list_of_states, True),
}


def with_buffers(update: Callable[[Any, torch.Tensor], None]) -> Scene:
    module = type("Buffers", (Buffers,), {"update": update})()
    return Scene(module, state=lambda: (vars(module), module.state_dict()))


for row_name, (update, replayed) in MODULES.items():
    ROWS.add(f"module {row_name}", functools.partial(with_buffers, update), replays=replayed)


def stock(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Scene:
    torch.manual_seed(0)
    module = make()
    return Scene(module, args=lambda: call(torch.randn(shape)), state=lambda: module)


# name -> (module, shape of its input)
STOCK: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm statistics": (lambda: nn.BatchNorm1d(4), (8, 4)),
    "batch norm cumulative average": (lambda: nn.BatchNorm1d(4, momentum=None), (8, 4)),
    "batch norm 2d in a sequence": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)),
        (2, 2, 5, 5),
    ),
    "batch norm in eval": (lambda: nn.BatchNorm1d(4).eval(), (8, 4)),
    "instance norm statistics": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), (2, 4, 5)),
    "spectral norm vectors": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        (3, 4),
    ),
    "dropout in training": (lambda: nn.Dropout(0.5), (3, 4)),
    "randomized relu": (lambda: nn.RReLU(), (3, 4)),
}

for row_name, entry in STOCK.items():
    cumulative = row_name == "batch norm cumulative average"
    ROWS.add(f"stock {row_name}", functools.partial(stock, *entry), backward=True, split=cumulative)


# --- autograd -------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    """Its backward is not the derivative of its forward: a graph that lost it is seen at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 100 + x


def leaf() -> Any:
    return call(torch.randn(3, 4, requires_grad=True))


def partly_detached(x: torch.Tensor) -> Any:
    return x.detach() * 2, x * 3, (x * 2).detach().requires_grad_()


def no_grad_part(x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x * 2
    return y, x * y


def enabled_inside(x: torch.Tensor) -> Any:
    with torch.no_grad(), torch.enable_grad():
        y = x * 2
    return y


def view_and_base(x: torch.Tensor) -> Any:
    y = x * 2
    return y.view(-1), y[0]


def retained(x: torch.Tensor) -> Any:
    y = x * 2
    y.retain_grad()
    return y, y * 3


def in_place_on_intermediate(x: torch.Tensor) -> Any:
    y = x * 2
    y[0] = y[0] * 3
    y.add_(x)
    return y.exp()


def hooked(x: torch.Tensor) -> Any:
    y = x * 2
    y.register_hook(lambda grad: grad * 10)
    return y * 3


def checkpointed(x: torch.Tensor) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda t: torch.sin(t) * t, x, use_reentrant=False)


# name -> (program over one leaf that requires grad, may split)
GRADIENTS: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "of one output": (lambda x: (x * 2).sin(), False),
    "of the input returned": (lambda x: (x, x * 2), False),
    "of two outputs": (lambda x: (x * 2, x.exp()), False),
    "of a view of the input": (lambda x: (x[1:], x.t()), False),
    "partly detached": (partly_detached, False),
    "partly without grad": (no_grad_part, False),
    "with grad enabled inside": (enabled_inside, False),
    "of an output and its view": (view_and_base, False),
    "of outputs that share storage": (lambda x: (x * 2).chunk(2, dim=1), False),
    "by a custom backward": (lambda x: Double.apply(x) + 1, False),
    "by a custom backward twice": (lambda x: Double.apply(Double.apply(x)), False),
    "through an in place change": (in_place_on_intermediate, False),
    "of integer outputs beside": (lambda x: (x.argmax(1), x * 2), False),
    "with a tensor hook": (hooked, True),
    "retained": (retained, True),
    "through a checkpoint": (checkpointed, False),
    "of a leaf made inside": (lambda x: x.detach().clone().requires_grad_(), False),
}


def differentiable(program: Callable[[torch.Tensor], Any]) -> Scene:
    def run(x: torch.Tensor) -> Any:
        return program(x)

    return Scene(run, args=leaf)


for row_name, (program, may_split) in GRADIENTS.items():
    ROWS.add(
        f"gradient {row_name}",
        functools.partial(differentiable, program),
        backward=True,
        split=may_split,
    )


@ROWS.row(backward=True)
def gradient_of_parameters() -> Scene:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return Scene(net, state=lambda: net)


@ROWS.row(backward=True, replays=False)
def gradient_of_a_state_carried_over_calls() -> Scene:
    class Carry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.carry = nn.Parameter(torch.ones(4)), torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.carry = (self.carry * 0.5 + x.sum(0)).detach()
            return self.carry * self.weight

    module = Carry()
    return Scene(module, state=lambda: module)


@ROWS.row(split=True)
def gradient_taken_inside() -> Scene:
    def program(x: torch.Tensor) -> Any:
        loss = (x * x).sum()
        return torch.autograd.grad(loss, x)[0] + 1

    return Scene(program, args=leaf)


@ROWS.row(split=True)
def backward_inside() -> Scene:
    weight = nn.Parameter(torch.ones(4))

    def program(x: torch.Tensor) -> Any:
        (x * weight).sum().backward()
        return x + 1

    return Scene(program, state=lambda: weight)


@ROWS.row(split=True)
def optimizer_step_inside() -> Scene:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def program(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = (x * weight).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Scene(program, state=lambda: (weight, optimizer.state_dict()))


@ROWS.row()
def hooks_that_change_module_state() -> Scene:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    kept: dict[str, Any] = {}
    net[0].register_forward_hook(lambda m, args, out: kept.update(out=out))
    net[1].register_forward_pre_hook(lambda m, args: setattr(m, "seen", args[0]))
    return Scene(net, state=lambda: (kept, net[1].seen))


@ROWS.row()
def grad_field_set() -> Scene:
    weight = nn.Parameter(torch.ones(3, 4))

    def program(x: torch.Tensor) -> Any:
        weight.grad = x * 2
        return x + 1

    return Scene(program, state=lambda: weight)


@ROWS.row()
def requires_grad_of_an_argument_set() -> Scene:
    return Scene(lambda x: (x.requires_grad_() * 2).detach())
