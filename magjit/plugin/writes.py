"""Inputs written in place: what functionalisation took apart becomes a write of a part again.

    x' = slice_scatter(x, copy(slice(x), v)); …; copy_(x, x')   →   copy_(slice(x), v)
    x' = index_copy(x, 0, i, v);              …; copy_(x, x')   →   index_copy_(x, 0, i, v)

A cache or buffer of which a program writes a slice is not made anew and copied back as a whole.
The writes go to the graph's end where nobody reads the new value (``write_late``), or to where it
was made, if nobody reads the old one afterwards (``write_early``).

Backends that fuse operators compute masks and whole values better than a write does: for them
(``fusing``) these are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from magjit.plugin.aliases import (
    VIEWS_OF_INPUTS,
    may_alias,
    memory_of,
    readers,
    written_by,
)
from magjit.plugin.fx_helpers import called
from magjit.plugin.fx_nodes import remove_unused
from magjit.plugin.inference import order_of
from magjit.plugin.sizes import elements_of

__all__ = ["last_copies", "updated", "write_early", "write_late", "written_in_part"]

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
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}
"""What changes elements at positions of a copy of a tensor, or of the tensor; it may raise."""
_NOT_FUSED = {key: one for key, one in _IN_PLACE.items() if key is not aten.masked_fill.Scalar}
_REPEATING = (aten.copy.default, aten.fill.Tensor)
"""What makes a tensor like the first operand of the second, as a write to the first does."""
_SMALL_PART = 8
"""What part of a tensor at most is written beside a copy of it."""


def updated(memory: torch.Tensor, *written: torch.Tensor) -> torch.Tensor:
    """A tensor after writes to it: the same memory, another value."""
    return memory


_LIMITS = {"start": 0, "end": 2**63 - 1}
"""Of a slice, what its arguments mean that are not given."""

Path = tuple[tuple[Any, tuple[Any, ...]], ...]
"""Views of one another: an operator that gives each, and its arguments."""
Kinds = Mapping[Any, Any]
"""Of ``_IN_PLACE``, what is done in place."""


class Write(NamedTuple):
    """A part of an input, and what the part becomes; or of ``_IN_PLACE``, what is done to it."""

    path: Path
    value: Node
    raises: bool = False

    @property
    def read(self) -> list[Node]:
        """The tensors that the write reads, but for what it writes to."""
        if not self.raises:
            return [self.value]
        others = (one for one in self.value.all_input_nodes if one is not self.value.args[0])
        return [one for one in others if isinstance(one.meta["val"], torch.Tensor)]


class Version(NamedTuple):
    """A value that an input has had since the one before, and the writes that make it."""

    node: Node
    writes: list[Write]


class Update(NamedTuple):
    """An input that a graph writes in part: all its values but the first, and the last copy."""

    copy: Node
    to: Node
    versions: list[Version]

    @property
    def writes(self) -> list[Write]:
        """All of them, without what is lost."""
        found: list[Write] = []
        for version in self.versions:
            for write in version.writes:
                found = _followed_by(found, write)
        return found


def written_in_part(graph: Graph, fusing: bool = False) -> Iterator[Update]:
    """The inputs that a graph writes at its end, and what to write instead of the whole."""
    for copy in last_copies(graph):
        to, source = copy.args[:2]
        assert isinstance(to, Node) and isinstance(source, Node)
        kinds = _NOT_FUSED if fusing else _IN_PLACE
        versions = None if copy.users else _versions(source, to, kinds)
        if versions and not (fusing and any(_is_whole(one) for one in versions[-1].writes)):
            yield Update(copy, to, versions)


def _is_whole(write: Write) -> bool:
    return not write.path and not write.raises


def last_copies(graph: Graph) -> list[Node]:
    """Copies of computed tensors to inputs that nothing reads or writes afterwards."""
    found = []
    for node in graph.nodes:
        if node.target is not aten.copy_.default or len(node.args) != 2:
            continue
        to, source = node.args
        if to.op != "placeholder" or not isinstance(source, Node) or source.op == "placeholder":
            continue
        if not any(user > node for user in readers(to)):
            found.append(node)
    return found


# -- where they go --


def write_late(graph: Graph, fusing: bool = False) -> None:
    """Have the last writes of inputs write what changes, where nobody else reads the whole."""
    changed = _read_what_was_put(graph)
    written = {*_written(graph)}
    for update in written_in_part(graph, fusing):
        if _may_be_late(graph, update, written) and not any(map(_is_read, update.versions[:-1])):
            _write_late(graph, update, written)
            changed = True
    if changed:
        remove_unused(graph)


def write_early(graph: Graph, fusing: bool = False) -> dict[Node, Node]:
    """Write inputs where their new values are made: those who read these read the input.

    From here on what operators read depends on where in the graph they are.  Where the old value is
    still read, small parts are written at the end, though the new value is made for who reads it.

    Returns:
        Each value of such an input, with the operator that overwrites it.
    """
    found: dict[Node, Node] = {}
    changed = False
    written = {*_written(graph)}
    for update in written_in_part(graph, fusing):
        if _may_be_early(update):
            found |= _write_versions(graph, update, written)
        elif _may_be_late(graph, update, written) or _are_small(update, written):
            _write_late(graph, update, written)
        else:
            continue
        changed = True
    if changed:
        remove_unused(graph)
    return found


def _written(graph: Graph) -> Iterator[Node]:
    """The memory that a graph writes, in order."""
    for node in graph.nodes:
        for to in written_by(node):
            yield from memory_of([to])


def _write_late(graph: Graph, update: Update, written: set[Node]) -> None:
    _write_before(graph, update.copy, update.to, update.writes, written)
    graph.erase_node(update.copy)


def _write_versions(graph: Graph, update: Update, written: set[Node]) -> dict[Node, Node]:
    found: dict[Node, Node] = {}
    here = update.to
    for version in update.versions:
        made = _write_before(graph, version.node, update.to, version.writes, written)
        with graph.inserting_before(version.node):
            after = graph.call_function(updated, (update.to, *made))
        after.meta["val"] = update.to.meta["val"]
        version.node.replace_all_uses_with(after)
        if made:  # what is put may be there
            found[here] = made[0]
        here = after
    graph.erase_node(update.copy)
    return found


def _is_read(version: Version) -> bool:
    """Whether an operator reads a value that is written over: it would be made for that alone."""
    parts = (*_VIEWS, *_VIEWS.values(), *_IN_PLACE, *_REPEATING)
    return any(one.target not in parts for one in readers(version.node))


def _may_be_late(graph: Graph, update: Update, written: set[Node]) -> bool:
    """Whether writes at the end do the same, and make the whole needless.

    What a write reads must be as it was before the others: it lies in no input that is written.
    What may raise is the first write of all, or made apart as before.
    """
    writes = update.writes
    first = not any(one.raises for one in writes) or update.to is next(_written(graph))
    alone = set(update.versions[-1].node.users) == {update.copy}
    return first and alone and _read_nothing_of(written, writes)


def _may_be_early(update: Update) -> bool:
    """Whether nobody reads a value after the next one is made, nor keeps one apart."""
    values = [update.to, *(version.node for version in update.versions)]
    own = set(values)
    for value, after in zip(values, [*values[1:], None], strict=True):
        for reader in readers(value):
            if reader is update.copy:
                continue
            late = after is not None and reader > after
            if late or memory_of(written_by(reader)) & own:
                return False
            if reader.op == "output" and not _is_viewed(value, reader):
                return False
    return all(_read_nothing_of(own, version.writes) for version in update.versions)


def _is_viewed(value: Node, output: Node) -> bool:
    """Whether callers get what lies in a value's memory as views of inputs anyway."""
    viewed: frozenset[int] = output.meta.get(VIEWS_OF_INPUTS, frozenset())
    results: Any = output.args[0]
    return all(
        number in viewed
        for number, one in enumerate(results)
        if isinstance(one, Node) and value in memory_of([one])
    )


