"""Inductor with the option ``virtual_tensors``: equal results, no copies of repeated operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import magjit
from magjit import errors
from magjit.plugin.virtual_tensors.post_grad import WithoutCopies, remove_needless_clones
from magjit_inductor import InductorBackend

aten = torch.ops.aten


def attention(q: Tensor, k: Tensor) -> Tensor:
    keys = k[:, :, None].expand(-1, -1, 4, -1, -1).reshape(2, 8, 16, 8)
    return F.scaled_dot_product_attention(q, keys, keys)


def test_copies_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Any]] = []
    original = WithoutCopies.__call__

    def watching(self: WithoutCopies, graph: Any) -> None:
        before = [node.target for node in graph.nodes]
        original(self, graph)
        seen.append([before, [node.target for node in graph.nodes]])

    monkeypatch.setattr(WithoutCopies, "__call__", watching)
    call = magjit.compile(
        attention, backend="inductor", options={"virtual_tensors": True}, fullgraph=True
    )
    q, k = torch.randn(2, 8, 1, 8), torch.randn(2, 2, 16, 8)
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch.no_grad(), uncached, torch._inductor.config.patch(fx_graph_cache=False):
        call(q, k)
        torch.testing.assert_close(call(q, k), attention(q, k))
    before, after = seen[0]
    assert aten.clone.default in before
    assert aten.clone.default not in after and aten.expand.default not in after


def test_wrong_options_are_refused() -> None:
    with pytest.raises(errors.BackendOptionError, match="virtual_tensors"):
        InductorBackend().configure(None, {"virtual_tensors": 1}, None)
    with pytest.raises(errors.BackendOptionError, match="exclude"):
        InductorBackend().configure(
            None, {"virtual_tensors": True, "post_grad_custom_pre_pass": None}, None
        )


def test_clones_that_matter_are_kept() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def needless(x: Tensor) -> Tensor:
        return x.sin().clone().cos()

    def written(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.clone()
        y.add_(1)
        return y.cos() + z.cos()

    def escaping(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, y.clone()

    counts = [
        remove_needless_clones(make_fx(one)(torch.randn(3)).graph)
        for one in (needless, written, escaping)
    ]
    assert counts == [1, 0, 0]
