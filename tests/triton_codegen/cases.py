"""Graphs for the code generator: a function, its arguments, how many kernels it should become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["CASES", "Case", "graph_of"]


@dataclass(frozen=True)
class Case:
    """One graph.

    Attributes:
        function: gives a list of tensors.
        arguments: makes the arguments, from the seeded generator.
        kernels: how many fused kernels it should become; None where it does not matter.
        calls: the library operators that should remain.
        tolerance: absolute; by default torch's.
    """

    function: Callable[..., list[torch.Tensor]]
    arguments: Callable[[], list[Any]]
    kernels: int | None = 1
    calls: tuple[str, ...] = ()
    tolerance: float | None = None


def graph_of(case: Case, arguments: list[Any], mode: str = "fake") -> torch.fx.GraphModule:
    """The decomposed ATen graph of a case."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from magjit_triton.codegen.decompositions import decompositions

    return make_fx(case.function, decomposition_table=decompositions(), tracing_mode=mode)(
        *arguments
    )


def r(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*sizes).to(dtype)


def ints(low: int, high: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Any:
    return torch.randint(low, high, sizes).to(dtype)


bf16 = torch.bfloat16
nan, inf = float("nan"), float("inf")


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return [wide.to(x.dtype) * w]


def _places(x: torch.Tensor, count: int) -> torch.Tensor:
    """Indices that a kernel computes: too large from ``count`` on."""
    return (torch.arange(count, device=x.device) * 0.9).long()


def grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, groups, s, d).reshape(b, h * groups, s, d)


