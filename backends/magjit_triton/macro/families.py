"""Which products are tuned: graphs with one product, its sizes symbols or numbers.

    MacroFamily ::= name, dtype, group of the code generator, roles of its size symbols

A family is a group as ``codegen.matmul.fusing`` makes it, so its prologue and epilogue are whatever
the code generator fuses (TSCompiler §5.3: the backbone's schedule is the whole group's).  Two
groups are one family where their *signatures* agree: the text of their operands, sizes and
epilogue with the symbols named by what they are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Node

from magjit.plugin.inputs import make_shape_env
from magjit.plugin.recording import record
from magjit.plugin.virtual_tensors.indexing import FloorDiv, Mod
from magjit_triton.codegen.decompositions import decompositions
from magjit_triton.codegen.fusion import Group
from magjit_triton.codegen.ir import Builder, Load, Store
from magjit_triton.codegen.layout import reach_of
from magjit_triton.codegen.matmul.configuration import Configuration, Work
from magjit_triton.codegen.matmul.family import Family
from magjit_triton.codegen.matmul.fusing import ProductFusion
from magjit_triton.codegen.matmul.steps import ProductKernels, family_of, product_kernels
from magjit_triton.codegen.passes import PASSES
from magjit_triton.macro.errors import UnknownFamilyError

__all__ = [
    "DTYPES",
    "FAMILIES",
    "MacroFamily",
    "Template",
    "families_of",
    "named",
    "signature",
    "text_of",
]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROLES = ("batch", "m", "n", "k")
_HINTS = {"batch": 6, "m": 1040, "n": 2064, "k": 4096}

K_UNIT = 128
"""``k`` of a family whose ``k`` is a symbol is a multiple of this: its tiles need no masks."""

Sizes = dict[str, int]


@dataclass(frozen=True, slots=True)
class Template:
    """A family as a program.

    Attributes:
        function: of its operands.
        shapes: of the operands, by roles.
        meaning: in one line.
        also: the same of the same operands, as other programs write it.
    """

    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[str, ...], ...]
    meaning: str
    also: tuple[Callable[..., torch.Tensor], ...] = ()

    def arguments(
        self, sizes: Sizes, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> list[torch.Tensor]:
        """Operands of standard normal values; weights are scaled so that results are, too."""
        made = []
        for shape in self.shapes:
            one = torch.randn([sizes[role] for role in shape], device=device, dtype=dtype)
            made.append(one * sizes["k"] ** -0.5 if shape in (("n", "k"), ("k", "n")) else one)
        return made


def _linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def _linear_bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b)


def _linear_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


def _linear_relu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.relu(F.linear(x, w, b))


def _linear_gelu_tanh(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def _linear_new_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, w, b)
    inner = math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))
    return 0.5 * y * (1.0 + torch.tanh(inner))


def _linear_bias_residual(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor
) -> torch.Tensor:
    return F.linear(x, w, b) + r


def _linear_residual(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return r + F.linear(x, w)


def _swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


_X, _W, _R = ("m", "k"), ("n", "k"), ("m", "n")

FAMILIES = {
    "linear": Template(_linear, (_X, _W), "x @ w.T"),
    "linear_bias": Template(_linear_bias, (_X, _W, ("n",)), "x @ w.T + b"),
    "linear_gelu": Template(_linear_gelu, (_X, _W, ("n",)), "gelu(x @ w.T + b)"),
    "linear_relu": Template(_linear_relu, (_X, _W, ("n",)), "relu(x @ w.T + b)"),
    "linear_gelu_tanh": Template(
        _linear_gelu_tanh, (_X, _W, ("n",)), "gelu(x @ w.T + b), by tanh", (_linear_new_gelu,)
    ),
    "linear_residual": Template(
        _linear_residual, (_X, _W, _R), "r + x @ w.T", (lambda x, w, r: F.linear(x, w) + r,)
    ),
    "linear_bias_residual": Template(
        _linear_bias_residual,
        (_X, _W, ("n",), _R),
        "x @ w.T + b + r",
        (lambda x, w, b, r: r + F.linear(x, w, b),),
    ),
    "swiglu": Template(
        _swiglu,
        (_X, _W, _W),
        "silu(x @ gate.T) * (x @ up.T)",
        (lambda x, gate, up: F.linear(x, up) * F.silu(F.linear(x, gate)),),
    ),
    "matmul": Template(_matmul, (_X, ("k", "n")), "x @ w"),
    "batched": Template(torch.bmm, (("batch", "m", "k"), ("batch", "k", "n")), "batches of x @ w"),
    "batched_transposed": Template(
        lambda x, w: torch.bmm(x, w.transpose(1, 2)),
        (("batch", "m", "k"), ("batch", "n", "k")),
        "batches of x @ w.T",
    ),
}


@dataclass
class MacroFamily:
    """A group with a product, of which kernels are made in any configuration.

    Attributes:
        name: of the template, or of the model and the group.
        fusion, group: as planned.
        kept: nodes that are stored.
    """

    name: str
    fusion: ProductFusion
    group: Group
    kept: Sequence[Node]
    template: Template | None = None
    sizes: Sizes = field(default_factory=dict)

    @cached_property
    def family(self) -> Family:
        """Operands, epilogue and sizes."""
        return family_of(self.fusion, self.group.nodes, self.kept)

    @property
    def work(self) -> Work:
        """What decides about configurations."""
        return self.family.work

    @cached_property
    def signature(self) -> str:
        """The same for groups whose kernels are the same."""
        return signature(self.family)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Size symbol → what it is."""
        return _roles(self.family)

    @property
    def fixed(self) -> dict[str, int]:
        """The sizes that are numbers."""
        sizes = zip(ROLES, self.family.sizes, strict=True)
        return {role: int(size) for role, size in sizes if size.is_Integer}

    @cached_property
    def order(self) -> list[int]:
        """For each of the kernels' buffers, which operand it is; the last is the result."""
        graph = self.fusion.gm.graph
        names = [node.name for node in graph.nodes if node.op == "placeholder"]
        return [names.index(one) if one in names else len(names) for one in self.family.buffers]

    def kernels(self, configuration: Configuration, name: str = "macro") -> ProductKernels:
        """What computes the group in a configuration."""
        layouts = self.fusion.realized.values()
        reach = {layout.buffer: reach_of(layout) for layout in layouts}
        return product_kernels(name, self.fusion, self.group.nodes, self.kept, reach, configuration)

    def __str__(self) -> str:
        dtype = str(self.family.dtype).removeprefix("torch.")
        sizes = ", ".join(f"{role}={size}" for role, size in self.fixed.items() if role != "batch")
        return f"{self.name} {dtype}" + (f" ({sizes})" if sizes else "")


