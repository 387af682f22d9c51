"""The collector is off inside `uncollected()` and afterwards as it was, for several threads too."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from magjit import _C
from magjit.garbage import uncollected


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_it_is_on_again_behind_the_outermost() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_after_an_error() -> None:
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()


def test_it_stays_off_if_it_was() -> None:
    gc.disable()
    with uncollected(), uncollected():
        pass
    assert not gc.isenabled()


def test_whoever_leaves_first() -> None:
    first, second = uncollected(), uncollected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_threads_that_come_while_others_leave() -> None:
    on_inside: list[bool] = []

    def come_and_leave() -> None:
        for _ in range(20_000):
            with uncollected():
                if gc.isenabled():
                    on_inside.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=come_and_leave) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert gc.isenabled()
    assert not on_inside


def test_one_that_is_never_left() -> None:
    one = uncollected()
    one.__enter__()
    one.__enter__()
    assert not gc.isenabled()
    del one
    assert gc.isenabled()


def test_one_that_was_not_entered() -> None:
    with pytest.raises(RuntimeError, match="without __enter__"):
        _C.Uncollected().__exit__(None, None, None)
    assert gc.isenabled()
