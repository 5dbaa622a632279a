"""Pictures of chapter 6: rounds, two laws and their overlap, what a lookahead gains, passes, temperature, batches."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from minillm.figures.picture import BLUE, COLORS, DARK, DOTS, GRAY, LINES, ORANGE, PALE, Picture, blank, picture, plain
from minillm.roofline.plot import roof
from minillm.roofline.position import Position

LETTER = 0.17  # width of a letter in a box, in rows


def rounds(steps: Sequence[tuple[Sequence[str], int, str]]) -> Picture:
    """One row a round: the drafted tokens, how many of them were accepted, and the target's own token behind those."""
    given = sum(accepted + 1 for _, accepted, _ in steps)
    alt = f"{len(steps)} rounds give {given} tokens: accepted drafts, the target's own token, and refused drafts"
    result, axes = picture(alt, height=0.5 + 0.27 * len(steps))
    longest = 1.6 + max(sum(map(_width, [*drafts, own])) for drafts, _, own in steps)
    blank(axes, max(longest, 21), len(steps) + 1)
    axes.set_ylim(-0.1, len(steps) + 1)
    key = "blue: drafted and accepted    orange: the target's own token    hatched: refused"
    axes.text(0, len(steps) + 0.45, key, fontsize=8, va="center")
    for row, (drafts, accepted, own) in enumerate(steps):
        x, y = 1.6, len(steps) - 1 - row
        axes.text(1.2, y + 0.42, f"{row + 1}", fontsize=8, ha="right", va="center", color=GRAY)
        shown = [*((draft, BLUE, "white") for draft in drafts[:accepted]), (own, ORANGE, DARK)]
        for text, face, ink in [*shown, *((draft, "white", GRAY) for draft in drafts[accepted:])]:
            refused = face == "white"
            style = {"facecolor": face, "edgecolor": GRAY if refused else DARK, "linewidth": 0.6}
            box = Rectangle((x, y), _width(text) - 0.1, 0.84, hatch="////" if refused else "", **style)  # type: ignore[arg-type]
            axes.add_patch(box)
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if refused else None
            axes.text(
                x + box.get_width() / 2, y + 0.42, _visible(text), fontsize=7, ha="center", va="center",
                color=DARK if refused else ink, bbox=paper, family="monospace",
            )  # fmt: skip
            x += _width(text)
    return result


def _visible(text: str) -> str:
    """A token as it can be seen: its spaces and line ends too, and no dollar that begins a formula."""
    return text.replace(" ", "\u00b7").replace("\n", "\\n").replace("$", r"\$")


def _width(text: str) -> float:
    return 0.45 + LETTER * 1.35 * max(2, len(_visible(text)))


def overlap(p: Sequence[float], q: Sequence[float]) -> Picture:
    """The law p of the target over the law q of a drafter: where they overlap, where p is above and where q is."""
    shared = np.minimum(p, q)
    result, axes = picture(
        f"bars of p and q over each token; they overlap in {sum(shared):.4g} of the mass", height=2.6
    )
    places = np.arange(len(p))
    axes.bar(places, shared, 0.7, color=BLUE, edgecolor=DARK, linewidth=0.6, label="min(p, q): drafted and accepted")
    for law, other, color, hatch, label in (
        (p, q, ORANGE, "", "p above q: comes in place of what is refused"),
        (q, p, "white", "////", "q above p: drafted and refused"),
    ):
        above = np.maximum(np.subtract(law, other), 0)
        axes.bar(places, above, 0.7, shared, color=color, hatch=hatch, edgecolor=DARK, linewidth=0.6, label=label)
    for place, (mine, theirs) in enumerate(zip(p, q, strict=True)):
        axes.text(place, max(mine, theirs) + 0.01, f"p = {mine:.4g}\nq = {theirs:.4g}", fontsize=8, ha="center")
    axes.set(xticks=places, xlabel="token", ylabel="probability", ylim=(0, 1.3 * max(*p, *q)))
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    plain(axes)
    return result


def gain(
    speedups: Mapping[str, Sequence[float]], costs: Sequence[float], best: Mapping[str, Sequence[int]], c: float
) -> Picture:
    """Speed-up against the lookahead 0, 1, 2 ... by name, its best marked; and the best lookahead against c, by name."""
    result, (left, right) = picture("speed-up against lookahead, and the best lookahead against c", 3.0, ncols=2)
    for i, (name, values) in enumerate(speedups.items()):
        left.plot(values, LINES[i], color=COLORS[i], linewidth=1.3, label=name)
        top = int(np.argmax(values))
        left.plot(top, values[top], DOTS[i], color=COLORS[i], markersize=6)
    left.axhline(1, color=GRAY, linewidth=0.8)
    left.set(xlabel="lookahead k", ylabel="speed-up", ylim=(0, None))
    left.set_title(f"a draft step of c = {c:g}; the best k is marked", fontsize=9)
    for i, (name, lookaheads) in enumerate(best.items()):
        right.step(costs, lookaheads, LINES[i], where="post", color=COLORS[i], linewidth=1.3, label=name)
    right.set(xlabel="c, decode steps a draft step", ylabel="best lookahead")
    right.set_title("0: do not speculate", fontsize=9)
    right.legend(fontsize=8, frameon=False)  # the same names in both
    for axes in (left, right):
        axes.grid(True, color="0.92")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        plain(axes)
    return result


