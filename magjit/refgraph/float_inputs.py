"""Floats that change, as inputs of a graph whose backend takes tensors only."""

from __future__ import annotations

from typing import Any

from magjit.monitor.float_forms import any_float, float_form
from magjit.monitor.operator_graph import Operator, floats_in
from magjit.refgraph.numbers import Numbers

__all__ = ["choose_form"]


def choose_form(
    numbers: Numbers, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Find out how an operator takes its floats as tensors; if it does not, they are constants.

    Args:
        numbers: of the run.
        op: as it was recorded; gets its ``floats``.
        args: with which the program calls it; ``kwargs``, too.
    """
    found = [ref.number for ref in floats_in((op.args, op.kwargs))]
    if not found:
        return
    known = {id(number.obj) for number in found}
    given = [value for value in (*args, *kwargs.values()) if id(value) in known]
    form = None
    if len(given) == len(found):  # otherwise some are inside of a list
        form = float_form(op.func, args, kwargs, lambda value: id(value) in known)
    if form is None or not all(form.suits(number.obj) for number in found):
        numbers.pin(found)
        return
    op.floats = form
    for number in found if form.suits is not any_float else ():
        numbers.decided(form.suits, (number.obj,))
