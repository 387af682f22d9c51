"""Programs that run each part of the kernel, for compute-sanitizer: `test_sanitizer.py` runs this.

Its argument is the tool.

Few blocks take many tiles, so that the ring goes round and tiles are drawn from the counter.

What the product does and a checker cannot know to be right is kept from it; each has its proof:

- Of contiguous tensors the kernel reads 16 bytes at a time, from the boundary below to the one
  above.  What is beyond a tensor shares 16 aligned bytes with an element of it, and memory comes in
  such pieces at least.  Arguments here end at such a boundary.
- Each lane reads a stage, then all meet (``__syncwarp``), then lane 0 says for all that the stage
  is free: racecheck does not follow reads through the meeting.  Kernels for checkers have each lane
  say so itself (``EMPTY_ARRIVALS`` in ``shell.py``), and nothing else of them is different.
- Loads are of whole slices: of a row's last one, they see what is behind the stage, which may be
  the next stage as it is written.  Elements that are not there are never stored, and reductions put
  their identity in their place (``where_absent``).  There is room between stages here.
- What its warps have added up across rows, a block reads from all of their scratch memory, and sets
  it to 0, between two barriers at which all warps that compute meet (``write_sums``): writes of any
  come before reads of any, and the other way round.  racecheck reports a few of these reads, of
  other warps each time and in some launches only, whose results are right; it is not given such
  programs.  The other tools are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from magjit_dvm import channel_sums
from magjit_dvm.cuda.channel_sums import Gradients, Moments
from magjit_dvm.cuda.encode import encode
from magjit_dvm.cuda.forms import STACKED
from magjit_dvm.cuda.launch import DeviceFused, gpu
from magjit_dvm.cuda.words import Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from magjit_dvm.vm import run_stacked
from tests.dvm.checking import compute, load, output, tensor
from tests.dvm_cuda import chained
from tests.dvm_cuda import test_batches as batches
from tests.dvm_cuda import test_chunks as chunks
from tests.dvm_cuda import test_columns as columns
from tests.dvm_cuda import test_draws as draws
from tests.dvm_cuda import test_encoder as words
from tests.dvm_cuda import test_online as online
from tests.dvm_cuda import test_repeats as repeats
from tests.dvm_cuda import test_row_words as row_words
from tests.dvm_cuda import test_several_rows as several
from tests.dvm_cuda import test_sums as sums
from tests.dvm_cuda import test_tables as tables
from tests.dvm_cuda import test_whole_numbers as whole
from tests.dvm_cuda.test_backwards import Gradient
from tests.dvm_cuda.test_broadcasts import binary
from tests.dvm_cuda.test_weights import scaled
from tests.dvm_gpu.test_gpu import chain, on_gpu, require_reference

F32, F16 = DType.F32, DType.F16


def ended(value: torch.Tensor) -> torch.Tensor:
    """The same on the GPU, in memory that ends with a multiple of 16 bytes."""
    storage = value.untyped_storage()
    storage.resize_(-(-storage.nbytes() // 16) * 16)
    moved: torch.Tensor = on_gpu(value)
    return moved


def apart(image: Image, most: int) -> None:
    """Room between stages, for what loads of whole slices see beyond a row's end."""
    room = 4 * image.slice + 128
    if image.shared_bytes + image.stages * room <= most:
        image.stage_bytes += room
        image.shared_bytes += image.stages * room


def looked_up() -> Iterator[tuple[Program, list[Any]]]:
    """Tables and what is drawn; counts and running sums of rows; quotients of whole numbers."""
    for width in (64, 100, 1030):
        yield tables.embedding(F16), [words.values(F16, 50, width), tables.positions(50, 7, 90)]
    yield tables.gather(), [words.values(F32, 90, 300), tables.positions(300, 90, 40)]
    scores = words.values(F16, 60, 400)
    yield tables.loss(), [scores, tables.positions(400, 60), scores]
    for shape in ((5, 64), (90, 257), (40, 2048)):
        yield draws.dropped(), draws.given(*shape)
        yield draws.dropped(normed=True), draws.given(*shape)
        x = words.values(F32, *shape)
        yield whole.running("cumsum", F32), [x]
        yield whole.running("cumsum", DType.BOOL), [x > 0]
        yield whole.counted(DType.BOOL), [x > 0, x]
    names = ("floor_div", "fmod", "remainder")
    nodes = load(0, F32), load(1, F32), *(compute(name, F32, 0, 1) for name in names)
    outputs = tuple(output(2 + k, 0) for k in range(len(names)))
    divided = Program(1, (tensor(F32, 0), tensor(F32, 0)), nodes, outputs)
    yield divided, [words.values(F32, 9001), words.values(F32, 9001).abs() + 0.5]


