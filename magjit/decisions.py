"""Reads of tensors between two regions of a replay: several decisions, one wait for the device.

    reader(function, tensor, values, held, copy or None) = (number, copy or None)
                                                         | None    to be read as always

A program that computes all its decisions at once and reads them one by one (`if keep[k]: …`) waits
for the device at each of them. The first read copies the whole of the small tensor to the host, and
later reads are served from there, as long as the data are provably the same:

- The copy is of a *holder*: a tensor that the frames of the program hold, contiguous, whose
  elements include the one that is read. It lives for one call of the compiled program.
- C drops it (`magjit/csrc/reading.c`) where a region is not handed the holder, and where anything
  ran that may write without raising a version: a call that no record served, a record that is not
  pure (`is_pure`), an operation in Python, an iterator with code of its own.
- A pure graph leaves alone what is alive, and the holder is: whatever a backend does with the
  memory of its results, it may not do it to a tensor that the program can still read.
- The storage, the versions of both tensors and the stream have to be the same at each read, and no
  mode may be active that would see the read.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterable
from typing import Any

import torch

from magjit import _C
from magjit.mocks.ir import Apply, Let, Map, MockPlan, Seq, walk
from magjit.monitor.operator_graph import Operator

MOST_ELEMENTS = 1024
"""Of a holder: so many numbers are copied in about the time of one."""

CPU, CUDA = 0, 1  # as torch numbers types of devices

_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
_ITEM = torch.Tensor.item
_FUNCTIONS = (_ITEM, bool, int, float)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class HostCopy:
    """The numbers of a tensor, and what tells whether they are still the same."""

    __slots__ = ("address", "bytes", "dtype", "holder", "numbers", "stream", "version")

    def __init__(self, holder: torch.Tensor) -> None:
        self.holder = holder
        self.dtype = holder.dtype
        self.address, self.bytes = holder.data_ptr(), holder.element_size()
        self.version = holder._version
        self.stream = _stream(holder)
        self.numbers: list[Any] = holder.detach().reshape(-1).tolist()

    def place(self, tensor: torch.Tensor) -> int:
        """Where the one element of a tensor is among the numbers; -1: they are not of it.

        The holder is alive, so an address within it is nobody else's.
        """
        if tensor.dtype is not self.dtype or tensor.is_inference() or tensor.is_neg():
            return -1
        if tensor._version != self.version or self.holder._version != self.version:
            return -1
        if tensor.numel() != 1 or _stream(tensor) != self.stream:
            return -1
        place = self.distance(tensor)
        return place if 0 <= place < len(self.numbers) else -1

    def distance(self, tensor: torch.Tensor) -> int:
        """Of the first element of a tensor from the holder's, in elements."""
        return (tensor.data_ptr() - self.address) // self.bytes


def _memory(tensor: torch.Tensor) -> int:
    """Which storage a tensor is of, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def _stream(tensor: torch.Tensor) -> int:
    if not tensor.is_cuda:
        return 0
    return int(torch._C._cuda_getCurrentRawStream(tensor.get_device()))


def _is_watched() -> bool:
    """Whether a mode or a transform of torch would see that a tensor is read."""
    return bool(
        torch._C._is_torch_function_mode_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _holder(tensor: torch.Tensor, held: tuple[Any, ...]) -> torch.Tensor | None:
    """Of the values that the frames hold, a tensor of which this is an element."""
    if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided or tensor.numel() != 1:
        return None
    if tensor.is_inference() or tensor.is_neg():
        return None
    value: torch.Tensor
    for value in held:
        if type(value) not in _PLAIN or value.dtype is not tensor.dtype:
            continue
        if value.device != tensor.device or value.layout is not torch.strided:
            continue
        count = value.numel()
        if not 1 < count <= MOST_ELEMENTS or value.is_inference() or value.is_neg():
            continue
        offset = tensor.storage_offset() - value.storage_offset()
        if not 0 <= offset < count or not value.is_contiguous():
            continue
        if _memory(value) == _memory(tensor) and value._version == tensor._version:
            return value
    return None


def read(
    function: Any, tensor: torch.Tensor, values: tuple[Any, ...], held: int, copy: HostCopy | None
) -> tuple[Any, HostCopy | None] | None:
    """``function(tensor)``, and a copy on the host for further reads.

    Args:
        function: one of `_FUNCTIONS`.
        tensor: a plain one.
        values: what the frames hold, the first ``held`` of them.
        copy: one that may serve the read; nothing has run since that writes without a trace.

    Returns:
        None where it has to be read as always.
    """
    if _is_watched():
        return None
    place = copy.place(tensor) if copy is not None else -1
    if place < 0:
        holder = _holder(tensor, values[:held])
        if holder is None:
            return function(tensor), copy
        copy = HostCopy(holder)
        place = copy.distance(tensor)
    assert copy is not None
    number = copy.numbers[place]
    return (number if function is _ITEM else function(number)), copy


def serve(*device_types: int) -> None:
    """Read tensors on devices of these types together: `CUDA`, and `CPU` for tests."""
    _C.set_reader(read, _FUNCTIONS, sum(1 << kind for kind in device_types))


DEVICES: tuple[int, ...] = (CUDA,) if os.environ.get("MAGJIT_READ_TOGETHER", "1") != "0" else ()
"""Where it is done: where a read waits."""

serve(*DEVICES)


def is_pure(repeatable: bool, operators: Iterable[Operator], plan: MockPlan) -> bool:
    """Whether a replay of a record writes no tensor that was there before, nor runs user code.

    Args:
        repeatable: the graph changes nothing outside that a tensor's version tells.
        operators: of the graph; what others than torch have registered may write secretly.
        plan: what a replay does besides.
    """
    if not repeatable or plan.effects or not all(map(_is_torchs, operators)):
        return False
    made = [line.expr for line in plan.lines if isinstance(line, Let)]
    if len(made) < len(plan.lines):
        return False
    return not any(
        isinstance(part, Apply | Map) or (isinstance(part, Seq) and part.kind == "set")
        for expr in (*made, plan.result)
        for part in walk(expr)
    )


_NAMESPACES = ("aten", "prims")
_OF_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
)


def _is_torchs(operator: Operator) -> bool:
    """Whether only code of torch and Python runs."""
    func = operator.func
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace in _NAMESPACES
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name.partition("::")[0] in _NAMESPACES
    if not isinstance(func, (*_OF_C, types.FunctionType)):
        return False
    package = (getattr(func, "__module__", None) or "builtins").partition(".")[0]
    if package not in ("torch", "builtins", "_operator", "operator"):
        return False
    return not _has_callable((operator.args, operator.kwargs))


def _has_callable(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_callable, value))
    if isinstance(value, dict):
        return any(map(_has_callable, value.values()))
    return callable(value)
