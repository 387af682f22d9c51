"""Compiling and launching kernels.

A kernel's source is written once into a file named by its hash and loaded as a module (Triton
reads the source of its functions from files; compiled code is in Triton's own disk cache).  A
launch passes plain integers to the launcher that Triton generated: no look-up by type, no
specialisation of values at each call.  What a variant was compiled for is asked at each launch:
whether pointers and sizes are multiples of 16, and whether addresses need 64 bits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from magjit_triton.codegen.kernel import WIDE_FROM, Kernel
from magjit_triton.codegen.printer import HEADER, expression

__all__ = ["Launcher", "compile_for", "has_triton", "interpreting", "load_function"]

_DESCRIBES = 90
"""The first architecture that loads tiles by descriptors."""

POINTERS = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


def has_triton() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


@cache
def _source_folder() -> Path:
    from magjit.plugin.cache import disk_cache

    folder = disk_cache().directory / "triton_sources"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="magjit-triton-"))
    return folder


@cache
def load_function(source: str, name: str) -> Any:
    """The kernel ``name`` of a module with this source."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    path = _source_folder() / f"k{digest[:24]}.py"
    if not path.exists() or path.read_text() != source:
        pending = path.with_suffix(f".{os.getpid()}")
        pending.write_text(source)
        pending.rename(path)
    spec = importlib.util.spec_from_file_location(f"magjit_triton_kernels.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def compile_for(
    kernel: Kernel,
    target: Any,
    *,
    aligned: Sequence[bool] = (),
    multiples: Sequence[bool] = (),
    wide_sizes: bool = False,
) -> Any:
    """A kernel as Triton compiles it for a target; needs no GPU.

    Args:
        aligned: which pointers are multiples of 16; all by default.
        multiples: which sizes are multiples of 16; none by default.
        wide_sizes: whether sizes are passed in 64 bits.
    """
    import triton
    from triton.compiler import ASTSource

    function = load_function(HEADER + kernel.text(kernel.blocks), kernel.name)
    pointers = len(kernel.buffers)
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for number, name in enumerate(kernel.parameters):
        if number < pointers:
            signature[name] = POINTERS[kernel.dtypes[number]]
            divisible = not aligned or aligned[number]
        else:
            signature[name] = "i64" if wide_sizes or kernel.blocks.wide else "i32"
            divisible = bool(multiples) and multiples[number - pointers]
        if divisible:
            attributes[(number,)] = [["tt.divisibility", 16]]
    for number, one in enumerate(kernel.descriptors):
        element = POINTERS[kernel.dtypes[one.buffer]].removeprefix("*")
        signature[f"d{number}"] = f"tensordesc<{element}[{','.join(map(str, one.block))}]>"
    source = ASTSource(function, signature=signature, constexprs={}, attrs=attributes)
    options: dict[str, Any] = {
        "num_warps": kernel.blocks.warps,
        "num_stages": kernel.blocks.stages,
        # What eager rounds between two operators is rounded here.
        "enable_fp_fusion": False,
    }
    if kernel.checks:
        options.update(debug=True, sanitize_overflow=False)
    return triton.compile(source, target=target, options=options)


