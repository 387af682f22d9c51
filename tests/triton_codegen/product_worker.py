"""Run in a process of its own, as ``worker.py`` is.

    python product_worker.py interpret      every case in every dtype, against float64
    python product_worker.py cuts           some cases in every configuration, interpreted
    python product_worker.py random         random graphs, all their products ours
    python product_worker.py decoding       attention of few rows in every dtype, against float64
    python product_worker.py timed          both ways that a measurement compares, interpreted
    python product_worker.py programs       whole programs through ``magjit.compile``
    python product_worker.py sm90           every kernel of float16, large ones of TF32, for sm_90
    python product_worker.py sm90_more      those of bfloat16 and float32, and others of TF32
    python product_worker.py serve          all but the last two, as asked: serving.py

The last line of the output is a JSON object: name → text of the failure, or "".
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

MODE = sys.argv[1]
os.environ["TRITON_INTERPRET"] = "0" if MODE.startswith("sm90") else "1"
sys.path.insert(0, str(Path(__file__).parent))

import reducing  # noqa: E402
import torch  # noqa: E402
from cases import Case, graph_of  # noqa: E402
from decoding_cases import DECODING, LARGE_DECODING  # noqa: E402
from product_cases import (  # noqa: E402
    CONFIGURATIONS,
    CUT_CASES,
    DESCRIBED_CASES,
    DTYPES,
    LARGE,
    LARGE_CONFIGURATIONS,
    PRODUCTS,
    TIMED_CASES,
    ProductCase,
    arguments_of,
)
from product_programs import PROGRAMS  # noqa: E402
from random_graphs import random_case  # noqa: E402
from serving import serve  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.fx.experimental.symbolic_shapes import (  # noqa: E402
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from magjit_triton.codegen import compiler, runtime  # noqa: E402
from magjit_triton.codegen.decoding_kernels import DecodingKernel  # noqa: E402
from magjit_triton.codegen.decompositions import decompositions  # noqa: E402
from magjit_triton.codegen.matmul import steps  # noqa: E402
from magjit_triton.codegen.matmul.choice import Device  # noqa: E402
from magjit_triton.codegen.matmul.configuration import (  # noqa: E402
    MOST_SHARED_MEMORY,
    Configuration,
)
from magjit_triton.codegen.matmul.fusing import ProductFusion  # noqa: E402
from magjit_triton.codegen.matmul.kernel import MatmulKernel  # noqa: E402
from magjit_triton.codegen.matmul.measuring import Bench, promising  # noqa: E402
from magjit_triton.codegen.matmul.products import extent_of, is_product  # noqa: E402
from magjit_triton.codegen.plan import Group  # noqa: E402
from magjit_triton.settings import Settings  # noqa: E402

reducing.install()
OURS = (MatmulKernel, DecodingKernel)
OWN = Settings(matmul="triton")
RANDOM = int(os.environ.get("MAGJIT_RANDOM_GRAPHS", "12"))


def compiled(function: Callable[..., Any], arguments: list[Any]) -> compiler.Compiled:
    case = Case(function, lambda: arguments)
    return compiler.compile_graph(graph_of(case, arguments), arguments, OWN)


def errors(found: Any, exact: Any) -> float:
    if not exact.numel():
        return 0.0
    return float((found.double() - exact.double()).abs().max())


def check(case: ProductCase, dtype: torch.dtype, *, counted: bool = True) -> None:
    """At most twice as far from float64 as eager is; the same at every call."""
    arguments = arguments_of(case, dtype)
    made = compiled(case.function, arguments)
    found, eager = made(*arguments), case.function(*arguments)
    exact = case.function(*(one.double() for one in arguments))
    for ours, theirs, right in zip(found, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.stride() == theirs.stride()
        largest = float(right.abs().max()) if right.numel() else 0.0
        least = torch.finfo(ours.dtype).eps * max(largest, 1.0)
        assert errors(ours, right) <= 2 * errors(theirs, right) + least / 2, (
            errors(ours, right),
            errors(theirs, right),
        )
    for ours, again in zip(found, made(*arguments), strict=True):
        torch.testing.assert_close(ours, again, rtol=0, atol=0)
    if counted:
        products = [one for one in made.kernels if isinstance(one, OURS)]
        assert (len(products), len(made.kernels)) == (case.products, case.kernels), made.plan


def interpret() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, case in PRODUCTS.items():
        for label, dtype in DTYPES.items():
            yield f"{name} {label}", partial(check, case, dtype)


def decoding() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, case in DECODING.items():
        for label, dtype in DTYPES.items():
            yield f"{name} {label}", partial(check, case, dtype)
    yield "unequal lengths", unequal_lengths


def unequal_lengths() -> None:
    """Lengths that are symbols of their own are compared when the program runs."""

    def function(q: Any, k: Any, v: Any) -> list[Any]:
        return [torch.nn.functional.scaled_dot_product_attention(q, k, v)]

    def arguments(keys: int, values: int) -> list[Any]:
        sizes = ((2, 3, 1, 16), (2, 3, keys, 16), (2, 3, values, 16))
        return [torch.randn(one) for one in sizes]

    first = arguments(40, 40)
    shapes = ShapeEnv(duck_shape=False)
    with FakeTensorMode(shape_env=shapes, static_shapes=False) as mode:
        given = []
        for number, one in enumerate(first):
            kinds = [DimDynamic.STATIC] * 4
            if number:
                kinds[2] = DimDynamic.DYNAMIC
            context = StatelessSymbolicContext(dynamic_sizes=kinds)
            given.append(mode.from_tensor(one, symbolic_context=context))
    gm = make_fx(function, decomposition_table=decompositions())(*given)
    made = compiler.compile_graph(gm, given, OWN)
    assert any(isinstance(one, DecodingKernel) for one in made.kernels)
    for keys in (40, 33):
        values = arguments(keys, keys)
        torch.testing.assert_close(made(*values), function(*values))
    try:
        made(*arguments(40, 39))
    except RuntimeError as error:
        assert "40 and 39" in str(error)
    else:
        raise AssertionError("values of another length than keys")


def in_cut(cut: tuple[int, ...], run: Callable[[], None]) -> None:
    """Every product in one configuration."""
    kept = steps.default
    steps.default = lambda extent, work, multiprocessors: Configuration(*cut)
    try:
        run()
    finally:
        steps.default = kept


def cuts() -> Iterator[tuple[str, Callable[[], None]]]:
    for number, cut in enumerate(CONFIGURATIONS):
        for name in CUT_CASES:
            run = partial(check, PRODUCTS[name], torch.float16, counted=False)
            yield f"{name} {number}", partial(in_cut, cut, run)


def random_graphs() -> Iterator[tuple[str, Callable[[], None]]]:
    for seed in range(RANDOM):

        def run(seed: int = seed) -> None:
            case = random_case(seed)
            torch.manual_seed(0)
            arguments = case.arguments()
            found = compiled(case.function, arguments)(*arguments)
            torch.testing.assert_close(found, case.function(*arguments), rtol=1e-4, atol=1e-4)

        yield f"random {seed}", run


def timed() -> Iterator[tuple[str, Callable[[], None]]]:
    for name in TIMED_CASES:
        yield name, lambda name=name: both_ways(PRODUCTS[name])
    yield "chosen", chosen
    yield "hopeless", hopeless


def hopeless() -> None:
    """Long products, and exact ones, are the library's without a plan of ours."""
    pointers, descriptors = Device(describes=False), Device()
    for depth, dtype, device, expected in (
        (64, torch.float16, pointers, True),
        (16384, torch.float16, pointers, False),
        (16384, torch.float16, descriptors, True),
        (64, torch.float32, descriptors, False),
    ):
        with FakeTensorMode():
            left = torch.empty(8192, depth, dtype=dtype)
            right = torch.empty(depth, 8192, dtype=dtype)
            gm = make_fx(lambda a, b: [(a @ b).relu()])(left, right)
        fusion = ProductFusion(gm, ("cpu",), setting="auto", device=device)
        (product,) = (node for node in gm.graph.nodes if is_product(node, ("cpu",)))
        assert fusion._may_pay(product) == expected
        fusion.measured = lambda fusion, group, plan: None
        assert fusion._may_pay(product)


