"""The inputs and posts of events have one layout, whatever the version of the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest

from magjit import _C
from magjit.bytecode import EventKind, decode, plan_for

K = EventKind


class Thing:
    """A context manager, a container and a class with methods."""

    def __init__(self) -> None:
        self.name = "name"

    def method(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def __enter__(self) -> str:
        return "entered"

    def __exit__(self, *args: Any) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return key

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class Derived(Thing):
    def method(self, *args: Any, **kwargs: Any) -> Any:
        return super().method(*args, **kwargs)

    def read_super(self) -> Any:
        return super().__doc__


thing = Thing()
derived = Derived()
bound = thing.method
plain = Thing.method


def events(body: Callable[..., Any], *args: Any, kinds: set[EventKind]) -> list[tuple[Any, ...]]:
    """(kind, argval, kwnames, inputs, posts) of each event of body's own frame; no posts: None."""
    found: list[list[Any]] = []
    code = body.__code__

    def handler(kind: EventKind) -> Callable[..., Any]:
        def handle(state: CodeType, offset: int, inputs: tuple[Any, ...]) -> Any:
            instr = decode(state).instrs[offset]
            event = [kind, instr.argval, instr.kwnames, inputs, None]
            found.append(event)

            def post(values: tuple[Any, ...]) -> None:
                event[4] = values

            return post

        return handle

    handlers = [None, *(handler(kind) if kind in kinds else None for kind in EventKind)]
    tracer = _C.Tracer(
        handlers,
        lambda function, found_code, *rest: found_code if found_code is code else None,
        lambda state, value: None,
        frozenset(),
        plan_for,
    )
    tracer.start()
    try:
        body(*args)
    finally:
        tracer.stop()
    if tracer.error is not None:
        raise tracer.error
    return [tuple(event) for event in found]


def test_calls() -> None:
    def body() -> None:
        thing.method(1, 2)
        thing.method(1, key=2)
        bound(3)
        plain(thing, 4)
        len("ab")
        bound(key=5)

    n = _C.NULL
    function = Thing.method
    assert [event[1:] for event in events(body, kinds={K.CALL})] == [
        (2, (), (function, thing, 1, 2), (((1, 2), {}),)),
        (2, ("key",), (function, thing, 1, 2), (((1,), {"key": 2}),)),
        (1, (), (function, thing, 3), (((3,), {}),)),
        (2, (), (function, n, thing, 4), (((4,), {}),)),
        (1, (), (len, n, "ab"), (2,)),
        (1, ("key",), (function, thing, 5), (((), {"key": 5}),)),
    ]


def test_calls_with_stars() -> None:
    def body(args: Any, kwargs: Any) -> None:
        thing.method(*args)
        thing.method(*args, **kwargs)

    args, kwargs = (1, 2), {"k": 3}
    found = events(body, args, kwargs, kinds={K.CALL_EX})
    assert found == [
        (K.CALL_EX, 0, (), (bound, args, _C.NULL), ((args, {}),)),
        (K.CALL_EX, 1, (), (bound, args, kwargs), ((args, kwargs),)),
    ]


def test_attributes() -> None:
    def body() -> None:
        thing.name
        thing.method()
        thing.name.upper()
        thing.extra = 1
        del thing.extra

    found = events(body, kinds={K.LOAD_ATTR, K.STORE_ATTR, K.DELETE_ATTR})
    assert [(event[0], event[1], *event[3:]) for event in found] == [
        (K.LOAD_ATTR, "name", (thing,), ("name",)),
        (K.LOAD_ATTR, "method", (thing,), (Thing.method, thing)),
        (K.LOAD_ATTR, "name", (thing,), ("name",)),
        (K.LOAD_ATTR, "upper", ("name",), (str.upper, "name")),
        (K.STORE_ATTR, "extra", (1, thing), ()),
        (K.DELETE_ATTR, "extra", (thing,), ()),
    ]


def test_attribute_called_but_no_method() -> None:
    thing.action = action = lambda: None  # type: ignore[attr-defined]

    def body() -> None:
        thing.action()  # type: ignore[attr-defined]

    found = events(body, kinds={K.LOAD_ATTR, K.CALL})
    del thing.action  # type: ignore[attr-defined]
    assert [event[3:] for event in found] == [
        ((thing,), (_C.NULL, action)),
        ((action, _C.NULL), (None,)),
    ]


def test_super() -> None:
    found = events(Derived.method, derived, 1, kinds={K.LOAD_ATTR, K.LOAD_SUPER_ATTR})
    assert [event[1] for event in found] == ["method"]
    if sys.version_info >= (3, 12):
        assert found[0][3] == (super, Derived, derived)
    else:
        assert [type(value) for value in found[0][3]] == [super]
    found = events(Derived.read_super, derived, kinds={K.LOAD_ATTR, K.LOAD_SUPER_ATTR})
    assert [event[4] for event in found] == [(Thing.__doc__,)]


