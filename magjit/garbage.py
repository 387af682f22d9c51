"""No collection of garbage while MagJIT works.

A collection goes over all objects of torch and of the user's models; a capture makes enough
objects to set off several, each of which takes longer than a small capture.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave garbage where it is; afterwards the collector is on if it was."""
    collecting = gc.isenabled()
    try:  # Ctrl-C is heard after any call, that of `disable` as well.
        gc.disable()
        yield
    finally:
        if collecting:
            gc.enable()
