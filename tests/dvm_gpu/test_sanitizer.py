"""The kernel under compute-sanitizer: nothing out of bounds, no races, barriers that all reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_nothing_is_reported(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=mj_dvm"]
    command += [sys.executable, "-m", "tests.dvm_gpu.under_sanitizer", tool]
    path = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    exact = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "MAGJIT_DVM_CHECKED": "1"}
    environment = os.environ | exact | {"PYTHONPATH": path, "PYTHONSAFEPATH": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=500, check=False
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not work on this machine")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "done" in done.stdout and "SUMMARY: 0" in done.stdout
