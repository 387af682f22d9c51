"""The command line: results, exit statuses, errors without tracebacks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from magjit.annotations import Database, default_database
from magjit.cli import main
from magjit.cli.targets import make_tensors

PROGRAMS = Path(__file__).with_name("programs.py")


@pytest.fixture(autouse=True)
def import_state(monkeypatch):
    """Commands that load programs add to the import path."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    modules = set(sys.modules)
    log = logging.getLogger("magjit")
    before = log.level, log.handlers[:], log.propagate
    yield
    assert before == (log.level, log.handlers, log.propagate)
    for name in set(sys.modules) - modules:
        if name == "programs":
            del sys.modules[name]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def target(name: str) -> str:
    return f"{PROGRAMS}:{name}"


# -- explain ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["make"],
        ["make_with_keywords"],
        ["make_model", "--shape", "2,4"],
        ["Deep", "--shape", "2,8", "--eval", "--no-grad"],
        ["doubles", "--shape", "2,2", "--dtype", "float64"],
        ["doubles", "--shape", "", "--device", "cpu"],
    ],
    ids=" ".join,
)
def test_explain_takes_targets_of_all_sorts(capsys, arguments) -> None:
    name, *rest = arguments
    status, out, err = run(capsys, "explain", target(name), *rest)
    assert status == 0, err
    assert "one graph of" in out


def test_explain_takes_a_module_by_name(capsys) -> None:
    status, out, _ = run(capsys, "explain", f"{__package__}.programs:make")
    assert status == 0 and out.startswith("Block with backend eager: one graph")


def test_explain_of_a_split_says_where_and_gives_1(capsys) -> None:
    status, out, err = run(capsys, "explain", target("decides"), "--shape", "3")
    assert status == 1
    assert "programs.py:" in out and "way out:" in out
    assert err == "" or "runs eagerly" not in err


def test_explain_as_json_is_json_alone(capsys) -> None:
    status, out, err = run(capsys, "explain", target("prints"), "--shape", "3", "--json")
    content = json.loads(out)
    assert content["name"] == "prints" and status == (0 if content["whole"] else 1)
    assert "from the program" in err


def test_explain_writes_a_page_and_a_folder(capsys, tmp_path) -> None:
    page, folder = tmp_path / "page.html", tmp_path / "dump"
    options = ["--html", str(page), "--dump", str(folder)]
    status, _, err = run(capsys, "explain", target("make"), *options)
    assert status == 0
    assert page.read_text().startswith("<!doctype html>") and str(page) in err
    assert (folder / "index.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no.such.module:x"], "ArgumentError: There is no module no.such.module"),
        (["no_such_file.py:x"], "ArgumentError: There is no file no_such_file.py"),
        ([target("nothing")], "has no nothing"),
        ([str(PROGRAMS)], "must be MODULE:NAME"),
        ([target("A_NUMBER")], "is a int, which cannot be called"),
        ([target("make_number")], "returned a int"),
        ([target("doubles")], "takes arguments"),
        ([target("doubles"), "--shape", "1,x"], "'1,x' is no shape"),
        ([target("doubles"), "--shape", "-1"], "is no shape"),
        ([target("doubles"), "--shape", "1", "--dtype", "flaot"], "'flaot' is no dtype"),
        ([target("doubles"), "--shape", "1", "--dtype", "int", "--dtype", "int"], "2 dtypes"),
        ([target("doubles"), "--shape", "1", "--device", "gpuu"], "is no device"),
        ([target("make"), "--backend", "indutcor"], "UnknownBackendError: No backend is named"),
        ([target("raises"), "--shape", "1"], "raised KeyError: 'no such thing'"),
        ([target("make"), "--html", "/no/such/folder/x.html"], "Cannot write"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else value[:20],
)
def test_explain_names_what_is_wrong(capsys, arguments, expected) -> None:
    status, _, err = run(capsys, "explain", *arguments)
    assert status == 2
    assert expected in err and err.startswith("magjit: ") or "\nmagjit: " in err


def test_an_error_of_the_program_names_its_line(capsys) -> None:
    _, _, err = run(capsys, "explain", target("raises"), "--shape", "1")
    assert f"  at {PROGRAMS}:" in err and " in raises" in err


