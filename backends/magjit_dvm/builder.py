"""Builds the program of one fused operator from ATen nodes: which loops they share.

A group's values live in one space of loops, the group's dimensions.  Each value's own
dimensions are mapped to loops (or to none, where its size is 1); joining an operator to a
group means to find such a mapping for its result.  Sizes are compared as symbolic
expressions, so that what is fused for one shape is fused for all (DVM, §5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit.plugin.inference import order_of
from magjit_dvm.cuda.short_functions import SHORT
from magjit_dvm.cuda.support import NOT_HELD, may_be_stored
from magjit_dvm.instructions import INSTRUCTIONS, DType, dtype_of
from magjit_dvm.program import (
    MAX_DIMS,
    MAX_INPUTS,
    MAX_NODES,
    MAX_OUTPUTS,
    ONE,
    ROUNDED,
    Input,
    InputKind,
    Node,
    NodeKind,
    Output,
    Program,
    across,
    has_machine,
    pruned,
    varying,
)

__all__ = [
    "Builder",
    "Joined",
    "NotFusable",
    "Value",
    "computed_in",
    "size_key",
    "stored_as",
]


class NotFusable(Exception):
    """An operator does not fit into the group; the message says why, ``node`` which one."""

    def __init__(self, reason: str, node: FxNode | None = None) -> None:
        super().__init__(reason)
        self.node = node


@dataclass(frozen=True, slots=True)
class Value:
    """What an operator of the group computed.

    Attributes:
        node: its number in the program.
        dtype: of the elements in local memory.
        dims: the loop of each dimension, or ``ONE``.
        shape: the sizes, ints or SymInts.
        logical: torch's dtype: half precision is computed in single.
    """

    node: int
    dtype: DType
    dims: tuple[int, ...]
    shape: tuple[Any, ...]
    logical: torch.dtype


@dataclass(frozen=True, slots=True)
class Joined:
    """Equal parts that lie side by side along a dimension; operators do not compute with it."""

    parts: tuple[Value, ...]
    along: int


def size_key(size: Any) -> Any:
    """What equal sizes have in common: an int, or the expression of a symbol."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_Integer else expression
    return int(size)


_TAKES = {one.name: frozenset(one.dtypes) for one in INSTRUCTIONS}
_COMPUTED_IN = {DType.F16: DType.F32, DType.BF16: DType.F32}


def stored_as(dtype: torch.dtype) -> DType:
    """The VM's dtype for tensors of torch's.

    Raises:
        NotFusable: it has none.
    """
    found = dtype_of(dtype)
    if found is None:
        raise NotFusable(f"dtype {dtype}")
    return found


def computed_in(dtype: torch.dtype) -> DType:
    """The VM's dtype for computing with torch's: half precision is computed in single."""
    found = stored_as(dtype)
    return _COMPUTED_IN.get(found, found)


