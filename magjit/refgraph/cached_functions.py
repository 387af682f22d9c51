"""Functions with ``functools.lru_cache``: what they remember, they would return again.

The function below is not followed, not even in the call that fills the cache: what it reads is no
part of what a later call depends on. That is the cache itself, so the guard asks it: it calls the
function as the program would, and wants the result of the capture, without a miss. What is not
looked up by value, or may be another object at each call, would miss; such a call is a split. A
cache that the run itself has made is new at each call: its function is followed like any other.
"""

from __future__ import annotations

import types
from typing import Any

from magjit.refgraph.addresses import BY_ADDRESS
from magjit.refgraph.cached_calls import CachedCall, name_of
from magjit.refgraph.kinds import class_lookup, is_atom, is_constant_object
from magjit.refgraph.nodes import ShadowNode
from magjit.refgraph.python_specials import opaque_call
from magjit.refgraph.recorder import LIBRARIES, StateRecorder


def cached_call(
    rec: StateRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The verdict for a call of a function with a cache, whose arguments have been opened."""
    own = rec.graph.node_of(func)
    if own is None:
        return None
    nodes: dict[int, int] = {} if own.fixed else {0: own.node_id}
    for at, value in enumerate((*args, *kwargs.values()), 1):
        if _is_the_same(rec, value):
            continue
        node = rec.graph.node_of(value)
        if node is None or not _may_be_found(rec, value):
            rec.split(f"calls {name_of(func)} with what its lru_cache may not find again")
            return None
        nodes[at] = node.node_id
    call = CachedCall(func, args, kwargs, nodes)
    module = (getattr(func, "__module__", None) or "").partition(".")[0]
    if module not in LIBRARIES:
        rec.asks_cache(call)

    def keep(top: tuple[Any, ...]) -> None:
        call.returned(top[-1])
        if not is_atom(top[-1]):
            rec.root(top[-1])

    return opaque_call(rec, keep)


def _is_the_same(rec: StateRecorder, value: Any) -> bool:
    """Whether a later call has the very same value, or an equal one of no identity."""
    if is_atom(value) or is_constant_object(value):
        return True
    node = rec.graph.node_of(value)
    if node is None:
        return type(value) in (tuple, frozenset) and all(_is_the_same(rec, part) for part in value)
    return node.fixed or (isinstance(value, types.FunctionType) and not node.structural)


def _may_be_found(rec: StateRecorder, value: Any) -> bool:
    """Whether an object from outside is likely to be one that the cache knows, at a later call.

    Arguments that have nothing but their identity are new objects too often.
    """
    if type(value) in (tuple, frozenset):
        return all(_is_the_same(rec, part) or _may_be_found(rec, part) for part in value)
    node: ShadowNode | None = rec.graph.node_of(value)
    if class_lookup(type(value), "__hash__") in BY_ADDRESS:
        return node is not None and not node.structural
    return True
