"""The recorder of a run that is not to show: it is put back, or stopped before it does anything.

A program that sets itself up in its first call (a cache, a mask, a hidden state) goes another way
in its second. That way can be recorded at once if it is run again and leaves no trace. Each thing
that a run does to the outside world passes this recorder *before* it happens: what can be put back
is written down, anything else raises `Veto` into the program. The program's own handlers of
exceptions run then, and are confined alike.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from magjit.annotations import Database
from magjit.errors import Location
from magjit.refgraph import relations as r
from magjit.refgraph.cached_calls import CachedCall
from magjit.refgraph.kinds import class_lookup
from magjit.refgraph.nodes import ABSENT, ShadowNode
from magjit.refgraph.recorder import StateRecorder
from magjit.refgraph.run_control import Split
from magjit.refgraph.writes import final_value

_RESTORED = (dict, list, deque, set)
"""Containers whose contents and order can be given back."""


class Veto(BaseException):
    """A rehearsal was about to do what could not be taken back. No handler of the program's own."""


class RehearsalRecorder(StateRecorder):
    """Records a run that changes nothing outside, once `put_back` was called.

    Attributes:
        vetoed: why the run was stopped, if it was; it is not to become a record then.
        assigns_data: is told of a tensor whose ``.data`` is about to be assigned to.
    """

    assigns_data: Callable[[Any], None]

    confines = True

    def __init__(self, database: Database, python_special: Callable[[Any], Any]) -> None:
        self.vetoed: str | None = None
        self._edges: list[tuple[ShadowNode, r.Relation, Any]] = []
        self._orders: dict[int, list[Any]] = {}
        super().__init__(database, python_special)

    def veto(self, reason: str) -> None:
        """Stop the program before it goes on.

        Raises:
            Veto: always.
        """
        self.vetoed = self.vetoed or reason
        raise Veto(reason)

    # -- what cannot be put back -------------------------------------------------------------------

    def split(
        self,
        reason: str,
        remedy: str | None = None,
        location: Location | None = None,
        instead: tuple[types.CodeType, int] | None = None,
    ) -> None:
        """See `RunControl`: the program is about to do what no graph holds."""
        self.veto(reason)

    def give_up(self, split: Split) -> None:
        """See `RunControl`: from here on nobody would look."""
        self.veto(split.reason)

    def replay_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """See `StateRecorder`: a container is added to, or something has an effect."""
        owner = getattr(func, "__objclass__", None)
        if owner in _RESTORED and args and type(args[0]) is owner:
            self._check_order(args[0])
            super().replay_call(func, args, kwargs)
            return
        self.veto(f"calls {getattr(func, '__qualname__', func)} for its effect")

    def asks_cache(self, call: CachedCall) -> None:
        """See `RunControl`: a cache counts its calls."""
        self.veto(f"calls what keeps a cache: {call}")

    def hides_change(self, reason: str | None = None, tensor: Any = None) -> None:
        """See `TensorNotes`; what is written through ``.data`` of a tensor, operators show."""
        if tensor is not None:
            self.assigns_data(tensor)
        elif reason is not None:
            self.veto(reason)
        super().hides_change(reason, tensor)

    def set_tensor_attribute(self, tensor: Any, name: str) -> None:
        """See `TensorNotes`."""
        self.veto(f"sets .{name} of a tensor from outside")

    def imports(self, name: str, *, known: bool) -> None:
        """See `StateRecorder`: a module that is not there yet runs its code."""
        if not known:
            self.veto(f"imports {name}")

    def makes_instance(self, cls: type) -> None:
        """See `StateRecorder`: its finalizer would run when the rehearsal is over."""
        if class_lookup(cls, "__del__") is not ABSENT:
            self.veto(f"makes an object of class {cls.__qualname__}, which has a finalizer")

    # -- what can ----------------------------------------------------------------------------------

    def write(self, node: ShadowNode | None, relation: r.Relation, deletes: bool = False) -> None:
        """See `StateRecorder`."""
        if node is None:
            return
        if isinstance(relation, (r.Cell, r.SlotOf)):
            if relation not in node.written:
                self._edges.append((node, relation, final_value(node, relation)))
        elif not isinstance(relation, r.Item) or not isinstance(node.obj, dict):
            self.veto(f"writes to an object of class {type(node.obj).__qualname__}")
        super().write(node, relation, deletes=deletes)

    def mutate(self, node: ShadowNode | None) -> None:
        """See `StateRecorder`."""
        if node is not None and not isinstance(node.obj, _RESTORED):
            self.veto(f"changes an object of class {type(node.obj).__qualname__} in place")
        if node is not None:
            self._check_order(node.obj)
        super().mutate(node)

    def _check_order(self, container: Any) -> None:
        """The order of a set is that of its table, which may depend on what it held once."""
        if isinstance(container, set) and id(container) not in self._orders:
            order = list(set.__iter__(container))
            if type(container) is not set or not _same_items(set(order), order):
                self.veto("changes a set whose order could not be put back")
            self._orders[id(container)] = order

    def put_back(self) -> None:
        """Take back all that the run has changed, the last change first."""
        for node, relation, before in reversed(self._edges):
            _put_edge(node, relation, before)
        self._edges.clear()
        for node in reversed(self.graph.nodes[1:]):
            if node.snapshot is None or not node.changed:
                continue
            obj = node.obj
            if isinstance(obj, dict):
                _put_items(obj, node.snapshot)
            elif isinstance(obj, set):
                _refill(set, obj, self._orders[id(obj)])
            elif isinstance(obj, deque):
                _refill(deque, obj, node.snapshot)
            elif not _same_items(list.__iter__(obj), node.snapshot):
                list.__setitem__(obj, slice(None), node.snapshot)


def _put_edge(node: ShadowNode, relation: r.Relation, before: Any) -> None:
    obj = node.obj
    match relation:
        case r.Cell() if before is ABSENT:
            del obj.cell_contents
        case r.Cell():
            obj.cell_contents = before
        case r.SlotOf(descriptor=descriptor) if before is ABSENT:
            if final_value(node, relation) is not ABSENT:
                descriptor.__delete__(obj)
        case r.SlotOf(descriptor=descriptor):
            descriptor.__set__(obj, before)


def _same_items(now: Any, before: list[Any]) -> bool:
    items = list(now)
    return len(items) == len(before) and all(map(_is, items, before))


def _is(one: Any, other: Any) -> bool:
    return one is other


def _put_items(obj: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Contents and order of a dict, by the methods of its base: the class's own run user's code."""
    base: Any = OrderedDict if isinstance(obj, OrderedDict) else dict
    now = list(base.items(obj))
    if not _same_items((key for key, _ in now), list(before)):
        base.clear(obj)
        for key, value in before.items():
            base.__setitem__(obj, key, value)
        return
    for key, value in now:
        if before[key] is not value:
            base.__setitem__(obj, key, before[key])


def _refill(cls: Any, obj: Any, before: list[Any]) -> None:
    if not _same_items(cls.__iter__(obj), before):
        cls.clear(obj)
        (cls.update if cls is set else cls.extend)(obj, before)
