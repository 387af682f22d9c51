"""Models over changing shapes: two captures, and what eager gives at every size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import magjit
from agreement import differences
from examples.models import build
from examples.models.bert import Bert, BertConfig
from magjit import dispatch

from .zoo import TRANSFORMERS, Model, tokens

SIZES = {"tokens": (12, 17, 9, 30, 5, 17), "images": (3, 5, 2, 7, 16, 5)}


def bert() -> tuple[torch.nn.Module, str]:
    config = BertConfig(100, hidden=32, layers=2, heads=4, intermediate=64, positions=32)
    return Bert(config), "tokens"


def example(name: str, kind: str) -> Any:
    return lambda: (build(name)[0], kind)


CASES: dict[str, Any] = {
    "BERT": bert,
    "DeBERTa": example("DeBERTa", "tokens"),
    "ResNet-101": example("ResNet-101", "images"),
    "DenseNet-121": example("DenseNet-121", "images"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.slow if one == "DenseNet-121" else []) for one in CASES],
)
def test_two_captures_serve_all_sizes(name: str) -> None:
    torch.manual_seed(0)
    model, kind = CASES[name]()
    model.eval()
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for size in SIZES[kind]:
            if kind == "tokens":
                argument = torch.randint(0, 100, (1, size))
            else:
                argument = torch.randn(size, 3, 64, 64)
            expected, actual = model(argument), compiled(argument)
            assert not list(differences(expected, actual))
    assert magjit.stats(compiled).captures == 2


LENGTHS = (8, 11, 5, 17, 8, 3)
MORE = {
    "Mamba": 5,  # loops over the tokens
    "DeBERTa": 5,  # slices by a tensor that a scripted function makes of the size
    "ALIGN": 4,  # decides by a mask of ones that it makes, which is no constant at any size
}
"""Models that need a capture for each length."""


@pytest.mark.parametrize("case", TRANSFORMERS, ids=lambda case: case.name)
def test_transformers_over_lengths(case: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    # A call whose capture with symbols fails is recorded by a rehearsal: with no other thread.
    monkeypatch.setattr(dispatch, "may_rehearse", lambda: True)
    model = case.make()
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for length in LENGTHS:
            given = case.inputs()[1]
            texts = {name: tokens(2, length) for name in given if name.endswith("_ids")}
            expected, actual = model(**given | texts), compiled(**given | texts)
            assert not list(differences(expected, actual, tolerance=(1e-4, 1e-5)))
    captures = magjit.stats(compiled).captures
    assert captures == MORE.get(case.name, 2 if texts else 1)
