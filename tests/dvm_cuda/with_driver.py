"""Calls of the GPU's fused operators with a driver that keeps launches, and tensors on the CPU.

Run as a program with the path of the driver, in a process of its own: ``test_calls.py`` does.  The
launches that are kept run in the simulator.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch

from magjit_dvm import reference, vm
from magjit_dvm.cuda.encode import Encoded, encode
from magjit_dvm.cuda.forms import STACKED
from magjit_dvm.cuda.launch import DeviceFused, _allocate
from magjit_dvm.cuda.native import as_lists
from magjit_dvm.cuda.parts import SUMS
from magjit_dvm.cuda.simulate import run_image
from magjit_dvm.cuda.words import COUNTER_AT, HEADER_BYTES
from magjit_dvm.disassembler import disassemble, observed, text_of
from magjit_dvm.instructions import DType
from magjit_dvm.program import Input, InputKind, Node, NodeKind, Output, Program
from magjit_dvm.vm import CudaFused, DeviceError
from tests.dvm.checking import compute, load, output, require_results, tensor
from tests.dvm_cuda.agreeing import memory
from tests.dvm_cuda.checking import BIG
from tests.dvm_cuda.drawn_programs import TAME, Drawer
from tests.dvm_cuda.test_encoder import layer_norm, softmax, values
from tests.dvm_cuda.test_sums import beside_rows

F32, F16 = DType.F32, DType.F16
DRIVER = ctypes.CDLL(sys.argv[1])
KEPT = (ctypes.c_uint64 * 8).in_dll(DRIVER, "kept")
PARAMETER = (ctypes.c_ubyte * 4096).in_dll(DRIVER, "kept_parameter")
PARAMETER_BEFORE = (ctypes.c_ubyte * 4096).in_dll(DRIVER, "parameter_before")
REFUSAL = ctypes.c_int.in_dll(DRIVER, "refusal")
REFUSES_PARTS = ctypes.c_int.in_dll(DRIVER, "refuses_parts")
REFUSES_OVERLAP = ctypes.c_int.in_dll(DRIVER, "refuses_overlap")
OVERLAPPED = ctypes.c_int.in_dll(DRIVER, "overlapped")
KEPT_SIZE = ctypes.c_uint64.in_dll(DRIVER, "kept_size")
COUNTERS = torch.zeros(64, 2, dtype=torch.int32)
MACHINE = astuple(BIG)
asked: list[tuple[int, int, int]] = []
asked_for_stacks: list[int] = []
there = True  # the kernel of stacks
compilers_are_done = True


def tell_of(index: int) -> None:
    """The GPU's sizes; kernels that were known of it are forgotten."""
    vm.cuda_gpu(index, MACHINE, COUNTERS.data_ptr(), len(COUNTERS))


def kernel(index: int, each: int, approximate: int, form: int, waits: int) -> int:
    """As the backend's: tells of the GPU, loads a kernel."""
    if each and not waits and not compilers_are_done:
        asked.append((index, each, approximate))
        return 0
    if form == STACKED:
        asked_for_stacks.append(each)
        name = f"stack_{each}"
        return vm.cuda_load(index, bytes([4]) * 8, name, MACHINE[1], True) if there else 0
    asked.append((index, each, approximate))
    if not each:
        tell_of(index)
        return 0
    return vm.cuda_load(index, bytes([1 + approximate]) * 8, f"interpret_{each}", MACHINE[1], True)


@contextmanager
def being_compiled() -> Iterator[None]:
    """Meanwhile no kernel is there for who does not wait; afterwards all are asked for anew."""
    global compilers_are_done
    tell_of(0)
    compilers_are_done = False
    try:
        yield
    finally:
        compilers_are_done = True
        tell_of(0)


class OnCpu(DeviceFused):
    """A fused operator whose GPU is the CPU."""

    def __new__(
        cls, program: Program, fallback: Any = None, approximate: bool = False, home: int = 0
    ) -> OnCpu:
        self = CudaFused.__new__(cls, as_lists(program), fallback, approximate, home, 0)
        self.program, self.approximate, self.home = program, approximate, home
        return self

    def _encoded(self, arguments: Sequence[Any]) -> tuple[int, Encoded]:
        return 0, encode(self.program, arguments, BIG)


