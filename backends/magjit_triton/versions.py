"""What else everything on disk depends on: versions, and the code that decides."""

from __future__ import annotations

import hashlib
import importlib.metadata
from functools import cache
from pathlib import Path

import torch

import magjit.plugin.virtual_tensors

__all__ = ["versions"]


@cache
def versions() -> tuple[str, ...]:
    """Versions, and the text of the code that decides."""
    try:
        import triton

        found = triton.__version__
    except ImportError:
        found = "none"
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(magjit.plugin.virtual_tensors.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    try:
        own = importlib.metadata.version("magjit")
    except importlib.metadata.PackageNotFoundError:
        own = "none"
    return str(torch.__version__), found, own, digest.hexdigest()
