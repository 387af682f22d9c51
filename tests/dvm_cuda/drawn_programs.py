"""Random programs of nodes and arguments for them: nothing of them runs, they are only encoded.

Arguments are views of one large block of memory that nobody touches, so that sizes may be large.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from magjit_dvm.cuda.functions import FLOATS, INTS
from magjit_dvm.instructions import INSTRUCTIONS, DType, Kind
from magjit_dvm.program import (
    ACROSS,
    INDEXED,
    ONE,
    Input,
    InputKind,
    Node,
    NodeKind,
    Output,
    Program,
)

BLOCK = torch.empty(1 << 28, dtype=torch.uint8)
LOADED = (DType.F32,) * 40 + (DType.F16, DType.BF16) * 20
LOADED += (DType.I32, DType.U8, DType.BOOL) * 15 + (DType.I64,) * 6 + (DType.F64,)
SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 64, 100, 256, 257, 700, 1024, 1500, 4096, 40000, 70001)
NUMBERS = (0.5, 1.0, -2.25, 3, 0, -1, 1e-5, 65519.0, 65520.0, 6e-8, 1e30, 255, 300, -70000, 2**40)
TAME = (0.5, 1.0, -2.25, 3, 0, -1, 1e-5, 255, -70000, 2049.0, 65519.0)
"""Numbers that no encoder leaves to torch to convert, whatever their dtype."""
NUMBERS += (math.inf, -math.inf, math.nan, 2.9e-8, 1e-40, 0.1, 16777217, 1 << 62, 2049.0)
COMPUTED = [
    one for one in INSTRUCTIONS if one.kind in (Kind.UNARY, Kind.BINARY) and one.name != "cast"
]
REDUCED = [one for one in INSTRUCTIONS if one.kind is Kind.REDUCE]
RUNNING = [one for one in INSTRUCTIONS if one.kind is Kind.SCAN]
HALVES = (DType.F16, DType.BF16)


class Drawer:
    """One program and its arguments, of a seed; with the gradient of a norm in it if asked for."""

    def __init__(self, seed: int, numbers: Sequence[Any] = NUMBERS, gradient: bool = False) -> None:
        self.random, self.numbers = random.Random(seed), numbers
        self.has_gradient = gradient
        self.rank = self.random.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 5))
        self.size = [self.random.choice(SIZES) for _ in range(self.rank)]
        if self.random.random() < 0.03 and self.rank:
            self.size[self.random.randrange(self.rank)] = 0
        self.cap = self.random.choice((1 << 12, 1 << 16, 1 << 20, 1 << 26, 1 << 44))
        while math.prod(self.size) > self.cap:
            largest = max(range(self.rank), key=self.size.__getitem__)
            self.size[largest] = max(1, self.size[largest] // 5)
        some = self.random.sample(range(self.rank), self.random.randint(0, self.rank))
        self.reduced = frozenset(some)
        self.inputs: list[Input] = []
        self.arguments: list[Any] = []
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def draw(self) -> tuple[Program, list[Any]]:
        """A program, and arguments for a call."""
        for _ in range(self.random.randint(1, 4)):
            self.tensor(self.random.choice(LOADED))
        if self.has_gradient:
            self.gradient()
        for _ in range(self.random.choice((1, 3, 6, 12, 12, 30, 60, 150))):
            if len(self.nodes) < 200 and len(self.inputs) < 50:
                self.step()
        for _ in range(self.random.choice((1, 1, 2, 3, 8))):
            self.output()
        parts = (tuple(one) for one in (self.inputs, self.nodes, self.outputs))
        return Program(self.rank, *parts), self.arguments

    # -- arguments --

    def tensor(self, dtype: DType) -> int:
        count = self.rank if self.chance(0.6) else self.random.randint(0, self.rank)
        dims = self.random.sample(range(self.rank), count)
        if self.chance(0.8):
            dims.sort()
        if self.chance(0.1):
            dims.insert(self.random.randint(0, len(dims)), ONE)
        if len(dims) > 8:
            dims.pop()
        shape = [1 if d == ONE or self.chance(0.08) else self.size[d] for d in dims]
        if self.chance(0.01) and shape:
            shape[-1] += 1
        self.inputs.append(Input(InputKind.TENSOR, dtype, tuple(dims)))
        self.arguments.append(self.view(shape, dtype))
        return self.add(Node(NodeKind.LOAD, dtype, aux=len(self.inputs) - 1))

    def view(self, shape: list[int], dtype: DType) -> torch.Tensor:
        """Of some strides, beginning anywhere."""
        order, strides, stride = list(range(len(shape))), [0] * len(shape), 1
        if self.chance(0.25):
            self.random.shuffle(order)
        for k in reversed(order):
            if self.chance(0.06):
                continue  # expanded
            if self.chance(0.08):
                stride *= 2
            if self.chance(0.08):
                stride += self.random.choice((1, 3, 4, 8))
            strides[k] = stride
            stride *= max(shape[k], 1)
        other = DType.F32 if dtype is DType.I32 and self.chance(0.02) else dtype
        whole = BLOCK.view(other.torch)
        offset = self.random.choice((0, 0, 0, 1, 2, 3, 4, 8, 16))
        reach = 1 + offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if reach > whole.numel():
            strides = [0] * len(shape)
        return whole.as_strided(shape, strides, offset)

    def scalar(self, dtype: DType) -> int:
        value = self.random.choice(self.numbers)
        kind = InputKind.FLOAT if isinstance(value, float) else InputKind.INT
        self.inputs.append(Input(kind, dtype))
        self.arguments.append(value)
        return self.add(Node(NodeKind.SCALAR, dtype, aux=len(self.inputs) - 1))

    # -- nodes --

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def varies(self, n: int) -> frozenset[int]:
        return Program(self.rank, tuple(self.inputs), tuple(self.nodes), ()).varies[n]

    def pick(self) -> int:
        if self.chance(0.6):
            return self.random.randrange(max(0, len(self.nodes) - 4), len(self.nodes))
        return self.random.randrange(len(self.nodes))

    def step(self) -> None:
        draws = self.random.random()
        n = self.pick()
        if draws < 0.03:
            self.moments(n)
        elif draws < 0.12:
            to = self.random.choice(LOADED)
            self.add(Node(NodeKind.CAST, to, (n,)))
        elif draws < 0.22:
            self.reduce(n)
        elif draws < 0.28 and self.rank:
            some = self.random.sample(range(self.rank), self.random.randint(1, self.rank))
            self.add(Node(NodeKind.BROADCAST, self.nodes[n].dtype, (n,), dims=frozenset(some)))
        elif draws < 0.34:
            self.select()
        elif draws < 0.37 and self.rank:
            self.add(Node(NodeKind.IOTA, DType.I64, aux=self.random.randrange(self.rank)))
        elif draws < 0.42:
            self.look_up()
        else:
            self.compute(n)

    def single(self, n: int) -> int:
        """The value, or one in float32 where words only store it."""
        if self.nodes[n].dtype in HALVES or (self.nodes[n].dtype is DType.I64 and self.chance(0.6)):
            return self.add(Node(NodeKind.CAST, DType.F32, (n,)))
        return n

    def look_up(self) -> None:
        """In a table, at positions that are there or drawn: mostly rows, of few columns or many."""
        longs = [k for k, one in enumerate(self.nodes) if one.dtype is DType.I64]
        if not longs or self.chance(0.3):
            self.tensor(DType.I64)
            longs = [len(self.nodes) - 1]
        position, dtype = self.random.choice(longs), self.random.choice(LOADED)
        dims = sorted(self.random.sample(range(self.rank), self.random.randint(0, self.rank)))
        if self.chance(0.7):
            dims = [d for d in dims if d not in self.varies(position)]
        shape = [1 if self.chance(0.05) else self.size[d] for d in dims]
        place = 0 if self.chance(0.7) else self.random.randint(0, len(dims))
        dims.insert(place, INDEXED)
        shape.insert(place, self.random.choice((0, 1, 2, 100, 5000)))
        self.inputs.append(Input(InputKind.TENSOR, dtype, tuple(dims[:8])))
        self.arguments.append(self.view(shape[:8], dtype))
        self.add(Node(NodeKind.INDEX, dtype, (position,), aux=len(self.inputs) - 1))

    def reduce(self, n: int) -> None:
        if self.chance(0.2):
            self.sum_across(n)
            return
        n = self.single(n)
        counts = self.nodes[n].dtype in (DType.BOOL, DType.U8) and self.chance(0.3)
        if counts:
            n = self.add(Node(NodeKind.CAST, DType.I64, (n,)))
        dtype = self.nodes[n].dtype
        known = [one for one in REDUCED if dtype in one.dtypes]
        fits = {d for d in self.reduced if self.size[d] != 1} <= self.varies(n)
        if known and (fits or self.chance(0.05)):
            if len(self.reduced) == 1 and dtype in RUNNING[0].dtypes and self.chance(0.2):
                op = self.random.choice(RUNNING).name
                self.add(Node(NodeKind.SCAN, dtype, (n,), op, dims=self.reduced))
                return
            op = "sum" if counts else self.random.choice(known).name
            self.add(Node(NodeKind.REDUCE, dtype, (n,), op, dims=self.reduced))

    def sum_across(self, n: int) -> None:
        """Of what reductions keep, mostly of all of it; mostly nothing but a result."""
        rows = frozenset(range(self.rank)) - self.reduced
        some = rows if self.chance(0.9) else rows - {self.random.randrange(self.rank + 1)}
        if not {d for d in some if self.size[d] != 1} <= self.varies(n) or not some:
            return
        if self.nodes[n].dtype is not DType.F32:
            n = self.add(Node(NodeKind.CAST, DType.F32, (n,)))
        made = self.add(Node(NodeKind.REDUCE, DType.F32, (n,), "sum", aux=ACROSS, dims=some))
        if self.chance(0.3):
            made = self.add(Node(NodeKind.CAST, self.random.choice(HALVES), (made,)))
        dims = tuple(sorted(self.varies(made)))
        self.outputs.append(Output(made, dims, tuple(range(len(dims)))))

    def moments(self, n: int) -> None:
        """Mean, variance and exponentials as norms and softmax have them, or nearly."""
        if self.nodes[n].dtype is not DType.F32:
            n = self.add(Node(NodeKind.CAST, DType.F32, (n,)))
        if not {d for d in self.reduced if self.size[d] != 1} <= self.varies(n):
            return
        f32 = DType.F32
        total = self.add(Node(NodeKind.REDUCE, f32, (n,), "sum", dims=self.reduced))
        count = math.prod(self.size[d] for d in self.reduced) + self.chance(0.1)
        length = Node(NodeKind.NUMEL, f32, dims=self.reduced)
        if self.chance(0.3):
            length = Node(NodeKind.CONSTANT, f32, number=float(count))
        divided = (total, self.add(length))
        mean = self.add(Node(NodeKind.COMPUTE, f32, divided, "div"))
        away = self.add(Node(NodeKind.COMPUTE, f32, (n, mean), "sub"))
        if self.chance(0.3):
            self.add(Node(NodeKind.COMPUTE, f32, (away,), "exp"))
        square = self.add(Node(NodeKind.COMPUTE, f32, (away, away), "mul"))
        self.add(Node(NodeKind.REDUCE, f32, (square,), "sum", dims=self.reduced))
        if self.chance(0.5):
            quotient = (len(self.nodes) - 1, divided[1])
            quotient = self.add(Node(NodeKind.COMPUTE, f32, quotient, "div")), self.partner(f32)
            shifted = self.add(Node(NodeKind.COMPUTE, f32, quotient, "add"))
            self.add(Node(NodeKind.COMPUTE, f32, (shifted,), "rsqrt"))

    def gradient(self) -> None:
        """A norm's gradient as a word makes it, or nearly, and what is beside it."""
        if not self.reduced or self.rank > 8 or len(self.inputs) > 40:
            return
        every, f32 = range(self.rank), DType.F32
        rows = [d for d in every if d not in self.reduced]
        x, dy = (self.whole(every, self.random.choice((f32, *HALVES))) for _ in range(2))
        root, centered = self.whole(rows, f32), self.chance(0.5)
        away = self.made("sub", x, self.whole(rows, f32)) if centered else x
        norm = self.made("mul", away, root)
        weight = self.whole(sorted(self.reduced), f32)
        given = self.made("mul", dy, weight) if self.chance(0.5) else dy
        share, by = self.add(Node(NodeKind.NUMEL, f32, dims=self.reduced)), "div"
        if self.chance(0.5):
            share, by = self.add(Node(NodeKind.CONSTANT, f32, number=0.125)), "mul"
        sums = [self.made("mul", given, norm), given][: 1 + (centered or self.chance(0.1))]
        totals = [Node(NodeKind.REDUCE, f32, (one,), "sum", dims=self.reduced) for one in sums]
        shares = [self.made(by, self.add(one), share) for one in totals]
        rest = self.made("sub", given, shares[1]) if len(shares) > 1 else given
        inner = self.made("sub", rest, self.made("mul", norm, shares[0]))
        self.made("mul", inner, root if self.chance(0.9) else self.whole(rows, f32))
        for one in (dy, self.made("mul", norm, dy)):
            if self.chance(0.5):
                self.sum_across(one)

    def made(self, op: str, left: int, right: int) -> int:
        """A float32 of two, either way round where that is the same."""
        args = (right, left) if op == "mul" and self.chance(0.5) else (left, right)
        return self.add(Node(NodeKind.COMPUTE, DType.F32, args, op))

    def whole(self, dims: Sequence[int], dtype: DType) -> int:
        """A tensor of these dimensions, in float32."""
        self.inputs.append(Input(InputKind.TENSOR, dtype, tuple(dims)))
        self.arguments.append(self.view([self.size[d] for d in dims], dtype))
        n = self.add(Node(NodeKind.LOAD, dtype, aux=len(self.inputs) - 1))
        return n if dtype is DType.F32 else self.add(Node(NodeKind.CAST, DType.F32, (n,)))

    def partner(self, dtype: DType) -> int:
        """Another value of the dtype: one that is there, a number, or a cast."""
        draws = self.random.random()
        same = [k for k, one in enumerate(self.nodes) if one.dtype is dtype]
        if draws < 0.6 and same:
            return self.random.choice(same)
        if draws < 0.75 and dtype not in HALVES:
            return self.add(Node(NodeKind.CONSTANT, dtype, number=self.random.choice(self.numbers)))
        if draws < 0.85 and dtype not in HALVES:
            return self.scalar(dtype)
        if draws < 0.9 and dtype not in HALVES:
            return self.add(Node(NodeKind.NUMEL, dtype, dims=self.reduced))
        return self.add(Node(NodeKind.CAST, dtype, (self.pick(),)))

    def compute(self, n: int) -> None:
        n = self.single(n)
        dtype = self.nodes[n].dtype
        known = FLOATS if dtype is DType.F32 else INTS
        rows = [one for one in COMPUTED if dtype in one.dtypes]
        if self.chance(0.99):
            rows = [one for one in rows if one.name in known or one.name == "copy"]
        row = self.random.choice(rows)
        args = [n]
        if row.kind is Kind.BINARY:
            args.append(self.partner(dtype))
            self.random.shuffle(args)
        self.add(Node(NodeKind.COMPUTE, row.result(dtype), tuple(args), row.name))

    def select(self) -> None:
        condition, yes = self.partner(DType.BOOL), self.single(self.pick())
        dtype = self.nodes[yes].dtype
        no = self.partner(dtype)
        self.add(Node(NodeKind.COMPUTE, dtype, (condition, yes, no), "select"))

    # -- outputs --

    def output(self) -> None:
        numbers = (NodeKind.CONSTANT, NodeKind.SCALAR, NodeKind.NUMEL)
        good = [k for k, one in enumerate(self.nodes) if one.kind not in numbers]
        n = self.random.choice(good[-8:] if self.chance(0.8) else good)
        dims = sorted(self.varies(n))
        if self.chance(0.02):
            dims = sorted({*dims, *range(self.rank)})
        if self.chance(0.2):
            self.random.shuffle(dims)
        if self.chance(0.1):
            dims.insert(self.random.randint(0, len(dims)), ONE)
        dims = dims[:8]
        order = list(range(len(dims)))
        if self.chance(0.2):
            self.random.shuffle(order)
        places = tuple(dims), tuple(order)
        draws, first = self.random.random(), len(self.outputs)
        if draws < 0.1 and dims:
            along = self.random.randrange(len(dims))
            for part in range(2):
                into = first if part else -1
                self.outputs.append(Output(n, *places, into, along, part, 2))
        elif draws < 0.2 and dims:
            self.placed(n, places, self.random.randrange(len(dims)))
        else:
            self.outputs.append(Output(n, *places))

    def placed(self, n: int, places: tuple[Any, Any], along: int) -> None:
        """Into a new result of a given size, at a given place."""
        count, d = len(self.inputs), places[0][along]
        own = self.size[d] if d >= 0 else 1
        self.inputs += [Input(InputKind.INT, DType.I64)] * 2
        begins = self.random.choice((0, 1, 4))
        self.arguments += [own + self.random.choice((0, 4, 5)), begins]
        self.outputs.append(Output(n, *places, along=along, total=count, offset=count + 1))
