"""NumPy arrays of a program: read as constants, given to torch as constants, changed with care.

An array from outside is guarded by its contents, up to a size. The run's own arrays are computed
from such constants and need nothing, until memory that a tensor or an outside array shares changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from magjit import _C
from magjit.annotations import Rule
from magjit.monitor.arrays import ArrayOperator
from magjit.refgraph.recorder import StateRecorder


def from_numpy(
    rec: StateRecorder, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``torch.from_numpy`` of an array of the run: a constant as long as nobody changes it."""
    array = args[0] if len(args) == 1 else None
    if type(array) is not np.ndarray or kwargs or rec.shares_memory(array):
        rec.split(f"calls {rule.name}: {rule.reason}")
        return None
    rec.arrays.append(array)
    finish = rec.operators.record_call(ArrayOperator(func, array.copy()), (), {})

    def note(top: tuple[Any, ...]) -> None:
        finish(top[-1])
        if isinstance(top[-1], torch.Tensor):
            rec.array_tensors.append((top[-1], top[-1]._version))

    return note


def constructed(
    rec: StateRecorder, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``torch.FloatTensor(array)`` and its kin share the memory of an array of their own dtype."""
    own = torch.get_default_dtype() if func is torch.Tensor else func.dtype
    if torch.from_numpy(np.empty(0, args[0].dtype)).dtype is own:
        return from_numpy(rec, rule, func, args, kwargs)
    rec.read_array(args[0])
    finish = rec.operators.record_call(ArrayOperator(func, args[0].copy()), args[1:], kwargs)
    return (_C.OPAQUE, lambda top: finish(top[-1]))