def launched(arguments: Any, results: Any) -> None:
    """Run what the driver has kept."""
    image, each = bytes(PARAMETER), KEPT[1] % 1000
    length = HEADER_BYTES + int.from_bytes(image[4:8], "little")
    assert KEPT_SIZE.value in (length, 4096), "what the program needs, or all"
    run_image(image[:length], each, KEPT[4], arguments, results)


def check(program: Program, *arguments: Any) -> None:
    """The third call, which finds its image."""
    fused, before = OnCpu(program), KEPT[0]
    for _ in range(3):
        found = fused(*arguments)
    assert (KEPT[0], fused.kept()) == (before + 3, 1)
    results = found if isinstance(found, tuple) else (found,)
    launched(arguments, results)
    assert all(type(one) is torch.Tensor for one in results)
    wanted = reference.run(program, arguments)
    require_results(program, results, wanted, arguments, arguments)


def negated() -> Program:
    return Program(1, (tensor(F32, 0),), (load(0, F32), compute("neg", F32, 0)), (output(1, 0),))


def positions() -> Program:
    """Of no tensor: 3 · k for as many as a call says."""
    nodes = (
        Node(NodeKind.IOTA, DType.I64, aux=0),
        Node(NodeKind.CONSTANT, DType.I64, number=3),
        compute("mul", DType.I64, 0, 1),
    )
    return Program(1, (Input(InputKind.INT, DType.I64, (0,)),), nodes, (output(2, 0),))


def placed() -> Program:
    """Into a new result of a size that a call says, where it says."""
    inputs = tensor(F32, 0), *[Input(InputKind.INT, DType.I64)] * 2
    out = Output(1, (0,), (0,), along=0, total=1, offset=2)
    return Program(1, inputs, negated().nodes, (out,))


def test_calls_compute() -> None:
    check(negated(), values(F32, 100))
    check(positions(), 100)
    check(negated(), values(F32, 103)[3:])
    check(softmax(F32), values(F32, 5, 700))
    check(layer_norm(F16), values(F16, 7, 300), *[values(F16, 300)] * 2)
    inputs = tensor(F32, 0, 1), Input(InputKind.FLOAT, F32)
    nodes = (load(0, F32), Node(NodeKind.SCALAR, F32, aux=1), compute("mul", F32, 0, 1))
    check(Program(2, inputs, nodes, (output(2, 0, 1), output(2, 1, 0))), values(F32, 9, 40), 2.5)
    check(placed(), values(F32, 100), 200, 4)
    halves = [Output(2, (0, 1), (0, 1), k - 1, 1, k, 2) for k in range(2)]
    check(Program(2, inputs, nodes, tuple(halves)), values(F32, 9, 40).t(), 0.5)


def call_as_made(fused: OnCpu, arguments: list[Any]) -> None:
    """A call's launch is that of an image that is made anew."""
    found = fused(*arguments)
    results = iter(found if isinstance(found, tuple) else (found,))
    _, image, patches, each, launch, *_ = fused.encode(MACHINE, *arguments)
    packed = bytearray(bytes(PARAMETER)[: len(image)])
    assert (KEPT[1] % 1000, *KEPT[2:5]) == (each, *launch)
    packed[COUNTER_AT : COUNTER_AT + 8] = image[COUNTER_AT : COUNTER_AT + 8]
    addresses = [one.data_ptr() if isinstance(one, torch.Tensor) else 0 for one in arguments]
    outputs = fused.program.outputs
    addresses += [next(results).data_ptr() if one.allocated else 0 for one in outputs]
    for at, argument, offset in struct.iter_unpack("<IIq", patches):
        (address,) = struct.unpack_from("<Q", packed, at)
        assert address == (addresses[argument] + offset) % (1 << 64)
        packed[at : at + 8] = image[at : at + 8]
    assert bytes(packed) == image


def test_kept_images_are_what_is_made_anew() -> None:
    """Of drawn programs, whose memory is not touched, at the places and sizes that they draw."""
    count = 0
    for seed in range(300):
        program, arguments = Drawer(seed, TAME).draw()
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        if any(one.numel() > 1 << 20 for one in tensors):
            continue
        fused = OnCpu(program)
        try:
            made = fused.encode(MACHINE, *arguments)
        except vm.NotEncodable:
            continue
        if made is None or not made[1] or made[6]:  # sums take two launches
            continue
        for _ in range(4):
            call_as_made(fused, arguments)
        assert fused.kept() == 1
        count += 1
    assert count > 60


