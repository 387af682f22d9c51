"""The example models: the same at every build, one graph each, and no difference from eager."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

import magjit
from agreement import (
    differences,
    module_state,
    opaque_nodes,
    operator_differences,
)
from compilers import RealGraph
from examples.models import MODELS, build
from profiling import aten_operators


@pytest.mark.parametrize("name", MODELS)
def test_a_build_is_the_same_every_time(name: str) -> None:
    state = torch.get_rng_state()
    (one, inputs), (other, same_inputs) = build(name), build(name)
    assert torch.equal(state, torch.get_rng_state())
    assert not one.training
    with torch.no_grad():
        assert not list(differences(one(*inputs), other(*same_inputs)))


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ValueError, match="'small' or 'full'"):
        build("BERT", "medium")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_one_graph_and_equals_eager(name: str) -> None:
    (eager, inputs), (model, _) = build(name), build(name)
    others = tuple(value.flip(-1) for value in inputs)
    backend = RealGraph()
    compiled = magjit.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for arguments in (inputs, others, inputs):
            assert not list(differences(eager(*arguments), compiled(*arguments)))
            assert not list(differences(module_state(eager), module_state(model), "state"))
        dispatched = [aten_operators(partial(call, *inputs)) for call in (eager, compiled)]
    (graph,) = backend.graphs
    assert not opaque_nodes(graph)
    assert magjit.stats(compiled).captures == 1
    assert not operator_differences(*dispatched)


@pytest.mark.parametrize("name", MODELS)
def test_training_gives_the_same_gradients(name: str) -> None:
    (eager, inputs), (model, _) = build(name), build(name)
    # Batch norm needs more than one value a channel, which one small image does not leave.
    inputs = tuple(torch.cat([value, value.flip(-1)]) for value in inputs)
    compiled = magjit.compile(model, backend="eager")
    for _ in range(2):
        for call in (eager, compiled):
            call.train()
            torch.manual_seed(1)
            loss(call(*inputs)).backward()
        assert not list(differences(module_state(eager), module_state(model), "state"))
    assert magjit.stats(compiled).replays == 1


def loss(output: object) -> torch.Tensor:
    """The mean square of every tensor in a result that has a gradient."""
    if isinstance(output, torch.Tensor):
        return output.float().square().mean() if output.requires_grad else torch.zeros(())
    items = output if isinstance(output, list | tuple) else ()
    if isinstance(output, dict):
        items = tuple(output.values())
    elif hasattr(output, "__dataclass_fields__"):
        items = tuple(vars(output).values())
    return sum((loss(item) for item in items), torch.zeros(()))
