"""Dense layers with any number of rows: macro-kernels beside cuBLAS and torch.compile.

Two layers of the paper (TSCompiler, section 7.3) and ten of language models, each with 62 random
numbers of rows from 1 to 16384, in float16 and bfloat16. Kernels are those that programs use: the
user's own, else those of the wheel. Each part has its time (`--seconds`), each row is written when
it is known, and what fails is a row with the reason. Parts:

select   selector_fraction: time of the best of the repository and the library, found by trying
         all, over the time of what the cost model chooses; gemm_speedup: the library's time over
         the time of what is chosen, as a geometric mean, and how often and by how much ours is
groups   products with what follows them beside eager mode and torch.compile (dynamic shapes,
         max-autotune): kernel_ms, summed over random rows, and speedups as geometric means
models   BERT, ALBERT and ViT, batch 32, 25 random shapes, beside eager mode and torch.compile
         (dynamic shapes): the same; total_s of all calls, with compiling

and where they are asked for:

build    machine code of all schedules, without a GPU, for `tune`
tune     measures them and keeps the best: tune_s; in bfloat16 the times of float16 are taken over
families those of the groups and models, with the schedules that `tune` has kept: tune_s
tables   times of all kept schedules on the points of the library's table and between them, for
         `python -m magjit_triton refit`
search   three searches replayed on the table that `tune` recorded, over five seeds, as SVG
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import macro_groups
import macro_peers
from harness import Benchmark, Row, argument_parser, earlier_rows
from limits import Budget, DeviceLostError, OverTimeError, failed, renewed
from paritybench_runner.plots import curves

PARTS = ("build", "tune", "select", "families", "tables", "groups", "models", "search")
MOST_ROWS = 16384
COUNT, ROWS_OF_GROUPS, ROWS_BETWEEN = 62, 16, 6
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


# Corners and a middle of the layers' sizes, and powers of two where these leave wide gaps, in which
# the model of the cost errs: what is tuned for them is measured on all.
TUNED = (
    "4096x4096",
    "1024x4096",
    "14336x4096",
    "4096x14336",
    "3072x768",
    "896x4864",
    "8192x2048",
    "2048x1536",
)


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
    note += f", between sizes {facts['hedge_between']}" if "hedge_between" in facts else ""
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


def recorded(
    options: argparse.Namespace, folder: Path, words: Sequence[object], seconds: float
) -> Iterator[dict[str, Any]]:
    """Tables of `record` as they are written: with file, shapes, choices and select_ns.

    Raises:
        RuntimeError: the command failed.
        OverTimeError: the time is over.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    line = [sys.executable, "-m", "magjit_triton", "record", *map(str, words)]
    line += ["--tables", str(folder), "--json", *map(str, file_of(options))]
    seen: set[Path] = set()
    end = time.perf_counter() + seconds
    with tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen(line, stdout=said, stderr=subprocess.STDOUT)
        try:
            ended: int | None = None
            while ended is None:
                ended = running.poll()  # Before looking: what is written is then complete.
                for path in sorted(set(folder.glob("*.json")) - seen):
                    seen.add(path)
                    found = json.loads(path.read_text())
                    yield {"file": path.stem, "shapes": found["shapes"], **found["facts"]}
                if ended is None:
                    if time.perf_counter() > end:
                        raise OverTimeError(f"not done in {seconds:.0f} s: {' '.join(line[2:6])} …")
                    time.sleep(0.2)
            if ended:
                said.seek(0)
                raise RuntimeError(f"{' '.join(line[2:6])} …: {said.read()[-3000:]}")
        finally:
            running.kill()
            running.wait()


def select(benchmark: Benchmark, options: argparse.Namespace) -> None:
    budget = Budget(options.seconds, len(options.dtypes))
    for dtype in options.dtypes:
        try:
            select_in(benchmark, options, dtype, budget.share())
        except (OverTimeError, RuntimeError) as error:
            failed(benchmark, f"all layers, {dtype}", error)


def select_in(
    benchmark: Benchmark, options: argparse.Namespace, dtype: str, seconds: float
) -> None:
    """All layers in a type; all times stay in the folder of the table."""
    folder = options.table.parent / f"shapes-{options.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for name in options.layers:
        layer = LAYERS[name]
        rows = layer.rows(options.seed, options.shapes or COUNT)
        path = folder / f"{name.replace(' ', '-').replace('.', '_')}.json"
        path.write_text(json.dumps([[1, m, layer.n, layer.k] for m in rows]))
        files[path.stem] = name
    every: list[dict[str, Any]] = []
    spent = 0.0
    words = ["linear", "--dtype", dtype, "--shapes", *(folder / f"{one}.json" for one in files)]
    tables = options.table.parent / f"select-{options.seed}-{dtype}"
    for table in recorded(options, tables, words, seconds):
        name = files[table["file"].rpartition(".")[2]]
        every += table["choices"]
        spent = table["select_ns"]
        renewed(benchmark, selected(f"{name}, {dtype}", table["choices"]))
    case = f"all layers, {dtype}"
    timed = Row(case, "select_ns", "ns", spent, note="measured in C")
    renewed(benchmark, [*selected(case, every), timed])


def selected(case: str, seen: Sequence[dict[str, Any]]) -> list[Row]:
    """How near choices are to the best, and how they are beside the library alone."""
    times = {
        "magjit": 1e3 * sum(row["chosen_s"] for row in seen),
        "cuBLAS": 1e3 * sum(row["library_s"] for row in seen),
        "best": 1e3 * sum(row["best_s"] for row in seen),
    }
    return [*quality(case, seen), Row.of(case, "kernels_ms", "ms", times)]


