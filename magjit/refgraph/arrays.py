"""NumPy arrays of a program: read as constants, given to torch as constants, changed with care.

An array from outside is guarded by its contents, up to a size. The run's own arrays are computed
from such constants and need nothing, until memory that a tensor or an outside array shares changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from magjit.annotations import Rule
from magjit.monitor.arrays import ArrayOperator
from magjit.refgraph import relations as r
from magjit.refgraph.kinds import is_atom
from magjit.refgraph.recorder import StateRecorder

LARGEST = 1 << 20
"""Bytes of an array that a guard compares at each call."""


def read_array(rec: StateRecorder, array: np.ndarray[Any, Any]) -> None:
    """C code reads the contents of an array."""
    node = rec.graph.node_of(array)
    if node is None:
        return
    if array.dtype.hasobject or array.nbytes > LARGEST:
        rec.split(f"reads a NumPy array of {array.nbytes} bytes of {array.dtype} from outside")
        return
    rec.read(node, r.CAttr(vars(np.ndarray)["shape"]), array.shape)
    rec.read(node, r.CAttr(vars(np.ndarray)["dtype"]), array.dtype)
    rec.read(node, r.CResult(np.ndarray.tobytes), array.tobytes())
    rec.arrays.append(array)


def change_array(rec: StateRecorder, array: np.ndarray[Any, Any]) -> None:
    """C code changes the contents of an array."""
    if rec.graph.node_of(array) is not None:
        rec.split("changes a NumPy array from outside")
    elif any(np.may_share_memory(array, other) for other in rec.arrays):
        rec.split("changes the memory of a NumPy array that something else shares")


def from_numpy(
    rec: StateRecorder, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``torch.from_numpy`` of an array of the run: a constant as long as nobody changes it."""
    array = args[0] if len(args) == 1 and not kwargs else None
    if type(array) is not np.ndarray or _is_shared(rec, array):
        rec.split(f"calls {rule.name}: {rule.reason}")
        return None
    rec.arrays.append(array)
    finish = rec.operators.record_call(ArrayOperator(func, array.copy()), (), {})

    def note(top: tuple[Any, ...]) -> None:
        finish(top[-1])
        if isinstance(top[-1], torch.Tensor):
            rec.array_tensors.append((top[-1], top[-1]._version))

    return note


def _is_shared(rec: StateRecorder, array: np.ndarray[Any, Any]) -> bool:
    if rec.graph.node_of(array) is not None or not is_atom(array.dtype.str):
        return True
    return any(np.may_share_memory(array, other) for other in rec.arrays)
