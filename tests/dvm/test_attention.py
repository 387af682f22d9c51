"""Attention that a program writes out: what becomes one kernel, what does not, what it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import magjit
from magjit_dvm import attention as module
from magjit_dvm.attention import Attention, written_out
from magjit_dvm.backend import schedules

INF, NAN = math.inf, math.nan
Function = Callable[..., Any]


@pytest.fixture
def written() -> Iterator[list[int]]:
    """One entry for each call that is written out after all."""
    calls: list[int] = []

    def watched(*args: Any) -> torch.Tensor:
        calls.append(1)
        return written_out(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "written_out", watched)
        yield calls


def compiled(
    function: Function, *args: Any, dynamic: bool | None = None, tolerance: float = 1e-5
) -> tuple[Any, str]:
    """A compiled function, which gives what eager mode gives, and the schedule of its graph."""
    before = schedules()
    made = magjit.compile(function, backend="dvm", dynamic=dynamic)
    for _ in range(2):  # the first call is recorded, and eager's own
        same(made, function, *args, tolerance=tolerance)
    return made, "\n".join(one.source for one in schedules() if one not in before)


def same(made: Any, function: Function, *args: Any, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        results, expected = made(*args), function(*args)
    if isinstance(expected, torch.Tensor):
        results, expected = (results,), (expected,)
    for one, other in zip(results, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def operands(
    batch: int = 2, heads: int = 3, rows: int = 20, columns: int = 20, width: int = 8
) -> list[torch.Tensor]:
    torch.manual_seed(rows * columns)
    shapes = ((rows, width), (columns, width), (columns, width))
    return [torch.randn(batch, heads, *one) for one in shapes]


# -- functions --


def plain(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def scaled_first(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax((q * 0.3) @ k.mT, -1) @ v


def multiplied(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(0.3 * (q @ k.mT), -1) @ v


def divided(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def divided_by_tensor(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT / q.abs().amax(), -1) @ v


def divided_by_full(q: Any, k: Any, v: Any) -> Any:
    return functional.softmax(q @ k.mT / torch.full([], 2.0), dim=-1) @ v


def with_einsum(q: Any, k: Any, v: Any) -> Any:
    weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.5).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def without_heads(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.5).softmax(-1), v)


def in_evaluation(q: Any, k: Any, v: Any) -> Any:
    return functional.dropout(torch.softmax(q @ k.mT, -1), 0.1, False) @ v


def key_transposed_before(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.permute(0, 1, 3, 2).contiguous(), -1) @ v


ATTENTION = (
    plain,
    scaled_first,
    multiplied,
    divided,
    divided_by_tensor,
    divided_by_full,
    with_einsum,
    without_heads,
    in_evaluation,
    key_transposed_before,
)


@pytest.mark.parametrize("function", ATTENTION)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_is_attention(function: Function, dynamic: bool | None, written: list[int]) -> None:
    made, source = compiled(function, *operands(), dynamic=dynamic)
    assert "= attention(" in source and "bmm" not in source and "softmax" not in source
    assert not written
    same(made, function, *operands())


def merged(x: Any, y: Any, mask: Any) -> Any:
    """Self-attention of a model: heads are parted, moved, moved back and merged."""
    q, k, v = (one.view(*x.shape[:2], 4, -1).permute(0, 2, 1, 3) for one in (x, y, x + y))
    scores = q @ k.transpose(-1, -2) / math.sqrt(8) + mask
    context = (torch.softmax(scores, -1) @ v).permute(0, 2, 1, 3).contiguous()
    return context.view(*x.shape[:2], 32) * 2


def test_heads_are_not_copied() -> None:
    x, y, mask = torch.randn(2, 20, 32), torch.randn(2, 20, 32), torch.randn(2, 1, 1, 20)
    _, source = compiled(merged, x, y, mask)
    assert "= attention(" in source and "clone" not in source


def test_one_capture_for_all_sizes() -> None:
    made = magjit.compile(merged, backend="dvm", dynamic=True)
    for batch, length in ((2, 40), (3, 17), (5, 64), (2, 3), (4, 31)):
        x, y = torch.randn(2, batch, length, 32)
        same(made, merged, x, y, torch.randn(batch, 1, 1, length))
    assert magjit.stats(made).captures == 1


def projected(x: Any, y: Any, mask: Any) -> Any:
    return merged(x * 1.0, y * 1.0, mask)


@pytest.mark.parametrize("dynamic", [False, True])
def test_under_torch_compile(dynamic: bool) -> None:
    before = schedules()
    x, y = torch.randn(2, 2, 20, 32)
    for function in (projected, merged):
        made = torch.compile(function, backend="magjit_dvm", dynamic=dynamic)
        for length in (20, 33, 64) if dynamic else (20,):
            x, y = torch.randn(2, 2, length, 32)
            same(made, function, x, y, torch.randn(2, 1, 1, length) * 1.0)
    sources = [one.source for one in schedules() if one not in before]
    assert any("= attention(" in one for one in sources)
    q, k, v = operands()
    for function in (divided, filled):
        made = torch.compile(function, backend="magjit_dvm", dynamic=dynamic)
        given = (q, k, v) if function is divided else (q, k, v, torch.ones(20))
        same(made, function, *given)


# -- masks --


def added(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return torch.softmax(q @ k.mT * 0.5 + mask, -1) @ v


def added_by_product(q: Any, k: Any, v: Any, mask: Any) -> Any:
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return torch.bmm(torch.baddbmm(mask, q, k.mT, alpha=0.5).softmax(-1), v)


def filled(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return torch.softmax((q @ k.mT).masked_fill(mask == 0, -1e9), -1) @ v


def filled_with_infinity(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return torch.softmax((q @ k.mT * 0.5).masked_fill(mask == 0, -INF), -1) @ v


def chosen(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = torch.where(mask > 0, q @ k.mT, torch.finfo(q.dtype).min)
    return torch.softmax(scores, -1) @ v


def of_ones(q: Any, k: Any, v: Any, mask: Any) -> Any:
    nothing = (1.0 - torch.ones(q.shape[0], k.shape[2])[:, None, None, :]) * -1e9
    return torch.softmax(q @ k.mT + nothing, -1) @ v


@pytest.mark.parametrize("shape", [(20,), (20, 20), (1, 1, 20), (2, 1, 1, 20), (2, 3, 20, 1)])
@pytest.mark.parametrize("function", [added, filled, filled_with_infinity, chosen])
def test_masks(function: Function, shape: tuple[int, ...], written: list[int]) -> None:
    mask = (torch.rand(shape) > 0.3).float()
    if shape[-1] == 1:
        mask = torch.ones(shape)
    mask[..., 0] = 1.0
    made, source = compiled(function, *operands(), mask)
    assert "= attention(" in source and not written
    same(made, function, *operands(), mask.flip(-1))


def test_mask_of_a_product_that_adds() -> None:
    for shape in ((6, 20, 20), (1, 20), (20,), (6, 1, 20)):
        _, source = compiled(added_by_product, *operands(), torch.randn(shape))
        assert "= attention(" in source


def test_mask_of_zeros_is_left_out() -> None:
    _, source = compiled(of_ones, *operands(), torch.ones(()))
    assert "None, constant, None)" in source and "ones" not in source and "rsub" not in source


MASKED = (0.0, -INF, torch.finfo().min, -1e9, -1e4, -90.0, NAN, INF)


@pytest.mark.parametrize("number", MASKED)
@pytest.mark.parametrize("columns", [16, 20, 40, 520])
def test_rows_that_are_masked(number: float, columns: int) -> None:
    given = operands(columns=columns)
    masks = torch.zeros(4, 2, 1, 20, columns)
    masks[0, 0] = number  # all of an image
    masks[1, :, :, 3] = number  # a row
    masks[2, ..., 1:] = number  # all columns but one
    masks[3, ..., -5:] = number
    for mask in masks:
        made, expected = Attention()(*given, mask, 0.5, None), added(*given, mask)
        torch.testing.assert_close(
            made.transpose(1, 2), expected, rtol=1e-5, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("function", [filled, filled_with_infinity, chosen])
def test_rows_of_which_nothing_is_kept(function: Function, written: list[int]) -> None:
    mask = torch.ones(2, 1, 20, 20)
    made, _ = compiled(function, *operands(), mask)
    mask[1, 0, 4] = 0
    same(made, function, *operands(), mask)
    assert written == [1]


def test_scores_as_low_as_what_fills(written: list[int]) -> None:
    q, k, v = operands()
    mask = (torch.rand(20, 20) > 0.5).float()
    made, _ = compiled(filled, q.abs() * 1e5, -k.abs() * 1e4, v, mask)
    assert written == [1]
    same(made, filled, q, k, v, mask)


def test_calls_in_vain_become_rare(written: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    kernel = module._kernel

    def watched(*args: Any, **kwargs: Any) -> Any:
        tried.append(1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(module, "_kernel", watched)
    q, k, v = operands()
    mask, run = torch.full((20, 20), -INF), Attention()
    for _ in range(100):
        assert run(q, k, v, mask, 1.0, None).isnan().all()
    assert len(written) == 100 and len(tried) == 6
    for _ in range(100):
        run(q, k, v, None, 1.0, None)
    assert len(written) < 200 and len(tried) > 20


# -- numbers that are not finite, and tensors that lie otherwise --


@pytest.mark.parametrize("number", [NAN, INF, -INF])
@pytest.mark.parametrize("columns", [16, 20, 40, 520])
def test_numbers_that_are_not_finite(number: float, columns: int) -> None:
    for which in range(3):
        for place in (0, -1):
            given = operands(columns=columns)
            given[which][0, 0, place, 0] = number
            for mask in (None, torch.zeros(columns)):
                made, expected = Attention()(*given, mask, 1.0, None), plain(*given)
                torch.testing.assert_close(
                    made.transpose(1, 2), expected, rtol=1e-5, atol=1e-5, equal_nan=True
                )


def test_tensors_that_lie_otherwise() -> None:
    made = magjit.compile(divided, backend="dvm", dynamic=True)
    q, k, v = operands()
    same(made, divided, q, k, v)
    same(made, divided, q.mT.contiguous().mT, k.mT.contiguous().mT, v.mT.contiguous().mT)
    same(made, divided, q[:1].expand_as(q), k[:, :1].expand_as(k), v)


@pytest.mark.slow
def test_tensors_that_are_parts_of_others() -> None:
    """Each is a layout that is captured anew."""
    made = magjit.compile(divided, backend="dvm", dynamic=True)
    q, k, v = operands()
    same(made, divided, q[:, :, ::2], k.flip(2)[:, :, ::2], v[:, :, 10:])
    wide = torch.randn(2, 3, 20, 16)
    same(made, divided, wide[..., ::2], wide[..., 1::2], wide[..., :8])
    same(made, divided, q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v))


def test_empty_tensors() -> None:
    for rows, columns in ((0, 20), (20, 0), (0, 0)):
        given = operands(rows=rows, columns=columns)
        made = Attention()(*given, None, 1.0, None)
        assert torch.equal(made, written_out(*given, None, 1.0, None).transpose(1, 2))


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("columns", [16, 17, 31, 100])
@pytest.mark.parametrize("width", [1, 16, 80])
def test_sizes(rows: int, columns: int, width: int, written: list[int]) -> None:
    for batch, mask in ((1, None), (20, torch.randn(columns)), (20, torch.randn(rows, 1))):
        q, k, v = operands(batch, 4, rows, columns, width)
        made = Attention()(q, k, v, mask, 0.2, None)
        expected = written_out(q.double(), k.double(), v.double(), mask, 0.2, None)
        torch.testing.assert_close(made.double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert not written


# -- what is not attention --


def returned(q: Any, k: Any, v: Any) -> Any:
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ v, weights


def scores_read_again(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT
    return torch.softmax(scores, -1) @ v, scores.sum()


def scaled_after_mask(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax((q @ k.mT + k.sum(-1)[:, :, None]) * 0.5, -1) @ v


def along_rows(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT, -2) @ v


def of_other_width(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT, -1) @ v[..., :4]


def transposed_between(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax((q @ k.mT).transpose(-1, -2), -1) @ v


def of_zero(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT * 0, -1) @ v


def with_relu(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax((q @ k.mT).relu(), -1) @ v


def of_floor(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(torch.div(q @ k.mT, 2, rounding_mode="floor"), -1) @ v


def filled_with_little(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax((q @ k.mT).masked_fill(k[:, :, None, :, 0] > 0, -1.0), -1) @ v


NO_ATTENTION = (
    returned,
    scores_read_again,
    scaled_after_mask,
    along_rows,
    of_other_width,
    transposed_between,
    of_zero,
    with_relu,
    of_floor,
    filled_with_little,
)


@pytest.mark.parametrize("function", NO_ATTENTION)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_is_not_attention(function: Function, dynamic: bool | None) -> None:
    _, source = compiled(function, *operands(), dynamic=dynamic)
    assert "= attention(" not in source


def test_masks_that_make_scores_larger() -> None:
    def larger(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch.softmax(q @ k.mT + mask, -1) @ v

    q, k, v = operands(batch=1)
    _, source = compiled(larger, q, k, v, torch.randn(2, 1, 20, 20))
    assert "= attention(" not in source


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    given = [one.to(dtype) for one in operands()]
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-12
    _, source = compiled(divided, *given, tolerance=tolerance)
    assert "bmm" in source and "= attention(" not in source


def test_few_columns_stay_as_they_are() -> None:
    for batch, columns, becomes in ((2, 12, False), (1, 33, False), (1, 48, True), (1, 65, True)):
        _, source = compiled(plain, *operands(batch, columns=columns))
        assert ("= attention(" in source) is becomes


def test_gradients_are_those_of_the_program() -> None:
    given = [one.requires_grad_() for one in operands()]
    made = magjit.compile(divided, backend="dvm")
    results = torch.autograd.grad(made(*given).square().sum(), given)
    expected = torch.autograd.grad(divided(*given).square().sum(), given)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_report_names_it(tmp_path: Path) -> None:
    with torch.no_grad():
        magjit.explain(divided, backend="dvm", dump=tmp_path)(*operands())
    (schedule,) = tmp_path.rglob("dvm_schedule.py")
    text = schedule.read_text()
    assert "attention(" in text and "softmax" not in text
