"""The standard library: containers, itertools, functools, dataclasses, enums, weak references."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import heapq
import inspect
import itertools
import math
import operator
import re
import string
import time
import types
import typing
import weakref
from typing import Any

import numpy as np
import torch

from .table import FeatureTable

ROWS = FeatureTable()

WIDTH: contextvars.ContextVar[int] = contextvars.ContextVar("WIDTH", default=3)


NUMBERED = re.compile(r"(\w+)\.(\d+)")


class Mode(enum.Enum):
    ADD = "add"
    MUL = "mul"


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass(order=True)
class Config:
    width: int = 2
    names: list[str] = dataclasses.field(default_factory=list)
    total: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.width * 2


class Pair(typing.NamedTuple):
    a: Any
    b: Any = 3


@ROWS.program()
def lists(x: torch.Tensor) -> Any:
    items = [x, x + 1]
    items.append(x + 2)
    items.insert(0, 3)
    items.extend((4, 5))
    last = items.pop()
    return items, last, items.index(3), [1, 2, 2].count(2), [1] * 3, [1, 2] == [1, 2]


@ROWS.program()
def dicts(x: torch.Tensor) -> Any:
    table = dict(a=x, b=2)
    table.update({"c": 3}, d=x + 1)
    merged = {**table, "e": 5} | {"f": 6}
    merged.setdefault("g", []).append(x)
    dropped = merged.pop("b"), merged.popitem()
    return merged, dropped, list(table.items()), dict.fromkeys("ab", 1), "a" in table


@ROWS.program()
def sets(x: torch.Tensor) -> Any:
    a, b = {1, 2, 3}, frozenset({2, 3, 4})
    return a & b, a | b, a - b, a ^ b, 2 in a, len(a), a >= {1}, x * sum(a)


@ROWS.program()
def sets_of_tensors(x: torch.Tensor) -> Any:
    seen = {x}
    return x * 2 if x in seen else x


@ROWS.program()
def deques(x: torch.Tensor) -> Any:
    queue = collections.deque([1, 2], maxlen=3)
    queue.extend([x, x + 1])
    queue.appendleft(0)
    queue.rotate(1)
    return queue, queue[0], queue.popleft()


@ROWS.program()
def counters(x: torch.Tensor) -> Any:
    counts = collections.Counter("abca")
    counts.update("a")
    return x * counts["a"], counts.most_common(1), counts + collections.Counter("b")


@ROWS.program()
def ordered_dicts(x: torch.Tensor) -> Any:
    table = collections.OrderedDict(a=x, b=x + 1)
    table.move_to_end("a")
    return table, next(iter(table)), list(reversed(table))


@ROWS.program()
def default_dicts(x: torch.Tensor) -> Any:
    groups: Any = collections.defaultdict(list)
    for i in range(3):
        groups[i % 2].append(x * i)
    return groups, 7 in groups


@ROWS.program()
def user_dicts_and_chain_maps(x: torch.Tensor) -> Any:
    table = collections.UserDict(a=x)
    table["b"] = x + 1
    chain = collections.ChainMap({"a": 1}, {"c": 2})
    return table["b"], len(table), chain["c"], dict(chain)


@ROWS.program()
def named_tuple_class_of_the_run(x: torch.Tensor) -> Any:
    pair = collections.namedtuple("pair", ["a", "b"], defaults=[1])
    made = pair(x * 2)
    time.sleep(0)
    return made.a + made.b, made._fields, pair.__name__, isinstance(made, pair)


@ROWS.program()
def namedtuples(x: torch.Tensor) -> Any:
    pair = Pair(x)
    return pair._replace(b=4), pair._asdict(), pair.a + pair.b, Pair._fields


@ROWS.program()
def data_classes(x: torch.Tensor) -> Any:
    config = Config(3, ["a"])
    other = dataclasses.replace(config, width=4)
    return x * other.total, dataclasses.asdict(config), config < other, config == Config(3, ["a"])


@ROWS.program()
def data_class_made_in_the_run(x: torch.Tensor) -> Any:
    @dataclasses.dataclass
    class Local:
        value: Any
        scale: int = 2

    return Local(x).value * Local(x).scale, repr(Local(1))


@ROWS.program()
def enums(x: torch.Tensor) -> Any:
    y = x * 2 if Mode("mul") is Mode.MUL else x
    return y, Mode["ADD"], [m.value for m in Mode], Level.LOW | Level.HIGH, Level.HIGH > 1


@ROWS.program()
def weak_references(x: torch.Tensor) -> Any:
    class Target:
        value = 2

    target = Target()
    ref = weakref.ref(target)
    table: Any = weakref.WeakKeyDictionary({target: x})
    alive = ref().value
    out = table[target] * alive
    del target
    return out, ref() is None


@ROWS.program()
def partial_functions(x: torch.Tensor) -> Any:
    scaled = functools.partial(torch.add, alpha=2)
    nested = functools.partial(functools.partial(max, 1), 2)
    return scaled(x, x), nested(3), scaled.keywords


@ROWS.program()
def partial_methods(x: torch.Tensor) -> Any:
    class Owner:
        def scale(self, t: torch.Tensor, by: int) -> torch.Tensor:
            return t * by

        double = functools.partialmethod(scale, by=2)

    return Owner().double(x)


@ROWS.program()
def cached_functions(x: torch.Tensor) -> Any:
    @functools.lru_cache(maxsize=2)
    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    return x * fib(10)


@ROWS.program()
def cached_properties(x: torch.Tensor) -> Any:
    class Owner:
        made = 0

        @functools.cached_property
        def value(self) -> Any:
            self.made += 1
            return x * 2

    owner = Owner()
    return owner.value + owner.value, owner.made


@ROWS.program()
def reduce_and_accumulate(x: torch.Tensor) -> Any:
    return functools.reduce(operator.add, [x, x, x]), list(itertools.accumulate([1, 2, 3]))


@ROWS.program()
def itertools_functions(x: torch.Tensor) -> Any:
    return (
        list(itertools.chain([x], (x + 1,))),
        list(itertools.product([1, 2], "ab")),
        list(itertools.islice(itertools.count(3), 2)),
        [(k, list(g)) for k, g in itertools.groupby([1, 1, 2])],
        list(itertools.zip_longest([1], [2, 3])),
        list(itertools.combinations([1, 2, 3], 2)),
        list(itertools.starmap(torch.add, [(x, x), (x, 1)])),
        list(itertools.pairwise([1, 2, 3])),
        list(itertools.takewhile(lambda v: v < 2, [1, 2])),
        [next(it) for it in itertools.tee(iter([x]))],
        list(zip(itertools.cycle([1, 2]), range(3))),
        list(itertools.repeat(1, 2)),
    )


@ROWS.program()
def operator_functions(x: torch.Tensor) -> Any:
    return operator.mul(x, 2), operator.attrgetter("shape")(x), operator.itemgetter(0)(x)


@ROWS.program()
def operator_methodcaller(x: torch.Tensor) -> Any:
    return operator.methodcaller("sum", dim=0)(x)


@ROWS.program()
def math_functions(x: torch.Tensor) -> Any:
    return x * math.sqrt(x.shape[0]) + math.ceil(2.3) + math.prod(x.shape) + math.log2(8)


@ROWS.program()
def copy_and_deepcopy(x: torch.Tensor) -> Any:
    table = {"a": [x, 1]}
    return copy.copy(table)["a"] is table["a"], copy.deepcopy({"a": [1]}), copy.copy([x])


@ROWS.program()
def heaps_and_bisect(x: torch.Tensor) -> Any:
    import bisect

    heap = [3, 1, 2]
    heapq.heapify(heap)
    heapq.heappush(heap, 0)
    return x * heapq.heappop(heap), heap, bisect.bisect([1, 2, 3], 2), heapq.nlargest(2, heap)


@ROWS.program()
def strings(x: torch.Tensor) -> Any:
    name = "layer.3.weight"
    parts = name.split(".")
    return x * int(parts[1]), name.replace(".", "_"), name.startswith("layer"), parts


@ROWS.program()
def string_templates_and_regular_expressions(x: torch.Tensor) -> Any:
    found = NUMBERED.match("layer.3")
    return x * int(found.group(2)), string.Template("$a").substitute(a=1), NUMBERED.sub("b", "a.1")


@ROWS.program()
def signature_inspection(x: torch.Tensor) -> Any:
    def f(a: Any, b: int = 2) -> Any:
        return a

    return x * len(inspect.signature(f).parameters), inspect.isfunction(f)


@ROWS.program()
def simple_namespaces(x: torch.Tensor) -> Any:
    space = types.SimpleNamespace(a=x)
    space.b = space.a * 2
    return space, vars(space)["b"]


@ROWS.program()
def context_variables(x: torch.Tensor) -> Any:
    return x * WIDTH.get()


@ROWS.program()
def numpy_on_constants(x: torch.Tensor) -> Any:
    widths = np.linspace(0, 1, 4).astype(np.float32)
    return x * float(widths[2]) + int(np.prod((2, 3)))


@ROWS.program(split=True)
def numpy_to_tensor(x: torch.Tensor) -> Any:
    return x + torch.from_numpy(np.arange(4, dtype=np.float32))


@ROWS.program(split=True)
def tensor_to_numpy(x: torch.Tensor) -> Any:
    return x * float(x.numpy().sum())


@ROWS.program()
def pytrees(x: torch.Tensor) -> Any:
    from torch.utils import _pytree

    flat, spec = _pytree.tree_flatten({"a": [x, (x + 1, 2)]})
    return _pytree.tree_unflatten([v * 2 for v in flat], spec)


@ROWS.program()
def memory_views_and_bytes(x: torch.Tensor) -> Any:
    return x * memoryview(b"abc")[1], bytes([1, 2]), bytearray(b"a") + b"b", int.from_bytes(b"a")


@ROWS.program()
def asynchronous_function_driven_by_hand(x: torch.Tensor) -> Any:
    async def work() -> Any:
        return x * 2

    coroutine = work()
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
