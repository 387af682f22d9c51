"""What the operator recorder does with each torch function that its mode sees.

Most functions compute tensors and become operators. The tables name the others: those that read
only metadata (guarded, so constant), those that read data, those that change what a graph cannot.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch


class OpKind(enum.Enum):
    """How a torch function is recorded."""

    COMPUTE = enum.auto()  # an operator of the graph
    METADATA = enum.auto()  # a constant, given the guarded metadata of its arguments
    VALUE = enum.auto()  # reads tensor data into Python
    STATE = enum.auto()  # an operator without tensors that sets torch's global state
    DYNAMIC = enum.auto()  # an operator whose result's shape depends on data
    ATTRIBUTE = enum.auto()  # reads an attribute that is state of its own, such as .grad
    SET_ATTRIBUTE = enum.auto()  # writes such an attribute
    LABEL = enum.auto()  # names a part of the program for the profiler
    SPLIT = enum.auto()  # cannot be part of a graph


METADATA_GETTERS = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "itemsize",
        "nbytes",
        "names",
        "is_cuda",
        "is_cpu",
        "is_xpu",
        "is_mps",
        "is_meta",
        "is_sparse",
        "is_sparse_csr",
        "is_mkldnn",
        "is_quantized",
        "is_nested",
        "is_xla",
        "is_ipu",
        "is_hpu",
        "is_mtia",
        "is_maia",
        "is_vulkan",
        "is_ort",
        "is_leaf",
        "volatile",
        "output_nr",
        "_is_param",
    ]
)
METADATA_METHODS = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "element_size",
        "get_device",
        "is_conj",
        "is_neg",
        "is_inference",
        "__len__",
        "is_same_size",
        "is_coalesced",
        "sparse_dim",
        "dense_dim",
        "is_distributed",
        "has_names",
        "_is_view",
        "_nnz",
        "is_non_overlapping_and_dense",
        "dim_order",
    ]
)
METADATA_FUNCTIONS = frozenset(
    [
        "is_tensor",
        "is_floating_point",
        "is_complex",
        "is_conj",
        "is_neg",
        "is_signed",
        "result_type",
        "can_cast",
        "promote_types",
        "get_device",
        "numel",
        "is_same_size",
        "is_inference",
        "_has_compatible_shallow_copy_type",
        "broadcast_shapes",
        "_is_functional_tensor",
        "is_storage",
        "is_distributed",
    ]
)
VALUE_METHODS = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__complex__",
        "__array__",
        "__contains__",
        "__repr__",
        "__str__",
        "__format__",
        "__hash__",
        "equal",
        "allclose",
        "is_nonzero",
        "is_set_to",
        "__nonzero__",
        "__long__",
        "__array_wrap__",
    ]
)
TEXT_METHODS = frozenset({"__repr__", "__str__", "__format__"})
DYNAMIC_SHAPES = frozenset(
    [
        "nonzero",
        "masked_select",
        "unique",
        "unique_consecutive",
        "argwhere",
        "bincount",
        "histogram",
        "histogramdd",
        "unique_dim",
        "nonzero_static",
        "_unique2",
        "corrcoef",
        "coalesce",
        "to_sparse",
        "_unique",
        "_unique_impl",
        "_unique_consecutive_impl",
        "_return_output",
    ]
)
SPLIT_REASONS: dict[str, str] = {
    "backward": "calls backward() inside the program",
    "register_hook": "registers a hook on a tensor",
    "register_post_accumulate_grad_hook": "registers a hook on a tensor",
    "retain_grad": "calls retain_grad()",
    "resize_": "resizes a tensor in place",
    "resize_as_": "resizes a tensor in place",
    "set_": "replaces the storage of a tensor",
    "share_memory_": "moves a tensor into shared memory",
    "data_ptr": "reads the address of a tensor",
    "storage": "reads the storage of a tensor",
    "untyped_storage": "reads the storage of a tensor",
    "typed_storage": "reads the storage of a tensor",
    "_typed_storage": "reads the storage of a tensor",
    "apply_": "runs Python code for each element",
    "map_": "runs Python code for each element",
    "map2_": "runs Python code for each element",
    "__reduce_ex__": "pickles a tensor",
    "__deepcopy__": "copies a tensor with its autograd state",
    "__dlpack__": "exports a tensor to another library",
    "__cuda_array_interface__": "exports a tensor to another library",
    "__setstate__": "restores a pickled tensor",
    "as_subclass": "makes a tensor of another class",
    "_make_subclass": "makes a tensor of another class",
    "_make_wrapper_subclass": "makes a tensor of another class",
    "vmap": "uses torch.vmap",
    "handle_torch_function": "overrides torch functions",
    "record_stream": "uses streams",
    "rename_": "names dimensions in place",
    "triplet_margin_with_distance_loss": "calls a Python function inside a torch function",
    "manual_seed": "seeds torch's random number generator",
    "seed": "seeds torch's random number generator",
    "set_rng_state": "sets the state of torch's random number generator",
    "get_rng_state": "reads the state of torch's random number generator",
    "initial_seed": "reads the seed of torch's random number generator",
    "set_default_dtype": "changes the default dtype",
    "set_default_device": "changes the default device",
    "set_num_threads": "changes the number of threads",
    "save": "writes a file",
    "load": "reads a file",
    "from_file": "maps a file",
    "compile": "compiles inside the program",
}
STATE_FUNCTIONS = frozenset({"_set_grad_enabled"})
STATE_ATTRIBUTES = frozenset({"grad", "_grad", "grad_fn", "_version", "_base", "_backward_hooks"})
VIEW_GETTERS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


UNGUARDED_METADATA = frozenset({"storage_offset", "is_leaf", "output_nr", "_is_view"})
"""Metadata that the guard on a tensor does not compare of itself."""


def classify(func: Callable[..., Any]) -> tuple[OpKind, str]:
    """The kind of a torch function and its name (an attribute's name for getters and setters)."""
    name = getattr(func, "__name__", "")
    if getattr(func, "namespace", "") == "profiler" or name.startswith("_record_function_"):
        return OpKind.LABEL, name
    owner = getattr(func, "__self__", None)
    if name == "__get__" and owner is not None:
        attribute = getattr(owner, "__name__", "") or getattr(
            getattr(owner, "fget", None), "__name__", ""
        )
        if attribute in METADATA_GETTERS:
            return OpKind.METADATA, attribute
        if attribute in VIEW_GETTERS:
            return OpKind.COMPUTE, attribute
        if attribute in STATE_ATTRIBUTES:
            return OpKind.ATTRIBUTE, attribute
        return OpKind.SPLIT, attribute
    if name in ("__set__", "__delete__") and owner is not None:
        return OpKind.SET_ATTRIBUTE, getattr(owner, "__name__", "")
    if name in SPLIT_REASONS:
        return OpKind.SPLIT, name
    if name in STATE_FUNCTIONS:
        return OpKind.STATE, name
    if name in VALUE_METHODS:
        return OpKind.VALUE, name
    if name in METADATA_METHODS or name in METADATA_FUNCTIONS:
        return OpKind.METADATA, name
    if name in DYNAMIC_SHAPES:
        return OpKind.DYNAMIC, name
    return OpKind.COMPUTE, name


def reads_only(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call that usually computes asks for metadata, or sets what is so already."""
    if name == "requires_grad_":
        (wanted,) = args[1:] or [kwargs.get("requires_grad", True)]
        return args[0].requires_grad is wanted
    return name == "type" and len(args) == 1 and not kwargs


def shape_depends_on_data(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call that usually keeps shapes static has a data-dependent result shape."""
    if name == "__getitem__" and len(args) == 2:
        index = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
        return any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index
        )
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
        return isinstance(repeats, torch.Tensor) and "output_size" not in kwargs
    if name == "one_hot":
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        return bool(classes == -1)
    if name == "tensor_split":
        return isinstance(kwargs.get("tensor_indices_or_sections", args[-1]), torch.Tensor)
    if name == "sparse_coo_tensor":
        return "size" not in kwargs and len(args) < 3
    return name in ("rnn_sequence", "_pack_padded_sequence")


RESIZING = frozenset({"resize_", "resize_as_"})
INFERS_DTYPE = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})
"""Functions whose result has the dtype of the NumPy numbers that it is made of."""
SIZES = frozenset({"shape", "size", "numel", "nelement", "__len__", "broadcast_shapes"})
"""Metadata that says nothing of how a tensor lies in memory."""
LAYOUT = SIZES | {"stride", "nbytes", "storage_offset", "is_contiguous", "is_same_size"}
LAYOUT |= {"dim_order", "is_non_overlapping_and_dense"}
_RANDOM_PREFIXES = ("rand", "bernoulli", "multinomial", "normal", "dropout", "poisson", "empty")


def is_random(func: Callable[..., Any]) -> bool:
    """Whether an operator's result is another one at each call, or memory as it comes."""
    name = getattr(func, "__name__", "")
    return (
        name.lstrip("_").startswith(_RANDOM_PREFIXES)
        or "dropout" in name
        or name
        in (
            "uniform_",
            "exponential_",
            "geometric_",
            "log_normal_",
            "cauchy_",
            "random_",
            "rrelu",
            "gumbel_softmax",
            "new",
            "new_empty",
            *RESIZING,
        )
    )
