"""All figures of the dvm backend on a GPU, of one tree, in one file: `results/dvm_gpu.json`.

    python benchmarks/dvm_gpu_all.py --json benchmarks/results/dvm_gpu.json

Takes some four minutes, of which kernels that no disk cache has yet take half a minute.  What
matters most comes first; `--seconds` starts nothing after so long.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import dvm_gpu
import dvm_gpu_backward
import dvm_gpu_launch
import dvm_gpu_shapes
from compilers import compile_without_limit
from dvm_peers import dvm
from harness import Benchmark, argument_parser

_PLAN = (
    "--dtypes float16 --sizes '256 MB' --programs special views --peers eager static",
    "--dtypes float16 --sizes '256 MB' --programs norms --widths 1024 4096 --peers eager static",
    "--dtypes float16 --sizes '256 MB' --programs norms --widths 512 2048 8192 16384 --peers eager",
    "--dtypes float16 --sizes '256 MB' --programs norms --widths 768 --peers eager",
    "--dtypes float16 --sizes '256 MB' --programs narrow long offsets --peers eager static",
    "--dtypes float16 --sizes '256 MB' --programs tables reductions --peers eager static",
    "--dtypes float16 --sizes '64 MB' --programs chains inputs views offsets --peers eager",
    "--dtypes float16 --sizes '64 MB' --programs special --peers eager static",
    "--dtypes float16 --sizes '256 MB' --programs chains weights inputs --peers eager",
    "--dtypes bfloat16 --sizes '256 MB' --programs special --peers eager",
    "--dtypes bfloat16 --sizes '256 MB' --programs norms --widths 512 1024 4096 --peers eager",
    "--dtypes float32 --sizes '256 MB' --programs long --peers eager static",
    "--dtypes float32 --sizes '256 MB' --programs special chains inputs --peers eager",
    "--dtypes float32 --sizes '256 MB' --programs norms --widths 512 1024 4096 --peers eager",
)
"""Arguments of `dvm_gpu.py`."""


def compile_kernels() -> None:
    """All of them at once: each takes a core for half a minute."""
    dvm_gpu_launch.start_machine()
    major, minor = torch.cuda.get_device_capability()
    arch, compiled = f"sm_{major}{minor}", dvm("cuda.build").compiled
    with ThreadPoolExecutor() as pool:
        forms, each_of = dvm("cuda.forms"), dvm("cuda.warps").each_of
        others = forms.ALONE, forms.STACKED, forms.SUMMING
        used = [form for form in forms.FORMS if form not in others]
        kernels = [(each, one) for one in used for each in each_of(one)]
        made = [pool.submit(compiled, arch, each, False, form) for each, form in kernels]
        for one in made:
            one.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=240, help="start nothing after so long")
    parser.add_argument("--quick", action="store_true", help="few new shapes")
    options = parser.parse_args(arguments)
    if reason := dvm_gpu.why_not():
        print(reason, file=sys.stderr)
        return 2
    until = time.monotonic() + options.seconds
    benchmark = Benchmark.start(options)
    compile_kernels()
    with torch.no_grad():
        compile_without_limit()
        dvm_gpu_shapes.part_new_shapes(benchmark, options)
        dvm_gpu_launch.part_launches(benchmark)
        for line in _PLAN:
            left = until - time.monotonic()
            chosen = dvm_gpu.chosen([*shlex.split(line), "--seconds", str(max(left, 0.0))])
            dvm_gpu.part_gpu(benchmark, chosen)
            benchmark.write()
            print(f"{until - time.monotonic():.0f} s left after {line}", file=sys.stderr)
    if time.monotonic() < until:
        widths = ["--widths", "1024", "4096", "768", "512", "8192"]
        dvm_gpu_backward.part_backward(benchmark, dvm_gpu_backward.chosen(widths))
    benchmark.finish()
    return int(any("magjit" in row.note for row in benchmark.rows))


if __name__ == "__main__":
    sys.exit(main())
