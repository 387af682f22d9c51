"""What was decided about a graph, kept on disk: a second process neither searches nor measures.

    Decisions ::= (tensor, operator, direction)*  digest of a kernel → Blocks

Keyed by all that decides: the graph with shapes, strides, dtypes and symbols, mode and objective,
the device, versions, and the code that decides. A strategy that is read is checked like any other.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from magjit.plugin.cache import disk_cache, fingerprint
from magjit.plugin.virtual_tensors.costs import CostModel
from magjit.plugin.virtual_tensors.opportunities import Opportunities
from magjit.plugin.virtual_tensors.refining import Names, is_legal, named, with_names
from magjit.plugin.virtual_tensors.search import Strategy
from magjit_triton.settings import Settings
from magjit_triton.versions import versions

__all__ = ["Decisions", "canonical", "device_text"]

logger = logging.getLogger(__name__)

_KIND = "triton_decisions"
_SCHEMA = 2
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")


@dataclass
class Decisions:
    """What is known of one graph.

    Attributes:
        key: of the disk cache; None where nothing is kept.
        chosen: the strategy, or None while there is none.
        blocks: digest of a kernel's source → how it is cut.
        products: name of a group with products → what was measured: seconds of our kernel and of
            the library's, and our cut, as numbers.
        found: whether this was read from the disk.
    """

    key: str | None = None
    chosen: Names | None = None
    blocks: dict[str, list[int]] = field(default_factory=dict)
    products: dict[str, tuple[float, float, list[int]]] = field(default_factory=dict)
    found: bool = False

    @classmethod
    def of(cls, gm: GraphModule, settings: Settings, kind: str) -> Decisions:
        """What is on the disk about a graph, or nothing yet.

        Args:
            gm: before anything is decided; a later graph follows from it.
            settings: mode and objective.
            kind: which part of the backend decides.
        """
        text, device = canonical(gm), device_text(gm)
        measured = settings.measures
        key = fingerprint(
            kind, text, settings.objective, settings.matmul, measured, device, *versions()
        )
        found = _parsed(disk_cache().get(_KIND, key), key)
        return cls(key) if found is None else found

    def strategy(
        self, opportunities: Opportunities, model: CostModel, order: dict[Node, int]
    ) -> Strategy | None:
        """The strategy that was kept, if it is legal."""
        if self.chosen is None:
            return None
        found = with_names(self.chosen, opportunities, order)
        if found is not None and is_legal(found, opportunities, model):
            return found
        logger.debug("decisions of another graph are not used: %s", self.key)
        self.chosen, self.found = None, False
        return None

    def choose(self, strategy: Strategy, order: dict[Node, int]) -> None:
        """Take a strategy."""
        self.chosen = named(strategy, order)

    def keep(self) -> None:
        """Write what is new to the disk; where it cannot be written, nothing is kept."""
        if self.key is None or self.found:
            return
        content = {
            "schema": _SCHEMA,
            "key": self.key,
            "chosen": self.chosen,
            "blocks": self.blocks,
            "products": self.products,
        }
        disk_cache().put(_KIND, self.key, json.dumps(content).encode())


def _parsed(payload: bytes | None, key: str) -> Decisions | None:
    if payload is None:
        return None
    try:
        content = json.loads(payload)
        if content["schema"] != _SCHEMA or content["key"] != key:
            raise ValueError("of another schema or graph")
        chosen = content["chosen"]
        if chosen is not None:
            chosen = [(int(tensor), int(maker), bool(back)) for tensor, maker, back in chosen]
        blocks = {str(name): [int(one) for one in cut] for name, cut in content["blocks"].items()}
        if any(len(cut) != 5 or min(cut[:2]) < 1 or cut[3] < 1 for cut in blocks.values()):
            raise ValueError("blocks that are none")
        products = {
            str(name): (float(ours), float(library), [int(one) for one in cut])
            for name, (ours, library, cut) in content["products"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        logger.debug("decisions on disk are ignored: %s: %s", key, error)
        return None
    return Decisions(key, chosen, blocks, products, found=True)


def canonical(gm: GraphModule) -> str:
    """A graph as text without names: nodes, arguments, fake values with example sizes."""
    numbers: dict[Node, int] = {}
    symbols: dict[str, str] = {}
    hints: dict[str, Any] = {}
    lines = []
    for node in gm.graph.nodes:
        numbers[node] = len(numbers)

        def told(one: Any) -> str:
            if isinstance(one, Node):
                return f"%{numbers[one]}"
            if isinstance(one, tuple | list):
                return f"[{', '.join(map(told, one))}]"
            if isinstance(one, dict):
                return f"{{{', '.join(f'{name}: {told(one[name])}' for name in sorted(one))}}}"
            if isinstance(one, slice):
                return f"{told(one.start)}:{told(one.stop)}:{told(one.step)}"
            return f"{type(one).__name__} {one!r}"

        what = str(node.target) if node.op == "call_function" else node.op
        value = _value_text(node.meta.get("val"), hints)
        lines.append(f"{what}{told(node.args)}{told(node.kwargs)} -> {value}")
    for name in sorted(hints, key=lambda one: "\n".join(lines).find(one)):
        symbols[name] = f"${len(symbols)}"
    lines = [_SYMBOL.sub(lambda m: symbols.get(m[0], m[0]), line) for line in lines]
    return "\n".join([*lines, *(f"{symbols[name]} = {hints[name]}" for name in symbols)])


def _value_text(value: Any, hints: dict[str, Any]) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(_value_text(one, hints) for one in value)})"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {_size_text(value, hints)}"
    if value.layout != torch.strided:
        return f"{value.dtype} {value.layout} {tuple(value.shape)} {value.device}"
    sizes = [_size_text(one, hints) for one in (*value.shape, *value.stride())]
    start = _size_text(value.storage_offset(), hints)
    return f"{value.dtype} {value.device} {sizes} + {start} grad={value.requires_grad}"


def _size_text(size: Any, hints: dict[str, Any]) -> str:
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(size)
    expr = size.node.expr
    for symbol in expr.free_symbols:
        if symbol.name not in hints:
            known = getattr(size.node.shape_env, "backed_var_to_val", None)
            values = size.node.shape_env.var_to_val if known is None else known
            hints[symbol.name] = values.get(symbol)
    return str(expr)


def device_text(gm: GraphModule) -> str:
    """Names of the devices of a graph, with what tells apart those of one name."""
    found = set()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            found.add(value.device)
    lines = []
    for device in sorted(found, key=str):
        if device.type == "cuda" and torch.cuda.is_available():
            facts = torch.cuda.get_device_properties(device)
            about = f"{facts.name} {facts.major}.{facts.minor} {facts.multi_processor_count}"
        else:
            about = f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
        lines.append(f"{device.type}: {about}")
    return "; ".join(lines)
