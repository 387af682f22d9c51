"""BERT (Devlin et al., 2018): the encoder with its pooler, in the structure that users know."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .seeding import Example, Size, seeded


@dataclass
class BertConfig:
    """Sizes of the encoder; the defaults are those of BERT-base."""

    vocabulary: int = 30522
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    intermediate: int = 3072
    positions: int = 512
    token_types: int = 2
    dropout: float = 0.1
    eps: float = 1e-12


@dataclass
class BertOutput:
    """`last_hidden` is (batch, length, hidden), `pooled` is (batch, hidden)."""

    last_hidden: Tensor
    pooled: Tensor
    hidden_states: tuple[Tensor, ...] | None = None


class Embeddings(nn.Module):
    """Sum of word, position and token-type embeddings, normalised."""

    positions: Tensor

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocabulary, config.hidden, padding_idx=0)
        self.position = nn.Embedding(config.positions, config.hidden)
        self.token_type = nn.Embedding(config.token_types, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("positions", torch.arange(config.positions)[None], persistent=False)

    def forward(self, ids: Tensor, token_types: Tensor | None = None) -> Tensor:
        length = ids.size(1)
        if token_types is None:
            token_types = torch.zeros_like(ids)
        embedded = self.word(ids) + self.token_type(token_types)
        embedded = embedded + self.position(self.positions[:, :length])
        return self.dropout(self.norm(embedded))


class SelfAttention(nn.Module):
    """Multi-head attention written out, as in the original."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_size = config.hidden // config.heads
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def split_heads(self, x: Tensor) -> Tensor:
        shape = x.size()[:-1] + (self.heads, self.head_size)
        return x.view(shape).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            self.split_heads(project(x)) for project in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.head_size)
        if mask is not None:
            scores = scores + mask
        probabilities = self.dropout(F.softmax(scores, dim=-1))
        context = torch.matmul(probabilities, value).permute(0, 2, 1, 3).contiguous()
        return context.view(context.size()[:-2] + (self.heads * self.head_size,))


class Residual(nn.Module):
    """Projects, drops, adds the residual and normalises."""

    def __init__(self, inputs: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.dropout(self.dense(x)) + residual)


class Layer(nn.Module):
    """One encoder layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_output = Residual(config.hidden, config)
        self.intermediate = nn.Linear(config.hidden, config.intermediate)
        self.output = Residual(config.intermediate, config)
        self.activation = F.gelu

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attended = self.attention_output(self.attention(x, mask), x)
        return self.output(self.activation(self.intermediate(attended)), attended)


class Bert(nn.Module):
    """Encoder and pooler over token ids of shape (batch, length)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.hidden, config.hidden)
        self.apply(self.initialise)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        token_types: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> BertOutput:
        if mask is None:
            mask = torch.ones(ids.shape, device=ids.device)
        hidden = self.embeddings(ids, token_types)
        extended = (1.0 - mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        states: tuple[Tensor, ...] = ()
        for layer in self.layers:
            if output_hidden_states:
                states += (hidden,)
            hidden = layer(hidden, extended)
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        return BertOutput(hidden, pooled, (*states, hidden) if output_hidden_states else None)


@seeded
def build(size: Size = "small") -> Example:
    """BERT-base over 256 tokens, or its 12 layers at width 64 over 16 tokens."""
    if size == "full":
        config, length = BertConfig(), 256
    else:
        config, length = BertConfig(1000, 64, 12, 4, 128, 64), 16
    return Bert(config), (torch.randint(1, config.vocabulary, (1, length)),)
