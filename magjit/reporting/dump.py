"""A report as a folder of readable files."""

from __future__ import annotations

import dis
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from magjit.errors import ArgumentError
from magjit.reporting.content import Content, Function, Split
from magjit.reporting.movement import draw, summary
from magjit.reporting.movement import plain as table
from magjit.reporting.names import short_file


class File(NamedTuple):
    """A file of a dump: its name under the folder, what it is, its text."""

    name: str
    about: str
    text: str


def prepare(folder: str | Path) -> Path:
    """Make the folder of a dump.

    Raises:
        ArgumentError: there cannot be a folder of this name.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"Cannot make the folder {path}: {error.strerror}", remedy="choose another one"
        ) from error
    return path


def write(content: Content, folder: Path, extra: list[File]) -> list[Path]:
    """Write all files and an index of them; returns their paths."""
    found = [*_files(content), *extra]
    width = max(len(file.name) for file in found)
    index = [f"{content.name} with backend {content.backend}: {content.verdict}", ""]
    index += [f"{file.name:<{width}}  {file.about}" for file in found]
    paths = []
    for name, _, text in [File("index.txt", "", "\n".join(index)), *found]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        paths.append(path)
    return paths


def _files(content: Content) -> Iterator[File]:
    own = [function for function in content.functions if function.own]
    yield File("source.py", "the program's functions that the run went through", _sources(own))
    library = [function for function in content.functions if not function.own]
    if library:
        yield File("source_library.py", "functions of torch and Python", _sources(library))
    yield File("bytecode.txt", "their bytecode, as it was run", _bytecode(own))
    yield File("refgraph.txt", "outside objects, what was read of them", content.refgraph_text)
    yield File("operators.txt", "inputs and operators of the graph", _operators(content))
    if content.cuts:
        yield File("cuts.txt", "where it is cut into regions", _splits(content.cuts))
    if content.splits:
        yield File("splits.txt", "why it is not one graph", _splits(content.splits))
    if content.missing:
        yield File("missing.yaml", "annotations to fill in", merged_yaml(content.missing))
    if content.guard_lines:
        yield File("guards.txt", "what must be as it was, by kind", content.guard_text)
    if content.mock_text:
        yield File("mock.py", "makes the result again and redoes side effects", _mock(content))
    for number, gm in enumerate(content.graphs):
        name = "graph.py" if number == 0 else f"graph_{number}.py"
        text = gm.print_readable(print_output=False)
        yield File(name, "the torch.fx graph as the backend got it", text)
    for number, movement in enumerate(content.movement):
        stem = "movement" if number == 0 else f"movement_{number}"
        text = "\n".join([summary(movement), "", *table(movement)])
        yield File(f"{stem}.txt", "bytes that operators move, what is virtual of what", text)
        if picture := draw(movement):
            yield File(f"{stem}.svg", "the points-to graph as a picture", picture)
    for name, text in content.backend_dumps.items():
        yield File(f"backend/{_safe(name)}", "written by the backend", text)


def _safe(name: str) -> str:
    """A backend's file name that stays inside the folder."""
    return re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "unnamed"


def _sources(functions: list[Function]) -> str:
    parts = []
    for function in functions:
        code = function.code
        head = f"# {function.name}, {short_file(code.co_filename)}:{code.co_firstlineno}\n"
        try:
            parts.append(head + inspect.getsource(code))
        except (OSError, TypeError):
            parts.append(head + "# (its source is not available)\n")
    return "\n\n".join(parts) or "# no function of the program was followed\n"


def _bytecode(functions: list[Function]) -> str:
    """Disassembly; nothing is patched where the whole run is one graph."""
    parts = []
    for function in functions:
        out = io.StringIO()
        out.write(f"{function.name}, {short_file(function.code.co_filename)}: not patched\n")
        dis.dis(function.code, file=out)
        parts.append(out.getvalue())
    return "\n\n".join(parts) or "no function of the program was followed\n"


def _operators(content: Content) -> str:
    return "\n".join(content.inputs + content.operators) or "no operators"


def _splits(splits: list[Split]) -> str:
    parts = []
    for split in splits:
        parts.append(str(split) + (f"\nway out: {split.remedy}" if split.remedy else ""))
    return "\n\n".join(parts)


def _mock(content: Content) -> str:
    plan = "\n".join(f"# {line}" for line in content.mock_text.splitlines())
    return f"{plan}\n\n{content.mock_source}"


def merged_yaml(entries: dict[str, str]) -> str:
    """Annotation entries, each a document of its own, as one; in order of their names."""
    bodies = [entries[name].removeprefix("rules:\n").rstrip("\n") for name in sorted(entries)]
    return "\n".join(["rules:", *bodies]) + "\n"
