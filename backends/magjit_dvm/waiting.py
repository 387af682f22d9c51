"""Fused operators on GPUs wait for others that do not depend on them, to be launched with them.

In the graph's order they are seldom neighbours: of a layer's query, key and value, each is a
product, its bias and its heads.  A step moves in front of waiting operators if it does not need
them, and behind them if it does; what draws or writes does not move at all, and nothing passes it.
An operator waits for a few products at most, so that little more memory is in use at a time.

Operators that are fused with nothing, and are as fast by ATen's kernels, wait as well: in a launch
with others they cost next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from operator import getitem

import torch
from torch.fx import Node as FxNode

from magjit.plugin.fx_nodes import draws_random, is_symbol
from magjit.plugin.writes import updated
from magjit_dvm.attention import attention
from magjit_dvm.groups import VIEWS, FusedGroup, Fusion, operands_of, results_of
from magjit_dvm.program import NodeKind
from magjit_dvm.touching import Touched

__all__ = ["MOST", "gathered", "let_wait", "may_wait"]

MOST = 8
"""Members of a stack: as many as a launch has room for."""
_AHEAD = 8
"""Operators that may go ahead of those that wait."""
_LONGEST = 96
"""Steps that are looked at, so that the time for all of them stays linear."""

Step = FusedGroup | FxNode


def may_wait(step: Step) -> bool:
    """Whether a step is a fused operator that a launch may have with others."""
    if not isinstance(step, FusedGroup) or not step.on_gpu or step.program is None:
        return False
    return not step.program.has(NodeKind.DRAW)


def let_wait(fusion: Fusion) -> None:
    """Bring a fusion's steps into an order in which what may share a launch is together."""
    fusion.steps = gathered(fusion.steps, fusion.alone)
    groups = {id(step) for step in fusion.steps}
    for node, group in fusion.alone.items():
        if id(group) in groups:
            fusion.reasons.pop(node)


def gathered(steps: Sequence[Step], alone: Mapping[FxNode, FusedGroup]) -> list[Step]:
    """The steps, with fused operators that do not depend on one another behind one another.

    Args:
        steps: in an order in which they can run.
        alone: what single nodes are as fused operators, where there are others to go with.
    """
    left, done, touched = deque(steps), list[Step](), Touched(steps)
    while left:
        step = left.popleft()
        first = _as_group(step, alone)
        if not may_wait(first):
            done.append(step)
            continue
        touched.clear()
        window = _Window(first, touched)
        while left and window.takes(left[0]):
            window.add(left.popleft(), alone)
        if len(window.waiting) == 1:
            left.extendleft(reversed(window.passed))
            done.append(step)
        else:
            done += (*window.ahead, *window.waiting)
            left.extendleft(reversed(window.behind))
    return done


def _as_group(step: Step, alone: Mapping[FxNode, FusedGroup]) -> Step:
    return alone.get(step, step) if isinstance(step, FxNode) else step


class _Window:
    """Fused operators that wait, and what has been seen since the first of them."""

    def __init__(self, first: Step, touched: Touched) -> None:
        self.touched = touched  # by those that wait, and those behind them
        self.waiting: list[Step] = []
        self.ahead: list[Step] = []
        self.behind: list[Step] = []
        self.passed: list[Step] = []
        self.late: set[FxNode] = set()
        self.written: set[FxNode] = set()  # wholes, of which several may write parts at once
        self.products = 0
        self._wait(first)

    def takes(self, step: Step) -> bool:
        """Whether the next step may change places with those before it."""
        room = len(self.waiting) < MOST and self.products < _AHEAD and len(self.passed) < _LONGEST
        return room and _moves(step)

    def add(self, step: Step, alone: Mapping[FxNode, FusedGroup]) -> None:
        self.passed.append(step)
        group = _as_group(step, alone)
        written = set(step.written) if isinstance(step, FusedGroup) else set[FxNode]()
        read = set(operands_of(step)) - written
        late = self.late & (read | written) or self.written & read
        if late or self.touched.holds_back(step):
            self.behind.append(step)
            self.touched.add(step)
            self.late.update(results_of(step))
            self.late.update(written)
        elif may_wait(group):
            self._wait(group)
        else:
            self.ahead.append(step)
            self.products += not _costs_nothing(step)

    def _wait(self, step: Step) -> None:
        assert isinstance(step, FusedGroup)
        self.waiting.append(step)
        self.touched.add(step)
        self.late.update(step.outputs)
        self.written.update(step.written)


def _costs_nothing(step: Step) -> bool:
    if isinstance(step, FusedGroup):
        return False
    return step.op == "get_attr" or step.target in (*VIEWS, getitem, updated) or is_symbol(step)


def _moves(step: Step) -> bool:
    """Whether it is the same wherever its operands are: nothing is written, nothing drawn."""
    if isinstance(step, FusedGroup):
        return may_wait(step)
    if step.target is attention or _costs_nothing(step):
        return True
    if not isinstance(step.target, torch._ops.OpOverload) or step.is_impure():
        return False
    if step.target.namespace not in ("aten", "prims"):
        return False  # others may talk to somebody, who expects an order
    return not step.target._schema.is_mutable and not draws_random(step)