class Builder:
    """One group: nodes of its program, its loops and its inputs.

    Args:
        class_of: what sizes have in common that may share a loop.
    """

    def __init__(self, class_of: Callable[[Any], Any] = size_key) -> None:
        self.class_of = class_of
        self.nodes: list[Node] = []
        self.varies: list[frozenset[int]] = []  # the loops that each node varies along
        self.inputs: list[Input] = []
        self.arguments: list[FxNode | int] = []
        self.values: dict[FxNode, Any] = {}
        self.loops: list[int] = []  # in order, outermost first
        self.sizes: dict[int, Any] = {}
        self.reduced: frozenset[int] | None = None
        self.device: torch.device | None = None
        self._loaded: dict[Any, int] = {}
        self._made: dict[Any, int] = {}

    # -- values --

    def add(self, node: Node) -> int:
        """The number of ``node``, made once."""
        key = (node, repr(node.number))  # 0 and −0 are equal, but not the same
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = len(self.nodes)
            self.nodes.append(node)
            self.varies.append(varying(node, self.varies, self.inputs))
            if len(self.nodes) > MAX_NODES:
                raise NotFusable("the group has too many values")
        return found

    def constant(self, number: float | int | bool, dtype: DType) -> int:
        """A number of the program's own."""
        if dtype in (DType.F32, DType.F64):
            number = float(number)
        else:
            number = int(bool(number)) if dtype is DType.BOOL else int(number)
        return self.add(Node(NodeKind.CONSTANT, dtype, number=number))

    def scalar(self, node: FxNode, dtype: DType) -> int:
        """A number that each call passes."""
        value = node.meta["val"]
        is_float = isinstance(value, (float, torch.SymFloat))
        kind = InputKind.FLOAT if is_float else InputKind.INT
        number = self._input(node, Input(kind, DType.F64 if is_float else DType.I64))
        return self.add(Node(NodeKind.SCALAR, dtype, aux=number))

    def sized(self, loop: int, size: FxNode | int) -> None:
        """Each call passes the size of a loop."""
        self._input(size, Input(InputKind.INT, DType.I64, (loop,)))

    def sized_as(self, node: FxNode, dims: tuple[int, ...]) -> None:
        """Each call passes a tensor whose sizes are those of ``dims``; it is not read."""
        self._input(node, Input(InputKind.TENSOR, stored_as(node.meta["val"].dtype), dims))

    def _input(self, node: FxNode | int, given: Input) -> int:
        key = (node, given)
        found = self._loaded.get(key)
        if found is None:
            found = self._loaded[key] = len(self.inputs)
            self.inputs.append(given)
            self.arguments.append(node)
            if len(self.inputs) > MAX_INPUTS:
                raise NotFusable("the group has too many inputs")
        return found

    def on(self, device: torch.device) -> None:
        """Something of the group is on ``device``: all of it has to be."""
        if not has_machine(device):
            raise NotFusable(f"a tensor on {device}")
        if self.device not in (None, device):
            raise NotFusable("tensors on several devices")
        self.device = device

    def load(self, node: FxNode, dims: tuple[int, ...]) -> Value:
        """A tensor from outside; ``dims`` are the loops of its dimensions."""
        tensor = node.meta["val"]
        self.on(tensor.device)
        stored = stored_as(tensor.dtype)
        if len(set(dims) - {ONE}) < len([d for d in dims if d != ONE]):
            raise NotFusable("a tensor of which two dimensions share a loop")
        number = self._input(node, Input(InputKind.TENSOR, stored, dims))
        made = self.add(Node(NodeKind.LOAD, stored, aux=number))
        made, dtype = self.widened(made, stored)
        return Value(made, dtype, dims, tuple(tensor.shape), tensor.dtype)

    def widened(self, node: int, dtype: DType) -> tuple[int, DType]:
        """Half precision as what it is computed in."""
        wide = _COMPUTED_IN.get(dtype)
        if wide is None:
            return node, dtype
        return self.cast(node, dtype, wide), wide

    def cast(self, node: int, dtype: DType, to: DType) -> int:
        """``node`` of ``dtype`` as ``to``."""
        if dtype is to:
            return node
        given = self.nodes[node]
        if given.kind is NodeKind.CAST and self.nodes[given.args[0]].dtype is to:
            # Half to single and back.
            if _COMPUTED_IN.get(to) is dtype:
                return given.args[0]
        return self.add(Node(NodeKind.CAST, to, (node,)))

    def compute(self, op: str, dtype: DType, *args: int, to_bool: bool = False) -> int:
        """One instruction; ``dtype`` is that of its operands.

        Raises:
            NotFusable: the instruction is not there for it.
        """
        if dtype not in _TAKES[op]:
            raise NotFusable(f"{op} of {dtype.text}")
        return self.add(Node(NodeKind.COMPUTE, DType.BOOL if to_bool else dtype, args, op))

    def rounded(self, node: int) -> int:
        """A float that stands for a result in half precision: what is off by less may be taken."""
        given = self.nodes[node]
        if given.kind is not NodeKind.COMPUTE or given.dtype is not DType.F32:
            return node
        return self.add(replace(given, aux=ROUNDED)) if given.op in SHORT else node

    # -- loops --

    def loops_of(self, shape: Sequence[Any], known: Iterable[Value | None] = ()) -> tuple[int, ...]:
        """The loop of each dimension of a result, given the operands that have theirs.

        Raises:
            NotFusable: operands disagree.
        """
        shape = tuple(shape)
        dims = [ONE] * len(shape)
        for value in known:
            if value is None:
                continue
            offset = len(shape) - len(value.dims)
            for k, dim in enumerate(value.dims):
                at = k + offset
                if dim == ONE or size_key(shape[at]) == 1:
                    continue
                if dims[at] not in (ONE, dim):
                    raise NotFusable("operands run along different loops")
                dims[at] = dim
        taken = {dim for dim in dims if dim != ONE}
        if len(taken) < len([dim for dim in dims if dim != ONE]):
            raise NotFusable("two dimensions share a loop")
        missing = [at for at, size in enumerate(shape) if dims[at] == ONE and size_key(size) != 1]
        # From the innermost outwards, as shapes are aligned: several may be of one size.
        for at in reversed(missing):
            dims[at] = self._loop_for(shape[at], dims, at, new=False)
        for at in missing:
            if dims[at] == ONE:
                dims[at] = self._loop_for(shape[at], dims, at, new=True)
        return tuple(dims)

    def _loop_for(self, size: Any, dims: list[int], at: int, new: bool) -> int:
        """A loop of this size that the result does not use yet, or a new one, or none."""
        key = self.class_of(size)
        before = [self.loops.index(d) for d in dims[:at] if d != ONE]
        after = [self.loops.index(d) for d in dims[at + 1 :] if d != ONE]
        first = max(before, default=-1) + 1
        last = min(after, default=len(self.loops))
        candidates = [d for d in self.loops[first:last] if self.class_of(self.sizes[d]) == key]
        candidates = [d for d in candidates if d not in dims]
        if candidates:
            return candidates[-1]
        if not new:
            return ONE
        if len(self.loops) >= MAX_DIMS:
            raise NotFusable("too many loops")
        made = len(self.loops)
        self.sizes[made] = size
        self.loops.insert(max(last, first) if after else len(self.loops), made)
        return made

    def dims_of_operand(
        self, operand: Any, shape: Sequence[Any], dims: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The loops of an operand from outside, aligned with a result of ``shape``."""
        own = tuple(operand.shape)
        offset = len(shape) - len(own)
        return tuple(ONE if size_key(size) == 1 else dims[k + offset] for k, size in enumerate(own))

    # -- groups of instructions --

    def known(self, arg: Any) -> Value | None:
        """What the group has computed for an argument, if that is one tensor."""
        value = self.values.get(arg) if isinstance(arg, FxNode) else arg
        return value if isinstance(value, Value) else None

    def operands(
        self, args: Sequence[Any], shape: Sequence[Any], compute: DType
    ) -> tuple[list[int], tuple[int, ...]]:
        """Operands of an elementwise operator as values of ``compute``, and the result's loops."""
        known = [self.known(one) for one in args]
        dims = self.loops_of(shape, known)
        made = [self.operand(arg, shape, dims, compute) for arg in args]
        return made, dims

    def operand(
        self,
        arg: Any,
        shape: Sequence[Any],
        dims: tuple[int, ...],
        compute: DType,
    ) -> int:
        """One operand: a value of the group, a tensor from outside or a number."""
        value = self.known(arg)
        if value is not None:
            return self.cast(value.node, value.dtype, compute)
        if isinstance(arg, FxNode):
            if arg in self.values:
                raise NotFusable("an operator whose result is not one value")
            given = arg.meta["val"]
            if not isinstance(given, torch.Tensor):
                return self.scalar(arg, compute)
            loaded = self.load(arg, self.dims_of_operand(given, shape, dims))
            return self.cast(loaded.node, loaded.dtype, compute)
        if isinstance(arg, (bool, int, float)):
            return self.constant(arg, compute)
        raise NotFusable(f"an operand {arg!r}")

    def tensor(self, arg: Any) -> Value:
        """A tensor operand with loops of its own, loaded if it comes from outside."""
        if isinstance(arg, Value):
            return arg
        value = self.values.get(arg)
        if value is None:
            return self.load(arg, self.loops_of(arg.meta["val"].shape))
        if not isinstance(value, Value):
            raise NotFusable("an operator with several results")
        return value

    def reduce(
        self, op: str, value: Value, axes: Iterable[int], keepdim: bool, dtype: DType | None = None
    ) -> Value:
        """Reduce ``value`` over ``axes`` of its own dimensions.

        Raises:
            NotFusable: the group reduces other loops already, or the dtype cannot be reduced.
        """
        rank = len(value.dims)
        over = sorted({axis % rank for axis in axes}) if rank else []
        compute = dtype or value.dtype
        if compute not in _TAKES[op]:
            raise NotFusable(f"{op} of {compute.text}")
        loops = frozenset(value.dims[a] for a in over if value.dims[a] != ONE)
        if any(value.dims[a] == ONE and size_key(value.shape[a]) != 1 for a in over):
            raise NotFusable("a reduction over an expanded dimension")
        if not loops <= self.varies[value.node]:
            raise NotFusable("a reduction over an expanded dimension")
        if loops:
            if self.reduced is not None and self.reduced != loops:
                raise NotFusable("the group reduces other dimensions")
            self.reduced = loops
        node = self.cast(value.node, value.dtype, compute)
        made = self.add(Node(NodeKind.REDUCE, compute, (node,), op, dims=loops))
        kept = range(rank) if keepdim else [a for a in range(rank) if a not in over]
        dims = tuple(ONE if a in over else value.dims[a] for a in kept)
        shape = tuple(1 if a in over else value.shape[a] for a in kept)
        return Value(made, compute, dims, shape, value.logical)

    def scan(self, op: str, value: Value, axis: int) -> Value:
        """Each element of ``value`` combined with all before it along an axis.

        Raises:
            NotFusable: the group reduces other loops already, or the dtype has no such scan.
        """
        loop = value.dims[axis]
        if value.dtype not in _TAKES[op]:
            raise NotFusable(f"{op} of {value.dtype.text}")
        if loop == ONE and size_key(value.shape[axis]) == 1:
            return value
        if loop == ONE or loop not in self.varies[value.node]:
            raise NotFusable("running results along an expanded dimension")
        if self.reduced not in (None, {loop}):
            raise NotFusable("the group reduces other dimensions")
        self.reduced = frozenset({loop})
        made = self.add(Node(NodeKind.SCAN, value.dtype, (value.node,), op, dims=self.reduced))
        return replace(value, node=made)

    def numel(self, value: Value, axes: Iterable[int], dtype: DType) -> int:
        """The number of elements along ``axes``."""
        rank = len(value.dims)
        loops = frozenset(value.dims[a % rank] for a in axes) - {ONE} if rank else frozenset[int]()
        return self.add(Node(NodeKind.NUMEL, dtype, dims=loops))

    def looked_up(self, table: FxNode | int, dims: tuple[int, ...], position: int) -> int:
        """``table`` at ``position`` along the dimension ``INDEXED``; the others have loops."""
        assert isinstance(table, FxNode)
        tensor = table.meta["val"]
        self.on(tensor.device)
        loops = [d for d in dims if d >= 0]
        if len(set(loops)) < len(loops):
            raise NotFusable("a tensor of which two dimensions share a loop")
        stored = stored_as(tensor.dtype)
        number = self._input(table, Input(InputKind.TENSOR, stored, dims))
        return self.add(Node(NodeKind.INDEX, stored, (position,), aux=number))

    # -- the whole --

    def finish(
        self, outputs: Sequence[FxNode], named: Collection[FxNode] = ()
    ) -> tuple[Program, list[FxNode | int]]:
        """The program whose results are the values of ``outputs``, in order, and its arguments.

        Tensors of which nothing but a size is needed are among the arguments if they are
        ``named``: operator by operator, the group reads them.

        Raises:
            NotFusable: a result lacks a loop, or is no single tensor.
        """
        made: list[Output] = []
        owners: list[FxNode] = []
        for node in outputs:
            made += self._outputs_of(node, len(made))
            owners += [node] * (len(made) - len(owners))
        if not made or len(made) > MAX_OUTPUTS:
            raise NotFusable("the group has too many results")
        whole = Program(len(self.loops), tuple(self.inputs), tuple(self.nodes), tuple(made))
        program, kept = pruned(whole)
        given = {self.arguments[number] for number in kept}
        loops = frozenset[int]().union(*program.varies)
        sizes = {
            number
            for number, one in enumerate(self.arguments)
            if one in named and one not in given
            if loops.issuperset(d for d in self.inputs[number].dims if d >= 0)
        }
        program, kept = pruned(whole, sizes) if sizes else (program, kept)
        if any(not loops.issuperset(d for d in one.dims if d >= 0) for one in program.inputs):
            raise NotFusable("a size that only a larger tensor has")
        varies = program.varies
        used = frozenset[int]().union(*varies)
        rows, reduced = program.rows(used)
        for one, node in zip(program.outputs, owners, strict=True):
            dims = varies[one.node]
            if dims != set(one.dims) - {ONE}:
                raise NotFusable("a result that is expanded", node)
            if across(program.nodes, one.node) >= 0:
                fits = dims == reduced and rows == used - reduced
            else:
                fits = dims - reduced == used - reduced and (not dims & reduced or reduced <= dims)
            if not fits:
                raise NotFusable("a result lacks a loop of the group", node)
        try:
            program.verify()
        except ValueError as error:
            raise NotFusable(str(error)) from error
        return program, [self.arguments[number] for number in kept]

    def _outputs_of(self, node: FxNode, number: int) -> list[Output]:
        """The output of one result, or those of its parts; ``number`` is that of the first."""
        value = self.values[node]
        if isinstance(value, Value):
            return [self._output(node, value)]
        if not isinstance(value, Joined):
            raise NotFusable("an operator with several results", node)
        count = len(value.parts)
        return [
            replace(
                self._output(node, one),
                into=number if part else -1,
                along=value.along,
                part=part,
                parts=count,
            )
            for part, one in enumerate(value.parts)
        ]

    def _output(self, node: FxNode, value: Value) -> Output:
        numbers = (NodeKind.CONSTANT, NodeKind.SCALAR, NodeKind.NUMEL)
        if self.nodes[value.node].kind in numbers:
            raise NotFusable("a result that is a number", node)
        tensor = node.meta["val"]
        if any(d == ONE and size_key(n) != 1 for d, n in zip(value.dims, value.shape, strict=True)):
            raise NotFusable("a result that is expanded", node)
        number = self.cast(value.node, value.dtype, stored_as(tensor.dtype))
        if not may_be_stored(self.nodes, number, tensor.device):
            raise NotFusable(NOT_HELD, node)
        return Output(number, value.dims, order_of(tensor))
