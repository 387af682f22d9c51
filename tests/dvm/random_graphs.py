"""Random graphs of ATen operators, built together with eager's results and bounds of their errors.

A graph is grown from values that eager has computed: each operator is chosen by what its
operands are.  A value is *exact* while it lies on a grid that its dtype represents (then the
backend must agree to the bit); otherwise ``error`` bounds how far two right answers may lie
apart.  Operators that jump (comparisons, rounding) take exact values alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.uint8)
DTYPES = (*FLOATS, *INTS, torch.bool)
SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129, 260)
EPS = {dtype: torch.finfo(dtype).eps for dtype in FLOATS}
DIGITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}
GRID = 4
_LARGEST = 20_000.0


@dataclass(frozen=True)
class Given:
    """How an input is made, for sizes that may differ from call to call."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    seed: int
    special: bool = False
    largest: int = 24

    def make(self, sizes: Callable[[int], int] = lambda n: n) -> torch.Tensor:
        made = torch.Generator().manual_seed(self.seed)
        shape = tuple(sizes(n) for n in self.sizes)
        order = random.Random(self.seed).sample(range(len(shape)), len(shape))
        if self.layout == "permuted":
            stored = [shape[k] for k in order]
            back = sorted(range(len(shape)), key=lambda k: order[k])
            return self._fill(stored, made).permute(back)
        if self.layout == "sliced":
            whole = self._fill([2 * n + 3 for n in shape], made)
            return whole[tuple(slice(2, 2 + 2 * n, 2) for n in shape)]
        if self.layout == "offset":
            whole = self._fill([n + 1 for n in shape], made)
            return whole[tuple(slice(1, 1 + n) for n in shape)]
        if self.layout == "expanded":
            kept = [n if k % 2 else 1 for k, n in enumerate(shape)]
            return self._fill(kept, made).expand(shape)
        if self.layout == "overlapping" and shape:
            strides = [1] * len(shape)
            length = sum(n - 1 for n in shape) + 1 if min(shape) else 1
            return self._fill([max(length, 1)], made).as_strided(shape, strides)
        return self._fill(list(shape), made)

    def _fill(self, shape: list[int], made: torch.Generator) -> torch.Tensor:
        if self.dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=made).bool()
        if self.dtype is torch.uint8:
            return torch.randint(0, 9, shape, generator=made).to(torch.uint8)
        if not self.dtype.is_floating_point:
            return torch.randint(-9, 10, shape, generator=made).to(self.dtype)
        values = torch.randint(-self.largest, self.largest + 1, shape, generator=made)
        tensor = (values / GRID).to(self.dtype)
        if self.special and tensor.numel():
            chance = torch.rand(shape, generator=made)
            for k, one in enumerate((float("nan"), float("inf"), -float("inf"), -0.0)):
                tensor = torch.where((chance * 40).int() == k, torch.tensor(one), tensor)
        return tensor.to(self.dtype)


@dataclass
class Item:
    """A value of the graph with eager's result; ``error`` is 0 while it is exact."""

    node: Node
    tensor: torch.Tensor
    error: float = 0.0

    @property
    def exact(self) -> bool:
        return self.error == 0.0

    @property
    def is_float(self) -> bool:
        return self.tensor.dtype.is_floating_point

    @property
    def largest(self) -> float:
        return magnitude(self.tensor)


