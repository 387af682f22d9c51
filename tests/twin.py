"""Twin worlds: one program run eagerly and one run compiled, compared as whole object graphs.

    Scene  = fn, args(), state(), change(scene), unrelated(scene)   one world of one program
    Call   = positional and keyword arguments of one call
    Table  = rows of one kind, each a named recipe that makes a fresh Scene

`Twin.differ` walks two values side by side and keeps a one-to-one map between their objects and
between their storages, so that identity (`out is inp`, the same list twice, two views of one
storage) is part of what is compared.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import random
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


def one_tensor() -> Call:
    return call(torch.randn(3, 4))


class TableWarning(UserWarning):
    """The only warning category that is compared between the twins."""


@dataclass
class Scene:
    """One world of one program; two scenes of one row share nothing that the program can change."""

    fn: Callable[..., Any]
    args: Callable[[], Call] = one_tensor
    state: Callable[[], Any] = lambda: None
    change: Callable[[Scene], Any] = lambda scene: None
    unrelated: Callable[[Scene], Any] = lambda scene: noise(scene)
    context: Any = None

    def apply(self, step: Callable[[Scene], Any]) -> None:
        """Change the world; a context manager that the step returns surrounds all later calls."""
        made = step(self)
        if hasattr(made, "__enter__"):
            self.context = lambda: step(self)


NOISE = 0


def noise(scene: Scene) -> None:
    """State that no program of the tables reads."""
    global NOISE
    NOISE += 1
    scene.fn.__dict__["never_read"] = NOISE
    getattr(scene.fn, "__globals__", {})["NEVER_READ"] = NOISE


def isolated(fn: types.FunctionType, **changed: Any) -> types.FunctionType:
    """The function over its own copy of its module's globals, so that a row may change them."""
    scope = {**fn.__globals__, **changed}
    copy = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


class Table(list[Any]):
    """Rows of one kind; a decorated recipe's name, spelled with spaces, is the row's name."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def row(self, **options: Any) -> Callable[[Callable[[], Scene]], Callable[[], Scene]]:
        def register(make: Callable[[], Scene]) -> Callable[[], Scene]:
            self.add(make.__name__.replace("_", " ").strip(), make, **options)
            return make

        return register

    def add(self, name: str, make: Callable[[], Scene], **options: Any) -> None:
        if any(row.name == name for row in self):
            raise ValueError(f"two rows are named {name!r}")
        self.append(self.kind(name=name, make=make, **options))


def merged(*tables: Table) -> Table:
    whole = Table(tables[0].kind)
    for table in tables:
        for row in table:
            whole.add(**vars(row))
    return whole


# --- one call and all that it leaves behind -------------------------------------------------


def seed(step: int) -> None:
    torch.manual_seed(step)
    random.seed(step)
    np.random.seed(step)


def process_state() -> dict[str, Any]:
    return {
        "torch rng": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": np.random.get_state()[1],
        "grad mode": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def float_leaves(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.grad_fn is not None:
            yield value
    elif isinstance(value, (list, tuple, collections.deque)):
        for item in value:
            yield from float_leaves(item, seen)
    elif isinstance(value, dict):
        yield from float_leaves(list(value.values()), seen)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.FunctionType)):
        yield from float_leaves(vars(value), seen)


def backpropagate(result: Any) -> None:
    losses = [leaf.abs().square().sum() for leaf in float_leaves(result, set())]
    if losses:
        torch.stack([loss.float() for loss in losses]).sum().backward()


def outcome(
    scene: Scene,
    fn: Callable[..., Any],
    step: int,
    *,
    backward: bool = False,
    printed: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Call once and gather the result, the arguments, the world and the process afterwards."""
    seed(step)
    inputs = scene.args()
    context = scene.context() if scene.context else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TableWarning)
        with context:
            try:
                result, raised = fn(*inputs.args, **inputs.kwargs), None
            except Exception as error:
                result, raised = None, error.with_traceback(None)
    process = process_state()
    if backward:
        backpropagate(result)
    return {
        "raised": raised,
        "result": result,
        "args": inputs.args,
        "kwargs": inputs.kwargs,
        "state": scene.state(),
        "process": process,
        "printed": printed(),
        "warned": [str(w.message) for w in caught if w.category is TableWarning],
    }


def differ(expected: Any, actual: Any) -> str | None:
    """Where and how two object graphs differ; None where they are the same in shape and value."""
    return Twin().differ(expected, actual, "")


# --- the comparison -------------------------------------------------------------------------

