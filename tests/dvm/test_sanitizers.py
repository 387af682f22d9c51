"""The extension under gcc's address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "backends" / "magjit_dvm"
SANITIZE = [
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
]

pytestmark = pytest.mark.slow


def _runtime() -> str | None:
    """The libraries to load before everything else: the sanitizer, and whose ``throw`` it wraps."""
    gcc = shutil.which("gcc")
    if gcc is None:
        return None
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        asked = [gcc, f"-print-file-name={name}"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(found).is_absolute():
            return None
        paths.append(found)
    return " ".join(paths)


def _built(folder: Path) -> None:
    """A copy of the package with an extension of its own, built as pyproject says."""
    shutil.copytree(PACKAGE, folder / "magjit_dvm", ignore=shutil.ignore_patterns("*.so"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    modules = project["tool"]["setuptools"]["ext-modules"]
    (module,) = [one for one in modules if one["name"] == "magjit_dvm._vm"]
    flags = [flag for flag in module["extra-compile-args"] if not flag.startswith("-O")]
    includes = [f"-I{sysconfig.get_paths()['include']}"]
    includes += [f"-I{ROOT / path}" for path in module["include-dirs"]]

    def compiled(source: str) -> str:
        to = folder / (Path(source).stem + ".o")
        command = ["g++", "-fPIC", *flags, *SANITIZE, "-w", *includes, "-c", str(ROOT / source)]
        subprocess.run([*command, "-o", str(to)], check=True)
        return str(to)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, module["sources"]))
    name = f"_vm{sysconfig.get_config_var('EXT_SUFFIX')}"
    linked = ["g++", "-shared", *SANITIZE, *objects, "-ldl", "-o"]
    subprocess.run([*linked, str(folder / "magjit_dvm" / name)], check=True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    runtime = _runtime()
    if runtime is None or shutil.which("g++") is None:
        pytest.skip("gcc's sanitizer library is not installed")
    folder = tmp_path_factory.mktemp("sanitized")
    _built(folder)
    inherited = [*filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "LD_PRELOAD": runtime,
        # Frames that outlive their call are not aligned as GCC 13 assumes of vectors of 64 bytes.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join([str(folder), *inherited, str(ROOT), str(ROOT / "backends")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "2",
    }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_instructions.py", ""),
        ("test_fuzz.py", "test_random or test_other_sizes or threads"),
        ("test_verifier.py", "not mutations"),
        ("test_handlers.py", ""),
        ("test_positions.py", ""),
        ("test_joining.py", ""),
        ("test_panels.py", "not training"),
        ("test_teams.py", ""),
        ("test_memo.py", ""),
        ("../dvm_cuda/test_native.py", "not behind and not many"),
    ],
)
def test_sanitized(environment: dict[str, str], file: str, chosen: str) -> None:
    where = subprocess.run(
        [sys.executable, "-c", "import magjit_dvm._vm as vm; print(vm.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert environment["PYTHONPATH"].split(os.pathsep)[0] in where.stdout
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-s"]
    command += ["-m", "not slow", "-k", chosen, str(ROOT / "tests" / "dvm" / file)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).splitlines()
    found = [k for k, line in enumerate(lines) if "runtime error" in line or "ERROR: Addr" in line]
    assert not found, "\n".join(lines[found[0] : found[0] + 40])
    assert done.returncode == 0, "\n".join(lines[-60:])