def test_an_image_is_kept_for_each_of_the_last_kinds_of_arguments() -> None:
    """Which differ in a size, a stride, a place, a number, or in how a number is given."""
    inputs = tensor(F32, 0, 1), Input(InputKind.FLOAT, F32)
    nodes = (load(0, F32), Node(NodeKind.SCALAR, F32, aux=1), compute("mul", F32, 0, 1))
    program = Program(2, inputs, nodes, (output(2, 0, 1),))
    whole = values(F32, 4000)
    kinds = [
        (whole[:360].view(9, 40), 2.5),
        (whole[:360].view(9, 40), 2.25),
        (whole[:360].view(9, 40), 0.0),
        (whole[:360].view(9, 40), -0.0),
        (whole[:360].view(9, 40), 2),
        (whole[1:361].view(9, 40), 2.5),
        (whole[4:364].view(9, 40), 2.5),
        (whole[:360].view(40, 9).t(), 2.5),
        (whole[:450].view(9, 50)[:, :40], 2.5),
        (whole[:369].view(9, 41), 2.5),
    ]
    fused = OnCpu(program)
    for turn in range(4):
        for x, number in kinds if turn % 2 else reversed(kinds):
            for _ in range(3):
                made = fused(x, number)
            launched((x, number), (made,))
            torch.testing.assert_close(made, x * number, rtol=0, atol=0)
            assert 1 <= fused.kept() <= 8
    assert fused.kept() > 1


def test_shapes_that_come_once_are_not_kept() -> None:
    fused = OnCpu(negated())
    for n in range(1, 300):
        fused(values(F32, n))
    assert fused.kept() == 0


def test_sums_across_rows_take_a_second_launch() -> None:
    """The first has the memory of parts behind all results; the second adds them up there."""
    x, w = values(F16, 3000, 256), values(F32, 3000)
    program, before = beside_rows(F16), KEPT[0]
    image = encode(program, [x, w], BIG).image
    assert image is not None and image.parts is not None
    for _ in range(2):
        results = OnCpu(program)(x, w)
        assert len(results) == 3 and [one.shape for one in results[1:]] == [(256,)] * 2
        second = bytes(PARAMETER)[: KEPT_SIZE.value]
        parts = int.from_bytes(second[:8], "little")
        addresses = [one.data_ptr() for one in (x, w, *results)]
        assert second == image.parts.pack(parts, addresses)
        first = image.pack([*addresses, parts])
        assert bytes(PARAMETER_BEFORE)[: len(first)] == first
        assert KEPT[1] % 1000 == SUMS and (KEPT[2], KEPT[3], KEPT[4]) == (64, 512, 0)
    assert KEPT[0] == before + 4 and asked.count((0, SUMS, 0)) == 1


def test_launches_from_python() -> None:
    """What adds up parts has a short parameter, and no counter in it."""
    x, w = values(F16, 3000, 256), values(F32, 3000)
    image = encode(beside_rows(F16), [x, w], BIG).image
    assert image is not None and image.parts is not None
    short = image.parts.pack(64, [8 * k for k in range(5)])
    assert len(short) < COUNTER_AT + 8
    vm.cuda_launch(1000 + SUMS, 4, 1024, 0, 0, short, b"", (), 0, 0)
    assert bytes(PARAMETER)[: KEPT_SIZE.value] == short
    for given, counters in ((short, 3), (bytes(4097), 0), (b"", 0)):
        try:
            vm.cuda_launch(1000 + SUMS, 4, 1024, 0, 0, given, b"", (), 0, counters)
        except ValueError as error:
            assert "another length" in str(error)
        else:
            raise AssertionError("a parameter without room for a counter, or of more than 4 KB")


def test_gpus_and_kernels_are_asked_for_once() -> None:
    fused, x = OnCpu(negated()), values(F32, 100)
    fused(x)
    before = list(asked)
    fused(x)
    assert asked == before and asked.count((0, 0, 0)) == 1 and (0, 8, 0) in asked
    assert KEPT[1] == 1008 and (KEPT[2], KEPT[3], KEPT[5]) == (1, 64, 0)
    OnCpu(negated(), approximate=True)(x)
    assert asked[-1] == (0, 8, 1) and KEPT[1] == 2008


