"""The conformance suite: what every backend must get right, run with one line.

::

    print(conformance.run("my_backend"))                       # a table
    test_conformance = conformance.pytest_suite("my_backend")  # in a test file

A backend may refuse a graph (``supports`` names reasons); what it takes must compute what
eager computes: values, dtypes, shapes, effects on inputs, aliases, gradients.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.fx import GraphModule

from magjit.errors import MagJITError
from magjit.plugin.compiling import run_backend
from magjit.plugin.conformance_cases import CASES, Case
from magjit.plugin.context import BackendContext
from magjit.plugin.inputs import InputDescriber
from magjit.plugin.protocol import Backend, CompiledGraph
from magjit.plugin.registry import resolve

__all__ = [
    "CASES",
    "Case",
    "ConformanceError",
    "Outcome",
    "Report",
    "Row",
    "check",
    "pytest_suite",
    "run",
]

_CALLS = 3
_SEED = 20


class ConformanceError(MagJITError, AssertionError):
    """A backend does not compute what eager computes."""


class Outcome(Enum):
    """How a case ended."""

    PASSED = "passed"
    REFUSED = "refused"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Row:
    """One case's result; ``detail`` has the reasons of a refusal or the first difference."""

    case: str
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The table that a run gives."""

    backend: str
    device: str
    rows: tuple[Row, ...]

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that failed."""
        return tuple(row for row in self.rows if row.outcome is Outcome.FAILED)

    def raise_for_failures(self) -> None:
        """Raise ConformanceError when a case failed."""
        if self.failures:
            names = ", ".join(row.case for row in self.failures)
            raise ConformanceError(f"Backend {self.backend!r} fails {len(self.failures)}: {names}")

    def __str__(self) -> str:
        width = max((len(row.case) for row in self.rows), default=4)
        counts = [
            f"{sum(row.outcome is outcome for row in self.rows)} {outcome.value}"
            for outcome in Outcome
        ]
        lines = [f"conformance of backend {self.backend!r} on {self.device}"]
        for row in self.rows:
            detail = row.detail.splitlines()[0] if row.detail else ""
            lines.append(f"  {row.case:<{width}}  {row.outcome.value:<7}  {detail}".rstrip())
        lines.append(f"  {', '.join(counts)}")
        return "\n".join(lines)


def run(
    backend: str | Backend | Callable[..., Any],
    *,
    device: str | torch.device = "cpu",
    cases: Sequence[Case] = CASES,
) -> Report:
    """Run every case; failures are rows of the report, not exceptions."""
    found = resolve(backend)
    target = torch.device(device)
    return Report(found.name, str(target), tuple(_row(found, case, target) for case in cases))


def pytest_suite(
    backend: str | Backend | Callable[..., Any], *, device: str | torch.device = "cpu"
) -> Callable[..., None]:
    """A parametrised test function: assign it to a name that begins with ``test_``."""
    import pytest

    @pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
    def test_conformance(case: Case) -> None:
        reasons = check(backend, case, device=device)
        if reasons:
            pytest.skip(f"refused: {'; '.join(reasons)}")

    return test_conformance


def _row(backend: Backend, case: Case, device: torch.device) -> Row:
    try:
        reasons = check(backend, case, device=device)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error) or type(error).__name__
        return Row(case.name, Outcome.FAILED, f"{text}\n{place.filename}:{place.lineno}")
    if reasons:
        return Row(case.name, Outcome.REFUSED, "; ".join(reasons))
    return Row(case.name, Outcome.PASSED)


def check(
    backend: str | Backend | Callable[..., Any],
    case: Case,
    *,
    device: str | torch.device = "cpu",
) -> list[str]:
    """Check one case.

    Returns:
        Reasons why the backend refuses the graph; empty when it took it and is right.

    Raises:
        ConformanceError: something differs from eager.
        BackendError: the backend failed on a graph that it had not refused.
    """
    found = resolve(backend)
    gm = case.graph()
    reasons = found.supports(gm)
    if reasons:
        return reasons
    target = torch.device(device)
    with torch.random.fork_rng(), torch.set_grad_enabled(case.training):
        compiled = _compile(found, case, gm, target)
        exact = not case.random or getattr(found, "exact_random", False)
        if not exact:
            _check_reproducible(compiled, case, target)
        else:
            for call in range(_CALLS):
                _check_call(compiled, gm, case, target, _SEED + call)
    return []


