"""Kernels of a family as machine code, built without a GPU.

    Assembled ::= configuration, Part+          the product; with splits, the kernel that adds
    Part      ::= cubin, launch metadata, arguments, Grid
    Argument  ::= b<number of a buffer> | workspace | <role of a size>
    Grid      ::= tiles | (sizes, block), (sizes, block)     programs along both axes

A part holds all that a launch needs: nothing of the graph that it was made of is asked again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy

from magjit_triton.codegen.kernel import Kernel
from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.codegen.matmul.family import WORKSPACE
from magjit_triton.codegen.matmul.kernel import MatmulKernel
from magjit_triton.codegen.runtime import POINTERS, compile_for
from magjit_triton.macro.device import Device
from magjit_triton.macro.families import MacroFamily

__all__ = ["Assembled", "Axis", "Part", "assemble", "assemble_all", "resources"]


@dataclass(frozen=True, slots=True)
class Axis:
    """Programs along an axis of a grid: the product of sizes, in blocks.

    Attributes:
        sizes: roles.
        factor: a number that they are multiplied by.
        block: elements of a program.
    """

    sizes: tuple[str, ...]
    factor: int
    block: int

    def programs(self, sizes: dict[str, int]) -> int:
        """How many, for sizes by roles."""
        total = self.factor
        for role in self.sizes:
            total *= sizes[role]
        return -(-total // self.block)


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel.

    Attributes:
        name: of its entry point.
        cubin: machine code.
        metadata: what Triton's launcher asks, as JSON.
        arguments: in order, see the grammar.
        types: of the arguments, in Triton's words.
        grid: both axes; None where a program makes one tile.
        warps, shared, registers, stack: of a block, in bytes, of a thread, in bytes.
    """

    name: str
    cubin: bytes
    metadata: str
    arguments: tuple[str, ...]
    types: tuple[str, ...]
    grid: tuple[Axis, Axis] | None
    warps: int
    shared: int
    registers: int
    stack: int


@dataclass(frozen=True, slots=True)
class Assembled:
    """The kernels of a configuration.

    Attributes:
        configuration: the cut.
        parts: in the order of their launches.
        workspace: elements of float32 for each element of the result; 0 without splits.
    """

    configuration: Configuration
    parts: tuple[Part, ...]
    workspace: int

    def occupancy(self, device: Device) -> int:
        """Blocks of the product that a multiprocessor runs at a time."""
        first = self.parts[0]
        return device.occupancy(first.shared, first.registers, first.warps)

    @property
    def spills(self) -> bool:
        """Whether registers go through memory."""
        return any(part.stack > 0 for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of machine code."""
        return sum(len(part.cubin) for part in self.parts)


def assemble(family: MacroFamily, configuration: Configuration, device: Device) -> Assembled:
    """The kernels of a configuration for a device that need not be there.

    Raises:
        RuntimeError: Triton cannot compile it.
    """
    return _planned(family, configuration, device)()


def assemble_all(
    family: MacroFamily,
    configurations: Iterable[Configuration],
    device: Device,
    workers: int | None = None,
) -> Iterator[tuple[Configuration, Assembled | None]]:
    """Many at a time, in order; None for those that Triton cannot compile.

    Args:
        workers: threads; by default as many as there are processors.
    """
    # Triton's passes and ptxas run without the interpreter's lock; graphs are lowered in turn.
    todo = [(one, _planned(family, one, device)) for one in configurations]
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        for (one, _), found in zip(todo, pool.map(lambda pair: _tried(pair[1]), todo), strict=True):
            yield one, found


def _tried(make: Callable[[], Assembled]) -> Assembled | None:
    try:
        return make()
    except Exception:
        return None


def _planned(
    family: MacroFamily, configuration: Configuration, device: Device
) -> Callable[[], Assembled]:
    made = family.kernels(configuration)
    order = family.family.buffers
    roles = family.roles
    work = family.work
    splits = configuration.split_k if made.workspace != 0 else 0

    def run() -> Assembled:
        parts = tuple(_part(kernel, order, roles, device) for kernel in made.kernels)
        return Assembled(configuration, parts, splits * work.products)

    return run


def _part(kernel: Kernel, order: Sequence[str], roles: dict[str, str], device: Device) -> Part:
    from triton.backends.compiler import GPUTarget

    arguments = [
        WORKSPACE if buffer == WORKSPACE else f"b{order.index(buffer)}" for buffer in kernel.buffers
    ]
    types = [POINTERS[dtype] for dtype in kernel.dtypes]
    sizes = [roles[symbol.name] for symbol in kernel.symbols]
    # A selector chooses ours only where n is a multiple of 16.
    multiples = [role == "n" for role in sizes]
    target = GPUTarget("cuda", device.capability, 32)
    compiled = compile_for(kernel, target, multiples=multiples)
    cubin: bytes = compiled.asm["cubin"]
    registers, stack = resources(cubin)
    wide = kernel.blocks.wide
    return Part(
        compiled.metadata.name,
        cubin,
        _metadata(compiled),
        (*arguments, *sizes),
        (*types, *["i64" if wide else "i32"] * len(sizes)),
        None if isinstance(kernel, MatmulKernel) else _grid(kernel, roles),
        compiled.metadata.num_warps,
        compiled.metadata.shared,
        registers,
        stack,
    )


def _metadata(compiled: Any) -> str:
    files = compiled.metadata_group
    path = next(Path(path) for name, path in files.items() if name.endswith(".json"))
    # Which files were linked is no matter of a launch, and a path of this machine.
    return json.dumps({**json.loads(path.read_text()), "extern_libs": []})


def _grid(kernel: Kernel, roles: dict[str, str]) -> tuple[Axis, Axis]:
    sizes = {axis.name: axis.size for axis in kernel.nest.axes}
    first = _axis(sizes.get("p", sympy.S.One), kernel.blocks.p, roles)
    if "q" not in sizes:
        return first, Axis((), 1, 1)
    return first, _axis(sizes["q"], kernel.blocks.inner, roles)


def _axis(size: sympy.Expr, block: int, roles: dict[str, str]) -> Axis:
    factor, rest = size.as_coeff_Mul()
    symbols = [one for one in sympy.Mul.make_args(rest) if one != 1]
    assert all(one.is_Symbol for one in symbols), size
    return Axis(tuple(roles[one.name] for one in symbols), int(factor), block)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as the machine code says."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"No resource usage in {text!r}")
    return int(found[1]), int(found[2])
