"""Graphs of tensors on a GPU, as far as that goes without one: their groups and their calls."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from magjit_dvm.cuda import build
from magjit_dvm.cuda.launch import DeviceFused, gpu
from magjit_dvm.fuser import fuse
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program, has_machine
from magjit_dvm.schedule import Schedule
from magjit_dvm.simplify import simplify
from magjit_dvm.vm import DeviceError, NotEncodable, cuda_launch, cuda_load
from tests.dvm.checking import compute, load, output, tensor

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def schedule_of(function: Any, *shapes: tuple[int, ...], devices: Any = "cuda") -> Schedule:
    """What is made of a function of fake tensors."""
    places = [devices] * len(shapes) if isinstance(devices, str) else devices
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(s, device=d) for s, d in zip(shapes, places, strict=True)]
        graph = make_fx(function)(*given)
    graph.graph.eliminate_dead_code()
    simplify(graph.graph)
    return Schedule(graph, fuse(graph.graph))


@without_gpu
def test_groups_on_a_gpu_are_its_own() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x * 2 + y).tanh(), x.double() + 1

    schedule = schedule_of(function, (8, 64), (64,))
    (fused,) = [one for _, one in schedule.programs()]
    assert isinstance(fused, DeviceFused)
    assert "no words for load of f64" in schedule.fusion.reasons.values()
    assert "aten" not in schedule.source and "_to_copy" in schedule.source


@without_gpu
def test_the_bias_of_a_convolution_joins_what_follows() -> None:
    def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> Any:
        y = torch.ops.aten.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        made = torch.ops.aten.cudnn_batch_norm(y, *rest, False, 0.1, 1e-5)[0]
        return ((made + x).relu(),)

    schedule = schedule_of(block, (2, 6, 8, 8), (6, 6, 3, 3), (6,), *[(6,)] * 4)
    convolution = torch.ops.aten.convolution.default
    assert all(node.target is convolution for node in schedule.fusion.reasons)
    (group,) = schedule.fusion.groups
    assert sum(node.target is torch.ops.aten.add.Tensor for node in group.nodes) == 2


@without_gpu
def test_a_bias_stays_where_nothing_follows_or_groups_are_single() -> None:
    def alone(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        return (torch.ops.aten.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),)

    def single(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        y = torch.ops.aten.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 6)
        return (y.relu() * 2,)

    assert not schedule_of(alone, (2, 6, 8, 8), (6, 6, 3, 3), (6,)).fusion.groups
    (group,) = schedule_of(single, (2, 6, 8, 8), (6, 1, 3, 3), (6,)).fusion.groups
    assert [node.target for node in group.nodes] == [
        torch.ops.aten.relu.default,
        torch.ops.aten.mul.Tensor,
    ]


@without_gpu
def test_a_batch_norm_of_cudnn_is_fused() -> None:
    """With what comes before and after: what a GPU's eager mode calls where nothing trains."""

    def function(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        made = torch.ops.aten.cudnn_batch_norm(x * 2, *rest, False, 0.1, 1e-5)[0]
        return ((made + x).relu(),)

    schedule = schedule_of(function, (2, 6, 16, 16), *[(6,)] * 4)
    assert not schedule.fusion.reasons
    assert len(list(schedule.programs())) == 1


@without_gpu
def test_a_batch_norm_of_cudnn_that_trains_is_its_own() -> None:
    aten, graph = torch.ops.aten, torch.fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "weight", "bias", "mean", "var")]
    made = graph.call_function(aten.cudnn_batch_norm.default, (*given, True, 0.1, 1e-5))
    graph.output((graph.call_function(operator.getitem, (made, 0)),))
    with FakeTensorMode():
        image, channels, none = (torch.empty(s, device="cuda") for s in ((2, 6, 4, 4), 6, 0))
    for node, value in zip(graph.nodes, [image, *[channels] * 4], strict=False):
        node.meta["val"] = value
    made.meta["val"] = (image, channels, channels, none)
    next(iter(made.users)).meta["val"] = image
    assert fuse(graph).reasons[made] == "batch norm in training"


@without_gpu
def test_a_group_has_one_device() -> None:
    schedule = schedule_of(lambda x, y: ((x * y + 1).relu(),), (8,), (), devices=("cuda", "cpu"))
    assert "tensors on several devices" in schedule.fusion.reasons.values()
    (fused,) = [one for _, one in schedule.programs()]
    assert isinstance(fused, DeviceFused)  # the sum


