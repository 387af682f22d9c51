"""No collection of garbage while MagJIT works.

A collection goes over all objects of torch and of the user's models; a capture makes enough
objects to set off several, each of which takes longer than a small capture.
"""

from __future__ import annotations

import contextlib
import sys

__all__ = ["uncollected"]


def uncollected() -> contextlib.AbstractContextManager[None]:
    """Leave garbage where it is; afterwards the collector is on if it was.

    Several threads may be inside at once: the last one to leave switches it on.  Nothing happens
    before the C part is loaded, which is not done where `magjit.check_versions` forbids it.
    """
    native = sys.modules.get("magjit._C")
    if native is None:
        return contextlib.nullcontext()
    inside: contextlib.AbstractContextManager[None] = native.Uncollected()
    return inside
