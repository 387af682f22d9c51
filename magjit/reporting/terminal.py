"""A report for a terminal, as a `rich` renderable."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from magjit.plugin.data_movement import DataMovement
from magjit.reporting.content import TIMING_NAMES, Content, Split, counted
from magjit.reporting.movement import rows, summary

_SHOWN = 30
_COLOURS = ("green", "cyan", "yellow", "magenta")
_BAR = 48


def renderable(content: Content) -> RenderableType:
    """Panel and tables; long lists are cut, the report itself has all of them."""
    return Group(*_parts(content))


def _parts(content: Content) -> Iterator[RenderableType]:
    yield _headline(content)
    if content.cuts:
        yield _splits("Where it is cut into regions", content.cuts)
    if content.splits:
        yield _splits("Why it is not one graph", content.splits)
    if content.operator_calls:
        yield _operators(content)
    if content.guards:
        yield _guards(content)
    if content.side_effects:
        yield _effects(content)
    for movement in content.movement:
        yield _movement(movement)
    if any(content.timings.values()):
        yield _time(content)


def _headline(content: Content) -> Panel:
    colour = "green" if content.whole else "red" if content.splits else "yellow"
    text = Text.assemble((content.verdict, f"bold {colour}"))
    counts = [counted(number, noun) for noun, number in content.counts.items()]
    text.append("\n" + ", ".join(counts), style="dim")
    for note in content.notes:
        text.append(f"\n{note}", style="yellow")
    title = Text(f"{content.name}, backend {content.backend}")
    return Panel(text, title=title, title_align="left", border_style=colour)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", expand=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _splits(title: str, splits: list[Split]) -> Table:
    table = _table(title, "where", "reason", "way out")
    table.show_lines = True
    for split in splits:
        where = "" if split.file is None else f"{split.file}:{split.line}\nin {split.function}"
        table.add_row(Text(where), Text(split.reason), Text(split.remedy or ""))
    return table


def _operators(content: Content) -> Table:
    table = _table(counted(len(content.operator_calls), "operator"), "operator", "called at")
    for call in content.operator_calls[:_SHOWN]:
        where = "" if call.location is None else f"{call.location.filename}:{call.location.line}"
        table.add_row(Text(call.text), Text(where, style="dim"))
    _cut(table, len(content.operator_calls))
    return table


def _guards(content: Content) -> Table:
    table = _table(counted(content.guards.total(), "guard"), "kind", "count", "such as")
    examples = {line.kind: line.text for line in reversed(content.guard_lines)}
    for kind, count in content.guards.most_common():
        table.add_row(kind, str(count), Text(examples.get(kind, ""), style="dim"))
    table.columns[1].justify = "right"
    return table


def _effects(content: Content) -> Table:
    table = _table(counted(len(content.side_effects), "side effect"), "a replay also does")
    for effect in content.side_effects[:_SHOWN]:
        table.add_row(Text(effect))
    _cut(table, len(content.side_effects))
    return table


def _movement(movement: DataMovement) -> Table:
    table = _table(f"Data that moves, {summary(movement)}", "result", "operator", "before", "after")
    for column in table.columns[2:]:
        column.justify = "right"
    *found, total = rows(movement)
    for row in found[:_SHOWN]:
        table.add_row(*map(Text, row))
    _cut(table, len(found))
    table.add_row(*(Text(one, style="bold") for one in total))
    return table


def _cut(table: Table, count: int) -> None:
    if count > _SHOWN:
        table.add_row(Text(f"and {count - _SHOWN} more", style="dim"))


def _time(content: Content) -> Table:
    timings = content.shown_timings
    total = sum(timings.values()) or 1.0
    table = Table(title="Time", title_justify="left", show_header=False, box=None)
    for (key, value), colour in zip(timings.items(), _COLOURS, strict=True):
        bar = Text("█" * round(_BAR * value / total), style=colour)
        table.add_row(Text(TIMING_NAMES[key]), f"{value:.1f} ms", bar)
    table.columns[1].justify = "right"
    return table
