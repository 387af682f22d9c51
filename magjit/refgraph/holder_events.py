"""Tuples, lists and iterators of the run that hold numbers, and calls that get numbers.

A container that holds a number is watched like the number itself, so that whatever looks into it is
seen. What only moves its items, such as a slice, a sum or an unpacking, makes the next holder.
"""

from __future__ import annotations

import operator
import types
from typing import Any

import torch

from magjit import _C
from magjit.annotations import Kind
from magjit.bytecode import EventKind
from magjit.refgraph.frames import FrameState
from magjit.refgraph.kinds import HEAP_TYPE, class_lookup, is_atom
from magjit.refgraph.nodes import ShadowNode
from magjit.refgraph.number_values import Argument, Item, Number, Read, Size
from magjit.refgraph.recorder import Handler, StateRecorder

SEQUENCES = (tuple, list, torch.Size)
ITERATORS: tuple[Any, ...] = (
    *(type(iter(())), type(iter([])), type({}.items()), type({}.values())),
    *(type(iter({}.items())), type(iter({}.values()))),
)
"""Exact types, like the others: what gives the items of sequences and dicts."""


def is_sequence(value: Any) -> bool:
    """Whether an object is a plain tuple, list or size."""
    return type(value) in SEQUENCES


def is_container(value: Any) -> bool:
    """Whether an object is a plain sequence or dict."""
    return type(value) in SEQUENCES or type(value) is dict


def moves_items(
    rec: StateRecorder,
    handler: Handler,
    state: FrameState,
    offset: int,
    inputs: tuple[Any, ...],
) -> Any:
    """An instruction whose result holds items of its inputs, and does nothing else with them."""
    numbers = rec.numbers.among(inputs)
    verdict = handler(rec, state, offset, inputs)
    if verdict is not None:
        rec.numbers.pin(numbers)
        return verdict

    def note(top: tuple[Any, ...]) -> None:
        for value in top:
            if type(value) in ITERATORS:
                rec.numbers.held(value, numbers)
            elif is_container(value):
                rec.numbers.note_held(value)

    return note


def fills(
    rec: StateRecorder,
    handler: Handler,
    state: FrameState,
    offset: int,
    inputs: tuple[Any, ...],
) -> Any:
    """LIST_APPEND, DICT_MERGE and the like: the container comes before what goes into it."""
    return then_note(rec, inputs[0], handler(rec, state, offset, inputs), inputs, late=False)


def then_note(
    rec: StateRecorder, filled: Any, verdict: Any, inputs: tuple[Any, ...], *, late: bool = True
) -> Any:
    """After the instruction a list or dict of the run holds what went into it.

    It may be part of something else by then, if it is ``late``.
    """
    node = rec.graph.node_of(filled)
    if node is not None and verdict is None and _keeps_outside(rec, node, inputs):
        return None
    own = type(filled) in (list, dict) and node is None
    if verdict is not None or not own:
        rec.numbers.pin(rec.numbers.among(inputs))
        return verdict
    if late:
        rec.numbers.late += rec.numbers.among(v for v in inputs if v is not filled)
    return lambda top: rec.numbers.note_held(filled)


def _keeps_outside(rec: StateRecorder, node: ShadowNode, inputs: tuple[Any, ...]) -> bool:
    """Whether an outside list or dict just keeps numbers, as the replay has it keep them."""
    numbers = rec.numbers.among(value for value in inputs if value is not node.obj)
    if type(node.obj) is list:
        effect = rec.effects[-1] if rec.effects else None
        kept = bool(node.blind) and effect is not None and effect.args[0] is node.obj
    else:
        kept = type(node.obj) is dict and bool(node.written) and not node.mutated
    if kept:
        before = rec.numbers.find(node.obj)
        rec.numbers.held(node.obj, [*(before.args if before is not None else ()), *numbers])
    return kept


def method_of(rec: StateRecorder, holder: Any, verdict: Any) -> Any:
    """After the instruction: a bound method of a container gives what it holds to who calls it."""
    if verdict is not None:
        return verdict
    numbers = rec.numbers.among((holder,))

    def note(top: tuple[Any, ...]) -> None:
        for value in top:
            if isinstance(value, types.BuiltinFunctionType) and value.__self__ is holder:
                rec.numbers.held(value, numbers)

    return note


