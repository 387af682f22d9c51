"""Does a compiled model do what the eager one does: results, state, operators, nothing opaque."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# What torch.nn.Module itself keeps on an instance.
MODULE_STATE = frozenset(vars(nn.Module()))


def differences(
    expected: Any,
    actual: Any,
    path: str = "result",
    tolerance: tuple[float, float] | None = None,
) -> Iterator[str]:
    """Where two results differ in type, structure or value.

    Tensors may differ within their dtype's usual tolerance, or within a relative and an absolute
    one that are given.
    """
    rtol, atol = tolerance or (None, None)
    if type(expected) is not type(actual):
        yield f"{path}: {type(actual).__name__} in place of {type(expected).__name__}"
    elif isinstance(expected, Tensor):
        try:
            torch.testing.assert_close(
                actual, expected, rtol=rtol, atol=atol, check_stride=True, equal_nan=True
            )
        except AssertionError as error:
            yield f"{path}: {str(error).splitlines()[0]}"
    elif dataclasses.is_dataclass(expected):
        yield from differences(vars(expected), vars(actual), path, tolerance)
    elif isinstance(expected, Mapping):
        if expected.keys() != actual.keys():
            missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
            yield f"{path}: without {sorted(missing)}, with {sorted(extra)} more"
        elif list(expected) != list(actual):
            yield f"{path}: the order of keys is {list(actual)} in place of {list(expected)}"
        else:
            for key, value in expected.items():
                yield from differences(value, actual[key], f"{path}[{key!r}]", tolerance)
    elif isinstance(expected, list | tuple):
        if len(expected) != len(actual):
            yield f"{path}: {len(actual)} items in place of {len(expected)}"
        else:
            for i, pair in enumerate(zip(expected, actual, strict=True)):
                yield from differences(*pair, f"{path}[{i}]", tolerance)
    elif isinstance(expected, bool | int | float | str | None) and expected != actual:
        yield f"{path}: {actual!r} in place of {expected!r}"


def module_state(model: nn.Module) -> dict[str, Any]:
    """Everything that a call can have left on a model: its own attributes, buffers, gradients."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in MODULE_STATE}
        state |= {f"{name}.{key}": value for key, value in own.items() if is_plain(value)}
    state |= dict(model.named_buffers())
    return state | {f"{name}.grad": value.grad for name, value in model.named_parameters()}


def is_plain(value: Any) -> bool:
    """Is this a tensor, a number, text, or a list or tuple of such?"""
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return isinstance(value, Tensor | bool | int | float | str | None)


def opaque_nodes(graph: torch.fx.GraphModule) -> list[str]:
    """The nodes that are no torch operators: calls of modules or of Python code of the user's."""
    opaque = []
    for node in graph.graph.nodes:
        if node.op == "call_module":
            opaque.append(str(node.target))
        elif node.op == "call_method" and not hasattr(Tensor, node.target):
            opaque.append(node.target)
        elif node.op == "call_function" and not is_torch_operator(node.target):
            opaque.append(torch.fx.node._get_qualified_name(node.target))
    return opaque


def is_torch_operator(target: Any) -> bool:
    """Is it torch's own, or one of Python's operators, which call torch's?"""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    name = getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or ""
    return (
        target is getattr(operator, name, None)
        or module.split(".")[0] == "torch"
        or (
            hasattr(torch._C._VariableFunctions, name) or hasattr(Tensor, name) or target is getattr
        )
    )


def operator_differences(eager: Counter[str], replay: Counter[str]) -> str:
    """`+2 aten::mm -1 aten::add` for what a replay dispatches more and less often than eager."""
    names = sorted(eager.keys() | replay.keys())
    changes = ((replay[name] - eager[name], name) for name in names)
    return " ".join(f"{count:+d} {name}" for count, name in changes if count)
