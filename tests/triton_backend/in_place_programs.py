"""Random programs that change what they are given and what they make through views of views.

Each step adds a tensor: a view, a computed tensor, or what an in-place operator returns. Any of
them may be returned, so that results share memory with inputs and with each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Step = Callable[[list[Tensor]], Tensor]

__all__ = ["InPlaceProgram"]

_MOST_ELEMENTS = 300


@dataclass
class InPlaceProgram:
    """The same for a seed; called with ``arguments()``."""

    seed: int
    steps: list[Step] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        count = self.random.randint(1, 3)
        self.layouts = [self._layout() for _ in range(count)]
        self.overlapping = count > 1 and self.random.random() < 0.1
        pool = self.arguments()
        for _ in range(self.random.randint(3, 14)):
            self._extend(pool)
        self.text.append(f"return {self._choose_results(pool)}")

    def _layout(self) -> tuple[list[int], list[int], int]:
        """Sizes, the order of dimensions in memory, and a gap in the innermost one."""
        shape = [self.random.choice([1, 2, 3, 4, 4]) for _ in range(self.random.randint(1, 3))]
        order = list(range(len(shape)))
        if self.random.random() < 0.3:
            self.random.shuffle(order)
        return shape, order, self.random.choice([1, 1, 1, 2])

    def arguments(self) -> list[Tensor]:
        """New tensors, of other values each time."""
        made: list[Tensor] = []
        for shape, order, step in self.layouts:
            base = torch.randn([*(shape[k] for k in order), step])[..., 0]
            made.append(base.permute([order.index(k) for k in range(len(order))]))
        if self.overlapping:
            made[1] = made[0].flatten() if made[0].is_contiguous() else made[0][:1]
            made[1] = made[0].as_strided(made[1].shape, made[1].stride(), made[0].storage_offset())
        return made

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same values in memory that is shared in the same way."""
        memory: dict[int, Tensor] = {}
        made = []
        for one in tensors:
            storage = one.untyped_storage()
            if storage.data_ptr() not in memory:
                memory[storage.data_ptr()] = torch.empty(0).set_(storage.clone())
            base = memory[storage.data_ptr()]
            made.append(base.as_strided(one.shape, one.stride(), one.storage_offset()))
        return made

    def _choose_results(self, pool: Sequence[Tensor]) -> list[int]:
        self.returned = self.random.sample(range(len(pool)), min(len(pool), 3))
        return self.returned

    def _extend(self, pool: list[Tensor]) -> None:
        for _ in range(10):
            k = self.random.randrange(len(pool))
            kinds = [self._view, self._view, self._update, self._update, self._update, self._made]
            found = self.random.choice(kinds)(pool, k)
            if found is None:
                continue
            text, step = found
            # A step that raises must not have changed the pool.
            trial = self.replayed()
            try:
                made = step(trial)
                if not 0 < made.numel() <= _MOST_ELEMENTS or made.dim() > 4:
                    continue
                pool.append(step(pool))
            except (RuntimeError, IndexError):
                continue
            self.steps.append(step)
            self.text.append(f"t{len(pool) - 1} = {text}")
            return

    def replayed(self) -> list[Tensor]:
        """All tensors of the steps so far, of new arguments."""
        pool = self.arguments()
        for step in self.steps:
            pool.append(step(pool))
        return pool

    def _view(self, pool: list[Tensor], k: int) -> tuple[str, Step] | None:
        t, r = pool[k], self.random
        if not t.dim():
            return None
        d = r.randrange(t.dim())
        start = r.randrange(t.shape[d])
        stop, step = r.randint(start + 1, t.shape[d]), r.choice([1, 1, 2])
        order = r.sample(range(t.dim()), t.dim())
        index = (*[slice(None)] * d, slice(start, stop, step))
        half = (*t.shape[:d], 2, t.shape[d] // 2, *t.shape[d + 1 :])
        views: list[tuple[str, Callable[[Tensor], Tensor]]] = [
            (f"[{d}: {start}:{stop}:{step}]", lambda t: t[index]),
            (f"[{d}: {start}:{stop}:{step}]", lambda t: t[index]),
            (f"select({d}, {start})", lambda t: t.select(d, start)),
            (f"permute({order})", lambda t: t.permute(order)),
            (f"unsqueeze({d})", lambda t: t.unsqueeze(d)),
            ("squeeze()", lambda t: t.squeeze()),
            ("view(-1)", lambda t: t.view(-1)),
            ("reshape(-1)", lambda t: t.reshape(-1)),
            (f"view({half})", lambda t: t.view(half)),
            ("diagonal()", lambda t: t.diagonal()),
            (f"unbind({d})[-1]", lambda t: t.unbind(d)[-1]),
            (f"split(2, {d})[0]", lambda t: t.split(2, d)[0]),
            (f"unfold({d}, 1, 1)", lambda t: t.unfold(d, 1, 1)),
            ("expand(2)", lambda t: t.expand(2, *t.shape)),
            ("detach()", lambda t: t.detach()),
            ("as_strided", lambda t: t.as_strided((2,), (1,), t.storage_offset())),
        ]
        name, view = r.choice(views)
        return f"t{k}.{name}", lambda pool: view(pool[k])

    def _made(self, pool: list[Tensor], k: int) -> tuple[str, Step] | None:
        j = self.random.randrange(len(pool))
        made: list[tuple[str, Step]] = [
            (f"t{k} * 2", lambda pool: pool[k] * 2),
            (f"t{k}.sigmoid()", lambda pool: pool[k].sigmoid()),
            (f"t{k} + t{j}", lambda pool: pool[k] + pool[j]),
            (f"t{k}.clone()", lambda pool: pool[k].clone()),
            (f"t{k}.contiguous()", lambda pool: pool[k].contiguous()),
            (f"cat([t{k}, t{k}])", lambda pool: torch.cat([pool[k], pool[k]])),
            (f"stack([t{k}])", lambda pool: torch.stack([pool[k]])),
            (f"t{k}.flip(0)", lambda pool: pool[k].flip(0)),
            (f"t{k}.mean(0)", lambda pool: pool[k].mean(0)),
            (f"empty_like(t{k}).copy_", lambda pool: torch.empty_like(pool[k]).copy_(pool[k])),
        ]
        return self.random.choice(made)

    def _update(self, pool: list[Tensor], k: int) -> tuple[str, Step] | None:
        t, r = pool[k], self.random
        if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
            return None  # which torch has no meaning for
        j = r.randrange(len(pool))
        d = r.randrange(t.dim()) if t.dim() else 0
        last = t.shape[d] - 1 if t.dim() else 0
        places = torch.tensor(r.sample(range(last + 1), r.randint(1, last + 1)))

        def put(pool: list[Tensor]) -> Tensor:
            pool[k][(*[slice(None)] * d, places)] = pool[j].mean() * 2
            return pool[k]

        def assigned(pool: list[Tensor]) -> Tensor:
            pool[k][(*[slice(None)] * d, slice(0, last))] = pool[j]
            return pool[k]

        def copied_by_index(pool: list[Tensor]) -> Tensor:
            value = pool[k].index_select(d, places) * 0.5
            return pool[k].index_copy_(d, places, value)

        updates: list[tuple[str, Step]] = [
            ("mul_(0.5)", lambda pool: pool[k].mul_(0.5)),
            (f"add_(t{j})", lambda pool: pool[k].add_(pool[j])),
            (f"add_(t{j}.mean())", lambda pool: pool[k].add_(pool[j].mean())),
            (f"copy_(t{j})", lambda pool: pool[k].copy_(pool[j])),
            (f"copy_(t{j}.flip(0))", lambda pool: pool[k].copy_(pool[j].flip(0))),
            ("copy_(own flip)", lambda pool: pool[k].copy_(pool[k].flip(0))),
            ("copy_(own T * 2)", lambda pool: pool[k].copy_(pool[k].mT.contiguous())),
            ("zero_()", lambda pool: pool[k].zero_()),
            ("fill_(3)", lambda pool: pool[k].fill_(3)),
            ("relu_()", lambda pool: pool[k].relu_()),
            ("tanh_()", lambda pool: pool[k].tanh_()),
            ("clamp_(-1, 1)", lambda pool: pool[k].clamp_(-1, 1)),
            ("masked_fill_(> 0)", lambda pool: pool[k].masked_fill_(pool[k] > 0, 0.25)),
            (f"index_fill_({d})", lambda pool: pool[k].index_fill_(d, places, 2.0)),
            (f"index_copy_({d})", copied_by_index),
            (f"[{d}: {places.tolist()}] = t{j}.mean() * 2", put),
            (f"[{d}: 0:{last}] = t{j}", assigned),
            ("t_()", lambda pool: pool[k].t_()),
            ("unsqueeze_(0)", lambda pool: pool[k].unsqueeze_(0)),
            ("squeeze_()", lambda pool: pool[k].squeeze_()),
        ]
        name, update = r.choice(updates)
        if (
            name.startswith(("masked_fill_", "index_copy_"))
            and t.stride() != torch.empty(t.shape).stride()
        ):
            return None  # The functional operators' results are dense, which AOTAutograd keeps.
        return f"t{k}.{name}", update

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        pool = list(inputs)
        for step in self.steps:
            pool.append(step(pool))
        return tuple(pool[k] for k in self.returned)

    def __str__(self) -> str:
        return "\n".join([f"{self.seed}: {self.layouts} {self.overlapping}", *self.text])
