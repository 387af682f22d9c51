"""The figures of a run, from its stored results.

Summary = counts of files and cases, by compiler: Coverage over all and over static cases
Coverage = outcome → cases; programs that are whole; capture times
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import Any

from paritybench_runner.protocol import OUTCOMES, SETTLES, Result
from paritybench_runner.store import CaseRow, Store

Key = tuple[str, int]
SCHEMA = 1


@dataclass(slots=True)
class Coverage:
    """How one compiler fared over some cases; a program is a file, counted over those."""

    cases: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    programs: int = 0
    programs_whole: int = 0
    programs_correct: int = 0
    settled: int = 0
    """Cases that are whole from their second call on; those that are whole among them."""
    programs_settled: int = 0
    graphs: float = 0.0
    """Mean number of graphs a case."""
    steps: dict[str, dict[str, int]] = field(default_factory=dict)
    """Step → cases by outcome: `held`, `n/a` where eager cannot do it, or `other`."""
    dispatched: int = 0
    """ATen operators that later calls have dispatched."""
    in_graphs: int = 0
    """How many of them ran in compiled graphs."""

    @property
    def whole(self) -> float:
        return self.outcomes.get("whole", 0) / self.cases if self.cases else 0.0

    @property
    def whole_programs(self) -> float:
        return self.programs_whole / self.programs if self.programs else 0.0


@dataclass(slots=True)
class Summary:
    """Everything that a report shows."""

    about: dict[str, Any]
    files: int
    files_failed: int
    programs: int
    """Files with a case that runs in eager mode."""
    cases: int
    """Cases that run in eager mode."""
    static_cases: int
    not_run: dict[str, int]
    """Kind of reason → cases that cannot be constructed or run in eager mode."""
    file_failures: list[tuple[str, int, str]]
    """Reason, files, one of them."""
    case_failures: list[tuple[str, int, str]]
    nondeterministic: list[str]
    dynamic: dict[str, int]
    """What makes a case dynamic → cases."""
    coverage: dict[str, Coverage]
    static: dict[str, Coverage]
    moving: dict[str, Coverage]
    """Over the dynamic cases."""
    capture_ms: dict[str, list[float]]
    """Over the cases that every compiler takes whole, those of TorchScript apart."""
    differences: list[tuple[str, str, list[tuple[str, int]]]]
    """Two compilers, and by file how many cases the first takes whole and the second does not."""

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(ms) for name, ms in self.capture_ms.items() if ms}

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["schema"] = SCHEMA
        found["capture_ms"] = {name: _quantiles(values) for name, values in self.capture_ms.items()}
        return found


def _quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    at = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
    last = len(ordered) - 1
    return {name: round(ordered[round(q * last)], 3) for name, q in at.items()} | {
        "cases": len(ordered)
    }


def summarise(store: Store) -> Summary:
    """Compute all figures."""
    files, cases, results = store.files(), store.cases(), store.results()
    runs = [case for case in cases if case.eager.status == "runs"]
    static = [case for case in runs if not case.eager.dynamic]
    moving = [case for case in runs if case.eager.dynamic]
    failed = [row for row in files if row.status != "loaded"]
    broken = [case for case in cases if case.eager.status != "runs"]
    names = store.about().get("compilers") or sorted(results)
    return Summary(
        about=store.about(),
        files=len(files),
        files_failed=len(failed),
        programs=len({case.file for case in runs}),
        cases=len(runs),
        static_cases=len(static),
        not_run=dict(Counter(case.eager.status for case in broken).most_common()),
        file_failures=_grouped((row.reason, row.file) for row in failed),
        case_failures=_grouped((case.eager.reason, f"{case.file}:{case.index}") for case in broken),
        nondeterministic=[
            f"{case.file}:{case.index} {case.name}" for case in runs if not case.eager.deterministic
        ],
        dynamic=dict(Counter(c.eager.dynamic for c in runs if c.eager.dynamic).most_common()),
        coverage={name: _coverage(results.get(name, {}), runs) for name in names},
        static={name: _coverage(results.get(name, {}), static) for name in names},
        moving={name: _coverage(results.get(name, {}), moving) for name in names},
        capture_ms=_capture_times(results, names, runs),
        differences=list(_differences(results, names, runs)),
    )


def _coverage(results: dict[Key, Result], cases: Iterable[CaseRow]) -> Coverage:
    coverage = Coverage(outcomes=dict.fromkeys(OUTCOMES, 0))
    whole: dict[str, bool] = {}
    correct: dict[str, bool] = {}
    settled: dict[str, bool] = {}
    graphs = 0
    for case in cases:
        result = results.get(case.key)
        if result is None:
            continue
        coverage.cases += 1
        coverage.outcomes[result.outcome] += 1
        graphs += result.graphs
        coverage.dispatched += result.dispatched
        coverage.in_graphs += result.in_graphs
        whole[case.file] = whole.get(case.file, True) and result.outcome == "whole"
        right = result.outcome in ("whole", "splits")
        settles = result.outcome == "whole" or (right and result.steps.get(3) == SETTLES)
        coverage.settled += settles
        settled[case.file] = settled.get(case.file, True) and settles
        correct[case.file] = correct.get(case.file, True) and right
    coverage.steps = _steps(results, cases)
    coverage.programs = len(whole)
    coverage.programs_whole = sum(whole.values())
    coverage.programs_correct = sum(correct.values())
    coverage.programs_settled = sum(settled.values())
    coverage.graphs = graphs / coverage.cases if coverage.cases else 0.0
    return coverage


def _steps(results: dict[Key, Result], cases: Iterable[CaseRow]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for case in cases:
        result = results.get(case.key)
        for step, told in result.steps.items() if result is not None else ():
            outcome = "held" if told == "held" else "n/a" if told.startswith("n/a") else "other"
            found.setdefault(str(step), Counter())[outcome] += 1
    return {step: dict(counts) for step, counts in sorted(found.items())}


def _capture_times(
    results: dict[str, dict[Key, Result]], names: list[str], cases: list[CaseRow]
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in names}
    measured = [name for name in names if results.get(name)]
    for case in cases:
        found = [results[name].get(case.key) for name in measured]
        # A compiler that refuses most programs would leave few to compare the others by.
        both = [r for r in found if r is not None and r.compiler != "torchscript"]
        if both and all(result.whole for result in both):
            for result in found:
                if result is not None and result.whole:
                    times[result.compiler].append(result.capture_ms)
    return times


def _differences(
    results: dict[str, dict[Key, Result]], names: list[str], cases: list[CaseRow]
) -> Iterator[tuple[str, str, list[tuple[str, int]]]]:
    for first, second in permutations(names, 2):
        by_file: Counter[str] = Counter()
        for case in cases:
            one, other = (results.get(name, {}).get(case.key) for name in (first, second))
            if one and other and one.outcome == "whole" != other.outcome:
                by_file[case.file] += 1
        if by_file and names[0] in (first, second):
            yield first, second, by_file.most_common()


# -- reasons -----------------------------------------------------------------------------------

_PATTERNS = (
    (re.compile(r"0x[0-9a-f]+"), "0x…"),
    (re.compile(r"/\S*/"), ""),
    (re.compile(r"\b\d+(\.\d+)?(e[-+]?\d+)?\b"), "N"),
    (re.compile(r"N(, N)+"), "N"),
    (re.compile(r"\bN x N\b"), "N"),
)


def cause(reason: str) -> str:
    """A reason without the numbers, addresses and paths of one case."""
    text = " ".join(reason.split()) or "no reason told"
    for pattern, put in _PATTERNS:
        text = pattern.sub(put, text)
    return text[:200]


def _grouped(reasons: Iterable[tuple[str, str]]) -> list[tuple[str, int, str]]:
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for reason, where in reasons:
        counts[cause(reason)] += 1
        examples.setdefault(cause(reason), where)
    return [(text, count, examples[text]) for text, count in counts.most_common()]


@dataclass(frozen=True, slots=True)
class Cause:
    """A kind of failure of one compiler."""

    outcome: str
    text: str
    count: int
    static: int
    files: int
    example: str
    reason: str
    location: str

    @property
    def place(self) -> str:
        """The location without the folder."""
        return self.location.rpartition("/")[2]


def causes(store: Store, compiler: str) -> list[Cause]:
    """The failures of a compiler, by outcome and cause, the most frequent first."""
    static = {case.key for case in store.cases() if not case.eager.dynamic}
    groups: dict[tuple[str, str], list[tuple[Key, Result]]] = {}
    for key, result in store.results().get(compiler, {}).items():
        # Where steps 2 and 3 were left out, what is right has not failed.
        if result.outcome != "whole" and (result.outcome != "splits" or 2 in result.steps):
            groups.setdefault((result.outcome, cause(result.reason)), []).append((key, result))
    found = []
    for (outcome, text), members in groups.items():
        ordered = sorted(members, key=lambda member: member[0] not in static)
        (file, index), example = ordered[0]
        found.append(
            Cause(
                outcome,
                text,
                len(members),
                sum(key in static for key, _ in members),
                len({key[0] for key, _ in members}),
                f"{file}:{index}",
                example.reason,
                example.location,
            )
        )
    return sorted(found, key=lambda c: (-c.static, -c.count, c.outcome, c.text))


def outcomes_by_case(store: Store) -> dict[str, dict[str, str]]:
    """Compiler → `file:index` → outcome."""
    return {
        compiler: {f"{file}:{index}": r.outcome for (file, index), r in rows.items()}
        for compiler, rows in store.results().items()
    }
