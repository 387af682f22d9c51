"""Do two calls do the same: results, arguments afterwards, module state, printed text."""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What torch.nn.Module itself keeps on an instance, and the mark that torch.compile puts there.
_MODULE_STATE = frozenset(vars(nn.Module())) | {"training", "_is_torch_compile"}
_DEEPEST = 12


def first_difference(expected: Any, actual: Any, path: str = "result") -> str | None:
    """Where two values differ in structure, type or value; None where they agree.

    Tensors may differ within their dtype's usual tolerance (`torch.testing.assert_close`); objects
    of unknown kinds count as equal when their types are.
    """
    return next(_differences(expected, actual, path, 0), None)


def _differences(expected: Any, actual: Any, path: str, depth: int) -> Iterator[str]:
    if expected is actual or depth > _DEEPEST:
        return
    if not same_class(type(expected), type(actual)):
        yield f"{path}: {type(actual).__name__} in place of {type(expected).__name__}"
    elif isinstance(expected, Tensor):
        yield from _tensors(expected, actual, path)
    elif isinstance(expected, np.ndarray):
        if not _same_arrays(expected, actual):
            yield f"{path}: arrays differ"
    elif isinstance(expected, Mapping):
        yield from _mappings(expected, actual, path, depth)
    elif isinstance(expected, list | tuple | collections.deque):
        if len(expected) != len(actual):
            yield f"{path}: {len(actual)} items in place of {len(expected)}"
        for i, pair in enumerate(zip(expected, actual, strict=False)):
            yield from _differences(*pair, f"{path}[{i}]", depth + 1)
    elif isinstance(expected, bool | int | float | complex | str | bytes | np.generic):
        if not _same_scalars(expected, actual):
            yield f"{path}: {actual!r} in place of {expected!r}"[:300]
    elif isinstance(expected, nn.Module | type):
        return
    elif dataclasses.is_dataclass(expected) or hasattr(expected, "__dict__"):
        yield from _mappings(vars(expected), vars(actual), path, depth)


def same_class(one: type, other: type) -> bool:
    """The same, or twins that two calls have made, perhaps in the name of another module."""
    if one is other:
        return True
    names = [(cls.__qualname__, cls.__mro__[1:-1]) for cls in (one, other)]
    return names[0] == names[1] and not any(_find(cls) in (one, other) for cls in (one, other))


def _find(cls: type) -> Any:
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None)


def _mappings(
    expected: Mapping[Any, Any], actual: Mapping[Any, Any], path: str, depth: int
) -> Iterator[str]:
    if expected.keys() != actual.keys():
        missing, extra = ([*map(str, a.keys() - b.keys())] for a, b in _both(expected, actual))
        yield f"{path}: without {sorted(missing)}, with {sorted(extra)} more"[:300]
        return
    if list(expected) != list(actual):
        yield f"{path}: keys {list(actual)} in place of {list(expected)}"[:300]
        return
    for key, value in expected.items():
        yield from _differences(value, actual[key], f"{path}[{key!r}]"[:200], depth + 1)


def _both(a: Any, b: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (a, b), (b, a)


def _tensors(expected: Tensor, actual: Tensor, path: str) -> Iterator[str]:
    for what in ("dtype", "shape", "device", "layout", "requires_grad"):
        left, right = getattr(expected, what), getattr(actual, what)
        if left != right:
            yield f"{path}: {what} {right} in place of {left}"
            return
    with torch.no_grad():
        if expected.layout is torch.strided and torch.equal(expected, actual):
            return
        try:
            torch.testing.assert_close(actual, expected, equal_nan=True)
        except AssertionError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            yield f"{path}: {' '.join(lines)}"[:400]


def _same_arrays(expected: Any, actual: Any) -> bool:
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return False
    if expected.dtype.kind in "fc":
        return bool(np.allclose(expected, actual, rtol=1e-5, atol=1e-6, equal_nan=True))
    return expected.dtype.kind == "O" or bool(np.array_equal(expected, actual))


def _same_scalars(expected: Any, actual: Any) -> bool:
    if isinstance(expected, float | np.floating):
        if math.isnan(expected):
            return math.isnan(actual)
        return math.isclose(expected, actual, rel_tol=1e-5, abs_tol=1e-6)
    return bool(expected == actual)


def state_of(module: nn.Module) -> dict[str, Any]:
    """What a call can have left on a module: attributes of plain kinds, buffers, gradients."""
    state: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _MODULE_STATE and _is_plain(value, 0):
                state[f"{prefix}.{name}"] = value
        if not part.__dict__.get("_modules"):
            state[f"{prefix}.training"] = part.training
    return state | tensors_of(module)


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """Buffers and gradients."""
    state: dict[str, Any] = {f"buffer {name}": b for name, b in module.named_buffers()}
    return state | {f"{name}.grad": p.grad for name, p in module.named_parameters()}


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, list | tuple | dict | collections.deque) and depth < 4:
        items = value.values() if isinstance(value, dict) else value
        return len(value) < 1000 and all(_is_plain(item, depth + 1) for item in items)
    return isinstance(value, Tensor | bool | int | float | str | None)


def frozen(value: Any) -> Any:
    """A copy of a state that later calls leave alone."""
    return _mapped(value, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def without_graph(value: Any) -> Any:
    """A result that does not keep the tensors alive which autograd has saved for it."""
    return _mapped(value, _cut_off)


def _cut_off(tensor: Tensor) -> Tensor:
    if tensor.grad_fn is None or type(tensor) is not Tensor:
        return tensor
    return tensor.detach().requires_grad_()


def _mapped(value: Any, leaf: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return leaf(value)
    if type(value) is dict:
        return {key: _mapped(item, leaf) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, leaf) for item in value)
    return value
