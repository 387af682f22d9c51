"""Upsampling stays what eager mode runs, with its gradients, and torch's own tracing as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

import magjit
from magjit.plugin.sampling import whole_upsampling
from tests.dvm.scheduled import scheduled

IMAGES, LINES, BODIES = (2, 3, 5, 7), (2, 3, 5), (2, 3, 4, 5, 6)
MODES = [
    (IMAGES, {"mode": "nearest", "scale_factor": 1.7}),
    (IMAGES, {"mode": "nearest", "size": (9, 3)}),
    (IMAGES, {"mode": "nearest-exact", "scale_factor": (2.0, 0.6)}),
    (IMAGES, {"mode": "bilinear", "scale_factor": 2}),
    (IMAGES, {"mode": "bilinear", "size": (9, 11), "align_corners": True}),
    (IMAGES, {"mode": "bilinear", "scale_factor": 1.7, "recompute_scale_factor": True}),
    (IMAGES, {"mode": "bilinear", "scale_factor": 0.6, "antialias": True}),
    (IMAGES, {"mode": "bicubic", "scale_factor": 1.3}),
    (LINES, {"mode": "nearest", "scale_factor": 2}),
    (LINES, {"mode": "linear", "scale_factor": 1.7}),
    (BODIES, {"mode": "nearest", "scale_factor": 2}),
    (BODIES, {"mode": "trilinear", "size": (5, 6, 7)}),
]


@pytest.fixture
def graphs() -> Iterator[list[GraphModule]]:
    with scheduled() as found:
        yield found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("shape", "how"),
    MODES,
    ids=lambda one: one.get("mode", "") if isinstance(one, dict) else str(len(one)),
)
def test_gradients_are_eager_modes(
    shape: tuple[int, ...], how: dict[str, Any], dynamic: bool, graphs: list[GraphModule]
) -> None:
    def function(x: Tensor) -> Tensor:
        return F.interpolate(x * 2, **how) + 1

    compiled = magjit.compile(function, backend="dvm", dynamic=dynamic or None, fullgraph=True)
    for batch in (2, 3, 5) if dynamic else (2, 2):
        for with_gradients in (False, True):
            x = torch.randn(batch, *shape[1:]).requires_grad_(with_gradients)
            found, wanted = compiled(x), function(x)
            assert found.stride() == wanted.stride()
            torch.testing.assert_close(found, wanted)
            if with_gradients:
                dy = torch.randn_like(wanted)
                ours, theirs = (torch.autograd.grad(one, x, dy)[0] for one in (found, wanted))
                torch.testing.assert_close(ours, theirs)
    if not dynamic or (how["mode"].startswith("nearest") and len(shape) == 4):
        names = [str(node.target) for gm in graphs for node in gm.graph.nodes]
        assert any("upsample" in name and "backward" in name for name in names)
        assert not any("index_put" in name for name in names)


def test_tracing_is_left_as_it_was() -> None:
    operators = [torch.ops.aten.upsample_nearest2d.vec, torch.ops.aten.upsample_bilinear2d.default]
    before = [dict(one.py_kernels) for one in operators]
    with pytest.raises(ZeroDivisionError), whole_upsampling():
        assert operators[0].py_kernels != before[0]
        raise ZeroDivisionError
    assert [dict(one.py_kernels) for one in operators] == before
