"""A monitor run that meets what no graph can hold is cut there, and goes on (MagPy §5.3).

At the cut the frames of the program are read: where each stands, and the values that it still
needs. The region that ends there is made a record whose result these values are. When the
instruction is over, the recorder starts afresh on the same frames: the next region.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._C import (
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)

from magjit import _C
from magjit.bytecode import decode
from magjit.bytecode.depths import exception_table
from magjit.bytecode.perform import Operation, instruction_at, operation_at
from magjit.bytecode.splice import SpliceError, obstacle
from magjit.continuations import Chain, CutPoint, FramePoint, frame_point
from magjit.refgraph.addresses import KEEP_ADDRESSES
from magjit.refgraph.attributes import cell_node
from magjit.refgraph.frames import FrameState
from magjit.refgraph.number_frames import called_directly
from magjit.refgraph.recorder import StateRecorder
from magjit.refgraph.run_control import Split


@dataclass(frozen=True, slots=True)
class Enclosing:
    """A call that has to be done as a whole, outside of regions, for what happens inside it."""

    code: types.CodeType
    offset: int


class Uncuttable(Exception):
    """The run cannot be cut here; perhaps it can at a call around it, the next time."""

    def __init__(self, reason: str, enclosing: Enclosing | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.enclosing = enclosing


@dataclass(slots=True, eq=False)
class _Live:
    """A followed frame of the run; ``code`` and ``offset`` are the program's own."""

    frame: types.FrameType
    state: FrameState
    resumed: FramePoint | None
    code: types.CodeType
    offset: int

    @property
    def operation(self) -> Operation | None:
        return operation_at(self.code, self.offset)

    @property
    def at_its_start(self) -> bool:
        """Whether it was resumed at the call in which it is: that of the next resumed frame."""
        point = self.resumed
        return point is not None and point.call is not None and point.offset == self.offset

    def fast_locals(self) -> list[Any]:
        values = _C.localsplus(self.frame)
        return values if self.resumed is None else self.resumed.original(values)

    def set_local(self, index: int, value: Any) -> None:
        if self.resumed is not None:
            index = self.resumed.resumed_local(index)
        _C.replace_local(self.frame, index, value)


@dataclass(slots=True, eq=False)
class Cut:
    """A place where a run is cut, with the values of this run."""

    point: CutPoint
    values: tuple[Any, ...]
    operands: tuple[Any, ...]
    frames: list[_Live]


def live_frames(recorder: StateRecorder) -> tuple[list[_Live], bool]:
    """The followed frames that called each other directly, outermost first.

    Also whether the run is further in: in frames below the last one that cannot be resumed.
    """
    assert recorder.tracer is not None
    found: list[_Live] = []
    frame: types.FrameType | None = sys._getframe(1)
    gap = further = False
    while frame is not None:
        state = recorder.tracer.state_of(frame)
        if state is not None:
            further |= gap
            direct = not gap and found and found[-1].state.caller is state
            if found and not (direct and called_directly(found[-1].state)):
                found, further = [], True
            found.append(_at(recorder, frame, state))
            gap = False
        elif not str(frame.f_globals.get("__name__", "")).startswith("magjit."):
            gap = True
        frame = frame.f_back
    if found and found[-1].state.caller is not None:
        return [], True
    return found[::-1], further


def _at(recorder: StateRecorder, frame: types.FrameType, state: FrameState) -> _Live:
    point = recorder.resumed.get(id(frame.f_code))
    offset = 2 * instruction_at(frame.f_code, frame.f_lasti).unit
    if point is None:
        return _Live(frame, state, None, frame.f_code, offset)
    return _Live(frame, state, point, point.code, offset - point.shift)


def find_cut(recorder: StateRecorder, split: Split) -> Cut:
    """The cut at the instruction that runs now.

    Raises:
        Uncuttable: there is none.
    """
    if recorder.checkpoint is not None or recorder.function_calls:
        raise Uncuttable("it happens inside one operator of torch")
    frames, further = live_frames(recorder)
    if recorder.after_event:
        raise Uncuttable("it shows when the instruction is over", _last_event(recorder))
    count = _resumable(frames)
    if recorder.addresses:
        count = min(count, _before_a_memo(frames))
    if count < len(frames):
        frames, further = frames[:count], True
    if not frames:
        raise Uncuttable("no frame of the program can be resumed there")
    last = frames[-1]
    enclosing = Enclosing(last.code, last.offset)
    further = further or not _is_readable(recorder, last)
    if further or last.at_its_start:
        raise Uncuttable("it happens in a frame that cannot be resumed", enclosing)
    try:
        return _cut(recorder, frames, split)
    except SpliceError as problem:
        outer = Enclosing(frames[-2].code, frames[-2].offset) if len(frames) > 1 else None
        raise Uncuttable(str(problem), outer) from problem


