"""Coverage of the public corpus: the committed reports of its runs as one table.

The runs take hours, so this script measures nothing; `docs/coverage.md` says how to repeat them.

cases, programs        that run in eager mode
whole, whole_programs  per cent of the static ones that are one graph, all replays hits
failing, failing_programs   how many static ones are not
wrong, crashed, timeout     cases, dynamic ones included
capture_ms             median over the cases that both take, both in one run over a sample
training, batch        cases whose outputs and gradients in training, and whose results for another
                       batch size, are eager's; *_wrong: those that are not
in_graphs              per cent of the operators of dynamic cases that run in graphs
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import Benchmark, Row, argument_parser

RESULTS = Path(__file__).resolve().parent / "results" / "paritybench"
OURS, PEER = "magjit", "dynamo"
FAULTS = ("wrong", "crashed", "timeout")


def report(name: str) -> dict[str, Any]:
    """A committed report; raises FileNotFoundError with the way to make it."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: see docs/coverage.md for the run that makes it")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def rows(ours: dict[str, Any], theirs: dict[str, Any]) -> list[Row]:
    """The figures of two runs over the whole corpus."""
    made = [
        Row("eager mode", name, "", ours[name], {"torch.compile": theirs[name]})
        for name in ("cases", "programs")
    ]
    static = {"magjit": ours["static"][OURS], "torch.compile": theirs["static"][PEER]}
    for metric, part, of in (
        ("whole", lambda c: c["outcomes"]["whole"], "cases"),
        ("whole_later", lambda c: c["settled"], "cases"),
        ("whole_programs", lambda c: c["programs_whole"], "programs"),
        ("whole_programs_later", lambda c: c["programs_settled"], "programs"),
    ):
        values = {name: 100 * part(c) / c[of] for name, c in static.items()}
        made.append(Row.of("static", metric, "%", values))
    for metric, part, of in (
        ("failing", lambda c: c["outcomes"]["whole"], "cases"),
        ("failing_programs", lambda c: c["programs_whole"], "programs"),
    ):
        values = {name: float(c[of] - part(c)) for name, c in static.items()}
        made.append(Row.of("static", metric, "", values))
    every = {"magjit": ours["coverage"][OURS], "torch.compile": theirs["coverage"][PEER]}
    for fault in FAULTS:
        values = {name: float(c["outcomes"][fault]) for name, c in every.items()}
        made.append(Row.of("all", fault, "", values))
    return made


def capture_row(sample: dict[str, Any]) -> Row:
    """Capture times of both in one run."""
    times = {name: sample["capture_ms"][name]["p50"] for name in (OURS, PEER)}
    values = {"magjit": times[OURS], "torch.compile": times[PEER]}
    note = f"{sample['capture_ms'][OURS]['cases']} cases of {sample['files']} files"
    return Row.of("capture", "capture_ms", "ms", values, note)


_STEPS = {"5": "training", "6": "batch"}


def step_rows(later: dict[str, Any]) -> list[Row]:
    """Training and other batch sizes: how many cases eager can do, and how many differ."""
    found = later["coverage"][OURS]
    made = []
    for step, name in _STEPS.items():
        counts = found["steps"][step]
        made.append(Row("all", name, "", counts["held"]))
        made.append(Row("all", f"{name}_wrong", "", counts.get("other", 0)))
    faults = sum(found["outcomes"][fault] for fault in FAULTS)
    made.append(Row("all", "later_faults", "", faults))
    return made


def dynamic_row(dynamic: dict[str, Any]) -> Row:
    """Where the operators of programs that are cut run."""
    found = dynamic["moving"][OURS]
    share = 100 * found["in_graphs"] / found["dispatched"]
    note = f"{found['cases']} cases, {found['dispatched']} operators"
    return Row("dynamic", "in_graphs", "%", share, note=note)


def main() -> None:
    options = argument_parser(__doc__).parse_args()
    bench = Benchmark(options.json, busy=0.0)
    for row in rows(report("corpus"), report("torch_compile")):
        bench.add(row)
    if (RESULTS / "capture.json").is_file():
        bench.add(capture_row(report("capture")))
    for row in step_rows(report("training")):
        bench.add(row)
    bench.add(dynamic_row(report("dynamic")))
    bench.finish()


if __name__ == "__main__":
    main()
