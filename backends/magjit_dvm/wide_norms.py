"""Gradients of norms of wide rows, whose sums across rows have room in registers alone.

In a group with other operators, sums across rows are in shared memory, which has room for some
8,000 columns of them.  Those of a norm's gradients by themselves are in registers
(``cuda/gradients.py``), so that rows may have twice as many.  ATen's operator stays whole in a
graph then, and what runs is a program for all of it, or ATen's kernels where there are no words for
a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit_dvm.across import has_room, has_room_alone
from magjit_dvm.instructions import DType
from magjit_dvm.program import ACROSS, Input, InputKind, Node, NodeKind, Output, Program

__all__ = ["WideNorm", "is_wide", "is_wide_norm", "norm_gradients"]

_of_layer_norm = torch.ops.aten.native_layer_norm_backward.default
_of_rms_norm = torch.ops.aten._fused_rms_norm_backward.default
_DTYPES = {torch.float16: DType.F16, torch.bfloat16: DType.BF16}
_OF_VECTORS = {torch.float32: DType.F32, **_DTYPES}
_F32 = DType.F32


def is_wide(
    dy: torch.Tensor, x: torch.Tensor, shape: Sequence[Any], vectors: Sequence[Any]
) -> bool:
    """Whether a norm's backward is to stay whole: with its weight's gradient, of 16 bits, and of
    more columns than sums in shared memory have room for.

    Args:
        vectors: the weight, and the bias if its gradient is asked for.
    """
    known = all(isinstance(size, int) for size in shape)
    if not known or has_room(shape) or not has_room_alone(shape):
        return False
    if not x.is_cuda or x.dtype not in _DTYPES or dy.dtype is not x.dtype or vectors[0] is None:
        return False
    return all(one is None or one.dtype in _OF_VECTORS for one in vectors)


def is_wide_norm(node: FxNode) -> bool:
    """Whether a node is such a backward, with the gradient of the input, which words need not."""
    if node.target not in (_of_layer_norm, _of_rms_norm) or node.kwargs:
        return False
    args: list[Any] = [one.meta["val"] if isinstance(one, FxNode) else one for one in node.args]
    dy, x, shape, *_, mask = args
    vectors = args[-3:-1] if node.target is _of_layer_norm else args[-2:-1]
    if not (mask[0] and mask[1]):
        return False
    return is_wide(dy, x, shape, [vectors[0], *(vectors[1:] if len(mask) > 2 and mask[2] else [])])


class WideNorm:
    """ATen's operator ``target`` in a schedule: of words where there are any."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._centered = target is _of_layer_norm
        self.__name__ = str(target)

    def __call__(self, dy: Any, x: Any, shape: Any, *others: Any) -> Any:
        found = self._by_words(dy, x, shape, *others)
        return self._target(dy, x, shape, *others) if found is None else found

    def _by_words(self, dy: Any, x: Any, shape: Any, *others: Any) -> Any:
        count = 1 + self._centered
        rows, weight, mask = others[:count], others[count], others[-1]
        bias_like = None
        if self._centered and mask[2]:
            bias_like = x if others[3] is None else others[3]
        columns = math.prod(shape)
        given = [dy, x, *rows, weight]
        if not all(one.is_contiguous() for one in given):
            return None
        run = _compiled(
            *(x.dtype, weight.dtype, None if bias_like is None else bias_like.dtype),
            *(self._centered, columns),
        )
        matrices = [one.view(-1, columns) for one in (dy, x)]
        vectors = [one.view(-1) for one in (*rows, weight)]
        found = run(*matrices, *vectors)
        if found is None:
            return None
        dx, *sums = found
        made = [one.view(shape) for one in sums]
        return dx.view(x.shape), *made, *[None] * (count - len(made))


@lru_cache(maxsize=256)
def _compiled(
    dtype: torch.dtype,
    of_weight: torch.dtype,
    of_bias: torch.dtype | None,
    centered: bool,
    columns: int,
) -> Any:
    # Imported late: a machine without GPUs does not need it.
    from magjit_dvm.cuda.launch import DeviceFused

    like = None if of_bias is None else _OF_VECTORS[of_bias]
    program = norm_gradients(_DTYPES[dtype], _OF_VECTORS[of_weight], like, centered, columns)
    return DeviceFused(program, lambda *_: None)  # operator by operator is not its own


def norm_gradients(
    dtype: DType, of_weight: DType, of_bias: DType | None, centered: bool, columns: int
) -> Program:
    """The gradients of a norm's input and weight, and of its bias if that has a dtype.

    Takes dy and x of [rows, columns], each row's mean if there is one and inverse deviation, and
    the weight; see ``norms_backward.py`` for what it computes.
    """
    inputs = [Input(InputKind.TENSOR, dtype, (0, 1))] * 2
    inputs += [Input(InputKind.TENSOR, _F32, (0,))] * (1 + centered)
    inputs.append(Input(InputKind.TENSOR, of_weight, (1,)))
    nodes: list[Node] = []

    def put(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def load(number: int) -> int:
        own = inputs[number].dtype
        loaded = put(Node(NodeKind.LOAD, own, aux=number))
        return loaded if own is _F32 else put(Node(NodeKind.CAST, _F32, (loaded,)))

    def compute(op: str, *args: int) -> int:
        return put(Node(NodeKind.COMPUTE, _F32, args, op))

    def averaged(arg: int) -> int:
        total = put(Node(NodeKind.REDUCE, _F32, (arg,), "sum", dims=frozenset({1})))
        return compute("mul", total, share)

    def stored(arg: int, to: DType, *dims: int) -> Output:
        made = arg if to is _F32 else put(Node(NodeKind.CAST, to, (arg,)))
        return Output(made, dims, tuple(range(len(dims))))

    def across(arg: int, to: DType) -> Output:
        total = Node(NodeKind.REDUCE, _F32, (arg,), "sum", aux=ACROSS, dims=frozenset({0}))
        return stored(put(total), to, 1)

    dy, x = load(0), load(1)
    root = load(2 + centered)
    norm = compute("mul", compute("sub", x, load(2)) if centered else x, root)
    gradient = compute("mul", dy, load(len(inputs) - 1))
    share = put(Node(NodeKind.CONSTANT, _F32, number=1.0 / columns))
    rest = compute("sub", gradient, averaged(gradient)) if centered else gradient
    taken = compute("mul", norm, averaged(compute("mul", gradient, norm)))
    result = compute("mul", compute("sub", rest, taken), root)
    outputs = [stored(result, dtype, 0, 1), across(compute("mul", norm, dy), of_weight)]
    if of_bias is not None:
        outputs.append(across(dy, of_bias))
    return Program(2, tuple(inputs), tuple(nodes), tuple(outputs))
