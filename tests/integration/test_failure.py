"""Whatever goes wrong, and wherever: the program's own outcome, and nothing left behind."""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from magjit import observe, pipeline
from magjit.bytecode import EventKind
from magjit.errors import BackendError, GraphBreakError, MagJITError
from magjit.refgraph.recorder import StateRecorder


class Boom(Exception):
    pass


class Counter(nn.Module):
    """Writes to itself before and after the place where something can happen."""

    def __init__(self, happens: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.marks, self.happens = [], happens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.marks.append("begins")
        self.seen += 1
        with torch.no_grad():
            y = self.linear(x)
            self.happens(y)
        self.marks.append("ends")
        return y * 2


def state(model: Counter) -> tuple[Any, ...]:
    return model.marks, float(model.seen), model.linear.weight.sum().item()


def raises(error: BaseException) -> Callable[[torch.Tensor], object]:
    def happens(y: torch.Tensor) -> object:
        raise error

    return happens


def twins(happens: Callable[[torch.Tensor], object]) -> tuple[Counter, Counter]:
    torch.manual_seed(0)
    eager = Counter(happens)
    torch.manual_seed(0)
    return eager, Counter(happens)


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the MagJITWarnings of a block."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if issubclass(w.category, magjit.MagJITWarning)]


# --- the program's own exceptions ---------------------------------------------------------------

ERRORS = [Boom("user"), ValueError("value"), KeyboardInterrupt(), SystemExit(3), StopIteration(1)]


@pytest.mark.parametrize("fullgraph", [False, True], ids=["split allowed", "fullgraph"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_exception_of_the_program(error: BaseException, fullgraph: bool) -> None:
    eager, model = twins(raises(error))
    compiled = magjit.compile(model, backend="eager", fullgraph=fullgraph)
    x = torch.randn(2, 4)
    with warned() as texts:
        for _ in range(2):
            with pytest.raises(type(error)) as wanted:
                eager(x)
            with pytest.raises(type(error)) as got:
                compiled(x)
            assert got.value is wanted.value
            assert state(eager) == state(model)
    assert not texts


def test_the_traceback_is_the_programs() -> None:
    _, model = twins(raises(Boom("here")))
    compiled = magjit.compile(model, backend="eager")
    with pytest.raises(Boom) as got:
        compiled(torch.randn(2, 4))
    names = [frame.filename for frame in traceback.extract_tb(got.value.__traceback__)]
    assert len([name for name in names if Path(magjit.__file__).parent in Path(name).parents]) <= 1
    assert names[-1] == __file__
    assert got.value.__cause__ is None and got.value.__context__ is None
    assert not getattr(got.value, "__notes__", [])


def test_after_an_exception_the_next_call_is_captured() -> None:
    trouble = {"on": True}

    def happens(y: torch.Tensor) -> None:
        if trouble["on"]:
            raise Boom

    eager, model = twins(happens)
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    for on in (True, False, False, True, False):
        trouble["on"] = on
        if on:
            for call in (eager, compiled):
                with pytest.raises(Boom):
                    call(x)
        else:
            assert torch.equal(eager(x), compiled(x))
        assert state(eager) == state(model)
    assert magjit.stats(compiled).captures == 1
    assert magjit.stats(compiled).replays == 2


def test_an_exception_that_the_program_catches_is_part_of_the_record() -> None:
    def happens(y: torch.Tensor) -> None:
        try:
            raise Boom
        except Boom:
            y += 1

    eager, model = twins(happens)
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    for _ in range(3):
        x = torch.randn(2, 4)
        assert torch.equal(eager(x), compiled(x))
        assert state(eager) == state(model)
    assert magjit.stats(compiled).replays == 2


def test_an_error_of_an_operator_is_the_same() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    compiled(torch.ones(2, 3), torch.ones(3, 2))
    texts = []
    for call in (program, compiled):
        with pytest.raises(RuntimeError) as got:
            call(torch.ones(2, 3), torch.ones(2, 3))
        texts.append(str(got.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("moment", ["capture", "replay"])
def test_a_wrong_call_raises_what_python_raises(moment: str) -> None:
    def program(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x * scale

    compiled = magjit.compile(program, backend="eager")
    if moment == "replay":
        compiled(torch.ones(2))
    for args, kwargs in (((), {}), ((torch.ones(2), 3), {}), ((torch.ones(2),), {"other": 1})):
        texts = []
        for call in (program, compiled):
            with pytest.raises(TypeError) as got:
                call(*args, **kwargs)
            texts.append(str(got.value))
        assert texts[0] == texts[1]


# --- backends -----------------------------------------------------------------------------------


def failing_backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        raise Boom("the backend")
    finally:
        torch.set_default_dtype(torch.float32)


def useless_backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    return 3


def interrupted_backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    raise KeyboardInterrupt


def nothing(y: torch.Tensor) -> None:
    pass


@pytest.mark.parametrize("backend", [failing_backend, useless_backend])
def test_a_backend_that_fails_warns_once_and_runs_eagerly(backend: Any) -> None:
    eager, model = twins(nothing)
    compiled = magjit.compile(model, backend=backend)
    with warned() as texts:
        for _ in range(4):
            x = torch.randn(2, 4)
            assert torch.equal(eager(x), compiled(x))
            assert state(eager) == state(model)
    assert len(texts) == 1 and "Counter" in texts[0] and backend.__name__ in texts[0]
    assert magjit.stats(compiled).captures == 0


@pytest.mark.parametrize("backend", [failing_backend, useless_backend])
def test_a_backend_that_fails_raises_with_fullgraph_after_the_run(backend: Any) -> None:
    eager, model = twins(nothing)
    compiled = magjit.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(2, 4)
    for _ in range(2):
        eager(x)
        with pytest.raises(BackendError, match=backend.__name__) as got:
            compiled(x)
        assert state(eager) == state(model)
        if backend is failing_backend:
            assert isinstance(got.value.__cause__, Boom)


def test_an_interrupt_in_a_backend_passes() -> None:
    eager, model = twins(nothing)
    compiled = magjit.compile(model, backend=interrupted_backend)
    x = torch.randn(2, 4)
    for _ in range(2):
        eager(x)
        with pytest.raises(KeyboardInterrupt):
            compiled(x)
        assert state(eager) == state(model)


# --- MagJIT's own failures ----------------------------------------------------------------------


@dataclass(frozen=True)
class Injection:
    """A part of MagJIT that is made to fail."""

    name: str
    apply: Callable[[pytest.MonkeyPatch], None]


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


def in_handler(kind: EventKind) -> Injection:
    return Injection(
        f"handler of {kind.name}",
        lambda patch: patch.setitem(observe._HANDLERS, kind, broken),
    )


def in_pass(index: int) -> Injection:
    name = pipeline.PASSES[index][0]

    def apply(patch: pytest.MonkeyPatch) -> None:
        passes = list(pipeline.PASSES)
        passes[index] = (name, broken)
        patch.setattr(pipeline, "PASSES", passes)

    return Injection(f"pass {name}", apply)


def in_attribute(owner: Any, name: str) -> Injection:
    return Injection(f"{owner.__name__}.{name}", lambda patch: patch.setattr(owner, name, broken))


INJECTIONS = [
    *(in_handler(kind) for kind in (EventKind.LOAD_ATTR, EventKind.CALL, EventKind.LOAD_GLOBAL)),
    in_handler(EventKind.STORE_ATTR),
    *(in_pass(index) for index in range(len(pipeline.PASSES))),
    in_attribute(StateRecorder, "enter_frame"),
    in_attribute(StateRecorder, "read"),
    in_attribute(StateRecorder, "external_tensor"),
    in_attribute(observe, "decode"),
    in_attribute(observe, "register_roots"),
    in_attribute(observe, "definition"),
]


@pytest.mark.parametrize("fullgraph", [False, True], ids=["split allowed", "fullgraph"])
@pytest.mark.parametrize("injection", INJECTIONS, ids=lambda injection: injection.name)
def test_a_failure_of_our_own(
    injection: Injection, fullgraph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, model = twins(nothing)
    compiled = magjit.compile(model, backend="eager", fullgraph=fullgraph)
    x = torch.randn(2, 4)
    with monkeypatch.context() as patch, warned() as texts:
        injection.apply(patch)
        for _ in range(3):
            expected = eager(x)
            if fullgraph:
                with pytest.raises(MagJITError, match="injected"):
                    compiled(x)
            else:
                assert torch.equal(expected, compiled(x))
            assert state(eager) == state(model)
    if not fullgraph:
        assert len(texts) == 1 and "injected" in texts[0], texts
    assert magjit.stats(compiled).captures == 0
    magjit.reset(compiled)
    for _ in range(2):
        assert torch.equal(eager(x), compiled(x))
    assert magjit.stats(compiled).captures == 1


# --- nothing left behind ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "happens, backend, error",
    [
        pytest.param(raises(Boom("user")), "eager", Boom, id="program raises"),
        pytest.param(nothing, failing_backend, BackendError, id="backend raises"),
        pytest.param(lambda y: y.sum().tolist(), "eager", GraphBreakError, id="split"),
        pytest.param(raises(KeyboardInterrupt()), "eager", KeyboardInterrupt, id="interrupt"),
    ],
)
def test_nothing_is_kept_alive_after_a_failure(happens: Any, backend: Any, error: Any) -> None:
    model = Counter(happens)
    compiled = magjit.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(2, 4)
    watched = [weakref.ref(x), weakref.ref(model), weakref.ref(compiled)]
    enabled, tracer = gc.isenabled(), sys.gettrace()
    try:
        compiled(x)
    except error as caught:
        traceback.clear_frames(caught.__traceback__)
        caught.__traceback__ = None
    else:
        pytest.fail("nothing was raised")
    assert (gc.isenabled(), sys.gettrace()) == (enabled, tracer)
    gc.collect()
    del x
    assert watched[0]() is None
    del model, compiled
    gc.collect()
    assert [reference() for reference in watched] == [None, None, None]


def test_the_collector_stays_off_where_it_was_off() -> None:
    _, model = twins(nothing)
    compiled = magjit.compile(model, backend="eager")
    gc.disable()
    try:
        compiled(torch.randn(2, 4))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_split_is_reported_with_its_place_after_the_run() -> None:
    eager, model = twins(lambda y: y.sum().tolist())
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    eager(x)
    with pytest.raises(GraphBreakError) as got:
        compiled(x)
    assert got.value.location is not None
    assert Path(got.value.location.filename) == Path(__file__)
    assert got.value.remedy
    assert state(eager) == state(model)
