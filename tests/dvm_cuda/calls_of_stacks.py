"""Calls of several fused operators at once, with a driver that keeps launches.

Run as a program with the path of the driver, as ``with_driver.py``.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from magjit_dvm import reference, vm
from magjit_dvm.cuda.encode import encode
from magjit_dvm.cuda.parts import SUMS
from magjit_dvm.cuda.simulate import run_image
from magjit_dvm.cuda.words import COUNTER_AT, HEADER_BYTES, Image
from magjit_dvm.disassembler import observed
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from magjit_dvm.vm import DeviceError
from tests.dvm.checking import require_results
from tests.dvm_cuda import with_driver
from tests.dvm_cuda.chained import by_rows, of_halves, product, summed
from tests.dvm_cuda.checking import BIG
from tests.dvm_cuda.test_encoder import layer_norm, softmax, values
from tests.dvm_cuda.test_sums import beside_rows
from tests.dvm_cuda.with_driver import (
    DRIVER,
    KEPT,
    KEPT_SIZE,
    PARAMETER,
    REFUSAL,
    OnCpu,
    asked_for_stacks,
    negated,
    positions,
    raised,
    run_all,
)

F32, F16 = DType.F32, DType.F16
CAPTURING = ctypes.c_int.in_dll(DRIVER, "capturing_now")


def stacked(*members: tuple[OnCpu, Any]) -> tuple[Any, ...]:
    arguments = [one for _, given in members for one in given]
    return vm.run_stacked(tuple(fused for fused, _ in members), *arguments)


def image_of(program: Program, given: Any) -> Image:
    image = encode(program, list(given), BIG).image
    assert image is not None
    return image


def images() -> list[tuple[bytes, int]]:
    """The images of a launch, and how many blocks each adds: 0 where it shares those before."""
    parameter = bytes(PARAMETER)
    numbers = [int.from_bytes(parameter[k : k + 4], "little") for k in range(0, 64, 4)]
    ends, places = [one for one in numbers[:8] if one], numbers[8:]
    found = []
    for before, end, at in zip([0, *ends], ends, places, strict=False):
        length = HEADER_BYTES + int.from_bytes(parameter[at + 4 : at + 8], "little")
        assert at % 16 == 0 and not any(parameter[at + COUNTER_AT : at + COUNTER_AT + 8])
        found.append((parameter[at : at + length], end - before))
    assert sum(one for _, one in found) == KEPT[2]
    return found


def test_members_that_take_no_tensor() -> None:
    """They run on the GPU that they were made for."""
    before, counts = KEPT[0], (50, 70)
    for _ in range(3):
        results = stacked(*((OnCpu(positions()), (count,)) for count in counts))
    assert KEPT[0] == before + 3
    for (image, _), count, made in zip(images(), counts, results, strict=True):
        run_image(image, image_of(positions(), [count]).each, KEPT[4], [count], (made,))
        assert made.tolist() == list(range(0, 3 * count, 3))


def test_a_stack_is_one_launch() -> None:
    wide = values(F32, 7, 300)
    members = [
        (softmax(F32), (wide,)),
        (softmax(F32), (values(F32, 90, 200),)),
        (layer_norm(F32), (wide, *[values(F32, 300)] * 2)),
    ]
    each = {image_of(*member).each for member in members}
    assert len(each) == 1
    before, number = KEPT[0], asked_for_stacks.count(*each)
    operators = [(OnCpu(program), given) for program, given in members]
    for turn in range(4):  # from the third one on images are found
        results = stacked(*operators)
        assert KEPT[0] == before + turn + 1 and KEPT[1] == 4000 + min(each)
        threads, found = KEPT[3], images()
        assert len(found) == 3
        left = list(results)
        for (image, blocks), (program, given) in zip(found, members, strict=True):
            own = tuple(left.pop(0) for _ in program.outputs)
            made = image_of(program, given)
            assert blocks == made.blocks
            assert threads >= made.threads and KEPT[4] >= made.shared_bytes
            run_image(image, made.each, made.shared_bytes, given, own)
            require_results(program, own, reference.run(program, given), given, given)
        assert not left
    assert asked_for_stacks.count(*each) == number + 1


def test_members_of_other_kernels_have_launches_of_their_own() -> None:
    """Another R, tiles that are drawn, approximate functions, no room."""
    small, large = values(F32, 100), torch.zeros(4_000_000)
    fused, before = OnCpu(negated()), KEPT[0]
    one, other = stacked((fused, (small,)), (fused, (large,)))
    assert KEPT[0] == before + 2 and (one.shape, other.shape) == (small.shape, large.shape)
    stacked((fused, (small,)), (OnCpu(negated(), approximate=True), (small,)))
    assert KEPT[0] == before + 4
    stacked(*[(fused, (small,))] * 8)
    assert KEPT[0] == before + 5 and len(images()) == 8
    normed = values(F16, 7, 300), *[values(F16, 300)] * 2
    length = len(image_of(layer_norm(F16), normed).template())
    stacked(*[(OnCpu(layer_norm(F16)), normed)] * 8)
    assert KEPT[0] == before + 5 + -(-8 // ((4096 - 64) // length))


def test_sums_of_a_stack_are_added_up_behind_it() -> None:
    """By one launch, each as by a launch of its own."""
    program, before, members = beside_rows(F16), KEPT[0], []
    for rows, columns in ((3000, 256), (2000, 256), (2500, 256)):
        members.append((OnCpu(program), (values(F16, rows, columns), values(F32, rows))))
    results = stacked(*members)
    assert KEPT[0] == before + 2 and len(results) == 9 and KEPT[1] % 1000 == SUMS
    packed, end = b"", 0
    for number, (fused, given) in enumerate(members):
        parts = image_of(fused.program, given).parts
        assert parts is not None
        made = bytes(PARAMETER)[len(packed) :]
        own = [one.data_ptr() for one in (*given, *results[3 * number : 3 * number + 3])]
        alone = parts.pack(int.from_bytes(made[:8], "little"), own)
        for k in range(0, len(alone), 32):
            last = int.from_bytes(alone[k + 28 : k + 32], "little") + end
            packed += alone[k : k + 28] + last.to_bytes(4, "little")
        end = last
    found = bytes(PARAMETER)[: KEPT_SIZE.value]
    assert found.rstrip(b"\0") == packed.rstrip(b"\0") and KEPT[2] == end


def test_what_has_no_words_is_called_by_itself() -> None:
    def fallback(x: torch.Tensor) -> torch.Tensor:
        return x.double().neg()

    x, before = values(F32, 100), KEPT[0]
    program = negated()
    found = stacked((OnCpu(program, fallback), (x.double(),)), (OnCpu(program), (x,)))
    assert KEPT[0] == before + 1 and found[0].dtype is torch.float64 and found[1].shape == x.shape
    empty, found = stacked((OnCpu(program), (values(F32, 0),)), (OnCpu(program), (x,)))
    assert KEPT[0] == before + 2 and empty.shape == (0,) and found.shape == x.shape


def test_until_its_kernel_is_there_a_stack_is_launched_one_by_one() -> None:
    x, before = values(F32, 100), KEPT[0]
    with_driver.tell_of(0)
    with_driver.there = False
    fused = OnCpu(negated())
    stacked((fused, (x,)), (fused, (x,)))
    assert KEPT[0] == before + 2
    with_driver.there = True
    stacked((fused, (x,)), (fused, (x,)))
    assert KEPT[0] == before + 3 and asked_for_stacks[-2:] == [8, 8]


def test_members_run_by_their_fallback_until_kernels_are_there() -> None:
    x, before, calls = values(F32, 100), KEPT[0], list[Any]()

    def fallback(*given: Any) -> torch.Tensor:
        calls.append(given)
        return torch.zeros(100)

    fused = OnCpu(negated(), fallback)
    with with_driver.being_compiled():
        stacked((fused, (x,)), (fused, (x,)))
    assert KEPT[0] == before and len(calls) == 2
    stacked((fused, (x,)), (fused, (x,)))
    assert KEPT[0] == before + 1 and len(calls) == 2


# -- of operators that depend on one another ------------------------------------------------------


Members = list[tuple[Program, tuple[Any, ...]]]


def chained(members: Members, order: tuple[int, ...], blocks: list[int]) -> tuple[Any, ...]:
    """The results of one launch, whose images are those of members in this order."""
    before = KEPT[0]
    results = stacked(*((OnCpu(program), given) for program, given in members))
    assert KEPT[0] == before + 1 and len(results) == len(members)
    found = images()
    assert [number for _, number in found] == blocks and len(found) == len(order)
    for which, (image, _) in zip(order, found, strict=True):
        given = taking(members[which], results)
        run_image(image, KEPT[1] % 1000, KEPT[4], given, [results[which]])
    for (program, given), made in zip(members, results, strict=True):
        given = taking((program, given), results)
        require_results(program, (made,), reference.run(program, given), given, given)
    return results


def taking(member: tuple[Program, tuple[Any, ...]], results: tuple[Any, ...]) -> tuple[Any, ...]:
    """A member's arguments, with results in the places of their numbers."""
    return tuple(results[one] if type(one) is int else one for one in member[1])


