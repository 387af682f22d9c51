"""The operator graph of a run: every tensor operation, in order (MagPy §4.1, Figure 10).

OperatorGraph ::= InputValue* Operator*
Operator      ::= function template* -> template
template      ::= ValueRef n | NumberRef | constant | list, tuple, dict or slice of templates
InputValue    ::= a tensor that existed before the run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeVar

import torch

from magjit.monitor.float_forms import FloatForm

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A tensor of the graph, in the place of an argument or result."""

    value_id: int

    def __repr__(self) -> str:
        return f"%{self.value_id}"


@dataclass(frozen=True, slots=True, eq=False)
class NumberRef:
    """A number that a replay computes anew, unless it turns out to be a constant.

    ``number`` has ``live`` and ``original``: whether it may change, and what it is as a constant;
    ``obj``, the program's own object; and ``sym``, which is None unless it comes from sizes.
    """

    number: Any

    def __repr__(self) -> str:
        return f"{self.number.original!r}"


@dataclass(slots=True)
class Value:
    """A tensor of the graph.

    Attributes:
        const: computed from constants only, so reading its data gives a constant.
        dynamic: whether its shape depends on data, so that reading its shape reads data: 1 if its
            sizes do, 2 if the number of its dimensions does.
        is_input: it existed before the run.
        version: of a constant, the tensor's version when it was last known to be constant.
    """

    value_id: int
    const: bool = False
    dynamic: int = 0
    is_input: bool = False
    version: int = -1

    @property
    def of_unknown_shape(self) -> bool:
        """Whether its shape is another one when the data are."""
        return self.dynamic > 0 and not self.const


@dataclass(frozen=True, slots=True)
class InputValue:
    """A graph input: the outside tensor and the number of its value."""

    value_id: int
    tensor: torch.Tensor


@dataclass(slots=True)
class Operator:
    """One call of a torch function.

    ``code`` and ``offset`` say which instruction of the user's program made it. ``floats`` is how
    it takes floats that may change, where the backend gets tensors for them.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    code: CodeType | None = None
    offset: int = -1
    floats: FloatForm | None = None

    def __str__(self) -> str:
        shown = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.result!r} = {qualified_name(self.func)}({', '.join(shown)})"


@dataclass(slots=True)
class OperatorGraph:
    """All operators of a run, with its inputs in order of first use."""

    inputs: list[InputValue] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def new_value(self, *, is_input: bool = False, const: bool = False, dynamic: int = 0) -> Value:
        value = Value(len(self.values), is_input=is_input, const=const, dynamic=dynamic)
        self.values.append(value)
        return value

    def verify(self) -> None:
        """Raise AssertionError when an operator uses a value that no earlier one made."""
        known = {item.value_id for item in self.inputs}
        for operator in self.operators:
            for ref in refs_in((operator.args, operator.kwargs)):
                assert ref.value_id in known, f"{operator}: %{ref.value_id} is not made yet"
            known.update(ref.value_id for ref in refs_in(operator.result))

    def live_numbers(self) -> list[Any]:
        """The numbers that a replay has to give to the graph, in order of first use."""
        refs = [ref for op in self.operators for ref in _parts_in((op.args, op.kwargs), NumberRef)]
        return list({id(ref.number): ref.number for ref in refs if ref.number.live}.values())

    def float_inputs(self) -> list[tuple[Any, torch.dtype]]:
        """The floats that a replay has to give as tensors, and of which type each."""
        pairs = [
            (ref.number, op.floats.dtype)
            for op in self.operators
            if op.floats is not None
            for ref in floats_in((op.args, op.kwargs))
        ]
        return list({(id(number), dtype): (number, dtype) for number, dtype in pairs}.values())

    def __str__(self) -> str:
        inputs = [
            f"%{i.value_id} = input {tuple(i.tensor.shape)} {i.tensor.dtype}" for i in self.inputs
        ]
        return "\n".join(inputs + [str(operator) for operator in self.operators])


def refs_in(template: Any) -> Iterator[ValueRef]:
    """Every ValueRef of a template, depth first."""
    return _parts_in(template, ValueRef)


def floats_in(template: Any) -> Iterator[NumberRef]:
    """Every float of a template that a replay computes before the graph runs."""
    for ref in _parts_in(template, NumberRef):
        number = ref.number
        if number.live and type(number.obj) is float and number.sym is None:
            yield ref


def _parts_in(template: Any, kind: type[_Part]) -> Iterator[_Part]:
    if isinstance(template, kind):
        yield template
    elif isinstance(template, (list, tuple)):
        for item in template:
            yield from _parts_in(item, kind)
    elif isinstance(template, dict):
        for item in template.values():
            yield from _parts_in(item, kind)
    elif isinstance(template, slice):
        yield from _parts_in((template.start, template.stop, template.step), kind)


def mapped(template: Any, leaf: Callable[[Any], Any]) -> Any:
    """A template with ``leaf`` applied to everything in it but lists, tuples, dicts and slices."""
    if isinstance(template, torch.Size):
        return leaf(template)
    if isinstance(template, list):
        return [mapped(item, leaf) for item in template]
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*[mapped(item, leaf) for item in template])
    if isinstance(template, tuple):
        return tuple(mapped(item, leaf) for item in template)
    if isinstance(template, dict):
        return {key: mapped(item, leaf) for key, item in template.items()}
    if isinstance(template, slice):
        return slice(*mapped((template.start, template.stop, template.step), leaf))
    return leaf(template)


def qualified_name(func: Any) -> str:
    """Readable name of a torch function; getters are named by their attribute."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__") and owner is not None:
        return f"Tensor.{getattr(owner, '__name__', '?')}.{func.__name__}"
    qualname = str(getattr(func, "__qualname__", None) or getattr(func, "__name__", repr(func)))
    module = getattr(func, "__module__", None) or ""
    if module.startswith("torch") and "." not in qualname:
        return f"{module}.{qualname}"
    return qualname
