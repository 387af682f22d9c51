"""The annotation language: what a call of a C callable does (MagPy §5.2), as typed rules.

A C callable has no Python code that the monitor could follow, so a rule says what a call does to
Python state. Grammar of a file::

    file          := rules: {NAME: rule, ...}   opaque_modules: [module, ...]     (each optional)
    NAME          := qualified name from a module on (`builtins.list.append`, `torch.relu`,
                     `torch.Tensor.shape.__get__`), or `X.*` for every C callable of the module,
                     type or operator namespace X that has no entry of its own
    rule          := KIND | {kind: KIND, ...}
    KIND          := op          a torch operation that a TorchFunctionMode sees (AsOpNode)
                   | pure        the result depends on nothing but the arguments (PureClosure)
                   | metadata    reads what `metadata` lists of a tensor, never its data
                   | value_read  reads the data of a tensor (ValueRead of a tensor)
                   | special     has a `handler` of its own in the recorder
                   | random      draws from a generator that is not torch's
                   | effect      acts on, or depends on, the world outside the program
                   | dynamic     never constant
                   | unseen      a torch operation that no TorchFunctionMode sees
    args          := {ARG: read | {read:, in_place:, calls:}, ...}
    ARG           := self | 0, 1, ... (self not counted) | keyword | "*" for all others
    read          := none        only the reference is used
                   | shallow     a container's length, keys and elements, the elements by reference
                   | items       as shallow; of an argument that is no mapping, each element's
                                 elements too (what `dict(x)` reads)
                   | deep        containers by value, recursively (the default)
    result        := fresh | {same_as: ARG} | {element_of: ARG} | {view_of: ARG}

`in_place`: the call may change the argument; an op may always change its `out`. `calls`: the
argument is a callable that the call runs, or that its lazy result runs. Special methods of
arguments run as frames of their own and are followed, tensors inside arguments are seen by the
mode: neither is annotated. Reading an iterator always advances it; an immutable object is its
reference. What is read later through a `view_of` counts as read by the call. `element_of` means
the argument itself or one of its elements.

Further keys: `handler` (special), `reason` (required for random, effect, dynamic and unseen),
`as_op: call` (unseen: calling it again with the same arguments reproduces it), `global_state`
(depends on torch state which the guard checks on every replay), `text` (shows its arguments as
text: the default `repr` of an object holds its address), `dynamic_shape` (an op whose result's
shape may depend on data), `metadata` (what of a tensor is read, see `METADATA`; of an op: what a
result that is no tensor depends on, where that is not the data).

A module: ``{module: NAME, reason: TEXT, submodules: BOOL, follow: [NAME in it, ...]}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cache
from pathlib import Path
from typing import NoReturn

import yaml

from magjit.errors import AnnotationError, Location

try:
    from yaml import CSafeLoader as _YamlLoader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader as _YamlLoader  # type: ignore[assignment]

METADATA = frozenset(
    {
        "device",
        "dtype",
        "grad",  # whether there is a `.grad`, a `grad_fn` or a hook
        "is_leaf",
        "keys",  # the dispatch key set: conjugate, negative, sparse, quantized, nested, inference
        "layout",
        "names",
        "requires_grad",
        "size",
        "storage_offset",
        "storage_size",
        "stride",
        "type",
    }
)
_BOOL = {"true": True, "false": False}


class Kind(StrEnum):
    """What a call is to the recorder; see the grammar above."""

    OP = "op"
    PURE = "pure"
    METADATA = "metadata"
    VALUE_READ = "value_read"
    SPECIAL = "special"
    RANDOM = "random"
    EFFECT = "effect"
    DYNAMIC = "dynamic"
    UNSEEN = "unseen"


class Read(IntEnum):
    """How much of an argument a call reads; a higher level includes the lower ones."""

    NONE = 0
    SHALLOW = 1
    ITEMS = 2
    DEEP = 3


class Relation(StrEnum):
    """How the result of a call relates to its arguments."""

    FRESH = "fresh"
    SAME_AS = "same_as"
    ELEMENT_OF = "element_of"
    VIEW_OF = "view_of"


@dataclass(frozen=True, slots=True)
class Argument:
    """What a call does to one argument."""

    read: Read = Read.DEEP
    in_place: bool = False
    calls: bool = False


ArgKey = int | str
DEEP = Argument()
_OUT = Argument(in_place=True)


@dataclass(frozen=True, slots=True)
class Result:
    """Where the result comes from; `of` names an argument as in `Rule.argument`."""

    relation: Relation = Relation.FRESH
    of: ArgKey | None = None


FRESH = Result()


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the database: what a call of the callable `name` does.

    Attributes:
        arguments: what is said of single arguments; ask `argument`.
        filename, line: where the entry is written.
    """

    name: str
    kind: Kind
    arguments: dict[ArgKey, Argument] = field(default_factory=dict)
    result: Result = FRESH
    handler: str | None = None
    reason: str | None = None
    as_op: str | None = None
    global_state: bool = False
    text: bool = False
    dynamic_shape: bool = False
    metadata: tuple[str, ...] = ()
    filename: str = ""
    line: int = 0

    def argument(self, key: ArgKey) -> Argument:
        """What the call does to an argument: `"self"`, a position after self, or a keyword."""
        found = self.arguments.get(key)
        if found is None and key == "out" and self.kind is Kind.OP:
            found = _OUT
        if found is None:
            found = DEEP if key == "self" else self.arguments.get("*", DEEP)
        return found

    @property
    def mutates(self) -> bool:
        """Whether the call may change any of its arguments."""
        return any(argument.in_place for argument in self.arguments.values())

    def __str__(self) -> str:
        parts = [self.handler or "", f"{self.result.relation} {self.result.of}"]
        shown = " ".join(p for p in parts if p and not p.startswith("fresh"))
        return f"{self.name}: {self.kind}{' ' + shown if shown else ''}"


