"""Numbers that eager mode's dropout draws on a GPU, computed where they are used."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from magjit_dvm import drawing, reference
from magjit_dvm.drawing import dropout_mask, take_numbers
from magjit_dvm.fuser import fuse
from magjit_dvm.groups import FusedGroup
from magjit_dvm.instructions import DType
from magjit_dvm.lowering import decompositions
from magjit_dvm.philox import FOURS, uniforms
from magjit_dvm.program import Input, InputKind, Node, NodeKind, Program, drawn
from magjit_dvm.simplify import simplify
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.checking import BIG, check_words

aten = torch.ops.aten
F16, F32, BOOL = DType.F16, DType.F32, DType.BOOL
INT = Input(InputKind.INT, DType.I64)


def number(value: float) -> Node:
    return Node(NodeKind.CONSTANT, F32, number=value)


def dropped(rank: int = 2, normed: bool = False) -> Program:
    """x · mask / 0.9 and the mask; the mean of a row is taken away if it is normed."""
    dims = tuple(range(rank))
    nodes = [
        load(0, F16),
        cast(F32, 0),
        drawn(1, dims),
        number(0.9),
        compute("lt", BOOL, 2, 3),
        cast(F32, 4),
        compute("mul", F32, 1, 5),
        number(1 / 0.9),
        compute("mul", F32, 6, 7),
    ]
    if normed:
        nodes += [reduce("max", F32, 8, rank - 1), compute("sub", F32, 8, 9)]
    nodes.append(cast(F16, len(nodes) - 1))
    inputs = tensor(F16, *dims), INT, INT, INT
    outputs = output(len(nodes) - 1, *dims), output(4, *dims)
    return Program(rank, inputs, tuple(nodes), outputs)


def given(*shape: int, seed: int = 0x123456789ABCDEF, place: int = 5, shares: int = 0) -> list:
    x = torch.randn(*shape).half()
    return [x, seed, place, shares or (256 * 3) * FOURS + 2]


def test_known_blocks() -> None:
    """Of Random123's own answers (kat_vectors): counter and key of zeros, and of ones."""
    zeros = uniforms(np.arange(4), 0, 0, 256 * FOURS + 1)
    wanted = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    exact = np.array(wanted, np.float32) * np.float32(2**-32) + np.float32(2**-33)
    assert np.array_equal(zeros, exact.astype(np.float32))


@pytest.mark.parametrize("fours", [1, 2])
def test_each_element_has_a_number_of_its_own(fours: int) -> None:
    """As threads take turns: the same, one element after another."""
    threads, place, seed = 256, 7, -3
    every = uniforms(np.arange(8 * 256 * 9), seed, place, threads * FOURS + fours)
    assert len(np.unique(every)) > 0.99 * len(every)
    assert 0 < every.min() and every.max() <= 1 and abs(every.mean() - 0.5) < 0.01
    for element in (0, 3, 4, 7, 8, 4 * fours * threads, 4 * fours * threads + 5, 12345):
        thread = element // (4 * fours) % threads
        counter = place + element // (4 * fours) // threads * fours + element // 4 % fours
        # The first thread's numbers, from the generator's place for that.
        alone = uniforms(np.array([4 * thread + element % 4]), seed, counter, 10**6 * FOURS + 1)
        assert every[element] == alone[0]


