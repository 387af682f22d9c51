"""The protocol of a case: six steps, the same for every compiler.

    1  eager twice                          does it run, is it deterministic, is it dynamic
    2  capture                              equal to eager
    3  fresh inputs of the same shapes      equal to eager, nothing captured anew
    4  a second instance, other weights     equal to eager, its first call, too, if it keeps state
    5  training with backward               results and gradients equal to eager, twice
    6  another batch size                   equal to eager where eager accepts it

Whole = steps 2 and 3 hold with one graph of torch operators only, and the replay dispatches the
ATen operators that eager dispatches (asked where the backend is ``eager``; others have their own).

A program that sets itself up in its first call (it fills a cache, makes a buffer) goes another way
in its second, so that step 3 captures again. It is not whole; whether it would be, counted from its
second call on, is told beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from torch import nn

from paritybench_runner import operators
from paritybench_runner.compilers import Attempt, Compiler, Problem, Refused
from paritybench_runner.corpus import describe
from paritybench_runner.dynamic import Watch
from paritybench_runner.trial import (
    FRESH_INPUTS,
    INPUTS,
    MORE_INPUTS,
    NOTHING,
    OTHER_WEIGHTS,
    WEIGHTS,
    Move,
    Outcome,
    Trial,
)
from paritybench_runner.values import first_difference, frozen, state_of

STEPS = 6
SETTLES = "captured again, whole from then on"
_AS_EAGER = "eager"
"""The backend that dispatches what a graph has, for each compiler."""
OUTCOMES = ("whole", "splits", "refused", "wrong", "crashed", "timeout")


@dataclass(slots=True)
class Eager:
    """What step 1 found."""

    status: str = "runs"
    """`runs`, `construct` (fails to construct), `inputs`, `eager` (fails to run) or `timeout`."""
    reason: str = ""
    deterministic: bool = True
    difference: str = ""
    dynamic: str = ""
    eager_ms: float = 0.0


@dataclass(slots=True)
class Result:
    """What one compiler did with one case."""

    compiler: str
    outcome: str = "splits"
    whole: bool = False
    step: int = 2
    reason: str = ""
    location: str = ""
    capture_ms: float = 0.0
    graphs: int = 0
    operators: int = 0
    steps: dict[int, str] = field(default_factory=dict)
    dispatched: int = 0
    """ATen operators that a later call has dispatched, views left out."""
    in_graphs: int = 0
    """How many of them ran in compiled graphs; 0 for compilers that are not watched so far."""
    """Step → `held`, `n/a: reason` or what went wrong."""

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


class Failed(Exception):
    """A step did not hold."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


# -- step 1 -------------------------------------------------------------------------------------


def run_eagerly(trial: Trial) -> Eager:
    """Step 1; the second of its runs is watched for what makes a program dynamic."""
    found = Eager()
    try:
        module = trial.build()
    except Exception as error:
        return Eager("construct", describe(error))
    try:
        trial.inputs(Move())
    except Exception as error:
        return Eager("inputs", describe(error))
    first = trial.play(module, module, Move())
    found.eager_ms = trial.call_ms
    if first.raised is not None:
        return Eager("eager", describe(first.raised))
    watch = Watch()
    fresh = trial.build()
    before = frozen(state_of(fresh))
    again = trial.play(fresh, fresh, Move(), within=watch)
    trial.keeps_state = first_difference(before, again.state) is not None
    found.dynamic = watch.found or ""
    if again.raised is not None:
        found.reason = f"not known whether it is dynamic: {describe(again.raised)}"
    if again.differs_from(first) is not None:
        # The watching may have done this.
        found.difference = _fresh(trial).differs_from(first) or ""
    found.deterministic = not found.difference
    trial.ready = module, first
    return found


def _fresh(trial: Trial) -> Outcome:
    module = trial.build()
    return trial.play(module, module, Move())


# -- steps 2 to 6 -------------------------------------------------------------------------------


