"""Writes that functional graphs do not do as eager mode does; programs with one run as they are.

An operator may write memory that it reads in other places: ``x[:, 1:, ::2] = x[:, :-1, ::2]``.
Eager mode refuses where it sees that the places overlap.  Where it cannot tell, it goes from
element to element, and may read what it has just written.  A functional graph reads all before it
writes any.

Or it may write a part of a tensor that shows an element several times: ``x.expand(4, n)[0] = y``.
All four rows are y then.  Torch makes this functional as x + sum(written rows - x), which is y but
for rounding, and NaN where x was infinite; of ``broadcast_tensors`` it makes one row y.

    may_overlap(a, b) ::= an element of both, if all sizes are numbers: exact
                        | true, if sizes are symbols and a and b do not differ within dimensions
                          that both have, each of whose steps is beyond all that differs

Or it may write an input that has gaps in memory, of which ``contiguous`` is a copy.  Of the
functional operator's result, which has none, it is a view, in which later writes are seen.

To find out, a graph runs over its fake inputs; but most do not: as far as names of functions tell,
what an operator writes has no memory in common with its other operands, and nothing is expanded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magjit.plugin.aliases import is_strided, storage_of
from magjit.plugin.functional import changes, overlapping
from magjit.plugin.fx_helpers import placeholders
from magjit.plugin.fx_nodes import called_at, called_name, graphs_of
from magjit.plugin.inference import on_fakes
from magjit.plugin.modes import leave_modes_of
from magjit.plugin.sizes import elements, magnitude

__all__ = ["lies_apart", "may_overlap", "overlapping_write"]

_APART = frozenset(
    {
        *("add", "sub", "rsub", "mul", "truediv", "div", "neg", "pow", "matmul", "mm", "bmm"),
        *("addmm", "baddbmm", "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d"),
        *("conv_transpose2d", "conv_transpose3d", "batch_norm", "layer_norm", "group_norm"),
        *("instance_norm", "rms_norm", "softmax", "log_softmax", "gelu", "sigmoid", "tanh"),
        *("exp", "log", "sqrt", "rsqrt", "sin", "cos", "cat", "stack", "clone", "embedding"),
        *("zeros", "ones", "full", "empty", "arange", "rand", "randn", "zeros_like", "ones_like"),
        *("full_like", "empty_like", "rand_like", "randn_like", "index_select", "gather", "roll"),
        *("scaled_dot_product_attention", "eq", "ne", "lt", "le", "gt", "ge"),
    }
)
"""Functions and methods whose results lie in no operand's memory, unless there is an ``out``."""
_REPEATING = ("expand", "expand_as", "broadcast_to", "broadcast_tensors", "meshgrid")
"""Those whose results may show an element several times."""
_COPYING_OR_NOT = ("contiguous", "reshape", "reshape_as", "flatten", "ravel")
"""Those whose results are views or copies, according to strides."""
_BY_ELEMENT = ("aten::copy_", "aten::masked_fill_", "aten::_foreach_")
"""How names of operators begin that read a place before they write it, and it alone; beside those
that torch calls pointwise."""
_MOST_WORK = 100_000
_ANYWHERE = 1 << 40


def overlapping_write(
    gm: GraphModule, example_inputs: Sequence[Any], fake_mode: FakeTensorMode | None
) -> str | None:
    """Which operator of a graph writes what cannot be written functionally, if one may, and where.

    Args:
        gm, example_inputs: as ``Backend.compile`` is given them; the inputs are fake.
        fake_mode: of these.
    """
    writers = {node for graph in graphs_of(gm) for node in graph.nodes if changes(node)}
    if not writers:
        return None
    if (node := _copied_or_viewed(gm, example_inputs, writers)) is not None:
        what = f"{called_name(node)} of an input that is written and has gaps in memory"
        return what + _where(node)
    with _unguarded(fake_mode):
        shared = overlapping(example_inputs)
    if not _may_share(gm, example_inputs, writers, shared):
        return None
    run = _Run(gm)
    grad_enabled = torch.is_grad_enabled()
    try:
        with on_fakes(example_inputs, fake_mode), _unguarded(fake_mode):
            with fake_mode or nullcontext():
                given = [_another(one, at in shared) for at, one in enumerate(example_inputs)]
            with _Watch(run):
                run.run(*given)
    except _Found as found:
        return f"{found.what}{run.where()}"
    except Exception as error:
        return f"{type(error).__name__} when asked whether it writes what it reads{run.where()}"
    finally:
        leave_modes_of(run, grad_enabled)
    return None


