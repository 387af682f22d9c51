"""Sums of channels: what kernels are told, and where there are none."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from magjit_dvm.cuda import channel_sums
from magjit_dvm.cuda.channel_code import CHANNELS, COLUMNS, LOADED, MOST_BLOCKS, THREADS
from magjit_dvm.cuda.channel_sums import Gradients, Moments
from magjit_dvm.cuda.plan import Machine
from magjit_dvm.instructions import DTYPES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

MACHINE = Machine(multiprocessors=132)
Launch = tuple[int, int, int, bytes]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What is launched: handle, blocks, threads, parameter; handles are 10 and the form."""
    found: list[Launch] = []

    def pair(plan: Any, given: Any, ending: Any, numbers: bytes, shapes: Any) -> Any:
        _, first, second, blocks, end_blocks, threads, count, sizes, end_sizes = plan
        made = [torch.empty(size, dtype=DTYPES[code].torch) for code, *size in shapes]
        parts = torch.empty(count)

        def addresses(tensors: Any) -> list[int]:
            tensors = (made[one] if isinstance(one, int) else one for one in tensors)
            return [0 if one is None else one.data_ptr() for one in tensors]

        words = struct.pack("<5Q", *addresses(given), parts.data_ptr()) + sizes
        end = struct.pack("<14Q", parts.data_ptr(), *addresses(ending)) + end_sizes + numbers
        found.extend([(first, blocks, threads, words), (second, end_blocks, threads, end)])
        return tuple(made)

    def function(each: int, approximate: bool, form: int, *, waits: bool) -> int:
        assert each == CHANNELS and not approximate and not waits
        return 10 + form

    one = SimpleNamespace(index=0, machine=MACHINE, function=function)
    monkeypatch.setattr(channel_sums, "gpu", lambda index: one)
    monkeypatch.setattr(channel_sums, "cuda_pair", pair)
    return found


def images(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    return torch.randn(shape).to(dtype).contiguous(memory_format=order or torch.contiguous_format)


SHAPES = [
    (2, 64, 7, 9),
    (128, 256, 56, 56),
    (4, 1280, 7, 7),
    (1, 8, 1, 1),
    (5000, 520),
    (3, 2048, 5),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 16, 5, 6, 7)])
