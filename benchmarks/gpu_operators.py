"""Kernels beside kernels on a GPU, in the shapes of Llama-3-8B: part `operators` of gpu.sh.

    products     rows of activations times a weight: bf16, int8 and int4, by PyTorch's kernels and by Triton's
    attention    one new token over S cached ones: `split_attention` beside PyTorch's
    sweeps       tile sizes of the Triton products, and columns of a split of the attention, beside the ones in use

Each figure is the time of one call in a graph of many, on as many copies of the weight or the cache as the GPU's own caches do
not hold; as bytes of weights, or of keys and values, a second, beside the read bandwidth that was measured in the same run. The
result of a kernel is compared with float32 first: a fast wrong kernel would be of no use.
"""

import argparse
import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import exit_status
from gpu_kernels import LAYERS, SDPA, attention_of, checked, launch_int4, launch_int8, shapes_of
from gpu_part import MeasuredCeilings, Part, config_of, make_parser, seconds_of_each
from gpu_plot import draw
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.report import duration, make_table
from minillm.stages.gqa import decode_attention
from minillm.stages.quantized_linear import QuantizedLinear
from minillm.stages.triton_kernels import split_size

ROWS = (1, 8, 16)
FRESH = {"cuda": 512 * 2**20, "cpu": 0}  # bytes that are read before a copy is read again
MOST_COPIES = 64


