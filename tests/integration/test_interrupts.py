"""Ctrl-C at any time: the program stops with KeyboardInterrupt, and all is as it was before."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import magjit
from magjit.observe import capture_lock

from ..conftest import ROOT, process_state

INTERRUPTS = 90


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.fixture
def alarm() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(model: nn.Module, x: torch.Tensor, seconds: float) -> bool:
    """Capture again and again until the alarm goes off; False when nobody heard it."""
    compiled = magjit.compile(model, backend="eager")
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for _ in range(100):
            compiled(x)
            compiled(x)
            magjit.reset(compiled)
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False


AUDITED = """
import sys

def hook(event, arguments):
    for _ in range(3):  # where an interrupt may come, in the midst of switching observation off
        pass

sys.addaudithook(hook)
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_with_an_audit_hook() -> None:
    """Which cannot be taken away again, hence the process of its own."""
    command = [sys.executable, "-c", AUDITED, f"{__file__}::test_interrupts"]
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


# An interrupt inside a weakref's callback is dropped by Python itself, with a report.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_interrupts(alarm: None) -> None:
    assert threading.current_thread() is threading.main_thread()
    model, x = Net(), torch.randn(2, 8)
    expected = model(x)
    magjit.compile(model, backend="eager")(x)
    before = process_state()
    times = random.Random(0)
    heard = 0
    for _ in range(INTERRUPTS):
        heard += interrupted(model, x, times.uniform(0.001, 0.02))
        assert process_state() == before
        assert gc.isenabled()
    assert heard > INTERRUPTS / 2
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    assert magjit.stats(compiled).captures == 1
    assert not capture_lock
