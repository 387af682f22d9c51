"""Nine model kinds, each captured whole: MagJIT beside torch.compile, on one CPU thread.

For each model of examples/models: the number of graphs, operators and guards; where the time of the
capture went; what a call costs besides the graph; and the times of a call with backend eager. Every
model is checked: one graph of torch operators alone, results and state equal to eager on other
inputs, and the same multiset of ATen operators in a replay. Then Inductor, for two of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import magjit
from agreement import differences, module_state, opaque_nodes, operator_differences
from compilers import COMPILERS, RealGraph, Stub, compiled_pair, disable_caches, warm_up
from harness import Benchmark, Row, Task, argument_parser, median_differences, median_times
from models import MODELS
from profiling import aten_operators

WITH_INDUCTOR = ("BERT", "LSTM tagger")
QUICK = {"rounds": 7, "seconds": 0.02}


@dataclass(slots=True)
class Finding:
    """What was found out about one model."""

    name: str
    graphs: dict[str, int] = field(default_factory=dict)
    operators: int = 0
    guards: int = 0
    capture: dict[str, float] = field(default_factory=dict)
    overhead: dict[str, float] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def other_inputs(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of the same shapes with other values, valid wherever the first ones are."""
    return tuple(value.flip(-1) if isinstance(value, Tensor) else value for value in arguments)


def examine(name: str) -> Finding:
    """Captures one model with both compilers, checks it and measures it."""
    finding = Finding(name)
    build = MODELS[name]
    eager, arguments = build("small")
    compiled: dict[str, Task] = {}
    for compiler, compile_with in COMPILERS.items():
        torch._dynamo.reset()
        model, _ = build("small")
        backend = RealGraph()
        call = compile_with(model, backend=backend)
        call(*arguments)
        finding.graphs[compiler] = len(backend.graphs)
        compiled[compiler] = partial(call, *arguments)
        if compiler == "magjit":
            check(finding, call, model, backend)
    explain(finding)
    finding.times = median_times({"eager": partial(eager, *arguments), **compiled}, **QUICK)
    # Recording happens inside the run: what the run took longer than eager is recording.
    observed = finding.capture["run_ms"]
    finding.capture["run_ms"] = min(observed, finding.times["eager"] / 1000)
    finding.capture["record_ms"] = observed - finding.capture["run_ms"]
    torch._dynamo.reset()
    pairs = {
        compiler: compiled_pair(compiler, *build("small"), Stub())
        for compiler, graphs in finding.graphs.items()
        if graphs == 1
    }
    if pairs:
        finding.overhead = median_differences(pairs, **QUICK)
    return finding


def check(finding: Finding, call: Any, model: nn.Module, backend: RealGraph) -> None:
    """Adds to the finding's problems whatever is not as in eager."""
    eager, arguments = MODELS[finding.name]("small")
    for inputs in (arguments, other_inputs(arguments)):
        expected, actual = eager(*inputs), call(*inputs)
        finding.problems += differences(expected, actual)
        finding.problems += differences(module_state(eager), module_state(model), "state")
    stats = magjit.stats(call)
    if stats.captures != 1 or stats.splits:
        finding.problems.append(f"{stats.captures} captures and {stats.splits} splits")
    for graph in backend.graphs:
        if opaque := opaque_nodes(graph):
            finding.problems.append(f"no torch operators: {', '.join(opaque)}")
    changed = operator_differences(
        aten_operators(partial(eager, *arguments)), aten_operators(partial(call, *arguments))
    )
    if changed:
        finding.problems.append(f"ATen operators: {changed}")


def explain(finding: Finding) -> None:
    model, arguments = MODELS[finding.name]("small")
    report = magjit.explain(model)(*arguments)
    finding.operators = len(report.operators)
    finding.guards = sum(report.guards.values())
    finding.capture = dict(report.timings)
    if len(report.graphs) != 1:
        finding.problems.append(f"explain reports {len(report.graphs)} graphs")


