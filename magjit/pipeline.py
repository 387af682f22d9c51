"""A capture, as a list of named passes: observe, plan the mock, plan the guard, lower, compile.

Each pass reads the capture and adds to it; the first that finds an obstacle names it as a split.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from magjit import config as settings
from magjit.decisions import is_pure
from magjit.errors import BackendError, Unrebuildable
from magjit.garbage import uncollected
from magjit.guards import emit as guard_emit
from magjit.guards import plan as guard_plan
from magjit.handles import handle_of
from magjit.late_graphs import LateGraph, steps_through_input
from magjit.layouts import laid_out, of_contiguous
from magjit.lower_fx import lower
from magjit.mocks import build_plan as build_mock
from magjit.mocks import emit as emit_mock
from magjit.mocks.changes import writes_of
from magjit.monitor.regions import Region
from magjit.observe import Observation, with_symbols
from magjit.plugin import Backend, BackendContext, GraphInput, ShapeGuard, TensorInput, run_backend
from magjit.plugin.fx_helpers import runnable
from magjit.records import Captured, Record, SplitPoint
from magjit.refgraph.addresses import looked_for
from magjit.refgraph.cached_calls import not_asked
from magjit.refgraph.number_records import NumberInputs


@dataclass(slots=True)
class Build:
    """What the passes hand to each other."""

    observation: Observation
    backend: Backend
    context: BackendContext
    captured: Captured
    go_on: Callable[[tuple[Any, ...]], Any] | None = None
    node_ids: tuple[int, ...] = ()
    value_ids: tuple[int, ...] = ()
    finish: Any = None
    mock_source: str = ""
    numbers: NumberInputs | None = None
    float_dtypes: tuple[torch.dtype, ...] = ()
    """Of the last of the numbers: the graph takes these as tensors."""
    gm: GraphModule | None = None
    guard: guard_emit.GuardCode | None = None
    shape_guards: list[ShapeGuard] | None = None
    loose: frozenset[int] = frozenset()
    """Positions of the inputs that the guard takes in any layout, and the graph contiguous."""
    compiled: Callable[..., Any] | None = None
    trace: list[str] = field(default_factory=list)


def build_record(
    observation: Observation,
    backend: Backend,
    context: BackendContext,
    go_on: Callable[[tuple[Any, ...]], Any] | None = None,
) -> Captured:
    """Turn an observed run into a record, or say why that cannot be.

    Args:
        observation: the run, or a region of it.
        backend: compiles its graph.
        context: for the backend.
        go_on: gives the result of a replay from what the region ends with.

    Raises:
        BackendError: the backend failed; the caller decides what that means.
    """
    captured = Captured(
        observation.recorder.graph,
        observation.recorder.operators.graph,
        missing=observation.recorder.missing,
        timings=observation.timings,
    )
    broken = observation.recorder.broken
    if broken is not None:
        captured.split = SplitPoint(broken.reason, broken.location, broken.remedy, broken.error)
        return captured
    build = Build(observation, backend, context, captured, go_on)
    started = time.perf_counter()
    _run_passes(build)
    if captured.split is None:
        timings = captured.timings
        timings.build_ms = (time.perf_counter() - started) * 1e3 - timings.backend_ms
    return captured


def _run_passes(build: Build) -> None:
    captured = build.captured
    for name, run in PASSES:
        build.trace.append(name)
        try:
            # How much garbage a backend makes, only it can know.
            with nullcontext() if run is _backend else uncollected():
                run(build)
        except BackendError:
            raise
        except Exception as error:
            captured.split = SplitPoint(
                f"MagJIT's own pass {name!r} failed: {error!r}",
                build.observation.location,
                error=error,
            )
        if captured.split is not None:
            return


def _suits_backend(build: Build) -> None:
    """Some programs need the graph as it is."""
    reason = build.observation.recorder.eager_only
    if reason is not None and build.backend.name != "eager":
        build.captured.split = SplitPoint(
            f"{reason}, which the backend {build.backend.name!r} would not see",
            build.observation.location,
            "use backend='eager'",
        )


def _mock(build: Build) -> None:
    """What the replay gives back and redoes."""
    observation = build.observation
    try:
        plan = build_mock(
            observation.result,
            writes_of(observation.recorder.graph, observation.recorder.effects),
            observation.resolver,
            observation.recorder.numbers,
        )
    except Unrebuildable as problem:
        build.captured.split = SplitPoint(
            f"{problem.reason} ({problem.path})",
            observation.location,
            problem.remedy,
            about=problem.obj,
        )
        return
    build.captured.mock_plan = plan
    emitted = emit_mock(plan, build.go_on)
    # Without a mock the result is the tuple of outputs; a backend may give them as a list.
    build.finish = tuple if emitted.finish is None else emitted.finish
    build.node_ids, build.value_ids = emitted.slots, emitted.outputs
    build.mock_source = emitted.source


def _guard_plan(build: Build) -> None:
    """What must be as it was."""
    recorder = build.observation.recorder
    address = looked_for(recorder.graph, recorder.addresses)
    if address is not None:
        build.captured.split = SplitPoint(
            "an address that id() gave is looked for in what comes from outside",
            build.observation.location,
            about=address,
        )
        return
    nodes = [recorder.graph.node_of(item.tensor) for item in recorder.operators.graph.inputs]
    tensors = tuple(node.node_id for node in nodes if node is not None)
    mutates = build.observation.mutated_inputs()
    plan = guard_plan.build_plan(
        recorder.graph,
        tensors,
        mutates=mutates,
        one_for_two=not mutates and build.observation.takes_one_for_two(),
        argument_count=len(build.observation.args),
        keywords=tuple(build.observation.kwargs),
        keyword_order=build.observation.sees_keyword_order,
        metas=dict(recorder.metas),
    )
    shapes = build.observation.shapes
    if shapes is not None and shapes.active:
        free = shapes.free_dims()
        if not plan.mutates:
            loose = shapes.layouts.loose(recorder.operators.graph, build.value_ids)
            build.loose = frozenset(one for one in loose if tensors[one] in free)
        anyhow = {tensors[position] for position in build.loose}
        for node_id, (sizes, strides) in free.items():
            meta = plan.metas[node_id]
            strides = (None,) * len(strides) if node_id in anyhow else strides
            plan.metas[node_id] = (*meta[:4], sizes, strides, *meta[6:])
        build.shape_guards = shapes.guards(build.loose)
    if settings.current().verify:
        plan.verify()
    build.captured.guard_plan = plan


def _guard(build: Build) -> None:
    """The guard's instructions, but for those that come from numbers and from the backend."""
    plan = build.captured.guard_plan
    assert plan is not None
    code = build.guard = guard_emit.emit(plan)
    code.at("torch's global state")
    code.emit("global_state", build.observation.global_state)


