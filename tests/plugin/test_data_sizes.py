"""Sizes that depend on data: programs are compiled as far as all sizes are known."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

import magjit
from magjit.plugin.data_sizes import Parts, parted
from magjit.plugin.inputs import InputDescriber
from tests.plugin import sizes_of_data
from tests.plugin.sizes_of_data import FIRST, PROGRAMS, check

POSITIVE = "magjit_tests::positive"


@pytest.fixture(scope="module")
def positive() -> Iterator[Any]:
    """An operator that nobody knows to have results of any size."""
    with torch.library._scoped_library("magjit_tests", "FRAGMENT"):
        operator = torch.library.custom_op(
            POSITIVE, lambda x: x[x > 0].clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        operator.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
        yield torch.ops.magjit_tests.positive


def parts_of(function: Any, *inputs: Any) -> Parts | None:
    describer = InputDescriber()
    gm = symbolic_trace(function)
    output = gm.graph.output_node()
    if not isinstance(output.args[0], tuple):
        output.args = ((output.args[0],),)
    return parted(gm, [describer.describe(one) for one in inputs])


def names(gm: GraphModule | None) -> list[str]:
    assert gm is not None
    return [node.name for node in gm.graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("first", FIRST, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_any_sizes_behind_any_others(program: Any, first: tuple[int, int]) -> None:
    check(program, "dvm", first)


@pytest.mark.parametrize(
    "program",
    [sizes_of_data.two_masks, sizes_of_data.written_behind, sizes_of_data.losses],
    ids=lambda one: one.__name__,
)
def test_torch_inductor(program: Any) -> None:
    check(program, "inductor")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "dvm"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_on_a_gpu(program: Any, backend: str) -> None:
    check(program, backend, device="cuda")


def test_parts() -> None:
    def program(x: Tensor, m: Tensor, k: Tensor) -> Tensor:
        y = (x * 2 + 1).exp()
        taken = y[m > 0]
        return taken + k * 3

    given = torch.randn(8), torch.ones(8), torch.randn(())
    parts = parts_of(program, *given)
    assert parts is not None
    assert names(parts.before) == ["mul", "add", "exp", "gt"]
    assert names(parts.rest) == ["getitem", "mul_1", "add_1"] and parts.reads == (2,)
    assert parts.reason == "the size of what getitem gives depends on data"
    (found,) = parts.joined(parts.before)(*given)
    torch.testing.assert_close(found, program(*given))


def test_parts_meet_in_tensors_alone() -> None:
    def program(x: Tensor, m: Tensor) -> tuple[Any, ...]:
        largest = (x * 2 + 1).exp().max(1)
        at = m.nonzero()
        return largest[0], at + 1

    parts = parts_of(program, torch.randn(4, 4), torch.ones(3))
    assert parts is not None and names(parts.before) == ["mul", "add", "exp"]


def test_views_are_made_and_memory_is_written_behind() -> None:
    def views(x: Tensor, m: Tensor) -> tuple[Any, ...]:
        y = (x * 2 + 1).exp().neg()
        part, other = y[1:], y * 2
        return m.nonzero() + 1, part, other, y

    def writes(x: Tensor, m: Tensor) -> tuple[Any, ...]:
        y = (x * 2 + 1).exp()
        z = y * 3
        found = z[m > 0]
        z.view(2, 2)[0].add_(1)
        return found, z, y

    parts = parts_of(views, torch.randn(4), torch.ones(4))
    assert parts is not None and names(parts.before) == ["mul", "add", "exp", "neg"]
    parts = parts_of(writes, torch.randn(4), torch.ones(4))
    assert parts is not None and names(parts.before) == ["mul", "add", "exp"]


@pytest.mark.parametrize(
    "program",
    [
        lambda x, m: x[m > 0] * 2,
        lambda x, m: (x * 2)[m > 0],
    ],
)
def test_nothing_worth_a_compiler(program: Any) -> None:
    parts = parts_of(program, torch.randn(8), torch.ones(8))
    assert parts is not None and parts.before is None


@pytest.mark.parametrize(
    "program",
    [
        lambda x, i: x[i] * 2,
        lambda x, i: x[i, None, 2:] * 2,
        lambda x, i: torch.where(x > 0, x, 0),
        lambda x, i: x.index_select(0, i),
    ],
)
def test_sizes_that_positions_have_are_known(program: Any) -> None:
    assert parts_of(program, torch.randn(8, 8), torch.tensor([1, 0, 3])) is None


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_modes_are_not_divided(grad_enabled: bool) -> None:
    gm = symbolic_trace(lambda x, m: (x * 2 + 1).exp().sin()[m > 0])
    exp = next(node for node in gm.graph.nodes if node.name == "exp")
    with gm.graph.inserting_after(exp):
        gm.graph.call_function(torch._C._set_grad_enabled, (False,))
    describer = InputDescriber()
    inputs = [describer.describe(torch.ones(4)) for _ in range(2)]
    parts = parted(gm, inputs, grad_enabled=grad_enabled)
    assert parts is not None
    front = ["mul", "add", "exp"]
    if not grad_enabled:
        front += ["_set_grad_enabled", "sin", "gt"]
    assert names(parts.before) == front


def autocast_in_front(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = (x @ w).relu() + 1
    z = y.float() * 2
    return z[x[0] > 0] + 1


def autocast_around(x: Tensor, w: Tensor) -> Tensor:
    z = x.exp() * 2 - 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = (z @ w).relu() + 1
        y = y[x[0] > 0] * 2
    return y.float() + 1


def overlapping_in_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = (x @ w).relu() + 1
        y[1:, ::2] = y[:-1, ::2]
    return y.float() + 1


def without_gradients(x: Tensor, w: Tensor) -> Tensor:
    y = (x * 2).exp() + 1
    with torch.no_grad():
        z = (y @ w)[x[0] > 0] * 2
    return z.sum() + y


@pytest.mark.parametrize("backend", ["dvm", "inductor"])
@pytest.mark.parametrize(
    "program",
    [autocast_in_front, autocast_around, overlapping_in_autocast, without_gradients],
    ids=lambda one: one.__name__,
)
def test_modes_are_left(program: Any, backend: str) -> None:
    """Those in which the fake run has found what it looked for, too."""
    compiled = magjit.compile(program, backend=backend)
    torch.manual_seed(0)
    for _ in range(3):
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        found, wanted = (one(x.clone().requires_grad_(), w) for one in (compiled, program))
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def test_reports_say_where() -> None:
    report = magjit.explain(sizes_of_data.two_masks, backend="dvm")(
        torch.randn(30, requires_grad=True), *[sizes_of_data.mask(4, 10) for _ in range(2)]
    )
    (note,) = [one for one in report.notes if "depends on data" in one]
    assert note.startswith("a part of a graph runs as it is: the size of what")
    assert "sizes_of_data.py" in note and "two_masks" in note


@pytest.mark.parametrize(
    ("program", "gradients", "whole"),
    [
        (sizes_of_data.two_masks, False, True),
        (sizes_of_data.two_masks, True, False),
        (sizes_of_data.added_in_place, False, False),
    ],
)
def test_what_dvm_takes(program: Any, gradients: bool, whole: bool) -> None:
    x = torch.randn(30, requires_grad=gradients)
    masks = [sizes_of_data.mask(4, 10) for _ in range(2)]
    notes = magjit.explain(program, backend="dvm")(x, *masks).notes
    assert any("depends on data" in one for one in notes) != whole
    with torch.no_grad():  # which counts
        notes = magjit.explain(program, backend="dvm")(x, *masks).notes
    assert any("depends on data" in one for one in notes) == (
        program is sizes_of_data.added_in_place
    )


def test_no_exception_of_a_backend_s() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", magjit.MagJITWarning)
        check(sizes_of_data.means, "dvm")


@pytest.mark.parametrize("backend", ["dvm", "aot_eager"])
def test_an_operator_of_one_s_own(positive: Any, backend: str) -> None:
    def program(x: Tensor) -> Tensor:
        return positive(x * 2 + 1).exp() + x[:1]

    given: Sequence[Tensor] = [
        torch.ones(4),
        torch.tensor([-3.0, 2, 1]),
        -torch.ones(3),
        torch.ones(1),
    ]
    compiled = magjit.compile(program, backend=backend)
    for one in given:
        torch.testing.assert_close(compiled(one), program(one))
    x = given[0].clone().requires_grad_()
    notes = magjit.explain(program, backend=backend)(x).notes
    assert any("a graph runs as it is: the size of" in note for note in notes)


def test_within_torch_compile() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        compiled = torch.compile(sizes_of_data.two_masks, backend="magjit_dvm", fullgraph=True)
        for seed, counts in enumerate(sizes_of_data.COUNTS):
            torch.manual_seed(seed)
            given = torch.randn(30), *[sizes_of_data.mask(count, 10) for count in counts]
            wanted = sizes_of_data.outcome(sizes_of_data.two_masks, *given)
            found = sizes_of_data.outcome(compiled, *given)
            if isinstance(wanted, type):
                assert isinstance(found, type)
            elif not isinstance(found, type):  # Dynamo itself takes both sizes to be equal
                torch.testing.assert_close(found, wanted)
    torch._dynamo.reset()
