"""The steps that make a recorded change of an outside object again.

They write as little as the difference asks for: a list that the run only appended to is appended
to, so that the guard need not know what else it holds. Methods of the builtin types are used, so
that methods of a user's subclass, which the run has followed, do not run again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

from magjit.mocks.ir import Apply, Const, Do, Expr, Ref, Seq, SetAttr, SetItem, Step
from magjit.mocks.layouts import instance_dict, is_name, layout_of
from magjit.mocks.recipes import get_dict, is_atom
from magjit.mocks.writes import (
    DELETED,
    AttrWrite,
    Call,
    CellWrite,
    ContainerState,
    GlobalWrite,
    ItemWrite,
    SlotWrite,
    TensorAttrWrite,
    Write,
    changed_region,
    is_same,
)


class Context(Protocol):
    """What effects need of the plan builder."""

    def target(self, obj: Any) -> Expr | None:
        """The changed object, or None if the run made it."""

    def value(self, obj: Any, label: str) -> Expr:
        """A value that is written; ``label`` is its readable path."""

    def refuse_change(self, obj: Any, reason: str) -> NoReturn:
        """Raise `Unrebuildable` for an object whose change cannot be made again."""


def effect_steps(write: Write, context: Context) -> list[Step]:
    """The steps of one write; none if its target was made in the run."""
    if isinstance(write, Call):
        return [_call(write, context)]
    target = context.target(write.target)
    if target is None and isinstance(write, GlobalWrite):
        target = Const(write.target)
    if target is None:
        return []
    match write:
        case AttrWrite():
            return _attr(write, target, context)
        case SlotWrite():
            return _slot(write, target, context)
        case ItemWrite(target=obj, key=key, value=value, may_lack=may_lack):
            return [_item(obj, target, key, value, context, may_lack=may_lack)]
        case GlobalWrite(target=obj, name=name, value=value):
            return [_item(obj, target, name, value, context)]
        case CellWrite():
            return _cell(write, target, context)
        case TensorAttrWrite(name=name, value=value):
            return [SetAttr(target, name, context.value(value, f"Tensor.{name}"))]
        case ContainerState():
            return _container(write, target, context)


def _call(write: Call, context: Context) -> Step:
    name = getattr(write.func, "__name__", type(write.func).__name__)
    args = [context.value(arg, f"{name}({i})") for i, arg in enumerate(write.args)]
    kwargs = [(key, context.value(arg, f"{name}({key})")) for key, arg in write.kwargs.items()]
    return Do(Apply(write.func, tuple(args), tuple(kwargs)))


def _quietly(func: Callable[..., Any], *args: Any) -> None:
    """Delete something that only the run may have set."""
    try:
        func(*args)
    except (AttributeError, KeyError):
        pass


def _delete(func: Callable[..., Any], args: tuple[Expr, ...], may_lack: bool) -> Step:
    hashed = args[1:]
    if may_lack:
        return Do(Apply(_quietly, (Const(func), *args), hashed=hashed))
    return Do(Apply(func, args, hashed=hashed))


def _attr(write: AttrWrite, target: Expr, context: Context) -> list[Step]:
    name, value, obj = write.name, write.value, write.target
    layout = layout_of(type(obj))
    in_dict = write.via == "instance_dict"
    direct: Any = type if isinstance(obj, type) else object  # past a class's own __setattr__
    if value is DELETED:
        if in_dict:
            return [Do(Apply(dict.pop, (get_dict(target, layout), Const(name), Const(None))))]
        func = direct.__delattr__ if write.via == "object.__setattr__" else delattr
        return [_delete(func, (target, Const(name)), write.may_lack)]
    part = context.value(value, f"{type(obj).__name__}.{name}")
    if in_dict and not layout.stores(name):
        if type(instance_dict(obj)) is dict:
            return [SetItem(get_dict(target, layout), Const(name), part)]
        return [Do(Apply(dict.__setitem__, (get_dict(target, layout), Const(name), part)))]
    if write.via == "object.__setattr__" and not layout.plain_setattr:
        return [Do(Apply(direct.__setattr__, (target, Const(name), part)))]
    if not is_name(name):
        return [Do(Apply(setattr, (target, Const(name), part)))]
    return [SetAttr(target, name, part)]


def _slot(write: SlotWrite, target: Expr, context: Context) -> list[Step]:
    slot = write.descriptor
    if write.value is DELETED:
        return [_delete(slot.__delete__, (target,), write.may_lack)]
    part = context.value(write.value, f"{type(write.target).__name__}.{slot.__name__}")
    if layout_of(type(write.target)).stores_slot(slot):
        return [SetAttr(target, slot.__name__, part)]
    return [Do(Apply(slot.__set__, (target, part)))]


def _cell(write: CellWrite, target: Expr, context: Context) -> list[Step]:
    if write.value is DELETED:
        return [_delete(delattr, (target, Const("cell_contents")), True)]
    return [SetAttr(target, "cell_contents", context.value(write.value, "variable"))]


def _item(
    obj: Any, target: Expr, key: Any, value: Any, context: Context, *, may_lack: bool = False
) -> Step:
    """One item of a dict or list, set or deleted."""
    where = _item_label(obj, key)
    place = context.value(key, f"key of {where}")
    native: Any = layout_of(type(obj)).native
    if value is DELETED:
        if type(obj) is dict:
            return Do(Apply(dict.pop, (target, place, Const(None)), hashed=(place,)))
        return _delete(native.__delitem__, (target, place), may_lack)
    part = context.value(value, where)
    if type(obj) is dict or type(obj) is list:
        return SetItem(target, place, part)
    return Do(Apply(native.__setitem__, (target, place, part), hashed=(place,)))


def _item_label(obj: Any, key: Any) -> str:
    shown = repr(key) if is_atom(key) else f"<{type(key).__name__}>"
    if type(obj) is dict and type(obj.get("__name__")) is str and type(key) is str:
        return f"global {key}"
    return f"{type(obj).__name__}[{shown}]"


def contents_of(write: ContainerState, target: Expr) -> Iterator[tuple[Any, Expr]]:
    """Objects that a container held before the run, with a way to get them at replay."""
    native = layout_of(type(write.target)).native
    if issubclass(native, dict):
        for key, value in write.initial.items():
            if is_atom(key):
                yield value, Apply(dict.__getitem__, (target, Const(key)))
    elif native in (list, deque):
        for i, item in enumerate(write.initial):
            yield item, Apply(native.__getitem__, (target, Const(i)))


def _container(write: ContainerState, target: Expr, context: Context) -> list[Step]:
    native: Any = layout_of(type(write.target)).native
    if native is list:
        return _list(write, target, context)
    if native is deque:
        return _deque(write, target, context)
    if native is set:
        return _set(write, target, context)
    if issubclass(native, dict):
        return _dict(write, target, native, context)
    content = _copied(write.final)
    if native is bytearray or f"{native.__module__}.{native.__qualname__}" == "array.array":
        return [Do(Apply(native.__setitem__, (target, Const(slice(None)), content)))]
    is_array = f"{native.__module__}.{native.__qualname__}" == "numpy.ndarray"
    if is_array and write.initial.shape == write.final.shape:
        return [Do(Apply(native.__setitem__, (target, Const(...), content)))]
    return context.refuse_change(write.target, "its class is not known to the mock")


def _copied(data: Any) -> Const:
    """A copy of plain data that nothing changes."""
    return Const(copy.copy(data))


def _items(write: ContainerState, items: Any, context: Context) -> tuple[Expr, ...]:
    where = type(write.target).__name__
    return tuple([context.value(item, f"{where}[{i}]") for i, item in enumerate(items)])


def _list(write: ContainerState, target: Expr, context: Context) -> list[Step]:
    initial, final = write.initial, write.final
    start, end = changed_region(initial, final)
    if start == len(initial) == len(final):
        return []
    if start == len(final):
        return [Do(Apply(list.__delitem__, (target, Const(slice(start, None)))))]
    new = _items(write, final[start : len(final) - end], context)
    if start == len(initial):
        return [_extend(list, target, new)]
    if len(new) == 1 and len(initial) == len(final):
        return [_item(write.target, target, start, final[start], context)]
    stop = len(initial) - end if end else None
    region = slice(start or None, stop)
    return [Do(Apply(list.__setitem__, (target, Const(region), Seq("list", new))))]


def _extend(native: Any, target: Expr, new: tuple[Expr, ...]) -> Step:
    if len(new) == 1:
        return Do(Apply(native.append, (target, *new)))
    return Do(Apply(native.extend, (target, Seq("tuple", new))))


def _deque(write: ContainerState, target: Expr, context: Context) -> list[Step]:
    """Append what is new; a full deque drops from its other end by itself, as it did in the run."""
    initial, final, maxlen = write.initial, write.final, write.target.maxlen
    for dropped in range(len(initial) + 1):
        kept = len(initial) - dropped
        if kept <= len(final) and all(map(is_same, initial[dropped:], final[:kept])):
            break
    new = _items(write, final[kept:], context)
    overflow = 0 if maxlen is None else max(0, len(initial) + len(new) - maxlen)
    if (kept == 0 and initial) or (dropped != overflow and new):
        clear: list[Step] = [Do(Apply(deque.clear, (target,)))]
        whole = _items(write, final, context)
        return clear + ([_extend(deque, target, whole)] if whole else [])
    steps: list[Step] = []
    if dropped != overflow:
        steps += [Do(Apply(deque.popleft, (target,))) for _ in range(dropped)]
    return steps + ([_extend(deque, target, new)] if new else [])


def _set(write: ContainerState, target: Expr, context: Context) -> list[Step]:
    """Remove and add; what to remove has to be a constant or an object with a node."""
    lost = [x for x in write.initial if x not in write.final]
    removed = _items(write, lost, context)
    added = _items(write, [x for x in write.final if x not in write.initial], context)
    if any(isinstance(part, Ref) and not is_atom(x) for part, x in zip(removed, lost, strict=True)):
        context.refuse_change(write.target, "it lost an object that the run did not look at")
    steps: list[Step] = []
    if removed:
        gone = Apply(set.difference_update, (target, Seq("tuple", removed)), hashed=removed)
        steps.append(Do(gone))
    if len(added) == 1:
        steps.append(Do(Apply(set.add, (target, *added), hashed=added)))
    elif added:
        steps.append(Do(Apply(set.update, (target, Seq("tuple", added)), hashed=added)))
    return steps


def _dict(write: ContainerState, target: Expr, native: Any, context: Context) -> list[Step]:
    """Delete, set and add; keys that follow one that moved are deleted and added again."""
    obj, initial, final = write.target, write.initial, write.final
    positions = {key: i for i, key in enumerate(initial)}
    stays: set[Any] = set()
    last = -1
    for key in final:
        if positions.get(key, -1) <= last:
            break
        last = positions[key]
        stays.add(key)
    steps = [_item(obj, target, key, DELETED, context) for key in initial if key not in stays]
    steps += [
        _item(obj, target, key, value, context)
        for key, value in final.items()
        if key not in stays or not is_same(value, initial[key])
    ]
    return steps