def _is_readable(recorder: StateRecorder, last: _Live) -> bool:
    """Whether all operands of the instruction that runs are on the stack still.

    They are when its event is handled, and while C code that it calls calls an operator: not when
    a signal or a finalizer comes in between, nor after CALL_FUNCTION_EX has unpacked its own.
    """
    operators = recorder.operators
    if operators.handling:
        return recorder.state is last.state
    operation = last.operation
    return operators.recording and (
        operation is not None and operation.instr.opname != "CALL_FUNCTION_EX"
    )


def _last_event(recorder: StateRecorder) -> Enclosing | None:
    """The instruction of the last event."""
    if recorder.state is None:
        return None
    return Enclosing(*recorder.place(recorder.state, recorder.offset))


def _resumable(frames: list[_Live]) -> int:
    """How many of the frames, from the outermost on, can be made again where they stand.

    All but the last have to wait in a call. A frame that waits in something else can still do all
    of it: then it is the last.
    """
    for index, live in enumerate(frames):
        operation = live.operation
        if operation is None:
            return index
        if obstacle(live.code, live.offset, replaced=operation.is_call) is not None:
            return index
        if not operation.is_call:
            return index + 1
    return len(frames)


def _before_a_memo(frames: list[_Live]) -> int:
    """How many frames called each other before one of a module that keeps addresses for a while.

    Between two regions its memo would outlive the addresses in it.
    """
    modules = [live.state.globals.get("__name__") for live in frames]
    found = (index for index, name in enumerate(modules) if index and name in KEEP_ADDRESSES)
    return next(found, len(frames))


def _cut(recorder: StateRecorder, frames: list[_Live], split: Split) -> Cut:
    points: list[FramePoint] = []
    values: list[Any] = []
    for live in frames:
        operation = live.operation
        assert operation is not None
        fast = live.fast_locals()
        stack = _C.stack(live.frame, operation.base)
        bound = [value is not _C.NULL for value in fast]
        present = [value is not _C.NULL for value in stack]
        call = operation if operation.is_call else None
        point = frame_point(live.code, live.state.globals, live.offset, bound, present, call)
        points.append(point)
        for index in point.locals:
            if type(fast[index]) is types.CellType:
                cell_node(recorder, live.state, fast[index])  # perhaps it is the function's own
        values += [fast[index] for index in point.locals]
        values += [value for value in stack if value is not _C.NULL]
    chain = Chain(points)
    operation = frames[-1].operation
    assert operation is not None
    full = _C.stack(frames[-1].frame, operation.base + operation.operand_count)[operation.base :]
    nulls = tuple(value is _C.NULL for value in full)
    for point in points if operation.is_call else points[:-1]:
        assert point.resumed is not None  # raises where it cannot be made
    operands = tuple(value for value in full if value is not _C.NULL)
    made = CutPoint(chain, operation, nulls, split.reason, split.remedy)
    if not made.leads_on:
        raise SpliceError("the frames cannot be resumed behind it")
    return Cut(made, tuple(values), operands, frames)


def read_values(cut: Cut, chain: Chain) -> list[Any]:
    """The values that the frames of a cut hold now, when its operation is done."""
    fast = [live.fast_locals() for live in cut.frames]
    stacks = [
        _C.stack(live.frame, len(point.stack))
        for live, point in zip(cut.frames, chain.points, strict=True)
    ]
    return [
        (fast if kind == "local" else stacks)[level][index] for level, kind, index in chain.places()
    ]


def put_values(cut: Cut, chain: Chain, before: list[Any], after: tuple[Any, ...]) -> None:
    """Numbers of the recorder's own in the place of the frames' values."""
    for (level, kind, index), old, new in zip(chain.places(), before, after, strict=True):
        if old is new:
            continue
        live, depth = cut.frames[level], len(chain.points[level].stack)
        if kind == "local":
            live.set_local(index, new)
        else:
            _C.replace_stack(live.frame, depth - 1 - index, new, depth)


class Host(Protocol):
    """Who keeps the regions of a program: see `magjit.regions`."""

    places: dict[tuple[int, int], str]
    """Instructions that are known to split, by the identity of the code and the offset."""

    def ended(self, cut: Cut) -> CutPoint | None:
        """The region that is being recorded ends here; None: it cannot be made a record."""

    def begins(self, chain: Chain, values: list[Any], leavable: bool) -> tuple[Any, ...] | None:
        """The next region begins: what the frames are to hold; None: nothing is to be recorded.

        Raises:
            Leave: the rest of the program is replayed; only where the frames can be left.
        """

    def refused(self, split: Split, problem: Uncuttable) -> None:
        """A split at which the run cannot be cut."""