class Pair:
    """An eager module and a compiled one, equally built, that go through the same moves."""

    def __init__(
        self,
        trial: Trial,
        compiler: Compiler,
        backend: str,
        *,
        whole: bool,
        weights: int = WEIGHTS,
        training: bool = False,
    ) -> None:
        self.trial = trial
        self.weights = weights
        self._first: Outcome | None = None
        if trial.ready is not None and weights == WEIGHTS and not training:
            (self.eager, self._first), trial.ready = trial.ready, None
        else:
            self.eager = trial.build(weights, training=training)
        self.module: nn.Module = trial.build(weights, training=training)
        self.moves: list[Move] = []
        self.steady = True
        started = time.perf_counter()
        try:
            self.attempt: Attempt = compiler.compile(self.module, backend, whole=whole)
        except Refused as error:
            raise Failed("refused", str(error)) from error
        except Exception as error:
            raise Failed("crashed", describe(error)) from error
        self.compile_ms = (time.perf_counter() - started) * 1e3
        self.call_ms = 0.0

    def expected(self, move: Move, within: AbstractContextManager[Any] = NOTHING) -> Outcome:
        """What eager does with the next move."""
        self.moves.append(move)
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return self.trial.play(self.eager, self.eager, move, within=within)

    def make(self, move: Move) -> None:
        """Make the next move in the compiled world alone, where eager's would change nothing.

        Raises:
            Failed: it raises, and eager does not.
        """
        self.moves.append(move)
        actual = self._play(move)
        if actual.raised is not None:
            again = self.trial.replayed(self.weights, self.eager.training, self.moves)
            if found := actual.differs_from(again):
                raise Failed("crashed", found)

    def _play(self, move: Move, within: AbstractContextManager[Any] = NOTHING) -> Outcome:
        return self.trial.play(
            self.attempt.call,
            self.module,
            move,
            attributes=self.attempt.attributes_visible,
            within=within,
        )

    def check(
        self,
        move: Move,
        expected: Outcome | None = None,
        within: AbstractContextManager[Any] = NOTHING,
    ) -> None:
        """Make the next move in both worlds and compare.

        Raises:
            Failed: the compiled world does something else, and eager does always the same.
        """
        expected = expected or self.expected(move)
        actual = self._play(move, within)
        self.call_ms = self.trial.call_ms
        found = actual.differs_from(expected)
        if found is None:
            return
        made = self.weights, self.eager.training, self.moves
        again = self.trial.replayed(*made)
        if again.differs_from(expected) is None:
            again = self.trial.replayed_in_filled_memory(*made)
        if again.differs_from(expected) is not None:
            # Chance, memory that nobody has written, or state that outlives a module, in globals
            # of the file for example.
            self.steady = False
            if again.raised is not None or actual.differs_from(again) is None:
                return
            found = actual.differs_from(expected, values=False)
        if found is not None:
            crashed = actual.raised is not None and expected.raised is None
            raise Failed("crashed" if crashed else "wrong", found)