def test_counters_are_drawn_where_there_are_more_tiles_than_blocks() -> None:
    fused = OnCpu(negated())
    fused(torch.zeros(4_000_000))
    assert KEPT[2] == 132
    assert (
        int.from_bytes(bytes(PARAMETER[COUNTER_AT : COUNTER_AT + 8]), "little")
        == COUNTERS.data_ptr()
    )
    fused(torch.zeros(1000))
    assert bytes(PARAMETER[COUNTER_AT : COUNTER_AT + 8]) == bytes(8)


def test_the_context_is_the_kernels_and_the_one_before_comes_back() -> None:
    fused, x = OnCpu(negated()), values(F32, 100)
    DRIVER.cuCtxSetCurrent(ctypes.c_void_p(0x2222))
    changes = KEPT[7]
    fused(x)
    assert KEPT[6] == 0x1000 and KEPT[7] == changes + 2
    now = ctypes.c_void_p()
    DRIVER.cuCtxGetCurrent(ctypes.byref(now))
    assert now.value == 0x2222
    DRIVER.cuCtxSetCurrent(ctypes.c_void_p(0x1000))
    changes = KEPT[7]
    fused(x)
    assert KEPT[6] == 0x1000 and KEPT[7] == changes


def test_what_cpp_leaves_goes_to_python() -> None:
    class Watched(OnCpu):
        """The reference as the test sees it."""

        def by_reference(self, *arguments: Any) -> Any:
            return arguments

    number = Node(NodeKind.CONSTANT, DType.I32, number=3e9)
    nodes = (load(0, DType.I32), number, compute("add", DType.I32, 0, 1))
    program = Program(1, (tensor(DType.I32, 0),), nodes, (output(2, 0),))
    x, before = torch.zeros(4, dtype=torch.int32), KEPT[0]
    assert Watched(program)(x) == (x,) and KEPT[0] == before
    assert Watched(negated())(x, x) == (x, x), "of another number"
    found = Watched(negated())(x.float())
    assert isinstance(found, torch.Tensor) and KEPT[0] == before + 1


def test_nothing_to_compute_launches_nothing() -> None:
    before = KEPT[0]
    found = OnCpu(negated())(torch.zeros(0))
    assert found.shape == (0,) and KEPT[0] == before


def test_errors_keep_their_types() -> None:
    raised(vm.NotEncodable, "no tensor to say", lambda: OnCpu(positions(), home=-1)(5))
    fused, x = OnCpu(negated()), values(F32, 100)
    REFUSAL.value = 719
    raised(DeviceError, "unspecified launch failure", lambda: fused(x))
    REFUSAL.value = 0
    fused(x)
    # Where a first request fails torch is asked again, for its own words.
    much = x, 1 << 50, 4
    whole = OnCpu(placed())
    raised(RuntimeError, "memory", lambda: whole(*much))

    class Full(RuntimeError):
        """As of a GPU without memory."""

    def full(*given: Any) -> Any:
        raise Full(str(given))

    vm.cuda_hooks(kernel, full)
    raised(Full, f"({1 << 50},)", lambda: whole(*much))
    found = torch.zeros(200)
    vm.cuda_hooks(kernel, lambda *given: found)
    assert whole(*much) is found
    launched([x], [found])
    assert torch.equal(found[4:104], -x) and not found[:4].any() and not found[104:].any()
    vm.cuda_hooks(kernel, _allocate)


