"""From a guard plan to the instructions of the C guard program (`magjit._C.GuardProgram`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from magjit import _C
from magjit.errors import BackendError
from magjit.guards.plan import GuardPlan
from magjit.guards.sizes import size_program
from magjit.plugin import CustomGuard, SameInput, ShapeGuard, StorageRelation
from magjit.plugin.backend_guards import joined
from magjit.refgraph import relations as r
from magjit.refgraph.cached_calls import CachedCall
from magjit.refgraph.kinds import is_atom
from magjit.refgraph.nodes import ABSENT, Edge, Leaf, Lifted, ShadowNode, Target
from magjit.refgraph.number_records import NumberGuard, NumberInputs
from magjit.refgraph.paths import Paths

NUMBERS_ORIGIN = "what numbers decide: "
SHAPES_ORIGIN = "what is needed of shapes: "
METADATA_ORIGIN = "tensor metadata"
Instruction = tuple[Any, ...]
Origin = tuple[int, str | r.Relation]
"""What an instruction is for: a node and what of it; a text of its own for node 0."""


def describe_origin(origin: Origin, paths: Paths) -> str:
    """An origin as a person reads it."""
    node_id, detail = origin
    if not node_id:
        return str(detail)
    if isinstance(detail, str):
        return f"{detail} of {paths.path(node_id)}"
    fact = _FACTS.get(type(detail))
    if fact is not None:
        return f"{fact} of {paths.path(node_id)}"
    return paths.path(node_id, detail)


_FACTS: dict[type[r.Relation], str] = {
    r.Length: "length",
    r.Keys: "keys",
    r.Members: "members",
    r.Code: "code",
    r.NonEmpty: "first element",
}


class GuardCode:
    """The instructions of a guard, the slot of each node and the origin of each instruction."""

    def __init__(self, plan: GuardPlan) -> None:
        self.plan = plan
        self.instructions: list[Instruction] = []
        self.origins: list[Origin] = []
        self.slots: dict[int, int] = {}
        self.n_slots = 0
        self._deferred: list[tuple[Instruction, Origin]] = []
        self._origin: Origin = (0, "")

    def slot(self, node_id: int) -> int:
        """The slot of a node; a fixed object is loaded at its first use."""
        found = self.slots.get(node_id)
        if found is None:
            node = self.plan.graph.nodes[node_id]
            assert node.fixed, f"#{node_id} has not been fetched"
            found = self.slots[node_id] = self.new_slot()
            self.emit("const", found, node.obj)
        return found

    def new_slot(self) -> int:
        self.n_slots += 1
        return self.n_slots - 1

    def emit(self, *instruction: Any) -> None:
        self.instructions.append(instruction)
        self.origins.append(self._origin)

    def at(self, detail: str | r.Relation, node_id: int = 0) -> None:
        """What the next instructions are for, in reports of failing guards."""
        self._origin = (node_id, detail)

    def later(self, *instruction: Any) -> None:
        """Emit after all nodes have been fetched."""
        self._deferred.append((instruction, self._origin))

    def finish(self) -> None:
        for instruction, origin in self._deferred:
            self._origin = origin
            self.emit(*instruction)

    def program(self) -> _C.GuardProgram:
        return _C.GuardProgram(self.instructions, self.n_slots)


def emit(plan: GuardPlan) -> GuardCode:
    """Instructions for a plan: the call's shape, each node in order, relations between nodes."""
    code = GuardCode(plan)
    code.at("the number and names of the arguments")
    code.emit("argc", plan.argument_count, plan.keywords)
    if plan.keyword_order and len(plan.keywords) > 1:
        code.at("the order of the keyword arguments")
        code.emit("kwarg_order", plan.keywords)
    by_node: dict[int, list[tuple[r.Relation, Target]]] = {}
    for check in plan.checks:
        by_node.setdefault(check.node_id, []).append((check.relation, check.target))
    typed = {node.node_id for node in plan.nodes if not has_settled_type(node)}
    tensors = set(plan.tensors)
    for node in plan.graph.nodes:
        refs = by_node.get(node.node_id, [])
        if node.node_id == 0:
            _emit_roots(code, refs)
            continue
        if node.fixed and not refs and node.node_id not in typed:
            continue
        if node.node_id in tensors:
            code.at(METADATA_ORIGIN, node.node_id)
            code.emit("tensor", code.slot(node.node_id), plan.metas[node.node_id])
        elif node.node_id in typed:
            code.at("type", node.node_id)
            code.emit("type_is", code.slot(node.node_id), type(node.obj))
        _emit_node(code, node, refs)
    _emit_relations(code)
    code.finish()
    return code


