"""What the driver takes for a launch: parameters whole or in part, and the questions before it.

    python benchmarks/dvm_gpu_launch.py

Calls are made from Python by ctypes; each row is the median of many, less that of a call that does
nothing, all in turns.  The kernel is the interpreter's, with a program that only ends.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import magjit
from dvm_gpu import why_not
from dvm_peers import dvm, percentile
from harness import Benchmark, Row, argument_parser

_CALLS, _ROUNDS = 500, 20
_SIZES = (400, 1024, 2048, 4096)
_POINTER, _SIZE = 1, 2
"""CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE."""
_held: list[Any] = []
"""What only addresses refer to."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("which", ctypes.c_int),
        ("unused", ctypes.c_int),
        ("allowed", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


def ending() -> bytes:
    """The parameter of a launch that has no tile to compute."""
    words = dvm("cuda.words")
    image = words.Image(words=[words.Word("end")], first=[0], rest=[0], tiles=0, each=8)
    image.barriers_at, image.rows_at, image.ring_at = 512, 1024, 2048
    packed: bytes = image.pack([])
    return packed.ljust(words.IMAGE_BYTES, b"\0")


def start_machine() -> None:
    """Compiles something, so that the backend is loaded; calls wait for kernels from now on."""
    os.environ["MAGJIT_DVM_WAIT"] = "1"
    compiled = magjit.compile(lambda x: (x * 2 + 1).relu(), backend="dvm")
    compiled(torch.ones(8, device="cuda"))


def launches(
    driver: Any, function: int, parameter: Any, stream: int
) -> dict[str, Callable[[], int]]:
    """Of each name, what makes one launch and gives the driver's verdict."""
    shape = *[ctypes.c_uint(n) for n in (1, 1, 1, 64, 1, 1, 4096)], ctypes.c_void_p(stream)
    address = ctypes.addressof(parameter)
    whole = (ctypes.c_void_p * 1)(address)
    kernel = ctypes.c_void_p(function)
    made: dict[str, Callable[[], int]] = {}
    made["whole"] = partial(driver.cuLaunchKernel, kernel, *shape, whole, None)
    for size in _SIZES:
        length = ctypes.c_size_t(size)
        extra = (ctypes.c_void_p * 5)(_POINTER, address, _SIZE, ctypes.addressof(length), None)
        _held.append(length)
        made[f"{size} bytes"] = partial(driver.cuLaunchKernel, kernel, *shape, None, extra)
        config = Config((1, 1, 1), (64, 1, 1), 4096, stream, ctypes.pointer(Attribute(6, 0, 1)), 1)
        _held.append(config)
        early = partial(driver.cuLaunchKernelEx, ctypes.byref(config), kernel, None, extra)
        made[f"{size} bytes, early"] = early
    return made


def part_launches(benchmark: Benchmark) -> None:
    """A row for each call of the driver."""
    start_machine()
    driver = ctypes.CDLL("libcuda.so.1")
    parameter = ctypes.create_string_buffer(ending(), 4096)
    stream = torch.cuda.current_stream().cuda_stream
    runs = launches(driver, dvm("cuda.launch").gpu(0).function(8, False), parameter, stream)
    handle, found = ctypes.c_void_p(stream), ctypes.c_void_p()
    state, version = ctypes.c_int(), ctypes.c_int()
    runs["capturing?"] = partial(driver.cuStreamIsCapturing, handle, ctypes.byref(state))
    runs["context?"] = partial(driver.cuCtxGetCurrent, ctypes.byref(found))
    runs["nothing"] = partial(driver.cuDriverGetVersion, ctypes.byref(version))
    verdicts = {name: run() for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name, no in verdicts.items() if not no}
    for _ in range(_ROUNDS):
        for name, taken in times.items():
            torch.cuda.synchronize()
            run = runs[name]
            for _ in range(_CALLS):
                start = time.perf_counter()
                run()
                taken.append((time.perf_counter() - start) * 1e6)
    least = percentile(times["nothing"], 0.5)
    for name, verdict in verdicts.items():
        case, metric = f"gpu launch: {name}", "host time, median"
        if verdict:
            benchmark.add(Row(case, metric, "us", None, note=f"the driver refuses it: {verdict}"))
        else:
            benchmark.add(Row(case, metric, "us", percentile(times[name], 0.5) - least))


def main(arguments: Sequence[str] | None = None) -> int:
    options = argument_parser(__doc__).parse_args(arguments)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    benchmark = Benchmark.start(options)
    part_launches(benchmark)
    benchmark.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
