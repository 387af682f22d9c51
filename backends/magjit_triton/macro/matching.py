"""Which family of the table a group of the code generator is, and with which sizes.

A group is a family's where the family's text, with the group's sizes in place of its symbols, is
the group's own text: the same operands, the same epilogue, the same memory.  Tracing the table
takes a second; which family a text belongs to is kept on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
import torch

from magjit.plugin.cache import disk_cache, fingerprint
from magjit_triton.codegen.matmul.family import Family
from magjit_triton.macro.families import FAMILIES, K_UNIT, MacroFamily, families_of, named, text_of
from magjit_triton.versions import versions

__all__ = ["Match", "families_of_model", "matched"]

_KIND = "macro_matches"


@dataclass(frozen=True)
class Match:
    """A group as a family's.

    Attributes:
        family: of the table, with symbols.
        order: for each of the group's buffers, which operand it is; the last is the result.
        batch, m, n, k: what its symbols stand for.
    """

    family: MacroFamily
    order: list[int]
    batch: sympy.Expr
    m: sympy.Expr
    n: int
    k: int


@cache
def _forms(name: str, dtype: torch.dtype, precision: str) -> list[MacroFamily]:
    """A family in all ways to write it; precision is what torch's settings say, for the cache."""
    return [named(name, dtype, form) for form in range(1 + len(FAMILIES[name].also))]


def matched(family: Family) -> Match | None:
    """The family of the table that a group is; None where it is none."""
    *_, n, k = family.sizes
    if not (n.is_Integer and k.is_Integer) or int(k) % K_UNIT or int(n) % 16:
        return None
    own = text_of(family)
    key = fingerprint(own, *versions())
    known = disk_cache().get(_KIND, key)
    if known is None:
        found = _found(family, own, FAMILIES)
        disk_cache().put(_KIND, key, found.family.name.encode() if found else b"")
        return found
    return _found(family, own, [name for name in FAMILIES if name.encode() == known])


def _found(family: Family, own: str, names: Iterable[str]) -> Match | None:
    batch, m, n, k = family.sizes
    for name in names:
        if len(FAMILIES[name].shapes) + 1 != len(family.buffers):  # the result is one, too
            continue
        forms = _forms(name, family.dtype, family.precision)
        for one in forms:
            found = one.family
            if len(found.rights) != len(family.rights):
                continue
            values = {"batch": batch, "m": m, "n": n, "k_units": sympy.Integer(int(k) // K_UNIT)}
            swaps = {symbol: values[one.roles[symbol.name]] for symbol in found.symbols}
            if text_of(found, swaps, like=family) == own:
                return Match(forms[0], one.order, batch, m, int(n), int(k))
    return None


def families_of_model(
    module: torch.nn.Module, inputs: Sequence[Any]
) -> list[tuple[MacroFamily, list[tuple[int, int]]]]:
    """The families of a model's products, each with the layers (n, k) that it has."""
    from magjit_triton.codegen.decompositions import decompositions

    program = torch.export.export(module, tuple(inputs))
    graph = program.run_decompositions(decompositions(composite=True)).graph_module
    layers: dict[str, list[tuple[int, int]]] = {}
    families: dict[str, MacroFamily] = {}
    for group in families_of(graph, type(module).__name__):
        found = matched(group.family)
        if found is not None:
            families[found.family.signature] = found.family
            kept = layers.setdefault(found.family.signature, [])
            if (found.n, found.k) not in kept:
                kept.append((found.n, found.k))
    return [(family, layers[signature]) for signature, family in families.items()]
