"""Fused operators on a GPU: arguments to words, outputs from torch's allocator, one launch.

A launch goes to torch's current stream.  Kernels are compiled when they are first needed, beside
calls, which run operator by operator until they are there.  A call is C++
(``csrc/cuda_calls.cpp``), which asks here for GPUs and kernels that it does not know yet; of a call
nothing is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any, Self

import torch

from magjit.plugin import BackendError
from magjit_dvm.cuda.build import LEAST, entry
from magjit_dvm.cuda.channel_code import CHANNELS
from magjit_dvm.cuda.encode import Encoded, Machine, encode
from magjit_dvm.cuda.forms import STACKED, form_of, kernel_name
from magjit_dvm.cuda.kernels import Kernel, Kernels
from magjit_dvm.cuda.native import as_lists
from magjit_dvm.cuda.parts import SUMS, THREADS, Parts
from magjit_dvm.cuda.splitting import Step, steps_of
from magjit_dvm.cuda.words import Image
from magjit_dvm.instructions import DTYPES, DType
from magjit_dvm.program import InputKind, Program
from magjit_dvm.vm import (
    CudaFused,
    DeviceError,
    NotEncodable,
    cuda_gpu,
    cuda_hooks,
    cuda_launch,
    cuda_load,
)

__all__ = ["DeviceFused", "Gpu", "gpu"]

_COUNTERS = 8192
_LEAST_SHARED = 101376
"""Bytes that a block may ask for on any GPU from 8.0 on, where torch does not say."""


class Gpu:
    """One GPU: its sizes, its kernels, the counters that tiles are drawn from.

    Attributes:
        index: torch's number of it.
        machine: sizes that the encoder asks for.
        counters: pairs of 32-bit numbers, zeros between launches.
        function: see ``Kernels.function``.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        properties = torch.cuda.get_device_properties(index)
        if (properties.major, properties.minor) < LEAST:
            raise BackendError(f"{properties.name} is older than the interpreter's instructions")
        self.arch = f"sm_{properties.major}{properties.minor}"
        shared = int(getattr(properties, "shared_memory_per_block_optin", _LEAST_SHARED))
        widest = 64 if properties.major >= 9 else 32
        self._overlaps = properties.major >= 9
        self.machine = Machine(int(properties.multi_processor_count), shared, widest)
        self.counters = torch.zeros(_COUNTERS, 2, dtype=torch.int32, device=f"cuda:{index}")
        torch.cuda.synchronize(index)  # zeros before any stream's first launch
        cuda_gpu(index, astuple(self.machine), self.counters.data_ptr(), _COUNTERS)
        self.function = Kernels(self.arch, self._loaded).function

    def _loaded(self, kernel: Kernel, cubin: bytes) -> int:
        each, _, form = kernel
        shared = 0 if each in (SUMS, CHANNELS) else self.machine.shared_bytes
        return cuda_load(self.index, cubin, entry(each, form), shared, self._overlaps)


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


