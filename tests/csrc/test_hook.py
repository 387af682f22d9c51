"""The frame hook: which frames are served, what with, and life beside torch._dynamo's hook."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from magjit import _C

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="needs torch")


class Served:
    """A dispatcher that says what it was called with."""

    def __init__(self, result: Any = "served") -> None:
        self.result = result
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        return self.result(*args) if callable(self.result) else self.result


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    assert not installed() and _C.hook_state()["marked"] == 0
    yield
    gc.collect()
    assert _C.hook_state()["marked"] == 0
    assert not installed()
    assert _C.hook_state()["enabled"]


def installed() -> bool:
    return bool(_C.hook_state()["first"])


def plain(a: int, b: int = 2) -> Any:
    return a, b


def test_marked_code_is_served_whoever_calls_it() -> None:
    d = Served()
    assert plain(1) == (1, 2) and not installed()
    _C.hook_mark(plain.__code__, d)
    assert installed()
    assert plain(1) == "served" and plain(b=5, a=4) == "served"
    assert list(map(plain, [7])) == ["served"]
    assert d.calls == [(plain, 1, 2), (plain, 4, 5), (plain, 7, 2)]
    _C.hook_unmark(plain.__code__)
    assert not installed()
    assert plain(1) == (1, 2)
    _C.hook_unmark(plain.__code__)


def test_null_means_evaluate() -> None:
    d = Served(lambda f, a, b: _C.NULL if a else "zero")
    _C.hook_mark(plain.__code__, d)
    before = _C.hook_state()
    assert [plain(i) for i in (1, 0, 2)] == [(1, 2), "zero", (2, 2)]
    after = _C.hook_state()
    assert after["served"] - before["served"] == 1
    assert after["evaluated"] - before["evaluated"] == 2
    _C.hook_unmark(plain.__code__)


def test_every_kind_of_argument() -> None:
    def f(a, /, b, *args, c, d=4, **kwargs):  # type: ignore[no-untyped-def]
        return lambda: (a, b, args, c, d, kwargs)  # all of them in cells

    d = Served()
    _C.hook_mark(f.__code__, d)
    assert f(1, 2, 3, 3, c=5, x=6) == "served"
    assert d.calls == [(f, 1, 2, 5, 4, (3, 3), {"x": 6})]
    d.result = _C.NULL
    assert f(1, 2, 3, 3, c=5, x=6)() == (1, 2, (3, 3), 5, 4, {"x": 6})
    with pytest.raises(TypeError):
        f(1)
    _C.hook_unmark(f.__code__)


def test_closures_of_one_code_are_told_apart() -> None:
    def make(n: int) -> Callable[[], int]:
        return lambda: n

    one, two = make(1), make(2)
    d = Served(lambda f: 10 * f.__closure__[0].cell_contents)
    _C.hook_mark(one.__code__, d)
    assert (one(), two()) == (10, 20)
    _C.hook_unmark(one.__code__)
    assert (one(), two()) == (1, 2)


def test_methods_properties_and_calls_from_c() -> None:
    class C:
        def method(self, x: int) -> int:
            return x

        @property
        def prop(self) -> int:
            return 1

        def __len__(self) -> int:
            return 1

    obj, d = C(), Served(7)
    codes = [C.method.__code__, C.prop.fget.__code__, C.__len__.__code__]  # type: ignore[attr-defined]
    for code in codes:
        _C.hook_mark(code, d)
    assert [obj.method(3), obj.prop, len(obj), obj.__len__()] == [7, 7, 7, 7]
    assert d.calls[0] == (C.method, obj, 3)
    for code in codes:
        _C.hook_unmark(code)


def test_generators_and_coroutines_pass() -> None:
    def gen(n: int) -> Iterator[int]:
        for i in range(n):
            got = yield i
            if got:
                yield -1

    async def coro(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async def agen(n: int) -> Any:
        for i in range(n):
            yield i

    async def drive() -> list[Any]:
        return [await coro(5), [i async for i in agen(3)]]

    d = Served()
    marked: list[Any] = [gen, coro, agen]
    for f in marked:
        _C.hook_mark(f.__code__, d)
    assert list(gen(4)) == [0, 1, 2, 3]
    g = gen(3)
    assert (next(g), g.send(True), next(g)) == (0, -1, 1)
    with pytest.raises(KeyError):
        g.throw(KeyError("thrown in"))
    gen(3).close()
    assert asyncio.run(drive()) == [5, [0, 1, 2]]
    assert sum(x for x in gen(5)) == 10
    assert d.calls == []
    for f in marked:
        _C.hook_unmark(f.__code__)


def test_module_and_class_bodies_pass() -> None:
    d = Served()
    code = compile("x = 1\nclass K:\n    y = 2\n", "<body>", "exec")
    body = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    _C.hook_mark(code, d)
    _C.hook_mark(body, d)
    space: dict[str, Any] = {}
    exec(code, space)
    assert space["x"] == 1 and space["K"].y == 2 and d.calls == []
    _C.hook_unmark(code)
    _C.hook_unmark(body)


def test_exceptions_of_a_dispatcher() -> None:
    def fails(*args: Any) -> Any:
        raise KeyError("from the dispatcher")

    d = Served(fails)
    _C.hook_mark(plain.__code__, d)
    for _ in range(100):
        with pytest.raises(KeyError):
            plain(1)
    d.result = _C.NULL
    with pytest.raises(TypeError):
        plain()  # type: ignore[call-arg]
    assert plain(1) == (1, 2)
    _C.hook_unmark(plain.__code__)


def test_served_frames_leave_nothing_behind() -> None:
    class Token:
        pass

    def f(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    d = Served(None)
    _C.hook_mark(f.__code__, d)
    token, function = Token(), types.FunctionType(f.__code__, {"magic": 1})
    seen = weakref.ref(function)
    counts = sys.getrefcount(token), sys.getrefcount(f), sys.getrefcount(f.__code__)
    for _ in range(1000):
        f(token, token, k=token)
        function(token)
        d.calls.clear()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(20_000):
        f(token, token, k=token)
        d.calls.clear()
    gc.collect()
    assert sys.getallocatedblocks() - before < 50
    after = sys.getrefcount(token), sys.getrefcount(f), sys.getrefcount(f.__code__)
    assert after == counts
    del function
    assert seen() is None
    _C.hook_unmark(f.__code__)


def test_arguments_die_with_the_frame() -> None:
    class Token:
        pass

    d = Served(lambda *args: None)
    d.calls = types.SimpleNamespace(append=lambda args: None)  # type: ignore[assignment]
    _C.hook_mark(plain.__code__, d)
    seen: list[weakref.ref[Any]] = []

    def call() -> None:
        token = Token()
        seen.append(weakref.ref(token))
        plain(token)  # type: ignore[arg-type]

    call()
    assert seen[0]() is None
    _C.hook_unmark(plain.__code__)


def test_deep_stacks_and_new_stack_chunks() -> None:
    """Frames at the border of a chunk of the thread's stack are taken off correctly, too."""

    def many_locals(n: int) -> int:
        a = b = c = e = f = g = h = i = j = k = n
        return many_locals(n - 1) + 1 if n else plain(a + b + c + e + f + g + h + i + j + k)

    d = Served(lambda f, a, b: a + 1000)
    _C.hook_mark(plain.__code__, d)
    for depth in range(200, 330):
        assert many_locals(depth) == 1000 + depth
    _C.hook_unmark(plain.__code__)
    assert plain(1) == (1, 2)


