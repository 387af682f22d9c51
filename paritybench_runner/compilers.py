"""The compilers under test behind one interface: compile a module, count what was captured.

Compiler = name, warm_up(), compile(module, backend) -> Attempt
Attempt  = call(...), graphs, captures(), problem()
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch._dynamo
import torch._dynamo.utils
from torch import nn
from torch.fx import GraphModule

import magjit
from magjit.plugin import (
    Backend,
    BackendContext,
    CompiledGraph,
    ExampleInputs,
    FloatInputs,
    resolve,
)
from paritybench_runner.corpus import describe
from paritybench_runner.operators import marked, opaque_nodes


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a compiler did not take a program whole, and where in the program."""

    reason: str
    location: str = ""


class Refused(Exception):
    """A compiler that has no other way than the whole graph does not take a program."""


class Attempt(Protocol):
    """One compiled module."""

    graphs: list[GraphModule]
    attributes_visible: bool
    """Whether plain attributes that a call sets are found on the module itself."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        ...

    def graph_count(self) -> int:
        """How many graphs a call runs in."""
        ...

    def captures(self) -> int:
        """How often it captured so far; that of the whole process where nothing else counts."""
        ...

    def problem(self) -> Problem | None:
        """Why it is not one graph, as far as it told so far."""
        ...

    def missed(self) -> str:
        """Why it captured again, where it tells."""
        ...

    def opaque(self) -> list[str]:
        """What in its graphs is no torch operator."""
        ...


class Compiler(Protocol):
    """What compiles modules."""

    name: str
    insists: bool
    """Whether it raises where it is told to make one graph and cannot."""

    def warm_up(self) -> None:
        """Do once what a process needs once; runs before the fork, on the CPU."""
        ...

    def compile(self, module: nn.Module, backend: str, *, whole: bool) -> Attempt:
        """Compile; with ``whole`` a compiler that can insists on one graph."""
        ...

    def reset(self) -> None:
        """Forget what belongs to the last module."""
        ...


def _unrelated(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


# -- MagJIT -------------------------------------------------------------------------------------


class _WatchedBackend:
    """Keeps the graphs that another backend gets, and marks where they run."""

    def __init__(self, backend: Backend, graphs: list[GraphModule]) -> None:
        self._backend = backend
        self._graphs = graphs
        self.name = backend.name
        wants = getattr(backend, "example_inputs", ExampleInputs.FAKE)
        self.example_inputs: ExampleInputs = wants
        self.changes_graph: bool = getattr(backend, "changes_graph", True)
        self.exact_random: bool = getattr(backend, "exact_random", False)
        self.sizes_of_data: bool = getattr(backend, "sizes_of_data", False)
        floats = getattr(backend, "float_inputs", FloatInputs.TENSORS)
        self.float_inputs: FloatInputs = floats

    def supports(self, gm: GraphModule) -> list[str]:
        return self._backend.supports(gm)

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        self._graphs.append(gm)
        return marked(self._backend.compile(gm, example_inputs, context))


class _Told(logging.Handler):
    """What MagJIT logs when a program is cut or runs eagerly, and when it is captured again."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        self.again: list[str] = []

    def clear(self) -> None:
        self.texts.clear()
        self.again.clear()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING or _IS_CUT.match(text):
            self.texts.append(text)
        elif _AGAIN.match(text):
            self.again.append(text)


class _MagJITAttempt:
    attributes_visible = True

    def __init__(self, module: nn.Module, backend: str, told: _Told) -> None:
        self.graphs: list[GraphModule] = []
        self._told = told
        told.clear()
        self._compiled = magjit.compile(
            module, backend=_WatchedBackend(resolve(backend), self.graphs)
        )
        self._as_it_is = self._compiled is module

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def graph_count(self) -> int:
        if self._as_it_is:
            return 0
        # Records are ways that a call may go; only regions are parts of one call.
        return min(len(self.graphs), 1 + magjit.stats(self._compiled).regions)

    def captures(self) -> int:
        return 0 if self._as_it_is else magjit.stats(self._compiled).captures

    def problem(self) -> Problem | None:
        if self._as_it_is:
            return Problem("compiles no TorchScript")
        counts = magjit.stats(self._compiled)
        if not counts.splits and not counts.eager_calls and counts.captures:
            return None
        if not self._told.texts:
            return Problem("a call ran eagerly without saying why")
        return _told(self._told.texts[0])

    def missed(self) -> str:
        return _AGAIN.sub("", self._told.again[0]) if self._told.again else ""

    def opaque(self) -> list[str]:
        return _opaque(self.graphs)


