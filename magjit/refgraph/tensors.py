"""What a run does to tensors beyond the operators: attributes, hooks, hidden changes of data."""

from __future__ import annotations

import sys
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from magjit import _C
from magjit.refgraph import relations as r
from magjit.refgraph.kinds import class_lookup
from magjit.refgraph.nodes import RefGraph, ShadowNode

LARGEST_ARRAY = 1 << 20
"""Bytes of an array that a guard compares at each call."""
_HELD_BY_TENSOR = 3
"""References to an array while it is looked at: the tensor's memory, a variable, the question."""
_MODULES = vars(torch.nn.modules.module)
"""Torch hooks the old kind of backward hooks here, and forgets the handles."""


def hook_node(tensor: torch.Tensor, hook: Any) -> None:
    """What a replay does for ``tensor.grad_fn.register_hook(hook)``."""
    assert tensor.grad_fn is not None
    tensor.grad_fn.register_hook(hook)


class TensorNotes(ABC):
    """The part of the recorder that knows the tensors of a run.

    A hook of the program's needs the very tensor that it was put on, and data that is replaced
    shows in no version: with them only the graph as it is will do, which `eager_only` says.

    Attributes:
        eager_only: why no backend may change the graph.
        hidden_changes: data may have changed without a trace in a tensor's version.
        in_region: the run goes on from a cut, with what the frames were handed.
        arrays: NumPy arrays from outside that were read, and those that tensors share.
        array_tensors: tensors that share memory with an array, with their versions.
    """

    graph: RefGraph

    def __init__(self) -> None:
        self.eager_only: str | None = None
        self.hidden_changes = False
        self.in_region = False
        self.arrays: list[Any] = []
        self.array_tensors: list[tuple[torch.Tensor, int]] = []
        self._grad_fns: dict[int, torch.Tensor] = {}
        self._hooked: list[tuple[torch.Tensor, Any]] = []
        self._handles: list[tuple[Any, torch.Tensor, Any]] = []

    def release_tensors(self) -> None:
        """Let go of what is only needed in the run."""
        self.arrays = []
        self.array_tensors = []
        self._grad_fns = {}
        self._hooked = []
        self._handles = []

    # -- what the rest of the recorder does --------------------------------------------------------

    @abstractmethod
    def split(self, reason: str) -> None:
        """See `StateRecorder`."""

    @abstractmethod
    def read(self, node: ShadowNode | None, relation: r.Relation, value: Any) -> None:
        """See `StateRecorder`."""

    @abstractmethod
    def write(self, node: ShadowNode | None, relation: r.Relation) -> None:
        """See `StateRecorder`."""

    @abstractmethod
    def replay_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """See `StateRecorder`."""

    # -- attributes --------------------------------------------------------------------------------

    def external_tensor(self, tensor: torch.Tensor) -> bool:
        return self.graph.node_of(tensor) is not None

    def tensor_attribute(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        node = self.graph.node_of(tensor)
        if node is None:
            if name == "grad_fn" and value is not None:
                self._grad_fns[id(value)] = tensor
            if name not in ("grad_fn", "_version", "_base") and value is not None:
                self.split(f"reads .{name} of a tensor made in the program")
            return
        if name not in ("grad", "_grad") and value is not None:
            self.split(f"reads .{name} of a tensor from outside")
            return
        self.read(node, r.CAttr(class_lookup(torch.Tensor, name)), value)

    def tensor_fact(self, tensor: torch.Tensor, func: Any, value: Any) -> None:
        """Metadata was read that the guard of a tensor leaves out."""
        node = self.graph.node_of(tensor)
        if node is None:
            return
        getter = getattr(func, "__self__", None)
        if isinstance(getter, types.GetSetDescriptorType):
            self.read(node, r.CAttr(getter), value)
        elif isinstance(func, types.MethodDescriptorType):
            self.read(node, r.CResult(func), value)
        else:
            self.split(f"reads {getattr(func, '__name__', func)} of a tensor from outside")

    def set_tensor_attribute(self, tensor: torch.Tensor, name: str) -> None:
        node = self.graph.node_of(tensor)
        if node is None:
            self.split(f"sets .{name} of a tensor whose origin was not observed")
        else:
            self.write(node, r.CAttr(class_lookup(torch.Tensor, name)))

    # -- NumPy arrays ------------------------------------------------------------------------------

    def read_array(self, array: np.ndarray[Any, Any]) -> None:
        """C code reads the contents of an array."""
        node = self.graph.node_of(array)
        if node is None or any(known is array for known in self.arrays):
            return
        if self.in_region and node.parent == 0:
            self.split("reads a NumPy array that was made between two regions")
            return
        if array.dtype.hasobject or array.nbytes > LARGEST_ARRAY:
            self.split(f"reads a NumPy array of {array.nbytes} bytes of {array.dtype} from outside")
            return
        self.read(node, r.CAttr(vars(np.ndarray)["shape"]), array.shape)
        self.read(node, r.CAttr(vars(np.ndarray)["dtype"]), array.dtype)
        self.read(node, r.CResult(np.ndarray.tobytes), array.tobytes())
        self.arrays.append(array)

    def change_array(self, array: np.ndarray[Any, Any]) -> None:
        """C code changes the contents of an array."""
        if self.graph.node_of(array) is not None:
            self.split("changes a NumPy array from outside")
        elif self.shares_memory(array):
            self.split("changes the memory of a NumPy array that something else shares")

    def shares_memory(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether an array is from outside, or lies over the memory of one or of a tensor's."""
        return self.graph.node_of(array) is not None or any(
            np.may_share_memory(array, other) for other in self.arrays
        )

    # -- hooks and hidden changes ------------------------------------------------------------------

    def hides_change(self, reason: str | None = None, tensor: Any = None) -> None:
        """Data may change without a trace in a tensor's version; a reason needs the eager graph.

        ``tensor`` is about to get other data altogether.
        """
        self.hidden_changes = True
        self.eager_only = self.eager_only or reason

    @property
    def knows_graph_nodes(self) -> bool:
        """Whether the run has read a ``grad_fn``, which it may hook."""
        return bool(self._grad_fns)

    def hook_called(self, caller: Any, func: Any, args: tuple[Any, ...]) -> Any:
        """The verdict for a call of a graph node's ``register_hook``; None for any other call.

        Args:
            caller: the globals of the code that calls.
            func: what is called.
            args: with what.
        """
        if getattr(func, "__name__", "") != "register_hook":
            return None
        bound = getattr(func, "__self__", None)
        node, hooks = (args[0], args[1:]) if bound is None and args else (bound, args)
        tensor = self._grad_fns.get(id(node))
        if tensor is None or tensor.grad_fn is not node or len(hooks) != 1:
            return None
        if caller is not _MODULES:
            return None
        self.replay_call(hook_node, (tensor, *hooks), {})
        self._only_as_it_is(tensor)
        return _C.OPAQUE

    def hook(self, tensor: torch.Tensor, hook: Any) -> Callable[[Any], object]:
        """``tensor.register_hook(hook)``; called before, gives what is to be done after."""

        def after(handle: Any) -> None:
            self.replay_call(torch.Tensor.register_hook, (tensor, hook), {})
            self._only_as_it_is(tensor)
            self._handles.append((weakref.ref(handle), tensor, hook))

        return after

    def _only_as_it_is(self, tensor: torch.Tensor) -> None:
        self._hooked.append((tensor, tensor.grad_fn))
        if self.graph.node_of(tensor) is None:
            self.eager_only = "hooks a tensor of the program"

    def unrepeatable(self) -> str | None:
        """At the end of a run: what a replay would not do to its tensors."""
        if any(tensor.grad_fn is not node for tensor, node in self._hooked):
            return "changes a tensor in place after hooking it"
        for handle, tensor, hook in self._handles:
            kept = (tensor._backward_hooks or {}).values()
            if handle() is not None or not any(one is hook for one in kept):
                return "keeps or removes the hook that it registers on a tensor"
        if any(tensor._version != version for tensor, version in self.array_tensors):
            return "changes a tensor that shares memory with a NumPy array"
        return self._shared_twice()

    def _shared_twice(self) -> str | None:
        """An array that outlives the run, and a tensor over its memory."""
        while self.arrays:
            array = self.arrays.pop()
            if self.graph.node_of(array) is None and sys.getrefcount(array) > _HELD_BY_TENSOR:
                return "keeps a NumPy array and a tensor that shares its memory"
        return None
