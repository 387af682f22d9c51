"""DVM on the CPU: operators compiled to tile bytecode in microseconds, for any shape.

After "DVM: Real-Time Kernel Generation for Dynamic AI Models", re-targeted: a core is a
thread, local memory a part of its cache.
"""

from magjit.plugin import for_torch_compile
from magjit_dvm.backend import DvmBackend
from magjit_dvm.disassembler import disassemble
from magjit_dvm.lazy_mode import LazyError, LazyStats, lazy
from magjit_dvm.vm import machine

__all__ = [
    "DvmBackend",
    "LazyError",
    "LazyStats",
    "backend",
    "compile_for_torch",
    "disassemble",
    "lazy",
    "machine",
]

backend = DvmBackend()
compile_for_torch = for_torch_compile(backend)
