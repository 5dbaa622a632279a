"""gpu.sh, and its measured parts on the CPU with a tiny model and Triton's interpreter: all that a GPU runs but its times."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SHAPES, lively_model
from helpers import one_thread as one_thread

from minillm.errors import MinillmError
from minillm.stages.triton_kernels import triton_is_here

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # as Python does for a script there

import gpu_counters
import gpu_decode
import gpu_kernels
import gpu_operators
import gpu_part
import gpu_steps
from gpu_part import Part

CPU = torch.device("cpu")
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def arguments(folder: Path, **changed: Any) -> Namespace:
    parser = gpu_part.make_parser("gpu_part.py", "")
    args = parser.parse_args(["--model", "random:tiny", "--device", "cpu", "--dtype", "fp32", "--out", str(folder)])
    return Namespace(**vars(args) | changed)


def gpu_sh(folder: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": sys.executable, "OUT": str(folder), "OMP_NUM_THREADS": "1"} | environment
    command = ["bash", str(Path(gpu_part.__file__).with_name("gpu.sh")), *parts]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


def written(folder: Path, part: str) -> dict[str, Any]:
    return json.loads((folder / f"{part}.json").read_text())  # type: ignore[no-any-return]


# --- a part -----------------------------------------------------------------------------------------------------------


def test_a_result_is_written_after_each_measurement_and_a_failure_is_a_line(tmp_path: Path) -> None:
    part = Part("some", arguments(tmp_path))
    part.measure("first", lambda: {"kind": "a", "measured_s": 1.5})
    assert [row["what"] for row in written(tmp_path, "some")["rows"]] == ["first"]

    def fails() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nAnd much more")

    part.measure("second", fails)
    part.measure("third", lambda: {"kind": "a"})
    result = written(tmp_path, "some")
    assert [row["what"] for row in result["rows"]] == ["first", "third"]
    assert result["failed"] == [
        {"what": "second", "why": "OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB."}
    ]
    assert result["model"] == "random:tiny" and result["versions"]["torch"] == torch.__version__
    part.finish({"found": 3})
    assert written(tmp_path, "some")["found"] == 3


def test_a_part_whose_time_is_over_names_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = Part("some", arguments(tmp_path, seconds=-1.0))
    part.measure("first", lambda: pytest.fail("there was no time"))
    with pytest.raises(MinillmError, match="Nothing could be measured"):
        part.finish({})
    result = written(tmp_path, "some")
    assert (
        result["left_out"] == ["first"] and result["rows"] == [] and "Not tried any more: 1" in capsys.readouterr().out
    )


def test_only_what_is_asked_for_is_measured(tmp_path: Path) -> None:
    part = Part("some", arguments(tmp_path, only=re.compile("^b|end$")))
    for what in ("a b", "b", "the end"):
        part.measure(what, lambda: {"kind": "a"})
    assert [row["what"] for row in part.rows] == ["b", "the end"] and part.left_out == []


def test_a_shape_may_have_more_positions_and_fewer_layers() -> None:
    config = gpu_part.config_of("random:llama-3-8b", 32769, layers=2)
    assert (config.max_positions, config.n_layers, config.d_model) == (32769, 2, 4096)
    assert gpu_part.config_of("random:llama-3-8b", 10).max_positions == 8192


# --- what is compared ---------------------------------------------------------------------------------------------------


def test_the_least_a_step_reads_is_each_weight_and_each_cached_number_once() -> None:
    model = lively_model(SHAPES["qwen2"])  # untied: of the embedding a row is read
    weights = sum(p.numel() for name, p in model.named_parameters() if name != "embed.weight")
    frequencies = model.rope.frequencies.numel()
    cached = 2 * 2 * 3 * 2 * 50 * 8  # keys and values, L, B, Hkv, S, D
    assert gpu_steps.least_bytes(model, 3, 50) == 4 * (weights + frequencies + cached)


def test_the_best_fraction_of_each_scheme_stands_beside_its_target() -> None:
    def row(scheme: str, fraction: float, **changed: Any) -> dict[str, Any]:
        base = {"kind": "launched", "batch": 1, "context": 512, "tokens_per_s": 9.0, "kernel": "triton", "how": "eager"}
        return base | {"scheme": scheme, "fraction_of_bandwidth": fraction} | changed

    rows = [row("bf16", 0.5), row("bf16", 0.9, how="captured"), row("bf16", 0.99, batch=8), row("int4", 0.3)]
    best = gpu_decode.fractions([*rows, {"kind": "stage"}])
    assert set(best) == {"bf16", "int4"} and best["bf16"]["fraction_of_bandwidth"] == 0.9
    assert (best["bf16"]["target"], best["bf16"]["published"], best["int4"]["target"]) == (0.85, 0.82, 0.6)


def test_a_kernel_that_is_wrong_is_no_result() -> None:
    x = torch.linspace(-1, 1, 100)
    assert gpu_kernels.checked(x * 1.001, x) == pytest.approx(0.001, rel=1e-3)
    for wrong in (x * 1.05, x.roll(1), torch.full_like(x, torch.nan)):
        with pytest.raises(MinillmError, match="the kernel is wrong"):
            gpu_kernels.checked(wrong, x)


CSV = """==PROF== Connected to process 17
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","17","gemv","dram__bytes_read.sum","byte","1,200"
"0","17","gemv","dram__bytes_write.sum","byte","100"
"1","17","add, of two","dram__bytes_read.sum","byte","34"
"1","17","add, of two","dram__bytes_write.sum","byte","0"
==PROF== Disconnected
"""


def test_counters_are_summed_over_kernels() -> None:
    sums = gpu_counters.sum_metrics(CSV.splitlines())
    assert sums == {"dram__bytes_read.sum": 1234, "dram__bytes_write.sum": 100, "kernels": 2}
    assert gpu_counters.sum_metrics(["==ERROR== ERR_NVGPUCTRPERM"]) == {}


# --- the script -------------------------------------------------------------------------------------------------------

# Runs what it is to watch, as ncu does, and prints what ncu would.
NCU = f"""#!{sys.executable}
import subprocess, sys
start = sys.argv.index({sys.executable!r})
assert sys.argv[1:start].count("--metrics") == 1
subprocess.run(sys.argv[start:], check=True)
print('''{CSV}''')
"""
ONLY = "|".join(
    (
        "^fp32 eager", "^stage (naive|quantization),", "^speculative", "^kv_cache.*64$",  # decode
        "^o .* 1 rows", "^attention.*32, [a-z_ ]*$", "split 64$",
        "^int[48].*(1 rows.*N 16|8 rows.*N 64), (GROUPS (16|2)|BLOCK_K (512|64)), .*warps 2",
        "^counters of gqa",
    )
)  # fmt: skip


@needs_bash
@pytest.mark.skipif(not triton_is_here(), reason="triton is not installed")
def test_each_measured_part_runs_on_the_cpu(tmp_path: Path) -> None:
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 does not work with NumPy 2.4")
    out, tools = tmp_path / "out", tmp_path / "tools"
    tools.mkdir()
    (tools / "ncu").write_text(NCU)
    (tools / "ncu").chmod(0o755)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}", "DEVICE": "cpu", "ONLY": ONLY, "BIG": "random:tiny", "BATCHES": "1",
        "CONTEXTS": "32,64",
    }  # fmt: skip
    done = gpu_sh(out, "decode", "operators", "counters", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = ("decode", "operators", "counters")
    files = {f"{part}.{kind}" for part in parts for kind in ("json", "png")} | {"machine.json", "gpu.log"}
    assert {path.name for path in out.iterdir()} == files  # 8, which is what comes back from the lent machine
    results = {part: written(out, part) for part in parts}
    for part, result in results.items():
        assert result["failed"] == result["left_out"] == [], part
        assert result["commit"] is None or len(result["commit"]) == 40
        assert (out / f"{part}.png").read_bytes().startswith(b"\x89PNG")

    rows = results["decode"]["rows"]
    assert [row["kind"] for row in rows] == ["launched", "stage", "stage", "speculative", "context"]
    assert all(row["ratio"] == pytest.approx(row["measured_s"] / row["predicted_s"]) for row in rows if "ratio" in row)
    assert 0 < rows[3]["acceptance_rate"] <= 1 and rows[0]["how"] == "eager"

    rows = results["operators"]["rows"]
    kernels = {row["kernel"] for row in rows if row["kind"] == "product"}
    assert kernels == {"plain", "int8 pytorch", "int8 triton", "int4 pytorch", "int4 triton"}
    assert {(row["kernel"], row["M"]) for row in rows if row["kind"] == "tile"} == set(gpu_operators.TILES)
    assert {row["kernel"] for row in rows if row["kind"] == "attention"} == {"split_attention", *gpu_kernels.SDPA}
    assert all(row["error"] < 0.01 for row in rows)

    (row,) = results["counters"]["rows"]
    assert (row["dram_read_bytes"], row["dram_written_bytes"], row["kernels"]) == (1234, 100, 2)
    assert 0 < row["least_bytes"] < row["counted_bytes"]


def test_where_the_counters_cannot_be_read_the_result_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_counters, "find_ncu", lambda: None)
    with pytest.raises(MinillmError, match="Nothing could be measured"):
        gpu_counters.run(arguments(tmp_path, stage=None, layers=1, contexts=[16]))
    result = written(tmp_path, "counters")
    assert [failure["what"] for failure in result["failed"]] == ["counters of gqa"]
    assert "ncu is not on this machine" in result["failed"][0]["why"]
    assert result["left_out"] == list(gpu_counters.STAGES)[1:]


# --- what it does with a part that fails, and with what it cannot do --------------------------------------------------


@needs_bash
def test_gpu_sh_tours_a_tiny_model_on_the_cpu(tmp_path: Path) -> None:
    done = gpu_sh(tmp_path, "tiny", DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"machine.json", "gpu.log", "tiny.json", "tiny.png"}
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert [(part["part"], part["outcome"]) for part in machine["parts"]] == [("tiny", "passed")]
    tour = json.loads((tmp_path / "tiny.json").read_text())
    assert [stage["stage"] for stage in tour["stages"]][:2] == ["naive", "kv_cache"]
    assert "tiny: passed in" in done.stdout.splitlines()[-1]


@needs_bash
def test_gpu_sh_goes_on_after_a_part_that_failed_and_exits_nonzero(tmp_path: Path) -> None:
    (tmp_path / "smollm.json").mkdir()  # where the first part wants to write a file
    done = gpu_sh(tmp_path, "smollm", "tiny", DEVICE="cpu")
    assert done.returncode == 1
    assert "Failed: smollm" in done.stderr and "cannot be written" in done.stdout
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert [(part["part"], part["outcome"]) for part in machine["parts"]] == [("smollm", "failed"), ("tiny", "passed")]
    assert (tmp_path / "tiny.json").exists()


@needs_bash
@pytest.mark.parametrize(
    "part, environment, status, words",
    [
        ("everything", {}, 2, "Unknown part 'everything'"),
        ("tiny", {"PYTHON": "/no/such/python"}, 1, "/no/such/python does not run"),
        ("tiny", {"DEVICE": "abacus"}, 1, "Unknown device 'abacus'"),
        pytest.param(
            "tiny", {"DEVICE": "cuda"}, 1, "No CUDA device can be used here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)  # fmt: skip
def test_gpu_sh_refuses_what_it_cannot_do(
    part: str, environment: dict[str, str], status: int, words: str, tmp_path: Path
) -> None:
    done = gpu_sh(tmp_path / "out", part, **{"DEVICE": "cpu"} | environment)
    assert done.returncode == status and words in done.stderr
    assert not (tmp_path / "out").exists()


@needs_bash
def test_gpu_sh_names_the_packages_that_are_missing(tmp_path: Path) -> None:
    # A Python that has none of them: the same one, without its site-packages.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    done = gpu_sh(tmp_path / "out", "tiny", DEVICE="cpu", PYTHON=str(bare))
    assert done.returncode == 1 and "Missing Python packages: gguf" in done.stderr and ".whl/" in done.stderr
