"""The tables of README.md and docs/benchmarks.md, drawn from what a JSON file of results has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

NOTHING = "–"

Values = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Results:
    """One JSON file: values by case and metric, in the file's order."""

    rows: Mapping[tuple[str, str], Values]
    notes: Mapping[tuple[str, str], str]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Results:
        content = json.loads(path.read_text(encoding="utf-8"))
        keyed = {(row["case"], row["metric"]): row for row in content["rows"]}
        return cls(
            {key: {"magjit": row["magjit"], **row["peers"]} for key, row in keyed.items()},
            {key: row["note"] for key, row in keyed.items() if row.get("note")},
            content["machine"],
            content["versions"],
        )

    def cases(self, metric: str) -> list[str]:
        """The cases that have a metric."""
        return [case for case, other in self.rows if other == metric]

    def value(self, case: str, metric: str, name: str = "magjit") -> float | None:
        return self.rows.get((case, metric), {}).get(name)

    def part(self, name: str) -> Results:
        """The cases that begin with a part's name, without it."""
        start = f"{name}: "
        rows, notes = (
            {
                (case.removeprefix(start), metric): value
                for (case, metric), value in table.items()
                if case.startswith(start)
            }
            for table in (self.rows, self.notes)
        )
        return Results(rows, notes, self.machine, self.versions)  # type: ignore[arg-type]

    def caption(self) -> str:
        """What the figures were measured on."""
        machine, versions = self.machine, self.versions
        place = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
        parts = [str(place), f"{machine['threads']} CPU thread{'s' * (machine['threads'] != 1)}"]
        parts += [f"CPython {versions['python']}", f"torch {versions['torch']}"]
        parts += [f"CUDA {versions['cuda']}"] if "cuda" in versions else []
        busy = machine.get("load_of_others", 0)
        parts += [f"other programs used {busy} cores"] if busy > 0.15 else []
        return f"Measured on: {'; '.join(parts)}."


def number(value: float | None, digits: int = 3) -> str:
    """Some significant digits, never an exponent; integers in full."""
    if value is None:
        return NOTHING
    if value == int(value) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{value:.{digits}f}"


def ratio(value: float | None, reference: float | None) -> str:
    return NOTHING if value is None or not reference else f"{value / reference:.2f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and the others figures; empty without rows."""
    if not rows:
        return ""
    rules = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rules, *rows))


def _models(results: Results) -> str:
    header = (
        "model",
        "graphs, MagJIT",
        "graphs, torch.compile",
        "operators",
        "guards",
        "run + record + build + backend, ms",
        "overhead, MagJIT, µs",
        "overhead, torch.compile, µs",
        "eager, µs",
        "MagJIT, µs",
        "torch.compile, µs",
    )
    rows = []
    for case in results.cases("operators"):
        parts = (
            results.value(case, name) for name in ("run_ms", "record_ms", "build_ms", "backend_ms")
        )
        cells = [
            number(results.value(case, "graphs")),
            number(results.value(case, "graphs", "torch.compile")),
            number(results.value(case, "operators")),
            number(results.value(case, "guards")),
            " + ".join(NOTHING if part is None else f"{part:.0f}" for part in parts),
            number(results.value(case, "overhead_us")),
            number(results.value(case, "overhead_us", "torch.compile")),
        ]
        times = [results.value(case, "call_us", n) for n in ("eager", "magjit", "torch.compile")]
        rows.append([case, *cells, *map(number, times)])
    return markdown(header, rows)


def _compared(
    results: Results,
    metrics: Mapping[str, str],
    *,
    eager: bool = True,
    case_ends: str = "",
    digits: int = 3,
) -> str:
    """A row for each case and metric: MagJIT, torch.compile, their ratio, perhaps eager."""
    header = ["case", "metric", "MagJIT", "torch.compile", "ratio"] + ["eager"] * eager
    rows = []
    for metric, title in metrics.items():
        for case in results.cases(metric):
            if not case.endswith(case_ends):
                continue
            ours, theirs = (results.value(case, metric, n) for n in ("magjit", "torch.compile"))
            cells = [case, title, number(ours, digits), number(theirs, digits)]
            cells.append(ratio(ours, theirs))
            rows.append(cells + [number(results.value(case, metric, "eager"))] * eager)
    return markdown(header, rows)


def _inductor(results: Results) -> str:
    return _compared(results, _TIMES, case_ends=", inductor")