def test_small_operators_that_depend_on_one_another_share_a_block() -> None:
    x, y = values(F32, 12, 50), values(F32, 300)
    both = [(summed(), (x,)), (by_rows(), (x, 0))]
    chained(both, (0, 1), [1, 0])
    assert KEPT[1] == 4008
    # One of no dependence between, which has blocks of its own; a third one behind the two.
    chained([*both, (negated(), (y,)), (summed(), (1,))], (0, 1, 3, 2), [1, 0, 0, 2])
    # Two chains.
    other = values(F32, 3, 7)
    chained([*both, (summed(), (other,)), (by_rows(), (other, 2))], (0, 1, 2, 3), [1, 0, 1, 0])
    # One that many take, and one that takes many.
    ends = [(negated(), (0,)), (by_rows(), (x, 1)), (by_rows(), (2, 1))]
    chained([(summed(), (x,)), *ends], (0, 1, 2, 3), [1, 0, 0, 0])


def test_members_of_a_stack_are_shown_with_what_they_take() -> None:
    x, before = values(F32, 12, 50), KEPT[0]
    operators = OnCpu(summed()), OnCpu(by_rows())
    with observed() as seen:
        results = vm.run_stacked(operators, x, x, 0)
    assert [one[0] for one in seen] == list(operators) and KEPT[0] == before + 2
    assert seen[0][1] is x and seen[1][1] is x and seen[1][2] is results[0]


