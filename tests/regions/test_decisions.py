"""Decisions that are computed together are read from the device together, and never too late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import magjit
from magjit import _C, decisions

DEPTH = 6
CALLS = 6


class Reads:
    """How often tensors were read, and how often from the device."""

    def __init__(self) -> None:
        self.all = self.served = self.copies = 0

    def read(self, *given: Any) -> Any:
        found = decisions.read(*given)
        self.all += 1
        if found is not None and found[1] is not None:
            self.copies += found[1] is not given[-1]
            self.served += found[1] is given[-1] and found[1].place(given[1]) >= 0
        return found


@pytest.fixture
def reads() -> Iterator[Reads]:
    """Tensors on the CPU are read as those on a device are."""
    counted = Reads()
    _C.set_reader(counted.read, decisions._FUNCTIONS, 1 << decisions.CPU)
    yield counted
    decisions.serve(*decisions.DEVICES)
    magjit.reset()


def masks() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(DEPTH, generator=generator) - 0.5 for _ in range(CALLS)]


def agree(program: Callable[..., Any], *further: Callable[[], Any]) -> Any:
    """Calls with the same arguments, those that replay included, are equal to eager's."""
    compiled = magjit.compile(program, backend="eager")
    x = torch.randn(4, generator=torch.Generator().manual_seed(1))
    for mask in masks() * 2:
        wanted = program(x.clone(), mask.clone(), *[make() for make in further])
        found = compiled(x.clone(), mask.clone(), *[make() for make in further])
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    return magjit.stats(compiled)


