"""Programs whose operators wait in a queue behave as they do without it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn
from torch.nn import functional as F

import magjit
import magjit_dvm
from magjit_dvm import lazy_window
from magjit_dvm.lazy_mode import Queue
from magjit_dvm.lazy_tensor import QueuedTensor
from tests.dvm.random_programs import Program
from tests.dvm.test_fuzz import check_results, grown

END = "end of the context"


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def chain(x: Tensor) -> Tensor:
    return (x.relu() * 2 + 1).tanh()


def waits(x: Tensor) -> bool:
    return type(x) is QueuedTensor and x._value.window is not None


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# -- what waits, and what ends it --


def test_operators_run_fused_at_the_end() -> None:
    x = torch.randn(5, 7)
    with magjit_dvm.lazy() as stats:
        y = chain(x)
        assert waits(y) and isinstance(y, Tensor) and y.shape == (5, 7)
    assert stats.queued == 4 and stats.flushes == {END: 1}
    assert type(y) is Tensor
    same(y, chain(x))


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y.sum().item(),
    "bool": lambda y: bool(y.sum() > 0),
    "float": lambda y: float(y[0, 0]),
    "numpy": lambda y: y.numpy().tolist(),
    "asarray": lambda y: __import__("numpy").asarray(y).sum(),
    "tolist": lambda y: y.tolist(),
    "print": lambda y: str(y),
    "repr of a view": lambda y: repr(y[0]),
    "format": lambda y: f"{y.sum():.3f}",
    "nonzero": lambda y: y.nonzero().tolist(),
    "mask": lambda y: y[y > 0].tolist(),
    "pickle": lambda y: pickle.loads(pickle.dumps(y)).tolist(),
    "deepcopy": lambda y: copy.deepcopy(y).tolist(),
    "storage": lambda y: y.untyped_storage().tolist(),
    "dlpack": lambda y: torch.from_dlpack(y).tolist(),
    "sort": lambda y: y.sort().values.tolist(),
    "iterate": lambda y: [row.tolist() for row in y],
    "equal": lambda y: torch.equal(y, y + 0),
    "contains": lambda y: 0.0 in y,
    "apply": lambda y: y.clone().apply_(lambda one: one + 1).tolist(),
    "max": lambda y: int(y.argmax()),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_there(name: str) -> None:
    x = torch.randn(5, 7)
    expected = READS[name](chain(x))
    with magjit_dvm.lazy() as stats:
        y = chain(x)
        found = READS[name](y)
        assert sum(stats.flushes.values()) >= 1
        same_again = READS[name](y)
    assert type(y) is Tensor
    for one in (found, same_again):
        if isinstance(expected, str):
            assert one == expected
        else:
            same(one, expected)


def test_saving() -> None:
    with magjit_dvm.lazy():
        y = chain(torch.ones(3))
        file = io.BytesIO()
        torch.save({"y": y, "z": y[1:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    same(loaded["y"], y)
    assert type(loaded["y"]) is Tensor
    assert loaded["z"].untyped_storage().data_ptr() != 0


def test_length() -> None:
    with magjit_dvm.lazy(longest=8) as stats:
        x = torch.ones(4)
        for _ in range(20):
            x = x + 1
    assert stats.flushes == {"length": 2, END: 1}
    assert x.tolist() == [21.0] * 4
    with pytest.raises(magjit.errors.ArgumentError, match="longest=0"), magjit_dvm.lazy(longest=0):
        pass


def test_only_what_lives_is_computed() -> None:
    x = torch.randn(64)
    with magjit_dvm.lazy():
        y = chain(x) + 1
        queue = torch.utils._python_dispatch._get_current_dispatch_mode()
        assert isinstance(queue, Queue)
        window = queue.window
        del y
        z = x * 3
        kept = weakref.ref(z)
    assert [value.real is not None for value in window.values].count(True) == 1
    assert kept() is z
    assert z.tolist() == (x * 3).tolist()


def test_nothing_lives() -> None:
    with magjit_dvm.lazy() as stats:
        chain(torch.ones(3))
    assert stats.compiled == 0


def test_what_cannot_wait_runs_beside_the_queue() -> None:
    x, table = torch.randn(4, 4), torch.randn(9, 4)
    with magjit_dvm.lazy() as stats:
        y = x + 1
        rows = F.embedding(torch.tensor([1, 2]), table)
        assert waits(y) and not isinstance(rows, QueuedTensor)
        assert not stats.flushes
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([9]), table)
    same(y, x + 1)


def test_errors_arise_where_eager_has_them() -> None:
    with magjit_dvm.lazy() as stats:
        y = torch.ones(3) + 1
        with pytest.raises(RuntimeError, match="must match the size"):
            y + torch.ones(4)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        with pytest.raises(IndexError):
            y.sum(5)
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.ones(3, dtype=torch.int64).mul(2).add_(y)
    assert stats.queued >= 2
    assert y.tolist() == [2.0] * 3


# -- structure --


def test_new_sizes_need_no_compilation() -> None:
    lazy_window._compiled.clear()
    w = torch.randn(6)
    compiled = []
    for rows in (4, 5, 9, 4, 100):
        x = torch.randn(rows, 6)
        with magjit_dvm.lazy() as stats:
            y = chain(x) / x.pow(2).mean(-1, keepdim=True)
            y = F.softmax(y + w, -1).view(rows * 2, 3).t() * rows
        compiled.append(stats.compiled)
        expected = F.softmax(chain(x) / x.pow(2).mean(-1, keepdim=True) + w, -1)
        same(y, expected.view(rows * 2, 3).t() * rows)
    assert compiled == [1, 0, 0, 0, 0]


def test_equal_sizes_are_another_structure() -> None:
    """What is fused because two sizes happen to be equal must not serve when they are not."""
    for a, b in ((4, 4), (4, 5), (5, 4), (1, 4), (4, 1)):
        x, y = torch.randn(a, 3), torch.randn(b, 3)
        with magjit_dvm.lazy():
            p, q = (x + 1).sum(0), (y * 2).sum(0)
            r = p * q
        same(r, (x + 1).sum(0) * (y * 2).sum(0))


def test_numbers_need_no_compilation() -> None:
    lazy_window._compiled.clear()
    x = torch.randn(6)
    for k in range(5):
        with magjit_dvm.lazy() as stats:
            y = (x * (0.5 + k) - k) / (k + 1)
        assert stats.compiled == (k == 0)
        same(y, (x * (0.5 + k) - k) / (k + 1))


@pytest.mark.parametrize("number", (0.0, -0.0, float("nan"), float("inf"), 2, True))
def test_constants_are_told_apart(number: Any) -> None:
    x = torch.tensor([-1.0, 0.0, 2.0])
    for other in (0.0, 1.0, 1, number):
        with magjit_dvm.lazy():
            y = x.masked_fill(x > 0, other)
            z = x * other
        for found, right in ((y, x.masked_fill(x > 0, other)), (z, x * other)):
            torch.testing.assert_close(found, right, equal_nan=True)
            assert found.isnan().any() or found.signbit().tolist() == right.signbit().tolist()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64, torch.int64))
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(6).to(dtype)
    with magjit_dvm.lazy():
        results = [x + 1, x * 2.5, x / 3, x > 2, x.sum(), x.float() + x, x + True]
    expected = [x + 1, x * 2.5, x / 3, x > 2, x.sum(), x.float() + x, x + True]
    for found, right in zip(results, expected, strict=True):
        assert found.dtype is right.dtype
        same(found, right)


def test_default_dtype_counts() -> None:
    x = torch.arange(5)
    for dtype in (torch.float32, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with magjit_dvm.lazy():
                y = x / 2
        finally:
            torch.set_default_dtype(before)
        assert y.dtype is dtype


# -- writes, views, aliases --


def test_in_place_on_a_waiting_tensor() -> None:
    with magjit_dvm.lazy() as stats:
        x = torch.ones(4) * 2
        y = x
        z = x * 3
        x += 1
        x.mul_(2).relu_()
        assert x is y and waits(x) and x._version == 3
        assert not stats.flushes
    assert x.tolist() == [6.0] * 4 and z.tolist() == [6.0] * 4 and y is x


def test_in_place_with_a_view() -> None:
    with magjit_dvm.lazy():
        x = torch.ones(2, 3) * 2
        row = x[0]
        row.add_(1)
        x.mul_(2)
        late = x.t()
        assert row._base is x
        x.sub_(1)
    assert row.tolist() == [5.0] * 3 and x[1].tolist() == [3.0] * 3
    assert late._base is x and late.data_ptr() == x.data_ptr()
    assert type(row) is type(late) is type(x) is Tensor


def test_writing_an_input() -> None:
    x = torch.ones(4)
    with magjit_dvm.lazy() as stats:
        y = x + 1
        x.zero_()
        z = x + 1
        x[1:3].fill_(5)
    assert y.tolist() == [2.0] * 4 and z.tolist() == [1.0] * 4
    assert x.tolist() == [0.0, 5.0, 5.0, 0.0]
    assert set(stats.flushes) == {"aten.zero_.default", "aten.fill_.Scalar"}


def test_writing_an_input_through_another_tensor() -> None:
    x = torch.ones(4)
    view, detached, array = x[::2], x.data, torch.from_numpy(x.numpy())
    for written in (view, detached, array):
        with magjit_dvm.lazy():
            before = x.clone().tolist()
            y = x + 1
            written.add_(1)
        assert y.tolist() == [one + 1 for one in before]


def test_what_asks_for_a_shape_alone() -> None:
    with magjit_dvm.lazy() as stats:
        y = (torch.ones(3, 4) + 1).t()
        made = [torch.zeros_like(y), y.new_ones(2), torch.full_like(y, 2, dtype=torch.int64)]
        assert not stats.flushes and waits(y)
    assert made[0].stride() == y.stride() and made[2].sum() == 24


def test_writing_something_else_flushes_nothing() -> None:
    with magjit_dvm.lazy() as stats:
        y = torch.ones(4) + 1
        x = torch.ones(4)
        z = x * 2
        torch.zeros(4).add_(x)
        assert not stats.flushes and waits(z)
        torch.add(torch.ones(4), y, out=torch.empty(4))
        assert stats.flushes == {"aten.add.out": 1}


def test_writing_behind_the_dispatcher_by_torch_is_noticed() -> None:
    x = torch.ones(4)
    with pytest.raises(magjit_dvm.LazyError, match="was written") as caught, magjit_dvm.lazy():
        y = x + 1
        torch._C._increment_version([x])
    assert "way out" in str(caught.value)
    with pytest.raises(magjit_dvm.LazyError, match="was not computed"):
        y.tolist()


def test_assignment_of_data() -> None:
    x, p = torch.ones(3), torch.zeros(3)
    with magjit_dvm.lazy() as stats:
        p.data = x + 1
        assert stats.flushes
        same(p + 1, torch.full((3,), 3.0))
        y = x * 5
        y.data = torch.zeros(2)
        assert (y + 1).tolist() == [1.0, 1.0]
        z = x * 5
        z.data = x + 3
    assert p.tolist() == [2.0] * 3 and y.tolist() == [0.0, 0.0] and z.tolist() == [4.0] * 3


def test_conversion_of_a_module() -> None:
    module = nn.Linear(3, 3)
    weight = module.weight.detach().clone()
    with magjit_dvm.lazy():
        module.double()
    same(module.weight.detach(), weight.double())
    assert type(module.weight) is nn.Parameter


def test_a_parameter_of_a_waiting_tensor() -> None:
    with magjit_dvm.lazy():
        p = nn.Parameter(torch.ones(3) + 1)
    assert isinstance(p, nn.Parameter) and p.requires_grad
    with torch.enable_grad():
        (p * 2).sum().backward()
    assert p.grad.tolist() == [2.0] * 3 and p.tolist() == [2.0] * 3


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "t": lambda x: x.t(),
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[:, 1],
    "unsqueeze": lambda x: x[None],
    "expand": lambda x: x.expand(3, 4, 6),
    "reshape": lambda x: x.reshape(-1),
    "view": lambda x: x.view(2, 2, 6),
    "squeeze": lambda x: x[:1].squeeze(0),
    "chunk": lambda x: x.chunk(3, 1)[2],
    "split": lambda x: x.split([1, 3])[1],
    "unbind": lambda x: x.unbind(1)[2],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 3), 1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "chained": lambda x: x.t()[1:].unsqueeze(0).transpose(1, 2)[0],
}


@pytest.mark.parametrize("flushed", (False, True))
@pytest.mark.parametrize("name", VIEWS)
def test_views_share_memory(name: str, flushed: bool) -> None:
    given = torch.randn(4, 6)

    def program() -> tuple[Tensor, Tensor, Tensor]:
        x = given * 2
        if flushed:
            x.tolist()
        view = VIEWS[name](x)
        double = view * 2
        (view[0] if view.dim() else view).add_(1)
        return x, view, double

    expected = program()
    with magjit_dvm.lazy():
        found = program()
    for one, right in zip(found, expected, strict=True):
        same(one, right)
        assert one.stride() == right.stride() and one.storage_offset() == right.storage_offset()
    x, view, _ = found
    assert (view._base is x) == (expected[1]._base is expected[0])
    x.zero_()
    assert view.abs().sum() == 0
    assert view._version == x._version == expected[0]._version + 1 or name == "data"


def test_view_outlives_what_it_is_a_view_of() -> None:
    with magjit_dvm.lazy():
        y = (torch.ones(2, 3) + 1).t()
    assert type(y) is Tensor and y.tolist() == [[2.0, 2.0]] * 3
    assert type(y._base) is Tensor and y._base.shape == (2, 3)


# -- leaving the context --


def test_weak_references_and_attributes_stay() -> None:
    with magjit_dvm.lazy():
        y = torch.ones(3) + 1
        y.mark = "mine"
        ref = weakref.ref(y)
        identity = id(y)
    assert ref() is y and id(y) == identity and y.mark == "mine"
    assert y.__dict__ == {"mark": "mine"}
    y.requires_grad_()
    with torch.enable_grad():
        (y * y).sum().backward()
    assert y.grad.tolist() == [4.0] * 3


def test_an_exception_in_the_program() -> None:
    held = []
    with pytest.raises(ZeroDivisionError), magjit_dvm.lazy():
        held.append(chain(torch.ones(3)))
        1 / 0
    same(held[0], chain(torch.ones(3)))
    assert type(held[0]) is Tensor
    with magjit_dvm.lazy() as stats:
        y = torch.ones(2) + 1
    assert stats.queued == 1 and y.tolist() == [2.0, 2.0]


def test_an_exception_of_the_program_is_not_replaced() -> None:
    x = torch.ones(3)
    with pytest.raises(ZeroDivisionError), magjit_dvm.lazy():
        y = x + 1
        torch._C._increment_version([x])
        1 / 0
    with pytest.raises(magjit_dvm.LazyError, match="was written"):
        y.tolist()


def test_an_exception_while_a_window_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise MemoryError("no memory left")

    with pytest.raises(MemoryError), magjit_dvm.lazy():
        y = torch.ones(3) + 1
        monkeypatch.setattr(lazy_window.Window, "compiled", broken)
    monkeypatch.undo()
    with pytest.raises(magjit_dvm.LazyError, match="no memory left") as caught:
        y + 1
    assert isinstance(caught.value.__cause__, MemoryError)
    with magjit_dvm.lazy():
        z = torch.ones(3) + 1
    assert z.tolist() == [2.0] * 3


def test_nested_contexts() -> None:
    with magjit_dvm.lazy() as outer:
        x = torch.ones(3) + 1
        with magjit_dvm.lazy() as inner:
            assert inner is outer
            y = x * 2
        assert not waits(y) and not waits(x)
        z = y + 1
        assert waits(z)
    assert z.tolist() == [5.0] * 3
    assert outer.flushes == {"end of a context": 1, END: 1}


# -- what else a program does --


def test_random_numbers_are_those_of_eager() -> None:
    def program(x: Tensor) -> list[Tensor]:
        y = F.dropout(x + 1, 0.5)
        z = torch.randn(4) * y
        u = torch.rand_like(z) + z
        u.normal_()
        return [y, z, u, torch.bernoulli(torch.full((4,), 0.5)) + u]

    torch.manual_seed(3)
    expected = program(torch.ones(4))
    torch.manual_seed(3)
    with magjit_dvm.lazy():
        found = program(torch.ones(4))
    same(found, expected)


def test_gradients() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1))
    x = torch.randn(5, 4)

    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for _ in range(3):
            scaled = (x - x.mean(0)) / x.std(0)
            loss = (model(scaled) - scaled.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [one.detach() for one in model.parameters()] + [
            one.grad for one in model.parameters()
        ]

    with torch.enable_grad():
        expected = train(copy.deepcopy(model))
        with magjit_dvm.lazy() as stats:
            found = train(model)
    assert stats.queued
    same(found, expected)
    assert {type(one) for one in found} == {Tensor}


def test_what_autograd_saved_of_a_waiting_tensor() -> None:
    with torch.enable_grad():
        p = torch.ones(3, requires_grad=True)
        with magjit_dvm.lazy():
            factor = torch.ones(3) * 4
            loss = (p * factor).sum()
        assert type(factor) is Tensor
        loss.backward(retain_graph=True)
        assert p.grad.tolist() == [4.0] * 3
        factor.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradient_asked_of_a_waiting_tensor() -> None:
    with torch.enable_grad(), magjit_dvm.lazy():
        y = torch.ones(3) * 2
        y.requires_grad_()
        (y * y).sum().backward()
        assert y.grad.tolist() == [4.0] * 3
    assert y.requires_grad and y.tolist() == [2.0] * 3 and (y + 1).tolist() == [3.0] * 3
    assert pickle.loads(pickle.dumps(y)).requires_grad


def test_a_view_made_with_gradients_may_be_written_with_them() -> None:
    with torch.enable_grad():
        with magjit_dvm.lazy():
            y = torch.ones(2, 2) * 2
            row = y[0]
        p = torch.ones(2, requires_grad=True)
        row.mul_(p)
        y.sum().backward()
    assert p.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("inside", (True, False))
def test_inference_mode(inside: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
    x = torch.randn(3, 4)
    if inside:
        with magjit_dvm.lazy():
            with torch.inference_mode():
                y = model(x) + 1
                v = y[0]
            z = x * 2
    else:
        with torch.inference_mode(), magjit_dvm.lazy():
            y = model(x) + 1
            v = y[0]
            z = x * 2
    same(y.clone(), model(x) + 1)
    same(v.clone(), (model(x) + 1)[0])
    same(z.clone(), x * 2)
    assert v.data_ptr() == y.data_ptr()
    if inside:
        assert not z.is_inference()


def test_a_view_across_the_border_of_inference_mode() -> None:
    with magjit_dvm.lazy():
        y = torch.ones(2, 3) + 1
        with torch.inference_mode():
            row = y[0]
            y.mul_(2)
            z = y * 1
        z2 = z[1]
    assert row.tolist() == [4.0] * 3 and z2.tolist() == [4.0] * 3
    assert row.data_ptr() == y.data_ptr() and not y.is_inference()


def test_composite_operators_in_inference_mode() -> None:
    x, w = torch.randn(3, 4), torch.randn(4)
    with torch.inference_mode(), magjit_dvm.lazy() as stats:
        y = F.layer_norm(x.reshape(4, 3).T.matmul(torch.eye(4)) + 1, (4,), w) * 2
        assert waits(y) and not stats.flushes
        assert bool((y > -100).all())
    same(y.clone(), F.layer_norm(x.reshape(4, 3).T + 1, (4,), w) * 2)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x * factor + factor

    @staticmethod
    def backward(ctx, gradient):
        (factor,) = ctx.saved_tensors
        return gradient * factor * 2, None


def test_a_custom_operator_of_autograd() -> None:
    with torch.enable_grad():
        p = torch.ones(3, requires_grad=True)
        with magjit_dvm.lazy():
            factor = torch.ones(3) * 3
            y = Doubling.apply(p, factor)
            assert not isinstance(y, QueuedTensor) or y.requires_grad
            z = y * 2
        z.sum().backward()
    assert p.grad.tolist() == [12.0] * 3
    assert y.tolist() == [6.0] * 3 and factor.tolist() == [3.0] * 3


def test_lists_of_tensors() -> None:
    x = torch.ones(3)
    with magjit_dvm.lazy():
        several = [x + 1, x * 4]
        torch._foreach_add_(several, 1)
        more = torch._foreach_mul(several, 2)
        joined = torch.cat([*several, *more])
        total = torch.tensor([one.sum() for one in several])
    assert joined.tolist() == [3.0] * 3 + [5.0] * 3 + [6.0] * 3 + [10.0] * 3
    assert total.tolist() == [9.0, 15.0]


def test_scripted_functions() -> None:
    scripted = torch.jit.script(chain)
    x = torch.randn(4)
    with magjit_dvm.lazy():
        y = scripted(x + 1) * 2
    same(y, chain(x + 1) * 2)


def test_fake_tensors_and_other_devices() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as mode, magjit_dvm.lazy():
        fake = torch.ones(3) + 1
    with magjit_dvm.lazy(), mode:
        other = fake * 2
    assert isinstance(fake, FakeTensor) and isinstance(other, FakeTensor)
    with magjit_dvm.lazy() as stats:
        nowhere = torch.ones(3, device="meta") + 1
        sparse = torch.eye(3).to_sparse() * 2
        turned = torch.ones(2, dtype=torch.complex64).conj() * 1j
    assert nowhere.device.type == "meta" and sparse.to_dense().sum() == 6
    assert turned.imag.tolist() == [1.0, 1.0] and not stats.queued


def test_errors_of_values_come_where_eager_raises() -> None:
    """Operators whose values decide whether they raise do not wait."""
    ints, zeros = torch.tensor([4, 7]), torch.tensor([2, 0])
    rows, classes = torch.rand(2, 3), torch.tensor([0, 3])
    calls: list[Callable[[], Any]] = [
        lambda: ints // zeros,
        lambda: ints % zeros,
        lambda: torch.div(ints, zeros, rounding_mode="trunc"),
        lambda: rows.gather(1, classes[:, None]),
        lambda: torch.nn.functional.nll_loss(rows, classes),
        lambda: torch.nn.functional.embedding(classes, rows.t()),
    ]
    with magjit_dvm.lazy() as stats:
        for call in calls:
            with pytest.raises((RuntimeError, IndexError)):
                call()
        waits = (ints.float() // zeros).tolist()
    assert waits[0] == 2.0 and stats.queued


def test_nothing_to_compute_with() -> None:
    with magjit_dvm.lazy():
        y = torch.ones(0, 3) + 1
        z = y.sum(0) + y.t().sum(1)
    assert y.shape == (0, 3) and z.tolist() == [0.0] * 3


def test_what_is_not_needed_is_let_go() -> None:
    with magjit_dvm.lazy():
        x = torch.ones(3)
        ref = weakref.ref(x)
        y = x + 1
        del x
        assert ref() is not None
        gc.disable()
        try:
            assert y.tolist() == [2.0] * 3
            assert ref() is None
            ref = weakref.ref(y)
            del y
            assert ref() is None
        finally:
            gc.enable()


def test_autocast() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = (a @ b).relu().float() @ b
        with magjit_dvm.lazy():
            found = (a @ b).relu().float() @ b
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected)


def test_vmap() -> None:
    x = torch.randn(4, 5)
    with magjit_dvm.lazy():
        y = torch.vmap(lambda row: (row * 2).tanh().sum())(x + 1)
    same(y, torch.tanh((x + 1) * 2).sum(1))


def test_compiled_functions() -> None:
    compiled = magjit.compile(chain, backend="dvm")
    x = torch.randn(3, 4)
    same(compiled(x), chain(x))
    with magjit_dvm.lazy():
        y = compiled(x + 1) * 2
    same(y, chain(x + 1) * 2)


def test_threads_have_queues_of_their_own() -> None:
    x = torch.ones(3)
    seen: list[Any] = []

    def other() -> None:
        seen.append(type(x + 1))
        with magjit_dvm.lazy() as stats:
            seen.append(stats)
            seen.append((y * 2 + x).tolist())  # y waits in the first thread's queue
        seen.append(y.tolist())

    with magjit_dvm.lazy() as stats:
        y = x + 1
        assert waits(y)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert not waits(y)
        z = y + 1
    assert seen[0] is Tensor and seen[1] is not stats
    assert seen[2:] == [[5.0] * 3, [2.0] * 3]
    assert z.tolist() == [3.0] * 3


def test_two_threads_that_read_one_another() -> None:
    shared: dict[int, Tensor] = {}
    barrier = threading.Barrier(2, timeout=60)
    found: dict[int, list[float]] = {}

    def work(me: int) -> None:
        with torch.no_grad(), magjit_dvm.lazy():
            total = torch.zeros(3)
            for turn in range(50):
                shared[me] = torch.full((3,), float(turn)) + me
                barrier.wait()
                total = total + shared[1 - me]
                barrier.wait()
            found[me] = total.tolist()

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
    assert found == {0: [1225.0 + 50] * 3, 1: [1225.0] * 3}


def test_another_mode_above() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with magjit_dvm.lazy(), FlopCounterMode(display=False) as counter:
        y = (torch.ones(4, 4) @ torch.ones(4, 4)) + 1
    assert counter.get_total_flops() == 128
    assert y.sum() == 80


class Halting(nn.Module):
    """Works on until the state is small enough, along a path that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gate = nn.GRUCell(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for step in range(12):
            state = self.cell(x, state)
            gate = torch.sigmoid(self.gate(state))
            if gate.mean() > 0.5:
                state = state * gate + torch.tanh(x)
            else:
                state = state - 0.1 * gate
            if state.abs().max() < 0.9 or step > 9:
                break
        return F.normalize(state, dim=-1)


def test_a_model_whose_path_depends_on_values() -> None:
    torch.manual_seed(0)
    model = Halting().eval()
    flushes = set()
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(1 + seed % 3, 8) * (seed + 0.1)
        with magjit_dvm.lazy() as stats:
            y = model(x)
        flushes.add(sum(stats.flushes.values()))
        same(y, model(x))
    assert len(flushes) > 1
    again = []
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(4 + seed, 8) * (seed + 0.1)
        with magjit_dvm.lazy() as stats:
            model(x)
        again.append(stats.compiled)
    assert again[-1] <= 2


# -- finalizers --


class Reading:
    """Garbage whose end reads a tensor that may be waiting."""

    def __init__(self, given: Tensor, log: list[list[float]]) -> None:
        self.given, self.log, self.itself = given, log, self

    def __del__(self) -> None:
        self.log.append(((self.given + 1) * 2).tolist())


def test_a_finalizer_that_reads_while_an_operator_is_queued() -> None:
    log: list[list[float]] = []
    before = gc.get_threshold()
    with magjit_dvm.lazy():
        x = torch.ones(3)
        for turn in range(200):
            Reading(x, log)
            gc.set_threshold(1 + turn % 40)
            try:
                x = x + 1
                x.mul_(1)
                y = x * 2 - x
            finally:
                gc.set_threshold(*before)
            if turn % 7 == 0:
                assert y.tolist() == [turn + 2.0] * 3
    gc.collect()
    assert x.tolist() == [201.0] * 3
    assert sorted(one[0] for one in log) == [2.0 * (turn + 2) for turn in range(200)]


# -- random programs --


def sharing(pool: list[Tensor]) -> list[int]:
    addresses = [one.untyped_storage().data_ptr() for one in pool]
    return [addresses.index(one) for one in addresses]


MODES = {"gradients": torch.enable_grad, "none": torch.no_grad, "inference": torch.inference_mode}


def check(seed: int, rows: int, columns: int) -> None:
    program = Program(seed)
    with MODES[list(MODES)[seed % 3]]():
        try:
            expected, read = program.run(rows, columns)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))), magjit_dvm.lazy():
                program.run(rows, columns)
            return
        with magjit_dvm.lazy(longest=16 if seed % 4 == 0 else 256):
            found, seen = program.run(rows, columns)
    torch.testing.assert_close(seen, read, rtol=1e-4, atol=1e-4)
    assert sharing(found) == sharing(expected)
    for one, right in zip(found, expected, strict=True):
        assert type(one) is Tensor
        assert (one._base is None) == (right._base is None)
        assert one.stride() == right.stride() and one.storage_offset() == right.storage_offset()
        assert one.is_inference() == right.is_inference()
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(25))
def test_random_programs(seed: int) -> None:
    for rows, columns in ((6, 8), (9, 33), (5, 5)):
        check(seed, rows, columns)


@pytest.mark.parametrize("part", range(6))
def test_random_graphs(part: int) -> None:
    """Of all dtypes and layouts, with bounds of their errors."""
    for seed in range(part * 20, part * 20 + 20):
        graph = grown(seed)
        inputs = [one.make() for one in graph.given]
        with magjit_dvm.lazy():
            results = graph.module(*inputs)
        assert {type(one) for one in results} == {Tensor}
        check_results(results, graph.results)


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(8))
def test_many_random_programs(part: int) -> None:
    for seed in range(1000 + part * 100, 1100 + part * 100):
        for rows, columns in ((6, 8), (7, 7)):
            check(seed, rows, columns)
