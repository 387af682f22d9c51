"""More operators for random graphs: those that look up by position, or find one."""

from __future__ import annotations

import torch

from tests.dvm.random_graphs import Grower, Refused

aten = torch.ops.aten


def lookup(g: Grower) -> None:
    positions = g.pick(
        lambda one: one.tensor.dtype in (torch.int64, torch.int32) and one.tensor.numel() < 2000
    )
    size = g.add("abs", aten.abs.default, (positions,))
    # Other sizes than 1 are at least 2.
    small = g.add("clamp", aten.clamp.default, (size, 0, 6 if g.fixed else 1))
    table = g.input((7, g.random.choice((1, 4, 33))), torch.float32)
    if table.tensor.storage_offset() or small.tensor.dtype not in (torch.int64, torch.int32):
        raise Refused
    g.add("embedding", aten.embedding.default, (table, small))


def gather(g: Grower) -> None:
    a = g.pick(lambda one: one.tensor.dim() > 0 and one.tensor.numel() > 0)
    axis = g.random.randrange(a.tensor.dim())
    shape = list(a.tensor.shape)
    if g.fixed:
        shape[axis] = g.random.choice((1, shape[axis], 3))
    given = g.input(tuple(shape), torch.int64)
    size = g.add("abs", aten.abs.default, (given,))
    most = a.tensor.shape[axis] - 1 if g.fixed else min(a.tensor.shape[axis] - 1, 1)
    places = g.add("clamp", aten.clamp.default, (size, 0, most))
    g.add("gather", aten.gather.default, (a, axis, places), None, a.error)


def place(g: Grower) -> None:
    a = g.pick(lambda one: one.exact and one.tensor.dim() > 0)
    dim = g.random.randrange(-a.tensor.dim(), a.tensor.dim())
    target = g.random.choice((aten.argmax.default, aten.argmin.default))
    g.add("place", target, (a, dim, g.random.random() < 0.6))


OPERATORS = (lookup, gather, gather, place, place)
