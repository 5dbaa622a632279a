"""Pictures of what gpu.sh measured: `gpu_plot.py FOLDER/PART.json` draws a part, as far as it came, into FOLDER/PART.png."""

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minillm.files import write_file

Rows = Sequence[dict[str, Any]]
BLUE, ORANGE, GRAY = "#1f6fb4", "#d9822b", "0.6"
MOST_BARS = 40


def bars(axes: Axes, rows: Rows, title: str, names: Sequence[str], targets: Sequence[float | None]) -> None:
    """The fraction of the measured read bandwidth of each row, with a mark where its target is."""
    axes.set_title(title, fontsize=9)
    places = range(min(len(rows), MOST_BARS))
    axes.barh(places, [rows[i]["fraction_of_bandwidth"] for i in places], color=BLUE, height=0.7)
    for i in places:
        axes.text(
            rows[i]["fraction_of_bandwidth"], i, f" {rows[i]['fraction_of_bandwidth']:.0%}", va="center", fontsize=7
        )
        if (target := targets[i]) is not None:
            axes.plot([target, target], [i - 0.45, i + 0.45], color=ORANGE, linewidth=2)
    axes.set_yticks(places, [names[i] for i in places], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("of the measured read bandwidth", fontsize=8)


def draw_decode(figure: Figure, data: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    launched = [row for row in data["rows"] if row["kind"] == "launched" and row["batch"] == 1]
    names = [f"{row['scheme']} {row['kernel']}, {row['how']}, {row['context']}" for row in launched]
    bars(left, launched, "Decode at batch 1", names, [row["target"] for row in launched])
    right.set_title("A decode step: measured beside predicted", fontsize=9)
    kinds = {"launched": ("o", BLUE), "stage": ("s", ORANGE), "context": ("^", GRAY)}
    for kind, (marker, color) in kinds.items():
        rows = [row for row in data["rows"] if row["kind"] == kind]
        measured, predicted = ([row[key] * 1e3 for row in rows] for key in ("measured_s", "predicted_s"))
        right.plot(predicted, measured, marker=marker, color=color, linestyle="", markersize=5, label=kind)
    ends = [row[key] * 1e3 for row in data["rows"] if "ratio" in row for key in ("measured_s", "predicted_s")] or [1.0]
    line = [min(ends) / 1.5, max(ends) * 1.5]
    right.plot(line, line, color="black", linewidth=0.8)
    right.fill_between(line, [x / 1.15 for x in line], [x * 1.15 for x in line], color=GRAY, alpha=0.25, label="15 %")
    right.set(xscale="log", yscale="log", xlabel="predicted, ms", ylabel="measured, ms")
    right.legend(fontsize=7)


def draw_operators(figure: Figure, data: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    products = [row for row in data["rows"] if row["kind"] == "product" and row["M"] == 1]
    names = [f"{r['layer']} {r['kernel']}" for r in products]
    bars(left, products, "Products with one row", names, [None] * len(products))
    attention = [row for row in data["rows"] if row["kind"] == "attention"]
    names = [f"{r['batch']} x {r['context']}, {r['kernel']}" for r in attention]
    bars(right, attention, "Attention of one new token: batch x context", names, [None] * len(attention))


def draw_counters(figure: Figure, data: dict[str, Any]) -> None:
    axes = figure.subplots()
    axes.set_title("Bytes of a decode step", fontsize=9)
    keys = ("least_bytes", "dram_read_bytes", "counted_bytes")
    rows = data["rows"]
    for i, key in enumerate(keys):
        places = [j + 0.25 * (i - 1) for j in range(len(rows))]
        label = key.removesuffix("_bytes").replace("_", " ")
        axes.barh(places, [row[key] / 1e6 for row in rows], height=0.22, label=label, color=(GRAY, BLUE, ORANGE)[i])
    axes.set_yticks(range(len(rows)), [row["stage"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("MB", fontsize=8)
    axes.legend(fontsize=7)


DRAW: dict[str, Callable[[Figure, dict[str, Any]], None]] = {
    "decode": draw_decode,
    "operators": draw_operators,
    "counters": draw_counters,
}


def draw(source: Path) -> None:
    """Draw the result of a part into a PNG beside it."""
    data = json.loads(source.read_text())
    figure = Figure(figsize=(11, 8), layout="constrained")
    DRAW[data["part"]](figure, data)
    figure.suptitle(f"{data['machine']['device']}, {data['model']}, {data['dtype']}", fontsize=10)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    write_file(source.with_suffix(".png"), image.getvalue())


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
