"""Dropout in fused operators on GPUs, with eager mode's own numbers.

``native_dropout`` in a graph becomes a step that takes the numbers from torch's generator, as the
kernel of eager mode would, and a mask that the group around it computes (``philox.py``)::

    state        = take_numbers(like, bytes an element)      moves the generator on
    mask         = dropout_mask(like, p, dtype, seed, place, shares)
    result       = x * mask * 1 / (1 - p)

``like`` is a tensor of the same sizes that is there in any case: x itself may never be.  Both steps
keep their places among all that draws.

Dropouts of large tensors stay with ATen.  What eager mode draws by its other kernels (a number of
elements that is no multiple of four, tensors that are not contiguous), or into a CUDA graph, whose
generator only the GPU knows, is drawn by ATen where the mask is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx import Graph, Node

from magjit.plugin.aliases import is_alias
from magjit.plugin.fx_helpers import called
from magjit_dvm.builder import Builder, NotFusable, Value, size_key
from magjit_dvm.groups import VIEWS
from magjit_dvm.instructions import DType
from magjit_dvm.operators import HANDLERS, one_result, register
from magjit_dvm.philox import FOURS, uniforms
from magjit_dvm.program import DRAWN, drawn

__all__ = ["draw_in_groups", "dropout_mask", "take_numbers"]

aten = torch.ops.aten

_THREADS, _UNROLLED = 256, 4
"""Of a block of eager mode's kernel; numbers of a turn."""
_MOST = 1 << 20
"""Elements up to which a group draws; a group computes more slowly than ATen's kernel, and saves a
launch and what that has to read and write.  Measured with norms and softmaxes on an H100."""
_SEEN = 64
"""Nodes before a dropout among which a tensor of its sizes is looked for."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Numbers(NamedTuple):
    """What one dropout draws, as ``philox.uniforms`` takes it; a place of −1: ATen draws it."""

    seed: int
    place: int
    shares: int


_BY_ATEN = Numbers(0, -1, 0)


# -- at each call --


def take_numbers(like: torch.Tensor, size: int) -> Numbers:
    """Move the generator on as ``native_dropout`` of as many elements of ``size`` bytes does.

    Torch has no call that reads and moves it at once: threads that draw from the generator of one
    GPU at the same moment may get the same numbers.
    """
    count, device = like.numel(), like.device.index
    shares = _shares(device, count, size)
    if not shares or torch.cuda.is_current_stream_capturing() or not _agrees(device, size):
        return _BY_ATEN
    generator = torch.cuda.default_generators[device]
    offset = generator.get_offset()
    generator.set_offset(offset + _step(count, shares // FOURS))
    seed = generator.initial_seed()
    return Numbers(seed - (seed >> 63 << 64), offset // 4, shares)


def number_of(numbers: Numbers, which: int) -> int:
    """One of them."""
    return numbers[which]


def dropout_mask(
    like: torch.Tensor, p: float, dtype: torch.dtype, seed: int, place: int, shares: int
) -> torch.Tensor:
    """The mask of a dropout of ``dtype`` with the sizes of ``like``, by eager mode's kernel."""
    if place < 0:
        return _by_aten(like.shape, p, dtype, like.device)
    with _moved_to(like.device.index, place):
        return _by_aten(like.shape, p, dtype, like.device)


take_numbers.tags = dropout_mask.tags = (torch.Tag.nondeterministic_seeded,)  # type: ignore[attr-defined]


@contextmanager
def _moved_to(device: int, place: int) -> Iterator[Any]:
    """The generator, which is where it was again afterwards."""
    generator = torch.cuda.default_generators[device]
    before = generator.get_offset()
    generator.set_offset(4 * place)
    try:
        yield generator
    finally:
        generator.set_offset(before)


