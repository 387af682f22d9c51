"""Results of ATen operators on fake tensors, remembered: a network's layers ask the same again.

    FakeResults  ::= key -> layout*
    key          ::= operator, and each operand as its layout or as itself
    layout       ::= sizes, strides, offset, dtype, device, flags

What a fake tensor costs is the way through torch's dispatcher, not the tensor. An operator that
makes new tensors, of which nothing depends on data, makes equal ones of equal operands; the guards
that it asks for are there since the first time. They are made anew at each call, so that no two
results are one object or share memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from magjit.plugin.fake_layouts import Layout, Undescribed, described, has_symbols, layout_of
from magjit.plugin.symbolic_results import symbolic_result, symbolic_view

__all__ = ["FakeResults"]

_BY_DATA = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


class FakeResults:
    """For one pass over a program, in which no operand's metadata is changed in place.

    Args:
        fake_mode: of all tensors; their sizes may be its symbols.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._found: dict[Hashable, tuple[bool, list[Layout]]] = {}
        self._lasting: dict[Any, bool] = {}
        self._stopped = False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``, for an operator of ATen."""
        if not self._may_be_remembered(func):
            viewed = symbolic_view(self._fake_mode, func, args)
            return func(*args, **kwargs) if viewed is None else viewed
        try:
            named = [(name, described(kwargs[name])) for name in kwargs]
            key = (func, tuple(map(described, args)), tuple(named))
            found = self._found.get(key)
        except (Undescribed, TypeError):  # a TypeError: no hash
            return func(*args, **kwargs)
        if found is not None:
            several, layouts = found
            again = [self.made(layout) for layout in layouts]
            return tuple(again) if several else again[0]
        symbols = has_symbols(key)
        if symbols:
            result = symbolic_result(self._fake_mode, func, args, kwargs)
            if result is not None:
                return result
        # What the decompositions in Python are for, sizes that are symbols, none of these has.
        with nullcontext() if symbols else no_python_dispatcher():
            result = func(*args, **kwargs)
        several = isinstance(result, tuple)
        made = [layout_of(one) for one in (result if several else (result,))]
        layouts = [one for one in made if one is not None]
        if len(layouts) == len(made):
            self._found[key] = several, layouts
        return result

    def _may_be_remembered(self, func: Any) -> bool:
        """Whether the results of an operator are new tensors that follow from layouts."""
        if self._stopped:
            return False
        lasting = self._lasting.get(func)
        if lasting is None:
            schema = func._schema
            if schema.is_mutable:
                # Perhaps metadata, and other things with it; what writes numbers has no views.
                of_aten = func.namespace == "aten"
                self._stopped = not of_aten or torch.Tag.inplace_view in func.tags
                self._lasting[func] = False
                return False
            lasting = self._lasting[func] = (
                func.namespace == "aten"
                and _BY_DATA.isdisjoint(func.tags)
                and all(one.alias_info is None for one in schema.returns)
            )
        return lasting

    def made(self, layout: Layout) -> FakeTensor:
        """A new tensor, which is no operator's result: nothing is recorded of it."""
        with in_kernel_invocation_manager(self._fake_mode):
            empty = torch.empty_strided(
                layout.size, layout.stride, dtype=layout.dtype, device="meta"
            )
        return FakeTensor(self._fake_mode, empty, layout.device)
