"""FX nodes for single calls, with fake values of static or symbolic sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._pytree import tree_map


@dataclass
class Built:
    """A graph of calls with the real value of each node."""

    symbolic: bool = False
    graph: Graph = field(default_factory=Graph)
    values: dict[Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)

    def input(self, tensor: torch.Tensor) -> Node:
        node = self.graph.placeholder(f"x{len(self.values)}")
        self.values[node] = tensor
        kind = DimDynamic.DYNAMIC if self.symbolic else DimDynamic.STATIC
        node.meta["val"] = self.mode.from_tensor(
            tensor,
            source=ConstantSource(f"{node.name}"),
            symbolic_context=StatelessSymbolicContext([kind] * tensor.dim()),
        )
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)

        def real(one: Any) -> Any:
            return self.values[one] if isinstance(one, Node) else one

        def fake(one: Any) -> Any:
            return one.meta["val"] if isinstance(one, Node) else one

        self.values[node] = target(*tree_map(real, args), **tree_map(real, kwargs))
        with self.mode:
            node.meta["val"] = target(*tree_map(fake, args), **tree_map(fake, kwargs))
        return node

    @property
    def sizes(self) -> dict[str, int]:
        """The value of each size symbol."""
        return {
            str(symbol): int(value) for symbol, value in self.shape_env.backed_var_to_val.items()
        }
