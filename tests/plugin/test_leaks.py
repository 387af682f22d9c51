"""What is compiled and dropped leaves nothing behind."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref

import pytest
import torch
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch.fx import graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from magjit.plugin import BackendContext, InputDescriber, make_graph_module, resolve, run_backend
from magjit.plugin.aot import aot
from magjit.plugin.generated_source import sources_tied_to_result
from magjit_inductor import backend as inductor

from .graphs import compile_for, functional_graph


def program(x, w):
    return torch.tanh(x @ w) * 3.25


def forget() -> None:
    """What torch itself keeps of a compilation, beyond what the next one replaces."""
    PhiloxStateTracker.reset()
    for method in vars(ShapeEnv).values():
        getattr(method, "cache_clear", lambda: None)()


class Aten:
    """The ATen graphs as they are."""

    name = "aten"

    def supports(self, gm):
        return []

    def compile(self, gm, example_inputs, context):
        return aot(gm, example_inputs, context, forward=lambda gm, inputs: gm.forward)


BACKENDS = [pytest.param(one, id=resolve(one).name) for one in ("eager", Aten(), inductor)]


def compile_and_train(backend, graph: torch.fx.Graph) -> list[weakref.ref]:
    """References to all that should be gone afterwards."""
    x, w = torch.randn(8, 8), torch.nn.Parameter(torch.randn(8, 8))
    gm = make_graph_module({}, graph)
    context = BackendContext()
    describer = InputDescriber()
    given = [describer.describe(x), describer.describe(w, static=True)]
    compiled = run_backend(resolve(backend), gm, given, context)
    loss = compiled(x, w)[0].sum()
    if loss.requires_grad:
        loss.backward()
    watched = [x, w, gm, context.fake_mode, context.shape_env, context.tracing_context]
    return [weakref.ref(one) for one in watched if one is not None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_dies_with_the_compiled_graph(backend, caplog) -> None:
    """Torch keeps parts of what it compiled last, and lets go of them when it compiles more."""
    graph = functional_graph(program).graph
    watched = compile_and_train(backend, graph)
    for _ in range(4):
        compile_and_train(backend, graph)
        forget()
        caplog.clear()
        for handler in logging.getLogger().handlers:  # pytest's keep what torch logged
            getattr(handler, "reset", lambda: None)()
        gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)


@pytest.mark.parametrize("backend", BACKENDS)
def test_generated_sources_do_not_pile_up(backend) -> None:
    graph = functional_graph(program).graph
    # At the first backward AOTAutograd copies a graph where nobody can see it.
    with torch.set_grad_enabled(not isinstance(backend, Aten)):
        compile_and_train(backend, graph)
        gc.collect()
        before = len(graph_module._loader.eval_cache)
        for _ in range(5):
            compile_and_train(backend, graph)
        gc.collect()
    assert len(graph_module._loader.eval_cache) <= before


def test_sources_stay_while_the_graph_lives() -> None:
    x = torch.randn(3)
    gm = make_graph_module({}, functional_graph(lambda x: x + 1).graph)
    compiled = run_backend(resolve("eager"), gm, [InputDescriber().describe(x)], BackendContext())
    name = compiled.__code__.co_filename
    del gm
    gc.collect()
    assert "x + 1" in graph_module._loader.eval_cache[name]
    del compiled
    gc.collect()
    assert name not in graph_module._loader.eval_cache


def test_a_collection_while_sources_are_looked_through() -> None:
    """Others' sources go at any step, as when the collector runs there."""
    owners = [torch.nn.Identity() for _ in range(200)]
    for owner in owners:
        with sources_tied_to_result() as tie:
            make_graph_module({}, functional_graph(lambda x: x + 1).graph)
        tie(owner)
    with sources_tied_to_result() as tie:
        last = make_graph_module({}, functional_graph(lambda x: x * 2).graph)
    name = next(reversed(graph_module._loader.eval_cache))

    def collecting(frame, event, _):
        frame.f_trace_opcodes = True
        del owners[-1:]
        return collecting

    sys.settrace(collecting)
    try:
        tie(last)
    finally:
        sys.settrace(None)
    assert len(owners) < 200
    assert name in graph_module._loader.eval_cache
    del last
    gc.collect()
    assert name not in graph_module._loader.eval_cache


def test_threads_compile_at_once() -> None:
    failures: list[BaseException] = []

    def work(backend) -> None:
        try:
            for _ in range(3):
                y = torch.randn(4, 4, requires_grad=True)
                compiled = compile_for(backend, lambda y: (y * 2).sin(), [y])
                torch.testing.assert_close(compiled(y)[0], (y * 2).sin())
                compiled(y)[0].sum().backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(b,)) for b in ("aot_eager", inductor, "eager")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
