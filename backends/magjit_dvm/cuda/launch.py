"""Fused operators on a GPU: arguments to words, outputs from torch's allocator, one launch.

A launch goes to torch's current stream.  Kernels are compiled when they are first needed.  While
the encoder is the one in Python, words of the last sizes are kept: they take it a millisecond.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from magjit.plugin import BackendError
from magjit_dvm.cuda.build import compiled
from magjit_dvm.cuda.encode import Machine, encode
from magjit_dvm.cuda.interpreter import kernel_name
from magjit_dvm.cuda.shapes import Layout
from magjit_dvm.program import InputKind, Program
from magjit_dvm.vm import DeviceError, NotEncodable, cuda_launch, cuda_load

__all__ = ["DeviceFused", "Gpu", "gpu"]

_COUNTERS, _KEPT = 8192, 256
_LEAST = (8, 0)
_LEAST_SHARED = 101376
"""Bytes that a block may ask for on any GPU from 8.0 on, where torch does not say."""


class Gpu:
    """One GPU: its sizes, its kernels, the counters that tiles are drawn from.

    Attributes:
        index: torch's number of it.
        machine: sizes that the encoder asks for.
        counters: pairs of 32-bit numbers, zeros between launches.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        properties = torch.cuda.get_device_properties(index)
        if (properties.major, properties.minor) < _LEAST:
            raise BackendError(f"{properties.name} is older than the interpreter's instructions")
        self.arch = f"sm_{properties.major}{properties.minor}"
        shared = int(getattr(properties, "shared_memory_per_block_optin", _LEAST_SHARED))
        widest = 64 if properties.major >= 9 else 32
        self.machine = Machine(int(properties.multi_processor_count), shared, widest)
        self.counters = torch.zeros(_COUNTERS, 2, dtype=torch.int32, device=f"cuda:{index}")
        torch.cuda.synchronize(index)  # zeros before any stream's first launch
        self._functions: dict[tuple[int, bool], int] = {}
        self._lock = threading.Lock()

    def function(self, each: int, approximate: bool) -> int:
        """The kernel for R elements a lane; compiled when it is first asked for."""
        key = each, approximate
        found = self._functions.get(key)
        if found is None:
            with self._lock:
                found = self._functions.get(key)
                if found is None:
                    cubin = compiled(self.arch, each, approximate)
                    name = kernel_name(each)
                    found = cuda_load(self.index, cubin, name, self.machine.shared_bytes)
                    self._functions[key] = found
        return found


_gpus: dict[int, Gpu] = {}
_gpus_lock = threading.Lock()


def gpu(index: int) -> Gpu:
    """The GPU of this number.

    Raises:
        DeviceError: there is none.
        BackendError: it is too old.
    """
    found = _gpus.get(index)
    if found is None:
        if not torch.cuda.is_available():
            raise DeviceError("torch sees no NVIDIA GPU here; run on the CPU instead")
        with _gpus_lock:
            found = _gpus.get(index)
            if found is None:
                found = _gpus[index] = Gpu(index)
    return found


@dataclass(frozen=True, slots=True)
class Instance:
    """A fused operator for some sizes.

    Attributes:
        layouts: of its outputs.
        image: the kernel's parameter without addresses; empty if there is nothing to compute.
        patches: where addresses go.
        each: R.
        launch: blocks, threads of a block, bytes of shared memory.
        draws: whether blocks draw tiles from a counter: there are more of them than blocks.
        reason: why there are no words.
    """

    layouts: tuple[Layout, ...]
    image: bytes = b""
    patches: bytes = b""
    each: int = 32
    launch: tuple[int, int, int] = (0, 0, 0)
    draws: bool = False
    reason: str = ""