def passes(
    measured: Mapping[str, Mapping[int, float]], predicted: Mapping[str, Mapping[int, float]], title: str
) -> Picture:
    """What a pass of n tokens takes, in passes of one, against n: dots measured, lines predicted, by name."""
    result, axes = picture("the time of a pass over n tokens, in passes over one", height=2.9)
    for i, name in enumerate(predicted):
        axes.plot(*_xy(predicted[name]), LINES[i], color=COLORS[i], linewidth=1.3, label=f"{name}, predicted")
        axes.plot(*_xy(measured[name]), DOTS[i], color=COLORS[i], markersize=5, label=f"{name}, measured")
    n = list(next(iter(predicted.values())))
    axes.plot(n, n, color=GRAY, linewidth=0.9, linestyle=":", label="n passes of one token")
    top = max(max(line.values()) for line in (*measured.values(), *predicted.values()))
    axes.set(xlabel="tokens in a pass, n", ylabel="passes of one token", ylim=(0, 1.3 * top), xticks=n)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7.5, frameon=False, ncols=2)
    axes.grid(True, color="0.92")
    plain(axes)
    return result


def _xy(line: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(line), list(line.values())


def shift(panels: Mapping[str, Mapping[int, Position]]) -> Picture:
    """Passes over n tokens on the roofline, a panel a machine: n tokens stand n times as far to the right as one."""
    alt = "markers of passes over 1 and more tokens climb the slope of the roofline"
    result, all_axes = picture(alt, height=3.1, ncols=len(panels), squeeze=False)
    for axes, (title, positions) in zip(all_axes[0], panels.items(), strict=True):
        ceilings = next(iter(positions.values())).ceilings
        low = min(p.cost.intensity for p in positions.values()) / 2
        high = 3 * max(ceilings.ridge, *(p.cost.intensity for p in positions.values()))
        axes.plot(*roof(ceilings, low, high).T, color=DARK, linewidth=1.5)
        for i, (n, position) in enumerate(positions.items()):
            point = (position.cost.intensity, position.achieved)
            axes.plot(*point, DOTS[0] if n > 1 else "D", color=BLUE if n > 1 else ORANGE, markersize=5.5)
            if i in (0, len(positions) - 1):
                name = "decode" if n == 1 else f"{n} tokens"
                axes.annotate(name, point, xytext=(6, -9), textcoords="offset points", fontsize=7.5)
        axes.axvline(ceilings.ridge, color=DARK, linewidth=0.8, linestyle=":")
        bottom = min(p.achieved for p in positions.values()) / 4
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, ceilings.peak * 4), xlabel="FLOP per byte")
        axes.text(ceilings.ridge, ceilings.peak * 1.5, f"ridge {ceilings.ridge:.3g}", fontsize=7.5, ha="center")
        axes.set_title(title, fontsize=9)
        axes.grid(True, color="0.92")
        plain(axes)
    all_axes[0, 0].set_ylabel("FLOP/s")
    return result


def temperature(temperatures: Sequence[float], alphas: Mapping[str, Sequence[float]]) -> Picture:
    """The chance that a guess is accepted, by drafter, against the temperature."""
    result, axes = picture("acceptance against temperature, a line for each drafter", height=2.6)
    for i, (name, values) in enumerate(alphas.items()):
        axes.plot(temperatures, values, LINES[i], marker=DOTS[i], markersize=4.5, color=COLORS[i], label=name)
    axes.set(xlabel="temperature", ylabel="alpha", ylim=(-0.03, 1.05), xticks=temperatures)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.grid(True, color="0.92")
    plain(axes)
    return result


def batches(predicted: Mapping[str, Mapping[int, float]], published: Mapping[str, Mapping[int, float]]) -> Picture:
    """Speed-up against the batch by name: lines predicted, markers published. Below 1, speculation costs time."""
    result, axes = picture("speed-up of speculation against the batch: predicted lines, published markers", height=2.9)
    _below_one(axes)
    for i, (name, line) in enumerate(predicted.items()):
        axes.plot(*_xy(line), LINES[i], color=COLORS[i], linewidth=1.3, label=name)
    for i, (name, line) in enumerate(published.items()):
        axes.plot(*_xy(line), DOTS[i], color=DARK, markerfacecolor=("white", ORANGE)[i % 2], markersize=6, label=name)
    ticks = sorted({b for line in predicted.values() for b in line if b & (b - 1) == 0})
    axes.set(xscale="log", xlabel="batch B", ylabel="speed-up", ylim=(0, None))
    axes.set_xticks(ticks, [str(b) for b in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.grid(True, color="0.92")
    plain(axes)
    return result


def _below_one(axes: Axes) -> None:
    axes.axhspan(0, 1, color=PALE, zorder=0)
    axes.axhline(1, color=GRAY, linewidth=0.8)
