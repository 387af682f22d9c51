"""Inductor's own partitioner, or a user's, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule

import magjit.plugin.saved as saved

__all__ = ["KeepingOldValues"]


class KeepingOldValues(CustomPartitionerFn):
    """A partitioner whose forward graphs keep copies of inputs that change.

    Args:
        given: a user's (``custom_partitioner_fn``); Inductor's where there is none.
    """

    def __init__(self, given: CustomPartitionerFn | None) -> None:
        self._given = given  # no more: caches pickle it

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        split = saved.keeping_old_values(self._given or min_cut_rematerialization_partition)
        return split(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """What a cache of compiled graphs tells partitioners apart by; None keeps none."""
        own = get_hash_for_files((__file__, str(Path(saved.__file__))))
        if self._given is None:
            return own
        theirs = self._given.uuid()
        return None if theirs is None else (own, theirs)