def both_ways(case: ProductCase) -> None:
    """What is timed as ours and what is timed as the library's way compute the same."""
    arguments = arguments_of(case, torch.float32)
    fusion = ProductFusion(graph_of(Case(case.function, lambda: arguments), arguments), ("cpu",))
    fusion.setting = "triton"
    plan = fusion.plan()
    for group in plan.units:
        if not isinstance(group, Group) or not fusion.products_in(group.nodes):
            continue
        bench = Bench(fusion, group, plan)
        names = [fusion.realized[node].buffer for node in bench.kept]
        for cut in (Configuration(16, 16, 16), Configuration(32, 16, 16, split_k=3)):
            bench.ours(cut)()
            ours = [bench.memory[name].clone() for name in names]
            for name in names:
                bench.memory[name].zero_()
            bench.library()()
            for mine, name in zip(ours, names, strict=True):
                assert mine.any()
                torch.testing.assert_close(mine, bench.memory[name], rtol=1e-4, atol=1e-4)
        times = iter(range(9, 0, -1))
        ours, library = bench.times(lambda run: float(next(times)))
        assert ours == library + 1
        assert fusion.cuts[bench.products[0]] in promising(
            extent_of(bench.products[0], fusion.hint), fusion.work_of(bench.products), 132
        )


def chosen() -> None:
    """The products that are ours are those that are faster; the others are the library's."""
    case = PRODUCTS["swiglu"]
    arguments = arguments_of(case, torch.float32)
    for library, calls in ((2.0, 0), (1.0, 3), (1.5, 1)):
        fusion = ProductFusion(
            graph_of(Case(case.function, lambda: arguments), arguments), ("cpu",)
        )
        fusion.is_candidate = lambda node: is_product(node, ("cpu",))  # type: ignore[method-assign]
        fusion.measured = lambda fusion, group, plan, library=library: (
            1.0 + 0.6 / len(fusion.products_in(group.nodes)) ** 4,
            library,
        )
        plan = fusion.plan()
        assert sum(isinstance(unit, torch.fx.Node) for unit in plan.units) == calls, plan
        found = compiler.Program(fusion.gm, fusion, plan).compiled()(*arguments)
        torch.testing.assert_close(found, case.function(*arguments), rtol=1e-4, atol=1e-4)


