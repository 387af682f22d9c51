"""Bytes that blocks of language models move to and from a GPU's memory, by hardware counters.

    python benchmarks/dram_bytes.py --json F

Each block of ``vt_blocks`` in its default mode, in a process under Nsight Compute (``ncu``), which
counts the bytes of each kernel of one call; caches are left as they are. Beside it the minimum:
what has to be in memory is written once and read once by each step that needs it.

dram_mb    MiB read and written by all kernels of a call; peers torch.compile, minimum
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness import Benchmark, Row, argument_parser
from virtual_tensors import BATCHES, MIB, compiled
from vt_blocks import BLOCKS, Built

COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
CASES = ("Llama-3-8B decode", "QKV prefill")
ENTRANTS = ("magjit", "torch.compile")
WARM_UP = 3
NAME = 60  # characters of a kernel's name that are shown


def bytes_of(*tensors: Tensor) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def minimum(name: str, built: Built) -> int:
    """Bytes that a call has to move: of its inputs and results, and of what products exchange.

    A decoder layer for one token reads its weights and the cache; all else is small. A prefill
    writes the merged projection and reads it, the rotated queries and what is attended alike, and
    keys and values in the cache.
    """
    weights = bytes_of(*built.module.parameters())
    if name == "Llama-3-8B decode":
        return weights + bytes_of(*built.arguments)
    x, _, _, cos, sin = built.arguments
    module: Any = built.module
    tokens = x.shape[0] * x.shape[1]
    own, shared = module.heads * module.size, module.groups * module.size
    exchanged = 2 * tokens * ((own + 2 * shared) + own + 2 * shared + own) * x.element_size()
    return int(weights + bytes_of(x, cos, sin) + exchanged + bytes_of(x))


def call_counted(name: str, batch: int, compiler: str) -> None:
    """One call between the profiler's start and stop."""
    built = BLOCKS[name].build(batch, "cuda")
    call = compiled(compiler, "default", built.module)
    for _ in range(WARM_UP):
        call(*built.arguments)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call(*built.arguments)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def counted(name: str, batch: int, compiler: str) -> dict[str, float]:
    """MiB that the counters give, by kernel in order of launch: "3 gemm: read" and so on.

    Raises:
        RuntimeError: Nsight Compute failed; the text has the end of what it said.
    """
    given = json.dumps([name, batch, compiler])
    command = ["ncu", "--metrics", ",".join(COUNTERS), "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--cache-control", "none", "--csv"]
    command += ["--print-units", "base", "--target-processes", "all"]
    command += [sys.executable, __file__, "--call", given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 2:
        raise RuntimeError(f"ncu failed for {given}:\n{(done.stdout + done.stderr)[-1500:]}")
    rows = list(csv.DictReader(lines))
    counts = {}
    for row in rows:
        direction = row["Metric Name"].removeprefix("dram__bytes_").removesuffix(".sum")
        title = f"{row['ID']} {row['Kernel Name'][:NAME]}: {direction}"
        counts[title] = float(row["Metric Value"].replace(",", "")) / MIB
    return counts


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--blocks", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--compilers", nargs="+", choices=ENTRANTS, default=list(ENTRANTS))
    parser.add_argument("--kernels", action="store_true", help="print each kernel's bytes, too")
    parser.add_argument("--call", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if options.call is None and shutil.which("ncu") is None:
        parser.error("ncu, which reads hardware counters, is not installed")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Counts; 1 where MagJIT moves more than 1.15 of the minimum."""
    options = parsed(arguments)
    with torch.no_grad():
        if options.call is not None:
            call_counted(*json.loads(options.call))
            return 0
        benchmark = Benchmark.start(options)
        for name in options.blocks:
            for batch in options.batches:
                least = minimum(name, BLOCKS[name].build(batch, "cuda")) / MIB
                case = f"{name}, batch {batch}"
                kernels = {one: counted(name, batch, one) for one in options.compilers}
                if options.kernels:
                    for one, counts in kernels.items():
                        print(f"{case}, {one}")
                        for title, mib in counts.items():
                            print(f"{mib:10.1f} MiB  {title}")
                values = {one: sum(counts.values()) for one, counts in kernels.items()}
                ratios = [f"{one} {value / least:.2f}" for one, value in values.items()]
                note = f"of the minimum: {', '.join(ratios)}"
                benchmark.add(Row.of(case, "dram_mb", "MiB", {**values, "minimum": least}, note))
                benchmark.write()
    benchmark.finish()
    return int(
        any(row.magjit > 1.15 * row.peers["minimum"] for row in benchmark.rows if row.magjit)
    )


if __name__ == "__main__":
    raise SystemExit(main())
