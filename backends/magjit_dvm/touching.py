"""What orders steps though none takes the other's result: inputs that are written.

A fused operator that stores into an input (``in_place.py``) runs behind what reads the old value,
and in no launch with it.  What reads the new value waits for a step of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node as FxNode

from magjit.plugin.aliases import memory_of
from magjit_dvm.groups import FusedGroup, operands_of

__all__ = ["Touched", "stored_by"]

Step = FusedGroup | FxNode


class Touched:
    """The memory that some steps read and write.

    Args:
        steps: all that may be added; where none of them stores into an input, nothing is asked.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self._needed = any(isinstance(one, FusedGroup) and one.stores for one in steps)
        self._read: set[FxNode] = set()
        self._written: set[FxNode] = set()

    def holds_back(self, step: Step) -> bool:
        """Whether a step has to run behind one of those that have been added."""
        if not self._needed:
            return False
        written = stored_by(step)
        held = self._written & memory_of(operands_of(step)) or written & self._read
        return bool(held or written & self._written)

    def add(self, step: Step) -> None:
        """Add a step."""
        if self._needed:
            self._read |= memory_of(operands_of(step))
            self._written |= stored_by(step)

    def clear(self) -> None:
        """Forget the steps."""
        self._read.clear()
        self._written.clear()


def stored_by(step: Step) -> set[FxNode]:
    """The inputs that a step stores into."""
    if not isinstance(step, FusedGroup):
        return set()
    return memory_of(one for copy in step.stores for one in copy.all_input_nodes[:1])
