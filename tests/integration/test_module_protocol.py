"""A compiled module is the module: attributes, state, hooks, copies, pickles, replicas."""

from __future__ import annotations

import abc
import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

import magjit
from magjit.errors import ArgumentError

T = TypeVar("T")
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    """Doc of the model."""

    kind = "net"

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        """Doc of forward."""
        return self.drop(self.norm(self.linear(x))) * self.scale + shift

    def double(self) -> Any:
        return super().double()

    @property
    def width(self) -> int:
        return self.linear.out_features

    @width.setter
    def width(self, value: int) -> None:
        self.linear = nn.Linear(4, value)

    @classmethod
    def make(cls) -> Net:
        return cls()

    def __len__(self) -> int:
        return 7

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


def pair() -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net().eval()
    return model, magjit.compile(model, backend="eager", fullgraph=True)


def same(model: Any, compiled: Any) -> None:
    for _ in range(2):
        torch.manual_seed(1)
        expected = model(X)
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(X), expected)


def test_it_is_an_instance() -> None:
    model, compiled = pair()
    assert isinstance(compiled, Net) and isinstance(compiled, nn.Module)
    assert not isinstance(compiled, nn.Linear)
    assert type(compiled).__name__ == "Net" and type(compiled).__module__ == __name__
    assert issubclass(type(compiled), Net)
    assert compiled.__class__ is type(compiled)
    assert repr(compiled) == repr(model)
    assert compiled.__doc__ == model.__doc__ and compiled.forward.__doc__ == "Doc of forward."
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert (len(compiled), compiled["scale"], compiled.kind) == (7, 2.0, "net")
    assert compiled.make().kind == "net"
    assert set(dir(model)) <= set(dir(compiled))


def test_state_is_shared() -> None:
    model, compiled = pair()
    assert list(compiled.state_dict()) == list(model.state_dict())
    for name, value in compiled.state_dict(keep_vars=True).items():
        assert value is model.state_dict(keep_vars=True)[name]
    for listing in ("parameters", "buffers", "modules", "children"):
        ours, theirs = list(getattr(compiled, listing)()), list(getattr(model, listing)())
        skip = int(listing == "modules")
        assert len(ours) == len(theirs)
        assert all(a is b for a, b in zip(ours[skip:], theirs[skip:], strict=True))
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in model.named_parameters()]
    other = Net().eval()
    compiled.load_state_dict(other.state_dict())
    same(other, compiled)
    same(model, compiled)


def test_attributes_both_ways() -> None:
    model, compiled = pair()
    same(model, compiled)
    compiled.scale = 3.0
    assert model.scale == 3.0
    same(model, compiled)
    model.scale = 4.0
    assert compiled.scale == 4.0
    same(model, compiled)
    compiled.extra = nn.Linear(1, 1)
    assert model.extra is compiled.extra and "extra.weight" in model.state_dict()
    del model.extra
    assert not hasattr(compiled, "extra")
    compiled.norm, compiled.width = nn.BatchNorm1d(6).eval(), 6
    assert model.width == compiled.width == 6
    same(model, compiled)
    compiled.register_buffer("more", torch.ones(2))
    compiled.register_parameter("weight", nn.Parameter(torch.ones(2)))
    assert model.more is compiled.more and model.weight is compiled.weight
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'missing'"):
        compiled.missing  # noqa: B018


def test_train_and_eval_both_ways() -> None:
    model, compiled = pair()
    for switch, training in (
        (compiled.train, True),
        (model.eval, False),
        (model.train, True),
        (compiled.eval, False),
    ):
        switch()
        assert model.training == compiled.training == model.drop.training == training
        if not training:
            same(model, compiled)
    assert compiled.eval() is compiled and compiled.train() is compiled


def test_moves_and_casts() -> None:
    model, compiled = pair()
    same(model, compiled)
    assert compiled.to(torch.float64) is compiled
    assert model.linear.weight.dtype == torch.float64
    torch.testing.assert_close(compiled(X.double()), model(X.double()))
    assert model.half() is model and compiled.linear.weight.dtype == torch.float16
    compiled.float()
    same(model, compiled)
    compiled.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    assert not compiled(X).requires_grad
    compiled.apply(lambda module: setattr(module, "seen", True))
    assert model.seen and model.linear.seen
    compiled.zero_grad()
    compiled.share_memory()


def test_hooks() -> None:
    model, compiled = pair()
    same(model, compiled)
    seen: list[type] = []

    def before(module: nn.Module, args: Any) -> Any:
        seen.append(type(module))
        return (args[0] * 2,)

    def after(module: nn.Module, args: Any, out: torch.Tensor) -> Any:
        return out + 1

    plain = model.forward(X)
    handles = [compiled.register_forward_pre_hook(before), model.register_forward_hook(after)]
    torch.testing.assert_close(compiled(X), model.forward(X * 2) + 1)
    same(model, compiled)
    assert set(seen) == {Net}
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(compiled(X), plain)
    same(model, compiled)


