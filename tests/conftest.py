"""What every test has: one thread, a fixed seed, and proof that nothing was left behind."""

from __future__ import annotations

import gc
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    import torch
except (
    ImportError
):  # the C part and the bytecode layer are tested on interpreters without torch, too
    torch = None

ROOT = Path(__file__).resolve().parent.parent
# Last on the path: an installed magjit, as on the GPU machine, comes before the source tree.
# The benchmarks are scripts, which import one another by their bare names.
sys.path += [str(ROOT), str(ROOT / "benchmarks")]

if torch is not None:
    torch.set_num_threads(1)

    from magjit import rehearsal

    rehearsal.IDLE_THREADS.append("execnet.")  # of pytest-xdist, in each worker

    # Where there is no device, torch.manual_seed prints the stack for each kind of device and
    # keeps it: that takes longer than many a test, and more memory than all of them.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        metavar="I/N",
        help="run the I-th of N parts; which part a test belongs to depends on its name alone",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        keep_part(config, items, part)
    if torch is None or not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there before the first test stays: no later collection need look through it.

    Those are a million objects, most of them the tests themselves; the tests that collect, or
    count objects, took longer over these than over their own.
    """
    gc.collect()
    gc.freeze()


def keep_part(config: pytest.Config, items: list[pytest.Item], part: str) -> None:
    """Deselects the items of all other parts, in place."""
    try:
        index, count = (int(number) for number in part.split("/"))
    except ValueError:
        raise pytest.UsageError(f"--part takes I/N, such as 1/3, not {part!r}") from None
    if not 1 <= index <= count:
        raise pytest.UsageError(f"--part {part}: the parts are numbered from 1 to {count}")
    kept, dropped = [], []
    for item in items:
        mine = zlib.crc32(item.nodeid.encode()) % count == index - 1
        (kept if mine else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def stance() -> str:
    """Of MagJIT, which a test need not import."""
    module = sys.modules.get("magjit.stances")
    return "default" if module is None else module.current()


def process_state() -> dict[str, object]:
    """State that a capture or a failed capture must leave as it was."""
    state: dict[str, object] = {
        "trace": sys.gettrace(),
        "profile": sys.getprofile(),
        "collector": gc.isenabled(),
    }
    if monitoring := getattr(sys, "monitoring", None):
        state["tools"] = tuple(monitoring.get_tool(tool) for tool in range(6))
    if torch is not None:
        state |= {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "threads": torch.get_num_threads(),
            "stance": stance(),
            "function modes": torch._C._len_torch_function_stack(),
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
        }
    return state


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Seeds torch; fails a test after which trace functions, modes or flags differ."""
    if torch is not None:
        seed(0)
    before = process_state()
    yield
    after = process_state()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"left behind (before, after): {changed}"
