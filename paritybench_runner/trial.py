"""One case as a recipe: build the module anew, make inputs, call, see all that a call left.

script = weights seed, training, moves      what is done with one freshly built module
move   = inputs seed, larger batch          one call; in training with a backward pass
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paritybench_runner import stubs
from paritybench_runner.corpus import Case, describe
from paritybench_runner.values import (
    first_difference,
    frozen,
    same_class,
    state_of,
    tensors_of,
    without_graph,
)

WEIGHTS, OTHER_WEIGHTS = 1, 2
INPUTS, FRESH_INPUTS, MORE_INPUTS = 11, 12, 13
_CALL = 21
_MOST_KEPT = 200 << 20  # bytes; larger modules initialise what they have

Inputs = tuple[list[Any], dict[str, Any]]
Callee = Callable[..., Any]
NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class Move:
    """One call."""

    inputs: int = INPUTS
    larger_batch: bool = False


@dataclass(slots=True)
class Outcome:
    """All that one call left behind."""

    result: Any
    arguments: Any
    printed: str
    state: dict[str, Any]
    raised: BaseException | None = None
    gradient_missing: bool = False
    attributes: bool = True
    """Whether the state has the module's plain attributes."""

    def differs_from(self, other: Outcome, *, values: bool = True) -> str | None:
        """Where this outcome departs from what another one, eager's, has."""
        if (self.raised is None) != (other.raised is None):
            shown = describe(self.raised or other.raised or RuntimeError())
            return f"raises {shown}" if self.raised else f"does not raise {shown}"
        if self.raised is not None:
            return first_difference(type(other.raised), type(self.raised), "exception")
        if not values:
            same = same_class(type(self.result), type(other.result))
            return None if same else "type of the result"
        own, others = (dict(sorted(outcome.state.items())) for outcome in (self, other))
        if not self.attributes:
            others = {key: value for key, value in others.items() if key in own}
        return (
            first_difference(other.result, self.result)
            or first_difference(other.arguments, self.arguments, "arguments")
            or first_difference(others, own, "state")
            or first_difference(other.printed, self.printed, "printed")
        )


