"""Bytecode: the opcode table, static stack depths, the decoder and the splicer (MagPy, §5.1).

Layers, in order: optable (facts) -> depths -> decode -> splice.  Nothing here needs torch.
"""

from magjit.bytecode.decode import (
    CodeInfo,
    Instr,
    Plan,
    decode,
    fast_local_names,
    plan_for,
    stored_attributes,
)
from magjit.bytecode.optable import EventKind

__all__ = [
    "CodeInfo",
    "EventKind",
    "Instr",
    "Plan",
    "decode",
    "fast_local_names",
    "plan_for",
    "stored_attributes",
]
