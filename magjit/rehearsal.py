"""The second way through a program that sets itself up, recorded in its first call.

A record that does not serve the very next call is of little use: the program filled a cache, made
a mask or kept a hidden state, and goes another way from now on. So the program is run once more,
with the same arguments, for the record of that way. Such a rehearsal leaves no trace. What cannot
be taken back stops it before it happens (`RehearsalRecorder` for the state of Python, `Confinement`
for tensors), and the rest is put back. A stopped rehearsal costs its time and nothing else; the
next call is captured as it would have been.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from magjit import _C
from magjit.annotations import default_database
from magjit.observe import Manner, Observation, default_generators, observe
from magjit.refgraph.python_specials import python_special
from magjit.refgraph.rehearsal import RehearsalRecorder, Veto

log = logging.getLogger("magjit")

_KNOWN_NAMESPACES = frozenset({"aten", "prims"})
"""Operators of others may run Python, or act on the world outside."""
_FRESH = frozenset({"lift_fresh", "lift_fresh_copy"})
"""Their argument has just been made of Python numbers."""
_set_versions: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
_RESHAPING = frozenset({"resize_", "resize_as_", "set_", "as_strided_", "swap_"})
_UPDATING = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update"}
    | {"_native_batch_norm_legit", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
    | {"batch_norm_update_stats", "_thnn_fused_gru_cell_update", "cudnn_batch_norm_update"}
)
"""They change running statistics, which not all of their schemas say."""
IDLE_THREADS = ["tqdm.", "torch._inductor."]
"""Modules whose threads call no program."""
_MOST_SAVED = 64 << 20
"""Bytes of tensors from outside that a rehearsal may change: it has to keep a copy of them."""


class Confinement(TorchDispatchMode):
    """Lets operators change a tensor that was there before only where `put_back` can undo it.

    It sees the operators that others launch, too, and each by its schema. A tensor whose change
    autograd would record stays as it is: its place in the graph of gradients could not be put back.
    """

    def __init__(self, recorder: RehearsalRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._made: set[int] = set()
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._assigned: list[tuple[torch.Tensor, torch.Tensor]] = []

    def put_back(self) -> None:
        """What tensors from outside held, and how often they had been changed."""
        for tensor, data in reversed(self._assigned):
            tensor.data = data
        for storage, before in self._saved.values():
            storage.copy_(before)
        for tensor, version in reversed(self._versions):
            _set_versions((tensor,), (version,))
        self._assigned.clear()
        self._saved.clear()
        self._versions.clear()

    def assigns_data(self, tensor: torch.Tensor) -> None:
        """A tensor is about to get other memory, another size or another dtype."""
        if not set(_storages(tensor)) <= self._made:
            self._assigned.append((tensor, tensor.data))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch puts a function of its own around the next one, which would be observed."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        recorder, operators = self._recorder, self._recorder.operators
        recorder.pause()
        handling, operators.handling = operators.handling, True
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            operators.handling = handling
            recorder.resume()

    def _dispatch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packet = func._schema.name.partition("::")[2]
        if func.namespace not in _KNOWN_NAMESPACES:
            self._recorder.veto(f"calls the operator {func}")
        given = {storage for value in (*args, *kwargs.values()) for storage in _storages(value)}
        if func._schema.is_mutable:
            self._check(func, args, kwargs)
        elif packet in _UPDATING and not given <= self._made:
            self._update(func, args, kwargs)
        result = func(*args, **kwargs)
        made = set(_storages(result))
        self._made |= made if packet in _FRESH else made - given
        return result

    def _check(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if self._recorder.array_tensors:
                self._recorder.veto(f"changes tensors beside such that lie over an array ({func})")
            if set(_storages(value)) <= self._made:
                continue
            if func._opname in _RESHAPING or not isinstance(value, torch.Tensor):
                self._recorder.veto(f"changes the memory of a tensor from outside ({func})")
                return
            if any(_has_gradient(other) for other in (*args, *kwargs.values())):
                self._recorder.veto(f"changes a tensor from outside that has a gradient ({func})")
            self._save(value)

    def _save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        saved = sum(before.nbytes() for _, before in self._saved.values())
        known = _set_versions is not None and storage is not None and not tensor.is_inference()
        if not known or storage is None or saved + storage.nbytes() > _MOST_SAVED:
            self._recorder.veto("changes a tensor from outside that is not copied")
            return
        self._versions.append((tensor, tensor._version))
        if storage._cdata not in self._saved:
            self._saved[storage._cdata] = storage, storage.clone()

    def _update(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Batch norm that is told to train."""
        named = {
            argument.name: args[index] if index < len(args) else kwargs.get(argument.name)
            for index, argument in enumerate(func._schema.arguments)
        }
        if (
            named.get("training", True)
            and not set(_storages(named.get("running_mean"))) <= self._made
        ):
            self._recorder.veto(f"changes running statistics ({func})")


