"""Functions of which no more graphs are compiled: streamed, and as in eager mode."""

from __future__ import annotations

import ctypes
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import magjit
from magjit_dvm import streaming

LIMIT = 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of 4 KB are large, two records are many."""
    monkeypatch.setattr(streaming, "_LEAST_BYTES", 4096)
    with magjit.config.override(record_limit=LIMIT), torch.no_grad():
        yield


def over_limit(program: Callable[..., Any], *others: Any, dynamic: bool | None = False) -> Any:
    """Compiled, with all its records taken by sizes that are not asked for again."""
    compiled = magjit.compile(program, backend="dvm", dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", magjit.MagJITWarning)
        for rows in range(2, 3 + LIMIT):
            compiled(torch.ones(rows, 512), *others)
    assert magjit.stats(compiled).records == LIMIT
    return compiled


def streamed(compiled: Any) -> int:
    return magjit.stats(compiled).streamed_calls


def mixed(x: Tensor) -> Tensor:
    return torch.tanh(x * 2) + x.exp().sum(-1, keepdim=True)


def test_past_the_limit_calls_are_streamed() -> None:
    compiled = magjit.compile(mixed, backend="dvm", dynamic=False)
    with pytest.warns(magjit.MagJITWarning, match="calls that fit none are streamed by 'dvm'"):
        for rows in range(2, 12):
            x = torch.randn(rows, 512)
            found = compiled(x)
            assert type(found) is Tensor
            torch.testing.assert_close(found, mixed(x))
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.records) == (LIMIT, LIMIT)
    assert stats.streamed_calls == stats.eager_calls == 8
    compiled(torch.ones(2, 512))
    assert magjit.stats(compiled).replays == 1, "records serve as before"


def test_one_fused_graph_serves_all_sizes() -> None:
    compiled = over_limit(mixed)
    seen = []
    original = streaming.Streamed._note
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            streaming.Streamed,
            "_note",
            lambda self, *counts: (seen.append(counts), original(self, *counts))[1],
        )
        for rows in range(20, 30):
            compiled(torch.randn(rows, 512))
    assert [windows for windows, _ in seen] == [1] * 10
    assert sum(new for _, new in seen) <= 1


def test_report() -> None:
    compiled = over_limit(mixed)
    x = torch.randn(30, 512)
    assert "streamed_calls=1" in repr(magjit.stats(compiled))
    notes = magjit.explain(compiled, backend="dvm")(x).notes
    assert any("streamed by 'dvm': 2 records and still another call" in one for one in notes)
    magjit.reset(compiled)
    assert not any("streamed" in one for one in magjit.explain(compiled, backend="dvm")(x).notes)
    compiled(x)
    assert magjit.stats(compiled).records == 1


def test_paths_that_depend_on_data() -> None:
    def program(x: Tensor) -> Tensor:
        for turn in range(8):
            x = torch.tanh(x * 1.5) + 0.1 * x
            if x.abs().max() > 1.05:
                return x - turn
        return x * turn

    compiled = magjit.compile(program, backend="dvm", dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", magjit.MagJITWarning)
        for rows in range(2, 12):
            x = torch.randn(rows, 512) * rows / 20
            torch.testing.assert_close(compiled(x), program(x))
    assert streamed(compiled) > 0


def test_side_effects() -> None:
    kept: list[Any] = []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("total", torch.zeros(512))

        def forward(self, x: Tensor) -> dict[str, Any]:
            self.calls += 1
            self.total += x.sum(0)
            y = x * 2
            kept.append(y)
            x.add_(1)
            return {"y": y, "view": y[:, :3], "same": x}

    compiled, twin = over_limit(Counts()), Counts()
    for rows in range(2, 3 + LIMIT):
        twin(torch.ones(rows, 512))
    before = streamed(compiled)
    x = torch.randn(9, 512)
    mine, theirs = x.clone(), x.clone()
    kept.clear()
    found, wanted = compiled(mine), twin(theirs)
    assert streamed(compiled) == before + 1
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(compiled.total, twin.total)
    assert found["same"] is mine and found["y"] is kept[0] and compiled.calls == twin.calls
    assert found["view"]._base is found["y"]
    assert all(type(one) is Tensor for one in found.values())


def test_exceptions() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        z = (x * 2).exp()
        try:
            z + y[:3]
        except RuntimeError as error:
            z = z + len(str(error))
        return z @ y

    compiled = over_limit(program, torch.ones(512, 7))
    before = streamed(compiled)
    x = torch.rand(9, 512)
    torch.testing.assert_close(compiled(x, torch.ones(512, 5)), program(x, torch.ones(512, 5)))
    with pytest.raises(RuntimeError) as raised:
        compiled(x, torch.ones(4, 5))
    with pytest.raises(RuntimeError) as wanted:
        program(x, torch.ones(4, 5))
    assert str(raised.value) == str(wanted.value)
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names.count("program") == 1
    assert streamed(compiled) == before + 2


def test_training_is_left_to_eager_mode() -> None:
    compiled = over_limit(mixed)
    before = streamed(compiled)
    x = torch.randn(9, 512, requires_grad=True)
    with torch.enable_grad():
        compiled(x).sum().backward()
        mine, x.grad = x.grad, None
        mixed(x).sum().backward()
    torch.testing.assert_close(mine, x.grad)
    assert streamed(compiled) == before


def test_small_tensors_are_left_to_eager_mode() -> None:
    compiled = over_limit(mixed)
    before = streamed(compiled)
    x = torch.randn(1, 9)
    torch.testing.assert_close(compiled(x), mixed(x))
    assert streamed(compiled) == before


def test_ever_new_structures_are_left_to_eager_mode() -> None:
    def program(x: Tensor, steps: tuple[int, ...]) -> Tensor:
        for step in steps:
            x = (x.sin(), x.cos(), x.tanh(), x.exp())[step % 4] * 0.5
        return x

    compiled = over_limit(program, (0,))
    before = streamed(compiled)
    x = torch.randn(9, 512)
    for number in range(40):
        steps = tuple(number // 4**k % 4 for k in range(4))
        torch.testing.assert_close(compiled(x, steps), program(x, steps))
    assert 10 <= streamed(compiled) - before <= streaming._RECENT


def test_other_contexts() -> None:
    """Stances, other tracers and fake tensors: the program itself."""
    compiled = over_limit(mixed)
    before = streamed(compiled)
    x = torch.randn(9, 512)
    with magjit.set_stance("force_eager"):
        torch.testing.assert_close(compiled(x), mixed(x))
    with magjit.set_stance("eager_on_recompile"):
        torch.testing.assert_close(compiled(x), mixed(x))
    torch.testing.assert_close(torch.vmap(compiled)(x[None])[0], mixed(x))
    with torch._subclasses.FakeTensorMode() as mode:
        assert compiled(mode.from_tensor(x)).shape == x.shape
    assert streamed(compiled) == before
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), mixed(x))
    assert streamed(compiled) == before + 1


def test_calls_within_calls() -> None:
    inner = over_limit(mixed)
    before = streamed(inner)
    outer = over_limit(lambda x: inner(x * 2) + 1)
    assert streamed(inner) == before, "a capture sees the program"
    x = torch.randn(40, 512)
    torch.testing.assert_close(outer(x), mixed(x * 2) + 1)
    assert streamed(outer) == 2 and streamed(inner) == before, "one queue for both"


def test_threads() -> None:
    compiled = over_limit(mixed)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad(), magjit.config.override(record_limit=LIMIT):
                for rows in range(20, 30):
                    x = torch.randn(rows, 512, generator=generator)
                    torch.testing.assert_close(compiled(x), mixed(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors


def test_programs_that_call_what_nobody_knows() -> None:
    """A C function without an annotation may do anything with memory."""
    unknown = ctypes.CDLL(None).abs

    def program(x: Tensor) -> Tensor:
        return mixed(x) + unknown(-3)

    compiled = magjit.compile(program, backend="dvm", dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", magjit.MagJITWarning)
        for rows in range(2, 8):
            x = torch.randn(rows, 512)
            torch.testing.assert_close(compiled(x), program(x))
    assert magjit.stats(compiled).eager_calls > 0 and streamed(compiled) == 0


# -- memory that is reached without torch's dispatcher --


def write(array: Any) -> None:
    array[...] = 7


def by_numpy(x: Tensor) -> Callable[[], None]:
    array = x.numpy()
    return lambda: write(array)


def by_asarray(x: Tensor) -> Callable[[], None]:
    array = np.asarray(x)
    return lambda: write(array)


def by_dlpack(x: Tensor) -> Callable[[], None]:
    other = torch.from_dlpack(x).numpy()
    return lambda: write(other)


def by_address(x: Tensor) -> Callable[[], None]:
    address, count = x.data_ptr(), x.numel()
    array = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
    return lambda: write(array)


def by_storage(x: Tensor) -> Callable[[], None]:
    storage = x.untyped_storage()
    return lambda: storage.fill_(0)


WRITERS = {one.__name__: one for one in (by_numpy, by_asarray, by_dlpack, by_address, by_storage)}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("when", ["before", "first", "between"])
@pytest.mark.parametrize("what", ["input", "computed"])
def test_memory_that_others_write(name: str, when: str, what: str) -> None:
    """What was to be computed from it before a write is computed from what it was."""
    if when == "before" and (name in ("by_address", "by_storage", "by_dlpack") or what != "input"):
        pytest.skip("only what NumPy shares is known from before")

    def run(x: Tensor, given: Any) -> list[Tensor]:
        t = x if what == "input" else x * 3
        if what == "computed":
            t.sum().item()  # its value is there
        writer = given
        if when == "first":
            writer = WRITERS[name](t)
        y = t * 2 + 1
        if when == "between":
            writer = WRITERS[name](t)
        writer()
        return [y, t + 1]

    class Program(nn.Module):
        def forward(self, x: Tensor, given: Any = None) -> Any:
            return run(x, given) if given is not None else mixed(x)

    compiled = over_limit(Program())
    before = streamed(compiled)
    x = torch.randn(9, 512)
    mine, theirs = x.clone(), x.clone()
    given = [WRITERS[name](one) if when == "before" else int for one in (mine, theirs)]
    torch.testing.assert_close(compiled(mine, given[0]), run(theirs, given[1]))
    assert streamed(compiled) == before + 1
