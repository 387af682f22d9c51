"""Inductor: settings as torch.compile takes them, the graphs it was given, random numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
from magjit.plugin import BackendContext, BackendOptionError, resolve
from magjit.plugin.calls import current_call
from magjit_inductor import InductorBackend, backend, compile_for_torch
from magjit_inductor.changed_results import ChangedResultError
from magjit_inductor.steps import Step

from .graphs import compile_for


def linear(x, w):
    return F.gelu(F.linear(x, w))


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    return [torch.randn(4, 8), torch.nn.Parameter(torch.randn(3, 8))]


@pytest.mark.parametrize(
    "mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_modes_are_torch_compiles(mode: str, inputs: list[torch.Tensor]) -> None:
    configured = resolve(backend, mode=mode)
    assert isinstance(configured, InductorBackend)
    assert configured.config == (
        {} if mode == "default" else torch._inductor.list_mode_options(mode)
    )
    if "autotune" not in mode:  # that takes a minute of g++ on a CPU
        compiled = compile_for(configured, linear, inputs, static=[1])
        torch.testing.assert_close(compiled(*inputs)[0], linear(*inputs))


def test_options_are_torch_compiles(inputs: list[torch.Tensor]) -> None:
    options = {"max-fusion-size": 7, "epilogue_fusion": False, "trace.enabled": False}
    configured = resolve(backend, options=options)
    assert configured.config == {
        "max_fusion_size": 7,
        "epilogue_fusion": False,
        "trace.enabled": False,
    }
    compiled = compile_for(configured, linear, inputs, static=[1])
    torch.testing.assert_close(compiled(*inputs)[0], linear(*inputs))
    assert backend.config == {}, "the shared instance has no settings"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"mode": "reduce_overhead"}, "reduce_overhead.*\n.*'reduce-overhead'"),
        ({"options": {"max_autotun": True}}, "max_autotun"),
        ({"options": {"max_autotune": "yes"}}, "max_autotune"),
        ({"mode": "default", "options": {"max_autotune": True}}, "not both"),
        ({"mode": 7}, "string"),
    ],
)
def test_bad_settings_are_typed_errors(settings: dict, message: str) -> None:
    with pytest.raises(BackendOptionError, match=message):
        resolve(backend, **settings)


def test_dumps_have_graphs_and_code(inputs: list[torch.Tensor]) -> None:
    context = BackendContext(want_dumps=True)
    compile_for(backend, linear, inputs, static=[1], context=context)
    assert {"aten_forward.py", "inductor_forward.py"} <= set(context.dumps)
    assert "torch.ops.aten" in context.dumps["aten_forward.py"]
    assert "def call" in context.dumps["inductor_forward.py"]
    context = BackendContext(want_dumps=True, grad_enabled=False)
    compile_for(backend, linear, inputs, static=[1], context=context)
    assert set(context.dumps) == {"aten_inference.py", "inductor_inference.py"}


def test_nothing_is_dumped_unasked(inputs: list[torch.Tensor]) -> None:
    context = BackendContext(grad_enabled=False)
    compile_for(backend, linear, inputs, context=context)
    assert context.dumps == {}


@pytest.mark.parametrize("training", [False, True])
def test_fallback_random_draws_eagers_numbers(training: bool) -> None:
    def program(x):
        return F.dropout(x, 0.5, True) + torch.rand_like(x)

    x = torch.randn(32, 32, requires_grad=training)
    configured = resolve(backend, options={"fallback_random": True})
    compiled = compile_for(configured, program, [x])
    for seed in range(2):
        torch.manual_seed(seed)
        (ours,) = compiled(x)
        torch.manual_seed(seed)
        theirs = program(x)
        torch.testing.assert_close(ours, theirs)
        if training:
            torch.testing.assert_close(
                torch.autograd.grad(ours.sum(), x)[0], torch.autograd.grad(theirs.sum(), x)[0]
            )


def test_two_optimizer_steps_equal_eager() -> None:
    def program(x, w1, b1, w2):
        return F.linear(torch.tanh(F.linear(x, w1, b1)), w2).square().mean()

    def parameters() -> list[torch.nn.Parameter]:
        torch.manual_seed(0)
        return [torch.nn.Parameter(torch.randn(s) / 4) for s in ((16, 8), (16,), (4, 16))]

    x = torch.randn(5, 8)
    ours, theirs = parameters(), parameters()
    compiled = compile_for(backend, program, [x, *ours], static=[1, 2, 3])
    optimizers = [torch.optim.AdamW(p, lr=0.1) for p in (ours, theirs)]
    for _ in range(2):
        losses = [compiled(x, *ours)[0], program(x, *theirs)]
        torch.testing.assert_close(losses[0], losses[1])
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other)


def test_ambient_autocast_and_inference_mode(inputs: list[torch.Tensor]) -> None:
    def program(x, w):
        return x @ w.t()

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        compiled = compile_for(backend, program, inputs, static=[1])
        (out,) = compiled(*inputs)
        assert out.dtype is torch.bfloat16
        torch.testing.assert_close(out, program(*inputs))
    with torch.inference_mode():
        x = torch.randn(4, 8)
        compiled = compile_for(backend, program, [x, inputs[1]], static=[1])
        torch.testing.assert_close(compiled(x, inputs[1])[0], program(x, inputs[1]))


def test_torch_compile_takes_it(inputs: list[torch.Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear, backend=compile_for_torch, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), linear(*inputs))
    assert resolve(compile_for_torch) is not None
    assert isinstance(resolve(compile_for_torch), InductorBackend)
    torch._dynamo.reset()


# --- CUDA graphs --------------------------------------------------------------------------


@pytest.fixture
def generations() -> Iterator[list[int]]:
    from torch._dynamo.mutation_guard import GenerationTracker

    yield [GenerationTracker.generation]


def test_each_call_is_a_step_for_cuda_graphs(
    inputs: list[torch.Tensor], generations: list[int]
) -> None:
    from torch._dynamo.mutation_guard import GenerationTracker

    with torch.no_grad():
        plain = compile_for(backend, linear, inputs, static=[1])
        before = GenerationTracker.generation
        plain(*inputs)
        assert GenerationTracker.generation == before
        stepping = compile_for(resolve(backend, mode="reduce-overhead"), linear, inputs, static=[1])
        before = GenerationTracker.generation
        stepping(*inputs)
        stepping(*inputs)
        assert GenerationTracker.generation == before + 2


def returned(made: torch.Tensor) -> Step:
    """A graph that returns always the same memory, as a CUDA graph does."""
    return Step(lambda *inputs: [made, 3])


def generations_of(steps: list[Step], calls: list[int], monkeypatch) -> list[int]:
    """By how much each step of a call of this number raises the generation."""
    from torch._dynamo.mutation_guard import GenerationTracker

    raised = []
    for step, call in zip(steps, calls, strict=True):
        before = GenerationTracker.generation
        monkeypatch.setattr("magjit_inductor.steps.current_call", lambda call=call: call)
        step()
        raised.append(GenerationTracker.generation - before)
    return raised


def test_graphs_of_one_call_are_one_generation_until_their_results_are_copied(monkeypatch) -> None:
    memory = torch.ones(3), torch.ones(3)
    first, second = map(returned, memory)
    both = [first, second, second]
    assert generations_of(both, [-1, -1, -1], monkeypatch) == [1, 0, 0]
    assert generations_of(both, [-2, -2, -2], monkeypatch) == [1, 1, 1]
    for step, made in zip(both, memory, strict=False):
        copied, number = step()
        assert number == 3 and torch.equal(copied, made)
        assert copied.data_ptr() != made.data_ptr()


def test_graphs_of_calls_of_their_own_lend_their_results(monkeypatch) -> None:
    made = torch.ones(3)
    step = returned(made)
    assert generations_of([step] * 4, [-3, -4, -5, 0], monkeypatch) == [1, 1, 1, 1]
    assert step()[0] is made


@pytest.mark.parametrize("shared", ["input", "result", "gradient"])
def test_results_that_share_memory_are_not_copied(shared: str, monkeypatch) -> None:
    x = torch.ones(3)
    results = {
        "input": [x.view(3, 1)],
        "result": [whole := torch.ones(4), whole[1:]],
        "gradient": [torch.ones(3, requires_grad=True)],
    }[shared]
    step = Step(lambda x: results)
    monkeypatch.setattr("magjit_inductor.steps.current_call", lambda: -7)
    for _ in range(3):
        assert all(one is made for one, made in zip(step(x), results, strict=True))
    assert generations_of([Step(lambda: [])], [-7], monkeypatch) == [0]


def test_a_call_of_a_compiled_program_has_a_number() -> None:
    numbers = []

    def note(gm, example_inputs):
        def run(*inputs):
            numbers.append(current_call())
            return gm.forward(*inputs)

        return run

    def program(x):
        y = x + 1
        return y.relu() * 2 if y.sum() > 0 else y

    compiled = magjit.compile(program, backend=note)
    for _ in range(4):
        numbers.clear()
        compiled(torch.ones(3))
    assert len(numbers) == 2 and numbers[0] == numbers[1] > 0
    last = numbers[0]
    compiled(torch.ones(3))
    assert numbers[2:] == [last + 1] * 2
    assert current_call() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_cuda_graphs_do_not_copy_parameters(training: bool) -> None:
    def program(x, w1, w2):
        return torch.relu(x @ w1) @ w2

    x = torch.randn(64, 256, device="cuda")
    weights = [torch.nn.Parameter(torch.randn(256, 256, device="cuda") / 16) for _ in range(2)]
    with torch.set_grad_enabled(training):
        compiled = compile_for(
            resolve(backend, mode="reduce-overhead"), program, [x, *weights], static=[1, 2]
        )
        for _ in range(4):
            x = torch.randn(64, 256, device="cuda")
            (out,) = compiled(x, *weights)
            expected = program(x, *weights)
            torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)
            if training:
                ours = torch.autograd.grad(out.sum(), weights)
                theirs = torch.autograd.grad(expected.sum(), weights)
                torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-3)
        torch.cuda.synchronize()
        with torch.profiler.profile() as trace:
            compiled(x, *weights)
            torch.cuda.synchronize()
    events = [event.name for event in trace.events()]
    assert "cudaGraphLaunch" in events, events
    copies = [name for name in events if name.startswith("Memcpy") or "copy_kernel" in name]
    assert len(copies) <= 1, copies  # x alone


@pytest.mark.gpu
def test_conformance_on_cuda() -> None:
    from magjit.plugin import conformance

    report = conformance.run(backend, device="cuda")
    print(report)
    report.raise_for_failures()


@pytest.mark.parametrize("gradients", [False, True])
def test_results_lie_in_memory_of_their_own(gradients: bool) -> None:
    """Inductor takes a product with ones for the other operand: the input itself."""

    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + w
        return (
            *(torch.ones_like(w) * w, w + torch.zeros_like(w), x * 1, w / 1),
            *(y, y * torch.ones_like(y), y.view(3, 1), *(y * 2).max(0)),
        )

    compiled = magjit.compile(program, backend="inductor")
    for _ in range(3):
        x, w = torch.randn(3), torch.randn(3).requires_grad_(gradients)
        found, expected = compiled(x, w), program(x, w)
        torch.testing.assert_close(found, expected)
        for results in (found, expected):
            memory = [one.untyped_storage().data_ptr() for one in (x, w, *results)]
            assert len(set(memory)) == len(memory) - 1  # the view's is that of y
        kept = w.detach().clone()
        with torch.no_grad():
            found[0].add_(1)
        torch.testing.assert_close(w.detach(), kept)


@pytest.mark.parametrize("gradients", [False, True])
def test_results_that_are_views_of_one_another(gradients: bool) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * 2 + 1).neg().view(2, 3).t()
        z = y * 3
        return z[1], z, y, z.t()[:1], y * torch.ones_like(y)

    compiled = magjit.compile(program, backend="inductor")
    for _ in range(3):
        x = torch.randn(6).requires_grad_(gradients)
        found, expected = compiled(x), program(x)
        for one in (found, expected):
            with torch.no_grad():
                one[1].mul_(2)
        torch.testing.assert_close(found, expected)


def test_a_pass_of_the_user_s_is_run_as_well() -> None:
    seen: list[int] = []
    options = {"joint_custom_pre_pass": lambda graph: seen.append(len(graph.nodes))}
    compiled = magjit.compile(lambda x: x.exp() * 2, backend="inductor", options=options)
    x = torch.randn(3)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), x.exp() * 2)
    assert seen


def changed_result(x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
    """Behind the cut, what the first graph has returned and its backward keeps is changed."""
    a = x * 2
    b = a.exp().sin()
    if when.sum().item() > 3:
        a.add_(1)
    return (a + b).sum()


def changed_view(x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
    a = (x * 2).view(2, 4).t()
    b = a.exp().sin()
    if when.sum().item() > 3:
        a[1:].add_(1)
    return (a + b).sum()


@pytest.mark.parametrize("program", [changed_result, changed_view])
def test_a_result_that_is_changed_before_its_backward(program: Any) -> None:
    compiled = magjit.compile(program, backend="inductor")
    raised = []
    for changes in (False, False, True, True, False):  # of each path the first is a capture
        mine, theirs = (torch.linspace(-1, 1, 8, requires_grad=True) for _ in range(2))
        when = torch.full((8,), float(changes))
        program(theirs, when).backward()
        result = compiled(mine, when)
        try:
            result.backward()
        except ChangedResultError as error:
            assert isinstance(error, RuntimeError) and "clone" in str(error)
            raised.append(changes)
        else:
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert raised and all(raised)


def test_a_result_that_a_backward_needs_dies_with_it() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = (x * 2).view(2, 4).t()
        return a, a.exp().sin()

    compiled = magjit.compile(program, backend="inductor")
    for _ in range(3):
        a, b = compiled(torch.linspace(-1, 1, 8, requires_grad=True))
    seen = [weakref.ref(one.untyped_storage()) for one in (a, b)]
    b.sum().backward()
    del a, b
    assert not any(one() for one in seen)