class DeviceFused:
    """A fused operator for any sizes, on the GPU that its arguments are on.

    Args:
        program: what it computes.
        fallback: called with the same arguments where there are no words for them; without it
            ``NotEncodable`` is raised.
        approximate: the GPU's own tanh and quotients.
    """

    def __init__(
        self,
        program: Program,
        fallback: Callable[..., Any] | None = None,
        approximate: bool = False,
    ) -> None:
        self.program, self.fallback, self.approximate = program, fallback, approximate
        self._recent: dict[Any, Instance] = {}
        self._dtypes = [program.nodes[one.node].dtype.torch for one in program.outputs]

    def __call__(self, *arguments: Any) -> Any:
        """The results: one tensor, or a tuple.

        Raises:
            NotEncodable: there are no words for these arguments, and no fallback.
            DeviceError: the launch failed.
            torch.OutOfMemoryError: there is no memory for results.
        """
        try:
            index = self._device(arguments)
            instance = self._instance(arguments, index)
        except NotEncodable:
            if self.fallback is None:
                raise
            return self.fallback(*arguments)
        if index == torch.cuda.current_device():
            return self._run(instance, arguments, index)
        with torch.cuda.device(index):
            return self._run(instance, arguments, index)

    def _instance(self, arguments: Sequence[Any], index: int) -> Instance:
        """What these sizes need, made now or not long ago."""
        key = (index, *map(_facts, arguments))
        found = self._recent.get(key)
        if found is None:
            found = _encoded(self.program, arguments, gpu(index).machine)
            if len(self._recent) >= _KEPT:
                self._recent.clear()
            self._recent[key] = found
        if found.reason:
            raise NotEncodable(found.reason)
        return found

    def _device(self, arguments: Sequence[Any]) -> int:
        index = -1
        for given, value in zip(self.program.inputs, arguments, strict=True):
            if given.kind is not InputKind.TENSOR:
                fits = isinstance(value, (int, float))
                if not fits or (isinstance(value, float) and given.kind is InputKind.INT):
                    raise NotEncodable("not a number")
                continue
            if type(value) not in (torch.Tensor, torch.nn.Parameter) or not value.is_cuda:
                raise NotEncodable("not a plain tensor on a GPU")
            if index not in (-1, value.device.index):
                raise NotEncodable("tensors on several GPUs")
            if value.is_neg() or value.layout is not torch.strided:
                raise NotEncodable("a tensor whose memory means something else")
            index = value.device.index
        if index < 0:
            raise NotEncodable("no tensor to say which GPU")
        return index

    def _run(self, instance: Instance, arguments: Sequence[Any], index: int) -> Any:
        made, device = list[Any](), torch.device("cuda", index)
        for one, layout, dtype in zip(
            self.program.outputs, instance.layouts, self._dtypes, strict=True
        ):
            if one.allocated:
                sizes, strides = layout.sizes, layout.strides
                made.append(torch.empty_strided(sizes, strides, dtype=dtype, device=device))
            else:
                made.append(None)
        if instance.image:
            cuda_launch(
                gpu(index).function(instance.each, self.approximate),
                *instance.launch,
                torch.cuda.current_stream(index).cuda_stream,
                instance.image,
                instance.patches,
                tuple(
                    one.data_ptr() if isinstance(one, torch.Tensor) else 0
                    for one in (*arguments, *made)
                ),
                gpu(index).counters.data_ptr(),
                _COUNTERS if instance.draws else 0,
            )
        results = tuple(one for one in made if one is not None)
        return results[0] if len(results) == 1 else results


def _facts(value: Any) -> Any:
    """All that words depend on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.data_ptr() % 16, value.dtype
    return type(value), value


def _encoded(program: Program, arguments: Sequence[Any], machine: Machine) -> Instance:
    try:
        encoded = encode(program, arguments, machine)
    except NotEncodable as reason:
        return Instance((), reason=str(reason))
    image = encoded.image
    if image is None:
        return Instance(encoded.layouts)
    return Instance(
        encoded.layouts,
        image.template(),
        image.patches(),
        image.each,
        (image.blocks, 32 * (image.warps + 1), image.shared_bytes),
        image.tiles > image.blocks,
    )
