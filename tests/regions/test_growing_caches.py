"""Caches that begin as a view and grow by concatenation: one record for all steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import magjit

STEPS = 30
Cache = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


class Attention(nn.Module):
    """Keys and values of the first step are views of one projection, and not contiguous."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor, kept: Cache | None) -> tuple[Tensor, Cache]:
        batch, length, width = x.shape
        mixed = self.project(x).view(batch, length, 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=kept is None)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width)), (k, v)


class Decoder(nn.Module):
    """Greedy decoding; ends after some steps, or at a token."""

    def __init__(self, end: int = -1, words: int = 11, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.parts = nn.ModuleList(Attention(width) for _ in range(2))
        self.head = nn.Linear(width, words)
        self.end = end

    def forward(self, prompt: Tensor) -> tuple[list[int], list[Cache]]:
        tokens: list[int] = []
        kept: list[Any] = [None] * len(self.parts)
        given, place = prompt, 0
        while len(tokens) < STEPS:
            places = torch.arange(place, place + given.shape[1])
            x = self.words(given) + self.places(places)
            place += given.shape[1]
            for k, part in enumerate(self.parts):
                x, kept[k] = part(x, kept[k])
            best = self.head(x[:, -1]).argmax(-1)
            token = int(best[0].item())
            if token == self.end:
                break
            tokens.append(token)
            given = best[:, None]
        return tokens, kept


def same(one: Any, other: Any) -> None:
    """Two results of the decoder are equal, with the layouts of their caches."""
    assert one[0] == other[0]
    for pair, twin in zip(one[1], other[1], strict=True):
        for made, wanted in zip(pair, twin, strict=True):
            torch.testing.assert_close(made, wanted)
            assert made.stride() == wanted.stride()


def compiled(model: nn.Module, backend: str = "eager") -> Callable[..., Any]:
    made: Callable[..., Any] = magjit.compile(model, backend=backend)
    return made


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


@pytest.mark.parametrize("backend", ["eager", "inductor", "dvm"])
def test_prefill_step_end(decoder: Decoder, backend: str) -> None:
    """The step behind the prefill shares its record with all others, in every backend."""
    with torch.no_grad():
        prompt = torch.randint(11, (1, 7))
        fast = compiled(decoder, backend)
        for _ in range(2):
            same(fast(prompt), decoder(prompt))
        assert magjit.stats(fast).captures == 3


def test_prompts_of_other_lengths(decoder: Decoder) -> None:
    """Sequences one after the other need another prefill at most, and no other step."""
    with torch.no_grad():
        fast = compiled(decoder)
        for length in (7, 5, 12, 9, 3):
            prompt = torch.randint(11, (1, length))
            same(fast(prompt), decoder(prompt))
        assert magjit.stats(fast).captures == 4


def test_other_batches(decoder: Decoder) -> None:
    with torch.no_grad():
        fast = compiled(decoder)
        for batch in (1, 3, 3, 2, 4, 1):
            prompt = torch.randint(11, (batch, 6))
            same(fast(prompt), decoder(prompt))
        assert magjit.stats(fast).captures <= 8


def test_end_token(decoder: Decoder) -> None:
    with torch.no_grad():
        prompts = [torch.randint(11, (1, 7)) for _ in range(6)]
        ends = [decoder(prompt)[0][4] for prompt in prompts]
        decoder.end = ends[0]
        fast = compiled(decoder)
        lengths = set()
        for prompt in prompts:
            wanted = decoder(prompt)
            lengths.add(len(wanted[0]))
            same(fast(prompt), wanted)
        assert min(lengths) < STEPS
        assert magjit.stats(fast).captures <= 4


def first_of(x: Tensor) -> float:
    """A number that no guard knows."""
    return float(x.sum().item())


Grow = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def joined(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([kept, new], 2), new


def asks_for_contiguity(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.cat([kept, new], 2)
    return made, new + 1 if kept.is_contiguous() else new - 1


def asks_for_a_stride(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.cat([kept, new], 2)
    return made, new * kept.stride(2)


def looks_at_it_flat(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.cat([kept, new], 2)
    return made, new + torch.as_strided(kept, (3,), (1,)).sum()


def keeps_a_window(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([kept, new], 2)[:, :, -6:], new


def channels_last(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    new = new.repeat(1, 1, 2, 1).contiguous(memory_format=torch.channels_last)
    return torch.cat([kept, new], 2), new[:, :, :1]


def adds_in_place(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.cat([kept, new], 2)
    kept.add_(1)
    return made, new


def gives_it_back(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.cat([kept, new], 2)
    return made, new + kept.sum()


def joined_by_names(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    return torch.concatenate(tensors=(kept, new), dim=2), new


def joined_with_another_type(kept: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([kept, new.double()], 2), new


@pytest.mark.parametrize(
    "grow",
    [
        joined,
        asks_for_contiguity,
        asks_for_a_stride,
        looks_at_it_flat,
        keeps_a_window,
        channels_last,
        adds_in_place,
        gives_it_back,
        joined_by_names,
        joined_with_another_type,
    ],
)
@pytest.mark.parametrize("backend", ["eager", "dvm"])
@pytest.mark.parametrize("layout", ["permuted", "channels_last", "expanded", "contiguous"])
def test_layouts_that_count(grow: Grow, backend: str, layout: str) -> None:
    """Results, layouts included, are eager's, whatever else is done with the cache."""

    def program(kept: Tensor, new: Tensor, steps: int) -> tuple[Any, ...]:
        seen = []
        place = kept.shape[2]  # a size that a frame holds is a symbol from the first capture on
        for _ in range(steps):
            if first_of(new) > 1e6:
                break
            kept, new = grow(kept, new)
            place += 1
            seen.append((kept, new))
        return kept, new, place, seen

    def arguments(length: int) -> tuple[Tensor, Tensor, int]:
        torch.manual_seed(length)
        if layout == "permuted":
            kept = torch.randn(2, length, 3, 4, 5).permute(2, 0, 3, 1, 4)[1]
        elif layout == "channels_last":
            kept = torch.randn(2, 4, length, 5).contiguous(memory_format=torch.channels_last)
        elif layout == "expanded":
            kept = torch.randn(2, 4, 1, 5).expand(2, 4, length, 5)
        else:
            kept = torch.randn(2, 4, length, 5)
        if grow is adds_in_place and layout == "expanded":
            kept = kept.transpose(0, 1).contiguous().transpose(0, 1)
        return kept, torch.randn(2, 4, 1, 5), 5

    fast = magjit.compile(program, backend=backend)
    with torch.no_grad():
        for length in (7, 9, 4):
            one, other = fast(*arguments(length)), program(*arguments(length))
            assert one[2] == other[2]
            flat = [*one[:2], *[tensor for pair in one[3] for tensor in pair]]
            twin = [*other[:2], *[tensor for pair in other[3] for tensor in pair]]
            for made, wanted in zip(flat, twin, strict=True):
                torch.testing.assert_close(made, wanted)
                assert made.stride() == wanted.stride()


def captures_of(grow: Grow, kept: Tensor) -> int:
    """Captures of a loop over steps of which only the first has the cache in this layout."""

    def program(kept: Tensor, new: Tensor, steps: int) -> tuple[Tensor, int]:
        place = kept.shape[2]
        for _ in range(steps):
            if first_of(new) > 1e6:
                break
            kept, new = grow(kept, new)
            place += 1
        return kept, place

    fast = magjit.compile(program, backend="eager")
    with torch.no_grad():
        fast(kept, torch.randn(2, 4, 1, 5), 6)
    return magjit.stats(fast).captures


def test_only_where_it_does_not_matter() -> None:
    """A layout that the program can tell costs the capture that it has always cost."""
    contiguous = torch.randn(2, 4, 7, 5)
    permuted = torch.randn(2, 7, 3, 4, 5).permute(2, 0, 3, 1, 4)[1]
    least = captures_of(joined, contiguous)
    assert captures_of(joined, permuted) == least
    assert captures_of(joined_by_names, permuted) == least
    assert captures_of(asks_for_contiguity, permuted) > least
    assert captures_of(asks_for_a_stride, permuted) > least
    assert captures_of(gives_it_back, permuted) > least


def test_a_window_is_not_copied_at_each_step(decoder: Decoder) -> None:
    """Where the cache is a view at each step, the graph has it as it is."""

    def program(kept: Tensor, new: Tensor) -> tuple[Tensor, int]:
        place = kept.shape[2]
        for _ in range(8):
            if first_of(new) > 1e6:
                break
            kept, new = keeps_a_window(kept, new)
            place += 1
        return kept, place

    fast = magjit.compile(program, backend="eager")
    kept = torch.randn(2, 4, 9, 5)[:, :, 1:]
    with torch.no_grad():
        wanted = program(kept, kept[:, :, :1])
        torch.testing.assert_close(fast(kept, kept[:, :, :1])[0], wanted[0])
        with torch.profiler.profile() as profile:
            fast(kept, kept[:, :, :1])
    names = [event.name for event in profile.events()]
    assert "aten::cat" in names
    assert "aten::clone" not in names


def test_the_log_names_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    """A shape of which one size may be any is not said to differ where only strides do."""

    def program(x: Tensor) -> Tensor:
        return x.relu().reshape(-1) * 2

    fast = magjit.compile(program, backend="eager")
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="magjit"):
        fast(torch.randn(4, 6))
        fast(torch.randn(4, 7))
        caplog.clear()
        fast(torch.randn(8, 4).t())
    assert "strides" in caplog.text
    assert "shape (4, any)" not in caplog.text