def window_attention(qkv: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    count, area, width = qkv.shape
    heads, size = 3, width // 9
    q, k, v = qkv.reshape(count, area, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
    weights = (q * size**-0.5 @ k.transpose(-2, -1) + bias).softmax(-1)
    return [(weights @ v).transpose(1, 2).reshape(count, area, width // 3).relu()]


def crossed(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Each result could be written over what the other one reads."""
    one, other = x @ y, y @ x
    return [other + y.sin(), one + y.cos()]


def activations(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        F.gelu(x),
        F.gelu(x, approximate="tanh"),
        F.silu(x),
        torch.tanh(x),
        torch.sigmoid(x),
        F.leaky_relu(x),
        F.elu(x),
        F.hardswish(x),
        F.softplus(x),
        F.mish(x),
    ]


def unary(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.abs() + 0.5
    small = torch.tanh(x) * 0.9
    names = "exp exp2 expm1 sin cos tan sinh cosh tanh asinh atan erf erfc floor ceil trunc round"
    found = [getattr(torch, name)(x) for name in names.split()]
    found += [getattr(torch, name)(y) for name in "log log2 log10 log1p sqrt rsqrt".split()]
    found += [getattr(torch, name)(small) for name in "asin acos atanh".split()]
    return [*found, torch.acosh(y + 1), torch.sign(x), torch.reciprocal(y), -x, torch.square(x)]


CASES: dict[str, Case] = {
    "pointwise": Case(lambda x, y: [(x * 2 + y).exp()], lambda: [r(5, 7), r(7)]),
    "unary": Case(unary, lambda: [r(40)]),
    "activations": Case(activations, lambda: [r(40)]),
    "softmax": Case(lambda x: [torch.softmax(x, -1)], lambda: [r(6, 7)]),
    "softmax_bf16": Case(lambda x: [torch.softmax(x, -1)], lambda: [r(6, 64, dtype=bf16)]),
    "log_softmax": Case(lambda x: [F.log_softmax(x, -1)], lambda: [r(6, 64)]),
    "softmax_long": Case(lambda x: [torch.softmax(x, -1)], lambda: [r(3, 20000)]),
    "layer_norm": Case(
        lambda x, w, b: [F.layer_norm(x, (64,), w, b)], lambda: [r(6, 64), r(64), r(64)]
    ),
    "layer_norm_long": Case(
        lambda x, w, b: [F.layer_norm(x, (20000,), w, b)], lambda: [r(3, 20000), r(20000), r(20000)]
    ),
    "rms_norm_bf16": Case(rms_norm, lambda: [r(6, 64, dtype=bf16), r(64, dtype=bf16)]),
    "residual_norm": Case(
        lambda x, y, w: [x + y, *rms_norm(x + y, w)],
        lambda: [r(6, 64, dtype=bf16), r(6, 64, dtype=bf16), r(64, dtype=bf16)],
    ),
    "group_norm": Case(
        lambda x, w, b: [F.group_norm(x, 4, w, b)], lambda: [r(2, 8, 5, 5), r(8), r(8)], None
    ),
    "columns": Case(lambda x: [x.sum(0), x.amax(0)], lambda: [r(300, 40)]),
    "inner_and_outer": Case(lambda x: [x.mean((0, 2))], lambda: [r(5, 6, 7)]),
    "argmax": Case(lambda x: [x.argmax(-1), x.amax(-1), x.argmin(0)], lambda: [r(6, 9)], 2),
    "argmax_long": Case(lambda x: [x.argmax(-1)], lambda: [r(3, 9001)]),
    "any_all": Case(lambda x: [(x > 0).any(-1), (x > -2).all(0)], lambda: [r(6, 9)], 2),
    "variance": Case(
        lambda x: [x.var(-1), x.var((0, 1), correction=0), *torch.var_mean(x, 1)],
        lambda: [r(5, 6, 7)],
        None,
    ),
    "whole_sum": Case(lambda x: [x.sum(), x.mean() * 2 + x], lambda: [r(5, 6)]),
    "sum_in_two_phases": Case(
        lambda x: [x.sum(), x.mean((0, 1)), x.amax(), x.float().mean()],
        lambda: [r(8, 72, 32, dtype=bf16)],
        None,
    ),
    "columns_in_two_phases": Case(lambda x: [x.sum(0)], lambda: [r(4096, 48)], 2, (), 1e-4),
    "moments_in_two_phases": Case(
        lambda x: [
            *torch.var_mean(x + 100, (0, 2, 3)),
            x.var((0, 2, 3), correction=0, keepdim=True),
            x.std(),
        ],
        lambda: [r(4, 2, 130, 128)],
        None,
    ),
    "moments_of_columns_in_two_phases": Case(
        lambda x: [*torch.var_mean(x.exp(), (0, 2, 3), keepdim=True)],
        lambda: [r(4, 16, 32, 33).contiguous(memory_format=torch.channels_last)],
        None,
    ),
    "batch_norm_in_training": Case(
        lambda x, m, v, w, b: [
            torch.ops.aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5)[0]
        ],
        lambda: [r(4, 3, 129, 130), r(3), r(3).abs() + 1, r(3), r(3)],
        None,
    ),
    "prime_length": Case(lambda x: [x.sum()], lambda: [r(16411)]),
    "transposed": Case(lambda x, y: [x.t() + y], lambda: [r(40, 70), r(70, 40)]),
    "roll": Case(lambda x: [torch.roll(x, (2, -3), (0, 1)) * 2], lambda: [r(9, 11)]),
    "cat": Case(lambda x, y: [torch.cat([x, y.exp()], 1) + 1], lambda: [r(4, 5), r(4, 3)]),
    "pad": Case(lambda x: [F.pad(x, (1, 2, 3, 0), value=2.5).relu()], lambda: [r(4, 5)]),
    "expand": Case(lambda x: [grouped(x, 2) * 2], lambda: [r(2, 3, 4, 5)]),
    "gather": Case(lambda x, i: [torch.gather(x, 1, i) + 1], lambda: [r(4, 9), ints(0, 9, (4, 6))]),
    "embedding": Case(
        lambda w, i: [F.embedding(i, w) * 2], lambda: [r(10, 6), ints(0, 10, (3, 4))]
    ),
    "index_negative": Case(lambda x, i: [x[:, i] + 1], lambda: [r(4, 9), ints(-9, 9, (5,))]),
    "index_computed": Case(lambda x: [x[_places(x, 5)] + 1], lambda: [r(4)]),
    "index_computed_within_a_border": Case(
        lambda x: [F.pad(x[:, _places(x, 5)], (3, 4)) + 1], lambda: [r(4, 4)]
    ),
    "index_computed_of_a_part": Case(
        lambda x: [torch.cat([x[_places(x, 5)], x.exp()]) + 1], lambda: [r(4)]
    ),
    "repeat": Case(lambda x: [x.repeat(2, 3) + 1], lambda: [r(4, 9)]),
    "windows": Case(
        lambda x: [x.view(2, 2, 4, 2, 4, 3).permute(0, 1, 3, 2, 4, 5).reshape(8, 16, 3) * 2],
        lambda: [r(2, 8, 8, 3)],
    ),
    "shuffle": Case(
        lambda x: [x.view(2, 2, 3, 4, 4).transpose(1, 2).reshape(2, 6, 4, 4).relu()],
        lambda: [r(2, 6, 4, 4)],
    ),
    "pixel_shuffle": Case(
        lambda x: [F.pixel_shuffle(x, 2) + 1, F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2) * 2],
        lambda: [r(1, 8, 3, 3)],
    ),
    "slice_scatter": Case(
        lambda x, y: [
            torch.slice_scatter(x, y + 1, 1, 2, 5) * 2,
            torch.select_scatter(x, y[:, 0], 1, 3),
        ],
        lambda: [r(4, 8), r(4, 3)],
    ),
    "ranges": Case(
        lambda x: [x + torch.arange(6), torch.triu(x), torch.tril(x, -1)], lambda: [r(6, 6)]
    ),
    "integers": Case(
        lambda x, y: [
            x // y,
            x % y,
            x * y,
            torch.div(x, y, rounding_mode="trunc"),
            torch.fmod(x, y),
            torch.maximum(x, y),
            x / y,
        ],
        lambda: [ints(-50, 50, (40,)), torch.tensor([-3, 3, 7, -7] * 10)],
    ),
    "divisions": Case(
        lambda x, y: [torch.floor_divide(x, y), torch.remainder(x, y), torch.fmod(x, y), x / y],
        lambda: [r(40), torch.cat([r(38), torch.tensor([0.0, inf])])],
    ),
    "nan": Case(
        lambda x, y: [
            torch.maximum(x, y),
            torch.minimum(x, y),
            x.clamp(-1, 1),
            torch.where(x > y, x, y),
            x.isnan(),
            x.isinf(),
        ],
        lambda: [torch.tensor([1, nan, 2, inf]), torch.tensor([nan, 1, -2, -inf])],
    ),
    "nan_rows": Case(
        lambda x: [x.amax(-1), x.amin(-1), x.argmax(-1)],
        lambda: [torch.tensor([[1, nan, 2], [3, -inf, 1], [-inf, -inf, -inf]])],
    ),
    "int8": Case(
        lambda x, y: [x + y, x * y, -x, x.abs(), (x + y) > 3, x.sum(-1)],
        lambda: [ints(-128, 128, (8, 8), torch.int8), ints(-128, 128, (8, 8), torch.int8)],
    ),
    "uint8": Case(
        lambda x, y: [x + y, x - y, x * y, x.float() / 3],
        lambda: [ints(0, 256, (8, 8), torch.uint8), ints(0, 256, (8, 8), torch.uint8)],
    ),
    "booleans": Case(
        lambda x, y: [x & y, x | y, ~x, x + y, x * y, x.sum(), x.float().mean()],
        lambda: [r(8, 8) > 0, r(8, 8) > 0],
    ),
    "double": Case(lambda x: [x.exp() * 0.1 + 1 / 3, x.softmax(-1)], lambda: [r(4, 6).double()]),
    "powers": Case(lambda x: [x**2, x**3, x.abs() ** 1.5, x.abs() ** -0.5, 2**x], lambda: [r(20)]),
    "half": Case(
        lambda x, y: [(x * y + x).relu(), (x - y).exp(), x.float() + y],
        lambda: [r(8, 8).half(), r(8, 8).half()],
    ),
    "rounding": Case(
        lambda x: [x.to(bf16), x.to(bf16).float(), x.half().float(), x.to(bf16).half()],
        lambda: [r(100)],
    ),
    "matmul": Case(
        lambda x, w, b: [F.gelu(x @ w + b)], lambda: [r(4, 5), r(5, 6), r(6)], 1, ("mm",)
    ),
    "matmul_views": Case(
        lambda x, w: [F.softmax((x.view(4, 2, 3).transpose(0, 1) @ w), -1)],
        lambda: [r(4, 6), r(2, 3, 6)],
        1,
        ("bmm",),
    ),
    "shared_matrix": Case(
        lambda x, w: [x[:, :3] @ w.t().expand(5, 6, 4)],
        lambda: [r(5, 3, 6), r(4, 6)],
        0,
        ("mm",),
    ),
    "grouped_attention": Case(
        lambda q, k, v: [F.scaled_dot_product_attention(q, grouped(k, 2), grouped(v, 2)) + 1],
        lambda: [r(2, 6, 3, 8), r(2, 3, 5, 8), r(2, 3, 5, 8)],
        1,
        ("scaled_dot_product_attention",),
    ),
    "grouped_product": Case(
        lambda q, k: [torch.softmax(q @ grouped(k, 2).transpose(2, 3), -1)],
        lambda: [r(2, 6, 3, 8), r(2, 3, 5, 8)],
        1,
        ("bmm",),
    ),
    "window_attention": Case(window_attention, lambda: [r(12, 25, 72), r(3, 25, 25)], 2, (), 1e-4),
    "window_attention_bf16": Case(
        window_attention,
        lambda: [r(12, 16, 144, dtype=bf16), r(3, 16, 16, dtype=bf16)],
        2,
        (),
        2e-2,
    ),
    "crossed_results": Case(crossed, lambda: [r(6, 6), r(6, 6)], 1, ("mm", "mm")),
    "convolution": Case(
        lambda x, w: [F.silu(F.conv2d(x, w, padding=1)).chunk(2, 1)[1] + 1],
        lambda: [r(2, 3, 8, 8), r(4, 3, 3, 3)],
        1,
        ("convolution",),
    ),
    "several_results": Case(
        lambda x: [torch.topk(x * 2, 3)[0] + 1], lambda: [r(4, 8)], 2, ("topk",)
    ),
    "products_in_a_cat": Case(
        lambda x, a, b, w: [torch.cat([x @ a, x @ b], 1) @ w],
        lambda: [r(9, 8), r(8, 6), r(8, 4), r(10, 3)],
        0,
        ("mm", "mm", "mm"),
    ),
    "products_in_a_result": Case(
        lambda x, a, b: [torch.cat([x @ a, x @ b], 1), x @ a],
        lambda: [r(9, 8), r(8, 6), r(8, 4)],
        0,
        ("mm", "mm", "mm"),
    ),
    "a_product_and_an_input_in_a_cat": Case(
        lambda x, a, w: [torch.cat([x @ a, x], 1) @ w],
        lambda: [r(9, 8), r(8, 6), r(14, 3)],
        1,
        ("mm", "mm"),
    ),
    "softmaxes_in_a_cat": Case(
        lambda x, a, b, w: [torch.cat([(x @ a).softmax(-1), (x @ b).softmax(-1)], 1) @ w],
        lambda: [r(9, 8), r(8, 6), r(8, 4), r(10, 3)],
        2,
        ("mm", "mm", "mm"),
    ),
    "a_token_before_norms": Case(
        lambda t, x, g, w: [torch.cat([t, F.layer_norm(x, (8,), g, g)], 0) @ w],
        lambda: [r(1, 8), r(9, 8), r(8), r(8, 3)],
        2,
        ("mm",),
    ),
    "a_cat_in_a_cat": Case(
        lambda x, a, b, w: [torch.cat([torch.cat([x @ a, x @ b], 1), x @ a + 1], 1) @ w],
        lambda: [r(9, 8), r(8, 6), r(8, 4), r(16, 3)],
        None,
    ),
    "a_part_is_read_too": Case(
        lambda x, a, b, w: (lambda one: [torch.cat([one, x @ b], 1) @ w, one.relu().sum(0)])(x @ a),
        lambda: [r(9, 8), r(8, 6), r(8, 4), r(10, 3)],
        1,
        ("mm", "mm", "mm"),
    ),
    "halves_turned_in_a_stack": Case(
        lambda x, a, b, w: [torch.stack([(x @ a).t(), (x @ b).t()]).view(-1, 9) @ w],
        lambda: [r(9, 8), r(8, 6), r(8, 6), r(9, 3)],
        None,
    ),
    "the_whole_is_read_by_a_kernel": Case(
        lambda x, a, b, w: (lambda c: [c @ w, c.exp().sum(1)])(torch.cat([x @ a, x @ b], 1)),
        lambda: [r(9, 8), r(8, 6), r(8, 4), r(10, 3)],
        1,
        ("mm", "mm", "mm"),
    ),
}
