"""Programs that between them do everything a Python function can do, for the tracer's tests.

Every program is a function without arguments whose result can be compared by repr.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import operator
from collections.abc import Callable
from typing import Any

PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


counter = 5


class Point:
    scale = 2

    def __init__(self, x: int, y: int = 0) -> None:
        self.x = x
        self.y = y

    def shifted(self, by: int, *, twice: bool = False) -> Point:
        return type(self)(self.x + by * (2 if twice else 1), self.y)

    @property
    def total(self) -> int:
        return (self.x + self.y) * self.scale

    @classmethod
    def origin(cls) -> Point:
        return cls(0)

    def __add__(self, other: Any) -> Point:
        if not isinstance(other, Point):
            return NotImplemented
        return Point(self.x + other.x, self.y + other.y)

    def __iadd__(self, other: Any) -> Point:
        self.x += other
        return self

    def __radd__(self, other: Any) -> Point:
        return Point(self.x + other, self.y)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x

    def __hash__(self) -> int:
        return hash(self.x)

    def __bool__(self) -> bool:
        return self.x != 0

    def __getattr__(self, name: str) -> str:
        if name.startswith("magic"):
            return name
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return key

    def __iter__(self) -> Any:
        return iter((self.x, self.y))

    def __contains__(self, item: Any) -> bool:
        return item in (self.x, self.y)

    def __format__(self, spec: str) -> str:
        return f"P{self.x}{spec}"

    def __repr__(self) -> str:
        return f"Point({self.x}, {self.y})"


class Point3(Point):
    __match_args__ = ("x", "y")

    def __init__(self, x: int, y: int = 0, z: int = 0) -> None:
        super().__init__(x, y)
        self.z = z

    def shifted(self, by: int, *, twice: bool = False) -> Point:
        return super().shifted(by, twice=twice)


class Countdown:
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Countdown:
        return self

    def __next__(self) -> int:
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


class Manager:
    def __init__(self, swallow: bool) -> None:
        self.swallow = swallow
        self.log: list[Any] = []

    def __enter__(self) -> list[Any]:
        self.log.append("enter")
        return self.log

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        self.log.append(getattr(kind, "__name__", None))
        return self.swallow


@program
def arithmetic() -> Any:
    a, b = 7, 3
    c = a + b * a - b / a
    c **= 2
    d = -a, +b, ~a, not b
    e = a // b, a % b, a << b, a >> b, a & b, a | b, a ^ b, divmod(a, b)
    f = a < b <= c, a is b, a is not None, a in (1, 7), b not in [1]
    return c, d, e, f, a if a > b else b, a and b, 0 or a, None or b


@program
def attributes() -> Any:
    p = Point(1, 2)
    p.x = p.y
    p.x += 3
    p.extra = [p.total]
    p.extra[0] += 1
    del p.extra
    q = p.shifted(1).shifted(2, twice=True)
    r = Point.origin()
    return p, q, r, p.magic_word, getattr(p, "other", None), hasattr(p, "x"), q.scale


@program
def operators() -> Any:
    p, q = Point(1, 2), Point(3, 4)
    s = p + q
    t = 5 + p
    s += 10
    s += p.x
    return s, t, p == q, p != q, bool(Point(0)), 3 in q, sum([p, q], Point(0)), hash(p), p["k"]


@program
def inheritance() -> Any:
    p = Point3(1, 2, 3)
    return p.shifted(5, twice=True), super(Point3, p).total, isinstance(p, Point)


@program
def containers() -> Any:
    items = [1, 2, *range(3), *(x for x in (4, 5))]
    table = {"a": 1, **{"b": 2}, "c": items[0]}
    unique = {1, 2, *items}
    first, *middle, last = items
    (x, y), z = (1, 2), 3
    items[1:3] = [9]
    items[0] = items[-1]
    items[::2] = items[::2]
    del items[0], table["a"]
    del items[:1]
    return items, table, sorted(unique), first, middle, last, x + y + z, items[1:], items[:2]


@program
def strings() -> Any:
    p, width = Point(1), 6
    text = f"{p} {p!r:>12} {width:{width}d} {width!s}" + "%s-%d" % ("a", 1)
    return text, text[2:5], text.upper().split(), "".join(map(str, range(3)))


@program
def loops() -> Any:
    out = []
    for i in range(5):
        if i == 1:
            continue
        if i == 4:
            break
        out.append(i)
    else:
        out.append("never")
    n = 3
    while n:
        n -= 1
        if n == 1:
            continue
    else:
        out.append("done")
    for i in Countdown(2):
        out.append(i)
    for key, value in {"a": 1}.items():
        out.append((key, value))
    for _ in ():
        out.append("never")
    return out


@program
def comprehensions() -> Any:
    n = 3
    a = [i * n for i in range(n) if i]
    b = {i: j for i, j in zip(a, a)}
    c = {i for i in a for _ in range(2)}
    d = sum(i + n for i in a)
    e = [[j + i for j in range(i)] for i in range(n)]
    f = [(lambda: i)() for i in range(n)]
    return a, b, sorted(c), d, e, f, [y := 1, y**2]


@program
def calls() -> Any:
    def full(a: Any, b: Any = 2, /, c: Any = 3, *rest: Any, d: Any, e: Any = 5, **more: Any) -> Any:
        return a, b, c, rest, d, e, sorted(more)

    args, kwargs = (1, 2), {"d": 4, "f": 6}
    bound = Point(1, 2).shifted
    partial = functools.partial(full, 1, d=9)
    return (
        full(1, d=4),
        full(*args, **kwargs),
        full(0, *args, 8, d=1, **{"z": 1}),
        bound(3, twice=True),
        bound(*[1]),
        partial(7),
        max(args, key=lambda v: -v),
        sorted([3, 1, 2], key=lambda v: v % 3),
        list(map(lambda v: v + 1, args)),
        functools.reduce(operator.add, args),
        collections.OrderedDict(b=1),
        (lambda *a, **k: (a, k))(*args, x=1),
    )


@program
def closures() -> Any:
    total = 0
    step = 2

    def add(n: int) -> int:
        nonlocal total
        total += n * step  # noqa: F821

        def inner() -> int:
            return total + step  # noqa: F821

        return inner()

    first = add(1)
    step = 3
    cell = add(2)
    del step
    return first, cell, total


@program
def global_names() -> Any:
    global counter, temporary
    counter += 1
    temporary = counter
    seen = temporary
    del temporary
    counter -= 1
    return seen, counter, __name__ != "", len(globals()) > 3


def numbers(n: int) -> Any:
    total = 0
    try:
        for i in range(n):
            sent = yield i
            total += sent or 0
    except ValueError as error:
        yield repr(error)
    finally:
        total = -total
    return total


def delegating(n: int) -> Any:
    result = yield from numbers(n)
    yield result
    yield from [1, 2]
    yield from Countdown(1)


@program
def generators() -> Any:
    out = list(delegating(2))
    it = numbers(3)
    out += [next(it), it.send(10), it.throw(ValueError("x"))]
    out.append(next(it, "end"))
    closed = numbers(3)
    next(closed)
    closed.close()
    unstarted = numbers(1)
    try:
        unstarted.throw(KeyError("k"))
    except KeyError as error:
        out.append(repr(error))
    delegate = delegating(3)
    next(delegate)
    try:
        delegate.throw(IndexError)
    except IndexError:
        out.append("index")
    dropped = numbers(2)
    next(dropped)
    del dropped
    return out, sum(x * x for x in numbers(4))


@program
def interleaved() -> Any:
    one, two = numbers(3), numbers(3)
    out = [next(one), next(two), next(one), two.send(5)]
    return out, list(zip(one, two))


@program
def exceptions() -> Any:
    out = []
    for i in range(3):
        try:
            out.append(1 // (i - 1))
        except ZeroDivisionError as error:
            out.append(repr(error))
        else:
            out.append("else")
        finally:
            out.append("finally")
    try:
        try:
            raise KeyError(1)
        except KeyError as error:
            raise ValueError(2) from error
    except (TypeError, ValueError) as error:
        out.append((repr(error), repr(error.__cause__)))
    try:
        try:
            [][1]  # noqa: PLE0643
        finally:
            out.append("cleanup")
    except IndexError:
        pass
    try:
        assert out == [], "not empty"
    except AssertionError as error:
        out.append(str(error))
    try:
        undefined_name
    except NameError as error:
        out.append(str(error))
    try:
        del i
        i  # noqa: F821
    except UnboundLocalError as error:
        out.append(str(error))
    return out


@program
def exception_groups() -> Any:
    out = []
    try:
        raise ExceptionGroup("g", [ValueError(1), KeyError(2)])
    except* ValueError as group:
        out.append(repr(group.exceptions))
    except* KeyError:
        out.append("key")
    return out


def failing(depth: int) -> Any:
    if depth == 0:
        raise RuntimeError("deep")
    try:
        return failing(depth - 1) + 1
    finally:
        str(depth)


@program
def unwinding() -> Any:
    try:
        failing(4)
    except RuntimeError as error:
        depth = 0
        traceback = error.__traceback__
        while traceback is not None:
            depth += 1
            traceback = traceback.tb_next
        return depth, [repr(error)]


@program
def errors_in_c() -> Any:
    out = []
    for action in (
        lambda: sorted([1, "a"]),
        lambda: list(map(lambda v: 1 // v, [1, 0])),
        lambda: int("x"),
        lambda: next(iter([])),
        lambda: {}["missing"],
        lambda: Point(1).missing,
        lambda: [*map(failing, [0])],
        lambda: 1 + Point,
        lambda: len(5),
    ):
        try:
            out.append(action())
        except Exception as error:
            out.append(type(error).__name__)
    return out


@program
def managers() -> Any:
    out = []
    with Manager(False) as log:
        log.append("body")
    out.append(log)
    with Manager(True) as log, Manager(False):
        raise KeyError("x")
    out.append(log)
    try:
        with Manager(False) as log:
            with Manager(True):
                return_value = [v for v in log]
            raise ValueError
    except ValueError:
        out.append((log, return_value))
    for _ in range(2):
        with Manager(False):
            continue
    return out


@program
def matching() -> Any:
    def kind(value: Any) -> Any:
        match value:
            case {"a": x, **rest}:
                return x, rest
            case [1, y, *z]:
                return y, z
            case Point3(a, b):
                return a, b
            case Point(x=q) if q > 1:
                return q
            case str() | bytes():
                return "text"
            case None:
                return "none"
            case int() as n if n > 5:
                return n
        return "other"

    values = {"a": 1, "b": 2}, [1, 2, 3], Point3(4, 5), Point(3), Point(1), "s", None, 6, 2, {}
    return [kind(value) for value in values]


@program
def classes() -> Any:
    n = 4

    class Meta(type):
        def __new__(mcls, name: str, bases: Any, namespace: Any, **extra: Any) -> Any:
            return super().__new__(mcls, name, bases, namespace)

    class Made(Point, metaclass=Meta, flag=1):
        y = n
        z: int = 3
        items = [i for i in range(y)]
        del z

        def size(self) -> int:
            return super().total + self.y

        @staticmethod
        def one() -> int:
            return 1

    @functools.lru_cache
    def cached(value: int) -> int:
        return value + n

    made = Made(1)
    return made.size(), Made.y, Made.items, Made.one(), cached(1), cached(1), Made.__mro__[1]


async def waiting(n: int) -> int:
    await asyncio.sleep(0)
    return n + 1


async def ticks(n: int) -> Any:
    for i in range(n):
        yield i
        await asyncio.sleep(0)


class AsyncManager:
    async def __aenter__(self) -> int:
        return await waiting(1)

    async def __aexit__(self, *args: Any) -> bool:
        return True


async def main(n: int) -> Any:
    total = 0
    async for i in ticks(n):
        total += i
    async with AsyncManager() as value:
        total += value
        raise KeyError
    both = await asyncio.gather(waiting(1), waiting(2))
    return total, both, [i async for i in ticks(2)], await waiting(total)


def drive(coroutine: Any) -> Any:
    try:
        while True:
            coroutine.send(None)
    except StopIteration as stop:
        return stop.value


async def simple(n: int) -> Any:
    total = 0
    async for i in ticks(n):
        total += i
    async with AsyncManager() as value:
        total += value
    return total, [i async for i in ticks(2)], await waiting(total)


@program
def coroutines() -> Any:
    return drive(simple(3))


@program
def event_loop() -> Any:
    return asyncio.run(main(2))


@program
def recursion() -> Any:
    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    return fib(7), depth(60)


@program
def dynamic_code() -> Any:
    namespace: dict[str, Any] = {"a": 1}
    exec("b = a + 1\ndel a\nc = [i for i in range(b)]\nclass D: e = b", namespace)
    return eval("b * 2", namespace), namespace["c"], namespace["D"].e


@program
def imports() -> Any:
    import os.path as path
    import string
    from collections import OrderedDict, abc

    return path.join("a", "b"), OrderedDict(a=1), abc.Sized.__name__, string.digits


def _many_names() -> Callable[[], Any]:
    """More than 256 constants, names, locals and jumps: EXTENDED_ARG everywhere."""
    count = 300
    lines = ["def many_names():", "    total = 0"]
    lines += [f"    v{i} = total + {i + 1000}" for i in range(count)]
    lines += ["    for q in range(2):"]
    lines += [f"        total += v{i}" for i in range(count)]
    lines += ["        if q > 5: return None"]
    lines += ["    def inner(): return v299, v0"]
    lines += [f"    names.n{i} = v{i}" for i in range(count)]
    lines += [f"    total += names.n{i}" for i in range(count - 20, count)]
    lines += ["    total += names.call(*inner(), key=v299)", "    return total, inner()"]
    namespace: dict[str, Any] = {"names": _Names()}
    exec("\n".join(lines), namespace)
    function: Callable[[], Any] = namespace["many_names"]
    return function


class _Names:
    def call(self, *args: int, key: int) -> int:
        return sum(args) + key


program(_many_names())
