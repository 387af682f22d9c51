"""The graphs of the conformance suite: small, and each with one thing to get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule

__all__ = ["CASES", "Case"]

Maker = Callable[[torch.device], list[Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """One graph, how to make inputs for it, and what to look at.

    Attributes:
        name: unique, shown in the table.
        program: traced by ``torch.fx``; or makes the graph itself, see ``by_hand``.
        make_inputs: fresh inputs on a device; random values come from torch's generator.
        static: positions that keep their address, as parameters do.
        training: gradients are wanted and compared.
        random: draws random numbers: compared with eager only for backends that claim
            ``exact_random``, otherwise checked to be reproducible.
        by_hand: ``program()`` returns the graph module.
    """

    name: str
    program: Callable[..., Any]
    make_inputs: Maker
    static: tuple[int, ...] = ()
    training: bool = False
    random: bool = False
    by_hand: bool = False

    def graph(self) -> GraphModule:
        """A new graph module with a tuple as its output."""
        if self.by_hand:
            made: GraphModule = self.program()
            return made
        gm = torch.fx.symbolic_trace(self.program)
        for node in gm.graph.nodes:
            node.type = None  # the annotations of ``program`` say nothing of the graph
        output = next(node for node in gm.graph.nodes if node.op == "output")
        result = output.args[0]
        output.args = (tuple(result) if isinstance(result, (tuple, list)) else (result,),)
        gm.recompile()
        return gm


def _normal(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Maker:
    def make(device: torch.device) -> list[Any]:
        return [torch.randn(size, device=device).to(dtype) for size in sizes]

    return make


def _with_grad(make: Maker) -> Maker:
    def make_with_grad(device: torch.device) -> list[Any]:
        return [
            value.requires_grad_() if value.is_floating_point() else value for value in make(device)
        ]

    return make_with_grad


def _floats(x: Any, y: Any, half: Any, a: Any, b: Any) -> Any:
    """What a float becomes that changes from call to call; see ``FloatInputs``."""
    z = torch.addcmul(x * a - b, y, b)
    z = torch.where(z > a, z, a)
    z = torch.where(z >= b, z, torch.maximum(z.detach(), b))
    return z, b - x / a, (half.float() * b).to(half.dtype)


def _make_floats(device: torch.device) -> list[Any]:
    """Floats are on the CPU whatever the device; they never ask for gradients."""
    made = _normal((3, 4), (3, 4))(device)
    half = torch.randn(5, device=device).to(torch.bfloat16)
    return [*made, half, torch.rand(()) + 0.5, torch.rand(()) * 0.4]


def _with_grad_but_floats(device: torch.device) -> list[Any]:
    made = _make_floats(device)
    return [value.requires_grad_() for value in made[:3]] + made[3:]


def _views(x: Any) -> Any:
    return x.t(), x.view(-1)[2:7], x.unsqueeze(0).expand(3, -1, -1), x[:, ::2], x.reshape(2, -1)


def _in_place(x: Any, y: Any) -> Any:
    x.add_(1)
    x.mul_(y)
    return x.sum()


def _in_place_through_view(x: Any) -> Any:
    x[0].fill_(3.0)
    x.t()[1].add_(1)
    return x * 2


def _in_place_on_intermediate(x: Any) -> Any:
    y = x * 2
    z = y.view(-1)
    z.add_(1)
    return y, z


def _output_is_input(x: Any, y: Any) -> Any:
    return x, y + 1, x


def _alias_outputs(x: Any) -> Any:
    y = x + 1
    return y, y, y.t(), x.t()


def _same_shapes(a: Any, b: Any, c: Any) -> Any:
    return a - b, b - c, (c - a) * b


def _dtype_mix(half: Any, single: Any, double: Any, integer: Any, mask: Any) -> Any:
    return (
        half + single,
        single * double,
        integer / 2,
        integer + single,
        torch.where(mask, single, 0.0),
        single.to(torch.float16),
        integer.sum(),
    )


def _make_dtype_mix(device: torch.device) -> list[Any]:
    shape = (4, 5)
    return [
        torch.randn(shape, device=device).to(torch.bfloat16),
        torch.randn(shape, device=device),
        torch.randn(shape, device=device, dtype=torch.float64),
        torch.randint(-5, 5, shape, device=device),
        torch.rand(shape, device=device) > 0.5,
    ]


def _make_non_contiguous(device: torch.device) -> list[Any]:
    base = torch.randn(6, 8, device=device)
    return [
        base.t().clone(memory_format=torch.preserve_format),
        base[::2, 1:7],
        base[1].expand(4, 8),
    ]


def _make_zero_size(device: torch.device) -> list[Any]:
    return [torch.randn(0, 4, device=device), torch.randn(4, 0, device=device)]


def _zero_size(x: Any, y: Any) -> Any:
    return x + 1, x @ torch.ones_like(y), x.sum(), torch.cat([x, x]), y.sum(1)


def _zero_dim(x: Any, y: Any) -> Any:
    return x + y, (x * y).sum(), x.exp(), y.view(1, 1)


def _make_scalars(device: torch.device) -> list[Any]:
    return [torch.randn(3, 4, device=device), 3, 0.5, True]


def _scalars(x: Any, count: Any, factor: Any, flag: Any) -> Any:
    return x * factor + count, torch.full((2,), 1.0) * count, x + flag


def _mlp(x: Any, w1: Any, b1: Any, w2: Any) -> Any:
    hidden = F.gelu(F.linear(x, w1, b1))
    return F.linear(hidden, w2).softmax(-1), hidden.mean()


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, count: Any) -> Any:
    count.add_(1)
    return F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5).relu()


def _make_batch_norm(device: torch.device) -> list[Any]:
    return [
        torch.randn(4, 3, 5, 5, device=device, requires_grad=True),
        torch.nn.Parameter(torch.randn(3, device=device)),
        torch.nn.Parameter(torch.randn(3, device=device)),
        torch.zeros(3, device=device),
        torch.ones(3, device=device),
        torch.tensor(0, device=device),
    ]


def _make_parameters(device: torch.device) -> list[Any]:
    x = torch.randn(6, 8, device=device)
    shapes = ((16, 8), (16,), (4, 16))
    return [x, *(torch.nn.Parameter(torch.randn(s, device=device) / 4) for s in shapes)]


def _convolution(x: Any, weight: Any, bias: Any) -> Any:
    y = F.conv2d(x, weight, bias, stride=2, padding=1)
    return F.max_pool2d(y.relu(), 2), y.flatten(1)


def _make_convolution(device: torch.device) -> list[Any]:
    return [
        torch.randn(2, 3, 12, 12, device=device),
        torch.nn.Parameter(torch.randn(4, 3, 3, 3, device=device)),
        torch.nn.Parameter(torch.randn(4, device=device)),
    ]


def _attention(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), (q @ k.transpose(-1, -2)).sum()


def _make_same_twice(device: torch.device) -> list[Any]:
    x = torch.randn(3, 4, device=device)
    return [x, x]


def _make_overlap(device: torch.device) -> list[Any]:
    x = torch.randn(3, 4, device=device)
    return [x, x.view(-1)]


def _write_and_read(x: Any, y: Any) -> Any:
    x.add_(1)
    return y * 2


def _only_effects() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_method("mul_", (x, 2))
    graph.output(())
    return GraphModule({}, graph)


def _no_tensor_outputs() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_method("add_", (x, 1))
    graph.output((None, 7, 0.5))
    return GraphModule({}, graph)


def _no_inputs() -> GraphModule:
    graph = Graph()
    made = graph.call_function(torch.full, ((2, 3), 1.5))
    graph.output((graph.call_function(torch.add, (made, made)),))
    return GraphModule({}, graph)


def _unused_input() -> GraphModule:
    graph = Graph()
    graph.placeholder("unused")
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.neg, (x,)),))
    return GraphModule({}, graph)


def _grad_mode() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    tracked = graph.call_function(torch.mul, (x, 2))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    untracked = graph.call_function(torch.mul, (tracked, 3))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output((graph.call_function(torch.add, (tracked, untracked)),))
    return GraphModule({}, graph)


def _autocast() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.placeholder("y")
    entered = graph.call_function(
        torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, True)
    )
    product = graph.call_function(torch.matmul, (x, y))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (entered,))
    graph.output((product, graph.call_function(torch.matmul, (x, y))))
    return GraphModule({}, graph)


CASES: tuple[Case, ...] = (
    Case("pointwise", lambda x, y: (x + y).relu() * torch.sigmoid(x) - 3, _normal((4, 5), (5,))),
    Case("reductions", lambda x: (x.sum(0), x.amax(1), x.mean(), x.argmax(1)), _normal((4, 6))),
    Case("views", _views, _normal((4, 6))),
    Case("in-place on an input", _in_place, _normal((3, 4), (3, 4))),
    Case("in-place through a view of an input", _in_place_through_view, _normal((3, 4))),
    Case("in-place on an intermediate", _in_place_on_intermediate, _normal((3, 4))),
    Case("output is an input", _output_is_input, _normal((3,), (3,))),
    Case("outputs that alias", _alias_outputs, _normal((3, 4))),
    Case("several inputs of one shape", _same_shapes, _normal((3, 4), (3, 4), (3, 4))),
    Case("one tensor as two inputs", _write_and_read, _make_same_twice),
    Case("inputs that overlap, one written", _write_and_read, _make_overlap),
    Case("floats as tensors", _floats, _make_floats),
    Case("floats as tensors, gradients", _floats, _with_grad_but_floats, training=True),
    Case("scalar inputs", _scalars, _make_scalars),
    Case("many outputs", lambda x: tuple(x + i for i in range(20)), _normal((3,))),
    Case("effects only, no outputs", _only_effects, _normal((3, 4)), by_hand=True),
    Case("outputs that are no tensors", _no_tensor_outputs, _normal((3, 4)), by_hand=True),
    Case("no inputs", _no_inputs, _normal(), by_hand=True),
    Case("unused input", _unused_input, _normal((2,), (3,)), by_hand=True),
    Case("mixed dtypes", _dtype_mix, _make_dtype_mix),
    Case(
        "bool outputs", lambda x, y: (x > y, (x > 0) & (y > 0), (x == x).all()), _normal((5,), (5,))
    ),
    Case(
        "complex",
        lambda x: (x * x.conj(), torch.view_as_real(x)),
        _normal((4,), dtype=torch.complex64),
    ),
    Case("non-contiguous inputs", lambda x, y, z: (x * 2, y + 1, z.sum(0)), _make_non_contiguous),
    Case("zero-size", _zero_size, _make_zero_size),
    Case("zero-dimensional", _zero_dim, _normal((), ())),
    Case(
        "indexing",
        lambda x, i: (x[i], x.index_select(0, i), x.gather(0, i[:, None])),
        lambda device: [torch.randn(5, 4, device=device), torch.tensor([3, 0, 3], device=device)],
    ),
    Case("convolution", _convolution, _make_convolution, static=(1, 2), training=True),
    Case(
        "attention",
        _attention,
        _with_grad(_normal((2, 2, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))),
        training=True,
    ),
    Case("parameters, inference", _mlp, _make_parameters, static=(1, 2, 3)),
    Case("parameters, gradients", _mlp, _make_parameters, static=(1, 2, 3), training=True),
    Case(
        "gradients of inputs",
        lambda x, y: ((x * y).sin(), x @ y),
        _with_grad(_normal((4, 4), (4, 4))),
        training=True,
    ),
    Case("gradients through views", _views, _with_grad(_normal((4, 6))), training=True),
    Case(
        "gradients through in-place",
        _in_place_on_intermediate,
        _with_grad(_normal((3, 4))),
        training=True,
    ),
    Case(
        "batch norm, training", _batch_norm, _make_batch_norm, static=(1, 2, 3, 4, 5), training=True
    ),
    Case(
        "grad mode changed inside",
        _grad_mode,
        _with_grad(_normal((3,))),
        training=True,
        by_hand=True,
    ),
    Case("autocast inside", _autocast, _normal((3, 4), (4, 5)), by_hand=True),
    Case("dropout", lambda x: F.dropout(x, 0.5, True), _normal((64, 64)), random=True),
    Case(
        "dropout, gradients",
        lambda x: F.dropout(x, 0.5, True) * 2,
        _with_grad(_normal((64, 64))),
        training=True,
        random=True,
    ),
)
