"""Generators of random numbers outside torch: their states, and copies to try a draw on."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

GLOBAL_GENERATORS: tuple[Any, ...] = (random.random.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]
"""Those behind the functions of `random` and `numpy.random`."""

_PythonGenerator: Any = random.Random.__mro__[1]
"""The part in C; the other part's state is an attribute, which the program is seen to use."""


def state_of(generator: Any) -> Any:
    """What a generator's next numbers depend on."""
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _PythonGenerator.getstate(generator)


def copy_with(generator: Any, state: Any) -> Any:
    """Another generator of the same kind in some state."""
    copy: Any
    if isinstance(generator, np.random.RandomState):
        copy = np.random.RandomState(0)
        copy.set_state(state)
    else:
        copy = random.Random()
        _PythonGenerator.setstate(copy, state)
    return copy


def same_state(one: Any, other: Any) -> bool:
    """Whether two generators go on alike."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    return same_draw(one, other)


def same_draw(expected: Any, value: Any) -> bool:
    """Whether two draws gave the same, bit for bit."""
    if type(expected) is not type(value):
        return False
    if isinstance(expected, np.ndarray):
        same_type = expected.dtype == value.dtype and expected.shape == value.shape
        return bool(same_type and expected.tobytes() == value.tobytes())
    return bool(expected == value)


def repeated(func: Callable[..., Any], args: Any, kwargs: Any, copies: dict[int, Any]) -> Any:
    """What a method of a generator gives on a copy, which is made where there is none yet."""
    generator = func.__self__  # type: ignore[attr-defined]
    copy = copies.get(id(generator))
    if copy is None:
        copy = copies[id(generator)] = copy_with(generator, state_of(generator))
    return getattr(copy, func.__name__)(*args, **kwargs)
