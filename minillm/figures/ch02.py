"""Pictures of chapter 2: the two phases, the cache filling up, masks, memory, and the speed-up of caching."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minillm.config import ModelConfig
from minillm.figures.picture import BLUE, DARK, GRAY, ORANGE, PALE, Picture, blank, picture, plain

LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
DOTS = "os^Dv"


def phases(prompt: int, new: int) -> Picture:
    """The passes of naive and of cached generation in a row, each as long as the number of tokens it runs."""
    naive, cached = [*range(prompt, prompt + new)], [prompt] + [1] * (new - 1)
    alt = f"naive generation runs {sum(naive)} tokens in {new} passes, cached generation {sum(cached)} in as many"
    result, axes = picture(alt, height=2.2)
    blank(axes, sum(naive) + 7.5, 6.4)
    for y, name, lengths in ((3.9, "naive", naive), (1.1, "KV cache", cached)):
        axes.text(5.6, y + 0.6, name, ha="right", va="center", fontsize=9)
        x = 6.0
        for i, length in enumerate(lengths):
            fresh = prompt if i == 0 else 1
            _cells(axes, x, y, length - fresh, {"facecolor": PALE, "hatch": "////"})
            _cells(axes, x + length - fresh, y, fresh, {"facecolor": BLUE if i == 0 else DARK})
            axes.text(x + length / 2, y - 0.15, str(prompt + i + 1), ha="center", va="top", fontsize=8)
            x += length + 0.25
    axes.text(6, 6.2, "passes in order; below each, the number of the token that it gives", fontsize=8, va="top")
    end = 6 + sum(cached) + 0.25 * new
    axes.text(6 + prompt / 2, 2.75, "prefill", ha="center", fontsize=8)
    axes.text(6.25 + prompt, 2.75, "decode", fontsize=8)
    axes.text(end + 0.6, 1.6, "blue: prompt   black: one new token   hatched: run again", va="center", fontsize=8)
    return result


def filling(prompt: int, new: int) -> Picture:
    """The slots of a cache after each pass: what was there, what this pass wrote, what is still free."""
    capacity = prompt + new - 1
    result, axes = picture(
        f"a cache of {capacity} slots that fills from the left, one slot a decode step", 0.6 + 0.34 * new
    )
    blank(axes, capacity + 11.5, new + 1.6)
    for row in range(new):
        y = new - 1 - row
        length = prompt + row
        written = prompt if row == 0 else 1
        for column in range(capacity):
            if column >= length:
                style: dict[str, object] = {"facecolor": "white", "linestyle": ":"}
            elif column >= length - written:
                style = {"facecolor": DARK}
            else:
                style = {"facecolor": PALE, "hatch": "////"}
            axes.add_patch(Rectangle((4.6 + column, y + 0.1), 0.88, 0.8, edgecolor=GRAY, linewidth=0.6, **style))  # type: ignore[arg-type]
        axes.text(4.3, y + 0.5, "prefill" if row == 0 else f"decode {row}", ha="right", va="center", fontsize=8)
        text = f"wrote {written}, attends over {length}"
        axes.text(4.9 + capacity, y + 0.5, text, va="center", fontsize=8)
    for column in range(capacity):
        axes.text(5.04 + column, new + 0.25, str(column), ha="center", fontsize=8)
    axes.text(4.3, new + 0.25, "position", ha="right", fontsize=8)
    axes.text(
        4.6, new + 1.05, "black: written by this pass   hatched: read, not computed again   white: free", fontsize=8
    )
    return result


def masks(new: int = 2, seen: int = 4) -> Picture:
    """Which keys a query sees: the square case, and fewer queries than keys with the triangle in the right and wrong corner."""
    result, all_axes = picture("a square causal mask, a lower-right one and an upper-left one", height=2.5, ncols=3)
    total = seen + new
    cases = (
        ("no cache: T = S", np.tri(total), range(total)),
        (f"{seen} cached, {new} new: lower right", np.tri(new, total, seen), range(seen, total)),
        ("is_causal=True: upper left, wrong", np.tri(new, total), range(seen, total)),
    )
    for axes, (title, visible, queries) in zip(all_axes, cases, strict=True):
        for row, query in enumerate(queries):
            for column in range(total):
                color, hatch = (BLUE, "") if visible[row, column] else ("white", "....")
                box = Rectangle(
                    (column, -query), 0.92, 0.88, edgecolor=GRAY, linewidth=0.6, facecolor=color, hatch=hatch
                )
                axes.add_patch(box)
            axes.text(-0.25, 0.44 - query, str(query), ha="right", va="center", fontsize=8)
        for column in range(total):
            axes.text(column + 0.46, 1.15, str(column), ha="center", fontsize=8)
        axes.set(xlim=(-1.6, total + 0.3), ylim=(-total + 0.6, 2.6), aspect="equal")
        axes.text(total / 2, 2.05, "key", ha="center", fontsize=8)
        axes.text(
            -1.2, -(queries[0] + queries[-1]) / 2 + 0.44, "query", va="center", ha="center", rotation=90, fontsize=8
        )
        axes.set_axis_off()
        axes.set_title(title, fontsize=8.5)
    return result


def memory(config: ModelConfig, bytes_per_token: int, batches: Sequence[int], device_gb: float, device: str) -> Picture:
    """Gigabytes of cache against context for several batches, with the weights and the device's memory as lines."""
    alt = (
        f"cache of {config.name} against context: one straight line a batch, beside weights and the memory of {device}"
    )
    result, axes = picture(alt, height=3.3)
    context = np.geomspace(128, 16384, 50)
    for i, batch in enumerate(batches):
        size = batch * context * bytes_per_token / 1e9
        axes.plot(context, size, linestyle=LINES[i], color=(BLUE, ORANGE, DARK, GRAY)[i % 4], label=f"batch {batch}")
    weights = 2 * config.parameter_count / 1e9
    for value, text in ((weights, f"weights, {weights:.0f} GB"), (device_gb, f"{device}, {device_gb:.0f} GB")):
        axes.axhline(value, color=DARK, linewidth=0.9)
        axes.text(132, value * 1.08, text, fontsize=8)
    axes.set(
        xscale="log", yscale="log", xlabel="tokens in each sequence", ylabel="GB of keys and values", ylim=(0.05, 2e3)
    )
    axes.set_xticks([128, 512, 2048, 4096, 16384], ["128", "512", "2,048", "4,096", "16,384"])
    axes.set_xticks([], minor=True)
    axes.grid(True, color="0.92")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    plain(axes)
    return result


