"""A fused graph as a Python function: fused operators, and ATen for the rest."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Iterable
from itertools import count
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from magjit.plugin.writes import updated
from magjit_dvm.attention import Attention, DeviceAttention, attention
from magjit_dvm.batch_norms import kernel_of
from magjit_dvm.builder import size_key
from magjit_dvm.by_aten import by_aten
from magjit_dvm.groups import FusedGroup, Fusion, Size, operands_of, results_of
from magjit_dvm.panels import Panels, use_panels
from magjit_dvm.stacking import Stack, stacked
from magjit_dvm.view_chains import ViewChain, in_chains
from magjit_dvm.vm import convolution, linear, run_stacked
from magjit_dvm.waiting import let_wait
from magjit_dvm.wide_norms import WideNorm, is_wide_norm

__all__ = ["Schedule"]

_numbers = count()

aten = torch.ops.aten

_FAST: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.convolution.default: torch.convolution,
    aten.embedding.default: torch.embedding,
    aten.expand.default: torch.Tensor.expand,
    aten.gelu.default: torch._C._nn.gelu,
    aten.linear.default: torch.nn.functional.linear,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_dropout.default: torch.native_dropout,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.silu.default: torch._C._nn.silu,
    aten.split.Tensor: torch._VF.split,  # type: ignore[attr-defined]
    aten.split_with_sizes.default: torch._VF.split_with_sizes,
    aten.squeeze.dim: torch.squeeze,
    aten.stack.default: torch.stack,
    aten.sum.dim_IntList: torch.sum,
    aten.sym_size.int: torch.Tensor.size,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
    aten._unsafe_view.default: torch.Tensor.view,
}
"""The same operator by a shorter way than the dispatcher's Python entry."""

Step = FusedGroup | FxNode | Stack | ViewChain

_FEW = 16  # rows: no kernels of magjit_dvm/csrc/few_rows.inc take more


