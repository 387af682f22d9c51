"""Wrong arguments: a typed error that says what to do instead, before anything has changed."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import magjit
import magjit_inductor
from magjit.errors import (
    AnnotationError,
    ArgumentError,
    BackendOptionError,
    MagJITError,
    UnknownBackendError,
)

INDUCTOR = magjit_inductor.backend
ROOT = Path(__file__).resolve().parents[2]


def program(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@dataclass(frozen=True)
class Wrong:
    """One wrong call of `magjit.compile`."""

    name: str
    error: type[MagJITError]
    match: str
    model: Any = program
    given: dict[str, Any] = field(default_factory=dict)


class Unprepared:
    name = "unprepared"


WRONG = [
    Wrong("model is a number", ArgumentError, "not int", model=3),
    Wrong("model is a string", ArgumentError, "not str", model="model"),
    Wrong("model is a tensor", ArgumentError, "not Tensor", model=torch.ones(2)),
    Wrong("model is a class", ArgumentError, "not the class Linear", model=nn.Linear),
    Wrong("model is a list", ArgumentError, "not list", model=[nn.Linear(1, 1)]),
    Wrong("backend is misspelled", UnknownBackendError, "inductor", given={"backend": "inducter"}),
    Wrong("backend is unknown", UnknownBackendError, "known", given={"backend": "zzzzzzzz"}),
    Wrong("backend is empty", UnknownBackendError, "''", given={"backend": ""}),
    Wrong("backend is a number", ArgumentError, "got int", given={"backend": 3}),
    Wrong("backend is None", ArgumentError, "got NoneType", given={"backend": None}),
    Wrong(
        "backend is no backend", ArgumentError, "got Unprepared", given={"backend": Unprepared()}
    ),
    Wrong("fullgraph is a string", ArgumentError, "fullgraph", given={"fullgraph": "yes"}),
    Wrong("fullgraph is a number", ArgumentError, "fullgraph", given={"fullgraph": 1}),
    Wrong("fullgraph is None", ArgumentError, "fullgraph", given={"fullgraph": None}),
    Wrong("dynamic is a string", ArgumentError, "dynamic", given={"dynamic": "auto"}),
    Wrong("dynamic is a number", ArgumentError, "dynamic", given={"dynamic": 0}),
    Wrong("disable is a number", ArgumentError, "disable", given={"disable": 1}),
    Wrong("mode is a number", BackendOptionError, "mode", given={"mode": 3}),
    Wrong(
        "mode is unknown",
        BackendOptionError,
        "max-autotune",
        given={"backend": INDUCTOR, "mode": "max-autotuned"},
    ),
    Wrong(
        "mode for a backend without modes",
        BackendOptionError,
        "eager",
        given={"backend": "eager", "mode": "reduce-overhead"},
    ),
    Wrong("options is a list", BackendOptionError, "options", given={"options": ["a"]}),
    Wrong(
        "an unknown option",
        BackendOptionError,
        "max_autotun",
        given={"backend": INDUCTOR, "options": {"max_autotun": 1}},
    ),
    Wrong(
        "an option of the wrong type",
        BackendOptionError,
        "max_autotune",
        given={"backend": INDUCTOR, "options": {"max_autotune": "yes"}},
    ),
    Wrong("mode and options", MagJITError, "", given={"mode": "default", "options": [3]}),
]


@pytest.fixture(scope="module")
def collected() -> None:
    """Counters are those of the compiled objects that are alive; here, none is made and dropped."""
    gc.collect()


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
@pytest.mark.parametrize("form", ["call", "decorator"])
def test_wrong_arguments_of_compile(wrong: Wrong, form: str) -> None:
    before = magjit.stats()
    with pytest.raises(wrong.error, match=wrong.match) as caught:
        if form == "call":
            magjit.compile(wrong.model, **wrong.given)
        else:
            magjit.compile(**wrong.given)(wrong.model)
    assert caught.value.reason
    assert magjit.stats() == before


def test_a_wrong_decorator_fails_where_it_is_written() -> None:
    """Not only when it gets its function: the line of the mistake is then the one that is named."""
    for given in ({"backend": "inducter"}, {"fullgraph": 1}, {"dynamic": 3}, {"mode": 3}):
        with pytest.raises(MagJITError):
            magjit.compile(**given)  # type: ignore[call-overload]


def test_disabled_compiling_checks_its_arguments_all_the_same() -> None:
    assert magjit.compile(program, disable=True) is program
    with pytest.raises(UnknownBackendError):
        magjit.compile(program, backend="inducter", disable=True)


@pytest.mark.parametrize("call", [magjit.stats, magjit.reset], ids=["stats", "reset"])
@pytest.mark.parametrize(
    "wrong",
    [3, program, nn.Linear(1, 1), nn.Linear],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_arguments_that_must_be_compiled(call: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"not compiled|is not"):
        call(wrong)


@pytest.mark.parametrize(
    "changes",
    [
        {"record_limit": 0},
        {"record_limit": "8"},
        {"record_limit": True},
        {"record_limi": 3},
        {"unroll_limit": -1},
        {"verify": "yes"},
        {"cache_dir": 3},
        {"cache_bytes": -1},
        {"disk_cache": 1},
    ],
    ids=str,
)
def test_settings(changes: dict[str, Any]) -> None:
    before = magjit.config.current()
    with pytest.raises(ArgumentError, match=next(iter(changes))):
        magjit.config.update(**changes)
    with pytest.raises(ArgumentError), magjit.config.override(**changes):
        pass
    assert magjit.config.current() == before


# --- annotation files ---------------------------------------------------------------------------

FILES = {
    "not YAML": ("rules: [", "line"),
    "not a mapping": ("- a\n- b\n", "mapping"),
    "an unknown section": ("rulez: {}\n", "rulez"),
    "an unknown field": ("rules:\n  math.sqrt:\n    kynd: pure\n", "kynd"),
    "an unknown kind": ("rules:\n  math.sqrt:\n    kind: clean\n", "clean"),
}


@pytest.mark.parametrize("name", FILES)
def test_invalid_annotation_files(name: str, tmp_path: Path) -> None:
    text, match = FILES[name]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(AnnotationError, match=match) as caught:
        magjit.annotations.load(path)
    assert "mine.yaml" in str(caught.value)


def test_a_missing_annotation_file(tmp_path: Path) -> None:
    with pytest.raises(AnnotationError, match=r"absent\.yaml"):
        magjit.annotations.load(tmp_path / "absent.yaml")


# --- versions of Python and torch ---------------------------------------------------------------

VERSIONS = [
    ("sys.version_info", "(3, 10, 9, 'final', 0)", "3.10"),
    ("sys.version_info", "(3, 14, 0, 'final', 0)", "3.14"),
    ("sys.implementation.name", "'pypy'", "pypy"),
    ("torch.__version__", "'2.4.1'", "2.4.1"),
    ("torch.__version__", "'2.14.0'", "2.14.0"),
]


USES = ["magjit.compile", "from magjit import explain"]


def unsupported(name: str, value: str, shown: str, use: str) -> str:
    """A program of its own that uses magjit where a version is another one."""
    return textwrap.dedent(f"""
        import gc, sys, threading, torch
        import magjit
        from magjit.errors import MagJITError, UnsupportedPythonError
        before = (sys.gettrace(), gc.isenabled(), threading.active_count(), len(sys.path_hooks))
        {name} = {value}
        try:
            {use}
        except UnsupportedPythonError as error:
            assert isinstance(error, (ImportError, MagJITError))
            assert {shown!r} in str(error), error
            assert error.remedy
        else:
            raise SystemExit("nothing was raised")
        assert "magjit._C" not in sys.modules
        after = (sys.gettrace(), gc.isenabled(), threading.active_count(), len(sys.path_hooks))
        assert before == after
        assert magjit.config.current().record_limit
    """)


FORKED = """
import json, os, sys, traceback
import torch  # takes most of a process's time, and is the same for all

assert "magjit" not in sys.modules
given, told = json.load(sys.stdin), {}
for name, source in given.items():
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        text = "ran"
        try:
            exec(source, {"__name__": "__main__"})
        except BaseException:
            text = traceback.format_exc()
        os.write(writing, text.encode()[-60_000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        told[name] = file.read()
    os.waitpid(child, 0)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """How each of the programs has ended, in a process that is forked after the import of torch."""
    given = {
        f"{name} {value} {use}": unsupported(name, value, shown, use)
        for name, value, shown in VERSIONS
        for use in USES
    }
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name, value, shown", VERSIONS)
@pytest.mark.parametrize("use", USES)
def test_unsupported_versions(
    name: str, value: str, shown: str, use: str, told: dict[str, str]
) -> None:
    assert told[f"{name} {value} {use}"] == "ran"
