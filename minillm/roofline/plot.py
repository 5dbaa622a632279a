"""The roofline diagram: FLOP/s over arithmetic intensity, both logarithmic.

Under the slope a phase waits for memory, under the flat roof for arithmetic; where they meet is the ridge. The roof of this
machine is black and measured, the datasheet's grey and dashed. Prefill is a filled marker, decode a hollow one; each stage has
its own shape, and an arrow leads from each stage to the next, so the picture reads in black and white too.
"""

import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from minillm.files import write_file
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.position import Position

Line = np.ndarray  # corners (N, 2): intensity, FLOP/s
MARKERS = "os^Dvph*X"
COLORS = ("#c44e20", "#1f6fb4", "#2f8f4e", "#7a4fa3", "#a8861c", "#b03a67", "#3a8a94", "#6d6d6d", "#20449a")


def draw_roofline(
    axes: Axes,
    stages: Mapping[str, Sequence[Position]],
    measured: Ceilings,
    datasheet: Ceilings | None = None,
) -> None:
    """Draw the roof of `measured` and one marker for each stage and phase, in the order of `stages`."""
    points = [position for positions in stages.values() for position in positions]
    low, high = _intensity_range(points, measured)
    if datasheet is not None:
        _draw_roof(axes, datasheet, low, high, color="0.6", linestyle="--", label=f"datasheet: {datasheet.device}")
    _draw_roof(axes, measured, low, high, color="black", linestyle="-", label=f"{measured.source}: {measured.device}")
    for i, positions in enumerate(stages.values()):
        for position in positions:
            _draw_marker(axes, position, MARKERS[i % len(MARKERS)], COLORS[i % len(COLORS)])
    arrows = _arrows(list(stages.values()))
    for start, end in arrows:
        style = {"arrowstyle": "->", "color": "0.35", "shrinkA": 8, "shrinkB": 8, "linewidth": 1.1}
        axes.annotate("", end, start, arrowprops=style)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=_rate_range(points, measured, datasheet))
    axes.set_xlabel("arithmetic intensity, FLOP per byte moved")
    axes.set_ylabel("FLOP/s, and the share of the roof reached")
    axes.grid(True, which="major", color="0.92")
    legend = axes.legend(loc="upper left", fontsize=8, frameon=False)
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # lays the figure out: labels are placed in its pixels
    texts = [*_label_roof(axes, measured, low), *legend.get_texts()]
    lines = [roof(ceilings, low, high) for ceilings in (measured, datasheet) if ceilings]
    named = [(stage, position) for stage, positions in stages.items() for position in positions]
    _label_points(axes, [*lines, *arrows], texts, named)


def save_roofline(
    path: str | Path,
    stages: Mapping[str, Sequence[Position]],
    measured: Ceilings,
    datasheet: Ceilings | None = None,
    title: str = "",
) -> Figure:
    """Write the diagram to `path` (.png, 1600 x 1100 pixels, .svg or .pdf) and return the figure.

    Raises `MinillmError` when the disk refuses; no part of a file is left then.
    """
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    draw_roofline(axes, stages, measured, datasheet)
    image = io.BytesIO()
    figure.savefig(image, format=Path(path).suffix[1:].lower(), dpi=200)
    write_file(path, image.getvalue())
    return figure


def _intensity_range(points: Sequence[Position], ceilings: Ceilings) -> tuple[float, float]:
    values = [ceilings.ridge, *(point.cost.intensity for point in points)]
    return min(values) / 6, max(values) * 8


def _rate_range(points: Sequence[Position], *ceilings: Ceilings | None) -> tuple[float, float]:
    rates = [point.achieved for point in points] + [c.peak for c in ceilings if c is not None]
    return min(rates) / 4, max(rates) * 3


def _draw_roof(axes: Axes, ceilings: Ceilings, low: float, high: float, **style: str) -> None:
    axes.plot(*roof(ceilings, low, high).T, linewidth=1.6, **style)  # type: ignore[arg-type]


def roof(ceilings: Ceilings, low: float, high: float) -> Line:
    """The slope and the flat roof between two intensities (FLOP/byte): three corners, (3, 2), of intensity and FLOP/s."""
    return np.array([(x, ceilings.attainable(x)) for x in (low, ceilings.ridge, high)])


def _label_roof(axes: Axes, ceilings: Ceilings, low: float) -> list[Text]:
    ridge, peak = ceilings.ridge, ceilings.peak
    axes.plot([ridge, ridge], [0, peak], color="black", linewidth=0.8, linestyle=":")
    middle = (low * ridge) ** 0.5  # halfway up the slope
    (x0, y0), (x1, y1) = axes.transData.transform(roof(ceilings, middle, ridge)[:2])
    slope = math.degrees(math.atan2(y1 - y0, x1 - x0))
    return [
        axes.annotate(
            f"ridge {ridge:.3g} FLOP/byte", (ridge, peak), xytext=(0, 6), textcoords="offset points", ha="right", fontsize=8,
        ),
        axes.annotate(
            f"{si(peak)}FLOP/s ({ceilings.dtype})", (1, peak), xycoords=("axes fraction", "data"), xytext=(-6, 5),
            textcoords="offset points", ha="right", fontsize=8,
        ),
        axes.text(
            middle, 1.08 * ceilings.attainable(middle), f"{si(ceilings.bandwidth)}B/s", fontsize=8, ha="center", va="bottom",
            rotation=slope, rotation_mode="anchor",
        ),
    ]  # fmt: skip


