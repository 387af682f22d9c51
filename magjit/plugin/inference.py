"""From the torch-level graph of a program to functional ATen, without AOTAutograd's cost.

Where no gradient is asked for, one trace over fake tensors does.  Programs that write
intermediate tensors are traced through functionalisation.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from magjit.plugin.aliases import is_strided, memory_of, storage_of, written_by
from magjit.plugin.context import BackendContext
from magjit.plugin.draws import as_eager_draws
from magjit.plugin.functional import can_be_functional
from magjit.plugin.fx_helpers import placeholders, runnable
from magjit.plugin.fx_nodes import enables_gradients, remove_unused
from magjit.plugin.layers.recorded import in_layers
from magjit.plugin.recording import NotRecorded, record
from magjit.plugin.recurrent import recurrent_as_it_is
from magjit.plugin.sizes import magnitude
from magjit.plugin.symbols import is_symbolic

__all__ = [
    "draw_in_place",
    "lower_for_inference",
    "needs_gradients",
    "on_fakes",
    "order_of",
    "written_inputs",
]

aten = torch.ops.aten

Decompositions = Mapping[Any, Callable[..., Any]]


def needs_gradients(gm: Any, example_inputs: Sequence[Any], context: BackendContext) -> bool:
    """Whether a graph of these inputs may have a backward: grad mode is on, at the start or later.

    Args:
        gm, example_inputs, context: as ``Backend.compile`` is given them.
    """
    tensors = (one for one in example_inputs if isinstance(one, torch.Tensor))
    if not any(one.requires_grad for one in tensors):
        return False
    return context.grad_enabled or enables_gradients(gm)


def lower_for_inference(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    fake_mode: FakeTensorMode | None,
    decompositions: Decompositions,
    *,
    with_writes: bool = True,
    to_inputs: bool = False,
) -> GraphModule | None:
    """The ATen graph that ``gm`` runs for inputs like these fake ones.

    Args:
        gm, example_inputs: as ``Backend.compile`` is given them.
        fake_mode: the context's.
        decompositions: ATen operator to function.
        with_writes: whether to trace programs that write intermediate tensors, too.
        to_inputs: whether a graph may end in ``copy_`` to inputs that the program writes, where
            these share memory with no other input and with no result.

    Returns:
        None where the program writes its inputs otherwise, or writes anything while sizes are
        symbols: what then holds of them (which of them overlap) is for AOTAutograd to find out.
        None also where recurrent layers have to run as they are.
    """
    if recurrent_as_it_is(gm, example_inputs):
        return None
    function, table = runnable(gm), as_eager_draws(decompositions)
    symbolic = any(map(is_symbolic, example_inputs))
    with on_fakes(example_inputs, fake_mode):
        lowered = _recorded(gm, example_inputs, fake_mode, table)
        if lowered is None:
            lowered = _traced(function, example_inputs, table)
        if _has_writes(lowered):
            inputs = written_inputs(lowered)
            if symbolic or not (to_inputs if inputs else with_writes):
                return None
            if inputs and not _written_alone(gm, lowered, inputs, example_inputs):
                return None
            functional = torch.func.functionalize(function, remove="mutations")
            lowered = _traced(functional, example_inputs, table)
            if not _writes_at_the_end(lowered, len(inputs)):
                return None
    return lowered


def _recorded(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    fake_mode: FakeTensorMode | None,
    decompositions: Decompositions,
) -> GraphModule | None:
    if fake_mode is None:
        return None
    function, layers = in_layers(gm)
    env = fake_mode.shape_env
    # What it has made when it gives up, nobody asks for.
    fresh = nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
    try:
        with fresh:
            return _cleaned(record(function, example_inputs, fake_mode, decompositions, layers))
    except NotRecorded:
        return None


def _traced(
    function: Callable[..., Any], example_inputs: Sequence[Any], decompositions: Decompositions
) -> GraphModule:
    def flat(*inputs: Any) -> Any:  # make_fx counts parameters, which bound methods hide
        return function(*inputs)

    trace = make_fx(flat, dict(decompositions), _allow_non_fake_inputs=True)
    return _cleaned(trace(*example_inputs))


def _cleaned(lowered: GraphModule) -> GraphModule:
    _make_functional(lowered.graph)
    remove_unused(lowered.graph)
    return lowered


def _has_writes(gm: GraphModule) -> bool:
    """Whether an operator of an ATen graph may write what it is given."""
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            return True
    return False


def written_inputs(lowered: GraphModule) -> set[Node]:
    """The placeholders of an ATen graph whose memory it may write."""
    written = (one for node in lowered.graph.nodes for one in written_by(node))
    return {one for one in memory_of(written) if one.op == "placeholder"}


def _written_alone(
    gm: GraphModule, lowered: GraphModule, inputs: set[Node], example_inputs: Sequence[Any]
) -> bool:
    """Whether nothing else that anybody sees lies in the memory of the inputs that are written."""
    if not can_be_functional(gm, example_inputs):
        return False
    (output,) = (node for node in lowered.graph.nodes if node.op == "output")
    if not inputs.isdisjoint(memory_of(output.all_input_nodes)):
        return False
    values = {node: node.meta["val"] for node in placeholders(lowered)}
    memory = {node: storage_of(value) for node, value in values.items() if is_strided(value)}
    count = Counter(memory.values())
    return all(one in memory and count[memory[one]] == 1 for one in inputs)


def _writes_at_the_end(lowered: GraphModule, count: int) -> bool:
    """Whether all that a graph writes is ``count`` of its inputs, as a whole and once."""
    writes = [(node, one) for node in lowered.graph.nodes for one in written_by(node)]
    written = {one for _, one in writes}
    return len(written) == len(writes) == count and all(
        node.target is aten.copy_.default and one.op == "placeholder" for node, one in writes
    )


@contextmanager
def on_fakes(example_inputs: Sequence[Any], fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Within it, a torch-level graph runs on its fake inputs and without gradients.

    Args:
        example_inputs, fake_mode: as `lower_for_inference` is given them.
    """
    # Composite operators in C++ ask for sizes as numbers; their Python counterparts do not.
    symbolic = any(map(is_symbolic, example_inputs))
    symbols = enable_python_dispatcher() if symbolic else nullcontext()
    with torch.no_grad(), _taking_constants(fake_mode), symbols:
        yield