def decides(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    keep = mask > 0
    for k in range(DEPTH):
        if keep[k]:
            x = x * (k + 2)
        x = x + 1
    return x


def items(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    keep = mask * 2
    for k in range(DEPTH):
        if keep[k].item() > 0:
            x = x * (k + 2)
    return x


def conversions(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scaled = mask * 7
    for k in range(0, DEPTH, 3):
        if float(scaled[k]) > 0.5:
            x = x + 1
        if int(scaled[k + 1]) > 0:
            x = x * 2
        if bool(scaled[k + 2]):
            x = x - 1
    return x


def halves(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scaled = (mask * 3).to(torch.bfloat16).view(2, 3)[1]
    for k in range(3):
        if scaled[k]:
            x = x + 1
        if int(scaled[2 - k]) == 0:
            x = x * 2
    return x


@pytest.mark.parametrize("program", [decides, conversions, halves])
def test_read_once(program: Callable[..., Any], reads: Reads) -> None:
    stats = agree(program)
    assert stats.replays > 0 and reads.all > 0
    assert reads.served > 2 * reads.copies, vars(reads)


def test_one_copy_a_call(reads: Reads) -> None:
    compiled = magjit.compile(decides, backend="eager")
    x = torch.randn(4)
    for mask in masks() * 3:
        compiled(x, mask)
    reads.all = reads.copies = reads.served = 0
    for mask in masks():
        torch.testing.assert_close(compiled(x, mask), decides(x, mask))
    assert (reads.all, reads.copies) == (CALLS * DEPTH, CALLS)
    assert reads.served == CALLS * (DEPTH - 1)


def test_numbers_that_are_no_numbers(reads: Reads) -> None:
    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        odd = torch.stack([mask[0] * float("nan"), mask[0] * 0, mask[1] * float("inf"), mask[2]])
        for k in range(4):
            if odd[k]:
                x = x * (k + 2)
            x = x + 1
        return x

    agree(program)
    assert reads.served > 0


def test_on_the_host_nothing_changes() -> None:
    def refuse(*given: Any) -> Any:
        raise AssertionError("a tensor on the CPU is read as always")

    _C.set_reader(refuse, decisions._FUNCTIONS, 1 << decisions.CUDA)
    try:
        agree(decides)
        agree(items)
    finally:
        decisions.serve(*decisions.DEVICES)
        magjit.reset()


# -- whatever writes between two reads -------------------------------------------------------------


def opposite(keep: torch.Tensor) -> torch.Tensor:
    return keep.detach().clone().logical_not()


def by_item(keep: torch.Tensor) -> None:
    keep[1] = not bool(keep[1].item())


def by_operator(keep: torch.Tensor) -> None:
    keep.logical_not_()


def by_out(keep: torch.Tensor) -> None:
    torch.logical_not(keep, out=keep)


def by_data(keep: torch.Tensor) -> None:
    keep.data.logical_not_()


def by_detached(keep: torch.Tensor) -> None:
    keep.detach().logical_not_()


def by_another_memory(keep: torch.Tensor) -> None:
    keep.set_(opposite(keep))


def by_assigned_data(keep: torch.Tensor) -> None:
    keep.data = opposite(keep)


def by_array(keep: torch.Tensor) -> None:
    array = keep.numpy()
    array[:] = ~array


def by_dlpack(keep: torch.Tensor) -> None:
    torch.from_dlpack(keep.view(torch.uint8)).bitwise_xor_(1)


def by_storage(keep: torch.Tensor) -> None:
    keep.untyped_storage().copy_(opposite(keep).untyped_storage())


def by_storage_item(keep: torch.Tensor) -> None:
    keep.untyped_storage()[3] = 1


def by_foreach(keep: torch.Tensor) -> None:
    torch._foreach_copy_([keep], [opposite(keep)])


def by_kept_version(keep: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(keep):
        keep.logical_not_()


@magjit.disable
def out_of_sight(keep: torch.Tensor) -> None:
    keep.data.logical_not_()


@torch.library.custom_op("magjit_tests::turn", mutates_args=("keep",))
def by_custom_operator(keep: torch.Tensor) -> None:
    keep.logical_not_()


@torch.library.custom_op("magjit_tests::turn_data", mutates_args=())
def by_secret_operator(keep: torch.Tensor) -> None:
    keep.data.logical_not_()


WRITES: list[Callable[[torch.Tensor], Any]] = [
    *(by_item, by_operator, by_out, by_data, by_detached, by_another_memory),
    *(by_assigned_data, by_array, by_dlpack, by_storage, by_storage_item, by_foreach),
    *(by_kept_version, out_of_sight, by_custom_operator, by_secret_operator),
]


def named(write: Any) -> str:
    return str(getattr(write, "__name__", "operator"))


@pytest.mark.parametrize("write", WRITES, ids=named)
@pytest.mark.parametrize("at", [0, 2])
def test_writes(write: Callable[[torch.Tensor], Any], at: int, reads: Reads) -> None:
    def program(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keep = mask > 0
        for k in range(DEPTH):
            if keep[k]:
                x = x * (k + 2)
            x = x + 1
            if k == at:
                write(keep)
        return x, keep

    agree(program)


@pytest.mark.parametrize("write", WRITES, ids=named)
def test_writes_of_an_argument(write: Callable[[torch.Tensor], Any], reads: Reads) -> None:
    def program(x: torch.Tensor, mask: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        for k in range(DEPTH):
            if keep[k]:
                x = x * (k + 2)
                write(keep)
            x = x + 1
        return x

    agree(program, lambda: torch.tensor([True, False] * (DEPTH // 2)))


def test_writes_of_an_iterator(reads: Reads) -> None:
    def program(x: torch.Tensor, mask: torch.Tensor, rows: Any, keep: torch.Tensor) -> torch.Tensor:
        for k, _ in enumerate(rows(keep)):
            if keep[k]:
                x = x * (k + 2)
            x = x + 1
        return x

    def rows(keep: torch.Tensor) -> Iterator[int]:
        for k in range(DEPTH):
            keep.data.logical_not_()
            yield k

    class Rows:
        def __init__(self, keep: torch.Tensor) -> None:
            self.keep, self.left = keep, DEPTH

        def __iter__(self) -> Rows:
            return self

        def __next__(self) -> int:
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            self.keep.data.logical_not_()
            return self.left

    for one in (rows, Rows):
        agree(program, lambda one=one: one, lambda: torch.tensor([True] * DEPTH))  # type: ignore[misc]


def test_writes_of_a_test(reads: Reads) -> None:
    class Turn:
        def __init__(self, keep: torch.Tensor) -> None:
            self.keep = keep

        def __bool__(self) -> bool:
            self.keep.data.logical_not_()
            return bool(self.keep[0])

    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keep = mask > 0
        turn = Turn(keep)
        for k in range(DEPTH):
            if keep[k]:
                x = x * (k + 2)
            x = x + 1
            if turn:
                x = x - 3
        return x

    agree(program)


def test_writes_of_a_callee(reads: Reads) -> None:
    inner = magjit.compile(lambda keep: by_data(keep), backend="eager")

    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keep = mask > 0
        for k in range(DEPTH):
            if keep[k]:
                x = x * (k + 2)
            x = x + 1
            inner(keep)
        return x

    agree(program)


def test_results_of_one_graph(reads: Reads) -> None:
    """A tensor that takes the place of the holder has its own data."""

    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keep = mask > 0
        for k in range(DEPTH):
            if keep[k]:
                x = x * (k + 2)
            keep = keep.roll(1)
            x = x + 1
        return x

    agree(program)
    assert reads.served == 0


def test_overwritten_results(reads: Reads) -> None:
    """A backend may have its results always in the same memory, once nobody holds them."""
    memory: dict[int, torch.Tensor] = {}

    def backend(gm: Any, inputs: Any) -> Any:
        def run(*given: torch.Tensor) -> Any:
            made = gm.forward(*given)
            masks = [one for one in made if one.dtype is torch.bool and one.dim() == 1]
            if len(masks) != 1 or any(one is masks[0] for one in given):
                return made
            own = memory.setdefault(id(gm), masks[0])
            own.data.copy_(masks[0])  # no trace in the version
            whole = masks[0].untyped_storage().data_ptr()
            return tuple(
                own.as_strided(one.size(), one.stride(), one.storage_offset())
                if one.untyped_storage().data_ptr() == whole
                else one
                for one in made
            )

        return run

    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keep = mask > 0
        for k in range(DEPTH):
            if keep[k]:
                x = x * (k + 2)
            if keep[DEPTH - 1 - k]:
                x = x * 3
            x = x + 1
            mask = mask.roll(1) * -1
            keep = mask > 0
        return x

    compiled = magjit.compile(program, backend=backend)
    for mask in masks() * 2:
        x = torch.ones(4)
        torch.testing.assert_close(compiled(x, mask), program(x, mask), rtol=0, atol=0)
    assert memory and reads.served > 0


# -- what may not be copied ------------------------------------------------------------------------


def test_too_large(reads: Reads) -> None:
    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keep = mask.repeat(decisions.MOST_ELEMENTS) > 0
        for k in range(DEPTH):
            if keep[k]:
                x = x * (k + 2)
            x = x + 1
        return x

    agree(program)
    assert reads.all > 0 and reads.copies == 0


def test_a_mode_sees_every_read(reads: Reads) -> None:
    class Counted(TorchFunctionMode):
        count = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.Tensor.__bool__
            return func(*args, **(kwargs or {}))

    compiled = magjit.compile(decides, backend="eager")
    x, mask = torch.ones(4), masks()[0]
    for _ in range(4):
        compiled(x, mask)
    with Counted() as counted:
        torch.testing.assert_close(compiled(x, mask), decides(x, mask))
    assert counted.count >= 2 * DEPTH


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients(mode: Any, reads: Reads) -> None:
    with mode():
        agree(decides)
        agree(items)


def test_errors_are_eagers(reads: Reads) -> None:
    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keep = mask > 0
        for k in range(DEPTH):
            if keep[k : k + 1 + k // 3]:
                x = x * 2
            x = x + 1
        return x

    compiled = magjit.compile(program, backend="eager")
    for _ in range(4):
        with pytest.raises(RuntimeError, match="ambiguous"):
            compiled(torch.ones(4), masks()[0])


def test_nothing_is_kept(reads: Reads) -> None:
    """The copy ends with the call."""
    import gc
    import weakref

    held: list[Any] = []

    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keep = mask > 0
        if keep[0]:
            x = x + 1
        if keep[1]:
            x = x * 2
        return x

    def reader(*given: Any) -> Any:
        found = decisions.read(*given)
        if found is not None and found[1] is not None:
            held.append(weakref.ref(found[1].holder))
        return found

    _C.set_reader(reader, decisions._FUNCTIONS, 1 << decisions.CPU)
    compiled = magjit.compile(program, backend="eager")
    for mask in masks():
        compiled(torch.ones(4), mask)
    gc.collect()
    assert held and all(one() is None for one in held)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        *(("eager", None), ("inductor", None), ("dvm", None), ("triton", None)),
        *((name, "reduce-overhead") for name in ("inductor", "dvm", "triton")),
    ],
)
def test_on_a_device(backend: str, mode: str | None) -> None:
    """Reads wait once a call; twice where a graph returns the first number beside its tensor."""
    copies = 0

    def reader(*given: Any) -> Any:
        nonlocal copies
        found = decisions.read(*given)
        copies += found is None or found[1] is None or found[1] is not given[-1]
        return found

    _C.set_reader(reader, decisions._FUNCTIONS, 1 << decisions.CUDA)
    try:
        with torch.no_grad():
            compiled = magjit.compile(decides, backend=backend, mode=mode)
            x = torch.randn(64, 64, device="cuda")
            for mask in masks() * 3:
                given = mask.cuda()
                torch.testing.assert_close(compiled(x, given), decides(x, given))
            copies = 0
            for mask in masks():
                given = mask.cuda()
                torch.testing.assert_close(compiled(x, given), decides(x, given))
        assert CALLS <= copies <= 2 * CALLS
    finally:
        decisions.serve(*decisions.DEVICES)
        magjit.reset()
