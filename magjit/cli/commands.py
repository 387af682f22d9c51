"""What each command does; torch is imported only by those that need it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from magjit.errors import ArgumentError


def explain(options: argparse.Namespace) -> int:
    """``magjit explain``: 0 when the program is one graph, 1 when it is not."""
    import torch

    from magjit.cli.targets import load_target, running
    from magjit.reporting.explaining import explain as explain_model

    # With --json, what the program itself prints must not get in between.
    quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    with quiet:
        with running(options.target):
            target = load_target(options.target, options.shape, options.dtype, options.device)
        if options.eval and isinstance(target.model, torch.nn.Module):
            target.model.eval()
        capture = explain_model(
            target.model, backend=options.backend, mode=options.mode, dump=options.dump
        )
        with running(options.target), torch.set_grad_enabled(not options.no_grad):
            report = capture(*target.args, **target.kwargs)
    if options.html is not None:
        _write(options.html, report.to_html())
    if options.json:
        print(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(report)
    else:
        print(report)
    return 0 if report.whole else 1


def annotations_missing(options: argparse.Namespace) -> int:
    """``magjit annotations missing``: 1 when some are missing."""
    from magjit.cli.survey import survey
    from magjit.cli.targets import ProgramError, run_script
    from magjit.reporting.dump import merged_yaml

    failure = None
    with contextlib.redirect_stdout(sys.stderr), survey() as found:
        try:
            run_script(options.script, options.arguments)
        except ProgramError as error:
            failure = error
    text = merged_yaml(found) if found else "# no C callable without an annotation was met\n"
    if options.output is not None:
        _write(options.output, text)
    elif found or failure is None:
        sys.stdout.write(text)
    if failure is not None:
        raise failure
    return 1 if found else 0


def annotations_check(options: argparse.Namespace) -> int:
    """``magjit annotations check``: reads each file into a database of its own."""
    from magjit.annotations import Database

    for path in options.files:
        count = Database().load(path, strict=options.strict)
        print(f"{path}: {count} {'entry is' if count == 1 else 'entries are'} well formed")
    return 0


def backends(options: argparse.Namespace) -> int:
    """``magjit backends``: names, and where each comes from."""
    from importlib.metadata import entry_points

    from magjit.plugin import list_backends
    from magjit.plugin.registry import ENTRY_POINT_GROUP, EagerBackend

    origins = {EagerBackend.name: "magjit"}
    origins |= {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    names = list_backends(include_torch_debug=options.all)
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {origins.get(name, 'torch')}")
    return 0


def env(options: argparse.Namespace) -> int:
    """``magjit env``: 1 when something that is needed is not there."""
    from magjit.reporting import environment

    support = environment.support()
    content: dict[str, Any] = {
        "versions": environment.versions(),
        "machine": environment.machine(),
        "support": {name: {"ok": ok, "text": text} for name, (ok, text) in support.items()},
    }
    if options.json:
        print(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        for section in ("versions", "machine"):
            print(section)
            for name, value in content[section].items():
                print(f"  {name:<13} {value}")
        print("supported")
        for name, (ok, text) in support.items():
            print(f"  {name:<13} {'yes' if ok else 'NO'}: {text}")
    return 0 if all(ok for ok, _ in support.values()) else 1


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"Cannot write {path}: {error.strerror}") from error
    sys.stderr.write(f"written to {path}\n")