def cases(tool: str) -> Iterator[tuple[Program, list[Any]]]:
    """Programs and arguments: lines, rows of all lengths, views, what is kept and computed."""
    yield from looked_up()
    for channels, cols in ((32, 40), (36, 700)):  # numbers that come again within a tile
        yield columns.sums(F32), columns.given(columns.sums(F32), 90, channels, cols)
    for n in (1, 37, 4096, 60001):
        yield chain(2), [words.values(F32, n)]
        yield chain(2), [words.values(F32, n + 1)[1:]]
    for dtype in (F32, F16):
        for shape in ((3, 1), (5, 64), (33, 257), (90, 1024), (12, 5000), (40, 2048)):
            x, weight = words.values(dtype, *shape), words.values(dtype, shape[1])
            yield words.softmax(dtype), [x]
            yield row_words.quick_softmax(dtype), [x]
            yield words.layer_norm(dtype), [x, weight, weight]
            yield row_words.spread(dtype), [x]
            yield words.masked_rms_norm(dtype), [x, weight]
            yield scaled(dtype, "mul", "add"), [x, weight, weight]
            if 1 < shape[1] < 5000 and tool != "racecheck":
                yield sums.alone(dtype), [x]
                yield sums.beside_rows(dtype), [x, words.values(F32, shape[0])]
    for dtype, centered in ((F16, True), (F32, False)):
        gradient = Gradient(dtype, centered, True, 300)  # few blocks: warps of their own add up
        yield gradient.program(), gradient.arguments(1500, 300)
        gradient = gradient.with_sums()
        yield gradient.program(), gradient.arguments(1500, 300)
        if tool != "racecheck":
            yield gradient.program(), gradient.arguments(100, 300)
        for shape in ((700, 500), (13, 10_000 if dtype is F16 else 4800)):  # in one word
            gradient = Gradient(dtype, centered, True, shape[1])
            gradient = gradient.with_sums() if centered else gradient.with_sum()
            yield gradient.program(), gradient.arguments(*shape)
    for cols in (31, 49, 130, 301):  # of which a warp has several, some of them not there
        count = several.many(cols, 2)
        weight, whole = words.values(F16, cols), words.values(F16, count * cols + 3)
        yield words.layer_norm(F16), [whole[:-3].view(count, cols), weight, weight]
        yield words.softmax(F16), [whole[3:].view(count, cols)]
        yield words.softmax(F32), [words.values(F32, count, cols)]
        yield several.sums_and_scaled(), [words.values(F32, count, cols), words.values(F32, count)]
    for cols in (24_576, 50_001):  # in chunks, two rows a block and three
        yield row_words.quick_softmax(F16), [words.values(F16, 29, cols)]
        yield words.softmax(F32), [words.values(F32, 5, cols)]
        weight = words.values(F16, cols)
        yield words.layer_norm(F16), [words.values(F16, 18, cols), weight, weight]
        yield chunks.summed(F16), [words.values(F16, 19, cols)]
    for rows, cols in ((150, 700), (67, 1024), (90, 2100)):  # results of rows in batches
        x = words.values(F16, rows, cols)
        yield online.forward(), [x, tables.positions(cols, rows), x]
        numbers = words.values(F32, rows), words.values(F32, rows, seed=3)
        yield batches.distances(), [x, *numbers]
    for cols in (64, 512):  # rows that come again
        x = words.values(F16, 9, 40, cols)
        yield repeats.masked(), [x, words.values(DType.BOOL, 40, cols)]
        yield repeats.sums(F16, 1, 2), [x, words.values(F16, 40, cols)]
    added = Program(
        2,
        (tensor(F32, 0, 1), tensor(F32, 0, 1)),
        (load(0, F32), load(1, F32), compute("add", F32, 0, 1)),
        (output(2, 0, 1),),
    )
    for n in (256, 200):
        yield added, [words.values(F32, n, n), words.values(F32, n, n).t()]
        yield added, [words.values(F32, n, 2 * n)[:, ::2], words.values(F32, n, n)]
    across = words.values(F16, 512, 512).t()  # more warps than other programs have
    yield binary(F16, ((0, 1), (0, 1)), 2), [words.values(F16, 512, 512), across]