def lies_apart(node: Node) -> bool:
    """Whether the results of what a node calls lie in no operand's memory, if it writes none."""
    return called_name(node) in _APART


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors in one storage may have a byte in common; their sizes may be symbols."""
    return _places_of(a).may_meet(_places_of(b))


# -- places ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """Where a tensor's elements are in its storage, all in bytes.

    Attributes:
        dims: (size, step) of each dimension.
    """

    at: Any
    dims: tuple[tuple[Any, Any], ...]
    width: int

    @cached_property
    def is_symbolic(self) -> bool:
        numbers = (self.at, *(one for dim in self.dims for one in dim))
        return not all(isinstance(one, int) for one in numbers)

    def without(self, dim: tuple[Any, Any]) -> _Places:
        """Those with the first index in a dimension."""
        rest = list(self.dims)
        rest.remove(dim)
        return _Places(self.at, tuple(rest), self.width)

    @cached_property
    def end(self) -> Any:
        """Behind the last of them."""
        return sum(((size - 1) * step for size, step in self.dims), self.at + self.width)

    def may_meet(self, other: _Places) -> bool:
        """Whether both may have a byte in common."""
        first, second = self, other
        if first.is_symbolic or second.is_symbolic:
            first, second = _within_common(first, second)
        if first.is_symbolic or second.is_symbolic:
            return True
        if first.end <= second.at or second.end <= first.at:
            return False
        try:
            return np.shares_memory(first.array(), second.array(), max_work=_MOST_WORK)
        except np.exceptions.TooHardError:
            return True

    def is_same(self, other: _Places) -> bool:
        """Whether both are the same places in the same order."""
        return (
            self.width == other.width
            and len(self.dims) == len(other.dims)
            and _are_equal((self.at,), (other.at,))
            and all(map(_are_equal, self.dims, other.dims))
        )

    def array(self) -> np.ndarray[Any, Any]:
        """An array of the same places in memory that is not there: to compare, not to look at."""
        return np.asarray(_Interface(self))


class _Interface:
    """What NumPy makes an array of."""

    def __init__(self, places: _Places) -> None:
        self.__array_interface__ = {
            "shape": tuple(size for size, _ in places.dims),
            "strides": tuple(step for _, step in places.dims),
            "data": (_ANYWHERE + places.at, True),
            "typestr": f"|V{places.width}",
            "version": 3,
        }


def _places_of(tensor: torch.Tensor) -> _Places:
    width = tensor.element_size()
    dims = tuple(
        (size, step * width) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return _Places(tensor.storage_offset() * width, dims, width)


def _within_common(a: _Places, b: _Places) -> tuple[_Places, _Places]:
    """The same without dimensions in which only equal indices can meet.

    Both have these, with equal steps, and all else of both is less than a step apart.
    """
    for one, other in product(a.dims, b.dims):
        if isinstance(one[0], int) or not _are_equal(one, other):
            continue
        first, second, (_, step) = a.without(one), b.without(other), one
        apart = second.end - a.at <= step, first.end - b.at <= step
        if all(map(statically_known_true, apart)):
            return _within_common(first, second)
    return a, b


def _are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(statically_known_true(x == y) for x, y in zip(one, other, strict=True))


# -- before anything is run -----------------------------------------------------------------------


def _may_share(
    gm: GraphModule, example_inputs: Sequence[Any], writers: set[Node], shared: set[int]
) -> bool:
    """Whether something is written whose memory another operand may have, or that may repeat.

    Args:
        writers: those who write, in parts of the graph, too.
        shared: positions of inputs that overlap others.
    """
    if any(node.graph is not gm.graph for node in writers):
        return True
    homes: dict[Node, frozenset[Any]] = {}
    for at, (node, given) in enumerate(zip(placeholders(gm), example_inputs, strict=True)):
        homes[node] = frozenset({storage_of(given) if at in shared else node})
        if is_strided(given) and _repeats(given):
            homes[node] |= {_REPEATING}
    return any(
        _REPEATING in whole or len(whole) < among
        for node, whole, among in _followed(gm, homes, writers)
        if node in writers
    )


def _followed(
    gm: GraphModule, homes: dict[Node, frozenset[Any]], writers: set[Node]
) -> Iterator[tuple[Node, frozenset[Any], int]]:
    """What is called, the memory that its operands may have, and how much that is one by one.

    Args:
        homes: the memory of inputs; that of what has been called is added.
    """
    for node in gm.graph.nodes:
        if node in homes:
            continue
        if node.op == "get_attr":
            homes[node] = frozenset({node.target})
            continue
        operands = [homes[one] for one in _operands(node)]
        whole = frozenset().union(*operands)
        yield node, whole, sum(map(len, operands))
        if called_name(node) in _REPEATING:
            whole |= {_REPEATING}
        apart = lies_apart(node) and node not in writers
        homes[node] = frozenset({node}) if apart else whole


def _copied_or_viewed(
    gm: GraphModule, example_inputs: Sequence[Any], writers: set[Node]
) -> Node | None:
    """What copies an input that was written, since it has gaps in memory.

    A functional operator's result has none: there it would be a view, and later writes be seen.
    """
    homes: dict[Node, frozenset[Any]] = {}
    for node, given in zip(placeholders(gm), example_inputs, strict=True):
        homes[node] = frozenset({node} if is_strided(given) and _has_gaps(given) else ())
    gaps = frozenset().union(*homes.values())
    if not gaps:
        return None
    written: set[Any] = set()
    for node, whole, _ in _followed(gm, homes, writers):
        if node in writers:
            written |= whole & gaps
        elif called_name(node) in _COPYING_OR_NOT and whole & written:
            return node
    return None


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Whether there is other memory between a tensor's elements; symbols as in the example."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((magnitude(size) - 1) * magnitude(step) for size, step in dims)
    return 0 < elements(tensor.shape) < reach


def _operands(node: Node) -> list[Node]:
    """As often as they are given."""
    return [one for one in tree_leaves((node.args, node.kwargs)) if isinstance(one, Node)]


# -- a run over fake tensors ----------------------------------------------------------------------


@contextmanager
def _unguarded(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """What is asked of symbols, and new ones, are nobody's beyond it."""
    env = None if fake_mode is None else fake_mode.shape_env
    fresh = nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
    with fresh, nullcontext() if env is None else env.suppress_guards():
        yield


