"""The operator recorder: a torch-function mode that writes down every tensor operation.

It sees operations wherever they are launched, also inside C functions (``sum``, ``map``), and
costs about a microsecond each. While it handles one, observation of bytecode is off.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from magjit.monitor.arrays import (
    ArrayIndex,
    ArrayOperator,
    copied,
    copies_array,
    is_array_index,
    listed,
    taken_for_float,
)
from magjit.monitor.functions import TENSOR_TYPE, NotRecordable, has_tensor, set_data, spelled_out
from magjit.monitor.observer import Observer, Shapes
from magjit.monitor.operator_graph import (
    InputValue,
    NumberRef,
    Operator,
    OperatorGraph,
    Value,
    ValueRef,
)
from magjit.monitor.operator_kinds import (
    INFERS_DTYPE,
    LAYOUT,
    RESIZING,
    SPLIT_REASONS,
    TEXT_METHODS,
    UNGUARDED_METADATA,
    OpKind,
    classify,
    is_random,
    reads_only,
    shape_depends_on_data,
)
from magjit.monitor.size_arguments import MANY, READ_BY, shape_after, tensors_as_sizes

_PLAIN_TENSORS: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_ATOMS: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex}
    | {str, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


_NUMBERS: tuple[Any, ...] = (int, float, complex, str)
_COMPARED = (torch.Tensor, int, float, complex, list, tuple, np.ndarray, np.generic)
_INDEXING = frozenset({"__getitem__", "__setitem__"})
After = Callable[[Any], object]
"""What is to be done with the result of an operation; gives what the program gets instead."""


class OperatorRecorder(TorchFunctionMode):
    """Records the tensor operations of a monitor run into an `OperatorGraph`."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.handling = False  # the recorder itself is at work: its torch calls are not the user's
        self.recording = False  # an operator of the program is under way
        self._observer = observer
        self._kinds: dict[Any, tuple[OpKind, str]] = {}
        self.begin()

    def begin(self) -> None:
        """A run, or the next part of one, begins."""
        self.graph = OperatorGraph()
        self.active = True
        self.on_input: Callable[[int, torch.Tensor], None] = lambda value_id, tensor: None
        self.shapes: Shapes | None = None
        self.taken: tuple[Any, set[int]] = (None, set())
        self._from_numpy = False  # a number of NumPy's is among the last operator's arguments
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], Value]] = {}

    # -- values ---------------------------------------------------------------------------------

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """The graph's value of a tensor that the graph made or has as an input."""
        entry = self._values.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def use(self, tensor: torch.Tensor) -> Value:
        """The value of an argument; an outside tensor becomes an input of the graph."""
        found = self.value_of(tensor)
        if found is not None:
            return found
        if not self._observer.external_tensor(tensor):
            raise NotRecordable("uses a tensor whose origin was not observed")
        value = self.graph.new_value(is_input=True)
        self.graph.inputs.append(InputValue(value.value_id, tensor))
        self._bind(tensor, value)
        self.on_input(value.value_id, tensor)
        return value

    def alive(self, value_ids: Iterable[int]) -> list[tuple[Value, torch.Tensor]]:
        """Those of some values whose tensors somebody still has."""
        wanted = set(value_ids)
        found = [(value, ref()) for ref, value in list(self._values.values())]
        return [(v, t) for v, t in found if t is not None and v.value_id in wanted]

    def new_value(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor that an operator made."""
        value = self.graph.new_value()
        self._bind(tensor, value)
        return value

    def _bind(self, tensor: torch.Tensor, value: Value) -> None:
        if value.const:
            value.version = _version(tensor)
        elif value.dynamic:
            self._observer.watches(tensor)
        self._values[id(tensor)] = (weakref.ref(tensor), value)

    def release(self) -> None:
        """Let go of the run's tensors."""
        self.graph = OperatorGraph()
        self._values = {}
        self.shapes = None
        self.taken = (None, set())
        self.on_input = lambda value_id, tensor: None

    # -- the mode -------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active or self.handling:
            return func(*args, **kwargs)
        self._observer.pause()
        self.recording = True
        try:
            return self._record(func, args, kwargs)
        finally:
            self.recording = False
            self._observer.resume()

    def _record(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one operation, exactly once and whatever becomes of its recording."""
        after: After | None = None
        name = ""
        try:
            kind, name = self._kind(func)
            after = _HANDLERS[kind](self, func, name, args, kwargs)
        except Exception as problem:
            self._give_up(problem, name)
        try:
            out = func(*args, **kwargs)
        except Exception as problem:
            if self.shapes is not None:
                self.shapes.fail(f"{name} raises: {problem}")
            raise
        if after is not None:
            try:
                instead = after(out)
                return out if instead is None else instead
            except Exception as problem:
                self._give_up(problem, name)
        return out

    def _give_up(self, problem: Exception, name: str) -> None:
        if isinstance(problem, NotRecordable):
            self._observer.split(f"{problem} (in {name})")
        else:
            self._observer.fail(problem)

    def _kind(self, func: Callable[..., Any]) -> tuple[OpKind, str]:
        try:
            return self._kinds[func]
        except KeyError:
            found = self._kinds[func] = classify(func)
            return found
        except TypeError:
            return classify(func)

    def record_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], None]:
        """Record a call that the mode does not see; the result is given when it has ended."""
        try:
            return self.call_operator(func, args, kwargs)
        except NotRecordable as problem:
            self._observer.split(str(problem))
            return lambda out: None

    def call_operator(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], None]:
        """A call that is about to be made as an operator; the result is given when it has ended.

        Raises:
            NotRecordable: an argument cannot be part of a graph.
        """
        inputs: list[Value] = []
        operator = self._operator(func, args, kwargs, inputs)

        def finish(out: Any) -> None:
            try:
                self._finish(operator, out, inputs, dynamic=False)
            except NotRecordable as problem:
                self._observer.split(str(problem))

        return finish

    # -- one handler a kind: called before the operation, gives what is to be done after it --------

    def _compute(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> After | None:
        if name in ("__eq__", "__ne__") and not isinstance(args[-1], _COMPARED):
            return None  # never equal to what is no tensor and no number
        if reads_only(name, args, kwargs):
            return self._metadata(func, name, args, kwargs)
        inputs: list[Value] = []
        operator = self._operator(func, args, kwargs, inputs)
        told = kwargs.get("dtype") is not None or any(type(a) is torch.dtype for a in args)
        infers = self._from_numpy and name in INFERS_DTYPE and not told
        read = [self.value_of(tensor) for tensor in tensors_as_sizes(name, args, kwargs)]
        dynamic = not all(v is not None and v.const for v in read)
        dynamic = dynamic or shape_depends_on_data(name, args, kwargs)
        if name in MANY and (dynamic or any(value.of_unknown_shape for value in inputs)):
            raise NotRecordable("makes as many tensors as data say")
        if name == "data":  # changes through it leave no trace in the tensor's version
            self._observer.hides_change()
            for value in inputs:
                value.const = False

        def after(out: Any) -> None:
            if infers:
                operator.kwargs["dtype"] = out.dtype
            self._finish(operator, out, inputs, dynamic)

        return after

    def _dynamic(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> After:
        inputs: list[Value] = []
        operator = self._operator(func, args, kwargs, inputs)
        return lambda out: self._finish(operator, out, inputs, dynamic=True)

    def _metadata(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> After:
        inputs: list[Value] = []
        given, named = self.template((args, kwargs), inputs)
        shapes = self.shapes if name in LAYOUT else None

        def after(out: Any) -> Any:
            if name in UNGUARDED_METADATA and args and isinstance(args[0], torch.Tensor):
                self._observer.tensor_fact(args[0], func, out)
            depends = max([value.dynamic for value in inputs if not value.const], default=0)
            if name in READ_BY[depends]:
                self._observer.split(
                    f"reads the shape of a tensor whose shape depends on data ({name})"
                )
            if shapes is not None:
                return shapes.read(func, name, given, named, out)
            return None

        return after

    def _value(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> After | None:
        if name == "__hash__":
            return None
        inputs: list[Value] = []
        operator = self._operator(func, args, kwargs, inputs)
        const = all(value.const for value in inputs)

        def after(out: Any) -> Any:
            if not const and not kwargs and self._observer.reads_item(name, args, out):
                value = self.graph.new_value()
                operator.result = ValueRef(value.value_id)
                self.graph.operators.append(operator)
                return self._observer.item(value.value_id, out)
            if not const or name in TEXT_METHODS:  # texts depend on settings of torch
                self._observer.split(
                    f"reads the data of a tensor into Python ({name})",
                    "keep the value in a tensor, or leave this part out of the compiled region",
                )
            elif isinstance(out, torch.Tensor) or type(out).__module__ == "numpy":
                self._observer.split(f"takes a tensor out of torch ({name})")
            return None

        return after

    def _state(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> After:
        operator = self._operator(func, args, kwargs, [])
        return lambda out: self.graph.operators.append(operator)

    def _attribute(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> After:
        return lambda out: self._observer.tensor_attribute(args[0], name, out)

    def _set_attribute(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> After | None:
        tensor = args[0]
        if name == "_backward_hooks" and args[1] is None and not tensor._backward_hooks:
            return None  # an in-place autograd function forgets the hooks of what it changes
        if name == "data" and len(args) == 2:
            inputs: list[Value] = []
            operator = self._operator(set_data, args, {}, inputs)
            for value in inputs:
                value.const = False
            self._observer.hides_change("assigns to .data of a tensor", tensor)
            return lambda out: self.graph.operators.append(operator)
        known = self.value_of(tensor)
        fresh = known is not None and not known.is_input
        if name == "requires_grad" and (fresh or tensor.requires_grad is args[-1]):
            note = self._compute(torch.Tensor.requires_grad_, "requires_grad_", args, kwargs)
            return note and (lambda out: note(tensor))
        if name == "grad" and not fresh:
            self._observer.set_tensor_attribute(tensor, name)
        else:
            self._observer.split(f"sets the attribute .{name} of a tensor")
        return None

    def _label(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Nothing to replay."""

    def _split(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> After | None:
        if name == "register_hook" and len(args) == 2 and not kwargs:
            self.use(args[0])
            return self._observer.hook(*args)
        if name in RESIZING:
            known = self.value_of(args[0])
            if known is not None and not known.is_input:  # of memory that the program made
                return self._compute(func, name, args, kwargs)
        self._observer.split(SPLIT_REASONS.get(name, f"reads the attribute .{name} of a tensor"))
        return None

    # -- templates ------------------------------------------------------------------------------

    def _operator(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Value],
    ) -> Operator:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotRecordable("runs under a torch.func transform")
        code, offset = self._observer.instruction()
        self.taken = (func, set())
        self._from_numpy = False
        name = getattr(func, "__name__", "")
        if any(map(taken_for_float, args)) and name not in INFERS_DTYPE:
            raise NotRecordable("computes with a NumPy bool or complex number")
        if name in _INDEXING:
            if is_array_index(args[1]):
                func, args = ArrayIndex(func, copied(args[1])), (args[0], *args[2:])
            else:
                args = (args[0], listed(args[1]), *args[2:])
        args = spelled_out(func, args)
        if copies_array(func, args):
            func, args = ArrayOperator(func, args[0].copy()), args[1:]
        made = Operator(
            func,
            tuple([self.template(a, inputs) for a in args]),
            {k: self.template(v, inputs) for k, v in kwargs.items()},
            code=code,
            offset=offset,
        )
        if self.taken[1]:
            self._observer.takes_numbers(made, args, kwargs)
        return made

    def template(self, value: Any, inputs: list[Value]) -> Any:
        """An argument as part of an operator; its tensors are added to the inputs.

        Raises:
            NotRecordable: it cannot be part of a graph.
        """
        if isinstance(value, torch.Tensor):
            if type(value) not in _PLAIN_TENSORS:
                raise NotRecordable(f"uses a tensor of class {type(value).__qualname__}")
            found = self.use(value)
            if found.const and found.version != _version(value):
                found.const = False  # changed through another view of its storage
            inputs.append(found)
            return ValueRef(found.value_id)
        if type(value) in _ATOMS:
            number = self._observer.live_number(value)
            if number is None:
                return value
            inputs.append(Value(-1))  # what is computed with it is no constant
            self.taken[1].add(id(number))
            return NumberRef(number)
        self._from_numpy |= isinstance(value, np.generic | np.ndarray)
        for base in _NUMBERS:  # NumPy's numbers, enumerations
            if isinstance(value, base):
                return base(value)
        if isinstance(value, (tuple, list)):
            items = [self.template(item, inputs) for item in value]
            if hasattr(value, "_fields"):
                return type(value)(*items)
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self.template(item, inputs) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*self.template((value.start, value.stop, value.step), inputs))
        if isinstance(value, range):
            return list(value)
        if isinstance(value, TENSOR_TYPE):
            return f"{value.__module__}.{value.__name__}"
        if isinstance(value, torch.Generator):
            raise NotRecordable("uses a random number generator of its own")
        if value is torch.nn.Parameter:
            return value
        if value is torch.Tensor or isinstance(value, torch.storage.UntypedStorage):
            raise NotRecordable("works on a storage")
        if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
            return value.item()
        raise NotRecordable(f"passes a {type(value).__qualname__} to a torch function")

    def _finish(self, operator: Operator, out: Any, inputs: list[Value], dynamic: bool) -> None:
        if out is NotImplemented:  # compared with what it is never equal to
            return
        const = all(value.const for value in inputs) and not is_random(operator.func)
        depends = max([int(dynamic), *[value.dynamic for value in inputs]])
        operator.result = self._result(out, const, shape_after(operator.func, depends))
        if out is None:
            self._note_change(inputs[:1], operator, const)
        elif not has_tensor(out) and not const:
            raise NotRecordable("reads the data of a tensor into Python")
        self.graph.operators.append(operator)
        if self.shapes is not None:
            self.shapes.follow(operator, out, depends > 0)

    def _note_change(self, target: list[Value], operator: Operator, const: bool) -> None:
        """An operator without result (``x[i] = y``) changes its first argument."""
        for value in target:
            if not value.const:
                continue
            tensor = next((ref() for ref, other in self._values.values() if other is value), None)
            value.const = const and tensor is not None
            if tensor is not None and value.const:
                value.version = _version(tensor)

    def _result(self, out: Any, const: bool, dynamic: int) -> Any:
        if isinstance(out, torch.Tensor):
            known = self.value_of(out)
            if known is None:
                if type(out) not in _PLAIN_TENSORS:
                    raise NotRecordable(f"makes a tensor of class {type(out).__qualname__}")
                known = self.graph.new_value(const=const, dynamic=dynamic)
                self._bind(out, known)
            elif known.const:
                known.const = const
                known.version = _version(out)
            return ValueRef(known.value_id)
        if isinstance(out, (tuple, list)):
            return tuple([self._result(item, const, dynamic) for item in out])
        return out


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


_HANDLERS: dict[OpKind, Callable[..., After | None]] = {
    OpKind.COMPUTE: OperatorRecorder._compute,
    OpKind.DYNAMIC: OperatorRecorder._dynamic,
    OpKind.METADATA: OperatorRecorder._metadata,
    OpKind.VALUE: OperatorRecorder._value,
    OpKind.STATE: OperatorRecorder._state,
    OpKind.ATTRIBUTE: OperatorRecorder._attribute,
    OpKind.SET_ATTRIBUTE: OperatorRecorder._set_attribute,
    OpKind.LABEL: OperatorRecorder._label,
    OpKind.SPLIT: OperatorRecorder._split,
}