@without_gpu
def test_groups_on_a_gpu_are_stacked() -> None:
    schedule = schedule_of(lambda x, y: (x.sin() + 1, y.sum(-1)), (8,), (9, 9))
    assert "run_stacked(stack_" in schedule.source
    assert len(list(schedule.programs())) == 2


@without_gpu
def test_small_groups_on_a_gpu_that_depend_on_one_another_are_stacked() -> None:
    def sums(x: torch.Tensor) -> Any:
        total = x.relu().sum(-1)
        return total, (total * 2 + 1).sum(-1)

    schedule = schedule_of(sums, (8, 9, 10))
    assert len(list(schedule.programs())) == 2
    assert "run_stacked(stack_1_2, v_x_1, 1)" in schedule.source, "the second result of the first"
    schedule = schedule_of(sums, (80, 90, 100))  # more than a block's
    assert "run_stacked" not in schedule.source and len(list(schedule.programs())) == 2


@without_gpu
def test_an_operator_alone_is_atens() -> None:
    schedule = schedule_of(lambda x: (x.sin(),), (8,))
    assert "alone: ATen has a kernel for it" in schedule.fusion.reasons.values()
    assert not list(schedule.programs())


@without_gpu
def test_operators_alone_go_with_others() -> None:
    schedule = schedule_of(lambda x, y: (x.sin(), y.sum(-1)), (8,), (9, 9))
    assert not schedule.fusion.reasons and "run_stacked(stack_" in schedule.source

    def experts(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        return [(x @ weight).relu() @ weight.t() for weight in weights]

    schedule = schedule_of(experts, (5, 8), *[(8, 16)] * 4)
    assert schedule.source.count("run_stacked(stack_") == 1
    assert "relu_default" not in schedule.source
    assert not any("alone" in one for one in schedule.fusion.reasons.values())


@without_gpu
def test_an_operator_alone_that_computes_much_stays_atens() -> None:
    schedule = schedule_of(lambda x, y: (torch.lerp(x, x, x), y.sum(-1)), (8,), (9, 9))
    assert "alone: ATen has a kernel for it" in schedule.fusion.reasons.values()
    assert "run_stacked" not in schedule.source and "lerp" in schedule.source


def alone(function: Any, *given: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]) -> bool:
    """Whether a function of tensors of these sizes, strides and dtypes is left to ATen."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty_strided(*one[:2], dtype=one[2], device="cuda") for one in given]
        graph = make_fx(lambda *ones: (function(*ones),))(*tensors)
    schedule = Schedule(graph, fuse(graph.graph))
    is_atens = "alone: ATen has a kernel for it" in schedule.fusion.reasons.values()
    assert is_atens is (not list(schedule.programs()))
    return is_atens


HALF, FLOAT = torch.float16, torch.float32
WIDE = (4096, 2048), (2048, 1), HALF


@without_gpu
@pytest.mark.parametrize(
    "other",
    [
        ((2048,), (1,), HALF),
        ((1, 2048), (2048, 1), FLOAT),
        ((4096, 1), (1, 1), HALF),
        ((4096, 2048), (0, 1), HALF),
        ((4096, 2048), (1, 4096), HALF),
        ((4096, 2048), (1, 4096), FLOAT),
        ((4096, 2048), (2056, 1), HALF),
    ],
)
def test_what_is_broadcast_transposed_or_elsewhere_is_ours(other: Any) -> None:
    assert not alone(torch.add, WIDE, other)
    assert not alone(torch.add, other, WIDE)


@without_gpu
def test_a_part_of_the_columns_is_ours() -> None:
    part = (4096, 2048), (6144, 1), HALF
    assert not alone(torch.relu, part)
    assert not alone(torch.add, part, part)
    assert not alone(torch.add, part, ((2048,), (1,), HALF))
    assert alone(torch.relu, WIDE) and alone(torch.relu, ((4096, 2048), (6146, 1), HALF))
    heads = (8, 1024, 16, 64), (1024 * 1024, 64, 64 * 1024, 1), HALF
    assert not alone(torch.add, ((8, 1024, 16, 64), (1024 * 1024, 1024, 64, 1), HALF), heads)
    assert alone(torch.sigmoid, heads), "a result lies as its operand does, where that has no gaps"


@without_gpu
@pytest.mark.parametrize("first", [4, 6])
def test_a_part_from_an_element_on(first: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.slice.Tensor(x, 1, first, first + 2048).relu()

    assert alone(function, ((4096, 6144), (6144, 1), HALF)) is (first % 4 != 0)


@without_gpu
@pytest.mark.parametrize(
    ("x", "other"),
    [
        (WIDE, WIDE),
        (WIDE, ((), (), HALF)),  # a number
        (((4096, 2047), (2047, 1), HALF), ((2047,), (1,), HALF)),  # odd rows
        (((512, 2048), (2048, 1), HALF), ((2048,), (1,), HALF)),  # a small result
        (((4100, 2048), (2048, 1), HALF), ((4100, 2048), (1, 4100), HALF)),  # no squares
        (WIDE, ((4096, 2048), (1, 4099), HALF)),  # columns that are not aligned
        (WIDE, ((4096, 2048), (4096, 2), HALF)),  # every second element
        (WIDE, ((4096, 2048), (2050, 1), HALF)),  # rows with gaps that are not aligned
        (((4096, 1), (1, 1), HALF), ((2048,), (1,), HALF)),  # all are broadcast
    ],
)
def test_what_else_is_alone_is_atens(x: Any, other: Any) -> None:
    assert alone(torch.add, x, other)


@without_gpu
def test_a_mask_of_all_heads_is_ours() -> None:
    scores = (8, 12, 512, 512), (12 * 512 * 512, 512 * 512, 512, 1), HALF
    mask = (8, 1, 512, 512), (512 * 512, 512 * 512, 512, 1), torch.bool
    number = (), (), HALF
    assert not alone(torch.where, mask, scores, number)


@without_gpu
@pytest.mark.parametrize("hint", [4096, 4097, 1000])
@pytest.mark.parametrize("dynamic", [0, 1])
def test_symbolic_sizes(dynamic: int, hint: int) -> None:
    """The example's decide, of which nothing is assumed."""
    env = ShapeEnv()
    symbol = env.create_symbol(hint, ConstantSource("n"), dynamic_dim=DimDynamic.DYNAMIC)
    n = env.create_symintnode(symbol, hint=hint)
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True):
        sizes = [n, 2048] if dynamic == 0 else [2048, n]
        given = [torch.empty(sizes, device="cuda"), torch.empty(sizes[1], device="cuda")]
        graph = make_fx(lambda x, y: (x + y,))(*given)
        before = len(env.guards)
        schedule = Schedule(graph, fuse(graph.graph))
    is_atens = "alone: ATen has a kernel for it" in schedule.fusion.reasons.values()
    small, odd = hint * 2048 * 4 < 8 << 20, dynamic == 1 and hint % 4 != 0
    assert is_atens is (small or odd) and len(env.guards) == before


