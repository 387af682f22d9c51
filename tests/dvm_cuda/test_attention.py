"""Attention that a program writes out for a GPU: what becomes one kernel, and what does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from magjit_dvm import attention as module
from magjit_dvm.attention import DeviceAttention, attention, written_out
from magjit_dvm.lowering import decompositions
from magjit_dvm.simplify import simplify

aten = torch.ops.aten
HALF, BFLOAT = torch.float16, torch.bfloat16
Function = Callable[..., Any]


def targets(
    function: Function, dtype: torch.dtype = HALF, width: int = 64, columns: int = 33
) -> list[Any]:
    """The operators of a program of query, key and value (2, 4, 33, width), simplified.

    A build without CUDA refuses some of them, so that it is traced on a CPU and moved.
    """
    with FakeTensorMode() as mode, torch.no_grad():
        query = torch.empty(2, 4, 33, width, dtype=dtype)
        others = [torch.empty(2, 4, columns, width, dtype=dtype) for _ in range(2)]
        gm = make_fx(function, decomposition_table=decompositions())(query, *others)
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, FakeTensor):
                like = value.shape, value.stride()
                moved = torch.empty_strided(*like, dtype=value.dtype, device="meta")
                node.meta["val"] = FakeTensor(mode, moved, torch.device("cuda:0"))
    return simplified(gm)


def simplified(gm: torch.fx.GraphModule) -> list[Any]:
    simplify(gm.graph)
    gm.graph.lint()
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def plain(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT, -1) @ v


def divided(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def in_float(q: Any, k: Any, v: Any) -> Any:
    """As Hugging Face's models write it."""
    return torch.softmax(q @ k.mT * 0.125, -1, dtype=torch.float32).to(q.dtype) @ v


def scaled_in_float(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax((q @ k.mT).float() * 0.125, -1).to(q.dtype) @ v


def of_zeros(q: Any, k: Any, v: Any) -> Any:
    """As models do that are given no mask."""
    mask = (1 - torch.ones(2, 1, 1, k.shape[2], dtype=q.dtype, device=q.device)) * -65504.0
    return torch.softmax(q @ k.mT / 8 + mask, -1) @ v


def merged(q: Any, k: Any, v: Any) -> Any:
    made = divided(q, k, v).permute(0, 2, 1, 3).contiguous()
    return made.view(*made.shape[:2], -1)


ATTENTION = [plain, divided, in_float, scaled_in_float, of_zeros, merged]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("function", ATTENTION)
def test_what_is_attention(function: Function, dtype: torch.dtype) -> None:
    found = targets(function, dtype)
    assert attention in found
    assert not {aten.bmm.default, aten._softmax.default} & set(found)


def test_softmax_that_casts() -> None:
    """What softmax of float16 in float32 is on a GPU."""
    with FakeTensorMode(), torch.no_grad():
        given = [torch.empty(2, 4, 33, 64, dtype=HALF, device="cuda") for _ in range(3)]
        gm = make_fx(in_float, decomposition_table=decompositions())(*given)
    assert (-1, True) in [node.args[1:] for node in gm.graph.nodes]
    found = simplified(gm)
    assert attention in found
    assert aten._softmax.default not in found


def test_heads_are_not_copied() -> None:
    assert aten.clone.default not in targets(merged)


def test_few_columns_are_attention_as_well() -> None:
    assert attention in targets(divided, columns=3)


def masked(q: Any, k: Any, v: Any) -> Any:
    """Rows that a mask leaves nothing of are NaN or uniform, which the kernel does not know."""
    return torch.softmax(q @ k.mT + k[:, :, None, :, 0], -1) @ v


def filled(q: Any, k: Any, v: Any) -> Any:
    scores = (q @ k.mT).masked_fill(k[:, :, None, :, 0] > 0, -1e4)
    return torch.softmax(scores, -1) @ v


def filled_with_infinity(q: Any, k: Any, v: Any) -> Any:
    kept = torch.ones(33, k.shape[2], dtype=torch.bool, device=k.device).tril()
    return torch.softmax(torch.where(kept, q @ k.mT, -math.inf), -1) @ v


def divided_by_tensor(q: Any, k: Any, v: Any) -> Any:
    """The query would be rounded once more."""
    return torch.softmax(q @ k.mT / k[0, 0, :1, :1], -1) @ v


def of_float(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q.float() @ k.float().mT, -1).to(q.dtype) @ v


def rounded_between(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax((q @ k.mT).to(torch.bfloat16).float(), -1).to(q.dtype) @ v


def read_twice(q: Any, k: Any, v: Any) -> Any:
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ v, weights


def read_before_cast(q: Any, k: Any, v: Any) -> Any:
    weights = torch.softmax(q @ k.mT, -1, dtype=torch.float32)
    return weights.to(q.dtype) @ v, weights


NO_ATTENTION = [
    *(masked, filled, filled_with_infinity, divided_by_tensor, of_float, rounded_between),
    *(read_twice, read_before_cast),
]


@pytest.mark.parametrize("function", NO_ATTENTION)
def test_what_is_not_attention(function: Function) -> None:
    assert attention not in targets(function)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 64), (HALF, 20), (HALF, 264)])