@pytest.mark.parametrize("shape", [(4, 8), (3, 256), (5, 768), (40, 1024), (7, 5000), (300, 12)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("fours", [1, 2])
def test_words(shape: tuple[int, int], normed: bool, fours: int) -> None:
    arguments = given(*shape, shares=512 * FOURS + fours)
    image = check_words(dropped(normed=normed), arguments)
    assert image.each in (8, 16, 32)
    assert any(word.first == "lt.draw.f" for word in image.words)


def test_four_dimensions() -> None:
    check_words(dropped(4, normed=True), given(2, 3, 8, 20))
    check_words(dropped(3), given(2, 5, 64))


@pytest.mark.parametrize("cols", [1, 7, 161, 258, 1023, 3001])
@pytest.mark.parametrize("normed", [False, True])
def test_rows_that_do_not_begin_with_a_block(cols: int, normed: bool) -> None:
    check_words(dropped(normed=normed), given(9, cols))


@pytest.mark.parametrize(
    ("place", "shares"), [(-1, 1025), (1 << 31, 1025), (0, 1024), (0, 1027), (0, 2), (0, -7)]
)
def test_what_is_refused(place: int, shares: int) -> None:
    verdict = check_encoders(dropped(), given(8, 64, place=place, shares=shares), BIG)
    assert verdict == "refused: numbers that are drawn in another way"


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 62, -(1 << 63), (1 << 63) - 1, 0x80000000])
def test_seeds(seed: int) -> None:
    check_words(dropped(), given(4, 512, seed=seed, place=(1 << 31) - 1))


def test_another_order_is_refused() -> None:
    """What is drawn for a transposed tensor does not follow the order of the results."""
    program = dropped()
    turned = replace(program, outputs=tuple(output(one.node, 1, 0) for one in program.outputs))
    verdict = check_encoders(turned, given(64, 32), BIG)
    assert verdict == "refused: numbers that are drawn in another order"


def test_nothing_to_draw() -> None:
    assert check_encoders(dropped(), given(0, 64), BIG) == "encoded"


def test_the_reference_draws_in_order() -> None:
    x, *which = given(3, 4, 5)
    _, mask = reference.run(dropped(3), [x, *which])
    wanted = torch.from_numpy(uniforms(np.arange(60), *which)).view(3, 4, 5) < 0.9
    assert torch.equal(mask, wanted)


def test_a_cpu_does_not_draw() -> None:
    def fallback(*_: Any) -> str:
        return "by ATen"

    assert dropped().compiled(fallback)(*given(4, 8)) == "by ATen"


@pytest.mark.parametrize("change", ["twice", "inputs", "dims", "dtype"])
def test_malformed_draws(change: str) -> None:
    good = drawn(1, (0, 1))
    bad = {
        "twice": replace(good, number=0x11),
        "inputs": replace(good, aux=2),
        "dims": replace(good, dims=frozenset({0})),
        "dtype": replace(good, dtype=F16),
    }
    program = dropped()
    nodes = (*program.nodes[:2], bad[change], *program.nodes[3:])
    with pytest.raises(ValueError, match="drawn"):
        replace(program, nodes=nodes).verify()


