"""Convolutions on GPUs in channels-last memory, the order in which tensor cores' kernels read.

Given images in another order, cuDNN rearranges operands and results in kernels of its own, of a
ResNet-50's training on an H200 a fifth of all time.  Here an operand comes to a convolution in that
order, once, and what is computed from its result keeps it, as eager mode does for
``channels_last``: between convolutions nothing is rearranged.

Whether this changes anything but time is found out before: the program is recorded twice on fake
tensors, as it is and with convolutions that give this order.  It is left as it is where

- a result would lie otherwise than in eager mode and cannot be brought back,
- an operator's result depends on how its operand lies (``as_strided``), or may do so, as of any
  that is not ATen's, or a gradient does, of an ``autograd.Function``, or a random number's place,
- what is written in place would no more be seen through a view, which has become a copy,
- or an operator refuses that order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from magjit.plugin.aliases import memory_of, storage_of, written_by
from magjit.plugin.convolutions import is_convolution
from magjit.plugin.fake_layouts import expression
from magjit.plugin.functional import can_be_functional
from magjit.plugin.fx_helpers import copy_graph_module, results_of, set_results
from magjit.plugin.fx_nodes import draws_random, may_follow_strides
from magjit.plugin.inference import on_fakes, order_of
from magjit.plugin.layers.recorded import in_layers
from magjit.plugin.recording import record
from magjit.plugin.sizes import elements
from magjit.plugin.symbols import is_symbolic

__all__ = ["DEVICES", "LAID", "in_channels_last"]

logger = logging.getLogger("magjit.dvm")

aten = torch.ops.aten

DEVICES = ("cuda",)
_HALF = (torch.float16, torch.bfloat16)
_WIDE = 64
"""Channels from which on these are the quick ones."""
_COPIES = 8
"""Convolutions for each image that has to be brought back to another order."""

_TORCHS = ("torch", "_operator", "builtins", "math")
"""Modules whose functions' derivatives are ATen's operators."""

Decompositions = dict[Any, Callable[..., Any]]


# -- convolutions in this order --


def _is_moved(*images: torch.Tensor) -> bool:
    """Whether a convolution of these, one of which lies otherwise, is to be in this order."""
    first = images[0]
    if first.dim() != 4 or first.device.type not in DEVICES or not _on_tensor_cores(first.dtype):
        return False
    return not all(map(_is_last, images))


def _on_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether convolutions are computed there: of float32, where these may round to TF32."""
    if dtype is not torch.float32:
        return dtype in _HALF
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the program has said so in the newer way
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def _is_last(image: torch.Tensor) -> bool:
    if is_symbolic(image):  # torch does not always know
        return _is_dense(image, (0, 2, 3, 1))
    return image.is_contiguous(memory_format=torch.channels_last)


def _last(image: torch.Tensor) -> torch.Tensor:
    return image if _is_last(image) else image.clone(memory_format=torch.channels_last)


def _convolution(image: torch.Tensor, weight: torch.Tensor, *others: Any) -> Any:
    if not _is_moved(image, weight):
        return NotImplemented
    return aten.convolution.default(_last(image), _last(weight), *others)


def _convolution_backward(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *others: Any
) -> Any:
    if not _is_moved(gradient, image, weight):
        return NotImplemented
    of_image, of_weight, of_bias = aten.convolution_backward.default(
        _last(gradient), _last(image), _last(weight), *others
    )
    if of_weight is not None and weight.is_contiguous():
        of_weight = of_weight.contiguous()  # as the parameter, which it will be added to
    return of_image, of_weight, of_bias


LAID: Decompositions = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
"""Operators that give channels-last results."""


