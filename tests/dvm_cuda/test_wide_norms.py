"""Backwards of norms of wide rows: which stay whole, and what runs in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from magjit_dvm import reference, wide_norms
from magjit_dvm.cuda.encode import Machine
from magjit_dvm.instructions import DType
from magjit_dvm.lowering import decompositions
from magjit_dvm.program import Program
from magjit_dvm.wide_norms import WideNorm, is_wide, is_wide_norm, norm_gradients
from tests.dvm_cuda.checking import check_words

aten = torch.ops.aten
layer, rms = aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default
BF16, F32 = torch.bfloat16, torch.float32


def drawn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(cols: int, dtype: torch.dtype, mask: list[bool], of_weight: torch.dtype = F32) -> bool:
    """Whether a layer norm's backward on a GPU is to run so."""

    def backward(dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
        return layer(dy, x, [cols], mean, rstd, weight, bias, mask)

    with FakeTensorMode():
        shapes = [(6, cols), (6, cols), (6, 1), (6, 1), (cols,), (cols,)]
        dtypes = [dtype, dtype, F32, F32, of_weight, of_weight]
        given = [
            torch.empty(shape, dtype=one, device="cuda")
            for shape, one in zip(shapes, dtypes, strict=True)
        ]
        graph = make_fx(backward, decompositions())(*given).graph
    return any(is_wide_norm(node) for node in graph.nodes)


@pytest.mark.parametrize("of_weight", [F32, BF16])
def test_which_stay_whole(of_weight: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGJIT_DVM_CUDA", "1")
    every = [True, True, True]
    assert whole(16384, BF16, every, of_weight) and whole(8400, torch.float16, every, of_weight)
    assert whole(16384, BF16, [True, True, False], of_weight)
    for cols in (8192, 16_388 + 300, 16_382):
        assert not whole(cols, BF16, every, of_weight), "in a group, too wide, not by four"
    for mask in ([True, False, True], [False, True, True]):
        assert not whole(16384, BF16, mask, of_weight)
    assert not whole(16384, F32, every, of_weight)


def test_not_on_a_cpu() -> None:
    x = drawn(3, 16384, dtype=BF16)
    assert not is_wide(x, x, [16384], [x[0]])


@pytest.mark.parametrize("of_bias", [None, DType.F32, DType.BF16])
@pytest.mark.parametrize("of_weight", [DType.F32, DType.BF16])
@pytest.mark.parametrize("centered", [False, True])
def test_programs(centered: bool, of_weight: DType, of_bias: DType | None) -> None:
    """All gradients are one word."""
    if of_bias is not None and not centered:
        pytest.skip("RMS norms have no bias")
    program = norm_gradients(DType.BF16, of_weight, of_bias, centered, 10_000)
    rows = [drawn(9, seed=k).abs() + 0.5 for k in range(1 + centered)]
    matrices = [drawn(9, 10_000, dtype=BF16, seed=k) for k in (2, 3)]
    weight = drawn(10_000, seed=4).to(of_weight.torch)
    image = check_words(program, [*matrices, *rows, weight], Machine(multiprocessors=2))
    assert image is not None and image.words[0].first == "norm.back"
    assert image.sums == 1 + (of_bias is not None)


def by_reference(*key: Any) -> Callable[..., Any]:
    """What stands for a GPU."""
    dtype, of_weight, of_bias, centered, columns = key
    like = [None if one is None else wide_norms._OF_VECTORS[one] for one in (of_weight, of_bias)]
    program: Program = norm_gradients(
        wide_norms._OF_VECTORS[dtype], like[0] or DType.F32, like[1], centered, columns
    )
    return lambda *given: reference.run(program, given)


def of_norms(dtype: torch.dtype) -> list[tuple[Any, list[Any]]]:
    """Each backward's arguments, with a bias and without."""
    x, dy = (drawn(2, 3, 512, dtype=dtype, seed=k) for k in range(2))
    mean = x.float().mean(-1, keepdim=True)
    rstd = (x.float().var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    weight = drawn(512, dtype=dtype, seed=3)
    made: list[tuple[Any, list[Any]]] = [
        (layer, [dy, x, [512], mean, rstd, weight, bias, [True, True, mask]])
        for bias, mask in ((weight, True), (weight, False), (None, False))
    ]
    return [*made, (rms, [dy, x, [512], rstd, weight, [True, True]])]


@pytest.mark.parametrize("number", range(4))
def test_results(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any leading dimensions, those that are not asked for None."""
    monkeypatch.setattr(wide_norms, "_compiled", by_reference)
    target, given = of_norms(BF16)[number]
    found = WideNorm(target)(*given)
    decomposed = torch._decomp.decomposition_table[target]
    wanted = decomposed(*[one.double() if torch.is_tensor(one) else one for one in given])
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype is BF16 and one.shape == other.shape
            torch.testing.assert_close(one.double(), other, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("why", ["no words", "not contiguous"])
def test_calls_without_words_are_atens(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_norms, "_compiled", lambda *_: lambda *_: None)
    target, given = of_norms(F32)[0]
    if why == "not contiguous":
        given[0] = given[0].transpose(0, 1).contiguous().transpose(0, 1)
        monkeypatch.setattr(wide_norms, "_compiled", None)
    for one, other in zip(WideNorm(target)(*given), target(*given), strict=True):
        assert torch.equal(one, other)


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(wide_norms, "_compiled", lambda *_: failed)
    target, given = of_norms(BF16)[0]
    with pytest.raises(torch.OutOfMemoryError):
        WideNorm(target)(*given)
