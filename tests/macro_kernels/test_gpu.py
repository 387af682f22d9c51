"""On a GPU: machine code that was built without one runs, is measured, and is chosen."""

from __future__ import annotations

import importlib.util
import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import magjit
from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro import sources
from magjit_triton.macro.building import built
from magjit_triton.macro.campaign import Plan, tuned
from magjit_triton.macro.device import Device
from magjit_triton.macro.families import DTYPES, FAMILIES, named
from magjit_triton.macro.loading import checked
from magjit_triton.macro.measuring import Bench, EventTimer
from magjit_triton.macro.repository import Repository

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]

CUTS = (
    Configuration(64, 64, 64, stages=3),
    Configuration(16, 128, 64, stages=4, split_k=4),
    Configuration(128, 128, 64, warps=8, programs=132),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_computes_what_eager_mode_does(name: str, dtype: torch.dtype) -> None:
    family = named(name, dtype)
    batch = 3 if name.startswith("batched") else 1
    bench = Bench(family, EventTimer(), (batch, 512, 512, 1024))
    found = built(family, bench.device, CUTS).stored
    assert len(found) == (len(CUTS) if family.work.products == 1 else len(found)) > 0
    for one in found:
        for m, n, k in ((1, 64, 128), (37, 528, 1024), (300, 512, 512)):
            assert bench.error(one, (batch, m, n, k)) < 2e-2, (str(one.configuration), m, n, k)
        assert 0 < bench.seconds(one, (batch, 300, 512, 512)) < 1e-2


_ODD = ((1, 64, 128), (37, 528, 1152), (130, 1040, 384), (1023, 272, 640))


@pytest.mark.parametrize("path", sources.shipped_paths(), ids=lambda path: path.stem)
def test_every_shipped_configuration_computes_what_float64_does(path: Path) -> None:
    """As near as eager mode's own result, on few rows, odd ones, and parts of tiles."""
    device = Device.current()
    seen = 0
    with Repository(path, read_only=True) as repository:
        entries = list(repository.entries(device.name))
    for entry in entries:
        name, dtype = entry.name.split()
        family = named(name, DTYPES[dtype])
        assert family.signature == entry.signature
        assert family.template is not None
        shapes = [(3 if name.startswith("batched") else 1, m, n, k) for m, n, k in _ODD]
        bench = Bench(family, EventTimer(), (shapes[0][0], 1023, 1040, 1152))
        for shape in shapes:
            operands = bench.arguments(shape)
            exact = family.template.function(*(one.double() for one in operands))
            scale = float(exact.abs().max())
            eager = family.template.function(*operands).double()
            allowed = 2 * float((eager - exact).abs().max()) + 1e-3 * scale
            for one in checked(entry).stored:
                bench.memory[-1].fill_(math.nan)
                bench.ours(one, shape)()
                found = bench.memory[-1][: exact.numel()].view(exact.shape).double()
                worst = float((found - exact).abs().max())
                assert worst <= allowed, (entry.name, str(one.configuration), shape, worst, allowed)
                seen += 1
    print(f"{path.name}: {seen} results of {len(entries)} families")
    assert seen or not entries


def test_tuned_kernels_are_chosen_in_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.sqlite"
    monkeypatch.setattr(sources, "default_path", lambda: path)
    plan = Plan(layers=((1024, 1024),), rows=(1, 64, 512, 2048))
    with Repository(path) as repository:
        for name in ("linear_gelu", "linear_residual"):
            family = named(name, torch.float16)
            entry, _ = tuned(family, plan, built(family, Device.current(), CUTS))
            assert entry.measured
            repository.put(entry)
    first = torch.nn.Linear(1024, 1024).half().cuda()
    second = torch.nn.Linear(1024, 1024, bias=False).half().cuda()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + second(F.gelu(first(x)))

    compiled = magjit.compile(function, backend="triton", dynamic=True, options={"matmul": "macro"})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for m in (2, 3, 64, 100, 1000, 4000):
            x = torch.randn(m, 1024, dtype=torch.float16, device="cuda")
            torch.testing.assert_close(compiled(x), function(x), rtol=2e-2, atol=2e-2)
