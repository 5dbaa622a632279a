"""Pictures of chapter 4: padding, packing, slots over steps, batches on the roofline, waiting under load, a stalled step."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from minillm.figures.picture import BLUE, COLORS, DARK, DOTS, GRAY, LINES, ORANGE, PALE, Picture, blank, picture, plain
from minillm.roofline.ceilings import Ceilings
from minillm.roofline.plot import roof
from minillm.roofline.position import Position

Slots = Sequence[Sequence[Hashable | None]]  # of each step, whose token each slot gave; None: computed for nobody
LIGHT = "#b9d3ea"


def padding(lengths: Sequence[int], new: int = 3) -> Picture:
    """Prompts of several lengths in one tensor, padded on the right and on the left. Numbers are positions."""
    T = max(lengths)
    alt = "padded on the right, the last tokens stand in different columns; on the left, all stand in the last one"
    result, axes = picture(alt, height=0.9 + 0.3 * len(lengths))
    width = T + new + 1.5
    blank(axes, 2 * width, len(lengths) + 2)
    axes.set_ylim(-0.2, len(lengths) + 2)
    titles = ("padded on the right: last tokens apart", "padded on the left: last tokens in one column")
    key = "pale: prompt   hatched: pad   blue: new tokens"
    for panel, title in enumerate(titles):
        left = panel * width + 0.5
        axes.text(left, len(lengths) + 1.5, title, fontsize=8.5, va="center")
        axes.text(left, len(lengths) + 0.45, key, fontsize=7.5, va="center")
        for row, length in enumerate(lengths):
            y, pads = len(lengths) - 1 - row, T - length
            first = pads if panel else 0  # column of the first token
            for column in range(T + new):
                if column >= T:
                    position, color, ink = column - pads, BLUE, "white"
                elif first <= column < first + length:
                    position, color, ink = column - first, LIGHT, DARK
                else:
                    _cell(axes, left + column, y, 0.92, hatch="////")
                    continue
                _cell(axes, left + column, y, 0.92, facecolor=color)
                weight = "bold" if position == length - 1 else "normal"
                _name(axes, left + column + 0.46, y + 0.44, str(position), ink, weight)
    return result


def packing(new: Sequence[int], cached: Sequence[int]) -> Picture:
    """One pass of continuous batching: the new tokens of all requests in one row, and what each of them attends over."""
    N = sum(new)
    longest = max(c + n for c, n in zip(cached, new, strict=True))
    alt = f"{N} tokens of {len(new)} requests in one row without padding; each attends over its own slot"
    result, axes = picture(alt, height=0.9 + 0.3 * len(new))
    blank(axes, N + longest + 10, len(new) + 1.7)
    axes.set_ylim(-0.9, len(new) + 1.2)
    left, middle = N + 9.5, (len(new) - 0.9) / 2
    axes.text(
        0.3, len(new) + 0.6, f"one packed row (1, {N}): for the linear layers, {N} tokens", fontsize=8.5, va="center"
    )
    axes.text(left - 4, len(new) + 0.6, "for attention, each its own slot", fontsize=8.5, va="center")
    x = 0.3
    for i, (n, old) in enumerate(zip(new, cached, strict=True)):
        name, (color, ink), y = chr(ord("A") + i), _look(i), len(new) - 1 - i
        axes.text(left - 0.4, y + 0.44, f"slot {i}: {name}", ha="right", va="center", fontsize=8)
        for j in range(n):
            _cell(axes, x + j, middle, 0.95, facecolor=color)
            _name(axes, x + j + 0.46, middle + 0.42, name, ink)
            _cell(axes, left + old + j, y, 0.95, facecolor=color)
            _name(axes, left + old + j + 0.46, y + 0.42, name, ink)
        for j in range(old):
            _cell(axes, left + j, y, 0.95, hatch="....")
        x += n
    axes.text(left, -0.3, "dotted: cached before   letters: new in this pass", fontsize=7.5, va="top")
    return result


def gantt(schedules: Mapping[str, Slots]) -> Picture:
    """Which request each slot worked for, step by step, one panel a schedule on one scale. Hatched: computed for nobody."""
    slots = max(len(step) for steps in schedules.values() for step in steps)
    longest = max(map(len, schedules.values()))
    alt = "slots over steps: " + ", ".join(f"{name} takes {len(steps)} steps" for name, steps in schedules.items())
    result, all_axes = picture(
        alt, height=0.4 + len(schedules) * (0.55 + 0.2 * slots), nrows=len(schedules), squeeze=False, sharex=True
    )
    for axes, (name, steps) in zip(all_axes[:, 0], schedules.items(), strict=True):
        seen: list[Hashable] = []
        for slot in range(slots):
            column = [step[slot] if slot < len(step) else "" for step in steps]  # "": there was no such slot
            start = 0
            for id, run in groupby(column):
                length = len(list(run))
                if id is None:
                    _cell(axes, start, slot + 0.06, length, height=0.88, facecolor="white", hatch="////")
                elif id != "":
                    if id not in seen:
                        seen.append(id)
                    color, ink = _look(seen.index(id))
                    _cell(axes, start, slot + 0.06, length, height=0.88, facecolor=color)
                    if length > 0.02 * longest:
                        _name(axes, start + length / 2, slot + 0.48, str(id), ink)
                start += length
        paid, used = sum(map(len, steps)), sum(id is not None for step in steps for id in step)
        axes.set_title(f"{name}: {len(steps)} steps, {used} of {paid} row-steps used", fontsize=9, loc="left")
        axes.set(xlim=(0, longest), ylim=(slots, 0), ylabel="slot")
        axes.set_yticks([])
        plain(axes)
    all_axes[-1, 0].set_xlabel("step of the model")
    return result


def throughput(
    batches: Sequence[int],
    predicted: Mapping[str, Sequence[float]],
    measured: Mapping[str, Sequence[float]],
    title: str,
) -> Picture:
    """Tokens a second of the whole system and of one user against the batch, from seconds a step by name. Lines: predicted."""
    result, all_axes = picture("tokens per second of all users and of one, against the batch", height=3.3, ncols=2)
    for axes, shared, ylabel in zip(
        all_axes, (True, False), ("tokens/s, all users", "tokens/s, each user"), strict=True
    ):
        for i, (name, seconds) in enumerate(predicted.items()):
            some = np.array(batches[: len(seconds)])  # a long context ends earlier
            rate = some**shared / np.asarray(seconds)
            axes.plot(some, rate, LINES[i], color=COLORS[i], linewidth=1.3, label=f"{name}, predicted")
            if name in measured:
                rate = some**shared / np.asarray(measured[name])
                axes.plot(some, rate, DOTS[i], color=COLORS[i], markersize=5, label=f"{name}, measured")
        axes.set(xscale="log", yscale="log", xlabel="batch B", ylabel=ylabel)
        axes.set_xticks(batches, [str(b) for b in batches])
        axes.minorticks_off()
        low, high = axes.get_ylim()
        ticks = [t * 10**e for e in range(7) for t in (1, 2, 5) if low <= t * 10**e <= high]
        axes.set_yticks(ticks, [f"{t:,}" for t in ticks])
        axes.grid(True, color="0.92")
        plain(axes)
    all_axes[0].legend(fontsize=7.5, frameon=False, loc="upper left")
    result.suptitle(title, fontsize=9)
    return result


def climb(
    panels: Mapping[str, Mapping[int, Position]], limits: Sequence[float], fits: Sequence[float], ceilings: Ceilings
) -> Picture:
    """Decode steps on the roofline: a panel a context, a marker a batch, hollow where the batch does not fit into memory.

    A dashed line stands at each panel's limit, the intensity that no batch passes.
    """
    alt = "markers climb the slope of the roofline as the batch grows and bunch up before the dashed limit"
    result, all_axes = picture(alt, height=3.2, ncols=len(panels), sharey=True, squeeze=False)
    points = [position for positions in panels.values() for position in positions.values()]
    low = min(p.cost.intensity for p in points) / 2
    high = 2.5 * max(ceilings.ridge, *limits)
    for axes, (title, positions), limit, most in zip(all_axes[0], panels.items(), limits, fits, strict=True):
        axes.plot(*roof(ceilings, low, high).T, color=DARK, linewidth=1.5)
        axes.axvline(limit, color=ORANGE, linestyle="--", linewidth=1.3)
        axes.plot([ceilings.ridge] * 2, [0, ceilings.peak], color=DARK, linewidth=0.8, linestyle=":")
        for i, (batch, position) in enumerate(positions.items()):
            fill = BLUE if batch <= most else "white"
            axes.plot(position.cost.intensity, position.achieved, "o", color=BLUE, markerfacecolor=fill, markersize=5)
            if i in (0, len(positions) - 1) or len(panels) < 3:
                axes.annotate(f"B = {batch:,}", (position.cost.intensity, position.achieved), xytext=(4, -9),
                              textcoords="offset points", fontsize=7.5)  # fmt: skip
        bottom = min(p.achieved for p in points) / 4
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, ceilings.peak * 4), xlabel="FLOP per byte")
        axes.text(limit / 1.12, bottom * 1.3, f"limit {limit:.3g}", fontsize=7.5, rotation=90, ha="right", color=ORANGE)
        axes.text(ceilings.ridge, ceilings.peak * 1.4, f"ridge {ceilings.ridge:.3g}", fontsize=7.5, ha="center")
        axes.set_title(title, fontsize=9)
        axes.grid(True, color="0.92")
        plain(axes)
    all_axes[0, 0].set_ylabel("FLOP/s")
    return result


def knee(
    rates: Sequence[float], ttft: Mapping[str, Sequence[float]], tokens: Sequence[float], goodput: Sequence[float]
) -> Picture:
    """A workload against its arrival rate: seconds to the first token, tokens a second, requests that kept the objective."""
    result, all_axes = picture(
        "TTFT, tokens per second and goodput against requests per second: a knee in each", 2.7, ncols=3
    )
    for i, (name, seconds) in enumerate(ttft.items()):
        all_axes[0].plot(rates, seconds, LINES[i], marker=DOTS[i], markersize=4, color=COLORS[i], label=name)
    all_axes[0].set(yscale="log", ylabel="TTFT, s")
    all_axes[0].legend(fontsize=7.5, frameon=False)
    all_axes[1].plot(rates, tokens, "-o", markersize=4, color=BLUE)
    all_axes[1].set(ylabel="tokens/s, all users", ylim=(0, None))
    all_axes[2].plot([0, max(rates)], [0, max(rates)], color=GRAY, linewidth=0.9, linestyle=":", label="all that come")
    all_axes[2].plot(rates, goodput, "-o", markersize=4, color=BLUE, label="goodput")
    all_axes[2].set(ylabel="requests/s", ylim=(0, 1.15 * max(rates)))
    all_axes[2].legend(fontsize=7.5, frameon=False, loc="upper left")
    for axes in all_axes:
        axes.set_xlabel("requests/s that arrive")
        axes.grid(True, color="0.92")
        plain(axes)
    return result


def spike(seconds: Sequence[float], tokens: Sequence[int], batches: Sequence[int]) -> Picture:
    """How long each step took, with the tokens in it: a step with a long prompt keeps everyone waiting."""
    result, axes = picture("milliseconds a step: low and even, but for one step with a long prompt in it", height=2.5)
    milliseconds = 1e3 * np.asarray(seconds)
    colors = [BLUE if n <= batch else ORANGE for n, batch in zip(tokens, batches, strict=True)]
    bars = axes.bar(range(1, len(seconds) + 1), milliseconds, color=colors, edgecolor=DARK, linewidth=0.5)
    for bar, n, batch in zip(bars, tokens, batches, strict=True):
        if n > batch:
            bar.set_hatch("////")
            x = bar.get_x() + bar.get_width() / 2
            axes.text(x, bar.get_height() + 0.02 * max(milliseconds), f"{n} tokens", ha="center", fontsize=8)
    axes.set(
        xlabel="step; hatched: with a prompt in it",
        ylabel="ms",
        ylim=(0, 1.15 * max(milliseconds)),
        xlim=(-1, len(seconds) + 2),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain(axes)
    return result


def _look(i: int) -> tuple[str, str]:
    """Face and ink of the i-th request: neighbours differ in lightness."""
    return ((BLUE, "white"), (PALE, DARK), (ORANGE, DARK), (LIGHT, DARK))[i % 4]


def _cell(
    axes: Axes, x: float, y: float, width: float, height: float = 0.88, facecolor: str = "white", hatch: str = ""
) -> None:
    style = {"facecolor": facecolor, "hatch": hatch, "edgecolor": DARK, "linewidth": 0.6}
    axes.add_patch(Rectangle((x, y), width, height, **style))  # type: ignore[arg-type]


def _name(axes: Axes, x: float, y: float, text: str, ink: str, weight: str = "normal") -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=ink, weight=weight)
