"""Recurrent layers, which torch takes apart otherwise than eager mode computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import magjit
from magjit.plugin.recurrent import recurrent_as_it_is

BACKENDS = ["dvm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("triton", "inductor"))]
LAYERS = [torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN]


def leaves(value: Any) -> list[torch.Tensor]:
    return list(torch.utils._pytree.tree_leaves(value))


def check(made: Any, expected: Any) -> None:
    for got, wanted in zip(leaves(made), leaves(expected), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training(backend: str, layer: Any, dropout: float) -> None:
    """With eager mode's dropout between layers, and its gradients."""
    torch.manual_seed(0)
    model = layer(4, 8, num_layers=3, dropout=dropout, batch_first=True)
    compiled = magjit.compile(model, backend=backend)
    x = torch.randn(3, 5, 4)
    for _ in range(3):
        gradients = []
        for call in (model, compiled):
            torch.manual_seed(1)
            out, state = call(x)
            model.zero_grad()
            (out.sum() + sum(one.square().sum() for one in leaves(state))).backward()
            gradients.append(([one.grad for one in model.parameters()], out, state))
        check(gradients[1], gradients[0])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("both", [False, True])
def test_states_have_eager_modes_shapes(layer: Any, dtype: torch.dtype, both: bool) -> None:
    model = layer(4, 8, num_layers=2, bidirectional=both, dtype=dtype).eval()
    compiled = magjit.compile(model, backend="dvm")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 3, 4, dtype=dtype)
            check(compiled(x), model(x))


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_sequences_of_different_lengths() -> None:
    model = torch.nn.GRU(4, 8)
    compiled = magjit.compile(model, backend="dvm")
    with torch.no_grad():
        for _ in range(3):
            given = pack_padded_sequence(torch.randn(5, 3, 4), torch.tensor([5, 3, 2]))
            (made, state), (wanted, expected) = compiled(given), model(given)
            check((made.data, state), (wanted.data, expected))


@pytest.mark.parametrize(
    ("changed", "trains", "expected"),
    [
        ({}, False, None),
        ({}, True, "an LSTM"),
        ({"dropout": 0.5}, False, "dropout between"),
        ({"dropout": 0.5, "train": False}, False, None),
        ({"dropout": 0.5, "layers": 1}, False, None),
        ({"projected": True}, False, "an LSTM"),
        ({"dtype": torch.float64}, False, "an LSTM"),
        ({"device": "meta"}, False, "one kernel on a GPU"),
    ],
)
def test_what_runs_as_it_is(
    changed: dict[str, Any],
    trains: bool,
    expected: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of LSTMs those alone whose kernel torch's lowering takes."""
    dtype, device = changed.get("dtype", torch.float32), changed.get("device", "cpu")
    count, width = changed.get("layers", 2), 4 + changed.get("projected", False)
    graph = torch.fx.Graph()
    names = ["x", "h", *(f"w{k}" for k in range(width * count))]
    x, h, *weights = (graph.placeholder(name) for name in names)
    rest = (True, count, changed.get("dropout", 0.0), changed.get("train", True), False, True)
    graph.output(graph.call_function(torch.lstm, (x, (h, h), weights, *rest)))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    given = [torch.empty(2, dtype=dtype, device=device, requires_grad=trains) for _ in names]
    with caplog.at_level("INFO", logger="magjit"):
        for _ in range(2):
            assert recurrent_as_it_is(gm, given) is (expected is not None)
    assert (expected or "") in caplog.text
    assert len(caplog.records) == (expected is not None)  # said once, however often it is asked
