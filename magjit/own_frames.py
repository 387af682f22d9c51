"""MagJIT's own frames on the stack: users are shown theirs."""

from __future__ import annotations

import sys
import types


def _is_own(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("magjit.")


def depth_of_the_call() -> int:
    """How many frames above `Controller._warn` the compiled object was called."""
    frame: types.FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and _is_own(frame):
        frame, depth = frame.f_back, depth + 1
    return depth


def users_part(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback from the first frame on that is not MagJIT's; all of it where there is none."""
    found = traceback
    while found is not None:
        if not _is_own(found.tb_frame):
            return found
        found = found.tb_next
    return traceback
