"""The recorder of Python state: turns the events of a monitor run into a reference graph.

Each value that the program reads from outside is written down where it is read, so everything
computed from such values is constant and needs no tracking (MagPy §2, §5). Three things are
tracked: outside objects by identity, what was read of them, and what was written to them.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from magjit import _C
from magjit.annotations import Database
from magjit.monitor.operator_graph import Operator
from magjit.monitor.operators import OperatorRecorder
from magjit.refgraph import relations as r
from magjit.refgraph.float_inputs import choose_form
from magjit.refgraph.frames import FrameState, arguments, cell_contents
from magjit.refgraph.kinds import (
    CONTAINER_SETTINGS,
    CONTAINERS,
    MAPPINGS,
    SEQUENCES,
    SETS,
    base_value,
    class_lookup,
    contents_copy,
    held,
    instance_dict,
    is_atom,
    is_constant_object,
    name_in_class,
)
from magjit.refgraph.nodes import ABSENT, Edge, Leaf, RefGraph, ShadowNode, Target
from magjit.refgraph.number_values import Item, Number
from magjit.refgraph.numbers import Numbers
from magjit.refgraph.run_control import RunControl, Split, TracerLike

_NUMPY_DISPATCHER: type = type(np.copyto)
LIBRARIES = sys.stdlib_module_names | {"torch", "numpy"}
_CALLBACKS = frozenset(
    f"{name}.__init__.<locals>.{callback}"
    for name in ("WeakValueDictionary", "WeakKeyDictionary", "WeakSet")
    for callback in ("remove", "_remove")
) | {"ExactWeakKeyDictionary.__setitem__.<locals>.<lambda>"}
"""Callbacks of the standard library and of torch._dynamo that run whenever an object dies."""
_OBSERVERS = ("magjit.monitor.", "magjit.refgraph.")
_SETTINGS = frozenset({"magjit.api", "magjit.config"})


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """A call that a replay makes again, with arguments as they were at the time."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StateRecorder(RunControl):
    """Builds the `RefGraph` of one run and owns the run's operator recorder."""

    def __init__(self, database: Database, python_special: Callable[[Any], Any]) -> None:
        self.database = database
        self.python_special = python_special
        self.operators = OperatorRecorder(self)
        self.tracer: TracerLike | None = None
        self.on_split: Callable[[Split], bool] = lambda split: False
        self.places: dict[tuple[int, int], str] = {}
        self.seconds = 0.0
        self.regions = 0
        self.notes_results = False
        self.begin()

    def begin(self) -> None:
        """Everything is as it was before the first event."""
        super().__init__()
        self.graph = RefGraph(self.where)
        self.numbers = Numbers(on_needed_item=self._needs)
        self.called_back = self.suspended = self.evaluating = False
        self.broken: Split | None = None
        self.between = self.abandoned = self.after_event = False
        self.resumed: dict[int, Any] = {}
        self.filled: list[Any] = []
        self.made: dict[int, tuple[Any, types.CodeType, int]] = {}
        self.addresses: dict[int, int] = {}
        self.marker = (0, 0, 0)
        self.made_codes: set[types.CodeType] = set()
        self.made_classes: set[type] = set()
        self.versions: dict[int, int] = {}
        self.missing: list[Any] = []
        self.effects: list[Effect] = []
        self.metas: dict[int, Any] = {}
        self.cached = []
        self.entered: list[tuple[Any, int]] = []
        self.checkpoint: Any = None
        self.function_calls: list[Any] = []
        self.contexts: list[tuple[Any, dict[str, Any]]] = []
        self.judged: Any = None
        self.changes = 0
        self._opaque: dict[types.CodeType, bool] = {}
        self.state: FrameState | None = None
        self.offset = -1

    # -- what the operator recorder asks ---------------------------------------------------------

    def live_number(self, value: Any) -> Number | None:
        """The number of the run that an argument is, where a replay computes it anew."""
        in_region = self.checkpoint is not None or bool(self.function_calls)
        return self.numbers.for_graph(value, in_region=in_region)

    def takes_numbers(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator has live numbers among its arguments."""
        if self.numbers.as_tensors:
            choose_form(self.numbers, op, args, kwargs)

    def reads_item(self, name: str, args: tuple[Any, ...], value: Any) -> bool:
        """Whether what is read of a tensor may be a number of the graph.

        Only where the instruction itself gives it to the program: what else C code does with it
        would go unseen.
        """
        numbers = self.numbers
        if type(value) is not float or float not in numbers.into_graph or numbers.as_tensors:
            return False
        if self.state is None or self.checkpoint is not None or self.function_calls:
            return False
        calling = self.state.calling
        if name == "__float__":
            return calling is float
        if name != "item" or len(args) != 1:
            return False
        return calling is torch.Tensor.item or (
            isinstance(calling, types.BuiltinFunctionType)
            and calling.__name__ == "item"
            and calling.__self__ is args[0]
        )

    def item(self, value_id: int, value: float) -> float:
        """What the program gets in the place of a float that the graph reads of a tensor."""
        assert self.state is not None
        place = self.place(self.state, self.offset)
        obj: float = self.numbers.item(Item(value_id, value, place)).obj
        return obj

    def _needs(self, item: Item) -> None:
        """The program needs a number before the graph has run."""
        self.split(
            "reads the data of a tensor into Python (item)",
            "keep the value in a tensor, or leave this part out of the compiled region",
            instead=item.place,
        )

    # -- nodes -----------------------------------------------------------------------------------

    def root(self, obj: Any) -> ShadowNode:
        """The node of an object that is the same at every call."""
        node = self.graph.node_of(obj)
        if node is None:
            relation = r.Root(len(self.graph))
            node = self.graph.add(obj, self.graph.outside, relation, fixed=True)
            self.graph.outside.first.refs[relation] = Edge(node.node_id)
            if isinstance(obj, torch.Tensor):
                self._note_tensor(node, obj)
            for item in held(obj):
                if not is_atom(item):
                    self.root(item)
        return node

    def _note_tensor(self, node: ShadowNode, tensor: torch.Tensor) -> None:
        if torch.nn.parameter.is_lazy(tensor):
            self.split("makes the parameters of a lazy module", "call it once before compiling it")
            return
        try:
            self.metas[node.node_id] = _C.tensor_meta(tensor)
        except ValueError as problem:
            self.split(f"uses a {type(tensor).__qualname__} from outside: {problem}")
            return
        if not tensor.is_inference():
            self.versions[node.node_id] = tensor._version

    def _structural(self, parent: ShadowNode) -> bool:
        """Whether what an edge leads to may be another object of the same kind at each call."""
        return parent.structural or parent is self.graph.outside

    def target(self, parent: ShadowNode, relation: r.Relation, value: Any) -> Target:
        """What an edge leads to; an outside object met for the first time gets its node."""
        if value is ABSENT or is_atom(value):
            return Leaf(value)
        node = self.graph.node_of(value)
        if node is not None:
            return Edge(node.node_id)
        worth = base_value(value)
        if worth is None and (
            is_constant_object(value)
            or (isinstance(value, types.FunctionType) and not self._structural(parent))
        ):
            return Edge(self.root(value).node_id)
        node = self.graph.add(value, parent, relation, fixed=False)
        if worth is not None:
            node.first.refs[r.CResult(worth)] = Leaf(worth(value))
        elif isinstance(value, torch.Tensor):
            self._note_tensor(node, value)
        elif isinstance(value, types.MethodType):
            # The interpreter takes a bound method apart before the call is seen.
            self.read(node, r.MethodFunc(), value.__func__)
            self.read(node, r.MethodSelf(), value.__self__)
        return Edge(node.node_id)

    def node_for(self, obj: Any) -> ShadowNode | None:
        """The node of an object; classes, modules and C functions get one on demand."""
        node = self.graph.node_of(obj)
        if node is None and is_constant_object(obj) and not self.is_made_class(obj):
            if all(isinstance(item, (types.ModuleType, type)) for item in held(obj)):
                node = self.root(obj)
        return node

    def is_made_class(self, obj: Any) -> bool:
        return isinstance(obj, type) and obj in self.made_classes

    # -- reads and writes ------------------------------------------------------------------------

    def read(self, node: ShadowNode | None, relation: r.Relation, value: Any) -> None:
        """The program found ``value`` behind an edge."""
        if node is None or relation in node.written:
            return
        if relation in node.first.refs:
            node.first.fix(relation)
            return
        if node.whole and isinstance(relation, (r.Item, r.Index, r.Has)):
            return
        if node.snapshot is not None and not self._is_initial(node, relation, value):
            return
        target = node.first.refs[relation] = self.target(node, relation, value)
        if not isinstance(target, Edge) or self.graph.nodes[target.node_id].fixed:
            self.graph.note_read(node, relation)

    def _is_initial(self, node: ShadowNode, relation: r.Relation, value: Any) -> bool:
        """Whether what a changed container holds now was there before the run."""
        snapshot = node.snapshot
        if isinstance(relation, r.Item):
            return bool(snapshot.get(relation.key.key, ABSENT) is value)
        if isinstance(relation, r.Has):
            key = relation.key.key
            return (key in snapshot) is (value is not ABSENT) and r.Item.of(key) not in node.written
        return False

    def write(self, node: ShadowNode | None, relation: r.Relation, deletes: bool = False) -> None:
        """The program stores into an outside object; the final value is taken at the end."""
        if node is None:
            return
        self.changes += 1
        if node.snapshot is None and isinstance(node.obj, CONTAINERS):
            node.snapshot = contents_copy(node.obj)
        node.note_write(relation, deletes)

    def mutate(self, node: ShadowNode | None) -> None:
        """A C function is about to change an outside container in place."""
        if node is None:
            return
        self.changes += 1
        self.open(node)
        if node.snapshot is None:
            node.snapshot = contents_copy(node.obj)
        node.mutated = True

    def open(self, node: ShadowNode | None, *, deep: bool = False) -> None:
        """A whole container is read: all that it held before the run is written down."""
        if node is None:
            return
        if self.numbers and isinstance(node.obj, dict):
            self.numbers.pin(self.numbers.among(dict.values(node.obj)))
        if not node.whole:
            node.whole = True
            _open_contents(self, node)
        if deep:
            for target in list(node.first.refs.values()):
                if isinstance(target, Edge):
                    self.open_deep(self.graph.nodes[target.node_id])

    def open_deep(self, node: ShadowNode) -> None:
        obj = node.obj
        if isinstance(obj, np.ndarray):
            self.read_array(obj)
            return
        if isinstance(obj, CONTAINERS):
            if not node.whole:
                self.open(node, deep=True)
        elif isinstance(obj, types.MethodType):
            self.read(node, r.MethodFunc(), obj.__func__)
            self.read(node, r.MethodSelf(), obj.__self__)

    def instance_dict_node(self, node: ShadowNode | None, obj: Any) -> ShadowNode | None:
        """The node of an outside object's ``__dict__``."""
        if node is None:
            return None
        namespace = instance_dict(obj)
        if namespace is None:
            return None
        relation = r.ModuleDict() if isinstance(obj, types.ModuleType) else r.InstanceDict()
        found = self.graph.node_of(namespace)
        if found is None and node.fixed and isinstance(obj, types.ModuleType):
            found = self.root(namespace)
        elif found is None:
            found = self.graph.add(namespace, node, relation, fixed=False)
        node.first.refs.setdefault(relation, Edge(found.node_id))
        return found

    def replay_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """An effect that the mock has to make by calling the same function again."""
        self.changes += 1
        self.effects.append(Effect(func, args, kwargs))

    def give_numbers_back(self) -> None:
        """Attributes that the run has set hold the interpreter's own small ints again."""
        self.numbers.give_back()
        for node in self.graph.nodes if self.numbers else ():
            for relation in node.written:
                if isinstance(relation, r.Item) and type(node.obj) is dict:
                    value = node.obj.get(relation.key.key)
                    number = self.numbers.find(value)
                    if type(value) is int and number is not None:
                        node.obj[relation.key.key] = number.original

    def release(self) -> None:
        """Let go of the user's objects: only the record may keep any alive."""
        self.release_region()
        self.tracer = self.state = None

    def release_region(self) -> None:
        """The same, while the run goes on."""
        self.graph = RefGraph()
        self.operators.release()
        self.missing, self.effects, self.entered, self.cached = [], [], [], []
        self.made, self.addresses = {}, {}
        self.contexts = []
        self.numbers.release()
        self.release_tensors()
        self.metas, self.made_classes = {}, set()

    # -- frames ----------------------------------------------------------------------------------

    def enter_frame(
        self,
        func: Any,
        code: types.CodeType,
        globals_: dict[str, Any],
        builtins: dict[str, Any],
        localsplus: list[Any],
    ) -> Any:
        """The tracer met a new frame: follow it, or leave it alone."""
        if self.checkpoint is not None and not self.checkpoint.inside:
            return False
        module = globals_.get("__name__") or ""
        if code.co_qualname in _CALLBACKS or module.startswith(_OBSERVERS):
            return _C.SKIP_ALWAYS
        special = self.python_special(func)
        if special is not None and special is self.judged:
            special = self.judged = None  # by the call that now enters its frame
        if special is not None:
            verdict = special(self, func, *arguments(code, localsplus))
            if verdict is _C.OPAQUE:
                return None
            if verdict is False:
                return False
            if isinstance(verdict, tuple) or callable(verdict):
                # it needs the call's result, which only CALL can see
                self.split(f"a C function calls {code.co_qualname}, which is not followed")
                return None
        if module.partition(".")[0] == "magjit":
            if _is_setting(module, code):
                self.split(f"calls {module.removesuffix('.api')}.{code.co_qualname}")
            return _C.SKIP_ALWAYS
        if self.is_opaque(code, module):
            return _C.SKIP_ALWAYS
        if id(code) in self.resumed:
            return FrameState(code, func, globals_, builtins, self.root(globals_), None, self.state)
        func_node = self.graph.node_of(func)
        if self.evaluating and code.co_name == "<module>":
            self.evaluating = False
            self.made_codes.add(code)
        if func_node is None and code not in self.made_codes:
            if not self._explain(func, localsplus):
                self.split(f"calls the function {code.co_qualname} by a way that was not observed")
                return None
            func_node = self.root(func)
        if func_node is not None:
            self.read_function(func_node)
            globals_node: ShadowNode | None = self.root(globals_)
        else:  # the run made it, and perhaps the namespace that it was evaluated in
            globals_node = self.graph.node_of(globals_)
        return FrameState(code, func, globals_, builtins, globals_node, func_node, self.state)

    def is_opaque(self, code: types.CodeType, module: str) -> bool:
        """Whether a function of torch only launches operators, which the mode sees."""
        known = self._opaque.get(code)
        if known is None:
            known = self._opaque[code] = self.database.is_opaque(module, code.co_qualname)
        return known

    def _explain(self, func: Any, localsplus: list[Any]) -> bool:
        """Whether a function that C code called belongs to the class of one of its arguments."""
        for owner in localsplus[:2]:
            if isinstance(owner, types.CellType):  # an argument that an inner function uses
                owner = cell_contents(owner)
            cls = owner if isinstance(owner, type) else type(owner)
            for candidate in (cls, type(cls)):
                name = name_in_class(candidate, func)
                if name is not None:
                    if candidate not in self.made_classes:
                        value = class_lookup(candidate, name)
                        self.read(self.root(candidate), r.ClassAttr(name), value)
                    return True
        return self._explain_library(func)

    def _explain_library(self, func: Any) -> bool:
        """C code of the standard library or of torch calls a function of a module by its name."""
        module_name = getattr(func, "__module__", None) or ""
        if module_name.partition(".")[0] not in LIBRARIES:
            return False
        named = func.__globals__.get(func.__name__)
        if named is not func and type(named) is not _NUMPY_DISPATCHER:
            return False  # NumPy's dispatchers ask a function of their own name for the arguments
        self.read(self.root(func.__globals__), r.Item.of(func.__name__), named)
        return True

    def read_function(self, node: ShadowNode) -> None:
        """A function is called: its code and default values are read."""
        func = node.obj
        if not isinstance(func, types.FunctionType) or r.Code() in node.first.refs:
            return
        node.first.refs[r.Code()] = Leaf(func.__code__, identity=True)
        if not node.fixed:
            node.first.refs[r.Globals()] = Edge(self.root(func.__globals__).node_id)
        for relation, value in (
            (r.Defaults(), func.__defaults__),
            (r.KwDefaults(), func.__kwdefaults__),
        ):
            self.read(node, relation, value)
            if value is not None and not is_atom(value):
                self.open(self.graph.node_of(value))


def _open_contents(recorder: StateRecorder, node: ShadowNode) -> None:
    """Write down everything that a container held before the run."""
    obj = node.obj
    for cls, setting in CONTAINER_SETTINGS:
        if isinstance(obj, cls):
            recorder.read(node, r.CAttr(setting), setting.__get__(obj))
    initial = node.snapshot if node.snapshot is not None else contents_copy(obj)
    refs = node.first.refs
    if isinstance(obj, SEQUENCES):
        refs[r.Length()] = Leaf(len(initial))
        for index, value in enumerate(initial):
            refs.setdefault(r.Index(index), recorder.target(node, r.Index(index), value))
    elif isinstance(obj, MAPPINGS):
        _open_mapping(recorder, node, initial)
    elif isinstance(obj, SETS):
        if all(is_atom(item) or is_constant_object(item) for item in initial):
            refs[r.Members()] = Leaf(frozenset(initial))
        else:
            recorder.split("reads a set of objects that are compared by identity")
    else:
        node.whole = False
        recorder.split(f"a C function reads an object of class {type(obj).__qualname__}")


def _open_mapping(recorder: StateRecorder, node: ShadowNode, initial: dict[Any, Any]) -> None:
    refs = node.first.refs
    for key in initial:
        if not is_atom(key):
            if recorder.node_for(key) is None and not isinstance(key, types.FunctionType):
                recorder.split("reads a dict whose keys are compared by identity")
                return
    refs[r.Keys()] = Leaf(tuple(initial))
    for key, value in initial.items():
        relation = r.Item.of(key)
        if relation in refs:
            node.first.fix(relation)
        else:
            refs[relation] = recorder.target(node, relation, value)


def _is_setting(module: str, code: types.CodeType) -> bool:
    """Whether a function of MagJIT's own decides how programs are compiled."""
    if module == "magjit.stances":
        return code.co_qualname.startswith("set_stance.")
    return module in _SETTINGS and not code.co_name.startswith("_")


Handler = Callable[[StateRecorder, FrameState, int, tuple[Any, ...]], Any]
