"""torch itself: modes, random numbers, autograd, transforms, complex, sparse, subclasses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from ..twin import Call, call
from .table import FeatureTable

ROWS = FeatureTable()


def leaf() -> Call:
    return call(torch.randn(3, 4, requires_grad=True))


def square() -> Call:
    return call(torch.randn(4, 4))


def complex_leaf() -> Call:
    return call(torch.randn(3, 4, dtype=torch.complex64, requires_grad=True))


# --- modes ----------------------------------------------------------------------------------


@ROWS.program(leaf, backward=True)
def grad_mode_as_context_and_decorator(x: torch.Tensor) -> Any:
    @torch.no_grad()
    def frozen(t: torch.Tensor) -> torch.Tensor:
        return t * 2

    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * 3
    return frozen(x), y, z, torch.is_grad_enabled()


@ROWS.program(leaf, backward=True)
def set_grad_enabled(x: torch.Tensor) -> Any:
    with torch.set_grad_enabled(False):
        y = x * 2
    return x * y


@ROWS.program(leaf)
def inference_mode(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return (x * 2).sin()


@ROWS.program()
def inference_mode_then_more(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        y = x * 2
    return y + x


@ROWS.program(leaf, backward=True)
def autocast(x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            z = x @ x.t()
    return y, z


@ROWS.program()
def autocast_as_decorator(x: torch.Tensor) -> Any:
    @torch.autocast("cpu", torch.bfloat16)
    def product(t: torch.Tensor) -> torch.Tensor:
        return t @ t.t()

    return product(x)


@ROWS.program(split=True)
def default_device_context(x: torch.Tensor) -> Any:
    with torch.device("cpu"):
        y = torch.ones(4)
    return x + y


@ROWS.program(split=True)
def torch_function_mode_inside(x: torch.Tensor) -> Any:
    from torch.overrides import TorchFunctionMode

    class Count(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Count() as count:
        y = x * 2 + 1
    return y, count.seen


@ROWS.program(leaf, backward=True)
def profiler_record_function(x: torch.Tensor) -> Any:
    with torch.profiler.record_function("part"), torch.autograd.profiler.record_function("inner"):
        y = x * 2
    with torch.profiler.record_function("another"):
        return y + 1


# --- operators ------------------------------------------------------------------------------


@ROWS.program()
def random_operators(x: torch.Tensor) -> Any:
    noise = torch.randn_like(x) + torch.rand(4) + torch.randint(0, 3, (4,))
    return noise, torch.bernoulli(x.sigmoid()), x.clone().uniform_(), torch.randperm(3)


@ROWS.program()
def functional_dropout(x: torch.Tensor) -> Any:
    return F.dropout(x, 0.5), F.dropout2d(x[None, None], 0.5), F.gumbel_softmax(x)


@ROWS.program()
def distributions(x: torch.Tensor) -> Any:
    from torch.distributions import Normal

    normal = Normal(x, torch.ones(4), validate_args=False)
    return normal.rsample(), normal.log_prob(x + 1)


@ROWS.program(complex_leaf, backward=True)
def complex_tensors(x: torch.Tensor) -> Any:
    return x.real, (x * x.conj()).abs(), torch.view_as_real(x), x.angle(), x * 2j


@ROWS.program()
def fourier_transforms(x: torch.Tensor) -> Any:
    y = torch.fft.rfft(x)
    return torch.fft.irfft(y * 2, n=4), torch.stft(
        x.reshape(-1), 4, window=torch.hann_window(4), return_complex=True
    )


@ROWS.program(split=True)
def sparse_tensors(x: torch.Tensor) -> Any:
    s = x.relu().to_sparse()
    return torch.sparse.mm(s, x.t()), s.to_dense()


@ROWS.program(square)
def linear_algebra(x: torch.Tensor) -> Any:
    a = x @ x.t() + torch.eye(4) * 5
    return torch.linalg.solve(a, x), torch.linalg.cholesky(a), torch.linalg.norm(x), a.inverse()


@ROWS.program()
def einsum_and_friends(x: torch.Tensor) -> Any:
    return torch.einsum("ij,kj->ik", x, x), torch.tensordot(x, x, dims=([1], [1])), torch.kron(x, x)


@ROWS.program()
def reductions_with_dimensions(x: torch.Tensor) -> Any:
    return x.max(dim=1), x.topk(2), x.sort(dim=0), torch.std_mean(x), x.cumsum(0), x.unbind()


@ROWS.program()
def scaled_dot_product_attention(x: torch.Tensor) -> Any:
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@ROWS.program()
def indexing(x: torch.Tensor) -> Any:
    y = x.clone()
    y[0, 1:] = 3
    y[torch.tensor([1, 2])] += 1
    return y, x[:, torch.tensor([0, 2])], torch.where(x > 0, x, y), x.gather(1, x.argsort(1))


@ROWS.program(split=True)
def boolean_indexing(x: torch.Tensor) -> Any:
    return x[x > 0], torch.nonzero(x > 0)


@ROWS.program()
def tensors_made_of_python_values(x: torch.Tensor) -> Any:
    return torch.tensor([1.0, 2, 3, 4]) + x, torch.arange(4) * x, torch.full((2,), 3), x.new_ones(2)


@ROWS.program()
def legacy_constructor(x: torch.Tensor) -> Any:
    return (
        torch.Tensor([1, 2, 3, 4]) + x,
        torch.LongTensor([1, 2]),
        torch.FloatTensor(2, 2).fill_(1),
    )


@ROWS.program()
def shape_arithmetic(x: torch.Tensor) -> Any:
    b, n = x.shape
    return x.view(b, 2, n // 2).transpose(1, 2).reshape(b, -1), x.size(-1) ** 0.5, x.shape[:-1]


@ROWS.program()
def type_conversions(x: torch.Tensor) -> Any:
    return (
        x.to(torch.float64),
        x.half().float(),
        x.long(),
        x.to(x),
        x.type(torch.int32),
        x.type_as(x),
    )


@ROWS.program()
def library_operators(x: torch.Tensor) -> Any:
    return torch.ops.aten.add.Tensor(x, x), torch.ops.aten.mul(x, 2)


@ROWS.program(split=True)
def item_and_tolist(x: torch.Tensor) -> Any:
    return x * x.sum().item(), x.tolist()


@ROWS.program(split=True)
def branch_on_a_value(x: torch.Tensor) -> Any:
    return x * 2 if (x > 0).any() else x - 1


@ROWS.program(leaf, backward=True)
def legacy_constructors_of_a_size(x: torch.Tensor) -> Any:
    noise = torch.FloatTensor(x.size()).fill_(2) * torch.Tensor(x.shape).fill_(3)
    data = torch.FloatTensor(tuple(x.shape)) + torch.Tensor([1, 2])
    return x * noise + x.data.new(x.size()).zero_(), data, x.new(2, 2).zero_(), x.new([1, 2])


# --- autograd -------------------------------------------------------------------------------


class Clipped(torch.autograd.Function):
    """The backward is a rule of its own: gradients ten times as large, and none for `scale`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> Any:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale, x.argmax()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _index: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 10 * ctx.scale + x, None


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0] * 7


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.round_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@ROWS.program(leaf, backward=True)
def autograd_function(x: torch.Tensor) -> Any:
    return Clipped.apply(x * 2, 3.0)[0] + 1


