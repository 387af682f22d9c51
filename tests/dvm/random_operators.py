"""The operators that random graphs are grown from: one function each, over a ``Grower``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.dvm.random_graphs import (
    EPS,
    FLOATS,
    GRID,
    INTS,
    Grower,
    Item,
    Refused,
    magnitude,
    on_grid,
)

aten = torch.ops.aten
F = torch.nn.functional

Operator = Callable[[Grower], Any]
OPERATORS: list[Operator] = []


def operator(weight: int = 1) -> Callable[[Operator], Operator]:
    def keep(function: Operator) -> Operator:
        OPERATORS.extend([function] * weight)
        return function

    return keep


def _is_float(one: Item) -> bool:
    return one.is_float


def _coarsest(*items: Item) -> float:
    return max((EPS.get(one.tensor.dtype, 0.0) for one in items), default=0.0)


def _exact(one: Item) -> bool:
    return one.exact


# -- arithmetic --


@operator(6)
def binary(g: Grower) -> None:
    a = g.pick()
    b = g.partner(a)
    if g.random.random() < 0.5:
        a, b = b, a
    name = g.random.choice(("add", "sub", "mul", "maximum", "minimum"))
    if a.tensor.dtype is b.tensor.dtype is torch.bool and name == "sub":
        raise Refused
    overloads = getattr(aten, name)
    target = getattr(overloads, "Tensor", None) or overloads.default
    result = target(a.tensor, b.tensor)
    error = a.error + b.error
    if name == "mul":
        error = a.error * (b.largest + b.error) + b.error * a.largest
    if error or not on_grid(result):
        error += 2 * g.rounding(result)
    kwargs = {}
    if name in ("add", "sub") and result.dtype is not torch.bool and g.random.random() < 0.15:
        kwargs = {"alpha": 2}
        error = 2 * error if error else 0
        if not on_grid(result * 4):
            raise Refused
    g.add(name, target, (a, b), kwargs, error)


@operator(3)
def with_number(g: Grower) -> None:
    a = g.pick(lambda one: one.tensor.dtype is not torch.bool)
    number = g.number(a.tensor.dtype)
    name = g.random.choice(("add", "sub", "mul", "rsub"))
    target = aten.rsub.Scalar if name == "rsub" else getattr(aten, name).Tensor
    result = target(a.tensor, number)
    error = a.error * (max(1.0, abs(number)) if name == "mul" else 1.0)
    if error or not on_grid(result):
        error += 2 * g.rounding(result)
    g.add(name, target, (a, number), None, error)


@operator(2)
def division(g: Grower) -> None:
    a = g.pick()
    b = g.partner(a)
    positive = g.add("abs", aten.abs.default, (b,), error=b.error) if b.is_float else b
    away = g.add("add", aten.add.Tensor, (positive, 0.5), error=b.error + _coarsest(b) * b.largest)
    result = torch.div(a.tensor, away.tensor)
    error = 2 * a.error + 4 * a.largest * away.error + 2 * g.rounding(result)
    g.add("div", aten.div.Tensor, (a, away), None, error)


@operator(2)
def exact_unary(g: Grower) -> None:
    a = g.pick(lambda one: one.tensor.dtype is not torch.bool)
    name = g.random.choice(("neg", "abs", "relu", "clone", "square"))
    target = getattr(aten, name).default
    if name == "neg" and a.tensor.dtype is torch.uint8:
        raise Refused
    result = target(a.tensor)
    error = a.error
    if name == "square":
        error = 2 * a.error * (a.largest + a.error)
        if error or not on_grid(result):
            error += 2 * g.rounding(result)
    g.add(name, target, (a,), None, error)


@operator(2)
def jumping_unary(g: Grower) -> None:
    a = g.pick(_exact)
    names = ("sign", "floor", "ceil", "round", "trunc", "logical_not", "isnan", "isinf", "isfinite")
    name = g.random.choice(names)
    g.add(name, getattr(aten, name).default, (a,))


@operator(2)
def comparison(g: Grower) -> None:
    a = g.pick(_exact)
    name = g.random.choice(("eq", "ne", "lt", "le", "gt", "ge"))
    if g.random.random() < 0.3:
        g.add(name, getattr(aten, name).Scalar, (a, g.number(a.tensor.dtype)))
        return
    b = g.partner(a)
    if not b.exact:
        raise Refused
    g.add(name, getattr(aten, name).Tensor, (a, b))


@operator()
def exact_binary(g: Grower) -> None:
    a = g.pick(_exact)
    name = g.random.choice(("remainder", "fmod", "floor_divide"))
    number = g.random.choice((2.0, 1.5, -3.0, 0.5))
    target = getattr(aten, name)
    if name == "floor_divide":
        g.add(name, aten.div.Tensor_mode, (a, number), {"rounding_mode": "floor"})
    else:
        g.add(name, target.Scalar, (a, number))


@operator()
def int_division(g: Grower) -> None:
    a = g.pick(lambda one: one.tensor.dtype in INTS)
    name = g.random.choice(("floor", "trunc", "remainder", "fmod", "pow"))
    number = g.random.choice((1, 2, 3, 7))
    if name == "pow":
        g.add(name, aten.pow.Tensor_Scalar, (a, g.random.choice((0, 1, 2, 3, 4))))
        return
    b: Any = number
    if g.random.random() < 0.5:
        b = g.add("abs", aten.abs.default, (g.partner(a),))
        b = g.add("maximum", aten.add.Tensor, (b, 1)) if b.tensor.dtype in INTS else number
    if name in ("floor", "trunc"):
        g.add(name, aten.div.Tensor_mode, (a, b), {"rounding_mode": name})
    else:
        overloads = getattr(aten, name)
        g.add(name, overloads.Tensor if isinstance(b, Item) else overloads.Scalar, (a, b))


@operator()
def bits(g: Grower) -> None:
    a = g.pick(lambda one: not one.is_float)
    b = g.partner(a)
    name = g.random.choice(
        ("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or")
    )
    if not b.exact:
        raise Refused
    overloads = getattr(aten, name)
    g.add(name, getattr(overloads, "Tensor", None) or overloads.default, (a, b))


@operator(2)
def where(g: Grower) -> None:
    a = g.pick()
    condition = g.pick(lambda one: one.tensor.dtype is torch.bool)
    b = g.partner(a)
    result = torch.where(condition.tensor, a.tensor, b.tensor)
    error = max(a.error, b.error)
    if error or not on_grid(result):
        error += g.rounding(result)
    g.add("where", aten.where.self, (condition, a, b), None, error)


@operator()
def masked_fill(g: Grower) -> None:
    a = g.pick(lambda one: one.tensor.dtype is not torch.bool)
    mask = g.pick(lambda one: one.tensor.dtype is torch.bool)
    number = g.number(a.tensor.dtype)
    if a.is_float and g.random.random() < 0.3:
        number = g.random.choice((float("-inf"), -0.0, 0.0))
    g.add("masked_fill", aten.masked_fill.Scalar, (a, mask, number), None, a.error)


@operator()
def clamp(g: Grower) -> None:
    a = g.pick(lambda one: one.tensor.dtype is not torch.bool)
    low, high = sorted((g.number(a.tensor.dtype), g.number(a.tensor.dtype)))
    which = g.random.randrange(3)
    limits = ((low, high), (low, None), (None, high))[which]
    error = a.error
    if error or not on_grid(torch.clamp(a.tensor, *limits)):
        error += g.rounding(a.tensor)
    g.add("clamp", aten.clamp.default, (a, *limits), None, error)


@operator(2)
def cast(g: Grower) -> None:
    a = g.pick()
    to = g.random.choice((*FLOATS, torch.int64, torch.int32, torch.bool))
    if not to.is_floating_point:
        if not a.exact or not bool(a.tensor.double().isfinite().all()):
            raise Refused
        g.add("cast", aten._to_copy.default, (a,), {"dtype": to})
        return
    result = a.tensor.to(to)
    error = a.error
    if error or not on_grid(result):
        error += g.rounding(result)
    g.add("cast", aten._to_copy.default, (a,), {"dtype": to}, error)


# -- functions --

_SMOOTH = ("sin", "cos", "tanh", "sigmoid", "erf", "atan", "gelu", "silu", "exp", "expm1")


@operator(5)
def smooth(g: Grower) -> None:
    a = g.pick(_is_float)
    name = g.random.choice(_SMOOTH)
    if name == "gelu" and g.special:
        # Eager's own GELU of inf is NaN or inf, as the length falls.
        raise Refused
    slope = 1.2
    if name in ("exp", "expm1"):
        a = g.bounded(a, 2.0)
        slope = 8.0
    if name in ("sin", "cos"):
        a = g.bounded(a, 32.0)
    target = getattr(aten, name).default
    result = target(a.tensor)
    error = slope * a.error + 8 * g.rounding(result)
    if name in ("gelu", "silu"):
        error += 2 * g.rounding(a.tensor)
    g.add(name, target, (a,), None, error)


@operator(3)
def positive(g: Grower) -> None:
    a = g.pick(_is_float)
    name = g.random.choice(("sqrt", "rsqrt", "log", "log2", "log1p", "reciprocal"))
    size = g.add("abs", aten.abs.default, (a,), error=a.error)
    error = a.error + _coarsest(a) * a.largest
    away = g.add("add", aten.add.Tensor, (size, 0.5), None, error)
    target = getattr(aten, name).default
    result = target(away.tensor)
    g.add(name, target, (away,), None, 4 * error + 8 * g.rounding(result))


@operator()
def power(g: Grower) -> None:
    a = g.bounded(g.pick(_is_float), 4.0)
    exponent = g.random.choice((2, 3, 2.0, 3.0))
    result = aten.pow.Tensor_Scalar(a.tensor, exponent)
    error = 64 * a.error + 4 * g.rounding(result)
    g.add("pow", aten.pow.Tensor_Scalar, (a, exponent), None, error)


@operator()
def leaky(g: Grower) -> None:
    a = g.pick(_is_float)
    name = g.random.choice(("leaky_relu", "hardtanh", "elu", "hardswish", "hardsigmoid"))
    if name == "elu":
        a = g.bounded(a, 8.0)
    target = getattr(aten, name).default
    result = target(a.tensor)
    g.add(name, target, (a,), None, 2 * a.error + 8 * g.rounding(a.tensor) + g.rounding(result))


@operator()
def addcmul(g: Grower) -> None:
    a = g.pick(_is_float)
    b, c = g.partner(a), g.partner(a)
    if not g.fixed:
        # torch's own meta function of addcmul fails for symbols.
        raise Refused
    if not (a.tensor.dtype is b.tensor.dtype is c.tensor.dtype):
        raise Refused
    error = a.error + b.error * c.largest + c.error * b.largest
    scale = magnitude(b.tensor) * magnitude(c.tensor) + a.largest
    error += 4 * EPS[a.tensor.dtype] * scale
    g.add("addcmul", aten.addcmul.default, (a, b, c), None, error)


# -- reductions --


def _dims(g: Grower, a: Item) -> list[int]:
    rank = a.tensor.dim()
    if not rank:
        raise Refused
    count = g.random.choice((1, 1, 1, 2, rank))
    dims = g.random.sample(range(rank), min(count, rank))
    return [d - rank if g.random.random() < 0.3 else d for d in dims]


def _length(a: Item, dims: list[int]) -> int:
    return torch.Size([a.tensor.shape[d] for d in dims]).numel()


@operator(5)
def sums(g: Grower) -> None:
    a = g.pick()
    dims = _dims(g, a)
    keep = g.random.random() < 0.6
    length = _length(a, dims)
    mean = g.random.random() < 0.4
    if mean and (not a.is_float or not length):
        raise Refused
    target = aten.mean.dim if mean else aten.sum.dim_IntList
    result = target(a.tensor, dims, keep)
    if a.exact and not mean and a.is_float and on_grid(a.tensor, max(length, 1)):
        error = 0.0 if on_grid(result) else g.rounding(result)
    elif not a.is_float:
        error = 0.0
    else:
        wide = EPS[torch.float32] if a.tensor.dtype is not torch.float64 else EPS[torch.float64]
        error = length * (a.error + 2 * wide * a.largest)
        error = (error / length if mean else error) + 2 * g.rounding(result)
    g.add("mean" if mean else "sum", target, (a, dims, keep), None, error)


@operator(2)
def extremes(g: Grower) -> None:
    a = g.pick()
    dims = _dims(g, a)
    if not _length(a, dims):
        raise Refused
    target = g.random.choice((aten.amax.default, aten.amin.default))
    g.add("extreme", target, (a, dims, g.random.random() < 0.6), None, a.error)


@operator()
def whether(g: Grower) -> None:
    a = g.pick(lambda one: one.exact and one.tensor.dtype is not torch.uint8)
    dims = _dims(g, a)
    target = g.random.choice((aten.any.dims, aten.all.dims))
    g.add("whether", target, (a, dims, g.random.random() < 0.6))


@operator()
def product(g: Grower) -> None:
    a = g.pick(lambda one: one.is_float)
    a = g.bounded(a, 1.25)
    dim = _dims(g, a)[0]
    if a.tensor.shape[dim] > 8:
        raise Refused
    result = aten.prod.dim_int(a.tensor, dim, True)
    error = 30 * a.error + 16 * g.rounding(result)
    g.add("prod", aten.prod.dim_int, (a, dim, g.random.random() < 0.6), None, error)


@operator(2)
def softmax(g: Grower) -> None:
    a = g.pick(lambda one: one.is_float and one.tensor.dim() > 0)
    dim = g.random.randrange(-a.tensor.dim(), a.tensor.dim())
    logarithm = g.random.random() < 0.4
    target = F.log_softmax if logarithm else F.softmax
    result = target(a.tensor, dim)
    error = 4 * a.error + 16 * g.rounding(result) + 8 * g.rounding(a.tensor) * logarithm
    g.add("softmax", target, (a, dim), None, error)


@operator(2)
def layer_norm(g: Grower) -> None:
    a = g.pick(lambda one: one.is_float and one.tensor.dim() > 0 and one.tensor.numel() > 0)
    if g.special:
        raise Refused
    count = g.random.choice((1, 1, min(2, a.tensor.dim())))
    shape = a.tensor.shape[-count:]
    affine = [
        g.input(tuple(shape), a.tensor.dtype) if g.random.random() < 0.6 else None for _ in range(2)
    ]
    if affine[0] is None or not g.fixed:
        affine[1] = None
    if not g.fixed:
        raise Refused
    dims = list(range(-count, 0))
    spread = torch.var(a.tensor.double(), dims, correction=0, keepdim=True)
    slope = 4 * float((spread + 1e-5).rsqrt().max())
    widest = max([one.largest for one in affine if one is not None], default=1.0)
    args = (a, list(shape), *affine, 1e-5)
    result = F.layer_norm(a.tensor, shape, *(one and one.tensor for one in affine))
    input_error = a.error + 2 * EPS[torch.float32] * a.largest
    error = slope * input_error * max(widest, 1.0) + 16 * g.rounding(result)
    g.add("layer_norm", F.layer_norm, args, None, error)


@operator()
def variance(g: Grower) -> None:
    a = g.pick(_is_float)
    dims = _dims(g, a)
    if g.special or _length(a, dims) < 2:
        raise Refused
    correction = g.random.choice((0, 1))
    args, kwargs = (a, dims), {"correction": correction, "keepdim": g.random.random() < 0.6}
    result = aten.var.correction(a.tensor, dims, **kwargs)
    error = 16 * a.largest * (a.error + EPS[a.tensor.dtype] * a.largest) + 8 * g.rounding(result)
    g.add("var", aten.var.correction, args, kwargs, error)


# -- views --


@operator(2)
def moved(g: Grower) -> None:
    a = g.pick(lambda one: one.tensor.dim() > 1)
    rank = a.tensor.dim()
    if g.random.random() < 0.5:
        first, second = g.random.sample(range(rank), 2)
        g.add("transpose", aten.transpose.int, (a, first, second), None, a.error)
    else:
        order = g.random.sample(range(rank), rank)
        g.add("permute", aten.permute.default, (a, order), None, a.error)


@operator(2)
def unsqueeze(g: Grower) -> None:
    a = g.pick(lambda one: one.tensor.dim() < 5)
    at = g.random.randrange(-a.tensor.dim() - 1, a.tensor.dim() + 1)
    g.add("unsqueeze", aten.unsqueeze.default, (a, at), None, a.error)


@operator(2)
def squeeze(g: Grower) -> None:
    a = g.pick(lambda one: 1 in one.tensor.shape)
    ones = [k for k, n in enumerate(a.tensor.shape) if n == 1]
    g.add("squeeze", aten.squeeze.dim, (a, g.random.choice(ones)), None, a.error)


@operator()
def expand(g: Grower) -> None:
    a = g.pick()
    if not g.fixed:
        raise Refused
    shape = [g.random.choice((1, 2, 5)) if n == 1 else n for n in a.tensor.shape]
    if len(shape) < 4 and g.random.random() < 0.3:
        shape.insert(0, 3)
    g.add("expand", aten.expand.default, (a, shape), None, a.error)


@operator()
def reshape(g: Grower) -> None:
    a = g.pick()
    if not g.fixed:
        raise Refused
    shape = [n for n in a.tensor.shape if n != 1]
    choice = g.random.randrange(3)
    if choice == 0 and len(shape) > 1:
        shape = [-1]
    elif choice == 1:
        shape.insert(g.random.randrange(len(shape) + 1), 1)
    g.add("reshape", torch.reshape, (a, shape), None, a.error)


@operator(2)
def joined(g: Grower) -> None:
    a = g.pick(lambda one: 0 < one.tensor.dim() < 5)
    same = [one for one in g.items if one.tensor.shape == a.tensor.shape]
    same = [one for one in same if one.tensor.dtype == a.tensor.dtype]
    parts = [a, *(g.random.choice(same) for _ in range(g.random.choice((1, 1, 2, 3))))]
    g.random.shuffle(parts)
    error = max(one.error for one in parts)
    axis = g.random.randrange(-a.tensor.dim(), a.tensor.dim())
    if not g.fixed:
        raise Refused  # the number of parts is a size of the result
    name = g.random.choice(("cat", "stack"))
    g.add(name, getattr(aten, name).default, (parts, axis), None, error)


@operator(2)
def joined_unequal(g: Grower) -> None:
    """Parts of any sizes and dtypes, none of which need lie in one group."""
    a = g.pick(lambda one: 0 < one.tensor.dim() < 5)
    if not g.fixed:
        raise Refused
    shape, axis = list(a.tensor.shape), g.random.randrange(a.tensor.dim())
    others = shape[:axis], shape[axis + 1 :]
    fitting = [
        one
        for one in g.items
        if one.tensor.dim() == len(shape)
        and (list(one.tensor.shape[:axis]), list(one.tensor.shape[axis + 1 :])) == others
    ]
    parts = [a]
    for _ in range(g.random.choice((1, 1, 2, 3))):
        choice = g.random.randrange(8)
        size = g.random.choice((0, 1, 1, 2, 3, 5, 17))
        own = g.random.choice(g.pool) if g.random.random() < 0.3 else a.tensor.dtype
        if choice == 0:
            parts.append(g.input((0,), own))
        elif choice < 3:
            parts.append(g.input((*others[0], size, *others[1]), own))
        else:
            parts.append(g.random.choice(fitting))
    g.random.shuffle(parts)
    result = torch.cat([one.tensor for one in parts], axis)
    error = max(one.error for one in parts)
    if error or not on_grid(result):
        error += g.rounding(result)
    axis -= g.random.choice((0, len(shape)))
    g.add("cat", aten.cat.default, (parts, axis), None, error)


@operator(2)
def running(g: Grower) -> None:
    a = g.pick(lambda one: one.tensor.dim() > 0)
    axis = g.random.randrange(-a.tensor.dim(), a.tensor.dim())
    length = a.tensor.shape[axis]
    result = a.tensor.cumsum(axis)
    error = a.error * length
    if error or not on_grid(a.tensor, length) or not on_grid(result):
        error += (1 + length) * g.rounding(result)
    g.add("cumsum", aten.cumsum.default, (a, axis), None, error)


@operator()
def filled(g: Grower) -> None:
    a = g.pick()
    number = g.random.choice((0, 1, 2))
    g.add("full_like", aten.full_like.default, (a, number))


assert GRID > 1
