"""What a graph writes into its inputs at its end: parts alone, and many small tensors by one call.

A cache or buffer of which a program writes a slice is not made anew and copied back as a whole.

A convolutional network in training has three buffers for each batch norm.  Each written by a call
of its own, they take a host longer than all the gradients of small images.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from magjit.plugin.aliases import may_alias, memory_of, readers, written_by
from magjit.plugin.fx_helpers import called
from magjit.plugin.fx_nodes import remove_unused
from magjit.plugin.inference import order_of
from magjit_dvm.alone import elements_of
from magjit_dvm.batch_norms import writes_in_place

__all__ = ["write_parts", "write_parts_that_are_read", "write_together"]

aten = torch.ops.aten

_VIEWS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
"""What puts a part into a copy of a tensor, and what gives the place of that part."""
_IN_PLACE: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}
"""What changes elements at positions of a copy of a tensor, or of the tensor; it may raise."""
_REPEATING = (aten.copy.default, aten.fill.Tensor)
"""What makes a part of the second operand, as a write to it does."""
_SMALL_PART = 8
"""What part of a tensor at most is written beside a copy of it."""
_SMALL = 1 << 16
"""Elements up to which a tensor is better written together with others."""


_Path = tuple[tuple[Any, tuple[Any, ...]], ...]
"""Views of one another: an operator that gives each, and its arguments."""


class _Write(NamedTuple):
    """A part of an input, and what the part becomes; or of ``_IN_PLACE``, what is done to it."""

    path: _Path
    value: Node

    @property
    def raises(self) -> bool:
        return self.value.target in _IN_PLACE

    @property
    def read(self) -> list[Node]:
        """The tensors that the write reads, but for what it writes to."""
        if not self.raises:
            return [self.value]
        others = (one for one in self.value.all_input_nodes if one is not self.value.args[0])
        return [one for one in others if isinstance(one.meta["val"], torch.Tensor)]


def write_parts(graph: Graph) -> None:
    """Have the last writes of inputs write what changes, where nobody else reads the whole.

    What a write reads must be as it was before the others: it lies in no input that is written.
    What may raise is the first write of all, or made apart as before.
    """
    changed = _read_what_was_put(graph)
    targets = [one for node in graph.nodes for one in written_by(node)]
    for copy, to, source, writes in _partial(graph):
        first = to is targets[0] or not any(one.raises for one in writes)
        if first and set(source.users) == {copy}:
            _write_before(graph, copy, to, writes)
            graph.erase_node(copy)
            changed = True
    if changed:
        remove_unused(graph)


def write_parts_that_are_read(graph: Graph) -> None:
    """The same where others read the whole: they read the input, or the part is written twice.

    From here on what operators read depends on where in the graph they are; ``fuse`` knows.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    changed = False
    for copy, to, source, writes in _partial(graph):
        if _may_be_written_at(source, to, copy, order):
            with graph.inserting_after(source):
                whole = graph.call_function(operator.getitem, ((to,), 0))
            whole.meta["val"] = to.meta["val"]
            source.replace_all_uses_with(whole)
            whole.args = ((to, *_write_before(graph, whole, to, writes)), 0)
        elif _are_small(writes, to):
            _write_before(graph, copy, to, writes)
        else:
            continue
        graph.erase_node(copy)
        changed = True
    if changed:
        remove_unused(graph)


def _partial(graph: Graph) -> Iterator[tuple[Node, Node, Node, list[_Write]]]:
    """Last copies to inputs of which parts change: the copy, the input, its source, the parts."""
    written = memory_of(one for node in graph.nodes for one in written_by(node))
    for copy in _last_copies(graph):
        to, source = copy.args[:2]
        assert isinstance(to, Node) and isinstance(source, Node)
        writes = None if copy.users else _writes(source, to, ())
        if writes and all(memory_of(one.read).isdisjoint(written) for one in writes):
            yield copy, to, source, [_shortened(one, written) for one in writes]


