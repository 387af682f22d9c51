"""Is a program dynamic? Decided by one eager run; no compiler is asked.

dynamic = an ATen operator was dispatched whose tag says that its result's shape or value
          depends on data (`index.Tensor` with masks only), or a tensor's data left torch
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKS = {torch.bool, torch.uint8}
_LEAVING = {
    "numpy",
    "tolist",
    "item",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__complex__",
    "__index__",
    "__dlpack__",
}


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self.found is None and _TAGS & set(func.tags) and _counts(func, args):
            self.found = str(func)
        return func(*args, **(kwargs or {}))


def _counts(func: Any, args: Sequence[Any]) -> bool:
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in _MASKS for index in args[1])


class _Exits(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if self.found is None and name in _LEAVING:
            self.found = f"Tensor.{name}"
        return func(*args, **(kwargs or {}))


class Watch:
    """Watches the eager run inside of it; `found` tells what makes it dynamic, None if nothing."""

    def __init__(self) -> None:
        self._operators, self._exits = _Operators(), _Exits()
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        self._stack.enter_context(self._operators)
        self._stack.enter_context(self._exits)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def found(self) -> str | None:
        return self._exits.found or self._operators.found
