"""Operators on a Python float, written with a tensor without dimensions in its place.

A backend that takes no Python numbers gets a float that changes from call to call as such a tensor,
on the CPU. ATen computes with a Python float in the type that it computes the operator in, which is
also what decides the type of the result; so the tensor has a type by which neither changes::

    float32, float64   the operands' own
    integers, bool     the default type; the operand is converted to it first
    float16, bfloat16  what the operator computes in: float32 for products, which round once, and
                       the operands' own where the kernel rounds the number as well

An operator that is not here, or not for these operands, keeps its float as a constant. In comments,
`t` is that tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

__all__ = ["FloatForm", "any_float", "float_form"]

_SINGLE = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Form = Callable[..., Any]


def any_float(value: float) -> bool:
    """Whether a float may be a tensor where all may."""
    return True


@dataclass(frozen=True, slots=True)
class FloatForm:
    """How an operator takes its floats as tensors.

    Attributes:
        dtype: of these tensors.
        function: computes the same from the operator's arguments with tensors for the floats;
            None for the operator itself.
        suits: whether a float may be one of them, which is guarded.
    """

    dtype: torch.dtype
    function: Form | None = None
    suits: Callable[[float], bool] = any_float


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator's name without underscores, its arguments by name, which are floats to lift."""

    name: str
    in_place: bool
    given: Mapping[str, Any]
    lifted: frozenset[str]
    autocast: bool

    def tensor(self, name: str = "input") -> torch.Tensor | None:
        """An ordinary tensor among the arguments."""
        value = self.given.get(name)
        if not isinstance(value, torch.Tensor) or type(value) not in _PLAIN:
            return None
        return value if value.layout is torch.strided and not value.is_nested else None

    def alike(self, *names: str) -> torch.dtype | None:
        """The type of some tensors of one device, if that is one and the same."""
        found = {
            None if (one := self.tensor(name)) is None else (one.dtype, one.device)
            for name in names
        }
        alike = found.pop() if len(found) == 1 else None
        return None if alike is None else alike[0]


def float_form(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_lifted: Callable[[Any], bool],
) -> FloatForm | None:
    """The form of an operator, or None where its floats have to be constants.

    Args:
        func: the torch function that is called with ``args`` and ``kwargs``, as they are.
        is_lifted: whether an argument is a float to lift.
    """
    shown = getattr(func, "__name__", "")
    name = shown.strip("_")
    name = _OTHER_NAMES.get(name, name)
    parameters = _PARAMETERS.get(name, "").split()
    if func is torch.Tensor.where:
        parameters = ["input", "condition", "other"]
    given = dict(zip(parameters, args, strict=False)) | kwargs
    if len(args) > len(parameters) or not given.keys() <= set(parameters):
        return None
    call = _Call(
        name,
        in_place=shown.endswith("_") and (shown.startswith("__i") or not shown.startswith("__")),
        given=given,
        lifted=frozenset(key for key, value in given.items() if is_lifted(value)),
        autocast=torch._C._is_any_autocast_enabled(),
    )
    return _RULES[name](call)


# -- which numbers ------------------------------------------------------------------------------


def _fits(limit: float, value: float) -> bool:
    return not math.isfinite(value) or abs(value) <= limit


def _bounds(limit: float, least: float, value: float) -> bool:
    """Left out: what is nearest to zero, since kernels disagree on which zero is the greater one;
    and NaN, which some versions of torch take for no bound.
    """
    return math.isinf(value) or least <= abs(value) <= limit


def _is_no_special_exponent(value: float) -> bool:
    return abs(value) not in (0.0, 0.5, 1.0, 2.0, 3.0) and not math.isnan(value)


def _is_small_weight(value: float) -> bool:
    return abs(value) < 0.5


def _is_large_weight(limit: float, value: float) -> bool:
    return abs(value) >= 0.5 and _fits(limit, value)


def _named(test: Callable[..., bool], dtype: torch.dtype, *limits: float) -> Callable[..., bool]:
    def suits(value: float) -> bool:
        return test(*limits, value)

    suits.__name__ = f"{test.__name__.strip('_')}_{str(dtype).removeprefix('torch.')}"
    return suits


