"""Products with what follows and precedes them: functions, sizes, how many kernels they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = [
    "CONFIGURATIONS",
    "CUT_CASES",
    "DESCRIBED_CASES",
    "DTYPES",
    "LARGE",
    "LARGE_CONFIGURATIONS",
    "PRODUCTS",
    "TIMED_CASES",
    "ProductCase",
    "Tensors",
    "arguments_of",
]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class ProductCase:
    """One function of tensors.

    Attributes:
        function: gives a list of tensors.
        sizes: of its arguments.
        products: how many of the kernels hold products.
        kernels: how many kernels there are.
    """

    function: Callable[..., Tensors]
    sizes: tuple[tuple[int, ...], ...]
    products: int = 1
    kernels: int = 1


def arguments_of(case: ProductCase, dtype: torch.dtype) -> Tensors:
    """The same for a case; about as large as activations are."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(sizes, generator=generator).to(dtype) for sizes in case.sizes]


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, rows, columns = x.shape
    x = x[:, :, None].expand(batch, heads, times, rows, columns)
    return x.reshape(batch * heads * times, rows, columns)


def merged_heads(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Tensors:
    """One product for queries, keys and values, each stored by heads."""
    made = F.linear(x, w, b).view(2, 5, 3, 4, 8)
    return [one.transpose(1, 2).contiguous() * 2 for one in made.unbind(2)]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def rotary(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    """One product for queries, keys and values, of which two are rotated where they are made."""
    q, k, v = (x @ w).split([32, 16, 16], -1)
    q, k, v = (one.view(2, 5, -1, 8).transpose(1, 2) for one in (q, k, v))
    return [rotated(q, cos, sin), rotated(k, cos, sin), v * 1]


def large_rotary(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    return rotated_heads(F.linear(x, w), cos, sin)


def rotated_heads(made: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    q, k, v = made.split([1024, 512, 512], -1)
    q, k, v = (one.view(2, 256, -1, 128).transpose(1, 2) for one in (q, k, v))
    return [rotated(q, cos, sin), rotated(k, cos, sin), v * 1]


def rotary_with_bias(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Tensors:
    """What is added at the other column of a pair is added there, too; the ends cut tiles."""
    q, k = F.linear(x, w, b).split([24, 16], -1)
    return [rotated(one.reshape(2, 5, -1, 8), cos, sin) for one in (q, k)]


def interleaved(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    """Neighbours form pairs."""
    made = (x @ w).view(2, 5, 4, 4, 2)
    first, second = made.unbind(-1)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return [turned.flatten(-2)]


def unlike_pieces(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """Pieces with one index and different places: only the product's own kernel has them apart."""
    q, k, _ = (x @ w).view(2, 5, 3, 4, 8).unbind(2)
    return [q * k]


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Tensors:
    return [F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) + x]


def windows(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """A shifted image in windows, multiplied where it lies."""
    rolled = torch.roll(x, (-1, -1), (1, 2))
    cut = rolled.view(1, 2, 3, 2, 3, 16).permute(0, 1, 3, 2, 4, 5).reshape(36, 16)
    return [(cut @ w).relu()]


def kept_and_used(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Tensors:
    made = x @ w + b
    return [made, made * 2, made.relu().t().contiguous()]


def normalised(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Tensors:
    added = y + x @ w
    return [added, F.layer_norm(added, (added.shape[-1],))]


def twice(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """A second product of what the first one gives."""
    return [(x @ w).relu() @ w]


PRODUCTS: dict[str, ProductCase] = {
    "plain": ProductCase(lambda a, b: [a @ b], ((33, 50), (50, 17))),
    "large": ProductCase(lambda a, b: [a @ b], ((130, 70), (70, 40))),
    "one row": ProductCase(lambda a, b, c: [(a @ b + c).relu()], ((1, 51), (51, 33), (33,))),
    "one column": ProductCase(lambda a, b, c: [(a @ b + c).relu()], ((33, 51), (51, 1), (1,))),
    "one number": ProductCase(lambda a, b: [(a @ b).relu()], ((1, 51), (51, 1))),
    "outer": ProductCase(lambda a, b: [(a @ b).relu()], ((7, 1), (1, 9))),
    "no depth": ProductCase(lambda a, b, c: [(a @ b + c).cos()], ((7, 0), (0, 9), (9,))),
    "no rows": ProductCase(lambda a, b, c: [(a @ b + c).relu()], ((0, 5), (5, 9), (9,))),
    "no batch": ProductCase(lambda a, b: [(a @ b).relu()], ((0, 4, 5), (0, 5, 9))),
    "batch": ProductCase(lambda a, b: [(a @ b).relu()], ((3, 33, 50), (3, 50, 17))),
    "linear gelu": ProductCase(
        lambda x, w, b: [F.gelu(F.linear(x, w, b))], ((3, 11, 40), (24, 40), (24,))
    ),
    "linear tanh gelu": ProductCase(
        lambda x, w, b: [F.gelu(F.linear(x, w, b), approximate="tanh")],
        ((3, 11, 40), (24, 40), (24,)),
    ),
    "addmm": ProductCase(
        lambda c, a, b: [torch.addmm(c, a, b, beta=0.5, alpha=2)], ((4, 9), (4, 12), (12, 9))
    ),
    "baddbmm": ProductCase(
        lambda c, a, b: [torch.baddbmm(c, a, b, alpha=3).tanh()],
        ((2, 1, 9), (2, 4, 12), (2, 12, 9)),
    ),
    "computed addend": ProductCase(
        lambda c, a, b: [torch.addmm(c * 2, a, b).tanh()], ((9,), (4, 12), (12, 9))
    ),
    "residual": ProductCase(
        lambda x, w, b, y: [y + F.silu(F.linear(x, w, b))], ((9, 40), (24, 40), (24,), (9, 24))
    ),
    "casts": ProductCase(
        lambda x, w: [(x @ w).float().exp(), ((x @ w).double() * 2).to(x.dtype)],
        ((9, 20), (20, 12)),
        2,
        2,
    ),
    "dual": ProductCase(lambda x, g, u: [F.silu(x @ g) * (x @ u)], ((19, 40), (40, 24), (40, 24))),
    "swiglu": ProductCase(swiglu, ((9, 40), (56, 40), (56, 40), (40, 56)), 2, 2),
    "prologue": ProductCase(
        lambda g, u, w: [(F.silu(g) * u) @ w + 1], ((5, 21), (5, 21), (21, 18))
    ),
    "scaled": ProductCase(
        lambda q, k: [((q * 0.3) @ k.transpose(1, 2)).sigmoid()], ((4, 9, 16), (4, 7, 16))
    ),
    "merged heads": ProductCase(merged_heads, ((2, 5, 40), (96, 40), (96,))),
    "rotary": ProductCase(rotary, ((2, 5, 40), (40, 64), (5, 8), (5, 8))),
    "rotary with bias": ProductCase(
        rotary_with_bias, ((2, 5, 40), (40, 40), (40,), (5, 1, 8), (5, 1, 8))
    ),
    # Pairs of neighbours are stacked: that is no exchange within a tile yet.
    "interleaved rotary": ProductCase(
        interleaved, ((2, 5, 40), (40, 32), (5, 1, 4), (5, 1, 4)), 1, 2
    ),
    "part of one column": ProductCase(
        lambda x, w: [(x @ w).view(2, 5, 1).transpose(0, 1)[1:] * 2], ((10, 24), (24, 1))
    ),
    "turned": ProductCase(lambda x, w: [(x.t() @ w.t()).relu()], ((72, 40), (56, 72))),
    "tails": ProductCase(lambda x, w: [(x[1:, 8:] @ w).relu()], ((38, 80), (72, 56))),
    "chunks": ProductCase(
        lambda x, w, b: [one * k for k, one in enumerate((x @ w + b).chunk(3, 1))],
        ((10, 20), (20, 96), (96,)),
    ),
    "slices": ProductCase(
        lambda x, w, b: [(y := x @ w)[:, 3:9].relu() + b[3:9], y[:, 40] * 2],
        ((10, 20), (20, 96), (96,)),
    ),
    "unlike pieces": ProductCase(unlike_pieces, ((10, 20), (20, 96)), 1, 2),
    "transposes": ProductCase(
        lambda x, w: [
            (x.transpose(0, 1).reshape(10, 12) @ w.t()).view(5, 2, 4).transpose(0, 1) * 2
        ],
        ((2, 5, 12), (4, 12)),
    ),
    "heads to rows": ProductCase(
        lambda a, w, b: [F.linear(a.transpose(1, 2).reshape(2, 5, 32), w, b).relu()],
        ((2, 4, 5, 8), (24, 32), (24,)),
    ),
    "strided": ProductCase(lambda a, b: [(a[::2, 1::3] @ b[:, ::2]).relu()], ((20, 40), (13, 18))),
    "expanded": ProductCase(
        lambda a, b: [(a.expand(7, 12) @ b.expand(12, 9)).relu()], ((1, 12), (12, 1))
    ),
    "repeated": ProductCase(
        lambda q, k: [(q @ repeated(k, 3).transpose(1, 2)).relu()], ((12, 5, 8), (2, 2, 9, 8))
    ),
    "cat operand": ProductCase(
        lambda x, y, w: [(torch.cat([x, y], 1) @ w).relu()], ((5, 21), (5, 12), (33, 14))
    ),
    "padded operand": ProductCase(
        lambda x, w: [(F.pad(x, (1, 2), value=0.5) @ w).relu()], ((5, 21), (24, 14))
    ),
    "windows": ProductCase(windows, ((1, 6, 6, 16), (16, 20))),
    "embedding": ProductCase(
        lambda w, p: [(F.embedding(torch.tensor([1, 0, 5, 3]), w) @ p).relu()], ((6, 12), (12, 9))
    ),
    "kept and used": ProductCase(kept_and_used, ((5, 21), (21, 12), (12,))),
    "normalised": ProductCase(normalised, ((5, 21), (21, 12), (5, 12)), 1, 2),
    "twice": ProductCase(twice, ((5, 12), (12, 12)), 2, 2),
    "elsewhere": ProductCase(lambda a, b: [(y := a @ b) + y.t()], ((9, 7), (7, 9)), 1, 2),
    "dependent": ProductCase(lambda a, b: [(y := a @ b) * (a @ y)], ((9, 9), (9, 9)), 2, 2),
    "three": ProductCase(
        lambda a, b, c, d: [(a @ b) * (a @ c) * (a @ d)], ((9, 8), (8, 7), (8, 7), (8, 7)), 2, 2
    ),
    "batched dual": ProductCase(
        lambda a, b, c: [(a @ b) * (a @ c).sigmoid()], ((3, 9, 8), (3, 8, 7), (3, 8, 7))
    ),
    "added product": ProductCase(
        lambda a, b: [torch.addmm((a @ b).t(), a, b)], ((9, 9), (9, 9)), 2, 2
    ),
    "chosen": ProductCase(
        lambda a, b: [torch.where((y := a @ b) > 0, y, y * 0.1), (y > 0) * y], ((9, 8), (8, 7))
    ),
    "triangle": ProductCase(lambda a, b: [(a @ b).tril() * 2], ((9, 8), (8, 9))),
    "uneven pieces": ProductCase(
        lambda a, b: [one.relu() for one in (a @ b).split([2, 3, 4], 1)], ((9, 8), (8, 9))
    ),
    "reversed": ProductCase(lambda a, b: [(a @ b).flip(0) * 2], ((9, 8), (8, 7))),
    "rolled": ProductCase(lambda a, b: [torch.roll(a @ b, 1, 0) * 2], ((9, 8), (8, 7))),
    "unfolded": ProductCase(
        lambda x, w: [F.linear(F.unfold(x, 3).transpose(1, 2), w).relu()], ((2, 3, 6, 6), (5, 27))
    ),
    "gathered": ProductCase(
        lambda a, b: [(a[torch.tensor([1, -1, 3])] @ b).relu()], ((9, 8), (8, 7))
    ),
    "part of a cat": ProductCase(
        lambda a, b: [torch.cat([(a @ b).relu(), a], 1)], ((9, 8), (8, 7)), 1, 2
    ),
    "long": ProductCase(lambda a, b, c: [F.gelu(a @ b + c)], ((3, 4500), (4500, 33), (33,)), 1, 2),
    "row sums": ProductCase(lambda a, b: [(a @ b).sum(-1)], ((9, 12), (12, 20)), 1, 2),
    "broadcast": ProductCase(lambda a, b, c: [a @ b + c], ((9, 12), (12, 20), (3, 9, 20)), 1, 2),
}

# As layers are; these are compiled and not run.
LARGE: dict[str, ProductCase] = {
    "large linear gelu": ProductCase(
        lambda x, w, b: [F.gelu(F.linear(x, w, b))], ((2048, 768), (3072, 768), (3072,))
    ),
    "wide gelu": ProductCase(
        lambda x, w, b, y: [F.gelu(F.linear(x, w, b), approximate="tanh") + y],
        ((8192, 64), (4096, 64), (4096,), (8192, 4096)),
    ),
    "wide swiglu": ProductCase(
        lambda x, g, u: [F.silu(F.linear(x, g)) * F.linear(x, u)],
        ((8192, 256), (1024, 256), (1024, 256)),
    ),
    "large swiglu": ProductCase(
        lambda x, g, u: [F.silu(F.linear(x, g)) * F.linear(x, u)],
        ((512, 1024), (2048, 1024), (2048, 1024)),
    ),
    "decoding swiglu": ProductCase(
        lambda x, g, u: [F.silu(F.linear(x, g)) * F.linear(x, u)],
        ((1, 2048), (4096, 2048), (4096, 2048)),
    ),
    "large residual": ProductCase(
        lambda x, w, y: [y + F.linear(x, w)], ((1024, 1024), (1024, 1024), (1024, 1024))
    ),
    "large rotary": ProductCase(
        large_rotary, ((2, 256, 1024), (2048, 1024), (256, 128), (256, 128))
    ),
    "large rotary with bias": ProductCase(
        lambda x, w, b, cos, sin: rotated_heads(F.linear(x, w, b), cos, sin),
        ((2, 256, 1024), (2048, 1024), (2048,), (256, 128), (256, 128)),
    ),
    "large heads": ProductCase(
        lambda x, w: [one.transpose(1, 2) * 2 for one in (x @ w).view(2, 256, 3, 8, 64).unbind(2)],
        ((2, 256, 512), (512, 1536)),
    ),
}

CUT_CASES = (
    "large",
    "batch",
    "linear gelu",
    "dual",
    "merged heads",
    "kept and used",
    "no depth",
    "rotary",
    "rotary with bias",
    "interleaved rotary",
    "turned",
    "tails",
)
"""Those that run in every configuration."""

TIMED_CASES = (
    "addmm",
    "dual",
    "heads to rows",
    "kept and used",
    "linear gelu",
    "merged heads",
    "prologue",
    "windows",
)
"""Those of which both ways that a measurement compares are run."""

# block_m, block_n, block_k, group_m, warps, stages, split_k, programs, described
LARGE_CONFIGURATIONS: list[tuple[int, ...]] = [
    (128, 128, 64, 8, 8, 3, 1, 132),
    (128, 64, 64, 4, 4, 4, 4),
    (64, 128, 32, 8, 4, 2, 2, 264),
    (16, 64, 128, 1, 4, 3),
]
"""Those that "large linear gelu" is compiled in."""

DESCRIBED_CASES: dict[str, tuple[int, ...]] = {
    "large linear gelu": (128, 256, 64, 8, 8, 3, 1, 132, True),
    "large residual": (128, 256, 64, 8, 8, 3, 1, 132, True),
    "large rotary": (128, 256, 64, 8, 8, 3, 1, 132, True),
    "large heads": (128, 128, 64, 16, 8, 4, 1, 132, True),
    "wide swiglu": (128, 128, 64, 16, 8, 3, 1, 132, True),
    "turned": (128, 256, 64, 8, 8, 3, 1, 132, True),
    "large rotary with bias": (128, 128, 64, 16, 8, 4, 1, 132, True),
}
"""Those whose operands descriptors load, compiled."""

CONFIGURATIONS: list[tuple[int, ...]] = [
    (16, 16, 16, 1, 2, 2),
    (16, 32, 16, 2, 4, 3, 1, 3),
    (32, 16, 32, 3, 4, 2, 3),
    (16, 16, 16, 2, 2, 2, 5, 4),
    (16, 32, 16, 2, 4, 2, 1, 3, True),
    (16, 64, 32, 1, 1, 2, 1, 2, True),
]
