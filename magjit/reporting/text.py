"""A report as plain text."""

from __future__ import annotations

from magjit.reporting.content import TIMING_NAMES, Content
from magjit.reporting.movement import plain as table
from magjit.reporting.movement import summary

_SHOWN = 40


def plain(content: Content) -> str:
    """The report as text: what it found first, then the lists, long ones cut."""
    lines = [f"{content.name} with backend {content.backend}: {content.verdict}"]
    lines += [f"  note: {note}" for note in content.notes]
    for name, found in (("cut", content.cuts), ("split", content.splits)):
        for split in found:
            lines.append(f"  {name}: {split}")
            if split.remedy:
                lines += [f"    {line}" for line in f"way out: {split.remedy}".splitlines()]
    lines += _section("operators", content.inputs + content.operators)
    lines.append(f"guards: {content.guards.total()}")
    lines += [f"  {kind}: {count}" for kind, count in content.guards.most_common()]
    lines += _section("side effects", content.side_effects)
    for movement in content.movement:
        lines += _section(f"data that moves, {summary(movement)}", table(movement))
    lines.append("time:")
    for key, milliseconds in content.shown_timings.items():
        lines.append(f"  {TIMING_NAMES[key]}: {milliseconds:.1f} ms")
    return "\n".join(lines)


def _section(title: str, items: list[str]) -> list[str]:
    lines = [f"{title}:" if items else f"{title}: none"]
    lines += [f"  {item}" for item in items[:_SHOWN]]
    if len(items) > _SHOWN:
        lines.append(f"  ... and {len(items) - _SHOWN} more")
    return lines
