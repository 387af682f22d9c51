"""The language of annotation files: what is accepted, and what is refused with which words."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import magjit.annotations as annotations
from magjit.annotations import Argument, Database, Kind, Read, Relation, Result
from magjit.errors import AnnotationError


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load_one(folder: Path, rule: str, name: str = "math.sqrt"):
    database = Database()
    database.load(write(folder, f"rules:\n  {name}: {rule}\n"))
    return database.rules[name]


def test_short_rule(tmp_path: Path) -> None:
    rule = load_one(tmp_path, "pure")
    assert rule.kind is Kind.PURE
    assert rule.argument("self") == rule.argument(0) == rule.argument("x") == Argument(Read.DEEP)
    assert rule.result == Result()
    assert not rule.mutates
    assert rule.line == 2
    assert rule.filename.endswith("mine.yaml")


def test_arguments(tmp_path: Path) -> None:
    rule = load_one(
        tmp_path,
        "{kind: pure, args: {self: {read: shallow, in_place: true}, 0: none,"
        " key: {read: none, calls: true}, '*': items}}",
    )
    assert rule.argument("self") == Argument(Read.SHALLOW, in_place=True)
    assert rule.argument(0) == Argument(Read.NONE)
    assert rule.argument("key") == Argument(Read.NONE, calls=True)
    assert rule.argument(1) == rule.argument("other") == Argument(Read.ITEMS)
    assert rule.mutates


def test_star_does_not_speak_of_self(tmp_path: Path) -> None:
    rule = load_one(tmp_path, "{kind: pure, args: {'*': none}}")
    assert rule.argument("self").read is Read.DEEP


def test_an_op_changes_its_out(tmp_path: Path) -> None:
    assert load_one(tmp_path, "op").argument("out").in_place
    assert not load_one(tmp_path, "pure").argument("out").in_place


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("fresh", Result()),
        ("{same_as: self}", Result(Relation.SAME_AS, "self")),
        ("{element_of: 0}", Result(Relation.ELEMENT_OF, 0)),
        ("{view_of: '*'}", Result(Relation.VIEW_OF, "*")),
    ],
)
def test_results(tmp_path: Path, text: str, result: Result) -> None:
    assert load_one(tmp_path, f"{{kind: pure, result: {text}}}").result == result


def test_remaining_keys(tmp_path: Path) -> None:
    rule = load_one(tmp_path, "{kind: special, handler: getattr, reason: a  b, text: true}")
    assert (rule.handler, rule.reason, rule.text) == ("getattr", "a b", True)
    rule = load_one(tmp_path, "{kind: unseen, reason: none asks, as_op: call}")
    assert rule.as_op == "call"
    rule = load_one(tmp_path, "{kind: pure, global_state: true}")
    assert rule.global_state
    rule = load_one(tmp_path, "{kind: op, dynamic_shape: true, metadata: [size, dtype]}")
    assert rule.dynamic_shape
    assert rule.metadata == ("size", "dtype")


def test_modules(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "opaque_modules:\n"
        "  - {module: a.b, reason: only operators, follow: [f, C.g]}\n"
        "  - {module: a.c, reason: only operators, submodules: true, follow: [D]}\n",
    )
    database = Database()
    assert database.load(path) == 2
    assert database.is_opaque("a.b", "other")
    assert not database.is_opaque("a.b", "f")
    assert not database.is_opaque("a.b", "f.<locals>.inner")
    assert not database.is_opaque("a.b", "C.g")
    assert database.is_opaque("a.b", "C.h")
    assert not database.is_opaque("a.b.deeper", "h")
    assert database.is_opaque("a.c.deeper.still", "h")
    assert not database.is_opaque("a.c.deeper", "D.h")
    assert not database.is_opaque("a.bc", "h")
    assert not database.is_opaque("a", "h")


WRONG = {
    "no YAML": ("rules:\n  a.b: [\n", 3, "YAML"),
    "a list": ("- a\n", 1, "must be a mapping"),
    "a section": ("rule:\n  a.b: pure\n", 1, "no section"),
    "rules of no mapping": ("rules: [a]\n", 1, "must be a mapping"),
    "a name": ("rules:\n  a b: pure\n", 2, "qualified name"),
    "a name with a star inside": ("rules:\n  a.*.b: pure\n", 2, "qualified name"),
    "a kind": ("rules:\n  a.b: clean\n", 2, "'clean'"),
    "a kind in a mapping": ("rules:\n  a.b:\n    kind: [pure]\n", 3, "a collection"),
    "no kind": ("rules:\n  a.b: {text: true}\n", 2, "`kind` is missing"),
    "a key": ("rules:\n  a.b:\n    kind: pure\n    reads: deep\n", 4, "'reads'"),
    "the same name twice": ("rules:\n  a.b: pure\n  a.b: op\n", 3, "twice"),
    "the same key twice": ("rules:\n  a.b: {kind: op, kind: op}\n", 2, "twice"),
    "a flag": ("rules:\n  a.b: {kind: pure, text: 1}\n", 2, "truth value"),
    "an argument": ("rules:\n  a.b: {kind: pure, args: {-1: none}}\n", 2, "no argument"),
    "a read": ("rules:\n  a.b: {kind: pure, args: {0: all}}\n", 2, "'all'"),
    "an argument's key": (
        "rules:\n  a.b: {kind: pure, args: {0: {inplace: true}}}\n",
        2,
        "'inplace'",
    ),
    "arguments as a list": ("rules:\n  a.b: {kind: pure, args: [none]}\n", 2, "must be a mapping"),
    "a relation": ("rules:\n  a.b: {kind: pure, result: {part_of: 0}}\n", 2, "'part_of'"),
    "two relations": ("rules:\n  a.b: {kind: pure, result: {same_as: 0, view_of: 1}}\n", 2, "one"),
    "a result": ("rules:\n  a.b: {kind: pure, result: old}\n", 2, "'old'"),
    "as_op": ("rules:\n  a.b: {kind: unseen, reason: r, as_op: yes}\n", 2, "'yes'"),
    "metadata": ("rules:\n  a.b: {kind: metadata, metadata: [colour]}\n", 2, "'colour'"),
    "metadata as a word": ("rules:\n  a.b: {kind: metadata, metadata: size}\n", 2, "list"),
    "metadata missing": ("rules:\n  a.b: metadata\n", 2, "needs `metadata`"),
    "reason missing": ("rules:\n  a.b: effect\n", 2, "needs `reason`"),
    "reason empty": ("rules:\n  a.b: {kind: effect, reason: ''}\n", 2, "text is missing"),
    "handler missing": ("rules:\n  a.b: special\n", 2, "needs `handler`"),
    "handler of pure": ("rules:\n  a.b: {kind: pure, handler: h}\n", 2, "means nothing"),
    "dynamic shape of pure": ("rules:\n  a.b: {kind: pure, dynamic_shape: true}\n", 2, "nothing"),
    "as_op of op": ("rules:\n  a.b: {kind: op, as_op: call}\n", 2, "means nothing"),
    "modules as a mapping": ("opaque_modules: {a: b}\n", 1, "must be a list"),
    "module without reason": ("opaque_modules:\n  - {module: a}\n", 2, "wrong keys"),
    "module with more": ("opaque_modules:\n  - {module: a, reason: b, c: d}\n", 2, "'c'"),
    "module twice": (
        "opaque_modules:\n  - {module: a, reason: b}\n  - {module: a, reason: b}\n",
        3,
        "twice",
    ),
    "follow as a word": ("opaque_modules:\n  - {module: a, reason: b, follow: c}\n", 2, "list"),
}


@pytest.mark.parametrize(("text", "line", "words"), WRONG.values(), ids=WRONG)
def test_refusals_name_file_line_reason_and_way_out(
    tmp_path: Path, text: str, line: int, words: str
) -> None:
    database = Database()
    database.load(write(tmp_path, "rules:\n  math.sqrt: pure\n", "good.yaml"))
    bad = write(tmp_path, text, "bad.yaml")
    with pytest.raises(AnnotationError) as caught:
        database.load(bad)
    error = caught.value
    assert words in error.reason
    assert error.remedy
    assert error.location is not None
    assert (error.location.filename, error.location.line) == (str(bad), line)
    assert list(database.rules) == ["math.sqrt"], "a refused file must leave nothing behind"
    assert database.lookup(math.sqrt) is database.rules["math.sqrt"]


def test_an_error_in_a_folder_leaves_nothing_of_the_folder_behind(tmp_path: Path) -> None:
    write(tmp_path, "rules:\n  math.sqrt: pure\n", "a.yaml")
    write(tmp_path, "rules:\n  math.sin: clean\n", "b.yaml")
    database = Database()
    with pytest.raises(AnnotationError):
        database.load(tmp_path)
    assert len(database) == 0


def test_two_files_of_a_folder_must_not_have_the_same_entry(tmp_path: Path) -> None:
    first = write(tmp_path, "rules:\n  math.sqrt: pure\n", "a.yaml")
    second = write(tmp_path, "rules:\n  math.sqrt: op\n", "b.yaml")
    with pytest.raises(AnnotationError, match="also an entry") as caught:
        Database().load(tmp_path)
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)


def test_a_later_file_replaces_entries(tmp_path: Path) -> None:
    database = Database()
    database.load(write(tmp_path, "rules:\n  math.sqrt: pure\n  math.sin: pure\n"))
    assert database.lookup(math.sqrt).kind is Kind.PURE
    later = "rules:\n  math.sqrt: {kind: dynamic, reason: test}\n"
    assert database.load(write(tmp_path, later)) == 1
    assert database.lookup(math.sqrt).kind is Kind.DYNAMIC
    assert database.lookup(math.sin).kind is Kind.PURE


@pytest.mark.parametrize("content", [None, b"\xff\xfe rules"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AnnotationError, match="cannot be read"):
        Database().load(path)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "rules: {}\n", "opaque_modules: []\n"])
def test_an_empty_file_is_valid(tmp_path: Path, text: str) -> None:
    assert Database().load(write(tmp_path, text)) == 0


def test_a_name_that_does_not_exist_is_refused_only_with_strict(tmp_path: Path) -> None:
    path = write(tmp_path, "rules:\n  math.sqrt: pure\n  math.squirt: pure\n")
    database = Database()
    with pytest.raises(AnnotationError, match="does not exist") as caught:
        database.load(path, strict=True)
    assert caught.value.location.line == 3
    assert len(database) == 0
    assert database.load(path) == 2


def test_strict_imports_the_modules_it_needs(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "rules:\n  colorsys.rgb_to_hsv: pure\n  math.*: pure\n  builtins.int.bit_length: pure\n"
        "  torch.ops.mine.*: op\n",
    )
    assert Database().load(path, strict=True) == 4


def test_load_adds_to_the_default_database(tmp_path: Path, monkeypatch) -> None:
    database = Database()
    monkeypatch.setattr(annotations, "default_database", lambda: database)
    assert annotations.load(write(tmp_path, "rules:\n  math.sqrt: pure\n")) == 1
    assert database.lookup(math.sqrt) is not None


def test_printing(tmp_path: Path) -> None:
    rule = load_one(tmp_path, "{kind: special, handler: h, result: {element_of: self}}")
    assert str(rule) == "math.sqrt: special h element_of self"
    assert str(load_one(tmp_path, "pure")) == "math.sqrt: pure"
    assert str(Database()) == "0 rules, 0 opaque modules"
