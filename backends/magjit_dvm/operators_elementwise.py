"""Handlers of elementwise operators, activations and their backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit_dvm.builder import Builder, NotFusable, Value, computed_in
from magjit_dvm.instructions import DType
from magjit_dvm.operators import (
    HANDLERS,
    Block,
    Handler,
    argument,
    elementwise,
    finished,
    meta,
    one_result,
    promoted,
    register,
)
from magjit_dvm.tables import BINARY, COMPARE, SHIFTS, UNARY, Promotion

aten = torch.ops.aten
_INTS = (DType.I64, DType.I32, DType.U8)

# -- elementwise operators of the tables --


def _unary(instruction: str, promotion: Promotion) -> Handler:
    def handler(builder: Builder, node: Any) -> Value:
        block, result = elementwise(builder, node, node.args[:1], promotion)
        rounding = instruction in ("ceil", "floor", "round", "trunc")
        if rounding and block.dtype not in (DType.F32, DType.F64):
            return block.value(block.made[0], result)
        if node.kwargs or len(node.args) > 1:
            raise NotFusable(f"{node.target} with further arguments")
        return finished(block, block(instruction, *block.made), result)

    return handler


def _binary(instruction: str) -> Handler:
    def handler(builder: Builder, node: Any) -> Value:
        if node.kwargs or len(node.args) != 2:
            raise NotFusable(f"{node.target} with further arguments")
        args = node.args
        if instruction in ("fmod", "remainder"):
            args = _as_half(args)
        block, result = elementwise(builder, node, args, Promotion.DEFAULT)
        if instruction not in ("maximum", "minimum"):
            _require_ints_that_fit(block.dtype, args)
        if block.dtype is DType.BOOL and instruction == "mul":
            return block.value(block("bitwise_and", *block.made), result)
        return finished(block, block(instruction, *block.made), result)

    return handler


def _require_ints_that_fit(dtype: DType, args: Sequence[Any]) -> None:
    """Numbers beside ints are numbers of their dtype: what torch makes of others is its own."""
    if dtype not in _INTS:
        return
    limits = torch.iinfo(dtype.torch)
    for one in args:
        if isinstance(one, int) and not limits.min <= one <= limits.max:
            raise NotFusable(f"a number that {dtype.text} cannot hold")
        if isinstance(meta(one), torch.SymInt) and dtype is not DType.I64:
            raise NotFusable("a changing number beside short ints")


def _as_half(args: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers beside tensors of half precision as torch takes them: rounded to it."""
    tensors = [meta(one) for one in args if isinstance(meta(one), torch.Tensor)]
    dtype = tensors[0].dtype
    if dtype not in (torch.float16, torch.bfloat16) or len(tensors) == len(args):
        return tuple(args)
    if any(isinstance(meta(one), (torch.SymInt, torch.SymFloat)) for one in args):
        raise NotFusable("a changing number beside half precision")
    return tuple(
        float(torch.tensor(one, dtype=dtype)) if isinstance(one, (int, float)) else one
        for one in args
    )


def _compare(instruction: str) -> Handler:
    def handler(builder: Builder, node: Any) -> Value:
        args = _as_half(node.args)
        tensor = one_result(node)
        compute, _ = promoted(args, Promotion.DEFAULT)
        for one in args:
            # A number that the tensor's dtype cannot hold is compared exactly by torch.
            if isinstance(one, (int, float)) and compute in (DType.U8, DType.I32, DType.BOOL):
                limits = {DType.U8: 255, DType.I32: 2**31 - 1, DType.BOOL: 1}
                if not 0 <= one <= limits[compute] or one != int(one):
                    raise NotFusable("a comparison with a number out of range")
        block = Block(builder, args, tensor.shape, compute)
        made = block.compare(instruction, *block.made)
        return block.value(made, torch.bool, DType.BOOL)

    return handler


for _name, _promotion in UNARY.items():
    HANDLERS[getattr(aten, _name).default] = _unary(_name, _promotion)
_OVERLOADS = ("Tensor", "Scalar", "Tensor_Scalar", "Scalar_Tensor")
for _name in BINARY:
    _packet = getattr(aten, _name)
    for _overload in (*_OVERLOADS, "default", "Tensor_Tensor"):
        if _overload in _packet.overloads():
            HANDLERS[getattr(_packet, _overload)] = _binary(_name)
