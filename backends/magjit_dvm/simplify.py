"""Undoes what lowering to ATen took apart needlessly: writes, views that change nothing, linear.

A linear layer of three dimensions becomes ``view → addmm(bias, ·, t(weight)) → view``: four
calls where ATen's ``linear`` is one, and the one that the program had made.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from magjit_dvm.builder import order_of, size_key

__all__ = ["make_functional", "simplify"]

aten = torch.ops.aten
_ALIASES = (aten.alias.default, aten.detach.default)
_BLANK = (aten.empty_like.default, aten.empty.memory_format, aten.empty_permuted.default)
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def make_functional(graph: Graph) -> None:
    """Replace writes to tensors that the graph itself has made and that nothing else shares."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    drawn: list[Node] = []
    for node in order:
        functional = _functional(node)
        if functional is None:
            continue
        base, here = node.args[0], order[node]
        node.target = functional
        if functional is aten.bernoulli.p:
            node.args = (base, *(node.args[1:] or (0.5,)))  # a default of the other alone
            drawn.append(node)
        # Whoever comes after reads the new value.
        base.replace_all_uses_with(node, delete_user_cb=lambda user, here=here: order[user] > here)
    for node in drawn:
        _draw_in_place(graph, node)


def _functional(node: Node) -> Any:
    """The operator that computes what ``node`` writes into its first operand, if that is all."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or node.kwargs.get("out") is not None:
        return None
    base = node.args[0] if node.args else None
    if not isinstance(base, Node) or not _is_fresh(base):
        return None
    packet, _, overload = str(node.target).removeprefix("aten.").partition(".")
    overload = "p" if node.target is aten.bernoulli_.float else overload
    found = getattr(getattr(aten, packet.removesuffix("_"), None), overload, None)
    if not packet.endswith("_") or found is None or found._schema.is_mutable:
        return None
    written = base.meta["val"]
    for other in node.all_input_nodes:
        value = other.meta["val"]
        if isinstance(value, torch.Tensor) and value.dtype != written.dtype:
            return None
    names = [one.name for one in schema.arguments]
    return found if [one.name for one in found._schema.arguments] == names else None


def _is_fresh(node: Node) -> bool:
    """Whether nobody but direct users of ``node`` sees its memory."""
    maker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(maker, Node) or not _makes_new(maker):
        return False
    return all(_makes_new(user) or _writes_only_first(user, node) for user in node.users)


def _makes_new(node: Node) -> bool:
    if node.op == "output":
        return True
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.is_mutable:
        return False
    return all(one.alias_info is None for one in schema.returns)


def _writes_only_first(node: Node, base: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or node.args[0] is not base:
        return False
    return str(node.target).split(".")[1].endswith("_")


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
    for node in list(graph.nodes):
        _undo_twice(graph, node)
    for node in list(graph.nodes):
        if node.target in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
            _without_total(graph, node)
    for node in list(graph.nodes):
        if node.target in (aten.addmm.default, aten.mm.default):
            _make_linear(graph, node)
    for node in list(graph.nodes):
        if node.target is aten.bernoulli.p and getattr(node.args[0], "target", None) in _BLANK:
            _draw_in_place(graph, node)


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


def _draw_in_place(graph: Graph, node: Node) -> None:
    """Draw into a new tensor in the order of its memory, as the operator that writes it does.

    Lowering has made it one that returns a contiguous tensor, drawn in that order.
    """
    blank = node.args[0]
    assert isinstance(blank, Node)
    order = order_of(blank.meta["val"])
    if order == tuple(range(len(order))):
        return
    back = sorted(range(len(order)), key=order.__getitem__)
    with graph.inserting_before(node):
        turned = graph.call_function(aten.permute.default, (blank, list(order)))
        turned.meta["val"] = blank.meta["val"].permute(order)
        drawn = graph.call_function(aten.bernoulli.p, (turned, *node.args[1:]), node.kwargs)
        drawn.meta["val"] = turned.meta["val"]
        made = graph.call_function(aten.permute.default, (drawn, back))
        made.meta["val"] = drawn.meta["val"].permute(back)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


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
