"""Kernels are compiled beside calls: who waits for them, who does not, and what an error does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from magjit.plugin import BackendError
from magjit_dvm.cuda import kernels
from magjit_dvm.cuda.forms import FLAT, STACKED
from magjit_dvm.cuda.kernels import Kernel

KEY = (8, False, FLAT)


class Compiler:
    """One that waits until it may end; what it has made is on disk."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.asked: list[Kernel] = []
        self.disk: dict[Kernel, bytes] = {}
        self.error: Exception | None = None

    def compiled(self, arch: str, *key: int) -> bytes:
        assert arch == "sm_90"
        self.asked.append(key)
        assert self.may_end.wait(60)
        if self.error:
            raise self.error
        return self.disk.setdefault(key, str(key).encode())

    def kept(self, arch: str, *key: int) -> bytes | None:
        return self.disk.get(key)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    one = Compiler()
    monkeypatch.delenv("MAGJIT_DVM_WAIT", raising=False)
    monkeypatch.setattr(kernels, "compiled", one.compiled)
    monkeypatch.setattr(kernels, "kept", one.kept)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield one
    one.may_end.set()


@pytest.fixture
def gpu() -> kernels.Kernels:
    return kernels.Kernels("sm_90", lambda kernel, cubin: 1000 * kernel[0] + len(cubin))


HANDLE = 8000 + len(str(KEY))


def test_who_does_not_wait_has_nothing_until_it_is_there(
    compiler: Compiler, gpu: kernels.Kernels
) -> None:
    assert gpu.function(*KEY, waits=False) == gpu.function(*KEY, waits=False) == 0
    compiler.may_end.set()
    assert gpu.function(*KEY) == HANDLE
    assert gpu.function(*KEY, waits=False) == HANDLE and compiler.asked == [KEY]


def test_what_is_on_disk_is_there_at_once(compiler: Compiler, gpu: kernels.Kernels) -> None:
    compiler.disk[KEY] = b"12345"
    assert gpu.function(*KEY, waits=False) == 8005 and not compiler.asked


def test_kernels_are_compiled_side_by_side(
    compiler: Compiler, gpu: kernels.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.os, "sched_getaffinity", lambda _: range(4))
    kernels._compilers.cache_clear()
    keys = [(each, False, form) for each in (8, 16) for form in (FLAT, STACKED)]
    assert not any(gpu.function(*key, waits=False) for key in keys)
    compiler.may_end.set()
    assert all(gpu.function(*key) for key in keys) and sorted(compiler.asked) == sorted(keys)
    kernels._compilers().shutdown()
    kernels._compilers.cache_clear()


@pytest.mark.parametrize("why", ["asked for", "captured"])
def test_who_has_to_wait_does(
    why: str, compiler: Compiler, gpu: kernels.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "captured":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    else:
        monkeypatch.setenv("MAGJIT_DVM_WAIT", "1")
    threading.Timer(0.05, compiler.may_end.set).start()
    assert gpu.function(*KEY, waits=False) == HANDLE


def test_a_compiler_that_fails(
    compiler: Compiler, gpu: kernels.Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning where nobody waits; an exception of its own for each who does."""
    compiler.error = BackendError("no registers")
    compiler.may_end.set()
    with caplog.at_level(logging.WARNING, "magjit.dvm"):
        assert gpu.function(*KEY, waits=False) == 0
        while not gpu._coming[KEY].done():
            pass
        assert gpu.function(*KEY, waits=False) == gpu.function(*KEY, waits=False) == 0
    assert [one.message for one in caplog.records] == [
        "operators of the interpreter of no rows, R = 8, are left to ATen: no registers"
    ]
    with pytest.raises(BackendError, match="no registers"):
        gpu.function(*KEY)
    compiler.error = None
    assert gpu.function(*KEY) == HANDLE and compiler.asked == [KEY, KEY]