def test_verbose_shows_the_traceback(capsys) -> None:
    assert main(["-v", "explain", target("raises"), "--shape", "1"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_tensors_are_the_same_at_every_start() -> None:
    one, two = (make_tensors(["2,3", "4"], ["float32", "int64"]) for _ in range(2))
    assert [t.shape for t in one] == [(2, 3), (4,)]
    assert one[1].dtype is torch.int64
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert [t.dtype for t in make_tensors(["1", "2"], ["bool"])] == [torch.bool] * 2


# -- annotations --------------------------------------------------------------------------------

SCRIPT = """
import sys
import resource
import torch, magjit

def f(x):
    size = resource.getpagesize()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return x + size + (usage is None)

@magjit.compile(backend="eager")
def g(x):
    return x + resource.getpagesize() + len(sys.argv)

compiled = magjit.compile(f, backend="eager")
for _ in range(3):
    assert compiled(torch.zeros(2)).tolist() == f(torch.zeros(2)).tolist()
g(torch.zeros(2))
print("arguments", sys.argv[1:])
if "fail" in sys.argv:
    raise ValueError("wanted")
sys.exit(0)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_missing_lists_all_callables_once_ready_to_paste(capsys, script, tmp_path) -> None:
    status, out, err = run(capsys, "annotations", "missing", script, "a", "--flag")
    assert status == 1
    assert "arguments ['a', '--flag']" in err
    names = [line.strip() for line in out.splitlines() if line.startswith("  resource.")]
    assert names == ["resource.getpagesize:", "resource.getrusage:"]
    pasted = tmp_path / "pasted.yaml"
    pasted.write_text(out)
    assert Database().load(pasted, strict=True) == 2


def test_a_survey_leaves_the_database_as_it_was(capsys, script) -> None:
    import resource

    run(capsys, "annotations", "missing", script)
    assert "lookup" not in vars(default_database())
    assert default_database().lookup(resource.getpagesize) is None


def test_missing_reports_a_failing_script_and_what_was_found(capsys, script) -> None:
    status, out, err = run(capsys, "annotations", "missing", script, "fail")
    assert status == 2
    assert "ProgramError" in err and "raised ValueError: wanted" in err
    assert "resource.getpagesize" in out


def test_missing_of_a_script_without_any(capsys, tmp_path) -> None:
    path, output = tmp_path / "script.py", tmp_path / "found.yaml"
    path.write_text("import torch, magjit\nmagjit.compile(torch.relu, backend='eager')\n")
    status, out, _ = run(capsys, "annotations", "missing", "--output", output, path)
    assert status == 0 and out == ""
    assert output.read_text().startswith("# no C callable")


def test_missing_of_no_script(capsys, tmp_path) -> None:
    status, _, err = run(capsys, "annotations", "missing", tmp_path / "none.py")
    assert status == 2 and "There is no file" in err


def test_check_says_whether_files_are_well_formed(capsys, tmp_path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("rules:\n  builtins.len: pure\n")
    bad.write_text("rules:\n  builtins.len: pur\n")
    status, out, _ = run(capsys, "annotations", "check", good)
    assert status == 0 and "1 entry is well formed" in out
    status, _, err = run(capsys, "annotations", "check", good, bad)
    assert status == 2 and "AnnotationError" in err and f"{bad}:2" in err
    good.write_text("rules:\n  builtins.no_such: pure\n")
    assert run(capsys, "annotations", "check", good)[0] == 0
    assert run(capsys, "annotations", "check", "--strict", good)[0] == 2


# -- the rest -----------------------------------------------------------------------------------


def test_backends_are_listed(capsys) -> None:
    status, out, _ = run(capsys, "backends")
    names = [line.split()[0] for line in out.splitlines()]
    assert status == 0 and {"eager", "inductor"} <= set(names) and names == sorted(names)
    assert len(run(capsys, "backends", "--all")[1]) > len(out)


def test_env_says_what_is_supported(capsys) -> None:
    status, out, _ = run(capsys, "env")
    assert status == 0 and torch.__version__ in out and "NO:" not in out
    content = json.loads(run(capsys, "env", "--json")[1])
    assert content["support"]["torch"]["ok"] is True
    assert content["versions"]["python"] == sys.version.split()[0]


@pytest.mark.parametrize("arguments", [[], ["explain"], ["annotations"], ["nonsense"]])
def test_wrong_arguments_give_2_and_usage(capsys, arguments) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: magjit" in capsys.readouterr().err


def test_help_and_env_need_no_torch() -> None:
    """They are what a user runs who wonders why the import of torch fails."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['magjit._C'] = None\n"
        "from magjit.cli import main\n"
        "assert main(['env']) in (0, 1)\n"
        "main(['--help'])\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "exit status:" in done.stdout


def test_python_m_magjit() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "magjit", "annotations", "check", "none.yaml"],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("magjit: AnnotationError: ")