class Launcher:
    """Launches one kernel: ``launcher(stream, *tensors, *sizes)``.

    Args:
        general: whether one variant serves all sizes, so that no call with other sizes compiles.
    """

    def __init__(self, kernel: Kernel, *, general: bool = False) -> None:
        self.kernel = kernel
        self._general = general
        self.pointers = len(kernel.buffers)
        names = ", ".join(symbol.name for symbol in kernel.symbols)
        first, second = kernel.grid()
        self._grid = eval(f"lambda {names}: ({first}, {second})")
        static = not kernel.symbols
        self._fixed_grid = self._grid() if static else None
        self._variants: dict[Any, Callable[..., None]] = {}
        self._extents = None
        if any(not extent.is_Integer for extent in kernel.extents):
            extents = ", ".join(map(expression, kernel.extents))
            self._extents = eval(f"lambda {names}: ({extents},)")

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Start the kernel on tensors and sizes."""
        if self._extents is None and self._fixed_grid is not None:
            sizes: tuple[Any, ...] = ()
            first, second = self._fixed_grid
        else:
            sizes = arguments[self.pointers :]
            first, second = self._grid(*sizes)
        if first == 0 or second == 0:
            return
        places = [tensor.data_ptr() for tensor in arguments[: self.pointers]]
        bits = 0
        for place in places:
            bits |= place
        key: Any = bits & 15
        if key or sizes:
            key = (
                tuple(place & 15 == 0 for place in places),
                () if self._general else tuple(size & 15 == 0 for size in sizes),
                self._wide(sizes),
            )
        run = self._variants.get(key)
        if run is None:
            run = self._variants[key] = self._variant(key)
        run(first, second, stream, arguments[: self.pointers], places, sizes)

    def _wide(self, sizes: Sequence[int]) -> bool:
        if self._extents is None:
            return self.kernel.blocks.wide
        return any(extent >= WIDE_FROM for extent in self._extents(*sizes))

    def _variant(self, key: Any) -> Callable[..., None]:
        aligned: Sequence[bool] = ()
        multiples: Sequence[bool] = ()
        kernel = self.kernel
        if isinstance(key, tuple):
            aligned, multiples, wide = key
            if wide != kernel.blocks.wide:
                kernel = kernel.with_blocks(replace(kernel.blocks, wide=wide))
        if aligned and not all(aligned[one.buffer] for one in kernel.descriptors):
            kernel = kernel.by_pointers()
        descriptors = _Descriptors(kernel) if kernel.descriptors else None
        if interpreting():
            function = load_function(HEADER + kernel.text(kernel.blocks), kernel.name)

            def interpreted(
                first: int, second: int, stream: int, tensors: Any, places: Any, sizes: Any
            ) -> None:
                more = descriptors(tensors, places, sizes) if descriptors is not None else ()
                function[(first, second)](*tensors, *sizes, *more)

            return interpreted
        return _compiled(kernel, aligned, multiples, descriptors)


class _Descriptors:
    """What a launch passes for described operands: ``descriptors(tensors, places, sizes)``."""

    def __init__(self, kernel: Kernel) -> None:
        names = ", ".join(symbol.name for symbol in kernel.symbols)
        numbers = [", ".join(map(expression, one.expressions)) for one in kernel.descriptors]
        self._numbers = eval(f"lambda {names}: ({''.join(f'({one}), ' for one in numbers)})")
        self._kernel = kernel
        self._last: tuple[Any, list[Any]] | None = None

    def __call__(self, tensors: Any, places: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        if interpreting():
            return self._made(tensors, places, sizes)
        key = (tuple(places), tuple(sizes))
        last = self._last
        if last is None or last[0] != key:
            last = self._last = key, self._made(None, places, sizes)
        return last[1]

    def _made(self, tensors: Any, places: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        from triton.tools.tensor_descriptor import TensorDescriptor

        made = []
        wanted = zip(self._kernel.descriptors, self._numbers(*sizes), strict=True)
        for one, (offset, outer, inner, stride) in wanted:
            outer, inner = max(outer, 1), max(inner, 1)
            dtype = self._kernel.dtypes[one.buffer]
            base: Any = _Memory(places[one.buffer] + offset * dtype.itemsize, dtype)
            if tensors is not None:  # The interpreter reads the tensor's own memory.
                memory = tensors[one.buffer]
                start = memory.storage_offset() + offset
                base = torch.as_strided(memory, (outer, inner), (stride, 1), start)
            made.append(TensorDescriptor(base, [outer, inner], [stride, 1], list(one.block)))
        return made


@dataclass(frozen=True, slots=True)
class _Memory:
    """A place, in the way of a tensor: a descriptor that is kept keeps no tensor alive."""

    place: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.place


def _compiled(
    kernel: Kernel,
    aligned: Sequence[bool],
    multiples: Sequence[bool],
    descriptors: _Descriptors | None,
) -> Callable[..., None]:
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    if descriptors is not None and target.arch < _DESCRIBES:
        kernel, descriptors = kernel.by_pointers(), None
    compiled = compile_for(kernel, target, aligned=aligned, multiples=multiples)
    run = compiled.run
    function, packed = compiled.function, compiled.packed_metadata

    def launch(first: int, second: int, stream: int, tensors: Any, places: Any, sizes: Any) -> None:
        run(first, second, 1, stream, function, packed, None, None, None, *places, *sizes)

    if descriptors is None:
        return launch

    def launch_with(
        first: int, second: int, stream: int, tensors: Any, places: Any, sizes: Any
    ) -> None:
        more = descriptors(tensors, places, sizes)
        run(first, second, 1, stream, function, packed, None, None, None, *places, *sizes, *more)

    return launch_with
