"""Readable names of values, code and files; none of these functions runs a user's code."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any

import torch

from magjit.errors import Location, line_of
from magjit.refgraph.kinds import is_atom

_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHON_FOLDER = sysconfig.get_path("stdlib") + os.sep
_LONGEST = 60

# By way of the type: a metaclass may have attribute hooks of its own.
class_name: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_class_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
_GENERATED = re.compile(r"pybind11_detail_function_record\w*\.")

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
DESCRIPTORS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
)
_WRAPPERS = (classmethod, staticmethod, types.MethodType)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def is_code(obj: Any) -> bool:
    """Whether an object is a class, a module, a function or what classes hold functions in."""
    kinds = (type, types.ModuleType, *FUNCTIONS, *DESCRIPTORS, *_WRAPPERS, *_OPERATORS, property)
    return issubclass(type(obj), kinds)


def module_name(obj: Any) -> str | None:
    """The module of a piece of code, or None when it has none, as methods of builtin types."""
    kind = type(obj)
    found: Any = None
    if issubclass(kind, types.ModuleType):
        found = object.__getattribute__(obj, "__dict__").get("__name__")
    elif issubclass(kind, type):
        found = _class_module(obj)
    elif kind in FUNCTIONS:
        found = obj.__module__
    elif kind in DESCRIPTORS:
        owner = getattr(obj, "__objclass__", None)
        found = None if owner is None else _class_module(owner)
    elif (inner := _wrapped(obj)) is not None:
        return module_name(inner)
    elif issubclass(kind, _OPERATORS):
        found = "torch"
    return found if isinstance(found, str) else None


def _wrapped(obj: Any) -> Any:
    if type(obj) is property:
        return obj.fget
    if type(obj) is functools._lru_cache_wrapper:
        return obj.__dict__.get("__wrapped__")
    return obj.__func__ if type(obj) in _WRAPPERS else None


def code_name(obj: Any) -> str | None:
    """The full name of a piece of code; None for anything else."""
    kind = type(obj)
    if issubclass(kind, types.ModuleType):
        return module_name(obj)
    if issubclass(kind, type):
        name = class_name(obj)
    elif kind in FUNCTIONS or kind in DESCRIPTORS:
        name = _GENERATED.sub("", obj.__qualname__)
    elif (inner := _wrapped(obj)) is not None:
        return code_name(inner)
    elif issubclass(kind, _OPERATORS):
        return f"torch.ops.{obj}"
    else:
        return None
    module = None if kind in DESCRIPTORS else module_name(obj)
    return name if module in (None, "builtins", "__main__") else f"{module}.{name}"


def short(value: Any) -> str:
    """A value in few characters."""
    kind = type(value)
    if kind is types.CodeType:
        place = f"{short_file(value.co_filename)}:{value.co_firstlineno}"
        return f"code of {value.co_qualname}, {place}"
    name = code_name(value)
    if name is not None:
        return name
    if kind is tuple or kind is frozenset:
        inner = ", ".join(short(item) for item in list(value)[:8])
        rest = ", ..." if len(value) > 8 else "," if len(value) == 1 else ""
        return f"({inner}{rest})" if kind is tuple else f"frozenset({inner}{rest})"
    if not is_atom(value):
        return f"<{class_name(kind)}>"
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


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
