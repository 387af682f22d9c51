"""Programs whose products are chosen at run time, in Triton's interpreter, in another process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy
import pytest

WORKER = Path(__file__).parent / "program_worker.py"

pytestmark = [
    pytest.mark.xdist_group("macro_programs"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
    pytest.mark.skipif(
        tuple(int(part) for part in numpy.__version__.split(".")[:2]) >= (2, 4),
        reason="Triton 3.6's interpreter needs NumPy < 2.4",
    ),
]


@cache
def results() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, str(WORKER)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "residual",
        "gated",
        "librarys_ways",
        "strided",
        "others_stay",
        "unaligned",
        "compiled_program",
        "images",
    ],
)
def test_programs(name: str) -> None:
    failure = results()[name]
    assert not failure, failure
