"""Run in a process of its own: ``python -m tests…`` is not needed, the path is given.

    python worker.py interpret            every case and random graphs, through the interpreter
    python worker.py sm90                 every kernel of the cases, compiled for sm_90
    python worker.py places[_more]        every case, under legal strategies at random
    python worker.py cut[_more]           some cases, with blocks that may be tried
    python worker.py conformance          the plugins' conformance suite, interpreted
    python worker.py serve                all but sm90, as the standard input asks: serving.py

The last line of the output is a JSON object: name → text of the failure, or "".
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

MODE = sys.argv[1]
os.environ["TRITON_INTERPRET"] = "0" if MODE == "sm90" else "1"
sys.path.insert(0, str(Path(__file__).parent))

import reducing  # noqa: E402
import torch  # noqa: E402
from cases import CASES, Case, graph_of  # noqa: E402
from random_graphs import random_case  # noqa: E402
from serving import serve  # noqa: E402

from magjit import config  # noqa: E402
from magjit.plugin import conformance  # noqa: E402
from magjit.plugin.virtual_tensors.refining import refined  # noqa: E402
from magjit_triton.codegen import compiler, deciding, placement, runtime  # noqa: E402
from magjit_triton.codegen.entry import compile_with_kernels  # noqa: E402
from magjit_triton.codegen.fusion import Group  # noqa: E402
from magjit_triton.codegen.lowering import operator_name  # noqa: E402
from magjit_triton.codegen.memory_plan import Planned, Watched, with_memory  # noqa: E402
from magjit_triton.codegen.tuning import candidates  # noqa: E402

reducing.install()
MOST_SHARED_MEMORY = 227 * 1024
RANDOM_GRAPHS = int(os.environ.get("MAGJIT_RANDOM_GRAPHS", "60"))


def arguments_of(case: Case) -> list:
    torch.manual_seed(0)
    return case.arguments()


def interpret(case: Case) -> None:
    """Values, dtypes and strides equal to eager's; as many kernels and calls as expected."""
    arguments = arguments_of(case)
    compiled = compiler.compile_graph(graph_of(case, arguments), arguments)
    found = compiled(*arguments)
    expected = case.function(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        near = (
            {}
            if case.tolerance is None
            else {"rtol": max(1e-4, case.tolerance), "atol": case.tolerance}
        )
        torch.testing.assert_close(one, other, equal_nan=True, **near)
    again = compiled(*arguments)
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(found, in_planned_memory(compiled, arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    calls = tuple(
        operator_name(unit)
        for unit in compiled.plan.units
        if not isinstance(unit, Group) and operator_name(unit)
    )
    if case.kernels is not None:
        assert len(compiled.kernels) == case.kernels, f"\n{compiled.plan}"
        assert calls == case.calls, calls


def in_planned_memory(compiled: compiler.Compiled, arguments: list) -> list:
    """Results of a run whose memory was planned before, as for a capture; poisoned."""
    watched = Watched()
    results = with_memory(compiled.run, compiled.library, watched)(*arguments)
    planned = Planned(watched.finish(), stream=0)
    del results
    if planned.block is not None:
        planned.block.fill_(255)
    return list(with_memory(compiled.run, compiled.library, planned)(*arguments))


def sm90(case: Case) -> None:
    """Each kernel compiles, spills no register and fits into shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    arguments = arguments_of(case)
    gm = graph_of(case, arguments)
    for kernel in compiler.plan_kernels(gm, devices=("cpu",)):
        compiled = runtime.compile_for(kernel, GPUTarget("cuda", 90, 32))
        assert compiled.metadata.shared <= MOST_SHARED_MEMORY
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(compiled.asm["ptx"])
            file.flush()
            command = [str(assembler), "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
            log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        spilled = re.search(r"(\d+) bytes spill stores", log)
        assert spilled is not None, log
        assert int(spilled[1]) == 0, f"{kernel.source}\n{log}"


CUT = (
    *("pointwise", "softmax", "softmax_bf16", "softmax_long", "layer_norm"),
    *("window_attention", "convolution", "grouped_product", "softmaxes_in_a_cat"),
)


def cut(case: Case) -> None:
    """The same results however kernels are cut."""
    for number in (1, 7) if MODE == "cut_more" else (4,):

        def otherwise(self, kernel, hint, number=number):
            found = list(candidates(kernel))
            return kernel.with_blocks(found[number % len(found)])

        original, deciding.Deciding.cut = deciding.Deciding.cut, otherwise
        try:
            interpret(case)
        finally:
            deciding.Deciding.cut = original


def places(case: Case) -> None:
    """The same results wherever tensors are computed."""
    arguments = arguments_of(case)
    expected = case.function(*arguments)
    chosen = set()
    for seed in (2, 3) if MODE == "places_more" else (0, 1):
        rng = random.Random(seed)

        def otherwise(choices, rng=rng):
            found = placement.searched(choices)
            for _ in range(2):
                found = refined(
                    found, choices.opportunities, choices.model, lambda *_: rng.random() < 0.5, 1e9
                )
            chosen.add(frozenset(map(str, found.chosen.values())))
            return found

        original, deciding.searched = deciding.searched, otherwise
        try:
            with config.override(disk_cache=False):
                compiled = compiler.compile_graph(graph_of(case, arguments), arguments)
        finally:
            deciding.searched = original
        for one, other in zip(compiled(*arguments), expected, strict=True):
            near = {} if case.tolerance is None else {"rtol": 1e-2, "atol": case.tolerance}
            torch.testing.assert_close(one, other, equal_nan=True, **near)
            pairs = zip(one.stride(), other.stride(), one.shape, strict=True)
            assert all(own == eager or size == 1 for own, eager, size in pairs)
        if not chosen:
            return


class Direct:
    """The code generator as a backend of its own."""

    name = "codegen"
    exact_random = True

    def supports(self, gm: torch.fx.GraphModule) -> list[str]:
        return []

    def compile(self, gm, example_inputs, context):
        return compile_with_kernels(gm, example_inputs, context)


def answer(mode: str, random_graphs: int, wanted: list[str]) -> None:
    global MODE, RANDOM_GRAPHS
    MODE, RANDOM_GRAPHS = mode, random_graphs
    main(wanted)


def main(wanted: list[str]) -> None:
    if MODE == "conformance":
        report = conformance.run(Direct())
        failed = "" if "0 FAILED" in str(report) else str(report)
        print(json.dumps({"conformance": failed, "reductions": reducing.compare()}))
        return
    kind = MODE.removesuffix("_more")
    run = {"interpret": interpret, "sm90": sm90, "cut": cut, "places": places}[kind]
    cases = {name: CASES[name] for name in CUT} if kind == "cut" else dict(CASES)
    if kind != "cut":
        cases.update({f"random {seed}": random_case(seed) for seed in range(RANDOM_GRAPHS)})
    results = {}
    for name, case in cases.items():
        if wanted and name not in wanted:
            continue
        try:
            run(case)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc(limit=-6)
    print(json.dumps(results))


if __name__ == "__main__":
    if MODE == "serve":
        serve(answer)
    else:
        main(sys.argv[2:])
