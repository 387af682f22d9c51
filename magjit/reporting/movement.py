"""What a graph moves, for readers: the table of operators, and the points-to graph as a picture.

Tensors stand in layers: what has memory on the right, on its left what is virtual of it. Colours
come from CSS variables with defaults, so that a page can set its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import networkx as nx

from magjit.plugin.data_movement import DataMovement, Edge, Place

_MOST_PLACES = 120
_ROW = 46
_HEIGHT = 34
_GAP = 64
_CHARACTER = 6.7
_LONGEST = 30
_MARGIN = 12


def size_text(count: int) -> str:
    """``1.5 KiB``; exact below 1 KiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.4g} {unit}"


def summary(movement: DataMovement) -> str:
    """Both sums in a few words."""
    return (
        f"{movement.title}: {size_text(movement.before)} if each operator ran by itself, "
        f"{size_text(movement.after)} in what runs"
    )


def rows(movement: DataMovement) -> list[tuple[str, str, str, str]]:
    """Name, operator, bytes before and after; the sums last."""
    found = [
        (one.name, one.operator, size_text(one.before), size_text(one.after))
        for one in movement.moved
    ]
    return [*found, ("in all", "", size_text(movement.before), size_text(movement.after))]


def plain(movement: DataMovement) -> list[str]:
    """The table as lines of text, and what is virtual of what."""
    table = [("result", "operator", "before", "after"), *rows(movement)]
    widths = [max(len(row[k]) for row in table) for k in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {what:<{widths[1]}}  {before:>{widths[2]}}  {after:>{widths[3]}}"
        for name, what, before, after in table
    ]
    return [*lines, *(f"{one.tensor} → {one.target} ({one.operator})" for one in movement.edges)]


# -- the picture ----------------------------------------------------------------------------------

STYLE = """
.pointsto { font: 12px ui-sans-serif, system-ui, sans-serif; }
.pointsto rect { fill: var(--tensor, #dbf1e4); stroke: #2f8f5b; }
.pointsto .virtual rect { fill: var(--surface, #fff); stroke: var(--muted, #8a8f98);
  stroke-dasharray: 4 3; }
.pointsto text { fill: var(--ink, #1b1f24); }
.pointsto .below { fill: var(--soft, #5d636b); font-size: 10.5px; }
.pointsto path { fill: none; stroke: var(--muted, #8a8f98); }
.pointsto marker path { fill: var(--muted, #8a8f98); stroke: none; }
"""


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    width: float


def draw(movement: DataMovement, most: int = _MOST_PLACES) -> str:
    """The points-to graph as an SVG element; empty where nothing is virtual.

    Args:
        movement: of one graph.
        most: tensors that are shown; of more, those that belong to the largest are.
    """
    places, edges = _largest(movement, most)
    if not edges:
        return ""
    boxes = _laid_out(places, edges)
    width = max(box.x + box.width for box in boxes.values()) + _MARGIN
    height = max(box.y for box in boxes.values()) + _HEIGHT + _MARGIN
    marker = (
        '<defs><marker id="pointsto-end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pointsto" role="img" '
        f'aria-label="Points-to graph" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<style>{STYLE}</style>{marker}",
        *(_arrow(one, boxes[one.tensor], boxes[one.target]) for one in edges),
        *(_drawn(one, boxes[one.name]) for one in places),
        "</svg>",
    ]
    return "\n".join(parts)


def _largest(movement: DataMovement, most: int) -> tuple[list[Place], list[Edge]]:
    """Whole components of the graph, the largest tensors' first, as many as there is room for."""
    graph = nx.Graph((one.tensor, one.target) for one in movement.edges)
    sizes = {one.name: one.size for one in movement.places}
    components = sorted(
        nx.connected_components(graph), key=lambda names: -max(map(sizes.__getitem__, names))
    )
    shown: set[str] = set()
    for names in components:
        if not shown or len(shown) + len(names) <= most:
            shown |= names
    places = [one for one in movement.places if one.name in shown]
    return places, [one for one in movement.edges if one.tensor in shown]


def _laid_out(places: Sequence[Place], edges: Sequence[Edge]) -> dict[str, _Box]:
    """Layers by the longest way to memory; within one, near to what is pointed to."""
    graph = nx.DiGraph((one.tensor, one.target) for one in edges)
    depth: dict[str, int] = {}
    for name in reversed(list(nx.topological_sort(graph))):
        depth[name] = max((depth[below] + 1 for below in graph.successors(name)), default=0)
    layers = [[p for p in places if depth[p.name] == k] for k in range(max(depth.values()) + 1)]
    rows_of: dict[str, float] = {}
    for layer in layers:
        wanted = {
            place.name: _mean([rows_of[one] for one in graph.successors(place.name)], number)
            for number, place in enumerate(layer)
        }
        row = 0.0
        for place in sorted(layer, key=lambda one: wanted[one.name]):
            row = max(row, wanted[place.name])
            rows_of[place.name] = row
            row += 1
    boxes: dict[str, _Box] = {}
    x = float(_MARGIN)
    for layer in reversed(layers):
        longest = max(max(map(len, _texts(place))) for place in layer)
        width = longest * _CHARACTER + 20
        for place in layer:
            boxes[place.name] = _Box(x, _MARGIN + rows_of[place.name] * _ROW, width)
        x += width + _GAP
    return boxes


def _mean(found: Sequence[float], otherwise: float) -> float:
    return sum(found) / len(found) if found else float(otherwise)


def _texts(place: Place) -> tuple[str, str]:
    return _clipped(place.name), _clipped(f"{place.text}, {size_text(place.size)}")


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _arrow(edge: Edge, start: _Box, end: _Box) -> str:
    x, y = start.x + start.width, start.y + _HEIGHT / 2
    to = end.y + _HEIGHT / 2
    bend = (x + end.x) / 2
    title = escape(f"{edge.tensor} → {edge.target}: {edge.operator} is needless")
    return (
        f'<g><title>{title}</title><path marker-end="url(#pointsto-end)" '
        f'd="M{x:.1f} {y:.1f}C{bend:.1f} {y:.1f} {bend:.1f} {to:.1f} {end.x:.1f} {to:.1f}"/></g>'
    )


def _drawn(place: Place, box: _Box) -> str:
    name, below = _texts(place)
    kind = "virtual" if place.virtual else "physical"
    title = escape(f"{place.name}: {place.text}, {place.size} bytes, {kind}")
    middle = box.y + _HEIGHT / 2
    return (
        f'<g class="{kind}"><title>{title}</title><rect x="{box.x:.1f}" y="{box.y:.1f}" '
        f'width="{box.width:.1f}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{box.x + 10:.1f}" y="{middle - 3:.1f}">{escape(name)}</text>'
        f'<text class="below" x="{box.x + 10:.1f}" y="{middle + 11:.1f}">{escape(below)}</text></g>'
    )
