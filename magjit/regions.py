"""Programs in several regions: who keeps them, and how a call goes from one to the next.

    call   ::= region (operation region)*
    region ::= records of what a chain of frames does up to the next cut, or to the end

A record of a region that ends at a cut gives `Pending`. `Step.drive`, in C, does the operation, as
Python would have done it, and calls the next region with the values of the frames. Where no record
serves it, the frames themselves go on, under observation or not (`magjit.continuations`).
"""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.amp import autocast_mode

from magjit import _C
from magjit import config as settings
from magjit.continuations import Chain, CutPoint
from magjit.cutting import Cut, Enclosing, Leave, Uncuttable
from magjit.errors import line_of
from magjit.monitor.operator_graph import Operator, ValueRef
from magjit.observe import Manner, Observation
from magjit.records import Record, SplitPoint
from magjit.refgraph.long_loops import MOST_TURNS, LongLoops, LoopPlace
from magjit.refgraph.recorder import Effect, StateRecorder
from magjit.refgraph.run_control import Split
from magjit.shape_history import ShapeHistory

log = logging.getLogger("magjit")

_MOST = 200
"""Regions, and places to cut at, of one program; a program with more runs eagerly from there on."""


class Keeper(Protocol):
    """The records of one region; see `magjit.dispatch.Controller`."""

    records: list[Record]
    dispatcher: Any
    eager_reason: str | None
    history: ShapeHistory
    loop: LoopPlace | None
    """The long loop of which the region is a turn."""

    @property
    def name(self) -> str: ...

    def manner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Manner: ...

    def keep(
        self,
        observation: Observation,
        manner: Manner,
        go_on: Callable[[tuple[Any, ...]], Any] | None = None,
    ) -> Record | SplitPoint | None: ...

    def note_split(self, split: SplitPoint) -> None: ...

    def unroll(self, loop: LoopPlace) -> bool: ...


class Program:
    """The regions of one compiled object beyond its first.

    Attributes:
        points: where it was cut.
        regions: how it goes on from there, by where its frames stand.
        places: instructions to cut at that were found too late, with the reason.
        unrolled: long loops whose turns are unlike.
        notes_results: an object could not be made again; the next run tells where it is made.
        symbolic_sizes: numbers that are symbols in the call that is under way.
    """

    def __init__(self, make: Callable[[Chain], Keeper]) -> None:
        self._make = make
        self.points: dict[Any, CutPoint] = {}
        self.regions: dict[Any, Keeper] = {}
        self.places: dict[tuple[int, int], str] = {}
        self.unrolled: dict[tuple[int, int], LoopPlace] = {}
        self.notes_results = False
        self.symbolic_sizes: frozenset[int] = frozenset()
        self._codes: list[types.CodeType] = []
        self._steps: weakref.WeakSet[_C.Step] = weakref.WeakSet()

    def clear(self) -> None:
        """Forget everything; calls that are under way find new regions."""
        for step in self._steps:
            step.forget()
        self.points.clear()
        self.regions.clear()
        self.places.clear()
        self.notes_results = False
        self._codes.clear()

    def region(self, chain: Chain) -> Keeper | None:
        """The region that begins there; None: there are too many."""
        found = self.regions.get(chain.key)
        if found is None and len(self.regions) < _MOST:
            found = self.regions[chain.key] = self._make(chain)
        return found

    def learn(self, place: Enclosing, reason: str) -> bool:
        """Cut at a call from the next capture on; whether that is news."""
        key = (id(place.code), place.offset)
        if key in self.places or len(self.places) >= _MOST:
            return False
        self._codes.append(place.code)
        self.places[key] = reason
        line = line_of(place.code, place.offset)
        log.info(
            "%s, line %d, is done eagerly from the next capture on: %s",
            place.code.co_qualname,
            line,
            reason,
        )
        return True

    def unroll(self, loop: LoopPlace) -> bool:
        """Have a long loop unrolled from now on; whether that is news."""
        if loop.key in self.unrolled:
            return False
        self.unrolled[loop.key] = loop
        line = line_of(loop.code, loop.offset)
        log.info("%s, line %d: unlike turns; unrolled from now on", loop.code.co_qualname, line)
        return True

    def step(self, point: CutPoint) -> _C.Step:
        """What does the operation at a cut in a replay."""
        if point.step is None:
            point.step = point.make_step(self._find_way)
            self._steps.add(point.step)
        return point.step

    def _find_way(
        self, point: CutPoint, offset: int, count: int
    ) -> tuple[Callable[..., Any] | None, tuple[int, ...]]:
        """What is called where the operation goes on at an offset, having left some values.

        Also with which of the values of the frames, before those that it left. None: every frame
        only returns the last of these.
        """
        after = point.after(offset, count)
        assert after is not None, "the frames went on there when the run was cut"
        chain, picked = after
        if chain.returns:
            return None, picked
        region = self.region(chain)
        return (chain if region is None else region.dispatcher), picked


