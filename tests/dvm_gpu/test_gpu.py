"""Fused operators on a GPU: the kernel against the reference, and the backend against eager."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import magjit
from magjit.plugin.compiling import run_backend
from magjit.plugin.context import BackendContext
from magjit.plugin.inputs import InputDescriber
from magjit_dvm import backend, reference
from magjit_dvm.cuda.encode import Machine, encode
from magjit_dvm.cuda.launch import DeviceFused
from magjit_dvm.cuda.launch import _launch as launch_image
from magjit_dvm.cuda.words import Image, Word
from magjit_dvm.instructions import DType
from magjit_dvm.program import Input, InputKind, Output, Program
from magjit_dvm.vm import NotEncodable
from tests.dvm.checking import compute, load, output, require_results, tensor
from tests.dvm.random_graphs import Grower
from tests.dvm.test_fuzz import check_results
from tests.dvm_cuda import test_encoder as words
from tests.dvm_cuda import test_row_words as row_words
from tests.dvm_cuda.agreeing import memory
from tests.dvm_cuda.checking import BIG

pytestmark = pytest.mark.gpu

F32, F16, BF16, U8, BOOL = DType.F32, DType.F16, DType.BF16, DType.U8, DType.BOOL
SHAPES = ((1, 1), (3, 1), (4, 7), (5, 64), (2, 255), (33, 257), (700, 1024), (40, 5000))


def on_gpu(value: Any) -> Any:
    """The same on the GPU, of the same strides and the same place within 16 bytes."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return whole.cuda().as_strided(value.shape, value.stride(), value.storage_offset())


def check_gpu(program: Program, arguments: Any) -> None:
    """The kernel's results are the reference's."""
    require_reference(program, DeviceFused(program)(*map(on_gpu, arguments)), arguments)


def check_image(program: Program, arguments: Any, machine: Machine = BIG) -> Image | None:
    """The same, for tests that ask for the image which a simulator would run."""
    check_gpu(program, arguments)
    return encode(program, arguments, machine).image


def require_reference(program: Program, results: Any, arguments: Any) -> None:
    """What a call has given is what the reference gives."""
    wanted = reference.run(program, arguments)
    results = results if isinstance(results, tuple) else (results,)
    require_results(program, [one.cpu() for one in results], wanted, arguments, arguments)