def with_inductor(name: str) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Seconds of the first call, microseconds of later ones, and what differs from eager.

    Each compiler has a cache folder of its own: the second would find the first one's C++.
    """
    eager, arguments = MODELS[name]("small")
    tasks: dict[str, Task] = {"eager": partial(eager, *arguments)}
    first: dict[str, float] = {}
    problems: list[str] = []
    torch._dynamo.reset()
    with ExitStack() as caches:
        for compiler, compile_with in COMPILERS.items():
            caches.enter_context(fresh_cache())
            warm_up(compiler, "inductor")
            call = compile_with(MODELS[name]("small")[0], backend="inductor")
            start = time.perf_counter()
            call(*arguments)
            first[compiler] = time.perf_counter() - start
            for inputs in (arguments, other_inputs(arguments)):
                problems += differences(eager(*inputs), call(*inputs), compiler)
            tasks[compiler] = partial(call, *arguments)
        return first, median_times(tasks, **QUICK), problems


def table_of(findings: Sequence[Finding]) -> Table:
    table = Table(
        title="MagJIT (M) beside torch.compile (t.c.), backend eager, one thread",
        caption="capture: the user's run + recording + guard, mock and lowering + backend",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("model", no_wrap=True)
    for column in (
        "graphs\nM / t.c.",
        "oper-\nators",
        "\nguards",
        "capture\nms",
        "overhead µs\nM / t.c.",
        "call µs\neager",
        "\nM",
        "\nt.c.",
        "\nequal",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for finding in findings:
        parts = ("run_ms", "record_ms", "build_ms", "backend_ms")
        table.add_row(
            finding.name,
            beside(finding.graphs, "d"),
            str(finding.operators),
            str(finding.guards),
            " + ".join(f"{finding.capture[part]:.0f}" for part in parts),
            beside(finding.overhead, ".1f"),
            *(f"{finding.times[name]:.0f}" for name in ("eager", "magjit", "torch.compile")),
            "[red]no[/]" if finding.problems else "[green]yes[/]",
        )
    return table


def beside(values: Mapping[str, float], style: str) -> str:
    """Both compilers' values, a dash where one has none."""
    texts = (format(values[c], style) if c in values else "–" for c in COMPILERS)
    return " / ".join(texts)


def rows_of(finding: Finding) -> list[Row]:
    """The finding as rows of the common format."""
    single = {"operators": finding.operators, "guards": finding.guards, **finding.capture}
    rows = [Row(finding.name, metric, unit_of(metric), value) for metric, value in single.items()]
    compared: dict[str, dict[str, Any]] = {
        "graphs": finding.graphs,
        "overhead_us": finding.overhead,
        "call_us": finding.times,
    }
    for metric, values in compared.items():
        rows.append(Row.of(finding.name, metric, unit_of(metric), values))
    return rows


def unit_of(metric: str) -> str:
    return {"us": "µs", "ms": "ms"}.get(metric.rpartition("_")[2], "count")


def inductor_table(console: Console, benchmark: Benchmark, progress: Progress) -> list[str]:
    """Compiles two of the models with Inductor, and prints what that gave."""
    table = Table(title="With Inductor", header_style="bold")
    for column in ("model", "", "eager", "MagJIT", "torch.compile"):
        table.add_column(column, justify="left" if column in ("model", "") else "right")
    problems: list[str] = []
    task = progress.add_task("", total=len(WITH_INDUCTOR))
    for name in WITH_INDUCTOR:
        progress.update(task, description=f"{name}, Inductor")
        first, times, found = with_inductor(name)
        problems += [f"{name}, Inductor: {problem}" for problem in found]
        table.add_row(name, "first call, s", "", *(f"{first[c]:.1f}" for c in COMPILERS))
        table.add_row("", "call, µs", *(f"{times[c]:.0f}" for c in ("eager", *COMPILERS)))
        for metric, unit, values in (("first_call_s", "s", first), ("call_us", "µs", times)):
            benchmark.add(Row.of(f"{name}, inductor", metric, unit, values))
        progress.advance(task)
    console.print(table)
    return problems


def main(arguments: Sequence[str] | None = None) -> None:
    """Examines all models and exits with 1 when one is not captured whole and equal."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--no-inductor", action="store_true", help="leave Inductor out")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    disable_caches()
    options.force = True  # a demonstration runs on a busy machine, too
    benchmark = Benchmark.start(options)
    console = benchmark.console
    findings: list[Finding] = []
    problems: list[str] = []
    columns = (TextColumn("{task.description:24}"), BarColumn(), TimeElapsedColumn())
    with torch.no_grad(), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(options.models))
        for name in options.models:
            progress.update(task, description=name)
            findings.append(finding := examine(name))
            problems += [f"{name}: {problem}" for problem in finding.problems]
            for row in rows_of(finding):
                benchmark.add(row)
            progress.advance(task)
        console.print(table_of(findings))
        if not options.no_inductor:
            problems += inductor_table(console, benchmark, progress)
    for problem in problems:
        console.print(f"[red]{problem}[/]")
    benchmark.write()
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
