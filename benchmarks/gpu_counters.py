"""Bytes that a decode step moves, by the GPU's own counters, beside the bytes that are counted: part `counters` of gpu.sh.

Nsight Compute (`ncu`) runs this file again for each stage, on a model of a few layers, and reads what every kernel of one
decode step takes from and gives to DRAM. The GPU's caches are left as they are, so the counted bytes are the upper bound: a
small result that is written and read again stays in the L2 cache, weights and the KV cache do not. Where the counters cannot
be read (no ncu, no permission, a virtual machine that hides them), the result says why.
"""

import argparse
import csv
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import exit_status
from gpu_part import Part, config_of, make_model, make_parser, need
from gpu_plot import draw
from gpu_steps import INT4, INT8, PLAIN, Filled, Weights, count_step, fill_cache, least_bytes

from minillm.config import ModelConfig
from minillm.device import wait_for
from minillm.generation import Recorder
from minillm.report import make_table
from minillm.roofline.plot import si
from minillm.roofline.position import meta_twin
from minillm.sampling import greedy
from minillm.stages.gqa import GroupedKVCache
from minillm.stages.kv_cache import KVCache, prefill_and_decode
from minillm.stages.static_cache import StaticKVCache

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
LONGEST = 90  # seconds of one stage
USUAL_PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")

# What each stage reads: its weights and its cache.
STAGES: dict[str, tuple[Weights, type[Filled]]] = {
    "gqa": (PLAIN, GroupedKVCache),
    "kv_cache": (PLAIN, KVCache),
    "quantization": (Weights("int8"), GroupedKVCache),
    "quantization_int4": (Weights("int4"), GroupedKVCache),
    "kernels": (PLAIN, StaticKVCache),
    "kernels int8": (INT8, StaticKVCache),
    "kernels int4": (INT4, StaticKVCache),
}


def config_here(args: argparse.Namespace) -> ModelConfig:
    return config_of(args.model, max(args.contexts) + 1, layers=args.layers)


# --- the process that ncu watches ---------------------------------------------------------------------------------------


@torch.inference_mode()
def watched_step(args: argparse.Namespace) -> None:
    """One decode step of a stage between the marks of the profiler, after one that warms up."""
    part = Part("watched", args)
    weights, kind = STAGES[args.stage]
    model, context = weights.of(make_model(part, config_here(args))), max(args.contexts)
    cache = kind(model, context)
    fill_cache(cache)
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=part.device)
    for marked in (False, True):
        cache.length = context - 1
        wait_for(part.device)
        if marked and part.device.type == "cuda":
            torch.cuda.profiler.start()
        prefill_and_decode(model, cache, tokens, 1, greedy, Recorder(part.device))
        wait_for(part.device)  # what comes after the last step is not worth a mark of its end


# --- ncu --------------------------------------------------------------------------------------------------------------


def find_ncu() -> str | None:
    """The newest ncu there is, on the PATH or where CUDA puts it."""
    places = [path for place in USUAL_PLACES for path in sorted(Path(place).glob("**/ncu"), reverse=True)]
    return shutil.which("ncu") or next((str(path) for path in places if path.is_file()), None)


def read_counters(command: Sequence[str]) -> tuple[dict[str, float], str]:
    """Run a command under ncu: the sum of each metric over all kernels, and what was printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"ncu took more than {LONGEST} s."
    sums = sum_metrics(done.stdout.splitlines())
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower() or "ERR_" in line]
    return sums, lines[0] if lines else (done.stderr or done.stdout).strip()[-200:]


def sum_metrics(lines: Iterable[str]) -> dict[str, float]:
    """ncu's CSV, a line for each kernel and metric, as sums over the kernels; "kernels" tells how many there were."""
    table = [line for line in lines if line.startswith('"')]
    sums: dict[str, float] = defaultdict(float)
    ids = set()
    for row in csv.DictReader(table):
        ids.add(row["ID"])
        sums[row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))
    return {**sums, "kernels": len(ids)} if ids else {}


def compare(part: Part, args: argparse.Namespace, stage: str) -> dict[str, Any]:
    ncu = find_ncu()
    need(ncu is not None, "ncu is not on this machine, so its counters cannot be read.")
    options = ["--csv", "--print-units", "base", "--metrics", f"{READ},{WRITTEN}", "--profile-from-start", "off"]
    options += ["--cache-control", "none", "--clock-control", "none"]
    again = ["--stage", stage, "--device", args.device, "--dtype", args.dtype, "--model", args.model]
    again += ["--contexts", str(max(args.contexts)), "--layers", str(args.layers), "--out", args.out]
    found, said = read_counters([str(ncu), *options, sys.executable, __file__, *again])
    need(READ in found, f"The counters were not read: {said}")
    weights, kind = STAGES[stage]
    twin, context = weights.of(meta_twin(config_here(args), part.dtype)), max(args.contexts)
    cost = count_step(twin, kind(twin, context), context, batch=1)
    moved = found[READ] + found[WRITTEN]
    return {
        "kind": "counters", "stage": stage, "context": context, "layers": args.layers, "kernels": found["kernels"],
        "dram_read_bytes": found[READ], "dram_written_bytes": found[WRITTEN], "counted_bytes": cost.bytes,
        "least_bytes": least_bytes(twin, 1, context), "dram_over_counted": moved / cost.bytes,
        "dram_over_least": moved / least_bytes(twin, 1, context),
    }  # fmt: skip


# --- the command ------------------------------------------------------------------------------------------------------


def show(part: Part) -> None:
    columns = ("stage", "DRAM read", "written", "counted", "DRAM / counted", "least", "DRAM / least")
    table = make_table("Bytes of a decode step, by the GPU's counters", *columns)
    for row in part.rows:
        sizes = (f"{si(row[key])}B" for key in ("dram_read_bytes", "dram_written_bytes", "counted_bytes"))
        least = f"{si(row['least_bytes'])}B"
        table.add_row(row["stage"], *sizes, f"{row['dram_over_counted']:.2f}", least, f"{row['dram_over_least']:.2f}")
    part.console.print(table)


def run(args: argparse.Namespace) -> None:
    if args.stage:
        watched_step(args)
        return
    part = Part("counters", args)
    for stage in STAGES:
        if part.failed and not part.rows:  # no more of them can be read than of the first
            part.left_out.append(stage)
        else:
            part.measure(f"counters of {stage}", lambda stage=stage: compare(part, args, stage))
    show(part)
    part.finish({"layers": args.layers})
    draw(part.path)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("gpu_counters.py", "DRAM bytes of a decode step by the GPU's counters, beside counted ones.")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="layers of the model that is watched")
    parser.add_argument("--stage", choices=STAGES, help="run one step of this stage: what ncu watches")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(exit_status("gpu_counters.py", lambda: run(parse())))
