"""The virtual machine of the extension module, bound to the torch that is loaded."""

from __future__ import annotations

import torch

import magjit_dvm._vm as _vm

__all__ = [
    "CudaFused",
    "DeviceError",
    "Fused",
    "NotEncodable",
    "Views",
    "convolution",
    "cuda_gpu",
    "cuda_hooks",
    "cuda_launch",
    "cuda_load",
    "cuda_pair",
    "cuda_spans",
    "cuda_words",
    "level",
    "linear",
    "machine",
    "observe",
    "run_stacked",
    "timing",
    "verify",
]


def _bind() -> None:
    example = torch.empty(1)
    steal = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
    _vm.bind(example, example._cdata, torch.Tensor, torch.nn.Parameter, steal)
    _vm.convolution_by(torch.convolution)
    _vm.linear_by(torch.nn.functional.linear)


_bind()

CudaFused = _vm.CudaFused
DeviceError = _vm.DeviceError
Fused = _vm.Fused
NotEncodable = _vm.NotEncodable
Views = _vm.Views
cuda_gpu = _vm.cuda_gpu
cuda_hooks = _vm.cuda_hooks
cuda_launch = _vm.cuda_launch
cuda_load = _vm.cuda_load
cuda_pair = _vm.cuda_pair
cuda_spans = _vm.cuda_spans
cuda_words = _vm.cuda_words
convolution = _vm.convolution
level = _vm.level
linear = _vm.linear
machine = _vm.machine
observe = _vm.observe
run_stacked = _vm.stacked
timing = _vm.timing
verify = _vm.verify
