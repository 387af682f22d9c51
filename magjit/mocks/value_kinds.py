"""Every kind of value that a mock can make again: an ordered table, the first match decides.

Atoms (numbers, strings and the like: `recipes.ATOMS`) come before the table; all replays share
them.

Values of the shared kinds exist once and are immutable, or the program has them by reference; all
others are made anew at every replay from the state that they had at the end of the run. No
constructor and no other code of a user's class runs.
"""

from __future__ import annotations

import enum
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from magjit.mocks.function_kinds import FUNCTION_KINDS
from magjit.mocks.ir import Apply, Const, Do, Expr, Map, Seq, SetAttr
from magjit.mocks.iterator_kinds import ITERATOR_KINDS
from magjit.mocks.layouts import layout_of, lookup, mro, namespace
from magjit.mocks.opaque_kinds import OPAQUE_KINDS, REDUCED_KINDS
from magjit.mocks.recipes import (
    Fill,
    Kind,
    Make,
    Parts,
    Recipe,
    Shared,
    dict_items,
    exactly,
    is_atom,
    named,
    native_is,
    shared,
    simple,
    state,
    values,
)

_BY_NAME = (
    *(f"torch.{name}" for name in ("dtype", "device", "layout", "memory_format", "qscheme")),
    *(f"torch.{name}" for name in ("finfo", "iinfo", "Size")),
    *(f"torch._ops.{name}" for name in ("OpOverload", "OpOverloadPacket", "_OpNamespace")),
    *(f"datetime.{name}" for name in ("date", "time", "datetime", "timedelta", "timezone")),
    "re.Pattern",
    "decimal.Decimal",
    "typing.TypeVar",
    "typing._GenericAlias",
    "typing._SpecialForm",
    "typing._UnionGenericAlias",
    "numpy.ufunc",
    "numpy._ArrayFunctionDispatcher",
)

_MANY = 16  # constants of a container that are copied rather than spelled out


def _is_class(obj: Any, cls: type) -> bool:
    return issubclass(cls, type)


def _is_enum(obj: Any, cls: type) -> bool:
    return issubclass(type(cls), enum.EnumMeta)


def _is_numpy_scalar(obj: Any, cls: type) -> bool:
    return any(base.__module__ == "numpy" and base.__name__ == "generic" for base in mro(cls)) and (
        cls.__name__ not in ("void", "object_")
    )


def _is_numpy_dtype(obj: Any, cls: type) -> bool:
    return any(base.__module__ == "numpy" and base.__name__ == "dtype" for base in mro(cls))


def _class(obj: Any, parts: Parts) -> Recipe:
    if parts.created(obj):
        parts.refuse(
            f"class {obj.__qualname__} is made in the run",
            "define the class outside the compiled function",
        )
    return Shared(Const(obj))


def _module(obj: Any, parts: Parts) -> Recipe:
    if parts.created(obj):
        parts.refuse("a module is made in the run", "import it outside the compiled function")
    return Shared(Const(obj))


