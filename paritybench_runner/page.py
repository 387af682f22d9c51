"""The report as one HTML page that needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from paritybench_runner import plots
from paritybench_runner.figures import Cause, Summary
from paritybench_runner.tables import CAUSE_HEADER, LABELS, by_kind, cause_row, coverage_rows

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.6em}h2{font-size:1.2em;margin-top:2em}
table{border-collapse:collapse;width:100%}
td,th{border-bottom:1px solid #ddd;padding:.25em .6em;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.c{overflow-wrap:anywhere}
svg{max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#222}
small{color:#666}
@media(prefers-color-scheme:dark){body{background:#181a1b;color:#ddd}svg text{fill:#ddd}
td,th{border-color:#444}}
"""
_MOST = 40


def html(summary: Summary, causes: dict[str, list[Cause]]) -> str:
    """The whole page."""
    body = "\n".join(_body(summary, causes))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Coverage of programs</title><style>{_STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _body(summary: Summary, causes: dict[str, list[Cause]]) -> Iterator[str]:
    about = summary.about
    yield "<h1>Coverage of programs</h1>"
    yield (
        f"<p><b>{summary.cases} cases in {summary.programs} programs</b> run in eager mode; "
        f"{summary.static_cases} cases are static. {summary.files_failed} of {summary.files} files "
        "fail to import.<br><small>"
    )
    told = ("date", "torch", "python", "device", "backend", "steps", "timeout_s", "sample")
    yield escape(", ".join(f"{key} {about[key]}" for key in told if about.get(key)))
    yield "</small></p>"
    for title, found in by_kind(summary):
        yield f"<h2>{title.capitalize()}</h2>"
        yield plots.stacked([(name, row.outcomes) for name, row in found.items()], LABELS)
        yield _table(["", *found], coverage_rows(found))
    if any(summary.capture_ms.values()):
        yield "<h2>Capture time</h2><p>Of the first call, over the cases that all take whole.</p>"
        yield plots.distribution({k: v for k, v in summary.capture_ms.items() if v}, "ms")
    for first, second, by_file in summary.differences:
        total = sum(count for _, count in by_file)
        yield f"<h2>Whole by {escape(first)}, not by {escape(second)}: {total} cases</h2>"
        yield plots.bars([(file, count) for file, count in by_file[:10]])
    for name, rows in causes.items():
        if rows:
            yield f"<h2>{escape(name)}: why cases are not whole</h2>"
            yield plots.bars([(f"{LABELS[c.outcome]}: {c.text}", c.count) for c in rows[:10]])
            yield _table(
                CAUSE_HEADER,
                (cause_row(c) for c in rows[:_MOST]),
            )
    for title, reasons in (
        ("Cases that eager cannot run", summary.case_failures),
        ("Files that cannot be imported", summary.file_failures),
    ):
        if reasons:
            yield f"<h2>{title}</h2>"
            shown = ([str(n), text, example] for text, n, example in reasons[:_MOST])
            yield _table(["count", "reason", "example"], shown)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(text: str) -> str:
    kind = "n" if text[:1].isdigit() else "c"
    return f'<td class="{kind}">{escape(text)}</td>'