def test_recursion_through_the_dispatcher() -> None:
    def fact(n: int) -> int:
        return n * fact(n - 1) if n else 1

    d = Served(lambda f, n: _C.NULL if n % 2 else n * fact(n - 1) if n else 1)
    _C.hook_mark(fact.__code__, d)
    assert fact(20) == 2432902008176640000
    assert len(d.calls) == 21
    _C.hook_unmark(fact.__code__)


def test_marks_may_change_while_a_frame_is_served() -> None:
    def change(f: Any, a: int, b: int) -> Any:
        _C.hook_unmark(plain.__code__)
        gc.collect()
        return "last"

    d = Served(change)
    _C.hook_mark(plain.__code__, d)
    assert plain(1) == "last" and plain(1) == (1, 2)


def test_a_mark_does_not_keep_its_dispatcher_alive() -> None:
    d = Served()
    _C.hook_mark(plain.__code__, d)
    assert installed() and plain(1) == "served"
    del d
    assert plain(1) == (1, 2) and not installed()
    first, second = Served(1), Served(2)
    _C.hook_mark(plain.__code__, first)
    _C.hook_mark(plain.__code__, second)
    assert _C.hook_state()["marked"] == 1
    del first
    assert plain(0) == 2, "the mark of another dispatcher stays"
    _C.hook_unmark(plain.__code__)


def test_disabled() -> None:
    d = Served()
    _C.hook_mark(plain.__code__, d)
    _C.hook_uninstall()
    assert plain(1) == (1, 2) and not installed() and not _C.hook_state()["enabled"]
    _C.hook_install()
    assert plain(1) == "served" and installed()
    _C.hook_unmark(plain.__code__)
    _C.hook_install()
    assert not installed(), "nothing is marked"


def test_a_dispatcher_of_records() -> None:
    program = _C.GuardProgram(
        [("argc", 3, ()), ("arg", 0, 0), ("is", 0, plain), ("arg", 1, 1), ("eq", 1, 5)], 2
    )
    record = _C.Record(program, lambda a: (a * 100,), (1,), 0)
    call = _C.Dispatcher(lambda args, kwargs: _C.NULL, [record])
    _C.hook_mark(plain.__code__, call)
    assert [plain(i) for i in (4, 5, 6)] == [(4, 2), 500, (6, 2)]
    assert record.hits == 1
    _C.hook_unmark(plain.__code__)


