"""How a queue writes down an operator's arguments, and what its results depend on."""

from __future__ import annotations

from typing import Any

import torch

from magjit_dvm.lazy_rules import Kind, Layout, Rule
from magjit_dvm.lazy_tensor import QueuedTensor
from magjit_dvm.lazy_window import CannotWait, Window, coded_literal, decoded

__all__ = ["PLAIN", "Coder", "on_meta"]

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that nobody else dispatches."""


class Coder:
    """The arguments of one operator as codes, and what its results depend on."""

    def __init__(self, window: Window, is_recording: bool) -> None:
        self.window = window
        self.is_recording = is_recording
        self.numbers = len(window.numbers)
        self.signature: list[Any] = []

    def coded(self, rule: Rule, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Codes by position and by name.

        Raises:
            CannotWait: an argument keeps the operator from waiting.
        """
        lifted = rule.lifted
        codes = tuple(
            [self.code(arg, place in lifted, rule.kind) for place, arg in enumerate(args)]
        )
        if not kwargs:
            return codes, ()
        if "out" in kwargs or kwargs.get("pin_memory") or kwargs.get("non_blocking"):
            raise CannotWait("an operator that writes its result into something given")
        self.signature.append(None)
        return codes, tuple(
            [(name, self.code(arg, False, rule.kind)) for name, arg in kwargs.items()]
        )

    def code(self, arg: Any, is_lifted: bool, kind: Kind) -> Any:
        cls = type(arg)
        window = self.window
        if cls is QueuedTensor or cls in PLAIN:
            if self.is_recording and arg.requires_grad:
                raise CannotWait("a gradient is asked for")
            if cls is QueuedTensor:
                value = arg._value
                if value.window is window:
                    self.signature.append(value.layout)
                    return value.number
                arg = value.real
                if arg is None:  # of another thread's queue
                    raise CannotWait("a value that is not there")
            place = window.input(arg)
            self.signature.append(window.layouts_of_inputs[place])
            return ~place
        if is_lifted and (cls is int or cls is float):
            window.numbers.append(arg)
            self.signature.append(cls if kind is Kind.ELEMENTWISE else arg)
            return cls
        if cls is list or cls is tuple:
            self.signature.append(len(arg))
            return (list, tuple([self.code(one, is_lifted, kind) for one in arg]))
        found = coded_literal(arg)
        if cls is torch.device and arg.type != "cpu":
            raise CannotWait("another device")
        self.signature.append(found)
        return found


def on_meta(window: Window, codes: Any, first_number: int) -> tuple[Any, Any]:
    """An operator's arguments without elements."""
    numbers = iter(window.numbers[first_number:])

    def tensor(number: int) -> torch.Tensor:
        layout: Layout = (
            window.layouts_of_inputs[~number] if number < 0 else window.values[number].layout
        )
        return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")

    args, kwargs = codes
    given = tuple(decoded(one, tensor, lambda _: next(numbers)) for one in args)
    named = {name: decoded(one, tensor, lambda _: next(numbers)) for name, one in kwargs}
    named.pop("device", None)
    return given, named
