"""Dense layers with any number of rows: macro-kernels beside cuBLAS and torch.compile.

Two layers of the paper (TSCompiler, section 7.3) and ten of language models, each with 62 random
numbers of rows from 1 to 16384, in float16 and bfloat16. Parts, each of which fits into a few
minutes of a GPU:

build    machine code of all schedules, without a GPU, for `tune`
tune     measures them and keeps the best: tune_s; in bfloat16 the times of float16 are taken over
select   selector_fraction: time of the best of the repository and the library, found by trying
         all, over the time of what the cost model chooses; gemm_speedup: the library's time over
         the time of what is chosen, as a geometric mean
families those of the groups and models, with the schedules that `tune` has kept: tune_s
groups   products with what follows them beside eager mode and torch.compile (dynamic shapes,
         max-autotune): kernel_ms, summed over random rows, and speedups as geometric means
models   BERT, ALBERT and ViT, batch 32, 25 random shapes, beside eager mode and torch.compile
         (dynamic shapes): the same; total_s of all calls, with compiling
search   three searches replayed on the table that `tune` recorded, over five seeds, as SVG
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import macro_groups
from harness import Benchmark, Row, argument_parser
from paritybench_runner.plots import curves

PARTS = ("build", "tune", "select", "families", "groups", "models", "search")
MOST_ROWS = 16384
COUNT = 62
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Layer:
    """A weight of n rows and k columns; the paper's rows are multiples of its batch."""

    n: int
    k: int
    rows_each: int = 1

    def rows(self, seed: int, count: int) -> list[int]:
        """Random numbers of rows, small ones as likely as large ones are on a logarithmic axis."""
        most = MOST_ROWS // self.rows_each
        numbers = random.Random(seed)
        return [self.rows_each * max(1, round(most ** numbers.random())) for _ in range(count)]


LAYERS = {
    "paper 1024-3072": Layer(3072, 1024, 32),
    "paper 4096-1024": Layer(1024, 4096, 32),
    "Llama 8B q": Layer(4096, 4096),
    "Llama 8B kv": Layer(1024, 4096),
    "Llama 8B up": Layer(14336, 4096),
    "Llama 8B down": Layer(4096, 14336),
    "Llama 7B up": Layer(11008, 4096),
    "Llama 7B down": Layer(4096, 11008),
    "Qwen 0.5B up": Layer(4864, 896),
    "Qwen 0.5B down": Layer(896, 4864),
    "GPT-2 up": Layer(3072, 768),
    "Phi 3B up": Layer(8192, 3072),
}