def main(tool: str) -> None:
    few = replace(gpu(0).machine, multiprocessors=2)
    for program, arguments in cases(tool):
        given = [ended(one) if isinstance(one, torch.Tensor) else one for one in arguments]
        encoded = encode(program, given, few)
        assert encoded.image is not None
        apart(encoded.image, few.shared_bytes)
        require_reference(program, DeviceFused(program)._run(encoded, given, 0), arguments)
    if tool != "racecheck":
        run_stack()
    run_chain()
    run_channels()
    print("done")


def run_stack() -> None:
    """Programs of fewer and more warps in one launch, as the product has them."""
    members = [
        (chain(2), [words.values(F32, 37)]),
        (words.softmax(F32), [words.values(F32, 5, 64)]),
        (words.softmax(F32), [words.values(F32, 90, 128)]),
        (sums.alone(F32), [words.values(F32, 300, 256)]),
    ]
    given: list[Any] = [[ended(one) for one in arguments] for _, arguments in members]
    programs = [program for program, _ in members]
    encoded = [encode(*one, gpu(0).machine).image for one in zip(programs, given, strict=True)]
    for each in {image.each for image in encoded if image is not None}:
        gpu(0).function(each, False, STACKED)
    fused = tuple(DeviceFused(program) for program in programs)
    results = list(run_stacked(fused, *(one for arguments in given for one in arguments)))
    for program, arguments in members:
        made = tuple(results.pop(0) for _ in program.outputs)
        require_reference(program, made[0] if len(made) == 1 else made, arguments)


def run_chain() -> None:
    """Programs that share a block, of fewer warps and more, beside one that has its own."""
    gpu(0).function(8, False, STACKED)
    x, y = ended(words.values(F32, 12, 300)), ended(words.values(F32, 400))
    programs = (chained.summed(), chained.by_rows(), chain(2), chained.summed())
    fused = tuple(DeviceFused(program) for program in programs)
    total, rows, other, last = run_stacked(fused, x, x, 0, y, 1)
    given = ([x], [x, total], [y], [rows])
    for program, made, arguments in zip(programs, (total, rows, other, last), given, strict=True):
        require_reference(program, made, [one.cpu() for one in arguments])


def run_channels() -> None:
    """Sums of channels, whose first launch has several batches of rows, and some left over."""
    for shape, dtype in (((40, 64, 30, 31), torch.float16), ((9, 72, 50, 50), torch.float32)):
        x, dy, y = (
            ended(torch.randn(shape).to(dtype)).contiguous(memory_format=torch.channels_last)
            for _ in range(3)
        )
        weight, bias, *running = (torch.rand(shape[1], device="cuda") for _ in range(4))
        old = tuple(running)
        made = Moments()(x, weight, bias, old, (torch.empty_like(weight), None), 0.1, 1e-5)
        assert made is not None
        wanted = channel_sums._moments(x, weight, bias, None, None, 0.1, 1e-5)
        torch.testing.assert_close(made[0], wanted[0], rtol=1e-4, atol=1e-5)
        for given in (None, y):
            found = Gradients()(dy, given, x, weight, *made[:2])
            assert found is not None
            wanted = channel_sums._gradients(dy, given, x, weight, *made[:2])
            torch.testing.assert_close(found[0], wanted[0], rtol=1e-3, atol=1e-2)


if __name__ == "__main__":
    main(sys.argv[1])
