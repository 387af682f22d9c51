"""What ATen's kernels really read with strides and write through ``out=``: tables and checks.

Operators that are in no table keep the operands and results of eager mode. The tables
are profiled by the tests: a kernel that takes ``out=`` and then allocates and copies has no place
here (``convolution.out`` and ``relu.out`` on the CPU do).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from magjit.plugin.aliases import is_alias
from magjit.plugin.virtual_tensors import Affine, Mapping, VirtualTensor
from magjit.plugin.virtual_tensors.costs import left_to_fill, left_to_move, tensor_bytes
from magjit.plugin.virtual_tensors.indexing import is_nonnegative, size_expr
from magjit.plugin.virtual_tensors.opportunities import Movements
from magjit.plugin.virtual_tensors.search import Strategy
from magjit_triton.sizes import symbolic_size

__all__ = [
    "AtenKernels",
    "is_border",
    "never_raises",
    "out_variant",
    "relu_out",
    "same_layout",
    "strided",
]

aten = torch.ops.aten

_POINTWISE = (
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
    "silu",
    "softplus",
    "hardtanh",
    "elu",
    "leaky_relu",
    "hardsigmoid",
    "hardswish",
)
_OUT: dict[Any, Any] = {getattr(aten, name).default: getattr(aten, name).out for name in _POINTWISE}
_OUT |= {
    aten.add.Tensor: aten.add.out,
    aten.addcdiv.default: aten.addcdiv.out,
    aten.addcmul.default: aten.addcmul.out,
    aten.addmm.default: aten.addmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
    aten.bmm.default: aten.bmm.out,
    aten.clamp.default: aten.clamp.out,
    aten.clamp_max.default: aten.clamp_max.out,
    aten.clamp_min.default: aten.clamp_min.out,
    aten.div.Tensor: aten.div.out,
    aten.maximum.default: aten.maximum.out,
    aten.minimum.default: aten.minimum.out,
    aten.mm.default: aten.mm.out,
    aten.mul.Tensor: aten.mul.out,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Scalar_out,
    aten.pow.Tensor_Tensor: aten.pow.Tensor_Tensor_out,
    aten.sub.Tensor: aten.sub.out,
    aten.where.self: aten.where.self_out,
}
MATRICES = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_REDUCTIONS = (
    aten.amax.default,
    aten.amin.default,
    aten.mean.default,
    aten.mean.dim,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.var.correction,
    aten.var_mean.correction,
)
_STRIDED = (
    aten.copy_.default,
    aten.index_copy_.default,
    aten.index_put_.default,
    aten.index_copy.default,
    aten.index_put.default,
)
_COPYING = (
    aten._native_batch_norm_legit_no_training.default,
    aten._softmax.default,
    aten.convolution.default,
    aten.native_layer_norm.default,
)
"""Kernels that make their operand dense first."""
_DENSE_ONLY = (aten.native_group_norm.default,)
"""Kernels that refuse other operands than dense ones."""
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_ATTENTION = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)


_MEMORY = (
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.copy.default,
    aten.copy_.default,
    aten.empty_strided.default,
    aten.fill_.Scalar,
    aten.stack.default,
)
_NO_ERRORS = (
    aten._to_copy.default,
    aten.add.Tensor,
    aten.eq.Scalar,
    aten.eq.Tensor,
    aten.ge.Scalar,
    aten.gt.Scalar,
    aten.le.Scalar,
    aten.lt.Scalar,
    aten.mul.Tensor,
    aten.sub.Tensor,
    aten.where.self,
)


def relu_out(given: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """``relu`` into given memory; ``aten.relu.out`` makes a tensor of its own and copies it."""
    return torch.clamp_min(given, 0, out=out)


def out_variant(node: Node) -> Callable[..., Any] | None:
    """The form of an operator that writes into given memory and allocates no result."""
    if node.target is aten.relu.default:
        return relu_out
    found: Callable[..., Any] | None = _OUT.get(node.target)
    return found


def never_raises(node: Node) -> bool:
    """Whether an operator that fake tensors took raises for no values, as far as is known."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target in (operator.getitem, relu_out) or not isinstance(
            node.meta.get("val"), torch.Tensor
        )
    if is_alias(node) or target in (
        *_REDUCTIONS,
        *_COPYING,
        *_DENSE_ONLY,
        *_ATTENTION,
        *MATRICES,
        *_MEMORY,
    ):
        return True
    value = node.meta.get("val")
    # Integers are divided by zero and raised to negative powers with an error.
    real = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return torch.Tag.pointwise in target.tags and (real or target in _NO_ERRORS)


