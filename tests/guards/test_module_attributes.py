"""Parameters, buffers and submodules are read without following ``Module.__getattr__``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magjit


class Net(nn.Module):
    """Each of the three tables has something."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.inner(x) * self.weight + self.scale
        return x


def other_submodule(net: Net) -> None:
    net.inner = nn.Linear(4, 4)


def other_parameter(net: Net) -> None:
    net._parameters["weight"] = nn.Parameter(torch.randn(4))


def hidden_by_a_parameter(net: Net) -> None:
    net._parameters["scale"] = nn.Parameter(torch.randn(4))


def hidden_by_an_attribute(net: Net) -> None:
    net.__dict__["weight"] = torch.randn(4)


def other_table(net: Net) -> None:
    net._buffers = {"scale": torch.randn(4)}


def table_with_an_order(net: Net) -> None:
    net.__dict__["_modules"] = OrderedDict(inner=nn.Linear(4, 4))


CHANGES: list[Callable[[Net], None]] = [
    other_submodule,
    other_parameter,
    hidden_by_a_parameter,
    hidden_by_an_attribute,
    other_table,
    table_with_an_order,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: Callable[[Net], None]) -> None:
    net, x = Net(), torch.randn(3, 4)
    compiled = magjit.compile(net, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), net(x))
    assert magjit.stats(compiled).captures == 1
    change(net)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), net(x))


def test_what_the_program_replaces_is_read_anew() -> None:
    def program(net: Net, x: torch.Tensor) -> torch.Tensor:
        y = x * net.weight
        net.weight, kept = nn.Parameter(net.weight.detach() * 2), net.weight
        y = y + net.weight
        net.weight = kept
        return y * net.weight

    net, x = Net(), torch.randn(4)
    compiled: Any = magjit.compile(program, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(net, x), program(net, x))
    assert magjit.stats(compiled).captures == 1


def test_what_is_deleted_is_missed() -> None:
    def program(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = x * net.weight
        del net.weight
        try:
            return x * net.weight
        except AttributeError as error:
            assert "no attribute 'weight'" in str(error)
            return x + 1
        finally:
            net.weight = nn.Parameter(torch.ones(4))

    net, twin, x = Net(), Net(), torch.randn(4)
    twin.load_state_dict(net.state_dict())
    compiled: Any = magjit.compile(program, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(net, x), program(twin, x))


def test_other_ways_to_the_same_function() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    def program(net: nn.Module, x: torch.Tensor, name: str = "scale") -> torch.Tensor:
        y: torch.Tensor = x * net.weight + getattr(net, name)
        return nn.Module.__getattr__(net.inner, "inner")(y)

    wrapper, x = Wrapper(Net()), torch.randn(4)
    compiled: Any = magjit.compile(program, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(wrapper, x), program(wrapper, x))
    assert magjit.stats(compiled).captures == 1
    wrapper.inner = Net()
    torch.testing.assert_close(compiled(wrapper, x), program(wrapper, x))


class Watched(nn.Module):
    """Sees who asks for its namespace."""

    asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            Watched.asked += 1
        return super().__getattribute__(name)


def test_a_class_with_its_own_look_up() -> None:
    def program(net: Watched, x: torch.Tensor) -> torch.Tensor:
        before = Watched.asked
        y: torch.Tensor = net.inner(x)
        return y * (Watched.asked - before)

    net, x = Watched(), torch.randn(4)
    compiled: Any = magjit.compile(program, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(net, x), program(net, x))


class Named(nn.Module):
    """Has no such attribute at first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x * self.missing
        except AttributeError:
            return x + 1


def test_an_attribute_that_appears() -> None:
    net, x = Named(), torch.randn(4)
    compiled = magjit.compile(net, backend="eager")
    torch.testing.assert_close(compiled(x), x + 1)
    torch.testing.assert_close(compiled(x), x + 1)
    net.register_buffer("missing", torch.randn(4))
    torch.testing.assert_close(compiled(x), net(x))
    assert magjit.stats(compiled).captures == 2