# -- graphs --

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def graph_of(function: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> Any:
    """A graph of fake tensors on a GPU, simplified."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        gm = make_fx(function, decomposition_table=decompositions())(*tensors)
    gm.graph.eliminate_dead_code()
    simplify(gm.graph)
    gm.graph.lint()
    return gm.graph


def targets(graph: Any) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def residual(x: Any, w: Any, y: Any) -> Any:
    """As a transformer's layer has it."""
    return F.layer_norm(F.dropout(x @ w, 0.1) + y, (64,))


def attended(q: Any, k: Any, v: Any) -> Any:
    return F.dropout((q @ k.mT / 8).softmax(-1), 0.1) @ v


@without_gpu
def test_a_dropout_joins_the_group_around_it() -> None:
    graph = graph_of(residual, (2, 5, 64), (64, 64), (2, 5, 64))
    assert aten.native_dropout.default not in targets(graph)
    (group,) = fuse(graph).groups
    assert dropout_mask in [node.target for node in group.nodes]
    assert group.program is not None
    assert [node.kind for node in group.program.nodes].count(NodeKind.DRAW) == 1
    assert aten.native_layer_norm.default in [node.target for node in group.nodes]


@without_gpu
def test_probabilities_are_dropped_where_they_are_made() -> None:
    graph = graph_of(attended, (2, 3, 8, 16), (2, 3, 8, 16), (2, 3, 8, 16))
    (group,) = fuse(graph).groups
    assert {aten._softmax.default, dropout_mask} <= {node.target for node in group.nodes}
    taken = next(node for node in graph.nodes if node.target is take_numbers)
    assert aten.bmm.default in (taken.args[0].target, taken.args[0].args[0].target)


@without_gpu
def test_what_a_group_draws() -> None:
    """The results are those of its program's reference: kept where a number is small."""
    graph = graph_of(lambda x, w: F.dropout((x @ w).relu(), 0.25), (6, 16), (16, 8))
    (group,) = fuse(graph).groups
    assert group.program is not None
    product, numbers = torch.rand(6, 8).half() + 1, [77, 12, 256 * FOURS + 2]
    arguments = [product, *numbers]
    made, *_ = reference.run(group.program, arguments)
    kept = torch.from_numpy(uniforms(np.arange(48), *numbers)).view(6, 8) < 0.75
    expected = product.float() * kept * float(np.float32(1 / 0.75))
    assert torch.equal(made, expected.half())


@without_gpu
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.dropout(x, 0.5) * 2,  # an input: it may lie anywhere
        lambda x, w: F.dropout(x.split(16)[0], 0.5) * 2,  # one of the parts of one
        lambda x, w: F.dropout((x @ w).t() * 2, 0.5),  # not contiguous
        lambda x, w: (
            F.dropout(aten.slice.Tensor(x @ w, 0, 1), 0.5) * 2
        ),  # not where its memory begins
        lambda x, w: F.dropout(x @ w, 0.5, training=False) * 2,
        lambda x, w: F.dropout(x @ w, 0.0) * 2,
        lambda x, w: F.dropout((x.exp() + w) * 2, 1.0),
    ],
)
def test_what_aten_draws(function: Any) -> None:
    assert dropout_mask not in targets(graph_of(function, (16, 16), (16, 16)))


@without_gpu
def test_all_that_draws_keeps_its_order() -> None:
    def several(x: Any, w: Any) -> Any:
        first = F.dropout(x @ w, 0.1)
        second = torch.rand_like(x)
        third = F.dropout((x * 2) @ w, 0.1)
        return first * third + second

    graph = graph_of(several, (8, 16), (16, 16))
    order = [step for step in fuse(graph).steps]
    draws: list[Any] = []
    for step in order:
        nodes = step.nodes if isinstance(step, FusedGroup) else [step]
        draws += [node for node in nodes if torch.Tag.nondeterministic_seeded in tags_of(node)]
    position = {node: k for k, node in enumerate(graph.nodes)}
    assert [position[node] for node in draws] == sorted(position[node] for node in draws)
    assert len(draws) == 5


def tags_of(node: Any) -> Any:
    return getattr(node.target, "tags", ())


@without_gpu
def test_large_tensors_are_atens() -> None:
    """A group draws more slowly, and the launch that it saves is little beside that."""
    for rows, taken in ((4096, True), (4097, False)):
        graph = graph_of(lambda x, w: F.dropout((x @ w).relu(), 0.1), (rows, 16), (16, 256))
        assert (dropout_mask in targets(graph)) is taken


@without_gpu
def test_a_share_that_each_call_passes() -> None:
    graph = graph_of(lambda x, w: F.dropout(x @ w, 0.1), (4, 16), (16, 16))
    assert dropout_mask in targets(graph)
    gm = make_share_an_input()
    simplify(gm.graph)
    assert aten.native_dropout.default in targets(gm.graph)


def make_share_an_input() -> torch.fx.GraphModule:
    """The share of a dropout is a placeholder."""
    graph = torch.fx.Graph()
    x, p = graph.placeholder("x"), graph.placeholder("p")
    with FakeTensorMode():
        value = torch.empty(4, 16, dtype=torch.float16, device="cuda")
        mask = torch.empty(4, 16, dtype=torch.bool, device="cuda")
    x.meta["val"], p.meta["val"] = value, 0.5
    relu = graph.call_function(aten.relu.default, (x,))
    drop = graph.call_function(aten.native_dropout.default, (relu, p, True))
    first = graph.call_function(operator.getitem, (drop, 0))
    relu.meta["val"] = first.meta["val"] = value
    drop.meta["val"] = value, mask
    graph.output((first,))
    return torch.fx.GraphModule({}, graph)


