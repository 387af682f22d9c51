"""The machine and the versions that a report or a measurement depends on."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

PYTHONS = ((3, 11), (3, 13))
"""The first and the last CPython that is supported."""
TORCHES = ((2, 11), (2, 13))
"""The first and the last torch that is supported."""
PACKAGES = ("torch", "numpy", "triton", "transformers", "networkx", "PyYAML", "rich")


def _version(package: str) -> str:
    """What a loaded package says of itself; it may name its build, which its metadata do not."""
    loaded = getattr(sys.modules.get(package), "__version__", None)
    return str(loaded) if loaded is not None else importlib.metadata.version(package)


def versions() -> dict[str, str]:
    """Versions of Python, MagJIT and the installed packages that take part."""
    found = {"python": platform.python_version(), "magjit": sys.modules["magjit"].__version__}
    for package in PACKAGES:
        try:
            found[package] = _version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """System, processor, memory and GPU; what torch knows only where it is loaded already."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
    }
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        facts["memory_gib"] = round(total / 2**30)
    except (ValueError, OSError):  # not every system says
        pass
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        facts["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def support() -> dict[str, tuple[bool, str]]:
    """What MagJIT needs: whether it is there, and in words."""
    return {
        "python": _python_support(),
        "torch": _torch_support(),
        "extension": _extension_support(),
    }


def _span(bounds: tuple[tuple[int, int], tuple[int, int]]) -> str:
    (a, b), (c, d) = bounds
    return f"{a}.{b} to {c}.{d}"


def _python_support() -> tuple[bool, str]:
    implementation = platform.python_implementation()
    fits = implementation == "CPython" and PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    return fits, f"{implementation} {platform.python_version()} (needs CPython {_span(PYTHONS)})"


def _torch_support() -> tuple[bool, str]:
    try:
        version = _version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False, f"not installed (needs {_span(TORCHES)})"
    major, minor, *_ = (int(part) for part in version.split("+")[0].split(".")[:2])
    fits = TORCHES[0] <= (major, minor) <= TORCHES[1]
    return fits, f"{version} (needs {_span(TORCHES)})"


def _extension_support() -> tuple[bool, str]:
    for folder in sys.modules["magjit"].__path__:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = Path(folder) / f"_C{suffix}"
            if path.exists():
                return True, f"built for this Python: {path.name}"
    return False, "not built for this Python: run `pip install` for this interpreter"
