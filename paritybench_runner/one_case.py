"""One case by itself, step by step, with the report of its capture."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

import magjit
from paritybench_runner import shims
from paritybench_runner.compilers import COMPILERS
from paritybench_runner.corpus import Case, CorpusError, LoadError, folder_of, load
from paritybench_runner.protocol import CompilerRun, run_eagerly
from paritybench_runner.trial import Move, Trial
from paritybench_runner.worker import Settings


def find(corpus: str, name: str) -> Case:
    """The case `file:index` of a corpus.

    Raises:
        CorpusError: there is no such case.
    """
    file, _, index = name.rpartition(":")
    path = folder_of(corpus) / f"{Path(file).stem}.py"
    if not path.is_file() or not index.isdigit():
        raise CorpusError(f"no case {name!r}; write it as test_name.py:0")
    try:
        cases = load(path)
    except LoadError as error:
        raise CorpusError(f"{path.name} cannot be imported: {error}") from error
    if int(index) >= len(cases):
        raise CorpusError(f"{path.name} has {len(cases)} cases")
    return cases[int(index)]


def show(corpus: str, name: str, settings: Settings, console: Console) -> int:
    """Run it in this process and print what happened; the exit status tells whether it is whole."""
    torch.set_num_threads(settings.threads)
    warnings.simplefilter("ignore")
    shims.install(folder_of(corpus))
    compilers = [COMPILERS[compiler]() for compiler in settings.compilers]
    for compiler in compilers:
        compiler.warm_up()
    case = find(corpus, name)
    console.print(f"[bold]{case}[/] {case.name} in {folder_of(corpus)}", highlight=False)
    trial = Trial(case, settings.device)
    eager = run_eagerly(trial)
    console.print(f"eager: {eager.status} {escape(eager.reason)}")
    if eager.status != "runs":
        return 1
    console.print(f"static: {not eager.dynamic} {eager.dynamic}")
    console.print(f"deterministic: {eager.deterministic} {escape(eager.difference)}")
    whole = True
    for compiler in compilers:
        run = CompilerRun(trial, compiler, settings.backend, settings.steps, settings.first_step)
        result = run.run()
        compiler.reset()
        whole = whole and result.outcome == "whole"
        console.print(f"[bold]{compiler.name}: {result.outcome}[/] {escape(result.reason)}")
        console.print(f"  {escape(result.location)}" if result.location else "", end="")
        for step, told in result.steps.items():
            console.print(f"  step {step}: {escape(told)}")
    if "magjit" in settings.compilers:
        _explain(trial, settings, console)
    return int(not whole)


def _explain(trial: Trial, settings: Settings, console: Console) -> None:
    module = trial.build()
    args, kwargs = trial.inputs(Move())
    explained = magjit.explain(module, backend=settings.backend)
    console.print(explained(*args, **kwargs))
