"""Layers that are traced once: what is compiled is what it would have been."""

from __future__ import annotations

import copy
import gc
import logging
import random
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import magjit
from magjit.plugin import layers
from magjit.plugin.aot import aot
from magjit.plugin.inference import lower_for_inference
from magjit.plugin.layers import operators, recorded, repeats, tracing

from .layered_models import MODELS, ROUNDED, WIDTH, Block, Stack


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short layers are worth it, too; and nothing is kept of them."""
    monkeypatch.setattr(repeats, "LEAST_NODES", 2)
    for module in (tracing, recorded):
        monkeypatch.setattr(module, "LEAST_SAVED", 4)
    yield
    magjit.reset()
    assert not operators._forms


class Recorder:
    """Runs ATen graphs as they are, and keeps them."""

    name = "recorder"
    exact_random = True

    def __init__(self) -> None:
        self.graphs: list[list[Any]] = []

    def supports(self, gm):
        return []

    def compile(self, gm, example_inputs, context):
        def compile_aten(aten, inputs):
            self.graphs.append(calls(aten.graph))
            return aten.forward

        return aot(gm, example_inputs, context, forward=compile_aten)


def calls(graph: torch.fx.Graph) -> list[Any]:
    """Targets, constants, and which earlier nodes are read; what is equal if graphs are."""
    places = {node: k for k, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: f"%{places[one]}")
        name = str(node.target) if node.op == "call_function" else ""
        found.append((node.op, name, str(args)))
    return found


def stepped(model: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> list[Any]:
    """Results, and gradients of the input and of all weights; None where there is none."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(1)
    results = call(x)
    flat = torch.utils._pytree.tree_leaves(results)
    floating = [one for one in flat if one.is_floating_point() and one.requires_grad]
    sum((k + one).square().sum() for k, one in enumerate(floating[:2])).backward()
    return [*flat, x.grad, *(one.grad for one in model.parameters())]


_LIKE_ANOTHER = {
    "attention": "blocks",
    "one frozen in the middle": "first frozen",
    "all but one frozen": "first frozen",
    "shared weights": "blocks",
    "no_grad in each layer": "blocks",
    "no_grad for some layers": "blocks",
    "gradient of one element": "gradient of a mean",
}
"""They are cut as the model named is, and take long."""
LIKE_ANOTHER = _LIKE_ANOTHER | {
    "results on the way": "two values carried",
    "gradient of a transposed": "gradient of a transposed, but for the last",
}
LIKE_ANOTHER_WITHOUT_GRADIENTS = _LIKE_ANOTHER | {
    "gradient of a transposed": "gradient of a mean",
    "gradient of a transposed, but for the last": "gradient of a mean",
}


LONG_WITH_SYMBOLS = {
    "a result without gradient",
    "first frozen",
    "gradient of a transposed, but for the last",
}


def models(alike: Collection[str]) -> list[Any]:
    """Names of all models, with fixed sizes and with symbols; slow those alike, and long ones."""

    def is_slow(name: str, dynamic: bool) -> bool:
        return name in alike or (dynamic and name in LONG_WITH_SYMBOLS)

    return [
        pytest.param(name, dynamic, marks=[pytest.mark.slow] if is_slow(name, dynamic) else [])
        for name in MODELS
        for dynamic in (False, True)
    ]


