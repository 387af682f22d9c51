"""What a program writes between two products that may be attention: scale, mask, softmax.

Between the products may be a scale, as a number or a tensor of one element, and then a mask that
is added or takes the place of scores.  Views that keep the order of elements may be anywhere;
of 16 bits, so may be a cast to float32 before softmax, and one back after it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from magjit_dvm.attention import DTYPES
from magjit_dvm.builder import size_key
from magjit_dvm.groups import CASTS
from magjit_dvm.operators import argument

__all__ = [
    "RESHAPES",
    "Inverse",
    "Scores",
    "is_zero",
    "probabilities_of",
    "read_by",
    "scores_of",
    "shape_of",
    "sizes_of",
    "source_of",
]

aten = torch.ops.aten

_LEAST_FILL = -1e3
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_ONES = (
    aten.expand.default,
    aten.permute.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.transpose.int,
    aten.unsqueeze.default,
)
"""They keep the order of elements where they move dimensions of one element only."""
_FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self)
_VIEWS = (*RESHAPES, *_ONES, aten.slice.Tensor, aten.select.int, aten._to_copy.default)
_ARITHMETIC: dict[Any, Callable[[float, float], float]] = {
    aten.add.Tensor: operator.add,
    aten.mul.Tensor: operator.mul,
    aten.rsub.Scalar: lambda a, b: b - a,
    aten.sub.Tensor: operator.sub,
}
_CONSTANTS = {aten.full.default: 1, aten.scalar_tensor.default: 0}


@dataclass(frozen=True)
class Inverse:
    """1 / a number that each call finds."""

    of: Node


@dataclass
class Scores:
    """What is between the first product and softmax.

    Attributes:
        given: operands of the product, (batch · heads, rows, width) and (batch · heads, width,
            columns).
        scale: a number, or a node of one.
        factors: tensors of one element that the query is multiplied with, or divided by.
        mask: what is added, or the condition under which ``fill`` takes the place of a score
            (``inside``), or of which it does not.
        shape: of the scores where they meet the mask.
        leading: batch and heads there, as arguments of a view; empty where they are merged.
        passed: the nodes that are nobody's any more.
    """

    given: tuple[Any, ...] = ()
    scale: Any = 1.0
    factors: list[tuple[Any, Node]] = field(default_factory=list)
    mask: Node | None = None
    fill: float | None = None
    inside: bool = True
    shape: tuple[Any, ...] = ()
    leading: Sequence[Any] = ()
    passed: list[Node] = field(default_factory=list)

    @property
    def is_scaled(self) -> bool:
        """Whether a scale has been met on the way from softmax."""
        return bool(self.factors) or self.scale != 1.0


def source_of(node: Node, user: Node, passed: list[Node]) -> Node | None:
    """What a chain of views with the same elements in the same order begins with.

    Returns:
        None where anything but ``user``, or the next in the chain, reads one of them.
    """
    while list(node.users) == [user]:
        if not _keeps_order(node):
            return node
        passed.append(node)
        (node, user) = (node.args[0], node)  # type: ignore[assignment]
    return None


def _keeps_order(node: Node) -> bool:
    if node.target is aten.clone.default or node.target in RESHAPES:
        return isinstance(node.args[0], Node)
    if node.target not in _ONES or not isinstance(node.args[0], Node):
        return False
    given = shape_of(node.args[0])
    if node.target is aten.permute.default:
        order: list[Any] = [dim % len(given) for dim in node.args[1]]  # type: ignore[union-attr,operator]
        kept = [dim for dim in order if given[dim] != 1]
        return kept == sorted(kept)
    if node.target is aten.transpose.int:
        ends: list[Any] = sorted(dim % len(given) for dim in node.args[1:3])  # type: ignore[operator]
        between = [size for size in given[ends[0] : ends[1] + 1] if size != 1]
        return len(between) <= 1
    if node.target is aten.expand.default:
        return given == shape_of(node)
    return True


def probabilities_of(weights: Node, product: Node, passed: list[Node]) -> Node | None:
    """The softmax that the first operand of a product is, if only this reads it."""
    found = source_of(weights, product, passed)
    if found is not None and _is_cast(found, torch.float32, weights.meta["val"].dtype):
        passed.append(found)
        found = source_of(found.args[0], found, passed)  # type: ignore[arg-type]
    return found if found is not None and found.target is aten._softmax.default else None


def _is_cast(node: Node, given: torch.dtype, made: torch.dtype) -> bool:
    """Whether a node is a cast between these, one of 16 bits and float32, on one device."""
    if node.target not in CASTS or 2 not in (given.itemsize, made.itemsize):
        return False
    source = node.args[0]
    if not isinstance(source, Node):
        return False
    before, after = source.meta["val"], node.meta["val"]
    return (before.dtype, after.dtype) == (given, made) and before.device == after.device


def scores_of(node: Node, softmax: Node) -> Scores | None:
    """What is between softmax and the product before it, if that is all attention's."""
    found = Scores()
    user = softmax
    while True:
        source = source_of(node, user, found.passed)
        if source is None:
            return None
        if found.mask is not None and not found.shape:
            found.shape, found.leading = shape_of(node), _leading(node, source)
        found.passed.append(source)
        if source.target is aten.bmm.default:
            found.given = source.args
            return found
        if source.target is aten.baddbmm.default:
            return _with_added(found, source)
        if any(_is_cast(source, one, torch.float32) for one in DTYPES["cuda"]):
            node, user = source.args[0], source  # type: ignore[assignment]
            continue
        following = _scaled(found, source)
        if following is None and found.mask is None and not found.is_scaled:
            following = _masked(found, source)
        if following is None:
            return None
        node, user = following, source