def _lower(build: Build) -> None:
    """The operator graph as torch.fx."""
    recorder = build.observation.recorder
    graph = recorder.operators.graph
    if settings.current().verify:
        graph.verify()
    names = {}
    for item in graph.inputs:
        node = recorder.graph.node_of(item.tensor)
        assert node is not None
        names[item.value_id] = build.observation.input_name(node)
    live = graph.live_numbers() if recorder.numbers else []
    floats = graph.float_inputs() if recorder.numbers.as_tensors else []
    tensors = {id(number) for number, _ in floats}
    numbers = recorder.numbers.given([number for number in live if number.sym is None])
    numbers = [number for number in numbers if id(number) not in tensors]
    given = [*numbers, *[number for number, _ in floats]]
    build.numbers = recorder.numbers.inputs(given) if given else None
    build.float_dtypes = tuple(dtype for _, dtype in floats)
    build.gm = lower(
        graph,
        build.value_ids,
        names,
        numbers=numbers,
        floats=floats,
        traced=build.backend.name != "eager",
    )


def _backend(build: Build) -> None:
    """The backend's turn."""
    assert build.gm is not None
    started = time.perf_counter()
    if _is_one_call(build):
        build.compiled = runnable(build.gm.forward)
    elif build.captured.operators.operators:
        build.context.live_inputs = [item.tensor for item in build.captured.operators.inputs]
        inputs = build.observation.described_inputs()
        for position in build.loose:
            _lay_out(build, inputs, position)
        for value in _number_values(build):
            build.context.live_inputs.append(value)
            inputs.append(build.observation.describer.describe(value, dynamic=True))
        if _may_wait(build) and _likely_replaced(build, inputs):
            build.context.live_inputs = None
            build.compiled = LateGraph(build.backend, inputs, build.context)
        else:
            with build.observation.ambient():
                build.compiled = run_backend(build.backend, build.gm, inputs, build.context)
    else:
        build.compiled = _no_operators
    build.captured.timings.backend_ms = (time.perf_counter() - started) * 1e3


def _lay_out(build: Build, inputs: list[GraphInput], position: int) -> None:
    """Have the backend get an input contiguous."""
    live, given = build.context.live_inputs, inputs[position]
    assert live is not None and isinstance(given, TensorInput)
    live = build.context.live_inputs = list(live)
    live[position] = live[position].contiguous()
    described = build.observation.describer.describe(live[position])
    assert isinstance(described, TensorInput)
    inputs[position] = with_symbols(described, given.maybe_dynamic_dims)


def _may_wait(build: Build) -> bool:
    """Whether the graph may be compiled at a later call: nobody waits for the outcome now.

    Neither do numbers or symbols, which a failing backend would make constants of.
    """
    context, recorder = build.context, build.observation.recorder
    if not settings.current().compile_late or context.fullgraph or context.want_dumps:
        return False
    if build.backend.name == "eager" or build.shape_guards is not None or recorder.numbers:
        return False
    assert build.gm is not None
    return not build.backend.supports(build.gm)


