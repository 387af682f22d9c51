"""Which layers come again, and what AOTAutograd makes of one of them alone."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magjit.plugin.aliases import storage_of
from magjit.plugin.fx_helpers import runnable
from magjit.plugin.layers.expansion import Expansion
from magjit.plugin.layers.operators import (
    Form,
    Unfit,
    described,
    fresh,
    new_number,
    refused,
    run_layer,
    traced,
)
from magjit.plugin.layers.repeats import Repeat, Window, apart, in_pieces, repeats_of

__all__ = ["Layers", "once"]

logger = logging.getLogger(__name__)

Decompositions = Mapping[Any, Callable[..., Any]]

LEAST_SAVED = 48
"""Nodes that AOTAutograd need not look at again; for less it is not begun a second time."""

FORMS = 3
"""How many traces of a layer there may be, for inputs that differ in layout or in gradients."""

TRIES = 2
"""How often layers are traced once before the program is traced as a whole."""


class _Traced(Exception):
    """Ends AOTAutograd where it has traced the layer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A window that is one operator: what it consists of, and its inputs, tensors first."""

    window: Window
    form: Form
    inputs: tuple[Node, ...]


@dataclass(slots=True)
class Layers:
    """A program with layers in one piece, and what they consist of; for one compilation.

    Attributes:
        graph: what AOTAutograd is to trace, within `traced`.
        expanded: whether the joint graph is what it would have been without them.
    """

    gm: GraphModule
    pieces: dict[int, Piece]
    graph: GraphModule = field(init=False)
    expanded: bool = False
    refused: frozenset[int] = frozenset()
    tries: int = 1

    def __post_init__(self) -> None:
        windows = {number: (one.window, one.inputs) for number, one in self.pieces.items()}
        self.graph = in_pieces(self.gm, windows, run_layer)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Within it, AOTAutograd can trace the graph."""
        try:
            with traced({number: piece.form for number, piece in self.pieces.items()}):
                yield
        finally:
            self.refused = frozenset(refused)
            if self.expanded:  # What is compiled refers to the function that split its joint graph.
                self.pieces = {}

    def expand(self, joint: GraphModule) -> None:
        """Put the traced nodes in the place of the layers' operators, in place.

        Raises:
            Unfit: a layer's backward is another than was traced.
        """
        for reason in refused.values():
            raise Unfit(reason)
        Expansion(joint.graph, {number: one.form for number, one in self.pieces.items()}).run()
        joint.graph.lint()
        joint.recompile()
        self.expanded = True

    def without_refused(self) -> Layers | None:
        """For another try, after one that has failed; None: the program is one whole."""
        if not self.refused or self.tries == TRIES:
            return None
        kept = {number: one for number, one in self.pieces.items() if number not in self.refused}
        return Layers(self.gm, kept, tries=self.tries + 1) if len(kept) > 1 else None


def once(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    fake_mode: FakeTensorMode | None,
    decompositions: Decompositions,
) -> Layers | None:
    """The program with repeated layers in one piece; None where this is of no use.

    Args:
        gm: torch-level, as ``Backend.compile`` is given it; it is left as it is.
        example_inputs: fake tensors and symbols, as ``Backend.compile`` is given them.
        fake_mode: theirs.
        decompositions: as AOTAutograd is given them.
    """
    repeats = repeats_of(gm.graph, LEAST_SAVED) if fake_mode is not None else []
    if fake_mode is None or not repeats:
        return None
    walk = _Walk(gm, fake_mode, decompositions)
    grad_enabled = torch.is_grad_enabled()
    try:
        pieces = walk.run(repeats, example_inputs)
    except Exception as error:  # The program as a whole may still be traced, or say what is wrong.
        logger.debug("layers are not traced once", exc_info=error)
        return None
    finally:
        torch._C._set_grad_enabled(grad_enabled)
    return Layers(gm, pieces) if pieces else None


_OTHER = frozenset({torch.ops.aten.convolution.default})
"""Operators whose results a backend's decomposition may lay out otherwise."""


class _Laid(TorchDispatchMode):
    """Has such operators give what AOTAutograd will be given."""

    def __init__(self, decompositions: Decompositions) -> None:
        super().__init__()
        self._decompositions = decompositions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        decomposition = self._decompositions.get(func)
        if decomposition is not None:
            with self:
                result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


