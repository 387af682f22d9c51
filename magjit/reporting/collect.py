"""From a capture to the content of a report."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Sequence
from typing import Any

from magjit.annotations import missing_entry, qualified_name
from magjit.errors import Location
from magjit.monitor.operator_graph import NumberRef, Operator, OperatorGraph, ValueRef
from magjit.monitor.operator_graph import qualified_name as operator_name
from magjit.records import Captured, SplitPoint
from magjit.refgraph import relations as r
from magjit.refgraph.number_values import text_of
from magjit.reporting.content import Content, Function, OperatorCall, Split
from magjit.reporting.effects import effect_text
from magjit.reporting.guard_lines import guard_lines
from magjit.reporting.names import is_library_code, location_of, short, short_file
from magjit.reporting.objects import object_views, tensor_text
from magjit.reporting.places import Places


def collect(captured: Captured, content: Content) -> None:
    """Add what a capture tells to a report's content."""
    places = Places(captured.refgraph)
    record = captured.record
    content.inputs += _inputs(captured, places)
    content.operator_calls += [_operator(op) for op in captured.operators.operators]
    content.functions += _functions(captured)
    content.objects += object_views(captured.refgraph, places)
    content.side_effects += _tensor_changes(captured, places)
    if captured.guard_plan is not None:
        content.guard_lines += guard_lines(captured, places)
        content.guards += Counter(line.kind for line in content.guard_lines)
    if captured.mock_plan is not None:
        plan = captured.mock_plan
        content.mock_text = str(plan)
        content.side_effects += [effect_text(step, plan, places) for step in plan.effects]
    if captured.split is not None:
        content.splits.append(split_of(captured.split))
    if record is not None:
        content.graphs.append(record.graph_module)
        content.mock_source = record.mock_source
        content.backend_dumps.update(record.dumps)
        content.movement += record.movement
        content.notes += record.notes
    for name, milliseconds in captured.timings.as_dict().items():
        content.timings[name] = content.timings.get(name, 0.0) + milliseconds
    for func in captured.missing:
        content.missing.setdefault(qualified_name(func), missing_entry(func))


def split_of(split: SplitPoint) -> Split:
    """A split point with the short name of its file."""
    place = split.location
    if place is None:
        return Split(split.reason, remedy=split.remedy)
    file = short_file(place.filename)
    return Split(split.reason, file, place.line, place.function, split.remedy)


# -- operators ----------------------------------------------------------------------------------


def _inputs(captured: Captured, places: Places) -> list[str]:
    lines = []
    for item in captured.operators.inputs:
        node = captured.refgraph.node_of(item.tensor)
        name = places.path(node.node_id) if node is not None else "?"
        lines.append(f"%{item.value_id} = {name}: {tensor_text(item.tensor)}")
    return lines


def _operator(op: Operator) -> OperatorCall:
    arguments = [_template(a) for a in op.args]
    arguments += [f"{name}={_template(value)}" for name, value in op.kwargs.items()]
    call = f"{_name(op)}({', '.join(arguments)})"
    place: Location | None = location_of(op.code, op.offset) if op.code is not None else None
    text = call if op.result is None else f"{_template(op.result)} = {call}"
    return OperatorCall(text, place)


def _name(op: Operator) -> str:
    """The operator's name as a program would write it."""
    name = operator_name(op.func)
    for internal, public in (("_VariableFunctionsClass.", "torch."), ("TensorBase.", "Tensor.")):
        if name.startswith(internal):
            return public + name.removeprefix(internal)
    return name


def _template(value: Any) -> str:
    """An argument or result of an operator; ``%3`` is a tensor of the graph.

    A number that each call computes anew is its expression.
    """
    kind = type(value)
    if isinstance(value, ValueRef):
        return repr(value)
    if isinstance(value, NumberRef):
        return text_of(value.number) if value.number.live else repr(value)
    if isinstance(value, (tuple, list)):
        left, right = "()" if isinstance(value, tuple) else "[]"
        comma = "," if left == "(" and len(value) == 1 else ""
        return f"{left}{', '.join(_template(item) for item in value)}{comma}{right}"
    if kind is dict:
        return f"{{{', '.join(f'{short(k)}: {_template(v)}' for k, v in value.items())}}}"
    if kind is slice:
        parts = ["" if part is None else _template(part) for part in (value.start, value.stop)]
        return ":".join(parts) if value.step is None else f"{':'.join(parts)}:{value.step}"
    return short(value)


def _tensor_changes(captured: Captured, places: Places) -> list[str]:
    """Operators that change an outside tensor: the graph itself redoes those."""
    outside = {}
    for item in captured.operators.inputs:
        node = captured.refgraph.node_of(item.tensor)
        if node is not None:
            outside[item.value_id] = places.path(node.node_id)
    found = []
    for op in captured.operators.operators:
        names = [outside[value] for value in _changed_values(op) if value in outside]
        if names:
            where = f"  # {location_of(op.code, op.offset)}" if op.code is not None else ""
            found.append(f"in the graph: {_name(op)} changes {', '.join(names)}{where}")
    plan = captured.guard_plan
    if plan is not None and plan.mutates and not found:
        found.append("in the graph: data of outside tensors changes in place")
    return found


_IN_PLACE = frozenset(
    {"add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow"}
    | {"lshift", "rshift", "and", "or", "xor"}
)
_NORMS = {"batch_norm": "training", "instance_norm": "use_input_stats"}


def _changed_values(op: Operator) -> list[int]:
    """The tensors that an operator changes in place, as far as its name tells."""
    name = getattr(op.func, "__name__", "")
    targets = [op.kwargs.get("out")]
    if (name.endswith("_") and not name.endswith("__")) or (
        name in ("__setitem__", "__set__") or (name[:3] == "__i" and name[3:-2] in _IN_PLACE)
    ):
        targets += op.args[:1]
    elif op.kwargs.get(_NORMS.get(name, "")):
        targets += [*op.args[1:3], op.kwargs.get("running_mean"), op.kwargs.get("running_var")]
    return [target.value_id for target in targets if isinstance(target, ValueRef)]


# -- functions ----------------------------------------------------------------------------------


def _functions(captured: Captured) -> list[Function]:
    codes: dict[types.CodeType, None] = {}
    for node in captured.refgraph.nodes:
        if r.Code() in node.first.refs and type(node.obj) is types.FunctionType:
            codes[node.obj.__code__] = None
    for code in _codes_of(captured.operators):
        codes[code] = None
    return [Function(code.co_qualname, code, not is_library_code(code)) for code in codes]


def _codes_of(graph: OperatorGraph) -> Sequence[types.CodeType]:
    return [op.code for op in graph.operators if op.code is not None]