def _another(given: Any, is_shared: bool) -> Any:
    """An input to run over: what becomes of its sizes is not to be seen of the given one.

    Inputs that overlap no other one do not in later calls either, by the front end's guards: they
    are in storages of their own, so that nobody has to find it out of symbols.
    """
    if not isinstance(given, torch.Tensor):
        return given
    if is_shared or not isinstance(given, FakeTensor) or not is_strided(given):
        return given.detach()
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)


class _Found(Exception):
    """An operator does what no functional graph does."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class _Run(Interpreter):
    """Knows which node it has come to, and what the tensors it has seen repeat.

    Attributes:
        repeated: the storages of which an operand of the node shows an element several times.
    """

    node: Node | None = None
    repeated: frozenset[int] = frozenset()

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self._of: dict[Node, frozenset[int]] = {}

    def run_node(self, n: Node) -> Any:
        self.node = n
        self.repeated = frozenset().union(*(self._of[one] for one in n.all_input_nodes))
        result = super().run_node(n)
        given = list(filter(is_strided, tree_leaves(result)))
        storages = set(map(storage_of, given))
        self._of[n] = frozenset(map(storage_of, filter(_repeats, given))) | (
            self.repeated & storages
        )
        return result

    def where(self) -> str:
        return _where(self.node)


def _where(node: Node | None) -> str:
    place = None if node is None else called_at(node)
    return "" if place is None else f", at {place}"


class _Watch(TorchDispatchMode):
    """Raises `_Found`."""

    supports_higher_order_operators = True

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            self._check(func, schema, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, schema: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        places: dict[int, tuple[list[_Places], list[_Places]]] = {}
        for position, argument in enumerate(schema.arguments):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            reads = argument.alias_info is None or not argument.alias_info.is_write
            for tensor in filter(is_strided, tree_leaves(given)):
                places.setdefault(storage_of(tensor), ([], []))[reads].append(_places_of(tensor))
        by_element = torch.Tag.pointwise in func.tags or schema.name.startswith(_BY_ELEMENT)
        for storage, (written, read) in places.items():
            if written and storage in self._run.repeated:
                raise _Found(f"{schema.name} writes an element that is shown several times")
            for one, other in product(written, read):
                if one.may_meet(other) and not (by_element and one.is_same(other)):
                    raise _Found(f"{schema.name} writes memory that it reads in other places")
            if _any_meet(written):
                raise _Found(f"{schema.name} writes memory several times")


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows each element several times."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return any(
        isinstance(step, int) and step == 0 and not statically_known_true(size == 1)
        for size, step in dims
    )


def _any_meet(written: Sequence[_Places]) -> bool:
    """Whether two of them may; where each ends before the next one begins, none is compared."""
    if not any(one.is_symbolic for one in written):
        ordered = sorted(written, key=lambda one: one.at)
        if all(one.end <= other.at for one, other in pairwise(ordered)):
            return False
    return any(one.may_meet(other) for one, other in combinations(written, 2))
