"""The choice of a macro-kernel, in C; ``macro/waves.py`` is its reference."""

from collections.abc import Sequence

MOST_CANDIDATES: int

class Selector:
    """Chooses among candidates by the sizes of a product.

    Args:
        candidates: ``Candidate.numbers()`` of each.
        knots, values: of the library's table; ``None`` where it was not measured.
        residuals: of each candidate one for each value, or none.
        between: ``Model.between``, 0 to 1: the library's time is multiplied by it where n or k is
            no knot.
    """

    def __new__(
        cls,
        candidates: Sequence[Sequence[float]],
        knots: tuple[Sequence[float], Sequence[float], Sequence[float]] | None,
        values: Sequence[float] | None,
        residuals: Sequence[Sequence[float]] = ...,
        *,
        multiprocessors: int,
        bandwidth: float,
        products: int,
        itemsize: int,
        unit: int,
        between: float = 1.0,
    ) -> Selector: ...
    def choose(self, batch: int, m: int, n: int, k: int, /) -> tuple[int, int, float]: ...
    def estimates(self, batch: int, m: int, n: int, k: int, /) -> tuple[float, ...]: ...
    def benchmark(self, batch: int, m: int, n: int, k: int, calls: int, /) -> float: ...
