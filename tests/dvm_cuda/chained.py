"""Small programs that take one another's results."""

from __future__ import annotations

from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor

F32, F16 = DType.F32, DType.F16


def by_rows() -> Program:
    """Rows, each by a number of its own."""
    inputs = tensor(F32, 0, 1), tensor(F32, 0)
    nodes = load(0, F32), load(1, F32), compute("mul", F32, 0, 1)
    return Program(2, inputs, nodes, (output(2, 0, 1),))


def summed() -> Program:
    """The sums of rows."""
    return Program(
        2, (tensor(F32, 0, 1),), (load(0, F32), reduce("sum", F32, 0, 1)), (output(1, 0),)
    )


def of_halves() -> Program:
    """Negated, of float16."""
    nodes = load(0, F16), cast(F32, 0), compute("neg", F32, 1)
    return Program(1, (tensor(F16, 0),), nodes, (output(2, 0),))


def product() -> Program:
    """Of two vectors."""
    nodes = load(0, F32), load(1, F32), compute("mul", F32, 0, 1)
    return Program(1, (tensor(F32, 0), tensor(F32, 0)), nodes, (output(2, 0),))
