"""Files of a corpus are found, sampled and imported, with stand-ins for what is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paritybench_runner import corpus, stubs


def test_a_corpus_is_a_folder_or_a_clone(tmp_path: Path) -> None:
    with pytest.raises(corpus.CorpusError, match="no files"):
        corpus.list_files(tmp_path)
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "test_a.py").write_text("")
    assert [path.name for path in corpus.list_files(tmp_path)] == ["test_a.py"]


def test_a_sample_is_seeded_and_parts_cover_it() -> None:
    whole = corpus.list_files("minicorpus")
    sample = corpus.list_files("minicorpus", sample=5, seed=3)
    assert sample == corpus.list_files("minicorpus", sample=5, seed=3)
    assert sample == sorted(sample) and set(sample) < set(whole)
    parts = [corpus.list_files("minicorpus", sample=5, seed=3, part=(i, 2)) for i in (1, 2)]
    assert sorted(parts[0] + parts[1]) == sample
    with pytest.raises(corpus.CorpusError):
        corpus.list_files("minicorpus", part=(3, 2))


def test_stubs_construct_but_do_not_compute() -> None:
    layer = stubs.stub("library.layers.Layer")
    with stubs.constructing():
        made = layer(3, name="x")
        assert layer.inner(lambda: 1)() == 1
    with pytest.raises(stubs.StubUsed, match=r"library\.layers\.Layer is not installed"):
        made(1)
    with pytest.raises(stubs.StubUsed):
        layer.function(1)


def test_classes_may_derive_from_stubs() -> None:
    class Own(stubs.stub("library.Base")):
        def __init__(self, x: int) -> None:
            self.x = x

    assert Own(3).x == 3
    with pytest.raises(AttributeError):
        Own(3).y


PROGRAM = """
import importlib.util, pathlib, sys
from paritybench_runner import corpus, shims
folder = corpus.MINICORPUS
shims.install(folder)
cases = corpus.load(folder / "test_acme_not_installed.py")
print(len(cases), "acme_vision_tools" in sys.modules)
print(len(corpus.load(folder / "test_acme_old_names.py")))
try:
    corpus.load(folder / "test_acme_unimportable.py")
except corpus.LoadError as error:
    print(error)
try:
    import acme_other_tools
except ImportError:
    print("libraries keep their import errors")
"""


def test_the_environment_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "2 True",
        "1",
        "RuntimeError: this program wants to be started otherwise",
        "libraries keep their import errors",
    ], done.stderr