def test_items() -> None:
    def body(items: Any, i: Any, j: Any) -> None:
        items[i]
        items[i:j]
        items[i:j:2]
        items[i] = 0
        items[i:j] = [1, 2]
        del items[i]

    items = [1, 2, 3]

    found = events(body, items, 0, 2, kinds={K.LOAD_SUBSCR, K.STORE_SUBSCR, K.DELETE_SUBSCR})
    assert [(event[0], event[3]) for event in found] == [
        (K.LOAD_SUBSCR, (items, 0)),
        (K.LOAD_SUBSCR, (items, slice(0, 2))),
        (K.LOAD_SUBSCR, (items, slice(0, 2, 2))),
        (K.STORE_SUBSCR, (0, items, 0)),
        (K.STORE_SUBSCR, ([1, 2], items, slice(0, 2))),
        (K.DELETE_SUBSCR, (items, 0)),
    ]
    assert [event[4] for event in found] == [(1,), ([1, 2],), ([1],), (), (), ()]


def test_slices_of_user_classes() -> None:
    def body(i: Any) -> None:
        thing[i:]
        thing[:i] = 5

    assert [event[3:] for event in events(body, 1, kinds={K.LOAD_SUBSCR, K.STORE_SUBSCR})] == [
        ((thing, slice(1, None)), (slice(1, None),)),
        ((5, thing, slice(None, 1)), ()),
    ]


def test_names_and_cells() -> None:
    outer = [1]

    def body() -> None:
        nonlocal outer
        global fresh
        fresh = 1
        outer = outer + [thing]
        del fresh

    kinds = {K.LOAD_GLOBAL, K.STORE_GLOBAL, K.DELETE_GLOBAL, K.LOAD_DEREF, K.STORE_DEREF}
    first = outer
    cell = body.__closure__[0]  # type: ignore[index]
    assert [(event[0], event[1], *event[3:]) for event in events(body, kinds=kinds)] == [
        (K.STORE_GLOBAL, "fresh", (1,), ()),
        (K.LOAD_DEREF, "outer", (cell,), (first,)),
        (K.LOAD_GLOBAL, "thing", (), (thing,)),
        (K.STORE_DEREF, "outer", ([1, thing], cell), ()),
        (K.DELETE_GLOBAL, "fresh", (), ()),
    ]


def test_called_global() -> None:
    def body() -> None:
        len("a")

    assert events(body, kinds={K.LOAD_GLOBAL}) == [(K.LOAD_GLOBAL, "len", (), (), (len,))]


def test_class_body() -> None:
    def handler(state: Any, offset: int, inputs: Any) -> Any:
        instr = decode(state).instrs[offset]
        found.append((instr.opname, instr.argval, inputs))

    found: list[Any] = []
    handlers: list[Any] = [None] * 32
    handlers[K.LOAD_NAME] = handlers[K.STORE_NAME] = handlers[K.DELETE_NAME] = handler
    namespace: dict[str, Any] = {"a": 1}
    tracer = _C.Tracer(
        handlers, lambda f, code, *rest: code, lambda *args: None, frozenset(), plan_for
    )
    code = compile("b = a\ndel a", "made", "exec")
    tracer.start()
    exec(code, namespace)
    tracer.stop()
    assert tracer.error is None
    assert found == [
        ("LOAD_NAME", "a", (namespace,)),
        ("STORE_NAME", "b", (1, namespace)),
        ("DELETE_NAME", "a", (namespace,)),
    ]


def test_iteration() -> None:
    def body(items: Any) -> None:
        for item in items:
            pass

    iterator = iter([1, 2])
    assert [event[3:] for event in events(body, iterator, kinds={K.FOR_ITER})] == [
        ((iterator,), (1,)),
        ((iterator,), (2,)),
        ((iterator,), (_C.NULL,)),
    ]


def test_iteration_that_raises() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise KeyError

    def body(items: Any) -> None:
        try:
            for item in items:
                pass
        except KeyError:
            pass

    iterator = fails()
    found = events(body, iterator, kinds={K.FOR_ITER})
    assert [event[4] for event in found] == [(1,), None]


