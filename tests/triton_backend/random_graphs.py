"""Random programs of movement and compute operators, with updates of inputs and many readers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Step = Callable[[list[Tensor]], Tensor]


@dataclass
class Program:
    """Steps that add a tensor to a list each; some of the list are returned."""

    seed: int
    steps: list[Step] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.inputs = [torch.randn(self.shape()) for _ in range(self.random.randint(1, 3))]
        pool = [one.clone() for one in self.inputs]
        for _ in range(self.random.randint(3, 12)):
            self.extend(pool)
        count = self.random.randint(1, 3)
        made = range(len(self.inputs), len(pool))
        self.returned = self.random.sample(made, min(count, len(made)))
        try:
            self(*[one.clone() for one in self.inputs])
        except RuntimeError:  # an update from memory that it overlaps
            self.returned = []

    def shape(self) -> list[int]:
        return [self.random.choice([1, 2, 3, 4, 6]) for _ in range(self.random.randint(1, 4))]

    def extend(self, pool: list[Tensor]) -> None:
        k = self.random.randrange(len(pool))
        choices = [self.movement, self.movement, self.pointwise, self.joined, self.binary]
        choices += [self.product, self.reduced, self.update]
        for _ in range(8):
            found = self.random.choice(choices)(pool, k)
            if found is None:
                continue
            text, step = found
            trial = [one.clone() for one in pool]
            try:
                made = step(trial)
                if not (0 < made.numel() <= 600 and made.dim() <= 5):
                    continue
                made = step(pool)
            except (RuntimeError, IndexError):
                continue
            else:
                pool.append(made)
                self.steps.append(step)
                self.text.append(f"t{len(pool) - 1} = {text}")
                return

    def movement(self, pool: list[Tensor], k: int) -> tuple[str, Step] | None:
        t, r = pool[k], self.random
        d = r.randrange(t.dim()) if t.dim() else 0
        order = r.sample(range(t.dim()), t.dim())
        by, times = r.randint(-2, 2), r.randint(1, 3)
        sizes, left = [], t.numel()
        while left > 1:
            sizes.append(r.choice([n for n in range(2, left + 1) if left % n == 0]))
            left //= sizes[-1]
        r.shuffle(sizes)
        start = r.randrange(t.shape[d]) if t.dim() else 0
        stop = r.randint(start + 1, t.shape[d]) if t.dim() else 0
        moves: list[tuple[str, Callable[[Tensor], Tensor]]] = [
            (f"reshape({sizes})", lambda t: t.reshape(sizes)),
            (f"permute({order})", lambda t: t.permute(order)),
            ("contiguous()", lambda t: t.contiguous()),
            ("clone()", lambda t: t.clone()),
            (f"unsqueeze({d})", lambda t: t.unsqueeze(d)),
            ("squeeze()", lambda t: t.squeeze()),
            (f"narrow({d}, {start}, {stop})", lambda t: t.narrow(d, start, stop - start)),
            (f"select({d}, {start})", lambda t: t.select(d, start)),
            (f"expand({times})", lambda t: t.expand(times, *t.shape)),
            (f"repeat_interleave({times}, {d})", lambda t: t.repeat_interleave(times, d)),
            (f"roll({by}, {d})", lambda t: t.roll(by, d)),
            (f"flip({d})", lambda t: t.flip(d)),
            (f"split({d})[-1]", lambda t: t.split(2, d)[-1]),
            (f"unbind({d})[0]", lambda t: t.unbind(d)[0]),
            (f"pad({by + 2}, 1)", lambda t: F.pad(t, (by + 2, 1), value=0.5)),
            (f"diagonal({by})", lambda t: t.diagonal(by)),
            (f"unfold({d})", lambda t: t.unfold(d, min(2, t.shape[d]), 1)),
            ("mT", lambda t: t.mT if t.dim() > 1 else t * 2),
            (f"index({start})", lambda t: t[torch.tensor([start, 0])]),
        ]
        name, move = r.choice(moves)
        return f"t{k}.{name}", lambda pool: move(pool[k])

    def pointwise(self, pool: list[Tensor], k: int) -> tuple[str, Step] | None:
        name = self.random.choice(["sigmoid", "tanh", "neg", "abs", "relu", "exp"])
        return f"{name}(t{k})", lambda pool: getattr(torch, name)(pool[k].clamp(-3, 3))

    def binary(self, pool: list[Tensor], k: int) -> tuple[str, Step] | None:
        j = self.random.randrange(len(pool))
        name = self.random.choice(["add", "mul", "sub", "maximum"])
        return f"{name}(t{k}, t{j})", lambda pool: getattr(torch, name)(pool[k], pool[j])

    def joined(self, pool: list[Tensor], k: int) -> tuple[str, Step] | None:
        same = [j for j, one in enumerate(pool) if one.shape == pool[k].shape]
        picks = self.random.choices(same, k=self.random.randint(1, 3))
        d = self.random.randrange(pool[k].dim() or 1)
        function = torch.cat if self.random.random() < 0.7 else torch.stack
        name = f"{function.__name__}({picks}, {d})"
        return name, lambda pool: function([pool[j] for j in picks], d)

    def product(self, pool: list[Tensor], k: int) -> tuple[str, Step] | None:
        j = self.random.randrange(len(pool))
        if pool[k].dim() < 2 or pool[j].dim() < 2:
            return None
        return f"t{k} @ t{j}", lambda pool: pool[k] @ pool[j]

    def reduced(self, pool: list[Tensor], k: int) -> tuple[str, Step] | None:
        if not pool[k].dim():
            return None
        d, keep = self.random.randrange(pool[k].dim()), self.random.random() < 0.5
        name = self.random.choice(["sum", "mean", "amax", "softmax"])
        if name == "softmax":
            return f"softmax(t{k}, {d})", lambda pool: pool[k].softmax(d)
        return f"{name}(t{k}, {d})", lambda pool: getattr(torch, name)(pool[k], d, keepdim=keep)

    def update(self, pool: list[Tensor], k: int) -> tuple[str, Step] | None:
        """A write into an input or into what the program has made."""
        target, j = self.random.randrange(len(pool)), k
        t = pool[target]
        if not t.dim() or self.random.random() < 0.4:
            return None
        d = self.random.randrange(t.dim())
        start = self.random.randrange(t.shape[d])
        kind = self.random.choice(["copy", "add", "scale"])

        def step(pool: list[Tensor]) -> Tensor:
            place = pool[target].narrow(d, start, 1)
            if kind == "scale":
                place.mul_(0.5)
            elif kind == "add":
                place.add_(pool[j].mean())
            else:
                place.copy_(pool[j].flatten()[0])
            return pool[target] * 1

        return f"t{target}.narrow({d}, {start}, 1).{kind}_(t{j}) * 1", step

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        pool = list(inputs)
        for step in self.steps:
            pool.append(step(pool))
        return tuple(pool[k] for k in self.returned)

    def __str__(self) -> str:
        shapes = [tuple(one.shape) for one in self.inputs]
        return f"{self.seed}: {shapes}\n" + "\n".join(self.text) + f"\nreturn {self.returned}"
