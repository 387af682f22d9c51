"""Symbolic shapes of ATen graphs: what is deduced from operators alone is what torch says."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.functions import Max, Min

from magjit.plugin import (
    BackendContext,
    BackendError,
    SymbolicShapes,
    propagate_shapes,
    shape_propagation,
)
from magjit.plugin.aot import aot
from magjit.plugin.shape_propagation import shape_of_value

from .graphs import compile_for

aten = torch.ops.aten
S, T, U = sympy.symbols("s0 s1 s2", integer=True, positive=True)


def graph_of(names: str, build) -> tuple[Graph, dict]:
    """A graph by hand: ``build`` gets the placeholders and a function that adds a call."""
    graph = Graph()
    nodes = {name: graph.placeholder(name) for name in names.split()}

    def call(target, *args):
        name = target.__name__.partition(".")[0]
        return graph.create_node("call_function", target, args, name=name)

    made = build(call, **nodes)
    graph.output(tuple(made))
    return graph, {node.name: node for node in graph.nodes}


def shape_env_of(gm: torch.fx.GraphModule):
    values = (node.meta.get("val") for node in gm.graph.nodes)
    return next(value.fake_mode.shape_env for value in values if hasattr(value, "fake_mode"))


def disagreements(gm: torch.fx.GraphModule, shapes: SymbolicShapes) -> list[str]:
    """Tensor nodes whose shape is not what their metadata says."""
    found = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            mine, torchs = shapes.shape(node), shape_of_value(value)
            if mine is None or len(mine) != len(torchs) or not all(map(shapes.equal, mine, torchs)):
                found.append(f"{node.format_node()}: {mine}, not {torchs}")
    return found


def check_traced(program, *inputs, uncovered: tuple[str, ...] = ()) -> SymbolicShapes:
    gm = make_fx(program, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    shapes = propagate_shapes(gm.graph, shape_env=shape_env_of(gm), use_meta=False)
    assert sorted(str(node.target) for node in shapes.unknown) == sorted(uncovered)
    if not uncovered:
        assert not disagreements(gm, shapes)
    assert not disagreements(gm, propagate_shapes(gm.graph, shape_env=shape_env_of(gm)))
    return shapes


# Unknown siblings


def test_a_matrix_product_says_the_inner_size_of_its_sibling() -> None:
    graph, at = graph_of("x w", lambda call, x, w: [call(aten.mm.default, x, w)])
    shapes = propagate_shapes(graph, [(S, 16), None])
    assert shapes.shape(at["w"])[0] == 16
    assert shapes.shape(at["mm"]) == (S, shapes.shape(at["w"])[1])
    assert str(shapes.shape(at["w"])[1]) == "w.1"
    assert not shapes.unknown


def test_what_is_learnt_later_completes_a_shape() -> None:
    def build(call, x, w, b, y):
        product = call(aten.mm.default, x, w)
        return [call(aten.cat.default, [product, b]), call(aten.mm.default, b, y)]

    graph, at = graph_of("x w b y", build)
    shapes = propagate_shapes(graph, [(S, 16), None, None, (T, 5)])
    assert shapes.shape(at["w"]) == (16, T)
    assert shapes.shape(at["b"])[1] == T
    assert shapes.shape(at["cat"]) == (S + sympy.Symbol("b.0", integer=True, positive=True), T)


@pytest.mark.parametrize(
    ("target", "given", "position", "expected"),
    [
        (aten.mm.default, [None, (S, T)], 0, "[x0.0, s0]"),
        (aten.bmm.default, [(S, 3, T), None], 1, "[s0, s1, x1.2]"),
        (aten.addmm.default, [(4,), (S, T), None], 2, "[s1, x2.1]"),
        (aten.baddbmm.default, [(4,), None, (S, T, 4)], 1, "[s0, x1.1, s1]"),
        (aten.linear.default, [(S, T, 7), None], 1, "[x1.0, 7]"),
        (aten.mv.default, [(S, T), None], 1, "[s1]"),
        (aten.embedding.default, [None, (S, T)], 0, "[x0.0, x0.1]"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, [(S, 4, T, 8), None, None],
         1, "[s0, x1.1, x1.2, 8]"),
        (aten._native_batch_norm_legit_no_training.default,
         [(S, 8, T, T), None, (8,), (8,), (8,), 0.1, 1e-5], 1, "[8]"),
        (aten.native_layer_norm.default, [(S, 8), [8], None, None, 1e-5], 2, "[8]"),
    ],
)  # fmt: skip
def test_siblings(target, given, position, expected) -> None:
    graph = Graph()
    shapes_given, arguments = [], []
    for at, value in enumerate(given):
        if value is None or isinstance(value, tuple):
            arguments.append(graph.placeholder(f"x{at}"))
            shapes_given.append(value)
        else:
            arguments.append(value)
    graph.call_function(target, tuple(arguments))
    shapes = propagate_shapes(graph, shapes_given)
    shape = shapes.shape(arguments[position])
    assert f"[{', '.join(map(str, shape))}]" == expected


def test_lists_say_all_sizes_but_the_one_along_the_dimension() -> None:
    def build(call, x, y, z):
        return [call(aten.cat.default, [x, y], -1), call(aten.stack.default, [y, z])]

    graph, at = graph_of("x y z", build)
    shapes = propagate_shapes(graph, [(S, 3, T), None, None])
    (s, three, own) = shapes.shape(at["y"])
    assert (s, three) == (S, 3)
    assert shapes.shape(at["z"]) == (S, 3, own)
    assert shapes.shape(at["cat"]) == (S, 3, T + own)
    assert shapes.shape(at["stack"]) == (2, S, 3, own)


def test_elementwise_says_sizes_in_a_shape_of_the_same_rank_alone() -> None:
    def build(call, c, x, y):
        return [call(aten.where.self, c, x, y)]

    graph, at = graph_of("c x y", build)
    shapes = propagate_shapes(graph, [None, (S, 1, T), (None, None, None)])
    assert shapes.shape(at["c"]) is None and "says its shape" in shapes.unknown[at["c"]]
    first, second, third = shapes.shape(at["y"])
    assert (first, str(second), third) == (S, "y.1", T)
    assert "waits for c" in shapes.unknown[at["where"]]


def test_an_unknown_number_leaves_a_size_open() -> None:
    def build(call, x, w, count):
        size = call(aten.sym_size.int, count, 0)
        return [call(aten.native_layer_norm.default, x, [size], w, None, 1e-5)]

    graph, at = graph_of("x w count", build)
    shapes = propagate_shapes(graph, [(S, T), None, None])
    assert str(shapes.shape(at["w"])) == "(w.0,)"
    assert {"count", "native_layer_norm"} <= {node.name for node in shapes.unknown}


# Equalities


def test_sizes_that_must_agree_are_equal_from_then_on() -> None:
    graph, at = graph_of("x y", lambda call, x, y: [call(aten.mm.default, x, y)])
    shapes = propagate_shapes(graph, [(S, 2 * T), (U + 1, 4)])
    assert shapes.equal(2 * T, U + 1)
    assert shapes.equal(6 * T - 3, 3 * U)
    assert not shapes.equal(T, U)
    assert "== " in str(shapes)


def test_equations_without_a_solution_still_unite_expressions() -> None:
    def build(call, x, y):
        return [call(aten.view.default, x, [-1]), call(aten.view.default, y, [-1])]

    def both(call, x, y):
        return [call(aten.mul.Tensor, *build(call, x, y))]

    a, b = sympy.symbols("a b", integer=True, positive=True)
    graph, at = graph_of("x y", both)
    shapes = propagate_shapes(graph, [(S, T), (a, b)])
    assert shapes.equal(S * T, a * b)
    assert not shapes.equal(S, a)


def test_one_and_broadcasting() -> None:
    graph, at = graph_of("x y", lambda call, x, y: [call(aten.add.Tensor, x, y)])
    shapes = propagate_shapes(graph, [(S, 1, 4), (T, 1)])
    assert shapes.shape(at["add"]) == (S, T, 4)
    assert shapes.numel(at["add"]) == 4 * S * T
    assert shapes.is_one(1) and not shapes.is_one(S)
    united = propagate_shapes(graph, [(S,), (T,)])
    assert united.equal(S, T)


def test_symbols_that_may_be_one_are_not_united() -> None:
    graph, at = graph_of("x y", lambda call, x, y: [call(aten.add.Tensor, x, y)])
    shapes = propagate_shapes(graph, [(S,), (T,)], minimum=0)
    assert not shapes.equal(S, T)
    assert "are 1 is unknown" in shapes.unknown[at["add"]]
    assert propagate_shapes(graph, [(S,), (7,)], minimum=0).shape(at["add"]) == (7,)
    assert propagate_shapes(graph, [(S,), (S,)], minimum=0).shape(at["add"]) == (S,)


def test_equations_that_are_given_hold() -> None:
    graph, at = graph_of("x y", lambda call, x, y: [call(aten.exp.default, x), y])
    shapes = propagate_shapes(graph, [(S,), (T,)], equations=[sympy.Eq(2 * S, 3 * T)])
    assert shapes.equal(2 * S, 3 * T) and not shapes.equal(S, T)
    assert shapes.representative(2 * S) == shapes.representative(3 * T)
    with pytest.raises(BackendError, match="No sizes satisfy"):
        propagate_shapes(graph, [(S,), (T,)], equations=[sympy.Eq(S, 1)])


def test_what_the_shape_environment_has_unified_is_equal() -> None:
    gm = make_fx(lambda x, y: x + y, tracing_mode="symbolic")(torch.ones(3, 5), torch.ones(3, 5))
    shape_env = shape_env_of(gm)
    shapes = propagate_shapes(gm.graph, shape_env=shape_env)
    for symbol, value in shape_env.replacements.items():
        assert shapes.equal(symbol, value)
    gm = make_fx(lambda x: x + torch.ones(8), tracing_mode="symbolic")(torch.ones(8))
    placeholder = next(iter(gm.graph.nodes))
    shapes = propagate_shapes(gm.graph, [(sympy.Symbol("free"),)], shape_env=shape_env_of(gm))
    assert shapes.shape(placeholder) == (8,)


# Real graphs


class BertLayer(torch.nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.words, self.positions = torch.nn.Embedding(50, 32), torch.nn.Embedding(64, 32)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(32, 32) for _ in range(4))
        self.norm1, self.norm2 = torch.nn.LayerNorm(32), torch.nn.LayerNorm(32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, ids, mask):
        batch, length = ids.shape
        x = self.words(ids) + self.positions(torch.arange(64)[None][:, :length])
        q, k, v = (
            layer(x).view(batch, length, 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -1e4
        if self.fused:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            attended = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + bias, -1) @ v
        x = self.norm1(x + self.o(attended.transpose(1, 2).reshape(batch, length, 32)))
        x = self.norm2(x + self.down(F.gelu(self.up(x))))
        return x, torch.tanh(x[:, 0])


@pytest.mark.parametrize("fused", [False, True])
def test_bert_layer(fused: bool) -> None:
    ids = torch.zeros(3, 7, dtype=torch.long)
    shapes = check_traced(BertLayer(fused).eval(), ids, torch.ones(3, 7))
    assert not disagreements(
        shapes.graph.owning_module, propagate_shapes(shapes.graph, use_meta=False)
    )
    batch, length = shapes.shape(next(iter(shapes.graph.nodes)))
    (output,) = (node for node in shapes.graph.nodes if node.op == "output")
    assert shapes.shape(output.args[0][0]) == (batch, length, 32)


@pytest.mark.parametrize("training", [True, False])
def test_convnet_block(training: bool) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
            self.norm, self.groups = torch.nn.BatchNorm2d(8), torch.nn.GroupNorm(2, 8)
            self.second = torch.nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
            self.up = torch.nn.ConvTranspose2d(8, 4, 2, stride=2)

        def forward(self, x):
            x = F.relu(self.norm(self.first(x)))
            x = self.up(x + self.groups(self.second(x)))
            return F.log_softmax(F.max_pool2d(x, 2).mean((2, 3)), -1)

    gm = make_fx(
        Block().train(training), tracing_mode="symbolic", _allow_non_fake_inputs=True
    )(torch.randn(4, 3, 12, 16))  # fmt: skip
    shapes = propagate_shapes(gm.graph, shape_env=shape_env_of(gm), use_meta=False)
    # What a batch norm saves for its backward without training, the device decides.
    left_open = [] if training else ["getitem_1", "getitem_2"]
    assert [node.name for node in shapes.unknown if node.op != "output"][:2] == left_open
    if training:
        assert not disagreements(gm, shapes)
    assert not disagreements(gm, propagate_shapes(gm.graph))


def mlp(x, w1, b1, w2, b2):
    return (F.linear(torch.relu(F.linear(x, w1, b1)), w2, b2).square().mean(),)


def convnet(x, weight, scale, shift, mean, var, last):
    y = F.batch_norm(F.conv2d(x, weight, stride=2, padding=1), mean, var, scale, shift, True)
    return (F.log_softmax(F.linear(F.max_pool2d(y.relu(), 2).mean((2, 3)), last), -1).sum(),)


def attention(x, q, k, v):
    heads = [F.linear(x, w).unflatten(2, (2, 8)).transpose(1, 2) for w in (q, k, v)]
    return (F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).sum(),)


def parameters(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(*size, requires_grad=True) for size in sizes]


TRAINED = {
    "mlp": (mlp, (0,), lambda: parameters((5, 16), (32, 16), (32,), (4, 32), (4,))),
    "convnet": (
        convnet,
        (0, 2),
        lambda: [
            *parameters((4, 3, 12, 16), (8, 3, 3, 3), (8,), (8,)),
            torch.zeros(8),
            torch.ones(8),
            *parameters((5, 8)),
        ],
    ),
    "attention": (attention, (0, 1), lambda: parameters((3, 7, 16), (16, 16), (16, 16), (16, 16))),
}


@pytest.mark.parametrize("name", TRAINED)
def test_forward_and_backward_through_aot(name: str) -> None:
    program, dynamic, make_inputs = TRAINED[name]
    seen = []

    class Checking:
        name = "checking"
        exact_random = True

        def supports(self, gm):
            return []

        def compile(self, gm, example_inputs, context):
            def check(gm, inputs):
                for shape_env in (context.shape_env, None):
                    shapes = propagate_shapes(gm.graph, shape_env=shape_env, use_meta=False)
                    assert not shapes.unknown
                    assert not disagreements(gm, shapes)
                seen.append((gm, shapes))
                return gm.forward

            return aot(gm, example_inputs, context, forward=check)

    inputs = make_inputs()
    for dim in dynamic:
        torch._dynamo.mark_dynamic(inputs[0], dim)
    compiled = compile_for(Checking(), program, inputs, static=range(1, len(inputs)))
    compiled(*inputs)[0].backward()
    assert len(seen) == 2
    (forward, shapes), (backward, _) = seen
    assert any(isinstance(size, sympy.Symbol) for size in symbols_of(shapes))
    # One run of the forward on real tensors has the shapes that the symbols say.
    values = RecordingInterpreter(forward)
    placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
    values.run(*[concrete(node.meta["val"]) for node in placeholders])
    shapes.verify(values.seen)


def symbols_of(shapes: SymbolicShapes) -> set:
    found = [shapes.shape(node) or () for node in shapes.graph.nodes]
    return {size for shape in found for size in shape}


def concrete(value):
    if isinstance(value, torch.Tensor):
        sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
        return torch.zeros(sizes, dtype=value.dtype)
    return value if isinstance(value, int) else value.node.hint


class RecordingInterpreter(torch.fx.Interpreter):
    def __init__(self, gm) -> None:
        super().__init__(gm)
        self.seen = {}

    def run_node(self, n):
        result = super().run_node(n)
        if n.op != "output":
            self.seen[n] = result
        return result


# Operators

X = (6, 4, 10)
PROGRAMS = {
    "slices": lambda x: (x[1:-1], x[:, ::2], x[..., -3:], x[:3, None], x[2:5]),
    "views": lambda x: (x.view(-1, x.shape[2]), x.flatten(), x.permute(2, 0, 1), x.mT, x[:, 0]),
    "expand": lambda x: (x[:, :1].expand(-1, 7, -1), x.unsqueeze(0).expand(3, *x.shape)),
    "squeeze": lambda x: (x[:1].squeeze(0), x.unsqueeze(1).squeeze(), x.squeeze(1)),
    "lists": lambda x: (torch.cat([x, x], 1), torch.stack([x, x], -1), x.repeat(2, 1, 3)),
    "split": lambda x: (*x.split([2, x.shape[0] - 2]), *torch.cat([x, x], 2).split(x.shape[2], 2)),
    "unbind": lambda x: torch.cat([x[:2], x[-1:]]).unbind(0),
    "reductions": lambda x: (x.sum(), x.amax((0, 2), True), *torch.var_mean(x, 0), *x.max(1)),
    "lookups": lambda x: (x.sort(-1), x.topk(2, 1), x.gather(1, x[:, :2].long() * 0)),
    "indices": lambda x: (x[x[:, 0, 0].long() * 0], x[:, x[0, :, :2].long() * 0]),
    "index_select": lambda x: x.index_select(1, x[0, :, 0].long() * 0),
    "factories": lambda x: (
        torch.zeros(x.shape[0], 2), torch.arange(x.shape[1]), torch.rand_like(x), x.new_ones(3),
        torch.arange(0, 7, 2), torch.scalar_tensor(2.0), torch.full_like(x, 3), torch.eye(3) * 2,
    ),
    "padding": lambda x: (F.pad(x, (1, 2, 0, 3)), F.pad(x, (1, 1), mode="reflect")),
    "pools": lambda x: (F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, (2, 3))),
    "convolutions": lambda x: F.conv1d(x[:, :3], torch.ones(2, 3, 3), stride=2, padding=1),
    "products": lambda x: (x @ x.mT, x[0] @ x[0, 0], torch.baddbmm(x[:1], x @ x.mT, x)),
    "losses": lambda x: (F.mse_loss(x, x), F.mse_loss(x, x + 1, reduction="none")),
    "in place": lambda x: x.clone().add_(1).mul_(x).clamp_(0).fill_(2),
    "scatter": lambda x: x.slice_scatter(x[:2] * 2, 0, 0, 2).select_scatter(x[0], 0, 1),
    "numbers": lambda x: x.new_zeros(x.shape[0] // 2 + x.shape[1] * 3, x.numel() % 7 + 2),
    "norms": lambda x: (F.layer_norm(x, x.shape[2:]), F.normalize(x), x.softmax(0).cumsum(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators(name: str) -> None:
    uncovered = ("aten.eye.default", "aten.mul.Tensor") if name == "factories" else ()
    program = PROGRAMS[name]
    shapes = check_traced(lambda x: program(x), torch.randn(*X), uncovered=uncovered)
    owner = shapes.graph.owning_module
    recorded = RecordingInterpreter(owner)
    recorded.run(torch.randn(8, 5, 12))
    shapes.verify(recorded.seen)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 2, 2),
        (0, 5, Min(5, S)),
        (2, 2**63 - 1, S - 2),
        (-2, 2**63 - 1, 2),
        (-3, 2**63 - 1, S - Max(0, S - 3)),
        (1, -1, S - 2),
    ],
)
def test_a_slice_whose_bounds_may_lie_outside_is_clamped(start, end, expected) -> None:
    graph, at = graph_of("x", lambda call, x: [call(aten.slice.Tensor, x, 0, start, end)])
    shapes = propagate_shapes(graph, [(S,)])
    assert shapes.equal(shapes.shape(at["slice_1"])[0], expected)
    for size in (2, 3, 7):
        x = torch.ones(size)
        shapes.verify({at["x"]: x, at["slice_1"]: aten.slice.Tensor(x, 0, start, end)})


def test_an_index_that_may_be_a_mask_is_not_covered() -> None:
    graph, at = graph_of("x i", lambda call, x, i: [call(aten.index.Tensor, x, [i])])
    shapes = propagate_shapes(graph, [(S, T), (U,)])
    assert shapes.unknown[at["index"]] == "an index may be a mask"
    at["i"].meta["val"] = torch.zeros(3, dtype=torch.long)
    assert propagate_shapes(graph, [(S, T), (U,)]).shape(at["index"]) == (U, T)


def test_metadata_stands_in_for_a_missing_rule() -> None:
    def build(call, x):
        found = call(aten.nonzero.default, x)
        return [call(aten.mul.Tensor, found, 2)]

    graph, at = graph_of("x", build)
    at["nonzero"].meta["val"] = torch.zeros(9, 2)
    assert propagate_shapes(graph, [(S, T)]).shape(at["mul"]) == (9, 2)
    shapes = propagate_shapes(graph, [(S, T)], use_meta=False)
    assert shapes.unknown[at["nonzero"]] == "no rule for aten.nonzero.default"
    assert shapes.unknown[at["mul"]] == "waits for nonzero"


def test_several_results_and_numbers() -> None:
    def build(call, x):
        parts = call(aten.split.Tensor, x, 4)
        size = call(aten.sym_size.int, x, 1)
        return [call(operator.getitem, parts, 1), call(aten.full.default, [size, 2], 0)]

    graph, at = graph_of("x", build)
    shapes = propagate_shapes(graph, [(6, S)])
    assert shapes.value(at["split"]) == [(4, S), (2, S)]
    assert shapes.shape(at["split"]) is None
    assert shapes.shape(at["getitem"]) == (2, S)
    assert shapes.value(at["sym_size"]) == S
    assert shapes.shape(at["full"]) == (S, 2)


# Errors and text


@pytest.mark.parametrize(
    ("target", "shapes", "message"),
    [
        (aten.mm.default, [(S, 3), (4, T)], "sizes 3 and 4 must be equal"),
        (aten.mm.default, [(S, T), (T + 1, 3)], r"sizes s1 and s1 \+ 1 must be equal"),
        (aten.mm.default, [(S, T, 2), (T, 3)], r"operand 0 has the shape \[s0, s1, 2\]"),
        (aten.add.Tensor, [(S, 3), (S, 4)], "sizes 3 and 4 must be equal"),
    ],
)
def test_contradictions_name_the_node(target, shapes, message) -> None:
    graph, at = graph_of("x y", lambda call, x, y: [call(target, x, y)])
    node = [*graph.nodes][2]
    node.meta["stack_trace"] = '  File "model.py", line 12, in forward\n    return x @ y'
    with pytest.raises(BackendError, match=message) as raised:
        propagate_shapes(graph, shapes)
    assert f"%{node.name} " in str(raised.value)
    assert "model.py:12 in forward" in str(raised.value)
    assert "minimum" in raised.value.remedy


def test_views_keep_the_number_of_elements() -> None:
    graph, at = graph_of("x", lambda call, x: [call(aten.view.default, x, [3, 5])])
    with pytest.raises(BackendError, match="sizes 16 and 15"):
        propagate_shapes(graph, [(4, 4)])
    assert propagate_shapes(graph, [(3, S)]).shape(at["x"]) == (3, 5)


def test_one_shape_for_each_placeholder() -> None:
    graph, _ = graph_of("x y", lambda call, x, y: [call(aten.mm.default, x, y)])
    with pytest.raises(BackendError, match="2 placeholders, not 1"):
        propagate_shapes(graph, [(S, T)])


def test_verify_names_what_differs() -> None:
    graph, at = graph_of("x y", lambda call, x, y: [call(aten.mm.default, x, y)])
    shapes = propagate_shapes(graph, [(S, T), (T, 3)])
    x, y = torch.ones(4, 5), torch.ones(5, 3)
    shapes.verify({at["x"]: x, at["y"]: y, at["mm"]: x @ y})
    with pytest.raises(BackendError, match=r"mm: \[s0, 3\] is \[6, 3\]"):
        shapes.verify({at["x"]: x, at["y"]: y, at["mm"]: torch.ones(6, 3)})


def test_text() -> None:
    def build(call, x, w, b):
        product = call(aten.mm.default, x, w)
        return [call(aten.relu.default, call(aten.add.Tensor, product, b)), call(len, x)]

    graph, _ = graph_of("x w b", build)
    assert str(propagate_shapes(graph, [(S, 16), None, (T,)])) == (
        "x: [s0, 16] = placeholder\n"
        "w: [16, s1] = placeholder\n"
        "b: [s1] = placeholder\n"
        "mm: [s0, s1] = mm.default(x, w)\n"
        "add: [s0, s1] = add.Tensor(mm, b)\n"
        "relu: [s0, s1] = relu.default(add)\n"
        "len_1: ? = len(x)  # no rule for <built-in function len>\n"
        "w.1 == s1"
    )


def test_a_backend_reads_shapes_from_its_context() -> None:
    context = BackendContext(dynamic=True)
    texts = []

    def backend(gm, example_inputs, context=context):
        def compile_aten(aten_gm, inputs):
            texts.append(str(propagate_shapes(aten_gm.graph, shape_env=context.shape_env)))
            return aten_gm.forward

        return aot(gm, example_inputs, context, forward=compile_aten)

    class Printing:
        name = "printing"
        exact_random = True
        supports = staticmethod(lambda gm: [])
        compile = staticmethod(lambda gm, inputs, context: backend(gm, inputs, context))

    x = torch.randn(3, 5)
    with torch.no_grad():
        compile_for(Printing(), lambda x: (x * 2).sum(1), [x], context=context)(x)
    (text,) = texts
    assert "sum.dim_IntList(mul)" in text and "?" not in text


def test_branches_that_join_cost_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each join multiplies the work behind it, forty of them never end."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x = graph.call_function(aten.add.Tensor, (x, y))
    for _ in range(40):
        a, b, c = (graph.call_function(aten.relu.default, (x,)) for _ in range(3))
        joined = graph.call_function(aten.add.Tensor, (a, b))
        inner = graph.call_function(aten.mul.Tensor, (joined, c))
        x = graph.call_function(aten.add.Tensor, (inner, x))
    graph.output(x)
    visits = 0
    visit = shape_propagation._Propagation._visit

    def counted(self: Any, node: Any) -> None:
        nonlocal visits
        visits += 1
        assert visits < 10 * len(graph.nodes)
        visit(self, node)

    monkeypatch.setattr(shape_propagation._Propagation, "_visit", counted)
    shapes = propagate_shapes(graph, [(S, 8), (S, 8)])
    assert shapes.shape(x) == (S, 8)
