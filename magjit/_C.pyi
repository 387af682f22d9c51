"""Types of the extension module (magjit/csrc)."""

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol, final

# ---- frames.c ----

@final
class Singleton:
    """A named marker, compared by identity."""

NULL: Singleton
OPAQUE: Singleton
SKIP_ALWAYS: Singleton

def stack(frame: FrameType, depth: int = -1) -> list[Any]: ...
def localsplus(frame: FrameType) -> list[Any]: ...
def replace_stack(frame: FrameType, index: int, value: object, depth: int = -1) -> None: ...

# ---- tracer.c ----

UNIT_SIZE: int

class _Plan(Protocol):
    @property
    def units(self) -> bytes: ...

class Tracer:
    """Observes the frames of one thread in C."""

    def __init__(
        self,
        handlers: list[Callable[[Any, int, tuple[Any, ...]], Any] | None],
        on_frame: Callable[[Any, CodeType, dict[str, Any], dict[str, Any], list[Any]], Any],
        on_exit: Callable[[Any, Any], object],
        trivial: frozenset[type],
        plan_for: Callable[[CodeType], _Plan],
    ) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    @property
    def error(self) -> BaseException | None: ...
    @property
    def paused(self) -> int: ...
    @property
    def running(self) -> bool: ...
    @property
    def attached(self) -> bool: ...
    @property
    def resuming(self) -> bool: ...
    @property
    def counts(self) -> tuple[int, int, int]: ...
