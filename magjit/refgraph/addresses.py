"""Addresses of objects, which programs read with ``id`` to tell objects apart.

Within a record they are as good as the objects, which its guard tells apart: a memo that is made,
used and dropped. A replay has other objects at other addresses, so no address may leave a record,
and none may be looked for in what comes from outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from magjit.refgraph import relations as r
from magjit.refgraph.nodes import Leaf, RefGraph

BY_ADDRESS = (object.__hash__, torch.Tensor.__hash__)
"""Hashes that are made of addresses."""
KEEP_ADDRESSES = frozenset({"copy", "dataclasses", "inspect", "reprlib"})
"""Modules that use addresses as the keys of memos only."""


def address_in(value: Any, addresses: Mapping[int, int]) -> int | None:
    """The one of some addresses that an atom is or holds, as the object that the mapping has."""
    if type(value) is int:
        return addresses.get(value)
    if type(value) in (tuple, frozenset):
        found = (address_in(part, addresses) for part in value)
        return next((address for address in found if address is not None), None)
    return None


def looked_for(graph: RefGraph, addresses: Mapping[int, int]) -> int | None:
    """An address that the run looked for in a container from outside."""
    if not addresses:
        return None
    found = (address_in(key, addresses) for node in graph for key in _keys(node.first.refs))
    direct = next((address for address in found if address is not None), None)
    if direct is None and any(_has_numbers(node.first.refs) for node in graph):
        return next(iter(addresses))
    return direct


def _keys(refs: Mapping[Any, Any]) -> Iterator[Any]:
    for relation in refs:
        if isinstance(relation, r.Item | r.Has):
            yield relation.key.key


def _has_numbers(refs: Mapping[Any, Any]) -> bool:
    """Whether all of a set was read, and numbers are in it: any may have been looked for."""
    target = refs.get(r.Members())
    return isinstance(target, Leaf) and any(type(member) is int for member in target.value)
