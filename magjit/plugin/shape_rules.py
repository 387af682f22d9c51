"""What each ATen operator says of shapes (TSCompiler, section 4.1 and Figure 2).

``RULES`` has the paper's ``ComputeSymShape``: operator to function from a call to its result.
``InferSibSymShape`` is what a ``Signature`` says of its operands, and ``SIBLINGS`` for the rules
that are functions.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, TypeAlias

import torch
from torch.fx import Node
from torch.utils._sympy.functions import Max, Min, Mod, PythonMod

from magjit.plugin.symbolic_sizes import Call, Dim, NoRule, Shape, Value, show

__all__ = ["RULES", "SIBLINGS", "Rule", "Signature", "rule_of", "siblings_of"]


Rule: TypeAlias = Callable[[Call], Value]


class Signature:
    """A rule as text: what the sizes of operands are called, and the results in these names.

    ``"_ nk km -> nm"`` is ``addmm``: one word for each argument.  ``_`` is not looked at, ``*``
    stands for any number of sizes, ``=0`` for the shape of argument 0, ``()`` for a scalar, ``?``
    for an unknown result.  Results that ``output_mask`` leaves out are absent.
    """

    def __init__(self, text: str) -> None:
        self._operands, self._results = (side.split() for side in text.split("->"))

    def __call__(self, call: Call) -> Value:
        sizes = self._matched(call)
        results = [self._result(call, word, sizes) for word in self._results]
        if len(results) == 1:
            if results[0] is None or None in results[0]:
                raise NoRule("an operand has no shape")
            return results[0]
        mask = call.argument("output_mask") or [True] * len(results)
        return [one if wanted else None for one, wanted in zip(results, mask, strict=True)]

    def siblings(self, call: Call) -> Iterator[tuple[Any, Sequence[Dim | None] | None]]:
        """What each operand's shape must be, as far as the known ones say it."""
        sizes = self._matched(call)
        for at, word in enumerate(self._operands):
            yield call.argument(at), None if word == "_" else _build(word, sizes)

    def _matched(self, call: Call) -> dict[str, Any]:
        sizes: dict[str, Any] = {}
        for at, word in enumerate(self._operands):
            shape = None if word == "_" else call.known(at)
            if shape is not None:
                head, star, tail = word.partition("*")
                end = len(shape) - len(tail)
                if end < len(head) or (end > len(head) and not star):
                    call.fail(f"operand {at} has the shape {show(shape)}, not the rank of {word}")
                if star:
                    sizes["*"] = shape[len(head) : end]
                for name, size in zip(head + tail, shape[: len(head)] + shape[end:], strict=True):
                    call.agree([sizes.setdefault(name, size)], [size])
        return sizes

    def _result(self, call: Call, word: str, sizes: Mapping[str, Any]) -> Value:
        if word in ("?", "()"):
            return None if word == "?" else ()
        return call.known(int(word[1:])) if word[0] == "=" else _build(word, sizes)


def _build(word: str, sizes: Mapping[str, Any]) -> tuple[Dim | None, ...] | None:
    if "*" in word and "*" not in sizes:
        return None
    parts = [sizes["*"] if name == "*" else (sizes.get(name),) for name in word]
    return tuple(size for part in parts for size in part)


def _pointwise(call: Call) -> Value:
    known = [shape for name in call.arguments if (shape := call.known(name)) is not None]
    return call.each(call.broadcast(*known))


_KEEP_ALL = (torch.ops.aten.any.dims, torch.ops.aten.all.dims)  # no dims are none, not all


def _reduce(call: Call) -> Value:
    shape = call.shape()
    dims = call.dims(len(shape)) or range(len(shape))
    if call.argument("dim") == [] and call.node.target in _KEEP_ALL:
        return shape
    if call.argument("keepdim"):
        return call.each([1 if at in dims else size for at, size in enumerate(shape)])
    return call.each([size for at, size in enumerate(shape) if at not in dims])


def _windows(call: Call, sizes: Shape, kernel: Sequence[Dim]) -> Shape:
    """How often a window fits, by ``stride``, ``padding`` and ``dilation``."""
    if call.argument("ceil_mode"):
        raise NoRule("only windows that round down have a rule")
    steps, paddings, gaps = (call.numbers(k, len(sizes)) for k in ("stride", "padding", "dilation"))
    of_each = zip(sizes, kernel, steps or kernel, paddings, gaps or [1] * len(sizes), strict=True)
    return tuple(call.quotient(n + 2 * p - d * (k - 1) - 1, s) + 1 for n, k, s, p, d in of_each)


