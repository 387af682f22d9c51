"""Finding all C callables of a process that have no annotation.

A program is split at the first such callable, and what comes after it stays unseen. So a survey
lets the recorder go on as if the callable had one. A record that is made in this way may be wrong:
replays are turned off before it exists.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from magjit import dispatch
from magjit.annotations import (
    Kind,
    Rule,
    default_database,
    is_c_callable,
    missing_entry,
    qualified_name,
)

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


@contextmanager
def survey() -> Iterator[dict[str, str]]:
    """Collect YAML entries by the name of their callable, for as long as the block runs."""
    database = default_database()
    known = database.lookup
    found: dict[str, str] = {}
    stopped: list[dispatch.Controller] = []

    def lookup(callable_: object, self_obj: object = None) -> Rule | None:
        rule = known(callable_, self_obj)
        if rule is not None or not _needs_rule(callable_):
            return rule
        name = qualified_name(callable_)
        found.setdefault(name, missing_entry(callable_))
        stopped.extend(_stop_replays())
        return Rule(name, Kind.METADATA)

    database.lookup = lookup  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dispatch.MagJITWarning)
            yield found
    finally:
        del database.lookup
        for controller in stopped:
            controller.reset()
            controller.dispatcher.enabled = True


def _needs_rule(callable_: Any) -> bool:
    """Whether the recorder splits at a call; classes that Python code defines are followed."""
    if isinstance(callable_, type) and int(callable_.__flags__) & _HEAP_TYPE:
        return False
    return is_c_callable(callable_)


def _stop_replays() -> list[dispatch.Controller]:
    """Turn replays off for all compiled objects, the one that is observed now among them."""
    found = [c for c in dispatch._controllers if c.dispatcher.enabled]
    for controller in found:
        controller.dispatcher.enabled = False
    return found