def has_settled_type(node: ShadowNode) -> bool:
    """Whether an object keeps its class for life, so that it is checked where it is fetched.

    Only instances of classes that are written in Python can be given another ``__class__``.
    """
    if node.fixed or isinstance(node.relation, (r.InstanceDict, r.ModuleDict)):
        return False
    heap_type = 1 << 9
    return not type(node.obj).__flags__ & heap_type


def _emit_roots(code: GuardCode, refs: list[tuple[r.Relation, Target]]) -> None:
    for relation, target in refs:
        if isinstance(relation, r.Root):
            continue
        op = ("arg", relation.index) if isinstance(relation, r.Arg) else ("kwarg", relation.name)  # type: ignore[attr-defined]
        code.at(f"argument {op[1]!r}")
        slot = _fetched(code, target)
        code.emit(op[0], slot, op[1])
        _check_target(code, slot, target)


def _emit_node(code: GuardCode, node: ShadowNode, refs: list[tuple[r.Relation, Target]]) -> None:
    if isinstance(node.obj, type):
        names = tuple(
            (relation.name, _expected(code, target))
            for relation, target in refs
            if isinstance(relation, r.ClassAttr)
        )
        if names:
            code.at(f"class attributes {', '.join(name for name, _ in names)}", node.node_id)
            code.emit("tp_names", node.obj, names)
        refs = [ref for ref in refs if not isinstance(ref[0], r.ClassAttr)]
    if isinstance(node.obj, dict):
        _emit_block(code, node, refs)
        return
    for relation, target in refs:
        code.at(relation, node.node_id)
        _EMITTERS[type(relation)](code, code.slot(node.node_id), relation, target)


def _emit_block(code: GuardCode, node: ShadowNode, refs: list[tuple[r.Relation, Target]]) -> None:
    """A dict's own entries: skipped as a whole while the dict's version is the same."""
    if not refs:
        return
    slot = code.slot(node.node_id)
    start = len(code.instructions)
    code.at("entries", node.node_id)
    code.emit("dict_block", slot, 0)
    after: list[tuple[r.Relation, Target]] = []
    for relation, target in refs:
        if isinstance(relation, (r.Item, r.Has, r.Keys, r.Length)):
            code.at(relation, node.node_id)
            _EMITTERS[type(relation)](code, slot, relation, target)
        else:
            after.append((relation, target))
    code.instructions[start] = ("dict_block", slot, len(code.instructions) - start - 1)
    for relation, target in after:
        code.at(relation, node.node_id)
        _EMITTERS[type(relation)](code, slot, relation, target)


def _fetched(code: GuardCode, target: Target) -> int:
    """The slot to fetch into: the node's own when this is how it is first reached."""
    slot = code.new_slot()
    if isinstance(target, Edge):
        node = code.plan.graph.nodes[target.node_id]
        if not node.fixed and target.node_id not in code.slots:
            code.slots[target.node_id] = slot
    return slot


def _check_target(code: GuardCode, slot: int, target: Target) -> None:
    if isinstance(target, Edge):
        node = code.plan.graph.nodes[target.node_id]
        if node.fixed:
            code.emit("is", slot, node.obj)
        elif code.slots[target.node_id] != slot:
            code.later("same", slot, code.slots[target.node_id])
        elif has_settled_type(node):
            code.emit("type_is", slot, type(node.obj))
    else:
        _check_leaf(code, slot, target)


def _check_leaf(code: GuardCode, slot: int, leaf: Leaf) -> None:
    value = leaf.value
    if isinstance(leaf, Lifted):
        code.emit("type_is", slot, type(value))
    elif leaf.identity:
        code.emit("is", slot, value)
    elif type(value) is frozenset:
        code.later("type_is", slot, frozenset)
        code.later("set_eq", slot, value)
    else:
        assert is_atom(value), value
        code.emit("eq", slot, value)


def _expected(code: GuardCode, target: Target) -> Any:
    if isinstance(target, Edge):
        return code.plan.graph.nodes[target.node_id].obj
    return _C.NULL if target.value is ABSENT else target.value


# -- one emitter a relation ---------------------------------------------------------------------


def _simple(op: str) -> Callable[..., None]:
    def emitter(code: GuardCode, src: int, relation: r.Relation, target: Target) -> None:
        slot = _fetched(code, target)
        code.emit(op, slot, src)
        _check_target(code, slot, target)

    return emitter


def _item(code: GuardCode, src: int, relation: Any, target: Target) -> None:
    key = relation.key.key
    if isinstance(target, Leaf) and target.value is ABSENT:
        code.emit("absent", src, key)
        return
    slot = _fetched(code, target)
    code.emit("getitem", slot, src, key)
    if isinstance(relation, r.Item):
        _check_target(code, slot, target)