def _convolution(call: Call) -> Value:
    x, weight, groups = call.shape(0), call.shape(1), call.argument("groups")
    count = len(weight) - 2
    batch, channels, sizes, kernel = x[: -count - 1], x[-count - 1], x[-count:], weight[2:]
    if not call.argument("transposed"):
        call.agree([channels], [weight[1] * groups])
        return (*batch, weight[0], *_windows(call, sizes, kernel))
    call.agree([channels], [weight[0]])
    names = ("stride", "padding", "dilation", "output_padding")
    of_each = zip(sizes, kernel, *(call.numbers(name, count) for name in names), strict=True)
    grown = [(n - 1) * s - 2 * p + d * (k - 1) + extra + 1 for n, k, s, p, d, extra in of_each]
    return (*batch, weight[1] * groups, *grown)


def _pool(call: Call) -> Value:
    spatial = 3 if "3d" in str(call.node.target) else 2
    x, kernel = call.shape(), call.numbers("kernel_size", spatial)
    return call.each((*x[:-spatial], *_windows(call, x[-spatial:], kernel)))


def _view(call: Call) -> Value:
    if isinstance(call.argument(1), torch.dtype):
        raise NoRule("a view as another dtype has no rule")
    size, numel = call.numbers(1), math.prod(call.shape())
    rest = math.prod(one for one in size if one != -1)
    if -1 not in size:
        call.agree([numel], [rest])
    return tuple(call.quotient(numel, rest) if one == -1 else one for one in size)


def _expand(call: Call) -> Value:
    shape, size = call.shape(), call.numbers("size")
    padded = (1,) * (len(size) - len(shape)) + shape
    wanted = [old if new == -1 else new for old, new in zip(padded, size, strict=True)]
    return call.broadcast(padded, tuple(wanted))


def _squeeze(call: Call) -> Value:
    shape = call.shape()
    dims = call.dims(len(shape)) if shape and "dim" in call.arguments else range(len(shape))
    if any(shape[at] != 1 and not call.sizes.never_one(shape[at]) for at in dims):
        raise NoRule("whether a size is 1 is unknown")
    return tuple(size for at, size in enumerate(shape) if size != 1 or at not in dims)


def _transpose(call: Call) -> Value:
    shape = [*call.shape()]
    if not shape:
        return ()
    a, b = (call.dims(len(shape), key)[0] for key in ("dim0", "dim1"))
    shape[a], shape[b] = shape[b], shape[a]
    return tuple(shape)


def _at_dim(change: Callable[[Call, Dim], Sequence[Dim]]) -> Rule:
    """The size at ``dim`` gives way to others, or to none."""

    def rule(call: Call) -> Value:
        shape = call.shape()
        if not shape:
            raise NoRule("a scalar has no dimension")
        at = call.dims(len(shape))[0]
        return call.each((*shape[:at], *change(call, shape[at]), *shape[at + 1 :]))

    return rule


def _slice(call: Call, size: Dim) -> Sequence[Dim]:
    def clamped(key: str, default: Dim) -> Dim:
        at = (call.numbers(key) or [default])[0]
        if at == sys.maxsize:
            return size
        at = at + size if call.sizes.at_most(at, -1) else at
        at = at if call.sizes.at_most(at, size) else Min(at, size)
        at = size if call.sizes.at_most(size, at) else at
        return at if call.sizes.at_most(0, at) else Max(at, 0)

    start, end = clamped("start", 0), clamped("end", size)
    ordered = end == size or call.sizes.at_most(start, end)
    length = end - start if ordered else Max(end - start, 0)
    step = call.numbers("step")[0]
    return [call.quotient(length + step - 1, step)]


def _cat(call: Call) -> Value:
    first, *others = shapes = call.value("tensors")
    if any(len(other) != len(first) for other in others):
        raise NoRule("ranks differ")
    at = call.dims(len(first))[0]
    for other in others:
        call.agree(first[:at] + first[at + 1 :], other[:at] + other[at + 1 :])
    return (*first[:at], sum(one[at] for one in shapes), *first[at + 1 :])


def _stack(call: Call) -> Value:
    first, *others = call.value("tensors")
    for other in others:
        call.agree(first, other)
    at = call.dims(len(first) + 1)[0]
    return (*first[:at], 1 + len(others), *first[at:])


