"""Process state that rows change is put back after each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from .rows_modules import drop_global_hooks


@pytest.fixture(autouse=True)
def process_put_back() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    dtype, environment, modules = torch.get_default_dtype(), dict(os.environ), set(sys.modules)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)
    drop_global_hooks()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name in set(sys.modules) - modules:
        if name.startswith("magjit_test"):
            del sys.modules[name]
