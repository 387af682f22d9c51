"""Tensor metadata, overlap and torch's global state as guard programs see them."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from magjit import _C  # noqa: E402

F = torch.float32


def accepts(example: Any, meta: tuple[Any, ...] | None = None) -> Callable[[object], bool]:
    """A check of one argument against the example's metadata."""
    program = _C.GuardProgram([("arg", 0, 0), ("tensor", 0, meta or _C.tensor_meta(example))], 1)

    def check(value: object) -> bool:
        answer = program.check((value,))
        assert answer is program.check((value,))
        assert answer is (program.explain((value,)) is None)
        return answer

    assert meta or check(example)
    return check


def inference_tensor() -> Any:
    with torch.inference_mode():
        return torch.zeros(2, 3)


class Sub(torch.Tensor):
    pass


KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.zeros(2, 3),
    "other size": lambda: torch.zeros(3, 2),
    "more dims": lambda: torch.zeros(2, 3, 1),
    "fewer dims": lambda: torch.zeros(6),
    "scalar": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0, 3),
    "seven dims": lambda: torch.zeros(1, 2, 1, 2, 1, 2, 1),
    "seven other dims": lambda: torch.zeros(1, 2, 1, 2, 1, 2, 2),
    "transposed": lambda: torch.zeros(3, 2).t(),
    "expanded": lambda: torch.zeros(1, 3).expand(2, 3),
    "requires_grad": lambda: torch.zeros(2, 3, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.zeros(2, 3)),
    "frozen parameter": lambda: nn.Parameter(torch.zeros(2, 3), requires_grad=False),
    "float64": lambda: torch.zeros(2, 3, dtype=torch.float64),
    "float16": lambda: torch.zeros(2, 3, dtype=torch.float16),
    "bfloat16": lambda: torch.zeros(2, 3, dtype=torch.bfloat16),
    "int64": lambda: torch.zeros(2, 3, dtype=torch.int64),
    "uint8": lambda: torch.zeros(2, 3, dtype=torch.uint8),
    "bool": lambda: torch.zeros(2, 3, dtype=torch.bool),
    "complex": lambda: torch.zeros(2, 3, dtype=torch.complex64),
    "conjugated": lambda: torch.zeros(2, 3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.zeros(2, 3, dtype=torch.complex128).conj().imag,
    "inference": inference_tensor,
    "meta": lambda: torch.zeros(2, 3, device="meta"),
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "csr": lambda: torch.zeros(2, 3).to_sparse_csr(),
    "subclass": lambda: torch.zeros(2, 3).as_subclass(Sub),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_accepts_itself_and_no_other(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check = accepts(KINDS[kind]())
        for other, make in KINDS.items():
            assert check(make()) is (other == kind), other


def test_non_leaf_is_like_a_leaf_that_requires_grad() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    check = accepts(leaf)
    assert check(leaf * 2) and check(leaf[:]) and not check(leaf.detach())
    with torch.no_grad():
        assert not check(leaf * 2)
    base = torch.zeros(2)
    view = base[:]
    assert not check(view)
    base.mul_(leaf)
    assert check(view), "a view of a base that requires grad by now"


def test_changes_in_place() -> None:
    m = nn.Linear(3, 2)
    check = accepts(m.weight)
    changes: list[Callable[[], object]] = [
        lambda: m.weight.requires_grad_(False),
        lambda: m.half(),
        lambda: setattr(m.weight, "data", torch.zeros(2, 4)),
        lambda: setattr(m.weight, "data", torch.zeros(3, 2).t()),
        lambda: m.to("meta"),
        lambda: setattr(m, "weight", nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))),
    ]
    for change in changes:
        m.weight = nn.Parameter(torch.zeros(2, 3))
        assert check(m.weight)
        change()
        assert not check(m.weight)
    buffer = torch.zeros(2, 3)
    check_buffer = accepts(buffer)
    buffer.resize_(3, 3)
    assert not check_buffer(buffer)
    buffer.resize_(2, 3)
    assert check_buffer(buffer)
    m = nn.Linear(3, 2)
    m.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, assign=True)
    assert check(m.weight)


def test_things_that_are_no_tensors() -> None:
    check = accepts(torch.zeros(2))
    for value in (None, 1, [0.0, 0.0], torch.zeros, torch.Size([2]), torch.nn.Module()):
        assert not check(value)
    with pytest.raises(TypeError, match="expected a torch.Tensor"):
        _C.tensor_meta(1)


