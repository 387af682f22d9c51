"""An ``autograd.Function`` whose forward is a graph, and whose backward is the program's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.fx import GraphModule

from magjit.monitor.operator_graph import ValueRef, mapped
from magjit.monitor.regions import FunctionRegion
from magjit.plugin import runnable


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPlan:
    """How a graph takes the place of a forward.

    Attributes:
        region: what the program's forward did.
        positions: for each input of the graph, which argument of ``apply`` it is; from the
            number of those on, which of the values that the forward found elsewhere.
        outputs: the values that the graph returns.
        kept: of them, what only other parts of the program use; it has no gradient.
    """

    region: FunctionRegion
    positions: tuple[int, ...]
    outputs: tuple[int, ...]
    kept: tuple[int, ...]

    def run(self, ctx: Any, gm: GraphModule, args: tuple[Any, ...]) -> Any:
        """The forward: what it leaves on the context, and its result."""
        region = self.region
        made = runnable(gm)(*[args[position] for position in self.positions])
        values = dict(zip(self.outputs, made, strict=True))
        if region.saved is not None:
            ctx.save_for_backward(*_filled(region.saved, values))
        if region.dirty:
            ctx.mark_dirty(*_filled(region.dirty, values))
        kept = [values[value_id] for value_id in self.kept]
        undifferentiable = (*_filled(region.undifferentiable, values), *kept)
        if undifferentiable:
            ctx.mark_non_differentiable(*undifferentiable)
        if not region.materialize:
            ctx.set_materialize_grads(False)
        for name, template in region.attributes.items():
            setattr(ctx, name, _filled(template, values))
        returned = _filled(region.returned, values)
        if not kept:
            return returned
        return (*(returned if isinstance(returned, tuple) else (returned,)), *kept)


def _filled(template: Any, values: dict[int, torch.Tensor]) -> Any:
    return mapped(
        template, lambda part: values[part.value_id] if isinstance(part, ValueRef) else part
    )


def replayed_apply(plan: ForwardPlan) -> Callable[..., Any]:
    """``apply`` as a function of the forward's graph and of the program's arguments.

    The program's ``apply`` gets the program's arguments, since its backward may ask for
    ``ctx.needs_input_grad``; values that the forward found elsewhere come by a side way.
    """
    made: list[tuple[GraphModule, Callable[..., Any]]] = []
    elsewhere = threading.local()
    count = len(plan.region.call_args)

    def apply(gm: GraphModule, *args: Any) -> Any:
        if not made or made[0][0] is not gm:
            made[:] = [(gm, _subclass(plan, gm, elsewhere).apply)]
        elsewhere.values = args[count:]
        try:
            return made[0][1](*args[:count])
        finally:
            elsewhere.values = ()

    apply.__name__ = apply.__qualname__ = f"{plan.region.function.__name__}_apply"
    return apply


def _subclass(plan: ForwardPlan, gm: GraphModule, elsewhere: threading.local) -> Any:
    region = plan.region
    cls: Any = region.function

    def forward(ctx: Any, *args: Any) -> Any:
        return plan.run(ctx, gm, (*args, *elsewhere.values))

    names: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "forward": staticmethod(forward),
        "setup_context": staticmethod(_SingleLevelFunction.setup_context),
    }
    if plan.kept:
        given = len(region.result)
        name = "backward" if cls.vjp is torch.autograd.Function.vjp else "vjp"

        def backward(ctx: Any, *grads: Any) -> Any:
            return getattr(cls, name)(ctx, *grads[:given])

        names[name] = staticmethod(backward)
    return type(cls.__name__, (cls,), names)
