"""Programs in which a size depends on data, and what such sizes come to."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

import magjit

COUNTS = [(4, 4), (4, 1), (1, 4), (4, 2), (3, 3), (1, 1), (0, 0), (0, 1), (2, 2), (4, 4)]
"""How many elements two masks take, call after call."""
LENGTH = 30


def two_masks(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    y = torch.tanh(x * 2) + 1
    return torch.relu(y[m > 0] + y[n > 0]) * 2


def rows(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    y = (x.view(10, 3) * 2 + 1).sigmoid()
    return torch.relu(y[m[:10] > 0] * y[n[:10] > 0]) * 2


def beside_known_sizes(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return torch.relu(x[m > 0] + x[:4]) * 2


def outer(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    y = x.exp() * 3 - 1
    return torch.relu(y[m > 0][None, :] @ y[n > 0][:, None])


def chosen(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return torch.where(x[m > 0] > 0, x[n > 0], 1.0) * 2


def added_in_place(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    y = x[m > 0] * 2
    y += x[n > 0]
    return y


def written_behind(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Memory that compiled operators have made is written by those behind them."""
    y = (x * 2 + 1).neg().view(5, 6).t()
    z = y * 3
    first = z[1]
    first[m[:5] > 0] = z[0, :4][n[:4] > 0] * 2
    y[2:].add_(z[:4])
    return y.sum() + z


def viewed(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return ((x.exp() + 1).neg()[m > 0].view(2, -1) + 1).relu()


def joined(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return torch.cat([x[m > 0].view(1, -1), x[n > 0].view(1, -1)]) * 2


def by_positions(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    found = (x * 2).sigmoid().neg().view(6, 5)
    return found[(m[:6] > 0).nonzero()[:, 0], (n[:5] > 0).nonzero()[:, 0]].tanh() * 2


def assigned(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    y = x.clone()
    y[m > 0] = x[n > 0] * 2
    return y


def expanded(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return (x[m > 0].unsqueeze(0).expand(3, -1) + x[n > 0]).exp()


def losses(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    y = (x.view(10, 3) * 2 + 1).log_softmax(1)
    return (y[m[:10] > 0] - y[n[:10] > 0].detach()).square().mean() + y.mean()


def unique(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    values, counts = torch.unique(m + 2 * n, return_counts=True)
    return values * 2 + counts.float() / counts.sum() + x.sum()


def selected(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    first, _ = torch.sort(x * 2 + 1)
    return first.masked_select(m > 0).sigmoid().sum() + first.neg()


def means(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """A loop whose symbols AOTAutograd forgot: twice as many sizes as masks."""
    y = torch.tanh(x.view(2, 3, 5))
    out = y.clone()
    for k in range(2):
        at = (m.view(2, 3, 5)[k : k + 1] == 1).nonzero()
        found = y[at[:, 0] + k, at[:, 1], at[:, 2]]
        out[at[:, 0] + k, at[:, 1], at[:, 2]] = found.mean().expand_as(found)
    return out


PROGRAMS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    *(two_masks, rows, beside_known_sizes, outer, chosen, added_in_place, written_behind, viewed),
    *(joined, by_positions, assigned, expanded, losses, unique, selected, means),
]


def mask(count: int, among: int, device: str = "cpu") -> Tensor:
    """Int64, of as many ones."""
    made = torch.zeros(LENGTH, dtype=torch.int64)
    made[torch.randperm(among)[:count]] = 1
    return made.to(device)


def outcome(function: Callable[..., Any], x: Tensor, *masks: Tensor) -> Any:
    """The result and, where there is one, x's gradient; or what was raised."""
    try:
        result = function(x, *masks)
        if result.requires_grad:
            result.sum().backward()
    except Exception as error:
        return type(error)
    return result.detach(), x.grad


def check(
    program: Callable[..., Tensor],
    backend: Any,
    first: tuple[int, int] = (4, 4),
    device: str = "cpu",
) -> None:
    """Call after call, with sizes that a call before did not have, as in eager mode."""
    among = 5 if program is by_positions else 10
    for grad in (False, True):
        compiled = magjit.compile(program, backend=backend)
        for seed, counts in enumerate([first, *COUNTS]):
            torch.manual_seed(seed)
            x = torch.randn(LENGTH)
            masks = [mask(count, among, device) for count in counts]
            wanted, found = (
                outcome(one, x.clone().to(device).requires_grad_(grad), *masks)
                for one in (program, compiled)
            )
            where = f"{program.__name__} of {counts} after {first}, gradients: {grad}"
            if isinstance(wanted, type):
                assert found is wanted, where
            else:
                assert not isinstance(found, type), f"{where}: {found}"
                torch.testing.assert_close(
                    found, wanted, equal_nan=True, msg=lambda m, w=where: f"{w}: {m}"
                )


FIRST = list(product([1, 4], [1, 4]))
