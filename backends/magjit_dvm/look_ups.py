"""Look-ups on a GPU: which of them are better left to ATen.

Words look up rows of tables, which lie side by side, as fast as they load.  Where each element has
a position of its own, an address is computed for each, and ATen's kernels do so as fast.
"""

from __future__ import annotations

import torch
from torch.fx import Node as FxNode

from magjit_dvm.groups import FusedGroup
from magjit_dvm.program import NodeKind, Program

__all__ = ["only_looks_up", "repeated"]

aten = torch.ops.aten
_LOOK_UPS = frozenset(
    {
        *(aten.embedding.default, aten.gather.default),
        *(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
    }
)


def only_looks_up(group: FusedGroup) -> bool:
    """Whether nothing is computed of what is looked up, or of positions."""
    kinds = {one.kind for one in group.program.nodes} if group.program is not None else set()
    computes = {NodeKind.COMPUTE, NodeKind.REDUCE, NodeKind.SCAN}
    return kinds.isdisjoint(computes) and not kinds.isdisjoint({NodeKind.IOTA, NodeKind.INDEX})


def repeated(group: FusedGroup) -> FxNode | None:
    """A look-up, element by element, that a group would do again and again along a loop.

    An example is a bias of relative positions, which all batches share.
    """
    found = [one for one in group.nodes if one.target in _LOOK_UPS]
    if not found or group.program is None or not _repeats(group.program):
        return None
    return found[0]


def _repeats(program: Program) -> bool:
    varies = program.varies
    loops = frozenset[int]().union(*varies)
    rows = [one.dims for one in program.nodes if one.kind is NodeKind.REDUCE]
    full = [one for one in program.outputs if one.order and varies[one.node] == loops]
    inner = frozenset[int]().union(*rows) or frozenset(one.dims[one.order[-1]] for one in full)
    return any(
        node.kind is NodeKind.INDEX and varies[node.args[0]] & inner and varies[number] != loops
        for number, node in enumerate(program.nodes)
    )
