"""The documents: tables fresh, code running, commands existing, printed output as printed."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import linecache
import re
import shlex
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import magjit
import readme_tables
import result_tables
import table_text
from magjit.cli.parser import build_parser
from magjit.plugin.virtual_tensors.rules import rules as virtual_tensor_rules

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# Claims that figures should make, and words that say nothing.
FORBIDDEN = re.compile(
    r"\b(?:seamless|effortless|blazing|cutting[- ]edge|state[- ]of[- ]the[- ]art|powerful|leverag|"
    r"robust|delve|revolution|game[- ]chang|unlock|simply|just works|comprehensive|out of the box|"
    r"supercharge|world[- ]class|next[- ]gen|effortlessly|magical|awesome|amazing|incredibl|"
    r"unparalleled|best[- ]in[- ]class|lightning[- ]fast)",
    re.IGNORECASE,
)
# What belongs to the place where the project is written, not to the project.
FOREIGN = re.compile(r"\b(?:workplace|helper session|sub-?agent|issue \d+|DESIGN\.md|STYLE\.md)\b")


@dataclass(frozen=True)
class Code:
    """A block of Python, its line in the concatenated file, and what it must print."""

    source: str
    line: int
    expected: str | None


def document_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_blocks(text: str) -> Iterator[Code]:
    """Python blocks; a text block that follows one is its output."""
    blocks = [(m["kind"], m["text"]) for m in BLOCK.finditer(text)]
    line = 0
    for number, (kind, source) in enumerate(blocks):
        if kind != "python":
            continue
        following = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
        expected = following[1] if following[0] == "text" else None
        yield Code(source, line, expected)
        line += source.count("\n")


@pytest.fixture
def example_module(monkeypatch) -> Iterator[types.ModuleType]:
    """A document's code runs as a script would: reports leave the name of its module out."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    yield module
    magjit.reset()


@pytest.fixture
def defaults_kept() -> Iterator[None]:
    """Settings, annotations and rules that a document changes are put back."""
    database = magjit.annotations.default_database()
    rules, opaque = database.rules, database.opaque_modules
    settings = magjit.config.current()
    with mock.patch.dict(virtual_tensor_rules):
        yield
    magjit.config.update(record_limit=settings.record_limit, verify=settings.verify)
    database._rules, database._opaque = rules, opaque
    database._reset()


