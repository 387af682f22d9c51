"""The frame whose instruction is being handled, for handlers that change its value stack."""

from __future__ import annotations

import sys
import types
from typing import Any

from magjit.refgraph.recorder import StateRecorder

CALLABLE_DEPTH = 1 if sys.version_info >= (3, 13) else 0
"""How far below its arguments a called function lies on the stack."""


def running_frame(code: Any) -> types.FrameType | None:
    """The innermost frame of a code object: the one whose event is being handled."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def observed_frame(rec: StateRecorder) -> types.FrameType | None:
    """The frame whose call instruction is being handled, or None when C code made the call."""
    if rec.state is None:
        return None
    frame = running_frame(rec.state.code)
    if frame is None:
        return None
    return frame if rec.state.info.instrs[rec.offset].opname.startswith("CALL") else None
