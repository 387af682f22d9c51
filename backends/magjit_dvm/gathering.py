"""Looking up by position: of tensors in memory, and of what the group computes.

A value that the group computes is not written for a look-up along one of its loops. The look-up
is *pushed through* the instructions that made it: tensors are read at the positions, what does
not vary along the loop (a row's maximum, its sum) is used as it is, and in between the same
instructions run once for each position rather than for each element.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit_dvm.builder import Builder, NotFusable, Value, computed_in, size_key
from magjit_dvm.instructions import DType
from magjit_dvm.operators import argument, meta, one_result, register
from magjit_dvm.program import INDEXED, ONE, Node, NodeKind

__all__ = ["one_hot", "one_hot_sum", "picked"]

aten = torch.ops.aten

_INTS = (DType.I64, DType.I32, DType.U8)
_RAISING = ("floor_div", "trunc_div", "remainder", "fmod")


def _raises(node: Node, builder: Builder) -> bool:
    """Whether some element of the value may be an error, whoever reads it."""
    divides = node.op in _RAISING and builder.nodes[node.args[0]].dtype in _INTS
    return divides or node.kind is NodeKind.INDEX


def _pushed(builder: Builder, node: int, loop: int, position: int) -> int:
    """What ``node`` is at ``position`` along ``loop``.

    Raises:
        NotFusable: it is no elementwise function of tensors along the loop.
    """
    made: dict[int, int] = {}

    def at(number: int) -> int:
        if loop not in builder.varies[number]:
            return number
        if number not in made:
            made[number] = moved(builder.nodes[number])
        return made[number]

    def moved(one: Node) -> int:
        if one.kind is NodeKind.LOAD:
            given = builder.inputs[one.aux]
            dims = tuple(INDEXED if d == loop else d for d in given.dims)
            return builder.looked_up(builder.arguments[one.aux], dims, position)
        if one.kind not in (NodeKind.COMPUTE, NodeKind.CAST) or _raises(one, builder):
            raise NotFusable("a look-up in what is no function of each element")
        return builder.add(replace(one, args=tuple(at(arg) for arg in one.args)))

    if loop not in builder.varies[node]:
        # Nothing would find that a position is out of bounds.
        raise NotFusable("a look-up along an expanded dimension")
    return at(node)


def picked(
    builder: Builder, given: Any, axis: int, position: int, dims: tuple[int, ...]
) -> tuple[int, DType]:
    """Elements of a tensor at positions along ``axis``; ``dims`` has the loops of its others."""
    value = builder.values.get(given)
    if value is None:
        sizes = given.meta["val"].shape
        own = [ONE if size_key(n) == 1 else d for n, d in zip(sizes, dims, strict=True)]
        own[axis] = INDEXED
        made = builder.looked_up(given, tuple(own), position)
        return builder.widened(made, builder.nodes[made].dtype)
    if not isinstance(value, Value):
        raise NotFusable("an operator with several results")
    if value.dims[axis] == ONE:
        raise NotFusable("a look-up along an expanded dimension")
    return _pushed(builder, value.node, value.dims[axis], position), value.dtype


def _result_loops(
    builder: Builder, given: Any, axis: int, positions: Any, shape: tuple[Any, ...]
) -> tuple[int, ...]:
    """The loops of a look-up's result: those of the positions, and of the tensor but for one."""
    value, before = builder.known(given), set(builder.loops)
    if value is not None:
        own = [ONE if k == axis else d for k, d in enumerate(value.dims)]
        sizes = [1 if k == axis else n for k, n in enumerate(value.shape)]
        value = replace(value, dims=tuple(own), shape=tuple(sizes))
    dims = builder.loops_of(shape, (builder.known(positions), value))
    if builder.reduced is not None and not set(dims) - {ONE} <= before:
        raise NotFusable("a look-up along a loop of its own beside reductions")
    return dims


@register(aten.gather.default)
def _gather(builder: Builder, node: Any) -> Value:
    given, axis, positions = node.args[:3]
    tensor = one_result(node)
    shape, whole = tuple(tensor.shape), meta(given).shape
    if not shape or len(whole) != len(shape) or argument(node, 3, "sparse_grad", False):
        raise NotFusable("a gather from a number, or of sparse gradients")
    axis %= len(shape)
    if any(size_key(whole[k]) != size_key(n) for k, n in enumerate(shape) if k != axis):
        raise NotFusable("positions of another shape")
    dims = _result_loops(builder, given, axis, positions, shape)
    position = builder.operand(positions, shape, dims, DType.I64)
    made, dtype = picked(builder, given, axis, position, dims)
    return Value(made, dtype, dims, shape, tensor.dtype)


# -- one class of many --


def one_hot(builder: Builder, loop: int, position: int, value: int, dtype: DType) -> int:
    """``value`` at ``position`` along ``loop``, 0 elsewhere."""
    places = builder.add(Node(NodeKind.IOTA, DType.I64, aux=loop))
    here = builder.compute("eq", DType.I64, places, position, to_bool=True)
    return builder.compute("select", dtype, here, value, builder.constant(0, dtype))


