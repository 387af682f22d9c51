"""No view and no data-movement operator of ATen is forgotten: each has a rule or a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's table of operators needs expecttest")

from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magjit.plugin.virtual_tensors.rules import rules, unsupported

aten = torch.ops.aten


def operators() -> list[Any]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        if space != "aten":
            continue
        packet, _, overload = rest.partition(".")
        try:
            found.append(getattr(getattr(aten, packet), overload or "default"))
        except AttributeError:
            continue
    return found


def is_view(target: Any) -> bool:
    schema = target._schema
    returned = [one.alias_info for one in schema.returns if one.alias_info is not None]
    return bool(returned) and not schema.is_mutable and not any(one.is_write for one in returned)


def test_every_view_has_a_rule_or_a_reason() -> None:
    views = {target for target in operators() if is_view(target)}
    assert len(views) > 60
    missing = sorted(str(one) for one in views - rules.keys() - unsupported.keys())
    assert not missing


def test_no_operator_has_both() -> None:
    assert not rules.keys() & unsupported.keys()
    assert all(unsupported.values())


class Movements(TorchDispatchMode):
    """Collects operators whose results consist of their floating-point operands' elements."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, target: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        before = [set(one.flatten().tolist()) for one in given if usable(one)]
        made = target(*args, **(kwargs or {}))
        results = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        if target._schema.is_mutable or not before or not results:
            return made
        if any(not usable(one) or one.numel() < 3 for one in results):
            return made
        elements = set().union(*before)
        moves = all(set(one.flatten().tolist()) <= elements for one in results)
        self.moved[target] = self.moved.get(target, True) and moves
        return made


def usable(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype == torch.float32
        and tensor.layout == torch.strided
        and tensor.numel() < 2000
        and not tensor.is_nested
    )


# What torch.testing's samples show to return operands' elements, but which computes them or takes
# them by their values.
COMPUTED = {
    "by value": (
        "adaptive_max_pool2d adaptive_max_pool3d amax amin aminmax cummax cummin fmax fmin "
        "fractional_max_pool2d fractional_max_pool3d kthvalue max max_pool2d_with_indices "
        "max_pool3d_with_indices maximum median minimum mode msort nanmedian segment_reduce sort "
        "topk _unique2 unique_consecutive unique_dim where clamp clamp_max clamp_min hypot "
        "threshold relu relu6 hardtanh masked_select nextafter max_unpool2d max_unpool3d "
        "masked_scatter scatter_reduce index_reduce bernoulli"
    ),
    "arithmetic that leaves elements as they are for some samples": (
        "abs add mul div sub pow copysign special_ sum mean prod cumsum cumprod nansum "
        "nan_to_num ceil floor round trunc frac fmod remainder positive sgn sign rrelu "
        "dropout native_dropout celu elu selu leaky_relu prelu _prelu_kernel "
        "rrelu_with_noise_functional hardshrink "
        "softshrink heaviside logaddexp logcumsumexp logsumexp mm bmm addmm matmul dot mv "
        "lerp xlogy linalg_ norm triangular_solve cholesky lu qr svd eig convolution "
        "upsample_bilinear2d avg_pool adaptive_avg_ _adaptive_avg_ index_add scatter_add "
        "renorm square sqrt rsqrt reciprocal exp log sigmoid tanh sin cos tan "
        "_to_copy _conj _fused batch_norm layer_norm native_ group_norm embedding_bag "
        "_embedding_bag diff trapz glu gelu mish silu softplus softmax smooth_l1_loss huber_loss "
        "full_like l1_loss mse_loss "
        "floor_divide float_power true_divide addcdiv addcmul addmv addr baddbmm "
        "col2im _pdist_forward _cdist_forward _euclidean_dist dist fill rsub "
        "grid_sampler_2d grid_sampler_3d"
    ),
}


def computes(target: Any) -> bool:
    name = target._schema.name.removeprefix("aten::")
    return any(
        name == word or (word.endswith("_") and name.startswith(word))
        for words in COMPUTED.values()
        for word in words.split()
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_operator_that_only_moves_elements_has_a_rule_or_a_reason() -> None:
    """Found by running torch's own samples, with operands whose elements all differ."""
    watching = Movements()
    for info in op_db:
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        try:
            samples = list(info.sample_inputs("cpu", torch.float32))[:4]
        except Exception:
            continue
        for sample in samples:
            try:
                with watching, torch.no_grad():
                    info(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # a sample that the operator refuses is not what is tested here
                continue
    moved = {target for target, moves in watching.moved.items() if moves}
    assert len(moved & rules.keys()) > 40
    missing = {one for one in moved - rules.keys() - unsupported.keys() if not computes(one)}
    assert not missing, sorted(map(str, missing))
