"""Launching what a repository holds: machine code loaded by Triton's driver, nothing compiled.

A launch is Triton's own launcher with the function that the driver has loaded; it passes integers
alone, as ``codegen.runtime`` does.
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from magjit_triton.codegen.matmul.family import WORKSPACE
from magjit_triton.macro.assemble import Assembled, Part
from magjit_triton.macro.errors import ForeignRepositoryError
from magjit_triton.macro.families import K_UNIT
from magjit_triton.macro.repository import Entry, versions

__all__ = ["Loaded", "checked", "sizes_by_role"]


def checked(entry: Entry) -> Entry:
    """An entry whose machine code this Triton can launch.

    Raises:
        ForeignRepositoryError: it was built by another Triton.
    """
    here, made = versions()["triton"], entry.versions.get("triton")
    if here != made:
        raise ForeignRepositoryError(
            f"{entry.name} was built by Triton {made}, here is {here}",
            remedy="tune again, or install that Triton",
        )
    return entry


def sizes_by_role(batch: int, m: int, n: int, k: int) -> dict[str, int]:
    """The values of size arguments."""
    return {"batch": batch, "m": m, "n": n, "k": k, "k_units": k // K_UNIT}


@dataclass(frozen=True)
class _Source:
    """What Triton's launcher asks of a source."""

    signature: dict[str, str]


def _loaded(part: Part) -> Callable[..., None]:
    """``run(programs, programs along y, stream, *arguments)`` on the current device."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.driver import driver

    facts = json.loads(part.metadata)
    target = facts["target"]
    facts["target"] = GPUTarget(target["backend"], target["arch"], target["warp_size"])
    metadata: Any = namedtuple("KernelMetadata", sorted(facts))(**facts)
    packed = make_backend(facts["target"]).pack_metadata(metadata)
    active = driver.active
    names = [f"a{number}" for number in range(len(part.types))]
    launch = active.launcher_cls(_Source(dict(zip(names, part.types, strict=True))), metadata)
    # The module must live as long as its function.
    module, function, *_ = active.utils.load_binary(
        part.name, part.cubin, part.shared, active.get_current_device()
    )

    def run(first: int, second: int, stream: int, *arguments: int) -> None:
        launch(first, second, 1, stream, function, packed, None, None, None, *arguments)

    run.module = module  # type: ignore[attr-defined]
    return run


@dataclass
class Loaded:
    """The kernels of a configuration on the current device, loaded when first launched."""

    assembled: Assembled

    @cached_property
    def runs(self) -> list[Callable[..., None]]:
        """A launch for each part."""
        return [_loaded(part) for part in self.assembled.parts]

    def ready(self) -> Loaded:
        """Itself, loaded."""
        for run in self.runs:
            assert callable(run)
        return self

    def workspace(self, sizes: dict[str, int]) -> int:
        """Elements of float32 that a launch needs beside its operands."""
        return self.assembled.workspace * sizes["batch"] * sizes["m"] * sizes["n"]

    def __call__(
        self,
        stream: int,
        programs: int,
        buffers: Sequence[int],
        sizes: dict[str, int],
        workspace: int = 0,
    ) -> None:
        """Start all parts.

        Args:
            stream: of CUDA.
            programs: of the product.
            buffers: addresses in the family's order.
            sizes: by roles.
            workspace: its address, where there are splits.
        """
        for part in range(len(self.assembled.parts)):
            self.start(part, stream, programs, buffers, sizes, workspace)

    def start(
        self,
        number: int,
        stream: int,
        programs: int,
        buffers: Sequence[int],
        sizes: dict[str, int],
        workspace: int = 0,
    ) -> None:
        """Start one part."""
        part = self.assembled.parts[number]
        values = [_value(one, buffers, sizes, workspace) for one in part.arguments]
        first, second = programs, 1
        if part.grid is not None:
            first, second = (axis.programs(sizes) for axis in part.grid)
        self.runs[number](first, second, stream, *values)


def _value(argument: str, buffers: Sequence[int], sizes: dict[str, int], workspace: int) -> int:
    if argument == WORKSPACE:
        return workspace
    if argument in sizes:
        return sizes[argument]
    return buffers[int(argument.removeprefix("b"))]
