"""The tensor that stands for a value to come, and how it becomes an ordinary one.

A ``QueuedTensor`` has shape, strides and dtype, and no memory; when its window has been run, it
stands for the ordinary tensor ``plain()``.  At the end of the context the Python object
takes over an ordinary tensor's innards: whoever holds it, strongly or weakly, then holds a
``torch.Tensor``.  The old innards serve on where something in C++ holds them (autograd, that has
saved them).  A tensor that has been told to require gradients, or of which ordinary views were
made, stays what it is and behaves as before.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from magjit.plugin import BackendError
from magjit_dvm.lazy_window import Value

__all__ = [
    "Held",
    "LazyError",
    "QueuedTensor",
    "as_ordinary",
    "run_plainly",
    "still_held",
    "tensors_in",
]


class LazyError(BackendError):
    """A queued tensor will never have a value."""


@dataclass(slots=True, eq=False)
class Held:
    """That a tensor is there: its queue counts references to this.

    A weak reference to the tensor alone would not do: it is cleared before finalizers are
    called, which may still read the tensor.
    """

    value: Value
    ref: weakref.ref[QueuedTensor]


def still_held(all_of_them: list[Held]) -> list[Held]:
    """Those that more than the list holds."""
    return [one for one in all_of_them if sys.getrefcount(one) > _UNHELD]


_UNHELD = next(sys.getrefcount(one) for one in [object()])


class _Queue(Protocol):
    def flush(self, reason: str) -> None: ...


_GUARD = "TESTING_ONLY_GenericWrapper"
"""A dispatch key that torch has for wrappers and gives to no tensor."""


@cache
def _guarding_keys() -> torch._C.DispatchKeySet:
    """The key that queued tensors have while they wait.

    ``x.data = queued`` asks no operator but one, and would leave x without memory; with this
    key that one comes here first.  All others pass it by.
    """
    passing = torch.library.Library("_", "IMPL")
    passing.fallback(torch.library.fallthrough_kernel, _GUARD)
    asked = torch.library.Library("aten", "IMPL")
    asked.impl("_has_compatible_shallow_copy_type", _before_sharing, _GUARD)
    _libraries.extend((passing, asked))
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_GUARD))


_libraries: list[torch.library.Library] = []  # what they register ends with them


def _before_sharing(taker: torch.Tensor, giver: torch.Tensor) -> bool:
    for one in (taker, giver):
        if type(one) is QueuedTensor:
            one.settle("data")
            if not one._has_memory:
                one._has_memory = True
                _set_data(one, one.plain())
    return True


def _reading(name: str) -> Callable[..., Any]:
    """A method of tensors that reads memory without asking the dispatcher.

    Numbers are among them, for ``torch.tensor([queued])`` asks for them past the dispatcher.
    """
    original = getattr(torch.Tensor, name)

    def method(self: QueuedTensor, *args: Any, **kwargs: Any) -> Any:
        self.settle(name)
        return original(self.plain(), *args, **kwargs)

    method.__name__ = name
    return method


class QueuedTensor(torch.Tensor):
    """A tensor whose value may still have to be computed."""

    _value: Value
    _queue: _Queue
    _held: Held
    _has_memory = False  # of its own: what reads it asks ``plain()``

    # Subclasses go through Python at each function of torch's unless they say otherwise.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(value: Value, queue: _Queue) -> QueuedTensor:
        """A tensor of this value, without memory."""
        layout = value.layout
        made: QueuedTensor = _make(
            QueuedTensor,
            layout.shape,
            strides=layout.strides,
            storage_offset=value.offset,
            dtype=layout.dtype,
            _extra_dispatch_keys=_guarding_keys(),
        )
        # Code in C++ that asks for the memory gets an error instead of a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(made)
        made._value, made._queue = value, queue
        made._held = Held(value, weakref.ref(made))
        return made

    def rename(self, value: Value) -> None:
        """Stand for another value of the same layout."""
        self._value = self._held.value = value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """An operator outside of the queue's context or in another thread."""
        kwargs = kwargs or {}
        return run_plainly(func, args, kwargs, tensors_in(args, kwargs))

    def settle(self, reason: str) -> None:
        """See to it that the value is there.

        Raises:
            LazyError: it will never be.
        """
        if self._value.window is not None:
            self._queue.flush(reason)
        if self._value.error is not None:
            raise LazyError(
                f"A queued tensor was not computed: {self._value.error}",
                remedy="the program went on after the error that kept it from being computed; "
                "compute it again, or end the context of magjit_dvm.lazy where the error arises",
            ) from self._value.error

    def plain(self) -> torch.Tensor:
        """An ordinary tensor that shares the memory; its value is computed if it was not."""
        value = self._value
        if value.real is None:
            self.settle("read")
        if value.real is None:
            assert value.root is not None and value.root.real is not None
            root = value.root.real
            layout, offset = value.layout, value.offset + root.storage_offset()
            value.real = root.as_strided(layout.shape, layout.strides, offset)
        return value.real

    def follow(self) -> None:
        """Look like ``plain()`` again, whose shape or memory an operator may have changed."""
        plain = self.plain()
        if (
            self._has_memory
            or self.shape != plain.shape
            or self.stride() != plain.stride()
            or self.storage_offset() != plain.storage_offset()
        ):
            self._has_memory = True
            _set_data(self, plain)

    # -- what reads memory directly --

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._with_flag().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._with_flag().__deepcopy__(memo)

    def _with_flag(self) -> torch.Tensor:
        plain = self.plain().detach()
        return plain.requires_grad_() if self.requires_grad and self.is_leaf else plain

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return str(torch.Tensor.__repr__(self._with_flag(), tensor_contents=tensor_contents))  # type: ignore[call-arg]

    @property
    def data(self) -> torch.Tensor:
        return _get_data(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        self.settle("data")
        self._has_memory = True
        given = other.plain() if type(other) is QueuedTensor else other
        _set_data(self, given)
        self._value.real = given.detach()


for _name in (
    "apply_",
    "data_ptr",
    "is_shared",
    "map_",
    "map2_",
    "numpy",
    "share_memory_",
    "storage",
    "tolist",
    "untyped_storage",
    "__array__",
    "__bool__",
    "__complex__",
    "__dlpack__",
    "__float__",
    "__format__",
    "__index__",
    "__int__",
    "_typed_storage",
):
    setattr(QueuedTensor, _name, _reading(_name))

_make: Any = torch.Tensor._make_wrapper_subclass
_get_data: Any = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
_set_data: Any = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


# -- operators on the plain tensors --


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among arguments."""
    found: list[torch.Tensor] = []
    waiting = [args, kwargs]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
        elif isinstance(one, dict):
            waiting.extend(one.values())
    return found


def run_plainly(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
    """Run an operator on the tensors that queued ones stand for.

    Where it returns one of those, as operators do that write, the queued one is returned.
    """
    queued = [one for one in given if type(one) is QueuedTensor]
    if not queued:
        return func(*args, **kwargs)
    back = {id(one.plain()): one for one in queued}
    made = func(*_mapped(_plain, args), **_mapped(_plain, kwargs))
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        for one in queued:
            one.follow()
    elif func is not torch.ops.aten.detach.default and any(
        one.alias_info is not None for one in schema.returns
    ):
        for one in queued:  # views that are ordinary tensors have it for their base
            one._value.base.is_pinned = True
    return _mapped(lambda one: back.get(id(one), one), made)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``function`` of what containers hold.  torch's own leaves cycles behind at each call."""
    if isinstance(value, (list, tuple)):
        items = [_mapped(function, one) for one in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {name: _mapped(function, one) for name, one in value.items()}
    return function(value)


def _plain(one: Any) -> Any:
    return one.plain() if type(one) is QueuedTensor else one


# -- ordinary tensors --


def as_ordinary(held: Iterable[QueuedTensor]) -> None:
    """Make ordinary tensors of queued ones whose values are there; views stay views."""
    groups: dict[int, list[QueuedTensor]] = {}
    for one in held:
        if type(one) is QueuedTensor and one._value.error is None:
            groups.setdefault(id(one._value.base), []).append(one)
    for group in groups.values():
        _group_as_ordinary(group)


def _group_as_ordinary(group: list[QueuedTensor]) -> None:
    """Tensors that share memory; what autograd has to do with stays as it is."""
    if group[0]._value.base.is_pinned or any(one.requires_grad for one in group):
        return
    views = [one for one in group if one._base is not None]
    if any(all(view._base is not one for one in group) for view in views):
        return
    for one in group:
        if one._base is not None:
            continue
        # Detached, it counts writes together with the old one, of which autograd may hold more.
        plain = one.detach()
        for view in views:
            if view._base is one:
                with torch.set_grad_enabled(view._value.with_gradients):
                    part = plain.as_strided(view.shape, view.stride(), view.storage_offset())
                _swap(view, part)
        _swap(one, plain)


def _swap(queued: QueuedTensor, plain: torch.Tensor) -> None:
    """Exchange their innards; the other object then serves whoever still holds the queued ones."""
    torch._C._swap_tensor_impl(queued, plain)
    queued.__class__, plain.__class__ = torch.Tensor, QueuedTensor  # type: ignore[assignment]
    plain._has_memory = queued.__dict__.pop("_has_memory", False)  # type: ignore[attr-defined]
    for name in ("_value", "_queue", "_held"):
        plain.__dict__[name] = queued.__dict__.pop(name)
