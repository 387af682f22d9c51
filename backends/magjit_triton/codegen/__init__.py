"""The code generator, in the order in which data flows.

``fusion`` (graph → groups) → ``lowering``, ``handlers``, ``operators`` (nodes → ``ir``) → ``nest``,
``kernel``, ``printer`` (instructions → Triton source) → ``compiler`` (the program) → ``runtime``
(compiling and launching).
"""
