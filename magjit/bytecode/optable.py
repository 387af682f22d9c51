"""The opcode table of CPython 3.11, 3.12 and 3.13: what each instruction is to MagJIT.

    table  ::= { opname: op }
    op     ::= Op | (arg -> Op)                     what depends on the argument is a function of it
    Op     ::= kind inputs posts read give reason   kind None: no event, reason says why none

An instruction with a kind makes an event.  ``inputs`` is the number of values that it takes from
the value stack, ``posts`` the number of its results that the next instruction finds on top of it;
``read`` and ``give`` say where the layout differs between versions and how it is normalised.  Every
name of ``dis.opmap`` on every supported version is in the table (a test checks it); only this
module knows how versions differ.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

VERSION = sys.version_info[:2]


COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}
"""What COMPARE_OP calls, by its argument."""


class EventKind(IntEnum):
    """What an instruction does that a recorder may have to know; in brackets its inputs."""

    LOAD_GLOBAL = 1  # ()
    LOAD_NAME = 2  # (namespace)
    LOAD_ATTR = 3  # (object); posts (value) or, for a method call, (method, self) or (NULL, value)
    LOAD_SUPER_ATTR = 4  # (super, class, self); posts as LOAD_ATTR
    STORE_ATTR = 5  # (value, object)
    DELETE_ATTR = 6  # (object)
    STORE_GLOBAL = 7  # (value)
    DELETE_GLOBAL = 8  # ()
    LOAD_DEREF = 9  # (cell)
    STORE_DEREF = 10  # (value, cell)
    DELETE_DEREF = 11  # (cell)
    LOAD_SUBSCR = 12  # (container, key)
    STORE_SUBSCR = 13  # (value, container, key)
    DELETE_SUBSCR = 14  # (container, key)
    CALL = 15  # (callable, self or NULL, *arguments)
    CALL_EX = 16  # (callable, arguments, keyword arguments or NULL)
    READ = 17  # values that an operator, test, comparison, iteration, unpacking or match reads
    INPLACE = 18  # (left, right) of an augmented assignment
    FOR_ITER = 19  # (iterator); posts (value), or (NULL) at the end
    MAKE_FUNCTION = 20  # ()
    IMPORT_NAME = 21  # (level, names)
    IMPORT_FROM = 22  # (module)
    BEFORE_WITH = 23  # (context manager); posts (bound exit, result of enter)
    IS_OP = 24  # (left, right)
    BINARY_OP = 25  # (left, right)
    RAISE = 26  # (exception, cause), either may be missing
    YIELD = 27  # (value); posts (what was sent)
    BUILD_CLASS = 28  # ()
    OTHER = 29  # nothing is understood of it
    STORE_NAME = 30  # (value, namespace)
    DELETE_NAME = 31  # (namespace)
    HOLD = 32  # what goes into a new object; posts (object), or (what is filled, *what goes in);
    # reported only for watched objects


#: Events that are not reported when every input is of a type the recorder calls trivial.
FILTERED = frozenset({EventKind.READ, EventKind.INPLACE, EventKind.FOR_ITER, EventKind.BINARY_OP})


class Read(IntEnum):
    """How the inputs of an event are read (``enum mj_input_mode`` in tracer.h)."""

    STACK = 0
    CELL = 1
    CALL = 2
    CALL13 = 3
    CALL_KW13 = 4
    CALL_EX = 5
    CALL_EX13 = 6
    WITH_EXIT = 7
    NAMESPACE = 8
    NONE_TEST = 9
    SLICE = 10
    BELOW_TOP = 11
    FILL = 12


class Give(IntEnum):
    """How the posts of an event are read (``enum mj_post_mode`` in tracer.h)."""

    STACK = 0x00
    METHOD13 = 0x10
    DROP_NULL = 0x20
    ITERATION = 0x30


Count = int | Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table."""

    kind: EventKind | None
    inputs: Count = 0
    posts: Count = 0
    read: Read = Read.STACK
    give: Give = Give.STACK
    reason: str = ""


