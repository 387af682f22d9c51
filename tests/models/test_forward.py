"""Ten models of the transformers library: one graph a forward call, and what eager computes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

import magjit
from agreement import differences, module_state, opaque_nodes, operator_differences
from compilers import RealGraph
from profiling import aten_operators

from .zoo import TRANSFORMERS, Model

pytestmark = pytest.mark.skipif(not TRANSFORMERS, reason="needs transformers")


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


@pytest.mark.parametrize("row", TRANSFORMERS, ids=lambda row: row.name)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_a_forward_call_is_one_graph(row: Model, grad: bool) -> None:
    eager, model = row.make(), row.make()
    backend = RealGraph()
    compiled = magjit.compile(model, backend=backend, fullgraph=True)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            args, kwargs = row.inputs()
            expected, actual = eager(*args, **kwargs), compiled(*args, **kwargs)
            assert not list(differences(expected, actual))
            assert not list(differences(module_state(eager), module_state(model), "state"))
        stats = magjit.stats(compiled)
        assert (stats.captures, stats.replays, stats.splits) == (1, 2, 0)
        (graph,) = backend.graphs
        assert not opaque_nodes(graph)
        tasks = [partial(call, *args, **kwargs) for call in (eager, compiled)]
        assert operator_differences(*map(aten_operators, tasks)) == row.dispatched


@pytest.mark.parametrize("row", TRANSFORMERS, ids=lambda row: row.name)
def test_other_shapes_and_modes_are_captured_anew(row: Model) -> None:
    model = row.make()
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    args, kwargs = row.inputs()
    half = {name: value[:1] for name, value in kwargs.items()}
    with torch.no_grad():
        for given in (kwargs, half, kwargs, half):
            assert not list(differences(model(*args, **given), compiled(*args, **given)))
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.replays) == (2, 2)
