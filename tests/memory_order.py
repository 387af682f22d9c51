"""An operator that counts on how its operand lies in memory, as kernels do that know no strides."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["in_order_of_memory"]


@torch.library.custom_op("magjit_test::in_order_of_memory", mutates_args=())
def in_order_of_memory(x: Tensor) -> Tensor:
    """Running sums of the elements as they lie in memory."""
    return x.as_strided((x.numel(),), (1,)).cumsum(0)


@in_order_of_memory.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.numel())