TABLE: dict[str, Op | Callable[[int], Op]] = {}


def _skip(reason: str, *names: str) -> None:
    for name in names:
        TABLE[name] = Op(None, reason=reason)


def _event(kind: EventKind, inputs: Count, posts: Count, *names: str) -> None:
    for name in names:
        TABLE[name] = Op(kind, inputs, posts)


K = EventKind

# ---- no event ----
_skip(
    "moves values between the frame's own locals and its stack",
    *("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR"),
    *("LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"),
    *("LOAD_CONST", "POP_TOP", "PUSH_NULL", "SWAP", "COPY", "LOAD_CLOSURE", "LOAD_LOCALS"),
)
_skip(
    "only moves execution or prepares it",
    *("NOP", "CACHE", "RESUME", "EXTENDED_ARG", "JUMP_FORWARD", "JUMP_BACKWARD"),
    *("JUMP_BACKWARD_NO_INTERRUPT", "PRECALL", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS"),
    *("RETURN_GENERATOR", "END_FOR", "END_SEND"),
)
_skip("the exit of the frame is reported", "RETURN_VALUE", "RETURN_CONST")
_skip(
    "makes or fills an object that did not exist before",
    *("SET_FUNCTION_ATTRIBUTE", "ASYNC_GEN_WRAP"),
)
_skip(
    "handles an exception that is already under way",
    *("PUSH_EXC_INFO", "POP_EXCEPT", "RERAISE", "PREP_RERAISE_STAR", "CLEANUP_THROW"),
    *("LOAD_ASSERTION_ERROR",),
)
_skip(
    "never in the code that a code object shows",
    *("INTERPRETER_EXIT", "RESERVED", "EXIT_INIT_CHECK", "ENTER_EXECUTOR"),
)
_skip(
    "used inside CPython's compiler only",
    *("SETUP_FINALLY", "SETUP_CLEANUP", "SETUP_WITH", "POP_BLOCK", "JUMP", "JUMP_NO_INTERRUPT"),
    *("LOAD_SUPER_METHOD", "LOAD_ZERO_SUPER_METHOD", "LOAD_ZERO_SUPER_ATTR"),
    "STORE_FAST_MAYBE_NULL",
)

# ---- new objects ----
_event(K.HOLD, lambda arg: arg, 1, "BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_STRING")
_event(K.HOLD, lambda arg: 3 if arg == 3 else 2, 1, "BUILD_SLICE")
_event(K.HOLD, lambda arg: 2 * arg, 1, "BUILD_MAP")
_event(K.HOLD, lambda arg: arg + 1, 1, "BUILD_CONST_KEY_MAP")
_event(K.HOLD, 1, 1, "LIST_TO_TUPLE")
for _name in ("LIST_APPEND", "SET_ADD"):
    TABLE[_name] = Op(K.HOLD, lambda arg: arg + 1, 0, Read.FILL)
TABLE["MAP_ADD"] = Op(K.HOLD, lambda arg: arg + 2, 0, Read.FILL)

# ---- names and cells ----
_event(K.STORE_GLOBAL, 1, 0, "STORE_GLOBAL")
_event(K.DELETE_GLOBAL, 0, 0, "DELETE_GLOBAL")
TABLE["LOAD_GLOBAL"] = lambda arg: Op(
    K.LOAD_GLOBAL, 0, 1, give=Give.DROP_NULL if VERSION >= (3, 13) and arg & 1 else Give.STACK
)
TABLE["LOAD_NAME"] = Op(K.LOAD_NAME, 0, 1, Read.NAMESPACE)
TABLE["LOAD_FROM_DICT_OR_GLOBALS"] = Op(K.LOAD_NAME, 1, 1)
TABLE["STORE_NAME"] = Op(K.STORE_NAME, 1, 0, Read.NAMESPACE)
TABLE["DELETE_NAME"] = Op(K.DELETE_NAME, 0, 0, Read.NAMESPACE)
TABLE["LOAD_DEREF"] = Op(K.LOAD_DEREF, 0, 1, Read.CELL)
TABLE["LOAD_CLASSDEREF"] = Op(K.LOAD_DEREF, 0, 1, Read.CELL)
TABLE["LOAD_FROM_DICT_OR_DEREF"] = Op(K.LOAD_DEREF, 0, 1, Read.CELL)
TABLE["STORE_DEREF"] = Op(K.STORE_DEREF, 1, 0, Read.CELL)
TABLE["DELETE_DEREF"] = Op(K.DELETE_DEREF, 0, 0, Read.CELL)

# ---- attributes and items ----
_METHOD_GIVE = Give.METHOD13 if VERSION >= (3, 13) else Give.STACK


def _load_attr(arg: int) -> Op:
    if VERSION >= (3, 12) and arg & 1:
        return Op(K.LOAD_ATTR, 1, 2, give=_METHOD_GIVE)
    return Op(K.LOAD_ATTR, 1, 1)


def _load_super_attr(arg: int) -> Op:
    if arg & 1:
        return Op(K.LOAD_SUPER_ATTR, 3, 2, give=_METHOD_GIVE)
    return Op(K.LOAD_SUPER_ATTR, 3, 1)


TABLE["LOAD_ATTR"] = _load_attr
TABLE["LOAD_SUPER_ATTR"] = _load_super_attr
_event(K.LOAD_ATTR, 1, 2, "LOAD_METHOD")
_event(K.STORE_ATTR, 2, 0, "STORE_ATTR")
_event(K.DELETE_ATTR, 1, 0, "DELETE_ATTR")
_event(K.LOAD_SUBSCR, 2, 1, "BINARY_SUBSCR")
_event(K.STORE_SUBSCR, 3, 0, "STORE_SUBSCR")
_event(K.DELETE_SUBSCR, 2, 0, "DELETE_SUBSCR")
TABLE["BINARY_SLICE"] = Op(K.LOAD_SUBSCR, 3, 1, Read.SLICE)
TABLE["STORE_SLICE"] = Op(K.STORE_SUBSCR, 4, 0, Read.SLICE)

# ---- calls ----
_CALL_READ = Read.CALL13 if VERSION >= (3, 13) else Read.CALL
_CALL_EX_READ = Read.CALL_EX13 if VERSION >= (3, 13) else Read.CALL_EX
TABLE["CALL"] = Op(K.CALL, lambda arg: arg + 2, 1, _CALL_READ)
TABLE["CALL_KW"] = Op(K.CALL, lambda arg: arg + 3, 1, Read.CALL_KW13)
TABLE["CALL_FUNCTION_EX"] = Op(K.CALL_EX, lambda arg: 3 + (arg & 1), 1, _CALL_EX_READ)
TABLE["WITH_EXCEPT_START"] = Op(K.CALL, 4, 1, Read.WITH_EXIT)
_event(K.BEFORE_WITH, 1, 2, "BEFORE_WITH")
_event(K.MAKE_FUNCTION, 0, 1, "MAKE_FUNCTION")
_event(K.BUILD_CLASS, 0, 1, "LOAD_BUILD_CLASS")
_event(K.IMPORT_NAME, 2, 1, "IMPORT_NAME")
_event(K.IMPORT_FROM, 1, 1, "IMPORT_FROM")

# ---- values that are read ----
_event(K.READ, 1, 1, "UNARY_POSITIVE", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_INVERT", "TO_BOOL")
_event(K.READ, 1, 1, "GET_ITER", "GET_YIELD_FROM_ITER", "GET_LEN")
_event(K.READ, 1, 1, "MATCH_MAPPING", "MATCH_SEQUENCE")
_event(K.READ, 1, 1, "FORMAT_SIMPLE", "CONVERT_VALUE")
_event(K.READ, 2, 1, "COMPARE_OP", "CONTAINS_OP", "FORMAT_WITH_SPEC", "MATCH_KEYS")
_event(K.READ, 2, 1, "CHECK_EXC_MATCH", "CHECK_EG_MATCH")
_event(K.READ, 3, 1, "MATCH_CLASS")
_event(K.READ, 1, 0, "POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE")
_event(K.READ, 1, 0, "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE")
_event(K.READ, 1, 0, "POP_JUMP_BACKWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_TRUE")
_event(K.READ, 1, 0, "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP")
for _name in ("LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE"):
    TABLE[_name] = Op(K.READ, lambda arg: arg + 1, 0, Read.FILL)
_event(K.READ, 1, lambda arg: arg, "UNPACK_SEQUENCE")
_event(K.READ, 1, lambda arg: (arg & 0xFF) + 1 + (arg >> 8), "UNPACK_EX")
_event(K.READ, lambda arg: 2 if arg & 4 else 1, 1, "FORMAT_VALUE")
_event(K.IS_OP, 2, 1, "IS_OP")
for _name in (
    *("POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE"),
    *("POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE"),
    *("POP_JUMP_BACKWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE"),
):
    TABLE[_name] = Op(K.IS_OP, 1, 0, Read.NONE_TEST)

#: Symbols of BINARY_OP by argument; those from the fourteenth on are augmented assignments.
BINARY_SYMBOLS = (
    *("+", "&", "//", "<<", "@", "*", "%", "|", "**", ">>", "-", "/", "^"),
    *("+=", "&=", "//=", "<<=", "@=", "*=", "%=", "|=", "**=", ">>=", "-=", "/=", "^="),
)
TABLE["BINARY_OP"] = lambda arg: Op(K.BINARY_OP if arg < 13 else K.INPLACE, 2, 1)

# ---- control flow that others see ----
_event(K.RAISE, lambda arg: arg, 0, "RAISE_VARARGS")
_event(K.YIELD, 1, 1, "YIELD_VALUE")
TABLE["FOR_ITER"] = Op(K.FOR_ITER, 1, 1, give=Give.ITERATION)
TABLE["SEND"] = Op(K.FOR_ITER, 2, 1, Read.BELOW_TOP, Give.ITERATION)

# ---- not understood ----
_event(K.OTHER, 0, 0, "PRINT_EXPR", "IMPORT_STAR", "SETUP_ANNOTATIONS")
_event(K.OTHER, 1, 0, "GET_AWAITABLE", "GET_AITER", "GET_ANEXT", "BEFORE_ASYNC_WITH")
_event(K.OTHER, 2, 0, "END_ASYNC_FOR")

_INTRINSIC_1 = {
    3: Op(None, reason="handles an exception that is already under way"),  # STOPITERATION_ERROR
    5: Op(K.READ, 1, 1),  # UNARY_POSITIVE
    6: Op(K.HOLD, 1, 1),  # LIST_TO_TUPLE
    4: Op(None, reason="makes an object that did not exist before"),  # ASYNC_GEN_WRAP
}
_INTRINSIC_2 = {
    1: Op(None, reason="handles an exception that is already under way"),  # PREP_RERAISE_STAR
}
TABLE["CALL_INTRINSIC_1"] = lambda arg: _INTRINSIC_1.get(arg, Op(K.OTHER, 1, 1))
TABLE["CALL_INTRINSIC_2"] = lambda arg: _INTRINSIC_2.get(arg, Op(K.OTHER, 2, 1))

_NEVER_SHOWN = Op(None, reason="the interpreter writes it over other instructions, out of sight")


@functools.cache
def op_for(name: str, arg: int) -> Op:
    """The row of an instruction; raises KeyError for a name that is in no supported version."""
    if name.startswith("INSTRUMENTED_"):
        return _NEVER_SHOWN
    row = TABLE[name]
    return row if isinstance(row, Op) else row(arg)


def count(value: Count, arg: int) -> int:
    """A count of the table for this argument."""
    return value if isinstance(value, int) else value(arg)


# ---- structure ----

OPCODE = dis.opmap
OPNAME = dis.opname
HAVE_ARGUMENT = dis.HAVE_ARGUMENT

#: Where an instruction has EXTENDED_ARG prefixes, 3.11 makes one event, at the first prefix; later
#: versions make one at each prefix and one at the instruction.
PREFIX_HAS_EVENT = VERSION == (3, 11)

#: After these nothing falls through to the next instruction.
TERMINATORS = frozenset(
    {
        *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
        *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
    }
)

#: Opcodes that jump: forward by their argument (1) or backward (-1), from the next instruction.
JUMP_DIRECTION = {
    op: -1 if "BACKWARD" in dis.opname[op] else 1 for op in (*dis.hasjrel, *dis.hasjabs)
}

#: Units that the end of an iteration skips at the target of its jump: END_FOR and POP_TOP.
_SKIPPED_AT_END = {11: 0, 12: 1, 13: 2}[VERSION[1]]


FILLING = frozenset(
    {"LIST_APPEND", "SET_ADD", "MAP_ADD", "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE"}
)
"""Instructions that fill a container that lies deeper on the stack."""


def landing(opname: str, target: int) -> int:
    """Unit of the next event after the instruction has jumped."""
    return target + _SKIPPED_AT_END if opname == "FOR_ITER" else target


#: Instructions whose argument is an index into the fast locals: locals, cells, free variables.
LOCAL_READS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR"})
LOCAL_WRITES = frozenset({"STORE_FAST", "DELETE_FAST"})
CELL_READS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_CLOSURE"})
CELL_WRITES = frozenset({"STORE_DEREF", "DELETE_DEREF"})

FAST_LOCALS = LOCAL_READS | LOCAL_WRITES | CELL_READS | CELL_WRITES | {"MAKE_CELL"}

#: Instructions of two locals in one, an index in each nibble: what the high and the low one do.
PAIRS = {
    "LOAD_FAST_LOAD_FAST": ("load", "load"),
    "STORE_FAST_LOAD_FAST": ("store", "load"),
    "STORE_FAST_STORE_FAST": ("store", "store"),
}


def local_uses(opname: str, arg: int) -> tuple[tuple[str, int], ...]:
    """What an instruction does to fast locals: pairs of "load" or "store" and an index."""
    if opname in LOCAL_READS or opname in CELL_READS:
        return (("load", arg),)
    if opname in LOCAL_WRITES or opname in CELL_WRITES:
        return (("store", arg),)
    if opname in PAIRS:
        high, low = PAIRS[opname]
        return ((high, arg >> 4), (low, arg & 15))
    return ()


NAMED = frozenset(dis.opname[op] for op in dis.hasname)
CONSTANTS = frozenset({"LOAD_CONST", "RETURN_CONST", "KW_NAMES"})


def name_index(opname: str, arg: int) -> int:
    """Index into co_names: some instructions keep flags in the low bits of their argument."""
    if opname == "LOAD_SUPER_ATTR":
        return arg >> 2
    if opname == "LOAD_GLOBAL" or (opname == "LOAD_ATTR" and VERSION >= (3, 12)):
        return arg >> 1
    return arg


def compare_symbol(arg: int) -> str:
    """Symbol of COMPARE_OP."""
    return dis.cmp_op[arg >> {11: 0, 12: 4, 13: 5}[VERSION[1]]]


@functools.cache
def stack_effect(opcode: int, name: str, arg: int, jump: bool) -> int:
    """Change of the value stack's depth, with the corrections that ``dis.stack_effect`` needs.

    On 3.11 it counts the arguments of a call at PRECALL, which moves none of them.  On 3.11 and
    3.12 it leaves out the generator that RETURN_GENERATOR leaves for POP_TOP.
    """
    if name == "RETURN_GENERATOR":
        return 1
    if VERSION == (3, 11):
        if name == "PRECALL":
            return 0
        if name == "CALL":
            return -arg - 1
    takes_argument = opcode >= HAVE_ARGUMENT or VERSION >= (3, 13)
    return dis.stack_effect(opcode, arg if takes_argument else None, jump=jump)
