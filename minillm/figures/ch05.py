"""Pictures of chapter 5: grids of codes, packed nibbles, an outlier, loss against bits, two roofs, time against rows."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Rectangle

from minillm.figures.picture import BLUE, DARK, GRAY, LINES, ORANGE, PALE, Picture, blank, picture, plain
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.plot import roof
from minillm.roofline.position import Position

DOTS = "os^Dv"  # for five schemes
COLORS = (DARK, BLUE, ORANGE, GRAY, "#2f8f4e")


def grids(weights: Sequence[float], values: Mapping[str, Sequence[float]]) -> Picture:
    """Weights as dots, and under them, a row a scheme, a tick for each value that the scheme can give one of them."""
    names = ", ".join(f"{name} has {len(ticks)}" for name, ticks in values.items())
    result, axes = picture(f"{len(weights)} weights over the values that they may be rounded to: {names}", height=2.2)
    rows = len(values)
    axes.plot(weights, [rows] * len(weights), "o", color=BLUE, markersize=4.5, markeredgecolor="white", clip_on=False)
    low, high = min(weights), max(weights)
    margin = 0.04 * (high - low)
    for row, ticks in enumerate(values.values()):
        y = rows - 1 - row
        inside = [tick for tick in ticks if low - margin <= tick <= high + margin]
        axes.vlines(inside, y - 0.3, y + 0.3, color=DARK, linewidth=0.7)
    axes.set_yticks(range(rows, -1, -1), ["weights", *values], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(low - margin, high + margin), ylim=(-0.6, rows + 0.5), xlabel="value of a weight")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return result


def nibbles(codes: Sequence[int]) -> Picture:
    """Codes of 4 bits, two to a byte: the even one in the upper half."""
    result, axes = picture(f"{len(codes)} codes of 4 bits in {len(codes) // 2} bytes", height=1.75)
    blank(axes, 3.5 + 4.0 * len(codes) + 0.7 * (len(codes) // 2), 5.8)
    for text, y in (("codes", 4.5), ("bits", 2.9), ("bytes", 1.0)):
        axes.text(0.2, y, text, fontsize=8.5, va="center")
    for i, code in enumerate(codes):
        x, color = 3.5 + 4.0 * i + 0.7 * (i // 2), BLUE if i % 2 == 0 else PALE
        ink = "white" if i % 2 == 0 else DARK
        axes.add_patch(Rectangle((x, 3.9), 4, 1.2, facecolor=color, edgecolor=DARK, linewidth=0.7))
        axes.text(x + 2, 4.5, str(code), fontsize=9, ha="center", va="center", color=ink)
        for j, bit in enumerate(f"{code:04b}"):
            axes.add_patch(Rectangle((x + j, 2.3), 1, 1.2, facecolor="white", edgecolor=DARK, linewidth=0.5))
            axes.text(x + j + 0.5, 2.9, bit, fontsize=8, ha="center", va="center")
        if i % 2 == 0:
            byte = code << 4 | codes[i + 1]
            axes.add_patch(Rectangle((x, 0.4), 8, 1.2, facecolor="white", edgecolor=DARK, linewidth=1.2))
            text = f"{code} x 16 + {codes[i + 1]} = {byte} = 0x{byte:02X}"
            axes.text(x + 4, 1.0, text, fontsize=8, ha="center", va="center")
    return result


def outlier(errors: Mapping[str, Sequence[float]], at: int) -> Picture:
    """The error of each weight in a row with one very large weight, in column `at`: a panel for each way to share scales."""
    result, all_axes = picture(
        f"errors along a row with one large weight in column {at}: with one scale all are large, with groups one group's",
        height=2.3, ncols=len(errors), sharey=True, squeeze=False,
    )  # fmt: skip
    for axes, (name, row) in zip(all_axes[0], errors.items(), strict=True):
        axes.bar(range(len(row)), row, width=1.0, color=BLUE)
        axes.axvline(at, color=ORANGE, linestyle="--", linewidth=1)
        axes.set_title(name, fontsize=8.5)
        axes.set_xlabel("column")
        plain(axes)
    all_axes[0, 0].set_ylabel("|w - restored w|")
    top = all_axes[0, 0].get_ylim()[1]
    all_axes[0, -1].annotate("the large weight", (at, top), xytext=(4, 0), textcoords="offset points", fontsize=7.5,
                             va="top", color=ORANGE)  # fmt: skip
    return result


def loss(points: Mapping[str, tuple[float, float]], hollow: Sequence[str] = ()) -> Picture:
    """KL against bits a weight, a named marker a scheme; hollow ones are not to be compared with the others."""
    alt = "KL divergence falls as bits a weight rise: " + ", ".join(points)
    result, axes = picture(alt, height=2.9)
    for name, (bits, kl) in points.items():
        axes.plot(bits, kl, "o", color=BLUE, markerfacecolor="white" if name in hollow else BLUE, markersize=6)
        axes.annotate(name, (bits, kl), xytext=(3, 6), textcoords="offset points", fontsize=8, rotation=28)
    highest = max(bits for bits, _ in points.values())
    axes.set(yscale="log", xlabel="bits a weight, scales and zeros included", ylabel="KL, nats a token")
    axes.set_xlim(None, highest + 0.22 * (highest - min(bits for bits, _ in points.values())))
    axes.set_ylim(None, 12 * max(kl for _, kl in points.values()))
    axes.grid(True, color="0.92")
    plain(axes)
    return result


def two_roofs(stages: Mapping[str, Sequence[Position]], low: Ceilings, high: Ceilings) -> Picture:
    """Schemes on a machine with two matrix rates: decode hollow, prefill filled. `low` and `high` share their bandwidth."""
    alt = "in decode, fewer bytes move a marker right along the slope; in prefill only the scheme with 8-bit products rises"
    result, axes = picture(alt, height=3.9)
    points = [position for positions in stages.values() for position in positions]
    left, right = min(p.cost.intensity for p in points) / 2, 3 * max(p.cost.intensity for p in points)
    bottom = min(p.achieved for p in points) / 2.5
    for ceilings, style in ((low, "-"), (high, "--")):
        axes.plot(*roof(ceilings, left, right).T, style, color=DARK, linewidth=1.4)
        axes.text(right / 1.1, ceilings.peak * 1.1, f"{ceilings.dtype}, {ceilings.peak / 1e12:,.0f} TFLOP/s",
                  ha="right", va="bottom", fontsize=8)  # fmt: skip
    for i, (name, positions) in enumerate(stages.items()):
        for position in positions:
            fill = "white" if position.phase == "decode" else COLORS[i]
            label = name if position.phase == "decode" else None
            axes.plot(position.cost.intensity, position.achieved, DOTS[i], color=COLORS[i], markerfacecolor=fill,
                      markersize=6 + 0.9 * (len(stages) - i), label=label)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, high.peak * 2.2))
    axes.set(xlabel="FLOP per byte", ylabel="FLOP/s")
    axes.legend(fontsize=8, frameon=False, loc="lower right", title="hollow: decode, filled: prefill", title_fontsize=8)
    axes.grid(True, color="0.92")
    plain(axes)
    return result


def rows_of(seconds: Mapping[str, Mapping[str, Sequence[float]]], rows: Sequence[int]) -> Picture:
    """Milliseconds of all linear layers against the rows that pass through them at once, a panel each for what is given."""
    names = " and ".join(seconds)
    result, all_axes = picture(f"{names} time of the linear layers of each scheme against rows", height=3.1,
                               ncols=len(seconds), sharey=True, squeeze=False)  # fmt: skip
    for axes, (title, schemes) in zip(all_axes[0], seconds.items(), strict=True):
        for i, (name, times) in enumerate(schemes.items()):
            style = LINES[i % len(LINES)] + DOTS[i]
            axes.plot(rows, 1e3 * np.asarray(times), style, color=COLORS[i], markersize=4.5, linewidth=1.2, label=name)
        axes.set(xscale="log", yscale="log", xlabel="rows (tokens in one pass)")
        axes.set_title(title, fontsize=9)
        axes.set_xticks(rows, [str(row) for row in rows])
        axes.minorticks_off()
        axes.grid(True, color="0.92")
        plain(axes)
    low, high = all_axes[0, 0].get_ylim()
    ticks = [t * 10**e for e in range(-1, 6) for t in (1, 2, 5) if low <= t * 10**e <= high]
    all_axes[0, 0].set_yticks(ticks, [f"{t:,g}" for t in ticks])
    all_axes[0, 0].set_ylabel("ms, all linear layers")
    all_axes[0, 0].legend(fontsize=7.5, frameon=False, loc="upper left")
    return result
