"""The one table of virtual instructions (DVM, §4.1 and Table 1).

Everything that knows instructions reads it: ``generate`` writes the C++ header and the
table of the docs from it, the reference VM takes its semantics, the printer its names, the
verifier its operands and dtypes.  To add an instruction, add a row; where its expression
needs a function that is not there yet, add that to ``csrc/functions.inc``.

Grammar of a row::

    Instruction(name, kind, dtypes, expression, reference, doc)

``expression`` is C++ over ``a``, ``b``, ``c`` of the row's dtype ``T``; ``FN(f)`` names the
function of the table of functions for ``T``.  ``reference`` is the same over tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

__all__ = [
    "DTYPES",
    "INSTRUCTIONS",
    "DType",
    "Instruction",
    "Kind",
    "dtype_of",
]


class DType(Enum):
    """Element types of the VM; the value is (code, torch dtype, C++ type, bytes)."""

    F32 = (0, torch.float32, "float", 4)
    F64 = (1, torch.float64, "double", 8)
    I64 = (2, torch.int64, "int64_t", 8)
    I32 = (3, torch.int32, "int32_t", 4)
    U8 = (4, torch.uint8, "uint8_t", 1)
    BOOL = (5, torch.bool, "bool8", 1)
    F16 = (6, torch.float16, "half", 2)
    BF16 = (7, torch.bfloat16, "bfloat", 2)

    @property
    def code(self) -> int:
        """The number that bytecode uses."""
        return self.value[0]

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        return self.value[1]

    @property
    def ctype(self) -> str:
        """The C++ type."""
        return self.value[2]

    @property
    def size(self) -> int:
        """Bytes an element."""
        return self.value[3]

    @property
    def text(self) -> str:
        """As printed programs show it."""
        return self.name.lower()


DTYPES: tuple[DType, ...] = tuple(DType)
_BY_TORCH = {dtype.torch: dtype for dtype in DTYPES}


def dtype_of(dtype: torch.dtype) -> DType | None:
    """The VM's dtype for torch's, or None where the VM has none."""
    return _BY_TORCH.get(dtype)


class Kind(Enum):
    """What an instruction takes and gives; the value is its number of tensor operands."""

    MEMORY = "memory"
    """Moves between global and local memory; needs the tile's number."""
    UNARY = "unary"
    BINARY = "binary"
    TERNARY = "ternary"
    REDUCE = "reduce"
    """Adds a step's block to an accumulator; the dimensions are the tile's."""
    REDUCE2 = "reduce2"
    """The same of a function of two blocks; the encoder makes it of two instructions."""
    REDUCE3 = "reduce3"
    """The same into three accumulators: the result, then operands that are written as well."""
    SCAN = "scan"
    """Each element with all before it, from step to step with an accumulator."""

    @property
    def operands(self) -> int:
        """Tensor operands."""
        more = {Kind.MEMORY: 0, Kind.BINARY: 2, Kind.TERNARY: 3, Kind.REDUCE2: 2}
        return more.get(self, 1)


FLOAT = (DType.F32, DType.F64)
INT = (DType.I64, DType.I32, DType.U8)
ARITH = (*FLOAT, *INT)
BITS = (*INT, DType.BOOL)
ALL = (*ARITH, DType.BOOL)
STORED = DTYPES


@dataclass(frozen=True, slots=True)
class Instruction:
    """One row.

    Attributes:
        name: as printed.
        kind: operands and result.
        dtypes: of the operands.
        expression: C++ over ``a``, ``b``, ``c``; of reductions and scans, over the accumulator
            ``a`` and the element ``b``; empty for instructions that C++ has by hand.
        reference: the semantics over torch tensors.
        doc: one line for the docs.
        to_bool: the result is bool whatever the operands are.
        identity: of a reduction, the C++ expression to begin with.
    """

    name: str
    kind: Kind
    dtypes: tuple[DType, ...]
    expression: str
    reference: Callable[..., Any] | None
    doc: str
    to_bool: bool = False
    identity: str = ""

    def result(self, dtype: DType) -> DType:
        """The dtype of the result for operands of ``dtype``."""
        return DType.BOOL if self.to_bool else dtype


def _memory(name: str, doc: str, dtypes: tuple[DType, ...] = STORED) -> Instruction:
    return Instruction(name, Kind.MEMORY, dtypes, "", None, doc)


def _function(name: str, doc: str = "", reference: Any = None) -> Instruction:
    """A function of one float that ``csrc/functions.inc`` has."""
    return Instruction(
        name,
        Kind.UNARY,
        FLOAT,
        f"FN({name})(a)",
        reference or getattr(torch, name),
        doc or f"{name} of each element",
    )


def _unary(
    name: str,
    dtypes: tuple[DType, ...],
    expression: str,
    reference: Any,
    doc: str,
    to_bool: bool = False,
) -> Instruction:
    return Instruction(name, Kind.UNARY, dtypes, expression, reference, doc, to_bool)


