"""Exceptions, text, warnings, random numbers and modes: what a call leaves in the process."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import random
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..twin import Scene, TableWarning, call
from .table import new_table

ROWS = new_table()


class Failure(Exception):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def caught_inside(x: torch.Tensor) -> Any:
    try:
        raise Failure("no", 3)
    except Failure as error:
        return x * error.code


def caught_key_error(x: torch.Tensor) -> Any:
    try:
        return {}["missing"]
    except KeyError as error:
        return x * len(error.args[0])


def caught_by_finally(x: torch.Tensor) -> Any:
    out = []
    try:
        out.append(x + 1)
        return out
    finally:
        out.append(x + 2)


def caught_torch_error(x: torch.Tensor) -> Any:
    try:
        return x @ x
    except RuntimeError:
        return x @ x.t()


def raised_and_chained(x: torch.Tensor) -> Any:
    try:
        {}["missing"]
    except KeyError as error:
        raise Failure("chained", 4) from error


def raised_by_torch(x: torch.Tensor) -> Any:
    return x @ x


def raised_with_state(x: torch.Tensor) -> Any:
    raise Failure(f"shape {tuple(x.shape)}", 5)


def stopped(x: torch.Tensor) -> Any:
    raise StopIteration(3)


# name -> (program, it raises)
FAILURES: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "raised and caught": (caught_inside, False),
    "key error caught": (caught_key_error, False),
    "finally after return": (caught_by_finally, False),
    "torch error caught": (caught_torch_error, False),
    "raised and chained": (raised_and_chained, True),
    "raised by torch": (raised_by_torch, True),
    "raised with state": (raised_with_state, True),
    "stop iteration": (stopped, True),
    "assertion": (lambda x: (_ for _ in ()).throw(AssertionError("no")), True),
}


def failing(program: Callable[[torch.Tensor], Any]) -> Scene:
    kept: list[Any] = []

    def run(x: torch.Tensor) -> Any:
        kept.append(x * 2)
        return program(x)

    return Scene(run, state=lambda: kept)


for row_name, (program, raises) in FAILURES.items():
    ROWS.add(f"exception {row_name}", functools.partial(failing, program), split=raises)


@ROWS.row(split=True)
def exception_on_some_calls() -> Scene:
    sizes = iter((3, 5, 3, 5))

    def program(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 5:
            raise ValueError("five rows")
        return x + 1

    return Scene(program, args=lambda: call(torch.randn(next(sizes), 4)))


# --- text -----------------------------------------------------------------------------------


@ROWS.row()
def printed_text() -> Scene:
    names = ["first"]

    def program(x: torch.Tensor) -> torch.Tensor:
        print("shape", tuple(x.shape), names, x.dtype, sep=" | ")
        names[0] = "later"
        y = x + 1
        print("done", end="!\n")
        return y

    return Scene(program)


@ROWS.row(split=True)
def printed_tensor() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print(y)
        return y * 2

    return Scene(program)


@ROWS.row(split=True)
def text_written_to_a_stream() -> Scene:
    stream = io.StringIO()

    def program(x: torch.Tensor) -> torch.Tensor:
        stream.write(f"{x.dim()} dimensions\n")
        return x + 1

    return Scene(program, state=stream.getvalue)


@ROWS.row(split=True)
def warning() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("careful", TableWarning, stacklevel=1)
        return x + 1

    return Scene(program)


@ROWS.row(split=True)
def logged_record() -> Scene:
    seen: list[str] = []
    logger = logging.Logger("table", logging.INFO)
    logger.addHandler(
        type(
            "Kept",
            (logging.Handler,),
            {"emit": lambda self, record: seen.append(record.getMessage())},
        )()
    )

    def program(x: torch.Tensor) -> torch.Tensor:
        logger.info("rows %d", x.shape[0])
        logger.debug("not seen")
        return x + 1

    return Scene(program, state=lambda: seen)


@ROWS.row()
def logged_below_the_level() -> Scene:
    logger = logging.Logger("table", logging.ERROR)

    def program(x: torch.Tensor) -> torch.Tensor:
        logger.info("not seen")
        return x + 1

    return Scene(program)


@ROWS.row()
def text_made() -> Scene:
    def program(x: torch.Tensor) -> Any:
        name = f"{x.dim():>4}|{'abc'!r}|{3.14159:.2f}"
        return name, " ".join(["a", name]), "%s-%d" % (name, 3), x + len(name)

    return Scene(program)


# --- random numbers -------------------------------------------------------------------------

GENERATOR_SEED = 11


def shuffled(x: torch.Tensor) -> Any:
    items = [1, 2, 3, 4]
    random.shuffle(items)
    return x * items[0], items


def own_generator(x: torch.Tensor) -> Any:
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    return x + torch.rand(x.shape, generator=generator)


def seeded_inside(x: torch.Tensor) -> Any:
    torch.manual_seed(7)
    return x + torch.rand(4)


def forked(x: torch.Tensor) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        y = torch.rand(4)
    return x + y + torch.rand(4)


# name -> (program, may split)
RANDOM: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "rand": (lambda x: x + torch.rand(3, 4), False),
    "rand like and randn": (lambda x: torch.rand_like(x) + torch.randn(4), False),
    "randint and randperm": (lambda x: (torch.randint(9, (3,)), torch.randperm(4), x + 1), False),
    "normal in place": (lambda x: x.clone().normal_(), False),
    "bernoulli of values": (lambda x: torch.bernoulli(x.sigmoid()), False),
    "multinomial": (lambda x: torch.multinomial(x.softmax(1), 2), False),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 0.5), False),
    "in order of several": (lambda x: (torch.rand(2), x.bernoulli(0.5), torch.randn(2)), False),
    "unused": (lambda x: (torch.rand(2), x + 1)[1], False),
    "of python": (lambda x: x * random.random(), True),
    "of python shuffled": (shuffled, True),
    "of numpy": (lambda x: x * float(np.random.rand()), True),
    "own generator": (own_generator, True),
    "seeded inside": (seeded_inside, True),
    "forked": (forked, True),
    "state read": (lambda x: (torch.get_rng_state().sum(), x + 1), True),
}


def drawing(program: Callable[[torch.Tensor], Any]) -> Scene:
    def run(x: torch.Tensor) -> Any:
        return program(x)

    return Scene(run)


for row_name, (program, may_split) in RANDOM.items():
    ROWS.add(f"random {row_name}", functools.partial(drawing, program), split=may_split)


@ROWS.row(split=True)
def random_generator_of_the_world() -> Scene:
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    return Scene(lambda x: x + torch.rand(4, generator=generator), state=lambda: generator)


# --- modes ----------------------------------------------------------------------------------


def grad_off(x: torch.Tensor) -> Any:
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(True)
    return y


def dtype_changed(x: torch.Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    y = torch.ones(4)
    torch.set_default_dtype(torch.float32)
    return x + y


def autocast_inside(x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.t()
    return y, x @ x.t()


def inference_inside(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        y = x * 2
    return y + 1


def raised_in_no_grad(x: torch.Tensor) -> Any:
    try:
        with torch.no_grad():
            raise ValueError
    except ValueError:
        return x * 2


# name -> (program, may split)
MODES: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "no grad": (lambda x: torch.no_grad()(torch.sin)(x), False),
    "grad switched off and on": (grad_off, False),
    "no grad left by an exception": (raised_in_no_grad, False),
    "autocast inside": (autocast_inside, False),
    "inference mode inside": (inference_inside, True),
    "default dtype changed": (dtype_changed, True),
}

for row_name, (program, may_split) in MODES.items():
    ROWS.add(f"mode {row_name}", functools.partial(drawing, program), split=may_split)


@ROWS.row(split=True)
def mode_left_switched() -> Scene:
    """The call itself ends with another grad mode than it began with."""

    def program(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    def args() -> Any:
        torch.set_grad_enabled(True)
        return call(torch.randn(3, requires_grad=True))

    return Scene(program, args=args, state=lambda: torch.set_grad_enabled(True) and None)


@ROWS.row()
def context_manager_restores_its_state() -> Scene:
    box = types.SimpleNamespace(depth=0, seen=[])

    @contextlib.contextmanager
    def entered(value: Any) -> Iterator[int]:
        box.depth += 1
        box.seen.append(value)
        try:
            yield box.depth
        finally:
            box.depth -= 1

    def program(x: torch.Tensor) -> Any:
        with entered(x * 2) as depth, entered(x * 3) as deeper:
            return x * depth + deeper

    return Scene(program, state=lambda: box)


@ROWS.row()
def exit_stack() -> Scene:
    left: list[Any] = []

    def program(x: torch.Tensor) -> Any:
        with contextlib.ExitStack() as stack:
            stack.callback(left.append, x + 1)
            stack.callback(left.append, 2)
            return x * 2

    return Scene(program, state=lambda: left)


@ROWS.row(split=True)
def time_read() -> Scene:
    box = types.SimpleNamespace(elapsed=None)

    def program(x: torch.Tensor) -> Any:
        start = time.perf_counter()
        y = x * 2
        box.elapsed = time.perf_counter() - start
        return y

    return Scene(program, state=lambda: box.elapsed > 0)


@ROWS.row(split=True)
def value_of_a_tensor_decides() -> Scene:
    def program(x: torch.Tensor) -> Any:
        return x * 2 if x.sum() > 0 else x - 1

    return Scene(program)


@ROWS.row(split=True)
def value_of_a_tensor_returned() -> Scene:
    return Scene(lambda x: (x.sum().item(), x[0].tolist(), float(x[0, 0]), x + 1))


@ROWS.row(split=True)
def value_of_a_tensor_as_shape() -> Scene:
    return Scene(lambda x: (x[x > 0], torch.nonzero(x > 0), (x > 0).sum().item()))


@ROWS.row(split=True)
def value_of_a_tensor_to_numpy() -> Scene:
    return Scene(lambda x: x.numpy().sum() + (x + 1))
