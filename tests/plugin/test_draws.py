"""Random numbers are eager mode's, in its order."""

from __future__ import annotations

import pytest

from tests.plugin.draws import PROGRAMS, check


@pytest.mark.parametrize("backend", ["eager", "dvm", "triton"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_of_eager_mode(program: str, backend: str) -> None:
    check(program, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["dvm", "triton"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_on_a_gpu(program: str, backend: str) -> None:
    check(program, backend, "cuda")
