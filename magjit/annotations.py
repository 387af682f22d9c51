"""The annotation database: finds the rule for a callable that has no Python code (MagPy §5.2).

`annotation_rules` has the language of the files; this module resolves the names of the rules to
the objects of the running process and finds the rule of a callable, whichever way it was reached:
as a function, an unbound or bound method, a slot of a type, a constructor, an operator of
`torch.ops`, or an instance whose type has a C `__call__`.

Nothing is imported for a name: a rule for a module that the program has not imported stays pending
until the module appears in `sys.modules`. A callable that has Python code has a rule only where
the database names it itself (`torch.nn.functional.relu`); otherwise `lookup` gives None and its
frames are followed. None for a C callable (`is_c_callable`) means that it is not annotated.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from magjit.annotation_rules import (
    AnnotationFile,
    Argument,
    Kind,
    OpaqueModule,
    Read,
    Relation,
    Result,
    Rule,
    parse_file,
)
from magjit.errors import AnnotationError, Location
from magjit.garbage import uncollected

__all__ = [
    "Argument",
    "Database",
    "Kind",
    "OpaqueModule",
    "Read",
    "Relation",
    "Result",
    "Rule",
    "default_database",
    "is_c_callable",
    "load",
    "missing_entry",
    "qualified_name",
]

_MISSING = object()
_ACCESSORS = ("__get__", "__set__", "__delete__")
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_C_FUNCTIONS: tuple[type, ...] = (
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
# What a builtin function wraps itself in when it is an attribute of a class.
_WRAPPERS = ("classmethod", "instancemethod", "staticmethod")
_DESCRIPTORS = (
    types.ClassMethodDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
# Compiled by Cython: callables without Python code, of types that every module has its own of.
_CYTHON = ("cython_function_or_method", "fused_cython_function")

# Asking a class of the user for these, or `isinstance` of its instance, could run its code.
_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_type_dict: Callable[[type], dict[str, object]] = type.__dict__["__dict__"].__get__
_type_name: Callable[[type], str] = type.__dict__["__name__"].__get__
_type_flags: Callable[[type], int] = type.__dict__["__flags__"].__get__


def _static(cls: type, name: str) -> object:
    """The class attribute as `_PyType_Lookup` finds it: runs no user code."""
    for base in _mro(cls):
        found = _type_dict(base).get(name, _MISSING)
        if found is not _MISSING:
            return found
    return _MISSING


def _unwrapped(obj: object) -> object:
    wrapped = _type_name(type(obj)) in _WRAPPERS
    return obj.__func__ if wrapped else obj  # type: ignore[attr-defined]


def _is_c_function(obj: object) -> bool:
    cls = type(obj)
    return issubclass(cls, _C_FUNCTIONS) or _type_name(cls) in _CYTHON


def is_c_callable(obj: object) -> bool:
    """Whether calling `obj` runs C code before any Python frame of its own."""
    cls = type(obj)
    if cls is types.FunctionType:
        return False
    if cls is types.MethodType or _type_name(cls) in _WRAPPERS:
        return is_c_callable(obj.__func__)  # type: ignore[attr-defined]
    if _is_c_function(obj):
        return True
    call = _static(cls, "__call__")
    if issubclass(cls, type):
        parts = [call, _static(obj, "__new__"), _static(obj, "__init__")]  # type: ignore[arg-type]
        return all(_is_c_function(part) for part in parts)
    return call is not _MISSING and is_c_callable(call)


def _find(name: str) -> tuple[object, str, object] | None:
    """(owner, attribute, object) of a qualified name, when its module has been imported."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        module = sys.modules.get(".".join(parts[:split]))
        if module is not None:
            break
    else:
        return None
    owner: object = module
    found: object = module
    for part in parts[split:]:
        owner = found
        if part in _ACCESSORS and not isinstance(owner, type):
            found = owner
        elif isinstance(owner, types.ModuleType):
            found = vars(owner).get(part, _MISSING)
        elif isinstance(owner, type):
            found = _static(owner, part)
        else:
            # Such as `torch._C._VariableFunctions`: an object with C functions as attributes.
            found = _static(type(owner), part)
        if found is _MISSING:
            return None
    return owner, parts[-1], found


