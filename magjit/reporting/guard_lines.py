"""The guard of a record, one readable line for each condition."""

from __future__ import annotations

from collections.abc import Iterator

from magjit.guards.emit import NUMBERS_ORIGIN
from magjit.guards.plan import Check, GuardPlan
from magjit.records import Captured
from magjit.refgraph import relations as r
from magjit.refgraph.nodes import ABSENT, Edge, Leaf, Lifted, Target
from magjit.reporting.content import GuardLine
from magjit.reporting.names import class_name, short
from magjit.reporting.objects import tensor_text
from magjit.reporting.places import Places

_BACKEND_ORIGIN = "the backend's guard: "


def guard_lines(captured: Captured, places: Places) -> list[GuardLine]:
    """All conditions, in the order in which they are checked within each kind."""
    plan = captured.guard_plan
    assert plan is not None
    lines = [GuardLine("Call", _call(plan))]
    for check in plan.checks:
        if not isinstance(check.relation, r.Root):  # the same at every call: nothing to check
            lines.append(GuardLine(type(check.relation).__name__, _condition(plan, places, check)))
    lines += _of_objects(plan, places)
    lines.append(GuardLine("GlobalState", "torch's global state: grad mode, autocast, defaults"))
    if captured.record is not None:
        stated = [text for text in captured.record.origins if text.startswith(_BACKEND_ORIGIN)]
        texts = dict.fromkeys(origin.removeprefix(_BACKEND_ORIGIN) for origin in stated)
        lines += [GuardLine("Backend", text) for text in texts]
        for text in captured.record.origins:
            if text.startswith(NUMBERS_ORIGIN):
                lines.append(GuardLine("Numbers", text.removeprefix(NUMBERS_ORIGIN)))
    return lines


def _call(plan: GuardPlan) -> str:
    text = f"{plan.argument_count} positional arguments"
    if plan.keywords:
        order = " in this order" if plan.keyword_order else ""
        text += f" and keywords {', '.join(plan.keywords)}{order}"
    return text


def _of_objects(plan: GuardPlan, places: Places) -> Iterator[GuardLine]:
    """Types, tensor metadata, and which objects are one or share memory."""
    tensors = set(plan.tensors)
    for node in plan.nodes:
        if node.node_id not in tensors:
            text = f"type({places.path(node.node_id)}) is {class_name(type(node.obj))}"
            yield GuardLine("Type", text)
    for node_id in plan.tensors:
        tensor = plan.graph.nodes[node_id].obj
        yield GuardLine("Tensor", f"{places.path(node_id)}: {tensor_text(tensor)}")
    for group in (*plan.distinct, *plan.differing):
        names = [places.path(node_id) for node_id in group]
        text = f"different objects: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
        yield GuardLine("Distinct", text)
    if plan.mutates and len(plan.tensors) > 1:
        for first, second, distance in plan.overlaps:
            apart = "" if distance is None else f", {distance} bytes apart"
            text = f"{places.path(first)} and {places.path(second)} share memory{apart}"
            yield GuardLine("Overlap", text)
        others = "other two" if plan.overlaps else "two"
        yield GuardLine("Overlap", f"no {others} of the graph's inputs share memory")


def _condition(plan: GuardPlan, places: Places, check: Check) -> str:
    path = places.path(check.node_id)
    target = check.target
    found = not isinstance(target, Leaf) or target.value is not ABSENT
    match check.relation:
        case r.Length():
            return f"len({path}) {_target(places, target)}"
        case r.Keys():
            return f"keys of {path} {_target(places, target)}"
        case r.Members():
            return f"members of {path} {_target(places, target)}"
        case r.TypeIs():
            return f"type({path}) {_target(places, target)}"
        case r.NonEmpty():
            return f"{path} is {'not ' if _is_true(target) else ''}empty"
        case r.Code():
            return f"{path} has {_target(places, target).removeprefix('is ')}"
        case r.Has(key=key):
            return f"{path} has {'' if found else 'no '}{short(key.key)}"
        case r.Item(key=key) if not found:
            return f"{path} has no {short(key.key)}"
    edge = places.edge(check.node_id, check.relation)
    if isinstance(target, Edge):
        node = plan.graph.nodes[target.node_id]
        if not node.fixed and node.parent == check.node_id and node.relation == check.relation:
            return f"{edge} is there"
    return f"{edge} {_target(places, target)}"


def _is_true(target: Target) -> bool:
    return isinstance(target, Leaf) and target.value is True


def _target(places: Places, target: Target) -> str:
    if isinstance(target, Edge):
        return f"is {places.path(target.node_id)}"
    if target.value is ABSENT:
        return "is not there"
    if isinstance(target, Lifted):
        return f"is any {type(target.value).__name__}"
    return f"{'is' if target.identity else '=='} {short(target.value)}"
