"""DVM on NVIDIA GPUs: one interpreter kernel runs the tile bytecode of any fused operator.

In the order in which a call goes through them: ``encode`` makes words of a program and its
arguments, ``interpreter`` is the kernel that runs words, ``simulate`` the same in plain Python.
``ptx`` and ``functions`` say what each instruction does to an element.
"""
