# ruff: noqa: N999
"""Types of the extension module (magjit/csrc)."""

from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar, final

_Number = TypeVar("_Number", int, float)

# ---- frames.c ----

@final
class Singleton:
    """A named marker, compared by identity."""

NULL: Singleton
OPAQUE: Singleton
SKIP_ALWAYS: Singleton

def stack(frame: FrameType, depth: int = -1) -> list[Any]: ...
def localsplus(frame: FrameType) -> list[Any]: ...
def function(frame: FrameType) -> Any: ...
def fresh_number(value: _Number, /) -> _Number: ...
def replace_stack(frame: FrameType, index: int, value: object, depth: int = -1) -> None: ...
def replace_local(frame: FrameType, index: int, value: object) -> None: ...

# ---- garbage.c ----

@final
class Uncollected:
    """A context manager inside which no thread collects garbage."""

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

# ---- thunk.c ----

@final
class Thunk:
    """Takes any arguments and gives function(*args)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None: ...
    def __call__(self, *args: object, **kwargs: object) -> Any: ...

# ---- step.c ----

@final
class Step:
    """An operation between two regions, and what is called behind it."""

    point: Any
    done: int
    def __init__(
        self,
        point: object,
        find_way: Callable[[Any, int, int], tuple[Callable[..., Any] | None, tuple[int, ...]]],
        kind: int,
        held: int,
        following: int,
        target: int,
        jumps_if: bool = False,
        unpacks: int = -1,
        unpacked: int = -1,
    ) -> None: ...
    def __call__(self, values: tuple[Any, ...], /) -> Pending: ...
    def drive(self, values: tuple[Any, ...], /) -> Any: ...
    def forget(self) -> None: ...

@final
class Pending:
    """A call that has come to a cut."""

    step: Step
    values: tuple[Any, ...]

# ---- reading.c ----

def set_reader(
    reader: Callable[..., Any], functions: tuple[Any, ...], device_types: int, /
) -> None: ...
def effects() -> int: ...

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
    def watch(self, obj: object, /) -> None: ...
    def state_of(self, frame: FrameType, /) -> Any: ...
    def at_next(self, frame: FrameType, wake: Callable[[int], object], /) -> None: ...
    confines: bool
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

# ---- guard.c, tensor_meta.c, guard_global.c ----

@final
class GuardProgram:
    """A list of guard instructions, verified and ready to check calls."""

    def __init__(self, instrs: Sequence[tuple[Any, ...]], n_slots: int) -> None: ...
    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, /) -> bool: ...
    def explain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, /
    ) -> int | None: ...
    def failure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, /
    ) -> tuple[int, list[Any]] | None: ...
    def slots(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, /
    ) -> list[Any] | None: ...
    @property
    def fast(self) -> tuple[int, int, int, tuple[int, ...]] | None: ...
    @property
    def n_slots(self) -> int: ...
    @property
    def n_instrs(self) -> int: ...

def tensor_meta(
    tensor: Any, /
) -> tuple[
    type,
    int,
    int,
    int,
    tuple[int | None, ...],
    tuple[int | None, ...] | None,
    bool | None,
    int,
]: ...
def torch_binding() -> dict[str, Any]: ...
def tensor_relation(a: Any, b: Any, /) -> int | None: ...
def force_misses(on: bool, /) -> None: ...
def current_call() -> int: ...
def global_state() -> dict[str, Any]: ...

# ---- dispatch.c ----

@final
class Record:
    """One way to serve a call: a guard program, a compiled graph and what makes its result."""

    def __init__(
        self,
        program: GuardProgram,
        graph_fn: Callable[..., Any],
        input_slots: tuple[int, ...],
        finish: Callable[..., Any] | int | None = None,
        finish_slots: tuple[int, ...] = (),
    ) -> None: ...
    hits: int
    pure: bool
    @property
    def program(self) -> GuardProgram: ...
    @property
    def graph_fn(self) -> Callable[..., Any]: ...
    @property
    def input_slots(self) -> tuple[int, ...]: ...
    @property
    def finish(self) -> Callable[..., Any] | int | None: ...
    @property
    def finish_slots(self) -> tuple[int, ...]: ...

@final
class Dispatcher:
    """Callable that serves calls from records, else by `miss(args, kwargs)`."""

    def __init__(
        self,
        miss: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        records: Sequence[Record] = (),
        bound: object = ...,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def add(self, record: Record, /) -> None: ...
    def remove(self, record: Record, /) -> None: ...
    def clear(self) -> None: ...
    enabled: bool
    misses: int
    failed: Callable[[Record, tuple[Any, ...], dict[str, Any], BaseException, bool], Any] | None
    @property
    def records(self) -> list[Record]: ...
    @property
    def miss(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]: ...
    @property
    def bound(self) -> Any: ...

# ---- hook.c ----

def hook_install() -> None: ...
def hook_uninstall() -> None: ...
def hook_mark(code: CodeType, dispatcher: Callable[..., Any], /) -> None: ...
def hook_unmark(code: CodeType, /) -> None: ...
def hook_state() -> dict[str, Any]: ...

# ---- shell.c ----

def route_calls(cls: type, /) -> None: ...
