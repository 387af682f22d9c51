"""Shapes as symbols: fake tensors that go through the operators of a run beside the real ones.

    SymbolicShapes ::= input* fake* ShapeEnv
    input          ::= a tensor from outside, of which some sizes are symbols

What the program reads of a shape is an expression over the symbols, known at once; a size that is
the same at every call is a plain int. What the program decides by such an expression, and what
torch's operators assume of it, becomes a guard of the shape environment.

Where an operator cannot be followed, the sizes of this run are constants after all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.utils._sympy.functions import (
    CleanDiv,
    FloorDiv,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    PythonMod,
)

from magjit import _C
from magjit.errors import Location
from magjit.layouts import OpenLayouts, without_layout
from magjit.monitor.operator_graph import NumberRef, Operator, ValueRef, mapped
from magjit.plugin import ShapeGuard, TensorInput
from magjit.plugin.convolutions import unguarded_convolutions
from magjit.plugin.fake_layouts import has_symbols
from magjit.plugin.inputs import make_fake, make_shape_env, symbolic_context, without_base
from magjit.plugin.shape_guards import shape_guards
from magjit.refgraph.nodes import ShadowNode
from magjit.refgraph.number_values import SYMBOLIC, Number, Size
from magjit.refgraph.numbers import Numbers
from magjit.refgraph.symbolic_numbers import SYMBOLS, is_exact, on_symbols
from magjit.shape_memo import MetadataMemo

_FOLDED: dict[Any, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    Max: max,
    Min: min,
}
_OF_TWO: dict[Any, Callable[..., Any]] = {
    FloorDiv: operator.floordiv,
    CleanDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
    IntTrueDiv: operator.truediv,
}


_NEW_TORCH = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
_SINCE_2_13 = {"matmul", "linear"} if _NEW_TORCH else set()
_PLAIN = frozenset(
    _SINCE_2_13
    | {"bmm", "addmm", "baddbmm", "reshape", "view", "expand", "flatten"}
    | {"permute", "transpose", "unsqueeze", "squeeze", "contiguous", "getitem", "cat", "chunk"}
    | {"add", "sub", "mul", "truediv", "div", "rsub", "radd", "rmul", "neg", "pow", "to"}
    | {"relu", "gelu", "silu", "tanh", "sigmoid", "softmax", "dropout", "layer_norm"}
    | {"batch_norm", "conv1d", "conv2d", "conv3d", "embedding", "masked_fill", "size", "get"}
)
"""Operators of which torch's own kernels in C++ take symbols; earlier ones make constants."""


class _NoNumber(Exception):
    """An expression that is no arithmetic of sizes of inputs."""


@dataclass(frozen=True, slots=True, eq=False)
class _Input:
    """A graph input: its fake tensor, and what that was made of."""

    node: ShadowNode
    fake: Any
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    source: LocalSource
    context: Any

    @property
    def is_symbolic(self) -> bool:
        return any(isinstance(size, torch.SymInt) for size in (*self.size, *self.stride))

    def changed(self) -> bool:
        """Whether the run has changed its metadata in place."""
        return self.is_symbolic and tuple(self.fake.size()) != self.size