_AGAIN = re.compile(r"^.* is captured again: ")
_CUT = r"\S+ is cut|.*, is done eagerly from the next capture on"
_IS_CUT = re.compile(rf"^(?:{_CUT}): ")
_RUNS_EAGERLY = re.compile(
    rf"^(?:\S+ runs eagerly|{_CUT}): (.*?)(?: at (\S+:\d+ in \S+))?$", re.DOTALL
)


def _told(text: str) -> Problem:
    text = text.split("\n  way out:")[0]
    match = _RUNS_EAGERLY.match(text)
    return Problem(match[1], match[2] or "") if match else Problem(text)


class MagJIT:
    """This project."""

    name = "magjit"
    insists = False

    def __init__(self) -> None:
        self._told = _Told()

    def warm_up(self) -> None:
        magjit.config.update(single_operators=True)  # so that each graph is watched
        compiled = magjit.compile(_unrelated, backend="eager")
        for _ in range(2):
            compiled(torch.ones(3))

    def compile(self, module: nn.Module, backend: str, *, whole: bool) -> Attempt:
        # It runs the program in either mode and counts its splits: no second try is needed.
        logger = logging.getLogger("magjit")
        logger.propagate = False
        logger.setLevel(logging.INFO)
        if self._told not in logger.handlers:
            logger.addHandler(self._told)
        return _MagJITAttempt(module, backend, self._told)

    def reset(self) -> None:
        magjit.reset()


# -- torch.compile ------------------------------------------------------------------------------


class _DynamoAttempt:
    attributes_visible = True

    def __init__(self, module: nn.Module, backend: str, whole: bool) -> None:
        self.graphs: list[GraphModule] = []
        self._whole = whole
        made: Callable[..., Any] = torch._dynamo.lookup_backend(backend)

        def watched(gm: GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
            self.graphs.append(gm)
            compiled: Callable[..., Any] = made(gm, example_inputs)
            return compiled

        self._compiled = torch.compile(module, backend=watched, fullgraph=whole)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def graph_count(self) -> int:
        return len(self.graphs)

    def captures(self) -> int:
        frames = torch._dynamo.utils.counters["frames"]
        return int(frames.get("total", 0)) + len(self.graphs)

    def problem(self) -> Problem | None:
        return None if self._whole else Problem("not compiled with fullgraph=True")

    def missed(self) -> str:
        return ""

    def opaque(self) -> list[str]:
        return _opaque(self.graphs)


class Dynamo:
    """torch.compile's front end."""

    name = "dynamo"
    insists = True

    def warm_up(self) -> None:
        compiled = torch.compile(_unrelated, backend="eager")
        for _ in range(2):
            compiled(torch.ones(3))
        self.reset()

    def compile(self, module: nn.Module, backend: str, *, whole: bool) -> Attempt:
        for name in ("torch._dynamo", "torch"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        return _DynamoAttempt(module, backend, whole)

    def reset(self) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


# -- TorchScript --------------------------------------------------------------------------------


class _ScriptAttempt:
    attributes_visible = False

    def __init__(self, module: nn.Module) -> None:
        self.graphs: list[GraphModule] = []
        try:
            self._compiled = torch.jit.script(module)
        except Exception as error:
            raise Refused(describe(error)) from error

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def graph_count(self) -> int:
        return 1

    def captures(self) -> int:
        return 1

    def problem(self) -> Problem | None:
        return None

    def missed(self) -> str:
        return ""

    def opaque(self) -> list[str]:
        graph = getattr(self._compiled, "inlined_graph", None)
        if graph is None:
            return ["no graph"]
        kinds = ("prim::PythonOp", "prim::CallFunction", "prim::CallMethod")
        return [node.kind() for kind in kinds for node in graph.findAllNodes(kind, recurse=True)]


class TorchScript:
    """`torch.jit.script`."""

    name = "torchscript"
    insists = False

    def warm_up(self) -> None:
        torch.jit.script(_unrelated)(torch.ones(3))

    def compile(self, module: nn.Module, backend: str, *, whole: bool) -> Attempt:
        return _ScriptAttempt(module)

    def reset(self) -> None:
        """Nothing is kept by the process that could be dropped without harm."""


def _opaque(graphs: Sequence[GraphModule]) -> list[str]:
    return [name for graph in graphs for name in opaque_nodes(graph)]


COMPILERS: dict[str, Callable[[], Compiler]] = {
    "magjit": MagJIT,
    "dynamo": Dynamo,
    "torchscript": TorchScript,
}