def magnitude(tensor: torch.Tensor) -> float:
    """The largest finite one of the elements, as they count."""
    finite = tensor.detach().double()
    finite = finite[finite.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def on_grid(tensor: torch.Tensor, terms: int = 1) -> bool:
    """Whether the elements, and sums of so many of them, are exact in their dtype."""
    if not tensor.dtype.is_floating_point:
        return True
    wide = tensor.double()
    wide = wide[wide.isfinite()] * GRID**2
    if not bool((wide == wide.round()).all()):
        return False
    most = float(wide.abs().max()) if wide.numel() else 0.0
    return most * terms <= 2.0 ** DIGITS[tensor.dtype]


class Refused(Exception):
    """The operator does not suit these operands: another one is chosen."""


@dataclass
class Grown:
    """A finished graph: inputs, eager's outputs, how far apart answers may lie."""

    module: GraphModule
    given: list[Given]
    results: list[Item]
    names: list[str] = field(default_factory=list)


class Grower:
    """Grows one graph; ``fixed`` graphs contain sizes, the others hold for all."""

    def __init__(self, seed: int, fixed: bool = True) -> None:
        self.random = random.Random(seed)
        self.graph = Graph()
        self.items: list[Item] = []
        self.given: list[Given] = []
        self.names: list[str] = []
        self.fixed = fixed
        self.special = self.random.random() < 0.2
        rank = self.random.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))
        self.shape = tuple(self.random.choice(SIZES) for _ in range(rank))
        while torch.Size(self.shape).numel() > 40_000:
            widest = max(range(rank), key=lambda k: self.shape[k])
            smaller = self.random.choice(SIZES[:8])
            self.shape = tuple(smaller if k == widest else n for k, n in enumerate(self.shape))
        if rank and fixed and self.random.random() < 0.06:
            at = self.random.randrange(rank)
            self.shape = tuple(0 if k == at else n for k, n in enumerate(self.shape))
        pool = (torch.float32,) if self.random.random() < 0.5 else DTYPES
        self.pool = pool

    # -- values --

    def input(self, shape: tuple[int, ...], dtype: torch.dtype) -> Item:
        layouts = ("contiguous", "contiguous", "permuted", "sliced", "offset", "expanded")
        layout = self.random.choice((*layouts, "overlapping"))
        given = Given(shape, dtype, layout, self.random.randrange(1 << 30), self.special)
        self.given.append(given)
        node = self.graph.placeholder(f"x{len(self.given)}")
        item = Item(node, given.make())
        self.items.append(item)
        return item

    def add(self, name: str, target: Any, args: Any, kwargs: Any = None, error: float = 0) -> Item:
        """Run the operator and keep it; ``error`` 0 asks for a result on the grid."""
        real = torch.fx.map_arg(args, lambda one: one)
        values = torch.utils._pytree.tree_map(_value, (args, kwargs or {}))
        result = target(*values[0], **values[1])
        nodes = torch.utils._pytree.tree_map(_node, (args, kwargs or {}))
        del real
        if not isinstance(result, torch.Tensor):
            raise Refused
        self.acceptable(result, error)
        node = self.graph.call_function(target, *nodes)
        item = Item(node, result, error)
        self.items.append(item)
        self.names.append(name)
        return item

    def acceptable(self, result: torch.Tensor, error: float) -> None:
        largest = magnitude(result)
        if largest > _LARGEST or result.numel() > 200_000:
            raise Refused
        if error > 0.02 * largest and error > 1e-3:
            raise Refused

    def pick(self, test: Callable[[Item], bool] = lambda one: True) -> Item:
        """One of the values, later ones more often."""
        found = [one for one in self.items if test(one)]
        if not found:
            raise Refused
        return found[max(self.random.randrange(len(found)) for _ in range(2))]

    def partner(self, item: Item) -> Item:
        """Something that broadcasts with ``item``: a value of the graph or a new input."""
        shape = tuple(item.tensor.shape)
        if self.random.random() < 0.6:
            found = [one for one in self.items if _broadcasts(one.tensor.shape, shape)]
            if found:
                return self.random.choice(found)
        own = [1 if self.random.random() < 0.3 else n for n in shape]
        own = own[self.random.choice((0, 0, 0, len(own) // 2, len(own))) :]
        return self.input(tuple(own), self.random.choice(self.pool))

    def bounded(self, item: Item, most: float) -> Item:
        """``item`` clamped, if it is larger than ``most``."""
        if item.largest <= most and not self.special:
            return item
        return self.add("clamp", aten.clamp.default, (item, -most, most), error=item.error)

    def number(self, dtype: torch.dtype) -> Any:
        if dtype.is_floating_point and self.random.random() < 0.7:
            return self.random.randrange(-12, 13) / GRID
        return self.random.randrange(0, 6)

    def rounding(self, tensor: torch.Tensor) -> float:
        dtype = tensor.dtype
        if not dtype.is_floating_point:
            return 0.0
        return EPS[dtype] * magnitude(tensor) + torch.finfo(dtype).smallest_normal * EPS[dtype]

    # -- the whole --

    def grow(self, operators: int) -> Grown:
        from tests.dvm import random_operators, random_positions

        choices = (*random_operators.OPERATORS, *random_positions.OPERATORS)
        self.input(self.shape, self.random.choice(self.pool))
        made = tries = 0
        while made < operators and tries < operators * 8:
            tries += 1
            known = len(self.items)
            try:
                self.random.choice(choices)(self)
                made += 1
            except Refused:
                pass
            except (RuntimeError, IndexError, TypeError, NotImplementedError):
                # Eager refuses these operands too, or no such operands are there.
                del self.items[known:]
        return self.finish()

    def finish(self) -> Grown:
        made = [one for one in self.items if one.node.op != "placeholder"]
        if not made:
            first = self.items[0]
            made = [self.add("clone", aten.clone.default, (first,), error=first.error)]
        count = min(len(made), self.random.choice((1, 1, 2, 3, 4)))
        results = {id(made[-1]): made[-1]}
        for _ in range(count - 1):
            one = self.random.choice(made)
            results[id(one)] = one
        chosen = list(results.values())
        self.random.shuffle(chosen)
        self.graph.output(tuple(one.node for one in chosen))
        self.graph.eliminate_dead_code()
        module = GraphModule(torch.nn.Module(), self.graph)
        return Grown(module, self.given, chosen, self.names)


def _value(one: Any) -> Any:
    return one.tensor if isinstance(one, Item) else one


def _node(one: Any) -> Any:
    return one.node if isinstance(one, Item) else one


def _broadcasts(own: torch.Size, shape: tuple[int, ...]) -> bool:
    if len(own) > len(shape):
        return False
    pairs = zip(reversed(own), reversed(shape))
    return all(a in (1, b) for a, b in pairs)
