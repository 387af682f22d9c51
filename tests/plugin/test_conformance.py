"""The suite passes for right backends and catches wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from magjit.plugin import conformance
from magjit.plugin.aot import aot
from magjit_inductor import backend as inductor

test_eager = conformance.pytest_suite("eager")
test_aot_eager = conformance.pytest_suite("aot_eager")
test_inductor = conformance.pytest_suite(inductor)


class Wrong:
    """Right but for one thing."""

    def __init__(self, fault: str) -> None:
        self.name = f"wrong: {fault}"
        self.fault = fault

    def supports(self, gm: torch.fx.GraphModule) -> list[str]:
        return ["views are beyond it"] if self.fault == "refuse" and "view" in gm.code else []

    def compile(self, gm, example_inputs, context):
        if self.fault == "draw":
            torch.rand(1)
        if self.fault == "aot":
            return aot(gm, example_inputs, context, forward=lambda gm, inputs: gm.forward)

        def call(*inputs: Any) -> Sequence[Any]:
            return getattr(self, f"_{self.fault}")(gm, inputs)

        return call

    def _value(self, gm, inputs):
        return tuple(
            out + 1e-2 if isinstance(out, torch.Tensor) and out.is_floating_point() else out
            for out in gm(*inputs)
        )

    def _copy_inputs(self, gm, inputs):
        return gm(*[one.clone() if isinstance(one, torch.Tensor) else one for one in inputs])

    def _detach(self, gm, inputs):
        return tuple(out.detach() if isinstance(out, torch.Tensor) else out for out in gm(*inputs))

    def _copy_outputs(self, gm, inputs):
        return tuple(out.clone() if isinstance(out, torch.Tensor) else out for out in gm(*inputs))

    def _bare(self, gm, inputs):
        outputs = gm(*inputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _order(self, gm, inputs):
        return tuple(reversed(gm(*inputs)))

    def _dtype(self, gm, inputs):
        return tuple(
            out.double() if isinstance(out, torch.Tensor) and out.dtype is torch.float32 else out
            for out in gm(*inputs)
        )

    def _freeze(self, gm, inputs):
        if not hasattr(self, "kept"):
            self.kept = {}
        if id(gm) not in self.kept:
            self.kept[id(gm)] = (gm, gm(*inputs))
        return self.kept[id(gm)][1]


@pytest.mark.parametrize(
    "fault",
    ["value", "copy_inputs", "detach", "copy_outputs", "bare", "order", "dtype", "freeze"],
)
def test_faults_are_found(fault: str) -> None:
    report = conformance.run(Wrong(fault))
    assert report.failures, report
    with pytest.raises(conformance.ConformanceError):
        report.raise_for_failures()


def test_refusals_are_no_failures() -> None:
    report = conformance.run(Wrong("aot"))
    assert not report.failures, str(report)
    cases = [case for case in conformance.CASES if case.name in ("views", "pointwise")]
    wrong = Wrong("refuse")
    wrong._refuse = lambda gm, inputs: gm(*inputs)
    report = conformance.run(wrong, cases=cases)
    assert [row.outcome.value for row in report.rows] == ["passed", "refused"]
    assert "views are beyond it" in str(report)


def test_case_names_are_unique() -> None:
    names = [case.name for case in conformance.CASES]
    assert len(set(names)) == len(names) >= 30
