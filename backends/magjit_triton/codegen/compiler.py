"""From an ATen graph to a callable: plan, kernels, and the Python program that runs them.

The program is straight-line Python: memory, launches and library calls in order, each tensor
dropped after its last use, so that the allocator can give its memory to the next one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from magjit.plugin.aliases import may_alias
from magjit.plugin.virtual_tensors.indexing import size_expr
from magjit_triton.codegen.attention import attend, attention_kernel
from magjit_triton.codegen.deciding import Decide, Deciding
from magjit_triton.codegen.decoding import Decoding, check_equal, to_be_equal
from magjit_triton.codegen.decoding_kernels import decoding_kernels
from magjit_triton.codegen.fusion import Fusion
from magjit_triton.codegen.graphs import is_tensor, mutates
from magjit_triton.codegen.graphs_cuda import GraphedProgram
from magjit_triton.codegen.ir import Builder
from magjit_triton.codegen.kernel import Kernel, make_kernel
from magjit_triton.codegen.layout import Layout
from magjit_triton.codegen.layout import reach_of as _reach
from magjit_triton.codegen.lowering import operator_name
from magjit_triton.codegen.matmul.family import WORKSPACE
from magjit_triton.codegen.matmul.fusing import ProductFusion
from magjit_triton.codegen.matmul.steps import product_kernels
from magjit_triton.codegen.memory_plan import ALLOCATE
from magjit_triton.codegen.nest import Hint
from magjit_triton.codegen.passes import PASSES
from magjit_triton.codegen.plan import Group, Plan
from magjit_triton.codegen.printer import expression
from magjit_triton.codegen.program_parts import (
    Step,
    as_planned,
    as_tuple,
    attribute_of,
    current_stream,
    makes_memory,
)
from magjit_triton.codegen.runtime import Launcher, has_triton, interpreting
from magjit_triton.decisions import Decisions
from magjit_triton.kernels import MATRICES, out_variant
from magjit_triton.settings import DEFAULTS, Settings
from magjit_triton.strides import correct_strides

__all__ = ["Compiled", "Program", "compile_graph", "plan_kernels"]

_DEFAULT_HINT = 4096


@dataclass
class Compiled:
    """A compiled graph: call it with the flat inputs, it gives the list of outputs.

    Attributes:
        source: the Python program.
        kernels: the kernels it launches; of those with one ``identity`` the first is compiled.
        plan: what was fused.
        fusion: what made the plan.
        library: names of library operators in the program that make memory → their forms that
            take ``out``, if there are such.
    """

    run: Callable[..., Sequence[Any]]
    source: str
    kernels: list[Kernel]
    plan: Plan
    fusion: Fusion
    library: Mapping[str, Any]

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return self.run(*inputs)


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings = DEFAULTS,
    *,
    static_inputs: Sequence[int] = (),
    fusing: Callable[..., ProductFusion] = ProductFusion,
    writing: Callable[..., Program] | None = None,
) -> Compiled:
    """Compile a functional ATen graph for CUDA tensors.

    What no kernel can compute stays a call of its ATen operator.

    Args:
        gm: nodes have fake values in ``meta["val"]``.
        example_inputs: the fake inputs.
        settings: mode and objective.
        static_inputs: positions of inputs whose address stays the same.
        fusing, writing: how the plan is made, and the program of it.

    Returns:
        A callable with the graph's flat inputs and outputs. On CPU tensors kernels are used
        only where ``TRITON_INTERPRET=1``.
    """
    devices: tuple[str, ...] = ("cuda",) if has_triton() else ()
    if interpreting() and has_triton():
        devices = ("cuda", "cpu")
    correct_strides(gm)
    deciding = Deciding(gm, settings, Decisions.of(gm, settings, "kernels"))
    timed = deciding.times if settings.measures and torch.cuda.is_available() else None

    def program_of(one: GraphModule, decide: Decide) -> Program:
        for rewrite in PASSES:
            rewrite(one)
        fusion = fusing(
            one, devices, settings.objective, decide, setting=settings.matmul, measured=timed
        )
        return (writing or Program)(one, fusion, fusion.plan(), cut=deciding.cut)

    deciding.make = lambda one, decide: program_of(one, decide).compiled().run
    program = program_of(gm, deciding.decide)
    compiled = program.compiled()
    deciding.finish()
    if settings.cuda_graphs and torch.cuda.is_available():
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        roots = {update.root for update in program.fusion.updates.values()} | _written(gm)
        changed = frozenset(k for k, one in enumerate(placeholders) if one in roots)
        dynamic = bool(program.sizes) or any(
            not isinstance(node.meta.get("val"), torch.Tensor) for node in placeholders
        )
        static = frozenset(static_inputs)
        multiplies = any(node.target in MATRICES for node in gm.graph.nodes)
        compiled.run = GraphedProgram(
            compiled.run, program.library, multiplies, static, changed, dynamic
        )
    return compiled


def _written(gm: GraphModule) -> set[Node]:
    """Nodes that an operator writes to."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "call_function" and mutates(node):
            found.update(node.all_input_nodes)
    return found


