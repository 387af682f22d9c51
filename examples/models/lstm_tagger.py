"""Sequence tagger: words and their spelling through LSTMs (Lample et al., 2016)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .seeding import Example, Size, seeded


class CharacterFeatures(nn.Module):
    """Spelling of each word, (batch, words, characters), to features (batch, words, 2 × width)."""

    def __init__(self, characters: int, embedding: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding, padding_idx=0)
        self.lstm = nn.LSTM(embedding, width, batch_first=True, bidirectional=True)

    def forward(self, characters: Tensor) -> Tensor:
        batch, words, length = characters.shape
        embedded = self.embedding(characters.view(batch * words, length))
        _, (hidden, _) = self.lstm(embedded)
        forward, backward = hidden.unbind(0)
        return torch.cat([forward, backward], dim=-1).view(batch, words, -1)


class LSTMTagger(nn.Module):
    """Log-probabilities of the tags of each word, (batch, words, tags)."""

    def __init__(
        self,
        vocabulary: int = 20000,
        characters: int = 128,
        embedding: int = 100,
        spelling: int = 25,
        hidden: int = 200,
        layers: int = 2,
        tags: int = 17,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, embedding, padding_idx=0)
        self.spelling = CharacterFeatures(characters, spelling, spelling)
        self.dropout = nn.Dropout(0.5)
        self.lstm = nn.LSTM(
            embedding + 2 * spelling,
            hidden,
            num_layers=layers,
            batch_first=True,
            bidirectional=True,
            dropout=0.5 if layers > 1 else 0.0,
        )
        self.tags = nn.Linear(2 * hidden, tags)

    def initial_state(self, batch: int, like: Tensor) -> tuple[Tensor, Tensor]:
        directions = 2 if self.lstm.bidirectional else 1
        shape = (self.lstm.num_layers * directions, batch, self.lstm.hidden_size)
        return like.new_zeros(shape), like.new_zeros(shape)

    def forward(
        self, words: Tensor, characters: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        features = torch.cat([self.words(words), self.spelling(characters)], dim=-1)
        features = self.dropout(features)
        if state is None:
            state = self.initial_state(words.size(0), features)
        output, state = self.lstm(features, state)
        scores = self.tags(self.dropout(output))
        return torch.log_softmax(scores, dim=-1), state


@seeded
def build(size: Size = "small") -> Example:
    """A batch of 16 sentences of 32 words, or a small one of 2 with 12 words."""
    if size == "full":
        model, batch, length, letters = LSTMTagger(), 16, 32, 12
    else:
        model, batch, length, letters = LSTMTagger(500, 64, 32, 8, 32), 2, 12, 6
    words = torch.randint(1, model.words.num_embeddings, (batch, length))
    characters = torch.randint(1, model.spelling.embedding.num_embeddings, (batch, length, letters))
    return model, (words, characters)
