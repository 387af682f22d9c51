"""The schedule space, the device description, and the schedules of unknown devices."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from magjit_triton.codegen.matmul.configuration import Configuration, Work
from magjit_triton.macro.device import DEVICES, Device
from magjit_triton.macro.errors import NoDeviceError, UnknownFamilyError
from magjit_triton.macro.families import FAMILIES, named
from magjit_triton.macro.heuristics import analytic, default_configurations, default_occupancy
from magjit_triton.macro.space import Space

H200 = DEVICES["h200"]
WORKS = [
    Work(torch.float16),
    Work(torch.bfloat16, 2),
    Work(torch.float32),
    Work(torch.float32, 1, exact=True),
]


@pytest.mark.parametrize("device", list(DEVICES))
@pytest.mark.parametrize("work", WORKS)
def test_hard_constraints_hold_of_every_schedule(work: Work, device: str) -> None:
    space = Space.small(work, DEVICES[device])
    assert len(space.legal) > 50
    for one in space.legal:
        assert one.shared_memory(work) <= space.device.shared_per_block
        assert space.registers(one) <= 255
        assert not (one.split_k > 1 and one.programs)
        assert default_occupancy(one, work, space.device) >= 1


def test_places_and_schedules_are_one_to_one() -> None:
    space = Space(WORKS[0], H200)
    places = {space.encoded(one) for one in space.legal}
    assert len(places) == len(space.legal) > 3000
    for one in space.legal[::37]:
        assert space.projected(space.encoded(one)) == one
        near = [
            place + random.Random(one.block_m).uniform(-0.08, 0.08) for place in space.encoded(one)
        ]
        assert space.projected(near) == one
    assert space.projected([9.0] * space.dimensions).block_m == 256
    assert space.projected([-9.0] * space.dimensions).block_m == 16


def test_neighbours_differ_along_one_axis() -> None:
    space = Space(WORKS[0], H200)
    for one in space.legal[::101]:
        for other in space.neighbours(one):
            assert space.is_legal(other)
            pairs = zip(space.values(one), space.values(other), strict=True)
            assert sum(a != b for a, b in pairs) == 1


def test_a_search_begins_with_tiles_of_all_heights_that_the_hardware_is_made_for() -> None:
    space = Space(WORKS[0], H200)
    first = space.first_population(12)
    assert len(set(first)) == 12
    assert {one.block_m for one in first} == {16, 32, 64, 128, 256}
    assert not any(space.broken(one) for one in first)


def test_soft_constraints_name_what_they_miss() -> None:
    space = Space(WORKS[0], H200)
    assert not space.broken(Configuration(128, 128, 64, warps=8))
    assert space.broken(Configuration(16, 16, 64, warps=8)) == ["tensor core", "share of a warp"]
    assert "vector" in space.broken(Configuration(128, 128, 16, warps=8))


def test_occupancy_is_what_the_least_of_all_resources_allows() -> None:
    assert H200.occupancy(0, 32, 4) == 16  # threads
    assert H200.occupancy(100 * 1024, 32, 4) == 2  # shared memory
    assert H200.occupancy(1024, 255, 8) == 1  # registers
    assert H200.occupancy(1024, 128, 4) == 4
    assert H200.occupancy(0, 16, 1) == 32  # blocks
    assert H200.occupancy(H200.shared_per_block + 1, 32, 4) == 0


def test_devices_by_name() -> None:
    assert Device.named("H200") is H200
    with pytest.raises(NoDeviceError, match="h200"):
        Device.named("unheard-of")
    assert H200.flops(2) == pytest.approx(1.07e15, rel=0.01)
    assert H200.flops(4) == H200.flops(2) / 2
    if not torch.cuda.is_available():
        with pytest.raises(NoDeviceError, match="way out"):
            Device.named(None)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_signatures_tell_families_apart_and_are_stable(name: str) -> None:
    one, again = named(name, torch.float16), named(name, torch.float16)
    assert one.signature == again.signature
    assert one.signature != named(name, torch.bfloat16).signature
    assert one.signature != named(name, torch.float16, n=256, k=512).signature
    others = [other for other in FAMILIES if other != name]
    assert one.signature not in {named(other, torch.float16).signature for other in others[:2]}


def test_unknown_families_are_named() -> None:
    with pytest.raises(UnknownFamilyError, match="linear_gelu"):
        named("unheard-of", torch.float16)


@pytest.mark.parametrize("device", list(DEVICES))
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("count", [12, 24])
def test_default_schedules_serve_few_and_many_rows(work: Work, device: str, count: int) -> None:
    found = default_configurations(work, DEVICES[device], count)
    assert len(set(found)) == len(found) == count
    space = Space.small(work, DEVICES[device])
    assert all(space.is_legal(one) for one in found)
    assert {16, 64} <= {one.block_m for one in found}
    assert any(one.split_k > 1 for one in found)


def test_estimated_waves_grow_with_blocks() -> None:
    for cut in Space.small(WORKS[0], H200).legal[::7]:
        wave = analytic(cut, WORKS[0], H200, default_occupancy(cut, WORKS[0], H200)).wave
        for steps in (1, 16, 128):
            assert 0 < wave.lone.at(steps) <= wave.single.at(steps) <= wave.full.at(steps)
            assert 0 < wave.steady.at(steps) <= wave.full.at(steps)


def test_a_products_schedules_serve_what_surrounds_it() -> None:
    kept = [Configuration(128, 256, 64, warps=8), Configuration(64, 64, 64, warps=4)]
    assert Space(Work(torch.float16), DEVICES["h200"]).propagated(kept) == kept
    twice = Space(Work(torch.float16, products=2), DEVICES["h200"])
    found = twice.propagated(kept)
    assert Configuration(128, 128, 64, warps=8) in found
    assert Configuration(64, 64, 64, warps=8) in found
    assert kept[0] not in found  # too many sums for the registers
    assert all(map(twice.is_legal, found)) and len(set(found)) == len(found)
