"""The interpreter compiles for each architecture, within its registers: no GPU is needed."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from magjit.plugin import BackendError
from magjit_dvm.cuda import build
from magjit_dvm.cuda.channel_code import CHANNELS, CHANNELS_NAMES, channels_source
from magjit_dvm.cuda.forms import (
    ADDING,
    ALONE,
    BATCHED,
    CHUNKED,
    FLAT,
    FORMS,
    GRADIENTS,
    HALF,
    LANES,
    NORMS,
    QUARTER,
    READ_ONCE,
    SQUARES,
    STACKED,
    SUMMING,
    WHOLE,
    has_case,
    kernel_name,
    own_tables,
)
from magjit_dvm.cuda.functions import FLOATS, INTS
from magjit_dvm.cuda.interpreter import inner_loop, source
from magjit_dvm.cuda.parts import MOST_EACH, SUMS_NAME, SUMS_SOURCE
from magjit_dvm.cuda.warps import each_of
from magjit_dvm.cuda.words import NUMBER, OPCODES
from magjit_dvm.instructions import INSTRUCTIONS, DType, Kind

_REGISTERS = {64: 168, 32: 128, 24: 128, 16: 102, 8: 102}
"""A lane's, with as many warps as a block may have."""
_SPILLS = {
    ("sm_80", 16): 16,
    ("sm_80", 24): 8,
    ("sm_80", 32): 96,
    ("sm_90", 64): 64,
    ("sm_100", 16): 8,
    ("sm_100", 32): 128,
    ("sm_100", 64): 64,
}
"""Bytes that a lane may spill; 0 elsewhere.  They are addresses that words reload: with more cases
there are more of them, whichever cases those are."""
_SPILLS_OF_STACKS = {64: 64, 24: 96}
_SPILLS_OF_SUMS = {24: 16}
"""Of these kernels, on sm_90, by R."""
_SPILLS_OF_SMALL = {
    ("sm_90", 32, ADDING): 152,
    ("sm_80", 16, NORMS): 8,
    ("sm_80", 32, NORMS): 32,
    ("sm_80", 64, NORMS): 4,
    ("sm_80", 36, GRADIENTS): 168,
    ("sm_80", 32, CHUNKED): 64,
    ("sm_80", 32, QUARTER): 36,
    ("sm_80", 32, HALF): 36,
    ("sm_90", 36, GRADIENTS): 76,
    ("sm_90", 32, CHUNKED): 64,
    ("sm_90", 32, QUARTER): 32,
    ("sm_90", 32, HALF): 32,
    ("sm_100", 36, GRADIENTS): 16,
    ("sm_100", 32, NORMS): 8,
    ("sm_100", 32, CHUNKED): 72,
    **{("sm_80", 32, BATCHED): 48, ("sm_80", 64, BATCHED): 8, ("sm_80", 32, READ_ONCE): 104},
    **{("sm_90", 32, BATCHED): 56, ("sm_90", 64, BATCHED): 8, ("sm_90", 32, READ_ONCE): 100},
    **{("sm_100", 32, BATCHED): 68, ("sm_100", 64, BATCHED): 12, ("sm_100", 32, READ_ONCE): 100},
    ("sm_100", 16, BATCHED): 8,
    **{("sm_100", 32, QUARTER): 32, ("sm_100", 32, HALF): 32},
    ("sm_80", 32, FLAT): 16,
    ("sm_80", 32, SQUARES): 84,
    ("sm_90", 32, SQUARES): 16,
    ("sm_100", 32, SQUARES): 24,
}
"""Of small ones, by nvcc."""

_SPILLS_OF_NVRTC = {
    **{(64, ALONE): 64, (64, WHOLE): 64, (64, STACKED): 64},
    **{(36, GRADIENTS): 76, (32, SQUARES): 16, (32, QUARTER): 32, (32, HALF): 32},
    **{(32, CHUNKED): 64, (32, BATCHED): 56, (64, BATCHED): 12, (32, READ_ONCE): 100},
}
"""Of the kernels that users have, by R, on sm_90; it has another front end than nvcc.  Norms'
gradients spill what a row needs once."""

OF_FORMS = {
    SUMMING: [one for one in each_of(SUMMING) if one <= MOST_EACH],
    **{form: each_of(form) for form in (FLAT, ADDING, NORMS, GRADIENTS, SQUARES, CHUNKED, *LANES)},
    **{form: each_of(form) for form in (BATCHED, READ_ONCE)},
}
"""Values of R that forms have kernels for which nvcc makes in seconds, with the first of them."""

