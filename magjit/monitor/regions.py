"""Parts of a run that torch runs as one operator over a graph of its own.

Region         ::= checkpointed operators
FunctionRegion ::= operators of the forward of an ``autograd.Function``, and what it says of them
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Self

from magjit.monitor.operator_graph import Operator, ValueRef, refs_in


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Region:
    """A checkpointed part of the program: its operators are computed again for the backward.

    Attributes:
        operators: of the region, in order.
        inputs: values from outside that they use, in order of first use.
        made: values that they make.
        options: of the checkpoint, such as ``use_reentrant``.
    """

    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    made: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, operators: list[Operator], mentioned: Any = (), **more: Any) -> Self:
        """The region of some operators.

        Args:
            operators: in order.
            mentioned: templates that use values of the region or of the graph around.
            more: the fields that the kind of region adds.
        """
        made: dict[int, None] = {}
        inputs: dict[int, None] = {}
        for op in operators:
            for ref in refs_in((op.args, op.kwargs)):
                if ref.value_id not in made:
                    inputs[ref.value_id] = None
            for ref in refs_in(op.result):
                if ref.value_id not in inputs:
                    made[ref.value_id] = None
        for ref in refs_in(mentioned):
            if ref.value_id not in made:
                inputs[ref.value_id] = None
        return cls(operators=tuple(operators), inputs=tuple(inputs), made=tuple(made), **more)

    @property
    def __name__(self) -> str:
        return "checkpoint"

    def __call__(self, *inputs: Any) -> Any:
        raise TypeError("a region is lowered, not called")

    def operator(self, code: CodeType | None, offset: int) -> Operator:
        """The operator that stands for the region among those around it."""
        args = tuple(ValueRef(i) for i in self.inputs)
        return Operator(self, args, {}, tuple(ValueRef(i) for i in self.made), code, offset)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FunctionRegion(Region):
    """The forward of an ``autograd.Function``, whose backward stays the program's own.

    Attributes:
        function: the program's class.
        call_args: what ``apply`` was called with: its gradients go by position.
        returned: what the forward returned, in values of the region.
        result: what ``apply`` returned, in values of the graph around.
        saved: arguments of ``ctx.save_for_backward``, or None where it was not called.
        dirty, undifferentiable: arguments of ``ctx.mark_dirty`` and the like.
        materialize: of ``ctx.set_materialize_grads``.
        attributes: what the forward set on the context.
    """

    function: type
    call_args: tuple[Any, ...]
    returned: Any
    result: list[Any]
    saved: tuple[Any, ...] | None
    dirty: tuple[Any, ...]
    undifferentiable: tuple[Any, ...]
    materialize: bool
    attributes: dict[str, Any]

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}.apply"

    @property
    def further(self) -> tuple[int, ...]:
        """Inputs that are not arguments of ``apply``."""
        given = {ref.value_id for ref in self.call_args if isinstance(ref, ValueRef)}
        return tuple(value_id for value_id in self.inputs if value_id not in given)

    def operator(self, code: CodeType | None, offset: int) -> Operator:
        """See `Region`."""
        args = (*self.call_args, *[ValueRef(i) for i in self.further])
        made = tuple(ValueRef(i) for i in self.made)
        return Operator(self, args, {}, (*self.result, made), code, offset)