def _has_gradient(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_gradient, value))
    return isinstance(value, torch.Tensor) and value.requires_grad


def _storages(value: Any) -> list[int]:
    """Which memories the tensors of an argument or of a result lie in; 0 for one without."""
    if isinstance(value, torch.Tensor):
        try:
            return [value.untyped_storage()._cdata]
        except (NotImplementedError, RuntimeError):
            return [0]
    if isinstance(value, (list, tuple)):
        return [storage for item in value for storage in _storages(item)]
    return []


class _World:
    """State of the process that a run may change without an object of the program's showing it."""

    def __init__(self) -> None:
        self._random = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._generators = [(one, one.get_state()) for one in default_generators()]
        self._grad = torch.is_grad_enabled()

    def put_back(self) -> None:
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        for generator, state in self._generators:
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)
        torch._C._set_grad_enabled(self._grad)


def may_rehearse() -> bool:
    """Whether nobody else can see what a rehearsal does until it is put back."""
    here = threading.current_thread()
    if any(thread is not here and not _is_idle(thread) for thread in threading.enumerate()):
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _is_idle(thread: threading.Thread) -> bool:
    """Whether a thread never calls a program: of progress bars, or of compilers."""
    work = getattr(thread, "_target", None)
    of = (type(thread).__module__, getattr(work, "__module__", None) or "")
    return any(name.startswith(tuple(IDLE_THREADS)) for name in of)


def _others(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like those of a call. The next call has other tensors, too.

    A program that keeps an argument would find the very same one otherwise. Tensors with a gradient
    or with memory in common stay as they are.
    """
    storages = [storage for value in (*args, *kwargs.values()) for storage in _storages(value)]

    def other(value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or value.layout != torch.strided:
            return value
        if storages.count(_storages(value)[0]) > 1 or not _is_dense(value):
            return value
        return value.detach().clone()

    return tuple(map(other, args)), {name: other(value) for name, value in kwargs.items()}


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a clone has the same strides, and no memory beside."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def rehearse(
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    manner: Manner,
    keep: Callable[[Observation, Manner], Any],
) -> None:
    """Run a program once more without a trace, and give what was observed to ``keep``.

    Nothing that the program raises comes out, nor a failure of ``keep``.

    Args:
        target: the program; ``args`` and ``kwargs`` are those of its last call.
        manner: how to observe it.
        keep: makes a record of the observation; is not called for a run that was stopped.
    """
    recorder = RehearsalRecorder(default_database(), python_special)
    recorder.around = confinement = Confinement(recorder)
    recorder.assigns_data = confinement.assigns_data
    world, state = _World(), _C.global_state()
    observation = None
    try:
        args, kwargs = _others(args, kwargs)
        observation = observe(target, args, kwargs, manner, recorder=recorder)
        if recorder.vetoed is None and _C.global_state() == state:
            keep(observation, manner)
    except Veto:
        pass
    except (Exception, SystemExit, GeneratorExit) as error:
        recorder.vetoed = recorder.vetoed or f"raises {error!r}"
    finally:
        confinement.put_back()
        recorder.put_back()
        world.put_back()
        recorder.give_numbers_back()
        if observation is not None:
            observation.release()
        else:
            recorder.release()
    if recorder.vetoed is not None:
        log.debug("the second way through %r is not recorded: %s", target, recorder.vetoed)
