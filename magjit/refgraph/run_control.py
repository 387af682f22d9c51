"""The course of a run: where it is, where it splits or is cut, when it is not recorded any more."""

from __future__ import annotations

import sys
import types
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from magjit.errors import Location
from magjit.monitor.operators import OperatorRecorder
from magjit.refgraph.cached_calls import CachedCall
from magjit.refgraph.frames import OWN_FOLDERS, FrameState
from magjit.refgraph.long_loops import LongLoops
from magjit.refgraph.numbers import Numbers
from magjit.refgraph.tensors import TensorNotes


def _users_frame() -> types.FrameType | None:
    """The innermost frame outside torch and MagJIT."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FOLDERS):
        frame = frame.f_back
    return frame


class TracerLike(Protocol):
    """The part of the C tracer that the recorder uses."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def watch(self, obj: object, /) -> None: ...

    def state_of(self, frame: types.FrameType, /) -> Any: ...

    def at_next(self, frame: types.FrameType, wake: Callable[[int], object], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Split:
    """Why the program cannot be captured as one graph, and where."""

    reason: str
    location: Location | None
    remedy: str | None = None
    error: BaseException | None = None
    learn: bool = True
    """Whether a call around it is to be done as a whole where the run cannot be cut."""
    instead: tuple[types.CodeType, int] | None = None
    """Where the run can be cut the next time if it cannot be cut here."""


REPORT = "this is a fault of MagJIT's: please report it with the program that shows it"


class RunControl(TensorNotes):
    """The part of the recorder that knows whether it records.

    A run that is cut is several regions, one after the other; `restart` begins the next.

    Attributes:
        on_split: cuts the run at a split; says whether it could.
        between: the run was cut, and the instruction of the cut is not over yet.
        resumed: the frames of a region that goes on in the middle of functions, by the identity
            of their code.
        filled: containers on the stacks of frames that instructions may still fill.
        places: instructions to cut at, by identity of the code and offset, with the reason.
        regions: how many have begun after the first.
        marker: operators, effects and changes when the last event began.
        tells_apart: code that was not followed may have asked which objects tensors are.
        loops: the loops that may be too long to be unrolled; None: all are.
        around: what the program itself runs within, if anything.
        confines: an exception that a handler raises into the program does not end the observation.
        addresses: what ``id`` has given in modules that use it for memos.
        cached: calls of functions with caches that the guard makes again.
        notes_results: write down in `made` which call made an object: the object, the code and
            the offset, by the object's identity.
    """

    confines = False
    tells_apart = False
    loops: LongLoops | None = None
    around: AbstractContextManager[Any] | None = None
    notes_results: bool
    made: dict[int, tuple[Any, types.CodeType, int]]
    addresses: dict[int, int]
    cached: list[CachedCall]

    operators: OperatorRecorder
    numbers: Numbers
    tracer: TracerLike | None
    broken: Split | None
    state: FrameState | None
    offset: int
    resumed: dict[int, Any]
    filled: list[Any]
    between: bool
    regions: int
    abandoned: bool
    on_split: Callable[[Split], bool]

    @abstractmethod
    def begin(self) -> None:
        """See `StateRecorder`."""

    def pause(self) -> None:
        if self.tracer is not None:
            self.tracer.pause()

    def resume(self) -> None:
        if self.tracer is not None:
            self.tracer.resume()

    def instruction(self) -> tuple[Any, int]:
        """The code and offset of the user's instruction that is running."""
        frame = _users_frame()
        return (frame.f_code, frame.f_lasti) if frame is not None else (None, -1)

    def where(self) -> tuple[Any, int]:
        """The same as far as followed frames tell it, which costs less."""
        state = self.state
        while state is not None:
            if state.is_users:
                return state.code, state.offset
            state = state.caller
        return None, -1

    def split(
        self,
        reason: str,
        remedy: str | None = None,
        location: Location | None = None,
        instead: tuple[types.CodeType, int] | None = None,
    ) -> None:
        """Note that the run cannot become one graph; the user's program goes on unobserved."""
        if self.broken is not None or self.between:
            return
        split = Split(reason, location or self.location(), remedy, instead=instead)
        if location is None and self.on_split(split):
            return
        if self.broken is None:
            self.give_up(split)

    def place(self, state: FrameState, offset: int) -> tuple[types.CodeType, int]:
        """An instruction of a frame as one of the program's own code."""
        point = self.resumed.get(id(state.code))
        return (state.code, offset) if point is None else (point.code, offset - point.shift)

    def waits(self) -> bool:
        """Whether the run was cut at the instruction that is under way."""
        return self.between

    def watches(self, tensor: Any) -> None:
        """Have the tracer report what goes over a tensor whose shape depends on data."""
        if self.tracer is not None:
            self.tracer.watch(tensor)

    def goes_over_data(self, value: Any) -> bool:
        """Whether a value is a tensor that has as many rows as data say."""
        found = self.operators.value_of(value)
        return found is not None and found.of_unknown_shape

    def watch(self) -> None:
        """Have the tracer report what it would not of itself: a region begins now."""
        if self.tracer is not None:
            self.numbers.watch_with(self.tracer.watch)
            for container in self.filled:
                self.tracer.watch(container)

    def try_cut(self, reason: str, *, learn: bool = False) -> bool:
        """Cut the run here if that can be done; otherwise it goes on in one piece."""
        if self.broken is not None or self.between:
            return False
        return self.on_split(Split(reason, self.location(), learn=learn))

    def give_up(self, split: Split) -> None:
        """The run is not recorded from here on."""
        self.broken = split
        self.operators.active = False
        self.pause()

    def abandon(self, reason: str) -> None:
        """The rest of a run that was cut is not recorded."""
        self.between = False
        self.abandoned = True
        self.give_up(Split(reason, self.location()))

    def operation_raises(self) -> None:
        """An instruction at which the run was cut has ended by an exception."""
        self.abandon("an operation between two regions raises")

    def asks_cache(self, call: CachedCall) -> None:
        """The program calls a function with a cache; so does the guard of each replay."""
        self.cached.append(call)

    def imports(self, name: str, *, known: bool) -> None:
        """The program is about to import a module; ``known`` when it has been before."""

    def makes_instance(self, cls: type) -> None:
        """The program is about to call a class that is written in Python."""

    def restart(self) -> None:
        """The next region of the run begins."""
        state, offset, resumed = self.state, self.offset, self.resumed
        self.regions += 1
        self.operators.begin()
        self.begin()
        self.state, self.offset, self.resumed = state, offset, resumed

    def fail(self, error: BaseException) -> None:
        """Recording itself went wrong: the run goes on unobserved, its record is given up."""
        if self.broken is None or self.broken.error is None:
            reason = f"MagJIT's own recorder failed: {error!r}"
            self.give_up(Split(reason, self.location(), REPORT, error))

    def location(self) -> Location | None:
        """Where the user's program is now: the innermost frame outside torch and MagJIT."""
        found = _users_frame()
        if found is None:
            return None
        return Location(found.f_code.co_filename, found.f_lineno, found.f_code.co_qualname)
