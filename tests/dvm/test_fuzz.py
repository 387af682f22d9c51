"""Random graphs through the backend against eager: fused, in tiles of several sizes."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from magjit.plugin.compiling import run_backend
from magjit.plugin.context import BackendContext
from magjit.plugin.inputs import InputDescriber
from magjit_dvm import backend
from magjit_dvm.program import Program
from tests.dvm.checking import MEDIUM, SMALL, check_program, machine, same
from tests.dvm.random_graphs import Grower, Grown, Item

SETTINGS = (None, SMALL, MEDIUM)
_LEEWAY = 16
"""How far beyond the bound of an error results may lie: the bounds are of typical errors."""


def grown(seed: int, fixed: bool = True) -> Grown:
    operators = random.Random(seed).randrange(2, 25)
    return Grower(seed, fixed).grow(operators)


def compiled_for(graph: Grown, inputs: list[torch.Tensor], dynamic: bool | None = None) -> Any:
    describer = InputDescriber()
    described = [describer.describe(one) for one in inputs]
    with torch.no_grad():
        return run_backend(backend, graph.module, described, BackendContext(dynamic=dynamic))


def check_results(results: Any, expected: list[Item], strides: bool = True) -> None:
    assert len(results) == len(expected)
    for number, (got, item) in enumerate(zip(results, expected, strict=True)):
        wanted, what = item.tensor, f"output {number}, {item.node.target}"
        assert got.dtype == wanted.dtype and got.shape == wanted.shape, (
            f"{what}: {got.dtype} {tuple(got.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
        )
        if strides and wanted.numel():
            sides = [
                [stride for stride, n in zip(one.stride(), one.shape, strict=True) if n > 1]
                for one in (got, wanted)
            ]
            assert sides[0] == sides[1], f"{what}: strides {got.stride()}, not {wanted.stride()}"
        fine = same(got, wanted)
        if not item.exact:
            fine |= (got.double() - wanted.double()).abs() <= _LEEWAY * item.error
        if not bool(fine.all()):
            at = (~fine).flatten().nonzero()[0].item()
            left, right = got.flatten()[at].item(), wanted.flatten()[at].item()
            raise AssertionError(f"{what}: {left!r}, not {right!r}, error {item.error:.3g}")


def check_seed(seed: int) -> None:
    graph = grown(seed)
    inputs = [one.make() for one in graph.given]
    copies = [one.clone() for one in inputs]
    with machine(SETTINGS[seed % len(SETTINGS)]), torch.no_grad():
        compiled = compiled_for(graph, inputs)
        for _ in range(3):
            results = compiled(*inputs)
    for one, copy in zip(inputs, copies, strict=True):
        assert bool(same(one, copy).all()), "an input changed"
    check_results(results, graph.results)


# In parts, so that a test takes about as long as others.
_PART = 10


@pytest.mark.parametrize("part", range(30))
def test_random_graphs(part: int) -> None:
    for seed in range(part * _PART, part * _PART + _PART):
        _named(seed, check_seed)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(100))
def test_many_random_graphs(part: int) -> None:
    for seed in range(1000 + part * 100, 1000 + part * 100 + 100):
        _named(seed, check_seed)


def _named(seed: int, check: Any) -> None:
    try:
        check(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error


# -- the same bytecode by the Python machine --


@pytest.fixture
def in_three_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """Every program that is called is also interpreted, as nodes and as bytecode."""
    from magjit_dvm.vm import NotEncodable

    original, seen = Program.compiled, []

    def compiled(self: Program, fallback: Any = None) -> Any:
        fused = original(self, fallback)

        def run(*arguments: Any) -> Any:
            try:
                elements = fused.encode(*arguments).get("elements", 0)
            except NotEncodable:
                return fused(*arguments)
            if elements < 2000:
                monkeypatch.setattr(Program, "compiled", original)
                check_program(self, arguments)
                monkeypatch.setattr(Program, "compiled", compiled)
                seen.append(self)
            return fused(*arguments)

        return run

    monkeypatch.setattr(Program, "compiled", compiled)
    monkeypatch.setattr("magjit_dvm.schedule.stacked", list)  # each is called by itself
    yield seen


@pytest.mark.parametrize("part", range(6))
def test_random_programs_in_three_ways(part: int, in_three_ways: list[Program]) -> None:
    for seed in range(part * 20, part * 20 + 20):
        _named(seed, check_seed)
    assert len(in_three_ways) > 20


# -- symbolic sizes: compiled once, called with others --


def check_sizes(seed: int) -> None:
    graph = grown(seed, fixed=False)
    inputs = [one.make() for one in graph.given]
    try:
        compiled = compiled_for(graph, inputs, dynamic=True)
    except Exception as error:
        if "concrete integers" in str(error):
            return  # torch's own fake tensors cannot trace it
        raise
    chosen = random.Random(seed)
    most = 90 if max(one.dim() for one in inputs) < 3 else 18
    for _ in range(2):
        others: dict[int, int] = {}

        def size(n: int) -> int:
            if n > 1 and n not in others:
                free = set(range(2, most)) - set(others.values())
                others[n] = chosen.choice(sorted(free))
            return others.get(n, n)

        given = [one.make(size) for one in graph.given]
        with torch.no_grad():
            expected = graph.module(*given)
            results = compiled(*given)
        for number, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            assert got.dtype == wanted.dtype and got.shape == wanted.shape
            item = graph.results[number]
            if item.exact and not wanted.dtype.is_floating_point:
                assert torch.equal(got, wanted), f"output {number} for sizes {others}"
                continue
            # What was exact for the first sizes need not be for others.
            kinds = torch.stack([got.isfinite() == wanted.isfinite()]).all()
            assert bool(kinds), f"output {number} for sizes {others}: not the same are finite"
            fine = wanted.isfinite()
            apart = (got[fine].double() - wanted[fine].double()).abs()
            limit = 64 * item.error + 3e-2 * (1 + wanted[fine].double().abs())
            assert bool((apart <= limit).all()), f"output {number} for sizes {others}"


@pytest.mark.parametrize(
    "part", [*range(4), *(pytest.param(one, marks=pytest.mark.slow) for one in range(4, 10))]
)
def test_other_sizes(part: int) -> None:
    for seed in range(part * _PART, part * _PART + _PART):
        _named(seed, check_sizes)


# -- threads and processes --

THREADED = """
import torch, magjit
def program(x, w):
    y = torch.nn.functional.layer_norm(x * 2 + w, (x.shape[-1],))
    return y.softmax(-1), (y.relu() + 1).sum(0)
