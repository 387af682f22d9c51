"""What `dvm_gpu.py` measures: programs, and how their arguments are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTHS = (1024, 4096, 2048, 512, 8192, 16384, 768)

Make = Callable[[int, torch.dtype], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """A program, and how its arguments of so many bytes are made."""

    group: str
    name: str
    function: Callable[..., Tensor]
    make: Make


# -- programs --


def chain(operators: int) -> Callable[[Tensor], Tensor]:
    """So many cheap operators."""
    cheap = (lambda x: x * 1.01, lambda x: x + 0.5, torch.relu, torch.neg)

    def run(x: Tensor) -> Tensor:
        for k in range(operators):
            x = cheap[k % 4](x)
        return x

    return run


def mixed(x: Tensor) -> Tensor:
    """Six special functions among seven cheap operators."""
    x = (x * 0.5).sigmoid() + 0.5
    x = (x.log() * 1.5).exp() + 0.25
    return ((x.rsqrt() * 1.25).tanh() - 0.5).exp() * 2


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def layer_norm_weights(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def rms_norm_weight(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x + y, x.shape[-1:], weight)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def logsumexp(x: Tensor) -> Tensor:
    return x.logsumexp(-1)


def softmax_gradient(dy: Tensor, y: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)
    return found


def embedding_norm(table: Tensor, ids: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(ids, table), table.shape[-1:])


def losses(x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(x, classes, reduction="none")


def mean_loss(x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(x, classes)


def filled_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, float("-inf")).softmax(-1)


def variance(x: Tensor) -> Tensor:
    return x.var(-1)


def causal_softmax(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[-1], device=x.device)
    below = places[None, :] <= places[: x.shape[-2], None]
    return x.masked_fill(~below, float("-inf")).softmax(-1)


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return (x * 0.125 + mask).softmax(-1)


def biased_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def gate(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def multiply_add(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x * y + z


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def largest(x: Tensor) -> Tensor:
    return x.abs().amax()


def distance(x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x - y)
    return found


def standardized(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:])


# -- arguments --


def line(count: int, offset: int = 0) -> Make:
    """Tensors of one dimension, from an element on."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        n = size // dtype.itemsize
        return [_drawn((n + offset,), dtype)[offset:] for _ in range(count)]

    return make


def rows(width: int, count: int = 1, vectors: int = 0) -> Make:
    """Tensors of rows, then vectors of a row's length."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        shape = (max(size // dtype.itemsize // width, 1), width)
        made = [_drawn(shape, dtype) for _ in range(count)]
        return made + [_drawn((width,), dtype) for _ in range(vectors)]

    return make


def square(how: str) -> Make:
    """Two matrices, of which the second is seen otherwise."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        n = int((size // dtype.itemsize) ** 0.5) // 64 * 64
        x = _drawn((n, n), dtype)
        other = {
            "transposed": lambda: _drawn((n, n), dtype).t(),
            "a row": lambda: _drawn((n,), dtype),
            "a column": lambda: _drawn((n, 1), dtype),
            "a part": lambda: _drawn((n, 3 * n), dtype)[:, n : 2 * n],
        }
        return [x, other[how]()]

    return make


def looked_up(width: int) -> Make:
    """A table, and as many positions in random order as it has rows."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        table = rows(width)(size, dtype)[0]
        return [table, torch.randperm(len(table), device="cuda")]

    return make


def scores(classes: int) -> Make:
    """Of classes, and the right one of each row."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        given = rows(classes)(size, dtype)[0]
        return [given, torch.randint(0, classes, (len(given),), device="cuda")]

    return make


def shares(width: int) -> Make:
    """Of anything, and of rows whose sum is 1."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        dy, x = rows(width, 2)(size, dtype)
        return [dy, x.softmax(-1)]

    return make


def squares(width: int) -> Make:
    """Matrices, one behind another."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        count = max(size // dtype.itemsize // width**2, 1)
        return [_drawn((count, width, width), dtype)]

    return make


