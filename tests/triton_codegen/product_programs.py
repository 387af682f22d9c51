"""Whole programs whose products are ours; each raises where it is wrong."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import magjit
from magjit.plugin import BackendOptionError
from magjit_triton.codegen import compiler
from magjit_triton.codegen.decoding_kernels import DecodingKernel
from magjit_triton.codegen.matmul import steps
from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.codegen.matmul.kernel import MatmulKernel

__all__ = ["PROGRAMS"]

# The first call of a compiled function is eager: each is called more than once.
CALLS = 3

Program = Callable[[], None]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


@contextmanager
def kernels() -> Iterator[list[Any]]:
    """The kernels that are compiled inside."""
    found: list[Any] = []
    original = compiler.Program.compiled

    def compiled(self: Any) -> Any:
        made = original(self)
        found.extend(made.kernels)
        return made

    compiler.Program.compiled = compiled  # type: ignore[method-assign]
    try:
        yield found
    finally:
        compiler.Program.compiled = original  # type: ignore[method-assign]


def products(found: list[Any]) -> int:
    return sum(isinstance(one, MatmulKernel) for one in found)


def ours(function: Any, **options: Any) -> Any:
    return magjit.compile(
        function, backend="triton", fullgraph=True, options={"matmul": "triton"}, **options
    )


class Block(nn.Module):
    """A layer of a decoder with grouped queries and a cache."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.size, self.heads, self.groups = width // heads, heads, groups
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width // groups, bias=False)
        self.v = nn.Linear(width, width // groups, bias=False)
        self.out = nn.Linear(width, width)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, place: Tensor) -> Tensor:
        batch, count, width = x.shape
        y = self.norm(x)
        shape = (batch, count, -1, self.size)
        q = self.q(y).view(shape).transpose(1, 2)
        keys.index_copy_(2, place, self.k(y).view(shape).transpose(1, 2))
        values.index_copy_(2, place, self.v(y).view(shape).transpose(1, 2))
        k, v = (
            one[:, :, None].expand(-1, -1, self.groups, -1, -1).flatten(1, 2)
            for one in (keys, values)
        )
        made = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(made)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@program
def perceptron() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 9))
    x = torch.randn(7, 20)
    with torch.no_grad(), kernels() as found:
        call = ours(module)
        for _ in range(CALLS):
            torch.testing.assert_close(call(x), module(x), rtol=1e-5, atol=1e-5)
    assert products(found) == len(found) == 2


@program
def library_and_auto_leave_products_alone() -> None:
    x, w = torch.randn(7, 20), torch.randn(20, 9)
    for setting in ("library", "auto"):
        with kernels() as found:
            call = magjit.compile(
                lambda x, w: (x @ w).relu(), backend="triton", options={"matmul": setting}
            )
            for _ in range(CALLS):
                torch.testing.assert_close(call(x, w), (x @ w).relu())
        assert found
        assert not products(found)


@program
def unknown_setting() -> None:
    try:
        magjit.compile(torch.relu, backend="triton", options={"matmul": "cublas"})
    except BackendOptionError as error:
        assert "cublas" in str(error)
        assert "library" in str(error)
    else:
        raise AssertionError("nothing was raised")


@program
def decoder_layer() -> None:
    torch.manual_seed(0)
    module = Block()
    x, place = torch.randn(2, 1, 32), torch.tensor([3])
    caches = [torch.randn(2, 2, 6, 8) for _ in range(2)]
    eager, mine = copy.deepcopy(caches), copy.deepcopy(caches)
    with torch.no_grad(), kernels() as found:
        call = ours(module)
        for step in (3, 4, 0):
            place = torch.tensor([step])
            result = call(x, *mine, place)
            torch.testing.assert_close(result, module(x, *eager, place), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)
    # Keys and values are stored into their caches by the kernels that make them.
    assert products(found) == 6
    assert len(found) == 8


