"""Which operators can wait in a queue, and what their results will be, before they run.

An operator can wait if it is pure and if all that can be wrong with it shows in its operands'
shapes and dtypes: whoever calls it gets eager's error where eager raises it.  What depends on
values (a read, an index), on order (random numbers) or writes silently cannot wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from magjit_dvm import gathering, operators_creation, operators_elementwise, translate
from magjit_dvm.groups import VIEWS
from magjit_dvm.operators import HANDLERS

__all__ = [
    "IN_PLACE",
    "PARTS",
    "RULES",
    "SHAPE_ONLY",
    "WRITES_SILENTLY",
    "Kind",
    "Layout",
    "Result",
    "Rule",
    "inferred",
    "parts",
]

aten = torch.ops.aten

_REGISTERING = translate  # imported for the handlers that it registers


class Kind(Enum):
    """What an operator does with its operands' memory."""

    ELEMENTWISE = "a new tensor; its shape is what operands broadcast to"
    VALUE = "new tensors"
    VIEW = "a view of the first operand"


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """How one operator waits; there is one of them for each.

    Attributes:
        target: the operator.
        kind: what it makes.
        lifted: arguments whose numbers each call passes anew: sizes, positions, factors.
    """

    target: Any
    kind: Kind
    lifted: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Shape, strides in elements, dtype; interned, so that identity is equality."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """The one layout of these."""
        key = (shape, strides, dtype)
        found = _layouts.get(key)
        if found is None:
            if len(_layouts) >= _MOST:
                _layouts.clear()  # what is equal may then differ by identity: one more inference
            found = _layouts[key] = cls(shape, strides, dtype, strides == _row_major(shape))
        return found


@dataclass(frozen=True, slots=True)
class Result:
    """One result to come; ``offset`` counts elements from the first operand's own."""

    layout: Layout
    offset: int = 0


_MOST = 1 << 13
_layouts: dict[Any, Layout] = {}
_results: dict[Any, tuple[Result, ...]] = {}
_dtypes: dict[Any, torch.dtype] = {}


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# -- rules --

_LIFTED = {
    aten.expand.default: frozenset({1}),
    aten.select.int: frozenset({2}),
    aten.slice.Tensor: frozenset({2, 3}),
    aten.view.default: frozenset({1}),
    aten._unsafe_view.default: frozenset({1}),
    aten.add.Tensor: frozenset({1}),
    aten.sub.Tensor: frozenset({1}),
    aten.mul.Tensor: frozenset({1}),
    aten.div.Tensor: frozenset({1}),
}
_ATEN_ALONE = (
    aten.addmm.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.cat.default,
    aten.linear.default,
    aten.mm.default,
    aten.stack.default,
)
_CANNOT_WAIT = frozenset(
    {
        aten.embedding.default,  # an index may be out of range
        aten.lift_fresh_copy.default,  # its operand is a constant of the program's
        aten.native_batch_norm.default,
        aten.reshape.default,  # a view or a copy: it comes as one or the other
    }
)
SHAPE_ONLY = frozenset(
    getattr(aten, name).default
    for name in (
        "empty_like",
        "full_like",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randn_like",
        "zeros_like",
    )
)
"""These look at their operand's shape and dtype alone: they run now and flush nothing."""

WRITES_SILENTLY = frozenset(
    {
        aten.native_batch_norm.default,
        aten.cudnn_batch_norm.default,
        aten.miopen_batch_norm.default,
        aten._native_batch_norm_legit.default,
    }
)
"""These write operands in training, which some schemas do not say."""


_RUN_NOW = frozenset(
    {
        gathering.__name__,  # an index may be out of range
        operators_creation.__name__,  # each size would be a structure of its own
    }
)
DIVISIONS = frozenset(
    overload
    for packet in (aten.div, aten.floor_divide, aten.fmod, aten.remainder)
    for overload in (getattr(packet, name) for name in packet.overloads())
)
"""Of ints, these raise where a divisor is 0."""


def _rules() -> dict[Any, Rule]:
    made: dict[Any, Rule] = {}
    for target, handler in HANDLERS.items():
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            continue
        if handler.__module__ in _RUN_NOW:
            continue
        is_elementwise = handler.__module__ == operators_elementwise.__name__
        kind = Kind.ELEMENTWISE if is_elementwise else Kind.VALUE
        made[target] = Rule(target, kind, _LIFTED.get(target, frozenset()))
    for target in (*VIEWS, aten.select.int, aten.slice.Tensor):
        made[target] = Rule(target, Kind.VIEW, _LIFTED.get(target, frozenset()))
    for target in _ATEN_ALONE:
        made[target] = Rule(target, Kind.VALUE)
    return {target: rule for target, rule in made.items() if target not in _CANNOT_WAIT}


