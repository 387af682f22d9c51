"""Random numbers that the program draws; see `magjit.refgraph.numbers`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from magjit.annotations import Rule
from magjit.refgraph.generators import GLOBAL_GENERATORS
from magjit.refgraph.kinds import is_atom
from magjit.refgraph.number_values import Drawn
from magjit.refgraph.recorder import StateRecorder
from magjit.refgraph.stack import Post, put_on_stack

_DRAWS: dict[type, frozenset[str]] = {
    random.Random: frozenset({"random", "getrandbits"}),
    np.random.RandomState: frozenset(
        {"beta", "binomial", "chisquare", "choice", "dirichlet", "exponential", "f", "gamma"}
        | {"geometric", "gumbel", "hypergeometric", "laplace", "logistic", "lognormal"}
        | {"logseries", "multinomial", "multivariate_normal", "negative_binomial"}
        | {"noncentral_chisquare", "noncentral_f", "normal", "pareto", "permutation", "poisson"}
        | {"power", "rand", "randint", "randn", "random", "random_integers", "random_sample"}
        | {"rayleigh", "standard_cauchy", "standard_exponential", "standard_gamma"}
        | {"standard_normal", "standard_t", "triangular", "tomaxint", "uniform", "vonmises"}
        | {"wald", "weibull", "zipf"}
    ),
}
"""Methods of generators that only draw."""


def draw(
    rec: StateRecorder,
    rule: Rule,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    read: Callable[[Any], None],
) -> Post | None:
    """A method of a generator of random numbers; ``read`` is for its arguments."""
    generator = getattr(func, "__self__", None)
    if generator is None and args:  # a method that is bound by the call
        generator, *rest = args
        args = tuple(rest)
    reason = f"calls {rule.name}: {rule.reason or rule.kind.value}"
    known = any(generator is known for known in GLOBAL_GENERATORS)
    if (
        not known
        or func.__name__ not in _DRAWS[type(generator)]
        or rec.called_back
        or rec.checkpoint is not None
        or not rec.numbers.may_draw
    ):
        rec.split(reason)
        return None
    for value in (*args, *kwargs.values()):
        read(value)
    try:
        constants = tuple(map(_constant, args)), {k: _constant(v) for k, v in kwargs.items()}
    except TypeError:
        rec.split(reason)
        return None
    rec.numbers.pin(rec.numbers.among((*args, *kwargs.values())))
    rec.changes += 1
    location, frame_code = rec.location(), rec.state.code if rec.state is not None else None

    def note(top: tuple[Any, ...]) -> None:
        drawn = Drawn(getattr(generator, func.__name__), *constants, top[-1], reason, location)
        number = rec.numbers.draw(drawn)
        if number is not None:
            put_on_stack(rec, frame_code, number)

    return note


def _constant(value: Any) -> Any:
    """A copy of an argument; raises TypeError where it is not made of constants."""
    if is_atom(value):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_constant, value))
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return value.copy()
    raise TypeError
