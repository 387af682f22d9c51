"""Which cases of the inner loop jump on through a table of their own.

A jump through a shared table costs a branch more, and its entry is read late.  Tables are in
constant memory, which has room for about 70; beyond it, ptxas makes jumps to jumps of them, each on
a line of code of its own.
"""

from __future__ import annotations

__all__ = ["OWN_OF_SUMS", "OWN_TABLE"]

OWN_TABLE = frozenset(
    f"{head}.{name}"
    for head, names in {
        "f": "neg abs relu add sub mul minimum maximum rsqrt exp sub_exp",
        "fk": "add sub rsub mul mad sub_exp sub_exp_small",
        "lt": "s.32 s.f16 s.bf16 u.32 u.f16 u.bf16 scratch k r w",
        "la": "s.32 s.f16 s.bf16 scratch r",
        "lk": "r",
        "w": "affine scale",
        "st": "g.32 g.f16 g.bf16",
        "row": "f.sum f.max f.squares f.norm f.softmax",
        "red": "f.sum f.max",
        "fin": "f.sum",
        "s": "add sub mul rsqrt k by",
        "sk": "add mul scaled_rsqrt",
    }.items()
    for name in names.split()
) | {"swap", "keep", "mask", "select", "save"}
"""Those that programs often run."""

_OF_SOFTMAX = {"row.f.softmax", "row.f.max", "red.f.max", "fk.sub_exp", "fk.sub_exp_small"}
OWN_OF_SUMS = OWN_TABLE - _OF_SOFTMAX | {"acc.norm", "row.f.back", "s.in"}
"""Those where there are sums across rows: of gradients, not of softmaxes."""
