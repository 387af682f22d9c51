"""The monitor run: the user's program, run once for real, under observation (MagPy §3, §5)."""

from __future__ import annotations

import dataclasses
import threading
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack

from magjit import _C
from magjit.annotations import default_database
from magjit.bytecode import decode
from magjit.cutting import Cutter, Host, Leave
from magjit.errors import Location
from magjit.garbage import uncollected
from magjit.layouts import may_lie_anyhow
from magjit.marks import Mark, mark_of
from magjit.mocks import Resolver
from magjit.plugin import FloatInputs, GraphInput, InputDescriber, TensorInput
from magjit.records import Timings
from magjit.refgraph import attributes, calls, containers, other_events
from magjit.refgraph import relations as r
from magjit.refgraph.autograd_functions import left_frame
from magjit.refgraph.binding import bind_handlers
from magjit.refgraph.containers import note_identity
from magjit.refgraph.frames import FrameState
from magjit.refgraph.kinds import MODULE_TABLES
from magjit.refgraph.nodes import ShadowNode
from magjit.refgraph.number_frames import entered, returned
from magjit.refgraph.python_specials import python_special
from magjit.refgraph.recorder import StateRecorder
from magjit.refgraph.stack import reads_onto_stack
from magjit.roots import definition, is_passed_through, register_roots, sees_keyword_order
from magjit.shape_history import ShapeHistory
from magjit.symbolic_shapes import SymbolicShapes


def with_symbols(given: TensorInput, dims: frozenset[int]) -> TensorInput:
    """A description by which exactly these sizes become symbols."""
    return dataclasses.replace(given, dynamic_dims=frozenset(), maybe_dynamic_dims=dims)


class CaptureLock(dict[str, int]):
    """Observation is process-wide: one capture at a time, whose thread is written here.

    ::

        if lock.take():
            try:
                lock["capturing"] = lock["holder"]
                ...
            finally:
                lock.clear()

    An interrupt between the first two lines keeps a thread from giving the lock back; then it takes
    it again at its next call. It is given back by a function in C, which no interrupt prevents.
    """

    def take(self) -> bool:
        """Whether this thread has the lock now; not a second time inside a capture."""
        return not self.capturing_here and self.setdefault("holder", _thread()) == _thread()

    @property
    def capturing_here(self) -> bool:
        """Whether this thread is inside a capture."""
        return self.get("capturing") == _thread()


_thread = threading.get_ident
capture_lock = CaptureLock()

_TRIVIAL = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), range, slice}
    | {torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device}
    | {types.FunctionType, types.BuiltinFunctionType, types.CodeType}
)
_TENSOR_HASH = torch.Tensor.__hash__.__code__
_HANDLERS = {
    **attributes.HANDLERS,
    **containers.HANDLERS,
    **calls.HANDLERS,
    **other_events.HANDLERS,
}


class _GraphResolver:
    """What the mock planner asks about the objects of a run."""

    def __init__(self, recorder: StateRecorder) -> None:
        self._recorder = recorder

    def external(self, obj: Any) -> int | None:
        """See `Resolver`."""
        node = self._recorder.graph.node_of(obj)
        return node.node_id if node is not None else None

    def tensor(self, obj: Any) -> int | None:
        """See `Resolver`."""
        value = self._recorder.operators.value_of(obj)
        return value.value_id if value is not None else None

    def is_tensor(self, obj: Any) -> bool:
        """See `Resolver`."""
        return issubclass(type(obj), torch.Tensor)

    @property
    def addresses(self) -> Mapping[int, int]:
        """See `Resolver`."""
        return self._recorder.addresses

    def created(self, obj: Any) -> bool | None:
        """Whether a function or a class was made in the run; None when that is not known."""
        if isinstance(obj, type):
            return obj in self._recorder.made_classes
        if isinstance(obj, types.FunctionType):
            return obj.__code__ in self._recorder.made_codes and self.external(obj) is None
        return None


