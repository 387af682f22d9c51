"""MagJIT: one line, one graph, for PyTorch programs as they are."""


import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from magjit import annotations, config, errors
    from magjit.api import compile, reset, stats
    from magjit.dispatch import MagJITWarning
    from magjit.marks import allow_in_graph, disable, graph_break, is_compiling
    from magjit.plugin import list_backends
    from magjit.records import Stats
    from magjit.reporting.explaining import explain

_HOMES = {
    "allow_in_graph": "magjit.marks",
    "disable": "magjit.marks",
    "graph_break": "magjit.marks",
    "is_compiling": "magjit.marks",
    "compile": "magjit.api",
    "explain": "magjit.reporting.explaining",
    "reset": "magjit.api",
    "stats": "magjit.api",
    "list_backends": "magjit.plugin",
    "MagJITWarning": "magjit.dispatch",
    "Stats": "magjit.records",
}
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
    "reset",
    "stats",
]


def __getattr__(name: str) -> Any:
    """Load a part of the API at its first use; the bytecode layer works without torch."""
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"magjit.{name}")
    else:
        raise AttributeError(f"module 'magjit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
