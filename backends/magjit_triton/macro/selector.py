"""The choice at run time: the cost model in C, made from a repository's numbers."""

from __future__ import annotations

from magjit_triton._select import MOST_CANDIDATES, Selector
from magjit_triton.macro.waves import Model

__all__ = ["MOST_CANDIDATES", "Selector", "compiled"]


def compiled(model: Model) -> Selector:
    """A model in C: it chooses what ``model.choose`` does.

    Raises:
        ValueError: the model has numbers that no measurement gives.
    """
    library = model.library
    return Selector(
        [one.numbers() for one in model.candidates],
        None if library is None else library.knots,
        None if library is None else library.values,
        [one.residuals for one in model.candidates],
        multiprocessors=model.multiprocessors,
        bandwidth=model.bandwidth,
        products=model.products,
        itemsize=model.itemsize,
        unit=model.unit,
        between=model.between,
    )
