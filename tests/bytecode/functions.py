"""Code objects of real programs: of modules of the standard library and of this suite."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import CodeType

MODULES = [
    *("argparse", "ast", "asyncio.base_events", "asyncio.tasks", "collections", "contextlib"),
    *("dataclasses", "decimal", "functools", "http.client", "inspect", "json.decoder"),
    *("logging", "pathlib", "pickle", "statistics", "subprocess", "tarfile", "textwrap"),
    *("threading", "typing", "unittest.mock", "urllib.parse", "zipfile"),
    *("tests.monitor.programs", "tests.monitor.test_tracer_robustness"),
]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and all that are made by it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def module_codes(name: str) -> list[CodeType]:
    """All code objects of a module, compiled from its source."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as source:
        return list(codes_in(compile(source.read(), module.__file__, "exec")))
