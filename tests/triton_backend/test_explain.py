"""What `magjit.explain` says of the triton backend: places and bytes, operator by operator."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy
import pytest
import torch

from magjit.reporting.explaining import explain
from tests.triton_codegen.test_placement import fused
from vt_blocks import BLOCKS


def test_operators_that_ran_for_nothing_move_nothing() -> None:
    block = BLOCKS["QKV prefill"].build(2, "cpu")
    with torch.no_grad():
        report = explain(block.module, backend="triton")(*block.arguments)
    (movement,) = report.movement
    rows = {one.name: one for one in movement.moved}
    assert rows["clone"].before > 0 and rows["clone"].after == 0
    assert rows["mm"].before == rows["mm"].after > 0
    assert movement.after < movement.before
    virtual = {one.name for one in movement.places if one.virtual}
    assert {one.tensor for one in movement.edges} == virtual
    assert "Data that moves" in report.to_html()


def test_a_graph_without_movement_moves_as_much() -> None:
    with torch.no_grad():
        report = explain(lambda x, w: x @ w, backend="triton")(torch.rand(3, 4), torch.rand(4, 5))
    (movement,) = report.movement
    assert movement.before == movement.after == 4 * (12 + 20 + 15)
    assert movement.edges == ()


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@needs_triton
def test_kernels_are_charged_once() -> None:
    from magjit_triton.codegen.accounts import moved_by, virtual_in

    def function(x, a, b, w):
        return [torch.cat([x @ a, x @ b], 1) @ w, x.exp().t() + 1]

    fusion = fused(function, (9, 8), (8, 6), (8, 4), (10, 3))
    plan = fusion.units_in_order
    moved = {name: size for name, (_, size) in moved_by(fusion, plan).items()}
    assert sorted(moved.values()) == sorted(
        [4 * (72 + 48 + 54), 4 * (72 + 32 + 36), 4 * (90 + 30 + 27), 4 * (72 + 72)]
    )
    edges = {
        (one.name, target.name)
        for one, found in virtual_in(fusion, plan).items()
        for target, _ in found
    }
    assert ("mm", "cat") in edges and ("mm_1", "cat") in edges


PROGRAM = """
import json, torch, magjit
from magjit.reporting.explaining import explain

def function(x, y, w):
    return torch.cat([x.exp(), y.transpose(0, 1)], 1) @ w

with torch.no_grad():
    report = explain(function, backend="triton")(
        torch.rand(8, 6), torch.rand(4, 8), torch.rand(10, 3)
    )
print(json.dumps(report.to_json()["movement"]))
"""


@needs_triton
@pytest.mark.skipif(
    tuple(int(part) for part in numpy.__version__.split(".")[:2]) >= (2, 4),
    reason="Triton 3.6's interpreter needs NumPy < 2.4",
)
def test_generated_kernels_are_reported(tmp_path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MAGJIT_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (movement,) = json.loads(done.stdout.splitlines()[-1])
    rows = {one["name"]: one for one in movement["operators"]}
    assert rows["exp"]["after"] == 0
    assert rows["cat"]["after"] == 4 * (48 + 32 + 80)
    # Its operator's name in ATen is another one.
    assert {"tensor": "permute", "target": "arg1_1", "operator": "permute"} in movement["points_to"]
