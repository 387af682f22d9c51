"""What the annotations say is what the callables do: each is run and compared with its rule.

Elements are objects known by identity, so that a result that is an element, or the receiver
itself, is told from an equal one.
"""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from magjit.annotations import Kind, Relation, Rule, default_database


class Element:
    """Known by identity, ordered by creation."""

    counter = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.counter)

    def __lt__(self, other: Any) -> bool:
        return self.number < other.number


A, B, C = Element(), Element(), Element()


@dataclass(frozen=True)
class Subject:
    """A type, how to make an instance, and argument lists to try on its methods."""

    make: Callable[[], Any]
    calls: tuple[tuple[Any, ...], ...]


def default_dict() -> collections.defaultdict:
    return collections.defaultdict(list, {"a": A, "b": B})


SEQUENCE = ((), (A,), (0,), ([C],), (0, C), (slice(0, 1),), (slice(0, 1), [C]), (2,))
MAPPING = ((), ("a",), ("a", C), ("z", C), ({"c": C},), ([("c", C)],), (["a"], C))
SETS = ((), (A,), (C,), ({B, C},), ([C],))
BYTES = ((), (b"b",), (0,), (0, 99), (98,), (bytearray(b"x"),), (2,), ("utf-8",), (b"a", b"z"))
SUBJECTS: dict[type, Subject] = {
    list: Subject(lambda: [B, A], SEQUENCE),
    tuple: Subject(lambda: (A, B), SEQUENCE),
    dict: Subject(lambda: {"a": A, "b": B}, MAPPING),
    set: Subject(lambda: {A, B}, SETS),
    frozenset: Subject(lambda: frozenset({A, B}), SETS),
    bytearray: Subject(lambda: bytearray(b"ab"), BYTES),
    str: Subject(lambda: "ab", ((), ("a",), (0,), (["x"],), ("a", "b"), ({97: "z"},), (9,))),
    bytes: Subject(lambda: b"ab", BYTES),
    int: Subject(lambda: 1000, ((), (3,), (2, "big"))),
    float: Subject(lambda: 2.5, ((), (3.0,))),
    collections.deque: Subject(lambda: collections.deque([A, B], 5), SEQUENCE),
    collections.OrderedDict: Subject(
        lambda: collections.OrderedDict(a=A, b=B), (*MAPPING, ("a", False))
    ),
    collections.defaultdict: Subject(default_dict, MAPPING),
    np.ndarray: Subject(
        lambda: np.array([3.0, 1.0, 2.0]),
        ((), (0,), (np.ones(3),), (slice(0, 2),), (0, 9.0), (1, 9.0), ([1], 7.0)),
    ),
}
# Their results show the address or the memory of an object, or run what is not tried here.
NOT_TRIED = frozenset(
    {
        *("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class_getitem__"),
        *("__getattribute__", "__setattr__", "__delattr__", "__reduce__", "__reduce_ex__"),
        *("__sizeof__", "__alloc__", "__dir__", "dump", "tofile", "ctypes"),
    }
)


def methods() -> Iterator[tuple[type, str]]:
    for cls in SUBJECTS:
        for name, found in vars(cls).items():
            if callable(found) and name not in NOT_TRIED and not isinstance(found, type):
                yield cls, name


def state(value: Any) -> Any:
    """What of a value a call could change, to compare before with after."""
    match value:
        case dict():
            return list(value.items())
        case np.ndarray():
            return value.tobytes(), value.shape, value.flags.writeable
        case list() | tuple() | collections.deque():
            return list(value)
        case set() | bytearray():
            return copy.copy(value)
    return None