@dataclass(slots=True, eq=False)
class Observation:
    """A finished monitor run."""

    recorder: StateRecorder
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    global_state: Any = None
    location: Location | None = None
    timings: Timings = field(default_factory=Timings)
    descriptions: dict[int, GraphInput] = field(default_factory=dict)
    sees_keyword_order: bool = True
    random_states: list[bytes] = field(default_factory=list)
    draws: bool = True
    shapes: SymbolicShapes | None = None
    describer: InputDescriber = field(default_factory=InputDescriber)

    def prepare(self, target: Any, history: ShapeHistory) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note what can only be seen before the run; gives the arguments of the run."""
        self.location = definition(target)
        self.sees_keyword_order = sees_keyword_order(target)
        self.global_state = _C.global_state()
        self.random_states = _random_states()
        self.recorder.numbers.start()
        describer = self.describer
        recorder, descriptions = self.recorder, self.descriptions
        shapes = self.shapes
        choose = history.chooser(recorder.graph)

        def describe(value_id: int, tensor: torch.Tensor) -> None:
            node = recorder.graph.node_of(tensor)
            static = node is not None and not node.structural
            given = descriptions[value_id] = describer.describe(tensor, static=static)
            if shapes is not None and node is not None and isinstance(given, TensorInput):
                given = with_symbols(given, choose(node, given))
                descriptions[value_id] = given
                func, _ = recorder.operators.taken
                anyhow = history.of_region and not static and may_lie_anyhow(tensor, func)
                shapes.add_input(value_id, node, given, lies_anyhow=anyhow)
                for bounds in getattr(tensor, "_dynamo_dynamic_range", ()):
                    shapes.limit(value_id, bounds.dim, bounds.min, bounds.max)

        recorder.operators.on_input = describe
        lifted = history.lifted(self.args, self.kwargs)
        recorder.numbers.changed = history.changed(self.args, self.kwargs)
        recorder.numbers.varying = history.varying
        varies = history.varying or (lifted and not history.of_region)
        recorder.numbers.root = target if varies else None
        return register_roots(recorder, target, self.args, self.kwargs, lifted)

    def end(self) -> None:
        """The region has ended, here and now."""
        self.timings.record_ms = self.recorder.seconds * 1e3
        self.recorder.seconds = 0.0
        self.recorder.operators.active = False
        _check_end(self)
        self.draws = self.random_states != _random_states()

    def release(self) -> None:
        """Let go of everything that the run used."""
        self.recorder.release()
        self.forget()

    def forget(self) -> None:
        """Let go of the user's objects, but leave the recorder alone."""
        self.result = None
        self.args = ()
        self.kwargs = {}
        self.descriptions = {}
        if self.shapes is not None:
            self.shapes.release()
        self.shapes = None

    @property
    def resolver(self) -> Resolver:
        return _GraphResolver(self.recorder)

    def mutated_inputs(self) -> bool:
        """Whether the run changed the data of an outside tensor."""
        if self.recorder.hidden_changes:
            return True
        for node in self.recorder.graph.nodes[1:]:
            before = self.recorder.versions.get(node.node_id)
            if before is not None and node.obj._version != before:
                return True
        return False

    def takes_one_for_two(self) -> bool:
        """Whether one tensor may stand for two that the run was given, with the results of two.

        So it is, where none is mutated, if none gets a gradient of its own and nothing has told one
        from another.
        """
        recorder, graph = self.recorder, self.recorder.operators.graph
        if recorder.tells_apart:
            return False
        grads = self.grad_enabled or any(
            op.func is torch._C._set_grad_enabled for op in graph.operators
        )
        nodes = [recorder.graph.node_of(item.tensor) for item in graph.inputs]
        return not any(
            node.changed or (grads and node.obj.requires_grad)
            for node in nodes
            if node is not None and node.structural
        )

    def repeatable(self) -> bool:
        """Whether the operators changed nothing outside, the random number generators included."""
        if self.draws or self.mutated_inputs() or self.recorder.eager_only is not None:
            return False
        return not any(_is_users(op.func) for op in self.recorder.operators.graph.operators)

    def described_inputs(self) -> list[GraphInput]:
        """The graph's inputs, in order, as they were when the run first used them."""
        inputs = self.recorder.operators.graph.inputs
        given = [self.descriptions[item.value_id] for item in inputs]
        if self.shapes is None:
            return given
        free = self.shapes.free_dims() if self.shapes.active else {}
        described = []
        for one, item in zip(given, inputs, strict=True):
            node = self.recorder.graph.node_of(item.tensor)
            sizes = free[node.node_id][0] if node is not None and node.node_id in free else ()
            dims = frozenset(dim for dim, size in enumerate(sizes) if size is None)
            described.append(with_symbols(one, dims) if isinstance(one, TensorInput) else one)
        return described

    def input_name(self, node: ShadowNode) -> str:
        """A placeholder's name: the attribute path of a parameter, the number of an argument."""
        graph = self.recorder.graph
        parts: list[str] = []
        current = node
        while current.node_id != 0:
            match current.relation:
                case r.Item(key=key):
                    if key.key not in MODULE_TABLES:
                        parts.append(str(key.key))
                case r.Arg(index=index) | r.Index(index=index):
                    parts.append(f"arg{index}" if current.parent == 0 else str(index))
                case r.Kwarg(name=name) | r.ClassAttr(name=name):
                    parts.append(name)
            current = graph.nodes[current.parent]
        return "_".join(reversed(parts)) or f"input_{node.node_id}"

    @property
    def grad_enabled(self) -> bool:
        """Grad mode when the run began; now, where it has not come so far."""
        state = self.global_state
        return torch.is_grad_enabled() if state is None else bool(state["grad_mode"])

    @contextmanager
    def ambient(self) -> Iterator[None]:
        """The state that the graph will be called in, which is the state of the call itself."""
        yield