def raised(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as found:
        assert text in str(found), found
        return
    raise AssertionError(f"no {kind.__name__}")


def test_calls_run_by_their_fallback_until_kernels_are_there() -> None:
    x, program, calls = values(F32, 100), negated(), list[Any]()

    def fallback(*given: Any) -> Any:
        calls.append(given)
        return torch.zeros(100)

    before = KEPT[0]
    with being_compiled():
        fused = OnCpu(program, fallback)
        assert fused(x).sum() == 0 and fused(x).sum() == 0
        assert calls == [(x,), (x,)] and KEPT[0] == before and asked[-2:] == [(0, 8, 0)] * 2
        OnCpu(program)(x)
        assert KEPT[0] == before + 1, "what has no fallback waits"
    check(program, x)
    found = fused(x)
    launched([x], [found])
    assert torch.equal(found, -x) and len(calls) == 2


def test_kernels_of_an_image_and_of_its_sums_are_asked_for_at_once() -> None:
    given, calls, first = [values(F16, 3000, 256), values(F32, 3000)], list[Any](), len(asked)
    with being_compiled():
        OnCpu(beside_rows(F16), lambda *given: calls.append(given))(*given)
    (_, each, _), sums = asked[first:]
    assert len(calls) == 1 and each >= 8 and sums == (0, SUMS, 0)


def test_a_module_is_loaded_whatever_is_captured_meanwhile() -> None:
    mode = ctypes.c_int.in_dll(DRIVER, "capture_mode")
    vm.cuda_load(0, bytes([1]) * 8, "interpret_8", MACHINE[1], True)
    assert ctypes.c_int.in_dll(DRIVER, "mode_of_load").value == 2 and mode.value == 0


def test_new_shapes_leave_nothing_behind() -> None:
    fused, whole = OnCpu(softmax()), torch.zeros(1 << 17)

    def call_all(rows: int) -> None:
        for cols in range(1, 251):
            fused(whole[: rows * cols].view(rows, cols))

    call_all(1)
    call_all(200)
    gc.collect()
    objects, references = len(gc.get_objects()), sys.getrefcount(whole)
    resident, alive = memory(), KEPT[0]
    for rows in range(2, 42):
        call_all(rows)
    gc.collect()
    assert KEPT[0] == alive + 10_000
    assert len(gc.get_objects()) - objects < 50 and sys.getrefcount(whole) == references
    assert memory() - resident < 1 << 20


def test_calls_are_shown() -> None:
    fused, x = OnCpu(softmax(F32)), values(F32, 5, 700)
    with observed() as seen:
        fused(x)
    assert [(one[0], one[1] is x) for one in seen] == [(fused, True)]
    text = text_of(fused, [x])
    assert "kernel mj_dvm_norms_" in text and "row.f.sum" in text and "d0 = 5" in text
    assert "nothing to compute" in text_of(fused, [x[:0]])
    assert "runs operator by operator: a tensor of another dtype" in text_of(fused, [x.double()])
    assert "neg" in disassemble(OnCpu(negated()), values(F32, 100))


def test_spans_of_a_launch_are_told_while_it_is_timed() -> None:
    fused, x = OnCpu(negated()), values(F32, 100)
    fused(x)
    assert vm.cuda_spans() == []
    vm.timing(True)
    fused(x)
    (encoding,) = vm.timing(False)
    ((taking, encoded, *rest),) = vm.cuda_spans()
    assert encoded == encoding > 0 and len(rest) == 3
    assert min(taking, *rest) >= 0 and vm.cuda_spans() == []


def test_launches_may_begin_early_where_the_driver_lets_them() -> None:
    x, before = values(F32, 100), OVERLAPPED.value
    check(negated(), x)
    assert OVERLAPPED.value == before + 3
    REFUSES_OVERLAP.value = 1
    check(negated(), x)
    REFUSES_OVERLAP.value = 0
    check(negated(), x)  # it is not asked again
    assert OVERLAPPED.value == before + 3
    assert KEPT_SIZE.value < 4096, "parts of parameters are not what it has refused"


def test_parameters_are_as_long_as_programs_where_the_driver_takes_that() -> None:
    """The last one: what a driver refuses once is not tried again."""
    fused, x = OnCpu(negated()), values(F32, 100)
    fused(x)
    needed = KEPT_SIZE.value
    assert HEADER_BYTES < needed < 1000
    REFUSES_PARTS.value = 1
    for _ in range(2):
        check(negated(), x)
        assert KEPT_SIZE.value == 4096 and not any(PARAMETER[needed:])
        REFUSES_PARTS.value = 0


def run_all(tests: dict[str, Any]) -> None:
    """Those functions that are tests."""
    vm.cuda_hooks(kernel, _allocate)
    for name, test in tests.items():
        if name.startswith("test_"):
            begin = time.perf_counter()
            test()
            print(name, f"{time.perf_counter() - begin:.2f} s")


if __name__ == "__main__":
    run_all(dict(globals()))
