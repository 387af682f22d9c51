"""One program, two ways: the GPU's words by the simulator, the reference over nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magjit_dvm import reference
from magjit_dvm.cuda.encode import Encoded, Machine, encode
from magjit_dvm.cuda.forms import form_of
from magjit_dvm.cuda.parts import Parts
from magjit_dvm.cuda.simulate import run_image
from magjit_dvm.cuda.warps import most_threads
from magjit_dvm.cuda.words import Image
from magjit_dvm.program import Program
from tests.dvm.checking import apart, fresh, places, require_results
from tests.dvm_cuda.agreeing import check_encoders

BIG = Machine()
SMALL = Machine(multiprocessors=2, shared_bytes=60000)
"""Of little memory: fewer warps, fewer stages, longer rows in chunks."""


def results_for(program: Program, encoded: Encoded) -> list[torch.Tensor | None]:
    """A tensor for each output that a call allocates, full of bytes that no result has."""
    made: list[torch.Tensor | None] = []
    for one, layout in zip(program.outputs, encoded.layouts, strict=True):
        dtype = program.nodes[one.node].dtype.torch
        like = torch.empty_strided(layout.sizes, layout.strides, dtype=dtype)
        made.append(fresh(like) if one.allocated else None)
    return made


def addresses(tensors: Sequence[Any]) -> list[int]:
    """Of tensors; 0 for what is none."""
    return [one.data_ptr() if isinstance(one, torch.Tensor) else 0 for one in tensors]


def simulated(
    program: Program, arguments: Sequence[Any], machine: Machine = BIG
) -> tuple[Image | None, list[torch.Tensor]]:
    """The image of a call, and the results by the simulator."""
    assert check_encoders(program, arguments, machine) != "left"
    encoded = encode(program, arguments, machine)
    made = results_for(program, encoded)
    results = [one for one in made if one is not None]
    if encoded.image is None:
        return None, results
    written = [arguments[one.whole] for one in program.outputs if one.whole >= 0]
    one = encoded.image
    assert one.threads <= most_threads(one.each, form_of(one)), "its kernel has fewer"
    parts = torch.full((one.parts.count if one.parts else 0,), torch.nan)
    image = one.pack(addresses([*arguments, *made, parts]))
    outputs = [*results, *written, parts]
    run_image(image, one.each, one.shared_bytes, arguments, outputs, one.blocks)
    if one.parts:
        store_sums(one.parts, parts, [*arguments, *made])
    return one, results


def store_sums(parts: Parts, memory: torch.Tensor, tensors: Sequence[Any]) -> None:
    """As the second kernel does."""
    for (argument, _), total in zip(parts.results, parts.added(memory), strict=True):
        tensors[argument].copy_(total.view_as(tensors[argument]))


def check_words(program: Program, arguments: Sequence[Any], machine: Machine = BIG) -> Image | None:
    """Run a program both ways and compare; its image, or None if there is nothing to compute."""
    ours, theirs = apart(program, arguments), apart(program, arguments)
    image, results = simulated(program, ours, machine)
    require_results(program, results, reference.run(program, theirs), ours, theirs)
    require_rest(program, results, ours)
    return image


def require_rest(
    program: Program, results: Sequence[torch.Tensor], arguments: Sequence[Any]
) -> None:
    """Beside the parts that a program writes, results and wholes have the bytes they had."""
    clean, others = [fresh(one) for one in results], apart(program, arguments)
    pairs = zip(places(program, clean, others), places(program, results, arguments), strict=True)
    for to, part in pairs:
        to.copy_(part)
    for one in {one.whole for one in program.outputs if one.whole >= 0}:
        clean.append(others[one])
        results = [*results, arguments[one]]
    for number, (one, other) in enumerate(zip(clean, results, strict=True)):
        assert torch.equal(_bytes(one), _bytes(other)), f"whole {number}: written beside its parts"


def _bytes(one: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
