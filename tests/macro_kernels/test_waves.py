"""The cost model: what it says of shapes, and that the C part says the same."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from wave_models import candidate, library, model, residuals

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.selector import MOST_CANDIDATES, Selector, compiled
from magjit_triton.macro.waves import LIBRARY, Affine, Candidate, Library, Model, Wave


def shape(random_: random.Random) -> tuple[int, int, int, int]:
    """Mostly shapes that kernels compute, small and large, now and then others."""
    m = int(2 ** random_.uniform(0, 14.5))
    n = 16 * int(2 ** random_.uniform(0, 10))
    k = 128 * int(2 ** random_.uniform(0, 7.5))
    batch = random_.choice((1, 1, 1, 2, 12))
    if random_.random() < 0.1:
        n += random_.randint(0, 15)
        k += random_.randint(0, 127)
    if random_.random() < 0.02:
        m = 0
    return batch, m, n, k


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_c_and_python_agree_to_the_last_bit(seed: int, corrected: bool) -> None:
    reference = model(seed, corrected=corrected)
    selector = compiled(reference)
    random_ = random.Random(1000 + seed)
    chosen = set()
    for _ in range(500):
        sizes = shape(random_)
        found = selector.choose(*sizes)
        assert found == reference.choose(*sizes), sizes
        chosen.add(found[0])
        if not reference.fits(*sizes):
            assert found == (LIBRARY, 0, 0.0)
            continue
        estimates = [reference.seconds(i, *sizes) for i in range(len(reference.candidates))]
        estimates.append(reference.library_seconds(*sizes))
        assert selector.estimates(*sizes) == tuple(estimates), sizes
        assert found[2] == min(estimates)
    assert len(chosen) > 1


@pytest.mark.parametrize("hedges", [(0.0, 0.3), (0.06, 0.2), (0.02, 1.0), (0.5, 0.13), (1.0, 1.0)])
@pytest.mark.parametrize("seed", range(8))
def test_c_and_python_agree_on_measured_sizes_and_between(
    seed: int, hedges: tuple[float, float]
) -> None:
    reference = model(seed, corrected=True, hedges=hedges)
    single = model(seed, corrected=True, hedges=(hedges[0], hedges[0]))
    selector = compiled(reference)
    random_ = random.Random(2000 + seed)
    met = set()
    for _ in range(300):
        batch, m, n, k = shape(random_)
        measured = True
        if reference.library is not None:
            sizes = reference.library.n, reference.library.k
            n, k = (
                random_.choice(axis) if random_.random() < 0.7 else one
                for axis, one in zip(sizes, (n, k), strict=True)
            )
            measured = all(
                one in axis or len(axis) == 1 for axis, one in zip(sizes, (n, k), strict=True)
            )
        chosen = reference.choose(batch, m, n, k)
        assert selector.choose(batch, m, n, k) == chosen, (batch, m, n, k)
        if not reference.fits(batch, m, n, k):
            continue
        estimates = [reference.seconds(i, batch, m, n, k) for i in range(24)]
        seconds = reference.library_seconds(batch, m, n, k)
        assert selector.estimates(batch, m, n, k) == (*estimates, seconds), (batch, m, n, k)
        expected = single.library_seconds(batch, m, n, k) * (
            1.0 if measured else single_share(hedges)
        )
        assert seconds == expected, (batch, m, n, k)
        if hedges[1] == 1.0 and not measured:
            assert chosen[0] == LIBRARY or hedges[0] == 1.0
        met.add(measured)
    assert met == ({True} if reference.library is None else {True, False})


def single_share(hedges: tuple[float, float]) -> float:
    """What is left of the library's time between measured sizes, of what is left on them."""
    hedge, between = hedges
    return (1.0 - between) / (1.0 - hedge) if between > hedge else 1.0


FLAT = Affine(0.0, 1e-6)
PLAIN = Wave(FLAT, FLAT, FLAT, FLAT)
TILE = Configuration(64, 64, 64)
SETTINGS = {"multiprocessors": 132, "bandwidth": 1e12, "products": 1, "itemsize": 2, "unit": 128}


def alone(one: Candidate, table: Library | None = None, processors: int = 100) -> Model:
    return Model([one], table, multiprocessors=processors, bandwidth=1e15)


