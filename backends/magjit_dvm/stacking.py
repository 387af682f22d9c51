"""Stacks: fused operators that do not depend on one another, run in one call (DVM, §5, Figure 9).

In space, cores share the work of all of them; in time, a core takes several in turn.  What it
saves is a region of threads for each but the first, on a GPU a launch, and it keeps all cores busy
where none of the operators would by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node as FxNode

from magjit_dvm.groups import VIEWS, FusedGroup
from magjit_dvm.waiting import MOST, may_wait

__all__ = ["MOST", "Stack", "stacked"]


@dataclass(frozen=True, slots=True)
class Stack:
    """Groups that one call runs."""

    groups: tuple[FusedGroup, ...]

    @property
    def outputs(self) -> list[FxNode]:
        """Of all of them, in their order."""
        return [node for group in self.groups for node in group.outputs]

    @property
    def operands(self) -> list[FxNode]:
        """What must have been computed before."""
        return [node for group in self.groups for node in group.operands]


def stacked(steps: Sequence[FusedGroup | FxNode]) -> list[FusedGroup | FxNode | Stack]:
    """The steps, with neighbouring groups in stacks; views between them move out of the way."""
    done: list[FusedGroup | FxNode | Stack] = []
    groups: list[FusedGroup] = []
    after: list[FxNode] = []
    late: set[FxNode] = set()
    written: set[FxNode] = set()  # wholes, of which several may write parts at once

    def flush() -> None:
        if groups:
            done.append(groups[0] if len(groups) == 1 else Stack(tuple(groups)))
        done.extend(after)
        groups.clear()
        after.clear()
        late.clear()
        written.clear()

    for step in steps:
        if isinstance(step, FusedGroup):
            read = set(step.operands) - set(step.written)
            waits = late & set(step.operands) or written & read
            alone = step.cube >= 0 or (step.on_gpu and not may_wait(step))
            other = bool(groups) and groups[0].on_gpu != step.on_gpu
            if alone or other or len(groups) == MOST or waits:
                flush()
            if alone:
                done.append(step)
            else:
                groups.append(step)
                late.update(step.outputs)
                written.update(step.written)
        elif step.op == "placeholder":
            done.append(step)
        elif step.target not in VIEWS:
            flush()
            done.append(step)
        elif (late | written).isdisjoint(step.all_input_nodes):
            done.append(step)
        else:
            after.append(step)
            late.add(step)
    flush()
    return done
