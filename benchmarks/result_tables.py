"""The tables of README.md and docs/benchmarks.md, drawn from what a JSON file of results has."""

from __future__ import annotations

from collections.abc import Callable

import dvm_tables
from table_text import NOTHING, Results, compared, markdown, number, ratio


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


def _inductor(results: Results) -> str:
    return compared(results, _TIMES, case_ends=", inductor")


def _front_end(results: Results) -> str:
    metrics = {
        "overhead_us": "overhead, stub graph, µs",
        "overhead_real_us": "overhead, real graph, µs",
        "call_us": "a call, µs",
        "first_call_s": "first call, s",
        "capture_peak": "peak memory of a capture, × eager",
    }
    return compared(results, metrics)


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
    return compared(results, metrics)


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
    return compared(results, {"outside_cost": "time, × without a compiler"}, eager=False, digits=4)


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
    return compared(results, {"graphs": "graphs", **_TIMES})


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
    return compared(results, metrics, eager=True)


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
    "products": ("products.json", "python benchmarks/products.py", _products),
    "dram_bytes": ("dram_bytes.json", "python benchmarks/dram_bytes.py", _dram),
    "control_flow": ("control_flow_gpu.json", f"{_FLOW} --device cuda", _control_flow),
    "control_flow_cpu": ("control_flow.json", f"{_FLOW} --backends eager dvm", _control_flow),
    "gpu": ("gpu_models.json", "python benchmarks/gpu_models.py", _gpu),
    "macro_kernels": ("macro_kernels.json", "python benchmarks/macro_kernels.py", _macro),
    "macro_models": ("macro_kernels.json", "python benchmarks/macro_kernels.py", _macro_models),
    **dvm_tables.TABLES,
}
"""Name of the table: its file, the command that measures it, what draws it.

`FILE#PART` stands for the rows whose case begins with `PART: `.
"""
WITH_NOTES = frozenset({"dram_bytes", "macro_kernels", "macro_models"})
"""Tables that have a column for them, or none of them."""