class Database:
    """Rules by name, found by callable.

    `lookup` takes less than a microsecond for a callable that it has met before.
    """

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self._opaque: dict[str, OpaqueModule] = {}
        self._pending: dict[str, Rule] = {}
        self._modules_seen = 0
        # By identity; `_kept` holds every object whose id is a key.
        self._by_id: dict[int, Rule] = {}
        self._explicit: set[int] = set()
        self._kept: list[object] = []
        # Builtin functions made anew at each access compare equal.
        self._by_value: dict[object, Rule] = {}
        self._accessors: dict[tuple[int, str], Rule] = {}
        # By the class of the receiver, too.
        self._inherited: dict[tuple[int, int], Rule] = {}
        self._bound: dict[tuple[int, str], Rule | None] = {}
        # Classes that rules name: besides static types, the only ones in `_bound`.
        self._owners: set[int] = set()

    def __len__(self) -> int:
        return len(self._rules)

    def __str__(self) -> str:
        return f"{len(self._rules)} rules, {len(self._opaque)} opaque modules"

    @property
    def rules(self) -> dict[str, Rule]:
        """All rules by name, in the order of loading (a copy)."""
        return dict(self._rules)

    @property
    def opaque_modules(self) -> dict[str, OpaqueModule]:
        """All opaque modules by name (a copy)."""
        return dict(self._opaque)

    def load(self, path: str | Path, *, strict: bool = False) -> int:
        """Add a YAML file, or all of a folder; an entry replaces one loaded earlier.

        With `strict`, modules are imported and every name must exist. Returns how many entries
        were read. After an error the database is as it was.

        Raises:
            AnnotationError: a file is not valid, two files of the folder have the same entry, or
                (strict) a name does not exist.
        """
        path = Path(path)
        paths = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        with uncollected():
            rules, opaque = _merge([parse_file(one) for one in paths])
        if strict:
            for rule in rules.values():
                _demand_existence(rule)
        self._rules.update(rules)
        self._opaque.update(opaque)
        self._reset()
        return len(rules) + len(opaque)

    def _reset(self) -> None:
        self._pending = {n: r for n, r in self._rules.items() if not n.startswith("torch.ops.")}
        self._modules_seen = 0
        tables: tuple[dict[object, object] | set[int] | list[object], ...] = (
            self._by_id,  # type: ignore[assignment]
            self._explicit,
            self._kept,
            self._by_value,
            self._accessors,
            self._inherited,
            self._bound,
            self._owners,
        )
        for table in tables:
            table.clear()

    # ------------------------------------------------------------------ names to objects

    def _resolve(self) -> None:
        """Resolve what is pending; again whenever modules have been imported."""
        if len(sys.modules) == self._modules_seen:
            return
        self._modules_seen = len(sys.modules)
        self._bound.clear()
        for rule in list(self._pending.values()):
            place = _find(rule.name.removesuffix(".*"))
            if place is None:
                continue
            del self._pending[rule.name]
            if rule.name.endswith(".*"):
                self._register_members(place[2], rule)
            else:
                self._register(*place, rule, explicit=True)

    def _register_members(self, container: object, rule: Rule) -> None:
        if isinstance(container, types.ModuleType):
            members = vars(container)
        else:
            members = _type_dict(container if isinstance(container, type) else type(container))
        for attribute, found in list(members.items()):
            if _is_c_function(_unwrapped(found)):
                self._register(container, attribute, found, rule, explicit=False)

    def _register(
        self, owner: object, attribute: str, found: object, rule: Rule, *, explicit: bool
    ) -> None:
        if attribute in _ACCESSORS and found is owner:
            self._accessors[id(found), attribute] = rule
            self._kept.append(found)
            return
        found = _unwrapped(found)
        key = id(found)
        inherited = isinstance(owner, type) and attribute not in _type_dict(owner)
        if isinstance(owner, type):
            self._owners.add(id(owner))
            self._kept.append(owner)
            if inherited:
                self._inherited[key, id(owner)] = rule
        if key in self._explicit and (inherited or not explicit):
            return
        if explicit:
            self._explicit.add(key)
        self._by_id[key] = rule
        self._kept.append(found)
        if isinstance(found, types.BuiltinFunctionType):
            self._by_value[found] = rule

    # ------------------------------------------------------------------ callables to rules

    def lookup(self, callable_: object, self_obj: object = None) -> Rule | None:
        """The rule of a callable, or None.

        Args:
            callable_: what is called, bound or not.
            self_obj: the receiver, where the call site has it beside the callable; an entry for an
                inherited method of its class then goes before the one of the defining class.
        """
        if len(sys.modules) != self._modules_seen:
            self._resolve()
        rule = self._by_id.get(id(callable_))
        if rule is not None:
            if self_obj is not None:
                return self._inherited.get((id(callable_), id(type(self_obj))), rule)
            return rule
        cls = type(callable_)
        if cls is types.FunctionType:
            return None
        if issubclass(cls, (types.BuiltinFunctionType, types.MethodWrapperType)):
            return self._of_bound(callable_)
        return self._of_other(callable_)

    def is_opaque(self, module: str, qualname: str) -> bool:
        """Whether frames of a function need not be followed: `f.__module__, f.__qualname__`."""
        found = self._opaque.get(module)
        if found is None:
            parent = module
            while found is None and "." in parent:
                parent = parent.rpartition(".")[0]
                found = self._opaque.get(parent)
            if found is None or not found.submodules:
                return False
        return qualname not in found.follow and qualname.split(".")[0] not in found.follow

    def _of_bound(self, bound: Any) -> Rule | None:
        receiver = bound.__self__
        name: str = bound.__name__
        cls = type(receiver)
        try:
            return self._bound[id(cls), name]
        except KeyError:
            pass
        if name in _ACCESSORS and (id(receiver), name) in self._accessors:
            return self._accessors[id(receiver), name]
        if cls is types.ModuleType:
            return self._by_value.get(bound)
        if issubclass(cls, type):
            return self._by_value.get(bound) or self._of_class_method(receiver, name)
        rule, certain = self._of_method(receiver, bound, name)
        if rule is None and issubclass(type(bound), types.BuiltinFunctionType):
            rule, certain = self._by_value.get(bound), False
        if certain and (not _type_flags(cls) & _HEAP_TYPE or id(cls) in self._owners):
            self._bound[id(cls), name] = rule
        return rule

    def _of_method(self, receiver: object, bound: object, name: str) -> tuple[Rule | None, bool]:
        """The rule of a bound method, and whether it is so for the type whoever the receiver."""
        candidates: list[Any] = []
        for base in _mro(type(receiver)):
            found = _type_dict(base).get(name)
            if issubclass(type(found), _DESCRIPTORS):
                candidates.append(found)
        if len(candidates) > 1:
            # `super().pop(...)` binds a base's method: equal means the same C function.
            exact = [c for c in candidates if c.__get__(receiver) == bound]
            candidates = exact or candidates
        if not candidates:
            return None, False
        key = id(candidates[0])
        rule = self._inherited.get((key, id(type(receiver)))) or self._by_id.get(key)
        return rule, len(candidates) == 1

    def _of_class_method(self, cls: type, name: str) -> Rule | None:
        for base in (*_mro(cls), *_mro(type(cls))):
            found = _type_dict(base).get(name)
            rule = self._by_id.get(id(_unwrapped(found)))
            if rule is not None:
                return rule
        return None

    def _of_other(self, callable_: Any) -> Rule | None:
        cls = type(callable_)
        if issubclass(cls, type):
            return self._of_constructor(callable_)
        if cls is types.MethodType:
            return self.lookup(callable_.__func__, callable_.__self__)
        if _type_name(cls) in _WRAPPERS:
            return self.lookup(_unwrapped(callable_))
        if any(_type_dict(base).get("__module__") == "torch._ops" for base in _mro(cls)):
            rule = self._of_operator(callable_)
            if rule is not None:
                self._by_id[id(callable_)] = rule
                self._kept.append(callable_)
            return rule
        call = _static(cls, "__call__")
        return self._by_id.get(id(call)) if _is_c_function(call) else None

    def _of_constructor(self, cls: type) -> Rule | None:
        """A class without Python code of its own constructs as the C class it inherits from."""
        if _static(type(cls), "__call__") is not _type_dict(type)["__call__"]:
            return None
        if not is_c_callable(cls):
            return None
        for base in _mro(cls):
            members = _type_dict(base)
            if "__new__" in members or "__init__" in members:
                return self._by_id.get(id(base))
        return None

    def _of_operator(self, operator: object) -> Rule | None:
        """Rules of `torch.ops`: the overload's, its packet's, then those of the namespaces."""
        name = getattr(operator, "_name", None) or getattr(operator, "_qualified_op_name", None)
        if not isinstance(name, str):
            return None
        namespace, _, rest = name.rpartition("::")
        name = f"torch.ops.{namespace or 'higher_order'}.{rest}"
        names = [name]
        while name.count(".") > 1:
            name = name.rpartition(".")[0]
            names += [name, f"{name}.*"]
        return next((self._rules[n] for n in names if n in self._rules), None)


