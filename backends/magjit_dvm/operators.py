"""What handlers of ATen operators share: the registry, type promotion, blocks of instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._prims_common import elementwise_dtypes
from torch.fx import Node as FxNode

from magjit_dvm.builder import Builder, NotFusable, Value, computed_in
from magjit_dvm.instructions import DType
from magjit_dvm.program import has_machine
from magjit_dvm.tables import Promotion

__all__ = [
    "HANDLERS",
    "Block",
    "Handler",
    "argument",
    "elementwise",
    "finished",
    "meta",
    "one_result",
    "promoted",
    "register",
]

Handler = Callable[[Builder, FxNode], Any]
HANDLERS: dict[Any, Handler] = {}


def register(*targets: Any) -> Callable[[Handler], Handler]:
    """Make a function the handler of these operators."""

    def keep(handler: Handler) -> Handler:
        for target in targets:
            HANDLERS[target] = handler
        return handler

    return keep


def argument(node: Any, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def meta(value: Any) -> Any:
    """What a node carries, or the value itself."""
    return value.meta["val"] if isinstance(value, FxNode) else value


def _sample(value: Any) -> tuple[torch.dtype, bool] | type:
    """What type promotion looks at: of a tensor the dtype, and whether it has dimensions."""
    if isinstance(value, Value):
        return value.logical, bool(value.shape)
    given = meta(value)
    if isinstance(given, torch.Tensor):
        return given.dtype, given.dim() > 0
    if isinstance(given, torch.SymInt):
        return int
    return float if isinstance(given, torch.SymFloat) else type(given)


@cache
def _promoted(
    samples: tuple[tuple[torch.dtype, bool] | type, ...], promotion: Promotion
) -> tuple[torch.dtype, torch.dtype]:
    given = [
        one() if isinstance(one, type) else torch.empty((1,) * one[1], dtype=one[0], device="meta")
        for one in samples
    ]
    compute, result = elementwise_dtypes(*given, type_promotion_kind=promotion)
    return compute, result


def promoted(args: Sequence[Any], promotion: Promotion) -> tuple[DType, torch.dtype]:
    """What to compute in, and the result's dtype."""
    compute, result = _promoted(tuple(map(_sample, args)), promotion)
    return computed_in(compute), result


def one_result(node: Any) -> torch.Tensor:
    """The operator's result, if that is one tensor on a device with a virtual machine."""
    tensor = node.meta["val"]
    if not isinstance(tensor, torch.Tensor) or not has_machine(tensor.device):
        raise NotFusable("not a tensor on a CPU or GPU")
    return tensor


class Block:
    """Elementwise instructions of one operator: operands brought together, then computed with.

    The methods take and return numbers of nodes, all of the block's dtype.
    """

    def __init__(
        self, builder: Builder, args: Sequence[Any], shape: Sequence[Any], dtype: DType
    ) -> None:
        self.builder = builder
        self.dtype = dtype
        self.shape = tuple(shape)
        self.made, self.dims = builder.operands(args, shape, dtype)

    def __call__(self, op: str, *args: int | float) -> int:
        return self.builder.compute(op, self.dtype, *(self._operand(one) for one in args))

    def compare(self, op: str, *args: int | float) -> int:
        """A result of bool."""
        made = (self._operand(one) for one in args)
        return self.builder.compute(op, self.dtype, *made, to_bool=True)

    def select(self, condition: int, left: int | float, right: int | float) -> int:
        """``left`` where ``condition`` holds, else ``right``."""
        left, right = self._operand(left), self._operand(right)
        return self.builder.compute("select", self.dtype, condition, left, right)

    def _operand(self, one: int | float) -> int:
        return self.constant(one) if isinstance(one, float) else one

    def constant(self, number: float | int) -> int:
        """A number as a node."""
        return self.builder.constant(number, self.dtype)

    def value(self, node: int, logical: torch.dtype, dtype: DType | None = None) -> Value:
        """The result, with the block's loops."""
        return Value(node, dtype or self.dtype, self.dims, self.shape, logical)


def finished(block: Block, node: int, logical: torch.dtype) -> Value:
    """The result in its own dtype, where that is not the one computed in."""
    want = computed_in(logical)
    if logical in (torch.float16, torch.bfloat16):
        node = block.builder.rounded(node)
    return block.value(block.builder.cast(node, block.dtype, want), logical, want)


def elementwise(
    builder: Builder, node: Any, args: Sequence[Any], promotion: Promotion
) -> tuple[Block, torch.dtype]:
    """The block of an elementwise operator, and its result's dtype."""
    tensor = one_result(node)
    compute, result = promoted(args, promotion)
    return Block(builder, args, tensor.shape, compute), result
