"""What else everything on disk depends on: versions, and the code that decides."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from pathlib import Path

import torch

import magjit.plugin.virtual_tensors
from magjit.plugin.cache import code_digest

__all__ = ["versions"]


@cache
def versions() -> tuple[str, ...]:
    """Versions, and the text of the code that decides."""
    try:
        import triton

        found = triton.__version__
    except ImportError:
        found = "none"
    folders = Path(__file__).parent, Path(magjit.plugin.virtual_tensors.__file__).parent
    try:
        own = importlib.metadata.version("magjit")
    except importlib.metadata.PackageNotFoundError:
        own = "none"
    return str(torch.__version__), found, own, code_digest(*folders)
