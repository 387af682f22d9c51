"""Torch's Inductor as a MagJIT backend: inference, training, CUDA graphs.

Thin: AOTAutograd, functionalisation and code generation are torch's own; ``mode`` and
``options`` mean what they mean to ``torch.compile``.
"""

from magjit.plugin import for_torch_compile
from magjit_inductor.backend import InductorBackend

__all__ = ["InductorBackend", "backend", "compile_for_torch"]

backend = InductorBackend()
compile_for_torch = for_torch_compile(backend)