def test_free_dimensions() -> None:
    meta = _C.tensor_meta(torch.zeros(2, 3))
    free = accepts(None, (*meta[:4], (None, 3), (None, 1), None, meta[7]))
    assert free(torch.zeros(5, 3)) and free(torch.zeros(5, 6)[:, :3])
    assert free(torch.zeros(2, 3, requires_grad=True))
    assert not free(torch.zeros(5, 4)) and not free(torch.zeros(3, 5).t())
    any_strides = accepts(None, (*meta[:5], None, *meta[6:]))
    assert any_strides(torch.zeros(3, 2).t()) and not any_strides(torch.zeros(3, 2))


def test_metadata_that_only_user_code_knows_is_refused() -> None:
    from torch._subclasses import FakeTensorMode

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dispatch_sizes_strides_policy="sizes"
            )

        @classmethod
        def __torch_dispatch__(cls, *args: Any) -> Any:
            raise AssertionError("user code ran")

    refused = [Wrapper(torch.zeros(2)), FakeTensorMode().from_tensor(torch.zeros(2))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused.append(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]))
    seen: list[BaseException] = []
    plain = accepts(torch.zeros(2))
    sub = accepts(torch.zeros(2).as_subclass(Sub))

    def inner(x: Any) -> Any:
        try:
            _C.tensor_meta(x)
        except ValueError as e:
            seen.append(e)
        assert not plain(x)
        return x.sum()

    torch.vmap(inner)(torch.zeros(4, 2))
    torch.func.grad(inner)(torch.zeros(2))
    assert len(seen) == 2
    for tensor in refused:
        with pytest.raises(ValueError, match="without plain metadata"):
            _C.tensor_meta(tensor)
        assert not plain(tensor) and not sub(tensor)


def test_malformed_metadata() -> None:
    good = _C.tensor_meta(torch.zeros(2, 3))
    bad: list[Any] = [
        (),
        good[:7],
        (*good, 1),
        (int, *good[1:]),
        (*good[:1], "x", *good[2:]),
        (*good[:1], 2**40, *good[2:]),
        (*good[:4], [2, 3], *good[5:]),
        (*good[:4], (2, -1), *good[5:]),
        (*good[:5], (1,), *good[6:]),
        (*good[:6], 1, good[7]),
        (*good[:7], None),
    ]
    for meta in bad:
        with pytest.raises(ValueError, match=r"instruction 1 \(tensor\)"):
            _C.GuardProgram([("arg", 0, 0), ("tensor", 0, meta)], 1)


def test_a_hundred_thousand_checks_leak_nothing() -> None:
    tensors = [torch.zeros(2, 3), nn.Parameter(torch.zeros(2)), torch.zeros(1, 2).t().conj()]
    program = _C.GuardProgram(
        [("arg", i, i) for i in range(3)]
        + [("tensor", i, _C.tensor_meta(t)) for i, t in enumerate(tensors)]
        + [("global_state",), ("no_overlap", (0, 1, 2))],
        3,
    )
    args = tuple(tensors)

    def rounds(n: int) -> None:
        for _ in range(n):
            assert program.check(args)
            assert not program.check(args[:2])

    rounds(100)
    gc.collect()
    before = sys.getallocatedblocks()
    rounds(50_000)
    gc.collect()
    assert sys.getallocatedblocks() - before < 50


def test_this_torch_is_read_the_fast_way() -> None:
    """Versions that MagJIT supports; elsewhere the slow ways are as right."""
    binding = _C.torch_binding()
    assert binding["raw"] and binding["requires_grad"] and binding["keys_offset"] > 0
    state = _C.global_state()
    python_only = {"default_dtype", "forward_ad"}
    flags = {name for name, value in state.items() if isinstance(value, (bool, str))}
    assert flags <= python_only | {
        "function_enabled",
        "function_all_disabled",
        "compiling",
        "exporting",
    }
    assert "precision_cuda_matmul" in state and "matmul_precision" not in state


