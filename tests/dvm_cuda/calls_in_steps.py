"""Calls of reductions of few long rows, in steps, with a driver that keeps launches.

Run as a program with the path of the driver, as ``with_driver.py``: each launch runs in the
simulator as soon as it has been made, since the next one reads what it has written.
"""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from magjit_dvm import reference
from magjit_dvm.cuda.simulate import run_image
from magjit_dvm.cuda.words import HEADER_BYTES
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from magjit_dvm.vm import DeviceError
from tests.dvm.checking import cast, compute, load, output, reduce, require_results, tensor
from tests.dvm_cuda.long_rows import counted, largest, mean_square, normalized, softmaxed, weighed
from tests.dvm_cuda.test_encoder import values
from tests.dvm_cuda.with_driver import (
    DRIVER,
    KEPT,
    PARAMETER,
    REFUSAL,
    OnCpu,
    being_compiled,
    raised,
    run_all,
)

F32, F16 = DType.F32, DType.F16
usable = ctypes.CDLL(None).malloc_usable_size
usable.argtypes, usable.restype = [ctypes.c_void_p], ctypes.c_size_t
given: list[torch.Tensor] = []
between: dict[int, torch.Tensor] = {}
launches: list[tuple[int, int]] = []  # blocks, elements of a row


def _launched() -> None:
    """Run what the driver has kept, over the memory that its words name."""
    image, each = kept_image(), KEPT[1] % 1000
    launches.append((KEPT[2], int.from_bytes(image[28:32], "little")))
    add_memory(image)
    run_image(image, each, KEPT[4], given, list(between.values()), KEPT[2])


def kept_image() -> bytes:
    """The parameter of the last launch, of one operator."""
    image = bytes(PARAMETER)
    return image[: HEADER_BYTES + int.from_bytes(image[4:8], "little")]


def add_memory(image: bytes) -> None:
    """Have in ``between`` all else that an image's words name."""
    there = *given, *between.values()
    known = [(one.data_ptr(), one.untyped_storage().nbytes()) for one in there]
    for at in range(0, len(image) - 7, 4):
        address = int.from_bytes(image[at : at + 8], "little")
        inside = any(first <= address < first + length for first, length in known)
        if address >> 40 in (0x55, 0x56, 0x7E, 0x7F) and address % 64 == 0 and not inside:
            length = usable(address)
            held = (ctypes.c_char * length).from_address(address)
            between[address] = torch.frombuffer(held, dtype=torch.uint8)
            known.append((address, length))


launched = ctypes.CFUNCTYPE(None)(_launched)
HOOK = ctypes.c_void_p.in_dll(DRIVER, "launched")


@contextmanager
def each_launch(run: Any) -> Iterator[None]:
    """Have the driver call this as soon as it keeps a launch."""
    HOOK.value = ctypes.cast(run, ctypes.c_void_p).value
    try:
        yield
    finally:
        HOOK.value = None


def call_anew(call: Callable[..., Any], arguments: Sequence[Any], written: int = 0) -> Any:
    """Call with nothing known but these arguments, of which the first ones may be written."""
    given[:] = [one for one in arguments if isinstance(one, torch.Tensor)]
    between.clear()
    between.update((one.data_ptr(), one) for one in arguments[:written])
    launches.clear()
    return call(*arguments)