def _tuple(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    if cls is tuple:
        items = values(parts, obj)
        if is_atom(obj) and all(isinstance(item, Const) for item in items):
            return Shared(Const(obj))
        return Make(whole=Seq("tuple", items))
    contents = Seq("tuple", values(parts, tuple.__iter__(obj)))
    return simple(Apply(tuple.__new__, (Const(cls), contents)), state(parts, obj))


def _is_struct_sequence(obj: Any, cls: type) -> bool:
    return issubclass(cls, tuple) and type(namespace(cls).get("n_sequence_fields")) is int


def _struct_sequence(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    _, (sequence, hidden) = lookup(cls, "__reduce__")(obj)
    if is_atom(sequence) and is_atom(tuple(hidden.values())):
        return Shared(Const(obj))
    items: tuple[Expr, ...] = (Seq("tuple", values(parts, sequence)),)
    if hidden:  # fields that are reached by name only
        items += (Map(dict_items(parts, hidden.items())),)
    return Make(whole=Apply(cls, items))


def _list(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    if cls is list and len(obj) > _MANY and is_atom(tuple(obj)):
        return Make(whole=Apply(list, (Const(tuple(obj)),)))
    items = values(parts, list.__iter__(obj))
    extend = Do(Apply(list.extend, (parts.me, Seq("tuple", items))))
    if cls is list:
        return Make(whole=Seq("list", items), alloc=Seq("list", ()), fills=(extend,))
    return Make(
        alloc=Apply(list.__new__, (Const(cls),)),
        fills=((extend,) if items else ()) + state(parts, obj),
        hashes_contents=not layout_of(cls).identity_hash,
    )


def _dict(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    if cls is dict and len(obj) > _MANY and is_atom((*obj, *obj.values())):
        return Make(whole=Apply(dict.copy, (Const(dict(obj)),)))
    items = Map(dict_items(parts, dict.items(obj)))
    update = Do(Apply(dict.update, (parts.me, items)))
    if cls is dict:
        return Make(whole=items, alloc=Map(()), fills=(update,))
    return Make(
        alloc=Apply(dict.__new__, (Const(cls),)),
        fills=((update,) if items.items else ()) + state(parts, obj),
        hashes_contents=not layout_of(cls).identity_hash,
    )


def ordered_items(obj: OrderedDict[Any, Any]) -> list[tuple[Any, Any]]:
    """Keys and values in the order of the OrderedDict, which is not that of the dict under it."""
    return [(key, dict.__getitem__(obj, key)) for key in OrderedDict.__iter__(obj)]


def _ordered_dict(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    items = dict_items(parts, ordered_items(obj))
    rest = state(parts, obj)
    put = OrderedDict.__setitem__
    fills = tuple([Do(Apply(put, (parts.me, k, v), hashed=(k,))) for k, v in items])
    if cls is OrderedDict and not rest:
        whole = Apply(OrderedDict, (Map(items),) if items else ())
        return Make(whole=whole, alloc=Apply(OrderedDict, ()), fills=fills)
    alloc = Apply(OrderedDict.__new__, (Const(cls),))
    return Make(alloc=alloc, fills=fills + rest, hashes_contents=not layout_of(cls).identity_hash)


def _default_dict(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    member = lookup(defaultdict, "default_factory")
    factory = parts.value(member.__get__(obj), ".default_factory")
    items = Map(dict_items(parts, dict.items(obj)))
    rest = state(parts, obj)
    fills = (
        Do(Apply(member.__set__, (parts.me, factory))),
        Do(Apply(dict.update, (parts.me, items))),
        *rest,
    )
    whole = Apply(defaultdict, (factory, items)) if cls is defaultdict and not rest else None
    return Make(whole=whole, alloc=Apply(defaultdict.__new__, (Const(cls),)), fills=fills)


def _set(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    if cls is set and len(obj) > _MANY and is_atom(tuple(obj)):
        return Make(whole=Apply(set, (Const(frozenset(obj)),)))
    items = values(parts, set.__iter__(obj))
    update = Do(Apply(set.update, (parts.me, Seq("tuple", items)), hashed=items))
    if cls is set:
        return Make(whole=Seq("set", items), alloc=Seq("set", ()), fills=(update,))
    return Make(
        alloc=Apply(set.__new__, (Const(cls),)),
        fills=(update, *state(parts, obj)),
        hashes_contents=not layout_of(cls).identity_hash,
    )


def _frozenset(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    if cls is frozenset and is_atom(obj):
        return Shared(Const(obj))
    items = values(parts, frozenset.__iter__(obj))
    content = Seq("tuple", items)
    if cls is frozenset:
        return Make(whole=Apply(frozenset, (content,), hashed=items))
    new = Apply(frozenset.__new__, (Const(cls), content), hashed=items)
    return simple(new, state(parts, obj))


def _deque(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    items = Seq("tuple", values(parts, deque.__iter__(obj)))
    maxlen = Const(lookup(deque, "maxlen").__get__(obj))
    rest = state(parts, obj)
    if cls is deque and not rest:
        whole = Apply(deque, (items,) if maxlen.value is None else (items, maxlen))
        extend = Do(Apply(deque.extend, (parts.me, items)))
        alloc = Apply(deque, (Const(()), maxlen))
        return Make(whole=whole, alloc=alloc, fills=(extend,))
    fill = Do(Apply(deque.__init__, (parts.me, items, maxlen)))
    return Make(alloc=Apply(deque.__new__, (Const(cls),)), fills=(fill, *rest))


_PLAIN_VALUE: dict[type, Callable[[Any], Any]] = {
    int: int.__index__,
    float: float.__float__,
    complex: lambda obj: complex(
        lookup(complex, "real").__get__(obj), lookup(complex, "imag").__get__(obj)
    ),
    str: str.__str__,
    bytes: lambda obj: bytes.__getitem__(obj, slice(None)),
}


def _atom_subclass(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    native = layout_of(cls).native
    plain = _PLAIN_VALUE[native](obj)
    return simple(Apply(native.__new__, (Const(cls), Const(plain))), state(parts, obj))


def _bytearray(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    content = Const(bytes(memoryview(obj)))
    if cls is bytearray:
        return Make(whole=Apply(bytearray, (content,)))
    fill = Do(Apply(bytearray.__init__, (parts.me, content)))
    return Make(alloc=Apply(bytearray.__new__, (Const(cls),)), fills=(fill, *state(parts, obj)))


def _object(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    if cls is object:
        return Make(whole=Apply(object, ()), hashes_contents=False)
    if parts.created(cls):
        parts.refuse(
            f"its class {cls.__qualname__} is made in the run",
            "define the class outside the compiled function",
        )
    recipe = simple(Apply(object.__new__, (Const(cls),)), state(parts, obj))
    recipe.hashes_contents = not layout_of(cls).identity_hash
    return recipe


def _namespace(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    new = Apply(cls, ()) if cls is types.SimpleNamespace else None
    alloc = new or Apply(types.SimpleNamespace.__new__, (Const(cls),))
    return simple(alloc, state(parts, obj))


def _mapping_proxy(obj: Any, parts: Parts) -> Recipe:
    (mapping,) = gc.get_referents(obj)
    return Make(whole=Apply(types.MappingProxyType, (parts.value(mapping, ""),)))


def _weak_reference(obj: Any, parts: Parts) -> Recipe:
    cls = type(obj)
    target = weakref.ref.__call__(obj)
    if target is None:
        parts.refuse("a weak reference whose object is gone")
    callback = lookup(weakref.ref, "__callback__").__get__(obj)
    args: tuple[Expr, ...] = (parts.value(target, "()"),)
    if callback is not None:
        args += (parts.value(callback, ".__callback__"),)
    if cls is weakref.ref:
        return Make(whole=Apply(weakref.ref, args))
    return simple(Apply(weakref.ref.__new__, (Const(cls), *args)), state(parts, obj))


# Set by the steps of their own, by ``__new__`` from the arguments, or dropped.
_IMPLICIT = frozenset(
    {"__dict__", "__traceback__", "__cause__", "__context__", "args", "message", "exceptions"}
)


def _is_exception(obj: Any, cls: type) -> bool:
    return issubclass(cls, BaseException)


def _exception(obj: Any, parts: Parts) -> Recipe:
    """The arguments, the fields that C keeps, cause and context; the traceback is dropped."""
    cls = type(obj)
    native = layout_of(cls).native
    args = lookup(BaseException, "args").__get__(obj)
    alloc = Apply(native.__new__, (Const(cls), *values(parts, args)))
    fills: list[Fill] = []
    for name in ("__cause__", "__context__"):  # setting the cause sets __suppress_context__
        value = lookup(BaseException, name).__get__(obj)
        if value is not None:
            fills.append(SetAttr(parts.me, name, parts.value(value, f".{name}")))
    for base in mro(native):
        if base is object:
            continue
        for name, field in namespace(base).items():
            kind = types.MemberDescriptorType, types.GetSetDescriptorType
            if not isinstance(field, kind) or name in _IMPLICIT:
                continue
            fills += _exception_field(obj, parts, name, field)
    return simple(alloc, (*fills, *state(parts, obj)))


def _exception_field(obj: Any, parts: Parts, name: str, field: Any) -> list[Do]:
    try:
        value = field.__get__(obj)
    except AttributeError:
        return []
    if value is None or value is False:
        return []
    return [Do(Apply(field.__set__, (parts.me, parts.value(value, f".{name}"))))]


SHARED_KINDS = (
    Kind("class", _is_class, _class, shared=True),
    Kind("enum member", _is_enum, shared, shared=True),
    Kind("module", native_is(types.ModuleType), _module, shared=True),
    Kind(
        "constant of torch, NumPy, typing or the standard library",
        named(*_BY_NAME),
        shared,
        shared=True,
    ),
    Kind("NumPy scalar", _is_numpy_scalar, shared, shared=True),
    Kind("NumPy dtype", _is_numpy_dtype, shared, shared=True),
)

VALUE_KINDS: tuple[Kind, ...] = (
    *SHARED_KINDS,
    *FUNCTION_KINDS,
    Kind("struct sequence", _is_struct_sequence, _struct_sequence),
    Kind("tuple", native_is(tuple), _tuple),
    Kind("list", native_is(list), _list),
    Kind("OrderedDict", native_is(OrderedDict), _ordered_dict),
    Kind("defaultdict", native_is(defaultdict), _default_dict),
    Kind("dict", native_is(dict), _dict),
    Kind("set", native_is(set), _set),
    Kind("frozenset", native_is(frozenset), _frozenset),
    Kind("deque", native_is(deque), _deque),
    Kind("number or string of a subclass", native_is(*_PLAIN_VALUE), _atom_subclass),
    Kind("bytearray", native_is(bytearray), _bytearray),
    Kind("instance of a Python class", native_is(object), _object),
    Kind("SimpleNamespace", native_is(types.SimpleNamespace), _namespace),
    Kind("mappingproxy", exactly(types.MappingProxyType), _mapping_proxy),
    Kind("weak reference", native_is(weakref.ref), _weak_reference),
    Kind("exception", _is_exception, _exception),
    *ITERATOR_KINDS,
    *OPAQUE_KINDS,
    *REDUCED_KINDS,
)

# The first match for exact types that are frequent, so that the table is not walked for them.
_FREQUENT: dict[type, Kind] = {
    cls: next(kind for kind in VALUE_KINDS if kind.matches(cls(), cls))
    for cls in (tuple, list, dict, set, OrderedDict)
}


def kind_of(obj: Any) -> Kind:
    """The kind of an object that is no tensor: the first row of the table that matches."""
    cls = type(obj)
    found = _FREQUENT.get(cls)
    if found is not None:
        return found
    return next(kind for kind in VALUE_KINDS if kind.matches(obj, cls))