def _binary(
    name: str, dtypes: tuple[DType, ...], expression: str, reference: Any, doc: str
) -> Instruction:
    return Instruction(name, Kind.BINARY, dtypes, expression, reference, doc)


def _compare(name: str, operator: str) -> Instruction:
    doc = f"1 where a {operator} b, else 0"
    return Instruction(
        name, Kind.BINARY, ALL, f"a {operator} b", getattr(torch, name), doc, to_bool=True
    )


def _reduce(
    name: str, dtypes: tuple[DType, ...], expression: str, identity: str, reference: Any, doc: str
) -> Instruction:
    return Instruction(name, Kind.REDUCE, dtypes, expression, reference, doc, identity=identity)


def _scan(name: str, expression: str, reference: Any, doc: str) -> Instruction:
    return Instruction(name, Kind.SCAN, (*FLOAT, DType.I64), expression, reference, doc)


def _quotient(rounding: str) -> Callable[..., torch.Tensor]:
    """Torch's division, but that the least int by −1 wraps around: torch's kernel traps."""

    def divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype not in (torch.int64, torch.int32):
            return torch.div(a, b, rounding_mode=rounding)
        wraps = b == -1
        return torch.where(wraps, -a, torch.div(a, b + wraps * 2, rounding_mode=rounding))

    return divided


def _pairs() -> tuple[Instruction, ...]:
    """Two instructions in one pass: ``add_mul`` is (a + b) · c, ``mul_rsub`` is c − a · b."""
    signs = {"add": "+", "sub": "-", "mul": "*"}
    made = []
    for first, sign in signs.items():
        for second, text in (
            ("add", "({0}) + c"),
            ("sub", "({0}) - c"),
            ("rsub", "c - ({0})"),
            ("mul", "({0}) * c"),
        ):
            expression = text.format(f"a {sign} b")
            made.append(
                Instruction(
                    f"{first}_{second}",
                    Kind.TERNARY,
                    (DType.F32,),
                    expression,
                    eval(f"lambda a, b, c: {expression}"),
                    f"{expression}, in one pass",
                )
            )
    return tuple(made)


_F, _aten = torch.nn.functional, torch.ops.aten


def _slope(backward: Any, **options: Any) -> Callable[..., Any]:
    """The derivative that an operator of ATen's multiplies a gradient by."""
    return lambda a: backward(torch.ones_like(a), a, **options)


