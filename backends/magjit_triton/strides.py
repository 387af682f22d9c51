"""The strides that real kernels give where torch's fake ones, most of all for size 1, do not.

    Operands → Strides        TensorIterator's ways, the first that fits:
        all dense in row-major order                    row-major
        all dense in the order of channels last         channels last
        all dense in some order, of equal strides       those
        otherwise                                       dense, dimensions sorted by their strides

A program may ask a result for its strides, and operators that keep their operand's layout hand
them on.  Sources: ``aten/src/ATen/TensorIterator.cpp``
(``compute_fast_setup_type``, ``reorder_dimensions``), ``c10/core/TensorImpl.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from magjit.plugin.virtual_tensors.indexing import size_expr

__all__ = ["UNSURE", "correct_strides", "is_known", "iterated_strides", "preserved_strides"]

aten = torch.ops.aten
Strides = tuple[int, ...]

UNSURE = "magjit_unsure_strides"
"""In the ``meta`` of a node whose real strides may differ from its fake ones'."""

_PRESERVING = (
    aten._to_copy.default,
    aten.clone.default,
    aten.flip.default,
    aten.hardtanh.default,
    aten.relu6.default,
)
"""Operators whose result is like their first operand in memory, if that has no gaps."""
_ROW_MAJOR = (aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.pow.Scalar)
_COMPOSED = (aten.isinf,)
"""Pointwise operators that run several kernels."""
_WRAPPING = ("Scalar", "Scalar_Other", "Scalar_Self")
"""Overloads whose numbers become tensors."""
_NUMBERS = (aten.lerp.Scalar,)
"""Operators of such overloads whose numbers do not."""
_NUMBER = torch.empty((), device="meta")


def correct_strides(gm: GraphModule) -> None:
    """Give each node's fake value the strides that its real one has, where sizes are known.

    Where they are not, and for operators of which nothing is known here, the fake value stays; if
    operands are not dense in row-major order, the node is marked as ``UNSURE``.
    """
    changed: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        if _is_view(node):
            if changed.intersection(node.all_input_nodes):
                node.meta["val"] = _called(node)
                changed.add(node)
            if any(UNSURE in one.meta for one in node.all_input_nodes):
                node.meta[UNSURE] = True
        elif isinstance(value, torch.Tensor) and value.dim() > 1:
            strides = _strides_of(node, value) if is_known(value) else None
            if strides is None:
                plain = all(map(_is_plain, node.all_input_nodes))
                if not plain and _may_have_size_one(value):
                    node.meta[UNSURE] = True
            elif strides != value.stride():
                node.meta["val"] = _restrided(value, strides)
                changed.add(node)


def _may_have_size_one(value: torch.Tensor) -> bool:
    """Whether strides are not decided by the order of the dimensions alone."""
    if value.layout != torch.strided:
        return False
    return any(size == 1 if isinstance(size, int) else _may_be_one(size) for size in value.shape)


def _may_be_one(size: torch.SymInt) -> bool:
    """Symbols stand for two and more; a difference of them may be anything."""
    expr = size_expr(size)
    factors = expr.args if expr.is_Mul else (expr,)
    return not all(one.is_Symbol or (one.is_Integer and one > 1) for one in factors)


def _is_plain(node: Node) -> bool:
    """Whether a value is no tensor, or surely dense in row-major order."""
    value = node.meta.get("val")
    if isinstance(value, list | tuple):
        return UNSURE not in node.meta
    if not isinstance(value, torch.Tensor):
        return True
    if UNSURE in node.meta or value.layout != torch.strided:
        return False
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if size_expr(stride) != size_expr(expected):
            return False
        expected = expected * size
    return True


def _is_view(node: Node) -> bool:
    if node.target.__class__ is not torch._ops.OpOverload:
        return getattr(node.target, "__name__", "") == "getitem"
    return any(
        one.alias_info is not None and not one.alias_info.is_write
        for one in node.target._schema.returns
    )