def elements(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return (
        list(value) if isinstance(value, (list, tuple, set, frozenset, collections.deque)) else []
    )


@dataclass
class Seen:
    """What calls of one method did."""

    changed: bool = False
    changed_arguments: bool = False
    returned_self: bool = False
    returned_element: bool = False
    succeeded: bool = False


def observe(cls: type, name: str) -> Seen:
    subject, seen = SUBJECTS[cls], Seen()
    for arguments in subject.calls:
        receiver, given = subject.make(), copy.copy(arguments)
        inside, before, before_given = elements(receiver), state(receiver), list(map(state, given))
        try:
            result = getattr(receiver, name)(*given)
        except Exception:
            continue
        if result is NotImplemented:
            continue
        seen.succeeded = True
        seen.changed |= state(receiver) != before
        seen.changed_arguments |= list(map(state, given)) != before_given
        seen.returned_self |= result is receiver
        seen.returned_element |= any(result is e for e in inside if isinstance(e, Element))
    return seen


def contradictions(cls: type, name: str) -> Iterator[str]:
    """How what a method does differs from what its rule says."""
    rule, seen = default_database().lookup(getattr(cls, name)), observe(cls, name)
    if rule is None:
        yield "has no rule"
        return
    relation, receiver = rule.result.relation, rule.argument("self")
    if seen.changed and not receiver.in_place:
        yield "changes its receiver"
    if seen.changed_arguments and not any(rule.argument(i).in_place for i in range(3)):
        yield "changes an argument"
    if seen.returned_self and cls.__hash__ is None:
        if relation not in (Relation.SAME_AS, Relation.VIEW_OF) or rule.result.of != "self":
            yield "returns its receiver"
    if seen.returned_element and relation is not Relation.ELEMENT_OF:
        yield "returns an element"
    if not seen.succeeded:
        return
    if relation is Relation.SAME_AS and not seen.returned_self:
        yield "does not return its receiver"
    if receiver.in_place and not seen.changed and name not in CHANGES_ONLY_SOMETIMES:
        yield "does not change its receiver"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("cls", SUBJECTS)
def test_methods_do_what_their_rules_say(cls: type) -> None:
    wrong = [f"{n} {w}" for c, n in methods() if c is cls for w in contradictions(cls, n)]
    assert not wrong


CHANGES_ONLY_SOMETIMES = {
    "byteswap",  # only when asked to
    "__setstate__",  # takes what __reduce__ gave
    "resize",  # refuses an array that others may share
    "setfield",  # needs a dtype
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_enough_methods_are_tried() -> None:
    tried = [observe(cls, name).succeeded for cls, name in methods()]
    assert sum(tried) / len(tried) > 0.85


# ---------------------------------------------------------------- torch operators

WRITES_THOUGH_THE_SCHEMA_IS_SILENT = {
    *("batch_norm", "instance_norm", "native_batch_norm"),  # running statistics
    # These have an argument `inplace` in torch.nn.functional.
    *("alpha_dropout", "dropout", "feature_alpha_dropout", "relu6", "rrelu", "selu"),
}


def packets() -> Iterator[tuple[Rule, Any, bool]]:
    """Rules of operators with the packet of their name in ATen, and whether they are methods."""
    for name, rule in default_database().rules.items():
        owner, _, last = name.rpartition(".")
        if rule.kind is Kind.OP and owner in ("torch", "torch.Tensor", "torch.nn.functional"):
            packet = getattr(torch.ops.aten, last, None) if not last.startswith("__") else None
            if packet is not None:
                yield rule, packet, owner == "torch.Tensor"


def written_arguments(packet: Any) -> set[int | str]:
    found: set[int | str] = set()
    for overload in packet.overloads():
        for position, argument in enumerate(getattr(packet, overload)._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and "Tensor" in str(argument.type):
                found.add(argument.name if argument.kwarg_only else position)
    return found


def test_operators_change_what_their_schema_says() -> None:
    wrong, count = [], 0
    for rule, packet, is_method in packets():
        for argument in written_arguments(packet):
            if isinstance(argument, str):
                # `out` and its relatives: every op may change them.
                continue
            key = argument - 1 if is_method else argument
            count += 1
            if not rule.argument("self" if key < 0 else key).in_place:
                wrong.append((rule.name, argument))
    assert not wrong
    assert count > 300


def test_operators_that_only_the_rule_says_to_write() -> None:
    wrong = [
        rule.name
        for rule, packet, _ in packets()
        if rule.mutates and not written_arguments(packet)
        if packet.__name__ not in WRITES_THOUGH_THE_SCHEMA_IS_SILENT
    ]
    assert not wrong


def test_operators_with_a_data_dependent_shape() -> None:
    """Every operator that ATen tags so is annotated so, where torch names it."""
    wrong = []
    for rule, packet, _ in packets():
        tags = set().union(*(getattr(packet, o).tags for o in packet.overloads()))
        if torch.Tag.dynamic_output_shape in tags and not rule.dynamic_shape:
            wrong.append(rule.name)
    assert not wrong
