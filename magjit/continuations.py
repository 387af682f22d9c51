"""What is left of a program that stands at an instruction: code, made to go on from values.

    Chain      ::= FramePoint+                   outermost frame first
    FramePoint ::= code offset locals stack      where a frame goes on, and what it is handed
    CutPoint   ::= Chain Operation               frames that wait for an operation to be done
    Step       ::= CutPoint way*                 in C: the same, with the regions behind it
    Pending    ::= Step value*                   the same at one call

A frame of a chain is a resume function (`magjit.bytecode.splice`). All frames but the innermost
stand at the call of the next one, which is made again: exceptions find the handlers, and readers of
the stack the frames, that they would find in the program itself (MagPy §5.3).
"""

from __future__ import annotations

import functools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from magjit import _C
from magjit.bytecode.decode import decode, fast_local_names
from magjit.bytecode.depths import UNREACHABLE
from magjit.bytecode.liveness import live_locals
from magjit.bytecode.optable import OPCODE
from magjit.bytecode.perform import Operation, follow_up, instruction_at, operation_at
from magjit.bytecode.splice import (
    ResumePoint,
    SpliceError,
    obstacle,
    resume_arguments,
    resume_code,
    shift,
)
from magjit.errors import Location, line_of
from magjit.marks import Mark, mark

Place = tuple[int, str, int]
"""Number of the frame, "local" or "stack", index there."""


