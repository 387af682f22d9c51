"""Shapes that change: one more capture, in which sizes are symbols, and always what eager does."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import magjit

SIZES = (5, 7, 9, 12, 6, 33, 5, 2, 1, 8)
Program = Callable[..., Any]


class Scaled(torch.autograd.Function):
    """Uses a size in its forward and its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.n = x.shape[0]
        return x * x.shape[0]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.n


@dataclasses.dataclass
class Sized:
    """A result that names its length."""

    x: torch.Tensor
    n: int


def views(x: torch.Tensor) -> Any:
    n, c = x.shape
    return x.view(n, 2, c // 2).transpose(1, 2).reshape(n, -1), x.view(*x.shape, 1), x.view(-1)


def view_by_parts(x: torch.Tensor) -> Any:
    lead = x.shape[:-1]
    return x.view(*lead, -1, 2), x.view((*lead, 2, -1)), x.reshape(lead + (4, 1))


def made(x: torch.Tensor) -> Any:
    n = x.size(0)
    zeros, filled = x.new_zeros(n, 3), torch.full((n,), 2.5)
    return zeros, torch.ones(x.shape), torch.arange(n), torch.eye(n), filled, x.new_empty(0, n)


def mask(x: torch.Tensor) -> Any:
    n = x.shape[0]
    causal = torch.tril(torch.ones(n, n, dtype=torch.bool))
    return (x @ x.T).masked_fill(~causal, float("-inf")).softmax(-1)


def slices(x: torch.Tensor) -> Any:
    n = len(x)
    half = n // 2
    return x[:half], x[half:], x[: n - 1], x[::2], x[-1], x[1 : n // 2 + 1, :2]


def indexed(x: torch.Tensor) -> Any:
    y = x * 2
    y[x.shape[0] // 2, 0] = 7
    return y, x[len(x) - 1]


def arithmetic(x: torch.Tensor) -> Any:
    n = x.size(0)
    return x * n, x + n / 2, x / math.sqrt(n), x - n**1, n * x, 1.0 / n * x, x * (n % 3), -n * x


def scalar_functions(x: torch.Tensor) -> Any:
    n, c = x.shape
    return x * max(n, c), x * min(n, 6), x[: int(n * 0.5)], x * float(n), x[: math.ceil(n / 3)]


def branches(x: torch.Tensor) -> Any:
    if x.shape[0] > 8:
        return x.sum(0)
    if x.shape[0] % 2 == 0:
        return x.mean(0)
    return x.amax(0)


def truth(x: torch.Tensor) -> Any:
    n = x.size(0) - 5
    return x + 1 if n else x - 1


def chained(x: torch.Tensor) -> Any:
    return x + 1 if 3 < x.size(0) <= 9 else x - 1


def loops(x: torch.Tensor) -> Any:
    total = torch.zeros(4)
    for i in range(x.shape[0]):
        total = total + x[i] * i
    return total


def iterates(x: torch.Tensor) -> Any:
    return [row * 2 for row in x]


def parts(x: torch.Tensor) -> Any:
    return x.chunk(2), x.split(3), torch.tensor_split(x, 2), x.unbind(1)


def unpacked(x: torch.Tensor) -> Any:
    first, *rest = x.split(2)
    return first, len(rest)


def returned(x: torch.Tensor) -> Any:
    return x.shape, x.size(0), x.numel(), x.stride(), {"n": x.shape[0] * 2}, [x.shape[0] / 4]


def dataclass_result(x: torch.Tensor) -> Any:
    return Sized(x * 2, x.shape[0] + 1)


def text(x: torch.Tensor) -> Any:
    return x * 2, f"{x.shape[0]} rows"


def in_containers(x: torch.Tensor) -> Any:
    table = {"n": x.shape[0], "c": 4}
    pair = (table["n"], table["c"])
    sizes = [*pair, 1]
    sizes.append(x.shape[1])
    return x.view(sizes[0], sizes[1], sizes[2]), x.new_zeros(tuple(sizes[:2])), len(sizes)


def comprehension(x: torch.Tensor) -> Any:
    doubled = [s * 2 for s in x.shape]
    return x.new_zeros(doubled), x.new_zeros([s for s in x.shape if s > 4] or [1])


def keywords(x: torch.Tensor) -> Any:
    def shaped(t: torch.Tensor, *, rows: int, **more: int) -> torch.Tensor:
        return t.view(rows, more["columns"], *[1] * more.get("ones", 0))

    options = {"rows": x.shape[0], "columns": x.shape[1]}
    return shaped(x, **options), shaped(x, ones=2, **options)


def gathered(x: torch.Tensor) -> Any:
    def reshaped(t: torch.Tensor, *shape: int) -> torch.Tensor:
        return t.reshape(*shape)

    return reshaped(x, x.shape[1], x.shape[0]), reshaped(x, *x.shape, 1)


def closure(x: torch.Tensor) -> Any:
    n = x.shape[0]

    def inner(t: torch.Tensor) -> torch.Tensor:
        return t[: n // 2] * n

    return inner(x)


def compares_shapes(x: torch.Tensor) -> Any:
    y = x * 2
    assert x.shape == y.shape and x.size() != y.T.size()
    return x + 1 if y.shape == (7, 4) else x - 1


def images(x: torch.Tensor) -> Any:
    image = x[None, None]
    h, w = image.shape[-2:]
    grown = F.interpolate(image, size=(h * 2, w), mode="nearest")
    padded = F.pad(image, (0, 0, 0, 8 - h % 8))
    return grown, padded, F.avg_pool2d(padded, 2), F.interpolate(image, scale_factor=2)


def expands(x: torch.Tensor) -> Any:
    n, c = x.shape
    return x[None].expand(3, n, c), x.repeat(2, n), x.unsqueeze(1).expand(-1, n, -1).sum(1)


def joined(x: torch.Tensor) -> Any:
    both = torch.cat([x, x + 1])
    return both.shape[0], both.view(2, x.shape[0], -1), torch.stack([x, x]).flatten(0, 1).size()


def written(x: torch.Tensor) -> Any:
    y = torch.zeros(x.shape[0] + 2, 4)
    y[: x.shape[0]] = x
    y[len(x) // 2 :, 0] = 7
    return y


def changes_input(x: torch.Tensor) -> Any:
    x[: x.shape[0] // 2] += 1
    x.mul_(x.shape[0])
    return x.sum()


def changes_shape(x: torch.Tensor) -> Any:
    n = x.shape[0]
    x.unsqueeze_(0)
    return x * n, x.shape[0]


def transposed_in_place(x: torch.Tensor) -> Any:
    y = x * 1
    y.t_()
    return y.shape, y.reshape(y.size(0), -1)


def contiguity(x: torch.Tensor) -> Any:
    y = x.t()
    return y.contiguous() if not y.is_contiguous() else y + 1, y.stride(0)


def einsum(x: torch.Tensor) -> Any:
    return torch.einsum("nc,mc->nm", x, x), torch.einsum("nc->c", x) / x.shape[0]


def caught(x: torch.Tensor) -> Any:
    try:
        return x.view(3, -1)
    except RuntimeError:
        return x.sum()


def checks(x: torch.Tensor) -> Any:
    if x.shape[0] < 2:
        raise ValueError(f"{x.shape[0]} rows")
    return x * 2


def used_as_key(x: torch.Tensor) -> Any:
    return {x.shape: 1, x.shape[0]: x * 2}, x.shape[0] in {5, 7}, [1, 2, 3][x.shape[0] % 3]


def identity(x: torch.Tensor) -> Any:
    n = x.shape[0]
    return n is x.shape[0], n is None, isinstance(n, int), type(n) is int, x * n


def functions(x: torch.Tensor) -> Any:
    total = sum(x.shape)
    return total, math.prod(x.shape), list(map(str, x.shape)), sorted(x.shape), max(x.shape) * x


def tensors_of_sizes(x: torch.Tensor) -> Any:
    return torch.tensor(x.shape), torch.tensor([x.shape[0], 1.5]), torch.as_tensor(x.size(0)) * x


def function_with_gradient(x: torch.Tensor) -> Any:
    return Scaled.apply(x.detach().requires_grad_())


def checkpointed(x: torch.Tensor) -> Any:
    def body(t: torch.Tensor) -> torch.Tensor:
        return (t * t.shape[0]).view(t.shape[0], -1).sin()

    return checkpoint(body, x.detach().requires_grad_(), use_reentrant=False)


def boundaries(x: torch.Tensor) -> Any:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.T).float().view(x.shape[0], x.shape[0])


def sorted_by_row(x: torch.Tensor) -> Any:
    values, indices = x.sort(0)
    return values.gather(0, indices), x.topk(min(3, x.shape[0]), dim=0).values, x.cumsum(0)


def attention(x: torch.Tensor) -> Any:
    heads = x.view(1, x.shape[0], 2, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


ONE_MORE = [
    *(views, view_by_parts, made, mask, slices, arithmetic, einsum, images, expands, joined),
    *(written, attention, in_containers, keywords, closure, transposed_in_place),
    *(boundaries, checks, contiguity, returned, dataclass_result, changes_input),
]
"""Programs that go the same way for all sizes above one, or that sizes of one end."""
AS_NEEDED = [
    *(branches, truth, chained, loops, iterates, parts, unpacked, text, comprehension),
    *(compares_shapes, changes_shape, caught, used_as_key, functions, tensors_of_sizes),
    *(
        identity,
        indexed,
        gathered,
        function_with_gradient,
        checkpointed,
        sorted_by_row,
        scalar_functions,
    ),
]
"""Programs whose graph is another one at some sizes."""


def outcome(program: Program, *args: Any) -> tuple[Any, Any]:
    """Result or exception, and what became of the arguments."""
    torch.manual_seed(0)
    try:
        return program(*args), args
    except Exception as error:
        return (type(error), str(error)), args


def agree(program: Program, compiled: Program, args: tuple[Any, ...]) -> None:
    expected, actual = (outcome(f, *copy.deepcopy(args)) for f in (program, compiled))
    same(actual, expected)


def same(actual: Any, expected: Any) -> None:
    """Types, metadata and values, all through."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected, equal_nan=True)
    elif isinstance(expected, dict):
        assert [*actual] == [*expected]
        same([*actual.values()], [*expected.values()])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            same(*pair)
    elif dataclasses.is_dataclass(expected) and not isinstance(expected, type):
        same(vars(actual), vars(expected))
    else:
        assert actual == expected


def run(program: Program, backend: str = "eager", sizes: Any = SIZES, **options: Any) -> Any:
    compiled = magjit.compile(program, backend=backend, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", magjit.MagJITWarning)
        for n in sizes:
            agree(program, compiled, (torch.randn(n, 4),))
    return magjit.stats(compiled)


@pytest.mark.parametrize("program", ONE_MORE, ids=lambda p: p.__name__)
def test_one_more_capture_serves_all_sizes(program: Program) -> None:
    stats = run(program, sizes=[n for n in SIZES if n > 2])
    assert stats.captures <= 2 and stats.splits == 0
    assert stats.replays == len(SIZES) - 4


@pytest.mark.parametrize("program", [*ONE_MORE, *AS_NEEDED], ids=lambda p: p.__name__)
def test_every_size_is_right(program: Program) -> None:
    with magjit.config.override(record_limit=20):
        run(program)
        run(program, dynamic=True)
        run(program, sizes=[1, 2, 0, 3, 1, 0, 2])


@pytest.mark.parametrize(
    "program",
    [
        *(pytest.param(p, marks=pytest.mark.slow) for p in (mask, slices, images)),
        *(views, attention),
    ],
    ids=lambda p: p.__name__,
)
def test_inductor_compiles_twice(program: Program) -> None:
    stats = run(program, "inductor", sizes=[5, 7, 9, 12, 33, 5])
    assert stats.captures <= 2


def test_symbols_from_the_first_call_on() -> None:
    assert run(views, dynamic=True, sizes=[5, 7, 9]).captures == 1


def test_no_symbols() -> None:
    stats = run(views, dynamic=False, sizes=[5, 7, 9, 5])
    assert (stats.captures, stats.replays) == (3, 1)


def test_a_guard_on_the_branch() -> None:
    assert run(branches, sizes=[6, 8, 4, 10, 12, 9, 5, 7, 3]).captures <= 5


def test_two_inputs() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.cat([x, y]), x[: y.shape[0]] * y.shape[0] if len(x) > len(y) else y

    compiled = magjit.compile(program, backend="eager")
    for n, m in [(5, 3), (7, 4), (9, 5), (12, 2), (3, 8), (4, 4), (2, 9), (20, 6)]:
        agree(program, compiled, (torch.randn(n, 2), torch.randn(m, 2)))
    assert magjit.stats(compiled).captures <= 3


def test_sizes_that_broadcast() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x + y
        return z, z.shape[0] * 2

    compiled = magjit.compile(program, backend="eager")
    for n, m in [(3, 3), (5, 5), (7, 7), (1, 4), (6, 1), (1, 1), (8, 8), (4, 6)]:
        agree(program, compiled, (torch.randn(n, 2), torch.randn(m, 2)))


def test_strides_matter() -> None:
    def program(x: torch.Tensor) -> Any:
        return x.is_contiguous(), x.stride(0), x.reshape(-1) * 2

    compiled = magjit.compile(program, backend="eager")
    for make in (
        torch.randn,
        lambda n, c: torch.randn(c, n).t(),
        lambda n, c: torch.randn(n, 8)[:, ::2],
    ):
        for n in (5, 6, 7, 9):
            x = make(n, 4)
            expected, actual = program(x), compiled(x)
            assert expected[:2] == actual[:2]
            torch.testing.assert_close(actual[2], expected[2])


class Network(nn.Module):
    """Convolutions, normalization in training mode, and a count of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)
        self.rows = 0
        self.last = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += x.shape[0]
        self.last = x.shape[0]
        h = F.relu(self.norm(self.conv(x)))
        h = F.dropout(h, 0.5, self.training)
        return self.head(h.mean(-1))


@pytest.mark.parametrize("training", [False, True])
def test_a_module_with_state(training: bool) -> None:
    model = Network().train(training)
    eager = copy.deepcopy(model)
    compiled = magjit.compile(model, backend="eager")
    for batch, length in [(2, 8), (3, 8), (5, 9), (4, 11), (2, 8), (7, 30), (6, 5)]:
        x = torch.randn(batch, 4, length)
        results = []
        for module in (eager, compiled):
            torch.manual_seed(3)
            results.append(module(x))
            results[-1].square().sum().backward()
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(model.conv.weight.grad, eager.conv.weight.grad)
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
        assert (model.rows, model.last) == (eager.rows, eager.last)
    assert magjit.stats(compiled).captures <= 3


def test_marked_from_the_first_call_on() -> None:
    compiled = magjit.compile(views, backend="eager")
    x = torch.randn(5, 4)
    magjit.mark_dynamic(x, 0)
    agree(views, compiled, (x,))
    for n in (6, 9):
        agree(views, compiled, (torch.randn(n, 4),))
    assert magjit.stats(compiled).captures == 1


def test_marked_static() -> None:
    compiled = magjit.compile(views, backend="eager")
    for n in (5, 6, 9):
        x = torch.randn(n, 4)
        magjit.mark_static(x, 0)
        compiled(x)
    assert magjit.stats(compiled).captures == 3


def test_a_shape_on_which_data_is_read() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        last = torch.arange(x.shape[0])[-1].item()  # a constant, as long as the size is one
        return x * last

    compiled = magjit.compile(program, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", magjit.MagJITWarning)
        for n in (5, 6, 7, 5, 6, 7):
            agree(program, compiled, (torch.randn(n, 4),))
    stats = magjit.stats(compiled)
    assert stats.captures <= 4 and stats.replays >= 3
