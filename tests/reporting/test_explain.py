"""`magjit.explain`: what a report says of real captures."""

from __future__ import annotations

import io
import json
import warnings

import pytest
import torch
from rich.console import Console

import magjit
from magjit.errors import ArgumentError, BackendOptionError, UnknownBackendError
from magjit.reporting.explaining import explain
from magjit.reporting.report import Report

from . import programs


@pytest.fixture(scope="module")
def counting() -> Report:
    torch.manual_seed(0)
    return explain(programs.Counting())(torch.ones(2, 4))


def refuse(gm, example_inputs):
    raise ValueError("not today")


def test_the_public_name_is_the_function() -> None:
    assert magjit.explain is explain


def test_a_whole_program(counting: Report) -> None:
    assert counting.whole
    assert len(counting.graphs) == 1
    assert counting.record_count == 1
    assert counting.splits == []
    assert counting.verdict == f"one graph of {len(counting.operators)} operators"


def test_the_result_is_the_runs_own() -> None:
    torch.manual_seed(0)
    model, x = programs.Counting(), torch.ones(2, 4)
    report = explain(model)(x, scale=3.0)
    assert report.result["calls"] == model.calls == 1
    assert model.log[0] is x
    torch.manual_seed(0)
    assert torch.equal(report.result["y"], programs.Counting()(x, scale=3.0)["y"])


def test_operators_have_names_and_lines(counting: Report) -> None:
    texts = counting.operators
    assert any("linear(%0, " in text for text in texts), texts
    assert any(text.startswith("%") and "Tensor.mul(" in text for text in texts), texts
    for text in texts:
        file, _, rest = text.rpartition("  # ")[2].partition(":")
        assert file.endswith(".py") and rest.split()[0].isdigit(), text
    assert counting.inputs[0] == "%0 = args[0]: Tensor float32 (2, 4)"
    assert any(
        line.endswith("= model.linear.weight: Parameter float32 (4, 4) requires_grad")
        for line in counting.inputs
    )


def test_guards_are_counted_by_kind_and_can_be_read(counting: Report) -> None:
    assert counting.guards["Tensor"] == len(counting.inputs)
    assert counting.guards.total() == len(counting.guard_lines)
    assert "Root" not in counting.guards  # the same object at every call is not checked
    assert "    model.calls is any int" in counting.guard_text.splitlines()
    assert "    args[0]: Tensor float32 (2, 4)" in counting.guard_text.splitlines()


def test_side_effects_read_like_the_program(counting: Report) -> None:
    effects = counting.side_effects
    module = programs.__name__
    assert "model.calls = model.calls + 1" in effects
    assert any(e.startswith(f"{module}.TOTAL = ") for e in effects), effects
    assert any(e.startswith(f"{module}.TALLY['calls'] = ") for e in effects), effects
    assert any(e.startswith("model.log.") and "args[0]" in e for e in effects), effects
    assert any("changes model.norm.running_mean" in e for e in effects), effects


def test_timings_have_their_four_parts(counting: Report) -> None:
    assert list(counting.timings) == ["run_ms", "record_ms", "build_ms", "backend_ms"]
    assert counting.timings["run_ms"] > 0
    assert counting.timings["build_ms"] > 0


def test_a_split_is_reported_not_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = explain(programs.decides)(torch.ones(3))
    assert torch.equal(report.result, 2 * torch.ones(3))
    assert not report.whole and len(report.graphs) == report.record_count == 2
    assert report.verdict == "2 regions, cut at 1 place"
    (split,) = report.cuts
    assert split.file is not None and split.file.endswith("programs.py")
    first = programs.decides.__code__.co_firstlineno
    assert split.line == first + 2
    assert split.function == "decides"
    assert split.reason and split.remedy
    assert "decides" in str(report) and split.reason in str(report)


def test_missing_annotations_come_as_yaml() -> None:
    report = explain(programs.meets_two_unknown)(torch.ones(2))
    assert list(report.missing) == ["resource.getpagesize", "resource.getrusage"]
    assert "  resource.getpagesize:\n" in report.missing["resource.getpagesize"]


def test_what_the_program_raises_passes_through() -> None:
    with pytest.raises(KeyError, match="no such thing"):
        explain(programs.raises)(torch.ones(2))


def test_a_failing_backend_is_a_reason_and_the_graph_is_there() -> None:
    report = explain(programs.doubles, backend=refuse)(torch.ones(2))
    assert torch.equal(report.result, 2 * torch.ones(2))
    assert len(report.graphs) == 1 and not report.whole and report.record_count == 0
    assert report.splits[0].reason == "Backend 'refuse' failed: ValueError: not today"