def _with_added(found: Scores, product: Node) -> Scores | None:
    """The product that adds a mask itself."""
    mask, *given = product.args
    found.given = tuple(given)
    beta, alpha = product.kwargs.get("beta", 1), _number(product.kwargs.get("alpha", 1))
    if not isinstance(mask, Node) or not alpha or not math.isfinite(alpha):
        return None
    if beta == 0 and isinstance(found.scale, float):
        found.scale *= alpha
        return found
    if beta != 1 or found.mask is not None or found.is_scaled or not _fits(mask, shape_of(product)):
        return None
    found.mask, found.shape, found.scale = mask, shape_of(product), alpha
    return found


def _scaled(found: Scores, node: Node) -> Node | None:
    """The operand that ``node`` scales, if that is what it does."""
    if node.kwargs or len(node.args) != 2:
        return None
    multiplies = node.target in (aten.mul.Tensor, aten.mul.Scalar)
    if not multiplies and node.target not in (aten.div.Tensor, aten.div.Scalar):
        return None
    given, factor = node.args
    if multiplies and (not isinstance(given, Node) or _is_one(given, node)):
        given, factor = factor, given
    if not isinstance(given, Node) or shape_of(given) != shape_of(node):
        return None
    number = _number(factor)
    if number is not None and isinstance(found.scale, float):
        if not number or not math.isfinite(number):
            return None
        found.scale = found.scale * number if multiplies else found.scale / number
        return given if found.scale and math.isfinite(found.scale) else None
    if not isinstance(factor, Node):
        return None
    value = factor.meta["val"]
    if isinstance(value, torch.SymFloat) and found.scale == 1.0:
        found.scale = Inverse(factor) if not multiplies else factor
        return given
    if not _is_one(factor, node) or value.dtype != torch.float32:
        return None
    found.factors.append((aten.mul.Tensor if multiplies else aten.div.Tensor, factor))
    return given


def _masked(found: Scores, node: Node) -> Node | None:
    """The operand that ``node`` puts a mask on, if that is what it does."""
    if node.target is aten.add.Tensor and not node.kwargs:
        for given, mask in (node.args, node.args[::-1]):
            if not isinstance(given, Node) or not isinstance(mask, Node):
                continue
            if shape_of(given) != shape_of(node) or not _leads_to_product(given):
                continue
            if _fits(mask, shape_of(node)):
                found.mask = mask
                return given
        return None
    if node.target not in _FILLS or len(node.args) != 3:
        return None
    if node.target is aten.where.self:
        condition, given, fill = node.args
        if _number(given) is not None:
            given, fill, found.inside = fill, given, True
        else:
            found.inside = False
    else:
        given, condition, fill = node.args
        found.inside = True
    number = _number(fill)
    if number is None or not number <= _LEAST_FILL:
        return None
    if not isinstance(given, Node) or not isinstance(condition, Node):
        return None
    if shape_of(given) != shape_of(node) or not _fits(condition, shape_of(node), torch.bool):
        return None
    found.mask, found.fill = condition, number
    return given


