"""Small guard programs for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from magjit import _C

Instr = tuple[Any, ...]
ARG = ("arg", 0, 0)


def program(*instrs: Instr, slots: int = 12) -> _C.GuardProgram:
    return _C.GuardProgram(list(instrs), slots)


def on_arg(*instrs: Instr) -> Callable[[object], bool]:
    """A check of one argument, which is in slot 0; full and quick evaluation must agree."""
    guards = program(ARG, *instrs)

    def check(value: object) -> bool:
        answer = guards.check((value,))
        assert answer is guards.check((value,)), "second check differs"
        assert answer is (guards.explain((value,)) is None)
        return answer

    return check


def fetched(value: object, *instrs: Instr) -> Any:
    """What slot 1 holds after fetching from `value` in slot 0; KeyError if the fetch fails."""
    slots = program(ARG, *instrs).slots((value,))
    if slots is None:
        raise KeyError
    return slots[1]


class Hostile:
    """Any user code that runs is a failure."""

    def __init__(self, hash_value: int = 1) -> None:
        self.hash_value = hash_value
        self.armed = False

    def __eq__(self, other: object) -> bool:
        assert not self.armed, "__eq__ ran"
        return self is other

    def __hash__(self) -> int:
        assert not self.armed, "__hash__ ran"
        return self.hash_value


class Plain:
    attribute = 1

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("full", "__weakref__")
    full: object


class Str(str):
    def __eq__(self, other: object) -> bool:
        raise AssertionError("__eq__ ran")

    __hash__ = str.__hash__
