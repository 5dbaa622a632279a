"""The picture of the page side by side: how many times as fast minillm is as each engine, and how far rounds lie apart."""

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import NullFormatter

from minillm.figures.picture import BLUE, DARK, GRAY, ORANGE, Picture, picture, plain


def times_as_fast(ratios: Sequence[dict[str, Any]], title: str) -> Picture:
    """One line a comparison, from its slowest to its fastest round with a dot at the median; a bar where its target lies.

    Orange dots are below 1: minillm is slower there. The scale is logarithmic, so twice and half are as far from 1.
    """
    slower = sum(row["times_as_fast"]["median"] < 1 for row in ratios)
    alt = f"{title}: how many times as fast minillm is, {slower} of {len(ratios)} comparisons below 1"
    result, axes = picture(alt, height=0.9 + 0.27 * len(ratios))
    names = [f"{row['precision']}  beside  {row['peer']}, {row['peer_precision']}" for row in ratios]
    for y, row in enumerate(ratios):
        times, target = row["times_as_fast"], row["target"]
        color = BLUE if times["median"] >= 1 else ORANGE
        axes.plot([times["min"], times["max"]], [y, y], color=color, linewidth=2, label=names[y])
        axes.plot(times["median"], y, "o" if times["median"] >= 1 else "s", color=color, markersize=5)
        if target:
            axes.plot(target, y, "|", color=DARK, markersize=13, markeredgewidth=1.5)
    axes.axvline(1, color=GRAY, linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(ratios)), names, fontsize=8)
    axes.set_ylim(len(ratios) - 0.5, -0.5)
    axes.set_xlabel("times as fast, medians and all rounds (| target; squares: slower)", fontsize=8)
    axes.set_title(title, fontsize=9, loc="left")
    plain(axes)
    return result