@pytest.fixture(autouse=True)
def _run_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What checks words by simulation checks them on the GPU here."""
    for module in (words, row_words):
        monkeypatch.setattr(module, "check_words", lambda p, a, *machine: check_gpu(p, a))


@pytest.mark.parametrize(("name", "dtype"), list(words._instructions()))
def test_instructions(name: str, dtype: DType) -> None:
    words.test_instructions(name, dtype)


def test_casts() -> None:
    words.test_casts()


@pytest.mark.parametrize("dtype", [F32, F16, BF16, DType.I32, U8, BOOL], ids=lambda x: x.text)
def test_views(dtype: DType) -> None:
    words.test_views(dtype)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda x: x.text)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: tuple[int, int], dtype: DType) -> None:
    x, weight = words.values(dtype, *shape), words.values(dtype, shape[1])
    check_gpu(words.softmax(dtype), [x])
    check_gpu(words.layer_norm(dtype), [x, weight, weight])


NORM_ROWS = (
    *((3000, 512), (1999, 768), (2003, 1024), (1500, 1536), (1400, 2048), (800, 3072)),
    *((700, 4096), (701, 4095), (400, 8192), (300, 12288), (270, 16384), (150, 20001)),
)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda x: x.text)
@pytest.mark.parametrize("shape", NORM_ROWS)
def test_rows_of_all_widths(shape: tuple[int, int], dtype: DType) -> None:
    """Each R and number of warps a row, with more tiles than blocks; means far from 0."""
    x, weight = words.values(dtype, *shape), words.values(dtype, shape[1])
    check_gpu(words.softmax(dtype), [x])
    check_gpu(row_words.quick_softmax(dtype), [x])
    check_gpu(words.layer_norm(dtype), [x + 4, weight, weight])
    check_gpu(row_words.spread(dtype), [x + 4])
    check_gpu(words.masked_rms_norm(dtype), [x, weight])


def test_statistics_of_special_rows() -> None:
    for cols in (256, 768, 1024, 4096, 8192):
        row_words.check_special_rows(400, cols)
        for dtype in (F16, BF16):
            x = row_words.special_rows(dtype, 400, cols)
            check_gpu(row_words.quick_softmax(dtype), [x])
            check_gpu(
                row_words.quick_softmax(dtype), [x.flatten()[3 : 3 + 399 * cols].view(399, cols)]
            )


def test_norms_of_equal_elements_are_zero() -> None:
    for cols in (768, 1024, 5000, 8192):
        x = torch.tensor([3.0, 1000.0, 12345.0, -7e4], device="cuda")[:, None].expand(4, cols)
        ones, zeros = torch.ones(cols, device="cuda"), torch.zeros(cols, device="cuda")
        result = DeviceFused(words.layer_norm(F32))(x.repeat(100, 1), ones, zeros)[0]
        assert not result.any()


def test_exponentials() -> None:
    """All of their range: denormal results, overflow, and what is no number."""
    line = torch.linspace(-110.0, 95.0, 2_000_001)
    ends = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 88.72283, 88.7229, -87.34]
    x = torch.cat([line, torch.tensor(ends)])
    nodes = (load(0, F32), compute("exp", F32, 0))
    program = Program(1, (tensor(F32, 0),), nodes, (output(1, 0),))
    got = DeviceFused(program)(x.cuda())
    got = (got[0] if isinstance(got, tuple) else got).cpu().double()
    exact = x.double().exp()
    normal = (exact >= 2.0**-126) & (exact <= torch.finfo(torch.float32).max)
    error = ((got - exact).abs() / exact)[normal].max() * 2.0**24
    assert error <= 2 * 2.5, float(error)
    assert bool(((got - exact).abs() <= 2.0**-148)[exact < 2.0**-126].all())
    assert bool((got[x > 88.7229] == float("inf")).all())
    assert bool(got[x.isnan()].isnan().all()) and bool((got[x == -float("inf")] == 0).all())


def test_vectors_of_columns() -> None:
    """From aligned places and others, of rows of any length."""
    weight = words.values(F16, 520)
    for first, cols in ((0, 512), (4, 512), (1, 512), (2, 511)):
        given = [words.values(F16, 300, cols), weight[first : first + cols]]
        check_gpu(words.masked_rms_norm(F16), given)


@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda x: x.text)
def test_long_rows_come_in_chunks(dtype: DType) -> None:
    check_gpu(words.softmax(dtype), [words.values(dtype, 64, 50001)])


@pytest.mark.parametrize("dtype", [F32, F16, U8], ids=lambda x: x.text)
def test_many_tiles(dtype: DType) -> None:
    """More tiles than blocks: they are drawn from the counter, again and again."""
    x = words.values(dtype, 5_000_003)
    op = "add" if dtype is not F16 else "copy"
    nodes = [load(0, dtype), compute(op, dtype, 0, 0) if op == "add" else compute(op, dtype, 0)]
    program = Program(1, (tensor(dtype, 0),), tuple(nodes), (output(1, 0),))
    for _ in range(20):
        check_gpu(program, [x])
    check_gpu(program, [x[1:]])


@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_without_a_tile_end(blocks: int) -> None:
    """No block waits for a first tile that never comes."""
    image = Image(words=[Word("end")], first=[0], rest=[0], tiles=0, each=8, blocks=blocks)
    image.barriers_at, image.rows_at, image.ring_at, image.shared_bytes = 512, 1024, 2048, 4096
    launch_image(image, [], 0, False)
    ended = torch.cuda.Event()
    ended.record()
    until = time.monotonic() + 10
    while not ended.query():
        assert time.monotonic() < until, "the kernel hangs"


def chain(count: int) -> Program:
    nodes = [load(0, F32)]
    for k in range(count):
        nodes.append(compute("tanh" if k % 2 else "neg", F32, k))
    return Program(1, (tensor(F32, 0),), tuple(nodes), (output(count, 0),))


def test_streams() -> None:
    """Launches of two streams at once do not share a counter."""
    fused, x = DeviceFused(chain(6)), torch.randn(20_000_000, device="cuda")
    wanted = fused(x)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(fused(x))
        if len(results) == 4:
            torch.cuda.synchronize()
            assert all(torch.equal(one, wanted) for one in results)
            results.clear()


def test_cuda_graphs() -> None:
    fused, x = DeviceFused(chain(4)), torch.randn(9_000_000, device="cuda")
    fused(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = fused(x)
        second = fused(first)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        beside = fused(x)  # an eager launch after, on another counter
        torch.cuda.synchronize()
        assert torch.equal(beside, first)
        assert torch.equal(second, fused(first))


def test_calls_allocate_nothing_but_results() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # of larger blocks that others have left, all would count
    fused, x = DeviceFused(chain(3)), torch.randn(1 << 20, device="cuda")
    fused(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = fused(x)
    assert torch.cuda.max_memory_allocated() - before == y.numel() * 4


def test_no_memory_is_torchs_error() -> None:
    x = torch.zeros(1, device="cuda").expand(1 << 40)
    with pytest.raises((torch.OutOfMemoryError, NotEncodable)):
        DeviceFused(chain(1))(x)


def test_no_memory_for_results_is_torchs_error() -> None:
    """Where the allocator refuses C++, torch is asked again for its own exception."""
    inputs = tensor(F32, 0), *[Input(InputKind.INT, DType.I64)] * 2
    nodes = (load(0, F32), compute("neg", F32, 0))
    placed = Output(1, (0,), (0,), along=0, total=1, offset=2)
    fused, x = DeviceFused(Program(1, inputs, nodes, (placed,))), torch.ones(8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        fused(x, 1 << 45, 4)
    assert fused(x, 20, 4)[4:12].tolist() == [-1.0] * 8


def test_new_shapes_leave_nothing_behind() -> None:
    fused, whole = DeviceFused(words.softmax()), torch.randn(1 << 18, device="cuda")

    def call_all(rows: int) -> None:
        for cols in range(1, 251):
            fused(whole[: rows * cols].view(rows, cols))
        torch.cuda.synchronize()

    call_all(1)
    call_all(300)
    resident, allocated = memory(), torch.cuda.memory_allocated()
    for rows in range(2, 42):
        call_all(rows)
    assert torch.cuda.memory_allocated() == allocated
    assert memory() - resident < 4 << 20


def test_both_encoders_compute_the_same() -> None:
    """C++ leaves few calls to Python, which has to be able to make them."""
    x = torch.randn(300, 700, device="cuda")
    for program in (words.softmax(), chain(4)):
        fused = DeviceFused(program)
        given = x if program.rank == 2 else x.flatten()
        one, other = fused(given), fused.by_reference(given)
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_stream_that_is_current() -> None:
    """A call waits for what is before it on its stream, and for nothing else."""
    fused, stream = DeviceFused(chain(1)), torch.cuda.Stream()
    x = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(2.0)
        found = fused(x)
    stream.synchronize()
    assert found.tolist() == [-2.0] * 1000


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)]
    return torch.nn.Sequential(*layers, torch.nn.Softmax(-1)).cuda()


def test_models() -> None:
    module = _model()
    compiled = magjit.compile(module, backend="dvm")
    with torch.no_grad():
        for rows in (1, 16, 300):
            x = torch.randn(rows, 256, device="cuda")
            torch.testing.assert_close(compiled(x), module(x))


def test_training() -> None:
    module, other = _model(), _model()
    compiled = magjit.compile(module, backend="dvm")
    x = torch.randn(32, 256, device="cuda")
    compiled(x).square().sum().backward()
    other(x).square().sum().backward()
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5)


def _grown(seed: int) -> Any:
    return Grower(seed, True).grow(random.Random(seed).randrange(2, 25))


@pytest.mark.parametrize("part", range(10))
def test_random_programs(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program of random graphs that has words, by the kernel."""
    original, seen = Program.compiled, list[Program]()

    def compiled(self: Program, fallback: Any = None) -> Any:
        fused = original(self, fallback)

        def run(*arguments: Any) -> Any:
            if not any(one.whole >= 0 for one in self.outputs):
                try:
                    check_gpu(self, arguments)
                    seen.append(self)
                except NotEncodable:
                    pass
            return fused(*arguments)

        return run

    monkeypatch.setattr(Program, "compiled", compiled)
    monkeypatch.setattr("magjit_dvm.schedule.stacked", list)
    for seed in range(part * 10, part * 10 + 10):
        graph = _grown(seed)
        inputs = [one.make() for one in graph.given]
        describer = InputDescriber()
        with torch.no_grad():
            described = [describer.describe(one) for one in inputs]
            call = run_backend(backend, graph.module, described, BackendContext(dynamic=None))
            check_results(call(*inputs), graph.results)
    assert seen


@pytest.fixture(scope="module", autouse=True)
def _synchronized() -> Iterator[None]:
    """What a kernel did wrong is found here at the latest."""
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_batch_norm_that_does_not_train_is_fused(
    dtype: torch.dtype, layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(24), torch.nn.ReLU()).cuda().eval()
    for one in (model[0].running_mean, model[0].weight, model[0].bias):
        torch.nn.init.normal_(one)
    torch.nn.init.uniform_(model[0].running_var, 0.5, 2.0)
    compiled = magjit.compile(lambda x: model(x * 2) + x, backend="dvm")
    with torch.no_grad():
        for size in (7, 16):
            x = torch.randn(2, 24, size, size, device="cuda", dtype=dtype)
            x = x.contiguous(memory_format=layout)
            wanted = model(x * 2) + x
            # Of numbers of 16 bits eager mode rounds the norm before it adds.
            within = {"rtol": 1e-3, "atol": 4e-3} if dtype is torch.float16 else {}
            for _ in range(2):
                made = compiled(x)
                torch.testing.assert_close(made, wanted, **within)
                assert made.stride() == wanted.stride()
        with torch.profiler.profile() as seen:
            compiled(x)
    assert not [one.name for one in seen.events() if "batch_norm" in one.name]