def _normed(results: int, image: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """Where the results of a batch norm lie, which fake tensors take long to find out."""
    statistics = image.new_empty(image.shape[1:2], dtype=torch.float32)
    return torch.empty_like(image), *[statistics] * (results - 1)


_NORMS: Decompositions = {
    aten._native_batch_norm_legit.default: partial(_normed, 3),
    aten._native_batch_norm_legit.no_stats: partial(_normed, 3),
    aten._native_batch_norm_legit_no_training.default: partial(_normed, 3),
    aten.cudnn_batch_norm.default: partial(_normed, 4),
    aten.native_batch_norm.default: partial(_normed, 3),
}


# -- which programs --


def in_channels_last(
    gm: GraphModule, example_inputs: Sequence[Any], fake_mode: FakeTensorMode | None
) -> GraphModule | None:
    """The program whose results lie as in eager mode though convolutions are `LAID`.

    Args:
        gm: torch-level, as ``Backend.compile`` is given it; it is left as it is.
        example_inputs: fake tensors and symbols, as ``Backend.compile`` is given them.
        fake_mode: theirs.

    Returns:
        None where the order does not pay, or would change more than the time.
    """
    if fake_mode is None or not _may_pay(gm, example_inputs):
        return None
    laid = None
    try:
        plain = _recorded(gm, example_inputs, fake_mode, _NORMS).graph
        reason = _keeps(plain)
        if reason is None:
            laid = _recorded(gm, example_inputs, fake_mode, _NORMS | LAID).graph
            reason = _changes(plain, laid)
    except Exception as error:  # which is the program's, or comes of a view that has become none
        logger.debug("convolutions are left in their order", exc_info=error)
        return None
    if laid is None or reason is not None:
        logger.debug("convolutions are left in their order: %s", reason)
        return None
    return _restored(gm, _moved_results(plain, laid))


def _may_pay(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """What is found out without a pass over fake tensors."""
    if not torch.backends.cudnn.enabled:  # ATen's own kernels read the usual order
        return False
    if not all(map(_is_torchs, gm.graph.nodes)):  # a backward of the program's own is not recorded
        return False
    tensors = [one for one in example_inputs if isinstance(one, torch.Tensor)]
    if not any(one.dim() == 4 and one.device.type in DEVICES for one in tensors):
        return False
    named = (getattr(node.target, "__name__", str(node.target)) for node in gm.graph.nodes)
    return any("conv" in name for name in named) and can_be_functional(gm, example_inputs)


def _is_torchs(node: Node) -> bool:
    module = getattr(node.target, "__module__", None) if node.op == "call_function" else None
    return module is None or module.partition(".")[0] in _TORCHS


def _recorded(
    gm: GraphModule, example_inputs: Sequence[Any], fake_mode: FakeTensorMode, table: Decompositions
) -> GraphModule:
    function, layers = in_layers(gm)
    with on_fakes(example_inputs, fake_mode):
        return record(function, example_inputs, fake_mode, table, layers)


def _keeps(graph: Graph) -> str | None:
    """Why a program is left as it is, without a look at the other order; None: no reason."""
    if not _pays(graph):
        return "it does not pay"
    if _by_memory(graph):
        return "an operator may depend on it"
    return None


def _pays(graph: Graph) -> bool:
    """Whether the library's quick kernels do most of the work, and nothing reads channels apart."""
    wide = total = 0
    for node in graph.nodes:
        if "group_norm" in str(node.target):
            return False
        if not is_convolution(node):
            continue
        image, weight = (one.meta["val"] for one in node.args[:2])
        if not _is_moved(image, weight):
            continue
        work = elements(node.meta["val"].shape) * elements(weight.shape[1:])
        total += work
        channels = min(elements([size]) for size in weight.shape[:2])
        wide += work if node.args[8] == 1 and channels >= _WIDE else 0
    return total > 0 and 2 * wide > total


def _by_memory(graph: Graph) -> bool:
    """Whether an operator may compute something else where its operands lie otherwise."""
    return any(may_follow_strides(node) for node in graph.nodes if node.op == "call_function")


# -- what changes --


def _changes(plain: Graph, laid: Graph) -> str | None:
    """What the order changes beside the time; None: nothing."""
    if _random(plain) != _random(laid):
        return "random numbers would be drawn in another order"
    shared = _shared(plain)
    if shared != _shared(laid):
        return "results would share other memory"
    for position, order in _moved_results(plain, laid).items():
        value = results_of(plain)[position].meta["val"]
        if shared.count(shared[position]) > 1 or not _is_dense(value, order):
            return "a result is a view"
    if _writes(plain) and _names(plain) != _names(laid):
        return "views of what is written would be copies"
    convolutions = sum(map(is_convolution, plain.nodes))
    if _copies(laid) - _copies(plain) > 1 + convolutions // _COPIES:
        return "too much would be brought back to another order"
    return None


def _copies(graph: Graph) -> int:
    return sum(name == "aten.clone.default" for name in _names(graph))


def _random(graph: Graph) -> list[Any]:
    """How operands and results of operators that draw lie in memory."""
    return [
        [_strides(one) for one in (*node.all_input_nodes, *_results(node))]
        for node in graph.nodes
        if draws_random(node)
    ]


def _results(node: Node) -> Iterator[Node]:
    if isinstance(node.meta.get("val"), torch.Tensor):
        yield node
    else:
        yield from node.users


def _strides(node: Node) -> tuple[Any, ...] | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(map(expression, value.stride()))


def _shared(graph: Graph) -> list[int]:
    """Of each result the first input or result with the same memory."""
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    values = [*inputs, *map(_value, results_of(graph))]
    memory = [storage_of(one) if isinstance(one, torch.Tensor) else None for one in values]
    return [-1 if one is None else memory.index(one) for one in memory[len(inputs) :]]


def _value(result: Any) -> Any:
    return result.meta.get("val") if isinstance(result, Node) else None


def _writes(graph: Graph) -> bool:
    """Whether anything but inputs is written."""
    written = [one for node in graph.nodes for one in written_by(node)]
    return any(one.op != "placeholder" for one in memory_of(written))


def _names(graph: Graph) -> list[str]:
    """Operators in their order, but what belongs to this order."""
    return [
        str(node.target)
        for node in graph.nodes
        if node.op == "call_function"
        and node.kwargs.get("memory_format") is not torch.channels_last
        and node.target is not aten.as_strided_.default  # of pooling, to a result of its own
    ]


# -- results as in eager mode --


Orders = dict[int, tuple[int, ...]]


def _moved_results(plain: Graph, laid: Graph) -> Orders:
    """Which results lie otherwise, and the order of their dimensions in eager mode."""
    pairs = zip(results_of(plain), results_of(laid), strict=True)
    return {
        position: order_of(wanted.meta["val"])
        for position, (wanted, found) in enumerate(pairs)
        if isinstance(wanted, Node) and _strides(wanted) != _strides(found)
    }


def _restored(gm: GraphModule, orders: Orders) -> GraphModule:
    """A copy of the program that brings its results back to where they lie in eager mode."""
    made = copy_graph_module(gm)
    results = results_of(made.graph)
    for position, order in orders.items():
        results[position] = _moved(made.graph, results[position], order)
    set_results(made, results)
    made.recompile()
    return made


def _is_dense(value: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor has no gaps, its dimensions in this order."""
    expected: Any = 1
    for dim in reversed(order):
        if expression(value.stride(dim)) != expected:
            return False
        expected = expected * expression(value.size(dim))
    return True


def _moved(graph: Graph, result: Node, order: Sequence[int]) -> Node:
    back = sorted(range(len(order)), key=order.__getitem__)
    contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with graph.inserting_before(graph.output_node()):
        if list(order) == sorted(order):
            return graph.call_function(torch.clone, (result,), contiguous)
        turned = graph.call_function(torch.permute, (result, tuple(order)))
        copied = graph.call_function(torch.clone, (turned,), contiguous)
        return graph.call_function(torch.permute, (copied, tuple(back)))
