"""Every kind of value: built again it equals what eager makes, and it is new at every replay."""

from __future__ import annotations

import collections
import sys

import numpy as np
import pytest
import torch

from magjit.mocks import build_plan, emit, verify
from magjit.mocks import plan as plan_module
from magjit.mocks.value_kinds import VALUE_KINDS, kind_of
from tests.mocks import things
from tests.mocks.rows_values import ROWS, outside_objects
from tests.mocks.world import Alike, FakeResolver, Replay, shared_objects, tensors


@pytest.mark.parametrize("name", ROWS)
def test_replay_equals_eager(name):
    check(ROWS[name])


def check(make):
    """Record one run, replay it twice, and compare each replay with a run of its own."""
    made, outside = tensors(), outside_objects()
    recorded = make(made, outside)
    replay = Replay(recorded, outside=outside, made=made)
    previous = recorded
    for _ in range(2):
        other, there = tensors(), outside_objects()
        expected = make(other, there)
        saved = [t.__dict__.copy() for t in other]
        for t in other:
            t.__dict__.clear()
        found = replay(other, there)
        now = [t.__dict__.copy() for t in other]
        assert Alike().differ(saved, now) is None
        alike = Alike()
        for a, b in zip([*other, *there], [*other, *there], strict=True):
            alike.there[id(a)], alike.back[id(b)] = b, a
        assert alike.differ(expected, found) is None
        assert not shared_objects(alike)
        alike = Alike()
        alike.differ(previous, found)
        assert not shared_objects(alike), "an object of an earlier run came back"
        previous = found


@pytest.fixture(scope="module")
def rows_of_kinds():
    """Which rows have objects of which kind."""
    found = collections.defaultdict(list)
    for make in ROWS.values():

        def noted(obj, make=make):
            kind = kind_of(obj)
            if make not in found[kind.name]:
                found[kind.name].append(make)
            return kind

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan_module, "kind_of", noted)
            made, outside = tensors(), outside_objects()
            Replay(make(made, outside), outside=outside, made=made)
    return found


@pytest.mark.parametrize("kind", VALUE_KINDS, ids=lambda kind: kind.name)
def test_every_kind_is_needed(kind, rows_of_kinds, monkeypatch):
    """Without the kind, a row of the table fails."""
    if kind.name in REFUSED_KINDS:
        return
    rest = [other for other in VALUE_KINDS if other is not kind]

    def without(obj):
        cls = type(obj)
        return next(other for other in rest if other.matches(obj, cls))

    monkeypatch.setattr(plan_module, "kind_of", without)
    for make in rows_of_kinds[kind.name]:
        try:
            check(make)
        except Exception:
            return
    pytest.fail(f"{len(rows_of_kinds[kind.name])} rows do without it")


# See test_refusals.py.
REFUSED_KINDS = {
    *("generator", "coroutine", "frame", "file", "socket", "lock", "torch.Generator"),
}


def test_there_are_many_rows():
    assert len(ROWS) >= 60


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are new in 3.12")
def test_type_parameters_of_a_function():
    names: dict = {}
    exec("def f[T](x: T) -> T: return x", names)
    replay = Replay(names["f"], created=[names["f"]])
    assert replay().__type_params__ == names["f"].__type_params__


def test_no_hook_of_a_class_runs():
    obj = things.Guarded([1])
    things.Guarded.armed = True
    try:
        replay = Replay([obj, obj])
        found = replay()
    finally:
        things.Guarded.armed = False
    assert found[0] is found[1] and type(found[0]) is things.Guarded and found[0].x == [1]


def test_the_plan_does_not_see_later_changes():
    made = tensors()
    recorded = {"list": [1], "obj": things.Plain(t := made[0]), "array": np.zeros(2)}
    replay = Replay(recorded, made=made)
    recorded["list"].append(2)
    recorded["obj"].a0 = None
    recorded["array"][:] = 7
    found = replay(made)
    assert found["list"] == [1] and found["obj"].a0 is t and found["array"].tolist() == [0, 0]
    found["array"][:] = 8
    assert replay(made)["array"].tolist() == [0, 0]


def test_transformers_output():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    made = tensors()

    def make(t):
        return outputs.BaseModelOutputWithPooling(t[0], t[1], hidden_states=(t[0], t[2]))

    replay = Replay(make(made), made=made)
    other = tensors()
    found = replay(other)
    assert Alike().differ(make(other), found) is None
    assert found[0] is found.last_hidden_state is other[0]
    assert found.to_tuple() == (other[0], other[1], (other[0], other[2]))


def test_a_view_is_made_from_its_base():
    class Viewing(FakeResolver):
        def view(self, obj):
            return (torch.Tensor.view, (outside[0], 4)) if obj is view else None

    outside = [torch.ones(2, 2)]
    view = outside[0].view(4)
    plan = build_plan([view, view, outside[0]], (), Viewing(outside))
    verify(plan)
    finish, slots, outputs, _ = emit(plan)
    base = torch.zeros(2, 2)
    made = finish((), base)
    assert slots == (0,) and outputs == () and made[0] is made[1] and made[2] is base
    assert made[0].shape == (4,) and made[0].data_ptr() == base.data_ptr()


def test_functions_by_reference_and_made_in_the_run():
    def local():
        return None

    known = Replay([local, test_transformers_output], created=[local])()
    assert known[0] is not local and known[0].__code__ is local.__code__
    assert known[1] is test_transformers_output