def _shortened(write: _Write, written: set[Node]) -> _Write:
    """Without an operator that casts or repeats a part, as the write to it does."""
    value = write.value
    if value.target not in _REPEATING:
        return write
    given: Any = value.args[1]
    near = _device(given) == _device(value) and memory_of([given]).isdisjoint(written)
    return write._replace(value=given) if near else write


def _may_be_written_at(source: Node, to: Node, copy: Node, order: dict[Node, int]) -> bool:
    """Whether an input may be written where ``source`` is made, which others read.

    Nobody reads what it was from there on, nor what it is between writes; and nothing is returned
    that would lie in it.
    """
    chain = [source]
    while chain[-1] is not to:
        base: Any = chain[-1].args[0]
        if base is not to and set(base.users) != {chain[-1]}:
            return False
        chain.append(base)
    first = order[chain[-2]]
    others = [one for one in readers(to) if one not in chain and one is not copy]
    before = all(order.get(one, first) < first for one in others)
    later = set(readers(source)) - {copy}
    return before and not any(one.op == "output" or [*written_by(one)] for one in later)


def _read_what_was_put(graph: Graph) -> bool:
    """Read parts themselves, not out of what they were put into; whether anything has changed."""
    changed = False
    for node in graph.nodes:
        if node.target not in _VIEWS.values() or node.kwargs:
            continue
        whole: Any = node.args[0]
        if _VIEWS.get(whole.target) is not node.target or whole.args[2:] != node.args[1:]:
            continue
        part: Any = whole.args[1]
        put, read = part.meta["val"], node.meta["val"]
        # What an operator has made has no elements of the same memory, and may be viewed as parts.
        made = part.op == "call_function" and not may_alias(part) and not whole.kwargs
        same = made and put.dtype == read.dtype and order_of(put) == order_of(read)
        users = {user.target for user in node.users}
        if same and users.isdisjoint(("output", aten.as_strided.default)):
            node.replace_all_uses_with(part)
            changed = True
    return changed


def _writes(value: Node, to: Node, path: _Path) -> list[_Write] | None:
    """What makes a part of an input ``value``, in order; None if all of it is another's."""
    if _is_there(value, to, path):
        return []
    if value.target not in (*_VIEWS, *_IN_PLACE):
        return None
    base: Any = value.args[0]
    before = _writes(base, to, path)
    if before is None:
        return None
    if value.target in _IN_PLACE:
        return [*before, _Write(path, value)]
    if value.kwargs:
        return None
    part: Any = value.args[1]
    further = (*path, (_VIEWS[value.target], value.args[2:]))
    within = _writes(part, to, further)
    return _without_lost([*before, *([_Write(further, part)] if within is None else within)])


def _without_lost(writes: list[_Write]) -> list[_Write]:
    """Without what a later write puts something else over."""
    if not writes or writes[-1].raises:
        return writes
    *others, last = writes
    kept = (one for one in others if one.raises or one.path[: len(last.path)] != last.path)
    return [*kept, last]


def _is_there(value: Node, to: Node, path: _Path) -> bool:
    """Whether a value is what such a part of an input has had."""
    if not path:
        return value is to
    *outer, (target, arguments) = path
    if value.target is not target or value.args[1:] != arguments or value.kwargs:
        return False
    base: Any = value.args[0]
    return _is_there(base, to, tuple(outer))


def _are_small(writes: list[_Write], to: Node) -> bool:
    """Whether parts are so small that they are better written beside a whole that others read."""
    parts = sum(elements_of(to) if one.raises else elements_of(one.value) for one in writes)
    return parts * _SMALL_PART <= elements_of(to)


def _write_before(graph: Graph, place: Node, to: Node, writes: list[_Write]) -> list[Node]:
    with graph.inserting_before(place):
        return [_write(graph, to, one) for one in writes]