class Rest:
    """What is left of a call when the run that captures it has been left.

    Args:
        program: of which it is a part.
        region: begins there; a record serves it.
        args: what the frames held.
        sizes: numbers that were symbols in the run.
    """

    def __init__(
        self, program: Program, region: Keeper, args: tuple[Any, ...], sizes: frozenset[int]
    ) -> None:
        self._program = program
        self._region = region
        self._args = args
        self._sizes = sizes

    def replay(self, *, to_the_end: bool) -> Any:
        """The result of the call, or `Pending` after the first region."""
        program, args, self._args = self._program, self._args, ()
        before, program.symbolic_sizes = program.symbolic_sizes, self._sizes
        try:
            result = self._region.dispatcher(*args)
            del args  # nothing is kept alive that no frame needs
            while to_the_end and isinstance(result, _C.Pending):
                result = result.step.drive(result.values)
            return result
        finally:
            program.symbolic_sizes = before


class RegionRun:
    """One monitor run of a program, region by region; what `magjit.cutting` asks of its host."""

    observation: Observation

    def __init__(
        self,
        program: Program,
        root: Keeper,
        current: Keeper,
        manner: Manner,
        *,
        leaves: bool = True,
    ) -> None:
        self.program = program
        self.leaves = leaves
        self.rest: Rest | None = None
        self.root = root
        self.current = current
        self.manner = manner
        self.places = program.places
        self.cuts: list[CutPoint] = []
        self.learned = False
        self._loop: LoopPlace | None = None
        self._recorder: StateRecorder | None = None
        self._before: Any = None
        self._duplicate = False

    def attach(self, recorder: StateRecorder) -> None:
        """See `magjit.observe.Regions`."""
        self._recorder = recorder
        recorder.notes_results = self.program.notes_results
        if self.manner.history.dynamic is not False:
            limit = settings.current().unroll_limit
            recorder.loops = LongLoops(limit, self.program.unrolled)

    # -- cuts ------------------------------------------------------------------------------------

    def ended(self, cut: Cut) -> CutPoint | None:
        """See `magjit.cutting.Host`."""
        point = self.program.points.setdefault(cut.point.key, cut.point)
        observation = self.observation
        observation.result = (*cut.values, *cut.operands)
        if not self._duplicate:
            balance(observation)
            observation.end()
            with state_of(observation.global_state):
                kept = self.current.keep(observation, self.manner, self._go_on(point))
            if not isinstance(kept, Record):
                self._not_kept(kept, cut)
                return None
        self.cuts.append(point)
        self._note_loop(cut)
        if not point.told:
            point.told = True
            log.info("%s is cut: %s", self.root.name, point)
        return point

    def _note_loop(self, cut: Cut) -> None:
        """Whether the next region is a turn of a loop that is too long to be unrolled."""
        assert self._recorder is not None
        last, loops = cut.frames[-1], self._recorder.loops
        if loops is not None and loops.cuts:
            self._loop = LoopPlace(last.code, last.offset)
        elif self._loop is not None and self._loop.key != (id(last.code), last.offset):
            self._loop = None

    def _go_on(self, point: CutPoint) -> Callable[[tuple[Any, ...]], Any]:
        step = self.program.step(point)
        return step.drive if self.current is self.root else step

    def _not_kept(self, kept: SplitPoint | None, cut: Cut) -> None:
        """A value of the frames cannot be made again: what makes it is done between regions.

        Where that is not known, the innermost call is done as a whole.
        """
        if not isinstance(kept, SplitPoint):
            return
        if self._learns_of(kept):
            return
        if kept.about is not None and not self.program.notes_results:
            self.program.notes_results = self.learned = True
        elif len(cut.frames) > 1:
            outer = cut.frames[-2]
            self.learned |= self.program.learn(Enclosing(outer.code, outer.offset), kept.reason)

    def _learns_of(self, kept: SplitPoint) -> bool:
        """Whether it is known which instruction made what cannot be made again."""
        assert self._recorder is not None
        made = self._recorder.made.get(id(kept.about))
        if made is None or made[0] is not kept.about:
            return False
        self.learned |= self.program.learn(Enclosing(*made[1:]), kept.reason)
        return True

    def begins(self, chain: Chain, values: list[Any], leavable: bool) -> tuple[Any, ...] | None:
        """See `magjit.cutting.Host`."""
        region = self.program.region(chain)
        recorder = self._recorder
        assert recorder is not None
        if region is None or region.eager_reason is not None:
            return None
        args = tuple(values)
        if self._is_inside_a_mode():
            region.eager_reason = "a mode of torch is active that was not when the call began"
            return None
        self._duplicate = any(record.serves(args) for record in region.records)
        if self._duplicate and leavable and self.leaves:
            self._leave(region, args)
        if not self._duplicate and len(region.records) >= settings.current().record_limit:
            return None
        if self._loop is not None:
            region.loop = self._loop
            if not self._duplicate and len(region.records) >= MOST_TURNS:
                self.root.unroll(self._loop)
                return None
        self._hand_on_shapes(region)
        recorder.give_numbers_back()
        recorder.restart()
        self.observation.forget()
        self.current, self.manner = region, region.manner(args, {})
        self.observation, given = self.manner.begin(recorder, chain, args, {})
        recorder.watch()
        return given[0]

    def _leave(self, region: Keeper, args: tuple[Any, ...]) -> None:
        """Replay the rest of the call: to observe again what is known already costs a lot.

        Raises:
            Leave: always.
        """
        recorder = self.observation.recorder
        sizes = {
            tensor.shape[dim]
            for tensor, free in self._symbolic()
            for dim, is_free in enumerate(free)
            if is_free
        }
        given = tuple(map(recorder.numbers.original, args))
        self.rest = Rest(self.program, region, given, frozenset(sizes))
        recorder.abandon("the rest is replayed")
        raise Leave

    def _symbolic(self) -> Iterator[tuple[torch.Tensor, tuple[bool, ...]]]:
        """Tensors of the region that ends, with which of their sizes are symbols."""
        shapes, operators = self.observation.shapes, self.observation.recorder.operators
        if shapes is None:
            return
        for value, tensor in operators.alive(range(len(operators.graph.values))):
            free = shapes.free_sizes(value.value_id)
            if any(free):
                yield tensor, free

    def _hand_on_shapes(self, region: Keeper) -> None:
        """Sizes that are symbols in the region that ends are symbols in the next one, too."""
        assert self._recorder is not None
        counted = [] if self._recorder.loops is None else self._recorder.loops.counted
        for tensor, free in [*counted, *self._symbolic()]:
            region.history.expected[id(tensor)] = (weakref.ref(tensor), free)

    def _is_inside_a_mode(self) -> bool:
        """Whether torch's state is another one than at the start of the call, but for modes that
        are part of graphs.
        """
        now = _C.global_state()
        if self._before is None:
            self._before = self.observation.global_state
        return any(
            not _equal(self._before[name], now[name]) for name in now.keys() - {_GRAD, *_AUTOCAST}
        )

    def refused(self, split: Split, problem: Uncuttable) -> None:
        """See `magjit.cutting.Host`."""
        log.debug("not cut at %s: %s", split.reason, problem.reason)
        if split.instead is not None:
            self.learned |= self.program.learn(Enclosing(*split.instead), split.reason)
        elif problem.enclosing is not None and split.learn:
            self.learned |= self.program.learn(problem.enclosing, split.reason)

    # -- the end ---------------------------------------------------------------------------------

    def ended_last(self) -> None:
        """The run is over: the last region has no cut behind it."""
        observation = self.observation
        recorder = observation.recorder
        if recorder.abandoned or (self._duplicate and recorder.broken is None):
            return
        if recorder.broken is None and self.current is not self.root:
            try:
                balance(observation)
            except Uncuttable as problem:
                recorder.split(problem.reason, location=observation.location)
        kept = self.current.keep(observation, self.manner)
        if isinstance(kept, SplitPoint):
            self._learns_of(kept)
            if not self.learned:
                self.current.note_split(kept)


