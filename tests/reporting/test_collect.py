"""Content from captures that are made by hand: names of objects, effects, guards."""

from __future__ import annotations

import types

import torch

from magjit.errors import Location
from magjit.guards.plan import GuardPlan, build_plan
from magjit.mocks.ir import Apply, Const, Do, Let, MockPlan, Out, Ref, Seq, SetAttr, SetItem, Slot
from magjit.monitor.operator_graph import InputValue, Operator, OperatorGraph, ValueRef
from magjit.records import Captured, SplitPoint, Timings
from magjit.refgraph import relations as r
from magjit.refgraph.nodes import ABSENT, Edge, Leaf, RefGraph, ShadowNode
from magjit.reporting.collect import collect
from magjit.reporting.content import Content, Role, kind_meaning

SHARED: dict[str, object] = {}


class World:
    """A reference graph that is built step by step."""

    def __init__(self) -> None:
        self.graph = RefGraph()

    def root(self, obj: object) -> ShadowNode:
        relation = r.Root(len(self.graph))
        node = self.graph.add(obj, self.graph.outside, relation, fixed=True)
        self.graph.outside.first.refs[relation] = Edge(node.node_id)
        return node

    def add(self, parent: ShadowNode, relation: r.Relation, obj: object) -> ShadowNode:
        node = self.graph.add(obj, parent, relation, fixed=False)
        parent.first.refs[relation] = Edge(node.node_id)
        return node


def shown(captured: Captured) -> Content:
    content = Content(name="program", backend="eager")
    collect(captured, content)
    return content


def model_world() -> tuple[World, dict[str, ShadowNode]]:
    world = World()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    nodes = {"model": world.root(model)}
    nodes["x"] = world.add(world.graph.outside, r.Arg(0), torch.ones(4, 2))
    nodes["dict"] = world.add(nodes["model"], r.InstanceDict(), vars(model))
    nodes["modules"] = world.add(nodes["dict"], r.Item.of("_modules"), model._modules)
    nodes["linear"] = world.add(nodes["modules"], r.Item.of("0"), model[0])
    nodes["inner"] = world.add(nodes["linear"], r.InstanceDict(), vars(model[0]))
    nodes["params"] = world.add(nodes["inner"], r.Item.of("_parameters"), model[0]._parameters)
    nodes["weight"] = world.add(nodes["params"], r.Item.of("weight"), model[0].weight)
    nodes["dict"].first.refs[r.Item.of("training")] = Leaf(True)
    nodes["dict"].first.refs[r.Item.of("forward")] = Leaf(ABSENT)
    return world, nodes


def test_paths_are_what_a_program_would_write() -> None:
    world, nodes = model_world()
    paths = {view.node_id: view.path for view in shown(captured_of(world)).objects}
    assert paths[nodes["weight"].node_id] == "model[0].weight"
    assert paths[nodes["linear"].node_id] == "model[0]"
    assert paths[nodes["x"].node_id] == "args[0]"
    assert paths[nodes["dict"].node_id] == "model.__dict__"


def test_paths_of_other_places() -> None:
    world = World()

    def outer(cell=(1, 2)):
        def inner():
            return names

        names = ["a"]
        return inner

    function = outer()
    func = world.root(function)
    cell = world.add(func, r.Closure(0), function.__closure__[0])
    names = world.add(cell, r.Cell(), function())
    first = world.add(names, r.Index(0), [])
    module = world.root(types)
    namespace = world.root(globals())
    shared = world.add(namespace, r.Item.of("SHARED"), SHARED)
    keyed = world.add(shared, r.Item.of(("k", 1)), [])
    keyword = world.add(world.graph.outside, r.Kwarg("mask"), {})
    paths = [view.path for view in shown(captured_of(world)).objects]
    prefix = f"{__name__}.{outer.__qualname__}.<locals>.inner"
    assert paths[func.node_id] == prefix
    assert paths[names.node_id] == "inner.<names>"
    assert paths[first.node_id] == "inner.<names>[0]"
    assert paths[module.node_id] == "types"
    assert paths[shared.node_id] == f"{__name__}.SHARED"
    assert paths[keyed.node_id] == f"{__name__}.SHARED[('k', 1)]"
    assert paths[keyword.node_id] == "kwargs['mask']"


def captured_of(world: World, **parts) -> Captured:
    world.graph.verify()
    return Captured(world.graph, parts.pop("operators", OperatorGraph()), **parts)


GRAPH = """\
#0 outside
    leads to #1, #2
#1 model: Sequential
    leads to #3
#2 args[0]: Tensor
    Tensor float32 (4, 2)
#3 model.__dict__: dict
    .training = True
    .forward is not there
    leads to #4
#4 model._modules: dict
    leads to #5
#5 model[0]: Linear
    leads to #6
#6 model[0].__dict__: dict
    leads to #7
#7 model[0]._parameters: dict
    leads to #8
#8 model[0].weight: Parameter
    Parameter float32 (3, 2) requires_grad"""