def is_border(node: Node) -> bool:
    """Whether an operator's own values lie around its operand, which no side crops."""
    if node.target is not aten.constant_pad_nd.default:
        return False
    pads = [getattr(pad, "meta", {}).get("val", pad) for pad in node.args[1]]  # type: ignore[union-attr]
    return all(is_nonnegative(size_expr(pad)) for pad in pads)


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether sizes and strides are known to be equal."""
    return _exprs(one.shape) == _exprs(other.shape) and _exprs(one.stride()) == _exprs(
        other.stride()
    )


def _exprs(sizes: Sequence[Any]) -> tuple[sympy.Expr, ...]:
    return tuple(map(size_expr, sizes))


def strided(mapping: Mapping) -> Affine | None:
    """The mapping as strides that torch can have, which are not negative."""
    found = mapping.affine()
    return found if found is not None and all(map(is_nonnegative, found.strides)) else None


class AtenKernels:
    """``Kernels`` of ATen: affine places only, read as strides, written through ``out=``.

    Args:
        movements: the graph's data-movement operators.
    """

    def __init__(self, movements: Movements) -> None:
        self.movements = movements
        self._fakes: dict[Any, torch.Tensor] = {}
        self._affines: dict[Any, tuple[VirtualTensor, Affine | None]] = {}

    def can_write(self, tensor: Node) -> bool:
        """Whether a kernel computes a tensor into given memory."""
        return out_variant(tensor) is not None

    def affine(self, tensor: Node, strategy: Strategy) -> Affine | None:
        """Offset and strides of a tensor over one physical one.

        A dimension of size 1 gets the stride that it has in eager mode, if all others have theirs,
        or else that of a dense dimension.
        """
        place = strategy.place(tensor)
        key = (tensor, id(place))
        if key not in self._affines:
            self._affines[key] = place, self._strided(tensor, place)
        return self._affines[key][1]

    def _strided(self, tensor: Node, place: VirtualTensor) -> Affine | None:
        found = strided(place.mapping)
        if found is None:
            return None
        shape, given = _exprs(tensor.meta["val"].shape), _exprs(tensor.meta["val"].stride())
        pairs = list(zip(shape, found.strides, given, strict=True))
        if all(size == 1 or mine == eager for size, mine, eager in pairs):
            return Affine(found.source, found.offset, given)
        strides: list[sympy.Expr] = []
        for k in reversed(range(len(shape))):
            beyond = strides[-1] * shape[k + 1] if strides else sympy.S.One
            strides.append(beyond if shape[k] == 1 else found.strides[k])
        return Affine(found.source, found.offset, tuple(reversed(strides)))

    def value(self, tensor: Node, strategy: Strategy) -> torch.Tensor | None:
        """A fake tensor with the layout that a strategy gives; None where it has no strides.

        A rearrangement without strides is read as the copy that it would be if it were physical.
        """
        given: torch.Tensor = tensor.meta["val"]
        if tensor not in strategy.chosen:
            return given
        affine = self.affine(tensor, strategy)
        if affine is None:
            return None if strategy.chosen[tensor].backward else given
        if affine.strides == _exprs(given.stride()):
            return given
        key = (tensor, affine.strides)
        if key not in self._fakes:
            strides = [symbolic_size(one, given) for one in affine.strides]
            if any(one is None for one in strides):
                return None
            with given.fake_mode:  # type: ignore[attr-defined]
                self._fakes[key] = torch.empty_strided(
                    given.shape, strides, dtype=given.dtype, device=given.device
                )
        return self._fakes[key]

    def result_value(self, node: Node, strategy: Strategy) -> Any:
        """The fake results that an operator has with its operands where they are.

        None where an operand has no strides, or the operator does not take these.
        """
        values = {one: self.value(one, strategy) for one in self.movements.operands(node)}
        if any(value is None for value in values.values()):
            return None
        if all(value is one.meta["val"] for one, value in values.items()):
            return node.meta["val"]

        def given(one: Node) -> Any:
            return values.get(one, one.meta.get("val"))

        if node.target in _VIEWS and not self._is_viewable(node, values):
            return None
        args = torch.fx.map_arg(node.args, given)
        kwargs = torch.fx.map_arg(node.kwargs, given)
        mode = next(iter(values.values())).fake_mode  # type: ignore[union-attr]
        try:
            with mode, torch.no_grad():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):
            return None

    def _is_viewable(self, node: Node, values: dict[Node, torch.Tensor | None]) -> bool:
        """Whether a view has strides; fake tensors allow some that real ones refuse."""
        (value,) = values.values()
        assert value is not None
        (movement,) = self.movements.directions[node].results
        mapping = Mapping.physical(value.shape, value.stride())
        return movement.over([mapping]).affine() is not None

    def is_copied(self, tensor: Node, strategy: Strategy) -> bool:
        """Whether a virtual tensor has to be made for those who read it."""
        opportunity = strategy.chosen.get(tensor)
        if opportunity is None or opportunity.backward:
            return False
        return self.affine(tensor, strategy) is None

    def _copied(self, operands: Sequence[Node], strategy: Strategy) -> float:
        return sum(
            2 * tensor_bytes(one.meta["val"]) for one in operands if self.is_copied(one, strategy)
        )

    # -- the protocol of the cost model --

    def run(self, node: Node, strategy: Strategy) -> float | None:
        """Hidden copies of a computing operator, or None where it cannot work so."""
        total = self._copied(self.movements.operands(node), strategy)
        for position, operand in enumerate(self.movements.operands(node)):
            value = self.value(operand, strategy)
            if value is None:
                return None
            if value is not operand.meta["val"]:
                cost = _reading(node, position, value)
                if cost is None:
                    return None
                total += cost
        changed = self.result_value(node, strategy)
        if changed is None:
            return None
        results = self.movements.results(node)
        made = changed if isinstance(changed, list | tuple) else [changed]
        for result, value in zip(results, made, strict=True):
            if result is None or not isinstance(value, torch.Tensor):
                continue
            moved = result in strategy.chosen
            if moved and self.affine(result, strategy) is None:
                return None
            if (moved or not same_layout(value, result.meta["val"])) and not self.can_write(node):
                return None
        return total

    def move(self, node: Node, strategy: Strategy, whole: bool) -> float | None:
        """A data-movement operator that is left reads and writes tensors that have strides."""
        left = left_to_move(node, self.movements, strategy)
        if any(self.value(one, strategy) is None for one in left):
            return None
        copied = self._copied(left, strategy)
        for result in self.movements.results(node):
            if result is not None and self.affine(result, strategy) is None:
                return None
        fills = left_to_fill(node, self.movements, strategy)
        if fills and not whole and not is_border(node):
            return None
        if whole:
            return copied
        placed = self.movements.directions[node].operands
        left_over = set(left)
        known = all(
            position in placed
            for position, one in enumerate(self.movements.operands(node))
            if one in left_over
        )
        return copied if known else None

    def lies_as_in_eager(self, tensor: Node, strategy: Strategy) -> bool:
        """Whether views of a tensor have the strides that those who read them expect."""
        return self.value(tensor, strategy) is tensor.meta["val"]


def _reading(node: Node, position: int, value: torch.Tensor) -> float | None:
    """Bytes that a kernel copies to read an operand with these strides; None: not known to."""
    target: Any = node.target
    strides = _exprs(value.stride())
    if torch.Tag.pointwise in target.tags or target in (*_REDUCTIONS, *_STRIDED):
        return 0.0
    if target in MATRICES:
        if value.dim() < 2:
            return 0.0
        return 0.0 if _is_matrix(value, strides) else 2 * tensor_bytes(value)
    if target in _ATTENTION:
        return 0.0 if strides[-1] == 1 and position < 3 else None
    if target in _DENSE_ONLY:
        return 0.0 if value.is_contiguous() else None
    if target in _COPYING:
        return 0.0 if value.is_contiguous() else 2 * tensor_bytes(value)
    return None


def _is_matrix(value: torch.Tensor, strides: Sequence[sympy.Expr]) -> bool:
    """Whether BLAS takes the last two dimensions: one is dense, the other at least as long."""
    rows, columns = _exprs(value.shape[-2:])
    down, across = strides[-2:]
    return bool(
        (across == 1 and (down - columns).is_nonnegative)
        or (down == 1 and (across - rows).is_nonnegative)
        or (across == 1 and rows == 1)
        or (down == 1 and columns == 1)
    )
