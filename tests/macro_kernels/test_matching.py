"""Which family of the table a group is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from magjit import config
from magjit_triton.macro import matching
from magjit_triton.macro.families import FAMILIES, MacroFamily, families_of, named, traced
from magjit_triton.macro.matching import matched


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_family_with_numbers_is_found_in_the_table(name: str) -> None:
    for form in range(1 + len(FAMILIES[name].also)):
        found = matched(named(name, torch.float16, form, n=512, k=256).family)
        assert found is not None
        assert (found.family.name, found.n, found.k) == (name, 512, 256)
    assert matched(named(name, torch.float16, n=512, k=192).family) is None
    assert matched(named(name, torch.float16, n=500, k=256).family) is None


def of_no_family() -> MacroFamily:
    def squared(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [(x @ w) ** 2]

    arguments = [torch.empty(40, 256, dtype=torch.float16), torch.empty(256, 512).half()]
    graph = traced(squared, arguments, (("m", "k"), ("k", "n")), {"n": 512, "k": 256})
    (found,) = families_of(graph, "squared")
    return found


def test_what_is_known_is_not_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms, looked = matching._forms, []

    def counted(name: str, *given: Any) -> Any:
        looked.append(name)
        return forms(name, *given)

    other, own = of_no_family(), named("swiglu", torch.float16, n=512, k=256)
    monkeypatch.setattr(matching, "_forms", counted)
    with config.override(cache_dir=tmp_path, disk_cache=True):
        for names in (["linear", "matmul", "batched", "batched_transposed"], []):
            assert matched(other.family) is None
            assert looked == names
            looked.clear()
        for first in (True, False):
            found = matched(own.family)
            assert found is not None and found.family.name == "swiglu"
            assert ("linear_gelu" in looked) == first and looked[-1] == "swiglu"
            looked.clear()