def plan_kernels(
    gm: GraphModule, devices: Sequence[str] = ("cuda",), matmul: str = "auto"
) -> list[Kernel]:
    """The kernels of a graph, not compiled; tensors on ``devices`` count as fusible."""
    correct_strides(gm)
    for rewrite in PASSES:
        rewrite(gm)
    fusion = ProductFusion(gm, tuple(devices), setting=matmul)
    return Program(gm, fusion, fusion.plan()).compiled().kernels


@dataclass
class Program:
    """Writes the program of a plan."""

    gm: GraphModule
    fusion: ProductFusion
    plan: Plan
    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    cut: Callable[[Kernel, Hint], Kernel] = lambda kernel, hint: kernel

    def __post_init__(self) -> None:
        self.sizes: dict[sympy.Symbol, str] = {}
        self.hints: dict[sympy.Symbol, int] = {}
        self.names.update(
            torch=torch,
            # No operator's node is called so.
            **{ALLOCATE: torch.empty_strided},
            __as_strided=torch.as_strided,
            current_stream=current_stream,
        )
        self.device: torch.device | None = None
        self._by_buffer = {
            layout.buffer: layout
            for node, layout in self.plan.layouts.items()
            if layout.offset == 0 and node not in self.plan.placed
        }
        self.library: dict[str, Any] = {}  # operators that make memory → their forms with ``out``
        self._allocated: set[Node] = set()
        self._same: dict[Hashable, str] = {}

    def compiled(self) -> Compiled:
        """The program of the plan."""
        placeholders = [node for node in self.gm.graph.nodes if node.op == "placeholder"]
        output = next(node for node in self.gm.graph.nodes if node.op == "output")
        self._bind_sizes(placeholders)
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":
                self.names[node.name] = attribute_of(self.gm, str(node.target))
        body = self._body(output)
        names = ", ".join(node.name for node in placeholders)
        head = [f"def call({names}):"]
        head += [f"    {name} = {source}" for name, source in self._size_lines.items()]
        if self.device is not None:
            head.append("    stream = current_stream()")
        source = "\n".join([*head, *(f"    {line}" for line in body)]) + "\n"
        exec(compile(source, "<magjit_triton program>", "exec"), self.names)
        run = self.names["call"]
        return Compiled(run, source, self.kernels, self.plan, self.fusion, self.library)

    # Sizes.

    def _bind_sizes(self, placeholders: Sequence[Node]) -> None:
        self._size_lines: dict[str, str] = {}
        for node in placeholders:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._bind(value, node.name)
        for node in placeholders:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                for k, size in enumerate(value.shape):
                    self._bind(size, f"{node.name}.size({k})")
                for k, stride in enumerate(value.stride()):
                    self._bind(stride, f"{node.name}.stride({k})")

    def _bind(self, value: Any, source: str) -> None:
        if not isinstance(value, torch.SymInt):
            return
        expr = size_expr(value)
        if not expr.is_Symbol or expr in self.sizes:
            return
        self.sizes[expr] = expr.name
        self._size_lines[expr.name] = source
        hint = getattr(value.node, "hint", None)
        self.hints[expr] = int(hint) if hint is not None else _DEFAULT_HINT

    def hint(self, expr: sympy.Expr) -> int:
        """The likely value of a size."""
        swaps = {one: self.hints.get(one, _DEFAULT_HINT) for one in expr.free_symbols}
        return int(expr.xreplace(swaps))

    # The body.

    def _body(self, output: Node) -> list[str]:
        steps = [
            self._group(unit) if isinstance(unit, Group) else self._call(unit)
            for unit in self.plan.units
        ]
        results, kept = self._results(output)
        lines: list[str] = []
        last: dict[str, int] = {}
        for number, step in enumerate(steps):
            last.update(dict.fromkeys(step.reads, number))
        own = {name for step in steps for name in step.makes}
        fresh: set[str] = set()
        shown = {name for step in steps for name in step.shown}
        for number, step in enumerate(steps):
            dead = {
                name
                for name in step.reads | step.makes
                if name in own and name not in kept and last.get(name, number) == number
            }
            lines += step.memory((dead & fresh) - shown)
            lines += step.lines
            fresh |= step.fresh
            if dead:
                lines.append(f"del {', '.join(sorted(dead))}")
        return [*lines, f"return [{', '.join(results)}]"]

    def _group(self, group: Group) -> Step:
        kept = [node for node in group.nodes if node in self.plan.stored]
        if self.fusion.products_in(group.nodes):
            return self.product(group, kept)
        builder = self.fusion.lowered(group.domain, group.nodes, self.fusion.realized)
        names = {self.fusion.realized[node].buffer for node in kept}
        builder.stores = [store for store in builder.stores if store.buffer in names]
        used = {load.buffer for load in builder.loads()} | names
        reach = {buffer: size for buffer, size in self._reaches().items() if buffer in used}
        own = [node for node in kept if node not in self.fusion.updates]
        new = [node for node in own if node not in self.plan.placed]
        allocations = {node.name: self._allocation(node) for node in new}
        overwritten = {node.name: self._overwritten(node, builder) for node in new}
        for owner in self._owners(own):
            allocations[owner.name] = self._allocation(owner)
            overwritten[owner.name] = {}
        kernel = make_kernel(f"fused_{len(self.kernels)}", builder, self.hint, reach)
        self.device = kept[0].meta["val"].device
        lines = [self._launch(self.cut(kernel, self.hint))]
        makes = set(allocations)
        return Step(lines, set(kernel.buffers), makes, makes, allocations, overwritten)

    def _launch(self, kernel: Kernel) -> str:
        """A call of a kernel, or of an earlier one that is the same: layers are often alike."""
        self.kernels.append(kernel)
        name = self._same.setdefault(kernel.identity, kernel.name)
        if name == kernel.name:
            self.names[name] = self.launcher(kernel)
        sizes = (symbol.name for symbol in kernel.symbols)
        return f"{name}({', '.join(['stream', *kernel.buffers, *sizes])})"

    def launcher(self, kernel: Kernel) -> Launcher:
        """What starts a kernel."""
        return Launcher(kernel)

    def product(self, group: Group, kept: Sequence[Node]) -> Step:
        name = f"fused_{len(self.kernels)}"
        cut = self.fusion.cuts.get(self.fusion.products_in(group.nodes)[0])
        made = product_kernels(name, self.fusion, group.nodes, kept, self._reaches(), cut)
        self.device = kept[0].meta["val"].device
        own = [node for node in kept if node not in self.fusion.updates]
        new = [node for node in own if node not in self.plan.placed]
        return self._launched(made.kernels, made.workspace, [*new, *self._owners(own)])

    def _reaches(self) -> dict[str, sympy.Expr]:
        """Buffer → number of elements from its first to its last."""
        layouts = self.fusion.realized.items()
        parts = {layout.buffer: _reach(layout) for node, layout in layouts}
        whole = {
            layout.buffer: _reach(layout) for node, layout in layouts if layout.buffer == node.name
        }
        return {**parts, **whole}

    def _owners(self, nodes: Sequence[Node]) -> list[Node]:
        """The tensors of which these nodes are the first parts to be computed."""
        owners = dict.fromkeys(self.plan.placed[one] for one in nodes if one in self.plan.placed)
        found = [owner for owner in owners if owner not in self._allocated]
        self._allocated.update(found)
        return found

    def _overwritten(self, node: Node, builder: Builder) -> dict[str, str]:
        """Memory that a kernel may write a result into: it reads each element where it writes.

        Returns:
            The name of the memory, and how the result is made from it.
        """
        layout = self.plan.layouts[node]
        places = {store.offset for store in builder.stores if store.buffer == layout.buffer}
        read: dict[str, set[sympy.Expr]] = {}
        for load in builder.loads():
            read.setdefault(load.buffer, set()).add(load.offset)
        found = {}
        for other, offsets in read.items():
            same = self._by_buffer.get(other)
            if offsets != places or same is None or same.dtype != layout.dtype:
                continue
            if sympy.expand(_reach(same) - _reach(layout)) != 0:
                continue
            if (same.sizes, same.strides) == (layout.sizes, layout.strides):
                found[other] = f"{node.name} = {other}"
            else:
                found[other] = f"{node.name} = {self._strided(other, layout)}"
        return found

    def _allocation(self, node: Node) -> str:
        return self._memory(self.plan.layouts[node], node.meta["val"].device)

    def _memory(self, layout: Layout, device: torch.device) -> str:
        dtype = str(layout.dtype)
        name = f"device_{device.type}_{device.index or 0}"
        self.names[name] = device
        sizes, strides = as_tuple(layout.sizes), as_tuple(layout.strides)
        return f"{layout.buffer} = {ALLOCATE}({sizes}, {strides}, dtype={dtype}, device={name})"

    def _attention(self, node: Node) -> Step:
        reach = self._reaches()
        name = f"fused_{len(self.kernels)}"
        memory = self.fusion.realized
        kernels: Sequence[Kernel]
        workspace: sympy.Expr = sympy.S.Zero
        if isinstance(node.meta["magjit_attention"], Decoding):
            count = self.fusion.device.multiprocessors
            kernels, workspace = decoding_kernels(name, node, memory, reach, self.hint, count)
        else:
            kernels = [self.cut(attention_kernel(name, node, memory, reach), self.hint)]
        self.device = node.meta["val"].device
        step = self._launched(kernels, workspace, [node])
        if isinstance(node.meta["magjit_attention"], Decoding) and (pairs := to_be_equal(node)):
            self.names["check_equal"] = check_equal
            step.lines.insert(0, f"check_equal({', '.join(map(as_tuple, pairs))})")
        return step

    def _launched(
        self, kernels: Sequence[Kernel], workspace: sympy.Expr, new: Sequence[Node]
    ) -> Step:
        """Kernels in order, which share memory of their own and make these nodes."""
        assert self.device is not None
        lines = [self._allocation(node) for node in new]
        if workspace != 0:
            size = Layout(WORKSPACE, torch.float32, (workspace,), (sympy.S.One,))
            lines.append(self._memory(size, self.device))
        lines += [self._launch(kernel) for kernel in kernels]
        if workspace != 0:
            lines.append(f"del {WORKSPACE}")
        reads = {buffer for kernel in kernels for buffer in kernel.buffers} - {WORKSPACE}
        makes = {node.name for node in new}
        return Step(lines, reads, makes, makes)

    def _call(self, node: Node) -> Step:
        if node.target is attend:
            return self._attention(node)
        reads: set[str] = set()

        def text(value: Any) -> str:
            if isinstance(value, Node):
                if is_tensor(value):
                    found, base = self._operand(value)
                    reads.add(base)
                    return found
                reads.add(value.name)
                return value.name
            if isinstance(value, tuple | list):
                inner = ", ".join(text(one) for one in value)
                return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
            if isinstance(value, slice):
                return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
            if isinstance(value, float):
                return (
                    repr(value)
                    if value == value and abs(value) < float("inf")
                    else (f'float("{value}")')
                )
            if value is None or isinstance(value, bool | int | str):
                return repr(value)
            name = f"constant_{len(self.names)}"
            self.names[name] = value
            return name

        arguments = [text(one) for one in node.args]
        arguments += [f"{name}={text(one)}" for name, one in node.kwargs.items()]
        if node in self.plan.placed:
            return self._placed_call(node, arguments, reads)
        if node.target is operator.getitem:
            lines = [f"{node.name} = {arguments[0]}[{arguments[1]}]"]
        else:
            name = f"call_{len(self.names)}_{operator_name(node)}"
            self.names[name] = node.target
            if makes_memory(node) and "out" not in node.kwargs:
                self.library[name] = out_variant(node) if is_tensor(node) else None
            lines = [f"{node.name} = {name}({', '.join(arguments)})"]
        if is_tensor(node):
            layout = self.plan.layouts.get(node)
            if layout is not None and node.meta["val"].layout == torch.strided:
                self.names["as_planned"] = as_planned
                lines.append(f"{node.name} = as_planned({node.name}, {as_tuple(layout.strides)})")
        fresh = {node.name} if makes_memory(node) else set()
        shown = reads | {node.name} if may_alias(node) else set()
        if node.target is operator.getitem:
            shown = set() if fresh else {node.name}
        return Step(lines, reads, {node.name}, fresh, shown=shown)

    def _placed_call(self, node: Node, arguments: Sequence[str], reads: set[str]) -> Step:
        """A library operator that writes into another tensor's memory."""
        layout = self.fusion.realized[node]
        name = f"call_{len(self.names)}_{operator_name(node)}"
        self.names[name] = out_variant(node)
        place = self._strided(layout.buffer, layout)
        lines = [self._allocation(owner) for owner in self._owners([node])]
        made = {layout.buffer} if lines else set()
        lines.append(f"{name}({', '.join([*arguments, f'out={place}'])})")
        return Step(lines, reads | {layout.buffer}, made, made)

    def _operand(self, node: Node) -> tuple[str, str]:
        """A tensor as a library operator gets it, and the memory that it reads."""
        found = self.fusion.view_of(node)
        if found is None:
            return node.name, node.name
        base, layout = found
        if base is node and layout.buffer == node.name:
            return node.name, node.name
        return self._strided(layout.buffer, layout), layout.buffer

    def _strided(self, name: str, layout: Layout) -> str:
        offset = expression(layout.offset)
        start = "" if layout.offset == 0 else f" + {offset}"
        return (
            f"__as_strided({name}, {as_tuple(layout.sizes)}, {as_tuple(layout.strides)}, "
            f"{name}.storage_offset(){start})"
        )

    def _results(self, output: Node) -> tuple[list[str], set[str]]:
        results: list[str] = []
        kept: set[str] = set()
        for value in output.args[0]:  # type: ignore[union-attr]
            if not isinstance(value, Node):
                results.append(repr(value))
                continue
            text, base = self._operand(value) if is_tensor(value) else (value.name, value.name)
            results.append(text)
            kept.add(base)
        return results, kept
