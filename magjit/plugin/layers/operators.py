"""A layer as one operator, ``magjit::layer``, whose derivative is ``magjit::layer_backward``.

They are there for AOTAutograd's trace alone: they have no kernels, and what they would compute is
known only from the joint graph that was traced of the layer before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "Form",
    "Unfit",
    "described",
    "fresh",
    "new_number",
    "refused",
    "run_layer",
    "traced",
]


class Unfit(Exception):
    """A layer is to be traced as a part of the whole."""


@dataclass(frozen=True, slots=True)
class Form:
    """A layer's joint graph for inputs of one kind.

    Attributes:
        given: what its inputs, tensors and then sizes, are like (`described`).
        results: tensors like its outputs.
        primals, tangents: placeholders of the inputs, and of the gradients of those outputs that
            have one.
        nodes: everything else, in order.
        outputs, gradients: which of them are the results, and the inputs' gradients.
        escaping: nodes that share memory with one of these.
    """

    given: tuple[Any, ...]
    results: tuple[Tensor, ...]
    primals: tuple[Node, ...]
    tangents: tuple[Node, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]
    gradients: tuple[Node | None, ...]
    escaping: frozenset[Node]

    @property
    def differentiable(self) -> list[bool]:
        """Of each output."""
        return [result.requires_grad for result in self.results]


_forms: dict[int, Form] = {}
"""Of the layers of all programs that are being traced, by the layer's number."""

refused: dict[int, str] = {}
"""Of the program that is being traced, layers that are to be parts of the whole, and why."""

_numbers = itertools.count()


def new_number() -> int:
    """For one more layer of a program."""
    return next(_numbers)


@contextmanager
def traced(forms: Mapping[int, Form]) -> Iterator[None]:
    """Within it, layers of these numbers can be run on fake tensors."""
    _forms.update(forms)
    refused.clear()
    try:
        yield
    finally:
        for number in forms:
            del _forms[number]


def run_layer(number: int, inputs: list[Any]) -> Sequence[Tensor]:
    """What stands for a layer in the graph that AOTAutograd is given.

    Args:
        number: of the layer.
        inputs: tensors, and then sizes.

    Raises:
        Unfit: the inputs are not like those that the layer was traced for.
    """
    if described(inputs) != _forms[number].given:
        raise Unfit("a layer's inputs are others than were expected")
    tensors = [one for one in inputs if isinstance(one, Tensor)]
    sizes = inputs[len(tensors) :]
    results: Sequence[Tensor] = _Layer.apply(number, sizes, *tensors)
    return results


_library = torch.library.Library("magjit", "FRAGMENT")
_library.define("layer(int number, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")
_library.define(
    "layer_backward(int number, Tensor[] tensors, SymInt[] sizes, Tensor[] tangents) -> Tensor[]"
)


@torch.library.register_fake("magjit::layer", lib=_library)  # type: ignore[untyped-decorator]
def _layer(number: int, tensors: list[Tensor], sizes: list[Any]) -> list[Tensor]:
    return [fresh(result) for result in _forms[number].results]


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "magjit::layer_backward", lib=_library
)
def _layer_backward(
    number: int, tensors: list[Tensor], sizes: list[Any], tangents: list[Tensor]
) -> list[Tensor]:
    gradients = _forms[number].gradients
    return [fresh(node.meta["val"]) for node in gradients if node is not None]


def fresh(like: Tensor, requires_grad: bool = False) -> Tensor:
    """Another tensor of the same sizes, strides, dtype and device."""
    return torch.empty_strided(
        like.size(),
        like.stride(),
        dtype=like.dtype,
        device=like.device,
        requires_grad=requires_grad,
    )


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, sizes: list[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.number, ctx.sizes = number, sizes
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        results = torch.ops.magjit.layer(number, list(tensors), sizes)
        with_tangents = _forms[number].differentiable
        ctx.mark_non_differentiable(
            *(one for one, wanted in zip(results, with_tangents, strict=True) if not wanted)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        form = _forms[ctx.number]
        tensors = ctx.saved_tensors
        asked = [one for one, wanted in zip(tangents, form.differentiable, strict=True) if wanted]
        for tangent, node in zip(asked, form.tangents, strict=True):
            if reason := _unlike(tangent, node.meta["val"]):
                # Nothing is raised from here: autograd would print a warning.
                refused[ctx.number] = reason
        if ctx.number in refused:
            found = iter([torch.zeros_like(one) for one in _wanted(tensors, form)])
        else:
            backward = torch.ops.magjit.layer_backward
            found = iter(backward(ctx.number, list(tensors), ctx.sizes, asked))
        gradients = [None if node is None else next(found) for node in form.gradients]
        return None, None, *gradients[: len(tensors)]


def _wanted(tensors: Sequence[Tensor], form: Form) -> list[Tensor]:
    """The inputs that have gradients."""
    return [one for one, node in zip(tensors, form.gradients, strict=False) if node is not None]


def _unlike(tangent: Tensor | None, like: Tensor) -> str:
    """Why it is not what the layer's backward was traced for, if so."""
    if tangent is None:
        return "a result of a layer has no gradient"
    try:
        given, wanted = described([tangent])[0], described([like])[0]
    except Unfit as reason:
        return str(reason)
    return "" if given[:-1] == wanted[:-1] else "a layer's result has a gradient of another layout"


def described(values: Sequence[Any]) -> tuple[Any, ...]:
    """What a trace depends on; expressions of symbols are compared as they are written.

    Raises:
        Unfit: one of the values is neither a tensor with strides nor an integer.
    """
    return tuple(_tensor(one) if isinstance(one, Tensor) else _expression(one) for one in values)


def _tensor(value: Tensor) -> tuple[Any, ...]:
    if not _is_plain(value):
        raise Unfit("a layer has an input that is no plain tensor")
    sizes = tuple(map(_expression, value.size()))
    strides = tuple(map(_expression, value.stride()))
    return sizes, strides, value.dtype, value.device, value.requires_grad


def _is_plain(value: Tensor) -> bool:
    wrapped: bool = is_traceable_wrapper_subclass(value)
    if wrapped and not isinstance(value, FunctionalTensor):
        return False
    lazy = value.is_conj() or value.is_neg()
    return value.layout == torch.strided and not value.is_quantized and not lazy


def _expression(size: Any) -> Any:
    if isinstance(size, SymInt):
        return size.node.expr
    if type(size) is not int:
        raise Unfit(f"a layer has an input of type {type(size).__name__}")
    return size
