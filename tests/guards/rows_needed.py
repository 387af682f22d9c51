"""Kinds of guards that no other row needs: each row fails when its kind is turned off."""

from __future__ import annotations

import contextvars
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..twin import Call, Scene, call
from .table import new_table

ROWS = new_table()


class Box:
    """An object to put things into."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def triple(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @classmethod
    def named(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)


class LongerBox(Box):
    pass


class Slots:
    __slots__ = ("scale",)


def one() -> torch.Tensor:
    return torch.arange(4.0)


def holding(read: Callable[[Any, torch.Tensor], Any], before: Any, after: Any) -> Scene:
    """A program over an object whose field `held` is one thing first and another one then."""
    box = Box(held=before)

    def program(x: torch.Tensor) -> Any:
        return read(box.held, x)

    return Scene(program, change=lambda scene: setattr(box, "held", after))


def given(
    program: Callable[..., Any], before: Callable[[], Any], after: Callable[[], Any]
) -> Scene:
    """A program whose arguments are made in one way first and in another one then."""

    def args(make: Callable[[], Any]) -> Callable[[], Call]:
        return lambda: call(one(), *make())

    return Scene(
        program, args=args(before), change=lambda scene: setattr(scene, "args", args(after))
    )


# --- what is empty first ------------------------------------------------------------------------


@ROWS.row()
def empty_cell_filled() -> Scene:
    def outer() -> tuple[Callable[..., Any], Callable[[], None]]:
        def program(x: torch.Tensor) -> torch.Tensor:
            try:
                return x * scale
            except NameError:
                return x

        def fill() -> None:
            nonlocal scale
            scale = 2.0

        scale = 0.0
        del scale
        return program, fill

    program, fill = outer()
    return Scene(program, change=lambda scene: fill())


@ROWS.row()
def empty_context_variable_set() -> Scene:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("needed")

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * variable.get(3.0)

    return Scene(program, change=lambda scene: variable.set(2.0))


@ROWS.row()
def context_variable_set_again() -> Scene:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("needed")
    variable.set(4.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * variable.get()

    return Scene(program, change=lambda scene: variable.set(2.0))


@ROWS.row()
def empty_slot_filled() -> Scene:
    held = Slots()

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(held, "scale", 3.0)

    return Scene(program, change=lambda scene: setattr(held, "scale", 2.0))


@ROWS.row()
def dead_weak_reference_replaced_by_a_live_one() -> Scene:
    alive = Box(scale=2)
    dead = weakref.ref(Box())
    assert dead() is None
    return holding(
        lambda ref, x: x * (3 if ref() is None else alive.scale), dead, weakref.ref(alive)
    )


@ROWS.row()
def weak_reference_to_another_class() -> Scene:
    return holding(lambda ref, x: x * len(ref().__name__), weakref.ref(Box), weakref.ref(LongerBox))


# --- functions and methods ----------------------------------------------------------------------


def copied(fn: types.FunctionType, scope: dict[str, Any]) -> types.FunctionType:
    return types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)


def reads_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE  # type: ignore[name-defined]  # noqa: F821


@ROWS.row()
def function_with_other_globals() -> Scene:
    scopes = [{"SCALE": scale, "__builtins__": __builtins__} for scale in (2.0, 3.0)]
    first, second = (copied(reads_a_global, scope) for scope in scopes)
    return given(lambda x, fn: fn(x), lambda: (first,), lambda: (second,))


def counter(shared: bool) -> tuple[Callable[[], None], Callable[[], int]]:
    def make() -> tuple[Callable[[], None], Callable[[], int]]:
        count = 0

        def up() -> None:
            nonlocal count
            count += 1

        def read() -> int:
            return count

        return up, read

    up, read = make()
    return up, (read if shared else make()[1])


@ROWS.row()
def closures_that_share_a_cell_no_longer() -> Scene:
    def program(x: torch.Tensor, up: Callable[[], None], read: Callable[[], int]) -> torch.Tensor:
        up()
        return x * (read() + 1)

    return given(program, lambda: counter(True), lambda: counter(False))


def needs_a_keyword(x: torch.Tensor, *, scale: float) -> torch.Tensor:
    return x * scale


@ROWS.row()
def keyword_default_given() -> Scene:
    fn = copied(needs_a_keyword, globals())
    fn.__kwdefaults__ = None  # type: ignore[assignment]

    def program(x: torch.Tensor) -> torch.Tensor:
        try:
            return fn(x)
        except TypeError:
            return x

    return Scene(program, change=lambda scene: setattr(fn, "__kwdefaults__", {"scale": 2.0}))


@ROWS.row()
def default_given() -> Scene:
    def fn(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale

    def program(x: torch.Tensor) -> torch.Tensor:
        try:
            return fn(x)  # type: ignore[call-arg]
        except TypeError:
            return x

    return Scene(program, change=lambda scene: setattr(fn, "__defaults__", (2.0,)))


@ROWS.row()
def another_method_of_the_object() -> Scene:
    box = Box()
    return holding(lambda method, x: method(x), box.double, box.triple)


@ROWS.row()
def class_method_of_a_subclass() -> Scene:
    return holding(lambda method, x: method(x), Box.named, LongerBox.named)


# --- one object on two paths --------------------------------------------------------------------


@ROWS.row()
def objects_that_share_their_dict_no_longer() -> Scene:
    first, second, third = Box(value=1), Box(value=1), Box(value=1)
    second.__dict__ = first.__dict__

    def program(x: torch.Tensor) -> torch.Tensor:
        first.value = 5
        out = x * second.value
        first.value = 1
        return out

    return Scene(program, change=lambda scene: setattr(second, "__dict__", third.__dict__))


def views(distance: int) -> Callable[[], Any]:
    def make() -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.randn(8)
        return base[:4], base[distance : distance + 4]

    return make


@ROWS.row()
def views_that_overlap_elsewhere() -> Scene:
    def program(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(x)
        return b * 2

    return given(program, views(2), views(1))