@program
def merged_projection_into_a_cache() -> None:
    def step(x: Tensor, w: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        made = (x @ w).view(2, 3, 3, 4, 8)
        q, k, v = (one.transpose(1, 2) for one in made.unbind(2))
        keys[:, :, 2:5] = k
        values[:, :, 2:5] = v
        return q * 2

    torch.manual_seed(0)
    x, w = torch.randn(6, 20), torch.randn(20, 96)
    caches = [torch.randn(2, 4, 7, 8) for _ in range(2)]
    eager, mine = copy.deepcopy(caches), copy.deepcopy(caches)
    call = ours(step)
    for _ in range(CALLS):
        expected = step(x, w, *eager)
        torch.testing.assert_close(call(x, w, *mine), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@program
def rotated_keys_into_a_cache() -> None:
    """Queries and keys are rotated, keys and values stored, where they are multiplied."""

    def step(
        x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        q, k, v = F.linear(x, w).split([64, 16, 16], -1)
        q, k, v = (one.view(2, 3, -1, 8).transpose(1, 2) for one in (q, k, v))
        keys[:, :, 2:5] = rotated(k, cos, sin)
        values[:, :, 2:5] = v
        return rotated(q, cos, sin)

    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 24), torch.randn(96, 24)
    cos, sin = torch.randn(3, 8), torch.randn(3, 8)
    caches = [torch.randn(2, 2, 7, 8) for _ in range(2)]
    for cut in (None, Configuration(16, 32, 16, 2, 4, 2, 1, 3, described=True)):
        for dtype in (torch.float32, torch.float16):
            given = [one.to(dtype) for one in (x, w, cos, sin)]
            eager, mine = ([one.to(dtype) for one in caches] for _ in range(2))
            with in_cut(cut), kernels() as found:
                call = ours(step)
                for _ in range(CALLS):
                    expected = step(*given, *eager)
                    near = {"rtol": 1e-2, "atol": 2e-2} if dtype == torch.float16 else {}
                    torch.testing.assert_close(call(*given, *mine), expected, **near)
                    torch.testing.assert_close(mine, eager, **near)
            assert products(found) == len(found) == 1


@program
def a_cache_that_is_read_and_written() -> None:
    """What other points of a kernel may have written is not read by it."""

    def step(x: Tensor, w: Tensor, keys: Tensor) -> Tensor:
        q, k = (x @ w).split([16, 16], -1)
        keys[1:4] = k + keys[2:5]
        return q * 2

    torch.manual_seed(0)
    x, w, keys = torch.randn(3, 24), torch.randn(24, 32), torch.randn(6, 16)
    eager, mine = keys.clone(), keys.clone()
    call = ours(step)
    for _ in range(CALLS):
        torch.testing.assert_close(call(x, w, mine), step(x, w, eager), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)


@contextmanager
def in_cut(cut: Configuration | None) -> Iterator[None]:
    """All products in one configuration."""
    original = steps.default
    if cut is not None:
        steps.default = lambda extent, work, multiprocessors: cut
    try:
        yield
    finally:
        steps.default = original


@program
def described_rows_of_any_number() -> None:
    """The sizes in descriptors are those of the call."""

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 40), nn.ReLU()).half().requires_grad_(requires_grad=False)
    cut = Configuration(16, 16, 16, 2, 4, 2, 1, 3, described=True)
    with in_cut(cut), kernels() as found:
        call = ours(network, dynamic=True)
        for rows in (5, 33, 70, 8, 33):
            x = torch.randn(rows, 24).half()
            torch.testing.assert_close(call(x), network(x), rtol=1e-2, atol=1e-2)
    (kernel,) = {one.source: one for one in found if one.symbols}.values()
    assert kernel.configuration.described


@program
def descriptors_keep_nothing_alive() -> None:
    w = torch.randn(32, 24).half()
    cut = Configuration(16, 16, 16, 2, 4, 2, 1, 3, described=True)
    with in_cut(cut):
        call = ours(lambda x, w: F.linear(x, w).relu())
        for _ in range(CALLS):
            x = torch.randn(16, 24).half()
            place = weakref.ref(x)
            call(x, w)
            del x
            assert place() is None


@program
def any_sizes() -> None:
    def network(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b)) + y

    with kernels() as found:
        call = ours(network, dynamic=True)
        for rows, columns, depth in (
            (5, 7, 9),
            (33, 18, 40),
            (1, 64, 3),
            (70, 5, 100),
            (16, 16, 16),
        ):
            sizes = ((rows, depth), (columns, depth), (columns,), (rows, columns))
            arguments = [torch.randn(one) for one in sizes]
            torch.testing.assert_close(call(*arguments), network(*arguments), rtol=1e-4, atol=1e-4)
    assert any(one.symbols for one in found if isinstance(one, MatmulKernel))


@program
def any_sizes_of_batches() -> None:
    def network(q: Tensor, k: Tensor) -> Tensor:
        return ((q * 0.5) @ k.transpose(1, 2)).sigmoid()

    call = ours(network, dynamic=True)
    for batch, rows, columns in ((2, 5, 7), (3, 33, 18), (5, 1, 64)):
        q, k = torch.randn(batch, rows, 12), torch.randn(batch, columns, 12)
        torch.testing.assert_close(call(q, k), network(q, k), rtol=1e-5, atol=1e-5)


@program
def any_lengths() -> None:
    """Keys and values grow by a ``cat`` that is never made."""

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return F.scaled_dot_product_attention(q, keys, values)

    with kernels() as found:
        call = ours(step)
        for length in (5, 33, 700, 40, 41, 900):
            q, k, v = (torch.randn(1, 2, 1, 16) for _ in range(3))
            keys, values = (torch.randn(1, 2, length, 16) for _ in range(2))
            arguments = (q, k, v, keys, values)
            torch.testing.assert_close(call(*arguments), step(*arguments), rtol=1e-4, atol=1e-4)
    assert any(one.symbols for one in found if isinstance(one, DecodingKernel))


@program
def training() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6), nn.Tanh())
    other = copy.deepcopy(module)
    x = torch.randn(9, 12, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    with kernels() as found:
        call = ours(module)
        for _ in range(CALLS):
            call(x).square().mean().backward()
            other(z).square().mean().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-4, atol=1e-6)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)
    assert products(found) >= 5
