"""What a frame begins with."""

from __future__ import annotations

import inspect
import types
from typing import Any


def arguments(code: types.CodeType, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a function is called with, of the local variables that it begins with."""
    count = code.co_argcount + code.co_kwonlyargcount
    args, kwargs = tuple(values[:count]), {}
    if code.co_flags & inspect.CO_VARARGS:
        args += tuple(values[count])
        count += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs = dict(values[count])
    return args, kwargs


def cell_contents(cell: types.CellType) -> Any:
    """What a cell holds, or None."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
