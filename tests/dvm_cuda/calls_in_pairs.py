"""Pairs of launches, the second of what the first leaves, with a driver that keeps launches.

Run as a program with the path of the driver, as ``with_driver.py``.
"""

from __future__ import annotations

import struct
import sys

import torch

from magjit_dvm import vm
from magjit_dvm.cuda.parts import SUMS
from magjit_dvm.instructions import DType
from magjit_dvm.vm import DeviceError
from tests.dvm_cuda.test_encoder import values
from tests.dvm_cuda.with_driver import (
    KEPT,
    KEPT_SIZE,
    PARAMETER,
    PARAMETER_BEFORE,
    REFUSAL,
    raised,
    run_all,
    tell_of,
)

F32, F16 = DType.F32, DType.F16


def test_pairs_of_launches() -> None:
    """What the first leaves is where the second looks for it, and gone afterwards."""
    x, w = values(F16, 8, 64), values(F32, 64)
    tell_of(0)
    plan = 0, 1000 + SUMS, 2000 + SUMS, 7, 3, 96, 1 << 20, b"12345678", b"abcd"
    shapes = (DType.F32.code, 64), (DType.F16.code, 1, 64, 1)
    before = KEPT[0]
    for _ in range(2):
        made = vm.cuda_pair(plan, (x, None, w), (w, 1, None, 0), b"efgh", shapes)
        assert made is not None
        assert [(one.dtype, tuple(one.shape)) for one in made] == [
            *((torch.float32, (64,)), (torch.float16, (1, 64, 1)))
        ]
        assert (KEPT[1], KEPT[2], KEPT[3], KEPT[4]) == (2000 + SUMS, 3, 96, 0)
        first = struct.pack("<3Q", x.data_ptr(), 0, w.data_ptr())
        one, two = bytes(PARAMETER_BEFORE), bytes(PARAMETER)
        assert one[:24] == first and one[32:40] == b"12345678"
        parts = one[24:32]
        addresses = struct.pack("<4Q", w.data_ptr(), made[1].data_ptr(), 0, made[0].data_ptr())
        assert two[: KEPT_SIZE.value] == parts + addresses + b"abcdefgh"
    assert KEPT[0] == before + 4
    references = sys.getrefcount(x)
    for _ in range(100):
        vm.cuda_pair(plan, (x, None, w), (w, 1, None, 0), b"efgh", shapes)
    assert sys.getrefcount(x) == references


def test_pairs_of_launches_that_are_none() -> None:
    """Tensors of other kinds are left to whoever calls; what is wrong is an error."""
    x = values(F32, 64)
    plan = 0, 1000 + SUMS, 2000 + SUMS, 7, 3, 96, 16, b"", b""
    before = KEPT[0]
    kind = type("Kind", (torch.Tensor,), {})
    other = x.as_subclass(kind)
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    for one in (other, negative):
        assert vm.cuda_pair(plan, (one,), (), b"", ()) is None
        assert vm.cuda_pair(plan, (x,), (x, one), b"", ()) is None
    shape = ((DType.F32.code, 4),)
    raised(ValueError, "no number", lambda: vm.cuda_pair(plan, (x,), (1,), b"", shape))
    raised(ValueError, "no number", lambda: vm.cuda_pair((99, *plan[1:]), (x,), (), b"", ()))
    raised(ValueError, "no number", lambda: vm.cuda_pair(plan, (x,), (), b"", ((99, 4),)))
    raised(ValueError, "too long", lambda: vm.cuda_pair(plan, (x,), (), bytes(5000), ()))
    for given in ((plan, x, (), b"", ()), (plan, (x,), (), "", ()), (plan, (x,), (), b"", ((),))):
        raised(TypeError, "", lambda given=given: vm.cuda_pair(*given))
    assert KEPT[0] == before
    REFUSAL.value = 719
    try:
        raised(DeviceError, "launch failure", lambda: vm.cuda_pair(plan, (x,), (), b"", shape))
    finally:
        REFUSAL.value = 0


if __name__ == "__main__":
    run_all(dict(globals()))
