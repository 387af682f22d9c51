"""Typed errors: each says what is wrong, where, and what the user can do about it."""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType


def line_of(code: CodeType, offset: int) -> int:
    """The line of an instruction."""
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno


@dataclass(frozen=True, slots=True)
class Location:
    """A place in the user's program."""

    filename: str
    line: int
    function: str

    @classmethod
    def of(cls, code: CodeType, offset: int) -> Location:
        """The place of an instruction."""
        return cls(code.co_filename, line_of(code, offset), code.co_qualname)

    def __str__(self) -> str:
        return f"{self.filename}:{self.line} in {self.function}"


class MagJITError(Exception):
    """Base of every error that MagJIT raises.

    Args:
        reason: what is wrong, as one sentence.
        remedy: a way out, when there is one.
        location: where in the user's program, when that is known.
    """

    def __init__(
        self, reason: str, *, remedy: str | None = None, location: Location | None = None
    ) -> None:
        self.reason = reason
        self.remedy = remedy
        self.location = location
        super().__init__(reason)

    def __str__(self) -> str:
        lines = [self.reason]
        if self.location is not None:
            lines.append(f"  at {self.location}")
        if self.remedy:
            lines.append(f"  way out: {self.remedy}")
        return "\n".join(lines)


class ArgumentError(MagJITError, TypeError):
    """An argument of a public function has the wrong type or value."""


class UnsupportedPythonError(MagJITError, ImportError):
    """This Python or torch version is not one that MagJIT runs on."""


class GraphBreakError(MagJITError):
    """With ``fullgraph=True``: the program could not be captured as one graph."""


class RecompileError(MagJITError):
    """A call needs a new capture, and the stance is ``"fail_on_recompile"``."""


class AnnotationError(MagJITError):
    """An annotation file is invalid; the message names the file and the line."""


class UnknownBackendError(MagJITError, LookupError):
    """No backend has the given name."""


class BackendError(MagJITError):
    """A backend failed to compile a graph, or refuses it."""


class BackendOptionError(ArgumentError):
    """A backend does not take the given ``mode`` or ``options``."""


class Unrebuildable(MagJITError):
    """An object that leaves the program cannot be built again at a replay.

    Attributes:
        path: how the object is reached from the result, such as ``result['a'][0]``.
        obj: the object, if it is one.
    """

    def __init__(
        self,
        reason: str,
        *,
        path: str = "result",
        remedy: str | None = None,
        obj: object = None,
    ) -> None:
        super().__init__(reason, remedy=remedy)
        self.path = path
        self.obj = obj