@contextmanager
def _taking_constants(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Tensors that the graph holds are real; the mode's owner does not expect any."""
    if fake_mode is None:
        yield
        return
    before = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True
    try:
        with fake_mode:
            yield
    finally:
        fake_mode.allow_non_fake_inputs = before


# -- writes to tensors of the graph itself ---------------------------------------------------------


def _make_functional(graph: Graph) -> None:
    """Replace writes to tensors that the graph itself has made and that nothing else shares."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    drawn: list[Node] = []
    for node in order:
        functional = _functional(node)
        if functional is None:
            continue
        base, here = node.args[0], order[node]
        node.target = functional
        if functional is aten.bernoulli.p:
            node.args = (base, *(node.args[1:] or (0.5,)))  # a default of the other alone
            drawn.append(node)
        # Whoever comes after reads the new value.
        base.replace_all_uses_with(node, delete_user_cb=lambda user, here=here: order[user] > here)
    for node in drawn:
        draw_in_place(graph, node)


def _functional(node: Node) -> Any:
    """The operator that computes what ``node`` writes into its first operand, if that is all."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or node.kwargs.get("out") is not None:
        return None
    base = node.args[0] if node.args else None
    if not isinstance(base, Node) or not _is_fresh(base):
        return None
    packet, _, overload = str(node.target).removeprefix("aten.").partition(".")
    overload = "p" if node.target is aten.bernoulli_.float else overload
    found = getattr(getattr(aten, packet.removesuffix("_"), None), overload, None)
    if not packet.endswith("_") or found is None or found._schema.is_mutable:
        return None
    written = base.meta["val"]
    for other in node.all_input_nodes:
        value = other.meta["val"]
        if isinstance(value, torch.Tensor) and value.dtype != written.dtype:
            return None
    names = [one.name for one in schema.arguments]
    return found if [one.name for one in found._schema.arguments] == names else None


def _is_fresh(node: Node) -> bool:
    """Whether nobody but direct users of ``node`` sees its memory."""
    maker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(maker, Node) or not _makes_new(maker):
        return False
    return all(_makes_new(user) or _writes_only_first(user, node) for user in node.users)


def _makes_new(node: Node) -> bool:
    if node.op == "output":
        return True
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.is_mutable:
        return False
    return all(one.alias_info is None for one in schema.returns)


def _writes_only_first(node: Node, base: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or node.args[0] is not base:
        return False
    return str(node.target).split(".")[1].endswith("_")


def draw_in_place(graph: Graph, node: Node) -> None:
    """Draw into a new tensor in the order of its memory, as the operator that writes it does.

    Lowering has made it one that returns a contiguous tensor, drawn in that order.
    """
    blank = node.args[0]
    assert isinstance(blank, Node)
    order = order_of(blank.meta["val"])
    if order == tuple(range(len(order))):
        return
    back = sorted(range(len(order)), key=order.__getitem__)
    with graph.inserting_before(node):
        turned = graph.call_function(aten.permute.default, (blank, list(order)))
        turned.meta["val"] = blank.meta["val"].permute(order)
        drawn = graph.call_function(aten.bernoulli.p, (turned, *node.args[1:]), node.kwargs)
        drawn.meta["val"] = turned.meta["val"]
        made = graph.call_function(aten.permute.default, (drawn, back))
        made.meta["val"] = drawn.meta["val"].permute(back)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's dimensions from the outermost in memory inwards."""
    strides = [magnitude(stride) for stride in tensor.stride()]
    return tuple(sorted(range(len(strides)), key=lambda k: (-strides[k], k)))
