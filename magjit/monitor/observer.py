"""What the operator recorder asks of those that work with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from magjit.monitor.operator_graph import Operator


class Observer(Protocol):
    """What the operator recorder asks of the recorder of Python state."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def split(self, reason: str, remedy: str | None = None) -> None: ...

    def fail(self, error: Exception) -> None: ...

    def instruction(self) -> tuple[Any, int]: ...

    def external_tensor(self, tensor: torch.Tensor) -> bool: ...

    def tensor_attribute(self, tensor: torch.Tensor, name: str, value: Any) -> None: ...

    def set_tensor_attribute(self, tensor: torch.Tensor, name: str) -> None: ...

    def tensor_fact(self, tensor: torch.Tensor, func: Any, value: Any) -> None: ...

    def live_number(self, value: Any) -> Any: ...

    def takes_numbers(
        self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None: ...

    def reads_item(self, name: str, args: tuple[Any, ...], value: Any) -> bool: ...

    def item(self, value_id: int, value: Any) -> Any: ...

    def hook(self, tensor: torch.Tensor, hook: Any) -> Callable[[Any], object]: ...

    def hides_change(self, reason: str | None = None, tensor: Any = None) -> None: ...


class Shapes(Protocol):
    """What follows the operators with symbols for sizes; see `magjit.symbolic_shapes`."""

    failure: str | None

    def fail(self, reason: str) -> None: ...

    def follow(self, op: Operator, out: Any) -> None: ...

    def read(
        self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, out: Any
    ) -> Any: ...
