"""Calls of a process that has an empty cache: nobody waits for a compiler but what is captured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

PROGRAM = """
import sys
import torch
import torch.nn.functional as F
import magjit
import magjit_dvm.schedule as scheduling
from magjit_dvm.by_aten import by_aten
from magjit_dvm.cuda.launch import gpu

mode = sys.argv[1] if len(sys.argv) > 1 else None
left = []

def told(gm, group):
    run = by_aten(gm, group)
    def tell(*arguments):
        left.append(group)
        return run(*arguments)
    return tell

scheduling.by_aten = told

def normed(x, w):
    y = F.layer_norm(torch.relu(x * 2 + 1), x.shape[-1:], w, w)
    return y, F.mse_loss(y, x)

torch.manual_seed(0)
x, w = torch.randn(4096, 1024, device="cuda"), torch.rand(1024, device="cuda")
compiled = magjit.compile(normed, backend="dvm", mode=mode)

def check(call):
    for got, wanted in zip(call(x, w), normed(x, w), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

for _ in range(2):  # the second one's code is compiled
    check(compiled)
at_first = len(left)
if mode is None:
    kernels = gpu(0).function.__self__
    while left:
        for one in list(kernels._coming.values()):
            one.result()
        left.clear()
        check(compiled)
left.clear()
for _ in range(3):  # with graphs, the first of these is captured
    check(compiled)
print("left", at_first, len(left))
"""


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_calls_with_an_empty_cache(mode: str | None, tmp_path: Path) -> None:
    told = {**os.environ, "MAGJIT_CACHE_DIR": str(tmp_path), "MAGJIT_DVM_WAIT": "0"}
    given = [] if mode is None else [mode]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *given],
        env={**told, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    at_first, at_last = map(int, ran.stdout.split()[-2:])
    assert at_first > 0 and at_last == 0
    assert list(tmp_path.rglob("dvm_cubin/*/*")), "the next process has them"
