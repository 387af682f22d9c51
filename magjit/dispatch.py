"""What happens at a call that no record serves: observe, keep the record, or run eagerly.

The hit path is C (`magjit._C.Dispatcher`); this module is its slow half, one `Controller` for each
compiled object. Records belong to the controller, so two compiles of one class share nothing.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from magjit import _C, stances
from magjit import config as settings
from magjit.continuations import Chain
from magjit.errors import BackendError, GraphBreakError, RecompileError
from magjit.late_graphs import NotCompiled, cannot_compile_here
from magjit.marks import Mark, mark
from magjit.observe import Manner, Observation, capture_lock, observe
from magjit.own_frames import depth_of_the_call, users_part
from magjit.pipeline import build_record
from magjit.plugin import Backend, BackendContext, FloatInputs, Streaming, StreamingBackend, calls
from magjit.plugin.modes import has_saved_tensor_hooks, leave_modes
from magjit.records import Captured, Record, SplitPoint, Stats
from magjit.refgraph.long_loops import LoopPlace
from magjit.regions import Program, RegionRun, Rest
from magjit.rehearsal import may_rehearse, rehearse
from magjit.shape_history import ShapeHistory

log = logging.getLogger("magjit")
calls.follow(_C.current_call)

_controllers: weakref.WeakSet[Controller] = weakref.WeakSet()
_MAX_FAILURES = 2


class MagJITWarning(UserWarning):
    """A call runs eagerly; the text says why and what can be done."""


@dataclass(frozen=True, slots=True)
class Options:
    """How one object is compiled; the fields are `magjit.compile`'s parameters."""

    backend: Backend
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    options: Mapping[str, Any] | None = None


