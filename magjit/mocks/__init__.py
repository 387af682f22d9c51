"""Mocks: make the result of a run again and redo its side effects (MagPy §4.2, Algorithm 1).

Read in this order: `writes` (what the recorder hands over), `value_kinds` (how one object is made
again), `plan` (finds all that escapes), `schedule` (orders it), `ir` (the plan), `emit` (its code).
"""

from magjit.mocks.emit import Emitted, emit
from magjit.mocks.ir import MockPlan, verify
from magjit.mocks.plan import Resolver, build_plan
from magjit.mocks.writes import (
    DELETED,
    AttrWrite,
    Call,
    CellWrite,
    ContainerState,
    DequeState,
    DictState,
    GlobalWrite,
    ItemWrite,
    ListState,
    SetState,
    SlotWrite,
    TensorAttrWrite,
    Write,
)

__all__ = [
    "DELETED",
    "AttrWrite",
    "Call",
    "CellWrite",
    "ContainerState",
    "DequeState",
    "DictState",
    "Emitted",
    "GlobalWrite",
    "ItemWrite",
    "ListState",
    "MockPlan",
    "Resolver",
    "SetState",
    "SlotWrite",
    "TensorAttrWrite",
    "Write",
    "build_plan",
    "emit",
    "verify",
]
