"""Streaming fusion of programs whose graph varies (DVM, §5.2): ``with magjit_dvm.lazy():``.

An operator that can wait (``lazy_rules``) joins the window of its thread's queue
(``lazy_window``) and returns a ``QueuedTensor``: a tensor without memory, whose dispatch key
brings every operator here, from any thread and also from C++.  What needs a value flushes the
window: it is fused, run, and every tensor of it that the program still holds gets its memory.
At the end of the context these become ordinary tensors.

Why not ordinary tensors from the beginning, filled later: nothing would stop whoever reads
memory without asking the dispatcher (``numpy()``, an extension in C++) from reading it early.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from magjit.plugin import BackendOptionError, uncollected
from magjit_dvm.lazy_arguments import PLAIN, Coder, on_meta
from magjit_dvm.lazy_rules import (
    DIVISIONS,
    IN_PLACE,
    PARTS,
    RULES,
    SHAPE_ONLY,
    WRITES_SILENTLY,
    Kind,
    Layout,
    Rule,
    inferred,
    parts,
)
from magjit_dvm.lazy_tensor import (
    Held,
    LazyError,
    QueuedTensor,
    as_ordinary,
    run_plainly,
    still_held,
    tensors_in,
)
from magjit_dvm.lazy_window import DTYPES, CannotWait, Value, Window, alive, fitting

__all__ = ["LONGEST", "LazyError", "LazyStats", "Queue", "lazy", "queueing"]

LONGEST = 256


@dataclass(slots=True)
class LazyStats:
    """What happened in a context.

    Attributes:
        queued: operators that waited.
        compiled: windows that had to be fused; the others had the structure of an earlier one.
        flushes: how many windows were run, by the reason.
    """

    queued: int = 0
    compiled: int = 0
    flushes: Counter[str] = field(default_factory=Counter)


_local = threading.local()


@contextmanager
def lazy(longest: int = LONGEST) -> Iterator[LazyStats]:
    """Queue the operators of this thread, and run them fused when a value is needed.

    Within another such context the outer one's queue is used; it is flushed at both ends.

    Args:
        longest: operators that may wait at once.

    Raises:
        BackendOptionError: ``longest`` is less than 1.
        LazyError: at the end, an input was written behind the dispatcher's back.
    """
    if longest < 1:
        raise BackendOptionError(
            f"longest={longest}: at least one operator must be able to wait",
            remedy="leave it out, or pass a positive number",
        )
    outer: Queue | None = getattr(_local, "queue", None)
    if outer is None:
        with queueing(Queue(longest)) as queue:
            yield queue.stats
        return
    try:
        yield outer.stats
    finally:
        outer.flush("end of a context")


@contextmanager
def queueing(queue: Queue) -> Iterator[Queue]:
    """Let the operators of this thread, which has no queue yet, wait in this one."""
    _local.queue = queue
    try:
        with queue:
            yield queue
    except BaseException:
        # What is wrong with the queue, its tensors say when they are read.
        with suppress(Exception):
            queue.close()
        raise
    else:
        queue.close()
    finally:
        _local.queue = None


class Queue(TorchDispatchMode):
    """The operators of one thread that wait."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to wrap each operator in ``torch.compiler.disable`` costs as much as it itself."""
        return False

    def __init__(
        self, longest: int, may_wait: Callable[[torch.Tensor], bool] | None = None
    ) -> None:
        """``may_wait`` says of a tensor from outside whether operators that read it may wait."""
        super().__init__()
        self.longest = longest
        self.may_wait = may_wait
        self.stats = LazyStats()
        self.window = Window(may_wait)
        self.holders: list[Held] = []  # of the window's values
        self.filled: list[weakref.ref[QueuedTensor]] = []
        self.lock = threading.RLock()
        self.runner = 0  # the thread that is running a window
        self.in_inference = False

    # -- operators --

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.runner and self.runner == threading.get_ident():
            return func(*args, **(kwargs or {}))
        with self.lock:
            rule = RULES.get(func)
            if rule is not None:
                made = self.queued(rule, args, kwargs)
                if made is not None:
                    return made
            elif func in IN_PLACE:
                if self.rewritten(IN_PLACE[func], args, kwargs):
                    return args[0]
            elif func in PARTS:
                made = self.parted(func, args, kwargs)
                if made is not None:
                    return made
        # Not under the lock: a value of another thread's queue may be asked for.
        if torch.is_inference_mode_enabled() and isinstance(func, torch._ops.OpOverload):
            # Composite operators come undivided where autograd does not see them.
            with self:
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        return self.run_now(func, args, kwargs or {})

    def queued(self, rule: Rule, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The results to come, or None where the operator cannot wait."""
        if self.in_inference is not torch.is_inference_mode_enabled():
            self.flush("inference mode")
            self.in_inference = torch.is_inference_mode_enabled()
        if rule.kind is Kind.VIEW and not self.is_waiting(args[0]):
            return self.view_of_filled(rule, args, kwargs)
        values = self.appended(rule, args, kwargs)
        if values is None:
            return None
        whole = args[0] if rule.kind is Kind.VIEW else None
        made = [self.holding(value, whole) for value in values]
        if any(value.window is None and value.real is None for value in values):
            return None  # as above
        if len(self.window.entries) >= self.longest:
            self.flush("length")
        return made[0] if len(made) == 1 else tuple(made)

    def parted(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> list[Any] | None:
        """The views that an operator with many of them makes."""
        if type(args[0]) is not QueuedTensor:
            return None
        asked = parts(func, args, kwargs)
        if asked is None:
            return None
        made = [self.queued(rule, given, None) for rule, given in asked]
        return made if all(one is not None for one in made) else None

    def view_of_filled(self, rule: Rule, args: tuple[Any, ...], kwargs: Any) -> Any:
        """A view of a queued tensor whose value is there; both become ordinary together."""
        whole = args[0]
        if type(whole) is not QueuedTensor or whole._queue is not self:
            return None
        real = rule.target(whole.plain(), *args[1:], **(kwargs or {}))
        base = whole._value.base
        assert base.real is not None
        offset = real.storage_offset() - base.real.storage_offset()
        layout = Layout.of(tuple(real.shape), tuple(real.stride()), real.dtype)
        value = Value(-1, layout, None, base, offset, real, None, torch.is_grad_enabled())
        made = self.tensor_of(value, whole)
        self.filled.append(made._held.ref)
        return made

    def appended(self, rule: Rule, args: tuple[Any, ...], kwargs: Any) -> list[Value] | None:
        """Put an operator into the window."""
        if torch._C._current_graph_task_id() != -1:
            return None  # what a backward pass computes goes to C++, which may hold it anywhere
        window = self.window
        coder = Coder(window, torch.is_grad_enabled())
        try:
            codes = coder.coded(rule, args, kwargs)
        except CannotWait:
            del window.numbers[coder.numbers :]
            return None
        if rule.kind is Kind.VIEW and codes[0][0] < 0:
            return None  # a finalizer that ran meanwhile has flushed the queue
        results = inferred(
            rule, tuple(coder.signature), lambda: on_meta(window, codes, coder.numbers)
        )
        if results is None or any(one.layout.dtype not in DTYPES for one in results):
            del window.numbers[coder.numbers :]
            return None
        if rule.target in DIVISIONS and not results[0].layout.dtype.is_floating_point:
            del window.numbers[coder.numbers :]
            return None
        base = window.values[codes[0][0]] if rule.kind is Kind.VIEW else None
        window.add(rule, codes, base, results)
        if self.window is not window:
            return None  # as above
        self.stats.queued += 1
        return window.values[-len(results) :]

    def rewritten(self, rule: Rule, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Let a queued tensor that nobody else sees stand for what is to be written into it."""
        written = args[0]
        if not self.is_waiting(written) or (torch.is_grad_enabled() and written.requires_grad):
            return False
        old: Value = written._value
        if old.root is not None or any(view() is not None for view in old.views or ()):
            return False
        values = self.appended(rule, args, kwargs)
        if values is None or len(values) != 1 or values[0].layout is not old.layout:
            # Broadcast or promoted: a dead operator more in the queue, and eager says why.
            return False
        if old.window is None:
            return False  # it was flushed, for another reason
        written.rename(values[0])
        if len(self.window.entries) >= self.longest:
            self.flush("length")
        return True

    def is_waiting(self, tensor: Any) -> bool:
        """Whether this is a queued tensor whose value is still to be computed, by this queue."""
        return type(tensor) is QueuedTensor and tensor._value.window is self.window

    def holding(self, value: Value, whole: QueuedTensor | None) -> QueuedTensor:
        """A tensor for the program; ``whole`` is what it is a view of."""
        made = self.tensor_of(value, whole)
        self.holders.append(made._held)
        if value.root is not None:
            if value.root.views is None:
                value.root.views = []
            value.root.views.append(made._held.ref)
        return made

    def tensor_of(self, value: Value, whole: QueuedTensor | None) -> QueuedTensor:
        """A tensor that belongs to inference mode if its whole does, or if it is on."""
        if whole is None or whole.is_inference() is torch.is_inference_mode_enabled():
            return QueuedTensor.of(value, self)
        with torch.inference_mode(whole.is_inference()):
            return QueuedTensor.of(value, self)

    # -- operators that do not wait --

    def run_now(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Flush what the operator needs, and run it as eager does."""
        if func in SHAPE_ONLY and self.is_waiting(args[0]):
            layout = args[0]._value.layout
            alike = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype)
            return func(alike, *args[1:], **kwargs)
        given = tensors_in(args, kwargs)
        if self.window.entries and self.concerns(func, args, kwargs, given):
            self.flush(str(func))
        return run_plainly(func, args, kwargs, given)

    def concerns(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> bool:
        """Whether the operator reads what waits, or writes what that reads."""
        schema = getattr(func, "_schema", None)
        if schema is None or func.namespace != "aten" or func in WRITES_SILENTLY:
            return True
        for one in given:
            if type(one) not in PLAIN and (
                type(one) is not QueuedTensor or one._value.window is self.window
            ):
                return True
        return bool(schema.is_mutable) and self.window_reads(_written(schema, args, kwargs))

    def window_reads(self, written: list[torch.Tensor]) -> bool:
        """Whether an input shares memory with one of these."""
        try:
            mine = [_extent(one) for one in self.window.inputs]
            theirs = [_extent(_plain(one)) for one in written]
        except (RuntimeError, NotImplementedError):
            return True
        return any(a < d and c < b for a, b in mine for c, d in theirs)

    # -- flushing --

    def flush(self, reason: str) -> None:
        """Compute every value that the program still holds.

        Raises:
            LazyError: an input was written behind the dispatcher's back.
        """
        with self.lock, uncollected():
            window, holders = self.window, self.holders
            if not window.entries:
                if window.inputs:
                    self.window = Window(self.may_wait)
                return
            self.window, self.holders = Window(self.may_wait), []
            held = still_held(holders)
            self.stats.flushes[reason] += 1
            before, self.runner = self.runner, threading.get_ident()
            try:
                self.run(window, held)
            except BaseException as error:
                for value in window.values:
                    value.window, value.error = None, error
                raise
            finally:
                self.runner = before
            self.keep(held)

    def keep(self, held: list[Held]) -> None:
        """Remember tensors until the end of the context, where they become ordinary ones."""
        if len(self.filled) > 4096:
            self.filled = [one for one in self.filled if one() is not None]
        self.filled += [one.ref for one in held]

    def run(self, window: Window, held: list[Held]) -> None:
        """Compute as below autograd and autocast: what the program asks of them has been done."""
        with torch._C.DisableTorchFunction(), torch._C._DisableAutocast(), torch.no_grad():
            if self.in_inference is torch.is_inference_mode_enabled():
                self.compute(window, held)
            else:
                with torch.inference_mode(self.in_inference):
                    self.compute(window, held)

    def compute(self, window: Window, held: list[Held]) -> None:
        """Give the values of these tensors their memory."""
        live = alive(one.value for one in held)
        if not live:
            for value in window.values:
                value.window = None
            return
        if window.changed_input() is not None:
            error = LazyError(
                "A tensor was written, not through torch's dispatcher, while operators that read "
                "it waited in a queue",
                remedy="end the context of magjit_dvm.lazy before writing it, or write in torch",
            )
            raise error
        compiled, is_new = window.compiled(live)
        self.stats.compiled += is_new
        try:
            results = compiled.schedule.call(*window.inputs, *window.numbers)
        except Exception:
            results = compiled.stepwise(*window.inputs, *window.numbers)
        for number, result in zip(live, results, strict=True):
            value = window.values[number]
            value.real = fitting(result, value.layout)
        for value in window.values:
            value.window = None

    def close(self) -> None:
        """Flush, and make ordinary tensors of all that the program holds."""
        try:
            self.flush("end of the context")
        finally:
            with self.lock:
                held = [one for one in (ref() for ref in self.filled) if one is not None]
                self.filled = []
                with uncollected(), torch._C.DisableTorchFunction(), torch.no_grad():
                    as_ordinary(held)


def _written(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes."""
    places = enumerate(schema.arguments)
    writes = [(k, one.name) for k, one in places if one.alias_info and one.alias_info.is_write]
    return tensors_in([args[k] if k < len(args) else kwargs.get(name) for k, name in writes], None)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.plain() if type(tensor) is QueuedTensor else tensor


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
