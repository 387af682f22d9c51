"""Straight-line PTX for one element: written once, assembled for the GPU, run by NumPy in tests.

Grammar::

    Body = Line*
    Line = opcode destination, operand* | "loop" label | "again" label, predicate
    operand = register | literal        registers: r (32 bits), d (64), h (16), p (predicate)

``Body`` traces Python expressions over ``Reg`` into lines; ``evaluate`` runs lines over arrays.
All arithmetic is rounded explicitly (``.rn``), so that ptxas contracts nothing and both agree.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, repeat
from typing import Any

import numpy as np

__all__ = ["Body", "Reg", "double", "evaluate", "outcome", "single"]

Array = Any


def single(value: float) -> str:
    """A PTX literal of a float; rounds ``value`` to float32."""
    return f"0f{int(np.float32(value).view(np.uint32)):08X}"


def double(value: float) -> str:
    """A PTX literal of a double."""
    return f"0d{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


@dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register, or a literal, and the body that it belongs to.

    Attributes:
        name: in PTX.
        kind: ``f`` float, ``d`` double, ``i`` 32-bit int, ``l`` 64 bits, ``h`` 16 bits,
            ``p`` predicate.
    """

    name: str
    kind: str
    body: Body

    def __add__(self, other: Any) -> Reg:
        return self.body.arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Reg:
        return self.body.arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Reg:
        return self.body.arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Reg:
        return self.body.arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Reg:
        return self.body.arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Reg:
        return self.body.arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Reg:
        return self.body.arithmetic("div", self, other)

    def __rtruediv__(self, other: Any) -> Reg:
        return self.body.arithmetic("div", other, self)

    def __neg__(self) -> Reg:
        return self.body.emit(f"neg.{_TYPE[self.kind]}", self.kind, self)

    def __abs__(self) -> Reg:
        return self.body.emit(f"abs.{_TYPE[self.kind]}", self.kind, self)

    def __lt__(self, other: Any) -> Reg:
        return self.body.compare("lt", self, other)

    def __le__(self, other: Any) -> Reg:
        return self.body.compare("le", self, other)

    def __gt__(self, other: Any) -> Reg:
        return self.body.compare("gt", self, other)

    def __ge__(self, other: Any) -> Reg:
        return self.body.compare("ge", self, other)

    def equals(self, other: Any) -> Reg:
        """Equal; false of NaN."""
        return self.body.compare("eq", self, other)

    def differs(self, other: Any) -> Reg:
        """Not equal; true of NaN."""
        return self.body.compare("neu" if self.kind in "fd" else "ne", self, other)


_TYPE = {"f": "f32", "d": "f64", "i": "s32", "l": "s64"}
_BITS = {"f": "b32", "d": "b64", "i": "b32", "l": "b64", "p": "pred"}