class Picky:
    """A backend that takes no graph."""

    name = "picky"

    def supports(self, gm):
        return ["I take none"]

    def compile(self, gm, example_inputs, context):
        raise AssertionError


def test_a_refusing_backend_is_a_reason() -> None:
    report = explain(programs.doubles, backend=Picky())(torch.ones(2))
    assert "I take none" in report.splits[0].reason
    assert len(report.graphs) == 1


class Told:
    """A backend that notes what it is told."""

    name = "told"

    def __init__(self) -> None:
        self.told: list[object] = []

    def configure(self, mode, options, dynamic):
        self.told.append((mode, options, dynamic))
        return self

    def supports(self, gm):
        return []

    def compile(self, gm, example_inputs, context):
        self.told.append((context.mode, context.options, context.dynamic))
        return gm.forward


def test_settings_reach_the_backend() -> None:
    told = Told()
    settings = {"mode": "quick", "options": {"depth": 2}, "dynamic": True}
    assert explain(programs.doubles, backend=told, **settings)(torch.ones(2)).whole
    assert told.told == [("quick", {"depth": 2}, True)] * 2


def test_bad_arguments_are_typed_errors() -> None:
    with pytest.raises(BackendOptionError):
        explain(programs.doubles, backend="triton", mode="quick")
    with pytest.raises(UnknownBackendError):
        explain(programs.doubles, backend="indutcor")
    with pytest.raises(ArgumentError):
        explain(3)


def test_records_of_other_compiled_objects_stay() -> None:
    model = programs.Block(4)
    compiled = magjit.compile(model, backend="eager")
    x = torch.ones(2, 4)
    compiled(x)
    report = explain(compiled)(x)
    assert report.whole
    compiled(x)
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.replays, stats.records) == (1, 1, 1)


def test_each_call_is_a_capture_of_its_own() -> None:
    run = explain(programs.doubles)
    first, second = run(torch.ones(2)), run(torch.ones(3))
    assert first.whole and second.whole
    assert (first.record_count, second.record_count) == (1, 1)
    assert second.inputs == ["%0 = args[0]: Tensor float32 (3,)"]


def test_another_tracer_at_work_is_said() -> None:
    reports = []

    def inner(x):
        reports.append(explain(programs.doubles)(x))
        return x

    torch.vmap(inner)(torch.ones(2, 3))
    (split,) = reports[0].splits
    assert "another tracer" in split.reason and split.remedy


JSON_KEYS = [
    "schema",
    "name",
    "backend",
    "whole",
    "verdict",
    "record_count",
    "graphs",
    "inputs",
    "operators",
    "guards",
    "side_effects",
    "cuts",
    "splits",
    "missing",
    "movement",
    "timings",
    "objects",
    "notes",
    "versions",
    "machine",
]


@pytest.mark.parametrize("program", [programs.doubles, programs.decides])
def test_json_has_all_keys_whatever_was_found(program) -> None:
    report = explain(program)(torch.ones(2))
    content = json.loads(json.dumps(report.to_json()))
    assert list(content) == JSON_KEYS
    assert content["whole"] is report.whole
    assert content["versions"]["torch"] == torch.__version__
    assert content["guards"]["total"] == sum(content["guards"]["kinds"].values())
    assert content["operators"][0]["line"] is not None
    for split in content["cuts"] + content["splits"]:
        assert list(split) == ["reason", "file", "line", "function", "remedy"]


def test_rich_shows_it(counting: Report) -> None:
    for report in (counting, explain(programs.decides)(torch.ones(2))):
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(report)
        text = console.export_text()
        assert report.name in text and report.verdict in text
        for split in report.cuts + report.splits:
            assert split.reason.split()[0] in text


def test_text_in_brackets_is_no_markup() -> None:
    """`rich` would take ``[red]`` in an operator or a reason for a colour."""
    report = explain(programs.doubles)(torch.ones(2))
    report.side_effects.append("x['[red]'] = 1")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    assert "x['[red]'] = 1" in console.export_text()


def test_the_report_does_not_keep_the_model() -> None:
    import gc
    import weakref

    model = programs.Block(4)
    gone = weakref.ref(model)
    report = explain(model)(torch.ones(2, 4))
    report.result = None
    del model
    gc.collect()
    assert gone() is None, "the report keeps the model"
    assert report.whole