class Leave(BaseException):
    """The frames of a run end here: the rest of the program is replayed.

    No handler of the program's own sees it (`can_be_left`).
    """


def can_be_left(cut: Cut) -> bool:
    """Whether an exception can end all frames of a run without any code of theirs noticing.

    No frame, up to the one that runs the program, may be inside of a handler's or a ``with``
    block's range.
    """
    frame: types.FrameType | None = cut.frames[-1].frame
    while frame is not None and frame.f_globals.get("__name__") != "magjit.observe":
        unit = frame.f_lasti // 2
        if any(row.start <= unit < row.end for row in exception_table(frame.f_code)):
            return False
        frame = frame.f_back
    return frame is not None


class Cutter:
    """Cuts one monitor run."""

    def __init__(self, recorder: StateRecorder, host: Host) -> None:
        self.recorder = recorder
        self.host = host

    def cut(self, split: Split) -> bool:
        """The recorder has met a split: whether the run is cut there, or given up."""
        recorder = self.recorder
        try:
            cut = find_cut(recorder, split)
            self._take_back(cut)
        except Uncuttable as problem:
            self.host.refused(split, problem)
            return False
        recorder.operators.active = False
        recorder.on_split = lambda split: False
        try:
            point = without_modes(recorder, lambda: self.host.ended(cut))
        finally:
            recorder.on_split = self.cut
        if point is None:
            recorder.give_up(split)
            return True
        cut.point = point
        cut.values = cut.operands = ()
        recorder.between = recorder.numbers.closed = True
        assert recorder.tracer is not None
        self._wake_after(cut, point.operation)
        return True

    def _wake_after(self, cut: Cut, operation: Operation) -> None:
        assert self.recorder.tracer is not None
        self.recorder.tracer.at_next(
            cut.frames[-1].frame, lambda offset: self.wake(cut, operation, offset)
        )

    def _take_back(self, cut: Cut) -> None:
        """What the instruction itself has been recorded for is done again at each call."""
        recorder, last = self.recorder, cut.frames[-1]
        operators = recorder.operators.graph.operators
        known, effects, changes = recorder.marker
        offset = 2 * instruction_at(last.frame.f_code, last.frame.f_lasti).unit
        if recorder.state is not last.state or recorder.offset != offset:
            return  # an instruction that makes no event calls one operator at most
        if recorder.changes != changes and not recorder.operators.handling:
            raise Uncuttable("it has changed objects", Enclosing(last.code, last.offset))
        del operators[known:]
        del recorder.effects[effects:]

    def wake(self, cut: Cut, operation: Operation, offset: int) -> None:
        """An operation of the cut is over: perhaps the next region begins."""
        recorder = self.recorder
        last = cut.frames[-1]
        if last.resumed is not None:
            offset -= last.resumed.shift
        left = _left(cut.point.operation.base, operation, offset, last)
        if left is not None and (further := cut.point.next_operation(offset, left)) is not None:
            self._wake_after(cut, further)
            return
        after = cut.point.after(offset, left) if left is not None else None
        if after is None:
            recorder.abandon("the program goes on at an exception handler")
            return
        chain, _ = after
        if chain.returns:
            recorder.abandon("nothing is left to do")
            return
        recorder.pause()
        try:
            values = read_values(cut, chain)
            leavable = can_be_left(cut)
            given = without_modes(recorder, lambda: self.host.begins(chain, values, leavable))
            if given is not None:
                for live in cut.frames:
                    adopt(recorder, live.state)
                recorder.state = last.state
                put_values(cut, chain, values, given)
        finally:
            recorder.resume()
        if given is None:
            recorder.abandon("the next region is not recorded")


def _left(base: int, operation: Operation, offset: int, last: _Live) -> int | None:
    """How many values an operation has left above a base, if it goes on at an offset."""
    if offset not in (operation.following, operation.target):
        return None
    depth = decode(last.code).depths.before[offset // 2]
    return int(depth) - base


def adopt(recorder: StateRecorder, state: FrameState) -> None:
    """A frame that was entered before this region: what handlers need of it."""
    state.func_node = None
    state.globals_node = recorder.root(state.globals)
    state.entered = False


def without_modes(recorder: StateRecorder, body: Callable[[], Any]) -> Any:
    """Do something that the recorder's own torch-function mode is not to see."""
    ours = _len_torch_function_stack() > 0 and (
        torch._C._get_function_stack_at(_len_torch_function_stack() - 1) is recorder.operators
    )
    if not ours:
        return body()
    _pop_torch_function_stack()
    try:
        return body()
    finally:
        _push_on_torch_function_stack(recorder.operators)
