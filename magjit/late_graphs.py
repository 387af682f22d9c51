"""Graphs that wait to be compiled until a call needs them.

Usually a graph is compiled in the call that captures it, so that the next call has it. Some records
are likely to be replaced before they serve a call (`likely_replaced`): then the compiler's time
would be lost. Such a record holds a `LateGraph` where others hold what the backend has compiled. To
call it raises `NotCompiled` before anything is changed; the dispatcher's owner compiles the graph,
and the call is made again.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from magjit import _C
from magjit.guards.emit import Instruction, Origin, backend_instructions
from magjit.handles import handle_of
from magjit.monitor.operator_graph import Operator, OperatorGraph, refs_in
from magjit.plugin import Backend, BackendContext, GraphInput, TensorInput, run_backend

_FEWEST_STEPS = 3
"""Fewer repetitions of an instruction are as likely two or three calls by chance."""


class NotCompiled(Exception):
    """A call needs a graph that has waited until now.

    Attributes:
        graph: which.
        inputs: of the graph, in this call.
    """

    def __init__(self, graph: LateGraph, inputs: tuple[Any, ...]) -> None:
        super().__init__("the graph is not compiled yet")
        self.graph = graph
        self.inputs = inputs


class Holder(Protocol):
    """The record of a graph that waits; see `magjit.records.Record`."""

    handle: _C.Record
    instructions: list[Instruction]
    guard_origins: list[Origin]
    graph_module: GraphModule
    timings: Any
    late: LateGraph | None
    compiled: Any


class LateGraph:
    """A captured graph and how to compile it; keeps no tensor of the run alive."""

    def __init__(
        self,
        backend: Backend,
        inputs: Sequence[GraphInput],
        context: BackendContext,
    ) -> None:
        self._backend = backend
        self._inputs = inputs
        self._context = context

    def __call__(self, *inputs: Any) -> Any:
        raise NotCompiled(self, inputs)

    def compile(self, record: Holder, inputs: Sequence[Any]) -> _C.Record:
        """Compile the graph of a record and give it a handle that calls what was compiled.

        Call it in the state of torch that the record's guard asks for. The record is unchanged
        when this raises.

        Args:
            record: holds this graph.
            inputs: of a call that the record serves, in the order of the graph's placeholders.

        Returns:
            The new handle of the record, to be put in the place of the old one. Its guard also asks
            for what the backend has assumed.

        Raises:
            BackendError: the backend refuses the graph or fails.
        """
        started = time.perf_counter()
        context = dataclasses.replace(self._context, live_inputs=list(inputs), guards=[])
        compiled = run_backend(self._backend, record.graph_module, self._inputs, context)
        old = record.handle
        program, instructions, origins = old.program, record.instructions, record.guard_origins
        added = list(backend_instructions(context.guards, old.input_slots))
        if added:
            instructions = [*instructions, *(instruction for instruction, _ in added)]
            origins = [*origins, *((0, origin) for _, origin in added)]
            program = _C.GuardProgram(instructions, program.n_slots)
        handle = handle_of(program, compiled, old.input_slots, old.finish, old.finish_slots)
        handle.hits, handle.pure = old.hits, old.pure
        record.handle, record.instructions, record.guard_origins = handle, instructions, origins
        record.late, record.compiled = None, compiled
        record.timings.backend_ms = (time.perf_counter() - started) * 1e3
        return handle


def cannot_compile_here() -> bool:
    """Whether a compilation could disturb what goes on: a recording of a CUDA graph, a backward."""
    if torch._C._current_graph_task_id() != -1:
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# -- which records are likely to be replaced -------------------------------------------------------


def steps_through_input(graph: OperatorGraph, inputs: Sequence[GraphInput]) -> bool:
    """Whether a loop of the program goes through an input, as a recurrent network does.

    It is unrolled in the first capture. When the input has another length, the loop itself is
    captured. That can be seen where one instruction takes the numbers 0, 1, 2, …, or the parts that
    one operator has made of the input, as often as an input is long.
    """
    sizes = {
        size for given in inputs if isinstance(given, TensorInput) for size in _moving_sizes(given)
    }
    if not sizes:
        return False
    groups: dict[tuple[int, int], list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        if operator.code is not None:
            groups[id(operator.code), operator.offset].append(operator)
    parts = {
        refs: number
        for number, operator in enumerate(graph.operators)
        for refs in _several(operator)
    }
    return any(
        len(group) in sizes and (_counts(group) or _takes_parts(group, parts))
        for group in groups.values()
    )


def _moving_sizes(given: TensorInput) -> Iterator[int]:
    if not given.is_parameter and not given.static:
        yield from (size for size in given.size if size >= _FEWEST_STEPS)


def _several(operator: Operator) -> Iterator[int]:
    """The values that an operator gives, if it gives several."""
    if isinstance(operator.result, tuple):
        yield from (ref.value_id for ref in refs_in(operator.result))


def _counts(group: list[Operator]) -> bool:
    """Whether an instruction takes one number more at each of its repetitions."""
    rows = [list(_ints((operator.args, operator.kwargs))) for operator in group]
    if len({len(row) for row in rows}) != 1:
        return False
    for column in zip(*rows, strict=True):
        step = column[1] - column[0]
        if abs(step) == 1 and all(b - a == step for a, b in pairwise(column)):
            return True
    return False


def _ints(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _ints(item)
    elif isinstance(value, dict):
        yield from _ints(list(value.values()))
    elif isinstance(value, slice):
        yield from _ints((value.start, value.stop, value.step))


def _takes_parts(group: list[Operator], parts: dict[int, int]) -> bool:
    """Whether an instruction takes another part of one operator's result at each repetition."""
    first = {
        (place, parts[ref.value_id])
        for place, ref in enumerate(refs_in((group[0].args, group[0].kwargs)))
        if ref.value_id in parts
    }
    rows = [[ref.value_id for ref in refs_in((one.args, one.kwargs))] for one in group]
    for place, maker in first:
        taken = [row[place] for row in rows if place < len(row)]
        made = {value_id for value_id in taken if parts.get(value_id) == maker}
        if len(made) == len(group):
            return True
    return False
