"""Random numbers on a GPU are eager's own, and leave its generator as eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import magjit
from magjit_dvm import drawing
from magjit_dvm.backend import schedules

pytestmark = pytest.mark.gpu

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x * 2, 0.3).relu() + 1,
    "two dropouts": lambda x: F.dropout(F.dropout(x, 0.5).exp(), 0.25),
    "dropout of a transposed operand": lambda x: F.dropout(x.t() * 2, 0.5) * 3,
    "dropout of everything and of nothing": lambda x: F.dropout(x, 1.0) + F.dropout(x, 0.0),
    "not in training": lambda x: F.dropout(x * 2, 0.5, training=False) + 1,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True) + 1,
    "dropout1d": lambda x: F.dropout1d(x, 0.5) * 2,
    "rand_like": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()) + 1,
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_eagers(name: str, dtype: torch.dtype, grad: bool) -> None:
    program = PROGRAMS[name]
    compiled = magjit.compile(program, backend="dvm")
    # Eager mode rounds after each operator, which alpha_dropout has several of.
    tolerance = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 4e-3)
    rounding = dict(zip(("rtol", "atol"), tolerance, strict=True))
    for seed in range(3):
        x = torch.randn(37, 129, device="cuda", dtype=dtype, requires_grad=grad)
        y = x.detach().clone().requires_grad_(grad)
        torch.manual_seed(seed)
        made = compiled(x)
        drawn = torch.rand(3, device="cuda")
        torch.manual_seed(seed)
        expected = program(y)
        torch.testing.assert_close(made, expected, **rounding)
        torch.testing.assert_close(drawn, torch.rand(3, device="cuda"), rtol=0, atol=0)
        if grad:
            made.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(x.grad, y.grad, **rounding)


# -- dropout in groups --


@pytest.fixture
def drawn_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large tensors are."""
    monkeypatch.setattr(drawing, "_MOST", 1 << 40)


def masks(schedule: str) -> int:
    """How many dropouts a fused operator draws for."""
    return schedule.count("= take_numbers(")


def both(program: Callable[..., Tensor], *given: Tensor, seed: int = 3) -> tuple[Tensor, Tensor]:
    """What a compiled program gives and what eager mode does, both at the same place of a seed."""
    compiled = magjit.compile(program, backend="dvm", fullgraph=True)
    for _ in range(2):
        torch.manual_seed(seed)
        made = compiled(*given)
        after = torch.cuda.default_generators[0].get_offset()
        torch.manual_seed(seed)
        wanted = program(*given)
        assert after == torch.cuda.default_generators[0].get_offset()
    return made, wanted


def products(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout((x @ w).relu() + 1, 0.3)


SIZES = [(4, 64), (5, 1023), (37, 132), (12, 1028), (300, 768), (2048, 4096), (9000, 1024)]


def normed(x: Tensor, w: Tensor) -> Tensor:
    """Of a row's own largest: rows of any length are drawn for row by row."""
    y = F.dropout((x @ w).relu() + 1, 0.3)
    return y - y.amax(-1, keepdim=True) * 2


@pytest.mark.parametrize("cols", [4, 5, 161, 258, 1023, 3003, 20001])
def test_rows_that_do_not_begin_with_a_block(cols: int) -> None:
    x, w = torch.ones(16, 4, device="cuda"), torch.ones(4, cols, device="cuda")
    made, wanted = both(normed, x, w)
    assert torch.equal(made, wanted)


@pytest.mark.usefixtures("drawn_in_groups")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_masks_are_eagers(size: tuple[int, int], dtype: torch.dtype) -> None:
    """Over many turns of the kernel's threads, too; elements that do not come by four."""
    rows, cols = size
    x, w = torch.ones(rows, 16, device="cuda", dtype=dtype), torch.ones(16, cols, device="cuda")
    before = schedules()
    made, wanted = both(products, x, w.to(dtype))
    assert sum(masks(one.source) for one in schedules() if one not in before) == 1
    assert torch.equal(made, wanted)


@pytest.mark.parametrize("seed", [0, 1 << 40, (1 << 64) - 1, 1 << 63])
def test_seeds(seed: int) -> None:
    x, w = torch.ones(64, 16, device="cuda"), torch.ones(16, 64, device="cuda")
    made, wanted = both(products, x, w, seed=seed)
    assert torch.equal(made, wanted)


def layer(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Attention and a residual, as a transformer has them, with what ATen draws between."""
    scores = x @ x.mT / 8
    attended = F.dropout(scores.softmax(-1), 0.1) @ x
    noise = torch.rand_like(attended)
    added = F.dropout(attended @ w, 0.2) + y + noise
    return F.layer_norm(added, (64,)) + F.dropout((added * 2) @ w, 0.5)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_layer_trains(dtype: torch.dtype, dynamic: bool) -> None:
    rounding = 1e-4 if dtype == torch.float32 else 3e-2
    compiled = magjit.compile(layer, backend="dvm", fullgraph=True, dynamic=dynamic)
    before = schedules()
    for turn, (batch, length) in enumerate([(2, 20), (2, 20), (3, 36), (1, 9), (4, 161)]):
        given = [
            torch.randn(size, device="cuda", dtype=dtype, requires_grad=True)
            for size in [(batch, length, 64), (64, 64), (batch, length, 64)]
        ]
        results = []
        for function in (compiled, layer):
            torch.manual_seed(turn)
            loss = function(*given).float().square().mean()
            results.append([loss, *torch.autograd.grad(loss, given), torch.rand(2, device="cuda")])
        for one, other in zip(*results, strict=True):
            bound = rounding * max(1.0, float(other.detach().abs().max()))
            torch.testing.assert_close(one, other, rtol=rounding, atol=bound)
        assert torch.equal(results[0][-1], results[1][-1])
    forward = [one.source for one in schedules() if one not in before]
    assert any(masks(one) == 3 for one in forward)


def test_draws_into_a_cuda_graph() -> None:
    """Each replay draws other numbers, at the share that is asked for."""
    x, w = torch.ones(512, 16, device="cuda"), torch.ones(16, 512, device="cuda")
    compiled = magjit.compile(products, backend="dvm", fullgraph=True)
    with torch.no_grad():
        compiled(x, w)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            compiled(x, w)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                made = compiled(x, w)
    found = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        found.append((made == 0).float())
    assert all(abs(float(one.mean()) - 0.3) < 0.01 for one in found)
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_another_kernel_of_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch draws otherwise than this expects, all is as with ATen."""
    monkeypatch.setattr(drawing, "_agrees", lambda *_: False)
    x, w = torch.ones(64, 16, device="cuda"), torch.ones(16, 64, device="cuda")
    made, wanted = both(products, x, w)
    assert torch.equal(made, wanted)


def test_large_tensors_are_atens() -> None:
    x, w = torch.ones(2048, 16, device="cuda"), torch.ones(16, 1024, device="cuda")
    before = schedules()
    made, wanted = both(products, x, w)
    assert not any(masks(one.source) for one in schedules() if one not in before)
    assert torch.equal(made, wanted)


def test_this_torch_draws_as_expected() -> None:
    torch.cuda.init()
    before = torch.cuda.default_generators[0].get_offset()
    drawing._agrees.cache_clear()
    assert drawing._agrees(0, 2) and drawing._agrees(0, 4)
    assert torch.cuda.default_generators[0].get_offset() == before
