"""Macro-kernels: matmul kernels tuned once for a family of shapes, chosen at run time (TSCompiler).

In the order in which data flows: ``device`` (what a GPU has) → ``families`` (which products, as
the code generator has them) → ``space`` (their schedules, TSCompiler §5.1) → ``assemble`` (kernels
as machine code; needs no GPU) → ``measuring`` and ``tuning`` (times, and the search for good
schedules) → ``repository`` (what is kept, in a file) → ``waves`` (the cost model, §6) →
``selector`` (the model in C) → ``loading`` (launching what was chosen).
"""
