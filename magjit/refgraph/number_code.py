"""Numbers of a record as straight-line Python, which takes a fifth of the time of walking them.

number(steps.first) ... →   n0 = get(h0, 'first')
n1 = n0 + 1
return [n1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from magjit.refgraph.number_values import (
    Argument,
    Length,
    Number,
    Reads,
    Size,
    binary_symbol,
)

__all__ = ["checked", "computed"]

_ARITHMETIC = {"+", "-", "*", "/", "//", "%", "&", "|", "^", "<", "<=", "==", "!=", ">", ">="}


def computed(reads: Reads, numbers: Sequence[Number]) -> Callable[..., list[Any]]:
    """A function of the objects of the reads, which gives what the numbers are now."""
    code = _Code(reads)
    names = [code.name_of(number) for number in numbers]
    return code.function([*code.lines, f"return [{', '.join(names)}]"])


def checked(reads: Reads, outcomes: Sequence[tuple[Number, bool]]) -> Callable[..., bool]:
    """A function of the objects of the reads: whether each number is as true as it was.

    What raises now did not in the run.
    """
    code = _Code(reads)
    for number, expected in outcomes:
        name = code.name_of(number)
        code.lines.append(f"if {'not ' if expected else ''}{name}: return False")
    body = [f"    {line}" for line in [*code.lines, "return True"]]
    return code.function(["try:", *body, "except Exception:", "    return False"])


class _Code:
    """Lines that compute numbers, each once, before it is first needed."""

    def __init__(self, reads: Reads) -> None:
        self.lines: list[str] = []
        self._names: dict[int, str] = {}
        self._constants: dict[str, Any] = {"get": dict.__getitem__}
        self._parameters = [f"h{position}" for position in range(len(reads.reads))]
        for parameter, source in zip(self._parameters, reads.reads, strict=True):
            match source:
                case Argument():
                    self._names[id(source)] = parameter
                case Length():
                    self._bind(source, f"len({parameter})")
                case Size(dim=dim):
                    self._bind(source, f"int({parameter}.size({dim}))")
                case _:
                    self._bind(source, f"get({parameter}, {self._constant(source.key)})")

    def name_of(self, number: Number) -> str:
        """The local variable, or constant, that a number is."""
        for part in _in_order(number, self._names):
            if part.source is not None:
                source = part.source
                known = self._constant(source.value) if source.pinned else self._names[id(source)]
                self._names[id(part)] = known
            else:
                self._bind(part, self._called(part))
        return self._names[id(number)]

    def _called(self, number: Number) -> str:
        assert number.func is not None
        parts = [
            self._names[id(arg)] if isinstance(arg, Number) else self._constant(arg)
            for arg in number.args
        ]
        symbol = binary_symbol(number.func)
        if symbol in _ARITHMETIC and len(parts) == 2:
            return f"{parts[0]} {symbol} {parts[1]}"
        return f"{self._constant(number.func)}({', '.join(parts)})"

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _bind(self, what: Any, expression: str) -> None:
        name = self._names[id(what)] = f"n{len(self._names)}"
        self.lines.append(f"{name} = {expression}")

    def function(self, lines: Sequence[str]) -> Callable[..., Any]:
        """The function of these lines."""
        body = "\n".join(f"    {line}" for line in lines)
        namespace = dict(self._constants)
        exec(f"def of_numbers({', '.join(self._parameters)}):\n{body}", namespace)
        made: Callable[..., Any] = namespace["of_numbers"]
        return made


def _in_order(number: Number, known: dict[int, str]) -> Iterator[Number]:
    """The numbers that one is made of, each after its own parts, without those that are known."""
    pending = [number]
    while pending:
        last = pending[-1]
        missing = [arg for arg in last.args if isinstance(arg, Number) and id(arg) not in known]
        if id(last) in known:
            pending.pop()
        elif missing:
            pending += missing
        else:
            yield last
            pending.pop()