_KNOWN = (*_SINGLE, *_HALF)
_FITS = {dtype: _named(_fits, dtype, torch.finfo(dtype).max) for dtype in _KNOWN}
"""Torch raises for a number that is too large for these operators; a tensor would hold infinity."""
_LARGE_WEIGHT = {
    dtype: _named(_is_large_weight, dtype, torch.finfo(dtype).max) for dtype in _SINGLE
}
_BOUNDS = {
    dtype: _named(_bounds, dtype, torch.finfo(dtype).max, torch.finfo(dtype).tiny)
    for dtype in _KNOWN
}


def _into(form: Form) -> Form:
    """The form of an operator in place."""

    def in_place(input: Any, *args: Any, **kwargs: Any) -> Any:
        return input.copy_(form(input, *args, **kwargs))

    return in_place


# -- arithmetic and comparisons -----------------------------------------------------------------


def _widened(name: str, dtype: torch.dtype, x: Any, t: Any) -> Any:
    """In the type that half precision is computed in."""
    return _COMPUTED[name](x.to(torch.float32), t).to(dtype)


def _converted(name: str, x: Any, t: Any, *, dtype: torch.dtype) -> Any:
    return _COMPUTED[name](x.to(dtype), t)


_COMPUTED: dict[str, Form] = {
    "add": lambda x, t: x + t,
    "sub": lambda x, t: x - t,
    "rsub": lambda x, t: t - x,
    "mul": lambda x, t: x * t,
    "div": lambda x, t: x / t,
    "eq": lambda x, t: x == t,
    "ne": lambda x, t: x != t,
    "lt": lambda x, t: x < t,
    "le": lambda x, t: x <= t,
    "gt": lambda x, t: x > t,
    "ge": lambda x, t: x >= t,
}
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def _arithmetic(call: _Call) -> FloatForm | None:
    if "alpha" in call.given:
        return _scaled(call)
    x = call.tensor()
    if x is None or call.lifted != {"other"}:
        return None
    if x.dtype in _SINGLE:
        return FloatForm(x.dtype)
    if x.dtype in _WHOLE:
        default = torch.get_default_dtype()
        if call.in_place or default not in _SINGLE:
            return None
        return FloatForm(default, partial(_converted, call.name, dtype=default))
    if x.dtype not in _HALF:
        return None
    on_cpu = x.device.type == "cpu"
    if call.name in _COMPARISONS:  # the kernels of == and != on GPUs do not round the number
        return FloatForm(x.dtype) if on_cpu or call.name not in ("eq", "ne") else None
    if on_cpu and call.name in ("add", "sub", "rsub"):
        return FloatForm(x.dtype)  # these kernels round the number to the tensor's type
    form = partial(_widened, call.name, x.dtype)
    return FloatForm(torch.float32, _into(form) if call.in_place else form)


def _reciprocal(x: Any, t: Any) -> Any:
    """``t / x``, as torch divides a number by a tensor."""
    return x.reciprocal() * t


def _reciprocal_half(dtype: torch.dtype, x: Any, t: Any) -> Any:
    return (x.reciprocal().to(torch.float32) * t).to(dtype)


def _divided_by_tensor(call: _Call) -> FloatForm | None:
    dtype = call.alike("input")
    if call.autocast or call.lifted != {"other"}:
        return None
    if dtype in _SINGLE:
        return FloatForm(dtype, _reciprocal)
    if dtype in _HALF:
        return FloatForm(torch.float32, partial(_reciprocal_half, dtype))
    return None


def _power(call: _Call) -> FloatForm | None:
    """Torch computes some powers in ways of their own, which a tensor does not get."""
    base_is_tensor = call.tensor() is not None
    name, number = ("input", "other") if base_is_tensor else ("other", "input")
    x = call.tensor(name)
    if x is None or call.autocast or call.lifted != {number}:
        return None
    if x.dtype not in _SINGLE and (x.dtype not in _HALF or x.device.type != "cpu"):
        return None
    if base_is_tensor and call.name == "pow":
        return FloatForm(x.dtype, suits=_named(_exponent, x.dtype, torch.finfo(x.dtype).max))
    return FloatForm(x.dtype)


def _exponent(limit: float, value: float) -> bool:
    return _is_no_special_exponent(value) and _fits(limit, value)


# -- factors ------------------------------------------------------------------------------------


def _addcmul_in_place(input: Any, *args: Any, **kwargs: Any) -> Any:
    return input.addcmul_(*args, **kwargs)


