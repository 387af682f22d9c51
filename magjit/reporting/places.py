"""Readable names of places: of objects as the program would write them, of lines of code."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import types
from typing import Any

import torch

from magjit.errors import Location
from magjit.refgraph import relations as r
from magjit.refgraph.nodes import RefGraph, ShadowNode

_MODULE_TABLES = ("_modules", "_parameters", "_buffers")
_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHON_FOLDER = sysconfig.get_path("stdlib") + os.sep


class Places:
    """Paths of the objects of one reference graph: ``model.layers[0].weight``.

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
        if node.node_id == 1 and isinstance(obj, torch.nn.Module):
            return "model"
        if isinstance(obj, types.ModuleType):
            return obj.__name__
        if isinstance(obj, dict):
            return f"globals of {dict.get(obj, '__name__', '?')}"
        return code_name(obj) or short(obj)

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
            case _:
                return self.path(node_id) + step(relation, node.obj)

    def _item(self, node: ShadowNode, key: Any) -> str:
        owner = self.owner(node)
        if owner is not None and isinstance(key, str):
            path = self.path(owner)
            return f"{path}[{key}]" if key.isdigit() else f"{path}.{key}"
        name = dict.get(node.obj, "__name__") if isinstance(node.obj, dict) else None
        if isinstance(node.relation, r.Root) and isinstance(name, str):
            return f"{name}.{key}"
        return f"{self.path(node.node_id)}[{short(key)}]"

    def owner(self, node: ShadowNode) -> int | None:
        """The object whose attributes a dict holds, or None for any other dict."""
        if isinstance(node.relation, (r.InstanceDict, r.ModuleDict)):
            return node.parent
        if isinstance(node.relation, r.Item) and node.relation.key.key in _MODULE_TABLES:
            above = self._graph.nodes[node.parent]
            owner = self._graph.nodes[above.parent]
            if isinstance(above.relation, r.InstanceDict) and is_module(owner.obj):
                return owner.node_id
        return None


def is_module(obj: Any) -> bool:
    """Whether an object is an ``nn.Module``, by its real type: proxies run user code if asked."""
    return issubclass(type(obj), torch.nn.Module)


_NAMED = (type, types.FunctionType, types.GetSetDescriptorType, types.MemberDescriptorType)
_GENERATED = re.compile(r"pybind11_detail_function_record\w*\.")


def code_name(obj: Any) -> str | None:
    """The full name of a function, class, descriptor or C callable."""
    if not isinstance(obj, _NAMED) and not callable(obj):
        return None
    try:
        name = obj.__qualname__
        module = getattr(obj, "__module__", None)
    except Exception:  # an instance whose class has a `__getattr__` of its own
        return None
    if not isinstance(name, str):
        return None
    name = _GENERATED.sub("", name)
    plain = not isinstance(module, str) or module in ("builtins", "__main__")
    return name if plain else f"{module}.{name}"


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
            names = owner.__code__.co_freevars if isinstance(owner, types.FunctionType) else ()
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


def short(value: Any) -> str:
    """A value in few characters, without running a user's code."""
    kind = type(value)
    if isinstance(value, types.CodeType):
        return f"code of {value.co_qualname}, {short_file(value.co_filename)}:{_first(value)}"
    name = code_name(value)
    if name is not None:
        return name
    if kind.__module__ not in ("builtins", "torch") or kind in (dict, list, set):
        return f"<{kind.__qualname__}>"
    if issubclass(kind, (tuple, frozenset)):
        inner = ", ".join(short(item) for item in list(value)[:8])
        rest = ", ..." if len(value) > 8 else "," if len(value) == 1 else ""
        return f"({inner}{rest})"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _first(code: types.CodeType) -> int:
    return code.co_firstlineno


def line_of(code: types.CodeType, offset: int) -> int:
    """The line of an instruction."""
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            return number
    return code.co_firstlineno


def location_of(code: types.CodeType, offset: int) -> Location:
    """The place of an instruction, with a short file name."""
    return Location(short_file(code.co_filename), line_of(code, offset), code.co_qualname)


def short_file(filename: str) -> str:
    """A file name as short as it can be and still be found: from here, or from an import path."""
    here = os.getcwd() + os.sep
    if filename.startswith(here):
        return filename[len(here) :]
    folders = [path.rstrip(os.sep) + os.sep for path in sys.path if path]
    matching = [folder for folder in folders if filename.startswith(folder)]
    return filename[len(max(matching, key=len)) :] if matching else filename


def is_library_code(code: types.CodeType) -> bool:
    """Whether code belongs to torch, to Python or to MagJIT, not to the program."""
    name = code.co_filename
    if name.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<frozen")):
        return True
    return name.startswith(_PYTHON_FOLDER) and "site-packages" not in name
