"""Virtual tensors (VTC): tensors that are rearrangements of others and are never made.

In the order in which data flows: ``indexing`` (expressions) → ``mapping`` (what a rearrangement is)
→ ``rules`` (what each ATen operator does) → ``contiguity`` (what it costs to read) → the search.
"""

from magjit.plugin.virtual_tensors.indexing import (
    FloorDiv,
    Load,
    Mod,
    Wrapped,
    index_symbols,
)
from magjit.plugin.virtual_tensors.mapping import (
    Affine,
    Mapping,
    Movement,
    NotComposable,
    Part,
    Piece,
    VirtualTensor,
    moved,
)
from magjit.plugin.virtual_tensors.rules import Directions, directions_of

# Importing them registers their rules.
from magjit.plugin.virtual_tensors import (  # isort: skip
    rules_indices,
    rules_missing,
    rules_pieces,
    rules_views,
)

__all__ = [
    "Affine",
    "Directions",
    "FloorDiv",
    "Load",
    "Mapping",
    "Mod",
    "Movement",
    "NotComposable",
    "Part",
    "Piece",
    "VirtualTensor",
    "Wrapped",
    "directions_of",
    "index_symbols",
    "moved",
    "rules_indices",
    "rules_missing",
    "rules_pieces",
    "rules_views",
]
