"""The tables of README.md and docs/benchmarks.md, written anew from benchmarks/results.

    python benchmarks/readme_tables.py           write them
    python benchmarks/readme_tables.py --check   exit with 1 when one is stale

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of
`result_tables.TABLES`. A file that is not there makes a line that says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from result_tables import TABLES, WITH_NOTES
from table_text import Results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")

_SECTION = re.compile(
    r"(?P<start><!-- table: (?P<name>\w+) -->\n)(?P<body>.*?)(?P<end><!-- end -->)", re.DOTALL
)


def table(name: str, folder: Path) -> str:
    """A table with its caption, or a line that says that the figures are missing.

    Raises:
        KeyError: no table has this name.
    """
    source, command, draw = TABLES[name]
    file, _, part = source.partition("#")
    missing = f"Not measured yet: `{command} --json benchmarks/results/{file}` measures it."
    if not (folder / file).is_file():
        return missing
    results = Results.read(folder / file)
    results = results.part(part) if part else results
    drawn = draw(results)
    if not drawn:
        return missing
    shown = {} if name in WITH_NOTES else results.notes
    notes = [f"{case}, {metric}: {note}." for (case, metric), note in shown.items()]
    return "\n\n".join([drawn, " ".join([results.caption(), *notes])])


def rendered(text: str, folder: Path = RESULTS) -> str:
    """A document with its tables as the JSON files have them."""

    def replace(section: re.Match[str]) -> str:
        body = table(section["name"], folder)
        return f"{section['start']}\n{body}\n\n{section['end']}"

    return _SECTION.sub(replace, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the documents, or says which of them are stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if stale")
    options = parser.parse_args(arguments)
    stale = False
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        fresh = rendered(text)
        if fresh == text:
            continue
        stale = True
        name = path.relative_to(ROOT)
        if options.check:
            sys.stderr.write(f"{name} is stale: run python benchmarks/readme_tables.py\n")
        else:
            path.write_text(fresh, encoding="utf-8")
            sys.stderr.write(f"{name} written\n")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