def _are_small(update: Update, written: set[Node]) -> bool:
    """Whether parts are so small that they are better written beside a whole that others read."""
    whole, writes = elements_of(update.to), update.writes
    parts = sum(whole if one.raises else elements_of(one.value) for one in writes)
    return parts * _SMALL_PART <= whole and _read_nothing_of(written, writes)


def _read_nothing_of(memory: set[Node], writes: Sequence[Write]) -> bool:
    return all(memory_of(one.read).isdisjoint(memory) for one in writes)


def _write_before(
    graph: Graph, place: Node, to: Node, writes: Sequence[Write], written: set[Node]
) -> list[Node]:
    with graph.inserting_before(place):
        return [_write(graph, to, _shortened(one, written)) for one in writes]


def _write(graph: Graph, to: Node, write: Write) -> Node:
    place, value = to, write.value
    for target, arguments in write.path:
        place = called(graph, target, place, *_without_defaults(target, arguments))
    if write.raises:
        made = graph.call_function(_IN_PLACE[value.target], (place, *value.args[1:]), value.kwargs)
    else:
        made = graph.call_function(aten.copy_.default, (place, value))
    made.meta["val"] = place.meta["val"]
    return made


def _shortened(write: Write, written: set[Node]) -> Write:
    """Without an operator that casts or repeats a part, as the write to it does."""
    value = write.value
    if value.target not in _REPEATING:
        return write
    given: Any = value.args[1]
    near = given.meta["val"].device == value.meta["val"].device
    return write._replace(value=given) if near and memory_of([given]).isdisjoint(written) else write