def _merge(parsed: list[AnnotationFile]) -> tuple[dict[str, Rule], dict[str, OpaqueModule]]:
    rules: dict[str, Rule] = {}
    opaque: dict[str, OpaqueModule] = {}
    for file in parsed:
        double = (file.rules.keys() & rules.keys()) | (file.opaque.keys() & opaque.keys())
        for name in double:
            entry = file.rules.get(name) or file.opaque[name]
            first = rules.get(name) or opaque[name]
            raise AnnotationError(
                f"{name} is also an entry of {first.filename}:{first.line}",
                remedy="keep one of the two, or load the files one after the other",
                location=Location(entry.filename, entry.line, name),
            )
        rules.update(file.rules)
        opaque.update(file.opaque)
    return rules, opaque


def _demand_existence(rule: Rule) -> None:
    name = rule.name.removesuffix(".*")
    if name.startswith("torch.ops"):
        return
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        try:
            importlib.import_module(".".join(parts[:end]))
        except ImportError:
            break
    if name not in sys.modules and _find(name) is None:
        raise AnnotationError(
            f"{rule.name} does not exist",
            remedy="correct the name, or load without strict",
            location=Location(rule.filename, rule.line, rule.name),
        )


@functools.cache
def default_database() -> Database:
    """The database that ships with MagJIT, loaded on first use, and what the user added to it."""
    database = Database()
    database.load(_shipped_folder())
    return database


