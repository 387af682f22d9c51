"""The programs of the dvm benchmark: the operator sets of its paper and chains of vector operators.

Program = name function inputs [numexpr's expression] tolerance [its own check]
inputs  = bytes of the first argument -> the arguments of a call
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Arguments = tuple[Any, ...]

WIDTH = 1024
HEAD = 64
DROPPED = 0.1
LARGEST, LARGEST_QUICK = 64 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class Program:
    """A function and how a benchmark feeds it.

    Attributes:
        expression: the same for numexpr, over the function's parameters; empty where it lacks an
            operator or a dtype.
        check: what is wrong with a result, for one that eager's random numbers decide.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: Callable[[int], Arguments]
    expression: str = ""
    tolerance: tuple[float, float] = (1e-4, 1e-4)
    check: Callable[[Arguments, Tensor], str] | None = None


# -- chains -------------------------------------------------------------------------------------


def rows(size: int, itemsize: int = 4) -> int:
    """Rows of WIDTH elements in so many bytes."""
    return size // (WIDTH * itemsize)


def alike(count: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Arguments]:
    """Inputs of one shape and dtype."""

    def inputs(size: int) -> Arguments:
        shape = (rows(size, dtype.itemsize), WIDTH)
        return tuple(torch.randn(shape, dtype=dtype) for _ in range(count))

    return inputs


def add_mul_short(x: Tensor) -> Tensor:
    return (x + 1) * 2 + x


