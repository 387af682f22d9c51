"""Updated inputs: in place where that is legal, and right where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.triton_backend.running import compiled, run_beside_eager

aten = torch.ops.aten


def into_cache(cache: Tensor, x: Tensor) -> Tensor:
    cache[:, 2:4] = x * 2
    return cache.sum(1)


def nested(cache: Tensor, x: Tensor) -> Tensor:
    cache[1, 2:4, :3] = x[0, :, :3] + 1
    return cache @ cache.transpose(1, 2)


def by_index(cache: Tensor, x: Tensor) -> Tensor:
    cache.index_copy_(1, torch.tensor([3, 0]), x.exp())
    cache[:, torch.tensor([1])] = x[:, :1]
    return cache * 2


def twice(cache: Tensor, x: Tensor) -> Tensor:
    cache[:, 0:2] = x
    first = cache.mean()
    cache[:, 1:3] = x + first
    return cache.clone()


LEGAL = [into_cache, nested, by_index, twice]


@pytest.mark.parametrize("function", LEGAL, ids=lambda one: one.__name__)
def test_done_in_place(function: Callable[..., Tensor]) -> None:
    (graph,) = run_beside_eager(function, (torch.randn(2, 5, 4), torch.randn(2, 2, 4)))
    functional = {
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.index_copy.default,
        aten.index_put.default,
        aten.copy.default,
    }
    assert functional.isdisjoint(graph.meta["targets"])


def old_read_later(cache: Tensor, x: Tensor) -> Tensor:
    old = cache * 1
    view = cache[:, 1:3]
    before = view.clone()
    cache[:, 2:4] = x
    return old + before.sum() + cache


def old_view_kept(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    copied = cache[:, 1:3].transpose(1, 2).contiguous()
    cache[:, 2:4] = x
    return copied @ x, copied


def shifted(cache: Tensor, x: Tensor) -> Tensor:
    cache[:, 1:] = cache[:, :-1].clone()
    cache[:, :1] = x[:, :1]
    return cache.sum(0)


def swapped(cache: Tensor, x: Tensor) -> Tensor:
    head, tail = cache[:, :2].clone(), cache[:, 2:4].clone()
    cache[:, :2] = tail
    cache[:, 2:4] = head
    return x @ head.transpose(1, 2)


def returned_old(cache: Tensor, x: Tensor) -> Tensor:
    new = cache.index_copy(1, torch.tensor([0, 1]), x)
    cache.copy_(new)
    return new


def views_of_one(cache: Tensor, x: Tensor) -> Tensor:
    a, b = cache[:, :3], cache[:, 2:]
    a[:, :2] += x
    b.mul_(2)
    return a.sum() + b.mean()


def from_itself(cache: Tensor, x: Tensor) -> Tensor:
    cache[:, :, :1] = cache[:, 1:4].flatten()[0]
    return cache + 1


CAREFUL = [from_itself, old_read_later, old_view_kept, shifted, swapped, returned_old, views_of_one]


@pytest.mark.parametrize("function", CAREFUL, ids=lambda one: one.__name__)
def test_right_where_the_old_value_matters(function: Callable[..., Tensor]) -> None:
    run_beside_eager(function, (torch.randn(2, 5, 4), torch.randn(2, 2, 4)), tolerance=1e-6)


def test_overlapping_inputs() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        a[:2] = b[:2] + 1
        return a.sum() + b.clone().sum()

    def overlapping() -> tuple[Tensor, Tensor]:
        base = torch.arange(6.0)
        return base[:4], base[2:]

    eager, ours = overlapping(), overlapping()
    call = compiled(function)
    with torch.no_grad():
        call(*overlapping())
        assert torch.equal(function(*eager), call(*ours))
    assert torch.equal(eager[0], ours[0]) and torch.equal(eager[1], ours[1])


def test_outputs_do_not_share_memory_that_they_do_not_share_in_eager_mode() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return y, y.clone(), y.view(-1), torch.cat([y, y.cos()])

    call = compiled(function)
    x = torch.randn(3, 4)
    with torch.no_grad():
        call(x)
        y, copied, view, joined = call(x)
    assert y.data_ptr() == view.data_ptr()
    assert len({one.untyped_storage().data_ptr() for one in (y, copied, joined)}) == 3


def test_no_copies_in_grouped_attention_with_a_cache() -> None:
    def function(q: Tensor, k: Tensor, cache: Tensor) -> Tensor:
        cache[:, :, 3:4] = k
        keys = cache[:, :, None].expand(-1, -1, 4, -1, -1).reshape(2, 8, 16, 8)
        return F.scaled_dot_product_attention(q, keys, keys)

    arguments = (torch.randn(2, 8, 1, 8), torch.randn(2, 2, 1, 8), torch.randn(2, 2, 16, 8))
    (graph,) = run_beside_eager(function, arguments)
    assert graph.meta["copies"] == ["copy__default"], "only the new key goes into the cache"
