"""How float32 is multiplied on a GPU: what ``torch.backends`` says."""

from __future__ import annotations

import torch

__all__ = ["float32_precision"]


def float32_precision() -> str:
    """``"tf32"`` where torch allows it for products, else ``"ieee"``; for ``tl.dot``."""
    matmul = torch.backends.cuda.matmul
    found = getattr(matmul, "fp32_precision", None)
    if found is None:
        return "tf32" if matmul.allow_tf32 else "ieee"
    return "tf32" if found == "tf32" else "ieee"
