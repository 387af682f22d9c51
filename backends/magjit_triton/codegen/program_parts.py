"""What written programs consist of: steps, and what their lines call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from magjit.plugin.aliases import may_alias
from magjit_triton.codegen.printer import expression
from magjit_triton.codegen.runtime import interpreting

__all__ = ["Step", "as_planned", "as_tuple", "attribute_of", "current_stream", "makes_memory"]


@dataclass
class Step:
    """A part of the program.

    Attributes:
        lines: what runs.
        reads: names of the memory that it reads or writes.
        makes: names that it assigns.
        fresh: those of them that are memory of their own.
        allocations: name → the line that makes its memory.
        overwritten: name → memory that may become its own, and the line that does so.
        shown: names of memory in which results of library operators may lie.
    """

    lines: list[str]
    reads: set[str]
    makes: set[str]
    fresh: set[str]
    allocations: dict[str, str] = field(default_factory=dict)
    overwritten: dict[str, dict[str, str]] = field(default_factory=dict)
    shown: set[str] = field(default_factory=set)

    def memory(self, free: set[str]) -> list[str]:
        """The lines that make memory, out of what is read here for the last time where possible."""
        lines = []
        left = set(free)
        for name, line in self.allocations.items():
            chosen = sorted(left & set(self.overwritten[name]))
            if chosen:
                left.discard(chosen[0])
                line = self.overwritten[name][chosen[0]]
            lines.append(line)
        return lines


def makes_memory(node: Node) -> bool:
    """Whether a library operator's result is memory that nothing else refers to."""
    maker: Any = node
    if node.target is operator.getitem:
        maker, which = node.args
        if sum(user.args[1:] == (which,) for user in maker.users) != 1:
            return False  # One result under two names.
    schema = getattr(maker.target, "_schema", None)
    if schema is None or any(one.alias_info is not None for one in schema.returns):
        return False
    return not may_alias(maker)


def as_tuple(sizes: Sequence[sympy.Expr]) -> str:
    """Sizes or strides as the program writes them."""
    inner = ", ".join(expression(size) for size in sizes)
    return f"({inner},)" if sizes else "()"


def as_planned(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A library's result with the strides that the kernels were made for."""
    if value.stride() == strides or not value.numel():
        return value
    if any(s != t for s, t, n in zip(value.stride(), strides, value.shape, strict=True) if n > 1):
        planned = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
        return planned.copy_(value)
    return value


def current_stream() -> int:
    """The handle of torch's current CUDA stream; 0 in an interpreter."""
    if interpreting():
        return 0
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


def attribute_of(gm: GraphModule, path: str) -> Any:
    """What a ``get_attr`` node names."""
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value
