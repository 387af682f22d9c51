"""What instructions do with the numbers of a run that may change; see `magjit.refgraph.numbers`."""

from __future__ import annotations

import operator
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from magjit import _C
from magjit.annotations import Rule
from magjit.bytecode import EventKind
from magjit.refgraph import relations as r
from magjit.refgraph.frames import FrameState, arguments
from magjit.refgraph.generators import GLOBAL_GENERATORS
from magjit.refgraph.kinds import (
    HEAP_TYPE,
    class_lookup,
    instance_dict,
    is_atom,
    is_data_descriptor,
)
from magjit.refgraph.nodes import ABSENT, Leaf
from magjit.refgraph.numbers import BINARY, COMPARE, NUMBERS, Drawn, Number, Read, may_change
from magjit.refgraph.recorder import Handler, StateRecorder
from magjit.refgraph.stack import running_frame

Post = Callable[[tuple[Any, ...]], None]

_DIVISIONS = frozenset({"/", "//", "%"})
_UNARY: dict[str, Callable[..., Any]] = {
    "UNARY_NEGATIVE": operator.neg,
    "UNARY_POSITIVE": operator.pos,
    "CALL_INTRINSIC_1": operator.pos,
    "UNARY_INVERT": operator.invert,
}
_COMPUTING: tuple[Any, ...] = (float, int, abs, operator.index, min, max)
"""Functions whose result is a number again, if their arguments are."""
_TYPE_ONLY: tuple[Any, ...] = (isinstance, type)
"""Functions that ask for the type, which the guard compares."""


# -- sources ------------------------------------------------------------------------------------


def read_counter(rec: StateRecorder, obj: Any, name: str, read: Callable[..., None]) -> Post | None:
    """An attribute that holds a number; ``read`` is what is done for any attribute."""
    namespace = instance_dict(obj)
    value = namespace.get(name) if type(namespace) is dict else None
    if type(value) not in NUMBERS or not may_change(type(obj), name):
        read(rec, obj, name)
        return None
    relation = r.Item.of(name)
    node = rec.graph.node_of(namespace)
    if node is None or relation not in node.first.refs:
        read(rec, obj, name)
        node = rec.graph.node_of(namespace)
        found = node.first.refs.get(relation) if node is not None else None
        if node is None or type(found) is not Leaf or found.value is not value:
            return None
        return _in_place_of(rec, rec.numbers.read(node, relation, value), value)
    number = rec.numbers.known_read(node, relation)
    if number is None or relation in node.written or not number.live:
        read(rec, obj, name)
        return None
    return _in_place_of(rec, number, value)


def _in_place_of(rec: StateRecorder, number: Number, value: Any) -> Post:
    """After the instruction: the number's own object on the stack, where the value is now."""
    code = rec.state.code if rec.state is not None else None

    def replace(top: tuple[Any, ...]) -> None:
        if len(top) == 1 and type(top[0]) is type(value) and top[0] == value:
            _put_on_stack(rec, code, number)
        else:
            rec.numbers.pin([number])

    return replace


def _put_on_stack(rec: StateRecorder, code: Any, number: Number) -> None:
    """The number's own object in place of what is on top of the stack."""
    frame = running_frame(code)
    if frame is None:
        rec.numbers.pin([number])
    else:
        _C.replace_stack(frame, 0, number.obj)


_DRAWS: dict[type, frozenset[str]] = {
    random.Random: frozenset({"random", "getrandbits"}),
    np.random.RandomState: frozenset(
        {"beta", "binomial", "chisquare", "choice", "dirichlet", "exponential", "f", "gamma"}
        | {"geometric", "gumbel", "hypergeometric", "laplace", "logistic", "lognormal"}
        | {"logseries", "multinomial", "multivariate_normal", "negative_binomial"}
        | {"noncentral_chisquare", "noncentral_f", "normal", "pareto", "permutation", "poisson"}
        | {"power", "rand", "randint", "randn", "random", "random_integers", "random_sample"}
        | {"rayleigh", "standard_cauchy", "standard_exponential", "standard_gamma"}
        | {"standard_normal", "standard_t", "triangular", "tomaxint", "uniform", "vonmises"}
        | {"wald", "weibull", "zipf"}
    ),
}
"""Methods of generators that only draw."""


