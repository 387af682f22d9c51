"""Builds the C parts with all cores; what they are is in ``pyproject.toml``."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildAtOnce(build_ext):
    """Compiles an extension's sources side by side: setuptools takes one after another."""

    def build_extensions(self) -> None:
        self.compiler.compile = partial(_compile, self.compiler)
        super().build_extensions()


def _compile(
    compiler: Any,
    sources: list[str],
    output_dir: str | None = None,
    macros: list[Any] | None = None,
    include_dirs: list[str] | None = None,
    debug: bool = False,
    extra_preargs: list[str] | None = None,
    extra_postargs: list[str] | None = None,
    depends: list[str] | None = None,
) -> list[str]:
    """As a compiler's own method; it returns the objects' names, or raises ``CompileError``."""
    macros, objects, extra_postargs, options, build = compiler._setup_compile(
        output_dir, macros, include_dirs, sources, depends, extra_postargs
    )
    arguments = compiler._get_cc_args(options, debug, extra_preargs)

    def make(name: str) -> None:
        source, extension = build[name]
        compiler._compile(name, source, extension, arguments, extra_postargs, options)

    longest_first = sorted(build, key=lambda name: "kernels" not in name)  # they take most of it
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(make, longest_first))
    return list(objects)


setup(cmdclass={"build_ext": BuildAtOnce})
