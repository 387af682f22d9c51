"""Products of a program that are chosen at run time: among macro-kernels and the library.

    y = macro_0(stream, batch, m, x, w, b)     one call: choose, make the result, launch

A group is chosen like this where it is a family of the table that ``sources`` has for the current
device.  Everything else is planned as without macro-kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from magjit_triton.codegen.fusion import Group, Plan
from magjit_triton.codegen.layout import Layout
from magjit_triton.codegen.matmul.fusing import ProductFusion
from magjit_triton.codegen.matmul.products import is_product
from magjit_triton.codegen.printer import expression
from magjit_triton.codegen.program_parts import Step
from magjit_triton.macro.assemble import Assembled
from magjit_triton.macro.device import Device
from magjit_triton.macro.families import MacroFamily
from magjit_triton.macro.library import GeneralProgram, library_way
from magjit_triton.macro.loading import Loaded, sizes_by_role
from magjit_triton.macro.matching import Match, matched
from magjit_triton.macro.repository import Entry
from magjit_triton.macro.selector import Selector, compiled
from magjit_triton.macro.sources import Entries
from magjit_triton.macro.waves import LIBRARY

__all__ = [
    "Kernels",
    "Launch",
    "MacroCall",
    "MacroFusion",
    "MacroProgram",
    "kernels_here",
    "macro_parts",
    "parts_with",
]

Launch = Callable[[int, int, Sequence[torch.Tensor], dict[str, int]], None]
"""Starts a configuration: stream, programs, buffers in the kernels' order, sizes by roles."""


def launch_of(assembled: Assembled, family: MacroFamily) -> Launch:
    """A configuration launched on CUDA tensors; it is loaded now, so that no call waits for it."""
    loaded = Loaded(assembled).ready()

    def launch(
        stream: int, programs: int, buffers: Sequence[torch.Tensor], sizes: dict[str, int]
    ) -> None:
        needed = loaded.workspace(sizes)
        workspace = torch.empty(needed, device=buffers[0].device) if needed else None
        place = 0 if workspace is None else workspace.data_ptr()
        loaded(stream, programs, [one.data_ptr() for one in buffers], sizes, place)

    return launch


@dataclass(frozen=True, slots=True)
class Ready:
    """A family's choice, and a launch for each configuration that it chooses from."""

    selector: Selector
    launches: list[Launch]


