"""The files of a corpus and the cases in them.

corpus   = a folder with test_*.py, or a clone that has them under generated/
file     = a module with TESTCASES: a list of cases
case     = (module class, init arguments, forward arguments, anything else)
arguments = a function without parameters that returns ([positional], {keyword})
"""

from __future__ import annotations

import random
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paritybench_runner import stubs

Arguments = Callable[[], tuple[Any, dict[str, Any]]]

MINICORPUS = Path(__file__).resolve().parent / "minicorpus"
_MOST_MISSING_NAMES = 40


class CorpusError(Exception):
    """A folder holds no corpus, or an option about its files makes no sense."""


class LoadError(Exception):
    """A file of the corpus cannot be imported."""


@dataclass(frozen=True, slots=True)
class Case:
    """One entry of a file's TESTCASES."""

    file: str
    index: int
    cls: Any
    init_arguments: Arguments
    forward_arguments: Arguments

    @property
    def name(self) -> str:
        return str(getattr(self.cls, "__name__", self.cls))

    def __str__(self) -> str:
        return f"{self.file}:{self.index}"


def folder_of(corpus: str | Path) -> Path:
    """The folder with the files.

    Raises:
        CorpusError: there are none.
    """
    root = MINICORPUS if str(corpus) == "minicorpus" else Path(corpus).resolve()
    for folder in (root / "generated", root):
        if any(folder.glob("test_*.py")):
            return folder
    raise CorpusError(f"{root} has no files named test_*.py")


def list_files(
    corpus: str | Path,
    *,
    sample: int | None = None,
    seed: int = 0,
    part: tuple[int, int] = (1, 1),
) -> list[Path]:
    """The files to run, sorted: a seeded sample of all, and of that every n-th.

    Raises:
        CorpusError: there is no corpus, or no such part.
    """
    files = sorted(folder_of(corpus).glob("test_*.py"))
    if sample is not None and sample < len(files):
        files = sorted(random.Random(seed).sample(files, sample))
    which, parts = part
    if not 1 <= which <= parts:
        raise CorpusError(f"there is no part {which} of {parts}")
    return files[which - 1 :: parts]


def load(path: Path) -> list[Case]:
    """Import a file; names that its imports no longer find become stubs.

    Raises:
        LoadError: it cannot be imported all the same; the cause is the file's own exception.
    """
    source = path.read_bytes()
    for _ in range(_MOST_MISSING_NAMES):
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        sys.modules[path.stem] = module
        try:
            with stubs.constructing():
                exec(compile(source, str(path), "exec"), module.__dict__)
        except (ImportError, AttributeError) as error:
            if not _supply(error):
                raise LoadError(describe(error)) from error
        except Exception as error:
            raise LoadError(describe(error)) from error
        else:
            return _cases(path, module)
    raise LoadError(f"more than {_MOST_MISSING_NAMES} imported names are missing")


def _cases(path: Path, module: types.ModuleType) -> list[Case]:
    found = getattr(module, "TESTCASES", [])
    return [Case(path.name, i, entry[0], entry[1], entry[2]) for i, entry in enumerate(found)]


_NO_NAME = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")


def _supply(error: Exception) -> bool:
    """Put a stub where an import found a module but not the name in it."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and error.name not in (None, *sys.modules):
        # A library that is there wants another one that is not.
        sys.modules[str(error.name)] = stubs.StubModule(str(error.name))
        return True
    if match := _NO_NAME.search(text):
        name, owner = match.groups()
    elif match := _NO_ATTRIBUTE.search(text):
        owner, name = match.groups()
    else:
        return False
    module = sys.modules.get(owner)
    if module is None or hasattr(module, name):
        return False
    setattr(module, name, stubs.stub(f"{owner}.{name}"))
    return True


def describe(error: BaseException) -> str:
    """`TypeError: text`, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:600]
