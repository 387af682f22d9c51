"""What the producer copies into a stage: the kernel's own lines, compiled for the CPU.

Bulk copies are ``memcpy`` here, lanes run one after another, and barriers count.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from magjit_dvm.cuda.encode import encode
from magjit_dvm.cuda.forms import FLAT, form_of
from magjit_dvm.cuda.interpreter import _KNOWN
from magjit_dvm.cuda.shell import SHELL
from magjit_dvm.cuda.words import Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm_cuda.checking import BIG, addresses
from tests.dvm_cuda.test_backwards import Gradient
from tests.dvm_cuda.test_broadcasts import binary
from tests.dvm_cuda.test_columns import TWO, given, normed, sums
from tests.dvm_cuda.test_encoder import softmax, values
from tests.dvm_cuda.test_several_rows import many

F32, F16, I64 = DType.F32, DType.F16, DType.I64
COMPILER = shutil.which("g++") or shutil.which("c++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

_BODIES = {
    "barrier_expect": "expected += bytes;",
    "barrier_arrive": "arrivals++;",
    "bulk_copy": "copy(to, from, bytes);",
    "wait_for_launch": "waited++;",
    "kept": "return value;",
    "quotient": "return a / b;",
}
"""Of functions that are PTX; of all others nobody asks."""
_BEFORE = """
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __syncwarp()
static unsigned char *memory;
static unsigned long long room, expected, copied, arrivals, waited, wrong;
static void copy(unsigned to, unsigned long long from, unsigned bytes)
{
    wrong += to % 16 || from % 16 || bytes % 16 || !bytes || to + bytes > room;
    if (!wrong) {
        memcpy(memory + to, (const void *)from, bytes);
    }
    copied += bytes;
}
"""
_BEHIND = """
extern "C" int feed_stage(const void *image, unsigned char *to, u32 bytes, u64 e, u32 count, u32 t,
                          u32 rows)
{
    memory = to;
    room = bytes;
    expected = copied = arrivals = waited = wrong = 0;
    for (u32 lane = 0; lane < 32; lane++) {
        feed(((const Image *)image)->h, 0, 0, e, count, t, lane, true, rows);
    }
    bool counted = __CUDA_ARCH__ < 900 || (expected == copied && waited == rows);
    return wrong || !counted || arrivals != 1;
}
"""


@cache
def _feed(form: int, arch: int) -> Callable[..., int]:
    """``feed`` of a form's kernel."""
    text = SHELL
    for one in re.finditer(r"^DEV \w+ (\w+)\([^{]*\n\{\n(.*?)^\}", SHELL, re.M | re.S):
        if "asm" in one[2] and one[1] != "feed":
            body = _BODIES.get(one[1], "" if one[0].startswith("DEV void") else "return {};")
            text = text.replace(one[0], one[0].replace(one[2], f"    {body}\n"))
    asynchronous = r'asm volatile\("cp.async.cg.*?"memory"\);'
    text = re.sub(asynchronous, "copy(to + 16 * k, one.from + 16 * (u64)k, 16);", text, flags=re.S)
    text = re.sub(r'asm volatile\("cp.async.mbarrier.*?"memory"\);', "", text, flags=re.S)
    defined = [f"#define {name}" for name in (*_KNOWN[form], f"__CUDA_ARCH__ {arch}")]
    with TemporaryDirectory() as folder:
        path, made = Path(folder, "feed.cpp"), Path(folder, "feed.so")
        path.write_text("\n".join([*defined, _BEFORE, text, _BEHIND]))
        assert COMPILER is not None
        command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
        subprocess.run([*command, str(path), "-o", str(made)], check=True)
        function: Callable[..., int] = ctypes.CDLL(str(made)).feed_stage
        return function


