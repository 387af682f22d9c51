"""The layers of the project hold: who may import whom, how long a file is, what a build lists.

Every import counts, also one inside a function, under TYPE_CHECKING, or by a constant name through
importlib.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What a layer of magjit may import besides itself; what those may import comes with it.
# The order is that in which data flows.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "garbage": set(),
    "plugin": {"errors", "config", "garbage"},
    "annotation_rules": {"errors"},
    "annotations": {"annotation_rules", "garbage"},
    "bytecode": {"errors"},
    "monitor": {"bytecode", "annotations", "config"},
    "marks": {"errors"},
    "refgraph": {"monitor", "marks"},
    "guards": {"refgraph", "plugin"},
    "mocks": {"refgraph"},
    "replayed_function": {"monitor", "plugin"},
    "lower_fx": {"refgraph", "plugin", "replayed_function"},
    "handles": {"plugin"},
    "late_graphs": {"guards", "handles"},
    "records": {"guards", "mocks", "lower_fx", "late_graphs"},
    "decisions": {"mocks"},
    "shape_memo": {"plugin"},
    "layouts": {"monitor", "plugin"},
    "symbolic_shapes": {"refgraph", "shape_memo", "layouts"},
    "shape_history": {"refgraph", "plugin"},
    "continuations": {"bytecode", "marks"},
    "roots": {"refgraph", "continuations"},
    "cutting": {"refgraph", "continuations"},
    "observe": {"garbage", "records", "symbolic_shapes", "shape_history", "roots", "cutting"},
    "rehearsal": {"observe"},
    "pipeline": {"observe", "decisions"},
    "regions": {"observe"},
    "own_frames": set(),
    "stances": {"errors"},
    "dispatch": {"pipeline", "regions", "rehearsal", "own_frames", "stances"},
    "api": {"dispatch"},
    "reporting": {"api"},
    "cli": {"reporting"},
    "__main__": {"cli"},
    "__init__": {"api", "reporting"},
}
C_EXTENSION = "magjit._C"
EXTENSIONS = {C_EXTENSION, "magjit_dvm._vm", "magjit_triton._select"}
USES_C_EXTENSION = {
    "__init__",  # which loads it once versions are checked
    "bytecode",
    "monitor",
    "refgraph",
    "guards",
    "mocks",
    "symbolic_shapes",
    "handles",
    "late_graphs",
    "records",
    "decisions",
    "continuations",
    "cutting",
    "observe",
    "rehearsal",
    "pipeline",
    "regions",
    "stances",
    "dispatch",
    "api",
}

# C says the same in more lines.
LONGEST_FILE = {".py": 500, ".c": 650, ".h": 650, ".cpp": 650}
LONG_FILES: dict[str, str] = {}  # path: why it is one room all the same


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement: the importing module, what it imports, and where."""

    importer: str
    imported: str
    where: str


def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def module_folders() -> dict[str, Path]:
    """Top-level package name → folder, backends included that the build does not list yet."""
    folders = {"magjit": ROOT / "magjit", "magjit_annotations": ROOT / "annotations"}
    for folder in sorted((ROOT / "backends").glob("*/")):
        folders[folder.name] = folder
    if (ROOT / "paritybench_runner").is_dir():
        folders["paritybench_runner"] = ROOT / "paritybench_runner"
    return folders


BACKENDS = {name for name, folder in module_folders().items() if folder.parent.name == "backends"}


@cache
def modules() -> dict[str, Path]:
    """Every Python module of ours by dotted name; a package is its `__init__`."""
    found = {}
    for package, folder in module_folders().items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


def native_sources() -> list[Path]:
    """C and C++ files of all extensions."""
    folders = [ROOT / "magjit" / "csrc", *sorted((ROOT / "backends").glob("*/csrc"))]
    return [
        path
        for one in folders
        for path in sorted(one.glob("*.*"))
        if path.suffix in LONGEST_FILE and path.suffix != ".py"
    ]


def known_module(name: str) -> str | None:
    """The longest prefix of a dotted name that is a module of ours, or None."""
    while name:
        if name in modules() or name in EXTENSIONS:
            return name
        name = name.rpartition(".")[0]
    return None


def imported_names(node: ast.AST, package: str) -> Iterator[str]:
    """Absolute dotted names that a node imports; `from a import b` gives `a.b`."""
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


@cache
def imports() -> tuple[Import, ...]:
    """Every import of one project module by another."""
    found = []
    for importer, path in modules().items():
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(), path)):
            for name in imported_names(node, package):
                imported = known_module(name)
                if imported is not None and imported != importer:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.append(Import(importer, imported, where))
    return tuple(found)


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def may_import(layer: str) -> set[str]:
    """The layers that a layer may import, itself and what comes with the direct ones included."""
    allowed, pending = {layer}, [layer]
    while pending:
        for below in LAYERS[pending.pop()] - allowed:
            allowed.add(below)
            pending.append(below)
    return allowed


def allowed_in_magjit(importer: str, imported: str) -> bool:
    layer = layer_of(importer)
    if imported == C_EXTENSION:
        return layer in USES_C_EXTENSION
    if imported.split(".")[0] != "magjit":
        return imported.startswith("magjit_annotations")
    return layer_of(imported) in may_import(layer)


def test_every_module_of_magjit_has_a_layer() -> None:
    layers = {layer_of(name) for name in modules() if name.startswith("magjit.")}
    assert layers <= LAYERS.keys(), "add the new layer to LAYERS and to the design"