def _split(call: Call) -> Value:
    shape, parts = call.shape(), call.numbers(1)
    at = call.dims(len(shape))[0]
    if isinstance(call.argument(1), list | tuple):
        call.agree([shape[at]], [sum(parts)])
    else:
        count = call.quotient(shape[at], parts[0])
        if not isinstance(count, int):
            raise NoRule("the number of parts is unknown")
        rest = call.sizes.canonical(shape[at] - count * parts[0])
        parts = parts * count + ([rest] if rest != 0 or count == 0 else [])
    return [(*shape[:at], size, *shape[at + 1 :]) for size in parts]


def _unbind(call: Call) -> Value:
    shape = call.shape()
    at = call.dims(len(shape))[0]
    if not isinstance(shape[at], int):
        raise NoRule("the number of parts is unknown")
    return [shape[:at] + shape[at + 1 :]] * shape[at]


def _index(call: Call) -> Value:
    shape, indices = call.shape(), [*call.argument("indices")]
    at = [dim for dim, index in enumerate(indices) if index is not None]
    for dim in at:
        value = indices[dim].meta.get("val", indices[dim].meta.get("example_value"))
        if getattr(value, "dtype", torch.bool) in (torch.bool, torch.uint8):
            raise NoRule("an index may be a mask")
    result = call.broadcast(*[call.value("indices")[dim] for dim in at])
    kept = [size for dim, size in enumerate(shape) if dim not in at]
    front = at[0] if at == [*range(at[0], at[-1] + 1)] else 0
    return (*kept[:front], *result, *kept[front:])


def _pad(call: Call) -> Value:
    shape, pad = [*call.shape()], call.numbers(1)
    for at in range(len(pad) // 2):
        shape[-1 - at] += pad[2 * at] + pad[2 * at + 1]
    return tuple(shape)


def _repeat(call: Call) -> Value:
    shape, repeats = call.shape(), call.numbers("repeats")
    padded = (1,) * (len(repeats) - len(shape)) + shape
    return tuple(size * times for size, times in zip(padded, repeats, strict=True))


def _arange(call: Call) -> Value:
    start, end, step = (call.value(key) for key in ("start", "end", "step"))
    start, step = 0 if start is None else start, 1 if step is None else step
    if all(isinstance(one, int | float) for one in (start, end, step)):
        return (max(math.ceil((end - start) / step), 0),)
    if step != 1 or not call.sizes.at_most(start, end):
        raise NoRule("whether the range is empty is unknown")
    return (call.sizes.canonical(end - start),)


def _batch_norm(call: Call) -> Value:
    stat = call.shape()[1:2] if call.argument("training") else None  # else the device decides
    return [call.shape(), stat, stat]


def _layer_norm(call: Call) -> Value:
    shape, normalized = call.shape(), call.numbers("normalized_shape")
    axis = len(shape) - len(normalized)
    call.agree(shape[axis:], normalized)
    stat = shape[:axis] + (1,) * len(normalized)
    return [shape, *[stat] * (len(call.each(())) - 1)]


def _loss(call: Call) -> Value:
    """Of each element without a reduction (0), else a scalar."""
    return () if call.argument("reduction") else call.broadcast(call.shape(0), call.shape(1))


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.neg)


def _computed(function: Callable[..., Dim]) -> Rule:
    return lambda call: function(*[call.value(key) for key in call.arguments])


def _modulo(call: Call) -> Value:
    a, b = call.value(0), call.value(1)
    plain = call.sizes.at_most(0, a) and call.sizes.at_most(1, b)
    return Mod(a, b) if plain else PythonMod(a, b)


def _named(rule: Rule, names: str) -> dict[Any, Rule]:
    return dict.fromkeys(names.split(), rule)


_SAME = """_conj_physical _log_softmax _safe_softmax _softmax _to_copy alias bernoulli bernoulli_
    clone contiguous copy cumprod cumsum detach dropout exponential fill flip full_like
    index_add index_copy index_fill index_put _unsafe_index_put lift_fresh lift_fresh_copy
    log_softmax logcumsumexp masked_scatter empty_like normal_functional ones_like rand_like
    randint_like randn_like roll rrelu_with_noise_functional scatter scatter_add scatter_reduce
    select_scatter slice_scatter softmax diagonal_scatter to tril triu uniform zeros_like
    embedding_renorm _softmax_backward_data _log_softmax_backward_data"""
_BROADCAST = """_prelu_kernel elu_backward floor_divide hardsigmoid_backward hardswish
    hardswish_backward hardtanh_backward leaky_relu_backward masked_fill mse_loss_backward
    smooth_l1_loss_backward softplus_backward binary_cross_entropy_backward complex polar rsub
    where.Scalar where.ScalarOther where.ScalarSelf"""
