"""A report as one HTML page that needs nothing else: no script, no other file."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from magjit.plugin.data_movement import DataMovement
from magjit.reporting.content import TIMING_NAMES, Content, Role, Split, counted, kind_meaning
from magjit.reporting.environment import machine, versions
from magjit.reporting.movement import draw as draw_movement
from magjit.reporting.movement import rows, summary
from magjit.reporting.page_style import STYLE
from magjit.reporting.picture import CLASSES, draw

_TIME_CLASSES = dict(zip(TIMING_NAMES, ("run", "record", "build", "backend"), strict=True))


def page(content: Content) -> str:
    """The whole page."""
    title = escape(f"{content.name}: {content.verdict}")
    sections = [
        _header(content),
        _splits("Where it is cut into regions", content.cuts),
        _splits("Why it is not one graph", content.splits),
        _time(content),
        _guard_bars(content),
        _picture(content),
        _operators(content),
        _effects(content),
        *map(_movement, content.movement),
        _texts(content),
        _footer(),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(content: Content) -> str:
    tiles = ""
    for noun, number in content.counts.items():
        tiles += f"<li><b>{number}</b> {counted(number, noun).partition(' ')[2]}</li>"
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in content.notes)
    state = "whole" if content.whole else "broken"
    return (
        f"<header><h1>{escape(content.name)}</h1>"
        f'<p class="verdict {state}">{escape(content.verdict)}, '
        f"backend {escape(content.backend)}</p>{notes}<ul class=tiles>{tiles}</ul></header>"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>"


def _splits(title: str, splits: list[Split]) -> str:
    if not splits:
        return ""
    items = []
    for split in splits:
        where = ""
        if split.file is not None:
            where = f"<p><code>{escape(f'{split.file}:{split.line}')}</code> in "
            where += f"<code>{escape(split.function or '')}</code></p>"
        remedy = f"<p>Way out:</p><pre>{escape(split.remedy)}</pre>" if split.remedy else ""
        items.append(f"<li><p><b>{escape(split.reason)}</b></p>{where}{remedy}</li>")
    return _section(title, f'<ol class="splits">{"".join(items)}</ol>')


def _time(content: Content) -> str:
    timings = content.shown_timings
    total = sum(timings.values())
    if not total:
        return ""
    bars, rows = [], []
    for key, value in timings.items():
        share = 100 * value / total
        name, kind = TIMING_NAMES[key], _TIME_CLASSES[key]
        if value:
            hint = escape(f"{name}: {value:.1f} ms")
            bars.append(f'<span class="{kind}" style="width:{share:.2f}%" title="{hint}"></span>')
        rows.append(
            f'<li><i class="{kind}"></i>{escape(name)} <b>{value:.1f} ms</b> ({share:.0f}%)</li>'
        )
    bar = f'<div class="bar" role="img" aria-label="Time spent">{"".join(bars)}</div>'
    return _section(f"Time: {total:.1f} ms", f'{bar}\n<ul class="legend">{"".join(rows)}</ul>')


def _guard_bars(content: Content) -> str:
    if not content.guards:
        return ""
    most = max(content.guards.values())
    rows = "".join(
        f'<tr><th scope="row">{escape(kind)}<small>{escape(kind_meaning(kind))}</small></th>'
        f'<td class="number">{count}</td>'
        f'<td><div class="count" style="width:{100 * count / most:.1f}%"></div></td></tr>'
        for kind, count in content.guards.most_common()
    )
    table = f'<table class="bars">{rows}</table>'
    text = _details("all guards", content.guard_text)
    return _section(f"Guards: {content.guards.total()}", table + text)


def _picture(content: Content) -> str:
    if len(content.objects) < 2:
        return ""
    shown = {view.role for view in content.objects}
    legend = "".join(
        f'<li><i class="role {CLASSES[role]}"></i>{escape(role)}</li>'
        for role in Role
        if role in shown
    )
    if any(view.changed for view in content.objects):
        legend += '<li><i class="role changed"></i>changed by the run</li>'
    hint = "<p>Objects from outside that the run read; hover over one for what is checked.</p>"
    picture = f'<div class="scroll">{draw(content.objects)}</div>'
    body = f'{hint}<ul class="legend">{legend}</ul>{picture}'
    return _section("Reference graph", body + _details("as text", content.refgraph_text))


def _operators(content: Content) -> str:
    if not content.operator_calls:
        return ""
    rows = []
    for call in content.operator_calls:
        where = ""
        if call.location is not None:
            where = f"{call.location.filename}:{call.location.line}"
        rows.append(
            f"<tr><td><code>{escape(call.text)}</code></td>"
            f"<td><code>{escape(where)}</code></td></tr>"
        )
    table = (
        '<div class="scroll tall"><table><thead><tr><th>operator</th><th>called at</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    inputs = _details(counted(len(content.inputs), "input"), "\n".join(content.inputs))
    return _section(f"Operators: {len(content.operator_calls)}", inputs + table)


def _effects(content: Content) -> str:
    if not content.side_effects:
        return ""
    items = "".join(f"<li><code>{escape(text)}</code></li>" for text in content.side_effects)
    return _section(f"Side effects: {len(content.side_effects)}", f"<ol>{items}</ol>")


def _movement(movement: DataMovement) -> str:
    *found, total = (
        "".join(
            (
                f"<td><code>{escape(name)}</code></td><td><code>{escape(what)}</code></td>",
                f'<td class="size">{escape(before)}</td><td class="size">{escape(after)}</td>',
            )
        )
        for name, what, before, after in rows(movement)
    )
    table = (
        '<div class="scroll tall"><table><thead><tr><th>result</th><th>operator</th>'
        '<th class="size">before</th><th class="size">after</th></tr></thead>'
        f"<tbody>{''.join(f'<tr>{row}</tr>' for row in found)}<tr>{total}</tr></tbody>"
        "</table></div>"
    )
    picture = draw_movement(movement)
    if picture:
        about = "<p>The points-to graph: dashed tensors are never made; each is read from, or "
        about += "computed in, the one that its arrow leads to.</p>"
        picture = f'{about}<div class="scroll">{picture}</div>'
    return _section("Data that moves", f"<p>{escape(summary(movement))}</p>{picture}{table}")


def _texts(content: Content) -> str:
    parts = []
    for number, gm in enumerate(content.graphs):
        title = "torch.fx graph" if len(content.graphs) == 1 else f"torch.fx graph {number}"
        parts.append(_details(title, gm.print_readable(print_output=False)))
    parts += _if_any("mock, as a plan", content.mock_text)
    parts += _if_any("mock, as code", content.mock_source)
    for name, text in content.backend_dumps.items():
        parts.append(_details(f"backend: {name}", text))
    return _section("Code", "\n".join(parts)) if parts else ""


def _if_any(title: str, text: str) -> Iterable[str]:
    return [_details(title, text)] if text else []


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _footer() -> str:
    facts = {**versions(), **{key: str(value) for key, value in machine().items()}}
    text = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"<footer>{escape(text)}</footer>"
