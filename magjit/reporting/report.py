"""The report of `magjit.explain`: its content and the forms in which it can be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from magjit.reporting import dump
from magjit.reporting.content import Content, Split
from magjit.reporting.environment import machine, versions
from magjit.reporting.html import page
from magjit.reporting.picture import draw
from magjit.reporting.terminal import renderable
from magjit.reporting.text import plain

SCHEMA = 1
"""Number of the JSON form; it grows when a key changes its meaning."""


@dataclass(slots=True, kw_only=True)
class Report(Content):
    """What a capture found out about a program; for the fields see `Content`.

    ``print(report)`` gives plain text; `rich` prints it with colours and tables.
    """

    def __str__(self) -> str:
        return plain(self)

    def __repr__(self) -> str:
        return f"<Report of {self.name}: {self.verdict}>"

    def __rich__(self) -> RenderableType:
        return renderable(self)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; keys are never left out."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "backend": self.backend,
            "whole": self.whole,
            "verdict": self.verdict,
            "record_count": self.record_count,
            "graphs": [
                {
                    "nodes": len(gm.graph.nodes),
                    "inputs": sum(node.op == "placeholder" for node in gm.graph.nodes),
                    "code": gm.code.strip(),
                }
                for gm in self.graphs
            ],
            "inputs": self.inputs,
            "operators": [
                {
                    "text": call.text,
                    "file": call.location.filename if call.location else None,
                    "line": call.location.line if call.location else None,
                    "function": call.location.function if call.location else None,
                }
                for call in self.operator_calls
            ],
            "guards": {
                "total": self.guards.total(),
                "kinds": dict(self.guards.most_common()),
                "lines": [{"kind": line.kind, "text": line.text} for line in self.guard_lines],
            },
            "side_effects": self.side_effects,
            "cuts": [_split(split) for split in self.cuts],
            "splits": [_split(split) for split in self.splits],
            "missing": self.missing,
            "movement": [one.to_json() for one in self.movement],
            "timings": self.timings,
            "objects": max(0, len(self.objects) - 1),
            "notes": self.notes,
            "versions": versions(),
            "machine": machine(),
        }

    def to_html(self) -> str:
        """The report as one HTML page without any other file."""
        return page(self)

    def to_svg(self) -> str:
        """The reference graph as a picture."""
        return draw(self.objects)

    def dump(self, folder: str | Path) -> Sequence[Path]:
        """Write everything as readable files; returns their paths, the index first.

        Raises:
            ArgumentError: the folder cannot be made.
        """
        extra = [dump.File("report.html", "this report as a page", self.to_html())]
        if picture := self.to_svg():
            extra.append(dump.File("refgraph.svg", "outside objects as a picture", picture))
        return dump.write(self, dump.prepare(folder), extra)


def _split(split: Split) -> dict[str, Any]:
    return {
        "reason": split.reason,
        "file": split.file,
        "line": split.line,
        "function": split.function,
        "remedy": split.remedy,
    }
