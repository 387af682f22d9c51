"""Readable paths of outside objects, such as ``Bert.__dict__['layers'][0]``.

They are made when somebody reads them, from what is kept of each node: its parent, its relation
and, of a root, a name. Nothing of the user's is kept alive for it, and no user's code runs.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from magjit.refgraph import relations as r

NAMED = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
"""Only objects of these have their names read: attribute hooks of others would run."""


ReadPlaces = dict[int | tuple[int, r.Relation], tuple[Any, int]]
"""The instruction, code and offset, that first read an object, or a value behind an edge of one."""

_MODULE_TABLES = frozenset({"._modules", "._parameters", "._buffers"})


@dataclass(frozen=True, slots=True)
class Paths:
    """Parent, relation and root name of each node, by number; where each was read."""

    steps: list[tuple[int, r.Relation, str]]
    places: ReadPlaces = field(default_factory=dict)

    def path(self, node_id: int, relation: r.Relation | None = None) -> str:
        """The first path on which a run reached a node, or what is behind an edge of it."""
        parts = [] if relation is None else [step(relation)]
        while node_id != 0:
            parent, behind, label = self.steps[node_id]
            parts.append(label or step(behind))
            node_id = parent
        return _written(reversed(parts)) or "outside"

    def is_argument(self, node_id: int) -> bool:
        """Whether a node is an argument of the call itself."""
        return isinstance(self.steps[node_id][1], (r.Arg, r.Kwarg))


def _written(parts: Iterable[str]) -> str:
    """A path as a program would write it: attributes without the dict that holds them."""
    found: list[str] = []
    for part in parts:
        name = part[2:-2]
        if part.startswith("['") and name.isidentifier() and found:
            if found[-1] == ".__dict__" or found[-1] in _MODULE_TABLES:
                found[-1] = f".{name}"
                continue
        found.append(part)
    return "".join(found)


def short(value: Any) -> str:
    """A value in few characters."""
    if isinstance(value, NAMED):
        return value.__qualname__
    text = repr(value) if type(value).__module__ == "builtins" else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def root_label(relation: r.Relation, obj: Any) -> str:
    """The name of a root; empty for any other object."""
    if not isinstance(relation, r.Root):
        return ""
    if isinstance(obj, dict):
        name = dict.get(obj, "__name__", "?")
        return f"<globals of {name if isinstance(name, str) else '?'}>"
    return obj.__qualname__ if isinstance(obj, NAMED) else f"<{type(obj).__qualname__}>"


def step(relation: r.Relation) -> str:
    """One step of a path."""
    match relation:
        case r.Arg(index=i):
            return f"args[{i}]"
        case r.Kwarg(name=name):
            return f"kwargs[{name!r}]"
        case r.InstanceDict() | r.ModuleDict():
            return ".__dict__"
        case r.Item(key=key):
            return f"[{short(key.key)}]"
        case r.Index(index=i):
            return f"[{i}]"
        case r.ClassAttr(name=name):
            return f".{name}"
        case r.SlotOf(descriptor=d) | r.CAttr(descriptor=d):
            return f".{d.__name__}"
        case r.Cell():
            return ".cell_contents"
        case r.Closure(index=i):
            return f".__closure__[{i}]"
        case _:
            return f".<{type(relation).__name__}>"
