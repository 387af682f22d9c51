"""Backends by name, entry point and callable; what is wrong fails before anything happens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from magjit.errors import ArgumentError, MagJITError
from magjit.plugin import (
    Backend,
    BackendError,
    BackendOptionError,
    ExampleInputs,
    UnknownBackendError,
    list_backends,
    registry,
    resolve,
)

from .graphs import compile_for


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution on the path with entry points of every kind, good and bad."""
    (tmp_path / "some_backends.py").write_text(
        "from magjit.plugin.registry import EagerBackend\n"
        "class Mine(EagerBackend):\n"
        "    name = 'mine'\n"
        "instance = Mine()\n"
        "def factory():\n"
        "    return Mine()\n"
        "number = 3\n"
        "class Half:\n"
        "    name = 'half'\n"
    )
    info = tmp_path / "some_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-backends\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[magjit.backends]\n"
        "mine = some_backends:instance\n"
        "mine_class = some_backends:Mine\n"
        "mine_factory = some_backends:factory\n"
        "number = some_backends:number\n"
        "half = some_backends:Half\n"
        "missing = some_backends:missing\n"
        "no_module = no_such_module_at_all:x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.refresh()
    yield
    registry.refresh()
    sys.modules.pop("some_backends", None)


@pytest.mark.parametrize("name", ["mine", "mine_class", "mine_factory"])
def test_entry_points(package: None, name: str) -> None:
    assert resolve(name).name == "mine"
    assert name in list_backends()


@pytest.mark.parametrize("name", ["number", "half", "missing", "no_module"])
def test_broken_entry_points_are_named(package: None, name: str) -> None:
    with pytest.raises(BackendError, match=r"some_backends|no_such_module"):
        resolve(name)


def test_eager_and_torch_names() -> None:
    assert resolve("eager").name == "eager"
    assert resolve("aot_eager").name == "aot_eager"
    names = list_backends()
    assert {"eager", "inductor"} <= set(names)
    assert names == sorted(set(names))


@pytest.mark.parametrize(
    "wrong, meant", [("inductr", "inductor"), ("eagre", "eager"), ("aot_eger", "aot_eager")]
)
def test_unknown_names_have_close_matches(wrong: str, meant: str) -> None:
    with pytest.raises(UnknownBackendError, match=meant):
        resolve(wrong)


def test_unknown_name_without_a_match_lists_all() -> None:
    with pytest.raises(UnknownBackendError, match="known backends: .*eager"):
        resolve("zzzzzzzzzzzz")


def test_objects() -> None:
    eager = resolve("eager")
    assert resolve(eager) is eager
    assert isinstance(eager, Backend)
    for wrong in (3, None, ["eager"], type(eager)):
        with pytest.raises(ArgumentError):
            resolve(wrong)


def test_callable_gets_fakes_and_runs_nothing() -> None:
    seen = []

    def custom(gm, example_inputs):
        seen.extend(example_inputs)
        return gm.forward

    x = torch.ones(3)
    compiled = compile_for(custom, lambda x: x.add_(1), [x])
    assert torch.equal(x, torch.ones(3))
    assert [type(one).__name__ for one in seen] == ["FakeTensor"]
    compiled(x)
    assert torch.equal(x, torch.full((3,), 2.0))


def test_callable_may_ask_for_copies() -> None:
    def custom(gm, example_inputs):
        gm(*example_inputs)  # counts twice if these were the user's
        return gm

    custom.example_inputs = ExampleInputs.COPIES
    x = torch.ones(3)
    compiled = compile_for(custom, lambda x: x.add_(1), [x])
    assert torch.equal(x, torch.ones(3))
    compiled(x)
    assert torch.equal(x, torch.full((3,), 2.0))


def test_settings_go_to_callables_that_take_them() -> None:
    seen = {}

    def custom(gm, example_inputs, *, options=None):
        seen["options"] = options
        return gm.forward

    with pytest.raises(BackendOptionError, match="mode"):
        resolve(custom, mode="reduce-overhead")
    assert resolve(custom, mode="default", options={"a": 1}).name == "custom"
    compile_for(resolve(custom, options={"a": 1}), lambda x: x + 1, [torch.ones(2)])
    assert seen == {"options": {"a": 1}}


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "reduce-overhead"},
        {"options": {"x": 1}},
        {"mode": 3},
        {"options": "max_autotune"},
    ],
)
def test_eager_takes_no_settings(settings: dict) -> None:
    with pytest.raises(BackendOptionError):
        resolve("eager", **settings)
    assert resolve("eager", mode="default", options={}).name == "eager"


def test_failures_name_the_backend_and_keep_the_cause() -> None:
    def broken(gm, example_inputs):
        raise ZeroDivisionError("on purpose")

    def returns_text(gm, example_inputs):
        return "text"

    with pytest.raises(BackendError, match="broken.*on purpose") as caught:
        compile_for(broken, lambda x: x + 1, [torch.ones(2)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(BackendError, match="returned str"):
        compile_for(returns_text, lambda x: x + 1, [torch.ones(2)])


def test_interrupts_pass_and_state_is_restored() -> None:
    def interrupted(gm, example_inputs):
        torch.set_grad_enabled(False)
        torch.manual_seed(1)
        raise KeyboardInterrupt

    state = torch.get_rng_state()
    with torch.device("meta"):
        before = torch._C._len_torch_function_stack()
        with pytest.raises(KeyboardInterrupt):
            compile_for(interrupted, lambda x: x + 1, [torch.ones(2, device="cpu")])
        assert torch._C._len_torch_function_stack() == before
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch._guards.TracingContext.try_get() is None


class Picky:
    name = "picky"

    def supports(self, gm):
        return ["sin is beyond it"] if "sin" in gm.code else []

    def compile(self, gm, example_inputs, context):
        return gm.forward


def test_refusals_give_their_reasons() -> None:
    x = torch.ones(2)
    with pytest.raises(MagJITError, match="sin is beyond it"):
        compile_for(Picky(), lambda x: x.sin(), [x])
    compile_for(Picky(), lambda x: x.cos(), [x])
