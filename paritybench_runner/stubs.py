"""Stand-ins for modules that are not installed: enough to import, derive from and construct.

A stub is a class. Its attributes are stubs, it can be a base class or a decorator, and calling it
while a program is imported or constructed gives an object that does nothing. In a forward pass
every use raises `StubUsed`: such a case does not run here, with no compiler, and is counted so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

_depth = 0


class StubUsed(NotImplementedError):
    """A program computes with something that is not installed."""


@contextmanager
def constructing() -> Iterator[None]:
    """While this lasts, stubs can be called."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _refuse(name: str) -> StubUsed:
    return StubUsed(f"{name} is not installed")


class _StubMeta(ABCMeta):
    """Attributes of a stub are stubs; a class of the user's that derives from one is no stub."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if not _is_stub(cls):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        made = stub(f"{cls.__module__}.{cls.__qualname__}.{name}")
        type.__setattr__(cls, name, made)
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not _is_stub(cls):
            return super().__call__(*args, **kwargs)
        if not _depth:
            raise _refuse(_full_name(cls))
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]  # used as a decorator
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Stub(metaclass=_StubMeta):
    """What calling a stub gives; also the base of all of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if not _is_stub(type(self)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return stub(f"{_full_name(type(self))}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _depth:
            raise _refuse(_full_name(type(self)))
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return self

    def __enter__(self) -> Any:
        return self()

    def __exit__(self, *exception: object) -> None:
        pass


def _is_stub(cls: type) -> bool:
    return "_stub_name" in cls.__dict__ or cls is Stub


def _full_name(cls: type) -> str:
    return str(cls.__dict__.get("_stub_name", cls.__qualname__))


def stub(name: str) -> type[Stub]:
    """A stand-in with this dotted name."""
    owner, _, own = name.rpartition(".")
    namespace = {"_stub_name": name, "__module__": owner}
    return cast("type[Stub]", _StubMeta(own, (Stub,), namespace))


class StubModule(types.ModuleType):
    """A module whose every attribute is a stub."""

    __version__ = "1000.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = stub(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nothing else finds, for files of the corpus only.

    Libraries that are there try imports of their own and take a failure for an answer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.supplied: list[str] = []

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if not isinstance(parent, StubModule) and not self._asked_by_the_corpus():
            return None
        self.supplied.append(fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def _asked_by_the_corpus(self) -> bool:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            filename = frame.f_code.co_filename
            if "importlib" not in filename and filename != __file__:
                return filename.startswith(self._folder)
            frame = frame.f_back
        return False

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
