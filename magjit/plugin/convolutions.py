"""Convolutions under symbols: which library computes one is no property of the shapes.

Torch's fake convolution asks which library would be chosen, for the memory format of the result,
and so guards what that choice depends on, such as a batch of at least 16. Where input and weight
are contiguous the result is, whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["unguarded_convolutions"]


@contextmanager
def unguarded_convolutions(shape_env: ShapeEnv) -> Iterator[None]:
    """No guards on the choice of a library, while fake convolutions of this environment run."""
    select = torch._C._select_conv_backend

    def selected(*args: Any, **kwargs: Any) -> Any:
        tensors = args[:2] or (kwargs.get("input"), kwargs.get("weight"))
        plain = all(isinstance(one, torch.Tensor) and one.is_contiguous() for one in tensors)
        if not plain:
            return select(*args, **kwargs)
        with shape_env.suppress_guards():
            return select(*args, **kwargs)

    namespace: Any = torch._C
    namespace._select_conv_backend = selected
    try:
        yield
    finally:
        namespace._select_conv_backend = select
