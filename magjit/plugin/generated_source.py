"""Give back the source text that FX keeps for every function it ever generated.

FX registers each generated source with ``linecache``, for tracebacks, and never drops it:
some 100 bytes a node and compilation.  Here it lives as long as what was compiled.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch.fx import graph_module

__all__ = ["sources_tied_to_result"]


@contextmanager
def sources_tied_to_result() -> Iterator[Callable[[Any], None]]:
    """In the block, sources are generated; it calls what it is given with their owner."""
    kept: dict[str, str] = graph_module._loader.eval_cache
    before = frozenset(kept)

    def tie(owner: Any) -> None:
        # a copy, made in one step: a collection at any other may drop what others tied
        keys = tuple([key for key in list(kept) if key not in before])
        if isinstance(owner, MethodType):
            owner = owner.__self__
        if not keys:
            return
        try:
            weakref.finalize(owner, _drop, keys).atexit = False
        except TypeError:  # an object of a kind that cannot be weakly referenced
            pass

    yield tie


def _drop(keys: tuple[str, ...]) -> None:
    for key in keys:
        graph_module._loader.eval_cache.pop(key, None)
        linecache.cache.pop(key, None)
