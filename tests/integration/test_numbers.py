"""Counters and random numbers: no capture for each value, and always what eager does."""

from __future__ import annotations

import collections
import copy
import ctypes
import json
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import magjit
from magjit.errors import GraphBreakError

CALLS = 10


class Holder:
    """A plain object with a counter; its method makes the attribute a candidate."""

    def __init__(self) -> None:
        self.n = 0

    def advance(self) -> None:
        self.n += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holder) and self.n == other.n

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Holder({self.n})"


class Structure(ctypes.Structure):
    """Converts what is stored in it."""

    _fields_ = (("n", ctypes.c_long),)

    def __repr__(self) -> str:
        return f"Structure({self.n})"

    def __deepcopy__(self, memo: Any) -> Structure:
        return Structure(self.n)


class Counting(nn.Module):
    """A module with counters; ``body`` is the program."""

    def __init__(self, body: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.count = 0
        self.total = 0.0
        self.limit = 3
        self.items = [1, 2, 3]
        self.last: Any = None
        self.holder = Holder()
        self.structure = Structure()
        self.array = np.array(3.0)
        self.weights = [0.5, 0.5]

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)

    def advance(self, by: int = 1) -> int:
        self.count += by
        return self.count

    def note(self, value: Any) -> None:
        self.last = value
        self.total = self.total + 0.5


