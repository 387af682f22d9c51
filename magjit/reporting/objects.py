"""The reference graph as a reader sees it: objects, their paths, what the guard checks of them."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from magjit.refgraph import relations as r
from magjit.refgraph.kinds import CONTAINERS, is_atom
from magjit.refgraph.nodes import ABSENT, Edge, Leaf, RefGraph, ShadowNode
from magjit.reporting.content import ObjectView, Role
from magjit.reporting.names import class_name, is_code, is_library_code, module_name, short
from magjit.reporting.places import Places, is_module, step

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch"})


def object_views(graph: RefGraph, places: Places) -> list[ObjectView]:
    """One view for each node, in order of their discovery."""
    outside = ObjectView(0, 0, "outside", "", Role.OUTSIDE, "outside")
    return [outside, *(_view(graph, places, node) for node in graph.nodes[1:])]


def _view(graph: RefGraph, places: Places, node: ShadowNode) -> ObjectView:
    path = places.path(node.node_id)
    of_function = isinstance(node.relation, (r.Defaults, r.KwDefaults, r.Globals))
    hidden = of_function or places.owner(node) is not None
    return ObjectView(
        node.node_id,
        node.parent,
        _label(graph, places, node, path),
        class_name(type(node.obj)),
        _role(node),
        path,
        changed=node.changed,
        hidden=hidden,
        library=_is_library(node),
        facts=tuple(_facts(places, node)),
        links=tuple(
            target.node_id
            for target in node.first.refs.values()
            if isinstance(target, Edge) and graph.nodes[target.node_id].parent != node.node_id
        ),
    )


def _label(graph: RefGraph, places: Places, node: ShadowNode, path: str) -> str:
    """The last step of a path."""
    if node.parent == 0:
        return path
    above = graph.nodes[node.parent]
    owner = places.owner(above)
    prefix = places.path(above.node_id if owner is None else owner)
    rest = path.removeprefix(prefix)
    if not rest or rest == path:
        return step(node.relation, above.obj) or "contents"
    return rest


def _role(node: ShadowNode) -> Role:
    return next(role for applies, role in _ROLES if applies(node))


_ROLES: list[tuple[Any, Role]] = [
    (lambda node: issubclass(type(node.obj), torch.Tensor), Role.TENSOR),
    (lambda node: is_module(node.obj), Role.MODULE),
    (lambda node: isinstance(node.relation, (r.Arg, r.Kwarg)), Role.ARGUMENT),
    (lambda node: _is_code(node.obj), Role.CODE),
    (lambda node: issubclass(type(node.obj), CONTAINERS), Role.CONTAINER),
    (lambda node: True, Role.OBJECT),
]


def _is_library(node: ShadowNode) -> bool:
    """Whether a function, class or namespace is torch's or Python's own."""
    obj = node.obj
    if not _is_code(obj):
        return node.fixed and is_atom(obj)
    if type(obj) is types.FunctionType:
        return is_library_code(obj.__code__)
    name = obj.get("__name__") if type(obj) is dict else module_name(obj)
    return not isinstance(name, str) or name.split(".")[0] in _LIBRARIES


def _is_code(obj: Any) -> bool:
    """Whether an object is code, or the globals of a module."""
    return is_code(obj) or (type(obj) is dict and isinstance(obj.get("__name__"), str))


def _facts(places: Places, node: ShadowNode) -> list[str]:
    if issubclass(type(node.obj), torch.Tensor):
        return [tensor_text(node.obj)]
    found = []
    for relation, target in node.first.refs.items():
        if isinstance(target, Leaf) and not isinstance(
            relation, (r.Code, r.Defaults, r.KwDefaults)
        ):
            found.append(f"{_fact_name(relation, node)} {_value(target)}")
    return found + [f"{_fact_name(relation, node)} is written" for relation in node.written]


def _fact_name(relation: r.Relation, node: ShadowNode) -> str:
    match relation:
        case r.Length() | r.Keys() | r.Members() | r.NonEmpty() | r.TypeIs():
            return type(relation).__name__.lower()
        case r.Item(key=key) | r.Has(key=key) if isinstance(
            node.relation, (r.InstanceDict, r.ModuleDict)
        ):
            return f".{key.key}"
        case r.Cell():
            return "contents"
        case _:
            return step(relation, node.obj)


def _value(target: Leaf) -> str:
    return "is not there" if target.value is ABSENT else f"= {short(target.value)}"


def tensor_text(tensor: torch.Tensor) -> str:
    """Type, dtype, shape and what else is not the default of a tensor."""
    with torch._C.DisableTorchFunction():
        parts = [type(tensor).__name__, str(tensor.dtype).removeprefix("torch.")]
        parts.append(str(tuple(tensor.shape)))
        if tensor.device.type != "cpu":
            parts.append(str(tensor.device))
        if tensor.requires_grad:
            parts.append("requires_grad")
    return " ".join(parts)
