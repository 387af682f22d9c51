"""The module `_paritybench_helpers` that files of a corpus import, with nothing more in it."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

NAME = "_paritybench_helpers"


class MockLayer(nn.ReLU):
    """Stands for a layer that a class gets as an argument."""

    expansion = 1

    def __repr__(self) -> str:
        return "_mock_layer()"


def mock_layer(
    in_features: int | None = None, out_features: int | None = None, *args: Any, **kwargs: Any
) -> nn.Module:
    """A linear layer where sizes are given, an activation otherwise."""
    if in_features and out_features:
        return nn.Linear(in_features, out_features, **kwargs)
    return MockLayer()


class MockConfig(dict[str, Any]):
    """A configuration whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def patch_functional() -> None:
    """Make `torch.functional` and `torch.nn.functional` one: programs import either as F."""
    first, second = torch.functional, torch.nn.functional
    for source, target in ((first, second), (second, first)):
        for name in dir(source):
            if name[0].islower() and not hasattr(target, name):
                setattr(target, name, getattr(source, name))


def fails_compile() -> Callable[[Any], Any]:
    """Decorates the unit tests in a file, which nothing here runs."""
    return unittest.skip("the runner has a protocol of its own")


class CaseBase(unittest.TestCase):
    """Base of the unit tests in a file, which nothing here runs."""


def install() -> None:
    """Let files of a corpus import the module."""
    module = types.ModuleType(NAME)
    contents = {
        "_mock_config": MockConfig,
        "_mock_layer": mock_layer,
        "_paritybench_base": CaseBase,
        "_fails_compile": fails_compile,
        "patch_functional": patch_functional,
    }
    vars(module).update(contents)
    sys.modules[NAME] = module
