"""Symbols as graph inputs of their own, the way Dynamo passes them.

AOTAutograd finds a symbol by the input that carries it: a size that is used outside of
the shapes of values (a view made again from its base, a count passed on to the backward)
needs an input that *is* the symbol.  These inputs come after all others::

    Binding := Size(input, dim) | Stride(input, dim) | Offset(input)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource
from torch.fx import GraphModule

from magjit.plugin.protocol import CompiledGraph

__all__ = ["Binding", "Property", "bind_symbols", "is_symbolic", "passing_symbols"]


class Property(Enum):
    """What of a tensor a symbol stands for."""

    SIZE = TensorProperty.SIZE
    STRIDE = TensorProperty.STRIDE
    OFFSET = TensorProperty.STORAGE_OFFSET


@dataclass(frozen=True, slots=True)
class Binding:
    """Where the value of a symbol is found at a call."""

    symbol: str
    property: Property
    input: int
    dim: int | None = None

    def __str__(self) -> str:
        at = "" if self.dim is None else f"({self.dim})"
        return f"{self.symbol} := inputs[{self.input}].{self.property.name.lower()}{at}"

    def expression(self, names: Sequence[str]) -> str:
        """Code for the value, of the names of the inputs."""
        at = "" if self.dim is None else str(self.dim)
        return f"{names[self.input]}.{_METHODS[self.property]}({at})"

    def read(self, inputs: Sequence[Any]) -> int:
        """The value of the symbol for these inputs."""
        at = () if self.dim is None else (self.dim,)
        return int(getattr(inputs[self.input], _METHODS[self.property])(*at))


_METHODS = {
    Property.SIZE: "size",
    Property.STRIDE: "stride",
    Property.OFFSET: "storage_offset",
}


def is_symbolic(value: object) -> bool:
    """Whether a fake input has a symbol in its metadata, or is one."""
    if isinstance(value, torch.SymInt):
        return True
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    numbers = (*value.size(), *value.stride(), value.storage_offset())
    return any(isinstance(number, torch.SymInt) for number in numbers)


def bind_symbols(
    gm: GraphModule, values: Sequence[Any], sources: Sequence[LocalSource]
) -> tuple[tuple[Binding, ...], tuple[torch.SymInt, ...]]:
    """Append a placeholder for each symbol that is no input yet; changes ``gm``.

    Returns:
        Where each is read from, and the symbols themselves.
    """
    bound = {str(value.node.expr) for value in values if isinstance(value, torch.SymInt)}
    bindings: list[Binding] = []
    symbols: list[torch.SymInt] = []
    for position, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not is_symbolic(value):
            continue
        for kind, dim, number in _numbers(value):
            if not isinstance(number, torch.SymInt) or not _is_plain_symbol(number):
                continue
            name = str(number.node.expr)
            if name not in bound:
                bound.add(name)
                bindings.append(Binding(name, kind, position, dim))
                symbols.append(number)
    _append_placeholders(gm, bindings, symbols, sources)
    return tuple(bindings), tuple(symbols)


def _numbers(value: torch.Tensor) -> list[tuple[Property, int | None, Any]]:
    sizes = [(Property.SIZE, dim, value.size(dim)) for dim in range(value.dim())]
    strides = [(Property.STRIDE, dim, value.stride(dim)) for dim in range(value.dim())]
    return [*sizes, *strides, (Property.OFFSET, None, value.storage_offset())]


def _is_plain_symbol(number: torch.SymInt) -> bool:
    return bool(number.node.expr.is_Symbol)


def _append_placeholders(
    gm: GraphModule,
    bindings: Sequence[Binding],
    symbols: Sequence[torch.SymInt],
    sources: Sequence[LocalSource],
) -> None:
    if not bindings:
        return
    last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
    for binding, symbol in zip(bindings, symbols, strict=True):
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(binding.symbol)
        last.meta["example_value"] = symbol
        source: Any = TensorPropertySource(
            sources[binding.input], binding.property.value, binding.dim
        )
        last._dynamo_source = source
    gm.recompile()


def passing_symbols(
    compiled: CompiledGraph, bindings: Sequence[Binding], given: int
) -> CompiledGraph:
    """A callable without the appended inputs, which come after the ``given`` first.

    It is straight-line code, since every call goes through it.
    """
    if not bindings:
        return compiled
    unread: frozenset[int] = getattr(compiled, "unread", frozenset())
    names = [f"_{position}" for position in range(given)]
    values = [
        "None" if given + k in unread else binding.expression(names)
        for k, binding in enumerate(bindings)
    ]
    source = f"def call({', '.join(names)}): return compiled({', '.join(names + values)})"
    defined: dict[str, Any] = {"compiled": compiled}
    exec(source, defined)
    call: CompiledGraph = defined["call"]
    only = getattr(compiled, "only", None)
    if only is not None and all(position < given for position in only[1]):
        call.only = only  # type: ignore[attr-defined]
    return call
