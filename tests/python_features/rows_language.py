"""The language: functions, classes, control flow, exceptions, comprehensions."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..twin import call
from .table import FeatureTable

ROWS = FeatureTable()

SCALES = {"a": 2.0, "b": 3.0}


@ROWS.program()
def closure(x: torch.Tensor) -> Any:
    factor = 3

    def inner(t: torch.Tensor) -> torch.Tensor:
        return t * factor

    return inner(x) + inner(x + 1)


@ROWS.program()
def closure_with_nonlocal(x: torch.Tensor) -> Any:
    count = 0

    def bump(t: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return t * count

    return bump(bump(x)), count


@ROWS.program()
def closures_in_a_loop(x: torch.Tensor) -> Any:
    late = [lambda t: t * i for i in range(3)]  # noqa: B023
    early = [lambda t, i=i: t * i for i in range(3)]
    return [f(x) for f in late], [f(x) for f in early]


@ROWS.program()
def recursion(x: torch.Tensor) -> Any:
    def power(t: torch.Tensor, n: int) -> torch.Tensor:
        return t if n == 0 else power(t * x, n - 1)

    return power(x, 4)


def gather(*args: Any, scale: float = 1.0, **kwargs: Any) -> Any:
    return sum(args) * scale + len(kwargs)


@ROWS.program()
def star_arguments(x: torch.Tensor) -> Any:
    args, kwargs = (x, x + 1), {"scale": 2.0, "other": None}
    return gather(*args, *[x], **kwargs, third=3)


@ROWS.program()
def positional_only_and_keyword_only(x: torch.Tensor) -> Any:
    def f(a: Any, /, b: Any, *, c: Any = 2) -> Any:
        return a * b + c

    return f(x, 2), f(x, b=3, c=x)


@ROWS.program()
def defaults(x: torch.Tensor) -> Any:
    def f(t: torch.Tensor, scale: Any = x, items: Any = (1, 2)) -> Any:
        return t * scale + items[1]

    return f(x), f(x, 2.0)


@ROWS.program()
def globals_read(x: torch.Tensor) -> Any:
    return x * SCALES["a"] + globals()["SCALES"]["b"]


@ROWS.program()
def decorators(x: torch.Tensor) -> Any:
    def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(*args: Any) -> Any:
            return fn(fn(*args))

        return run

    @twice
    def add(t: torch.Tensor) -> torch.Tensor:
        return t + 1

    return add(x), add.__name__


@ROWS.program()
def unpacking(x: torch.Tensor) -> Any:
    a, (b, *c), d = x, [x + 1, x + 2, x + 3], 4
    rows = [*x]
    first, *rest = rows
    a, b = b, a
    return a + b, c, first, rest, d


@ROWS.program()
def iteration_over_a_tensor(x: torch.Tensor) -> Any:
    total = 0
    for index, row in enumerate(x):
        total = total + row * index
    return total


@ROWS.program()
def control_flow_on_shapes(x: torch.Tensor) -> Any:
    while x.dim() < 5:
        x = x.unsqueeze(0)
        if x.dim() == 3:
            continue
        if x.shape[0] > 1:
            break
    else:
        x = x + 1
    return x


@ROWS.program()
def match_statement(x: torch.Tensor) -> Any:
    match x.shape:
        case (1,):
            return x
        case (3, columns) if columns > 2:
            x = x * columns
    match {"kind": "add", "by": 2}:
        case {"kind": "add", "by": int(by)}:
            return x + by
    return None


@ROWS.program()
def comprehensions(x: torch.Tensor) -> Any:
    items = [x * i for i in range(4) if i % 2]
    table = {i: t for i, t in enumerate(items)}
    kinds = {type(t).__name__ for t in items}
    nested = [[i * j for j in range(i)] for i in range(3)]
    return items, table, kinds, nested, sum(t.sum() for t in items)


@ROWS.program()
def generators(x: torch.Tensor) -> Any:
    def steps(n: int) -> Iterator[Any]:
        for i in range(n):
            yield x * i
        return n

    def outer() -> Iterator[Any]:
        n = yield from steps(2)
        yield x + n

    return list(outer()), next(steps(1))


@ROWS.program()
def generator_send_and_close(x: torch.Tensor) -> Any:
    log = []

    def talk() -> Iterator[Any]:
        try:
            got = yield 1
            while True:
                got = yield got * 2
        finally:
            log.append("closed")

    g = talk()
    next(g)
    out = g.send(x)
    g.close()
    return out, log


@ROWS.program()
def with_blocks(x: torch.Tensor) -> Any:
    @contextlib.contextmanager
    def scaled(by: int) -> Iterator[torch.Tensor]:
        yield x * by

    class Enter:
        def __enter__(self) -> torch.Tensor:
            return x + 1

        def __exit__(self, *error: Any) -> bool:
            return error[0] is ValueError

    with scaled(2) as a, Enter() as b:
        out = a + b
        raise ValueError
    with contextlib.suppress(KeyError), contextlib.nullcontext(3) as three:
        out = out * three
        {}["missing"]
    return out


@ROWS.program()
def try_except_finally(x: torch.Tensor) -> Any:
    log = []
    for kind in (ValueError, KeyError, None):
        try:
            if kind:
                raise kind("no")
            x = x + 1
        except ValueError as error:
            log.append(str(error))
            x = x * 2
        except (KeyError, TypeError):
            x = x - 1
        else:
            log.append("else")
        finally:
            x = x / 2
    return x, log


@ROWS.program()
def exception_through_frames(x: torch.Tensor) -> Any:
    class Found(Exception):
        pass

    def search(n: int) -> None:
        if n == 0:
            raise Found(x * 2)
        search(n - 1)

    try:
        search(3)
    except Found as found:
        return found.args[0] + 1


@ROWS.program()
def exception_groups(x: torch.Tensor) -> Any:
    try:
        raise ExceptionGroup("many", [ValueError(1), KeyError(2)])
    except* ValueError as group:
        x = x * len(group.exceptions)
    except* KeyError:
        x = x + 1
    return x


@ROWS.program()
def assertions(x: torch.Tensor) -> Any:
    assert x.dim() == 2, "two dimensions"
    assert isinstance(x, torch.Tensor)
    return x + 1


@ROWS.program()
def format_strings(x: torch.Tensor) -> Any:
    name = f"{x.shape[0]:03d}-{tuple(x.shape)!r:>10}-{x.dtype}"
    return name, "{} {b}".format(1, b=2), "%s" % (3,), name.upper().split("-"), x * len(name)


@ROWS.program()
def sorting_with_key(x: torch.Tensor) -> Any:
    items = [("b", x), ("a", x + 1), ("c", x + 2)]
    by_name = sorted(items, key=lambda item: item[0], reverse=True)
    items.sort(key=operator.itemgetter(0))
    return by_name, items, max(items, key=lambda item: item[0]), min([3, 1, 2])


@ROWS.program()
def slices_and_steps(x: torch.Tensor) -> Any:
    items = list(range(10))
    return items[::-2], x[..., 1:], x[:, None], x[1:, ::2], x[[0, 2]], x[x.shape[0] - 1]


@ROWS.program()
def walrus_and_chained_compare(x: torch.Tensor) -> Any:
    if (n := x.shape[0]) > 2 and 1 < n <= 3 < x.shape[1]:
        return x * n
    return x


@ROWS.program()
def operators(x: torch.Tensor) -> Any:
    return -x, ~(x > 0), x @ x.t(), x // 2, x % 2, x**2, 2**x, (x > 0) & (x < 1), 1 - x, abs(x)


@ROWS.program()
def in_place_operators(x: torch.Tensor) -> Any:
    y = x.clone()
    y += 1
    y *= x
    items = [1]
    items += [2]
    n = 3
    n //= 2
    return y, items, n


@ROWS.program()
def del_statements(x: torch.Tensor) -> Any:
    items, y = {"a": x, "b": x + 1}, x + 2
    del items["a"]
    z = y * 2
    del y
    return items, z


@ROWS.program()
def eval_and_exec_are_followed(x: torch.Tensor) -> Any:
    return eval("x * 2", {"x": x})


@ROWS.program()
def imports_inside(x: torch.Tensor) -> Any:
    import math
    from math import pi as angle

    return x * math.sqrt(4) + angle


@ROWS.program()
def lambda_and_map(x: torch.Tensor) -> Any:
    return list(map(lambda a, b: a * b, [x, x + 1], [2, 3])), list(filter(None, [0, 1]))


@ROWS.program()
def builtins_of_iteration(x: torch.Tensor) -> Any:
    pairs = list(zip("ab", [x, x + 1], strict=True))
    return pairs, list(enumerate("ab", 1)), list(reversed([1, 2])), any([0, 1]), all([1])


@ROWS.program()
def builtins_of_objects(x: torch.Tensor) -> Any:
    return (
        isinstance(x, (int, torch.Tensor)),
        issubclass(bool, int),
        callable(x),
        hasattr(x, "foo"),
        getattr(x, "foo", 3),
        type(x).__name__,
        hash("a") == hash("a"),
        divmod(7, 2),
        round(2.567, 1),
        pow(2, 3),
        int("3"),
        len(x),
        x + 1,
    )


@ROWS.program(split=True)
def identity_numbers(x: torch.Tensor) -> Any:
    seen = {id(x): 2}
    return x * seen[id(x)]


@ROWS.program()
def type_annotations_and_casts(x: torch.Tensor) -> Any:
    from typing import cast

    y: torch.Tensor = cast(torch.Tensor, x)
    return y + 1


@ROWS.program(args=lambda: call(torch.randn(3), **{"scale": 2, "mode": "a"}))
def keyword_arguments_of_the_root(x: torch.Tensor, *rest: Any, mode: str, **kw: Any) -> Any:
    return x * kw["scale"] + len(mode), rest