def test_bad_arguments() -> None:
    for args in [(), (1, plain), (plain.__code__, 1), (plain, plain)]:
        with pytest.raises(TypeError):
            _C.hook_mark(*args)
    with pytest.raises(TypeError):
        _C.hook_unmark(plain)
    with pytest.raises(TypeError, match="weak reference"):
        _C.hook_mark(plain.__code__, len.__call__)


def test_threads() -> None:
    d = Served(lambda f, a, b: a + b)
    d.calls = types.SimpleNamespace(append=lambda args: None)  # type: ignore[assignment]
    wrong: list[Any] = []

    def work(i: int) -> None:
        for n in range(3000):
            if plain(i, n) not in (i + n, (i, n)):
                wrong.append((i, n))

    def toggle() -> None:
        for _ in range(300):
            _C.hook_mark(plain.__code__, d)
            _C.hook_unmark(plain.__code__)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    threads.append(threading.Thread(target=toggle))
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# -- beside torch._dynamo ------------------------------------------------------------------------


def inner(x: Any) -> Any:
    return x + 1


@needs_torch
@pytest.mark.parametrize("marked_first", [True, False])
def test_both_orders_with_dynamo(marked_first: bool) -> None:
    """A compiled function whose graph breaks at a marked function."""
    torch._dynamo.reset()
    seen: list[Any] = []

    def backend(gm: Any, example: Any) -> Any:
        seen.append(gm)
        return gm.forward

    barrier = torch._dynamo.disable(inner)

    @torch.compile(backend=backend)
    def outer(x: Any) -> Any:
        y = x * 2
        y = barrier(y)
        return y * 3

    x = torch.ones(2)
    d = Served(lambda f, x: x + 100)
    if marked_first:
        _C.hook_mark(inner.__code__, d)
        assert outer(x).tolist() == [306.0, 306.0]
    else:
        assert outer(x).tolist() == [9.0, 9.0]
        _C.hook_mark(inner.__code__, d)
    graphs = len(seen)
    assert graphs >= 1, "dynamo compiled"
    for _ in range(3):
        assert outer(x).tolist() == [306.0, 306.0]
        assert inner(x).tolist() == [101.0, 101.0]
    assert len(seen) == graphs, "and did not compile again"
    _C.hook_unmark(inner.__code__)
    assert outer(x).tolist() == [9.0, 9.0]
    assert inner(x).tolist() == [2.0, 2.0]
    assert not installed()


@needs_torch
def test_marking_and_unmarking_while_dynamo_is_active() -> None:
    torch._dynamo.reset()
    d = Served(lambda f, x: x + 100)

    @torch._dynamo.disable
    def mark() -> None:
        _C.hook_mark(inner.__code__, d)

    @torch._dynamo.disable
    def unmark() -> None:
        _C.hook_unmark(inner.__code__)

    barrier = torch._dynamo.disable(inner)

    @torch.compile(backend="eager")
    def outer(x: Any, then: Any) -> Any:
        y = x * 2
        then()
        return barrier(y) * 3

    x = torch.ones(2)
    for _ in range(3):
        assert outer(x, mark).tolist() == [306.0, 306.0]
        _C.hook_install()
        assert installed() and inner(x).tolist() == [101.0, 101.0]
        assert outer(x, unmark).tolist() == [9.0, 9.0]
        assert inner(x).tolist() == [2.0, 2.0]
        assert not installed()


@needs_torch
def test_compiled_calls_in_threads_while_marks_come_and_go() -> None:
    """In a process of its own: an endless loop between two hooks would overflow the stack."""
    code = """
import sys, threading, torch
sys.path.insert(0, sys.argv[1])
from magjit import _C
torch.set_num_threads(1)
def inner(x): return x + 1
barrier = torch._dynamo.disable(inner)
@torch.compile(backend="eager")
def outer(x): return barrier(x * 2) * 3
def served(f, x): return x + 100
x = torch.ones(2); outer(x); wrong = []
def work():
    for _ in range(200):
        if outer(x)[0].item() not in (9.0, 306.0): wrong.append(1)
def toggle():
    for _ in range(500):
        _C.hook_mark(inner.__code__, served); inner(x); _C.hook_unmark(inner.__code__)
threads = [threading.Thread(target=t) for t in (work, work, toggle)]
[t.start() for t in threads]; [t.join() for t in threads]
_C.hook_mark(inner.__code__, served)
assert inner(x)[0] == 101 and outer(x)[0] == 306
_C.hook_unmark(inner.__code__)
assert inner(x)[0] == 2 and outer(x)[0] == 9 and inner(x)[0] == 2
assert not _C.hook_state()["first"] and not wrong, (wrong, _C.hook_state())
print("fine")
"""
    root = str(Path(_C.__file__).parents[1])
    out = subprocess.run(
        [sys.executable, "-c", code, root], capture_output=True, text=True, timeout=300
    )
    assert out.stdout.strip() == "fine", out.stderr[-3000:]