@dataclass(slots=True)
class _Walk:
    """Goes over the program, to find out what the layers' inputs are like."""

    gm: GraphModule
    fake_mode: FakeTensorMode
    decompositions: Decompositions
    values: dict[Node, Any] = field(default_factory=dict)
    layouts: dict[Any, Callable[..., Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.layouts = {
            one: self.decompositions[one] for one in _OTHER & self.decompositions.keys()
        }

    def run(self, repeats: Sequence[Repeat], example_inputs: Sequence[Any]) -> dict[int, Piece]:
        """By number, the windows whose form others have, too."""
        begins = {one.nodes[0]: (k, one) for k, each in enumerate(repeats) for one in each.windows}
        forms: list[dict[Any, Form | None]] = [{} for _ in repeats]
        pieces: list[Piece] = []
        given = iter(example_inputs)
        inside: set[Node] = set()
        left = len(begins)
        for node in self.gm.graph.nodes:
            if node in begins:
                left -= 1
                k, window = begins[node]
                piece = self._piece(window, forms[k])
                if piece is not None:
                    pieces.append(piece)
                    inside.update(window.nodes)
            if node.op == "placeholder":
                self.values[node] = next(given)
            elif node.op != "get_attr" and node not in inside:
                if not left:
                    break
                self.values[node] = self._computed(node)
        uses = Counter(id(piece.form) for piece in pieces)
        return {new_number(): piece for piece in pieces if uses[id(piece.form)] > 1}

    def _computed(self, node: Node) -> Any:
        args = map_arg(node.args, self._value)
        kwargs = map_arg(node.kwargs, self._value)
        with self._on_fakes():
            if isinstance(node.target, str):
                return getattr(args[0], node.target)(*args[1:], **kwargs)
            return node.target(*args, **kwargs)

    @contextmanager
    def _on_fakes(self) -> Iterator[None]:
        # Composite operators in C++ ask for sizes as numbers; their Python counterparts do not.
        with ExitStack() as stack:
            stack.enter_context(self.fake_mode)
            if (shape_env := self.fake_mode.shape_env) is not None:
                stack.enter_context(enable_python_dispatcher())
                stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
            if self.layouts:
                stack.enter_context(_Laid(self.layouts))
            yield

    def _value(self, node: Node) -> Any:
        if node not in self.values:
            raise Unfit(f"{node.name} is a constant")
        return self.values[node]

    def _piece(self, window: Window, forms: dict[Any, Form | None]) -> Piece | None:
        """One with values for its outputs, unless it is to remain as it is."""
        if not torch.is_grad_enabled():
            return None
        tensors: list[Node] = []
        sizes: list[Node] = []
        try:
            for node in window.inputs:
                one = self._value(node)
                (tensors if isinstance(one, Tensor) else sizes).append(node)
            values = [self.values[node] for node in (*tensors, *sizes)]
            kinds = described(values)
            if kinds not in forms and len(forms) < FORMS:
                forms[kinds] = None
                forms[kinds] = self._traced(window, (*tensors, *sizes), values)
        except Unfit as reason:
            logger.debug("a layer is traced as a part of the whole: %s", reason)
            return None
        form = forms.get(kinds)
        if form is None:
            return None
        with self.fake_mode:
            for node, result in zip(window.outputs, form.results, strict=True):
                self.values[node] = fresh(result, result.requires_grad)
        return Piece(window, form, (*tensors, *sizes))

    def _traced(self, window: Window, inputs: Sequence[Node], values: Sequence[Any]) -> Form:
        """What AOTAutograd makes of the layer alone."""
        layer = apart(window, inputs)
        with self.fake_mode:
            examples = [
                fresh(one, one.requires_grad) if isinstance(one, Tensor) else one for one in values
            ]
        with self._on_fakes():
            results = runnable(layer)(*examples)  # no module's hooks
        if not torch.is_grad_enabled():
            torch._C._set_grad_enabled(True)
            raise Unfit("a layer ends without gradients")
        memory = Counter(
            storage_of(one) for one in (*examples, *results) if isinstance(one, Tensor)
        )
        if any(not isinstance(one, Tensor) or memory[storage_of(one)] > 1 for one in results):
            raise Unfit("a layer has a result that shares memory or is no tensor")
        joint = _joint_graph(layer, examples, len(results), self.fake_mode, self.decompositions)
        with self.fake_mode:
            results = tuple(fresh(one, one.requires_grad) for one in results)
        return _form_of(joint, values, results)


def _joint_graph(
    gm: GraphModule,
    examples: list[Any],
    outputs: int,
    fake_mode: FakeTensorMode,
    decompositions: Decompositions,
) -> GraphModule:
    from torch._functorch.aot_autograd import aot_module_simplified

    found: list[tuple[GraphModule, int]] = []

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        found.append((joint, num_fwd_outputs))
        raise _Traced

    def unreached(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise Unfit("a layer has no gradients")

    with tracing(TracingContext(fake_mode)):
        try:
            aot_module_simplified(
                gm,
                examples,
                fw_compiler=unreached,
                bw_compiler=unreached,
                inference_compiler=unreached,
                partition_fn=partition,
                decompositions=dict(decompositions),
            )
        except _Traced:
            pass
    if not found or found[0][1] != outputs:
        raise Unfit("a layer writes a tensor, or its results share memory")
    return found[0][0]


def _form_of(joint: GraphModule, values: Sequence[Any], results: tuple[Tensor, ...]) -> Form:
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    nodes = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
    if any(node.op != "call_function" for node in nodes):
        raise Unfit("a layer has constants")
    known = _symbols(values)
    if not _symbols([node.meta.get("val") for node in nodes]) <= known:
        raise Unfit("sizes of a layer depend on its data")
    (output,) = (node for node in joint.graph.nodes if node.op == "output")
    found = output.args[0]
    form = Form(
        described(values),
        results,
        tuple(placeholders[: len(values)]),
        tuple(placeholders[len(values) :]),
        tuple(nodes),
        tuple(found[: len(results)]),
        tuple(found[len(results) :]),
        _escaping(nodes, [one for one in found if one is not None]),
    )
    if sum(form.differentiable) != len(form.tangents) or len(form.gradients) != len(values):
        raise Unfit("a layer's joint graph has other inputs or results than were expected")
    return form


def _escaping(nodes: Sequence[Node], results: Sequence[Node]) -> frozenset[Node]:
    storages = {storage_of(one.meta["val"]) for one in results}
    return frozenset(
        node
        for node in nodes
        if isinstance(one := node.meta.get("val"), Tensor) and storage_of(one) in storages
    )


def _symbols(values: Sequence[Any]) -> set[Any]:
    found: set[Any] = set()
    for value in tree_leaves(list(values)):
        if isinstance(value, Tensor):
            found |= _symbols([*value.size(), *value.stride()])
        elif isinstance(value, SymInt):
            found |= value.node.expr.free_symbols
    return found