@pytest.mark.parametrize(("name", "dynamic"), models(LIKE_ANOTHER))
def test_the_same_graphs(
    name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """As without, and results and gradients of eager mode."""
    build, *counts = MODELS[name]
    expected = counts[dynamic]
    model = build()
    twin = copy.deepcopy(model)
    pieces: list[int] = []
    expand = layers.Layers.expand

    def expanded(self: layers.Layers, joint: torch.fx.GraphModule) -> None:
        expand(self, joint)
        pieces.append(len(self.pieces))

    monkeypatch.setattr(layers.Layers, "expand", expanded)
    found = Recorder()
    call = magjit.compile(model, backend=found, dynamic=dynamic)
    inputs = [torch.randn(3, 5, WIDTH), torch.randn(3, 5, WIDTH)]
    if dynamic:
        inputs.append(torch.randn(2, 7, WIDTH))
    for x in inputs:
        wanted = stepped(twin, twin, x)
        for one, other in zip(stepped(model, call, x), wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, **ROUNDED.get(name, {}))
    if expected is not None:
        assert max(pieces, default=0) == expected
    assert not recwarn.list
    if not pieces:
        return

    monkeypatch.setattr("magjit.plugin.aot.once", lambda *_: None)
    whole = Recorder()
    magjit.reset()
    fresh = copy.deepcopy(twin)
    call = magjit.compile(fresh, backend=whole, dynamic=dynamic)
    for x in inputs:
        stepped(fresh, call, x)
    assert [sorted(one[:2] for one in graph) for graph in found.graphs] == [
        sorted(one[:2] for one in graph) for graph in whole.graphs
    ]


class Lowering(Recorder):
    """Keeps the ATen graph of a program without gradients."""

    sizes_of_data = True  # it runs ATen's operators

    def compile(self, gm, example_inputs, context):
        lowered = lower_for_inference(gm, example_inputs, context.fake_mode, {})
        if lowered is None:
            return super().compile(gm, example_inputs, context)
        self.graphs.append(calls(lowered.graph))
        return lowered.forward


RECORDED = {
    # How many layers are copies, for fixed sizes and for symbols; 0 for all others.
    "blocks": (3, 2),
    "attention": (3, 2),
    "two values carried": (3, 2),
    "first frozen": (4, 3),
    "one frozen in the middle": (4, 3),
    "all but one frozen": (4, 3),
    "shared weights": (3, 2),
    "no_grad in each layer": (4, 3),
    "no_grad for some layers": (1, 0),  # three as one, twice
    "results on the way": (3, 2),
    "a result without gradient": (2, 2),
    "views passed on": (4, 3),
    "running statistics": (3, 2),
    "sizes of data": (3, 0),
}


@pytest.mark.parametrize(("name", "dynamic"), models(LIKE_ANOTHER_WITHOUT_GRADIENTS))
def test_the_same_recorded(name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients: node by node as without, and eager mode's results."""
    model = MODELS[name][0]().eval()
    copied: list[int] = []
    again = recorded.LayerRecorder._again

    def counted(self: Any, recorder: Any, found: Any, inputs: Any) -> Any:
        copied.append(len(found.nodes))
        return again(self, recorder, found, inputs)

    monkeypatch.setattr(recorded.LayerRecorder, "_again", counted)
    inputs = [torch.randn(3, 5, WIDTH), torch.randn(2, 7, WIDTH)]
    graphs = []
    with torch.no_grad():
        for _ in range(2):
            backend = Lowering()
            call = magjit.compile(model, backend=backend, dynamic=dynamic)
            for x in inputs:
                torch.testing.assert_close(call(x), model(x), **ROUNDED.get(name, {}))
            graphs.append(backend.graphs)
            magjit.reset()
            monkeypatch.setattr(recorded, "repeats_of", lambda *_: [])
    if dynamic:  # The order of symbols in a product changes from one time to the next.
        graphs = [[[one[:2] for one in graph] for graph in found] for found in graphs]
    assert graphs[0] == graphs[1]
    counts = RECORDED.get(name, (3, 2) if name.startswith("gradient") else (0, 0))
    assert len(copied) == counts[dynamic] * (1 if dynamic else len(inputs))


def test_inputs_that_are_one_tensor() -> None:
    """What a layer's copy is given may be one tensor twice, or two."""

    class Twice(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a = x
            for k in range(4):
                b = F.dropout(a, 0.5, False) if k % 2 else y.tanh()
                a = torch.addcmul(a.sin(), b.cos(), a + b).tanh()
            return a

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with torch.no_grad():
        call = magjit.compile(Twice(), backend=Lowering())
        torch.testing.assert_close(call(x, y), Twice()(x, y))


def test_autocast_around_it() -> None:
    model = Stack(Block)
    twin = copy.deepcopy(model)
    call = magjit.compile(model, backend="aot_eager")
    recorded = magjit.compile(model, backend=Recorder())
    x = torch.randn(3, 5, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = stepped(twin, twin, x)
        for found in (stepped(model, call, x), stepped(model, recorded, x)):
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)


def test_dropout_draws_as_it_would() -> None:
    model = Stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.GELU()), 5)
    twin = copy.deepcopy(model)
    x = torch.randn(3, WIDTH)
    call = magjit.compile(model, backend=Recorder())
    for one, other in zip(stepped(model, call, x), stepped(twin, twin, x), strict=True):
        assert torch.equal(one, other)


def test_hooks_of_all_modules_see_none_of_it() -> None:
    model = Stack(Block)
    x = torch.randn(3, 5, WIDTH)
    seen: list[type] = []
    register = nn.modules.module.register_module_forward_hook
    with register(lambda module, given, result: seen.append(type(module))):
        model(x)
        wanted = set(seen)
        seen.clear()
        stepped(model, magjit.compile(model, backend=Recorder()), x)
        magjit.reset()
        with torch.no_grad():
            magjit.compile(model, backend=Lowering())(x)
    assert set(seen) == wanted


def test_an_error_on_the_way_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The program is traced as a whole then."""

    def fails(*_: Any) -> Any:
        torch._C._set_grad_enabled(False)
        raise ValueError("planted")

    model = Stack(Block)
    twin = copy.deepcopy(model)
    x = torch.randn(3, 5, WIDTH)
    wanted = stepped(twin, twin, x)
    for place in ("magjit.plugin.layers.tracing._joint_graph", f"{operators.__name__}.described"):
        with monkeypatch.context() as planted, caplog.at_level(logging.DEBUG, "magjit.plugin"):
            planted.setattr(place, fails)
            magjit.reset()
            call = magjit.compile(model, backend=Recorder(), fullgraph=True)
            for one, other in zip(stepped(model, call, x), wanted, strict=True):
                torch.testing.assert_close(one, other)
        assert torch.is_grad_enabled()
        assert "planted" in caplog.text
        caplog.clear()


def test_an_error_of_the_backend_is_reported_once() -> None:
    """What fails behind the trace does not fail a second time."""
    failures = []

    class Failing(Recorder):
        def compile(self, gm, example_inputs, context):
            def compile_aten(aten, inputs):
                failures.append(len(aten.graph.nodes))
                raise ValueError("no kernel")

            return aot(gm, example_inputs, context, forward=compile_aten)

    call = magjit.compile(Stack(Block), backend=Failing(), fullgraph=True)
    with pytest.raises(magjit.errors.BackendError, match="no kernel"):
        call(torch.randn(3, WIDTH))
    assert len(failures) == 1


def test_nothing_is_kept() -> None:
    """Not even by what is compiled: it refers to the function that split the joint graph."""
    kept: list[weakref.ref[Any]] = []
    once = tracing.once

    def kept_once(*args: Any) -> Any:
        found = once(*args)
        kept.extend(weakref.ref(node) for one in found.pieces.values() for node in one.form.nodes)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("magjit.plugin.aot.once", kept_once)
        model = Stack(Block)
        call = magjit.compile(model, backend=Recorder())
        stepped(model, call, torch.randn(3, WIDTH))
    gc.collect()
    assert kept
    assert not [one() for one in kept if one() is not None]


# -- drawn layers ---------------------------------------------------------------------------------

PARTS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda x, w, first: F.linear(x, w),
    lambda x, w, first: x @ w,
    lambda x, w, first: x + first,
    lambda x, w, first: x * w[0],
    lambda x, w, first: F.layer_norm(x, (WIDTH,), w[0], w[1]),
    lambda x, w, first: F.gelu(x),
    lambda x, w, first: x * torch.sigmoid(x),
    lambda x, w, first: x * torch.bernoulli(torch.full_like(x, 0.75)),
    lambda x, w, first: (x @ first.mT / WIDTH).softmax(-1) @ x,
    lambda x, w, first: torch.cat(x.chunk(2, -1)[::-1], -1),
    lambda x, w, first: x.transpose(0, 1).cumsum(0).transpose(0, 1).tanh(),
    lambda x, w, first: x.view(x.shape[0], x.shape[1], 2, -1).flip(2).flatten(2),
    lambda x, w, first: torch.where(x > first, x, 0.5 * first),
    lambda x, w, first: x.detach() * 0.5 + first,
    lambda x, w, first: (x.double() * 2).to(x.dtype) - x.amax(-1, keepdim=True),
    lambda x, w, first: F.embedding(x.argmax(-1), w) + x,
]


class Drawn(nn.Module):
    """Layers of the same parts; which parameters have gradients is drawn, too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        self.parts = [chosen.choice(PARTS) for _ in range(chosen.randint(3, 8))]
        self.count = chosen.randint(3, 5)
        frozen = chosen.choice([0.0, 0.2, 0.9])
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 3, chosen.random() >= frozen)
            for _ in range(self.count * len(self.parts))
        )
        self.ways = chosen.choice(
            [lambda x: x, lambda x: x.mean(1), lambda x: x[:, 0], lambda x: x.transpose(0, 1) * 2]
        )

    def forward(self, x: Tensor) -> Any:
        weights = iter(self.weights)
        passed = []
        for _ in range(self.count):
            first = x
            for part in self.parts:
                x = part(x, next(weights), first)
            passed.append(x)
        return self.ways(x), passed[1]