class Controller:
    """The records of one compiled object and the decisions about them."""

    def __init__(self, target: Any, options: Options, root: Controller | None = None) -> None:
        self.target = target
        self.root = root or self
        self.cuts = not options.fullgraph
        self.parts: list[Captured] = []
        self.program: Program = Program(self._region) if root is None else root.program
        self.options = options
        self.records: list[Record] = []
        self.captures = 0
        self.splits = 0
        self.eager_calls = 0
        self.streamed_calls = 0
        self.streaming: Streaming | None = None
        self.calls_unknown = False
        self.failures = 0
        self.retired_hits = 0
        self.last: Captured | None = None
        self.keep_last = False
        self.loop: LoopPlace | None = None
        self.eager_reason: str | None = None
        self.history = ShapeHistory(options.dynamic)
        self.shell: Callable[[], Any] = lambda: None
        self.dispatcher = _C.Dispatcher(self.miss)
        self.dispatcher.failed = self.failed
        if root is None:
            _controllers.add(self)

    @property
    def stats(self) -> Stats:
        replays = self.retired_hits + sum(record.hits for record in self.records)
        regions = [one for one in self.program.regions.values() if isinstance(one, Controller)]
        return Stats(
            self.captures + sum(region.captures for region in regions),
            replays,
            self.splits + sum(region.splits for region in regions),
            self.eager_calls + sum(region.eager_calls for region in regions),
            len(self.records) + sum(len(region.records) for region in regions),
            len(regions),
            sum(record.hits for region in regions for record in region.records),
            sum(
                point.step.done for point in self.program.points.values() if point.step is not None
            ),
            self.streamed_calls + sum(region.streamed_calls for region in regions),
        )

    def streamed_parts(self) -> list[str]:
        """What is streamed from now on where no record fits, and why."""
        regions = [one for one in self.program.regions.values() if isinstance(one, Controller)]
        name = self.options.backend.name
        return [
            f"calls of {one.name} that fit no record are streamed by {name!r}: {one.eager_reason}"
            for one in (self, *regions)
            if one.streaming is not None
        ]

    def _region(self, chain: Chain) -> Controller:
        """The records of a part of this program."""
        region = Controller(chain, self.options, self)
        region.keep_last, region.parts = self.keep_last, self.parts
        region.history.of_region = True
        return region

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """A call for which no guard holds."""
        try:
            return self._missed(args, kwargs or {})
        except BaseException as error:
            # Neither readers of the traceback nor what it keeps alive need our own frames.
            error.__traceback__ = users_part(error.__traceback__)
            raise

    def _missed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.streaming is not None and not capture_lock.capturing_here:
            return self._streamed(args, kwargs)
        if self.eager_reason is not None or _is_traced() or _is_fake((*args, *kwargs.values())):
            return self._eagerly(args, kwargs)
        if stances.current() in ("force_eager", "eager_on_recompile"):
            return self._eagerly(args, kwargs)
        if not capture_lock.take():
            return self._eagerly(args, kwargs)
        try:
            capture_lock["capturing"] = capture_lock["holder"]
            reasons = self.failing_guards(args, kwargs)
            if len(reasons) < len(self.records):
                return self._eagerly(args, kwargs)  # captured by another thread since it missed
            if stances.current() == "fail_on_recompile":
                raise self._refused(reasons)
            if len(self.records) >= settings.current().record_limit:
                return self._over_limit(args, kwargs, reasons)
            if self.records and log.isEnabledFor(logging.INFO):
                log.info("%s is captured again: %s", self.name, "; ".join(dict.fromkeys(reasons)))
            result = self._capture(args, kwargs)
            if not isinstance(result, Rest):
                self._rehearse(args, kwargs)
        finally:
            capture_lock.clear()
        return result.replay(to_the_end=self is self.root) if type(result) is Rest else result

    def _rehearse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the second way at once where the first record would not even serve the next call.

        Sizes as symbols are no part of it: a call whose tensors change their sizes is another one.
        """
        if len(self.records) != 1 or self.captures != 1 or not settings.current().rehearse:
            return
        record = self.records[0]
        if record.fixed_draws or record.serves(args, kwargs) or not may_rehearse():
            return
        manner = self.manner(args, kwargs)
        if manner.symbols:
            return
        keep_last, self.keep_last = self.keep_last, False  # reports are about the call itself
        try:
            rehearse(self.target, args, kwargs, manner, self.keep)
        finally:
            self.keep_last = keep_last

    def failed(
        self,
        handle: _C.Record,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: BaseException,
        in_graph: bool,
    ) -> Any:
        """A replay failed. An operator of the program that raises in eager does so in the graph.

        Then the program is run, for the state that it leaves and for a traceback that leads
        through it; unless the graph has changed something already, or may have in a user's hook:
        checkpointing ends a recomputation with an exception out of one.
        """
        record = next((record for record in self.records if record.handle is handle), None)
        if isinstance(error, NotCompiled):
            handle.hits -= 1  # it has not served the call
            return self._needed_now(record, error, args, kwargs)
        if record is None or not in_graph:
            raise error
        leave_modes(error, record.grad_enabled)
        if not record.repeatable or not isinstance(error, Exception) or has_saved_tensor_hooks():
            raise error
        try:
            result = self._eagerly(args, kwargs)
        except BaseException as raised:
            raised.__traceback__ = users_part(raised.__traceback__)
            raise
        reason = f"what backend {self.options.backend.name!r} compiled failed: {error!r}"
        if self.options.fullgraph:
            raise BackendError(
                f"{self.name} runs, but {reason}", remedy="backend='eager' runs the captured graph"
            ) from error
        self.reset()
        self._fall_back(reason, reason)
        return result

    def _needed_now(
        self,
        record: Record | None,
        asked: NotCompiled,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call that hits a record whose graph has waited to be compiled."""
        if _is_traced() or cannot_compile_here() or not capture_lock.take():
            return self._eagerly(args, kwargs)
        try:
            capture_lock["capturing"] = capture_lock["holder"]
            if record is not None and record.late is asked.graph:
                old = record.handle
                handle = asked.graph.compile(record, asked.inputs)
                if record in self.records:  # nobody has dropped it meanwhile
                    self.dispatcher.add(handle)
                    self.dispatcher.remove(old)
        except Exception as error:
            if record in self.records:
                self.records.remove(record)
                self.dispatcher.remove(record.handle)
                self._fall_back(str(getattr(error, "reason", error)), str(error))
        finally:
            capture_lock.clear()
        return self.dispatcher(*args, **kwargs)

    def _eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.eager_calls += 1
        if _is_symbolic() and (shell := self.shell()) is not None:
            # torch.fx knows the object that is part of the model.
            return type(self.target).__call__(shell, *args, **kwargs)
        return self.target(*args, **kwargs)

    def _streamed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The program itself, its operators in the backend's hands: a call past the limit."""
        context = None
        if stances.current() == "default" and not _is_traced():
            values = [*args, *kwargs.values()]
            if self.streaming is not None and not _is_fake((*values,)):
                context = self.streaming.context(values)
        if context is None:
            return self._eagerly(args, kwargs)
        self.streamed_calls += 1
        with context:
            return self._eagerly(args, kwargs)

    def unroll(self, loop: LoopPlace) -> bool:
        """Forget captures with a long loop of unlike turns; False: it is unrolled already."""
        news = self.program.unroll(loop)
        if news:
            self.reset()
        return news

    def _over_limit(self, args: tuple[Any, ...], kwargs: dict[str, Any], reasons: list[str]) -> Any:
        if self.loop is not None and self.root.unroll(self.loop):
            return self._eagerly(args, kwargs)
        self.eager_reason = f"{len(self.records)} records and still another call"
        backend = self.options.backend
        if isinstance(backend, StreamingBackend) and not self.root.calls_unknown:
            self.streaming = backend.stream()
        how = "run eagerly" if self.streaming is None else f"are streamed by {backend.name!r}"
        shown = "\n".join(f"  - {reason}" for reason in dict.fromkeys(reasons))
        self._warn(
            f"{self.name} has {len(self.records)} records, its limit, and this call fits none; "
            f"calls that fit none {how} from now on. Guards that fail:\n{shown}\n"
            "  way out: keep what these guards check constant, or raise magjit.config's"
            " record_limit"
        )
        return self._streamed(args, kwargs)

    def _refused(self, reasons: list[str]) -> RecompileError:
        text = "; ".join(dict.fromkeys(reasons)) or "it has no record yet"
        return RecompileError(
            f"{self.name} would have to be captured: {text}",
            remedy="magjit.set_stance('default') captures, 'eager_on_recompile' runs eagerly",
        )

    def failing_guards(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """For each record, what a call with these arguments misses it for."""
        found = [record.miss(args, kwargs) for record in self.records]
        return [str(miss) for miss in found if miss is not None]

    def manner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Manner:
        """How a call that misses all records is to be observed."""
        # A record that asks for the same random numbers again is worth one try.
        tried = any(record.fixed_draws for record in self.records)
        for record in self.records:
            for owner, name in record.missed_numbers(args, kwargs):
                self.history.note_attribute(owner, name)
        self.history.expect(self.program.symbolic_sizes, args)
        symbols = self.history.wants_symbols(
            [*args, *kwargs.values()],
            any(record.misses_for_shape(args, kwargs) for record in self.records),
        )
        return Manner(
            fix_draws=not tried and not self.options.fullgraph,
            cuts=self.cuts,
            floats=getattr(self.options.backend, "float_inputs", FloatInputs.TENSORS),
            history=self.history,
            symbols=symbols,
        )

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        manner = self.manner(args, kwargs)
        run = None
        if self.cuts:
            leaves = not self.keep_last  # reports are about the whole call
            run = RegionRun(self.program, self.root, self, manner, leaves=leaves)
        observation = observe(self.target, args, kwargs, manner, run)
        result = observation.recorder.numbers.original(observation.result)
        try:
            if run is not None:
                run.ended_last()
                self.root.splits += bool(run.cuts or run.learned)
            elif isinstance(kept := self.keep(observation, manner), SplitPoint):
                self.note_split(kept)
        finally:
            observation.recorder.give_numbers_back()
            if not self.keep_last:
                observation.release()
        return result if run is None or run.rest is None else run.rest

    def keep(
        self,
        observation: Observation,
        manner: Manner,
        go_on: Callable[[tuple[Any, ...]], Any] | None = None,
    ) -> Record | SplitPoint | None:
        """Make a record of what was observed, or say why there is none.

        None: the next capture, made in another manner, may give one.

        Args:
            observation: of a region that has just ended.
            manner: how it was observed.
            go_on: gives the result of a replay of a region that ends at a cut.

        Raises:
            BackendError, GraphBreakError: with ``fullgraph=True``.
        """
        context = BackendContext(
            mode=self.options.mode,
            options=self.options.options,
            dynamic=self.options.dynamic,
            fullgraph=self.options.fullgraph,
            want_dumps=self.keep_last,
            grad_enabled=observation.grad_enabled,
        )
        self.history.expected = {}
        try:
            captured = build_record(observation, self.options.backend, context, go_on)
            self.root.calls_unknown |= bool(captured.missing)
            if captured.record is not None:
                self._note_shapes(observation)
        except BackendError as error:
            if manner.symbols or (observation.recorder.numbers and not self.history.given_up):
                self.history.given_up = True  # the next capture is made without
                log.debug("%s with symbols: %s", self.name, error)
                return None
            if self.options.fullgraph:
                raise
            self._fall_back(f"{error.reason}", str(error))
            return None
        if self.keep_last:
            self.last = captured
            self.parts.append(captured)
        if captured.record is not None:
            self.captures += 1
            self.failures = 0
            self.records.append(captured.record)
            self.dispatcher.add(captured.record.handle)
            log.debug("captured %s: %d operators", self.name, captured.record.operator_count)
            return captured.record
        assert captured.split is not None
        if manner.symbols and not self.options.dynamic:
            self.history.given_up = True  # the next capture is made without
            log.debug("%s with symbolic shapes: %s", self.name, captured.split)
            return None
        return captured.split

    def _note_shapes(self, observation: Observation) -> None:
        """Remember the sizes and numbers of this call, and which have to be as they are."""
        self.history.note_numbers(observation.args, observation.kwargs)
        graph, shapes = observation.recorder.graph, observation.shapes
        for node_id, meta in observation.recorder.metas.items():
            node = graph.nodes[node_id]
            if not isinstance(node.obj, torch.nn.Parameter):
                self.history.note(graph, node, meta[4])
        if shapes is not None:
            for node, dim in shapes.pinned_dims():
                self.history.fix(graph, node, dim)
            for reason in shapes.reasons():
                log.info("%s: %s", self.name, reason)

    def note_split(self, split: SplitPoint) -> None:
        """A run did not become a record."""
        self.splits += 1
        if self.options.fullgraph:
            raise GraphBreakError(
                f"{self.name} is not one graph: {split.reason}",
                location=split.location,
                remedy=split.remedy or "compile with fullgraph=False to run such calls eagerly",
            ) from split.error
        self.failures += 1
        if self.failures == 1:
            self._warn(
                f"{self.name} runs eagerly: {split}"
                + (f"\n  way out: {split.remedy}" if split.remedy else "")
            )
        if self.failures >= _MAX_FAILURES:
            self.eager_reason = split.reason

    def _fall_back(self, reason: str, text: str) -> None:
        self.eager_reason = reason
        self._warn(f"{self.name} runs eagerly: {text}")

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        warnings.warn(text, MagJITWarning, stacklevel=depth_of_the_call())

    @property
    def name(self) -> str:
        target = self.target
        if isinstance(target, Chain):
            return f"{self.root.name}, in {target.name}"
        return getattr(target, "__qualname__", None) or type(target).__qualname__

    def reset(self) -> None:
        """Forget all records."""
        self.retired_hits += sum(record.hits for record in self.records)
        self.records.clear()
        self.dispatcher.clear()
        self.eager_reason = None
        self.streaming = None
        self.calls_unknown = False
        self.failures = 0
        self.history = ShapeHistory(self.options.dynamic)
        self.last = None
        self.parts.clear()
        self.program.clear()


def reset_all() -> None:
    """Forget the records of every compiled object."""
    for controller in list(_controllers):
        controller.reset()


def all_stats() -> Stats:
    """The counters of all compiled objects together."""
    total = Stats()
    for controller in list(_controllers):
        stats = controller.stats
        for name in ("captures", "replays", "splits", "eager_calls", "streamed_calls", "records"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
    return total


def _is_traced() -> bool:
    """Whether another tracer is at work: then a compiled object is the program itself."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or _is_symbolic()
    )


def _is_fake(values: tuple[Any, ...]) -> bool:
    """Whether the call only asks for shapes: a fake tensor carries its tracer along."""
    return any(isinstance(value, FakeTensor) for value in values)


def _is_symbolic() -> bool:
    return bool(torch.fx._symbolic_trace._is_fx_tracing_flag)


for _function in (
    Controller.miss,
    Controller._missed,
    Controller._streamed,
    Controller._eagerly,
):
    mark(_function, Mark.TRANSPARENT)