def _likely_replaced(build: Build, inputs: list[GraphInput]) -> bool:
    """Whether another record will probably serve the next calls: then this one's compiler waits.

    So it is with a loop over an input, which is unrolled, and with a run that has changed what its
    guard compares: the same call would miss it.
    """
    observation = build.observation
    loops = observation.recorder.loops
    if loops is not None and loops.cuts:
        return True
    if steps_through_input(build.captured.operators, inputs):
        return True
    if not observation.recorder.changes:
        return False
    assert build.guard is not None
    program = build.guard.program()
    with not_asked():
        return program.explain(observation.args, observation.kwargs) is not None


def _is_one_call(build: Build) -> bool:
    """Whether a region of a program that is cut is a single operator.

    The call of compiled code costs more than a backend can gain there, often for a mere view.
    """
    if settings.current().single_operators:
        return False
    operators = build.captured.operators.operators
    return _is_part(build) and len(operators) == 1 and not isinstance(operators[0].func, Region)


def _is_part(build: Build) -> bool:
    """Whether it is a region of a program that is cut."""
    return build.go_on is not None or build.observation.recorder.in_region


def _no_operators(*inputs: Any) -> tuple[()]:
    """The graph of a program without tensor operations."""
    return ()


def _number_values(build: Build) -> list[Any]:
    """The numbers of the run, as the graph takes them."""
    if build.numbers is None:
        return []
    return _with_tensors([number.original for number in build.numbers.numbers], build.float_dtypes)


def _with_tensors(values: list[Any], dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    """Numbers, the last of them as tensors."""
    first = len(values) - len(dtypes)
    for place, dtype in enumerate(dtypes, first):
        values[place] = _tensor(values[place], dtype)
    return values


def _tensor(value: float, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.scalar_tensor(value, dtype=dtype, device=_CPU)
    except RuntimeError:  # too large, for which ``tensor`` has infinity; it takes thrice the time
        return torch.tensor(value, dtype=dtype, device=_CPU)


_CPU = torch.device("cpu")


def _with_numbers(
    compiled: Callable[..., Any],
    numbers: NumberInputs,
    dtypes: tuple[torch.dtype, ...],
    count: int,
) -> Callable[..., Any]:
    """The compiled graph of ``count`` tensors, called with these and what numbers are read from."""

    def run(*values: Any) -> Any:
        return compiled(*values[:count], *numbers(values[count:]))

    def run_with_tensors(*values: Any) -> Any:
        return compiled(*values[:count], *_with_tensors(numbers(values[count:]), dtypes))

    return run_with_tensors if dtypes else run


def _emit(build: Build) -> None:
    """The record itself."""
    captured = build.captured
    code = build.guard
    assert captured.guard_plan is not None and build.gm is not None
    assert build.compiled is not None and code is not None
    # Predicates come last, so what anything else needs is fetched before them.
    node_slots = tuple(code.slot(node_id) for node_id in build.node_ids)
    input_slots = tuple(code.slot(node_id) for node_id in captured.guard_plan.tensors)
    compiled = build.compiled
    if build.loose:
        compiled = laid_out(compiled, build.loose)
        dimensions = [item.tensor.dim() for item in captured.operators.inputs]
        build.context.guards[:] = of_contiguous(build.context.guards, build.loose, dimensions)
    if build.numbers is not None:
        compiled = _with_numbers(compiled, build.numbers, build.float_dtypes, len(input_slots))
        input_slots += tuple(code.slot(node_id) for node_id in build.numbers.reads.nodes)
    left: list[ShapeGuard] = []
    if build.shape_guards is not None or build.numbers is not None:
        shape_guards = [*(build.shape_guards or ()), *build.context.guards]
        left = guard_emit.add_size_conditions(code, shape_guards)
    guard_emit.add_backend_guards(code, build.context.guards)
    guard_emit.add_shape_predicate(code, left, build.numbers)
    numbers = build.observation.recorder.numbers
    guard_emit.add_number_guard(code, numbers.guard())
    guard_emit.add_cached_calls(code, build.observation.recorder.cached)
    program = code.program()
    handle = handle_of(program, compiled, input_slots, build.finish, node_slots)
    repeatable = build.observation.repeatable()
    assert captured.mock_plan is not None
    if _is_part(build):
        handle.pure = is_pure(repeatable, captured.operators.operators, captured.mock_plan)
    captured.record = Record(
        handle,
        code.instructions,
        code.origins,
        captured.refgraph.paths(),
        captured.guard_plan.kinds(),
        build.gm,
        len(captured.operators.operators),
        build.mock_source,
        captured.timings,
        dict(build.context.dumps),
        tuple(build.context.movement),
        tuple(build.context.notes),
        grad_enabled=build.observation.grad_enabled,
        repeatable=repeatable,
        fixed_draws=any(drawn.pinned for drawn in numbers.draws),
        late=build.compiled if isinstance(build.compiled, LateGraph) else None,
        compiled=compiled,
    )


PASSES: list[tuple[str, Callable[[Build], None]]] = [
    ("suits the backend", _suits_backend),
    ("mock", _mock),
    ("guard plan", _guard_plan),
    ("guard", _guard),
    ("lower to torch.fx", _lower),
    ("backend", _backend),
    ("emit", _emit),
]
