"""All kernels that a GPU's calls may ask for, compiled before any call: ``python -m magjit_dvm``.

Calls have kernels compiled when they first need one, and run operator by operator until it is
there.  For what is served from the first call on, such as a container's image, all are made when
that is built: it takes a compiler, but no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from magjit.plugin import BackendError
from magjit.plugin.cache import disk_cache
from magjit_dvm.cuda.build import LEAST, compiled, compilers, kept
from magjit_dvm.cuda.channel_code import CHANNELS, CHANNELS_NAMES
from magjit_dvm.cuda.forms import ALONE, FORMS, SUMMING
from magjit_dvm.cuda.kernels import Kernel
from magjit_dvm.cuda.parts import MOST_EACH, SUMS
from magjit_dvm.cuda.warps import each_of

__all__ = ["Made", "compile_ahead", "kernels_of", "main"]

_WIDE = 90
"""From sm_90 on, there are kernels of R = 64."""


@dataclass(frozen=True, slots=True)
class Made:
    """What has been done for one architecture.

    Attributes:
        arch: ``sm_90`` and so on.
        kernels: that there are.
        compiled: of these, how many were not on disk.
        seconds: that it took.
        directory: where they are kept.
    """

    arch: str
    kernels: int
    compiled: int
    seconds: float
    directory: str


def kernels_of(arch: str, approximate: bool = False) -> list[Kernel]:
    """What calls on a GPU of this architecture may ask for, what takes longest first.

    Args:
        arch: ``sm_90`` and so on.
        approximate: those of ``options={"approximate": True}`` instead.

    Raises:
        BackendError: there is no such architecture, or it is too old.
    """
    known = re.fullmatch(r"sm_(\d{2,3})", arch)
    least = 10 * LEAST[0] + LEAST[1]
    if not known or int(known[1]) < least:
        raise BackendError(
            f"{arch!r} is no architecture that kernels can be compiled for",
            remedy=f"name one from sm_{least} on, such as sm_90",
        )
    widest = 64 if int(known[1]) >= _WIDE else 36
    found = [
        (each, approximate, form)
        for form in FORMS
        for each in each_of(form)
        if each <= (MOST_EACH if form == SUMMING else widest)
    ]
    channels = [(CHANNELS, False, which) for which in range(len(CHANNELS_NAMES))]
    return [*sorted(found, reverse=True), *channels, (SUMS, False, ALONE)]


def compile_ahead(
    arch: str,
    approximate: bool = False,
    jobs: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Made:
    """Compile what is not on disk.

    Args:
        arch, approximate: see ``kernels_of``.
        jobs: compilers at work at once; as many as there are cores by default.
        progress: called with how many kernels are there, and how many there will be.

    Raises:
        BackendError: there is no such architecture, or it is too old; there is no compiler, it
            fails, or the disk cache does not keep kernels.
    """
    begin, wanted = time.perf_counter(), kernels_of(arch, approximate)
    if not compilers():
        raise BackendError(
            "kernels cannot be compiled: there is neither NVRTC nor nvcc",
            remedy="pip install nvidia-cuda-nvrtc, or a torch for CUDA, which brings it",
        )
    missing = [key for key in wanted if kept(arch, *key) is None]
    progress(len(wanted) - len(missing), len(wanted))
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        try:
            coming: set[Future[bytes]] = {pool.submit(compiled, arch, *key) for key in missing}
            while coming:
                done, coming = wait(coming, return_when=FIRST_COMPLETED)
                for one in done:
                    one.result()
                progress(len(wanted) - len(coming), len(wanted))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    folder = disk_cache().directory
    if any(kept(arch, *key) is None for key in missing):
        raise BackendError(
            f"compiled kernels were not kept in {folder}",
            remedy="let MAGJIT_CACHE_DIR name a folder that can be written, of enough room",
        )
    seconds = time.perf_counter() - begin
    return Made(arch, len(wanted), len(missing), round(seconds, 2), str(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 with a typed error's text on standard error; 130 where it was interrupted."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        found = [_made(arch, options, console) for arch in options.arch or _architectures()]
    except BackendError as error:
        if options.json:
            said = {"error": type(error).__name__, "reason": error.reason, "remedy": error.remedy}
            print(json.dumps(said))
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what has been compiled is kept\n")
        return 130
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
        return 0
    for one in found:
        print(
            f"{one.arch}: {one.kernels} kernels in {one.directory}, "
            f"{one.compiled} of them compiled in {one.seconds:.1f} s"
        )
    return 0


def _made(arch: str, options: argparse.Namespace, console: Console) -> Made:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    hidden = options.json or not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=hidden) as bars:
        task = bars.add_task(f"kernels for {arch}")

        def progress(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        return compile_ahead(arch, options.approximate, options.jobs, progress)


def _architectures() -> list[str]:
    """Of the GPUs that torch sees.

    Raises:
        BackendError: there is none.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = {torch.cuda.get_device_capability(index) for index in range(count)}
    if not found:
        raise BackendError(
            "torch sees no NVIDIA GPU to compile kernels for", remedy="name one: --arch sm_90"
        )
    return [f"sm_{major}{minor}" for major, minor in sorted(found)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m magjit_dvm", description="The dvm backend.")
    compiling = parser.add_subparsers(required=True).add_parser(
        "compile", help="compile all kernels for GPUs, and keep them on disk"
    )
    compiling.add_argument(
        "--arch", nargs="+", default=[], metavar="SM", help="such as sm_90; those here by default"
    )
    compiling.add_argument(
        "--approximate", action="store_true", help="those of the option approximate instead"
    )
    compiling.add_argument(
        "--jobs", type=_positive, default=0, help="compilers at work at once; a core's each"
    )
    compiling.add_argument("--json", action="store_true", help="what was done, for programs")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("is 1 at least")
    return number
