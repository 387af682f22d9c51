"""The tape.

Grammar::

    Tape := n_inputs Step* result
    Step := slot ":=" function(argument*) frees slot*
    argument, result := Slot(number) | constant, nested in lists, tuples, dicts and slices
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

__all__ = ["Slot", "Step", "Tape"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the value of a step, or for an input."""

    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


@dataclass(frozen=True, slots=True)
class Step:
    """One call; afterwards the slots in ``frees`` are empty."""

    slot: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    frees: tuple[int, ...]

    def __str__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        frees = f"  frees {', '.join(f'%{n}' for n in self.frees)}" if self.frees else ""
        return f"%{self.slot} := {self.function}({', '.join(arguments)}){frees}"


@dataclass(frozen=True, slots=True)
class Tape:
    """A graph as straight-line code over numbered slots."""

    n_inputs: int
    n_slots: int
    constants: Mapping[int, Any]
    steps: tuple[Step, ...]
    result: Any

    @staticmethod
    def from_graph(gm: GraphModule, *, keep: bool = False) -> Tape:
        """Lay out a functional ATen graph."""
        number = {node: i for i, node in enumerate(n for n in gm.graph.nodes if n.op != "output")}

        def slot_of(argument: Any) -> Any:
            return Slot(number[argument]) if isinstance(argument, Node) else argument

        def slots(argument: Any) -> Any:
            return map_aggregate(argument, slot_of)

        constants: dict[int, Any] = {}
        steps: list[Step] = []
        last_use = {node: user for user in gm.graph.nodes for node in user.all_input_nodes}
        result: Any = ()
        n_inputs = 0
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                n_inputs += 1
            elif node.op == "get_attr":
                constants[number[node]] = attrgetter(node.target)(gm)
            elif node.op == "output":
                result = slots(node.args[0])
            else:
                done = [n for n in node.all_input_nodes if last_use[n] is node]
                frees = () if keep else tuple(sorted(number[n] for n in done))
                steps.append(
                    Step(number[node], node.target, slots(node.args), slots(node.kwargs), frees)
                )
        return Tape(n_inputs, len(number), constants, tuple(steps), result)

    def run(self, *inputs: Any) -> Sequence[Any]:
        """Play the tape."""
        values: list[Any] = [*inputs, *([None] * (self.n_slots - len(inputs)))]
        for slot, constant in self.constants.items():
            values[slot] = constant

        def value_of(argument: Any) -> Any:
            return values[argument.number] if isinstance(argument, Slot) else argument

        def fill(argument: Any) -> Any:
            return map_aggregate(argument, value_of)

        for step in self.steps:
            values[step.slot] = step.function(*fill(step.args), **fill(step.kwargs))
            for slot in step.frees:
                values[slot] = None
        outputs: Sequence[Any] = fill(self.result)
        return outputs

    def __str__(self) -> str:
        head = f"tape({', '.join(f'%{i}' for i in range(self.n_inputs))})"
        return "\n".join([head, *(f"  {step}" for step in self.steps), f"  return {self.result!r}"])