def command(options: argparse.Namespace, *words: object) -> Any:
    """What a command of the backend says, as JSON."""
    line = [sys.executable, "-m", "magjit_triton", *map(str, words), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line[2:])}:\n{done.stdout[-500:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# Corners and a middle of the layers' sizes: what is tuned for them is measured on all.
TUNED = ("4096x4096", "1024x4096", "14336x4096", "4096x14336", "3072x768", "896x4864")


def file_of(options: argparse.Namespace) -> list[object]:
    return ["--repository", options.repository] if options.repository else []


# -- parts ----------------------------------------------------------------------------------------


def build(benchmark: Benchmark, options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    words = ["tune", "linear", "--no-measure", "--device", options.device]
    (found,) = command(options, *words, "--repository", options.built)
    note = f"{len(found['configurations'])} schedules, {found['bytes'] / 2**20:.1f} MiB"
    benchmark.add(Row("linear", "build_s", "s", time.perf_counter() - begin, note=note))


def tuned_row(found: dict[str, Any]) -> Row:
    """How long a family took."""
    facts = found["facts"]
    note = f"{facts['measured']} measured, " if "measured" in facts else "times taken over, "
    note += f"{len(found['configurations'])} kept, hedge {facts.get('hedge')}"
    if facts["wrong"]:
        note += f"; wrong: {', '.join(facts['wrong'])}"
    return Row(found["name"], "tune_s", "s", facts["tuned_s"], note=note)


def tune(benchmark: Benchmark, options: argparse.Namespace) -> None:
    words = ["tune", "linear", "--layers", *TUNED, *file_of(options)]
    measured = [*words, "--table", options.table]
    if options.built.is_file():
        measured += ["--built", options.built]
    benchmark.add(tuned_row(command(options, *measured)[0]))
    for dtype in options.dtypes:
        if dtype != "float16":
            taken = [*words, "--dtype", dtype, "--times-of", "float16"]
            benchmark.add(tuned_row(command(options, *taken)[0]))


def geomean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def select(benchmark: Benchmark, options: argparse.Namespace) -> None:
    for dtype in options.dtypes:
        select_in(benchmark, options, dtype)
        benchmark.write()


def select_in(benchmark: Benchmark, options: argparse.Namespace, dtype: str) -> None:
    shapes = {
        name: [
            [1, m, LAYERS[name].n, LAYERS[name].k]
            for m in LAYERS[name].rows(options.seed, options.count)
        ]
        for name in options.layers
    }
    path = options.table.with_suffix(".shapes.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([shape for rows in shapes.values() for shape in rows]))
    table = options.table.with_suffix(f".{dtype}.json")
    words = ["record", "linear", "--dtype", dtype, "--shapes", path, "--table", table]
    found = command(options, *words, *file_of(options))
    rows: Iterator[dict[str, Any]] = iter(found["shapes"])
    every = []
    for name, own in shapes.items():
        seen = [next(rows) for _ in own]
        every += seen
        add_selected(benchmark, f"{name}, {dtype}", seen)
        times = {
            "magjit": 1e3 * sum(row["chosen_s"] for row in seen),
            "cuBLAS": 1e3 * sum(row["library_s"] for row in seen),
            "best": 1e3 * sum(row["best_s"] for row in seen),
        }
        benchmark.add(Row.of(f"{name}, {dtype}", "kernels_ms", "ms", times))
    add_selected(benchmark, f"all layers, {dtype}", every)
    case = f"all layers, {dtype}"
    benchmark.add(Row(case, "select_ns", "ns", found["select_ns"], note="measured in C"))


def add_selected(benchmark: Benchmark, case: str, seen: Sequence[dict[str, Any]]) -> None:
    """How near the choice is to the best, and to the library alone."""
    fractions = sorted(row["best_s"] / row["chosen_s"] for row in seen)
    tenth = fractions[: max(1, len(fractions) // 10)]
    note = f"worst tenth {statistics.fmean(tenth):.3f} on average, {tenth[-1]:.3f} at most"
    fraction = statistics.fmean(fractions)
    benchmark.add(Row(case, "selector_fraction", "share", fraction, note=note))
    # Where the library is chosen it is the library: no noise of two measurements.
    ours = [row["library_s"] / row["chosen_s"] for row in seen if row["chosen"] >= 0]
    all_of_them = ours + [1.0] * (len(seen) - len(ours))
    could = geomean([row["library_s"] / row["best_s"] for row in seen])
    note = f"ours at {len(ours)} of {len(seen)}"
    if ours:
        note += f": {geomean(ours):.3f} there, least {min(ours):.3f}"
    note += f"; {could:.3f} with perfect choices"
    benchmark.add(Row(case, "gemm_speedup", "×", geomean(all_of_them), note=note))


def families(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """The families of groups and models, with the schedules that were kept of the plain product."""
    names = [*macro_groups.FAMILIES, *macro_groups.FAMILIES_OF_MODELS]
    words = ["--layers", *TUNED, *file_of(options)]
    for found in command(options, "tune", *names, "--like", "linear", *words):
        benchmark.add(tuned_row(found))
    for dtype in options.dtypes:
        if dtype != "float16":
            taken = ["--dtype", dtype, "--times-of", "float16"]
            for found in command(options, "tune", *names, *taken, *words):
                benchmark.add(tuned_row(found))


def groups(benchmark: Benchmark, options: argparse.Namespace) -> None:
    for dtype in options.dtypes[:1]:
        macro_groups.measure_groups(
            benchmark, options.groups, dtype, options.peers, options.count_of_groups
        )


def models(benchmark: Benchmark, options: argparse.Namespace) -> None:
    macro_groups.measure_models(
        benchmark, options.models, options.peers, macro_groups.SHAPES_OF_MODELS
    )


def search(benchmark: Benchmark, options: argparse.Namespace) -> None:
    words = ["compare", "linear", "--table", options.table, "--device", options.device]
    if options.searches:
        words += ["--searches", *options.searches]
    found = command(options, *words, "--seeds", 5, "--budget", options.budget)
    for regime, searches in found.items():
        for name, runs in searches.items():
            ends = [one[-1] for one in runs]
            note = f"from {min(ends):.3f} to {max(ends):.3f} over {len(ends)} seeds"
            row = Row(f"{regime} rows", f"{name}, found / best", "×", statistics.median(ends))
            benchmark.add(Row(row.case, row.metric, row.unit, row.magjit, note=note))
        path = options.table.with_suffix(f".{regime}.svg")
        path.write_text(curves(searches, "schedules measured", 1.5))
        benchmark.console.print(f"written to {path}")


RUN = {
    "build": build,
    "tune": tune,
    "select": select,
    "families": families,
    "groups": groups,
    "models": models,
    "search": search,
}
NEEDS_GPU = {"tune", "select", "families", "groups", "models"}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    folder = Path("build/macro_kernels")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=["tune", "select", "families", "groups", "models"],
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--peers", nargs="*", choices=("torch.compile",), default=["torch.compile"])
    parser.add_argument("--count", type=int, default=COUNT, help="numbers of rows of a layer")
    parser.add_argument("--count-of-groups", type=int, default=16, help="rows of a group")
    names = tuple(macro_groups.GROUPS)
    parser.add_argument("--groups", nargs="+", choices=names, default=list(names), metavar="NAME")
    names = macro_groups.MODELS
    parser.add_argument("--models", nargs="+", choices=names, default=list(names))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=int, default=64, help="of a search")
    parser.add_argument("--searches", nargs="+", help="regions, random, coordinate")
    parser.add_argument("--device", default="h200", help="that `build` builds for")
    parser.add_argument("--built", type=Path, default=folder / "built.sqlite")
    parser.add_argument("--table", type=Path, default=folder / "linear.json")
    parser.add_argument(
        "--repository",
        type=Path,
        help="of tune, select and families; by default the one in MagJIT's cache, as programs have",
    )
    options = parser.parse_args(arguments)
    if NEEDS_GPU & set(options.parts) and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --parts build search need none")
    return options


def replaces(options: argparse.Namespace, row: dict[str, Any]) -> bool:
    """Whether a row of the file is measured now."""
    name, _, dtype = row["case"].rpartition(", ")
    if row["metric"] == "tune_s":
        family = row["case"].partition(" ")[0]
        return ("tune" if family == "linear" else "families") in options.parts
    if name in macro_groups.GROUPS or name == "all groups":
        return "groups" in options.parts and name in (*options.groups, "all groups")
    if row["case"] in macro_groups.MODELS:
        return "models" in options.parts and row["case"] in options.models
    if name in LAYERS or name == "all layers":
        mine = name in (*options.layers, "all layers") and dtype in options.dtypes
        return "select" in options.parts and mine
    return ("search" if "found / best" in row["metric"] else "build") in options.parts


def kept(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of the file, if it is there, that are not measured now."""
    if options.json is not None and options.json.is_file():
        for row in json.loads(options.json.read_text())["rows"]:
            if not replaces(options, row):
                yield Row(**row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; 1 when a result of MagJIT's was not eager's. Other rows of the file stay."""
    options = parsed(arguments)
    benchmark = Benchmark.start(options)
    benchmark.rows += kept(options)
    with torch.no_grad():
        for part in options.parts:
            benchmark.console.print(f"{part} …")
            RUN[part](benchmark, options)
            benchmark.write()
    benchmark.finish()
    return int(any("magjit: " in row.note for row in benchmark.rows))


if __name__ == "__main__":
    raise SystemExit(main())
