"""Pictures of chapter 0: the layers, a request in time, percentiles, the roofline, batches, the three limits, this machine."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minillm.figures.picture import BLUE, DARK, GRAY, ORANGE, PALE, Picture, blank, picture, plain
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.plot import draw_roofline, si
from minillm.roofline.position import Position

SMALL = 8.5  # points: the least that still reads at 800 pixels


def _box(axes: Axes, x: float, y: float, width: float, height: float, color: str, hatch: str = "") -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=DARK, linewidth=1.1, hatch=hatch))


def three_layers() -> Picture:
    """Runtime, infrastructure and tooling as shells around each other, the chip below them."""
    figure, axes = picture(
        "three nested layers: runtime inside infrastructure inside tooling, on kernels and the chip", 3.9
    )
    blank(axes, 100, 60)
    names = (
        "3. Tooling: engines you install",
        "2. Infrastructure: many GPUs, many users",
        "1. Runtime: one model on one GPU",
    )
    contents = (
        "vLLM, SGLang, TensorRT-LLM, llama.cpp, TGI, Dynamo, Ray Serve",
        "parallelism, prefill and decode apart, replicas, routing",
        "KV cache, batching, quantization, speculation, attention kernels",
    )
    boxes = ((0, 12, 100, 48, PALE), (8, 15, 84, 31, "#f4f4f4"), (16, 18, 68, 15, "white"))
    for (x, y, width, height, color), title, content in zip(boxes, names, contents, strict=True):
        _box(axes, x, y, width, height, color)
        axes.text(50, y + height - 4, title, ha="center", va="center", fontsize=11, weight="bold")
        axes.text(50, y + height - 9, content, ha="center", va="center", fontsize=SMALL)
    _box(axes, 0, 1, 100, 8, "#cfcfcf")
    axes.text(50, 5, "Kernels, the chip, its memory", ha="center", va="center", fontsize=10)
    return figure


def timeline() -> Picture:
    """One request: the prompt in one long pass, then one short pass a token, and what TTFT, ITL and E2E measure on it."""
    figure, axes = picture(
        "a request in time: waiting, one long prefill pass, then one short decode pass for each token", 3.3
    )
    blank(axes, 104, 50)
    _box(axes, 6, 20, 8, 10, "white")
    _box(axes, 14, 20, 24, 10, BLUE)
    axes.text(10, 25, "queue", ha="center", va="center", fontsize=SMALL)
    axes.text(26, 27, "prefill", ha="center", va="center", color="white", fontsize=10, weight="bold")
    axes.text(26, 22.6, "all prompt tokens at once", ha="center", va="center", color="white", fontsize=SMALL)
    starts = [38 + 10 * i for i in range(6)]
    for i, x in enumerate(starts):
        _box(axes, x, 20, 10, 10, "#f3d9b8", "//" if i % 2 else "")
    axes.text(98, 32, "decode: one token a pass", ha="right", fontsize=10, weight="bold")
    for i, x in enumerate([38, *(start + 10 for start in starts)]):
        axes.annotate("", (x, 12.5), (x, 20), arrowprops={"arrowstyle": "-|>", "color": DARK})
        axes.text(x, 9.6, f"token {i + 1}", ha="center", va="center", fontsize=SMALL)
    axes.annotate("", (6, 30), (6, 37), arrowprops={"arrowstyle": "-|>", "color": DARK})
    axes.text(6, 39, "sent", ha="center", fontsize=SMALL)
    for left, right, y, name in ((6, 38, 43, "TTFT"), (58, 68, 39.5, "ITL"), (6, 98, 3, "E2E, end to end")):
        axes.annotate(
            "", (right, y), (left, y), arrowprops={"arrowstyle": "<->", "color": DARK, "shrinkA": 0, "shrinkB": 0}
        )
        axes.text((left + right) / 2, y + 1.2, name, ha="center", va="bottom", fontsize=10, weight="bold")
    for x, y in ((38, 43), (58, 39.5), (68, 39.5)):
        axes.plot([x, x], [30, y], color=GRAY, linewidth=0.8, linestyle=":")
    for x in (6, 98):
        axes.plot([x, x], [3, 20 if x == 6 else 8], color=GRAY, linewidth=0.8, linestyle=":")
    return figure


def percentiles(values: Sequence[float], marks: Mapping[str, float]) -> Picture:
    """Sorted latencies (s), one bar each, with horizontal lines at the marks: a percentile is a height, not a set of bars."""
    figure, axes = picture("latencies sorted by size, with their " + ", ".join(marks) + " as horizontal lines", 2.9)
    axes.bar(
        range(1, len(values) + 1), [1e3 * v for v in sorted(values)], width=0.8, color="#9db8d1", edgecolor="#6a8cab"
    )
    for i, ((name, value), style) in enumerate(zip(marks.items(), ("-", "--", ":", "-."), strict=False)):
        axes.axhline(1e3 * value, color=DARK, linewidth=1.3, linestyle=style)
        axes.annotate(f"{name}: {1e3 * value:.0f} ms", (0, 1e3 * value), xytext=(4 + 90 * i, 4), textcoords="offset points",
                      fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    axes.set(
        xlabel="gap, from the shortest to the longest",
        ylabel="ms, logarithmic",
        yscale="log",
        xlim=(-1, len(values) + 1),
    )
    axes.set_ylim(5e2 * min(values), 2e3 * max(values))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    plain(axes)
    return figure


def roofline(ceilings: Ceilings, points: Mapping[str, float]) -> Picture:
    """The roof of `ceilings` (grey where unreachable) and named intensities (FLOP/byte) standing on it."""
    low, high = 0.2, 5000  # FLOP/byte
    figure, axes = picture(f"the roofline of {ceilings.device}, with " + ", ".join(points) + " on it", 3.9)
    x = np.geomspace(low, high, 200)
    roof = np.array([ceilings.attainable(v) for v in x])
    top = 8 * ceilings.peak
    axes.loglog(x, roof, color=DARK, linewidth=2)
    axes.fill_between(x, roof, top, color=PALE)
    axes.plot([ceilings.ridge] * 2, [ceilings.attainable(low), ceilings.peak], color=DARK, linewidth=0.9, linestyle=":")
    axes.annotate(f"ridge: {ceilings.ridge:.0f} FLOP/byte", (ceilings.ridge, 1.4 * ceilings.attainable(low)), xytext=(5, 0),
                  textcoords="offset points", fontsize=9)  # fmt: skip
    axes.text(high / 1.2, 1.7 * ceilings.peak, f"compute: {si(ceilings.peak)}FLOP/s", ha="right", fontsize=9)
    axes.set(xlim=(low, high), ylim=(ceilings.attainable(low), top))
    figure.draw_without_rendering()
    (x0, y0), (x1, y1) = axes.transData.transform([(1, ceilings.attainable(1)), (10, ceilings.attainable(10))])
    axes.text(5, 1.2 * ceilings.attainable(5), f"bandwidth: {si(ceilings.bandwidth)}B/s", ha="center", va="bottom", fontsize=9,
              rotation=float(np.degrees(np.arctan2(y1 - y0, x1 - x0))), rotation_mode="anchor")  # fmt: skip
    axes.text(low * 1.3, top / 2, "out of reach", fontsize=9, style="italic", va="top")
    for (name, intensity), marker in zip(points.items(), "osD^vP", strict=False):
        y = ceilings.attainable(intensity)
        axes.plot(intensity, y, marker=marker, color=ORANGE, markeredgecolor=DARK, markersize=9, linestyle="", zorder=3)
        flat = intensity > ceilings.ridge
        axes.annotate(name, (intensity, y), xytext=(0 if flat else 8, -18), textcoords="offset points", fontsize=9,
                      ha="center" if flat else "left")  # fmt: skip
    axes.set(xlabel="arithmetic intensity, FLOP per byte moved", ylabel="FLOP/s")
    plain(axes)
    return figure


def batch(
    batches: Sequence[int], intensities: Mapping[int, Sequence[float]], fits: Mapping[int, int], ridge: float
) -> Picture:
    """Whole-step intensity over the batch, one line a context; beyond what fits in memory (`fits`) the line is thin."""
    figure, axes = picture(
        "intensity of a decode step against the batch: it levels off, the lower the longer the context", 3.9
    )
    for (context, values), style in zip(intensities.items(), ("-", "--", "-.", ":"), strict=False):
        inside = [(b, v) for b, v in zip(batches, values, strict=True) if b <= fits[context]]
        axes.plot(batches, values, color=GRAY, linewidth=0.8, linestyle=style)
        axes.plot(*zip(*inside, strict=True), color=BLUE if context else DARK, linewidth=2.2, linestyle=style)
        if fits[context] < batches[-1]:
            axes.plot(*inside[-1], marker="|", color=DARK, markersize=14, markeredgewidth=2)
        name = f"{context:,} tokens of context" if context else "weights only"
        axes.annotate(name, (batches[-1], values[-1]), xytext=(4, -3), textcoords="offset points", fontsize=9)
    axes.axhline(ridge, color=DARK, linewidth=1)
    axes.text(1.1, ridge * 1.08, f"ridge: {ridge:.0f}", fontsize=9)
    axes.set(xscale="log", yscale="log", xlim=(1, batches[-1] * 6), xlabel="batch: sequences decoded together")
    axes.set_ylabel("FLOP per byte")
    ticks = [b for b in (1, 4, 16, 64, 256, 1024) if b <= batches[-1]]
    axes.set_xticks(ticks, [str(b) for b in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    plain(axes)
    return figure


def limits(cases: Mapping[str, Mapping[str, float]]) -> Picture:
    """For each case the seconds that each limit asks for, as bars on a logarithmic scale. The longest is the time."""
    figure, axes = picture(
        "seconds asked for by compute, memory and overhead: " + "; ".join(cases), 0.9 + 0.72 * len(cases)
    )
    looks = {"compute": (PALE, ""), "memory": (BLUE, ""), "overhead": (ORANGE, "//")}
    for row, by_limit in enumerate(cases.values()):
        longest = max(by_limit, key=by_limit.__getitem__)
        for i, (limit, seconds) in enumerate(by_limit.items()):
            color, hatch = looks[limit]
            y = row + 0.25 * (i - 1)
            axes.barh(
                y, 1e3 * seconds, height=0.23, color=color, hatch=hatch, edgecolor=DARK, label=None if row else limit
            )
            weight = "bold" if limit == longest else "normal"
            axes.annotate(_short(seconds), (1e3 * seconds, y), xytext=(4, 0), textcoords="offset points", fontsize=SMALL,
                          va="center", weight=weight)  # fmt: skip
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    every = [1e3 * s for by_limit in cases.values() for s in by_limit.values()]
    axes.set(xscale="log", xlabel="ms, logarithmic", xlim=(min(every) / 2, max(every) * 6))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(loc="lower right", fontsize=SMALL, frameon=False, ncols=3, bbox_to_anchor=(1, 1))
    plain(axes)
    return figure


def _short(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def measured_roofline(stages: Mapping[str, Sequence[Position]], ceilings: Ceilings, sheet: Ceilings | None) -> Picture:
    """The roof measured on this machine, the datasheet's if it is known, and where each phase of each stage stands."""
    figure, axes = picture(f"measured positions of {', '.join(stages)} under the measured roof of this machine", 4.4)
    draw_roofline(axes, stages, ceilings, sheet)
    return figure