def _called(node: Node) -> Any:
    def given(one: Node) -> Any:
        return one.meta["val"]

    args = torch.fx.map_arg(node.args, given)
    kwargs = torch.fx.map_arg(node.kwargs, given)
    old = node.meta["val"]
    first: Any = next(iter(old)) if isinstance(old, list | tuple) else old
    with first.fake_mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _restrided(value: torch.Tensor, strides: Strides) -> torch.Tensor:
    with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _strides_of(node: Node, value: torch.Tensor) -> Strides | None:
    """The strides of a result; None where the fake kernel's are taken."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    operands = _operands(node)
    if target in _PRESERVING:
        like = operands[0]
        form = node.kwargs.get("memory_format")
        if form not in (None, torch.preserve_format) or like.shape != value.shape:
            return None
        return preserved_strides(like)
    if target in _ROW_MAJOR:
        return row_major(value.shape)
    if torch.Tag.pointwise not in target.tags or target.overloadpacket in _COMPOSED:
        return None
    if not operands or target.namespace != "aten" or not all(map(is_known, operands)):
        return None
    if target.overloadpacket is aten.threshold_backward:
        operands.reverse()
    return iterated_strides(operands, value.shape)


def _operands(node: Node) -> list[torch.Tensor]:
    """The tensors that a kernel iterates over; numbers in their places are tensors too."""
    target: Any = node.target
    schema = target._schema
    wraps = (
        schema.overload_name in _WRAPPING
        and "clamp" not in schema.name
        and "lerp" not in schema.name
    )
    found: list[torch.Tensor] = []
    for position, argument in enumerate(schema.arguments):
        given = node.args[position] if position < len(node.args) else None
        given = node.kwargs.get(argument.name, given)
        kind = str(argument.type)
        if isinstance(given, Node) and isinstance(given.meta.get("val"), torch.Tensor):
            found.append(given.meta["val"])
        elif given is not None and (kind == "Tensor" or (wraps and kind == "number")):
            found.append(_NUMBER)
    return found


def is_known(value: torch.Tensor) -> bool:
    """Whether sizes and strides are numbers."""
    return value.layout == torch.strided and all(
        isinstance(one, int) for one in (*value.shape, *value.stride())
    )


def row_major(sizes: Sequence[int]) -> Strides:
    """Strides of a dense tensor, the last dimension innermost."""
    strides: list[int] = []
    running = 1
    for size in reversed(sizes):
        strides.append(running)
        running *= max(size, 1)
    return tuple(reversed(strides))


def has_no_gaps(value: torch.Tensor) -> bool:
    """Whether elements fill memory, each its own place, in whatever order of dimensions."""
    running = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size == 1:
            continue
        if stride != running:
            return False
        running *= size
    return True


def preserved_strides(value: torch.Tensor) -> Strides:
    """``empty_like``: the same strides if there are no gaps, else dense ones in the same order."""
    if has_no_gaps(value):
        return tuple(value.stride())
    return tuple(torch._prims_common.compute_elementwise_output_strides(value))


def iterated_strides(operands: Sequence[torch.Tensor], shape: Sequence[int]) -> Strides:
    """The strides of what a pointwise operator makes of tensors whose sizes are known."""
    sizes = tuple(shape)
    if all(tuple(one.shape) == sizes for one in operands):
        if all(one.is_contiguous() for one in operands):
            return row_major(sizes)
        for rank, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if len(sizes) == rank and form is torch.channels_last:
                if all(one.is_contiguous(memory_format=form) for one in operands):
                    order = [0, *range(2, rank), 1]
                    dense = row_major([sizes[k] for k in order])
                    return tuple(dense[order.index(k)] for k in range(rank))
        strides = operands[0].stride()
        if all(has_no_gaps(one) and one.stride() == strides for one in operands):
            return tuple(strides)
    order = _order(sizes, [_broadcast(one, sizes) for one in operands])
    if order == list(reversed(range(len(sizes)))):
        return row_major(sizes)
    made = [0] * len(sizes)
    running = 1
    for dim in order:
        made[dim] = running
        running *= sizes[dim]
    return tuple(made)


def _broadcast(operand: torch.Tensor, sizes: Sequence[int]) -> Strides:
    given = zip(operand.shape, operand.stride(), sizes[len(sizes) - operand.dim() :], strict=True)
    own = [0 if size == 1 and whole != 1 else stride for size, stride, whole in given]
    return (*[0] * (len(sizes) - operand.dim()), *own)


def _order(sizes: Sequence[int], operands: Sequence[Strides]) -> list[int]:
    """The dimensions from the innermost to the outermost."""

    def compared(one: int, other: int) -> int:
        for strides in operands:
            mine, theirs = strides[one], strides[other]
            if mine == 0 or theirs == 0:
                continue
            if mine != theirs:
                return -1 if mine < theirs else 1
            if sizes[one] > sizes[other]:
                return 1
        return 0

    order = list(reversed(range(len(sizes))))
    for start in range(1, len(order)):
        here = start
        for before in reversed(range(start)):
            side = compared(order[before], order[here])
            if side > 0:
                order[before], order[here] = order[here], order[before]
                here = before
            elif side < 0:
                break
    return order
