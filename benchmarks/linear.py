"""PyTorch's own linear layer, oneDNN's, and oneDNN's with packed weights on this CPU: what minillm/cpu.py decides by.

    python benchmarks/linear.py --json FILE

All take turns. One row, and 16 rows, times the gate and up weights of SmolLM2-135M, as many copies as its weights are large, so
that each is read from memory; as bytes of weights a second, beside a plain sum over them. Matrix-matrix: a square product.
Medians of the rounds.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from machine import describe
from torch import nn

from minillm.config import known_model
from minillm.cpu import OneDNNLinear
from minillm.device import DTYPES
from minillm.files import check_writable, write_json
from minillm.report import make_console, make_table
from minillm.roofline.ceilings import MATRIX_SIZE, seconds
from minillm.roofline.plot import si

CPU = torch.device("cpu")
CONFIG = known_model("smollm2-135m")
ROUNDS = 9
ROWS = (1, 16)


def compare(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Bytes/s of weights in products of 1 and 16 rows, and FLOP/s of the square product, by layer; of a sum only bytes/s."""
    copies = CONFIG.parameter_count // (2 * CONFIG.d_ff * CONFIG.d_model)
    many = [_linear(CONFIG.d_model, 2 * CONFIG.d_ff, dtype) for _ in range(copies)]
    n = MATRIX_SIZE["cpu"]
    square = _linear(n, n, dtype)
    layers = {
        "plain": (many, square),
        "oneDNN": ([_in_rows(layer) for layer in many], _in_rows(square)),
        "oneDNN, packed": ([OneDNNLinear(layer) for layer in many], OneDNNLinear(square)),
    }
    samples: dict[str, list[list[float]]] = {name: [] for name in (*layers, "sum")}
    size = sum(layer.weight.nbytes for layer in many)
    for _ in range(ROUNDS + 1):
        samples["sum"].append([size / _seconds(lambda: [layer.weight.view(torch.float32).sum() for layer in many])])
        for name, (some, one) in layers.items():
            times = [_seconds_of_rows(some, rows) for rows in ROWS]
            samples[name].append([*(size / time for time in times), 2 * n**3 / _seconds_of_rows([one], n)])
    columns = (*(f"rows_{rows}_bytes_per_s" for rows in ROWS), "square_flop_per_s")
    return {
        name: dict(zip(columns, (statistics.median(column) for column in zip(*rounds[1:], strict=True)), strict=False))
        for name, rounds in samples.items()
    }


def _linear(in_features: int, out_features: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False, dtype=dtype).requires_grad_(False)


def _in_rows(linear: nn.Linear) -> OneDNNLinear:
    """oneDNN with the weight as it is, which is what the layer does where there is no room for a packed copy."""
    layer = OneDNNLinear(linear)
    layer._packed = (None, layer.weight, 0)  # tried, and found no room
    return layer


@torch.inference_mode()
def _seconds(fn: Callable[[], object]) -> float:
    return seconds(fn, CPU)


def _seconds_of_rows(layers: Sequence[nn.Linear], rows: int) -> float:
    x = torch.ones(1, rows, layers[0].in_features, dtype=layers[0].weight.dtype)
    return _seconds(lambda: [layer(x) for layer in layers])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="PyTorch's own linear layer beside oneDNN's on this CPU, packed and not."
    )
    parser.add_argument("--json", metavar="FILE", help="write the result")
    args = parser.parse_args()
    check_writable(args.json)
    results = {name: compare(DTYPES[name]) for name in ("fp32", "bf16")}
    table = make_table("Linear layers on this CPU", "layer", "1 row", "16 rows", "matrix-matrix")
    for dtype, layers in results.items():
        for name, rates in layers.items():
            cells = [f"{si(rate)}{'B/s' if 'bytes' in key else 'FLOP/s'}" for key, rate in rates.items()]
            table.add_row(f"{dtype}, {name}", *cells)
    make_console().print(table)
    if args.json:
        write_json(args.json, describe(CPU) | {"linear": results})


if __name__ == "__main__":
    main()
