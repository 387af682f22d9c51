"""ATen graphs without data movement: virtual tensors read and written where they are.

In the order in which data flows: ``backend`` → ``passes`` → the search of
``magjit.plugin.virtual_tensors``, asking ``kernels`` → ``emit``.
"""

from magjit.plugin import for_torch_compile
from magjit_triton.backend import TritonBackend

__all__ = ["TritonBackend", "backend", "compile_for_torch"]

backend = TritonBackend()
compile_for_torch = for_torch_compile(backend)