def test_in_a_graph_each_has_a_launch() -> None:
    """Which begins sooner there than a block begins again."""
    x, before = values(F32, 12, 50), KEPT[0]
    CAPTURING.value = 1
    first, second, other = stacked(
        (OnCpu(summed()), (x,)), (OnCpu(by_rows()), (x, 0)), (OnCpu(summed()), (x,))
    )
    CAPTURING.value = 0
    assert KEPT[0] == before + 2, "the third goes with the first"
    assert first.shape == other.shape == (12,) and second.shape == x.shape
    assert KEPT[2] == image_of(by_rows(), (x, first)).blocks > 1


def test_what_cannot_share_a_block_waits_for_its_launch() -> None:
    def launches(*members: tuple[Program, tuple[Any, ...]]) -> int:
        before = KEPT[0]
        stacked(*((OnCpu(program), given) for program, given in members))
        return int(KEPT[0] - before)

    small = values(F32, 12, 50)
    for large in (values(F32, 300, 100), values(F32, 80, 20)):  # in elements, in rows
        assert launches((summed(), (large,)), (by_rows(), (large, 0))) == 2
    # It takes results of two blocks.
    pair = [(summed(), (small,)), (negated(), (values(F32, 12),))]
    assert launches(*pair, (product(), (0, 1))) == 2
    # Sums across rows are whole when a second launch has added them up.
    x, w = values(F16, 3000, 256), values(F32, 3000)
    assert launches((beside_rows(F16), (x, w)), (of_halves(), (1,))) == 2 + 1
    # What does not depend on it goes ahead with the others.
    assert launches((summed(), (large,)), (by_rows(), (large, 0)), (summed(), (small,))) == 2
    # Eight have room in one launch, eight of more bytes do not.
    many = [(summed(), (small,))] + [(by_rows(), (small, 0))] * 7
    assert launches(*many) == 1
    norm, weight = layer_norm(F32), values(F32, 50)
    length, results = len(image_of(norm, (small, weight, weight)).template()), len(norm.outputs)
    chain = [(norm, (small if k == 0 else (k - 1) * results, weight, weight)) for k in range(8)]
    assert launches(*chain) == -(-8 // ((4096 - 64) // length)) > 1


def test_whoever_has_no_words_is_called_behind_those_that_it_needs() -> None:
    def fallback(*given: torch.Tensor) -> torch.Tensor:
        seen.extend(given)
        return given[0].double()

    seen: list[torch.Tensor] = []
    x, before = values(F32, 100), KEPT[0]
    fused, other = OnCpu(negated()), OnCpu(of_halves(), fallback)
    first, second, third = stacked((fused, (x,)), (other, (0,)), (fused, (0,)))
    assert seen[0] is first and second.dtype is torch.float64 and third.shape == x.shape
    assert KEPT[0] == before + 2
    # Of several results, one of which another takes.
    many = OnCpu(beside_rows(F16), lambda *given: tuple(given[0] * k for k in range(3)))
    *three, last = stacked((many, (x, x)), (fused, (2,)))
    assert len(three) == 3 and torch.equal(three[2], x * 2) and last.shape == x.shape
    assert KEPT[0] == before + 3
    few = OnCpu(beside_rows(F16), lambda *given: given)
    raised(TypeError, "number of results", lambda: stacked((few, (x, x)), (fused, (2,))))


def test_errors_of_stacks() -> None:
    fused, x = OnCpu(negated()), values(F32, 100)
    raised(TypeError, "another number", lambda: vm.run_stacked((fused, fused), x))
    raised(TypeError, "one kind", lambda: vm.run_stacked((fused, abs), x, x))
    for number in (0, 1, -1, 1 << 70):
        raised(ValueError, "number", lambda n=number: vm.run_stacked((fused, fused), n, x))
        if number:
            raised(ValueError, "number", lambda n=number: vm.run_stacked((fused, fused), x, n))
    raised(ValueError, "number", lambda: vm.run_stacked((fused, fused), x, True + 1))
    REFUSAL.value = 719
    raised(DeviceError, "unspecified launch failure", lambda: stacked(*[(fused, (x,))] * 2))
    REFUSAL.value = 0
    before = sys.getrefcount(x)
    stacked(*[(fused, (x,))] * 3)
    assert sys.getrefcount(x) == before
    results = stacked((fused, (x,)), (fused, (0,)))
    assert sys.getrefcount(x) == before and sys.getrefcount(results[0]) == 2


if __name__ == "__main__":
    run_all(dict(globals()))
