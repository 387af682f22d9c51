"""Constructors of torch's first years, which no mode sees."""

from __future__ import annotations

from typing import Any

import torch

from magjit.refgraph.recorder import StateRecorder


def call_variable(
    rec: StateRecorder, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Variable(data, requires_grad)``, of old programs, detaches; torch tells no mode of it."""
    data = args[0] if args else kwargs.get("data")
    if not isinstance(data, torch.Tensor):
        rec.split("makes a Variable of something that is no tensor")
        return None
    finish = rec.operators.record_call(torch.Tensor.detach, (data,), {})

    def note(top: tuple[Any, ...]) -> None:
        finish(top[-1])
        if isinstance(top[-1], torch.Tensor) and top[-1].requires_grad and rec.broken is None:
            rec.operators.record_call(torch.Tensor.requires_grad_, (top[-1],), {})(top[-1])

    return note
