"""Look-ups, positions and int64 on a GPU: kernels against the reference, models against eager."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
from magjit_dvm.instructions import DType
from tests.dvm_cuda import test_tables as tables
from tests.dvm_gpu.test_gpu import check_image

pytestmark = pytest.mark.gpu

CASES: list[Callable[[], Any]] = [
    *(
        lambda dtype=dtype, width=width: tables.test_rows_of_a_table(dtype, width)
        for dtype in (DType.F32, DType.F16, DType.BF16)
        for width in (8, 63, 64, 100, 768, 1030, 5000)
    ),
    *(lambda dtype=dtype: tables.test_tables_of_ints(dtype) for dtype in (DType.I32, DType.U8)),
    *(lambda width=width: tables.test_a_norm_of_rows(width) for width in (24, 512, 1027, 20_000)),
    *(lambda classes=n: tables.test_losses_of_classes(classes) for n in (10, 400, 20_000)),
    *(
        lambda s=s: tables.test_each_element_has_a_position(s)
        for s in ((3, 5), (7, 100), (2, 3000))
    ),
    *(lambda op=op: tables.test_masks_of_positions(op, (12, 300)) for op in ("le", "gt", "eq")),
    *(lambda op=op: tables.test_comparisons_with_numbers(op) for op in ("eq", "lt", "ge")),
    *(lambda op=op: tables.test_one_operand(op) for op in ("neg", "abs", "sign", "bitwise_not")),
    tables.test_positions_from_a_table,
    tables.test_what_is_not_there_has_no_position,
    tables.test_a_softmax_below_the_diagonal,
    tables.test_what_is_clamped_is_held,
    tables.test_casts_to_int64,
    tables.test_int64_that_is_not_aligned,
    tables.test_whether_any_bit_is_set,
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_kernels(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the simulator runs elsewhere; images are those that it has."""
    monkeypatch.setattr(tables, "check_words", check_image)
    CASES[number]()


class Language(torch.nn.Module):
    """Embeddings of words and places, a norm, scores below the diagonal, a loss of classes."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(words, width), torch.nn.Embedding(512, width)
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, words)

    def forward(self, ids: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        places = torch.arange(length, device=ids.device)
        x = self.norm(self.words(ids) + self.places(places))
        scores = x @ x.transpose(1, 2) / x.shape[-1] ** 0.5
        later = places[None, :] > places[:, None]
        x = scores.masked_fill(later, float("-inf")).softmax(-1) @ x
        x = x * (ids != 0)[..., None]
        return F.cross_entropy(self.head(x).flatten(0, 1), classes.flatten(), ignore_index=-1)


def drawn(batch: int, length: int, words: int) -> list[torch.Tensor]:
    ids = torch.randint(0, words, (batch, length), device="cuda")
    classes = ids.roll(-1, 1)
    classes[:, -1] = -1
    return [ids, classes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_language_model_trains(dtype: torch.dtype, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Language(1000, 256).cuda().to(dtype)
    compiled = magjit.compile(model, backend="dvm", dynamic=dynamic, fullgraph=True)
    for batch, length in ((4, 32), (4, 32), (3, 57), (8, 128)):
        given = drawn(batch, length, 1000)
        wanted = model(*given)
        grads = torch.autograd.grad(wanted, list(model.parameters()))
        loss = compiled(*given)
        found = torch.autograd.grad(loss, list(model.parameters()))
        bound = 2e-2 if dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(loss, wanted, rtol=bound, atol=bound)
        for one, other in zip(found, grads, strict=True):
            torch.testing.assert_close(
                one, other, rtol=bound, atol=bound * float(other.abs().max())
            )


_BEYOND = """
import torch, magjit
table = torch.randn(50, 64, device="cuda", dtype=torch.float16)
compiled = magjit.compile(lambda t, i: torch.embedding(t, i).float().exp(), backend="dvm")
at = torch.randint(0, 50, (3, 7), device="cuda")
assert torch.allclose(compiled(table, at), table[at].float().exp(), rtol=1e-2)
at[1, 2] = 50
try:
    compiled(table, at)
    torch.cuda.synchronize()
except RuntimeError as error:
    print("ended:", type(error).__name__)
"""


def test_a_position_beyond_a_table_ends_the_launch() -> None:
    """As in eager mode no result comes back, and the process has no use of the GPU any more."""
    done = subprocess.run(
        [sys.executable, "-c", _BEYOND], capture_output=True, text=True, timeout=200, check=False
    )
    assert "ended:" in done.stdout, done.stdout + done.stderr
