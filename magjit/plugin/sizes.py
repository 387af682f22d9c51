"""Sizes as numbers, of tensors whose sizes may be symbols: those of the example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

__all__ = ["elements", "elements_of", "magnitude"]


def elements(sizes: Sequence[Any]) -> int:
    """Elements; of symbolic sizes, those of the example."""
    found = 1
    for one in sizes:
        found *= magnitude(one)
    return found


def elements_of(node: Node) -> int:
    """Of what an operator makes, by the example's sizes; 0 of what is not a tensor."""
    value = node.meta.get("val")
    return elements(value.shape) if isinstance(value, torch.Tensor) else 0


def magnitude(size: Any) -> int:
    """A size or stride, or of a symbolic one that of the example; 0 where there was none."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return 0 if hint is None else int(hint)
    return int(size)