def check(compiled, x, w):
    for got, wanted in zip(compiled(x, w), program(x, w)):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
"""


def _large() -> tuple[Any, Any, Any]:
    scope: dict[str, Any] = {}
    exec(THREADED, scope)
    compiled = scope["magjit"].compile(scope["program"], backend="dvm")
    return scope["check"], compiled, scope["program"]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_numbers_of_threads(threads: None) -> None:
    """The number may change between calls; results do not depend on it."""
    check, compiled, _ = _large()
    x, w = torch.randn(300, 700), torch.randn(700)
    with torch.no_grad(), machine((1 << 18, 16384, 64)):
        found = []
        for number in (1, 2, 4, 3, 1, 4):
            torch.set_num_threads(number)
            check(compiled, x, w)
            found.append(compiled(x, w)[0])
    assert all(torch.equal(found[0], one) for one in found)


@pytest.mark.parametrize("inner", [1, 2])
def test_calls_from_several_threads(inner: int, threads: None) -> None:
    check, compiled, _ = _large()
    torch.set_num_threads(inner)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                for turn in range(40):
                    rows = 1 + (number * 53 + turn * 37) % 400
                    check(compiled, torch.randn(rows, 257), torch.randn(257))
        except BaseException as error:
            failures.append(error)

    with torch.no_grad():
        check(compiled, torch.randn(5, 257), torch.randn(257))
    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]


def _in_process(body: str) -> str:
    source = THREADED + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def test_fork_after_use() -> None:
    """A child of a process whose pool of threads has run computes, and exits."""
    out = _in_process("""
        import os
        torch.set_num_threads(4)
        compiled = magjit.compile(program, backend="dvm")
        x, w = torch.randn(600, 700), torch.randn(700)
        # torch's own kernels hang in the child of a process whose pool has run: bytes, then.
        def bytes_of(x, w):
            return [one.numpy().tobytes() for one in compiled(x, w)]
        with torch.no_grad():
            check(compiled, x, w)
            check(compiled, x, w)
            wanted = bytes_of(x, w)
            child = os.fork()
            if not child:
                same = bytes_of(x, w) == wanted
                grandchild = os.fork()
                if not grandchild:
                    os._exit(0 if bytes_of(x, w) == wanted else 1)
                _, status = os.waitpid(grandchild, 0)
                os._exit(0 if same and not status else 1)
            _, status = os.waitpid(child, 0)
            check(compiled, x, w)
        print("child", status)
    """)
    assert out.strip() == "child 0"


def test_exit_is_clean() -> None:
    """Threads and buffers of threads end with the interpreter."""
    out = _in_process("""
        import threading
        torch.set_num_threads(3)
        compiled = magjit.compile(program, backend="dvm")
        def work():
            with torch.no_grad():
                check(compiled, torch.randn(400, 700), torch.randn(700))
        work()
        workers = [threading.Thread(target=work) for _ in range(3)]
        [one.start() for one in workers]
        [one.join() for one in workers]
        print("done")
    """)
    assert out.strip() == "done"
