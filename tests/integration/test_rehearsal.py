"""Programs that go another way from their second call on: recorded at once, and without a trace."""

from __future__ import annotations

import copy
import random
import sys
import threading
import warnings
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import magjit
from magjit import config, dispatch, rehearsal

X = torch.arange(6.0).reshape(2, 3) + 1


class Program(torch.nn.Module):
    """``again`` is what it does from the second call on."""

    def __init__(self, again: Callable[[Program, torch.Tensor], Any], **state: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.again = again
        self.began = False
        self.register_buffer("total", torch.zeros(3))
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        if not self.began:
            self.began = True
            return self.linear(x)
        return self.linear(x) * 2, self.again(self, x)


class Slotted:
    __slots__ = ("count", "extra")

    def __init__(self) -> None:
        self.count = 0


class Dying:
    log: list[str] = []

    def __del__(self) -> None:
        self.log.append("died")


def cell_writer() -> tuple[Callable[[], int], Callable[[], int]]:
    held = 0

    def write() -> int:
        nonlocal held
        held += 1
        return held

    return write, lambda: held


WRITE, HELD = cell_writer()
COUNT = 0


def sets_attributes(self: Program, x: torch.Tensor) -> None:
    self.mask = x > 2
    if hasattr(self, "note"):
        del self.note
    self.other = "again"


def fills_a_dict(self: Program, x: torch.Tensor) -> int:
    self.table.pop("a", None)
    self.table["c"] = x.sum(0)
    self.table["a"] = 1
    return len(self.table)


def fills_an_ordered_dict(self: Program, x: torch.Tensor) -> list[str]:
    self.table.move_to_end("a")
    return list(self.table)


def fills_a_default_dict(self: Program, x: torch.Tensor) -> int:
    self.table["new"].append(1)
    return len(self.table)


def fills_a_list(self: Program, x: torch.Tensor) -> int:
    self.items.insert(0, 5)
    self.items.sort()
    return len(self.items)


def adds_to_containers(self: Program, x: torch.Tensor) -> None:
    self.items.append(1)
    self.members.add(3)
    self.queue.append(4)


def changes_a_set(self: Program, x: torch.Tensor) -> int:
    self.members.discard(2)
    return len(self.members)


def sets_slots(self: Program, x: torch.Tensor) -> None:
    self.slotted.count = 7
    self.slotted.extra = "there"


def writes_a_cell(self: Program, x: torch.Tensor) -> int:
    return WRITE()


def writes_a_global(self: Program, x: torch.Tensor) -> None:
    global COUNT
    COUNT = COUNT + 1


@torch.no_grad()
def changes_a_buffer(self: Program, x: torch.Tensor) -> None:
    self.total.add_(x.sum(0))
    self.total[0] = 3


def changes_a_tensor_with_a_gradient(self: Program, x: torch.Tensor) -> None:
    self.hidden = self.linear(x) if self.hidden is None else self.hidden.mul_(self.linear(x))


def draws(self: Program, x: torch.Tensor) -> Any:
    return torch.rand(2), random.random() < 2, np.random.rand() < 2


def prints(self: Program, x: torch.Tensor) -> None:
    print("again")


def warns(self: Program, x: torch.Tensor) -> None:
    warnings.warn("again", stacklevel=1)


def catches_everything(self: Program, x: torch.Tensor) -> None:
    try:
        print("again")
        self.done = True
    except BaseException:
        self.caught = True
        print("caught")
    finally:
        self.left = True


def raises(self: Program, x: torch.Tensor) -> None:
    self.items.append(1)
    raise ValueError("again")


def exits(self: Program, x: torch.Tensor) -> None:
    self.items.append(1)
    raise SystemExit(3)


def makes_what_dies(self: Program, x: torch.Tensor) -> None:
    Dying()


def takes_from_an_iterator(self: Program, x: torch.Tensor) -> int:
    return next(self.iterator)


def changes_an_array(self: Program, x: torch.Tensor) -> None:
    self.array[0] += 1


def changes_a_tensor_over_an_array(self: Program, x: torch.Tensor) -> None:
    torch.from_numpy(self.array).add_(1)


def leaves_grad_mode_off(self: Program, x: torch.Tensor) -> None:
    torch.set_grad_enabled(False)
    self.off = True


def imports(self: Program, x: torch.Tensor) -> None:
    import this_module_is_nowhere  # noqa: F401


def sets_class_attributes(self: Program, x: torch.Tensor) -> None:
    Slotted.shared = 1


def normalises(self: Program, x: torch.Tensor) -> torch.Tensor:
    return self.norm(x)


def sets_a_gradient(self: Program, x: torch.Tensor) -> None:
    self.linear.weight.grad = torch.ones(3, 3)


def contents(value: Any) -> Any:
    """A picture of a value that no later change can reach, with the order of what it holds."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(), value.requires_grad, value._version, contents(value.grad)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return [(key, contents(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, deque)):
        return [contents(item) for item in value]
    if isinstance(value, Slotted):
        return [getattr(value, name, "none") for name in (*value.__slots__, "shared")]
    if isinstance(value, torch.nn.Module):
        return contents(vars(value))
    return value if isinstance(value, (int, float, str, bytes, type(None))) else type(value)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


# What it does again; what it has; whether that can be rehearsed.
PROGRAMS: list[tuple[Callable[..., Any], dict[str, Any], bool]] = [
    (sets_attributes, {"note": "first"}, True),
    (fills_a_dict, {"table": {"a": 0, "b": 1}}, True),
    (fills_an_ordered_dict, {"table": OrderedDict(a=0, b=1)}, True),
    (fills_a_default_dict, {"table": defaultdict(list, a=[1])}, True),
    (fills_a_list, {"items": [3, 1, 2]}, True),
    (adds_to_containers, {"items": [], "members": {1, 2}, "queue": deque([1], maxlen=2)}, True),
    (changes_a_set, {"members": {1, 2, 3}}, True),
    (sets_slots, {"slotted": Slotted()}, True),
    (writes_a_cell, {}, True),
    (writes_a_global, {}, True),
    (changes_a_buffer, {}, True),
    (changes_a_tensor_with_a_gradient, {"hidden": None}, True),
    (draws, {}, True),
    (raises, {"items": []}, False),
    (exits, {"items": []}, False),
    (prints, {}, False),
    (warns, {}, False),
    (catches_everything, {}, False),
    (makes_what_dies, {}, False),
    (takes_from_an_iterator, {"iterator": iter(range(9))}, False),
    (changes_an_array, {"array": np.zeros(2)}, False),
    (changes_a_tensor_over_an_array, {"array": np.zeros(2)}, False),
    (leaves_grad_mode_off, {}, False),
    (imports, {}, False),
    (sets_class_attributes, {}, False),
    (normalises, {"norm": torch.nn.BatchNorm1d(3)}, False),
    (sets_a_gradient, {}, False),
]


def world(program: Program) -> Any:
    """All that a call of a program may change."""
    generators = torch.get_rng_state().numpy(), np.random.get_state()[1], random.getstate()[1]
    states = [zlib.crc32(repr(list(state)).encode()) for state in generators]
    outside = [COUNT, HELD(), list(Dying.log), torch.is_grad_enabled(), "shared" in vars(Slotted)]
    return [contents(program), states, outside]


def reset_world() -> None:
    global COUNT, WRITE, HELD
    COUNT = 0
    WRITE, HELD = cell_writer()
    Dying.log.clear()
    if "shared" in vars(Slotted):
        del Slotted.shared
    torch.set_grad_enabled(True)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def play(program: Program, call: Callable[[torch.Tensor], Any], calls: int, printed: Any) -> Any:
    """Results, exceptions, texts and the world after each call."""
    reset_world()
    seen = []
    for _ in range(calls):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = contents(call(X.clone()))
            except (Exception, SystemExit) as error:
                result = repr(error)
        texts = [str(one.message) for one in caught if one.category is UserWarning]
        seen.append([result, texts, printed().out, world(program)])
    return seen


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    # Whatever threads the tests before have left.
    monkeypatch.setattr(dispatch, "may_rehearse", lambda: True)
    yield
    magjit.reset()
    reset_world()


def built(again: Callable[..., Any], state: dict[str, Any]) -> Program:
    torch.manual_seed(0)
    state = {k: iter(range(9)) if k == "iterator" else copy.deepcopy(v) for k, v in state.items()}
    return Program(again, **state)


@pytest.mark.parametrize(
    ("again", "state", "rehearsed"), PROGRAMS, ids=[again.__name__ for again, _, _ in PROGRAMS]
)
def test_nothing_shows(again, state, rehearsed, capsys) -> None:
    eager, ours = built(again, state), built(again, state)
    expected = play(eager, eager, 4, capsys.readouterr)
    compiled = magjit.compile(ours, backend="eager")
    captures = []

    def call(x: torch.Tensor) -> Any:
        try:
            return compiled(x)
        finally:
            captures.append(magjit.stats(compiled).captures)

    for number, (theirs, own) in enumerate(
        zip(expected, play(ours, call, 4, capsys.readouterr), strict=True)
    ):
        for what, one, other in zip(("result", "warnings", "text"), theirs, own, strict=False):
            assert same(one, other), f"call {number}, {what}: {one} {other}"
        for what, one, other in zip(
            ("program", "draws", "outside"), theirs[3], own[3], strict=True
        ):
            assert same(one, other), f"call {number}, {what}: {one} {other}"
    assert captures[0] == 1 + rehearsed
    if rehearsed and again is not draws and again is not changes_a_tensor_with_a_gradient:
        assert captures[1] == captures[0]


def test_it_can_be_turned_off() -> None:
    with config.override(rehearse=False):
        compiled = magjit.compile(Program(sets_attributes, note=""), backend="eager")
        compiled(X)
        assert magjit.stats(compiled).captures == 1


def test_another_thread_could_see_it(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "may_rehearse", rehearsal.may_rehearse)
    compiled = magjit.compile(Program(sets_attributes, note=""), backend="eager")
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        compiled(X)
    finally:
        stop.set()
        other.join()
    assert magjit.stats(compiled).captures == 1


def test_an_interrupt_leaves_no_trace(monkeypatch) -> None:
    program = Program(sets_attributes, note="first")
    compiled = magjit.compile(program, backend="eager")

    def interrupted(self, observation, manner):
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch.Controller, "keep", kept_once(interrupted))
    with pytest.raises(KeyboardInterrupt):
        compiled(X)
    assert program.note == "first"
    assert "mask" not in vars(program)
    assert sys.gettrace() is None


def kept_once(then: Callable[..., Any]) -> Callable[..., Any]:
    """``keep`` as it is for the first record, something else for the second."""
    keep, calls = dispatch.Controller.keep, []

    def kept(self, observation, manner, *rest):
        calls.append(1)
        return (keep if len(calls) == 1 else then)(self, observation, manner, *rest)

    return kept


def test_a_failing_backend_costs_the_rehearsal_only() -> None:
    compiled_graphs = []

    def backend(graph, inputs):
        compiled_graphs.append(graph)
        if len(compiled_graphs) == 2:
            raise RuntimeError("the second graph does not compile")
        return graph.forward

    program = Program(sets_attributes, note="first")
    compiled = magjit.compile(program, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = compiled(X), compiled(X)
    assert program.other == "again"
    assert torch.equal(second[0], first * 2)


def test_a_rule_of_another_library_is_not_run() -> None:
    calls = []

    @torch.library.custom_op("magjit_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + 1

    compiled = magjit.compile(Program(lambda self, x: counted(x)), backend="eager")
    compiled(X)
    assert calls == []
    compiled(X)
    assert calls == [1]


def test_large_tensors_are_not_copied() -> None:
    def again(self: Program, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.large.add_(1)

    program = Program(again, large=torch.zeros(17 << 20))
    compiled = magjit.compile(program, backend="eager")
    compiled(X)
    assert magjit.stats(compiled).captures == 1
    compiled(X)
    assert float(program.large.max()) == 1


def test_a_report_is_about_the_first_call() -> None:
    report = magjit.explain(Program(sets_attributes, note=""))(X)
    assert "one graph of 1 operator" in str(report)
