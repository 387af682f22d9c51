"""Which look-ups a graph on a GPU has its groups do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from magjit_dvm.fuser import fuse
from magjit_dvm.groups import Fusion
from magjit_dvm.lowering import decompositions
from magjit_dvm.program import NodeKind, Program

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
aten = torch.ops.aten
LONG = torch.int64


def fusion_of(function: Any, *given: tuple[tuple[int, ...], torch.dtype]) -> Fusion:
    """What is made of a function of fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in given]
        graph = make_fx(function, decomposition_table=decompositions())(*tensors)
    graph.graph.eliminate_dead_code()
    return fuse(graph.graph)


def kinds(fusion: Fusion) -> list[set[NodeKind]]:
    """Of the nodes of each group's program."""
    return [kinds_of(one.program) for one in fusion.groups if one.program]


def kinds_of(program: Program) -> set[NodeKind]:
    return {node.kind for node in program.nodes}


def test_embeddings_join_a_norm() -> None:
    def embedded(words: Any, places: Any, ids: Any, at: Any) -> Any:
        return F.layer_norm(F.embedding(ids, words) + F.embedding(at, places), (64,))

    half = torch.float16
    tables = ((50, 64), half), ((20, 64), half)
    fusion = fusion_of(embedded, *tables, ((2, 10), LONG), ((10,), LONG))
    (group,) = fusion.groups
    assert group.program is not None and not fusion.reasons
    assert sum(node.kind is NodeKind.INDEX for node in group.program.nodes) == 2


def test_a_look_up_alone_is_atens() -> None:
    fusion = fusion_of(lambda t, i: F.embedding(i, t), ((50, 64), torch.float32), ((9,), LONG))
    assert not fusion.groups
    fusion = fusion_of(lambda x, i: x.gather(1, i), ((5, 9), torch.float32), ((5, 4), LONG))
    assert not fusion.groups


def test_look_ups_of_one_element() -> None:
    def one(x: Any, i: Any) -> Any:
        return x.gather(1, i).view(()) * 2

    (group,) = fusion_of(one, ((1, 9), torch.float32), ((1, 1), LONG)).groups
    assert group.program is not None and NodeKind.INDEX in kinds_of(group.program)


def test_a_look_up_that_would_be_repeated_is_made_once() -> None:
    """Biases of relative places: of each pair of them, the same in all of the batch."""

    def scored(scores: Any, table: Any, buckets: Any) -> Any:
        bias = F.embedding(buckets, table).permute(2, 0, 1)
        return ((scores + bias) * 2).softmax(-1), (scores - bias).exp()

    given = ((3, 4, 8, 8), torch.float32), ((32, 4), torch.float32), ((8, 8), LONG)
    fusion = fusion_of(scored, *given)
    assert fusion.groups and not any(NodeKind.INDEX in one for one in kinds(fusion))
    fusion = fusion_of(scored, ((4, 8, 8), torch.float32), *given[1:])
    assert any(NodeKind.INDEX in one for one in kinds(fusion)), "nothing is repeated"


def test_places_that_a_batch_shares_are_rows() -> None:
    """Rows of a table lie side by side: that they are read again costs little."""

    def placed(x: Any, table: Any, at: Any) -> Any:
        return (x + F.embedding(at, table)).relu()

    fusion = fusion_of(
        placed, ((3, 10, 64), torch.float32), ((20, 64), torch.float32), ((10,), LONG)
    )
    (group,) = fusion.groups
    assert group.program is not None
    assert any(node.kind is NodeKind.INDEX for node in group.program.nodes)


def test_losses_and_their_gradients() -> None:
    """The class that is right is looked up where the logarithms are made; no table is written."""

    def loss(x: Any, classes: Any) -> Any:
        return F.cross_entropy(x, classes, reduction="none")

    fusion = fusion_of(loss, ((30, 100), torch.float32), ((30,), LONG))
    (group,) = fusion.groups
    assert group.program is not None and len(group.program.outputs) == 1

    def gradient(dy: Any, x: Any, classes: Any, total: Any) -> Any:
        return aten.nll_loss_backward(dy, x, classes, None, 1, -100, total) * 2

    fusion = fusion_of(
        gradient,
        *(((), torch.float32), ((30, 100), torch.float32), ((30,), LONG), ((), torch.float32)),
    )
    assert any(NodeKind.IOTA in one for one in kinds(fusion))


def test_int64_that_may_be_large_is_atens() -> None:
    """Of ids that are computed with, 32 bits would not do; of ids that are compared they do."""

    def shifted(ids: Any, x: Any) -> Any:
        return ((ids + 1) * 3), x * (ids != 0)

    fusion = fusion_of(shifted, ((5, 9), LONG), ((5, 9), torch.float32))
    assert "an int64 that may need more than 32 bits" in fusion.reasons.values()
    (group,) = fusion.groups
    assert {node.target for node in group.nodes} >= {aten.ne.Scalar, aten.mul.Tensor}
