"""Every kind of guard and of side effect is needed: turned off, a row of the tables fails."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import magjit
from magjit.guards import emit as guard_emit
from magjit.refgraph import relations

from ..effects import test_effects
from ..effects.rows import ROWS as EFFECT_ROWS
from ..guards import test_guards
from ..guards.conftest import process_put_back as process_put_back
from ..guards.rows import ROWS as GUARD_ROWS
from .ablation import (
    ANYTHING,
    CHECKS,
    RELATIONS,
    WRITES,
    without_check,
    without_global,
    without_metadata,
    without_relation,
    without_write,
)

# What an instruction of a guard program compares → a row that fails without it.
OF_CHECK = {
    "absent": "attribute dict get with default",
    "argc": "call count of varargs",
    "cell_empty": "empty cell filled",
    "context_unset": "empty context variable set",
    "differ": "alias same tensor compared",
    "distinct": "alias same list twice",
    "eq": "attribute int",
    "func_code": "code of the root replaced",
    "global_state": "grad mode",
    "is": "attribute function",
    "keys": "attribute dict order",
    "kwarg_order": "call keyword order",
    "len": "attribute list length",
    "no_overlap": "alias overlapping storage with mutation",
    "overlap": "views that overlap elsewhere",
    "pyeq": "attribute str subclass",
    "same": "same nested object on two paths",
    "set_eq": "attribute set contents",
    "sizes": "tensor free size that decides",
    "slot_empty": "empty slot filled",
    "tensor": "buffer of another shape",
    "tp_names": "class attribute",
    "type_is": "class of an object assigned",
}
# What an edge of the reference graph leads to → a row that fails when nothing compares it.
OF_RELATION = {
    relations.CAttr: "attribute deque maxlen",
    relations.CResult: "attribute str subclass",
    relations.Cell: "closure cell",
    relations.Closure: "closures that share a cell no longer",
    relations.Code: "code of the root replaced",
    relations.ContextValue: "context variable set again",
    relations.Defaults: "default argument",
    relations.Globals: "function with other globals",
    relations.Has: "attribute dict membership",
    relations.Index: "attribute list item",
    relations.InstanceDict: "objects that share their dict no longer",
    relations.Item: "attribute int",
    relations.Keys: "attribute dict order",
    relations.KwDefaults: "keyword default given",
    relations.Length: "attribute list length",
    relations.Members: "attribute set contents",
    relations.MethodFunc: "another method of the object",
    relations.MethodSelf: "class method of a subclass",
    relations.NonEmpty: "attribute list truth",
    relations.Referent: "weak reference to another class",
    relations.SlotOf: "attribute slots member",
}
# Instructions that compare nothing, and the guards of a backend, which have tests of their own.
FETCHES = {"closure", "const", "dict_block", "getattr_c", "getitem", "index", "predicate", "slot"}
# The dict of a module is the same for the module's life: nothing is compared.
NEVER_COMPARED = {relations.ModuleDict}
OF_GLOBAL = {
    "autocast_cpu": "autocast on",
    "default_dtype": "default dtype",
    "deterministic": "deterministic flag",
    "grad_mode": "grad mode",
    "num_threads": "thread count",
}
OF_METADATA = {
    "requires_grad": "tensor requires grad",
    "sizes": "tensor shape",
    "strides": "tensor strides",
}
OF_WRITE = {
    "AttrWrite": "writes class attribute",
    "Call": "writes list append",
    "CellWrite": "nonlocal cell set",
    "DequeState": "writes deque rotate",
    "DictState": "writes dict update",
    "ItemWrite": "writes attribute set to a tensor",
    "ListState": "writes list item",
    "SetState": "writes set members exchanged",
    "SlotWrite": "slots member set",
    "TensorAttrWrite": "grad field set",
}


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


def guard(name: str) -> None:
    test_guards.test_guard(next(row for row in GUARD_ROWS if row.name == name))


def needed(
    monkeypatch: pytest.MonkeyPatch,
    turn_off: Callable[[pytest.MonkeyPatch, Any], None],
    kind: Any,
    row: Callable[[], None],
) -> None:
    """The row passes; without the kind it fails."""
    row()
    with monkeypatch.context() as patch:
        turn_off(patch, kind)
        with pytest.raises(AssertionError):
            row()


@pytest.mark.parametrize("kind", CHECKS)
def test_every_check_is_needed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed(monkeypatch, without_check, kind, lambda: guard(OF_CHECK[kind]))


@pytest.mark.parametrize("kind", OF_RELATION, ids=lambda kind: kind.__name__)
def test_every_relation_is_needed(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    needed(monkeypatch, without_relation, kind, lambda: guard(OF_RELATION[kind]))


@pytest.mark.parametrize("kind", OF_GLOBAL)
def test_global_state_is_needed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed(monkeypatch, without_global, kind, lambda: guard(OF_GLOBAL[kind]))


@pytest.mark.parametrize("kind", ANYTHING)
def test_metadata_of_tensors_is_needed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed(monkeypatch, without_metadata, kind, lambda: guard(OF_METADATA[kind]))


@pytest.mark.parametrize("kind", WRITES, ids=lambda kind: kind.__name__)
def test_every_write_is_needed(
    kind: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(row for row in EFFECT_ROWS if row.name == OF_WRITE[kind.__name__])
    needed(monkeypatch, without_write, kind, lambda: test_effects.test_effect(row, capsys))


def test_the_tables_name_every_kind() -> None:
    emitted = set(re.findall(r'(?:emit|later)\(\s*"(\w+)"', inspect.getsource(guard_emit)))
    assert emitted - FETCHES <= set(CHECKS)
    assert set(OF_RELATION) | NEVER_COMPARED == set(RELATIONS)
    assert set(OF_CHECK) == set(CHECKS)
    assert set(OF_WRITE) == {kind.__name__ for kind in WRITES}