def _leads_to_product(node: Any) -> bool:
    """Whether what is added is the scores, not the mask."""
    while isinstance(node, Node) and node.op == "call_function":
        if node.target in (aten.bmm.default, aten.baddbmm.default):
            return True
        scales = node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
        if not scales and not _keeps_order(node):
            return False
        first = node.args[0]
        if scales and (not isinstance(first, Node) or _is_one(first, node)):
            first = node.args[1]
        node = first
    return False


def is_zero(mask: Node) -> bool:
    """Whether all elements of a mask are 0: what models make where they are given none."""
    return _uniform(mask) == 0.0


def _uniform(node: Any) -> float | None:
    """What all elements of a tensor are, where that is known."""
    if not isinstance(node, Node):
        return float(node) if _is_number(node) else None
    if node.target in (aten.ones.default, aten.zeros.default):
        return float(node.target is aten.ones.default)
    if node.target is aten.full.default:
        return _uniform(node.args[1])
    if node.target in _VIEWS:
        return _uniform(node.args[0]) if node.meta["val"].dtype.is_floating_point else None
    compute = _ARITHMETIC.get(node.target)
    if compute is None or node.kwargs or len(node.args) != 2:
        return None
    left, right = (_uniform(one) for one in node.args)
    return None if left is None or right is None else compute(left, right)


def read_by(node: Node) -> list[Node]:
    """What a view or a part of a mask of zeros reads, and may be the last to read."""
    goes = node.target in (aten.clone.default, *_VIEWS, *_ARITHMETIC)
    return node.all_input_nodes if goes else []


def _fits(mask: Node, scores: Sequence[Any], dtype: torch.dtype = torch.float32) -> bool:
    """Whether each dimension of a mask is 1 or that of the scores; three or four of these.

    On GPUs it is one of zeros that is added.
    """
    value = mask.meta["val"]
    if not isinstance(value, torch.Tensor):
        return False
    if value.device.type == "cuda":
        if dtype == torch.bool or not is_zero(mask):
            return False
    elif value.dtype != dtype or value.device.type != "cpu":
        return False
    sizes = shape_of(mask)
    if not 0 < len(sizes) <= len(scores) or len(scores) not in (3, 4):
        return False
    return all(a in (1, b) for a, b in zip(reversed(sizes), reversed(scores), strict=False))


def _leading(node: Node, source: Node) -> Sequence[Any]:
    """Batch and heads of scores, as arguments of the view that parts them."""
    while node is not source:
        if len(shape_of(node)) != 4:
            return ()
        if node.target in RESHAPES:
            return tuple(sizes_of(node)[:2])
        node = node.args[0]  # type: ignore[assignment]
    given = node.args[0] if node.args else None
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(given, Node):
        below: Node = given
        while _keeps_order(below) and below.target not in RESHAPES:
            below = below.args[0]  # type: ignore[assignment]
        if below.target in RESHAPES and shape_of(below) == shape_of(node):
            return tuple(sizes_of(below)[:2])
    return ()


# -- sizes and numbers --


def shape_of(node: Node) -> tuple[Any, ...]:
    """Sizes of a node's tensor, of which equal ones compare equal."""
    return tuple(size_key(size) for size in node.meta["val"].shape)


def sizes_of(view: Node) -> Sequence[Any]:
    """The sizes that a view or reshape is given: ints, -1 among them, and nodes."""
    return argument(view, 1, "size")  # type: ignore[no-any-return]


def _is_one(factor: Any, node: Node) -> bool:
    """Whether a factor is a tensor of one element, on the same device, beside a larger result."""
    value = factor.meta.get("val") if isinstance(factor, Node) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    return value.dim() < len(shape_of(node)) and all(size == 1 for size in shape_of(factor))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    """A number, also as a constant tensor of one element."""
    if isinstance(value, Node) and value.target in _CONSTANTS:
        if shape_of(value):
            return None
        value = value.args[_CONSTANTS[value.target]]
    return float(value) if _is_number(value) else None