def test_with_one_time_for_all_waves_it_is_the_papers_formula() -> None:
    """``T_s * ceil(blocks / blocks of a wave)``, the paper's section 6."""
    found = alone(Candidate(TILE, 2, PLAIN))
    random_ = random.Random(0)
    for _ in range(500):
        m, n, k = random_.randint(1, 20000), 16 * random_.randint(1, 999), 128
        blocks = -(-m // 64) * -(-n // 64)
        expected = 2e-6 * math.ceil(blocks / 200)
        assert found.seconds(0, 1, m, n, k) == pytest.approx(expected)


def test_waves_of_few_blocks_lie_between_the_measured_points() -> None:
    times = [Affine(0, s * 1e-6) for s in (1.0, 2.0, 5.0, 4.0)]
    found = alone(Candidate(TILE, 3, Wave(*times)))

    def micros(blocks: int) -> float:
        return found.seconds(0, blocks, 64, 64, 64 * 100) * 1e4

    assert micros(1) == pytest.approx(1.0)
    assert micros(100) == pytest.approx(2.0)
    assert micros(200) == pytest.approx(3.5)
    assert micros(300) == pytest.approx(5.0)
    assert micros(600) == pytest.approx(9.0)
    assert micros(900) == pytest.approx(13.0)
    assert 9.0 < micros(601) < micros(700) < micros(900)


def test_time_never_falls_with_more_rows() -> None:
    for seed in range(8):
        found = model(seed)
        for number in range(len(found.candidates)):
            last = 0.0
            for m in range(1, 12000, 371):
                now = found.seconds(number, 1, m, 1024, 4096)
                # The first tail after a whole wave costs no more than the wave that it belongs to.
                assert now >= last * 0.999, (seed, number, m)
                last = max(last, now)


def test_bytes_are_a_floor() -> None:
    nothing = Affine(0.0, 0.0)
    one = Candidate(TILE, 1, Wave(nothing, nothing, nothing, nothing))
    found = Model([one], None, multiprocessors=132, bandwidth=1e12)
    moved = 2 * (128 * 256 + 512 * 256 + 128 * 512)
    assert found.seconds(0, 1, 128, 512, 256) == pytest.approx(moved / 1e12)


def test_splits_are_shorter_and_pay_for_their_sums() -> None:
    whole = Candidate(TILE, 1, PLAIN)
    split = Candidate(Configuration(64, 64, 64, split_k=4), 1, PLAIN, 2e-6, 1e-12)
    found = Model([whole, split], None, multiprocessors=132, bandwidth=1e15)
    assert found.choose(1, 64, 64, 8192)[:2] == (1, 4)
    assert found.choose(1, 8192, 8192, 256)[0] == 0
    assert found.seconds(1, 1, 64, 64, 8192) == pytest.approx(32e-6 + 2e-6 + 64 * 64 * 4 * 1e-12)


def test_persistent_kernels_have_no_more_programs_than_fit() -> None:
    one = Candidate(Configuration(64, 64, 64, programs=132), 2, PLAIN)
    found = alone(one)
    assert found.choose(1, 64, 128, 128)[1] == 2
    assert found.choose(1, 6400, 6400, 128)[1] == 200


def test_the_librarys_table_is_met_at_its_points_and_goes_on_beyond() -> None:
    table = Library((1, 16, 256), (512, 4096), (128, 1024), tuple(1e-6 * i for i in range(1, 13)))
    found = alone(Candidate(TILE, 1, PLAIN), table)
    seconds = iter(table.seconds)
    for m in table.m:
        for n in table.n:
            for k in table.k:
                assert found.library_seconds(1, m, n, k) == pytest.approx(next(seconds))
    assert found.library_seconds(1, 64, 512, 128) == pytest.approx(math.sqrt(5e-6 * 9e-6))
    assert found.library_seconds(1, 4096, 512, 128) == pytest.approx(9e-6 * 9 / 5)
    assert found.library_seconds(16, 16, 512, 128) == pytest.approx(9e-6)


GRID = Library((1, 16, 256), (512, 4096), (128, 1024), tuple(1e-6 * i for i in range(1, 13)))


@pytest.mark.parametrize("seed", range(5))
def test_a_residual_is_met_on_the_points_of_the_table(seed: int) -> None:
    random_ = random.Random(seed)
    one = candidate(random_)
    measured = residuals(random_, GRID)
    found = alone(replace(one, residuals=measured), GRID)
    for point, residual in zip(GRID.points, measured, strict=True):
        told = found.of_waves(0, 1, *point)
        assert told == alone(one, GRID).seconds(0, 1, *point)
        assert found.seconds(0, 1, *point) == told * math.exp2(residual)
        m, n, k = point
        again = found.seconds(0, 4, m // 4, n, k) if m % 4 == 0 else 0.0  # A batch is more rows.
        assert again in (0.0, found.of_waves(0, 4, m // 4, n, k) * math.exp2(residual))


def test_between_the_points_the_logarithm_of_a_residual_is_linear() -> None:
    measured = tuple(math.log2(1 + 0.1 * place) for place in range(12))
    found = alone(Candidate(TILE, 1, PLAIN, residuals=measured), GRID)

    def factor(m: int, n: int, k: int) -> float:
        return found.seconds(0, 1, m, n, k) / found.of_waves(0, 1, m, n, k)

    assert factor(64, 512, 128) == pytest.approx(math.sqrt(1.4 * 1.8))
    assert factor(4, 512, 128) == pytest.approx(math.sqrt(1.0 * 1.4))
    eight = [1 + 0.1 * place for place in range(8)]
    between = round(math.sqrt(512 * 4096) / 16) * 16
    assert factor(4, between, 362) == pytest.approx(math.prod(eight) ** (1 / 8), rel=1e-3)


def test_beyond_the_ends_a_residual_is_what_it_is_there() -> None:
    measured = tuple(0.1 * place for place in range(12))
    found = alone(Candidate(TILE, 1, PLAIN, residuals=measured), GRID)

    def residual(m: int, n: int, k: int) -> float:
        return math.log2(found.seconds(0, 1, m, n, k) / found.of_waves(0, 1, m, n, k))

    assert residual(8192, 512, 128) == pytest.approx(measured[8])
    assert residual(8192, 16384, 128) == pytest.approx(measured[10])
    assert residual(8192, 16384, 16384) == pytest.approx(measured[11])
    assert residual(1, 16, 128) == pytest.approx(measured[0])
    assert residual(256, 64, 8192) == pytest.approx(measured[9])


def test_an_axis_of_one_point_has_one_residual() -> None:
    table = Library((1, 256), (512,), (128,), (1e-6, 2e-6))
    found = alone(Candidate(TILE, 1, PLAIN, residuals=(0.0, 1.0)), table)
    for n, k in ((16, 128), (512, 128), (4096, 8192)):
        for m, factor in ((1, 1.0), (16, math.sqrt(2)), (256, 2.0), (9000, 2.0)):
            told = found.of_waves(0, 1, m, n, k)
            assert found.seconds(0, 1, m, n, k) == pytest.approx(factor * told)
            assert compiled(found).estimates(1, m, n, k)[0] == found.seconds(0, 1, m, n, k)


def test_a_residual_changes_the_choice() -> None:
    fast, slow = Candidate(TILE, 1, PLAIN), Candidate(Configuration(64, 64, 64, 8, 8), 1, PLAIN)
    wrong = replace(fast, residuals=(0.0,) * 8 + (2.0,) * 4)
    found = Model([wrong, slow], GRID, multiprocessors=100, bandwidth=1e15)
    assert compiled(found).choose(1, 1, 512, 128)[0] == LIBRARY
    assert compiled(found).choose(1, 16, 512, 128)[0] == 0
    assert compiled(found).choose(1, 256, 512, 128)[0] == 1


def test_residuals_that_no_measurement_gives_are_refused() -> None:
    table = Library((1, 256), (512,), (128,), (1e-6, 2e-6))
    numbers = Candidate(TILE, 1, PLAIN).numbers()
    for residuals_ in ((1.0,), (1.0, 2.0, 3.0), (0.0, 33.0), (0.0, math.nan), (math.inf, 0.0)):
        with pytest.raises(ValueError, match="residual"):
            alone(Candidate(TILE, 1, PLAIN, residuals=residuals_), table)
        with pytest.raises(ValueError, match="residual"):
            Selector([numbers], table.knots, table.values, [residuals_], **SETTINGS)
    with pytest.raises(ValueError, match="residual"):
        alone(Candidate(TILE, 1, PLAIN, residuals=(1.0,)))
    with pytest.raises(ValueError, match="residual"):
        Selector([numbers], None, None, [(1.0,)], **SETTINGS)
    with pytest.raises(ValueError, match="of each candidate"):
        Selector([numbers], table.knots, table.values, [], **SETTINGS)
    with pytest.raises(TypeError):
        Selector([numbers], table.knots, table.values, [None], **SETTINGS)


def test_between_measured_sizes_is_a_hedge_of_its_own() -> None:
    table = replace(GRID, seconds=(1e-5,) * 12)
    flat = Affine(8e-6, 0.0)
    one = Candidate(TILE, 1, Wave(flat, flat, flat, flat))
    settings = {"multiprocessors": 2000, "bandwidth": 1e15}

    def ours(between: float | None, n: int, k: int, hedge: float = 0.1, m: int = 20) -> bool:
        selector = compiled(Model([one], table, hedge=hedge, hedge_between=between, **settings))
        return selector.choose(1, m, n, k)[0] == 0

    for n, k in ((512, 128), (4096, 128), (512, 1024), (4096, 1024)):
        assert all(ours(between, n, k) for between in (None, 0.0, 0.1, 0.19, 0.21, 1.0))
        assert ours(1.0, n, k, m=1) and ours(1.0, n, k, m=600)  # Rows, on the table or not.
        assert not ours(1.0, n, k, hedge=0.21) and not ours(0.1, n, k, hedge=0.21)
    # Between, and beyond the ends; of one axis or of both.
    for n, k in ((528, 128), (512, 256), (1024, 512), (256, 128), (512, 2048), (8192, 1024)):
        assert all(ours(between, n, k) for between in (None, 0.0, 0.1, 0.19))
        assert not any(ours(between, n, k) for between in (0.21, 0.5, 1.0))
        assert not ours(0.1, n, k, hedge=0.21)
        assert not ours(1.0, n, k, hedge=0.0)


def test_an_axis_of_one_size_is_measured_everywhere() -> None:
    table = Library((1, 256), (512,), (128, 1024), (1e-3,) * 4)
    flat = Affine(8e-6, 0.0)
    one = Candidate(TILE, 1, Wave(flat, flat, flat, flat))
    found = Model([one], table, multiprocessors=100, bandwidth=1e15, hedge_between=1.0)
    for n, k, expected in ((512, 128, 0), (2048, 1024, 0), (16, 128, 0), (512, 256, LIBRARY)):
        assert found.choose(1, 10, n, k)[0] == expected
        assert compiled(found).choose(1, 10, n, k)[0] == expected


def test_without_the_librarys_times_there_is_nothing_to_hedge() -> None:
    found = Model(
        [Candidate(TILE, 1, PLAIN)], None, multiprocessors=9, bandwidth=1e15, hedge_between=1.0
    )
    assert found.choose(1, 64, 512, 128)[0] == compiled(found).choose(1, 64, 512, 128)[0] == 0


def test_hedges_that_are_no_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="hedge"):
        Model([], None, multiprocessors=1, bandwidth=1.0, hedge_between=1.01)
    for between in (-0.1, 1.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="between"):
            Selector([], None, None, **SETTINGS, between=between)
    with pytest.raises(ValueError, match="device"):
        Selector([], None, None)


def test_the_library_is_chosen_where_it_is_faster() -> None:
    table = Library((1, 65536), (128,), (128,), (1e-6, 1e-3))
    found = alone(Candidate(TILE, 1, PLAIN), table)
    assert found.choose(1, 1, 128, 128)[0] == LIBRARY
    assert found.choose(1, 6000, 128, 128)[0] == 0


@pytest.mark.parametrize(
    "sizes",
    [(1, 0, 128, 128), (1, 1, 120, 128), (1, 1, 128, 192), (1, 2**31, 128, 128), (0, 1, 128, 128)],
)
def test_shapes_that_no_kernel_computes_are_the_librarys(sizes: tuple[int, ...]) -> None:
    found = alone(Candidate(TILE, 1, PLAIN))
    assert found.choose(*sizes) == compiled(found).choose(*sizes) == (LIBRARY, 0, 0.0)


def test_choices_are_the_same_after_json() -> None:
    random_ = random.Random(3)
    one, table = candidate(random_), library(random_)
    assert Wave.from_json(one.wave.as_json()) == one.wave
    assert Library.from_json(table.as_json()) == table


def test_affine_functions_never_fall() -> None:
    assert Affine.through((1, 3.0), (3, 7.0)) == Affine(1.0, 2.0)
    assert Affine.through((1, 3.0), (3, 1.0)).per_step == 0.0


def test_the_c_part_refuses_what_no_measurement_gives() -> None:
    good = [64.0, 64.0, 64.0, 1.0, 0.0, 1.0, *[1e-6] * 10]
    Selector([good], None, None, **SETTINGS)
    with pytest.raises(ValueError, match="powers of two"):
        Selector([[48.0, *good[1:]]], None, None, **SETTINGS)
    with pytest.raises(ValueError, match="16 to 16"):
        Selector([good[1:]], None, None, **SETTINGS)
    with pytest.raises(ValueError, match="out of range"):
        Selector([[*good[:-1], math.nan]], None, None, **SETTINGS)
    with pytest.raises(ValueError, match="at most"):
        Selector([good] * (MOST_CANDIDATES + 1), None, None, **SETTINGS)
    with pytest.raises(ValueError, match="rise"):
        Selector([good], ([2.0, 1.0], [1.0], [1.0]), [1.0, 1.0], **SETTINGS)
    with pytest.raises(ValueError, match="values"):
        Selector([good], ([1.0, 2.0], [1.0], [1.0]), [1.0], **SETTINGS)
    with pytest.raises(ValueError, match="device"):
        Selector([good], None, None, **{**SETTINGS, "multiprocessors": 0})
    with pytest.raises(TypeError):
        Selector([good], None, None, **SETTINGS).choose(1, 2, 3)


@pytest.mark.parametrize("corrected", [False, True])
def test_a_choice_among_24_is_timed(corrected: bool) -> None:
    found = compiled(model(1, corrected=corrected)).benchmark(1, 100, 4096, 4096, 2000)
    assert 0.0 < found < 1e6
