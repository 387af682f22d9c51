"""Programs made by hypothesis: containers, attributes, changes in place, branches, loops, breaks.

    program   ::= def program(x, state): statement* return everything
    statement ::= assignment | change | branch | loop | with | try | call | break

Everything that a program may change lives in `State`, of which each world has its own.
"""

from __future__ import annotations

import linecache
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

import magjit

TENSORS = ("x", "t", "u")
NUMBERS = ("n", "m")


class Box:
    """An object with a method that breaks and a method that does not."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.uses = 0

    def scaled(self, by: Any) -> torch.Tensor:
        self.uses += 1
        return self.value * by

    def decides(self) -> torch.Tensor:
        self.uses += 1
        if self.value.sum() > 0:
            return self.value + 1
        return self.value - 1


@dataclass
class State:
    """The outside world of a program."""

    items: list[Any] = field(default_factory=lambda: [torch.ones(3), torch.zeros(3)])
    table: dict[str, Any] = field(default_factory=lambda: {"a": 1.5, "b": 2})
    buffer: torch.Tensor = field(default_factory=lambda: torch.zeros(3))
    count: int = 0
    flag: bool = True
    box: Box = field(default_factory=lambda: Box(torch.ones(3)))


@magjit.disable
def outside(t: torch.Tensor, by: Any = 2) -> torch.Tensor:
    return t * by


def inside(t: torch.Tensor, by: Any, *more: Any) -> Any:
    total = t * by
    for item in more:
        total = total + item
    return total


def reads(t: torch.Tensor) -> float:
    return round(t.sum().item(), 4)


def breaks_deep(t: torch.Tensor, depth: int) -> torch.Tensor:
    if depth == 0:
        magjit.graph_break()
        return t.sin()
    return breaks_deep(t + depth, depth - 1) * 2


SCOPE = {
    name: value
    for name, value in globals().items()
    if name in ("torch", "magjit", "outside", "inside", "reads", "breaks_deep", "Box")
}

tensor = st.sampled_from(TENSORS)
number = st.sampled_from(NUMBERS)
constant = st.sampled_from(("0", "1", "2", "-1", "0.5"))
key = st.sampled_from(("'a'", "'b'", "'c'"))


@st.composite
def numbers(draw: Any) -> str:
    """An expression for a number."""
    return draw(
        st.one_of(
            constant,
            number,
            st.builds("{} + {}".format, number, constant),
            st.builds("{} * {}".format, number, number),
            st.builds("reads({})".format, tensor),
            st.builds("{}[0].item()".format, tensor),
            st.builds("float({}.max())".format, tensor),
            st.sampled_from(("state.count", "len(state.items)", "len(local)", "state.box.uses")),
            st.builds("state.table.get({}, 3)".format, key),
        )
    )


@st.composite
def tensors(draw: Any) -> str:
    """An expression for a tensor."""
    return draw(
        st.one_of(
            st.builds("{} + {}".format, tensor, tensor),
            st.builds("{} * {}".format, tensor, numbers()),
            st.builds("{} - ({})".format, tensor, numbers()),
            st.builds("{}.sin()".format, tensor),
            st.builds("{}.clone()".format, tensor),
            st.builds("torch.where({0} > 0, {0}, {1})".format, tensor, tensor),
            st.builds("inside({}, {}, {})".format, tensor, numbers(), tensor),
            st.builds("outside({})".format, tensor),
            st.builds("outside({}, by={})".format, tensor, numbers()),
            st.builds("breaks_deep({}, {})".format, tensor, st.sampled_from("012")),
            st.builds("state.box.scaled({})".format, numbers()),
            st.just("state.box.decides()"),
            st.just("state.buffer + 1"),
            st.sampled_from(("state.items[0] + x", "state.items[-1] * x")),
            st.just("helper(t)"),
            st.just("sum(torch.as_tensor(v) for v in local) + x"),
        )
    )


conditions = st.one_of(
    st.builds("{}.sum() > 0".format, tensor),
    st.builds("{} > {}".format, number, constant),
    st.builds("bool(({} > {}).any())".format, tensor, constant),
    st.builds("{} in state.table".format, key),
    st.sampled_from(("state.flag", "state.count % 2 == 0", "len(local) > 1", "not state.items")),
    st.builds("{}.mean() > 0 and {} < 3".format, tensor, number),
)


@st.composite
def simple(draw: Any) -> str:
    """A statement in one line."""
    return draw(
        st.one_of(
            st.builds("{} = {}".format, tensor, tensors()),
            st.builds("{} = {}".format, number, numbers()),
            st.builds("{0} = {0}.clone(); {0}.add_({1})".format, tensor, numbers()),
            st.builds("local.append({})".format, st.one_of(tensor, number)),
            st.builds("state.items.append({})".format, st.one_of(tensors(), numbers())),
            st.builds("state.items[0] = {}".format, tensors()),
            st.just("state.items[:] = state.items[-3:]"),
            st.builds("state.table[{}] = {}".format, key, st.one_of(numbers(), tensors())),
            st.builds("seen[{}] = {}".format, key, numbers()),
            st.builds("state.buffer.add_({})".format, tensor),
            st.builds("state.buffer[1:].mul_({})".format, constant),
            st.builds("state.box = Box({})".format, tensor),
            st.builds("state.box.value = {}".format, tensors()),
            st.just("state.count += 1"),
            st.just("if 'b' in state.table: del state.table['b']"),
            st.just("if hasattr(state.box, 'name'): del state.box.name"),
            st.builds("state.box.name = {}".format, numbers()),
            st.builds(
                "u = torch.zeros(3); u[1:].add_({}[1:]); seen['u'] = bool(u.sum() > 0)".format,
                tensor,
            ),
            st.just("state.flag = not state.flag"),
            st.just("magjit.graph_break()"),
            st.just("seen['grad'] = torch.is_grad_enabled()"),
            st.builds("pairs = [(v, {}) for v in local]".format, number),
            st.builds("local += [{}[j].item() for j in range(2)]".format, tensor),
            st.builds("print({}, state.count)".format, number),
            st.sampled_from(("rest = list(state.table)", "seen.update(state.table)")),
            st.just("pairs = [(k, len(local)) for k in state.table]"),
            st.builds("print(f'{{{}}} {{{}:.3f}} {{n!r}}')".format, number, number),
            st.builds("seen[{}] = '%s of %s' % ({}, n)".format, key, number),
            st.builds("state.box.name = str({}) + '{{}}'.format({})".format, number, number),
            st.builds("n, m = {}, {}".format, numbers(), numbers()),
            st.builds("first, *rest = {}.tolist()".format, tensor),
        )
    )


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@st.composite
def blocks(draw: Any, depth: int, in_loop: bool) -> list[str]:
    """Some statements."""
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        lines += draw(statements(depth, in_loop))
    return lines


@st.composite
def statements(draw: Any, depth: int, in_loop: bool) -> list[str]:
    """One statement, with all that is in it."""
    kinds = ["simple"] * 5
    if depth > 0:
        kinds += ["if", "if", "for", "for", "while", "with", "try", "turn"]
    if in_loop:
        kinds += ["leave"]
    kind = draw(st.sampled_from(kinds))
    if kind == "simple":
        return [draw(simple())]
    if kind == "leave":
        return [f"if {draw(conditions)}:", f"    {draw(st.sampled_from(('break', 'continue')))}"]
    body = indented(draw(blocks(depth - 1, in_loop or kind in ("for", "while"))))
    if kind == "if":
        lines = [f"if {draw(conditions)}:", *body]
        if draw(st.booleans()):
            lines += ["else:", *indented(draw(blocks(depth - 1, in_loop)))]
        return lines
    if kind == "turn":  # Every other call goes another way.
        return ["state.count += 1", "if state.count % 2 == 0:", *body]
    if kind == "for":
        over = draw(
            st.sampled_from(
                (
                    *("i in range(3)", "i in range(len(local))", "i, v in enumerate((x, t))"),
                    *("v in x", "k in list(state.table)", "v, w in zip([x, t], 'ab')"),
                    "i in range(x.size(0))",
                )
            )
        )
        return [f"for {over}:", *body]
    if kind == "while":
        return [
            f"steps{depth} = 0",
            f"while steps{depth} < 3 and {draw(conditions)}:",
            f"    steps{depth} += 1",
            *body,
        ]
    if kind == "with":
        return ["with torch.no_grad():", *body]
    lines = ["try:", *body]
    lines += [f"    {draw(st.sampled_from(('int(str(n) + chr(120))', 'pass', 'local[7]')))}"]
    return [*lines, "except (ValueError, IndexError):", *indented([draw(simple())])]


@st.composite
def sources(draw: Any) -> str:
    """The source of a program."""
    body: list[str] = []
    for _ in range(draw(st.integers(1, 5))):
        body += draw(statements(2, False))
    head = [
        "t, u, n, m = x + 1, x * 2, 1, 2.5",
        "local, seen, pairs, first, rest = [x], {}, [], None, []",
        "def helper(v):",
        "    return v * m + len(local)",
    ]
    tail = ["return x, t, u, n, m, local, seen, pairs, first, rest, state"]
    return "\n".join(["def program(x, state):", *indented([*head, *body, *tail])]) + "\n"


_count = 0


def made(source: str) -> Any:
    """The program of a source, with globals of its own."""
    global _count
    _count += 1
    filename = f"<generated program {_count}>"
    scope = {"__name__": "generated", **SCOPE}
    exec(compile(source, filename, "exec"), scope)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    function = scope["program"]
    assert isinstance(function, types.FunctionType)
    return function


CHANGES = (
    "pass",
    "state.count += 5",
    "state.flag = not state.flag",
    "state.items.append(torch.full((3,), 2.0))",
    "state.items.clear()",
    "state.items[0:1] = [2.5]",
    "state.table['a'] = 7",
    "state.table.pop('b', None)",
    "state.table['c'] = 1",
    "state.table = {'c': 2, 'a': 1.5}",
    "state.buffer = torch.ones(3)",
    "state.buffer.neg_()",
    "state.box.value = torch.zeros(3)",
    "state.box.uses = 3",
)
changes = st.lists(st.sampled_from(CHANGES), min_size=3, max_size=3)