def test_yields() -> None:
    def generator() -> Any:
        got = yield "first"
        yield from [got]

    def body() -> None:
        running = generator()
        next(running)
        running.send("sent")

    found: list[Any] = []

    def handler(state: Any, offset: int, inputs: Any) -> Any:
        event = [decode(state).instrs[offset].opname, inputs]
        found.append(event)
        return event.append

    handlers: list[Any] = [None] * 32
    handlers[K.YIELD] = handlers[K.FOR_ITER] = handler
    tracer = _C.Tracer(
        handlers, lambda f, code, *rest: code, lambda *args: None, frozenset(), plan_for
    )
    tracer.start()
    body()
    tracer.stop()
    assert tracer.error is None
    assert found[0] == ["YIELD_VALUE", ("first",), ("sent",)]
    assert [type(value).__name__ for value in found[1][1]] == ["list_iterator"]
    assert found[1][2] == ("sent",)
    # `running` dies suspended in the last yield, which therefore completes with no value
    assert found[2] == ["YIELD_VALUE", ("sent",)]


def test_with() -> None:
    def body(fail: bool) -> None:
        with thing as value:  # noqa: F841
            if fail:
                raise error

    error = KeyError("k")
    entered, leave = events(body, False, kinds={K.BEFORE_WITH, K.CALL})
    exit_function = Thing.__exit__
    assert entered[3] == (thing,) and entered[4] == (thing.__exit__, "entered")
    assert leave[3:] == ((exit_function, thing, None, None, None), (True,))
    entered, leave = events(body, True, kinds={K.BEFORE_WITH, K.CALL})
    assert leave[3] == (exit_function, thing, KeyError, error, error.__traceback__)
    assert leave[4] == (True,)


@pytest.mark.parametrize("value", [None, 5])
def test_none_tests(value: Any) -> None:
    def body(value: Any) -> Any:
        if value is None:
            return 1
        return value is not None

    found = events(body, value, kinds={K.IS_OP})
    assert [event[3] for event in found] == [(value, None)] * (1 if value is None else 2)


def test_operators() -> None:
    def body(a: Any, b: Any) -> None:
        c = a + b
        c += a
        c **= b
        a < b
        a in (a, b)
        -a
        f"{a!r:>{b}}"

    kinds = {K.BINARY_OP, K.INPLACE, K.READ}
    found = [(event[0], event[3], event[4]) for event in events(body, 2, 3, kinds=kinds)]
    assert found[:6] == [
        (K.BINARY_OP, (2, 3), (5,)),
        (K.INPLACE, (5, 2), (7,)),
        (K.INPLACE, (7, 3), (343,)),
        (K.READ, (2, 3), (True,)),
        (K.READ, (2, (2, 3)), (True,)),
        (K.READ, (2,), (-2,)),
    ]
    symbols = [event[1] for event in events(body, 2, 3, kinds={K.BINARY_OP, K.INPLACE})]
    assert symbols == ["+", "+=", "**="]
    compares = [event[1] for event in events(body, 2, 3, kinds={K.READ})]
    assert compares[0] == "<"


def test_trivial_types_are_filtered_in_c() -> None:
    def body(a: Any, b: Any) -> None:
        a + a
        a + b
        not b
        not a

    seen: list[Any] = []
    handlers: list[Any] = [None, *[lambda state, offset, inputs: seen.append(inputs)] * 31]
    tracer = _C.Tracer(
        handlers,
        lambda f, code, *rest: code if code is body.__code__ else None,
        lambda *args: None,
        frozenset({int, bool}),
        plan_for,
    )
    tracer.start()
    body(1, 2.5)
    tracer.stop()
    assert seen == [(1, 2.5), (2.5,)]
    assert tracer.counts[1] == 2


def test_imports_and_functions() -> None:
    def body() -> Any:
        from os import path

        return lambda: path

    kinds = {K.IMPORT_NAME, K.IMPORT_FROM, K.MAKE_FUNCTION}
    found = events(body, kinds=kinds)
    import os

    assert found[0][1:] == ("os", (), (0, ("path",)), (os,))
    assert found[1][1:] == ("path", (), (os,), (os.path,))
    assert found[2][3] == () and found[2][4][0].__name__ == "<lambda>"


def test_post_is_dropped_when_the_instruction_raises() -> None:
    def body() -> None:
        try:
            [][thing]  # type: ignore[call-overload]
        except TypeError:
            thing.name
        [][0:1]

    found = events(body, kinds={K.LOAD_SUBSCR, K.LOAD_ATTR})
    assert [event[4] for event in found] == [None, ("name",), ([],)]


def test_jump_over_extended_arguments() -> None:
    lines = [f"    v{i} = {i + 300}" for i in range(300)]
    source = "def body(a, items):\n" + "\n".join(lines) + "\n    v299 = a.name\n    return v299"
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    found = events(namespace["body"], thing, [], kinds={K.LOAD_ATTR})
    assert [event[1:] for event in found] == [("name", (), (thing,), ("name",))]
