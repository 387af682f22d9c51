"""What a call may return: every kind of object, with its identities."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..twin import Scene, call
from .table import new_table

ROWS = new_table()


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Result:
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenResult:
    first: Any


class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """As in transformers: a dictionary whose items are attributes, too, filled by `__init__`."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        for name, value in fields.items():
            self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class Plain:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Slotted:
    __slots__ = ("first", "second")


class WithReduce:
    """Can only be rebuilt by its own recipe."""

    def __init__(self, value: Any) -> None:
        self.__dict__["hidden"] = value

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("read only")

    def __reduce__(self) -> Any:
        return WithReduce, (self.hidden,)


class MyList(list):  # type: ignore[type-arg]
    pass


class MyDict(dict):  # type: ignore[type-arg]
    pass


class MyTuple(tuple):  # type: ignore[type-arg]
    pass


class Items(collections.UserDict):  # type: ignore[type-arg]
    pass


Point = collections.namedtuple("Point", "a b", defaults=[None])


def slotted(x: torch.Tensor) -> Slotted:
    made = Slotted()
    made.first = x + 1
    return made


def cyclic_list(x: torch.Tensor) -> Any:
    items = [x + 1]
    items.append(items)  # type: ignore[arg-type]
    return items


def cyclic_object(x: torch.Tensor) -> Any:
    made = Plain(value=x + 1)
    made.me = made  # type: ignore[attr-defined]
    made.peer = Plain(back=made)  # type: ignore[attr-defined]
    return made


def list_subclass(x: torch.Tensor) -> Any:
    made = MyList([x + 1])
    made.note = "kept"  # type: ignore[attr-defined]
    return made


def dict_subclass(x: torch.Tensor) -> Any:
    made = MyDict(a=x + 1)
    made.note = [1]  # type: ignore[attr-defined]
    return made


def shared_parts(x: torch.Tensor) -> Any:
    part = [x * 2]
    return [part, (part, part[0]), {"part": part}]