def test_the_graph_as_text() -> None:
    assert shown(captured_of(model_world()[0])).refgraph_text == GRAPH


def planned(world: World, *tensors: int, mutates: bool = False) -> GuardPlan:
    return build_plan(
        world.graph,
        tensors,
        mutates=mutates,
        one_for_two=False,
        argument_count=1,
        keywords=("mask",),
        keyword_order=False,
        metas={},
    )


def test_objects_have_roles() -> None:
    world, nodes = model_world()
    views = {view.node_id: view for view in shown(captured_of(world)).objects}
    roles = {name: views[node.node_id].role for name, node in nodes.items()}
    assert roles["model"] is roles["linear"] is Role.MODULE
    assert roles["weight"] is roles["x"] is Role.TENSOR
    assert roles["dict"] is roles["params"] is Role.CONTAINER
    hidden = {name for name, node in nodes.items() if views[node.node_id].hidden}
    assert hidden == {"dict", "modules", "inner", "params"}
    assert ".training = True" in views[nodes["dict"].node_id].facts
    assert ".forward is not there" in views[nodes["dict"].node_id].facts


GUARDS = """\
Call (1)
    1 positional arguments and keywords mask
Arg (1)
    args[0] is there
InstanceDict (2)
    model.__dict__ is there
    model[0].__dict__ is there
Item (6)
    model._modules is there
    model.training == True
    model.__dict__ has no 'forward'
    model[0] is there
    model[0]._parameters is there
    model[0].weight is there
Type (5)
    type(model) is Sequential
    type(model._modules) is dict
    type(model[0]) is Linear
    type(model[0]._parameters) is dict
    type(model[0].weight) is Parameter
Tensor (1)
    args[0]: Tensor float32 (4, 2)
GlobalState (1)
    torch's global state: grad mode, autocast, defaults"""


def test_guards_read_as_conditions() -> None:
    world, nodes = model_world()
    plan = planned(world, nodes["x"].node_id)
    content = shown(captured_of(world, guard_plan=plan))
    assert content.guard_text == GUARDS
    assert content.guards.total() == 17


def test_guards_of_inputs_that_share_memory() -> None:
    world = World()
    whole = torch.zeros(4)
    nodes = [
        world.add(world.graph.outside, r.Arg(i), tensor)
        for i, tensor in enumerate([whole, whole[2:], torch.zeros(4)])
    ]
    plan = planned(world, *[node.node_id for node in nodes], mutates=True)
    lines = shown(captured_of(world, guard_plan=plan)).guard_lines
    assert [line.text for line in lines if line.kind == "Overlap"] == [
        "args[0] and args[1] share memory, 8 bytes apart",
        "no other two of the graph's inputs share memory",
    ]


def test_operators_and_what_they_change() -> None:
    world, nodes = model_world()
    x, weight = nodes["x"].obj, nodes["weight"].obj
    code = shown.__code__
    add = Operator(torch.Tensor.add_, (ValueRef(0), 1), {}, ValueRef(0), code, 0)
    cat = Operator(torch.cat, ([ValueRef(0), ValueRef(1)],), {"dim": -1}, ValueRef(2), code, 0)
    index = (ValueRef(2), (slice(None), slice(1, None, 2), None))
    get = Operator(torch.Tensor.__getitem__, index, {}, ValueRef(3))
    graph = OperatorGraph([InputValue(0, x), InputValue(1, weight)], [add, cat, get])
    content = shown(captured_of(world, operators=graph))
    here = f"test_collect.py:{code.co_firstlineno} in shown"
    assert [call.text for call in content.operator_calls] == [
        "%0 = Tensor.add_(%0, 1)",
        "%2 = torch.cat([%0, %1], dim=-1)",
        "%3 = Tensor.__getitem__(%2, (:, 1::2, None))",
    ]
    assert content.operators[0].endswith(here)
    assert content.operators[2] == content.operator_calls[2].text  # its place is not known
    (change,) = content.side_effects
    assert change.startswith("in the graph: Tensor.add_ changes args[0]  # ")