class MacroCall:
    """A product of a program: ``call(stream, batch, m, *operands) -> result``.

    Args:
        match: which family, and its n and k.
        ready: what products of the family share.
    """

    def __init__(self, match: Match, ready: Ready) -> None:
        family = match.family
        assert family.template is not None
        self._n, self._k = match.n, match.k
        self._template = family.template
        self._order = family.order
        self._way = library_way(family, "cuda" if torch.cuda.is_available() else "cpu", match.n)
        self._selector, self._launches = ready.selector, ready.launches
        self._batched = len(family.template.shapes[0]) == 3

    def __call__(self, stream: int, batch: int, m: int, *operands: torch.Tensor) -> torch.Tensor:
        """Choose and start: operands are memory, in the template's order.

        Returns:
            [batch, m, n] or [m, n], contiguous.
        """
        index, programs, _ = self._selector.choose(batch, m, self._n, self._k)
        # Kernels were built for addresses that are multiples of 16.
        if index == LIBRARY or any(one.data_ptr() & 15 for one in operands):
            return self._library(batch, m, operands)
        shape = (batch, m, self._n) if self._batched else (m, self._n)
        result = torch.empty(shape, dtype=operands[0].dtype, device=operands[0].device)
        buffers = [*operands, result]
        sizes = sizes_by_role(batch, m, self._n, self._k)
        self._launches[index](stream, programs, [buffers[one] for one in self._order], sizes)
        return result

    def _library(self, batch: int, m: int, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        sizes = sizes_by_role(batch, m, self._n, self._k)
        views = []
        for one, roles in zip(operands, self._template.shapes, strict=True):
            shape = [sizes[role] for role in roles]
            strides = [1] * len(shape)
            for axis in reversed(range(len(shape) - 1)):
                strides[axis] = strides[axis + 1] * shape[axis + 1]
            views.append(one.as_strided(shape, strides, one.storage_offset()))
        return self._way(*views).contiguous()


@dataclass(frozen=True)
class Kernels:
    """What a repository has for the current device.

    Attributes:
        entries: by signature; see ``sources``.
        launcher: how a configuration is started.
        known: what was made ready, by signature.
    """

    entries: Mapping[str, Entry]
    device: Device
    launcher: Callable[[Assembled, MacroFamily], Launch] = launch_of
    known: dict[str, Ready] = field(default_factory=dict)

    def ready(self, family: MacroFamily) -> Ready:
        """What products of a family share."""
        if family.signature not in self.known:
            entry = self.entries[family.signature]
            launches = [
                self.launcher(one.assembled, family) for one in entry.stored if one.wave is not None
            ]
            self.known[family.signature] = Ready(compiled(entry.model(self.device)), launches)
        return self.known[family.signature]

    def match(self, fusion: ProductFusion, group: Group, stored: set[Node]) -> Match | None:
        """The family of a group, where there are kernels for it."""
        kept = [node for node in group.nodes if node in stored]
        if len(kept) != 1 or kept[0] in fusion.updates or kept[0] in fusion.placed:
            return None
        found = matched(MacroFamily("group", fusion, group, kept).family)
        if found is None or found.family.signature not in self.entries:
            return None
        return found


def kernels_here() -> Kernels | None:
    """Of the user's file, the wheel and the current device; None where there is no device."""
    if not torch.cuda.is_available():
        return None
    return Kernels(Entries.here(), Device.current())


@dataclass
class MacroFusion(ProductFusion):
    """A fusion in which products of known families are macro-kernels'."""

    kernels: Kernels | None = None
    matches: dict[Node, Match] = field(default_factory=dict)

    def is_candidate(self, node: Node) -> bool:
        """Every product, at first."""
        assert self.kernels is not None
        return node.op == "call_function" and is_product(node, self.fusible_devices)

    def pays(self, group: Group, plan: Plan) -> bool:
        """Where the repository has the group's family; else as without one.

        A product of known sizes that is too large for one of its kernels to be as fast as one whose
        operands descriptors load is planned as without a repository.
        """
        assert self.kernels is not None
        products = self.products_in(group.nodes)
        found = self.kernels.match(self, group, set(plan.stored))
        candidate = super().is_candidate
        own = self.setting == "auto" and all(map(candidate, products))
        if found is not None and not (own and self.pays_described(group, plan)):
            self.matches.update(dict.fromkeys(products, found))
            return True
        for one in products:
            self.matches.pop(one, None)
        if self.setting == "macro" or not all(map(candidate, products)):
            return False
        return super().pays(group, plan)


@dataclass
class MacroProgram(GeneralProgram):
    """Writes a call where a product is chosen at run time."""

    def product(self, group: Group, kept: Sequence[Node]) -> Step:
        """A macro-kernel's call, or the kernels of a group."""
        assert isinstance(self.fusion, MacroFusion) and self.fusion.kernels is not None
        found = self.fusion.matches.get(self.fusion.products_in(group.nodes)[0])
        if found is None:
            return super().product(group, kept)
        kernels = self.fusion.kernels
        family = MacroFamily("group", self.fusion, group, list(kept)).family
        name = f"macro_{len(self.names)}"
        self.names[name] = MacroCall(found, kernels.ready(found.family))
        (node,) = kept
        self.device = node.meta["val"].device
        operands = [""] * (len(found.order) - 1)
        for buffer, place in zip(family.buffers, found.order, strict=True):
            if place < len(operands):
                operands[place] = buffer
        sizes = [expression(one) for one in (found.batch, found.m)]
        layout = self.plan.layouts[node]
        lines = [f"{node.name} = {name}({', '.join(['stream', *sizes, *operands])})"]
        lines.append(f"{node.name} = {self.strided(node.name, layout)}")
        return Step(lines, set(operands), {node.name}, {node.name})

    def strided(self, name: str, layout: Layout) -> str:
        """A result with the sizes and strides that were planned."""
        return self._strided(name, layout)


def macro_parts(setting: str) -> dict[str, Any]:
    """What ``compile_graph`` is given besides, for a setting of ``matmul``."""
    if setting not in ("macro", "auto"):
        return {}
    kernels = kernels_here()
    return parts_with(kernels) if kernels is not None and kernels.entries else {}


def parts_with(kernels: Kernels) -> dict[str, Any]:
    """The plan and the program with these kernels."""
    return {"fusing": partial(MacroFusion, kernels=kernels), "writing": MacroProgram}
