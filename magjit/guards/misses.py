"""Why a call misses a record: what the guard compares, as it was and as it is.

Miss ::= what, old, new, the line of the program that read it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from magjit import _C
from magjit.errors import Location
from magjit.guards.emit import Instruction, Origin, describe_origin
from magjit.refgraph.kinds import class_lookup
from magjit.refgraph.nodes import ABSENT
from magjit.refgraph.paths import Paths, short

_META = ("class", "dtype", "device type", "device index", "shape", "strides", "requires_grad")


@dataclass(frozen=True, slots=True)
class Miss:
    """One condition of a guard that does not hold.

    Attributes:
        what: what is compared.
        old, new: as they were when the record was made and as they are; None where they cannot be
            told apart by a text.
        location: where the program read it first.
    """

    what: str
    old: str | None = None
    new: str | None = None
    location: Location | None = None

    def __str__(self) -> str:
        text = self.what
        if self.old is not None and self.new is not None and self.old != self.new:
            text += f": {self.old} -> {self.new}"
        if self.location is not None:
            text += f" (read at {self.location})"
        return text


def find_miss(
    program: _C.GuardProgram,
    instructions: list[Instruction],
    origins: list[Origin],
    paths: Paths,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Miss | None:
    """The first condition of a guard that a call does not meet; None: it meets all."""
    found = program.failure(args, dict(kwargs))
    if found is None:
        return None
    index, values = found
    origin = origins[index]
    op, *operands = instructions[index]
    old = new = None
    what = paths.path(origin[0]) if op == "tensor" else describe_origin(origin, paths)
    if op == "argc":
        old, new = _call(*operands), _call(len(args), tuple(kwargs))
    elif describe := _DESCRIBE.get(op):
        old, new = describe(values, *operands)
    return Miss(what, old, new, _location(paths, origin))


def _location(paths: Paths, origin: Origin) -> Location | None:
    node_id, what = origin
    if node_id == 0 or (isinstance(what, str) and paths.is_argument(node_id)):
        return None  # the caller's
    places = paths.places
    place = None if isinstance(what, str) else places.get((node_id, what))
    place = place or places.get(node_id)
    if place is None:
        return None
    code, offset = place
    return None if code is None else Location.of(code, offset)


# -- by operation of the guard program ----------------------------------------------------------

_Two = tuple[str | None, str | None]


def _call(count: int, keywords: tuple[str, ...]) -> str:
    text = f"{count} positional"
    return f"{text} and {', '.join(keywords)}" if keywords else text


def _equal(values: list[Any], slot: int, expected: Any) -> _Two:
    return short(expected), short(values[slot])


def _type(values: list[Any], slot: int, expected: type) -> _Two:
    return f"a {expected.__qualname__}", f"a {type(values[slot]).__qualname__}"


def _identity(values: list[Any], slot: int, expected: Any) -> _Two:
    old, new = short(expected), short(values[slot])
    return old, new if new != old else f"another {new}"


def _missing(values: list[Any], slot: int, source: int, key: Any) -> _Two:
    return "there", "missing"


def _present(values: list[Any], source: int, key: Any) -> _Two:
    container = values[source]
    return "missing", short(dict.get(container, key)) if isinstance(container, dict) else "there"


def _length(values: list[Any], source: int, count: int) -> _Two:
    return str(count), str(len(values[source]))


def _keys(values: list[Any], source: int, keys: tuple[Any, ...]) -> _Two:
    return short(keys), short(tuple(values[source]))


def _members(values: list[Any], source: int, members: frozenset[Any]) -> _Two:
    return short(set(members)), short(set(values[source]))


def _called(values: list[Any], source: int, expected: Any, func: Callable[[Any], Any]) -> _Two:
    try:
        return short(expected), short(func(values[source]))
    except Exception:
        return None, None


def _tensor(values: list[Any], source: int, meta: tuple[Any, ...]) -> _Two:
    tensor = values[source]
    if not isinstance(tensor, torch.Tensor):
        return "a tensor", f"a {type(tensor).__qualname__}"
    try:
        now = _C.tensor_meta(tensor)
    except ValueError as problem:
        return "a plain tensor", str(problem)
    differ = [
        (name, one, other)
        for name, one, other in zip(_META, meta, now, strict=False)
        if one is not None and not _allows(one, other)
    ]
    if any(name == "shape" for name, _, _ in differ):
        differ = [item for item in differ if item[0] != "strides"]
    if not differ:
        return None, None
    old = ", ".join(f"{name} {_meta_text(name, one)}" for name, one, _ in differ)
    return old, ", ".join(f"{name} {_meta_text(name, other)}" for name, _, other in differ)


def _allows(wanted: Any, value: Any) -> bool:
    """Whether a value is the wanted one; None in the place of a size or a stride is any."""
    if isinstance(wanted, tuple) and isinstance(value, tuple) and len(wanted) == len(value):
        return all(a is None or a == b for a, b in zip(wanted, value, strict=True))
    return bool(wanted == value)


def _meta_text(name: str, value: Any) -> str:
    if name == "dtype":
        return str(_dtypes().get(value, value)).removeprefix("torch.")
    if name == "class":
        return str(value.__qualname__)
    if isinstance(value, tuple):
        return f"({', '.join('any' if size is None else str(size) for size in value)})"
    return str(value)


@cache
def _dtypes() -> dict[int, torch.dtype]:
    return {_C.tensor_meta(torch.empty(0, dtype=dtype))[1]: dtype for dtype in _NAMED_DTYPES}


_NAMED_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    torch.bool,
)


def _class_names(values: list[Any], cls: type, names: tuple[tuple[str, Any], ...]) -> _Two:
    differ = []
    for name, expected in names:
        found = class_lookup(cls, name)
        if found is not (ABSENT if expected is _C.NULL else expected):
            differ.append(name)
    shown = ", ".join(differ)
    return (f"{shown} as defined", f"{shown} defined anew") if differ else (None, None)


def _state(values: list[Any], before: Mapping[str, Any]) -> _Two:
    now = _C.global_state()
    differ = [name for name in before if not bool(before[name] == now[name])]
    old = ", ".join(f"{name} {short(before[name])}" for name in differ)
    return old, ", ".join(f"{name} {short(now[name])}" for name in differ)


_DESCRIBE: dict[str, Callable[..., _Two]] = {
    "eq": _equal,
    "type_is": _type,
    "is": _identity,
    "getitem": _missing,
    "absent": _present,
    "len": _length,
    "keys": _keys,
    "set_eq": _members,
    "pyeq": _called,
    "tensor": _tensor,
    "tp_names": _class_names,
    "global_state": _state,
}
