"""MagJIT: one line, one graph, for PyTorch programs as they are."""

import importlib
import re
import sys
from typing import TYPE_CHECKING, Any

from magjit.garbage import uncollected

__version__ = "0.1.0"

if TYPE_CHECKING:
    from magjit import annotations, config, errors
    from magjit.api import compile, reset, stats
    from magjit.dispatch import MagJITWarning
    from magjit.marks import (
        allow_in_graph,
        disable,
        graph_break,
        is_compiling,
        mark_dynamic,
        mark_static,
    )
    from magjit.plugin import list_backends
    from magjit.records import Stats
    from magjit.reporting.explaining import explain
    from magjit.stances import set_stance

_HOMES = {
    "allow_in_graph": "magjit.marks",
    "disable": "magjit.marks",
    "graph_break": "magjit.marks",
    "is_compiling": "magjit.marks",
    "mark_dynamic": "magjit.marks",
    "mark_static": "magjit.marks",
    "compile": "magjit.api",
    "explain": "magjit.reporting.explaining",
    "reset": "magjit.api",
    "set_stance": "magjit.stances",
    "stats": "magjit.api",
    "list_backends": "magjit.plugin",
    "MagJITWarning": "magjit.dispatch",
    "Stats": "magjit.records",
}
_PYTHON = ((3, 11), (3, 14))
_TORCH = ((2, 11), (2, 14))
_MODULES = ("annotations", "config", "errors", "plugin")

__all__ = [
    "MagJITWarning",
    "Stats",
    "allow_in_graph",
    "annotations",
    "compile",
    "config",
    "disable",
    "errors",
    "explain",
    "graph_break",
    "is_compiling",
    "list_backends",
    "mark_dynamic",
    "mark_static",
    "reset",
    "set_stance",
    "stats",
]


def __getattr__(name: str) -> Any:
    """Load a part of the API at its first use; the bytecode layer works without torch."""
    if name in _HOMES or name == "plugin":
        check_versions()
        importlib.import_module("magjit._C")
    if name in _HOMES:
        # Of the time that torch's compiler modules take to load, the collector's is a third.
        with uncollected():
            value = getattr(importlib.import_module(_HOMES[name]), name)
        _add_what_is_loaded()
    elif name in _MODULES:
        with uncollected():
            value = importlib.import_module(f"magjit.{name}")
    else:
        raise AttributeError(f"module 'magjit' has no attribute {name!r}")
    globals()[name] = value
    return value


def _add_what_is_loaded() -> None:
    """Names of modules that are loaded: a captured program's first use of one adds nothing."""
    for name, home in _HOMES.items():
        loaded = vars(sys.modules[home]) if home in sys.modules else {}
        if name in loaded:
            globals().setdefault(name, loaded[name])


def check_versions() -> None:
    """Raise `UnsupportedPythonError` where MagJIT cannot work, before anything is set up."""
    from magjit.errors import UnsupportedPythonError

    def range_of(bounds: tuple[tuple[int, int], tuple[int, int]]) -> str:
        (major, low), (_, high) = bounds
        return f"{major}.{low} to {major}.{high - 1}"

    implementation, version = sys.implementation.name, sys.version_info[:3]
    if implementation != "cpython" or not _PYTHON[0] <= version[:2] < _PYTHON[1]:
        raise UnsupportedPythonError(
            f"MagJIT runs on CPython {range_of(_PYTHON)}, not on "
            f"{implementation} {'.'.join(map(str, version))}",
            remedy="use one of these versions; nothing has been changed in this process",
        )
    import torch

    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None or not _TORCH[0] <= (int(found[1]), int(found[2])) < _TORCH[1]:
        raise UnsupportedPythonError(
            f"MagJIT works with torch {range_of(_TORCH)}, not with {torch.__version__}",
            remedy=f"pip install 'torch>={_TORCH[0][0]}.{_TORCH[0][1]},"
            f"<{_TORCH[1][0]}.{_TORCH[1][1]}'",
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
