"""Blocks of networks in which data movement counts: the triton backend beside torch.compile.

Each block of ``vt_blocks`` without grad, in the modes of both compilers, in turns, after its result
has been compared with eager's. Each compiler counts with its best mode, which the note names.

run_ms          a call: of the device, between two events; of the processor, by the clock
extra_peak_mb   most memory that a call takes beside its arguments, and what a compiled block holds
                between calls (memory of CUDA graphs, their pools as a whole); on a GPU in a
                process of its own, after a call in eager mode, which sets up cuBLAS's workspace
compile_s       from `compile` to the end of the second call; of torch.compile without caches
second_compile_s  the same of a second process, which finds MagJIT's and Triton's caches on the disk
kernels         that a call launches, and `moving_kernels` among them: copies, by their names
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import magjit
from agreement import differences
from compilers import disable_caches
from harness import (
    Benchmark,
    Row,
    Task,
    argument_parser,
    earlier_rows,
    in_fresh_process,
    median_times,
    no_collection,
)
from vt_blocks import BLOCKS, Built

MODES = ("default", "max-autotune", "reduce-overhead")
CPU_MODES = ("default",)
BATCHES = (1, 16)
ROUNDS = 7
ROUND_MS = 30.0
# TF32 and bfloat16 round in another order when operators are fused.
TOLERANCES = {torch.float32: (5e-3, 5e-3), torch.bfloat16: (3e-2, 3e-2)}
CPU_TOLERANCE = (1e-4, 1e-4)
MIB = 2**20

MOVING = re.compile(
    r"memcpy|(?<!_to_)copy|CatArray|nchwToNhwc|nhwcToNchw|transpose|permute|gather", re.I
)
"""What kernels are called that only move data; Inductor names others by casts, ``_to_copy``."""


@dataclass(slots=True)
class Entrant:
    """A block as one compiler's mode has it."""

    call: Callable[..., Any]
    compile_s: float = 0.0
    memory_mb: float | None = None
    kernels: tuple[int, int] | None = None
    wrong: str = ""


# -- what a device says ---------------------------------------------------------------------------


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def held(device: str) -> float:
    """MiB that nobody has freed, and pools of CUDA graphs as a whole: nobody else can use them."""
    gc.collect()
    if device != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    counts = (
        one["allocated_size"] if one["segment_pool_id"] == (0, 0) else one["total_size"]
        for one in torch.cuda.memory_snapshot()
    )
    return float(sum(counts)) / MIB


def peak(call: Task, device: str) -> float:
    """MiB that a call takes at most beside what is there before."""
    call()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        del result
        return (torch.cuda.max_memory_allocated() - before) / MIB
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = call()
    del result
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / MIB


