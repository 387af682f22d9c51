"""Whole calls of the GPU's fused operators where there is no GPU: see ``with_driver.py``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
PROGRAMS = [
    ("with_driver", 20),
    ("calls_in_pairs", 2),
    ("calls_of_stacks", 13),
    ("calls_in_steps", 9),
    ("calls_of_graphs", 7),
]
"""Of each, how many tests it has."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("program", "tests"), PROGRAMS)
def test_calls(tmp_path: Path, program: str, tests: int) -> None:
    driver = tmp_path / "libcuda.so.1"
    build = ["cc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(driver)]
    subprocess.run([*build, str(HERE / "driver.c")], check=True)
    path = os.pathsep.join([str(HERE.parent.parent), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.dvm_cuda.{program}", str(driver)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("test_") == tests