RULES: dict[Any, Rule] = _rules()


def _in_place() -> dict[Any, Rule]:
    made = {}
    for target, rule in RULES.items():
        packet, _, overload = str(target).removeprefix("aten.").partition(".")
        writing = getattr(getattr(aten, packet + "_", None), overload, None)
        if writing is None or rule.kind is Kind.VIEW:
            continue
        names = [one.name for one in target._schema.arguments]
        if names == [one.name for one in writing._schema.arguments]:
            made[writing] = rule
    return made


IN_PLACE: dict[Any, Rule] = _in_place()
"""Operators that write their first operand, and what computes the value that they write."""


def parts(target: Any, args: tuple[Any, ...], kwargs: Any) -> list[tuple[Rule, Any]] | None:
    """Views that an operator with many of them makes, as operators with one each."""
    kwargs = kwargs or {}
    whole = args[0]
    last = 1 if target is aten.unbind.int else 2
    dim = args[last] if len(args) > last else kwargs.get("dim", 0)
    if not isinstance(dim, int) or not -whole.dim() <= dim < whole.dim():
        return None
    total = whole.shape[dim]
    if target is aten.unbind.int:
        return [(RULES[aten.select.int], (whole, dim, k)) for k in range(total)]
    if len(args) < 2:
        return None
    sizes = args[1]
    if target is aten.split.Tensor:
        if sizes <= 0:
            return None
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
    if not sizes or min(sizes) < 0 or sum(sizes) != total:
        return None
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    rule = RULES[aten.slice.Tensor]
    return [(rule, (whole, dim, end - n, end)) for n, end in zip(sizes, ends, strict=True)]


PARTS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
"""Operators that ``parts`` knows."""


# -- results --


def inferred(
    rule: Rule, signature: tuple[Any, ...], arguments: Callable[[], tuple[Any, Any]]
) -> tuple[Result, ...] | None:
    """What the operator will return for operands of these layouts.

    Args:
        rule: the operator's.
        signature: what the result depends on: layouts, and numbers or their types.
        arguments: makes the arguments, with tensors on the device ``meta``.

    Returns:
        None where the operator refuses its operands: it had better run now and say why.
    """
    key = (rule, torch.get_default_dtype(), signature)
    found = _results.get(key)
    if found is not None:
        return found
    if rule.kind is Kind.ELEMENTWISE:
        found = _broadcast(rule, signature, arguments)
    if found is None:
        found = _run(rule, arguments)
    if found is not None:
        if len(_results) >= _MOST:
            _results.clear()
        _results[key] = found
    return found


def _broadcast(
    rule: Rule, signature: tuple[Any, ...], arguments: Callable[[], tuple[Any, Any]]
) -> tuple[Result, ...] | None:
    """By hand, where all operands lie row by row: a new size then costs next to nothing."""
    shape: tuple[int, ...] | None = None
    kinds: list[Any] = []
    for one in signature:
        if type(one) is not Layout:
            kinds.append(one)
            continue
        if not one.contiguous:
            return None
        kinds.append((one.dtype, not one.shape))
        if shape is None:
            shape = one.shape
        elif one.shape != shape:
            shape = _together(shape, one.shape)
            if shape is None:
                return None
    if shape is None:
        return None
    key = (rule, torch.get_default_dtype(), tuple(kinds))
    dtype = _dtypes.get(key)
    if dtype is None:
        results = _run(rule, arguments)
        if results is None or len(results) != 1:
            return None
        layout = results[0].layout
        if layout.shape != shape or not layout.contiguous:
            return None
        if len(_dtypes) >= _MOST:
            _dtypes.clear()
        dtype = _dtypes[key] = layout.dtype
    return (Result(Layout.of(shape, _row_major(shape), dtype)),)


def _together(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    if len(one) < len(other):
        one, other = other, one
    sizes = list(one)
    lead = len(one) - len(other)
    for k, size in enumerate(other):
        if sizes[lead + k] == 1:
            sizes[lead + k] = size
        elif size not in (1, sizes[lead + k]):
            return None
    return tuple(sizes)


def _run(rule: Rule, arguments: Callable[[], tuple[Any, Any]]) -> tuple[Result, ...] | None:
    given, named = arguments()
    try:
        made = rule.target(*given, **named)
    except Exception:  # whatever it is, running the operator on the operands says it better
        return None
    several = made if isinstance(made, (tuple, list)) else (made,)
    if not all(type(one) is torch.Tensor for one in several):
        return None
    return tuple(
        Result(
            Layout.of(tuple(one.shape), tuple(one.stride()), one.dtype),
            one.storage_offset() if rule.kind is Kind.VIEW else 0,
        )
        for one in several
    )