def tables(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """Float16 of all families; of other types the plain product, since times are taken over."""
    names = ("linear", *macro_groups.FAMILIES, *macro_groups.FAMILIES_OF_MODELS)
    budget = Budget(options.seconds, len(options.dtypes))
    for dtype in options.dtypes:
        words = [*(names if dtype == "float16" else names[:1]), "--dtype", dtype]
        words += ["--grid", options.shapes or ROWS_BETWEEN, "--seed", options.seed]
        begin = time.perf_counter()
        try:
            folder = options.table.parent / f"tables-{dtype}"
            for table in recorded(options, folder, words, budget.share()):
                spent, note = time.perf_counter() - begin, f"{len(table['shapes'])} shapes"
                renewed(benchmark, [Row(table["family"], "recorded_s", "s", spent, note=note)])
                begin = time.perf_counter()
        except (OverTimeError, RuntimeError) as error:
            failed(benchmark, f"tables {dtype}", error)


def quality(case: str, seen: Sequence[dict[str, Any]]) -> list[Row]:
    """Shares of the best, and times as fast as the library."""
    fractions = sorted(row["best_s"] / row["chosen_s"] for row in seen)
    tenth = fractions[: max(1, len(fractions) // 10)]
    note = f"worst tenth {statistics.fmean(tenth):.3f} on average, {tenth[-1]:.3f} at most"
    near = Row(case, "selector_fraction", "share", statistics.fmean(fractions), note=note)
    # Where the library is chosen it is the library: no noise of two measurements.
    ours = {row["library_s"] / row["chosen_s"]: row for row in seen if row["chosen"] >= 0}
    wins = [row["library_s"] / row["chosen_s"] for row in seen if row["chosen"] >= 0]
    could = geomean([row["library_s"] / row["best_s"] for row in seen])
    note = f"ours at {len(wins)} of {len(seen)}"
    if wins:
        worst = ours[min(wins)]
        note += f": {geomean(wins):.3f} there, least {min(wins):.3f} ({worst['shape'][1]} rows"
        note += f", {1e6 * worst['chosen_s']:.1f} µs, told {1e6 * worst['predicted_s']:.1f}"
        note += f", {worst['configuration']})"
    note += f"; {could:.3f} with perfect choices"
    value = geomean([*wins, *[1.0] * (len(seen) - len(wins))])
    return [near, Row(case, "gemm_speedup", "×", value, note=note)]


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
    dtype, count = options.dtypes[0], options.shapes or ROWS_OF_GROUPS
    macro_peers.measure_groups(
        benchmark, options.groups, dtype, options.peers, count, options.seconds
    )


def models(benchmark: Benchmark, options: argparse.Namespace) -> None:
    count = options.shapes or macro_groups.SHAPES_OF_MODELS
    macro_peers.measure_models(benchmark, options.models, options.peers, count, options.seconds)


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
    "tables": tables,
    "groups": groups,
    "models": models,
    "search": search,
}
NEEDS_GPU = {"tune", "select", "families", "tables", "groups", "models"}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    folder = Path("build/macro_kernels")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=["select", "groups", "models"],
    )
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--peers", nargs="*", choices=("torch.compile",), default=["torch.compile"])
    parser.add_argument(
        "--shapes",
        type=int,
        help=f"of each layer ({COUNT}), group ({ROWS_OF_GROUPS}) and model "
        f"({macro_groups.SHAPES_OF_MODELS}), and rows between the points of `tables`",
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of each part")
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
        help="of tune, select, tables and families; by default what programs use",
    )
    options = parser.parse_args(arguments)
    if NEEDS_GPU & set(options.parts) and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --parts build search need none")
    return options


def replaces(options: argparse.Namespace, row: dict[str, Any]) -> bool:
    """Whether a row of the file is measured now."""
    parts, metric = options.parts, row["metric"]
    name, _, dtype = row["case"].rpartition(", ")
    if row["case"] in PARTS:
        return row["case"] in parts
    if metric == "tune_s":
        return ("tune" if row["case"].startswith("linear ") else "families") in parts
    if name in macro_groups.GROUPS or name == "all groups":
        mine = name in (*options.groups, "all groups") and dtype == options.dtypes[0]
        return "groups" in parts and mine
    if row["case"] in (*macro_groups.MODELS, "all models"):
        return "models" in parts and row["case"] in (*options.models, "all models")
    if name in LAYERS or name == "all layers":
        mine = name in (*options.layers, "all layers") and dtype in options.dtypes
        return "select" in parts and mine
    if "found / best" in metric:
        return "search" in parts
    return ("build" if metric == "build_s" else "tables") in parts


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; 1 when a result was not eager's or a row failed. Other rows stay."""
    options = parsed(arguments)
    benchmark = Benchmark.start(options)
    benchmark.rows += earlier_rows(options.json, lambda row: not replaces(options, row))
    with torch.no_grad():
        for part in options.parts:
            benchmark.console.print(f"{part} …")
            try:
                RUN[part](benchmark, options)
            except DeviceLostError as error:
                benchmark.console.print(f"{part}: nothing else can be measured: {error}")
                break
            except Exception as error:
                failed(benchmark, part, error)
            benchmark.write()
    benchmark.finish()
    wrong = [row for row in benchmark.rows if "magjit: " in row.note or "failed" in row.metric]
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
