"""Iterators over things that can be made again, and views of dicts."""

from __future__ import annotations

import gc
import itertools
import operator
import warnings
from collections import OrderedDict
from typing import Any

from magjit.mocks.ir import Apply, Const, Do, Map
from magjit.mocks.recipes import Kind, Make, Parts, Recipe, exactly, reduced, values

_VIEWS: dict[type, Any] = {
    type({}.keys()): dict.keys,
    type({}.values()): dict.values,
    type({}.items()): dict.items,
    type(OrderedDict().keys()): OrderedDict.keys,
    type(OrderedDict().values()): OrderedDict.values,
    type(OrderedDict().items()): OrderedDict.items,
}

# Those that find their place again by an index or hold other iterators; not those over dicts and
# sets, which forget what they have passed when they are reduced.
_ITERATORS = exactly(
    type(iter([])),
    type(reversed([])),
    type(iter(())),
    type(iter(range(0))),
    type(iter(range(1 << 99))),
    type(iter("a")),
    type(iter("é")),
    type(iter(b"")),
    type(iter(bytearray())),
    type(iter(int, 0)),
    enumerate,
    zip,
    map,
    filter,
    reversed,
    itertools.accumulate,
    itertools.chain,
    itertools.combinations,
    itertools.compress,
    itertools.count,
    itertools.cycle,
    itertools.dropwhile,
    itertools.filterfalse,
    itertools.islice,
    itertools.permutations,
    itertools.product,
    itertools.repeat,
    itertools.starmap,
    itertools.takewhile,
    itertools.zip_longest,
)


def _iterator(obj: Any, parts: Parts) -> Recipe:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        func, args, *rest = reduced(parts, obj)
    if any(parts.changed(arg) for arg in args):
        parts.refuse("it iterates over an object from outside that the run changed")
    state = rest[0] if rest else None
    if func is iter and len(args) == 1 and type(iter(args[0])) is not type(obj):
        parts.refuse(f"the place of a {type(obj).__name__} cannot be found again")
    made = Apply(func, values(parts, args))
    if func is iter and state is None and len(args) == 1 and not args[0]:  # at its end
        return Make(alloc=made, fills=(Do(Apply(next, (parts.me, Const(None)))),))
    if state is None:
        return Make(whole=made)
    restore = Apply(type(obj).__setstate__, (parts.me, parts.value(state, "")))
    return Make(alloc=made, fills=(Do(restore),))


_OF_DICTS: dict[type, Any] = {
    type(iter({})): dict.keys,
    type(iter({}.values())): dict.values,
    type(iter({}.items())): dict.items,
}


def advanced(iterable: Any, count: int) -> Any:
    """An iterator that has given ``count`` items already."""
    iterator = iter(iterable)
    for _ in range(count):
        next(iterator)
    return iterator


def _dict_iterator(obj: Any, parts: Parts) -> Recipe:
    """It refers to its dict until it has ended; how much is left tells how far it is."""
    iterated = [item for item in gc.get_referents(obj) if isinstance(item, dict)]
    left = operator.length_hint(obj)
    view = _OF_DICTS[type(obj)]
    if not iterated:
        return Make(whole=Apply(advanced, (Apply(view, (Map(()),)), Const(0))))
    if parts.changed(iterated[0]):
        parts.refuse("it iterates over a dict from outside that the run changed")
    count = Const(len(iterated[0]) - left)
    return Make(whole=Apply(advanced, (Apply(view, (parts.value(iterated[0], ""),)), count)))


def _view(obj: Any, parts: Parts) -> Recipe:
    (viewed,) = gc.get_referents(obj)
    return Make(whole=Apply(_VIEWS[type(obj)], (parts.value(viewed, ""),)))


ITERATOR_KINDS = (
    Kind("iterator", _ITERATORS, _iterator),
    Kind("iterator over a dict", exactly(*_OF_DICTS), _dict_iterator),
    Kind("view of a dict", exactly(*_VIEWS), _view),
)