class DeviceFused(CudaFused):
    """A fused operator for any sizes, on the GPU that its arguments are on.

    Args:
        program: what it computes.
        fallback: called with the same arguments where there are no words for them, and while its
            kernel is being compiled; without it ``NotEncodable`` is raised, and a call waits.
        approximate: the GPU's own tanh and quotients.
        home: the number of the GPU that a program runs on which takes no tensor, or -1.

    A call gives the results: one tensor, or a tuple.

    Raises:
        NotEncodable: there are no words for these arguments, and no fallback.
        BackendError: there is no kernel, and no fallback.
        DeviceError: the launch failed.
        torch.OutOfMemoryError: there is no memory for results.
    """

    program: Program
    approximate: bool
    home: int

    def __new__(
        cls,
        program: Program,
        fallback: Callable[..., Any] | None = None,
        approximate: bool = False,
        home: int = -1,
    ) -> Self:
        self = super().__new__(cls, as_lists(program), fallback, approximate, home)
        self.program, self.approximate, self.home = program, approximate, home
        return self

    def steps(self) -> tuple[tuple[Any, ...], ...] | None:
        """Asked for by C++, once: what runs where rows are few and long; see ``splitting.py``."""
        found = steps_of(self.program)
        return None if found is None else tuple(self._step(one) for one in found)

    def _step(self, one: Step) -> tuple[Any, ...]:
        fused = type(self)(one.program, None, self.approximate, self.home)
        joined = None if one.joined is None else self._step(one.joined)
        return fused, one.pieces, one.sources, one.results, one.left_over, joined

    def by_reference(self, *arguments: Any) -> Any:
        """A call by the encoder in Python: of what the one in C++ leaves to it."""
        try:
            index, encoded = self._encoded(arguments)
        except NotEncodable:
            if self.fallback is None:
                raise
            return self.fallback(*arguments)
        with torch.cuda.device(index):
            return self._run(encoded, arguments, index)

    def words(self, *arguments: Any) -> str:
        """What a call with these arguments runs: kernel, words and descriptors, as text.

        Raises:
            NotEncodable: there are no words for these arguments.
        """
        image = self._encoded(arguments)[1].image
        if image is None:
            return "// nothing to compute: a size is 0"
        return f"kernel {kernel_name(image.each, form_of(image))}\n{image}"

    def _encoded(self, arguments: Sequence[Any]) -> tuple[int, Encoded]:
        """The GPU that a call runs on, and what it runs there."""
        index = self._device(arguments)
        return index, encode(self.program, arguments, gpu(index).machine)

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
            if value.layout is not torch.strided or value.is_neg():
                raise NotEncodable("a tensor whose memory means something else")
            index = value.device.index
        index = self.home if index < 0 else index
        if index < 0:
            raise NotEncodable("no tensor to say which GPU")
        return index

    def _run(self, encoded: Encoded, arguments: Sequence[Any], index: int) -> Any:
        made = list[Any]()
        for one, layout in zip(self.program.outputs, encoded.layouts, strict=True):
            code = self.program.nodes[one.node].dtype.code
            allocate = partial(_allocate, layout.sizes, layout.strides, code, index)
            made.append(allocate() if one.allocated else None)
        if encoded.image is not None:
            tensors = [*arguments, *made]
            parts = encoded.image.parts
            if parts is not None:
                tensors.append(_allocate((parts.count,), (1,), DType.F32.code, index))
            _launch(encoded.image, tensors, index, self.approximate)
            if parts is not None:
                _launch_sums(parts, tensors, index)
        results = tuple(one for one in made if one is not None)
        return results[0] if len(results) == 1 else results


def _launch(image: Image, tensors: Sequence[Any], index: int, approximate: bool) -> None:
    addresses = (one.data_ptr() if isinstance(one, torch.Tensor) else 0 for one in tensors)
    cuda_launch(
        gpu(index).function(image.each, approximate, form_of(image)),
        *(image.blocks, image.threads, image.shared_bytes),
        torch.cuda.current_stream(index).cuda_stream,
        image.template(),
        image.patches(),
        tuple(addresses),
        gpu(index).counters.data_ptr(),
        _COUNTERS if image.draws else 0,
    )


def _launch_sums(parts: Parts, tensors: Sequence[Any], index: int) -> None:
    """Add up what the launch before has written to the last of these tensors."""
    addresses = [one.data_ptr() if isinstance(one, torch.Tensor) else 0 for one in tensors]
    cuda_launch(
        gpu(index).function(SUMS, False),
        *(parts.blocks, THREADS, 0),
        torch.cuda.current_stream(index).cuda_stream,
        parts.pack(addresses[-1], addresses),
        b"",
        (),
        *(0, 0),
    )


def _kernel(index: int, each: int, approximate: int, form: int, waits: int) -> int:
    """Asked for by C++: the GPU is told of; its kernel for R, or of sums, if that is not 0.

    A stack never waits: its operators can be launched one by one.
    """
    one = gpu(index)
    waiting = bool(waits) and form != STACKED
    return one.function(each, bool(approximate), form, waiting) if each else 0


def _allocate(sizes: Sequence[int], strides: Sequence[int], dtype: int, index: int) -> torch.Tensor:
    """A result; by C++ asked for where its own request failed, so that torch says why."""
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    return torch.empty_strided(sizes, strides, dtype=DTYPES[dtype].torch, device=device)


cuda_hooks(_kernel, _allocate)