def check_drawn(seed: int) -> None:
    model = Drawn(seed)
    twin = copy.deepcopy(model)
    dynamic = seed % 2 == 0
    call = magjit.compile(model, backend=Recorder(), dynamic=dynamic)
    for shape in ((3, 5, WIDTH), (4, 2, WIDTH)):
        x = torch.randn(shape)
        for one, other in zip(stepped(model, call, x), stepped(twin, twin, x), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    magjit.reset()
    call = magjit.compile(model, backend=Lowering(), dynamic=dynamic)
    with torch.no_grad():
        torch.manual_seed(2)
        found = call(x)
        torch.manual_seed(2)
        torch.testing.assert_close(found, twin(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_drawn_layers(seed: int, recwarn: pytest.WarningsRecorder) -> None:
    check_drawn(seed)
    assert not recwarn.list


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(8, 400))
def test_more_drawn_layers(seed: int) -> None:
    check_drawn(seed)


# -- what comes again -----------------------------------------------------------------------------


def found_in(program: Callable[..., Any]) -> list[list[list[str]]]:
    graph = torch.fx.symbolic_trace(program).graph
    found = repeats.find_repeats(graph, lambda node: node.target != "never", 4)
    return [[[node.name for node in one.nodes] for one in each.windows] for each in found]


def test_it_is_cut_where_the_fewest_values_pass() -> None:
    def program(x: Tensor) -> Tensor:
        for _ in range(4):
            a = x.tanh()
            b = x.sigmoid()
            x = a + b
        return x

    (windows,) = found_in(program)
    assert windows == [
        ["tanh", "sigmoid", "add"],
        *([f"tanh_{k}", f"sigmoid_{k}", f"add_{k}"] for k in (1, 2, 3)),
    ]


def test_the_same_inputs_have_the_same_place() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.addcmul(x.tanh(), x, y)
        for _ in range(3):
            x = torch.addcmul(x.tanh(), y, x)
        return x

    first, second = found_in(program)
    assert [len(first), len(second)] == [3, 3]
    assert first[0] == ["tanh", "addcmul"]
    assert second[0] == ["tanh_3", "addcmul_3"]


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1, 1.0), (1, True), (1, 2), ("floor", "trunc"), ((1, 2), [1, 2])],
)
def test_numbers_that_differ(one: Any, other: Any) -> None:
    def program(x: Tensor) -> Tensor:
        for number in (one, one, other, other):
            x = torch.abs(x)
            x = x.unknown(number)
            x = torch.neg(x)
        return x

    assert all(len(windows) <= 2 for windows in found_in(program))


def test_what_is_used_otherwise() -> None:
    """The last layer's second value goes nowhere."""

    def program(x: Tensor) -> Tensor:
        y = x
        for k in range(5):
            a = (x * y).tanh()
            x = a.sigmoid() + x
            y = a if k < 3 else y
        return x

    for windows in found_in(program):
        assert len(windows) <= 4


def test_what_may_not_be_a_part() -> None:
    def program(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.tanh().never().sigmoid()
        return x

    assert found_in(program) == []


def test_short_programs_have_none() -> None:
    assert found_in(lambda x: x.tanh().tanh().tanh()) == []
    assert found_in(lambda x: x) == []
