"""The command line, where there is no GPU: building, files, typed errors."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from magjit_triton.macro import building, cli
from magjit_triton.macro.device import DEVICES
from magjit_triton.macro.matching import families_of_model
from magjit_triton.macro.repository import Repository

has_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    status = cli.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


class Block(torch.nn.Module):
    """A feed-forward block and a gated one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256, bias=False)
        self.gate = torch.nn.Linear(256, 384, bias=False)
        self.up, self.down = torch.nn.Linear(256, 384, bias=False), torch.nn.Linear(384, 256, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.second(F.gelu(self.first(x)))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def block() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Block().half(), (torch.randn(2, 24, 256).half(),)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One configuration is built, not all."""
    whole = building.built
    monkeypatch.setattr(
        building, "built", lambda family, device, cuts, **rest: whole(family, device, cuts[:1])
    )


@has_triton
def test_building_listing_and_moving(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, other = tmp_path / "one.sqlite", tmp_path / "other.sqlite"
    options = ("--no-measure", "--device", "h200", "--count", 12, "--repository", one)
    status, found = run(capsys, "tune", "linear", *options)
    assert status == 0
    assert found[0]["name"] == "linear float16"
    assert found[0]["device"] == DEVICES["h200"].name
    assert (found[0]["measured"], found[0]["library"]) == (False, False)
    assert found[0]["bytes"] > 1000
    assert run(capsys, "list", "--repository", one) == (0, found)
    assert run(capsys, "export", other, "--repository", one) == (0, found)
    with Repository(one) as repository:
        repository.remove(found[0]["signature"], found[0]["device"])
    assert run(capsys, "import", other, "--repository", one) == (0, found)
    assert cli.main(["list", "--repository", str(one)]) == 0
    assert "linear" in capsys.readouterr().out


@has_triton
def test_a_models_families(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_model", type(sys)("a_model"))
    sys.modules["a_model"].block = block  # type: ignore[attr-defined]
    options = ("--no-measure", "--device", "h100", "--count", 12)
    file = ("--repository", tmp_path / "r.sqlite")
    status, found = run(capsys, "tune", "--model", "a_model:block", *options, *file)
    assert status == 0
    names = ["linear_gelu float16", "linear_residual float16", "swiglu float16"]
    assert sorted(one["name"] for one in found) == names


def test_layers_of_a_model() -> None:
    found = {str(family): layers for family, layers in families_of_model(*block())}
    assert found == {
        "linear_gelu float16": [(512, 256)],
        "linear_residual float16": [(256, 512), (256, 384)],
        "swiglu float16": [(384, 256)],
    }


@no_gpu
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("tune", "linear"), "NoDeviceError"),
        (("tune", "linear", "--device", "h200"), "NoDeviceError"),
        (("tune", "linear", "--device", "unheard-of"), "NoDeviceError"),
        (("tune", "--device", "h200"), "MacroKernelError"),
        (("tune", "linear", "--device", "h200", "--fixed"), "MacroKernelError"),
        (("tune", "--model", "no_such_module:f", "--device", "h200"), "MacroKernelError"),
        (("list",), "RepositoryError"),
        (("import", "no such file"), "RepositoryError"),
    ],
)
def test_errors_are_typed_and_name_a_way_out(
    arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, found = run(capsys, *arguments, "--repository", tmp_path / "r.sqlite")
    assert (status, found["error"]) == (1, error)
    assert found["reason"] and found["remedy"]