def _front_end(results: Results) -> str:
    metrics = {
        "overhead_us": "overhead, stub graph, µs",
        "overhead_real_us": "overhead, real graph, µs",
        "call_us": "a call, µs",
        "first_call_s": "first call, s",
        "capture_peak": "peak memory of a capture, × eager",
    }
    return _compared(results, metrics)


def _first_calls(results: Results) -> str:
    """The second peer generates no code."""
    rows = []
    for case in results.cases("first_call_s"):
        names = ("magjit", "torch.compile", "aot_eager")
        ours, *theirs = (results.value(case, "first_call_s", name) for name in names)
        rows.append([case, number(ours), *map(number, theirs), ratio(ours, theirs[0])])
    header = ("model", "MagJIT, s", "torch.compile, s", "torch.compile, no code, s", "ratio")
    return markdown(header, rows)


def _dynamic(results: Results) -> str:
    metrics = {
        "captures": "captures",
        "total_s": "40 calls, first calls included, s",
        "warm_ms": "a warm call, ms",
    }
    return _compared(results, metrics)


def _control_flow(results: Results) -> str:
    """All four ways, since the part that is repeated may be compiled alone."""
    metrics = {"control_flow_total_s": "20 calls, first calls included, s"}
    metrics |= {"control_flow_ms": "a warm call, ms"}
    compilers = ("magjit", "torch.compile", "cell", "eager")
    rows = []
    for metric, title in metrics.items():
        for case in results.cases(metric):
            values = [results.value(case, metric, compiler) for compiler in compilers]
            rows.append([case, title, *map(number, values)])
    header = ("case", "metric", "MagJIT", "torch.compile", "torch.compile of the part", "eager")
    return markdown(header, rows)


def _call_cost(results: Results) -> str:
    return _compared(results, {"outside_cost": "time, × without a compiler"}, eager=False, digits=4)


_COVERAGE = {
    ("eager mode", "cases"): "cases that run in eager mode",
    ("eager mode", "programs"): "programs that run in eager mode",
    ("static", "whole"): "static cases that are one whole graph, %",
    ("static", "whole_programs"): "static programs all of whose cases are, %",
    ("static", "failing"): "static cases that are not",
    ("static", "failing_programs"): "static programs that are not",
    ("static", "whole_later"): "static cases, counted from the second call on, %",
    ("static", "whole_programs_later"): "static programs, counted from the second call on, %",
    ("all", "wrong"): "wrong results, all cases",
    ("all", "crashed"): "crashed, all cases",
    ("all", "timeout"): "timed out, all cases",
    ("capture", "capture_ms"): "capture, median, ms",
    ("all", "training"): "training: outputs and gradients as in eager, cases",
    ("all", "training_wrong"): "training: not as in eager, cases",
    ("all", "batch"): "another batch size: as in eager, cases",
    ("all", "batch_wrong"): "another batch size: not as in eager, cases",
    ("dynamic", "in_graphs"): "operators of dynamic cases that run in graphs, %",
}


def _coverage(results: Results) -> str:
    rows = []
    for key, title in _COVERAGE.items():
        if key in results.rows:
            ours, theirs = (results.value(*key, name) for name in ("magjit", "torch.compile"))
            rows.append([title, number(ours), number(theirs), ratio(ours, theirs)])
    return markdown(["figure", "MagJIT", "torch.compile", "ratio"], rows)


_TIMES = {"call_us": "a call, µs", "first_call_s": "first call, s"}


def _gpu(results: Results) -> str:
    return _compared(results, {"graphs": "graphs", **_TIMES})


def _dvm_sets(results: Results) -> str:
    peers = ("eager", "inductor-static", "inductor-dynamic")
    header = ["operators", "encoding p50, µs", "p99, µs", "encoding ÷ run"]
    header += [f"{peer} ÷ MagJIT" for peer in peers]
    rows = []
    for case in results.cases("speed"):
        own = ("encode_us_p50", "encode_us_p99", "compile/run ratio")
        values = [results.value(case, metric) for metric in own]
        values += [results.value(case, "speed", peer) for peer in peers]
        rows.append([case, *map(number, values)])
    return markdown(header, rows)


def _dvm_chains(results: Results) -> str:
    """A row for each chain and number of threads, a column for each size."""
    peers = ("eager", "inductor-static", "clone")
    cells: dict[str, dict[str, str]] = {}
    for case in results.cases("run_ms"):
        chain, size, threads = case.rsplit(", ", 2)
        ours = results.value(case, "run_ms")
        found = [
            NOTHING if theirs is None or not ours else number(theirs / ours, 2)
            for theirs in (results.value(case, "run_ms", peer) for peer in peers)
        ]
        cells.setdefault(f"{chain}, {threads}", {})[size] = " / ".join(found)
    sizes = list(dict.fromkeys(size for row in cells.values() for size in row))
    rows = [[name, *(row.get(size, NOTHING) for size in sizes)] for name, row in cells.items()]
    return markdown(["eager / Inductor / copy, ÷ MagJIT", *sizes], rows)