def called(fused: OnCpu, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The results of a call, each launch run as it is made."""
    with each_launch(launched):
        found = call_anew(fused, arguments)
    results = found if isinstance(found, tuple) else (found,)
    return tuple(one.clone() for one in results)


def check(program: Program, *arguments: Any, launched: int) -> None:
    """The third call, whose steps find their images."""
    fused = OnCpu(program)
    for _ in range(2):
        fused(*arguments)
    results = called(fused, arguments)
    assert len(launches) == launched, launches
    require_results(program, results, reference.run(program, arguments), arguments, arguments)


def test_a_loss() -> None:
    """Two launches; the first has a block for each multiprocessor, or nearly."""
    for rows, cols in ((128, 4096), (1, 1 << 19)):
        check(mean_square(F16), values(F16, rows, cols), values(F16, rows, cols), launched=2)
        (blocks, width), (last, pieces) = launches
        assert 100 <= blocks <= 132 and last == 1 and width * pieces == rows * cols


def test_lengths_that_nothing_divides() -> None:
    """What is left over has a launch of its own, and comes to the others' in the last."""
    for cols in (400_009, 262_147, 3 * 131_101):
        check(mean_square(F16), values(F16, 1, cols), values(F16, 1, cols), launched=3)
        (_, width), (_, rest), (_, pieces) = launches
        assert width * pieces + rest == cols and 0 < rest < width
        assert width % 8 == 0, "pieces begin where 16 bytes do"
        check(largest(F32), values(F32, cols + 3)[3:].view(1, -1), launched=3)
    check(largest(F32), values(F32, 300_003)[3:].view(1, -1), launched=2)
    check(counted(F16), values(F16, 1 << 18), values(DType.I64, 1 << 18), launched=2)
    check(counted(F16), values(F16, 131_003), values(DType.I64, 131_003), launched=3)


def test_rows_keep_their_own() -> None:
    for shape in ((3, 4, 40_000), (7, 1, 66_000), (2, 96, 1000)):
        x = values(F16, *shape)
        check(softmaxed(F16), x, launched=5)
        check(normalized(F16), x, launched=5)
    x = values(F16, 3, 1, 100_003)  # a prime
    check(softmaxed(F16), x, launched=7)
    check(normalized(F16), x, launched=7)
    turned = values(F16, 40_000, 4, 3).permute(2, 1, 0)  # in memory it is one loop
    check(Program(3, *whole_sum(F16)), turned, launched=2)


def test_channels_of_images_are_few_rows_sooner() -> None:
    """Since they lie in parts; as many rows that lie in one are none too few."""
    nodes = load(0, F16), cast(F32, 0), reduce("sum", F32, 1, 0, 2)
    channels = Program(3, (tensor(F16, 0, 1, 2),), nodes, (output(2, 1),))
    rows = Program(2, (tensor(F16, 0, 1),), (*nodes[:2], reduce("sum", F32, 1, 1)), (output(2, 0),))
    for program, shape, launched in (
        (channels, (32, 200, 3136), 2),
        (channels, (64, 600, 3136), 1),  # more rows
        (channels, (32, 512, 784), 1),  # shorter
        (rows, (200, 100_352), 1),
        (rows, (60, 313_600), 2),
    ):
        fused, x = OnCpu(program), torch.empty(shape, dtype=torch.float16)
        before = KEPT[0]
        fused(x)
        assert KEPT[0] == before + launched, shape


def whole_sum(dtype: DType) -> tuple[Any, ...]:
    nodes = load(0, dtype), cast(F32, 0), reduce("sum", F32, 1, 0, 1, 2)
    return (tensor(dtype, 0, 1, 2),), nodes, (output(2),)


def test_operands_that_all_of_a_row_share() -> None:
    """Loops that not all operands have as one are not joined; the outermost is divided."""
    for rows, cols in ((512, 600), (131_072, 4)):
        check(weighed(F16), values(F16, rows, cols), values(F16, rows), launched=2)
    x, w = values(F16, 512, 600), values(F16, 1, 600).expand(512, 600)
    check(mean_square(F16), x, w, launched=2)


def test_what_has_no_steps_is_left_to_aten() -> None:
    asked = list[Any]()

    def fallback(*arguments: Any) -> torch.Tensor:
        asked.append(arguments)
        return torch.zeros(3)

    nodes = (
        *(load(0, F32), Node(NodeKind.IOTA, DType.I64, aux=0), cast(F32, 1)),
        *(compute("mul", F32, 0, 2), reduce("sum", F32, 3, 0)),
    )
    fused = OnCpu(Program(1, (tensor(F32, 0),), nodes, (output(4),)), fallback)
    for _ in range(2):
        assert fused(torch.ones(300_000)).shape == (3,)
    assert len(asked) == 2, "of places"


def test_a_call_is_its_fallbacks_until_the_kernels_of_steps_are_there() -> None:
    x, calls = values(F16, 1, 1 << 18), list[Any]()

    def fallback(*given: Any) -> torch.Tensor:
        calls.append(given)
        return torch.zeros(())

    fused = OnCpu(mean_square(F16), fallback)
    with being_compiled():
        called(fused, [x, x])
    assert len(calls) == 1 and not launches
    called(fused, [x, x])
    assert len(calls) == 1 and len(launches) == 2


def test_errors_of_a_step() -> None:
    """They have their types and leave nothing behind."""
    x = values(F16, 1, 1 << 18)
    fused = OnCpu(mean_square(F16))
    called(fused, [x, x])
    before = sys.getrefcount(x)
    REFUSAL.value = 719
    raised(DeviceError, "unspecified launch failure", lambda: fused(x, x))
    REFUSAL.value = 0
    assert sys.getrefcount(x) == before
    assert called(fused, [x, x])[0] == 0 and len(launches) == 2

    class Broken(OnCpu):
        def steps(self) -> Any:
            raise ValueError("no steps")

    raised(ValueError, "no steps", lambda: Broken(mean_square(F16))(x, x))

    class Malformed(OnCpu):
        def steps(self) -> Any:
            return ((self, True, (0,), (2,), (3,), None),)

    raised(ValueError, "a step of other arguments", lambda: Malformed(mean_square(F16))(x, x))


def test_calls_leave_nothing_behind() -> None:
    fused, x = OnCpu(mean_square(F16)), values(F16, 1, 1 << 18)
    fused(x, x)
    gc.collect()
    objects, references = len(gc.get_objects()), sys.getrefcount(x)
    for _ in range(100):
        result = fused(x, x)
    gc.collect()
    assert len(gc.get_objects()) - objects < 10 and sys.getrefcount(x) == references
    assert sys.getrefcount(result) == 2 and math.isfinite(float(x[0, 0]))
    cycle = OnCpu(mean_square(F16), lambda *given: fused)
    cycle(x, x)
    del cycle
    assert gc.collect() >= 0


if __name__ == "__main__":
    run_all(dict(globals()))