@ROWS.program(leaf, backward=True)
def autograd_function_with_setup_context(x: torch.Tensor) -> Any:
    return WithSetup.apply(x) * 2


@ROWS.program(leaf, backward=True)
def autograd_function_in_place(x: torch.Tensor) -> Any:
    return StraightThrough.apply(x * 3)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -ctx.by * grad, None


@ROWS.program(leaf, backward=True)
def autograd_function_gives_its_input_back(x: torch.Tensor) -> Any:
    return Reversed.apply(x, 0.5) + x


WEIGHT = torch.linspace(-1, 1, 4)


class Talkative(torch.autograd.Function):
    """Uses a tensor from outside, and tells its backward all that a context can hold."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, y: torch.Tensor) -> Any:
        t = x * WEIGHT[: x.shape[-1]].sum()
        ctx.t, ctx.shape, ctx.more = t, x.shape, {"name": name, "tensors": [t, y]}
        ctx.save_for_backward(y, None)
        ctx.set_materialize_grads(False)
        index = t.argmax()
        ctx.mark_non_differentiable(index)
        return t + y, index, len(name), None

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *rest: Any) -> Any:
        assert rest == (None, None, None), rest
        assert ctx.needs_input_grad[:3] == (True, False, True), ctx.needs_input_grad
        y, nothing = ctx.saved_tensors
        assert nothing is None and ctx.more["name"] == "scale"
        return (grad * ctx.t + y).view(ctx.shape), None, grad * ctx.more["tensors"][1]


@ROWS.program(leaf, backward=True)
def autograd_function_with_all_that_a_context_holds(x: torch.Tensor) -> Any:
    return Talkative.apply(x, "scale", x * x)


class Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor, more: Any) -> Any:
        ctx.function = function
        return function(x) + more[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad * 7, None


@ROWS.program(leaf, backward=True)
def autograd_function_of_a_function(x: torch.Tensor) -> Any:
    return Applied.apply(torch.sin, x, [x.detach() * 2])


@ROWS.program(leaf, backward=True, split=True)
def autograd_function_of_a_closure(x: torch.Tensor) -> Any:
    return Applied.apply(lambda t: t * 2, x, [x])


KEPT: dict[str, torch.Tensor] = {}


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        KEPT["half"] = x / 2
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 3


@ROWS.program(leaf, backward=True)
def autograd_function_that_keeps_a_tensor(x: torch.Tensor) -> Any:
    return Keeping.apply(x) + KEPT["half"]


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        raise ValueError("no")


@ROWS.program(leaf, backward=True, split=True)
def autograd_function_that_raises(x: torch.Tensor) -> Any:
    try:
        return Refusing.apply(x * 2)
    except ValueError:
        return x * 3


@ROWS.program(leaf, backward=True)
def checkpointing(x: torch.Tensor) -> Any:
    return checkpoint(lambda t: torch.sin(t) * t.exp(), x, use_reentrant=False)


@ROWS.program(leaf, backward=True)
def checkpointing_reentrant(x: torch.Tensor) -> Any:
    return checkpoint(lambda t: torch.sin(t) * t.exp(), x, use_reentrant=True)


@ROWS.program(leaf, backward=True, split=True)
def autograd_grad_inside(x: torch.Tensor) -> Any:
    y = (x**3).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return g * 2


@ROWS.program(split=True)
def backward_inside(x: torch.Tensor) -> Any:
    w = torch.ones(4, requires_grad=True)
    (x * w).sum().backward()
    return w.grad


@ROWS.program(leaf, backward=True, split=True)
def tensor_hooks(x: torch.Tensor) -> Any:
    y = x * 2
    y.register_hook(lambda g: g * 10)
    return y * 3


@ROWS.program(leaf, backward=True, split=True)
def saved_tensor_hooks(x: torch.Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return (x * x).exp()


@ROWS.program(leaf, backward=True)
def detach_and_requires_grad(x: torch.Tensor) -> Any:
    y = x.detach().clone().requires_grad_()
    return x * y, y.is_leaf, (x * 2).requires_grad, x.detach()


@ROWS.program(split=True)
def vmap(x: torch.Tensor) -> Any:
    return torch.vmap(lambda row: row * row.sum())(x)


@ROWS.program(split=True)
def vmap_nested_with_random_numbers(x: torch.Tensor) -> Any:
    inner = torch.vmap(lambda v: v + torch.rand(()), randomness="different")
    return torch.vmap(inner, randomness="different")(x)


@ROWS.program(split=True)
def functional_grad(x: torch.Tensor) -> Any:
    return torch.func.grad(lambda t: (t**3).sum())(x)


@ROWS.program(split=True)
def functional_jacobian(x: torch.Tensor) -> Any:
    return torch.func.jacrev(lambda t: t**2)(x[0]), torch.func.vjp(torch.sin, x)[0]


@ROWS.program(split=True)
def forward_mode(x: torch.Tensor) -> Any:
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))


@ROWS.program(split=True)
def functional_call(x: torch.Tensor) -> Any:
    layer = torch.nn.Linear(4, 4)
    changed = {k: torch.ones_like(v) for k, v in layer.named_parameters()}
    return torch.func.functional_call(layer, changed, (x,))


@ROWS.program(split=True)
def tensor_subclass(x: torch.Tensor) -> Any:
    y = x.as_subclass(Tagged)
    return y + 1


class Tagged(torch.Tensor):
    pass


class Wrapped:
    """Takes part in torch's operators without being a tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.value if isinstance(a, cls) else a for a in args), **(kwargs or {})) * 10


