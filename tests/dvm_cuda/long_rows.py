"""Programs that reduce rows, which are few and long in calls of them."""

from __future__ import annotations

from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor

__all__ = ["counted", "largest", "mean_square", "normalized", "softmaxed", "weighed"]

F32, I64 = DType.F32, DType.I64


def mean_square(dtype: DType) -> Program:
    """Of a difference: a loss, over all elements."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), load(1, dtype), cast(F32, 2)),
        compute("sub", F32, 1, 3),
        compute("mul", F32, 4, 4),
        reduce("sum", F32, 5, 0, 1),
        Node(NodeKind.NUMEL, F32, dims=frozenset({0, 1})),
        compute("div", F32, 6, 7),
        cast(dtype, 8),
    )
    return Program(2, (tensor(dtype, 0, 1),) * 2, nodes, (output(9),))


def counted(dtype: DType) -> Program:
    """The sum of all losses by how many of them count, which is an int64."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), reduce("sum", F32, 1, 0), load(1, I64)),
        Node(NodeKind.CONSTANT, I64, number=-7),
        Node(NodeKind.COMPUTE, DType.BOOL, (3, 4), "ne"),
        *(cast(I64, 5), reduce("sum", I64, 6, 0), cast(F32, 7), compute("div", F32, 2, 8)),
        cast(dtype, 9),
    )
    return Program(1, (tensor(dtype, 0), tensor(I64, 0)), nodes, (output(10), output(7)))


def largest(dtype: DType) -> Program:
    """Of all absolute values, with the product of the signs, and the sum."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), compute("abs", F32, 1), reduce("max", F32, 2, 0, 1)),
        *(compute("div", F32, 1, 2), reduce("prod", F32, 4, 0, 1), reduce("sum", F32, 2, 0, 1)),
    )
    return Program(2, (tensor(dtype, 0, 1),), nodes, (output(3), output(5), output(6)))


def softmaxed(dtype: DType) -> Program:
    """Along the last two dimensions."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), reduce("max", F32, 1, 1, 2), compute("sub", F32, 1, 2)),
        *(compute("exp", F32, 3), reduce("sum", F32, 4, 1, 2), compute("div", F32, 4, 5)),
        cast(dtype, 6),
    )
    return Program(3, (tensor(dtype, 0, 1, 2),), nodes, (output(7, 0, 1, 2),))


def normalized(dtype: DType) -> Program:
    """Of mean 0 and deviation 1, as groups of channels are; the means are a result, too."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), reduce("sum", F32, 1, 1, 2)),
        *(Node(NodeKind.NUMEL, F32, dims=frozenset({1, 2})), compute("div", F32, 2, 3)),
        *(compute("sub", F32, 1, 4), compute("mul", F32, 5, 5), reduce("sum", F32, 6, 1, 2)),
        *(compute("div", F32, 7, 3), Node(NodeKind.CONSTANT, F32, number=1e-5)),
        *(compute("add", F32, 8, 9), compute("rsqrt", F32, 10), compute("mul", F32, 5, 11)),
        cast(dtype, 12),
    )
    results = output(13, 0, 1, 2), output(4, 0)
    return Program(3, (tensor(dtype, 0, 1, 2),), nodes, results)


def weighed(dtype: DType) -> Program:
    """All elements, by a weight that those of a row have in common."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), load(1, dtype), cast(F32, 2), compute("mul", F32, 1, 3)),
        *(reduce("sum", F32, 4, 0, 1), cast(dtype, 5)),
    )
    return Program(2, (tensor(dtype, 0, 1), tensor(dtype, 0)), nodes, (output(6),))
