"""The commands: run, report, compare, case, reasons, merge."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from paritybench_runner.compilers import COMPILERS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace, Console], int] = options.command
    from paritybench_runner.corpus import CorpusError
    from paritybench_runner.store import StoreError

    try:
        return command(options, Console(soft_wrap=True))
    except (CorpusError, StoreError) as error:
        print(f"paritybench_runner: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paritybench_runner",
        description="How many real programs a compiler takes whole.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    from paritybench_runner import commands as own

    run = commands.add_parser("run", help="run the cases of a corpus, or go on with it")
    run.set_defaults(command=own.run)
    _add_corpus(run)
    run.add_argument("--out", required=True, metavar="DIR", help="where the results go")
    run.add_argument("--sample", type=int, metavar="N", help="only so many files, chosen by --seed")
    run.add_argument("--seed", type=int, default=0, metavar="S")
    run.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N", help="the I-th of N parts"
    )
    run.add_argument("--jobs", type=int, default=1, metavar="J", help="files at a time")
    run.add_argument(
        "--dynamic-of", metavar="DIR", help="only the cases that are dynamic in these results"
    )

    report = commands.add_parser("report", help="print the figures and write them as pages")
    report.set_defaults(command=own.report)
    report.add_argument("folder", metavar="DIR")
    report.add_argument("--to", metavar="DIR", help="where the pages go; beside the results")

    compare = commands.add_parser("compare", help="what one run gained and lost over another")
    compare.set_defaults(command=own.compare)
    compare.add_argument("before", metavar="A", help="a folder of results, or a report's JSON")
    compare.add_argument("after", metavar="B")
    compare.add_argument("--compiler", default="magjit")
    compare.add_argument(
        "--fail-on-loss", action="store_true", help="exit with 1 when a whole case no longer is"
    )

    case = commands.add_parser("case", help="run one case and explain it")
    case.set_defaults(command=own.case)
    _add_corpus(case)
    case.add_argument("case", metavar="FILE:INDEX")

    reasons = commands.add_parser("reasons", help="failures by cause, each with an example")
    reasons.set_defaults(command=own.reasons)
    reasons.add_argument("folder", metavar="DIR")
    reasons.add_argument("--compiler", default="magjit")
    reasons.add_argument("--static", action="store_true", help="static cases only")
    reasons.add_argument("--top", type=int, default=40)

    merge = commands.add_parser("merge", help="put the parts of a run together")
    merge.set_defaults(command=own.merge)
    merge.add_argument("folder", metavar="DIR", help="where the results go")
    merge.add_argument("parts", nargs="+", metavar="PART")
    return parser


def _add_corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--corpus",
        default="minicorpus",
        metavar="DIR",
        help="a clone of the corpus, a folder of such files, or `minicorpus`, which is our own",
    )
    parser.add_argument(
        "--compilers",
        type=_compilers,
        default=("magjit",),
        metavar="A,B",
        help=f"of {', '.join(COMPILERS)}; or none, to see what runs in eager mode",
    )
    parser.add_argument("--backend", default="eager", help="for those that have backends")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--steps",
        type=_steps,
        default=(2, 6),
        metavar="LAST|FIRST-LAST",
        help="of the protocol, 2 to 6; step 1, eager mode, is always run (default: 6, all)",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="for one call of a program"
    )
    parser.add_argument("--memory", type=float, default=6.0, metavar="GIB", help="for a file")
    parser.add_argument("--threads", type=int, default=1, help="of torch in each process")


def _compilers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    unknown = [name for name in names if name not in COMPILERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no compiler named {unknown[0]!r}")
    return names


def _steps(text: str) -> tuple[int, int]:
    """The first and the last; step 3 goes on with what step 2 has captured."""
    first, _, last = text.rpartition("-")
    if not last.isdigit() or (first and not first.isdigit()):
        raise argparse.ArgumentTypeError("write it as 6 or as 5-6")
    steps = int(first or 2), int(last)
    if steps[0] not in (2, 4, 5, 6) or not steps[0] <= steps[1] <= 6:
        raise argparse.ArgumentTypeError("a run goes from step 2, 4, 5 or 6 to a later one up to 6")
    return steps


def _part(text: str) -> tuple[int, int]:
    which, slash, parts = text.partition("/")
    if not slash or not (which.isdigit() and parts.isdigit()):
        raise argparse.ArgumentTypeError("write it as 1/4")
    return int(which), int(parts)