@dataclass(slots=True)
class Body:
    """The lines of one element's computation; ``{a}`` and so on stand for the operands."""

    lines: list[tuple[str, ...]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys("rdph", 0))

    def operand(self, name: str, kind: str) -> Reg:
        """An operand that the interpreter provides."""
        return Reg("{" + name + "}", kind, self)

    def new(self, kind: str) -> Reg:
        """A fresh register."""
        bank = {"f": "r", "i": "r", "d": "d", "l": "d", "p": "p", "h": "h"}[kind]
        number = self.counts[bank]
        self.counts[bank] += 1
        return Reg(f"{bank}{{n}}_{number}", kind, self)

    def lift(self, value: Any, kind: str) -> Reg:
        """A literal of ``kind``, unless it is a register."""
        if isinstance(value, Reg):
            return value
        if kind == "f":
            return Reg(single(value), kind, self)
        if kind == "d":
            return Reg(double(value), kind, self)
        return Reg(str(int(value)), kind, self)

    def emit(self, opcode: str, kind: str, *operands: Reg) -> Reg:
        """Append a line; its result."""
        to = self.new(kind)
        self.lines.append((opcode, to.name, *(one.name for one in operands)))
        return to

    def loop(self) -> str:
        """Where ``again`` goes back to, with all lanes while any of them has to.

        What is between changes nothing of a lane that has not to.
        """
        label = f"AGAIN{{n}}_{len(self.lines)}"
        self.lines.append(("loop", label))
        return label

    def again(self, label: str, test: Reg) -> None:
        self.lines.append(("again", label, test.name))

    def variable(self, value: Reg) -> Reg:
        """A register that ``assign`` may change, with a value."""
        to = self.new(value.kind)
        self.assign(to, value)
        return to

    def assign(self, to: Reg, value: Reg) -> None:
        self.lines.append((f"mov.{_BITS[to.kind]}", to.name, value.name))

    def result(self, name: str, value: Reg) -> None:
        """Put ``value`` where the interpreter expects the result."""
        self.lines.append(("mov.b32", "{" + name + "}", value.name))

    def arithmetic(self, name: str, left: Any, right: Any) -> Reg:
        """add, sub, mul or div of two of one kind, rounded to nearest."""
        kind = left.kind if isinstance(left, Reg) else right.kind
        a, b = self.lift(left, kind), self.lift(right, kind)
        if kind in "fd":
            return self.emit(f"{name}.rn.{_TYPE[kind]}", kind, a, b)
        return self.emit(f"{name}{'.lo' if name == 'mul' else ''}.{_TYPE[kind]}", kind, a, b)

    def compare(self, how: str, left: Reg, right: Any) -> Reg:
        """A predicate."""
        b = self.lift(right, left.kind)
        return self.emit(f"setp.{how}.{_TYPE[left.kind]}", "p", left, b)

    def where(self, test: Reg, yes: Any, no: Any) -> Reg:
        """``yes`` where ``test``, else ``no``."""
        kind = yes.kind if isinstance(yes, Reg) else no.kind
        a, b = self.lift(yes, kind), self.lift(no, kind)
        return self.emit(f"selp.{_BITS[kind]}", kind, a, b, test)

    def fma(self, a: Any, b: Any, c: Any) -> Reg:
        """A · b + c, rounded once."""
        kind = next(one.kind for one in (a, b, c) if isinstance(one, Reg))
        return self.emit(f"fma.rn.{_TYPE[kind]}", kind, *(self.lift(x, kind) for x in (a, b, c)))

    def poly(self, x: Reg, coefficients: Sequence[float]) -> Reg:
        """Horner's rule, constant term first."""
        value: Any = self.lift(coefficients[-1], x.kind)
        for one in reversed(coefficients[:-1]):
            value = self.fma(value, x, one)
        made: Reg = value
        return made

    def unary(self, opcode: str, x: Reg, kind: str = "") -> Reg:
        """One instruction of one operand."""
        return self.emit(opcode, kind or x.kind, x)

    def bits(self, name: str, a: Reg, b: Any, kind: str = "") -> Reg:
        """and, or, xor, shl, shr on bits."""
        wide = a.kind in "dl"
        suffix = ("s64" if wide else "s32") if name == "shr" else ("b64" if wide else "b32")
        count = self.lift(b, "i" if name in ("shl", "shr") else "l" if wide else "i")
        return self.emit(f"{name}.{suffix}", kind or ("l" if wide else "i"), a, count)

    def as_kind(self, x: Reg, kind: str) -> Reg:
        """The same bits, seen otherwise."""
        return Reg(x.name, kind, self)

    def magnitude_of(self, magnitude: Reg, sign: Reg) -> Reg:
        """C's copysign."""
        return self.emit(f"copysign.{_TYPE[magnitude.kind]}", magnitude.kind, sign, magnitude)


# -- what lines mean --


def _float(x: Array) -> Array:
    return x.view(np.float32)


def _clip(x: Array, low: float, high: float) -> Array:
    return np.clip(np.nan_to_num(np.trunc(x), nan=0.0, posinf=high, neginf=low), low, high)


def _fma(a: Array, b: Array, c: Array) -> Array:
    if a.dtype == np.float32:
        wide = a.astype(np.float64) * b.astype(np.float64)  # exact
        return (wide + c.astype(np.float64)).astype(np.float32)
    return (a.astype(np.longdouble) * b + c).astype(np.float64)


_TO = {
    "f32": np.float32,
    "f64": np.float64,
    "s32": np.int32,
    "u32": np.uint32,
    "b32": np.uint32,
    "s64": np.int64,
    "u64": np.uint64,
    "b64": np.uint64,
    "f16": np.float16,
}
_WORD = {2: np.uint16, 4: np.uint32, 8: np.uint64}

_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "neu": np.not_equal,
}


def _divided(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b)
    wide = np.abs(a.astype(np.int64)) // np.abs(safe.astype(np.int64))
    return (np.sign(a).astype(np.int64) * np.sign(safe) * wide).astype(np.int32)


def _remaining(a: Array, b: Array) -> Array:
    return np.fmod(a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)).astype(np.int32)


def _shifted(left: bool) -> Callable[[Array, Array], Array]:
    """PTX clamps the count at the width."""

    def shift(x: Array, by: Array) -> Array:
        width = x.dtype.itemsize * 8
        count = by.astype(np.uint32).astype(np.int64)
        inside = np.minimum(count, width - 1).astype(x.dtype)
        done = x << inside if left else x >> inside
        return np.where(count >= width, 0, done).astype(x.dtype) if left else done

    return shift


