"""DeBERTa (He et al., 2020): attention over content and relative position, disentangled.

The masked softmax and the attention write to `self`, as MagPy's Figure 3c shows of this model: such
a write must be there after a compiled call, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .seeding import Example, Size, seeded


@dataclass
class DebertaConfig:
    """Sizes of the encoder; the defaults are those of DeBERTa-base."""

    vocabulary: int = 50265
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    intermediate: int = 3072
    max_relative: int = 512
    attention_types: tuple[str, ...] = ("c2p", "p2c")
    labels: int = 2
    dropout: float = 0.1
    eps: float = 1e-7


class XSoftmax(torch.autograd.Function):
    """Softmax that gives masked positions exactly zero, forward and backward."""

    @staticmethod
    def forward(self: Any, inp: Tensor, mask: Tensor, dim: int) -> Tensor:
        self.dim = dim
        hidden = ~mask.to(torch.bool)
        output = inp.masked_fill(hidden, torch.finfo(inp.dtype).min)
        output = torch.softmax(output, self.dim)
        output.masked_fill_(hidden, 0)
        self.save_for_backward(output)
        return output

    @staticmethod
    def backward(self: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (output,) = self.saved_tensors
        weighted = grad * output
        return weighted - output * weighted.sum(self.dim, keepdim=True), None, None


class StableDropout(nn.Module):
    """Dropout whose rate may be changed for a while, by a stack of contexts."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.contexts: list[float] = []
        self.calls = 0

    def current_rate(self) -> float:
        return self.contexts[-1] if self.contexts else self.rate

    def forward(self, x: Tensor) -> Tensor:
        rate = self.current_rate()
        if self.training and rate > 0:
            return F.dropout(x, rate, training=True)
        return x


def relative_positions(queries: int, keys: int, device: torch.device) -> Tensor:
    """Query position minus key position, of shape (1, queries, keys)."""
    query = torch.arange(queries, dtype=torch.long, device=device)
    key = torch.arange(keys, dtype=torch.long, device=device)
    return (query[:, None] - key.view(1, -1).repeat(queries, 1))[:queries].unsqueeze(0)


