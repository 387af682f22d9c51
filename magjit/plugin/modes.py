"""Modes of torch around a graph: one that fails leaves again what it had entered."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.fx import Interpreter

__all__ = ["has_saved_tensor_hooks", "leave_modes", "leave_modes_of"]

_GENERATED = "<eval_with_key>"
"""What torch.fx calls the files of generated code."""


def leave_modes(error: BaseException, grad_enabled: bool) -> None:
    """Put grad mode, inference mode and autocast back as they were when the graph was called.

    Generated code has no ``with`` blocks, but what it has entered and not left is still held by a
    variable of its frame.

    Args:
        error: what the graph raised; the frames of its traceback are looked at.
        grad_enabled: grad mode before the call.
    """
    for frame in _graph_frames(error):
        _leave(frame.f_locals.values())
    _put_back(grad_enabled)


def leave_modes_of(run: Interpreter, grad_enabled: bool) -> None:
    """The same of a graph that has run node by node, perhaps not to its end."""
    _leave(run.env.values())  # of which a run drops what is used no more
    _put_back(grad_enabled)


def _put_back(grad_enabled: bool) -> None:
    if torch.is_grad_enabled() != grad_enabled:
        torch._C._set_grad_enabled(grad_enabled)


def _leave(values: Iterable[Any]) -> None:
    for value in reversed(list(values)):
        if isinstance(value, (autocast, torch._C._InferenceMode)):
            value.__exit__(None, None, None)


def has_saved_tensor_hooks() -> bool:
    """Whether operators call Python functions of the caller's for each tensor that they save."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _graph_frames(error: BaseException) -> Iterator[types.FrameType]:
    """Frames of generated graphs, innermost first."""
    found = []
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename.startswith(_GENERATED):
            found.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return reversed(found)
