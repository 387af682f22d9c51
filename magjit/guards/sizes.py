"""Conditions on the sizes of tensors as instructions of guard programs.

    "inputs[0].size()[1] % 2 == 0"
    →  ("size", 0, 1) ("const", 2) ("mod",) ("const", 0) ("eq",) ("holds",)

A shape environment states its guards as Python; those over sizes, strides and offsets of tensors
in whole numbers are checked without Python.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from magjit.plugin import ShapeGuard

__all__ = ["SizeProgram", "size_program"]

SizeProgram = tuple[tuple[str | int, ...], ...]

_DEEPEST = 32
_BINARY: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.And: "and",
    ast.Or: "or",
}
_CALLED = {"min": "min", "max": "max"}


class _NotInC(Exception):
    """Part of a condition that only Python can tell."""


def size_program(guard: ShapeGuard, tensors: Mapping[int, int]) -> SizeProgram | None:
    """The instructions of a condition; None where it is about more than sizes.

    Args:
        guard: the condition.
        tensors: position of an input that is a tensor → its number in the instructions.
    """
    try:
        found = (*_truth(ast.parse(guard.expression, mode="eval").body, tensors), ("holds",))
    except (_NotInC, SyntaxError):
        return None
    return found if _depth(found) <= _DEEPEST else None


def _truth(tree: ast.expr, tensors: Mapping[int, int]) -> Iterator[tuple[str | int, ...]]:
    match tree:
        case ast.BoolOp(op=op, values=values):
            for position, part in enumerate(values):
                yield from _truth(part, tensors)
                if position:
                    yield (_BINARY[type(op)],)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _truth(operand, tensors)
            yield ("not",)
        case _:
            yield from _program(tree, tensors)


def _program(tree: ast.expr, tensors: Mapping[int, int]) -> Iterator[tuple[str | int, ...]]:
    match tree:
        case ast.Constant(value=bool()):
            raise _NotInC
        case ast.Constant(value=int(value)) if -(2**63) <= value < 2**63:
            yield ("const", value)
        case ast.BinOp(left=left, op=op, right=right):
            yield from _folded(op, [left, right], tensors)
        case ast.Compare(left=left, ops=ops, comparators=others):
            yield from _compared([left, *others], ops, tensors)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield ("const", 0)
            yield from _program(operand, tensors)
            yield ("sub",)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLED:
            yield from _joined(_CALLED[name], args, tensors)
        case _:
            yield _read(tree, tensors)


def _folded(
    op: ast.AST, parts: Sequence[ast.expr], tensors: Mapping[int, int]
) -> Iterator[tuple[str | int, ...]]:
    if type(op) not in _BINARY:
        raise _NotInC
    yield from _joined(_BINARY[type(op)], parts, tensors)


def _joined(
    name: str, parts: Sequence[ast.expr], tensors: Mapping[int, int]
) -> Iterator[tuple[str | int, ...]]:
    if not parts:
        raise _NotInC
    for position, part in enumerate(parts):
        yield from _program(part, tensors)
        if position:
            yield (name,)


def _compared(
    parts: Sequence[ast.expr], ops: Sequence[ast.cmpop], tensors: Mapping[int, int]
) -> Iterator[tuple[str | int, ...]]:
    for position, (left, op, right) in enumerate(zip(parts, ops, parts[1:], strict=False)):
        yield from _folded(op, [left, right], tensors)
        if position:
            yield ("and",)


def _read(tree: ast.expr, tensors: Mapping[int, int]) -> tuple[str | int, ...]:
    """``inputs[k].size()[d]``, ``inputs[k].stride()[d]`` or ``inputs[k].storage_offset()``."""
    match tree:
        case ast.Subscript(
            value=ast.Call(
                func=ast.Attribute(value=holder, attr="size" | "stride" as name), args=[]
            ),
            slice=ast.Constant(value=int(dim)),
        ) if 0 <= dim < 64:
            return (name, _tensor(holder, tensors), dim)
        case ast.Call(func=ast.Attribute(value=holder, attr="storage_offset"), args=[]):
            return ("offset", _tensor(holder, tensors))
    raise _NotInC


def _tensor(tree: ast.expr, tensors: Mapping[int, int]) -> int:
    match tree:
        case ast.Subscript(value=ast.Name(id="inputs"), slice=ast.Constant(value=int(at))):
            if at in tensors:
                return tensors[at]
    raise _NotInC


def _depth(program: SizeProgram) -> int:
    depth = deepest = 0
    for name, *_ in program:
        if name in ("const", "size", "stride", "offset"):
            depth += 1
        elif name != "not":
            depth -= 1
        deepest = max(deepest, depth)
    return deepest
