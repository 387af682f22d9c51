"""Each operator that has a handler runs in a fused group, in bytecode, and agrees with eager."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from magjit_dvm import schedule as scheduling
from magjit_dvm.by_aten import by_aten
from magjit_dvm.drawing import dropout_mask
from magjit_dvm.fuser import fuse
from magjit_dvm.operators import HANDLERS
from magjit_dvm.schedule import Schedule
from magjit_dvm.tables import BINARY, COMPARE, SHIFTS, UNARY
from magjit_dvm.translate import handles

aten = torch.ops.aten
_made = torch.Generator().manual_seed(4)
X, Y, Z = (torch.randn(4, 6, generator=_made) for _ in range(3))
UNIT = torch.rand(4, 6, generator=_made)
MASK = X > 0
INTS = torch.arange(24).reshape(4, 6)
POSITIONS = torch.tensor([[0, 2], [3, 1]])
ROW, PLUS = torch.randn(6, generator=_made), torch.rand(6, generator=_made) + 0.5
CLASSES, PIXELS = torch.tensor([5, -100, 0, 2]), torch.arange(18).reshape(2, 3, 3) % 6
IMAGE, CHANNELS = torch.randn(2, 6, 3, 3, generator=_made), torch.zeros(6)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


CALLS: dict[Any, Call] = {
    aten._log_softmax.default: call(X, 1, False),
    aten._log_softmax_backward_data.default: call(X, Y, 1, torch.float32),
    aten._native_batch_norm_legit_no_training.default: call(
        IMAGE, ROW, PLUS, CHANNELS, PLUS, 0.1, 1e-5
    ),
    aten._softmax.default: call(X, 0, False),
    aten._softmax_backward_data.default: call(X, UNIT, 1, torch.float32),
    aten._to_copy.default: call(X, dtype=torch.float64),
    aten._unsafe_view.default: call(X, [4, 1, 6]),
    aten.add.Scalar: call(X, 2.5),
    aten.add.Tensor: call(X, Y, alpha=2),
    aten.addcdiv.default: call(X, Y, UNIT + 1, value=2),
    aten.addcmul.default: call(X, Y, Z, value=0.5),
    aten.alias.default: call(X),
    aten.all.default: call(MASK),
    aten.all.dim: call(MASK, 1),
    aten.all.dims: call(MASK, [0, 1], True),
    aten.amax.default: call(X, [1]),
    aten.amin.default: call(X, [0], True),
    aten.any.default: call(MASK),
    aten.any.dim: call(MASK, 0, True),
    aten.arange.default: call(7),
    aten.arange.start: call(2, 9, dtype=torch.float32),
    aten.arange.start_step: call(9, 2, -3),
    aten.cat.default: call([X, Y, X], 1),
    aten.full.default: call([4, 1, 6], 2.5),
    aten.full_like.default: call(X, 3),
    aten.new_full.default: call(X, [2, 3], 1.5),
    aten.new_ones.default: call(X, [5]),
    aten.new_zeros.default: call(INTS, [2, 3]),
    aten.ones.default: call([3, 4], dtype=torch.bool),
    aten.ones_like.default: call(X, dtype=torch.int32),
    aten.stack.default: call([X, Y], -1),
    aten.zeros.default: call([40, 50]),
    aten.zeros_like.default: call(X),
    aten.any.dims: call(MASK, [0]),
    aten.argmax.default: call(X, 1),
    aten.argmin.default: call(X),
    aten.clamp.Tensor: call(X, Y, Y + 1),
    aten.clamp.default: call(X, -0.5, 0.5),
    aten.clamp_max.Tensor: call(X, Y),
    aten.clamp_max.default: call(X, 0.25),
    aten.clamp_min.Tensor: call(X, Y),
    aten.clamp_min.default: call(X, 0.25),
    aten.clone.default: call(X),
    aten.copy.default: call(X, Y),
    aten.fill.Scalar: call(X, 2.5),
    aten.fill.Tensor: call(X, torch.tensor(-2.5)),
    aten.count_nonzero.default: call(X),
    aten.count_nonzero.dim_IntList: call(INTS, [0]),
    aten.cumprod.default: call(X, 1),
    aten.cumsum.default: call(INTS, 0),
    aten.detach.default: call(X),
    aten.div.Scalar: call(X, 3.0),
    aten.div.Scalar_mode: call(X, 0.3, rounding_mode="floor"),
    aten.div.Tensor: call(X, UNIT + 1),
    aten.div.Tensor_mode: call(X, UNIT + 1, rounding_mode="trunc"),
    aten.elu.default: call(X, 1.5, 1.2, 0.5),
    aten.embedding.default: call(X, POSITIONS),
    aten.expand.default: call(X[:1], [4, 6]),
    aten.floor_divide.default: call(X, UNIT + 1),
    aten.gather.default: call(X, 1, INTS % 6),
    aten.gelu.default: call(X, approximate="tanh"),
    aten.gelu_backward.default: call(X, Y, approximate="none"),
    aten.hardsigmoid.default: call(X),
    aten.hardswish.default: call(X),
    aten.hardtanh.default: call(X, -0.5, 0.75),
    aten.isfinite.default: call(X / 0),
    aten.isinf.default: call(X / 0),
    aten.isnan.default: call(X / 0),
    aten.leaky_relu.default: call(X, 0.2),
    aten.lerp.Scalar: call(X, Y, 0.75),
    aten.lerp.Tensor: call(X, Y, UNIT),
    aten.lift_fresh_copy.default: call(X),
    aten.linalg_vector_norm.default: call(X, 2, [1], True),
    aten.logsumexp.default: call(X, [1], True),
    aten.logical_and.default: call(MASK, X),
    aten.logical_not.default: call(X),
    aten.logical_or.default: call(MASK, X),
    aten.logical_xor.default: call(MASK, X),
    aten.masked_fill.Scalar: call(X, MASK, -torch.inf),
    aten.masked_fill.Tensor: call(X, MASK, torch.tensor(2.0)),
    aten.max.default: call(X),
    aten.max.dim: call(X, 1),
    aten.mean.default: call(X),
    aten.mean.dim: call(X, [1], True),
    aten.min.default: call(X),
    aten.min.dim: call(X, 0, True),
    aten.native_batch_norm.default: call(IMAGE, ROW, PLUS, CHANNELS, PLUS, False, 0.1, 1e-5),
    aten.native_dropout_backward.default: call(X, MASK, 1.25),
    aten.native_layer_norm.default: call(X, [6], ROW, PLUS, 1e-5),
    aten.nll_loss2d_backward.default: call(
        IMAGE[:, 0].abs(), IMAGE, PIXELS, PLUS, 0, 1, torch.tensor(0.0)
    ),
    aten.nll_loss2d_forward.default: call(IMAGE, PIXELS, PLUS, 0, 1),
    aten.nll_loss_backward.default: call(
        torch.tensor(0.5), X, CLASSES, PLUS, 1, -100, torch.tensor(3.0)
    ),
    aten.nll_loss_forward.default: call(X, CLASSES, PLUS, 0, -100),
    aten.norm.Scalar: call(X, 3),
    aten.norm.ScalarOpt_dim: call(X, 0.5, [0]),
    aten.permute.default: call(X, [1, 0]),
    aten.pow.Scalar: call(2.0, X),
    aten.pow.Tensor_Scalar: call(UNIT, 2.5),
    aten.pow.Tensor_Tensor: call(UNIT, X),
    aten.prod.default: call(X),
    aten.prod.dim_int: call(X, 1),
    aten.reshape.default: call(X, [4, 1, 6]),
    aten.rsub.Scalar: call(X, 2.0),
    aten.rsub.Tensor: call(X, Y),
    aten.sigmoid_backward.default: call(X, UNIT),
    aten.silu_backward.default: call(X, Y),
    aten.softplus.default: call(X, 2, 1),
    aten.square.default: call(X),
    aten.squeeze.default: call(X[:, None]),
    aten.squeeze.dim: call(X[:, None], 1),
    aten.squeeze.dims: call(X[:, None], [1]),
    aten.sub.Scalar: call(X, 2.5),
    aten.sub.Tensor: call(X, ROW),
    aten.sum.default: call(X),
    aten.sum.dim_IntList: call(X, [0]),
    aten.t.default: call(X),
    aten.tanh_backward.default: call(X, UNIT),
    aten.threshold_backward.default: call(X, Y, 0),
    aten.transpose.int: call(X, 0, 1),
    aten.unsqueeze.default: call(X, 1),
    aten.var.correction: call(X, [1], correction=1),
    aten.var_mean.correction: call(X, [1], correction=0, keepdim=True),
    aten.view.default: call(X, [4, 6, 1]),
    aten.where.self: call(MASK, X, Y),
    torch.ops.prims.convert_element_type.default: call(X, torch.float64),
}

LEFT_OUT: dict[Any, str] = {
    operator.getitem: "picks one of several results: the calls of several results have it",
    aten.cudnn_batch_norm.default: "of GPUs only: their tests have it",
    dropout_mask: "of GPUs only: their tests have it",
    aten.fmod.default: "of two numbers: never a tensor",
    aten.mul.default: "of two numbers: never a tensor",
    aten.remainder.default: "of two numbers: never a tensor",
}

for _name in UNARY:
    _given = INTS if _name == "bitwise_not" else UNIT if "log" in _name or _name[0] == "a" else X
    CALLS[getattr(aten, _name).default] = call(_given + 0.5 if "sqrt" in _name else _given)
for _name in (*BINARY, *COMPARE, *SHIFTS):
    _ints = _name in SHIFTS or "bit" in _name
    _left, _right, _number = (INTS, INTS.t().reshape(4, 6), 5) if _ints else (X, Y, 0.5)
    for _overload in getattr(aten, _name).overloads():
        _target = getattr(getattr(aten, _name), _overload)
        if _target in HANDLERS and _target not in CALLS and _target not in LEFT_OUT:
            _last = _number if _overload in ("Scalar", "Tensor_Scalar") else _right
            CALLS[_target] = call(_number if _overload == "Scalar_Tensor" else _left, _last)


def graph_of(target: Any, given: Call) -> tuple[GraphModule, list[torch.Tensor]]:
    """The operator between two others: views are fused inside of groups only."""
    graph, tensors = Graph(), []

    def node_of(value: Any) -> Any:
        if isinstance(value, list):
            return [node_of(one) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return graph.placeholder(f"x{len(tensors)}")

    args, kwargs = given
    arguments = [node_of(one) for one in args]
    first = next((k for k, one in enumerate(args) if isinstance(one, torch.Tensor)), None)
    if target in (aten.cat.default, aten.stack.default):
        arguments[0] = [graph.call_function(aten.neg.default, (one,)) for one in arguments[0]]
    elif first is None or target is aten.embedding.default:
        pass
    elif args[first].dtype is torch.float32:
        arguments[first] = graph.call_function(aten.neg.default, (arguments[first],))
        arguments[first] = graph.call_function(aten.neg.default, (arguments[first],))
    result = graph.call_function(target, tuple(arguments), kwargs)
    if len(target._schema.returns) > 1:
        result = graph.call_function(operator.getitem, (result, 0))
    ends = graph.call_function(aten.logical_not.default, (result,))
    graph.output((ends, result))
    gm = GraphModule(torch.nn.Module(), graph)
    with FakeTensorMode() as mode:
        FakeTensorProp(gm, mode).propagate(*tensors)
    return gm, tensors


@pytest.mark.parametrize("target", list(CALLS), ids=str)
def test_fused(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fallback(*given: Any) -> Callable[..., Any] | None:
        return None

    monkeypatch.setattr(scheduling, "by_aten", no_fallback)
    gm, tensors = graph_of(target, CALLS[target])
    fusion = fuse(gm.graph)
    inside = {node.target for group in fusion.groups for node in group.nodes}
    assert target in inside, [str(reason) for reason in fusion.reasons.values()]
    results = Schedule(gm, fusion).call(*tensors)
    for got, wanted in zip(results, gm(*tensors), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)
        assert got.stride() == wanted.stride()


@pytest.mark.parametrize("target", list(CALLS), ids=str)
def test_operator_by_operator(target: Any) -> None:
    """What a group does where its arguments have no bytecode."""
    gm, tensors = graph_of(target, CALLS[target])
    around = torch.fx.Interpreter(gm, garbage_collect_values=False)
    around.run(*tensors)
    for group in fuse(gm.graph).groups:
        given = [around.env[a] if isinstance(a, torch.fx.Node) else a for a in group.arguments]
        made = by_aten(gm, group)(*given)
        made = made if isinstance(made, tuple) else (made,)
        for got, node in zip(made, group.outputs, strict=True):
            torch.testing.assert_close(got, around.env[node], equal_nan=True)


def test_every_handler_is_tested() -> None:
    assert set(HANDLERS) == set(CALLS) | (set(LEFT_OUT) & set(HANDLERS))
    assert all(
        handles(node)
        for node in graph_of(aten.relu.default, call(X))[0].graph.nodes
        if node.op == "call_function"
    )
