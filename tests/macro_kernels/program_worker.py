"""Run in a process of its own: programs whose products are chosen at run time, interpreted.

The last line of the output is a JSON object: name → text of the failure, or "".
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from magjit_triton.codegen.compiler import compile_graph  # noqa: E402
from magjit_triton.codegen.matmul.configuration import Configuration  # noqa: E402
from magjit_triton.codegen.matmul.family import WORKSPACE  # noqa: E402
from magjit_triton.codegen.runtime import load_function  # noqa: E402
from magjit_triton.macro.assemble import Assembled  # noqa: E402
from magjit_triton.macro.device import DEVICES  # noqa: E402
from magjit_triton.macro.families import MacroFamily, named, traced  # noqa: E402
from magjit_triton.macro.library import library_way  # noqa: E402
from magjit_triton.macro.program import Kernels, parts_with  # noqa: E402
from magjit_triton.macro.repository import Entry, Stored  # noqa: E402
from magjit_triton.macro.waves import Affine, Library, Wave  # noqa: E402
from magjit_triton.settings import Settings  # noqa: E402

N, K = 32, 128
CUTS = (Configuration(16, 16, 32), Configuration(16, 32, 64, split_k=2))
STARTED: list[Configuration] = []


def interpreted(assembled: Assembled, family: MacroFamily) -> Any:
    """A launch of what would have been assembled."""
    made = family.kernels(assembled.configuration)

    def launch(stream: int, programs: int, buffers: list[torch.Tensor], sizes: dict[str, int]):
        STARTED.append(assembled.configuration)
        memory = dict(zip(family.family.buffers, buffers, strict=True))
        values = {family.roles[s.name]: s.name for s in family.family.symbols}
        count = assembled.workspace * sizes["batch"] * sizes["m"] * sizes["n"]
        memory[WORKSPACE] = torch.full((count,), float("nan"))
        for kernel in made.kernels:
            names = {one.name: sizes[family.roles[one.name]] for one in kernel.symbols}
            assert set(names) <= set(values.values())
            first, second = (eval(text, {}, names) for text in kernel.grid())
            if kernel is made.kernels[0]:
                first = programs
            load_function(kernel.source, kernel.name)[(first, second)](
                *(memory[one] for one in kernel.buffers), *names.values()
            )

    return launch


def entry(name: str, library: tuple[float, float]) -> tuple[str, Entry]:
    """The small tile is best for few rows, the split one for more; the library at the end."""
    family = named(name, torch.float32)
    lone, crowd, flat = Affine(1e-6, 1e-6), Affine(2e-4, 1e-6), Affine(8e-6, 1e-9)
    stored = (
        Stored(Assembled(CUTS[0], (), 0), 1, Wave(lone, crowd, crowd, crowd)),
        Stored(Assembled(CUTS[1], (), 2 * family.work.products), 1, Wave(flat, flat, flat, flat)),
    )
    facts = {"products": family.work.products, "itemsize": 4, "unit": 128}
    table = Library((1, 64), (N,), (K,), library)
    return family.signature, Entry(family.signature, name, "made up", facts, stored, table)


def kernels(*names: str, library: tuple[float, float] = (1e-3, 1e-3)) -> Kernels:
    made = dict(entry(name, library) for name in names)
    return Kernels(made, DEVICES["h200"], interpreted)


def check(
    function: Any,
    arguments: Any,
    rows: tuple[int, ...],
    parts: Kernels,
    calls: int,
    lead: tuple[str, ...] = ("m",),
) -> int:
    """Results are eager's for all sizes; gives how many times kernels were started."""
    first = arguments(rows[0])
    shapes = [(*lead, "k"), *(("f",) * one.dim() for one in first[1:])]
    gm = traced(function, first, shapes, {"k": K, "f": 0})
    made = compile_graph(gm, first, Settings(matmul="macro"), **parts_with(parts))
    assert made.source.count("= macro_") == calls, made.source
    STARTED.clear()
    for m in rows:
        given = arguments(m)
        found, eager = made(*given), function(*given)
        for one, other in zip(found, eager, strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return len(STARTED)


def weights(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))) * 0.2


def linear() -> None:
    """Few rows by one kernel, more by another, many by the library."""
    w = weights(N, K)
    rows = (3, 17, 40, 64)
    given = kernels("linear", library=(1e-3, 2e-6))
    started = check(lambda x, w: [F.linear(x, w)], lambda m: [weights(m, K), w], rows, given, 1)
    assert started == 2 and set(STARTED) == set(CUTS), STARTED


def residual() -> None:
    """What follows is fused; two layers are two calls."""
    given = kernels("linear_gelu", "linear_residual")

    def block(x: Any, a: Any, b: Any, c: Any) -> Any:
        return [x + F.linear(F.gelu(F.linear(x, a, b)), c)]

    a, b, c = weights(K, K), weights(K), weights(K, K)
    started = check(block, lambda m: [weights(m, K), a, b, c], (2, 5, 30), given, 2)
    assert started == 6, started


def gated() -> None:
    gate, up = weights(N, K), weights(N, K)[:, :].contiguous() + 0.1
    given = kernels("swiglu")

    def function(x: Any, gate: Any, up: Any) -> Any:
        return [F.silu(F.linear(x, gate)) * F.linear(x, up)]

    assert check(function, lambda m: [weights(m, K), gate, up], (3, 20), given, 1) == 2


