"""Stacks: fused operators that are run in one call (DVM, §5, Figure 9).

In space, cores share the work of all of them; in time, a core takes several in turn.  What it
saves is a region of threads for each but the first, on a GPU a launch, and it keeps all cores busy
where none of the operators would by itself.

On a GPU they may depend on one another where they are small: a block that computes one of them by
itself goes on with the next, and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node as FxNode

from magjit.plugin.sizes import elements
from magjit_dvm.groups import VIEWS, FusedGroup, Size
from magjit_dvm.touching import Touched
from magjit_dvm.waiting import MOST, may_wait

__all__ = ["MOST", "Stack", "stacked"]

_OF_A_BLOCK = 4096
"""Elements that a block has at a time, as in ``csrc/cuda_stacks.cpp``, where each call decides;
this is so that operators which are larger at first do not wait for one another."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Groups that one call runs; on a GPU some may take results of those before them."""

    groups: tuple[FusedGroup, ...]

    @property
    def outputs(self) -> list[FxNode]:
        """Of all of them, in their order."""
        return [node for group in self.groups for node in group.outputs]

    @property
    def operands(self) -> list[FxNode]:
        """What must have been computed before."""
        made = set(self.outputs)
        return [node for group in self.groups for node in group.operands if node not in made]


def stacked(steps: Sequence[FusedGroup | FxNode]) -> list[FusedGroup | FxNode | Stack]:
    """The steps, with neighbouring groups in stacks; views between them move out of the way."""
    done: list[FusedGroup | FxNode | Stack] = []
    groups: list[FusedGroup] = []
    after: list[FxNode] = []
    late: set[FxNode] = set()
    written: set[FxNode] = set()  # wholes, of which several may write parts at once
    small: set[FxNode] = set()  # results of groups that a block may compute by itself
    touched = Touched(steps)

    def flush() -> None:
        if groups:
            done.append(groups[0] if len(groups) == 1 else Stack(tuple(groups)))
        done.extend(after)
        groups.clear()
        after.clear()
        late.clear()
        written.clear()
        small.clear()
        touched.clear()

    for step in steps:
        if isinstance(step, FusedGroup):
            read = set(step.operands) - set(step.written)
            fits = _fits_a_block(step)
            taken = small & _given(step) if fits else set()
            waits = bool(late & (set(step.operands) - taken) or written & read)
            waits |= touched.holds_back(step)
            alone = step.cube >= 0 or (step.on_gpu and not may_wait(step))
            other = bool(groups) and groups[0].on_gpu != step.on_gpu
            if alone or other or len(groups) == MOST or waits:
                flush()
            if alone:
                done.append(step)
            else:
                groups.append(step)
                touched.add(step)
                late.update(step.outputs)
                written.update(step.written)
                small.update(step.outputs if fits else ())
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


def _fits_a_block(group: FusedGroup) -> bool:
    """Whether one block computes a group on a GPU by itself, at the sizes that are known."""
    if not group.on_gpu:
        return False
    made = (node.meta.get("val") for node in (*group.operands, *group.nodes))
    tensors = (one for one in made if isinstance(one, torch.Tensor))
    return all(elements(one.shape) <= _OF_A_BLOCK for one in tensors)


def _given(group: FusedGroup) -> set[FxNode]:
    """What a call passes itself, not only its sizes, and not to be written."""
    sizes = {node for one in group.arguments if isinstance(one, Size) for node in one.nodes}
    return {one for one in group.arguments if isinstance(one, FxNode)} - sizes - {*group.written}