def closure(x: torch.Tensor) -> Any:
    y = x * 2

    def inner(z: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return z + y * scale

    return inner


def closure_over_a_mutable(x: torch.Tensor) -> Any:
    seen = [x * 2]

    def push(z: torch.Tensor) -> list[torch.Tensor]:
        seen.append(z)
        return seen

    return push, seen


def counter_of_calls(x: torch.Tensor) -> Any:
    count = 0

    def bump() -> int:
        nonlocal count
        count += 1
        return count

    bump()
    return bump, x + 1


def class_made_in_the_run(x: torch.Tensor) -> Any:
    class Local:
        scale = 2

        def __init__(self, value: Any) -> None:
            self.value = value

    return Local(x * Local.scale)


def exception_object(x: torch.Tensor) -> Any:
    try:
        raise ValueError("bad", 3)
    except ValueError as error:
        return error.with_traceback(None), x + 1


def two_views(x: torch.Tensor) -> Any:
    y = x * 2
    return y, y.view(-1), y[0], y.t()


def module_made(x: torch.Tensor) -> Any:
    layer = torch.nn.Linear(4, 4, bias=False)
    return layer, layer(x)


def iterators(x: torch.Tensor) -> Any:
    items = iter([x + 1, x + 2])
    next(items)
    return items


# name -> program over one float tensor of shape (3, 4)
RETURNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda x: None,
    "the input itself": lambda x: x,
    "the input twice": lambda x: [x, x],
    "the input beside a result": lambda x: (x, x + 1),
    "one result twice": lambda x: [y := x + 1, y],
    "constants of python": lambda x: (1, 2.5, "a", b"b", None, ..., True, 1j, Color.RED, x + 1),
    "python numbers of the shape": lambda x: (x.dim(), x.numel(), x.shape, x.stride(), x + 1),
    "dtype and device": lambda x: (x.dtype, x.device, x.layout, x + 1),
    "a constant tensor": lambda x: (torch.zeros(2), torch.tensor([1, 2]), x + 1),
    "scalar tensor of a python number": lambda x: (torch.tensor(2), torch.tensor(2.0), x + 1),
    "integer arithmetic": lambda x: (x * 100).long() // 2,
    "promoted dtypes": lambda x: (x + 1, x.int() + 1.5, x.bool() + 1, x.long() / 2),
    "tuple": lambda x: (x + 1, x + 2),
    "empty containers": lambda x: ([], (), {}, set(), x + 1),
    "nested containers": lambda x: {"a": [(x + 1, {"b": x + 2})], 3: {4: [x]}},
    "shared sub objects": shared_parts,
    "dict in order": lambda x: {"b": x + 1, "a": x + 2},
    "dict with tuple keys": lambda x: {(1, 2): x + 1, Color.RED: x + 2},
    "set": lambda x: ({1, 2}, frozenset({3}), x + 1),
    "deque with maxlen": lambda x: collections.deque([x + 1, x + 2], maxlen=4),
    "counter": lambda x: (collections.Counter("aab"), x + 1),
    "ordered dict": lambda x: collections.OrderedDict(b=x + 1, a=x + 2),
    "default dict": lambda x: collections.defaultdict(list, a=[x + 1]),
    "user dict": lambda x: Items(a=x + 1),
    "list subclass with attributes": list_subclass,
    "dict subclass with attributes": dict_subclass,
    "tuple subclass": lambda x: MyTuple((x + 1, 2)),
    "namedtuple": lambda x: Point(x + 1),
    "namedtuple of torch": lambda x: torch.max(x, dim=1),
    "dataclass": lambda x: Result(x + 1, [x]),
    "frozen slotted dataclass": lambda x: FrozenResult(x + 1),
    "model output": lambda x: ModelOutput(loss=x.sum(), logits=x + 1),
    "user object": lambda x: Plain(value=x + 1, items=[x]),
    "slots object": slotted,
    "object with reduce": lambda x: WithReduce(x + 1),
    "simple namespace": lambda x: types.SimpleNamespace(a=x + 1),
    "cyclic list": cyclic_list,
    "cyclic object": cyclic_object,
    "class made in the run": class_made_in_the_run,
    "closure": closure,
    "closure over a mutable": closure_over_a_mutable,
    "closure that counts": counter_of_calls,
    "lambda": lambda x: lambda z: z + x,
    "partial": lambda x: functools.partial(torch.add, x * 2, alpha=2),
    "bound method": lambda x: Plain(value=x + 1).__init__,
    "bound method of a tensor": lambda x: (x + 1).add,
    "weak reference": lambda x: [made := Plain(value=x + 1), weakref.ref(made)],
    "exception object": exception_object,
    "slice and range": lambda x: (slice(1, 2), range(3), x[1:2]),
    "list iterator": iterators,
    "itertools count": lambda x: (itertools.count(3), x + 1),
    "mapping proxy": lambda x: types.MappingProxyType({"a": x + 1}),
    "module type and function": lambda x: (torch, Plain, functools.reduce, x + 1),
    "numpy scalar": lambda x: (np.float32(2.0), np.zeros(3), x + 1),
    "module made in the run": module_made,
    "view of the input": lambda x: (x.view(-1), x[0], x.t(), x[:, 1:3]),
    "view of a view of the input": lambda x: x[1:].t()[::2],
    "views of one intermediate": two_views,
    "expanded view": lambda x: (x[:1].expand(3, 4), x + 1),
    "split pieces": lambda x: [x.chunk(2, dim=1), torch.unbind(x + 1)],
    "detached": lambda x: (x.detach(), (x + 1).detach()),
    "contiguous of a contiguous": lambda x: (x.contiguous(), x.float(), x.to(torch.float32)),
    "reshape that copies": lambda x: (x.t().reshape(-1), x.reshape(4, 3)),
    "strides of results": lambda x: ((x + 1).t(), x.t() + 1, (x.t() @ x).mT),
    "sorted with key": lambda x: sorted([x + 2, x + 1], key=lambda t: t.dim()),
    "conjugate view": lambda x: torch.complex(x, x).conj(),
    "parameter made in the run": lambda x: torch.nn.Parameter(x * 2),
    "requires grad set in the run": lambda x: (x * 2).requires_grad_(),
    "generator object": lambda x: [y + 1 for y in (v for v in x)],
}
MAY_SPLIT = {
    "bound method of a tensor",
    "class made in the run",
    "mapping proxy",
    "module made in the run",
    "numpy scalar",
}


