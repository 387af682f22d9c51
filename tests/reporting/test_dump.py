"""`explain(..., dump=folder)`: which files there are and what they say."""

from __future__ import annotations

import ast

import pytest
import torch

from magjit.annotations import Database
from magjit.errors import ArgumentError
from magjit.reporting.explaining import explain

from . import programs


class Dumping:
    """A backend that keeps artefacts, one under a name that leads elsewhere."""

    name = "dumping"

    def supports(self, gm):
        return []

    def compile(self, gm, example_inputs, context):
        context.dump("aten_forward.py", "def aten(): ...")
        context.dump("../../escape.txt", "no")
        return gm.forward


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "new" / "folder"


def read(folder) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_whole_program(folder) -> None:
    report = explain(programs.Counting(), backend=Dumping(), dump=folder)(torch.ones(2, 4))
    files = read(folder)
    assert set(files) == {
        "index.txt",
        "source.py",
        "source_library.py",
        "bytecode.txt",
        "refgraph.txt",
        "refgraph.svg",
        "operators.txt",
        "guards.txt",
        "mock.py",
        "graph.py",
        "report.html",
        "backend/aten_forward.py",
        "backend/_.._escape.txt",
    }
    for name in files.keys() - {"index.txt"}:
        assert name in files["index.txt"]
    assert "self.log.append(x)" in files["source.py"]
    assert "class Linear" not in files["source.py"]
    assert "LOAD_GLOBAL" in files["bytecode.txt"]
    assert files["guards.txt"] == report.guard_text + "\n"
    assert files["operators.txt"].splitlines()[-1] == report.operators[-1]
    assert files["backend/aten_forward.py"] == "def aten(): ...\n"
    for name in ("mock.py", "graph.py"):
        ast.parse(files[name])


def test_a_split_program(folder) -> None:
    report = explain(programs.decides, dump=folder)(torch.ones(2))
    files = read(folder)
    assert report.cuts[0].reason in files["cuts.txt"] and "splits.txt" not in files
    assert "def decides" in files["source.py"]


def test_missing_annotations_are_a_valid_file(folder) -> None:
    explain(programs.meets_two_unknown, dump=folder)(torch.ones(2))
    assert Database().load(folder / "missing.yaml") == 2


def test_code_without_source(folder) -> None:
    namespace: dict = {}
    exec("def f(x):\n    return x + 1\n", namespace)
    explain(namespace["f"], dump=folder)(torch.ones(2))
    files = read(folder)
    assert "not available" in files["source.py"]
    assert "BINARY_OP" in files["bytecode.txt"]


def test_a_folder_that_cannot_be_is_an_error_before_the_run(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="Cannot make the folder"):
        explain(programs.raises, dump=tmp_path / "file")