@dataclass(frozen=True, slots=True, eq=False)
class Manner:
    """How a region is to be observed.

    Attributes:
        fix_draws: a random number that the record has to fix is no split.
        floats: how the backend takes floats that change.
        history: which sizes become symbols, if ``symbols``.
        cuts: the run is cut where it cannot be one region.
    """

    fix_draws: bool = True
    cuts: bool = False
    floats: FloatInputs = FloatInputs.CONSTANTS
    history: ShapeHistory = field(default_factory=ShapeHistory)
    symbols: bool = False

    def begin(
        self, recorder: StateRecorder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Observation, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Prepare a recorder for a region that begins now; also gives its arguments."""
        numbers = recorder.numbers
        constants = self.floats is FloatInputs.CONSTANTS
        numbers.into_graph = frozenset({int} if constants else {int, float})
        numbers.as_tensors = self.floats is FloatInputs.TENSORS
        numbers.may_draw = self.fix_draws or not self.cuts
        if not self.fix_draws:
            numbers.on_pinned_draw = lambda drawn: recorder.split(
                drawn.reason, location=drawn.location
            )
        observation = Observation(recorder, args, kwargs)
        if self.symbols:
            shapes = SymbolicShapes(numbers, partial(reads_onto_stack, recorder))
            numbers.on_pinned_size = lambda size: shapes.needs(size, recorder.location())
            observation.shapes = numbers.shapes = recorder.operators.shapes = shapes
        return observation, observation.prepare(target, self.history)


class Regions(Host, Protocol):
    """Who keeps the regions of a program, and knows which one is observed."""

    observation: Observation

    def attach(self, recorder: StateRecorder) -> None:
        """A run begins."""


def observe(
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    manner: Manner | None = None,
    regions: Regions | None = None,
    recorder: StateRecorder | None = None,
) -> Observation:
    """Run ``target(*args, **kwargs)`` for real, once, and write down what it did.

    Exceptions of the program pass through; whatever happens, trace functions and modes are put
    back as they were. A fault of the observation itself leaves the run alone: the recorder is then
    broken and names it.

    Args:
        target: the program; ``args`` and ``kwargs`` are its arguments.
        manner: how to observe it.
        regions: where a run is cut that cannot be one region; without it, it is not cut.
        recorder: a recorder of another kind than usual, which has recorded nothing yet.

    Returns:
        The observation of the run's last region. A run that was left (`Leave`) has no result;
        ``regions`` knows how it goes on.
    """
    recorder = recorder or StateRecorder(default_database(), python_special)
    observation = Observation(recorder, args, kwargs)
    tracer: _C.Tracer | None = None
    given = args, kwargs
    try:
        observation, given = (manner or Manner()).begin(recorder, target, args, kwargs)
        tracer = recorder.tracer = _C.Tracer(
            bind_handlers(recorder, _HANDLERS),
            partial(_enter_frame, recorder),
            partial(_leave_frame, recorder),
            _TRIVIAL,
            lambda code: decode(code).plan,
        )
        tracer.confines = recorder.confines
        recorder.watch()
    except Exception as error:
        recorder.fail(error)
    if regions is not None:
        regions.observation = observation
        regions.attach(recorder)
        if is_passed_through(target):
            recorder.on_split = Cutter(recorder, regions).cut
            recorder.places = regions.places
    started = time.perf_counter()
    try:
        with uncollected():  # finalizers of unrelated garbage must not run under observation
            if recorder.broken is not None or tracer is None:
                result = target(*args, **kwargs)
            elif recorder.around is not None:
                with recorder.around:
                    result = _traced(tracer, recorder, target, *given)
            else:
                result = _traced(tracer, recorder, target, *given)
    except Leave as leave:
        leave.__traceback__ = result = tracer = None  # the frames have ended
    finally:
        recorder.on_split = lambda split: False
    if regions is not None:
        observation = regions.observation
    observation.result = result
    observation.timings.run_ms = (time.perf_counter() - started) * 1e3
    if recorder.between:
        recorder.abandon("the program ends in the midst of an operation")
    observation.end()
    if tracer is not None and tracer.error is not None:
        recorder.fail(tracer.error)
    return observation


def _enter_frame(recorder: StateRecorder, *frame: Any) -> Any:
    if recorder.between:
        recorder.operation_raises()
        return None
    if frame[1] is _TENSOR_HASH:
        note_identity(recorder, frame[-1][:1])
        return None
    verdict = recorder.enter_frame(*frame)
    if recorder.numbers and mark_of(frame[0]) is not Mark.TRANSPARENT:
        entered(recorder, frame[1], isinstance(verdict, FrameState), frame[-1])
    return verdict


def _leave_frame(recorder: StateRecorder, state: FrameState, result: Any) -> None:
    if recorder.between:
        recorder.operation_raises()
        return
    left_frame(recorder, state, result)
    if recorder.numbers:
        returned(recorder, state, result)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in other)


def _check_end(observation: Observation) -> None:
    """What only the end of a run tells of things that a record could not hold."""
    recorder = observation.recorder
    recorder.numbers.settle()
    if observation.shapes is not None:
        observation.shapes.settle()
    reason = recorder.unrepeatable()
    if recorder.broken is None and recorder.numbers.unseen_draws():
        reason = "C code draws from a generator of random or numpy.random"
    if any(not _same(vars(ctx), before) for ctx, before in recorder.contexts):
        reason = "changes the context of an autograd function after its forward"
    if recorder.function_calls:
        reason = "an autograd function raised, and the program went on"
    if reason is not None:
        recorder.split(reason, location=observation.location)


def _traced(
    tracer: _C.Tracer,
    recorder: StateRecorder,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The run itself.

    An interrupt comes when a call ends: what is switched on as the first thing inside a ``try`` is
    switched off again whatever happens, which a ``with`` would not promise.
    """
    try:
        _push_on_torch_function_stack(recorder.operators)
        try:
            try:
                tracer.start()
            except Exception as error:
                recorder.fail(error)
            return target(*args, **kwargs)
        finally:
            tracer.stop()
    finally:
        _pop_torch_function_stack()


def _is_users(func: Any) -> bool:
    """Whether an operator runs Python code of the program's own, which may do anything."""
    if isinstance(func, types.MethodType):
        return True
    module = getattr(func, "__module__", None) or ""
    return isinstance(func, types.FunctionType) and module.partition(".")[0] != "torch"


def default_generators() -> list[torch.Generator]:
    """Those that operators draw from unless they are given another one."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *cuda]


def _random_states() -> list[bytes]:
    return [generator.get_state().numpy().tobytes() for generator in default_generators()]