def _index(code: GuardCode, src: int, relation: Any, target: Target) -> None:
    slot = _fetched(code, target)
    code.emit("index", slot, src, relation.index)
    _check_target(code, slot, target)


def _closure(code: GuardCode, src: int, relation: Any, target: Target) -> None:
    slot = _fetched(code, target)
    code.emit("closure", slot, src, relation.index)
    _check_target(code, slot, target)


def _cell(code: GuardCode, src: int, relation: Any, target: Target) -> None:
    if isinstance(target, Leaf) and target.value is ABSENT:
        code.emit("cell_empty", src)
    else:
        _simple("cell")(code, src, relation, target)


def _slot_member(code: GuardCode, src: int, relation: Any, target: Target) -> None:
    if isinstance(target, Leaf) and target.value is ABSENT:
        code.emit("slot_empty", src, relation.descriptor)
        return
    slot = _fetched(code, target)
    code.emit("slot", slot, src, relation.descriptor)
    _check_target(code, slot, target)


def _c_attribute(code: GuardCode, src: int, relation: Any, target: Target) -> None:
    slot = _fetched(code, target)
    code.emit("getattr_c", slot, src, relation.descriptor)
    _check_target(code, slot, target)


def _context_value(code: GuardCode, src: int, relation: Any, target: Target) -> None:
    if isinstance(target, Leaf) and target.value is ABSENT:
        code.emit("context_unset", src)
    else:
        _simple("context_value")(code, src, relation, target)


def _referent(code: GuardCode, src: int, relation: Any, target: Target) -> None:
    if isinstance(target, Leaf):  # it was dead
        code.emit("pyeq", src, target.value, operator.call)
    else:
        _simple("weakref_call")(code, src, relation, target)


def _length(code: GuardCode, src: int, relation: Any, target: Leaf) -> None:
    code.emit("len", src, target.value)


def _keys(code: GuardCode, src: int, relation: Any, target: Leaf) -> None:
    code.emit("keys", src, target.value)


def _c_result(code: GuardCode, src: int, relation: Any, target: Leaf) -> None:
    code.emit("pyeq", src, target.value, relation.descriptor)


def _non_empty(code: GuardCode, src: int, relation: Any, target: Leaf) -> None:
    code.emit("index", code.new_slot(), src, 0)


def _members(code: GuardCode, src: int, relation: Any, target: Leaf) -> None:
    code.emit("set_eq", src, target.value)


def _code(code: GuardCode, src: int, relation: Any, target: Leaf) -> None:
    code.emit("func_code", src, target.value)


def _emit_relations(code: GuardCode) -> None:
    for group in (plan := code.plan).distinct:
        code.at("being another object than others", group[0])
        if group == plan.tensors:
            _distinct_tensors(code)
        else:
            code.later("distinct", code.slot(group[0]), [code.slot(i) for i in group[1:]])
    for group in plan.differing:
        code.at("being another object than others", group[0])
        code.later("differ", [code.slot(i) for i in group])
    if plan.mutates and len(plan.tensors) > 1:
        code.at("which inputs share memory")
        shared = {second for _, second, _ in plan.overlaps}
        for first, second, distance in plan.overlaps:
            code.later("overlap", code.slot(first), code.slot(second), distance)
        apart = [code.slot(i) for i in plan.tensors if i not in shared]
        if len(apart) > 1:
            code.later("no_overlap", apart)


def _distinct_tensors(code: GuardCode) -> None:
    """Each tensor that comes with the call against all others; the model's own are not moved."""
    plan = code.plan
    moving = [i for i in plan.tensors if plan.graph.nodes[i].structural]
    for position, node_id in enumerate(moving):
        earlier = set(moving[: position + 1])
        others = [code.slot(i) for i in plan.tensors if i not in earlier]
        if others:
            code.later("distinct", code.slot(node_id), others)


_EMITTERS: dict[type[r.Relation], Callable[..., None]] = {
    r.InstanceDict: _simple("dict"),
    r.ModuleDict: _simple("module_dict"),
    r.Item: _item,
    r.Has: _item,
    r.Index: _index,
    r.Cell: _cell,
    r.Closure: _closure,
    r.Globals: _simple("func_globals"),
    r.Defaults: _simple("func_defaults"),
    r.KwDefaults: _simple("func_kwdefaults"),
    r.MethodFunc: _simple("method_func"),
    r.MethodSelf: _simple("method_self"),
    r.SlotOf: _slot_member,
    r.CAttr: _c_attribute,
    r.Referent: _referent,
    r.ContextValue: _context_value,
    r.CResult: _c_result,
    r.NonEmpty: _non_empty,
    r.Length: _length,
    r.Keys: _keys,
    r.Members: _members,
    r.Code: _code,
}


