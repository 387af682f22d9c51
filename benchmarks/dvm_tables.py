"""The tables of the dvm backend, on CPUs and on GPUs."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence

from table_text import NOTHING, Results, by_metric, compared, markdown, number


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
    peers = {"inductor-dynamic": "inductor-dynamic", "eager": "eager"}
    return by_metric(results, "shapes", _DVM_SHAPES, peers)


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


_NORM, _WIDTH = "(layer_norm|rms_norm|softmax)", "(512|768|1024|2048|4096|8192|16384)"
_KINDS = {
    "1 to 12 cheap operators": r"\d+ operators",
    "two and three tensors": r"add|silu\(x\) \* y|x \* y \+ z",
    "a special function of a product": r"\w+ of a product",
    "six special functions, seven cheap operators": r"6 special, 7 cheap",
    "layer norm, RMS norm, softmax of 512 to 16384": rf"{_NORM} {_WIDTH}",
    "norms of 1024 to 8192 with weights": r".*(1024|4096|8192), weights?",
    "log-softmax of 1024 to 8192": r"log_softmax (1024|4096|8192)",
    "rows of 32 to 384": rf"{_NORM} (32|49|64|96|128|197|256|384)(, \D+)?",
    "rows of 32,000 and more": r".*\d{5,6}(, weight| classes)?",
    "transposed and broadcast tensors": r"add, (transposed|a \w+)",
    "odd offsets and widths": r".*(from element \d| 1023(, weights)?| 4095)",
    "embeddings, losses, masks": r".*(embedding|classes|diagonal|mask).*",
    "sums and maxima of rows and of all": r"mse_loss|(logsumexp|variance) \d+|"
    r"largest .*|the norm .*|.* rows",
    "backward, without weights": r"\w+ \d+, backward",
    "backward, with weights": r"\w+ \d+, weights?, backward",
}
"""Kinds of programs, and what the whole of their cases' names is; the first that fits counts."""


def _kind(program: str) -> str:
    kinds = (kind for kind, pattern in _KINDS.items() if re.fullmatch(pattern, program))
    return next(kinds, "others")


def _dvm_gpu_kinds(results: Results) -> str:
    """What moves 256 MB of float16, by kinds of programs."""
    found: dict[str, list[str]] = {}
    for case in results.cases(_COPY):
        program, _, rest = case.rpartition(", float16, ")
        if rest == "256 MB":
            found.setdefault(_kind(program), []).append(case)
    rows = []
    for kind in [*_KINDS, "others"]:
        cases = found.get(kind, [])
        fractions = [results.value(case, _COPY) or 0.0 for case in cases]
        cells = [str(len(cases)), *_range(fractions, len(cases))]
        for peer in ("eager", "static"):
            theirs = [results.value(case, _COPY, peer) for case in cases]
            pairs = zip(fractions, theirs, strict=True)
            cells += _range([ours / other for ours, other in pairs if other], len(cases))
        rows += [[kind, *cells]] if cases else []
    header = ["programs", "number", "of copy bandwidth", "median"]
    return markdown([*header, "÷ eager", "median", "÷ Inductor", "median"], rows)


def _range(values: Sequence[float], programs: int) -> list[str]:
    """From the least to the largest, and of how many if not of all programs; the median."""
    if not values:
        return [NOTHING, NOTHING]
    ends = [number(one) for one in (min(values), max(values))]
    among = f" ({len(values)})" if len(values) < programs else ""
    return [" – ".join(dict.fromkeys(ends)) + among, number(statistics.median(values))]


def _dvm_gpu_host(results: Results) -> str:
    peers = {"operator alone": "its operator alone", "eager": "eager"}
    peers["relu"] = "one operator of eager"
    return by_metric(results, "calls", _NEW_SHAPES, peers)


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
    peers = {"eager": "eager", "inductor-dynamic": "Inductor, dynamic"}
    return by_metric(results, "operators", titles, peers)


def _dvm_gpu_models(results: Results) -> str:
    metrics = {
        "total_s": "25 calls at 25 sizes, first calls included, s",
        "steady_ms": "the same calls, warm, ms",
        "graphed_ms": "six of them by CUDA graphs, ms",
    }
    return compared(results, metrics)


_NETWORKS = {"step_ms": "forward and backward, ms", "call_ms": "a call, ms"}


def _dvm_gpu_networks(results: Results) -> str:
    peers = {"inductor": "Inductor", "eager": "eager", "eager-last": "eager, channels last"}
    return by_metric(results, "network", _NETWORKS, peers)


def _dvm_gpu_writes(results: Results) -> str:
    metrics = {"run_us": "µs", "fraction of copy bandwidth": "of copy bandwidth"}
    return by_metric(results, "program", metrics, {"eager": "eager", "inductor": "Inductor"})


def _dvm_gpu_training(results: Results) -> str:
    metrics = {"forward_us": "forward, µs", "step_us": "forward and backward, µs"}
    return by_metric(results, "case", metrics, {"inductor": "Inductor", "eager": "eager"})


_DVM = "python benchmarks/dvm.py --device cpu"
_DVM_GPU = "python benchmarks/dvm.py --device cuda"

TABLES: dict[str, tuple[str, str, Callable[[Results], str]]] = {
    "dvm_sets": ("dvm.json#sets", _DVM, _dvm_sets),
    "dvm_chains": ("dvm.json#chains", _DVM, _dvm_chains),
    "dvm_products": ("dvm.json#products", _DVM, _dvm_chains),
    "dvm_training": ("dvm.json#training", _DVM, _dvm_training),
    "dvm_models": ("dvm.json#models", _DVM, _dvm_models),
    "dvm_gpu": ("dvm_gpu.json#gpu", _DVM_GPU, _dvm_gpu),
    "dvm_gpu_h100": ("dvm_gpu_h100.json#gpu", _DVM_GPU, _dvm_gpu),
    "dvm_gpu_kinds": ("dvm_gpu.json#gpu", _DVM_GPU, _dvm_gpu_kinds),
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
"""As those of ``result_tables``."""