def _draw_marker(axes: Axes, position: Position, marker: str, color: str) -> None:
    fill = color if position.phase == "prefill" else "white"
    axes.plot(
        position.cost.intensity, position.achieved, marker=marker, markersize=8, color=color, markerfacecolor=fill,
        markeredgewidth=1.6, linestyle="", zorder=3,
    )  # fmt: skip


def _label_points(
    axes: Axes, lines: Sequence[Line], texts: Sequence[Text], points: Sequence[tuple[str, Position]]
) -> None:
    """Name each marker, each label in the nearest place around its marker that covers no marker, label or line."""
    to_points = 72 / axes.figure.get_dpi()
    centers = [axes.transData.transform((p.cost.intensity, p.achieved)) * to_points for _, p in points]
    labels = [np.array(text.get_window_extent().extents) * to_points for text in texts]
    taken = [*labels, *(_around(center, 6) for center in centers)]
    for line in lines:
        corners = axes.transData.transform(line) * to_points
        for start, end in pairwise(corners):
            taken += [_around(point, 2) for point in np.linspace(start, end, 60)]
    frame = np.array(axes.get_window_extent().extents) * to_points
    for (stage, position), center in zip(points, centers, strict=True):
        label = axes.annotate(
            f"{stage} {position.phase}, {position.fraction_of_roofline:.0%}", (position.cost.intensity, position.achieved),
            xytext=(0, 0), textcoords="offset points", fontsize=8, va="bottom", zorder=4,
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkB": 4},
        )  # fmt: skip
        extent = Text.get_window_extent(label)  # of the words alone, without the line to the marker
        size = np.array([extent.width, extent.height]) * to_points
        corner = _free_corner(center, size, np.array(taken), np.array(labels), frame)
        label.xyann = tuple(corner - center)
        labels.append(np.concatenate([corner, corner + size]))
        taken.append(labels[-1])
        taken += [_around(point, 0.5) for point in np.linspace(center, corner + size / 2, 30)]


Box = np.ndarray  # left, bottom, right, top, in points
DIRECTIONS = np.array([(math.cos(a), math.sin(a)) for a in np.linspace(-math.pi / 4, 7 * math.pi / 4, 16, False)])


def _around(point: np.ndarray, distance: float) -> Box:
    return np.concatenate([point - distance, point + distance])


def _free_corner(center: np.ndarray, size: np.ndarray, taken: Box, labels: Box, frame: Box) -> np.ndarray:
    """The lower left corner of a label: the first place, in widening rings around its marker, that is free.

    A place is free if the label stays inside the frame, lies on nothing that is taken (N, 4), and, where there is such a
    place, the line from it to its marker crosses no other label (M, 4).
    """
    free: list[np.ndarray] = []
    for distance in range(10, 400, 6):
        for direction in DIRECTIONS:
            # The box touches the ring from outside: its own half size comes on top of the distance.
            corner = center + direction * (distance + size / 2) - size / 2
            box = np.concatenate([corner, corner + size])
            fits = (box[:2] > frame[:2]).all() and (box[2:] < frame[2:]).all()
            if not fits or ((box[:2] < taken[:, 2:]) & (box[2:] > taken[:, :2])).all(axis=1).any():
                continue
            path = np.linspace(center, corner + size / 2, 60)[:, None]  # (60, 1, 2) against (M, 2)
            if not ((path > labels[:, :2]) & (path < labels[:, 2:])).all(axis=2).any():
                return corner
            free.append(corner)
    return free[0] if free else center + np.array([10.0, 0.0])  # no room at all: beside the marker


def _arrows(stages: Sequence[Sequence[Position]]) -> list[Line]:
    """From each stage to the next, phase by phase: what the change did to the position."""
    lines = []
    for before, after in pairwise(stages):
        targets = {position.phase: position for position in after}
        for start in before:
            if start.phase in targets:
                end = targets[start.phase]
                lines.append(np.array([(start.cost.intensity, start.achieved), (end.cost.intensity, end.achieved)]))
    return lines


def si(value: float) -> str:
    """A figure with three digits and its SI prefix: 3.35e12 -> "3.35 T"."""
    value = float(f"{value:.3g}")  # rounded first: 999.7 is 1 k
    prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
    for factor, prefix in prefixes:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