def librarys_ways() -> None:
    """Where the library is faster, what follows is in one kernel of its own."""
    every = (1e-9, 1e-9)
    w, b = weights(N, K), weights(N)
    programs: dict[str, Any] = {
        "linear_gelu": lambda x, w, b: [F.gelu(F.linear(x, w, b))],
        "linear_relu": lambda x, w, b: [F.relu(F.linear(x, w, b))],
        "linear_gelu_tanh": lambda x, w, b: [F.gelu(F.linear(x, w, b), approximate="tanh")],
    }
    for name, function in programs.items():
        given = kernels(name, library=every)
        made = check(function, lambda m: [weights(m, K), w, b], (3, 1, 33), given, 1)
        assert made == 0

    def residual(x: Any, w: Any, b: Any, r: Any) -> Any:
        return [F.linear(x, w, b) + r]

    given = kernels("linear_bias_residual", library=every)
    for m in (1, 3, 33):
        operands = [weights(m, K), w, b, weights(m, N)]
        way = library_way(named("linear_bias_residual", torch.float32), "cpu", N)
        torch.testing.assert_close(way(*operands), residual(*operands)[0], rtol=1e-5, atol=1e-5)


def strided() -> None:
    """Operands that are not contiguous are planned as without macro-kernels."""
    w = weights(N, K)
    given = kernels("linear")

    def columns(m: int) -> list[torch.Tensor]:
        return [weights(m, 2 * K)[:, ::2], w]

    assert check(lambda x, w: [F.linear(x, w)], columns, (3, 20), given, 0) == 0


def others_stay() -> None:
    """Families that the file has not are planned as without it."""
    given = kernels("linear_gelu")
    w = weights(N, K)
    assert (
        check(lambda x, w: [F.linear(x, w)], lambda m: [weights(m, K), w], (3, 20), given, 0) == 0
    )


def unaligned() -> None:
    """Addresses that are no multiples of 16 go to the library."""
    w = weights(N, K)
    given = kernels("linear")

    def place(m: int) -> list[torch.Tensor]:
        return [torch.cat([weights(1), weights(m, K).flatten()])[1:].view(m, K), w]

    assert place(3)[0].data_ptr() % 16
    assert check(lambda x, w: [F.linear(x, w)], place, (3, 20), given, 1) == 0


def compiled_program() -> None:
    """Through the backend, with any number of rows, in two dimensions; and by the library."""
    import magjit
    from magjit_triton.codegen import entry as module

    first, second = torch.nn.Linear(K, K), torch.nn.Linear(K, K, bias=False)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + second(F.gelu(first(x)))

    for library, launches in (((1e-3, 1e-3), 4), ((1e-9, 1e-9), 0)):
        given = kernels("linear_gelu", "linear_residual", library=library)
        module.macro_parts = lambda setting, given=given: parts_with(given)
        options = {"matmul": "macro"}
        ours = magjit.compile(function, backend="triton", dynamic=True, options=options)
        STARTED.clear()
        with torch.no_grad():
            state = torch.get_rng_state()
            for m in (4, 7, 30):
                x = weights(2, m, K)
                torch.testing.assert_close(ours(x), function(x), rtol=1e-4, atol=1e-4)
            assert torch.equal(state, torch.get_rng_state())
        assert magjit.stats(ours).captures == 1
        assert len(STARTED) == launches, STARTED  # the first call was watched


class Patches(torch.nn.Module):
    """Images of any size as patches, a class in front, positions resized."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = torch.nn.Conv2d(3, K, 4, 4)
        self.first = torch.nn.Parameter(weights(1, 1, K))
        self.places = torch.nn.Parameter(weights(1, 17, K))
        self.norm = torch.nn.LayerNorm(K)
        self.linear = torch.nn.Linear(K, N)

    def resized(self, high: int, wide: int) -> torch.Tensor:
        grid = self.places[:, 1:].reshape(1, 4, 4, K).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(high, wide), mode="bicubic", align_corners=False)
        rows = grid.permute(0, 2, 3, 1).view(1, -1, K)
        return torch.cat([self.places[:, :1], rows], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.cut(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.first.expand(len(x), -1, -1), y], 1)
        y = y + self.resized(x.shape[2] // 4, x.shape[3] // 4)
        return self.linear(self.norm(y))


def images() -> None:
    """Sizes that are quotients: one program for images of all sizes."""
    import magjit
    from magjit_triton.codegen import entry as module

    module.macro_parts = lambda setting: parts_with(kernels("linear_bias"))
    model = Patches().eval()
    ours = magjit.compile(model, backend="triton", dynamic=True, options={"matmul": "macro"})
    STARTED.clear()
    with torch.no_grad():
        for high, wide in ((8, 12), (12, 8), (9, 14), (17, 17)):
            x = weights(2, 3, high, wide)
            torch.testing.assert_close(ours(x), model(x), rtol=1e-4, atol=1e-4)
    assert magjit.stats(ours).captures == 1
    assert len(STARTED) == 3, STARTED


CASES = {
    one.__name__: one
    for one in (
        linear,
        residual,
        gated,
        librarys_ways,
        strided,
        others_stay,
        unaligned,
        compiled_program,
        images,
    )
}


def main() -> None:
    results = {}
    for name, run in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            run()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc(limit=-6)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