class CompilerRun:
    """Steps 2 to 6 of one compiler with one case."""

    def __init__(
        self, trial: Trial, compiler: Compiler, backend: str, last_step: int, first_step: int = 2
    ) -> None:
        self.trial = trial
        self.compiler = compiler
        self.backend = backend
        self.last_step = last_step
        self.first_step = first_step
        self.result = Result(compiler.name)

    def run(self) -> Result:
        """All steps from the first to the last; without steps 2 and 3 nothing is called whole."""
        result = self.result
        pair: Pair | None = None
        try:
            if self.first_step <= 3:
                pair = self._whole_or_not()
            else:
                result.reason = "steps 2 and 3 were left out"
        except Failed as failed:
            return self._fail(result.step, failed)
        steps: dict[int, Callable[[], str]] = {
            # The last step goes on with the modules of the first ones, which are then dropped.
            6: partial(self._larger_batch, pair),
            4: self._second_instance,
            5: self._training,
        }
        del pair
        for step in [step for step in steps if self.first_step <= step <= self.last_step]:
            try:
                result.steps[step] = steps.pop(step)()
            except Failed as failed:
                return self._fail(step, failed)
            except Exception as error:
                # Eager itself cannot: it has too little memory, or builds no second module.
                result.steps[step] = f"n/a: {describe(error)}"
        return result

    def _fail(self, step: int, failed: Failed) -> Result:
        result = self.result
        result.steps[step] = failed.reason
        result.outcome, result.step = failed.outcome, step
        result.reason, result.location = failed.reason, ""
        return result

    def _whole_or_not(self) -> Pair:
        """Steps 2 and 3; once more without insisting on one graph where that failed."""
        try:
            pair = self._pair(whole=True)
            problem = self._capture_and_replay(pair)
        except Failed as failed:
            if not self.compiler.insists or failed.outcome == "wrong":
                raise
            problem = Problem(failed.reason)
            self.compiler.reset()
            pair = self._pair(whole=False)
            self._capture_and_replay(pair)
        result = self.result
        if problem is None:
            result.outcome, result.whole = "whole", True
        else:
            result.outcome, result.reason, result.location = (
                "splits",
                problem.reason,
                problem.location,
            )
        return pair

    def _pair(self, **options: Any) -> Pair:
        return Pair(self.trial, self.compiler, self.backend, **options)

    def _capture_and_replay(self, pair: Pair) -> Problem | None:
        result, attempt = self.result, pair.attempt
        result.step = 2
        pair.check(Move(INPUTS))
        result.capture_ms = pair.compile_ms + pair.call_ms
        result.steps[2] = "held"
        captures = attempt.captures()
        result.graphs = attempt.graph_count()
        result.operators = sum(map(operators.operator_count, attempt.graphs))
        if self.last_step < 3:
            return attempt.problem()
        result.step = 3
        unexplained = self._watched(pair, Move(FRESH_INPUTS))
        again = attempt.captures() - captures
        result.steps[3] = "held" if not again else "captured again"
        if again:
            captures = attempt.captures()
            if self._settles(pair):
                result.steps[3] = SETTLES
            elif attempt.captures() > captures:
                self._watched(pair, Move(MORE_INPUTS))  # what is recorded now is replayed
        return attempt.problem() or self._impurity(attempt, again, unexplained)

    def _watched(self, pair: Pair, move: Move) -> Callable[[], str | None]:
        """Make a move; what is given tells how the replay's operators differ from eager's.

        Backends that fuse or decompose have operators of their own: these are not compared.
        """
        eager, replay = operators.Dispatched(), operators.Dispatched()
        pair.check(move, pair.expected(move, eager), replay)
        self.result.dispatched = sum(replay.counts.values())
        self.result.in_graphs = replay.in_graphs
        trial, before = self.trial, pair.moves[:-1]

        def unexplained() -> str | None:
            if self.backend != _AS_EAGER or eager.counts == replay.counts:
                return None
            module = trial.build()
            for made in before:
                trial.call(module, trial.inputs(made))
            inputs = trial.inputs(move)
            return operators.unexplained(
                eager.counts, replay.counts, lambda: trial.call(module, inputs)
            )

        return unexplained

    def _settles(self, pair: Pair) -> bool:
        """Whether what step 3 captured anew serves the calls that follow."""
        attempt = pair.attempt
        captures = attempt.captures()
        unexplained = self._watched(pair, Move(MORE_INPUTS))
        if attempt.captures() > captures or attempt.problem() or attempt.opaque():
            return False
        return unexplained() is None

    def _impurity(
        self, attempt: Attempt, again: int, unexplained: Callable[[], str | None]
    ) -> Problem | None:
        """What keeps a capture without a split from being whole."""
        if again:
            return Problem("captured again for inputs of the same shapes", attempt.missed())
        if opaque := attempt.opaque():
            return Problem(f"the graph has nodes that are no torch operators: {opaque[0]}")
        if attempt.graph_count() > 1:
            return Problem(f"{attempt.graph_count()} graphs")
        found = unexplained()
        return Problem(f"other operators than eager: {found}") if found else None

    def _second_instance(self) -> str:
        pair = self._pair(whole=False, weights=OTHER_WEIGHTS)
        if self.trial.keeps_state:
            pair.check(Move(INPUTS))
        else:
            pair.make(Move(INPUTS))
        pair.check(Move(FRESH_INPUTS))
        return _held(pair)

    def _training(self) -> str:
        first = Move(INPUTS)
        try:
            pair = self._pair(whole=False, training=True)
        except Failed as failed:
            if failed.outcome == "refused":
                return "n/a: refused"
            raise
        expected = pair.expected(first)
        if expected.raised is not None:
            return f"n/a: {describe(expected.raised)}"
        if expected.gradient_missing:
            return "n/a: nothing to differentiate"
        pair.check(first, expected)
        pair.check(Move(FRESH_INPUTS))
        return _held(pair)

    def _larger_batch(self, pair: Pair | None) -> str:
        if pair is None or self.compiler.insists:
            # It may refuse here what it takes in parts: that is no fault of its results.
            pair = self._pair(whole=False)
            pair.check(Move(INPUTS))
        move = Move(FRESH_INPUTS, larger_batch=True)
        try:
            self.trial.inputs(move)
            expected = pair.expected(move)
        except Exception as error:
            return f"n/a: {describe(error)}"
        if expected.raised is not None:
            return f"n/a: {describe(expected.raised)}"
        pair.check(move, expected)
        return _held(pair)


def _held(pair: Pair) -> str:
    return "held" if pair.steady else "n/a: eager is not deterministic"