def test_what_the_kernel_does_not_take(dtype: torch.dtype, width: int) -> None:
    assert attention not in targets(divided, dtype, width)


class Kernel:
    """Stands for that of a GPU; knows what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: bool = True) -> None:
        self.calls: list[tuple[torch.Tensor, ...]] = []
        monkeypatch.setattr(module, "_kernel_of_gpus", self)
        monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: takes)

    def __call__(self, q: Any, k: Any, v: Any, *_: Any, scale: float) -> tuple[torch.Tensor]:
        self.calls.append((q, k, v))
        return (written_out(q, k, v, None, scale, None),)


def operands(width: int = 16, rows: int = 5, columns: int = 7) -> list[torch.Tensor]:
    sizes = (2, rows, 3, width), (2, columns, 3, width), (2, columns, 3, width)
    return [torch.randn(one).to(BFLOAT).transpose(1, 2) for one in sizes]


def test_operands_are_given_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, given = Kernel(monkeypatch), operands()
    made = DeviceAttention()(*given, None, 0.5, None)
    assert made.shape == (2, 5, 3, 16) and made.is_contiguous()
    torch.testing.assert_close(made, written_out(*given, None, 0.5, None).transpose(1, 2))
    assert all(a is b for a, b in zip(kernel.calls[0], given, strict=True))


def test_operands_are_copied_that_do_not_lie_in_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    query, key, value = operands()
    beyond = torch.empty(2, 3, 5, 17, dtype=BFLOAT)[..., 1:].copy_(query)
    turned = key.mT.contiguous().mT
    offset = torch.empty(value.numel() + 1, dtype=BFLOAT)[1:].view(2, 3, 7, 16).copy_(value)
    DeviceAttention()(beyond, turned, offset, None, 0.5, None)
    wanted = query, key, value
    for one, other in zip(kernel.calls[0], wanted, strict=True):
        assert one.stride(3) == 1 and one.data_ptr() % 16 == 0
        assert not any(step % 8 for step in one.stride()[:3])
        assert torch.equal(one, other)


@pytest.mark.parametrize("sizes", [(20, 5, 7), (16, 0, 7), (16, 5, 0)])
def test_what_only_a_call_knows_is_written_out(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, given = Kernel(monkeypatch), operands(*sizes)
    made = DeviceAttention()(*given, None, 0.5, None)
    assert torch.equal(made, written_out(*given, None, 0.5, None).transpose(1, 2))
    assert not kernel.calls


def test_a_gpu_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, given = Kernel(monkeypatch, takes=False), operands()
    made = DeviceAttention()(*given, None, 0.5, None)
    assert torch.equal(made, written_out(*given, None, 0.5, None).transpose(1, 2))
    assert not kernel.calls