@without_gpu
@pytest.mark.parametrize(("asked", "has"), [("", False), ("0", False), ("1", True)])
def test_a_gpu_has_a_machine(asked: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGJIT_DVM_CUDA", asked)
    assert has_machine(torch.device("cuda", 0)) is has


@pytest.mark.parametrize(
    ("capability", "compilers", "usable"),
    [((7, 5), ["nvrtc 13.0"], False), ((9, 0), [], False), ((9, 0), ["nvrtc 13.0"], True)],
)
def test_which_gpus_are_used(
    capability: tuple[int, int],
    compilers: list[str],
    usable: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(build, "compilers", lambda: compilers)
    assert build.usable.__wrapped__(0) is usable
    assert usable is ("leaves GPU 0 to ATen" not in caplog.text)


@without_gpu
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(DeviceError, match="run on the CPU instead"):
        gpu(0)
    with pytest.raises(DeviceError):
        cuda_load(0, b"", "none", 0, False)
    with pytest.raises(DeviceError):
        cuda_launch(0, 1, 32, 0, 0, bytes(400), b"", (), 0, 0)


def test_what_is_on_the_cpu_goes_elsewhere() -> None:
    F32 = DType.F32
    nodes = (load(0, F32), compute("neg", F32, 0))
    program = Program(1, (tensor(F32, 0),), nodes, (output(1, 0),))
    with pytest.raises(NotEncodable, match="not a plain tensor on a GPU"):
        DeviceFused(program)(torch.ones(3))
    assert DeviceFused(program, torch.neg)(torch.ones(3)).tolist() == [-1.0] * 3
