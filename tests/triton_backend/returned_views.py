"""Programs that return views: of inputs, of what they compute, of each other, and none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["VIEWS", "arguments", "memory", "run_beside_eager"]

Function = Callable[[Tensor, Tensor], Any]


def _several(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x * 2
    return a[1:], a[:, ::2], a, a.t(), a.clone(), a.contiguous(), a.t().contiguous()


def _in_place(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x * 1
    return a.mul_(2), a[1:].add_(1), a.t()


def _inputs_changed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x[1:].mul_(2), x.t(), y.add_(x)[::2], x.diagonal()


def _bits(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x * 2
    return a[::2].view(torch.int32), a[1:]


def _copied_into(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = (x * 2).t()
    return a.copy_(y), a[1:], (y * 3)[:2].copy_(x[2:])


def _parts_of_a_product(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x @ y)[::2], (x @ y).t().diagonal(), (x.mm(y) + 1)[:, 1]


def _moments(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    variance, mean = torch.var_mean(x, 0, keepdim=True)
    return variance.expand(4, 4), mean[:, ::2], x.sum(1)[::2]


def _bytes(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    complex_ = torch.view_as_complex((x * 2).view(4, 2, 2))
    return complex_[1:], torch.view_as_real(complex_)[:, 0]


def _memory_of_that_name(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    place = torch.empty_strided((4, 4), (1, 4))
    place.copy_(x)
    return place, (y * 2).as_strided((2, 2), (4, 1), 3), (place * 2).exp()


def _normalised(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    mean, variance = torch.zeros(4), torch.ones(4)
    return F.batch_norm(x.t(), mean, variance), torch.xlogy(x.t().exp(), y.exp())


VIEWS: dict[str, Function] = {
    "diagonal": lambda x, y: (x * 2).diagonal(),
    "every second row": lambda x, y: (x * 2)[::2],
    "expanded": lambda x, y: (x + 1)[:1].expand(4, 4),
    "several": _several,
    "views of what is not returned": lambda x, y: (lambda a: (a[1:], a[:-1]))(x * 2),
    "unfolded": lambda x, y: (x * 2).unfold(0, 2, 1),
    "split": lambda x, y: x.exp().split(2, 1),
    "unbound": lambda x, y: x.exp().unbind(0)[1],
    "moments": _moments,
    "products": _parts_of_a_product,
    "no elements": lambda x, y: ((x * 2)[:0].t(), (x * 2)[:, :0] + 1, (x + y)[4:].t()),
    "nothing shuffled": lambda x, y: F.pixel_shuffle((x * 2)[:0].reshape(0, 4, 2, 2), 2),
    "nothing joined": lambda x, y: torch.cat([x[:0].t(), y[:0].t() * 2]),
    "inputs": lambda x, y: (x[::2], y.t(), x.diagonal(), x),
    "inputs changed": _inputs_changed,
    "copies of views": lambda x, y: ((x * 2).t().reshape(16), (x * 2).t().contiguous()[::2]),
    "other bits": _bits,
    "complex": _bytes,
    "in place": _in_place,
    "copied into": _copied_into,
    "size one": lambda x, y: ((x * 2)[:, None], (x * 2)[:1].squeeze(), x.sum(1, True).squeeze(1)),
    "chain": lambda x, y: (x * 2).view(2, 2, 4).transpose(0, 2)[1:, :, 1].expand(3, 2),
    "merged": lambda x, y: ((x * 2).view(2, 8)[:, 2:6].view(2, 2, 2), (x * 2)[:, :2].reshape(8)),
    "scattered": lambda x, y: torch.slice_scatter(x, y[:2], 0, 1, 3)[::2],
    "scattered into a part": lambda x, y: torch.select_scatter(x[:, ::2], y[0, :2], 0, 1),
    "memory of that name": _memory_of_that_name,
    "normalised": _normalised,
}
"""Name → program of two 4×4 tensors."""


def arguments() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4)


def memory(tensors: Sequence[Tensor]) -> list[Any]:
    """Sizes, strides and offset of each, and the first of them whose memory it is in."""
    owners = [
        one.untyped_storage().data_ptr() if one.untyped_storage().nbytes() else -number
        for number, one in enumerate(tensors)
    ]
    return [
        (tuple(one.shape), one.stride(), one.storage_offset(), owners.index(owner))
        for one, owner in zip(tensors, owners, strict=True)
    ]


def run_beside_eager(function: Function, compiled: Function) -> None:
    """Two calls: values and places of results, and the arguments afterwards, are eager's."""
    for _ in range(2):
        eager = arguments()
        given = [one.clone() for one in eager]
        expected, actual = function(*eager), compiled(*given)
        ones = [expected] if isinstance(expected, Tensor) else list(expected)
        others = [actual] if isinstance(actual, Tensor) else list(actual)
        assert memory([*given, *others]) == memory([*eager, *ones])
        for one, other in zip([*given, *others], [*eager, *ones], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
