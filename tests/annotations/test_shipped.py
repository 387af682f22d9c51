"""The database that ships: well ordered, quick to load, without contradictions, and complete."""

from __future__ import annotations

import builtins
import collections
import importlib
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from dis import get_instructions
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.overrides

import magjit.annotations as annotations
from magjit.annotation_rules import parse_file
from magjit.annotations import Rule, default_database, is_c_callable
from magjit.errors import AnnotationError

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "annotations").glob("*.yaml"))
DATABASE = default_database()

# Names that exist only with another Python or another build of torch.
ELSEWHERE = {
    "torch 2.13": (
        "torch._C._VariableFunctionsClass._from_blob",
        "torch._philox_",
        "torch.nn.functional.linear_cross_entropy",
        "torch._C._is_ck_sdpa_available",
        "torch._C._remove_obj_from_tls",
        "torch.Tensor._philox_",
        "torch.Tensor.const_data_ptr",
    ),
    "torch before 2.13": (
        "torch.Tensor._update_names",
        "torch.Tensor.align_to",
        "torch.Tensor.refine_names",
        "torch.Tensor.rename",
        "torch._C.read_vitals",
        "torch._C.set_vital",
        "torch._C.vitals_enabled",
    ),
    "NumPy before 2.4": ("numpy.ndarray.itemset",),
    "Python with libuuid": ("_uuid.",),
    "3.12 on": (
        "builtins.AttributeError.__",
        "typing.TypeAliasType",
        "itertools.batched",
        "posix._path_splitroot",
        "sys._getframemodulename",
        "_sha2",
    ),
    "3.13 on": (
        "builtins.PythonFinalizationError",
        "builtins._IncompleteInputError",
        "types.SimpleNamespace.__replace__",
        "types.GeneratorType.__class_getitem__",
        "functools.partial.__get__",
        "_collections_abc.framelocalsproxy",
        "posix._path_splitroot_ex",
    ),
    "3.14 on": ("operator.is_none", "operator.is_not_none"),
    "before 3.12": ("_sha256", "_sha512"),
    "torch with a GPU": ("torch._C._cuda_", "torch._C._record_memory_history", "torch._C._xpu_"),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_entries_are_sorted(path: Path) -> None:
    parsed = parse_file(path)
    for names in (list(parsed.rules), list(parsed.opaque)):
        assert names == sorted(names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_what_it_is_about(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_names_exist() -> None:
    elsewhere = tuple(prefix for prefixes in ELSEWHERE.values() for prefix in prefixes)
    absent = []
    for name, rule in DATABASE.rules.items():
        try:
            annotations._demand_existence(rule)
        except AnnotationError:
            if not name.startswith(elsewhere):
                absent.append(name)
    assert not absent


def meaning(rule: Rule) -> tuple[object, ...]:
    arguments = tuple(sorted((str(k), v) for k, v in rule.arguments.items()))
    return rule.kind, arguments, rule.result, rule.handler, rule.reason, rule.global_state


def test_two_names_of_one_callable_say_the_same() -> None:
    by_object: dict[int, list[Rule]] = defaultdict(list)
    kept = []
    for name, rule in DATABASE.rules.items():
        place = None if name.endswith(".*") else annotations._find(name)
        if place is not None and not (name.endswith("__") and place[0] is place[2]):
            kept.append(place)
            by_object[id(annotations._unwrapped(place[2]))].append(rule)
    wrong = [
        [rule.name for rule in rules]
        for rules in by_object.values()
        if len({meaning(rule) for rule in rules}) > 1
    ]
    assert not wrong


def test_the_shipped_files_are_not_loaded_by_an_import() -> None:
    script = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "import magjit.annotations as a; print(a.default_database.cache_info().currsize)"
    )
    command = [sys.executable, "-c", script, str(ROOT)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


# ---------------------------------------------------------------- opaque modules


@pytest.mark.parametrize("module", DATABASE.opaque_modules.values(), ids=lambda m: m.module)
def test_opaque_modules_exist_and_so_do_their_exceptions(module) -> None:
    imported = importlib.import_module(module.module)
    for name in module.follow:
        found = imported
        for part in name.split("."):
            found = getattr(found, part)


def python_functions(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    owned = [vars(module)] + [
        vars(cls)
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__ == module.__name__
    ]
    for namespace in owned:
        for found in list(namespace.values()):
            found = getattr(found, "__func__", getattr(found, "fget", found))
            if isinstance(found, types.FunctionType) and found.__module__ == module.__name__:
                yield found.__qualname__, found


@pytest.mark.parametrize("module", DATABASE.opaque_modules.values(), ids=lambda m: m.module)
def test_opaque_functions_write_no_globals(module) -> None:
    imported = importlib.import_module(module.module)
    wrong = {
        name
        for name, function in python_functions(imported)
        if DATABASE.is_opaque(module.module, name)
        if any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in get_instructions(function))
    }
    assert not wrong


# ---------------------------------------------------------------- completeness

MODULES = (
    *("builtins", "_operator", "math", "cmath", "itertools", "_functools", "_collections"),
    *("_random", "time", "copy", "_bisect", "_heapq", "_struct", "_json", "_weakref", "_abc"),
    *("posix", "sys", "gc", "_io", "_sre", "_thread", "_contextvars", "_warnings"),
)
LEFT_OUT = {
    "io._IOBase": "an abstract base",
    "io._BufferedIOBase": "an abstract base",
    "io._RawIOBase": "an abstract base",
    "io._TextIOBase": "an abstract base",
    "io._BytesIOBuffer": "made by BytesIO.getbuffer only",
    "io.IncrementalNewlineDecoder": "part of reading a text file",
}


def callables_of(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    for name, found in vars(module).items():
        if callable(found) and is_c_callable(found) and name != "__loader__":
            yield f"{module.__name__}.{name}", found


@pytest.mark.parametrize("name", MODULES)
def test_every_c_callable_of_a_module_is_annotated(name: str) -> None:
    module = importlib.import_module(name)
    missing = [
        full
        for full, found in callables_of(module)
        if DATABASE.lookup(found) is None and full not in LEFT_OUT
    ]
    assert not missing


def builtin_types() -> dict[str, type]:
    """Every type of Python's core that a program can name."""
    import _collections_abc
    import _random
    import functools
    import itertools
    import operator
    import re

    modules = (
        *(builtins, collections, functools, itertools, operator, types, re),
        *(_collections_abc, _random, importlib.import_module("_collections")),
    )
    return {
        f"{found.__module__}.{found.__qualname__}": found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type) and not found.__flags__ & (1 << 9) or found in C_HEAP_TYPES
        if isinstance(found, type)
    }


C_HEAP_TYPES = tuple(
    getattr(importlib.import_module(module), name)
    for module, name in (
        *(("functools", "partial"), ("functools", "_lru_cache_wrapper"), ("re", "Pattern")),
        *(("re", "Match"), ("operator", "itemgetter"), ("operator", "attrgetter")),
        *(("operator", "methodcaller"), ("_random", "Random"), ("types", "SimpleNamespace")),
    )
)


@pytest.mark.parametrize(
    "cls",
    [*builtin_types().values(), np.ndarray, np.generic, np.dtype, np.ufunc, torch.Size],
    ids=lambda cls: cls.__qualname__,
)
def test_every_method_and_slot_of_a_type_is_annotated(cls: type) -> None:
    missing = []
    for name, found in vars(cls).items():
        bare = annotations._unwrapped(found)
        if annotations._is_c_function(bare) and DATABASE.lookup(bare) is None:
            missing.append(name)
    assert not missing


# ---------------------------------------------------------------- torch

FOLLOWED = {
    "torch.autocast": "a context manager of Python code; its frames are followed",
}


def overridable() -> dict[str, object]:
    found = torch.overrides.get_overridable_functions()
    return {
        torch.overrides.resolve_name(function): function
        for functions in found.values()
        for function in functions
    }


def test_every_overridable_function_of_torch_is_annotated() -> None:
    missing = [
        name
        for name, function in overridable().items()
        if DATABASE.lookup(function) is None and name not in FOLLOWED
    ]
    assert not missing
    assert len(overridable()) > 1200


def test_every_c_function_that_torch_overrides_ignores_is_annotated() -> None:
    """`get_ignored_functions`: functions without a tensor argument, factories, state."""
    missing = [
        function
        for function in torch.overrides.get_ignored_functions()
        if callable(function) and is_c_callable(function)
        if not isinstance(function, type) and DATABASE.lookup(function) is None
    ]
    assert not missing


@pytest.mark.parametrize(
    "name", ["_VariableFunctions", "_nn", "_linalg", "_fft", "_special", "_sparse", "_nested"]
)
def test_every_generated_binding_is_annotated(name: str) -> None:
    namespace = getattr(torch._C, name)
    missing = [
        attribute
        for attribute in dir(namespace)
        if not attribute.startswith("__")
        if DATABASE.lookup(getattr(namespace, attribute)) is None
    ]
    assert not missing


def test_every_c_method_of_a_tensor_is_annotated() -> None:
    missing = [
        f"{cls.__name__}.{name}"
        for cls in (torch.Tensor, torch._C.TensorBase)
        for name, found in vars(cls).items()
        if annotations._is_c_function(annotations._unwrapped(found))
        if DATABASE.lookup(annotations._unwrapped(found)) is None
    ]
    assert not missing


def test_every_attribute_of_a_tensor_is_annotated() -> None:
    missing = [
        name
        for name, found in vars(torch._C.TensorBase).items()
        if isinstance(found, types.GetSetDescriptorType)
        if DATABASE.lookup(found.__get__) is None
    ]
    assert not missing
