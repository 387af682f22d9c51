"""torch.nn: containers, hooks, parametrizations, recurrent layers, attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ..twin import Call, Scene, call
from .table import FeatureTable

ROWS = FeatureTable()


def rows_by(width: int, *leading: int) -> Callable[[], Call]:
    return lambda: call(torch.randn(*leading, width))


def sequence() -> Call:
    return call(torch.randn(2, 5, 4))


def images() -> Call:
    return call(torch.randn(2, 3, 8, 8))


def packed() -> Call:
    x = torch.randn(2, 5, 4)
    return call(nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norms = nn.ModuleDict({"0": nn.LayerNorm(4), "1": nn.Identity()})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x + self.norms[str(i)](layer(x)) * self.scales[i]
        return x * self.table["a"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Walks(nn.Module):
    """Reads its own tree while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> Any:
        x = self.body(x)
        total = sum(p.square().sum() for p in self.parameters())
        names = [name for name, _ in self.named_modules()]
        return x, total, names, len(self.body), next(self.parameters()).dtype


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, mask: Any = None, **rest: Any) -> Any:
        y = self.linear(x)
        return {"y": y if mask is None else y * mask, **rest}


class Inherited(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    net[0].register_forward_hook(lambda m, args, out: out + args[0])
    net.register_forward_hook(
        lambda m, args, kwargs, out: {"out": out, "n": len(kwargs)}, with_kwargs=True
    )
    return net


def backward_hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net[0].register_full_backward_hook(
        lambda m, gin, gout: (gin[0] * 10,) if gin[0] is not None else None
    )
    return net


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).t()


def parametrized() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def old_weight_norm() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(4, 4))


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.options = options

    def forward(self, x: torch.Tensor) -> Any:
        # Contiguous: the fast path for inference leaves its output in another layout.
        out, weights = self.attention(x, x, x, **self.options)
        return out.contiguous(), weights


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 8, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, x, tgt_mask=mask)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1), state


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bag = nn.Embedding(9, 4, padding_idx=0), nn.EmbeddingBag(9, 4)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.embed(ids), self.bag(ids)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
        nn.GroupNorm(2, 2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 3),
        nn.Softmax(dim=1),
    )


# name -> (module, arguments, options of the row)
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Call], dict[str, Any]]] = {
    "module containers": (Residual, rows_by(4, 3), {}),
    "tied parameters": (Tied, rows_by(4, 3), {}),
    "walks over modules and parameters": (Walks, rows_by(4, 3), {}),
    "module keyword arguments": (
        Keywords,
        lambda: call(torch.randn(3, 4), mask=torch.ones(4), note="a"),
        {},
    ),
    "module super forward": (lambda: Inherited(4, 4), rows_by(4, 3), {}),
    "forward hooks": (hooked, rows_by(4, 3), {}),
    "full backward hook": (backward_hooked, rows_by(4, 3), {"split": True}),
    "parametrization": (parametrized, rows_by(4, 3), {}),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), rows_by(4, 3), {}),
    "weight norm by a hook": (old_weight_norm, rows_by(4, 3), {}),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), rows_by(4, 3), {}),
    "spectral norm in eval": (
        lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
        rows_by(4, 3),
        {},
    ),
    "spectral norm by a hook": (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), rows_by(4, 3), {}),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), rows_by(4, 3), {}),
    "lstm": (
        lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True),
        sequence,
        {},
    ),
    "lstm with projection": (lambda: nn.LSTM(4, 3, proj_size=2), sequence, {}),
    "gru": (lambda: nn.GRU(4, 3, batch_first=True), sequence, {}),
    "rnn": (lambda: nn.RNN(4, 3, nonlinearity="relu"), sequence, {}),
    "lstm packed": (lambda: nn.LSTM(4, 3, batch_first=True), packed, {"split": True}),
    "lstm cell in a loop": (Cell, sequence, {}),
    "multihead attention": (Attention, sequence, {}),
    "multihead attention without weights": (lambda: Attention(need_weights=False), sequence, {}),
    "multihead attention in eval": (
        lambda: Attention(need_weights=False).eval().requires_grad_(False),
        sequence,
        {"backward": False},
    ),
    "transformer encoder": (encoder, sequence, {}),
    "transformer encoder in eval": (
        lambda: encoder().eval().requires_grad_(False),
        sequence,
        {"backward": False},
    ),
    "transformer encoder norm first": (
        lambda: encoder(norm_first=True, activation="gelu"),
        sequence,
        {},
    ),
    "transformer decoder with a mask": (Decoder, sequence, {}),
    "embeddings": (Embeds, lambda: call(torch.randint(0, 9, (2, 5))), {}),
    "convolutions and pooling": (conv_net, images, {}),
    "batch norm in training": (lambda: nn.BatchNorm1d(4), rows_by(4, 8), {}),
    "dropout": (lambda: nn.Dropout(0.5), rows_by(4, 3), {}),
    "lazy module": (lambda: nn.LazyLinear(3), rows_by(4, 3), {"split": True}),
    "scripted module": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU()),
        rows_by(4, 3),
        {"split": True},
    ),
    "quantized weights": (
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval()),
        rows_by(4, 3),
        {"split": True, "backward": False},
    ),
}


def module_scene(make: Callable[[], nn.Module], args: Callable[[], Call]) -> Scene:
    torch.manual_seed(0)
    module = make()
    return Scene(module, args=args, state=lambda: dict(module.named_parameters()))


for row_name, (make, args, options) in MODULES.items():
    recipe = functools.partial(module_scene, make, args)
    ROWS.add(row_name, recipe, **{"backward": True, **options})