def test_the_table_of_layers_has_no_cycle() -> None:
    for layer in LAYERS:
        assert not any(layer in may_import(below) for below in LAYERS[layer]), layer


def test_magjit_imports_only_the_layers_below() -> None:
    wrong = [
        f"{found.where}: {found.importer} imports {found.imported}"
        for found in imports()
        if found.importer.split(".")[0] == "magjit"
        if not allowed_in_magjit(found.importer, found.imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_backend_imports_the_plugin_interface_only() -> None:
    wrong = [
        f"{found.where}: {found.importer} imports {found.imported}"
        for found in imports()
        if (own := found.importer.split(".")[0]) in BACKENDS
        if found.imported.split(".")[0] != own
        if not (found.imported + ".").startswith("magjit.plugin.")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_runner_and_the_benchmarks_use_the_public_interface() -> None:
    outside = [path for name, path in modules().items() if name.startswith("paritybench_runner")]
    outside += sorted((ROOT / "benchmarks").glob("*.py")) + sorted(
        (ROOT / "examples").rglob("*.py")
    )
    wrong = []
    for path in outside:
        for node in ast.walk(ast.parse(path.read_text(), path)):
            for name in imported_names(node, ""):
                module = known_module(name) or ""
                public = module == "magjit" or (module + ".").startswith("magjit.plugin.")
                if module.startswith("magjit") and not public:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_through_others() -> None:
    edges: dict[str, set[str]] = {}
    for found in imports():
        edges.setdefault(found.importer, set()).add(found.imported)
    cycles = sorted(find_cycles(edges))
    assert not cycles, "\n".join(" → ".join(cycle) for cycle in cycles)


def find_cycles(edges: dict[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """One cycle for each back edge of a depth-first walk; none exactly when the graph has none."""
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if module in path:
            yield (*path[path.index(module) :], module)
        elif module not in done:
            for below in sorted(edges.get(module, ())):
                yield from walk(below, (*path, module))
            done.add(module)

    for start in sorted(edges):
        yield from walk(start, ())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b", ["a.b"]),
        ("def f():\n    from a import b, c", ["a.b", "a.c"]),
        ("from . import x", ["p.q.x"]),
        ("from ..r import x", ["p.r.x"]),
        ("importlib.import_module('a.b')", ["a.b"]),
        ("__import__('a')", ["a"]),
        ("import_module(name)", []),
    ],
)
def test_import_forms_are_recognised(source: str, expected: list[str]) -> None:
    nodes = ast.walk(ast.parse(source))
    assert [name for node in nodes for name in imported_names(node, "p.q")] == expected


def test_cycles_are_found() -> None:
    assert list(find_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == [("a", "b", "c", "a")]
    assert not list(find_cycles({"a": {"b", "c"}, "b": {"c"}}))


def test_files_are_small_rooms() -> None:
    sources = [*modules().values(), *native_sources()]
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources
        if (lines := len(path.read_text().splitlines())) > LONGEST_FILE[path.suffix]
    }
    unexplained = {path: lines for path, lines in long.items() if path not in LONG_FILES}
    assert not unexplained, f"over {LONGEST_FILE} lines: split, or say why in LONG_FILES"
    assert not LONG_FILES.keys() - long.keys(), "no longer long: take them out of LONG_FILES"


# Spelled in pieces, so that this file does not contain them.
FORBIDDEN = {
    "a path of somebody's machine": r"(?<![\w.])/(?:"
    + "|".join(["work", "root", "home", "opt/wheels"])
    + r")/",
    "an issue's number": r"\b[Ii]ss" r"ue #?\d",
    "an unfinished place": r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b",
}


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_tree_names(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        relative = path.relative_to(ROOT)
        found += [
            f"{relative}:{n}: {line.strip()[:80]}"
            for n, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    assert not found, f"{what} in\n" + "\n".join(found)


def test_the_build_lists_every_package() -> None:
    tool = settings()["tool"]["setuptools"]
    packages = set()
    for name, path in modules().items():
        if path.name == "__init__.py":
            packages.add(name)
    assert set(tool["packages"]) == packages
    folders = {name: ROOT / folder for name, folder in tool["package-dir"].items()}
    assert folders == {name: module_folders()[name] for name in folders}


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("magjit._C", "magjit/csrc"),
        ("magjit_dvm._vm", "backends/magjit_dvm/csrc"),
        ("magjit_triton._select", "backends/magjit_triton/csrc"),
    ],
)
def test_the_build_lists_every_native_file(name: str, folder: str) -> None:
    extensions = settings()["tool"]["setuptools"]["ext-modules"]
    (extension,) = (one for one in extensions if one["name"] == name)
    listed = [*extension["sources"], *extension["depends"]]
    files = [*native_sources(), *(ROOT / folder).glob("*.inc")]
    in_tree = [str(path.relative_to(ROOT)) for path in files if path.parent == ROOT / folder]
    assert sorted(listed) == sorted(in_tree)


def test_every_entry_point_exists() -> None:
    project = settings()["project"]
    targets = [*project["scripts"].values()]
    for group in project["entry-points"].values():
        targets += group.values()
    for target in targets:
        module, _, attribute = target.partition(":")
        assert module in modules(), target
        tree = ast.parse(modules()[module].read_text())
        defined = {
            name.id if isinstance(name, ast.Name) else getattr(name, "asname", None) or name.name
            for node in ast.walk(tree)
            for name in ast.iter_child_nodes(node)
            if isinstance(name, ast.FunctionDef | ast.ClassDef | ast.alias)
            or (isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
        }
        assert attribute in defined, target