_REDUCTIONS = """all amax amin aminmax any argmax argmin count_nonzero linalg_vector_norm logsumexp
    max mean median min mode nanmedian nansum norm prod std std_mean sum var var_mean"""
_OF_ARGUMENT_1 = """_adaptive_avg_pool2d_backward avg_pool2d_backward log_sigmoid_backward
    max_pool2d_with_indices_backward nll_loss_backward"""
_SIZE_GIVEN = """as_strided empty empty_permuted empty_strided full new_empty new_empty_strided
    new_full new_ones new_zeros ones rand randint randn zeros"""

RULES: dict[Any, Rule] = {
    **_named(Signature("-> =0"), _SAME),
    **_named(_pointwise, _BROADCAST),
    **_named(_reduce, _REDUCTIONS),
    **_named(Signature("-> =1"), _OF_ARGUMENT_1),
    **_named(lambda c: tuple(c.numbers("size")), _SIZE_GIVEN),
    **_named(Signature("-> =0 =0"), "cummax cummin native_dropout sort"),
    # Matrices.
    "mm": Signature("nk km -> nm"),
    "addmm": Signature("_ nk km -> nm"),
    "bmm": Signature("bnk bkm -> bnm"),
    "baddbmm": Signature("_ bnk bkm -> bnm"),
    "linear": Signature("*k mk _ -> *m"),
    "mv": Signature("nk k -> n"),
    "addmv": Signature("_ nk k -> n"),
    "dot": Signature("k k -> ()"),
    # Windows.
    "convolution": _convolution,
    "convolution_backward": lambda c: [
        shape if wanted else None
        for shape, wanted in zip(
            (c.shape(1), c.shape(2), tuple(c.numbers("bias_sizes"))),
            c.argument("output_mask"),
            strict=True,
        )
    ],
    **_named(_pool, "avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices"),
    "_adaptive_avg_pool2d": lambda c: (*c.shape()[:-2], *c.numbers("output_size", 2)),
    "_adaptive_avg_pool3d": lambda c: (*c.shape()[:-3], *c.numbers("output_size", 3)),
    # Attention; heads of keys may be fewer than of queries.
    "_scaled_dot_product_flash_attention": Signature("bhle bgse bgsf -> bhlf bhl ? ? ? ? ? ? ?"),
    "_scaled_dot_product_flash_attention_for_cpu": Signature("bhle bgse bgsf -> bhlf bhl"),
    "_scaled_dot_product_efficient_attention": Signature("bhle bgse bgsf -> bhlf ? () ()"),
    "_scaled_dot_product_cudnn_attention": Signature("bhle bgse bgsf -> bhlf ? ? ? ? ? () () ?"),
    **_named(
        Signature("_ bhle bgse bgsf -> =1 =2 =3"),
        """_scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_cudnn_attention_backward""",
    ),
    "_scaled_dot_product_efficient_attention_backward": Signature("_ bhle bgse bgsf -> =1 =2 =3 ?"),
    # Normalisations and losses.
    **_named(_layer_norm, "native_layer_norm _fused_rms_norm"),
    "native_layer_norm_backward": Signature("-> =1 =5 =6"),
    "_fused_rms_norm_backward": Signature("-> =1 =4"),
    "native_group_norm": lambda c: [c.shape(), *[(*c.numbers("N"), c.argument("group"))] * 2],
    "native_group_norm_backward": Signature("_ nc* -> =1 c c"),
    **_named(_batch_norm, "native_batch_norm _native_batch_norm_legit"),
    "_native_batch_norm_legit_no_training": Signature("nc* c c c c -> =0 ? ?"),
    "_native_batch_norm_legit_functional": lambda c: [*_batch_norm(c), c.shape(3), c.shape(4)],
    "cudnn_batch_norm": lambda c: [*_batch_norm(c), None],
    "native_batch_norm_backward": Signature("nc* nc* -> =1 c c"),
    "cudnn_batch_norm_backward": Signature("nc* nc* -> =0 c c"),
    **_named(_loss, "mse_loss smooth_l1_loss huber_loss soft_margin_loss"),
    "nll_loss_forward": lambda c: [() if c.argument("reduction") else c.shape(1), ()],
    # Views and copies of parts.
    **_named(_view, "view reshape _unsafe_view"),
    **_named(_expand, "expand"),
    **_named(_squeeze, "squeeze"),
    **_named(_transpose, "transpose"),
    **_named(_split, "split split_with_sizes unsafe_split"),
    "t": lambda c: c.shape()[::-1],
    "permute": lambda c: tuple(c.shape()[at] for at in c.dims(len(c.shape()), "dims")),
    "unsqueeze": lambda c: (
        *c.shape()[: (at := c.dims(len(c.shape()) + 1)[0])],
        1,
        *c.shape()[at:],
    ),
    "select": _at_dim(lambda c, size: []),
    "slice": _at_dim(_slice),
    "index_select": _at_dim(lambda c, size: [math.prod(c.shape("index"))]),
    "topk": _at_dim(lambda c, size: c.numbers("k")),
    "cat": _cat,
    "stack": _stack,
    "repeat": _repeat,
    **_named(_pad, "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d"),
    **_named(_pad, "replication_pad1d replication_pad2d replication_pad3d"),
    "unbind": _unbind,
    # Tables.
    "embedding": Signature("vd * -> *d"),
    "embedding_dense_backward": lambda c: (*c.numbers("num_weights"), c.shape()[-1]),
    **_named(lambda c: c.shape("index"), "gather take"),
    "index": _index,
    # From nothing.
    "arange": _arange,
    "iota": lambda c: tuple(c.numbers("length")),
    **_named(lambda c: tuple(c.numbers("steps")), "linspace logspace"),
    "randperm": lambda c: tuple(c.numbers("n")),
    "scalar_tensor": lambda c: (),
    # Numbers.
    "sym_size": lambda c: c.shape()[c.dims(len(c.shape()))[0]],
    "sym_numel": lambda c: math.prod(c.shape()),
    operator.getitem: lambda c: c.value(0)[c.argument(1)],
    operator.floordiv: lambda c: c.quotient(c.value(0), c.value(1)),
    operator.mod: _modulo,
    torch.sym_max: lambda c: Max(c.value(0), c.value(1)),
    torch.sym_min: lambda c: Min(c.value(0), c.value(1)),
    **{function: _computed(function) for function in _ARITHMETIC},
}