@pytest.mark.gpu
def test_cuda_tensors() -> None:
    kinds: dict[str, Callable[[], Any]] = {
        "cpu": lambda: torch.zeros(2, 3),
        "pinned": lambda: torch.zeros(2, 3).pin_memory(),
        "cuda": lambda: torch.zeros(2, 3, device="cuda"),
        "half": lambda: torch.zeros(2, 3, device="cuda", dtype=torch.float16),
        "transposed": lambda: torch.zeros(3, 2, device="cuda").t(),
        "parameter": lambda: nn.Parameter(torch.zeros(2, 3, device="cuda")),
        "requires_grad": lambda: torch.zeros(2, 3, device="cuda", requires_grad=True),
        "channels_last": lambda: torch.zeros(2, 3, 4, 5, device="cuda").to(
            memory_format=torch.channels_last
        ),
        "channels_first": lambda: torch.zeros(2, 3, 4, 5, device="cuda"),
        "sparse": lambda: torch.zeros(2, 3, device="cuda").to_sparse(),
    }
    same = {"cpu", "pinned"}
    for kind, make in kinds.items():
        check = accepts(make())
        for other, make_other in kinds.items():
            assert check(make_other()) is (other == kind or {kind, other} == same), (kind, other)
    m = nn.Linear(3, 2)
    on_cpu, on_gpu = accepts(m.weight), accepts(nn.Linear(3, 2, device="cuda").weight)
    m.cuda()
    assert on_gpu(m.weight) and not on_cpu(m.weight)
    m.cpu()
    assert on_cpu(m.weight) and not on_gpu(m.weight)
    base = torch.zeros(10, device="cuda")
    assert _C.tensor_relation(base, base[5:]) == 20
    assert _C.tensor_relation(base[:5], base[5:]) is None


@pytest.mark.gpu
def test_cuda_state() -> None:
    states: dict[str, Callable[[], Any]] = {
        "none": contextlib.nullcontext,
        "autocast": lambda: torch.autocast("cuda"),
        "autocast bfloat16": lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        "autocast cpu": lambda: torch.autocast("cpu"),
        "tf32": lambda: flag(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
        ),
        "default device": lambda: torch.device("cuda"),
    }
    for name, state in states.items():
        with state():
            guards = _C.GuardProgram([("global_state",)], 0)
        for other, other_state in states.items():
            with other_state():
                assert guards.check(()) is (other == name), (name, other)


# -- overlap -------------------------------------------------------------------------------------


def test_overlap() -> None:
    base = torch.zeros(10)
    a, b = base[:5], base[5:]
    assert _C.tensor_relation(a, b) is None
    assert _C.tensor_relation(base, base) == 0
    assert _C.tensor_relation(base, b) == 20 and _C.tensor_relation(b, base) == -20
    assert _C.tensor_relation(base[::2], base[1::2]) == 4, "interleaved counts as overlap"
    assert _C.tensor_relation(base, torch.zeros(0)) is None
    apart = _C.GuardProgram([*[("arg", i, i) for i in range(3)], ("no_overlap", (0, 1, 2))], 3)
    other = torch.zeros(3)
    assert apart.check((a, b, other)) and apart.check((b, a, other[:0]))
    assert not apart.check((a, base, other)) and not apart.check((other, a, other))
    assert not apart.check((a, b, 1)) and not apart.check((a, b, torch.zeros(3, device="meta")))
    by_20 = _C.GuardProgram([("arg", 0, 0), ("arg", 1, 1), ("overlap", 0, 1, 20)], 2)
    assert by_20.check((base, b)) and not by_20.check((base, base)) and not by_20.check((a, b))
    none = _C.GuardProgram([("arg", 0, 0), ("arg", 1, 1), ("overlap", 0, 1, None)], 2)
    assert none.check((a, b)) and not none.check((base, b))
    many = [torch.zeros(2) for _ in range(100)]
    hundred = _C.GuardProgram(
        [*[("arg", i, i) for i in range(100)], ("no_overlap", tuple(range(100)))], 100
    )
    assert hundred.check(tuple(many)) and not hundred.check((*many[:99], many[0][1:]))
    with pytest.raises(ValueError, match="instruction 2"):
        _C.GuardProgram([("arg", 0, 0), ("arg", 1, 1), ("overlap", 0, 1, "x")], 2)
    with pytest.raises(ValueError, match="without plain metadata"):
        _C.tensor_relation(base, torch.zeros(3, device="meta"))


# -- global state --------------------------------------------------------------------------------


