"""Kernels of one GPU, compiled beside calls that can do without them.

A compiler takes seconds for a kernel, once for a machine: until then whoever has another way goes
it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch

from magjit.plugin import BackendError
from magjit_dvm.cuda.build import compiled, kept, said
from magjit_dvm.cuda.forms import ALONE
from magjit_dvm.vm import DeviceError

__all__ = ["Kernel", "Kernels"]

log = logging.getLogger("magjit.dvm")

_MOST_COMPILERS = 8

Kernel = tuple[int, bool, int]
"""R, or ``SUMS``; whether functions are approximate; form."""


class Kernels:
    """What a GPU can be asked to launch.

    Args:
        arch: ``sm_90`` and so on.
        load: has the GPU load a cubin of a kernel; gives a handle.
    """

    def __init__(self, arch: str, load: Callable[[Kernel, bytes], int]) -> None:
        self._arch, self._load = arch, load
        self._loaded: dict[Kernel, int] = {}
        self._coming: dict[Kernel, Future[int]] = {}
        self._lock = threading.Lock()

    def function(self, each: int, approximate: bool, form: int = ALONE, waits: bool = True) -> int:
        """The handle of the kernel for R elements a lane, or of sums.

        What is on disk is there at once.  Else it is compiled when it is first asked for, and who
        does not wait gets 0 until then; but launches that become part of a graph always wait.

        Raises:
            BackendError: there is no compiler, or it fails; who does not wait gets 0, and the log
                says so once.
            DeviceError: the GPU does not load it.
        """
        key = each, approximate, form
        with self._lock:
            found = self._loaded.get(key)
            if found is not None:
                return found
            coming = self._coming.get(key)
            if coming is None:
                cubin = kept(self._arch, *key)
                if cubin is not None:
                    return self._loaded.setdefault(key, self._load(key, cubin))
                coming = self._coming[key] = _compilers().submit(self._compile, key)
        if not (waits or _all_wait() or torch.cuda.is_current_stream_capturing()):
            return 0
        try:
            return coming.result()
        except (BackendError, DeviceError):
            with self._lock:
                self._coming.pop(key, None)  # who asks again has an exception of its own
            raise

    def _compile(self, key: Kernel) -> int:
        """Have a kernel: what a thread of compilers does."""
        try:
            return self._loaded.setdefault(key, self._load(key, compiled(self._arch, *key)))
        except (BackendError, DeviceError) as error:
            log.warning(
                "operators of %s are left to ATen: %s",
                *(said(key[0], key[2]), error),
            )
            raise


@cache
def _compilers() -> ThreadPoolExecutor:
    """Threads that a process which ends waits for: what they make is on disk then."""
    cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(max(1, min(cores - 1, _MOST_COMPILERS)), "magjit-kernels")


def _all_wait() -> bool:
    """Whether all calls wait: for measurements, and for tests of kernels."""
    return os.environ.get("MAGJIT_DVM_WAIT") == "1"
