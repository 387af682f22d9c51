"""Programs that no single graph can hold: what each leaves behind must be what eager leaves.

Each takes tensors and breaks somewhere: it reads a tensor's data, calls what no annotation covers,
or says `magjit.graph_break`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import logging
import os
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import magjit

from ..twin import Call, Scene, Table, call


@dataclasses.dataclass(frozen=True)
class Row:
    """One program.

    Attributes:
        name: readable test id.
        make: a fresh scene.
        cut: the run is cut at all; False where MagJIT has to run it eagerly.
        learns: the first run shows where to cut only when it is too late.
        backward: gradients of the outputs are compared, too.
    """

    name: str
    make: Callable[[], Scene]
    cut: bool = True
    learns: bool = False
    backward: bool = False


ROWS = Table(Row)
T = torch.Tensor


def vector() -> Call:
    return call(torch.randn(4))


def program(
    args: Callable[[], Call] = vector, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A row of a function without state of its own."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        ROWS.add(fn.__name__.replace("_", " "), lambda: Scene(fn, args=args), **options)
        return fn

    return register


@magjit.disable
def outside(x: T, scale: float = 2.0) -> T:
    return x * scale


# --- at top level ---------------------------------------------------------------------------


@program()
def item_returned(x: T) -> Any:
    return (x * 2).sum().tolist()


@program()
def item_used(x: T) -> Any:
    y = x * 2
    total = y.sum().tolist()
    return y + total, total


@program()
def float_and_int(x: T) -> Any:
    y = x.abs() * 10
    return y / float(y.max()), y * int(y.sum())


@program()
def branch_on_a_tensor(x: T) -> Any:
    y = x + 1
    if y.sum() > 0:
        return y * 2
    return y * 3


@program()
def chain_of_branches(x: T) -> Any:
    total = x.sum()
    if total > 2:
        kind = "large"
    elif total > 0:
        kind = "small"
    else:
        kind = "negative"
    return x * len(kind), kind


@program()
def boolean_operators(x: T) -> Any:
    both = (x.sum() > 0) and (x.max() > 0.5)
    either = (x.sum() > 0) or (x.min() < -0.5)
    return x + 1, both, either, not (x.mean() > 0)


@program()
def conditional_expression(x: T) -> Any:
    return (x * 2 if x[0] > 0 else x * 3) + (1 if x[1] > 0 else 2)


@program()
def chained_comparison(x: T) -> Any:
    return x * 2 if -1 < x[0] < 1 else x * 3


@program()
def list_of_data(x: T) -> Any:
    values = (x * 2).tolist()
    return [v * 2 for v in values], x + values[0]


@program()
def data_unpacked(x: T) -> Any:
    a, b, *rest = (x + 1).tolist()
    return x * a + b, len(rest)


@program()
def graph_break_between(x: T) -> Any:
    y = x.sin()
    magjit.graph_break("here")
    return y.cos()


@program()
def graph_breaks_in_a_row(x: T) -> Any:
    magjit.graph_break()
    magjit.graph_break()
    x = x + 1
    magjit.graph_break()
    return x


@program()
def break_before_anything(x: T) -> Any:
    magjit.graph_break()
    return x * 2


@program()
def break_as_the_last_thing(x: T) -> Any:
    y = x * 2
    magjit.graph_break()
    return y


@program()
def disabled_function(x: T) -> Any:
    return outside(x + 1) * outside(x, scale=3.0)


@program()
def keywords_of_a_break_inside_a_call(x: T) -> Any:
    steps = [x]
    steps.append(outside(x, scale=3.0))
    return steps


@program()
def keywords_of_a_break(x: T) -> Any:
    def scaled(t: T, *, by: float, plus: float = 0.0) -> T:
        return outside(t * by, scale=by) + plus

    return scaled(x, by=x.max().tolist(), plus=2.0)


@program()
def unpacked_arguments(x: T) -> Any:
    args, kwargs = (x + 1,), {"scale": 4.0}
    return outside(*args, **kwargs) + 1


@program()
def unknown_c_function(x: T) -> Any:
    y = x + 1
    size = len(zlib.compress(bytes(range(16)))) and os.getpid() * 0
    return y + size


@program(learns=True)
def file_written_and_read(x: T) -> Any:
    buffer = io.BytesIO()
    torch.save(x * 2, buffer)
    buffer.seek(0)
    return torch.load(buffer) + 1


@program()
def text_of_a_tensor(x: T) -> Any:
    y = x.round()
    text = f"{y.sum().tolist():.2f} {y.tolist()}"
    return y * len(text), text


@program()
def printed_values(x: T) -> Any:
    y = x * 2
    print("first", round(y[0].tolist(), 3))
    z = y + 1
    print("second", z.shape)
    return z


@program()
def numpy_and_back(x: T) -> Any:
    array = (x * 2).numpy() + 1
    return torch.from_numpy(array) * x


@program()
def mask_of_unknown_size(x: T) -> Any:
    chosen = x[x > 0]
    return chosen.shape[0], chosen.sum()


@program()
def value_that_makes_a_shape(x: T) -> Any:
    factor = float(1 + (x.sum() > 0).tolist())
    y = torch.nn.functional.interpolate(x[None, None], scale_factor=factor)
    z = torch.clamp(x, max=factor) + torch.full((2, 1), factor)
    return y * y.shape[-1], y.shape, z


@program()
def walrus(x: T) -> Any:
    return x * total if (total := x.sum().tolist()) > 0 else x - total


@program()
def value_as_an_index(x: T) -> Any:
    place = int(x.argmax())
    return x[place], x[:place], ["a", "b", "c", "d"][place]


# --- deeper ---------------------------------------------------------------------------------


def _level_three(x: T) -> Any:
    y = x.relu()
    if y.sum() > 1:
        y = y - y.mean().tolist()
    return y * 2


def _level_two(x: T, offset: float) -> Any:
    before = x + offset
    return _level_three(before) + before, offset


def _level_one(x: T) -> Any:
    pair = _level_two(x * 2, 0.5)
    return pair[0] * pair[1]


@program()
def three_frames_deep(x: T) -> Any:
    return _level_one(x) + _level_one(x + 1)


@program()
def call_as_an_argument(x: T) -> Any:
    return torch.add(_level_one(x), _level_two(x, 1.0)[0]), [_level_three(x), x]


@program()
def same_function_at_two_places(x: T) -> Any:
    a = _level_three(x)
    b = _level_three(-x)
    return a, b, a + b


@program()
def closure_over_a_value(x: T) -> Any:
    total = x.sum().tolist()

    def scaled(t: T) -> T:
        return t * total

    return scaled(x), scaled(x + 1)


@program()
def closure_that_changes_a_variable(x: T) -> Any:
    count = 0

    def step(t: T) -> T:
        nonlocal count
        count += 1
        if t.sum() > 0:
            count += 10
        return t * 2

    return step(step(x)), count


@program()
def recursion(x: T) -> Any:
    def halve(t: T, depth: int) -> Any:
        if depth == 0 or t.abs().max() < 0.5:
            return t, depth
        return halve(t / 2, depth - 1)

    return halve(x, 4)


@program()
def default_arguments(x: T) -> Any:
    def inner(t: T, by: float = 2.0, *more: T, **named: T) -> Any:
        magjit.graph_break()
        return t * by, more, named

    return inner(x), inner(x, 3.0, x + 1, z=x + 2)


@program()
def partial_call(x: T) -> Any:
    step = functools.partial(_level_three)
    return step(x) + 1


@program(learns=True)
def key_function(x: T) -> Any:
    items = [x, -x, x * 2]
    ordered = sorted(items, key=lambda t: t.sum().tolist())
    return ordered[0], len(ordered)


@program(learns=True)
def break_in_a_generator(x: T) -> Any:
    def steps() -> Iterator[Any]:
        for i in range(3):
            yield (x * i).sum().tolist()

    return x * sum(steps())


class Box:
    def __init__(self, t: T) -> None:
        self.t = t
        self.largest = t.max().tolist()

    @property
    def total(self) -> Any:
        return self.t.sum().tolist()

    def __mul__(self, other: T) -> T:
        return other * self.t.mean().tolist()


@program(learns=True)
def break_in_a_constructor(x: T) -> Any:
    return x * Box(x + 1).largest


@program(learns=True)
def break_in_a_property_and_an_operator(x: T) -> Any:
    box = Box(x)
    return x * box.total, box * x


@program(cut=False)
def class_made_in_the_program(x: T) -> Any:
    class Inner:
        scale = 2

    return x * x.sum().tolist() * Inner.scale


# --- loops ----------------------------------------------------------------------------------


@program()
def loop_over_a_range(x: T) -> Any:
    values = []
    for i in range(5):
        x = x + i
        values.append(x.sum().tolist())
    return x, values


@program()
def loop_over_a_list(x: T) -> Any:
    out = []
    for t in [x, x + 1, x + 2]:
        if t.sum() > 0:
            out.append(t * 2)
        else:
            out.append(t)
    return out


@program()
def loop_with_enumerate(x: T) -> Any:
    total = 0.0
    for i, t in enumerate((x, x * 2, x * 3)):
        total += i * t.mean().tolist()
    return total


@program()
def loop_with_zip(x: T) -> Any:
    out = {}
    for name, t in zip("abc", x.split(2) + (x,), strict=True):
        out[name] = t.max().tolist()
    return out, x


@program()
def loop_over_a_dict(x: T) -> Any:
    table = {"a": x, "b": x + 1}
    sums = {}
    for key, value in table.items():
        sums[key] = value.sum().tolist()
    return sums, [float(v.min()) for v in table.values()]


@program()
def nested_loops(x: T) -> Any:
    found = []
    for i in range(2):
        for j in range(3):
            x = x + j
            if x.mean() > 1:
                found.append((i, j))
    return x, found


@program()
def loop_left_early(x: T) -> Any:
    for i in range(10):
        x = x + 1
        if x.sum() > 8:
            break
    else:
        x = x * 100
    return x, i


@program()
def loop_with_continue(x: T) -> Any:
    kept = []
    for i in range(4):
        if x[i] < 0:
            continue
        kept.append(x[i] * 2)
    return kept


@program()
def while_loop(x: T) -> Any:
    steps = 0
    while x.abs().max() > 0.1:
        x = x / 2
        steps += 1
    return x, steps


@program()
def comprehension_with_breaks(x: T) -> Any:
    return [t.tolist() * 2 for t in x], {i: float(x[i]) for i in range(3)}


@program()
def comprehension_in_comprehension(x: T) -> Any:
    return [[(x[i] * x[j]).tolist() for j in range(2)] for i in range(2)]


@program()
def live_iterator_across_a_break(x: T) -> Any:
    steps = iter([x, x + 1, x + 2, x + 3])
    first = next(steps)
    total = first.sum().tolist()
    return total, [t * total for t in steps]


@program()
def two_iterators(x: T) -> Any:
    numbers, letters = itertools.count(), iter("abcd")
    out = []
    for t in x:
        out.append((next(numbers), next(letters), t.tolist()))
    return out


# --- with blocks and exceptions ---------------------------------------------------------------


@program()
def break_under_no_grad(x: T) -> Any:
    with torch.no_grad():
        total = (x * 2).sum().tolist()
        y = x * total
    return y, torch.is_grad_enabled()


@program(lambda: call(torch.randn(4, requires_grad=True)), backward=True)
def break_between_gradients(x: T) -> Any:
    y = x * 2
    with torch.no_grad():
        scale = y.abs().max().tolist()
    z = y.sin() * scale
    with torch.no_grad():
        detached = z + 1
    return z, detached


@program()
def break_under_autocast(x: T) -> Any:
    weight = x.outer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = weight @ weight
        total = y.float().sum().tolist()
        z = weight @ weight
    return z, total, weight @ weight


class Scope:
    def __init__(self) -> None:
        self.events: list[str] = []

    def __enter__(self) -> Any:
        self.events.append("enter")
        return self

    def __exit__(self, *error: object) -> None:
        self.events.append("exit")


@program()
def own_context_manager(x: T) -> Any:
    with Scope() as scope:
        total = x.sum().tolist()
        scope.events.append("inside")
    return x * total, scope.events


@program(learns=True)
def context_manager_of_a_generator(x: T) -> Any:
    log = []

    @contextlib.contextmanager
    def scope() -> Iterator[int]:
        log.append("enter")
        yield 3
        log.append("exit")

    with scope() as n:
        y = x * n
        total = y.sum().tolist()
    return y + total, log


@program()
def try_body(x: T) -> Any:
    try:
        y = x * x.sum().tolist()
        z = y + 1
    except ValueError:
        z = x
    return z


@program()
def break_that_raises(x: T) -> Any:
    y = x + 1
    try:
        magjit.graph_break()
        n = int("no number")
    except ValueError as error:
        return y * 2, str(error)
    return y * n


@program()
def operation_that_raises_is_caught(x: T) -> Any:
    try:
        value = x[: 1 + (x.sum().tolist() > 0)].tolist()
    except RuntimeError:
        value = 3
    return x * value


@program()
def finally_after_a_break(x: T) -> Any:
    log = []
    try:
        total = x.sum().tolist()
        return x * total, log
    finally:
        log.append("done")


@program(cut=False)
def break_in_a_handler(x: T) -> Any:
    try:
        raise KeyError("a")
    except KeyError:
        total = x.sum().tolist()
    return x * total


@program()
def exception_on_some_calls(x: T) -> Any:
    y = x * 2
    if y.sum() > 0:
        raise ValueError(f"{y.shape}")
    return y


# --- state ------------------------------------------------------------------------------------


def _counted() -> Scene:
    class Counter:
        def __init__(self) -> None:
            self.calls, self.totals = 0, [0.0]

        def add(self, total: float) -> None:
            self.calls += 1
            self.totals.append(total)

    counter = Counter()

    def counted(x: T) -> Any:
        total = (x * 2).sum().tolist()
        counter.add(total)
        return x * total

    return Scene(counted, args=vector, state=lambda: (counter.calls, counter.totals))


def _half_changed() -> Scene:
    items = [torch.zeros(4), torch.ones(4)]

    def half_changed(x: T) -> Any:
        items[0] = x + 1
        items.append(x)
        total = items[0].sum().tolist()
        items[1].add_(x)
        del items[2:]
        return items[1] * total

    return Scene(half_changed, args=vector, state=lambda: items)


def _in_place() -> Scene:
    buffer = torch.zeros(4)

    def in_place(x: T) -> Any:
        buffer.add_(x)
        view = buffer[1:3]
        if buffer.sum() > 0:
            view.mul_(2)
        x.sub_(1)
        return buffer * 2, view

    return Scene(in_place, args=vector, state=lambda: buffer)


def _aliases() -> Scene:
    def aliases(x: T) -> Any:
        rows = [x + 1]
        table = {"a": rows, "b": rows}
        total = rows[0].sum().tolist()
        table["a"].append(x * total)
        return table, rows, table["b"] is rows

    return Scene(aliases, args=vector)


def _objects() -> Scene:
    @dataclasses.dataclass
    class State:
        h: Any
        steps: int = 0

    def objects(x: T) -> Any:
        state = State(x * 2)
        for _ in range(3):
            state.steps += 1
            if state.h.sum() > 0:
                state.h = state.h - 1
        return state.h, state.steps, state

    return Scene(objects, args=vector)


def _random_numbers() -> Scene:
    def random_numbers(x: T) -> Any:
        a = random.random()
        y = x * a + torch.rand(4)
        total = y.sum().tolist()
        return y + torch.rand(4), total * random.random()

    return Scene(random_numbers, args=vector)


def _logged() -> Scene:
    records: list[str] = []
    logger = logging.Logger("magjit.tests.regions", logging.INFO)

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(f"{record.funcName}: {record.getMessage()}")

    logger.handlers = [Keep()]

    def logged(x: T) -> Any:
        y = x * 2
        logger.info("sum %.3f", y.sum().tolist())
        return y + 1

    return Scene(logged, args=vector, state=lambda: records)


def _late_change_of_an_argument() -> Scene:
    seen: list[Any] = []

    def late_change(x: T) -> Any:
        names = ["a"]
        outside(x)
        seen.append(tuple(names))
        names.append("b")
        magjit.graph_break()
        names.append("c")
        return x + len(names)

    return Scene(late_change, args=vector, state=lambda: seen)


for _make in (
    *(_counted, _half_changed, _in_place, _aliases, _objects, _random_numbers, _logged),
    _late_change_of_an_argument,
):
    ROWS.add(_make.__name__.strip("_").replace("_", " "), _make)


# --- modules ----------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.skipped = 0

    def forward(self, x: T) -> T:
        y = self.linear(x)
        if y.mean() < 0:
            self.skipped += 1
            return x
        return x + y


class Stack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(depth))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: T) -> Any:
        norms = []
        for block in self.blocks:
            x = block(x)
            norms.append(x.norm().tolist())
        return self.norm(x), norms


def _module(make: Callable[[], nn.Module], **options: Any) -> Callable[[], Scene]:
    def scene() -> Scene:
        torch.manual_seed(0)
        module = make()
        return Scene(
            module,
            args=lambda: call(torch.randn(3, 4)),
            state=lambda: [
                {k: v.detach().clone() for k, v in module.state_dict().items()},
                [getattr(m, "skipped", None) for m in module.modules()],
            ],
        )

    return scene


class Hooked(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda m, args, out: out * out.abs().max().tolist())
        self.linear.register_forward_pre_hook(lambda m, args: (args[0] + args[0].sum().tolist(),))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()

    def half(self, x: T) -> T:
        return x / (1 + x.abs().max().tolist())

    def forward(self, x: T) -> T:
        return self.half(self.inner(self.half(x)))


ROWS.add("gated module", _module(Gated), backward=True)
ROWS.add("stack of modules", _module(Stack), backward=True)
ROWS.add("module hooks", _module(Hooked))
ROWS.add("method called twice", _module(CalledTwice), backward=True)
ROWS.add("sequential", _module(lambda: nn.Sequential(Gated(), nn.ReLU(), Gated())))


# --- what has to run eagerly --------------------------------------------------------------------


@program(cut=False)
def generator_kept_across_a_break(x: T) -> Any:
    steps = (x * i for i in range(3))
    first = next(steps)
    total = first.sum().tolist()
    return total, list(steps)


@program(cut=False)
def break_in_inference_mode(x: T) -> Any:
    with torch.inference_mode():
        total = x.sum().tolist()
    return x * total
