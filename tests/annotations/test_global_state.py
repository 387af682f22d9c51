"""What the annotations call guarded global state is what the guard compares on a replay."""

from __future__ import annotations

import pytest

from magjit.annotations import Kind, default_database

_C = pytest.importorskip("magjit._C")

# Rule -> the entry of `_C.global_state()` that stands for it.
GUARDED_BY = {
    "torch.is_grad_enabled": "grad_mode",
    "torch.is_inference_mode_enabled": "inference_mode",
    "torch.is_autocast_enabled": "autocast_cpu",
    "torch.is_autocast_cpu_enabled": "autocast_cpu",
    "torch.is_autocast_cache_enabled": "autocast_cache",
    "torch.get_default_dtype": "default_dtype",
    "torch.get_num_threads": "num_threads",
    "torch.is_anomaly_enabled": "anomaly_mode",
    "torch._C._are_functorch_transforms_active": "functorch_level",
    "torch._C._functorch.get_interpreter_stack": "functorch_level",
    "torch._C._functorch.maybe_current_level": "functorch_level",
    "torch._C._functorch.peek_interpreter_stack": "functorch_level",
    "torch._C._get_cublas_allow_bf16_reduced_precision_reduction": "bf16_reduction",
    "torch._C._get_cublas_allow_fp16_accumulation": "fp16_accumulation",
    "torch._C._get_cublas_allow_fp16_reduced_precision_reduction": "fp16_reduction",
    "torch._C._get_cublas_allow_tf32": "precision_cuda_matmul",
    "torch._C._get_cudnn_allow_tf32": "precision_cuda_conv",
    "torch._C._get_cudnn_benchmark": "cudnn_benchmark",
    "torch._C._get_cudnn_deterministic": "cudnn_deterministic",
    "torch._C._get_cudnn_enabled": "cudnn_enabled",
    "torch._C._get_cudnn_sdp_enabled": "sdp_cudnn",
    "torch._C._get_deterministic_algorithms": "deterministic",
    "torch._C._get_deterministic_algorithms_warn_only": "deterministic_warn_only",
    "torch._C._get_deterministic_fill_uninitialized_memory": "deterministic_fill",
    "torch._C._get_flash_sdp_enabled": "sdp_flash",
    "torch._C._get_float32_matmul_precision": "precision_cuda_matmul",
    "torch._C._get_fp32_precision_getter": "precision_cuda_matmul",
    "torch._C._get_math_sdp_allow_fp16_bf16_reduction": "sdp_math_reduction",
    "torch._C._get_math_sdp_enabled": "sdp_math",
    "torch._C._get_mem_efficient_sdp_enabled": "sdp_efficient",
    "torch._C._get_mkldnn_deterministic": "mkldnn_deterministic",
    "torch._C._get_mkldnn_enabled": "mkldnn_enabled",
    "torch._C._get_onednn_allow_tf32": "precision_mkldnn_matmul",
    "torch._C._get_tracing_state": "jit_tracing",
    "torch._C._is_torch_function_all_disabled": "function_all_disabled",
    "torch._C._is_torch_function_enabled": "function_enabled",
    "torch._C._is_tracing": "jit_tracing",
    "torch._C._len_torch_dispatch_stack": "dispatch_modes",
}


def test_every_rule_about_global_state_has_its_guard() -> None:
    rules = default_database().rules.values()
    marked = {rule.name for rule in rules if rule.global_state}
    assert marked == GUARDED_BY.keys()
    assert all(rule.kind is Kind.PURE for rule in rules if rule.global_state)


def test_the_guard_compares_it() -> None:
    assert set(GUARDED_BY.values()) <= _C.global_state().keys()
