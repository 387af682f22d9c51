"""Matmul kernels: near float64 in Triton's interpreter, compiled for sm_90, chosen where they pay.

What runs or compiles a kernel does so in processes of its own: see ``product_worker.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

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
)
from serving import Server  # noqa: E402

from magjit_triton.codegen.matmul.choice import (  # noqa: E402
    Device,
    Facts,
    estimate,
    ours_pays,
    recomputing_pays,
)
from magjit_triton.codegen.matmul.configuration import (  # noqa: E402
    MOST_SHARED_MEMORY,
    Configuration,
    Extent,
    Work,
    default,
    space,
)

PROGRAMS = (
    "perceptron",
    "library_and_auto_leave_products_alone",
    "unknown_setting",
    "decoder_layer",
    "merged_projection_into_a_cache",
    "rotated_keys_into_a_cache",
    "a_cache_that_is_read_and_written",
    "described_rows_of_any_number",
    "descriptors_keep_nothing_alive",
    "any_sizes",
    "any_sizes_of_batches",
    "any_lengths",
    "training",
)
UNEQUAL = "unequal lengths"
CUTS = [f"{name} {cut}" for cut in range(len(CONFIGURATIONS)) for name in CUT_CASES]
SEEDS = [f"random {seed}" for seed in range(12)]
NUMPY = tuple(int(part) for part in numpy.__version__.split(".")[:2])

has_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
interpreted = pytest.mark.skipif(
    NUMPY >= (2, 4), reason="Triton 3.6's interpreter needs NumPy < 2.4"
)
pytestmark = pytest.mark.xdist_group("triton_products")


SERVER = Server(FOLDER / "product_worker.py")


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    yield
    SERVER.close()


@cache
def results(mode: str, random_graphs: int = 12, names: tuple[str, ...] = ()) -> dict[str, str]:
    """Of each case, or of those of these names, what is wrong with it."""
    if not mode.startswith("sm90"):
        return SERVER.ask(mode, random_graphs, list(names))
    command = [sys.executable, str(FOLDER / "product_worker.py"), mode, *names]
    environment = {**os.environ, "MAGJIT_RANDOM_GRAPHS": str(random_graphs)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def passes(mode: str, name: str, of: Sequence[str] = ()) -> None:
    """``of`` says which cases a process runs at once; without it, all of the mode."""
    failure = results(mode, names=tuple(of))[name]
    assert not failure, failure


def each_dtype(cases: Iterable[str]) -> list[str]:
    """Names of cases with a dtype each."""
    return [f"{name} {dtype}" for name in cases for dtype in DTYPES]


def shares(names: Sequence[str], of: int, quick: Collection[str] = ()) -> list[Any]:
    """Parameters: a share of so many, and those named, always; the others, slow, as well.

    Of each run of ``of`` names, as one for each dtype, the share has one, another each time.
    """
    kept = [one for k, one in enumerate(names) if one in quick or (k + k // of) % of == 0]
    return [
        pytest.param(one, kept, id=one)
        if one in kept
        else pytest.param(
            one, [other for other in names if other not in kept], id=one, marks=pytest.mark.slow
        )
        for one in names
    ]


@has_triton
@interpreted
@pytest.mark.parametrize(("name", "of"), shares(each_dtype(PRODUCTS), len(DTYPES)))
def test_near_float64(name: str, of: list[str]) -> None:
    """In one dtype, or with those that are slow in each."""
    passes("interpret", name, of)


@has_triton
@interpreted
@pytest.mark.parametrize(("name", "of"), shares(CUTS, 12))
def test_every_cut_computes_the_same(name: str, of: list[str]) -> None:
    passes("cuts", name, of)


@has_triton
@interpreted
@pytest.mark.parametrize(
    ("name", "of"), shares([*each_dtype(DECODING), UNEQUAL], len(DTYPES), [UNEQUAL])
)
def test_attention_of_few_rows(name: str, of: list[str]) -> None:
    """In one dtype, or with those that are slow in each; lengths that may differ are compared."""
    passes("decoding", name, of)


@has_triton
@interpreted
@pytest.mark.parametrize("name", [*TIMED_CASES, "chosen", "hopeless"])
def test_what_is_measured(name: str) -> None:
    passes("timed", name)


@has_triton
@interpreted
@pytest.mark.parametrize("name", SEEDS)
def test_random_graphs(name: str) -> None:
    passes("random", name)


@has_triton
@interpreted
@pytest.mark.slow
def test_more_random_graphs() -> None:
    failures = [text for text in results("random", 300).values() if text]
    assert not failures, "\n".join(failures)


@has_triton
@interpreted
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    passes("programs", name)


SMALL = [f"{name} float16" for name in (*PRODUCTS, *DECODING)]
TF32 = [f"{name} tf32" for name in LARGE]
WHOLE = [
    *(f"{name} float16" for name in (*LARGE, *LARGE_DECODING)),
    *(f"cut {cut}" for cut in range(len(LARGE_CONFIGURATIONS))),
    *(f"described {name}" for name in DESCRIBED_CASES),
]
"""What has tiles as they are on the device; the small ones, of the least tiles, differ in their
places, which the interpreter runs all of."""


@has_triton
@pytest.mark.parametrize(("name", "of"), shares([*SMALL, *TF32, *WHOLE], 10, WHOLE))
def test_compiles_for_sm90(name: str, of: list[str]) -> None:
    passes("sm90", name, of)


@has_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in (*PRODUCTS, *LARGE, *DECODING, *LARGE_DECODING)
        for kind in ("bfloat16", "float32", "tf32")
        if kind != "tf32" or name not in LARGE  # those are compiled above
    ],
)
def test_other_dtypes_compile_for_sm90(name: str, kind: str) -> None:
    passes("sm90_more", f"{name} {kind}")


HALF = Work(torch.float16)
EXTENTS = (
    Extent(1, 1, 4096, 4096),
    Extent(1, 1, 1, 1),
    Extent(1, 0, 5, 0),
    Extent(1, 17, 33, 65),
    Extent(1, 64, 4096, 14336),
    Extent(1, 8192, 8192, 8192),
    Extent(512, 128, 128, 64),
)


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("products", [1, 2])
@pytest.mark.parametrize("exact", [False, True])
def test_defaults_are_legal(extent: Extent, products: int, exact: bool) -> None:
    work = Work(torch.float32 if exact else torch.float16, products, exact)
    found = default(extent, work)
    assert found.is_legal(work)
    assert found == default(extent, work)
    assert found.split_k == 1 or found.split_k * 512 <= extent.k


@pytest.mark.parametrize("pairs", [2, 16, 128, 256])
@pytest.mark.parametrize("rows", [1, 100, 8192])
@pytest.mark.parametrize("kind", ["half", "exact", "tf32", "described"])
def test_tiles_hold_both_columns_of_a_pair(kind: str, rows: int, pairs: int) -> None:
    dtype = torch.float32 if kind in ("exact", "tf32") else torch.float16
    work = Work(dtype, 1, kind == "exact", described=kind == "described", pairs=pairs)
    for columns in (pairs, 4096):
        found = default(Extent(1, rows, columns, 4096), work)
        assert found.is_legal(work)
        assert found.piece(work) >= pairs


def test_few_rows_make_low_tiles_and_many_make_high_ones() -> None:
    assert default(Extent(1, 1, 4096, 4096), HALF).block_m == 16
    assert default(Extent(1, 8192, 8192, 8192), HALF).block_m == 128


def test_the_space_fits_onto_a_multiprocessor() -> None:
    found = list(space(HALF))
    assert len(found) == len(set(found)) > 100
    assert all(one.shared_memory(HALF) <= MOST_SHARED_MEMORY for one in found)
    exact = Work(torch.float32, 1, exact=True)
    assert 0 < sum(one.is_legal(exact) for one in found) < len(found)
    both = Work(torch.float16, 2)
    assert all(one.accumulators(both) <= 128 for one in space(both))


@pytest.mark.parametrize(
    "fields", [(15, 16, 16), (16, 24, 16), (16, 16, 8), (16, 16, 16, 0), (16, 16, 16, 8, 3)]
)
def test_configurations_that_no_kernel_has(fields: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="x"):
        Configuration(*fields)


def facts(m: int, n: int, k: int, passes: float, **fields: object) -> Facts:
    work = fields.pop("work", HALF)
    assert isinstance(work, Work)
    saved = passes * m * n * work.dtype.itemsize
    return Facts(Extent(1, m, n, k), work, saved, **fields)  # type: ignore[arg-type]


def test_the_library_keeps_what_saves_nothing() -> None:
    assert not ours_pays(facts(4096, 4096, 64, 0), Device())
    assert not ours_pays(facts(4096, 4096, 64, 0.5, launches=1), Device())


def test_short_products_with_an_epilogue_are_ours_and_long_ones_the_librarys() -> None:
    assert ours_pays(facts(4096, 4096, 64, 2, launches=1), Device())
    assert not ours_pays(facts(4096, 4096, 4096, 2, launches=1), Device())


LARGER = Work(torch.bfloat16, described=True)
MEASURED = [
    # m, n, k, passes saved, followed by something; of the library's time on an H100
    (8192, 6144, 4096, 2, True, 0.925),
    (8192, 6144, 4096, 0, False, 0.989),
    (8192, 4096, 4096, 2, True, 0.951),
    (4096, 4096, 4096, 2, True, 0.955),
    (2048, 4096, 1024, 2, True, 0.953),
    (4096, 3072, 768, 2, True, 0.915),
    (8192, 14336, 4096, 2, True, 0.935),
    (4096, 768, 3072, 2, True, 1.19),
    (4096, 768, 3072, 0, False, 1.30),
    (512, 6144, 4096, 2, True, 1.18),
    (1000, 3000, 1000, 2, True, 1.09),
    (4096, 3072, 768, 0, False, 1.14),
]


@pytest.mark.parametrize(("m", "n", "k", "passes", "follows", "measured"), MEASURED)
def test_described_products_are_ours_where_they_were_faster(
    m: int, n: int, k: int, passes: int, follows: bool, measured: float
) -> None:
    one = facts(m, n, k, passes, work=LARGER, follows=follows, launches=int(follows))
    assert ours_pays(one, Device()) == (measured < 1)
    ours, library = estimate(one, Device())
    assert ours / library == pytest.approx(measured, rel=0.15)


def test_without_descriptors_products_are_as_before() -> None:
    one = facts(8192, 6144, 4096, 2, work=HALF, follows=True, launches=1)
    assert not ours_pays(one, Device())


def test_scattered_operands_and_exact_floats_stay_with_the_library() -> None:
    assert not ours_pays(facts(4096, 4096, 64, 2, launches=1, scattered=True), Device())
    exact = Work(torch.float32, 1, exact=True)
    assert not ours_pays(facts(4096, 4096, 64, 2, launches=1, work=exact), Device())


def test_what_is_read_again_counts() -> None:
    one = facts(4096, 4096, 64, 2)
    ours, library = estimate(one, Device())
    later, same = estimate(facts(4096, 4096, 64, 2, again=1e9), Device())
    assert later > ours
    assert same == library


@pytest.mark.parametrize(("times", "expected"), [((1.0, 2.0), True), ((2.0, 1.0), False)])
def test_measurements_replace_the_estimate(times: tuple[float, float], expected: bool) -> None:
    for one in (facts(4096, 4096, 64, 2, launches=1), facts(4096, 4096, 4096, 0)):
        assert ours_pays(one, Device(), times) == expected


def test_operands_are_computed_again_only_where_that_reads_less() -> None:
    assert recomputing_pays(1, 3e8, 1e8, Device())
    assert not recomputing_pays(32, 3e8, 1e8, Device())
    assert recomputing_pays(32, 3e4, 1e4, Device())