# -- the generator --


class Generator:
    """Of a GPU that has few threads, as ``torch.cuda.default_generators`` has it."""

    multi_processor_count, max_threads_per_multi_processor = 1, 512

    def __init__(self, monkeypatch: pytest.MonkeyPatch, off_by: int = 0) -> None:
        self.offset, self.off_by = 40, off_by
        monkeypatch.setattr(torch.cuda, "default_generators", (self,))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: self)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(drawing, "_by_aten", self.mask)
        for name in ("_agrees", "_most_blocks"):
            asked = getattr(drawing, name).__wrapped__
            monkeypatch.setattr(drawing, name, functools.cache(asked))

    def initial_seed(self) -> int:
        return (1 << 64) - 5

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def mask(self, shape: Any, p: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As the kernel of eager mode draws it, thread by thread."""
        count = torch.Size(shape).numel()
        size, kept = dtype.itemsize, np.zeros(count, bool)
        together = next(n for n in (16 // size, 8 // size) if n >= 4 and count % n == 0)
        threads = 256 * min(2, -(-count // 256))
        for thread in range(threads):
            state = self.offset // 4 + self.off_by
            for first in range(thread * together, count, threads * together):
                for fours in range(first, first + together, 4):
                    # One block of the thread's: as if there were as many threads as blocks.
                    block = uniforms(4 * thread + np.arange(4), -5, state, (1 << 28) * FOURS + 1)
                    kept[fours : fours + 4] = block < np.float32(1 - p)
                    state += 1
        self.offset += ((count - 1) // (threads * 4) + 1) * 4
        return torch.from_numpy(kept).view(shape)


def test_numbers_are_taken_as_eager_mode_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(monkeypatch)
    like = FakeTensor(FakeTensorMode(), torch.empty(5, 8, device="meta"), torch.device("cuda:0"))
    taken = take_numbers(like, 2)
    assert taken == (-5, 10, 256 * FOURS + 2) and generator.offset == 44
    assert take_numbers(like, 4) == (-5, 11, 256 * FOURS + 1)


def test_large_tensors_take_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(monkeypatch)
    like = FakeTensor(FakeTensorMode(), torch.empty(9000, device="meta"), torch.device("cuda:0"))
    assert take_numbers(like, 2) == (-5, 10, 512 * FOURS + 2)
    assert generator.offset == 40 + 4 * 5


@pytest.mark.parametrize("count", [0, 1, 6, 161])
def test_numbers_of_elements_of_other_kernels(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(monkeypatch)
    like = FakeTensor(FakeTensorMode(), torch.empty(count, device="meta"), torch.device("cuda:0"))
    assert take_numbers(like, 2)[1] == -1 and generator.offset == 40


def test_a_torch_that_draws_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(monkeypatch, off_by=1)
    like = FakeTensor(FakeTensorMode(), torch.empty(5, 8, device="meta"), torch.device("cuda:0"))
    assert take_numbers(like, 2)[1] == -1 and generator.offset == 40


def test_a_mask_operator_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn where its numbers were taken, which leaves the generator as it is."""
    generator = Generator(monkeypatch)
    like = FakeTensor(FakeTensorMode(), torch.empty(5, 8, device="meta"), torch.device("cuda:0"))
    taken = take_numbers(like, 2)
    generator.offset = 400
    mask = dropout_mask(like, 0.25, torch.float16, *taken)
    wanted = uniforms(np.arange(40), *taken).reshape(5, 8) < np.float32(0.75)
    assert torch.equal(mask, torch.from_numpy(wanted)) and generator.offset == 400
    dropout_mask(like, 0.25, torch.float16, 0, -1, 0)
    assert generator.offset == 404