def _dvm_models(results: Results) -> str:
    header = ["model", "cold start, MagJIT, s", "Inductor, s", "a call, MagJIT, ms"]
    header += ["eager, ms", "Inductor, ms", "in the VM", "operators", "of eager"]
    wanted = [("cold_s", "magjit"), ("cold_s", "inductor-static"), ("run_ms", "magjit")]
    wanted += [("run_ms", "eager"), ("run_ms", "inductor-static"), ("in_vm", "magjit")]
    wanted += [("operators", "magjit"), ("operators", "eager")]
    rows = [
        [case, *(number(results.value(case, metric, name)) for metric, name in wanted)]
        for case in results.cases("in_vm")
    ]
    return markdown(header, rows)


def _dvm_training(results: Results) -> str:
    peers = ("magjit", "eager", "inductor-static")
    rows = [
        [
            case,
            *(number(results.value(case, "step_ms", peer)) for peer in peers),
            f"{results.value(case, 'loss_apart'):.1e}",
            number(results.value(case, "in_vm")),
        ]
        for case in results.cases("step_ms")
    ]
    header = ["training", "a step, MagJIT, ms", "eager, ms", "Inductor, ms"]
    return markdown([*header, "losses apart from eager's, relative", "in the VM"], rows)


_DVM_SHAPES = {
    "captures": "captures",
    "compile_s": "first capture, s",
    "rss_growth_mb": "growth of resident memory, MB",
    "first_us_p50": "first call at a shape, median, µs",
    "repeated_us_p50": "repeated call, median, µs",
    "first_ms_p50": "first call at a shape, median, ms",
    "first_ms_max": "first call at a shape, longest, ms",
    "repeated_ms_p50": "repeated call, median, ms",
}


def _dvm_shapes(results: Results) -> str:
    rows = _by_metric(results, _DVM_SHAPES, ("magjit", "inductor-dynamic", "eager"))
    return markdown(["shapes", "metric", "MagJIT", "inductor-dynamic", "eager"], rows)


def _by_metric(
    results: Results, titles: Mapping[str, str], peers: Sequence[str]
) -> list[list[str]]:
    """A row for each metric and case, with the figure of each peer."""
    return [
        [case, title, *(number(results.value(case, metric, peer)) for peer in peers)]
        for metric, title in titles.items()
        for case in results.cases(metric)
    ]


_COPY = "fraction of copy bandwidth"
_NEW_SHAPES = {
    "host time, median": "host time of a call, median, µs",
    "host time, 99th percentile": "host time of a call, 99th percentile, µs",
    "encode_us_p50": "of it the encoding, median, µs",
    "encode_us_p99": "of it the encoding, 99th percentile, µs",
}


def _dvm_gpu(results: Results) -> str:
    peers = ("magjit", "eager", "static", "dynamic")
    rows = [
        [case, *(number(results.value(case, _COPY, peer)) for peer in peers)]
        for case in results.cases(_COPY)
    ]
    return markdown(["operators", "MagJIT", "eager", "Inductor", "Inductor, dynamic"], rows)


def _dvm_gpu_large(results: Results) -> str:
    """What moves 256 MB of float16."""
    kept = {key: value for key, value in results.rows.items() if "float16, 256 MB" in key[0]}
    return _dvm_gpu(replace(results, rows=kept))


def _dvm_gpu_host(results: Results) -> str:
    who = ("magjit", "operator alone", "eager", "relu")
    rows = _by_metric(results, _NEW_SHAPES, who)
    header = ["calls", "metric", "MagJIT", "its operator alone", "eager", "one operator of eager"]
    return markdown(header, [row for row in rows if "new shapes" in row[0]])


def _dvm_gpu_sets(results: Results) -> str:
    peers = ("eager", "inductor-static", "inductor-dynamic")
    first = ("magjit", "inductor-dynamic")
    rows = []
    for case in results.cases("speed"):
        values = [results.value(case, "speed", peer) for peer in peers]
        values += [results.value(case, "first_calls_s", peer) for peer in first]
        rows.append([case, *map(number, values)])
    header = ["operators", *(f"{peer} ÷ MagJIT" for peer in peers)]
    return markdown([*header, "all first calls, MagJIT, s", "inductor-dynamic, s"], rows)


