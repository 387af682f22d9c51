"""A function under the triton backend beside eager mode, and what its graph still copies."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

import magjit
from magjit.plugin.aliases import is_alias
from magjit.plugin.virtual_tensors.rules import rules
from magjit_triton import backend

aten = torch.ops.aten


@contextmanager
def watched() -> Iterator[list[GraphModule]]:
    """The graphs that the backend runs, as they are before operators get their short names."""
    passes = sys.modules["magjit_triton.passes"]
    found: list[GraphModule] = []
    original = passes.call_directly

    def watching(gm: GraphModule) -> None:
        found.append(gm)
        gm.meta["targets"] = [node.target for node in gm.graph.nodes if node.op == "call_function"]
        gm.meta["copies"] = copies_in(gm)
        for node in gm.graph.nodes:
            if node.target is aten.empty_strided.default:
                node.target = poisoned
        original(gm)

    passes.call_directly = watching
    try:
        yield found
    finally:
        passes.call_directly = original


class _Noting(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.INFO)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@contextmanager
def noted() -> Iterator[list[str]]:
    """What backends and those who call them tell the log meanwhile."""
    found: list[str] = []
    handler = _Noting(found)
    logger = logging.getLogger("magjit.plugin.context")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Memory in which what is never written shows."""
    made = torch.empty_strided(*args, **kwargs)
    if made.dtype == torch.bool:
        return made.fill_(True)
    return made.fill_(float("nan") if made.is_floating_point() else 77)


def copies_in(gm: GraphModule) -> list[str]:
    """The operators of a graph that only move data and are no views."""
    return [
        node.name
        for node in gm.graph.nodes
        if node.op == "call_function"
        and (
            node.target in (aten.copy_.default, aten.index_copy.default, aten.index_put.default)
            or (node.target in rules and not is_alias(node))
        )
    ]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return magjit.compile(function, backend=backend, fullgraph=True, **options)


def run_beside_eager(
    function: Callable[..., Any],
    arguments: Sequence[torch.Tensor],
    tolerance: float = 0.0,
    functional: bool = True,
    **options: Any,
) -> list[GraphModule]:
    """Results, their strides and the arguments afterwards must be those of eager mode.

    Args:
        functional: that a graph is compiled; else it may run as it is for a write which is not
            functional, and the log says so.

    Returns:
        The graphs that ran.
    """
    eager = [one.clone() for one in arguments]
    ours = [one.clone() for one in arguments]
    call = compiled(function, **options)
    with torch.no_grad(), watched() as graphs, noted() as notes:
        call(*[one.clone() for one in arguments])
        expected, actual = function(*eager), call(*ours)
    as_it_is = any("runs as it is: aten::" in note for note in notes)
    assert graphs or (as_it_is and not functional), "the backend did not compile the graph"
    check(expected, actual, tolerance)
    check(eager, ours, tolerance)
    return graphs


def check(expected: Any, actual: Any, tolerance: float) -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        return
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        check(one, other, tolerance)
