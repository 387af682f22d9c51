"""Matmul kernels of the code generator's own (VTC §4.1: operands and results are virtual).

In the order in which data flows: ``products`` (which nodes, and where each element of what follows
is computed) → ``fusing`` (a product is the backbone of a group) → ``choice`` (ours or the
library's) → ``configuration`` (the cut) → ``family`` (with operands and epilogue: Triton source)
→ ``steps`` (the kernels of a group).
"""
