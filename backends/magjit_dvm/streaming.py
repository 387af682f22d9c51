"""Streaming fusion of programs whose graph varies, when the front end asks for it (DVM, §5.2).

A program of which ever-new graphs would have to be compiled runs as under ``lazy()``, but nobody
has said that it may: what ``lazy()`` leaves to its caller is watched here.  Memory that somebody
else can reach without torch's dispatcher is never read late, and what does not pay is not done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from magjit_dvm.lazy_mode import LONGEST, Queue, queueing

__all__ = ["Streamed"]

_LEAST_BYTES = 1 << 20
"""Of the largest tensor: an operator that waits costs more than one that does not."""

_RECENT = 16


class Streamed:
    """When and how the calls of one program are streamed."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self.given_up = False

    def context(self, values: Sequence[Any]) -> AbstractContextManager[None] | None:
        """See ``magjit.plugin.Streaming``: training and small tensors are left to eager mode."""
        if self.given_up or torch.is_grad_enabled() or not _is_large(values):
            return None
        return self._watched()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        reachable = _Reachable()
        queue = Queue(LONGEST, reachable.may_wait)
        reachable.queue = queue
        with queueing(queue), reachable:
            yield
        self._note(sum(queue.stats.flushes.values()), queue.stats.compiled)

    def _note(self, windows: int, compiled: int) -> None:
        """Give up if most windows have a structure of their own: each costs milliseconds."""
        self._recent.append((windows, compiled))
        if len(self._recent) == _RECENT:
            total, new = (sum(counts) for counts in zip(*self._recent, strict=True))
            self.given_up = 2 * new > total


def _is_large(values: Sequence[Any]) -> bool:
    return any(
        isinstance(one, torch.Tensor) and one.numel() * one.element_size() >= _LEAST_BYTES
        for one in tree_iter(list(values))
    )


_REACHING = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "numpy",
        "data_ptr",
        "storage",
        "untyped_storage",
        "_typed_storage",
        "__array__",
        "__dlpack__",
    )
)


class _Reachable(TorchFunctionMode):
    """Memory of tensors that can be written without the dispatcher, inside the context or before.

    torch marks what it shares with NumPy, and what somebody else has allocated: such a storage
    cannot be resized.  Addresses are known if they were asked for inside the context.
    """

    queue: Queue

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[int, torch.UntypedStorage] = {}

    def may_wait(self, tensor: torch.Tensor) -> bool:
        """Whether nobody else reaches the memory."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            return storage.resizable() and storage.data_ptr() not in self._shown

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _REACHING:
            self.queue.flush(func.__name__)
            made = func(*args, **(kwargs or {}))
            storage = args[0].untyped_storage()
            self._shown[storage.data_ptr()] = storage
            return made
        return func(*args, **(kwargs or {}))
