"""Undoes what lowering to ATen took apart needlessly: views that change nothing, linear.

A linear layer of three dimensions becomes ``view → addmm(bias, ·, t(weight)) → view``: four
calls where ATen's ``linear`` is one, and the one that the program had made.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from magjit.plugin.convolutions import bias_apart, is_convolution
from magjit.plugin.fx_helpers import called
from magjit.plugin.inference import draw_in_place
from magjit.plugin.sizes import elements
from magjit_dvm.attending import find_attention
from magjit_dvm.batch_norms import DTYPES
from magjit_dvm.builder import size_key
from magjit_dvm.drawing import draw_in_groups
from magjit_dvm.translate import handles

__all__ = ["simplify"]

aten = torch.ops.aten
_ALIASES = (aten.alias.default, aten.detach.default)
_BLANK = (aten.empty_like.default, aten.empty.memory_format, aten.empty_permuted.default)
_LARGE, _LEAST_IMAGE = 1 << 20, 1024
"""Elements of a gradient, and of an image of a channel, from which on sums of images are faster."""
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def simplify(graph: Graph) -> None:
    """Simplify a functional ATen graph in place."""
    for node in list(graph.nodes):
        if node.target in _ALIASES and _is_only_passed_on(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target in (*_RESHAPES, aten.expand.default) and _same(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    find_attention(graph)
    for node in list(graph.nodes):
        _undo_twice(graph, node)
    for node in list(graph.nodes):
        if node.target in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
            _without_total(graph, node)
    for node in list(graph.nodes):
        if node.target in (aten.addmm.default, aten.mm.default):
            _make_linear(graph, node)
    for node in list(graph.nodes):
        if is_convolution(node) and _adds_bias_apart(node):
            bias_apart(graph, node)
    for node in list(graph.nodes):
        if node.target is aten.convolution_backward.default and _sums_bias_slowly(node):
            _bias_gradient_apart(graph, node)
    for node in list(graph.nodes):
        if node.target is aten.bernoulli.p and getattr(node.args[0], "target", None) in _BLANK:
            draw_in_place(graph, node)
    draw_in_groups(graph)


def _adds_bias_apart(node: Node) -> bool:
    """Whether a bias that cuDNN adds in a kernel of its own can join what follows instead."""
    value: torch.Tensor = node.meta["val"]
    if not isinstance(node.args[2], Node) or value.device.type != "cuda":
        return False
    groups: object = node.args[8]
    return groups == 1 and any(map(handles, node.users))


def _sums_bias_slowly(node: Node) -> bool:
    """Whether a large gradient of images, in the usual order, is read again for that of a bias."""
    given: Any = node.args
    gradient, wanted = given[0].meta["val"], given[-1][2]
    known = gradient.is_cuda and gradient.dtype in DTYPES and gradient.dim() > 2
    if not (wanted and known and gradient.is_contiguous()):
        return False
    count = elements(gradient.shape)
    return count >= _LARGE and count >= _LEAST_IMAGE * elements(gradient.shape[:2])


def _bias_gradient_apart(graph: Graph, node: Node) -> None:
    """Sums of images, then over these: the first ones where the gradient is made, or read once."""
    gradient: Any = node.args[0]
    value = gradient.meta["val"]
    wanted: Any = node.args[-1]
    with graph.inserting_before(node):
        over = list(range(2, value.dim()))
        each = called(graph, aten.sum.dim_IntList, gradient, over, dtype=torch.float32)
        total = called(graph, aten.sum.dim_IntList, each, [0])
        if value.dtype is not torch.float32:
            total = called(graph, aten._to_copy.default, total, dtype=value.dtype)
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == 2:
            user.replace_all_uses_with(total)
            graph.erase_node(user)
    node.args = (*node.args[:-1], [*wanted[:2], False])
    node.meta["val"] = (*node.meta["val"][:2], None)


def _is_only_passed_on(alias: Node) -> bool:
    """Whether nobody can tell an alias from what it is an alias of."""
    (base,) = alias.args
    assert isinstance(base, Node)
    outputs = [user for user in alias.users if user.op == "output"]
    return base.op == "call_function" and not any(one in base.users for one in outputs)


def _undo_twice(graph: Graph, node: Node) -> None:
    """A matrix that is transposed twice."""
    if node.target is not aten.t.default or not node.users:
        return
    (first,) = node.args
    if isinstance(first, Node) and first.target is aten.t.default:
        node.replace_all_uses_with(first.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
        if not first.users:
            graph.erase_node(first)


def _without_total(graph: Graph, node: Node) -> None:
    """The total weight of losses that are not added up is 0: it need not come from the loss."""
    given, reduction = node.args[0], node.args[3]
    if reduction != 0 or not isinstance(given, Node) or given.meta["val"].dim() < 2:
        return
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == 1:
            with graph.inserting_before(user):
                made = graph.call_function(aten.new_zeros.default, (given, []))
            made.meta = dict(user.meta)
            user.replace_all_uses_with(made)
            graph.erase_node(user)


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(size_key(size) for size in node.meta["val"].shape)


def _same(node: Node, other: Any) -> bool:
    return isinstance(other, Node) and _shape(node) == _shape(other)


def _make_linear(graph: Graph, node: Node) -> None:
    bias, given, transposed = node.args if len(node.args) == 3 else (None, *node.args)
    if node.kwargs or not isinstance(given, Node) or not isinstance(transposed, Node):
        return
    if transposed.target is not aten.t.default:
        return
    if bias is not None and len(_shape(bias)) != 1:
        return
    source, replaced = given, [node]
    if _goes_through_views(node, given):
        source, replaced = given.args[0], list(node.users)  # type: ignore[assignment]
    weight = transposed.args[0]
    with graph.inserting_before(node):
        operands = (source, weight) if bias is None else (source, weight, bias)
        made = graph.call_function(aten.linear.default, operands)
    made.meta = dict(replaced[0].meta)
    for one in replaced:
        one.replace_all_uses_with(made)
    for dead in (*replaced, node, transposed, given):
        if not dead.users and not dead._erased and dead.op == "call_function":
            graph.erase_node(dead)


def _goes_through_views(product: Node, given: Node) -> bool:
    """Whether leading dimensions are merged for a matrix product alone, and parted after it."""
    if given.target not in _RESHAPES or not isinstance(given.args[0], Node):
        return False
    *leading, width = _shape(given.args[0])
    parted = (*leading, _shape(product)[-1])
    return (
        bool(product.users)
        and width == _shape(given)[-1]
        and all(user.target in _RESHAPES and _shape(user) == parted for user in product.users)
    )