def add_mul(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (((x + y) * z + x) * y + 3) * z


def clamped(x: Tensor, y: Tensor) -> Tensor:
    lower = torch.relu(x * 2 + y).clamp(max=2)
    upper = torch.relu(y - x).clamp(min=1)
    return torch.where(x > y, lower, upper) * x


def exponential(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(-x) * torch.tanh(y) + torch.sigmoid(x + y) * y


def row_column(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return torch.relu((x * row + column) * column - row)


def row_column_inputs(size: int) -> Arguments:
    count = rows(size)
    return torch.randn(count, WIDTH), torch.randn(WIDTH), torch.randn(count, 1)


def mixed(x: Tensor, y: Tensor) -> Tensor:
    left, right = x.float(), y.float()
    both = torch.tanh(left * right + left) * right - 1
    return (both.half() + x).to(torch.bfloat16) * y


def mixed_inputs(size: int) -> Arguments:
    shape = (rows(size, 2), WIDTH)
    return torch.randn(shape).half(), torch.randn(shape).to(torch.bfloat16)


def masks(x: Tensor, y: Tensor) -> Tensor:
    inside = (x > y) & (x < 2) | ~(y > 0)
    return torch.where(inside, x * y, torch.where(x == y, x, x - y))


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def with_rows(count: int) -> Callable[[int], Arguments]:
    """A matrix and some vectors of its width."""
    return lambda size: (
        torch.randn(rows(size), WIDTH),
        *(torch.randn(WIDTH) for _ in range(count)),
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_inputs(size: int) -> Arguments:
    """(batch × heads, length, head size), and two tables of (length, head size)."""
    length = min(512, size // (4 * HEAD))
    heads = size // (4 * HEAD * length)
    return torch.randn(heads, length, HEAD), torch.randn(length, HEAD), torch.randn(length, HEAD)


def gelu_tail(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias) * gate


def gelu_inputs(size: int) -> Arguments:
    return torch.randn(rows(size), WIDTH), torch.randn(rows(size), WIDTH), torch.randn(WIDTH)


def dropout_residual(x: Tensor, residual: Tensor) -> Tensor:
    return F.dropout(x, DROPPED, training=True) + residual


def check_dropout(arguments: Arguments, result: Tensor) -> str:
    """Each element is dropped or scaled, in about the right share."""
    x, residual = arguments
    kept = (result - residual).abs() > 1e-6
    wanted = torch.where(kept, x / (1 - DROPPED), 0) + residual
    share = 1 - kept.float().mean().item()
    if not torch.allclose(result, wanted, 1e-4, 1e-5):
        return "an element is neither dropped nor scaled"
    return "" if abs(share - DROPPED) < 0.02 else f"{share:.2f} of the elements are dropped"


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, -1), target)


def cross_entropy_inputs(size: int) -> Arguments:
    return torch.randn(rows(size), WIDTH), torch.randint(0, WIDTH, (rows(size),))


_RELU = "where({0} > 0, {0}, 0)"
_CLAMPED = (
    "where(x > y,"
    " where(x * 2 + y < 0, 0, where(x * 2 + y > 2, 2, x * 2 + y)),"
    " where(y - x < 1, 1, y - x)) * x"
)
_MASKS = "where((x > y) & (x < 2) | ~(y > 0), x * y, where(x == y, x, x - y))"

CHAINS = (
    Program("add-mul, 1 input", add_mul_short, alike(1), "(x + 1) * 2 + x"),
    Program("add-mul, 3 inputs", add_mul, alike(3), "(((x + y) * z + x) * y + 3) * z"),
    Program("relu-clamp-where", clamped, alike(2), _CLAMPED),
    Program(
        "exp-tanh-sigmoid",
        exponential,
        alike(2),
        "exp(-x) * tanh(y) + y / (1 + exp(-(x + y)))",
    ),
    Program(
        "row and column",
        row_column,
        row_column_inputs,
        _RELU.format("((x * row + column) * column - row)"),
    ),
    Program("float16-bfloat16", mixed, mixed_inputs, tolerance=(2e-2, 2e-2)),
    Program("masks", masks, alike(2), _MASKS),
    Program("softmax", softmax, alike(1)),
    Program("RMSNorm", rms_norm, with_rows(1)),
    Program("LayerNorm", layer_norm, with_rows(2)),
    Program("rotary", rotary, rotary_inputs),
    Program("bias-GELU-mul", gelu_tail, gelu_inputs),
    Program("dropout-residual", dropout_residual, alike(2), check=check_dropout),
    Program("cross-entropy", cross_entropy, cross_entropy_inputs),
)


# -- products and what follows them: the size is that of the product ------------------------------


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def linear_inputs(narrow: int, wide: int) -> Callable[[int], Arguments]:
    """A layer from ``narrow`` to ``wide`` features."""
    return lambda size: (
        torch.randn(size // (4 * wide), narrow),
        torch.randn(wide, narrow) * narrow**-0.5,
        torch.randn(wide),
    )


def linear_norm(x: Tensor, weight: Tensor, residual: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(F.linear(x, weight) + residual, scale.shape, scale)


def linear_norm_inputs(size: int) -> Arguments:
    count = size // (4 * 256)
    return (
        torch.randn(count, 256),
        torch.randn(256, 256) / 16,
        torch.randn(count, 256),
        torch.randn(256),
    )


def scores(query: Tensor, key: Tensor) -> Tensor:
    return torch.softmax(torch.bmm(query, key) * HEAD**-0.5, -1)


def scores_inputs(size: int) -> Arguments:
    heads = size // (4 * 512 * 512)
    return torch.randn(heads, 512, HEAD), torch.randn(heads, HEAD, 512)


def convolved(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.relu(F.conv2d(x, weight, padding=weight.shape[-1] // 2) * scale + shift)


def images(channels: int, made: int, kernel: int) -> Callable[[int], Arguments]:
    """A convolution of images of 56 by 56."""
    return lambda size: (
        torch.randn(size // (4 * made * 56 * 56), channels, 56, 56),
        torch.randn(made, channels, kernel, kernel) * (channels * kernel**2) ** -0.5,
        torch.randn(made, 1, 1),
        torch.randn(made, 1, 1),
    )


_LOOSE = (1e-3, 1e-3)

PRODUCTS = (
    Program("linear 64 to 512, GELU", linear_gelu, linear_inputs(64, 512), tolerance=_LOOSE),
    Program("linear 256 to 1024, GELU", linear_gelu, linear_inputs(256, 1024), tolerance=_LOOSE),
    Program("linear 768 to 3072, GELU", linear_gelu, linear_inputs(768, 3072), tolerance=_LOOSE),
    Program("linear 256, residual, LayerNorm", linear_norm, linear_norm_inputs, tolerance=_LOOSE),
    Program("scores of 512 tokens, softmax", scores, scores_inputs, tolerance=_LOOSE),
    Program("convolution 1 x 1, ReLU", convolved, images(64, 256, 1), tolerance=_LOOSE),
    Program("convolution 3 x 3, ReLU", convolved, images(64, 64, 3), tolerance=_LOOSE),
)


# -- operator sets ------------------------------------------------------------------------------

# (n, k) as in language models, of a size that two cores can do.
MATRICES = (
    (1024, 1024),
    (3072, 1024),
    (4096, 1024),
    (1024, 4096),
    (2048, 2048),
    (5632, 2048),
    (2048, 5632),
)


@dataclass(frozen=True, slots=True)
class OperatorSet:
    """An operator and a way to draw the arguments of a call, tensors of at most so many bytes."""

    program: Program
    draw: Callable[[random.Random, int], Arguments]


def if_else_add(x: Tensor, y: Tensor, larger: bool) -> Tensor:
    return (x * 2 if larger else x * 4) + y


def balanced(x: Tensor) -> Tensor:
    """Rows and columns by their sums, in turns (Sinkhorn): each operator needs the one before."""
    x = x.exp()
    for _ in range(4):
        x = x / x.sum(0, keepdim=True)
        x = x / x.sum(1, keepdim=True)
    return x


def cube(
    chosen: random.Random, widths: tuple[int, ...] | range, largest: int
) -> tuple[int, int, int]:
    """Batch, length and width of a tensor of at most so many bytes."""
    batch, width = chosen.choice((1, 2, 4, 8)), chosen.choice(widths)
    most = largest // (4 * batch * width)
    return batch, chosen.randint(1, min(most, 2048)), width


def draw_norm(chosen: random.Random, largest: int) -> Arguments:
    shape = cube(chosen, (1024, 2048, 3072, 4096), largest)
    return torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])


def draw_branch(chosen: random.Random, largest: int) -> Arguments:
    shape = cube(chosen, range(64, 4097), largest)
    return torch.randn(shape), torch.randn(shape), chosen.random() < 0.5


def draw_addmm(chosen: random.Random, largest: int) -> Arguments:
    n, k = chosen.choice([(n, k) for n, k in MATRICES if 4 * n * k <= largest])
    return torch.randn(n), torch.randn(chosen.randint(1, 512), k), torch.randn(k, n)


def draw_matmul(chosen: random.Random, largest: int) -> Arguments:
    return draw_addmm(chosen, largest)[1:]


def no_inputs(size: int) -> Arguments:
    """Of a set, whose shapes are drawn."""
    raise NotImplementedError(size)


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight)


SETS = (
    OperatorSet(Program("LayerNorm", layer_norm, no_inputs), draw_norm),
    OperatorSet(Program("if-else-add", if_else_add, no_inputs), draw_branch),
    OperatorSet(Program("addmm", addmm, no_inputs, tolerance=(1e-3, 1e-2)), draw_addmm),
    OperatorSet(Program("matmul", matmul, no_inputs, tolerance=(1e-3, 1e-2)), draw_matmul),
)


def drawn(
    operators: OperatorSet, count: int, seed: int, largest: int = LARGEST
) -> Iterator[Arguments]:
    """Arguments of ``count`` calls, the same for the same seed, each made when it is asked for."""
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(count):
        yield operators.draw(chosen, largest)
