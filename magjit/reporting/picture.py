"""The reference graph as a picture: folded, laid out as a layered tree, drawn as SVG.

Colours come from CSS variables with defaults, so that a page can set its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import networkx as nx

from magjit.reporting.content import ObjectView, Role
from magjit.reporting.folding import LIMIT, Box, fold, tree_of

_SHOWN_FACTS = 12

_ROW = 42
_HEIGHT = 32
_GAP = 40
_CHARACTER = 6.7
_LONGEST = 32
_MARGIN = 12


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box is, in pixels: its upper left corner and its width."""

    x: float
    y: float
    width: float


def lay_out(boxes: Sequence[Box]) -> dict[int, Place]:
    """A layered tree: layers from left to right, leaves from top to bottom."""
    tree = tree_of(boxes)
    by_key = {box.key: box for box in boxes}
    layers = list(nx.bfs_layers(tree, 0))
    lefts, widths, x = [], [], float(_MARGIN)
    for layer in layers:
        longest = max(max(len(text) for text in _texts(by_key[key])) for key in layer)
        widths.append(longest * _CHARACTER + 20)
        lefts.append(x)
        x += widths[-1] + _GAP
    depth = {key: index for index, layer in enumerate(layers) for key in layer}
    rows: dict[int, float] = {}
    leaves = 0
    for key in nx.dfs_postorder_nodes(tree, 0):
        below = [rows[child] for child in tree.successors(key)]
        if below:
            rows[key] = (below[0] + below[-1]) / 2
        else:
            rows[key] = leaves
            leaves += 1
    return {
        key: Place(lefts[depth[key]], _MARGIN + row * _ROW, widths[depth[key]])
        for key, row in rows.items()
    }


def _texts(box: Box) -> tuple[str, str]:
    """The two lines of a box."""
    kind = box.type_name
    if box.role is Role.TENSOR and box.facts:
        kind = box.facts[0].removesuffix(" requires_grad")
    below = ", ".join(text for text in (kind, box.note) if text)
    return _clipped(box.label), _clipped(below)


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# -- SVG ------------------------------------------------------------------------------------------

CLASSES = {
    Role.OUTSIDE: "outside",
    Role.ARGUMENT: "argument",
    Role.MODULE: "module",
    Role.TENSOR: "tensor",
    Role.CONTAINER: "container",
    Role.CODE: "code",
    Role.OBJECT: "object",
}
STYLE = """
.refgraph { font: 12px ui-sans-serif, system-ui, sans-serif; }
.refgraph rect { fill: var(--surface, #fff); stroke: var(--muted, #8a8f98); }
.refgraph text { fill: var(--ink, #1b1f24); }
.refgraph .below { fill: var(--soft, #5d636b); font-size: 10.5px; }
.refgraph path { fill: none; stroke: var(--line, #c3c8cf); }
.refgraph .link { stroke-dasharray: 4 3; stroke: var(--muted, #8a8f98); }
.refgraph .argument rect { fill: var(--argument, #dcebfb); stroke: #3b7dc4; }
.refgraph .module rect { fill: var(--module, #e6e2f8); stroke: #6f5fc0; }
.refgraph .tensor rect { fill: var(--tensor, #dbf1e4); stroke: #2f8f5b; }
.refgraph .container rect { fill: var(--container, #f3efe2); stroke: #94823c; }
.refgraph .code rect { stroke-dasharray: 3 2; }
.refgraph .outside rect { fill: var(--ink, #1b1f24); }
.refgraph .outside text { fill: var(--surface, #fff); }
.refgraph .changed rect { stroke: #cf4a1f; stroke-width: 2.5; }
"""


def draw(objects: Sequence[ObjectView], limit: int = LIMIT) -> str:
    """The picture as an SVG element; empty when there are no objects."""
    boxes = fold(objects, limit)
    if not boxes:
        return ""
    places = lay_out(boxes)
    width = max(place.x + place.width for place in places.values()) + _MARGIN
    height = max(place.y for place in places.values()) + _HEIGHT + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="refgraph" role="img" '
        f'aria-label="Reference graph" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<style>{STYLE}</style>",
        *(_edge(places[box.parent], places[box.key]) for box in boxes if box.parent != box.key),
        *(_link(places[box.key], places[target]) for box in boxes for target in sorted(box.links)),
        *(_box(box, places[box.key]) for box in boxes),
        "</svg>",
    ]
    return "\n".join(parts)


def _edge(above: Place, below: Place) -> str:
    x, y = above.x + above.width, above.y + _HEIGHT / 2
    middle, end = (x + below.x) / 2, below.y + _HEIGHT / 2
    return _curve(x, y, middle, below.x, end)


def _link(source: Place, target: Place) -> str:
    """A curve on the right hand side of both boxes."""
    x, y = source.x + source.width, source.y + _HEIGHT / 2
    end_x, end = target.x + target.width, target.y + _HEIGHT / 2
    return _curve(x, y, max(x, end_x) + _GAP * 0.7, end_x, end, ' class="link"')


def _curve(x: float, y: float, bend: float, end_x: float, end: float, kind: str = "") -> str:
    return (
        f'<path{kind} d="M{x:.1f} {y:.1f}C{bend:.1f} {y:.1f} {bend:.1f} {end:.1f} '
        f'{end_x:.1f} {end:.1f}"/>'
    )


def _box(box: Box, place: Place) -> str:
    label, below = _texts(box)
    classes = CLASSES[box.role] + (" changed" if box.changed else "")
    x, middle = place.x + 10, place.y + _HEIGHT / 2
    lines = _line(label, x, middle - (3 if below else -4))
    if below:
        lines += _line(below, x, middle + 11, ' class="below"')
    return (
        f'<g class="{classes}"><title>{escape(_tooltip(box))}</title>'
        f'<rect x="{place.x:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" '
        f'height="{_HEIGHT}" rx="5"/>{lines}</g>'
    )


def _line(text: str, x: float, y: float, kind: str = "") -> str:
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _tooltip(box: Box) -> str:
    lines = [
        f"{box.label} {box.type_name}".strip(),
        *(["changed by the run"] if box.changed else []),
    ]
    lines += box.facts[:_SHOWN_FACTS]
    if len(box.facts) > _SHOWN_FACTS:
        lines.append(f"and {len(box.facts) - _SHOWN_FACTS} more")
    return "\n".join([*lines, *([box.note] if box.note else [])])