def returns(program: Callable[[torch.Tensor], Any]) -> Scene:
    def run(x: torch.Tensor) -> Any:
        return program(x)

    return Scene(run)


for row_name, program in RETURNED.items():
    ROWS.add(
        f"returns {row_name}",
        functools.partial(returns, program),
        split=row_name in MAY_SPLIT,
    )


@ROWS.row()
def returns_an_outside_object() -> Scene:
    kept = Plain(items=[1])
    return Scene(lambda x: (kept, kept.items, x + 1), state=lambda: kept)


@ROWS.row()
def returns_the_same_list_as_given() -> Scene:
    return Scene(lambda items: (items, items[0] * 2), args=lambda: call([torch.randn(3)]))


@ROWS.row()
def returns_the_module_itself() -> Scene:
    class Self(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return self, x + 1

    module = Self()
    return Scene(module, state=lambda: vars(module))


@ROWS.row()
def returns_a_parameter() -> Scene:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    return Scene(lambda x: (layer.weight, layer.bias, layer(x)), state=lambda: layer)


@ROWS.row()
def returns_kwargs_that_do_not_leak() -> Scene:
    kept = {"y": 1}

    def program(x: torch.Tensor, **kwargs: Any) -> Any:
        kwargs["y"] += 1
        kwargs["made"] = x + 1
        return kwargs

    return Scene(program, args=lambda: call(torch.randn(3), **kept), state=lambda: kept)


@ROWS.row()
def returns_varargs_as_a_fresh_tuple() -> Scene:
    return Scene(lambda *args: (args, args[0] + 1), args=lambda: call(torch.randn(3), 2))


@ROWS.row()
def consumes_a_generator_of_its_own() -> Scene:
    def steps(x: torch.Tensor) -> Iterator[torch.Tensor]:
        for factor in range(3):
            x = x * (factor + 1) + 1
            yield x

    return Scene(lambda x: list(steps(x)))


@ROWS.row(split=True)
def consumes_a_generator_of_the_caller() -> Scene:
    made: list[Any] = []

    def program(x: torch.Tensor, items: Iterator[int]) -> torch.Tensor:
        return x * next(items)

    def args() -> Any:
        made.append(iter(range(2, 5)))
        return call(torch.randn(3), made[-1])

    return Scene(program, args=args, state=lambda: [list(items) for items in made])


@ROWS.row(split=True)
def returns_a_live_generator() -> Scene:
    def program(x: torch.Tensor) -> Iterator[torch.Tensor]:
        y = x * 2
        return (y + i for i in range(3))

    return Scene(lambda x: program(x))


@ROWS.row(split=True)
def returns_by_deepcopy() -> Scene:
    import copy

    kept = {"items": [1, 2], "t": torch.ones(4)}

    def program(x: torch.Tensor) -> Any:
        twin = copy.deepcopy(kept)
        twin["items"].append(3)
        return twin, x + twin["t"]

    return Scene(program, state=lambda: kept)


@ROWS.row()
def returns_by_copy() -> Scene:
    import copy

    kept = Plain(items=[1, 2])
    return Scene(lambda x: (copy.copy(kept), x + 1), state=lambda: kept)


@ROWS.row()
def returns_from_an_lru_cache() -> Scene:
    @functools.lru_cache
    def factors(n: int) -> tuple[int, ...]:
        return tuple(range(n))

    return Scene(lambda x: (factors(3), x * factors(3)[1]), state=lambda: factors(3))
