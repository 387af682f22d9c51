"""Records and the dispatcher: who serves a call, with what, and what user code may do meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from magjit import _C


def takes(value: object, *, n: int = 1) -> _C.GuardProgram:
    """Accepts calls of one positional argument that equals `value`; slot 0 is the argument."""
    return _C.GuardProgram([("argc", n, ()), ("arg", 0, n - 1), ("eq", 0, value)], 1)


def miss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return "miss", args, kwargs


def outputs(*args: Any) -> tuple[Any, ...]:
    return args


class Plain:
    pass


def test_hit_and_miss() -> None:
    record = _C.Record(takes(1), lambda x: [x, "out"], (0,))
    call = _C.Dispatcher(miss, [record])
    assert call(1) == [1, "out"]
    assert call(2) == ("miss", (2,), {})
    assert call() == ("miss", (), {})
    assert call(1, k=2) == ("miss", (1,), {"k": 2})
    assert call(*(), **{"a": 1, "b": 2}) == ("miss", (), {"a": 1, "b": 2})
    assert (record.hits, call.misses) == (1, 4)


def test_finish() -> None:
    program = _C.GuardProgram([("argc", 2, ()), ("arg", 0, 0), ("arg", 1, 1)], 2)
    extra = Plain()

    def serve(finish: Any, slots: tuple[int, ...] = (), graph: Any = outputs) -> Any:
        return _C.Dispatcher(miss, [_C.Record(program, graph, (1, 0, 1), finish, slots)])(1, extra)

    assert serve(None) == (extra, 1, extra)
    assert serve(0) is extra and serve(1) == 1
    assert serve(lambda *a: a, (0, 1)) == ((extra, 1, extra), 1, extra)
    assert serve(lambda outs: len(outs)) == 3
    assert serve(1, graph=lambda *a: list(a)) == 1
    assert serve(1, graph=lambda *a: "abc") == "b"
    with pytest.raises(IndexError):
        serve(3)
    with pytest.raises(TypeError):
        serve(0, graph=lambda *a: None)


def test_graph_without_inputs_and_with_thousands() -> None:
    for n in (0, 1, 1022, 1023, 1024, 1025, 5000):
        program = _C.GuardProgram([("arg", i, i) for i in range(n)], n)
        record = _C.Record(
            program, outputs, tuple(range(n)), lambda outs, *a: (outs, a), (0,) * min(n, 2)
        )
        args = tuple(object() for _ in range(n))
        assert _C.Dispatcher(miss, [record])(*args) == (args, args[:1] * min(n, 2))


def test_bound_object_comes_first() -> None:
    obj = Plain()
    program = _C.GuardProgram(
        [("argc", 2, ("k",)), ("arg", 0, 0), ("arg", 1, 1), ("kwarg", 2, "k")], 3
    )
    call = _C.Dispatcher(miss, [_C.Record(program, outputs, (0, 1, 2))], bound=obj)
    assert call(1, k=2) == (obj, 1, 2)
    assert call(*[1], **{"k": 2}) == (obj, 1, 2)
    assert call.__call__(1, k=2) == (obj, 1, 2)
    assert call(1) == ("miss", (obj, 1), {})
    assert call(*range(100), z=1) == ("miss", (obj, *range(100)), {"z": 1})
    assert call.bound is obj and _C.Dispatcher(miss).bound is None

    class Holder:
        method = call

    assert Holder().method() == ("miss", (obj,), {}), "not a descriptor"


def test_most_recently_hit_record_comes_first() -> None:
    records = [_C.Record(takes(i), outputs, (0,)) for i in range(5)]
    call = _C.Dispatcher(miss, records)
    assert call.records == records
    call(3)
    assert call.records == [records[i] for i in (3, 0, 1, 2, 4)]
    call(4)
    assert call.records == [records[i] for i in (4, 3, 0, 1, 2)]
    call(4)
    call(9)
    assert call.records == [records[i] for i in (4, 3, 0, 1, 2)]
    new = _C.Record(takes(9), outputs, (0,))
    call.add(new)
    assert call.records[0] is new and call(9) == (9,)
    call.remove(records[0])
    assert len(call.records) == 5 and call(0)[0] == "miss"
    with pytest.raises(ValueError, match="no such record"):
        call.remove(records[0])
    call.clear()
    assert call.records == [] and call(9)[0] == "miss"


def test_enabled() -> None:
    call = _C.Dispatcher(miss, [_C.Record(takes(1), outputs, (0,))])
    call.enabled = False
    assert call(1)[0] == "miss"
    call.enabled = True
    assert call(1) == (1,)


def test_exceptions_pass_through() -> None:
    def fails(*args: Any) -> Any:
        raise KeyError("from the graph")

    def finish_fails(*args: Any) -> Any:
        raise OSError("from finish")

    for graph, finish, error in [
        (fails, None, KeyError),
        (fails, 0, KeyError),
        (outputs, finish_fails, OSError),
    ]:
        call = _C.Dispatcher(miss, [_C.Record(takes(1), graph, (0,), finish)])
        for _ in range(3):
            with pytest.raises(error):
                call(1)
    with pytest.raises(ZeroDivisionError):
        _C.Dispatcher(lambda a, k: 1 / 0)(1)


def test_nested_and_recursive_calls() -> None:
    program = _C.GuardProgram([("argc", 1, ()), ("arg", 0, 0), ("type_is", 0, int)], 1)

    def graph(n: int) -> Any:
        return n + call(n - 1) if n else 0

    call = _C.Dispatcher(miss, [_C.Record(program, graph, (0,))])
    assert call(100) == 5050
    assert call.records[0].hits == 101


def test_dispatcher_that_changes_while_it_runs() -> None:
    alive: list[weakref.ref[Any]] = []

    def graph(x: object) -> Any:
        call.clear()
        call.add(_C.Record(takes(2), outputs, (0,)))
        gc.collect()
        return x, "old"

    record = _C.Record(takes(1), graph, (0,), lambda outs, x: (*outs, x), (0,))
    call = _C.Dispatcher(miss, [record])
    alive.append(weakref.ref(graph))
    del record, graph
    assert call(1) == (1, "old", 1)
    gc.collect()
    assert alive[0]() is None
    assert call(2) == (2,)


def test_inputs_stay_alive_while_user_code_runs() -> None:
    holder = Plain()
    holder.item = Plain()
    seen = weakref.ref(holder.item)
    program = _C.GuardProgram(
        [("arg", 0, 0), ("dict", 1, 0), ("dict_block", 1, 1), ("getitem", 2, 1, "item")], 3
    )

    def graph(item: object) -> Any:
        del holder.item
        gc.collect()
        return (seen() is item,)

    def finish(outs: tuple[bool, ...], item: object) -> Any:
        return outs[0] and seen() is item

    call = _C.Dispatcher(miss, [_C.Record(program, graph, (2,), finish, (2,))])
    assert call(holder) is True
    assert seen() is None
    assert call(holder)[0] == "miss"


def test_arguments_are_checked() -> None:
    program = takes(1)
    with pytest.raises(ValueError, match="slot 1 is not one"):
        _C.Record(program, outputs, (1,))
    with pytest.raises(ValueError, match="slot -1 is not one"):
        _C.Record(program, outputs, (), None, (-1,))
    with pytest.raises(ValueError, match="slot 1 is not one"):
        _C.Record(_C.GuardProgram([("arg", 0, 0)], 2), outputs, (1,))
    with pytest.raises(ValueError, match="finish"):
        _C.Record(program, outputs, (), -1)
    bad_records: list[tuple[Any, ...]] = [
        (1, outputs, ()), (program, 1, ()), (program, outputs, [0]), (program, outputs, (), "x"),
        (program, outputs, ("a",)),
    ]  # fmt: skip
    for args in bad_records:
        with pytest.raises(TypeError):
            _C.Record(*args)
    for args in [(1,), (miss, 5), (miss, [1]), ()]:
        with pytest.raises(TypeError):
            _C.Dispatcher(*args)
    with pytest.raises(TypeError):
        _C.Dispatcher(miss).add(1)
    record = _C.Record(program, outputs, (0,), 0, (0, 0))
    assert (record.program, record.graph_fn, record.input_slots) == (program, outputs, (0,))
    assert (record.finish, record.finish_slots) == (0, (0, 0))
    assert _C.Record(program, outputs, (), miss).finish is miss


def test_garbage_collection() -> None:
    def make() -> weakref.ref[Any]:
        obj = Plain()
        program = _C.GuardProgram([("const", 0, obj)], 1)
        obj.call = _C.Dispatcher(lambda a, k: obj, [_C.Record(program, lambda: obj, ())], bound=obj)
        assert obj.call() is obj
        return weakref.ref(obj.call)

    seen = make()
    gc.collect()
    assert seen() is None


def test_a_hundred_thousand_calls_leak_nothing() -> None:
    class Arg:
        pass

    arg, extra = Arg(), Plain()
    program = _C.GuardProgram(
        [("argc", 1, ("k",)), ("arg", 0, 0), ("type_is", 0, Arg), ("kwarg", 1, "k"), ("eq", 1, 1),
         ("const", 2, extra), ("getattr_c", 3, 0, Arg.__dict__["__dict__"])], 4
    )  # fmt: skip
    record = _C.Record(program, outputs, (0, 2, 3), lambda outs, x: outs[0], (2,))
    call = _C.Dispatcher(lambda a, k: None, [record], bound=arg)
    objects: list[Any] = [arg, extra, program, record, call, outputs, arg.__dict__]

    def rounds(n: int) -> None:
        for _ in range(n):
            assert call(k=1) is arg
            call(k=2)

    rounds(100)
    counts = [sys.getrefcount(o) for o in objects]
    gc.collect()
    before = sys.getallocatedblocks()
    rounds(50_000)
    gc.collect()
    assert sys.getallocatedblocks() - before < 50
    assert [sys.getrefcount(o) for o in objects] == counts


def in_threads(count: int, work: Callable[[int], None]) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)


def test_threads_hit_add_and_remove() -> None:
    records = [_C.Record(takes(i), outputs, (0,)) for i in range(4)]
    call = _C.Dispatcher(miss, records)
    wrong: list[Any] = []

    def work(i: int) -> None:
        spare = _C.Record(takes(100 + i), outputs, (0,))
        for n in range(2000):
            if call(i) != (i,):
                wrong.append(i)
            if n % 10 == 0:
                call.add(spare)
                if call(100 + i) != (100 + i,):
                    wrong.append(spare)
                call.remove(spare)

    in_threads(4, work)
    assert not wrong
    assert [r.hits for r in records] == [2000] * 4
