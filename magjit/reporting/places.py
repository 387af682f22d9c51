"""Paths of objects, as the program would write them: ``model.layers[0].weight``."""

from __future__ import annotations

import types
from functools import cached_property
from typing import Any

import torch

from magjit.refgraph import relations as r
from magjit.refgraph.kinds import MODULE_TABLES
from magjit.refgraph.nodes import RefGraph, ShadowNode
from magjit.reporting.names import short


class Places:
    """Paths of the objects of one reference graph.

    The tables in which an ``nn.Module`` keeps its parts, and each ``__dict__``, are left out of
    a path: the program does not write them either.
    """

    def __init__(self, graph: RefGraph) -> None:
        self._graph = graph
        self._paths: dict[int, str] = {0: ""}

    def path(self, node_id: int) -> str:
        """The path of an object, by number."""
        pending = []
        while node_id not in self._paths:
            pending.append(node_id)
            node_id = self._graph.nodes[node_id].parent
        for node_id in reversed(pending):
            node = self._graph.nodes[node_id]
            found = self.root(node) if node.parent == 0 else None
            self._paths[node_id] = found or self.edge(node.parent, node.relation)
        return self._paths[pending[0] if pending else node_id]

    def root(self, node: ShadowNode) -> str | None:
        """The name of an object that is the same at every call; None for an argument."""
        if not isinstance(node.relation, r.Root):
            return None
        obj = node.obj
        if node.node_id == 1 and is_module(obj):
            return "model"
        if type(obj) is dict and isinstance(name := obj.get("__name__"), str):
            return f"globals of {name}"
        if type(obj) is types.CellType:
            return self._variables.get(id(obj), "<cell>")
        return short(obj)

    @cached_property
    def _variables(self) -> dict[int, str]:
        """Closure cells, by the name that they have in the first function that holds them."""
        found: dict[int, str] = {}
        for node in self._graph.nodes:
            if type(node.obj) is types.FunctionType:
                for name, cell in zip(
                    node.obj.__code__.co_freevars, node.obj.__closure__ or (), strict=True
                ):
                    found.setdefault(id(cell), f"{node.obj.__name__}.<{name}>")
        return found

    def edge(self, node_id: int, relation: r.Relation) -> str:
        """The path of what an object holds behind a relation."""
        node = self._graph.nodes[node_id]
        match relation:
            case r.Arg(index=index):
                return f"args[{index}]"
            case r.Kwarg(name=name):
                return f"kwargs[{name!r}]"
            case r.Item(key=key) | r.Has(key=key):
                return self._item(node, key.key)
            case r.Closure(index=index) if type(node.obj) is types.FunctionType:
                cell = (node.obj.__closure__ or ())[index : index + 1]
                known = self._variables.get(id(cell[0])) if cell else None
                return known or self.path(node_id) + step(relation, node.obj)
            case _:
                return self.path(node_id) + step(relation, node.obj)

    def _item(self, node: ShadowNode, key: Any) -> str:
        owner = self.owner(node)
        if owner is not None and isinstance(key, str):
            path = self.path(owner)
            return f"{path}[{key}]" if key.isdigit() else f"{path}.{key}"
        name = node.obj.get("__name__") if type(node.obj) is dict else None
        if isinstance(node.relation, r.Root) and isinstance(name, str):
            return f"{name}.{key}"
        return f"{self.path(node.node_id)}[{short(key)}]"

    def owner(self, node: ShadowNode) -> int | None:
        """The object whose attributes a dict holds, or None for any other dict."""
        if isinstance(node.relation, (r.InstanceDict, r.ModuleDict)):
            return node.parent
        if isinstance(node.relation, r.Item) and node.relation.key.key in MODULE_TABLES:
            above = self._graph.nodes[node.parent]
            owner = self._graph.nodes[above.parent]
            if isinstance(above.relation, r.InstanceDict) and is_module(owner.obj):
                return owner.node_id
        return None


def is_module(obj: Any) -> bool:
    """Whether an object is an ``nn.Module``, by its real type: proxies run user code if asked."""
    return issubclass(type(obj), torch.nn.Module)


def step(relation: r.Relation, owner: Any) -> str:
    """How a path goes on from an object along a relation."""
    match relation:
        case r.InstanceDict() | r.ModuleDict():
            return ".__dict__"
        case r.Item(key=key) | r.Has(key=key):
            return f"[{short(key.key)}]"
        case r.Index(index=index):
            return f"[{index}]"
        case r.ClassAttr(name=name):
            return f".{name}"
        case r.SlotOf(descriptor=descriptor) | r.CAttr(descriptor=descriptor):
            return f".{descriptor.__name__}"
        case r.CResult(descriptor=descriptor):
            return f".{descriptor.__name__}()"
        case r.Closure(index=index):
            names = owner.__code__.co_freevars if type(owner) is types.FunctionType else ()
            return f".<{names[index]}>" if index < len(names) else f".<cell {index}>"
        case r.Cell():
            return ""
        case _:
            return _STEPS.get(type(relation), f".<{type(relation).__name__}>")


_STEPS: dict[type[r.Relation], str] = {
    r.Globals: ".__globals__",
    r.Defaults: ".__defaults__",
    r.KwDefaults: ".__kwdefaults__",
    r.MethodFunc: ".__func__",
    r.MethodSelf: ".__self__",
    r.Referent: "()",
    r.ContextValue: ".get()",
}