class Schedule:
    """What runs, in order.

    Attributes:
        fusion: the graph's groups.
        source: the generated function.
        call: takes the graph's inputs, returns its outputs as a tuple.
        unread: positions of inputs that nothing reads.
        only: where it runs one fused operator, whose result is the graph's only one, that and the
            positions of the inputs that it takes.
    """

    def __init__(self, gm: GraphModule, fusion: Fusion) -> None:
        use_panels(fusion)
        let_wait(fusion)
        self.fusion = fusion
        self._steps: list[Step] = in_chains(stacked(fusion.steps))
        self._numbers = {id(step): number for number, step in enumerate(fusion.steps)}
        self._gm = gm
        self._names: dict[FxNode, str] = {}
        self._globals: dict[str, Any] = {}
        self._named: dict[tuple[str, int], str] = {}
        """Of values among these, by the name that was asked for."""
        self._last: dict[str, int] = {}
        self.source, name = self._emit(gm.graph)
        code = compile(self.source, name, "exec")
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        weakref.finalize(self, linecache.cache.pop, name, None)
        exec(code, self._globals)
        self.call: Callable[..., tuple[Any, ...]] = self._globals["call"]

    # -- emission --

    def _emit(self, graph: Graph) -> tuple[str, str]:
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        for node in inputs:
            self._name(node)
        dies = self._last_uses()
        self.unread = self._unread(inputs)
        body: list[str] = []
        for step_number, step in enumerate(self._steps):
            if isinstance(step, FxNode) and step.op == "placeholder":
                continue
            body.append(self._step(step))
            dead = [self._names[one] for one in dies.get(step_number, ()) if one in self._names]
            if dead and not body[-1].startswith("return"):
                body.append(f"del {', '.join(dead)}")
        self.only = self._only(inputs, graph.output_node())
        parameters = ", ".join(self._names[node] for node in inputs)
        lines = [f"def call({parameters}):", *(f"    {line}" for line in body)]
        return "\n".join(lines) + "\n", f"<magjit_dvm {next(_numbers)}>"

    def _unread(self, inputs: list[FxNode]) -> frozenset[int]:
        read = {node for step in self._steps for node in operands_of(step)}
        return frozenset(k for k, node in enumerate(inputs) if node not in read)

    def _only(self, inputs: list[FxNode], output: FxNode) -> tuple[Any, tuple[int, ...]] | None:
        group, *others = self._steps[len(inputs) :]  # of which the last one is the output
        if len(others) != 1 or not isinstance(group, FusedGroup) or group.cube >= 0:
            return None
        (results,) = output.args
        assert isinstance(results, (tuple, list))
        if len(group.outputs) != 1 or list(results) != group.outputs:
            return None
        places: dict[Any, int] = {node: k for k, node in enumerate(inputs)}
        if not set(group.arguments) <= places.keys():
            return None
        ((_, fused),) = self.programs()
        return fused, tuple(places[one] for one in group.arguments)

    def _last_uses(self) -> dict[int, list[FxNode]]:
        last: dict[FxNode, int] = {}
        for number, step in enumerate(self._steps):
            for node in operands_of(step):
                last[node] = number
            for node in results_of(step):
                last.setdefault(node, number)
        dies: dict[int, list[FxNode]] = {}
        for node, number in last.items():
            dies.setdefault(number, []).append(node)
        return dies

    def _step(self, step: Step) -> str:
        if isinstance(step, FusedGroup):
            return self._fused(step)
        if isinstance(step, Stack):
            return self._stack(step)
        if isinstance(step, ViewChain):
            return self._chain(step)
        if step.op == "output":
            (results,) = step.args
            assert isinstance(results, (tuple, list))
            items = ", ".join(self._text(one) for one in results)
            return f"return ({items}{',' if len(results) == 1 else ''})"
        if step.op == "get_attr":
            value = attrgetter(str(step.target))(self._gm)
            return f"{self._name(step)} = {self._global('constant', value)}"
        if step in self.fusion.stored or step.target is updated:
            return f"{self._name(step)} = {self._text(step.args[0])}"
        target = _FAST.get(step.target, step.target)
        if step.target is aten.linear.default and not step.kwargs and _may_have_few_rows(step):
            target = linear
        elif step.target is aten.convolution.default and _may_be_of_small_images(step):
            target = convolution
        elif step.target is attention:
            target = DeviceAttention() if step.meta["val"].is_cuda else Attention()
        elif is_wide_norm(step):
            target = WideNorm(step.target)
        else:
            target = kernel_of(step) or target
        if step.op == "call_module":
            target = self._gm.get_submodule(str(step.target))
        function = self._global(_title(step.target), target)
        arguments = [self._text(one) for one in step.args]
        arguments += [f"{key}={self._text(one)}" for key, one in step.kwargs.items()]
        return f"{self._name(step)} = {function}({', '.join(arguments)})"

    def _compiled(self, group: FusedGroup) -> str:
        """The name of a group's program."""
        assert group.program is not None
        name = f"fused_{self._numbers[id(group)]}"
        fallback = by_aten(self._gm, group)
        if group.on_gpu:
            # Imported late: a machine without GPUs does not need it.
            from magjit_dvm.cuda.launch import DeviceFused

            index = group.device.index
            home = -1 if index is None else index
            self._globals[name] = DeviceFused(group.program, fallback, home=home)
        else:
            self._globals[name] = group.program.compiled(fallback)
        return name

    def _stack(self, stack: Stack) -> str:
        names = [self._compiled(group) for group in stack.groups]
        members = "_".join(["stack", *(name.removeprefix("fused_") for name in names)])
        self._globals[members] = tuple(self._globals[name] for name in names)
        made = {node: str(number) for number, node in enumerate(stack.outputs)}
        given = [one for group in stack.groups for one in group.arguments]
        arguments = [made[one] if one in made else self._text(one) for one in given]
        results = ", ".join(self._name(one) for one in stack.outputs)
        function = self._global("run_stacked", run_stacked)
        call = f"{function}({', '.join([members, *arguments])})"
        several = results + "," * (len(stack.outputs) == 1)  # a tuple in any case
        return f"{several} = {call}" if results else call

    def _chain(self, chain: ViewChain) -> str:
        function = self._global("view_as", chain.compiled(self._gm))
        arguments = ", ".join(self._name(one) for one in chain.operands)
        return f"{self._name(chain.nodes[-1])} = {function}({arguments})"

    def _fused(self, group: FusedGroup) -> str:
        assert group.program is not None
        name = self._compiled(group)
        arguments = [self._text(one) for one in group.arguments]
        results = ", ".join(self._name(one) for one in group.outputs)
        if group.cube >= 0:
            product = group.arguments[group.cube]
            assert isinstance(product, FxNode)
            function = _FAST[product.target]
            fused = self._globals[name]
            name = name.replace("fused", "panels")
            self._globals[name] = Panels(product, function, fused, group.program, group.cube)
            arguments.pop(group.cube)
            arguments.insert(0, self._text(tuple(product.args)))
        call = f"{name}({', '.join(arguments)})"
        return f"{results} = {call}" if results else call

    def _name(self, node: FxNode) -> str:
        return self._names.setdefault(node, f"v_{node.name}")

    def _global(self, name: str, value: Any) -> str:
        key = name, id(value)
        if key not in self._named:
            found = name
            while found in self._globals:
                number = self._last[name] = self._last.get(name, 0) + 1
                found = f"{name}_{number}"
            self._globals[found], self._named[key] = value, found
        return self._named[key]

    def _text(self, value: Any) -> str:
        if isinstance(value, FxNode):
            return self._name(value)
        if isinstance(value, Size):
            return " + ".join(self._size(one) for one in value.terms)
        if isinstance(value, (list, tuple)):
            items = [self._text(one) for one in value]
            inner = ", ".join(items) + ("," if isinstance(value, tuple) and len(items) == 1 else "")
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._global("constant", value)

    def _size(self, term: Any) -> str:
        if isinstance(term, tuple):
            tensor, dim = term
            return f"{self._name(tensor)}.shape[{dim}]"
        return self._text(term)

    # -- looking inside --

    def programs(self) -> Iterable[tuple[str, Any]]:
        """Name and callable of each fused operator."""
        return ((name, one) for name, one in self._globals.items() if name.startswith("fused_"))


def _may_have_few_rows(product: FxNode) -> bool:
    """Whether a linear layer may be one for the machine's own kernels; each call decides."""
    made = product.meta.get("val")
    if not isinstance(made, torch.Tensor) or made.dtype != torch.float32:
        return False
    sizes = [size_key(size) for size in made.shape[:-1]]
    known = [size for size in sizes if isinstance(size, int)]
    return made.device.type == "cpu" and 1 <= prod(known) <= _FEW


def _may_be_of_small_images(product: FxNode) -> bool:
    """Whether a convolution may be one for the machine's own kernels; each call decides."""
    made = product.meta.get("val")
    if not isinstance(made, torch.Tensor) or made.dtype != torch.float32 or product.kwargs:
        return False
    stride, _, dilation, transposed, _, groups = product.args[3:]
    plain = [stride, dilation, transposed, groups] == [[1, 1], [1, 1], False, 1]
    return made.device.type == "cpu" and made.dim() == 4 and plain and bool(made.is_contiguous())


def _title(target: Any) -> str:
    name = getattr(target, "__name__", str(target))
    return "".join(letter if letter.isalnum() else "_" for letter in name)