def seed_all(seed: int) -> None:
    """Set every generator that a program may draw from."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # else torch.manual_seed would note a stack for later
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)


class Printed:
    """What a call wrote to the standard output, where that is a file to read; else nothing."""

    def __init__(self) -> None:
        self._out = sys.stdout

    def start(self) -> None:
        """Forget what was written so far."""
        self.take()

    def take(self) -> str:
        """What was written since."""
        if not (self._out.seekable() and self._out.readable()):
            return ""
        self._out.flush()
        end = self._out.tell()
        self._out.seek(0)
        text = self._out.read(min(end, 100_000))
        self._out.seek(0)
        self._out.truncate()
        return text


class Trial:
    """Builds and calls what a case describes."""

    def __init__(self, case: Case, device: str, alive: Callable[[], None] = lambda: None) -> None:
        """``alive`` is called before each thing that a program's own code does."""
        self._alive = alive
        self.case = case
        self.device = torch.device(device)
        if self.device.type == "cuda":
            # cuDNN's products of float32 have ten bits otherwise, however they are computed.
            torch.backends.cudnn.allow_tf32 = False
        self._weights: dict[int, dict[str, Tensor]] = {}
        self._printed = Printed()
        self.call_ms = 0.0
        self.keeps_state = True
        """Whether a call changes the module, as far as is known."""
        self.ready: tuple[nn.Module, Outcome] | None = None
        """An eager module after its first call, and what that left; for who compares with it."""

    def build(self, weights: int = WEIGHTS, *, training: bool = False) -> nn.Module:
        """A fresh module; what its initialisation left to chance is as it was the first time."""
        self._alive()
        seed_all(weights)
        with stubs.constructing():
            args, kwargs = self.case.init_arguments()
            module: nn.Module = self.case.cls(*args, **kwargs)
        module.train(training)
        module.to(self.device)
        self._settle(module, weights)
        return module

    def _settle(self, module: nn.Module, weights: int) -> None:
        """Memory that was never written differs from one module to the next: copy the first's."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        tensors = {k: t for k, t in tensors.items() if not nn.parameter.is_lazy(t)}
        if sum(t.nbytes for t in tensors.values()) > _MOST_KEPT:
            return
        known = self._weights.get(weights)
        if known is None:
            self._weights[weights] = {k: t.detach().clone() for k, t in tensors.items()}
            return
        with torch.no_grad():
            for name, tensor in tensors.items():
                first = known.get(name)
                if first is not None and first.shape == tensor.shape:
                    if not torch.equal(first, tensor):
                        tensor.data.copy_(first)

    def inputs(self, move: Move) -> Inputs:
        """Arguments of a call; the same seed gives the same values."""
        seed_all(move.inputs)
        args, kwargs = self.case.forward_arguments()
        moved: Inputs = tree_map_only(Tensor, lambda t: t.to(self.device), (list(args), kwargs))
        return _larger(moved) if move.larger_batch else moved

    def call(
        self, callee: Callee, inputs: Inputs, within: AbstractContextManager[Any] = NOTHING
    ) -> Any:
        """Call once with all generators set; its exceptions pass."""
        args, kwargs = inputs
        self._alive()
        seed_all(_CALL)
        with within:
            started = time.perf_counter()
            result = callee(*args, **kwargs)
            self.call_ms = (time.perf_counter() - started) * 1e3
        return result

    def play(
        self,
        callee: Callee,
        module: nn.Module,
        move: Move,
        *,
        attributes: bool = True,
        within: AbstractContextManager[Any] = NOTHING,
    ) -> Outcome:
        """One call, with a backward pass where the module trains, and all that it left."""
        inputs = self.inputs(move)
        self._printed.start()
        result, raised, missing = None, None, False
        try:
            result = self.call(callee, inputs, within)
            if module.training:
                missing = not _backward(result)
        except Exception as error:
            raised = error.with_traceback(None)
        state = frozen(state_of(module) if attributes else tensors_of(module))
        printed = self._printed.take()
        result = without_graph(result)
        return Outcome(result, inputs, printed, state, raised, missing, attributes)

    def replayed(self, weights: int, training: bool, moves: list[Move]) -> Outcome:
        """The outcome of the last of some moves in eager mode, from a fresh module on."""
        module = self.build(weights, training=training)
        outcomes = [self.play(module, module, move) for move in moves]
        return outcomes[-1]

    def replayed_in_filled_memory(self, weights: int, training: bool, moves: list[Move]) -> Outcome:
        """The same, where memory that nobody has written yet is full of NaN and large numbers."""
        before = torch.are_deterministic_algorithms_enabled()
        known, self._weights = self._weights, {}
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return self.replayed(weights, training, moves)
        finally:
            torch.use_deterministic_algorithms(before)
            self._weights = known


def _larger(inputs: Inputs) -> Inputs:
    """The same inputs with one more row in every tensor that has the first one's batch size."""
    sizes: list[int] = []

    def grow(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.layout is not torch.strided:
            return tensor
        sizes.append(tensor.shape[0])
        if tensor.shape[0] != sizes[0] or tensor.shape[0] == 0:
            return tensor
        return torch.cat([tensor, tensor[:1]])

    grown: Inputs = tree_map_only(Tensor, grow, inputs)
    return grown


def _backward(result: Any) -> bool:
    """Differentiate a scalar made of all results; false when there is nothing to differentiate."""
    losses = [
        (torch.view_as_real(leaf) if leaf.is_complex() else leaf).float().square().mean()
        for leaf in _differentiable(result, 0)
    ]
    if losses:
        torch.stack(losses).sum().backward()
    return bool(losses)


def _differentiable(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad and value.grad_fn is not None:
            yield value
    elif isinstance(value, dict) and depth < 8:
        for item in value.values():
            yield from _differentiable(item, depth + 1)
    elif isinstance(value, list | tuple) and depth < 8:
        for item in value:
            yield from _differentiable(item, depth + 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module) and depth < 8:
        yield from _differentiable(vars(value), depth + 1)
