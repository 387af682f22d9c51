"""Attention within small windows as one kernel, on operands that are never made (VTC §4.2).

    Attention ::= out[…] = (scores(left @ right)) @ values          for each matrix of a batch

``left``, ``right``, ``values`` and the result are virtual: each tile is loaded, or stored, through
its movements, so that neither the heads are separated nor the windows cut.  ``scores`` is any
pointwise expression with reductions over its rows: bias, masks, softmax.  A whole window is one
tile, so this is for windows of up to 128 positions; longer contexts stay with the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from magjit.plugin.fx_nodes import remove_unused
from magjit.plugin.virtual_tensors.calls import operand_nodes
from magjit.plugin.virtual_tensors.indexing import index_symbols, simplify, substitute
from magjit.plugin.virtual_tensors.mapping import Movement
from magjit.plugin.virtual_tensors.rules import directions_of
from magjit_triton.codegen.domain import Domain, total
from magjit_triton.codegen.graphs import ABSORBED, movement_of
from magjit_triton.codegen.ir import Builder, Dim, Store
from magjit_triton.codegen.kernel import WIDE_FROM, Kernel, rename_buffers
from magjit_triton.codegen.layout import Layout, sizes_of
from magjit_triton.codegen.lowering import Lowering, Unfusible
from magjit_triton.codegen.matmul.precision import float32_precision
from magjit_triton.codegen.nest import Axis, Nest
from magjit_triton.codegen.printer import HEADER, TRITON_DTYPES, Blocks, Printer

__all__ = ["AttentionKernel", "attend", "attention_kernel", "attention_parts", "find_attention"]

aten = torch.ops.aten
_LONGEST = 128
_FEWEST = 32
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def attend(left: Any, right: Any, weights: Any, values: Any, like: Any) -> Any:
    """Stands in a graph for one attention kernel; is never called."""
    raise NotImplementedError("attention is run by its kernel")


@dataclass(frozen=True)
class AttentionKernel(Kernel):
    """A kernel whose text is made of five parts: four tiles and a store."""

    body: str = ""

    def text(self, blocks: Blocks) -> str:
        """Source of the kernel; its tiles are the whole operands."""
        return self.body

    @cached_property
    def source(self) -> str:
        """Triton source with its imports."""
        return HEADER + self.body

    def grid(self) -> tuple[str, str]:
        """One program for each matrix."""
        return str(self.nest.axes[0].size), "1"


@dataclass(frozen=True)
class _Attention:
    """What an ``attend`` node computes.

    Attributes:
        first: the product whose values are the scores.
        weights: expression of them, with the dimensions of the batch, the rows and the columns.
        values: what the weights are multiplied with.
        width: the size of its last dimension.
        moves: from an index of the product to one of the result, step by step.
    """

    first: Node
    weights: Node
    values: Node
    width: int
    moves: tuple[Movement, ...]


# Finding it.


def find_attention(gm: GraphModule, devices: Sequence[str], fusible: Any) -> None:
    """Put ``attend`` in the place of each product of weights and values that one kernel can do."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not aten.bmm.default:
            continue
        found = _matched(node, devices, fusible)
        if found is None:
            continue
        first, interior = found
        result = _moved_result(node)
        with gm.graph.inserting_before(result.next):
            weights, values = node.args
            made = gm.graph.call_function(attend, (*first.args, weights, values))
        made.meta = {key: value for key, value in result.meta.items() if key != "magjit_movement"}
        made.meta["magjit_attention"] = _Attention(
            first, weights, values, int(values.meta["val"].shape[2]), _moves(node, result)
        )
        result.replace_all_uses_with(made)
        for one in (first, *interior):
            one.meta[ABSORBED] = True
        remove_unused(gm.graph)


def _matched(node: Node, devices: Sequence[str], fusible: Any) -> tuple[Node, set[Node]] | None:
    weights, values = node.args
    if not (isinstance(weights, Node) and isinstance(values, Node)):
        return None
    batch, rows, columns = weights.meta["val"].shape
    width = values.meta["val"].shape[2]
    if any(isinstance(size, torch.SymInt) for size in (batch, rows, columns, width)):
        return None
    if max(rows, columns, width) > _LONGEST or batch < _FEWEST:
        return None
    value = node.meta["val"]
    if value.dtype not in _FLOATS or value.device.type not in devices:
        return None
    if (
        value.dtype == torch.float32
        and value.device.type == "cuda"
        and float32_precision() == "ieee"
    ):
        return None  # Without tensor cores the library's products are faster.
    found = _interior(weights, node, fusible)
    if found is None:
        return None
    first, interior = found
    depth = first.args[0].meta["val"].shape[2]  # type: ignore[union-attr]
    if (
        isinstance(depth, torch.SymInt)
        or depth > _LONGEST
        or first.meta["val"].dtype != value.dtype
    ):
        return None
    if tuple(first.meta["val"].shape) != (batch, rows, columns):
        return None
    memory = {
        one: Layout.of(one.name, one.meta["val"])
        for inside in interior
        for one in inside.all_input_nodes
        if one not in interior
        and one is not first
        and isinstance(one.meta.get("val"), torch.Tensor)
    }
    try:
        _scores(first, weights, memory)
    except (Unfusible, NotImplementedError):
        return None
    return first, interior


