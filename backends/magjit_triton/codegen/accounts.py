"""What a plan moves, and what is virtual in it, for reports."""

from __future__ import annotations

from torch.fx import Node

from magjit.plugin.virtual_tensors.accounts import Account, bytes_by_itself
from magjit.plugin.virtual_tensors.costs import tensor_bytes
from magjit.plugin.virtual_tensors.opportunities import Movements
from magjit.plugin.virtual_tensors.search import Strategy
from magjit_triton.codegen.fusion import Fusion
from magjit_triton.codegen.graphs import is_tensor, movement_of
from magjit_triton.codegen.plan import Group, Plan
from magjit_triton.codegen.traffic import GeneratedKernels

__all__ = ["moved_by", "virtual_in"]


def moved_by(fusion: Fusion, plan: Plan) -> Account:
    """Bytes that kernels and library calls read and write; a kernel's under its first result."""
    alone = bytes_by_itself(fusion.gm.graph)
    found = {}
    for unit in plan.units:
        if isinstance(unit, Group):
            stored = [node for node in unit.nodes if node in plan.stored]
            what = "kernel" if len(stored) == 1 else f"kernel of {len(stored)} results"
            found[stored[0].name] = what, _kernel(fusion, unit, stored)
        elif unit.name in alone:
            found[unit.name] = alone[unit.name]
    return found


def _kernel(fusion: Fusion, group: Group, stored: list[Node]) -> float:
    """What a kernel reads once, and what it writes."""
    kernels = GeneratedKernels(fusion, Movements())
    read: dict[Node, float] = {}
    written = 0.0
    for node in stored:
        update = fusion.updates.get(node)
        source = node if update is None else update.value
        written += tensor_bytes(source.meta["val"])
        leaves = kernels.leaves(source, Strategy())
        if update is not None and kernels.has_memory(source, Strategy()):
            leaves = {source: tensor_bytes(source.meta["val"])}
        for leaf, size in leaves.items():
            if leaf not in group.nodes:
                read[leaf] = max(read.get(leaf, 0.0), size)
    return written + sum(read.values())


def virtual_in(fusion: Fusion, plan: Plan) -> dict[Node, list[tuple[Node, str]]]:
    """Tensor that is never made → those that its readers read, or in which it is computed."""
    found: dict[Node, list[tuple[Node, str]]] = {}
    for node in fusion.gm.graph.nodes:
        if not is_tensor(node):
            continue
        if node in plan.placed:
            found[node] = [(plan.placed[node], plan.placed[node].name)]
        elif node not in fusion.realized and fusion.fusible(node):
            moved = movement_of(node)
            if moved is not None:
                sources = dict.fromkeys(moved[1])
                found[node] = [(source, node.name) for source in sources]
    return found
