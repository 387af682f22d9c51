"""Bytecode: the opcode table, the decoder, static stack depths and the splicer (MagPy, ATC'24, section 5.1).

Layers, in order: optable (facts) -> depths -> decode -> splice.  Nothing here needs torch.
"""

from magjit.bytecode.decode import CodeInfo, Instr, Plan, decode, fast_local_names, plan_for
from magjit.bytecode.optable import EventKind

__all__ = ["CodeInfo", "EventKind", "Instr", "Plan", "decode", "fast_local_names", "plan_for"]