def rule_of(node: Node) -> Rule | None:
    """The rule for what a node calls, if there is one."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return RULES.get(target) if node.op == "call_function" else None
    tensors = all(isinstance(one.type, torch.TensorType) for one in target._schema.returns)
    if torch.Tag.pointwise in target.tags and tensors:
        return _pointwise
    name = target._schema.name.rpartition("::")[2]
    in_place, copy_of_view = name.removesuffix("_"), name.removesuffix("_copy")
    names = (f"{name}.{target._overloadname}", name, in_place, copy_of_view)
    return next((RULES[one] for one in names if one in RULES), None)


def _alike(dim: Callable[[Call, int], int | None]) -> Callable[[Call], Iterator[tuple[Any, Any]]]:
    """Tensors in a list have all sizes in common, but for the one at ``dim``."""

    def rule(call: Call) -> Iterator[tuple[Any, Any]]:
        known = [shape for shape in call.value("tensors") if shape is not None]
        at = dim(call, len(known[0])) if known else None
        for node in call.argument("tensors") if known else ():
            yield node, [None if i == at else size for i, size in enumerate(known[0])]

    return rule


def _not_broadcast(call: Call) -> Iterator[tuple[Any, Any]]:
    """Elementwise operands of one rank have those sizes in common of which none may be 1."""
    nodes = [one for one in call.arguments.values() if isinstance(call.values.get(one), tuple)]
    for node, other in permutations(nodes, 2):
        shape, wanted = call.values[other], call.values[node]
        if len(shape) == len(wanted):
            large = [
                all(map(call.sizes.never_one, pair)) for pair in zip(shape, wanted, strict=True)
            ]
            yield node, [size if keep else None for size, keep in zip(shape, large, strict=True)]


SIBLINGS: dict[Any, Callable[[Call], Iterator[tuple[Any, Any]]]] = {
    _pointwise: _not_broadcast,
    _cat: _alike(lambda call, rank: call.dims(rank)[0]),
    _stack: _alike(lambda call, rank: None),
    _layer_norm: lambda c: (
        (c.arguments[name], c.numbers("normalized_shape")) for name in ("weight", "bias")
    ),
}


def siblings_of(node: Node) -> Callable[[Call], Iterator[tuple[Any, Any]]] | None:
    """What a node's operator says of its operands: pairs of one and its shape.

    ``None`` stands for a size, or a shape, that it does not say.
    """
    rule = rule_of(node)
    return rule.siblings if isinstance(rule, Signature) else SIBLINGS.get(rule)