INSTRUCTIONS: tuple[Instruction, ...] = (
    # Memory: views in global memory become contiguous blocks in local memory, and back.
    _memory("load", "a tile whose rows are contiguous or of one element: read in place"),
    _memory("view_load", "a tile of any strides, copied to local memory"),
    _memory("store", "a tile whose rows are contiguous: the instruction before writes in place"),
    _memory("view_store", "a tile of any strides, copied from local memory"),
    _memory("index_load", "elements or rows of a table at positions in local memory"),
    _memory("iota", "the position along one dimension", (DType.I64,)),
    _memory("one_hot", "1 in the column that a row's position names", (DType.BOOL,)),
    _memory("fill", "a constant into an accumulator", ALL),
    _memory("finish", "an accumulator becomes a value of the tile", ALL),
    # One operand.
    Instruction("copy", Kind.UNARY, STORED, "a", torch.clone, "the same; also Broadcast"),
    Instruction("cast", Kind.UNARY, STORED, "", None, "to another dtype, as torch rounds"),
    _unary("neg", ARITH, "(T)(-a)", torch.neg, "−a"),
    _unary("abs", ARITH, "FN(abs)(a)", torch.abs, "|a|"),
    _unary("sign", ARITH, "(T)((a > (T)0) - (a < (T)0))", torch.sign, "−1, 0 or 1; 0 of NaN"),
    _unary("relu", ARITH, "a < (T)0 ? (T)0 : a", torch.relu, "max(a, 0), NaN stays"),
    _unary("reciprocal", FLOAT, "(T)1 / a", torch.reciprocal, "1 / a"),
    _function("sqrt"),
    _function("rsqrt", "1 / √a"),
    _function("exp"),
    _function("exp2"),
    _function("expm1"),
    _function("log"),
    _function("log2"),
    _function("log10"),
    _function("log1p"),
    _function("tanh"),
    _function("sigmoid"),
    _function("erf", reference=torch.erf),
    _function("gelu", "a·Φ(a)", _F.gelu),
    _function("gelu_tanh", "GELU by tanh", lambda a: _F.gelu(a, approximate="tanh")),
    _function("silu", "a·sigmoid(a)", _F.silu),
    _function("gelu_slope", "GELU's derivative", _slope(_aten.gelu_backward)),
    _function(
        "gelu_tanh_slope",
        "that of GELU by tanh",
        _slope(_aten.gelu_backward, approximate="tanh"),
    ),
    _function("silu_slope", "SiLU's derivative", _slope(_aten.silu_backward)),
    _function("sin"),
    _function("cos"),
    _function("tan"),
    _function("asin"),
    _function("acos"),
    _function("atan"),
    _function("sinh"),
    _function("cosh"),
    _function("floor"),
    _function("ceil"),
    _function("trunc"),
    _function("round", "to the nearest, halves to even"),
    _unary("is_finite", FLOAT, "FN(abs)(a) < INFINITY", torch.isfinite, "finite", to_bool=True),
    _unary("is_nan", FLOAT, "a != a", torch.isnan, "NaN", to_bool=True),
    _unary("is_inf", FLOAT, "FN(abs)(a) == INFINITY", torch.isinf, "±inf", to_bool=True),
    _unary("logical_not", ALL, "a == (T)0", torch.logical_not, "1 where a is 0", to_bool=True),
    _unary("bitwise_not", BITS, "NOT(a)", torch.bitwise_not, "all bits turned"),
    # Two operands; each may be a tile, a row, a column or one element.
    _binary("add", ARITH, "(T)(a + b)", torch.add, "a + b"),
    _binary("sub", ARITH, "(T)(a - b)", torch.sub, "a − b"),
    _binary("mul", ARITH, "(T)(a * b)", torch.mul, "a · b"),
    _binary("div", FLOAT, "a / b", torch.div, "a / b"),
    _binary("floor_div", ARITH, "FN(floor_div)(a, b)", _quotient("floor"), "⌊a / b⌋"),
    _binary("trunc_div", INT, "FN(trunc_div)(a, b)", _quotient("trunc"), "a / b towards 0"),
    _binary("minimum", ALL, "MIN(a, b)", torch.minimum, "the smaller, NaN wins"),
    _binary("maximum", ALL, "MAX(a, b)", torch.maximum, "the larger, NaN wins"),
    _binary("pow", ARITH, "FN(pow)(a, b)", torch.pow, "a to the power b"),
    _binary("fmod", ARITH, "FN(fmod)(a, b)", torch.fmod, "remainder with the sign of a"),
    _binary("remainder", ARITH, "FN(remainder)(a, b)", torch.remainder, "with the sign of b"),
    _binary("shift_left", INT, "FN(shift_left)(a, b)", torch.bitwise_left_shift, "a << b"),
    _binary("shift_right", INT, "FN(shift_right)(a, b)", torch.bitwise_right_shift, "a >> b"),
    _binary("bitwise_and", BITS, "(T)(a & b)", torch.bitwise_and, "a & b"),
    _binary("bitwise_or", BITS, "(T)(a | b)", torch.bitwise_or, "a | b"),
    _binary("bitwise_xor", BITS, "(T)(a ^ b)", torch.bitwise_xor, "a ^ b"),
    _compare("eq", "=="),
    _compare("ne", "!="),
    _compare("lt", "<"),
    _compare("le", "<="),
    _compare("gt", ">"),
    _compare("ge", ">="),
    Instruction(
        "sub_exp",
        Kind.BINARY,
        (DType.F32,),
        "FN(exp)(a - b)",
        lambda a, b: (a - b).exp(),
        "exp(a − b), in one pass",
    ),
    Instruction(
        "sub_square",
        Kind.BINARY,
        (DType.F32,),
        "(a - b) * (a - b)",
        lambda a, b: (a - b).square(),
        "(a − b)², in one pass",
    ),
    # Three.
    Instruction("select", Kind.TERNARY, ALL, "", torch.where, "b where a (bool) is not 0, else c"),
    *_pairs(),
    # Reductions: into an accumulator that a tile begins with the identity.
    _reduce(
        "sum", (*FLOAT, DType.I64, DType.I32), "a + b", "0", torch.sum, "sum; floats in double"
    ),
    _reduce("prod", (*FLOAT, DType.I64), "a * b", "1", torch.prod, "product"),
    _reduce("max", ALL, "MAX(a, b)", "LOWEST", torch.amax, "largest, NaN wins"),
    _reduce("min", ALL, "MIN(a, b)", "HIGHEST", torch.amin, "smallest, NaN wins"),
    Instruction(
        "sum_mul",
        Kind.REDUCE2,
        (DType.F32,),
        "a * b",
        lambda a, b: (a * b).sum(),
        "sum of a · b",
    ),
    Instruction(
        "sum_sub_square",
        Kind.REDUCE2,
        (DType.F32,),
        "(a - b) * (a - b)",
        lambda a, b: (a - b).square().sum(),
        "sum of (a − b)²",
    ),
    Instruction(
        "moments",
        Kind.REDUCE3,
        (DType.F32,),
        "",
        None,
        "sum of squared deviations from the mean, and as b the sum, as c the number of elements",
    ),
    # Running results: of the same accumulators, in the order of the dimension.
    _scan("cumsum", "a + b", torch.cumsum, "sums up to each element; floats add up in double"),
    _scan("cumprod", "a * b", torch.cumprod, "products up to each element"),
)

_names = [one.name for one in INSTRUCTIONS]
assert len(set(_names)) == len(_names), "two instructions of one name"