class DisentangledSelfAttention(nn.Module):
    """Content-to-content, content-to-position and position-to-content attention."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.types = config.attention_types
        self.max_relative = config.max_relative
        self.projection = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.query_bias = nn.Parameter(torch.zeros(config.hidden))
        self.value_bias = nn.Parameter(torch.zeros(config.hidden))
        if "c2p" in self.types:
            self.position_key = nn.Linear(config.hidden, config.hidden, bias=False)
        if "p2c" in self.types:
            self.position_query = nn.Linear(config.hidden, config.hidden)
        self.position_dropout = StableDropout(config.dropout)
        self.dropout = StableDropout(config.dropout)
        self.span: int | None = None

    def split_heads(self, x: Tensor) -> Tensor:
        shape = x.size()[:-1] + (self.heads, -1)
        return x.view(*shape).permute(0, 2, 1, 3)

    def forward(
        self, hidden: Tensor, mask: Tensor, relative: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        query, key, value = self.split_heads(self.projection(hidden)).chunk(3, dim=-1)
        query = query + self.split_heads(self.query_bias[None, None, :])
        value = value + self.split_heads(self.value_bias[None, None, :])

        scale = math.sqrt(query.size(-1) * (1 + len(self.types)))
        scores = torch.matmul(query / scale, key.transpose(-1, -2))
        table = self.position_dropout(table)
        scores = scores + self.position_scores(query / scale, key, relative, table, scale)

        probabilities = self.dropout(XSoftmax.apply(scores, mask, -1))
        context = torch.matmul(probabilities, value).permute(0, 2, 1, 3).contiguous()
        return context.view(context.size()[:-2] + (-1,)), probabilities

    def position_scores(
        self, query: Tensor, key: Tensor, relative: Tensor, table: Tensor, scale: float
    ) -> Tensor:
        """The part of the scores that relative positions give, (batch, heads, queries, keys)."""
        if relative.dim() == 3:
            relative = relative.unsqueeze(1)
        elif relative.dim() != 4:
            raise ValueError(f"relative positions have 3 or 4 dimensions, not {relative.dim()}")
        queries, keys = query.size(-2), key.size(-2)
        self.span = span = min(max(queries, keys), self.max_relative)
        window = table[self.max_relative - span : self.max_relative + span].unsqueeze(0)

        score: Any = 0
        if "c2p" in self.types:
            position_key = self.split_heads(self.position_key(window))
            found = torch.matmul(query, position_key.transpose(-1, -2))
            index = torch.clamp(relative + span, 0, span * 2 - 1)
            score += torch.gather(found, -1, index.expand(query.size(0), self.heads, queries, keys))
        if "p2c" in self.types:
            position_query = self.split_heads(self.position_query(window)) / scale
            found = torch.matmul(key, position_query.transpose(-1, -2))
            index = torch.clamp(-relative + span, 0, span * 2 - 1)
            score += torch.gather(
                found, -1, index.expand(query.size(0), self.heads, keys, keys)
            ).transpose(-1, -2)
        return score


class Layer(nn.Module):
    """Disentangled attention and the feed-forward part, each with a residual."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.attention = DisentangledSelfAttention(config)
        self.attention_dense = nn.Linear(config.hidden, config.hidden)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.intermediate = nn.Linear(config.hidden, config.intermediate)
        self.dense = nn.Linear(config.intermediate, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.dropout = StableDropout(config.dropout)

    def forward(
        self, hidden: Tensor, mask: Tensor, relative: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        context, probabilities = self.attention(hidden, mask, relative, table)
        attended = self.attention_norm(self.dropout(self.attention_dense(context)) + hidden)
        output = self.dense(F.gelu(self.intermediate(attended)))
        return self.norm(self.dropout(output) + attended), probabilities


class Encoder(nn.Module):
    """The layers, which share one table of relative-position embeddings."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.relative = nn.Embedding(2 * config.max_relative, config.hidden)

    def attention_mask(self, mask: Tensor) -> Tensor:
        if mask.dim() <= 2:
            extended = mask.unsqueeze(1).unsqueeze(2)
            return extended * extended.squeeze(-2).unsqueeze(-1)
        return mask.unsqueeze(1) if mask.dim() == 3 else mask

    def forward(
        self, hidden: Tensor, mask: Tensor, output_attentions: bool = False
    ) -> dict[str, Any]:
        mask = self.attention_mask(mask)
        relative = relative_positions(hidden.size(-2), hidden.size(-2), hidden.device)
        attentions = []
        for layer in self.layers:
            hidden, probabilities = layer(hidden, mask, relative, self.relative.weight)
            if output_attentions:
                attentions.append(probabilities)
        return {"last_hidden": hidden, "attentions": tuple(attentions)}


class Deberta(nn.Module):
    """Classifies token ids of shape (batch, length); gives a dictionary."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocabulary, config.hidden, padding_idx=0)
        self.embeddings_norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.encoder = Encoder(config)
        self.pooler = nn.Linear(config.hidden, config.hidden)
        self.classifier = nn.Linear(config.hidden, config.labels)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        if mask is None:
            mask = torch.ones(ids.size(), device=ids.device)
        embedded = self.embeddings_norm(self.embeddings(ids)) * mask.unsqueeze(2)
        encoded = self.encoder(embedded, mask)
        pooled = F.gelu(self.pooler(encoded["last_hidden"][:, 0]))
        return {"logits": self.classifier(pooled), **encoded}


@seeded
def build(size: Size = "small") -> Example:
    """DeBERTa-base over 256 tokens, or its 12 layers at width 64 over 16 tokens."""
    if size == "full":
        config, length = DebertaConfig(), 256
    else:
        config, length = DebertaConfig(1000, 64, 12, 4, 128, 64), 16
    return Deberta(config), (torch.randint(1, config.vocabulary, (1, length)),)
