"""Tensors that torch takes as numbers: shapes that depend on them are no constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import rnn

import magjit
from magjit.monitor.size_arguments import tensors_as_sizes

X = torch.arange(24.0).reshape(4, 6)

# Each gives a number, or a tensor, that is another one where ``t`` is 2 instead of 1.
PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda t: X[:t].sum(),
    "slice2": lambda t: X[t:].numel(),
    "slice step": lambda t: X[::t].numel(),
    "index": lambda t: X[t].sum(),
    "list idx": lambda t: [1, 5, 7, 9][t],
    "range": lambda t: len(range(t)),
    "view": lambda t: X.view(t * 2, -1).shape[0],
    "reshape": lambda t: X.reshape((t, -1)).shape[0],
    "ones": lambda t: torch.ones(t).sum(),
    "ones2": lambda t: torch.ones(t, 2).sum(),
    "arange": lambda t: torch.arange(t).numel(),
    "arange2": lambda t: torch.arange(0, t).sum(),
    "arange step": lambda t: torch.arange(0, 6, t).sum(),
    "linspace": lambda t: torch.linspace(0, 1, t).numel(),
    "eye": lambda t: torch.eye(t).sum(),
    "repeat": lambda t: X.repeat(t, 1).numel(),
    "expand": lambda t: torch.ones(1, 2).expand(t, 2).sum(),
    "unsqueeze": lambda t: X.unsqueeze(t).shape[1],
    "roll": lambda t: X.roll(t, 0)[0, 0],
    "roll dims": lambda t: X.roll(1, t - 1)[0, 0],
    "split": lambda t: X.split(t)[0].numel(),
    "chunk": lambda t: X.chunk(t)[0].numel(),
    "tensor_split": lambda t: torch.tensor_split(X, t)[0].numel(),
    "tensor_split2": lambda t: torch.tensor_split(X, t.reshape(1))[0].numel(),
    "pad": lambda t: F.pad(X, (t, 0)).numel(),
    "sum dim": lambda t: X.sum(t - 1).numel(),
    "sum dim2": lambda t: X.sum(dim=(t - 1,)).numel(),
    "topk": lambda t: X.topk(t).values.sum(),
    "kth": lambda t: X.kthvalue(t).values.sum(),
    "diag": lambda t: X.diagonal(t).sum(),
    "tril": lambda t: X.tril(t).sum(),
    "unfold": lambda t: X.unfold(0, t, 1).numel(),
    "interp sz": lambda t: F.interpolate(X[None, None], size=(t, t)).numel(),
    "narrow": lambda t: X.narrow(0, t, 1).sum(),
    "narrow len": lambda t: X.narrow(0, 0, t).sum(),
    "select": lambda t: X.select(0, t).sum(),
    "transpose": lambda t: torch.ones(2, 3, 4).transpose(0, t).shape[0],
    "permute": lambda t: torch.ones(2, 3, 4).permute(t, 0, 3 - t).shape[0],
    "flip": lambda t: X.flip(t - 1)[0, 0],
    "cat dim": lambda t: torch.cat([X, X], t - 1).shape[0],
    "stack dim": lambda t: torch.stack([X, X], t).shape[0],
    "softmax": lambda t: X.softmax(t - 1)[0, 0],
    "onehot": lambda t: F.one_hot(torch.tensor([0, 1]), t + 1).numel(),
    "avgpool": lambda t: F.avg_pool2d(X[None], t).numel(),
    "conv stride": lambda t: F.conv1d(X[None], torch.ones(1, 4, 2), stride=t).numel(),
    "conv pad": lambda t: F.conv1d(X[None], torch.ones(1, 4, 2), padding=t).numel(),
    "repeat_int": lambda t: X.repeat_interleave(t, 0).numel(),
    "repeat_int2": lambda t: torch.repeat_interleave(torch.ones(2), t.expand(2)).numel(),
    "bincount": lambda t: torch.bincount(torch.tensor([1, 2]), minlength=t + 3).numel(),
    "randperm": lambda t: torch.randperm(t).numel(),
    "tile": lambda t: X.tile((t,)).numel(),
    "broadcast": lambda t: torch.broadcast_to(torch.ones(1), (t,)).numel(),
    "new_zeros": lambda t: X.new_zeros(t).numel(),
    "new_full": lambda t: X.new_full((2,), t).sum(),
    "vander": lambda t: torch.vander(torch.ones(2), t).numel(),
    "cumsum": lambda t: X.cumsum(t - 1)[1, 1],
    "gather": lambda t: X.gather(1, t.reshape(1, 1)).sum(),
    "index_select": lambda t: X.index_select(0, t.reshape(1)).sum(),
    "unflatten": lambda t: X.unflatten(1, (t, -1)).shape[1],
    "movedim": lambda t: torch.ones(2, 3, 4).movedim(0, t).shape[0],
    "squeeze": lambda t: torch.ones(2, 1, 1).squeeze(t).dim() + 1,
    "flatten": lambda t: torch.ones(2, 3, 4, 5).flatten(t).dim(),
    "take": lambda t: X.take(t).sum(),
    "stft": lambda t: torch.stft(
        torch.ones(16), 4, hop_length=t, return_complex=True, window=torch.ones(4)
    ).numel(),
    "fft n": lambda t: torch.fft.fft(torch.ones(4), n=t + 2).numel(),
    "pack": lambda t: rnn.pack_padded_sequence(
        torch.ones(3, 2, 1), torch.stack([t, t])
    ).batch_sizes.numel(),
    "pack2": lambda t: rnn.pack_padded_sequence(
        torch.ones(3, 2, 1), torch.stack([t, t])
    ).data.sum(),
    "pack3": lambda t: rnn.pad_packed_sequence(
        rnn.pack_padded_sequence(torch.ones(3, 2, 1), torch.stack([t, t]))
    )[0].numel(),
    "embbag": lambda t: F.embedding_bag(torch.tensor([0, 1, 2]), X, torch.stack([t - t, t])).sum(),
    "sparse": lambda t: torch.sparse_coo_tensor(t.reshape(1, 1), torch.ones(1)).to_dense().numel(),
    "nested slice": lambda t: X[1 : t + 2, :t].numel(),
    "setitem": lambda t: (lambda y: (y.__setitem__(slice(0, t), 7.0), y.sum())[1])(X.clone()),
    "rot90": lambda t: X.rot90(t).shape[0] + X.rot90(t)[0, 0],
    "sort": lambda t: X.sort(dim=t - 1).values[0, 0],
    "argmax": lambda t: X.argmax(t - 1).numel(),
    "window": lambda t: torch.hann_window(t).numel(),
    "combos": lambda t: len(torch.combinations(torch.arange(4), t)),
    "masked_sel": lambda t: X.masked_select(X > t).numel(),
    "nonzero_static": lambda t: torch.nonzero_static(X, size=t).numel(),
    "logspace": lambda t: torch.logspace(0, 1, t).numel(),
    "trapz": lambda t: torch.diff(X, n=t).numel(),
    "constant_pad": lambda t: torch.constant_pad_nd(X, (t, t)).numel(),
    "scatter": lambda t: torch.zeros(4).scatter(0, t.reshape(1), 1.0).argmax(),
    "chunk cat": lambda t: torch.cat(X.chunk(t, 1)).shape[0],
    "meshgrid": lambda t: torch.meshgrid(torch.arange(t), torch.arange(2), indexing="ij")[
        0
    ].numel(),
    "multinomial": lambda t: torch.multinomial(torch.ones(4), t).numel(),
    "adaptive": lambda t: F.adaptive_avg_pool1d(X[None], t).numel(),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("numbers", [(1, 1, 2, 1, 2), (2, 2, 1, 2)], ids=["up", "down"])
def test_a_number_that_changes(name: str, numbers: tuple[int, ...]) -> None:
    read = PROGRAMS[name]

    def program(t: Tensor, y: Tensor) -> Tensor:
        return y * read(t)

    compiled = magjit.compile(program, backend="eager")
    for number in numbers:
        found = []
        for run in (compiled, program):
            torch.manual_seed(number)
            found.append(run(torch.tensor(number), torch.ones(2)))
        torch.testing.assert_close(*found)


def selected(x: Tensor) -> Tensor:
    found = x.nonzero().squeeze()
    return found if found.dim() else found[None]


ROWS: dict[str, Callable[[Tensor], Any]] = {
    "dimensions": lambda x: selected(x).sum() + selected(x).dim(),
    "iterated": lambda x: sum(value * 2 for value in x[x > 0]),
    "unbound": lambda x: torch.stack(x[x > 0].unbind()).sum(),
    "columns": lambda x: sum(torch.stack([x, x + 1], 1)[x > 0].unbind(1)).sum(),
    "split": lambda x: len(x[x > 0].split(1)) + 1,
    "up to": lambda x: torch.arange((x > 0).sum())[None].expand(2, -1).sum(),
    "length": lambda x: len(x[: (x > 0).sum()]) + 1,
    "offset": lambda x: x[(x > 0).sum() - 1 :].storage_offset() + 1,
}


@pytest.mark.parametrize("name", ROWS)
def test_a_shape_that_depends_on_data(name: str) -> None:
    read = ROWS[name]

    def program(x: Tensor, y: Tensor) -> Tensor:
        return y * read(x)

    compiled = magjit.compile(program, backend="eager")
    for values in ([1, 0, 1], [1, 0, 1], [1, 0, 0], [1, 1, 1], [0, 1, 0]):
        x = torch.tensor(values, dtype=torch.float32)
        torch.testing.assert_close(compiled(x, torch.ones(2)), program(x, torch.ones(2)))


def test_no_split_where_no_shape_is_read() -> None:
    def program(lengths: Tensor, y: Tensor) -> Tensor:
        mask = torch.arange(lengths.max())[None] < lengths[:, None]
        return y * mask.float().mean()

    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    for lengths in ([1, 2], [3, 1], [5, 5]):
        given = torch.tensor(lengths), torch.ones(2)
        torch.testing.assert_close(compiled(*given), program(*given))
    assert magjit.stats(compiled).captures == 1


def test_which_tensors_are_numbers() -> None:
    n, x = torch.tensor(2), torch.ones(2, 3)
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any], int]] = [
        ("arange", (n,), {}, 1),
        ("arange", (), {"end": n}, 1),
        ("view", (x, n, -1), {}, 1),
        ("reshape", (x, (n, -1)), {}, 1),
        ("narrow", (x, 0, n, 1), {}, 0),
        ("add", (x, n), {"alpha": n}, 0),
        ("index_select", (x, 0, n), {}, 0),
        ("__getitem__", (x, (slice(None, n), n)), {}, 1),
        ("interpolate", (x,), {"size": (n, n)}, 2),
        ("sum", (x, torch.tensor(1.0)), {}, 0),
        ("tensor", ([n, n],), {}, 0),
    ]
    for name, args, kwargs, count in cases:
        assert len(list(tensors_as_sizes(name, args, kwargs))) == count, (name, args, kwargs)
