"""Programs named on the command line: found, built and run."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from magjit.errors import ArgumentError, Location, MagJITError

_OWN_FOLDERS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)


class ProgramError(MagJITError):
    """The program that was to be run raised an exception."""


@dataclass(slots=True)
class Target:
    """A model and the arguments of one call."""

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@contextmanager
def running(what: str) -> Iterator[None]:
    """An exception of the program becomes a `ProgramError` that names the program's line.

    Raises:
        ProgramError: as its cause, the program's exception.
    """
    try:
        yield
    except MagJITError:
        raise
    except SystemExit as error:
        if error.code not in (None, 0):
            raise ProgramError(f"{what} ended with exit status {error.code}") from error
    except Exception as error:
        text = f"{what} raised {type(error).__name__}: {error}"
        remedy = "magjit -v shows the whole traceback"
        raise ProgramError(text, remedy=remedy, location=_place(error)) from error


def _place(error: Exception) -> Location | None:
    """The innermost line of the program itself."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if not name.startswith((*_OWN_FOLDERS, "<frozen")) and name != runpy.__file__:
            found = Location(name, line, frame.f_code.co_qualname)
    return found


def load_target(
    spec: str, shapes: Sequence[str], dtypes: Sequence[str], device: str | None
) -> Target:
    """The program that ``module:name`` means, with random tensors for each shape.

    Raises:
        ArgumentError: there is no such module or name, or it is no program.
    """
    place, colon, name = spec.partition(":")
    if not colon or not place or not name:
        raise ArgumentError(
            f"The target must be MODULE:NAME, not {spec!r}", remedy="such as model.py:make_model"
        )
    tensors = make_tensors(shapes, dtypes)
    found = _find(_load_module(place), name, spec)
    if not callable(found):
        raise ArgumentError(f"{spec} is a {type(found).__qualname__}, which cannot be called")
    if _is_program(found, bool(tensors)):
        target = Target(found)
    elif _needs_arguments(found):
        raise ArgumentError(
            f"{spec} takes arguments",
            remedy="name a function without arguments that makes it, or give --shape for tensors",
        )
    else:
        target = _made(found(), spec)
    if tensors:
        target.args = tensors
    if device is not None:
        _move(target, device)
    return target


def _load_module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not (place + ".").startswith(error.name + "."):
                raise
            raise ArgumentError(
                f"There is no module {place}", remedy="give a path ending in .py for a file"
            ) from error
    path = Path(place)
    if not path.is_file():
        raise ArgumentError(f"There is no file {place}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)  # as dataclasses and pickle expect
    spec.loader.exec_module(module)
    return module


def _find(module: ModuleType, name: str, spec: str) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            known = [n for n in vars(module) if not n.startswith("_")]
            raise ArgumentError(
                f"{spec.partition(':')[0]} has no {name}", remedy=f"it has: {', '.join(known)}"
            ) from None
    return found


def _is_program(found: Any, has_tensors: bool) -> bool:
    """Whether an object is to be explained itself; otherwise it makes what is."""
    if isinstance(found, torch.nn.Module):
        return True
    return not isinstance(found, type) and has_tensors and _needs_arguments(found)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in variable for p in parameters)


def _made(made: Any, spec: str) -> Target:
    match made:
        case (model, tuple() | list() as args, dict() as kwargs) if callable(model):
            return Target(model, tuple(args), kwargs)
        case (model, tuple() | list() as args) if callable(model):
            return Target(model, tuple(args))
        case (model, torch.Tensor() as tensor) if callable(model):
            return Target(model, (tensor,))
        case _ if callable(made):
            return Target(made)
    raise ArgumentError(
        f"{spec} returned a {type(made).__qualname__}",
        remedy="return (model, args), (model, args, kwargs), or a model and give --shape",
    )


def make_tensors(shapes: Sequence[str], dtypes: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Random tensors, the same at every start: normal, or integers below 10.

    Raises:
        ArgumentError: a shape or a dtype is none, or the numbers of both do not fit.
    """
    if len(dtypes) > max(1, len(shapes)) or 1 < len(dtypes) != len(shapes):
        raise ArgumentError(
            f"{len(shapes)} shapes, but {len(dtypes)} dtypes",
            remedy="give --dtype once for all, or once for each --shape",
        )
    kinds = [_dtype(name) for name in dtypes] or [torch.float32]
    kinds = kinds if len(kinds) > 1 else kinds * len(shapes)
    generator = torch.Generator().manual_seed(0)
    return tuple(
        _random(_shape(text), dtype, generator) for text, dtype in zip(shapes, kinds, strict=True)
    )


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.strip("()[] ").split(",") if part.strip())
    except ValueError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise ArgumentError(f"{text!r} is no shape", remedy="such as --shape 1,3,224,224")
    return sizes


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(f"{name!r} is no dtype", remedy="such as --dtype float32 or int64")
    return found


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    high = 2 if dtype is torch.bool else 10
    return torch.randint(0, high, shape, generator=generator).to(dtype)


def _move(target: Target, device: str) -> None:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"{device!r} is no device", remedy="such as cpu or cuda:0") from error
    if isinstance(target.model, torch.nn.Module):
        target.model.to(place)
    target.args = tuple(a.to(place) if isinstance(a, torch.Tensor) else a for a in target.args)
    for name, value in target.kwargs.items():
        if isinstance(value, torch.Tensor):
            target.kwargs[name] = value.to(place)


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as ``python SCRIPT ARGS`` would, in this process.

    Raises:
        ProgramError: it raised an exception or ended with a status other than 0.
        ArgumentError: there is no such file.
    """
    if not script.is_file():
        raise ArgumentError(f"There is no file {script}")
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with running(str(script)):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
