"""Arguments of the command line, exit statuses and how errors are shown."""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from magjit.cli import commands
from magjit.errors import MagJITError

STATUSES = """exit status:
  0    all is well
  1    explain: the program is not one graph; annotations missing: some are;
       env: something that MagJIT needs is not there
  2    an error: wrong arguments, or the program failed
  130  interrupted"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``run`` to the function that does it."""
    parser = argparse.ArgumentParser(
        prog="magjit",
        description="Look at what MagJIT makes of a PyTorch program.",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the log, and tracebacks of errors"
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_explain(subparsers)
    _add_annotations(subparsers)
    backends = subparsers.add_parser("backends", help="list the names that backend= takes")
    backends.add_argument("--all", action="store_true", help="torch's debugging backends, too")
    backends.set_defaults(run=commands.backends)
    env = subparsers.add_parser("env", help="versions, machine, and whether they are supported")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=commands.env)
    return parser


_EXPLAIN = """Run a program once under observation and report what MagJIT makes of it: graphs,
operators, guards, side effects, splits with their place and a way out, and the time it took."""
_EXPLAIN_EXAMPLES = """TARGET is MODULE:NAME or FILE.py:NAME. NAME is
  - a function without arguments that returns (model, args), (model, args, kwargs) or a model;
  - a class of models that is made without arguments;
  - a model, or any function of tensors (both with --shape).

examples:
  magjit explain mypackage.models:make_resnet
  magjit explain model.py:Net --shape 1,3,224,224 --html report.html
  magjit explain model.py:Net --shape 8,128 --dtype int64 --backend inductor --dump folder"""


def _add_explain(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="run a program once and report what was captured",
        description=_EXPLAIN,
        epilog=_EXPLAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="what to run")
    parser.add_argument("--backend", default="eager", help="backend to compile with (eager)")
    parser.add_argument("--mode", default=None, help="its mode, as magjit.compile takes it")
    inputs = parser.add_argument_group("arguments of the call, when the target gives none")
    inputs.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="N,N,...",
        help="shape of a random tensor; once for each argument",
    )
    inputs.add_argument(
        "--dtype",
        action="append",
        default=[],
        help="its dtype (float32); once for all tensors or once for each",
    )
    inputs.add_argument("--device", default=None, help="move the model and the tensors there")
    mode = parser.add_argument_group("how it is run")
    mode.add_argument("--eval", action="store_true", help="put the model in evaluation mode")
    mode.add_argument("--no-grad", action="store_true", help="run it without gradients")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of text")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    output.add_argument(
        "--dump", type=Path, metavar="DIR", help="write source, bytecode, guards, mock and graphs"
    )
    parser.set_defaults(run=commands.explain)


def _add_annotations(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "annotations", help="find callables without an annotation; check annotation files"
    )
    inner = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    missing = inner.add_parser(
        "missing",
        help="run a script and print YAML for the C callables that lack an annotation",
        description="Run a script that calls magjit.compile, and print YAML for the C callables "
        "that its compiled programs called and that have no annotation. What the script prints "
        "goes to standard error. Programs that meet such a callable are observed at every call "
        "and never replayed meanwhile, so the script runs more slowly.",
    )
    missing.add_argument("--output", type=Path, metavar="FILE", help="write the YAML to FILE")
    missing.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file")
    missing.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARG", help="arguments of the script"
    )
    missing.set_defaults(run=commands.annotations_missing)
    check = inner.add_parser("check", help="check annotation files")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE", help="YAML file or folder")
    check.add_argument(
        "--strict", action="store_true", help="import the modules; every name must exist"
    )
    check.set_defaults(run=commands.annotations_check)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors are shown without a traceback."""
    options = build_parser().parse_args(arguments)
    with _logging(options.verbose):
        try:
            status: int = options.run(options)
        except MagJITError as error:
            if options.verbose:
                traceback.print_exc()
            sys.stderr.write(f"magjit: {type(error).__name__}: {error}\n")
            return 2
        except KeyboardInterrupt:
            sys.stderr.write("magjit: interrupted\n")
            return 130
    return status


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Show MagJIT's log on standard error; without ``verbose`` the reports say it all."""
    log = logging.getLogger("magjit")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if verbose else logging.ERROR)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