def copies_of(nbytes: int, device: torch.device) -> int:
    """How many copies of so many bytes are more than the device's own caches hold."""
    return max(1, min(MOST_COPIES, -(-FRESH[device.type] // nbytes)))


class Bench:
    def __init__(self, part: Part, config: ModelConfig) -> None:
        self.part, self.device, self.dtype = part, part.device, part.dtype
        self.config = config
        self.ceilings = MeasuredCeilings(part, max(2**24, FRESH[part.device.type] * 8))

    def figures(self, calls: Sequence[Callable[[], object]], nbytes: int) -> dict[str, Any]:
        measured = seconds_of_each(calls, self.device)
        bandwidth = self.ceilings().bandwidth
        rate = nbytes / measured
        return {"measured_s": measured, "bytes": nbytes, "bytes_per_s": rate, "fraction_of_bandwidth": rate / bandwidth}

    # --- products of rows and a weight

    def linear(self, N: int, K: int) -> nn.Linear:
        linear = nn.Linear(K, N, bias=False, device=self.device, dtype=self.dtype).requires_grad_(False)
        generator = torch.Generator(self.device).manual_seed(0)
        linear.weight.normal_(0, K**-0.5, generator=generator)
        return linear

    def rows_of(self, M: int, K: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1)
        return torch.randn(M, K, device=self.device, generator=generator).to(self.dtype)

    def product(self, name: str, M: int, kernel: str) -> None:
        N, K = shapes_of(self.config)[name]

        @torch.inference_mode()
        def work() -> dict[str, Any]:
            layer, x = LAYERS[kernel](self.linear(N, K)), self.rows_of(M, K)
            weight = layer.dequantize() if isinstance(layer, QuantizedLinear) else layer.weight.float()
            error = checked(layer(x), F.linear(x.float(), weight))
            del weight
            nbytes = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))
            layers = [layer, *(copy.deepcopy(layer) for _ in range(copies_of(nbytes, self.device) - 1))]
            figures = self.figures([partial(layer, x) for layer in layers], nbytes)
            about = {"kind": "product", "layer": name, "kernel": kernel, "M": M, "N": N, "K": K}
            return {**about, "error": error, **figures}

        self.part.measure(f"{name} ({N} x {K}), {M} rows, {kernel}", work)

    def tiles(self, kernel: str, M: int, tile: dict[str, int]) -> None:
        """One tile size of a Triton product with the gate and up weights."""
        N, K = shapes_of(self.config)["gate_up"]

        @torch.inference_mode()
        def work() -> dict[str, Any]:
            layer, x = LAYERS[f"{kernel} triton"](self.linear(N, K)), self.rows_of(M, K)
            given = [layer.codes, layer.scales] if kernel == "int8" else [layer.packed, layer.scales, layer.zeros]
            nbytes = sum(t.nbytes for t in given)
            out = x.new_empty(M, N)
            launch = partial(launch_int8 if kernel == "int8" else launch_int4, tile=tile)
            launch(x, *given, out)
            error = checked(out, F.linear(x.float(), layer.dequantize()))
            sets = [[t.clone() for t in given] for _ in range(copies_of(nbytes, self.device))]
            figures = self.figures([partial(launch, x, *tensors, out) for tensors in sets], nbytes)
            return {"kind": "tile", "kernel": kernel, "M": M, "N": N, "K": K, **tile, "error": error, **figures}

        sizes = ", ".join(f"{key} {value}" for key, value in tile.items())
        self.part.measure(f"{kernel} triton, {M} rows, {sizes}", work)

    # --- attention of one new token

    def cached(self, B: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        generator = torch.Generator(self.device).manual_seed(2)

        def noise(heads: int, columns: int) -> Tensor:
            shape = (B, heads, columns, c.head_dim)
            return torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)

        return noise(c.n_heads, 1), noise(c.n_kv_heads, S), noise(c.n_kv_heads, S)

    def attention(self, B: int, S: int, kernel: str, split: int | None = None) -> None:
        @torch.inference_mode()
        def work() -> dict[str, Any]:
            q, k, v = self.cached(B, S)
            lengths = torch.full((B,), S, device=self.device)
            attend = attention_of(kernel, lengths, S, split)
            # One row in float32 tells a wrong kernel from a right one.
            expected = decode_attention(q[:1].float(), k[:1].float(), v[:1].float())
            error = checked(attend(q, k, v)[:1], expected)
            nbytes = k.nbytes + v.nbytes
            sets = [(k, v), *((k.clone(), v.clone()) for _ in range(copies_of(nbytes, self.device) - 1))]
            figures = self.figures([partial(attend, q, *kv) for kv in sets], nbytes)
            columns = split or split_size(B, self.config.n_kv_heads, S)
            programs = {"split": columns, "programs": B * self.config.n_kv_heads * -(-S // columns)}
            row = {"kernel": kernel, "batch": B, "context": S, **(programs if kernel == "split_attention" else {})}
            return {"kind": "attention" if split is None else "split", **row, "error": error, **figures}

        self.part.measure(f"attention, batch {B}, context {S}, {kernel}" + (f", split {split}" if split else ""), work)


# --- the order of the measurements --------------------------------------------------------------------------------------

# Of one row and of 8: tiles around the ones in use (minillm/stages/triton_linear.py).
TILES: dict[tuple[str, int], dict[str, tuple[int, ...]]] = {
    ("int4", 1): {"BLOCK_N": (4, 8, 16), "GROUPS": (16, 32, 64), "num_warps": (2, 4, 8)},
    ("int8", 1): {"BLOCK_N": (4, 8, 16), "BLOCK_K": (512, 1024, 2048), "num_warps": (2, 4, 8)},
    ("int4", 8): {"BLOCK_N": (16, 32, 64), "GROUPS": (2, 4, 8), "num_warps": (2, 4)},
    ("int8", 8): {"BLOCK_N": (16, 32, 64), "BLOCK_K": (64, 128, 256), "num_warps": (2, 4)},
}
SPLITS = (64, 128, 256, 512, 1024)


def plan(bench: Bench, batches: Sequence[int], contexts: Sequence[int]) -> None:
    """Every measurement, the most important ones first."""
    places = [(B, S) for S in contexts for B in batches]
    for kernel in LAYERS:
        bench.product("gate_up", 1, kernel)
    for B, S in places:
        for attention in ("split_attention", *SDPA):
            bench.attention(B, S, attention)
    for name, kernel in itertools.product(list(shapes_of(bench.config))[1:], LAYERS):
        bench.product(name, 1, kernel)
    sweep(bench, 1)
    for (B, S), split in itertools.product(places, SPLITS):
        if split <= S:
            bench.attention(B, S, "split_attention", split)
    for M, name, kernel in itertools.product(ROWS[1:], shapes_of(bench.config), LAYERS):
        bench.product(name, M, kernel)
    sweep(bench, 8)


def sweep(bench: Bench, M: int) -> None:
    for (kernel, rows), sizes in TILES.items():
        if rows == M:
            for values in itertools.product(*sizes.values()):
                bench.tiles(kernel, M, dict(zip(sizes, values, strict=True)))


# --- what is shown ----------------------------------------------------------------------------------------------------


def fastest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each sweep the fastest row, with the time of what is in use now."""
    found = []
    for kernel, M in TILES:
        mine = [row for row in rows if row["kind"] == "tile" and (row["kernel"], row["M"]) == (kernel, M)]
        used = [
            row for row in rows
            if row["kind"] == "product" and (row["layer"], row["kernel"], row["M"]) == ("gate_up", f"{kernel} triton", M)
        ]  # fmt: skip
        found += _fastest(mine, used)
    for place in dict.fromkeys((row["batch"], row["context"]) for row in rows if row["kind"] == "split"):
        at = [row for row in rows if (row.get("batch"), row.get("context")) == place]
        used = [row for row in at if row["kind"] == "attention" and row["kernel"] == "split_attention"]
        found += _fastest([row for row in at if row["kind"] == "split"], used)
    return found


def _fastest(tried: Sequence[dict[str, Any]], used: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if not tried:
        return []
    best = min(tried, key=lambda row: row["measured_s"])
    return [best | {"in_use_s": used[0]["measured_s"] if used else None}]


def show(part: Part) -> None:
    table = make_table("Kernels", "a call of", "time", "of the bandwidth", "error")
    for row in part.rows:
        if row["kind"] in ("product", "attention"):
            fraction, error = f"{row['fraction_of_bandwidth']:.0%}", f"{row['error']:.1g}"
            table.add_row(row["what"], duration(row["measured_s"]), fraction, error)
    part.console.print(table)
    table = make_table("Fastest of each sweep", "a call of", "time", "in use", "of the bandwidth")
    for row in part.extra["fastest"]:
        fraction = f"{row['fraction_of_bandwidth']:.0%}"
        table.add_row(row["what"], duration(row["measured_s"]), duration(row["in_use_s"]), fraction)
    part.console.print(table)


def run(args: argparse.Namespace) -> None:
    part = Part("operators", args)
    bench = Bench(part, config_of(args.model, max(args.contexts) + 1))
    plan(bench, sorted(args.batches), sorted(args.contexts))
    part.finish({"fastest": fastest(part.rows)})
    draw(part.path)
    show(part)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return make_parser(
        "gpu_operators.py", "Products and attention by PyTorch's and by Triton's kernels; tile sizes."
    ).parse_args(argv)


if __name__ == "__main__":
    sys.exit(exit_status("gpu_operators.py", lambda: run(parse())))
