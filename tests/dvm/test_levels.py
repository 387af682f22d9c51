"""The kernels of each level of x86-64, where this processor has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from magjit_dvm import vm

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {"2": "x86-64", "3": "x86-64-v3", "4": "x86-64-v4"}


def _run(level: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MAGJIT_DVM_LEVEL": level}
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level, name in LEVELS.items() if name != vm.level()])
def test_instructions_of_another_level(level: str) -> None:
    named = _run(level, "-c", "from magjit_dvm import vm; print(vm.level())").stdout.strip()
    if named == vm.level():
        pytest.skip(f"this processor has no {LEVELS[level]}")
    names = ("test_instructions.py", "test_handlers.py", "test_moments.py", "test_rows.py")
    files = [str(ROOT / "tests" / "dvm" / name) for name in names]
    done = _run(level, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-4000:]
