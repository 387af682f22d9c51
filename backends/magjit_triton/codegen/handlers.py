"""Operators whose lowering is more than one row of a table.

Importing this module registers them with ``lowering``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from magjit.plugin.virtual_tensors.indexing import size_expr
from magjit_triton.codegen.ir import Builder, held
from magjit_triton.codegen.layout import sizes_of
from magjit_triton.codegen.lowering import (
    RESULT_HANDLERS,
    Index,
    Lowering,
    Unfusible,
    element_count,
    handler,
    operator_name,
)
from magjit_triton.codegen.operators import POINTWISE, cast, constant

__all__ = ["REDUCTIONS", "is_expensive", "reduced_dims"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _operands(
    lowering: Lowering, node: Node, index: Index, mask: int | None, count: int
) -> list[int]:
    shape = sizes_of(node.meta["val"])
    return [lowering.operand(one, shape, index, mask) for one in node.args[:count]]


@handler("_to_copy", "convert_element_type", "to")
def _convert(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    (value,) = _operands(lowering, node, index, mask, 1)
    return lowering.rounded(value, _dtype(node))


@handler("where")
def _where(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    condition, *sides = _operands(lowering, node, index, mask, 3)
    dtype = _dtype(node)
    sides = [lowering.converted(side, dtype) for side in sides]
    return lowering.builder.emit("where", (condition, *sides), None, held(dtype))


@handler("masked_fill")
def _masked_fill(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    value, condition, fill = _operands(lowering, node, index, mask, 3)
    dtype = _dtype(node)
    fill = lowering.rounded(lowering.converted(fill, dtype), dtype)
    value = lowering.converted(value, dtype)
    return lowering.builder.emit("where", (condition, fill, value), None, held(dtype))


@handler("clamp", "clamp_min", "clamp_max")
def _clamp(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    name = operator_name(node)
    bounds: dict[str, Any] = {"maximum": None, "minimum": None}
    rest = list(node.args[1:])
    if name == "clamp":
        bounds["maximum"] = rest[0] if rest else node.kwargs.get("min")
        bounds["minimum"] = rest[1] if len(rest) > 1 else node.kwargs.get("max")
    else:
        bounds["maximum" if name == "clamp_min" else "minimum"] = rest[0]
    dtype = _dtype(node)
    shape = sizes_of(node.meta["val"])
    builder = lowering.builder
    value = lowering.converted(lowering.operand(node.args[0], shape, index, mask), dtype)
    for operation, bound in bounds.items():
        if bound is None:
            continue
        limit = lowering.converted(lowering.operand(bound, shape, index, mask), dtype)
        # ``maximum`` gives NaN where the value is NaN, as clamp does.
        operation = operation if dtype.is_floating_point else f"int_{operation}"
        value = builder.emit(operation, (value, limit), None, held(dtype))
    return lowering.rounded(value, dtype)


@handler("pow")
def _pow(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    base, exponent = node.args
    dtype = _dtype(node)
    builder = lowering.builder
    shape = sizes_of(node.meta["val"])
    if isinstance(exponent, Node) or not isinstance(base, Node):
        if dtype not in FLOATS:
            raise Unfusible("a power of integers")
        values = [
            lowering.converted(lowering.operand(one, shape, index, mask), dtype)
            for one in (base, exponent)
        ]
        return lowering.rounded(builder.emit("pow", values, None, held(dtype)), dtype)
    value = lowering.converted(lowering.operand(base, shape, index, mask), dtype)
    assert isinstance(exponent, int | float)
    power = float(exponent)
    if power in (2.0, 3.0):
        result = builder.emit("mul", (value, value), None, held(dtype))
        if power == 3.0:
            result = builder.emit("mul", (result, value), None, held(dtype))
    elif power == 1.0:
        return value
    elif dtype not in FLOATS:
        raise Unfusible("a power of integers")
    elif power == 0.5:
        result = builder.emit("sqrt", (value,), None, held(dtype))
    elif power == -0.5:
        result = builder.emit("rsqrt", (value,), None, held(dtype))
    else:
        result = builder.emit(
            "pow", (value, constant(builder, power, held(dtype))), None, held(dtype)
        )
    return lowering.rounded(result, dtype)


@handler("div")
def _div(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    mode = node.kwargs.get("rounding_mode")
    dtype = _dtype(node)
    if mode is None:
        return lowering._pointwise(node, index, mask)
    values = [lowering.converted(one, dtype) for one in _operands(lowering, node, index, mask, 2)]
    builder = lowering.builder
    if mode == "floor":
        return lowering.rounded(POINTWISE["div.floor"].make(builder, held(dtype), values), dtype)
    if not dtype.is_floating_point:
        return builder.emit("trunc_div", values, None, dtype)
    result = builder.emit("true_div", values, None, held(dtype))
    return lowering.rounded(builder.emit("trunc", (result,), None, held(dtype)), dtype)


@handler("rsub")
def _rsub(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    if len(node.args) > 2 or node.kwargs.get("alpha", 1) != 1:
        raise Unfusible("rsub with alpha")
    dtype = _dtype(node)
    left, right = _operands(lowering, node, index, mask, 2)
    values = (lowering.converted(right, dtype), lowering.converted(left, dtype))
    return lowering.rounded(lowering.builder.emit("sub", values, None, held(dtype)), dtype)


@handler("gelu")
def _gelu(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    dtype = _dtype(node)
    builder = lowering.builder
    kind = held(dtype)
    (value,) = _operands(lowering, node, index, mask, 1)

    def number(of: float) -> int:
        return constant(builder, of, kind)

    def op(name: str, *values: int) -> int:
        return builder.emit(name, values, None, kind)

    half = op("mul", value, number(0.5))
    if node.kwargs.get("approximate", "none") == "tanh":
        cube = op("mul", op("mul", value, value), value)
        inner = op("add", value, op("mul", number(0.044715), cube))
        curve = op("tanh", op("mul", number(math.sqrt(2 / math.pi)), inner))
    else:
        curve = op("erf", op("mul", value, number(math.sqrt(0.5))))
    return lowering.rounded(op("mul", half, op("add", number(1.0), curve)), dtype)


@handler("silu")
def _silu(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    dtype = _dtype(node)
    builder = lowering.builder
    (value,) = _operands(lowering, node, index, mask, 1)
    kind = held(dtype)
    below = builder.emit("exp", (builder.emit("neg", (value,), None, kind),), None, kind)
    below = builder.emit("add", (constant(builder, 1.0, kind), below), None, kind)
    return lowering.rounded(builder.emit("true_div", (value, below), None, kind), dtype)


@handler("full", "full_like", "scalar_tensor")
def _full(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    value = node.args[0] if operator_name(node) == "scalar_tensor" else node.args[1]
    dtype = _dtype(node)
    return lowering.rounded(lowering.converted(lowering.operand(value, (), (), mask), dtype), dtype)


@handler("zeros", "zeros_like", "ones", "ones_like")
def _zeros(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    return constant(lowering.builder, operator_name(node).startswith("ones"), held(_dtype(node)))


@handler("arange", "iota")
def _arange(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    dtype = _dtype(node)
    numbers = [_number(one) for one in node.args]
    if operator_name(node) == "iota":
        start, step = _number(node.kwargs.get("start", 0)), _number(node.kwargs.get("step", 1))
    else:
        start = numbers[0] if len(numbers) > 1 else sympy.Integer(0)
        step = numbers[2] if len(numbers) > 2 else sympy.Integer(1)
    if dtype.is_floating_point or not (start.is_integer and step.is_integer):
        raise Unfusible("a range of floating-point numbers")
    return cast(lowering.builder, lowering.index_value(start + index[0] * step), dtype)


def _number(value: Any) -> sympy.Expr:
    if isinstance(value, Node):
        value = value.meta["val"]
    return size_expr(value)


REDUCTIONS: dict[str, str] = {
    "sum": "sum",
    "mean": "sum",
    "amax": "maximum",
    "amin": "minimum",
    "prod": "product",
    "any": "any",
    "all": "all",
    "argmax": "argmax",
    "argmin": "argmin",
    "var": "sum",
    "var_mean": "sum",
}
"""ATen reductions → the kind of ``reduce`` that does them."""


def reduced_dims(node: Node) -> tuple[Node, tuple[int, ...]]:
    """What a reduction reads, and over which dimensions it runs.

    Raises:
        Unfusible: the operator is no reduction.
    """
    if operator_name(node) not in REDUCTIONS:
        raise Unfusible(f"{node} is no reduction")
    source = node.args[0]
    assert isinstance(source, Node)
    rank = source.meta["val"].dim()
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if operator_name(node) == "prod" and isinstance(given, torch.dtype):
        given = None
    if given is None or given == []:
        dims: Sequence[int] = range(rank)
    else:
        dims = given if isinstance(given, list | tuple) else [given]
    return source, tuple(sorted({one % rank if rank else 0 for one in dims} if rank else ()))


def _keeps(node: Node) -> bool:
    position = {"argmax": 2, "argmin": 2}.get(operator_name(node), 2)
    if "keepdim" in node.kwargs:
        return bool(node.kwargs["keepdim"])
    if operator_name(node) in ("var", "var_mean"):
        return False
    return bool(node.args[position]) if len(node.args) > position else False


def _row(node: Node, dims: Sequence[int], index: Index) -> Index:
    """The index of a result without the dimensions that were kept at size one."""
    return tuple(x for k, x in enumerate(index) if k not in dims) if _keeps(node) else index


def _reduced(
    lowering: Lowering, source: Node, dims: Sequence[int], row: Index, kind: str, dtype: torch.dtype
) -> int:
    def make(value: int, index: Index) -> int:
        value = cast(lowering.builder, value, dtype)
        return lowering.builder.emit("reduce", (value,), kind, dtype)

    return lowering.reduce(source, source, dims, row, make)


@handler("sum", "prod", "amax", "amin", "any", "all", "mean")
def _reduction(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    name = operator_name(node)
    source, dims = reduced_dims(node)
    row = _row(node, dims, index)
    dtype = _dtype(node)
    builder = lowering.builder
    if name in ("any", "all"):
        if dtype != torch.bool:
            raise Unfusible("a truth of bytes")

        def truth(value: int, _: Index) -> int:
            own = builder.instructions[value].dtype
            if own != torch.bool:
                zero = constant(builder, 0, own)
                value = builder.emit("ne", (value, zero), None, torch.bool)
            return builder.emit("reduce", (value,), name, torch.bool)

        return lowering.reduce(node, source, dims, row, truth)
    if name in ("amax", "amin") and dtype == torch.bool:
        raise Unfusible("extremes of booleans")
    value = _reduced(lowering, source, dims, row, REDUCTIONS[name], held(dtype))
    if name == "mean":
        value = _divided(builder, value, element_count(source, dims), lowering)
    return lowering.rounded(value, dtype)


def _divided(builder: Builder, value: int, count: sympy.Expr, lowering: Lowering) -> int:
    dtype = builder.instructions[value].dtype
    if count.is_Integer:
        number = constant(builder, int(count), dtype)
    else:
        number = cast(builder, lowering.index_value(count), dtype)
    return builder.emit("true_div", (value, number), None, dtype)


@handler("argmax", "argmin")
def _arg(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    source, dims = reduced_dims(node)
    if len(dims) != 1:
        raise Unfusible("a place in several dimensions")
    builder = lowering.builder

    def make(value: int, at: Index) -> int:
        place = lowering.index_value(at[dims[0]])
        return builder.emit("reduce", (value, place), operator_name(node), torch.int64)

    return lowering.reduce(node, source, dims, _row(node, dims, index), make)


@handler("var")
def _var(lowering: Lowering, node: Node, index: Index, mask: int | None) -> int:
    return lowering.rounded(_moments(lowering, node, index)[0], _dtype(node))


def _moments(lowering: Lowering, node: Node, index: Index) -> tuple[int, int]:
    """Variance and mean, in two passes over the row."""
    source, dims = reduced_dims(node)
    row = _row(node, dims, index)
    builder = lowering.builder
    dtype = held(source.meta["val"].dtype)
    count = element_count(source, dims)
    total = _reduced(lowering, source, dims, row, "sum", dtype)
    mean = _divided(builder, total, count, lowering)

    def squares(value: int, _: Index) -> int:
        value = builder.emit("sub", (cast(builder, value, dtype), mean), None, dtype)
        value = builder.emit("mul", (value, value), None, dtype)
        return builder.emit("reduce", (value,), "sum", dtype)

    spread = lowering.reduce(node, source, dims, row, squares)
    correction: Any = node.kwargs.get("correction", 1)
    if correction is None:
        correction = 1
    if isinstance(correction, float) and not correction.is_integer():
        raise Unfusible("a correction that is no integer")
    free = count - int(correction)
    if free.is_Integer and free <= 0:
        raise Unfusible("a variance of too few")
    return _divided(builder, spread, free, lowering), mean


def variance_and_mean(lowering: Lowering, node: Node, which: int, index: Index) -> int:
    """``getitem(var_mean(…), which)``."""
    value = _moments(lowering, node, index)[which]
    return lowering.rounded(value, node.meta["val"][which].dtype)


RESULT_HANDLERS["var_mean"] = variance_and_mean


def is_expensive(node: Node) -> bool:
    """Whether computing a pointwise node twice costs more than reading it."""
    name = operator_name(node)
    if name in ("gelu", "silu", "pow"):
        return True
    return name in POINTWISE and POINTWISE[name].cost > 4