def _dvm_gpu_small(results: Results) -> str:
    titles = {"call_us": "a call, µs", "group_us": "a call within the graph, µs"}
    rows = _by_metric(results, titles, ("magjit", "eager", "inductor-dynamic"))
    return markdown(["operators", "metric", "MagJIT", "eager", "Inductor, dynamic"], rows)


def _dvm_gpu_models(results: Results) -> str:
    metrics = {
        "total_s": "25 calls at 25 sizes, first calls included, s",
        "steady_ms": "the same calls, warm, ms",
        "graphed_ms": "six of them by CUDA graphs, ms",
    }
    return _compared(results, metrics)


_NETWORKS = {"step_ms": "forward and backward, ms", "call_ms": "a call, ms"}


def _dvm_gpu_networks(results: Results) -> str:
    rows = _by_metric(results, _NETWORKS, ("magjit", "inductor", "eager", "eager-last"))
    header = ["network", "metric", "MagJIT", "Inductor", "eager", "eager, channels last"]
    return markdown(header, rows)


def _dvm_gpu_writes(results: Results) -> str:
    metrics = {"run_us": "µs", "fraction of copy bandwidth": "of copy bandwidth"}
    rows = _by_metric(results, metrics, ("magjit", "eager", "inductor"))
    return markdown(["program", "metric", "MagJIT", "eager", "Inductor"], rows)


def _dvm_gpu_training(results: Results) -> str:
    metrics = {"forward_us": "forward, µs", "step_us": "forward and backward, µs"}
    rows = _by_metric(results, metrics, ("magjit", "inductor", "eager"))
    return markdown(["case", "metric", "MagJIT", "Inductor", "eager"], rows)


def _virtual_tensors(results: Results) -> str:
    peers = ("magjit", "torch.compile", "eager")
    header = ["block", "a call, MagJIT, ms", "torch.compile, ms", "eager, ms", "times as fast"]
    header += ["extra peak memory, MagJIT, MiB", "torch.compile, MiB", "eager, MiB"]
    header += ["compiled in, MagJIT, s", "torch.compile, s"]
    rows = []
    for case in results.cases("run_ms"):
        times = [results.value(case, "run_ms", peer) for peer in peers]
        peaks = [results.value(case, "extra_peak_mb", peer) for peer in peers]
        compiles = [results.value(case, "compile_s", peer) for peer in peers[:2]]
        cells = [*map(number, times), ratio(times[1], times[0])]
        rows.append([case, *cells, *map(number, (*peaks, *compiles))])
    return markdown(header, rows)


def _products(results: Results) -> str:
    peers = ("magjit", "library", "torch.compile", "eager")
    header = ["layer: m x n x k", "MagJIT, ms", "with the library's product, ms"]
    header += ["torch.compile, ms", "eager, ms", "times as fast as torch.compile"]
    rows = []
    for case in results.cases("run_ms"):
        times = [results.value(case, "run_ms", peer) for peer in peers]
        rows.append([case, *map(number, times), ratio(times[2], times[0])])
    return markdown(header, rows)


def _dram(results: Results) -> str:
    peers = ("magjit", "torch.compile", "minimum")
    header = ["block", "MagJIT, MiB", "torch.compile, MiB", "minimum, MiB"]
    header += ["MagJIT / minimum", "torch.compile / minimum"]
    rows = []
    for case in results.cases("dram_mb"):
        moved = [results.value(case, "dram_mb", peer) for peer in peers]
        shares = [ratio(one, moved[2]) for one in moved[:2]]
        rows.append([case, *map(number, moved), *shares])
    return markdown(header, rows)


_MACRO = {
    "selector_fraction": "best of all kernels / chosen kernel, mean of all rows",
    "gemm_speedup": "cuBLAS / chosen kernel, geometric mean",
    "speedup over eager": "kernels of eager mode / MagJIT's, geometric mean",
    "speedup over torch.compile": "kernels of torch.compile / MagJIT's, geometric mean",
    "select_ns": "a selection, ns",
    "tune_s": "tuning, s",
}


def _macro(results: Results) -> str:
    rows = [
        [case, title, number(results.value(case, metric), 4), results.notes.get((case, metric), "")]
        for metric, title in _MACRO.items()
        for case in results.cases(metric)
    ]
    return markdown(["layer", "metric", "MagJIT", "of it"], rows)


