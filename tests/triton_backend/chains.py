"""Random chains of movement operators between two products."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Step = Callable[[Tensor], Tensor]


@dataclass
class Chain:
    """``f(x, w, v) = reshape(steps(x @ w)) @ v``, with its text."""

    seed: int
    affine_only: bool = False
    text: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        rows, width = self.random.choice([(4, 12), (6, 8), (12, 24), (8, 30)])
        self.x, self.w = torch.randn(rows, 5), torch.randn(5, width)
        value = self.x @ self.w
        for _ in range(self.random.randint(1, 7)):
            value = self.extend(value)
        columns = self.random.choice([d for d in (1, 2, 3, 4, 6) if value.numel() % d == 0])
        shape = [value.numel() // columns, columns]
        if self.random.random() < 0.5 and value.dim() > 1 and value.shape[-1] > 1:
            shape = [value.numel() // value.shape[-1], value.shape[-1]]
        self.add(f"reshape({shape})", lambda t: t.reshape(shape))
        self.v = torch.randn(shape[1], 3)

    def extend(self, value: Tensor) -> Tensor:
        moves = [self.view, self.permute, self.slice, self.squeeze, self.clone, self.halves]
        if not self.affine_only:
            moves += [self.expand, self.repeat, self.roll, self.pad, self.cat, self.flip]
        step = self.random.choice(moves)(value)
        made = step(value)
        if made.numel() == 0 or made.numel() > 6000:
            self.steps.pop(), self.text.pop()
            return value
        return made

    def add(self, text: str, step: Step) -> Step:
        self.text.append(text)
        self.steps.append(step)
        return step

    def view(self, t: Tensor) -> Step:
        sizes, left = [], t.numel()
        while left > 1 and len(sizes) < 4:
            divisors = [d for d in range(2, left + 1) if left % d == 0]
            sizes.append(self.random.choice(divisors))
            left //= sizes[-1]
        shape = [*sizes, left] if left > 1 or not sizes else sizes
        return self.add(f"reshape({shape})", lambda t: t.reshape(shape))

    def permute(self, t: Tensor) -> Step:
        order = self.random.sample(range(t.dim()), t.dim())
        return self.add(f"permute({order})", lambda t: t.permute(order))

    def slice(self, t: Tensor) -> Step:
        k = self.random.randrange(t.dim())
        start = self.random.randrange(t.shape[k])
        stop = self.random.randint(start + 1, t.shape[k])
        step = self.random.choice([1, 1, 2])
        index = (slice(None),) * k + (slice(start, stop, step),)
        return self.add(f"[{k}: {start}:{stop}:{step}]", lambda t: t[index])

    def squeeze(self, t: Tensor) -> Step:
        if t.dim() < 5 and self.random.random() < 0.6:
            k = self.random.randint(0, t.dim())
            return self.add(f"unsqueeze({k})", lambda t: t.unsqueeze(k))
        return self.add("squeeze()", lambda t: t.squeeze() if t.numel() > 1 else t)

    def clone(self, t: Tensor) -> Step:
        if self.random.random() < 0.5:
            return self.add("contiguous()", lambda t: t.contiguous())
        return self.add("clone()", lambda t: t.clone())

    def halves(self, t: Tensor) -> Step:
        k = self.random.randrange(t.dim())
        return self.add(f"cat(split(2, {k}), {k})", lambda t: torch.cat(t.split(2, k), k))

    def expand(self, t: Tensor) -> Step:
        k = self.random.randint(0, t.dim())
        return self.add(
            f"unsqueeze({k}).expand(2)",
            lambda t: t.unsqueeze(k).expand(*t.shape[:k], 2, *t.shape[k:]),
        )

    def repeat(self, t: Tensor) -> Step:
        k = self.random.randrange(t.dim())
        times = [2 if j == k else 1 for j in range(t.dim())]
        return self.add(f"repeat({times})", lambda t: t.repeat(times))

    def roll(self, t: Tensor) -> Step:
        k, by = self.random.randrange(t.dim()), self.random.randint(-3, 3)
        return self.add(f"roll({by}, {k})", lambda t: t.roll(by, k))

    def pad(self, t: Tensor) -> Step:
        pads = [self.random.randint(0, 2) for _ in range(2 * min(2, t.dim()))]
        return self.add(f"pad({pads})", lambda t: torch.nn.functional.pad(t, pads, value=0.5))

    def cat(self, t: Tensor) -> Step:
        k = self.random.randrange(t.dim())
        return self.add(f"cat([t, t.sigmoid()], {k})", lambda t: torch.cat([t, t.sigmoid()], k))

    def flip(self, t: Tensor) -> Step:
        k = self.random.randrange(t.dim())
        return self.add(f"flip({k})", lambda t: t.flip(k))

    def __call__(self, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        value = x @ w
        for step in self.steps:
            value = step(value)
        return value @ v

    def moved(self, value: Tensor) -> Tensor:
        for step in self.steps:
            value = step(value)
        return value

    def __str__(self) -> str:
        return f"{self.seed}: {tuple((self.x @ self.w).shape)}." + ".".join(self.text)
