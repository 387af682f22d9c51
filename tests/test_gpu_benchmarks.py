"""Parts of the benchmarks for GPUs that need none: what counters say, and which rows stay."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dram_bytes
import harness
import products
import virtual_tensors
from vt_blocks import BLOCKS

NCU = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","fused_0","dram__bytes_read.sum","byte","1,048,576"
"0","fused_0","dram__bytes_write.sum","byte","524,288"
"1","gemm","dram__bytes_read.sum","byte","2,097,152"
"1","gemm","dram__bytes_write.sum","byte","0"
"""


def answering(
    monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0
) -> list[tuple[list[str], Any]]:
    calls: list[tuple[list[str], Any]] = []

    def run(command: list[str], **options: Any) -> Any:
        calls.append((command, options))
        return subprocess.CompletedProcess(command, code, stdout=text, stderr="no counters")

    monkeypatch.setattr(dram_bytes.subprocess, "run", run)
    return calls


def test_counters_are_given_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answering(monkeypatch, NCU)
    assert dram_bytes.counted("QKV prefill", 1, "magjit") == {
        "0 fused_0: read": 1,
        "0 fused_0: write": 0.5,
        "1 gemm: read": 2,
        "1 gemm: write": 0,
    }
    assert json.loads(calls[0][0][-1]) == ["QKV prefill", 1, "magjit"]


@pytest.mark.parametrize(("text", "code"), [("", 0), (NCU, 1)])
def test_without_counters_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    answering(monkeypatch, text, code)
    with pytest.raises(RuntimeError, match="no counters"):
        dram_bytes.counted("QKV prefill", 1, "magjit")


def test_the_minimum_is_what_a_call_has_to_move() -> None:
    decode = BLOCKS["Llama-3-8B decode"].build(2, "cpu")
    # Width 256, 8 heads and 2 groups of 32, 512 inside and positions; 4 bytes each.
    weights = 256 * (256 + 64 + 64 + 256 + 3 * 512) + 2 * 256
    arguments = 2 * 256 + 2 * (2 * 2 * 512 * 32) + 2 * 32
    place = 8
    assert dram_bytes.minimum("Llama-3-8B decode", decode) == 4 * (weights + arguments) + place
    prefill = BLOCKS["QKV prefill"].build(2, "cpu")
    # 64 tokens: merged projection, rotated queries, cache and what is attended, twice each.
    weights = 256 * (256 + 2 * 64) + 256 * 256
    exchanged = 2 * 2 * 64 * ((256 + 128) + 256 + 128 + 256)
    given = 2 * 2 * 64 * 256 + 2 * 64 * 32
    assert dram_bytes.minimum("QKV prefill", prefill) == 4 * (weights + exchanged + given)


def test_rows_that_need_no_times_replace_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def in_own_process(*given: Any) -> dict[str, float]:
        asked.append(given)
        return {"memory_mb": 10.0 * len(asked), "compile_s": 0.5 * len(asked)}

    monkeypatch.setattr(virtual_tensors, "in_own_process", in_own_process)
    note = "magjit reduce-overhead, torch.compile max-autotune; torch.compile default: wrong"
    values = {"magjit": 1.0, "eager": 2.0, "torch.compile": 3.0}
    rows = [
        harness.Row.of("U-Net skip, batch 1", "run_ms", "ms", values, note),
        harness.Row.of("U-Net skip, batch 1", "extra_peak_mb", "MiB", values),
        harness.Row.of("U-Net skip, batch 16", "extra_peak_mb", "MiB", values),
    ]
    benchmark: Any = argparse.Namespace(rows=list(rows), add=lambda row: benchmark.rows.append(row))
    given: Any = argparse.Namespace(only="memory", small=False)
    virtual_tensors.measure_beside(benchmark, "U-Net skip", 1, given)
    assert [entry for _, _, entry, _ in asked] == [
        *("eager", "magjit reduce-overhead", "torch.compile max-autotune"),
    ]
    assert benchmark.rows[0] is rows[0]
    assert benchmark.rows[2] is rows[2]
    memory = benchmark.rows[1]
    assert (memory.magjit, memory.peers) == (20.0, {"eager": 10.0, "torch.compile": 30.0})
    given.only = "second"
    for seconds in (2.5, 3.5):  # of the second of two processes, in place of the row before
        virtual_tensors.measure_beside(benchmark, "U-Net skip", 1, given)
        assert [row.magjit for row in benchmark.rows if row.metric == "second_compile_s"] == [
            seconds
        ]
    with pytest.raises(SystemExit, match="not been measured"):
        virtual_tensors.measure_beside(benchmark, "U-Net skip", 16, given)


def test_a_layer_is_compared_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with one entrant that is wrong."""
    monkeypatch.setattr(
        products,
        "arguments_of",
        lambda shape, dtype, device, made=products.arguments_of: made(shape, dtype, "cpu"),
    )
    monkeypatch.setattr(products, "device_times", lambda tasks, rounds: dict.fromkeys(tasks, 1.0))
    benchmark = harness.Benchmark(None, 0.0)
    for factor, expected in ((1.0, True), (1.1, False)):
        monkeypatch.setattr(
            products,
            "entrants",
            lambda function, factor=factor: {
                "magjit": lambda *given: function(*given) * factor,
                "eager": function,
            },
        )
        agree = products.measure(benchmark, (8, 4, 16), "residual", torch.bfloat16, 1)
        assert agree == expected
    (row,) = benchmark.rows
    assert row.case == "8 x 4 x 16, residual, bfloat16"
    assert row.note


@pytest.mark.parametrize("shape", ["8x4", "8x4x0", "8x4xk"])
def test_shapes_are_three_numbers(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        products.parsed(["--shapes", shape])
    assert "three positive numbers" in capsys.readouterr().err


def test_rows_of_other_blocks_stay(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    row = {"unit": "ms", "magjit": 1.0, "peers": {}, "metric": "run_ms"}
    cases = ("U-Net skip, batch 1", "U-Net skip, batch 16", "all blocks")
    file.write_text(json.dumps({"rows": [{"case": case, **row} for case in cases]}))
    options: Any = argparse.Namespace(json=file, only=None, blocks=["U-Net skip"], batches=[1])
    assert [row.case for row in virtual_tensors.kept(options)] == ["U-Net skip, batch 16"]
    options.only = "memory"
    assert [row.case for row in virtual_tensors.kept(options)] == list(cases[:2])