def _compile(backend: Backend, case: Case, gm: GraphModule, device: torch.device) -> CompiledGraph:
    """Compile, and see that compiling touched neither inputs nor random numbers."""
    torch.manual_seed(_SEED)
    inputs = case.make_inputs(device)
    before = [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in inputs]
    code = gm.code
    state = torch.get_rng_state()
    describer = InputDescriber()
    described = [
        describer.describe(one, static=position in case.static)
        for position, one in enumerate(inputs)
    ]
    compiled = run_backend(backend, gm, described, BackendContext())
    _require(torch.equal(state, torch.get_rng_state()), "compiling drew random numbers")
    _require(torch.is_grad_enabled() == case.training, "compiling changed grad mode")
    _require(gm.code == code, "compiling changed the caller's graph")
    _compare_all("input after compiling", inputs, before)
    return compiled


def _check_call(
    compiled: CompiledGraph, gm: GraphModule, case: Case, device: torch.device, seed: int
) -> None:
    ours, theirs = (_seeded_inputs(case, device, seed) for _ in range(2))
    torch.manual_seed(seed)
    outputs = compiled(*ours)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    expected = gm(*theirs)
    if case.random:
        _require(torch.equal(state, torch.get_rng_state()), "random numbers were not all drawn")
    _require(isinstance(outputs, (tuple, list)), f"outputs are a {type(outputs).__name__}")
    _compare_all("output", outputs, expected)
    _compare_all("input after the call", ours, theirs)
    _compare_aliases(ours, outputs, theirs, expected)
    if case.training:
        _compare_gradients(ours, outputs, theirs, expected)


def _seeded_inputs(case: Case, device: torch.device, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    return case.make_inputs(device)


def _compare_all(what: str, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    _require(len(ours) == len(theirs), f"{len(ours)} {what}s, eager has {len(theirs)}")
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"{what} {position}"
        if not isinstance(other, torch.Tensor):
            same = type(mine) is type(other) and mine == other
            _require(same, f"{where}: {mine!r}, eager has {other!r}")
            continue
        _require(isinstance(mine, torch.Tensor), f"{where}: {type(mine).__name__}, not a tensor")
        _compare_tensors(where, mine, other)


def _compare_tensors(where: str, mine: torch.Tensor, other: torch.Tensor) -> None:
    try:
        torch.testing.assert_close(mine, other, equal_nan=True, check_stride=False)
    except AssertionError as error:
        raise ConformanceError(f"{where}: {' '.join(str(error).split())}") from error


def _compare_aliases(
    ours: Sequence[Any], outputs: Sequence[Any], theirs: Sequence[Any], expected: Sequence[Any]
) -> None:
    """An output that shares memory with an input in eager shares it here, and no other does."""
    for position, (mine, other) in enumerate(zip(outputs, expected, strict=True)):
        got, wanted = _aliased(mine, ours), _aliased(other, theirs)
        _require(got == wanted, f"output {position} aliases inputs {got}, in eager {wanted}")
        requires = getattr(mine, "requires_grad", None), getattr(other, "requires_grad", None)
        _require(
            requires[0] == requires[1],
            f"output {position}: requires_grad is {requires[0]}, in eager {requires[1]}",
        )


def _aliased(value: Any, inputs: Sequence[Any]) -> list[int]:
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return []
    storage = value.untyped_storage().data_ptr()
    return [
        position
        for position, one in enumerate(inputs)
        if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() == storage
    ]


def _compare_gradients(
    ours: Sequence[Any], outputs: Sequence[Any], theirs: Sequence[Any], expected: Sequence[Any]
) -> None:
    wanted = [
        position
        for position, one in enumerate(expected)
        if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    seeds = [torch.randn_like(expected[position]) for position in wanted]
    torch.autograd.backward([outputs[position] for position in wanted], seeds)
    torch.autograd.backward([expected[position] for position in wanted], seeds)
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(other, torch.Tensor) and other.is_leaf and other.requires_grad:
            _require((mine.grad is None) == (other.grad is None), f"input {position}: no gradient")
            if other.grad is not None:
                _compare_tensors(f"gradient of input {position}", mine.grad, other.grad)


def _check_reproducible(compiled: CompiledGraph, case: Case, device: torch.device) -> None:
    def draw(seed: int) -> torch.Tensor:
        inputs = _seeded_inputs(case, device, _SEED)
        torch.manual_seed(seed)
        output: torch.Tensor = compiled(*inputs)[0]
        return output

    first, again, other = draw(1), draw(1), draw(2)
    _compare_tensors("output of the same seed", again, first)
    _require(not torch.equal(first, other), "another seed gives the same numbers")
    kept = float((first != 0).float().mean())
    _require(0.4 < kept < 0.6, f"dropout of one half keeps {kept:.2f}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)
