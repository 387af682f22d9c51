"""The interpreter kernel compiled: by NVRTC, or nvcc where there is none; kept in the disk cache.

A cubin is found again by the code that makes its source, the architecture, and the compiler's
version.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from magjit.plugin import BackendError
from magjit.plugin.cache import code_digest, disk_cache, fingerprint
from magjit_dvm.cuda.channel_code import CHANNELS, CHANNELS_NAMES, channels_source
from magjit_dvm.cuda.forms import ALONE, kernel_name, said_of
from magjit_dvm.cuda.interpreter import source
from magjit_dvm.cuda.parts import SUMS, SUMS_NAME, SUMS_SOURCE

__all__ = ["LEAST", "compiled", "compilers", "entry", "kept", "said", "usable"]

log = logging.getLogger("magjit.dvm")

LEAST = (8, 0)
"""The first compute capability that has the interpreter's instructions."""
_KIND = "dvm_cubin"
_OPTIONS = ("-std=c++17", "-default-device")


@cache
def usable(index: int) -> bool:
    """Whether kernels can be compiled for the GPU of this number; otherwise the log says why."""
    reason = ""
    if torch.cuda.get_device_capability(index) < LEAST:
        reason = "it is older than sm_80"
    elif not compilers():
        reason = "there is neither NVRTC nor nvcc to compile its kernels"
    if reason:
        log.warning("the dvm backend leaves GPU %d to ATen: %s", index, reason)
    return not reason


def kept(arch: str, each: int, approximate: bool, form: int = ALONE) -> bytes | None:
    """What ``compiled`` would give, if it is on disk.

    Raises:
        BackendError: there is no compiler.
    """
    return disk_cache().get(_KIND, _key(arch, each, approximate, form))


def compiled(arch: str, each: int, approximate: bool, form: int = ALONE) -> bytes:
    """The cubin of the kernel for R elements a lane.

    Args:
        arch: ``sm_90`` and so on.
        each: R; ``SUMS`` of the kernel that adds up parts of sums, ``CHANNELS`` of those that add
            up channels.
        approximate, form: see ``interpreter.source``; of channels, which of them.

    Raises:
        BackendError: there is no compiler, or it fails.
    """
    key = _key(arch, each, approximate, form)

    def made() -> bytes:
        log.info("compiling %s for %s; it is kept on disk", said(each, form), arch)
        if each == CHANNELS:
            text = channels_source(form)
        else:
            text = SUMS_SOURCE if each == SUMS else source(approximate, (each,), _checked(), form)
        make = _by_nvcc if _compiler().startswith("nvcc") else _by_nvrtc
        return make(text, arch)

    return disk_cache().get_or_make(_KIND, key, made)


def said(each: int, form: int) -> str:
    """What messages call a kernel."""
    others = {SUMS: "the kernel of sums", CHANNELS: "the kernels of sums of channels"}
    return others.get(each, f"the interpreter{said_of(form)}, R = {each},")


def entry(each: int, form: int) -> str:
    """The name of a kernel in its cubin."""
    if each == CHANNELS:
        return CHANNELS_NAMES[form]
    return SUMS_NAME if each == SUMS else kernel_name(each, form)


def _key(arch: str, each: int, approximate: bool, form: int) -> str:
    code = _code()  # the source's own text takes 35 ms to make
    return fingerprint(code, each, approximate, _checked(), form, arch, _compiler(), *_OPTIONS)


@cache
def _code() -> str:
    return code_digest(Path(__file__).parents[1])


def _checked() -> bool:
    """Whether kernels are for checkers of races."""
    return os.environ.get("MAGJIT_DVM_CHECKED") == "1"


def _compiler() -> str:
    found = compilers()
    if not found:
        raise BackendError(
            "the GPU's interpreter cannot be compiled: there is neither NVRTC nor nvcc",
            remedy="install torch for CUDA, which brings NVRTC, or run on the CPU",
        )
    return found[0]


def compilers() -> list[str]:
    """Names and versions of what there is, the preferred one first."""
    found = []
    library = _nvrtc()
    if library is not None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        found.append(f"nvrtc {major.value}.{minor.value}")
    if shutil.which("nvcc"):
        found.append(f"nvcc {shutil.which('nvcc')}")
    return found


# -- NVRTC --


@cache
def _nvrtc() -> ctypes.CDLL | None:
    for name in _libraries():
        try:
            # What it looks for in the system, and not beside itself.
            for beside in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(beside))
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    return None


def _libraries() -> Iterator[str]:
    """What torch's packages bring, then what the system has."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            if ".alt." not in path.name:
                yield str(path)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _by_nvrtc(text: str, arch: str, *more: str) -> bytes:
    """A cubin; ``more`` are options, and what the compiler says is a line of the log."""
    library = _nvrtc()
    assert library is not None
    program = ctypes.c_void_p()

    def check(status: int, what: str) -> None:
        if status:
            reason = library.nvrtcGetErrorString(status).decode()
            raise BackendError(f"{what}: {reason}\n{_log(library, program)}".rstrip())

    check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"magjit_dvm.cu", 0, None, None
        ),
        "nvrtcCreateProgram",
    )
    try:
        options = [f"--gpu-architecture={arch}", *_OPTIONS, *more]
        given = (ctypes.c_char_p * len(options))(*(one.encode() for one in options))
        check(library.nvrtcCompileProgram(program, len(options), given), "nvrtcCompileProgram")
        if said := _log(library, program):
            log.debug("NVRTC: %s", said)
        size = ctypes.c_size_t()
        check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        check(library.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    if library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) or not size.value:
        return ""
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


# -- nvcc --


def _by_nvcc(text: str, arch: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        given.write_text(text)
        command = ["nvcc", "-cubin", f"-arch={arch}", "-std=c++17", "-o", str(made), str(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BackendError(f"nvcc: {done.stderr.strip()}")
        return made.read_bytes()
