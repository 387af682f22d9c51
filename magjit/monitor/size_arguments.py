"""Tensors that a call uses as numbers: ``x[:n]``, ``torch.arange(lengths.max())``.

Torch reads their data, and the shape of the result depends on it. Which arguments of an operator
are integers, its schemas say.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

_OF_DATA = frozenset({"tensor", "as_tensor", "asarray", "new_tensor", "__setitem__"})
_SAME_SHAPE = frozenset({"select", "roll", "tril", "triu"})
"""What their integers say does not show in the shape of the result."""
_NUMBERS = frozenset({"arange", "range", "interpolate", "upsample"})
"""Their sizes come from numbers of any kind."""
_INTS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
MANY = frozenset(
    {"split", "chunk", "tensor_split", "unbind", "hsplit", "vsplit", "dsplit", "unsafe_split"}
    | {"split_with_sizes", "unsafe_chunk", "unsafe_split_with_sizes", "__iter__"}
)
"""How many results these have depends on sizes."""
_OTHER_DIMENSIONS = frozenset({"squeeze", "squeeze_", "flatten"})
"""How many dimensions the results of these have depends on sizes, or on numbers."""
_SIZES = frozenset({"numel", "nelement", "__len__", "is_contiguous", "storage_offset"})
_SIZES |= {"shape", "size", "stride", "nbytes", "is_same_size"}
READ_BY = (frozenset[str](), _SIZES, _SIZES | {"dim", "ndim", "ndimension"})
"""Metadata that cannot be read, by what of a shape depends on data: see `Value.dynamic`."""


def tensors_as_sizes(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors of a call that stand where torch wants integers that shapes depend on."""
    if name == "__getitem__":
        yield from _in_slices(args[1] if len(args) == 2 else ())
        return
    if name in _OF_DATA or name in _SAME_SHAPE:
        return
    for place, value in (*enumerate(args), *kwargs.items()):
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if (
                isinstance(part, torch.Tensor)
                and _is_number(name, part)
                and _wants_int(name, place)
            ):
                yield part


def _in_slices(index: Any) -> Iterator[torch.Tensor]:
    for part in index if isinstance(index, tuple) else (index,):
        if type(part) is slice:
            bounds = (part.start, part.stop, part.step)
            yield from (bound for bound in bounds if isinstance(bound, torch.Tensor))


def _is_number(name: str, tensor: torch.Tensor) -> bool:
    return (tensor.dtype in _INTS or name in _NUMBERS) and tensor.dim() <= 1 and tensor.numel() == 1


@lru_cache(maxsize=4096)
def _wants_int(name: str, place: int | str) -> bool:
    """Whether an operator has an integer there, and in no overload a tensor.

    Of functions without a schema, all but the first argument may be one.
    """
    found = [kind for kinds in _kinds(name) if (kind := _at(kinds, place)) is not None]
    if not found:
        return place != 0
    if any("Tensor" in kind for kind in found):
        return False
    return any("int" in kind or (name in _NUMBERS and kind == "number") for kind in found)


def _at(arguments: tuple[tuple[str, str, bool], ...], place: int | str) -> str | None:
    if isinstance(place, str):
        return next((kind for name, kind, _ in arguments if name == place), None)
    positional = [kind for _, kind, named in arguments if not named]
    if place < len(positional):
        return positional[place]
    # sizes may be given one by one
    return positional[-1] if positional and "List[int]" in positional[-1] else None


@lru_cache(maxsize=1024)
def _kinds(name: str) -> tuple[tuple[tuple[str, str, bool], ...], ...]:
    """Name, type and whether it has to be named of each argument, of each schema."""
    found = torch._C._jit_get_schemas_for_operator(f"aten::{name.rstrip('_') or name}")
    return tuple(
        tuple((one.name, str(one.type), one.kwarg_only) for one in schema.arguments)
        for schema in found
        if not any(str(one.type).startswith("List[t]") for one in schema.arguments)
    )


def shape_after(func: Any, depends: int) -> int:
    """What of the shapes of an operator's results depends on data, by what of its operands' does.

    See `Value.dynamic`.
    """
    return 2 if depends and getattr(func, "__name__", "") in _OTHER_DIMENSIONS else depends