for _name in COMPARE:
    for _overload in ("Tensor", "Scalar"):
        HANDLERS[getattr(getattr(aten, _name), _overload)] = _compare(_name)
for _name, _instruction in SHIFTS.items():
    _packet = getattr(aten, _name)
    for _overload in _OVERLOADS:
        if _overload in _packet.overloads():
            HANDLERS[getattr(_packet, _overload)] = _binary(_instruction)


# -- arithmetic with particulars --


@register(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
def _add(builder: Builder, node: Any) -> Value:
    return _sum(builder, node, node.args[0], node.args[1])


@register(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(builder: Builder, node: Any) -> Value:
    return _sum(builder, node, node.args[1], node.args[0])


def _sum(builder: Builder, node: Any, left: Any, right: Any) -> Value:
    alpha = argument(node, 2, "alpha", 1)
    block, result = elementwise(builder, node, (left, right), Promotion.DEFAULT)
    a, b = block.made
    instruction = "sub" if "sub" in str(node.target) else "add"
    if block.dtype is DType.BOOL:
        if instruction == "sub" or (alpha is not True and alpha != 1):
            raise NotFusable("a difference or multiple of bools")
        return block.value(block("bitwise_or", a, b), result)
    if isinstance(alpha, FxNode):
        b = block("mul", b, builder.scalar(alpha, block.dtype))
    elif alpha != 1:
        if not isinstance(alpha, int) and block.dtype not in (DType.F32, DType.F64):
            raise NotFusable("a fraction times ints")
        b = block("mul", b, block.constant(alpha))
    return finished(block, block(instruction, a, b), result)


@register(aten.div.Tensor, aten.div.Scalar)
def _div(builder: Builder, node: Any) -> Value:
    block, result = elementwise(builder, node, node.args[:2], Promotion.INT_TO_FLOAT)
    return finished(block, block("div", *block.made), result)


@register(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default)
def _div_mode(builder: Builder, node: Any) -> Value:
    mode = "floor" if node.target is aten.floor_divide.default else node.kwargs["rounding_mode"]
    promotion = Promotion.INT_TO_FLOAT if mode is None else Promotion.DEFAULT
    block, result = elementwise(builder, node, node.args[:2], promotion)
    _require_ints_that_fit(block.dtype, node.args[:2])
    if mode == "floor":
        return finished(block, block("floor_div", *block.made), result)
    if block.dtype in _INTS:
        return finished(block, block("trunc_div", *block.made), result)
    quotient = block("div", *block.made)
    return finished(block, block("trunc", quotient) if mode == "trunc" else quotient, result)


@register(aten.pow.Tensor_Scalar)
def _pow(builder: Builder, node: Any) -> Value:
    exponent = node.args[1]
    block, result = elementwise(builder, node, node.args[:2], Promotion.DEFAULT)
    if isinstance(exponent, FxNode):
        raise NotFusable("a changing exponent")
    x = block.made[0]
    if block.dtype in _INTS:
        return finished(block, _int_power(block, x, exponent), result)
    if exponent == 2:
        return finished(block, block("mul", x, x), result)
    if exponent == 3:
        return finished(block, block("mul", block("mul", x, x), x), result)
    if exponent == 0.5:
        return finished(block, block("sqrt", x), result)
    if exponent == -0.5:
        return finished(block, block("rsqrt", x), result)
    if exponent == -1:
        return finished(block, block("reciprocal", x), result)
    if exponent == -2:
        return finished(block, block("reciprocal", block("mul", x, x)), result)
    return finished(block, block("pow", *block.made), result)


def _int_power(block: Block, x: int, exponent: int) -> int:
    """By squaring: products wrap around as torch's do."""
    if exponent < 0:
        raise NotFusable("an int to a negative power")
    _require_ints_that_fit(block.dtype, (exponent,))
    if exponent == 0:
        return block("pow", x, block.constant(0))
    made, rest = -1, exponent
    while rest:
        if rest % 2:
            made = x if made < 0 else block("mul", made, x)
        rest //= 2
        x = block("mul", x, x) if rest else x
    return made


@register(aten.square.default)
def _square(builder: Builder, node: Any) -> Value:
    block, result = elementwise(builder, node, node.args, Promotion.DEFAULT)
    return finished(block, block("mul", block.made[0], block.made[0]), result)


@register(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default)
def _logical(builder: Builder, node: Any) -> Value:
    tensor = one_result(node)
    block = Block(builder, node.args, tensor.shape, DType.BOOL)
    name = str(node.target).split(".")[1].removeprefix("logical")
    return block.value(block(f"bitwise{name}", *block.made), torch.bool)


@register(aten.logical_not.default)
def _logical_not(builder: Builder, node: Any) -> Value:
    block, _ = elementwise(builder, node, node.args, Promotion.DEFAULT)
    return block.value(block.compare("logical_not", *block.made), torch.bool, DType.BOOL)


@register(aten.isnan.default, aten.isinf.default, aten.isfinite.default)
def _is(builder: Builder, node: Any) -> Value:
    block, _ = elementwise(builder, node, node.args, Promotion.DEFAULT)
    name = {"isnan": "is_nan", "isinf": "is_inf", "isfinite": "is_finite"}
    instruction = name[str(node.target).split(".")[1]]
    return block.value(block.compare(instruction, *block.made), torch.bool, DType.BOOL)


@register(aten.where.self)
def _where(builder: Builder, node: Any) -> Value:
    condition, left, right = node.args
    if meta(condition).dtype is not torch.bool:
        raise NotFusable("a condition that is not bool")
    return _select(builder, node, condition, left, right)


@register(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(builder: Builder, node: Any) -> Value:
    given, mask, value = node.args
    return _select(builder, node, mask, value, given)


def _select(builder: Builder, node: Any, condition: Any, left: Any, right: Any) -> Value:
    tensor = one_result(node)
    compute, shape = computed_in(tensor.dtype), tuple(tensor.shape)
    dims = builder.loops_of(shape, [builder.known(one) for one in (condition, left, right)])
    when = builder.operand(condition, shape, dims, DType.BOOL)
    made = [builder.operand(one, shape, dims, compute) for one in (left, right)]
    return Value(
        builder.compute("select", compute, when, *made), compute, dims, shape, tensor.dtype
    )


@register(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
@register(aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor)
def _clamp(builder: Builder, node: Any) -> Value:
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    if node.target in (aten.clamp_max.default, aten.clamp_max.Tensor):
        low, high = None, node.args[1]
    given = [one for one in (node.args[0], low, high) if one is not None]
    block, result = elementwise(builder, node, given, Promotion.DEFAULT)
    made = list(block.made)
    x = made.pop(0)
    if low is not None:
        x = block("maximum", x, made.pop(0))
    if high is not None:
        x = block("minimum", x, made.pop(0))
    return finished(block, x, result)


@register(aten.hardtanh.default)
def _hardtanh(builder: Builder, node: Any) -> Value:
    low, high = argument(node, 1, "min_val", -1), argument(node, 2, "max_val", 1)
    block, result = elementwise(builder, node, (node.args[0],), Promotion.DEFAULT)
    x = block("maximum", block.made[0], block.constant(low))
    return finished(block, block("minimum", x, block.constant(high)), result)


@register(aten.addcmul.default, aten.addcdiv.default)
def _addc(builder: Builder, node: Any) -> Value:
    value = node.kwargs.get("value", 1)
    block, result = elementwise(builder, node, node.args[:3], Promotion.DEFAULT)
    if block.dtype not in (DType.F32, DType.F64) or isinstance(value, FxNode):
        raise NotFusable(f"{node.target} of ints")
    x, a, b = block.made
    scaled = a if value == 1 else block("mul", a, float(value))
    combine = "div" if node.target is aten.addcdiv.default else "mul"
    return finished(block, block("add", x, block(combine, scaled, b)), result)


@register(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(builder: Builder, node: Any) -> Value:
    block, result = elementwise(builder, node, node.args[:3], Promotion.DEFAULT)
    start, end, weight = block.made
    span = block("sub", end, start)
    near = block.compare("lt", block("abs", weight), 0.5)
    from_start = block("add", start, block("mul", weight, span))
    rest = block("sub", block.constant(1), weight)
    from_end = block("sub", end, block("mul", span, rest))
    return finished(block, block.select(near, from_start, from_end), result)


# -- activations --


@register(aten.gelu.default)
def _gelu(builder: Builder, node: Any) -> Value:
    block, result = elementwise(builder, node, node.args[:1], Promotion.DEFAULT)
    tanh = node.kwargs.get("approximate", "none") == "tanh"
    return finished(block, block("gelu_tanh" if tanh else "gelu", *block.made), result)


@register(aten.leaky_relu.default)
def _leaky_relu(builder: Builder, node: Any) -> Value:
    slope = float(argument(node, 1, "negative_slope", 0.01))
    block, result = elementwise(builder, node, node.args[:1], Promotion.DEFAULT)
    x = block.made[0]
    return finished(
        block, block.select(block.compare("gt", x, 0.0), x, block("mul", x, slope)), result
    )


@register(aten.elu.default)
def _elu(builder: Builder, node: Any) -> Value:
    alpha, scale, inner = (
        float(argument(node, k, name, 1))
        for k, name in ((1, "alpha"), (2, "scale"), (3, "input_scale"))
    )
    block, result = elementwise(builder, node, node.args[:1], Promotion.DEFAULT)
    x = block.made[0]
    negative = block("mul", block("expm1", block("mul", x, inner)), alpha * scale)
    positive = block("mul", x, scale)
    return finished(block, block.select(block.compare("gt", x, 0.0), positive, negative), result)


@register(aten.hardsigmoid.default, aten.hardswish.default)
def _hard(builder: Builder, node: Any) -> Value:
    block, result = elementwise(builder, node, node.args[:1], Promotion.DEFAULT)
    x = block.made[0]
    inside = block("minimum", block("maximum", block("add", x, 3.0), 0.0), 6.0)
    if node.target is aten.hardswish.default:
        return finished(block, block("div", block("mul", x, inside), 6.0), result)
    return finished(block, block("div", inside, 6.0), result)


@register(aten.softplus.default)
def _softplus(builder: Builder, node: Any) -> Value:
    beta, threshold = float(argument(node, 1, "beta", 1)), float(argument(node, 2, "threshold", 20))
    block, result = elementwise(builder, node, node.args[:1], Promotion.DEFAULT)
    x = block.made[0]
    scaled = block("mul", x, beta)
    soft = block("div", block("log1p", block("exp", scaled)), beta)
    return finished(block, block.select(block.compare("gt", scaled, threshold), x, soft), result)


@register(aten.threshold_backward.default)
def _threshold_backward(builder: Builder, node: Any) -> Value:
    gradient, given, threshold = node.args
    block, result = elementwise(builder, node, (gradient, given), Promotion.DEFAULT)
    g, x = block.made
    below = block.compare("le", x, block.constant(threshold))
    return finished(block, block.select(below, block.constant(0), g), result)


@register(aten.gelu_backward.default)
def _gelu_backward(builder: Builder, node: Any) -> Value:
    block, result = elementwise(builder, node, node.args[:2], Promotion.DEFAULT)
    g, x = block.made
    tanh = node.kwargs.get("approximate", "none") == "tanh"
    slope = block("gelu_tanh_slope" if tanh else "gelu_slope", x)
    return finished(block, block("mul", g, slope), result)


@register(aten.silu_backward.default)
def _silu_backward(builder: Builder, node: Any) -> Value:
    block, result = elementwise(builder, node, node.args[:2], Promotion.DEFAULT)
    g, x = block.made
    return finished(block, block("mul", g, block("silu_slope", x)), result)


@register(aten.native_dropout_backward.default)
def _native_dropout_backward(builder: Builder, node: Any) -> Value:
    gradient, mask, scale = node.args
    block, result = elementwise(builder, node, (gradient, mask), Promotion.DEFAULT)
    if block.dtype not in (DType.F32, DType.F64):
        raise NotFusable("a gradient that is not of floats")
    g, kept = block.made
    return finished(block, block("mul", block("mul", g, kept), float(scale)), result)


@register(aten.tanh_backward.default, aten.sigmoid_backward.default)
def _from_result(builder: Builder, node: Any) -> Value:
    block, result = elementwise(builder, node, node.args[:2], Promotion.DEFAULT)
    g, y = block.made
    if node.target is aten.tanh_backward.default:
        return finished(block, block("mul", g, block("sub", 1.0, block("mul", y, y))), result)
    return finished(block, block("mul", g, block("mul", block("sub", 1.0, y), y)), result)