def _by_aten(
    shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The mask that eager mode's kernel draws."""
    mask: torch.Tensor = aten.native_dropout(
        torch.ones(shape, dtype=dtype, device=device), p, True
    )[1]
    return mask


def _shares(device: int, count: int, size: int) -> int:
    """How threads of eager mode's kernel share the elements; 0 where it is another kernel."""
    together = 16 // size
    while together >= 4 and count % together:
        together //= 2
    if together < 4 or not count:
        return 0
    blocks = min(_most_blocks(device), -(-count // _THREADS))
    return _THREADS * blocks * FOURS + together // 4


def _step(count: int, threads: int) -> int:
    """By how much the kernel moves the generator's offset on."""
    return ((count - 1) // (threads * _UNROLLED) + 1) * _UNROLLED


@cache
def _most_blocks(device: int) -> int:
    properties = torch.cuda.get_device_properties(device)
    per_multiprocessor: int = properties.max_threads_per_multi_processor // _THREADS
    return properties.multi_processor_count * per_multiprocessor


@cache
def _agrees(device: int, size: int) -> bool:
    """Whether this torch's kernel draws as ``philox.py`` has it; asked once, of some elements."""
    dtype = torch.float16 if size == 2 else torch.float32
    counts = (8, 12, 1028, _THREADS * _most_blocks(device) * (16 // size) + 40)
    place = 7
    for count in counts:
        shares = _shares(device, count, size)
        with _moved_to(device, place) as generator:
            mask = _by_aten((count,), 0.5, dtype, torch.device("cuda", device)).cpu().numpy()
            moved = generator.get_offset() - 4 * place
            seed = generator.initial_seed()
        some = np.union1d(np.arange(min(count, 512)), np.arange(max(count - 512, 0), count))
        wanted = uniforms(some, seed, place, shares) < np.float32(0.5)
        if moved != _step(count, shares // FOURS) or (mask[some] != wanted).any():
            return False
    return True


# -- in graphs --


def draw_in_groups(graph: Graph) -> None:
    """Take apart each dropout on a GPU that a group may compute."""
    for node in list(graph.nodes):
        if node.target is aten.native_dropout.default and _may_join(node):
            like = _of_same_sizes(node.args[0])
            if like is not None:
                _replace(graph, node, like)


def _may_join(node: Any) -> bool:
    given, p, train = (*node.args, None)[:3]
    value = given.meta["val"]
    if value.device.type != "cuda" or value.dtype not in _DTYPES or not train:
        return False
    if not isinstance(p, (int, float)) or not 0 < p < 1:  # a number that each call passes, say
        return False
    root = _root(given)
    fresh = root.op == "call_function" and size_key(value.storage_offset()) == 0
    return fresh and _is_contiguous(value) and _expected(value) <= _MOST


def _expected(tensor: torch.Tensor) -> int:
    """The number of elements; of symbols, with the sizes that the graph is made for."""
    count, sizes = 1, list[Any](tensor.shape)
    for size in sizes:
        known = size.node.hint if isinstance(size, torch.SymInt) else size
        count *= _MOST + 1 if known is None else int(known)
    return count


def _root(node: Node) -> Node:
    """What a view, or one of several, is a view of."""
    while node.op == "call_function" and (is_alias(node) or node.target is operator.getitem):
        node = node.all_input_nodes[0]
    return node


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether that holds for all sizes."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size_key(size) != 1 and size_key(stride) != expected:
            return False
        expected = expected * size_key(size)
    return True


def _of_same_sizes(node: Node) -> Node | None:
    """The nearest tensor of a node's sizes, at or before it, that is no part of a group."""
    wanted = [size_key(one) for one in node.meta["val"].shape]
    waiting, seen = [node], {node}
    for one in waiting:
        value = one.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cuda" and _is_there(one):
            if [size_key(size) for size in value.shape] == wanted:
                return one
        if len(waiting) < _SEEN:
            waiting += [before for before in one.all_input_nodes if before not in seen]
            seen.update(one.all_input_nodes)
    return None


def _is_there(node: Node) -> bool:
    """Whether a tensor is in memory whatever groups compute."""
    while node.target in VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.target not in HANDLERS


def _replace(graph: Graph, node: Any, like: Node) -> None:
    given, p, _ = node.args
    value: torch.Tensor = given.meta["val"]
    keeps = np.float32(1 - p)
    with graph.inserting_before(node):
        state = graph.call_function(take_numbers, (like, value.element_size()))
        state.meta = {"val": _BY_ATEN}
        which = [graph.call_function(number_of, (state, k)) for k in range(DRAWN)]
        for one in which:
            one.meta = {"val": 0}
        mask = graph.call_function(dropout_mask, (like, p, value.dtype, *which))
        mask.meta = {"val": node.meta["val"][1]}
        kept = called(graph, aten.mul.Tensor, given, mask)
        result = called(graph, aten.mul.Tensor, kept, float(np.float32(1 / float(keeps))))
    for user in list(node.users):
        user.replace_all_uses_with((result, mask)[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


@register(dropout_mask)
def _mask(builder: Builder, node: Any) -> Value:
    like, p, _, *which = node.args
    tensor = one_result(node)
    dims = builder.loops_of(tensor.shape)
    builder.sized_as(like, dims)
    # The ints that each call passes are inputs side by side.
    first, *others = [builder.nodes[builder.scalar(one, DType.I64)].aux for one in which]
    if others != list(range(first + 1, first + DRAWN)):
        raise NotFusable("numbers that are drawn twice")
    numbers = builder.add(drawn(first, dims))
    keeps = builder.constant(float(np.float32(1 - p)), DType.F32)
    made = builder.compute("lt", DType.F32, numbers, keeps, to_bool=True)
    return Value(made, DType.BOOL, dims, tuple(tensor.shape), torch.bool)
