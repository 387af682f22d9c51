"""Places where a Python program keeps state: globals, cells, defaults, classes, modules."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

import torch

from ..twin import Scene, call, isolated
from .table import RIGHT, new_table

ROWS = new_table()

SCALE = 2.0
UNREAD = 1.0
SETTINGS = types.ModuleType("settings")
SETTINGS.scale = 2.0  # type: ignore[attr-defined]
LIMITS = [1.0, 2.0]


def double(x: Any) -> Any:
    return x * 2


def triple(x: Any) -> Any:
    return x * 3


def set_global(name: str, value: Any) -> Any:
    return lambda scene: scene.fn.__globals__.__setitem__(name, value)


def by_global(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def by_global_function(x: torch.Tensor) -> torch.Tensor:
    return double(x)


def by_settings(x: torch.Tensor) -> torch.Tensor:
    return x * SETTINGS.scale


def by_global_list(x: torch.Tensor) -> torch.Tensor:
    return x * sum(LIMITS)


def by_builtin(x: torch.Tensor) -> torch.Tensor:
    return x * max(2, 3)


def by_optional_global(x: torch.Tensor) -> torch.Tensor:
    return x * globals().get("MAYBE", 2)


@ROWS.row()
def global_int() -> Scene:
    return Scene(
        isolated(by_global), change=set_global("SCALE", 3.0), unrelated=set_global("UNREAD", 3.0)
    )


@ROWS.row()
def global_function_replaced() -> Scene:
    return Scene(
        isolated(by_global_function),
        change=set_global("double", triple),
        unrelated=set_global("triple", double),
    )


@ROWS.row()
def global_list_mutated() -> Scene:
    limits = [1.0, 2.0]
    return Scene(isolated(by_global_list, LIMITS=limits), change=lambda s: limits.append(4.0))


@ROWS.row()
def global_added() -> Scene:
    return Scene(
        isolated(by_optional_global),
        change=set_global("MAYBE", 5),
        unrelated=set_global("MAYBE_NOT", 5),
    )


@ROWS.row()
def module_attribute_of_a_global() -> Scene:
    settings = types.ModuleType("settings")
    settings.scale = 2.0  # type: ignore[attr-defined]
    return Scene(
        isolated(by_settings, SETTINGS=settings),
        change=lambda s: setattr(settings, "scale", 3.0),
        unrelated=lambda s: setattr(settings, "other", 3.0),
    )


@ROWS.row()
def module_getattr() -> Scene:
    settings = types.ModuleType("settings")
    settings.__getattr__ = lambda name: 2.0  # type: ignore[method-assign]
    return Scene(
        isolated(by_settings, SETTINGS=settings),
        change=lambda s: setattr(settings, "scale", 3.0),
        unrelated=lambda s: setattr(settings, "other", 3.0),
    )


@ROWS.row()
def builtin_shadowed_by_a_global() -> Scene:
    return Scene(
        isolated(by_builtin), change=set_global("max", min), unrelated=set_global("sorted", min)
    )


@ROWS.row()
def builtin_replaced() -> Scene:
    builtins = {"max": max, "min": min}
    return Scene(
        isolated(by_builtin, __builtins__=builtins),
        change=lambda s: builtins.update(max=min),
        unrelated=lambda s: builtins.pop("min"),
    )


@ROWS.row()
def closure_cell() -> Scene:
    scale, unread = 2.0, 1.0

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def change(scene: Scene) -> None:
        nonlocal scale
        scale = 3.0

    def unrelated(scene: Scene) -> None:
        nonlocal unread
        unread += 1

    return Scene(program, change=change, unrelated=unrelated)


@ROWS.row()
def closure_cell_of_a_callee() -> Scene:
    scale = 2.0

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def program(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    def change(scene: Scene) -> None:
        nonlocal scale
        scale = 3.0

    return Scene(program, change=change)


@ROWS.row()
def default_argument() -> Scene:
    def program(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    return Scene(program, change=lambda s: setattr(s.fn, "__defaults__", (3.0,)))


@ROWS.row()
def mutable_default_argument() -> Scene:
    def program(x: torch.Tensor, scales: list[float] = [2.0]) -> torch.Tensor:
        return x * sum(scales)

    return Scene(program, change=lambda s: s.fn.__defaults__[0].append(1.0))


@ROWS.row()
def default_of_a_callee() -> Scene:
    def inner(x: torch.Tensor, scale: float = 2.0, unread: float = 1.0) -> torch.Tensor:
        return x * scale

    def program(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    return Scene(
        program,
        change=lambda s: setattr(inner, "__defaults__", (3.0, 1.0)),
        unrelated=lambda s: inner.__dict__.update(note=1),
    )


@ROWS.row()
def keyword_default() -> Scene:
    def program(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    return Scene(program, change=lambda s: s.fn.__kwdefaults__.update(scale=3.0))


@ROWS.row()
def code_of_the_root_replaced() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    return Scene(program, change=lambda s: setattr(s.fn, "__code__", other.__code__))


@ROWS.row()
def code_of_a_callee_replaced() -> Scene:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def program(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    return Scene(program, change=lambda s: setattr(inner, "__code__", other.__code__))


@ROWS.row()
def function_attribute() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * program.scale  # type: ignore[attr-defined]

    program.scale = 2.0  # type: ignore[attr-defined]
    return Scene(program, change=lambda s: setattr(s.fn, "scale", 3.0))


@ROWS.row()
def environment_variable() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * float(os.environ.get("MAGJIT_TEST_SCALE", "2"))

    return Scene(
        program,
        change=lambda s: os.environ.__setitem__("MAGJIT_TEST_SCALE", "3"),
        unrelated=lambda s: os.environ.__setitem__("MAGJIT_TEST_OTHER", "3"),
    )


@ROWS.row()
def environment_variable_by_getenv() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * len(os.getenv("MAGJIT_TEST_WORD", "ab"))

    return Scene(
        program,
        change=lambda s: os.environ.__setitem__("MAGJIT_TEST_WORD", "abc"),
        unrelated=lambda s: os.environ.__setitem__("MAGJIT_TEST_OTHER", "abc"),
    )


def install(name: str, scale: float) -> None:
    module = types.ModuleType(name)
    module.scale = scale  # type: ignore[attr-defined]
    sys.modules[name] = module


@ROWS.row()
def module_imported_inside() -> Scene:
    install("magjit_test_module", 2.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        import magjit_test_module  # type: ignore[import-not-found]

        return x * magjit_test_module.scale

    return Scene(
        program,
        change=lambda s: install("magjit_test_module", 3.0),
        unrelated=lambda s: install("magjit_test_other", 3.0),
    )


@ROWS.row()
def name_imported_inside() -> Scene:
    install("magjit_test_names", 2.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        from magjit_test_names import scale  # type: ignore[import-not-found]

        return x * scale

    return Scene(
        program,
        change=lambda s: setattr(sys.modules["magjit_test_names"], "scale", 3.0),
        unrelated=lambda s: setattr(sys.modules["magjit_test_names"], "other", 3.0),
    )


# --- roots ----------------------------------------------------------------------------------


@ROWS.row()
def partial_as_root() -> Scene:
    options = {"scale": 2.0}

    def program(x: torch.Tensor, options: dict[str, float]) -> torch.Tensor:
        return x * options["scale"]

    return Scene(
        functools.partial(program, options=options),
        change=lambda s: options.update(scale=3.0),
        unrelated=lambda s: options.update(other=3.0),
    )


@ROWS.row()
def bound_method_as_root() -> Scene:
    class Model:
        scale = 2.0

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = Model()
    return Scene(
        model.run,
        change=lambda s: setattr(model, "scale", 3.0),
        unrelated=lambda s: setattr(model, "other", 3.0),
    )


@ROWS.row()
def callable_object_as_root() -> Scene:
    class Model:
        scale = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    return Scene(Model(), change=lambda s: setattr(s.fn, "scale", 3.0))


@ROWS.row(after=RIGHT)
def random_state() -> Scene:
    import random

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * random.random()

    return Scene(program, change=lambda s: setattr(s, "args", lambda: drawn(random)))


def drawn(random: Any) -> Any:
    """Move the generator on before the call: the program's own number is another one."""
    random.random()
    return call(torch.randn(3, 4))


@ROWS.row(after=RIGHT)
def counter_outside_grows() -> Scene:
    steps = [0]

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * (steps[0] % 3)

    return Scene(program, change=lambda s: steps.__setitem__(0, steps[0] + 1))
