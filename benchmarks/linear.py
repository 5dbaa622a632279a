"""PyTorch's own linear layer beside oneDNN's on this CPU: where the figures in minillm/cpu.py come from.

    python benchmarks/linear.py --json FILE

Both take turns. Matrix-vector: a row times the gate and up weights of SmolLM2-135M, as many copies as its weights are large, so
that each is read from memory. Matrix-matrix: a square product. Medians of the rounds.
"""

import argparse
import statistics

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


@torch.inference_mode()
def compare(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Bytes/s of the matrix-vector product and FLOP/s of the square one, by layer."""
    copies = CONFIG.parameter_count // (2 * CONFIG.d_ff * CONFIG.d_model)
    plain = [nn.Linear(CONFIG.d_model, 2 * CONFIG.d_ff, bias=False, dtype=dtype) for _ in range(copies)]
    n = MATRIX_SIZE["cpu"]
    square = nn.Linear(n, n, bias=False, dtype=dtype)
    layers = {
        "plain": (plain, square),
        "oneDNN": ([OneDNNLinear(layer) for layer in plain], OneDNNLinear(square)),
    }
    row, matrix = torch.ones(1, 1, CONFIG.d_model, dtype=dtype), torch.ones(n, n, dtype=dtype)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    for _ in range(ROUNDS + 1):
        for name, (many, one) in layers.items():
            vector = seconds(lambda many=many: [layer(row) for layer in many], CPU)
            product = seconds(lambda one=one: one(matrix), CPU)
            samples[name].append((sum(layer.weight.nbytes for layer in many) / vector, 2 * n**3 / product))
    medians = {
        name: [statistics.median(column) for column in zip(*rows[1:], strict=True)] for name, rows in samples.items()
    }
    return {name: {"vector_bytes_per_s": v, "square_flop_per_s": s} for name, (v, s) in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="PyTorch's own linear layer beside oneDNN's on this CPU.")
    parser.add_argument("--json", metavar="FILE", help="write the result")
    args = parser.parse_args()
    check_writable(args.json)
    results = {name: compare(DTYPES[name]) for name in ("fp32", "bf16")}
    table = make_table("Linear layers on this CPU", "layer", "matrix-vector", "matrix-matrix")
    for dtype, layers in results.items():
        for name, rates in layers.items():
            table.add_row(
                f"{dtype}, {name}", f"{si(rates['vector_bytes_per_s'])}B/s", f"{si(rates['square_flop_per_s'])}FLOP/s"
            )
    make_console().print(table)
    if args.json:
        write_json(args.json, describe(CPU) | {"linear": results})


if __name__ == "__main__":
    main()
