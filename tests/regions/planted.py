"""Faults to plant into MagJIT, one at a time: generated programs have to find each.

Run as a program, with a fault's name, it plants it into a copy of the package and looks for a
program that the copy gets wrong: ``python -m tests.regions.planted NAME [PROGRAMS]``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Fault:
    """A text of one of MagJIT's files and what it becomes."""

    file: str
    right: str
    wrong: str


FAULTS: dict[str, Fault] = {
    # -- guards
    "a guard does not compare values": Fault(
        "guards/emit.py",
        'code.emit("eq", slot, value)',
        'code.emit("type_is", slot, type(value))',
    ),
    "a guard does not compare lengths": Fault(
        "guards/emit.py", '    code.emit("len", src, target.value)', "    pass"
    ),
    "a guard does not compare keys": Fault(
        "guards/emit.py", '    code.emit("keys", src, target.value)', "    pass"
    ),
    "a guard lets a key appear": Fault(
        "guards/emit.py", '        code.emit("absent", src, key)\n', ""
    ),
    "a guard forgets decisions by numbers": Fault(
        "refgraph/numbers.py",
        "            self.outcomes.append((number, bool(func(*operands))))",
        "            pass",
    ),
    "a guard lets one object be two": Fault(
        "guards/emit.py",
        '            code.later("same", slot, code.slots[target.node_id])',
        "            pass",
    ),
    # -- mocks
    "a number is the one of the run": Fault(
        "mocks/plan.py", "        if not number.live:\n", "        if number is not None:\n"
    ),
    "a mock makes an object twice": Fault(
        "mocks/plan.py", "        found = self._exprs.get(key)\n", "        found = None\n"
    ),
    "a mock forgets deletions": Fault(
        "mocks/writes.py",
        "    return [write for write in kept if write is not None]",
        "    return [write for write in kept if write is not None and not is_deletion(write)]",
    ),
    "a mock leaves a container as it was": Fault(
        "mocks/changes.py", "change.initial, change.final)", "change.initial, change.initial)"
    ),
    "a mock shows nothing": Fault(
        "refgraph/recorder.py",
        "        self.effects.append(Effect(func, args, kwargs))",
        "        pass",
    ),
    "a mock does not restore grad mode": Fault(
        "regions.py",
        "        recorder.effects.append(Effect(grad_mode, (bool(now[_GRAD]),), {}))\n",
        "",
    ),
    # -- the recorder
    "whether a key is there is not noted": Fault(
        "refgraph/recorder.py",
        "        if node is None or relation in node.written:\n            return\n",
        "        if node is None or relation in node.written or type(relation) is r.Has:\n"
        "            return\n",
    ),
    "a write is not noted": Fault(
        "refgraph/nodes.py", "        self.written.setdefault(relation)\n", ""
    ),
    "a change in place is not noted": Fault(
        "refgraph/recorder.py", "        node.mutated = True\n", ""
    ),
    "a changed tensor stays a constant": Fault(
        "monitor/operators.py",
        "                found.const = False  # changed through another view of its storage\n",
        "                pass\n",
    ),
    "every tensor is a constant": Fault(
        "monitor/operators.py",
        "            if not const or name in TEXT_METHODS:  # texts depend on settings of torch\n"
        "                self._observer.split(\n"
        '                    f"reads the data of a tensor into Python ({name})",',
        "            if const is None:\n                self._observer.split(\n"
        '                    f"reads the data of a tensor into Python ({name})",',
    ),
    "a float of a tensor is a constant": Fault(
        "lower_fx.py",
        "            return self.nodes[number.source.value_id]",
        "            return number.original",
    ),
    # -- regions
    "a region gets the locals in another order": Fault(
        "regions.py",
        "        return (chain if region is None else region.dispatcher), picked\n",
        "        target = chain if region is None else region.dispatcher\n"
        "        return target, tuple(sorted(picked, reverse=True))\n",
    ),
    "a loop's iterator is not stepped": Fault(
        "refgraph/containers.py",
        '        rec.split("uses up an iterator that was made outside the program")\n    elif',
        "        pass\n    elif",
    ),
}

_NOT_FOUND = 4

_SEARCH = """
import faulthandler, sys, warnings
warnings.simplefilter("ignore")
import magjit
assert magjit.__file__.startswith({folder!r}), magjit.__file__
from hypothesis import Phase, given, seed, settings
from tests.regions.generated import changes, sources
from tests.regions.test_generated import LENIENT, check

count = 0

@seed(0)
@settings(max_examples={programs}, deadline=None, database=None, phases=[Phase.generate],
          suppress_health_check=LENIENT, report_multiple_bugs=False)
@given(sources(), changes)
def search(source, between):
    global count
    count += 1
    # A program that does not end, as when an iterator is never stepped, ends the process.
    faulthandler.dump_traceback_later(30, exit=True)
    check(source, between)
    faulthandler.cancel_dump_traceback_later()

print("searching", flush=True)
try:
    search()
except BaseException as error:
    print(f"found by program {{count}}: {{type(error).__name__}}")
    sys.exit(0)
print(f"not found by {{count}} programs")
sys.exit({not_found})
"""


def search(name: str, programs: int, seconds: float) -> str | None:
    """Plant a fault and look for a program that shows it; what was found, or None.

    Raises:
        AssertionError: the file has not the text that the fault replaces, exactly once.
    """
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "magjit", Path(folder) / "magjit")
        path = Path(folder) / "magjit" / fault.file
        text = path.read_text()
        assert text.count(fault.right) == 1, f"{name}: {text.count(fault.right)} places to plant it"
        path.write_text(text.replace(fault.right, fault.wrong))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([folder, str(ROOT), str(ROOT / "backends")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        code = _SEARCH.format(programs=programs, folder=folder, not_found=_NOT_FOUND)
        command = [sys.executable, "-P", "-c", code]
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return None
        if done.returncode == _NOT_FOUND:
            return None
        lines = done.stdout.strip().splitlines()
        assert lines[:1] == ["searching"], f"{name}: {done.stderr[-2000:]}"
        if len(lines) > 1:
            return lines[-1]
        assert done.returncode < 0 or "Timeout" in done.stderr, f"{name}: {done.stderr[-2000:]}"
        return "found: the process ended, or a program does not"


if __name__ == "__main__":
    names = sys.argv[1:2] or list(FAULTS)
    for each in names:
        found = search(each, int(sys.argv[2]) if len(sys.argv) > 2 else 2000, 1200)
        print(f"{each}: {found or 'NOT FOUND'}", flush=True)
