"""Convolutions as their quickest kernels want them: biases apart, grouped 1 x 1 ones as products.

A convolution of 1 x 1 in groups is one product a group, which the library runs as a kernel for each
of them.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from magjit.plugin.convolutions import bias_apart, is_convolution
from magjit.plugin.fx_helpers import called

__all__ = ["biases_apart", "grouped_as_products", "is_grouped_product"]

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def biases_apart(gm: GraphModule) -> None:
    """Biases of convolutions are added by an operator of their own, which can be fused."""
    for node in list(gm.graph.nodes):
        if not is_convolution(node) or not isinstance(node.args[2], Node):
            continue
        # Kernels for single channels are not the library's, and add biases themselves.
        if node.args[8] == 1 or is_grouped_product(node):
            bias_apart(gm.graph, node)


def is_grouped_product(node: Node) -> bool:
    """Whether a convolution is one product for each of several groups, at the same precision."""
    if not is_convolution(node) or node.args[8] == 1 or node.args[6]:
        return False
    value, weight = node.meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
    image = node.args[0].meta["val"]  # type: ignore[union-attr]
    if value.dim() != 4 or any(
        isinstance(size, torch.SymInt) for size in (*value.shape, *weight.shape, *image.stride())
    ):
        return False
    if tuple(weight.shape[2:]) != (1, 1) or min(*weight.shape[:2], value.numel()) < 2:
        return False
    if weight.numel() > image[0].numel():
        return False  # A copy of it for each image would cost too much.
    if any(one != 1 for one in node.args[3]) or any(one != 0 for one in node.args[4]):  # type: ignore[union-attr]
        return False
    if value.dtype in _HALVES:
        return True
    same: bool = torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32
    return same and value.dtype == torch.float32


def grouped_as_products(gm: GraphModule) -> None:
    """Convolutions of 1 x 1 in groups as batched products, by how their operands lie."""
    for node in list(gm.graph.nodes):
        if not is_grouped_product(node) or node.args[2] is not None:
            continue
        image = node.args[0].meta["val"]
        if image.is_contiguous():
            made = _by_images
        elif image.is_contiguous(memory_format=torch.channels_last):
            made = _by_groups
        else:
            continue
        with gm.graph.inserting_before(node):
            found = made(gm, node)
        node.replace_all_uses_with(found)
        gm.graph.erase_node(node)


def _by_images(gm: GraphModule, node: Node) -> Node:
    """(images * groups, out, in) @ (images * groups, in, pixels)."""
    image, weight, groups, sizes = _parts(node)
    images, _, height, width = sizes
    out, each = weight.meta["val"].shape[:2]
    batch, pixels = images * groups, height * width
    rows = called(gm.graph, aten.view.default, image, [batch, each, pixels])
    cut = called(gm.graph, aten.reshape.default, weight, [1, groups, out // groups, each])
    cut = called(gm.graph, aten.expand.default, cut, [images, groups, out // groups, each])
    cut = called(gm.graph, aten.reshape.default, cut, [batch, out // groups, each])
    product = called(gm.graph, aten.bmm.default, cut, rows)
    return called(gm.graph, aten.view.default, product, list(node.meta["val"].shape))


def _by_groups(gm: GraphModule, node: Node) -> Node:
    """(groups, pixels, in) @ (groups, in, out): the pixels of all images."""
    image, weight, groups, sizes = _parts(node)
    images, _, height, width = sizes
    out, each = weight.meta["val"].shape[:2]
    pixels = images * height * width
    rows = called(gm.graph, aten.permute.default, image, [0, 2, 3, 1])
    rows = called(gm.graph, aten.view.default, rows, [pixels, groups, each])
    rows = called(gm.graph, aten.permute.default, rows, [1, 0, 2])
    cut = called(gm.graph, aten.reshape.default, weight, [groups, out // groups, each])
    cut = called(gm.graph, aten.permute.default, cut, [0, 2, 1])
    product = called(gm.graph, aten.bmm.default, rows, cut)
    shape = [groups, images, height, width, out // groups]
    found = called(gm.graph, aten.view.default, product, shape)
    found = called(gm.graph, aten.permute.default, found, [1, 2, 3, 0, 4])
    found = called(gm.graph, aten.reshape.default, found, [images, height, width, out])
    return called(gm.graph, aten.permute.default, found, [0, 3, 1, 2])


def _parts(node: Node) -> tuple[Node, Node, int, tuple[int, ...]]:
    image, weight = node.args[:2]
    assert isinstance(image, Node) and isinstance(weight, Node)
    return image, weight, int(node.args[8]), tuple(image.meta["val"].shape)  # type: ignore[arg-type]