def _shipped_folder() -> Path:
    beside = Path(__file__).parent.parent / "annotations"
    if (beside / "builtins.yaml").exists():
        return beside
    return Path(str(files("magjit_annotations")))


def load(path: str | Path, *, strict: bool = False) -> int:
    """Add the user's own annotations to the default database; see `Database.load`."""
    return default_database().load(path, strict=strict)


def qualified_name(callable_: object) -> str:
    """The name under which a rule for a callable is written."""
    if isinstance(callable_, type):
        return f"{callable_.__module__}.{callable_.__qualname__}"
    func: Any = _unwrapped(getattr(callable_, "__func__", callable_))
    name = getattr(func, "__name__", None)
    if not isinstance(name, str) or not callable(func):
        return f"{qualified_name(type(func))}.__call__"
    receiver = getattr(func, "__self__", None)
    owner = getattr(func, "__objclass__", None)
    if isinstance(receiver, types.ModuleType) and not isinstance(func, types.MethodWrapperType):
        return f"{receiver.__name__}.{name}"
    if owner is None and receiver is not None:
        start = receiver if isinstance(receiver, type) else type(receiver)
        owner = next((base for base in _mro(start) if name in _type_dict(base)), None)
    if isinstance(owner, type):
        return f"{qualified_name(owner)}.{name}"
    module = getattr(func, "__module__", None) or "builtins"
    return f"{module}.{getattr(func, '__qualname__', name).rpartition('.')[2]}"


def missing_entry(callable_: object) -> str:
    """YAML to paste for a callable that has no rule: the cautious one, to be made more exact."""
    name = qualified_name(callable_)
    text = (getattr(callable_, "__doc__", None) or "").strip().splitlines()
    says = f"  # {text[0][:80]}\n" if text else ""
    return (
        f"rules:\n{says}  {name}:\n    kind: dynamic\n"
        "    reason: not annotated yet (if nothing but its arguments matters, its kind is pure)\n"
    )