@pytest.mark.parametrize("path", DOCUMENTS, ids=document_id)
def test_code_runs_and_prints_what_is_shown(
    path: Path, tmp_path, monkeypatch, example_module, defaults_kept
) -> None:
    blocks = list(code_blocks(path.read_text(encoding="utf-8")))
    if not blocks:
        pytest.skip("no Python in this document")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "example.py"
    source = "".join(block.source for block in blocks)
    file.write_text(source, encoding="utf-8")
    linecache.checkcache(str(file))
    checker = doctest.OutputChecker()
    for block in blocks:
        code = compile("\n" * block.line + block.source, str(file), "exec", dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore", magjit.MagJITWarning)
            exec(code, example_module.__dict__)
        if block.expected is not None:
            got = printed.getvalue()
            assert checker.check_output(block.expected, got, OPTIONS), f"{block.source}\n{got}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=document_id)
def test_words(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = [m[0] for m in FORBIDDEN.finditer(text)] + [m[0] for m in FOREIGN.finditer(text)]
    assert not found


def make_targets() -> set[str]:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    return {m[1] for line in lines if (m := re.match(r"([a-z][\w-]*):", line))}


def shown_commands() -> list[tuple[str, str]]:
    """Commands in inline code and in console blocks, with the document's name."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        lines = [
            line.removeprefix("$ ").partition("  #")[0].strip()
            for block in BLOCK.finditer(text)
            if block["kind"] == "console"
            for line in block["text"].splitlines()
            if line.startswith("$ ")
        ]
        prose = BLOCK.sub("", text)
        lines += re.findall(r"`((?:make|magjit|python -m magjit) [a-z][^`]*)`", prose)
        lines += re.findall(r"`(python benchmarks/[^`]*)`", prose)
        found += [(document_id(path), line) for line in lines]
    return found


def subcommands() -> set[str]:
    (action,) = (a for a in build_parser()._actions if hasattr(a, "choices") and a.choices)
    return set(action.choices)


@pytest.mark.parametrize(("where", "command"), shown_commands())
def test_commands_exist(where: str, command: str) -> None:
    words = shlex.split(command.replace("...", ""))
    if words[0] == "make":
        named = [word for word in words[1:] if "=" not in word]
        assert set(named) <= make_targets()
    elif words[:3] == ["python", "-m", "magjit"]:
        assert len(words) == 3 or words[3] in subcommands()
    elif words[0] == "magjit":
        assert words[1] in subcommands()
    elif words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file()


@pytest.mark.parametrize("path", DOCUMENTS, ids=document_id)
def test_files_named_exist(path: Path) -> None:
    prose = BLOCK.sub("", path.read_text(encoding="utf-8"))
    folders = r"(?:benchmarks|docs|examples|tests|annotations|magjit|backends)"
    named = re.findall(rf"`({folders}/[\w./-]*)`", prose)
    results = "benchmarks/results/"  # may not be measured yet
    missing = [n for n in named if not n.startswith(results) and not (ROOT / n).exists()]
    assert not missing


# -- tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", readme_tables.DOCUMENTS, ids=document_id)
def test_tables_are_fresh(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert readme_tables.rendered(text) == text, "run python benchmarks/readme_tables.py"


def test_every_table_is_shown_and_every_marker_has_a_table() -> None:
    shown = [
        name
        for path in readme_tables.DOCUMENTS
        for name in re.findall(r"<!-- table: (\w+) -->", path.read_text(encoding="utf-8"))
    ]
    assert set(shown) == set(result_tables.TABLES)


DOCUMENT = "before\n<!-- table: front_end -->\nold\n<!-- end -->\nafter\n"


def test_a_table_without_figures_says_so(tmp_path) -> None:
    text = readme_tables.rendered(DOCUMENT, tmp_path)
    assert "Not measured yet" in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("after\n")
    assert readme_tables.rendered(text, tmp_path) == text


def test_a_table_without_rows_says_so(tmp_path) -> None:
    (tmp_path / "demo.json").write_text(results([row("A", "operators", 3)]))
    assert "Not measured yet" in readme_tables.table("inductor", tmp_path)
    assert "| A |" in readme_tables.table("models", tmp_path)


def results(rows: list[dict]) -> str:
    machine = {"cpu": "A CPU", "cores": 2, "threads": 1, "load_of_others": 0.5}
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    return json.dumps({"machine": machine, "versions": versions, "rows": rows})


def row(case: str, metric: str, magjit: float | None, note: str = "", **peers: float) -> dict:
    peers = {name.replace("_", "."): value for name, value in peers.items()}
    made = {"case": case, "metric": metric, "unit": "", "magjit": magjit, "peers": peers}
    return made | {"note": note} if note else made


def test_a_table_has_what_the_file_has(tmp_path) -> None:
    rows = [
        row("BERT", "overhead_us", 8.25, torch_compile=66.0),
        row("BERT", "first_call_s", 0.4, torch_compile=2.0),
        row("BERT", "call_us", 1234.5, torch_compile=2000.0, eager=2345.6),
        row("BERT", "capture_peak", None, note="a note"),
    ]
    (tmp_path / "front_end.json").write_text(results(rows))
    text = readme_tables.rendered(DOCUMENT, tmp_path)
    assert "| BERT | overhead, stub graph, µs | 8.25 | 66 | 0.12 | – |" in text
    assert "| BERT | first call, s | 0.4 | 2 | 0.20 | – |" in text
    assert "| BERT | a call, µs | 1,234 | 2,000 | 0.62 | 2,346 |" in text
    assert "| BERT | peak memory of a capture, × eager | – | – | – | – |" in text
    assert "A CPU, 2 cores; 1 CPU thread; CPython 3.11.7; torch 2.13.0; other programs" in text
    assert "BERT, capture_peak: a note." in text
    assert readme_tables.rendered(text, tmp_path) == text


def test_the_table_of_models(tmp_path) -> None:
    single = {"operators": 10, "guards": 200, "run_ms": 1.2, "record_ms": 3.0, "build_ms": 4.4}
    rows = [row("A", metric, value) for metric, value in single.items()]
    rows += [row("A", "graphs", 1, torch_compile=2), row("A", "overhead_us", 5.0)]
    rows += [row("A", "call_us", 90.0, eager=100.0, torch_compile=110.0)]
    rows += [row("A, inductor", "call_us", 50.0, eager=100.0, torch_compile=60.0)]
    (tmp_path / "demo.json").write_text(results(rows))
    table = readme_tables.table("models", tmp_path)
    assert "| A | 1 | 2 | 10 | 200 | 1 + 3 + 4 + – | 5 | – | 100 | 90 | 110 |" in table
    assert "| A, inductor | a call, µs | 50 | 60 | 0.83 | 100 |" in readme_tables.table(
        "inductor", tmp_path
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (3, "3"),
        (0.0, "0"),
        (0.01234, "0.0123"),
        (1.5, "1.5"),
        (99.96, "100"),
        (12345.6, "12,346"),
    ],
)
def test_numbers_are_never_exponents(value: float | None, text: str) -> None:
    assert table_text.number(value) == text


def test_check_says_which_document_is_stale(tmp_path, monkeypatch, capsys) -> None:
    document = tmp_path / "README.md"
    document.write_text(DOCUMENT)
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    monkeypatch.setattr(readme_tables, "DOCUMENTS", (document,))
    assert readme_tables.main(["--check"]) == 1
    assert "README.md is stale" in capsys.readouterr().err
    assert document.read_text() == DOCUMENT
    assert readme_tables.main([]) == 0
    assert readme_tables.main(["--check"]) == 0


def test_a_table_of_a_part_has_its_rows_and_notes_alone(tmp_path) -> None:
    times = {"eager": 3.0, "inductor-static": 1.0, "clone": 0.5}
    chain = row("chains: a, b, 1 MB, 1 thread", "run_ms", 2.0, "a chain's note")
    chain["peers"] = times
    rows = [chain, row("models: M", "in_vm", 0.5, "a model's note"), row("sets: S", "speed", 1.0)]
    (tmp_path / "dvm.json").write_text(results(rows))
    chains, models = (readme_tables.table(f"dvm_{name}", tmp_path) for name in ("chains", "models"))
    assert "| a, b, 1 thread | 1.5 / 0.5 / 0.25 |" in chains
    assert "a chain's note" in chains and "model" not in chains
    assert "| M | – |" in models and "chain" not in models
    assert "| S | – | – | – | – | – | – |" in readme_tables.table("dvm_sets", tmp_path)
    assert "Not measured yet" in readme_tables.table("dvm_varied", tmp_path)