class SymbolicShapes:
    """The sizes of one run as expressions; `magjit.monitor.operators` calls it."""

    def __init__(self, numbers: Numbers, onto_stack: Callable[[str], bool]) -> None:
        """``onto_stack`` says whether metadata that is read now goes onto the program's stack."""
        self.numbers = numbers
        self._onto_stack = onto_stack
        self.failure: str | None = None
        self.needed: list[tuple[int, int, Location | None]] = []
        self.shape_env = make_shape_env()
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env)
        self.inputs: list[_Input] = []
        self._fakes: dict[int, Any] = {}
        self._by_data: set[int] = set()
        self._memo = MetadataMemo()
        self._bases: dict[Any, tuple[int, int]] = {}
        self.layouts = OpenLayouts()
        self._numbers: dict[Any, Number] = {}

    def needs(self, size: Size, location: Location | None) -> None:
        """The program needs the very value of a size."""
        self.needed.append((size.position, size.dim, location))

    @property
    def active(self) -> bool:
        """Whether any size is a symbol."""
        return self.failure is None and any(item.is_symbolic for item in self.inputs)

    def fail(self, reason: str) -> None:
        """The sizes of this run are constants."""
        if self.failure is None:
            self.failure = reason
            self.numbers.pin_sizes()

    # -- what goes on in the run -------------------------------------------------------------------

    def add_input(
        self, value_id: int, node: ShadowNode, given: TensorInput, *, lies_anyhow: bool = False
    ) -> None:
        """A tensor from outside is used for the first time; perhaps its layout does not matter."""
        if self.failure is not None:
            return
        if lies_anyhow and given.maybe_dynamic_dims:
            # The strides of a view follow from the sizes of its base, which others may share.
            given = without_base(given)
            self.layouts.add(value_id)
        key = self._memo.input_key(given)
        try:
            source = LocalSource(f"input_{len(self.inputs)}")
            context: Any = symbolic_context(given, None) if key is None else None
            fake = self._memo.find(key)
            if fake is None:
                fake = make_fake(self.fake_mode, given, source, context)
                self._memo.keep(key, fake, fake)
            strided = fake.layout is torch.strided
            stride = tuple(fake.stride()) if strided else ()
            made = _Input(node, fake, tuple(fake.size()), stride, source, context)
        except Exception as problem:
            self.fail(f"an input has no symbolic shape: {problem}")
            return
        for dim, size in enumerate(made.size):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self._bases.setdefault(size.node.expr, (len(self.inputs), dim))
        self.inputs.append(made)
        self._fakes[value_id] = fake

    def limit(self, value_id: int, dim: int, low: int | None, high: int | None) -> None:
        """A size is used between these bounds only."""
        if self.failure is None:
            size = self._fakes[value_id].size(dim)
            # The shape environment guards what it is asked.
            bool(low is None or size >= low)
            bool(high is None or size <= high)

    def follow(self, op: Operator, out: Any, by_data: bool = False) -> None:
        """An operator has been recorded; ``out`` is what it gave for real.

        Args:
            op, out: the operator and its result.
            by_data: the shape of its result depends on data.  Nobody reads it then, and what torch
                assumes of it is found out at each call, so there is nothing to follow.
        """
        if self.failure is not None:
            return
        try:
            if by_data:
                self._bind_unknown(op.result, out)
                return
            self._bind(op.result, self._followed(op.func, op.args, op.kwargs), out)
            self.layouts.follow(op, self._fakes)
        except Exception as problem:
            name = getattr(op.func, "__name__", op.func)
            self.fail(f"{name} cannot be followed with symbolic shapes: {problem}")

    def _followed(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = mapped(args, self._leaf), mapped(kwargs, self._leaf)
        key = self._memo.key(func, args, kwargs)
        made = self._memo.find(key)
        if made is not None:
            return made
        changed = self._memo.watched((args, kwargs))
        fixed = key is not None and not has_symbols(key)
        made = self._called(func, args, kwargs, fixed)
        if changed():
            raise _NoNumber("it changes in place what several tensors have in common")
        self._memo.keep(key, made, (args, kwargs))
        return made

    def _called(self, func: Callable[..., Any], args: Any, kwargs: Any, fixed: bool = False) -> Any:
        """The fake result; ``fixed`` says that no operand has symbols."""
        if func is torch.tensor:
            func = torch._refs.tensor  # which keeps symbols
        # Decompositions in Python take symbols everywhere, but cost time.
        plain = fixed or getattr(func, "__name__", "").strip("_") in _PLAIN
        with (
            torch.no_grad(),
            unguarded_convolutions(self.shape_env),
            # Its entries take as long to make as results; ours are those of whole functions.
            disable_fake_tensor_cache(self.fake_mode),
            self.fake_mode,
            nullcontext() if plain else enable_python_dispatcher(),
        ):
            return func(*args, **kwargs)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, ValueRef):
            return self._fakes[value.value_id]
        if isinstance(value, NumberRef):
            number = value.number
            return number.sym if number.sym is not None else number.original
        return value

    def _bind(self, result: Any, made: Any, out: Any) -> None:
        if isinstance(result, ValueRef):
            if [_hint(size) for size in made.size()] != list(out.size()):
                raise _NoNumber(f"the shape is {tuple(out.size())}, not {tuple(made.size())}")
            self._fakes[result.value_id] = made
        elif isinstance(result, (tuple, list)):
            if len(made) != len(result):
                raise _NoNumber(f"{len(result)} results, not {len(made)}")
            for one, fake, real in zip(result, made, out, strict=True):
                self._bind(one, fake, real)

    def _bind_unknown(self, result: Any, out: Any) -> None:
        """Results as large as they are in this run; those of operators in place are known."""
        if isinstance(result, ValueRef):
            if result.value_id not in self._fakes:
                with self.fake_mode:
                    made = torch.empty_strided(
                        out.size(), out.stride(), dtype=out.dtype, device=out.device
                    )
                self._fakes[result.value_id] = made
                self._by_data.add(result.value_id)
        elif isinstance(result, (tuple, list)):
            for one, real in zip(result, out, strict=True):
                self._bind_unknown(one, real)

    def read(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, out: Any) -> Any:
        """Metadata is read, which may depend on symbols.

        Args:
            func, name: what reads it.
            args, kwargs: as templates.
            out: what the program was to get.

        Returns:
            What the program gets instead, or None.
        """
        if self.failure is not None:
            return None
        self.layouts.read(name, (args, kwargs))
        try:
            args, kwargs = mapped(args, self._leaf), mapped(kwargs, self._leaf)
            found = self._called(func, args, kwargs)
            if name == "__len__" and self.numbers.offered is len:
                number = self.number(found) if isinstance(found, torch.SymInt) else None
                if number is not None:
                    self.numbers.length = number
                    return None
            return self._shown(found, out, self._onto_stack(name))
        except Exception as problem:
            self.fail(f"{getattr(func, '__name__', func)} of a symbolic shape: {problem}")
            return None

    def _shown(self, found: Any, out: Any, direct: bool) -> Any:
        if isinstance(found, torch.SymInt):
            if found.node.expr.is_number:
                return None
            if _hint(found) != out:
                raise _NoNumber(f"{found} is {out}")
            number = self.number(found) if direct else None
            if number is None:
                int(found)
            return None if number is None else number.obj
        if isinstance(out, tuple):
            items = [self._shown(*pair, direct) for pair in zip(found, out, strict=True)]
            if all(item is None for item in items):
                return None
            pairs = zip(items, out, strict=True)
            shown = type(out)([real if item is None else item for item, real in pairs])
            self.numbers.note_held(shown)
            return shown
        if found != out:
            raise _NoNumber(f"{found} is {out}")
        return None

    # -- numbers -----------------------------------------------------------------------------------

    def number(self, sym: Any) -> Number | None:
        """The number of the program that a symbolic int is; None where it cannot be one."""
        try:
            found = self._of(sym.node.expr)
        except _NoNumber:
            return None
        if isinstance(found, Number):
            found.sym = sym if found.sym is None else found.sym
            return found
        return None

    def _of(self, expr: Any) -> Any:
        """A number for an expression; a constant is a plain int."""
        if expr.is_Integer:
            return int(expr)
        known = self._numbers.get(expr)
        if known is None:
            known = self._numbers[expr] = self._made(expr)
        return known

    def _made(self, expr: Any) -> Number:
        if expr.is_Symbol:
            base = self._bases.get(expr)
            if base is None:
                raise _NoNumber(str(expr))
            position, dim = base
            item = self.inputs[position]
            sym = item.size[dim]
            return self.numbers.size(Size(item.node, position, dim, _hint(sym), sym))
        func = _FOLDED.get(expr.func)
        if func is not None:
            return self._folded(func, list(map(self._of, expr.args)))
        func = _OF_TWO.get(expr.func)
        if func is not None and len(expr.args) == 2:
            return self._applied(func, *map(self._of, expr.args))
        if expr.is_Pow and expr.exp.is_Integer and 0 < int(expr.exp) < 8:
            return self._folded(operator.mul, [self._of(expr.base)] * int(expr.exp))
        raise _NoNumber(str(expr))

    def _folded(self, func: Callable[..., Any], parts: list[Any]) -> Number:
        made: Number = reduce(lambda a, b: self._applied(func, a, b), parts)
        return made

    def _applied(self, func: Callable[..., Any], *parts: Any) -> Number:
        values = [part.obj if isinstance(part, Number) else part for part in parts]
        syms = [part.sym if isinstance(part, Number) else part for part in parts]
        made = func(*values)
        if type(made) not in (int, float):
            raise _NoNumber(func.__name__)
        sym = SYMBOLIC.get(func, func)(*syms)
        return self.numbers.sized(_C.fresh_number(made), func, tuple(parts), sym)

    def computed(self, func: Callable[..., Any], operands: tuple[Any, ...]) -> Number | None:
        """What the program computes with sizes; None where it is not known as an expression."""
        syms = self.syms(operands)
        if syms is None:
            return None
        try:
            value, sym = func(*operands), on_symbols(func, syms)
        except Exception:
            return None
        if not isinstance(sym, SYMBOLS) or sym.node.expr.is_number or _hint(sym) != value:
            return None
        if isinstance(sym, torch.SymInt) and is_exact(sym):
            found = self.number(sym)
            if found is not None and found.obj == value:
                return found
        parts = tuple([self.numbers.find(operand) or operand for operand in operands])
        return self.numbers.sized(_C.fresh_number(value), func, parts, sym)

    def syms(self, operands: tuple[Any, ...]) -> list[Any] | None:
        """Operands with symbols in the place of sizes; None where others change, too."""
        if self.failure is not None:
            return None
        found = []
        for operand in operands:
            number = self.numbers.find(operand)
            if number is not None and number.sym is None and number.live:
                return None
            found.append(operand if number is None or number.sym is None else number.sym)
        return found if any(isinstance(one, SYMBOLS) for one in found) else None

    def decided(self, func: Callable[..., Any], operands: tuple[Any, ...]) -> bool:
        """The program goes on by a test; whether the shape environment guards it now."""
        syms = self.syms(operands)
        if syms is None or not all(map(is_exact, syms)):
            return False
        try:
            return bool(func(*syms)) == bool(func(*operands))
        except Exception:
            return False

    # -- the end -----------------------------------------------------------------------------------

    def free_sizes(self, value_id: int) -> tuple[bool, ...]:
        """For each dimension of a tensor of the run whether its size may be another one."""
        fake = self._fakes.get(value_id)
        if fake is None or not self.active:
            return ()
        if value_id in self._by_data:
            return (True,) * len(fake.shape)
        return tuple(not isinstance(n, int) and not n.node.expr.is_number for n in fake.shape)

    def settle(self) -> None:
        """At the end of the run."""
        if any(item.changed() for item in self.inputs):
            self.fail("changes the shape of an input in place")

    def release(self) -> None:
        """Let go of the run."""
        self.inputs = []
        self._fakes = {}
        self._memo = MetadataMemo()
        self._numbers = {}
        self._onto_stack = lambda name: False

    def pinned_dims(self) -> list[tuple[ShadowNode, int]]:
        """Sizes that were symbols and became constants."""
        return [
            (item.node, dim)
            for item in self.inputs
            for dim, size in enumerate(item.size)
            if isinstance(size, torch.SymInt) and (self.failure or size.node.expr.is_number)
        ]

    def reasons(self) -> list[str]:
        """Why sizes that were symbols became constants."""
        found = [] if self.failure is None else [self.failure]
        found += [
            f"size {dim} of input {position} has to be as it is, used at {location}"
            for position, dim, location in self.needed
        ]
        return found

    def guards(self, loose: frozenset[int] = frozenset()) -> list[ShapeGuard]:
        """What must hold of the sizes of the inputs, and of the layout of those not ``loose``."""
        chosen = [index for index, item in enumerate(self.inputs) if item.is_symbolic]
        items = [self.inputs[index] for index in chosen]
        found = shape_guards(
            self.shape_env,
            [item.fake for item in items],
            [item.source for item in items],
            [item.context for item in items],
            constants=False,
        )
        return without_layout(found, loose)

    def free_dims(self) -> dict[int, tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """By node of an input: its sizes and strides, None where they may change."""
        return {
            item.node.node_id: (_fixed(item.size), _fixed(item.stride))
            for item in self.inputs
            if item.is_symbolic
        }


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, SYMBOLS) else size


def _fixed(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    found: list[Any] = []
    for size in sizes:
        constant = not isinstance(size, torch.SymInt) or size.node.expr.is_number
        found.append(_hint(size) if constant else None)
    return tuple(found)