def one_hot_sum(builder: Builder, value: Value, axis: int) -> Value | None:
    """The sum of ``one_hot`` along its loop without the loop, or None of other values."""
    loop, select = value.dims[axis], builder.nodes[value.node]
    if loop == ONE or select.op != "select":
        return None
    here, kept, other = select.args
    zero, test = builder.nodes[other], builder.nodes[here]
    if zero.kind is not NodeKind.CONSTANT or zero.number != 0 or test.op != "eq":
        return None
    places, position = test.args
    if builder.nodes[places] != Node(NodeKind.IOTA, DType.I64, aux=loop):
        return None
    if loop in builder.varies[position] | builder.varies[kept]:
        return None
    length = builder.add(Node(NodeKind.NUMEL, DType.I64, dims=frozenset({loop})))
    first = builder.constant(0, DType.I64)
    above = builder.compute("ge", DType.I64, position, first, to_bool=True)
    below = builder.compute("lt", DType.I64, position, length, to_bool=True)
    inside = builder.compute("bitwise_and", DType.BOOL, above, below)
    made = builder.compute("select", value.dtype, inside, kept, other)
    dims = tuple(ONE if d == loop else d for d in value.dims)
    shape = tuple(1 if d == loop else n for d, n in zip(value.dims, value.shape, strict=True))
    return replace(value, node=made, dims=dims, shape=shape)


class _Classes:
    """Targets of a loss: where they are not ignored, and positions that are safe to look up."""

    def __init__(self, builder: Builder, targets: int, ignored: Any) -> None:
        if isinstance(ignored, FxNode):
            raise NotFusable("a changing class to ignore")
        self.builder, self.targets = builder, targets
        none = builder.constant(ignored, DType.I64)
        self.counts = builder.compute("ne", DType.I64, targets, none, to_bool=True)
        first = builder.constant(0, DType.I64)
        self.safe = builder.compute("select", DType.I64, self.counts, targets, first)

    def weighted(self, loss: int, weight: Any, dtype: DType) -> int:
        """``loss`` times the weight of its class, 0 where that is ignored."""
        builder = self.builder
        if weight is not None:
            if weight in builder.values:
                raise NotFusable("weights that the group computes")
            found, stored = picked(builder, weight, 0, self.safe, (ONE,))
            loss = builder.compute("mul", dtype, loss, builder.cast(found, stored, dtype))
        return builder.compute("select", dtype, self.counts, loss, builder.constant(0, dtype))


@register(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(builder: Builder, node: Any) -> Any:
    """Losses of each target: ``lowering`` has taken means and sums apart."""
    given, target, weight, reduction, ignored = node.args
    tensor = node.meta["val"][0]
    shape = tuple(tensor.shape)
    if reduction != 0 or not shape:
        raise NotFusable("a loss that is a number")
    known = builder.known(target)
    placed = None if known is None else _with_axis(known)
    dims = _result_loops(builder, given, 1, placed, (shape[0], 1, *shape[1:]))
    own = (dims[0], *dims[2:])
    targets = builder.operand(target, shape, own, DType.I64)
    classes = _Classes(builder, targets, ignored)
    found, dtype = picked(builder, given, 1, classes.safe, dims)
    log = builder.nodes[found]
    if log.op == "sub":  # of what is beyond the largest, the logarithm of the sum
        loss = builder.compute("sub", dtype, *reversed(log.args))
    else:
        loss = builder.compute("neg", dtype, found)
    losses = classes.weighted(loss, weight, dtype)
    return Value(losses, dtype, own, shape, tensor.dtype), None


@register(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(builder: Builder, node: Any) -> Value:
    gradient, given, target, weight, reduction, ignored, total = node.args
    tensor = one_result(node)
    shape = tuple(tensor.shape)
    known = [builder.known(one) for one in (target, gradient if reduction == 0 else None)]
    placed = [None if one is None else _with_axis(one) for one in known]
    if len(shape) < 2:
        raise NotFusable("a loss of one target")
    dims = builder.loops_of(shape, (builder.known(given), *placed))
    if dims[1] == ONE:
        raise NotFusable("a single class")
    if builder.known(given) is None:
        builder.load(given, dims)  # for the number of classes
    own, sizes = (dims[0], *dims[2:]), (shape[0], *shape[2:])
    targets = builder.operand(target, sizes, own, DType.I64)
    dtype = computed_in(tensor.dtype)
    loss = builder.operand(gradient, sizes, own if reduction == 0 else (), dtype)
    if reduction == 1:
        loss = builder.compute("div", dtype, loss, builder.operand(total, (), (), dtype))
    classes = _Classes(builder, targets, ignored)
    loss = classes.weighted(builder.compute("neg", dtype, loss), weight, dtype)
    return Value(one_hot(builder, dims[1], targets, loss, dtype), dtype, dims, shape, tensor.dtype)


def _with_axis(value: Value) -> Value:
    """Targets with a dimension of size 1 where the classes are."""
    dims, shape = value.dims, value.shape
    return replace(value, dims=(dims[0], ONE, *dims[1:]), shape=(shape[0], 1, *shape[1:]))