_PLAIN: dict[str, Callable[..., Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divided,
    "rem": _remaining,
    "fma": _fma,
    "neg": lambda a: -a,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rcp": lambda a: (1.0 / a.astype(np.float64)).astype(a.dtype),
    "rsqrt": lambda a: (1.0 / np.sqrt(a.astype(np.float64))).astype(a.dtype),
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(a.dtype),
    "lg2": lambda a: np.log2(a.astype(np.float64)).astype(a.dtype),
    "tanh": lambda a: np.tanh(a.astype(np.float64)).astype(a.dtype),
    "max": np.fmax,  # NaN loses
    "min": np.fmin,
    "max.NaN": np.maximum,
    "min.NaN": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "shl": _shifted(True),
    "shr": _shifted(False),
    "mov": lambda a: a,
    "copysign": lambda sign, magnitude: np.copysign(magnitude, sign),
}

_ROUND = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def _converted(parts: Sequence[str], x: Array) -> Array:
    """``cvt[.rounding].to.from``."""
    to = parts[-2]
    if len(parts) > 3 and parts[1] in _ROUND:
        x = _ROUND[parts[1]](x)
        if to == "s32":
            return _clip(x.astype(np.float64), -(2.0**31), 2.0**31 - 1).astype(np.int32)
        if to == "s64":  # what lies beyond has the low 32 bits of no number
            low = _clip(x.astype(np.float64), -(2.0**62), 2.0**62)
            return low.astype(np.int64)
    return x.astype(_TO[to])


def _saturated(value: Array) -> Array:
    """From 0 to 1; 0 of NaN."""
    return np.nan_to_num(np.clip(value, 0, 1).astype(value.dtype), nan=0.0)


def _flushed(value: Array) -> Array:
    """0 of the same sign for what lies below the smallest normal number."""
    small = np.abs(value) < np.finfo(value.dtype).tiny
    return np.where(small, np.copysign(np.zeros_like(value), value), value)


@cache
def _meaning(opcode: str) -> tuple[Callable[..., Array], tuple[str, ...]]:
    """A function of arrays, and as what it takes them; the last kind is that of all others."""
    parts = opcode.split(".")
    kind = parts[-1]
    if parts[0] == "setp":
        return _COMPARE[parts[1]], (kind,)
    if parts[0] == "selp":
        return lambda yes, no, test: np.where(test, yes, no), (kind, kind, "pred")
    if parts[0] == "cvt":
        return partial(_converted, parts), (kind,)
    if parts[0] in ("shl", "shr"):
        return _PLAIN[parts[0]], (kind, "b32")
    plain = _PLAIN[f"{parts[0]}.NaN" if parts[1] == "NaN" else parts[0]]
    if "sat" in parts:
        return lambda *given: _saturated(plain(*given)), (kind,)
    if "ftz" in parts:
        return lambda *given: _flushed(plain(*map(_flushed, given))), (kind,)
    return plain, (kind,)


def _bits(value: Array) -> Array:
    """What a register holds: words, or whether a predicate holds."""
    value = np.ascontiguousarray(value)
    return value if value.dtype == bool else value.view(_WORD[value.dtype.itemsize])


def outcome(opcode: str, given: Sequence[Array]) -> Array:
    """What one line makes of the bits of its operands; whoever asks ignores NumPy's warnings."""
    function, kinds = _meaning(opcode)
    both = zip(given, chain(kinds, repeat(kinds[-1])), strict=False)
    return _bits(
        function(*(one if one.dtype == bool else one.view(_TO[kind]) for one, kind in both))
    )


def evaluate(
    lines: Sequence[tuple[str, ...]],
    operands: Mapping[str, Array],
    tables: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """Run lines over arrays of 32-bit words.

    Args:
        lines: of a ``Body``.
        operands: by name, arrays of uint32 of one shape.
        tables: constant memory by name, arrays of float64.

    Returns:
        The operands after the last line.

    Raises:
        KeyError: an opcode without a meaning here.
    """
    state: dict[str, Array] = {"{" + name + "}": value for name, value in operands.items()}

    def get(text: str, kind: str) -> Array:
        if text in state:
            value = state[text]
            return value if value.dtype == bool else value.view(_TO[kind])
        if text.startswith("0f"):
            return np.array([int(text[2:], 16)], np.uint32).view(_TO[kind])
        if text.startswith("0d"):
            return np.array([int(text[2:], 16)], np.uint64).view(_TO[kind])
        return np.array([int(text) % (1 << 64)], np.uint64).astype(_TO[kind])

    after = {line[1]: place for place, line in enumerate(lines, 1) if line[0] == "loop"}
    place = 0
    with np.errstate(all="ignore"):
        while place < len(lines):
            opcode, to, *given = lines[place]
            place += 1
            if opcode == "loop":
                continue
            if opcode == "again":
                place = after[to] if state[given[0]].any() else place
                continue
            if opcode.startswith("ld."):
                name, at = given[0].strip("[]").split("+")
                assert tables is not None
                state[to] = _bits(tables[name][get(at, "s32") // 8])
                continue
            function, kinds = _meaning(opcode)
            both = zip(given, chain(kinds, repeat(kinds[-1])), strict=False)
            state[to] = _bits(function(*(get(one, kind) for one, kind in both)))
    shape = np.broadcast_shapes(*(one.shape for one in operands.values()))
    last = {name: state["{" + name + "}"] for name in operands}
    return {
        name: (one if one.shape == shape else np.broadcast_to(one, shape)).copy()
        for name, one in last.items()
    }
