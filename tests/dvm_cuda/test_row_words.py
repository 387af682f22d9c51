"""Norms and softmaxes that are one word, and what is nearly one."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.encode import Machine
from magjit_dvm.cuda.words import Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.checking import BIG, SMALL, check_words, simulated
from tests.dvm_cuda.test_encoder import layer_norm, softmax, values

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16


def spread(dtype: DType = F32) -> Program:
    """Sums and squares about the mean, of which results are made otherwise than norms are."""
    nodes = (*layer_norm(dtype).nodes[:8], compute("mul", F32, 5, 7), cast(dtype, 8))
    return Program(2, (tensor(dtype, 0, 1),), nodes, (output(9, 0, 1), output(2, 0)))


def quick_softmax(dtype: DType = F16, scaled: bool = False) -> Program:
    """As ATen's is lowered: by the sum's inverse; of products, not of what is loaded."""
    nodes = [load(0, dtype), cast(F32, 0)]
    if scaled:
        nodes.append(compute("mul", F32, 1, 1))
    x = len(nodes) - 1
    nodes += [
        reduce("max", F32, x, 1),
        compute("sub", F32, x, x + 1),
        compute("exp", F32, x + 2),
        reduce("sum", F32, x + 3, 1),
        compute("reciprocal", F32, x + 4),
        compute("mul", F32, x + 3, x + 5),
    ]
    if scaled:  # the products are asked for again
        nodes.append(compute("add", F32, x + 6, x))
    nodes.append(cast(dtype, len(nodes) - 1))
    return Program(2, (tensor(dtype, 0, 1),), tuple(nodes), (output(len(nodes) - 1, 0, 1),))


def words_of(image: Image | None) -> list[str]:
    """Names of both operators of all words."""
    assert image is not None
    return [name for one in image.words for name in (one.first, one.second)]


@pytest.mark.parametrize("cols", [255, 256, 1024])
def test_statistics_about_a_large_mean(cols: int) -> None:
    """Squares about the mean, not those about 0 less its square."""
    x = values(F32, 3, cols) + 100
    image = check_words(layer_norm(F32), [x, *[values(F32, cols)] * 2])
    assert "row.f.norm" in words_of(image)
    assert "row.f.stat" in words_of(check_words(spread(), [x]))


@pytest.mark.parametrize("cols", [255, 768, 5000])
def test_norms_of_equal_elements_are_zero(cols: int) -> None:
    """However large they are, and whichever warp has them: 1 / columns is no float32."""
    x = torch.tensor([3.0, 1000.0, 12345.0, -7e4])[:, None].expand(4, cols).contiguous()
    ones, zeros = torch.ones(cols), torch.zeros(cols)
    image, results = simulated(layer_norm(F32), [x, ones, zeros])
    assert "row.f.norm" in words_of(image) and not results[0].any()


def test_norms_that_are_several_words() -> None:
    """With the difference as a result; with the norm asked for twice, it is saved or held."""
    norm = layer_norm(F16)
    weights = [values(F16, 600)] * 2
    nodes = (*norm.nodes, cast(F16, 5))
    other = Program(2, norm.inputs, nodes, (output(19, 0, 1), output(20, 0, 1)))
    assert "row.f.stat" in words_of(check_words(other, [values(F16, 3, 600), *weights]))
    nodes = (*norm.nodes[:-1], compute("tanh", F32, 18), compute("mul", F32, 19, 12))
    nodes = (*nodes, compute("add", F32, 20, 1), cast(F16, 21))
    other = Program(2, norm.inputs, nodes, (output(22, 0, 1),))
    image = check_words(other, [values(F16, 3, 600), *weights])
    assert "row.f.norm" in words_of(image) and image is not None and image.scratch == 1
    image = check_words(norm, [values(F16, 2, 31000), *[values(F16, 31000)] * 2], SMALL)
    assert image is not None and image.chunks > 1 and "row.f.norm" not in words_of(image)


def special_rows(dtype: DType, rows: int, cols: int) -> torch.Tensor:
    """With infinities and NaN, the largest and the smallest, and equal elements."""
    x = values(dtype, rows, cols) * 20
    x[1, 5], x[2, 7], x[3, 9] = float("-inf"), float("nan"), float("inf")
    x[4, : cols // 2] = x[5] = float("-inf")
    x[6], x[7], x[8, -1] = torch.finfo(x.dtype).min, 3.0, torch.finfo(x.dtype).max
    return x


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [24, 250, 1024, 4100, 9000])
def test_a_softmax_is_one_word(dtype: DType, cols: int) -> None:
    """Of special rows; of fewer than a tile has; from an odd address."""
    x = special_rows(dtype, 9, cols)
    for machine in (BIG, Machine(1)):
        names = words_of(check_words(quick_softmax(dtype), [x], machine))
        assert "row.f.softmax" in names and "row.f.max" not in names and "row.f.sum" not in names
    image = check_words(quick_softmax(dtype, scaled=True), [x.clamp(-50, 50)])
    assert "row.f.softmax" in words_of(image) and image is not None and image.scratch == 1
    part = x.flatten()[3 : 3 + 8 * cols].view(8, cols)  # at an odd address
    assert "row.f.softmax" in words_of(check_words(quick_softmax(dtype), [part]))


def test_softmaxes_that_are_several_words() -> None:
    """In float32; with a result beside it; of rows in chunks."""
    assert "row.f.softmax" not in words_of(check_words(softmax(F32), [values(F32, 3, 300)]))
    program = quick_softmax(F16)
    last = len(program.nodes) - 1
    for also in (2, 5, 6):
        outputs = (output(last, 0, 1), output(also, 0))
        other = Program(2, program.inputs, program.nodes, outputs)
        assert "row.f.softmax" not in words_of(check_words(other, [values(F16, 3, 300)]))
    image = check_words(program, [values(F16, 2, 31001)], SMALL)
    assert image is not None and image.chunks > 1 and "row.f.softmax" not in words_of(image)


def check_special_rows(rows: int, cols: int) -> None:
    """Rows with infinities and NaN, of equal elements, and far from 0, beside others."""
    x, weight = values(F32, rows, cols), values(F32, cols)
    x[0], x[1, 5], x[2, 7], x[3] = 3.0, float("inf"), float("nan"), x[3] + 50
    x[4, -1], x[5] = float("-inf"), x[5] * 1e-20
    check_words(layer_norm(F32), [x, weight, weight])
    check_words(spread(), [x])
    check_words(softmax(F32), [x])


@pytest.mark.parametrize("cols", [250, 1024, 2050])
def test_special_rows(cols: int) -> None:
    check_special_rows(6, cols)
