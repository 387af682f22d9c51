"""The models that the benchmarks run: two small ones for the front end, and the examples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Benchmarks are started by path, which leaves the repository itself off the import path.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from examples.models import MODELS
from examples.models.bert import Bert, BertConfig
from examples.models.resnet import ResNet

__all__ = [
    "FRONT_END",
    "MODELS",
    "Bert",
    "BertConfig",
    "ResNet",
    "front_end_model",
    "small_bert",
    "small_resnet",
]


def small_bert(positions: int = 64) -> tuple[nn.Module, tuple[Any, ...]]:
    """12 layers of width 64 over 16 tokens."""
    config = BertConfig(100, hidden=64, layers=12, heads=4, intermediate=128, positions=positions)
    return Bert(config), (torch.randint(0, 100, (1, 16)),)


def small_resnet() -> tuple[nn.Module, tuple[Any, ...]]:
    """ResNet-50 of width 16 on 32×32."""
    return ResNet((3, 4, 6, 3), width=16), (torch.randn(1, 3, 32, 32),)


FRONT_END = {"BERT-12x64": small_bert, "ResNet-50x16": small_resnet}


def front_end_model(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """One of the two small models, in evaluation mode, and the arguments of a call."""
    torch.manual_seed(0)
    model, arguments = FRONT_END[name]()
    return model.eval(), arguments