def _addcdiv_in_place(input: Any, *args: Any, **kwargs: Any) -> Any:
    return input.addcdiv_(*args, **kwargs)


_ADDCMUL: dict[bool, Form] = {False: torch.addcmul, True: _addcmul_in_place}
_ADDCDIV: dict[bool, Form] = {False: torch.addcdiv, True: _addcdiv_in_place}


def _scaled(call: _Call) -> FloatForm | None:
    """A sum with a factor, which rounds once, as ``addcmul`` does where it has no other factor."""
    addcmul, subtracted = _ADDCMUL[call.in_place], call.name != "add"

    def form(input: Any, other: Any, *, alpha: Any) -> Any:
        return addcmul(input, other, -alpha if subtracted else alpha)

    dtype = call.alike("input", "other")
    if dtype not in _SINGLE or call.autocast or call.lifted != {"alpha"}:
        return None
    return FloatForm(dtype, form, _FITS[dtype])


def _of_three(call: _Call) -> FloatForm | None:
    """Kernels of the CPU begin with the factor, others end with it."""
    addcmul, addcdiv = _ADDCMUL[call.in_place], _ADDCDIV[call.in_place]
    first = addcmul if call.name == "addcmul" else addcdiv
    inner = operator.mul if call.name == "addcmul" else operator.truediv

    def factor_first(input: Any, tensor1: Any, tensor2: Any, *, value: Any) -> Any:
        return first(input, tensor1 * value, tensor2)

    def factor_last(input: Any, tensor1: Any, tensor2: Any, *, value: Any) -> Any:
        return addcmul(input, inner(tensor1, tensor2), value)

    x, dtype = call.tensor(), call.alike("input", "tensor1", "tensor2")
    if x is None or dtype not in _SINGLE or call.autocast or call.lifted != {"value"}:
        return None
    return FloatForm(dtype, factor_first if x.device.type == "cpu" else factor_last, _FITS[dtype])


def _lerp(call: _Call) -> FloatForm | None:
    """Torch has two formulas; elsewhere than on the CPU it takes no weight from there."""
    addcmul, large = _ADDCMUL[call.in_place], _lerp_large
    large = _into(large) if call.in_place else large

    def small(input: Any, end: Any, weight: Any) -> Any:
        return addcmul(input, end - input, weight)

    x, dtype = call.tensor(), call.alike("input", "end")
    if x is None or dtype not in _SINGLE or call.autocast or call.lifted != {"weight"}:
        return None
    if x.device.type == "cpu":
        return FloatForm(dtype, suits=_FITS[dtype])
    if _is_small_weight(call.given["weight"]):
        return FloatForm(dtype, small, _is_small_weight)
    return FloatForm(dtype, large, _LARGE_WEIGHT[dtype])


def _lerp_large(input: Any, end: Any, weight: Any) -> Any:
    return end - (end - input) * (1 - weight)


# -- bounds and choices -------------------------------------------------------------------------


def _clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    """One bound after the other: both at once would have to be tensors on the operand's device."""
    made = input if min is None else torch.clamp_min(input, min)
    return made if max is None else torch.clamp_max(made, max)


def _clamp_in_place(input: Any, min: Any = None, max: Any = None) -> Any:
    made = input if min is None else input.clamp_min_(min)
    return made if max is None else made.clamp_max_(max)


def _at_least(input: Any, min: Any) -> Any:
    if isinstance(min, (int, float)):
        return torch.clamp_min(input, min)
    return torch.where(input >= min, input, torch.maximum(input.detach(), min))


def _at_most(input: Any, max: Any) -> Any:
    if isinstance(max, (int, float)):
        return torch.clamp_max(input, max)
    return torch.where(input <= max, input, torch.minimum(input.detach(), max))


def _between(input: Any, min: Any = None, max: Any = None) -> Any:
    made = input if min is None else _at_least(input, min)
    return made if max is None else _at_most(made, max)


_AWAY_FROM_CPU: dict[str, Form] = {
    "clamp": _between,
    "clamp_min": _at_least,
    "clamp_max": _at_most,
}
"""Elsewhere ``clamp_min`` takes no tensor of the CPU, as comparisons, ``where`` and ``maximum`` do.

An element within the bound passes its gradient on, also one that equals it; one that is NaN stays
so, and does not.
"""


