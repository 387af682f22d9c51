"""Recurrent layers that torch's lowering to ATen does not compute as eager mode does.

AOTAutograd takes ``lstm``, ``gru`` and ``rnn`` apart by decompositions in Python.  They leave out
dropout between layers, and up to torch 2.11 give final states of an LSTM one dimension too many
where oneDNN has no kernel for it; what an LSTM on the CPU saves for its backward, AOTAutograd does
not take; sequences of different lengths have sizes that nothing names.  On a GPU each step of a
sequence would be operators of its own in place of cuDNN's one kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from magjit.plugin.fx_nodes import enables_gradients, graphs_of

logger = logging.getLogger(__name__)

__all__ = ["recurrent_as_it_is"]

_LAYERS = ("gru", "lstm", "rnn_relu", "rnn_tanh")
_SAID = "magjit_runs_as_it_is"
"""In the ``meta`` of a graph: what the log has said of it."""


def recurrent_as_it_is(gm: Any, example_inputs: Sequence[Any]) -> bool:
    """Whether a graph has recurrent layers that are right only as they are.

    Such a graph is to be called, not lowered.  The log says why, once for each.

    Args:
        gm: torch-level, as ``Backend.compile`` is given it.
        example_inputs: as ``Backend.compile`` is given them, in its grad mode.
    """
    reason = _reason(gm, example_inputs)
    said = getattr(gm, "meta", {})
    if reason is not None and said.get(_SAID) != reason:
        said[_SAID] = reason
        logger.info("a graph runs as it is: %s", reason)
    return reason is not None


def _reason(gm: Any, example_inputs: Sequence[Any]) -> str | None:
    layers = [node for graph in graphs_of(gm) for node in graph.nodes if _is_recurrent(node)]
    if not layers:
        return None
    tensors = [one for one in example_inputs if isinstance(one, torch.Tensor)]
    if any(one.device.type != "cpu" for one in tensors):
        return "a recurrent layer is one kernel on a GPU"
    trains = any(one.requires_grad for one in tensors)
    trains = trains and (torch.is_grad_enabled() or enables_gradients(gm))
    plain = all(one.dtype == torch.float32 for one in tensors if one.dtype.is_floating_point)
    return next(filter(None, (_reason_of(one, trains, plain) for one in layers)), None)


def _is_recurrent(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _LAYERS


def _reason_of(layer: Node, trains: bool, plain: bool) -> str | None:
    """Of one layer on a CPU: ``(input, state, weights, biases, layers, dropout, train, …)``.

    Args:
        layer: a call of torch's function.
        trains: whether it has a backward.
        plain: whether all is float32.
    """
    if not isinstance(layer.args[3], bool):
        return "sequences of different lengths"
    weights, biased, count, dropout, train, both = layer.args[2:8]
    if not isinstance(count, int) or (count > 1 and train and dropout != 0):
        return "dropout between recurrent layers"
    if getattr(layer.target, "__name__", "") != "lstm":
        return None
    each = 4 if biased else 2
    assert isinstance(weights, (list, tuple))
    if trains or not plain or len(weights) != each * count * (2 if both else 1):
        return "an LSTM that oneDNN has no kernel for, or none with a backward"
    return None