def check_feeding(program: Program, arguments: Sequence[Any]) -> Image:
    """Some tiles' stages have what the tensors have, on every generation of GPUs."""
    image = encode(program, arguments, BIG).image
    assert image is not None
    filled = torch.zeros(8, dtype=torch.int64)  # results, which are only written
    whole = [*arguments, *[filled] * (2 * len(program.outputs) + 1)]
    packed = image.pack(addresses(whole))
    for arch in (800, 900):
        feed = _feed(form_of(image), arch)
        for tile in {0, 1, 2, 3, image.tiles // 2, image.tiles - 2, image.tiles - 1}:
            if 0 <= tile < image.tiles:
                for chunk in range(image.chunks):
                    _check_stage(feed, image, packed, whole, tile, chunk)
    return image


def _check_stage(
    feed: Callable[..., int], image: Image, packed: bytes, whole: Any, tile: int, chunk: int
) -> None:
    rows, width = image.rows_of_tile, image.warps * image.slice
    if image.by_rows:
        width = image.group * image.slice
    there = min(rows, image.rows - tile * rows)
    first, count, copies = tile * width, width, 1
    if image.by_rows and image.chunks > 1:
        first, copies = tile * rows * image.cols + chunk * width, there
        count = min(width, image.cols - chunk * width)
    elif image.by_rows:
        first, count = tile * rows * image.cols, there * image.cols
    count = min(count, image.elements - first)
    stage = (ctypes.c_ubyte * max(image.stage_bytes, 16))()
    ctypes.memset(stage, 0xA5, image.stage_bytes)
    into = ctypes.c_uint32(image.stage_bytes)
    where = ctypes.c_uint64(first), ctypes.c_uint32(count), ctypes.c_uint32(tile)
    assert feed(packed, stage, into, *where, ctypes.c_uint32(copies)) == 0
    staged = torch.frombuffer(stage, dtype=torch.uint8)
    tiles = len(image.inputs) - image.row_inputs
    for number, (argument, size, at) in enumerate(image.inputs):
        memory, low = _bytes(whole[argument], size), whole[argument].data_ptr()
        for row in range(copies):
            if number < tiles:
                elements = torch.arange(first + row * image.cols, first + row * image.cols + count)
                begins = low + (first + row * image.cols) * size
            else:
                elements = torch.arange(tile * rows, tile * rows + there)
                elements %= image.periods[number - tiles] or image.rows
                begins = low + tile * rows * size
            at_row = at + row * image.row_bytes + begins % 16
            found = staged[at_row : at_row + len(elements) * size].view(-1, size)
            assert torch.equal(found, memory[elements]), f"tile {tile}, input {number}"


def _bytes(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Of the elements of a tensor that is contiguous, in the order of the space."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8).view(-1, size)


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_lines(offset: int) -> None:
    for dtype in (F32, F16):
        x, y = (values(dtype, 300_001 + first)[first:] for first in (offset, 1))
        assert form_of(check_feeding(binary(dtype, ((0,), (0,)), 1), [x, y])) == FLAT


@pytest.mark.parametrize("cols", [49, 130, 784, 4096, 20_001])
def test_rows(cols: int) -> None:
    rows = many(cols, BIG.multiprocessors) if cols < 480 else 700
    check_feeding(softmax(F16), [values(F16, rows * cols + 3)[3:].view(rows, cols)])


@pytest.mark.parametrize("number", [F32, I64], ids=lambda one: one.text)
@pytest.mark.parametrize("channels", [32, 36, 100, 152, 1024])
def test_numbers_that_come_again(number: DType, channels: int) -> None:
    """In pieces: where a tile has more rows than there are channels, one for each time."""
    for cols in (49, 130, 600, 2100, 30_000):
        rows = many(cols, BIG.multiprocessors) if cols < 480 else 400 if cols < 4000 else 100
        program = sums(number)
        image = check_feeding(program, given(program, rows // channels + 2, channels, cols))
        assert image.periods == [channels]


def test_several_numbers() -> None:
    program = normed(F16, *TWO, (F32, (0, 1)))
    image = check_feeding(program, given(program, 50, 36, 784))
    assert image.periods == [36, 36, 0]


def test_nothing() -> None:
    """What comes by addresses alone has stages that nothing is copied into."""
    x = values(F32, 64, 2, 1000)[:, 0]
    assert not check_feeding(binary(F32, ((0, 1), (1,)), 2), [x, x[0]]).inputs


def test_numbers_of_each_row() -> None:
    gradient = Gradient(F16, True, True, 300)
    check_feeding(gradient.program(), gradient.arguments(4000, 300))