@dataclass(frozen=True, slots=True)
class OpaqueModule:
    """A Python module whose frames need not be followed, and those functions which must be."""

    module: str
    reason: str
    follow: frozenset[str] = frozenset()
    submodules: bool = False
    filename: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True)
class AnnotationFile:
    """What one file says; `str` gives the number of entries."""

    filename: str
    rules: dict[str, Rule]
    opaque: dict[str, OpaqueModule]

    def __str__(self) -> str:
        return f"{self.filename}: {len(self.rules)} rules, {len(self.opaque)} opaque modules"


class _Loader(_YamlLoader):
    """Leaves tags unresolved: a third of the time of composing, and nobody looks at them."""

    def resolve(self, kind: object, value: object, implicit: object) -> str:
        return ""

    def descend_resolver(self, current_node: object, current_index: object) -> None:
        pass

    def ascend_resolver(self) -> None:
        pass


def parse_file(path: Path) -> AnnotationFile:
    """Read and validate one file.

    Raises:
        AnnotationError: the file cannot be read, is not YAML, or an entry is not well formed.
    """
    name = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AnnotationError(
            f"the annotation file cannot be read: {error}",
            remedy="give the path of a YAML file in UTF-8, or of a folder of such files",
            location=Location(name, 0, "the file"),
        ) from error
    try:
        root = yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise AnnotationError(
            f"not valid YAML: {getattr(error, 'problem', None) or error}",
            remedy="correct the syntax of the line",
            location=Location(name, mark.line + 1 if mark else 0, "the file"),
        ) from error
    parser = _Parser(name)
    return AnnotationFile(name, *parser.file(root))


