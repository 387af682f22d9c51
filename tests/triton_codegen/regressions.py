"""Run in a process of its own, through Triton's interpreter: programs that were once wrong.

The last line of the output is a JSON object: name → text of the failure, or "".
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import reducing  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import magjit  # noqa: E402
from magjit_triton import backend  # noqa: E402
from magjit_triton.codegen.entry import generates_kernels  # noqa: E402
from tests.plugin import draws, sizes_of_data  # noqa: E402
from tests.triton_backend import returned_views  # noqa: E402
from tests.triton_backend import test_regressions as shared  # noqa: E402
from tests.triton_backend.running import check  # noqa: E402
from tests.triton_backend.test_in_place_programs import check_program  # noqa: E402

reducing.install()
aten = torch.ops.aten


def kept_by_a_library(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.sort(x)[0]
    return torch.view_as_complex(a.view(4, 2, 2)), a.exp()


def parts_of_no_kernel(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a = x.exp()
    return torch.unsafe_chunk(torch.view_as_complex(a.view(4, 2, 2)), 2)[0], a.sin()


def written_and_copied(x: Tensor, y: Tensor) -> Tensor:
    x[1:3] = y[:2] * 2
    y.copy_(x.t())
    return x @ y


def old_kept(x: Tensor, y: Tensor) -> Tensor:
    old = x.clone()
    x[1:3] = y[:2] * 2
    return old @ y


def raising(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    u = y[:2] * 2
    z = torch.linalg.inv(y)
    x[1:3] = y[:2] * 3
    return z + 1, u


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return magjit.compile(function, backend=backend, fullgraph=True, **options)


def run(function: Callable[..., Any], calls: Sequence[Sequence[Tensor]], **options: Any) -> None:
    call = compiled(function, **options)
    for arguments in calls:
        eager, ours = ([one.clone() for one in arguments] for _ in range(2))
        check(function(*eager), call(*ours), 1e-5)
        check(eager, ours, 1e-5)


def run_raising() -> None:
    call = compiled(raising)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    call(x.clone(), y)
    kept = x.clone()
    try:
        call(x, torch.ones(4, 4))
    except RuntimeError:
        assert torch.equal(x, kept), "written before an operator that raised"
    else:
        raise AssertionError("nothing was raised")


def run_noted() -> None:
    """What a kernel writes has a new version, which autograd compares."""
    call = compiled(old_kept)
    for _ in range(3):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        versions = x._version, y._version
        call(x, y)
        assert (x._version > versions[0], y._version > versions[1]) == (True, False)
    with torch.inference_mode():
        call(torch.randn(4, 4), torch.randn(4, 4))


def main() -> None:
    torch.manual_seed(0)
    assert generates_kernels([torch.randn(2)])
    own = [kept_by_a_library, parts_of_no_kernel, written_and_copied, old_kept]
    cases: dict[str, Callable[[], None]] = {"raising": run_raising, "noted": run_noted}
    for one in [*shared.PROGRAMS, *own]:
        pairs = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(3)]
        cases[one.__name__] = lambda one=one, pairs=pairs: run(one, pairs)
    for one in shared.PADDINGS:
        sizes = [(torch.randn(n, 6),) for n in (5, 7, 9, 3, 5)]
        cases[one.__name__] = lambda one=one, sizes=sizes: run(one, sizes, dynamic=True)
    for seed in range(int(os.environ.get("MAGJIT_IN_PLACE_PROGRAMS", "30"))):
        cases[f"in place {seed}"] = lambda seed=seed: check_program(seed)
    for name, view in returned_views.VIEWS.items():
        cases[f"returns {name}"] = lambda view=view: returned_views.run_beside_eager(
            view, compiled(view)
        )
    for one in sizes_of_data.PROGRAMS:
        cases[f"sizes of {one.__name__}"] = lambda one=one: sizes_of_data.check(one, backend)
    for name in draws.PROGRAMS:
        cases[f"draws {name}"] = lambda name=name: torch.enable_grad()(draws.check)(name, backend)
    results = {}
    with torch.no_grad():
        for name, case in cases.items():
            try:
                case()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc(limit=-6)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
