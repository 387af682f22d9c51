"""Plots as inline SVG, drawn from data alone: bars by part, and distributions on a log axis."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape

COLOURS = {
    "whole": "#2a7f62",
    "splits": "#d9b44a",
    "refused": "#b0b0b0",
    "wrong": "#b3202c",
    "crashed": "#e0654f",
    "timeout": "#6b4c9a",
}
_LINES = ("#1f5fa8", "#c4622d", "#4b8b3b", "#7a3f98")
_WIDTH, _LABEL, _BAR = 860, 170, 26


def stacked(rows: Sequence[tuple[str, Mapping[str, int]]], labels: Mapping[str, str]) -> str:
    """One bar a row, its parts as shares of the row's total."""
    height = _BAR * len(rows) + 44
    parts = list(_stacked(rows))
    parts += _legend([(COLOURS[name], text) for name, text in labels.items()], height - 14)
    return _svg(height, parts)


def _stacked(rows: Sequence[tuple[str, Mapping[str, int]]]) -> Iterator[str]:
    space = _WIDTH - _LABEL - 90
    for i, (label, counts) in enumerate(rows):
        y, x, total = 4 + i * _BAR, float(_LABEL), sum(counts.values())
        yield _text(_LABEL - 8, y + 15, label, "end")
        for name, count in counts.items():
            if not count:
                continue
            width = space * count / total
            title = f"<title>{escape(label)}: {escape(name)} {count}</title>"
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR - 6}" '
                f'fill="{COLOURS[name]}">{title}</rect>'
            )
            x += width
        share = 100 * counts.get("whole", 0) / total if total else 0
        yield _text(_WIDTH - 84, y + 15, f"{share:.1f}% of {total}")


def bars(rows: Sequence[tuple[str, float]], colour: str = "#1f5fa8") -> str:
    """One bar a row, as long as its value; labels above the bars."""
    most = max((value for _, value in rows), default=1) or 1
    parts = []
    for i, (label, value) in enumerate(rows):
        y = 4 + i * 38
        parts.append(_text(0, y + 11, label[:125]))
        width = (_WIDTH - 90) * value / most
        parts.append(f'<rect x="0" y="{y + 16}" width="{width:.1f}" height="14" fill="{colour}"/>')
        parts.append(_text(width + 6, y + 28, f"{value:g}"))
    return _svg(38 * len(rows) + 6, parts)


def distribution(values: Mapping[str, Sequence[float]], unit: str) -> str:
    """Share of values below each point, on a logarithmic axis."""
    every = [value for row in values.values() for value in row if value > 0]
    if not every:
        return ""
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    high = max(high, low + 1)
    left, top, width, height = 50, 10, _WIDTH - 70, 240

    def across(value: float) -> float:
        return left + width * (math.log10(max(value, 10**low)) - low) / (high - low)

    parts = []
    for power in range(low, high + 1):
        x = across(10.0**power)
        parts.append(f'<path d="M{x:.1f} {top}V{top + height}" stroke="#ddd"/>')
        parts.append(_text(x, top + height + 16, f"{10.0**power:g} {unit}", "middle"))
    for share in (0, 25, 50, 75, 100):
        y = top + height * (1 - share / 100)
        parts.append(f'<path d="M{left} {y}H{left + width}" stroke="#ddd"/>')
        parts.append(_text(left - 6, y + 4, f"{share}%", "end"))
    legend = []
    for colour, (name, row) in zip(_LINES, values.items(), strict=False):
        ordered = sorted(row)
        points = [
            f"{across(value):.1f},{top + height * (1 - (i + 1) / len(ordered)):.1f}"
            for i, value in enumerate(ordered)
        ]
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        legend.append((colour, f"{name} ({len(ordered)} cases)"))
    return _svg(top + height + 50, parts + _legend(legend, top + height + 36))


def curves(values: Mapping[str, Sequence[Sequence[float]]], unit: str, most: float) -> str:
    """Medians of runs, with all runs thin behind them; values from 1 to ``most``."""
    left, top, width, height = 50, 10, _WIDTH - 70, 240
    longest = max((len(run) for runs in values.values() for run in runs), default=1)

    def line(run: Sequence[float], colour: str, stroke: float, opacity: float) -> str:
        points = [
            f"{left + width * i / max(1, longest - 1):.1f},"
            f"{top + height * (1 - (min(value, most) - 1) / (most - 1)):.1f}"
            for i, value in enumerate(run)
        ]
        return (
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" '
            f'stroke-width="{stroke}" opacity="{opacity}"/>'
        )

    parts = []
    for step in range(5):
        y = top + height * (1 - step / 4)
        parts.append(f'<path d="M{left} {y}H{left + width}" stroke="#ddd"/>')
        parts.append(_text(left - 6, y + 4, f"{1 + (most - 1) * step / 4:.2f}", "end"))
    parts.append(_text(left + width, top + height + 16, f"{longest} {unit}", "end"))
    legend = []
    for colour, (name, runs) in zip(_LINES, values.items(), strict=False):
        parts += [line(run, colour, 0.7, 0.4) for run in runs]
        parts.append(
            line([statistics.median(row) for row in zip(*runs, strict=False)], colour, 2.5, 1)
        )
        legend.append((colour, f"{name} ({len(runs)} seeds)"))
    return _svg(top + height + 50, parts + _legend(legend, top + height + 36))


def _legend(entries: Sequence[tuple[str, str]], y: float) -> list[str]:
    parts, x = [], 0.0
    for colour, text in entries:
        parts.append(f'<rect x="{x:.0f}" y="{y - 8}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 15, y + 1, text))
        x += 30 + 7.2 * len(text)
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'width="{_WIDTH}" height="{height:.0f}">{"".join(parts)}</svg>'
    )
