"""Builds examples from a fixed seed without touching the caller's random numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

Size = Literal["small", "full"]
Example = tuple[nn.Module, tuple[Any, ...]]
Builder = Callable[[Size], Example]


def seeded(builder: Builder) -> Builder:
    """Makes a builder give the same weights and inputs every time, the model in evaluation mode.

    Raises:
        ValueError: the size is neither "small" nor "full".
    """

    @functools.wraps(builder)
    def build(size: Size = "small") -> Example:
        if size not in ("small", "full"):
            raise ValueError(f"size is 'small' or 'full', not {size!r}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, inputs = builder(size)
        return model.eval(), inputs

    return build
