"""`magjit.explain`: one capture, and everything that it found out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from magjit.api import compile as compile_model
from magjit.api import controller_of
from magjit.dispatch import Controller, MagJITWarning
from magjit.errors import MagJITError
from magjit.plugin import Backend, BackendContext, CompiledGraph, ExampleInputs, resolve
from magjit.records import SplitPoint
from magjit.reporting import dump as dumping
from magjit.reporting.collect import collect, split_of
from magjit.reporting.content import Split
from magjit.reporting.report import Report


def explain(
    model: Any,
    *,
    backend: str | Backend | Callable[..., Any] = "eager",
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dump: str | Path | None = None,
) -> Callable[..., Report]:
    """Say what a capture of one call finds: ``magjit.explain(model)(*args)``.

    The call runs the program once, for real. Records of other compiled objects, also of the same
    model, stay as they are.

    Args:
        model: as `magjit.compile` takes it; of a compiled object, the original. Where none of the
            compiled object's records serves the call, the report's notes say for each what it
            compares, as it was and as it is.
        backend: as `magjit.compile` takes it; one that fails is named as a reason in the report.
        dynamic, mode, options: as `magjit.compile` takes them.
        dump: a folder for readable files: source, bytecode, guards, mock, graphs.

    Returns:
        A function that takes the call's arguments and returns a `Report`. It raises only what the
        program raises: a split is part of the report.

    Raises:
        ArgumentError: ``model`` cannot be compiled, or ``dump`` is no folder.
        UnknownBackendError: no backend has this name.
        BackendOptionError: ``mode`` or ``options`` are not what the backend takes.
    """
    tried = _Tried(resolve(backend, mode=mode, options=options, dynamic=dynamic))
    compiled = compile_model(model, backend=tried, dynamic=dynamic, mode=mode, options=options)
    given = controller_of(model)
    folder = None if dump is None else dumping.prepare(dump)

    def run(*args: Any, **kwargs: Any) -> Report:
        missed = [] if given is None else given.failing_guards(args, kwargs)
        report = _explain(compiled, tried, args, kwargs)
        if given is not None and given.records and len(missed) == len(given.records):
            report.notes += [f"a record misses this call for {miss}" for miss in missed]
        if given is not None:
            report.notes += given.streamed_parts()
        if folder is not None:
            report.dump(folder)
        return report

    return run


def _explain(compiled: Any, tried: _Tried, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
    controller = controller_of(compiled)
    assert controller is not None
    controller.reset()
    controller.keep_last = True
    tried.forget()
    report = Report(name=controller.name, backend=tried.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MagJITWarning)
        report.result = compiled(*args, **kwargs)
    for captured in controller.parts:
        collect(captured, report)
    if not controller.parts:
        _explain_nothing(controller, report)
    report.cuts += [
        split_of(SplitPoint(point.reason, point.location, point.remedy))
        for point in controller.program.points.values()
    ]
    if tried.failure is not None:
        report.splits.append(tried.failure)
    report.record_count = 0 if report.splits else controller.stats.records
    controller.reset()
    return report


def _explain_nothing(controller: Controller, report: Report) -> None:
    """There was no capture, or it has been thrown away."""
    if controller.eager_reason is not None:
        report.splits.append(Split(controller.eager_reason))
        return
    report.splits.append(
        Split(
            "another capture was under way, or another tracer was at work",
            remedy="explain the model outside of torch.compile, vmap and the like, from one thread",
        )
    )


class _Tried:
    """A backend whose failure becomes a part of the report, so that the graph is shown too."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name = backend.name
        self.failure: Split | None = None
        wants = getattr(backend, "example_inputs", ExampleInputs.FAKE)
        self.example_inputs: ExampleInputs = wants
        self.changes_graph: bool = getattr(backend, "changes_graph", True)
        self.exact_random: bool = getattr(backend, "exact_random", False)
        self.sizes_of_data: bool = getattr(backend, "sizes_of_data", False)

    def configure(
        self, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
    ) -> _Tried:
        """Itself: the backend in it has its settings."""
        return self

    def forget(self) -> None:
        self.failure = None

    def supports(self, gm: GraphModule) -> list[str]:
        """All graphs: a refusal is reported."""
        reasons = self._backend.supports(gm)
        if reasons:
            text = f"Backend {self.name!r} does not take this graph: {'; '.join(reasons)}"
            self.failure = Split(text, remedy="choose another backend")
        return []

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        """What the backend gives, or the graph itself where it fails: it is not called."""
        if self.failure is None:
            try:
                return self._backend.compile(gm, example_inputs, context)
            except MagJITError as error:
                self.failure = Split(error.reason, remedy=error.remedy)
            except Exception as error:
                text = f"Backend {self.name!r} failed: {type(error).__name__}: {error}"
                self.failure = Split(
                    text, remedy="backend='eager' runs the captured graph as it is"
                )
        forward: CompiledGraph = gm.forward
        return forward
