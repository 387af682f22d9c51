"""A family of products with its cut: a kernel as it is launched."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import sympy

from magjit_triton.codegen.kernel import Kernel
from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.codegen.matmul.described import Descriptor
from magjit_triton.codegen.matmul.family import Family, nest_of_tiles
from magjit_triton.codegen.matmul.source import matmul_source, tiles_of
from magjit_triton.codegen.printer import Blocks, expression

__all__ = ["MatmulKernel", "matmul_kernel"]


@dataclass(frozen=True)
class MatmulKernel(Kernel):
    """A family with a configuration."""

    family: Family
    configuration: Configuration

    @property
    def checks(self) -> bool:
        """Whether it asserts that indices read from memory are in range."""
        return self.family.checks

    def text(self, blocks: Blocks) -> str:
        """Source of the kernel."""
        return matmul_source(self.name, self.family, self.configuration, wide=blocks.wide)

    @property
    def identity(self) -> Hashable:
        """What it has in common with kernels that differ in their names and memory alone."""
        return super().identity, self.descriptors

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """What is passed to it after its sizes."""
        if not self.configuration.described:
            return ()
        cut = self.configuration
        rows = [cut.block_m] + [cut.block_k] * len(self.family.rights)
        columns = [cut.block_k] + [cut.block_n] * len(self.family.rights)
        return tuple(
            Descriptor(one, one.block(p, q))
            for one, p, q in zip(self.family.descriptions, rows, columns, strict=True)
        )

    def by_pointers(self) -> MatmulKernel:
        """The same, for memory that begins at no multiple of 16, or devices before sm_90."""
        cut = replace(self.configuration, described=False)
        return replace(self, configuration=cut)

    def grid(self) -> tuple[str, str]:
        """How many programs, as Python expressions over the size symbols."""
        batch, m, n, _ = self.family.sizes
        cut = self.configuration
        rows, columns = tiles_of(m, cut.block_m), tiles_of(n, cut.block_n)
        total = f"{expression(batch)} * {rows} * {columns} * {cut.split_k}"
        return (f"min({total}, {cut.programs})" if cut.programs else total), "1"


def matmul_kernel(
    name: str,
    family: Family,
    configuration: Configuration,
    reach: Mapping[str, sympy.Expr],
    *,
    wide: bool,
) -> MatmulKernel:
    """The kernel of a family, cut in one way.

    Args:
        reach: buffer → number of elements from its first to its last.
        wide: whether addresses need 64 bits for the likely sizes.
    """
    cut = configuration
    blocks = Blocks(cut.block_m, cut.block_n, wide=wide, warps=cut.warps, stages=cut.stages)
    return MatmulKernel(
        name,
        family.epilogue,
        nest_of_tiles(family.epilogue),
        blocks,
        family.buffers,
        family.written,
        family.dtypes,
        family.symbols,
        tuple(reach[buffer] for buffer in family.buffers),
        family,
        configuration,
    )