def every_third(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return x * 2 if m.count % 3 == 0 else x + 1


def returned(m: Any, x: torch.Tensor) -> Any:
    m.count += 1
    m.total += 0.5
    return x + 1, m.count, {"total": m.total}, [m.count, m.count * 2]


def by_a_method(m: Any, x: torch.Tensor) -> Any:
    before = m.count
    after = m.advance(2)
    return x + 1, after - before, after


def ring(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 3) % 4
    return x + 1, -m.count, float(m.count), max(m.count, 2), min(1, m.count), abs(-m.count)


def until_a_limit(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.count < m.limit:
        m.count += 1
    return x + 1


def nested(m: Any, x: torch.Tensor) -> Any:
    def add(n: int, *more: int, scale: int = 1) -> int:
        return n * scale + sum(more)

    m.count += 1
    return x + 1, add(m.count), add(m.count, scale=2)


def stored_elsewhere(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    m.note(m.count * 2)
    return x + 1


def unpacked(m: Any, x: torch.Tensor) -> Any:
    m.count += 1
    a, b = m.count, m.count + 1
    pair = (a, b)
    c, d = pair
    return x + 1, pair[0], c + d


def as_an_index(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 3
    return x * m.items[m.count]


def in_a_tensor(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count = (m.count + 1) % 2
    return x * m.count + torch.full((2,), float(m.count))


def in_tensor_arithmetic(m: Any, x: torch.Tensor) -> Any:
    m.count += 1
    m.total += 0.25
    y = x * m.count + 3 - m.total
    z = (m.count + 2) * y / m.count
    z -= m.count
    return z > m.count, z, x[[m.count % 2]], x[m.count % 2], torch.zeros(2) + m.count


def constants_and_counters(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 2
    return (torch.ones(2) * m.count).tolist(), x


def sizes(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 2
    return x[: m.count + 1], torch.zeros(m.count + 1), x.view(m.count * 0 + 2)


def spread(m: Any, x: torch.Tensor) -> Any:
    def add(*numbers: int) -> int:
        return sum(numbers)

    m.count = (m.count + 1) % 3
    shape = (2,)
    three = (1, *shape, m.count)
    return torch.zeros(m.count + 1, *shape), max(*[m.count, 1]), add(m.count, *shape), three


def in_a_text(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 2
    return x + 1, f"{m.count}", "%d" % m.count, str(m.count)  # noqa: UP031


def read_by_c_code(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 2
    return x + 1, json.dumps({"count": vars(m)["count"]}), sorted([m.count, 0]), sum([m.count, 1])


def by_identity(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 2
    return x + 1, m.count is m.count, m.count is None, m.count is m.items


def in_a_range(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count = (m.count + 1) % 3
    for _ in range(m.count):
        x = x + 1
    return x


def divided(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 3
    try:
        return x + 1, 6 // m.count
    except ZeroDivisionError:
        return x - 1, None


def changes_type(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count = m.count + 1 if isinstance(m.count, int) else 0
    if m.count == 3:
        m.count = 0.5
    return x + 1


def mapped(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 2
    return x + 1, list(map(lambda n: n + m.count, m.items)), [n for n in m.items if n > m.count]


def from_generators(m: Any, x: torch.Tensor) -> Any:
    def numbers(n: int) -> Any:
        yield n

    m.count = (m.count + 1) % 3
    return x, sum(m.count for _ in range(2)), str(list(numbers(m.count)))


def of_another_type(m: Any, x: torch.Tensor) -> Any:
    m.count += 1
    return x, isinstance(min(m.count, 2.5), int), type(max(m.count, 4.5)) is int


def as_keys(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 4
    return x, {3: "a", m.count: "b"}[3]


def pickled(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 3
    m.holder.n = m.count
    return x, pickle.loads(pickle.dumps(m.holder)).n, pickle.loads(pickle.dumps([m.holder]))[0].n


def in_the_locals(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 3
    count = m.count  # noqa: F841
    return x, "%(count)d" % locals(), "{count}".format(**locals())  # noqa: UP031


def into_c_structures(m: Any, x: torch.Tensor) -> Any:
    m.count = (m.count + 1) % 3
    m.structure.n = m.count
    made = Holder.__new__(Holder)
    object.__setattr__(made, "n", m.count)
    return x, m.structure.n, str(made.__dict__)


def initialised(m: Any, x: torch.Tensor) -> Any:
    m.total = (m.total + 0.5) % 2
    weight = torch.empty(2)
    nn.init.constant_(weight, 1.0)
    nn.init.constant_(weight, m.total)
    return weight * x


def large(m: Any, x: torch.Tensor) -> Any:
    before = m.count
    same = before is m.count
    m.count = m.count * 2**300 + 1
    try:
        value = m.count / 3
    except OverflowError:
        raise KeyError("too large") from None
    m.total += 1
    return x, value, same


def doubled(m: Any, x: torch.Tensor) -> Any:
    n = m.count + 1
    for _ in range(40):
        n = n + n
    m.count = n % 7
    return x, n


def in_closures(m: Any, x: torch.Tensor) -> Any:
    m.count += 1
    count = m.count

    def deeper() -> Any:
        nonlocal count
        count += 1
        return count

    return x + 1, deeper(), count


def raising(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    if m.count % 4 == 0:
        raise KeyError("fourth")
    return x + 1


COUNTERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "every third call is another": every_third,
    "returned": returned,
    "by a method": by_a_method,
    "a ring": ring,
    "until a limit": until_a_limit,
    "through functions": nested,
    "stored elsewhere": stored_elsewhere,
    "taken apart": unpacked,
    "as an index": as_an_index,
    "in a tensor": in_a_tensor,
    "in tensor arithmetic": in_tensor_arithmetic,
    "in a constant tensor": constants_and_counters,
    "as a size": sizes,
    "spread": spread,
    "in a text": in_a_text,
    "read by C code": read_by_c_code,
    "by identity": by_identity,
    "in a range": in_a_range,
    "divided": divided,
    "changes its type": changes_type,
    "mapped": mapped,
    "in closures": in_closures,
    "from generators": from_generators,
    "of another type": of_another_type,
    "as keys": as_keys,
    "pickled": pickled,
    "in the locals": in_the_locals,
    "into C structures": into_c_structures,
    "by opaque functions": initialised,
    "large": large,
    "doubled": doubled,
    "raising": raising,
}
FEW_CAPTURES = {
    "every third call is another": 2,
    "returned": 1,
    "by a method": 1,
    "until a limit": 2,
    "stored elsewhere": 1,
    "taken apart": 1,
    "in closures": 1,
    "in tensor arithmetic": 1,
}
"""Counters that are only computed with, compared, stored and returned; captures in all calls."""


def unused(m: Any, x: torch.Tensor) -> torch.Tensor:
    random.random()
    np.random.rand(2, 2)
    return x + 1


def layer_drop(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        if np.random.random() < 0.5:
            x = x + 1
    return x


def jitter(m: Any, x: torch.Tensor) -> Any:
    scale = random.uniform(1, 2)
    return (x + 1 if scale > 1.5 else x), scale, np.random.uniform()


def steps(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(random.randint(0, 2)):
        x = x + 1
    return x


def chosen(m: Any, x: torch.Tensor) -> Any:
    return x + 1, random.choice([1, 2]), np.random.choice([3, 4], 2, p=[0.5, 0.5])


def while_lucky(m: Any, x: torch.Tensor) -> torch.Tensor:
    while random.random() < 0.3:
        x = x + 1
    return x


def with_a_counter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    if m.count > 4 and random.random() < 0.5:
        return x * 2
    return x


def shuffled(m: Any, x: torch.Tensor) -> Any:
    order = [1, 2, 3]
    random.shuffle(order)
    return x + 1, order, random.sample(order, 2), random.gauss(0, 1)


def seeded(m: Any, x: torch.Tensor) -> Any:
    random.seed(1)
    return x + 1, random.random()


def own_generator(m: Any, x: torch.Tensor) -> Any:
    return x + 1, random.Random(3).random(), np.random.RandomState(3).rand()


def from_c_code(m: Any, x: torch.Tensor) -> Any:
    return x + 1, [fn() for fn in (random.random,) * 2], list(map(lambda _: random.random(), "ab"))


def of_arguments(m: Any, x: torch.Tensor) -> Any:
    m.array[...] = m.array + 1
    m.weights[0], m.weights[1] = m.weights[1] / 2, 1 - m.weights[1] / 2
    return x, np.random.normal(m.array), np.random.choice(3, p=[*m.weights, 0.0])


def unseen(m: Any, x: torch.Tensor) -> Any:
    return x, collections.defaultdict(random.random)["a"], next(iter(random.random, 2))


def summed(m: Any, x: torch.Tensor) -> Any:
    return x, sum(random.random() for _ in range(3))


def into_a_tensor(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * random.random() + torch.tensor(np.random.rand(2), dtype=x.dtype)


RANDOM: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "unused": unused,
    "layer drop": layer_drop,
    "jitter": jitter,
    "how many steps": steps,
    "a choice": chosen,
    "while lucky": while_lucky,
    "with a counter": with_a_counter,
    "shuffled": shuffled,
    "seeded": seeded,
    "a generator of its own": own_generator,
    "called by C code": from_c_code,
    "into a tensor": into_a_tensor,
    "of arguments": of_arguments,
    "unseen": unseen,
    "summed": summed,
}
FEW_PATHS = {"layer drop": 4, "jitter": 2, "with a counter": 4}
"""Programs whose random numbers only decide between paths, and how many there are."""


class Worlds:
    """The same program eagerly and compiled, each with the generators as it left them."""

    def __init__(self, body: Callable[[Any, torch.Tensor], Any]) -> None:
        self.eager = Counting(body)
        self.module = copy.deepcopy(self.eager)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.compiled = magjit.compile(self.module, backend="eager")
        random.seed(7)
        np.random.seed(7)
        self.states = [self.generators()] * 2

    @staticmethod
    def generators() -> Any:
        return random.getstate(), np.random.get_state(legacy=False)

    def call(self, which: int, x: torch.Tensor) -> Any:
        random.setstate(self.states[which][0])
        np.random.set_state(self.states[which][1])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", magjit.MagJITWarning)
                result = (self.eager, self.compiled)[which](x.clone())
        except KeyError as error:
            result = repr(error)
        self.states[which] = self.generators()
        return result

    def state(self, which: int) -> Any:
        module = (self.eager, self.module)[which]
        return {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "body"}

    def same_call(self, x: torch.Tensor) -> None:
        results = [self.call(which, x) for which in (0, 1)]
        assert shown(results[0]) == shown(results[1])
        assert shown(self.state(0)) == shown(self.state(1))
        assert self.states[0][0] == self.states[1][0]
        assert shown(self.states[0][1]) == shown(self.states[1][1])


def shown(value: Any) -> str:
    """Values with their types, for comparison."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {shown(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__}{value.dtype}{value.tolist()}"
    return f"{type(value).__name__}:{value!r}"


@pytest.mark.parametrize("name", [*COUNTERS, *RANDOM])
def test_is_as_eager(name: str) -> None:
    worlds = Worlds((COUNTERS | RANDOM)[name])
    for call in range(CALLS):
        worlds.same_call(torch.full((2,), float(call)))


@pytest.mark.parametrize("name", FEW_CAPTURES)
def test_counters_need_no_capture_each(name: str) -> None:
    worlds = Worlds(COUNTERS[name])
    for call in range(CALLS):
        worlds.same_call(torch.full((2,), float(call)))
    stats = magjit.stats(worlds.compiled)
    assert stats.captures == FEW_CAPTURES[name] and stats.splits == 0, stats


@pytest.mark.parametrize("name", FEW_PATHS)
def test_one_capture_a_path(name: str) -> None:
    worlds = Worlds(RANDOM[name])
    for call in range(4 * CALLS):
        worlds.same_call(torch.full((2,), float(call)))
    stats = magjit.stats(worlds.compiled)
    assert 1 < stats.captures <= FEW_PATHS[name] and stats.splits == 0, stats


@pytest.mark.parametrize("name", ["how many steps", "a choice", "into a tensor", "shuffled"])
def test_the_same_seed_replays(name: str) -> None:
    """What a number does besides deciding is fixed: a replay draws the same number again."""
    worlds = Worlds(RANDOM[name])
    start = worlds.states[0]
    for call in range(3):
        worlds.states = [start, start]
        worlds.same_call(torch.full((2,), float(call)))
    stats = magjit.stats(worlds.compiled)
    assert (stats.captures, stats.replays, stats.splits) == (1, 2, 0)


def test_a_fixed_number_is_tried_once() -> None:
    """A number of which a record would need each value is drawn between regions the next time."""
    worlds = Worlds(into_a_tensor)
    for call in range(CALLS):
        worlds.same_call(torch.full((2,), float(call)))
    stats = magjit.stats(worlds.compiled)
    assert stats.captures <= 6 and stats.eager_calls == 0


def test_the_reason_names_the_draw() -> None:
    module = Counting(into_a_tensor)
    compiled = magjit.compile(module, backend="eager", fullgraph=True)
    with pytest.raises(GraphBreakError, match="random.*draws from a generator"):
        compiled(torch.ones(2))


def test_a_counter_set_from_outside() -> None:
    worlds = Worlds(every_third)
    for value in (0, 1, 5, 2**80, -7, 2.0, True, 0):
        worlds.eager.count = worlds.module.count = value  # type: ignore[assignment]
        worlds.same_call(torch.ones(2))


def test_small_ints_stay_the_interpreters_own() -> None:
    worlds = Worlds(returned)
    for _ in range(3):
        worlds.same_call(torch.ones(2))
        assert worlds.module.count is worlds.eager.count


def test_what_the_program_leaves_alone_is_compared() -> None:
    """Its value may decide anything; a test of equality in C costs least."""
    module = Counting(lambda m, x: x + 1 if m.count == 0 else x)
    compiled = magjit.compile(module, backend="eager")
    compiled(torch.ones(2))
    module.count = 1
    assert compiled(torch.ones(2)).tolist() == [1, 1]
    assert magjit.stats(compiled).captures == 2


def test_the_report_shows_what_numbers_decide() -> None:
    module = Counting(every_third)
    report = magjit.explain(module)(torch.ones(2)).guard_text
    assert "(((count + 1) % 3) == 0) is False" in report
    assert ".count is any int" in report


def test_two_compiled_objects_share_a_counter() -> None:
    eager, module = Counting(every_third), Counting(every_third)
    one, two = magjit.compile(module, backend="eager"), magjit.compile(module, backend="eager")
    for call in range(CALLS):
        x = torch.full((2,), float(call))
        assert torch.equal((one, two)[call % 2](x), eager(x))
        assert module.count == eager.count
