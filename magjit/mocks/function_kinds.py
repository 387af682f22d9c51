"""Functions, methods, closure cells, partial applications and the descriptors made of them."""

from __future__ import annotations

import functools
import types
from typing import Any

from magjit.mocks.ir import Apply, Const, Do, Expr, Map, Seq, SetAttr
from magjit.mocks.layouts import instance_dict, is_name, lookup
from magjit.mocks.recipes import (
    Fill,
    Kind,
    Make,
    Parts,
    Recipe,
    Shared,
    dict_items,
    exactly,
    native_is,
    shared,
    state,
    values,
)

_BY_REFERENCE = exactly(
    types.CodeType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.GenericAlias,
    types.UnionType,
)


def _is_c_function(obj: Any, cls: type) -> bool:
    """A C function that is bound to nothing that a run can make: of a module or of a class."""
    return cls is types.BuiltinFunctionType and (
        obj.__self__ is None or isinstance(obj.__self__, (types.ModuleType, type))
    )


def _function(obj: Any, parts: Parts) -> Recipe:
    """By reference if it existed before the run; where nobody knows, if no function made it."""
    code: types.CodeType = obj.__code__
    created = parts.created(obj)
    if created is False or (created is None and "<locals>" not in code.co_qualname):
        return Shared(Const(obj))
    if parts.created(obj.__globals__):
        parts.refuse("a function made in the run has globals made in the run")
    cells = obj.__closure__ or ()
    args: list[Expr] = [Const(code), Const(obj.__globals__), Const(obj.__name__), Const(None)]
    if cells:
        named = zip(code.co_freevars, cells, strict=True)
        args.append(Seq("tuple", tuple([parts.value(c, f".<{n}>") for n, c in named])))
    return Make(
        alloc=Apply(types.FunctionType, tuple(args)),
        fills=_function_state(obj, parts),
        hashes_contents=False,
    )


def _function_state(obj: Any, parts: Parts) -> tuple[Fill, ...]:
    code: types.CodeType = obj.__code__
    implied = {
        "__qualname__": code.co_qualname,
        "__module__": obj.__globals__.get("__name__"),
        "__doc__": code.co_consts[0] if code.co_consts and _is_doc(code.co_consts[0]) else None,
        "__defaults__": None,
        "__kwdefaults__": None,
        "__annotations__": {},
        "__type_params__": (),
    }
    fills: list[Fill] = []
    for name, value in implied.items():
        found = getattr(obj, name, value)
        if found is not value and not (type(found) in (str, dict, tuple) and found == value):
            fills.append(SetAttr(parts.me, name, parts.value(found, f".{name}")))
    return (*fills, *state(parts, obj))


def _is_doc(value: Any) -> bool:
    return type(value) is str


def _method(obj: Any, parts: Parts) -> Recipe:
    func = parts.value(obj.__func__, ".__func__")
    return Make(whole=Apply(types.MethodType, (func, parts.value(obj.__self__, ".__self__"))))


def _c_method(obj: Any, parts: Parts) -> Recipe:
    """A bound method of a C type: the type's descriptor binds it again."""
    descriptor = lookup(type(obj.__self__), obj.__name__)
    kinds = types.MethodDescriptorType, types.WrapperDescriptorType
    if not isinstance(descriptor, kinds):
        parts.refuse(f"a C method {obj.__name__} that its object's class does not have")
    owner = parts.value(obj.__self__, ".__self__")
    # Without the class, binding a method that takes its class crashes the interpreter.
    return Make(whole=Apply(descriptor.__get__, (owner, Const(type(obj.__self__)))))


def _cell(obj: Any, parts: Parts) -> Recipe:
    try:
        content = obj.cell_contents
    except ValueError:
        return Make(whole=Apply(types.CellType, ()), hashes_contents=False)
    value = parts.value(content, "")
    return Make(
        whole=Apply(types.CellType, (value,)),
        alloc=Apply(types.CellType, ()),
        fills=(SetAttr(parts.me, "cell_contents", value),),
    )


def _partial(obj: Any, parts: Parts) -> Recipe:
    """Set as unpickling does: the constructor would merge nested ones."""
    cls = type(obj)
    func, args, keywords = (
        lookup(functools.partial, name).__get__(obj) for name in ("func", "args", "keywords")
    )
    callee = parts.value(func, ".func")
    given = values(parts, args)
    plain = cls is functools.partial and not isinstance(func, functools.partial)
    if plain and not instance_dict(obj) and all(map(is_name, keywords)):
        named = tuple([(k, parts.value(v, f".keywords[{k!r}]")) for k, v in keywords.items()])
        return Make(whole=Apply(functools.partial, (callee, *given), named))
    new = Apply(functools.partial.__new__, (Const(cls), Const(functools.partial)))
    items = Map(dict_items(parts, keywords.items()))
    content = Seq("tuple", (callee, Seq("tuple", given), items, Const(None)))
    restore = Do(Apply(lookup(functools.partial, "__setstate__"), (parts.me, content)))
    return Make(alloc=new, fills=(restore, *state(parts, obj)))


def _wrapper(obj: Any, parts: Parts) -> Recipe:
    """A staticmethod or classmethod object."""
    cls = type(obj)
    func = parts.value(lookup(cls, "__func__").__get__(obj), ".__func__")
    return Make(whole=Apply(cls, (func,)))


def _property(obj: Any, parts: Parts) -> Recipe:
    names = ("fget", "fset", "fdel", "__doc__")
    return Make(whole=Apply(property, values(parts, [getattr(obj, name) for name in names])))


FUNCTION_KINDS = (
    Kind("C function", _is_c_function, shared, shared=True),
    Kind("code or descriptor", _BY_REFERENCE, shared, shared=True),
    Kind("function", exactly(types.FunctionType), _function),
    Kind("method", exactly(types.MethodType), _method),
    Kind(
        "method of a C type", exactly(types.BuiltinFunctionType, types.MethodWrapperType), _c_method
    ),
    Kind("cell", exactly(types.CellType), _cell),
    Kind("partial", native_is(functools.partial), _partial),
    Kind("staticmethod or classmethod", exactly(staticmethod, classmethod), _wrapper),
    Kind("property", exactly(property), _property),
)