def test_effects_of_every_form() -> None:
    world, nodes = model_world()
    model, namespace, x = nodes["model"].node_id, nodes["dict"].node_id, nodes["x"].node_id
    listed = world.add(nodes["dict"], r.Item.of("log"), []).node_id
    target, log = Slot(model), Slot(listed)

    def function():
        return world

    world.root(function)
    cell = world.root(function.__closure__[0]).node_id
    made = Let(0, Seq("list", (Out(5), Const(None))))
    effects = (
        SetAttr(target, "calls", Const(1)),
        SetItem(Slot(namespace), Const("seen"), Ref(0)),
        SetItem(log, Const(0), Slot(x)),
        SetItem(Const(globals()), Const("SHARED"), Out(5)),
        Do(Apply(list.append, (log, Out(5)))),
        Do(Apply(list.__setitem__, (log, Const(slice(1, None)), Seq("list", ())))),
        Do(Apply(dict.__delitem__, (Slot(namespace), Const("old")))),
        Do(Apply(delattr, (target, Const("gone")))),
        Do(Apply(object.__setattr__, (target, Const("frozen"), Const("a")))),
        Do(Apply(dict.pop, (Slot(namespace), Const("maybe"), Const(None)))),
        SetAttr(Slot(cell), "cell_contents", Out(5)),
        SetAttr(target, "other", Ref(1)),
        Do(Apply(print, (Const("hello"), Out(5)))),
    )
    lines = (made, Let(1, Apply(object.__new__, (Const(World),))))
    plan = MockPlan(lines, effects, Const(None), (5,), (), {0: "list", 1: "World"})
    content = shown(captured_of(world, mock_plan=plan))
    assert content.side_effects == [
        "model.calls = 1",
        "model.seen = [%5, None]",
        "model.log[0] = args[0]",
        f"{__name__}.SHARED = %5",
        "model.log.append(%5)",
        "model.log[1:] = []",
        "del model.old",
        "del model.gone",
        "model.frozen = 'a'",
        "del model.maybe",
        "function.<world> = %5",
        "model.other = new World",
        "print('hello', %5)",
    ]
    assert content.mock_text == str(plan)


def test_a_split_and_the_time_it_took() -> None:
    place = Location(__file__, 7, "forward")
    split = SplitPoint("reads a tensor", place, "do not")
    content = shown(
        captured_of(World(), split=split, timings=Timings(10.0, 4.0, 2.0, 1.0), missing=[len])
    )
    (found,) = content.splits
    assert (found.line, found.function, found.remedy) == (7, "forward", "do not")
    assert str(found).endswith("test_collect.py:7 in forward")
    assert content.shown_timings == {
        "run_ms": 6.0,
        "record_ms": 4.0,
        "build_ms": 2.0,
        "backend_ms": 1.0,
    }
    assert list(content.missing) == ["builtins.len"]
    assert content.verdict == "not one graph, for 1 reason"


class HostileMeta(type):
    def __getattribute__(cls, name):
        raise AssertionError(name)


class Hostile(metaclass=HostileMeta):
    """Whatever asks it something fails; so does what asks its class."""

    __hash__ = None

    def __getattribute__(self, name):
        raise AssertionError(name)

    def __repr__(self):
        raise AssertionError("repr")

    def __eq__(self, other):
        raise AssertionError("eq")

    def __call__(self):
        raise AssertionError("call")


def test_names_are_found_without_running_the_programs_code() -> None:
    world, thing = World(), Hostile()
    held = world.root({"__name__": "m"})
    node = world.add(held, r.Item.of("thing"), thing)
    world.root(Hostile)
    for index, value in enumerate([thing, slice(thing), (thing,), [thing], types.MethodType]):
        node.first.refs[r.Index(index)] = Leaf(value)
    content = shown(captured_of(world, guard_plan=planned(world)))
    shows = content.objects[node.node_id]
    assert shows.path == "m.thing" and shows.type_name == "Hostile"
    assert shows.facts[:4] == (
        "[0] = <Hostile>",
        "[1] = <slice>",
        "[2] = (<Hostile>,)",
        "[3] = <list>",
    )
    assert content.objects[3].path == f"{__name__}.Hostile"


RELATIONS = [
    cls
    for cls in vars(r).values()
    if isinstance(cls, type) and issubclass(cls, r.Relation)
    if cls not in (r.Relation, r.Described, r.Root)
]


def _example(cls: type[r.Relation]) -> r.Relation:
    values = {"key": r.ItemKey("k"), "index": 0, "name": "n", "ident": 0}
    values["descriptor"] = types.FunctionType.__code__
    return cls(*[values[name] for name in cls.__dataclass_fields__])


def test_every_relation_can_be_read() -> None:
    world = World()
    function = world.root(shown)
    for cls in RELATIONS:
        node = world.graph.outside if cls in (r.Arg, r.Kwarg) else function
        node.first.refs[_example(cls)] = Leaf(3)
    lines = shown(captured_of(world, guard_plan=planned(world))).guard_lines
    for line in lines:
        assert f"<{line.kind}>" not in line.text, line
        assert kind_meaning(line.kind) != line.kind, f"say what {line.kind} means"
    assert {cls.__name__ for cls in RELATIONS} <= {line.kind for line in lines}
