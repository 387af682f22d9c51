"""Blocks of networks in which data movement counts: what ``virtual_tensors.py`` measures.

Written as their authors' code writes them, with random weights. Each has a size for a GPU, that of
the published model, and a small one of the same structure for processors and tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BLOCKS", "Block", "Built"]


@dataclass(frozen=True, slots=True)
class Built:
    """A block ready to be called: in eval mode, with its arguments on the device."""

    module: nn.Module
    arguments: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """How a block is made.

    Attributes:
        name: of the block.
        make: ``(batch, small)`` → module and arguments, on the CPU in float32.
        language: a block of a language model, in bfloat16 on a GPU; the others are float32 with
            TF32 allowed.
    """

    name: str
    make: Callable[[int, bool], tuple[nn.Module, tuple[Tensor, ...]]]
    language: bool = False

    def build(self, batch: int, device: str, *, small: bool | None = None) -> Built:
        """The block with the same weights and arguments at every call.

        Args:
            batch: the number of sequences or images.
            device: where it is to run.
            small: the small size; by default on everything but a GPU.
        """
        torch.manual_seed(0)
        is_small = device != "cuda" if small is None else small
        module, arguments = self.make(batch, is_small)
        dtype = torch.bfloat16 if self.language and device == "cuda" else torch.float32

        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        module = module.eval().requires_grad_(False)
        return Built(module.to(device, dtype), tuple(place(one) for one in arguments))


# -- language models --


class RMSNorm(nn.Module):
    def __init__(self, width: int, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.plus_one:
            return (wide * (1.0 + self.weight.float())).type_as(x)
        return self.weight * wide.type_as(x)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def repeat_kv(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    if times == 1:
        return x
    x = x[:, :, None].expand(batch, heads, times, length, width)
    return x.reshape(batch, heads * times, length, width)


def rotations(length: int, width: int) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * torch.cat((rates, rates))
    return angles.cos(), angles.sin()


class DecoderLayer(nn.Module):
    """One token a sequence with a cache of keys and values: Llama's layer."""

    def __init__(self, width: int, heads: int, groups: int, size: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, size
        self.q_proj = nn.Linear(width, heads * size, bias=False)
        self.k_proj = nn.Linear(width, groups * size, bias=False)
        self.v_proj = nn.Linear(width, groups * size, bias=False)
        self.o_proj = nn.Linear(heads * size, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.input_norm, self.post_norm = RMSNorm(width), RMSNorm(width)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        times = self.heads // self.groups
        return F.scaled_dot_product_attention(q, repeat_kv(keys, times), repeat_kv(values, times))

    def attention(
        self, x: Tensor, keys: Tensor, values: Tensor, place: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.project(x, cos, sin)
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, v)
        attended = self.attend(q, keys, values)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, place: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        x = x + self.attention(self.input_norm(x), keys, values, place, cos, sin)
        return x + self.feed_forward(self.post_norm(x))


class CappedDecoderLayer(DecoderLayer):
    """Gemma 2's layer: capped scores, so that attention is written out; norms on both sides."""

    def __init__(self, width: int, heads: int, groups: int, size: int, inner: int) -> None:
        super().__init__(width, heads, groups, size, inner)
        self.input_norm = RMSNorm(width, plus_one=True)
        self.post_norm = RMSNorm(width, plus_one=True)
        self.before_inner = RMSNorm(width, plus_one=True)
        self.after_inner = RMSNorm(width, plus_one=True)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        times = self.heads // self.groups
        keys, values = repeat_kv(keys, times), repeat_kv(values, times)
        scores = torch.matmul(q, keys.transpose(2, 3)) * 256**-0.5
        scores = torch.tanh(scores / 50.0) * 50.0
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, values)

    def feed_forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, place: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        attended = self.attention(self.input_norm(x), keys, values, place, cos, sin)
        x = x + self.post_norm(attended)
        return x + self.after_inner(self.feed_forward(self.before_inner(x)))


def decode_arguments(
    batch: int, layer: DecoderLayer, width: int, context: int
) -> tuple[Tensor, ...]:
    """The last of ``context`` positions, the others being in the cache."""
    place = torch.tensor([context - 1])
    cos, sin = rotations(context, layer.size)
    keys = torch.randn(batch, layer.groups, context, layer.size)
    values = torch.randn(batch, layer.groups, context, layer.size)
    return torch.randn(batch, 1, width), keys, values, place, cos[place], sin[place]


def llama_decode(batch: int, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if small:
        layer = DecoderLayer(256, 8, 2, 32, 512)
        return layer, decode_arguments(batch, layer, 256, 512)
    layer = DecoderLayer(4096, 32, 8, 128, 14336)
    return layer, decode_arguments(batch, layer, 4096, 4096)


def gemma_decode(batch: int, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if small:
        layer = CappedDecoderLayer(192, 8, 4, 32, 512)
        return layer, decode_arguments(batch, layer, 192, 512)
    layer = CappedDecoderLayer(3584, 16, 8, 256, 14336)
    return layer, decode_arguments(batch, layer, 3584, 4096)


class MergedPrefill(nn.Module):
    """One projection for queries, keys and values; a whole prompt goes into the cache."""

    def __init__(self, width: int, heads: int, groups: int, size: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, size
        self.qkv = nn.Linear(width, (heads + 2 * groups) * size, bias=False)
        self.out = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        own, shared = self.heads * self.size, self.groups * self.size
        q, k, v = self.qkv(x).split([own, shared, shared], dim=-1)
        q = q.view(batch, length, self.heads, self.size).transpose(1, 2)
        k = k.view(batch, length, self.groups, self.size).transpose(1, 2)
        v = v.view(batch, length, self.groups, self.size).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        keys[:, :, :length] = k
        values[:, :, :length] = v
        times = self.heads // self.groups
        attended = F.scaled_dot_product_attention(
            q,
            repeat_kv(keys[:, :, :length], times),
            repeat_kv(values[:, :, :length], times),
            is_causal=True,
        )
        return self.out(attended.transpose(1, 2).reshape(batch, length, own))


def merged_prefill(batch: int, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    width, heads, groups, size, length, room = (
        (256, 8, 2, 32, 64, 256) if small else (4096, 32, 8, 128, 512, 4096)
    )
    cos, sin = rotations(length, size)
    keys = torch.zeros(batch, groups, room, size)
    values = torch.zeros(batch, groups, room, size)
    x = torch.randn(batch, length, width)
    return MergedPrefill(width, heads, groups, size), (x, keys, values, cos, sin)


# -- vision --


class ConvBN(nn.Module):
    """Convolution, batch norm and an activation."""

    def __init__(
        self,
        given: int,
        made: int,
        size: int = 1,
        groups: int = 1,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(given, made, size, padding=size // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(made)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(x)))


class LinearAttention(nn.Module):
    """EfficientViT's multi-scale linear attention."""

    def __init__(self, width: int, size: int = 32) -> None:
        super().__init__()
        self.size = size
        self.qkv = nn.Conv2d(width, 3 * width, 1, bias=False)
        self.scale = nn.Sequential(
            nn.Conv2d(3 * width, 3 * width, 5, padding=2, groups=3 * width, bias=False),
            nn.Conv2d(3 * width, 3 * width, 1, groups=3 * width // size, bias=False),
        )
        self.proj = nn.Conv2d(2 * width, width, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        qkv = self.qkv(x)
        qkv = torch.cat([qkv, self.scale(qkv)], dim=1)
        qkv = qkv.reshape(batch, -1, 3 * self.size, height * width)
        q = qkv[:, :, : self.size]
        k = qkv[:, :, self.size : 2 * self.size]
        v = qkv[:, :, 2 * self.size :]
        q, k = F.relu(q), F.relu(k)
        v = F.pad(v, (0, 0, 0, 1), mode="constant", value=1.0)
        attended = torch.matmul(torch.matmul(v, k.transpose(-1, -2)), q)
        attended = attended[:, :, :-1] / (attended[:, :, -1:] + 1e-5)
        attended = attended.reshape(batch, -1, height, width)
        return x + self.norm(self.proj(attended))


def efficientvit(batch: int, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    width, pixels = (64, 32) if small else (128, 128)
    return LinearAttention(width), (torch.randn(batch, width, pixels, pixels),)


class C3k2(nn.Module):
    """YOLOv11n's block: halves of the first convolution, and what a bottleneck makes of one."""

    def __init__(self, given: int, made: int, hidden: int) -> None:
        super().__init__()
        self.first = ConvBN(given, 2 * hidden)
        self.narrow = ConvBN(hidden, hidden // 2, 3)
        self.wide = ConvBN(hidden // 2, hidden, 3)
        self.last = ConvBN(3 * hidden, made)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        parts.append(parts[-1] + self.wide(self.narrow(parts[-1])))
        return self.last(torch.cat(parts, 1))


def yolo(batch: int, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    pixels = 48 if small else 160
    return C3k2(32, 64, 16), (torch.randn(batch, 32, pixels, pixels),)


class ShuffleUnit(nn.Module):
    """ShuffleNet's unit: grouped convolutions with a channel shuffle between them."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.squeeze = ConvBN(width, width // 4, groups=groups, activation=F.relu)
        self.depth = ConvBN(width // 4, width // 4, 3, groups=width // 4, activation=lambda x: x)
        self.widen = ConvBN(width // 4, width, groups=groups, activation=lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.squeeze(x)
        batch, channels, height, width = y.shape
        y = y.view(batch, self.groups, channels // self.groups, height, width)
        y = y.transpose(1, 2).contiguous().view(batch, channels, height, width)
        return F.relu(x + self.widen(self.depth(y)))


def shufflenet(batch: int, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    pixels = 14 if small else 28
    return ShuffleUnit(240, 3), (torch.randn(batch, 240, pixels, pixels),)


class WindowAttention(nn.Module):
    """Swin's attention within shifted windows."""

    mask: Tensor
    bias: Tensor

    def __init__(self, width: int, heads: int, pixels: int, window: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, window // 2
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("bias", torch.randn(heads, window**2, window**2) * 0.02)
        self.register_buffer("mask", self.shifted_mask(pixels))

    def shifted_mask(self, pixels: int) -> Tensor:
        """Pairs that the shift has brought into one window without being neighbours."""
        side = torch.arange(pixels)
        zone = (side >= pixels - self.window).long() + (side >= pixels - self.shift).long()
        zones = self.partition((3 * zone[:, None] + zone)[None, :, :, None]).squeeze(-1)
        apart = zones[:, None, :] != zones[:, :, None]
        return torch.zeros(apart.shape).masked_fill(apart, -100.0)

    def partition(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        w = self.window
        x = x.view(batch, height // w, w, width // w, w, channels)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w * w, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        w, shift = self.window, self.shift
        shifted = torch.roll(self.norm(x), shifts=(-shift, -shift), dims=(1, 2))
        windows = self.partition(shifted)
        count, area, _ = windows.shape
        qkv = self.qkv(windows).reshape(count, area, 3, self.heads, channels // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (channels // self.heads) ** -0.5) @ k.transpose(-2, -1) + self.bias
        per_image = self.mask.shape[0]
        scores = scores.view(count // per_image, per_image, self.heads, area, area)
        scores = scores + self.mask[:, None]
        weights = scores.view(-1, self.heads, area, area).softmax(-1)
        attended = (weights @ v).transpose(1, 2).reshape(count, area, channels)
        y = self.proj(attended).view(batch, height // w, width // w, w, w, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).contiguous().view(batch, height, width, channels)
        return x + torch.roll(y, shifts=(shift, shift), dims=(1, 2))


def swin(batch: int, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    width, heads, pixels = (48, 3, 28) if small else (96, 3, 56)
    block = WindowAttention(width, heads, pixels, 7)
    return block, (torch.randn(batch, pixels, pixels, width),)


class DenseBlock(nn.Module):
    """DenseNet-121's first block: every layer reads all features made so far."""

    def __init__(self, given: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number in range(layers):
            width = given + number * growth
            self.layers.append(
                nn.Sequential(
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, 4 * growth, 1, bias=False),
                    nn.BatchNorm2d(4 * growth),
                    nn.ReLU(),
                    nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def densenet(batch: int, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    given, growth, layers, pixels = (32, 16, 4, 28) if small else (64, 32, 6, 56)
    return DenseBlock(given, growth, layers), (torch.randn(batch, given, pixels, pixels),)


class SkipBlock(nn.Module):
    """U-Net's way up: upsampled, padded, beside the skip connection, two convolutions."""

    def __init__(self, given: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(given, given // 2, 2, stride=2)
        self.first = ConvBN(given, given // 2, 3, activation=F.relu)
        self.second = ConvBN(given // 2, given // 2, 3, activation=F.relu)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        down, right = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        x = F.pad(x, [right // 2, right - right // 2, down // 2, down - down // 2])
        return self.second(self.first(torch.cat([skip, x], dim=1)))


def unet(batch: int, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    given, pixels = (32, 15) if small else (256, 71)
    x = torch.randn(batch, given, pixels, pixels)
    skip = torch.randn(batch, given // 2, 2 * pixels + 2, 2 * pixels + 2)
    return SkipBlock(given), (x, skip)


BLOCKS: dict[str, Block] = {
    block.name: block
    for block in (
        Block("Llama-3-8B decode", llama_decode, language=True),
        Block("Gemma-2-9B decode", gemma_decode, language=True),
        Block("QKV prefill", merged_prefill, language=True),
        Block("EfficientViT attention", efficientvit),
        Block("YOLOv11n C3k2", yolo),
        Block("ShuffleNet unit", shufflenet),
        Block("Swin window attention", swin),
        Block("DenseNet block", densenet),
        Block("U-Net skip", unet),
    )
}
