"""From the torch-level graph of a program to functional ATen, without AOTAutograd's cost.

Where no gradient is asked for, one trace over fake tensors does.  Programs that write
intermediate tensors are traced through functionalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from magjit.plugin import runnable
from magjit_dvm.recording import NotRecorded, record
from magjit_dvm.simplify import make_functional

__all__ = ["decompositions", "lower_for_inference"]

aten = torch.ops.aten


@cache
def decompositions() -> dict[Any, Any]:
    """Operators whose parts the VM has: those with several reductions, losses, backwards.

    What only handlers know how to do well (softmax, layer norm, GELU …) is not among them.
    """
    names = (
        "binary_cross_entropy",
        "binary_cross_entropy_backward",
        "binary_cross_entropy_with_logits",
        "celu",
        "elu_backward",
        "glu_backward",
        "hardsigmoid_backward",
        "hardswish_backward",
        "hardtanh_backward",
        "huber_loss",
        "huber_loss_backward",
        "leaky_relu_backward",
        "log_sigmoid_backward",
        "log_sigmoid_forward",
        "mish",
        "mse_loss",
        "mse_loss_backward",
        "native_batch_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm_backward",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "smooth_l1_loss",
        "smooth_l1_loss_backward",
        "soft_margin_loss",
        "softplus_backward",
    )
    operators = [getattr(aten, name) for name in names if hasattr(aten, name)]
    table = dict(torch._decomp.get_decompositions(operators))
    table[aten.native_dropout.default] = _native_dropout
    for operator in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
        table[operator] = partial(_nll_loss, operator)
    return table


def _native_dropout(
    given: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask is drawn by ATen, from eager's generator in eager's order; the rest is the VM's."""
    if train is False or p == 0 or not given.dtype.is_floating_point:
        return NotImplemented  # type: ignore[no-any-return]
    if p == 1:  # for which eager's dropout draws nothing
        return given * 0, torch.zeros_like(given, dtype=torch.bool)
    if given.dtype in (torch.float32, torch.float64) and given.is_contiguous():
        mask: torch.Tensor = aten.bernoulli.p(given, 1 - p)  # one operator instead of two
    else:
        mask = aten.bernoulli.p(torch.empty_like(given, dtype=torch.bool), 1 - p)
    return given * mask * (1.0 / (1.0 - p)), mask.to(torch.bool)


def _nll_loss(
    operator: Any,
    given: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's loss apart from their mean or sum, which reduce other loops than softmax."""
    if reduction == 0 or given.dim() < 2:
        return NotImplemented  # type: ignore[no-any-return]
    losses = operator(given, target, weight, 0, ignored)[0]
    if weight is None:
        total = (target != ignored).sum().to(given.dtype)
    else:
        each = weight.view(1, -1, *([1] * (given.dim() - 2))).expand(given.shape)
        total = -operator(each, target, None, 0, ignored)[0].sum()
    loss = losses.sum()
    return (loss / total if reduction == 1 else loss), total


def lower_for_inference(
    gm: GraphModule, example_inputs: Sequence[Any], fake_mode: FakeTensorMode | None
) -> GraphModule | None:
    """The ATen graph that ``gm`` runs for inputs like these fake ones.

    Returns:
        None where the program writes its inputs, or writes anything while sizes are symbols:
        what then holds of them (which of them overlap) is for AOTAutograd to find out.
    """
    function = runnable(gm)
    symbolic = any(_has_symbols(one) for one in example_inputs)
    lowered = _recorded(function, example_inputs, fake_mode)
    if lowered is None:
        lowered = _traced(function, example_inputs, fake_mode)
    if _written(lowered):
        if symbolic:
            return None
        functional = torch.func.functionalize(function, remove="mutations")
        lowered = _traced(functional, example_inputs, fake_mode)
        if any(node.op == "placeholder" for node in _written(lowered)):
            return None
    return lowered


def _recorded(
    function: Callable[..., Any], example_inputs: Sequence[Any], fake_mode: FakeTensorMode | None
) -> GraphModule | None:
    if fake_mode is None:
        return None
    try:
        with _taking_constants(fake_mode), _following_symbols(example_inputs):
            return _cleaned(record(function, example_inputs, fake_mode, decompositions()))
    except NotRecorded:
        return None


def _traced(
    function: Callable[..., Any], example_inputs: Sequence[Any], fake_mode: FakeTensorMode | None
) -> GraphModule:
    def flat(*inputs: Any) -> Any:  # make_fx counts parameters, which bound methods hide
        return function(*inputs)

    with torch.no_grad(), _taking_constants(fake_mode), _following_symbols(example_inputs):
        lowered: GraphModule = make_fx(flat, decompositions(), _allow_non_fake_inputs=True)(
            *example_inputs
        )
    return _cleaned(lowered)


def _following_symbols(example_inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """Composite operators in C++ ask for sizes as numbers; their Python counterparts do not."""
    symbolic = any(_has_symbols(one) for one in example_inputs)
    return enable_python_dispatcher() if symbolic else nullcontext()


def _cleaned(lowered: GraphModule) -> GraphModule:
    make_functional(lowered.graph)
    lowered.graph.eliminate_dead_code(_has_effects)
    return lowered


def _written(gm: GraphModule) -> list[Node]:
    """What the operators of an ATen graph write."""
    found: list[Node] = []
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            found += node.all_input_nodes
    return found


def _has_symbols(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _has_effects(node: Node) -> bool:
    """Whether a node matters although nothing uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags


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
