"""New nodes of torch.fx graphs, at half of torch's cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

__all__ = ["new_call"]


def new_call(
    graph: Graph,
    target: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
) -> Node:
    """``graph.call_function``, or ``call_method`` of a name, where no argument is a symbol.

    torch looks through all arguments for symbols, to warn of them, which takes longer than
    everything else.
    """
    op = "call_method" if isinstance(target, str) else "call_function"
    node = graph.create_node(op, target, name=name)
    if args:
        node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node