def add_backend_guards(code: GuardCode, guards: Sequence[Any]) -> None:
    """What the backend's compilation assumed beyond the metadata of its inputs."""
    slots = [code.slot(node_id) for node_id in code.plan.tensors]
    for instruction, origin in backend_instructions(guards, slots):
        code.at(origin)
        code.emit(*instruction)


def backend_instructions(
    guards: Sequence[Any], slots: Sequence[int]
) -> Iterator[tuple[Instruction, str]]:
    """The same as instructions, each with what it is for.

    Args:
        guards: of the backend.
        slots: of the graph's inputs, in order.

    Raises:
        BackendError: a guard is of no known kind.
    """
    # A predicate may run Python code, so that nothing but predicates may come after it.
    for guard in sorted(guards, key=lambda guard: isinstance(guard, CustomGuard)):
        origin = f"the backend's guard: {guard}"
        match guard:
            case SameInput(kept=kept, dropped=dropped):
                yield ("same", slots[kept], slots[dropped]), origin
            case StorageRelation(overlapping=overlapping, disjoint=disjoint):
                related = [slots[i] for i in overlapping], [slots[i] for i in disjoint]
                for instruction in _storage_relation(*related):
                    yield instruction, origin
            case ShapeGuard():
                pass  # sizes are compared exactly, or there are guards of the front end's own
            case CustomGuard(inputs=inputs, check=check):
                yield ("predicate", [slots[i] for i in inputs], check), origin
            case _:
                raise BackendError(f"The backend states a guard of an unknown kind: {guard}")


def add_size_conditions(code: GuardCode, guards: list[Any]) -> list[ShapeGuard]:
    """Conditions on the sizes of inputs that may change, as one instruction.

    Args:
        code: of the guard.
        guards: those of shapes among them count.

    Returns:
        Those that only Python can tell, for ``add_shape_predicate``.
    """
    chosen = list(dict.fromkeys(guard for guard in guards if isinstance(guard, ShapeGuard)))
    slots = [code.slot(node_id) for node_id in code.plan.tensors]
    read = sorted({i for guard in chosen for i in guard.inputs if i < len(slots)})
    numbers = {position: number for number, position in enumerate(read)}
    programs = [(guard, size_program(guard, numbers)) for guard in chosen]
    found = [(guard, program) for guard, program in programs if program is not None]
    if found:
        code.at(f"{SHAPES_ORIGIN}{', '.join(str(guard) for guard, _ in found)}")
        steps = tuple(step for _, program in found for step in program)
        code.emit("sizes", [slots[i] for i in read], steps)
    return [guard for guard, program in programs if program is None]


def add_shape_predicate(
    code: GuardCode, chosen: list[ShapeGuard], numbers: NumberInputs | None = None
) -> None:
    """What ``add_size_conditions`` has left; nothing but predicates may come after it.

    Args:
        code: of the guard.
        chosen: the conditions.
        numbers: what the graph takes after its tensors.
    """
    if not chosen:
        return
    slots = [code.slot(node_id) for node_id in code.plan.tensors]
    read = sorted({position for guard in chosen for position in guard.inputs})
    code.at(f"{SHAPES_ORIGIN}{', '.join(map(str, chosen))}")
    tensors = [i for i in read if i < len(slots)]
    check = joined(chosen, read)
    if numbers is None or len(tensors) == len(read):
        code.emit("predicate", [slots[i] for i in tensors], check)
        return
    places = [i - len(slots) for i in read[len(tensors) :]]
    holders = [code.slot(node_id) for node_id in numbers.reads.nodes]
    known, count = numbers, len(tensors)

    def with_numbers(*values: Any) -> bool:
        computed = known(values[count:])
        return check(*values[:count], *[computed[place] for place in places])

    code.emit("predicate", [*[slots[i] for i in tensors], *holders], with_numbers)


def add_number_guard(code: GuardCode, guard: NumberGuard | None) -> None:
    """What the program decided by numbers that change; may draw random ones, from a copy."""
    if guard is not None:
        code.at(f"{NUMBERS_ORIGIN}{guard}")
        code.emit("predicate", [code.slot(node_id) for node_id in guard.reads.nodes], guard)


def add_cached_calls(code: GuardCode, calls: Sequence[CachedCall]) -> None:
    """That caches still have what they gave the program; each is asked once, at the end."""
    for call in calls:
        code.at(str(call))
        code.emit("predicate", [code.slot(node_id) for node_id in call.nodes], call)


def _storage_relation(overlapping: list[int], disjoint: list[int]) -> Iterator[Instruction]:
    for position, first in enumerate(overlapping):
        for second in overlapping[position + 1 :]:
            yield "overlap", first, second, 0
    for first in disjoint:
        for second in overlapping:
            yield "overlap", first, second, None
