"""The monitor run: the user's program, run once for real, under observation (MagPy §3, §5)."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack

from magjit import _C
from magjit.annotations import default_database
from magjit.bytecode import decode
from magjit.errors import Location
from magjit.mocks import Resolver
from magjit.plugin import GraphInput, InputDescriber, TensorInput
from magjit.records import Timings
from magjit.refgraph import attributes, calls, containers, other_events
from magjit.refgraph import relations as r
from magjit.refgraph.autograd_functions import left_frame
from magjit.refgraph.binding import bind_handlers
from magjit.refgraph.frames import FrameState
from magjit.refgraph.kinds import class_lookup
from magjit.refgraph.nodes import ShadowNode
from magjit.refgraph.number_events import HANDLERS as NUMBER_HANDLERS
from magjit.refgraph.number_events import entered, returned
from magjit.refgraph.python_specials import python_special
from magjit.refgraph.recorder import StateRecorder
from magjit.refgraph.stack import reads_onto_stack
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
        thread = threading.get_ident()
        if self.get("capturing") == thread:
            return False
        return self.setdefault("holder", thread) == thread


capture_lock = CaptureLock()

_TRIVIAL = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), range, slice}
    | {torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device}
    | {types.FunctionType, types.BuiltinFunctionType, types.CodeType}
)
_HANDLERS = {
    **attributes.HANDLERS,
    **containers.HANDLERS,
    **calls.HANDLERS,
    **other_events.HANDLERS,
    **NUMBER_HANDLERS,
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

    def prepare(self, target: Any, history: ShapeHistory) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note what can only be seen before the run; gives the arguments of the run."""
        self.location = _definition(target)
        self.sees_keyword_order = _sees_keyword_order(target)
        self.global_state = _C.global_state()
        self.random_states = _random_states()
        self.recorder.numbers.start()
        describer = InputDescriber()
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
                shapes.add_input(value_id, node, given)
                for bounds in getattr(tensor, "_dynamo_dynamic_range", ()):
                    shapes.limit(value_id, bounds.dim, bounds.min, bounds.max)

        recorder.operators.on_input = describe
        lifted = history.lifted(self.args, self.kwargs)
        recorder.numbers.varying = history.varying
        recorder.numbers.root = target if lifted or history.varying else None
        return _register_roots(recorder, target, self.args, self.kwargs, lifted)

    def release(self) -> None:
        """Let go of everything that the run used."""
        self.recorder.release()
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
                    if key.key not in ("_parameters", "_buffers", "_modules"):
                        parts.append(str(key.key))
                case r.Arg(index=index) | r.Index(index=index):
                    parts.append(f"arg{index}" if current.parent == 0 else str(index))
                case r.Kwarg(name=name) | r.ClassAttr(name=name):
                    parts.append(name)
            current = graph.nodes[current.parent]
        return "_".join(reversed(parts)) or f"input_{node.node_id}"

    @contextmanager
    def ambient(self) -> Iterator[None]:
        """The state that the graph will be called in, which is the state of the call itself."""
        yield


def observe(
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    fix_draws: bool = True,
    numbers_into_graph: bool = False,
    history: ShapeHistory | None = None,
    symbols: bool = False,
) -> Observation:
    """Run ``target(*args, **kwargs)`` for real, once, and write down what it did.

    Exceptions of the program pass through; whatever happens, trace functions and modes are put
    back as they were. A fault of the observation itself leaves the run alone: the recorder is then
    broken and names it.

    Args:
        target: the program; ``args`` and ``kwargs`` are its arguments.
        fix_draws: a random number that the record has to fix is no split.
        numbers_into_graph: the backend takes ints and floats as inputs of the graph.
        history: which sizes become symbols, if ``symbols``.
    """
    history = history or ShapeHistory()
    recorder = StateRecorder(default_database(), python_special)
    recorder.numbers.into_graph = numbers_into_graph
    if not fix_draws:
        recorder.numbers.on_pinned_draw = lambda drawn: recorder.split(
            drawn.reason, location=drawn.location
        )
    observation = Observation(recorder, args, kwargs)
    if symbols:
        shapes = SymbolicShapes(recorder.numbers, partial(reads_onto_stack, recorder))
        recorder.numbers.on_pinned_size = lambda size: shapes.needs(size, recorder.location())
        observation.shapes = recorder.numbers.shapes = recorder.operators.shapes = shapes
    tracer: _C.Tracer | None = None
    given = args, kwargs
    try:
        given = observation.prepare(target, history)
        tracer = recorder.tracer = _C.Tracer(
            bind_handlers(recorder, _HANDLERS),
            partial(_enter_frame, recorder),
            partial(_leave_frame, recorder),
            _TRIVIAL,
            lambda code: decode(code).plan,
        )
        recorder.numbers.watch_with(tracer.watch)
    except Exception as error:
        recorder.fail(error)
    collecting = gc.isenabled()
    started = time.perf_counter()
    try:
        gc.disable()  # finalizers of unrelated garbage must not run under observation
        if recorder.broken is not None or tracer is None:
            observation.result = target(*args, **kwargs)
        else:
            observation.result = _traced(tracer, recorder, target, *given)
    finally:
        if collecting:
            gc.enable()
    observation.timings.record_ms = recorder.seconds * 1e3
    observation.timings.run_ms = (time.perf_counter() - started) * 1e3
    recorder.operators.active = False
    _check_end(observation)
    observation.draws = observation.random_states != _random_states()
    if tracer is not None and tracer.error is not None:
        recorder.fail(tracer.error)
    return observation


