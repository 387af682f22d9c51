"""What operators make of metadata, remembered: the layers of a network ask the same again.

A fake tensor costs about a millisecond an operator where sizes are symbols, since each size is
an expression that torch simplifies and compares. For operators whose results' metadata depends on
their operands' metadata alone, the fake result of the first call stands for those of all others:
the shape environment has every guard from the first one. An operator that changes metadata in
place would change all of them; `MetadataMemo.watched` notices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from magjit.plugin import TensorInput
from magjit.plugin.fake_layouts import Undescribed, described

_PURE = frozenset(
    {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "einsum", "embedding", "bilinear"}
    | {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
    | {"batch_norm", "layer_norm", "group_norm", "rms_norm", "instance_norm", "normalize"}
    | {"softmax", "log_softmax", "gelu", "relu", "relu6", "silu", "mish", "elu", "leaky_relu"}
    | {"hardswish", "hardsigmoid", "hardtanh", "softplus", "glu", "prelu", "tanh", "sigmoid"}
    | {"erf", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "abs", "neg", "reciprocal", "square"}
    | {"add", "sub", "mul", "div", "truediv", "floordiv", "mod", "remainder", "pow", "addcmul"}
    | {"radd", "rsub", "rmul", "rtruediv", "rpow", "clamp", "clip", "maximum", "minimum"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "invert", "and", "or", "xor", "where", "masked_fill"}
    | {"logical_and", "logical_or", "logical_not", "isnan", "isinf", "lerp"}
    | {"view", "reshape", "flatten", "unflatten", "expand", "expand_as", "view_as", "reshape_as"}
    | {"permute", "transpose", "t", "unsqueeze", "squeeze", "select", "narrow", "getitem"}
    | {"contiguous", "clone", "detach", "to", "type_as", "float", "half", "bfloat16", "double"}
    | {"long", "int", "bool", "cat", "stack", "chunk", "split", "unbind", "repeat", "pad", "roll"}
    | {"gather", "index_select", "mean", "sum", "var", "std", "amax", "amin", "cumsum", "norm"}
    | {"dropout", "zeros_like", "ones_like", "empty_like", "full_like", "triu", "tril", "flip"}
    | {"max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d"}
    | {"interpolate", "pixel_shuffle", "pixel_unshuffle", "scaled_dot_product_attention"}
)
"""Functions of torch of which the results' metadata follows from the operands'."""


class MetadataMemo:
    """Fake results by function and metadata, for one run with one shape environment."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}
        self._keys: dict[int, tuple[Hashable, Any]] = {}
        self._shared: set[int] = set()

    def key(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Hashable:
        """What the result's metadata depends on; None where that is more than can be compared."""
        name = getattr(func, "__name__", "").removeprefix("__").removesuffix("__")
        if name not in _PURE or "out" in kwargs:
            return None
        try:
            operands = tuple(map(described, args))
            named = tuple((key, described(kwargs[key])) for key in sorted(kwargs))
            found = (func, operands, named, _state(name))
            hash(found)
        except (Undescribed, TypeError):
            return None
        return found

    def input_key(self, given: TensorInput) -> Hashable:
        """The same of a tensor from outside; None where it is no plain one or has symbols."""
        description = given.description
        free = (given.dynamic_dims | given.maybe_dynamic_dims) - given.static_dims
        plain = (
            description is not None
            and description.layout is torch.strided
            and description.type is None
            and description.storage is not None
            and (given.static or not free)
            and not (description.is_view or description.is_nested or description.is_functional)
            and not (description.is_functorch_wrapped or description.is_traceable_wrapper_subclass)
        )
        if not plain or description is None or description.storage is None:
            return None
        marks = (
            description.is_leaf,
            description.is_inference,
            description.is_conj,
            description.is_neg,
        )
        return (
            *(tuple(given.size), given.stride, given.storage_offset, given.dtype, given.device),
            *(given.requires_grad, given.is_parameter, description.storage.size, marks),
        )

    def find(self, key: Hashable) -> Any:
        """The fake result of an earlier call, which from now on stands for several; or None."""
        made = None if key is None else self._found.get(key)
        if made is not None:
            self._shared.update(map(id, _tensors(made)))
        return made

    def keep(self, key: Hashable, made: Any, operands: Any) -> None:
        """Remembers a fake result, unless it has sizes that its operands do not have."""
        if key is None:
            return
        tensors = list(_tensors(made))
        if not tensors or not all(map(_is_plain, tensors)):
            return
        if _symbols(tensors) <= _symbols(_tensors(operands)):
            self._found[key] = made
            for one in tensors:
                self._keys[id(one)] = (key, one)

    def watched(self, operands: Any) -> Callable[[], bool]:
        """Called before a function that may change metadata in place.

        Returns:
            Whether it has changed what stands for several tensors; to be called after it.
        """
        before = [(one, described(one)) for one in _tensors(operands) if id(one) in self._keys]

        def changed() -> bool:
            found = [one for one, old in before if described(one) != old]
            for one in found:
                self._found.pop(self._keys.pop(id(one))[0], None)
            return any(id(one) in self._shared for one in found)

        return changed


def _is_plain(value: Any) -> bool:
    return type(value) is FakeTensor and value.layout is torch.strided


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _symbols(tensors: Any) -> set[Any]:
    found: set[Any] = set()
    for one in tensors:
        for size in (*one.size(), *one.stride(), one.storage_offset()):
            if type(size) is not int:
                found |= size.node.expr.free_symbols
    return found


def _state(name: str) -> Hashable:
    """What of torch's state the metadata of results depends on."""
    modes = tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )
    kernels: Hashable = None
    if name == "scaled_dot_product_attention":
        kernels = (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        )
    level = torch._C._functorch.maybe_current_level()
    return (modes, torch.get_default_dtype(), level, kernels)