@contextlib.contextmanager
def flag(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


class NoMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class NoDispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


C = torch._C
STATES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast cpu": lambda: torch.autocast("cpu"),
    "autocast cpu float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast cache": lambda: flag(
        torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False
    ),
    "default dtype": lambda: flag(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: torch.device("meta"),
    "deterministic": lambda: flag(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "num_threads": lambda: flag(torch.get_num_threads, torch.set_num_threads, 2),
    "matmul high": lambda: flag(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
    ),
    "matmul medium": lambda: flag(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "cudnn tf32": lambda: flag(C._get_cudnn_allow_tf32, C._set_cudnn_allow_tf32, False),
    "cudnn benchmark": lambda: flag(C._get_cudnn_benchmark, C._set_cudnn_benchmark, True),
    "cudnn deterministic": lambda: flag(
        C._get_cudnn_deterministic, C._set_cudnn_deterministic, True
    ),
    "fp16 reduction": lambda: flag(
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        lambda v: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", v),
        False,
    ),
    "mkldnn": lambda: flag(C._get_mkldnn_enabled, C._set_mkldnn_enabled, False),
    "sdp math": lambda: flag(C._get_math_sdp_enabled, C._set_sdp_use_math, False),
    "function mode": NoMode,
    "dispatch mode": NoDispatch,
    "subclasses off": C.DisableTorchFunctionSubclass,
    "functions off": C.DisableTorchFunction,
    "forward ad": torch.autograd.forward_ad.dual_level,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.fixture(scope="module")
def every_state_was_set() -> None:
    """Torch tells a precision that was set from one that never was, also when it is the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for state in STATES.values():
            with state():
                pass


@pytest.mark.usefixtures("every_state_was_set")
@pytest.mark.parametrize("name", STATES)
def test_each_state_is_told_from_every_other(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with STATES[name]():
            guards = _C.GuardProgram([("global_state",)], 0)
            given = _C.GuardProgram([("global_state", _C.global_state())], 0)
            assert guards.check(()) and given.check(())
        assert not guards.check(()) and not given.check(())
        for other, state in STATES.items():
            with state():
                same = other == name and other not in ("function mode", "dispatch mode")
                assert guards.check(()) is same, other
                assert given.check(()) is same, other


def test_modes_by_identity_and_device_contexts_by_device() -> None:
    mode = NoMode()
    with mode:
        guards = _C.GuardProgram([("global_state",)], 0)
    with mode:
        assert guards.check(())
    with NoMode():
        assert not guards.check(())
    with mode, mode:
        assert not guards.check(())
    with torch.device("cpu"):
        cpu = _C.GuardProgram([("global_state",)], 0)
    with torch.device("cpu"):
        assert cpu.check(())
    with torch.device("meta"):
        assert not cpu.check(())


def test_functorch_level_and_tracing() -> None:
    outside = _C.GuardProgram([("global_state",)], 0)
    inside: list[_C.GuardProgram] = []

    def f(x: Any) -> Any:
        assert not outside.check(())
        inside.append(_C.GuardProgram([("global_state",)], 0))
        assert inside[0].check(())
        return x * 2

    torch.vmap(f)(torch.zeros(3))
    assert outside.check(()) and not inside[0].check(())
    torch.vmap(f)(torch.zeros(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = []
        torch.jit.trace(lambda x: (seen.append(outside.check(())), x + 1)[1], torch.zeros(2))
    assert seen and not any(seen)


def test_compile_flags() -> None:
    guards = _C.GuardProgram([("global_state",)], 0)
    assert guards.check(()) and guards.check(())
    import torch.compiler as compiler

    with flag(
        lambda: compiler._is_compiling_flag,
        lambda v: setattr(compiler, "_is_compiling_flag", v),
        True,
    ):
        assert not guards.check(())
    assert guards.check(())


def test_states_given_in_part_and_malformed() -> None:
    only = _C.GuardProgram([("global_state", {"grad_mode": 1})], 0)
    assert only.check(())
    with torch.inference_mode(False), torch.autocast("cpu"):
        assert only.check(())
    with torch.no_grad():
        assert not only.check(())
    bad: list[Any] = [5, {"unknown": 1}, {"grad_mode": "x"}, {"function_modes": []}, {5: 1}]
    for state in bad:
        with pytest.raises(ValueError, match=r"instruction 0 \(global_state\)"):
            _C.GuardProgram([("global_state", state)], 0)


def test_programs_without_torch() -> None:
    code = (
        "from magjit import _C; import sys; assert 'torch' not in sys.modules\n"
        "for call in (_C.global_state, lambda: _C.tensor_meta(1)):\n"
        "    try: call()\n"
        "    except RuntimeError as e: print(e)\n"
        "try: _C.GuardProgram([('global_state',)], 0)\n"
        "except (RuntimeError, ValueError) as e: print(e)\n"
        "import torch; print(len(_C.global_state()) > 20)\n"
        "print(_C.GuardProgram([('global_state',)], 0).check(()))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[0] == "torch is not imported"
    assert out.stdout.split()[-2:] == ["True", "True"]
