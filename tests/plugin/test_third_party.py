"""A backend in a wheel of its own: installed, found by its entry point, and conformant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from magjit.plugin import conformance

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the example's wheel is installed into."""
    work = tmp_path_factory.mktemp("third_party")
    # Built from a copy: setuptools leaves folders beside what it builds.
    source = shutil.copytree(EXAMPLE, work / "source")
    target = work / "site"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
            *("--no-build-isolation", "--target", str(target), str(source)),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target


def run_python(installed: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(installed), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=installed,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.install
def test_found_by_name_and_conformant(installed: Path) -> None:
    out = run_python(
        installed,
        "-c",
        "from magjit.plugin import conformance, list_backends, resolve\n"
        "assert 'tape' in list_backends()\n"
        "assert resolve('tape', options={'keep': True}).keep\n"
        "report = conformance.run('tape')\n"
        "print(report)\n"
        "report.raise_for_failures()\n",
    )
    assert "0 FAILED" in out and "0 refused" in out


@pytest.mark.slow
@pytest.mark.install
def test_its_own_test_file_is_one_line(installed: Path) -> None:
    tests = EXAMPLE / "tests" / "test_tape.py"
    out = run_python(
        installed,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(installed)),
        *("-k", "pointwise or batch", str(tests)),
    )
    # The others are checked above.
    assert f"2 passed, {len(conformance.CASES) - 2} deselected" in out


@pytest.mark.install
def test_torch_compile_takes_it(installed: Path) -> None:
    out = run_python(
        installed,
        "-c",
        "import torch\n"
        "linear = torch.nn.Linear(4, 3)\n"
        "x = torch.randn(2, 4)\n"
        "compiled = torch.compile(linear, backend='magjit_tape')\n"
        "torch.testing.assert_close(compiled(x), linear(x))\n"
        "compiled(x).sum().backward()\n"
        "from magjit.plugin import resolve\n"
        "print(type(resolve('magjit_tape')).__name__)\n",
    )
    assert out.strip() == "TapeBackend"