# -- global state ---------------------------------------------------------------------------------

_GRAD = "grad_mode"
_AUTOCAST = frozenset({"autocast_cpu", "autocast_cuda", "autocast_cache"})


def balance(observation: Observation) -> None:
    """A graph leaves torch's state as it was; what the region has changed of it, the mock changes.

    Raises:
        Uncuttable: the state cannot be made again.
    """
    before, now = observation.global_state, _C.global_state()
    changed = {name for name in before if not _equal(before[name], now[name])}
    recorder = observation.recorder
    if not changed and not recorder.entered:
        return
    if changed - {_GRAD, *_AUTOCAST}:
        raise Uncuttable(f"torch's state is another one: {', '.join(sorted(changed))}")
    operators = recorder.operators.graph.operators
    entered = [manager for manager, _ in recorder.entered]
    if not all(type(manager) is autocast_mode.autocast for manager in entered):
        raise Uncuttable("a mode of torch is active that cannot be entered again")
    if changed & _AUTOCAST and not entered:
        raise Uncuttable("autocast is another one")
    for _, value_id in reversed(recorder.entered):
        func = autocast_mode._exit_autocast
        operators.append(Operator(func, (ValueRef(value_id),), {}))
    for manager in entered:
        state = (manager.device, manager.fast_dtype, manager._enabled, manager._cache_enabled)
        recorder.effects.append(Effect(autocast_mode._enter_autocast, state, {}))
    if _GRAD in changed:
        grad_mode = torch._C._set_grad_enabled
        operators.append(Operator(grad_mode, (bool(before[_GRAD]),), {}))
        recorder.effects.append(Effect(grad_mode, (bool(now[_GRAD]),), {}))


def _equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


@contextmanager
def state_of(before: Mapping[str, Any]) -> Iterator[None]:
    """Grad mode as it was when a region began."""
    with torch.set_grad_enabled(bool(before[_GRAD])):
        yield
