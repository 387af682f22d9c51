"""What a user can ask of the backend: a mode and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from magjit.plugin import BackendOptionError

__all__ = ["DEFAULTS", "MODES", "OBJECTIVES", "PRODUCTS", "Settings"]

OBJECTIVES = ("latency", "memory")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
PRODUCTS = ("auto", "library", "triton", "macro")
OPTIONS = ("objective", "matmul")


@dataclass(frozen=True, slots=True)
class Settings:
    """One mode and options; see ``MODES``, ``OBJECTIVES`` and ``PRODUCTS``.

    Attributes:
        mode: ``"reduce-overhead"`` and ``"max-autotune"`` replay inference on a GPU as CUDA
            graphs; the two of ``"max-autotune"`` measure where estimates are close.
        objective: what the search saves: ``"latency"`` (bytes moved) or ``"memory"`` (bytes
            allocated).
        matmul: whose products: ``"auto"``, our own where the estimate, or a measurement, says
            so, else the library's; ``"library"``; ``"triton"``, our own wherever legal;
            ``"macro"``, chosen at run time among macro-kernels and the library.

    Raises:
        BackendOptionError: a value is none of these.
    """

    mode: str = "default"
    objective: str = "latency"
    matmul: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise BackendOptionError(
                f"Backend 'triton' has no mode {self.mode!r}", remedy=f"modes: {', '.join(MODES)}"
            )
        if self.objective not in OBJECTIVES:
            raise BackendOptionError(
                f"Backend 'triton' has no objective {self.objective!r}",
                remedy=f"option 'objective': {', '.join(OBJECTIVES)}",
            )
        if self.matmul not in PRODUCTS:
            raise BackendOptionError(
                f"Backend 'triton' does not know matmul={self.matmul!r}",
                remedy=f"option 'matmul': {', '.join(PRODUCTS)}",
            )

    @classmethod
    def of(cls, mode: str | None, options: Mapping[str, Any] | None) -> Settings:
        """The settings that ``magjit.compile`` was given.

        Raises:
            BackendOptionError: a mode, an option or its value is unknown.
        """
        given = dict(options or {})
        unknown = [str(name) for name in given if name not in OPTIONS]
        if unknown:
            raise BackendOptionError(
                f"Backend 'triton' has no option {', '.join(map(repr, unknown))}",
                remedy=f"options: {', '.join(OPTIONS)}",
            )
        return cls("default" if mode is None else mode, **given)

    @property
    def cuda_graphs(self) -> bool:
        """Whether calls go through CUDA graphs."""
        return self.mode in ("reduce-overhead", "max-autotune")

    @property
    def measures(self) -> bool:
        """Whether choices are measured on the device."""
        return self.mode.startswith("max-autotune")

    @property
    def measures_places(self) -> bool:
        """Whether what is virtual of what is measured: times say nothing of memory."""
        return self.measures and self.objective == "latency"


DEFAULTS = Settings()
"""What holds where nothing is asked."""
