"""Which library computes a convolution is no guard, where its result lies in memory alike."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from magjit.plugin.convolutions import _is_alike

LIBRARIES = torch._C._ConvBackend  # type: ignore[attr-defined]
IMAGES = torch.randn(2, 3, 4, 4)
WEIGHT = torch.randn(5, 3, 1, 1)
LAST = torch.channels_last

BATCHES = """
import torch, magjit
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 1)
).eval().to(memory_format=torch.channels_last)
compiled = magjit.compile(model, backend="aot_eager")
with torch.no_grad():
    for batch in (4, 11, 16, 3, 20, 2):
        x = torch.randn(batch, 8, 6, 6).to(memory_format=torch.channels_last)
        made, wanted = compiled(x), model(x)
        torch.testing.assert_close(made, wanted)
        assert made.stride() == wanted.stride()
print(magjit.stats(compiled).captures)
"""


@pytest.mark.parametrize("weight", [WEIGHT, WEIGHT.to(memory_format=LAST)])
@pytest.mark.parametrize("library", ["Mkldnn", "Slow2d"])
def test_images_of_channels_last_are_alike(library: str, weight: torch.Tensor) -> None:
    assert _is_alike(getattr(LIBRARIES, library), IMAGES.to(memory_format=LAST), weight)


def test_others_may_not_be() -> None:
    given = IMAGES.to(memory_format=LAST)
    assert not _is_alike(LIBRARIES.NnpackSpatial, given, WEIGHT)
    assert not _is_alike(LIBRARIES.Slow2d, given[:, :, 0], WEIGHT[:, :, 0])
    with torch.backends.mkldnn.flags(enabled=False):
        assert not _is_alike(LIBRARIES.Slow2d, given, WEIGHT)


def test_batches_on_both_sides_of_a_library_s_bound() -> None:
    """With one thread ATen chooses another library from 16 images on."""
    done = subprocess.run([sys.executable, "-c", BATCHES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"]