def _macro_models(results: Results) -> str:
    metrics = {"kernel_ms": "kernels for all shapes, ms", "total_s": "all first calls, s"}
    return _compared(results, metrics, eager=True)


_DVM = "python benchmarks/dvm.py --device cpu"
_DVM_GPU = "python benchmarks/dvm.py --device cuda"
_VT = "python benchmarks/virtual_tensors.py --device"
_FLOW = "python benchmarks/control_flow.py"

TABLES: dict[str, tuple[str, str, Callable[[Results], str]]] = {
    "models": ("demo.json", "python benchmarks/demo.py", _models),
    "inductor": ("demo.json", "python benchmarks/demo.py", _inductor),
    "front_end": ("front_end.json", "python benchmarks/front_end.py", _front_end),
    "first_calls": ("first_calls.json", "python benchmarks/first_calls.py", _first_calls),
    "call_cost": ("call_cost.json", "python benchmarks/call_cost.py", _call_cost),
    "coverage": ("coverage.json", "python benchmarks/parity_coverage.py", _coverage),
    "dynamic": (
        "dynamic_gpu.json",
        "python benchmarks/dynamic.py --device cuda --size full",
        _dynamic,
    ),
    "virtual_tensors": ("virtual_tensors.json", f"{_VT} cuda", _virtual_tensors),
    "virtual_tensors_cpu": (
        "virtual_tensors_cpu.json",
        f"{_VT} cpu --modes default",
        _virtual_tensors,
    ),
    "prefill": ("prefill.json", f'{_VT} cuda --blocks "QKV prefill"', _virtual_tensors),
    "products": ("products.json", "python benchmarks/products.py", _products),
    "dram_bytes": ("dram_bytes.json", "python benchmarks/dram_bytes.py", _dram),
    "control_flow": ("control_flow_gpu.json", f"{_FLOW} --device cuda", _control_flow),
    "control_flow_cpu": ("control_flow.json", f"{_FLOW} --backends eager dvm", _control_flow),
    "gpu": ("gpu_models.json", "python benchmarks/gpu_models.py", _gpu),
    "macro_kernels": ("macro_kernels.json", "python benchmarks/macro_kernels.py", _macro),
    "macro_models": ("macro_kernels.json", "python benchmarks/macro_kernels.py", _macro_models),
    "dvm_sets": ("dvm.json#sets", _DVM, _dvm_sets),
    "dvm_chains": ("dvm.json#chains", _DVM, _dvm_chains),
    "dvm_products": ("dvm.json#products", _DVM, _dvm_chains),
    "dvm_training": ("dvm.json#training", _DVM, _dvm_training),
    "dvm_models": ("dvm.json#models", _DVM, _dvm_models),
    "dvm_gpu": ("dvm_gpu.json#gpu", _DVM_GPU, _dvm_gpu),
    "dvm_gpu_h100": ("dvm_gpu_h100.json#gpu", _DVM_GPU, _dvm_gpu),
    "dvm_gpu_large": ("dvm_gpu.json#gpu", _DVM_GPU, _dvm_gpu_large),
    "dvm_gpu_host": ("dvm_gpu.json#gpu", _DVM_GPU, _dvm_gpu_host),
    "dvm_gpu_sets": ("dvm_gpu_models.json#sets", _DVM_GPU, _dvm_gpu_sets),
    "dvm_gpu_small": ("dvm_gpu_models.json#shapes", _DVM_GPU, _dvm_gpu_small),
    "dvm_gpu_models": ("dvm_gpu_models.json#models", _DVM_GPU, _dvm_gpu_models),
    "dvm_gpu_networks": (
        "dvm_gpu_training.json",
        "python benchmarks/dvm_gpu_training.py",
        _dvm_gpu_networks,
    ),
    "dvm_gpu_training": (
        "dvm_gpu_training.json",
        "python benchmarks/dvm_gpu_training.py",
        _dvm_gpu_training,
    ),
    "dvm_gpu_writes": (
        "dvm_gpu_writes.json",
        "python benchmarks/dvm_gpu_writes.py",
        _dvm_gpu_writes,
    ),
    "dvm_shapes": ("dvm.json#shapes", _DVM, _dvm_shapes),
    "dvm_varied": ("dvm.json#varied", _DVM, _dvm_shapes),
}
"""Name of the table: its file, the command that measures it, what draws it.

`FILE#PART` stands for the rows whose case begins with `PART: `.
"""
WITH_NOTES = frozenset({"dram_bytes", "macro_kernels", "macro_models"})
"""Tables that have a column for them, or none of them."""
