"""Generated kernels: equal to eager in Triton's interpreter, and compiled for sm_90.

Both run in processes of their own: Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy
import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from cases import CASES  # noqa: E402
from serving import Server  # noqa: E402

RANDOM = [f"random {seed}" for seed in range(4)]
MORE_RANDOM = [f"random {seed}" for seed in range(4, 300)]

pytestmark = [
    pytest.mark.xdist_group("triton_codegen"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]
NUMPY = tuple(int(part) for part in numpy.__version__.split(".")[:2])


SERVER = Server(FOLDER / "worker.py")


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    yield
    SERVER.close()


@cache
def results(mode: str, random_graphs: int = 0) -> dict[str, str]:
    if mode != "sm90":
        return SERVER.ask(mode, random_graphs, [])
    command = [sys.executable, str(FOLDER / "worker.py"), mode]
    environment = {**os.environ, "MAGJIT_RANDOM_GRAPHS": str(random_graphs)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


interpreted = pytest.mark.skipif(
    NUMPY >= (2, 4), reason="Triton 3.6's interpreter needs NumPy < 2.4"
)


@interpreted
@pytest.mark.parametrize("name", [*CASES, *RANDOM])
def test_equal_to_eager(name: str) -> None:
    failure = results("interpret", len(RANDOM))[name]
    assert not failure, failure


@interpreted
def test_programs_that_were_once_wrong() -> None:
    command = [sys.executable, str(FOLDER / "regressions.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 20
    assert not any(found.values()), "\n".join(found.values())


MORE = pytest.param("_more", marks=pytest.mark.slow)


@interpreted
@pytest.mark.parametrize("more", ["", MORE])
def test_results_do_not_depend_on_blocks(more: str) -> None:
    found = results(f"cut{more}")
    assert len(found) > 8
    assert not any(found.values()), "\n".join(found.values())


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("more", ["", MORE])
def test_results_do_not_depend_on_places(more: str) -> None:
    found = results(f"places{more}")
    assert len(found) > len(CASES) // 2
    assert not any(found.values()), "\n".join(found.values())


@interpreted
def test_conformance() -> None:
    failure = results("conformance")["conformance"]
    assert not failure, failure


@interpreted
def test_the_interpreter_reduces_halves_as_it_does_elements() -> None:
    failure = results("conformance")["reductions"]
    assert not failure, failure


@interpreted
@pytest.mark.slow
def test_more_random_graphs_equal_eager() -> None:
    found = results("interpret", len(RANDOM) + len(MORE_RANDOM))
    failures = {name: found[name] for name in MORE_RANDOM if found[name]}
    assert not failures, "\n".join(failures.values())


@pytest.mark.parametrize("name", list(CASES))
def test_compiles_for_sm90(name: str) -> None:
    failure = results("sm90")[name]
    assert not failure, failure


@pytest.mark.slow
def test_random_graphs_compile_for_sm90() -> None:
    found = results("sm90", 60)
    failures = {name: text for name, text in found.items() if text}
    assert not failures, "\n".join(failures.values())