def _read_what_was_put(graph: Graph) -> bool:
    """Read parts themselves, not out of what they were put into; whether anything has changed.

    What is sliced from its first element to its last is the tensor, and so is what it is put into.
    """
    changed = False
    for node in graph.nodes:
        if node.target not in (*_VIEWS, *_VIEWS.values()):
            continue
        instead = _instead(node)
        targets = {one.target for one in node.users}
        if instead is not None and targets.isdisjoint(("output", aten.as_strided.default)):
            node.replace_all_uses_with(instead)
            changed = True
    return changed


def _instead(node: Node) -> Node | None:
    """What has the elements of a view, or of a whole into which a part is put."""
    whole = node.args[0]
    assert isinstance(whole, Node)
    if node.target in _VIEWS:
        put, place = node.args[1], _arguments(node)[2:]
        if not _is_of_all(node, place):
            return None
    else:
        place = _arguments(node)[1:]
        if _is_of_all(node, place):
            return whole
        if _VIEWS.get(whole.target) is not node.target or _arguments(whole)[2:] != place:
            return None
        put = whole.args[1]
    assert isinstance(put, Node)
    return put if _may_be_instead(node, put) else None


def _is_of_all(node: Node, place: tuple[Any, ...]) -> bool:
    """Whether a slice leaves nothing out."""
    slices = (aten.slice.Tensor, aten.slice_scatter.default)
    return node.target in slices and place[1:] == (0, _LIMITS["end"], 1)


def _may_be_instead(node: Node, part: Node) -> bool:
    """Whether a part may be read for the same elements elsewhere.

    What an operator has made has no elements of the same memory, and may be viewed as parts.
    """
    put, read = part.meta["val"], node.meta["val"]
    made = part.op == "call_function" and not may_alias(part)
    return made and put.dtype == read.dtype and order_of(put) == order_of(read)


# -- what is written --


def _versions(value: Node, to: Node, kinds: Kinds) -> list[Version] | None:
    """The values that an input has one after the other; None if the last is not made of parts."""
    found: list[Version] = []
    while value is not to:
        base = value.args[0] if value.args else None
        if value.target in _REPEATING and value.meta["val"].dtype == to.meta["val"].dtype:
            found.append(Version(value, [Write((), value)]))
            break  # what there was before is lost
        if value.target not in (*_VIEWS, *kinds) or not isinstance(base, Node):
            return None
        writes = _writes(value, base, (), kinds)
        assert writes is not None
        found.append(Version(value, writes))
        value = base
    return found[::-1]


def _writes(value: Node, whole: Node, path: Path, kinds: Kinds) -> list[Write] | None:
    """What makes ``value`` of a part of ``whole``, in order; None if nothing of that is left."""
    if _is_there(value, whole, path):
        return []
    if value.target not in (*_VIEWS, *kinds):
        return None
    base: Any = value.args[0]
    before = _writes(base, whole, path, kinds)
    if before is None:
        return None
    if value.target in kinds:
        return [*before, Write(path, value, True)]
    part: Any = value.args[1]
    further = (*path, (_VIEWS[value.target], _arguments(value)[2:]))
    within = _writes(part, whole, further, kinds)
    for one in [Write(further, part)] if within is None else within:
        before = _followed_by(before, one)
    return before


def _followed_by(writes: list[Write], last: Write) -> list[Write]:
    """Without what the last write puts something else over."""
    if last.raises:
        return [*writes, last]
    kept = (one for one in writes if one.raises or one.path[: len(last.path)] != last.path)
    return [*kept, last]


def _is_there(value: Node, whole: Node, path: Path) -> bool:
    """Whether a value is that part of a whole: read of it, or what was put there."""
    if not path:
        return value is whole
    *outer, (target, arguments) = path
    base: Any = value.args[0] if value.args else None
    if value.target is target and _arguments(value)[1:] == arguments:
        if _is_there(base, whole, tuple(outer)):
            return True
    first, *others = path
    if whole.target not in _VIEWS or (_VIEWS[whole.target], _arguments(whole)[2:]) != first:
        return False
    put: Any = whole.args[1]
    return _is_there(value, put, tuple(others))


def _arguments(node: Node) -> tuple[Any, ...]:
    """All that an operator's schema has, however they are given."""
    target: Any = node.target
    values = []
    for position, argument in enumerate(target._schema.arguments):
        given = node.kwargs.get(argument.name, argument.default_value)
        value = node.args[position] if position < len(node.args) else given
        values.append(_LIMITS.get(argument.name) if value is None else value)
    return tuple(values)


def _without_defaults(view: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments behind the tensor as a program gives them."""
    schema = view._schema.arguments[1:]
    count = len(arguments)
    while count and isinstance(arguments[count - 1], int):
        default = schema[count - 1].default_value
        if arguments[count - 1] != default or default is None:
            break
        count -= 1
    return arguments[:count]
