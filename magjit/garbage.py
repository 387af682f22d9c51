"""No collection of garbage while MagJIT works.

A collection goes over all objects of torch and of the user's models; a capture makes enough
objects to set off several, each of which takes longer than a small capture.
"""

from __future__ import annotations

import contextlib

try:
    from magjit import _C
except ImportError:  # an interpreter for which MagJIT is not built, as `check_versions` says
    _C = None  # type: ignore[assignment]

__all__ = ["uncollected"]


def uncollected() -> contextlib.AbstractContextManager[None]:
    """Leave garbage where it is; afterwards the collector is on if it was.

    Several threads may be inside at once: the last one to leave switches it on.
    """
    return contextlib.nullcontext() if _C is None else _C.Uncollected()
