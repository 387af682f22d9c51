"""A rule is found whichever way a callable is reached."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import gc
import itertools
import json
import math
import operator
import random
import re
import sys
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from magjit.annotations import (
    Database,
    Kind,
    default_database,
    is_c_callable,
    missing_entry,
    qualified_name,
)


class Dict(dict):
    pass


class OrderedChild(collections.OrderedDict):
    def pop_as_dict(self, key):
        return super(collections.OrderedDict, self).pop


class Error(ValueError):
    pass


class WithInit(list):
    def __init__(self, values):
        super().__init__(values)


class Callable:
    def __call__(self):
        return 1


class Color(enum.Enum):
    RED = 1


class Unhashable(type):
    __hash__ = None  # a database keyed by hash would fail

    def __eq__(cls, other):
        raise AssertionError("user code ran in a lookup")


class Hostile(dict, metaclass=Unhashable):
    pass


Point = collections.namedtuple("Point", "x y")
Data = dataclasses.make_dataclass("Data", ["x"])
tensor = torch.ones(2)

FOUND = [
    # functions
    (len, "builtins.len"),
    (math.sqrt, "math.*"),
    (operator.add, "operator.add"),
    (torch.relu, "torch.relu"),
    (torch._C._VariableFunctions.relu, "torch.relu"),
    (torch._VF.lstm, "torch.lstm"),
    (torch._softmax, "torch._C._VariableFunctionsClass.*"),
    (torch.conv2d, "torch.nn.functional.conv2d"),
    (F.gelu, "torch.nn.functional.gelu"),
    (torch._C._nn.gelu, "torch.nn.functional.gelu"),
    (torch.special.erf, "torch.special.erf"),
    (torch.is_grad_enabled, "torch.is_grad_enabled"),
    (torch._C._get_tracing_state, "torch._C._get_tracing_state"),
    (np.array, "numpy.array"),
    # Python functions that are one operator
    (F.relu, "torch.nn.functional.relu"),
    (torch.Tensor.__len__, "torch.Tensor.__len__"),
    # methods, bound and not, also of subclasses
    (list.append, "builtins.list.append"),
    ([].append, "builtins.list.append"),
    (WithInit([]).append, "builtins.list.append"),
    (Dict().get, "builtins.dict.get"),
    (collections.OrderedDict().get, "builtins.dict.get"),
    (collections.OrderedDict().pop, "collections.OrderedDict.pop"),
    (OrderedChild().pop, "collections.OrderedDict.pop"),
    (OrderedChild().pop_as_dict(1), "builtins.dict.pop"),
    (functools.partial(dict.pop, {}).func, "builtins.dict.pop"),
    (tensor.add, "torch.Tensor.add"),
    (torch.nn.Parameter(tensor).add_, "torch.Tensor.add_"),
    (torch.Tensor.item, "torch.Tensor.item"),
    (tensor.shape.numel, "torch.Size.*"),
    (random.random, "_random.Random.random"),
    (random.Random.random, "_random.Random.random"),
    (re.compile("a").match, "re.Pattern.*"),
    (np.ones(2).sum, "numpy.ndarray.sum"),
    (np.random.rand, "numpy.random.mtrand.RandomState.*"),
    (torch.Generator().manual_seed, "torch._C.Generator.manual_seed"),
    # class methods and static methods
    (dict.fromkeys, "builtins.dict.fromkeys"),
    (Dict.fromkeys, "builtins.dict.fromkeys"),
    (collections.OrderedDict.fromkeys, "collections.OrderedDict.fromkeys"),
    (itertools.chain.from_iterable, "itertools.chain.from_iterable"),
    (str.maketrans, "builtins.str.*"),
    (bytes.maketrans, "builtins.bytes.*"),
    (float.fromhex, "builtins.float.*"),
    (object.__new__, "builtins.object.__new__"),
    (vars(str)["maketrans"], "builtins.str.*"),
    # slots
    (int.__add__, "builtins.int.*"),
    ((5).__add__, "builtins.int.*"),
    (True.__and__, "builtins.bool.*"),
    (object().__init__, "builtins.object.__init__"),
    (super(Dict, Dict()).__setitem__, "builtins.dict.__setitem__"),
    (object.__setattr__, "builtins.object.__setattr__"),
    (type.__call__, "builtins.type.__call__"),
    (iter([]).__next__, "_collections_abc.list_iterator.__next__"),
    ({}.items().__len__, "_collections_abc.dict_items.__len__"),
    # accessors
    (torch.Tensor.shape.__get__, "torch.Tensor.shape.__get__"),
    (torch.Tensor.data.__set__, "torch.Tensor.data.__set__"),
    (vars(torch._C.TensorBase)["grad"].__delete__, "torch.Tensor.grad.__delete__"),
    # constructors, also of classes without code of their own
    (list, "builtins.list"),
    (Dict, "builtins.dict"),
    (Error, "builtins.ValueError"),
    (type, "builtins.type"),
    (itertools.chain, "itertools.chain"),
    (functools.partial, "functools.partial"),
    (torch.Size, "torch.Size"),
    (torch.device, "torch.device"),
    (torch.Tensor, "torch.Tensor"),
    (torch.FloatTensor, "torch.FloatTensor"),
    (np.float32, "numpy.float32"),
    # instances with a C __call__
    (functools.partial(len, ()), "functools.partial.__call__"),
    (functools.lru_cache(len), "functools._lru_cache_wrapper.__call__"),
    (operator.itemgetter(1), "operator.itemgetter.__call__"),
    (weakref.ref(Dict), "_weakref.ref.__call__"),
    (np.add, "numpy.ufunc.__call__"),
    (np.unique, "numpy._core._multiarray_umath._ArrayFunctionDispatcher.__call__"),
    (json.scanner.c_make_scanner(json.JSONDecoder()), "_json.make_scanner.__call__"),
    # bound methods of Python whose function is C, wrappers
    (types.MethodType(len, ()), "builtins.len"),
    (staticmethod(len), "builtins.len"),
    # operators
    (torch.ops.aten.add.Tensor, "torch.ops.*"),
    (torch.ops.aten.add, "torch.ops.*"),
    (torch.ops.aten.item.default, "torch.ops.aten.item"),
    (torch.ops.aten.item, "torch.ops.aten.item"),
    (torch.ops.profiler._record_function_enter_new, "torch.ops.profiler.*"),
    (torch.ops.higher_order.cond, "torch.ops.higher_order.*"),
]


@pytest.mark.parametrize(("callable_", "name"), FOUND, ids=[str(i) for i in range(len(FOUND))])
def test_found(callable_, name: str) -> None:
    database = default_database()
    for _ in range(2):
        rule = database.lookup(callable_)
        assert rule is not None
        assert rule.name == name
    assert database.lookup(callable_) is rule


PYTHON = [
    lambda: 1,
    Callable(),
    Callable().__call__,
    Color,
    Point,
    Data,
    WithInit,
    collections.Counter,
    random.Random,
    torch.nn.Linear,
    torch.nn.Linear(1, 1),
    torch.nn.Parameter,
    functools.wraps,
    OrderedChild().pop_as_dict,
]


@pytest.mark.parametrize("callable_", PYTHON, ids=[str(i) for i in range(len(PYTHON))])
def test_python_code_has_no_rule_and_is_no_c_callable(callable_) -> None:
    assert default_database().lookup(callable_) is None
    assert not is_c_callable(callable_)


C = [
    len,
    [].append,
    list.append,
    list,
    Dict,
    (5).__add__,
    functools.partial(len),
    functools.lru_cache(lambda: 1),
    re.compile("a").match,
    np.random.rand,
    staticmethod(len),
    types.MethodType(len, ()),
    torch.relu,
    torch.Size,
]


@pytest.mark.parametrize("callable_", C, ids=[str(i) for i in range(len(C))])
def test_c_callables(callable_) -> None:
    assert is_c_callable(callable_)


def test_a_lookup_runs_no_user_code() -> None:
    class Meta(type):
        def __getattribute__(cls, name):
            raise AssertionError("user code ran in a lookup")

    class Odd(metaclass=Meta):
        pass

    database = default_database()
    assert database.lookup(Hostile).name == "builtins.dict"
    assert database.lookup(Hostile().get).name == "builtins.dict.get"
    assert database.lookup(dict.get, Hostile()).name == "builtins.dict.get"
    assert database.lookup(Hostile.fromkeys).name == "builtins.dict.fromkeys"
    assert database.lookup(Odd) is database.lookup(object)
    assert database.lookup(type.__call__(Odd)) is None
    assert is_c_callable(Odd)
    assert not is_c_callable(type.__call__(Odd))


def test_a_user_class_is_not_kept_alive() -> None:
    database = default_database()
    local = type("Local", (dict,), {})
    reference = weakref.ref(local)
    assert database.lookup(local).name == "builtins.dict"
    assert database.lookup(local().get).name == "builtins.dict.get"
    assert database.lookup(local.fromkeys).name == "builtins.dict.fromkeys"
    del local
    gc.collect()
    assert reference() is None


def test_an_unannotated_callable_has_no_rule(tmp_path: Path) -> None:
    database = Database()
    path = tmp_path / "few.yaml"
    path.write_text("rules:\n  math.sin: pure\n")
    database.load(path)
    for callable_ in (math.sqrt, list, [].append, int.__add__, torch.ops.aten.add, np.add):
        assert database.lookup(callable_) is None


def test_an_entry_of_its_own_goes_before_the_one_for_all(tmp_path: Path) -> None:
    text = "rules:\n  math.*: pure\n  math.sin: {kind: dynamic, reason: test}\n"
    for name, content in (("a", text), ("b", "\n".join(reversed(text.splitlines()[1:])))):
        database = Database()
        path = tmp_path / f"{name}.yaml"
        path.write_text(content if content.startswith("rules") else "rules:\n" + content)
        database.load(path)
        assert database.lookup(math.sin).kind is Kind.DYNAMIC
        assert database.lookup(math.cos).name == "math.*"


def test_an_entry_for_an_inherited_method_is_for_receivers_of_that_class(tmp_path: Path) -> None:
    path = tmp_path / "few.yaml"
    path.write_text(
        "rules:\n  builtins.dict.get: pure\n"
        "  collections.Counter.get: {kind: dynamic, reason: test}\n"
    )
    database = Database()
    database.load(path)
    assert database.lookup(dict.get).kind is Kind.PURE
    assert database.lookup(dict.get, {}).kind is Kind.PURE
    assert database.lookup(dict.get, collections.Counter()).kind is Kind.DYNAMIC
    assert database.lookup({}.get).kind is Kind.PURE
    assert database.lookup(collections.Counter().get).kind is Kind.DYNAMIC


def test_nothing_is_imported_and_what_is_imported_later_is_found(tmp_path: Path) -> None:
    path = tmp_path / "few.yaml"
    path.write_text(
        "rules:\n  _queue.SimpleQueue: pure\n  late_module_of_a_test.f: {kind: random, reason: x}\n"
    )
    database = Database()
    database.load(path)
    assert database.lookup(math.sqrt) is None
    assert "late_module_of_a_test" not in sys.modules
    module = types.ModuleType("late_module_of_a_test")
    module.f = math.frexp
    sys.modules[module.__name__] = module
    try:
        assert database.lookup(math.frexp).kind is Kind.RANDOM
    finally:
        del sys.modules[module.__name__]


def test_rules_for_python_functions(tmp_path: Path) -> None:
    path = tmp_path / "few.yaml"
    path.write_text("rules:\n  textwrap.dedent: pure\n  json.JSONEncoder.encode: pure\n")
    import textwrap

    database = Database()
    database.load(path)
    assert database.lookup(textwrap.dedent).kind is Kind.PURE
    assert database.lookup(json.JSONEncoder().encode).kind is Kind.PURE


NAMES = [
    (len, "builtins.len"),
    (math.sqrt, "math.sqrt"),
    ([].append, "builtins.list.append"),
    (Dict().get, "builtins.dict.get"),
    (dict.fromkeys, "builtins.dict.fromkeys"),
    (Dict.fromkeys, "builtins.dict.fromkeys"),
    (list.__add__, "builtins.list.__add__"),
    ((5).__add__, "builtins.int.__add__"),
    (itertools.chain, "itertools.chain"),
    (operator.itemgetter(1), "operator.itemgetter.__call__"),
    (torch._C._get_tracing_state, "torch._C._get_tracing_state"),
    (torch.is_grad_enabled, "torch._C.is_grad_enabled"),
    (torch.Tensor.add, "torch._C.TensorBase.add"),
    (torch.relu, "torch.relu"),
    (re.compile("a").match, "re.Pattern.match"),
    (np.add, "numpy.add"),
]


@pytest.mark.parametrize(("callable_", "name"), NAMES, ids=[n for _, n in NAMES])
def test_a_missing_entry_is_yaml_that_annotates_the_callable(
    callable_, name: str, tmp_path: Path
) -> None:
    assert qualified_name(callable_) == name
    path = tmp_path / "missing.yaml"
    path.write_text(missing_entry(callable_))
    database = Database()
    assert database.load(path, strict=True) == 1
    assert database.lookup(callable_).kind is Kind.DYNAMIC
