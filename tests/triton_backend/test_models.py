"""Whole models under the triton backend: results, gradients and buffers of eager mode.

Small and random, inference and training; other data, and then another batch size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magjit
from examples.models.densenet import DenseNet
from examples.models.resnet import ResNet
from magjit_triton import backend
from tests.triton_backend.running import watched

VOCABULARY = 61
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": None,
}
VISION = {key: TEXT[key] for key in TEXT if key not in ("vocab_size", "pad_token_id")}


@dataclasses.dataclass(frozen=True)
class Small:
    """A model, and its arguments for a batch size."""

    name: str
    make: Callable[[], nn.Module]
    arguments: Callable[[int], dict[str, Tensor]]
    tolerance: float = 1e-4


def tokens(batch: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, 12))}


def images(name: str, side: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda batch: {name: torch.randn(batch, 3, side, side)}


def bert() -> nn.Module:
    hf = pytest.importorskip("transformers")
    return hf.BertModel(hf.BertConfig(**TEXT))


def llama() -> nn.Module:
    hf = pytest.importorskip("transformers")
    ends = {"bos_token_id": None, "eos_token_id": None}
    return hf.LlamaModel(hf.LlamaConfig(**TEXT, **ends, num_key_value_heads=2))


def vit() -> nn.Module:
    hf = pytest.importorskip("transformers")
    return hf.ViTModel(hf.ViTConfig(**VISION, image_size=24, patch_size=8))


QUICK = [
    Small("BERT", bert, tokens),
    Small("Llama", llama, tokens),
    Small("ViT", vit, images("pixel_values", 24)),
    Small("ResNet", lambda: ResNet((1, 1, 1, 1), width=8), images("x", 32), 1e-3),
    Small("DenseNet", lambda: DenseNet(blocks=(2, 2), growth=4, stem=8), images("x", 32), 1e-3),
]
WHOLE = [
    Small("ResNet-101", lambda: ResNet((3, 4, 23, 3), width=8), images("x", 64), 2e-3),
    Small("DenseNet-121", lambda: DenseNet(growth=4, stem=8), images("x", 64), 2e-3),
]


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if dataclasses.is_dataclass(output) and not isinstance(output, dict):
        output = vars(output)
    items = list(output.values()) if isinstance(output, dict) else output
    if not isinstance(items, list | tuple):
        return []
    return [one for item in items for one in tensors(item)]


def pair(model: Small) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    made = model.make()
    return made, copy.deepcopy(made)


def compare(actual: Any, expected: Any, tolerance: float) -> None:
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def check_inference(model: Small) -> None:
    eager, ours = pair(model)
    eager.eval()
    call = magjit.compile(ours.eval(), backend=backend, fullgraph=True)
    with torch.no_grad(), watched() as graphs:
        for batch in (2, 3):
            arguments = model.arguments(batch)
            expected = tensors(eager(**arguments))
            for _ in range(2):  # The first call for a size may be eager mode's own.
                compare(tensors(call(**arguments)), expected, model.tolerance)
    assert graphs, "the backend did not compile the model"


def check_training(model: Small) -> None:
    eager, ours = pair(model)
    call = magjit.compile(ours.train(), backend=backend, fullgraph=True)
    eager.train()
    with watched() as graphs:
        for number, batch in enumerate((2, 2, 3)):
            arguments = model.arguments(batch)
            for one, function in ((eager, eager), (ours, call)):
                torch.manual_seed(number)
                one.zero_grad()
                results = [part for part in tensors(function(**arguments)) if part.requires_grad]
                sum(part.square().mean() for part in results).backward()
            compare(_gradients(ours), _gradients(eager), model.tolerance)
            buffers = [[one for one in both.buffers()] for both in (ours, eager)]
            if buffers[1]:
                compare(*buffers, model.tolerance)
    assert len(graphs) >= 2, "the backend compiled no forward and backward"


def _gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("model", QUICK, ids=lambda one: one.name)
def test_inference(model: Small) -> None:
    check_inference(model)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            one, marks=pytest.mark.slow if one.name in ("BERT", "DenseNet", "ResNet") else []
        )
        for one in QUICK
    ],
    ids=lambda one: one.name,
)
def test_training(model: Small) -> None:
    check_training(model)


@pytest.mark.slow
@pytest.mark.parametrize("model", WHOLE, ids=lambda one: one.name)
def test_whole_inference(model: Small) -> None:
    check_inference(model)


@pytest.mark.slow
@pytest.mark.parametrize("model", WHOLE, ids=lambda one: one.name)
def test_whole_training(model: Small) -> None:
    check_training(model)