def speedup(lengths: Sequence[float], curves: Mapping[str, Sequence[float]]) -> Picture:
    """How many times faster n tokens come with a cache, against n, for several machines. 1 is a gray line: no gain."""
    result, axes = picture(
        "speed-up of caching against length: large on a CPU, none on a big GPU for short text", height=3.5
    )
    for i, (name, values) in enumerate(curves.items()):
        color = (ORANGE, BLUE, DARK, GRAY, BLUE)[i % 5]
        axes.plot(lengths, values, linestyle=LINES[i % 5], marker=DOTS[i % 5], markersize=4, color=color, label=name)
    axes.axhline(1, color=GRAY, linewidth=0.9)
    axes.text(lengths[-1], 0.93, "no gain", fontsize=8, ha="right", va="top")
    axes.set(xscale="log", yscale="log", xlabel="n, tokens from an empty prompt", ylabel="times faster than naive")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0.6, None)
    axes.set_xticks(lengths, [f"{n:,.0f}" for n in lengths])
    axes.set_xticks([], minor=True)
    axes.grid(True, color="0.92")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    plain(axes)
    return result


def _cells(axes: Axes, x: float, y: float, width: float, style: dict[str, str]) -> None:
    if width:
        axes.add_patch(Rectangle((x, y), width, 1.2, edgecolor=DARK, linewidth=0.6, **style))  # type: ignore[arg-type]