PRIMITIVES = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), range, slice)
OPAQUE = (torch.dtype, torch.device, torch.layout, torch.memory_format, types.BuiltinFunctionType)
WALKERS: list[tuple[Callable[[Any], bool], str]] = [
    (lambda v: isinstance(v, enum.Enum), "_enum"),
    (lambda v: isinstance(v, torch.Tensor), "_tensor"),
    (lambda v: isinstance(v, type), "_class"),
    (lambda v: isinstance(v, PRIMITIVES), "_primitive"),
    (lambda v: isinstance(getattr(v, "__self__", None), torch.Tensor), "_bound"),
    (lambda v: isinstance(v, OPAQUE), "_opaque"),
    (lambda v: isinstance(v, types.ModuleType), "_opaque"),
    (lambda v: is_plain_tuple(v), "_primitive"),
    (lambda v: isinstance(v, np.ndarray), "_array"),
    (lambda v: isinstance(v, np.generic), "_primitive"),
    (lambda v: isinstance(v, types.FunctionType), "_function"),
    (lambda v: isinstance(v, types.MethodType), "_method"),
    (lambda v: isinstance(v, functools.partial), "_partial"),
    (lambda v: isinstance(v, weakref.ref), "_weakref"),
    (lambda v: isinstance(v, types.CellType), "_cell"),
    (lambda v: isinstance(v, torch.Generator), "_generator"),
    (lambda v: isinstance(v, collections.deque), "_deque"),
    (lambda v: isinstance(v, (list, tuple)), "_sequence"),
    (lambda v: isinstance(v, (dict, types.MappingProxyType)), "_mapping"),
    (lambda v: isinstance(v, (set, frozenset)), "_set"),
    (lambda v: isinstance(v, BaseException), "_exception"),
    (lambda v: hasattr(v, "__dict__") or hasattr(type(v), "__slots__"), "_object"),
    (lambda v: hasattr(v, "__next__"), "_iterator"),
    (lambda v: True, "_opaque"),
]


def is_plain_tuple(value: Any) -> bool:
    """A tuple of constants is a value: Python itself shares or copies those as it likes."""
    return type(value) is tuple and all(
        type(item) in PRIMITIVES or is_plain_tuple(item) for item in value
    )