@ROWS.program(split=True)
def torch_function_protocol(x: torch.Tensor) -> Any:
    return torch.add(Wrapped(x), 1)


@ROWS.program(split=True)
def nested_tensors(x: torch.Tensor) -> Any:
    nested = torch.nested.nested_tensor([x, x[:2]])
    return torch.nested.to_padded_tensor(nested * 2, 0.0)


@ROWS.program(split=True)
def scripted_function(x: torch.Tensor) -> Any:
    return scripted(x)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@ROWS.program(split=True)
def compiled_inside(x: torch.Tensor) -> Any:
    return torch.compile(lambda t: t * 2, backend="eager")(x)


@ROWS.program(split=True)
def data_attribute(x: torch.Tensor) -> Any:
    y = x.clone()
    y.data = x * 2
    return y + 1


@ROWS.program()
def is_compiling_is_false(x: torch.Tensor) -> Any:
    return x * (3 if torch.compiler.is_compiling() else 2)


@ROWS.program()
def weights_initialised_inside(x: torch.Tensor) -> Any:
    w = torch.empty(4, 4)
    torch.nn.init.xavier_uniform_(w)
    return F.linear(x, w)


@ROWS.program(leaf, backward=True)
def losses(x: torch.Tensor) -> Any:
    target = torch.tensor([0, 1, 2])
    return F.cross_entropy(x, target), F.mse_loss(x, torch.zeros_like(x)), F.kl_div(x, x.exp())


@ROWS.program(leaf, backward=True)
def views_and_in_place_under_grad(x: torch.Tensor) -> Any:
    y = x * 2
    y[0].mul_(3)
    y.view(-1)[5:].add_(1)
    return y.sin()


# --- what torch answers or does without an operator ---------------------------------------------


@ROWS.program(leaf)
def tensor_compared_with_containers(x: torch.Tensor) -> Any:
    return x * 2, x == [], x == {}, x != (), torch.jit.isinstance(x, list[torch.Tensor])


@ROWS.program(square)
def requires_grad_set_as_it_is(x: torch.Tensor) -> Any:
    x.requires_grad = False
    return x * 2


@ROWS.program(square)
def tracing_state_set_to_none(x: torch.Tensor) -> Any:
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    y = x * 2
    torch._C._set_tracing_state(state)
    return y