def _write(graph: Graph, to: Node, write: _Write) -> Node:
    place, value = to, write.value
    for target, arguments in write.path:
        place = called(graph, target, place, *arguments)
    if write.raises:
        made = graph.call_function(_IN_PLACE[value.target], (place, *value.args[1:]), value.kwargs)
    else:
        made = graph.call_function(aten.copy_.default, (place, value))
    made.meta["val"] = place.meta["val"]
    return made


def _device(node: Node) -> torch.device:
    value: torch.Tensor = node.meta["val"]
    return value.device


def write_together(graph: Graph) -> None:
    """Join the last writes of inputs; what a kernel can write by itself is not copied."""
    copies = _last_copies(graph)
    for node in graph.nodes:
        if written := writes_in_place(node):
            _by_its_kernel(graph, node, written, copies)
    targets: set[Any] = {one.args[0] for one in copies}
    partial = {copy for copy, *_ in _partial(graph)}
    added: dict[Any, list[Node]] = defaultdict(list)
    copied: dict[Any, list[Node]] = defaultdict(list)
    for copy in copies:
        to, source = copy.args[:2]
        assert isinstance(to, Node) and isinstance(source, Node)
        value, given = to.meta["val"], source.meta["val"]
        if copy.users or copy in partial:
            continue
        if _elements(value) > _SMALL or memory_of([source]) & targets:
            continue
        key = value.dtype, value.device
        if _adds_to(source, to, copy):
            added[key, source.args[1]].append(copy)
        elif (given.dtype, given.device, given.shape) == (*key, value.shape):
            copied[key].append(copy)
    output = graph.output_node()
    for (_, number), found in added.items():
        if len(found) > 1:
            _replace(graph, output, found, aten._foreach_add_.Scalar, number)
    for found in copied.values():
        if len(found) > 1:
            sources = [one.args[1] for one in found]
            _replace(graph, output, found, aten._foreach_copy_.default, sources)


def _last_copies(graph: Graph) -> list[Node]:
    """Copies of computed tensors to inputs that nothing reads or writes afterwards."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        if node.target is not aten.copy_.default or len(node.args) != 2:
            continue
        to, source = node.args
        if to.op != "placeholder" or not isinstance(source, Node) or source.op == "placeholder":
            continue
        if all(order[user] <= order[node] for user in readers(to)):
            found.append(node)
    return found


def _by_its_kernel(graph: Graph, norm: Node, numbers: tuple[int, ...], copies: list[Node]) -> None:
    """Running statistics that a batch norm's kernel writes where they are."""
    items = {one.args[1]: one for one in norm.users if one.target is operator.getitem}
    found = []
    for number in numbers:
        to, made = norm.args[number], items.get(number)
        written = [one for one in copies if made is not None and one.args == (to, made)]
        if not isinstance(to, Node) or len(written) != 1 or set(to.users) != {norm, *written}:
            return
        found += written
    for copy in found:
        copies.remove(copy)
        graph.erase_node(copy)
    norm.meta["in_place"] = True


def _adds_to(source: Node, to: Node, copy: Node) -> bool:
    """Whether a number is added to an input, for the input alone: a count of batches."""
    if source.target is not aten.add.Tensor or source.kwargs or len(source.args) != 2:
        return False
    number = source.args[1]
    same = source.args[0] is to and isinstance(number, int) and set(source.users) == {copy}
    return same and set(to.users) == {source, copy}


def _replace(graph: Graph, output: Node, copies: list[Node], target: Any, other: Any) -> None:
    inputs = [one.args[0] for one in copies]
    with graph.inserting_before(output):
        made = graph.call_function(target, (inputs, other))
    made.meta["val"] = None
    for copy in copies:
        source = copy.args[1]
        graph.erase_node(copy)
        assert isinstance(source, Node)
        if not source.users:
            graph.erase_node(source)


def _elements(value: torch.Tensor) -> int:
    sizes = [size for size in value.shape if isinstance(size, int)]
    return torch.Size(sizes).numel() if len(sizes) == value.dim() else _SMALL + 1
