"""What a compiled object does at a call that needs a new capture: `set_stance`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

from magjit import _C
from magjit.errors import ArgumentError

Stance = Literal["default", "eager_on_recompile", "fail_on_recompile", "force_eager"]
Function = TypeVar("Function", bound=Callable[..., Any])

_current: Stance = "default"


def current() -> Stance:
    """The stance of the process."""
    return _current


def _take(stance: Stance) -> Stance:
    global _current
    before, _current = _current, stance
    _C.force_misses(stance == "force_eager")
    return before


class set_stance:  # noqa: N801 - used as a function, as that of torch
    """Choose what compiled objects do from now on, in the whole process.

    ::

        magjit.set_stance("fail_on_recompile")            # from here on
        with magjit.set_stance("eager_on_recompile"):     # in this block
            serve()
        @magjit.set_stance("force_eager")                 # whenever this function runs
        def compare(): ...

    Args:
        stance: ``"default"``: a call that fits no record is captured. ``"eager_on_recompile"``:
            it runs eagerly, and records that fit serve. ``"fail_on_recompile"``: it raises
            `magjit.errors.RecompileError`, which names the guards that fail, before anything has
            run; of a program in several regions, the part that no record fits.
            ``"force_eager"``: all calls run eagerly; records are kept.

    Raises:
        ArgumentError: there is no such stance.
    """

    def __init__(self, stance: Stance = "default") -> None:
        if stance not in get_args(Stance):
            raise ArgumentError(
                f"There is no stance {stance!r}",
                remedy=f"choose one of {', '.join(get_args(Stance))}",
            )
        self._stance: Stance = stance
        self._before = _take(stance)

    def __enter__(self) -> None:
        """The stance was taken when this object was made."""

    def __exit__(self, *error: object) -> None:
        _take(self._before)

    def __call__(self, function: Function) -> Function:
        """Decorate a function: the stance holds while it runs."""
        _take(self._before)
        stance = self._stance

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with set_stance(stance):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]