def _interior(weights: Node, product: Node, fusible: Any) -> tuple[Node, set[Node]] | None:
    """The first product, and everything from it to the weights, which nothing else reads."""
    firsts: set[Node] = set()
    depends: dict[Node, bool] = {}

    def reaches(node: Node) -> bool:
        if node not in depends:
            depends[node] = False
            if node.target is aten.bmm.default:
                firsts.add(node)
                return True
            if fusible(node):
                found = [reaches(one) for one in node.all_input_nodes]
                depends[node] = any(found)
        return depends[node]

    if not reaches(weights) or len(firsts) != 1:
        return None
    interior = {one for one, found in depends.items() if found}
    (first,) = firsts
    for one in (first, *interior):
        if any(user not in interior and user is not product for user in one.users):
            return None
    return first, interior


def _moved_result(node: Node) -> Node:
    """The last of the movements that alone read a product, each being one to one."""
    while len(node.users) == 1:
        (user,) = node.users
        if movement_of(user) is None or user.target is aten.cat.default:
            break
        directions = directions_of(user)
        if directions is None or len(directions.results) != 1 or 0 not in directions.operands:
            break
        movement = directions.operands[0]
        same = sympy.expand(total(sizes_of(user.meta["val"])) - total(sizes_of(node.meta["val"])))
        if same != 0 or len(operand_nodes(user)) != 1 or len(movement.parts) != 1:
            break
        node = user
    return node


def _moves(node: Node, result: Node) -> tuple[Movement, ...]:
    moves = []
    while node is not result:
        (node,) = node.users
        directions = directions_of(node)
        assert directions is not None
        moves.append(directions.operands[0])
    return tuple(moves)


# Making it.


def _dims(batch: Any, rows: Any, columns: Any) -> tuple[Builder, tuple[sympy.Expr, ...]]:
    sizes = [sympy.Integer(int(one)) for one in (batch, rows, columns)]
    symbols = [sympy.Symbol(f"i{k}", integer=True, nonnegative=True) for k in range(3)]
    names = ("g", "p", "r")
    dims = tuple(
        Dim(symbol, size, name) for symbol, size, name in zip(symbols, sizes, names, strict=True)
    )
    return Builder(dims), tuple(symbols)


@dataclass
class _Part:
    """A tile: its instructions, and the one that it is."""

    builder: Builder
    value: int
    rows: int
    columns: int


def _tile(node: Node, memory: Mapping[Node, Layout]) -> _Part:
    batch, rows, columns = node.meta["val"].shape
    builder, index = _dims(batch, rows, columns)
    lowering = Lowering(builder, Domain(sizes_of(node.meta["val"])), memory, movement_of)
    value = lowering.value(node, _ones(index, node))
    builder.kept.append(value)
    return _Part(builder, value, int(rows), int(columns))


def _ones(index: Sequence[sympy.Expr], node: Node) -> tuple[sympy.Expr, ...]:
    """Dimensions of one element have no symbol in a domain."""
    sizes = sizes_of(node.meta["val"])
    return tuple(sympy.S.Zero if s == 1 else one for one, s in zip(index, sizes, strict=True))


def _scores(first: Node, weights: Node, memory: Mapping[Node, Layout]) -> _Part:
    batch, rows, columns = weights.meta["val"].shape
    builder, index = _dims(batch, rows, columns)
    domain = Domain(sizes_of(weights.meta["val"]), frozenset([2]))
    lowering = Lowering(builder, domain, memory, movement_of)
    place = _ones(index, weights)
    given = builder.emit("given", (), "scores", torch.float32)
    lowering.given = {(first, place): lowering.rounded(given, first.meta["val"].dtype)}
    value = lowering.value(weights, place)
    builder.kept.append(value)
    return _Part(builder, value, int(rows), int(columns))


def _place(index: Sequence[sympy.Expr], moves: Sequence[Movement], ranges: Any) -> Any:
    """Where an element of a product is in the result of the movements that follow."""
    place = tuple(index)
    for movement in moves:
        (part,) = movement.parts
        symbols = index_symbols(len(place))
        place = tuple(simplify(substitute(one, symbols, place), ranges) for one in part.index)
    return place


