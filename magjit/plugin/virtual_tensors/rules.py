"""What each ATen data-movement operator does, and which of its sides may be virtual (VTC §4.4).

    Directions ::= results, operands
    results    ::= [Movement]            each result as a rearrangement of the operands, or why not
    operands   ::= operand → Movement    an operand as a rearrangement of the results

A missing operand in ``operands`` cannot be made virtual; ``reason`` says why. A rule only says what
is true of the operator; whether it may be used in a graph is for the legality check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from magjit.plugin.virtual_tensors.calls import Call, call_of
from magjit.plugin.virtual_tensors.mapping import Movement

__all__ = ["Directions", "Rule", "directions_of", "rule", "rules", "unsupported"]

ONE_TO_MANY = "an element of the operand has several places in the result"
LEFT_OUT = "elements of the operand that the result leaves out would have no place"
NOTHING = "a tensor without dimensions, or an empty one"


@dataclass(frozen=True, slots=True)
class Directions:
    """Both sides of one call.

    Attributes:
        results: one movement over the operands for each result; empty where none can be virtual.
        operands: which operands may be virtual of the results, and how. A movement's operand
            numbers are positions of results.
        whole: whether every element of each operand in ``operands`` has its place in the results.
        reason: why the missing sides are missing.
    """

    results: tuple[Movement, ...] = ()
    operands: Mapping[int, Movement] = field(default_factory=dict)
    reason: str = ""


Rule = Callable[[Call], Directions]

rules: dict[Any, Rule] = {}
"""ATen operator → its rule."""

unsupported: dict[Any, str] = {}
"""ATen operators that only move data, or give a view, without a rule → why."""


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for operators."""

    def register(function: Rule) -> Rule:
        for target in targets:
            assert target not in rules, target
            rules[target] = function
        return function

    return register


def directions_of(node: Any) -> Directions | None:
    """Both sides of an FX node's call; None where no rule knows the operator."""
    found = rules.get(node.target) if node.op == "call_function" else None
    if found is None:
        return None
    call = call_of(node)
    try:
        return found(call)
    except (IndexError, ZeroDivisionError):
        # Operators take dimension 0 of a tensor that has none, and divide by no empty one.
        if all(one.shape and 0 not in one.shape for one in (*call.operands, *call.results)):
            raise
        return Directions(reason=NOTHING)