def masked_squares(width: int) -> Make:
    """Matrices, one behind another, and a mask that is the same for all."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        mask = torch.ones(width, width, device="cuda", dtype=torch.bool).triu(1)
        return [*squares(width)(size, dtype), mask]

    return make


def few(count: int) -> Make:
    """A tensor of so many rows."""

    def make(size: int, dtype: torch.dtype) -> list[Tensor]:
        return [_drawn((count, size // dtype.itemsize // count), dtype)]

    return make


def _drawn(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def cases() -> Iterator[Case]:
    """All programs, those that matter most first."""
    for width in WIDTHS:
        for norm in (layer_norm, rms_norm, softmax):
            yield Case("norms", f"{norm.__name__} {width}", norm, rows(width))
    for count in (4, 12, 1, 2, 8):
        yield Case("chains", f"{count} operators", chain(count), line(1))
    for width in (1024, 4096, 8192):
        weighted = rows(width, vectors=2)
        yield Case("weights", f"layer_norm {width}, weights", layer_norm_weights, weighted)
        weighted = rows(width, vectors=1)
        yield Case("weights", f"rms_norm {width}, weight", rms_norm_weight, weighted)
        weighted = rows(width, 2, 1)
        yield Case("weights", f"add, rms_norm {width}, weight", add_rms_norm, weighted)
        yield Case("weights", f"log_softmax {width}", log_softmax, rows(width))
    for width in (64, 96, 128, 256):
        name = f"rms_norm {width}, weight"
        yield Case("narrow", name, rms_norm_weight, rows(width, vectors=1))
    for width in (96, 384):
        name = f"layer_norm {width}, weights"
        yield Case("narrow", name, layer_norm_weights, rows(width, vectors=2))
    for width in (32, 49, 64, 197):
        yield Case("narrow", f"softmax {width}", softmax, rows(width))
    yield Case("narrow", "softmax 197, with a mask", masked_softmax, rows(197, vectors=1))
    for width in (32_000, 50_257, 128_256):
        yield Case("long", f"softmax {width}", softmax, rows(width))
    yield Case("long", "log_softmax 32000", log_softmax, rows(32_000))
    yield Case("long", "rms_norm 32768, weight", rms_norm_weight, rows(32_768, vectors=1))
    yield Case("long", "gradient of softmax 32000", softmax_gradient, shares(32_000))
    yield Case("long", "losses of 128256 classes", losses, scores(128_256))
    yield Case("inputs", "add", add, line(2))
    yield Case("inputs", "silu(x) * y", gate, line(2))
    yield Case("inputs", "x * y + z", multiply_add, line(3))
    for special in (torch.exp, torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.log, torch.sin):
        yield Case("special", f"{special.__name__} of a product", _of_product(special), line(1))
    yield Case("special", "6 special, 7 cheap", mixed, line(1))
    for width in (768, 4096):
        yield Case("tables", f"embedding, layer_norm {width}", embedding_norm, looked_up(width))
    for classes in (1024, 8192, 32_000):
        yield Case("tables", f"losses of {classes} classes", losses, scores(classes))
    yield Case("tables", "mean loss of 1024 classes", mean_loss, scores(1024))
    yield Case("tables", "softmax 1024 below the diagonal", causal_softmax, squares(1024))
    yield Case("tables", "softmax 1024, with a mask", filled_softmax, masked_squares(1024))
    yield Case("reductions", "mse_loss", F.mse_loss, line(2))
    for width in (4096, 32_000):
        yield Case("reductions", f"logsumexp {width}", logsumexp, rows(width))
    yield Case("reductions", "variance 1024", variance, rows(1024))
    yield Case("reductions", "largest absolute value", largest, line(1))
    yield Case("reductions", "the norm of x - y", distance, line(2))
    yield Case("reductions", "log_softmax of 4 rows", log_softmax, few(4))
    yield Case("reductions", "layer_norm of 8 rows", standardized, few(8))
    for how in ("transposed", "a row", "a column", "a part"):
        yield Case("views", f"add, {how}", add, square(how))
    yield Case("offsets", "4 operators, from element 1", chain(4), line(1, 1))
    yield Case("offsets", "add, from element 3", add, line(2, 3))
    yield Case("offsets", "layer_norm 1023", layer_norm, rows(1023))
    yield Case("offsets", "softmax 4095", softmax, rows(4095))
    yield Case("offsets", "layer_norm 1023, weights", layer_norm_weights, rows(1023, vectors=2))
    yield Case("offsets", "gelu(x + bias) 1023", biased_gelu, rows(1023, vectors=1))


def _of_product(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What is fused with something: an elementwise operator alone is ATen's."""

    def run(x: Tensor) -> Tensor:
        return function(x * 0.75)

    return run


GROUPS = tuple(dict.fromkeys(one.group for one in cases()))