def attention_parts(node: Node, memory: Mapping[Node, Layout]) -> dict[str, Any]:
    """The tiles that an ``attend`` node reads.

    Raises:
        Unfusible: a tile cannot be loaded.
    """
    attention = node.meta["magjit_attention"]
    if not isinstance(attention, _Attention):  # Of few rows: ``decoding``.
        return attention.parts(node, memory)  # type: ignore[no-any-return]
    left, right = attention.first.args
    assert isinstance(left, Node) and isinstance(right, Node)
    return {
        "left": _tile(left, memory),
        "right": _tile(right, memory),
        "weights": _scores(attention.first, attention.weights, memory),
        "values": _tile(attention.values, memory),
    }


def attention_kernel(
    name: str, node: Node, memory: Mapping[Node, Layout], reach: Mapping[str, sympy.Expr]
) -> AttentionKernel:
    """The kernel of an ``attend`` node.

    Args:
        name: of the kernel.
        node: one that ``find_attention`` made.
        memory: nodes with memory, the result among them.
        reach: buffer → number of elements from its first to its last.
    """
    attention: _Attention = node.meta["magjit_attention"]
    parts = attention_parts(node, memory)
    batch, rows, _ = attention.weights.meta["val"].shape
    store, index = _dims(batch, rows, attention.width)
    sizes = (batch, rows, attention.width)
    index = tuple(sympy.S.Zero if s == 1 else one for one, s in zip(index, sizes, strict=True))
    layout = memory[node]
    place = _place(index, attention.moves, store.ranges)
    given = store.emit("given", (), "result", torch.float32)
    offset = simplify(layout.offset_at(place), store.ranges)
    store.stores.append(Store(layout.buffer, offset, given, None, layout.dtype))
    parts["result"] = _Part(store, given, int(rows), attention.width)
    return _assembled(name, parts, layout, reach)


def _assembled(
    name: str, parts: Mapping[str, _Part], layout: Layout, reach: Mapping[str, sympy.Expr]
) -> AttentionKernel:
    dtypes: dict[str, torch.dtype] = {}
    for part in parts.values():
        dtypes.update({load.buffer: load.dtype for load in part.builder.loads()})
    dtypes[layout.buffer] = layout.dtype
    buffers = tuple(dtypes)
    names = {buffer: f"b{k}" for k, buffer in enumerate(buffers)}
    wide = any(int(reach[buffer]) >= WIDE_FROM for buffer in buffers)
    lines = [f"i0 = tl.program_id(0){'.to(tl.int64)' if wide else ''}"]
    short = TRITON_DTYPES[layout.dtype]
    precision = float32_precision()
    for label, part in parts.items():
        rename_buffers(part.builder, names)
        if label == "result":
            lines.append(f'result = h.dot(weights, values, {short}, "{precision}")')
        lines += _section(label, part, wide)
        if label == "right":
            lines.append(f'scores = h.dot(left, right, {short}, "{precision}")')
    batch = parts["result"].builder.dims[0]
    largest = max(_power(one.rows) * _power(one.columns) for one in parts.values())
    head = ["@triton.jit", f"def {name}({', '.join(names.values())}):"]
    return AttentionKernel(
        name,
        parts["weights"].builder,
        Nest((Axis("g", (batch,)),), {}, dict(parts["result"].builder.ranges)),
        Blocks(1, warps=8 if largest > 8192 else 4, wide=wide),
        buffers,
        frozenset([layout.buffer]),
        tuple(dtypes.values()),
        (),
        tuple(reach[buffer] for buffer in buffers),
        "\n".join([*head, *(f"    {line}" for line in lines)]) + "\n",
    )


def _section(label: str, part: _Part, wide: bool) -> list[str]:
    """The lines that make a tile under its name, with zeros beyond its ends, or store it."""
    batch, rows, columns = part.builder.dims
    axes = (Axis("g", (batch,)), Axis("p", (rows,)), Axis("r", (columns,)))
    blocks = Blocks(_power(part.rows), _power(part.columns), wide=wide)
    printer = Printer(part.builder, Nest(axes, {}, dict(part.builder.ranges)), blocks)
    printer.indent = ""
    for axis in axes[1:]:
        printer.axis_begin(axis, "")
    if part.builder.stores:
        for store in part.builder.stores:
            printer.store(store)
        return printer.lines
    printer.emit(part.value)
    whole = f"tl.broadcast_to(v{part.value}, [{blocks.p}, {blocks.inner}])"
    mask = printer.mask_for({"p", "r"}, None)
    printer.write(f"{label} = tl.where({mask}, {whole}, 0.0)" if mask else f"{label} = {whole}")
    return printer.lines


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