class _Parser:
    """Walks composed nodes: lines stay known, and it is twice as fast as constructing objects."""

    def __init__(self, filename: str) -> None:
        self._filename = filename
        self._entry = "the file"

    def _fail(self, node: yaml.Node, reason: str, remedy: str) -> NoReturn:
        where = Location(self._filename, node.start_mark.line + 1, self._entry)
        raise AnnotationError(f"{self._entry}: {reason}", remedy=remedy, location=where)

    def _pairs(self, node: yaml.Node, what: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            self._fail(node, f"{what} must be a mapping", "write `key: value` pairs")
        pairs: list[tuple[yaml.ScalarNode, yaml.Node]] = node.value
        seen: set[str] = set()
        for key, _ in pairs:
            if type(key) is not yaml.ScalarNode:
                self._fail(key, f"a key of {what} must be a name", "write `name: value`")
            if key.value in seen:
                self._fail(key, f"{key.value!r} is there twice", "keep one of the two")
            seen.add(key.value)
        return pairs

    def _one_of(self, node: yaml.Node, allowed: Collection[str], what: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.value not in allowed:
            shown = node.value if isinstance(node, yaml.ScalarNode) else "a collection"
            choices = ", ".join(sorted(allowed))
            self._fail(node, f"{what} is {shown!r}, which is unknown", f"write one of: {choices}")
        value: str = node.value
        return value

    def _bool(self, node: yaml.Node) -> bool:
        if not isinstance(node, yaml.ScalarNode) or node.value not in _BOOL:
            self._fail(node, "a flag must be a truth value", "write true or false")
        return _BOOL[node.value]

    def _text(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
            self._fail(node, "a text is missing", "write some words")
        return " ".join(node.value.split())

    def _texts(self, node: yaml.Node) -> list[str]:
        if not isinstance(node, yaml.SequenceNode):
            self._fail(node, "a list is expected", "write `[a, b]`")
        return [self._text(item) for item in node.value]

    def file(self, root: yaml.Node | None) -> tuple[dict[str, Rule], dict[str, OpaqueModule]]:
        rules: dict[str, Rule] = {}
        opaque: dict[str, OpaqueModule] = {}
        for key, node in self._pairs(root, "the file") if root is not None else ():
            self._entry = "the file"
            if key.value == "rules":
                rules = self._rules(node)
            elif key.value == "opaque_modules":
                opaque = self._opaque_modules(node)
            else:
                remedy = "write `rules:` or `opaque_modules:`"
                self._fail(key, f"{key.value!r} is no section of an annotation file", remedy)
        return rules, opaque

    def _rules(self, node: yaml.Node) -> dict[str, Rule]:
        rules: dict[str, Rule] = {}
        for key, value in self._pairs(node, "`rules`"):
            name = self._entry = key.value
            if _QUALIFIED_NAME.fullmatch(name) is None:
                remedy = "write the qualified name, as in `builtins.list.append` or `math.*`"
                self._fail(key, "this is no qualified name", remedy)
            line = key.start_mark.line + 1
            if isinstance(value, yaml.ScalarNode):
                kind = self._kind(value)
                if kind not in _SHORT:
                    self._check(value, {"kind": kind})
                rules[name] = Rule(name, kind, filename=self._filename, line=line)
            else:
                rules[name] = self._rule(name, value, line)
        return rules

    def _kind(self, node: yaml.Node) -> Kind:
        return _KINDS[self._one_of(node, _KINDS, "the kind")]

    def _rule(self, name: str, node: yaml.Node, line: int) -> Rule:
        values: dict[str, object] = {}
        for key, value in self._pairs(node, "a rule"):
            read = _RULE_KEYS.get(key.value)
            if read is None:
                known = ", ".join(_RULE_KEYS)
                self._fail(key, f"{key.value!r} is no key of a rule", f"the keys are: {known}")
            values["arguments" if key.value == "args" else key.value] = read(self, value)
        if "kind" not in values:
            self._fail(node, "`kind` is missing", f"add `kind:` and one of: {sorted(_KINDS)}")
        self._check(node, values)
        return Rule(name=name, filename=self._filename, line=line, **values)  # type: ignore[arg-type]

    def _check(self, node: yaml.Node, values: dict[str, object]) -> None:
        """What one key demands of another."""
        kind = values["kind"]
        for key, kinds, required in _DEMANDS:
            if key in values and kinds is not None and kind not in kinds:
                self._fail(node, f"`{key}` means nothing for {kind}", "remove it")
            if kind in required and key not in values:
                self._fail(node, f"kind {kind} needs `{key}`", f"add `{key}:`")

    def _arg_key(self, node: yaml.Node) -> ArgKey:
        value = node.value if isinstance(node, yaml.ScalarNode) else ""
        if not (value == "*" or value.isdecimal() or value.isidentifier()):
            remedy = 'write self, a position, a keyword or "*"'
            self._fail(node, "this names no argument", remedy)
        return int(value) if value.isdecimal() else str(value)

    def _arguments(self, node: yaml.Node) -> dict[ArgKey, Argument]:
        pairs = self._pairs(node, "`args`")
        return {self._arg_key(key): self._argument(value) for key, value in pairs}

    def _argument(self, node: yaml.Node) -> Argument:
        if isinstance(node, yaml.ScalarNode):
            return _argument(self._read(node), False, False)
        values: dict[str, yaml.Node] = {}
        for key, value in self._pairs(node, "an argument"):
            if key.value not in ("read", "in_place", "calls"):
                remedy = "the keys are: read, in_place, calls"
                self._fail(key, f"{key.value!r} is no key of an argument", remedy)
            values[key.value] = value
        read = self._read(values["read"]) if "read" in values else Read.DEEP
        flags = [key in values and self._bool(values[key]) for key in ("in_place", "calls")]
        return _argument(read, *flags)

    def _read(self, node: yaml.Node) -> Read:
        return _READS[self._one_of(node, _READS, "`read`")]

    def _result(self, node: yaml.Node) -> Result:
        if isinstance(node, yaml.ScalarNode):
            self._one_of(node, frozenset({"fresh"}), "the result")
            return FRESH
        pairs = self._pairs(node, "the result")
        if len(pairs) != 1:
            self._fail(node, "a result has one relation", "write `{element_of: self}`")
        relation = Relation(self._one_of(pairs[0][0], _RELATIONS, "the relation"))
        return Result(relation, self._arg_key(pairs[0][1]))

    def _as_op(self, node: yaml.Node) -> str:
        return self._one_of(node, frozenset({"call"}), "`as_op`")

    def _metadata(self, node: yaml.Node) -> tuple[str, ...]:
        if not isinstance(node, yaml.SequenceNode):
            self._fail(node, "`metadata` must be a list", "write `[size, stride]`")
        return tuple(self._one_of(item, METADATA, "a metadata field") for item in node.value)

    def _opaque_modules(self, node: yaml.Node) -> dict[str, OpaqueModule]:
        if not isinstance(node, yaml.SequenceNode):
            self._fail(node, "`opaque_modules` must be a list", "write `- module: NAME`")
        modules: dict[str, OpaqueModule] = {}
        for item in node.value:
            self._entry = "opaque_modules"
            values: dict[str, yaml.Node] = {
                key.value: value for key, value in self._pairs(item, "a module")
            }
            extra = set(values) - {"module", "reason", "follow", "submodules"}
            if extra or not {"module", "reason"} <= set(values):
                remedy = "the keys are: module, reason (both required), submodules, follow"
                self._fail(item, f"wrong keys {sorted(extra) or sorted(values)}", remedy)
            name = self._entry = self._text(values["module"])
            if name in modules:
                self._fail(item, f"{name!r} is there twice", "keep one of the two")
            modules[name] = OpaqueModule(
                name,
                self._text(values["reason"]),
                frozenset(self._texts(values["follow"]) if "follow" in values else ()),
                "submodules" in values and self._bool(values["submodules"]),
                self._filename,
                item.start_mark.line + 1,
            )
        return modules


@cache
def _argument(read: Read, in_place: bool, calls: bool) -> Argument:
    return Argument(read, in_place, calls)


_KINDS = {kind.value: kind for kind in Kind}
_QUALIFIED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(\.\*)?")
_READS = {read.name.lower(): read for read in Read}
_RELATIONS = frozenset(Relation) - {Relation.FRESH}
_RULE_KEYS: dict[str, Callable[[_Parser, yaml.Node], object]] = {
    "kind": _Parser._kind,
    "handler": _Parser._text,
    "reason": _Parser._text,
    "args": _Parser._arguments,
    "result": _Parser._result,
    "as_op": _Parser._as_op,
    "global_state": _Parser._bool,
    "text": _Parser._bool,
    "dynamic_shape": _Parser._bool,
    "metadata": _Parser._metadata,
}
# (key, kinds that may have it or None for all, kinds that must)
_DEMANDS: tuple[tuple[str, frozenset[Kind] | None, frozenset[Kind]], ...] = (
    ("handler", frozenset({Kind.SPECIAL}), frozenset({Kind.SPECIAL})),
    ("reason", None, frozenset({Kind.RANDOM, Kind.EFFECT, Kind.DYNAMIC, Kind.UNSEEN})),
    ("as_op", frozenset({Kind.UNSEEN}), frozenset()),
    ("global_state", frozenset({Kind.PURE, Kind.SPECIAL}), frozenset()),
    ("dynamic_shape", frozenset({Kind.OP, Kind.UNSEEN}), frozenset()),
    ("metadata", frozenset({Kind.METADATA, Kind.OP}), frozenset({Kind.METADATA})),
)
_SHORT = frozenset(Kind).difference(*(required for _, _, required in _DEMANDS))