def draw(
    rec: StateRecorder,
    rule: Rule,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    read: Callable[[Any], None],
) -> Post | None:
    """A method of a generator of random numbers; ``read`` is for its arguments."""
    generator = getattr(func, "__self__", None)
    if generator is None and args:  # a method that is bound by the call
        generator, *rest = args
        args = tuple(rest)
    reason = f"calls {rule.name}: {rule.reason or rule.kind.value}"
    known = any(generator is known for known in GLOBAL_GENERATORS)
    if (
        not known
        or func.__name__ not in _DRAWS[type(generator)]
        or rec.called_back
        or rec.checkpoint is not None
    ):
        rec.split(reason)
        return None
    for value in (*args, *kwargs.values()):
        read(value)
    try:
        constants = tuple(map(_constant, args)), {k: _constant(v) for k, v in kwargs.items()}
    except TypeError:
        rec.split(reason)
        return None
    rec.numbers.pin(rec.numbers.among((*args, *kwargs.values())))
    rec.changes += 1
    location, frame_code = rec.location(), rec.state.code if rec.state is not None else None

    def note(top: tuple[Any, ...]) -> None:
        drawn = Drawn(getattr(generator, func.__name__), *constants, top[-1], reason, location)
        number = rec.numbers.draw(drawn)
        if number is not None:
            _put_on_stack(rec, frame_code, number)

    return note


def _constant(value: Any) -> Any:
    """A copy of an argument; raises TypeError where it is not made of constants."""
    if is_atom(value):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_constant, value))
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return value.copy()
    raise TypeError


# -- instructions -------------------------------------------------------------------------------


def use_numbers(
    rec: StateRecorder,
    kind: EventKind,
    handler: Handler,
    state: FrameState,
    offset: int,
    inputs: tuple[Any, ...],
) -> Any:
    """An instruction that uses numbers of the run."""
    numbers = rec.numbers.among(inputs)
    if kind is not EventKind.IS_OP and not any(number.live for number in numbers):
        return handler(rec, state, offset, inputs)
    use = _USES.get(kind, _pins)
    return use(rec, handler, state, offset, inputs)