def test_what_kernels_are_told(
    launches: list[Launch], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = images(*shape, dtype=dtype)
    if len(shape) == 3:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    channels, count = shape[1], x.numel() // shape[1]
    weight, bias, *running = (torch.rand(channels) for _ in range(4))
    found = Moments()(x, weight, bias.half(), tuple(running), tuple(running), 0.1, 1e-5)
    assert found is not None
    assert [tuple(one.shape) for one in found[:2]] == [(channels,)] * 2
    assert all(one.shape == (1, channels, *[1] * (len(shape) - 2)) for one in found[2:])
    (handle, blocks, threads, words), (ending, columns, _, end) = launches
    assert (handle, ending, threads) == (10, 11, THREADS) and columns * COLUMNS >= channels
    assert len(words) == 64 and len(end) == 152, "as the kernels have them"
    at, *unused, parts = struct.unpack("<5Q", words[:40])
    assert at == x.data_ptr() and not any(unused)
    rows, cols, groups, step, across, what = struct.unpack("<6I", words[40:])
    assert (rows, cols, what) == (count, channels, channel_sums._WHAT[dtype])
    of_group = 16 // x.itemsize
    assert groups * across * of_group >= channels > groups * (across - 1) * of_group
    assert groups * step <= THREADS and blocks % across == 0
    assert 1 <= blocks // across <= MOST_BLOCKS
    many = blocks >= 2 * MACHINE.multiprocessors
    assert many or blocks // across * step * LOADED[0] >= count, "all multiprocessors have work"
    addresses = struct.unpack("<14Q", end[:112])
    given = [parts, *(one.data_ptr() for one in (weight,)), addresses[2], *[0] * 11]
    assert addresses[:2] == tuple(given[:2]) and addresses[9] == 0
    assert addresses[3:5] == addresses[10:12] == tuple(one.data_ptr() for one in running)
    made = (found[0], found[1], found[2], found[3])
    assert addresses[5:9] == tuple(one.data_ptr() for one in made)
    count_, channels_, of_column, step_, whats, full, rest = struct.unpack("<7I", end[112:140])
    assert (count_, channels_, of_column, step_) == (count, channels, blocks // across, step)
    assert whats == 1 << 8 and full * of_column * step + rest == count
    assert struct.unpack("<2f", end[140:148]) == pytest.approx((0.1, 1e-5))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_kernels_of_gradients_are_told(
    launches: list[Launch], dtype: torch.dtype, masked: bool
) -> None:
    dy, y, x = (images(8, 96, 20, 20, dtype=dtype) for _ in range(3))
    weight, mean, root = (torch.rand(96) for _ in range(3))
    found = Gradients()(dy, y if masked else None, x, weight.half(), mean, root)
    assert found is not None
    of_weight, of_bias, scale, slope, shift = found
    assert of_weight.dtype == of_bias.dtype == torch.float16
    assert of_weight.untyped_storage().nbytes() == 96 * 2, "autograd copies a part of a tensor"
    (handle, _, _, words), (ending, _, _, end) = launches
    assert (handle, ending) == (12, 13) and len(words) == 64 and len(end) == 152
    addresses = [x.data_ptr(), dy.data_ptr(), y.data_ptr() if masked else 0, mean.data_ptr()]
    assert list(struct.unpack("<4Q", words[:32])) == addresses
    about = 0 if dtype is torch.float32 else mean.data_ptr()
    ends = list(struct.unpack("<14Q", end[:112]))
    assert ends[5:10] == [about, *(one.data_ptr() for one in (root, scale, shift, slope))]
    assert ends[10:] == [0, 0, of_weight.data_ptr(), of_bias.data_ptr()]
    assert struct.unpack("<I", end[128:132])[0] == channel_sums._WHAT[torch.float16]


def test_sizes_are_remembered_and_kernels_that_come_are_found(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, sums = channel_sums.gpu(0), Moments()
    function, asked = one.function, list[int]()

    def counting(*given: Any, waits: bool) -> int:
        asked.append(given[-1])
        return 0 if len(asked) <= 2 else function(*given, waits=waits)

    monkeypatch.setattr(one, "function", counting)
    none = None, None
    for k, expected in enumerate([False, True, True, True]):
        found = sums(images(2, 32, 4, 4 + k // 3), None, None, none, none, 0.1, 1e-5)
        assert (found is not None) is expected
    assert asked == [0, 1] * 3, "while compilers are at work, and for new sizes"
    for size in range(channel_sums._MOST_KNOWN + 5):
        sums(images(1, 8, 1, size + 1), None, None, none, none, 0.1, 1e-5)
    assert len(sums._known) <= channel_sums._MOST_KNOWN


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(
    "other",
    [torch.rand(64)[::2], torch.rand(1).expand(32), torch.rand(32).double()],
    ids=["gaps", "expanded", "another dtype"],
)
def test_numbers_of_channels_that_lie_otherwise(
    launches: list[Launch], other: torch.Tensor, which: int
) -> None:
    """Kernels read one after another."""
    x, numbers = images(2, 32, 4, 5), [torch.rand(32) for _ in range(4)]
    numbers[which] = other
    weight, bias, *running = numbers
    blank = torch.rand(32), torch.rand(32)
    assert Moments()(x, weight, bias, (running[0], running[1]), blank, 0.1, 1e-5) is None
    assert Moments()(x, weight, bias, blank, (running[0], running[1]), 0.1, 1e-5) is None
    if which < 3:
        assert Gradients()(x, None, x, *numbers[:3]) is None
    assert not launches


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 64, 7, 9).half(),
        images(2, 60, 7, 9),
        images(2, 64, 7, 9)[:, :, ::2],
        images(2, 72, 7, 9)[:, :64],
        torch.empty(2 * 64 * 9 + 1).half()[1:].view(2, 3, 3, 64).permute(0, 3, 1, 2),
    ],
    ids=["another order", "of no 16 bytes", "gaps", "beside others", "unaligned"],
)
def test_what_lies_otherwise_has_no_kernels(launches: list[Launch], x: torch.Tensor) -> None:
    none = None, None
    assert Moments()(x, None, None, none, none, 0.1, 1e-5) is None
    stats = torch.rand(2, x.shape[1]).unbind()
    assert Gradients()(x, None, x, None, *stats) is None
    like = images(*x.shape)
    if x.shape[1] % 8 == 0:
        assert Gradients()(x, None, like, None, *stats) is None
        assert Gradients()(like, x, like, None, *stats) is None
        assert Gradients()(like, like, like, None, *stats) is not None
    assert Gradients()(like.float(), None, like, None, *stats) is None
