"""Reductions that ATen does better are refused, by both encoders for the same reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from magjit_dvm.instructions import DType
from magjit_dvm.lowering import decompositions
from magjit_dvm.program import NodeKind, Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.checking import BIG
from tests.dvm_cuda.drawn_programs import BLOCK
from tests.dvm_cuda.test_encoder import softmax
from tests.dvm_cuda.test_look_ups import fusion_of, kinds_of

F32, F16 = DType.F32, DType.F16
fakes = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def filled(*shape: int) -> torch.Tensor:
    """A tensor whose memory nobody touches."""
    count = torch.Size(shape).numel()
    return BLOCK.view(torch.float16)[:count].view(shape)


def weighted() -> Program:
    """What experts answer (batch, expert, width), by a gate's shares (batch, expert), summed."""
    nodes = (
        load(0, F16),
        cast(F32, 0),
        load(1, F16),
        cast(F32, 2),
        compute("mul", F32, 1, 3),
        reduce("sum", F32, 4, 1),
        cast(F16, 5),
    )
    inputs = tensor(F16, 0, 1, 2), tensor(F16, 0, 1)
    return Program(3, inputs, nodes, (output(6, 0, 2),))


@pytest.mark.parametrize("experts", [8, 64])
def test_the_larger_operand_decides_how_rows_lie(experts: int) -> None:
    """A gate's shares lie in the order of what is reduced, the answers do not."""
    given = [filled(4096, experts, 256), filled(4096, experts)]
    assert "along columns" in check_encoders(weighted(), given, BIG)
    small = [filled(8, experts, 16), filled(8, experts)]
    assert check_encoders(weighted(), small, BIG) == "encoded"
    turned = [filled(512, 256, experts).transpose(1, 2), filled(512, experts)]
    expected = "encoded" if experts > 16 else "refused: a reduction of narrow rows"
    assert check_encoders(weighted(), turned, BIG) == expected


@fakes
@pytest.mark.parametrize(
    ("shape", "axis", "fused"),
    [((6, 100), 1, True), ((6, 8192), 1, True), ((6, 8193), 1, False), ((600, 6), 0, False)],
)
def test_running_sums_of_rows_that_fit(shape: tuple[int, int], axis: int, fused: bool) -> None:
    """Others would leave a whole group to ATen."""

    def kept(x: Any) -> Any:
        share = x.softmax(-1)
        return share.masked_fill(share.cumsum(axis) > 0.9, 0)

    fusion = fusion_of(kept, (shape, torch.float32))
    programs = [one.program for one in fusion.groups if one.program]
    has = [NodeKind.SCAN in kinds_of(one) for one in programs]
    assert any(has) == fused and programs


@fakes
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_the_largest_of_int64_is_atens(dtype: torch.dtype) -> None:
    """As a result it has to be held in 32 bits; how many are true is."""

    def found(x: Any, y: Any) -> Any:
        most = x.amax(-1, keepdim=True) if dtype is torch.int64 else x.sum(-1, keepdim=True)
        return y * 2 + most

    fusion = fusion_of(found, ((6, 100), dtype), ((6, 100), torch.float32))
    reduced = [NodeKind.REDUCE in kinds_of(one.program) for one in fusion.groups if one.program]
    assert any(reduced) == (dtype is torch.bool)


@pytest.mark.parametrize(("cols", "verdict"), [(8, "narrow rows"), (16, "narrow rows"), (17, "")])
def test_narrow_rows(cols: int, verdict: str) -> None:
    found = check_encoders(softmax(F16), [filled(100_000, cols)], BIG)
    assert verdict in found if verdict else found == "encoded"
    assert check_encoders(softmax(F16), [filled(1000, cols)], BIG) == "encoded"


aten = torch.ops.aten


def backward_of(name: str, device: str, weights: bool) -> Any:
    """What the lowering makes of a norm's backward, with gradients of weights or without."""
    x = torch.empty(2, 8, 4, device=device)
    channels, groups = torch.empty(8, device=device), torch.empty(2, 2, device=device)
    mask = [True, weights, weights]
    given: dict[str, tuple[Any, ...]] = {
        "native_group_norm_backward": (x, x, groups, groups, channels, 2, 8, 4, 2, mask),
        "native_batch_norm_backward": (
            *(x, x, channels, None, None, channels, channels),
            *(True, 1e-5, mask),
        ),
    }
    operator = getattr(aten, name).default
    with FakeTensorMode(allow_non_fake_inputs=True):
        return decompositions()[operator](*given[name])


@pytest.mark.parametrize("name", ["group", "batch"])
def test_gradients_of_weights_are_one_kernel_of_atens(name: str) -> None:
    """They are sums across rows, for which the GPU's words would need tensors between."""
    operator = f"native_{name}_norm_backward"
    with FakeTensorMode():
        assert backward_of(operator, "cuda", weights=True) is NotImplemented
        assert len(backward_of(operator, "cuda", weights=False)) == 3
        assert len(backward_of(operator, "cpu", weights=True)) == 3
