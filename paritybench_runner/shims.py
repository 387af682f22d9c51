"""Names that older versions of libraries had and programs still use; the same for all compilers.

    removed name -> what takes its place

What needs the network (pretrained weights) yields no weights: modules keep the random ones.
"""

from __future__ import annotations

import builtins
import collections
import collections.abc
import importlib
import inspect
import math
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paritybench_runner import helpers, stubs

# Libraries that programs import most; loading them once, before the fork, saves it for each file.
LIBRARIES = ("scipy", "scipy.ndimage", "pandas", "sklearn", "matplotlib.pyplot", "torchvision")

_NUMPY: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "object": object,
    "str": str,
    "complex": complex,
    "long": int,
    "unicode": str,
    "float_": np.float64,
    "complex_": np.complex128,
    "string_": np.bytes_,
    "unicode_": np.str_,
    "NaN": np.nan,
    "NAN": np.nan,
    "Inf": np.inf,
    "Infinity": np.inf,
    "infty": np.inf,
    "PINF": np.inf,
    "NINF": -np.inf,
    "product": np.prod,
    "cumproduct": np.cumprod,
    "alltrue": np.all,
    "sometrue": np.any,
    "round_": np.round,
    "row_stack": np.vstack,
    "in1d": np.isin,
    "trapz": np.trapezoid,
    "asfarray": lambda a, dtype=np.float64: np.asarray(a, dtype=dtype),
}


class NoWeights(collections.OrderedDict[str, Any]):
    """Stands for a downloaded state: loading it changes nothing."""

    def __missing__(self, key: str) -> Any:
        return NoWeights()


def install(folder: Path) -> stubs.StubFinder:
    """Make this process one in which files of the corpus in a folder can be imported."""
    _restore_collections()
    _restore(np, _NUMPY)
    _restore(time, {"clock": time.perf_counter})
    _restore(inspect, {"getargspec": inspect.getfullargspec})
    _restore(importlib.import_module("fractions"), {"gcd": math.gcd})
    _restore_torch()
    _no_downloads()
    _define_torchvision_operators()
    helpers.install()
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    _renamed_modules()
    finder = stubs.StubFinder(folder)
    sys.meta_path.append(finder)
    return finder


def _restore(module: types.ModuleType, names: Mapping[str, Any]) -> None:
    # What merely warns when it is asked for is there: look it up without asking.
    for name, value in names.items():
        if name not in module.__dict__:
            setattr(module, name, value)


def _restore_collections() -> None:
    names = {name: getattr(collections.abc, name) for name in collections.abc.__all__}
    _restore(collections, names)


def _restore_torch() -> None:
    six = types.ModuleType("torch._six")
    contents = {
        "string_classes": (str, bytes),
        "int_classes": int,
        "inf": math.inf,
        "nan": math.nan,
        "container_abcs": collections.abc,
        "PY2": False,
        "PY3": True,
        "PY37": True,
        "FileNotFoundError": FileNotFoundError,
        "moves": types.SimpleNamespace(range=range, map=map, zip=zip, input=input),
        "get_function_from_type": getattr,
        "istuple": lambda value: isinstance(value, tuple),
        "builtins": builtins,
        "queue": importlib.import_module("queue"),
    }
    vars(six).update(contents)
    sys.modules["torch._six"] = six
    _restore(torch, {"_six": six} | _linear_algebra())


def _linear_algebra() -> dict[str, Callable[..., Any]]:
    """Functions that moved to torch.linalg, with the arguments they had."""

    def symeig(a: torch.Tensor, eigenvectors: bool = False, upper: bool = True) -> Any:
        values, vectors = torch.linalg.eigh(a, "U" if upper else "L")
        return values, vectors if eigenvectors else a.new_empty(0)

    def solve(b: torch.Tensor, a: torch.Tensor) -> Any:
        return torch.linalg.solve(a, b), a

    def lstsq(b: torch.Tensor, a: torch.Tensor) -> Any:
        return torch.linalg.lstsq(a, b).solution, a

    def matrix_rank(a: torch.Tensor, tol: Any = None, symmetric: bool = False) -> torch.Tensor:
        rank: torch.Tensor = torch.linalg.matrix_rank(a, tol=tol, hermitian=symmetric)
        return rank

    return {"symeig": symeig, "solve": solve, "lstsq": lstsq, "matrix_rank": matrix_rank}


def _no_downloads() -> None:
    def no_weights(*args: Any, **kwargs: Any) -> NoWeights:
        return NoWeights()

    def no_file(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("a program wants to download a file")

    model_zoo = importlib.import_module("torch.utils.model_zoo")
    for owner in (torch.hub, model_zoo):
        for name in ("load_state_dict_from_url", "load_url"):
            if hasattr(owner, name):
                setattr(owner, name, no_weights)
    for name in ("download_url_to_file", "load"):
        setattr(torch.hub, name, no_file)
    request = importlib.import_module("urllib.request")
    for name in ("urlopen", "urlretrieve"):
        setattr(request, name, no_file)
    load_state_dict = nn.Module.load_state_dict

    def load(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state_dict, NoWeights):
            return nn.modules.module._IncompatibleKeys([], [])
        return load_state_dict(self, state_dict, *args, **kwargs)

    nn.Module.load_state_dict = load  # type: ignore[method-assign]


def _renamed_modules() -> None:
    """Submodules that libraries dropped after moving what is in them."""
    moved = {
        "scipy.ndimage.filters": "scipy.ndimage",
        "scipy.ndimage.interpolation": "scipy.ndimage",
        "scipy.ndimage.morphology": "scipy.ndimage",
        "scipy.ndimage.measurements": "scipy.ndimage",
        "torchvision.models.utils": "torchvision._internally_replaced_utils",
    }
    for old, new in moved.items():
        if old not in sys.modules and importlib.util.find_spec(new.partition(".")[0]):
            sys.modules[old] = importlib.import_module(new)


_library: torch.library.Library | None = None


def _define_torchvision_operators() -> None:
    """Where torchvision's compiled part does not load, give it the operators its import needs."""
    global _library
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    else:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.impl(name, _nms, "CPU")


def _nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Greedy non-maximum suppression over (x1, y1, x2, y2) boxes."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order = scores.argsort(descending=True, stable=True)
    kept: list[int] = []
    while order.numel():
        first, rest = order[0], order[1:]
        kept.append(int(first))
        low = torch.maximum(boxes[rest, :2], boxes[first, :2])
        high = torch.minimum(boxes[rest, 2:], boxes[first, 2:])
        inside = (high - low).clamp(min=0).prod(dim=1)
        order = rest[inside / (areas[rest] + areas[first] - inside) <= threshold]
    return torch.tensor(kept, dtype=torch.int64)
