"""The model kinds of MagPy's evaluation (Zhang et al., ATC 2024, §8.1, Table 1), and a tagger.

`build(name)` gives a model in evaluation mode and the positional arguments of a call. Size "small"
keeps every layer but makes them narrow, for a laptop's CPU; "full" is the published configuration.
"""

from __future__ import annotations

from . import (
    align,
    bert,
    deberta,
    densenet,
    lstm_tagger,
    monodepth,
    quantized_resnet,
    resnet,
    tridentnet,
)
from .seeding import Builder, Example, Size

MODELS: dict[str, Builder] = {
    "ALIGN": align.build,
    "BERT": bert.build,
    "DeBERTa": deberta.build,
    "DenseNet-121": densenet.build,
    "LSTM tagger": lstm_tagger.build,
    "MonoDepth": monodepth.build,
    "Quantized ResNet": quantized_resnet.build,
    "ResNet-101": resnet.build,
    "TridentNet": tridentnet.build,
}


def build(name: str, size: Size = "small") -> Example:
    """A model of the registry and the positional arguments of a call.

    Raises:
        KeyError: no model has this name.
        ValueError: the size is neither "small" nor "full".
    """
    return MODELS[name](size)


__all__ = ["MODELS", "Builder", "Example", "Size", "build"]
