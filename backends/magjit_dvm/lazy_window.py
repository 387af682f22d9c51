"""Operators that wait, and the fused graph that runs them (DVM, §5.2, dynamic graphs).

Grammar::

    Window    = Input* Entry*
    Entry     = operator Argument* -> Value+
    Argument  = Value | Input | lifted number | literal | list of Argument

A window's *structure* is all of it but numbers: layouts count by dtype, by which sizes are
equal and which are 1, and by the order of dimensions in memory; sizes that operators take as
arguments and numbers in arithmetic are lifted out.  That is all that fusion decides by, so the
fused graph of one window serves every window of the same structure, and needs no guards.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from magjit_dvm.fuser import fuse
from magjit_dvm.lazy_rules import Layout, Result, Rule
from magjit_dvm.schedule import Schedule

__all__ = [
    "DTYPES",
    "CannotWait",
    "Compiled",
    "Value",
    "Window",
    "alive",
    "coded_literal",
    "decoded",
    "fitting",
]

_MOST_COMPILED = 512
_compiled: OrderedDict[Any, Compiled] = OrderedDict()
_compiling = threading.RLock()


class CannotWait(Exception):
    """An operand keeps the operator from waiting."""


@dataclass(slots=True, eq=False)
class Value:
    """What an operator will have computed.

    Attributes:
        number: in its window.
        layout: of the tensor.
        root: the value whose memory this is a view of; None if it is its own.
        offset: elements from the root's first.
        real: the tensor, as soon as it is there; queued tensors of the same value share it.
        error: why it will never be there.
        window: where it waits.
        with_gradients: whether gradients were being recorded where it was made.
        is_pinned: whether tensors of it must stay as they are.
        views: of its memory, made while it waited.
    """

    number: int
    layout: Layout
    window: Window | None
    root: Value | None = None
    offset: int = 0
    real: torch.Tensor | None = None
    error: BaseException | None = None
    with_gradients: bool = False
    is_pinned: bool = False
    views: list[weakref.ref[Any]] | None = None

    @property
    def base(self) -> Value:
        """The value that owns the memory."""
        return self if self.root is None else self.root


@dataclass(slots=True, eq=False)
class Window:
    """The operators that wait, in order; ``structure`` says what they do, for any sizes."""

    may_wait: Callable[[torch.Tensor], bool] | None = None
    values: list[Value] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    layouts_of_inputs: list[Layout] = field(default_factory=list)
    numbers: list[int | float] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    _places: dict[int, int] = field(default_factory=dict)  # of inputs, by id
    _kinds: dict[Layout, int] = field(default_factory=dict)
    _labels: dict[int, int] = field(default_factory=dict)  # of sizes
    _patterns: list[Any] = field(default_factory=list)

    def input(self, tensor: torch.Tensor) -> int:
        """The number of a tensor from outside.

        Raises:
            CannotWait: the virtual machine does not read such tensors.
        """
        place = self._places.get(id(tensor))
        if place is not None:
            return place
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
            raise CannotWait("a tensor of another layout or dtype")
        if tensor.device.type != "cpu" or (not tensor.data_ptr() and tensor.numel()):
            raise CannotWait("a tensor on another device")
        if self.may_wait is not None and not self.may_wait(tensor):
            raise CannotWait("a tensor whose memory others may write")
        place = self._places[id(tensor)] = len(self.inputs)
        layout = Layout.of(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        self.inputs.append(tensor)
        self.versions.append(None if tensor.is_inference() else tensor._version)
        self.layouts_of_inputs.append(layout)
        return place

    def add(self, rule: Rule, codes: Any, base: Value | None, results: Sequence[Result]) -> None:
        """An operator with the arguments ``codes``; ``base`` is what it is a view of."""
        kinds = self._kinds
        made = []
        for one in results:
            layout = one.layout
            made.append(kinds[layout] if layout in kinds else self._kind(layout))
            value = Value(len(self.values), layout, self)
            if base is not None:
                value.root, value.offset = base.base, base.offset + one.offset
                value.with_gradients = torch.is_grad_enabled()
            self.values.append(value)
        self.entries.append((rule, codes, tuple(made)))

    def _kind(self, layout: Layout) -> int:
        """The number of a layout among this window's."""
        labels = self._labels
        sizes = tuple(
            -1 if size == 1 else labels.setdefault(size, len(labels)) for size in layout.shape
        )
        order: Any = None
        if not layout.contiguous:
            strides = layout.strides
            order = tuple(sorted(range(len(strides)), key=lambda k: (-strides[k], k)))
        self._patterns.append((layout.dtype, sizes, order))
        found = self._kinds[layout] = len(self._kinds)
        return found

    def structure(self, live: Sequence[int]) -> Any:
        """What windows have in common that one fused graph serves."""
        kinds = self._kinds
        given = tuple(
            kinds[one] if one in kinds else self._kind(one) for one in self.layouts_of_inputs
        )
        return (tuple(self.entries), given, tuple(self._patterns), len(self.numbers), tuple(live))

    def changed_input(self) -> torch.Tensor | None:
        """An input that somebody has written since it was queued."""
        for tensor, version in zip(self.inputs, self.versions, strict=True):
            if version is not None and tensor._version != version:
                return tensor
        return None

    def compiled(self, live: Sequence[int]) -> tuple[Compiled, bool]:
        """The fused graph that computes these values, and whether it had to be made."""
        key = self.structure(live)
        with _compiling:
            found = _compiled.get(key)
            if found is not None:
                _compiled.move_to_end(key)
                return found, False
            found = _compiled[key] = Compiled.of(self, live)
            if len(_compiled) > _MOST_COMPILED:
                _compiled.popitem(last=False)
            return found, True

    def __str__(self) -> str:
        lines = [f"in{k}: {_text(one)}" for k, one in enumerate(self.layouts_of_inputs)]
        number = 0
        for rule, codes, kinds in self.entries:
            values = self.values[number : number + len(kinds)]
            names = ", ".join(f"%{one.number}: {_text(one.layout)}" for one in values)
            lines.append(f"{names} = {rule.target}{codes}")
            number += len(kinds)
        return "\n".join(lines)


DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.float16,
        torch.bfloat16,
    }
)


def _text(layout: Layout) -> str:
    return f"{str(layout.dtype).removeprefix('torch.')}{list(layout.shape)}"


# -- arguments --
#
# A tensor is coded as its value's number, or as ~k for the input k; what is lifted as its type;
# a list as (list, codes); anything else as (type, value), floats by their text, for 0.0 is
# equal to -0.0 and NaN not to itself.

_LITERALS = frozenset(
    {
        int,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)


def coded_literal(arg: Any) -> Any:
    """The code of an argument that is no tensor.

    Raises:
        CannotWait: nothing is known about such arguments.
    """
    kind = type(arg)
    if kind is float:
        return (float, repr(arg))
    if kind in _LITERALS:
        return (kind, arg)
    raise CannotWait(f"an argument {kind.__name__}")


def decoded(code: Any, tensor: Any, lifted: Any) -> Any:
    """The argument; ``tensor(number)`` and ``lifted(type)`` stand for what is not in the code."""
    kind = type(code)
    if kind is int:
        return tensor(code)
    if kind is type:
        return lifted(code)
    first, value = code
    if first is list:
        return [decoded(one, tensor, lifted) for one in value]
    return float(value) if first is float else value


# -- the fused graph --


@dataclass(slots=True, eq=False)
class Compiled:
    """A window as one function.

    Attributes:
        schedule: takes the window's inputs and numbers, returns the live values.
        stepwise: the same, operator by operator.
    """

    schedule: Schedule
    stepwise: GraphModule

    @classmethod
    def of(cls, window: Window, live: Sequence[int]) -> Compiled:
        """Fuse a window."""
        graph = _graph(window, live)
        gm = GraphModule(torch.nn.Module(), graph)
        return cls(Schedule(gm, fuse(graph, fixed=False)), gm)


def _graph(window: Window, live: Sequence[int]) -> Graph:
    graph = Graph()
    inputs = [
        _placeholder(graph, f"in{k}", _example(layout))
        for k, layout in enumerate(window.layouts_of_inputs)
    ]
    numbers = [_placeholder(graph, f"number{k}", number) for k, number in enumerate(window.numbers)]
    waiting = iter(numbers)
    nodes: list[Node] = []

    def tensor(number: int) -> Node:
        return inputs[~number] if number < 0 else nodes[number]

    for rule, (args, kwargs), kinds in window.entries:
        given = tuple(decoded(one, tensor, lambda _: next(waiting)) for one in args)
        named = {name: decoded(one, tensor, lambda _: next(waiting)) for name, one in kwargs}
        node = graph.call_function(rule.target, given, named)
        values = window.values[len(nodes) : len(nodes) + len(kinds)]
        examples = [_example(one.layout) for one in values]
        if len(kinds) == 1 and not _returns_several(rule):
            node.meta["val"] = examples[0]
            nodes.append(node)
            continue
        node.meta["val"] = tuple(examples)
        for position, example in enumerate(examples):
            nodes.append(graph.call_function(operator.getitem, (node, position)))
            nodes[-1].meta["val"] = example
    graph.output(tuple(nodes[number] for number in live))
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return graph


def _placeholder(graph: Graph, name: str, value: Any) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _returns_several(rule: Rule) -> bool:
    return len(rule.target._schema.returns) > 1


class _Example(torch.Tensor):
    """Shape, strides and dtype of a tensor on the CPU without any memory."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a tensor that has no elements")


def _example(layout: Layout) -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(
        _Example, layout.shape, strides=layout.strides, dtype=layout.dtype
    )


def fitting(made: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``made`` with the strides that have been promised.

    Raises:
        AssertionError: another shape or dtype was promised.
    """
    shape, strides = tuple(made.shape), tuple(made.stride())
    assert shape == layout.shape and made.dtype is layout.dtype, f"{made.shape} is not {layout}"
    if strides == layout.strides or not made.numel():
        return made
    if all(a == b or n == 1 for n, a, b in zip(shape, strides, layout.strides, strict=True)):
        return made.as_strided(shape, layout.strides)
    return torch.empty_strided(shape, layout.strides, dtype=layout.dtype).copy_(made)


def alive(values: Iterable[Value]) -> list[int]:
    """The numbers of the values that own what ``values`` are views of, in order."""
    return sorted({one.base.number for one in values})
