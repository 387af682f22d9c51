"""The reference graph folded to what a reader can take in.

    fold   ObjectView* -> Box*

Parts of nn.Modules and namespaces join their owner, mere code becomes one box, repeated layers are
shown once, and what is left over a limit is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import networkx as nx

from magjit.reporting.content import ObjectView, Role

LIMIT = 150
"""Boxes in one picture."""
_REPEATED = 3  # as many siblings that are built alike are folded
_REPEATED_LEAVES = 6


@dataclass(slots=True)
class Box:
    """One box: an object with what was folded into it.

    Attributes:
        parent: the box that it hangs on; itself for the first.
        note: what was folded, in words.
    """

    key: int
    parent: int
    label: str
    type_name: str
    role: Role
    changed: bool = False
    facts: list[str] = field(default_factory=list)
    links: set[int] = field(default_factory=set)
    note: str = ""


def fold(objects: Sequence[ObjectView], limit: int = LIMIT) -> list[Box]:
    """The boxes of a picture, each after its parent."""
    if not objects:
        return []
    boxes, home = _join(objects)
    children: dict[int, list[int]] = {key: [] for key in boxes}
    for key, box in boxes.items():
        if box.parent != key:
            children[box.parent].append(key)
    kept = _without_repetition(boxes, children)
    _keep_nearest(kept, limit)
    for key, box in kept.items():
        targets = {home[target] for target in box.links}
        box.links = {
            target
            for target in targets & kept.keys()
            if kept[target].role is not Role.CODE
            and key not in (target, kept[target].parent)
            and box.parent != target
        }
    return list(kept.values())


def _join(objects: Sequence[ObjectView]) -> tuple[dict[int, Box], dict[int, int]]:
    """Boxes without namespaces and constants, and the box that each object went to."""
    of_library: set[int] = set()
    for view in objects:
        if view.library or (view.parent in of_library and not view.changed):
            of_library.add(view.node_id)
    needed: set[int] = {0}
    for view in reversed(objects):
        folded = view.hidden or _is_empty(view) or _is_fixed(view) or view.node_id in of_library
        if view.node_id in needed or not folded:
            needed |= {view.node_id, view.parent}
    boxes: dict[int, Box] = {}
    home: dict[int, int] = {}
    for view in objects:
        if _is_fixed(view) and view.node_id not in needed:
            home[view.node_id] = _add_code(boxes, view)
        elif view.node_id and (view.hidden or view.node_id not in needed):
            at = home[view.node_id] = home[view.parent]
            name = "" if view.hidden else f"{view.label}: "
            boxes[at].facts += [name + fact for fact in view.facts]
            boxes[at].changed |= view.changed
            boxes[at].links.update(view.links)
        else:
            home[view.node_id] = view.node_id
            boxes[view.node_id] = Box(
                view.node_id,
                home[view.parent],
                view.label,
                view.type_name,
                view.role,
                view.changed,
                list(view.facts),
                set(view.links),
            )
    return boxes, home


def _is_fixed(view: ObjectView) -> bool:
    """A function, class, cell or other constant that is the same at every call."""
    roles = (Role.CODE, Role.OBJECT, Role.CONTAINER)
    target = view.node_id == 1 and view.role is not Role.CODE
    return view.parent == 0 and not target and not view.changed and view.role in roles


def _is_empty(view: ObjectView) -> bool:
    """A container in which the run found nothing, such as a module's table of hooks."""
    empty = all(fact in ("length = 0", "keys = ()") for fact in view.facts)
    return view.role is Role.CONTAINER and empty and not view.changed and "_hooks" in view.label


def _add_code(boxes: dict[int, Box], view: ObjectView) -> int:
    """Count a constant in the box of its sort."""
    key, label = (-1, "torch and Python") if view.library else (-2, "the program's code")
    box = boxes.setdefault(key, Box(key, 0, label, "", Role.CODE))
    box.facts.append(view.path)
    box.type_name = f"{len(box.facts)} functions and the like"
    return key


def _without_repetition(boxes: dict[int, Box], children: dict[int, list[int]]) -> dict[int, Box]:
    """Of many siblings that are built alike, only the first, which says how many there are."""
    shapes = _shapes(boxes, children)
    kept: dict[int, Box] = {}
    pending = [0]
    while pending:
        key = pending.pop()
        kept[key] = boxes[key]
        alike: dict[int, list[int]] = {}
        for child in children[key]:
            alike.setdefault(shapes[child], []).append(child)
        for first, *others in alike.values():
            pending.append(first)
            if len(others) + 1 < (_REPEATED if children[first] else _REPEATED_LEAVES):
                pending += others
                continue
            boxes[first].note = f"and {len(others)} more like it"
            boxes[first].changed |= any(boxes[other].changed for other in others)
    return {key: kept[key] for key in boxes if key in kept}


def _shapes(boxes: dict[int, Box], children: dict[int, list[int]]) -> dict[int, int]:
    """A number for each box that is the same for boxes that are built alike."""
    numbers: dict[object, int] = {}
    found: dict[int, int] = {}
    for key in reversed(boxes):  # children come after their parents
        box = boxes[key]
        below = tuple(sorted((boxes[child].label, found[child]) for child in children[key]))
        shape = (box.type_name, box.role, box.parent == 0 and box.key, below)
        found[key] = numbers.setdefault(shape, len(numbers))
    return found


def _keep_nearest(kept: dict[int, Box], limit: int) -> None:
    """Take the boxes that are farthest from the root out, until there are few enough."""
    order = [key for layer in nx.bfs_layers(tree_of(kept.values()), 0) for key in layer]
    counts: dict[int, int] = {}
    for key in reversed(order[limit:]):
        box = kept.pop(key)
        counts[box.parent] = counts.get(box.parent, 0) + 1 + counts.pop(key, 0)
    for key, count in counts.items():
        more = f"{count} more below"
        kept[key].note = f"{kept[key].note}, {more}" if kept[key].note else more


def tree_of(boxes: Iterable[Box]) -> nx.DiGraph:
    """The boxes as a directed tree."""
    tree = nx.DiGraph()
    for box in boxes:
        tree.add_node(box.key)
        if box.parent != box.key:
            tree.add_edge(box.parent, box.key)
    return tree
