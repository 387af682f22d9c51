"""Inputs whose layout does not matter: the graph only puts them into longer tensors.

A key/value cache begins as a view of what the first step has computed, and is the result of a
concatenation from the next step on: the same sizes in another layout. The concatenation gives the
same either way, so one record serves both. Its graph takes such an input contiguous; a call that
has it otherwise, usually the first one, copies it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from magjit.monitor.operator_graph import Operator, OperatorGraph, ValueRef, refs_in
from magjit.monitor.regions import Region
from magjit.plugin import CustomGuard, ShapeGuard

_JOINING = frozenset({torch.cat, torch.concat, torch.concatenate})
_WITH_FORMATS = (4, 5)
"""Only of tensors with so many dimensions torch asks for a format of the memory."""
_SIZES = frozenset({"shape", "size", "numel", "nelement", "__len__", "broadcast_shapes"})
"""Metadata that says nothing of the layout."""
_LAYOUT = re.compile(r"inputs\[(\d+)\]\.(?:stride\(\)\[(\d+)\]|storage_offset\(\))")


def joins(func: Any) -> bool:
    """Whether a function puts tensors one behind the other."""
    return func in _JOINING


def may_lie_anyhow(tensor: torch.Tensor, func: Any) -> bool:
    """Whether the layout of an outside tensor may turn out not to matter.

    Args:
        tensor: strided, from outside.
        func: its first use.
    """
    return (
        joins(func)
        and type(tensor) is torch.Tensor
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_contiguous()
    )


class OpenLayouts:
    """Which inputs of one run have so far been used in ways to which layouts do not matter."""

    def __init__(self) -> None:
        self._open: set[int] = set()  # values
        self._joining: set[int] = set()  # operators, by identity

    def add(self, value_id: int) -> None:
        """The layout of an input may turn out not to matter."""
        self._open.add(value_id)

    def follow(self, op: Operator, fakes: Mapping[int, Any]) -> None:
        """An operator has been recorded, and the fake tensors of its values are known.

        What torch asks of them becomes a guard of their shape environment.
        """
        if self._open and joins(op.func) and _joins_anyhow(op, fakes, self._open):
            self._joining.add(id(op))

    def read(self, name: str, template: Any) -> None:
        """Metadata of the tensors in a template is read."""
        if self._open and name not in _SIZES:
            self._open.difference_update(ref.value_id for ref in refs_in(template))

    def loose(self, graph: OperatorGraph, outputs: Iterable[int]) -> frozenset[int]:
        """Positions of the inputs that a graph may get in any layout.

        What was joined takes the place of the input in the next call, which then has it contiguous:
        only so a copy is the exception.

        Args:
            graph: of the run.
            outputs: values that the graph gives.
        """
        given = set(outputs)
        left = self._open - given
        for op in graph.operators if left else ():
            if isinstance(op.func, Region):
                return frozenset()
            used = {ref.value_id for ref in refs_in((op.args, op.kwargs, op.result))}
            if not left.isdisjoint(used):
                result = op.result.value_id if isinstance(op.result, ValueRef) else None
                if id(op) not in self._joining or result not in given:
                    left -= used
        return frozenset(
            position for position, item in enumerate(graph.inputs) if item.value_id in left
        )


def _joins_anyhow(op: Operator, fakes: Mapping[int, Any], open_inputs: Collection[int]) -> bool:
    """Whether a concatenation gives the same whatever the layout of some operands."""
    operands = op.args[0] if op.args else op.kwargs.get("tensors")
    if "out" in op.kwargs or not isinstance(operands, (list, tuple)):
        return False
    if not all(isinstance(operand, ValueRef) for operand in operands):
        return False
    tensors = [fakes[operand.value_id] for operand in operands]
    if len({(one.dtype, one.layout, one.dim()) for one in tensors}) != 1:
        return False  # some are converted first, or skipped
    if tensors[0].dim() not in _WITH_FORMATS:
        return True
    # The result is contiguous as soon as one operand suggests it.
    return any(
        operand.value_id not in open_inputs
        and suggest_memory_format(tensor) is torch.contiguous_format
        for operand, tensor in zip(operands, tensors, strict=True)
    )


def laid_out(compiled: Callable[..., Any], positions: frozenset[int]) -> Callable[..., Any]:
    """A compiled graph that gets some of its inputs in any layout."""

    def run(*values: Any) -> Any:
        return compiled(*[v.contiguous() if i in positions else v for i, v in enumerate(values)])

    return run


def without_layout(guards: Sequence[ShapeGuard], positions: frozenset[int]) -> list[ShapeGuard]:
    """Those of a run's conditions that are not about the layout of some inputs."""
    return [
        guard
        for guard in guards
        if not any(int(found[1]) in positions for found in _LAYOUT.finditer(guard.expression))
    ]


def of_contiguous(
    guards: Sequence[Any], positions: frozenset[int], dimensions: Sequence[int]
) -> list[Any]:
    """What a backend assumes of contiguous inputs, as conditions on those in any layout.

    Args:
        guards: of the backend.
        positions: of the inputs that it gets contiguous.
        dimensions: of each input of the graph that is a tensor.
    """

    def layout(found: re.Match[str]) -> str:
        position = int(found[1])
        if position not in positions:
            return found[0]
        if found[2] is None:
            return "0"
        inner = range(int(found[2]) + 1, dimensions[position])
        return "*".join(["1", *(f"inputs[{position}].size()[{dim}]" for dim in inner)])

    made: list[Any] = []
    for guard in guards:
        if isinstance(guard, ShapeGuard):
            guard = ShapeGuard(
                _LAYOUT.sub(lambda m: f"({layout(m)})", guard.expression), guard.inputs
            )
        elif isinstance(guard, CustomGuard) and not positions.isdisjoint(guard.inputs):
            chosen = frozenset(n for n, i in enumerate(guard.inputs) if i in positions)
            guard = CustomGuard(guard.inputs, laid_out(guard.check, chosen), guard.reason)
        made.append(guard)
    return made
