"""Gradients of norms in one word, and those of their weights, in the simulator and by PTX."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.adders import NONE
from magjit_dvm.cuda.encode import Machine
from magjit_dvm.cuda.forms import ADDING, GRADIENTS, SUMMING, form_of
from magjit_dvm.cuda.plan import LEAST_TILES
from magjit_dvm.cuda.words import NO_WORD, Image, Word
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from magjit_dvm.vm import NotEncodable
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.test_sums import across

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
ONE, FEW = Machine(multiprocessors=1), Machine(multiprocessors=3)


class Gradient:
    """A program: the gradient of a norm's input, of rows of a matrix, and what is beside it.

    Attributes:
        dy, x, mean, rstd, weight: the inputs, by their numbers.
        gradient, norm, total, result: nodes.
    """

    def __init__(
        self,
        dtype: DType,
        centered: bool,
        weighted: bool,
        cols: int,
        divides: bool = False,
        doubled: bool = False,
        other_share: bool = False,
        added: bool = False,
    ) -> None:
        self.inputs = [tensor(dtype, 0, 1), tensor(dtype, 0, 1), tensor(F32, 0), tensor(F32, 0)]
        self.inputs += [tensor(dtype, 1)] * weighted
        self.nodes: list[Node] = []
        self.dtype, self.centered = dtype, centered
        self.dy, x = (self.put(cast(F32, self.put(load(k, dtype)))) for k in range(2))
        if doubled:
            self.dy = self.put(compute("add", F32, self.dy, self.dy))
        rstd = self.put(load(3, F32))
        away = self.put(compute("sub", F32, x, self.put(load(2, F32)))) if centered else x
        self.norm = self.put(compute("mul", F32, away, rstd))
        self.gradient = self.dy
        if weighted:
            weight = self.put(cast(F32, self.put(load(4, dtype))))
            self.gradient = self.put(compute("mul", F32, self.dy, weight))
        number = Node(NodeKind.CONSTANT, F32, number=float(cols) if divides else 1.0 / cols)
        share, by = self.put(number), "div" if divides else "mul"
        rest = self.gradient
        if centered:
            self.total = self.put(reduce("sum", F32, self.gradient, 1))
            rest = self.put(
                compute("sub", F32, rest, self.put(compute(by, F32, self.total, share)))
            )
        if other_share:
            share = self.put(Node(NodeKind.CONSTANT, F32, number=0.5))
        product = self.put(compute("mul", F32, self.gradient, self.norm))
        self.product = self.put(reduce("sum", F32, product, 1))
        taken = compute("mul", F32, self.norm, self.put(compute(by, F32, self.product, share)))
        inner = self.put(compute("sub", F32, rest, self.put(taken)))
        self.result = self.put(compute("mul", F32, inner, rstd))
        stored = self.put(compute("add", F32, self.result, self.dy)) if added else self.result
        self.outputs = [output(self.put(cast(dtype, stored)), 0, 1)]

    def put(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def with_sums(self) -> Gradient:
        """Those of the weight and of the bias."""
        moved = self.put(compute("mul", F32, self.norm, self.dy))
        for one in (moved, self.dy):
            total = self.put(across(one, 0))
            self.outputs.append(output(self.put(cast(self.dtype, total)), 1))
        return self

    def with_sum(self) -> Gradient:
        """That of the weight alone."""
        moved = self.put(compute("mul", F32, self.norm, self.dy))
        self.outputs.append(output(self.put(across(moved, 0)), 1))
        return self

    def program(self) -> Program:
        return Program(2, tuple(self.inputs), tuple(self.nodes), tuple(self.outputs))

    def arguments(self, *sizes: int) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(sum(sizes))
        drawn = [
            torch.randn([sizes[d] for d in one.dims], generator=made).to(one.dtype.torch)
            for one in self.inputs
        ]
        drawn[3] = drawn[3].abs() + 0.5
        return drawn

    def run(self, rows: int, cols: int, machine: Machine = FEW) -> Image:
        image = check_words(self.program(), self.arguments(rows, cols), machine)
        assert image is not None
        return image


def firsts(image: Image) -> list[str]:
    """The words of a row."""
    names = [one.first for one in image.words]
    return names[: names.index("end")]


def backs(image: Image) -> list[Word]:
    return [one for one in image.words if one.first == "row.f.back"]


SHAPES = ((5, 256), (4, 300), (3, 1030), (2, 5000), (2, 40), (3, 33))
"""A warp a row and several, one with a tail, elements that no four are aligned of."""


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_of_inputs(shape: tuple[int, int], centered: bool, weighted: bool, way: str) -> None:
    image = Gradient(F16, centered, weighted, shape[1]).run(*shape)
    assert len(backs(image)) == 1 and image.scratch == 0
    assert not any(one.startswith(("row.f.sum", "mad", "nmad")) for one in firsts(image))


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(7, 256), (4, 1032), (2, 4000)])
def test_of_weights(shape: tuple[int, int], centered: bool, dtype: DType, way: str) -> None:
    image = Gradient(dtype, centered, True, shape[1]).with_sums().run(*shape)
    assert firsts(image).count("acc.norm") == 1 and "acc" not in firsts(image)
    assert len(backs(image)) == 1 and image.scratch == 2


@pytest.mark.parametrize("shape", [(20, 512), (18, 768), (18, 700), (20, 1024)])
def test_of_weights_in_many_rows(shape: tuple[int, int], way: str) -> None:
    """All R that sums may have but the smallest."""
    image = Gradient(F16, True, True, shape[1]).with_sums().run(*shape, ONE)
    assert len(backs(image)) == 1 and image.each == {512: 16, 1024: 32}.get(shape[1], 24)


@pytest.mark.parametrize("centered", [False, True])
def test_a_tile_is_normalized_once(centered: bool, way: str) -> None:
    """Where the weight is kept, so that T stays."""
    image = Gradient(F16, centered, True, 260).with_sums().run(80, 260, ONE)
    assert image.prologue != NO_WORD
    words = firsts(image)
    at = words.index("acc.norm")
    assert words[at - 1 : at + 3] == ["lt.s.f16", "acc.norm", "w.scale", "row.f.back"]
    assert backs(image)[0].w3 == 2 + centered


def test_by_division() -> None:
    image = Gradient(F16, True, True, 300, divides=True).run(6, 300)
    assert len(backs(image)) == 1


def test_a_gradient_that_is_computed() -> None:
    """It may be a result itself."""
    one = Gradient(F16, True, False, 300, doubled=True)
    one.outputs.append(output(one.put(cast(F16, one.dy)), 0, 1))
    image = one.run(6, 300)
    assert len(backs(image)) == 1


def test_a_gradient_that_others_need() -> None:
    one = Gradient(F16, True, False, 300)
    again = one.put(compute("mul", F32, one.result, one.dy))
    one.outputs.append(output(one.put(cast(F16, again)), 0, 1))
    assert len(backs(one.run(6, 300))) == 1


@pytest.mark.parametrize("asked", ["total", "product", "norm", "gradient"])
def test_what_others_ask_for(asked: str) -> None:
    """A sum that is a result is computed by itself; tiles may be asked for by others."""
    one = Gradient(F16, True, True, 300)
    of_row = asked in ("total", "product")
    one.outputs.append(output(getattr(one, asked), *((0,) if of_row else (0, 1))))
    assert len(backs(one.run(6, 300))) == (not of_row)


def test_other_shares() -> None:
    """The factor of both sums has to be one number."""
    assert not backs(Gradient(F16, True, False, 300, other_share=True).run(6, 300))


def test_long_rows_are_passes() -> None:
    """A row in chunks is computed as any other program is."""
    small = Machine(multiprocessors=2, shared_bytes=60000)
    image = Gradient(F32, True, True, 20000).run(2, 20000, small)
    assert image.chunks > 1 and not backs(image)


@pytest.mark.parametrize("shape", [(1200, 64), (700, 300)])
def test_runs_of_tiles(shape: tuple[int, int]) -> None:
    """Most tiles are a block's own; others are drawn, and have rows of the parts."""
    image = Gradient(F16, True, True, shape[1]).with_sums().run(*shape, FEW)
    assert image.parts is not None and image.draws == (image.fixed < image.tiles)
    runs = -(-(image.tiles - image.fixed) // (1 << image.shift))
    assert image.parts.rows == image.blocks + runs


def added(image: Image) -> Word:
    """What adders run."""
    word = image.words[image.rest[0]]
    assert image.adders and word.first == "add.rows" and form_of(image) == ADDING
    assert not any(one.first.startswith("acc") for one in image.words) and not image.scratch
    return word


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    ("cols", "each", "quads"),
    [(256, 8, 1), (512, 16, 1), (708, 24, 1), (1024, 32, 2), (1500, 64, 4)],
)
def test_adders(cols: int, each: int, quads: int, centered: bool, dtype: DType) -> None:
    """Warps of their own add up, where a block has many rows."""
    rows = {8: 26, 16: 24, 24: 14, 32: 16, 64: 8}[each] * LEAST_TILES
    program = Gradient(dtype, centered, True, cols, added=True).with_sums()
    image = program.run(rows, cols, ONE)
    word = added(image)
    assert (image.each, word.w2) == (each, quads) and image.adders == -(-cols // (128 * quads))
    assert image.rows_of_tile > 1 and len(backs(image)) == 1


@pytest.mark.parametrize(("cols", "group", "adders"), [(4096, 2, 4), (3000, 2, 3), (8192, 8, 8)])
def test_adders_of_wide_rows(cols: int, group: int, adders: int) -> None:
    image = Gradient(F16, True, True, cols, added=True).with_sums().run(20, cols, ONE)
    assert added(image) and (image.group, image.adders) == (group, adders)


def test_adders_of_one_sum() -> None:
    """The gradient of a weight without a bias: of what there is for it alone."""
    program = Gradient(BF16, False, True, 512, added=True).with_sum()
    word = added(program.run(100, 512, ONE))
    assert word.w3 & 255 == 0 and word.w3 >> 8 & 255 == NONE and word.w1 & 255 == NONE


def test_adders_before_runs_of_tiles() -> None:
    """They write what they have, and begin anew, as blocks do without them."""
    image = Gradient(F16, True, True, 256).with_sums().run(400, 256, ONE)
    assert added(image) and image.parts is not None and image.fixed < image.tiles
    assert image.parts.rows == image.blocks + -(-(image.tiles - image.fixed) // (1 << image.shift))


@pytest.mark.parametrize("why", ["few rows", "another sum", "computed", "unaligned", "too wide"])
def test_without_adders(why: str) -> None:
    """Sums are kept in scratch memory, as all others are."""
    cols, rows = {"unaligned": (514, 120), "too wide": (8200, 8)}.get(why, (512, 120))
    program = Gradient(F16, True, True, cols, doubled=why == "computed", added=True).with_sums()
    if why == "another sum":
        total = program.put(across(program.result, 0))
        program.outputs.append(output(program.put(cast(F16, total)), 1))
    image = program.run(30 if why == "few rows" else rows, cols, ONE)
    assert not image.adders and image.sums and form_of(image) == SUMMING
    assert "add.rows" not in [one.first for one in image.words]


def whole(image: Image) -> Word:
    """The one word of a norm's gradients."""
    word = image.words[image.first[0]]
    assert word.first == "norm.back" and form_of(image) == GRADIENTS
    assert not image.adders and not image.scratch and image.prologue != NO_WORD
    return word


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("cols", [480, 1024, 1500, 4096])
def test_whole_gradients(cols: int, centered: bool, dtype: DType) -> None:
    """One word for all; lanes add up columns of their own, of several rows of a tile."""
    program = Gradient(dtype, centered, True, cols)
    program = program.with_sums() if centered else program.with_sum()
    image = program.run(90_000 // cols, cols, ONE)
    word = whole(image)
    assert (image.each, image.group) == (16, -(-cols // 512)) and image.rows_of_tile > 1
    numbers = word.w1 >> 16 & 255, word.w1 >> 24
    assert numbers == ((0, 1) if centered else (0, NONE))
    assert (word.w1 & 255 == NONE) != centered and image.numbers * 128 + 128 >= 2 * 512


@pytest.mark.parametrize(
    ("cols", "dtype", "each", "rows"),
    [(8192, F16, 16, 1), (8192, F32, 16, 1), (9000, F16, 36, 1), (16384, BF16, 36, 1)],
)
def test_whole_gradients_of_wide_rows(cols: int, dtype: DType, each: int, rows: int) -> None:
    """Also of rows whose sums shared memory has no room for."""
    image = Gradient(dtype, True, True, cols).with_sums().run(13, cols, FEW)
    assert whole(image) and (image.each, image.rows_of_tile) == (each, rows)


def test_whole_gradients_of_runs_of_tiles() -> None:
    image = Gradient(F16, True, True, 512).with_sums().run(1200, 512, ONE)
    assert whole(image) and image.parts is not None and image.fixed < image.tiles
    assert image.parts.rows == image.blocks + -(-(image.tiles - image.fixed) // (1 << image.shift))


@pytest.mark.parametrize(
    "why", ["few rows", "another sum", "added", "no weight", "idle lanes", "unaligned"]
)
def test_other_gradients(why: str) -> None:
    """Words by themselves, where one has not all of it, or would not pay."""
    cols = {"idle lanes": 768, "unaligned": 514}.get(why, 512)
    weighted, added = why != "no weight", why == "added"
    program = Gradient(F16, True, weighted, cols, added=added).with_sums()
    if why == "another sum":
        total = program.put(across(program.result, 0))
        program.outputs.append(output(program.put(cast(F16, total)), 1))
    image = program.run(30 if why == "few rows" else 120, cols, ONE)
    assert image.sums and form_of(image) in (ADDING, SUMMING)
    assert "norm.back" not in [one.first for one in image.words]


@pytest.mark.parametrize(
    ("cols", "rows", "dtype", "added"),
    [
        (16384, 5, F16, False),  # a block has few
        (12000, 13, F32, False),  # two stages
        (16384, 13, F16, True),
        (20000, 13, F16, False),
    ],
)
def test_sums_that_nobody_has_room_for(cols: int, rows: int, dtype: DType, added: bool) -> None:
    program = Gradient(dtype, True, True, cols, added=added).with_sums()
    with pytest.raises(NotEncodable, match=r"sums across (rows that|long rows)"):
        program.run(rows, cols, FEW)