def launched(call: Task) -> tuple[int, int]:
    """Kernels of a call on the GPU, and those of them that only move data."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type.name == "CUDA"]
    return len(names), sum(1 for name in names if MOVING.search(name))


def device_times(tasks: Mapping[str, Task], rounds: int) -> dict[str, float]:
    """Median milliseconds a call on the GPU, measured in turns."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once(task: Task, calls: int) -> float:
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            task()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / calls

    with no_collection():
        calls = {}
        for name, task in tasks.items():
            once(task, 3)
            calls[name] = max(3, min(1000, int(ROUND_MS / max(once(task, 3), 1e-3))))
        times: dict[str, list[float]] = {name: [] for name in tasks}
        names = list(tasks)
        for turn in range(rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                times[name].append(once(tasks[name], calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def times_of(tasks: Mapping[str, Task], device: str, rounds: int) -> dict[str, float]:
    if device == "cuda":
        return device_times(tasks, rounds)
    return {name: value / 1000 for name, value in median_times(tasks, rounds=rounds).items()}


# -- a block --------------------------------------------------------------------------------------


def compiled(name: str, mode: str, module: torch.nn.Module) -> Callable[..., Any]:
    """A block as a compiler's mode makes it."""
    if name == "magjit":
        return magjit.compile(module, backend="triton", mode=mode)
    if name == "eager":
        return module
    made: Callable[..., Any] = torch.compile(
        module, mode=None if mode == "default" else mode, dynamic=False
    )
    return made


def keep_written(built: Built) -> None:
    """Tell TorchDynamo that what the block writes stays where it is: else it has no CUDA graph."""
    versions = [one._version for one in built.arguments]
    built.module(*built.arguments)
    for one, version in zip(built.arguments, versions, strict=True):
        if one._version != version:
            torch._dynamo.mark_static_address(one)


def entrant(
    name: str, mode: str, build: Callable[[], Built], expected: Any, device: str
) -> Entrant:
    """A block compiled anew and called three times; what it costs but for its time."""
    built = build()
    if name == "torch.compile":
        keep_written(built)
    start = time.perf_counter()
    call = compiled(name, mode, built.module)
    for _ in range(2):
        actual = call(*built.arguments)
    synchronize(device)
    made = Entrant(lambda: call(*built.arguments), time.perf_counter() - start)
    actual = call(*built.arguments)
    dtype = next(one.dtype for one in built.arguments if one.is_floating_point())
    tolerance = TOLERANCES[dtype] if device == "cuda" else CPU_TOLERANCE
    made.wrong = "; ".join(differences(expected, actual, tolerance=tolerance))
    del actual
    if device == "cuda":
        made.kernels = launched(made.call)
    else:
        made.memory_mb = peak(made.call, device)
    return made


def alone(name: str, batch: int, entry: str, small: bool) -> dict[str, float]:
    """MiB that a compiled block holds and a call of it takes beside; seconds until it is ready."""
    built = BLOCKS[name].build(batch, "cuda", small=True if small else None)
    compiler, _, mode = entry.partition(" ")
    built.module(*built.arguments)
    if compiler == "torch.compile":
        keep_written(built)
    before = held("cuda")
    start = time.perf_counter()
    call = compiled(compiler, mode, built.module)
    for _ in range(2):
        call(*built.arguments)
    synchronize("cuda")
    seconds = time.perf_counter() - start
    for _ in range(6):  # Until it is decided what is replayed.
        call(*built.arguments)
    kept = max(0.0, held("cuda") - before)
    memory = kept + peak(lambda: call(*built.arguments), "cuda")
    return {"memory_mb": memory, "compile_s": seconds}


def in_own_process(name: str, batch: int, entry: str, small: bool) -> dict[str, float]:
    """The same, measured in a process of its own."""
    given = json.dumps([name, batch, entry, small])
    found: dict[str, float] = in_fresh_process(__file__, "--alone", given)
    return found


def measure(benchmark: Benchmark, name: str, batch: int, options: argparse.Namespace) -> None:
    """All rows of a block."""
    device: str = options.device
    block = BLOCKS[name]
    small = True if options.small else None

    def build() -> Built:
        return block.build(batch, device, small=small)

    built = build()
    eager = Entrant(lambda: built.module(*built.arguments))
    expected = build().module(*build().arguments)
    if device == "cuda":
        eager.kernels = launched(eager.call)
    else:
        eager.memory_mb = peak(eager.call, device)
    found: dict[str, Entrant] = {"eager": eager}
    notes: list[str] = []
    torch._dynamo.reset()  # once: it would drop the modes before, too
    for compiler in ("magjit", "torch.compile"):
        for mode in options.modes:
            try:
                found[f"{compiler} {mode}"] = entrant(compiler, mode, build, expected, device)
            except Exception as error:
                notes.append(f"{compiler} {mode}: {type(error).__name__}: {str(error)[:200]}")
    notes += [f"{key}: {one.wrong}" for key, one in found.items() if one.wrong]
    times = times_of({key: one.call for key, one in found.items()}, device, options.rounds)
    best = fastest(times)
    if device == "cuda":
        for key in best.values():
            found[key].memory_mb = in_own_process(name, batch, key, options.small)["memory_mb"]
    add_rows(benchmark, f"{name}, batch {batch}", found, times, best, notes)
    if device == "cuda" and "magjit" in best:
        add_second(benchmark, name, batch, best["magjit"], options)


def fastest(times: Mapping[str, float]) -> dict[str, str]:
    """Eager mode, and the best mode of each compiler."""
    best = {"eager": "eager"}
    for compiler in ("magjit", "torch.compile"):
        modes = [key for key in times if key.startswith(compiler)]
        if modes:
            best[compiler] = min(modes, key=times.__getitem__)
    return best


def add_second(
    benchmark: Benchmark, name: str, batch: int, entry: str, options: argparse.Namespace
) -> None:
    """The row of what a second process takes, after one that has filled the caches."""
    case, metric = f"{name}, batch {batch}", "second_compile_s"
    in_own_process(name, batch, entry, options.small)
    seconds = in_own_process(name, batch, entry, options.small)["compile_s"]
    benchmark.rows = [row for row in benchmark.rows if (row.case, row.metric) != (case, metric)]
    benchmark.add(Row.of(case, metric, "s", {"magjit": seconds}))


def measured_modes(benchmark: Benchmark, case: str) -> dict[str, str]:
    """The modes that were best when times were measured."""
    rows = {row.metric: row for row in benchmark.rows if row.case == case}
    if "run_ms" not in rows:
        raise SystemExit(f"{case}: its times have not been measured yet")
    named = rows["run_ms"].note.partition(";")[0].split(", ")
    return {"eager": "eager"} | {key.partition(" ")[0]: key for key in named}


def measure_beside(
    benchmark: Benchmark, name: str, batch: int, options: argparse.Namespace
) -> None:
    """The rows that need no times anew, in the modes that were best."""
    case = f"{name}, batch {batch}"
    best = measured_modes(benchmark, case)
    if options.only == "second":
        add_second(benchmark, name, batch, best["magjit"], options)
        return
    values = {
        key: in_own_process(name, batch, entry, options.small)["memory_mb"]
        for key, entry in best.items()
    }
    (old,) = (row for row in benchmark.rows if (row.case, row.metric) == (case, "extra_peak_mb"))
    benchmark.rows[benchmark.rows.index(old)] = Row.of(case, "extra_peak_mb", "MiB", values)


def add_rows(
    benchmark: Benchmark,
    case: str,
    found: Mapping[str, Entrant],
    times: Mapping[str, float],
    best: Mapping[str, str],
    notes: Sequence[str],
) -> None:
    """Rows of each compiler's best mode, and the times of all modes."""

    def row(metric: str, unit: str, value: Callable[[str], float | None], note: str = "") -> None:
        values = {name: value(key) for name, key in best.items()}
        given = {name: one for name, one in values.items() if one is not None}
        if "magjit" in given or note:
            benchmark.add(Row.of(case, metric, unit, given, note))

    chosen = ", ".join(key for key in best.values() if key != "eager")
    row("run_ms", "ms", times.__getitem__, "; ".join([chosen, *notes]))
    row("extra_peak_mb", "MiB", lambda key: found[key].memory_mb)
    row("compile_s", "s", lambda key: found[key].compile_s or None)
    for number, metric in enumerate(("kernels", "moving_kernels")):
        counts = {name: found[key].kernels for name, key in best.items()}
        values = {name: float(one[number]) for name, one in counts.items() if one is not None}
        if values:
            benchmark.add(Row.of(case, metric, "count", values))
    for mode in MODES:
        values = {name: times[f"{name} {mode}"] for name in best if f"{name} {mode}" in times}
        if values:
            benchmark.add(Row.of(case, f"run_ms, {mode}", "ms", values))


# -- the whole ------------------------------------------------------------------------------------


def add_means(benchmark: Benchmark) -> None:
    """Geometric means of the blocks' ratios, torch.compile's figure over ours."""
    groups = {
        "all blocks": list(BLOCKS),
        "language models": [name for name, block in BLOCKS.items() if block.language],
        "vision": [name for name, block in BLOCKS.items() if not block.language],
    }
    pairs = [
        (row, row.magjit, row.peers["torch.compile"])
        for row in benchmark.rows
        if row.magjit is not None and row.peers.get("torch.compile")
    ]
    for title, names in groups.items():
        own = [one for one in pairs if one[0].case.rpartition(", batch")[0] in names]
        if {row.case.rpartition(", batch")[0] for row, _, _ in own} != set(names):
            continue  # some blocks have not been measured yet
        ratios = [theirs / mine for row, mine, theirs in own if row.metric == "run_ms"]
        shares = [mine / theirs - 1 for row, mine, theirs in own if row.metric == "extra_peak_mb"]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            note = f"{len(ratios)} cases, from {min(ratios):.2f} to {max(ratios):.2f}"
            benchmark.add(Row(title, "speed, torch.compile's time / ours", "×", mean, note=note))
        if shares:
            note = f"from {min(shares):+.0%} to {max(shares):+.0%}"
            mean = statistics.fmean(shares)
            benchmark.add(
                Row(title, "extra peak memory against torch.compile's", "share", mean, note=note)
            )


def kept(options: argparse.Namespace) -> list[Row]:
    """Rows of the file, if it is there, of blocks whose times are not measured now."""
    if options.only is not None:
        return earlier_rows(options.json, lambda row: ", batch " in row["case"])
    cases = {f"{name}, batch {batch}" for name in options.blocks for batch in options.batches}
    return earlier_rows(
        options.json, lambda row: ", batch " in row["case"] and row["case"] not in cases
    )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=available)
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS), metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--only",
        choices=("memory", "second"),
        help="these rows anew, in the modes that were fastest, beside the other rows of the file",
    )
    parser.add_argument("--alone", metavar="JSON", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="small sizes on a GPU, too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if options.only is not None and options.device != "cuda":
        parser.error("--only is for a GPU; on a CPU all rows are measured together")
    options.modes = options.modes or list(MODES if options.device == "cuda" else CPU_MODES)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the blocks; 1 when a result of MagJIT's was not eager's. Other blocks' rows stay."""
    options = parsed(arguments)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    if options.alone is not None:
        with torch.no_grad():
            print(json.dumps(alone(*json.loads(options.alone))))
        return 0
    disable_caches()
    benchmark = Benchmark.start(options)
    benchmark.rows += kept(options)
    with torch.no_grad():
        for name in options.blocks:
            for batch in options.batches:
                benchmark.console.print(f"{name}, batch {batch} …")
                (measure_beside if options.only else measure)(benchmark, name, batch, options)
                benchmark.write()
    add_means(benchmark)
    benchmark.finish()
    sys.stdout.flush()
    return int(any(re.search(r"magjit [a-z-]+: ", row.note) for row in benchmark.rows))


if __name__ == "__main__":
    raise SystemExit(main())