def programs() -> Iterator[tuple[str, Callable[[], None]]]:
    yield from PROGRAMS.items()


def sm90() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, case in {**PRODUCTS, **LARGE, **DECODING, **LARGE_DECODING}.items():
        for label, dtype in DTYPES.items():
            if (label == "float16") == (MODE == "sm90"):
                yield f"{name} {label}", partial(assemble, name, case, dtype, False)
        if (name in LARGE) == (MODE == "sm90"):
            yield f"{name} tf32", partial(assemble, name, case, torch.float32, True)
    for number, cut in enumerate(LARGE_CONFIGURATIONS if MODE == "sm90" else ()):
        case = LARGE["large linear gelu"]
        yield (
            f"cut {number}",
            partial(in_cut, cut, partial(assemble, "", case, torch.float16, False)),
        )
    for name, cut in DESCRIBED_CASES.items() if MODE == "sm90" else ():
        case = {**PRODUCTS, **LARGE}[name]
        run = partial(assemble, "described", case, torch.bfloat16, False)
        yield f"described {name}", partial(in_cut, cut, run)


def assemble(name: str, case: ProductCase, dtype: torch.dtype, tf32: bool) -> None:
    """Each kernel compiles, spills no register, fits, and multiplies as it should."""
    import triton
    from triton.backends.compiler import GPUTarget

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    arguments = arguments_of(case, dtype)
    gm = graph_of(Case(case.function, lambda: arguments), arguments)
    kernels = compiler.plan_kernels(gm, devices=("cpu",), matmul="triton")
    assert sum(isinstance(one, OURS) for one in kernels) == case.products
    for kernel in kernels:
        made = runtime.compile_for(kernel, GPUTarget("cuda", 90, 32))
        assert made.metadata.shared <= MOST_SHARED_MEMORY
        text = made.asm["ptx"]
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(text)
            file.flush()
            command = [str(assembler), "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
            log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled = re.search(r"(\d+) bytes spill stores", log)
        assert spilled is not None and int(spilled[1]) == 0, f"{kernel.source}\n{log}"
        if isinstance(kernel, MatmulKernel):
            assert ("cp.async.bulk.tensor" in text) == kernel.configuration.described
            assert kernel.configuration.described or name != "described"
        if isinstance(kernel, OURS) and all(0 not in one for one in case.sizes):
            tensor_cores = "mma.sync" in text or "wgmma.mma_async" in text
            assert tensor_cores == (dtype != torch.float32 or tf32), kernel.source
            assert ("tf32" in text) == (dtype == torch.float32 and tf32)


def answer(mode: str, random_graphs: int, wanted: list[str]) -> None:
    global MODE, RANDOM
    MODE, RANDOM = mode, random_graphs
    main(wanted)


def main(wanted: list[str]) -> None:
    modes = {
        "interpret": interpret,
        "cuts": cuts,
        "random": random_graphs,
        "decoding": decoding,
        "timed": timed,
        "programs": programs,
        "sm90": sm90,
        "sm90_more": sm90,
    }
    results = {}
    for name, run in modes[MODE]():
        if wanted and name not in wanted:
            continue
        try:
            run()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc(limit=-6)
    print(json.dumps(results))


if __name__ == "__main__":
    if MODE == "serve":
        serve(answer)
    else:
        main(sys.argv[2:])
