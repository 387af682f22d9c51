"""Frames of the program: what a followed one is known by, and what any begins with."""

from __future__ import annotations

import inspect
import os
import types
from typing import Any

import torch

from magjit.bytecode import CodeInfo, decode
from magjit.refgraph.nodes import ShadowNode

OWN_FOLDERS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
"""MagJIT's own code and torch's: not the user's."""


class FrameState:
    """A followed frame: what handlers need of it.

    ``offset`` is that of its last event; ``is_users``: it is neither torch's nor MagJIT's.
    """

    __slots__ = (
        *("builtins", "caller", "calling", "code", "func", "func_node", "globals"),
        *("entered", "globals_node", "info", "is_users", "offset"),
    )

    def __init__(
        self,
        code: types.CodeType,
        func: Any,
        globals_: dict[str, Any],
        builtins: dict[str, Any],
        globals_node: ShadowNode | None,
        func_node: ShadowNode | None,
        caller: FrameState | None,
    ) -> None:
        self.caller = caller
        self.offset = -1
        self.is_users = not code.co_filename.startswith(OWN_FOLDERS)
        self.calling: Any = None
        self.entered = False
        self.code = code
        self.info: CodeInfo = decode(code)
        self.func = func
        self.globals = globals_
        self.builtins = builtins
        self.globals_node = globals_node
        self.func_node = func_node


def arguments(code: types.CodeType, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a function is called with, of the local variables that it begins with."""
    values = [
        cell_contents(value)
        if name in code.co_cellvars and isinstance(value, types.CellType)
        else value
        for name, value in zip(code.co_varnames, values, strict=False)
    ]
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