@pytest.mark.filterwarnings("ignore::magjit.MagJITWarning")
def test_backward_hooks() -> None:
    compiled = magjit.compile(pair()[0], backend="eager")
    seen: list[torch.Size] = []
    compiled.register_full_backward_hook(lambda module, gi, go: seen.append(go[0].shape))
    for _ in range(2):
        compiled(X.clone().requires_grad_()).sum().backward()
    assert seen == [torch.Size([3, 4])] * 2


def copies() -> list[tuple[str, Callable[[Any], Any]]]:
    def saved(compiled: Any) -> Any:
        buffer = io.BytesIO()
        torch.save(compiled, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    return [
        ("deepcopy", copy.deepcopy),
        ("pickle", lambda compiled: pickle.loads(pickle.dumps(compiled))),
        ("torch.save", saved),
    ]


@pytest.mark.parametrize("name, duplicate", copies())
@pytest.mark.parametrize("calls", [0, 2])
def test_copies_are_independent(name: str, duplicate: Any, calls: int) -> None:
    model, compiled = pair()
    for _ in range(calls):
        compiled(X)
    other = duplicate(compiled)
    assert isinstance(other, Net) and magjit.stats(other).captures == 0
    assert other.linear is not model.linear
    same(compiled, other)
    with torch.no_grad():
        other.linear.weight.add_(1)
    other.scale = 5.0
    assert model.scale == 2.0 and not torch.equal(other.linear.weight, model.linear.weight)
    same(model, compiled)
    assert magjit.stats(other).captures >= 1
    assert magjit.stats(compiled).captures == 1


def test_a_shallow_copy_shares_parameters() -> None:
    model, compiled = pair()
    other = copy.copy(compiled)
    assert isinstance(other, Net) and other.linear is model.linear
    other.scale = 3.0
    assert model.scale == 2.0
    same(model, compiled)
    torch.testing.assert_close(other(X), model(X) * 1.5)


def test_the_state_alone_is_saved_and_loaded() -> None:
    model, compiled = pair()
    buffer = io.BytesIO()
    torch.save(compiled.state_dict(), buffer)
    buffer.seek(0)
    other = Net().eval()
    other.load_state_dict(torch.load(buffer))
    same(other, compiled)


def test_replicas() -> None:
    model, compiled = pair()
    same(model, compiled)
    replica = compiled._replicate_for_data_parallel()
    assert isinstance(replica, Net)
    replica.scale = 9.0
    assert model.scale == 2.0
    torch.testing.assert_close(replica(X), model(X) * 4.5)
    if not torch.cuda.is_available():  # with one, DataParallel moves the inputs there
        same(model, nn.DataParallel(compiled))


def test_as_a_submodule() -> None:
    model, compiled = pair()
    outer = nn.Sequential(compiled, nn.ReLU())
    assert list(outer.state_dict())[0] == "0.linear.weight"
    same(nn.Sequential(model, nn.ReLU()), outer)
    whole = magjit.compile(outer, backend="eager", fullgraph=True)
    same(nn.Sequential(model, nn.ReLU()), whole)
    assert magjit.stats(whole).captures == 1
    duplicate = copy.deepcopy(outer)
    same(outer, duplicate)
    assert magjit.stats(duplicate[0]).captures == 1
    magjit.stats(compiled)


def test_compiling_what_is_compiled_compiles_the_model() -> None:
    model, compiled = pair()
    again = magjit.compile(compiled, backend="eager", fullgraph=True)
    same(model, again)
    assert magjit.stats(again).captures == 1 and magjit.stats(compiled).captures == 0
    assert again.linear is model.linear


def test_methods_of_the_model() -> None:
    model, compiled = pair()
    torch.testing.assert_close(compiled.forward(X), model.forward(X))
    assert magjit.stats(compiled).captures == 0
    assert compiled.double() is compiled and model.linear.weight.dtype == torch.float64
    compiled.double.__self__  # noqa: B018
    torch.testing.assert_close(compiled.__call__(X.double()), model(X.double()))
    torch.testing.assert_close(nn.Module.__call__(compiled, X.double()), model(X.double()))


def test_forward_set_on_the_object() -> None:
    model, compiled = pair()
    same(model, compiled)
    model.forward = lambda x: x + 1  # type: ignore[method-assign,assignment]
    same(model, compiled)
    compiled.forward = lambda x: x + 2
    same(model, compiled)
    torch.testing.assert_close(compiled(X), X + 2)
    del model.forward
    same(model, compiled)


def test_training_updates_the_model() -> None:
    model, compiled = pair()
    twin = copy.deepcopy(model)
    for call, module in ((compiled, compiled), (twin, twin)):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(step)
            module.train()
            optimizer.zero_grad()
            call(X).square().sum().backward()
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    assert magjit.stats(compiled).replays == 2


# --- classes that are hard to subclass ----------------------------------------------------------

REGISTRY: list[type] = []


class Registered(nn.Module):
    def __init_subclass__(cls, *, key: str, **more: Any) -> None:
        REGISTRY.append(cls)
        super().__init_subclass__(**more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Meta(type):
    made: list[str] = []

    def __new__(mcls, name: str, bases: Any, namespace: Any, *, key: str = "") -> Any:
        Meta.made.append(name)
        return super().__new__(mcls, name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__call__(*args, **kwargs)
        instance.built = True
        return instance


class WithMeta(nn.Module, metaclass=Meta, key="x"):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + int(self.built)  # type: ignore[operator]


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def part(self, x: torch.Tensor) -> torch.Tensor: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) + 1


class Concrete(Abstract):
    def part(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Typed(nn.Module, Generic[T]):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class Guarded(nn.Module):
    """Intercepts attributes and defines equality."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "log", [])

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forbidden":
            raise AttributeError(name)
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Guarded)

    def __hash__(self) -> int:
        return 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1


class Called(nn.Module):
    """Its own `__call__`."""

    def __call__(self, x: torch.Tensor, twice: bool = False) -> Any:
        out = super().__call__(x)
        return (out, out) if twice else out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class Slotted(nn.Module):
    __slots__ = ("held",)

    def __init__(self) -> None:
        super().__init__()
        self.held = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.held


class Picky(nn.Module):
    """Cannot be made without arguments."""

    def __new__(cls, must: int, *, be: str) -> Any:
        return super().__new__(cls)

    def __init__(self, must: int, *, be: str) -> None:
        super().__init__()
        self.must = must

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.must


HARD = {
    "container": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    "recurrent": lambda: nn.LSTM(4, 4),
    "lazy, materialized": lambda: (layer := nn.LazyLinear(4), layer(X))[0],
    "subclass hook": lambda: Registered(),
    "metaclass": lambda: WithMeta(),
    "abstract base": lambda: Concrete(),
    "generic": lambda: Typed[int](),
    "attribute hooks": lambda: Guarded(),
    "own __call__": lambda: Called(),
    "arguments of __new__": lambda: Picky(3, be="x"),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "slots": lambda: Slotted(),
}


@pytest.mark.parametrize("name", HARD)
def test_classes_that_are_hard_to_subclass(name: str) -> None:
    model = HARD[name]()
    registered, made = list(REGISTRY), list(Meta.made)
    compiled = magjit.compile(model, backend="eager")
    assert (registered, made) == (REGISTRY, Meta.made)
    assert isinstance(compiled, type(model))
    for _ in range(3):
        torch.testing.assert_close(compiled(X), model(X))
    if name == "own __call__":
        torch.testing.assert_close(compiled(X, twice=True), model(X, twice=True))
    stats = magjit.stats(compiled)
    assert stats.replays >= 2 or stats.splits, stats
    if name not in ("arguments of __new__", "slots"):  # which eager cannot copy either
        torch.testing.assert_close(copy.deepcopy(compiled)(X), model(X))


def test_slots_are_shared() -> None:
    model = Slotted()
    compiled = magjit.compile(model, backend="eager")
    for value in (2.0, 3.0):
        compiled.held = value
        assert model.held == value == compiled.held
        torch.testing.assert_close(compiled(X), X * value)
    del compiled.held
    with pytest.raises(AttributeError):
        model.held  # noqa: B018


def test_the_class_of_a_compiled_module_makes_plain_modules() -> None:
    _, compiled = pair()
    other = type(compiled)(6)
    assert type(other) is Net and other.width == 6


def test_script_modules_run_as_they_are() -> None:
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.trace(nn.Linear(4, 4), (X,))
    with pytest.warns(magjit.MagJITWarning, match="ScriptModule") as caught:
        compiled = magjit.compile(scripted)
    assert compiled is scripted and caught[0].filename == __file__
    with pytest.raises(ArgumentError, match="ScriptModule"):
        magjit.compile(scripted, fullgraph=True)


def test_fake_parameters_and_optimizer_state_follow_the_model() -> None:
    model, compiled = pair()
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in model.parameters()
    }


class CloseNames(nn.Module):
    """Parameters whose names differ in case alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a_b = nn.Parameter(torch.full((3,), 2.0))
        self.a_B = nn.Parameter(torch.full((3,), 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.a_B - self.a_b * x


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_names_that_differ_in_case_alone(backend: str) -> None:
    model = CloseNames()
    compiled = magjit.compile(model, backend=backend)
    for _ in range(3):
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x), model(x))