_READING = ("COMPARE_OP", "CONTAINS_OP", "FORMAT", "CONVERT", "MATCH", "BINARY_OP")


def pin_late(
    rec: StateRecorder, kind: EventKind, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    """C code reads objects: a container in them that was filled after it was put there may hold
    numbers, and is not watched as a part of them.
    """
    instr = state.info.instrs[offset]
    if kind in (EventKind.CALL, EventKind.CALL_EX):
        func, *args = inputs
        if kind is EventKind.CALL and args[0] is _C.NULL:
            args = args[1:]
        func = func.__func__ if isinstance(func, types.MethodType) else func
        owner, name = _owner(func, args), getattr(func, "__name__", "")
        fills_it = type(owner) in (list, dict) and name in _FILLING | _OF_DICTS
        if fills_it or func is len or _is_operator(rec, func, args):
            return
        called = func if isinstance(func, type) else class_lookup(type(func), "__call__")
        if isinstance(func, types.FunctionType) or isinstance(called, types.FunctionType):
            return
        if isinstance(called, type) and int(called.__flags__) & HEAP_TYPE:
            return
        read = any(not _is_simple(value) for value in (*args, owner))
    else:
        read = instr.opname.startswith(_READING) and not all(map(_is_simple, inputs))
    if read:
        rec.numbers.pin(rec.numbers.late)
        rec.numbers.late = []


def _is_simple(value: Any) -> bool:
    return value is _C.NULL or is_atom(value) or isinstance(value, torch.Tensor)


def compares_items(rec: StateRecorder, inputs: tuple[Any, ...]) -> bool:
    """``==`` of two sequences, item by item as far as the first difference; False: not plain."""
    left, right = inputs
    if not is_sequence(left) or not is_sequence(right):
        return False
    if not all(is_atom(item) for item in (*left, *right)):
        return False
    for pair in zip(left, right, strict=False) if len(left) == len(right) else ():
        if rec.numbers.among(pair):
            rec.numbers.decided(operator.eq, pair)
        if pair[0] != pair[1]:
            break
    return True


# -- calls --------------------------------------------------------------------------------------

_MOVING: tuple[Any, ...] = (tuple, list, torch.Size)
_FILLING = frozenset({"append", "extend", "insert"})
_OF_DICTS = frozenset({"get", "pop", "items", "values", "keys", "copy"})


def call(
    rec: StateRecorder,
    handler: Handler,
    state: FrameState,
    offset: int,
    inputs: tuple[Any, ...],
    func: Any,
    args: list[Any],
) -> Any:
    """A call of a function that is known to move numbers or to be an operator.

    Returns:
        The verdict, or NotImplemented for any other function.
    """
    if func is len and len(args) == 1 and is_container(args[0]):
        return handler(rec, state, offset, inputs)
    if any(func is known for known in _MOVING) and len(args) == 1 and is_sequence(args[0]):
        return moves_items(rec, handler, state, offset, inputs)
    name = getattr(func, "__name__", "")
    owner = _owner(func, args)
    if type(owner) is list and name in _FILLING:
        if name == "insert":
            rec.numbers.pin(rec.numbers.among(args[-2:-1]))
        return then_note(rec, owner, handler(rec, state, offset, inputs), inputs)
    if type(owner) is dict and not any(map(rec.numbers.find, args[1:])):
        if name in _OF_DICTS:
            return moves_items(rec, handler, state, offset, inputs)
    numbers = rec.numbers.among(inputs)
    of_sizes = rec.numbers.all_sizes(numbers) and rec.numbers.shapes is not None
    if not of_sizes and not _are_data(rec, name, numbers):
        positional = args[: len(args) - len(state.info.instrs[offset].kwnames)]
        if func is not torch.arange or not _has_length(rec, positional, numbers):
            return NotImplemented
    if not _is_operator(rec, func, args):
        return NotImplemented
    rec.numbers.offered = func
    return then_pin(rec, func, handler(rec, state, offset, inputs), numbers)


def _are_data(rec: StateRecorder, name: str, numbers: list[Number]) -> bool:
    """Whether an operator may take floats as the program has them: its result's shape and type
    are the same whatever they are.

    A random number is drawn when the graph has run already.
    """
    if float not in rec.numbers.into_graph or name.rstrip("_") not in _OF_ANY_FLOAT:
        return False
    return all(
        type(number.obj) is float
        and all(isinstance(s, Read | Argument | Item) for s in number.sources)
        for number in numbers
    )


def _has_length(rec: StateRecorder, args: list[Any], numbers: list[Number]) -> bool:
    """Whether ``arange(start, end)`` may take ints as the program has them.

    That makes as many numbers at each call, which the guard asks for.
    """
    ints = len(args) == 2 and all(type(arg) is int for arg in args)
    known = all(
        type(number.obj) is int and isinstance(source, Read | Argument | Size)
        for number in numbers
        for source in number.sources
    )
    if not ints or not known or int not in rec.numbers.into_graph:
        return False
    start, end = args
    count = rec.numbers.computed(operator.sub, (end, start))
    if count is None:
        return False
    rec.numbers.decided(operator.eq, (count.obj, end - start))
    return True


_OF_ANY_FLOAT = frozenset(
    {"add", "sub", "mul", "div", "divide", "true_divide", "rsub", "multiply", "subtract"}
    | {"fmod", "remainder", "floor_divide", "pow", "lerp", "addcmul", "addcdiv"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "isclose", "where", "masked_fill"}
    | {"clamp", "clamp_min", "clamp_max", "clip", "threshold", "hardtanh", "nan_to_num"}
    | {"full", "full_like", "new_full", "fill", "tensor", "scalar_tensor", "dropout"}
    | {"leaky_relu", "elu", "celu", "softplus", "layer_norm", "group_norm", "batch_norm"}
)
"""Operators, without the underscore of those in place: ``interpolate``, for one, is none of them,
since its factor makes the shape of its result."""


def then_pin(rec: StateRecorder, func: Any, verdict: Any, numbers: list[Number]) -> Any:
    """After the call: constants of those numbers that no operator of this name has recorded.

    Without a function, the operator may have any name.
    """
    rec.operators.taken = (None, set())
    opaque = verdict is _C.OPAQUE
    if verdict is not None and not opaque:
        rec.numbers.pin(numbers)
        return verdict
    name = getattr(func, "__name__", None)

    def pin(top: tuple[Any, ...]) -> None:
        recorded, taken = rec.operators.taken
        same = func is None or (name and getattr(recorded, "__name__", None) == name)
        left = [n for n in rec.numbers.plain(numbers) if not same or id(n) not in taken]
        rec.numbers.pin(left)

    return (_C.OPAQUE, pin) if opaque else pin


def _owner(func: Any, args: list[Any]) -> Any:
    """The list or dict whose method a function is."""
    if isinstance(func, types.MethodDescriptorType) and func.__objclass__ in (list, dict) and args:
        return args[0] if type(args[0]) is func.__objclass__ else None
    return func.__self__ if isinstance(func, types.BuiltinFunctionType) else None


def _is_operator(rec: StateRecorder, func: Any, args: list[Any]) -> bool:
    """Whether the mode sees a call as a whole, with its arguments as they are."""
    if isinstance(func, types.FunctionType):
        return rec.is_opaque(func.__code__, func.__module__ or "")
    if not isinstance(func, types.BuiltinFunctionType | types.MethodDescriptorType):
        return False
    rule = rec.database.lookup(func, args[0] if args else None)
    return rule is not None and rule.kind is Kind.OP


def packed(rec: StateRecorder, holder: Any) -> None:
    """A new tuple or dict of the arguments of a followed function."""
    if type(holder) in (tuple, dict):
        rec.numbers.note_held(holder)
    else:
        rec.numbers.pin(rec.numbers.among((holder,)))


def is_one_of(func: Any, known: tuple[Any, ...]) -> bool:
    """Whether a function is one of some, by identity."""
    return any(func is item for item in known)


def is_computed(func: Any, args: list[Any]) -> bool:
    """Whether the type of the result does not depend on the values."""
    types_ = {type(arg) for arg in args}
    return len(types_) == 1 and (types_ == {int} or (types_ == {float} and func is not int))