def _enter_frame(recorder: StateRecorder, *frame: Any) -> Any:
    verdict = recorder.enter_frame(*frame)
    if recorder.numbers:
        entered(recorder, frame[1], isinstance(verdict, FrameState), frame[-1])
    return verdict


def _leave_frame(recorder: StateRecorder, state: FrameState, result: Any) -> None:
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


def _random_states() -> list[bytes]:
    """Of the generators that operators draw from unless they are given another one."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    return [generator.get_state().numpy().tobytes() for generator in generators]


def _sees_keyword_order(target: Any) -> bool:
    """Whether the program's first function collects keywords in a dict."""
    function = _entry_function(target)[0]
    return function is None or bool(function.__code__.co_flags & inspect.CO_VARKEYWORDS)


def _register_roots(
    recorder: StateRecorder,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lifted: set[int | str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Note what the call is given; gives the arguments with numbers of the run in them."""
    recorder.root(target)
    if isinstance(target, torch.nn.Module):
        attributes.read_class_attr(recorder, type(target), "__call__")
        attributes.read_class_attr(recorder, type(target), "forward")
    elif isinstance(target, types.MethodType):
        recorder.root(target.__func__)
        recorder.root(target.__self__)
    elif not isinstance(target, types.FunctionType):
        calls.call_value(recorder, target, args, kwargs)
    unused = _unused_arguments(target, len(args), tuple(kwargs))
    outside = recorder.graph.outside
    lifted -= unused
    given: list[Any] = []
    for index, value in enumerate(args):
        relation = r.Arg(index)
        if index not in unused | lifted:
            recorder.read(outside, relation, value)
        lift = index in lifted
        given.append(recorder.numbers.argument(recorder.graph, relation, value) if lift else value)
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name not in unused | lifted:
            recorder.read(outside, r.Kwarg(name), value)
        lift = name in lifted
        named[name] = (
            recorder.numbers.argument(recorder.graph, r.Kwarg(name), value) if lift else value
        )
    return tuple(given), named


def _unused_arguments(target: Any, count: int, keywords: tuple[str, ...]) -> set[int | str]:
    """Arguments that the program's first function never loads: nothing needs to guard them."""
    function, offset = _entry_function(target)
    if function is None:
        return set()
    code = function.__code__
    loads = decode(code).loads
    if "locals" in code.co_names or "vars" in code.co_names or "eval" in code.co_names:
        return set()
    positional = code.co_varnames[offset : code.co_argcount]
    unused: set[int | str] = {
        index for index, name in enumerate(positional[:count]) if name not in loads
    }
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return unused | {name for name in keywords if name in named and name not in loads}


def _entry_function(target: Any) -> tuple[types.FunctionType | None, int]:
    if isinstance(target, types.FunctionType):
        return target, 0
    if isinstance(target, types.MethodType) and isinstance(target.__func__, types.FunctionType):
        return target.__func__, 1
    if not isinstance(target, torch.nn.Module) or _has_hooks(target):
        return None, 0
    forward = class_lookup(type(target), "forward")
    if "forward" in vars(target) or not isinstance(forward, types.FunctionType):
        return None, 0
    if type(target).__call__ is not torch.nn.Module.__call__:
        return None, 0
    return forward, 1


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def _definition(target: Any) -> Location | None:
    function: Callable[..., Any] | None = _entry_function(target)[0]
    if function is None:
        function = getattr(type(target), "forward", None) or getattr(type(target), "__call__", None)
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return Location(code.co_filename, code.co_firstlineno, code.co_qualname)