class Twin:
    def __init__(self) -> None:
        self.pairs: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.storages_back: dict[int, int] = {}
        self.alive: list[Any] = []

    def differ(self, a: Any, b: Any, path: str) -> str | None:
        walker = next(name for accepts, name in WALKERS if accepts(a))
        if walker in ("_primitive", "_opaque"):
            found = getattr(self, walker)(a, b)
            return f"{path}: {found}" if found else None
        if id(a) in self.pairs or id(b) in self.back:
            same = self.pairs.get(id(a)) == id(b) and self.back.get(id(b)) == id(a)
            return None if same else f"{path}: identity differs ({type(a).__name__})"
        self.pairs[id(a)], self.back[id(b)] = id(b), id(a)
        self.alive += [a, b]
        if walker != "_class":
            if found := self._kind(a, b):
                return f"{path}: {found}"
        found = getattr(self, walker)(a, b, path)
        return found

    def _kind(self, a: Any, b: Any) -> str | None:
        if type(a) is type(b) or type(a).__qualname__ == type(b).__qualname__:
            return None
        kinds = f"type {type(a).__qualname__} against {type(b).__qualname__}"
        return f"{kinds}: {a!s:.150} and {b!s:.400}"

    def _first(self, pairs: list[tuple[str, Any, Any]]) -> str | None:
        for path, a, b in pairs:
            if found := self.differ(a, b, path):
                return found
        return None

    def _primitive(self, a: Any, b: Any) -> str | None:
        same = type(a).__qualname__ == type(b).__qualname__ and repr(a) == repr(b)
        return None if same else f"{a!r} against {b!r}"[:300]

    def _opaque(self, a: Any, b: Any) -> str | None:
        same = a is b or (type(a) is type(b) and (a == b or repr(a)[:20] == repr(b)[:20]))
        return None if same else f"{a!r} against {b!r}"[:300]

    def _enum(self, a: Any, b: Any, path: str) -> str | None:
        return None if a.name == b.name else f"{path}: {a} against {b}"

    def _class(self, a: Any, b: Any, path: str) -> str | None:
        same = isinstance(b, type) and (a is b or a.__qualname__ == b.__qualname__)
        return None if same else f"{path}: class {a} against {b}"

    def _array(self, a: Any, b: Any, path: str) -> str | None:
        same = a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
        return None if same else f"{path}: arrays differ: {a} against {b}"[:300]

    def _tensor(self, a: torch.Tensor, b: torch.Tensor, path: str) -> str | None:
        if (left := facts(a)) != (right := facts(b)):
            named = [f"{k} {left[k]} against {right[k]}" for k in left if left[k] != right[k]]
            return f"{path}: tensors differ: {', '.join(named)}"
        if found := self._values(a, b):
            return f"{path}: {found}"
        if found := self._storage(a, b):
            return f"{path}: {found}"
        pairs = [(f"{path}.grad", a.grad, b.grad)] if a.is_leaf else []
        return self._first(pairs) or self._attributes(a, b, path)

    def _values(self, a: torch.Tensor, b: torch.Tensor) -> str | None:
        if a.device.type == "meta":
            return None
        try:
            left, right = (
                t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (a, b)
            )
            torch.testing.assert_close(right, left, equal_nan=True)
        except AssertionError as error:
            return " ".join(str(error).split())
        return None

    def _storage(self, a: torch.Tensor, b: torch.Tensor) -> str | None:
        if a.layout != torch.strided or type(a) not in (torch.Tensor, torch.nn.Parameter):
            return None
        left, right = (t.untyped_storage()._cdata for t in (a, b))
        expected = self.storages.setdefault(left, right)
        returned = self.storages_back.setdefault(right, left)
        if expected != right or returned != left:
            return "shares storage with other tensors than in eager"
        if a.storage_offset() != b.storage_offset():
            return f"offset {a.storage_offset()} against {b.storage_offset()}"
        return None

    def _function(self, a: Any, b: Any, path: str) -> str | None:
        if a.__code__ is not b.__code__ and a.__code__ != b.__code__:
            return f"{path}: function {a.__qualname__} against {b.__qualname__}"
        names = ("__closure__", "__defaults__", "__kwdefaults__", "__dict__")
        return self._first([(f"{path}.{n}", getattr(a, n), getattr(b, n)) for n in names])

    def _method(self, a: Any, b: Any, path: str) -> str | None:
        return self._first(
            [(f"{path}.{n}", getattr(a, n), getattr(b, n)) for n in ("__func__", "__self__")]
        )

    def _bound(self, a: Any, b: Any, path: str) -> str | None:
        names = ("__name__", "__self__")
        return self._first([(f"{path}.{n}", getattr(a, n), getattr(b, n)) for n in names])

    def _partial(self, a: Any, b: Any, path: str) -> str | None:
        return self._first(
            [(f"{path}.{n}", getattr(a, n), getattr(b, n)) for n in ("func", "args", "keywords")]
        )

    def _weakref(self, a: Any, b: Any, path: str) -> str | None:
        return self.differ(a(), b(), f"{path}()")

    def _cell(self, a: Any, b: Any, path: str) -> str | None:
        contents = [getattr(cell, "cell_contents", "<empty>") for cell in (a, b)]
        return self.differ(*contents, f"{path}.cell")

    def _generator(self, a: Any, b: Any, path: str) -> str | None:
        return self.differ(a.get_state(), b.get_state(), f"{path}.state")

    def _deque(self, a: Any, b: Any, path: str) -> str | None:
        if a.maxlen != b.maxlen:
            return f"{path}: maxlen {a.maxlen} against {b.maxlen}"
        return self._sequence(a, b, path)

    def _sequence(self, a: Any, b: Any, path: str) -> str | None:
        if len(a) != len(b):
            return f"{path}: {len(a)} items against {len(b)}"
        items = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(a, b, strict=True))]
        return self._first(items) or self._attributes(a, b, path)

    def _mapping(self, a: Any, b: Any, path: str) -> str | None:
        left, right = list(a), list(b)
        if found := self._first(
            [
                (f"{path}.keys()[{i}]", *pair)
                for i, pair in enumerate(zip(left, right, strict=False))
            ]
        ):
            return found
        if len(left) != len(right):
            return f"{path}: keys {left} against {right}"[:300]
        pairs = [(f"{path}[{k!r}]"[:200], a[k], b[j]) for k, j in zip(left, right, strict=True)]
        if isinstance(a, collections.defaultdict):
            pairs.append((f"{path}.default_factory", a.default_factory, b.default_factory))
        return self._first(pairs) or self._attributes(a, b, path)

    def _set(self, a: Any, b: Any, path: str) -> str | None:
        left, right = ([*sorted(s, key=repr)] for s in (a, b))
        if len(left) != len(right):
            return f"{path}: {a} against {b}"
        return self._first(
            [(f"{path}{{{i}}}", *pair) for i, pair in enumerate(zip(left, right, strict=True))]
        )

    def _exception(self, a: Any, b: Any, path: str) -> str | None:
        names = ("args", "__cause__", "__dict__")
        return self._first([(f"{path}.{n}", getattr(a, n), getattr(b, n)) for n in names])

    def _object(self, a: Any, b: Any, path: str) -> str | None:
        return self._attributes(a, b, path)

    def _attributes(self, a: Any, b: Any, path: str) -> str | None:
        kept = [getattr(v, "__dict__", None) for v in (a, b)]
        pairs = [(f"{path}.__dict__", *kept)] if any(kept) else []
        for name in slot_names(type(a)):
            pairs.append((f"{path}.{name}", *(getattr(v, name, "<empty>") for v in (a, b))))
        return self._first(pairs)

    def _iterator(self, a: Any, b: Any, path: str) -> str | None:
        if isinstance(a, types.GeneratorType):
            return self.differ(list(a), list(b), f"list({path})")
        left, right = (v.__reduce__() for v in (a, b))
        return self.differ(left, right, f"{path}.__reduce__()")


def facts(t: torch.Tensor) -> dict[str, Any]:
    strided = t.layout == torch.strided
    return {
        "shape": tuple(t.shape),
        "dtype": t.dtype,
        "device": t.device,
        "layout": t.layout,
        "strides": t.stride() if strided else None,
        "requires_grad": t.requires_grad,
        "leaf": t.is_leaf,
        "inference": t.is_inference(),
        "conjugate": t.is_conj() if strided else None,
    }


def slot_names(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield name