SMALL = (FLAT, ADDING, NORMS, GRADIENTS, SQUARES, CHUNKED, BATCHED, READ_ONCE, *LANES)
"""Those that NVRTC makes in seconds."""

MADE_FORMS = [pytest.param(form, marks=[] if form == FLAT else pytest.mark.slow) for form in FORMS]

MADE = [(32, NORMS), (16, GRADIENTS)]
"""With R, what is made at each change: cases by one of them, compiled code by the other."""

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
needs_nvrtc = pytest.mark.skipif(
    not build.compilers() or not build.compilers()[0].startswith("nvrtc"),
    reason="there is no NVRTC",
)


def ptxas(text: str, arch: str, folder: Path) -> str:
    """What ptxas says of a source."""
    given = folder / "kernel.cu"
    given.write_text(text)
    options = ["-cubin", f"-arch={arch}", "-std=c++17", "-Xptxas", "-v"]
    command = ["nvcc", *options, "-o", str(folder / "kernel.cubin"), str(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def spilled_by(each: int, form: int, arch: str, folder: Path) -> tuple[int, str]:
    """Bytes that a kernel spills as nvcc makes it, and what ptxas said of it."""
    said = ptxas(source(each=(each,), form=form), arch, folder)
    assert f"entry function '{kernel_name(each, form)}'" in said
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", said))), said


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("each", each_of(ALONE))
def test_kernels_fit_their_registers(arch: str, each: int, tmp_path: Path) -> None:
    if each == 64 and arch == "sm_80":
        pytest.skip("not asked for before sm_90")
    spilled, said = spilled_by(each, ALONE, arch, tmp_path)
    assert spilled <= _SPILLS.get((arch, each), 0), said
    (used,) = re.findall(r"Used (\d+) registers", said)
    assert int(used) <= _REGISTERS[each]


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("each", each_of(ALONE))
def test_kernels_of_stacks_fit_their_registers(each: int, tmp_path: Path) -> None:
    """Where its image begins is an address more than a launch of one has."""
    spilled, said = spilled_by(each, STACKED, "sm_90", tmp_path)
    assert spilled <= _SPILLS_OF_STACKS.get(each, 8), said


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("each", OF_FORMS[SUMMING])
def test_kernels_with_sums_fit_their_registers(each: int, tmp_path: Path) -> None:
    spilled, said = spilled_by(each, SUMMING, "sm_90", tmp_path)
    assert spilled <= _SPILLS_OF_SUMS.get(each, 0), said


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("each", "form"), [(each, form) for form in SMALL for each in OF_FORMS[form]]
)
def test_small_kernels_fit_their_registers(arch: str, each: int, form: int, tmp_path: Path) -> None:
    spilled, said = spilled_by(each, form, arch, tmp_path)
    assert spilled <= _SPILLS_OF_SMALL.get((arch, each, form), 0), said


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_of_channels_fit_their_registers(arch: str, tmp_path: Path) -> None:
    """Two blocks are on a multiprocessor together: a thread has 64 registers at most."""
    said = "".join(ptxas(channels_source(which), arch, tmp_path) for which in range(4))
    assert all(f"entry function '{name}'" in said for name in CHANNELS_NAMES)
    assert not sum(map(int, re.findall(r"(\d+) bytes spill stores", said))), said
    assert max(map(int, re.findall(r"Used (\d+) registers", said))) <= 64


@needs_nvrtc
@pytest.mark.parametrize("which", range(len(CHANNELS_NAMES)))
def test_nvrtc_makes_kernels_of_channels(which: int) -> None:
    made = build._by_nvrtc(channels_source(which), "sm_90")
    assert build.entry(CHANNELS, which).encode() in made


@needs_nvrtc
@pytest.mark.parametrize(
    ("each", "form"),
    [
        pytest.param(each, form, marks=[] if (each, form) in MADE else pytest.mark.slow)
        for form in FORMS
        for each in OF_FORMS.get(form, each_of(form))
    ],
)
def test_what_users_have_fits_its_registers(
    each: int, form: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a kernel spills what goes from tile to tile, rows took half as long again."""
    caplog.set_level(logging.DEBUG, "magjit.dvm")
    made = build._by_nvrtc(source(each=(each,), form=form), "sm_90", "--ptxas-options=-v")
    said = caplog.text
    assert made and kernel_name(each, form) in said and "Used" in said
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    assert spilled <= _SPILLS_OF_NVRTC.get((each, form), 0), said


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_of_sums_compiles(arch: str, tmp_path: Path) -> None:
    said = ptxas(SUMS_SOURCE, arch, tmp_path)
    assert f"entry function '{SUMS_NAME}'" in said and " 0 bytes spill stores" in said


@needs_nvcc
@pytest.mark.parametrize("form", MADE_FORMS)
@pytest.mark.parametrize("approximate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kernel_compiles(approximate: bool, form: int, tmp_path: Path) -> None:
    each = each_of(form)[0]
    said = ptxas(source(approximate, (each,), form=form), "sm_90", tmp_path)
    assert f"'{kernel_name(each, form)}'" in said


def test_every_operator_has_a_case() -> None:
    lines = inner_loop(16)
    marks = [line.partition(" // ")[2] for line in lines if re.match(r"L\d+: // ", line)]
    assert tuple(marks) == OPCODES
    text = "\n".join(lines)
    assert "{{" not in text and "}}" not in text
    assert set(re.findall(r"%(\d+)", text)) == {str(k) for k in range(9)}


def test_what_runs_together_is_side_by_side() -> None:
    """Cases have the order of their numbers: a program of many short functions stays in a cache."""
    names = ("exp_short", "log_short", "tanh_short", "sigmoid_short", "gelu_short", "silu_short")
    shorts = [NUMBER[f"f.{name}"] for name in (*names, "rsqrt")]
    assert max(shorts) - min(shorts) < len(shorts) + 2
    cheap = [NUMBER[name] for name in ("f.relu", "f.mul", "fk.mad", "lt.s.f16", "st.g.f16")]
    assert min(shorts) < min(cheap) and max(cheap) - max(shorts) <= 26
    strided = [NUMBER[name] for name in OPCODES if name.startswith(("lt.v.", "lt.e.", "lt.b."))]
    assert max(strided) < min(shorts)


def test_tables_of_jumps_fit_constant_memory() -> None:
    """A table of each case that has its own, the shared one, and that of the first jump."""
    for form in FORMS:
        each = each_of(form)[0]
        own = {name for name in own_tables(form) if has_case(name, each, form)}
        assert own <= set(OPCODES) and bool(own) == (form != GRADIENTS)
        lines = inner_loop(each, form=form)
        entries = {
            name: targets.count(",") + 1
            for name, targets in re.findall(r"(\w+): \.branchtargets (.*);", "\n".join(lines))
        }
        jumps = Counter(re.findall(r"brx\.idx\.uni \w+,(\w+);", "\n".join(lines)))
        assert len(own) < jumps["TABLE"] and jumps.keys() == entries.keys()
        assert 4 * sum(entries[name] * count for name, count in jumps.items()) <= 1 << 16
        # One copy's entry for an operator is not in the same place of the cache as the next one's.
        assert len(OPCODES) < entries["TABLE"] and 4 * entries["TABLE"] % 512 >= 16


def test_instructions_without_words_are_named() -> None:
    """A new instruction is either made for the GPU or put on this list."""
    missing = {
        *("floor_div", "fmod", "remainder", "trunc_div"),
        *("cumsum", "cumprod", "index_load", "iota", "one_hot"),
        # What the encoder of the CPU makes of others, and what words do otherwise.
        *("load", "view_load", "store", "view_store", "fill", "finish", "copy", "cast", "select"),
        *("sum", "prod", "max", "min", "sum_mul", "sum_sub_square", "moments"),
    }
    pairs = {one.name for one in INSTRUCTIONS if one.kind is Kind.TERNARY} - {"select"}
    of_ints = {one.name for one in INSTRUCTIONS if DType.F32 not in one.dtypes} - missing
    known = {one.name for one in INSTRUCTIONS} - missing - pairs
    assert known - of_ints == set(FLOATS) & known
    assert of_ints <= set(INTS)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compilers", list)
    with pytest.raises(BackendError, match="neither NVRTC nor nvcc"):
        build.compiled("sm_90", 8, False)


@needs_nvcc
def test_cubins_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from magjit import config

    calls = []

    def make(text: str, arch: str) -> bytes:
        calls.append(arch)
        return b"a cubin"

    monkeypatch.setattr(build, "compilers", lambda: ["nvcc test"])
    monkeypatch.setattr(build, "_by_nvcc", make)
    with config.override(cache_dir=tmp_path):
        for arch in ("sm_90", "sm_90", "sm_100"):
            assert build.compiled(arch, 8, False) == b"a cubin"
        assert calls == ["sm_90", "sm_100"]
        for form in FORMS:  # that of all, R = 8, is there
            assert build.compiled("sm_90", each_of(form)[0], False, form) == b"a cubin"
    assert len(calls) == 2 + len(FORMS) - 1