def _clamped(call: _Call) -> FloatForm | None:
    dtype = call.alike("input")
    bounds = [call.given.get(name) for name in ("min", "max")]
    if dtype not in _KNOWN or not call.lifted <= {"min", "max"}:
        return None
    if any(bound is not None and type(bound) not in (int, float) for bound in bounds):
        return None
    if call.given["input"].device.type != "cpu":
        form = _AWAY_FROM_CPU[call.name]
        return FloatForm(dtype, _into(form) if call.in_place else form, _BOUNDS[dtype])
    if call.name != "clamp":
        return FloatForm(dtype, suits=_BOUNDS[dtype])
    return FloatForm(dtype, _clamp_in_place if call.in_place else _clamp, _BOUNDS[dtype])


def _chosen(call: _Call) -> FloatForm | None:
    """``where``, ``masked_fill``, ``fill_``: numbers become elements of the tensor's type."""
    names = {"where": ("input", "other"), "masked_fill": ("input", "value")}
    first, second = names.get(call.name, ("input", "value"))
    dtype = call.alike(first) or call.alike(second)
    if dtype not in _KNOWN or len(call.lifted) != 1 or not call.lifted <= {first, second}:
        return None
    return FloatForm(dtype, suits=_FITS[dtype])


# -- new tensors --------------------------------------------------------------------------------


def _full(size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    here = fill_value if device is None else fill_value.to(device)
    return here.expand(size).clone(memory_format=torch.contiguous_format)


def _full_like(input: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return torch.empty_like(input, dtype=dtype, device=device).fill_(fill_value)


def _new_full(
    input: Any, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None
) -> Any:
    return input.new_empty(size, dtype=dtype, device=device).fill_(fill_value)


def _tensor(data: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return (data if device is None else data.to(device)).clone()


_MADE: dict[str, Form] = {
    "full": _full,
    "full_like": _full_like,
    "new_full": _new_full,
    "tensor": _tensor,
}


def _filled(call: _Call) -> FloatForm | None:
    place = "data" if call.name == "tensor" else "fill_value"
    like = call.tensor() if "input" in call.given else None
    dtype = call.given.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    if dtype not in _KNOWN or call.lifted != {place} or (like is None) is not _is_free(call):
        return None
    if like is None and call.given.get("device") is None and _default_device() != "cpu":
        return None
    return FloatForm(dtype, _MADE[call.name], _FITS[dtype])


def _is_free(call: _Call) -> bool:
    return call.name in ("full", "tensor")


def _default_device() -> str:
    return torch.get_default_device().type


# -- the table ----------------------------------------------------------------------------------

_OTHER_NAMES = {
    "iadd": "add",
    "radd": "add",
    "isub": "sub",
    "subtract": "sub",
    "imul": "mul",
    "rmul": "mul",
    "multiply": "mul",
    "truediv": "div",
    "itruediv": "div",
    "idiv": "div",
    "divide": "div",
    "true_divide": "div",
    "rtruediv": "rdiv",
    "ipow": "pow",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "clip": "clamp",
}
_PARAMETERS = {
    **dict.fromkeys(["add", "sub"], "input other alpha"),
    **dict.fromkeys(["rsub", "mul", "div", "rdiv", *_COMPARISONS], "input other"),
    **dict.fromkeys(["pow", "rpow"], "input other"),
    **dict.fromkeys(["addcmul", "addcdiv"], "input tensor1 tensor2 value"),
    "lerp": "input end weight",
    "where": "condition input other",
    "masked_fill": "input mask value",
    "fill": "input value",
    "clamp": "input min max",
    "clamp_min": "input min",
    "clamp_max": "input max",
    "full": "size fill_value dtype device",
    "full_like": "input fill_value dtype device",
    "new_full": "input size fill_value dtype device",
    "tensor": "data dtype device",
}
_RULES: dict[str, Callable[[_Call], FloatForm | None]] = {
    **dict.fromkeys(["add", "sub", "rsub", "mul", "div", *_COMPARISONS], _arithmetic),
    "rdiv": _divided_by_tensor,
    **dict.fromkeys(["pow", "rpow"], _power),
    **dict.fromkeys(["addcmul", "addcdiv"], _of_three),
    "lerp": _lerp,
    **dict.fromkeys(["where", "masked_fill", "fill"], _chosen),
    **dict.fromkeys(["clamp", "clamp_min", "clamp_max"], _clamped),
    **dict.fromkeys(_MADE, _filled),
}