@dataclass(frozen=True, eq=False)
class FramePoint:
    """Where one frame of a program goes on.

    Attributes:
        code: of the program itself.
        globals: of its function.
        offset: of the instruction that is executed next, or of the call that it waits in.
        locals: indices of the fast locals that it is handed.
        stack: for each slot of its value stack whether there is a value in it.
        call: the call, of a frame that waits; its operands are no part of the stack.
        calls_at: offset of the call that the frame is about to make, for `stopping`.
    """

    code: types.CodeType
    globals: dict[str, Any]
    offset: int
    locals: tuple[int, ...]
    stack: tuple[bool, ...]
    call: Operation | None = None
    calls_at: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same place of the same function."""
        waits = self.call is not None
        return (id(self.code), id(self.globals), self.offset, self.locals, self.stack, waits)

    @property
    def size(self) -> int:
        """Number of values that it is handed."""
        return len(self.locals) + sum(self.stack)

    @cached_property
    def _point(self) -> ResumePoint:
        count = len(fast_local_names(self.code))
        unbound = frozenset(range(count)) - frozenset(self.locals)
        nulls = [index for index, present in enumerate(self.stack) if not present]
        depth = len(self.stack)
        if self.call is not None:
            operands = self.call.stand_ins(None)
            nulls += [depth + i for i, item in enumerate(operands) if item is _C.NULL]
            depth += len(operands)
        return ResumePoint(
            self.offset, unbound, frozenset(nulls), depth, replaced=self.call is not None
        )

    @cached_property
    def resumed(self) -> types.CodeType:
        """Code that starts here.

        Raises:
            SpliceError: it cannot be made.
        """
        return resume_code(self.code, self._point)

    @cached_property
    def shift(self) -> int:
        """How far behind their old offsets the instructions of the resumed code are."""
        return shift(self.code, self._point)

    def original(self, localsplus: list[Any]) -> list[Any]:
        """The fast locals of the program's code, of those of a frame of the resumed code."""
        first, depth = self.code.co_nlocals, self._point.depth
        return localsplus[:first] + localsplus[first + depth :]

    def resumed_local(self, index: int) -> int:
        """The index in the resumed code of a fast local of the program's."""
        return index if index < self.code.co_nlocals else index + self._point.depth

    @cached_property
    def stopping(self) -> types.CodeType:
        """The same, but it returns what the call gives, and handles no exception."""
        resumed = self.resumed
        units = bytearray(resumed.co_code)
        end = 2 * instruction_at(self.code, self.waits_at).end + self.shift
        units[end : end + 2] = bytes((OPCODE["RETURN_VALUE"], 0))
        return resumed.replace(co_code=bytes(units), co_exceptiontable=b"")

    @property
    def waits_at(self) -> int:
        """The offset of the call; keyword names may have to be set before."""
        return self.offset if self.calls_at is None else self.calls_at

    def function(
        self, values: Sequence[Any], callee: Any, *, stopping: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        """A function that goes on from here, and its arguments."""
        fast: list[Any] = [_C.NULL] * len(fast_local_names(self.code))
        for index, value in zip(self.locals, values, strict=False):
            fast[index] = value
        rest = iter(values[len(self.locals) :])
        stack = [next(rest) if present else _C.NULL for present in self.stack]
        if self.call is not None:
            stack += self.call.stand_ins(callee)
        cells = [
            types.CellType() if cell is _C.NULL else cell for cell in fast[self.code.co_nlocals :]
        ]
        made = types.FunctionType(
            self.stopping if stopping else self.resumed,
            self.globals,
            self.code.co_name,
            None,
            tuple(cells) or None,
        )
        made.__qualname__ = self.code.co_qualname
        return made, resume_arguments(self.code, fast, stack)


def frame_point(
    code: types.CodeType,
    namespace: dict[str, Any],
    offset: int,
    bound: Sequence[bool],
    stack: Sequence[bool],
    call: Operation | None = None,
) -> FramePoint:
    """The point of a frame with these locals bound; what is not used any more is left out."""
    live = live_locals(code, offset)
    kept = tuple(index for index, is_bound in enumerate(bound) if is_bound and index in live)
    return FramePoint(code, namespace, offset, kept, tuple(stack), call)


class Chain:
    """Frames of a program that go on from values; a callable that takes these in order."""

    def __init__(self, points: Sequence[FramePoint]) -> None:
        self.points = tuple(points)
        self.size = sum(point.size for point in self.points)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same places."""
        return tuple(point.key for point in self.points)

    @property
    def last(self) -> FramePoint:
        return self.points[-1]

    @property
    def name(self) -> str:
        """For reports."""
        code = self.last.code
        return f"{code.co_qualname} from line {line_of(code, self.last.offset)} on"

    @cached_property
    def returns(self) -> bool:
        """Whether every frame only returns what the next one, or the stack, gives it."""
        return all(_returns(point) for point in self.points)

    def places(self) -> Iterator[Place]:
        """Where each value belongs."""
        for level, point in enumerate(self.points):
            for index in point.locals:
                yield level, "local", index
            for index, present in enumerate(point.stack):
                if present:
                    yield level, "stack", index

    def check(self) -> None:
        """Make the code of all frames.

        Raises:
            SpliceError: that of one cannot be made.
        """
        for point in self.points:
            assert point.resumed is not None

    def codes(self) -> dict[int, FramePoint]:
        """The frames by the identity of their resumed code."""
        return {id(point.resumed): point for point in self.points}

    def __call__(self, *values: Any) -> Any:
        """Go on to the end of the outermost frame, as Python does."""
        function, arguments = self.bound(values, None)
        return function(*arguments)

    def raising(self, error: BaseException, values: Sequence[Any]) -> Any:
        """Go on from a call that raises."""
        function, arguments = self.bound(values, _C.Thunk(_throw, (error,)))
        return function(*arguments)

    def bound(
        self, values: Sequence[Any], callee: Any, *, stopping: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        """The function of the outermost frame, and its arguments.

        Args:
            values: what the frames are handed.
            callee: what the innermost frame calls, if it waits in a call.
            stopping: each frame returns what its call gives, instead of going on.
        """
        given = len(values)
        for point in reversed(self.points):
            given -= point.size
            mine = values[given : given + point.size]
            function, arguments = point.function(mine, callee, stopping=stopping)
            callee = _C.Thunk(function, arguments)
        return callee.function, callee.args


mark(Chain.__call__, Mark.TRANSPARENT)


def _throw(error: BaseException) -> Any:
    raise error


def _returns(point: FramePoint) -> bool:
    offset = point.offset if point.call is None else point.call.following
    depth = 1 if point.call is None else 0
    return decode(point.code).instrs[offset].opname == "RETURN_VALUE" and len(point.stack) == depth


_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in (torch, os)
)


def is_library(filename: str) -> bool:
    """Whether a file is torch's or the standard library's."""
    return filename.startswith(_LIBRARIES)


class _Raises:
    """An operand with which every operation raises."""

    def __init__(self, error: BaseException) -> None:
        object.__setattr__(self, "error", error)


def _raise(self: Any, *args: Any) -> Any:
    raise object.__getattribute__(self, "error")


for _name in (
    *("bool", "iter", "next", "format", "repr", "str", "neg", "pos", "invert", "contains"),
    *("getitem", "setitem", "delitem", "getattr", "setattr", "delattr", "eq", "ne", "lt", "le"),
    *("gt", "ge", "hash", "len"),
    *(
        prefix + name
        for name in (
            *("add", "and", "floordiv", "lshift", "matmul", "mul", "mod", "or", "pow", "rshift"),
            *("sub", "truediv", "xor"),
        )
        for prefix in ("", "r", "i")
    ),
):
    setattr(_Raises, f"__{_name}__", _raise)


FindWay = Callable[[Any, int, int], tuple[Callable[..., Any] | None, tuple[int, ...]]]
"""Of a cut point, an offset and a number of values: see `magjit/csrc/step.c`."""

_PYTHON, _TEST, _NEXT, _READ = range(4)  # as magjit/csrc/step.c has them
_MOST_UNPACKED = 6


def _step_kind(operation: Operation, nulls: tuple[bool, ...]) -> int:
    opname = operation.instr.opname
    if opname == "CALL" and nulls.count(False) == 2 and not operation.instr.kwnames:
        return _READ  # of a tensor's number, perhaps: a function and one argument
    if opname.startswith("POP_JUMP_") and opname.endswith(("_IF_TRUE", "_IF_FALSE")):
        return _TEST
    return _NEXT if opname == "FOR_ITER" else _PYTHON


class CutPoint:
    """Frames that wait for an operation, and how the program goes on when it is done.

    Attributes:
        frames: all frames, the innermost at the operation, without its operands.
        operation: what is to be done.
        nulls: for each operand whether it is an empty slot.
        reason: why the program is cut here.
        remedy: how that can be avoided, if it can.
        told: the log has it.
        step: does the operation between two regions of a replay.
    """

    def __init__(
        self,
        frames: Chain,
        operation: Operation,
        nulls: tuple[bool, ...],
        reason: str,
        remedy: str | None = None,
    ) -> None:
        self.frames = frames
        self.operation = operation
        self.nulls = nulls
        self.reason = reason
        self.remedy = remedy
        self.told = False
        self.step: _C.Step | None = None
        self._places = {place: index for index, place in enumerate(frames.places())}
        self._next: dict[tuple[int, int], Operation | None] = {}
        self._after: dict[tuple[int, int], tuple[Chain, tuple[int, ...]] | None] = {}

    @property
    def location(self) -> Location:
        """Where the operation is, in the program: not in a library that it calls, if it can be."""
        own = [p for p in self.frames.points if not is_library(p.code.co_filename)]
        point = own[-1] if own else self.frames.last
        return Location.of(point.code, point.offset)

    def __str__(self) -> str:
        return f"{self.reason} at {self.location}"

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same operation of the same frames."""
        return (self.frames.key, self.nulls)

    def perform(self, held: Sequence[Any], operands: Sequence[Any]) -> tuple[int, tuple[Any, ...]]:
        """Do the operation: where the program goes on, with what on its stack."""
        operation, given = self.operation, iter(operands)
        full = [_C.NULL if null else next(given) for null in self.nulls]
        if operation.is_call and needs_frames(operation.callee(full)):
            function, arguments = self._in_place.bound((*held, *operands), None, stopping=True)
            offset, left = operation.following, (function(*arguments),)
        else:
            offset, left = operation.perform(full)
        return self.follow(offset, left)

    def follow(self, offset: int, left: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
        """Do also what belongs to the operation, which has left some values at an offset."""
        while (further := self.next_operation(offset, len(left))) is not None:
            rest = len(left) - further.operand_count
            offset, new = further.perform(left[rest:])
            left = (*left[:rest], *new)
        return offset, left

    @cached_property
    def _in_place(self) -> Chain:
        """The frames about to make the call: code that reads the stack finds them there."""
        last = self.frames.last
        stack = (*last.stack, *[not null for null in self.nulls])
        start = self.operation.named_at(last.code)
        point = FramePoint(last.code, last.globals, start, last.locals, stack, None, last.offset)
        return Chain([*self.frames.points[:-1], point])

    def make_step(self, find_way: FindWay) -> _C.Step:
        """The operation in C, as far as C can do it."""
        operation = self.operation
        kind, jumps_if, unpacks, unpacked = _step_kind(operation, self.nulls), False, -1, -1
        if kind == _TEST:
            jumps_if = operation.instr.opname.endswith("TRUE")
        elif kind == _NEXT and (further := self.next_operation(operation.following, 2)) is not None:
            unpacks, unpacked = further.instr.arg, further.following
            plain = further.instr.opname == "UNPACK_SEQUENCE" and unpacks <= _MOST_UNPACKED
            if not plain or self.next_operation(unpacked, 1 + unpacks) is not None:
                kind = _PYTHON
        return _C.Step(
            self,
            find_way,
            kind,
            self.frames.size,
            operation.following,
            operation.target,
            jumps_if,
            unpacks,
            unpacked,
        )

    @cached_property
    def leads_on(self) -> bool:
        """Whether the frames can be resumed wherever the operation leads to."""
        return self._leads_on(self.operation)

    def _leads_on(self, operation: Operation) -> bool:
        depths = decode(self.frames.last.code).depths.before
        for offset in (operation.following, operation.target):
            if offset < 0 or depths[offset // 2] == UNREACHABLE:
                continue
            count = depths[offset // 2] - self.operation.base
            further = self.next_operation(offset, count)
            if not (self.after(offset, count) if further is None else self._leads_on(further)):
                return False
        return True

    def next_operation(self, offset: int, count: int) -> Operation | None:
        """What belongs to the operation, too, where it has left some values at an offset."""
        key = (offset, count)
        if key not in self._next:
            self._next[key] = follow_up(self.frames.last.code, offset, count) if count else None
        return self._next[key]

    def after(self, offset: int, count: int) -> tuple[Chain, tuple[int, ...]] | None:
        """The frames once the operation has left ``count`` values and goes on at an offset.

        Also which of the values of `frames` they are handed, before those that it left; None where
        execution cannot be resumed there.
        """
        key = (offset, count)
        if key not in self._after:
            self._after[key] = self._make_after(offset, count)
        return self._after[key]

    def _make_after(self, offset: int, count: int) -> tuple[Chain, tuple[int, ...]] | None:
        last = self.frames.last
        if obstacle(last.code, offset) is not None:
            return None
        live = live_locals(last.code, offset)
        kept = tuple(index for index in last.locals if index in live)
        stack = (*last.stack, *[True] * count)
        point = FramePoint(last.code, last.globals, offset, kept, stack)
        chain = Chain([*self.frames.points[:-1], point])
        try:
            chain.check()
        except SpliceError:
            return None
        places = list(chain.places())
        handed = places[: len(places) - count]
        return chain, tuple(self._places[place] for place in handed)

    def raising(self, error: BaseException, values: Sequence[Any]) -> Any:
        """The operation raises: Python goes on from there."""
        if self.operation.is_call:
            return self.frames.raising(error, values)
        last = self.frames.last
        stack = (*last.stack, *[True] * self.operation.operand_count)
        point = FramePoint(last.code, last.globals, last.offset, last.locals, stack)
        chain = Chain([*self.frames.points[:-1], point])
        operands = [_Raises(error)] * self.operation.operand_count
        return chain(*values, *operands)


_HEAP_TYPE = 1 << 9
_READERS: frozenset[Any] = frozenset(
    {sys._getframe, locals, globals, vars, dir, eval, exec, super, warnings.warn}
)


def needs_frames(func: Any) -> bool:
    """Whether a callable may read the frames that call it: anything but plain C code may."""
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, type) and func not in _READERS and func is not type:
        return bool(func.__flags__ & _HEAP_TYPE)  # one that is written in C
    if isinstance(func, types.BuiltinFunctionType | types.MethodDescriptorType):
        return getattr(func, "__self__", None) is sys or func in _READERS
    return not isinstance(func, types.WrapperDescriptorType | types.MethodWrapperType)


__all__ = ["Chain", "CutPoint", "FramePoint", "frame_point", "operation_at"]