def named(name: str, dtype: torch.dtype, form: int = 0, **fixed: int) -> MacroFamily:
    """A family of the table, its sizes symbols but for those given.

    Args:
        form: 0, or which of the other ways to write it.

    Raises:
        UnknownFamilyError: the table has no such family.
    """
    template = FAMILIES.get(name)
    if template is None:
        raise UnknownFamilyError(f"No family is called {name!r}", remedy=", ".join(FAMILIES))
    sizes = {**_HINTS, **fixed, "unit": K_UNIT, "units": _HINTS["k"] // K_UNIT}
    shapes, written = template.shapes, (template.function, *template.also)[form]
    if "k" not in fixed:
        shapes = tuple(_in_units(shape) for shape in shapes)
    arguments = [torch.empty([sizes[r] for r in shape], dtype=dtype) for shape in shapes]

    def function(*given: torch.Tensor) -> list[torch.Tensor]:
        whole = [
            one.flatten(shape.index("units"), shape.index("unit")) if "unit" in shape else one
            for one, shape in zip(given, shapes, strict=True)
        ]
        return [written(*whole)]

    gm = traced(function, arguments, shapes, {**fixed, "unit": K_UNIT})
    (found,) = families_of(gm, name)
    found.template, found.sizes = template, dict(fixed)
    return found


def _in_units(shape: tuple[str, ...]) -> tuple[str, ...]:
    pairs = (("units", "unit") if role == "k" else (role,) for role in shape)
    return tuple(role for pair in pairs for role in pair)


def traced(
    function: Callable[..., Any],
    arguments: Sequence[torch.Tensor],
    shapes: Sequence[tuple[str, ...]],
    fixed: Sizes,
) -> GraphModule:
    """The ATen graph of a function, with a symbol for each size that is not fixed."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=make_shape_env())
    fakes = []
    for tensor, shape in zip(arguments, shapes, strict=True):
        dims = [DimDynamic.STATIC if role in fixed else DimDynamic.DUCK for role in shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        fakes.append(mode.from_tensor(tensor, symbolic_context=context))
    with enable_python_dispatcher():
        return record(function, fakes, mode, decompositions())


def families_of(
    gm: GraphModule, name: str, devices: tuple[str, ...] = ("cpu", "cuda")
) -> list[MacroFamily]:
    """The groups of a graph that have a product, all of them as if they were ours."""
    for rewrite in PASSES:
        rewrite(gm)
    fusion = ProductFusion(gm, devices, setting="triton")
    plan = fusion.plan()
    groups = [one for one in plan.units if isinstance(one, Group) and fusion.products_in(one.nodes)]
    found = []
    for number, group in enumerate(groups):
        label = name if len(groups) == 1 else f"{name}.{number}"
        kept = [node for node in group.nodes if node in plan.stored]
        found.append(MacroFamily(label, fusion, group, kept))
    return found


# Signatures.


def _roles(family: Family) -> dict[str, str]:
    roles: dict[str, str] = {}
    for role, size in zip(ROLES, family.sizes, strict=True):
        if size.is_Symbol:
            roles.setdefault(size.name, role)
        elif role == "k" and len(size.free_symbols) == 1:
            (symbol,) = size.free_symbols
            if size == K_UNIT * symbol:
                roles.setdefault(symbol.name, "k_units")
    for symbol in family.symbols:
        roles.setdefault(symbol.name, f"other{len(roles)}")
    return roles


def signature(family: Family) -> str:
    """A digest of all that a family's kernels depend on besides their configuration."""
    return hashlib.sha256(text_of(family).encode()).hexdigest()


def text_of(
    family: Family, given: dict[sympy.Symbol, sympy.Expr] | None = None, like: Family | None = None
) -> str:
    """All that a family's kernels depend on, with symbols named by what they are.

    Args:
        given: what some of the symbols stand for, in the symbols of another family.
        like: that other family.
    """
    swaps = dict(given or {})
    canonical = _canonical(like or family)
    swaps = {one: sympy.sympify(expr).xreplace(canonical) for one, expr in swaps.items()}
    if like is None:
        swaps = canonical | swaps
    # How float32 is multiplied is no matter of the others.
    precision = family.precision if family.dtype == torch.float32 else "own"
    lines = [f"{family.dtype} {precision} {[str(_at(one, swaps)) for one in family.sizes]}"]
    lines.append(" ".join(map(str, family.dtypes)))
    for operand in (family.left, *family.rights):
        lines.append(_text(operand.builder, swaps) + f"\n%{operand.value}")
    lines.append(_text(family.epilogue, swaps))
    return "\n".join(lines)


def _canonical(family: Family) -> dict[sympy.Symbol, sympy.Symbol]:
    names = _roles(family)
    return {
        symbol: sympy.Symbol(f"size_{names[symbol.name]}", integer=True, nonnegative=True)
        for size in (*family.sizes, *family.symbols)
        for symbol in size.free_symbols
        if symbol.name in names
    }


def _at(expr: sympy.Expr, swaps: dict[sympy.Symbol, sympy.Expr]) -> sympy.Expr:
    return _whole(sympy.expand(expr.xreplace(swaps)))


def _whole(expr: sympy.Expr) -> sympy.Expr:
    """An offset without ``x // d * (c * d) + x % d * c``, which is ``x * c``."""
    for division in expr.atoms(FloorDiv):
        value, divisor = division.args
        rest = next(
            (one for one in expr.atoms(Mod) if one.args == (value, divisor) and divisor != 0), None
        )
        if rest is None:
            continue
        whole, part = expr.coeff(division), expr.coeff(rest)
        if part != 0 and sympy.expand(whole - part * divisor) == 0:
            left = sympy.expand(expr - whole * division - part * rest)
            return _whole(sympy.expand(left + part * value))
    return expr


def _text(builder: Builder, swaps: dict[sympy.Symbol, sympy.Expr]) -> str:
    lines = [f"{one.symbol} < {_at(one.size, swaps)} on {one.axis}" for one in builder.dims]
    for number in builder.live():
        one = builder.instructions[number]
        attribute: Any = one.attribute
        if isinstance(attribute, Load):
            attribute = Load(attribute.buffer, _at(attribute.offset, swaps), attribute.dtype)
            attribute = f"{attribute} {attribute.dtype}"
        elif isinstance(attribute, sympy.Basic):
            attribute = _at(attribute, swaps)
        lines.append(f"%{number} = {one.op}{one.args} {attribute} {one.dtype}")
    for store in builder.stores:
        moved = Store(store.buffer, _at(store.offset, swaps), store.value, store.mask, store.dtype)
        lines.append(f"{moved} {moved.dtype}")
    return "\n".join(lines)
