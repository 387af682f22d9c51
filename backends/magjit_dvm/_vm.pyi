from collections.abc import Callable
from typing import Any, Self

class NotEncodable(ValueError): ...
class DeviceError(RuntimeError): ...

class Fused:
    fallback: Callable[..., Any] | None
    source: Any
    def __init__(
        self,
        rank: int,
        inputs: list[Any],
        nodes: list[Any],
        outputs: list[Any],
        fallback: Callable[..., Any] | None = None,
        source: Any = None,
        /,
    ) -> None: ...
    def __call__(self, *args: Any) -> Any: ...
    def encode(self, *args: Any) -> dict[str, Any]: ...
    def kept(self) -> int: ...
    def panel(
        self,
        window: tuple[tuple[int, int, int, int], ...],
        number: int,
        results: tuple[Any, ...] | None,
        /,
        *args: Any,
    ) -> tuple[Any, ...]: ...

class CudaFused:
    fallback: Callable[..., Any] | None
    def __new__(
        cls,
        program: Any,
        fallback: Callable[..., Any] | None = None,
        approximate: bool = False,
        home: int = -1,
        device_type: int = ...,
        /,
    ) -> Self: ...
    def __call__(self, *args: Any) -> Any: ...
    def kept(self) -> int: ...
    def encode(
        self, machine: tuple[int, ...], /, *args: Any
    ) -> (
        tuple[
            list[tuple[tuple[int, ...], tuple[int, ...]]],
            bytes,
            bytes,
            int,
            tuple[int, int, int],
            bool,
            int,
            list[tuple[int, int]],
            tuple[int, int],
        ]
        | None
    ): ...

class Views:
    def __new__(
        cls,
        operators: tuple[tuple[int, tuple[int, ...]], ...],
        n_given: int,
        by_torch: Callable[..., Any],
        /,
    ) -> Self: ...
    def __call__(self, tensor: Any, /, *numbers: int) -> Any: ...

def bind(example: Any, impl: int, tensor: type, parameter: type, steal: Any, /) -> None: ...
def convolution(*args: Any) -> Any: ...
def convolution_by(function: Callable[..., Any], /) -> None: ...
def linear(x: Any, weight: Any, bias: Any = None, /) -> Any: ...
def linear_by(function: Callable[..., Any], /) -> None: ...
def cuda_gpu(device: int, machine: tuple[int, ...], counters: int, n_counters: int, /) -> None: ...
def cuda_hooks(
    kernel: Callable[[int, int, int, int, int], int], allocate: Callable[..., Any], /
) -> None: ...
def cuda_words(
    numbers: dict[str, int], rows: list[Any], limits: tuple[int, ...], uses: bytes, /
) -> None: ...
def cuda_load(
    device: int, cubin: bytes, name: str, shared_bytes: int, overlaps: bool, /
) -> int: ...
def cuda_launch(
    function: int,
    blocks: int,
    threads: int,
    shared_bytes: int,
    stream: int,
    image: bytes,
    patches: bytes,
    addresses: tuple[int, ...],
    counters: int,
    n_counters: int,
    /,
) -> None: ...
def cuda_pair(
    plan: tuple[Any, ...],
    given: tuple[Any, ...],
    ending: tuple[Any, ...],
    numbers: bytes,
    shapes: tuple[tuple[int, ...], ...],
    /,
) -> tuple[Any, ...] | None: ...
def cuda_spans() -> list[tuple[int, int, int, int, int]]: ...
def level() -> str: ...
def machine(
    local_bytes: int = ...,
    step_bytes: int = ...,
    grain: int = ...,
    cached_bytes: int = ...,
    /,
) -> tuple[int, int, int, int]: ...
def observe(seen: list[Any] | None, /) -> None: ...
def stacked(operators: tuple[Fused, ...], /, *args: Any) -> tuple[Any, ...]: ...
def timing(on: bool, /) -> list[int]: ...
def verify(image: bytes, extents: list[tuple[int, int]], /) -> str | None: ...