def _pins(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    rec.numbers.pin(rec.numbers.among(inputs))
    return handler(rec, state, offset, inputs)


def _read(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    instr = state.info.instrs[offset]
    if instr.opname == "COMPARE_OP" and _goes_into_graph(rec, inputs):
        return handler(rec, state, offset, inputs)
    if all(type(value) in NUMBERS for value in inputs):
        if instr.opname == "COMPARE_OP":
            rec.numbers.decided(COMPARE[instr.argval], inputs)
            return None
        if instr.opname in _TESTS or instr.opname.startswith(("POP_JUMP", "JUMP_IF")):
            rec.numbers.decided(operator.truth, inputs)
            return None
        if instr.opname in _UNARY:
            return _compute(rec, _UNARY[instr.opname], inputs)
    if instr.opname == "UNPACK_SEQUENCE":
        return handler(rec, state, offset, inputs)
    return _pins(rec, handler, state, offset, inputs)


_TESTS = frozenset({"UNARY_NOT", "TO_BOOL"})


def _arithmetic(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    symbol = state.info.instrs[offset].argval.rstrip("=")
    func = BINARY.get(symbol)
    if func is not None and _goes_into_graph(rec, inputs):
        return handler(rec, state, offset, inputs)
    if func is None or not all(type(value) in NUMBERS for value in inputs):
        return _pins(rec, handler, state, offset, inputs)
    if symbol in _DIVISIONS:
        rec.numbers.decided(operator.truth, inputs[1:])
    return _compute(rec, func, inputs)


def _goes_into_graph(rec: StateRecorder, inputs: tuple[Any, ...]) -> bool:
    """A tensor and a number, in an operator whose result's shape does not depend on the number.

    A random number is drawn when the graph has run already.
    """
    numbers = rec.numbers
    if not numbers.into_graph or rec.checkpoint is not None or rec.function_calls:
        return False
    if not any(type(value) in (torch.Tensor, torch.nn.Parameter) for value in inputs):
        return False
    sources = [source for number in numbers.among(inputs) for source in number.sources]
    return all(isinstance(source, Read) for source in sources)


def _compute(rec: StateRecorder, func: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """The instruction computes a number; the recorder does the same beside."""
    number = rec.numbers.computed(func, operands)
    if number is None:
        rec.numbers.pin(rec.numbers.among(operands))
        return None
    return _in_place_of(rec, number, number.obj)


def _stores(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    """An outside place, where the program finds it again by an instruction, or opens it."""
    kept = _keeps_attribute(rec, inputs[1], state.info.instrs[offset].argval)
    rec.numbers.pin(rec.numbers.among(inputs[1:] if kept else inputs))
    return handler(rec, state, offset, inputs)


def _keeps_attribute(rec: StateRecorder, obj: Any, name: Any) -> bool:
    """Whether an attribute of an outside object gives back the very object that is stored."""
    cls = type(obj)
    setter = class_lookup(cls, "__setattr__")
    if rec.graph.node_of(obj) is None or not isinstance(name, str):
        return False
    if setter is not object.__setattr__ and not isinstance(setter, types.FunctionType):
        return False
    found = class_lookup(cls, name)
    if found is ABSENT or not is_data_descriptor(found):
        return type(instance_dict(obj)) is dict
    if isinstance(found, types.MemberDescriptorType):
        return bool(found.__objclass__.__flags__ & HEAP_TYPE)
    return isinstance(class_lookup(type(found), "__set__"), types.FunctionType) or (
        type(found) is property and isinstance(found.fset, types.FunctionType)
    )


def pin_inside(rec: StateRecorder, value: Any, depth: int = 0) -> None:
    """C code reads an object as a whole: the numbers in it, and in what it holds."""
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    elif isinstance(value, dict):
        parts = [*dict.keys(value), *dict.values(value)]
    else:
        parts = list((instance_dict(value) or {}).values())
    rec.numbers.pin(rec.numbers.among(parts))
    for part in parts if depth < _DEEPEST else ():
        if not is_atom(part) and not isinstance(part, torch.Tensor | types.ModuleType | type):
            pin_inside(rec, part, depth + 1)


_DEEPEST = 3


def _identity(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    """No number is None; two numbers are compared as the objects that they stand for."""
    if any(value is None for value in inputs):
        return handler(rec, state, offset, inputs)
    frame = running_frame(state.code)
    for depth, value in enumerate(reversed(inputs)):
        number = rec.numbers.find(value)
        if frame is not None and number is not None and type(value) in NUMBERS:
            _C.replace_stack(frame, depth, number.original)
    return _pins(rec, handler, state, offset, inputs)


def _call(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    func, receiver, *args = inputs
    if receiver is not _C.NULL:
        args = [receiver, *args]
    named = bool(state.info.instrs[offset].kwnames)
    if isinstance(func, types.BuiltinFunctionType | type) and not named:
        if _is_one_of(func, _TYPE_ONLY) or func.__name__ == "__instancecheck__":
            return handler(rec, state, offset, inputs)
        if _is_one_of(func, _COMPUTING) and _is_computed(func, args):
            handler(rec, state, offset, inputs)
            return _compute(rec, func, tuple(args))
    numbers = rec.numbers.among(inputs)
    state.entered = False
    verdict = handler(rec, state, offset, inputs)
    if verdict is None and _is_setattr(rec, func, args):
        return None
    if verdict is not None or not _has_code(func):
        rec.numbers.pin(numbers)
        return verdict

    def pin_if_not_followed(top: tuple[Any, ...]) -> None:
        if not state.entered:
            rec.numbers.pin(numbers)

    return pin_if_not_followed


def _is_one_of(func: Any, known: tuple[Any, ...]) -> bool:
    return any(func is item for item in known)


def _is_computed(func: Any, args: list[Any]) -> bool:
    """Whether the type of the result does not depend on the values."""
    types_ = {type(arg) for arg in args}
    return len(types_) == 1 and (types_ == {int} or (types_ == {float} and func is not int))


def _has_code(func: Any) -> bool:
    """Whether the call enters a frame with just these arguments; `entered` sees if so."""
    if isinstance(func, types.FunctionType):
        return True
    if isinstance(func, type):
        return False
    return isinstance(class_lookup(type(func), "__call__"), types.FunctionType)


def _is_setattr(rec: StateRecorder, func: Any, args: list[Any]) -> bool:
    """Whether ``object.__setattr__`` stores a number where `_stores` would let it."""
    if isinstance(func, types.MethodWrapperType):
        args = [func.__self__, *args]
    elif not isinstance(func, types.WrapperDescriptorType):
        return False
    return func.__name__ == "__setattr__" and len(args) == 3 and _keeps_attribute(rec, *args[:2])


def _holds(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    numbers = rec.numbers.among(inputs)
    opname = state.info.instrs[offset].opname
    if opname == "BUILD_MAP":
        rec.numbers.pin(rec.numbers.among(inputs[::2]))
    if opname not in _HOLDERS or len(inputs) > _MOST_HELD:
        rec.numbers.pin(numbers)
        return None
    return lambda top: rec.numbers.held(top[-1], numbers)


def _keeps(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    """A cell: only the program's own instructions look into it."""
    return handler(rec, state, offset, inputs)


_HOLDERS = frozenset(
    {"BUILD_TUPLE", "BUILD_LIST", "BUILD_CONST_KEY_MAP", "BUILD_MAP"}
    | {"LIST_TO_TUPLE", "CALL_INTRINSIC_1"}
)
_MOST_HELD = 16


def _takes_apart(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    """An item of a tuple or a list that holds numbers; or of a tensor, by a number."""
    if isinstance(inputs[0], torch.Tensor) and _goes_into_graph(rec, inputs):
        if type(inputs[1]) in (int, list, tuple):
            return handler(rec, state, offset, inputs)
    whole = type(inputs[1]) not in (int, str)
    rec.numbers.pin(rec.numbers.among(inputs if whole else inputs[1:]))
    return handler(rec, state, offset, inputs)


_USES: dict[EventKind, Callable[..., Any]] = {
    EventKind.READ: _read,
    EventKind.BINARY_OP: _arithmetic,
    EventKind.INPLACE: _arithmetic,
    EventKind.STORE_ATTR: _stores,
    EventKind.STORE_DEREF: _keeps,
    EventKind.IS_OP: _identity,
    EventKind.CALL: _call,
    EventKind.HOLD: _holds,
    EventKind.LOAD_SUBSCR: _takes_apart,
}


# -- frames -------------------------------------------------------------------------------------


def entered(rec: StateRecorder, code: types.CodeType, followed: bool, values: list[Any]) -> None:
    """A frame is entered: what is not followed, and what is packed up, may be used unseen."""
    args, kwargs = arguments(code, values)
    if followed and rec.state is not None:
        rec.state.entered = True
    named = code.co_argcount + code.co_kwonlyargcount
    used = [*args[named:], *kwargs.values()] if followed else [*args, *kwargs.values()]
    rec.numbers.pin(rec.numbers.among(used))


def returned(rec: StateRecorder, state: FrameState, result: Any) -> None:
    """A frame gives a number to its caller: to the program's own call, or to C code."""
    number = rec.numbers.find(result)
    if number is not None and number.live and not _is_direct(state):
        rec.numbers.pin([number])


def _is_direct(state: FrameState) -> bool:
    """Whether an instruction of the program, or the compiled call itself, called this function."""
    caller = state.caller
    if caller is None:
        return True
    func = caller.calling
    if isinstance(func, types.MethodType):
        func = func.__func__
    if not isinstance(func, types.FunctionType) and not isinstance(func, type):
        func = class_lookup(type(func), "__call__")
    return isinstance(func, types.FunctionType) and func.__code__ is state.code


def hold(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    """Nothing but `use_numbers` asks for it."""


HANDLERS: dict[EventKind, Handler] = {EventKind.HOLD: hold}
